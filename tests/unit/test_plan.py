"""Plans: shards, bytes, workspace, order, and what they are compared and stored by."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref

import pytest

import distgemm
from distgemm.layouts import Axis, TVLayout
from distgemm.plan.ops import Copy, Gemm, Reduce, Signal, View, Wait, box_size
from distgemm.plan.plan import SLOT_ALIGNMENT, Mechanism
from distgemm.plan.problem import DTYPE_BYTES, DTYPES
from distgemm.schedulers import schedule_mesh_rank
from distgemm.schedulers.scheduler import WHOLE
from distgemm.viz.text import show_plan

NAMES = [name for name in distgemm.list_schedules() if name.startswith(("all_gather_1d", "reduce_scatter_1d"))]
GATHERS = [name for name in NAMES if name.startswith("all_gather")]
SCATTERS = [name for name in NAMES if name.startswith("reduce_scatter")]


def sizes(name: str) -> tuple[int, ...]:
    return (1, 2, 4, 8) if "xor" in name else (1, 2, 3, 4, 5, 8)


def torch_chunk(extent: int, parts: int) -> list[tuple[int, int]]:
    """torch.chunk's bounds, with the empty parts that it leaves out."""
    length = -(-extent // parts)
    bounds, start = [], 0
    for _ in range(parts):
        stop = min(start + length, extent)
        bounds.append((start, stop))
        start = stop
    return bounds


def sharded_axis(name: str, operand: str) -> int | None:
    """Which matrix axis of an operand is split over the ranks; None for no axis."""
    if name.startswith("reduce_scatter"):
        return {"A": 1, "B": 1, "D": 1 if "tiling_b" in name else 0}[operand]
    if "rotating_b" in name:
        return {"A": 0, "B": 0, "D": 0}[operand]
    return {"A": 1 if "tiling_k" in name else 0, "B": 0, "D": 1}[operand]


@pytest.mark.sample(6)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_shards_are_torch_chunks_whatever_the_chunks(name: str, chunks: int):
    for size in sizes(name):
        for m, n, k, l in ((17, 5, 40, 1), (1, 2, 3, 2), (64, 64, 64, 1)):  # noqa: E741
            plan = distgemm.make_plan(distgemm.GemmProblem(m=m, n=n, k=k, l=l), name, size, chunks=chunks)
            for operand, shape in (("A", (m, k)), ("B", (n, k)), ("D", (m, n)), ("C", (m, n))):
                axis = sharded_axis(name, "D" if operand == "C" else operand)
                for rank in range(size):
                    bounds = [(0, extent) for extent in shape]
                    bounds[axis] = torch_chunk(shape[axis], size)[rank]
                    wanted = tuple(slice(*bound) for bound in bounds)
                    assert plan.shard(operand, rank) == (wanted if l == 1 else (slice(0, l), *wanted))
                    lengths = tuple(stop - start for start, stop in bounds)
                    assert plan.shard_shape(operand, rank) == (lengths if l == 1 else (l, *lengths))


def test_a_single_rank_has_everything_and_sends_nothing():
    for name in NAMES:
        plan = distgemm.make_plan(distgemm.GemmProblem(m=7, n=8, k=9), name, 1, chunks=2)
        assert plan.shard("D", 0) == (slice(0, 7), slice(0, 8))
        assert plan.link_bytes() == {}
        assert plan.workspace_bytes(0) == 0
        assert {op.kind for op in plan.ops(0)} == {"Gemm"}


# --- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_total_bytes_are_those_of_the_collective(name: str, dtype: str):
    m, n, k, l = 16, 24, 32, 2  # noqa: E741
    for size in (2, 4, 8):
        for chunks in (1, 2):
            problem = distgemm.GemmProblem(m=m, n=n, k=k, l=l, dtype=dtype, partial_dtype="float32")
            plan = distgemm.make_plan(problem, name, size, chunks=chunks)
            moved = {"reduce": m * n * 4, "b": n * k * DTYPE_BYTES[dtype], "a": m * k * DTYPE_BYTES[dtype]}
            kind = "reduce" if name in SCATTERS else name[-1]
            assert sum(plan.link_bytes().values()) == l * (size - 1) * moved[kind]
            assert all(src != dst and count > 0 for (src, dst), count in plan.link_bytes().items())


def test_bytes_do_not_depend_on_workspace_or_sync():
    problem = distgemm.GemmProblem(m=33, n=17, k=9)
    for name in NAMES:
        links = [
            distgemm.make_plan(problem, name, 4, chunks=2, workspace=workspace, sync=sync).link_bytes()
            for workspace in ("full", "bounded")
            for sync in ("credit", "barrier")
        ]
        assert links.count(links[0]) == 4


def test_empty_shards_send_nothing():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=2, n=8, k=4), "all_gather_1d_tiling_cd_rotating_a", 4)
    assert plan.shard_shape("A", 3) == (0, 4)
    assert all(src < 2 for src, _ in plan.link_bytes())
    assert all(box_size(op.dst.box) for op in plan.ops(0) if isinstance(op, Copy))


