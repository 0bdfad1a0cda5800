"""Which kernel executes a plan tile by tile, and what each rank multiplies with it."""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod
from typing import Literal

from distgemm.gemm.per_tile.bind import RankGemm, may_span
from distgemm.gemm.per_tile.kernel import BYTES, GATHERING, KernelTraits
from distgemm.gemm.per_tile.model import Costs, predict_per_tile
from distgemm.gemm.per_tile.order import distances_of
from distgemm.gemm.spec import GemmConfig
from distgemm.plan.patterns import does_pattern
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.schedulers import Pattern
from distgemm.simulator.machine import Machine

__all__ = [
    "CONFIGS",
    "FLAT",
    "FLAT_M",
    "MACHINE",
    "ONE_SHOT",
    "ONE_SHOT_TALL",
    "ROW_BYTES",
    "SPANNING",
    "configs_of",
    "gemm_of",
    "traits_of",
]

LARGE = "128x256x64_2x1_cooperative"
WIDE = ("256x192x64_1x2_cooperative", "256x160x64_1x2_cooperative", LARGE)
NARROW = "256x144x64_1x2_cooperative"
BETWEEN = ("128x224x64_2x1_cooperative", "128x192x64_2x1_cooperative", "128x160x64_2x1_cooperative")
SMALL = ("128x128x64_2x1_pingpong", "64x128x64_2x1_pingpong", "64x128x64_1x2_pingpong")
CONFIGS: dict[Pattern, tuple[str, ...]] = {
    "ag+gemm": (*WIDE, NARROW, *BETWEEN, *SMALL),
    "a2a+gemm": (*WIDE, *BETWEEN, *SMALL),
    "gemm+rs": (LARGE, *SMALL),
    "gemm+ar": (LARGE, *SMALL),
    "gemm+a2a": (WIDE[0], LARGE, BETWEEN[1], *SMALL),
}
"""Those that are worth a try, from large products to small ones. The last one is for shards of 64 rows."""
FLAT = "128x128x64_1x2_pingpong"
"""That of reductions whose shards have no more rows than one such tile: half of a cluster of 2x1 would be padding."""
SHORT_M = 64
FLAT_M = 128
"""Rows of a shard, up to which clusters of one row of tiles are worth a try: with tiles of 64 rows, and with FLAT."""
FEW = ("128x128x64_1x2_cooperative", "64x64x64_1x2_pingpong", "64x128x64_1x2_pingpong")
SPLIT = "64x64x64_2x1_pingpong_split_2"
SPANNING: dict[Pattern, tuple[str, ...]] = {
    "ag+gemm": (*FEW, SPLIT, *(f"64x64x64_{cluster}_pingpong_split_4" for cluster in ("1x2", "2x1", "2x2"))),
    "gemm+rs": (*FEW, "64x64x64_2x1_pingpong", SPLIT),
}
"""Those of few rows whose tiles span shards. Thread blocks split k where SMs would be idle without that."""
ONE_SHOT = ("64x64x64_1x2_pingpong", "64x128x64_1x2_pingpong", "64x64x64_1x1_pingpong_split_2")
ONE_SHOT_TALL = ("64x64x64_2x1_pingpong", "64x128x64_2x1_pingpong", SPLIT)
"""Those of one-shot all-reduces: of up to SHORT_M rows, and of more, with clusters of 128 rows that read B once."""
MACHINE = "h200"
"""The machine of all predictions, whatever the GPU: they only say which kernels are worth measuring."""
EPILOGUE_STAGES: dict[Pattern, tuple[int, int]] = {
    "ag+gemm": (1, 2),
    "gemm+rs": (4, 4),
    "gemm+ar": (1, 3),
    "gemm+a2a": (1, 3),
    "a2a+gemm": (1, 2),
}
"""Of a cooperative kernel, and of a pingpong kernel: the fastest ones in docs/per_tile_measured.md. With four, a
cooperative "gemm+rs" has room for a whole tile of 128x256, so its warps need not wait for the link. All-to-alls have
not been measured: theirs are those of the kernels whose warp 1 does the same. A kernel that splits k has one, which
holds a tile of 64x64, since its shared memory also has sums."""
ROW_BYTES = 16
"""Bytes that divide each row which TMA copies."""


