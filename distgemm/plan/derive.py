"""make_plan: derives the plan of a problem under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, get_args

from distgemm.arguments import instance, integer, integers, member, wrong
from distgemm.plan.emit import Emitter
from distgemm.plan.movement import Derivation, SlotShape, SlotSizes, cut_rows, tile_edges
from distgemm.plan.ops import Box
from distgemm.plan.plan import Mechanism, Plan, SyncMode, WorkspaceMode, collector_paused
from distgemm.plan.problem import GemmProblem
from distgemm.plan.resize import ResizedOps, RowsOfOps, fixed_views, scales_have_rows
from distgemm.plan.restrict import Numbers, RestrictedOps, TilesOfM, tiles_of_m
from distgemm.plan.rotate import RotatedOps
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.plan.symmetric import derive_rotated
from distgemm.schedulers import DistributedTileScheduler, NotSymmetricError, get_schedule
from distgemm.schedulers.cache import BoundedCache
from distgemm.schedulers.scheduler import MAX_TILES

__all__ = ["MECHANISMS", "SYNCS", "WORKSPACES", "forget_plans", "make_plan"]

WORKSPACES: tuple[WorkspaceMode, ...] = get_args(WorkspaceMode)
SYNCS: tuple[SyncMode, ...] = get_args(SyncMode)
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)

Edges = tuple[tuple[int, ...], ...]

SEND_SLOTS = 2
"""Default number of send slots of a rank: it sends one partial sum while it computes the next one."""


def make_plan(
    problem: GemmProblem,
    schedule: str | DistributedTileScheduler,
    world_size: int | None = None,
    *,
    mesh: tuple[int, ...] | None = None,
    workspace: WorkspaceMode = "full",
    sync: SyncMode = "credit",
    mechanism: Mechanism = "push",
    send_slots: int = SEND_SLOTS,
    ranks_per_host: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of a product under a schedule: the ops of every rank, with their memory and their order.

    Plans are cached: a second call with equal arguments returns the same object. Plans of up to CACHE_BYTES are kept,
    and the newest one in any case.

    Args:
        problem: the product over all ranks.
        schedule: a scheduler, or the name of a schedule.
        world_size: number of ranks, if ``schedule`` is a name.
        mesh: arrangement of the ranks, if ``schedule`` is a name. It determines ``world_size``.
        workspace: "full": every tile that arrives has a slot of its own, so senders never wait for a free slot.
            "bounded": tiles whose lifetimes do not overlap share slots, and senders wait for credits.
        sync: how a replay avoids overwriting slots that the replay before still reads. "credit": each transfer waits
            for a flag of its own. "barrier": all ranks meet in one barrier at the start of each replay.
        mechanism: who transfers. "push": the rank that holds a tile copies it into a slot of the rank that needs it.
            "pull": the rank that holds a tile copies it into a slot of its own, and the rank that needs it copies it
            from there. "store": as "push", but GEMMs write partial sums for other ranks directly into their slots.
        send_slots: with "push", the number of slots for partial sums that a rank has computed and not yet sent, >= 1.
            A GEMM waits for a copy if no slot is free.
        ranks_per_host: number of ranks that share memory and follow one another; it divides ``world_size``. The other
            ranks are on other hosts, to which ranks send messages instead of writing their memory. It takes the
            mechanism "push". None: all ranks share memory.
        **options: options of the schedule, if ``schedule`` is a name.

    Returns:
        The plan. It is not verified: :meth:`Plan.verify` proves it.

    Raises:
        ValueError: for arguments that do not fit together, and for a route that does not bring what is needed.
        PlanError: if a route returns a hop from or to a rank that does not exist.
    """
    instance("problem", problem, GemmProblem, "a distgemm.GemmProblem")
    if isinstance(schedule, str):
        scheduler = get_schedule(schedule, world_size, mesh=mesh, **options)
    elif isinstance(schedule, DistributedTileScheduler):
        if options:
            raise ValueError(f"options {sorted(options)} belong to a schedule's name; {schedule.name} is made already")
        if world_size is not None and integer("world_size", world_size) != schedule.world_size:
            raise wrong("world_size", f"an integer, {schedule.world_size} as {schedule.name} has it", world_size)
        if mesh is not None and integers("mesh", mesh) != schedule.mesh:
            raise wrong("mesh", f"a tuple of integers, {schedule.mesh} as {schedule.name} has it", mesh)
        scheduler = schedule
    else:
        raise wrong("schedule", "the name of a schedule or a DistributedTileScheduler", schedule)
    arguments = (
        member("workspace", workspace, WORKSPACES),
        member("sync", sync, SYNCS),
        member("mechanism", mechanism, MECHANISMS),
        integer("send_slots", send_slots),
        _ranks_per_host(ranks_per_host, scheduler.world_size, mechanism),
    )
    key = (problem, scheduler, *arguments)
    return _plans.get(key) or _plans.keep(key, _resize_or_derive(problem, scheduler, *arguments))


