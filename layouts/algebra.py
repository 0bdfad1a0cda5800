"""CuTe's algebra of layouts (shape:stride) on pycute, with every result checked.

pycute's operations are correct only for shapes that divide each other. For other shapes some of them return a wrong
layout and raise no error. The functions here compare pycute's result with the definition of the operation, value by
value, and raise ValueError if the two differ. Layouts of ranks and tiles are small, so this check is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pycute
from numpy.typing import NDArray

from distgemm.arguments import MAX_EXTENT, instance, integer, wrong

__all__ = [
    "IntTuple",
    "Layout",
    "coalesce",
    "complement",
    "composition",
    "flatten",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "product",
    "right_inverse",
]

IntTuple = int | tuple["IntTuple", ...]

MAX_STRIDE = 2**40
"""The largest absolute value of a stride. Tables of values have 64 bits."""


def flatten(value: IntTuple) -> tuple[int, ...]:
    """The leaves of a nested tuple, from left to right.

    Raises:
        ValueError: if a leaf is no integer.
    """
    if isinstance(value, tuple):
        leaves: list[int] = []
        for part in value:
            leaves += (part,) if type(part) is int else flatten(part)
        return tuple(leaves)
    if not _is_integer(value):
        raise wrong("value", "an integer or a nested tuple of integers", value)
    return (value,)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def product(value: IntTuple) -> int:
    """The product of all leaves of a nested tuple. It is 1 for ()."""
    return prod(flatten(value))


def _congruent(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_congruent, a, b))
    return _is_integer(a) and _is_integer(b)


def _is_shape(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(map(_is_shape, value))
    return _is_integer(value) and 1 <= value <= MAX_EXTENT  # type: ignore[operator]


def _layout(name: str, value: Layout) -> Layout:
    return instance(name, value, Layout, "a distgemm.layouts.Layout")


class Layout(pycute.Layout):
    """A pycute layout that is hashable, checks its arguments and has a correct ``cosize``.

    ``Layout(shape, stride)`` maps a coordinate c, or its colexicographic index, to sum(c_i * stride_i).

    Args:
        shape: an extent from 1 to MAX_EXTENT, or a nested tuple of extents.
        stride: one integer for each extent, nested as ``shape``. Strides may be negative or zero. None: the strides of
            a compact layout whose first mode is the fastest.

    Raises:
        ValueError: if an extent is below 1, the shape contains an empty tuple, or the stride is nested in another way
            than the shape.
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        if not _is_shape(shape):
            raise wrong("shape", f"an integer from 1 to {MAX_EXTENT} or a tuple of shapes", shape)
        if stride is not None and (
            not _congruent(shape, stride) or any(abs(one) > MAX_STRIDE for one in flatten(stride))
        ):
            raise wrong("stride", f"integers of at most {MAX_STRIDE} in the profile of shape {shape!r}", stride)
        super().__init__(shape, stride)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, pycute.Layout):
            return NotImplemented
        return bool(self.shape == other.shape and self.stride == other.stride)

    def __hash__(self) -> int:
        return hash((self.shape, self.stride))

    def __call__(self, *coordinate: Any) -> Any:
        """The value at a coordinate or an index. If the coordinate contains None, the sublayout of those modes."""
        value = super().__call__(*coordinate)
        return _own(value) if isinstance(value, pycute.Layout) else value

    def __getitem__(self, mode: int) -> Layout:
        return _own(super().__getitem__(mode))

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The value at each colexicographic index, shape (size,)."""
        values = np.zeros(1, dtype=np.int64)
        for extent, stride in zip(flatten(self.shape), flatten(self.stride), strict=True):
            values = (np.arange(extent, dtype=np.int64)[:, None] * stride + values[None, :]).reshape(-1)
        values.setflags(write=False)  # all callers get this array
        return values

    def size(self) -> int:
        """Number of coordinates."""
        return product(self.shape)

    def cosize(self) -> int:
        """Width of the codomain: largest minus smallest value, plus 1.

        For strides >= 0 it equals pycute's cosize. For negative strides pycute's cosize is too small.
        """
        low = high = 0
        for extent, stride in zip(flatten(self.shape), flatten(self.stride), strict=True):
            reach = (extent - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        return high - low + 1


def _own(layout: pycute.Layout) -> Layout:
    return Layout(layout.shape, layout.stride)


def _checked(
    operation: str, compute: Callable[..., pycute.Layout], holds: Callable[[Layout], bool], *args: object
) -> Layout:
    """The result of ``compute(*args)``, if ``holds`` is true for it.

    Raises:
        ValueError: if pycute raises an error, or ``holds`` is false for its result. ``operation`` names it.
    """
    text = f"{operation}({', '.join(map(str, args))}) is not a layout"
    try:
        result = _own(compute(*args))
    except (AssertionError, ZeroDivisionError, ValueError) as error:
        raise ValueError(text) from error
    if not holds(result):
        raise ValueError(f"{text}: pycute gives {result}")
    return result


def coalesce(layout: Layout) -> Layout:
    """The layout with the fewest modes that maps each index to the same value as ``layout``.

    Raises:
        ValueError: if pycute's result is another function.
    """
    _layout("layout", layout)
    return _checked("coalesce", pycute.coalesce, lambda result: np.array_equal(result.table, layout.table), layout)


def composition(a: Layout, b: Layout) -> Layout:
    """The layout R with R(i) == A(B(i)) for every index i of B.

    Args:
        a: the layout A, applied second.
        b: the layout B, applied first. Its values are indices of A.

    Returns:
        A layout of the size of B.

    Raises:
        ValueError: if a value of B is outside A's domain, or if no layout equals the composed function. In the second
            case compose the functions with ``ComposedLayout``.
    """
    inner, domain = _layout("b", b).table, _layout("a", a).size()
    if inner.min() < 0 or inner.max() >= domain:
        raise ValueError(
            f"composition({a}, {b}): B's values {inner.min()}..{inner.max()} leave A's domain 0..{domain - 1}"
        )
    wanted = a.table[inner]
    try:
        return _checked("composition", pycute.composition, lambda result: np.array_equal(result.table, wanted), a, b)
    except ValueError as error:
        # pycute requires divisibility. That is sufficient, but not necessary.
        fitted = _fit(b.shape, wanted)
        if fitted is None:
            raise ValueError(f"{error}; compose the functions with ComposedLayout") from error
        return fitted


def _fit(shape: IntTuple, values: NDArray[np.int64]) -> Layout | None:
    """The layout of this shape with these values. None if there is no such layout."""
    position, strides = 1, []
    for extent in flatten(shape):
        strides.append(int(values[position]) if extent > 1 else 0)
        position *= extent
    fitted = Layout(shape, _unflatten(shape, iter(strides)))
    return fitted if np.array_equal(fitted.table, values) else None


def _unflatten(profile: IntTuple, leaves: Iterator[int]) -> IntTuple:
    if isinstance(profile, tuple):
        return tuple(_unflatten(part, leaves) for part in profile)
    return next(leaves)


def complement(layout: Layout, size: int = 1) -> Layout:
    """The layout R for which the sums layout(i) + R(j) contain every value of 0..size-1.

    Args:
        layout: the layout to complete.
        size: number of values to reach.

    Returns:
        A layout that shares only the value 0 with ``layout``.

    Raises:
        ValueError: if pycute's result does not have these two properties.
    """
    _layout("layout", layout)
    size = integer("size", size, 1, MAX_EXTENT)

    def holds(result: Layout) -> bool:
        reached = layout.table[:, None] + result.table[None, :]
        disjoint = np.intersect1d(layout.table, result.table).tolist() == [0]
        return disjoint and bool(np.isin(np.arange(size), reached).all())

    return _checked("complement", pycute.complement, holds, layout, size)


def right_inverse(layout: Layout) -> Layout:
    """The largest layout R that pycute finds with layout(R(i)) == i for every index i of R.

    Raises:
        ValueError: if pycute's result is no right inverse.
    """
    _layout("layout", layout)
    return _checked("right_inverse", pycute.right_inverse, lambda result: _inverts(layout, result), layout)


def left_inverse(layout: Layout) -> Layout:
    """A layout L with L(layout(i)) == i for every index i of ``layout``.

    Raises:
        ValueError: if ``layout`` is not injective, or pycute finds no left inverse.
    """
    _layout("layout", layout)
    return _checked("left_inverse", pycute.left_inverse, lambda result: _inverts(result, layout), layout)


def _inverts(outer: Layout, inner: Layout) -> bool:
    """Whether every value of ``inner`` is in the domain of ``outer``, and outer(inner(i)) == i for every index i."""
    index = inner.table
    inside = index.min() >= 0 and index.max() < outer.size()
    return bool(inside and np.array_equal(outer.table[index], np.arange(inner.size())))


def logical_divide(a: Layout, b: Layout) -> Layout:
    """A split by B into two modes: A composed with (B, complement of B in A).

    Args:
        a: the layout to split.
        b: the tile: indices of A that belong together.

    Returns:
        A layout of two modes. Mode 0 runs over the indices in a tile, mode 1 over the tiles.

    Raises:
        ValueError: if the complement or the composition is no layout.
    """
    rest = complement(_layout("b", b), _layout("a", a).size())
    return composition(a, Layout((b.shape, rest.shape), (b.stride, rest.stride)))


def logical_product(a: Layout, b: Layout) -> Layout:
    """A repeated over B.

    Args:
        a: the layout to repeat.
        b: the layout of the repetitions.

    Returns:
        A layout of two modes. Mode 0 is A, mode 1 runs over the repetitions in the order of B.

    Raises:
        ValueError: if the complement or the composition is no layout.
    """
    rest = complement(_layout("a", a), a.size() * _layout("b", b).cosize())
    tiles = composition(rest, b)
    return Layout((a.shape, tiles.shape), (a.stride, tiles.stride))
