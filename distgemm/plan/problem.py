"""GemmProblem: the product to compute, with its extents and element types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distgemm.arguments import MAX_EXTENT, integer, integers, member, wrong

__all__ = ["DTYPE_BYTES", "MAX_EXTENT", "GemmProblem"]

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


@dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = alpha * sum over k of A[m, k] * B[n, k] + beta * C[m, n], for each of l batches.

    A has the shape (m, k). B has the shape (n, k), as the weight of a torch Linear. C and D have the shape (m, n). With
    l > 1 all of them have a leading axis l. The extents are global, over all ranks.

    Attributes:
        m: rows of A and D, 1 to MAX_EXTENT.
        n: rows of B and columns of D, 1 to MAX_EXTENT.
        k: columns of A and B, 1 to MAX_EXTENT.
        l: number of batches, 1 to MAX_EXTENT.
        dtype: element type of A and B, a key of ``DTYPE_BYTES``.
        out_dtype: element type of C and D. None: ``dtype``, but "float32" for "tfloat32" and "bfloat16" for
            "float8_e4m3fn".
        partial_dtype: element type of partial sums of D in memory and in transfers. None: ``out_dtype``.
        m_per_rank: number of rows of each rank's shard of A or D, if M is sharded. Zeros are allowed. None: as
            torch.chunk splits.
        n_per_rank: number of columns of each rank's shard of D, or of rows of its shard of B, if N is sharded. As
            ``m_per_rank``.
        k_per_rank: number of columns of each rank's shard of A or B, if K is sharded. As ``m_per_rank``.

    Raises:
        ValueError: for other extents or types, and for ``m_per_rank`` whose sum is no multiple of m, and so on.
    """

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  (the mode's name in CUTLASS)
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    partial_dtype: str | None = None
    m_per_rank: tuple[int, ...] | None = None
    n_per_rank: tuple[int, ...] | None = None
    k_per_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "l"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, MAX_EXTENT))
        outputs = tuple(name for name in DTYPE_BYTES if name != "float8_e4m3fn")
        object.__setattr__(self, "dtype", member("dtype", self.dtype, DTYPE_BYTES))
        out = _DEFAULT_OUT.get(self.dtype, self.dtype) if self.out_dtype is None else self.out_dtype
        object.__setattr__(self, "out_dtype", member("out_dtype", out, outputs))
        partial = out if self.partial_dtype is None else self.partial_dtype
        object.__setattr__(self, "partial_dtype", member("partial_dtype", partial, outputs))
        for mode in "mnk":
            name, extent = f"{mode}_per_rank", getattr(self, mode)
            if getattr(self, name) is None:
                continue
            shares = integers(name, getattr(self, name), 0, MAX_EXTENT)
            if not sum(shares) or sum(shares) % extent:
                wanted = f"a tuple of integers >= 0 whose sum is a multiple of {mode} = {extent}"
                raise wrong(name, f"{wanted}, not {sum(shares)}", getattr(self, name))
            object.__setattr__(self, name, shares)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        shares = self.m_per_rank, self.n_per_rank, self.k_per_rank
        return hash((self.m, self.n, self.k, self.l, self.dtype, self.out_dtype, self.partial_dtype, shares))
