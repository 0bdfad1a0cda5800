"""Properties of the shape:stride algebra, against nested loops over plain integers."""

import itertools
import math

import pycute
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distgemm.layouts import (
    Layout,
    coalesce,
    complement,
    composition,
    flatten,
    left_inverse,
    logical_divide,
    logical_product,
    product,
    right_inverse,
)

bounded = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.filter_too_much],
)


def leaves(value):
    if isinstance(value, int):
        return [value]
    return [leaf for part in value for leaf in leaves(part)]


def evaluate(layout, index):
    """The value at a colexicographic index, from the definition."""
    total = 0
    for extent, stride in zip(leaves(layout.shape), leaves(layout.stride), strict=True):
        total += (index % extent) * stride
        index //= extent
    return total


def values_of(layout):
    return [evaluate(layout, index) for index in range(math.prod(leaves(layout.shape)))]


def is_linear(shape, values):
    """Whether some strides for this shape's leaves give these values."""
    extents = leaves(shape)
    position, strides = 1, []
    for extent in extents:
        strides.append(values[position] if extent > 1 else 0)
        position *= extent
    return values == values_of(Layout(tuple(extents), tuple(strides)))


extents = st.integers(1, 5)
shapes = st.one_of(
    extents,
    st.lists(st.one_of(extents, st.tuples(extents, st.integers(1, 3))), min_size=1, max_size=3).map(tuple),
)


@st.composite
def layouts(draw, lowest=-4, highest=13):
    def strides(shape):
        if isinstance(shape, int):
            return draw(st.integers(lowest, highest))
        return tuple(strides(part) for part in shape)

    shape = draw(shapes)
    return Layout(shape, strides(shape))


@st.composite
def compact(draw, extents=extents, most=4):
    """A layout onto 0..size-1, its modes in any order."""
    shape = draw(st.lists(extents, min_size=1, max_size=most))
    strides, stride = [0] * len(shape), 1
    for mode in draw(st.permutations(range(len(shape)))):
        strides[mode], stride = stride, stride * shape[mode]
    return Layout(tuple(shape), tuple(strides))


@st.composite
def spaced(draw):
    """An injective layout whose strides divide each other, and a size that it divides."""
    modes, stride = [], 1
    for _ in range(draw(st.integers(1, 3))):
        stride *= draw(st.integers(1, 3))
        extent = draw(st.integers(1, 4))
        modes.append((extent, stride))
        stride *= extent
    shape, strides = zip(*draw(st.permutations(modes)), strict=True)
    return Layout(shape, strides), stride * draw(st.integers(1, 3))


# Layout


@bounded
@given(layouts())
def test_table_and_calls_are_the_inner_product_with_the_strides(layout):
    expected = values_of(layout)
    assert layout.size() == len(expected)
    assert layout.table.tolist() == expected
    assert [layout(index) for index in range(layout.size())] == expected
    assert Layout(layout.shape)(layout.size() - 1) == layout.size() - 1


@bounded
@given(layouts())
def test_a_layout_takes_coordinates_of_its_top_level_modes(layout):
    assume(isinstance(layout.shape, tuple))
    sizes = [math.prod(leaves(part)) for part in layout.shape]
    # The first mode is the fastest: read itertools' coordinates backwards.
    coordinates = [c[::-1] for c in itertools.product(*(range(size) for size in reversed(sizes)))]
    assert [layout(*coordinate) for coordinate in coordinates] == values_of(layout)
    for coordinate in coordinates:
        assert layout(*coordinate) == sum(layout[mode](index) for mode, index in enumerate(coordinate))


@bounded
@given(layouts(lowest=-9))
def test_cosize_is_the_width_of_the_codomain(layout):
    assert layout.cosize() == max(values_of(layout)) - min(values_of(layout)) + 1


def test_cosize_counts_values_below_zero():
    assert Layout((4, 3), (-1, 2)).cosize() == 8
    assert Layout(5, -2).cosize() == 9
    assert Layout((3, 4), (0, 0)).cosize() == 1


