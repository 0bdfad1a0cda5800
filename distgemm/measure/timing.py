"""The timing loop: bursts of graphs, interleaved round by round in random order; the slowest rank counts.

Every rank runs :func:`measure`, or :func:`sample`, which returns every round.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from distgemm.measure.operation import Method, Operation, WrongResultError

__all__ = ["Clock", "CudaClock", "Sample", "attempt", "measure", "order_of_round", "sample", "time_launches"]

T = TypeVar("T")
K = TypeVar("K")

BURST_MS = 4.0
"""Length of a burst."""

MIN_CALLS = 4
"""Least calls in a graph, unless one call fills a burst: they share the gap between two replays."""


@dataclass(frozen=True)
class Sample:
    """The measured times of a method.

    Attributes:
        rounds: time of a call in each round on the slowest rank, ms.
        error: why there are no times, with the ranks that failed.
        wrong: whether the result was wrong.
    """

    rounds: tuple[float, ...] = ()
    error: str = ""
    wrong: bool = False

    @property
    def ms(self) -> float:
        """The median of rounds."""
        return statistics.median(self.rounds)


class Clock(Protocol):
    """How calls are captured and timed on a device."""

    def barrier(self) -> None:
        """Wait until this rank's work is done and all ranks are here."""

    def capture(self, run: Callable[[], T], calls: int) -> tuple[Callable[[], object], T]:
        """A function that replays so many calls, and what the last call returned."""

    def time(self, run: Callable[[], object], count: int) -> float:
        """Time of the device for ``count`` calls together, ms."""


class CudaClock:
    """CUDA graphs and events on the current stream; group None: this GPU alone."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group, device_ids=[self.device.index])

    def capture(self, run: Callable[[], T], calls: int) -> tuple[Callable[[], object], T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            for _ in range(calls):
                found = run()
        return graph.replay, found

    def time(self, run: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):  # events are recorded on its current stream
            start.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end))


def attempt(group: dist.ProcessGroup, device: torch.device, step: Callable[[], T]) -> tuple[T | None, Sample]:
    """Do a step on every rank, and tell all ranks whether it succeeded everywhere. A collective call.

    If a collective within the step fails on one rank, the others wait for it.

    Returns:
        What the step returned and an empty sample; or None and a sample with the error of each rank that failed.
    """
    found, error, said = None, 0, ""
    try:
        found = step()
    except Exception as problem:  # reported below, for all ranks
        error = 2 if isinstance(problem, WrongResultError) else 1
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    worst = torch.tensor([error], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    if not worst.item():
        return found, Sample()
    found = None
    gc.collect()  # the error's traceback refers to what the step had made
    if device.type == "cuda":
        torch.cuda.empty_cache()
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, said, group)
    return None, Sample(error=_by_rank(texts), wrong=worst.item() == 2)


def _by_rank(texts: list[str]) -> str:
    """The errors of all ranks, equal ones once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(rank)

    def who(found: list[int]) -> str:
        if len(found) == len(texts):
            return "all ranks"
        return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"

    return "; ".join(f"{who(found)}: {text}" for text, found in ranks.items())


@dataclass(frozen=True)
class _Burst:
    """What is timed at once: ``count`` runs, each of them several calls of the method."""

    run: Callable[[], object]
    count: int
    calls: int


def measure(
    operation: Operation, methods: list[Method], rounds: int = 5, burst_ms: float = BURST_MS
) -> dict[str, float]:
    """The time of each method, ms: the median over rounds, of the slowest rank.

    The methods' graphs are replayed one after the other, round by round. The results of a call and of its graph are
    checked first.

    Raises:
        WrongResultError: on all ranks, if a result is wrong.
        RuntimeError: on all ranks, if a method cannot be measured.
    """
    found = sample(operation, methods, rounds, burst_ms)
    for name, one in found.items():
        if one.error:
            raise (WrongResultError if one.wrong else RuntimeError)(f"{name}: {one.error}")
    return {name: one.ms for name, one in found.items()}


def sample(
    operation: Operation,
    methods: list[Method],
    rounds: int = 5,
    burst_ms: float = BURST_MS,
    clock: Clock | None = None,
    rest: float = 0.0,
    say: Callable[[str], object] = lambda doing: None,
) -> dict[str, Sample]:
    """What :func:`measure` finds, with every round, and with the errors of methods that fail.

    Args:
        operation: what the methods compute.
        methods: are measured; the others are measured if one fails.
        rounds: bursts of each method, after one that warms up. Each round has an order of its own.
        burst_ms: approximate length of a burst. All ranks begin a burst together.
        clock: of the device; None: CUDA graphs and events.
        rest: pause after each burst, as a multiple of its length. Without a pause large products run at the low clocks
            that only products in a row cause.
        say: is called with what is done next.
    """
    clock = clock or CudaClock(operation.group, operation.device)
    found: dict[str, Sample] = {}
    bursts: dict[str, _Burst] = {}
    for method in methods:
        say(f"{method.name} is called, checked and captured")
        burst, found[method.name] = _prepared(operation, method, burst_ms, clock)
        if burst is not None:
            bursts[method.name] = burst
    times = _rounds(bursts, rounds, clock, rest, say)
    if bursts:
        slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=operation.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, operation.group)
        found |= {name: Sample(tuple(row)) for name, row in zip(bursts, slowest.tolist(), strict=True)}
    return found


