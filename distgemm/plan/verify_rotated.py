"""The proof of plans in which every rank does what rank 0 does, with ranks and tiles rotated.

A rotation of such a plan is the plan itself. So what is shown for rank 0 holds for every rank: docs/verify.md has the
argument. This module follows the memory of rank 0, and all ops that touch it: those of rank 0, and those of other ranks
that are ops of rank 0, rotated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TypeVar

from distgemm.plan import verify as full
from distgemm.plan.exchanges import check_exchanges, ops_with_exchanges
from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Signal, View, Wait, accesses
from distgemm.plan.plan import Plan, PlanError, collector_paused
from distgemm.plan.rotate import RotatedOps, RotatedSlots, Rotation, rotated_shards
from distgemm.plan.schema import check_types
from distgemm.plan.validate import (
    FlagKey,
    Memory,
    PlanIndex,
    check_extents,
    check_flag,
    check_ops,
    check_ranks,
    check_slots,
    fail,
)
from distgemm.schedulers import TileCoord

__all__ = ["verify", "verify_rotated"]

FlagOp = TypeVar("FlagOp", bound=Op)
Node = tuple[int, int]
"""An op: its place in the list of its rank, and the rank."""


def verify(plan: Plan) -> None:
    """Prove that a plan computes its product: of one rank, if all others do the same, otherwise of all ranks.

    Args:
        plan: a plan of any origin.

    Raises:
        PlanError: if it does not. The message names rank, iteration and op, or the tile that no op computes.
    """
    if isinstance(plan.rank_ops, RotatedOps):
        verify_rotated(plan)
        ops_with_exchanges(plan, 0)
    else:
        full.verify(plan)
        if plan.ranks_per_host is not None:
            check_exchanges(plan)


def verify_rotated(plan: Plan) -> None:
    """Prove that a plan computes its product, from the ops of rank 0.

    Args:
        plan: a plan that :func:`distgemm.make_plan` made from the ops of rank 0.

    Raises:
        PlanError: if it does not, or if the plan does not consist of rotated ops.
    """
    with collector_paused():
        RotatedEvaluation(plan, RotatedOrder(plan, _validate(plan))).run()


class _OpsOf(Mapping[int, Op]):
    """The ops of a rank by their ids: those of rank 0, rotated."""

    def __init__(self, first: dict[int, Op], rotation: Rotation, rank: int) -> None:
        self._first, self._rotation, self._rank = first, rotation, rank
        self._made: dict[int, Op] = {}

    def __getitem__(self, id_: int) -> Op:
        found = self._made.get(id_)
        if found is None:
            found = self._made[id_] = self._rotation.op(self._first[id_], self._rank)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


class _ByRank(dict[int, _OpsOf]):
    """The ops of each rank, rotated when they are asked for."""

    def __init__(self, first: dict[int, Op], rotation: Rotation) -> None:
        self._first, self._rotation = first, rotation

    def __missing__(self, rank: int) -> _OpsOf:
        found = self[rank] = _OpsOf(self._first, self._rotation, rank)
        return found


class _ByFlag(Mapping[FlagKey, FlagOp]):
    """The Signals or Waits of the flags of all ranks. As a collection it has those of rank 0's flags."""

    def __init__(self, first: dict[FlagKey, FlagOp], rotation: Rotation) -> None:
        self._first, self._rotation = first, rotation
        self._made: dict[FlagKey, Op] = {}

    def __getitem__(self, key: FlagKey) -> FlagOp:
        found = self._made.get(key)
        if found is None:
            rank, number = key
            found = self._made[key] = self._rotation.op(self._first[0, number], rank)
        return found  # type: ignore[return-value]

    def __iter__(self) -> Iterator[FlagKey]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def _validate(plan: Plan) -> PlanIndex:
    """Check the structure of a plan, as :func:`distgemm.plan.validate.validate` does, from the ops of rank 0."""
    if not (isinstance(plan.rank_ops, RotatedOps) and isinstance(plan.slots, RotatedSlots)):
        raise PlanError("the plan does not consist of the ops of rank 0, rotated")
    ops, slots = plan.rank_ops, plan.slots
    first, rotation = ops.first, ops.rotation
    check_types(replace(plan, rank_ops=(first,), slots=(slots[0],)))
    check_ranks(plan)
    check_extents(plan)
    if not (rotation.fits(plan) and slots.rotates(rotation)):
        raise PlanError("the plan's tiles or shards are not those that its ops are rotated with")
    check_slots(plan if not slots.alike else replace(plan, rank_ops=(first,), slots=(slots[0],)))
    _check_shards(plan, rotation)
    form = PlanIndex([{}], {}, {}, defaultdict(list))
    memory = Memory(plan)
    check_ops(0, first, form, memory)
    memory.check_pitches()
    tenants = [(operand, set(tiles)) for _, operand, tiles in slots.tenants]
    for view, op in memory.views:
        if view.buffer == "slot":
            _check_tenant(view, op, rotation, tenants)
    symmetry = rotation.symmetry
    signals: dict[FlagKey, Signal] = {}
    for (rank, number), signal in form.signals.items():
        if not 0 <= rank < symmetry.world_size:
            raise fail(signal, f"signals {signal.flag}, a flag of a rank that does not exist")
        rotated = rotation.op(signal, symmetry.inverse[rank])
        assert isinstance(rotated, Signal)
        other = signals.setdefault((0, number), rotated)
        if other is not rotated:
            raise fail(rotated, f"{rotated.flag} is signalled by {other} already")
        if (0, number) not in form.waits:
            raise fail(signal, "no op waits for this flag")
    rotated_ops = _ByRank(form.ops[0], rotation)
    for key, wait in form.waits.items():
        if key not in signals:
            raise fail(wait, "no op signals this flag: the wait never ends")
        check_flag(signals[key], wait, rotated_ops[signals[key].rank])
    for barriers in form.barriers.values():
        if len(barriers) > 1:
            raise fail(barriers[0], "a rank enters the barrier of one round once")
    by_flag = _ByFlag(signals, rotation), _ByFlag(form.waits, rotation)
    return PlanIndex(rotated_ops, *by_flag, form.barriers)  # type: ignore[arg-type]


