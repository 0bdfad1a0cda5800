"""The derivation: a problem and a schedule in, a plan out.

What moves follows from where the tiles lie (partition) and who multiplies them when (work):

1. a rank that multiplies a tile of A or B that it does not hold needs it: the route gives the hops;
2. the ranks that add into one tile of D have their partial sums reduced along the route, and the result
   reaches every owner;
3. every event (a GEMM, a sum, a transfer) gets a step, the place in time that its inputs allow; every tile
   that rests in the workspace gets a lifetime in steps, and a slot;
4. ops are emitted in the order of their steps, each with just the dependencies that its memory asks for.

Between ranks, memory is protected by flags: a transfer waits for the credit that the slot may be written
again, and is followed by the signal of its arrival.

The mechanism says who transfers. "push": the rank that has the tile copies it into the slot of the one that needs it.
"pull": the one that needs it copies it, from a slot, where the other has put it. "store": a GEMM writes the partial
sum that another rank adds to into that rank's slot itself; all else is pushed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise
from math import prod
from typing import Any

from distgemm.plan.ops import (
    Barrier,
    Box,
    Copy,
    Flag,
    Gemm,
    Op,
    Reduce,
    Signal,
    Slot,
    Tile,
    View,
    Wait,
    box_extents,
    box_size,
    contains,
    maker,
    overlaps,
)
from distgemm.plan.plan import SLOT_ALIGNMENT, STORED_ALIGNMENT, Plan, collector_paused, slot_pitch
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.schedulers import DistributedTileScheduler, GatherRoute, Hop, TileCoord, get_schedule

__all__ = ["make_plan"]

WORKSPACES = ("full", "bounded")
SYNCS = ("credit", "barrier")
MECHANISMS = ("push", "pull", "store")

SEND_SLOTS = 2
"""Results of a rank that may be on their way to another one at once: one is sent while the next is computed."""

OPS: tuple[type[Op], ...] = (Barrier, Copy, Gemm, Reduce, Signal, Wait)
MAKERS = {kind: maker(kind) for kind in OPS}

# Within a step, tiles of A and B leave first, then GEMMs and sums run, then their results leave.
GATHER, COMPUTE, RESULT = 0, 1, 2
PHASES = 3


@dataclass(eq=False, slots=True)
class _Place:
    """Where a tile rests in a rank's memory: in a shard, or for a while in a slot.

    Events name all of it by ``frame``, the same object.
    """

    rank: int
    operand: str
    tile: Tile
    frame: Box
    dtype: str
    iteration: int  # the iteration that first uses it
    shard: bool = False
    # (who, what, whether it writes) since it was last written, and that write first; where a part of it was
    # written, whatever there is of other parts too.
    accesses: list[tuple[_Event, Box, bool]] = field(default_factory=list)
    first: _Event | None = None  # the first write
    parts: bool = False  # whether the last write was of a part
    start: int = -1  # steps of the first write, and of the last access
    end: int = -1
    slot: int = -1
    remote: bool = False  # whether another rank writes it or reads it, or it is brought from another rank
    staged: _Place | None = None  # of a shard: the slot in which others find it
    last: _Place | None = None  # whose place in the slot it takes
    wraps: bool = False  # ``last`` held the slot in the replay before
    view: View | None = None  # of all of it

    @property
    def pitch(self) -> int:
        return slot_pitch(box_extents(self.frame)[2], self.dtype)

    @property
    def elements(self) -> int:
        """What it takes up in a slot."""
        batches, rows, _ = box_extents(self.frame)
        return batches * rows * self.pitch

    def frontier(self, box: Box) -> list[_Event]:
        """The events that a write to ``box`` must follow: reads since the last write, or a write never read."""
        if box is self.frame and not self.parts:
            return [event for event, _, _ in (self.accesses[:0:-1] or self.accesses)]
        found: list[_Event] = []
        boxes: list[Box] = []
        for event, other, writes in reversed(self.accesses):
            if overlaps(other, box) and not (writes and any(overlaps(later, other) for later in boxes)):
                found.append(event)
                boxes.append(other)
        return found

    def writers(self, box: Box) -> list[_Event]:
        """The events whose writes a read of ``box`` sees."""
        return [event for event, other, writes in reversed(self.accesses) if writes and overlaps(other, box)]


@dataclass(eq=False, slots=True)
class _Event:
    """A GEMM, a sum or a transfer, before it is an op."""

    kind: type[Op]
    rank: int
    iteration: int
    operand: str
    tile: Tile
    phase: int
    floor: int = 0  # earliest step
    box: Box | None = None  # what a transfer moves
    sources: list[_Place] = field(default_factory=list)  # Gemm: A, B, then partial sums
    out: _Place | None = None
    completes: bool = False  # adds beta * C
    after: list[_Event] = field(default_factory=list)  # whose results or room it needs
    follows: _Event | None = None  # the GEMM before it on the same rank; an order in time, not a need
    step: int = -1
    round: int = -1
    position: int = -1  # among all events, in the order in which they become ops
    op: int = -1
    told: dict[int, Flag] = field(default_factory=dict)  # by rank: what done_flags it that the event has ended
    waits: dict[int, int] = field(default_factory=dict)  # by rank: its Wait for that
    credits: list[tuple[Flag, int]] = field(default_factory=list)  # what lets it write, and from which rank
    enters: bool = False  # waits for the replay's Barrier

    @property
    def crosses(self) -> bool:
        """Whether it writes another rank's memory."""
        return self.out is not None and self.out.rank != self.rank

    def read(self, place: _Place, box: Box) -> None:
        if place.shard and place.operand != "D":
            return  # nobody writes it
        place.remote |= place.rank != self.rank
        for event in place.writers(box) if place.parts else (place.accesses[0][0],):
            if event not in self.after:
                self.after.append(event)
        place.accesses.append((self, box, False))

    def write(self, place: _Place, box: Box) -> None:
        place.remote |= place.rank != self.rank
        if place.first is None:
            place.first = self
        elif place.rank == self.rank:
            for event in place.frontier(box):
                if event is not self and event not in self.after:
                    self.after.append(event)
        if box is place.frame:
            place.accesses = [(self, box, True)]
            place.parts = False
        else:
            place.accesses = [access for access in place.accesses if not contains(box, access[1])]
            place.accesses.append((self, box, True))
            place.parts = True

    def settle(self) -> None:
        """The step: as early as what it needs, and the GEMM before it, allow. Those must have been settled."""
        step = self.floor
        for before in self.after:
            # What travels is there one step later.
            ready = before.step + 1 if before.kind is Copy or before.crosses else before.step
            if ready > step:
                step = ready
        if self.follows is not None and self.follows.step >= step:
            step = self.follows.step + 1
        self.step = step
        self.round = step * PHASES + self.phase
        out = self.out
        if out is not None:
            if out.start < 0 or step < out.start:
                out.start = step
            if step > out.end:
                out.end = step
        for place in self.sources:
            if step > place.end:
                place.end = step

    def order(self) -> tuple[int, int]:
        """By round, GEMMs first, and then by the iteration that is served."""
        return self.round * 2 + (self.kind is not Gemm), self.out.iteration if self.out else self.iteration


