"""The parts of the search that need no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distgemm.gemm import GemmSpec, GemmTensors, MatrixSpec
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.tensors import matrix_spec, spec_of
from distgemm.gemm.tiles import TMA_TILES
from distgemm.tune.gemm import candidates, tune, with_other_memory
from distgemm.tune.search import random_tensors

HOPPER = CutlassProvider("90a")


def strided(rows: int, columns: int, stride: int) -> torch.Tensor:
    return torch.zeros(rows, stride, dtype=torch.bfloat16)[:, :columns]


def test_kernels_without_tma_are_tried_where_no_other_fits() -> None:
    aligned = GemmTensors(strided(24, 16, 16), strided(32, 16, 16), strided(24, 32, 32))
    assert len(candidates(HOPPER, spec_of(aligned))) == len(TMA_TILES)
    odd = GemmTensors(strided(24, 16, 17), strided(32, 16, 16), strided(24, 32, 32))
    assert [one.kernel_schedule for one in candidates(HOPPER, spec_of(odd))] == ["plain"]
    for_streams = candidates(HOPPER, spec_of(aligned), streams=2)
    alone = set(candidates(HOPPER, spec_of(aligned)))
    assert set(for_streams) == alone | {replace(config, share=2) for config in alone}


def test_tuning_multiplies_with_scales_of_blocks() -> None:
    a, b = (MatrixSpec("float8_e4m3fn", rows, 400) for rows in (130, 300))
    spec = GemmSpec(a, b, MatrixSpec("bfloat16", 130, 300), scale_a="1x128", scale_b="128x128")
    assert spec_of(random_tensors(spec, torch.device("cpu"))) == replace(spec, d=replace(spec.d, alignment=8))


def test_products_that_no_kernel_computes() -> None:
    tensors = GemmTensors(torch.zeros(8, 8).double(), torch.zeros(8, 8).double(), torch.zeros(8, 8))
    with pytest.raises(ValueError, match=r"provider cutlass: A and B are of bfloat16, .* not float64"):
        candidates(HOPPER, spec_of(tensors))


@pytest.mark.parametrize("a", [strided(24, 13, 16), strided(16, 24, 24)[:13].mT], ids=["rows", "columns"])
def test_other_tensors_have_the_same_strides(a: torch.Tensor) -> None:
    a.copy_(torch.arange(a.numel()).view(a.shape))
    tensors = GemmTensors(a, strided(32, 13, 16), strided(24, 32, 40))
    other = with_other_memory(tensors)
    assert spec_of(other) == spec_of(tensors)
    assert torch.equal(other.a, a)
    assert other.b is tensors.b
    assert matrix_spec("D", other.d) == MatrixSpec("bfloat16", 24, 32, stride=40)
    assert len({x.untyped_storage().data_ptr() for x in (a, tensors.d, other.a, other.d)}) == 4


def test_tuning_wants_tensors_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="kernels run on CUDA devices, the tensors are on cpu"):
        tune(GemmTensors(strided(24, 16, 16), strided(32, 16, 16), strided(24, 32, 32)))
