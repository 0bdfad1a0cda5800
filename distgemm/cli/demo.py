"""``distgemm demo``: a first run on this machine. :mod:`distgemm.cli.demo_run` has what it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from distgemm.cli.options import DEFAULT_M, number
from distgemm.cli.output import new_console

__all__ = ["demo_command"]

MAX_DEMO_RANKS = 64
"""Each rank is a process of this machine."""


def demo_command(
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", parser=number(1, MAX_DEMO_RANKS), help="Number of ranks.")
    ] = 4,
    schedule_ag: Annotated[
        str, typer.Option("--schedule-ag", metavar="SCHEDULE", help="Schedule of the all-gather + GEMM.")
    ] = "ag+gemm",
    schedule_rs: Annotated[
        str, typer.Option("--schedule-rs", metavar="SCHEDULE", help="Schedule of the GEMM + reduce-scatter.")
    ] = "gemm+rs",
    m: Annotated[
        int,
        typer.Option(
            "--m", metavar="M", parser=number(1), help="Tokens of the layers that are measured if there are GPUs."
        ),
    ] = DEFAULT_M,
) -> None:
    """Run a tensor-parallel layer on this machine.

    Each rank is a process. With GPUs, the demo also measures the layers of Llama 70B on them.
    """
    from distgemm.cli.demo_run import demo

    demo(ranks, schedule_ag, schedule_rs, tokens=m, console=new_console())
