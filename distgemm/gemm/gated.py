"""Several products of one shape by one kernel, each computed as soon as a word says that its operands have come.

The kernel is one of :mod:`distgemm.gemm.cutlass`. Its persistent thread blocks go from one product to the next without
a pause, so that products which do not fill the GPU cost no more than one that does. Only the warp that loads waits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgemm.gemm.choose import choose
from distgemm.gemm.compiler import KernelSource
from distgemm.gemm.cutlass import Arguments, CutlassKernel, CutlassLaunch, CutlassProvider, Matrix, kernel_source
from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.spec import GemmConfig, GemmSpec, MatrixSpec, Status
from distgemm.gemm.tensors import spec_of
from distgemm.problem import DTYPE_BYTES

__all__ = ["PRODUCTS", "GatedGemms", "bind_gated", "gated_source"]

PRODUCTS = 128
"""How many products a kernel computes at most."""


@dataclass(frozen=True)
class GatedGemms:
    """Products that one kernel computes, in this order.

    products: of the same shapes, strides, types, terms and numbers; D is another in each, and C where D is
    moving:   the operand that is another in each, "a" or "b"; the other one is the same
    words:    of each product, the address of an int32 that is 1 once its moving operand has come; 0: it is there. What
              is waited for lies in one memory, what is there in another

    A thread block waits while it occupies its SM. So what is waited for must not need one: copy engines and memory
    operations may write words, kernels of the same GPU may not.

    Raises ValueError for a number of products that no kernel computes.
    """

    products: Sequence[GemmTensors]
    moving: str
    words: Sequence[int]

    def __post_init__(self) -> None:
        if not 1 <= len(self.products) <= PRODUCTS:
            raise ValueError(f"one kernel computes 1 to {PRODUCTS} products, got {len(self.products)}")

    @property
    def spec(self) -> GemmSpec:
        """That of each product. Raises ValueError where they differ in more than addresses."""
        specs = [spec_of(one) for one in self.products]
        common = specs[0]
        for spec in specs[1:]:
            aligned = {
                name: replace(mine, alignment=min(mine.alignment, other.alignment))
                for name in ("a", "b", "d", "c", "partial")
                if (mine := getattr(common, name)) is not None and (other := getattr(spec, name)) is not None
            }
            common = replace(common, **aligned)
            if replace(spec, **aligned) != common:
                raise ValueError(f"one kernel computes products of one kind, got {specs[0]} and {spec}")
        if common.l > 1:
            raise ValueError(f"products that wait are single matrices, got {common.l} batches")
        return common

    @property
    def whole(self) -> GemmSpec:
        """A product as large as all of them."""
        spec, mode = self.spec, "rows" if self.moving == "a" else "columns"
        larger: dict[str, Any] = {}
        for name in (self.moving, "d", "c", "partial"):
            if (matrix := getattr(spec, name)) is not None:
                along = "rows" if name in "ab" else mode
                larger[name] = replace(matrix, **{along: getattr(matrix, along) * len(self.products)})
        return replace(spec, **larger)


def gated_source(gemms: GatedGemms, config: GemmConfig | None = None) -> KernelSource:
    """What the kernel is compiled from; config None: that of a product as large as all of them.

    Raises ValueError where there is none.
    """
    provider = CutlassProvider()
    return _source(provider, gemms, _configuration(provider, gemms, config))


def bind_gated(gemms: GatedGemms, config: GemmConfig | None = None) -> CutlassLaunch:
    """The kernel, compiled if need be, with its arguments encoded. Raises ValueError as :func:`gated_source` does."""
    provider = CutlassProvider()
    taken = _configuration(provider, gemms, config)
    return _kernel(_source(provider, gemms, taken), taken, provider).bind_gated(gemms)


def _source(provider: CutlassProvider, gemms: GatedGemms, config: GemmConfig) -> KernelSource:
    return kernel_source(gemms.spec, config, provider.arch, gated=True)


def _configuration(provider: CutlassProvider, gemms: GatedGemms, config: GemmConfig | None) -> GemmConfig:
    taken = choose(provider, gemms.whole) if config is None else config
    status = provider.supports(gemms.spec, taken)
    if status and taken.schedule == "plain":
        status = Status("plain kernels, which are for operands that TMA cannot read, have no warp that could wait")
    if not status:
        raise ValueError(f"provider cutlass, {taken}, several products that wait for operands: {status.reason}")
    return taken


class _Product(ctypes.Structure):
    """The struct Product of kernel.cu."""

    _fields_ = (("word", ctypes.c_uint64), ("operand", ctypes.c_int32), ("result", ctypes.c_int32))


class _Arguments(ctypes.Structure):
    """The struct GatedArguments of kernel.cu."""

    _fields_ = (
        ("base", Arguments),
        ("elsewhere", Matrix),
        *((name, ctypes.c_int32) for name in ("moving", "here_batches", "elsewhere_batches")),
        ("products", _Product * PRODUCTS),
    )


class _GatedKernel(CutlassKernel):
    """The compiled kernel."""

    arguments = _Arguments
    gated = True

    def bind_gated(self, gemms: GatedGemms) -> CutlassLaunch:
        """Encodes the arguments. Raises ValueError where tensors do not lie as :class:`GatedGemms` says."""
        spec, first = gemms.spec, gemms.products[0]
        if not (spec.m and spec.n):
            return self.launch([first], None)
        arguments = _Arguments(self.encoded(first, spec))
        base = arguments.base
        base.l = len(gemms.products)
        arguments.moving = "ab".index(gemms.moving)
        fixed = "ba"[arguments.moving]
        if len(set(_addresses(gemms, fixed))) > 1:
            raise ValueError(f"products of one kernel share {fixed.upper()}")
        operand, moving = getattr(spec, gemms.moving), _addresses(gemms, gemms.moving)
        here = [at for at, word in zip(moving, gemms.words, strict=True) if not word]
        elsewhere = [at for at, word in zip(moving, gemms.words, strict=True) if word]
        near, far, results = _Batches(here or elsewhere), _Batches(elsewhere or here), _Batches(_addresses(gemms, "d"))
        if results.count != len(gemms.products):
            raise ValueError(f"D's lie at equal distances, {len(gemms.products)} of them have {results.count} places")
        setattr(base, gemms.moving, near.matrix(operand))
        arguments.elsewhere = far.matrix(operand)
        arguments.here_batches, arguments.elsewhere_batches = near.count, far.count
        base.d = results.matrix(spec.d)
        for added in ("c", "partial", "bias", "scale_a", "scale_b"):
            if getattr(first, added) is None:
                continue
            places = _Batches(_addresses(gemms, added))
            if places.distance and places.indices != results.indices:
                raise ValueError(f"{added} of each product lies as D does, or is the same for all")
            if added in ("c", "partial"):
                # By the kernel's names, the first of them is its source.
                name = "aux" if added == "c" and spec.partial is not None else "source"
                setattr(base, name, places.matrix(getattr(spec, added)))
            else:
                setattr(base, added, places.first)
                setattr(base, f"{added}_stride", places.distance // getattr(first, added).element_size())
        for number, (at, word) in enumerate(zip(moving, gemms.words, strict=True)):
            place = ~far.index(at) if word else near.index(at)
            arguments.products[number] = _Product(word, place, results.indices[number])
        return self.launch(gemms.products, arguments)


def _addresses(gemms: GatedGemms, name: str) -> list[int]:
    return [getattr(one, name).data_ptr() for one in gemms.products]


class _Batches:
    """Addresses as batches of one tensor.

    first:    the lowest
    distance: bytes from one batch to the next
    indices:  which batch each of them is
    count:    batches up to the last
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.first = min(addresses)
        self.distance = math.gcd(*(address - self.first for address in addresses))
        self.indices = [*map(self.index, addresses)]
        self.count = 1 + max(self.indices)

    def index(self, address: int) -> int:
        """Which batch lies there."""
        return (address - self.first) // self.distance if self.distance else 0

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """The struct, for batches of such matrices."""
        return Matrix(self.first, spec.stride, self.distance // DTYPE_BYTES[spec.dtype])


@functools.cache
def _kernel(source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> _GatedKernel:
    return _GatedKernel(source, config, provider)
