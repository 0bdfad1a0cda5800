"""More ranks than GPUs: they share them, which is slow, and right. So rings are proved where few GPUs are.

On one GPU kernels of several processes take turns; all else, kernels, plans and words, is as on GPUs of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.test_cuda import mixed

RANKS = [4, 8]
pytestmark = pytest.mark.gpu(1)


def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's, by the check's name; what went wrong is raised in every test that asks."""
    found = _run(ranks)
    if isinstance(found, Exception):
        raise found
    return found


@lru_cache
def _run(ranks: int) -> list[dict[str, Any]] | Exception:
    every = worker.cases(ranks) if ranks == 4 else worker.by_one_kernel(ranks)
    checks: list[Any] = [
        (worker.exact, (every,)),
        (worker.bounded_error, (every[::3],)),
        (worker.repeated, (mixed(ranks),)),
        (worker.stress, (mixed(ranks), 100, ranks)),
    ]
    try:
        return launch(worker.run_all, ranks, checks, backend="nccl", timeout=300, share=True)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", ["exact", "bounded_error", "repeated", "stress"])
def test_ranks_that_share_gpus(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []
