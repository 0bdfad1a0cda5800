"""One choice for all ranks, and its executable."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import resolve_group
from distgemm.runtime.cuda import CudaExecutable
from distgemm.runtime.unfused import UnfusedExecutable, collective_status
from distgemm.tune import cache as records
from distgemm.tune import ranks
from distgemm.tune.cache import bucketed, look_up
from distgemm.tune.candidates import by_one_kernel, predicted
from distgemm.tune.config import UNFUSED, Choice
from distgemm.tune.ranks import device_of, from_first, refuse_capture
from distgemm.tune.search import measurable, measure

__all__ = ["choose", "executable", "fitting"]


def choose(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
) -> Choice:
    """The choice for a product, the same on all ranks: rank 0 looks it up in its files. A collective call.

    tune: where nothing is recorded: True: measure now, at the :func:`bucket` of m, and record it; False: what the cost
          model predicts; None: True, unless DISTGEMM_TUNE is 0 in the environment of rank 0

    Products that are not :func:`measurable` (batches, fp8) are predicted. Where the file cannot be written, a choice
    serves this process alone, and a warning says so.

    Raises RuntimeError while the current stream is captured; on all ranks, ValueError where rank 0's file is broken.
    """
    whole, at = resolve_group(group), device_of(device)
    size = whole.size()
    refuse_capture(problem, op, size, at)

    def decide() -> Choice | None:
        found = look_up(problem, op, size, records.gpu_name(at))
        wanted = os.environ.get("DISTGEMM_TUNE") != "0" if tune is None else tune
        return found or (None if wanted and measurable(problem) else predicted(problem, op, size))

    found = from_first(whole, at, decide)
    if found is None:
        found = measure(bucketed(problem), op, whole, at, must_write=False).choice
    return fitting(found, problem, op, size)


def fitting(choice: Choice, problem: GemmProblem, op: str, world_size: int) -> Choice:
    """A choice for other rows than it was measured at: one kernel for all GEMMs takes chunks of equal size, and where
    these rows are in none it is what was measured ``otherwise``, or the prediction. NCCL adds what no other collective
    does."""
    if choice.method == "unfused":
        status = collective_status(problem, op, choice.collective, world_size)
        return choice if status else replace(UNFUSED, how=choice.how)
    if not choice.by_one_kernel or by_one_kernel(choice.plan(problem, world_size), choice.execution.copies):
        return choice
    if choice.otherwise is None:
        return predicted(problem, op, world_size)
    return fitting(choice.otherwise, problem, op, world_size)


def executable(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
    **more: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable of what :func:`choose` chooses; ``.choice`` says what that is. A collective call.

    more: ``timeout`` and ``on_timeout`` of :func:`distgemm.compile`, where a plan is chosen
    """
    whole, at = resolve_group(group), device_of(device)
    return ranks.make(problem, op, choose(problem, op, whole, device=at, tune=tune), whole, at, **more)
