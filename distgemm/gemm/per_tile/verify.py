"""The proof of a per-tile execution: all tiles are made, each slot has one writer, and no wait lasts for ever.

The proof reads the order of tiles and pieces as the kernel does, ticket by ticket. It knows nothing of units, groups
and leads. All ranks do the same: what one does at a distance, each does at that distance from itself. So what is shown
of one rank holds for all:

* A rank multiplies each tile of each shard once.
* Each slot is written once, by the peer at its distance, and read: a sum by one tile, a result by its takers, a piece
  by all tiles of its row. So each wait has one flag that ends it.
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
        gemm: what each rank multiplies. 8 ranks take less than a second, with the layers of Llama 405B.

    Raises:
        PlanError: naming what is wrong, and the first tile of which that is so.
    """
    tickets, traits = _tickets(gemm), gemm.traits
    slots = waits = gemm.flags or (gemm.ranks - 1) * gemm.parts  # at each rank; packets are flags, too
    if traits.gathers:
        waits = _prove_pieces(gemm, *tickets.shape[1:])
    elif gemm.spans:
        waits = (gemm.ranks - 1) * _spanned_sums(gemm) * tickets.shape[2] // gemm.ranks
    elif traits.pattern != "gemm+a2a" and not traits.one_shot:
        _prove_sums(gemm, tickets)
    if traits.takes:
        _prove_takers(gemm, tickets.shape[1:])
    return Proof(*(gemm.ranks * count for count in (tickets.size, slots, waits)))


def _tickets(gemm: RankGemm) -> Numbers:
    """The tickets of all tiles, by (distance, row, column)."""
    order, (down, across), (height, width) = gemm.order, gemm.traits.cluster, gemm.traits.tile
    distance, block, column = np.array(list(order), dtype=np.int64).reshape(-1, 3, 1).transpose(1, 0, 2)
    shape = (order.shards, order.blocks * down, order.columns * across)
    if shape[1] * height < gemm.m or shape[2] * width < gemm.n:
        raise PlanError(f"{shape[1]}x{shape[2]} tiles of {height}x{width} do not cover a shard of {gemm.m}x{gemm.n}")
    number = np.arange(down * across)
    places = distance, block * down + number % down, column * across + number // down
    found = _once("each rank multiplies", _index(places, shape, "a tile"), shape)
    return found.reshape(shape) // (down * across)


def _prove_pieces(gemm: RankGemm, rows: int, columns: int) -> int:
    """Each piece of a gather is sent once, and tiles wait for all that they read. Returns a rank's waits."""
    pieces, nearest = gemm.pieces, int(not gemm.spans)
    if pieces.rows * PIECE_ROWS < gemm.rank_rows or pieces.slices * PIECE_BYTES < gemm.k * BYTES[gemm.traits.dtype]:
        raise PlanError(f"{pieces.rows}x{pieces.slices} pieces do not cover a shard of {gemm.rank_rows}x{gemm.k}")
    sent = np.array([pieces.at(number) for number in range(pieces.pieces)], dtype=np.int64).reshape(-1, 3)
    shape = (gemm.ranks - nearest, pieces.rows, pieces.slices)
    places = sent[:, 0] - nearest, sent[:, 1], sent[:, 2]
    _once(f"at (distance - {nearest}, row, slice), peers write", _index(places, shape, "a slot"), shape)
    if gemm.spans:
        return _spanned_pieces(gemm, rows) * columns * pieces.slices
    if gemm.traits.pattern == "a2a+gemm":  # a tile adds the slices of all ranks
        added = [pieces.slice_of_sum(number) for number in range(gemm.ranks * pieces.slices)]
        found = np.array(added, dtype=np.int64).reshape(-1, 2)
        of_all = (gemm.ranks, pieces.slices)
        _once("at (distance, slice), a tile adds", _index((found[:, 0], found[:, 1]), of_all, "a slice"), of_all)
    return pieces.pieces * columns


