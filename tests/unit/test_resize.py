"""A plan that takes the structure of another plan is the plan that the derivation makes."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest

import distgemm
from distgemm import GemmProblem, make_plan
from distgemm.plan import derive
from distgemm.plan.ops import Gemm, accesses
from distgemm.plan.resize import ResizedOps
from distgemm.plan.restrict import RestrictedOps
from distgemm.schedulers import Hop, get_schedule, list_schedules, schedule_mesh_rank, schedule_options

MESHES = {1: [(1,), (2,), (3,), (4,), (5,), (8,)], 2: [(2, 2), (2, 3), (1, 4)], 3: [(2, 2, 2), (1, 2, 3)]}
RING, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"


def problems(rng: random.Random, ranks: int) -> Iterator[GemmProblem]:
    """Problems that differ in their rows: a few and many, as torch.chunk splits them and by rank."""
    rest: dict[str, Any] = {"n": rng.randint(1, 70), "k": rng.randint(1, 70), "l": rng.choice([1, 1, 2])}
    rest |= {"dtype": rng.choice(["bfloat16", "float32"]), "partial_dtype": rng.choice([None, "float32"])}
    while True:
        if rng.random() < 0.3:
            rows = tuple(rng.randint(0, rng.choice([3, 30])) for _ in range(ranks))
            if sum(rows):
                yield GemmProblem(m=sum(rows), m_per_rank=rows, **rest)
        yield GemmProblem(m=rng.randint(1, rng.choice([9, 90, 9000])), **rest)


def schedule_of(rng: random.Random, name: str) -> distgemm.DistributedTileScheduler | None:
    """A schedule with a mesh and chunks by chance; None where they do not go together."""
    options = {"chunks": rng.choice([1, 2, 3, 16])} if "chunks" in schedule_options(name) else {}
    try:
        return get_schedule(name, mesh=rng.choice(MESHES[schedule_mesh_rank(name)]), **options)
    except ValueError:
        return None


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(60))
def test_the_structure_of_another_plan_gives_the_derived_plan(seed: int) -> None:
    """Of random schedules, ranks, chunks, rows and options, byte for byte."""
    rng = random.Random(seed)
    resized = 0
    for name in list_schedules():
        scheduler = schedule_of(rng, name)
        if scheduler is None:
            continue
        options = {
            "workspace": rng.choice(derive.WORKSPACES),
            "sync": rng.choice(derive.SYNCS),
            "mechanism": rng.choice(derive.MECHANISMS),
            "send_slots": rng.choice([1, 2, 4]),
        }
        derive.forget_plans()
        for problem, _ in zip(problems(rng, prod(scheduler.mesh)), range(4), strict=False):
            try:
                derived = derive._derive(problem, scheduler, *options.values()).plan
            except ValueError:  # these rows do not fit
                with pytest.raises(ValueError, match=scheduler.name):
                    make_plan(problem, scheduler, **options)
                continue
            plan = make_plan(problem, scheduler, **options)
            resized += isinstance(plan.rank_ops, ResizedOps)
            assert plan.digest == derived.digest  # before its ops are made
            assert plan == derived and hash(plan) == hash(derived), (name, problem, options)
            assert plan.to_json() == derived.to_json() and plan.sizes == derived.sizes
            assert distgemm.Plan.from_json(plan.to_json()).digest == plan.digest
    assert resized > 0


AUTO = [
    ("all_gather_1d_tiling_cd_rotating_a", {}),
    ("all_gather_1d_ring_a", {}),
    (RING, {}),
    ("reduce_scatter_1d_pairwise_a", {}),
    (PAIRWISE, {"sync": "barrier"}),
    ("all_reduce_1d_one_shot_a", {}),
]
"""Schedules that "auto" takes, and a ring."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "options"), AUTO)
def test_without_empty_tiles_a_plan_is_the_derived_plan(name: str, options: dict[str, Any]) -> None:
    """One plan is derived. All others leave out its empty tiles, or change its rows."""
    scheduler = get_schedule(name, 8, chunks=4)
    # An extent of K that leaves ranks without work, and partial sums of another type, which wait in slots of their own.
    rest: dict[str, Any] = {"n": 9, "k": 17, "partial_dtype": "float32", **options}
    sync = rest.pop("sync", "credit")
    rows = [*range(1, 65), 95, 96, 97, 1023, 1024, 1025]
    derived = {m: derive._derive(GemmProblem(m, **rest), scheduler, "full", sync, "push", 2).plan for m in rows}
    derive.forget_plans()
    calls, restricted = [], 0

    def note(*args: Any) -> Any:
        calls.append(args)
        return make(*args)

    make = derive._derive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive, "_derive", note)
        for m in rows:
            plan = make_plan(GemmProblem(m, **rest), scheduler, sync=sync)
            if isinstance(plan.rank_ops, RestrictedOps):
                assert plan.sizes == derived[m].sizes and plan.fingerprint and not plan.rank_ops.made
                restricted += 1
            assert plan == derived[m], m
            assert plan.digest == derived[m].digest and plan.sizes == derived[m].sizes
    assert len(calls) == 1 and restricted > 2
    plan.verify()