@dataclass(eq=False, slots=True)
class _Part:
    """What one rank adds to one tile of D."""

    rank: int
    frame: Box
    iterations: list[int] = field(default_factory=list)
    incoming: list[int] = field(default_factory=list)  # ranks whose partial sums it receives
    to: int | None = None  # rank that it sends its partial sum to; None: it completes the tile
    whole: bool = True  # complete with its last GEMM, which adds what arrives in its epilogue; else by a Reduce
    arrived: list[_Place] = field(default_factory=list)
    home: _Place | None = None  # where its partial sum accumulates


def _bounds(extent: int, shards: int, chunks: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Bounds of shards * chunks tiles: shards by ceil-division, or of the given sizes; chunks of each alike."""
    edges = [0]
    length = -(-extent // shards)
    for shard in range(shards):
        start = edges[-1]
        stop = min((shard + 1) * length, extent) if sizes is None else start + sizes[shard]
        part = -(-(stop - start) // chunks)
        edges += [min(start + (chunk + 1) * part, stop) for chunk in range(chunks)]
    return tuple(edges)


class _Derivation:
    """Steps 1 to 3: the events, when they happen, and where their tiles rest."""

    def __init__(self, problem: GemmProblem, scheduler: DistributedTileScheduler, mechanism: str) -> None:
        self.problem = problem
        self.scheduler = scheduler
        self.mechanism = mechanism
        self.ranks = range(scheduler.world_size)
        self.out_dtype, self.partial_dtype = str(problem.out_dtype), str(problem.partial_dtype)
        self.edges = self._edges()
        self.frames: dict[tuple[str, Tile], Box] = {}
        self.work = [self._work(rank) for rank in self.ranks]
        self.events: list[_Event] = []
        self.places: list[list[_Place]] = [[] for _ in self.ranks]
        # Where each rank has tiles of A and B, and those of D that are delivered to it; and its own results.
        self.landed: dict[str, list[dict[Tile, _Place]]] = {operand: [{} for _ in self.ranks] for operand in "ABD"}
        self.results: list[dict[Tile, _Place]] = [{} for _ in self.ranks]

    def run(self) -> None:
        self._gather()
        parts = self._parts()
        self._multiply(parts)
        self._sum(parts)
        self._deliver(parts)

    def forget(self) -> None:
        """Cut the circles in which events and places refer to each other, so that they are freed at once."""
        for place in chain(*self.places, *(places.values() for places in self.results)):
            place.accesses = []
            place.first = place.last = place.staged = None

    def fail(self, message: str) -> ValueError:
        return ValueError(f"{self.scheduler.name} on the mesh {self.scheduler.mesh}: {message}")

    # --- extents ------------------------------------------------------------------------------------

    def _edges(self) -> tuple[tuple[int, ...], ...]:
        result = []
        for mode, tiles, chunks in zip("mnkl", self.scheduler.grid, self.scheduler.chunks, strict=True):
            shards = tiles // chunks
            sizes = self._rows(shards) if mode == "m" and self.problem.m_per_rank is not None else None
            result.append(_bounds(getattr(self.problem, mode), shards, chunks, sizes))
        return tuple(result)

    def _rows(self, shards: int) -> list[int]:
        """Rows of each shard of M, from the rows that each rank holds of A, or else of D."""
        rows, scheduler = self.problem.m_per_rank or (), self.scheduler
        if len(rows) != scheduler.world_size:
            raise self.fail(f"m_per_rank {rows} has {len(rows)} entries for {scheduler.world_size} ranks")
        for operand in ("A", "D"):
            held = [
                {tile[0] // scheduler.chunks.m for tile in tiles if tile is not None}
                for tiles in scheduler.partition[operand].tiles
            ]
            if all(len(shard) == 1 for shard in held) and len(set().union(*held)) == shards:
                break
        else:
            raise self.fail("m_per_rank says which rows each rank holds; here no rank has rows of its own")
        sizes: dict[int, int] = {}
        for rank, (shard,) in enumerate(held):
            if sizes.setdefault(shard, rows[rank]) != rows[rank]:
                raise self.fail(f"m_per_rank {rows}: rank {rank} holds the same rows as a rank with another number")
        if sum(sizes.values()) != self.problem.m:
            raise self.fail(f"m_per_rank {rows} makes {sum(sizes.values())} rows, the problem has m = {self.problem.m}")
        return [sizes[shard] for shard in range(shards)]

    def _work(self, rank: int) -> dict[int, TileCoord]:
        """The tiles that have any elements, by iteration."""
        tiles = self.scheduler.work.tiles[rank]
        empty = [{index for index, (low, high) in enumerate(pairwise(edges)) if low == high} for edges in self.edges]
        if not any(empty):
            return {iteration: TileCoord(*tile) for iteration, tile in enumerate(tiles) if tile is not None}
        return {
            iteration: TileCoord(*tile)
            for iteration, tile in enumerate(tiles)
            if tile is not None and not any(index in of_mode for index, of_mode in zip(tile, empty, strict=True))
        }

    def frame(self, operand: str, tile: Tile) -> Box:
        """The box of an operand's tile."""
        found = self.frames.get((operand, tile))
        if found is None:
            rows, columns = {"A": (0, 2), "B": (1, 2), "D": (0, 1)}[operand]
            row, column, batch = tile
            edges = self.edges
            found = (
                (edges[3][batch], edges[3][batch + 1]),
                (edges[rows][row], edges[rows][row + 1]),
                (edges[columns][column], edges[columns][column + 1]),
            )
            self.frames[operand, tile] = found
        return found

    def shard(self, operand: str, rank: int) -> Box:
        """The box that a rank's tiles make up."""
        tiles = {tile for tile in self.scheduler.partition[operand].tiles[rank] if tile is not None}
        if not tiles:
            return (0, 0), (0, 0), (0, 0)
        spans = [sorted({tile[mode] for tile in tiles}) for mode in range(3)]
        first = self.frame(operand, (spans[0][0], spans[1][0], spans[2][0]))
        last = self.frame(operand, (spans[0][-1], spans[1][-1], spans[2][-1]))
        contiguous = all(span[-1] - span[0] == len(span) - 1 for span in spans)
        if not contiguous or prod(map(len, spans)) != len(tiles):
            raise self.fail(f"the tiles of {operand} that rank {rank} holds do not make up one box")
        return tuple((low, high) for (low, _), (_, high) in zip(first, last, strict=True))  # type: ignore[return-value]

    # --- what moves -----------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Tiles of A and B that a rank multiplies and does not hold."""
        for operand, route in (("A", self.scheduler.route.a), ("B", self.scheduler.route.b)):
            layout = self.scheduler.partition[operand]
            needs: dict[Tile, dict[int, int]] = defaultdict(dict)
            for rank in self.ranks:
                first_use: dict[Tile, int] = {}
                for iteration, (m, n, k, batch) in self.work[rank].items():
                    first_use.setdefault((m, k, batch) if operand == "A" else (n, k, batch), iteration)
                for tile in first_use.keys() - set(layout.tiles[rank]):
                    needs[tile][rank] = first_use[tile]
            for moved, by in sorted(needs.items()):
                self._move(operand, moved, layout.holders(moved), by, route, self.problem.dtype)

    def _move(
        self,
        operand: str,
        tile: Tile,
        holders: Sequence[int],
        first_use: dict[int, int],
        route: GatherRoute,
        dtype: str,
    ) -> None:
        """Bring a tile to every rank of ``first_use``, each served by the holder nearest to it."""
        served: dict[int, list[int]] = defaultdict(list)
        for rank in first_use:
            nearest = min(holders, key=lambda holder: self._distance(holder, rank)) if len(holders) > 1 else holders[0]
            served[nearest].append(rank)
        for holder, needers in served.items():
            # Those who need it at the same time are served downwards from the holder: no two holders start
            # with the same rank.
            needers.sort(key=lambda rank: (first_use[rank], (holder - rank) % self.scheduler.world_size))
            for hop in self._useful(route.hops(self.scheduler.mesh, holder, needers), needers):
                self._hop(operand, tile, holder, hop, first_use, dtype)
            for rank in needers:
                landed = self.landed[operand][rank].get(tile)
                arrived = sum(box_size(box) for _, box, writes in landed.accesses if writes) if landed else 0
                if arrived != box_size(self.frame(operand, tile)):
                    raise self.fail(f"the route of {operand}{tile} does not bring all of it to rank {rank}")

    @staticmethod
    def _useful(hops: Sequence[Hop], needers: Sequence[int]) -> list[Hop]:
        """The hops to ranks that use the tile or pass it on."""
        useful: list[Hop] = []
        sources: set[int] = set()
        for hop in reversed(hops):
            passed_on = hop.dst in sources and any(
                later.src == hop.dst
                and later.part * hop.parts < (hop.part + 1) * later.parts
                and hop.part * later.parts < (later.part + 1) * hop.parts
                for later in useful
            )
            if passed_on or hop.dst in needers:
                useful.append(hop)
                sources.add(hop.src)
        return useful[::-1]

    def _distance(self, holder: int, rank: int) -> tuple[int, int]:
        """Mesh axes to cross, then how far clockwise."""
        crossed, a, b = 0, holder, rank
        for extent in reversed(self.scheduler.mesh):
            crossed += a % extent != b % extent
            a, b = a // extent, b // extent
        return crossed, (rank - holder) % self.scheduler.world_size

    def _hop(self, operand: str, tile: Tile, holder: int, hop: Hop, first_use: dict[int, int], dtype: str) -> None:
        frame = self.frame(operand, tile)
        box = frame
        if hop.parts > 1:
            batch, (top, bottom), columns = frame
            rows = -(-(bottom - top) // hop.parts)
            box = batch, (min(top + hop.part * rows, bottom), min(top + (hop.part + 1) * rows, bottom)), columns
        if not box_size(box):
            return
        landed = self.landed[operand]
        if hop.src != holder:
            passed_on = landed[hop.src].get(tile)
            if passed_on is None or not passed_on.writers(box):
                raise self.fail(f"the route of {operand}{tile}: {hop} passes on what did not arrive there")
            source = passed_on
        else:
            source = self._result(holder, tile) if operand == "D" else self._own(operand, holder, tile)
        used = first_use.get(hop.dst)
        floor = hop.turn if hop.turn is not None else (used or 0) - 1
        place = landed[hop.dst].get(tile)
        if place is None:
            place = _Place(hop.dst, operand, tile, frame, dtype, floor if used is None else used)
            landed[hop.dst][tile] = place
            self.places[hop.dst].append(place)
        if place.writers(box):
            raise self.fail(f"the route of {operand}{tile}: {hop} brings what has arrived there already")
        self._send(place, source, box, GATHER if operand != "D" else RESULT, floor)

    def _own(self, operand: str, rank: int, tile: Tile) -> _Place:
        """A tile of A or B in the rank's shard."""
        places = self.landed[operand][rank]
        if tile not in places:
            places[tile] = _Place(rank, operand, tile, self.frame(operand, tile), self.problem.dtype, 0, shard=True)
        return places[tile]

    def _send(self, into: _Place, source: _Place, box: Box, phase: int, floor: int = 0) -> None:
        """A transfer, by the rank that the mechanism says."""
        rank = source.rank
        if self.mechanism == "pull":
            rank, source = into.rank, self._staged(source, phase) if source.shard else source
        event = _Event(Copy, rank, into.iteration, into.operand, into.tile, phase, max(floor, 0), box, [source], into)
        into.remote = True
        event.read(source, box)
        event.write(into, box)
        event.settle()
        self.events.append(event)

    def _staged(self, shard: _Place, phase: int) -> _Place:
        """A tile of a shard in a slot: other ranks can read only what is in the workspace."""
        if shard.staged is None:
            place = replace(shard, shard=False, accesses=[], first=None, start=-1, end=-1, view=None)
            event = _Event(Copy, shard.rank, shard.iteration, shard.operand, shard.tile, phase, 0, shard.frame)
            event.sources, event.out = [shard], place
            event.read(shard, shard.frame)
            event.write(place, shard.frame)
            event.settle()
            self.events.append(event)
            self.places[shard.rank].append(place)
            shard.staged = place
        return shard.staged

    def _parts(self) -> dict[Tile, dict[int, _Part]]:
        """Who adds into each tile of D, and where the partial sums go."""
        tiles: dict[Tile, dict[int, _Part]] = {}
        for rank in self.ranks:
            for iteration, work in self.work[rank].items():
                tile = (work.m, work.n, work.l)
                parts = tiles.setdefault(tile, {})
                if rank not in parts:
                    parts[rank] = _Part(rank, self.frame("D", tile))
                parts[rank].iterations.append(iteration)
        for of_tile, parts in sorted(tiles.items()):
            self._join(of_tile, parts)
        return tiles

    def _join(self, tile: Tile, parts: dict[int, _Part]) -> None:
        """Connect the parts of one tile along the route, towards the rank that completes it."""
        reducer = self._reducer(tile)
        contributors = [part for rank, part in parts.items() if rank != reducer]
        contributors.sort(key=lambda part: (part.iterations[-1], part.rank))
        frame = self.frame("D", tile)
        parts.setdefault(reducer, _Part(reducer, frame))
        if not contributors:
            return
        ranks = [part.rank for part in contributors]
        route = self.scheduler.route.d
        for hop in route.hops(self.scheduler.mesh, ranks, reducer):
            # A rank without a part of its own may pass on what it receives.
            src, dst = (parts.setdefault(rank, _Part(rank, frame)) for rank in hop[:2])
            if src.rank == reducer or src.to is not None or not (src.iterations or src.incoming):
                raise self.fail(f"the route of D{tile} from {ranks} to {reducer}: {hop} does not fit")
            src.to = dst.rank
            dst.incoming.append(src.rank)
        lost = [part.rank for part in parts.values() if part.to is None and part.rank != reducer]
        if lost:
            raise self.fail(f"the route of D{tile} does not send on the partial sums of ranks {lost}")
        # A partial sum is added in the epilogue of the last GEMM if it is complete before, all the way up.
        for part in sorted(parts.values(), key=lambda part: part.iterations[-1] if part.iterations else -1):
            before = [parts[rank] for rank in part.incoming]
            place = route.final_add if part.to is None else route.add
            last = (part.iterations or [-1])[-1]
            part.whole = not before or (
                place == "epilogue"
                and (len(before) == 1 or route.add == "kernel")
                and all(one.whole and -1 < (one.iterations or [-1])[-1] < last for one in before)
            )

    def _reducer(self, tile: Tile) -> int:
        """The owner that completes a tile: where there are several, the one whose own part comes last."""
        owners = self.scheduler.partition.d.holders(tile)
        if len(owners) == 1:
            return owners[0]
        last = dict.fromkeys(owners, -1)
        m, n, batch = tile
        for k in range(self.scheduler.grid.k):
            for rank, iteration in self.scheduler.work.inverse((m, n, k, batch)):
                if rank in last:
                    last[rank] = max(last[rank], iteration)
        return max(owners, key=lambda rank: (last[rank], -rank))

    # --- who multiplies and adds ------------------------------------------------------------------------

    def _multiply(self, tiles: dict[Tile, dict[int, _Part]]) -> None:
        """One GEMM for each tile of work, in the order of iterations."""
        before: list[_Event | None] = [None for _ in self.ranks]
        landed_a, landed_b = self.landed["A"], self.landed["B"]
        for iteration in range(self.scheduler.iterations):
            for rank, of_rank in enumerate(self.work):
                work = of_rank.get(iteration)
                if work is None:
                    continue
                m, n, k, batch = work
                a = landed_a[rank].get((m, k, batch)) or self._own("A", rank, (m, k, batch))
                b = landed_b[rank].get((n, k, batch)) or self._own("B", rank, (n, k, batch))
                event = _Event(Gemm, rank, iteration, "D", work, COMPUTE, iteration, None, [a, b], follows=before[rank])
                before[rank] = event
                self.events.append(event)
                event.read(a, a.frame)
                event.read(b, b.frame)
                parts = tiles[m, n, batch]
                part = parts[rank]
                passed_on = iteration == part.iterations[-1] and part.whole and part.to is not None
                stored = passed_on and self.mechanism == "store"
                into = self._arriving(part, parts, (m, n, batch), iteration) if stored else None
                self._accumulate(event, part, (m, n, batch), into)
                if passed_on and not stored:
                    self._pass_on(part, parts, (m, n, batch), iteration)

    def _accumulate(self, event: _Event, part: _Part, tile: Tile, into: _Place | None) -> None:
        """Where a GEMM's result goes, and what its epilogue adds; ``into``: of another rank."""
        frame = part.frame
        first, last = event.iteration == part.iterations[0], event.iteration == part.iterations[-1]
        done = last and part.whole
        finishes = done and part.to is None
        sources = [] if first or part.home is None else [part.home]
        if done:
            sources += part.arrived
        if into is not None:
            out = into
        elif finishes:
            out = self._result(part.rank, tile)
        elif first:
            # A partial sum that arrives for a single GEMM is added to in place.
            in_place = done and bool(part.arrived)
            out = part.home = part.arrived[0] if in_place else self._home(part, tile, event.iteration)
        else:
            assert part.home is not None
            out = part.home
        event.out, event.completes = out, finishes
        for source in sources:
            event.sources.append(source)
            event.read(source, frame)
        event.write(out, frame)
        event.settle()

    def _home(self, part: _Part, tile: Tile, iteration: int) -> _Place:
        """Where a partial sum rests: in D where it is completed, if the types agree, else in a slot."""
        if part.to is None and self.partial_dtype == self.out_dtype:
            return self._result(part.rank, tile)
        place = _Place(part.rank, "D", tile, part.frame, self.partial_dtype, iteration)
        self.places[part.rank].append(place)
        return place

    def _result(self, rank: int, tile: Tile) -> _Place:
        place = self.results[rank].get(tile)
        if place is None:
            place = _Place(rank, "D", tile, self.frame("D", tile), self.out_dtype, 0, shard=True)
            self.results[rank][tile] = place
        return place

    def _arriving(self, part: _Part, parts: dict[int, _Part], tile: Tile, iteration: int) -> _Place:
        """Where a partial sum arrives at the rank that adds to it next: in its last GEMM, or from ``iteration`` on."""
        assert part.to is not None
        to = parts[part.to]
        used = to.iterations[-1] if to.iterations else iteration
        place = _Place(to.rank, "D", tile, part.frame, self.partial_dtype, used)
        self.places[to.rank].append(place)
        to.arrived.append(place)
        return place

    def _pass_on(self, part: _Part, parts: dict[int, _Part], tile: Tile, iteration: int) -> None:
        """Send a partial sum to the rank that adds to it next."""
        place = self._arriving(part, parts, tile, iteration)
        assert part.home is not None
        self._send(place, part.home, part.frame, RESULT)

    def _sum(self, tiles: dict[Tile, dict[int, _Part]]) -> None:
        """A Reduce wherever partial sums are not added in an epilogue; first those that wait for no other."""
        for tile, parts in tiles.items():
            waiting = [part for part in parts.values() if not part.whole]
            last = max(part.iterations[-1] for part in parts.values() if part.iterations)
            while waiting:
                ready = [part for part in waiting if len(part.arrived) == len(part.incoming)]
                if not ready:
                    raise self.fail(f"the route of D{tile} sends partial sums in a circle")
                for part in ready:
                    waiting.remove(part)
                    self._reduce(part, tile, part.iterations[-1] if part.iterations else last)
                    if part.to is not None:
                        self._pass_on(part, parts, tile, last)

    def _reduce(self, part: _Part, tile: Tile, iteration: int) -> None:
        """Add what arrived, and the rank's own part last."""
        frame = part.frame
        event = _Event(Reduce, part.rank, iteration, "D", tile, COMPUTE, completes=part.to is None)
        self.events.append(event)
        places = part.arrived if part.home is None else [*part.arrived, part.home]
        for place in places:
            event.sources.append(place)
            event.read(place, frame)
        event.out = part.home = self._result(part.rank, tile) if part.to is None else places[-1]
        event.write(event.out, frame)
        event.settle()

    def _deliver(self, tiles: dict[Tile, dict[int, _Part]]) -> None:
        """Finished tiles of D go from the rank that completes them to their other owners."""
        for tile, parts in tiles.items():
            owners = self.scheduler.partition.d.holders(tile)
            if len(owners) == 1:
                continue
            (reducer,) = [part.rank for part in parts.values() if part.to is None]
            last = max(part.iterations[-1] for part in parts.values() if part.iterations)
            first_use = {rank: last for rank in owners if rank != reducer}
            self._move("D", tile, [reducer], first_use, self.scheduler.route.deliver, self.out_dtype)
            for rank in first_use:
                landed, frame = self.landed["D"][rank][tile], self.frame("D", tile)
                event = _Event(Copy, rank, last, "D", tile, RESULT, 0, frame, [landed], self._result(rank, tile))
                event.read(landed, frame)
                event.write(self._result(rank, tile), frame)
                event.settle()
                self.events.append(event)

    # --- where --------------------------------------------------------------------------------------------

    def allocate(self, workspace: str, send_slots: int) -> tuple[tuple[Slot, ...], ...]:
        """A slot for every place, in order of their lifetimes."""
        return tuple(self._allocate(rank, workspace == "bounded", send_slots) for rank in self.ranks)

    def _allocate(self, rank: int, bounded: bool, send_slots: int) -> tuple[Slot, ...]:
        group = prod(self.scheduler.chunks)
        tenants: list[list[_Place]] = []
        shared: list[_Place] = []  # the last tenants of slots that may have more
        for place in sorted(self.places[rank], key=lambda place: (place.start, place.iteration)):
            place.slot = len(tenants)
            if bounded or not place.remote:
                for index, last in enumerate(shared):
                    # Room is made by whole rounds of chunks, or for as many send_slots as may be on their way.
                    remote = place.remote or last.remote
                    free = (last.end // group + 1) * group if remote else last.end + send_slots
                    # Tiles of one operand are alike in size: none takes up a slot that is larger than it needs.
                    if free <= place.start and (last.operand, last.dtype) == (place.operand, place.dtype):
                        place.slot, place.last = last.slot, last
                        shared[index] = place
                        break
                else:
                    shared.append(place)
            if place.last is None:
                tenants.append([])
            tenants[place.slot].append(place)
        alignment = STORED_ALIGNMENT if self.mechanism == "store" and len(self.ranks) > 2 else SLOT_ALIGNMENT
        slots, offset = [], 0
        for held in tenants:
            held[0].last, held[0].wraps = held[-1], True
            elements = max(place.elements for place in held)
            size = elements * DTYPE_BYTES[held[0].dtype]
            size = -(-size // alignment) * alignment
            slots.append(Slot(offset, size, held[0].dtype, elements))
            offset += size
        return tuple(slots)


class _Emitter:
    """Step 4: ops, flags and dependencies, in the order of the events' steps."""

    def __init__(self, derivation: _Derivation, shards: dict[str, tuple[Box, ...]], sync: str) -> None:
        self.events = sorted(derivation.events, key=_Event.order)
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
                event.told[event.out.rank] = self._flag(event.out.rank, initial=0, credit=False)
        for event in self.events:
            for before in event.after:
                if before.rank != event.rank and event.rank not in before.told:
                    # It is the last reader of what is overwritten, or has made what is read.
                    reader = before.sources[0].rank == event.rank
                    before.told[event.rank] = self._flag(event.rank, initial=0, credit=reader)
        # Rank by rank, so that the ops of one lie together in memory.
        for event in sorted(self.events, key=lambda event: event.rank):
            self._emit(event)
            for into, readers, flag in credits.get(event.position, ()):
                deps = tuple(reader.op for reader in readers)
                at = event.round, into.iteration, into.operand, into.tile, into.slot
                self._add(Signal, event.rank, *at, deps, flag)
        return self.ops

    def _credits(self) -> dict[int, list[tuple[_Place, list[_Event], Flag]]]:
        """What each write to a slot waits for: (slot's place, readers, flag) by the last reader's position.

        Readers and a writer of the same rank are ordered at once, by a dependency.
        """
        found: dict[int, list[tuple[_Place, list[_Event], Flag]]] = defaultdict(list)
        for event in self.events:
            into = event.out
            if into is None or into.last is None:  # not in a slot
                continue
            box = event.box if into.last is into and event.box is not None else into.last.frame
            if event.crosses and into.wraps and self.barrier:
                event.enters = True
            elif event.crosses:
                self._credit(found, event, into.last.frontier(box))
            elif into.first is event or event.kind is Copy:  # Copies may bring a part each
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
        self, found: dict[int, list[tuple[_Place, list[_Event], Flag]]], event: _Event, readers: list[_Event]
    ) -> None:
        """Let a write wait for readers on one other rank."""
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

    def _view(self, place: _Place, box: Box) -> View:
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

    def _deps(self, event: _Event, round_: int) -> list[int]:
        """Ids of what an event needs, with a Wait for each transfer that has not been waited for."""
        found = []
        for before in event.after:
            if before.rank == event.rank:
                found.append(before.op)
                continue
            if event.rank not in before.waits:
                into = before.out
                assert into is not None
                common = (round_, into.iteration, into.operand, into.tile, into.slot, ())
                before.waits[event.rank] = self._add(Wait, event.rank, *common, before.told[event.rank], before.rank)
            found.append(before.waits[event.rank])
        return found

    def _emit(self, event: _Event) -> None:
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
        for flag in event.told.values():
            self._add(Signal, rank, *common, (event.op,), flag)


def make_plan(
    problem: GemmProblem,
    schedule: str | DistributedTileScheduler,
    world_size: int | None = None,
    *,
    mesh: tuple[int, ...] | None = None,
    workspace: str = "full",
    sync: str = "credit",
    mechanism: str = "push",
    send_slots: int = SEND_SLOTS,
    **options: Any,
) -> Plan:
    """Plan a product under a schedule: what every rank multiplies, sends, waits for and adds.

    schedule:  a scheduler, or the name of one together with world_size or mesh and its options
    workspace: "full": every tile that arrives has a slot of its own, so that senders run ahead freely;
               "bounded": slots are shared by tiles whose lifetimes do not meet, and credits hold senders back
    sync:      what keeps a replay off the slots of the one before: "credit": a flag for each transfer;
               "barrier": one barrier of all ranks at the start of each replay
    mechanism: "push": whoever has a tile copies it into the slot of the rank that needs it; "pull": that rank copies
               it, from a slot of the one that has it, where shards are put first; "store": as "push", but GEMMs write
               partial sums for other ranks into their slots at once
    send_slots:   with "push", how many partial sums of a rank may lie in slots of their own to be sent: a GEMM whose sum
               finds no room waits for a copy. One kernel for all GEMMs (``distgemm.compile(execution="single_kernel")``) cannot, and
               takes as many as there are chunks

    Plans are cached: a second call with equal arguments returns the same object. Raises ValueError for
    arguments that do not fit.
    """
    if not isinstance(problem, GemmProblem):
        raise ValueError(f"make_plan takes a GemmProblem, got {problem!r}")
    if isinstance(schedule, str):
        scheduler = get_schedule(schedule, world_size, mesh=mesh, **options)
    elif isinstance(schedule, DistributedTileScheduler):
        if options:
            raise ValueError(f"options {sorted(options)} belong to a schedule's name; {schedule.name} is made already")
        if world_size not in (None, schedule.world_size) or mesh not in (None, schedule.mesh):
            given = f"world_size={world_size}, mesh={mesh}"
            raise ValueError(f"{schedule.name} is for the mesh {schedule.mesh}, got {given}")
        scheduler = schedule
    else:
        raise ValueError(f"schedule is a name or a DistributedTileScheduler, got {schedule!r}")
    for name, value, known in (
        ("workspace", workspace, WORKSPACES),
        ("sync", sync, SYNCS),
        ("mechanism", mechanism, MECHANISMS),
    ):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
    if not isinstance(send_slots, int) or send_slots < 1:
        raise ValueError(f"send_slots is a number of partial sums, at least 1, got {send_slots!r}")
    return _make_plan(problem, scheduler, workspace, sync, mechanism, send_slots)


@lru_cache(maxsize=128)
@collector_paused()
def _make_plan(
    problem: GemmProblem,
    scheduler: DistributedTileScheduler,
    workspace: str,
    sync: str,
    mechanism: str,
    send_slots: int,
) -> Plan:
    derivation = _Derivation(problem, scheduler, mechanism)
    derivation.run()
    slots = derivation.allocate(workspace, send_slots)
    shards = {
        operand: tuple(derivation.shard(operand, rank) for rank in derivation.ranks) for operand in ("A", "B", "D")
    }
    rank_ops = tuple(map(tuple, _Emitter(derivation, shards, sync).emit()))
    derivation.forget()
    return Plan(
        problem=problem,
        schedule=scheduler.name,
        mesh=scheduler.mesh,
        workspace=workspace,
        sync=sync,
        mechanism=mechanism,
        iterations=scheduler.iterations,
        edges=derivation.edges,
        shards=(shards["A"], shards["B"], shards["D"]),
        rank_ops=rank_ops,
        slots=slots,
    )
