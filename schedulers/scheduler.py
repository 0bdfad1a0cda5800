"""DistributedTileScheduler: which (m, n, k, l) tile each rank multiplies in each iteration, and who holds the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, get_args

from distgemm.arguments import hashable, instance, integer, member, string, wrong
from distgemm.layouts import Axis, TVLayout
from distgemm.schedulers.routes import AddPlace, Chain, Direct, GatherRoute, ReduceRoute
from distgemm.schedulers.symmetry import MODES, NotSymmetricError, Symmetry, find_symmetry

__all__ = ["WHOLE", "DistributedTileScheduler", "Partition", "Route", "TileCoord"]

WHOLE = (Axis(1),)
"""The axes of a mode that is one tile."""


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

MAX_TILES = 1 << 18
"""The most tiles that the ranks of a schedule multiply or hold together, or one rank of a symmetric schedule. A plan
has about six ops for each tile of work, and each takes about 1 KB: all ops of 512 ranks that gather 512 shards take
2 GB and half a minute."""


@dataclass(frozen=True)
class Partition:
    """Which rank holds which tiles: one TV layout (rank, value) -> tile for each operand.

    Attributes:
        a: the (m, k, l) tiles of A that a rank holds at the start.
        b: the (n, k, l) tiles of B that a rank holds at the start.
        d: the (m, n, l) tiles of D that a rank holds at the end. C is partitioned as D.

    Raises:
        ValueError: if one of them is no TVLayout.
    """

    a: TVLayout
    b: TVLayout
    d: TVLayout

    def __post_init__(self) -> None:
        for name in ("a", "b", "d"):
            instance(name, getattr(self, name), TVLayout, "a distgemm.layouts.TVLayout")

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
            the tile and sends it to the others. None (one-shot): ``d`` brings each partial sum directly to every owner,
            and every owner adds all of them itself, in the order of ranks. So results are bitwise equal on all ranks.

    Raises:
        ValueError: if one of them is no route, and without ``final_copies`` if ``d`` adds in an epilogue, which adds
            the rank's own part first.
    """

    a: GatherRoute = field(default_factory=Direct)
    b: GatherRoute = field(default_factory=Direct)
    d: ReduceRoute = field(default_factory=Chain)
    final_copies: GatherRoute | None = field(default_factory=Direct)

    def __post_init__(self) -> None:
        for name in ("a", "b", "d", "final_copies"):
            route, sums = getattr(self, name), name == "d"
            if route is None and name == "final_copies":
                continue
            valid = not isinstance(route, type) and callable(getattr(route, "hops", None))
            example = "a ReduceRoute, such as Chain()" if sums else "a GatherRoute, such as Direct()"
            if not valid or (sums and not (hasattr(route, "add") and hasattr(route, "final_add"))):
                raise wrong(name, example + " or None" * (name == "final_copies"), route)
            hashable(name, route, f"{example}, and hashable, as frozen dataclasses are")
            if sums:
                for place in ("add", "final_add"):
                    member(f"{name}.{place}", getattr(route, place), get_args(AddPlace))
        if self.final_copies is None and (self.d.add, self.d.final_add) != ("kernel", "kernel"):
            raise ValueError(
                "d is a ReduceRoute with add='kernel' and final_add='kernel', such as Pairwise(), if final_copies is "
                f"None: an epilogue adds its rank's own part first; got add={self.d.add!r} and "
                f"final_add={self.d.final_add!r}"
            )


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
        ValueError: if the parts do not fit together, if a tile has no holder, and for more than MAX_TILES tiles, of one
            rank if rotations of the mesh map the schedule to itself, otherwise of all ranks.
    """

    name: str
    partition: Partition
    work: TVLayout
    route: Route = Route()
    chunks: TileCoord = UNCHUNKED

    def __post_init__(self) -> None:
        string("name", self.name)
        instance("partition", self.partition, Partition, "a Partition")
        instance("work", self.work, TVLayout, "a TVLayout (rank, iteration) -> (m, n, k, l) tile")
        instance("route", self.route, Route, "a Route")
        if len(self.work.modes) != 4:
            raise ValueError(f"{self.name}: work is a TVLayout of 4 modes, (m, n, k, l), got {len(self.work.modes)}")
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
        self._check_size()
        for operand in MODES:
            if not self.partition[operand].covers():
                wanted = self.partition[operand].grid
                raise ValueError(f"{self.name}: the partition of {operand} leaves tiles of {wanted} without a holder")
        if not isinstance(self.chunks, TileCoord):
            raise wrong(f"{self.name}: chunks", "a TileCoord(m, n, k, l) of integers >= 1", self.chunks)
        for mode, extent, chunks in zip(TileCoord._fields, self.grid, self.chunks, strict=True):
            if extent % integer(f"{self.name}: chunks.{mode}", chunks):
                raise wrong(
                    f"{self.name}: chunks.{mode}", f"an integer that divides the {extent} tiles of mode {mode}", chunks
                )

    def _check_size(self) -> None:
        """Check the number of tiles. If all ranks do the same, with rotated tiles, a plan needs those of one rank."""
        whole = any(layout.ranks * layout.size > MAX_TILES for layout in self.layouts)
        symmetry = self.symmetry if whole else None
        for what, layout in zip(("work", "A", "B", "D"), self.layouts, strict=True):
            count = layout.size * (1 if isinstance(symmetry, Symmetry) else layout.ranks)
            if count > MAX_TILES:
                reason = f" ({symmetry})" if isinstance(symmetry, NotSymmetricError) else ""
                raise ValueError(
                    f"{self.name}: {layout.ranks} ranks with {layout.size} tiles of {what} each; a schedule has at "
                    f"most {MAX_TILES} in total{reason}: take fewer ranks or chunks"
                )

    @cached_property
    def symmetry(self) -> Symmetry | NotSymmetricError:
        """The rotations of ranks and tiles with which the schedule commutes, or why it does not."""
        route = self.route
        if route.final_copies is None:
            return NotSymmetricError("every owner adds the partial sums in the order of ranks")
        routes = {"a": route.a, "b": route.b, "d": route.d, "final_copies": route.final_copies}
        try:
            return find_symmetry(self.work, {operand: self.partition[operand] for operand in MODES}, routes)
        except NotSymmetricError as reason:
            return reason

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.partition, self.work, self.route, self.chunks))

    @property
    def layouts(self) -> tuple[TVLayout, TVLayout, TVLayout, TVLayout]:
        """The layouts of the work and of A, B and D."""
        return self.work, self.partition.a, self.partition.b, self.partition.d

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
        tile = self.work(rank, integer("iteration", iteration, 0, self.iterations - 1))
        return None if tile is None else TileCoord(*tile)

    def owner(self, operand: str, tile: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold a tile, in ascending order: of A and B at the start, of D at the end.

        Args:
            operand: "A", "B" or "D".
            tile: coordinate (m, k, l) of a tile of A, (n, k, l) of B, (m, n, l) of D.

        Raises:
            ValueError: for another operand, or a tile outside the grid.
        """
        return self.partition[member("operand", operand, MODES)].holders(tile)
