"""The proof of a per-tile execution: all tiles are made, each slot has one writer, and no wait lasts for ever.

The proof reads the order of tiles and pieces as the kernel does, ticket by ticket. It knows nothing of units, groups
and leads. Slots have the numbers that ``part_``, ``sum_slot_``, ``result_slot_`` and ``piece_slot_`` of per_tile.cu
give them. It goes through all ranks, and shows:

* A rank multiplies each tile of each shard once.
* Each slot is written once, by one peer, and read: a sum by one tile, a result by its takers, a piece by all tiles
  of its row. So each wait has one flag that ends it.
* Sums that a tile adds are made with lower tickets than its own; in a one-shot all-reduce, and where tiles span shards,
  with the same, and are sent before the tile waits. Pieces of a gather are sent by warps that wait for no tile. Takers
  of an all-reduce hold no tile back.
* Where tiles span shards, each row of a tile has one owner: all rows of a warp the same one in a reduction, and a row
  of A lies in one of the pieces that the tile waits for.

A cluster works on its tickets in order, and clusters take tickets in order. So of all tiles that are not finished, on
all ranks, the one with the lowest ticket waits for nothing, however few clusters run. All ranks have the same order,
so this condition is also necessary: if a tile waited for a higher ticket of a peer, that peer's tile with its own
ticket would wait for the next peer, and so on around all ranks.

Epochs, which keep replays apart, have a proof of their own: ``tests/unit/test_epochs.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distgemm.gemm.per_tile.bind import LANES, RankGemm
from distgemm.gemm.per_tile.kernel import BYTES, PIECE_BYTES, PIECE_ROWS, WARP_ROWS
from distgemm.plan.schema import PlanError

__all__ = ["Proof", "prove"]

Numbers = NDArray[np.int64]


class Proof(NamedTuple):
    """What was proved, of all ranks.

    Attributes:
        tiles: tiles that are multiplied.
        slots: slots that are written at peers.
        waits: waits of tiles and takers for slots.
    """

    tiles: int
    slots: int
    waits: int


def prove(gemm: RankGemm) -> Proof:
    """Prove that an execution on all ranks makes all tiles, and comes to an end.

    Args:
        gemm: what each rank multiplies. The time grows with the square of the number of ranks: 8 ranks take less than
            a second, with the layers of Llama 405B.

    Raises:
        PlanError: naming what is wrong, and the first rank and tile of which that is so.
    """
    tiles = _Tiles(gemm)
    if gemm.traits.gathers:
        return _prove_gather(gemm, tiles)
    if gemm.traits.pattern == "gemm+a2a":
        return _prove_to_owners(gemm, tiles)
    if gemm.traits.one_shot or gemm.spans:
        return _prove_at_once(gemm, tiles)
    return _prove_reduction(gemm, tiles)


class _Tiles:
    """The tiles of the blocks of all clusters, each with its ticket. All ranks have the same.

    Attributes:
        distance, row, column: of each tile, the shard, and the row and column of tiles in it.
        ticket: of each tile.
        rows, columns: of tiles in a shard.
    """

    def __init__(self, gemm: RankGemm) -> None:
        order, (down, across) = gemm.order, gemm.traits.cluster
        found = np.array(list(order), dtype=np.int64).reshape(-1, 3)
        blocks = np.arange(down * across)
        self.rows, self.columns = order.blocks * down, order.columns * across
        self.ticket = np.repeat(np.arange(len(found)), down * across)
        self.distance = np.repeat(found[:, 0], down * across)
        self.row = (found[:, 1, None] * down + blocks % down).ravel()
        self.column = (found[:, 2, None] * across + blocks // down).ravel()
        tile_m, tile_n = gemm.traits.tile
        if self.rows * tile_m < gemm.m or self.columns * tile_n < gemm.n:
            raise PlanError(
                f"{self.rows}x{self.columns} tiles of {tile_m}x{tile_n} do not cover a shard of {gemm.m}x{gemm.n}"
            )
        shape = (order.shards, self.rows, self.columns)
        _once("each rank multiplies", _index((self.distance, self.row, self.column), shape, "a tile"), shape)

    def numbers(self) -> Numbers:
        """Of each tile, its number within a shard."""
        return self.row * self.columns + self.column


def _prove_gather(gemm: RankGemm, tiles: _Tiles) -> Proof:
    pieces, ranks = gemm.pieces, gemm.ranks
    size = BYTES[gemm.traits.dtype]
    if pieces.rows * PIECE_ROWS < gemm.rank_rows or pieces.slices * PIECE_BYTES < gemm.k * size:
        raise PlanError(f"{pieces.rows}x{pieces.slices} pieces do not cover a shard of {gemm.rank_rows}x{gemm.k}")
    sent = np.array([pieces.at(number) for number in range(pieces.pieces)], dtype=np.int64).reshape(-1, 3)
    distance, row, piece = sent.T
    shape = (ranks, len(pieces.receivers), pieces.rows, pieces.slices)
    senders = np.arange(ranks)[:, None]
    shard = senders if gemm.spans else distance - 1
    slots = _index(((senders - distance) % ranks, shard, row, piece), shape, "a slot")
    _once("at (rank, peer - 1, row, slice), peers write", slots, shape)
    if gemm.spans:
        waits = _spanned_waits(gemm, tiles) * pieces.slices
        return Proof(ranks * len(tiles.ticket), slots.size, ranks * waits)
    # A tile waits for the pieces of its rows: of all slices of its shard, or of all ranks. Rows that do not exist have
    # none.
    slices, added = 1, np.zeros((1, 2), dtype=np.int64)
    if gemm.traits.pattern == "a2a+gemm":
        slices = pieces.slices
        added = np.array([pieces.slice_of_sum(number) for number in range(ranks * slices)], dtype=np.int64)
    down = gemm.traits.tile[0] // PIECE_ROWS
    found = np.zeros((ranks, tiles.rows * down, slices), dtype=np.int64)
    for i in range(down):
        rows = (tiles.row * down + i)[:, None]
        np.add.at(found, (tiles.distance[:, None] + added[:, 0], rows, added[:, 1]), 1)
    found = found[1:, : pieces.rows]
    if (found != tiles.columns).any():
        raise PlanError(f"pieces are read by all {tiles.columns} tiles of their row, got {found.min()}")
    return Proof(ranks * len(tiles.ticket), slots.size, ranks * int(found.sum()) * pieces.slices // slices)


def _spanned_waits(gemm: RankGemm, tiles: _Tiles) -> int:
    """The rows of pieces for which all tiles of a rank wait, if tiles span shards. They have all rows of the tiles."""
    of_shard, height = gemm.pieces.rows, gemm.traits.tile[0]
    row = np.arange(gemm.m)
    shard, within = np.divmod(row, gemm.rank_rows)
    piece = shard * of_shard + within // PIECE_ROWS  # of each row of A
    count = 0
    for number in range(tiles.rows):
        rows = slice(number * height, min(number * height + height, gemm.m))
        if rows.start >= gemm.m:
            continue  # nobody waits for rows that do not exist
        # As in wait_for_slices_ of per_tile.cu.
        first = rows.start // gemm.rank_rows * of_shard
        end = ((rows.stop - 1) // gemm.rank_rows + 1) * of_shard
        if end - first > LANES:
            raise PlanError(
                f"a warp reads at most {LANES} flags of a slice, got {end - first} in row {number} of tiles"
            )
        if not np.isin(piece[rows], np.arange(first, end)).all():
            raise PlanError(
                f"tiles of row {number} wait for rows {first} to {end - 1} of pieces, which lack some of A's"
            )
        count += (end - first) * tiles.columns
    return count


def _prove_reduction(gemm: RankGemm, tiles: _Tiles) -> Proof:
    ranks, parts = gemm.ranks, gemm.traits.parts
    own = tiles.distance == 0
    shape = (ranks, ranks - 1, tiles.rows, tiles.columns)
    number, of_rank = tiles.numbers(), np.arange(ranks)[:, None]
    ticket = tiles.ticket[~own]
    slots = _stored(tiles, shape, "sum")
    made = np.empty(slots.size, dtype=np.int64)
    made[slots] = np.tile(ticket, ranks)
    made = made.reshape(ranks, ranks - 1, tiles.rows * tiles.columns)[:, :, number[own]]
    late = np.argwhere(made >= tiles.ticket[own])
    if len(late):
        rank, peer, tile = late[0]
        row, column, waits = (int(x[own][tile]) for x in (tiles.row, tiles.column, tiles.ticket))
        raise PlanError(
            f"rank {rank} multiplies its own tile of row {row} and column {column} with ticket {waits}, and waits for "
            f"the sum that rank {(rank + peer + 1) % ranks} makes with ticket {made[rank, peer, tile]}: it may wait "
            "for ever"
        )
    count = slots.size * parts
    proof = Proof(ranks * len(tiles.ticket), count, count)
    if gemm.traits.pattern == "gemm+rs":
        return proof
    # Results: the owner stores at the ranks before it. Their takers know the order of its units.
    distances = np.arange(1, ranks)[:, None, None]
    results = _index(
        ((of_rank - distances) % ranks, distances - 1, tiles.row[own], tiles.column[own]), shape, "a result"
    )
    _once("at (rank, peer - 1, row, column), owners store results", results, shape)
    _prove_takers(gemm, shape[2:])
    return Proof(proof.tiles, 2 * count, 2 * count)


def _prove_at_once(gemm: RankGemm, tiles: _Tiles) -> Proof:
    """Each rank stores the sum of each tile at all peers, or each owner's rows, before it waits for those of peers.

    So a tile waits for the sums of the same ticket. With the lowest ticket that is not finished on all ranks, they are
    under way: nobody waits before it has sent them.
    """
    ranks = gemm.ranks
    shape = (ranks, ranks - 1, tiles.rows, tiles.columns)
    sender, distance = np.arange(ranks)[:, None, None], np.arange(1, ranks)[:, None]
    slots = _index(((sender - distance) % ranks, distance - 1, tiles.row, tiles.column), shape, "a sum")
    _once("at (rank, peer - 1, row, column), peers store sums", slots, shape)
    count = waits = slots.size * gemm.traits.parts
    if gemm.spans:
        waits = (ranks - 1) * _spanned_sums(gemm, tiles)
    return Proof(ranks * len(tiles.ticket), count, waits)


def _spanned_sums(gemm: RankGemm, tiles: _Tiles) -> int:
    """The warps of all ranks that add sums, in all tiles, if tiles span shards: one owner of each 16 rows."""
    first = np.arange(0, tiles.rows * gemm.traits.tile[0], WARP_ROWS)
    first = first[first < gemm.m]
    owner = first // gemm.rank_rows
    if (owner != np.minimum(first + WARP_ROWS - 1, gemm.m - 1) // gemm.rank_rows).any():
        raise PlanError(f"the {WARP_ROWS} rows of a warp have one owner, got shards of {gemm.rank_rows} rows")
    if (np.bincount(owner, minlength=gemm.ranks) * WARP_ROWS != gemm.rank_rows).any():
        raise PlanError(f"each of {gemm.ranks} ranks owns {gemm.rank_rows} rows, got {gemm.m} rows in all")
    return len(first) * tiles.columns


def _prove_to_owners(gemm: RankGemm, tiles: _Tiles) -> Proof:
    shape = (gemm.ranks, gemm.ranks - 1, tiles.rows, tiles.columns)
    count = _stored(tiles, shape, "result").size * gemm.traits.parts
    _prove_takers(gemm, shape[2:])
    return Proof(gemm.ranks * len(tiles.ticket), count, count)


def _stored(tiles: _Tiles, shape: tuple[int, ...], what: str) -> Numbers:
    """The slots in which ranks store the tiles of others' shards: rank r at the rank d behind it, which sees r N - d
    behind itself. Raises PlanError if a slot is not stored once."""
    ranks, other = shape[0], tiles.distance > 0
    receiver = (np.arange(ranks)[:, None] + tiles.distance[other]) % ranks
    places = receiver, ranks - tiles.distance[other] - 1, tiles.row[other], tiles.column[other]
    slots = _index(places, shape, f"a {what}")
    _once(f"at (rank, peer - 1, row, column), peers store {what}s", slots, shape)
    return slots


def _prove_takers(gemm: RankGemm, shape: tuple[int, ...]) -> None:
    """Takers of results know the order of their makers' units."""
    order, (down, across) = gemm.order, gemm.traits.cluster
    taken = []
    for unit in range(order.units):
        _, block, column = order.of_unit(1, unit)
        taken += [(block * down + i % down, column * across + i // down) for i in range(down * across)]
    takes = np.array(taken, dtype=np.int64).T
    _once("takers take", _index((takes[0], takes[1]), shape, "a result"), shape)


def _index(places: tuple[Numbers, ...], shape: tuple[int, ...], what: str) -> Numbers:
    """The flat numbers of places in a shape. Raises PlanError for one outside."""
    every = np.broadcast_arrays(*places)
    for places_of_axis, extent in zip(every, shape, strict=True):
        if places_of_axis.size and not 0 <= places_of_axis.min() <= places_of_axis.max() < extent:
            raise PlanError(
                f"{what} has a place from 0 to {extent - 1}, got {places_of_axis.min()} to {places_of_axis.max()}"
            )
    return np.ravel_multi_index(tuple(every), shape).ravel() if every[0].size else np.empty(0, dtype=np.int64)


def _once(what: str, found: Numbers, shape: tuple[int, ...]) -> None:
    """Raise PlanError if not each place in a shape was found once."""
    times = np.bincount(found, minlength=int(np.prod(shape)))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        place = tuple(map(int, np.unravel_index(wrong[0], shape)))
        raise PlanError(f"{what} each of {shape} once, got {times[wrong[0]]} times {place}")
