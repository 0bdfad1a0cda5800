"""Executables of per-tile kernels without a GPU: plans, parameters, calls, the workspace and the watchdog."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections import deque
from contextlib import nullcontext
from threading import RLock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import distgemm
from distgemm import GemmProblem, PlanError
from distgemm.gemm.per_tile import params as structs
from distgemm.gemm.per_tile.bind import RankGemm, Space, params_of
from distgemm.gemm.per_tile.epochs import EPOCHS, TICKET_BITS
from distgemm.gemm.per_tile.kernel import GATHERING, KernelTraits
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control, Params
from distgemm.gemm.per_tile.select import gemm_of
from distgemm.gemm.per_tile.verify import prove
from distgemm.runtime.cuda import per_tile, watchdog
from distgemm.runtime.cuda import workspace as workspaces
from distgemm.runtime.cuda.epoch_workspace import EpochValues, EpochWorkspace
from distgemm.runtime.cuda.per_tile import PerTileExecutable
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, Watchdog, explain_hang
from distgemm.runtime.cuda.watched import WatchedWorkspace
from distgemm.runtime.cuda.workspace import workspace_for
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import list_schedules, schedule_mesh_rank
from tests.unit.test_gemm_parameters import Recorded, RecordingDriver

GATHER, SCATTER, ALL_REDUCE = (
    "all_gather_1d_tiling_cd_rotating_a",
    "reduce_scatter_1d_pairwise_a",
    "all_reduce_1d_pairwise_a",
)
BY_COLUMNS = "all_reduce_1d_tiling_b_rotating_c"
TO_OWNERS, FROM_HOLDERS = "all_to_all_1d_rotating_d", "all_to_all_1d_rotating_a"
SCHEDULES = {
    "ag+gemm": GATHER,
    "gemm+rs": SCATTER,
    "gemm+ar": ALL_REDUCE,
    "gemm+a2a": TO_OWNERS,
    "a2a+gemm": FROM_HOLDERS,
}
EXECUTION = ExecutionConfig(execution="per_tile")
PROBLEM = GemmProblem(600, 336, 1920)

# --- from plans to GEMMs --------------------------------------------------------------------------------

ACCEPTED = {
    "all_gather_1d_bidirectional_full_a": ("ag+gemm", (3, 1, 2)),
    "all_gather_1d_bidirectional_split_a": ("ag+gemm", (2, 3, 1)),
    "all_gather_1d_ring_a": ("ag+gemm", (3, 2, 1)),
    GATHER: ("ag+gemm", (1, 2, 3)),
    "all_reduce_1d_one_shot_a": ("gemm+ar", (1, 2, 3)),
    "all_reduce_1d_pairwise_a": ("gemm+ar", (1, 2, 3)),
    "all_reduce_1d_tiling_a_rotating_c": ("gemm+ar", (3, 2, 1)),
    BY_COLUMNS: ("gemm+ar", (3, 2, 1)),
    TO_OWNERS: ("gemm+a2a", (1, 2, 3)),
    FROM_HOLDERS: ("a2a+gemm", (1, 2, 3)),
    SCATTER: ("gemm+rs", (1, 2, 3)),
    "reduce_scatter_1d_tiling_a_rotating_c": ("gemm+rs", (3, 2, 1)),
}
REFUSED = {
    "all_gather_1d_pairwise_xor_a": "all ranks at the same distances",
    "all_gather_1d_tiling_cd_rotating_b": "a schedule that gathers A",
    "all_gather_1d_tiling_k_rotating_a": "a schedule that gathers A",
    "all_to_all_1d_pairwise_xor_a": "one shard of columns of A in each iteration, all ranks at the same distances",
    "all_to_all_1d_pairwise_xor_d": "one shard of columns in each iteration, all ranks at the same distances",
    "reduce_scatter_1d_tiling_b_rotating_c": "scatters rows of D",
}


@pytest.mark.parametrize("schedule", list_schedules())
def test_every_schedule_is_executed_or_refused_by_name(schedule: str) -> None:
    axes = schedule_mesh_rank(schedule)
    mesh = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}[axes]
    plan = distgemm.make_plan(GemmProblem(512, 256, 1024), schedule, mesh=mesh, sync="barrier")
    if schedule in ACCEPTED:
        gemm = gemm_of(plan)
        assert (gemm.traits.pattern, gemm.distances) == ACCEPTED[schedule]
        a, d = plan.shard_shape("A", 1), plan.shard_shape("D", 1)
        by_columns, one_shot = schedule == BY_COLUMNS, schedule == "all_reduce_1d_one_shot_a"
        n = d[1] // 4 if by_columns else d[1]
        assert (gemm.rank_rows, gemm.n, gemm.k) == (512 if by_columns or one_shot else 128, n, a[1])
        assert gemm.by_columns == by_columns
        one = one_shot or gemm.spans or gemm.traits.pattern == "a2a+gemm"
        assert gemm.traits.one_shot == one_shot and gemm.order.shards == (1 if one else 4)
        assert gemm.traits.sends == gemm.traits.gathers == (gemm.traits.pattern in {"ag+gemm", "a2a+gemm"})
    else:
        message = REFUSED[schedule] if axes == 1 else r"one axis, got the mesh \(2, "
        with pytest.raises(PlanError, match=rf"^{schedule} is not executed per tile: .*{message}"):
            gemm_of(plan)


@pytest.mark.parametrize(
    ("problem", "options", "message"),
    [
        (GemmProblem(512, 256, 1024, 2), {}, "one matrix, got 2 batches; execution='multi_kernel'"),
        (GemmProblem(512, 256, 1024, dtype="float8_e4m3fn"), {}, "bfloat16 or float16, got float8_e4m3fn"),
        (GemmProblem(512, 256, 1024, dtype="float32"), {}, "bfloat16 or float16, got float32"),
        (GemmProblem(514, 256, 1024), {}, "extents that the number of ranks divides"),
        (GemmProblem(400, 256, 1024, m_per_rank=(100, 200, 50, 50)), {}, "equal shards"),
        (GemmProblem(512, 256, 1024), {"chunks": 2}, "chunks=1"),
        (GemmProblem(512, 256, 1020), {}, "1020 columns of bfloat16 on a rank; pad them to a multiple of 8"),
        (GemmProblem(512, 16, 1024), {}, "rows of D are multiples of 16 bytes, got 4 columns"),
    ],
    ids=str,
)
def test_gathers_that_are_refused(problem: GemmProblem, options: dict[str, Any], message: str) -> None:
    plan = distgemm.make_plan(problem, GATHER, 4, sync="barrier", **options)
    with pytest.raises(PlanError, match=message):
        gemm_of(plan)


def test_all_to_alls_that_are_refused() -> None:
    def plan(problem: GemmProblem, schedule: str = TO_OWNERS, **options: Any) -> distgemm.Plan:
        return distgemm.make_plan(problem, schedule, 4, sync="barrier", **options)

    equal = GemmProblem(512, 256, 1024)
    for refused, message in (
        (
            plan(dataclasses.replace(equal, n_per_rank=(64, 32, 96, 64))),
            r"equal shards, got D \(512, 64\) on rank 0 and \(512, 32\) on rank 1; execution='multi_kernel'",
        ),
        (
            plan(dataclasses.replace(equal, m_per_rank=(128, 128, 192, 64))),
            r"equal shards, got A \(128, 1024\) on rank 0 and \(192, 1024\) on rank 2; execution='multi_kernel'",
        ),
        (plan(equal, copies=2), "got the same columns of D on rank 0 and rank 1; execution='multi_kernel' executes it"),
        (plan(equal, chunks=2), "one shard of columns in each iteration.* with chunks=1 works"),
        (plan(dataclasses.replace(equal, n=48)), "rows of D are multiples of 16 bytes, got 12 columns"),
        (plan(dataclasses.replace(equal, k_per_rank=(256, 128, 384, 256)), FROM_HOLDERS), "equal shards"),
        (plan(equal, FROM_HOLDERS, chunks=2), "one shard of columns of A in each iteration.* with chunks=1 works"),
        (plan(dataclasses.replace(equal, k=48), FROM_HOLDERS), "rows of A and B are multiples .* got 12 columns"),
    ):
        with pytest.raises(PlanError, match=message):
            gemm_of(refused)
    # Each rank stores results as D has them.
    traits = gemm_of(plan(dataclasses.replace(equal, partial_dtype="float32"))).traits
    assert traits.partial_dtype == traits.out_dtype == "bfloat16"
    with pytest.raises(ValueError, match="slots have results in bfloat16, and no partial sums in float32"):
        dataclasses.replace(traits, partial_dtype="float32")


def test_other_plans_that_are_refused() -> None:
    with pytest.raises(PlanError, match="one rank exchanges nothing; execution='multi_kernel'"):
        gemm_of(distgemm.make_plan(GemmProblem(512, 256, 1024), GATHER, 1, sync="barrier"))
    with pytest.raises(PlanError, match=r"one shard of rows in each iteration.* with chunks=1 works"):
        gemm_of(distgemm.make_plan(GemmProblem(512, 256, 1024), SCATTER, 4, sync="barrier", chunks=2, chunk_mode="n"))
    with pytest.raises(PlanError, match="extents that the number of ranks divides"):  # ranks add m / 4 rows each
        gemm_of(distgemm.make_plan(GemmProblem(514, 256, 1024), ALL_REDUCE, 4, sync="barrier"))
    problem = GemmProblem(512, 256, 1024, out_dtype="float32", partial_dtype="bfloat16")
    with pytest.raises(ValueError, match="no wider than partial sums"):
        gemm_of(distgemm.make_plan(problem, ALL_REDUCE, 4, sync="barrier"))
    assert gemm_of(distgemm.make_plan(problem, SCATTER, 4, sync="barrier")).traits.out_dtype == "float32"
    with pytest.raises(ValueError, match="at most 262144 clusters"):
        gemm_of(distgemm.make_plan(GemmProblem(1 << 20, 1 << 18, 1024), GATHER, 4, sync="barrier"))


@pytest.mark.parametrize(
    ("schedule", "shape", "kernel", "stages"),
    [
        (GATHER, (2048, 4 * 768, 4096), "128x128x64_2x1_pingpong", 2),
        (GATHER, (2048, 4 * 2304, 16384), "256x144x64_1x2_cooperative", 1),
        (GATHER, (2048, 4 * 1280, 8192), "128x160x64_2x1_cooperative", 1),
        (GATHER, (2048, 4 * 3584, 4096), "128x224x64_2x1_cooperative", 1),
        (GATHER, (8192, 4 * 3584, 4096), "128x256x64_2x1_cooperative", 1),
        (GATHER, (128, 4 * 13312, 16384), "128x128x64_1x2_cooperative", 1),
        (SCATTER, (2048, 8192, 4 * 1024), "64x128x64_2x1_pingpong", 4),
        (SCATTER, (2048, 16384, 4 * 2048), "128x128x64_2x1_pingpong", 4),
        (SCATTER, (8192, 16384, 4 * 6656), "128x128x64_2x1_pingpong", 4),
        (GATHER, (128, 4 * 768, 4096), "64x64x64_1x2_pingpong_split_4", 1),
        (GATHER, (128, 4 * 1280, 8192), "64x64x64_1x2_pingpong_split_4", 1),
        (GATHER, (128, 4 * 3584, 4096), "64x64x64_2x2_pingpong_split_4", 1),
        (GATHER, (128, 4 * 2304, 16384), "64x64x64_2x2_pingpong_split_4", 1),
        (GATHER, (128, 4 * 7168, 8192), "64x128x64_2x1_pingpong", 2),
        (SCATTER, (128, 8192, 4 * 3584), "64x64x64_2x1_pingpong_split_2", 1),
        (ALL_REDUCE, (2048, 8192, 4 * 1024), "64x128x64_2x1_pingpong", 3),
    ],
)
def test_the_shape_decides_about_the_kernel(
    schedule: str, shape: tuple[int, int, int], kernel: str, stages: int
) -> None:
    plan = distgemm.make_plan(GemmProblem(*shape), schedule, 4, sync="barrier")
    traits = gemm_of(plan).traits
    assert traits.name.split()[-1] == kernel and traits.epilogue_stages == stages
    assert gemm_of(plan, "64x128x64_1x2_pingpong").traits.name.endswith("64x128x64_1x2_pingpong")
    for config in ("128x128x32_2x1_pingpong", "128x128x64_2x1_pingpong_swizzle_2", "16x32x16_1x1_plain"):
        with pytest.raises(ValueError, match="a per-tile kernel has 64 elements of k in a stage"):
            gemm_of(plan, config)


@pytest.mark.parametrize(
    ("schedule", "m", "config", "spans"),
    [
        (GATHER, 128, "128x128x64_1x2_cooperative", True),
        (GATHER, 128, "64x128x64_1x2_pingpong", True),
        (GATHER, 256, "64x128x64_1x2_pingpong", False),
        (GATHER, 4 * 128, "128x256x64_2x1_cooperative", True),  # half of a cluster would be padding
        (SCATTER, 4 * 128, "128x256x64_2x1_cooperative", True),
        (SCATTER, 4 * 256, "128x256x64_2x1_cooperative", False),
        (GATHER, 4 * 100, "128x256x64_2x1_cooperative", True),
        (SCATTER, 4 * 96, "128x256x64_2x1_cooperative", True),
        (SCATTER, 4 * 100, "128x256x64_2x1_cooperative", False),  # a warp's 16 rows would have two owners
        (ALL_REDUCE, 128, "128x256x64_2x1_cooperative", False),
    ],
)
def test_tiles_span_shards_that_are_shorter(schedule: str, m: int, config: str, spans: bool) -> None:
    gemm = gemm_of(distgemm.make_plan(GemmProblem(m, 512, 1024), schedule, 4, sync="barrier"), config)
    assert (gemm.spans, gemm.m, gemm.rank_rows) == (spans, m if spans else m // 4, m // 4)
    assert gemm.order.shards == (1 if spans else 4)
    assert prove(gemm).slots == 4 * gemm.flags


# --- the flags of a GEMM --------------------------------------------------------------------------------


def small_gemm(pattern: Any, ranks: int = 3, cluster: tuple[int, int] = (2, 1)) -> RankGemm:
    traits = KernelTraits(pattern, (128, 128), cluster, True, sends=pattern in GATHERING)
    return RankGemm(traits, tuple(range(1, ranks)), 200, 328, 640)


@pytest.mark.parametrize("pattern", SCHEDULES)
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
def test_flags_are_named_as_the_kernel_numbers_them(pattern: str, cluster: tuple[int, int]) -> None:
    """piece_slot_, sum_slot_ and result_slot_ of per_tile.cu."""
    gemm = small_gemm(pattern, cluster=cluster)
    rows, columns = (-(-2 // cluster[0]) * cluster[0], -(-3 // cluster[1]) * cluster[1])  # of whole clusters
    wanted: list[tuple[int, str]] = []
    if gemm.traits.gathers:
        what = "slice {} of k, for {} of its shard of A"
        if pattern == "a2a+gemm":
            what = "slice {} of its columns of A, for {} of this rank's rows"
        for distance, row, piece in itertools.product((1, 2), range(0, 200, 32), range(3)):
            wanted.append((distance, what.format(piece, f"rows {row} to {min(row + 31, 199)}")))
    else:
        kinds = ["the partial sum of tile {} of this rank's shard of D", "the result of tile {} of its shard of D"]
        kinds = kinds[: 1 + (pattern == "gemm+ar")]
        if pattern == "gemm+a2a":
            kinds = ["the result of tile {} of its rows of this rank's columns of D"]
        for kind in kinds:
            for distance, row, column in itertools.product((1, 2), range(rows), range(columns)):
                wanted.append((distance, kind.format((row, column))))
    assert [gemm.slot_of(number, 0) for number in range(gemm.flags)] == wanted


def test_flags_of_tiles_that_span_shards() -> None:
    """Of a gather, those of all ranks in their order, the reader's own, too; of a reduction, those of other ranks."""
    traits = KernelTraits("ag+gemm", (128, 128), (1, 2), sends=True)
    gemm = RankGemm(traits, (1, 2), 3 * 40, 328, 640, spans=True)
    wanted = [
        (sender, f"slice {piece} of k, for rows {rows} of its shard of A")
        for sender, rows, piece in itertools.product(range(3), ("0 to 31", "32 to 39"), range(3))
    ]
    assert [gemm.slot_of(number, 1) for number in range(gemm.flags)] == wanted
    assert gemm.slot_bytes == 120 * 3 * 512
    gemm = RankGemm(dataclasses.replace(traits, pattern="gemm+rs", sends=False), (1, 2), 3 * 32, 328, 640, spans=True)
    what = "the partial sum of this rank's rows of tile (0, {}) of D"
    parts = [column // 2 for column in range(8)]  # each tile has two
    wanted = [(sender, what.format(column)) for sender in (2, 0) for column in parts]
    assert [gemm.slot_of(number, 1) for number in range(gemm.flags)] == wanted


def one_shot_gemm(ranks: int = 3, m: int = 40) -> RankGemm:
    traits = KernelTraits("gemm+ar", (64, 128), (1, 2), True, one_shot=True)
    return RankGemm(traits, tuple(range(1, ranks)), m, 328, 640)


def test_packets_of_a_one_shot_kernel() -> None:
    """Sums carry their epochs, so there are no flags and slots, and no results come."""
    gemm = one_shot_gemm()
    assert (gemm.flags, gemm.slot_bytes, gemm.traits.takes) == (0, 0, False)
    assert gemm.packet_bytes == 3 * 4 * 40 * 4 * 96  # ranks, tiles, rows, threads of a row; 64 bytes and 6 epochs
    assert [(tile.distance, tile.column) for tile in gemm.order] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("m", [1, 8, 40, 64, 200])
@pytest.mark.parametrize(("tile", "pingpong"), [((64, 64), True), ((64, 96), True), ((128, 128), False)])
@pytest.mark.parametrize("partial_dtype", ["bfloat16", "float32"])
def test_packets_lie_apart(partial_dtype: str, tile: tuple[int, int], pingpong: bool, m: int) -> None:
    """exchange_sums_ in per_tile.cu: where the packets of all elements of D lie."""
    traits = KernelTraits("gemm+ar", tile, (1, 2), pingpong, partial_dtype=partial_dtype, one_shot=True)
    gemm = RankGemm(traits, (1, 2), m, 328, 64)
    size = 4 if partial_dtype == "float32" else 2
    packets, groups = -(-tile[1] * size // 4 // 12), -(-min(tile[0], m) // 8)
    parts, down = traits.parts, tile[0] // traits.parts // 64
    tiles = gemm.parts // parts
    places = set()
    for source, number, half, part, warp in itertools.product(
        range(3), range(tiles), range(2 * down), range(parts), range(4)
    ):
        first = (half // 2 * parts + part) * 64 + warp * 16 + half % 2 * 8
        row = number // (tiles // gemm.order.blocks) * tile[0] + first
        for lane, packet in itertools.product(range(32), range(packets)):
            if row + lane // 4 < m:
                of_rank = ((number * groups + first // 8) * packets + packet) * 512 + lane * 16
                places.add(source * tiles * groups * packets * 512 + of_rank)
    assert len(places) == 3 * m * tiles // gemm.order.blocks * 4 * packets  # no two are the same
    assert max(places) + 16 <= gemm.packet_bytes


@pytest.mark.parametrize("m", [1, 5, 64, 100])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_shot_plans_of_any_rows(m: int, ranks: int) -> None:
    plan = distgemm.make_plan(GemmProblem(m, 1024, 512 * ranks), "all_reduce_1d_one_shot_a", ranks, sync="barrier")
    gemm = gemm_of(plan)
    assert (gemm.m, gemm.n, gemm.k, gemm.ranks) == (m, 1024, 512, ranks)
    assert gemm.traits.tile == (64, 64) and gemm_of(plan, "128x128x64_2x1_pingpong").traits.one_shot
    wide = distgemm.make_plan(GemmProblem(m, 16384, 512 * ranks), "all_reduce_1d_one_shot_a", ranks, sync="barrier")
    assert gemm_of(wide).traits.tile in {(64, 64), (64, 128)}


# --- parameters -----------------------------------------------------------------------------------------


class Driver(RecordingDriver):
    """A driver that notes what it encodes, at addresses that it would take."""

    def cuTensorMapEncodeTiled(self, at: int, *given: Any) -> int:  # noqa: N802
        assert at % 64 == 0
        return super().cuTensorMapEncodeTiled(at, *given)

    def cuTensorMapReplaceAddress(self, at: int, address: int) -> int:  # noqa: N802
        assert at % 64 == 0
        Recorded.from_address(at).address = address
        return 0


@pytest.fixture
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "libcuda", Driver)


def tensors_of(gemm: RankGemm, terms: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: torch.zeros(each.shape, dtype=torch.bfloat16)
        for name, each in gemm.matrices.items()
        if terms or name != "gathered"
    }
    if terms:
        found |= {"bias": torch.zeros(gemm.n, dtype=torch.bfloat16), "c": torch.zeros_like(found["d"]), "beta": 0.5}
    return found


def space_of(gemm: RankGemm, rank: int) -> Space:
    return Space([1 << 40, 2 << 40, 3 << 40], rank, gemm.flags + 5, gemm.slot_bytes + 3000)


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("pattern", SCHEDULES)
@pytest.mark.parametrize("terms", [False, True])
def test_parameters_move_to_other_tensors(pattern: str, terms: bool) -> None:
    gemm = small_gemm(pattern)
    first, other = tensors_of(gemm, terms), tensors_of(gemm, terms)
    moved, wanted = (params_of(gemm, space_of(gemm, 1), **given, alpha=2.0, executable=3) for given in (first, other))
    assert bytes(moved) != bytes(wanted)
    at = [other[name].data_ptr() if name in other else 77 for name in ("a", "b", "d", "bias", "c", "gathered")]
    moved.move(*at)
    assert bytes(moved) == bytes(wanted)
    assert (moved.workspaces.rank, moved.workspaces.executable, moved.terms.alpha) == (1, 3, 2.0)


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("m", [1, 40])
def test_a_one_shot_kernel_has_one_matrix_and_all_ranks(m: int) -> None:
    gemm = one_shot_gemm(m=m)
    params = params_of(gemm, space_of(gemm, 1), **tensors_of(gemm))
    assert (params.order.shards, params.order.lead, params.workspaces.ranks, params.workspaces.rank) == (1, 0, 3, 1)
    for descriptor, columns in ((params.a, 640), (params.d, 328)):
        assert tuple(Recorded.from_buffer_copy(descriptor).extents) == (columns, m, 1)


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("pattern", SCHEDULES)
def test_descriptors_and_slots_lie_within_the_memory(pattern: str) -> None:
    gemm, given = small_gemm(pattern), tensors_of(small_gemm(pattern), terms=True)
    space = space_of(gemm, 2)
    params = params_of(gemm, space, **given)
    for name in {"a", "b", "d", "gathered"} & set(given):
        x = given[name]
        found = Recorded.from_buffer_copy(getattr(params, name))
        columns, rows, matrices = found.extents
        assert found.address == x.data_ptr()
        if beside := pattern == "a2a+gemm" and name in {"b", "gathered"}:
            assert columns == gemm.k and (rows, columns * matrices) == x.shape
        else:
            assert (rows * matrices, columns) == x.shape
        assert tuple(found.strides) == (x.shape[1] * 2, (columns if beside else rows * x.shape[1]) * 2)
    spaces = params.workspaces
    assert spaces.flags >= CONTROL_BYTES and spaces.flags + 2 * spaces.flags_of_buffer <= spaces.slots
    assert spaces.slots + 2 * spaces.slots_of_buffer == space.size
    if gemm.traits.gathers:
        for buffer, descriptor in enumerate(params.received):
            found = Recorded.from_buffer_copy(descriptor)
            start = (3 << 40) + spaces.slots + buffer * spaces.slots_of_buffer
            assert (found.address, *found.extents) == (start, 256, gemm.m, 2 * 3)  # shards, slices of each
            assert found.strides[1] * 2 * 3 <= spaces.slots_of_buffer


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("tile", [(128, 128), (128, 160), (128, 224), (256, 128)])
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "k"), ("m", "n")])
def test_boxes_fill_a_stage(tile: tuple[int, int], cluster: tuple[int, int], a_major: Any, b_major: Any) -> None:
    """The boxes that all blocks of a cluster load have the bytes that the barrier of a stage expects (load_)."""
    traits = KernelTraits("gemm+rs", tile, cluster, partial_dtype="float32", a_major=a_major, b_major=b_major)
    gemm = RankGemm(traits, (1, 2), 400, 328, 640)
    given = tensors_of(gemm)
    if a_major == "m":
        given |= {name: given[name].T.contiguous().T for name in "ab"}
    params = params_of(gemm, space_of(gemm, 0), **given)
    boxes, total = [Recorded.from_buffer_copy(x).box for x in (params.a, params.b)], 0
    for box, columns, blocks in zip(boxes, (tile[0], traits.loaded_columns), reversed(cluster), strict=True):
        copies = 1 if a_major == "k" else columns // box[0]
        assert box[0] == 64 and copies * box[0] * box[1] * blocks == columns * 64 and box[1] % 8 == 0
        total += copies * box[0] * box[1] * blocks * 2
    assert traits.stages * total <= 227 << 10
    if a_major == "k":
        assert (params.box_m, params.loaded_m) == (tile[0] // cluster[1],) * 2


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("m", [1, 4, 8, 9, 16, 40, 127])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_stage_has_the_rows_that_exist(blocks: int, m: int) -> None:
    """All rows of A are loaded, once, by boxes that begin where the swizzle does, and that have few other rows."""
    gemm = RankGemm(KernelTraits("gemm+rs", (128, 128), (1, blocks)), (1, 2), m, 328, 640)
    params = params_of(gemm, space_of(gemm, 0), **tensors_of(gemm))
    assert Recorded.from_buffer_copy(params.a).box[1] == params.box_m
    begins = [block * params.loaded_m for block in range(blocks) if block * params.loaded_m < m]  # of those that load
    loaded = [begin + row for begin in begins for row in range(params.box_m)]
    assert len(set(loaded)) == len(loaded) and set(range(m)) <= set(loaded) and max(loaded) < min(m + 15, 128)
    assert all(begin % 8 == 0 for begin in begins)
    assert params.box_m == min(params.loaded_m, m) and (blocks == 1 or m < 9 or len(begins) == 2)  # each loads a share


def test_more_rows_than_offsets_have_bits_for_are_refused() -> None:
    traits = KernelTraits("ag+gemm", (128, 256), (2, 1), sends=True)
    assert RankGemm(traits, (1,), 1 << 22, 512, 64).rank_rows == 1 << 22
    with pytest.raises(ValueError, match="a rank sends at most 4194304 rows, got 4194305"):
        RankGemm(traits, (1,), (1 << 22) + 1, 512, 64)
    assert RankGemm(dataclasses.replace(traits, sends=False), (1,), (1 << 22) + 1, 512, 64).m > 1 << 22


@pytest.mark.usefixtures("_driver")
def test_matrices_that_tma_cannot_copy_are_refused() -> None:
    gemm = small_gemm("gemm+rs")
    given = tensors_of(gemm)
    wide = torch.zeros(gemm.n, gemm.k + 4, dtype=torch.bfloat16)
    for name, x in (
        ("b", wide[:, : gemm.k]),
        ("a", torch.zeros(600 * 640 + 1, dtype=torch.bfloat16)[1:].view(600, 640)),
    ):
        with pytest.raises(ValueError, match=f"{name.upper()} begins at a multiple of 16 bytes"):
            params_of(gemm, space_of(gemm, 0), **(given | {name: x}))
    for name, x in (("bias", torch.zeros(gemm.n, 2)[:, 0]), ("c", torch.zeros(gemm.n, gemm.m).T)):
        with pytest.raises(ValueError, match="contiguous, got strides"):
            params_of(gemm, space_of(gemm, 0), **given, **{name: x}, beta=1.0)


# --- the workspace --------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of rank 1 of three."""

    def allocate(size: int, group: Any, device: Any) -> Any:
        return torch.empty(size, dtype=torch.uint8), 5, [0, 1, 2]

    def rendezvous(memory: torch.Tensor, group: Any) -> Any:
        return SimpleNamespace(buffer_ptrs=[1 << 40, memory.data_ptr(), 3 << 40])

    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    monkeypatch.setattr(workspaces, "allocate", allocate)
    monkeypatch.setattr(workspaces.symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(workspaces.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(workspaces, "raise_together", lambda problem, *_: None)
    for name, value in {"get_rank": 1, "get_world_size": 3}.items():
        monkeypatch.setattr(workspaces.dist, name, lambda *_, value=value, **__: value)


CPU = torch.device("cpu")
GROUP: Any = SimpleNamespace(group_name="tp")


def control_of(workspace: EpochWorkspace) -> Control:
    assert workspace.memory is not None
    return Control.from_address(workspace.memory.data_ptr())


@pytest.mark.usefixtures("pretended")
def test_a_workspace_begins_with_the_first_epoch_and_slots_of_nan() -> None:
    workspace = workspace_for(GROUP, CPU, 3000, 7, EpochWorkspace)
    assert workspace.memory is not None and workspace.flags == 1024
    control = control_of(workspace)
    assert control.clock == 1 << TICKET_BITS
    assert not any(bytes(control)[8:]) and (workspace.memory[CONTROL_BYTES:] == 0xFF).all()
    slots = workspace.slots_of(1)
    assert slots.numel() == 2 * 3072 and (slots == 0xFF).all()
    assert bool(slots.view(torch.bfloat16).isnan().all() and slots.view(torch.float32).isnan().all())
    assert workspace_for(GROUP, CPU, 3000, 1024, EpochWorkspace) is workspace
    larger = workspace_for(GROUP, CPU, 3001, 1025, EpochWorkspace)
    assert larger is not workspace and workspace.replaced and larger.flags == 1025
    assert workspace.peers == [0, 2]


@pytest.mark.usefixtures("pretended")
def test_a_workspace_has_packets_behind_the_slots() -> None:
    first = workspace_for(GROUP, CPU, 3000, 7, EpochWorkspace)
    workspace = workspace_for(GROUP, CPU, 3000, 7, EpochWorkspace, 512)
    assert workspace is not first and first.replaced and first.memory is not None and workspace.memory is not None
    assert workspace.memory.numel() == first.memory.numel() + 2 * 512
    assert workspace.slots_of(1).numel() == first.slots_of(1).numel() == 2 * 3072  # NaN fills these alone
    assert workspace_for(GROUP, CPU, 3000, 7, EpochWorkspace, 512) is workspace
    assert workspace_for(GROUP, CPU, 100, 7, EpochWorkspace) is workspace
    assert workspace_for(GROUP, CPU, 5000, 7, EpochWorkspace).packet_bytes == 512  # a larger one keeps them


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("epoch", [1, 2, 2**40, 0])
def test_what_the_memory_says(epoch: int) -> None:
    workspace = workspace_for(GROUP, CPU, 3000, 1025, EpochWorkspace)
    control = control_of(workspace)
    assert workspace.values(workspace.watched_memory()).idle
    control.running, control.executable, control.begun[1], control.begun[2] = 66, 4, epoch, (epoch - 1) % EPOCHS
    flags = workspace.watched_memory()[workspace.space.flags_at // 4 :].view(torch.int64)
    first = epoch % 2 * 1025
    flags[first : first + 1025] = torch.arange(1025) + epoch
    values = workspace.values(workspace.watched_memory())
    assert values[:3] == (66, 4, [0, epoch, (epoch - 1) % EPOCHS])
    assert torch.equal(values.flags, epoch + torch.arange(1025))
    assert not values.idle and values._replace(running=0).idle


# --- calls ----------------------------------------------------------------------------------------------


class PretendedLaunch:
    """A launch that notes its parameters and its stream."""

    launched: list[tuple[KernelTraits, bytes, int]]

    def __init__(self, traits: KernelTraits, params: Params, blocks: int, device: int) -> None:
        self.traits, self.params, self.blocks = traits, params, blocks

    def __call__(self, stream: int) -> None:
        self.launched.append((self.traits, bytes(self.params), stream))


class Pretended:
    """An executable of rank 1 of three on pretended streams.

    Attributes:
        exe: the executable.
        launched: what it launched.
        noted: what the order of calls and the watchdog got to know.
        capturing: whether the current stream is captured.
    """

    def __init__(
        self,
        pattern: str,
        monkeypatch: pytest.MonkeyPatch,
        problem: GemmProblem = PROBLEM,
        **options: bool,
    ) -> None:
        self.launched, self.noted, self.capturing = list[Any](), list[str](), False
        self.built: list[Any] = []
        PretendedLaunch.launched = self.launched
        order = SimpleNamespace(issuing=nullcontext)
        for name in ("begin", "end", "begin_captured", "end_captured"):
            setattr(order, name, lambda stream, name=name: self.noted.append(name))
        watched = SimpleNamespace(
            issued=lambda exe, out, stream: self.noted.append("issued"),
            raises_itself=lambda: None,
            give_up=lambda reason: self.noted.append(f"gave up: {reason}"),
        )
        cubin = SimpleNamespace(load_on=lambda device: self.built.append("loaded"))
        for name, value in {
            "build_together": lambda sources, rank, ranks: self.built.extend(sources),
            "describe_kernels": lambda sources, choices: "compiled",
            "open_cubin": lambda source, parameter: cubin,
            "Launch": PretendedLaunch,
        }.items():
            monkeypatch.setattr(per_tile, name, value)
        for name, value in {
            "check_agreement": self._agree,
            "raise_together": lambda problem, *_: None,
            "call_order": lambda device: order,
            "watchdog": lambda: SimpleNamespace(add=lambda workspace: watched),
        }.items():
            monkeypatch.setattr(f"distgemm.runtime.cuda.calls.{name}", value)
        properties = SimpleNamespace(major=9, multi_processor_count=132)
        for name, value in {
            "get_device_properties": lambda device: properties,
            "device": lambda device: nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        self.plan = distgemm.make_plan(problem, SCHEDULES[pattern], 3, sync="barrier")
        self.exe = PerTileExecutable(self.plan, GROUP, CPU, EXECUTION, timeout=5.0, **options)

    def _agree(self, plan: Any, arguments: str, group: Any, device: Any, problem: Exception | None) -> None:
        self.noted.append(arguments)
        if problem is not None:
            raise problem

    def tensors(self) -> list[torch.Tensor]:
        """A, B and D."""
        return [torch.zeros(self.plan.shard_shape(name, 1), dtype=torch.bfloat16) for name in "ABD"]


@pytest.mark.usefixtures("pretended", "_driver")
@pytest.mark.parametrize("pattern", SCHEDULES)
def test_a_call_is_one_launch(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretended(pattern, monkeypatch)
    exe, launched = there.exe, there.launched
    assert there.built == [*exe.sources(), "loaded"] and "execution='per_tile'" in there.noted.pop()
    assert (exe.provider, exe.transfers, exe.number) == ("cutlass", "per-tile kernel", 1)
    sets = [there.tensors() for _ in range(3)]
    for a, b, d in (*sets, *sets):
        assert exe(a, b, out=d) is d
        traits, params, stream = launched.pop()
        assert traits == exe.gemm.traits and stream == 7 and not launched
        assert params == bytes(
            params_of(exe.gemm, exe.workspace.space, a, b, d, gb_per_s=exe.gemm.traits.gb_per_s, executable=1)
        )
        assert there.noted == ["begin", "end", "issued"]
        there.noted.clear()
    assert len(exe._calls) == 1
    a, b, d = sets[0]
    new = exe(a, b)
    assert new.shape == d.shape and new.dtype == d.dtype
    bias = torch.zeros(d.shape[1], dtype=torch.bfloat16)
    exe(a, b, d.clone(), alpha=0.5, beta=2.0, bias=bias, out=d)
    terms = Params.from_buffer_copy(launched[-1][1]).terms
    assert (terms.alpha, terms.beta, terms.bias) == (0.5, 2.0, bias.data_ptr()) and terms.c
    turned = exe(a, b.T.contiguous().T)
    assert launched[-1][0].b_major == "n" and turned.shape == d.shape
    for number in range(40):
        exe(a, b, alpha=float(number))
    assert len(exe._calls) == per_tile.MAX_CALLS


@pytest.mark.usefixtures("pretended", "_driver")
def test_tensors_that_share_bytes_are_checked_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretended("gemm+rs", monkeypatch)
    a, b, d = there.tensors()
    c = torch.zeros(400, 336, dtype=torch.bfloat16)
    there.exe(a, b, c[:200], beta=1.0, out=d)
    with pytest.raises(ValueError, match="out shares memory with C's shard"):
        there.exe(a, b, c[:200], beta=1.0, out=c[100:300])
    assert len(there.launched) == 1


@pytest.mark.usefixtures("pretended", "_driver")
def test_captured_calls_keep_the_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretended("ag+gemm", monkeypatch)
    exe, (a, b, d) = there.exe, there.tensors()
    there.noted.clear()
    there.capturing = True
    exe(a, b, out=d)
    assert there.noted == ["begin_captured", "end_captured"] and exe.workspace.kept == [exe]
    there.capturing = False
    replay = exe.capture(a, b)
    first = there.launched[0][1]
    for _ in range(2):
        assert replay() is replay.out
    exe(a, torch.zeros_like(b), out=d)  # a call with other tensors moves other parameters
    replay()
    assert there.launched[1] == there.launched[2] == there.launched[4] and there.launched[1][1] != first
    exe.release()
    assert not exe.workspace.kept


@pytest.mark.usefixtures("pretended", "_driver")
def test_calls_that_are_refused_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretended("ag+gemm", monkeypatch)
    exe, (a, b, d) = there.exe, there.tensors()
    there.noted.clear()
    one = torch.ones(1)
    whole, wide = (torch.zeros(600, columns, dtype=torch.bfloat16) for columns in (1920, 1921))
    for message, options in (
        ("takes no scale_a; execution='multi_kernel' does", {"scale_a": one}),
        ("takes no scale_b", {"scale_b": one}),
        ("gathered shares memory with the shard of A", {"a": whole[:200], "gathered": whole}),
        ("the gathered A begins at a multiple of 16 bytes", {"gathered": torch.zeros_like(wide)[:, :1920]}),
        ("beta is not 0", {"beta": 1.0}),
        ("bias on rank 1 is", {"bias": torch.zeros(3, dtype=torch.bfloat16)}),
        ("A's shard on rank 1 has contiguous rows that do not overlap, got strides", {"a": a.T.contiguous().T}),
        ("A's shard on rank 1 has contiguous rows", {"a": a[:1].expand(200, 1920)}),
        ("rows of D are contiguous", {"out": d.T.contiguous().T}),
        ("A begins at a multiple of 16 bytes", {"a": torch.zeros(384001, dtype=torch.bfloat16)[1:].view(200, 1920)}),
        ("A's shard on rank 1 has shape", {"a": a[1:]}),
    ):
        with pytest.raises(ValueError, match=message):
            exe(options.pop("a", a), b, **{"out": d, **options})
        assert not there.launched and not there.noted, message
    assert not exe._calls


def cut(x: torch.Tensor) -> torch.Tensor:
    """A dense matrix of the same shape, which begins two bytes behind a multiple of 16."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.usefixtures("pretended", "_driver")
@pytest.mark.parametrize("pattern", SCHEDULES)
def test_what_tma_cannot_read_is_copied_if_that_is_allowed(
    pattern: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for calls that "auto" executes: they do not say that a kernel has TMA."""
    a, b, d = Pretended(pattern, monkeypatch).tensors()
    bias = torch.zeros(2 * d.shape[1], dtype=torch.bfloat16)[::2]
    calls = (
        ({"a": cut(a)}, "copies A"),
        ({"b": cut(b)}, "copies B"),
        ({"b": cut(b.T).T}, "copies B"),
        ({"b": torch.zeros(b.shape[0], b.shape[1] + 4, dtype=b.dtype)[:, : b.shape[1]]}, "copies B"),
        ({"bias": bias}, "copies bias"),
        ({"c": d.T.contiguous().T}, "copies C"),
    )
    for options, message in calls:
        given = {"a": a, "b": b, "c": torch.zeros_like(d), "bias": None, **options}
        call = (given["a"], given["b"], given["c"])
        with pytest.raises(ValueError, match=r"multiple of 16 bytes|contiguous"):
            Pretended(pattern, monkeypatch).exe(*call, beta=1.0, bias=given["bias"])
        there = Pretended(pattern, monkeypatch, copies=True)
        caplog.clear()
        for _ in range(2):
            assert there.exe(*call, beta=1.0, bias=given["bias"]).shape == d.shape
        assert len(there.launched) == 2 and len(caplog.records) == 1 and message in caplog.text
        assert all(traits == there.exe.gemm.traits for traits, _, _ in there.launched)  # all copies have rows
        assert Params.from_buffer_copy(there.launched[-1][1]).shard % 16 == 0
    there = Pretended(pattern, monkeypatch, copies=True)
    given = cut(a)
    replay = there.exe.capture(given, b, alpha=0.5)
    assert not there.launched
    for _ in range(2):
        assert replay() is replay.out
    found = [Params.from_buffer_copy(params) for _, params, _ in there.launched]
    assert len(found) == 2 and all(each.shard % 16 == 0 and each.terms.alpha == 0.5 for each in found)
    there = Pretended(pattern, monkeypatch, copies=True)
    caplog.clear()
    there.exe(a, b, torch.zeros_like(d), beta=1.0, bias=bias[: d.shape[1] // 2].repeat(2))
    assert Params.from_buffer_copy(there.launched[-1][1]).shard == a.data_ptr() and not caplog.records


@pytest.mark.usefixtures("pretended", "_driver")
def test_columns_of_b_have_another_kernel_and_the_same_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where columns of B are contiguous, a stage of a tile with 160 columns has 192."""
    problem = GemmProblem(6144, 1920, 1024)
    found = []
    for turned_b in (False, True):
        there = Pretended("ag+gemm", monkeypatch, problem, turned_b=turned_b)
        a, b, d = there.tensors()
        there.exe(a, b, out=d)
        there.exe(a, b.T.contiguous().T, out=d)
        found.append((there.exe.gemm, there.built, [traits for traits, _, _ in there.launched]))
    (one, built, launched), (other, built_turned, launched_turned) = found
    assert one.traits.tile[1] == other.traits.tile[1] == 160
    assert (one.traits.loaded_columns, other.traits.loaded_columns) == (160, 192)
    assert (one.traits.b_major, other.traits.b_major) == ("k", "n")
    assert (one.flags, one.slot_bytes) == (other.flags, other.slot_bytes)
    assert built[0] == one.traits.source() and built_turned[0] == other.traits.source()
    assert launched == launched_turned == [one.traits, other.traits]


@pytest.mark.usefixtures("pretended", "_driver")
def test_tensors_that_tma_refuses_leave_earlier_calls_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretended("gemm+rs", monkeypatch)
    (a, b, d), (other_a, other_b, other_d) = there.tensors(), there.tensors()
    replace_address = Driver.cuTensorMapReplaceAddress

    def refuse(self: Any, at: int, address: int) -> int:
        return 1 if address == other_b.data_ptr() else replace_address(self, at, address)

    there.exe(a, b, out=d)
    monkeypatch.setattr(Driver, "cuTensorMapReplaceAddress", refuse)
    monkeypatch.setattr(structs, "error_text", lambda error: "refused")
    with pytest.raises(ValueError, match="TMA cannot go on with a matrix"):
        there.exe(other_a, other_b, out=other_d)
    there.exe(a, b, out=d)
    (_, first, _), (_, second, _) = there.launched
    assert first == second


@pytest.mark.usefixtures("pretended", "_driver")
def test_a_launch_that_fails_ends_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, too."""
    for error, said in ((KeyboardInterrupt(), "KeyboardInterrupt"), (RuntimeError("no memory"), "no memory")):
        there = Pretended("ag+gemm", monkeypatch)
        exe, (a, b, _) = there.exe, there.tensors()
        monkeypatch.setattr(PretendedLaunch, "__call__", mock.Mock(side_effect=error))
        with pytest.raises(type(error)):
            exe(a, b)
        assert there.noted[-1] == f"gave up: {GATHER} on rank 1 failed as it was issued: {said}"
    exe.workspace.dead = "rank 0 did not come"
    with pytest.raises(ReplayTimeoutError, match="rank 0 did not come; no executable on this workspace"):
        exe(a, b)


@pytest.mark.usefixtures("pretended")
def test_all_ranks_learn_of_a_plan_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is compiled for it."""
    there = Pretended("ag+gemm", monkeypatch)
    there.built.clear()
    plan = distgemm.make_plan(GemmProblem(600, 336, 1920), GATHER, 3, sync="barrier", chunks=2)
    with pytest.raises(PlanError, match="chunks=1"):
        PerTileExecutable(plan, GROUP, CPU, EXECUTION, timeout=5.0)
    assert there.built == [] and "execution='per_tile'" in there.noted[-1]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=10, name="B200"))
    with pytest.raises(ValueError, match="for Hopper GPUs, got B200"):
        PerTileExecutable(there.plan, GROUP, CPU, EXECUTION, timeout=5.0)
    assert there.built == []


def test_options_that_do_not_go_together() -> None:
    for given in ({"wait_by": "kernel"}, {"merge_copies": True}, {"provider": "cublas"}):
        with pytest.raises(ValueError, match="execution='per_tile'"):
            ExecutionConfig(execution="per_tile", **given)  # type: ignore[arg-type]
    assert EXECUTION.provider == "cutlass"


# --- the watchdog ---------------------------------------------------------------------------------------


def values_of(exe: PerTileExecutable, epoch: int, missing: list[int], begun: list[int]) -> EpochValues:
    flags = torch.full((exe.gemm.flags + 9,), epoch)
    flags[missing] = epoch - 2
    return EpochValues(66, exe.number, begun, flags)


@pytest.mark.usefixtures("pretended", "_driver")
def test_the_message_says_what_a_replay_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    exe = Pretended("gemm+rs", monkeypatch).exe
    text, ranks = exe.awaited(values_of(exe, 8, [0, 1], [8, 8, 8]))
    assert ranks == [2] and text == (
        "it waits for rank 2 at the partial sum of tile (0, 0) of this rank's shard of D (and 1 more)"
    )
    text, ranks = exe.awaited(values_of(exe, 8, [exe.gemm.flags - 1], [7, 8, 8]))
    assert (
        ranks == [0] and "rank 0 at the partial sum" in text and text.endswith("; ranks [0] have not begun this replay")
    )
    text, ranks = exe.awaited(values_of(exe, 0, [], [EPOCHS - 1, 0, 1]))  # epochs have wrapped around
    assert ranks == [0] and text.endswith("ranks [0] have not begun this replay")
    text, ranks = exe.awaited(values_of(exe, 8, [], [9, 8, 8]))
    assert ranks == [] and "its kernel has not ended" in text
    found = explain_hang(exe, values_of(exe, 8, [0], [8, 8, 8]), 2.0)
    assert found.startswith(f"{SCATTER} on rank 1 of 3 has not ended within 2 s: it waits for rank 2 at")


@pytest.mark.usefixtures("pretended", "_driver")
def test_a_one_shot_replay_waits_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no flags: a rank that has not begun the replay has not sent its sums."""
    monkeypatch.setitem(SCHEDULES, "gemm+ar", "all_reduce_1d_one_shot_a")
    exe = Pretended("gemm+ar", monkeypatch).exe
    text, ranks = exe.awaited(values_of(exe, 8, [], [7, 8, 8]))
    assert ranks == [0] and text == "it waits for partial sums; ranks [0] have not begun this replay"
    text, ranks = exe.awaited(values_of(exe, 8, [], [8, 8, 8]))
    assert ranks == [0, 2] and text == "it waits for partial sums, or its kernel has not ended"


def watched_of(workspace: EpochWorkspace) -> Any:
    watched: Any = WatchedWorkspace.__new__(WatchedWorkspace)
    watched.workspace, watched.store, watched.lock, watched.under_way = workspace, SimpleNamespace(), RLock(), None
    watched.pending, watched.free_events, watched.ended, watched.failure = deque(), deque(), 0, None
    watched.warned, watched.failed, watched.last_change, watched.informed = False, False, (None, 0.0), set()
    watched.failing_since = None
    watched.read_flags = lambda: workspace.watched_memory().numpy().tobytes()
    watched.use_own_context = lambda: None
    watched.store.set, watched.stream = lambda *_: None, None
    return watched


@pytest.mark.usefixtures("pretended", "_driver")
@pytest.mark.parametrize("gone", [False, True])
def test_a_replay_is_stuck_once_nothing_has_changed(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a graph that the caller captured, which nobody has issued."""
    exe = Pretended("gemm+ar", monkeypatch).exe
    exe.timeout = 20.0
    workspace, control = exe.workspace, control_of(exe.workspace)
    now, died = [0.0], list[tuple[float, str]]()
    monkeypatch.setattr(watchdog, "reason_of_other_rank", lambda store: None)
    monkeypatch.setattr(watchdog, "has_ended", lambda process: gone and process == 0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog, watched = Watchdog(), watched_of(workspace)
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append((now[0], message)))

    def look(until: float) -> None:
        while now[0] < until and not died:
            now[0] += 0.5
            dog.look(watched)

    look(40)  # nothing is under way
    control.running, control.executable, control.begun[1], control.begun[2] = 66, exe.number, 1, 1
    look(42)
    control.clock += 5
    look(44)
    assert not died
    look(100)
    ((at, message),) = died
    assert "on rank 1 of 3" in message and "ranks [0] have not begun this replay" in message
    if gone:
        assert at < 50 and message.endswith("the processes of ranks [0] have ended")
    else:
        assert 62 <= at <= 65


@pytest.mark.usefixtures("pretended", "_driver")
def test_slots_are_nan_before_the_kernel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its results become NaN, and nothing else is written: the other ranks have their own watchdogs."""
    exe = Pretended("gemm+rs", monkeypatch).exe
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(watchdog, "finished_ranks", lambda store, ranks: set())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    workspace, control = exe.workspace, control_of(exe.workspace)
    control.running, control.executable, control.begun[1] = 66, exe.number, 1
    watched, did = watched_of(workspace), list[str]()
    watched.poison = lambda rank: did.append(f"poison {rank}")

    def write(addresses: list[int], value: int) -> None:
        did.append(f"write {value}")
        for address in addresses:
            ctypes.c_uint32.from_address(address).value = value
        control.running *= value != 2  # the kernel ends

    watched.write_flags = write
    out = torch.zeros(2)
    end = SimpleNamespace(query=lambda: control.dead == 2)
    watched.pending.append(SimpleNamespace(executable=exe, end=end, out=lambda: out))
    Watchdog().free(watched, {0})
    assert did == ["write 1", "poison 1", "write 2", "poison 1"] and control.dead == 2
    assert out.isnan().all() and not watched.pending and watched.under_way is None
