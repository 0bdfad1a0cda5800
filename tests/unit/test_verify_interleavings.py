"""The model checker against execution in all orders, for small plans: two replays, two or three ranks."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

import distgemm
from distgemm import GemmProblem, Plan, PlanError
from distgemm.plan.scaling import Scaling
from tests.unit.interleavings import Machine, fault
from tests.unit.mutations import effect, mutations

SYNCHRONISED = [("full", "credit"), ("bounded", "credit"), ("full", "barrier"), ("bounded", "barrier")]
CASES = [
    (name, ranks, chunks, *how)
    for name, (ranks, chunks), how in product(
        distgemm.list_schedules(), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)], SYNCHRONISED
    )
    if "1d" in name and not ("xor" in name and ranks == 3)
]

# How verify objects to plans that no execution can show to be wrong: they contradict themselves.
CONTRADICTIONS = (
    "where its tile is",  # a Gemm's tile and its views
    "waits for Flag(",  # a flag's first value, at its Wait and at its Signal
    "about slot",  # the slots that an op, a Signal and its Wait name
    "names slot",
    "names rank",  # a Wait's peer and the rank of the Signal
    "another place of the matrix",  # the boxes at both ends of a transfer, where the bytes are the same
    "elements apart",  # rows of a slot where nothing but their distance is wrong
    "which does not hold that tile",  # the box of a view and what was put there, where the bytes are the same
)


def small(
    name: str,
    mesh: tuple[int, ...],
    chunks: int,
    workspace: str,
    sync: str,
    mechanism: str = "push",
    scaling: Scaling | None = None,
) -> Plan:
    """A plan with tiles of one block of scales, or of two where a route halves them, and on the ring."""
    schedule = distgemm.get_schedule(name, mesh=mesh, chunks=chunks)
    m, n, k, _ = schedule.grid
    rows = 2 if "split" in name or "ring" in name else 1
    if scaling is None:
        problem = GemmProblem(m=m * rows, n=n, k=k)
    else:
        block_m, block_n, block_k = scaling.a.unit[0], scaling.b.unit[0], scaling.a.unit[1]
        problem = GemmProblem(m * rows * block_m, n * block_n, k * block_k, dtype="float8_e4m3fn", scaling=scaling)
    return distgemm.make_plan(problem, schedule, workspace=workspace, sync=sync, mechanism=mechanism)


def verdict(plan: Plan) -> str | None:
    try:
        plan.verify()
    except PlanError as error:
        return str(error)
    return None


@pytest.mark.sample(20)
@pytest.mark.parametrize(("name", "ranks", "chunks", "workspace", "sync"), CASES)
def test_small_plans_are_right_in_every_interleaving(
    name: str, ranks: int, chunks: int, workspace: str, sync: str
) -> None:
    plan = small(name, (ranks,), chunks, workspace, sync)
    assert fault(plan, exhaustive=ranks * chunks <= 2) is None
    assert effect(plan).fault is None
    plan.verify()


@pytest.mark.sample(10)
@pytest.mark.parametrize("mechanism", ["pull", "store"])
@pytest.mark.parametrize(("name", "ranks", "chunks", "workspace", "sync"), CASES[::3])
def test_small_plans_of_other_mechanisms_are_right_in_every_interleaving(
    name: str, ranks: int, chunks: int, workspace: str, sync: str, mechanism: str
) -> None:
    plan = small(name, (ranks,), chunks, workspace, sync, mechanism)
    assert fault(plan, exhaustive=ranks * chunks <= 2) is None
    assert effect(plan).fault is None
    plan.verify()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("workspace", "sync"), SYNCHRONISED)
def test_three_ranks_are_right_in_every_interleaving_of_all_ops(workspace: str, sync: str) -> None:
    machine = Machine(small("reduce_scatter_1d_tiling_a_rotating_c", (3,), 1, workspace, sync))
    assert machine.explore() > 3000


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "workspace", "sync"),
    [case for case in CASES if case[1] == 2 and case[2] == 1 and "split" not in case[0]],
)
def test_verify_finds_what_any_interleaving_of_a_mutation_shows(
    name: str, ranks: int, chunks: int, workspace: str, sync: str
) -> None:
    """All orders of all ops; also: what orders the accesses to one place, one at a time, finds the same."""
    plan = small(name, (ranks,), chunks, workspace, sync)
    for mutation in mutations(plan):
        found = fault(mutation.plan, exhaustive=True)
        said = verdict(mutation.plan)
        assert (found is None) == (fault(mutation.plan, exhaustive=False) is None), mutation.what
        assert (found is None) == (effect(mutation.plan).fault is None), mutation.what
        if found is not None:
            assert said is not None, f"{mutation.kind}: {mutation.what}: {found}"
        elif said is not None:
            assert any(part in said for part in CONTRADICTIONS), said


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "workspace", "sync"),
    [
        ("all_gather_1d_bidirectional_split_a", 2, 1, "full", "credit"),
        ("all_gather_1d_bidirectional_split_a", 2, 1, "bounded", "barrier"),
        ("all_gather_1d_bidirectional_full_a", 3, 1, "bounded", "credit"),
        ("all_gather_1d_ring_a", 3, 1, "full", "credit"),
        ("all_gather_1d_tiling_k_rotating_a", 3, 1, "bounded", "barrier"),
        ("all_gather_1d_pairwise_xor_a", 2, 2, "bounded", "credit"),
        ("reduce_scatter_1d_pairwise_a", 3, 1, "bounded", "credit"),
        ("reduce_scatter_1d_pairwise_a", 2, 2, "bounded", "credit"),
        ("reduce_scatter_1d_tiling_a_rotating_c", 3, 1, "bounded", "credit"),
        ("reduce_scatter_1d_tiling_b_rotating_c", 2, 2, "full", "credit"),
    ],
)
def test_verify_finds_what_the_interleavings_at_each_place_show(
    name: str, ranks: int, chunks: int, workspace: str, sync: str
) -> None:
    plan = small(name, (ranks,), chunks, workspace, sync)
    seen: Counter[str] = Counter()
    for mutation in mutations(plan):
        found = fault(mutation.plan, exhaustive=False)
        said = verdict(mutation.plan)
        seen["wrong" if found else "right"] += 1
        if found is not None:
            assert said is not None, f"{mutation.kind}: {mutation.what}: {found}"
        elif said is not None:
            assert any(part in said for part in CONTRADICTIONS), said
    assert seen["wrong"] > 100 and seen["right"] > 0
