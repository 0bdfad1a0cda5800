"""DistributedTileScheduler: (iteration, rank) -> MNKL tile coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from distgemm.layouts import Axis, TVLayout
from distgemm.schedulers.routes import Chain, Direct, GatherRoute, ReduceRoute

__all__ = ["WHOLE", "DistributedTileScheduler", "Partition", "Route", "TileCoord"]

WHOLE = (Axis(1),)
"""A mode that is not tiled."""

MODES = {"A": ("m", "k", "l"), "B": ("n", "k", "l"), "D": ("m", "n", "l")}
"""The modes of the problem that each operand spans, in the order of its tile coordinates."""


class TileCoord(NamedTuple):
    """A coordinate, or the extents, of the grid of work tiles."""

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  (the field's name in CUTLASS)


UNCHUNKED = TileCoord(1, 1, 1, 1)


@dataclass(frozen=True)
class Partition:
    """Which rank holds which tiles: one TV layout (rank, value) -> tile for each operand.

    Attributes:
        a: tiles (m, k, l) of A that a rank holds at the start.
        b: tiles (n, k, l) of B that a rank holds at the start.
        d: tiles (m, n, l) of D that a rank holds at the end, and those of C at the start.
    """

    a: TVLayout
    b: TVLayout
    d: TVLayout

    def __getitem__(self, operand: str) -> TVLayout:
        return {"A": self.a, "B": self.b, "D": self.d}[operand]


@dataclass(frozen=True)
class Route:
    """The paths of all that must move.

    Attributes:
        a: path of tiles of A.
        b: path of tiles of B.
        d: path of partial sums of D.
        final_copies: path of complete tiles of D. If a tile has several owners, one of them completes it, and the
            others get copies.
    """

    a: GatherRoute = field(default_factory=Direct)
    b: GatherRoute = field(default_factory=Direct)
    d: ReduceRoute = field(default_factory=Chain)
    final_copies: GatherRoute = field(default_factory=Direct)


@dataclass(frozen=True)
class DistributedTileScheduler:
    """How the ranks of a mesh share one GEMM. It is pure data, and checked when it is made.

    Attributes:
        name: names the algorithm.
        partition: which rank holds which tiles of A, B and D.
        work: TV layout (rank, iteration) -> (m, n, k, l) tile. If the tile is outside the grid, the rank is idle.
        route: the paths of all that must move.
        chunks: number of chunks of each shard, by mode (tile = shard * chunks + chunk).

    Raises:
        ValueError: if the parts do not fit together, or a tile has no holder.
    """

    name: str
    partition: Partition
    work: TVLayout
    route: Route = Route()
    chunks: TileCoord = UNCHUNKED

    def __post_init__(self) -> None:
        if len(self.work.modes) != 4:
            raise ValueError(f"{self.name}: work maps to (m, n, k, l) tiles, got {len(self.work.modes)} modes")
        for operand, modes in MODES.items():
            layout = self.partition[operand]
            wanted = tuple(getattr(self.grid, mode) for mode in modes)
            if layout.mesh != self.mesh:
                raise ValueError(f"{self.name}: work is on the mesh {self.mesh}, {operand} on {layout.mesh}")
            if layout.grid != wanted:
                raise ValueError(
                    f"{self.name}: {operand} is partitioned into a grid of {layout.grid} tiles {modes}, "
                    f"work multiplies {wanted}"
                )
            if not layout.covers():
                raise ValueError(f"{self.name}: the partition of {operand} leaves tiles of {wanted} without a holder")
        if not isinstance(self.chunks, TileCoord):
            raise ValueError(f"{self.name}: chunks is a TileCoord(m, n, k, l) of counts, got {self.chunks!r}")
        for mode, extent, chunks in zip(TileCoord._fields, self.grid, self.chunks, strict=True):
            if chunks < 1 or extent % chunks:
                raise ValueError(f"{self.name}: {chunks} chunks do not divide the {extent} tiles of mode {mode}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.partition, self.work, self.route, self.chunks))

    @property
    def mesh(self) -> tuple[int, ...]:
        """The arrangement of ranks; rank numbers are row-major over it."""
        return self.work.mesh

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.work.ranks

    @property
    def iterations(self) -> int:
        """Number of local GEMMs of each rank."""
        return self.work.size

    @cached_property
    def grid(self) -> TileCoord:
        """Number of work tiles in each mode."""
        return TileCoord(*self.work.grid)

    def work_tile(self, iteration: int, rank: int) -> TileCoord | None:
        """The tile that ``rank`` multiplies in ``iteration``; None if it is idle."""
        if not 0 <= iteration < self.iterations:
            raise ValueError(f"iteration {iteration} is not in 0..{self.iterations - 1}")
        tile = self.work(rank, iteration)
        return None if tile is None else TileCoord(*tile)

    def owner(self, operand: str, tile: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold a tile, ascending: of "A" (m, k, l) and "B" (n, k, l) at the start, of "D"
        (m, n, l) at the end."""
        if operand not in MODES:
            raise ValueError(f"operand {operand!r} is none of 'A', 'B', 'D'")
        return self.partition[operand].holders(tile)
