"""The collective runtime over NCCL, against numpy: the worker of tests/multiprocess with CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import worker
from tests.once import once

RANKS = [pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]
NUMBER = 12
"""Cases of each schedule."""


@once
def results(ranks: int) -> list[dict[str, Any]]:
    checks: list[Any] = [
        (worker.different_plans, (1,)),
        (worker.unexecutable_on_one, ()),
        (worker.variants, ()),
        (worker.numerics, ()),
    ]
    if ranks == 2:
        checks.append((worker.deleted_copies, ()))
    return launch(worker.run_all, ranks, worker.cases(ranks, NUMBER), checks, backend="nccl", timeout=300)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_equals_numpy(ranks: int) -> None:
    assert [failure for found in results(ranks) for failure in found["cases"]] == []


@pytest.mark.parametrize("ranks", RANKS)
def test_plans_that_do_not_fit_raise_on_all_ranks(ranks: int) -> None:
    for rank, found in enumerate(results(ranks)):
        for message in found["different_plans"]:
            assert message.startswith("ValueError") and "ranks [1] differ from ranks [0" in message
        assert found["unexecutable_on_one"].startswith("PlanError")
        assert rank == ranks - 1 or f"ranks [{ranks - 1}]" in found["unexecutable_on_one"]


@pytest.mark.parametrize("ranks", RANKS)
def test_variants_of_calls_and_numerics(ranks: int) -> None:
    assert [found["variants"] + found["numerics"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.gpu(2)
def test_without_any_copy_the_result_changes_or_an_error_is_raised() -> None:
    for of_ranks in zip(*(found["deleted_copies"] for found in results(2)), strict=True):
        assert not all(right for _, right in of_ranks), of_ranks
