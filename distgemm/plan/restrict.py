"""The plan of a problem in which tiles along M are empty, from a plan in which none is.

An op belongs to one tile of M, or to all of them. If nothing but the numbers of ops, slots and flags ties tiles of M to
each other, the plan without some of them has the other ops, with new numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distgemm.plan.emit import Emitter
from distgemm.plan.movement import Derivation, Place, SlotShape, share, slot_shape
from distgemm.plan.ops import Box, Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, maker
from distgemm.plan.resize import RankSize, RowsOfOps

__all__ = ["Numbers", "RestrictedOps", "TilesOfM", "tiles_of_m"]

make_gemm, make_copy, make_reduce = maker(Gemm), maker(Copy), maker(Reduce)
make_signal, make_wait = maker(Signal), maker(Wait)


class Tenant(NamedTuple):
    """A place, and what an op has to do with the place that its slot held before.

    Attributes:
        place: the place. ``place.slot`` is its slot in the plan without empty tiles.
        tile: the tile of M that it belongs to.
        shape: the shape of a slot for it. Equal ones are one object.
        first: id of the op that writes it first, if its slot may be used again; otherwise -1.
        awaited: of the last deps of that op, how many are readers of the place before.
        readers: ids of the ops after which the slot may be written again.
    """

    place: Place
    tile: int
    shape: SlotShape
    first: int = -1
    awaited: int = 0
    readers: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TilesOfM:
    """What is needed to leave out tiles of M.

    Attributes:
        slot_ranks: as :class:`distgemm.plan.emit.Emitter` has it.
        flag_tiles: for each flag of each rank, the tile of M that it is about.
        tenants: the places of each rank, in the order in which they are given slots.
        shared: of the tenants of each rank, those whose slot may be used again.
        send_slots: as :func:`distgemm.make_plan` takes it.
        group: number of chunks of a shard.
    """

    slot_ranks: list[list[int]]
    flag_tiles: list[list[int]]
    tenants: list[list[Tenant]]
    shared: list[list[Tenant]]
    send_slots: int
    group: int
    _counts: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)

    def sizes(self, rank_ops: Sequence[Sequence[Op]], kept: Sequence[bool]) -> tuple[RankSize, ...]:
        """The size of each rank if only some tiles are kept.

        Args:
            rank_ops: the ops of the plan without empty tiles.
            kept: for each tile of M whether it is kept.
        """
        if not self._counts:
            for ops, flags in zip(rank_ops, self.flag_tiles, strict=True):
                tiles = [op.tile[0] for op in ops if op.tile]
                gemms = [op.tile[0] for op in ops if isinstance(op, Gemm)]
                # A Barrier belongs to no tile.
                counts = [np.bincount(each, minlength=len(kept)) for each in (tiles, gemms, flags)]
                self._counts.append((len(ops) - len(tiles), np.stack(counts)))
        found = ((barriers, (counts @ np.asarray(kept, dtype=np.int64)).tolist()) for barriers, counts in self._counts)
        return tuple(RankSize(barriers + ops, gemms, flags) for barriers, (ops, gemms, flags) in found)


def tiles_of_m(derivation: Derivation, emitter: Emitter, send_slots: int) -> TilesOfM | None:
    """What is needed to leave out tiles of M; None if they depend on each other, or if one is empty already.

    Args:
        derivation: with all events and places, and the workspace "full".
        emitter: has made the ops of the derivation.
        send_slots: as :func:`distgemm.make_plan` takes it.
    """
    independent = (
        all(low < high for low, high in pairwise(derivation.edges[0]))
        # Scales move beside their tiles, in slots and ops of their own.
        and not derivation.moved_scales
        # The rows of a tile determine which of its parts are empty.
        and not derivation.cuts
        # A tile of B moves when the first tile of M needs it.
        and not any(event.kind is Copy and event.operand == "B" for event in derivation.events)
        # A GEMM that waits for the GEMM before it would come earlier without that one.
        and all(event.step == event.iteration for event in derivation.events if event.kind is Gemm)
    )
    if not independent:
        return None
    shapes: dict[SlotShape, SlotShape] = {}
    tenants = [[_tenant(place, shapes) for place in derivation.in_order(rank)] for rank in derivation.ranks]
    group = prod(derivation.scheduler.chunks)
    shared = [[tenant for tenant in of_rank if tenant.first >= 0] for of_rank in tenants]
    return TilesOfM(emitter.slot_ranks, emitter.flag_tiles, tenants, shared, send_slots, group)


def _tenant(place: Place, shapes: dict[SlotShape, SlotShape]) -> Tenant:
    shape = slot_shape([place])
    shape = shapes.setdefault(shape, shape)
    if place.remote:  # it has a slot of its own
        return Tenant(place, place.tile[0], shape)
    assert place.first is not None and place.last is not None
    awaited = 0 if place.wraps else len(place.last.frontier(place.last.frame))
    readers = tuple(event.op for event in place.frontier(place.frame))
    return Tenant(place, place.tile[0], shape, place.first.op, awaited, readers)


class Numbers:
    """The new numbers of slots and flags of a plan in which tiles of M are left out.

    Args:
        tiles: of the plan without empty tiles.
        kept: for each tile of M whether it is kept.

    Attributes:
        kept: as given.
        slot_ranks: as in ``tiles``.
        shapes: the shapes of the slots of each rank, in the rows of the plan without empty tiles.
        slots: for each rank the new slot by slot and frame, and by slot alone if it has one place.
        writers: for each rank what the op that writes a place of a slot first awaits: by its id, how many of its last
            deps are left out, and the ids that take their place.
    """

    def __init__(self, tiles: TilesOfM, kept: Sequence[bool]) -> None:
        self.kept, self.slot_ranks = kept, tiles.slot_ranks
        self.shapes: list[list[SlotShape]] = []
        self.slots: list[dict[int | tuple[int, Box], int]] = []
        self.writers: list[dict[int, tuple[int, tuple[int, ...]]]] = []
        for rank, of_rank in enumerate(tiles.tenants):
            left = [tenant for tenant in of_rank if kept[tenant.tile]]
            shared = {id(tenant.place): tenant for tenant in tiles.shared[rank] if kept[tenant.tile]}
            sharing = share([tenant.place for tenant in shared.values()], False, tiles.send_slots, tiles.group)
            users = {id(places[0]): places for places in sharing}  # of each shared slot
            slots: dict[int | tuple[int, Box], int] = {}
            writers: dict[int, tuple[int, tuple[int, ...]]] = {}
            shapes: list[SlotShape] = []
            for tenant in left:
                if tenant.first < 0:
                    slots[tenant.place.slot] = len(shapes)
                    shapes.append(tenant.shape)
                elif places := users.get(id(tenant.place)):
                    readers: tuple[int, ...] = ()
                    for place in places:
                        slots[place.slot, place.frame] = len(shapes)
                        user = shared[id(place)]
                        writers[user.first] = user.awaited, readers
                        readers = user.readers
                    shapes.append(slot_shape(places))
            self.slots.append(slots)
            self.writers.append(writers)
            self.shapes.append(shapes)
        self._flag_tiles = tiles.flag_tiles
        self._flags: dict[int, list[int]] = {}

    def slot(self, rank: int, slot: int, frame: Box) -> int:
        """The new number of the slot of a place."""
        slots = self.slots[rank]
        return slots[slot] if slot in slots else slots[slot, frame]

    def flag(self, flag: Flag) -> Flag:
        """The flag with its new number."""
        rank, number, initial, credit = flag
        numbers = self._flags.get(rank)
        if numbers is None:
            kept = np.asarray(self.kept, dtype=np.int64)[self._flag_tiles[rank]]
            numbers = self._flags[rank] = (kept.cumsum() - 1).tolist()
        return Flag(rank, numbers[number], initial, credit)


class RestrictedOps(RowsOfOps):
    """The ops of each rank without those of empty tiles of M, with other rows.

    Args:
        original: the ops of a plan without empty tiles, by rank.
        rows: the new row for each row of A and D that the plan's views have. Those of empty tiles coincide.
        fixed: :func:`distgemm.plan.resize.fixed_views` of the original ops.
        numbers: what is left out, and the numbers of the rest.
    """

    def __init__(
        self,
        original: Sequence[tuple[Op, ...]],
        rows: Mapping[int, int],
        fixed: Collection[int],
        numbers: Numbers,
    ) -> None:
        super().__init__(original, rows, fixed)
        self._numbers = numbers

    def _new(self, view: View) -> View:
        rank, buffer, slot, frame, box, pitch = view
        if buffer == "slot":
            slot = self._numbers.slot(rank, slot, frame)
        return View(rank, buffer, slot, self._box(frame), self._box(box), pitch)

    def _make(self, rank: int) -> tuple[Op, ...]:
        numbers, view = self._numbers, self.view
        kept, slots, writers = numbers.kept, numbers.slots, numbers.writers[rank]
        made: list[Op] = []
        ids: dict[int, int] = {}
        for op, slot_rank in zip(self._original[rank], numbers.slot_ranks[rank], strict=True):
            tile = op.tile
            if tile and not kept[tile[0]]:
                continue
            number = ids[op.id] = len(made)
            deps = op.deps
            if op.id in writers:
                awaited, readers = writers[op.id]
                deps = deps[: len(deps) - awaited] + readers
            deps = tuple([ids[dep] for dep in deps])
            common = number, rank, op.round, op.iteration, op.operand, tile
            if isinstance(op, (Signal, Wait)):
                slot = slots[slot_rank][op.slot]
                if isinstance(op, Signal):
                    made.append(make_signal(*common, slot, deps, numbers.flag(op.flag)))
                else:
                    made.append(make_wait(*common, slot, deps, numbers.flag(op.flag), op.peer))
            elif isinstance(op, Copy):
                src, dst = view(op.src), view(op.dst)
                made.append(make_copy(*common, dst.slot, deps, src, dst))
            elif isinstance(op, (Gemm, Reduce)):
                sources, out = tuple([view(source) for source in op.sources]), view(op.out)
                c = None if op.c is None else view(op.c)
                if isinstance(op, Gemm):
                    scales = (op.scale_a and view(op.scale_a), op.scale_b)
                    made.append(make_gemm(*common, out.slot, deps, view(op.a), op.b, sources, c, out, *scales))
                else:
                    made.append(make_reduce(*common, out.slot, deps, sources, c, out))
            else:  # a Barrier has no tile, and comes first
                made.append(op)
        return tuple(made)
