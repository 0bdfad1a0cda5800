"""Checks whether a plan or a schedule does a pattern: "ag+gemm", "gemm+rs" or "gemm+ar"."""

from __future__ import annotations

from distgemm.arguments import instance
from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import Pattern, check_pattern, get_schedule, schedule_mesh_rank

__all__ = ["does_pattern", "schedule_does_pattern"]


def does_pattern(plan: Plan, pattern: Pattern) -> bool:
    """Whether the shards of A, B and D in a plan are those of a pattern.

    Args:
        plan: the plan.
        pattern: for example "ag+gemm", which needs A sharded along M, B and D along N.

    Returns:
        True if every rank's shards are as the pattern needs, with the shards in the order of the ranks.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    check_pattern(pattern)
    p, ranks = plan.problem, range(plan.world_size)
    m, n, k = ((0, extent) for extent in (p.m, p.n, p.k))
    held = {name: [plan.box(name, rank)[1:] for rank in ranks] for name in "ABD"}
    rows = _in_order([box[0] for box in held["A" if pattern == "ag+gemm" else "D"]], p.m)
    if pattern == "ag+gemm":
        wanted = {"A": (None, k), "B": (None, k), "D": (m, None)}
        split = _in_order([box[0] for box in held["B"]], p.n) and _in_order([box[1] for box in held["D"]], p.n)
    else:
        wanted = {"A": (m, None), "B": (n, None), "D": (None, n) if pattern == "gemm+rs" else (m, n)}
        split = _in_order([box[1] for box in held["A"]], p.k) and _in_order([box[1] for box in held["B"]], p.k)
        rows = rows or pattern == "gemm+ar"
    whole = all(
        edges is None or box[mode] == edges
        for name, modes in wanted.items()
        for box in held[name]
        for mode, edges in enumerate(modes)
    )
    return rows and split and whole


def _in_order(ranges: list[tuple[int, int]], extent: int) -> bool:
    edges = [0, *(stop for _, stop in ranges)]
    return edges[-1] == extent and all(start == before for (start, _), before in zip(ranges, edges, strict=False))


def schedule_does_pattern(name: str, pattern: Pattern) -> bool:
    """Whether a schedule on one axis of ranks does a pattern.

    Args:
        name: name of the schedule.
        pattern: the pattern.

    Returns:
        The answer for two ranks. False for schedules that need a mesh of several axes.
    """
    check_pattern(pattern)
    if schedule_mesh_rank(name) != 1:
        return False
    return does_pattern(make_plan(GemmProblem(m=4, n=4, k=4), get_schedule(name, 2)), pattern)
