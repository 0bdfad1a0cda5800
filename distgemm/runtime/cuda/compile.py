"""From a plan to this rank's executable: of GEMMs and copies, or of one per-tile kernel."""

from __future__ import annotations

import contextlib
import os
from typing import get_args

import torch
import torch.distributed as dist

from distgemm.arguments import finite, member
from distgemm.gemm import get_provider
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import refuse_groups, resolve_group
from distgemm.runtime.cuda.executable import CudaExecutable
from distgemm.runtime.cuda.lowering import check_across
from distgemm.runtime.cuda.per_tile import PerTileExecutable
from distgemm.runtime.executable import ExecutionConfig, OnTimeout

__all__ = ["compile_plan"]


def compile_plan(
    plan: Plan,
    execution: ExecutionConfig | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    timeout: float | None = None,
    on_timeout: OnTimeout = "raise",
    copies: bool = False,
    turned_b: bool = False,
) -> CudaExecutable | PerTileExecutable:
    """This rank's executable for a plan: :func:`distgemm.compile` where there is a plan already.

    Args:
        plan: the same on all ranks.
        execution: how GPUs execute it; None: the defaults.
        group: the ranks, with NCCL; None: all.
        device: this rank's GPU; None: the current one.
        timeout: seconds without a change after which a replay counts as stuck; None: the group's timeout.
        on_timeout: what happens then, as :func:`distgemm.compile` takes it.
        copies: per-tile kernels read copies of tensors that TMA cannot copy, with a warning. Otherwise such calls raise
            ValueError.
        turned_b: whether the kernels that are compiled now are those of calls in which columns of B are contiguous, and
            not its rows.

    Raises:
        ValueError, PlanError, CompileError, CompilerNotFoundError, RuntimeError: as :func:`distgemm.compile` raises
            them.
    """
    execution = ExecutionConfig() if execution is None else execution
    if execution.provider is not None:
        get_provider(execution.provider)
    whole, at, timeout = _place(plan, group, device, timeout, on_timeout)
    check_across(plan, execution)
    # Kernels are selected and compiled for the current GPU. Where there is none, the executable says what is missing.
    with torch.cuda.device(at) if torch.cuda.is_available() else contextlib.nullcontext():
        if execution.execution == "per_tile":
            return PerTileExecutable(
                plan, whole, at, execution, timeout=timeout, on_timeout=on_timeout, copies=copies, turned_b=turned_b
            )
        return CudaExecutable(plan, whole, at, execution, timeout=timeout, on_timeout=on_timeout, turned_b=turned_b)


def _place(
    plan: Plan,
    group: dist.ProcessGroup | None,
    device: torch.device | str | int | None,
    timeout: float | None,
    on_timeout: OnTimeout,
) -> tuple[dist.ProcessGroup, torch.device, float | None]:
    """The group, this rank's GPU and the timeout of an executable, checked.

    Raises:
        ValueError, RuntimeError: as :func:`distgemm.compile` raises them.
    """
    whole = resolve_group(group)
    refuse_groups(plan.problem)
    member("on_timeout", on_timeout, get_args(OnTimeout))
    timeout = None if timeout is None else finite("timeout", timeout, above=0)
    if plan.world_size != dist.get_world_size(whole):
        raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {dist.get_world_size(whole)}")
    at = torch.device("cuda" if device is None else device)
    if at.type != "cuda":
        raise ValueError(f"device is a GPU, got {at}; on CPUs use distgemm.CollectiveExecutable")
    if at.index is None:
        if not torch.cuda.is_available():
            raise ValueError("device is a GPU, and torch finds none; on CPUs use distgemm.CollectiveExecutable")
        at = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the stream is being captured: compile waits for the other ranks, so call it before the capture"
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise RuntimeError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: with a single hardware queue, graphs with streams that wait for other "
            "ranks have not been shown to come to an end; unset it, or set it to 8"
        )
    return whole, at, timeout