# --- workspace -------------------------------------------------------------------------------------------------


def aligned(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_workspace_equals_the_documented_formulas(size: int, chunks: int):
    m, n, k = 32 * size * chunks, 16 * size * chunks, 8 * size * chunks
    problem = distgemm.GemmProblem(m=m, n=n, k=k)
    for name in NAMES:
        if "xor" in name and size & (size - 1):
            continue
        plan = distgemm.make_plan(problem, name, size, chunks=chunks)
        parts = size * chunks
        if name in GATHERS:
            whole = n * k if "rotating_b" in name else m * k
            wanted = (size - 1) * chunks * aligned(whole // parts * 2)
        else:
            # What arrives, and the results that are being sent; with two ranks every other result is an own one.
            sending = (1 if size == 2 else 2) if "pairwise" in name else min(2, chunks)
            wanted = ((size - 1) * chunks + sending) * aligned(m * n // parts * 2)
        assert {plan.workspace_bytes(rank) for rank in range(size)} == {wanted}, name


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_bounded_workspace_runs_the_chain_in_two_rounds_of_chunks(size: int, chunks: int):
    problem = distgemm.GemmProblem(m=16 * size * chunks, n=16 * size * chunks, k=8 * size)
    for name in ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"):
        plan = distgemm.make_plan(problem, name, size, chunks=chunks, workspace="bounded")
        plan.verify()
        tiles = {box_size(op.out.box) for op in plan.ops(0) if isinstance(op, Gemm)}
        assert plan.workspace_bytes(0) == 2 * chunks * aligned(max(tiles) * 2)


RAGGED = [(7, 5, 3), (100, 60, 36), (384, 384, 384), (13, 40, 9)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mechanism", ["push", "pull", "store"])
@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_bounded_workspace_is_never_larger_than_full(name: str, mechanism: Mechanism):
    """Also if tiles differ in size, so that a slot that two tiles share is larger than one of them."""
    meshes = {1: [(2,), (4,), (5,), (8,)], 2: [(2, 2), (3, 2)], 3: [(2, 1, 3)]}[schedule_mesh_rank(name)]
    for mesh, chunks, shape, partial in itertools.product(meshes, (1, 2, 3), RAGGED, (None, "float32")):
        if "xor" in name and mesh == (5,):
            continue
        problem = distgemm.GemmProblem(*shape, partial_dtype=partial)
        full, bounded = (
            distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks, mechanism=mechanism, workspace=workspace)
            for workspace in ("full", "bounded")
        )
        for rank in range(full.world_size):
            assert bounded.workspace_bytes(rank) <= full.workspace_bytes(rank), (mesh, chunks, shape, partial, rank)
        bounded.verify()


@pytest.mark.parametrize("final_add", ["epilogue", "kernel"])
def test_a_bounded_ring_takes_at_most_two_rounds_of_slots(final_add: str):
    for name, size, chunks in itertools.product(
        ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"), (3, 4, 5, 8), (1, 2, 4)
    ):
        for partial in (None, "float32"):
            # Where tiles are empty, ranks idle, and tiles wait longer for the next rank.
            problem = distgemm.GemmProblem(64 * size, 64 * size, 8 * size, partial_dtype=partial)
            plan = distgemm.make_plan(problem, name, size, chunks=chunks, workspace="bounded", final_add=final_add)
            assert max(map(len, plan.slots)) <= 2 * chunks, (name, size, chunks, partial)


@pytest.mark.parametrize("mechanism", ["push", "pull", "store"])
@pytest.mark.parametrize("name", [name for name in distgemm.list_schedules() if name.startswith("all_reduce")])
def test_an_all_reduce_reduces_on_a_rank_that_multiplies(name: str, mechanism: Mechanism):
    """With fewer columns of A than ranks, some ranks have nothing to multiply, and only get the result."""
    for size, k in ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (8, 5)):
        problem = distgemm.GemmProblem(m=8 * size, n=8 * size, k=k)
        plan = distgemm.make_plan(problem, name, size, mechanism=mechanism)
        plan.verify()
        whole = 2 * problem.m * problem.n
        contributors = len({op.rank for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)})
        one_shot = distgemm.get_schedule(name, size).route.final_copies is None
        moved = contributors * (size - 1) if one_shot else contributors - 1 + size - 1
        assert sum(plan.link_bytes().values()) == whole * moved


def test_workspace_stays_within_one_gathered_operand_or_one_d():
    problem = distgemm.GemmProblem(m=4096, n=4096, k=4096)
    for name in GATHERS:
        assert distgemm.make_plan(problem, name, 8).workspace_bytes(0) <= 4096 * 4096 * 2
    chain = distgemm.make_plan(problem, "reduce_scatter_1d_tiling_a_rotating_c", 8)
    pairwise = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", 8, chunks=2)
    assert max(chain.workspace_bytes(0), pairwise.workspace_bytes(0)) <= 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("k", "dtype", "pitch"),
    [(8, "bfloat16", 8), (7, "bfloat16", 8), (9, "float16", 16), (16, "float8_e4m3fn", 16), (17, "float8_e4m3fn", 32)]
    + [(1, "float32", 4), (5, "tfloat32", 8), (3, "float64", 4), (4, "float64", 4)],
)
def test_rows_in_slots_start_at_multiples_of_16_bytes(k: int, dtype: str, pitch: int):
    """The rows of a tile are padded where they have to be, the caller's and the extents of GEMMs never."""
    problem = distgemm.GemmProblem(m=12, n=8, k=k, l=2, dtype=dtype)
    plan = distgemm.make_plan(problem, "all_gather_1d_tiling_cd_rotating_a", 4)
    plan.verify()
    views = [view for rank in range(4) for op in plan.ops(rank) for view in vars_of(op)]
    assert {view.pitch for view in views if view.buffer == "slot"} == {pitch}
    assert {view.pitch for view in views if view.buffer == "A"} == {k}
    assert {view.pitch for view in views if view.buffer == "D"} == {2}, "columns of a shard"
    gemms = [op for rank in range(4) for op in plan.ops(rank) if isinstance(op, Gemm)]
    assert {(op.a.box[2], op.b.box[2]) for op in gemms} == {((0, k), (0, k))}
    assert {slot.elements for slots in plan.slots for slot in slots} == {2 * 3 * pitch}
    assert {plan.workspace_bytes(rank) for rank in range(4)} == {3 * aligned(2 * 3 * pitch * DTYPE_BYTES[dtype])}
    # Padding stays at home.
    assert set(plan.link_bytes().values()) == {2 * 3 * k * DTYPE_BYTES[dtype]}
    assert plan.padded_rows == (((k, pitch),) if k != pitch else ())


