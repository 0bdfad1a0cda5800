"""The ``distgemm`` command: schedules listed and drawn, plans printed, proved and simulated, kernels built, GPUs
measured."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from json import dumps
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from distgemm import GemmProblem, Plan, PlanError, get_schedule, list_schedules, make_plan
from distgemm.cli.bench import BenchCommand, bench_command
from distgemm.cli.common import (
    check_files,
    new_console,
    new_table,
    say,
    write_file,
)
from distgemm.cli.kernels import build_command, tune_gemm_command
from distgemm.cli.trace import trace_command
from distgemm.cli.tune import tune_command
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES
from distgemm.plan.ops import Gemm, accesses, box_size, link_of
from distgemm.plan.options import Mesh, parse_mesh, parse_numbers, parse_options
from distgemm.schedulers import list_patterns, schedule_aliases, schedule_doc, schedule_mesh_rank, schedule_options
from distgemm.schedulers.registry import BuilderError
from distgemm.simulator import Timeline, predict_unfused, simulate
from distgemm.simulator.machine import Machine, list_machines
from distgemm.viz.text import LIMIT, show_plan, show_schedule

__all__ = ["app", "main"]

OPTIONS_WIDTH = 24
"""Width up to which options are listed in one line."""

PREDICTED = (
    "predictions of a model, not measurements (distgemm simulate --help): a few percent more or less mean nothing"
)

CHUNKS = (1, 2, 4)
"""Values of a schedule's option chunks that are tried unless told otherwise."""

ALIKE = 0.02
"""Where more chunks are faster by less than this share, they are not worth it."""

CLEARLY = 0.05
"""Share of the time that other chunks must save to be mentioned."""

QUICK = 10_000
"""Number of ops up to which other chunks are tried unasked: a second or two."""


