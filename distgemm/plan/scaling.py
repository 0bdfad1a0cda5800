"""Which elements of an operand share a factor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["OperandScaling", "Scope"]

Scope = Literal["global", "shard"]


@dataclass(frozen=True)
class OperandScaling:
    """The blocks of an operand that share a factor.

    Attributes:
        rows: rows of a block; None: all rows.
        columns: columns (k) of a block; None: all columns.
        scope: of a block that has all rows or all columns: of the whole matrix ("global") or of a rank's shard.
    """

    rows: int | None = None
    columns: int | None = None
    scope: Scope = "global"

    @property
    def transposed(self) -> OperandScaling:
        """The scaling of the transposed operand with the same factors."""
        return replace(self, rows=self.columns, columns=self.rows)
