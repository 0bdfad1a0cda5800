"""Routes: the paths of tiles and partial sums from rank to rank.

A route knows only ranks. The derivation of a plan calls its ``hops`` once for each tile that moves. The hops are in
causal order: a rank forwards only what it holds in its shard or what an earlier hop brought.

A route may have an attribute ``rotates``. True says: if the coordinates of all given ranks on the mesh are rotated, the
hops are the same with rotated ranks. A plan of thousands of ranks needs it (:mod:`distgemm.schedulers.symmetry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

from distgemm.arguments import integers, member, wrong

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
"""Where a rank adds the partial sums that it receives: in the epilogue of its own GEMM, or in a separate kernel (the op
Reduce)."""


class Hop(NamedTuple):
    """One transfer of a tile, or of a part of it, from one rank to another.

    Attributes:
        src: the rank that sends.
        dst: the rank that receives.
        part: the number of the row block that moves, 0 to parts - 1.
        parts: number of equal row blocks of the tile. 1: the hop moves the whole tile, as all hops of partial sums do.
        turn: the earliest step of the plan in which the hop happens, counted like iterations. None: one iteration
            before the tile is used. Partial sums move once they are complete, whatever it is.
    """

    src: int
    dst: int
    part: int = 0
    parts: int = 1
    turn: int | None = None


class GatherRoute(Protocol):
    """The path of a tile from its holder to all ranks that need it."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        """The hops that bring a tile from its holder to each rank that needs it.

        Args:
            mesh: arrangement of the ranks.
            holder: the rank that holds the tile.
            needers: the ranks that need it, without the holder, in the order in which they need it.

        Returns:
            The hops in causal order.
        """
        ...


class ReduceRoute(Protocol):
    """The path of the partial sums of one tile of D to the reducer, the rank that completes the tile.

    Attributes:
        add: where a rank on the path adds the partial sum that it receives.
        final_add: where the reducer adds the partial sums that it receives. With ``add="kernel"`` and
            ``final_add="epilogue"`` the reducer may receive any number of them.
    """

    @property
    def add(self) -> AddPlace: ...

    @property
    def final_add(self) -> AddPlace: ...

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        """The hops that bring all partial sums of a tile to the reducer.

        Args:
            mesh: arrangement of the ranks.
            contributors: the ranks that compute partial sums, without the reducer, in the order in which they finish.
            reducer: the rank that completes the tile.

        Returns:
            One hop from each contributor. Together they are a tree whose root is the reducer.
        """
        ...


def ring_of(mesh: tuple[int, ...], start: int, others: Sequence[int]) -> list[int]:
    """The ring of ranks along the mesh axis on which ``start`` and ``others`` differ.

    Args:
        mesh: arrangement of the ranks.
        start: the first rank of the ring.
        others: ranks that lie on the ring.

    Returns:
        All ranks on that axis, in ascending order from ``start``, then round from the lowest. Only ``start`` if the
        ranks do not differ.

    Raises:
        ValueError: if the ranks differ on more than one axis, or are not on the mesh.
    """
    stride = prod(integers("mesh", mesh))
    wanted = f"an integer from 0 to {stride - 1}, a rank of the mesh {mesh}"
    if not isinstance(others, (tuple, list)) or not all(type(rank) is int and 0 <= rank < stride for rank in others):
        raise wrong("others", f"a sequence, each {wanted}", others)
    if type(start) is not int or not 0 <= start < stride:
        raise wrong("start", wanted, start)
    axes = []
    for extent in mesh:
        stride //= extent
        here = start // stride % extent
        if any(rank // stride % extent != here for rank in others):
            axes.append((stride, extent, here))
    if len(axes) > 1:
        raise wrong(
            "others",
            f"a sequence of integers, ranks that differ from rank {start} on one axis of the mesh {mesh}",
            others,
        )
    if not axes:
        return [start]
    ((stride, extent, here),) = axes
    origin = start - here * stride
    return [origin + (here + step) % extent * stride for step in range(extent)]


@dataclass(frozen=True)
class Direct:
    """One hop from the holder to each rank that needs the tile."""

    rotates: ClassVar[bool] = True

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        return [Hop(holder, rank) for rank in needers]


def _walk(ring: Sequence[int], steps: int, direction: int, part: int = 0, parts: int = 1) -> list[Hop]:
    """``steps`` hops from ring[0] from neighbour to neighbour, in direction +1 or -1 round the ring."""
    size = len(ring)
    return [
        Hop(ring[direction * step % size], ring[direction * (step + 1) % size], part, parts, step)
        for step in range(steps)
    ]


def _distances(ring: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The number of hops in direction +1 from ring[0] to each of some ranks."""
    place = {rank: distance for distance, rank in enumerate(ring)}
    return [place[rank] for rank in ranks]


@dataclass(frozen=True)
class Ring:
    """Hops from neighbour to neighbour in ascending order, up to the last rank that needs the tile."""

    rotates: ClassVar[bool] = True

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        return _walk(ring, max(_distances(ring, needers)), +1)


@dataclass(frozen=True)
class BidirectionalFull:
    """Whole tiles in both directions round the ring, as tt-metal's FULL_TENSOR.

    A tile goes clockwise (ascending) to floor(N/2) ranks and counter-clockwise to the others. It reaches the rank at
    ring distance d after d hops.
    """

    rotates: ClassVar[bool] = True

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        size = len(ring)
        distances = _distances(ring, needers)
        clockwise = max((d for d in distances if d <= size // 2), default=0)
        counter = max((size - d for d in distances if d > size // 2), default=0)
        return _walk(ring, clockwise, +1) + _walk(ring, counter, -1)


@dataclass(frozen=True)
class BidirectionalSplit:
    """Half of every tile clockwise round the ring, the other half counter-clockwise, as tt-metal's SPLIT_TENSOR.

    The rank at clockwise distance d has both halves after max(d, N - d) hops.
    """

    rotates: ClassVar[bool] = True

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        ring = ring_of(mesh, holder, needers)
        distances = _distances(ring, needers)
        clockwise = _walk(ring, max(distances), +1, 0, 2)
        counter = _walk(ring, max(len(ring) - d for d in distances), -1, 1, 2)
        return clockwise + counter


def _check_adds(route: ReduceRoute) -> None:
    member("add", route.add, get_args(AddPlace))
    member("final_add", route.final_add, get_args(AddPlace))


@dataclass(frozen=True)
class Chain:
    """Each contributor adds its part to the partial sum and sends it to the next one. The reducer is last.

    Attributes:
        add: "epilogue": the GEMM of a contributor adds the partial sum that it receives. "kernel": a Reduce adds it.
        final_add: the same for the reducer. With "kernel" the reducer's GEMM waits for no other rank.

    Raises:
        ValueError: for another value.
    """

    add: AddPlace = "epilogue"
    final_add: AddPlace = "epilogue"

    rotates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_adds(self)

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        return [Hop(src, dst) for src, dst in zip(contributors, [*contributors[1:], reducer], strict=True)]


@dataclass(frozen=True)
class Pairwise:
    """Each contributor sends its part to the reducer, which adds all parts at once. Hops add no rounding.

    Attributes:
        add: only the reducer receives partial sums here. Keep "kernel": with "epilogue" the reducer's GEMM adds a part
            in its epilogue only if there is one part.
        final_add: "kernel": a Reduce adds the parts. "epilogue": the reducer's last GEMM for the tile adds them.

    Raises:
        ValueError: for another value.
    """

    add: AddPlace = "kernel"
    final_add: AddPlace = "kernel"

    rotates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_adds(self)

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        return [Hop(rank, reducer) for rank in contributors]
