"""The tuning cache: tuned configurations by problem, pattern, number of ranks and GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distgemm.gemm.cache import TunedCache
from distgemm.plan import GemmProblem
from distgemm.schedulers import Pattern, check_pattern
from distgemm.tune.config import TunedConfig

__all__ = ["CACHE", "bucket", "bucketed", "gpu_name", "key_of", "look_up"]

CACHE = TunedCache("plans", Path(__file__).parent / "tuned", TunedConfig.from_dict, "distgemm tune")

MIN_BUCKET = 64
"""Rows of the smallest bucket."""


def bucket(m: int) -> int:
    """The rows at which m rows are measured: the next power of two, at least ``MIN_BUCKET``."""
    return max(MIN_BUCKET, 1 << (m - 1).bit_length())


def key_of(problem: GemmProblem, pattern: Pattern, world_size: int) -> str:
    """The key of a configuration in the cache. The rows of each rank, C and the bias are not part of it.

    Raises:
        ValueError: for an unknown pattern.
    """
    p = problem
    check_pattern(pattern)
    return f"{pattern} {p.m}x{p.n}x{p.k}x{p.l} {p.dtype} {p.out_dtype} {p.partial_dtype} tp:{world_size}"


def bucketed(problem: GemmProblem) -> GemmProblem:
    """The problem with the :func:`bucket` of its rows, and equal rows on all ranks."""
    return replace(problem, m=bucket(problem.m), m_per_rank=None)


def look_up(problem: GemmProblem, pattern: Pattern, world_size: int, device: str) -> TunedConfig | None:
    """The recorded configuration for a problem, else the one for the :func:`bucket` of its rows, else None.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        device: name of the GPU, as :func:`gpu_name` returns it.

    Raises:
        ValueError: if a file of the cache is broken, or for an unknown pattern.
    """
    known = CACHE.read(device)
    for each in (problem, bucketed(problem)):
        entry = known.get(key_of(each, pattern, world_size))
        if entry is not None:
            return TunedConfig.from_dict(entry, "recorded")
    return None


def gpu_name(device: torch.device) -> str:
    """The name of a GPU in the names of the cache's files; "none" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
