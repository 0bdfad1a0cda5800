"""Shape:stride algebra on pycute, with every result checked.

pycute's operations hold their post-conditions only on shapes that divide; elsewhere some return a wrong
layout without a word. Here each operation that can go wrong is compared with what it promises, value by
value, and raises ValueError where the promise is not kept: layouts of ranks and tiles are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pycute
from numpy.typing import NDArray

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

_INTEGER = (int, np.integer)


def flatten(value: IntTuple) -> tuple[int, ...]:
    """The leaves of a nested tuple, left to right."""
    if isinstance(value, tuple):
        return tuple(leaf for part in value for leaf in flatten(part))
    return (value,)


def product(value: IntTuple) -> int:
    """The product of all leaves; 1 for ()."""
    result = 1
    for leaf in flatten(value):
        result *= leaf
    return result


def _congruent(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_congruent, a, b))
    return isinstance(a, _INTEGER) and isinstance(b, _INTEGER)


def _is_shape(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(map(_is_shape, value))
    return isinstance(value, _INTEGER) and bool(value >= 1)


class Layout(pycute.Layout):
    """A pycute layout that can be hashed, is checked when made, and knows its true codomain.

    ``Layout(shape, stride)`` maps a coordinate c, or its colexicographic index, to sum(c_i * stride_i).
    Strides may be negative or zero. Raises ValueError for extents below 1, for an empty tuple in the shape, and
    for a stride of another profile.
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        if not _is_shape(shape):
            raise ValueError(f"a layout's shape is an integer >= 1 or a tuple of shapes, got {shape!r}")
        if stride is not None and not _congruent(shape, stride):
            raise ValueError(f"stride {stride!r} is not integers in the profile of shape {shape!r}")
        super().__init__(shape, stride)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, pycute.Layout):
            return NotImplemented
        return bool(self.shape == other.shape and self.stride == other.stride)

    def __hash__(self) -> int:
        return hash((self.shape, self.stride))

    def __call__(self, *coordinate: Any) -> Any:
        """The value at a coordinate or an index; the sublayout where the coordinate has a None."""
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
        values.setflags(write=False)  # shared by everyone who asks
        return values

    def size(self) -> int:
        """Number of coordinates."""
        return product(self.shape)

    def cosize(self) -> int:
        """Width of the codomain: largest minus smallest value, plus 1.

        For strides >= 0 this is pycute's cosize; with negative strides pycute's is too small.
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
    """What pycute computes from ``args``, where it keeps its promise; ValueError otherwise."""
    text = f"{operation}({', '.join(map(str, args))}) is not a layout"
    try:
        result = _own(compute(*args))
    except (AssertionError, ZeroDivisionError, ValueError) as error:
        raise ValueError(text) from error
    if not holds(result):
        raise ValueError(f"{text}: pycute gives {result}")
    return result


def coalesce(layout: Layout) -> Layout:
    """The same function of the index with as few modes as possible."""
    return _checked("coalesce", pycute.coalesce, lambda result: np.array_equal(result.table, layout.table), layout)


def composition(a: Layout, b: Layout) -> Layout:
    """The layout R with R(i) == A(B(i)) for every index i of B.

    Raises:
        ValueError: where B leaves A's domain, or where no layout is found that equals the composed function (compose
            the functions with ``ComposedLayout`` then).
    """
    inner = b.table
    if inner.min() < 0 or inner.max() >= a.size():
        raise ValueError(
            f"composition({a}, {b}): B's values {inner.min()}..{inner.max()} leave A's domain 0..{a.size() - 1}"
        )
    wanted = a.table[inner]
    try:
        return _checked("composition", pycute.composition, lambda result: np.array_equal(result.table, wanted), a, b)
    except ValueError as error:
        # pycute asks for divisibility, which is sufficient and not necessary.
        fitted = _fit(b.shape, wanted)
        if fitted is None:
            raise ValueError(f"{error}; compose the functions with ComposedLayout") from error
        return fitted


def _fit(shape: IntTuple, values: NDArray[np.int64]) -> Layout | None:
    """The layout of this shape with these values, where there is one."""
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
    """The layout that reaches, from each value of ``layout``, the rest of 0..size-1.

    Together they take every value of 0..size-1 at least once. Raises ValueError where pycute's does not.
    """

    def holds(result: Layout) -> bool:
        reached = layout.table[:, None] + result.table[None, :]
        disjoint = np.intersect1d(layout.table, result.table).tolist() == [0]
        return disjoint and bool(np.isin(np.arange(size), reached).all())

    return _checked("complement", pycute.complement, holds, layout, size)


def right_inverse(layout: Layout) -> Layout:
    """The largest layout R found with layout(R(i)) == i for every i of R."""
    return _checked("right_inverse", pycute.right_inverse, lambda result: _inverts(layout, result), layout)


def left_inverse(layout: Layout) -> Layout:
    """A layout L with L(layout(i)) == i for every i; ValueError where layout is not injective or none is found."""
    return _checked("left_inverse", pycute.left_inverse, lambda result: _inverts(result, layout), layout)


def _inverts(outer: Layout, inner: Layout) -> bool:
    """Whether outer(inner(i)) == i for every i of inner, within outer's domain."""
    index = inner.table
    inside = index.min() >= 0 and index.max() < outer.size()
    return bool(inside and np.array_equal(outer.table[index], np.arange(inner.size())))


def logical_divide(a: Layout, b: Layout) -> Layout:
    """A split into (B's values, the rest): A composed with (B, complement of B in A)."""
    rest = complement(b, a.size())
    return composition(a, Layout((b.shape, rest.shape), (b.stride, rest.stride)))


def logical_product(a: Layout, b: Layout) -> Layout:
    """A repeated over B: mode 0 is A, mode 1 walks B in units of A."""
    rest = complement(a, a.size() * b.cosize())
    tiles = composition(rest, b)
    return Layout((a.shape, tiles.shape), (a.stride, tiles.stride))
