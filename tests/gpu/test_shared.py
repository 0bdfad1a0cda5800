"""More ranks than GPUs: they share them, which is slow, and right. So rings are proved where few GPUs are.

On one GPU kernels of several processes take turns; all else, kernels, plans and words, is as on GPUs of their own. But
what engines copy to a peer is copied by a kernel there if both are on one GPU, and that needs SMs, which kernels that
wait for it may hold. So these plans are left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.cuda_worker import Case
from tests.gpu.test_cuda import mixed
from tests.once import once

RANKS = [4]
pytestmark = pytest.mark.gpu(1)


def needs_no_engine(case: Case) -> bool:
    """Whether no kernel that holds SMs waits for a copy."""
    return case.waits != "gemm" or case.mechanism == "store" or case.copies == "gemm"


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's, by the check's name."""
    every = [case for case in worker.by_one_kernel(ranks) if needs_no_engine(case)]
    replayed = [case for case in mixed(ranks) if needs_no_engine(case)]
    checks: list[Any] = [
        (worker.exact, (every,)),
        (worker.bounded_error, (every[::3],)),
        (worker.repeated, (replayed,)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=300, share=True)


@pytest.mark.parametrize("check", ["exact", "bounded_error", "repeated"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_gpus(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []
