"""Plans from rank 0's ops: they are the plans of all ranks, and their proof fails where the full proof fails."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from distgemm import GemmProblem, Plan, PlanError, make_plan
from distgemm.layouts import Axis, Modulo, TVLayout
from distgemm.plan import derive, rotate, verify
from distgemm.plan.ops import Barrier, Copy, Op, Signal, Wait
from distgemm.plan.plan import collector_paused
from distgemm.plan.rotate import RotatedOps, RotatedSlots
from distgemm.plan.symmetric import derive_rotated
from distgemm.plan.verify_rotated import verify_rotated
from distgemm.schedulers import (
    Direct,
    DistributedTileScheduler,
    Hop,
    NotSymmetricError,
    Route,
    Symmetry,
    get_schedule,
    list_schedules,
    schedule_mesh_rank,
    schedule_options,
)
from distgemm.schedulers.scheduler import MAX_TILES
from tests.unit.mutations import mutations

MESHES = {1: [(2,), (3,), (4,), (6,)], 2: [(2, 3), (3, 2), (1, 4), (3, 4)], 3: [(2, 2, 2), (1, 2, 3)]}
CHOICES: dict[str, list[Any]] = {
    "chunks": [1, 2, 3],
    "gather": ["direct", "ring", "bidirectional_full", "bidirectional_split"],
    "reduce": ["chain", "pairwise"],
    "final_add": ["epilogue", "kernel"],
    "chunk_mode": ["m", "n", "k"],
    "copies": [1, 2],
    "across": [name for name in list_schedules() if "_1d_" in name],
    "inside": [name for name in list_schedules() if "_1d_" in name],
}
PUSHED = [
    "all_to_all_1d_rotating_a",
    "all_gather_1d_bidirectional_full_a",
    "all_gather_1d_ring_a",
    "all_gather_1d_tiling_cd_rotating_a",
    "all_gather_1d_tiling_cd_rotating_b",
    "all_gather_1d_tiling_k_rotating_a",
    "reduce_scatter_1d_pairwise_a",
    "reduce_scatter_1d_tiling_a_rotating_c",
    "reduce_scatter_1d_tiling_b_rotating_c",
    "tensor_parallel_2d",
    "tensor_parallel_2d_nested",
    "tensor_parallel_2d_rs",
    "tensor_parallel_3d",
]
"""Schedules whose pushed plans with the workspace "full" are symmetric, with the default options."""


def random_schedule(rng: random.Random, name: str) -> DistributedTileScheduler | None:
    """A schedule with a mesh and options by chance; None where they do not go together."""
    options = {key: rng.choice(CHOICES[key]) for key in schedule_options(name)}
    try:
        return get_schedule(name, mesh=rng.choice(MESHES[schedule_mesh_rank(name)]), **options)
    except ValueError:
        return None


def problem_of(rng: random.Random, scheduler: DistributedTileScheduler) -> GemmProblem:
    """A problem, perhaps with tiles that differ in size, with rows by rank, and with few rows."""
    m, n, k, _ = scheduler.grid
    chunks = scheduler.chunks.m
    if rng.random() < 0.4:
        return GemmProblem(m=8 * m, n=8 * n, k=8 * k)
    rest: dict[str, Any] = {"n": rng.randint(5 * n, 9 * n), "k": rng.randint(5 * k, 9 * k), "l": rng.choice([1, 2])}
    rest |= {"dtype": rng.choice(["bfloat16", "float32"]), "partial_dtype": rng.choice([None, "float32"])}
    if rng.random() < 0.4 and m == scheduler.world_size * chunks:
        rows = tuple(rng.randint(chunks, 3 * chunks + 2) for _ in range(scheduler.world_size))
        return GemmProblem(m=sum(rows), m_per_rank=rows, **rest)
    return GemmProblem(m=rng.randint(m, 9 * m), **rest)


def attempt(make: Callable[..., Plan], *arguments: Any) -> Plan | None:
    """A plan, or None if it is refused."""
    try:
        return make(*arguments)
    except ValueError:
        return None


def options_of(rng: random.Random) -> tuple[Any, ...]:
    """workspace, sync, mechanism and send_slots by chance."""
    kinds = derive.WORKSPACES, derive.SYNCS, derive.MECHANISMS, (1, 2, 4)
    return tuple(rng.choice(each) for each in kinds)  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(40))
def test_rotated_plans_are_those_of_all_ranks(seed: int) -> None:
    """Op by op, for random schedules, meshes, chunks, rows and options; and both proofs accept them."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    for name in list_schedules() * 2:
        scheduler = random_schedule(rng, name)
        if scheduler is None:
            continue
        arguments = problem_of(rng, scheduler), scheduler, *options_of(rng)
        plan, rotated = (
            attempt(lambda *given: derive._derive(*given).plan, *arguments),
            attempt(derive_rotated, *arguments),
        )
        if plan is None or rotated is None:  # tiles form no boxes, or rows do not fit, or it is not symmetric
            assert rotated is None
            found["refused"] += plan is not None
            continue
        found["made"] += 1
        sizes = rotated.sizes
        assert not rotated.rank_ops.made, "the plan has made ops of other ranks"
        assert isinstance(rotated.rank_ops, RotatedOps) and isinstance(rotated.slots, RotatedSlots)
        verify_rotated(rotated)
        assert rotated == plan, (name, arguments)
        assert rotated.digest == plan.digest and sizes == plan.sizes
        verify.verify(rotated)
        assert pickle.loads(pickle.dumps(rotated)) == plan
    assert found["made"] > found["refused"] / 3 > 0, found


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PUSHED)
def test_schedules_that_are_symmetric(name: str) -> None:
    for mesh, chunks in product(MESHES[schedule_mesh_rank(name)], (1, 2)):
        scheduler = get_schedule(name, mesh=mesh, chunks=chunks)
        m, n, k, _ = scheduler.grid
        for mechanism, sync in product(("push", "store"), derive.SYNCS):
            arguments = GemmProblem(m=16 * m - 1, n=16 * n - 1, k=16 * k - 1), scheduler, "full", sync, mechanism, 2
            plan = derive_rotated(*arguments)  # type: ignore[arg-type]
            assert plan.ops(scheduler.world_size - 1) == derive._derive(*arguments).plan.rank_ops[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("all_gather_1d_ring_a", (72,)),
        ("reduce_scatter_1d_pairwise_a", (72,)),
        ("tensor_parallel_2d_nested", (8, 9)),
        ("tensor_parallel_2d_rs", (6, 12)),
    ],
)
def test_a_large_plan_on_sampled_ranks(name: str, mesh: tuple[int, ...]) -> None:
    """``make_plan`` takes this way from some number of tiles on, and a rank makes its own ops only."""
    problem = GemmProblem(m=1000, n=1001, k=1002)
    plan = make_plan(problem, name, mesh=mesh)
    assert isinstance(plan.rank_ops, RotatedOps) and plan is make_plan(problem, name, mesh=mesh)
    whole = derive._derive(problem, get_schedule(name, mesh=mesh), "full", "credit", "push", 2).plan
    for rank in (71, 0, 17):
        assert plan.ops(rank) == whole.ops(rank) and plan.slots[rank] == whole.slots[rank]
    made = plan.rank_ops.made
    assert made == sum(len(whole.ops(rank)) for rank in (71, 0, 17))
    plan.verify()
    assert plan.fingerprint and plan.rank_ops.made == made, "the proof and the fingerprint made ops of other ranks"
    assert (plan.edges, plan.shards, plan.sizes) == (whole.edges, whole.shards, whole.sizes)


