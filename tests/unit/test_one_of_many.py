"""benchmarks/one_of_many.py: which flags and slots stand for which where two GPUs play many ranks."""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import distgemm
from distgemm import tune
from distgemm.gemm.flags import MemOp
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, Signal, View, Wait
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import PATTERNS, Pattern
from tests.unit.cuda_emulation import ANY_TERMS, Data, machine_of

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "one_of_many.py"


@pytest.fixture(scope="module")
def module() -> Any:
    if not BENCHMARK.is_file():
        pytest.skip("a source archive has no benchmarks/")
    spec = importlib.util.spec_from_file_location("one_of_many", BENCHMARK)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rank_0_does_to_its_peers_what_they_do_to_it(pattern: Pattern, ranks: int, module: Any) -> None:
    """In each plan that the tuner tries.

    Each flag that rank 0 waits for is set once. Each slot of rank 0 that peers write is written, by as many elements as
    rank 0 reads there.
    """
    problem = distgemm.GemmProblem(8192, 8192, 8192)
    plans = {(each.schedule, each.options) for each in tune.shortlist(problem, pattern, ranks) if each.method == "plan"}
    assert plans
    for schedule, options in plans:
        plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", **dict(options))
        flags, slots = module.counterparts(plan)
        ops = plan.ops(0)
        signalled = [flags[op.flag.rank, op.flag.number] for op in ops if isinstance(op, Signal)]
        waits = [op for op in ops if isinstance(op, Wait)]
        assert sorted(signalled) == sorted(op.flag.number for op in waits)
        written = {
            slots[view.rank, view.slot]: view.elements
            for op in ops
            if isinstance(op, (Gemm, Copy))
            for view in [op.dst if isinstance(op, Copy) else op.out]
            if view.rank
        }
        assert written.keys() == {op.slot for op in waits}
        sizes = {view.slot: view.elements for op in ops for view in slots_read(op) if view.slot in written}
        assert written == sizes


def slots_read(op: Op) -> list[View]:
    """Views of slots that an op reads."""
    views: list[View] = []
    if isinstance(op, Copy):
        views = [op.src]
    elif isinstance(op, Gemm):
        views = [op.a, op.b, *op.sources]
    elif isinstance(op, Reduce):
        views = [*op.sources]
    return [view for view in views if view.buffer == "slot"]


def test_flags_are_found_by_the_distance_of_ranks(module: Any) -> None:
    """What rank 0 sets at a peer, the other GPU, as rank 0, finds as set by a peer; each flag once."""
    bases = [0, *[1 << 20] * 7]
    buffer = module.RotatedBuffer(0, dict(enumerate(bases)), 8)
    for flag in (buffer.left, buffer.entered):
        own = {flag(0, peer) for peer in buffer.peers}
        assert {flag(peer, 0) - (1 << 20) for peer in buffer.peers} == own and len(own) == 7


def test_a_bound_call_writes_counterparts(module: Any, recorded: list[Any]) -> None:
    """The flags that rank 0 sets at peers are those that the other GPU waits for."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64, dtype="float32"), "gemm+ar", 4, sync="barrier")
    workspace = machine_of([plan]).workspaces[0]
    binder = module.BinderOfMany(plan, torch.device("cpu"), ExecutionConfig(ANY_TERMS))
    binder.attach(workspace, 1)
    recorded.clear()
    bound = binder.bind(Data(plan, 0).calls[0], 0)
    for launch in chain(*bound.launches, bound.leave):
        launch(0)
    flags, _ = module.counterparts(plan)
    wanted = {(op.flag.rank, flags[op.flag[:2]]) for op in plan.ops(0) if isinstance(op, Signal)}
    assert any(flags[op.flag[:2]] != op.flag.number for op in plan.ops(0) if isinstance(op, Signal))
    first = workspace.buffers[0].plan_flag(0, 0)
    written = {task.address for task in recorded if isinstance(task, MemOp) and not task.wait}
    at_peers = {(address >> 32, (address % (1 << 32) - first) // 4) for address in written if address >> 32}
    assert {(rank, number) for rank, number in at_peers if number >= 0} == wanted
