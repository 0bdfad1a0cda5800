"""What a plan is compared with does what its name says: which products and collectives are called, on what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (it has no public name)

from distgemm.measure import operation as module

SIZE, M, N, K = 4, 32, 48, 16


class Gemms(TorchDispatchMode):
    """Records the operands of GEMMs, and the names of all other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name == "mm":
            a, b = args[:2]
            self.found.append((*a.shape, *b.shape, a.data_ptr(), b.data_ptr()))
        elif name not in ("t", "permute"):
            self.others.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("pattern", ["ag+gemm", "gemm+rs", "gemm+ar"])
def test_parts_are_the_product_and_the_collective_of_the_whole(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int, int]] = []

    def gather(output: torch.Tensor, given: torch.Tensor, group: str) -> None:
        moved.append(("gather", output.numel(), given.data_ptr()))

    def scatter(output: torch.Tensor, given: torch.Tensor, group: str) -> None:
        moved.append(("scatter", given.numel(), output.numel()))

    def reduce(tensor: torch.Tensor, group: str) -> None:
        moved.append(("reduce", tensor.numel(), 0))

    dist = SimpleNamespace(get_world_size=lambda group: SIZE, all_gather_into_tensor=gather)
    dist.reduce_scatter_tensor, dist.all_reduce = scatter, reduce
    monkeypatch.setattr(module, "dist", dist)
    gathers = pattern == "ag+gemm"
    a = torch.zeros(M // SIZE, K) if gathers else torch.zeros(M, K // SIZE)
    b = torch.zeros(N // SIZE, K) if gathers else torch.zeros(N, K // SIZE)
    whole = torch.zeros(M, K) if gathers else a
    problem, group = SimpleNamespace(m=M, n=N, k=K), SimpleNamespace(group_name="g")
    operands: dict[str, Any] = {"a": a, "b": b, "local_a": whole, "device": a.device}
    operation: Any = SimpleNamespace(pattern=pattern, problem=problem, group=group, **operands)
    methods = {method.name: method for method in module.torch_methods(operation)}

    def ran(name: str) -> tuple[Any, list[tuple[int, ...]], list[tuple[str, int, int]]]:
        moved.clear()
        with Gemms() as products:
            found = methods[name].run()
        assert not products.others
        return found, products.found, list(moved)

    product = (*whole.shape, *b.T.shape, whole.data_ptr(), b.data_ptr())
    collective = {
        "ag+gemm": ("gather", M * K, a.data_ptr()),
        "gemm+rs": ("scatter", M * N, M * N // SIZE),
        "gemm+ar": ("reduce", M * N, 0),
    }[pattern]
    assert ran("cuBLAS alone") == (None, [product], [])
    assert ran("NCCL alone") == (None, [], [collective])
    found, products, moves = ran("NCCL + cuBLAS")
    assert found is not None and moves == [collective]
    assert [each[:4] for each in products] == [product[:4]] and products[0][5] == b.data_ptr()
