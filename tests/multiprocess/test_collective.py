"""The collective runtime on gloo, against numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distgemm import CollectiveExecutable, GemmProblem, PlanError, list_schedules, make_plan
from distgemm.plan.ops import Copy, Gemm
from distgemm.runtime.collective.memory import CallState, Memory, SharedMemory
from distgemm.runtime.collective.program import Program
from distgemm.runtime.collective.steps import Message, Synchronize
from distgemm.runtime.launch import launch
from tests.forked import results
from tests.multiprocess import worker

NUMBER = {1: 4, 2: 12, 3: 12, 4: 12, 6: 4}
"""Cases of each schedule, by world size."""
PART = 4
"""Of these, cases in one test."""


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        pytest.param(ranks, first, marks=[] if (ranks, first) == (3, 0) else pytest.mark.sample(0))
        for ranks, number in NUMBER.items()
        for first in range(0, number, PART)
    ],
)
def test_every_schedule_equals_numpy(ranks: int, first: int) -> None:
    """In the sample, four cases of each schedule."""
    cases = worker.cases(ranks, NUMBER[ranks], slice(first, first + PART))
    assert {case.schedule for case in cases} >= {
        n for n in list_schedules() if ranks & (ranks - 1) == 0 or "xor" not in n
    }
    assert [failure for found in launch(worker.run_cases, ranks, cases, timeout=120) for failure in found] == []


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.sample(0)) for ranks in (2, 4))])
def test_a_one_shot_all_reduce_has_the_same_bits_on_all_ranks(ranks: int) -> None:
    assert results(ranks, worker.one_shot_bits) == [[]] * ranks


@pytest.mark.sample(0)
def test_two_tensor_parallel_groups_of_three_run_at_once_on_unequal_tokens() -> None:
    assert results(6, worker.subgroups, 2) == [[]] * 6


def test_different_plans_raise_on_all_ranks_and_name_the_odd_one() -> None:
    for found in results(3, worker.different_plans, 1):
        for message in found:
            assert message.startswith("ValueError: the ranks of the group make different calls; ")
            assert "digest of the plan: " in message
        schedules, ranks, ops = found
        usual = "all_gather_1d_tiling_cd_rotating_a on ranks 0, 2"
        assert f"schedule: {usual}, all_gather_1d_ring_a on rank 1;" in schedules
        assert "number of ranks: 3 on ranks 0, 2, 4 on rank 1;" in ranks and "schedule: " not in ops


def test_equal_plans_of_other_origin_run_together() -> None:
    assert results(3, worker.equal_plans, 1) == [[True] * 3] * 3


def test_a_plan_that_one_rank_cannot_execute_raises_on_all_ranks() -> None:
    for rank, message in enumerate(results(3, worker.unexecutable_on_one)):
        assert message.startswith("PlanError")
        if rank < 2:
            assert "ranks [2]" in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("a shape", "A's shard on rank"),
        ("b shape", "B's shard on rank"),
        ("c shape", "C's shard on rank"),
        ("a dtype", "has dtype torch.float32, got torch.float64"),
        ("c dtype", "has dtype torch.bfloat16, got torch.float32"),
        ("out dtype", "out on rank"),
        ("device", "a tensor with values, and not one on the device meta"),
        ("type", "is a torch.Tensor, as torch.as_tensor makes it, got a ndarray of shape"),
        ("bias shape", "bias on rank"),
        ("bias dtype", "of torch.bfloat16 on cpu, got"),
        ("scale", "scale_a on rank "),
        ("no c", "c_shard is a torch.Tensor where beta is not 0: beta is 1.0, got None"),
        ("size", "the plan is for 3 ranks, the group has 2"),
        ("cuda", "cuda:0"),
        ("plan", "plan is a distgemm.Plan"),
        ("overlap", "out shares memory with A's shard"),
        ("outside", ""),
    ],
)
def test_wrong_arguments_raise(argument: str, message: str) -> None:
    for found in results(2, worker.wrong_arguments):
        assert found[argument].startswith("ValueError")
        assert message in found[argument]


def test_wrong_arguments_send_nothing() -> None:
    first, second = results(2, worker.wrong_arguments)
    assert first["after"] == second["after"] == ""
    assert "is not in the group" in second["outside"]


@pytest.mark.parametrize("mechanism", ["pull", "store"])
def test_plans_with_another_mechanism_than_push_are_refused(mechanism: str) -> None:
    """In a group of this process alone."""
    plans = [make_plan(GemmProblem(m=8, n=8, k=8), "gemm+rs", 1, mechanism=each) for each in ("push", mechanism)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exe = CollectiveExecutable(plans[0])
        assert (exe.provider, exe.transfers) == ("torch", "collective runtime over gloo")
        exe.release()
        with pytest.raises(ValueError, match=f"takes plans with mechanism=\"push\", got '{mechanism}'"):
            CollectiveExecutable(plans[1])
    finally:
        dist.destroy_process_group()


def test_ways_to_call() -> None:
    assert results(3, worker.variants) == [[], [], []]


def test_a_rank_gathers_its_own_rows_and_batches_of_a() -> None:
    assert results(3, worker.gathered) == [[], [], []]


def test_calls_in_compiled_code_break_its_graph() -> None:
    assert results(2, worker.traced) == [[], []]


def test_rows_of_slots_are_aligned_and_messages_carry_no_padding() -> None:
    """A tile lies in its slot with padding between its rows. This needs no processes."""
    plan = make_plan(GemmProblem(m=8, n=6, k=7, l=2), "all_gather_1d_tiling_cd_rotating_a", 2)
    memory = Memory(plan, 0, SharedMemory(torch.device("cpu")))
    (copy,) = [op for op in plan.ops(1) if isinstance(op, Copy)]
    no_group: Any = None
    call = CallState(memory, {}, 1.0, 0.0, None, None, [None], [None], no_group)
    tile = memory.tensor(copy.dst, {})
    assert tile.shape == (2, 4, 7) and tile.stride() == (32, 8, 1) and tile.data_ptr() % 16 == 0
    message = Message(0, 0, copy, False, 1, lambda call: call.memory.tensor(copy.dst, {}), torch.bfloat16)
    arrived = message.buffer(call)
    assert arrived.numel() == plan.link_bytes()[1, 0] == 2 * 4 * 7 * 2
    arrived.copy_(torch.ones(2 * 4 * 7, dtype=torch.bfloat16).view(torch.uint8))
    message.unpack(call)
    assert bool((tile == 1).all()) and int(memory.slot(0).isnan().sum()) == 2 * 4, "the padding must not change"


def test_numerics() -> None:
    assert results(2, worker.numerics) == [[], []]


def test_what_arrives_is_joined_where_no_wait_names_the_arrival() -> None:
    assert results(2, worker.arrivals_without_a_flag) == [[], []]


def test_an_op_in_the_round_of_a_message_that_is_not_posted_is_refused() -> None:
    """A Barrier orders an op after a Copy of its own round, whose message also needs a later op."""
    plan = worker.told_by_a_barrier()
    ops = list(plan.ops(1))
    (barrier,) = [op for op in ops if op.id == 99]
    copy = next(op for op in plan.ops(0) if isinstance(op, Copy))
    first = [dataclasses.replace(op, round=barrier.round) if op.id == copy.id else op for op in plan.ops(0)]
    gemm = ops[-1]
    assert isinstance(gemm, Gemm) and gemm.a == copy.dst
    late = plan.replace_ops(0, sorted(first, key=lambda op: op.round)).replace_ops(
        1, [*ops[:-1], dataclasses.replace(gemm, round=barrier.round)]
    )
    # Rank 1 also sends in that round, after its GEMM, so that it can post the round only then.
    mine = next(op for op in ops if isinstance(op, Copy))
    last = dataclasses.replace(mine, round=barrier.round, deps=(gemm.id,))
    moved = [op for op in late.ops(1) if op.id != mine.id]
    moved = [dataclasses.replace(op, deps=()) if op.id == 99 else op for op in moved]
    with pytest.raises(PlanError, match=r"Gemm .*touches slot 0.* in the round in which rank 0 .*Copy"):
        Program.of(late.replace_ops(1, [*moved, last]), 1, torch.device("cpu"), Synchronize(None))


def test_without_any_copy_the_result_changes_or_an_error_is_raised() -> None:
    by_rank = results(3, worker.deleted_copies)
    assert len(by_rank[0]) > 100
    for of_ranks in zip(*by_rank, strict=True):
        assert not all(right for _, right in of_ranks), of_ranks