@bounded
@given(layouts(), layouts())
def test_equal_layouts_have_equal_hashes(a, b):
    twin = Layout(a.shape, a.stride)
    assert twin is not a
    assert twin == a
    assert hash(twin) == hash(a)
    assert {a: 1}[twin] == 1
    assert (a == b) == ((a.shape, a.stride) == (b.shape, b.stride))


def test_equality_looks_at_shape_and_stride():
    assert Layout((2, 3), (1, 2)) == Layout((2, 3))
    assert Layout((2, 3)) != Layout((3, 2))
    assert Layout((2, 3)) != Layout((2, 3), (3, 1))
    assert Layout((2, 3)) != Layout(6)
    assert Layout(6) == pycute.Layout(6)
    assert Layout(6) != (6, 1)
    assert len({Layout((2, 3)), Layout((2, 3), (1, 2)), Layout(6)}) == 2


def test_sublayouts_are_hashable_layouts():
    layout = Layout((2, (3, 4)), (12, (4, 1)))
    assert layout[1] == Layout((3, 4), (4, 1))
    assert isinstance(layout[1], Layout)
    assert isinstance(layout(1, None), Layout)
    assert layout(1, None).table.tolist() == [evaluate(layout[1], index) for index in range(12)]


def test_the_table_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        Layout(4).table[0] = 1


@pytest.mark.parametrize("shape", [0, -1, 2.0, "2", None, (), (2, ()), (2, 0), (2, (3, -1)), [2, 3], (2, None)])
def test_a_shape_that_is_not_positive_integers_is_refused_by_name(shape):
    with pytest.raises(ValueError, match="shape") as error:
        Layout(shape)
    assert repr(shape) in str(error.value)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        (2, (1,)),
        ((2,), 1),
        ((2, 3), (1, 2, 3)),
        ((2, (3, 4)), (1, 2, 3)),
        ((2, 3), (1, 0.5)),
        (4, "1"),
        ((2, 3), [1, 2]),
    ],
)
def test_a_stride_of_another_profile_is_refused_by_name(shape, stride):
    with pytest.raises(ValueError, match="stride") as error:
        Layout(shape, stride)
    assert repr(shape) in str(error.value)
    assert repr(stride) in str(error.value)


@bounded
@given(shapes)
def test_flatten_and_product_follow_the_leaves(shape):
    assert flatten(shape) == tuple(leaves(shape))
    assert product(shape) == math.prod(leaves(shape))


def test_the_empty_tuple_has_no_leaves_and_product_1():
    assert flatten(()) == ()
    assert product(()) == 1


# coalesce


@bounded
@given(layouts())
def test_coalesce_keeps_the_function_and_merges_what_can_be_merged(layout):
    result = coalesce(layout)
    assert values_of(result) == values_of(layout)
    modes = list(zip(leaves(result.shape), leaves(result.stride), strict=True))
    assert len(modes) == 1 or all(extent > 1 for extent, _ in modes)
    assert all(e * s != following for (e, s), (_, following) in itertools.pairwise(modes))


# composition


@bounded
@given(layouts(), layouts(lowest=-2, highest=6))
def test_composition_is_the_composed_function_or_a_value_error(a, b):
    inner = values_of(b)
    inside = min(inner) >= 0 and max(inner) < a.size()
    composed = [evaluate(a, index) for index in inner] if inside else None
    try:
        result = composition(a, b)
    except ValueError:
        assert composed is None or not is_linear(b.shape, composed)
    else:
        assert values_of(result) == composed


