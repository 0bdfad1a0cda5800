"""Structural checks of a plan: ops name memory, ops and flags that exist, and do not contradict each other.

The model checker and the collective runtime call :func:`validate` before they use a plan, so they can rely on these
properties for plans of any origin. What a plan computes is the subject of :mod:`distgemm.plan.verify`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from distgemm.arguments import shown
from distgemm.plan.ops import (
    Barrier,
    Box,
    Copy,
    Gemm,
    Op,
    Range,
    Reduce,
    Signal,
    Tile,
    View,
    Wait,
    accesses,
    box_extents,
    box_size,
    contains,
    overlaps,
)
from distgemm.plan.plan import SLOT_ALIGNMENT, Plan, PlanError, slot_pitch
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS

__all__ = [
    "FlagKey",
    "Memory",
    "PlanIndex",
    "check_extents",
    "check_flag",
    "check_ops",
    "check_ranks",
    "check_slots",
    "fail",
    "not_multiplied",
    "tile_box",
    "validate",
]

SCALES = tuple(SCALE_OPERANDS.values())

FlagKey = tuple[int, int]
"""(rank, number) of a flag."""


class PlanIndex(NamedTuple):
    """The ops of a plan, by rank and id, by flag, and by round.

    Attributes:
        ops: the ops of each rank, by id.
        signals: the Signal of each flag. There is exactly one.
        waits: the Wait of each flag. There is exactly one.
        barriers: the Barriers of each round, one of every rank.
    """

    ops: list[dict[int, Op]]
    signals: dict[FlagKey, Signal]
    waits: dict[FlagKey, Wait]
    barriers: dict[int, list[Barrier]]


def fail(op: Op, message: str) -> PlanError:
    """A PlanError that names rank, iteration and op.

    Args:
        op: the op that is wrong.
        message: what is wrong.
    """
    return PlanError(f"{op.describe()}: {message}", op)


def validate(plan: Plan) -> PlanIndex:
    """Check the structure of a plan.

    Args:
        plan: a plan of any origin.

    Returns:
        The ops of the plan, indexed.

    Raises:
        PlanError: if an op names memory, an op or a flag that does not exist, or contradicts another op or the plan.
            The message names rank, iteration and op.
    """
    plan.check_types()
    check_ranks(plan)
    check_extents(plan)
    _check_scale_shards(plan)
    check_slots(plan)
    _check_owners(plan)
    form = PlanIndex([{} for _ in plan.rank_ops], {}, {}, defaultdict(list))
    memory = Memory(plan)
    for rank, ops in enumerate(plan.rank_ops):
        check_ops(rank, ops, form, memory)
    memory.check_pitches()
    for key, signal in form.signals.items():
        if key not in form.waits:
            raise fail(signal, "no op waits for this flag")
    for key, wait in form.waits.items():
        if key not in form.signals:
            raise fail(wait, "no op signals this flag: the wait never ends")
        signal = form.signals[key]
        check_flag(signal, wait, form.ops[signal.rank])
    for round_, barriers in form.barriers.items():
        ranks = [op.rank for op in barriers]
        if ranks != list(range(plan.world_size)):
            raise fail(barriers[0], f"the barrier of round {round_} is entered by ranks {ranks}")
    return form


def check_ops(rank: int, ops: Sequence[Op], form: PlanIndex, memory: Memory) -> None:
    """Check the ops of a rank, and add them to the index.

    Args:
        rank: the rank.
        ops: its ops.
        form: the index of the plan.
        memory: checks the views of ops.

    Raises:
        PlanError: as :func:`validate` does.
    """
    seen = form.ops[rank]
    last_round = 0
    for op in ops:
        if op.rank != rank:
            raise fail(op, f"stands among the ops of rank {rank}")
        if op.id in seen:
            raise fail(op, "its id is used twice")
        for dep in op.deps:
            if dep not in seen:
                raise fail(op, f"depends on op {dep}, which does not come before it")
        if op.round < last_round:
            raise fail(op, f"its round {op.round} comes after round {last_round}")
        last_round = op.round
        seen[op.id] = op
        if isinstance(op, Signal):
            other: Op = form.signals.setdefault(op.flag[:2], op)
            if other is not op:
                raise fail(op, f"{op.flag} is signalled by {other} already")
        elif isinstance(op, Wait):
            if op.flag.rank != rank:
                raise fail(op, f"waits for {op.flag}, a flag of another rank")
            other = form.waits.setdefault(op.flag[:2], op)
            if other is not op:
                raise fail(op, f"{op.flag} is waited for by {other} already")
        elif isinstance(op, Barrier):
            form.barriers[op.round].append(op)
        else:
            memory.check(op)


def check_ranks(plan: Plan) -> None:
    """Check that all fields are about the same number of ranks."""
    ranks = plan.world_size
    counts = {"mesh": prod(plan.mesh), "slots": len(plan.slots)}
    shards = zip(("A", "B", "D", "SFA", "SFB"), (*plan.shards, *(plan.scale_shards or ())), strict=False)
    counts |= {f"shards of {operand}": len(boxes) for operand, boxes in shards}
    for name, count in counts.items():
        if count != ranks:
            raise PlanError(f"the plan has ops for {ranks} ranks, but its {name} are for {count}")
    if not ranks or min(plan.mesh) < 1:
        raise PlanError(f"the plan is for {ranks} ranks on the mesh {plan.mesh}; each side is 1 or more")
    of_host = plan.ranks_per_host
    if of_host is not None and (not 1 <= of_host < ranks or ranks % of_host):
        raise PlanError(
            f"the plan is for {ranks} ranks; its ranks_per_host is None for one host, or divides them, got {of_host}"
        )


HOLDERS = {"m": (("A", 1), ("D", 1)), "n": (("B", 1), ("D", 2)), "k": (("A", 2), ("B", 2))}
"""The operands with each mode, and which number of a box it has there."""


def check_extents(plan: Plan) -> None:
    """Check that tiles and shards are those of the problem."""
    problem = plan.problem
    extents = problem.m, problem.n, problem.k, problem.l
    for mode, edges, extent in zip("mnkl", plan.edges, extents, strict=True):
        if not edges or (edges[0], edges[-1]) != (0, extent) or any(low > high for low, high in pairwise(edges)):
            raise PlanError(
                f"the plan's bounds of tiles in mode {mode} go from 0 up to {extent}, the problem's {mode}; got "
                f"{shown(edges)}"
            )
    m, n, k, batches = extents
    for operand, boxes, whole in zip("ABD", plan.shards, ((m, k), (n, k), (m, n)), strict=True):
        matrix = (0, batches * problem.matrices(operand)), (0, whole[0]), (0, whole[1])
        for rank, box in enumerate(boxes):
            if not contains(matrix, box):
                raise PlanError(f"rank {rank}: its shard {box} of {operand} reaches out of the problem's {matrix}")
    for mode, holders in HOLDERS.items():
        name = f"{mode}_per_rank"
        shares = getattr(problem, name)
        held = {operand: [box_extents(box)[at] for box in plan.shards["ABD".index(operand)]] for operand, at in holders}
        if shares is not None and list(shares) not in held.values():
            raise PlanError(f"neither the shards of {' nor those of '.join(held)} have {name} = {shares}")


def _check_scale_shards(plan: Plan) -> None:
    """Check that shards of scales are those of the shards of A and B, and that no tile divides a block."""
    scaling = plan.problem.scaling
    if scaling is None or plan.scale_shards is None:
        return
    for operand, shards, scales in zip("AB", plan.shards, plan.scale_shards, strict=False):
        of_operand = scaling[operand]
        for at, unit in zip((0 if operand == "A" else 1, 2), of_operand.unit, strict=True):
            edges = plan.edges[at]
            if any(edge % unit and edge != edges[-1] for edge in edges):
                raise PlanError(
                    f"the plan's bounds of tiles in mode {'mnk'[at]} are multiples of {unit}, or {edges[-1]}, so that "
                    f"they divide no block of scales of {operand}; got {shown(edges)}"
                )
        for mode, shared in enumerate((of_operand.rows is None, of_operand.columns is None)):
            owners: dict[Range, Range] = {}  # the rows or columns of the operand, by the scale that they alone have
            for rank, (shard, found) in enumerate(zip(shards, scales, strict=True)):
                bounds, own = shard[mode + 1], found[mode + 1]
                good = found[0] == shard[0] and own == of_operand.scales(mode, bounds, own)
                if shared and of_operand.scope == "shard" and bounds[0] < bounds[1]:
                    good = good and 0 <= own[0] == own[1] - 1 and owners.setdefault(own, bounds) == bounds
                if not good:
                    name = SCALE_OPERANDS[operand]
                    raise PlanError(f"rank {rank}: its shard {found} of {name} is not that of {shard}, its {operand}")


def check_slots(plan: Plan) -> None:
    """Check that slots are aligned, are large enough for their elements, do not overlap and lie in the workspace."""
    for rank, slots in enumerate(plan.slots):
        end = 0
        for slot in sorted(slots):
            if slot.offset < end or not 0 <= slot.elements * DTYPE_BYTES[slot.dtype] <= slot.bytes:
                raise PlanError(f"rank {rank}: {slot} overlaps another slot, or is too small for its elements")
            if slot.offset % SLOT_ALIGNMENT:
                raise PlanError(f"rank {rank}: {slot} does not start at a multiple of {SLOT_ALIGNMENT} bytes")
            end = slot.offset + slot.bytes
        if end > plan.workspace_bytes(rank):
            raise PlanError(f"rank {rank}: its slots end at {end}, its workspace at {plan.workspace_bytes(rank)} bytes")


def _check_owners(plan: Plan) -> None:
    """Check that every tile of D has an owner."""
    tiles = [[tile for tile in pairwise(plan.edges[mode]) if tile[0] < tile[1]] for mode in (3, 0, 1)]
    count, most = prod(map(len, tiles)), sum(map(len, plan.rank_ops))
    if count > most:  # this also bounds the time of what follows
        raise PlanError(f"the plan divides D into {count} tiles, and has only {most} ops")
    owned: set[tuple[Range, ...]] = set()
    for shard in set(plan.shards[2]):
        inside = [
            [tile for tile in of_mode if low <= tile[0] < tile[1] <= high]
            for of_mode, (low, high) in zip(tiles, shard, strict=True)
        ]
        owned.update(product(*inside))
    for tile in product(*tiles):
        if tile not in owned:
            raise PlanError(f"no rank owns the tile of D in {tile}")


def not_multiplied(plan: Plan, tile: Tile) -> PlanError:
    """The error for a tile of D that no rank multiplies.

    Args:
        plan: the plan.
        tile: coordinate (m, n, l) of the tile.
    """
    _, (top, bottom), (left, right) = box = tile_box(plan, tile)
    owners = [str(rank) for rank, shard in enumerate(plan.shards[2]) if overlaps(shard, box)]
    by = f"owned by rank{'s' * (len(owners) != 1)} {', '.join(owners)}" if owners else "which no rank owns"
    return PlanError(f"no rank multiplies the tile D{tile}, rows {top}:{bottom}, columns {left}:{right}, {by}")


def tile_box(plan: Plan, tile: Tile) -> Box:
    """The box of a tile (m, n, l) of D."""
    m, n, batch = tile
    rows, columns, _, batches = plan.edges
    return (batches[batch], batches[batch + 1]), (rows[m], rows[m + 1]), (columns[n], columns[n + 1])


def check_flag(signal: Signal, wait: Wait, ops: Mapping[int, Op]) -> None:
    """Check that the two ops of a flag agree about it. ``ops`` are those of the Signal's rank."""
    flag = wait.flag
    if signal.slot != wait.slot:
        raise fail(wait, f"is about slot {wait.slot}, but {signal} about slot {signal.slot}")
    for dep in () if flag.credit else signal.deps:
        moved = ops[dep]
        if isinstance(moved, (Copy, Gemm, Reduce)) and moved.slot != signal.slot and moved.operand not in SCALES:
            raise fail(signal, f"is about slot {signal.slot}, but comes after {moved}")
    if signal.flag != flag:
        raise fail(wait, f"waits for {flag!r}, but {signal} sets {signal.flag!r}")
    if flag.initial not in (0, 1):
        raise fail(wait, f"{flag} starts at {flag.initial}; it is 0 or 1")
    if wait.peer != signal.rank:
        raise fail(wait, f"names rank {wait.peer}, the signal comes from rank {signal.rank}")
    if not flag.initial and wait.round <= signal.round:
        raise fail(wait, f"waits in round {wait.round} for a signal of round {signal.round}, {signal}")


