"""GemmProblem: the product to compute, with its extents and element types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from distgemm.arguments import MAX_EXTENT, integer, integers, member, wrong
from distgemm.plan.scaling import Scaling, read_scaling

__all__ = ["DTYPES", "DTYPE_BYTES", "MAX_EXTENT", "OUT_DTYPES", "QUANTIZED_DTYPES", "GemmProblem"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float4_e2m1fn_x2": 1,
    "float8_e8m0fnu": 1,
}
"""The element types and their sizes in bytes. "tfloat32" is float32 that is multiplied with 10 bits of mantissa. An
element of "float4_e2m1fn_x2" is two numbers. "float8_e8m0fnu" is for scales only."""

QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
"""The element types that scales belong to. No result has one of them."""

DTYPES = tuple(name for name in DTYPE_BYTES if name != "float8_e8m0fnu")
"""The element types of A and B."""

OUT_DTYPES = tuple(name for name in DTYPES if name not in QUANTIZED_DTYPES)
"""The element types of C and D."""

_DEFAULT_OUT = {"tfloat32": "float32", **dict.fromkeys(QUANTIZED_DTYPES, "bfloat16")}

_EIGHT_BITS = {"float8_e4m3fn", "float8_e5m2"}


@dataclass(frozen=True, repr=False)
class GemmProblem:
    """D[m, n] = alpha * sum over k of A[m, k] * B[n, k] + beta * C[m, n], for each of l batches.

    A has the shape (m, k). B has the shape (n, k), as the weight of a torch Linear. C and D have the shape (m, n). With
    l > 1 all of them have a leading axis l. The extents are global, over all ranks. With ``scaling``, the elements of A
    and B are multiplied by their scales.

    Attributes:
        m: rows of A and D, 1 to MAX_EXTENT.
        n: rows of B and columns of D, 1 to MAX_EXTENT.
        k: columns of A and B, 1 to MAX_EXTENT, in elements of ``dtype``.
        l: number of batches, 1 to MAX_EXTENT.
        dtype: element type of A, and of B without ``b_dtype``; one of ``DTYPES``.
        out_dtype: element type of C and D. None: ``dtype``, but "float32" for "tfloat32" and "bfloat16" for
            ``QUANTIZED_DTYPES``.
        partial_dtype: element type of partial sums of D in memory and in transfers. None: ``out_dtype``.
        m_per_rank: number of rows of each rank's shard of A or D, if M is sharded. Zeros are allowed. None: as
            torch.chunk splits.
        n_per_rank: number of columns of each rank's shard of D, or of rows of its shard of B, if N is sharded. As
            ``m_per_rank``.
        k_per_rank: number of columns of each rank's shard of A or B, if K is sharded. As ``m_per_rank``.
        b_dtype: element type of B, if it differs from that of A: one of them is "float8_e5m2" then (gradients), and the
            other one "float8_e4m3fn". None: ``dtype``. ``operand_dtype("B")`` is the type in both cases.
        groups: number of matrices B. With more than 1, B has the shape (groups, n, k), and each row of A is multiplied
            by one of them (a grouped GEMM, as experts need it). Which one is not part of the problem: a call says it.
        scaling: the scales of A and B, a :class:`distgemm.plan.scaling.Scaling` or one of its names. None: no scales.

    Raises:
        ValueError: for other extents, types or scalings, and for ``m_per_rank`` whose sum is no multiple of m, and so
            on.
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
    b_dtype: str | None = None
    scaling: Scaling | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "l"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, MAX_EXTENT))
        object.__setattr__(self, "groups", integer("groups", self.groups, 1, MAX_EXTENT))
        if self.groups > 1 and (self.l > 1 or self.scaling is not None):
            raise ValueError(f"a grouped GEMM has neither batches nor a scaling, got l={self.l} and {self.scaling}")
        object.__setattr__(self, "dtype", member("dtype", self.dtype, DTYPES))
        out = _DEFAULT_OUT.get(self.dtype, self.dtype) if self.out_dtype is None else self.out_dtype
        object.__setattr__(self, "out_dtype", member("out_dtype", out, OUT_DTYPES))
        partial = out if self.partial_dtype is None else self.partial_dtype
        object.__setattr__(self, "partial_dtype", member("partial_dtype", partial, OUT_DTYPES))
        for mode in "mnk":
            name, extent = f"{mode}_per_rank", getattr(self, mode)
            if getattr(self, name) is None:
                continue
            shares = integers(name, getattr(self, name), 0, MAX_EXTENT)
            if not sum(shares) or sum(shares) % extent:
                wanted = f"a tuple of integers >= 0 whose sum is a multiple of {mode} = {extent}"
                raise wrong(name, f"{wanted}, not {sum(shares)}", getattr(self, name))
            object.__setattr__(self, name, shares)
        b_dtype = self.dtype if self.b_dtype is None else member("b_dtype", self.b_dtype, DTYPES)
        if b_dtype != self.dtype and not {b_dtype, self.dtype} <= _EIGHT_BITS:
            wanted = f"{self.dtype!r}, the dtype of A" if self.dtype not in _EIGHT_BITS else "a float8 type as dtype is"
            raise wrong("b_dtype", wanted, b_dtype)
        object.__setattr__(self, "b_dtype", None if b_dtype == self.dtype else b_dtype)  # equal problems are one key
        if self.scaling is not None:
            object.__setattr__(self, "scaling", read_scaling(self.scaling))
            assert self.scaling is not None
            if self.dtype not in QUANTIZED_DTYPES:
                raise wrong("dtype", f"one of {', '.join(QUANTIZED_DTYPES)} with a scaling", self.dtype)
            for operand in "AB":
                if self.scaling[operand].dtype == "float8_e4m3fn" and self.dtype != "float4_e2m1fn_x2":
                    raise wrong("dtype", "float4_e2m1fn_x2 with scales of float8_e4m3fn", self.dtype)

    def __repr__(self) -> str:
        # Digests of plans contain this text: that of a problem without them is the same as before there were any.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("n_per_rank", "k_per_rank", "b_dtype", "scaling", "groups"):
            if values[name] in (None, 1):
                del values[name]
        return f"GemmProblem({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def copies(self) -> int:
        """The number of ranks that hold each column of D where N is sharded: ``n_per_rank`` counts each of them."""
        return 1 if self.n_per_rank is None else sum(self.n_per_rank) // self.n

    def matrices(self, operand: str) -> int:
        """The number of matrices of an operand for each batch: ``groups`` for "B", else 1."""
        return self.groups if operand == "B" else 1

    def operand_dtype(self, operand: str) -> str:
        """The element type of "A", "B", "C", "D", or of the scales "SFA" or "SFB"."""
        if operand in ("SFA", "SFB"):
            if self.scaling is None:
                raise wrong("operand", "A, B, C or D of a problem without scaling", operand)
            return self.scaling[operand[-1]].dtype
        return str({"A": self.dtype, "B": self.b_dtype or self.dtype}.get(operand, self.out_dtype))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))
