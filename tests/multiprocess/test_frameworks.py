"""Frameworks' own code by distgemm over gloo, against unsharded programs and the frameworks' own path."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from distgemm.runtime.launch import launch
from tests.multiprocess import frameworks_worker as worker
from tests.multiprocess.ops_torch_worker import run_all


def check(framework: str, name: str, ranks: int, *arguments: Any) -> None:
    """Run a check on all ranks."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: CONTRIBUTING.md, Test frameworks")
    checks: list[Any] = [(getattr(worker, name), arguments)]
    assert [found[name] for found in launch(run_all, ranks, checks, timeout=300)] == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "transformers"])
def test_linears_of_a_framework_train(framework: str, ranks: int) -> None:
    check(framework, f"{framework}_linears", ranks)


@pytest.mark.parametrize(
    ("ranks", "tp"),
    [(2, 2), pytest.param(4, 4, marks=pytest.mark.sample(0)), pytest.param(4, 2, marks=pytest.mark.sample(0))],
)
def test_torchtitan_trains_its_llama(ranks: int, tp: int) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14) or importlib.util.find_spec("triton") is None:
        pytest.skip("torchtitan 0.3.0 shards this model with FSDP of torch >= 2.14, and imports triton")
    check("torchtitan", "torchtitan_llama", ranks, tp)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
def test_megatron_adds_unrounded_gradients_to_main_grad(ranks: int) -> None:
    check("megatron", "megatron_main_grad", ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["vllm_async_tp", "vllm_rows", "sglang_rows"])
def test_linears_and_passes_of_a_server(name: str, ranks: int) -> None:
    check(name.partition("_")[0], name, ranks)
