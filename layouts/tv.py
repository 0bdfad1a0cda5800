"""Thread-value (TV) layouts of ranks: (rank, value) -> tile.

In a kernel a TV layout says which values of a tile each thread holds. Here the ranks of a mesh take the place of
threads. The values are the tiles of a global matrix that a rank holds, or the iterations of a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distgemm.arguments import MAX_EXTENT, function, hashable, instance, integer, integers, sequence, wrong
from distgemm.layouts.algebra import IntTuple, Layout, flatten, product
from distgemm.layouts.maps import MAP, ComposedLayout, Map, apply_maps

__all__ = ["Axis", "TVLayout"]


MAX_TABLE = 1 << 20
"""The most tiles in a table of all ranks. Its tuples take about 0.2 GB."""


@dataclass(frozen=True)
class Axis:
    """One axis of the tile grid, as a function of the mesh coordinate and the value coordinate.

    The sum over the mesh coordinate times ``rank`` and the value coordinate times ``value`` goes through ``maps`` (an
    offset, a wrap, a swizzle). The result is the index on the axis. An index outside 0..extent-1 is outside the grid.

    Attributes:
        extent: number of tiles on the axis, >= 1.
        rank: stride of each mesh mode. 0: the axis does not depend on the rank.
        value: stride of each value mode. 0: the axis does not depend on the value.
        maps: functions applied to the sum, in this order.

    Raises:
        ValueError: if ``extent`` is not an integer >= 1, a stride is no integer, or a map is no function.
    """

    extent: int
    rank: IntTuple = 0
    value: IntTuple = 0
    maps: tuple[Map, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", integer("extent", self.extent, 1, MAX_EXTENT))
        for name in ("rank", "value"):
            strides = getattr(self, name)
            if not all(type(stride) is int and abs(stride) <= MAX_EXTENT for stride in _leaves(strides)):
                raise wrong(name, "an integer, or a tuple with an integer for each mode", strides)
        if not isinstance(self.maps, tuple):
            raise wrong("maps", f"a tuple, each entry {MAP}", self.maps)
        for index, each in enumerate(self.maps):
            hashable(f"maps[{index}]", function(f"maps[{index}]", each, MAP), f"hashable, and {MAP}")


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _strides(given: IntTuple, shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    strides = flatten(given)
    if strides == (0,):
        return (0,) * len(shape)
    if len(strides) != len(shape):
        raise ValueError(f"{what} strides {given!r} are not one integer for each mode of the {what} shape {shape!r}")
    return strides


def _check_order(order: Sequence[int], size: int) -> None:
    numbers = isinstance(order, tuple) and all(type(index) is int for index in order)
    if not numbers or len(order) != size or set(order) != set(range(size)):
        raise wrong("order", f"a permutation of the integers 0..{size - 1} as a tuple", order)


@dataclass(frozen=True)
class TVLayout:
    """A map (rank, value) -> tile of a grid. It is None outside the grid.

    Attributes:
        mesh: shape of the rank mode. Rank numbers are row-major over it, as in torch's DeviceMesh.
        values: shape of the value mode. In the numbers of values the first mode is the fastest, as in CuTe.
        modes: one entry for each mode of the tile grid: a tuple of its axes, the fastest first.
        order: a permutation of the values: value i is number ``order[i]`` of the value shape. (): no permutation. If
            the values are iterations, the axes say which tiles a rank multiplies, and ``order`` says when.

    Raises:
        ValueError: if the shapes, strides or the order do not fit together.
    """

    mesh: tuple[int, ...]
    values: tuple[int, ...]
    modes: tuple[tuple[Axis, ...], ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what in ("mesh", "values"):
            shape = integers(what, getattr(self, what), 1, MAX_EXTENT)
            if not shape:
                raise wrong(what, "a tuple of integers >= 1", shape)
            object.__setattr__(self, what, shape)
        modes = self.modes
        valid = isinstance(modes, tuple) and modes and all(isinstance(axes, tuple) and axes for axes in modes)
        if not valid or not all(isinstance(axis, Axis) for axes in modes for axis in axes):
            raise wrong("modes", "a tuple with a tuple of Axis objects for each mode of the grid", modes)
        if self.order != ():
            _check_order(self.order, self.size)
        for axes in self.modes:
            for axis in axes:
                self._layout(axis)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.values, self.modes, self.order))

    def strides(self, axis: Axis) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The strides of one of the axes: one for each mode of the mesh, and one for each mode of the values."""
        return _strides(axis.rank, self.mesh, "mesh"), _strides(axis.value, self.values, "value")

    def _layout(self, axis: Axis) -> ComposedLayout:
        rank, value = self.strides(axis)
        # Row-major numbers over a mesh are colexicographic numbers over the reversed mesh.
        linear = Layout((self.mesh[::-1], self.values), (rank[::-1], value))
        return ComposedLayout(linear, *axis.maps)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return product(self.mesh)

    @cached_property
    def size(self) -> int:
        """Number of values of each rank."""
        return product(self.values)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Extent of each mode of the tile grid."""
        return tuple(product(tuple(axis.extent for axis in axes)) for axes in self.modes)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The tiles of all values, shape (ranks, values, modes). All modes are -1 for a value outside the grid.

        Raises:
            ValueError: for more than MAX_TABLE values of all ranks. ``of_rank`` has those of one rank.
        """
        if self.ranks * self.size > MAX_TABLE:
            raise ValueError(
                f"a table of all ranks has at most {MAX_TABLE} tiles, got {self.ranks} ranks with {self.size} tiles "
                "each: ask for the tiles of one rank"
            )
        columns = []
        outside = np.zeros((self.ranks, self.size), dtype=bool)
        for axes in self.modes:
            index: NDArray[np.int64] = np.zeros((self.ranks, self.size), dtype=np.int64)
            scale = 1
            for axis in axes:
                part = self._layout(axis).table.reshape(self.size, self.ranks).T
                outside |= (part < 0) | (part >= axis.extent)
                index = index + scale * part
                scale *= axis.extent
            columns.append(index)
        result = np.stack(columns, axis=-1)
        result[outside] = -1
        if self.order:
            result = result[:, list(self.order)]
        result.setflags(write=False)
        return result

    @cached_property
    def tiles(self) -> tuple[tuple[tuple[int, ...] | None, ...], ...]:
        """The tile of each value of each rank, ``tiles[rank][value]``. None for a value outside the grid."""
        return tuple(tuple(None if tile[0] < 0 else tuple(tile) for tile in of_rank) for of_rank in self.table.tolist())

    def of_rank(self, rank: int) -> tuple[tuple[int, ...] | None, ...]:
        """The tile of each value of one rank. None for a value outside the grid.

        It takes no memory for other ranks, in contrast to ``tiles``.

        Args:
            rank: 0 to ranks - 1.

        Raises:
            ValueError: if there is no such rank.
        """
        at = integer("rank", rank, 0, self.ranks - 1)
        if "tiles" in vars(self):
            return self.tiles[at]
        found = self._of_ranks.get(at)
        if found is None:
            ranks = [np.asarray(index) for index in np.unravel_index(at, self.mesh)]
            every = np.unravel_index(np.asarray(self.order or range(self.size)), self.values, order="F")
            columns = []
            outside = np.zeros(self.size, dtype=bool)
            for axes in self.modes:
                index, inside = self._evaluate(axes, ranks, every)
                outside |= ~inside
                columns.append(index.tolist())
            tiles = zip(*columns, strict=True)
            found = tuple([None if out else tile for tile, out in zip(tiles, outside.tolist(), strict=True)])
            self._of_ranks[at] = found
        return found

    @cached_property
    def _of_ranks(self) -> dict[int, tuple[tuple[int, ...] | None, ...]]:
        return {}

    def _evaluate(
        self, axes: Sequence[Axis], ranks: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.int64]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The index in some axes, the fastest first, and whether it is inside the grid.

        Args:
            axes: the axes.
            ranks: a coordinate for each mode of the mesh.
            values: a coordinate for each mode of the values. All coordinates can be broadcast to one shape.
        """
        shape = np.broadcast_shapes(*(each.shape for each in (*ranks, *values)))
        index = np.zeros(shape, dtype=np.int64)
        inside = np.ones(shape, dtype=bool)
        scale = 1
        for axis in axes:
            part = np.zeros(shape, dtype=np.int64)
            of_rank, of_value = self.strides(axis)
            for strides, coordinates in ((of_rank, ranks), (of_value, values)):
                for stride, coordinate in zip(strides, coordinates, strict=True):
                    if stride:
                        part += stride * coordinate
            part = apply_maps(axis.maps, part)
            inside &= (part >= 0) & (part < axis.extent)
            index += scale * part
            scale *= axis.extent
        return index, inside

    def __call__(self, rank: int, value: int) -> tuple[int, ...] | None:
        at = integer("rank", rank, 0, self.ranks - 1), integer("value", value, 0, self.size - 1)
        return self.of_rank(at[0])[at[1]]

    @cached_property
    def _inverse(self) -> dict[tuple[int, ...], tuple[tuple[int, int], ...]]:
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank, of_rank in enumerate(self.tiles):
            for value, tile in enumerate(of_rank):
                if tile is not None:
                    found.setdefault(tile, []).append((rank, value))
        return {tile: tuple(pairs) for tile, pairs in found.items()}

    def inverse(self, tile: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Every (rank, value) that this layout maps to a tile, ranks in ascending order.

        Args:
            tile: one index for each mode of the grid.

        Returns:
            The pairs. () if no rank takes the tile.

        Raises:
            ValueError: if the tile is not in the grid.
        """
        coordinate = self._coordinate(tile)
        return self._inverse.get(coordinate, ())

    def _coordinate(self, tile: Sequence[int]) -> tuple[int, ...]:
        wanted = f"a tuple of integers inside the grid of {self.grid} tiles"
        coordinate = sequence("tile", tile, lambda name, index: integer(name, index, 0), wanted)
        if len(coordinate) != len(self.grid) or not all(map(int.__lt__, coordinate, self.grid)):
            raise wrong("tile", wanted, tile)
        return coordinate

    @cached_property
    def _holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {tile: tuple(sorted({rank for rank, _ in pairs})) for tile, pairs in self._inverse.items()}

    def holders(self, tile: Sequence[int]) -> tuple[int, ...]:
        """The ranks that have a value for a tile, in ascending order.

        Args:
            tile: one index for each mode of the grid.

        Raises:
            ValueError: if the tile is not in the grid.
        """
        found = self._holders.get(tile) if type(tile) is tuple else None
        # A tile without holders is perhaps outside the grid.
        return self._holders.get(self._coordinate(tile), ()) if found is None else found

    def covers(self) -> bool:
        """Whether every tile of the grid has at least one holder."""
        # Axes that share no mode of the mesh or of the values are independent of each other: all combinations occur.
        groups: list[tuple[set[tuple[str, int]], list[Axis]]] = []
        for axis in (axis for axes in self.modes for axis in axes):
            of_rank, of_value = self.strides(axis)
            modes = {("rank", at) for at, stride in enumerate(of_rank) if stride}
            modes |= {("value", at) for at, stride in enumerate(of_value) if stride}
            joined = [group for group in groups if group[0] & modes]
            groups = [group for group in groups if not group[0] & modes]
            axes = [axis for _, of_group in joined for axis in of_group]
            groups.append((modes.union(*(used for used, _ in joined)), [*axes, axis]))
        return all(self._reaches_all(modes, axes) for modes, axes in groups)

    def _reaches_all(self, modes: set[tuple[str, int]], axes: list[Axis]) -> bool:
        """Whether some axes have every combination of their indices. Only ``modes`` have strides in them."""
        shape = [self.mesh[at] if ("rank", at) in modes else 1 for at in range(len(self.mesh))]
        shape += [self.values[at] if ("value", at) in modes else 1 for at in range(len(self.values))]
        every = np.ogrid[tuple(slice(extent) for extent in shape)]
        index, inside = self._evaluate(axes, every[: len(self.mesh)], every[len(self.mesh) :])
        return len(np.unique(index[inside])) == product(tuple(axis.extent for axis in axes))

    def is_partition(self) -> bool:
        """Whether every tile of the grid belongs to exactly one value of one rank."""
        return self.covers() and all(len(pairs) == 1 for pairs in self._inverse.values())

    def reorder(self, order: Sequence[int]) -> TVLayout:
        """A layout of the same tiles in another order: its value i is value ``order[i]`` of this layout.

        Args:
            order: a permutation of 0..size-1.

        Raises:
            ValueError: if ``order`` is no permutation.
        """
        order = tuple(order) if isinstance(order, (list, range)) else order
        _check_order(order, self.size)
        before = self.order or range(self.size)
        return replace(self, order=tuple(before[index] for index in order))

    def nest(self, inner: TVLayout) -> TVLayout:
        """The product of this layout and ``inner``.

        All ranks of ``inner`` take the place of each rank of this layout, and the grid of ``inner`` takes the place of
        each tile. In every mode, tile = outer tile * inner extent + inner tile. Values are numbered outer value * inner
        size + inner value. Both layouts keep their orders.

        Args:
            inner: a layout whose grid has the same number of modes.

        Returns:
            A layout on this mesh followed by the mesh of ``inner``.

        Raises:
            ValueError: if the grids have different numbers of modes.
        """
        instance("inner", inner, TVLayout, "a distgemm.layouts.TVLayout")
        if len(self.modes) != len(inner.modes):
            raise wrong("inner", f"a TVLayout whose grid has {len(self.modes)} modes", inner)

        def placed(axis: Axis, layout: TVLayout, ranks: tuple[int, int], values: tuple[int, int]) -> Axis:
            rank = _strides(axis.rank, layout.mesh, "mesh")
            value = _strides(axis.value, layout.values, "value")
            rank = (0,) * ranks[0] + rank + (0,) * ranks[1]
            return replace(axis, rank=rank, value=(0,) * values[0] + value + (0,) * values[1])

        modes = tuple(
            tuple(placed(axis, inner, (len(self.mesh), 0), (0, len(self.values))) for axis in fast)
            + tuple(placed(axis, self, (0, len(inner.mesh)), (len(inner.values), 0)) for axis in slow)
            for slow, fast in zip(self.modes, inner.modes, strict=True)
        )
        order: tuple[int, ...] = ()
        if self.order or inner.order:
            fast_order = inner.order or range(inner.size)
            order = tuple(slow * inner.size + fast for slow in self.order or range(self.size) for fast in fast_order)
        return TVLayout(self.mesh + inner.mesh, inner.values + self.values, modes, order)

    def _cell(self, tile: tuple[int, ...]) -> str:
        return " ".join(f"{rank}:{value}" for rank, value in self.inverse(tile)) or "."

    def grids(self, rows: int = 0, columns: int = 1) -> Iterator[tuple[tuple[int, ...], list[list[str]]]]:
        """Pictures of the grid over two modes, one for each coordinate of the other modes.

        Args:
            rows: the mode that runs over the rows.
            columns: the mode that runs over the columns.

        Yields:
            The coordinate of the other modes, and the cells of each row. A cell has the text "rank:value" for each
            pair that takes the tile, and "." if there is none.

        Raises:
            ValueError: if ``rows`` and ``columns`` are not two modes of the grid.
        """
        modes = range(len(self.grid))
        rows, columns = (integer(*each, 0, len(modes) - 1) for each in (("rows", rows), ("columns", columns)))
        if rows == columns:
            raise ValueError(f"rows and columns are two different modes, given as integers, got {rows} for both")
        others = [mode for mode in modes if mode not in (rows, columns)]
        for rest in np.ndindex(*(self.grid[mode] for mode in others)):
            cells = []
            for row in range(self.grid[rows]):
                line = []
                for column in range(self.grid[columns]):
                    tile = [0] * len(self.grid)
                    tile[rows], tile[columns] = row, column
                    for mode, index in zip(others, rest, strict=True):
                        tile[mode] = index
                    line.append(self._cell(tuple(tile)))
                cells.append(line)
            yield rest, cells

    def __str__(self) -> str:
        """The grid of the first two modes as text, once for each index of the other modes.

        Each cell shows "rank:value". A grid of one mode is one line. One space separates the pairs of a cell, two
        spaces separate cells.
        """
        blocks: list[tuple[tuple[int, ...], list[list[str]]]]
        if len(self.grid) == 1:
            blocks = [((), [[self._cell((tile,)) for tile in range(self.grid[0])]])]
        else:
            blocks = list(self.grids())
        text = []
        for rest, cells in blocks:
            width = max(len(cell) for line in cells for cell in line)
            lines = ["  ".join(cell.ljust(width) for cell in line).rstrip() for line in cells]
            title = [f"[:, :, {', '.join(map(str, rest))}]"] if len(blocks) > 1 else []
            text.append("\n".join(title + lines))
        return "\n\n".join(text)
