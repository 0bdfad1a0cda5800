"""The product to compute: extents and types, nothing about ranks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

__all__ = ["DTYPE_BYTES", "GemmProblem"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}
"""Known element types and their size in memory, bytes. "tfloat32" is float32 multiplied with 10 bits of mantissa."""

_DEFAULT_OUT = {"tfloat32": "float32", "float8_e4m3fn": "bfloat16"}


def _extent(name: str, value: object, least: int = 1) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        extent = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is an integer >= {least}, got {value!r}") from None
    if extent < least:
        raise ValueError(f"{name} is an integer >= {least}, got {extent}")
    return extent


def _dtype(name: str, value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
    return str(value)


@dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = alpha * sum over k of A[m, k] * B[n, k] + beta * C[m, n], for each of l batches.

    Attributes:
        m, n, k, l: global extents, >= 1. A is (m, k), B (n, k) as a Linear's weight, C and D (m, n); with l > 1 a
            leading l axis.
        dtype: element type of A and B: a key of ``DTYPE_BYTES``.
        out_dtype: element type of C and D; None: dtype ("float32" for tfloat32, "bfloat16" for fp8).
        partial_dtype: element type in which partial sums of D rest and travel; None: out_dtype.
        m_per_rank: rows of each rank's shard where M is sharded, zeros allowed; None: as torch.chunk splits.

    Raises:
        ValueError: for anything else.
    """

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  (the mode's name in CUTLASS)
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    partial_dtype: str | None = None
    m_per_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "l"):
            object.__setattr__(self, name, _extent(name, getattr(self, name)))
        dtypes = tuple(DTYPE_BYTES)
        outputs = tuple(name for name in dtypes if name != "float8_e4m3fn")
        _dtype("dtype", self.dtype, dtypes)
        out = self.out_dtype or _DEFAULT_OUT.get(self.dtype, self.dtype)
        object.__setattr__(self, "out_dtype", _dtype("out_dtype", out, outputs))
        object.__setattr__(self, "partial_dtype", _dtype("partial_dtype", self.partial_dtype or out, outputs))
        if self.m_per_rank is not None:
            try:
                rows = tuple(_extent("each entry of m_per_rank", value, least=0) for value in self.m_per_rank)
            except TypeError:
                raise ValueError(f"m_per_rank is a sequence of integers >= 0, got {self.m_per_rank!r}") from None
            if not sum(rows) or sum(rows) % self.m:
                raise ValueError(f"m_per_rank {rows} sums to {sum(rows)}, which does not make up m = {self.m}")
            object.__setattr__(self, "m_per_rank", rows)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.m, self.n, self.k, self.l, self.dtype, self.out_dtype, self.partial_dtype, self.m_per_rank))
