"""What stands for what where two GPUs take the parts of many ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm import tune
from distgemm.plan.ops import Copy, Gemm, Signal, Wait

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


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", ["ag+gemm", "gemm+rs", "gemm+ar"])
def test_what_a_rank_does_to_its_peers_is_done_to_it(op: str, ranks: int, module: Any) -> None:
    """Of each plan that the tuner tries, each word that rank 0 waits for is written once, and each slot that it reads
    of what peers send; by the GEMMs and copies that send as much."""
    problem = distgemm.GemmProblem(8192, 8192, 8192)
    plans = {(each.schedule, each.options) for each in tune.shortlist(problem, op, ranks) if each.method == "plan"}
    assert plans
    for schedule, options in plans:
        plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", **dict(options))
        flags, slots = module.counterparts(plan)
        ops = plan.ops(0)
        told = [flags[op.flag.rank, op.flag.number] for op in ops if isinstance(op, Signal)]
        waits = [op for op in ops if isinstance(op, Wait)]
        assert sorted(told) == sorted(op.flag.number for op in waits)
        written = {
            slots[view.rank, view.slot]: view.elements
            for op in ops
            if isinstance(op, (Gemm, Copy))
            for view in [op.dst if isinstance(op, Copy) else op.out]
            if view.rank
        }
        assert written.keys() == {op.slot for op in waits}
        sizes = {view.slot: view.elements for op in ops for view in reads(op) if view.slot in written}
        assert written == sizes


def reads(op: Any) -> list[Any]:
    """Views of slots that an op reads."""
    views = [op.src] if isinstance(op, Copy) else [op.a, op.b, *op.sources] if isinstance(op, Gemm) else []
    views += op.sources if isinstance(op, distgemm.plan.ops.Reduce) else []
    return [view for view in views if view.buffer == "slot"]


def test_words_are_found_by_how_far_ranks_are(module: Any) -> None:
    """What rank 0 writes at a peer lies where the other GPU, as rank 0, finds it as that of a peer; each once."""
    bases = [0, *[1 << 20] * 7]
    half = module.RotatedHalf(0, bases)
    for word in (half.left, half.entered):
        own = {word(0, peer) for peer in half.peers}
        assert {word(peer, 0) - (1 << 20) for peer in half.peers} == own and len(own) == 7
