"""From a problem or a plan to an executable on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import resolve_group
from distgemm.runtime.cuda import CudaExecutable, compile_plan
from distgemm.runtime.executable import (
    EXECUTION_FIELDS,
    REPLAY_TIMEOUT_S,
    ExecutionConfig,
    ExecutionMode,
    OnTimeout,
    Transport,
    WaitBy,
)
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
    timeout: float = REPLAY_TIMEOUT_S,
    on_timeout: OnTimeout = "raise",
    pattern: Pattern | None = None,
    tune: bool | None = None,
    **options: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable for a plan, or for a problem under a schedule.

    A collective call: all ranks of the group make it, in the same order in which they make and call other executables.

    Args:
        plan: a plan; or a problem, with the name of a schedule.
        schedule: for a problem, the schedule's name. "auto" takes the fastest measured configuration, which may be the
            unfused program; then no option of the schedule or of the execution is given.
        group: the ranks that take part, with NCCL; None: all.
        device: this rank's GPU; None: the current one.
        provider: this option and the next six are the fields of
            :class:`distgemm.runtime.executable.ExecutionConfig`, which says what they mean and what goes together.
            This one names the provider of the GEMMs.
        config: tile configuration of the GEMMs; None: the shape decides.
        gemm_streams: streams on which GEMMs alternate, 1 or 2.
        execution: a kernel for each GEMM ("multi_kernel"), or the fused kernel for all of them ("single_kernel"). The
            fused kernel takes equal chunks of plans that push what they gather, and of chains and pairwise sums with
            ``final_add="epilogue"``: with ``mechanism="store"``, or with enough ``send_slots`` for all results.
        wait_by: with "multi_kernel", who waits for other ranks: a "memory_op", or a "kernel", which notices a flag
            some microseconds sooner.
        merge_copies: copy neighbouring chunks as one.
        transport: who copies data to peers. With "single_kernel" the fused kernel can ("sm"): shards of plans that
            gather by pushing, and results of all-reduces with ``mechanism="store"``.
        timeout: seconds without a change after which a replay that has begun counts as stuck.
        on_timeout: "raise" ReplayTimeoutError in the thread that called, or "abort" the process with a log entry.
        pattern: with "auto", what is computed.
        tune: with "auto", what happens where nothing is recorded, as :func:`distgemm.tune.select` takes it.
        **options: options of the schedule and of :func:`distgemm.make_plan`, as ``chunks=2`` or ``mesh=(2, 4)``.

    Raises:
        ValueError: on all ranks where their plans or these arguments differ; for arguments that do not go together; and
            for what the runtime or the provider cannot do.
        PlanError: for plans that cannot be executed so. If one rank raises, the other ranks raise PlanError that names
            it.
        CompileError: where a kernel does not compile.
        CompilerNotFoundError: where there is no compiler.
        RuntimeError: while the current stream is captured, and where CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    whole = resolve_group(group)
    given = ExecutionConfig(provider, config, gemm_streams, execution, wait_by, merge_copies, transport)
    if schedule == "auto" or pattern is not None or tune is not None:
        if schedule != "auto" or pattern is None or not isinstance(plan, GemmProblem):
            raise ValueError(
                f"pattern and tune are for a problem with schedule='auto', got {schedule!r} and pattern {pattern!r}"
            )
        if options or given != ExecutionConfig():
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
    return compile_plan(plan, given, group=whole, device=device, timeout=timeout, on_timeout=on_timeout)
