"""Frameworks' own code by distgemm over gloo, against unsharded programs and the frameworks' own path."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from distgemm.runtime.launch import launch
from tests.multiprocess import frameworks_worker as worker
from tests.multiprocess import nn_tokens_worker
from tests.multiprocess.ops_torch_worker import run_all
from tests.once import once

LINEARS = ["torchtitan_linears", "megatron_linears", "megatron_main_grad", "transformers_linears", "torchao_linears"]
FEW_LINEARS = ("torchtitan_linears", "megatron_main_grad", "torchao_linears")
SERVERS = ["vllm_async_tp", "vllm_rows", "sglang_rows"]
FEW_OR_MORE = [2, pytest.param(4, marks=pytest.mark.sample(0))]
LAUNCH_TIMEOUT_S = 300.0


def require(framework: str) -> None:
    """Skip the test where the framework is not installed."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: CONTRIBUTING.md, Test frameworks")


@once
def results(ranks: int, names: tuple[str, ...], *arguments: Any) -> list[dict[str, list[str]]]:
    """The failures of each check on each rank."""
    checks: list[Any] = [(getattr(worker, name), arguments) for name in names]
    return launch(run_all, ranks, checks, timeout=LAUNCH_TIMEOUT_S)


@pytest.mark.parametrize("ranks", FEW_OR_MORE)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW_LINEARS else pytest.mark.sample(0)) for name in LINEARS]
)
def test_linears_of_a_framework_train(name: str, ranks: int) -> None:
    framework = name.partition("_")[0]
    require(framework)
    names = tuple(each for each in LINEARS if each.startswith(framework))
    assert [found[name] for found in results(ranks, names)] == [[]] * ranks


@pytest.mark.parametrize(
    ("ranks", "tp"), [(2, 2), *(pytest.param(4, tp, marks=pytest.mark.sample(0)) for tp in (2, 4))]
)
def test_torchtitan_trains_its_llama(ranks: int, tp: int) -> None:
    require("torchtitan")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14) or importlib.util.find_spec("triton") is None:
        pytest.skip("torchtitan 0.3.0 shards this model with FSDP of torch >= 2.14, and imports triton")
    assert [found["torchtitan_llama"] for found in results(ranks, ("torchtitan_llama",), tp)] == [[]] * ranks


@pytest.mark.parametrize("ranks", FEW_OR_MORE)
@pytest.mark.parametrize("name", SERVERS)
def test_linears_and_passes_of_a_server(name: str, ranks: int) -> None:
    require(name.partition("_")[0])
    assert [found[name] for found in results(ranks, (name,))] == [[]] * ranks


@pytest.mark.sample(0)
def test_layers_have_the_shards_that_megatrons_layers_have() -> None:
    require("megatron")
    assert launch(nn_tokens_worker.of_megatron, 2, timeout=120) == [[], []]