def test_thousands_of_ranks() -> None:
    """16 hosts of 72 ranks, proved from the ops of one rank. The sender and the receiver of a tile agree."""
    ranks = 16 * 72
    plan = make_plan(GemmProblem(m=16 * ranks, n=16 * ranks, k=64), "tensor_parallel_2d_nested", mesh=(16, 72))
    plan.verify()
    sent = [op for op in plan.ops(1000) if isinstance(op, Copy)]
    to = sent[7].dst.rank
    signal = next(op for op in plan.ops(1000) if isinstance(op, Signal) and op.deps == (sent[7].id,))
    waits = [op for op in plan.ops(to) if isinstance(op, Wait) and op.flag == signal.flag]
    assert [(wait.peer, wait.tile, wait.slot) for wait in waits] == [(1000, signal.tile, signal.slot)]


def test_fingerprints_of_rotated_plans() -> None:
    """They are equal for equal arguments, and differ otherwise."""
    problem = GemmProblem(m=720, n=720, k=64)
    found = []
    for options in ({}, {}, {"sync": "barrier"}, {"mechanism": "pull"}, {"chunks": 2}, {"send_slots": 3}):
        derive.forget_plans()
        found.append(make_plan(problem, "all_gather_1d_ring_a", 72, **options).fingerprint)
    found += [make_plan(replace(problem, m=1440), "all_gather_1d_ring_a", 72).fingerprint]
    found += [make_plan(problem, "all_gather_1d_tiling_cd_rotating_a", 72).fingerprint]
    assert found[0] == found[1] == found[5]  # a gather has no send slots
    assert len({*found[1:5], *found[6:]}) == 6


