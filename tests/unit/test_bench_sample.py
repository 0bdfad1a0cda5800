"""Measuring on two CPU ranks with a clock of our own: what is timed, checked and reported, and in which order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from distgemm.bench.cases import CANDIDATES, Case, Job, jobs
from distgemm.bench.run import Settings, progress, run_case
from distgemm.measure import timing
from distgemm.measure.operation import Method, Operation, WrongResultError, eager
from distgemm.measure.timing import Sample, measure, order_of_round, sample
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import PATTERNS, list_patterns
from tests import forked

T = TypeVar("T")
ROUNDS, BURST = 3, 8.0
MS = {"fast": 0.25, "slow": 3.0, "long": 20.0, "late": 0.5, "host": 4.0}


class FakeClock:
    """A device that takes as long as methods say, and a log of what was asked of it.

    each: milliseconds that anything that is timed takes besides
    now:  milliseconds; launched: whether calls come from a graph
    """

    def __init__(self, each: float = 0.0) -> None:
        self.each = each
        self.now, self.launched = 0.0, False
        self.log: list[tuple[str, int]] = []
        self.running = ""

    def barrier(self) -> None:
        dist.barrier()

    def capture(self, run: Callable[[], T], calls: int) -> tuple[Callable[[], object], T]:
        found = run()
        self.log.append((f"capture {self.running}", calls))

        def replay() -> None:
            self.launched = True
            for _ in range(calls):
                run()
            self.launched = False

        return replay, found

    def time(self, run: Callable[[], object], count: int) -> float:
        begin = self.now
        for _ in range(count):
            run()
            self.now += self.each
        self.log.append((self.running, round(self.now - begin)))
        return self.now - begin


def methods(operation: Operation, clock: FakeClock) -> list[Method]:
    rank = dist.get_rank()

    def method(name: str, write: Callable[[torch.Tensor], object] | None = None) -> Method:
        out = torch.zeros_like(operation.reference)
        calls = [0]

        def run() -> torch.Tensor | None:
            calls[0] += 1
            clock.running = name
            # Rank 1 takes twice as long; of "host", the host is slow, and a graph is not.
            clock.now += MS.get(name, 1.0) * (1 + rank) * (0.01 if name == "host" and clock.launched else 1)
            if name == "fails" and rank == 1:
                raise MemoryError("no\nmemory")
            if name == "stale" and calls[0] > 7:  # three calls, three that are timed, one that is captured
                return out
            out.copy_(operation.reference)
            if write is not None:
                write(out)
            return None if name.endswith(" alone") else out

        return Method(name, run)

    first = operation.reference.clone()  # of what peers brought in the first call

    def one_element(out: torch.Tensor) -> None:
        if rank == 0:
            out[5, 7] = 0 if abs(out[5, 7]) > 1 else 3

    return [
        method("fast"),
        method("slow"),
        method("fails"),
        method("element", one_element),
        method("nan", lambda out: out[3].fill_(float("nan"))),
        method("stale"),
        method("hasty", lambda out: out.copy_(first)),
        method("long"),
        eager(method("late")),
        method("host"),
        method("part alone"),
    ]


def worker() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    operation = Operation(GemmProblem(64, 48, 32), "gemm+rs", group, torch.device("cpu"))
    clock = FakeClock()
    told: list[str] = []
    found = sample(operation, methods(operation, clock), ROUNDS, BURST, clock, say=told.append)
    os.environ["DISTGEMM_TUNE"] = "0"  # "auto" measures nothing unasked
    settings = Settings(1, 1.0, auto=True, peers=True, tune=False, timelines=False, command="")
    rows = []
    for pattern in list_patterns():
        case = Case("llama-3-8b", "out", pattern, 64, 48, 32, 2, 4)
        (job,) = jobs([case])
        rows.append(run_case(job, settings, group, torch.device("cpu"), FakeClock(1.0)))
    uneven = Case("llama-3-8b", "out", "ag+gemm", 63, 48, 32, 2, 4)
    rows.append(run_case(Job(uneven, ()), settings._replace(tune=True), group, torch.device("cpu"), FakeClock(1.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "CudaClock", lambda group, device: FakeClock(1.0))
        slept: list[float] = []
        patch.setattr(timing.time, "sleep", slept.append)
        chosen = [method for method in methods(operation, clock) if method.name in ("fast", "slow")]
        sample(operation, chosen, ROUNDS, BURST, FakeClock(1.0), rest=0.5)
        raised = []
        for name in ("element", "fails"):
            chosen = [method for method in methods(operation, clock) if method.name == name]
            try:
                measure(operation, chosen)
            except RuntimeError as error:
                raised.append((type(error), str(error)))
    return {"samples": found, "log": clock.log, "rows": rows, "raised": raised, "slept": slept, "told": told}


def test_what_is_done_is_told_before() -> None:
    for each in results():
        called = [said.removesuffix(" is called, checked and captured") for said in each["told"] if "called" in said]
        assert called == list(each["samples"])
        ran = [name for name, one in each["samples"].items() if not one.error]
        assert each["told"][-1] == f"{each['log'][-1][0]} is measured, round {ROUNDS} of {ROUNDS}"
        assert sum("measured" in said for said in each["told"]) == len(ran) * (ROUNDS + 1)


def test_a_gpu_rests_behind_each_burst() -> None:
    for each in results():
        assert len(each["slept"]) == 2 * (ROUNDS + 1)
        assert all(0.4 * BURST < 1e3 * seconds < 2 * BURST for seconds in each["slept"]), each["slept"]


def results() -> list[dict[str, Any]]:
    return forked.results(2, worker)


def samples() -> dict[str, Sample]:
    found: dict[str, Sample] = results()[0]["samples"]
    return found


def test_the_slowest_rank_counts_in_every_round() -> None:
    for name in ("fast", "slow", "long", "part alone"):
        assert samples()[name].rounds == pytest.approx([2 * MS.get(name, 1.0)] * ROUNDS)
        assert samples()[name].ms == pytest.approx(2 * MS.get(name, 1.0))
    assert samples()["late, eager"].ms == pytest.approx(2 * MS["late"])
    assert samples()["host"].ms == pytest.approx(0.02 * MS["host"])


def test_all_ranks_find_the_same() -> None:
    one, other = results()
    assert one["samples"] == other["samples"]
    assert one["rows"] == other["rows"]


def test_failures_are_told_on_all_ranks_and_others_are_measured() -> None:
    found = samples()
    assert found["fails"] == Sample(error="rank 1: MemoryError: no memory")
    assert not found["fails"].wrong
    assert [name for name, one in found.items() if one.error] == ["fails", "element", "nan", "stale", "hasty"]


def test_wrong_results_are_found() -> None:
    found = samples()
    assert found["element"].wrong
    assert found["element"].error.startswith("rank 0: WrongResultError: element: wrong in 1 of 32 rows")
    assert "first in row 5" in found["element"].error
    assert found["nan"].wrong
    assert found["nan"].error.startswith(
        "all ranks: WrongResultError: nan: wrong in 1 of 32 rows, relative error up to"
    )
    # Right when it is called; its graph writes nothing.
    assert found["stale"].wrong
    assert "all ranks: WrongResultError: stale, captured: wrong in 32 of 32 rows" in found["stale"].error
    # Right as long as inputs are those of the call before.
    assert found["hasty"].wrong
    assert "all ranks: WrongResultError: hasty, captured, with other inputs: wrong in 32 of" in found["hasty"].error


def test_bursts_have_random_orders_and_are_as_long_as_was_asked() -> None:
    count = sum(not one.error for one in samples().values())
    of_ranks = []
    for result in results():
        bursts = result["log"][-(ROUNDS + 1) * count :]
        of_ranks.append([[name for name, _ in bursts[at : at + count]] for at in range(0, len(bursts), count)])
    rounds, others = of_ranks
    assert rounds == others
    names = ["fast", "host", "late", "long", "part alone", "slow"]
    assert [sorted(order) for order in rounds] == [names] * (ROUNDS + 1)
    assert len({tuple(order) for order in rounds}) == ROUNDS + 1
    lasted = dict(results()[1]["log"][-count:])  # of the slower rank, for which the bursts are made
    assert lasted == {"fast": 8, "slow": 24, "long": 40, "late": 8, "host": 8, "part alone": 8}


def test_orders_depend_on_the_round_and_on_the_names() -> None:
    """Over many rows of methods each one follows each other one about as often."""
    follows: Counter[tuple[int, int]] = Counter()
    for row in range(200):
        names = [f"{row} {number}" for number in range(5)]
        for number in range(3):
            order = [names.index(name) for name in order_of_round(names, number)]
            assert sorted(order) == list(range(5))
            follows.update(pairwise(order))
    assert len(follows) == 20
    assert all(70 < count < 170 for count in follows.values())  # 120 on average


def test_calls_in_a_graph() -> None:
    captured = {name: calls for name, calls in results()[0]["log"] if name.startswith("capture ")}
    # "long" fills a burst alone; what is timed without a graph is not captured.
    assert captured == {
        "capture fast": 16,
        "capture slow": 4,
        "capture stale": 4,
        "capture hasty": 4,
        "capture long": 1,
        "capture host": 1,  # as the host is slow; replayed more often
        "capture part alone": 4,
    }


def test_measure_raises_for_what_sample_reports() -> None:
    (wrong, said), (failed, why) = results()[0]["raised"]
    assert wrong is WrongResultError
    assert said.startswith("element: rank 0: ")
    assert (failed, why) == (RuntimeError, "fails: rank 1: MemoryError: no memory")


@pytest.mark.parametrize("at", range(len(list_patterns())))
def test_a_row_has_every_method_or_its_error(at: int) -> None:
    """On CPUs only torch's plain program runs: what needs a GPU is in the row with its reason."""
    row = results()[0]["rows"][at]
    found = {each["name"]: each for each in row["methods"]}
    ours = CANDIDATES[row["pattern"]]
    # "auto" takes the unfused program where that is predicted to be faster, and that runs on CPUs too.
    auto = found["distgemm auto"]
    tensor_parallel = row["pattern"] in PATTERNS
    assert auto["error"].startswith("all ranks: ") or (tensor_parallel and auto["detail"] == "unfused; predicted")
    for name in [*ours, "CUTLASS alone", "copies alone"]:
        assert found[name]["ms"] is None
        assert found[name]["error"].startswith("all ranks: ")
    two_shot = "torch two-shot + cuBLAS"
    peers = {"gemm+ar": [two_shot, f"{two_shot}, copied", "torch one-shot + cuBLAS"]}.get(
        row["pattern"], ["torch fused"]
    )
    assert all(found[name]["error"] for name in peers) if tensor_parallel else not any(name in found for name in peers)
    assert ("torch fused, eager" in found) == (row["pattern"] in {"ag+gemm", "gemm+rs"})
    assert not any(each["wrong"] for each in found.values())
    each_rank = ["NCCL + cuBLAS, a product for each rank"] * (row["pattern"] == "gemm+a2a")
    for name in ("NCCL + cuBLAS", "cuBLAS alone", "NCCL alone", *each_rank):
        assert (found[name]["error"], len(found[name]["rounds"])) == ("", 1)
    assert {each["kind"] for name, each in found.items() if name.endswith(" alone")} == {"part"}
    assert {found[name]["kind"] for name in ours} == {"distgemm"}
    whole = [32, 48, 32]
    local = {"ag+gemm": [64, 24, 32], "gemm+a2a": whole, "a2a+gemm": whole}
    assert row["local"] == local.get(row["pattern"], [64, 48, 16])


