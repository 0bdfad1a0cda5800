"""Functions that a linear layout cannot express: an offset, a wrap modulo the number of ranks, an exclusive or.

In CUTLASS these stand outside the layouts of a schedule (``ProcessorOffset``, ``% TP``). Here they are part of the
layout object. Each map takes an integer or a numpy array of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from distgemm.arguments import MAX_EXTENT, function, instance, integer, shown, wrong
from distgemm.layouts.algebra import IntTuple, Layout

__all__ = ["ComposedLayout", "Divide", "Map", "Modulo", "Offset", "Swizzle", "apply_maps"]

MAX_BIT = 62
"""The highest bit of the integers of numpy that a map takes."""

Value = TypeVar("Value", int, NDArray[np.int64])


MAP = "a function of integers, such as distgemm.layouts.Modulo(4)"


class Map(Protocol):
    """A function from integers to integers.

    A map is hashable, so that layouts and schedules which contain it can be cached. It takes an integer or a numpy
    array of integers, and returns the same type.
    """

    def __call__(self, value: Value, /) -> Value: ...

    def __hash__(self) -> int: ...


def apply_maps(maps: Sequence[Map], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of some maps, applied in their order to an array.

    Raises:
        ValueError: if a map raises an error, or returns no integers of the same shape.
    """
    for each in maps:
        try:
            found = each(values)
        except Exception as error:
            raise ValueError(f"the map {shown(each)} takes an array of integers; it raised {error!r}") from error
        if not isinstance(found, np.ndarray) or found.shape != values.shape or found.dtype.kind not in "iu":
            raise wrong(f"the result of map {shown(each)}", f"an array of integers of shape {values.shape}", found)
        values = found
    return values


@dataclass(frozen=True)
class Offset:
    """value + amount

    Args:
        amount: an integer of at most MAX_EXTENT in absolute value.

    Raises:
        ValueError: for anything else.
    """

    amount: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "amount", integer("amount", self.amount, -MAX_EXTENT, MAX_EXTENT))

    def __call__(self, value: Value) -> Value:
        return value + self.amount

    def __str__(self) -> str:
        return f"{self.amount:+d}"


@dataclass(frozen=True)
class Modulo:
    """value mod extent, which is in 0..extent-1 also for negative values

    Args:
        extent: an integer >= 1.

    Raises:
        ValueError: if ``extent`` is below 1.
    """

    extent: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", integer("extent", self.extent, 1, MAX_EXTENT))

    def __call__(self, value: Value) -> Value:
        return value % self.extent

    def __str__(self) -> str:
        return f"mod {self.extent}"


@dataclass(frozen=True)
class Divide:
    """value / divisor, rounded down

    Args:
        divisor: an integer >= 1.

    Raises:
        ValueError: if ``divisor`` is below 1.
    """

    divisor: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", integer("divisor", self.divisor, 1, MAX_EXTENT))

    def __call__(self, value: Value) -> Value:
        return value // self.divisor

    def __str__(self) -> str:
        return f"div {self.divisor}"


@dataclass(frozen=True)
class Swizzle:
    """CuTe's Swizzle<bits, base, shift>: the exclusive or of one field of bits into another field.

    With ``shift`` >= 0 the source field starts at bit base + shift, and the target field at bit base. With ``shift``
    < 0 the source field starts at bit base, and the target field at bit base - shift.

    Args:
        bits: width of both fields, 0 to 62.
        base: lowest bit of the lower field, 0 to 62.
        shift: distance of the fields in bits. Its absolute value is at least ``bits``.

    Raises:
        ValueError: for other arguments.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        for name, least in (("bits", 0), ("base", 0), ("shift", -MAX_BIT)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least, MAX_BIT))
        if abs(self.shift) < self.bits:
            raise ValueError(
                f"shift is an integer whose absolute value is at least bits = {self.bits}, got {self.shift}"
            )

    def __call__(self, value: Value) -> Value:
        # pycute's Swizzle does not terminate for a shift of 0.
        source, target = self.base + max(self.shift, 0), self.base - min(self.shift, 0)
        field = (value >> source) & ((1 << self.bits) - 1)
        return value ^ (field << target)

    def __str__(self) -> str:
        return f"SW_{self.bits}_{self.base}_{self.shift}"


@dataclass(frozen=True)
class ComposedLayout:
    """A layout followed by maps: ``ComposedLayout(L, f, g)(c) == g(f(L(c)))``.

    Args:
        layout: the layout, applied first.
        *maps: functions of integers, applied in this order.

    Raises:
        ValueError: if ``layout`` is no layout, or a map is no function.
    """

    layout: Layout
    maps: tuple[Map, ...]

    def __init__(self, layout: Layout, *maps: Map) -> None:
        object.__setattr__(self, "layout", instance("layout", layout, Layout, "a distgemm.layouts.Layout"))
        read = (function(f"maps[{index}]", each, MAP) for index, each in enumerate(maps))
        object.__setattr__(self, "maps", tuple(read))

    def __call__(self, *coordinate: IntTuple) -> int:
        value = int(self.layout(*coordinate))
        for each in self.maps:
            value = each(value)
        return value

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The value at each colexicographic index, shape (size,)."""
        values = apply_maps(self.maps, self.layout.table)
        values.setflags(write=False)  # all callers get this array
        return values

    def size(self) -> int:
        """Number of coordinates."""
        return self.layout.size()

    def __str__(self) -> str:
        return " o ".join([*(f"({function})" for function in reversed(self.maps)), str(self.layout)])