def test_padding_is_shown():
    def note(**extents: int) -> list[str]:
        plan = distgemm.make_plan(distgemm.GemmProblem(**extents), "tensor_parallel_2d_rs", mesh=(2, 2))
        return [line for line in show_plan(plan).splitlines() if "padded" in line]

    assert note(m=32, n=32, k=32) == []
    assert note(m=32, n=32, k=28) == ["rows padded to 16 bytes: 14 -> 16 elements"]
    assert note(m=32, n=20, k=14) == ["rows padded to 16 bytes: 5 -> 8, 7 -> 8 elements"]


def test_slots_do_not_overlap_and_start_aligned():
    for name in NAMES:
        plan = distgemm.make_plan(distgemm.GemmProblem(m=13, n=11, k=7), name, 4, chunks=2)
        for rank in range(4):
            end = 0
            for slot in plan.slots[rank]:
                assert slot.offset == end and slot.offset % SLOT_ALIGNMENT == 0
                assert slot.bytes >= slot.elements * DTYPE_BYTES[slot.dtype]
                end += slot.bytes
            assert end == plan.workspace_bytes(rank)
        views = [view for rank in range(4) for op in plan.ops(rank) for view in vars_of(op) if view.buffer == "slot"]
        assert views
        for view in views:
            slot = plan.slots[view.rank][view.slot]
            assert view.pitch * DTYPE_BYTES[slot.dtype] % 16 == 0 and view.elements <= slot.elements


