"""A model of per-tile kernels: the time of a replay, from the order of tiles and what tiles, stores and flags cost.

All ranks do the same at the same time, so one rank is simulated: what its peers send arrives when it has sent the same
itself. Clusters take tickets in order, and a tile takes its share of the GPU's rate. Panels of A and B that no recent
wave has read come from memory. Finished tiles leave over the link one after the other. Pieces of a shard leave in
batches: each SM sends one, all share the link, and so they arrive together.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from distgemm.gemm.per_tile.bind import RankGemm
from distgemm.gemm.per_tile.kernel import (
    BYTES,
    PIECE_BYTES,
    PIECE_ROWS,
    SEND_GB_PER_S,
    STORE_GB_PER_S,
    SUBTILE_BYTES,
    WARP_ROWS,
)
from distgemm.gemm.per_tile.order import TileCluster
from distgemm.simulator.machine import MAX_FIGURE, Machine

__all__ = ["TILES", "Costs", "TileCosts", "TileTimes", "predict_per_tile"]


class TileCosts(NamedTuple):
    """What tiles of one size cost.

    Attributes:
        peak: the rate of an SM, as a share of the machine's.
        power: the rate of the GPU at its power limit, as a share of the machine's.
        overhead: of each tile, us. With pingpong tiles the other warp group multiplies meanwhile.
    """

    peak: float
    power: float
    overhead: float


TILES: Mapping[tuple[int, int], TileCosts] = MappingProxyType(
    {
        (128, 256): TileCosts(0.900, 0.981, 1.09),
        (128, 224): TileCosts(0.849, 1.016, 1.23),
        (128, 192): TileCosts(0.885, 1.008, 1.39),
        (128, 160): TileCosts(0.905, 0.969, 1.53),
        (128, 128): TileCosts(0.793, 0.982, 0.87),
        (256, 192): TileCosts(0.867, 0.977, 1.14),
        (256, 160): TileCosts(0.911, 0.945, 1.67),
        (256, 144): TileCosts(0.846, 1.016, 2.08),
        (256, 128): TileCosts(0.900, 0.981, 1.09),
        (64, 256): TileCosts(0.633, 0.924, 1.4),
        (128, 64): TileCosts(0.600, 0.752, 1.60),
        (64, 128): TileCosts(0.628, 0.752, 0.78),
        (64, 64): TileCosts(0.328, 0.469, 0.34),
    }
)
"""Fitted, but for three sizes: 256x128 is as 128x256, and 64x256 of the first kernels (``git show
0c9bb1f:benchmarks/results/per_tile_2xh100.json``). 128x64 was found by trial: of 80
combinations with ``split_share``, it has the least errors in 84 measurements of few tokens on two H200s."""
COOPERATIVE_US = TILES[128, 256].overhead
"""The least overhead of a cooperative tile, whose warp groups multiply nothing meanwhile: that of 128x256."""
MEMORY_SHARE = 0.84
"""Of the machine's rate of memory, what operands reach that several waves of tiles read. Fitted."""
LINK_SHARE = 0.94
"""Of the rates at which pieces and tiles leave, what the link carries. Fitted."""
L2_GB_PER_S = 6400.0
"""What clusters read from L2 at most: 6.3 and 6.5 TB/s in 70B fc2 as a reduce-scatter of 128 rows on two H200s, with
64x128 in clusters of 1x2 and 2x1 (``git show 7344961:benchmarks/results/executions_few_tp2_2xh200.json``)."""
MERGED_READS = 4
"""So many clusters that read the same panel in a wave take the time of L2. Found by trial: with more, the errors that
``benchmarks/per_tile_model.py`` shows are larger."""


