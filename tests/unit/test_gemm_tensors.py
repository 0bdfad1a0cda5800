"""Specs of tensors: strides, extents of 1, batches, alignment; and the tensors that are refused."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distgemm.gemm import GemmTensors, MatrixSpec, gemm
from distgemm.gemm.tensors import matrix_spec, spec_of

# --- one matrix -----------------------------------------------------------------------------------------

BIG = 4096
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.int8}


@st.composite
def strided(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer whose elements differ as far as their type allows, and any view of it."""
    dtype = draw(st.sampled_from(list(BITS)))
    buffer = torch.arange(BIG).to(BITS[dtype]).view(dtype)
    extents = draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
    # Strides that make sense come up often, any others sometimes.
    rows, columns = extents[-2:]
    stride = st.one_of(st.sampled_from([1, rows, columns, columns + 2, 8, 16, 24]), st.integers(0, 40))
    strides = [draw(stride) for _ in extents]
    if len(extents) == 3:
        strides[0] = draw(st.one_of(st.sampled_from([0, 48, 64, 96, 128]), st.integers(0, 128)))
    offset = draw(st.one_of(st.sampled_from([0, 8, 16]), st.integers(0, 40)))
    return buffer, buffer.as_strided(extents, strides, offset)


@given(strided())
def test_a_spec_reads_the_same_elements(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    buffer, tensor = drawn
    batches, rows, columns = (1, *tensor.shape)[-3:]
    row_stride, column_stride = tensor.stride()[-2:]
    matrix = [[r * row_stride + c * column_stride for c in range(columns)] for r in range(rows)]
    distinct = len(set(itertools.chain(*matrix))) == rows * columns
    along_rows = all(y - x == 1 for row in matrix for x, y in itertools.pairwise(row))
    along_columns = all(y - x == 1 for column in zip(*matrix, strict=True) for x, y in itertools.pairwise(column))
    if not (distinct and (along_rows or along_columns)):
        with pytest.raises(ValueError, match="rows or columns of A are contiguous and do not overlap, got shape"):
            matrix_spec("A", tensor)
        return

    spec = matrix_spec("A", tensor)
    assert (spec.batches, spec.rows, spec.columns) == (batches, rows, columns)
    assert spec.row_major is along_rows
    steps = (spec.stride, 1) if spec.row_major else (1, spec.stride)
    again = buffer.as_strided((batches, rows, columns), (spec.batch_stride, *steps), tensor.storage_offset())
    bits = BITS[tensor.dtype]
    assert torch.equal(again.view(bits), tensor.view(bits).reshape(batches, rows, columns))

    # Each row (column) begins at a multiple of the alignment; not all of them at a multiple of more.
    view = tensor if tensor.dim() == 3 else tensor[None]
    lines = view[:, :, 0] if along_rows else view[:, 0, :]
    begins = [line.data_ptr() for batch in lines for line in batch]
    assert all(begin % spec.alignment == 0 for begin in begins)
    assert spec.alignment == 16 or any(begin % (2 * spec.alignment) for begin in begins)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensor", "spec"),
    [
        (empty(24, 40), MatrixSpec("bfloat16", 24, 40)),
        (empty(24, 48)[:, :40], MatrixSpec("bfloat16", 24, 40, stride=48)),
        (empty(40, 24).mT, MatrixSpec("bfloat16", 24, 40, row_major=False)),
        (empty(40, 56).mT[:24], MatrixSpec("bfloat16", 24, 40, row_major=False, stride=56)),
        (empty(3, 24, 40), MatrixSpec("bfloat16", 24, 40, batches=3)),
        (empty(1, 24, 40), MatrixSpec("bfloat16", 24, 40)),
        (empty(24, 3, 40).transpose(0, 1), MatrixSpec("bfloat16", 24, 40, 3, stride=120, batch_stride=40)),
        (empty(24, 40).expand(3, 24, 40), MatrixSpec("bfloat16", 24, 40, 3, batch_stride=0)),
        (empty(24, 41)[:, :40], MatrixSpec("bfloat16", 24, 40, stride=41, alignment=2)),
        (empty(24, 48)[:, 4:44], MatrixSpec("bfloat16", 24, 40, stride=48, alignment=8)),
        (empty(24, 48, dtype=torch.float32)[:, 1:], MatrixSpec("float32", 24, 47, stride=48, alignment=4)),
        (empty(3, 25, 40)[:, :24], MatrixSpec("bfloat16", 24, 40, 3, batch_stride=1000)),
        (empty(3, 1001)[:, :960].view(3, 24, 40), MatrixSpec("bfloat16", 24, 40, 3, batch_stride=1001, alignment=2)),
        # The stride of a mode of extent 1, or of one batch, is ignored.
        (empty(1, 37), MatrixSpec("bfloat16", 1, 37, stride=40)),
        (empty(99, 37)[::5][:1], MatrixSpec("bfloat16", 1, 37, stride=40)),
        (empty(37, 3)[:, :1], MatrixSpec("bfloat16", 37, 1, stride=3, alignment=2)),
        (empty(37, 8)[:, :1], MatrixSpec("bfloat16", 37, 1, stride=8)),
        (empty(5, 40)[:, ::8][:1], MatrixSpec("bfloat16", 1, 5, row_major=False, stride=8)),
        (empty(3, 1, 40), MatrixSpec("bfloat16", 1, 40, batches=3)),
        (empty(7, 3, 8)[::3][:1], MatrixSpec("bfloat16", 3, 8)),
        (empty(0, 64), MatrixSpec("bfloat16", 0, 64, stride=64)),
    ],
    ids=str,
)
def test_specs_of_tensors(tensor: torch.Tensor, spec: MatrixSpec) -> None:
    assert matrix_spec("A", tensor) == spec