def _spanned_pieces(gemm: RankGemm, tile_rows: int) -> int:
    """The rows of pieces for which a column of tiles waits, if tiles span shards. They have all rows of the tiles."""
    of_shard, height = gemm.pieces.rows, gemm.traits.block_tile[0]
    shard, within = np.divmod(np.arange(gemm.m), gemm.rank_rows)
    piece = shard * of_shard + within // PIECE_ROWS  # of each row of A
    count = 0
    for number in range(min(tile_rows, -(-gemm.m // height))):  # nobody waits for rows that do not exist
        begin, end = number * height, min(number * height + height, gemm.m)
        # As in wait_for_slices_ of per_tile.cu.
        first, last = begin // gemm.rank_rows * of_shard, (end - 1) // gemm.rank_rows * of_shard + of_shard - 1
        if last - first >= LANES:
            raise PlanError(f"a warp reads at most {LANES} flags of a slice, got {last - first + 1} in row {number}")
        if piece[begin:end].min() < first or piece[begin:end].max() > last:
            raise PlanError(f"tiles of row {number} wait for pieces {first} to {last}, which lack some rows of A")
        count += last - first + 1
    return count


def _spanned_sums(gemm: RankGemm) -> int:
    """The warps of a column of tiles, of all ranks, that add sums, if tiles span shards: one owner of each 16 rows."""
    first = np.arange(0, gemm.m, WARP_ROWS)
    owner = first // gemm.rank_rows
    if (owner != np.minimum(first + WARP_ROWS - 1, gemm.m - 1) // gemm.rank_rows).any():
        raise PlanError(f"the {WARP_ROWS} rows of a warp have one owner, got shards of {gemm.rank_rows} rows")
    return len(first)


def _prove_sums(gemm: RankGemm, tickets: Numbers) -> None:
    """Own tiles come behind the sums that they add. Rank r + d makes that from distance d with its tile at N - d."""
    late = np.argwhere(tickets[1:] >= tickets[0])
    if len(late):
        other, row, column = late[0]
        raise PlanError(
            f"rank 0 multiplies its own tile of row {row} and column {column} with ticket {tickets[0, row, column]}, "
            f"and waits for the sum that rank {gemm.ranks - other - 1} makes with ticket "
            f"{tickets[other + 1, row, column]}: it may wait for ever"
        )


def _prove_takers(gemm: RankGemm, shape: tuple[int, ...]) -> None:
    """Takers of results know the order of their makers' units."""
    order, (down, across) = gemm.order, gemm.traits.cluster
    units = np.array([order.of_unit(1, unit)[1:] for unit in range(order.units)], dtype=np.int64)
    number = np.arange(down * across)
    takes = units[:, :1] * down + number % down, units[:, 1:] * across + number // down
    _once("takers take", _index(takes, shape, "a result"), shape)


def _index(places: tuple[Numbers, ...], shape: tuple[int, ...], what: str) -> Numbers:
    """The flat numbers of places in a shape. Raises PlanError for one outside."""
    every = np.broadcast_arrays(*places)
    for places_of_axis, extent in zip(every, shape, strict=True):
        if places_of_axis.size and not 0 <= places_of_axis.min() <= places_of_axis.max() < extent:
            raise PlanError(
                f"{what} has a place from 0 to {extent - 1}, got {places_of_axis.min()} to {places_of_axis.max()}"
            )
    return np.ravel_multi_index(tuple(every), shape).ravel() if every[0].size else np.empty(0, dtype=np.int64)


def _once(what: str, found: Numbers, shape: tuple[int, ...]) -> Numbers:
    """Where each place of a shape was found. Raises PlanError if not each was found once."""
    times = np.bincount(found, minlength=int(np.prod(shape)))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        place = tuple(map(int, np.unravel_index(wrong[0], shape)))
        raise PlanError(f"{what} each of {shape} once, got {times[wrong[0]]} times {place}")
    return np.argsort(found)
