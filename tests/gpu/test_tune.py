"""The unfused program over NCCL and cuBLAS, and schedule="auto", on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from distgemm.runtime.launch import launch
from distgemm.runtime.unfused import COLLECTIVES
from distgemm.schedulers import PATTERNS, Pattern
from tests.multiprocess import tune_worker as worker

RANKS = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_unfused_program_is_exact_on_integers(ranks: int) -> None:
    for collective in COLLECTIVES:
        found = launch(worker.equal_to_numpy, ranks, collective, backend="nccl", timeout=300)
        assert [failure for each in found for failure in each] == []


@pytest.mark.parametrize("patterns", [PATTERNS, ("gemm+a2a", "a2a+gemm")], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_measured_configuration_is_taken_pinned_and_captured(
    ranks: int, patterns: tuple[Pattern, ...], tmp_path: Path
) -> None:
    """DISTGEMM_CACHE_DIR may name a folder that keeps kernels for the next run, without tuned configurations."""
    found = launch(worker.run_all, ranks, [(worker.measured, (str(tmp_path), patterns))], backend="nccl", timeout=580)
    assert [failure for each in found for failure in each["measured"]] == []
