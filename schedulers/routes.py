"""Routes: the path a derived movement takes.

A route knows ranks and nothing else. It is asked once for each tile that must move, and answers with hops
in causal order: a rank only passes on what an earlier hop (or its own shard) gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol

__all__ = [
    "AddPlace",
    "BidirectionalFull",
    "BidirectionalSplit",
    "Chain",
    "Direct",
    "GatherRoute",
    "Hop",
    "Pairwise",
    "ReduceRoute",
    "Ring",
    "ring_of",
]


AddPlace = Literal["epilogue", "kernel"]
"""Where a rank adds the partial sums that it receives: in the epilogue of its own GEMM, or in a kernel of its own, a
Reduce."""


class Hop(NamedTuple):
    """One transfer of a tile, or of a part of it, from one rank to another.

    Attributes:
        part, parts: which of ``parts`` equal row blocks of the tile travels; whole tiles by default.
        turn: in which round of the plan it travels at the earliest; None: one iteration before it is used.
    """

    src: int
    dst: int
    part: int = 0
    parts: int = 1
    turn: int | None = None


class GatherRoute(Protocol):
    """How a tile of an operand gets from its holder to every rank that multiplies it."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        """Hops that bring the holder's tile to each of ``needers`` (ordered by when they need it)."""
        ...


class ReduceRoute(Protocol):
    """How the partial sums of one tile of D come together.

    Attributes:
        add: where a rank on the way adds the partial sum that it receives.
        final_add: where the reducer adds the partial sums that it receives. With ``add="kernel"`` and
            ``final_add="epilogue"`` it may receive any number of them.
    """

    @property
    def add(self) -> AddPlace: ...

    @property
    def final_add(self) -> AddPlace: ...

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        """One hop out of each contributor but the reducer; together a tree rooted at the reducer.

        ``contributors`` stand in the order in which they finish their part of the tile, without the reducer.
        """
        ...


def ring_of(mesh: tuple[int, ...], start: int, others: Sequence[int]) -> list[int]:
    """The ranks on the mesh axis that ``start`` and ``others`` share, in ascending order from ``start``.

    Raises:
        ValueError: when they differ on more than one axis: a ring runs along one.
    """
    stride = prod(mesh)
    axes = []
    for extent in mesh:
        stride //= extent
        here = start // stride % extent
        if any(rank // stride % extent != here for rank in others):
            axes.append((stride, extent, here))
    if len(axes) > 1:
        raise ValueError(f"a ring runs along one axis of the mesh {mesh}; ranks {[start, *others]} differ on several")
    if not axes:
        return [start]
    ((stride, extent, here),) = axes
    origin = start - here * stride
    return [origin + (here + step) % extent * stride for step in range(extent)]


@dataclass(frozen=True)
class Direct:
    """From the holder straight to each needer."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        return [Hop(holder, rank) for rank in needers]


def _walk(ring: Sequence[int], steps: int, direction: int, part: int = 0, parts: int = 1) -> list[Hop]:
    """``steps`` hops from ring[0] to its neighbours, each passing on what it received."""
    size = len(ring)
    return [
        Hop(ring[direction * step % size], ring[direction * (step + 1) % size], part, parts, step)
        for step in range(steps)
    ]


@dataclass(frozen=True)
class Ring:
    """From neighbour to neighbour, upwards, as far as the last needer."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        return _walk(ring, max(ring.index(rank) for rank in needers), +1)


@dataclass(frozen=True)
class BidirectionalFull:
    """Whole tiles both ways round the ring: clockwise to floor(N/2) ranks, counter-clockwise to the rest.

    The tile at ring distance d has arrived after d hops (tt-metal's FULL_TENSOR).
    """

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        size = len(ring)
        distances = [ring.index(rank) for rank in needers]
        clockwise = max((d for d in distances if d <= size // 2), default=0)
        counter = max((size - d for d in distances if d > size // 2), default=0)
        return _walk(ring, clockwise, +1) + _walk(ring, counter, -1)


@dataclass(frozen=True)
class BidirectionalSplit:
    """Half of every tile clockwise, the other half counter-clockwise.

    The tile at clockwise distance d has arrived whole after max(d, N - d) hops (tt-metal's SPLIT_TENSOR).
    """

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        distances = [ring.index(rank) for rank in needers]
        clockwise = _walk(ring, max(distances), +1, 0, 2)
        counter = _walk(ring, max(len(ring) - d for d in distances), -1, 1, 2)
        return clockwise + counter


@dataclass(frozen=True)
class Chain:
    """Each contributor adds its part to the partial sum and passes it on; the reducer is last.

    With ``final_add="kernel"`` the reducer's GEMM waits for nothing, and a Reduce adds to its result what arrives.
    """

    add: AddPlace = "epilogue"
    final_add: AddPlace = "epilogue"

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        return [Hop(src, dst) for src, dst in zip(contributors, [*contributors[1:], reducer], strict=True)]


@dataclass(frozen=True)
class Pairwise:
    """Each contributor sends its part to the reducer, which adds all of them once: no rounding per hop.

    With ``final_add="epilogue"`` the reducer's last GEMM adds them in its epilogue.
    """

    add: AddPlace = "kernel"
    final_add: AddPlace = "kernel"

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        return [Hop(rank, reducer) for rank in contributors]