# --- the proof ----------------------------------------------------------------------------------------


def small_plans() -> Iterator[Plan]:
    """Small rotated plans of every kind."""
    for name, mesh, chunks, options in (
        ("all_gather_1d_ring_a", (3,), 1, ("full", "credit", "push", 2)),
        ("all_gather_1d_tiling_cd_rotating_a", (3,), 2, ("bounded", "credit", "push", 2)),
        ("all_gather_1d_tiling_cd_rotating_a", (3,), 1, ("full", "credit", "pull", 2)),
        ("all_gather_1d_ring_a", (2,), 2, ("full", "barrier", "push", 2)),
        ("all_gather_1d_tiling_k_rotating_a", (3,), 1, ("bounded", "credit", "push", 2)),
        ("reduce_scatter_1d_tiling_a_rotating_c", (3,), 1, ("full", "credit", "push", 1)),
        ("reduce_scatter_1d_tiling_a_rotating_c", (3,), 1, ("full", "credit", "store", 2)),
        ("reduce_scatter_1d_pairwise_a", (3,), 1, ("full", "credit", "pull", 2)),
        ("reduce_scatter_1d_pairwise_a", (3,), 1, ("full", "barrier", "push", 1)),
        ("tensor_parallel_2d", (2, 2), 1, ("full", "credit", "push", 2)),
        ("tensor_parallel_2d_nested", (2, 2), 1, ("full", "credit", "push", 2)),
        ("tensor_parallel_2d_rs", (2, 2), 1, ("full", "credit", "push", 2)),
        ("all_reduce_1d_tiling_a_rotating_c", (2,), 1, ("full", "credit", "push", 2)),
    ):
        scheduler = get_schedule(name, mesh=mesh, chunks=chunks)
        m, n, k, _ = scheduler.grid
        yield derive_rotated(GemmProblem(m=4 * m, n=4 * n, k=4 * k), scheduler, *options)  # type: ignore[arg-type]


PLANS = list(small_plans())


