"""The derivation: it computes the events of a problem under a schedule, their steps and their slots.

The partition says where tiles are, and the work says who multiplies them and when. The rest follows:

1. A rank that multiplies a tile of A or B and does not hold it must receive it. The route returns the hops.
2. The partial sums of one tile of D are reduced along the route. The result goes to every owner of the tile.
3. Every event (a GEMM, a Reduce, a transfer) gets a step, the earliest one that its inputs allow. Every tile in the
   workspace gets a lifetime in steps, and a slot.

:mod:`distgemm.plan.emit` makes ops from the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import lcm, prod
from typing import Any, NamedTuple

from distgemm.arguments import integer, shown
from distgemm.plan.ops import (
    Box,
    Copy,
    Flag,
    Gemm,
    Op,
    Range,
    Reduce,
    Slot,
    Tile,
    View,
    box_extents,
    box_size,
    contains,
    overlaps,
)
from distgemm.plan.plan import SLOT_ALIGNMENT, Mechanism, PlanError, WorkspaceMode, slot_pitch
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.plan.resize import scales_have_rows
from distgemm.schedulers import MODES, DistributedTileScheduler, GatherRoute, Hop, ReduceRoute, TileCoord

__all__ = [
    "Derivation",
    "Event",
    "Place",
    "SlotShape",
    "SlotSizes",
    "cut_rows",
    "share",
    "slot_shape",
    "tile_edges",
]

# Within a step, transfers of A and B come first, then GEMMs and sums, then transfers of their results.
GATHER, COMPUTE, RESULT = 0, 1, 2
PHASES = 3


@dataclass(eq=False, slots=True)
class Place:
    """A tile's memory on a rank: in a shard, or for some steps in a slot.

    An event that accesses the whole tile passes the object ``frame`` itself as the box, so ``is`` compares them.
    """

    rank: int
    operand: str
    tile: Tile
    frame: Box
    dtype: str
    iteration: int  # the iteration that first uses it
    shard: bool = False
    # (event, box, whether it writes): the last write and the accesses after it. If the last write was of a part, the
    # earlier accesses of the other parts as well.
    accesses: list[tuple[Event, Box, bool]] = field(default_factory=list)
    first: Event | None = None  # the first write
    parts: bool = False  # whether the last write was of a part
    start: int = -1  # steps of the first write, and of the last access
    end: int = -1
    slot: int = -1
    remote: bool = False  # whether another rank writes or reads it, or sends it
    staged: Place | None = None  # for a shard: the slot from which other ranks pull it
    last: Place | None = None  # the place that used the slot before this one
    wraps: bool = False  # ``last`` used the slot in the replay before
    view: View | None = None  # the view of the whole frame
    width: int = -1  # ``row_elements``, once it is computed
    scale: Box | None = None  # the box of the tile's scales, if they rest in a slot of their own beside the tile
    scale_slot: int = -1
    scale_view: View | None = None  # the view of all its scales

    @property
    def pitch(self) -> int:
        """Distance between rows in a slot, in elements."""
        return slot_pitch(box_extents(self.frame)[2], self.dtype)

    @property
    def row_elements(self) -> int:
        """Number of elements that one row of each batch takes up in a slot, with padding."""
        if self.width < 0:
            self.width = box_extents(self.frame)[0] * self.pitch
        return self.width

    @property
    def elements(self) -> int:
        """Number of elements that the tile takes up in a slot, with padding."""
        return box_extents(self.frame)[1] * self.row_elements

    def frontier(self, box: Box) -> list[Event]:
        """The events after which ``box`` may be written: its reads since the last write, or that write if unread."""
        if box is self.frame and not self.parts:
            return [event for event, _, _ in (self.accesses[:0:-1] or self.accesses)]
        found: list[Event] = []
        boxes: list[Box] = []
        for event, other, writes in reversed(self.accesses):
            if overlaps(other, box) and not (writes and any(overlaps(later, other) for later in boxes)):
                found.append(event)
                boxes.append(other)
        return found

    def writers(self, box: Box) -> list[Event]:
        """The events that have written what a read of ``box`` reads."""
        return [event for event, other, writes in reversed(self.accesses) if writes and overlaps(other, box)]


@dataclass(eq=False, slots=True)
class Event:
    """A GEMM, a Reduce or a transfer, from which the emitter makes an op."""

    kind: type[Op]
    rank: int
    iteration: int
    operand: str
    tile: Tile
    phase: int
    floor: int = 0  # earliest step
    box: Box | None = None  # what a transfer moves
    sources: list[Place] = field(default_factory=list)  # Gemm: A, B, then partial sums
    out: Place | None = None
    completes: bool = False  # it completes the tile, and so adds beta * C
    after: list[Event] = field(default_factory=list)  # events whose results or slots it needs
    follows: Event | None = None  # the GEMM before it on the same rank: it sets the step, but no dependency
    step: int = -1
    round: int = -1
    position: int = -1  # among all events, in the order in which they become ops
    op: int = -1  # id of the op
    scale_box: Box | None = None  # the scales that a transfer moves with its box
    scale_op: int = -1  # id of the Copy of these scales
    done_flags: dict[int, Flag] = field(default_factory=dict)  # by rank: the flag that says that the event has ended
    waits: dict[int, int] = field(default_factory=dict)  # by rank: id of the Wait for that flag
    credits: list[tuple[Flag, int]] = field(default_factory=list)  # credits that it waits for, and who signals them
    enters: bool = False  # it waits for the replay's Barrier

    @property
    def crosses(self) -> bool:
        """Whether the event writes another rank's memory."""
        return self.out is not None and self.out.rank != self.rank

    @property
    def ops(self) -> tuple[int, ...]:
        """Ids of all its ops."""
        return (self.op,) if self.scale_op < 0 else (self.op, self.scale_op)

    def read(self, place: Place, box: Box) -> None:
        """Record that the event reads ``box``, after the events that wrote it."""
        if place.shard and place.operand != "D":
            return  # no event writes it
        place.remote |= place.rank != self.rank
        for event in place.writers(box) if place.parts else (place.accesses[0][0],):
            if event not in self.after:
                self.after.append(event)
        place.accesses.append((self, box, False))

    def write(self, place: Place, box: Box) -> None:
        """Record that the event writes ``box``. On its own rank it follows the earlier accesses."""
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
        """Set the step: the earliest one that the events in ``after`` and ``follows`` allow. Their steps are set."""
        step = self.floor
        for before in self.after:
            # The data of a transfer can be used one step later.
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
        """The sort key of emission: the round, GEMMs before other events, then the iteration that uses the result."""
        return self.round * 2 + (self.kind is not Gemm), self.out.iteration if self.out else self.iteration


