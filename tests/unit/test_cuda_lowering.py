"""Lowering: the streams and batches of a rank's actions, and the plans that it refuses."""

from __future__ import annotations

import dataclasses

import pytest

import distgemm
from distgemm.plan.ops import Copy, Gemm, Signal, Wait
from distgemm.plan.plan import PlanError
from distgemm.runtime.cuda.lowering import most_flags
from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, waits_of
from distgemm.runtime.cuda.workspace import Step
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    CHAINS,
    GATHERS,
    PAIRWISE,
    actions_of,
    plans,
)

SMALL = distgemm.GemmProblem(64, 64, 64)


def rows_of(op: Gemm | Copy) -> int:
    """Rows of A that an op multiplies, or rows that it copies."""
    start, stop = (op.a if isinstance(op, Gemm) else op.src).box[1]
    return stop - start


# --- streams and batches --------------------------------------------------------------------------------


def test_copies_between_ranks_are_on_one_stream() -> None:
    for schedule in distgemm.list_schedules():
        for plan in plans(schedule, 4):
            for action in actions_of(plan, 1, 2):
                crosses = [op for op in action.ops if isinstance(op, Copy) and op.dst.rank != op.rank]
                assert not crosses or action.stream == COMM


def test_gemms_do_not_stand_behind_sums() -> None:
    """Sums have a stream of their own where GEMMs of a later chunk follow, and none where they come last."""
    for chunks, streams in (
        (1, {COMM, GEMM_STREAM, GEMM_STREAM + 1}),
        (2, {COMM, GEMM_STREAM, GEMM_STREAM + 1, GEMM_STREAM + 2}),
    ):
        plan = distgemm.make_plan(distgemm.GemmProblem(64, 16, 16), PAIRWISE, 4, chunks=chunks, sync="barrier")
        actions = actions_of(plan, 1, 2)
        assert {action.stream for action in actions} == streams
        waiting = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Wait)}
        multiplying = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Gemm)}
        assert multiplying == {GEMM_STREAM, GEMM_STREAM + 1} and (chunks == 1 or not waiting & multiplying)


def test_the_last_signal_and_the_entry_are_one_batch() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 4, sync="barrier")
    steps = [action for action in actions_of(plan, 1) if action.step is Step.ENTERED]
    assert [type(op) for action in steps for op in action.ops] == [Signal]


# --- merged copies --------------------------------------------------------------------------------------


def test_all_shards_but_the_last_are_merged() -> None:
    problem = distgemm.GemmProblem(m=64, n=16, k=64, dtype="float32")

    def rows(ranks: int, merge_copies: bool, schedule: str = GATHERS[0]) -> dict[str, list[int]]:
        """Rows of each GEMM and copy, and sizes of the batches of Waits and Signals."""
        plan = distgemm.make_plan(problem, schedule, ranks, chunks=4, sync="barrier")
        actions = actions_of(plan, 1, merge_copies=merge_copies)
        ops = [op for action in actions for op in action.ops]
        found = {kind.__name__: [rows_of(op) for op in ops if isinstance(op, kind)] for kind in (Gemm, Copy)}
        batches = [action.ops for action in actions if action.ops and isinstance(action.ops[0], (Wait, Signal))]
        return found | {"batches": [len(batch) for batch in batches]}

    assert rows(4, False)["Gemm"] == [4] * 16
    found = rows(4, True)
    assert found["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and sorted(found["Copy"]) == [4, 4, 4, 4, 16, 16]
    assert sorted(found["batches"]) == [1] * 8 + [4] * 4  # all Signals of a copy, and all Waits of a GEMM
    assert rows(2, True)["Gemm"] == [32, 8, 8, 8, 8]
    ring = rows(4, True, GATHERS[1])
    assert ring["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and set(ring["Copy"]) == {4, 16}
    scatter = rows(4, True, CHAINS[0])
    assert set(scatter["Gemm"]) == {4}  # other ops wait for them
    odd = distgemm.make_plan(distgemm.GemmProblem(64, 16, 24), GATHERS[0], 4, chunks=4, sync="barrier")
    gemms = [op for action in actions_of(odd, 1, merge_copies=True) for op in action.ops if isinstance(op, Gemm)]
    assert [op.a.buffer for op in gemms] == ["A"] + ["slot"] * 12  # there are gaps between slots


# --- flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [GATHERS[0], CHAINS[0], ALL_REDUCES[0]])
def test_most_flags_counts_every_flag(schedule: str) -> None:
    plan = distgemm.make_plan(SMALL, schedule, 4, sync="barrier", chunks=2)
    for rank in range(4):
        actions = actions_of(plan, rank)
        signals = [op for action in actions for op in action.ops if isinstance(op, Signal)]
        numbers = [op.flag.number for op in (*signals, *waits_of(actions))]
        assert len(set(numbers)) > 2 and max(numbers) < most_flags(plan)


# --- what is refused ------------------------------------------------------------------------------------


def test_a_barrier_in_the_middle_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2, sync="barrier")
    barrier, *others = plan.ops(0)
    moved = dataclasses.replace(barrier, id=99, deps=(others[0].id,))
    with pytest.raises(PlanError, match="at the start"):
        actions_of(plan.replace_ops(0, [*others, moved]), 0)


def test_a_second_wait_for_a_flag_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    actions_of(plan, 0)
    ops = plan.ops(0)
    for wait in (op for op in ops if isinstance(op, Wait)):
        with pytest.raises(PlanError, match="waits for a flag once in a replay"):
            actions_of(plan.replace_ops(0, [*ops, dataclasses.replace(wait, id=99)]), 0)


def test_a_late_wait_for_the_last_replay_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm))
    late = [
        dataclasses.replace(op, deps=(gemm.id,)) if isinstance(op, Wait) and op.flag.initial else op
        for op in plan.ops(0)
    ]
    with pytest.raises(PlanError, match="waits for the last replay at the start, after no other op"):
        actions_of(plan.replace_ops(0, late), 0)


def test_ops_that_need_a_signal_for_the_next_replay_are_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    signal = next(op for op in plan.ops(0) if isinstance(op, Signal) and op.flag.initial)
    *others, last = [op for op in plan.ops(0) if not isinstance(op, Signal)]
    assert others
    late = dataclasses.replace(last, deps=(*last.deps, signal.id))
    with pytest.raises(PlanError, match="Signal for the next replay"):
        actions_of(plan.replace_ops(0, [*(op for op in plan.ops(0) if op.id != last.id), late]), 0)