# --- ops -------------------------------------------------------------------------------------------------------


def test_beta_c_is_added_once_by_the_owner_in_its_last_iteration():
    for name in NAMES:
        for chunks in (1, 2):
            plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), name, 4, chunks=chunks)
            added: dict[tuple, list[int]] = {}
            for rank in range(4):
                last: dict[tuple, int] = {}
                for op in plan.ops(rank):
                    if isinstance(op, (Gemm, Reduce)):
                        last[op.out.box] = op.id
                for op in plan.ops(rank):
                    if isinstance(op, (Gemm, Reduce)) and op.c is not None:
                        assert op.out.buffer == "D" and last[op.out.box] == op.id
                        added.setdefault(op.out.box, []).append(rank)
            assert sum(map(box_size, added)) == 16 * 16
            assert all(len(ranks) == 1 for ranks in added.values())


@pytest.mark.parametrize("partial", ["bfloat16", "float32"])
def test_partial_sums_rest_in_their_own_type(partial: str):
    """Only a finished tile is rounded to the type of D."""
    problem = distgemm.GemmProblem(m=16, n=16, k=16, partial_dtype=partial)
    for name in NAMES:
        plan = distgemm.make_plan(problem, name, 4, chunks=2)
        for op in (op for rank in range(4) for op in plan.ops(rank) if isinstance(op, (Gemm, Reduce))):
            if op.c is None and partial != "bfloat16":
                assert op.out.buffer == "slot"
            if op.out.buffer == "slot":
                assert plan.slots[op.rank][op.out.slot].dtype == partial
    pairwise = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", 4)
    slots = tuple(tuple(slot._replace(dtype="float16") for slot in slots) for slots in pairwise.slots)
    with pytest.raises(distgemm.PlanError, match=f"rounds to float16 in .* where this sum is {partial}"):
        dataclasses.replace(pairwise, slots=slots).verify()


def test_chains_add_in_place_in_the_epilogue_and_pairwise_adds_once():
    problem = distgemm.GemmProblem(m=16, n=16, k=16)
    chain = distgemm.make_plan(problem, "reduce_scatter_1d_tiling_a_rotating_c", 4)
    assert not any(isinstance(op, Reduce) for op in chain.ops(0))
    gemms = [op for op in chain.ops(0) if isinstance(op, Gemm)]
    assert [len(op.sources) for op in gemms] == [0, 1, 1, 1]
    assert all(op.sources == (op.out,) for op in gemms[1:3]) and gemms[3].out.buffer == "D"
    pairwise = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", 4, chunks=2)
    sums = [op for op in pairwise.ops(0) if isinstance(op, Reduce)]
    assert [len(op.sources) for op in sums] == [4, 4]
    assert not any(op.sources for op in pairwise.ops(0) if isinstance(op, Gemm))


