"""GemmProblem: the product to compute, with its extents and element types."""

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
"""The element types and their sizes in bytes. "tfloat32" is float32 that is multiplied with 10 bits of mantissa."""

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

    A has the shape (m, k). B has the shape (n, k), as the weight of a torch Linear. C and D have the shape (m, n). With
    l > 1 all of them have a leading axis l. The extents are global, over all ranks.

    Attributes:
        m: rows of A and D, >= 1.
        n: rows of B and columns of D, >= 1.
        k: columns of A and B, >= 1.
        l: number of batches, >= 1.
        dtype: element type of A and B, a key of ``DTYPE_BYTES``.
        out_dtype: element type of C and D. None: ``dtype``, but "float32" for "tfloat32" and "bfloat16" for
            "float8_e4m3fn".
        partial_dtype: element type of partial sums of D in memory and in transfers. None: ``out_dtype``.
        m_per_rank: number of rows of each rank's shard, if M is sharded. Zeros are allowed. None: as torch.chunk
            splits.

    Raises:
        ValueError: for other extents or types, and for ``m_per_rank`` whose sum is no multiple of m.
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
