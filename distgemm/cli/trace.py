"""``distgemm trace``: one replay on all ranks, measured beside predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distgemm.cli.common import check_files, check_folder, new_console, write_file
from distgemm.plan.derive import MECHANISMS, make_plan
from distgemm.plan.options import parse_mesh
from distgemm.plan.problem import GemmProblem
from distgemm.simulator import simulate
from distgemm.simulator.machine import Machine, list_machines

if TYPE_CHECKING:
    from rich.table import Table

    from distgemm.measure.trace import Trace

__all__ = ["gaps_text", "trace_command", "trace_table"]

PATIENCE = 900.0
"""Seconds for everything, with the compilation of kernels."""


def trace_command(
    name: Annotated[
        str, typer.Argument(help="A schedule, an alias, or a pattern such as ag+gemm.", show_default=False)
    ],
    m: Annotated[int, typer.Option(help="Rows of A and D.")] = 8192,
    n: Annotated[int, typer.Option(help="Rows of B, columns of D.")] = 57344,
    k: Annotated[int, typer.Option(help="Columns of A and B.")] = 8192,
    dtype: Annotated[str, typer.Option(help="Element type of A and B.")] = "bfloat16",
    chunks: Annotated[
        int | None, typer.Option(help="The schedule's option chunks. [default: the schedule's own]")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks, one on each GPU. [default: all GPUs]")] = None,
    mesh: Annotated[str | None, typer.Option(help="Arrangement of the ranks, such as 2x4.", show_default=False)] = None,
    mechanism: Annotated[str, typer.Option(help=f"One of {', '.join(MECHANISMS)}.")] = MECHANISMS[0],
    provider: Annotated[str, typer.Option(help="Of the GEMMs: cutlass or cublas.")] = "cutlass",
    config: Annotated[str | None, typer.Option(help="A configuration of the provider. [default: by shape]")] = None,
    gemm_streams: Annotated[int, typer.Option(help="Streams on which GEMMs alternate.", min=1, max=2)] = 2,
    waits: Annotated[
        str, typer.Option(help="Who waits for other ranks: operations on memory, or, with --gemm_streams 1, a kernel.")
    ] = "memory",
    machine: Annotated[str, typer.Option(help=f"One of {', '.join(list_machines())}, or a .json file.")] = "h200",
    json: Annotated[
        Path | None, typer.Option("--json", help="Write a trace for ui.perfetto.dev to this file.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it into this .svg or .png file.", show_default=False)
    ] = None,
) -> None:
    """Run a plan on the GPUs of this machine, and show what each did when in one replay, beside the prediction.

    The plan is recorded as a CUDA graph on each rank and replayed under the profiler of torch; the middle replay is
    shown. Waits and signals are not shown: where something waits, there is a gap.

    A rank's total is the time from its first op to that of the next replay; the line above the table has what a replay
    takes without the profiler. "Without GEMM" is the time before the first GEMM, between GEMMs, and from the end of
    the last one to the next replay.
    """
    if json is not None:
        check_folder("--json", json)
    if picture is not None:
        check_files("--picture", [picture])
    if waits not in ("memory", "kernel"):
        raise ValueError(f"--waits is memory or kernel, got {waits!r}")
    if waits == "kernel" and gemm_streams != 1:
        raise ValueError(
            f"--waits kernel takes --gemm_streams 1, got {gemm_streams}: no GEMM may run beside a kernel that waits"
        )
    sides = parse_mesh(mesh)
    options: dict[str, Any] = {} if chunks is None else {"chunks": chunks}
    problem = GemmProblem(m, n, k, dtype=dtype)
    gpus = Machine.load(machine)
    if ranks is None and sides is None:
        # What no number of ranks could take is refused before GPUs are looked for.
        make_plan(problem, name, 2, sync="barrier", mechanism=mechanism, **options)
        import torch

        ranks = torch.cuda.device_count()
        if not ranks:
            raise ValueError("trace runs on GPUs, and there is none here; distgemm simulate needs none")
    plan = make_plan(problem, name, ranks, mesh=sides, sync="barrier", mechanism=mechanism, **options)
    predicted = simulate(plan, gpus, gemm_streams=gemm_streams)

    from distgemm.measure.trace import Trace, draw_trace, record
    from distgemm.runtime.launch import launch

    recordings = launch(
        record, plan.world_size, plan, provider, config, gemm_streams, waits, backend="nccl", timeout=PATIENCE
    )
    trace = Trace.of(plan, gemm_streams, recordings, predicted)
    report(trace)
    if json is not None:
        write_file("--json", json, trace.save_perfetto)
    if picture is not None:
        write_file("--picture", picture, lambda path: draw_trace(trace, path))


def report(trace: Trace) -> None:
    """Print where the time goes."""
    plan, p = trace.plan, trace.plan.problem
    typer.echo(f"{plan.schedule}: {plan.world_size} ranks, m {p.m} x n {p.n} x k {p.k}, {p.dtype}")
    error = 100 * (trace.predicted.time / trace.alone - 1)
    typer.echo(
        f"{trace.alone:.1f} us per replay on the slowest rank, without the profiler; predicted "
        f"{trace.predicted.time:.1f} us ({error:+.0f} %)"
    )
    new_console().print(trace_table(trace))
    typer.echo(gaps_text(trace))


def trace_table(trace: Trace) -> Table:
    """A row for each rank as measured, and as predicted."""
    from rich import box
    from rich.table import Table

    table = Table("rank", "us", box=box.SIMPLE)
    titles = ("total", "GEMMs", "copies", "both", "without GEMM: at start", "between", "at end")
    for title in titles:
        table.add_column(title, justify="right")
    for rank in range(trace.plan.world_size):
        for predicted in (False, True):
            figures = (f"{value:.1f}" for value in trace.figures(rank, predicted))
            table.add_row("" if predicted else str(rank), "predicted" if predicted else "measured", *figures)
    return table


def gaps_text(trace: Trace) -> str:
    """Where something waits, and how well the clocks of the ranks agree."""
    lines = [f"{gap.us:6.1f} us on rank {gap.rank} {gap.text}" for gap in trace.gaps()]
    if trace.violation:
        shifts = ", ".join(f"{shift:.1f}" for shift in trace.shifts)
        clocks = f"clocks: a chunk was used {trace.violation:.1f} us before it had come; set forward by {shifts} us"
    else:
        clocks = "clocks: no chunk is used before it has come; nothing is shifted"
    return "\n".join([*lines, clocks])
