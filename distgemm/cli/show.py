"""``distgemm show``: a schedule as text and as a picture."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from distgemm.cli.options import (
    MeshSides,
    PerTile,
    Pictures,
    Ranks,
    ScheduleName,
    ScheduleOptions,
    arrangement,
    number,
)
from distgemm.cli.output import check_files, console_width, is_page, write_file
from distgemm.plan.derive import make_plan
from distgemm.plan.options import parse_options
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import get_schedule
from distgemm.schedulers.registry import MAX_RANKS
from distgemm.viz.page import EXAMPLE, PAGE_SUFFIX, page_model, save_page
from distgemm.viz.text import LIMIT, WIDTH, show_schedule, show_tile_order

__all__ = ["Limit", "show_command"]

Limit = Annotated[
    int, typer.Option("--limit", metavar="N", parser=number(1), help="Rows and columns shown of each table.")
]


def show_command(
    name: ScheduleName,
    ranks: Ranks = None,
    mesh: MeshSides = None,
    option: ScheduleOptions = None,
    limit: Limit = LIMIT,
    per_tile: PerTile = None,
    rank: Annotated[
        int, typer.Option("--rank", metavar="RANK", parser=number(0, MAX_RANKS - 1), help="With --per-tile: of whom.")
    ] = 0,
    m: Annotated[
        int, typer.Option("--m", metavar="M", parser=number(1), help="With --per-tile: rows of A and D.")
    ] = 2048,
    n: Annotated[
        int, typer.Option("--n", metavar="N", parser=number(1), help="With --per-tile: rows of B, columns of D.")
    ] = 4096,
    output: Pictures = None,
) -> None:
    """Draw a schedule.

    It shows which rank holds each tile, and which rank multiplies which tile in each iteration. A page (-o FILE.html)
    shows the plan of the layer fc1 of Llama 70B, in steps; the pages of plan and simulate show any other GEMM, with
    times.

    With --per-tile, it shows the order in which that kernel multiplies the tiles of a rank: the unit of each cluster of
    tiles in a shard, and the ticket of each in D.
    """
    from distgemm.viz.figures import draw_schedule

    paths = output or []
    check_files(paths, PAGE_SUFFIX)
    scheduler = get_schedule(name, mesh=arrangement(name, ranks, mesh), **parse_options(option))
    width = min(WIDTH, console_width())
    if per_tile is not None:
        from distgemm.gemm.per_tile.select import gemm_of

        if paths:
            raise ValueError("-o draws a schedule, and --per-tile shows text only")
        gemm = gemm_of(make_plan(GemmProblem(m, n, n), scheduler), per_tile)
        typer.echo(show_tile_order(gemm.order, rank, ranks=gemm.ranks, limit=limit, width=width))
        return
    typer.echo(show_schedule(scheduler, limit=limit, width=width))
    for path in paths:
        if is_page(path):
            model = page_model(make_plan(EXAMPLE, scheduler))
            write_file(path, partial(save_page, [model]))
        else:
            write_file(path, partial(draw_schedule, scheduler))