def _check_shards(plan: Plan, rotation: Rotation) -> None:
    """Check that no tile is empty, that shards rotate, and that every tile of D has an owner."""
    symmetry = rotation.symmetry
    for mode, bounds in rotation.edges.items():
        if any(low >= high for low, high in pairwise(bounds)):
            raise PlanError(f"the plan rotates tiles of mode {mode}, and some are empty")
    for operand, boxes in zip("ABD", plan.shards, strict=True):
        spans = rotation.tiles_of(operand, boxes[0])
        if not all(spans) or rotated_shards(symmetry, plan.edges, operand, spans) != boxes:
            raise PlanError(f"the shards of {operand} are not that of rank 0, rotated")
    spans = rotation.tiles_of("D", plan.shards[2][0])
    classes = {symmetry.tile("D", tile, symmetry.inverse[symmetry.origin("D", tile)]) for tile in product(*spans)}
    count = plan.grid.m * plan.grid.n * plan.grid.l
    # A class of tiles has one tile for each rank.
    if len(classes) * symmetry.world_size != count:
        raise PlanError(f"ranks own tiles of {len(classes)} classes of D, of {count // symmetry.world_size}")


def _check_tenant(view: View, op: Op, rotation: Rotation, tenants: Sequence[tuple[str, set[tuple[int, ...]]]]) -> None:
    """Check that a slot is made for a tile: then it is large enough on every rank."""
    operand, tiles = tenants[view.slot]
    names = (
        {"A"} if isinstance(op, Gemm) and view is op.a else {"B"} if isinstance(op, Gemm) and view is op.b else {"D"}
    )
    names = {op.operand} if isinstance(op, Copy) else names
    tile = rotation.tile_of(op, operand, view.frame) if operand in names else None
    if tile is None or rotation.symmetry.tile(operand, tile, rotation.symmetry.inverse[view.rank]) not in tiles:
        raise fail(op, f"{view} names a slot that is not made for this tile")


