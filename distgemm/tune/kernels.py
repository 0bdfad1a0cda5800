"""The kernels that an operation can ask for: those that "auto" selects, and those that it measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Literal

import torch

from distgemm.gemm import GemmConfig, GemmSpec
from distgemm.gemm import select as gemm_select
from distgemm.gemm.cutlass import kernel_source
from distgemm.gemm.fused.gemms import combined_spec
from distgemm.gemm.fused.kernel import pingpong_first
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.per_tile.select import gemm_of
from distgemm.plan.ops import Gemm
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda.binding import Binder
from distgemm.schedulers import Pattern
from distgemm.tune import gemm as gemm_tuning
from distgemm.tune.cache import look_up
from distgemm.tune.candidates import list_plans, predicted, providers, shortlist, specs_of
from distgemm.tune.config import TunedConfig

__all__ = ["Scope", "configs_of", "sources_of", "whole_gemm", "with_other_tiles"]

Scope = Literal["selected", "measured", "tiles"]
"""``"selected"``: what calls need if nothing is measured. ``"measured"``: also what ``schedule="auto"`` measures, with
the tiles that each shape selects. ``"tiles"``: every candidate with every tile."""


# --- configurations and sources ---------------------------------------------------------------------------


def configs_of(problem: GemmProblem, pattern: Pattern, world_size: int, scope: Scope) -> list[TunedConfig]:
    """The configurations that "auto" considers.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        scope: which ones.

    Raises:
        ValueError: as :func:`distgemm.tune.shortlist`, and if a file of recorded configurations is broken.
    """
    if scope == "tiles":
        return list_plans(problem, pattern, world_size)
    recorded = look_up(problem, pattern, world_size, gemm_select.gpu_name(), inf)
    selected = predicted(problem, pattern, world_size) if recorded is None else recorded
    found = [selected]
    while (fallback := found[-1].fallback) is not None:
        found.append(fallback)
    return found + (shortlist(problem, pattern, world_size) if scope == "measured" else [])


def sources_of(
    problem: GemmProblem,
    pattern: Pattern,
    world_size: int,
    configs: Sequence[TunedConfig],
    *,
    rank: int = 0,
    turned_b: bool = False,
    tiles: bool = False,
) -> list[KernelSource]:
    """The sources of all kernels that a rank needs to execute a problem in these ways, each once.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        configs: the configurations. The unfused program needs no kernels.
        rank: the rank.
        turned_b: whether columns of B are contiguous, and not its rows.
        tiles: whether the kernels are listed with all tiles that :func:`distgemm.tune.tune` tries, too.
    """
    found: dict[KernelSource, None] = {}
    for config in configs:
        if config.method == "plan":
            plan = config.plan(problem, world_size)
            if config.execution.execution == "per_tile":
                found[gemm_of(plan, config.execution.config, turned_b=turned_b).traits.source()] = None
                continue
            binder = Binder(plan, rank, torch.device("cuda", 0), config.execution, fallback=True)
            found |= dict.fromkeys(binder.sources(turned_b=turned_b))
            if tiles and binder.provider == "cutlass":
                found |= dict.fromkeys(_with_all_tiles(binder, config, pattern, turned_b))
    return list(found)


def _with_all_tiles(binder: Binder, config: TunedConfig, pattern: Pattern, turned_b: bool) -> Iterator[KernelSource]:
    provider = providers()["cutlass"]
    fused = with_other_tiles(binder.plan, config, pattern) if config.execution.single_kernel else []
    for spec, kind in binder.kernels(turned_b=turned_b):
        if config.execution.single_kernel:
            tiles = [GemmConfig.parse(str(each.execution.config)) for each in fused]
        else:
            tiles = gemm_tuning.candidates(provider, spec, config.execution.gemm_streams)
        for tile in tiles:
            yield kernel_source(spec, tile, provider.arch, kind)


# --- tiles of fused kernels -----------------------------------------------------------------------------


def with_other_tiles(plan: Plan, config: TunedConfig, pattern: Pattern) -> list[TunedConfig]:
    """A configuration of the fused kernel with each tile configuration that it takes, the most promising first.

    Tiles that are fast for the whole product alternate with tiles that are fast for one chunk: when the last chunk
    arrives, only that chunk is left to compute.
    """
    chunk = chunk_gemm(plan)
    configs = providers()["cutlass"].configs(chunk)
    orders = [gemm_select.order(chunk, configs, count=count) for count in (gemm_count(plan), 1)]
    tiles = [tile for tile in chain.from_iterable(zip(*orders, strict=True)) if tile.kernel_schedule != "plain"]
    if config.option("mechanism") == "store":
        tiles = pingpong_first(tiles)
    if pattern == "gemm+ar" and config.execution.transport == "sm":
        # Buffers of the kernel's copies leave the largest tiles two pipeline stages, which makes them slow.
        tiles = [tile for tile in tiles if tile.kernel_schedule == "pingpong"]
    executions = (replace(config.execution, config=str(tile)) for tile in dict.fromkeys(tiles))
    return [replace(config, execution=execution) for execution in executions]


def whole_gemm(plan: Plan) -> GemmSpec:
    """One GEMM as large as all GEMMs of rank 0, as if they differed in A."""
    return combined_spec(chunk_gemm(plan), gemm_count(plan), "a")


def gemm_count(plan: Plan) -> int:
    """Number of GEMMs of rank 0."""
    return sum(isinstance(op, Gemm) for op in plan.ops(0))


def chunk_gemm(plan: Plan) -> GemmSpec:
    """One GEMM of the plan, if possible one that adds a partial sum."""
    return max(specs_of(plan), key=lambda spec: spec.partial is not None)
