"""The ops of a plan with other rows of A and D, made rank by rank when they are asked for.

Ops compare rows, and nothing else depends on them: which boxes overlap, which are empty, which one holds another. So a
map of rows that keeps their order, and keeps different rows apart, turns the ops of one plan into those of another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from distgemm.plan.ops import Box, Copy, Gemm, Op, Reduce, View, Wait, maker
from distgemm.plan.scaling import Scaling

__all__ = ["RankSize", "ResizedOps", "RowsOfOps", "fixed_views", "scales_have_rows", "size_of_rank"]

make_gemm, make_copy, make_reduce = maker(Gemm), maker(Copy), maker(Reduce)


def fixed_views(rank_ops: Sequence[Sequence[Op]], scaling: Scaling | None) -> frozenset[int]:
    """The ``id`` of each view whose rows have nothing to do with the rows of A and D.

    These are the views of B and of its scales, and those of A's scales unless each row of A has its own.
    """
    with_rows = {"A", "D"} | ({"SFA"} if scaling is not None and scales_have_rows(scaling) else set())
    found: set[int] = set()
    for ops in rank_ops:
        for op in ops:
            if isinstance(op, Gemm):
                found.add(id(op.b))
                if op.scales:
                    found.add(id(op.scale_b))
                    if "SFA" not in with_rows:
                        found.add(id(op.scale_a))
            elif isinstance(op, Copy) and op.operand not in with_rows:
                found |= {id(op.src), id(op.dst)}
    return frozenset(found)


def scales_have_rows(scaling: Scaling) -> bool:
    """Whether A's scales have the rows of A."""
    return scaling.a.rows == 1 and not scaling.a.swizzled


class RankSize(NamedTuple):
    """How many things a rank has in a plan.

    Attributes:
        ops: number of ops.
        gemms: number of Gemms.
        flags: one more than the highest number of a flag that the rank waits for; 0: there is none.
    """

    ops: int
    gemms: int
    flags: int


def size_of_rank(ops: Sequence[Op]) -> RankSize:
    """The size of a rank with these ops."""
    flags = [op.flag.number for op in ops if isinstance(op, Wait)]
    return RankSize(len(ops), sum(isinstance(op, Gemm) for op in ops), 1 + max(flags, default=-1))


class RowsOfOps(Sequence[tuple[Op, ...]]):
    """The ops of each rank with other rows, made when they are asked for. It is equal to a tuple of the same ops.

    Args:
        original: the ops of a plan, by rank.
        rows: the new row for each row of A and D that the plan's views have.
        fixed: :func:`fixed_views` of the original ops.

    Attributes:
        rows: as given.
        made: number of ops that have been made.
    """

    def __init__(self, original: Sequence[tuple[Op, ...]], rows: Mapping[int, int], fixed: Collection[int]) -> None:
        self.rows, self.made = rows, 0
        self._original, self._fixed = original, fixed
        self._boxes: dict[int, Box] = {}  # by the id of the original box, as are views
        self._views: dict[int, View] = {}
        self._ops: list[tuple[Op, ...] | None] = [None] * len(original)

    def view(self, view: View) -> View:
        """A view of the original plan with its new rows."""
        found = self._views.get(id(view))
        if found is None:
            found = view if id(view) in self._fixed else self._new(view)
            self._views[id(view)] = found
        return found

    def _new(self, view: View) -> View:
        rank, buffer, slot, frame, box, pitch = view
        return View(rank, buffer, slot, self._box(frame), self._box(box), pitch)

    def _box(self, box: Box) -> Box:
        found = self._boxes.get(id(box))
        if found is None:
            batch, (top, bottom), columns = box
            found = self._boxes[id(box)] = batch, (self.rows[top], self.rows[bottom]), columns
        return found

    @abstractmethod
    def _make(self, rank: int) -> tuple[Op, ...]:
        """Make the ops of a rank."""

    def __len__(self) -> int:
        return len(self._original)

    @overload
    def __getitem__(self, rank: int) -> tuple[Op, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Op, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[Op, ...] | tuple[tuple[Op, ...], ...]:
        if isinstance(rank, slice):
            return tuple(map(self._of, range(*rank.indices(len(self)))))
        return self._of(range(len(self))[rank])

    def _of(self, rank: int) -> tuple[Op, ...]:
        found = self._ops[rank]
        if found is None:
            found = self._ops[rank] = self._make(rank)
            self.made += len(found)
        return found

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return map(self._of, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, tuple | RowsOfOps) and tuple(self) == tuple(other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[tuple[tuple[Op, ...], ...]]]:
        return tuple, (tuple(self),)


class ResizedOps(RowsOfOps):
    """The ops of each rank with other rows: different ones for different rows, in the same order."""

    def _make(self, rank: int) -> tuple[Op, ...]:
        return tuple(map(self._op, self._original[rank]))

    def _op(self, op: Op) -> Op:
        view = self.view
        if isinstance(op, Gemm):
            sources, c = tuple(map(view, op.sources)), None if op.c is None else view(op.c)
            scales = (op.scale_a and view(op.scale_a), op.scale_b)
            return make_gemm(*_common(op), view(op.a), op.b, sources, c, view(op.out), *scales)
        if isinstance(op, Copy) and op.operand not in ("B", "SFB"):
            return make_copy(*_common(op), view(op.src), view(op.dst))
        if isinstance(op, Reduce):
            c = None if op.c is None else view(op.c)
            return make_reduce(*_common(op), tuple(map(view, op.sources)), c, view(op.out))
        return op


def _common(op: Op) -> tuple[object, ...]:
    """The fields of all ops, in order."""
    return op.id, op.rank, op.round, op.iteration, op.operand, op.tile, op.slot, op.deps
