"""The derivation of rank 0's ops, for schedules in which every rank does what rank 0 does.

Rotations take events, places and tiles to others, and so divide them into classes. A class of events has one event on
each rank. This module derives one event of each class: for tiles, those of the first tile of each class of tiles, on
all ranks. Steps, slots and flag numbers are those of the class. So the work is that of one rank, and not of all.

The numbers are equal to those of :class:`distgemm.plan.movement.Derivation` and :class:`distgemm.plan.emit.Emitter` if
the order of events on a rank does not depend on the rank. Where two events of a rank have the same place in the order,
and the number of the rank or of a tile decides, the plan is not symmetric, and :class:`NotSymmetricError` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from distgemm.plan.emit import Emitter
from distgemm.plan.movement import Derivation, Event, Part, Place, cut_rows
from distgemm.plan.ops import Barrier, Box, Copy, Flag, Gemm, Op, Signal, Slot, Tile
from distgemm.plan.plan import Mechanism, Plan, PlanError, SyncMode, WorkspaceMode
from distgemm.plan.problem import GemmProblem
from distgemm.plan.resize import size_of_rank
from distgemm.plan.rotate import RotatedOps, RotatedSlots, Rotation, Tenants, rotated_shards
from distgemm.schedulers import DistributedTileScheduler, GatherRoute, Hop, NotSymmetricError, Symmetry, TileCoord
from distgemm.schedulers.symmetry import MODES

__all__ = ["derive_rotated"]

Item = TypeVar("Item")


def derive_rotated(
    problem: GemmProblem,
    scheduler: DistributedTileScheduler,
    workspace: WorkspaceMode,
    sync: SyncMode,
    mechanism: Mechanism,
    send_slots: int,
    ranks_per_host: int | None = None,
) -> Plan:
    """The plan of a problem under a symmetric schedule, from the ops of rank 0.

    Args:
        problem: as :func:`distgemm.make_plan` takes it, as the other arguments.
        scheduler: a schedule.
        workspace: "full" or "bounded".
        sync: "credit" or "barrier".
        mechanism: "push", "pull" or "store".
        send_slots: >= 1.
        ranks_per_host: None: all ranks share memory.

    Raises:
        NotSymmetricError: if the schedule or its plan is not symmetric. Then all ranks have to be derived.
        ValueError: as :func:`distgemm.make_plan` raises it.
    """
    if isinstance(scheduler.symmetry, NotSymmetricError):
        raise scheduler.symmetry
    if problem.scaling is not None or problem.groups > 1:
        raise NotSymmetricError("operands with scales or groups are derived for all ranks")
    derivation = ClassDerivation(problem, scheduler, mechanism, scheduler.symmetry)
    derivation.run()
    slots = derivation.allocate(workspace, send_slots)[0]
    shards = derivation.shards("A"), derivation.shards("B"), derivation.shards("D")
    rotation = Rotation(derivation.symmetry, derivation.edges, shards, derivation.row_cuts(), slots)
    ops = FirstRank(derivation, dict(zip("ABD", shards, strict=True)), sync).first_ops()
    tenants = derivation.tenants
    derivation.forget()
    plan = Plan(
        problem=problem,
        schedule=scheduler.name,
        mesh=scheduler.mesh,
        workspace=workspace,
        sync=sync,
        mechanism=mechanism,
        iterations=scheduler.iterations,
        edges=derivation.edges,
        shards=shards,
        rank_ops=RotatedOps(ops, rotation),
        slots=RotatedSlots(tenants, derivation.symmetry, derivation.edges),
        ranks_per_host=ranks_per_host,
    )
    vars(plan)["sizes"] = (size_of_rank(ops),) * scheduler.world_size
    vars(plan)["rotated"] = ops, derivation.symmetry.axes
    return plan


class ClassDerivation(Derivation):
    """One event of each class, with its step and its memory.

    A GEMM reads A and B from places of their classes, which may be on other ranks: its own are these, rotated.

    Args:
        problem: the product.
        scheduler: the schedule.
        mechanism: who transfers.
        symmetry: the rotations with which the schedule commutes.

    Attributes:
        order: for each event, in which order events of one step stand in ``events`` on every rank: (phase, unit).
        parts: (part, parts) of transfers of parts of tiles.
        tenants: for each slot of rank 0 what it holds.

    Raises:
        NotSymmetricError: if a tile is empty.
    """

    def __init__(
        self, problem: GemmProblem, scheduler: DistributedTileScheduler, mechanism: Mechanism, symmetry: Symmetry
    ) -> None:
        self.symmetry = symmetry
        self.holders: dict[str, dict[Tile, list[int]]] = {operand: defaultdict(list) for operand in "ABD"}
        for operand, of_class in self.holders.items():
            for tile in set(scheduler.partition[operand].of_rank(0)):
                assert tile is not None
                first, rank = self.first_of(operand, tile)
                of_class[first].append(rank)
            for ranks in of_class.values():
                ranks.sort()
        self.order: dict[Event, tuple[str, object]] = {}
        self.parts: dict[Event, tuple[int, int]] = {}
        self.tenants: list[Tenants] = []
        self._rows: set[tuple[str, int, int]] = set()
        super().__init__(problem, scheduler, mechanism)

    def first_of(self, operand: str, tile: Tile) -> tuple[Tile, int]:
        """The first tile of a tile's class, and the rank to which the rotation that brings the tile there takes 0."""
        rank = self.symmetry.inverse[self.symmetry.origin(operand, tile)]
        return self.symmetry.tile(operand, tile, rank), rank

    # --- the tiles of a class -------------------------------------------------------------------------

    def _work_of_ranks(self) -> list[dict[int, TileCoord]]:
        for mode, bounds in zip("mnkl", self.edges, strict=True):
            if any(low == high for low, high in pairwise(bounds)):
                raise NotSymmetricError(f"tiles of mode {mode} are empty")
        self.own = self._work(0)
        found: list[dict[int, TileCoord]] = [{} for _ in self.ranks]
        for iteration, (m, n, k, batch) in self.own.items():
            (m, n, batch), rank = self.first_of("D", (m, n, batch))
            found[rank][iteration] = TileCoord(m, n, self.symmetry.index("k", k, rank), batch)
        return found

    def _needs(self, operand: str) -> dict[Tile, dict[int, int]]:
        needs: dict[Tile, dict[int, int]] = defaultdict(dict)
        for tile, iteration in self._first_uses(operand, 0, self.own).items():
            first, rank = self.first_of(operand, tile)
            needs[first][rank] = iteration
        return {tile: dict(sorted(by.items())) for tile, by in needs.items()}

    def _holders(self, operand: str, tile: Tile) -> Sequence[int]:
        return self.holders[operand][tile]

    def _operand(self, operand: str, rank: int, tile: Tile) -> Place:
        first, by = self.first_of(operand, tile)
        return super()._operand(operand, self.symmetry.add(rank, by), first)

    def _like(self, rank: int) -> int:
        return 0

    def shards(self, operand: str) -> tuple[Box, ...]:
        """The boxes of the shards of all ranks.

        Raises:
            ValueError: if the tiles of a rank do not form one box.
        """
        self.shard(operand, 0)  # which checks the tiles of rank 0
        try:
            return rotated_shards(self.symmetry, self.edges, operand, self._spans(operand, 0)[0])
        except PlanError as error:
            raise self.fail(str(error)) from None

    # --- what a number of a rank decides --------------------------------------------------------------

    def refuse(self, what: str) -> NotSymmetricError:
        """The error for a plan in which the numbers of ranks or tiles decide about an order."""
        return NotSymmetricError(f"the numbers of ranks decide {what}")

    def _move(
        self,
        operand: str,
        tile: Tile,
        holders: Sequence[int],
        first_use: dict[int, int],
        route: GatherRoute,
        dtype: str,
    ) -> None:
        if len(holders) > 1:
            raise self.refuse(f"which holder sends {operand}{tile}")
        if len(self.symmetry.mesh) > 1 and len(set(first_use.values())) < len(first_use):
            raise self.refuse(f"which rank gets {operand}{tile} first")
        known = len(self.events)
        super()._move(operand, tile, holders, first_use, route, dtype)
        self._say(known, operand, tile)

    def _say(self, known: int, phase: str, unit: object) -> None:
        for event in self.events[known:]:
            self.order[event] = phase, unit

    def _hop(self, operand: str, tile: Tile, holder: int, hop: Hop, first_use: dict[int, int], dtype: str) -> None:
        super()._hop(operand, tile, holder, hop, first_use, dtype)
        if hop.parts > 1:
            mode = "n" if operand == "B" else "m"
            if (mode, hop.part, hop.parts) not in self._rows:
                self._rows.add((mode, hop.part, hop.parts))
                for low, high in pairwise(self.edges["mn".index(mode)]):
                    if len(set(cut_rows(low, high, hop.part, hop.parts))) < 2:
                        raise NotSymmetricError(f"parts of tiles of mode {mode} are empty")
            self.parts[self.events[-1]] = hop.part, hop.parts

    def row_cuts(self) -> list[tuple[str, int, int]]:
        """(mode, part, parts) of each part of a tile that moves by itself."""
        return sorted(self._rows)

    def _join(self, tile: Tile, parts: dict[int, Part]) -> None:
        last = [part.iterations[-1] for part in parts.values()]
        if len(set(last)) < len(last):
            raise self.refuse(f"in which order parts of D{tile} are added")
        super()._join(tile, parts)

    def _multiply(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        known = len(self.events)
        super()._multiply(tiles)
        iteration = 0
        for event in self.events[known:]:
            if event.kind is Gemm:  # the only one of a rank in its iteration; the transfers of its result follow
                iteration = event.iteration
            self.order[event] = "multiply", iteration

    def _sum(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        for tile, parts in tiles.items():
            for part in parts.values():
                if sum(not parts[rank].whole for rank in part.incoming) > 1:
                    raise self.refuse(f"in which order parts of D{tile} are added")
        known = len(self.events)
        super()._sum(tiles)
        for event in self.events[known:]:
            rank = event.rank if event.kind is not Copy else event.sources[0].rank
            self.order[event] = "sum", (event.tile, rank)

    def _send_final(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        known = len(self.events)
        super()._send_final(tiles)
        for event in self.events[known:]:
            self.order.setdefault(event, ("final", event.tile))

    def in_turn(
        self, items: list[Item], key: Callable[[Item], object], rank_of: Callable[[Item], tuple[Event, int]]
    ) -> list[Item]:
        """Items of one rank in the order of a key, or NotSymmetricError if another rank would have another order.

        Args:
            items: one of each class, in the order of ``events``.
            key: the key.
            rank_of: the event that decides the order of equal keys, and the rank that is rotated to rank 0.
        """
        keyed = sorted([(key(item), place) for place, item in enumerate(items)])
        groups: dict[object, list[int]] = defaultdict(list)
        for of_item, place in keyed:
            groups[of_item].append(place)
        for group in groups.values():
            for one, other in pairwise(group):
                if not self._ordered(*rank_of(items[one]), *rank_of(items[other])):
                    raise self.refuse("the order of events of one step")
        return [items[place] for _, place in keyed]

    def _ordered(self, one: Event, rank: int, other: Event, other_rank: int) -> bool:
        """Whether two events have the same order in ``events`` on every rank, once each is rotated from a rank to 0."""
        (phase, unit), (other_phase, other_unit) = self.order[one], self.order[other]
        if phase != other_phase:
            return True
        if phase == "multiply" and unit != other_unit:
            return True
        if rank != other_rank:
            return False
        if unit == other_unit:
            return True
        return phase in "AB" and self._tiles_ordered(phase, unit, other_unit)  # type: ignore[arg-type]

    def _tiles_ordered(self, operand: str, one: Tile, other: Tile) -> bool:
        """Whether rotations keep the order of two tiles, because they rotate the first mode that differs alike."""
        for mode, at, other_at in zip(MODES[operand], one, other, strict=True):
            if at != other_at:
                return self.symmetry.together(mode, at, other_at)
        return True

    # --- where ----------------------------------------------------------------------------------------

    def allocate(self, workspace: WorkspaceMode, send_slots: int) -> tuple[tuple[Slot, ...], ...]:
        """Give every place a slot. Returns the slots of rank 0."""
        alike = all(len({high - low for low, high in pairwise(bounds)}) == 1 for bounds in self.edges)
        if workspace == "bounded" and not alike:
            raise NotSymmetricError("tiles differ in size, which decides how ranks share slots")
        self.places = [[place for of_rank in self.places for place in of_rank]]
        slots = self._allocate(0, workspace == "bounded", send_slots)
        held: list[tuple[str, str, list[Tile]]] = [(slot.dtype, "", []) for slot in slots]
        for place in self.in_order(0):
            dtype, _, tiles = held[place.slot]
            held[place.slot] = dtype, place.operand, tiles
            tiles.append(self.symmetry.tile(place.operand, place.tile, self.symmetry.inverse[place.rank]))
        self.tenants = [(dtype, operand, tuple(tiles)) for dtype, operand, tiles in held]
        return (RotatedSlots(self.tenants, self.symmetry, self.edges)[0],)

    def in_order(self, rank: int) -> list[Place]:
        def first(place: Place) -> tuple[Event, int]:
            assert place.first is not None
            return place.first, place.rank

        return self.in_turn(self.places[0], lambda place: (place.start, place.iteration), first)


class Seen(NamedTuple):
    """An event of a class, as an event on rank 0 sees it.

    Attributes:
        event: the event of the class.
        rank: the rank on which it is.
    """

    event: Event
    rank: int


class Credit(NamedTuple):
    """A credit, as the event that waits for it sees it on rank 0.

    Attributes:
        number: number of the flag.
        initial: as :class:`distgemm.plan.ops.Flag` has it.
        readers: the events after which the slot may be written again.
        last: the last one of them.
    """

    number: int
    initial: int
    readers: list[Seen]
    last: Seen


class Told(NamedTuple):
    """A flag for an event that needs another one, which does not write its rank.

    Attributes:
        event: the event of the class that waits.
        rank: its rank, as the other event on rank 0 sees it.
        number: number of the flag.
        credit: whether the other event reads what the event overwrites.
    """

    event: Event
    rank: int
    number: int
    credit: bool


class FirstRank(Emitter):
    """Makes the ops of rank 0 from the classes of events.

    Args:
        derivation: after ``run`` and ``allocate``.
        shards: the box of each rank's shard, by operand ("A", "B", "D").
        sync: "credit" or "barrier", as :func:`distgemm.make_plan` takes it.
    """

    def __init__(self, derivation: ClassDerivation, shards: dict[str, tuple[Box, ...]], sync: SyncMode) -> None:
        super().__init__(derivation, shards, sync)
        self.classes, self.symmetry = derivation, derivation.symmetry
        self.events = derivation.in_turn(derivation.events, Event.order, lambda event: (event, event.rank))
        for position, event in enumerate(self.events):
            event.position = position
        self.flags = 0
        self.after: list[list[Seen]] = [
            [self._before(event, before) for before in event.after] for event in self.events
        ]
        self.credits: dict[int, list[Credit]] = defaultdict(list)  # by the position of the event that waits
        self.arrivals: dict[int, int] = {}  # flag numbers by the position of the transfer
        self.told: dict[int, list[Told]] = {}  # by the position of the event that they need
        self.signals: dict[int, list[tuple[Event, Credit]]] = defaultdict(list)  # by the position of the last reader
        self._images: dict[int, Event] = {}  # on rank 0, by position
        self._others: dict[tuple[int, int], Event] = {}  # on other ranks
        self._places: dict[tuple[int, int], Place] = {}

    # --- numbers --------------------------------------------------------------------------------------

    def _before(self, event: Event, before: Event) -> Seen:
        """An event that ``event`` follows. A GEMM follows transfers of A and B into its own rank."""
        if event.kind is Gemm and before.operand != "D":
            assert before.out is not None
            return Seen(before, self.symmetry.subtract(before.rank, before.out.rank))
        return Seen(before, self.symmetry.subtract(before.rank, event.rank))

    def _users(self, place: Place, box: Box, rank: int) -> list[Seen]:
        """The events after which ``box`` of a place may be written, if the place is on a rank."""
        by = self.symmetry.subtract(rank, place.rank)
        return [
            Seen(event, rank if event.kind is Gemm and place.operand != "D" else self.symmetry.add(event.rank, by))
            for event in place.frontier(box)
        ]

    def _next_flag(self) -> int:
        self.flags += 1
        return self.flags - 1

    def number(self) -> None:
        """Give every flag its number, in the order in which :class:`Emitter` does it on every rank."""
        for event in self.events:
            into = event.out
            if into is None or into.last is None:
                continue
            box = event.box if into.last is into and event.box is not None else into.last.frame
            rank = self.symmetry.subtract(into.rank, event.rank)
            if event.crosses and into.wraps and self.barrier:
                event.enters = True
            elif event.crosses:
                self._add_credit(event, self._users(into.last, box, rank))
            elif into.first is event or event.kind is Copy:
                readers = self._users(into.last, box, rank)
                far = [reader for reader in readers if reader.rank]
                if not into.wraps:
                    self.after[event.position] += readers
                elif self.barrier:
                    event.enters = bool(far)
                else:
                    for reader in far:
                        self._add_credit(event, [reader])
        crossing = [event for event in self.events if event.crosses]
        # Flags are on the rank that is written: the order of events there counts.
        for event in self._sorted(crossing, lambda event: event.out.rank):  # type: ignore[union-attr]
            self.arrivals[event.position] = self._next_flag()
        told: dict[Event, list[Told]] = defaultdict(list)
        for event in self.events:
            for before, rank in self.after[event.position]:
                own = self.symmetry.inverse[rank]  # this event's rank, as ``before`` on rank 0 sees it
                arrives = before.crosses and self._out_rank(before) == own
                if rank and not arrives and own not in [each.rank for each in told[before]]:
                    # A GEMM reads from its own rank, which is another one.
                    source = before.rank if before.kind is Gemm else before.sources[0].rank
                    reads = self.symmetry.subtract(source, before.rank) == own
                    told[before].append(Told(event, own, self._next_flag(), reads))
        for needed, flags in told.items():
            in_list = sorted(flags, key=lambda flag: self.place_in_list[flag.event])
            # Their order on the rank of the event that they need counts.
            self.told[needed.position] = self.classes.in_turn(
                in_list,
                lambda flag: flag.event.order(),
                lambda flag: (flag.event, self.symmetry.subtract(flag.event.rank, flag.rank)),
            )

    def _out_rank(self, event: Event) -> int:
        """The rank that an event writes, if it is on rank 0."""
        assert event.out is not None
        return self.symmetry.subtract(event.out.rank, event.rank)

    def _sorted(self, events: list[Event], rank: Callable[[Event], int]) -> list[Event]:
        in_list = sorted(events, key=lambda event: self.place_in_list[event])
        return self.classes.in_turn(in_list, Event.order, lambda event: (event, rank(event)))

    def _add_credit(self, event: Event, readers: list[Seen]) -> None:
        assert event.out is not None
        last = max(readers, key=lambda reader: reader.event.position)
        alike = [reader for reader in readers if reader.event.order() == last.event.order()]
        if len(alike) > 1:
            raise self.classes.refuse("which reader of a slot is the last one")
        credit = Credit(self._next_flag(), int(event.out.wraps), readers, last)
        self.credits[event.position].append(credit)
        self.signals[last.event.position].append((event, credit))

    # --- ops ------------------------------------------------------------------------------------------

    def first_ops(self) -> tuple[Op, ...]:
        """The ops of rank 0, in an order in which it can issue them."""
        self.place_in_list = {event: place for place, event in enumerate(self.classes.events)}
        if self.barrier:
            self._add(Barrier, 0, 0, 0, 0, "D", (), -1, ())
        self.number()
        for event in self.events:
            self._images[event.position] = self._image(event)
        for event in self.events:
            self._emit(self._images[event.position])
            for writer, credit in self.signals.get(event.position, ()):
                # The writer is on the rank from which the last reader is seen on rank 0.
                rank = self.symmetry.inverse[credit.last.rank]
                deps = []
                for reader in credit.readers:
                    if self.symmetry.add(reader.rank, rank):
                        raise self.classes.refuse("on which rank the readers of a slot are")
                    deps.append(self._images[reader.event.position].op)
                into = self._place(writer.out, self.symmetry.subtract(rank, writer.rank))  # type: ignore[arg-type]
                flag = Flag(rank, credit.number, credit.initial, True)
                at = event.round, into.iteration, into.operand, into.tile, into.slot
                self._add(Signal, 0, into.rank, *at, tuple(deps), flag)
        return tuple(self.ops[0])

    def _image(self, event: Event) -> Event:
        """An event of a class on rank 0, without the events after it that :meth:`Emitter._deps` asks for."""
        by = self.symmetry.inverse[event.rank]
        assert event.out is not None
        made = Event(event.kind, 0, event.iteration, event.operand, self._tile(event, by), event.phase)
        made.completes, made.round, made.enters = event.completes, event.round, event.enters
        made.out = self._place(event.out, by)
        if event.kind is Gemm:
            a, b, *sums = event.sources
            made.sources = [self._place(each, self.symmetry.inverse[each.rank]) for each in (a, b)]
            made.sources += [self._place(each, by) for each in sums]
        else:
            made.sources = [self._place(each, by) for each in event.sources]
        if event.box is not None:
            made.box = made.out.frame
            if event in self.classes.parts:
                batch, rows, columns = made.out.frame
                made.box = batch, cut_rows(*rows, *self.classes.parts[event]), columns
        made.done_flags = self._done_flags(event, 0)
        made.credits = [
            (Flag(0, credit.number, credit.initial, True), credit.last.rank) for credit in self.credits[event.position]
        ]
        made.after = [
            self._images.get(before.position) or self._same(before) if not rank else self._other(before, rank)
            for before, rank in self.after[event.position]
        ]
        return made

    def _same(self, before: Event) -> Event:
        raise AssertionError(f"{before} comes after an event that needs it")

    def _done_flags(self, event: Event, rank: int) -> dict[int, Flag]:
        """The flags that say that an event of a class has ended, if it is on a rank."""
        found = {}
        if event.crosses:
            to = self.symmetry.add(self._out_rank(event), rank)
            found[to] = Flag(to, self.arrivals[event.position], 0, False)
        for told in self.told.get(event.position, ()):
            to = self.symmetry.add(told.rank, rank)
            found[to] = Flag(to, told.number, 0, told.credit)
        return found

    def _other(self, event: Event, rank: int) -> Event:
        """An event of a class on another rank: what a Wait for it needs."""
        found = self._others.get((event.position, rank))
        if found is None:
            assert event.out is not None
            found = Event(event.kind, rank, event.iteration, event.operand, event.tile, event.phase)
            found.out = self._place(event.out, self.symmetry.subtract(rank, event.rank))
            found.done_flags = self._done_flags(event, rank)
            self._others[event.position, rank] = found
        return found

    def _tile(self, event: Event, by: int) -> Tile:
        if type(event.tile) is TileCoord:
            return TileCoord(*self.symmetry.tile("work", event.tile, by))
        return self.symmetry.tile(event.operand, event.tile, by)

    def _place(self, place: Place, by: int) -> Place:
        """A place, rotated."""
        found = self._places.get((id(place), by))
        if found is None:
            tile = self.symmetry.tile(place.operand, place.tile, by)
            frame = self.classes.frame(place.operand, tile)
            rank = self.symmetry.add(place.rank, by)
            found = Place(rank, place.operand, tile, frame, place.dtype, place.iteration, place.shard)
            found.slot = place.slot
            self._places[id(place), by] = found
        return found
