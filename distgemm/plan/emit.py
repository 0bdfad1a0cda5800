"""The last step of the derivation: events become ops, flags and dependencies.

Ops stand in the order of the events' steps. Each has the dependencies that its memory asks for, and no others. Between
ranks, flags protect memory: a transfer waits for the credit that the slot may be written again, and is followed by the
signal of its arrival. Each Wait is emitted by :meth:`Emitter.emit`, for the first op that needs it.
"""

from __future__ import annotations

from collections import defaultdict

from distgemm.plan.movement import Derivation, Event, Place
from distgemm.plan.ops import Barrier, Box, Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, box_extents, maker
from distgemm.plan.plan import SyncMode

__all__ = ["Emitter"]

OPS: tuple[type[Op], ...] = (Barrier, Copy, Gemm, Reduce, Signal, Wait)
MAKERS = {kind: maker(kind) for kind in OPS}


class Emitter:
    """Makes the ops of all ranks from the events of a derivation."""

    def __init__(self, derivation: Derivation, shards: dict[str, tuple[Box, ...]], sync: SyncMode) -> None:
        self.events = sorted(derivation.events, key=Event.order)
        for position, event in enumerate(self.events):
            event.position = position
        self.shards = shards
        self.ops: list[list[Op]] = [[] for _ in derivation.ranks]
        self.flags = [0 for _ in derivation.ranks]
        self.barrier = sync == "barrier"

    def emit(self) -> list[list[Op]]:
        if self.barrier:
            for rank in range(len(self.ops)):
                self._add(Barrier, rank, 0, 0, "D", (), -1, ())
        credits = self._credits()
        for event in self.events:
            if event.crosses:
                assert event.out is not None
                event.done_flags[event.out.rank] = self._flag(event.out.rank, initial=0, credit=False)
        for event in self.events:
            for before in event.after:
                if before.rank != event.rank and event.rank not in before.done_flags:
                    # It is the last reader of what is overwritten, or it has written what is read.
                    reader = before.sources[0].rank == event.rank
                    before.done_flags[event.rank] = self._flag(event.rank, initial=0, credit=reader)
        # Rank by rank, so that the ops of one rank are adjacent in memory.
        for event in sorted(self.events, key=lambda event: event.rank):
            self._emit(event)
            for into, readers, flag in credits.get(event.position, ()):
                deps = tuple(reader.op for reader in readers)
                at = event.round, into.iteration, into.operand, into.tile, into.slot
                self._add(Signal, event.rank, *at, deps, flag)
        return self.ops

    def _credits(self) -> dict[int, list[tuple[Place, list[Event], Flag]]]:
        """(place of the slot, readers, flag) for each write that waits for readers, by the last reader's position.

        If the readers and the writer are on the same rank, a dependency orders them.
        """
        found: dict[int, list[tuple[Place, list[Event], Flag]]] = defaultdict(list)
        for event in self.events:
            into = event.out
            if into is None or into.last is None:  # not in a slot
                continue
            box = event.box if into.last is into and event.box is not None else into.last.frame
            if event.crosses and into.wraps and self.barrier:
                event.enters = True
            elif event.crosses:
                self._credit(found, event, into.last.frontier(box))
            elif into.first is event or event.kind is Copy:  # each of several copies may write a part
                readers = into.last.frontier(box)
                far = [reader for reader in readers if reader.rank != event.rank]
                if not into.wraps:
                    event.after += readers
                elif self.barrier:
                    event.enters = bool(far)
                else:
                    for reader in far:
                        self._credit(found, event, [reader])
        return found

    def _credit(
        self, found: dict[int, list[tuple[Place, list[Event], Flag]]], event: Event, readers: list[Event]
    ) -> None:
        """Let a write wait for readers on another rank."""
        into = event.out
        assert into is not None
        last = max(readers, key=lambda reader: reader.position)
        flag = self._flag(event.rank, initial=int(into.wraps), credit=True)
        found[last.position].append((into, readers, flag))
        event.credits.append((flag, last.rank))

    def _flag(self, rank: int, initial: int, credit: bool) -> Flag:
        self.flags[rank] += 1
        return Flag(rank, self.flags[rank] - 1, initial, credit)

    def _add(self, kind: type[Op], rank: int, *args: object) -> int:
        ops = self.ops[rank]
        ops.append(MAKERS[kind](len(ops), rank, *args))
        return len(ops) - 1

    def _view(self, place: Place, box: Box) -> View:
        if place.view is not None and box is place.frame:
            return place.view
        if place.shard:
            view = self._shard(place.rank, place.operand, box)
        else:
            view = View(place.rank, "slot", place.slot, place.frame, box, place.pitch)
        if box is place.frame:
            place.view = view
        return view

    def _shard(self, rank: int, operand: str, box: Box) -> View:
        frame = self.shards["D" if operand == "C" else operand][rank]
        return View(rank, operand, -1, frame, box, box_extents(frame)[2])

    def _deps(self, event: Event, round_: int) -> list[int]:
        """Ids of the ops that an event needs. Emits a Wait for each transfer that no op has waited for yet."""
        found = []
        for before in event.after:
            if before.rank == event.rank:
                found.append(before.op)
                continue
            if event.rank not in before.waits:
                into = before.out
                assert into is not None
                common = (round_, into.iteration, into.operand, into.tile, into.slot, ())
                before.waits[event.rank] = self._add(
                    Wait, event.rank, *common, before.done_flags[event.rank], before.rank
                )
            found.append(before.waits[event.rank])
        return found

    def _emit(self, event: Event) -> None:
        rank, round_ = event.rank, event.round
        into = event.out
        assert into is not None
        slot = into.slot
        deps = self._deps(event, round_)
        common = (round_, event.iteration, event.operand, event.tile, slot)
        for flag, peer in event.credits:
            deps.append(self._add(Wait, rank, *common, (), flag, peer))
        if event.enters:
            deps.append(0)
        if event.kind is Copy:
            assert event.box is not None
            src, dst = self._view(event.sources[0], event.box), self._view(into, event.box)
            event.op = self._add(Copy, rank, *common, tuple(deps), src, dst)
        else:
            views = [self._view(place, place.frame) for place in event.sources]
            operands, sources = (views[:2], views[2:]) if event.kind is Gemm else ([], views)
            c = self._shard(rank, "C", into.frame) if event.completes else None
            out = self._view(into, into.frame)
            event.op = self._add(event.kind, rank, *common, tuple(deps), *operands, tuple(sources), c, out)
        for flag in event.done_flags.values():
            self._add(Signal, rank, *common, (event.op,), flag)