@pytest.mark.parametrize(
    ("name", "chunks", "mechanism"),
    [
        ("all_gather_1d_tiling_cd_rotating_a", 1, "pull"),  # GEMMs wait for the GEMM before them
        ("all_gather_1d_bidirectional_split_a", 3, "push"),  # halves of tiles move
        ("all_gather_1d_tiling_cd_rotating_b", 3, "push"),  # tiles of B move for all tiles of M
    ],
)
def test_tiles_that_depend_on_each_other_are_not_left_out(name: str, chunks: int, mechanism: Any) -> None:
    scheduler = get_schedule(name, 4, chunks=chunks)
    derive.forget_plans()
    for m in range(1, 30):
        problem = GemmProblem(m, 9, 17)
        derived = derive._derive(problem, scheduler, "full", "credit", mechanism, 2).plan
        assert make_plan(problem, scheduler, mechanism=mechanism) == derived, m


def test_fingerprints_do_not_depend_on_earlier_plans() -> None:
    """They differ between plans, and are digests where none of 16 tiles is empty."""
    rows, found = [1, 2, 3, 5, 9, 17, 40, 41, 300], []
    for order in (rows, rows[::-1], rows[4:] + rows[:4]):
        derive.forget_plans()
        plans = {m: of_rows(m, chunks=4) for m in order}
        found.append({m: plan.fingerprint for m, plan in plans.items()})
        for m, plan in plans.items():
            assert (plan.fingerprint == plan.digest) == (len(set(plan.edges[0])) == 17), m
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == len(rows)
    alike = [of_rows(9, chunks=4, **options) for options in ({}, {"send_slots": 3}, {"sync": "barrier"})]
    alike.append(make_plan(GemmProblem(9, 64, 64, m_per_rank=(3, 3, 3, 0)), RING, 4, chunks=4))
    assert alike[3].edges == alike[0].edges and len({plan.fingerprint for plan in alike}) == 4


def test_a_rank_that_waits_for_fewer_tiles_has_fewer_flags_and_slots() -> None:
    derive.forget_plans()
    whole, plan = of_rows(256, chunks=4), of_rows(9, chunks=4)
    assert isinstance(plan.rank_ops, RestrictedOps) and plan.structure is plan
    for rank, (before, after) in enumerate(zip(whole.sizes, plan.sizes, strict=True)):
        assert all(map(int.__lt__, after, before))
        assert len(plan.slots[rank]) < len(whole.slots[rank])
    plan.verify()


def of_rows(m: int, name: str = RING, **options: Any) -> distgemm.Plan:
    return make_plan(GemmProblem(m, 64, 64), name, 4, **options)


