"""``distgemm show``: a schedule as text and as a picture."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from distgemm.cli.options import (
    MeshSides,
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
from distgemm.schedulers import get_schedule
from distgemm.viz.page import EXAMPLE, PAGE_SUFFIX, page_model, save_page
from distgemm.viz.text import LIMIT, WIDTH, show_schedule

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
    output: Pictures = None,
) -> None:
    """Draw a schedule.

    It shows which rank holds each tile, and which rank multiplies which tile in each iteration. A page (-o FILE.html)
    shows the plan of the layer fc1 of Llama 70B, in steps; the pages of plan and simulate show any other GEMM, with
    times.
    """
    from distgemm.viz.figures import draw_schedule

    paths = output or []
    check_files(paths, PAGE_SUFFIX)
    scheduler = get_schedule(name, mesh=arrangement(name, ranks, mesh), **parse_options(option))
    typer.echo(show_schedule(scheduler, limit=limit, width=min(WIDTH, console_width())))
    for path in paths:
        if is_page(path):
            model = page_model(make_plan(EXAMPLE, scheduler))
            write_file(path, partial(save_page, [model]))
        else:
            write_file(path, partial(draw_schedule, scheduler))
