"""Selects one configuration for all ranks, and makes its executable."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf
from typing import Any

import torch

from distgemm.arguments import boolean, instance
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import Group, compare, problem_fields, refuse_groups, resolve_group
from distgemm.runtime.cuda import CudaExecutable, PerTileExecutable
from distgemm.runtime.groups import ranks_per_host
from distgemm.runtime.unfused import UnfusedExecutable, collective_status
from distgemm.schedulers import Pattern, check_pattern
from distgemm.system import switch
from distgemm.tune import ranks
from distgemm.tune.cache import REACH, bucketed, gpu_name, look_up
from distgemm.tune.candidates import per_tile_status, predicted
from distgemm.tune.config import UNFUSED, TunedConfig, options_for
from distgemm.tune.ranks import device_of, from_first, refuse_capture
from distgemm.tune.search import measurable, search

__all__ = ["executable", "fitting", "select"]

logger = logging.getLogger("distgemm")


def select(
    problem: GemmProblem,
    pattern: Pattern,
    group: Group | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
) -> TunedConfig:
    """The configuration for a problem, the same on all ranks. A collective call.

    Rank 0 looks up the one of the nearest recorded rows in its cache folder, as :func:`look_up` says. If none is in
    reach, ``tune`` decides. A problem that is not
    :func:`measurable` (batches, fp8) gets the prediction of the cost model. If the file cannot be written, the
    measured configuration serves this call alone, and a warning says so.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do, as "ag+gemm".
        group: the ranks that take part, also a mesh of hosts; None: all.
        device: this rank's GPU; None: the current one.
        tune: what happens if nothing is recorded in reach. True: measure now, at the :func:`bucket` of m, and record
            the result. False: take the nearest configuration however far it is, or the prediction of the cost model if
            there is none. None: True, unless the environment of rank 0 has DISTGEMM_TUNE=0 (or false, no, off).

    Raises:
        RuntimeError: while the current stream is captured.
        ValueError: on all ranks, if their arguments differ, if a file of rank 0 is broken, or if its DISTGEMM_TUNE is
            neither true nor false.
    """
    instance("problem", problem, GemmProblem, "a distgemm.GemmProblem")
    refuse_groups(problem)
    check_pattern(pattern)
    if tune is not None:
        boolean("tune", tune)
    whole, at = resolve_group(group), device_of(device)
    on = size, hosts = whole.size(), ranks_per_host(whole)
    refuse_capture(problem, pattern, size, at, hosts)
    # Before anything else is sent: another rank may compile a plan, or another problem.
    fields = {"ranks per host": hosts or size, **problem_fields(problem), "tune": tune}
    compare({"call": f"a selection of {pattern}", **fields}, whole, at)

    def look_up_or_predict() -> TunedConfig | None:
        measure = switch("DISTGEMM_TUNE", True) if tune is None else tune
        measures = measure and measurable(problem)
        recorded = look_up(problem, pattern, size, gpu_name(at), REACH if measures else inf, hosts)
        return recorded or (None if measures else predicted(problem, pattern, *on))

    config = from_first(whole, at, look_up_or_predict)
    if config is None:
        config = search(bucketed(problem), pattern, whole, at, must_write=False).config
    return fitting(config, problem, pattern, *on)


def fitting(
    config: TunedConfig, problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None
) -> TunedConfig:
    """A configuration that executes a problem whose rows or columns of ranks differ from those that were measured.

    Per-tile kernels need equal shards without copies. If the problem has others, the ``fallback`` of the configuration
    is taken, or the prediction. If the collective of an unfused program does not support the problem, NCCL is taken.
    """
    if config.method == "unfused":
        status = collective_status(problem, pattern, config.collective, world_size)
        return config if status else replace(UNFUSED, source=config.source)
    config = replace(config, options=options_for(problem, config.options))
    if config.execution.execution != "per_tile":
        return config
    status = per_tile_status(config.plan(problem, world_size, ranks_per_host), config.execution.config)
    if status:
        return config
    logger.info("%s does not execute %s for %s: %s", config, problem, pattern, status.reason)
    if config.fallback is None:
        return predicted(problem, pattern, world_size, ranks_per_host)
    return fitting(config.fallback, problem, pattern, world_size, ranks_per_host)


def executable(
    problem: GemmProblem,
    pattern: Pattern,
    group: Group | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
    **options: Any,
) -> CudaExecutable | PerTileExecutable | UnfusedExecutable:
    """This rank's executable of the configuration that :func:`select` selects. A collective call.

    :func:`config_of` returns the configuration.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        group: the ranks that take part, also a mesh of hosts; None: all.
        device: this rank's GPU; None: the current one.
        tune: as in :func:`select`.
        **options: ``timeout`` and ``on_timeout`` of :func:`distgemm.compile`, for a plan.

    Raises:
        RuntimeError: while the current stream is captured.
        ValueError: on all ranks, if a file of rank 0 is broken.
    """
    whole, at = resolve_group(group), device_of(device)
    config = select(problem, pattern, whole, device=at, tune=tune)
    return ranks.make(problem, pattern, config, whole, at, **options)
