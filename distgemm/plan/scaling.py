"""Scaling: which elements of A and of B share one scale.

A quantised operand is its elements times its scales. The scales of A are an operand of their own, "SFA" (scale factors
of A, as CUTLASS calls them), and those of B are "SFB". They have shards and tiles as A and B have, in coordinates of
their own: one row and one column for each block of elements that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from distgemm.arguments import boolean, instance, integer, member, wrong

__all__ = [
    "SCALE_DTYPES",
    "SCALE_OPERANDS",
    "SCALINGS",
    "OperandScaling",
    "Scaling",
    "ScalingScope",
    "read_scaling",
    "scaling_name",
]

ScalingScope = Literal["global", "shard"]

SCALE_OPERANDS = {"A": "SFA", "B": "SFB"}
"""The operand that holds the scales of an operand."""

SCALE_DTYPES = ("float32", "float8_e8m0fnu", "float8_e4m3fn")
"""Element types of scales."""

ATOM_ROWS, ATOM_COLUMNS = 128, 4
"""Swizzled scales are stored in atoms of 128 rows and 4 columns, one atom after the other, row-major over atoms."""
ATOM = ATOM_ROWS * ATOM_COLUMNS


@dataclass(frozen=True)
class OperandScaling:
    """Which elements of one operand share a scale.

    Attributes:
        rows: number of rows that share a scale. None: all of them.
        columns: number of columns (elements along k) that share a scale. None: all of them.
        scope: what "all" means where ``rows`` or ``columns`` is None. "global": of the whole matrix, so that every rank
            has the same scale. "shard": of a rank's shard, so that each shard has its own.
        dtype: element type of the scales, one of ``SCALE_DTYPES``.
        swizzled: the scales are stored in atoms of 128 rows and 4 columns, as the tensor cores of Blackwell read them.
            It needs ``rows=1`` and a number of ``columns``.

    Raises:
        ValueError: for other values.
    """

    rows: int | None
    columns: int | None
    scope: ScalingScope = "global"
    dtype: str = "float32"
    swizzled: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(f"{name} of a scaling", getattr(self, name)))
        object.__setattr__(self, "scope", member("scope of a scaling", self.scope, get_args(ScalingScope)))
        object.__setattr__(self, "dtype", member("dtype of a scaling", self.dtype, SCALE_DTYPES))
        object.__setattr__(self, "swizzled", boolean("swizzled", self.swizzled))
        if self.swizzled and (self.rows != 1 or self.columns is None):
            raise ValueError(
                f"swizzled scales have rows=1 and a number of columns, got rows={self.rows} and columns={self.columns}"
            )
        if self.rows is not None and self.columns is not None:
            object.__setattr__(self, "scope", "global")  # so that equal scalings are one key

    @property
    def unit(self) -> tuple[int, int]:
        """The rows and columns of which the bounds of tiles are multiples, except at the end of the matrix."""
        if self.swizzled:
            return ATOM_ROWS, ATOM_COLUMNS * (self.columns or 1)
        return self.rows or 1, self.columns or 1

    def scales(self, mode: int, bounds: tuple[int, int], shard: tuple[int, int]) -> tuple[int, int]:
        """The rows or columns of scales that some rows or columns of the operand have.

        Args:
            mode: 0 for rows, 1 for columns.
            bounds: of the operand's rows or columns: multiples of ``unit``, or the end of the matrix.
            shard: the rows or columns of scales of the shard in which they lie. It matters for the scope "shard".
        """
        if (self.rows, self.columns)[mode] is None:
            return (0, 1) if self.scope == "global" else shard
        unit = self.unit[mode]
        each = ATOM if self.swizzled and mode else 1
        low, high = (-(-bound // unit) * each for bound in bounds)  # an empty shard at the end has no scales
        return low, high

    def positions(self, rows: int, columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the scales of a box of the operand are.

        Args:
            rows: of the box. It begins at a bound of a block.
            columns: of the box.

        Returns:
            The row and the column of the scale of each element, as arrays that broadcast to (rows, columns). The scale
            of the element (i, j) is ``scales[row[i, j], column[i, j]]``, where ``scales`` are those of the box.
        """
        row = np.arange(rows)[:, None] // (self.rows or max(rows, 1))
        column = np.arange(columns)[None, :] // (self.columns or max(columns, 1))
        if not self.swizzled:
            return row, column
        within = row % 32 * 16 + row % ATOM_ROWS // 32 * ATOM_COLUMNS + column % ATOM_COLUMNS
        return row // ATOM_ROWS, column // ATOM_COLUMNS * ATOM + within

    def expand(self, scales: Any, rows: int, columns: int) -> Any:
        """The scale of each element of a box of the operand.

        Args:
            scales: those of the box: an array of numpy or torch, (l, rows and columns of scales).
            rows: of the box, as ``positions`` takes it.
            columns: of the box.

        Returns:
            An array of the same library that broadcasts to (l, rows, columns).
        """
        row, column = self.positions(rows, columns)
        if not self.swizzled:  # so that what is one number for all rows stays one row
            row = row if self.rows is not None else row[:1]
            column = column if self.columns is not None else column[:, :1]
        return scales[:, row, column]


@dataclass(frozen=True)
class Scaling:
    """The scales of a product's operands.

    Attributes:
        a: those of A.
        b: those of B.
    """

    a: OperandScaling
    b: OperandScaling

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            instance(f"scaling of {name.upper()}", getattr(self, name), OperandScaling, "an OperandScaling")

    def __getitem__(self, operand: str) -> OperandScaling:
        """The scales of "A" or "B"."""
        return {"A": self.a, "B": self.b}[operand]


def _both(*args: Any, **kwargs: Any) -> Scaling:
    return Scaling(OperandScaling(*args, **kwargs), OperandScaling(*args, **kwargs))


SCALINGS: dict[str, Scaling] = {
    "tensorwise": _both(None, None),
    "tensorwise-shard": _both(None, None, "shard"),
    "rowwise": _both(1, None),
    "rowwise-shard": _both(1, None, "shard"),
    "blockwise": Scaling(OperandScaling(1, 128), OperandScaling(128, 128)),
    "mxfp8": _both(1, 32, dtype="float8_e8m0fnu", swizzled=True),
    "nvfp4": _both(1, 8, dtype="float8_e4m3fn", swizzled=True),
}
"""The scalings that have names.

- "tensorwise": one scale for all of A and one for all of B. "tensorwise-shard": one for each rank's shard.
- "rowwise": one scale for each row of A (a token) and each row of B (an output channel). "rowwise-shard": where k is
  divided into shards, each shard has scales of its own.
- "blockwise": blocks of 1 x 128 of A, and of 128 x 128 of B.
- "mxfp8": blocks of 1 x 32 with scales that are powers of two, swizzled.
- "nvfp4": blocks of 1 x 16 numbers, which are 8 elements of float4_e2m1fn_x2, with scales of e4m3, swizzled. Its scale
  for the whole tensor is part of ``alpha``.
"""


def scaling_name(scaling: Scaling) -> str:
    """The name of a scaling; for one without a name, its blocks as "1x128 and 128x128"."""
    for name, known in SCALINGS.items():
        if scaling == known:
            return name
    blocks = (f"{each.rows or 'all'}x{each.columns or 'all'}" for each in (scaling.a, scaling.b))
    return " and ".join(blocks)


def read_scaling(value: object) -> Scaling:
    """A scaling, from itself or from its name.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, Scaling):
        return value
    if isinstance(value, str) and value in SCALINGS:
        return SCALINGS[value]
    raise wrong("scaling", f"a Scaling or one of {', '.join(SCALINGS)}", value)
