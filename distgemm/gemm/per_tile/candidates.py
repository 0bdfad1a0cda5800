"""The kernels that are worth a try, by name, and what a rank multiplies with one of them for a schedule."""

from __future__ import annotations

import re
from dataclasses import replace

from distgemm.arguments import wrong
from distgemm.gemm.per_tile.bind import RankGemm
from distgemm.gemm.per_tile.kernel import BYTES, KernelTraits
from distgemm.gemm.per_tile.order import distances_of
from distgemm.plan.patterns import schedule_does_pattern
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import PATTERNS, DistributedTileScheduler, Pattern

__all__ = ["KERNELS", "rank_gemm", "traits_of"]

KERNELS = (
    "128x256_2x1_cooperative",
    "128x128_2x1_pingpong",
    "64x256_2x1_pingpong",
    "64x128_2x1_pingpong",
    "64x128_1x2_pingpong",
)
"""Tile, cluster and kernel schedule: from large products to small ones. The last is for shards of 64 rows."""

NAME = re.compile(r"(\d+)x(\d+)_(\d)x(\d)_(cooperative|pingpong)")


def traits_of(name: str, pattern: Pattern, sends: bool = True) -> KernelTraits:
    """The kernel of a name such as ``128x256_2x1_cooperative``.

    Args:
        name: tile, cluster and kernel schedule.
        pattern: the pattern.
        sends: whether the kernel of a gather sends the shard.

    Raises:
        ValueError: for a name that is none, and for a tile that does not fit.
    """
    found = NAME.fullmatch(name)
    if not found:
        raise wrong("per_tile", f"a kernel such as {KERNELS[0]}", name)
    tile_m, tile_n, cluster_m, cluster_n = map(int, found.groups()[:4])
    gathers, pingpong, size = pattern == "ag+gemm", found[5] == "pingpong", tile_m * tile_n
    # What was measured to be best: a large tile that sends needs room for operands, and sums of peers come sooner with
    # more stages.
    if gathers:
        epilogue_stages = 1 if sends and size > 128 * 128 else 2
    elif pingpong and size == 128 * 128:
        epilogue_stages = 4 if pattern == "gemm+rs" else 3
    else:
        epilogue_stages = 2
    return KernelTraits(
        pattern,
        (tile_m, tile_n),
        (cluster_m, cluster_n),
        pingpong,
        sends=sends and gathers,
        epilogue_stages=epilogue_stages,
    )


def rank_gemm(schedule: DistributedTileScheduler, kernel: str, problem: GemmProblem) -> RankGemm:
    """What each rank multiplies for a schedule, with a kernel of KERNELS or of another such name.

    Args:
        schedule: one of :data:`distgemm.schedulers.PATTERNS` on one axis, tile by tile.
        kernel: its name.
        problem: of all ranks. Shards have as many rows as the largest.

    Raises:
        ValueError: for a name that is none, for a schedule of another pattern, and for what these kernels cannot do.
        PlanError: for a schedule with other orders on other ranks.
    """
    pattern = next((each for each in PATTERNS if schedule_does_pattern(schedule.name, each)), None)
    if pattern is None:
        raise ValueError(f"per-tile kernels do {', '.join(PATTERNS)} of rows, and {schedule.name} does none of them")
    types = (problem.dtype, str(problem.out_dtype), str(problem.partial_dtype))
    if problem.l != 1 or problem.m_per_rank is not None or not set(types) <= set(BYTES):
        raise ValueError(
            f"per-tile kernels take one batch, equal shards, and types of {', '.join(BYTES)}; got l {problem.l}, "
            f"m_per_rank {problem.m_per_rank} and {', '.join(types)}"
        )
    ranks = schedule.world_size
    m, n, k = -(-problem.m // ranks), problem.n, problem.k
    n, k = (-(-n // ranks), k) if pattern == "ag+gemm" else (n, -(-k // ranks))
    dtype, out_dtype, partial_dtype = types
    traits = replace(traits_of(kernel, pattern), dtype=dtype, out_dtype=out_dtype, partial_dtype=partial_dtype)
    return RankGemm(traits, distances_of(schedule), m, n, k)