def rotated_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Each mutation of the ops of rank 0, on all ranks."""
    assert isinstance(plan.rank_ops, RotatedOps)
    whole = replace(plan, rank_ops=tuple(plan.rank_ops), slots=tuple(plan.slots))
    seen: set[str] = set()
    for mutation in mutations(whole):
        first: tuple[Op, ...] = mutation.plan.ops(0)
        key = repr(first)
        if first != whole.ops(0) and key not in seen:
            seen.add(key)
            yield mutation.kind, replace(plan, rank_ops=RotatedOps(first, plan.rank_ops.rotation))


def accepts(proof: Any, plan: Plan) -> bool:
    try:
        proof(plan)
    except PlanError:
        return False
    return True


def accepts_all_ranks(plan: Plan) -> bool:
    """Whether the full proof accepts a plan whose ops are those of rank 0, rotated, as an ordinary plan."""
    try:
        whole = replace(plan, rank_ops=tuple(plan.rank_ops), slots=tuple(plan.slots))
    except PlanError:  # it has no rotation
        return False
    return accepts(verify.verify, whole)


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_the_proof_fails_for_every_mutant_for_which_the_full_proof_fails(number: int) -> None:
    found: Counter[tuple[bool, bool]] = Counter()
    with collector_paused():
        for kind, mutant in rotated_mutants(PLANS[number]):
            full, short = accepts_all_ranks(mutant), accepts(verify_rotated, mutant)
            assert full or not short, (kind, mutant.schedule)
            found[full, short] += 1
    # Most mutants that are right are accepted, too. Where not, a slot is given a tile that it was not made for.
    assert found[False, False] > 50 and found[True, True] >= found[True, False], found


@pytest.mark.parametrize(
    ("later", "message"), [(0, "waits in round 0 for a signal of round"), (1, "comes after round")]
)
def test_a_wait_that_stands_before_its_signal_is_refused(later: int, message: str) -> None:
    """Every rank would wait before it signals. Only the checks of rounds exclude this deadlock in the short proof."""
    for plan in PLANS:
        assert isinstance(plan.rank_ops, RotatedOps)
        first = plan.rank_ops.first
        wait = next(op for op in first if isinstance(op, Wait) and not op.flag.initial and not op.deps)
        signal = next(op for op in first if isinstance(op, Signal) and op.flag.number == wait.flag.number)
        early = replace(wait, round=later * (signal.round + 1))
        others = [op for op in first if op is not wait]
        barrier = int(isinstance(first[0], Barrier))
        ops = (*others[:barrier], early, *others[barrier:])
        mutant = replace(plan, rank_ops=RotatedOps(ops, plan.rank_ops.rotation))
        assert not accepts_all_ranks(mutant)
        with pytest.raises(PlanError, match=message):
            verify_rotated(mutant)


def test_a_plan_that_does_not_rotate_is_refused() -> None:
    """The short proof takes no plan of other origin, and none with other tiles or shards than its rotations."""
    plan = PLANS[0]
    assert isinstance(plan.rank_ops, RotatedOps)
    edges = ((0, 4, 4, 12), *plan.edges[1:])
    for wrong in (
        replace(plan, rank_ops=tuple(plan.rank_ops)),
        replace(plan, slots=tuple(plan.slots)),
        replace(plan, edges=edges),
        replace(plan, shards=(plan.shards[0][::-1], *plan.shards[1:])),
        replace(plan, slots=PLANS[1].slots),
        replace(plan, mesh=(1, 3)),
        replace(plan, problem=replace(plan.problem, m=13)),
    ):
        with pytest.raises(PlanError):
            verify_rotated(wrong)
    replace(plan, rank_ops=tuple(plan.rank_ops), slots=tuple(plan.slots)).verify()


# --- what is symmetric --------------------------------------------------------------------------------


def test_schedules_that_do_not_rotate_say_why() -> None:
    def reason(name: str, *size: int, **options: Any) -> str:
        found = get_schedule(name, mesh=size, **options).symmetry
        assert isinstance(found, NotSymmetricError)
        return str(found)

    assert "neither an Offset nor a Modulo" in reason("all_gather_1d_pairwise_xor_a", 4)
    assert "in the order of ranks" in reason("all_reduce_1d_one_shot_a", 4)
    ring = get_schedule("all_gather_1d_ring_a", 4)

    class Odd:
        def hops(self, mesh: tuple[int, ...], holder: int, needers: Any) -> list[Hop]:
            return list(Direct().hops(mesh, holder, needers))

    other = replace(ring, route=Route(a=Odd()))
    assert isinstance(other.symmetry, NotSymmetricError) and "Odd does not say that it rotates" in str(other.symmetry)


def test_rotations_of_ranks_and_tiles() -> None:
    """They are a group, and take the work and the partition of a rank to those of another."""
    rng = random.Random(0)
    seen = 0
    for name in list_schedules() * 4:
        scheduler = random_schedule(rng, name)
        if scheduler is None or not isinstance(scheduler.symmetry, Symmetry):
            continue
        seen += 1
        symmetry, ranks = scheduler.symmetry, range(scheduler.world_size)
        for rank, by in product(ranks, ranks):
            to = symmetry.add(rank, by)
            assert symmetry.subtract(to, by) == rank
            assert sorted(symmetry.add(each, by) for each in ranks) == list(ranks)
            for work, rotated in zip(scheduler.work.of_rank(rank), scheduler.work.of_rank(to), strict=True):
                assert work is not None and symmetry.tile("work", work, by) == rotated
            for operand in "ABD":
                layout = scheduler.partition[operand]
                held = {symmetry.tile(operand, tile, by) for tile in layout.of_rank(rank) if tile is not None}
                assert held == set(layout.of_rank(to))
                for tile in layout.of_rank(rank):
                    assert tile is not None
                    first = symmetry.tile(operand, tile, symmetry.subtract(0, symmetry.origin(operand, tile)))
                    assert symmetry.tile(operand, first, symmetry.origin(operand, tile)) == tile
                    assert not symmetry.origin(operand, first)
    assert seen > 20


def test_more_tiles_need_symmetry() -> None:
    """A schedule of more than MAX_TILES tiles is made if it rotates. Its plan is refused if it does not."""
    with pytest.raises(ValueError, match=r"at most 262144 in total \(every owner adds .* in the order of ranks\)"):
        get_schedule("all_reduce_1d_one_shot_a", 1024, chunks=1024)
    scheduler = get_schedule("all_gather_1d_ring_a", 1024)
    assert scheduler.world_size * scheduler.iterations > MAX_TILES
    with pytest.raises(ValueError, match=r"a plan in which not every rank does the same \(tiles of mode m are empty\)"):
        make_plan(GemmProblem(m=64, n=1024, k=64), scheduler)


def test_layouts_of_one_rank_and_coverage() -> None:
    """``of_rank`` is a row of ``tiles``, and ``covers`` agrees with the tiles, for random layouts."""
    rng = np.random.default_rng(0)
    covered: Counter[bool] = Counter()
    for _ in range(400):
        mesh, values = (tuple(map(int, rng.integers(1, 4, rng.integers(1, 3)))) for _ in range(2))

        def axis(mesh: tuple[int, ...] = mesh, values: tuple[int, ...] = values) -> Axis:
            extent = int(rng.integers(1, 5))
            of_rank, of_value = (tuple(map(int, rng.integers(-1, 3, len(each)))) for each in (mesh, values))
            return Axis(extent, of_rank, of_value, (Modulo(extent),) if rng.random() < 0.7 else ())

        layout = TVLayout(mesh, values, tuple(tuple(axis() for _ in range(rng.integers(1, 3))) for _ in range(2)))
        if rng.random() < 0.5:
            layout = layout.reorder(tuple(map(int, rng.permutation(layout.size))))
        rows = tuple(layout.of_rank(rank) for rank in range(layout.ranks))
        assert rows == layout.tiles
        reached = {tile for of_rank in rows for tile in of_rank if tile is not None}
        assert layout.covers() == (len(reached) == int(np.prod(layout.grid)))
        covered[layout.covers()] += 1
    assert min(covered[True], covered[False]) > 20


def test_tables_and_ops_of_thousands_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for all ranks of a large plan gets an error, and no memory is used up."""
    scheduler = get_schedule("all_gather_1d_ring_a", 2048)
    assert scheduler.work_tile(1, 5) == (4, 5, 0, 0)
    with pytest.raises(ValueError, match="at most 1048576 tiles, got 2048 ranks with 2048 tiles each"):
        scheduler.owner("D", (0, 0, 0))
    plan = make_plan(GemmProblem(m=720, n=720, k=64), "all_gather_1d_ring_a", 72)
    monkeypatch.setattr(rotate, "MAX_OPS", 1000)
    assert plan.ops(1) and plan.ops(2)
    with pytest.raises(ValueError, match="ops on each of 72 ranks, and at most 1000 ops are made"):
        tuple(plan.rank_ops)
