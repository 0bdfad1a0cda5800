"""torch's fused ops and frameworks' own code by distgemm, on ranks that share one GPU, over NCCL."""

from __future__ import annotations

import importlib.util
import os
from unittest import mock

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import torch_worker
from tests.multiprocess import frameworks_worker, install_worker
from tests.once import once

OPS = ["gathers", "scatters", "styles_of_torch", "styles_along_dimension_1", "styles_with_a_bias"]
FRAMEWORKS = {
    "torchtitan_linears": "torchtitan",
    "megatron_linears": "megatron",
    "megatron_main_grad": "megatron",
    "transformers_linears": "transformers",
}
RANKS = 2
LAUNCH_TIMEOUT_S = 400.0
pytestmark = pytest.mark.gpu(1)


def run(names: list[str]) -> dict[str, list[str]]:
    """The failures of each check on this rank. GEMMs are by cuBLAS, schedules by name: nothing is measured."""
    with torch_worker.quick(), mock.patch.dict(os.environ, {"DISTGEMM_TUNE": "0"}):
        return {name: getattr(install_worker if name in OPS else frameworks_worker, name)() for name in names}


@once
def results(name: str) -> list[dict[str, list[str]]]:
    names = OPS if name in OPS else [name]
    return launch(run, RANKS, names, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("name", OPS)
def test_fused_ops_of_ranks_that_share_a_gpu_are_right(name: str) -> None:
    assert [found[name] for found in results("gathers")] == [[]] * RANKS


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_linears_of_frameworks_train_on_ranks_that_share_a_gpu(name: str) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: CONTRIBUTING.md, Test frameworks")
    assert [found[name] for found in results(name)] == [[]] * RANKS
