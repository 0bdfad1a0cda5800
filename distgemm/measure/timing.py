"""Whole operations on real GPUs, against what one would otherwise use: interleaved, in graphs, checked first.

Every rank runs :func:`measure`, or :func:`sample`, which knows more; the figures are those of the slowest rank.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.schedulers import Pattern

__all__ = [
    "Clock",
    "Method",
    "Operation",
    "Sample",
    "WrongResultError",
    "attempt",
    "eager",
    "executable_method",
    "measure",
    "sample",
    "timeline",
    "torch_methods",
]

T = TypeVar("T")

BURST_MS = 4.0

CALLS = 4
"""Calls in a graph at least, unless one fills a burst: the gap between two replays is shared by them."""

TOLERANCE = 2e-2
"""Error of a row of D, relative to the row. Roundings to bfloat16 amount to 3e-3; an element that is missing shows."""


class WrongResultError(RuntimeError):
    """A method did not compute the operation."""


@dataclass
class Operation:
    """One operation on all ranks: its problem, this rank's shards, and what D's shard is to be.

    pattern: "ag+gemm" (A's rows are gathered), "gemm+rs" (sums are scattered) or "gemm+ar"
    a, b: this rank's shards
    local_a: what this rank multiplies with B in all: A gathered, or its shard
    reference: what D's shard is to be
    """

    problem: GemmProblem
    pattern: Pattern
    group: dist.ProcessGroup
    device: torch.device
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    local_a: torch.Tensor = field(init=False)
    reference: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, rank, size = self.problem, dist.get_rank(self.group), dist.get_world_size(self.group)
        split = p.n if self.pattern == "ag+gemm" else p.k
        if p.m % size or split % size:
            raise ValueError(
                f"the benchmark takes m and {'n' if self.pattern == 'ag+gemm' else 'k'} that {size} ranks divide, got m, n, "
                f"k = {p.m}, {p.n}, {p.k}"
            )
        dtype = TORCH_DTYPES[p.dtype]

        def draw(seed: int, rows: int, columns: int) -> torch.Tensor:
            generator = torch.Generator(self.device).manual_seed(seed)
            return torch.randn(rows, columns, generator=generator, device=self.device).to(dtype)

        m, n, k = p.m // size, p.n // size, p.k // size
        if self.pattern == "ag+gemm":
            self.a, self.b = draw(rank, m, p.k), draw(1000 + rank, n, p.k)
            self.local_a = torch.cat([draw(peer, m, p.k) for peer in range(size)])
            self.reference = self.local_a @ self.b.T
        else:
            self.a, self.b = draw(rank, p.m, k), draw(1000 + rank, p.n, k)
            self.local_a = self.a
            partial = (self.a @ self.b.T).float()
            dist.all_reduce(partial, group=self.group)
            rows = slice(rank * m, (rank + 1) * m) if self.pattern == "gemm+rs" else slice(None)
            self.reference = partial[rows]

    def turn(self) -> None:
        """A, and what D is to be, become the negative of what they are."""
        self.a.neg_()
        self.reference.neg_()

    def check(self, name: str, found: torch.Tensor) -> None:
        """Raises WrongResultError where a row is not that of the unfused program, within its rounding. What is allowed
        goes by the row's norm, but at least by that of a row in the mean: in a short row terms may cancel."""
        if found.shape != self.reference.shape:
            raise WrongResultError(f"{name}: D is {tuple(found.shape)}, not {tuple(self.reference.shape)}")
        wanted = self.reference.float()
        norms = wanted.norm(dim=1)
        errors = (found.float() - wanted).norm(dim=1) / norms.clamp_min(norms.square().mean().sqrt())
        worst = float(errors.max())  # NaN where there is one
        if not worst < TOLERANCE:
            row = int((~(errors < TOLERANCE)).nonzero()[0])
            raise WrongResultError(
                f"{name}: wrong in {int((~(errors < TOLERANCE)).sum())} of {len(errors)} rows, relative error up to "
                f"{worst:.3g}, first in row {row}"
            )


@dataclass
class Method:
    """A way to do an operation. ``run`` is what is timed, and captured; it returns D's shard, or None if it is
    only a part of the operation.

    capture: whether it is timed as a CUDA graph, or as calls of the host
    detail:  what else is to be known of it
    """

    name: str
    run: Callable[[], torch.Tensor | None]
    capture: bool = True
    detail: str = ""
    release: Callable[[], None] = field(default=lambda: None)
    """To be called once graphs with it are gone."""


def eager(method: Method) -> Method:
    """The same without a graph: the host's time counts where it is longer than the GPU's."""
    return Method(f"{method.name}, eager", method.run, capture=False, detail=method.detail)


def executable_method(operation: Operation, name: str, exe: Any) -> Method:
    """Calls of an executable on the operation's shards, into a D of its own."""
    out = torch.empty(
        exe.plan.shard_shape("D", exe.rank),
        dtype=TORCH_DTYPES[str(exe.plan.problem.out_dtype)],
        device=operation.device,
    )
    method = Method(name, lambda: exe(operation.a, operation.b, out=out))
    if workspace := getattr(exe, "workspace", None):
        method.release = lambda: workspace.release(exe)
    return method


def torch_methods(operation: Operation) -> list[Method]:
    """What torch offers: NCCL with cuBLAS, the fused ops (for "gemm+ar" cuBLAS and the all-reduces of symmetric
    memory); and, as parts, cuBLAS on the whole local product and NCCL alone."""
    a, b, whole_a, group = operation.a, operation.b, operation.local_a, operation.group
    p, size = operation.problem, dist.get_world_size(group)
    dtype = a.dtype
    name = group.group_name
    if operation.pattern == "ag+gemm":
        gathered = torch.empty(p.m, p.k, dtype=dtype, device=a.device)
        d = torch.empty(p.m, b.shape[0], dtype=dtype, device=a.device)

        def unfused() -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, a, group)
            return torch.mm(gathered, b.T, out=d)

        def fused() -> torch.Tensor:
            found = torch.ops.symm_mem.fused_all_gather_matmul(a, [b.T], 0, name, return_A=False)
            return torch.as_tensor(found[1][0])

        return [
            Method("NCCL + cuBLAS", unfused),
            Method("torch fused", fused),
            Method("cuBLAS alone", lambda: (torch.mm(whole_a, b.T, out=d), None)[1]),
            Method("NCCL alone", lambda: (dist.all_gather_into_tensor(gathered, a, group), None)[1]),
        ]
    partial = torch.empty(p.m, p.n, dtype=dtype, device=a.device)
    alone = Method("cuBLAS alone", lambda: (torch.mm(a, b.T, out=partial), None)[1])
    if operation.pattern == "gemm+ar":
        return [*_all_reduce_methods(operation, partial), alone]
    scattered = torch.empty(p.m // size, p.n, dtype=dtype, device=a.device)

    def reduce_scatter() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.reduce_scatter_tensor(scattered, partial, group=group)
        return scattered

    return [
        Method("NCCL + cuBLAS", reduce_scatter),
        Method(
            "torch fused",
            lambda: torch.as_tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.T, "sum", 0, name)),
        ),
        alone,
        Method("NCCL alone", lambda: (dist.reduce_scatter_tensor(scattered, partial, group=group), None)[1]),
    ]


