"""What each rank of the tests across hosts does with functions and layers, with graphs, and where a rank is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cuda.bindings import driver, runtime
from torch.distributed.device_mesh import init_device_mesh

import distgemm
from distgemm.runtime.checks import HOST_MESH, flat_mesh, process_group
from distgemm.runtime.cuda import nccl
from distgemm.runtime.cuda.lowering.actions import exchanges_of
from distgemm.runtime.cuda.workspace import Workspace, workspace_for
from distgemm.runtime.groups import ranks_per_host
from distgemm.schedulers import Pattern
from distgemm.torch_ops import select_schedule
from tests.gpu import torch_worker
from tests.gpu.cuda_worker import Case, compiled
from tests.gpu.fault_worker import GROUP_TIMEOUT_S

CALLS = 4
"""Eager, recorded once for each buffer, and replayed."""


def across(named: bool = True) -> AbstractContextManager[None]:
    """In the place of ``torch_worker.quick``: cuBLAS multiplies, and "auto" is the rule of CPUs, which nests schedules.

    Args:
        named: whether "auto" is that rule. Otherwise it is predicted.
    """

    def nested(pattern: Pattern, problem: Any, group: str, chunks: int | None) -> tuple[str, int | None]:
        name, options = select_schedule(pattern, problem, ranks_per_host(process_group(group)))
        options |= {} if chunks is None else {"chunks": chunks}
        return " ".join([name, *(f"{key}={value}" for key, value in options.items())]), None

    return torch_worker.compiled_with(lambda plan: {"provider": "cublas"}, nested if named else None)


def functions() -> list[str]:
    """Results and gradients against float64, in eager calls, in recorded ones, and in replays."""
    every = torch_worker.cases(dist.get_world_size())
    todo = [dataclasses.replace(every[at], schedule="auto", chunks=None) for at in (0, 3, 5, 7, 9, 12, 14, 15, 18)]
    with across():
        return [
            wrong
            for number, case in enumerate(todo)
            for call in range(CALLS)
            for wrong in torch_worker.run_case(case, CALLS * number + call)
        ]


def run_all(mesh: tuple[int, int], checks: Sequence[Callable[[], list[str]]]) -> dict[str, list[str]]:
    """The failures of checks of this module and of ``torch_worker``, whose group of all ranks spans hosts."""
    group = flat_mesh(init_device_mesh("cuda", mesh, mesh_dim_names=HOST_MESH)).get_group()
    # For all executables: each larger one would make a communicator of its own.
    workspace_for(group, torch_worker.device(), 32 << 20, 4096, Workspace, ranks_per_host=mesh[1])
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch_worker, "quick", across))
        stack.enter_context(mock.patch.object(torch_worker, "compile_ahead", return_value=None))
        stack.enter_context(mock.patch.object(torch_worker, "compiler", return_value="aot_eager"))  # takes less time
        calls = stack.enter_context(distgemm.record_calls())
        found = torch_worker.run_all([(check, ()) for check in checks])
    plans = [call.plan for call in calls if not call.unfused]
    assert any(plan.schedule == "tensor_parallel_2d_nested" for plan in plans)
    wrong = [f"{plan.schedule}: {plan.ranks_per_host}" for plan in plans if plan.ranks_per_host != mesh[1]]
    return {**found, "hosts": wrong}


def nodes(cases: list[Case]) -> list[str]:
    """Failures of graphs that do not have a kernel of NCCL for each exchange; without hosts they have none."""
    failures, seen = [], 0
    for case in [*cases, *(dataclasses.replace(case, ranks_per_host=None) for case in cases)]:
        exe, data = compiled(case)
        data.draw(0)
        replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"], **data.terms)
        names = kernels_of(replay.graph)
        found, wanted = sum("nccl" in name for name in names), len(exchanges_of(exe.actions))
        if found != wanted or bool(wanted) != (case.ranks_per_host is not None):
            failures.append(f"rank {exe.rank}: {found} kernels of NCCL for {wanted} exchanges in {case}: {names}")
        seen += found
    return failures + ["no kernel of NCCL was seen"] * (not seen)


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The names of the kernels that are nodes of a graph, as compilers mangle them."""
    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(handle)
    _, found, count = runtime.cudaGraphGetNodes(handle, count)
    names = []
    for node in (driver.CUgraphNode(int(each)) for each in found[:count]):
        if driver.cuGraphNodeGetType(node)[1] == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            _, kernel = driver.cuGraphKernelNodeGetParams(node)
            of_kernel = driver.cuFuncGetName(kernel.func) if int(kernel.func) else driver.cuKernelGetName(kernel.kern)
            names.append(of_kernel[1].decode())
    return names


def die_before_nccl(case: Case, victim: int, noticed: bool) -> dict[str, Any]:
    """A rank is killed between the exchange of NCCL's id and its call. The others report what they raise.

    Args:
        case: what is compiled.
        victim: the rank.
        noticed: whether the others look at its process. Otherwise the timeout is 5 s.
    """
    found: dict[str, Any] = {}

    def come(self: Any) -> None:
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.set(f"come/{dist.get_rank()}", "")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nccl._Ranks, "come", come))
        if not noticed:
            stack.enter_context(mock.patch.object(nccl, "has_ended", return_value=False))
            stack.enter_context(mock.patch.object(nccl, "group_timeout", return_value=5.0))
        start = time.monotonic()
        try:
            compiled(case)
        except RuntimeError as error:
            found["error"] = str(error)
        found["seconds"] = time.monotonic() - start
    x = torch.ones(1024, device="cuda")  # the GPU goes on
    found["sum"] = float((x + x).sum())
    return found


def queued_calls(case: Case, victim: int, calls: int = 12) -> dict[str, Any]:
    """A rank is killed, and the others issue calls at once, each eagerly. They report each result.

    Each call has another alpha, and so a layout that was never recorded: its messages are put on the stream one by one,
    while those of the calls before wait for the rank that has ended.
    """
    exe, data = compiled(case)
    wanted = data.draw(0)
    outs = [torch.full_like(data.shards["D"], math.nan) for _ in range(calls)]
    data.call(exe)
    torch.cuda.synchronize()
    dist.barrier(device_ids=[exe.device.index])
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, Any] = {"error": "", "issued": 0}
    start = time.monotonic()
    try:
        for number, out in enumerate(outs):
            exe(data.shards["A"], data.shards["B"], alpha=2.0 ** (1 + number), out=out)
            found["issued"] += 1
        torch.cuda.synchronize()
        while time.monotonic() < start + GROUP_TIMEOUT_S:  # the watchdog raises in this thread
            time.sleep(0.01)
    except RuntimeError as error:
        found["error"] = str(error)
    torch.cuda.synchronize()
    found["seconds"] = time.monotonic() - start
    time.sleep(0.5)  # the watchdog fills D once the calls have ended
    found["graphs"] = exe.graphs
    found["results"] = []
    for number, out in enumerate(outs):
        missing, wrong = out.isnan(), out.double() != 2.0 ** (1 + number) * wanted  # exact: alpha is a power of two
        found["results"].append("wrong" if (wrong & ~missing).any() else "nan" if missing.any() else "right")
    try:
        data.call(exe)
    except RuntimeError as again:
        found["called_again"] = str(again)
    return found
