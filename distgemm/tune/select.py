"""One config for all ranks, and its executable."""

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
from distgemm.schedulers import Pattern
from distgemm.tune import ranks
from distgemm.tune.cache import bucketed, gpu_name, look_up
from distgemm.tune.candidates import predicted, single_kernel_status
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.ranks import config_of, device_of, from_first, refuse_capture
from distgemm.tune.search import measurable, measure

__all__ = ["config_of", "executable", "fitting", "select"]


def select(
    problem: GemmProblem,
    pattern: Pattern,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
) -> TunedConfig:
    """The config for a product, the same on all ranks: rank 0 looks it up in its files. A collective call.

    tune: where nothing is recorded: True: measure now, at the :func:`bucket` of m, and record it; False: what the cost
          model predicts; None: True, unless DISTGEMM_TUNE is 0 in the environment of rank 0

    Products that are not :func:`measurable` (batches, fp8) are predicted. Where the file cannot be written, a config
    serves this process alone, and a warning says so.

    Raises RuntimeError while the current stream is captured; on all ranks, ValueError where rank 0's file is broken.
    """
    whole, at = resolve_group(group), device_of(device)
    size = whole.size()
    refuse_capture(problem, pattern, size, at)

    def decide() -> TunedConfig | None:
        found = look_up(problem, pattern, size, gpu_name(at))
        wanted = os.environ.get("DISTGEMM_TUNE") != "0" if tune is None else tune
        return found or (None if wanted and measurable(problem) else predicted(problem, pattern, size))

    found = from_first(whole, at, decide)
    if found is None:
        found = measure(bucketed(problem), pattern, whole, at, must_write=False).config
    return fitting(found, problem, pattern, size)


def fitting(config: TunedConfig, problem: GemmProblem, pattern: Pattern, world_size: int) -> TunedConfig:
    """A config for other rows than it was measured at: one kernel for all GEMMs takes chunks of equal size, and where
    these rows are in none it is what was measured as its ``fallback``, or the prediction. NCCL adds what no other collective
    does."""
    if config.method == "unfused":
        status = collective_status(problem, pattern, config.collective, world_size)
        return config if status else replace(UNFUSED, source=config.source)
    if not config.execution.single_kernel or single_kernel_status(
        config.plan(problem, world_size), config.execution.transport
    ):
        return config
    if config.fallback is None:
        return predicted(problem, pattern, world_size)
    return fitting(config.fallback, problem, pattern, world_size)


def executable(
    problem: GemmProblem,
    pattern: Pattern,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
    **more: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable of what :func:`select` selects; :func:`config_of` says what that is. A collective call.

    more: ``timeout`` and ``on_timeout`` of :func:`distgemm.compile`, where a plan is chosen
    """
    whole, at = resolve_group(group), device_of(device)
    return ranks.make(problem, pattern, select(problem, pattern, whole, device=at, tune=tune), whole, at, **more)
