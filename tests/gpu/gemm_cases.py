"""GEMMs to run on a GPU, of all types, majors, terms, strides and configurations; and their float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.spec import FP8
from distgemm.gemm.tensors import spec_of
from distgemm.gemm.tiles import FP8_TILES, TMA_TILES

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    **{name: getattr(torch, name) for name in FP8},
}
OUT = {"float32": "float32", "tfloat32": "float32", **dict.fromkeys(FP8, "bfloat16")}
# The error of tensor cores, relative to the sum of magnitudes, for each instruction along k.
ADDITION = dict.fromkeys(FP8, 2.0**-13)
BLOCKS = {"blocks": (1, 128), "column_blocks": (1, 1), "row_blocks": (128, 1), "square_blocks": (128, 128)}
"""Rows of A and of B that share a scale with 128 columns, by the name of a case's term."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On the CPU, the sources of the cases can be listed."""
GUARD = 7
"""Rows and batches around D, and columns between rows, that must stay as they are."""


@dataclass(frozen=True)
class Case:
    """One GEMM.

    Attributes:
        dtype: element type of A, and of B.
        majors: "r" or "c" for A and for B: rows or columns are contiguous.
        terms: of "alpha", "c", "in_place", "bias", "partial", "scales", "row_scales", the names of ``BLOCKS``, "turned"
            (columns of the scales of blocks are contiguous).
        m: rows of D.
        n: columns of D.
        k: columns of A and B.
        l: batches.
        pad: elements between the end of a row (column) and the next one, for A, B, D and C.
        offset: elements from an aligned address to A, B and D.
        out: element type of D; "": the default of ``dtype``.
        partial: element type of the partial sum; "": that of D.
        config: text of a :class:`GemmConfig`; "": the default.
        b_dtype: element type of B; "": that of A.
    """

    dtype: str = "bfloat16"
    majors: str = "rr"
    terms: tuple[str, ...] = ()
    m: int = 200
    n: int = 264
    k: int = 136
    l: int = 1  # noqa: E741
    pad: int = 8
    offset: int = 0
    out: str = ""
    partial: str = ""
    config: str = ""
    b_dtype: str = ""

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}" + (f"x{self.l}" if self.l > 1 else "")
        parts = [self.dtype, self.majors, size, f"pad{self.pad}", f"off{self.offset}", *self.terms]
        return "-".join([*parts, *(x for x in (self.out, self.partial, self.config, self.b_dtype) if x)])

    @property
    def out_dtype(self) -> str:
        return self.out or OUT.get(self.dtype, self.dtype)


@dataclass
class Made:
    """Tensors of a case, the buffers around them, and the magnitudes that bound rounding errors."""

    tensors: GemmTensors
    buffers: dict[str, torch.Tensor]
    reference: torch.Tensor
    magnitude: torch.Tensor


