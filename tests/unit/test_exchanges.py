"""What crosses hosts: the exchanges of a plan, and the proof that none of them waits forever."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from typing import Any

import pytest

import distgemm
from distgemm import PlanError
from distgemm.plan.exchanges import Exchange, check_exchanges, ops_with_exchanges
from distgemm.plan.ops import Copy, Signal, Wait, link_of
from distgemm.schedulers import schedule_mesh_rank, schedule_options

PROBLEM = distgemm.GemmProblem(m=96, n=96, k=96)
RING, DIRECT = "all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
OTHER_CHAIN = "reduce_scatter_1d_tiling_b_rotating_c"
NESTED = ((RING, DIRECT), (DIRECT, RING), (CHAIN, CHAIN), (PAIRWISE, CHAIN), (CHAIN, PAIRWISE), (RING, OTHER_CHAIN))
"""Schedules across hosts and inside."""


def nested(across: str = RING, inside: str = DIRECT, mesh: tuple[int, int] = (2, 2), **options: Any) -> distgemm.Plan:
    names = {"across": across, "inside": inside}
    return distgemm.make_plan(
        PROBLEM, "tensor_parallel_2d_nested", mesh=mesh, ranks_per_host=mesh[1], **names, **options
    )


def every_plan(name: str) -> list[distgemm.Plan]:
    mesh = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}[schedule_mesh_rank(name)]
    chunked = {"chunks": 2} if "chunks" in schedule_options(name) else {}
    ways = itertools.product(("full", "bounded"), ("credit", "barrier"), (1, 2))
    return [
        distgemm.make_plan(PROBLEM, name, mesh=mesh, workspace=workspace, sync=sync, ranks_per_host=of_host, **chunked)
        for workspace, sync, of_host in ways
    ]


@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_exchanges_are_the_copies_across_hosts_in_one_order(name: str) -> None:
    for plan in every_plan(name):
        channels: list[dict[tuple[int, int], list[Copy]]] = [defaultdict(list), defaultdict(list)]
        for rank in range(plan.world_size):
            ops = ops_with_exchanges(plan, rank)
            for op in ops:
                if isinstance(op, Exchange):
                    for copy in op.sends:
                        channels[0][rank, copy.dst.rank].append(copy)
                    for copy in op.receives:
                        channels[1][copy.src.rank, rank].append(copy)
                elif isinstance(op, Copy):
                    assert not plan.across(op.src.rank, op.dst.rank)
                elif isinstance(op, Wait):
                    assert not plan.across(rank, op.peer)
                elif isinstance(op, Signal):
                    assert not plan.across(rank, op.flag.rank)
            seen: set[int] = set()
            for op in ops:
                assert seen.issuperset(op.deps)
                seen.add(op.id)
            assert len(seen) == len(ops)
            rounds = [op.round for op in ops if isinstance(op, Exchange)]
            assert rounds == sorted(set(rounds))
        sent, received = channels
        assert sent == received
        crossing = [op for ops in plan.rank_ops for op in ops if (link := link_of(op)) and plan.across(*link)]
        assert sorted(map(str, itertools.chain(*sent.values()))) == sorted(map(str, crossing))
        check_exchanges(plan)
        plan.verify()


@pytest.mark.parametrize(("across", "inside"), NESTED)
def test_what_an_exchange_replaces_still_comes_before_and_after_it(across: str, inside: str) -> None:
    """An op that waited for an arrival needs the exchange, and what a copy needed the exchange needs."""
    for workspace in ("full", "bounded"):
        plan = nested(across, inside, (3, 2), chunks=2, workspace=workspace)
        for rank in range(plan.world_size):
            before = {op.id: op for op in plan.ops(rank)}
            after = {op.id: op for op in ops_with_exchanges(plan, rank)}
            exchange_of = {
                copy.id: op for op in after.values() if isinstance(op, Exchange) for copy in op.sends
            }  # by the copy that it sends
            receipts = {copy: op for op in after.values() if isinstance(op, Exchange) for copy in op.receives}
            for op in before.values():
                for dep in op.deps:
                    need = before[dep]
                    if op.id in after and isinstance(need, Wait) and plan.across(rank, need.peer):
                        assert not need.flag.credit
                        (signal,) = (
                            one for one in plan.ops(need.peer) if isinstance(one, Signal) and one.flag == need.flag
                        )
                        for copy, exchange in receipts.items():
                            if copy.rank == need.peer and copy.id in signal.deps:
                                assert exchange.id in after[op.id].deps
                    elif op.id in exchange_of and dep in after:
                        assert dep in exchange_of[op.id].deps
                    elif op.id in after and dep in exchange_of:
                        assert exchange_of[dep].id in after[op.id].deps


def test_credits_within_a_replay_become_needs_of_the_receiver() -> None:
    plan = distgemm.make_plan(PROBLEM, RING, 6, workspace="bounded", ranks_per_host=2)
    credits = [
        (op, plan.ops(op.flag.rank))
        for ops in plan.rank_ops
        for op in ops
        if isinstance(op, Signal) and op.flag.credit and not op.flag.initial and plan.across(op.rank, op.flag.rank)
    ]
    assert credits
    for signal, sender in credits:
        (wait,) = (op for op in sender if isinstance(op, Wait) and op.flag == signal.flag)
        copy = next(op for op in sender if isinstance(op, Copy) and wait.id in op.deps)
        after = ops_with_exchanges(plan, signal.rank)
        (exchange,) = (op for op in after if isinstance(op, Exchange) and copy in op.receives)
        left = {op.id for op in after}
        assert left.intersection(signal.deps) <= set(exchange.deps)


def test_a_plan_of_one_host_has_no_exchanges() -> None:
    plan = distgemm.make_plan(PROBLEM, "tensor_parallel_2d_nested", mesh=(2, 2))
    assert plan.ranks_per_host is None and plan.link_bytes("across") == {}
    assert plan.link_bytes("inside") == plan.link_bytes()
    assert ops_with_exchanges(plan, 1) == plan.ops(1)
    assert distgemm.make_plan(PROBLEM, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=4) is plan
    assert not plan.across(0, 3) and plan.host(3) == 0
    hosts = nested()
    assert [hosts.host(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert hosts.across(1, 2) and not hosts.across(2, 3)
    with pytest.raises(ValueError, match="kind is one of inside, across, got 'near'"):
        hosts.link_bytes("near")  # type: ignore[arg-type]


def test_hosts_are_part_of_what_ranks_compare() -> None:
    one, hosts = (distgemm.make_plan(PROBLEM, DIRECT, 4, ranks_per_host=count) for count in (None, 2))
    assert one.rank_ops == hosts.rank_ops
    assert one.digest != hosts.digest and one.fingerprint != hosts.fingerprint and one != hosts
    back = distgemm.Plan.from_json(hosts.to_json())
    assert back == hosts and back.ranks_per_host == 2 and back.digest == hosts.digest


def test_wrong_hosts_are_named() -> None:
    def made(**options: Any) -> distgemm.Plan:
        return distgemm.make_plan(PROBLEM, DIRECT, 4, **options)

    with pytest.raises(ValueError, match="ranks_per_host divides the number of ranks, 4, got 3"):
        made(ranks_per_host=3)
    with pytest.raises(ValueError, match="ranks_per_host is an integer from 1 to 4, got 8"):
        made(ranks_per_host=8)
    for mechanism in ("pull", "store"):
        with pytest.raises(ValueError, match=f"mechanism '{mechanism}' accesses the memory of other ranks"):
            made(ranks_per_host=2, mechanism=mechanism)
    for count in (3, 0, 4, 8):
        with pytest.raises(PlanError, match="its ranks_per_host is None for one host, or divides them, got"):
            dataclasses.replace(made(), ranks_per_host=count).verify()
    with pytest.raises(PlanError, match="ranks_per_host is an integer or None, got '2'"):
        dataclasses.replace(made(), ranks_per_host="2").verify()  # type: ignore[arg-type]


def test_messages_of_one_round_that_need_one_another_are_refused() -> None:
    plan = nested(RING, DIRECT, (3, 1))
    for rank in range(3):  # a rank passes on what it gets in the same round
        plan = plan.replace_ops(rank, [dataclasses.replace(op, round=1) for op in plan.ops(rank)])
    with pytest.raises(PlanError, match="needs a message of its own round, 1"):
        ops_with_exchanges(plan, 0)


def test_a_rank_that_never_sends_is_a_deadlock_on_the_other_host() -> None:
    """Rank 1 does not tell rank 0 that its partial sum has arrived, so rank 2 waits for the sum of that host."""
    plan = nested(CHAIN, CHAIN)
    check_exchanges(plan)
    signal = next(op for op in plan.ops(1) if isinstance(op, Signal) and op.flag.rank == 0 and not op.flag.credit)
    silent = plan.replace_ops(1, [op for op in plan.ops(1) if op is not signal])
    with pytest.raises(PlanError, match=r"Wait .*deadlock across hosts: it never ends; nor does .*rank 2 .*Exchange"):
        check_exchanges(silent)


def test_memory_of_other_hosts_is_not_accessed() -> None:
    for mechanism in ("pull", "store"):
        plan = dataclasses.replace(distgemm.make_plan(PROBLEM, CHAIN, 4, mechanism=mechanism), ranks_per_host=2)
        with pytest.raises(PlanError, match=f"whose memory they do not access; got mechanism '{mechanism}'"):
            plan.verify()


def test_thousands_of_ranks_on_many_hosts() -> None:
    """Rank 0's ops are derived, and its exchanges need the ops of few others."""
    problem = distgemm.GemmProblem(m=512 * 16, n=512 * 16, k=64)
    both = {"across": RING, "inside": DIRECT}
    plan = distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=(64, 8), ranks_per_host=8, **both)
    ops = ops_with_exchanges(plan, 77)
    exchanges = [op for op in ops if isinstance(op, Exchange)]
    assert len(exchanges) == 63 and {tuple(op.peers) for op in exchanges} == {(69, 85)}