def test_a_row_that_cannot_be_set_up_says_so() -> None:
    row = results()[0]["rows"][-1]
    assert "63" in row["error"]
    assert row["methods"] == []
    assert row["tune_error"]
    assert progress(row | {"seconds": 1.0}, 4, 4) == f"[4/4] 8b out ag+gemm m=63: {row['error']} (1 s)"


def test_a_row_whose_terms_cancel_may_be_off_as_much_as_others() -> None:
    operation = Operation.__new__(Operation)
    operation.reference = torch.tensor([[1e-4], [10.0], [-10.0], [10.0]])
    operation.check("rounded", operation.reference + 0.05)
    with pytest.raises(WrongResultError, match="wrong in 4 of 4 rows"):
        operation.check("wrong", operation.reference + 0.5)


def test_a_clock_measures_the_gpu_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another one is current: events are recorded on the current stream of the current GPU."""
    current, did = ["another GPU"], list[tuple[str, Any]]()

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def note(name: str, value: Any = None) -> Any:
        return lambda *_: did.append((name, current[-1])) or value

    event = SimpleNamespace(record=note("record"), synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", note("capture", nullcontext()))
    device: Any = "the GPU of the clock"
    clock = timing.CudaClock(None, device)
    clock.time(note("run"), 1)
    clock.capture(note("run"), 1)
    assert did == [(name, device) for name in ("record", "run", "record", "capture", "run")]


def draw_on_one_rank() -> str:
    """Why there is no operation where the second rank has no memory for its shards."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None

    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "randn", no_memory)
        problem, device = GemmProblem(16, 16, 16, dtype="float32"), torch.device("cpu")
        made, failed = timing.attempt(group, device, lambda: Operation(problem, "gemm+rs", group, device))
    assert made is None
    return failed.error


def test_all_ranks_learn_that_one_has_no_memory_for_an_operation() -> None:
    """Where partial sums are added, the others would wait for it."""
    first, second = forked.results(2, draw_on_one_rank)
    assert first == second and "rank 1: RuntimeError: out of memory" in first and "ranks [1] of the group" in first