@dataclass(eq=False, slots=True)
class Part:
    """One rank's part of the sum of one tile of D."""

    rank: int
    frame: Box
    iterations: list[int] = field(default_factory=list)
    incoming: list[int] = field(default_factory=list)  # ranks whose partial sums it receives
    to: list[int] = field(default_factory=list)  # ranks to which it sends its partial sum
    completes: bool = False  # it completes the tile
    whole: bool = True  # the epilogue of its last GEMM adds the partial sums that it receives; False: a Reduce does
    arrived: dict[int, Place] = field(default_factory=dict)  # the partial sums that it receives, by the rank that sent
    home: Place | None = None  # where its own partial sum accumulates


def _bounds(extent: int, shards: int, chunks: int, sizes: Sequence[int] | None, unit: int) -> tuple[int, ...]:
    """The bounds of shards * chunks tiles, in multiples of ``unit``, and the extent.

    A shard has its entry of ``sizes``, or ceil(units / shards) units.
    """
    edges = [0]
    length = _multiple(-(-extent // shards), unit)
    for shard in range(shards):
        start = edges[-1]
        stop = min((shard + 1) * length, extent) if sizes is None else start + sizes[shard]
        part = _multiple(-(-(stop - start) // chunks), unit)
        edges += [min(start + (chunk + 1) * part, stop) for chunk in range(chunks)]
    return tuple(edges)


def _multiple(length: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not smaller."""
    return -(-length // unit) * unit


def _units(problem: GemmProblem) -> tuple[int, int, int, int]:
    """The extents in m, n, k and l of which bounds of tiles are multiples: no block of a scale is divided."""
    if problem.scaling is None:
        return 1, 1, 1, 1
    (m, k_a), (n, k_b) = problem.scaling.a.unit, problem.scaling.b.unit
    return m, n, lcm(k_a, k_b), 1


def tile_edges(problem: GemmProblem, scheduler: DistributedTileScheduler) -> tuple[tuple[int, ...], ...]:
    """The bounds of the work tiles in the modes m, n, k and l, as :class:`distgemm.Plan` has them.

    Raises:
        ValueError: if ``m_per_rank``, ``n_per_rank`` or ``k_per_rank`` does not fit the schedule.
    """
    result = []
    for mode, tiles, chunks, unit in zip("mnkl", scheduler.grid, scheduler.chunks, _units(problem), strict=True):
        shards = tiles // chunks
        sizes = _shares(problem, scheduler, mode, shards, unit) if mode != "l" else None
        result.append(_bounds(getattr(problem, mode), shards, chunks, sizes, unit))
    return tuple(result)


SHARING = {"m": ("A", "D"), "n": ("D", "B"), "k": ("A", "B")}
"""The operands whose shards an argument such as ``m_per_rank`` may give. The first one that the mode shards counts."""


def _shares(
    problem: GemmProblem, scheduler: DistributedTileScheduler, mode: str, shards: int, unit: int
) -> list[int] | None:
    """The extent of each shard of a mode, if ``m_per_rank`` and so on give one for each rank."""
    name = f"{mode}_per_rank"
    shares, extent = getattr(problem, name), getattr(problem, mode)
    if shares is None:
        return None
    if len(shares) != scheduler.world_size:
        raise _failure(scheduler, f"{name} {shares} has {len(shares)} entries for {scheduler.world_size} ranks")
    for operand in SHARING[mode]:
        at = MODES[operand].index(mode)
        held: list[set[int]] = []
        for rank in range(scheduler.world_size):
            tiles = scheduler.partition[operand].of_rank(rank)
            held.append({tile[at] // getattr(scheduler.chunks, mode) for tile in tiles if tile is not None})
            if len(held[-1]) != 1:
                break
        if len(held[-1]) == 1 and len(set().union(*held)) == shards:
            break
    else:
        raise _failure(scheduler, f"{name} says what each rank holds of {mode}; here no rank has a share of its own")
    sizes: dict[int, int] = {}
    for rank, (shard,) in enumerate(held):
        if sizes.setdefault(shard, shares[rank]) != shares[rank]:
            raise _failure(
                scheduler, f"{name} {shares}: rank {rank} holds the same shard as a rank with another number"
            )
    if sum(sizes.values()) != extent:
        raise _failure(
            scheduler, f"{name} {shares} makes {sum(sizes.values())} in all, the problem has {mode} = {extent}"
        )
    found = [sizes[shard] for shard in range(shards)]
    _check_blocks(scheduler, name, shares, found, unit)
    return found


def _check_blocks(
    scheduler: DistributedTileScheduler, name: str, shares: Sequence[int], sizes: Sequence[int], unit: int
) -> None:
    """Check that shards of these extents divide no block of scales.

    Raises:
        ValueError: if one does. The message has the nearest extents that would be right.
    """
    *ends, extent = accumulate(sizes)
    if any(end % unit and end != extent for end in ends):
        right = [0, *(min(round(end / unit) * unit, extent) for end in ends), extent]
        wanted = [high - low for low, high in pairwise(right)]
        raise _failure(
            scheduler,
            f"{name} {tuple(shares)}: {unit} of them share a scale or an atom of scales, so shards are multiples of "
            f"{unit}, except the last one; such as {wanted}",
        )


def _failure(scheduler: DistributedTileScheduler, message: str) -> ValueError:
    """An error that names the schedule and the mesh."""
    return ValueError(f"{scheduler.name} on the mesh {scheduler.mesh}: {message}")


def cut_rows(top: int, bottom: int, part: int, parts: int, unit: int = 1) -> Range:
    """The rows of one part of a tile that a route divides: a part has ceil(rows / parts), or what remains.

    Args:
        top: the tile's first row.
        bottom: the row after its last one.
        part: 0 to parts - 1.
        parts: number of parts.
        unit: number of rows of which a part has a multiple, if it does not end with the tile.
    """
    rows = _multiple(-(-(bottom - top) // parts), unit)
    return min(top + part * rows, bottom), min(top + (part + 1) * rows, bottom)


class SlotShape(NamedTuple):
    """What a slot must have room for.

    Attributes:
        dtype: element type.
        elements: elements of the largest tile of B, or of the most scales without rows of A; 0: none.
        tiles: of A, D and scales of rows of A, distinct (first row, row after the last one, elements of a row in all
            batches).
    """

    dtype: str
    elements: int
    tiles: tuple[tuple[int, int, int], ...]


Size = tuple[int, str, int]
"""The size of a slot in bytes, its element type, and its number of elements."""


class SlotSizes:
    """The slots of ranks, one behind the other. A slot is as large as its largest tile.

    Args:
        rows: another row for each row of the shapes; None: the rows are those of the shapes.
    """

    def __init__(self, rows: Mapping[int, int] | None = None) -> None:
        self.rows = rows
        # Many slots have one shape, and many ranks have slots of the same sizes.
        self._known: dict[int, tuple[SlotShape, Size]] = {}  # by the id of the shape
        self._slots: dict[tuple[Size, ...], tuple[Slot, ...]] = {}

    def lay_out(self, shapes: Sequence[SlotShape]) -> tuple[Slot, ...]:
        """The slots of a rank.

        Args:
            shapes: of each slot.
        """
        known = self._known
        sizes = tuple([(known.get(id(shape)) or self._measure(shape))[1] for shape in shapes])
        found = self._slots.get(sizes)
        if found is None:
            offsets = accumulate((size for size, _, _ in sizes), initial=0)
            found = tuple([Slot(offset, *size) for offset, size in zip(offsets, sizes, strict=False)])
            self._slots[sizes] = found
        return found

    def _measure(self, shape: SlotShape) -> tuple[SlotShape, Size]:
        dtype, elements, tiles = shape
        rows = self.rows
        for top, bottom, width in tiles:
            height = bottom - top if rows is None else rows[bottom] - rows[top]
            elements = max(elements, height * width)
        size = -(-elements * DTYPE_BYTES[dtype] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        found = self._known[id(shape)] = shape, (size, dtype, elements)
        return found

    def smallest(self, ways: Sequence[Sequence[SlotShape]]) -> tuple[tuple[Slot, ...], int]:
        """The slots of a rank in the way to share them that takes the least memory, and its number.

        Of equal ways the last one wins.

        Args:
            ways: the shapes of the slots, for each way.
        """
        found = [(self.lay_out(shapes), way) for way, shapes in enumerate(ways)]
        return min(reversed(found), key=lambda each: each[0][-1].offset + each[0][-1].bytes if each[0] else 0)


class Derivation:
    """The events of a problem under a schedule, with their steps and their memory.

    Call ``run``, then ``allocate``. ``events`` and ``places`` hold the results.

    Args:
        problem: the product.
        scheduler: the schedule.
        mechanism: who transfers, as :func:`distgemm.make_plan` takes it.
    """

    def __init__(self, problem: GemmProblem, scheduler: DistributedTileScheduler, mechanism: Mechanism) -> None:
        self.problem = problem
        self.scheduler = scheduler
        self.mechanism = mechanism
        self.ranks = range(scheduler.world_size)
        self.one_shot = scheduler.route.final_copies is None  # every owner of a tile of D adds all parts itself
        self.out_dtype, self.partial_dtype = str(problem.out_dtype), str(problem.partial_dtype)
        self.edges = tile_edges(problem, scheduler)
        self.cuts: set[tuple[int, int, int]] = set()  # (m, part, parts) of each part of a tile of A or D that moves
        self.frames: dict[tuple[str, Tile], Box] = {}
        self.work = self._work_of_ranks()
        self.events: list[Event] = []
        self.places: list[list[Place]] = [[] for _ in self.ranks]
        # Places of A and B on each rank, and of the finished tiles of D that other ranks send to it.
        self.landed: dict[str, list[dict[Tile, Place]]] = {operand: [{} for _ in self.ranks] for operand in "ABD"}
        self.results: list[dict[Tile, Place]] = [{} for _ in self.ranks]  # places in each rank's shard of D
        self.scale_shards = (
            {} if problem.scaling is None else {operand: self._scale_shards(operand) for operand in "AB"}
        )
        self.moved_scales: dict[tuple[str, Tile], Box] = {}  # of the tiles whose scales move with them
        self.shapes: list[tuple[list[SlotShape], ...]] = []  # by rank
        self.known_shapes: dict[SlotShape, SlotShape] = {}
        self.sizes = SlotSizes()

    def run(self) -> None:
        """Compute all events and their steps."""
        self._gather()
        parts = self._parts()
        self._multiply(parts)
        self._sum(parts)
        self._send_final(parts)

    def forget(self) -> None:
        """Remove the reference cycles between events and places, so that Python frees them immediately."""
        for place in chain(*self.places, *(places.values() for places in self.results)):
            place.accesses = []
            place.first = place.last = place.staged = None

    def fail(self, message: str) -> ValueError:
        """An error that names the schedule and the mesh."""
        return _failure(self.scheduler, message)

    # --- extents ------------------------------------------------------------------------------------

    def _work_of_ranks(self) -> list[dict[int, TileCoord]]:
        """The work tiles of each rank that are not empty, by iteration."""
        return [self._work(rank) for rank in self.ranks]

    def _work(self, rank: int) -> dict[int, TileCoord]:
        tiles = self.scheduler.work.of_rank(rank)
        empty = [{index for index, (low, high) in enumerate(pairwise(edges)) if low == high} for edges in self.edges]
        if not any(empty):
            return {iteration: TileCoord(*tile) for iteration, tile in enumerate(tiles) if tile is not None}
        return {
            iteration: TileCoord(*tile)
            for iteration, tile in enumerate(tiles)
            if tile is not None and not any(index in of_mode for index, of_mode in zip(tile, empty, strict=True))
        }

    def frame(self, operand: str, tile: Tile) -> Box:
        """The box of an operand's tile in global coordinates (l, rows, columns)."""
        found = self.frames.get((operand, tile))
        if found is None:
            rows, columns = {"A": (0, 2), "B": (1, 2), "D": (0, 1)}[operand]
            row, column, batch = tile
            edges, matrices = self.edges, self.problem.matrices(operand)
            found = (
                (edges[3][batch] * matrices, edges[3][batch + 1] * matrices),
                (edges[rows][row], edges[rows][row + 1]),
                (edges[columns][column], edges[columns][column + 1]),
            )
            self.frames[operand, tile] = found
        return found

    def shard(self, operand: str, rank: int) -> Box:
        """The box of a rank's shard, which all its tiles form.

        Raises:
            ValueError: if the tiles do not form one box.
        """
        spans, tiles = self._spans(operand, rank)
        if not tiles:
            return (0, 0), (0, 0), (0, 0)
        first = self.frame(operand, (spans[0][0], spans[1][0], spans[2][0]))
        last = self.frame(operand, (spans[0][-1], spans[1][-1], spans[2][-1]))
        contiguous = all(span[-1] - span[0] == len(span) - 1 for span in spans)
        if not contiguous or prod(map(len, spans)) != tiles:
            raise self.fail(f"the tiles of {operand} that rank {rank} holds do not make up one box")
        return tuple((low, high) for (low, _), (_, high) in zip(first, last, strict=True))  # type: ignore[return-value]

    def _spans(self, operand: str, rank: int) -> tuple[list[list[int]], int]:
        """For each mode the indices of the tiles that a rank holds, in ascending order, and the number of tiles."""
        tiles = {tile for tile in self.scheduler.partition[operand].of_rank(rank) if tile is not None}
        return [sorted({tile[mode] for tile in tiles}) for mode in range(3)], len(tiles)

    def _scale_shards(self, operand: str) -> tuple[Box, ...]:
        """The box of each rank's shard of the scales of an operand.

        Raises:
            ValueError: if each shard has scales of its own, and shards overlap in a mode without being equal in it.
        """
        assert self.problem.scaling is not None
        scaling = self.problem.scaling[operand]
        layout = self.scheduler.partition[operand]
        tiles = [{tile for tile in layout.of_rank(rank) if tile} for rank in self.ranks]
        spans = [[_span(of_rank, mode) for of_rank in tiles] for mode in (0, 1)]
        numbers: list[dict[Range, int]] = []
        for mode, of_mode in enumerate(spans):
            distinct = sorted({span for span in of_mode if span[0] < span[1]})
            separate = (scaling.rows, scaling.columns)[mode] is None and scaling.scope == "shard"
            if separate and any(before[1] > after[0] for before, after in pairwise(distinct)):
                raise self.fail(f"shards of {operand} overlap, so they can have no scales of their own")
            numbers.append({span: number for number, span in enumerate(distinct)})
        found = []
        for rank in self.ranks:
            box = self.shard(operand, rank)
            result = [box[0]]
            for mode in (0, 1):
                number = numbers[mode].get(spans[mode][rank])
                own = (0, 0) if number is None else (number, number + 1)
                result.append(scaling.scales(mode, box[mode + 1], own))
            found.append(tuple(result))
        return tuple(found)  # type: ignore[arg-type]

    def scale_frame(self, operand: str, tile: Tile) -> Box:
        """The box of the scales of a tile of A or B."""
        return self._scales(operand, tile, self.frame(operand, tile))

    def _scales(self, operand: str, tile: Tile, box: Box) -> Box:
        """The box of the scales of a part of a tile."""
        assert self.problem.scaling is not None
        scaling = self.problem.scaling[operand]
        own = self.scale_shards[operand][self._holders(operand, tile)[0]]
        return box[0], scaling.scales(0, box[1], own[1]), scaling.scales(1, box[2], own[2])

    # --- what moves -----------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Add the transfers of tiles of A and B that a rank multiplies and does not hold."""
        for operand, route in (("A", self.scheduler.route.a), ("B", self.scheduler.route.b)):
            for moved, by in sorted(self._needs(operand).items()):
                if self.scale_shards:
                    scales = self.scale_frame(operand, moved)
                    if not all(contains(self.scale_shards[operand][rank], scales) for rank in by):
                        self.moved_scales[operand, moved] = scales
                dtype = self.problem.operand_dtype(operand)
                self._move(operand, moved, self._holders(operand, moved), by, route, dtype)

    def _needs(self, operand: str) -> dict[Tile, dict[int, int]]:
        """For each tile of A or B that moves, the iteration in which each rank that needs it uses it first."""
        needs: dict[Tile, dict[int, int]] = defaultdict(dict)
        for rank in self.ranks:
            for tile, iteration in self._first_uses(operand, rank, self.work[rank]).items():
                needs[tile][rank] = iteration
        return needs

    def _first_uses(self, operand: str, rank: int, work: Mapping[int, TileCoord]) -> dict[Tile, int]:
        """The iteration in which a rank first uses each tile of A or B that it does not hold."""
        found: dict[Tile, int] = {}
        for iteration, (m, n, k, batch) in work.items():
            found.setdefault((m, k, batch) if operand == "A" else (n, k, batch), iteration)
        for tile in found.keys() & set(self.scheduler.partition[operand].of_rank(rank)):
            del found[tile]
        return found

    def _holders(self, operand: str, tile: Tile) -> Sequence[int]:
        """The ranks that hold a tile, in ascending order."""
        return self.scheduler.partition[operand].holders(tile)

    def _move(
        self,
        operand: str,
        tile: Tile,
        holders: Sequence[int],
        first_use: dict[int, int],
        route: GatherRoute,
        dtype: str,
    ) -> None:
        """Add the transfers of a tile to all ranks of ``first_use``. The nearest holder sends it to each."""
        served: dict[int, list[int]] = defaultdict(list)
        for rank in first_use:
            nearest = min(holders, key=lambda holder: self._distance(holder, rank)) if len(holders) > 1 else holders[0]
            served[nearest].append(rank)
        brought: set[tuple[int, ...]] = set()  # (rank, part, parts) to which hops from other holders bring the tile
        for holder, needers in served.items():
            # Ranks that need the tile in the same iteration are sorted by descending number from the holder, so that
            # no two holders start with the same rank.
            needers.sort(key=lambda rank: (first_use[rank], (holder - rank) % self.scheduler.world_size))
            hops = self._hops_of(f"{operand}{tile}", route, holder, needers)
            # A route knows one holder. It may go through ranks that hold the tile, too, or get it from another holder.
            hops = [hop for hop in hops if hop.dst not in holders and hop[1:4] not in brought]
            useful = self._useful(hops, needers)
            for hop in useful:
                self._hop(operand, tile, hop.src if hop.src in holders else holder, hop, first_use, dtype)
            brought.update(hop[1:4] for hop in useful)
            for rank in needers:
                landed = self.landed[operand][rank].get(tile)
                arrived = sum(box_size(box) for _, box, writes in landed.accesses if writes) if landed else 0
                if arrived != box_size(self.frame(operand, tile)):
                    raise self.fail(f"the route of {operand}{tile} does not bring all of it to rank {rank}")

    def _hops_of(self, tile: str, route: GatherRoute | ReduceRoute, *ends: int | Sequence[int]) -> list[Hop]:
        """The hops of a tile's route.

        Args:
            tile: the tile, for messages.
            route: the route.
            ends: the ranks that it takes. Lists are copied, so that it may change them.

        Raises:
            PlanError: for what is no hop, for a hop from or to a rank that does not exist, and if the route raises an
                error other than ValueError.
        """
        name = f"{self.scheduler.name}: the route {type(route).__name__} of {tile}"
        what = f"{name} returns"
        every: Any
        try:
            every = route.hops(self.scheduler.mesh, *(end if isinstance(end, int) else list(end) for end in ends))  # type: ignore[arg-type]
            every = list(every) if isinstance(every, Iterable) else every
        except ValueError:  # the route refuses the mesh or the ranks
            raise
        except Exception as error:
            raise PlanError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(every, list):
            raise PlanError(f"{what} {shown(every)}, which is no sequence of Hop(src, dst)")
        found = []
        for each in every:
            if not isinstance(each, Hop):
                raise PlanError(f"{what} {shown(each)}, which is no Hop(src, dst)")
            hop = each
            if not set(map(type, hop)) <= {int, type(None)}:
                try:
                    src, dst, part, parts = (integer("field", value, None) for value in each[:4])
                    hop = Hop(src, dst, part, parts, each.turn and integer("turn", each.turn, None))
                except ValueError:
                    raise PlanError(f"{what} {each}, whose fields are integers") from None
            for rank in (hop.src, hop.dst):
                if rank not in self.ranks:
                    raise PlanError(
                        f"{what} {hop}, and rank {rank} is none of the {len(self.ranks)} ranks 0 to "
                        f"{len(self.ranks) - 1}"
                    )
            if not 0 <= hop.part < hop.parts:
                raise PlanError(f"{what} {hop}, and part is none of its {hop.parts} parts, which count from 0")
            found.append(hop)
        return found

    @staticmethod
    def _useful(hops: Sequence[Hop], needers: Sequence[int]) -> list[Hop]:
        """The hops to ranks that use the tile or forward it. Hops that no rank needs are dropped."""
        useful: list[Hop] = []
        users = set(needers)
        sent: dict[int, list[Hop]] = defaultdict(list)  # the useful hops by their source
        for hop in reversed(hops):
            passed_on = any(
                later.part * hop.parts < (hop.part + 1) * later.parts
                and hop.part * later.parts < (later.part + 1) * hop.parts
                for later in sent.get(hop.dst, ())
            )
            if passed_on or hop.dst in users:
                useful.append(hop)
                sent[hop.src].append(hop)
        return useful[::-1]

    def _distance(self, holder: int, rank: int) -> tuple[int, int]:
        """The distance from a holder to a rank: number of mesh axes on which they differ, then ranks clockwise."""
        crossed, a, b = 0, holder, rank
        for extent in reversed(self.scheduler.mesh):
            crossed += a % extent != b % extent
            a, b = a // extent, b // extent
        return crossed, (rank - holder) % self.scheduler.world_size

    def _hop(self, operand: str, tile: Tile, holder: int, hop: Hop, first_use: dict[int, int], dtype: str) -> None:
        frame = self.frame(operand, tile)
        box = frame
        if hop.parts > 1:
            batch, rows, columns = frame
            unit = _units(self.problem)[operand == "B"] if operand != "D" else 1
            box = batch, cut_rows(*rows, hop.part, hop.parts, unit), columns
            if operand != "B":
                self.cuts.add((tile[0], hop.part, hop.parts))
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
            place = Place(hop.dst, operand, tile, frame, dtype, floor if used is None else used)
            place.scale = self.moved_scales.get((operand, tile))
            landed[hop.dst][tile] = place
            self.places[hop.dst].append(place)
        if place.writers(box):
            raise self.fail(f"the route of {operand}{tile}: {hop} brings what has arrived there already")
        # Scales that all rows share move with the first part.
        shared = self.problem.scaling is not None and operand != "D" and self.problem.scaling[operand].rows is None
        scales = None if place.scale is None or (shared and hop.part) else self._scales(operand, tile, box)
        self._send(place, source, box, GATHER if operand != "D" else RESULT, floor, scales)

    def _operand(self, operand: str, rank: int, tile: Tile) -> Place:
        """The place of a tile of A or B that a rank multiplies."""
        return self.landed[operand][rank].get(tile) or self._own(operand, rank, tile)

    def _own(self, operand: str, rank: int, tile: Tile) -> Place:
        """A tile of A or B in the rank's shard."""
        places = self.landed[operand][rank]
        if tile not in places:
            dtype = self.problem.operand_dtype(operand)
            places[tile] = Place(rank, operand, tile, self.frame(operand, tile), dtype, 0, shard=True)
        return places[tile]

    def _send(
        self, into: Place, source: Place, box: Box, phase: int, floor: int = 0, scales: Box | None = None
    ) -> None:
        """Add a transfer, of ``box`` and of its scales. The mechanism decides which rank executes it."""
        rank = source.rank
        if self.mechanism == "pull":
            rank, source = into.rank, self._staged(source, phase) if source.shard else source
        event = Event(Copy, rank, into.iteration, into.operand, into.tile, phase, max(floor, 0), box, [source], into)
        event.scale_box = scales
        into.remote = True
        event.read(source, box)
        event.write(into, box)
        event.settle()
        self.events.append(event)

    def _staged(self, shard: Place, phase: int) -> Place:
        """The copy of a shard's tile in a slot, from which other ranks pull. They can read only the workspace."""
        if shard.staged is None:
            place = replace(shard, shard=False, accesses=[], first=None, start=-1, end=-1, view=None, scale_view=None)
            place.scale = self.moved_scales.get((shard.operand, shard.tile))
            event = Event(Copy, shard.rank, shard.iteration, shard.operand, shard.tile, phase, 0, shard.frame)
            event.sources, event.out, event.scale_box = [shard], place, place.scale
            event.read(shard, shard.frame)
            event.write(place, shard.frame)
            event.settle()
            self.events.append(event)
            self.places[shard.rank].append(place)
            shard.staged = place
        return shard.staged

    def _parts(self) -> dict[Tile, dict[int, Part]]:
        """The ranks' parts of each tile of D, connected along the route of the partial sums."""
        tiles: dict[Tile, dict[int, Part]] = {}
        for rank in self.ranks:
            for iteration, work in self.work[rank].items():
                tile = (work.m, work.n, work.l)
                parts = tiles.setdefault(tile, {})
                if rank not in parts:
                    parts[rank] = Part(rank, self.frame("D", tile))
                parts[rank].iterations.append(iteration)
        for of_tile, parts in sorted(tiles.items()):
            self._join(of_tile, parts)
        return tiles

    def _join(self, tile: Tile, parts: dict[int, Part]) -> None:
        """Set for each part of one tile to which ranks it goes, and whether an epilogue adds what it receives."""
        contributors = sorted(parts.values(), key=lambda part: (part.iterations[-1], part.rank))
        for reducer in self._reducers(tile, parts):
            parts.setdefault(reducer, Part(reducer, self.frame("D", tile))).completes = True
            ranks = [part.rank for part in contributors if part.rank != reducer]
            if ranks:
                self._connect(tile, parts, ranks, reducer)
        lost = [part.rank for part in parts.values() if not part.to and not part.completes]
        if lost:
            raise self.fail(f"the route of D{tile} does not send on the partial sums of ranks {lost}")
        # The epilogue of a part's last GEMM can add the partial sums that it receives only if the parts that send them
        # are complete in an earlier iteration. It cannot add them in the order of ranks.
        route = self.scheduler.route.d
        for part in sorted(parts.values(), key=lambda part: part.iterations[-1] if part.iterations else -1):
            before = [parts[rank] for rank in part.incoming]
            place = route.final_add if part.completes else route.add
            last = (part.iterations or [-1])[-1]
            part.whole = not (before or (part.completes and part.to)) or (
                place == "epilogue"
                and not self.one_shot
                and (len(before) == 1 or route.add == "kernel")
                and all(one.whole and -1 < (one.iterations or [-1])[-1] < last for one in before)
            )

    def _connect(self, tile: Tile, parts: dict[int, Part], contributors: list[int], reducer: int) -> None:
        """Record the hops that bring the partial sums of one tile to a reducer."""
        frame = self.frame("D", tile)
        route = self.scheduler.route.d
        for hop in self._hops_of(f"D{tile}", route, contributors, reducer):
            # A rank that multiplies no part of the tile may forward what it receives.
            src, dst = (parts.setdefault(rank, Part(rank, frame)) for rank in hop[:2])
            sent = hop.dst in src.to if self.one_shot else src.to
            if src.rank == reducer or sent or not (src.iterations or src.incoming):
                raise self.fail(f"the route of D{tile} from {contributors} to {reducer}: {hop} does not fit")
            if hop.parts > 1:
                raise self.fail(
                    f"the route of D{tile} from {contributors} to {reducer}: partial sums move as whole tiles, and "
                    f"{hop} does not fit"
                )
            if self.one_shot and dst.rank != reducer:
                raise self.fail(
                    f"the route of D{tile} from {contributors} to {reducer}: every owner adds if there are no final "
                    f"copies, so partial sums go to it directly, and {hop} does not fit"
                )
            src.to.append(dst.rank)
            dst.incoming.append(src.rank)

    def _reducers(self, tile: Tile, parts: Mapping[int, Part]) -> Sequence[int]:
        """The owners that complete a tile. ``parts`` has those of the ranks that multiply a part of it.

        Without final copies they are all owners. Otherwise there is one, whose own GEMM of the tile comes last: an
        owner without a GEMM of the tile would have to receive what another owner already has.
        """
        owners = self._holders("D", tile)
        if len(owners) == 1 or self.one_shot:
            return owners
        last = {rank: parts[rank].iterations[-1] if rank in parts else -1 for rank in owners}
        return [max(owners, key=lambda rank: (last[rank], -rank))]

    # --- who multiplies and adds ------------------------------------------------------------------------

    def _multiply(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        """Add a GEMM for each work tile, in the order of iterations."""
        before: dict[int, Event] = {}
        every = [(iteration, rank, tile) for rank, work in enumerate(self.work) for iteration, tile in work.items()]
        for iteration, rank, work in sorted(every):
            m, n, k, batch = work
            a, b = self._operand("A", rank, (m, k, batch)), self._operand("B", rank, (n, k, batch))
            of = self._like(rank)
            event = Event(Gemm, rank, iteration, "D", work, COMPUTE, iteration, None, [a, b], follows=before.get(of))
            before[of] = event
            self.events.append(event)
            event.read(a, a.frame)
            event.read(b, b.frame)
            parts = tiles[m, n, batch]
            part = parts[rank]
            # A rank that completes the tile too sends its own part, before it adds the others.
            passed_on = iteration == part.iterations[-1] and (part.whole or part.completes)
            stored = passed_on and self.mechanism == "store" and not part.completes and len(part.to) == 1
            into = self._arriving(part, parts[part.to[0]], (m, n, batch), iteration) if stored else None
            self._accumulate(event, part, (m, n, batch), into)
            if passed_on and not stored:
                self._pass_on(part, parts, (m, n, batch), iteration)

    def _like(self, rank: int) -> int:
        """The rank whose GEMMs take the same steps."""
        return rank

    def _accumulate(self, event: Event, part: Part, tile: Tile, into: Place | None) -> None:
        """Set where a GEMM's result goes and what its epilogue adds.

        ``into`` is the place of another rank into which the GEMM stores. None: it stores on its own rank.
        """
        frame = part.frame
        first, last = event.iteration == part.iterations[0], event.iteration == part.iterations[-1]
        done = last and part.whole
        finishes = done and part.completes
        sources = [] if first or part.home is None else [part.home]
        if done:
            sources += part.arrived.values()
        if into is not None:
            out = into
        elif finishes:
            out = self._result(part.rank, tile)
        elif first:
            # A rank's only GEMM of the tile adds in place: its result replaces the partial sum that arrived.
            in_place = done and bool(part.arrived)
            out = part.home = sources[0] if in_place else self._home(part, tile, event.iteration)
        else:
            assert part.home is not None
            out = part.home
        event.out, event.completes = out, finishes
        for source in sources:
            event.sources.append(source)
            event.read(source, frame)
        event.write(out, frame)
        event.settle()

    def _home(self, part: Part, tile: Tile, iteration: int) -> Place:
        """The place of a rank's partial sum: in D, if the rank completes the tile and the types agree, or in a slot."""
        if not part.to and self.partial_dtype == self.out_dtype:
            return self._result(part.rank, tile)
        place = Place(part.rank, "D", tile, part.frame, self.partial_dtype, iteration)
        self.places[part.rank].append(place)
        return place

    def _result(self, rank: int, tile: Tile) -> Place:
        """The place of a tile in the rank's shard of D."""
        place = self.results[rank].get(tile)
        if place is None:
            place = Place(rank, "D", tile, self.frame("D", tile), self.out_dtype, 0, shard=True)
            self.results[rank][tile] = place
        return place

    def _arriving(self, part: Part, to: Part, tile: Tile, iteration: int) -> Place:
        """A new place for a partial sum, on a rank that adds to it next."""
        used = to.iterations[-1] if to.iterations else iteration
        place = Place(to.rank, "D", tile, part.frame, self.partial_dtype, used)
        self.places[to.rank].append(place)
        to.arrived[part.rank] = place
        return place

    def _pass_on(self, part: Part, parts: dict[int, Part], tile: Tile, iteration: int) -> None:
        """Add the transfer of a partial sum to each rank that adds to it next.

        These ranks are sorted by descending number from the sender, so that no two senders start with the same rank.
        """
        for rank in sorted(part.to, key=lambda to: (part.rank - to) % self.scheduler.world_size):
            place = self._arriving(part, parts[rank], tile, iteration)
            assert part.home is not None
            self._send(place, part.home, part.frame, RESULT)

    def _sum(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        """Add a Reduce for each part whose partial sums no epilogue adds. None depends on a later one."""
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
                    if not part.completes:
                        self._pass_on(part, parts, tile, last)

    def _reduce(self, part: Part, tile: Tile, iteration: int) -> None:
        """Add the event that sums the partial sums that arrived, then the rank's own.

        If every owner adds, all add in the order of ranks, so that their results are equal bit by bit.
        """
        frame = part.frame
        event = Event(Reduce, part.rank, iteration, "D", tile, COMPUTE, completes=part.completes)
        self.events.append(event)
        parts = part.arrived if part.home is None else {**part.arrived, part.rank: part.home}
        for _, place in sorted(parts.items()) if self.one_shot else parts.items():
            event.sources.append(place)
            event.read(place, frame)
        event.out = part.home = self._result(part.rank, tile) if part.completes else event.sources[-1]
        event.write(event.out, frame)
        event.settle()

    def _send_final(self, tiles: dict[Tile, dict[int, Part]]) -> None:
        """Add the final copies: finished tiles of D go from the rank that completes them to the other owners."""
        route = self.scheduler.route.final_copies
        if route is None:
            return
        for tile, parts in tiles.items():
            owners = self._holders("D", tile)
            if len(owners) == 1:
                continue
            (reducer,) = [part.rank for part in parts.values() if part.completes]
            last = max(part.iterations[-1] for part in parts.values() if part.iterations)
            first_use = {rank: last for rank in owners if rank != reducer}
            self._move("D", tile, [reducer], first_use, route, self.out_dtype)
            for rank in first_use:
                landed, frame = self.landed["D"][rank][tile], self.frame("D", tile)
                event = Event(Copy, rank, last, "D", tile, RESULT, 0, frame, [landed], self._result(rank, tile))
                event.read(landed, frame)
                event.write(self._result(rank, tile), frame)
                event.settle()
                self.events.append(event)

    # --- where --------------------------------------------------------------------------------------------

    def allocate(self, workspace: WorkspaceMode, send_slots: int) -> tuple[tuple[Slot, ...], ...]:
        """Give every place a slot.

        Args:
            workspace: "full" or "bounded", as :func:`distgemm.make_plan` takes it.
            send_slots: number of slots for partial sums that wait to be sent, >= 1.

        Returns:
            The slots of each rank. ``shapes`` has the shapes of these slots, and for each rank of "bounded" the shapes
            of both ways to share slots.
        """
        return tuple(self._allocate(rank, workspace == "bounded", send_slots) for rank in self.ranks)

    def _allocate(self, rank: int, bounded: bool, send_slots: int) -> tuple[Slot, ...]:
        # A slot is as large as its largest tile. If tiles differ in size, sharing more slots may take more memory.
        ways = [self._share(rank, sharing, send_slots) for sharing in ([False, True] if bounded else [False])]
        shapes = tuple(self._shapes(tenants) for tenants in ways)
        self.shapes.append(shapes)
        slots, way = self.sizes.smallest(shapes)
        # The slots of scales come after those of tiles. The scales of a tile rest as long as the tile itself.
        scale_slot = len(ways[way])
        for number, places in enumerate(ways[way]):
            for place, last in zip(places, (places[-1], *places), strict=False):
                place.slot, place.last, place.scale_slot = number, last, scale_slot
            places[0].wraps = True
            scale_slot += any(place.scale for place in places)
        return slots

    def _shapes(self, tenants: Sequence[Sequence[Place]]) -> list[SlotShape]:
        """The shapes of all slots of a rank. Equal ones are one object."""
        shapes = [slot_shape(places) for places in tenants]
        shapes += [self._scale_shape(places) for places in tenants if any(place.scale for place in places)]
        return [self.known_shapes.setdefault(shape, shape) for shape in shapes]

    def _scale_shape(self, places: Sequence[Place]) -> SlotShape:
        """What the slot of the scales of these places must have room for."""
        assert self.problem.scaling is not None
        frames = dict.fromkeys(place.scale for place in places if place.scale)
        dtype = self.problem.scaling[places[0].operand].dtype
        if places[0].operand == "A" and scales_have_rows(self.problem.scaling):
            tiles = dict.fromkeys(
                (*rows, (batch[1] - batch[0]) * (columns[1] - columns[0])) for batch, rows, columns in frames
            )
            return SlotShape(dtype, 0, tuple(tiles))
        return SlotShape(dtype, max(map(box_size, frames)), ())

    def _share(self, rank: int, bounded: bool, send_slots: int) -> list[list[Place]]:
        """The places that use each slot of a rank in turn."""
        return share(self.in_order(rank), bounded, send_slots, prod(self.scheduler.chunks))

    def in_order(self, rank: int) -> list[Place]:
        """The places of a rank in the order in which they are given slots."""
        return sorted(self.places[rank], key=lambda place: (place.start, place.iteration))


def _span(tiles: Iterable[Tile], mode: int) -> Range:
    """The tiles of a mode from the first one to the last one of some tiles of an operand."""
    indices = [tile[mode] for tile in tiles]
    return (min(indices), max(indices) + 1) if indices else (0, 0)


def share(places: Iterable[Place], bounded: bool, send_slots: int, group: int) -> list[list[Place]]:
    """The places that use each slot of a rank in turn.

    Args:
        places: those of the rank, in the order of :meth:`Derivation.in_order`.
        bounded: whether places that other ranks access share slots, too.
        send_slots: as :meth:`Derivation.allocate` takes it.
        group: number of chunks of a shard.
    """
    tenants: list[list[Place]] = []
    shared: list[list[Place]] = []  # the places of slots that may be used again
    for place in places:
        found = None
        if bounded or not place.remote:
            for others in shared:
                # If another rank accesses a slot, it is free from the next multiple of ``group`` steps (the chunks of a
                # shard). Otherwise it is free ``send_slots`` steps after its last access.
                last = others[-1]
                remote = place.remote or last.remote
                free = (last.end // group + 1) * group if remote else last.end + send_slots
                # Tiles of one operand have almost the same size, so sharing wastes little memory.
                if free <= place.start and (last.operand, last.dtype) == (place.operand, place.dtype):
                    found = others
                    break
        if found is None:
            found = []
            tenants.append(found)
            if bounded or not place.remote:
                shared.append(found)
        found.append(place)
    return tenants


def slot_shape(places: Sequence[Place]) -> SlotShape:
    """What a slot must have room for that these places use in turn. They have one operand and one type."""
    if places[0].operand == "B":
        return SlotShape(places[0].dtype, max(place.elements for place in places), ())
    tiles = dict.fromkeys((*place.frame[1], place.row_elements) for place in places)
    return SlotShape(places[0].dtype, 0, tuple(tiles))