@dataclass(frozen=True)
class Costs:
    """What a per-tile kernel costs on a machine.

    "Fitted" are what makes least the errors of per-tile kernels of ``per_tile_4xh200.json``, of the files of ``distgemm
    bench`` on 4 H200s, and of those with TP = 2 and 8 on 2 H200s: least squares of the logarithms of times
    (``benchmarks/per_tile_model.py --fit constants``; without ``--fit`` it shows the errors).

    Attributes:
        machine: rates, SMs and memory.
        start: from the begin of a replay to the first load, with the launch, and with what ranks wait for each other
            besides flags, us. Fitted. The smallest gather of one rank alone takes 4.4 us in all.
        ticket: the shortest time from tile to tile, us. Fitted.
        stored: from a store's last byte until it is known to be complete, us. Fitted.
        flag: from there until a waiting warp has seen the flag, us. Fitted.
        sum_subtile: of a subtile of a partial sum that a warp group adds, us. Fitted.
        write_subtile: of a subtile that is written, us. Fitted.
        exchange: of 8 KiB of sums that a thread block has from one of those that split k, us: of the rows of
            ``per_tile_split_h100.json`` that have one wave of clusters.
        split_share: of the rate of an SM, what thread blocks have which split k in two. Found by trial, as the costs
            of 128x64 in TILES.
        take: from the arrival of a result to its place in D, us. Fitted to all-reduces.
        send_gb_per_s, store_gb_per_s: rates at which pieces and tiles leave: those that executables set.
        cache: bytes of panels that stay in L2, which has 50 MB.
    """

    machine: Machine
    start: float = 0.76
    ticket: float = 2.34
    stored: float = 2.33
    flag: float = 0.22
    sum_subtile: float = 0.41
    write_subtile: float = 0.035
    exchange: float = 0.15
    split_share: float = 0.825
    take: float = 4.3
    send_gb_per_s: float = SEND_GB_PER_S
    store_gb_per_s: float = STORE_GB_PER_S
    cache: float = 50e6


class TileTimes(NamedTuple):
    """Predicted times of a replay, us.

    Attributes:
        time: of the replay.
        tiles: of the replay, if stores and flags took no time.
        link: from the begin of the replay until the link has carried all that a rank sends, without a pause.
    """

    time: float
    tiles: float
    link: float

    @property
    def bound(self) -> str:
        """What takes longer alone: "tiles" or "link"."""
        return "tiles" if self.tiles >= self.link else "link"


def predict_per_tile(gemm: RankGemm, costs: Costs, *, arrived: bool = False) -> TileTimes:
    """The predicted times of a replay, with all ranks alike.

    Args:
        gemm: what each rank multiplies.
        costs: of the machine.
        arrived: whether all flags are raised before. A gather sends nothing then.

    Raises:
        ValueError: for tiles of a size that TILES does not have, and for types that the machine does not multiply.
    """
    if gemm.traits.block_tile not in TILES:
        known = ", ".join(f"{m}x{n}" for m, n in TILES)
        raise ValueError(f"the model knows tiles of {known}, got {'x'.join(map(str, gemm.traits.block_tile))}")
    at_once = replace(costs, stored=0.0, flag=0.0, take=0.0, send_gb_per_s=MAX_FIGURE, store_gb_per_s=MAX_FIGURE)
    gathers = gemm.traits.gathers
    moved = 0 if gathers and arrived else gemm.slot_bytes
    if gemm.traits.one_shot:
        moved = (gemm.ranks - 1) * gemm.parts * gemm.traits.part_bytes
    elif gemm.spans and moved:
        moved -= gemm.slot_bytes // gemm.ranks  # its own shard does not leave
    if gemm.spans and not gathers:
        moved = gemm.slot_bytes // gemm.ranks  # each peer gets its rows
    rate = costs.send_gb_per_s if gathers else costs.store_gb_per_s
    link = costs.start + _link_us(moved * _stored_share(gemm), rate)
    return TileTimes(_Replay(gemm, costs, arrived).run(), _Replay(gemm, at_once, arrived).run(), link)


def _link_us(size: float, gb_per_s: float) -> float:
    """The time, us, in which the link carries bytes that leave at a rate."""
    return size / (gb_per_s * LINK_SHARE * 1e3)