def _ranks_per_host(given: int | None, ranks: int, mechanism: Mechanism) -> int | None:
    """The argument of :func:`make_plan`, checked; None if all ranks are on one host."""
    if given is None:
        return None
    count = integer("ranks_per_host", given, 1, ranks)
    if ranks % count:
        raise ValueError(f"ranks_per_host divides the number of ranks, {ranks}, got {count}")
    if count == ranks:
        return None
    if mechanism != "push":
        raise ValueError(
            f"mechanism {mechanism!r} accesses the memory of other ranks, which hosts do not share: with "
            f"ranks_per_host={count} for {ranks} ranks it is 'push'"
        )
    return count


@dataclass(frozen=True, eq=False)
class Structure:
    """A plan, and what is needed to make plans of it that differ in their rows only.

    Attributes:
        plan: the plan.
        cuts: (m, part, parts) of each part of a tile of A or D that moves by itself.
        shapes: for each rank the shapes of its slots; for "bounded" those of both ways to share slots.
        fixed: views without rows of A and D, as :func:`fixed_views` returns them.
        tiles: what is needed to leave out tiles of M; None if that is not possible.
        restricted: the structures without some tiles of M, by which are kept. They need this structure's memory, too.
    """

    plan: Plan
    cuts: tuple[tuple[int, int, int], ...]
    shapes: tuple[tuple[list[SlotShape], ...], ...]
    fixed: frozenset[int]
    tiles: TilesOfM | None = None
    restricted: BoundedCache[Structure] = field(default_factory=lambda: BoundedCache(_structure_size, CACHE_BYTES))

    def resize(self, problem: GemmProblem, edges: Edges) -> Plan | None:
        """The plan of a problem with other rows, which differs from the plan of this structure in its rows only.

        Args:
            problem: differs from the structure's in m and m_per_rank.
            edges: the bounds of the problem's tiles.

        Returns:
            The plan. None if rows that differ in one of the two are the same in the other, or if another way to share
            slots takes less memory: then the derivation gives another structure.
        """
        rows: dict[int, int] = {}
        for before, after in zip(self._rows_of(self.plan.edges), self._rows_of(edges), strict=True):
            if rows.setdefault(before, after) != after:
                return None
        in_order = [rows[row] for row in sorted(rows)]
        if any(low >= high for low, high in pairwise(in_order)):
            return None
        slots = []
        sizes, own_sizes = SlotSizes(rows), SlotSizes()
        for ways in self.shapes:
            taken, way = sizes.smallest(ways)
            if len(ways) > 1 and own_sizes.smallest(ways)[1] != way:
                return None
            slots.append(taken)
        ops = ResizedOps(self.plan.rank_ops, rows, self.fixed)
        made = self._with(rows, problem=problem, edges=edges, rank_ops=ops, slots=tuple(slots))
        vars(made)["_structure"] = self.plan
        return made

    def _with(self, rows: Mapping[int, int], **fields: Any) -> Plan:
        """The plan with other rows in its shards, and with other fields."""
        a, b, d = self.plan.shards
        scales = self.plan.scale_shards
        scaling = self.plan.problem.scaling
        if scales is not None and scaling is not None and scales_have_rows(scaling):
            scales = _with_rows(scales[0], rows), scales[1]
        return replace(self.plan, shards=(_with_rows(a, rows), b, _with_rows(d, rows)), scale_shards=scales, **fields)

    def restrict(self, problem: GemmProblem, edges: Edges) -> Structure:
        """The structure of a problem in which some tiles of M are empty. No tile of this structure is empty.

        Args:
            problem: differs from the structure's in m and m_per_rank.
            edges: the bounds of the problem's tiles.
        """
        assert self.tiles is not None
        rows = dict(zip(self.plan.edges[0], edges[0], strict=True))
        numbers = Numbers(self.tiles, [top < bottom for top, bottom in pairwise(edges[0])])
        distinct = {id(shape): shape for of_rank in numbers.shapes for shape in of_rank}  # most slots share a few
        resized = {of_shape: _shape_with_rows(shape, rows) for of_shape, shape in distinct.items()}
        shapes = tuple(([resized[id(shape)] for shape in of_rank],) for of_rank in numbers.shapes)
        sizes = SlotSizes()
        slots = tuple(sizes.lay_out(ways[0]) for ways in shapes)
        ops = RestrictedOps(self.plan.rank_ops, rows, self.fixed, numbers)
        made = self._with(rows, problem=problem, edges=edges, rank_ops=ops, slots=slots)
        vars(made)["sizes"] = self.tiles.sizes(self.plan.rank_ops, numbers.kept)
        vars(made)["whole"] = self.plan, self.tiles.send_slots
        return Structure(made, (), shapes, self.fixed)

    def _rows_of(self, edges: Edges) -> list[int]:
        """All rows at which a box of A or D may begin or end."""
        found = list(edges[0])
        for tile, part, parts in self.cuts:
            found += cut_rows(edges[0][tile], edges[0][tile + 1], part, parts)
        return found


