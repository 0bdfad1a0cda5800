"""What calls of the ops need, found without running them: to compile kernels ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import Pattern

__all__ = ["Need", "note_need", "record_needs", "recording"]


@dataclass(frozen=True)
class Need:
    """A call that would run.

    Attributes:
        pattern: what the ranks do.
        problem: the GEMM over all ranks.
        ranks: number of ranks.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        turned_b: whether columns of B are contiguous, and not its rows, as in a backward pass.
        device: type of the tensors' device.
        rank: this rank in the group.
        ranks_per_host: number of ranks that share memory; None: all.
    """

    pattern: Pattern
    problem: GemmProblem
    ranks: int
    schedule: str = "auto"
    chunks: int | None = None
    turned_b: bool = False
    device: str = "cuda"
    rank: int = 0
    ranks_per_host: int | None = None


_RECORDINGS: list[dict[Need, None]] = []


def recording() -> bool:
    """Whether calls are recorded and not run."""
    return bool(_RECORDINGS)


def note_need(need: Need) -> None:
    """Add what a call needs to the recordings of this process."""
    for found in _RECORDINGS:
        found[need] = None


@contextlib.contextmanager
def record_needs() -> Iterator[dict[Need, None]]:
    """What the calls inside the ``with`` block need, forward and backward, each once, in all threads of this process.

    The calls are not run: they return tensors of the right shapes without values. So use torch's FakeTensorMode.
    """
    found: dict[Need, None] = {}
    _RECORDINGS.append(found)
    try:
        yield found
    finally:
        del _RECORDINGS[[found is each for each in _RECORDINGS].index(True)]