@pytest.mark.parametrize("together", [False, True])
def test_a_chain_adds_in_the_epilogue_only_what_was_multiplied_before(together: bool):
    """Where both ranks multiply a tile in one iteration, the GEMM would wait for all of the other: a Reduce adds."""
    chain = distgemm.get_schedule("gemm+rs", 2)
    both = TVLayout((2,), (2,), ((Axis(2, value=1),), WHOLE, (Axis(2, rank=1),), WHOLE))
    schedule = distgemm.DistributedTileScheduler(
        "chain", chain.partition, both if together else chain.work, chain.route
    )
    plan = distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), schedule)
    plan.verify()
    for rank in range(2):
        kinds = sorted(op.kind for op in plan.ops(rank) if isinstance(op, (Gemm, Reduce)))
        assert kinds == (["Gemm", "Gemm", "Reduce"] if together else ["Gemm", "Gemm"])


def test_ops_name_rank_iteration_tile_slot_and_dependencies():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "gemm+rs", 4)
    for rank in range(4):
        ids = [op.id for op in plan.ops(rank)]
        assert len(set(ids)) == len(ids)
        for position, op in enumerate(plan.ops(rank)):
            assert op.rank == rank and 0 <= op.iteration < plan.iterations
            assert op.tile and op.operand in "ABD" and set(op.deps) <= set(ids[:position])
            if isinstance(op, Copy):
                assert op.slot == op.dst.slot and op.src.rank == rank != op.dst.rank


def test_ops_are_frozen_and_those_that_anyone_makes():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "gemm+rs", 4, sync="barrier")
    seen = set()
    for op in plan.ops(1):
        fields = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
        again = type(op)(**fields)
        assert again == op and type(again) is type(op) and hash(again) == hash(op)
        assert dataclasses.replace(op, id=99) == type(op)(**{**fields, "id": 99})
        with pytest.raises(dataclasses.FrozenInstanceError):
            op.id = 99  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError):
            del op.id
        seen.add(op.kind)
    assert seen == {"Gemm", "Copy", "Signal", "Wait", "Barrier"}


def test_flags_are_signalled_and_waited_for_once():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_bidirectional_split_a", 5)
    ops = [op for rank in range(5) for op in plan.ops(rank)]
    signals = [op.flag for op in ops if isinstance(op, Signal)]
    waits = [op.flag for op in ops if isinstance(op, Wait)]
    assert sorted(signals) == sorted(waits) == sorted(set(waits))
    assert all(flag.initial == int(flag.credit) for flag in waits)


def test_empty_tiles_stay_in_the_grid_and_emit_no_ops():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=3, n=2, k=5), "all_gather_1d_tiling_cd_rotating_a", 4, chunks=2)
    assert tuple(plan.grid) == (8, 4, 1, 1)
    views = [view for rank in range(4) for op in plan.ops(rank) for view in vars_of(op)]
    assert views and all(box_size(view.box) for view in views)
    assert {op.kind for op in plan.ops(2)} == {"Wait", "Copy", "Signal"}, "no columns of D, but a row of A to send"
    assert plan.ops(3) == ()


def vars_of(op: object) -> list[View]:
    found: list[View] = []
    for field in dataclasses.fields(op):  # type: ignore[arg-type]
        value = getattr(op, field.name)
        if isinstance(value, View):
            found.append(value)
        elif field.name == "sources":
            found += value
    return found


# --- identity ----------------------------------------------------------------------------------------------------


def test_equal_arguments_give_the_same_plan_object():
    problem = distgemm.GemmProblem(m=32, n=32, k=32)
    first = distgemm.make_plan(problem, "ag+gemm", 4)
    assert distgemm.make_plan(distgemm.GemmProblem(32, 32, 32), "AllGather1D_TilingCD_RotatingA", mesh=(4,)) is first
    assert distgemm.make_plan(problem, distgemm.get_schedule("ag+gemm", 4)) is first
    assert distgemm.make_plan(problem, "ag+gemm", 4, chunks=2) != first


