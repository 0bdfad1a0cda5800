"""``distgemm plan``: a plan as text, as JSON and as a picture."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from distgemm.cli.options import (
    Batches,
    BDtype,
    Dtype,
    JsonFile,
    K,
    KPerRank,
    M,
    Mechanism,
    MeshSides,
    MPerRank,
    N,
    NPerRank,
    OutDtype,
    PartialDtype,
    Pictures,
    Ranks,
    RanksPerHost,
    Scaling,
    ScheduleName,
    ScheduleOptions,
    Sync,
    Workspace,
    arrangement,
    check_shares,
    gemm_problem,
    number,
)
from distgemm.cli.output import (
    check_files,
    check_json,
    console_width,
    is_page,
    wants_text,
    write_file,
    write_json,
)
from distgemm.cli.show import Limit
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES, make_plan
from distgemm.plan.options import parse_options
from distgemm.viz.page import PAGE_SUFFIX, predicted_model, save_page
from distgemm.viz.text import LIMIT, WIDTH, show_plan

__all__ = ["plan_command"]


def plan_command(
    name: ScheduleName,
    ranks: Ranks = None,
    mesh: MeshSides = None,
    option: ScheduleOptions = None,
    m: M = None,
    n: N = 57344,
    k: K = 8192,
    batches: Batches = 1,
    dtype: Dtype = "bfloat16",
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    b_dtype: BDtype = None,
    scaling: Scaling = None,
    m_per_rank: MPerRank = None,
    n_per_rank: NPerRank = None,
    k_per_rank: KPerRank = None,
    workspace: Workspace = WORKSPACES[0],
    sync: Sync = SYNCS[0],
    mechanism: Mechanism = MECHANISMS[0],
    ranks_per_host: RanksPerHost = None,
    ops: Annotated[bool, typer.Option("--ops", help="List the ops of all ranks.")] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", parser=number(0), help="List the ops of this rank.", show_default=False),
    ] = None,
    limit: Limit = LIMIT,
    json: JsonFile = None,
    output: Pictures = None,
) -> None:
    """Plan a GEMM and print what every rank does.

    By default it is the layer fc1 of Llama 70B. A page (-o FILE.html) has times that are predicted for an H200;
    distgemm simulate takes other machines.
    """
    from distgemm.viz.figures import draw_plan

    paths = output or []
    check_files(paths, PAGE_SUFFIX)
    check_json(json)
    problem = gemm_problem(
        m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank, n_per_rank, k_per_rank, b_dtype, scaling
    )
    options: dict[str, Any] = {"workspace": workspace, "sync": sync, "mechanism": mechanism, **parse_options(option)}
    on = arrangement(name, ranks, mesh)
    check_shares(problem, on)
    plan = make_plan(problem, name, mesh=on, ranks_per_host=ranks_per_host, **options)
    if wants_text(json):
        typer.echo(show_plan(plan, ops=ops, rank=rank, limit=limit, width=min(WIDTH, console_width())))
    if json is not None:
        write_json(json, plan.to_json())
    for path in paths:
        if is_page(path):
            write_file(path, partial(save_page, [predicted_model(plan)]))
        else:
            write_file(path, partial(draw_plan, plan))