def configs_of(plan: Plan) -> tuple[str, ...]:
    """The configurations that are worth a try for a plan. If no kernel executes it, the first one stands for all."""
    pattern = _pattern_of(plan) if plan.world_size > 1 else None
    if pattern is None:
        return (LARGE,)
    if _is_one_shot(plan):
        return ONE_SHOT if plan.problem.m <= SHORT_M else ONE_SHOT_TALL
    by_columns = pattern == "gemm+ar" and _is_by_columns(plan)
    m = plan.problem.m // (1 if by_columns else plan.world_size)
    # The last one equals the one before, unless half of that one's clusters would be padding.
    found = CONFIGS[pattern] if m <= SHORT_M else CONFIGS[pattern][:-1]
    if pattern in {"gemm+rs", "gemm+ar"} and m <= FLAT_M:
        found = (*found, FLAT)
    few = SPANNING.get(pattern, ())
    spanning = [config for config in few if may_span(traits_of(config, pattern), plan.world_size, m)]
    return tuple(dict.fromkeys((*found, *spanning)))


def traits_of(
    config: str,
    pattern: Pattern,
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    partial_dtype: str = "bfloat16",
    turned_b: bool = False,
    one_shot: bool = False,
) -> KernelTraits:
    """The kernel of a configuration, for dense tensors.

    Args:
        config: tile, cluster and kernel schedule, such as ``128x256x64_2x1_cooperative``; and by how many thread blocks
            k is split, such as ``64x64x64_2x2_pingpong_split_4``.
        pattern: the pattern.
        dtype: as in :class:`KernelTraits`.
        out_dtype: as there.
        partial_dtype: as there.
        turned_b: whether columns of B are contiguous, and not its rows.
        one_shot: as there.

    Raises:
        ValueError: for a configuration that no per-tile kernel has.
    """
    found = GemmConfig.parse(config)
    other = (found.tile[2], found.epilogue, found.raster, found.swizzle, found.share)
    if other != (64, "tma", "heuristic", 1, 1):
        raise ValueError(
            f"a per-tile kernel has 64 elements of k in a stage, and a configuration like {LARGE} or {SPLIT}, "
            f"without direct, raster, swizzle and share, got {config}"
        )
    pingpong = found.kernel_schedule == "pingpong"
    return KernelTraits(
        *(pattern, found.tile[:2], found.cluster, pingpong, dtype, out_dtype, partial_dtype),
        b_major="n" if turned_b else "k",
        sends=pattern in GATHERING,
        one_shot=one_shot,
        epilogue_stages=1 if found.split > 1 else EPILOGUE_STAGES["ag+gemm" if one_shot else pattern][pingpong],
        split=found.split,
    )


