"""The tuning cache: tuned configurations by problem, pattern, number of ranks and GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distgemm.gemm.cache import TunedCache
from distgemm.plan import GemmProblem
from distgemm.plan.scaling import scaling_name
from distgemm.schedulers import Pattern, check_pattern, schedule_options
from distgemm.tune.config import TunedConfig

__all__ = ["CACHE", "bucket", "bucketed", "gpu_name", "key_of", "look_up"]

CACHE = TunedCache("plans", Path(__file__).parent / "tuned", TunedConfig.from_dict, "distgemm tune")

MIN_BUCKET = 64
"""Rows of the smallest bucket."""

REACH = 2.0
"""While measuring is on, a recorded configuration serves fewer than so many times its rows, and more than its rows
divided by this. So each number of rows is in the reach of its bucket."""


def bucket(m: int) -> int:
    """The rows at which m rows are measured: the next power of two, at least ``MIN_BUCKET``."""
    return max(MIN_BUCKET, 1 << (m - 1).bit_length())


def key_of(problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None) -> str:
    """The key of a configuration in the cache. The rows of each rank, C and the bias are not part of it.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        ValueError: for an unknown pattern.
    """
    p = problem
    check_pattern(pattern)
    operands = p.dtype if p.b_dtype is None else f"{p.dtype}*{p.b_dtype}"
    operands += "" if p.scaling is None else f" scales:{scaling_name(p.scaling).replace(' ', '_')}"
    ranks = f"{world_size}" if ranks_per_host is None else f"{world_size // ranks_per_host}x{ranks_per_host}"
    return f"{pattern} {p.m}x{p.n}x{p.k}x{p.l} {operands} {p.out_dtype} {p.partial_dtype} tp:{ranks}"


def bucketed(problem: GemmProblem) -> GemmProblem:
    """The problem with the :func:`bucket` of its rows, and equal rows on all ranks."""
    return replace(problem, m=bucket(problem.m), m_per_rank=None)


def look_up(
    problem: GemmProblem,
    pattern: Pattern,
    world_size: int,
    device: str,
    reach: float = REACH,
    ranks_per_host: int | None = None,
) -> TunedConfig | None:
    """The configuration that is recorded for the nearest number of rows, else None.

    The recorded numbers of rows divide all others into ranges, whose bounds are the geometric means of neighbours. Of
    two that are equally near, the larger one counts. All numbers up to MIN_BUCKET are in the reach of each other.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        device: name of the GPU, as :func:`gpu_name` returns it.
        reach: a recorded number of rows counts if the larger of the two numbers is less than so many times the smaller
            one. ``math.inf``: the nearest one in any case.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        ValueError: if a file of the cache is broken, for an unknown pattern, and if the schedule is not registered.
    """
    known, on = CACHE.read(device), (world_size, ranks_per_host)
    entry = known.get(key_of(problem, pattern, *on))
    if entry is None:
        before, after = key_of(problem, pattern, *on).split(f" {problem.m}x", 1)
        keys = (key.removeprefix(f"{before} ").partition("x") for key in known if key.startswith(f"{before} "))
        rows = [int(m) for m, _, rest in keys if rest == after and m.isdecimal()]
        nearest = min(rows, key=lambda m: (_distance(m, problem.m), -m), default=None)
        if nearest is not None and _distance(max(nearest, MIN_BUCKET), max(problem.m, MIN_BUCKET)) < reach:
            entry = known[key_of(replace(problem, m=nearest, m_per_rank=None), pattern, *on)]
    if entry is None:
        return None
    config = TunedConfig.from_dict(entry, "recorded")
    try:
        if config.method == "plan":
            schedule_options(config.schedule)
    except ValueError:
        raise ValueError(
            f"{CACHE.path(device)} has schedule {config.schedule!r} for {key_of(problem, pattern, *on)}, which is not "
            "registered in this program: register it before, or measure anew with: distgemm tune"
        ) from None
    return config


def _distance(one: int, other: int) -> float:
    """How many times the larger of two numbers of rows is the smaller one."""
    return max(one, other) / min(one, other)


def gpu_name(device: torch.device) -> str:
    """The name of a GPU in the names of the cache's files; "none" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
