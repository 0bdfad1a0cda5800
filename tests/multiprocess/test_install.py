"""torch's fused ops by distgemm over gloo, against whole products and with inductor's pass."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import install_worker as worker
from tests.multiprocess.ops_torch_worker import run_all
from tests.once import once

CHECKS = ("gathers", "scatters", "copies", "refusals", "scaled_gathers", "scaled_scatters", "scaled_refusals")
GRAPHS = ("groups", "compiled_by_inductor", "bias_before_heads", "styles_of_torch")
MORE_GRAPHS = ("styles_along_dimension_1", "styles_with_a_bias", "extents_that_vary")


@once
def results(ranks: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return launch(run_all, ranks, [(getattr(worker, name), ()) for name in names], timeout=200)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
def test_fused_ops_are_computed_or_refused_in_words(ranks: int, check: str) -> None:
    assert [found[check] for found in results(ranks, CHECKS)] == [[]] * ranks


@pytest.mark.sample(0)
@pytest.mark.parametrize("check", GRAPHS)
def test_groups_and_graphs_of_inductor(check: str) -> None:
    assert [found[check] for found in results(4, GRAPHS)] == [[]] * 4


@pytest.mark.sample(0)
@pytest.mark.parametrize("check", MORE_GRAPHS)
def test_more_graphs_of_inductor(check: str) -> None:
    assert [found[check] for found in results(4, MORE_GRAPHS)] == [[]] * 4