def time_launches(
    launches: Sequence[Callable[[], object]], device: torch.device, rounds: int = 5, burst_ms: float = BURST_MS
) -> list[float]:
    """The time of each launch on this GPU alone, ms: the median over rounds of interleaved graphs.

    Args:
        launches: each puts one operation on the current stream.
        device: the GPU.
        rounds: as :func:`sample` takes them.
        burst_ms: approximate length of a burst.
    """
    clock = CudaClock(None, device)
    bursts = {}
    for number, launch in enumerate(launches):
        with torch.cuda.device(device):
            launch()
        clock.barrier()
        replay, _ = clock.capture(launch, 3)
        ms = max(clock.time(replay, 1) / 3, 1e-3)
        calls = max(1, round(burst_ms / ms))
        bursts[number] = _Burst(clock.capture(launch, calls)[0], 1, calls)
    return [statistics.median(times) for times in _rounds(bursts, rounds, clock).values()]


def order_of_round(names: Iterable[K], number: int) -> list[K]:
    """The order in which methods are measured in a round: random, and the same on all ranks.

    What runs before a method changes its time: behind copies, large products take several percent less than behind
    products. Other names have other orders.
    """
    order = list(names)
    random.Random(repr((number, order))).shuffle(order)
    return order


def _rounds(
    bursts: Mapping[K, _Burst],
    rounds: int,
    clock: Clock,
    rest: float = 0.0,
    say: Callable[[str], object] = lambda doing: None,
) -> dict[K, list[float]]:
    """The time of a call in each round, ms. Round 0 warms up."""
    times: dict[K, list[float]] = {name: [] for name in bursts}
    for number in range(rounds + 1):
        for name in order_of_round(bursts, number):
            burst = bursts[name]
            say(f"{name} is measured, round {number} of {rounds}")
            clock.barrier()
            elapsed = clock.time(burst.run, burst.count)
            if number:
                times[name].append(elapsed / (burst.count * burst.calls))
            time.sleep(rest * elapsed / 1e3)
    return times


def _prepared(operation: Operation, method: Method, burst_ms: float, clock: Clock) -> tuple[_Burst | None, Sample]:
    """Call a method, check it, capture it and check the graph: its burst, or None and the error."""
    group, device = operation.group, operation.device

    def call() -> float:
        for _ in range(3):  # executables record graphs in their second and third call
            result = method.run()
        if result is not None:
            operation.check(method.name, result)
        return clock.time(method.run, 3) / 3

    ms, failed = attempt(group, device, call)
    if ms is None:
        return None, failed
    ms = max(_slowest(ms, group, device), 1e-3)
    if not method.capture:
        return _Burst(method.run, max(1, round(burst_ms / ms)), 1), Sample()
    # For a short operation this is the host's time: its graph holds few calls, and is replayed often.
    calls = 1 if ms >= burst_ms else max(MIN_CALLS, round(burst_ms / ms))
    clock.barrier()
    captured, failed = attempt(group, device, lambda: clock.capture(method.run, calls))
    if captured is None:
        return None, failed
    replay, result = captured
    if result is not None:
        result.fill_(float("nan"))
    clock.barrier()

    def again() -> float:
        clock.time(replay, 1)  # the first launch also uploads the graph
        elapsed = clock.time(replay, 1)
        if result is not None:
            operation.check(f"{method.name}, captured", result)
        return elapsed

    ms, failed = attempt(group, device, again)
    if ms is None:
        return None, failed

    def with_others() -> bool:
        assert result is not None
        clock.time(replay, 1)
        operation.check(f"{method.name}, captured, with other inputs", result)
        return True

    if result is not None:
        # A method that does not wait for its peers would compute with what they sent in an earlier call.
        clock.barrier()
        operation.negate()
        clock.barrier()
        right, failed = attempt(group, device, with_others)
        clock.barrier()
        operation.negate()
        clock.barrier()
        if right is None:
            return None, failed
    ms = max(_slowest(ms, group, device), 1e-3)
    return _Burst(replay, max(1, round(burst_ms / ms)), calls), Sample()


def _slowest(ms: float, group: dist.ProcessGroup, device: torch.device) -> float:
    found = torch.tensor([ms], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found.item())
