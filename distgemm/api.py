"""compile: makes an executable on GPUs from a plan, or from a problem and a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distgemm.arguments import boolean, finite, instance, member, string
from distgemm.gemm import GemmConfig, list_providers
from distgemm.plan.derive import make_plan
from distgemm.plan.options import with_hosts
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import check_hosts, resolve_group
from distgemm.runtime.cuda import CudaExecutable, PerTileExecutable, compile_plan
from distgemm.runtime.executable import (
    EXECUTION_FIELDS,
    ExecutionConfig,
    ExecutionMode,
    OnTimeout,
    WaitBy,
)
from distgemm.runtime.groups import ranks_per_host
from distgemm.runtime.torch_arguments import read_device
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import Pattern, check_pattern
from distgemm.tune import UNFUSED, executable, make
from distgemm.tune.ranks import device_of

__all__ = ["compile"]


def compile(
    plan: Plan | GemmProblem,
    schedule: str | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | int | None = None,
    provider: str | None = None,
    config: str | None = None,
    gemm_streams: int = 2,
    execution: ExecutionMode = "multi_kernel",
    wait_by: WaitBy = "memory_op",
    merge_copies: bool = False,
    timeout: float | None = None,
    on_timeout: OnTimeout = "raise",
    pattern: Pattern | None = None,
    tune: bool | None = None,
    **options: Any,
) -> CudaExecutable | PerTileExecutable | UnfusedExecutable:
    """This rank's executable for a plan, or for a problem under a schedule.

    This is a collective call. All ranks of the group make it, and all ranks make and call their executables in the same
    order. The arguments ``provider`` to ``merge_copies`` are the fields of
    :class:`distgemm.runtime.executable.ExecutionConfig`. That class documents their meaning and their combinations.

    Args:
        plan: a plan, or a problem. A problem needs ``schedule``.
        schedule: for a problem, the name of a schedule. "auto" selects the fastest measured configuration, which may be
            the unfused program. "auto" takes no options of the schedule or of the execution.
        group: the ranks that take part, a process group with NCCL. None: all ranks. A DeviceMesh ("host", "rank"), as
            :func:`distgemm.runtime.launch.mesh_from_env` makes it, says how many of the ranks share memory.
        device: this rank's GPU. None: the current device. With "auto" also the CPU, where the unfused program runs
            and nothing is measured.
        provider: provider of the GEMMs, "cutlass" or "cublas". None: "cutlass" on Hopper, with "per_tile" and
            with a ``config``, otherwise "cublas".
        config: name of the provider's tile configuration for all GEMMs. None: the shape decides.
        gemm_streams: number of streams on which the GEMMs of a rank alternate, 1 or 2.
        execution: "multi_kernel": a kernel for each GEMM. "per_tile": one kernel for all work of a rank, tile by tile,
            for equal shards on one axis, 16-bit operands and ``chunks=1``; docs/per_tile.md says what else it needs.
        wait_by: with "multi_kernel", who waits for other ranks: a "memory_op" of the stream, or a "kernel", which sees
            a flag some microseconds earlier.
        merge_copies: True: with "multi_kernel", copy neighbouring chunks as one, and multiply them as one.
        timeout: seconds without progress after which a replay that has begun counts as stuck; None: the timeout of the
            group. A replay that waits for a process which has ended counts as stuck after 3 s.
        on_timeout: "raise": ReplayTimeoutError in the calling thread. "abort": end the process with a log entry.
        pattern: with "auto", the pattern of the product.
        tune: with "auto", what to do if no measurement is recorded, as in :func:`distgemm.tune.select`.
        **options: options of the schedule and of :func:`distgemm.make_plan`, such as ``chunks=2`` or ``mesh=(2, 4)``.

    Returns:
        An executable to call with this rank's shards; with "per_tile" a PerTileExecutable. With "auto" it may be the
        unfused program.

    Raises:
        ValueError: on all ranks if their plans or these arguments differ. Also for arguments that do not go together,
            and for a problem that the runtime or the provider does not support.
        PlanError: if the plan cannot be executed with these arguments. If one rank raises an error, the other ranks
            raise a PlanError that names it.
        CompileError: if a kernel does not compile.
        CompilerNotFoundError: if there is no compiler.
        RuntimeError: while the current stream is captured, and if CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    instance("plan", plan, (Plan, GemmProblem), "a distgemm.Plan or a distgemm.GemmProblem")
    if schedule is not None:
        string("schedule", schedule, "'auto' or the name of a schedule")
    if timeout is not None:
        finite("timeout", timeout, above=0)
    member("on_timeout", on_timeout, get_args(OnTimeout))
    if pattern is not None:
        check_pattern(pattern)
    if tune is not None:
        boolean("tune", tune)
    if provider is not None:
        member("provider", provider, list_providers())
    if config is not None:
        GemmConfig.parse(config)
    if device is not None:
        device = read_device("device", device, ("cuda", "cpu") if schedule == "auto" else ("cuda",))
    whole = resolve_group(group)
    given = ExecutionConfig(provider, config, gemm_streams, execution, wait_by, merge_copies)
    if schedule == "auto" or pattern is not None or tune is not None:
        if schedule != "auto" or pattern is None or not isinstance(plan, GemmProblem):
            raise ValueError(
                f"pattern and tune are for a problem with schedule='auto', got {schedule!r} and pattern {pattern!r}"
            )
        if options or given != ExecutionConfig():
            raise ValueError(
                f"schedule='auto' selects {', '.join(EXECUTION_FIELDS)} and options; name a schedule for them"
            )
        if (at := device_of(device)).type == "cpu":  # there is nothing to choose from
            if tune:
                raise ValueError("tune=True measures on GPUs; on a CPU, 'auto' is the unfused program")
            return make(plan, pattern, replace(UNFUSED, source="predicted"), whole, at)
        terms: dict[str, Any] = {"tune": tune, "timeout": timeout, "on_timeout": on_timeout}
        return executable(plan, pattern, whole, device=device, **terms)
    if isinstance(plan, GemmProblem):
        if schedule is None:
            raise ValueError("schedule is None, and a problem needs a name of distgemm.list_schedules()")
        options = with_hosts(schedule, options, whole.size(), ranks_per_host(whole))
        ranks = None if "mesh" in options else whole.size()
        plan = make_plan(plan, schedule, ranks, **({"sync": "barrier"} | options))
    elif schedule is not None or options:
        raise ValueError(f"a plan has its schedule and options already, got {schedule!r} and {options}")
    check_hosts(plan, whole)
    return compile_plan(plan, given, group=whole, device=device, timeout=timeout, on_timeout=on_timeout)
