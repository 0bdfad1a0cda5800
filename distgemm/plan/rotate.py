"""Plans in which every rank does what rank 0 does, with ranks and tiles rotated.

The ops of rank r are those of rank 0, rotated by r: op by op, with the same ids, slots and flag numbers. So a rank
needs the ops of rank 0, and no others, to make its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from distgemm.plan.movement import SlotShape, SlotSizes, cut_rows
from distgemm.plan.ops import (
    Barrier,
    Box,
    Copy,
    Flag,
    Gemm,
    Op,
    Range,
    Reduce,
    Signal,
    Slot,
    Tile,
    View,
    Wait,
    box_extents,
    maker,
)
from distgemm.plan.plan import Plan, PlanError, collector_paused, slot_pitch
from distgemm.plan.resize import OfRanks
from distgemm.schedulers import Symmetry, TileCoord
from distgemm.schedulers.symmetry import MODES

__all__ = ["RotatedOps", "RotatedSlots", "Rotation", "Tenants", "rotated_shards"]

make_gemm, make_copy, make_reduce = maker(Gemm), maker(Copy), maker(Reduce)
make_signal, make_wait, make_barrier = maker(Signal), maker(Wait), maker(Barrier)

Tenants = tuple[str, str, tuple[Tile, ...]]
"""A slot of rank 0: its element type, the operand and the tiles that it holds in turn."""

Edges = tuple[tuple[int, ...], ...]

MAX_OPS = 1 << 21
"""The most ops that a plan of rotated ops makes. They take about 2 GB."""

ROWS_AND_COLUMNS = {"A": ("m", "k"), "B": ("n", "k"), "D": ("m", "n")}


def rotated_shards(symmetry: Symmetry, edges: Edges, operand: str, spans: Sequence[Sequence[int]]) -> tuple[Box, ...]:
    """The boxes of the shards of all ranks: that of rank 0, rotated.

    Args:
        symmetry: the rotations of ranks and tiles.
        edges: the bounds of the tiles, as :class:`distgemm.Plan` has them.
        operand: "A", "B" or "D".
        spans: for each mode of the operand the tiles of rank 0's shard, at least one.

    Raises:
        PlanError: if the tiles of a rank do not form one box.
    """
    ranges: list[list[Range]] = []
    for mode, span in zip(MODES[operand], spans, strict=True):
        bounds = edges["mnkl".index(mode)]
        if not symmetry.turns(mode) or len(span) == len(bounds) - 1:
            ranges.append([(bounds[span[0]], bounds[span[-1] + 1])] * symmetry.world_size)
            continue
        ranges.append([])
        for rank in range(symmetry.world_size):
            tiles = [symmetry.index(mode, tile, rank) for tile in span]
            first, last = min(tiles), max(tiles)
            if last - first >= len(tiles):
                raise PlanError(f"the tiles of {operand} that rank {rank} holds do not make up one box")
            ranges[-1].append((bounds[first], bounds[last + 1]))
    rows, columns, batch = ranges
    return tuple(zip(batch, rows, columns, strict=True))


class Rotation:
    """Rotates ops: their ranks, their tiles, and the boxes of their views.

    Args:
        symmetry: the rotations of ranks and tiles.
        edges: the bounds of the tiles, as :class:`distgemm.Plan` has them. No tile is empty.
        shards: the boxes of the shards, as :class:`distgemm.Plan` has them.
        cuts: (row mode, part, parts) of each part of a tile that moves by itself.
        slots: the slots of rank 0.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        edges: Edges,
        shards: tuple[tuple[Box, ...], ...],
        cuts: Sequence[tuple[str, int, int]],
        slots: Sequence[Slot],
    ) -> None:
        self.symmetry = symmetry
        self.edges = dict(zip("mnkl", edges, strict=True))
        self.shards = dict(zip("ABDC", (*shards, shards[2]), strict=True))
        self.turning = [mode for mode in self.edges if symmetry.turns(mode)]
        self.dtypes = [slot.dtype for slot in slots]
        # By mode the tile that a range is, or the tile of which it is a part, the number of the part and of parts.
        self.ranges: dict[str, dict[Range, tuple[int, int, int]]] = {}
        for mode, bounds in self.edges.items():
            self.ranges[mode] = {span: (tile, 0, 1) for tile, span in enumerate(pairwise(bounds))}
            for of_mode, part, parts in cuts:
                if of_mode == mode:
                    for tile, span in enumerate(pairwise(bounds)):
                        self.ranges[mode].setdefault(cut_rows(*span, part, parts), (tile, part, parts))
        self.pitched = {mode: len({high - low for low, high in pairwise(self.edges[mode])}) > 1 for mode in "nk"}

    def fits(self, plan: Plan) -> bool:
        """Whether a plan has the tiles, the shards and the types of slots with which ops are rotated."""
        return (
            self.symmetry.mesh == plan.mesh
            and tuple(self.edges.values()) == plan.edges
            and tuple(self.shards[operand] for operand in "ABD") == plan.shards
            and self.dtypes == [slot.dtype for slot in plan.slots[0]]
        )

    def tiles_of(self, operand: str, box: Box) -> list[list[int]]:
        """For each mode of an operand, in the order of tile coordinates, the tiles that lie in a box."""
        spans = dict(zip((*ROWS_AND_COLUMNS[operand], "l"), (box[1], box[2], box[0]), strict=True))
        return [
            [
                tile
                for tile, (low, high) in enumerate(pairwise(self.edges[mode]))
                if spans[mode][0] <= low and high <= spans[mode][1]
            ]
            for mode in MODES[operand]
        ]

    def tile_of(self, op: Op, operand: str, box: Box) -> Tile:
        """The tile of an operand whose box this is.

        Raises:
            PlanError: if it is no tile's.
        """
        found = []
        for mode, span in zip((*ROWS_AND_COLUMNS[operand], "l"), (box[1], box[2], box[0]), strict=True):
            tile, _, parts = self.ranges[mode].get(span, (0, 0, 0))
            if parts != 1:
                raise PlanError(f"{op.describe()}: {span} is no tile of mode {mode}", op)
            found.append(tile)
        return tuple(found)

    def range(self, op: Op, mode: str, span: Range, by: int) -> Range:
        """The range of a mode to which the rotation by rank ``by`` takes the range of a tile, or of its part."""
        if mode not in self.turning:
            return span
        found = self.ranges[mode].get(span)
        if found is None:
            raise PlanError(f"{op.describe()}: {span} is no tile of mode {mode}, nor a part of one", op)
        tile, part, parts = found
        tile = self.symmetry.index(mode, tile, by)
        low, high = self.edges[mode][tile], self.edges[mode][tile + 1]
        return (low, high) if parts == 1 else cut_rows(low, high, part, parts)

    def box(self, op: Op, operand: str, box: Box, by: int) -> Box:
        """The box to which the rotation by rank ``by`` takes the box of a tile of A, B or D, or of its part."""
        rows, columns = ROWS_AND_COLUMNS[operand]
        return (
            self.range(op, "l", box[0], by),
            self.range(op, rows, box[1], by),
            self.range(op, columns, box[2], by),
        )

    def view(self, op: Op, operand: str, view: View, by: int) -> View:
        """A view of A, B or D of an op, rotated."""
        rank, buffer, slot, frame, box, pitch = view
        if not 0 <= rank < self.symmetry.world_size:
            raise PlanError(f"{op.describe()}: {view} names a rank that does not exist", op)
        rank = self.symmetry.add(rank, by)
        inside = self.box(op, operand, box, by)
        if buffer != "slot":
            if buffer not in self.shards or frame != self.shards[buffer][view.rank]:
                raise PlanError(f"{op.describe()}: {view} does not lie in the shard of rank {view.rank}", op)
            if pitch != box_extents(frame)[2]:
                raise PlanError(f"{op.describe()}: {view} has rows {pitch} elements apart", op)
            shard = self.shards[buffer][rank]
            return View(rank, buffer, slot, shard, inside, box_extents(shard)[2])
        around = inside if box is frame or box == frame else self.box(op, operand, frame, by)
        if self.pitched["n" if operand == "D" else "k"]:
            if not 0 <= slot < len(self.dtypes) or pitch != slot_pitch(box_extents(frame)[2], self.dtypes[slot]):
                raise PlanError(f"{op.describe()}: {view} has rows {pitch} elements apart", op)
            pitch = slot_pitch(box_extents(around)[2], self.dtypes[slot])
        return View(rank, buffer, slot, around, inside, pitch)

    def tile(self, op: Op, by: int) -> Tile:
        """The tile of an op, rotated."""
        if type(op.tile) is TileCoord:
            return TileCoord(*self.symmetry.tile("work", op.tile, by))
        return self.symmetry.tile(op.operand, op.tile, by) if op.tile else op.tile

    def op(self, op: Op, by: int, known: dict[object, object] | None = None) -> Op:
        """An op, rotated by rank ``by``.

        Args:
            op: the op.
            by: a rank.
            known: rotated tiles and views, for ops that are kept and rotated by one rank. The call adds to them.

        Raises:
            PlanError: if its boxes are no boxes of tiles.
        """
        if not by:
            return op
        found: dict[Any, Any] = {} if known is None else known

        def rotated(operand: str, view: View) -> View:
            key = id(view), operand
            made: View | None = found.get(key)
            if made is None:
                made = found[key] = self.view(op, operand, view, by)
            return made

        tile = found.get((op.operand, op.tile))
        if tile is None:
            tile = found[op.operand, op.tile] = self.tile(op, by)
        add = self.symmetry.add
        common = op.id, add(op.rank, by), op.round, op.iteration, op.operand, tile, op.slot, op.deps
        if isinstance(op, Signal):
            rank, number, initial, credit = op.flag
            return make_signal(*common, Flag(add(rank, by), number, initial, credit))
        if isinstance(op, Wait):
            rank, number, initial, credit = op.flag
            return make_wait(*common, Flag(add(rank, by), number, initial, credit), add(op.peer, by))
        if isinstance(op, Copy):
            return make_copy(*common, rotated(op.operand, op.src), rotated(op.operand, op.dst))
        if isinstance(op, (Gemm, Reduce)):
            sources = tuple([rotated("D", view) for view in op.sources])
            c, out = None if op.c is None else rotated("D", op.c), rotated("D", op.out)
            if isinstance(op, Gemm):
                if op.scale_a is not None or op.scale_b is not None:
                    raise PlanError(f"{op.describe()}: it has scales, which are not rotated", op)
                return make_gemm(*common, rotated("A", op.a), rotated("B", op.b), sources, c, out, None, None)
            return make_reduce(*common, sources, c, out)
        return make_barrier(*common)