def _all_reduce_methods(operation: Operation, partial: torch.Tensor) -> list[Method]:
    a, b, group = operation.a, operation.b, operation.group
    name = group.group_name
    added = torch.zeros_like(partial)  # sums of zeros stay finite, however often they are added

    @cache
    def symmetric() -> torch.Tensor:  # at the first call: where it cannot be had, only these two fail
        found = symmetric_memory.empty(*partial.shape, dtype=partial.dtype, device=partial.device)
        symmetric_memory.rendezvous(found, group)
        return found

    def nccl() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.all_reduce(partial, group=group)
        return partial

    def two_shot() -> torch.Tensor:
        torch.mm(a, b.T, out=symmetric())
        torch.ops.symm_mem.two_shot_all_reduce_(symmetric(), "sum", name)
        return symmetric()

    def one_shot() -> torch.Tensor:
        torch.mm(a, b.T, out=symmetric())
        return torch.as_tensor(torch.ops.symm_mem.one_shot_all_reduce(symmetric(), "sum", name))

    return [
        Method("NCCL + cuBLAS", nccl),
        Method("torch two-shot + cuBLAS", two_shot),
        Method("torch one-shot + cuBLAS", one_shot),
        Method("NCCL alone", lambda: (dist.all_reduce(added, group=group), None)[1]),
    ]


# --- measuring ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What was measured of a method.

    rounds: milliseconds of a call in each round, those of the slowest rank
    error:  why there are none, with the ranks that say so
    wrong:  whether the error is that the result was wrong
    """

    rounds: tuple[float, ...] = ()
    error: str = ""
    wrong: bool = False

    @property
    def ms(self) -> float:
        """The median of rounds."""
        return statistics.median(self.rounds)


class Clock(Protocol):
    """How calls are put together and timed on a device."""

    def barrier(self) -> None:
        """Until all ranks are here, and all of this rank's work is done."""

    def capture(self, run: Callable[[], T], calls: int) -> tuple[Callable[[], object], T]:
        """What replays so many calls, and what the last of them returned."""

    def time(self, run: Callable[[], object], count: int) -> float:
        """Milliseconds that the device takes for all of so many calls."""


