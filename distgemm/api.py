"""From a problem or a plan to what GPUs execute: the front door of the CUDA runtime."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import resolve_group
from distgemm.runtime.cuda import CudaExecutable, compile_plan
from distgemm.runtime.executable import EXECUTION_FIELDS, ExecutionConfig, ExecutionMode, Transport, WaitBy
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import Pattern
from distgemm.tune import executable

__all__ = ["compile"]


def compile(
    plan: Plan | GemmProblem,
    schedule: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    provider: str = "cutlass",
    config: str | None = None,
    gemm_streams: int = 2,
    execution: ExecutionMode = "multi_kernel",
    wait_by: WaitBy = "memory_op",
    merge_copies: bool = False,
    transport: Transport = "copy_engine",
    timeout: float = 300.0,
    on_timeout: str = "raise",
    pattern: Pattern | None = None,
    tune: bool | None = None,
    **options: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable for a plan, or for a problem under a schedule.

    plan:     a plan; or a problem, with the schedule's name and its options (``chunks=2``, ``mesh=(2, 4)``, ...), or
              with "auto": the measured choice, which may be the unfused program; it chooses options, provider,
              config, gemm_streams, waits and merge
    pattern:       with "auto": "ag+gemm", "gemm+rs" or "gemm+ar"
    tune:     with "auto", where nothing is recorded: as :func:`distgemm.tune.choose` takes it
    group:    the ranks that take part, with NCCL; None: all
    device:   this rank's GPU; None: the current one
    provider: of the GEMMs
    config:   a configuration of the provider for all GEMMs; None: chosen by shape
    gemm_streams: streams on which GEMMs alternate, 1 or 2
    waits:    for other ranks: by operations on "memory", which occupy no SM; by a "kernel" of one warp, which notices
              some microseconds sooner, for plans that multiply and add on one stream, so with 1 branch; or within the
              "gemm": all GEMMs are one kernel, which begins each chunk once it has come, and done_flags of each sum once it
              is stored. That is for plans that push what they gather, and for chains and pairwise sums with
              ``final_add="epilogue"``, of all-reduces too, with mechanism "store" or with ``results`` as many as chunks (more
              with a stagger; pairwise as many as a rank has products), in chunks of equal size, with provider cutlass;
              gemm_streams make no difference then
    merge:    chunks that lie behind one another are multiplied and copied as one, but for those that come last: for
              plans that gather with chunks > 1. With waits "gemm" they are copied so, and the last in halves of halves
    copies:   of shards to peers, for plans that gather by pushing: by copy "engine"s; with waits "gemm" also by engines
              that send what a peer multiplies last in "slices" along k, or by the "gemm" itself, in which a warp that
              does not multiply sends all in slices, or by "both": by the kernel what a peer multiplies last, behind
              engines that send all else. The peers' kernels begin with each slice as it comes. Of results, for
              all-reduces with mechanism "store" and waits "gemm": by engines, or by the "gemm"
    timeout:  seconds without a change after which a replay that has begun counts as stuck
    on_timeout: "raise" ReplayTimeoutError in the thread that called, or "abort" the process with a log entry

    A collective call: all ranks of the group make it, in the same order as they make and call other executables.

    Raises ValueError on all ranks where their plans or these arguments differ, PlanError and ValueError for what the
    runtime or the provider cannot do, CompileError and CompilerNotFoundError; a rank on which that did not happen is
    told which ranks failed. RuntimeError where CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    whole = resolve_group(group)
    how = ExecutionConfig(provider, config, gemm_streams, execution, wait_by, merge_copies, transport)
    if schedule == "auto" or pattern is not None or tune is not None:
        if schedule != "auto" or pattern is None or not isinstance(plan, GemmProblem):
            raise ValueError(
                f"pattern and tune are for a problem with schedule='auto', got {schedule!r} and pattern {pattern!r}"
            )
        if options or how != ExecutionConfig():
            raise ValueError(
                f"schedule='auto' selects {', '.join(EXECUTION_FIELDS)} and options; name a schedule for them"
            )
        return executable(plan, pattern, whole, device=device, tune=tune, timeout=timeout, on_timeout=on_timeout)
    if isinstance(plan, GemmProblem):
        if schedule is None:
            raise ValueError("a problem needs the name of a schedule: distgemm.list_schedules() has them")
        ranks = None if "mesh" in options else dist.get_world_size(whole)
        plan = make_plan(plan, schedule, ranks, **({"sync": "barrier"} | options))
    elif schedule is not None or options:
        raise ValueError(f"a plan has its schedule and options already, got {schedule!r} and {options}")
    return compile_plan(plan, how, group=whole, device=device, timeout=timeout, on_timeout=on_timeout)
