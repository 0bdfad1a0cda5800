"""The provider that is taken if the caller names none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distgemm.gemm import default_provider, forget_kernels
from distgemm.runtime.executable import ExecutionConfig

gemm = importlib.import_module("distgemm.gemm")

DEFAULTS = {(8, 0): "cublas", (8, 9): "cublas", (9, 0): "cutlass", (10, 0): "cublas", (12, 0): "cublas"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretends that there are GPUs of a compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize("capability", DEFAULTS)
def test_the_default_provider(gpu: Callable[[tuple[int, int]], None], capability: tuple[int, int]) -> None:
    """CUTLASS has kernels with TMA and wgmma for Hopper alone. Its plain kernels are slow."""
    gpu(capability)
    on_gpu = torch.device("cuda", 1)
    assert default_provider() == default_provider(on_gpu) == DEFAULTS[capability]
    assert default_provider(torch.device("cpu")) == "cutlass"
    assert ExecutionConfig().on(on_gpu).provider == DEFAULTS[capability]
    assert ExecutionConfig().on(on_gpu, "float64").provider == default_provider(on_gpu, "float64") == "cublas"
    assert ExecutionConfig(execution="per_tile").on(on_gpu).provider == "cutlass"
    assert ExecutionConfig(config="128x256x64_1x2_cooperative").on(on_gpu).provider == "cutlass"
    for name in ("cublas", "cutlass"):
        assert ExecutionConfig(name).on(on_gpu).provider == name


def test_the_default_provider_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_provider() == "cutlass"


def test_a_gemm_takes_the_default_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, did = list[str](), list[str]()

    class Provider:
        def __init__(self, name: str) -> None:
            asked.append(name)

        def compile(self, *_: object) -> Any:
            return type("Kernel", (), {"bind": lambda self, tensors, begins_early: launch})()

    monkeypatch.setattr(gemm, "get_provider", Provider)
    monkeypatch.setattr(gemm, "default_provider", lambda device, dtype: "cublas")
    monkeypatch.setattr("distgemm.gemm.tensors.check_device", lambda tensors: None)
    matrix = torch.zeros(8, 8)

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        did.append("its GPU is current")
        yield
        did.append("no more")

    def launch() -> None:
        did.append("launch")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    given: tuple[dict[str, Any], ...] = ({}, {"config": "128x256x64_1x2_cooperative"}, {"provider": "cutlass"})
    for options in given:
        forget_kernels()
        gemm.gemm(matrix, matrix, torch.empty(8, 8), **options)
    forget_kernels()
    assert asked == ["cublas", "cutlass", "cutlass"]
    assert did == ["its GPU is current", "launch", "no more"] * 3
