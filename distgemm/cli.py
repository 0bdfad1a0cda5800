"""The ``distgemm`` command: schedules listed and drawn, plans printed, proved and simulated. Needs no GPU."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from json import dumps
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from distgemm import GemmProblem, Plan, PlanError, get_schedule, list_schedules, make_plan
from distgemm.derive import SYNCS, WORKSPACES
from distgemm.machine import Machine, list_machines
from distgemm.ops import Copy, Gemm, box_size
from distgemm.schedulers import list_families, schedule_aliases, schedule_doc, schedule_mesh_rank, schedule_options
from distgemm.show import LIMIT, show_plan, show_schedule
from distgemm.simulate import Timeline, predict_unfused, simulate

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]

Mesh = tuple[int, ...]

FILE_WIDTH = 120
"""Width of tables that go to a file or a pipe."""

OPTIONS_WIDTH = 24
"""Width up to which options are listed in one line."""

PREDICTED = "predictions of a model, not measurements (docs/simulator.md): a few percent more or less mean nothing"


class _Commands(TyperGroup):
    """A caller's mistake is one line on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            _say(f"error: {' '.join(str(error).split())}")
            raise typer.Exit(2) from None


app = typer.Typer(
    name="distgemm",
    cls=_Commands,
    help="Tensor-parallel GEMMs: schedules, plans, their proofs and predictions. Nothing here needs a GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    app()


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=stderr, width=FILE_WIDTH)


# --- reading arguments ----------------------------------------------------------------------------------


def _numbers(what: str, text: str) -> list[int]:
    """ "3,0,5" and "1-8" as numbers."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise ValueError(f"{what} is given as 4, 1,2,4 or 1-8, got {text!r}") from None
    if not found:
        raise ValueError(f"{what} {text!r} is empty")
    return found


def _mesh(text: str | None) -> Mesh | None:
    if text is None:
        return None
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"a mesh is given as 2x4, got {text!r}") from None


def _options(texts: list[str] | None) -> dict[str, Any]:
    """ "key=value" pairs; values that look like integers or truth values are."""
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"a schedule's option is given as chunks=2, got {text!r}")
        words = {"true": True, "false": False}
        digits = value.removeprefix("-").isdecimal()
        found[key] = int(value) if digits else words.get(value.lower(), value)
    return found


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


Name = Annotated[str, typer.Argument(help="A schedule, an alias, or a family such as ag+gemm.", show_default=False)]
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
    rows = None if m_per_rank is None else tuple(_numbers("--m-per-rank", m_per_rank))
    if m is None:
        m = 8192 if rows is None else sum(rows)
    return GemmProblem(m, n, k, batches, dtype, out_dtype, partial_dtype, rows)


# --- writing files --------------------------------------------------------------------------------------


def _outputs(paths: list[Path] | None, *others: str) -> list[Path]:
    """The files to write, refused before anything is computed if they cannot be."""
    from distgemm.draw import SUFFIXES

    found = paths or []
    suffixes = (*SUFFIXES, *others)
    for path in found:
        if path.suffix.lower() not in suffixes:
            known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
            raise ValueError(f"-o takes a {known} file, got {str(path)!r}")
        if not path.parent.is_dir():
            raise ValueError(f"-o {path}: there is no folder {path.parent}")
    if any(path.suffix.lower() in SUFFIXES for path in found) and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'distgemm[pictures]'")
    return found


def _write(path: Path, write: Callable[[str], None]) -> None:
    try:
        write(str(path))
    except OSError as error:
        raise ValueError(f"-o {path}: {error.strerror or error}") from None
    _say(f"wrote {path}")


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
) -> None:
    pass


@app.command("list")
def list_command() -> None:
    """List the schedules."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    families = {schedule: family for family, schedule in list_families().items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("schedule (and aliases)", no_wrap=True)
    table.add_column("default of", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    table.add_column("options", overflow="fold", max_width=OPTIONS_WIDTH)
    table.add_column("what it does", overflow="fold")
    for name in list_schedules():
        names = Text("\n".join([name, *(f"  {alias}" for alias in schedule_aliases(name))]))
        options = "\n".join(f"{key}={value}" for key, value in schedule_options(name).items())
        mesh = "x".join("PQS"[: schedule_mesh_rank(name)]) if schedule_mesh_rank(name) > 1 else "N"
        table.add_row(names, families.get(name, ""), mesh, Text(options), Text(schedule_doc(name)))
    _console().print(table)


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
    from distgemm.draw import draw_schedule

    paths = _outputs(output)
    scheduler = get_schedule(name, world_size, mesh=_mesh(mesh), **_options(option))
    typer.echo(show_schedule(scheduler, limit=limit))
    for path in paths:
        _write(path, lambda path: draw_schedule(scheduler, path))


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
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List the ops of all ranks.")] = False,
    rank: Annotated[int | None, typer.Option(help="List the ops of this rank alone.", show_default=False)] = None,
    limit: Limit = LIMIT,
    output: Pictures = None,
) -> None:
    """Plan a product (a Llama-70B fc1 unless told otherwise) and print what every rank does."""
    from distgemm.draw import draw_plan

    paths = _outputs(output)
    problem = _problem(m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank)
    options = _options(option)
    plan = make_plan(problem, name, world_size, mesh=_mesh(mesh), workspace=workspace, sync=sync, **options)
    typer.echo(plan.to_json() if json else show_plan(plan, ops=ops, rank=rank, limit=limit))
    for path in paths:
        _write(path, lambda path: draw_plan(plan, path))


