"""All-to-alls of ranks that share a GPU: results, bits and replays. Per-tile kernels are in test_per_tile_shared.py."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu import torch_worker
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


FUNCTIONS = ["all_to_all", "captured_all_to_all", "per_tile_all_to_all"]


@once
def function_results(ranks: int) -> list[dict[str, list[str]]]:
    """Each rank's failures of the functions for torch, by the check's name."""
    launch(torch_worker.compile_ahead, 1, None, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [(getattr(torch_worker, name), ()) for name in FUNCTIONS]
    return launch(torch_worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", FUNCTIONS)
@pytest.mark.parametrize("ranks", RANKS[1:])  # test_shared.py has 2
def test_functions_and_gradients_are_right(ranks: int, check: str) -> None:
    assert [failure for found in function_results(ranks) for failure in found[check]] == []
