"""The order of tiles: complete, without cycles, and the same on the host and on the device."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distgemm.gemm.per_tile.order import PieceOrder, TileCluster, TileOrder
from distgemm.gemm.per_tile.params import Order, Pieces

KERNELS = Path(__file__).parents[2] / "distgemm/gemm/kernels"
HOST = """
#include "tile_order.cuh"
using namespace distgemm;
extern "C" void tiles(TileOrder const* order, bool own_first, uint32_t* to) {
  for (uint32_t ticket = 0; ticket < order->clusters(); ++ticket) {
    auto const found = own_first ? order->at<true>(ticket) : order->at<false>(ticket);
    *to++ = found.distance, *to++ = found.block, *to++ = found.column;
  }
}
extern "C" void slices(PieceOrder const* pieces, uint32_t* to) {
  for (uint32_t number = 0; number < (pieces->receivers + 1) * pieces->slices; ++number) {
    auto const found = pieces->slice_of_sum(number);
    *to++ = found.distance, *to++ = found.number;
  }
}
extern "C" void stages(PieceOrder const* pieces, uint32_t depth, uint32_t size, uint32_t* to) {
  for (uint32_t number = 0; number < (pieces->receivers + 1) * depth; ++number) {
    auto const found = pieces->stage_of_sum(depth, size, number);
    *to++ = found.distance, *to++ = found.number;
  }
}
extern "C" void pieces(PieceOrder const* pieces, uint32_t* to) {
  for (uint32_t number = 0; number < pieces->pieces(); ++number) {
    auto const found = pieces->at(number);
    *to++ = found.distance, *to++ = found.row, *to++ = found.slice;
  }
}
"""


@st.composite
def orders(draw: st.DrawFn) -> TileOrder:
    distances = tuple(draw(st.permutations(range(1, draw(st.integers(1, 9))))))
    blocks, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    lead = draw(st.integers(0, blocks * columns))
    return TileOrder(distances, blocks, columns, draw(st.integers(1, 7)), lead, draw(st.booleans()))


@given(orders())
def test_every_tile_has_one_ticket(order: TileOrder) -> None:
    every = {
        TileCluster(distance, block, column)
        for distance in range(order.shards)
        for block in range(order.blocks)
        for column in range(order.columns)
    }
    assert sorted(order) == sorted(every)


@given(orders())
def test_sums_come_before_they_are_added(order: TileOrder) -> None:
    """In any order in which own tiles come later. A gather's would be cyclic."""
    tickets = {tile: ticket for ticket, tile in enumerate(order)}
    late = [tile for tile, ticket in tickets.items() if ticket > tickets[tile._replace(distance=0)]]
    assert bool(late) == (order.own_first and order.lead > 0 and order.shards > 1)


@given(orders())
def test_own_tiles_lead_by_as_many_units(order: TileOrder) -> None:
    units = {order.of_unit(0, unit)[1:]: unit for unit in range(order.units)}
    began: dict[bool, int] = {True: 0, False: 0}  # units whose tiles have begun: own, and those of others
    for distance, block, column in order:
        began[not distance] = max(began[not distance], units[block, column] + 1)
        ahead = began[True] - began[False] if order.own_first else began[False] - began[True]
        assert order.shards == 1 or -1 <= ahead <= order.lead + 1


@given(orders(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_piece_is_sent_once(order: TileOrder, rows: int, slices: int, to_itself: bool) -> None:
    pieces = PieceOrder(order.distances, rows, slices, order.group, to_itself)
    found = [pieces.at(number) for number in range(pieces.pieces)]
    receivers = range(1 - to_itself, order.shards)
    assert sorted(found) == [(d, row, s) for d in receivers for row in range(rows) for s in range(slices)]


@given(orders(), st.integers(1, 5))
def test_slices_of_a_sum_are_added_as_they_are_sent(order: TileOrder, slices: int) -> None:
    """Each once, own ones first. Of one row, all peers send what this rank adds, in the same order."""
    pieces = PieceOrder(order.distances, 1, slices, 1)
    own, others = [], []
    for number in range(order.shards * slices):
        found = pieces.slice_of_sum(number)
        (others if found.distance else own).append(found)
        assert not (others and not found.distance)
    assert own == [(0, number) for number in range(slices)]
    assert others == [(piece.distance, piece.slice) for piece in map(pieces.at, range(pieces.pieces))]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_have_the_same_order(tmp_path: Path) -> None:
    """tile_order.cuh on the host, with the structs that Python passes."""
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute/config.hpp").write_text("#define CUTE_HOST_DEVICE inline\n")
    (tmp_path / "host.cpp").write_text(HOST)
    words = [
        "g++",
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{tmp_path}",
        f"-I{KERNELS}",
        "-o",
        "host.so",
        "host.cpp",
    ]
    subprocess.run(words, cwd=tmp_path, check=True)
    host, chance = ctypes.CDLL(str(tmp_path / "host.so")), random.Random(0)
    for _ in range(80):
        ranks, blocks, columns = chance.randint(1, 9), chance.randint(1, 20), chance.randint(1, 20)
        distances = tuple(chance.sample(range(1, ranks), ranks - 1))
        lead, own_first = chance.randint(0, blocks * columns), chance.random() < 0.5
        order = TileOrder(distances, blocks, columns, chance.randint(1, 9), lead, own_first)
        found = (ctypes.c_uint32 * (3 * order.clusters))()
        host.tiles(ctypes.byref(Order.of(order)), own_first, found)
        assert [tuple(found[i : i + 3]) for i in range(0, len(found), 3)] == list(order)
        for to_itself in (True, False):
            pieces = PieceOrder(distances, blocks, columns, chance.randint(1, 9), to_itself)
            found = (ctypes.c_uint32 * (3 * pieces.pieces))()
            host.pieces(ctypes.byref(Pieces.of(pieces)), found)
            wanted = [pieces.at(number) for number in range(pieces.pieces)]
            assert [tuple(found[i : i + 3]) for i in range(0, len(found), 3)] == wanted
        found = (ctypes.c_uint32 * (2 * ranks * columns))()
        host.slices(ctypes.byref(Pieces.of(pieces)), found)
        added = [pieces.slice_of_sum(number) for number in range(ranks * columns)]
        assert [tuple(found[i : i + 2]) for i in range(0, len(found), 2)] == added
        size = chance.randint(1, 4)  # stages of a slice
        depth = columns * size - chance.randrange(size)
        found = (ctypes.c_uint32 * (2 * ranks * depth))()
        host.stages(ctypes.byref(Pieces.of(pieces)), depth, size, found)
        stages = [(x, stage) for x, at in added for stage in range(at * size, min(at * size + size, depth))]
        assert [tuple(found[i : i + 2]) for i in range(0, len(found), 2)] == stages


@pytest.mark.parametrize("ulp", [-1, 0, 1])
def test_division_by_an_approximate_inverse_is_exact(ulp: int) -> None:
    """divide() of tile_order.cuh, whose inverse is off by one unit in the last place at most."""
    limit = 1 << 18
    for d in [*range(1, 600), *random.Random(ulp).sample(range(600, limit), 2000)]:
        inverse = np.float32(1.0 / d)
        inverse = np.nextafter(inverse, np.float32(ulp * np.inf)) if ulp else inverse
        multiples = np.arange(0, limit, d)
        n = np.concatenate([multiples, multiples + d - 1])
        found = ((n.astype(np.float32) + np.float32(0.5)) * inverse).astype(np.uint32)
        assert (found == n // d).all(), d
