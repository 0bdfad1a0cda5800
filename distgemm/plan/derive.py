"""make_plan: derives the plan of a problem under a schedule."""

from __future__ import annotations

from typing import Any, get_args

from distgemm.arguments import instance, integer, integers, member, wrong
from distgemm.plan.emit import Emitter
from distgemm.plan.movement import Derivation
from distgemm.plan.plan import Mechanism, Plan, SyncMode, WorkspaceMode, collector_paused
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import DistributedTileScheduler, get_schedule
from distgemm.schedulers.cache import BoundedCache

__all__ = ["MECHANISMS", "SYNCS", "WORKSPACES", "forget_plans", "make_plan"]

WORKSPACES: tuple[WorkspaceMode, ...] = get_args(WorkspaceMode)
SYNCS: tuple[SyncMode, ...] = get_args(SyncMode)
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)

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
            A GEMM waits for a copy if no slot is free. The fused kernel (``execution="single_kernel"``) cannot wait for
            a copy, so it needs as many send slots as there are chunks.
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
    return _make_plan(
        problem,
        scheduler,
        member("workspace", workspace, WORKSPACES),
        member("sync", sync, SYNCS),
        member("mechanism", mechanism, MECHANISMS),
        integer("send_slots", send_slots),
    )


@collector_paused()
def _derive(
    problem: GemmProblem,
    scheduler: DistributedTileScheduler,
    workspace: WorkspaceMode,
    sync: SyncMode,
    mechanism: Mechanism,
    send_slots: int,
) -> Plan:
    derivation = Derivation(problem, scheduler, mechanism)
    derivation.run()
    slots = derivation.allocate(workspace, send_slots)
    shards = {
        operand: tuple(derivation.shard(operand, rank) for rank in derivation.ranks) for operand in ("A", "B", "D")
    }
    rank_ops = tuple(map(tuple, Emitter(derivation, shards, sync).emit()))
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


CACHE_BYTES = 256 << 20
"""The most memory of the plans that are kept, in bytes."""

OP_BYTES = 1 << 10
"""Estimated memory of an op of a plan with its views, in bytes."""


def _size_of(plan: Plan) -> int:
    return OP_BYTES * sum(map(len, plan.rank_ops))


_make_plan = BoundedCache(_derive, _size_of, CACHE_BYTES)


def forget_plans() -> None:
    """Empty the cache of plans, so that the time of planning can be measured."""
    _make_plan.clear()