class _Commands(TyperGroup):
    """A caller's mistake is one line on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            say(f"error: {' '.join(str(error).split())}")
            raise typer.Exit(2) from None


app = typer.Typer(
    name="distgemm",
    cls=_Commands,
    help="Tensor-parallel GEMMs: schedules, plans, their proofs and predictions, kernels, measurements. bench, trace, "
    "tune and tune-gemm need GPUs, the rest does not; demo uses them where there are some.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    app()


# --- reading arguments ----------------------------------------------------------------------------------


def _meshes(ranks: int, axes: int) -> list[Mesh]:
    """The squarest meshes of so many ranks, the longest side last and first."""
    if axes == 1:
        return [(ranks,)]

    def arrangements(rest: int, count: int) -> list[Mesh]:
        if count == 1:
            return [(rest,)]
        sides = [side for side in range(1, rest + 1) if rest % side == 0]
        return [(side, *tail) for side in sides for tail in arrangements(rest // side, count - 1)]

    best = min(arrangements(ranks, axes), key=lambda mesh: (max(mesh) - min(mesh), mesh))
    return list(dict.fromkeys([best, best[::-1]]))


Name = Annotated[str, typer.Argument(help="A schedule, an alias, or a pattern such as ag+gemm.", show_default=False)]
WorldSize = Annotated[int | None, typer.Option(help="Number of ranks.", show_default=False)]
MeshText = Annotated[
    str | None, typer.Option("--mesh", help="Arrangement of the ranks, such as 2x4.", show_default=False)
]
OptionTexts = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of the schedule, such as chunks=2; repeatable.", show_default=False),
]
Limit = Annotated[int, typer.Option(help="Rows and columns shown of each table.", min=1)]
M = Annotated[int | None, typer.Option(help="Rows of A and D. [default: 8192, or the sum of --m-per-rank]")]
N = Annotated[int, typer.Option(help="Rows of B, columns of D.")]
K = Annotated[int, typer.Option(help="Columns of A and B.")]
Batches = Annotated[int, typer.Option("--l", help="Batches.")]
Dtype = Annotated[str, typer.Option(help="Element type of A and B.")]
OutDtype = Annotated[str | None, typer.Option(help="Element type of C and D. [default: as dtype]")]
PartialDtype = Annotated[str | None, typer.Option(help="Type of partial sums. [default: as out-dtype]")]
RowsPerRank = Annotated[
    str | None, typer.Option("--m-per-rank", help="Rows of each rank's shard, such as 3,0,5.", show_default=False)
]
Workspace = Annotated[str, typer.Option(help=f"One of {', '.join(WORKSPACES)}.")]
Sync = Annotated[str, typer.Option(help=f"One of {', '.join(SYNCS)}.")]
Mechanism = Annotated[str, typer.Option(help=f"One of {', '.join(MECHANISMS)}.")]
Pictures = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", help="Also draw it into this .svg or .png file; repeatable.", show_default=False),
]


def _problem(
    m: int | None,
    n: int,
    k: int,
    batches: int,
    dtype: str,
    out_dtype: str | None,
    partial_dtype: str | None,
    m_per_rank: str | None,
) -> GemmProblem:
    rows = None if m_per_rank is None else tuple(parse_numbers("--m-per-rank", m_per_rank))
    if m is None:
        m = 8192 if rows is None else sum(rows)
    return GemmProblem(m, n, k, batches, dtype, out_dtype, partial_dtype, rows)


# --- commands -------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("distgemm")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"distgemm {number}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Import a .py file or a module that registers schedules of your own, for the command that follows; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    for given in imports or []:
        _import(given)


def _import(given: str) -> None:
    """Import what registers schedules: a file as Python would run it, but under another name; or a module."""
    path = Path(given)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ValueError(f"--import {given}: there is no such file")
    before = list_schedules()
    # What it imports lies beside it, or where the command was called.
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        if is_file:
            # Not the bare stem: that may be the name of another module.
            spec = spec_from_file_location(f"distgemm_import_{path.stem}", path.resolve())
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            import_module(given)
    except Exception as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path.resolve())]
        where = f"line {lines[-1]}: " if lines else ""
        raise ValueError(f"--import {given}: {where}{type(error).__name__}: {error}") from None
    if list_schedules() == before:
        raise ValueError(f"--import {given} registers no schedule: distgemm.register_schedule is to be called in it")


@app.command("list")
def list_command() -> None:
    """List the schedules."""
    from rich.text import Text

    patterns = {schedule: pattern for pattern, schedule in list_patterns().items()}
    table = new_table()
    table.add_column("schedule (and aliases)", no_wrap=True)
    table.add_column("default of", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    table.add_column("options", overflow="fold", max_width=OPTIONS_WIDTH)
    table.add_column("what it does", overflow="fold")
    for name in list_schedules():
        names = Text("\n".join([name, *(f"  {alias}" for alias in schedule_aliases(name))]))
        options = "\n".join(f"{key}={value}" for key, value in schedule_options(name).items())
        mesh = "x".join("PQS"[: schedule_mesh_rank(name)]) if schedule_mesh_rank(name) > 1 else "N"
        table.add_row(names, patterns.get(name, ""), mesh, Text(options), Text(schedule_doc(name)))
    new_console().print(table)


@app.command("show")
def show_command(
    name: Name,
    world_size: WorldSize = None,
    mesh: MeshText = None,
    option: OptionTexts = None,
    limit: Limit = LIMIT,
    output: Pictures = None,
) -> None:
    """Draw a schedule: who holds each tile, and who multiplies what when."""
    from distgemm.viz.figures import draw_schedule

    paths = output or []
    check_files("-o", paths)
    scheduler = get_schedule(name, world_size, mesh=parse_mesh(mesh), **parse_options(option))
    typer.echo(show_schedule(scheduler, limit=limit))
    for path in paths:
        write_file("-o", path, lambda path: draw_schedule(scheduler, path))


@app.command("plan")
def plan_command(
    name: Name,
    world_size: WorldSize = None,
    mesh: MeshText = None,
    option: OptionTexts = None,
    m: M = None,
    n: N = 57344,
    k: K = 8192,
    batches: Batches = 1,
    dtype: Dtype = "bfloat16",
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    m_per_rank: RowsPerRank = None,
    workspace: Workspace = WORKSPACES[0],
    sync: Sync = SYNCS[0],
    mechanism: Mechanism = MECHANISMS[0],
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List the ops of all ranks.")] = False,
    rank: Annotated[int | None, typer.Option(help="List the ops of this rank alone.", show_default=False)] = None,
    limit: Limit = LIMIT,
    output: Pictures = None,
) -> None:
    """Plan a product (a Llama-70B fc1 unless told otherwise) and print what every rank does."""
    from distgemm.viz.figures import draw_plan

    paths = output or []
    check_files("-o", paths)
    problem = _problem(m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank)
    options = parse_options(option)
    how: dict[str, Any] = {"workspace": workspace, "sync": sync, "mechanism": mechanism}
    plan = make_plan(problem, name, world_size, mesh=parse_mesh(mesh), **how, **options)
    typer.echo(plan.to_json() if json else show_plan(plan, ops=ops, rank=rank, limit=limit))
    for path in paths:
        write_file("-o", path, lambda path: draw_plan(plan, path))


# --- simulate -------------------------------------------------------------------------------------------


@app.command("simulate")
def simulate_command(
    name: Annotated[
        str, typer.Argument(help="A schedule, an alias, a pattern such as ag+gemm, or all.", show_default=False)
    ],
    world_size: WorldSize = None,
    mesh: MeshText = None,
    option: OptionTexts = None,
    m: M = None,
    n: N = 57344,
    k: K = 8192,
    batches: Batches = 1,
    dtype: Dtype = "bfloat16",
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    m_per_rank: RowsPerRank = None,
    workspace: Workspace = WORKSPACES[0],
    sync: Sync = SYNCS[0],
    mechanism: Mechanism = MECHANISMS[0],
    machine: Annotated[str, typer.Option(help=f"One of {', '.join(list_machines())}, or a .json file.")] = "h200",
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks that NVLink connects. [default: what the machine says]")
    ] = None,
    gemm_streams: Annotated[
        int | None, typer.Option(help="GEMMs of a rank in flight. [default: what the machine says]")
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            help="Values of the schedule's option chunks, such as 2 or 1,2,4: several are compared. "
            f"[default: {','.join(map(str, CHUNKS))} for all, else the schedule's own]",
            show_default=False,
        ),
    ] = None,
    every_chunks: Annotated[
        bool, typer.Option("--every-chunks", help="Try and show every value of chunks, where all shows the best.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="Also write the timeline: .svg or .png, a picture; .json, a trace for ui.perfetto.dev; repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Predict how long a plan takes on GPUs, and what bounds it; "all" compares the schedules.

    The product is a Llama-70B fc1 unless told otherwise. "all" groups the schedules by the shards with which each
    rank begins and ends: schedules in one group do the same job, and are ranked. Of each it shows the fewest chunks
    within 2 % of the best; more are tried as long as they are not slower.

    Times are predictions of a model, not measurements: GEMMs as waves of tiles on SMs, copies on engines and ports,
    latencies of signals. On 51 measured times of 4 and 8 H200s, which were known when its figures were set, it is off
    by 4 % on average and 13 % at most. Other numbers of ranks and several hosts are extrapolated.
    """
    paths = output or []
    check_files("-o", paths, ".json")
    problem = _problem(m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank)
    gpus = Machine.load(machine)
    if ranks_per_host is not None:
        gpus = dataclasses.replace(gpus, ranks_per_host=ranks_per_host)
    ranks, options = parse_mesh(mesh), parse_options(option)
    if chunks is not None and "chunks" in options:
        raise ValueError("chunks are given by --chunks or by --option chunks=, not by both")
    given = _chunks(chunks if chunks is not None else options.pop("chunks", None))
    several = name == "all" or len(given) > 1
    if several and paths:
        raise ValueError("-o draws the timeline of one plan, not of several")
    if every_chunks and not several:
        raise ValueError("--every-chunks goes with all; for one schedule, --chunks 1,2,4 shows each")

    how: dict[str, Any] = {"workspace": workspace, "sync": sync, "mechanism": mechanism}

    def predict(schedule: str, size: int | None, mesh: Mesh | None, chunks: int | None) -> Timeline:
        chosen = options if chunks is None else {**options, "chunks": chunks}
        plan = make_plan(problem, schedule, size, mesh=mesh, **how, **chosen)
        return simulate(plan, gpus, gemm_streams=gemm_streams)

    if several:
        if world_size is None and ranks is None:
            raise ValueError(f"simulate {name} needs a world_size or a mesh")
        cases = _cases(name, None if world_size is None else [str(world_size)], ranks)
        if name == "all":
            cases = [(schedule, mesh) for schedule, mesh in cases if schedule_mesh_rank(schedule) == len(mesh)]
        if not cases:
            raise ValueError(f"no schedule takes a mesh of {len(ranks or ())} axes, got {ranks}")
        every = every_chunks or name != "all"
        tries = [(schedule, mesh, _tries(schedule, given, name == "all")) for schedule, mesh in cases]
        _compare(tries, lambda schedule, mesh, chunks: predict(schedule, None, mesh, chunks), every, json)
        return
    chosen = given[0] if given else None
    timeline = predict(name, world_size, ranks, chosen)
    if json:
        typer.echo(dumps(timeline.to_dict()))
    else:
        hint = _other_chunks(timeline, name, chosen, lambda chunks: predict(name, world_size, ranks, chunks))
        typer.echo("\n".join([_about(problem), timeline.summary(), _unfused_line(timeline), *hint, PREDICTED]))
    for path in paths:
        write_file("-o", path, lambda path: _write_timeline(timeline, path))


