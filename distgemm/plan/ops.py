"""The ops of a plan, and the views of memory that they read and write.

Within a rank only ``deps`` order ops. They are ids of ops of the same rank and the same replay. Between ranks only
signals and barriers order ops. A rank begins a replay after it has finished the replay before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import NamedTuple, TypeVar

from distgemm.schedulers import TileCoord

__all__ = [
    "Barrier",
    "Box",
    "Copy",
    "Flag",
    "Gemm",
    "Op",
    "Reduce",
    "Signal",
    "Slot",
    "View",
    "Wait",
    "accesses",
    "box_extents",
    "box_size",
    "contains",
    "link_of",
    "maker",
    "overlaps",
]

Range = tuple[int, int]
Box = tuple[Range, Range, Range]
"""Half-open ranges (l, rows, columns) in the global coordinates of an operand."""

Tile = tuple[int, ...]


def box_extents(box: Box) -> tuple[int, int, int]:
    """The extents (l, rows, columns) of a box."""
    (l0, l1), (r0, r1), (c0, c1) = box
    return l1 - l0, r1 - r0, c1 - c0


def box_size(box: Box) -> int:
    """Number of elements of a box."""
    (l0, l1), (r0, r1), (c0, c1) = box
    return (l1 - l0) * (r1 - r0) * (c1 - c0)


def overlaps(a: Box, b: Box) -> bool:
    """Whether two boxes share an element."""
    # No loop: planning and verification call this function more often than any other.
    (a0, a1), (a2, a3), (a4, a5) = a
    (b0, b1), (b2, b3), (b4, b5) = b
    return max(a0, b0) < min(a1, b1) and max(a2, b2) < min(a3, b3) and max(a4, b4) < min(a5, b5)


def contains(outer: Box, inner: Box) -> bool:
    """Whether the box ``inner`` lies in the box ``outer``."""
    (o0, o1), (o2, o3), (o4, o5) = outer
    (i0, i1), (i2, i3), (i4, i5) = inner
    return o0 <= i0 <= i1 <= o1 and o2 <= i2 <= i3 <= o3 and o4 <= i4 <= i5 <= o5


class View(NamedTuple):
    """A box of a matrix in the memory of one rank.

    Attributes:
        rank: the rank whose memory it is.
        buffer: "A", "B", "C", "D", "SFA" or "SFB" for the rank's shard, "slot" for its workspace.
        slot: number of the slot. -1 for a shard.
        frame: the box of the matrix that the buffer holds, row-major.
        box: the part of the frame that the view covers, in the same global coordinates.
        pitch: distance between rows in elements. Each batch follows the rows of the batch before.
    """

    rank: int
    buffer: str
    slot: int
    frame: Box
    box: Box
    pitch: int

    @property
    def elements(self) -> int:
        """Number of elements that the frame takes up in memory, with padding between rows."""
        batches, rows, _ = box_extents(self.frame)
        return batches * rows * self.pitch

    def slices(self) -> tuple[slice, slice, slice]:
        """The slices (l, rows, columns) of the frame that are the box."""
        (fl, _), (fr, _), (fc, _) = self.frame
        (l0, l1), (r0, r1), (c0, c1) = self.box
        return slice(l0 - fl, l1 - fl), slice(r0 - fr, r1 - fr), slice(c0 - fc, c1 - fc)

    def __str__(self) -> str:
        place = f"slot {self.slot}" if self.buffer == "slot" else self.buffer
        ranges = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{place}[{ranges}]@{self.rank}"


class Slot(NamedTuple):
    """A place for tiles or partial sums in a rank's workspace.

    Attributes:
        offset: start in the workspace in bytes, a multiple of the alignment.
        bytes: size in bytes, a multiple of the alignment.
        dtype: element type of what the slot holds.
        elements: capacity in elements of ``dtype``, with padding between rows.
    """

    offset: int
    bytes: int
    dtype: str
    elements: int


class Flag(NamedTuple):
    """A 32-bit value, 0 or 1, in the signal memory of the rank that waits for it.

    A Signal sets the flag to 1. A Wait waits for 1 and resets the flag to 0.

    Attributes:
        rank: the rank that waits.
        number: number of the flag in that rank's signal memory.
        initial: value before the first replay. An arrival starts at 0. A credit starts at 1, but at 0 if its Signal and
            its Wait belong to the same replay.
        credit: True: the flag says that a slot may be written again. False: it says that a chunk has arrived.
    """

    rank: int
    number: int
    initial: int
    credit: bool

    def __str__(self) -> str:
        return f"{'credit' if self.credit else 'arrival'} flag {self.number}@{self.rank}"


@dataclass(frozen=True, slots=True)
class Op:
    """The base class of all ops.

    Attributes:
        id: number of the op, unique on its rank.
        rank: the rank that executes the op.
        round: position in the plan's global order. Everything that happens before this op, on any rank, has a smaller
            or the same round. The first use of a chunk is in a later round than its transfer.
        iteration: the iteration to which the op belongs.
        operand: "A", "B" or "D"; "SFA" or "SFB" for a Copy of the scales of a tile of A or B.
        tile: coordinate of the tile: (m, n, k, l) for a Gemm, the coordinate in the operand for other ops. Scales have
            the coordinate of their tile.
        slot: the slot that the op writes, or that a Signal or Wait is about. -1 for none.
        deps: ids of the ops that must have finished before this op starts.
    """

    id: int
    rank: int
    round: int
    iteration: int
    operand: str
    tile: Tile
    slot: int
    deps: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Name of the op's class."""
        return type(self).__name__

    def describe(self) -> str:
        """Rank, iteration, op, tile and slot as text, for messages."""
        where = f" slot {self.slot}" if self.slot >= 0 else ""
        tile = ", ".join(map(str, self.tile))
        return f"rank {self.rank} iteration {self.iteration}: {self.kind} #{self.id} {self.operand}({tile}){where}"

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """out = alpha * a @ b.T + sum of sources. The op that completes a tile also adds beta * c.

    With scales, the elements of a and b are multiplied by them before they are added. So partial sums are scaled.

    Attributes:
        tile: coordinate (m, n, k, l) of the work tile.
        a: the tile of A.
        b: the tile of B.
        sources: partial sums that the epilogue adds.
        c: the tile of C for the op that completes a tile of D. None for other ops.
        out: the result. With the mechanism "store" a partial sum goes directly into a slot of the next rank.
        scale_a: the scales of ``a``. None for a problem without scaling.
        scale_b: the scales of ``b``. None for a problem without scaling.
    """

    tile: TileCoord
    a: View
    b: View
    sources: tuple[View, ...]
    c: View | None
    out: View
    scale_a: View | None = None
    scale_b: View | None = None

    @property
    def scales(self) -> tuple[View, ...]:
        """The scales that it reads: those of ``a`` and of ``b``, or none."""
        return () if self.scale_a is None or self.scale_b is None else (self.scale_a, self.scale_b)


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """dst = src, on one rank or between two ranks.

    The rank that holds ``src`` executes a push. The rank that holds ``dst`` executes a pull.

    Attributes:
        src: what is read.
        dst: what is written, a view with the same box.
    """

    src: View
    dst: View

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """out = sum of sources, added in their order. The op that completes a tile also adds beta * c.

    Attributes:
        sources: the partial sums.
        c: the tile of C for the op that completes a tile of D. None for other ops.
        out: the result.
    """

    sources: tuple[View, ...]
    c: View | None
    out: View


