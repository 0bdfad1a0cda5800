"""fp8 on GPUs: functions with recipes, on 1 to 8 ranks, also where they share one GPU."""

from __future__ import annotations

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import fp8_worker
from tests.once import once

CHECKS = ["functions", "unequal", "plans", "refused"]
pytestmark = pytest.mark.gpu(1)


@once
def results(ranks: int) -> list[dict[str, list[str]]]:
    """Each rank's failures, by the check's name."""
    launch(fp8_worker.compile_kernels, 1, backend="nccl", timeout=500.0, share=True)
    return launch(fp8_worker.run_all, ranks, CHECKS, backend="nccl", timeout=400.0, share=True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_share_a_gpu_compute_what_one_rank_computes(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []
