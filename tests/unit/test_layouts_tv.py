"""Properties of thread-value layouts, against loops over ranks, values and axes."""

import itertools
import math
import re
import sys
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distgemm.layouts import Axis, Modulo, Offset, Swizzle, TVLayout

bounded = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def coordinate_of(number, shape, fastest_first):
    """The coordinate of a number that counts over a shape."""
    coordinate = []
    for extent in shape if fastest_first else shape[::-1]:
        coordinate.append(number % extent)
        number //= extent
    return coordinate if fastest_first else coordinate[::-1]


def apply(function, value):
    if isinstance(function, Offset):
        return value + function.amount
    if isinstance(function, Modulo):
        while value < 0:
            value += function.extent
        while value >= function.extent:
            value -= function.extent
        return value
    flipped = 0
    for bit in range(function.bits):  # shift >= bits here
        flipped += (value >> (function.base + function.shift + bit)) % 2 * 2 ** (function.base + bit)
    return value ^ flipped


def tile_of(tv, rank, value):
    """The tile of one value of one rank, from the definition in TVLayout and Axis."""
    if tv.order:
        value = tv.order[value]
    at = coordinate_of(rank, tv.mesh, fastest_first=False)
    step = coordinate_of(value, tv.values, fastest_first=True)
    tile = []
    for axes in tv.modes:
        position, unit = 0, 1
        for axis in axes:
            index = 0
            for strides, coordinate in ((axis.rank, at), (axis.value, step)):
                if strides != 0:
                    index += sum(stride * c for stride, c in zip(strides, coordinate, strict=True))
            for function in axis.maps:
                index = apply(function, index)
            if not 0 <= index < axis.extent:
                return None
            position += unit * index
            unit *= axis.extent
        tile.append(position)
    return tuple(tile)


def tiles_of(tv):
    return [[tile_of(tv, rank, value) for value in range(math.prod(tv.values))] for rank in range(math.prod(tv.mesh))]


def all_tiles(tv):
    return list(itertools.product(*(range(math.prod(axis.extent for axis in axes)) for axes in tv.modes)))


def takers(tv, tile):
    return tuple((r, v) for r, of_rank in enumerate(tiles_of(tv)) for v, found in enumerate(of_rank) if found == tile)


swizzles = st.sampled_from([Swizzle(1, 0, 1), Swizzle(2, 0, 2), Swizzle(1, 1, 2)])
functions = st.one_of(st.builds(Offset, st.integers(-3, 3)), st.builds(Modulo, st.integers(1, 4)), swizzles)


@st.composite
def tv_layouts(draw, most_modes=3):
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    values = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))

    def strides(shape):
        return draw(st.one_of(st.just(0), st.tuples(*(st.integers(-2, 3) for _ in shape))))

    def axis():
        maps = tuple(draw(st.lists(functions, max_size=2)))
        return Axis(draw(st.integers(1, 4)), strides(mesh), strides(values), maps)

    modes = tuple(
        tuple(axis() for _ in range(draw(st.integers(1, 2)))) for _ in range(draw(st.integers(1, most_modes)))
    )
    size = math.prod(values)
    order = tuple(draw(st.one_of(st.just(()), st.permutations(range(size)))))
    return TVLayout(mesh, values, modes, order)


def ring(n):
    """Rank r takes row r and, in iteration i, column (r + i) mod n."""
    return TVLayout((n,), (n,), ((Axis(n, 1),), (Axis(n, 1, 1, (Modulo(n),)),)))


@bounded
@given(tv_layouts())
def test_table_tiles_and_calls_are_the_definition(tv):
    expected = tiles_of(tv)
    assert (tv.ranks, tv.size) == (len(expected), len(expected[0]))
    assert [list(of_rank) for of_rank in tv.tiles] == expected
    assert [[tv(rank, value) for value in range(tv.size)] for rank in range(tv.ranks)] == expected
    none = [-1] * len(tv.modes)
    assert tv.table.tolist() == [[list(tile) if tile else none for tile in of_rank] for of_rank in expected]
    assert tv.grid == tuple(math.prod(axis.extent for axis in axes) for axes in tv.modes)


def test_tiles_are_tuples_of_plain_integers():
    assert ring(2).tiles == (((0, 0), (0, 1)), ((1, 1), (1, 0)))
    assert type(ring(2)(0, 1)[1]) is int


def test_the_table_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        ring(2).table[0] = 1


def test_ranks_are_row_major_on_a_2d_mesh():
    tv = TVLayout((2, 3), (1,), ((Axis(2, (1, 0)),), (Axis(3, (0, 1)),)))
    assert [tv(rank, 0) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_ranks_are_row_major_on_a_3d_mesh():
    tv = TVLayout((2, 3, 4), (1,), ((Axis(2, (1, 0, 0)),), (Axis(3, (0, 1, 0)),), (Axis(4, (0, 0, 1)),)))
    assert [tv(rank, 0) for rank in range(24)] == list(itertools.product(range(2), range(3), range(4)))


def test_the_first_mode_of_the_values_is_the_fastest():
    tv = TVLayout((1,), (2, 3), ((Axis(2, 0, (1, 0)),), (Axis(3, 0, (0, 1)),)))
    assert tv.tiles[0] == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))


def test_the_first_axis_of_a_mode_is_the_fastest():
    # Row 2 * (value) + rank: two ranks alternate over the rows.
    tv = TVLayout((2,), (3,), ((Axis(2, 1), Axis(3, 0, 1)),))
    assert tv.grid == (6,)
    assert tv.tiles == (((0,), (2,), (4,)), ((1,), (3,), (5,)))


def test_a_value_outside_the_grid_has_no_tile():
    # A shift without a wrap: the last rank has no neighbour above.
    shift = TVLayout((3,), (1,), ((Axis(3, 1, 0, (Offset(1),)),),))
    assert shift.tiles == (((1,),), ((2,),), (None,))
    below = TVLayout((3,), (1,), ((Axis(3, 1, 0, (Offset(-1),)),), (Axis(3, 1),)))
    assert below.tiles == ((None,), ((0, 1),), ((1, 2),))
    assert below.table[0, 0].tolist() == [-1, -1]


def test_an_index_outside_its_axis_does_not_reach_the_next_axis():
    # Index 2 on an axis of 2 is not index 0 of the next step on a slower axis.
    tv = TVLayout((1,), (3,), ((Axis(2, 0, 1), Axis(2)),))
    assert tv.tiles == (((0,), (1,), None),)


@bounded
@given(tv_layouts())
def test_inverse_and_holders_are_the_preimage(tv):
    for tile in all_tiles(tv):
        expected = takers(tv, tile)
        assert tv.inverse(tile) == expected
        assert tv.inverse(list(tile)) == expected
        assert tv.holders(tile) == tuple(sorted({rank for rank, _ in expected}))


def test_a_rank_that_takes_a_tile_twice_holds_it_once():
    tv = TVLayout((2,), (3,), ((Axis(2, 1),),))
    assert tv.inverse((1,)) == ((1, 0), (1, 1), (1, 2))
    assert tv.holders((1,)) == (1,)


@pytest.mark.parametrize("tile", [(-1, 0), (3, 0), (0, 3), (0,), (0, 0, 0), ()])
def test_a_tile_outside_the_grid_is_refused_by_name(tile):
    tv = ring(3)
    for method in (tv.inverse, tv.holders):
        with pytest.raises(ValueError, match="tile") as error:
            method(tile)
        assert str(tile) in str(error.value)
        assert "(3, 3)" in str(error.value)


@bounded
@given(tv_layouts(most_modes=2))
def test_covers_and_is_partition_count_the_takers_of_each_tile(tv):
    counts = [len(takers(tv, tile)) for tile in all_tiles(tv)]
    assert tv.covers() == all(count >= 1 for count in counts)
    assert tv.is_partition() == all(count == 1 for count in counts)


def test_covers_and_is_partition_tell_a_ring_from_a_broadcast_and_a_diagonal():
    assert ring(4).covers()
    assert ring(4).is_partition()
    broadcast = TVLayout((2,), (3,), ((Axis(3, 0, 1),),))
    assert broadcast.covers()
    assert not broadcast.is_partition()
    diagonal = TVLayout((3,), (1,), ((Axis(3, 1),), (Axis(3, 1),)))
    assert not diagonal.covers()
    assert not diagonal.is_partition()


