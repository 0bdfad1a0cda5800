"""The kernels of tests on GPUs can be compiled ahead, where there is no GPU."""

from __future__ import annotations

import pytest

from distgemm.gemm.per_tile.local import LocalRanks
from tests.gpu import build


def test_kernels_of_per_tile_tests_are_known_without_a_gpu() -> None:
    """Every kind of tile of every pattern, each once; and the tests are as they were."""
    before = LocalRanks.__init__
    sources = build.of_per_tile()
    assert LocalRanks.__init__ is before
    macros = [dict(source.macros) for source in sources]
    assert len(sources) == len(set(sources)) > 150
    assert {each["DG_PATTERN"] for each in macros} == {"1", "2", "3", "4", "5", "6"}
    assert {each["DG_SPLIT"] for each in macros} == {"1", "2", "4"}


def test_a_test_that_fails_before_it_has_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgemm.gemm.per_tile.bind.RankGemm.__post_init__", lambda gemm: 1 / 0)
    with pytest.raises(RuntimeError, match=r"test_per_tile.py ended with (?s:.*)ZeroDivisionError"):
        build.of_per_tile()
