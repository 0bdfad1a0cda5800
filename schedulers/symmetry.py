"""Symmetric schedules: each rotation of the mesh maps the schedule to itself, if it rotates the tiles, too.

A rotation by rank q adds the mesh coordinates of q to those of every rank, modulo the extents of the mesh. It takes
rank 0 to rank q. Each axis of the tile grid rotates by its stride times these coordinates. If work, partition and
routes commute with all rotations, rank q does what rank 0 does, with ranks and tiles rotated by q.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from distgemm.layouts import Axis, Modulo, Offset, TVLayout

__all__ = ["MODES", "NotSymmetricError", "Symmetry", "find_symmetry"]

MODES = {"A": ("m", "k", "l"), "B": ("n", "k", "l"), "D": ("m", "n", "l")}
"""The modes of each operand, in the order of its tile coordinates. C has the modes of D."""

Shifts = tuple[int, ...]


class NotSymmetricError(ValueError):
    """A schedule does not commute with the rotations of its mesh. The message says which part does not."""


class Turn(NamedTuple):
    """How one axis of a mode rotates.

    Attributes:
        stride: tiles of the mode from one index of the axis to the next.
        extent: indices of the axis.
        amounts: for each rotation by how many indices.
    """

    stride: int
    extent: int
    amounts: list[int]


class Pivot(NamedTuple):
    """An axis of an operand's tiles that determines one mesh coordinate of the rotation that made a tile.

    Attributes:
        mode: position of the mode in the operand's tile coordinates.
        stride: as in :class:`Turn`.
        extent: as in :class:`Turn`, and extent of the mesh axis.
        inverse: index times ``inverse`` modulo ``extent`` is the mesh coordinate.
        ranks: ranks from one mesh coordinate to the next.
    """

    mode: int
    stride: int
    extent: int
    inverse: int
    ranks: int


class Symmetry:
    """The rotations of a mesh, as functions of ranks and tiles.

    Args:
        mesh: arrangement of the ranks.
        axes: for each mode of the grid, (extent, shifts) of its axes, the fastest first. ``shifts`` has one integer for
            each mesh axis: by how many indices the axis rotates for each coordinate.

    Attributes:
        mesh: as given.
        axes: as given. Equal axes of equal meshes are equal rotations.
        inverse: for each rank, the rank by which a rotation takes it to rank 0.

    Raises:
        NotSymmetricError: if an axis does not come back after all coordinates of a mesh axis, or if a rotation other
            than the one by rank 0 leaves a tile of an operand where it is.
    """

    def __init__(self, mesh: tuple[int, ...], axes: tuple[tuple[tuple[int, Shifts], ...], ...]) -> None:
        self.mesh, self.axes = mesh, axes
        self.world_size = prod(mesh)
        coordinates = np.stack(np.unravel_index(np.arange(self.world_size), mesh))
        back = np.ravel_multi_index(tuple(-coordinates), mesh, mode="wrap")
        self.inverse: list[int] = back.tolist()
        self._turns: dict[str, list[Turn]] = {}
        for mode, of_mode in zip("mnkl", axes, strict=True):
            stride, self._turns[mode] = 1, []
            for extent, shifts in of_mode:
                if any(shift * size % extent for shift, size in zip(shifts, mesh, strict=True)):
                    raise NotSymmetricError(f"mode {mode} does not rotate with the mesh")
                if any(shifts):
                    amounts = (np.asarray(shifts) @ coordinates % extent).tolist()
                    self._turns[mode].append(Turn(stride, extent, amounts))
                stride *= extent
        self._turning = {
            operand: [(position, *turn) for position, mode in enumerate(modes) for turn in self._turns[mode]]
            for operand, modes in {**MODES, "work": tuple("mnkl")}.items()
        }
        self._pivots = {operand: self._find_pivots(operand) for operand in MODES}

    def _find_pivots(self, operand: str) -> list[Pivot]:
        found = []
        for at, size in enumerate(self.mesh):
            pivot = next(self._pivots_of(operand, at), None) if size > 1 else None
            if pivot is not None:
                found.append(pivot)
            elif size > 1:
                raise NotSymmetricError(f"no axis of the tiles of {operand} rotates with axis {at} of the mesh alone")
        return found

    def _pivots_of(self, operand: str, at: int) -> Iterator[Pivot]:
        for position, mode in enumerate(MODES[operand]):
            stride = 1
            for extent, shifts in self.axes["mnkl".index(mode)]:
                alone = shifts[at] and sum(map(bool, shifts)) == 1
                if alone and extent == self.mesh[at] and gcd(shifts[at], extent) == 1:
                    yield Pivot(position, stride, extent, pow(shifts[at], -1, extent), prod(self.mesh[at + 1 :]))
                stride *= extent

    def add(self, rank: int, by: int) -> int:
        """The rank to which the rotation by rank ``by`` takes a rank."""
        if len(self.mesh) == 1:
            return (rank + by) % self.world_size
        if len(self.mesh) == 2:
            hosts, local = self.mesh
            return (rank // local + by // local) % hosts * local + (rank + by) % local
        found, stride = 0, 1
        for extent in reversed(self.mesh):
            found += (rank + by) % extent * stride
            rank, by, stride = rank // extent, by // extent, stride * extent
        return found

    def subtract(self, rank: int, by: int) -> int:
        """The rank that the rotation by rank ``by`` takes to a rank."""
        return self.add(rank, self.inverse[by])

    def index(self, mode: str, index: int, by: int) -> int:
        """The tile of a mode ("m", "n", "k" or "l") to which the rotation by rank ``by`` takes a tile."""
        for stride, extent, amounts in self._turns[mode]:
            at = index // stride % extent
            index += ((at + amounts[by]) % extent - at) * stride
        return index

    def turns(self, mode: str) -> bool:
        """Whether rotations move the tiles of a mode."""
        return bool(self._turns[mode])

    def together(self, mode: str, one: int, other: int) -> bool:
        """Whether rotations move two tiles of a mode by the same number of tiles."""
        return all(one // stride % extent == other // stride % extent for stride, extent, _ in self._turns[mode])

    def tile(self, operand: str, tile: Sequence[int], by: int) -> tuple[int, ...]:
        """The tile of an operand, or of the "work", to which the rotation by rank ``by`` takes a tile."""
        found = list(tile)
        for position, stride, extent, amounts in self._turning[operand]:
            at = found[position] // stride % extent
            found[position] += ((at + amounts[by]) % extent - at) * stride
        return tuple(found)

    def origin(self, operand: str, tile: Sequence[int]) -> int:
        """The rotation that takes the first tile of a class to a tile of it.

        The class of a tile are the tiles to which rotations take it.
        """
        rank = 0
        for mode, stride, extent, inverse, ranks in self._pivots[operand]:
            rank += tile[mode] // stride * inverse % extent * ranks
        return rank


def find_symmetry(work: TVLayout, partition: Mapping[str, TVLayout], routes: Mapping[str, object]) -> Symmetry:
    """The rotations with which a schedule commutes.

    Args:
        work: TV layout (rank, iteration) -> tile.
        partition: the TV layout of each operand ("A", "B", "D"). All are on the mesh of the work.
        routes: by name the routes of a schedule, without those that it does not have.

    Raises:
        NotSymmetricError: if it does not commute with all rotations of its mesh, or if that cannot be told: for axes of
            tiles that other maps than ``Offset`` and ``Modulo`` make, and for routes that do not say so.
    """
    for route in routes.values():
        if not getattr(route, "rotates", False):
            raise NotSymmetricError(f"the route {type(route).__name__} does not say that it rotates")
    axes = []
    for mode, of_mode in zip("mnkl", work.modes, strict=True):
        shifts = [(axis.extent, _shifts(axis, work, mode)) for axis in of_mode if axis.extent > 1]
        axes.append(tuple(shifts))
    found = Symmetry(work.mesh, tuple(axes))
    for operand, modes in MODES.items():
        layout = partition[operand]
        for mode, of_mode in zip(modes, layout.modes, strict=True):
            kept = [axis for axis in of_mode if axis.extent > 1]
            wanted = axes["mnkl".index(mode)]
            if [axis.extent for axis in kept] != [extent for extent, _ in wanted]:
                raise NotSymmetricError(f"mode {mode} of {operand} is divided into other axes than that of the work")
            for axis, (_, shifts_of_work) in zip(kept, wanted, strict=True):
                if not _all_of(axis, layout) and _shifts(axis, layout, f"{mode} of {operand}") != shifts_of_work:
                    raise NotSymmetricError(f"mode {mode} of {operand} does not rotate as that of the work")
    return found


def _shifts(axis: Axis, layout: TVLayout, what: str) -> Shifts:
    """By how many indices an axis rotates for each coordinate of the mesh."""
    rank, value = layout.strides(axis)
    *offsets, last = axis.maps or (Modulo(axis.extent),)
    if (
        not isinstance(last, Modulo)
        or last.extent != axis.extent
        or not all(isinstance(each, Offset) for each in offsets)
    ):
        raise NotSymmetricError(f"mode {what} has a map that is neither an Offset nor a Modulo")
    if not axis.maps:
        ends = [
            stride * (extent - 1)
            for strides, shape in ((rank, layout.mesh), (value, layout.values))
            for stride, extent in zip(strides, shape, strict=True)
        ]
        if sum(end for end in ends if end < 0) < 0 or sum(end for end in ends if end > 0) >= axis.extent:
            raise NotSymmetricError(f"mode {what} has indices outside the grid")
    return tuple(stride % axis.extent for stride in rank)


def _all_of(axis: Axis, layout: TVLayout) -> bool:
    """Whether every rank holds all indices of an axis, together with all indices of the other axes."""
    rank, value = layout.strides(axis)
    used = [at for at, stride in enumerate(value) if stride]
    others = [other for of_mode in layout.modes for other in of_mode if other is not axis]
    shared = any(layout.strides(other)[1][at] for other in others for at in used)
    if any(rank) or shared or axis.maps or len(used) != 1:
        return False
    return value[used[0]] == 1 and layout.values[used[0]] == axis.extent
