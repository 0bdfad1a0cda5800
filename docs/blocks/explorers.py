"""The pages of the site on which plans move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import distgemm
from blocks.schedules import MESHES, layer_of
from distgemm.plan.ops import Gemm, Op, Wait
from distgemm.plan.plan import Plan
from distgemm.schedulers import schedule_mesh_rank
from distgemm.viz.page import predicted_model, save_page

GATHER = "all_gather_1d_tiling_cd_rotating_a"
FC1 = (8192, 57344, 8192)
"""The layer fc1 (gate and up in one) of Llama 70B."""


def explorers() -> dict[str, Callable[[Path], None]]:
    """What writes each page, by its place in the site."""
    found: dict[str, Callable[[Path], None]] = {"ag_gemm_explorer.html": save_unfused_beside_fused}
    for name in distgemm.list_schedules():
        found[f"schedules/{name}_explorer.html"] = partial(save_schedule, name)
    return found


def save_schedule(name: str, path: Path) -> None:
    """Write the page of a schedule on the ranks of its grids."""
    problem = distgemm.GemmProblem(*layer_of(name)[1:])
    plan = distgemm.make_plan(problem, name, mesh=MESHES[schedule_mesh_rank(name)])
    save_page([predicted_model(plan)], path)


def save_unfused_beside_fused(path: Path) -> None:
    """Write the page of all-gather + GEMM on 4 ranks, unfused beside fused."""
    fused = distgemm.make_plan(distgemm.GemmProblem(2048, *FC1[1:]), GATHER, 4)
    models = [
        predicted_model(plan, label={"title": title}) for title, plan in (("Unfused", unfused(fused)), ("Fused", fused))
    ]
    save_page(models, path, "beside", TITLE, play=True)


TITLE = (
    "All-gather + GEMM on 4 ranks. Unfused, each GEMM waits until the whole all-gather is over. Fused, each GEMM waits "
    "only for its own tile of A. The copies and the GEMMs are the same."
)


def unfused(plan: Plan) -> Plan:
    """The plan of an all-gather in which every GEMM waits for all tiles that arrive on its rank."""
    last = max(op.round for ops in plan.rank_ops for op in ops)
    for rank, ops in enumerate(plan.rank_ops):
        arrivals = tuple(op.id for op in ops if isinstance(op, Wait) and not op.flag.credit)
        after = {op.id for op in ops if isinstance(op, Gemm)}
        for op in ops:
            if after & set(op.deps):
                after.add(op.id)
        first = [op for op in ops if op.id not in after]
        then = [_after(op, arrivals, last) for op in ops if op.id in after]
        plan = plan.replace_ops(rank, [*first, *then])
    return plan


def _after(op: Op, arrivals: tuple[int, ...], last: int) -> Op:
    changes: dict[str, Any] = {"round": last}
    if isinstance(op, Gemm):
        changes["deps"] = tuple(sorted({*op.deps, *arrivals}))
    return dataclasses.replace(op, **changes)