def _chunks(given: Any) -> list[int]:
    """The values of chunks that are given; none where none are."""
    found = [] if given is None else sorted(set(parse_numbers("--chunks", str(given))))
    if found and found[0] < 1:
        raise ValueError(f"chunks is an integer >= 1, got {found[0]}")
    return found


def _tries(schedule: str, given: Sequence[int], optional: bool) -> Sequence[int | None]:
    """The values of chunks to try with a schedule; None, its plan as it is, where it has none and need not."""
    if optional and "chunks" not in schedule_options(schedule):
        return [None]
    return given or CHUNKS


def _fewest(times: Iterable[tuple[int | None, float]]) -> int:
    """The place of the best of several (chunks, time), chunks ascending: the fewest that are hardly slower."""
    found = [time for _, time in times]
    return next(at for at, time in enumerate(found) if time <= min(found) * (1 + ALIKE))


def _other_chunks(
    timeline: Timeline, name: str, given: int | None, predict: Callable[[int], Timeline]
) -> Sequence[str]:
    """A line that says which other chunks are predicted to be clearly better, if any are."""
    options = schedule_options(name)
    # Nothing is faster than the roof, to speak of.
    if "chunks" not in options or timeline.efficiency > 1 - CLEARLY:
        return []
    values = ",".join(map(str, CHUNKS))
    if sum(map(len, timeline.plan.rank_ops)) > QUICK:
        return [f"other chunks may be better: --chunks {values} compares them, which takes a while for so many ranks"]
    found: list[tuple[int, float]] = []
    for chunks in CHUNKS:
        if chunks != (options["chunks"] if given is None else given):
            try:
                found.append((chunks, predict(chunks).time))
            except ValueError:  # a schedule may refuse chunks that nobody asked for
                continue
    if not found:
        return []
    chunks, time = found[_fewest(found)]
    saved = 1 - time / timeline.time
    if saved <= CLEARLY:
        return []
    return [f"--chunks {chunks} is predicted to take {100 * saved:.0f} % less: {time:.1f} us"]