def _shape_with_rows(shape: SlotShape, rows: Mapping[int, int]) -> SlotShape:
    tiles = tuple([(rows[top], rows[bottom], width) for top, bottom, width in shape.tiles])
    return SlotShape(shape.dtype, shape.elements, tiles)


def _with_rows(boxes: tuple[Box, ...], rows: Mapping[int, int]) -> tuple[Box, ...]:
    return tuple((batch, (rows[top], rows[bottom]), columns) for batch, (top, bottom), columns in boxes)


def _derive(
    problem: GemmProblem,
    scheduler: DistributedTileScheduler,
    workspace: WorkspaceMode,
    sync: SyncMode,
    mechanism: Mechanism,
    send_slots: int,
    ranks_per_host: int | None = None,
) -> Structure:
    derivation = Derivation(problem, scheduler, mechanism)
    derivation.run()
    slots = derivation.allocate(workspace, send_slots)
    shards = {
        operand: tuple(derivation.shard(operand, rank) for rank in derivation.ranks) for operand in ("A", "B", "D")
    }
    scale_shards = None
    if derivation.scale_shards:
        scale_shards = derivation.scale_shards["A"], derivation.scale_shards["B"]
        shards |= zip(SCALE_OPERANDS.values(), scale_shards, strict=True)
    emitter = Emitter(derivation, shards, sync)
    rank_ops = tuple(map(tuple, emitter.emit()))
    tiles = tiles_of_m(derivation, emitter, send_slots) if workspace == "full" else None
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
        shards=(shards["A"], shards["B"], shards["D"]),
        rank_ops=rank_ops,
        slots=slots,
        scale_shards=scale_shards,
        ranks_per_host=ranks_per_host,
    )
    cuts, shapes = tuple(sorted(derivation.cuts)), tuple(derivation.shapes)
    return Structure(plan, cuts, shapes, fixed_views(rank_ops, problem.scaling), tiles)


CACHE_BYTES = 256 << 20
"""The most memory of the plans that are kept, in bytes, and of the structures that are kept."""

OP_BYTES = 1 << 10
"""Estimated memory of an op of a plan with its views, in bytes."""