class Memory:
    """Checks the views of ops. A view that several ops share is checked once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problem = plan.problem
        self.shards = dict(zip("ABDC", (*plan.shards, plan.shards[2]), strict=True))
        if plan.scale_shards is not None:
            self.shards |= zip(SCALES, plan.scale_shards, strict=True)
        self.scale_boxes: dict[tuple[str, Box], Box] = {}  # by operand and box
        self.of_scales: set[int] = set()  # id() of the views of scales
        self.tiles = tuple(dict(enumerate(pairwise(edges))) for edges in plan.edges)  # by mode and index
        self.dtypes: dict[int, str] = {}  # by id() of the view; equal views may be checked twice
        self.views: list[tuple[View, Op]] = []  # each view, and the first op that has it

    def check(self, op: Op) -> None:
        """Check that an op may access the memory of its views, and that they agree with its tile and types."""
        reads, write = accesses(op)
        assert write is not None
        if self.problem.scaling is not None:
            if isinstance(op, Gemm):
                self.of_scales |= set(map(id, op.scales))
            elif op.operand in SCALES:
                self.of_scales |= {id(view) for view in (*reads, write)}
        self._check_access(op, reads, write)
        if op.slot != write.slot:
            raise fail(op, f"names slot {op.slot}, but writes {write}")

    def _check_access(self, op: Op, reads: list[View], write: View) -> None:
        rank, dtypes = op.rank, self.dtypes
        if write.rank != rank:
            stores = isinstance(op, Copy) or (isinstance(op, Gemm) and write.buffer == "slot")
            if not stores or not 0 <= write.rank < self.plan.world_size:
                raise fail(op, f"touches {write}, the memory of another rank")
            needed = ("push", "store") if isinstance(op, Copy) else ("store",)
            if self.plan.mechanism not in needed:
                raise fail(op, f'writes {write}, the memory of another rank, with mechanism="{self.plan.mechanism}"')
        if id(write) not in dtypes:
            self._check_place(op, write)
        if write.buffer != "slot":
            if write.buffer != "D":
                raise fail(op, f"writes {write.buffer}, an input")
            if write.rank != rank:
                raise fail(op, f"writes {write}, which is not in the symmetric workspace")
        for view in reads:
            if view.rank != rank:
                pulls = isinstance(op, Copy) and write.rank == rank and 0 <= view.rank < self.plan.world_size
                if not pulls or view.buffer != "slot":
                    raise fail(op, f"touches {view}, the memory of another rank")
                if self.plan.mechanism != "pull":
                    raise fail(op, f'reads {view}, the memory of another rank, with mechanism="{self.plan.mechanism}"')
            if id(view) not in dtypes:
                self._check_place(op, view)
            # An op works on its elements in any order. So only a sum may write what it reads: it replaces each element
            # that it adds.
            if view.slot == write.slot and view[:2] == write[:2]:
                adds = isinstance(op, (Gemm, Reduce)) and view in op.sources
                if not adds or view.frame != write.frame:
                    raise fail(op, f"writes {write}, which it reads as {view}")
        if isinstance(op, Copy):
            if op.src.box != write.box:
                raise fail(op, f"copies {op.src} to {write}, another place of the matrix")
            from_, to = dtypes[id(op.src)], dtypes[id(write)]
            if from_ != to:
                raise fail(op, f"copies {from_} to a place of {to}")
            return
        assert isinstance(op, (Gemm, Reduce))
        wanted = write.box
        if isinstance(op, Gemm):
            of_m, of_n, of_k, of_l = self.tiles
            m, n, k, l = op.tile  # noqa: E741
            if m not in of_m or n not in of_n or k not in of_k or l not in of_l:
                raise fail(op, f"its tile is outside the grid {tuple(self.plan.grid)}")
            rows, columns, depth, batch = of_m[m], of_n[n], of_k[k], of_l[l]
            self._check_operand(op, "A", op.a, op.scale_a, (batch, rows, depth))
            first, last = (each * self.problem.matrices("B") for each in batch)
            self._check_operand(op, "B", op.b, op.scale_b, ((first, last), columns, depth))
            wanted = batch, rows, columns
        rests = self.problem.partial_dtype if op.c is None else self.problem.out_dtype
        if dtypes[id(write)] != rests:
            raise fail(op, f"rounds to {dtypes[id(write)]} in {write} where this sum is {rests}")
        for view in (*op.sources, write) if op.c is None else (*op.sources, op.c, write):
            if view.box != wanted:
                raise fail(op, f"adds {view} where its tile is {wanted}")

    def _check_operand(self, op: Gemm, operand: str, view: View, scales: View | None, box: Box) -> None:
        if view.box != box:
            raise fail(op, f"reads {view} where its tile is {box}")
        dtype, wanted = self.dtypes[id(view)], self.problem.operand_dtype(operand)
        if dtype != wanted:
            raise fail(op, f"reads {view} of {dtype} where {operand} is {wanted}")
        if (scales is None) != (self.problem.scaling is None):
            has = "no scales" if scales is None else f"the scales {scales}"
            raise fail(op, f"reads {has} of {operand} where the problem has the scaling {self.problem.scaling}")
        if scales is None:
            return
        of_tile = self.scale_boxes.get((operand, box))
        if of_tile is None:
            of_tile = self.scale_boxes[operand, box] = self.plan.scale_box(operand, box)
        if scales.box != of_tile:
            raise fail(op, f"reads {scales} as the scales of its tile of {operand}, which are {of_tile}")
        dtype, wanted = self.dtypes[id(scales)], self.problem.operand_dtype(SCALE_OPERANDS[operand])
        if dtype != wanted:
            raise fail(op, f"reads {scales} of {dtype} where scales of {operand} are {wanted}")

    def _check_place(self, op: Op, view: View) -> None:
        if not contains(view.frame, view.box) or not box_size(view.box):
            raise fail(op, f"{view} is empty or reaches out of {view.frame}")
        if view.buffer == "slot":
            slots = self.plan.slots[view.rank]
            if not 0 <= view.slot < len(slots):
                raise fail(op, f"{view} names a slot that does not exist")
            if view.elements > slots[view.slot].elements:
                raise fail(op, f"{view} does not fit into its slot of {slots[view.slot].elements} elements")
        elif view.buffer not in self.shards or view.slot != -1:
            raise fail(op, f"{view!r} is neither in a slot nor in a shard")
        elif view.frame != self.shards[view.buffer][view.rank]:
            raise fail(op, f"{view} does not lie in the shard of rank {view.rank}")
        self.dtypes[id(view)] = self.plan.dtype(view)
        self.views.append((view, op))

    def check_pitches(self) -> None:
        """Check that rows are dense in the caller's shards and in slots of scales, and aligned in other slots."""
        of_frames: dict[tuple[int, int, Box], int] = {}
        for view, op in self.views:
            columns = box_extents(view.frame)[2]
            aligned = view.buffer == "slot" and id(view) not in self.of_scales
            pitch = slot_pitch(columns, self.dtypes[id(view)]) if aligned else columns
            if view.buffer == "slot":
                # A tile and scales of the same frame would have rows at other distances.
                pitch = of_frames.setdefault((view.rank, view.slot, view.frame), pitch)
            if view.pitch != pitch:
                raise fail(op, f"{view} has rows {view.pitch} elements apart, not {pitch}")