def _matrix(
    rows: int, columns: int, case: Case, dtype: torch.dtype, column_major: bool, fill: float, aligned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of the given extents in a larger buffer filled with ``fill``; and the buffer."""
    across, along = (columns, rows) if column_major else (rows, columns)
    stride = along + case.pad
    start = GUARD * stride // 8 * 8 + (0 if aligned else case.offset)
    each = (across + GUARD) * stride
    if case.offset == 0:
        each = -(-each // 16) * 16
    buffer = torch.full((start + case.l * each + GUARD * stride,), fill, device=DEVICE).to(dtype)
    steps = (1, stride) if column_major else (stride, 1)
    view = buffer.as_strided((case.l, rows, columns), (each, *steps), start)
    return (view if case.l > 1 else view[0]), buffer


def _draw(shape: torch.Size, integers: bool, generator: torch.Generator) -> torch.Tensor:
    if integers:
        return torch.randint(-1, 2, shape, generator=generator, device=DEVICE).double()
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float64)


def make(case: Case, integers: bool, seed: int = 0) -> Made:
    """The tensors of a case: drawn inputs, NaN in D and around the inputs."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype, out = TORCH[case.dtype], TORCH[case.out_dtype]
    nan = float("nan")
    a, a_buffer = _matrix(case.m, case.k, case, dtype, case.majors[0] == "c", nan)
    b, b_buffer = _matrix(case.n, case.k, case, TORCH[case.b_dtype or case.dtype], case.majors[1] == "c", nan)
    d, d_buffer = _matrix(case.m, case.n, case, out, False, nan)
    found = {"a": a_buffer, "b": b_buffer, "d": d_buffer}
    for matrix in (a, b):
        matrix.copy_(_draw(matrix.shape, integers, generator).to(matrix.dtype))
    alpha = 2.0 if "alpha" in case.terms else 1.0
    c = partial = bias = scale_a = scale_b = None
    beta = 0.0
    block_rows = next((rows for name, rows in BLOCKS.items() if name in case.terms), None)
    factor_a = factor_b = torch.ones((), device=DEVICE, dtype=torch.float64)
    if block_rows is not None:
        turned = "turned" in case.terms
        scale_a = _block_scales(case.m, case.k, block_rows[0], turned, integers, generator)
        scale_b = _block_scales(case.n, case.k, block_rows[1], turned, integers, generator)
        factor_a, factor_b = (
            scale.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)[: x.shape[0], : case.k]
            for x, scale, rows in zip((a, b), (scale_a, scale_b), block_rows, strict=True)
        )
    product = (a.double() * factor_a) @ (b.double() * factor_b).mT
    magnitude = (a.double().abs() * factor_a) @ (b.double().abs() * factor_b).mT
    if "scales" in case.terms or "row_scales" in case.terms:
        rows = "row_scales" in case.terms
        drawn = [
            torch.randint(-1, 2, (size if rows else 1,), generator=generator, device=DEVICE)
            for size in (case.m, case.n)
        ]
        scale_a, scale_b = (torch.exp2(x.float()) for x in drawn)
        factors = scale_a.double().view(-1, 1) * scale_b.double().view(1, -1)
        product, magnitude = product * factors, magnitude * factors
    reference, magnitude = alpha * product, alpha * magnitude
    if "c" in case.terms or "in_place" in case.terms:
        beta = -1.0 if integers else 0.75
        c = d
        if "c" in case.terms:
            c, found["c"] = _matrix(case.m, case.n, replace(case, pad=case.pad + 8), out, False, nan)
        c.copy_(_draw(c.shape, integers, generator).to(out))
        reference, magnitude = reference + beta * c.double(), magnitude + abs(beta) * c.double().abs()
    if "partial" in case.terms:
        partial, found["partial"] = _matrix(case.m, case.n, case, TORCH[case.partial or case.out_dtype], False, nan)
        partial.copy_(_draw(partial.shape, integers, generator).to(partial.dtype))
        reference, magnitude = reference + partial.double(), magnitude + partial.double().abs()
    if "bias" in case.terms:
        bias = _draw(torch.Size((case.n,)), integers, generator).to(out)
        reference, magnitude = reference + bias.double(), magnitude + bias.double().abs()
    tensors = GemmTensors(
        *(a, b, d, c, partial, bias, scale_a, scale_b, alpha, beta),
        dtype="tfloat32" if case.dtype == "tfloat32" else None,
        block_rows=block_rows,
    )
    return Made(tensors, found, reference, magnitude)


