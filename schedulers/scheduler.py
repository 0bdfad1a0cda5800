"""DistributedTileScheduler: which (m, n, k, l) tile each rank multiplies in each iteration, and who holds the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from distgemm.layouts import Axis, TVLayout
from distgemm.schedulers.routes import Chain, Direct, GatherRoute, ReduceRoute

__all__ = ["WHOLE", "DistributedTileScheduler", "Partition", "Route", "TileCoord"]

WHOLE = (Axis(1),)
"""The axes of a mode that is one tile."""

MODES = {"A": ("m", "k", "l"), "B": ("n", "k", "l"), "D": ("m", "n", "l")}
"""The modes of each operand, in the order of its tile coordinates. C has the modes of D."""


class TileCoord(NamedTuple):
    """The coordinate of a tile in the grid of work tiles, or the extents of that grid.

    Attributes:
        m: along the rows of A and D.
        n: along the rows of B and the columns of D.
        k: along the columns of A and B, over which the GEMM sums.
        l: along the batches.
    """

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  (the field's name in CUTLASS)


UNCHUNKED = TileCoord(1, 1, 1, 1)


@dataclass(frozen=True)
class Partition:
    """Which rank holds which tiles: one TV layout (rank, value) -> tile for each operand.

    Attributes:
        a: the (m, k, l) tiles of A that a rank holds at the start.
        b: the (n, k, l) tiles of B that a rank holds at the start.
        d: the (m, n, l) tiles of D that a rank holds at the end. C is partitioned as D.
    """

    a: TVLayout
    b: TVLayout
    d: TVLayout

    def __getitem__(self, operand: str) -> TVLayout:
        return {"A": self.a, "B": self.b, "D": self.d}[operand]


@dataclass(frozen=True)
class Route:
    """The paths of tiles and partial sums between ranks.

    Attributes:
        a: path of the tiles of A.
        b: path of the tiles of B.
        d: path of the partial sums of D.
        final_copies: path of the finished tiles of D, if a tile has several owners. One owner, the reducer, completes
            the tile and sends it to the others.
    """

    a: GatherRoute = field(default_factory=Direct)
    b: GatherRoute = field(default_factory=Direct)
    d: ReduceRoute = field(default_factory=Chain)
    final_copies: GatherRoute = field(default_factory=Direct)


@dataclass(frozen=True)
class DistributedTileScheduler:
    """A schedule: how the ranks of a mesh share one GEMM. It is pure data, and checks itself when it is made.

    Attributes:
        name: name of the algorithm.
        partition: which rank holds which tiles of A, B and D.
        work: TV layout (rank, iteration) -> (m, n, k, l) tile. A rank idles in an iteration whose tile is outside the
            grid.
        route: the paths of tiles and partial sums between ranks.
        chunks: number of chunks of a shard in each mode (tile = shard * chunks + chunk).

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
        """The arrangement of the ranks. Rank numbers are row-major over it."""
        return self.work.mesh

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.work.ranks

    @property
    def iterations(self) -> int:
        """Number of iterations: each rank multiplies at most one tile in each."""
        return self.work.size

    @cached_property
    def grid(self) -> TileCoord:
        """Number of work tiles in each mode."""
        return TileCoord(*self.work.grid)

    def work_tile(self, iteration: int, rank: int) -> TileCoord | None:
        """The tile that a rank multiplies in an iteration.

        Args:
            iteration: 0 to iterations - 1.
            rank: 0 to world_size - 1.

        Returns:
            The (m, n, k, l) coordinate of the tile. None if the rank idles.

        Raises:
            ValueError: if there is no such iteration or rank.
        """
        if not 0 <= iteration < self.iterations:
            raise ValueError(f"iteration {iteration} is not in 0..{self.iterations - 1}")
        tile = self.work(rank, iteration)
        return None if tile is None else TileCoord(*tile)

    def owner(self, operand: str, tile: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold a tile, in ascending order: of A and B at the start, of D at the end.

        Args:
            operand: "A", "B" or "D".
            tile: coordinate (m, k, l) of a tile of A, (n, k, l) of B, (m, n, l) of D.

        Raises:
            ValueError: for another operand, or a tile outside the grid.
        """
        if operand not in MODES:
            raise ValueError(f"operand {operand!r} is none of 'A', 'B', 'D'")
        return self.partition[operand].holders(tile)
