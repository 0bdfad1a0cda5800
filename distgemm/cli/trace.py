"""``distgemm trace``: one replay on all ranks, as measured and as predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from distgemm.cli.options import (
    TIMEOUT_S,
    Dtype,
    JsonFile,
    K,
    MachineOption,
    Mechanism,
    MeshSides,
    N,
    ScheduleName,
    ScheduleOptions,
    Timelines,
    arrangement,
    number,
    one_of,
)
from distgemm.cli.output import (
    Line,
    check_files,
    check_json,
    print_figures,
    print_wrapped,
    wants_text,
    write_file,
    write_json,
)
from distgemm.plan.derive import MECHANISMS, make_plan
from distgemm.plan.options import parse_options
from distgemm.plan.problem import QUANTIZED_DTYPES, GemmProblem
from distgemm.plan.scaling import SCALINGS
from distgemm.runtime.executable import WaitBy
from distgemm.schedulers.registry import MAX_CHUNKS, MAX_RANKS
from distgemm.simulator import simulate
from distgemm.viz.page import PAGE_SUFFIX, page_model, save_page

if TYPE_CHECKING:
    from distgemm.measure.trace import Trace

__all__ = ["gaps_text", "trace_command", "trace_lines"]


def trace_command(
    name: ScheduleName,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            parser=number(1, MAX_RANKS),
            help="Number of ranks, one on each GPU. [default: all GPUs]",
        ),
    ] = None,
    mesh: MeshSides = None,
    option: ScheduleOptions = None,
    m: Annotated[int, typer.Option("--m", metavar="M", parser=number(1), help="Rows of A and D.")] = 8192,
    n: N = 57344,
    k: K = 8192,
    dtype: Dtype = "bfloat16",
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            metavar="N",
            parser=number(1, MAX_CHUNKS),
            help="The schedule's option chunks. [default: the schedule's own]",
        ),
    ] = None,
    mechanism: Mechanism = MECHANISMS[0],
    provider: Annotated[
        str | None,
        typer.Option(
            "--provider",
            parser=one_of(["cutlass", "cublas"]),
            metavar="NAME",
            help="Of the GEMMs: cutlass or cublas. [default: cutlass on Hopper, cublas on other GPUs]",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="CONFIG", help="A tile configuration of the provider. [default: by shape]"),
    ] = None,
    gemm_streams: Annotated[
        int, typer.Option("--gemm-streams", metavar="N", parser=number(1, 2), help="Streams on which GEMMs alternate.")
    ] = 2,
    wait_by: Annotated[
        WaitBy,
        typer.Option(
            "--wait-by",
            parser=one_of(get_args(WaitBy)),
            metavar="NAME",
            help="What waits for other ranks: memory_op or, with --gemm-streams 1, kernel.",
        ),
    ] = "memory_op",
    machine: MachineOption = "h200",  # type: ignore[assignment]
    json: JsonFile = None,
    output: Timelines = None,
) -> None:
    """Show when each GPU did what in one replay.

    It runs a plan on the GPUs of this machine, and also shows the prediction. Each rank records the plan as a CUDA
    graph and replays it under torch's profiler; the middle replay is shown. Waits and signals are not shown: a gap
    is where something waits.

    A rank's total is the time from its first op to that of the next replay; the line above the table has the time
    of a replay without the profiler. "no GEMM" is the time before the first GEMM (start), between GEMMs (middle),
    and from the end of the last GEMM to the next replay (end).
    """
    paths = output or []
    check_files(paths, PAGE_SUFFIX, ".json")
    check_json(json)
    if wait_by == "kernel" and gemm_streams != 1:
        raise ValueError(
            f"--wait-by kernel takes --gemm-streams 1, got {gemm_streams}: no GEMM may run during a kernel that waits"
        )
    options: dict[str, Any] = {"sync": "barrier", "mechanism": mechanism, **parse_options(option)}
    if chunks is not None:
        if "chunks" in options:
            raise ValueError("chunks are given by --chunks or by --option chunks=, not by both")
        options["chunks"] = chunks
    # cuBLAS multiplies fp8 with scales only.
    scaling = SCALINGS["tensorwise"] if dtype in QUANTIZED_DTYPES else None
    problem = GemmProblem(m, n, k, dtype=dtype, scaling=scaling)
    if ranks is None and mesh is None:
        # Whatever no number of ranks could run is refused before GPUs are looked for.
        make_plan(problem, name, mesh=arrangement(name, 2, None), **options)
        import torch

        ranks = torch.cuda.device_count()
        if not ranks:
            raise ValueError("trace runs on GPUs, and torch finds none; distgemm simulate needs none")
    plan = make_plan(problem, name, mesh=arrangement(name, ranks, mesh), **options)
    predicted = simulate(plan, machine, gemm_streams=gemm_streams)

    from distgemm.measure.trace import Trace, record
    from distgemm.runtime.launch import launch

    recordings = launch(
        record, plan.world_size, plan, provider, config, gemm_streams, wait_by, backend="nccl", timeout=TIMEOUT_S
    )
    trace = Trace.of(plan, gemm_streams, recordings, predicted)
    if wants_text(json):
        _report(trace)
    write_json(json, trace.to_dict())
    for path in paths:
        write_file(path, lambda path: _write_trace(trace, path))


def _report(trace: Trace) -> None:
    """Print where the time goes."""
    plan, p = trace.plan, trace.plan.problem
    print_wrapped(f"{plan.schedule}: {plan.world_size} ranks, m {p.m} x n {p.n} x k {p.k}, {p.dtype}")
    error = 100 * (trace.predicted.time / trace.alone - 1)
    print_wrapped(
        f"{trace.alone:.1f} us per replay on the slowest rank, without the profiler; predicted "
        f"{trace.predicted.time:.1f} us ({error:+.0f} %)"
    )
    heads = ["rank, us", "total", "GEMMs", "copies", "both", "no GEMM: start", "middle", "end"]
    print_figures(heads, trace_lines(trace))
    for line in gaps_text(trace).splitlines():
        print_wrapped(line)


def trace_lines(trace: Trace) -> list[Line]:
    """Two rows for each rank: as measured, and as predicted."""
    return [
        Line(
            f"{rank} {'predicted' if predicted else 'measured'}",
            [f"{value:.1f}" for value in trace.figures(rank, predicted)],
        )
        for rank in range(trace.plan.world_size)
        for predicted in (False, True)
    ]


def gaps_text(trace: Trace) -> str:
    """Where something waits, and how well the clocks of the ranks agree."""
    lines = [f"{gap.us:6.1f} us on rank {gap.rank} {gap.text}" for gap in trace.gaps()]
    if trace.violation:
        shifts = ", ".join(f"{shift:.1f}" for shift in trace.shifts)
        clocks = f"clocks: a chunk was used {trace.violation:.1f} us before it arrived; set forward by {shifts} us"
    else:
        clocks = "clocks: no chunk is used before it arrives; nothing is shifted"
    return "\n".join([*lines, clocks])


def _write_trace(trace: Trace, path: str) -> None:
    if path.lower().endswith(".json"):
        from distgemm.viz.perfetto import save_trace

        save_trace(trace.to_perfetto(), path)
    elif path.lower().endswith(PAGE_SUFFIX):
        save_page([page_model(trace.plan, trace.tracks())], path)
    else:
        from distgemm.measure.trace_figure import draw_trace

        draw_trace(trace, path)