def _write_timeline(timeline: Timeline, path: str) -> None:
    if path.lower().endswith(".json"):
        timeline.save_perfetto(path)
        return
    from distgemm.viz.figures import draw_timeline

    draw_timeline(timeline, path)


def _about(p: GemmProblem) -> str:
    batches = f" x l {p.l}" if p.l > 1 else ""
    out = f", D {p.out_dtype}" if p.out_dtype != p.dtype else ""
    partial = f", partial sums {p.partial_dtype}" if p.partial_dtype != p.out_dtype else ""
    return f"m {p.m} x n {p.n} x k {p.k}{batches}, {p.dtype}{out}{partial}"


class _Row(NamedTuple):
    """A line of a comparison: a schedule with so many chunks, None where it knows none."""

    schedule: str
    chunks: int | None
    timeline: Timeline


def _compare(
    cases: Sequence[tuple[str, Mesh, Sequence[int | None]]],
    predict: Callable[[str, Mesh, int | None], Timeline],
    every: bool,
    json: bool,
) -> None:
    """A table of predictions: in groups that do the same job, the fastest first."""
    from rich.progress import Progress

    found: list[_Row] = []
    left_out: dict[str, None] = {}
    reason = ""
    errors = new_console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, mesh, tries in progress.track(cases, description="simulate"):
            rows: list[_Row] = []
            for chunks in tries:
                try:
                    rows.append(_Row(schedule, chunks, predict(schedule, mesh, chunks)))
                except ValueError as error:
                    reason = " ".join(str(error).split())
                    verdict = "failed" if isinstance(error, BuilderError) else "left out"
                    left_out[f"{verdict}: {schedule} on {_sides(mesh)}: {reason}"] = None
                    continue
                if not every and _enough([row.timeline for row in rows]):
                    break
            if rows and not every:
                rows = [rows[_fewest((row.chunks, row.timeline.time) for row in rows)]]
            found += rows
    if not found:
        raise ValueError(reason)
    jobs = _jobs(found)
    if json:
        typer.echo(dumps([_row_dict(job, row) for job, rows in jobs.items() for row in rows]))
    else:
        _print_jobs(jobs, every)
    for line in left_out:
        typer.echo(line, err=json)
    if not json:
        typer.echo(PREDICTED)