@pytest.mark.parametrize(
    "tensor",
    [
        empty(8).expand(5, 8),
        empty(5, 1).expand(5, 8),
        empty(40).as_strided((5, 8), (7, 1)),
        empty(40).as_strided((8, 5), (1, 7)),
        empty(5, 16)[:, ::2],
        empty(3, 5, 16)[..., ::2],
        empty(5, 4, 3).permute(1, 0, 2)[..., 0],
    ],
    ids=["rows", "columns", "overlapping rows", "overlapping columns", "every other", "batches", "inner mode"],
)
def test_neither_rows_nor_columns_are_contiguous(tensor: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"rows or columns of B are contiguous and do not overlap, got shape \(.*\) and"
    ):
        matrix_spec("B", tensor)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (empty(8), r"C has 2 or 3 dimensions, got shape \(8,\)"),
        (empty(1, 1, 8, 8), "C has 2 or 3 dimensions"),
        (torch.zeros(8, 8, dtype=torch.int32), r"C is of torch.int32; known are torch.float64, torch.float32"),
        (torch.zeros(8, 8).to(torch.float8_e5m2fnuz), "C is of torch.float8_e5m2fnuz; known are"),
    ],
)
def test_other_tensors(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matrix_spec("C", tensor)


# --- all tensors of a product ---------------------------------------------------------------------------

M, N, K = 24, 32, 16
PLAIN = GemmTensors(empty(M, K), empty(N, K), empty(M, N))
WIDE = GemmTensors(*(x.float() for x in (PLAIN.a, PLAIN.b, PLAIN.d)))


def test_a_whole_spec() -> None:
    d = empty(M, N)
    tensors = GemmTensors(
        empty(K, M).mT,
        empty(N, K),
        d,
        c=d,
        partial=empty(M, N).float(),
        bias=empty(N),
        scale_a=torch.ones(M, 1),
        scale_b=torch.ones(()),
        beta=0.5,
        padded=True,
    )
    spec = spec_of(tensors)
    assert spec.a == MatrixSpec("bfloat16", M, K, row_major=False)
    assert spec.b == MatrixSpec("bfloat16", N, K)
    assert spec.d == MatrixSpec("bfloat16", M, N, padded=True)
    assert spec.c == MatrixSpec("bfloat16", M, N)
    assert spec.partial == MatrixSpec("float32", M, N)
    assert (spec.bias, spec.scale_a, spec.scale_b) == ("bfloat16", "row", "tensor")


def test_without_beta_there_is_no_c() -> None:
    assert spec_of(replace(PLAIN, c=empty(M, N))).c is None
    assert spec_of(replace(PLAIN, c=empty(M, N), beta=-1.0)).c == MatrixSpec("bfloat16", M, N)


def test_tfloat32_is_explicit() -> None:
    assert spec_of(WIDE).a.dtype == spec_of(replace(WIDE, dtype="float32")).a.dtype == "float32"
    tf32 = spec_of(replace(WIDE, dtype="tfloat32"))
    assert (tf32.a.dtype, tf32.b.dtype, tf32.d.dtype) == ("tfloat32", "tfloat32", "float32")


def test_a_batch_of_one_is_a_matrix() -> None:
    assert spec_of(replace(PLAIN, a=PLAIN.a[None], d=PLAIN.d[None])) == spec_of(PLAIN)


def test_strided_batches_of_d_may_interleave() -> None:
    batches = GemmTensors(empty(3, M, K), empty(N, K).expand(3, N, K), empty(M, 3, N).transpose(0, 1))
    spec = spec_of(batches)
    assert (spec.d.stride, spec.d.batch_stride, spec.b.batch_stride) == (3 * N, N, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": empty(M, K + 8)}, r"differ in k: \(24, 24\) and \(32, 16\)"),
        ({"d": empty(N, M)}, r"D is \(m, n\) = \(24, 32\), got \(32, 24\)"),
        ({"d": empty(N, M).mT}, r"rows of D are contiguous, got strides \(1, 24\)"),
        ({"c": empty(N, M).mT, "beta": 1.0}, "rows of C are contiguous"),
        ({"partial": empty(N, M).mT}, "rows of the partial sum are contiguous"),
        ({"d": empty(2, M, N)}, "D has 2 batches, A has 1"),
        ({"b": empty(N, K).half()}, "A and B are of one type, got bfloat16 and float16"),
        ({"beta": 1.0}, r"beta is 1.0, but there is no C"),
        ({"dtype": "tfloat32"}, "dtype is 'bfloat16' as A, or 'tfloat32' for float32, got 'tfloat32'"),
        ({"dtype": "float32"}, "dtype is 'bfloat16' as A, .* got 'float32'"),
        ({"bias": empty(M)}, r"bias is a dense vector of n = 32, got shape \(24,\)"),
        ({"bias": empty(1, N)}, r"bias is a dense vector of n = 32, got shape \(1, 32\)"),
        ({"bias": empty(2 * N)[::2]}, r"bias is a dense vector .* and strides \(2,\)"),
        ({"bias": torch.zeros(N, dtype=torch.int64)}, "bias is of torch.int64; known are"),
        ({"scale_a": torch.ones(N)}, r"scale_a has 1 element or one for each of 24 rows, got shape \(32,\)"),
        ({"scale_b": torch.ones(M)}, r"scale_b has 1 element or one for each of 32 rows, got shape \(24,\)"),
        ({"scale_a": torch.ones(M).half()}, "scale_a is dense and of float32, got torch.float16"),
        ({"scale_b": torch.ones(2 * N)[::2]}, "scale_b is dense and of float32"),
        ({"a": PLAIN.a.to("meta")}, "all tensors are on one device: D is on cpu, A on meta"),
        ({"bias": empty(N).to("meta")}, "D is on cpu, bias on meta"),
        ({"scale_b": torch.ones(1, device="meta")}, "D is on cpu, scale_b on meta"),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(replace(PLAIN, **change))


@pytest.mark.parametrize(
    "d",
    [
        empty(M, N).expand(2, M, N),
        empty(3 * M * N).as_strided((2, M, N), (N - 1, 2 * N, 1)),
        empty(3 * M * N).as_strided((2, M, N), (M * N - 1, N, 1)),
    ],
    ids=["one matrix", "interleaved", "by an element"],
)
def test_batches_of_d_that_overlap(d: torch.Tensor) -> None:
    batches = GemmTensors(empty(2, M, K), empty(2, N, K), d)
    with pytest.raises(ValueError, match=r"elements of D overlap, got shape \(2, 24, 32\) and strides"):
        spec_of(batches)
    assert spec_of(replace(batches, d=empty(2, M, N), partial=d)).partial is not None


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.lists(st.integers(0, 20), min_size=2, max_size=2))
def test_a_d_that_overlaps_is_refused(extents: list[int], strides: list[int]) -> None:
    d = torch.zeros(200).as_strided(extents, [*strides, 1])
    batches, m, n = extents
    tensors = GemmTensors(torch.zeros(batches, m, 5), torch.zeros(batches, n, 5), d)
    places = {sum(map(operator.mul, place, d.stride())) for place in itertools.product(*map(range, extents))}
    try:
        spec = spec_of(tensors)
    except ValueError:
        return
    assert len(places) == d.numel()
    assert spec.l == batches


@pytest.mark.parametrize("provider", ["cutlass", "cublas"])
def test_the_cpu_has_no_kernels(provider: str) -> None:
    with pytest.raises(ValueError, match="kernels run on CUDA devices, the tensors are on cpu"):
        gemm(PLAIN.a, PLAIN.b, PLAIN.d, provider=provider)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"config": "fast"}, "a configuration is written like"),
        ({"beta": 1.0}, "there is no C"),
        ({"dtype": "tfloat32"}, "dtype is 'bfloat16' as A"),
    ],
)
def test_gemm_refuses(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemm(PLAIN.a, PLAIN.b, PLAIN.d, **keywords)


def test_scales_of_blocks_are_matrices() -> None:
    a, b = (torch.zeros(rows, 400).to(torch.float8_e4m3fn) for rows in (130, 300))
    tensors = GemmTensors(
        *(a, b, torch.zeros(130, 300, dtype=torch.bfloat16)),
        scale_a=torch.ones(4, 130).mT,
        scale_b=torch.ones(3, 4),
        block_rows=(1, 128),
    )
    found = spec_of(tensors)
    assert (found.scale_a, found.scale_b, found.block_rows_a, found.block_rows_b) == ("1x128", "128x128", 1, 128)
    refused = {
        r"scale_a is of float32 .* shape \(130, 4\), got torch.float32 of shape \(4, 130\)": {
            "scale_a": torch.ones(4, 130)
        },
        r"scale_b is of float32 .* shape \(3, 4\), got torch.float16 of": {"scale_b": torch.ones(3, 4).half()},
        r"scale_b is of float32 .* got None": {"scale_b": None},
        r"block_rows are 1 or 128, for A and for B, got \(1, 64\)": {"block_rows": (1, 64)},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            spec_of(replace(tensors, **change))