@bounded
@given(tv_layouts(), st.data())
def test_reorder_moves_the_values_and_keeps_the_tiles(tv, data):
    before = tiles_of(tv)
    first = data.draw(st.permutations(range(tv.size)))
    once = tv.reorder(first)
    assert [list(of_rank) for of_rank in once.tiles] == [[of_rank[i] for i in first] for of_rank in before]
    second = data.draw(st.permutations(range(tv.size)))
    twice = once.reorder(second)
    assert [list(of_rank) for of_rank in twice.tiles] == [[of_rank[first[i]] for i in second] for of_rank in before]
    back = sorted(range(tv.size), key=lambda i: first[i])
    assert once.reorder(back).tiles == tv.tiles
    assert (once.covers(), once.is_partition()) == (tv.covers(), tv.is_partition())
    assert (once.mesh, once.values, once.modes) == (tv.mesh, tv.values, tv.modes)


def test_the_order_names_the_number_that_each_value_takes():
    tv = TVLayout((1,), (3,), ((Axis(3, 0, 1),),), order=(2, 0, 1))
    assert tv.tiles == (((2,), (0,), (1,)),)
    assert tv.reorder((2, 0, 1)).order == (1, 2, 0)


@pytest.mark.parametrize("order", [(0, 1), (0, 0, 1), (1, 2, 3), (0, 1, -1), (0, 1, 2, 3), (0, 1, 2, 2), (0, 1, "2")])
def test_an_order_that_is_no_permutation_is_refused_by_name(order):
    tv = TVLayout((1,), (3,), ((Axis(3, 0, 1),),))
    for refused in (
        lambda: replace(tv, order=order),
        lambda: tv.reorder(order),
        lambda: tv.reorder((2, 0, 1)).reorder(order),
    ):
        with pytest.raises(ValueError, match=r"permutation of the integers 0\.\.2") as error:
            refused()
        assert str(order) in str(error.value)


def test_reordering_by_nothing_is_refused():
    tv = TVLayout((1,), (3,), ((Axis(3, 0, 1),),), order=(2, 0, 1))
    with pytest.raises(ValueError, match="permutation"):
        tv.reorder(())


def test_an_order_that_cannot_be_hashed_is_refused():
    with pytest.raises(ValueError, match="tuple"):
        TVLayout((1,), (3,), ((Axis(3, 0, 1),),), order=[2, 0, 1])


def lines_of(block):
    """Cells of a printed block: two spaces or more between cells, one between the pairs of a cell."""
    return [re.split(r" {2,}", line) for line in block.split("\n")]


@bounded
@given(tv_layouts())
def test_every_printed_cell_shows_exactly_its_pairs(tv):
    text = str(tv)
    assert all(line == line.rstrip() for line in text.split("\n"))
    blocks = text.split("\n\n")
    grid = tv.grid if len(tv.grid) > 1 else (1, *tv.grid)
    rests = list(itertools.product(*(range(extent) for extent in grid[2:])))
    assert len(blocks) == len(rests)
    for block, rest in zip(blocks, rests, strict=True):
        if len(rests) > 1:
            title, block = block.split("\n", 1)
            assert title == f"[:, :, {', '.join(map(str, rest))}]"
        cells = lines_of(block)
        assert [len(line) for line in cells] == [grid[1]] * grid[0]
        for row, column in itertools.product(range(grid[0]), range(grid[1])):
            tile = (row, column, *rest) if len(tv.grid) > 1 else (column,)
            pairs = [f"{rank}:{value}" for rank, value in takers(tv, tile)]
            assert cells[row][column] == (" ".join(pairs) or ".")


@bounded
@given(tv_layouts())
def test_printed_columns_are_aligned(tv):
    for block in str(tv).split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("[")]
        starts = [[match.start() for match in re.finditer(r"(?:(?<=  )|^)\S", line)] for line in lines]
        assert all(found == starts[0] for found in starts)


@bounded
@given(tv_layouts(), st.data())
def test_grids_show_any_two_modes(tv, data):
    modes = range(len(tv.grid))
    rows, columns = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))
    if rows == columns or rows not in modes or columns not in modes:
        with pytest.raises(ValueError, match=r"rows|columns"):
            list(tv.grids(rows, columns))
        return
    seen = 0
    for rest, cells in tv.grids(rows, columns):
        for row, column in itertools.product(range(tv.grid[rows]), range(tv.grid[columns])):
            left = list(rest)
            tile = tuple(row if m == rows else column if m == columns else left.pop(0) for m in modes)
            assert cells[row][column].replace(".", "").split() == [f"{r}:{v}" for r, v in takers(tv, tile)]
            seen += 1
    assert seen == math.prod(tv.grid)