def _enough(tried: Sequence[Timeline]) -> bool:
    """Whether still more chunks are hopeless: they cannot gain what counts, or the last ones were slower."""
    *before, last = tried
    return last.efficiency >= 1 - ALIKE or (bool(before) and last.time > (1 + ALIKE) * before[-1].time)


def _jobs(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """The rows by job: what each rank holds before and after. Each job's rows with the fastest first."""
    jobs: dict[Any, list[_Row]] = {}
    for row in rows:
        jobs.setdefault(row.timeline.plan.shards, []).append(row)
    titled: dict[str, list[_Row]] = {}
    for same in jobs.values():
        # Symmetric schedules keep the order of their names.
        same.sort(key=lambda row: round(row.timeline.time, 1))
        a, b, d = (f"{operand} {_cut(same[0].timeline.plan, operand)}" for operand in "ABD")
        title = f"{a}, {b} -> {d}"
        while title in titled:
            title += ", dealt otherwise"
        titled[title] = same
    return titled


def _row_dict(job: str, row: _Row) -> dict[str, Any]:
    unfused = _unfused(row.timeline)
    return {
        **row.timeline.to_dict(),
        "mesh": row.timeline.plan.mesh,
        "chunks": row.chunks,
        "job": job,
        "unfused_us": None if unfused is None else unfused[1],
    }


def _print_jobs(jobs: dict[str, list[_Row]], every: bool) -> None:
    from rich.text import Text

    table = new_table()
    table.add_column("schedule", overflow="fold")
    for title in ("mesh", "chunks", "us", "of roof", "hidden"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for job, rows in jobs.items():
        lines: list[tuple[float, list[str]]] = []
        for row in rows:
            timeline = row.timeline
            facts = [
                row.schedule,
                _sides(timeline.plan.mesh),
                "-" if row.chunks is None else str(row.chunks),
                f"{timeline.time:.0f}" + "*" * _out_of_step(timeline),
                f"{100 * timeline.efficiency:.0f} %",
                f"{100 * timeline.hidden:.0f} %" if _moved(timeline.plan) else "-",
                timeline.bound,
            ]
            lines.append((timeline.time, facts))
        for unfused in dict.fromkeys(_unfused(row.timeline) for row in rows):
            if unfused is not None:
                lines.append((unfused[1], [f"({unfused[0]})", "", "", f"{unfused[1]:.0f}"]))
        table.add_section()
        table.add_row(Text(job, style="bold"))
        for _, facts in sorted(lines, key=lambda line: round(line[0], 1)):
            table.add_row(*facts)
    timelines = [row.timeline for rows in jobs.values() for row in rows]
    plan, gpus = timelines[0].plan, timelines[0].machine
    typer.echo(f"{_about(plan.problem)}: {plan.world_size} ranks on {gpus.name}")
    new_console().print(table)
    typer.echo(
        "A m/8: cut along m into 8 parts, one on each rank; whole: all of it on each rank. Rows below such a line"
    )
    typer.echo("do the same job, rows below different ones do not. (...): unfused, a library's collective and one GEMM")
    if not every:
        typer.echo(f"chunks: the fewest within {100 * ALIKE:.0f} % of the best; --every-chunks tries and shows all")
    if any(map(_out_of_step, timelines)):
        advice = "; try --sync barrier" if plan.sync != "barrier" else ""
        typer.echo(f"*: in a row of replays the ranks fall out of step and meet at the same ports{advice}")


def _sides(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


def _out_of_step(timeline: Timeline) -> bool:
    return timeline.time > 1.1 * timeline.cold  # as its summary says


def _cut(plan: Plan, operand: str) -> str:
    """How the ranks share an operand: "m/2 k/4", in parts along these modes; or "whole"."""
    p = plan.problem
    extents = {"l": p.l, "m": p.m, "n": p.n, "k": p.k}
    modes = {"A": "lmk", "B": "lnk", "D": "lmn"}[operand]
    boxes = [plan.box(operand, rank) for rank in range(plan.world_size)]
    shared = []
    for axis, mode in enumerate(modes):
        ranges = {box[axis] for box in boxes}
        if ranges != {(0, extents[mode])}:
            shared.append(f"{mode}/{sum(start < stop for start, stop in ranges)}")
    return " ".join(shared) or "whole"


def _moved(plan: Plan) -> str:
    """The operands of which anything crosses from rank to rank: "A", "AB", ..."""
    moves = ((op.operand, accesses(op)[1]) for ops in plan.rank_ops for op in ops if link_of(op) is not None)
    return "".join(sorted({operand for operand, view in moves if view is not None and box_size(view.box)}))


def _collective(plan: Plan) -> str | None:
    """The collective over all ranks that does the plan's job together with one GEMM on each: "ag a" (all-gather of
    A), "ag b", "rs", "ar"; None where there is none."""
    p, moved = plan.problem, _moved(plan)
    size = {"A": p.m * p.k * p.l, "B": p.n * p.k * p.l, "D": p.m * p.n * p.l}
    held = {operand: sum(box_size(plan.box(operand, rank)) for rank in range(plan.world_size)) for operand in "ABD"}
    if moved not in ("A", "B", "D"):
        return None
    for ops in plan.rank_ops:
        gemms = [op for op in ops if isinstance(op, Gemm)]
        boxes = {{"A": op.a, "B": op.b, "D": op.out}[moved].box for op in gemms}
        if gemms and sum(map(box_size, boxes)) != size[moved]:
            return None  # a rank that multiplies uses, or adds to, a part of it only
    if moved == "D":
        return {size["D"]: "rs", plan.world_size * size["D"]: "ar"}.get(held["D"])
    once = held[moved] == size[moved] and held["D"] == size["D"]
    return f"ag {moved.lower()}" if once else None


def _unfused(timeline: Timeline) -> tuple[str, float] | None:
    """The unfused program that does the same, and the us predicted for it; None where it is no single collective."""
    plan, machine = timeline.plan, timeline.machine
    p, kind = plan.problem, _collective(plan)
    if kind is None:
        return None
    if kind == "ag b":  # the transposed product gathers its A
        p = dataclasses.replace(p, m=p.n, n=p.m, m_per_rank=None)
    title, pattern = {
        "ag a": ("a library's all-gather of A, then one GEMM", "ag+gemm"),
        "ag b": ("a library's all-gather of B, then one GEMM", "ag+gemm"),
        "rs": ("one GEMM, then a library's reduce-scatter", "gemm+rs"),
        "ar": ("one GEMM, then a library's all-reduce", "gemm+ar"),
    }[kind]
    return title, predict_unfused(p, machine, pattern, plan.world_size)


def _unfused_line(timeline: Timeline) -> str:
    unfused = _unfused(timeline)
    if unfused is not None:
        return f"unfused {unfused[1]:.1f} us ({unfused[0]}): {unfused[1] / timeline.time:.2f} times as long"
    operands = list(_moved(timeline.plan))
    if not operands:
        return "no unfused program to compare with: nothing moves between ranks"
    *most, last = operands
    moved = f"{', '.join(most)} and {last} move" if most else f"{last} moves"
    return f"no unfused program to compare with: {moved}, and not by one collective over all ranks"


# --- verify, demo and doctor ----------------------------------------------------------------------------


@app.command("verify")
def verify_command(
    name: Annotated[str, typer.Argument(help="A schedule, or all.")] = "all",
    world_size: Annotated[
        list[str] | None, typer.Option(help="Numbers of ranks: 4, 1,2,4 or 1-8; repeatable. [default: 1-8]")
    ] = None,
    mesh: MeshText = None,
    option: OptionTexts = None,
    m: Annotated[int, typer.Option(help="Rows of A and D.")] = 101,
    n: Annotated[int, typer.Option(help="Rows of B, columns of D.")] = 77,
    k: Annotated[int, typer.Option(help="Columns of A and B.")] = 59,
    workspace: Annotated[str, typer.Option(help=f"One of {', '.join(WORKSPACES)}, all.")] = "all",
    sync: Annotated[str, typer.Option(help=f"One of {', '.join(SYNCS)}, all.")] = "all",
    mechanism: Annotated[str, typer.Option(help=f"One of {', '.join(MECHANISMS)}, all.")] = "all",
) -> None:
    """Prove plans: every tile right, no race, no deadlock, in one replay and from each replay to the next.

    Exit status 1 when a plan fails, or cannot be built. A schedule that cannot take a number of ranks, a mesh or an
    option is skipped, with the reason; where all are skipped, that is an error.
    """
    from rich.progress import Progress
    from rich.text import Text

    cases = _cases(name, world_size, parse_mesh(mesh))
    problem, options = GemmProblem(m, n, k), parse_options(option)
    choices = (
        ("workspace", workspace, WORKSPACES),
        ("sync", sync, SYNCS),
        ("mechanism", mechanism, MECHANISMS),
    )
    for choice, value, known in choices:
        if value not in (*known, "all"):
            raise ValueError(f"{choice} is one of {', '.join(known)}, all, got {value!r}")
    every = [[(choice, each) for each in (known if value == "all" else (value,))] for choice, value, known in choices]
    modes: list[dict[str, Any]] = [dict(mode) for mode in product(*every)]
    table = new_table()
    table.add_column("schedule", no_wrap=True)
    for title in ("mesh", "plans", "ops", "ms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    counts = {"proved": 0, "failed": 0, "skipped": 0}
    reason = ""
    errors = new_console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, ranks in progress.track(cases, description="verify"):
            start = time.perf_counter()
            size = 0
            result = "proved"
            detail = ""
            for mode in modes:
                try:
                    scheduler = get_schedule(schedule, mesh=ranks, **options)
                    plan = make_plan(problem, scheduler, **mode)
                except ValueError as error:
                    result, reason = "skipped", " ".join(str(error).split())
                    detail = f": {reason}"
                    if isinstance(error, BuilderError):
                        result = "failed"
                        say(f"{schedule} on {_sides(ranks)}: {reason}")
                    break
                size += sum(map(len, plan.rank_ops))
                try:
                    plan.verify()
                except PlanError as error:
                    how = ", ".join(f"{choice} {value}" for choice, value in mode.items())
                    result, detail = "failed", f" ({how}): {error}"
                    say(f"{schedule} on {_sides(ranks)}, {how}: {error}")
                    break
            counts[result] += 1
            took = f"{1e3 * (time.perf_counter() - start):.0f}"
            facts = ["-", "-", "-"] if result == "skipped" else [str(len(modes)), str(size), took]
            table.add_row(schedule, _sides(ranks), *facts, Text(result + detail))
    if counts["skipped"] == len(cases):
        raise ValueError(reason)
    new_console().print(table)
    typer.echo(", ".join(f"{count} {result}" for result, count in counts.items()))
    if counts["failed"]:
        raise typer.Exit(1)


def _cases(name: str, world_sizes: list[str] | None, mesh: Mesh | None) -> list[tuple[str, Mesh]]:
    """The schedules and meshes to verify."""
    names = list_schedules() if name == "all" else [name]
    schedule_options(names[0])  # an unknown name is refused here
    sizes = sorted({size for text in world_sizes or [] for size in parse_numbers("--world-size", text)})
    if any(size < 1 for size in sizes):
        raise ValueError(f"world_size is an integer >= 1, got {sizes[0]}")
    if mesh is not None:
        if sizes not in ([], [prod(mesh)]):
            given = ", ".join(map(str, sizes))
            raise ValueError(f"mesh {mesh} has {prod(mesh)} ranks, world_size says {given}")
        return [(schedule, mesh) for schedule in names]
    sizes = sizes or list(range(1, 9))
    return [
        (schedule, ranks)
        for schedule in names
        for size in sizes
        for ranks in _meshes(size, schedule_mesh_rank(schedule))
    ]


@app.command("demo")
def demo_command(
    world_size: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    schedule_ag: Annotated[str, typer.Option(help="Schedule of the all-gather + GEMM.")] = "ag+gemm",
    schedule_rs: Annotated[str, typer.Option(help="Schedule of the GEMM + reduce-scatter.")] = "gemm+rs",
    tokens: Annotated[int, typer.Option(help="Tokens of the layers that are measured where there are GPUs.")] = 8192,
) -> None:
    """Run a tensor-parallel layer on several processes of this machine; with GPUs, also measure Llama 70B on them."""
    from distgemm.cli.demo import demo

    demo(world_size=world_size, schedule_ag=schedule_ag, schedule_rs=schedule_rs, tokens=tokens, console=new_console())


@app.command("doctor")
def doctor_command(
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with status 1 unless this runtime works: reference, collective or cuda; repeatable.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON and nothing else.")] = False,
) -> None:
    """Check what this machine has for each runtime, and say what to do about what it lacks."""
    from distgemm.cli.doctor import checks, look, runtimes, table, unsatisfied

    unsatisfied([], require or [])  # refuses unknown names before anything is looked at
    facts = look()
    found, works = checks(facts), runtimes(facts)
    if json:
        typer.echo(
            dumps({"checks": [each._asdict() for each in found], "runtimes": [each._asdict() for each in works]})
        )
    else:
        console = new_console()
        console.print(table("check", found))
        console.print()
        console.print(table("runtime", works))
    if lacking := unsatisfied(works, require or []):
        say(f"required, and does not work here: {', '.join(lacking)}")
        raise typer.Exit(1)


app.command("bench", cls=BenchCommand)(bench_command)
app.command("build")(build_command)
app.command("tune-gemm")(tune_gemm_command)
app.command("tune", cls=BenchCommand)(tune_command)
app.command("trace")(trace_command)