@dataclass(frozen=True, slots=True)
class Signal(Op):
    """flag = 1, in the memory of the rank that waits for it.

    Attributes:
        flag: the flag to set.
    """

    flag: Flag

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.flag}"


@dataclass(frozen=True, slots=True)
class Wait(Op):
    """Wait until flag == 1, then flag = 0.

    Attributes:
        flag: a flag of this rank.
        peer: the rank that sets the flag.
    """

    flag: Flag
    peer: int

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.flag}, from rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """Wait until all ranks have reached their Barrier of the same round."""


def accesses(op: Op) -> tuple[list[View], View | None]:
    """The views that an op reads and the view that it writes.

    Args:
        op: any op.

    Returns:
        The views that it reads, and the view that it writes. [] and None for a Signal, Wait or Barrier.
    """
    if isinstance(op, Gemm):
        return [op.a, op.b, *op.sources, *([op.c] if op.c else []), *op.scales], op.out
    if isinstance(op, Reduce):
        return [*op.sources, *([op.c] if op.c else [])], op.out
    if isinstance(op, Copy):
        return [op.src], op.dst
    return [], None


def link_of(op: Op) -> tuple[int, int] | None:
    """The link (src, dst) over which an op moves data.

    Args:
        op: any op.

    Returns:
        The rank that holds the data and the rank that gets it. None if the op accesses only its own rank's memory.
    """
    if isinstance(op, Copy):
        return None if op.src.rank == op.dst.rank else (op.src.rank, op.dst.rank)
    out = accesses(op)[1]
    return None if out is None or out.rank == op.rank else (op.rank, out.rank)


_Op = TypeVar("_Op", bound=Op)


def maker(kind: type[_Op]) -> Callable[..., _Op]:
    """A function that makes the same ops as the class ``kind``, several times as fast.

    The ``__init__`` of a frozen dataclass calls ``object.__setattr__`` for each field. The function sets the fields of
    a class that is not frozen, and changes the object's class afterwards.

    Args:
        kind: a class of ops.

    Returns:
        A function with the fields of ``kind`` as positional arguments.
    """
    thawed = make_dataclass("Fields", [field.name for field in fields(kind)])
    members = {
        "__slots__": (),
        "__init__": vars(thawed)["__init__"],
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,
    }
    draft = type(kind.__name__, (kind,), members)

    def make(*values: object) -> _Op:
        op: _Op = draft(*values)
        op.__class__ = kind
        return op

    return make
