"""The kernels that an operation can ask for: those that "auto" selects, and those that it measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal

import torch

from distgemm.gemm import select as gemm_select
from distgemm.gemm.cutlass import kernel_source
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.per_tile.select import gemm_of
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda.binding import Binder
from distgemm.schedulers import Pattern
from distgemm.tune import gemm as gemm_tuning
from distgemm.tune.cache import look_up
from distgemm.tune.candidates import list_plans, predicted, providers, shortlist
from distgemm.tune.config import TunedConfig

__all__ = ["Scope", "configs_of", "sources_of"]

Scope = Literal["selected", "measured", "tiles"]
"""``"selected"``: what calls need if nothing is measured. ``"measured"``: also what ``schedule="auto"`` measures, with
the tiles that each shape selects. ``"tiles"``: every candidate with every tile."""


# --- configurations and sources ---------------------------------------------------------------------------


def configs_of(
    problem: GemmProblem, pattern: Pattern, world_size: int, scope: Scope, ranks_per_host: int | None = None
) -> list[TunedConfig]:
    """The configurations that "auto" considers.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        scope: which ones.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        ValueError: as :func:`distgemm.tune.shortlist`, and if a file of recorded configurations is broken.
    """
    on = world_size, ranks_per_host
    if scope == "tiles":
        return list_plans(problem, pattern, *on)
    recorded = look_up(problem, pattern, world_size, gemm_select.gpu_name(), inf, ranks_per_host)
    selected = predicted(problem, pattern, *on) if recorded is None else recorded
    found = [selected]
    while (fallback := found[-1].fallback) is not None:
        found.append(fallback)
    return found + (shortlist(problem, pattern, *on) if scope == "measured" else [])


def sources_of(
    problem: GemmProblem,
    pattern: Pattern,
    world_size: int,
    configs: Sequence[TunedConfig],
    *,
    rank: int = 0,
    turned_b: bool = False,
    tiles: bool = False,
    ranks_per_host: int | None = None,
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
        ranks_per_host: number of ranks that share memory; None: all.
    """
    found: dict[KernelSource, None] = {}
    for config in configs:
        if config.method == "plan":
            plan = config.plan(problem, world_size, ranks_per_host)
            if config.execution.execution == "per_tile":
                found[gemm_of(plan, config.execution.config, turned_b=turned_b).traits.source()] = None
                continue
            binder = Binder(plan, rank, torch.device("cuda", 0), config.execution)
            found |= dict.fromkeys(binder.sources(turned_b=turned_b))
            if tiles and binder.provider == "cutlass":
                found |= dict.fromkeys(_with_all_tiles(binder, config.execution.gemm_streams, turned_b))
    return list(found)


def _with_all_tiles(binder: Binder, gemm_streams: int, turned_b: bool) -> Iterator[KernelSource]:
    provider = providers()["cutlass"]
    for spec in binder.specs(turned_b=turned_b):
        for tile in gemm_tuning.candidates(provider, spec, gemm_streams):
            yield kernel_source(spec, tile, provider.arch)