def test_json_gives_the_plan_back_and_the_digest_tells_plans_apart():
    digests = set()
    for name in NAMES:
        for chunks in (1, 2):
            plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=8, k=7, m_per_rank=None), name, 4, chunks=chunks)
            again = distgemm.Plan.from_json(plan.to_json())
            assert again == plan and hash(again) == hash(plan) and again.digest == plan.digest
            again.verify()
            digests.add(plan.digest)
    assert len(digests) == 2 * len(NAMES)


@pytest.mark.sample(1)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_and_planning_leaves_it_nothing(enabled: bool):
    scheduler = distgemm.get_schedule("tensor_parallel_3d", mesh=(2, 2, 2))
    problem = distgemm.GemmProblem(m=64 + enabled, n=64, k=64)  # not planned yet
    gc.collect()
    gc.enable() if enabled else gc.disable()
    try:
        plan = distgemm.make_plan(problem, scheduler)
        assert gc.isenabled() == enabled
        plan.verify()
        assert gc.isenabled() == enabled
        with pytest.raises(distgemm.PlanError):
            plan.replace_ops(0, plan.ops(0)[:-1]).verify()
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
        del plan
        assert gc.collect() < 100, "circles are cut"
    finally:
        gc.enable()


def test_garbage_of_others_is_collected_as_soon_as_without_a_plan():
    class Circle:
        itself: object

    gc.collect()
    circle = Circle()
    circle.itself, found = circle, weakref.ref(circle)
    del circle
    distgemm.make_plan(distgemm.GemmProblem(m=1003, n=64, k=64), "ag+gemm", 4).verify()
    gc.collect(1)
    assert found() is None


def test_replace_ops_leaves_the_plan_as_it_was():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=8, k=7), "ag+gemm", 4)
    before = plan.ops(1)
    changed = plan.replace_ops(1, before[:-1])
    assert plan.ops(1) == before and changed.ops(1) == before[:-1] and changed.ops(2) is plan.ops(2)
    assert changed != plan and changed.digest != plan.digest


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: plan.ops(4), "rank is an integer from 0 to 3, got 4"),
        (lambda plan: plan.replace_ops(-1, ()), "rank is an integer from 0 to 3, got -1"),
        (lambda plan: plan.shard("A", 4), "rank is an integer from 0 to 3, got 4"),
        (lambda plan: plan.shard("E", 0), "operand is one of A, B, C, D, got 'E'"),
        (lambda plan: plan.workspace_bytes(9), "rank is an integer from 0 to 3, got 9"),
    ],
)
def test_what_does_not_exist_is_refused(call, message: str):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=8, k=7), "ag+gemm", 4)
    with pytest.raises(ValueError, match=message):
        call(plan)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, "ag+gemm", 4), {}, "problem is a distgemm.GemmProblem"),
        ((distgemm.GemmProblem(8, 8, 8), 3, 4), {}, "schedule is the name of a schedule or a DistributedTileScheduler"),
        ((distgemm.GemmProblem(8, 8, 8), "ag+gemm", 4), {"workspace": "small"}, "workspace is one of full, bounded"),
        ((distgemm.GemmProblem(8, 8, 8), "ag+gemm", 4), {"sync": "none"}, "sync is one of credit, barrier"),
        (
            (distgemm.GemmProblem(8, 8, 8), distgemm.get_schedule("ag+gemm", 4), 5),
            {},
            r"world_size is an integer, 4 as",
        ),
        ((distgemm.GemmProblem(8, 8, 8), distgemm.get_schedule("ag+gemm", 4)), {"chunks": 2}, "is made already"),
        ((distgemm.GemmProblem(8, 8, 8, m_per_rank=(4, 4)), "ag+gemm", 4), {}, "2 entries for 4 ranks"),
        ((distgemm.GemmProblem(8, 8, 8, m_per_rank=(8, 8)), "ag+gemm", 2), {}, "makes 16 in all"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        distgemm.make_plan(*arguments, **options)
