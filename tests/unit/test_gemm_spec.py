"""The value objects of GEMMs: configurations, matrices, specs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec, Status, get_provider, list_providers
from distgemm.gemm.spec import EPILOGUES, RASTERS, SHARES, common_power_of_two
from distgemm.gemm.tiles import TMA_TILES

# --- configurations -------------------------------------------------------------------------------------


def configs() -> list[GemmConfig]:
    with_tma = [
        GemmConfig((*tile, depth), cluster, kernel_schedule, epilogue, raster, swizzle, share)
        for (tile, cluster, kernel_schedule), depth in itertools.product(TMA_TILES, (32, 64, 128))
        for epilogue, raster, swizzle, share in itertools.product(EPILOGUES, RASTERS, (1, 2, 4, 8), SHARES)
    ]
    return with_tma + [GemmConfig((128, 128, depth), (1, 1), "plain", "direct") for depth in (8, 32, 64)]


def test_a_configuration_has_one_text() -> None:
    found = configs()
    names = [str(config) for config in found]
    assert [GemmConfig.parse(name) for name in names] == found
    assert len(set(names)) == len(found) == len(TMA_TILES) * 3 * 48 + 3


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("128x256x64_1x2_cooperative", GemmConfig((128, 256, 64), (1, 2))),
        ("64x128x64_1x1_pingpong_direct", GemmConfig((64, 128, 64), kernel_schedule="pingpong", epilogue="direct")),
        (
            "128x128x64_2x1_pingpong_direct_raster_m_swizzle_4",
            GemmConfig((128, 128, 64), (2, 1), "pingpong", "direct", "m", 4),
        ),
        ("128x128x32_1x1_plain", GemmConfig((128, 128, 32), kernel_schedule="plain", epilogue="direct")),
        ("256x128x64_2x1_cooperative_swizzle_8", GemmConfig((256, 128, 64), (2, 1), swizzle=8)),
        (
            "128x128x64_1x1_pingpong_raster_n_share_2",
            GemmConfig((128,) * 2 + (64,), (1, 1), "pingpong", "tma", "n", 1, 2),
        ),
        (
            "64x64x64_2x2_pingpong_swizzle_2_split_4",
            GemmConfig((64,) * 3, (2, 2), "pingpong", swizzle=2, split=4),
        ),
    ],
)
def test_names(name: str, config: GemmConfig) -> None:
    assert GemmConfig.parse(name) == config
    assert str(config) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "128x256_1x2_cooperative",
        "128x256x64_cooperative",
        "128x256x64_1x2",
        "128x256x64_1x2_fast",
        "128x256x64_1x2_cooperative_raster_k",
        "128x256x64_1x2_cooperative_swizzle_4_raster_m",
        " 128x256x64_1x2_cooperative",
        "128x256x64_1x2_cooperative\n",
        "-128x256x64_1x2_cooperative",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"written like .*, got {re.escape(repr(text))}"):
        GemmConfig.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": (128, 256)}, r"tile is a tuple of 3 integers > 0, got \(128, 256\)"),
        ({"tile": (128, 256, 0)}, "tile is a tuple of 3 integers > 0"),
        ({"tile": (128, 256, 64.0)}, "tile is a tuple of 3 integers > 0"),
        ({"cluster": (2,)}, "cluster is a tuple of 2 integers > 0"),
        ({"cluster": (0, 1)}, "cluster is a tuple of 2 integers > 0"),
        ({"cluster": (3, 1)}, r"1, 2, 4 or 8 thread blocks .* got \(3, 1\)"),
        ({"cluster": (4, 4)}, "8 at most"),
        ({"kernel_schedule": "stream_k"}, "kernel_schedule is one of cooperative, pingpong, plain, got 'stream_k'"),
        ({"epilogue": "none"}, "epilogue is one of tma, direct, got 'none'"),
        ({"raster": "k"}, "raster is one of heuristic, m, n, got 'k'"),
        ({"swizzle": 3}, "swizzle is 1, 2, 4 or 8, got 3"),
        ({"share": 3}, r"share is one of \(1, 2\), got 3"),
        ({"split": 3, "kernel_schedule": "pingpong"}, "split is 1; or 2, 4 or 8 .* got 3"),
        ({"split": 2}, "split is 1; .* got 2, cooperative"),
        ({"split": 2, "kernel_schedule": "pingpong", "cluster": (2, 2)}, "at most so many tiles, got 2, .* of 2x2"),
        ({"kernel_schedule": "plain"}, "a plain kernel has .* epilogue 'direct'"),
        ({"kernel_schedule": "plain", "epilogue": "direct", "cluster": (2, 1)}, "a plain kernel has cluster"),
        ({"kernel_schedule": "plain", "epilogue": "direct", "raster": "m"}, "a plain kernel has"),
        ({"kernel_schedule": "plain", "epilogue": "direct", "swizzle": 2}, "a plain kernel has"),
        ({"kernel_schedule": "plain", "epilogue": "direct", "share": 2}, "a plain kernel has"),
    ],
)
def test_impossible_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GemmConfig((128, 256, 64)), **change)


# --- matrices -------------------------------------------------------------------------------------------


def test_dense_by_default() -> None:
    matrix = MatrixSpec("bfloat16", 3, 24)
    assert (matrix.stride, matrix.batch_stride, matrix.alignment) == (24, 0, 16)
    assert replace(matrix, stride=-1, batch_stride=-1, batches=2).batch_stride == 72
    columns = MatrixSpec("float32", 6, 5, batches=2, row_major=False)
    assert (columns.stride, columns.batch_stride, columns.alignment) == (6, 30, 8)


@pytest.mark.parametrize(
    ("dtype", "stride", "batch_stride", "alignment"),
    [
        ("bfloat16", 64, 640, 16),
        ("bfloat16", 68, 680, 8),
        ("bfloat16", 64, 644, 8),
        ("bfloat16", 65, 650, 2),
        ("float32", 65, 650, 4),
        ("float8_e4m3fn", 80, 800, 16),
        ("float8_e4m3fn", 65, 650, 1),
    ],
)
def test_strides_limit_the_alignment(dtype: str, stride: int, batch_stride: int, alignment: int) -> None:
    matrix = MatrixSpec(dtype, 10, 64, batches=2, stride=stride, batch_stride=batch_stride)
    assert matrix.alignment == alignment
    assert matrix.readable is (alignment == 16)
    assert replace(matrix, alignment=2).alignment == min(2, alignment)


@pytest.mark.parametrize(
    ("dtype", "columns", "alignment", "vector"),
    [
        ("bfloat16", 64, 16, 8),
        ("bfloat16", 60, 16, 4),
        ("bfloat16", 61, 16, 1),
        ("bfloat16", 64, 4, 2),
        ("float32", 64, 16, 4),
        ("float32", 62, 16, 2),
        ("float8_e4m3fn", 64, 16, 16),
        ("float8_e4m3fn", 63, 16, 1),
    ],
)
def test_vectors_divide_address_and_extent(dtype: str, columns: int, alignment: int, vector: int) -> None:
    along_rows = MatrixSpec(dtype, 7, columns, stride=128, alignment=alignment)
    along_columns = MatrixSpec(dtype, columns, 7, row_major=False, stride=128, alignment=alignment)
    assert along_rows.vector == along_columns.vector == vector


@pytest.mark.parametrize(
    ("columns", "alignment", "padded", "writable"),
    [(64, 16, False, True), (64, 8, False, False), (60, 16, False, False), (60, 16, True, True), (60, 8, True, False)],
)
def test_tma_writes_whole_pieces(columns: int, alignment: int, padded: bool, writable: bool) -> None:
    matrix = MatrixSpec("bfloat16", 5, columns, stride=64, alignment=alignment, padded=padded)
    assert matrix.writable is writable
    assert matrix.readable is (alignment == 16)


def test_unknown_types() -> None:
    with pytest.raises(ValueError, match=r"dtype is one of float64, .* got 'int8'"):
        MatrixSpec("int8", 2, 2)


@given(st.lists(st.integers(0, 4096), max_size=4))
def test_common_power_of_two(values: list[int]) -> None:
    fit = [power for power in (1, 2, 4, 8, 16) if all(value % power == 0 for value in values)]
    assert common_power_of_two(*values) == max(fit)


# --- products -------------------------------------------------------------------------------------------

A = MatrixSpec("bfloat16", 24, 16)
B = MatrixSpec("bfloat16", 32, 16)
D = MatrixSpec("bfloat16", 24, 32)
ODD = MatrixSpec("bfloat16", 24, 32, stride=33)


def test_extents() -> None:
    spec = GemmSpec(A, B, D)
    assert (spec.m, spec.n, spec.k, spec.l) == (24, 32, 16, 1)
    batches = [replace(x, batches=3, batch_stride=-1) for x in (A, B, D)]
    assert GemmSpec(*batches).l == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": MatrixSpec("bfloat16", 32, 24)}, r"differ in k: \(24, 16\) and \(32, 24\)"),
        ({"d": MatrixSpec("bfloat16", 32, 24)}, r"D is \(m, n\) = \(24, 32\), got \(32, 24\)"),
        ({"c": MatrixSpec("bfloat16", 24, 31)}, r"C is \(m, n\) = \(24, 32\), got \(24, 31\)"),
        ({"partial": A}, r"the partial sum is \(m, n\) = \(24, 32\), got \(24, 16\)"),
        ({"a": replace(A, batches=2)}, "D has 1 batches, A has 2"),
        ({"b": replace(B, batches=2)}, "D has 1 batches, B has 2"),
        ({"c": replace(D, batches=2)}, "D has 1 batches, C has 2"),
        ({"partial": replace(D, batches=2)}, "D has 1 batches, the partial sum has 2"),
        ({"b": replace(B, dtype="float16")}, "A and B are of one type, got bfloat16 and float16"),
        ({"b": replace(B, dtype="float8_e5m2")}, "A and B are of one type, got bfloat16 and float8_e5m2"),
        ({"scale_a": "1x128"}, "both A and B have scales of blocks, or none has, got 1x128 and none"),
        ({"scale_a": "row", "scale_b": "128x128"}, "or none has, got row and 128x128"),
    ],
)
def test_products_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GemmSpec(A, B, D), **change)


@pytest.mark.parametrize(
    ("change", "operands", "results"),
    [
        ({}, True, True),
        ({"a": replace(A, stride=17)}, False, True),
        ({"b": replace(B, stride=17)}, False, True),
        ({"d": ODD}, True, False),
        ({"c": ODD}, True, False),
        ({"partial": ODD}, True, False),
        ({"c": ODD, "partial": D}, True, True),
        ({"c": D, "partial": ODD}, True, False),
    ],
)
def test_alignment_for_tma(change: dict[str, Any], operands: bool, results: bool) -> None:
    spec = replace(GemmSpec(A, B, D), **change)
    assert (spec.operands_aligned, spec.results_aligned) == (operands, results)


def test_status_is_its_reason() -> None:
    assert Status()
    assert not Status("no")
    assert Status("no").reason == "no"


def test_providers() -> None:
    assert [get_provider(name).name for name in list_providers()] == list_providers()
    with pytest.raises(ValueError, match="provider is one of cublas, cutlass, got 'triton'"):
        get_provider("triton")
