"""The order of tiles: complete, without cycles, and the same on the host and on the device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distgemm.gemm.per_tile.order import PieceOrder, TileCluster, TileOrder


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
        for distance in range(order.ranks)
        for block in range(order.blocks)
        for column in range(order.columns)
    }
    assert sorted(order) == sorted(every)


@given(orders())
def test_sums_come_before_they_are_added(order: TileOrder) -> None:
    """In any order in which own tiles come later. A gather's would be cyclic."""
    tickets = {tile: ticket for ticket, tile in enumerate(order)}
    late = [tile for tile, ticket in tickets.items() if ticket > tickets[tile._replace(distance=0)]]
    assert bool(late) == (order.own_first and order.lead > 0 and order.ranks > 1)


@given(orders())
def test_own_tiles_lead_by_as_many_units(order: TileOrder) -> None:
    units = {order.of_unit(0, unit)[1:]: unit for unit in range(order.units)}
    began: dict[bool, int] = {True: 0, False: 0}  # units whose tiles have begun: own, and those of others
    for distance, block, column in order:
        began[not distance] = max(began[not distance], units[block, column] + 1)
        ahead = began[True] - began[False] if order.own_first else began[False] - began[True]
        assert order.ranks == 1 or -1 <= ahead <= order.lead + 1


@given(orders(), st.integers(1, 5), st.integers(1, 4))
def test_every_piece_is_sent_once(order: TileOrder, rows: int, slices: int) -> None:
    pieces = PieceOrder(order.distances, rows, slices, order.group)
    found = [pieces.at(number) for number in range(pieces.pieces)]
    assert sorted(found) == [(d, row, s) for d in range(1, order.ranks) for row in range(rows) for s in range(slices)]