def _block_scales(
    rows: int, columns: int, block_rows: int, turned: bool, integers: bool, generator: torch.Generator
) -> torch.Tensor:
    """Scales of blocks: powers of two, or any numbers of 2**-4 to 2**4. NaN is around them."""
    shape = (-(-rows // block_rows), -(-columns // 128))
    drawn = (
        torch.randint(-2, 3, shape, generator=generator, device=DEVICE).float()
        if integers
        else torch.rand(shape, generator=generator, device=DEVICE) * 8 - 4
    )
    strides = (1, shape[0] + 3) if turned else (shape[1] + 3, 1)
    buffer = torch.full(((shape[0] + 3) * (shape[1] + 3),), float("nan"), device=DEVICE)
    return buffer.as_strided(shape, strides, 1).copy_(torch.exp2(drawn))


def bound(case: Case, made: Made) -> torch.Tensor:
    """The largest error that the types allow: one rounding of the result, and an error of each addition along k.

    A tensor core instruction adds at least 8 products along k at once. Four more terms are added in float32. tf32 keeps
    10 bits of each factor. Sums of fp8 are moved to float32 after 128 of k, which are four instructions.
    """
    addition = ADDITION.get(case.dtype, 2.0**-23)
    steps = case.k if case.dtype == "float32" else -(-case.k // 8)
    if case.dtype in FP8:
        steps = 4
    factors = 2 * 2.0**-10 if case.dtype == "tfloat32" else 0.0
    rounding = ROUNDING[case.out_dtype]
    accumulated = (factors + (steps + 4) * addition) * made.magnitude
    return rounding * (made.reference.abs() + accumulated) + accumulated


TYPES = ("bfloat16", "float16", "float32", "tfloat32", "float8_e4m3fn")
TERMS: tuple[tuple[str, ...], ...] = (
    (),
    ("alpha", "c"),
    ("in_place",),
    ("bias",),
    ("partial",),
    ("alpha", "partial", "c", "bias"),
)


def cases() -> Iterator[Case]:
    """Every type x majors x terms with aligned operands, and each kind of misalignment; every configuration."""
    for dtype in TYPES:
        for majors in ("rr", "rc", "cr", "cc") if dtype != "float8_e4m3fn" else ("rr",):
            for terms in TERMS:
                yield Case(dtype, majors, terms, m=264, n=328, k=144, pad=16)  # aligned, no multiple of any tile
            yield Case(dtype, majors, TERMS[-1], m=137, n=75, k=61, pad=1)  # nothing aligned
    for terms in TERMS:
        yield Case("bfloat16", "rr", terms, m=137, n=77, k=61, pad=3)  # aligned strides, extents that are not
        yield Case("tfloat32", "rr", terms, m=137, n=77, k=61, pad=3)
        yield Case("bfloat16", "rr", terms, m=9, n=5, k=3, pad=3)
        yield Case("bfloat16", "cc", terms, m=61, n=77, k=9, pad=3)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        for terms in TERMS:
            yield Case(dtype, "rr", terms, m=137, n=75, k=144, pad=0)  # only results misaligned
            yield Case(dtype, "rr", terms, m=137, n=72, k=61, pad=0)  # only operands misaligned
        yield Case(dtype, "rr", ("partial",), l=3, m=72, n=136, k=80, pad=16)
        yield Case(dtype, "rr", ("alpha", "c"), l=2, m=33, n=37, k=41, pad=3)
    for dtype in ("bfloat16", "float16"):
        yield Case(dtype, "rr", ("partial", "c"), out=dtype, partial="float32")
        yield Case(dtype, "rr", ("partial",), out="float32", partial="float32")
        yield Case(dtype, "rr", ("partial",), m=1, n=8, k=8)
        yield Case(dtype, "rr", m=1, n=1, k=1, pad=0)
        yield Case(dtype, "rr", m=130, n=130, k=130, pad=2)
        yield Case(dtype, "rr", m=128, n=128, k=64, pad=0, offset=1)
    for terms in (("scales",), ("row_scales",), ("row_scales", "partial"), ("alpha", "scales", "c")):
        yield Case("float8_e4m3fn", "rr", terms, m=264, n=328, k=144, pad=16)
    yield Case("float8_e4m3fn", "rr", ("row_scales", "bias"), m=137, n=75, k=61, pad=1)
    yield Case("float8_e4m3fn", "rr", ("scales",), m=264, n=328, k=144, pad=16, out="float16")
    yield from fp8_cases()
    for tile, cluster, kernel_schedule in TMA_TILES:
        config = GemmConfig((*tile, 64), cluster, kernel_schedule)
        for raster, swizzle in (("heuristic", 1), ("m", 4), ("n", 2)):
            ordered = replace(config, raster=raster, swizzle=swizzle, share=1 + (raster == "m"))
            yield Case("bfloat16", "rr", (), m=1096, n=1352, k=200, config=str(ordered))
        yield Case("bfloat16", "rr", ("partial",), m=1096, n=1352, k=200, config=str(config))
    # wgmma widths that are no powers of two, with the types, majors and epilogues that the cases above lack.
    wide: dict[str, Any] = {"m": 1096, "n": 1352, "k": 208, "pad": 16}
    yield Case("float16", "rr", (), config="256x208x64_2x1_cooperative", **wide)
    yield Case("tfloat32", "rr", (), config="256x160x32_2x1_cooperative", **wide)
    yield Case("tfloat32", "cc", TERMS[-1], config="128x224x32_2x1_cooperative", **wide)
    yield Case("float8_e4m3fn", "rr", ("row_scales",), config="256x208x128_2x1_cooperative", **wide)
    yield Case("bfloat16", "rc", (), config="256x208x64_2x1_cooperative", **wide)
    yield Case("bfloat16", "cc", TERMS[-1], config="256x144x64_1x2_cooperative", **wide)
    yield Case("bfloat16", "rr", ("partial", "c"), out="float32", partial="float32",
               config="256x208x64_2x1_cooperative", **wide)  # fmt: skip
    yield Case("bfloat16", "rr", TERMS[-1], config="256x144x64_1x2_cooperative_direct", **wide)


def fp8_cases() -> Iterator[Case]:
    """Scales of blocks, e5m2, and long sums."""
    e4m3, e5m2 = FP8
    size: dict[str, Any] = {"m": 264, "n": 328, "k": 144, "pad": 16}
    long: dict[str, Any] = {"m": 200, "n": 456, "k": 1008, "pad": 16}  # the last block of k is narrower
    for term in BLOCKS:
        for k in (16, 128, 144):
            yield Case(e4m3, "rr", (term,), m=264, n=328, k=k, pad=16)
        yield Case(e4m3, "rr", (term, "turned"), **long)
    for terms in (("alpha", "c"), ("in_place",), ("bias",), ("partial",), ("alpha", "partial", "c", "bias")):
        yield Case(e4m3, "rr", ("blocks", *terms), **size)
    for out in ("float16", "float32"):
        yield Case(e4m3, "rr", ("blocks",), out=out, **long)
    yield Case(e4m3, "rr", ("blocks", "partial"), out="float32", partial="float32", **long)
    yield Case(e4m3, "rr", ("blocks",), m=1, n=8, k=2048, pad=0)
    yield Case(e4m3, "rr", ("blocks", "bias"), m=137, n=75, k=272, pad=0)  # results misaligned
    yield Case(e4m3, "rr", ("column_blocks",), m=137, n=75, k=272, pad=0)
    # Each thread block computes several tiles, on half of the SMs.
    for tile in FP8_TILES:
        for cluster, terms in itertools.product(tile.clusters, (("row_scales",), ("blocks",), ("blocks", "partial"))):
            config = GemmConfig((*tile.extents, 128), cluster, tile.kernel_schedule, share=2)
            yield Case(e4m3, "rr", terms, m=2184, n=2856, k=1008, pad=16, config=str(config))
    # Two products alternate, of whole tiles or of their halves: odd and even numbers of stages.
    for n, k, terms in itertools.product((128, 160), (128, 256, 384), (("row_scales",), ("blocks",))):
        config = GemmConfig((128, n, 128), (2, 1), share=2)
        yield Case(e4m3, "rr", terms, m=2184, n=2856, k=k, pad=16, config=str(config))
    # Other tiles: rows of B's blocks divide them, or not; one or two blocks of rows of A in a thread.
    for text in (
        "128x192x128_1x2_cooperative_raster_m_swizzle_2", "64x192x128_2x2_pingpong", "256x64x128_1x1_cooperative",
        "256x144x128_1x2_cooperative", "128x40x128_1x1_cooperative",
    ):  # fmt: skip
        yield Case(e4m3, "rr", ("blocks",), m=1096, n=1352, k=400, pad=16, config=text)
    for text in ("128x160x128_1x2_cooperative_share_2", "128x144x128_2x1_cooperative", "64x96x128_1x1_pingpong",
                 "256x64x128_2x1_cooperative_direct"):  # fmt: skip
        yield Case(e4m3, "rr", ("column_blocks",), m=1096, n=1352, k=400, pad=16, config=text)
    for a, b in ((e5m2, e4m3), (e4m3, e5m2), (e5m2, e5m2)):
        for terms in (("scales",), ("row_scales",), ("blocks",), ("alpha", "scales", "c")):
            yield Case(a, "rr", terms, b_dtype=b, **size)
        yield Case(a, "rr", ("row_scales", "bias"), m=137, n=75, k=61, pad=1, b_dtype=b)  # nothing aligned
    for terms in (("scales",), ("row_scales",), ("blocks",)):
        yield Case(e4m3, "rr", terms, m=200, n=456, k=16384, pad=16, out="float32")


def kernels(found: Iterable[Case], arch: str | None = None) -> list[KernelSource]:
    """The sources of the cases, each once."""
    provider = CutlassProvider(arch)
    sources = {}
    for case in found:
        spec = spec_of(make(case, True).tensors)
        config = GemmConfig.parse(case.config) if case.config else provider.configs(spec)[0]
        source = kernel_source(spec, config, provider.arch)
        sources[source.macros] = source
    return list(sources.values())