# --- simulate -------------------------------------------------------------------------------------------


@app.command("simulate")
def simulate_command(
    name: Annotated[
        str, typer.Argument(help="A schedule, an alias, a family such as ag+gemm, or all.", show_default=False)
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
    machine: Annotated[str, typer.Option(help=f"One of {', '.join(list_machines())}, or a .json file.")] = "h200",
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks that NVLink connects. [default: what the machine says]")
    ] = None,
    branches: Annotated[
        int | None, typer.Option(help="GEMMs of a rank in flight. [default: what the machine says]")
    ] = None,
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

    A model's predictions, not measurements. The product is a Llama-70B fc1 unless told otherwise. All
    options have their defaults; with --option chunks=2 a reduce-scatter ring hides far more.
    """
    paths = _outputs(output, ".json")
    if name == "all" and paths:
        raise ValueError("-o draws the timeline of one schedule, not of all")
    problem = _problem(m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank)
    gpus = Machine.load(machine)
    if ranks_per_host is not None:
        gpus = dataclasses.replace(gpus, ranks_per_host=ranks_per_host)
    ranks, options = _mesh(mesh), _options(option)

    def predict(schedule: str, size: int | None, mesh: Mesh | None) -> Timeline:
        plan = make_plan(problem, schedule, size, mesh=mesh, workspace=workspace, sync=sync, **options)
        return simulate(plan, gpus, branches=branches)

    if name == "all":
        if world_size is None and ranks is None:
            raise ValueError("simulate all needs a world_size or a mesh")
        cases = _cases("all", None if world_size is None else [str(world_size)], ranks)
        cases = [(schedule, mesh) for schedule, mesh in cases if schedule_mesh_rank(schedule) == len(mesh)]
        if not cases:
            raise ValueError(f"no schedule takes a mesh of {len(ranks or ())} axes, got {ranks}")
        _compare(cases, lambda schedule, mesh: predict(schedule, None, mesh), json)
        return
    timeline = predict(name, world_size, ranks)
    if json:
        typer.echo(dumps(timeline.to_dict()))
    else:
        lines = [_about(problem), timeline.summary(), _unfused_line(timeline), PREDICTED]
        typer.echo("\n".join(lines))
    for path in paths:
        _write(path, lambda path: _write_timeline(timeline, path))


def _write_timeline(timeline: Timeline, path: str) -> None:
    if path.lower().endswith(".json"):
        timeline.save_perfetto(path)
        return
    from distgemm.draw import draw_timeline

    draw_timeline(timeline, path)


def _about(p: GemmProblem) -> str:
    batches = f" x l {p.l}" if p.l > 1 else ""
    out = f", D {p.out_dtype}" if p.out_dtype != p.dtype else ""
    partial = f", partial sums {p.partial_dtype}" if p.partial_dtype != p.out_dtype else ""
    return f"m {p.m} x n {p.n} x k {p.k}{batches}, {p.dtype}{out}{partial}"


def _compare(cases: Sequence[tuple[str, Mesh]], predict: Callable[[str, Mesh], Timeline], json: bool) -> None:
    """A table of predictions, the fastest first."""
    from rich import box
    from rich.progress import Progress
    from rich.table import Table

    found: list[tuple[str, Timeline]] = []
    left_out: list[str] = []
    reason = ""
    errors = _console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, mesh in progress.track(cases, description="simulate"):
            try:
                found.append((schedule, predict(schedule, mesh)))
            except ValueError as error:
                reason = " ".join(str(error).split())
                left_out.append(f"left out: {schedule} on {_sides(mesh)}: {reason}")
    if not found:
        raise ValueError(reason)
    found.sort(key=lambda row: round(row[1].time, 1))  # symmetric schedules keep the order of their names
    if json:
        typer.echo(dumps([{**timeline.to_dict(), "mesh": timeline.plan.mesh} for _, timeline in found]))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("schedule", overflow="fold")
        for title in ("mesh", "A B D", "us", "of roof", "hidden", "unfused"):
            table.add_column(title, justify="left" if title == "A B D" else "right", no_wrap=True)
        table.add_column("bound by", no_wrap=True)
        for schedule, timeline in found:
            unfused = _unfused(timeline)
            table.add_row(
                schedule,
                _sides(timeline.plan.mesh),
                " ".join(_sharded(timeline.plan, operand) for operand in "ABD"),
                f"{timeline.time:.0f}" + "*" * _out_of_step(timeline),
                f"{100 * timeline.efficiency:.0f} %",
                f"{100 * timeline.hidden:.0f} %" if _moved(timeline.plan) else "-",
                "-" if unfused is None else f"{unfused[1]:.0f}",
                timeline.bound,
            )
        plan, gpus = found[0][1].plan, found[0][1].machine
        typer.echo(f"{_about(plan.problem)}: {plan.world_size} ranks on {gpus.name}")
        _console().print(table)
        typer.echo("A B D: the modes along which the ranks share each, - where every rank holds the whole; schedules")
        typer.echo("that share them alike do the same job. unfused: us of a library's collective and one GEMM")
        if any(_out_of_step(timeline) for _, timeline in found):
            advice = "; try --sync barrier" if plan.sync != "barrier" else ""
            typer.echo(f"*: in a row of replays the ranks fall out of step and meet at the same ports{advice}")
    for line in left_out:
        typer.echo(line, err=json)
    if not json:
        typer.echo(PREDICTED)


def _sides(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


def _out_of_step(timeline: Timeline) -> bool:
    return timeline.time > 1.1 * timeline.cold  # as its summary says


def _sharded(plan: Plan, operand: str) -> str:
    """The modes along which the ranks share an operand: "mk", or "-"."""
    p = plan.problem
    extents = {"l": p.l, "m": p.m, "n": p.n, "k": p.k}
    modes = {"A": "lmk", "B": "lnk", "D": "lmn"}[operand]
    boxes = [plan.box(operand, rank) for rank in range(plan.world_size)]
    shared = [mode for axis, mode in enumerate(modes) if any(box[axis] != (0, extents[mode]) for box in boxes)]
    return "".join(shared) or "-"


def _moved(plan: Plan) -> str:
    """The operands of which anything crosses from rank to rank: "A", "AB", ..."""
    copies = (op for ops in plan.rank_ops for op in ops if isinstance(op, Copy))
    return "".join(sorted({op.operand for op in copies if op.src.rank != op.dst.rank and box_size(op.dst.box)}))


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
    title, family = {
        "ag a": ("a library's all-gather of A, then one GEMM", "ag+gemm"),
        "ag b": ("a library's all-gather of B, then one GEMM", "ag+gemm"),
        "rs": ("one GEMM, then a library's reduce-scatter", "gemm+rs"),
        "ar": ("one GEMM, then a library's all-reduce", "gemm+ar"),
    }[kind]
    return title, predict_unfused(p, machine, family, plan.world_size)


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


# --- verify and demo ------------------------------------------------------------------------------------


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
) -> None:
    """Prove plans: every tile right, no race, no deadlock, over two replays.

    Exit status 1 when a plan fails. A schedule that cannot take a world size is skipped, with the reason.
    """
    from rich import box
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    cases = _cases(name, world_size, _mesh(mesh))
    problem, options = GemmProblem(m, n, k), _options(option)
    modes = [
        (one, other)
        for one in (WORKSPACES if workspace == "all" else (workspace,))
        for other in (SYNCS if sync == "all" else (sync,))
    ]
    for choice, value, known in (("workspace", workspace, WORKSPACES), ("sync", sync, SYNCS)):
        if value not in (*known, "all"):
            raise ValueError(f"{choice} is one of {', '.join(known)}, all, got {value!r}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("schedule", no_wrap=True)
    for title in ("mesh", "plans", "ops", "ms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    counts = {"proved": 0, "failed": 0, "skipped": 0}
    reason = ""
    errors = _console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, ranks in progress.track(cases, description="verify"):
            start = time.perf_counter()
            size = 0
            result = "proved"
            detail = ""
            for one, other in modes:
                try:
                    scheduler = get_schedule(schedule, mesh=ranks, **options)
                    plan = make_plan(problem, scheduler, workspace=one, sync=other)
                except ValueError as error:
                    result, reason = "skipped", " ".join(str(error).split())
                    detail = f": {reason}"
                    break
                size += sum(map(len, plan.rank_ops))
                try:
                    plan.verify()
                except PlanError as error:
                    result, detail = "failed", f" (workspace {one}, sync {other}): {error}"
                    _say(f"{schedule} on {_sides(ranks)}, workspace {one}, sync {other}: {error}")
                    break
            counts[result] += 1
            took = f"{1e3 * (time.perf_counter() - start):.0f}"
            facts = ["-", "-", "-"] if result == "skipped" else [str(len(modes)), str(size), took]
            table.add_row(schedule, _sides(ranks), *facts, Text(result + detail))
    if counts["skipped"] == len(cases):
        raise ValueError(reason)
    _console().print(table)
    typer.echo(", ".join(f"{count} {result}" for result, count in counts.items()))
    if counts["failed"]:
        raise typer.Exit(1)


def _cases(name: str, world_sizes: list[str] | None, mesh: Mesh | None) -> list[tuple[str, Mesh]]:
    """The schedules and meshes to verify."""
    names = list_schedules() if name == "all" else [name]
    schedule_options(names[0])  # an unknown name is refused here
    sizes = sorted({size for text in world_sizes or [] for size in _numbers("--world-size", text)})
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
) -> None:
    """Run a tensor-parallel layer on several processes of this machine."""
    from distgemm.demo import demo

    demo(world_size=world_size, schedule_ag=schedule_ag, schedule_rs=schedule_rs, console=_console())
