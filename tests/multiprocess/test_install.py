"""torch's fused ops by distgemm over gloo, against whole products and with inductor's pass."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import install_worker as worker
from tests.multiprocess.ops_torch_worker import run_all
from tests.once import once

CHECKS = ["gathers", "scatters", "refusals"]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    names = [*CHECKS, *(["groups", "compiled_by_inductor", "styles_of_torch"] if ranks == 4 else [])]
    return launch(run_all, ranks, [(getattr(worker, name), ()) for name in names], timeout=200)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.sample(0)), 4])
def test_fused_ops_are_computed_or_refused_in_words(ranks: int, check: str) -> None:
    assert [found[check] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("check", ["groups", "compiled_by_inductor", "styles_of_torch"])
def test_groups_and_graphs_of_inductor(check: str) -> None:
    assert [found[check] for found in results(4)] == [[]] * 4
