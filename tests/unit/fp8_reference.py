"""fp8 in float64, block by block and with numpy: what distgemm.fp8 is compared with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

FORMATS = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}
"""Bits of the mantissa, smallest exponent of a normal number, and the largest number."""


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers rounded to a format, to nearest and ties to even; too large ones become the largest."""
    bits, least, largest = FORMATS[dtype]
    exponent = np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x))))
    spacing = 2.0 ** (np.maximum(exponent, least) - bits)
    found: np.ndarray = np.clip(np.round(x / spacing) * spacing, -largest, largest)
    return found


def multiplier(block: np.ndarray, dtype: str, power_of_two: bool) -> np.float32:
    """What the elements of a block are multiplied by, in float32. Its reciprocal is the scale."""
    found = np.float32(FORMATS[dtype][2] / max(float(np.abs(block).max(initial=0.0)), 2.0**-100))
    return np.float32(2.0 ** math.floor(math.log2(found))) if power_of_two else found


def bounds(extent: int, block: int | None, starts: list[int]) -> list[tuple[int, int]]:
    """Where blocks begin and end: anew at each of some starts."""
    found = []
    for start, stop in zip(starts, [*starts[1:], extent], strict=True):
        step = block or max(stop - start, 1)
        found += [(at, min(at + step, stop)) for at in range(start, stop, step)]
    return found


def quantized(
    x: np.ndarray, scaling: Any, dtype: str, power_of_two: bool = False, split: int | None = None, ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """A float64 matrix as fp8 holds it, and the scale of each element.

    Elements are multiplied in float32, as the implementation does: the product decides between two codes.
    """
    starts = [[0], [0]]
    if scaling.scope == "shard" and split is not None:
        length = -(-x.shape[split] // ranks)
        starts[split] = list(range(0, x.shape[split], length))
    found, scales = np.zeros_like(x), np.zeros_like(x)
    for top, bottom in bounds(x.shape[0], scaling.rows, starts[0]):
        for left, right in bounds(x.shape[1], scaling.columns, starts[1]):
            box = slice(top, bottom), slice(left, right)
            f = multiplier(x[box], dtype, power_of_two)
            scale = float(np.float32(1) / f)
            product = (x[box].astype(np.float32) * f).astype(np.float64)
            found[box], scales[box] = rounded(product, dtype) * scale, scale
    return found, scales


def smallest_step(dtype: str) -> float:
    """The distance of the numbers next to zero."""
    bits, least, _ = FORMATS[dtype]
    return float(2.0 ** (least - bits))


def element_bound(x: np.ndarray, scales: np.ndarray, dtype: str) -> np.ndarray:
    """How far an element in fp8 may be from the true one: half a unit in its last place.

    The product with the multiplier, and the multiplier and the scale themselves, round in float32.
    """
    bits = FORMATS[dtype][0]
    found: np.ndarray = np.maximum(np.abs(x) * 2.0 ** -(bits + 1), scales * smallest_step(dtype) / 2) * (1 + 2.0**-20)
    return found