def test_a_plan_makes_the_ops_of_the_ranks_that_are_asked_for() -> None:
    derive.forget_plans()
    first, plan = of_rows(256), of_rows(512)
    assert plan.structure is first and first.structure is first
    assert isinstance(plan.rank_ops, ResizedOps) and len(plan.rank_ops) == plan.world_size == 4
    _ = plan.digest, plan.workspace_bytes(3), plan.padded_rows, hash(plan)
    assert plan.rank_ops.made == 0
    assert plan.ops(1) is plan.ops(1) and plan.rank_ops.made == len(first.ops(1))
    plan.verify()
    assert plan.rank_ops[-1] is plan.ops(3) and plan.rank_ops[1:3] == (plan.ops(1), plan.ops(2))
    with pytest.raises(IndexError):
        plan.rank_ops[4]


def test_views_of_the_structure_have_views_of_the_plan() -> None:
    derive.forget_plans()
    first, plan = of_rows(256), of_rows(300)
    for before, after in zip(first.ops(2), plan.ops(2), strict=True):
        reads, write = accesses(before)
        assert [plan.own_view(view) for view in reads] == accesses(after)[0]
        assert (None if write is None else plan.own_view(write)) == accesses(after)[1]
        if isinstance(before, Gemm) and isinstance(after, Gemm):
            assert after.b is before.b and first.own_view(before.a) is before.a


def test_rows_that_coincide_need_another_structure() -> None:
    """On 4 ranks in 2 chunks, 9 rows leave a rank without rows, and 5 rows leave chunks without rows."""
    derive.forget_plans()
    plans = [of_rows(m, chunks=2) for m in (256, 9, 5, 300)]
    assert [plan.structure is plan for plan in plans] == [True, True, True, False]
    assert plans[3].structure is plans[0]


@dataclass(frozen=True)
class InThree:
    """A route that sends each tile in three parts."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        return [Hop(holder, rank, part, 3) for rank in needers for part in range(3)]


@pytest.mark.parametrize(
    ("first", "m", "resized"),
    [
        (2, 3, False),  # the structure has no third part
        (3, 2, False),  # the plan has no third part
        (4, 5, False),  # 4 rows are parts of 2, 2 and 0
        (5, 4, False),
        (3, 5, True),
        (5, 90, True),
        (2, 4, True),
    ],
)
def test_parts_that_are_empty_need_another_structure(first: int, m: int, resized: bool) -> None:
    """The rows of tiles alone do not tell."""
    gather = get_schedule("all_gather_1d_tiling_cd_rotating_a", 2)
    scheduler = replace(gather, name="in_three", route=replace(gather.route, a=InThree()))
    derive.forget_plans()
    _, plan = (make_plan(GemmProblem(2 * rows, 8, 8), scheduler) for rows in (first, m))
    assert (plan.structure is not plan) == resized
    derived = derive._derive(plan.problem, scheduler, plan.workspace, plan.sync, plan.mechanism, 2).plan
    assert plan == derived
    plan.verify()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_is_equal_and_is_its_own_structure(way: Any) -> None:
    derive.forget_plans()
    of_rows(256)
    plan = of_rows(512)
    again = way(plan)
    assert again == plan and again.digest == plan.digest and again.structure is again
    again.verify()


def test_a_plan_with_other_fields_is_its_own_structure() -> None:
    """So nothing that was found for the structure counts for it."""
    derive.forget_plans()
    of_rows(256)
    plan = of_rows(512)
    changed = replace(plan, slots=plan.structure.slots)
    assert changed.structure is changed and changed.digest not in (plan.digest, plan.structure.digest)
    with pytest.raises(distgemm.PlanError, match="does not fit into its slot"):
        changed.verify()
    without = plan.replace_ops(0, plan.ops(0)[:-1])
    assert without.structure is without and without.digest != plan.digest


def test_planning_the_next_number_of_rows_derives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    derive.forget_plans()
    make_plan(GemmProblem(8192, 64, 64), PAIRWISE, 8, chunks=16)
    monkeypatch.setattr(derive, "_derive", None)
    for m in range(2048, 8192, 128):
        make_plan(GemmProblem(m, 64, 64), PAIRWISE, 8, chunks=16)
