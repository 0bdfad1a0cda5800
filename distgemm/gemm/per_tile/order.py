"""The order of tiles: which tile of which shard a rank multiplies with each ticket, and in which order it sends.

A shard's clusters of tiles have numbers, the same in each shard: units. Rows of clusters form groups. Within a group
the columns come one after the other, each with all rows of the group. So tiles that are multiplied at the same time
share operands.

With each unit a rank multiplies the tiles of all other shards, then one of its own shard. It thereby exchanges data
with all peers at the same time, and all the time. The shards come in the order of the schedule: at distance d is the
shard of rank r + d (modulo the number of ranks). Own tiles need no operand of a peer, so those of a gather come some
units earlier than the others: the lead. Those of a reduction add the sums of all peers, and come later by it.

Order and protocol come to an end, whatever the number of clusters that run at a time:

* A cluster works on its tickets in order, and tickets are handed out in order.
* A tile waits for sums that peers make with lower tickets, as :mod:`.verify` proves, or for operands, which warps send
  that wait for nothing.

So the unfinished tile with the lowest ticket, among all ranks, waits for nothing that is not done or under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distgemm.plan.ops import Gemm
from distgemm.plan.plan import Plan, PlanError, once_for_structure

__all__ = ["RANKS", "Piece", "PieceOrder", "Slice", "TileCluster", "TileOrder", "distances_of"]

RANKS = 72
"""The most ranks of one kernel. kRanks of tile_order.cuh."""


class TileCluster(NamedTuple):
    """Tiles that a cluster multiplies together.

    Attributes:
        distance: the shard is that of the rank so far behind this one.
        block: the row of clusters in the shard.
        column: the column of clusters.
    """

    distance: int
    block: int
    column: int


class Piece(NamedTuple):
    """A piece of a rank's own shard, for one receiver.

    Attributes:
        distance: the receiver is the rank so far before the sender; 0: the sender itself.
        row: the row of pieces in the shard.
        slice: the slice along k.
    """

    distance: int
    row: int
    slice: int


class Slice(NamedTuple):
    """A slice along k of a tile's sum.

    Attributes:
        distance: the columns of A are those of the rank so far behind this one.
        number: of the slice among these columns.
    """

    distance: int
    number: int


@dataclass(frozen=True)
class TileOrder:
    """The order of a rank's tiles. All ranks have the same.

    Attributes:
        distances: of the shards of the other ranks, in the order in which they are multiplied; none if all tiles of a
            rank are of one shard.
        blocks: rows of clusters in a shard.
        columns: columns of clusters.
        group: rows of clusters that are multiplied in turn.
        lead: units by which own tiles come earlier or later than the tiles of other shards.
        own_first: whether they come earlier.

    Raises:
        ValueError: for distances that are not those of all other ranks, and for numbers out of range.
    """

    distances: tuple[int, ...]
    blocks: int
    columns: int
    group: int
    lead: int
    own_first: bool

    def __post_init__(self) -> None:
        if sorted(self.distances) != list(range(1, self.shards)) or self.shards > RANKS:
            raise ValueError(f"distances are 1 to N - 1 of at most {RANKS} ranks, in any order, got {self.distances}")
        if min(self.blocks, self.columns, self.group) < 1 or not 0 <= self.lead <= self.units:
            raise ValueError(
                "blocks, columns and group are integers >= 1, and lead is one from 0 to blocks * columns; got "
                f"{self.blocks}, {self.columns}, {self.group} and {self.lead}"
            )

    @property
    def units(self) -> int:
        """Number of clusters of tiles in a shard."""
        return self.blocks * self.columns

    @property
    def shards(self) -> int:
        """Number of shards whose tiles a rank multiplies."""
        return len(self.distances) + 1

    @property
    def clusters(self) -> int:
        """Number of clusters of tiles, and of tickets for them."""
        return self.shards * self.units

    def at(self, ticket: int) -> TileCluster:
        """The tiles of a ticket, from 0. tile_order.cuh computes the same."""
        others, rest = self.shards - 1, self.units - self.lead
        alone = self.lead if self.own_first else self.lead * others
        if ticket < alone:
            return self.of_unit(0, ticket) if self.own_first else self._other(*divmod(ticket, others))
        ticket -= alone
        if ticket < rest * self.shards:
            unit, i = divmod(ticket, self.shards)
            if i < others:
                return self._other(unit if self.own_first else unit + self.lead, i)
            return self.of_unit(0, unit + self.lead if self.own_first else unit)
        ticket -= rest * self.shards
        if self.own_first:
            unit, i = divmod(ticket, others)
            return self._other(rest + unit, i)
        return self.of_unit(0, rest + ticket)

    def of_unit(self, distance: int, unit: int) -> TileCluster:
        """The tiles of a unit in the shard at a distance."""
        first = unit // (self.group * self.columns) * self.group
        column, row = divmod(unit - first * self.columns, min(self.group, self.blocks - first))
        return TileCluster(distance, first + row, column)

    def _other(self, unit: int, i: int) -> TileCluster:
        return self.of_unit(self.distances[i], unit)

    def __iter__(self) -> Iterator[TileCluster]:
        return map(self.at, range(self.clusters))


@dataclass(frozen=True)
class PieceOrder:
    """The order in which a rank sends the pieces of its shard: that in which all receivers need them.

    Attributes:
        distances: of the other ranks, in the order in which a rank multiplies what they send.
        rows: rows of pieces in a shard.
        slices: slices along k of each row.
        group: rows whose slices are sent in turn.
        to_itself: whether a rank is a receiver of its own shard, behind the others: where tiles span shards.
    """

    distances: tuple[int, ...]
    rows: int
    slices: int
    group: int
    to_itself: bool = False

    @property
    def receivers(self) -> tuple[int, ...]:
        """Distances of the receivers."""
        return (*self.distances, 0) if self.to_itself else self.distances

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.receivers) * self.rows * self.slices

    def at(self, number: int) -> Piece:
        """A piece, from 0. tile_order.cuh computes the same."""
        place, receiver = divmod(number, len(self.receivers))
        first = place // (self.group * self.slices) * self.group
        slice_, row = divmod(place - first * self.slices, min(self.group, self.rows - first))
        return Piece(self.receivers[receiver], first + row, slice_)

    def slice_of_sum(self, number: int) -> Slice:
        """A slice, from 0, of a sum over the columns of all ranks: own ones, then others as they are sent.

        tile_order.cuh computes the same.
        """
        if number < self.slices:
            return Slice(0, number)
        slice_, peer = divmod(number - self.slices, len(self.distances))
        return Slice(self.distances[peer], slice_)


@once_for_structure
def distances_of(plan: Plan, mode: Literal["m", "n", "k"] = "m") -> tuple[int, ...]:
    """The distances of the other ranks' shards of a mode, in the order in which a plan multiplies them.

    Raises:
        PlanError: if ranks differ in them, or if a rank does not multiply one whole shard in each iteration.
    """
    ranks, found = plan.world_size, set()
    for rank in range(ranks):
        tiles = [getattr(op.tile, mode) for op in plan.ops(rank) if isinstance(op, Gemm)]
        found.add(tuple((tile - rank) % ranks for tile in tiles))
    (distances, *others) = found
    if others or getattr(plan.grid, mode) != ranks or sorted(distances) != list(range(ranks)):
        what = {"m": "rows", "n": "columns", "k": "columns of A"}[mode]
        raise PlanError(
            f"{plan.schedule} is not executed per tile: each rank multiplies one shard of {what} in each iteration, "
            "all ranks at the same distances. A schedule like all_gather_1d_tiling_cd_rotating_a, "
            "reduce_scatter_1d_pairwise_a, all_reduce_1d_pairwise_a, all_to_all_1d_rotating_d or "
            "all_to_all_1d_rotating_a with chunks=1 works, or execution='multi_kernel'"
        )
    return tuple(x for x in distances if x)