@bounded
@given(compact(), st.data())
def test_composition_with_small_inner_layouts_is_the_composed_function_or_a_value_error(a, data):
    # Inner layouts that stay inside A's domain, where pycute's divisibility decides.
    first = data.draw(st.integers(1, a.size()))
    step = data.draw(st.integers(1, max(1, (a.size() - 1) // max(1, first - 1))))
    b = Layout((first, 1), (step, data.draw(st.integers(-3, 3))))
    composed = [evaluate(a, index) for index in values_of(b)]
    try:
        result = composition(a, b)
    except ValueError:
        assert not is_linear(b.shape, composed)
    else:
        assert values_of(result) == composed
        assert values_of(result[0]) == composed


powers = st.sampled_from([1, 2, 4])


@bounded
@given(compact(powers), compact(powers))
def test_layouts_of_powers_of_two_compose(a, b):
    assume(b.size() <= a.size())
    result = composition(a, b)
    assert values_of(result) == [evaluate(a, index) for index in values_of(b)]
    # Mode by mode too: the result has B's modes.
    for mode in range(len(b)):
        assert values_of(result[mode]) == [evaluate(a, index) for index in values_of(b[mode])]


@pytest.mark.parametrize("b", [Layout(4, -2), Layout((2, 2), (2, -1)), Layout(33, 1), Layout(5, 8)])
def test_an_inner_layout_that_leaves_the_domain_is_refused(b):
    a = Layout((4, 8), (8, 1))
    with pytest.raises(ValueError, match=r"leave A's domain 0\.\.31"):
        composition(a, b)


def test_negative_strides_of_the_outer_layout_compose():
    a = Layout((4, 8), (-8, -1))
    assert values_of(composition(a, Layout(8, 4))) == [0, -1, -2, -3, -4, -5, -6, -7]
    assert values_of(composition(a, Layout((2, 4), (2, 4)))) == [0, -16, -1, -17, -2, -18, -3, -19]


def test_a_composed_function_that_is_not_linear_is_refused():
    a, b = Layout((4, 3), (3, 1)), Layout(4, 3)
    assert [evaluate(a, index) for index in values_of(b)] == [0, 9, 7, 5]
    with pytest.raises(ValueError, match=r"\(4, 3\):\(3, 1\), 4:3"):
        composition(a, b)


def test_shapes_that_do_not_divide_compose_where_the_function_is_linear():
    # pycute refuses 3 steps in a mode of 8; they stay inside that mode.
    assert values_of(composition(Layout((8, 2), (2, 1)), Layout(3, 3))) == [0, 6, 12]
    nested = Layout((2, (3, 1)), (3, (1, 5)))
    assert composition(Layout((8, 2), (2, 1)), nested).shape == nested.shape
    assert values_of(composition(Layout((8, 2), (2, 1)), nested)) == [0, 6, 2, 8, 4, 10]


# complement


@bounded
@given(layouts(), st.integers(1, 40))
def test_complement_reaches_the_rest_or_is_a_value_error(layout, size):
    try:
        result = complement(layout, size)
    except ValueError:
        return
    taken, rest = set(values_of(layout)), values_of(result)
    sums = [value + step for value in taken for step in rest]
    assert set(range(size)) <= set(sums)
    assert len(sums) == len(set(sums))
    assert taken & set(rest) == {0}


@bounded
@given(spaced())
def test_complement_of_a_dividing_layout_completes_it_exactly(case):
    layout, size = case
    result = complement(layout, size)
    assert sorted(v + r for v in values_of(layout) for r in values_of(result)) == list(range(size))


def test_complement_that_leaves_holes_is_refused():
    # 0, 1, 3, 4 cannot be moved onto 2.
    with pytest.raises(ValueError, match=r"complement\(\(2, 2\):\(1, 3\), 6\)"):
        complement(Layout((2, 2), (1, 3)), 6)
    with pytest.raises(ValueError, match="complement"):
        complement(Layout(4, -1), 8)
    with pytest.raises(ValueError, match="complement"):
        complement(Layout((2, 2), (1, 1)), 8)


# inverses


@bounded
@given(layouts())
def test_right_inverse_is_undone_by_the_layout(layout):
    result = right_inverse(layout)
    assert [evaluate(layout, index) for index in values_of(result)] == list(range(result.size()))


@bounded
@given(compact())
def test_compact_layouts_have_both_inverses_in_full(layout):
    for result in (right_inverse(layout), left_inverse(layout)):
        assert result.size() == layout.size()
        assert [evaluate(layout, index) for index in values_of(result)] == list(range(layout.size()))
        assert [evaluate(result, value) for value in values_of(layout)] == list(range(layout.size()))


@bounded
@given(layouts(lowest=-1))
def test_left_inverse_undoes_the_layout_or_is_a_value_error(layout):
    expected = values_of(layout)
    try:
        result = left_inverse(layout)
    except ValueError:
        return
    assert len(set(expected)) == len(expected)
    assert min(expected) >= 0
    assert max(expected) < result.size()
    assert [evaluate(result, value) for value in expected] == list(range(len(expected)))


@bounded
@given(spaced())
def test_dividing_layouts_have_a_left_inverse(case):
    layout, _ = case
    result = left_inverse(layout)
    assert [evaluate(result, value) for value in values_of(layout)] == list(range(layout.size()))


@pytest.mark.parametrize("layout", [Layout(2, 0), Layout((2, 3), (1, 1)), Layout(3, -1), Layout((2, 2), (1, 0))])
def test_a_layout_that_is_not_injective_or_leaves_0_has_no_left_inverse(layout):
    with pytest.raises(ValueError, match="left_inverse"):
        left_inverse(layout)


# divide and product


@bounded
@given(layouts(lowest=-3), layouts(lowest=0, highest=6))
def test_logical_divide_splits_into_the_tile_and_the_rest_or_is_a_value_error(a, b):
    try:
        result = logical_divide(a, b)
    except ValueError:
        return
    assert len(result) == 2
    assert values_of(result[0]) == [evaluate(a, index) for index in values_of(b)]
    # No value of A is lost.
    assert set(values_of(result)) == set(values_of(a))


@bounded
@given(compact(powers), compact(powers, most=2))
def test_logical_divide_of_powers_of_two_has_each_value_once(a, b):
    assume(b.size() <= a.size())
    result = logical_divide(a, b)
    assert values_of(result[0]) == [evaluate(a, index) for index in values_of(b)]
    assert sorted(values_of(result)) == sorted(values_of(a))


def test_logical_divide_by_a_tile_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="composition"):
        logical_divide(Layout(6), Layout(4))


@bounded
@given(spaced(), layouts(lowest=0, highest=6))
def test_logical_product_repeats_the_layout_or_is_a_value_error(case, b):
    a, _ = case
    try:
        result = logical_product(a, b)
    except ValueError:
        return
    assert len(result) == 2
    assert result[0] == a
    tiles = values_of(result[1])
    assert [result(i, j) for j in range(len(tiles)) for i in range(a.size())] == [
        value + step for step in tiles for value in values_of(a)
    ]
    # The repetitions are as different as the values of B, and never touch.
    order = values_of(b)
    assert [[x == y for x in tiles] for y in tiles] == [[x == y for x in order] for y in order]
    sums = [value + step for value in values_of(a) for step in set(tiles)]
    assert len(sums) == len(set(sums))


@bounded
@given(compact(), compact(most=2))
def test_logical_product_of_compact_layouts_walks_b_in_units_of_a(a, b):
    result = logical_product(a, b)
    assert values_of(result[0]) == values_of(a)
    assert values_of(result[1]) == [a.size() * value for value in values_of(b)]


def test_logical_product_over_negative_strides_is_refused():
    with pytest.raises(ValueError, match="leave A's domain"):
        logical_product(Layout(4), Layout(3, -1))


# No result of pycute is taken on trust.


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("coalesce", lambda: coalesce(Layout((2, 3)))),
        ("complement", lambda: complement(Layout(2, 2), 8)),
        ("right_inverse", lambda: right_inverse(Layout((2, 3), (3, 1)))),
        ("left_inverse", lambda: left_inverse(Layout((2, 3), (3, 1)))),
    ],
)
@pytest.mark.parametrize("wrong", [pycute.Layout(5, 1), pycute.Layout(6, 2), pycute.Layout(0, 1), pycute.Layout(8, 1)])
def test_a_wrong_result_of_pycute_is_a_value_error(monkeypatch, name, call, wrong):
    monkeypatch.setattr(pycute, name, lambda *args: wrong)
    with pytest.raises(ValueError, match=name):
        call()


def test_a_wrong_composition_of_pycute_is_not_returned(monkeypatch):
    monkeypatch.setattr(pycute, "composition", lambda *args: pycute.Layout(4, 1))
    assert composition(Layout((4, 8), (8, 1)), Layout(4, 4)) == Layout(4, 1)
    assert composition(Layout((4, 8), (8, 1)), Layout(4, 8)) == Layout(4, 2)
    with pytest.raises(ValueError, match="pycute gives 4:1"):
        composition(Layout((4, 8), (8, 1)), Layout(4, 3))
