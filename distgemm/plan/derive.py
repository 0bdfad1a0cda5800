"""From a problem and a schedule to a plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

from distgemm.plan.emit import Emitter
from distgemm.plan.movement import Derivation
from distgemm.plan.plan import Mechanism, Plan, SyncMode, WorkspaceMode, collector_paused
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import DistributedTileScheduler, get_schedule

__all__ = ["MECHANISMS", "SYNCS", "WORKSPACES", "forget_plans", "make_plan"]

WORKSPACES: tuple[WorkspaceMode, ...] = get_args(WorkspaceMode)
SYNCS: tuple[SyncMode, ...] = get_args(SyncMode)
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)

SEND_SLOTS = 2
"""Partial sums of a rank that may be on their way at once: one is sent while the next one is computed."""


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
    """The plan of a product under a schedule: what every rank multiplies, sends, waits for and adds.

    Plans are cached: a second call with equal arguments returns the same object.

    Args:
        problem: the product over all ranks.
        schedule: a scheduler; or the name of one, with world_size or mesh and its options.
        world_size: number of ranks, for a schedule's name.
        mesh: arrangement of the ranks, for a schedule's name.
        workspace: "full" gives every tile that arrives a slot of its own, so that senders run ahead freely. "bounded"
            shares slots between tiles whose lifetimes do not overlap, and credits hold senders back.
        sync: what keeps a replay from slots that the replay before still reads: "credit" is a flag for each transfer,
            "barrier" one barrier of all ranks at the start of each replay.
        mechanism: who transfers. With "push" the rank that has a tile copies it into the slot of the rank that needs
            it. With "pull" the rank that needs it copies it, from a slot into which the other rank has copied its
            shard.
            "store" is "push", except that GEMMs write partial sums for other ranks directly into their slots.
        send_slots: with "push", how many partial sums of a rank may wait to be sent. A GEMM whose sum finds no slot
            waits for a copy. The fused kernel (``execution="single_kernel"``) cannot wait so, and needs as many send
            slots as there are chunks.
        **options: of the schedule, if it is given by name.

    Raises:
        ValueError: for arguments that do not fit.
        PlanError: for a route that names a rank that does not exist.
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
        raise ValueError(f"send_slots is an integer >= 1, got {send_slots!r}")
    return _make_plan(problem, scheduler, workspace, sync, mechanism, send_slots)


@lru_cache(maxsize=128)
@collector_paused()
def _make_plan(
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


def forget_plans() -> None:
    """Drop the cached plans, to measure how long planning takes."""
    _make_plan.cache_clear()
