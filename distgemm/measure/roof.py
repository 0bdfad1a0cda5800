"""The least time of a tensor-parallel GEMM, from measured times of its parts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Roof"]


@dataclass(frozen=True)
class Roof:
    """Bounds on the time of an operation whose communication hides behind its GEMM.

    Attributes:
        gemm_ms: time of the rank's GEMM alone, ms.
        copies_ms: time of the rank's copies alone, ms.
        ranks: number of ranks.
    """

    gemm_ms: float
    copies_ms: float
    ranks: int

    @property
    def ms(self) -> float:
        """The time if everything is hidden that can be hidden: the longer of GEMM and copies."""
        return max(self.gemm_ms, self.copies_ms)

    @property
    def pipeline_ms(self) -> float:
        """The time of as many equal iterations as ranks.

        Nothing hides the first copy or the last GEMM: the longer part, and one iteration of the shorter part.
        """
        return self.ms + min(self.gemm_ms, self.copies_ms) / self.ranks

    def hidden_share(self, ms: float) -> float:
        """The share of the communication that an operation of ``ms`` hides, from 0 to 1."""
        return min(1.0, max(0.0, 1 - (ms - self.gemm_ms) / self.copies_ms))