class RotatedOrder(full.Order):
    """Happens-before. ``sequence`` are the ops of rank 0: each one stands for those of all ranks at its place.

    All ranks execute the ops at one place of their lists at the same time, or each at its own pace. This is one legal
    order, since no Wait stands before its Signal: rounds never decrease in a list, and :func:`check_flag` makes sure
    that the Wait has a later one.

    Args:
        plan: the plan.
        form: its ops, checked.
    """

    def __init__(self, plan: Plan, form: PlanIndex) -> None:
        assert isinstance(plan.rank_ops, RotatedOps)
        self.plan, self.form, self.ops = plan, form, form.ops
        self.symmetry = plan.rank_ops.rotation.symmetry
        self.sequence = list(plan.rank_ops.first)
        self.place = {op.id: place for place, op in enumerate(self.sequence)}
        count = len(self.sequence)
        # The ops directly before and after each op of rank 0, as nodes.
        self.direct: list[list[Node]] = [[] for _ in range(count)]
        self.following: list[list[Node]] = [[] for _ in range(count)]
        self.next_wait: dict[int, Node] = {}
        self.last_signal: dict[int, Node] = {}
        for place, op in enumerate(self.sequence):
            for rank in range(self.symmetry.world_size) if isinstance(op, Barrier) else (0,):
                self.direct[place] += [(self.place[dep], rank) for dep in op.deps]
            if isinstance(op, Wait):
                signal = form.signals[op.flag[:2]]
                before = self.place[signal.id]
                if op.flag.initial:
                    self.last_signal[place] = before, signal.rank
                    self.next_wait[before] = place, self.symmetry.inverse[signal.rank]
                else:
                    self.direct[place].append((before, signal.rank))
        for place, before_it in enumerate(self.direct):
            for before, rank in before_it:
                self.following[before].append((place, self.symmetry.inverse[rank]))

    def _node(self, op: Op) -> Node:
        return self.place[op.id], op.rank

    def _of(self, nodes: Sequence[Node], rank: int) -> list[Node]:
        """The nodes around an op of a rank."""
        return [(place, self.symmetry.add(other, rank)) for place, other in nodes]

    def _leads_to(self, op: Op, other: Op) -> bool:
        first, then = self._node(op), self._node(other)
        after, prior = {first}, {then}
        ahead, behind = [first], [then]
        # If one of the two searches is exhausted, no path connects the ops.
        for near, far in zip(ahead, behind, strict=False):
            for node in self._of(self.following[near[0]], near[1]):
                if node in prior:
                    return True
                if node[0] < then[0] and node not in after:
                    after.add(node)
                    ahead.append(node)
            for node in self._of(self.direct[far[0]], far[1]):
                if node in after:
                    return True
                if node[0] > first[0] and node not in prior:
                    prior.add(node)
                    behind.append(node)
        return False

    def before_next(self, op: Op, other: Op) -> bool:
        first, then = self._node(op), self._node(other)
        after, prior = {first}, {then}
        ahead, behind = [first], [then]
        ended: set[int] = set()
        begun: set[int] = set()
        at = 0
        while at < len(ahead) or at < len(behind):
            if at < len(ahead):
                place, rank = ahead[at]
                if rank in begun or self._linked(self.next_wait.get(place), rank) in prior:
                    return True
                ended.add(rank)
                new = [node for node in self._of(self.following[place], rank) if node not in after]
                after.update(new)
                ahead += new
            if at < len(behind):
                place, rank = behind[at]
                linked = self._linked(self.last_signal.get(place), rank)
                if rank in ended or isinstance(self.sequence[place], Barrier) or linked in after:
                    return True
                begun.add(rank)
                new = [node for node in self._of(self.direct[place], rank) if node not in prior]
                prior.update(new)
                behind += new
            at += 1
        return False

    def _linked(self, node: Node | None, rank: int) -> Node | None:
        return None if node is None else (node[0], self.symmetry.add(node[1], rank))


class RotatedEvaluation(full.Evaluation):
    """Follows the memory of rank 0, with a check of every access to it.

    An op of rank 0 that accesses the memory of rank p is, rotated back by p, an op of another rank that accesses the
    memory of rank 0 in the same way.

    Args:
        plan: the plan.
        order: happens-before.
    """

    def __init__(self, plan: Plan, order: RotatedOrder) -> None:
        assert isinstance(plan.rank_ops, RotatedOps)
        self.rotation = plan.rank_ops.rotation
        self.symmetry = self.rotation.symmetry
        super().__init__(plan, order, 1)

    def _of_class(self, tile: TileCoord) -> TileCoord:
        back = self.symmetry.inverse[self.symmetry.origin("D", (tile.m, tile.n, tile.l))]
        return TileCoord(*self.symmetry.tile("work", tile, back))

    def _hand_over(self, flag: FlagKey) -> None:
        super()._hand_over((0, flag[1]))

    def _rotated(self, content: full.Content, by: int) -> full.Content:
        """What a box holds, after its rotation."""
        if isinstance(content, str) or not self.symmetry.turns("k"):
            return content
        found, left, k = content & 1, content >> 1, 0
        while left:
            if left & 1:
                found |= 2 << self.symmetry.index("k", k, by)
            left, k = left >> 1, k + 1
        return found

    def _read(self, op: Op, view: View) -> list[full.Piece]:
        rank = view.rank
        if not rank:
            return super()._read(op, view)
        assert isinstance(op, Copy)
        back = self.symmetry.inverse[rank]
        there = self.order.ops[back][op.id]
        found = []
        for piece in super()._read(there, accesses(there)[0][0]):
            box = self.rotation.box(op, op.operand, piece.box, rank)
            found.append(full.Piece(view.frame, box, self._rotated(piece.content, rank), piece.writer))
        return found

    def _write(self, op: Op, view: View, content: full.Content) -> None:
        if not view.rank:
            super()._write(op, view, content)
            return
        back = self.symmetry.inverse[view.rank]
        there = self.order.ops[back][op.id]
        written = accesses(there)[1]
        assert written is not None
        if view.box != (accesses(op)[1] or view).box:  # a piece of what the op writes
            written = written._replace(box=self.rotation.box(op, op.operand, view.box, back))
        super()._write(there, written, self._rotated(content, back))