class CudaClock:
    """CUDA graphs and events on the current stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])

    def capture(self, run: Callable[[], T], calls: int) -> tuple[Callable[[], object], T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                found = run()
        return graph.replay, found

    def time(self, run: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def attempt(group: dist.ProcessGroup, device: torch.device, step: Callable[[], T]) -> tuple[T | None, Sample]:
    """Do a step on every rank, and learn whether all could: what it returned, or None and the error of each rank
    that has one. A collective call, also where the step is not.

    A rank on which a collective fails in the midst of it leaves the others waiting.
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
    gc.collect()  # what the step had made hangs on the error's traceback
    if device.type == "cuda":
        torch.cuda.empty_cache()
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, said, group)
    return None, Sample(error=_by_rank(texts), wrong=worst.item() == 2)


def _by_rank(texts: list[str]) -> str:
    """Errors of all ranks, each said once."""
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
    """What is timed at once: ``run`` so many times, each of them several calls of the method."""

    run: Callable[[], object]
    count: int
    calls: int


def measure(
    operation: Operation, methods: list[Method], rounds: int = 5, burst_ms: float = BURST_MS
) -> dict[str, float]:
    """Milliseconds of each method: graphs replayed in turn, round by round; slowest rank, median of rounds.

    Results are checked first, of the call and of its graph. Raises WrongResultError, or RuntimeError where a method
    cannot be measured, on all ranks.
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
    """What :func:`measure` finds, round by round, and with the errors of methods that fail: the others are measured.

    Bursts of about ``burst_ms`` follow each other in turn, in every second round backwards, behind a round that warms
    up. Every burst begins with all ranks at once.

    rest: how long the GPU rests behind each burst, in lengths of it: without, products as large as the GPU's power
          allows are measured at the clocks that only products in a row see
    say:  is told what is being done, before it is
    """
    clock = clock or CudaClock(operation.group, operation.device)
    found: dict[str, Sample] = {}
    bursts: dict[str, _Burst] = {}
    for method in methods:
        say(f"{method.name} is called, checked and captured")
        burst, found[method.name] = _prepared(operation, method, burst_ms, clock)
        if burst is not None:
            bursts[method.name] = burst
    times: dict[str, list[float]] = {name: [] for name in bursts}
    for number in range(rounds + 1):
        for name in list(bursts)[:: -1 if number % 2 else 1]:
            burst = bursts[name]
            say(f"{name} is measured, round {number} of {rounds}")
            clock.barrier()
            elapsed = clock.time(burst.run, burst.count)
            if number:
                times[name].append(elapsed / (burst.count * burst.calls))
            time.sleep(rest * elapsed / 1e3)
    if bursts:
        slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=operation.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, operation.group)
        found |= {name: Sample(tuple(row)) for name, row in zip(bursts, slowest.tolist(), strict=True)}
    return found


def _prepared(operation: Operation, method: Method, burst_ms: float, clock: Clock) -> tuple[_Burst | None, Sample]:
    """A method that was called, checked, captured and checked again; or None and what went wrong."""
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
    # Of short operations this is the time of the host: a graph holds too few of them then, and is replayed often.
    calls = 1 if ms >= burst_ms else max(CALLS, round(burst_ms / ms))
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
        # What does not wait for its peers computes with what they brought in a call before.
        clock.barrier()
        operation.turn()
        clock.barrier()
        right, failed = attempt(group, device, with_others)
        clock.barrier()
        operation.turn()
        clock.barrier()
        if right is None:
            return None, failed
    ms = max(_slowest(ms, group, device), 1e-3)
    return _Burst(replay, max(1, round(burst_ms / ms)), calls), Sample()


def timeline(operation: Operation, method: Method, replays: int = 7) -> list[dict[str, Any]]:
    """Kernels and copies of the middle one of several replays on this rank: name, stream, start and duration in us."""
    from torch.profiler import ProfilerActivity, profile

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method.run()
    dist.barrier(operation.group, device_ids=[operation.device.index])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize(operation.device)
    events = [
        {
            "name": event.name(),
            "stream": event.device_resource_id(),
            "start": event.start_ns() / 1e3,
            "us": event.duration_ns() / 1e3,
        }
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
    events.sort(key=lambda event: event["start"])
    each = len(events) // replays
    middle = events[replays // 2 * each :][:each]
    return [event | {"start": round(event["start"] - middle[0]["start"], 2)} for event in middle]


def _slowest(ms: float, group: dist.ProcessGroup, device: torch.device) -> float:
    found = torch.tensor([ms], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found.item())
