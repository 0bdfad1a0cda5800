"""What a rank does: a few ops on views of memory, each with the ops it depends on.

Within a rank only ``deps`` order ops; between ranks only signals and barriers do. ``deps`` name ops of the
same rank and replay by id. A rank begins a replay after it has finished the one before.
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
    """Lengths of a box, (l, rows, columns)."""
    (l0, l1), (r0, r1), (c0, c1) = box
    return l1 - l0, r1 - r0, c1 - c0


def box_size(box: Box) -> int:
    """Number of elements of a box."""
    (l0, l1), (r0, r1), (c0, c1) = box
    return (l1 - l0) * (r1 - r0) * (c1 - c0)


def overlaps(a: Box, b: Box) -> bool:
    """Whether two boxes share an element."""
    # Written out: planning and verifying ask this more than anything else.
    (a0, a1), (a2, a3), (a4, a5) = a
    (b0, b1), (b2, b3), (b4, b5) = b
    return max(a0, b0) < min(a1, b1) and max(a2, b2) < min(a3, b3) and max(a4, b4) < min(a5, b5)


def contains(outer: Box, inner: Box) -> bool:
    """Whether ``inner`` lies in ``outer``."""
    (o0, o1), (o2, o3), (o4, o5) = outer
    (i0, i1), (i2, i3), (i4, i5) = inner
    return o0 <= i0 <= i1 <= o1 and o2 <= i2 <= i3 <= o3 and o4 <= i4 <= i5 <= o5


class View(NamedTuple):
    """A box of a matrix where it lies in one rank's memory.

    Attributes:
        rank: whose memory.
        buffer: "A", "B", "C" or "D", the rank's shard; "slot", its workspace.
        slot: number of the slot; -1 for a shard.
        frame: the box that the buffer holds, row-major.
        box: the part of it that is meant.
        pitch: elements from row to row; a batch follows the rows of the one before.
    """

    rank: int
    buffer: str
    slot: int
    frame: Box
    box: Box
    pitch: int

    @property
    def elements(self) -> int:
        """Elements of memory that the frame takes up."""
        batches, rows, _ = box_extents(self.frame)
        return batches * rows * self.pitch

    def slices(self) -> tuple[slice, slice, slice]:
        """Where the box lies in the frame, (l, rows, columns)."""
        (fl, _), (fr, _), (fc, _) = self.frame
        (l0, l1), (r0, r1), (c0, c1) = self.box
        return slice(l0 - fl, l1 - fl), slice(r0 - fr, r1 - fr), slice(c0 - fc, c1 - fc)

    def __str__(self) -> str:
        place = f"slot {self.slot}" if self.buffer == "slot" else self.buffer
        ranges = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{place}[{ranges}]@{self.rank}"


class Slot(NamedTuple):
    """A place in a rank's workspace.

    Attributes:
        elements: capacity, with padding, for the element type ``dtype``; offset and bytes are multiples of the
            alignment.
    """

    offset: int
    bytes: int
    dtype: str
    elements: int


class Flag(NamedTuple):
    """A word in the waiting rank's signal memory, 0 or 1. Signal sets it; Wait waits for 1 and resets it.

    Attributes:
        credit: whether it says "this slot may be written again" (1 before the first replay) or "a chunk has arrived" (0
            before the first replay). A credit that is spent within the replay in which it is given starts at 0:
            ``initial`` says which.
    """

    rank: int
    number: int
    initial: int
    credit: bool

    def __str__(self) -> str:
        return f"{'credit' if self.credit else 'arrival'} flag {self.number}@{self.rank}"


@dataclass(frozen=True, slots=True)
class Op:
    """What all ops share.

    Attributes:
        id: names the op within its rank.
        rank: the rank that executes it.
        round: place in the plan's global order: whatever happens before this op, on any rank, has a smaller or the same
            round, and a chunk sent in a round is first used in a later one.
        iteration: the iteration that it serves.
        operand: "A", "B" or "D".
        tile: tile coordinates: (m, n, k, l) of a Gemm, else those of the operand.
        slot: the slot it writes, or speaks of; -1 for none.
        deps: ids of the ops that must have finished before.
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
        """Rank, iteration, op and tile, for messages."""
        where = f" slot {self.slot}" if self.slot >= 0 else ""
        tile = ", ".join(map(str, self.tile))
        return f"rank {self.rank} iteration {self.iteration}: {self.kind} #{self.id} {self.operand}({tile}){where}"

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """out = alpha * a @ b.T + sum of sources (+ beta * c, by the op that completes a tile); a partial sum may go into
    a slot of the rank that adds to it next"""

    tile: TileCoord
    a: View
    b: View
    sources: tuple[View, ...]
    c: View | None
    out: View


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """dst = src; local, or pushed by the rank that holds src, or pulled by the one that holds dst"""

    src: View
    dst: View

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """out = sum of sources (+ beta * c, by the op that completes a tile), added in this order"""

    sources: tuple[View, ...]
    c: View | None
    out: View


@dataclass(frozen=True, slots=True)
class Signal(Op):
    """flag = 1, in the memory of the rank that waits for it"""

    flag: Flag

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.flag}"


@dataclass(frozen=True, slots=True)
class Wait(Op):
    """wait until flag == 1, then flag = 0; ``peer`` is the rank that signals"""

    flag: Flag
    peer: int

    def describe(self) -> str:
        return f"{Op.describe(self)}: {self.flag}, from rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """wait until every rank has come to its Barrier of this round"""


def accesses(op: Op) -> tuple[list[View], View | None]:
    """What an op reads, and what it writes."""
    if isinstance(op, Gemm):
        return [op.a, op.b, *op.sources, *([op.c] if op.c else [])], op.out
    if isinstance(op, Reduce):
        return [*op.sources, *([op.c] if op.c else [])], op.out
    if isinstance(op, Copy):
        return [op.src], op.dst
    return [], None


def link_of(op: Op) -> tuple[int, int] | None:
    """From which rank to which an op moves something; None where all that it touches is its own."""
    if isinstance(op, Copy):
        return None if op.src.rank == op.dst.rank else (op.src.rank, op.dst.rank)
    out = accesses(op)[1]
    return None if out is None or out.rank == op.rank else (op.rank, out.rank)


_Op = TypeVar("_Op", bound=Op)


def maker(kind: type[_Op]) -> Callable[..., _Op]:
    """``kind`` for those who make many: the same ops from the same arguments, several times as fast.

    A frozen dataclass sets its fields one by one through ``object.__setattr__``. Here they are set as those of any
    other class are, and frozen afterwards.
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