PLAN_BYTES, SLOT_BYTES = 1 << 12, 1 << 8
"""Estimated memory of what a plan with other rows has besides ops, and of each of its slots, in bytes."""


def _size_of(plan: Plan) -> int:
    ops = plan.rank_ops
    if isinstance(ops, RotatedOps):
        return PLAN_BYTES + SLOT_BYTES * plan.world_size + OP_BYTES * (len(ops.first) + ops.made)
    if isinstance(ops, RowsOfOps):
        # Its ranks have equal slots, unless its rows are ragged.
        slots = sum(map(len, {id(of_rank): of_rank for of_rank in plan.slots}.values()))
        return PLAN_BYTES + SLOT_BYTES * slots + OP_BYTES * ops.made
    return OP_BYTES * sum(map(len, ops))


MANY_ROWS = 2
"""Rows from which on it does not matter how many rows a tile has, unless a route divides it into more parts."""


MANY_TILES = 1 << 12
"""The most tiles of work of a plan whose ranks are all derived at once: it takes about 0.2 s. Of a larger plan under a
symmetric schedule, a rank derives its own ops only."""


@collector_paused()
def _resize_or_derive(problem: GemmProblem, scheduler: DistributedTileScheduler, *options: Any) -> Plan:
    """The plan of one rank, rotated; or one with the structure of an earlier one; or else a new plan."""
    if scheduler.world_size * scheduler.iterations > MANY_TILES:
        try:
            return derive_rotated(problem, scheduler, *options)
        except NotSymmetricError as reason:
            for what, layout in zip(("work", "A", "B", "D"), scheduler.layouts, strict=True):
                if layout.ranks * layout.size > MAX_TILES:
                    raise ValueError(
                        f"{scheduler.name} on the mesh {scheduler.mesh}: {layout.ranks} ranks with {layout.size} tiles "
                        f"of {what} each; a plan in which not every rank does the same ({reason}) has at most "
                        f"{MAX_TILES} in total: take fewer ranks or chunks"
                    ) from None
    edges = tile_edges(problem, scheduler)
    p = problem
    if p.scaling is not None and p.scaling.a.unit[0] != 1:  # bounds of tiles are multiples of it
        return _derive(p, scheduler, *options).plan
    types = p.groups, p.dtype, p.out_dtype, p.partial_dtype, p.b_dtype, p.scaling
    rest = p.n, p.k, p.l, p.n_per_rank, p.k_per_rank, *types

    def structure_of(heights: tuple[int, ...], make: Callable[[], Structure]) -> Structure:
        key = (rest, heights, scheduler, *options)
        return _structures.get(key) or _structures.keep(key, make())

    heights = tuple(min(bottom - top, MANY_ROWS) for top, bottom in pairwise(edges[0]))
    found = None
    if min(heights) < MANY_ROWS and options[0] == "full":
        whole = replace(p, m=MANY_ROWS * len(heights), m_per_rank=None)
        every = structure_of((MANY_ROWS,) * len(heights), lambda: _derive(whole, scheduler, *options))
        if every.tiles is not None:
            # It does not matter how many rows a tile has, unless it has none.
            kept = tuple(height > 0 for height in heights)
            found = every if all(kept) else every.restricted.get(kept)
            found = found or every.restricted.keep(kept, every.restrict(problem, edges))
    structure = found or structure_of(heights, lambda: _derive(problem, scheduler, *options))
    if structure.plan.problem == problem:
        return structure.plan
    return structure.resize(problem, edges) or _derive(problem, scheduler, *options).plan


def _structure_size(structure: Structure) -> int:
    return _size_of(structure.plan) + structure.restricted.size


_structures: BoundedCache[Structure] = BoundedCache(_structure_size, CACHE_BYTES)
_plans: BoundedCache[Plan] = BoundedCache(_size_of, CACHE_BYTES)


def forget_plans() -> None:
    """Empty the cache of plans, so that the time of planning can be measured."""
    _plans.clear()
    _structures.clear()
