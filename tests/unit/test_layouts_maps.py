"""Properties of the maps on top of a layout, against arithmetic on plain integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distgemm.layouts import ComposedLayout, Layout, Modulo, Offset, Swizzle

bounded = settings(derandomize=True, database=None, deadline=None, max_examples=200)

numbers = st.integers(-5000, 5000)


def wrap(value, extent):
    """Walk in steps of extent into 0..extent-1."""
    while value < 0:
        value += extent
    while value >= extent:
        value -= extent
    return value


def swizzle(value, bits, base, shift):
    """Bit by bit, from CuTe's definition: bit i of the source field flips bit i of the target field."""
    source, target = (base + shift, base) if shift >= 0 else (base, base - shift)
    result = value
    for bit in range(bits):
        if (value >> (source + bit)) % 2 == 1:
            result += -(2 ** (target + bit)) if (value >> (target + bit)) % 2 == 1 else 2 ** (target + bit)
    return result


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 3))
    distance = draw(st.integers(bits, 5))
    return Swizzle(bits, draw(st.integers(0, 3)), draw(st.sampled_from([distance, -distance])))


maps = st.one_of(st.builds(Offset, st.integers(-9, 9)), st.builds(Modulo, st.integers(1, 9)), swizzles())


def apply(function, value):
    if isinstance(function, Offset):
        return value + function.amount
    if isinstance(function, Modulo):
        return wrap(value, function.extent)
    return swizzle(value, function.bits, function.base, function.shift)


@bounded
@given(maps, st.lists(numbers, max_size=5))
def test_maps_take_an_integer_or_an_array(function, values):
    expected = [apply(function, value) for value in values]
    assert [function(value) for value in values] == expected
    given_array = np.array(values, dtype=np.int64)
    assert function(given_array).tolist() == expected
    assert given_array.tolist() == values


@bounded
@given(numbers, st.integers(1, 64))
def test_modulo_lies_in_the_ring_for_negative_values_too(value, extent):
    assert Modulo(extent)(value) == wrap(value, extent)
    assert 0 <= Modulo(extent)(value) < extent


def test_modulo_of_a_step_backwards_is_the_last_of_the_ring():
    assert Modulo(8)(-1) == 7
    assert Modulo(8)(np.array([-1, -8, -9])).tolist() == [7, 0, 7]
    assert Modulo(1)(-3) == 0


@bounded
@given(numbers, st.integers(-64, 64))
def test_offset_adds(value, amount):
    assert Offset(amount)(value) - value == amount


@bounded
@given(swizzles(), numbers)
def test_swizzle_flips_the_bits_that_cute_flips(function, value):
    assert function(value) == swizzle(value, function.bits, function.base, function.shift)


@bounded
@given(swizzles())
def test_swizzle_is_a_permutation_and_its_own_inverse(function):
    size = 2 ** (function.bits + function.base + abs(function.shift))
    assert sorted(function(value) for value in range(size)) == list(range(size))
    assert [function(function(value)) for value in range(size)] == list(range(size))


def test_swizzle_moves_the_field_down_for_a_positive_shift_and_up_for_a_negative_one():
    assert Swizzle(2, 1, 3)(0b110000) == 0b110110
    assert Swizzle(2, 1, -3)(0b000110) == 0b110110
    assert Swizzle(0, 0, 0)(13) == 13


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_rank_xor_iteration_is_a_swizzle_and_a_wrap(bits):
    n = 2**bits
    layout = ComposedLayout(Layout((n, n), (1, n)), Swizzle(bits, 0, bits), Modulo(n))
    for iteration in range(n):
        for rank in range(n):
            assert layout(rank, iteration) == swizzle(rank + n * iteration, bits, 0, bits) % n == rank ^ iteration
    # In every iteration the ranks take all tiles, in every rank the iterations do.
    table = layout.table.reshape(n, n)
    for line in (*table, *table.T):
        assert sorted(line.tolist()) == list(range(n))


@bounded
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-5, 9)), min_size=1, max_size=3),
    st.lists(maps, max_size=3),
)
def test_composed_layout_applies_its_maps_in_order(modes, functions):
    shape, stride = zip(*modes, strict=True)
    layout = Layout(shape, stride)
    composed = ComposedLayout(layout, *functions)
    expected = []
    for index in range(layout.size()):
        value, rest = 0, index
        for extent, step in modes:
            value += rest % extent * step
            rest //= extent
        for function in functions:
            value = apply(function, value)
        expected.append(value)
    assert composed.size() == len(expected)
    assert composed.table.tolist() == expected
    assert [composed(index) for index in range(composed.size())] == expected
    assert composed(*(extent - 1 for extent in shape)) == expected[-1]
    assert type(composed(0)) is int


def test_the_order_of_maps_matters():
    layout = Layout(4)
    assert ComposedLayout(layout, Offset(1), Modulo(4)).table.tolist() == [1, 2, 3, 0]
    assert ComposedLayout(layout, Modulo(4), Offset(1)).table.tolist() == [1, 2, 3, 4]


def test_the_table_cannot_be_written():
    for functions in ((), (Offset(1),)):
        with pytest.raises(ValueError, match="read-only"):
            ComposedLayout(Layout(4), *functions).table[0] = 1


@bounded
@given(maps, maps)
def test_equal_maps_have_equal_hashes(a, b):
    assert (a == b) == (repr(a) == repr(b))
    assert a != b or hash(a) == hash(b)
    composed = ComposedLayout(Layout(4), a, b)
    twin = ComposedLayout(Layout(4), a, b)
    assert composed == twin
    assert hash(composed) == hash(twin)
    assert (composed == ComposedLayout(Layout(4), b, a)) == (a == b)
    assert composed != ComposedLayout(Layout(4, 2), a, b)
    assert composed != ComposedLayout(Layout(4), a)


@pytest.mark.parametrize("extent", [0, -4])
def test_modulo_at_no_extent_is_refused_by_name(extent):
    with pytest.raises(ValueError, match=f"got {extent}"):
        Modulo(extent)


@pytest.mark.parametrize("fields", [(-1, 0, 0), (1, -1, 1), (2, 0, 1), (2, 0, -1), (1, 0, 0)])
def test_swizzle_with_overlapping_fields_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=r"^(bits|base|shift) is an integer .* got"):
        Swizzle(*fields)


def test_maps_print_as_the_formula_read_right_to_left():
    composed = ComposedLayout(Layout((4, 4), (1, 4)), Swizzle(2, 0, 2), Offset(-1), Offset(3), Modulo(4))
    assert str(composed) == "(mod 4) o (+3) o (-1) o (SW_2_0_2) o (4, 4):(1, 4)"
    assert str(ComposedLayout(Layout(4))) == "4:1"
