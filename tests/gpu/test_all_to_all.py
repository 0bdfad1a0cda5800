"""All-to-alls of ranks that share a GPU: results, bits and replays. Per-tile kernels are in test_per_tile_shared.py."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.once import once

RANKS = [2, 4, 8]
LAUNCH_TIMEOUT_S = 400.0
pytestmark = pytest.mark.gpu(1)


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's failures, by the check's name. All kernels are compiled first, in parallel."""
    cases = worker.all_to_all_cases(ranks)
    launch(worker.compile_kernels, 1, cases, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [
        (worker.exact, (cases,)),
        (worker.bounded_error, (cases[::3],)),
        (worker.repeated, (cases[::4],)),
        (worker.poisoned, (cases[1::4],)),
        (worker.stress, (cases, 200, 5)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", ["exact", "bounded_error", "repeated", "poisoned", "stress"])
@pytest.mark.parametrize("ranks", RANKS)
def test_results_are_right(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []
