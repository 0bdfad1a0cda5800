"""Tensors as fp8 codes and scales: ``x = codes * scales``, where a block of elements shares one scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from distgemm.arguments import instance
from distgemm.plan.scaling import OperandScaling
from distgemm.runtime.torch_arguments import read_dtype, read_tensor

__all__ = [
    "FP8_DTYPES",
    "MIN_AMAX",
    "Quantized",
    "amax_of",
    "dequantize",
    "quantize",
    "quantize_with",
    "spans",
    "transposed",
]

Tensor = torch.Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of codes."""

MIN_AMAX = 2.0**-100
"""Blocks whose largest magnitude is smaller get the scale of this one, so that no scale is zero."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix in fp8.

    Attributes:
        codes: (rows, columns), of an fp8 type.
        scales: float32, one for each block: (row blocks, column blocks).
        scaling: how many rows and columns a block has.
    """

    codes: Tensor
    scales: Tensor
    scaling: OperandScaling

    def t(self) -> Quantized:
        """The transposed matrix, with the same codes and scales."""
        return Quantized(self.codes.t(), self.scales.t(), transposed(self.scaling))


def quantize(
    x: Tensor,
    scaling: OperandScaling,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    group: dist.ProcessGroup | None = None,
    split: int | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """A matrix in fp8, with scales from its own largest magnitudes ("current" scaling).

    A block's scale is its largest magnitude divided by the largest number of the type.

    Args:
        x: (rows, columns), of a floating type. It may be this rank's shard of a matrix.
        scaling: how many rows and columns share a scale, and the scope of its scales. With ``scope="global"``, a
            block that reaches over all shards has the same scale on all ranks: the largest magnitudes are all-reduced
            with MAX. With ``scope="shard"``, each rank uses its own.
        dtype: type of the codes: torch.float8_e4m3fn or torch.float8_e5m2.
        group: the ranks that have the shards; None: x is whole.
        split: the dimension along which x is split over the ranks, 0 or 1; None: every rank has all of x.
        power_of_two: round scales up to powers of two, which adds no rounding error when codes are scaled back.

    Returns:
        Codes of x's shape, and float32 scales.

    Raises:
        ValueError: for another tensor than a matrix, and another type.
    """
    instance("scaling", scaling, OperandScaling, "an OperandScaling")
    if read_tensor("x", x).dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is a matrix of a floating type, got shape {tuple(x.shape)} of {x.dtype}")
    read_dtype("dtype", dtype, FP8_DTYPES)
    amax = amax_of(x, scaling)
    if group is not None and scaling.scope == "global" and spans(scaling, split):
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return quantize_with(amax, x, scaling, dtype, power_of_two=power_of_two)


def quantize_with(
    amax: Tensor, x: Tensor, scaling: OperandScaling, dtype: torch.dtype, *, power_of_two: bool = False
) -> Quantized:
    """A matrix in fp8, with scales from largest magnitudes that are given, as from a history ("delayed" scaling).

    Elements that are too large for their scale become the largest number of the type. NaN stays NaN.

    Args:
        amax: float32, one for each block.
        x: as in :func:`quantize`.
        scaling: as in :func:`quantize`.
        dtype: as in :func:`quantize`.
        power_of_two: as in :func:`quantize`.
    """
    largest = torch.finfo(dtype).max
    # In float64, and a product rather than a quotient, so that codes have the bits of torchao's.
    multipliers = (largest / amax.clamp(min=MIN_AMAX).double()).float()
    if power_of_two:
        mantissas, exponents = torch.frexp(multipliers)
        powers = torch.ldexp(torch.full_like(mantissas, 0.5), exponents)
        multipliers = torch.where(multipliers > 0, powers, multipliers)  # 0 for infinity, and NaN, stay
    scaled = x.float() * _expanded(multipliers, x, scaling)
    return Quantized(scaled.clamp(-largest, largest).to(dtype), multipliers.reciprocal(), scaling)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix that codes and scales stand for, rounded to ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    return (q.codes.to(wide) * _expanded(q.scales, q.codes, q.scaling).to(wide)).to(dtype)


def amax_of(x: Tensor, scaling: OperandScaling) -> Tensor:
    """The largest magnitude of each block of a matrix: float32, (row blocks, column blocks). Without elements: 0."""
    rows, columns = x.shape
    r, c = scaling.rows or max(rows, 1), scaling.columns or max(columns, 1)
    shape = (1 if scaling.rows is None else -(-rows // r), 1 if scaling.columns is None else -(-columns // c))
    if not x.numel():
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    magnitudes = x.detach().abs()
    if rows % r or columns % c:
        magnitudes = torch.nn.functional.pad(magnitudes, (0, -columns % c, 0, -rows % r))
    return magnitudes.view(shape[0], r, shape[1], c).amax((1, 3)).float()


def transposed(scaling: OperandScaling) -> OperandScaling:
    """The scaling of the transposed matrix with the same scales."""
    return replace(scaling, rows=scaling.columns, columns=scaling.rows)


def spans(scaling: OperandScaling, split: int | None) -> bool:
    """Whether a block reaches over all shards of a matrix that is split along a dimension."""
    return split is not None and (scaling.rows, scaling.columns)[split] is None


def _expanded(scales: Tensor, x: Tensor, scaling: OperandScaling) -> Tensor:
    """Scales in a shape that broadcasts to x."""
    for dim, size in enumerate((scaling.rows, scaling.columns)):
        if size is not None and size > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    return scales
