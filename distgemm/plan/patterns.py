"""Checks whether a plan or a schedule does a pattern, such as "ag+gemm"."""

from __future__ import annotations

from typing import Literal, get_args

from distgemm.arguments import instance, member
from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import MODES, get_schedule, schedule_mesh_rank

__all__ = ["COLLECTIVES", "SHARDED_MODES", "Collective", "does_pattern", "schedule_does_pattern"]


SHARDED_MODES: dict[str, tuple[str, str, str]] = {
    "ag+gemm": ("m", "n", "n"),
    "gemm+rs": ("k", "k", "m"),
    "gemm+ar": ("k", "k", ""),
    "gemm+a2a": ("m", "", "n"),
    "a2a+gemm": ("k", "", "m"),
}
"""The mode of A, of B and of D that a pattern shards over the ranks. "": each rank holds the whole operand."""

Collective = Literal["nccl", "two-shot", "one-shot"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""What adds over ranks: NCCL, or gloo on CPUs; for "gemm+ar" also the kernels of torch's symmetric memory. With
"two-shot" each rank adds a part of the result and all read it. With "one-shot" each rank reads and adds everything."""


def does_pattern(plan: Plan, pattern: str, copies: int = 1) -> bool:
    """Whether the shards of A, B and D in a plan are those of a pattern.

    Args:
        plan: the plan.
        pattern: for example "ag+gemm", which needs A sharded along M, B and D along N.
        copies: number of consecutive ranks that hold each shard of D.

    Returns:
        True if every rank's shards are as the pattern needs, with the shards in the order of the ranks.

    Raises:
        ValueError: if ``plan`` is no plan, or for an unknown pattern.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    sharded = SHARDED_MODES[member("pattern", pattern, SHARDED_MODES)]
    for operand, split in zip("ABD", sharded, strict=True):
        boxes = [plan.box(operand, rank) for rank in range(plan.world_size)]
        for at, mode in enumerate(MODES[operand][:2], start=1):
            held, extent = [box[at] for box in boxes], getattr(plan.problem, mode)
            if mode == split and operand == "D" and copies > 1:
                if any(each != held[rank - rank % copies] for rank, each in enumerate(held)):
                    return False
                held = held[::copies]
            if not (_in_order(held, extent) if mode == split else all(edges == (0, extent) for edges in held)):
                return False
    return True


def _in_order(ranges: list[tuple[int, int]], extent: int) -> bool:
    edges = [0, *(stop for _, stop in ranges)]
    return edges[-1] == extent and all(start == before for (start, _), before in zip(ranges, edges, strict=False))


def schedule_does_pattern(name: str, pattern: str) -> bool | None:
    """Whether a schedule on one axis of ranks does a pattern.

    Args:
        name: name of the schedule.
        pattern: the pattern.

    Returns:
        The answer for two ranks. None for schedules that need a mesh of several axes, or have no plan for two ranks.

    Raises:
        ValueError: for an unknown schedule or pattern.
    """
    member("pattern", pattern, SHARDED_MODES)
    if schedule_mesh_rank(name) != 1:
        return None
    try:
        plan = make_plan(GemmProblem(m=4, n=4, k=4), get_schedule(name, 2))
    except ValueError:
        return None
    return does_pattern(plan, pattern)