def gemm_of(plan: Plan, config: str | None = None, *, turned_b: bool = False) -> RankGemm:
    """What each rank of a plan multiplies, tile by tile, if its tensors are dense.

    Args:
        plan: the plan.
        config: tile, cluster and schedule of the kernel, as "128x256x64_2x1_cooperative"; None: that of
            :func:`configs_of` that the model predicts to be fastest.
        turned_b: whether columns of B are contiguous, and not its rows.

    Raises:
        PlanError: for a plan that is not executed per tile. The message says why, and what would work.
        ValueError: for a configuration that no per-tile kernel has, and for more tiles than a kernel has tickets.
    """
    problem, ranks = plan.problem, plan.world_size

    def refuse(why: str, instead: str = "execution='multi_kernel' executes it") -> PlanError:
        return PlanError(f"{plan.schedule} is not executed per tile: {why}; {instead}")

    if ranks == 1:
        raise refuse("one rank exchanges nothing")
    if problem.l != 1:
        raise refuse(f"it takes one matrix, got {problem.l} batches")
    if max(plan.mesh) != prod(plan.mesh):
        raise refuse(f"its ranks lie along one axis, got the mesh {plan.mesh}")
    if BYTES.get(problem.dtype) != 2:  # and so there are no scales
        raise refuse(f"its operands are bfloat16 or float16, got {problem.dtype}")
    out_dtype, partial_dtype = str(problem.out_dtype), str(problem.partial_dtype)
    for name, dtype in (("out_dtype", out_dtype), ("partial_dtype", partial_dtype)):
        if dtype not in BYTES:
            raise refuse(f"{name} is one of {', '.join(BYTES)}, got {dtype}")
    pattern = _pattern_of(plan)
    if pattern is None:
        for name in "ABD":
            first, *others = (plan.shard_shape(name, rank) for rank in range(ranks))
            for rank, shape in enumerate(others, 1):
                if shape != first:
                    raise refuse(
                        f"its ranks hold equal shards, got {name} {first} on rank 0 and {shape} on rank {rank}",
                        "execution='multi_kernel' executes it; or take extents that the number of ranks divides",
                    )
        if plan.box("D", 0) == plan.box("D", 1) and plan.shard_shape("D", 0)[1] < problem.n:
            raise refuse("it takes D without copies, got the same columns of D on rank 0 and rank 1")
        raise refuse(
            "its ranks hold equal shards: of rows of A and of columns of D for a gather, of k for a reduction, with "
            "rows of D or all of D; for an all-to-all of rows of A or D and columns of the other one, with all of B. "
            f"Rank 0 holds A {plan.box('A', 0)[1:]}, B {plan.box('B', 0)[1:]}, D {plan.box('D', 0)[1:]} of "
            f"m={problem.m}, n={problem.n}, k={problem.k}",
            "take a schedule that gathers A, scatters rows of D or exchanges A or D, without copies, and extents that "
            "the number of ranks divides; or execution='multi_kernel'",
        )
    one_shot, by_columns = _is_one_shot(plan), pattern == "gemm+ar" and _is_by_columns(plan)
    m = problem.m if one_shot or by_columns else problem.m // ranks
    n, k = plan.shard_shape("D", 0)[1] // (ranks if by_columns else 1), plan.shard_shape("A", 0)[1]
    for what, columns, dtype in (("A and B", k, problem.dtype), ("D", n, out_dtype)):
        if columns * DTYPE_BYTES[dtype] % ROW_BYTES:
            raise refuse(
                f"rows of {what} are multiples of {ROW_BYTES} bytes, got {columns} columns of {dtype} on a rank",
                f"pad them to a multiple of {ROW_BYTES // DTYPE_BYTES[dtype]}",
            )
    mode: Literal["m", "n", "k"] = "k" if pattern == "a2a+gemm" else "n" if pattern == "gemm+a2a" or by_columns else "m"
    distances = tuple(range(1, ranks)) if one_shot else distances_of(plan, mode)
    if pattern == "gemm+a2a":
        partial_dtype = out_dtype  # nothing is added to what a rank sends but the terms

    def gemm(config: str, turned_b: bool = False) -> RankGemm:
        traits = traits_of(config, pattern, problem.dtype, out_dtype, partial_dtype, turned_b, one_shot)
        spans = may_span(traits, ranks, m)
        found = RankGemm(traits, distances, m * ranks if spans else m, n, k, by_columns=by_columns, spans=spans)
        assert found.order.clusters  # it is made, and checked
        return found

    def time_of(config: str) -> float:
        try:
            return _predicted_us(gemm(config))
        except ValueError:  # if no kernel is left, the error is raised below
            return inf

    try:
        if config is None:
            config = min(configs_of(plan), key=time_of)
        return gemm(config, turned_b)
    except ValueError as error:
        raise ValueError(f"{plan.schedule} is not executed per tile: {error}") from error


@lru_cache(maxsize=1024)
def _predicted_us(gemm: RankGemm) -> float:
    return predict_per_tile(gemm, Costs(Machine.load(MACHINE))).time


def _pattern_of(plan: Plan) -> Pattern | None:
    """The pattern whose equal shards the ranks of a plan hold; None: of no pattern that has kernels."""
    equal = all(len({plan.shard_shape(name, rank) for rank in range(plan.world_size)}) == 1 for name in "ABD")
    pattern = next((pattern for pattern in EPILOGUE_STAGES if does_pattern(plan, pattern)), None)
    divided = plan.problem.n if pattern == "gemm+ar" and _is_by_columns(plan) else plan.problem.m
    return None if not equal or (divided % plan.world_size and not _is_one_shot(plan)) else pattern


def _is_by_columns(plan: Plan) -> bool:
    """Whether the ranks of a reduction divide the columns of D, and not the rows."""
    return plan.grid.m == 1 < plan.grid.n


def _is_one_shot(plan: Plan) -> bool:
    """Whether each rank multiplies all of D at once, and has all of it in the end: it adds all partial sums itself."""
    return (plan.grid.m, plan.grid.n) == (1, 1) and does_pattern(plan, "gemm+ar")
