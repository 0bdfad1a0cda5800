"""The model checker against mutations: what changes order or data flow is caught, and nothing else passes."""

from __future__ import annotations

import dataclasses
import re
from itertools import product

import pytest

import distgemm
from distgemm import GemmProblem, Plan, PlanError
from distgemm.plan.ops import Barrier, Copy, Flag, Gemm, Signal, Slot, View, Wait
from distgemm.plan.validate import validate
from distgemm.plan.verify import Evaluation, Order
from tests.unit.interleavings import fault
from tests.unit.mutations import KINDS, agree, changed, effect, mutations
from tests.unit.test_verify_interleavings import CONTRADICTIONS, SYNCHRONISED, small, verdict

NAMES = [name for name in distgemm.list_schedules() if "1d" in name]
MESHES = [(name, (2,) if "xor" in name or "split" in name else (3,)) for name in NAMES]
MESHES += [("tensor_parallel_2d", (2, 2)), ("tensor_parallel_2d_rs", (2, 2)), ("tensor_parallel_2d_nested", (2, 2))]
MESHES += [("tensor_parallel_3d", (1, 2, 2)), ("tensor_parallel_3d", (2, 1, 2))]

SLACK = tuple(name for name in distgemm.list_schedules() if name.startswith(("all_reduce", "tensor_parallel_3d")))
"""Here every rank waits for others before a replay ends: some of the order that the plan asks for is not needed."""
NAMED = re.compile(
    r"^rank \d+ iteration \d+: (Gemm|Copy|Reduce|Signal|Wait|Barrier) #\d+ "
    r"|^no rank multiplies the tile D\(\d+, \d+, \d+\), rows \d+:\d+, columns \d+:\d+, owned by rank"
    r"|^the tile D\(\d+, \d+, \d+\), .*, does not get to rank \d+: multiplied on ranks? \d+"
)
"""What is wrong is an op, which is named, or that there is none."""


