"""What schedule="auto" takes: on GPUs what was measured, else a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import Pattern

if TYPE_CHECKING:
    from distgemm.runtime.cuda import CudaExecutable
    from distgemm.runtime.unfused import UnfusedExecutable

__all__ = ["CHAIN_TOKENS", "select_schedule", "measured_executable"]

CHAIN_TOKENS = 6144
"""From so many tokens on the chain is ahead of pairwise sums, as docs/which_schedule.md predicts for Llama 70B."""


def select_schedule(pattern: Pattern, problem: GemmProblem, world_size: int) -> tuple[str, dict[str, Any]]:
    """The schedule, and its options, for a product of a pattern: "ag+gemm", "gemm+rs" or "gemm+ar". For CPU tensors, and
    where the caller names the chunks.

    An all-gather takes each shard straight from its owner. Sums go round the ring in two chunks where there are
    many tokens, and else straight to their owner. An all-reduce is chosen as its reduce-scatter.
    """
    if pattern == "ag+gemm":
        return "all_gather_1d_tiling_cd_rotating_a", {"chunks": 1}
    stem = {"gemm+rs": "reduce_scatter_1d", "gemm+ar": "all_reduce_1d"}[pattern]
    if problem.m >= CHAIN_TOKENS:
        return f"{stem}_tiling_a_rotating_c", {"chunks": 2}
    return f"{stem}_pairwise_a", {"chunks": 1}


def measured_executable(
    pattern: Pattern, problem: GemmProblem, group: dist.ProcessGroup, device: torch.device
) -> CudaExecutable | UnfusedExecutable:
    """The executable of what :func:`distgemm.tune.select` chooses for CUDA tensors. A collective call."""
    from distgemm.tune import executable

    return executable(problem, pattern, group, device=device)