def test_a_ring_prints_as_a_grid():
    assert str(ring(3)) == "0:0  0:1  0:2\n1:2  1:0  1:1\n2:1  2:2  2:0"


def test_empty_and_shared_tiles_print_in_a_grid_of_one_mode_too():
    shared = TVLayout((2,), (2,), ((Axis(3, 0, 2),),))
    assert str(shared) == "0:0 1:0  .        0:1 1:1"


@bounded
@given(tv_layouts(), tv_layouts())
def test_equal_layouts_have_equal_hashes(a, b):
    twin = TVLayout(a.mesh, a.values, a.modes, a.order)
    assert twin is not a
    assert twin == a
    assert hash(twin) == hash(a)
    assert {a: 1}[twin] == 1
    assert (a == b) == (repr(a) == repr(b))


def test_layouts_that_differ_in_one_field_are_not_equal():
    tv = ring(2)
    others = [
        replace(tv, mesh=(1,)),
        replace(tv, values=(1,)),
        replace(tv, modes=tv.modes[::-1]),
        replace(tv, order=(1, 0)),
        replace(tv, modes=(tv.modes[0], (Axis(2, 1, 1, (Offset(1),)),))),
    ]
    assert len({tv, *others}) == 6


@dataclass(frozen=True)
class Counted:
    """The identity, counting how often it is hashed."""

    hashed: list = field(default_factory=list)

    def __call__(self, value):
        return value

    def __hash__(self):
        self.hashed.append(1)
        return 7


def test_the_hash_is_computed_once():
    counted = Counted()
    tv = TVLayout((2,), (2,), ((Axis(2, 1, 0, (counted,)),),))
    counted.hashed.clear()  # what the axis has looked at
    assert hash(tv) == hash(tv) == hash(tv)
    assert len(counted.hashed) == 1


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), ("2",), 4, None, ((2, 2), 2)])
@pytest.mark.parametrize("what", ["mesh", "values"])
def test_a_mesh_or_values_that_are_not_positive_integers_are_refused_by_name(what, shape):
    with pytest.raises(ValueError, match=what) as error:
        TVLayout(**{"mesh": (2,), "values": (2,), "modes": ((Axis(2),),), what: shape})
    assert repr(shape) in str(error.value)


def test_a_layout_without_modes_is_refused():
    with pytest.raises(ValueError, match="mode"):
        TVLayout((2,), (2,), ())


@pytest.mark.parametrize("extent", [0, -1, 2.0, None])
def test_an_axis_without_extent_is_refused_by_name(extent):
    with pytest.raises(ValueError, match=f"extent.*{extent}"):
        Axis(extent)


@pytest.mark.parametrize("strides", [(1,), (1, 2, 3), 1, (), (1, 0.5), ("1", 2), (1, None)])
@pytest.mark.parametrize("what", ["rank", "value"])
def test_strides_that_do_not_match_are_refused_by_name(what, strides):
    with pytest.raises(ValueError, match="mesh|rank" if what == "rank" else "value") as error:
        TVLayout((2, 3), (4, 5), ((Axis(2), Axis(2, **{what: strides})),))
    assert repr(strides) in str(error.value)
    if set(map(type, strides if isinstance(strides, tuple) else [strides])) <= {int}:
        assert repr((2, 3) if what == "rank" else (4, 5)) in str(error.value)


def test_a_stride_of_0_stands_for_every_mode():
    zeros = TVLayout((2, 3), (4, 5), ((Axis(7, (0, 0), (0, 0)),),))
    short = TVLayout((2, 3), (4, 5), ((Axis(7),),))
    assert zeros.tiles == short.tiles


@pytest.mark.parametrize(
    ("rank", "value", "name"), [(-1, 0, "rank"), (3, 0, "rank"), (0, -1, "value"), (0, 3, "value")]
)
def test_a_rank_or_value_out_of_range_is_refused_by_name(rank, value, name):
    with pytest.raises(ValueError, match=rf"^{name} is an integer from 0 to 2, got {rank or value}"):
        ring(3)(rank, value)


def test_512_ranks_with_512_values_are_quick():
    """Tiles come from one table: a handful of calls each at most, and no time is measured, which others share."""
    tv, calls = ring(512), 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = tv.tiles
    finally:
        sys.setprofile(before)
    assert len(found) == 512 and calls < 4 * 512 * 512
    assert tv(511, 1) == (511, 0)
    assert tv.is_partition()
