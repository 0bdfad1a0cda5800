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
            assert plan.to_json() == derived.to_json()
            assert distgemm.Plan.from_json(plan.to_json()).digest == plan.digest
    assert resized > 0


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
