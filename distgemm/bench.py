"""Whole operations on real GPUs, against what one would otherwise use: interleaved, in graphs, checked first.

Every rank runs :func:`measure`; the figures are those of the slowest rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory

from distgemm.problem import GemmProblem
from distgemm.runtime.arguments import TORCH_DTYPES
from distgemm.runtime.cuda import compile as compile_plan

__all__ = ["Method", "Operation", "measure", "schedule_method", "torch_methods"]

BURST_MS = 6.0


@dataclass
class Operation:
    """One operation on all ranks: its problem, this rank's shards, and what D's shard is to be.

    op: "ag+gemm" (A's rows are gathered), "gemm+rs" (sums are scattered) or "gemm+ar"
    """

    problem: GemmProblem
    op: str
    group: dist.ProcessGroup
    device: torch.device
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    reference: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, rank, size = self.problem, dist.get_rank(self.group), dist.get_world_size(self.group)
        if p.m % size or p.n % size or p.k % size:
            raise ValueError(f"the benchmark takes extents that {size} ranks divide, got m, n, k = {p.m}, {p.n}, {p.k}")
        dtype = TORCH_DTYPES[p.dtype]

        def draw(seed: int, rows: int, columns: int) -> torch.Tensor:
            generator = torch.Generator(self.device).manual_seed(seed)
            return torch.randn(rows, columns, generator=generator, device=self.device).to(dtype)

        m, n, k = p.m // size, p.n // size, p.k // size
        if self.op == "ag+gemm":
            self.a, self.b = draw(rank, m, p.k), draw(1000 + rank, n, p.k)
            gathered = torch.cat([draw(peer, m, p.k) for peer in range(size)])
            self.reference = gathered @ self.b.T
        else:
            self.a, self.b = draw(rank, p.m, k), draw(1000 + rank, p.n, k)
            partial = (self.a @ self.b.T).float()
            dist.all_reduce(partial, group=self.group)
            rows = slice(rank * m, (rank + 1) * m) if self.op == "gemm+rs" else slice(None)
            self.reference = partial[rows]

    def check(self, name: str, found: torch.Tensor) -> None:
        """Raises RuntimeError where a result is not that of the unfused program, within its rounding."""
        error = (found.float() - self.reference.float()).norm() / self.reference.float().norm()
        if not error < 2e-2:
            raise RuntimeError(f"{name} on rank {dist.get_rank(self.group)}: relative error {error:.3g}")


@dataclass
class Method:
    """A way to do an operation. ``run`` is what is timed, and captured; it returns D's shard, or None if it is
    only a part of the operation."""

    name: str
    run: Callable[[], torch.Tensor | None]
    capture: bool = True


def schedule_method(operation: Operation, schedule: str, **options: Any) -> Method:
    """A schedule of ours."""
    exe = compile_plan(operation.problem, schedule, group=operation.group, **options)
    out = torch.empty(
        exe.plan.shard_shape("D", exe.rank),
        dtype=TORCH_DTYPES[str(exe.plan.problem.out_dtype)],
        device=operation.device,
    )
    name = " ".join([schedule, *(f"{key}={value}" for key, value in options.items())])
    return Method(name, lambda: exe(operation.a, operation.b, out=out))


def torch_methods(operation: Operation) -> list[Method]:
    """What torch offers: NCCL with cuBLAS, the fused ops, cuBLAS on the whole local product, NCCL alone."""
    a, b, group = operation.a, operation.b, operation.group
    p, size = operation.problem, dist.get_world_size(group)
    dtype = a.dtype
    name = group.group_name
    if operation.op == "ag+gemm":
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
            Method("cuBLAS alone", lambda: (torch.mm(gathered, b.T, out=d), None)[1]),
            Method("NCCL alone", lambda: (dist.all_gather_into_tensor(gathered, a, group), None)[1]),
        ]
    partial = torch.empty(p.m, p.n, dtype=dtype, device=a.device)
    scattered = torch.empty(p.m // size, p.n, dtype=dtype, device=a.device)

    def reduce_scatter() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.reduce_scatter_tensor(scattered, partial, group=group)
        return scattered

    def all_reduce() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.all_reduce(partial, group=group)
        return partial

    alone = Method("cuBLAS alone", lambda: (torch.mm(a, b.T, out=partial), None)[1])
    if operation.op == "gemm+ar":
        return [Method("NCCL + cuBLAS", all_reduce), alone]
    return [
        Method("NCCL + cuBLAS", reduce_scatter),
        Method(
            "torch fused",
            lambda: torch.as_tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.T, "sum", 0, name)),
        ),
        alone,
        Method("NCCL alone", lambda: (dist.reduce_scatter_tensor(scattered, partial, group=group), None)[1]),
    ]


def measure(
    operation: Operation, methods: list[Method], rounds: int = 5, burst_ms: float = BURST_MS
) -> dict[str, float]:
    """Milliseconds of each method: graphs replayed in turn, round by round; median of rounds, slowest rank.

    Results are checked first, of the call and of its graph. Every graph holds as many calls as fill ``burst_ms``.
    """
    group, device = operation.group, operation.device
    graphs = []
    for method in methods:
        for _ in range(2):
            found = method.run()
        torch.cuda.synchronize(device)
        if found is not None:
            operation.check(method.name, found)
        count = max(1, round(burst_ms / max(_slowest(_time(method.run, 3), group, device), 1e-3)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                found = method.run()
        if found is not None:
            found.fill_(float("nan"))
            dist.barrier(group, device_ids=[device.index])
            graph.replay()
            torch.cuda.synchronize(device)
            operation.check(f"{method.name}, captured", found)
        graphs.append((graph, count))
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds + 1):
        for (graph, count), found_times in zip(graphs, times, strict=True):
            dist.barrier(group, device_ids=[device.index])
            elapsed = _time(graph.replay, 1) / count
            if number:
                found_times.append(elapsed)
    medians = torch.tensor([statistics.median(x) for x in times], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX, group)
    return {method.name: ms for method, ms in zip(methods, medians.tolist(), strict=True)}


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


def _time(run: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def _slowest(ms: float, group: dist.ProcessGroup, device: torch.device) -> float:
    found = torch.tensor([ms], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found.item())