class RotatedOps(OfRanks[Op]):
    """The ops of each rank: those of rank 0, rotated.

    Args:
        first: the ops of rank 0.
        rotation: rotates ops.

    Attributes:
        first: as given.
        rotation: as given.
    """

    def __init__(self, first: tuple[Op, ...], rotation: Rotation) -> None:
        super().__init__(rotation.symmetry.world_size)
        self.first, self.rotation = first, rotation

    @collector_paused()
    def _make(self, rank: int) -> tuple[Op, ...]:
        if self.made + len(self.first) > MAX_OPS:
            raise ValueError(
                f"the plan has {len(self.first)} ops on each of {len(self)} ranks, and at most {MAX_OPS} ops are made: "
                "ask for the ops of fewer ranks"
            )
        known: dict[object, object] = {}
        return tuple([self.rotation.op(op, rank, known) for op in self.first])


class RotatedSlots(OfRanks[Slot]):
    """The slots of each rank: as many as rank 0 has, each as large as its largest tile.

    Args:
        tenants: for each slot what it holds on rank 0 in turn.
        symmetry: the rotations of ranks and tiles.
        edges: the bounds of the tiles, as :class:`distgemm.Plan` has them.

    Attributes:
        tenants: as given.
        alike: whether all ranks have the same slots, because all tiles have the same size.
    """

    def __init__(self, tenants: Sequence[Tenants], symmetry: Symmetry, edges: Edges) -> None:
        super().__init__(symmetry.world_size)
        self.tenants = tenants
        self._symmetry, self._edges = symmetry, dict(zip("mnkl", edges, strict=True))
        self.alike = all(len({high - low for low, high in pairwise(bounds)}) == 1 for bounds in edges)
        self._sizes = SlotSizes()
        self._shapes: dict[SlotShape, SlotShape] = {}

    def _make(self, rank: int) -> tuple[Slot, ...]:
        if rank and self.alike:
            return self[0]
        return self._sizes.lay_out([self._shape(*each, rank) for each in self.tenants])

    def rotates(self, rotation: Rotation) -> bool:
        """Whether slots are made for tiles that are rotated in the same way."""
        symmetry = rotation.symmetry
        same = (self._symmetry.mesh, self._symmetry.axes) == (symmetry.mesh, symmetry.axes)
        return same and self._edges == rotation.edges

    def _shape(self, dtype: str, operand: str, tiles: tuple[Tile, ...], rank: int) -> SlotShape:
        rows, columns = ROWS_AND_COLUMNS[operand]
        at = {mode: MODES[operand].index(mode) for mode in (rows, columns, "l")}
        elements, spans = 0, []
        for tile in tiles:
            (top, bottom), (left, right), (first, last) = (
                self._span(mode, tile[at[mode]], rank) for mode in (rows, columns, "l")
            )
            width = (last - first) * slot_pitch(right - left, dtype)
            elements = max(elements, (bottom - top) * width)
            spans.append((top, bottom, width))
        shape = SlotShape(dtype, elements, ()) if operand == "B" else SlotShape(dtype, 0, tuple(dict.fromkeys(spans)))
        return self._shapes.setdefault(shape, shape)

    def _span(self, mode: str, index: int, rank: int) -> Range:
        tile = self._symmetry.index(mode, index, rank)
        return self._edges[mode][tile], self._edges[mode][tile + 1]