PUSHED = [(name, mesh, *how, "push") for name, mesh in MESHES for how in SYNCHRONISED[:3]]
"""The fourth is in tests/mutations."""
OTHERS = [
    (name, mesh, *SYNCHRONISED[(number // 2 + turn) % 4], mechanism)
    for number, (name, mesh) in enumerate(MESHES)
    for turn, mechanism in enumerate(("pull", "store"))
    if (mechanism == "pull" or "gather" not in name) and (number + turn) % 2
]
"""One or the other for each schedule: all of them take minutes."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "mesh", "workspace", "sync", "mechanism"), PUSHED + OTHERS)
def test_a_mutation_is_caught_exactly_if_it_changes_order_or_data_flow(
    name: str, mesh: tuple[int, ...], workspace: str, sync: str, mechanism: str
) -> None:
    """Equivalence is brute force: the closure over all accesses, and the execution of one order."""
    plan = small(name, mesh, 1, workspace, sync, mechanism)
    before = effect(plan)
    assert before.fault is None
    kinds = set()
    for mutation in mutations(plan):
        kinds.add(mutation.kind)
        said = verdict(mutation.plan)
        what = f"{mutation.kind}: {mutation.what}: {said}"
        if said is not None:
            assert NAMED.match(said), what
        after = effect(mutation.plan)
        if changed(before, after):
            assert said is not None or (name in SLACK and after.fault is None), what
        elif said is not None:
            assert any(part in said for part in CONTRADICTIONS), what
    wanted = {"drop an op, spliced", "drop a dependency", "swap two tiles", "double a tile"}
    if max(sum(isinstance(op, Gemm) for op in ops) for ops in plan.rank_ops) == 1:
        wanted -= {"swap two tiles"}  # a rank has one tile
    assert set(KINDS) >= kinds >= wanted


@pytest.mark.sample(8)
@pytest.mark.parametrize(("workspace", "sync"), SYNCHRONISED)
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_verifies_also_with_ragged_shapes(name: str, workspace: str, sync: str) -> None:
    shapes = [{"m": 40, "n": 24, "k": 16}, {"m": 7, "n": 5, "k": 11}, {"m": 1, "n": 2, "k": 3, "l": 2}]
    for ranks, chunks, shape in product(range(1, 6), (1, 2, 3), shapes):
        if "xor" in name and ranks & (ranks - 1):
            continue
        problem = GemmProblem(**shape, partial_dtype="float32")
        for mechanism in ("push", "pull", "store") if chunks == 2 else ("push",):
            how = {"workspace": workspace, "sync": sync, "mechanism": mechanism}
            distgemm.make_plan(problem, name, ranks, chunks=chunks, **how).verify()


# --- single faults that no mutation of a generated plan shows ---------------------------------------------


def _plan(name: str = "all_gather_1d_tiling_cd_rotating_a", **problem: str) -> Plan:
    return distgemm.make_plan(GemmProblem(m=4, n=2, k=2, **problem), name, 2)  # type: ignore[arg-type]


def _changed(plan: Plan, op: object, **fields: object) -> Plan:
    rank = op.rank  # type: ignore[attr-defined]
    ops = [dataclasses.replace(op, **fields) if other is op else other for other in plan.ops(rank)]  # type: ignore[type-var]
    return plan.replace_ops(rank, ops)  # type: ignore[arg-type]


def _first(plan: Plan, kind: type, rank: int = 0) -> object:
    return next(op for op in plan.ops(rank) if isinstance(op, kind))


def test_operands_are_read_from_their_places() -> None:
    plan = distgemm.make_plan(GemmProblem(m=2, n=2, k=2), "all_gather_1d_ring_a", 1)
    gemm = _first(plan, Gemm)
    assert isinstance(gemm, Gemm) and gemm.c is not None
    with pytest.raises(PlanError, match="as C, but it holds"):
        _changed(plan, gemm, c=gemm.c._replace(buffer="A", frame=plan.box("A", 0))).verify()
    with pytest.raises(PlanError, match="as A, but it holds B"):
        _changed(plan, gemm, a=gemm.b).verify()
    with pytest.raises(PlanError, match="as B, but it holds A"):
        _changed(plan, gemm, b=gemm.a).verify()


def test_an_op_does_not_write_what_it_multiplies() -> None:
    plan = _plan()
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm) and op.a.buffer == "slot")
    out = View(0, "slot", gemm.a.slot, gemm.out.box, gemm.out.box, gemm.a.pitch)
    with pytest.raises(PlanError, match="which it reads as"):
        _changed(plan, gemm, out=out).verify()


def test_an_op_writes_no_shard_of_another_rank() -> None:
    plan = _plan()
    copy = _first(plan, Copy)
    assert isinstance(copy, Copy)
    there = plan.box("D", 1)
    with pytest.raises(PlanError, match="which is not in the symmetric workspace"):
        _changed(plan, copy, dst=View(1, "D", -1, there, there, 1)).verify()


def test_an_op_touches_its_own_memory() -> None:
    plan = _plan()
    gemm = _first(plan, Gemm)
    assert isinstance(gemm, Gemm)
    for fields in ({"a": gemm.a._replace(rank=1)}, {"out": gemm.out._replace(rank=1)}):
        with pytest.raises(PlanError, match="the memory of another rank"):
            _changed(plan, gemm, **fields).verify()


def test_a_view_is_a_box_of_a_shard_that_may_be_written() -> None:
    plan = _plan()
    gemm = _first(plan, Gemm)
    assert isinstance(gemm, Gemm)
    batch, (top, bottom), columns = gemm.a.box
    beyond, nothing = (batch, (top, bottom + 9), columns), (batch, (top, top), columns)
    for fields, message in (
        ({"out": gemm.a}, "writes A, an input"),
        ({"a": gemm.a._replace(frame=beyond)}, "does not lie in the shard of rank 0"),
        ({"a": gemm.a._replace(box=beyond)}, "is empty or reaches out"),
        ({"a": gemm.a._replace(box=nothing)}, "is empty or reaches out"),
        ({"tile": gemm.tile._replace(m=-1)}, "its tile is outside the grid"),
        ({"tile": gemm.tile._replace(k=1)}, "its tile is outside the grid"),
    ):
        with pytest.raises(PlanError, match=message):
            _changed(plan, gemm, **fields).verify()


def test_operands_have_their_type() -> None:
    plan = _plan()
    slots = tuple(slot._replace(dtype="float16") for slot in plan.slots[0])
    with pytest.raises(PlanError, match="of float16 where A is bfloat16"):
        dataclasses.replace(plan, slots=(slots, *plan.slots[1:])).verify()


def test_a_wait_is_for_a_flag_of_its_rank_and_names_who_sets_it() -> None:
    plan = _plan()
    wait = _first(plan, Wait)
    assert isinstance(wait, Wait)
    with pytest.raises(PlanError, match="a flag of another rank"):
        _changed(plan, wait, flag=wait.flag._replace(rank=1)).verify()
    with pytest.raises(PlanError, match="names rank 0, the signal comes from rank 1"):
        _changed(plan, wait, peer=0).verify()


def test_a_shard_has_no_slot() -> None:
    plan = _plan()
    gemm = _first(plan, Gemm)
    assert isinstance(gemm, Gemm)
    with pytest.raises(PlanError, match="neither in a slot nor in a shard"):
        _changed(plan, gemm, out=gemm.out._replace(slot=0)).verify()


def test_views_lie_in_memory_that_exists() -> None:
    plan = _plan()
    copy = _first(plan, Copy)
    assert isinstance(copy, Copy)
    for fields in ({"rank": 2}, {"rank": -1}, {"slot": 9}, {"buffer": "E"}, {"buffer": "A", "slot": -1}):
        with pytest.raises(PlanError, match=NAMED):
            _changed(plan, copy, dst=copy.dst._replace(**fields)).verify()


def test_a_transfer_keeps_the_type() -> None:
    plan = _plan("reduce_scatter_1d_tiling_a_rotating_c", partial_dtype="float32")
    plan.verify()
    copy = _first(plan, Copy)
    assert isinstance(copy, Copy)
    slots = [list(of_rank) for of_rank in plan.slots]
    slot = slots[copy.dst.rank][copy.dst.slot]
    slots[copy.dst.rank][copy.dst.slot] = slot._replace(dtype="bfloat16")
    with pytest.raises(PlanError, match="copies float32 to a place of bfloat16"):
        dataclasses.replace(plan, slots=tuple(map(tuple, slots))).verify()


def test_slots_do_not_overlap() -> None:
    plan = _plan()
    overlapping = tuple((*slots, Slot(slots[0].offset, 256, "bfloat16", 1)) for slots in plan.slots)
    with pytest.raises(PlanError, match="overlaps another slot"):
        dataclasses.replace(plan, slots=overlapping).verify()


def test_slots_start_aligned() -> None:
    plan = _plan()
    moved = tuple(tuple(slot._replace(offset=slot.offset + 16) for slot in slots) for slots in plan.slots)
    with pytest.raises(PlanError, match="does not start at a multiple of 256"):
        dataclasses.replace(plan, slots=moved).verify()


def test_rows_are_dense_in_shards_and_aligned_in_slots() -> None:
    plan = _plan()  # A tile: two rows of two bfloat16
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm) and op.a.buffer == "slot")
    assert (gemm.a.pitch, gemm.b.pitch) == (8, 2)
    for fields, wrong, right in (
        ({"a": gemm.a._replace(pitch=2)}, 2, 8),
        ({"b": gemm.b._replace(pitch=8)}, 8, 2),
        ({"out": gemm.out._replace(pitch=8)}, 8, 1),
    ):
        with pytest.raises(PlanError, match=f"has rows {wrong} elements apart, not {right}"):
            _changed(plan, gemm, **fields).verify()
    with pytest.raises(PlanError, match="does not fit into its slot"):
        _changed(plan, gemm, a=gemm.a._replace(pitch=9)).verify()
    # A frame that fits only without its padding: the padding belongs to it.
    short = tuple(tuple(slot._replace(elements=slot.elements - 1) for slot in slots) for slots in plan.slots)
    with pytest.raises(PlanError, match="does not fit into its slot"):
        dataclasses.replace(plan, slots=short).verify()


def _without(plan: Plan, op: object) -> Plan:
    """Without an op, and without dependencies on it."""
    rank, gone = op.rank, op.id  # type: ignore[attr-defined]
    rest = [other for other in plan.ops(rank) if other is not op]
    return plan.replace_ops(
        rank, [dataclasses.replace(other, deps=tuple(dep for dep in other.deps if dep != gone)) for other in rest]
    )


def test_what_nobody_multiplies_is_named_with_its_owners() -> None:
    problem = GemmProblem(m=16, n=8, k=4, l=2)
    plan = distgemm.make_plan(problem, "ag+gemm", 4)
    gemm = next(op for op in plan.ops(2) if isinstance(op, Gemm) and op.tile[:2] == (3, 2))
    with pytest.raises(PlanError) as raised:
        _without(plan, gemm).verify()
    assert str(raised.value) == "no rank multiplies the tile D(3, 2, 0), rows 12:16, columns 4:6, owned by rank 2"

    plan = distgemm.make_plan(problem, "all_reduce_1d_tiling_a_rotating_c", 2)
    (last,) = [op for op in plan.ops(1) if isinstance(op, Copy) and op.dst.buffer == "D"]
    with pytest.raises(PlanError) as raised:
        _without(plan, last).verify()
    assert str(raised.value) == (
        "the tile D(0, 0, 0), rows 0:8, columns 0:8, does not get to rank 1: "
        "multiplied on ranks 0, 1, owned by ranks 0, 1"
    )


def test_every_tile_of_d_has_an_owner() -> None:
    plan = _plan()
    shards = (*plan.shards[:2], (plan.shards[2][0],) * 2)
    with pytest.raises(PlanError, match="no rank owns"):
        dataclasses.replace(plan, shards=shards).verify()


def test_a_flag_starts_at_zero_or_one() -> None:
    plan = _plan()
    for wait in [op for op in plan.ops(0) if isinstance(op, Wait)]:
        changed_plan = plan
        for op in [op for ops in plan.rank_ops for op in ops]:
            if getattr(op, "flag", None) == wait.flag:
                changed_plan = _changed(changed_plan, op, flag=wait.flag._replace(initial=2))
        with pytest.raises(PlanError, match="it is 0 or 1"):
            changed_plan.verify()


def test_an_id_names_one_op() -> None:
    plan = _plan()
    first, *rest = plan.ops(0)
    with pytest.raises(PlanError, match="its id is used twice"):
        plan.replace_ops(0, [dataclasses.replace(first, deps=()), first, *rest]).verify()


def test_rounds_grow() -> None:
    plan = _plan()
    ops = plan.ops(0)
    with pytest.raises(PlanError, match="comes after round"):
        _changed(plan, ops[0], round=99).verify()
    arrival = next(op for op in ops if isinstance(op, Wait) and not op.flag.initial)
    late = [dataclasses.replace(op, round=0) if op.round <= arrival.round else op for op in ops]
    with pytest.raises(PlanError, match="for a signal of round"):
        plan.replace_ops(0, late).verify()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_come_to_a_barrier(order: tuple[int, int]) -> None:
    plan = distgemm.make_plan(GemmProblem(m=2, n=2, k=2), "all_gather_1d_ring_a", 2, sync="barrier")
    for rank in range(2):
        first = plan.ops(rank)[0]
        arrival = next(op for op in plan.ops(rank) if isinstance(op, Wait))
        late = Barrier(99, rank, arrival.round, 0, "D", (), -1, ())
        place = plan.ops(rank).index(arrival) + order[0]
        rest = [*plan.ops(rank)[:place], late, *plan.ops(rank)[place:]]
        assert rest[0] is first
        plan = plan.replace_ops(rank, rest)
    plan.verify()
    one = [op for op in plan.ops(order[1]) if op.id != 99]
    with pytest.raises(PlanError, match=r"Barrier #99 .* is entered by ranks"):
        plan.replace_ops(order[1], one).verify()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_rank_did_before_a_barrier_is_before_it_on_every_rank(ordered: bool) -> None:
    """A Barrier in the place of the flags by which two ranks tell each other that a tile has arrived."""
    plan = distgemm.make_plan(GemmProblem(m=2, n=2, k=2), "all_gather_1d_ring_a", 2, sync="barrier")
    for rank in range(2):
        copy, wait = (_first(plan, kind, rank) for kind in (Copy, Wait))
        assert isinstance(copy, Copy) and isinstance(wait, Wait)
        deps = (copy.id,) if ordered or rank == 0 else ()
        barrier = Barrier(99, rank, wait.round, 0, "D", (), -1, deps)
        rest = [barrier if op is wait else op for op in plan.ops(rank) if not isinstance(op, Signal)]
        plan = plan.replace_ops(
            rank,
            [dataclasses.replace(op, deps=tuple(99 if dep == wait.id else dep for dep in op.deps)) for op in rest],
        )
    assert (effect(plan).fault is None) == ordered
    said = verdict(plan)
    assert (
        said is None
        if ordered
        else re.match(r"rank 0 .*: Gemm .* reading slot 0.* is not ordered after rank 1", said or "")
    )


def test_large_plans_are_ordered_by_what_ops_wait_for_themselves() -> None:
    """The search, which takes long where there are many ops, is for other plans."""
    for mesh, sync in product([(2, 2, 2), (3, 2, 2), (1, 3, 3)], ("credit", "barrier")):
        problem = GemmProblem(m=72, n=72, k=72)
        plan = distgemm.make_plan(problem, "tensor_parallel_3d", mesh=mesh, chunks=2, sync=sync)
        order = Order(plan, validate(plan))
        Evaluation(plan, order).run()
        assert "_graph" not in vars(order)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_signal_is_repeated_only_after_it_was_seen(ordered: bool) -> None:
    """A Signal that protects no data: only where another rank's chunk answers it is it safe."""
    plan = distgemm.make_plan(GemmProblem(m=2, n=2, k=2), "all_gather_1d_ring_a", 2)
    flag = Flag(1, 9, 0, False)
    signal = Signal(99, 0, 0, 0, "A", (0, 0, 0), -1, (), flag)
    wait = Wait(99, 1, 1, 0, "A", (0, 0, 0), -1, (), flag, 0)
    # Room for the new ops between the rounds of the plan.
    sends = [dataclasses.replace(op, round=op.round * 10) for op in plan.ops(0)]
    answers = [dataclasses.replace(op, round=op.round * 10 or 1) for op in plan.ops(1)]
    if ordered:
        answers = [dataclasses.replace(op, deps=(99, *op.deps)) if isinstance(op, Copy) else op for op in answers]
    plan = plan.replace_ops(0, [signal, *sends]).replace_ops(1, [wait, *answers])
    assert (fault(plan, exhaustive=True) is None) == ordered
    assert (effect(plan).fault is None) == ordered
    said = verdict(plan)
    assert said is None if ordered else "a signal would be lost" in str(said)


def _with_copies(*moves: tuple[View, View, tuple[int, ...]]) -> Plan:
    """One rank, one GEMM, and local transfers (from, to, deps by number) through two slots of a 2 x 2 tile."""
    plan = distgemm.make_plan(GemmProblem(m=2, n=2, k=2), "all_gather_1d_ring_a", 1)
    slots = tuple(Slot(256 * place, 256, "bfloat16", 16) for place in range(2))
    copies = [
        Copy(100 + place, 0, 0, 0, "A", (0, 0, 0), -1, tuple(100 + dep for dep in deps), src, dst)
        for place, (src, dst, deps) in enumerate(moves)
    ]
    return agree(dataclasses.replace(plan, slots=(slots,)).replace_ops(0, [*copies, *plan.ops(0)]))


TILE = ((0, 1), (0, 2), (0, 2))
SHARD, SLOT = View(0, "A", -1, TILE, TILE, 2), View(0, "slot", 0, TILE, TILE, 8)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_left_of_a_tile_may_still_be_read(ordered: bool) -> None:
    """A tile is read, then replaced half by half; the second half too must wait for the reader."""
    shard, first, second = SHARD, SLOT, SLOT._replace(slot=1)
    top, bottom = ((0, 1), (0, 1), (0, 2)), ((0, 1), (1, 2), (0, 2))
    plan = _with_copies(
        (shard, first, ()),
        (first, second, (0,)),
        (shard._replace(box=top), first._replace(box=top), (1,)),
        (shard._replace(box=bottom), first._replace(box=bottom), (1,) if ordered else (0,)),
    )
    assert (fault(plan, exhaustive=True) is None) == ordered
    said = verdict(plan)
    assert said is None if ordered else "writing slot 0" in str(said)


@pytest.mark.parametrize("ordered", [False, True])
def test_each_part_of_a_new_tile_waits_for_readers_of_the_old_one(ordered: bool) -> None:
    """A tile with another frame replaces what the slot held, in parts that nothing orders among themselves."""
    columns = ((0, 1), (0, 2), (0, 1))
    new = SLOT._replace(frame=columns)
    top, bottom = ((0, 1), (0, 1), (0, 1)), ((0, 1), (1, 2), (0, 1))
    moves = (
        (SHARD, SLOT, ()),
        (SLOT, SLOT._replace(slot=1), (0,)),
        (SHARD._replace(box=top), new._replace(box=top), (1,)),
        (SHARD._replace(box=bottom), new._replace(box=bottom), (1,) if ordered else (0,)),
    )
    plan = _with_copies(*moves)
    assert (fault(plan, exhaustive=True) is None) == ordered
    said = verdict(plan)
    assert said is None if ordered else "writing slot 0[0:1, 1:2, 0:1]@0 is not ordered after" in str(said)


@pytest.mark.parametrize("ordered", [False, True])
def test_each_part_of_a_tile_waits_for_readers_in_the_replay_before(ordered: bool) -> None:
    """Rank 1 reads a tile of rank 0, which the next replay replaces in parts, of which one waits for nobody."""
    plan = _pulled_and_replaced(ordered)
    assert (fault(plan, exhaustive=True) is None) == ordered
    said = verdict(plan)
    assert said is None if ordered else "writing slot" in str(said)


def _pulled_and_replaced(ordered: bool) -> Plan:
    """In each replay rank 0 fills a slot in two halves of a narrow frame, then whole, and rank 1 copies the whole."""
    problem = GemmProblem(m=4, n=2, k=2)
    plan = distgemm.make_plan(problem, "all_gather_1d_ring_a", 2, sync="barrier", mechanism="pull")
    ends = [sum(slot.bytes for slot in of_rank) for of_rank in plan.slots]
    slots = [(*of_rank, Slot(end, 256, "bfloat16", 16)) for of_rank, end in zip(plan.slots, ends, strict=True)]
    number = len(slots[0]) - 1
    narrow = ((0, 1), (0, 2), (0, 1))
    slot = View(0, "slot", number, TILE, TILE, 8)
    halves = [View(0, "slot", number, narrow, ((0, 1), (row, row + 1), (0, 1)), 8) for row in range(2)]
    here = View(0, "A", -1, plan.box("A", 0), TILE, 2)
    about = "A", (0, 0, 0), -1
    ready, free = Flag(1, 90, 0, False), Flag(0, 90, 1, True)
    fill = [
        Wait(100, 0, 0, 0, *about, (), free, 1),
        *(
            Copy(101 + row, 0, 0, 0, *about, (100,) if ordered or not row else (), here._replace(box=half.box), half)
            for row, half in enumerate(halves)
        ),
        Copy(103, 0, 0, 0, *about, (101, 102), here, slot),
        Signal(104, 0, 0, 0, *about, (103,), ready),
    ]
    read = [
        Wait(100, 1, 1, 0, *about, (), ready, 0),
        Copy(101, 1, 1, 0, *about, (100,), slot, View(1, "slot", number, TILE, TILE, 8)),
        Signal(102, 1, 1, 0, *about, (101,), free),
    ]
    plan = dataclasses.replace(plan, slots=tuple(slots))
    later = [[dataclasses.replace(op, round=op.round + 1) for op in ops] for ops in plan.rank_ops]
    return agree(plan.replace_ops(0, [*fill, *later[0]]).replace_ops(1, [*read, *later[1]]))


@pytest.mark.parametrize("ordered", [False, True])
def test_the_first_part_of_a_tile_waits_for_readers_of_the_tile_before(ordered: bool) -> None:
    """Rank 0 sends one half of a narrow tile. Rank 1 replaces it by a wide tile, copies that, and replaces the other
    half. So the copy reads bytes that nothing at the end of the replay covers, and rank 0 writes them next."""
    plan = distgemm.make_plan(GemmProblem(m=4, n=2, k=2), "all_gather_1d_ring_a", 2, sync="barrier")
    ends = [sum(slot.bytes for slot in of_rank) for of_rank in plan.slots]
    slots = [
        (*of_rank, *(Slot(end + 256 * n, 256, "bfloat16", 16) for n in range(2)))
        for of_rank, end in zip(plan.slots, ends, strict=True)
    ]
    number = len(slots[1]) - 2
    wide, tile, narrow = plan.box("A", 1), plan.box("A", 0), ((0, 1), (0, 2), (0, 1))
    slot, other = (View(1, "slot", place, wide, wide, 8) for place in (number, number + 1))
    upper, lower = ((0, 1), (0, 1), (0, 1)), ((0, 1), (1, 2), (0, 1))
    above, below = (slot._replace(frame=narrow, box=box) for box in (upper, lower))
    arrived = next(op for op in plan.ops(0) if isinstance(op, Copy)).dst
    wait = next(op for op in plan.ops(1) if isinstance(op, Wait))
    mine, sent = View(1, "A", -1, wide, wide, 2), View(0, "A", -1, tile, lower, 2)
    about = "A", (1, 0, 0), -1
    flag = Flag(1, 90, 0, False)
    send = [
        Copy(100, 0, 50, 0, *about, (0,) if ordered else (), sent, below),
        Signal(101, 0, 50, 0, *about, (100, 0), flag),
    ]
    keep = [
        Wait(100, 1, 51, 0, *about, (), flag, 0),
        Copy(101, 1, 51, 0, *about, (100,), mine, slot),
        Copy(102, 1, 51, 0, *about, (101,), slot, other),
        Copy(103, 1, 51, 0, *about, (102, wait.id), arrived._replace(box=upper), above),
    ]
    plan = dataclasses.replace(plan, slots=tuple(slots))
    plan = agree(plan.replace_ops(0, [*plan.ops(0), *send]).replace_ops(1, [*plan.ops(1), *keep]))
    assert (fault(plan, exhaustive=True) is None) == ordered
    said = verdict(plan)
    assert said is None if ordered else "writing slot" in str(said)


@pytest.mark.parametrize("sync", ["credit", "barrier"])
@pytest.mark.parametrize("name", ["all_gather_1d_ring_a", "reduce_scatter_1d_pairwise_a"])
def test_a_pull_waits_for_the_op_of_the_rank_that_it_reads(name: str, sync: str) -> None:
    """Ids count for each rank: an op of the reader's own rank that has the id of the writer orders nothing."""
    plan = small(name, (2,), 1, "full", sync, "pull")
    pull = next(op for op in plan.ops(0) if isinstance(op, Copy) and op.src.rank == 1)
    (writer,) = [op for op in plan.ops(1) if getattr(op, "dst", getattr(op, "out", None)) == pull.src]
    before = [op.id for op in plan.ops(0)[: plan.ops(0).index(pull)]]
    assert writer.id in before
    rest = tuple(dep for dep in pull.deps if plan.ops(0)[dep].kind != "Wait" or plan.ops(0)[dep].flag.initial)  # type: ignore[attr-defined]
    assert len(rest) < len(pull.deps)
    wrong = _changed(plan, pull, deps=(*rest, writer.id))
    assert fault(wrong, exhaustive=True) is not None
    with pytest.raises(PlanError, match=r"Copy .* reading slot .* is not ordered after rank 1"):
        wrong.verify()


def test_a_transfer_has_something_to_move() -> None:
    plan = _with_copies((SHARD._replace(buffer="D"), SLOT, ()))
    assert fault(plan, exhaustive=True) is not None
    with pytest.raises(PlanError, match="which holds nothing"):
        plan.verify()


@pytest.mark.parametrize("kind", [Signal, Wait])
def test_a_flag_has_one_signal_and_one_wait(kind: type) -> None:
    plan = _plan()
    for op in [op for ops in plan.rank_ops for op in ops if isinstance(op, kind)]:
        twice = [*plan.ops(op.rank), dataclasses.replace(op, id=99, round=99, deps=(op.id,))]
        with pytest.raises(PlanError, match="already"):
            plan.replace_ops(op.rank, twice).verify()
