"""torch's fused ops by distgemm over gloo, against whole products, inductor's pass and torchtitan's linears."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import install_worker as worker
from tests.multiprocess import nn_tokens_worker
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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "transformers"])
def test_linears_of_a_framework_train(framework: str, ranks: int) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install --no-deps -r tests/frameworks.txt")
    name = f"{framework}_linears"
    checks: list[Any] = [(getattr(worker, name), ())]
    assert [found[name] for found in launch(run_all, ranks, checks, timeout=90)] == [[]] * ranks


@pytest.mark.sample(0)
def test_layers_have_the_shards_that_megatrons_layers_have() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron is not installed: pip install --no-deps -r tests/frameworks.txt")
    assert launch(nn_tokens_worker.of_megatron, 2, timeout=120) == [[], []]
