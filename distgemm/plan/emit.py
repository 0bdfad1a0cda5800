"""The last step of the derivation: it makes ops, flags and dependencies from the events.

Ops stand in the order of the events' steps. An op has a dependency only if its memory needs one. Between ranks, flags
protect memory. Before a transfer its rank waits for the credit, which says that the slot may be written again. After
the transfer it signals the arrival. ``Emitter._deps`` emits the Wait for an arrival, and ``Emitter._emit`` the Wait for
a credit, each before the first op that needs it.
"""

from __future__ import annotations

from collections import defaultdict

from distgemm.plan.movement import Derivation, Event, Place
from distgemm.plan.ops import Barrier, Box, Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, box_extents, maker
from distgemm.plan.plan import SyncMode
from distgemm.plan.scaling import SCALE_OPERANDS

__all__ = ["Emitter"]

OPS: tuple[type[Op], ...] = (Barrier, Copy, Gemm, Reduce, Signal, Wait)
MAKERS = {kind: maker(kind) for kind in OPS}


class Emitter:
    """Makes the ops of all ranks from the events of a derivation.

    Args:
        derivation: a derivation after ``run`` and ``allocate``.
        shards: the box of each rank's shard, by operand ("A", "B", "D").
        sync: "credit" or "barrier", as :func:`distgemm.make_plan` takes it.

    Attributes:
        slot_ranks: for each op of each rank, the rank whose slot it names.
        flag_tiles: for each flag of each rank, the first coordinate of the tile that it is about.
    """

    def __init__(self, derivation: Derivation, shards: dict[str, tuple[Box, ...]], sync: SyncMode) -> None:
        self.events = sorted(derivation.events, key=Event.order)
        for position, event in enumerate(self.events):
            event.position = position
        self.shards = shards
        self.derivation = derivation
        self.ops: list[list[Op]] = [[] for _ in derivation.ranks]
        self.slot_ranks: list[list[int]] = [[] for _ in derivation.ranks]
        self.flag_tiles: list[list[int]] = [[] for _ in derivation.ranks]
        self.barrier = sync == "barrier"

    def emit(self) -> list[list[Op]]:
        """The ops of each rank, in the order in which the rank can issue them."""
        if self.barrier:
            for rank in range(len(self.ops)):
                self._add(Barrier, rank, rank, 0, 0, "D", (), -1, ())
        credits = self._credits()
        for event in self.events:
            if event.crosses:
                assert event.out is not None
                event.done_flags[event.out.rank] = self._flag(event, event.out.rank, initial=0, credit=False)
        for event in self.events:
            for before in event.after:
                if before.rank != event.rank and event.rank not in before.done_flags:
                    # ``before`` is the last reader of what ``event`` overwrites, or has written what it reads.
                    reader = before.sources[0].rank == event.rank
                    before.done_flags[event.rank] = self._flag(event, event.rank, initial=0, credit=reader)
        # Rank by rank, so that the ops of one rank are adjacent in memory.
        for event in sorted(self.events, key=lambda event: event.rank):
            self._emit(event)
            for into, readers, flag in credits.get(event.position, ()):
                deps = tuple([op for reader in readers for op in reader.ops])
                at = event.round, into.iteration, into.operand, into.tile, into.slot
                self._add(Signal, event.rank, into.rank, *at, deps, flag)
        return self.ops

    def _credits(self) -> dict[int, list[tuple[Place, list[Event], Flag]]]:
        """The credits to signal, by the position of the last reader of the slot.

        A credit is (place that the slot holds next, readers of what it holds now, flag). If the readers and the writer
        are on the same rank, a dependency orders them instead.
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
            elif into.first is event or event.kind is Copy:  # a copy may write only a part of the place
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
        """Make ``event`` wait, before it writes, for readers on another rank."""
        into = event.out
        assert into is not None
        last = max(readers, key=lambda reader: reader.position)
        flag = self._flag(event, event.rank, initial=int(into.wraps), credit=True)
        found[last.position].append((into, readers, flag))
        event.credits.append((flag, last.rank))

    def _flag(self, event: Event, rank: int, initial: int, credit: bool) -> Flag:
        tiles = self.flag_tiles[rank]
        tiles.append(event.tile[0])
        return Flag(rank, len(tiles) - 1, initial, credit)

    def _add(self, kind: type[Op], rank: int, slot_rank: int, *args: object) -> int:
        ops = self.ops[rank]
        ops.append(MAKERS[kind](len(ops), rank, *args))
        self.slot_ranks[rank].append(slot_rank)
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

    def _scales(self, place: Place, box: Box) -> View:
        """The view of a tile's scales: beside the tile in a slot, or in the rank's shard."""
        if place.scale is None or place.shard:
            return self._shard(place.rank, SCALE_OPERANDS[place.operand], box)
        columns = box_extents(place.scale)[2]
        return View(place.rank, "slot", place.scale_slot, place.scale, box, columns)

    def _tile_scales(self, place: Place) -> View | None:
        """The view of the scales of a whole tile, the same object each time. None without scaling."""
        if not self.derivation.scale_shards:
            return None
        if place.scale_view is None:
            place.scale_view = self._scales(place, self.derivation.scale_frame(place.operand, place.tile))
        return place.scale_view

    def _deps(self, event: Event, round_: int) -> list[int]:
        """Ids of the ops on which an event depends. Emits the Wait for each event of another rank, once for a rank."""
        found: list[int] = []
        for before in event.after:
            if before.rank == event.rank:
                found += before.ops
                continue
            if event.rank not in before.waits:
                into = before.out
                assert into is not None
                common = (round_, into.iteration, into.operand, into.tile, into.slot, ())
                before.waits[event.rank] = self._add(
                    Wait, event.rank, into.rank, *common, before.done_flags[event.rank], before.rank
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
            deps.append(self._add(Wait, rank, into.rank, *common, (), flag, peer))
        if event.enters:
            deps.append(0)
        if event.kind is Copy:
            assert event.box is not None
            if event.scale_box is not None:
                operand, slot_of_scales = SCALE_OPERANDS[event.operand], into.scale_slot
                views = [self._scales(place, event.scale_box) for place in (event.sources[0], into)]
                at = (round_, event.iteration, operand, event.tile, slot_of_scales, tuple(deps))
                event.scale_op = self._add(Copy, rank, into.rank, *at, *views)
            src, dst = self._view(event.sources[0], event.box), self._view(into, event.box)
            event.op = self._add(Copy, rank, into.rank, *common, tuple(deps), src, dst)
        else:
            views = [self._view(place, place.frame) for place in event.sources]
            operands, sources = (views[:2], views[2:]) if event.kind is Gemm else ([], views)
            c = self._shard(rank, "C", into.frame) if event.completes else None
            out = self._view(into, into.frame)
            scales = [self._tile_scales(place) for place in event.sources[:2]] if event.kind is Gemm else []
            terms = *operands, tuple(sources), c, out, *scales
            event.op = self._add(event.kind, rank, into.rank, *common, tuple(deps), *terms)
        for flag in event.done_flags.values():
            self._add(Signal, rank, into.rank, *common, event.ops, flag)
