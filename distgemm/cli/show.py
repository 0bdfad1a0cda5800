"""``distgemm show``: a schedule as text and as a picture."""

from __future__ import annotations

from typing import Annotated

import typer

from distgemm.cli.options import MeshSides, Pictures, Ranks, ScheduleName, ScheduleOptions, arrangement, number
from distgemm.cli.output import check_files, console_width, write_file
from distgemm.plan.options import parse_options
from distgemm.schedulers import get_schedule
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

    It shows which rank holds each tile, and which rank multiplies which tile in each iteration.
    """
    from distgemm.viz.figures import draw_schedule

    paths = output or []
    check_files(paths)
    scheduler = get_schedule(name, mesh=arrangement(name, ranks, mesh), **parse_options(option))
    typer.echo(show_schedule(scheduler, limit=limit, width=min(WIDTH, console_width())))
    for path in paths:
        write_file(path, lambda path: draw_schedule(scheduler, path))