def _stored_share(gemm: RankGemm) -> float:
    """The share of tiles that is stored at peers: 16 rows at a time of those that exist; packets also have epochs."""
    if gemm.traits.gathers:
        return 1.0
    rows = gemm.order.blocks * gemm.traits.cluster[0] * gemm.traits.tile[0]
    if gemm.traits.one_shot:
        row_bytes = gemm.traits.tile[1] * BYTES[gemm.traits.partial_dtype]
        return gemm.row_packet_bytes / row_bytes * gemm.m / rows
    return min(1.0, -(-gemm.m // WARP_ROWS) * WARP_ROWS / rows)


class _Replay:
    """One replay of one rank."""

    def __init__(self, gemm: RankGemm, costs: Costs, arrived: bool) -> None:
        traits, order = gemm.traits, gemm.order
        self.gemm, self.costs, self.arrived = gemm, costs, arrived
        self.order: Sequence[TileCluster] = list(order)
        self.clusters = traits.clusters_on(costs.machine.sms)
        self.peers = gemm.ranks - 1
        self.tile = TILES[traits.block_tile]
        rate = costs.machine.rate(traits.dtype)
        sm = rate.peak * self.tile.peak * 1e6 / costs.machine.sms
        self.k = gemm.k * (gemm.ranks if traits.pattern == "a2a+gemm" else 1)  # of a tile's sum
        depth = -(-self.k // (traits.tile_k * traits.split)) * traits.tile_k if traits.split > 1 else self.k
        self.multiply_us = max(2.0 * traits.block_tile[0] * traits.block_tile[1] * depth / sm, costs.ticket)
        if traits.split > 1:
            self.multiply_us /= costs.split_share ** math.log2(traits.split)
            self.multiply_us += costs.exchange * traits.split * traits.tile[0] * traits.tile[1] * 4 / SUBTILE_BYTES
        flop = 2.0 * order.shards * gemm.m * gemm.n * self.k
        clock = costs.machine.clock(traits.dtype, flop)
        self.least_us = costs.start + flop / (rate.power * self.tile.power * clock * 1e6)
        self.subtiles = traits.part_bytes // SUBTILE_BYTES
        stored = traits.tiles * traits.parts * traits.part_bytes * _stored_share(gemm)
        self.store_us = _link_us(stored, costs.store_gb_per_s)
        self.kept = min(1.0, traits.epilogue_stages / self.subtiles)  # share of a tile that fits into the stages
        self.latency = costs.stored + costs.flag

    def run(self) -> float:
        """The time of the replay, us."""
        costs, traits, latency = self.costs, self.gemm.traits, self.latency
        gathers, spreads, pingpong = traits.gathers, traits.pattern == "gemm+ar", traits.pingpong
        to_owners = traits.pattern == "gemm+a2a"
        write = self.subtiles * costs.write_subtile
        high = traits.tile[0] * traits.cluster[0]
        add = (self.gemm.ranks if traits.one_shot else self.peers) * self.subtiles * costs.sum_subtile
        operands = self._operands() if gathers and self.peers and not self.arrived else {}
        link = end = costs.start  # when the link is free, and when all is done
        if operands:
            end += self.gemm.pieces.pieces * self._piece_us() + costs.stored
        clusters = [(costs.start, cluster) for cluster in range(self.clusters)]
        groups = [[costs.start] * (2 if pingpong else 1) for _ in clusters]  # when warp groups are free
        numbers, storers = [0] * self.clusters, [costs.start] * self.clusters
        sums: dict[tuple[int, int], float] = {}  # when the last sum of an own tile arrives

        def store(cluster: int, ready: float, copies: float) -> tuple[float, float]:
            """When a tile has left, and when its warp group has written all of it."""
            nonlocal link
            us = copies * self.store_us
            link = max(link, ready, storers[cluster]) + us
            storers[cluster] = link + costs.stored
            return link, max(ready, link - self.kept * us)

        for tile, read_us in zip(self.order, self._read_us(), strict=True):
            begins, cluster = heapq.heappop(clusters)
            group = numbers[cluster] % len(groups[cluster])
            numbers[cluster] += 1
            multiplied = max(begins, groups[cluster][group]) + max(self.multiply_us, read_us)
            multiplied = max(multiplied, operands.get((tile.distance, tile.block), 0.0))
            free = multiplied + (self.tile.overhead if pingpong else max(self.tile.overhead, COOPERATIVE_US))
            if gathers or (to_owners and not tile.distance):
                free += write
            elif self.gemm.spans:  # the first rank has the first rows
                left, written = store(cluster, multiplied if pingpong else free, self.peers / self.gemm.ranks)
                arrives = 0.0 if self.arrived else left + latency
                free = max(free + write, written)
                if tile.block * high < self.gemm.rank_rows:
                    free = max(free, arrives) + add + write
            elif tile.distance:
                place = tile.block, tile.column
                left, written = store(cluster, multiplied if pingpong else free, 1)
                free = max(free + write, written)
                arrives = 0.0 if self.arrived else left + latency
                if to_owners:
                    end = max(end, left + costs.stored, arrives + costs.take)
                else:
                    sums[place] = max(sums.get(place, 0.0), arrives)
            elif traits.one_shot:
                link = max(link, free) + self.peers * self.store_us
                arrives = 0.0 if self.arrived else link + costs.flag  # packets are flags, too
                free = max(free, arrives) + add + write
            else:
                free = max(free, sums.get((tile.block, tile.column), 0.0)) + add + write
                if spreads and self.peers:
                    left, free = store(cluster, free, self.peers)
                    end = max(end, left + costs.stored, 0.0 if self.arrived else left + latency + costs.take)
            groups[cluster][group] = free
            end = max(end, free + costs.stored, storers[cluster])
            heapq.heappush(clusters, (multiplied if pingpong else free, cluster))
        return max(end, self.least_us)

    def _piece_us(self) -> float:
        """The time of a piece on the link, where a rank's own pieces do not go."""
        size = min(PIECE_ROWS, self.gemm.rank_rows) * PIECE_BYTES * self.peers / len(self.gemm.pieces.receivers)
        return _link_us(size, self.costs.send_gb_per_s)

    def _operands(self) -> dict[tuple[int, int], float]:
        """When tiles of a block of a shard can be multiplied at the earliest, as far as pieces hold them back."""
        pieces, us = self.gemm.pieces, self._piece_us()
        batch = self.costs.machine.sms
        traits = self.gemm.traits
        high = traits.tile[0] * traits.cluster[0] // PIECE_ROWS  # rows of pieces in a row of clusters
        found: dict[tuple[int, int], float] = {}
        for number in range(pieces.pieces):
            piece = pieces.at(number)
            arrives = self.costs.start + min(pieces.pieces, (number // batch + 1) * batch) * us + self.latency
            rest = (pieces.slices - piece.slice) / pieces.slices * self.multiply_us
            block = piece.distance, piece.row // high
            if self.gemm.spans:  # all shards arrive at the same time
                for row in range(self.gemm.order.blocks):
                    found[0, row] = max(found.get((0, row), 0.0), arrives + rest)
                continue
            if traits.pattern == "a2a+gemm":  # a tile adds the slices of all ranks in turn, behind its own
                block, rest = (0, block[1]), rest * self.peers / self.gemm.ranks
            found[block] = max(found.get(block, 0.0), arrives + rest)
        return found

    def _read_us(self) -> list[float]:
        """The time, us, in which memory and L2 provide what each tile's wave reads.

        Panels that were read last stay in L2. A cluster reads a panel once.
        """
        traits = self.gemm.traits
        row = self.k * BYTES[traits.dtype]
        high, wide = (x * y * row for x, y in zip(traits.tile, traits.cluster, strict=True))
        rate = self.costs.machine.memory * MEMORY_SHARE * 1e3
        own_rows = traits.pattern == "gemm+a2a" or self.gemm.by_columns  # shards differ in columns, else in rows
        cached: dict[tuple[int, ...], int] = {}  # bytes of panels, the least recent first
        found: list[float] = []
        for first in range(0, len(self.order), self.clusters):
            wave = self.order[first : first + self.clusters]
            readers = Counter((0, 0 if own_rows else x.distance, x.block) for x in wave)
            readers.update((1, x.distance if own_rows else 0, x.column) for x in wave)
            panels = {panel: wide if panel[0] else high for panel in readers}
            missing = sum(size for panel, size in panels.items() if panel not in cached)
            from_l2 = sum(size * min(readers[panel], MERGED_READS) for panel, size in panels.items())
            cached = {panel: size for panel, size in cached.items() if panel not in panels} | panels
            while sum(cached.values()) > self.costs.cache:
                del cached[next(iter(cached))]
            found += [max(missing / rate, from_l2 / (L2_GB_PER_S * 1e3))] * len(wave)
        return found
