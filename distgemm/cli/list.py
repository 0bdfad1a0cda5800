"""``distgemm list``: the registered schedules."""

from __future__ import annotations

import typer

from distgemm.cli.output import console_width, wrapped
from distgemm.schedulers import (
    list_patterns,
    list_schedules,
    schedule_aliases,
    schedule_doc,
    schedule_mesh_rank,
    schedule_options,
)

__all__ = ["list_command"]

INDENT = "    "


def list_command() -> None:
    """List the schedules, with their options and aliases."""
    width = min(console_width(), 100)
    defaults = {schedule: pattern for pattern, schedule in list_patterns().items()}
    for name in list_schedules():
        axes = schedule_mesh_rank(name)
        mesh = "--ranks N" if axes == 1 else f"--mesh {'x'.join('PQS'[:axes])}"
        default = f", default of {defaults[name]}" if name in defaults else ""
        typer.echo(f"{name} ({mesh}{default})")
        lines = wrapped(schedule_doc(name), width, INDENT)
        lines += [f"{INDENT}--option {key}={value}" for key, value in schedule_options(name).items()]
        lines += [f"{INDENT}alias {alias}" for alias in schedule_aliases(name)]
        typer.echo("\n".join(lines))
