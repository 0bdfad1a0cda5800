"""What schedule="auto" takes. A tuner replaces this one function."""

from __future__ import annotations

from typing import Any

from distgemm.problem import GemmProblem

__all__ = ["CHAIN_TOKENS", "choose_schedule"]

CHAIN_TOKENS = 6144
"""From so many tokens on the chain is ahead of pairwise sums, as docs/which_schedule.md predicts for Llama 70B."""


def choose_schedule(kind: str, problem: GemmProblem, world_size: int) -> tuple[str, dict[str, Any]]:
    """The schedule, and its options, for a product of a kind: "ag+gemm", "gemm+rs" or "gemm+ar".

    An all-gather takes each shard straight from its owner. Sums go round the ring in two chunks where there are
    many tokens, and else straight to their owner. An all-reduce is chosen as its reduce-scatter.
    """
    if kind == "ag+gemm":
        return "all_gather_1d_tiling_cd_rotating_a", {"chunks": 1}
    stem = {"gemm+rs": "reduce_scatter_1d", "gemm+ar": "all_reduce_1d"}[kind]
    if problem.m >= CHAIN_TOKENS:
        return f"{stem}_tiling_a_rotating_c", {"chunks": 2}
    return f"{stem}_pairwise_a", {"chunks": 1}
