"""A model of per-tile kernels: the time of a replay, from the order of tiles, rates, the link and latencies.

All ranks do the same at the same time, so one rank is simulated: what a peer sends arrives when this rank has sent the
same. Clusters take tickets in order. A tile takes its share of the GPU's rate, and a constant. Stores leave in the
order in which tiles are finished. The warps that send pieces of a shard share the link evenly: a batch of pieces, one
for each SM, arrives together.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from distgemm.gemm.per_tile.bind import SMS, RankGemm
from distgemm.gemm.per_tile.kernel import BYTES, PIECE_BYTES, SUBTILE_BYTES

__all__ = ["Costs", "Prediction", "predict"]

KIB = 1024


@dataclass(frozen=True)
class Costs:
    rates: Mapping[tuple[int, int], float]
    overheads: Mapping[tuple[int, int], float]
    power: Mapping[tuple[int, int], float]
    start: float = 4.0
    stored: float = 1.5
    flag: float = 1.5
    sum_subtile: float = 0.5
    write_subtile: float = 0.1
    take: float = 3.0
    send_gb_per_s: float = 340.0
    store_gb_per_s: float = 360.0
    senders: int = SMS


class Prediction(NamedTuple):
    time: float
    tiles: float
    link: float
    first_wait: float


def predict(gemm: RankGemm, costs: Costs, arrived: bool = False) -> Prediction:
    """arrived: all flags are raised before."""
    t, order, ranks = gemm.traits, gemm.order, gemm.ranks
    pattern = t.pattern
    gathers, spreads = pattern == "ag+gemm", pattern == "gemm+ar"
    size = t.cluster[0] * t.cluster[1]
    count = SMS // size
    main = 2.0 * t.tile[0] * t.tile[1] * gemm.k / (costs.rates[t.tile] * 1e6 / SMS)
    over = costs.overheads[t.tile]
    groups = 2 if t.pingpong else 1
    subtiles = t.part_bytes // SUBTILE_BYTES  # of a warp group
    tile_bytes = t.part_bytes * t.parts * size
    link_us = tile_bytes / (costs.store_gb_per_s * 1e3)
    held = min(1.0, t.epilogue_stages / subtiles)
    write = subtiles * costs.write_subtile
    latency = costs.stored + costs.flag
    begin = costs.start
    link_free = begin
    worst: dict[tuple[int, int], float] = {}
    end = begin
    if gathers and ranks > 1 and not arrived:
        pieces = gemm.pieces
        piece_us = t.tile[0] * PIECE_BYTES / (costs.send_gb_per_s * 1e3)
        total, batch = pieces.pieces, costs.senders
        step = main / pieces.slices
        for number in range(total):
            piece = pieces.at(number)
            at = begin + latency + min(total, (number // batch + 1) * batch) * piece_us
            key = piece.distance, piece.row // t.cluster[0]
            worst[key] = max(worst.get(key, 0.0), at + (pieces.slices - piece.slice) * step)
        end = begin + total * piece_us + costs.stored
        link_free = end
    heap = [(begin, c) for c in range(count)]
    freed = [[begin] * groups for _ in range(count)]
    storer = [begin] * count
    numbers = [0] * count
    sums: dict[tuple[int, int], float] = {}
    results: list[float] = []
    busy = 0.0
    for tile in order:
        ready, c = heapq.heappop(heap)
        g = numbers[c] % groups
        numbers[c] += 1
        start = max(ready, freed[c][g])
        finished = start + main
        if gathers and tile.distance and not arrived:
            finished = max(finished, worst.get((tile.distance, tile.block), 0.0))
        finished += 0.0 if t.pingpong else over
        free = finished + (over if t.pingpong else 0.0)
        if gathers:
            free += write
            end = max(end, free + costs.stored)
        elif tile.distance:
            sent = max(link_free, finished, storer[c]) + link_us
            link_free = sent
            storer[c] = sent + costs.stored
            free = max(free + write, sent - held * link_us)
            key = tile.block, tile.column
            sums[key] = max(sums.get(key, 0.0), 0.0 if arrived else sent + latency)
            end = max(end, sent + costs.stored)
        else:
            if ranks > 1:
                free = max(free, sums[tile.block, tile.column])
            free += (ranks - 1) * subtiles * costs.sum_subtile + write
            if spreads and ranks > 1:
                sent = max(link_free, free, storer[c]) + link_us * (ranks - 1)
                link_free = sent
                storer[c] = sent + costs.stored
                free = max(free, sent - held * link_us * (ranks - 1))
                end = max(end, sent + costs.stored, 0.0 if arrived else sent + latency + costs.take)
            end = max(end, free + costs.stored)
        freed[c][g] = free
        heapq.heappush(heap, (finished if t.pingpong else free, c))
    flop = 2.0 * gemm.m * ranks * gemm.n * gemm.k
    if not (arrived and gathers):
        end = max(end, begin + flop / (costs.power[t.tile] * 1e6))
    return Prediction(end, order.clusters / count * (main + over), link_free - begin, 0.0)
