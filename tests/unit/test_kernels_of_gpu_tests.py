"""The kernels of tests on GPUs can be compiled ahead, where there is no GPU."""

from __future__ import annotations

import pytest

from distgemm.gemm.per_tile.local import LocalRanks
from tests.gpu import build


def test_kernels_of_per_tile_tests_are_known_without_a_gpu() -> None:
    """Every kind of tile of every pattern, each once; and the tests are as they were."""
    before = LocalRanks.__init__
    names = [(source.name, dict(source.macros)) for source in build.of_per_tile()]
    assert LocalRanks.__init__ is before
    patterns = {macros["DG_PATTERN"] for _, macros in names}
    assert len(names) == len({source for source in map(str, names)}) > 150
    assert patterns == {"1", "2", "3", "4", "5", "6"} and {macros["DG_SPLIT"] for _, macros in names} == {"1", "4"}


def test_a_test_that_fails_before_it_has_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgemm.gemm.per_tile.bind.RankGemm.__post_init__", lambda gemm: 1 / 0)
    with pytest.raises(RuntimeError, match=r"test_per_tile.py ended with (?s:.*)ZeroDivisionError"):
        build.of_per_tile()
