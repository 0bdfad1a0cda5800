"""The ``distgemm`` command: schedules listed and drawn, plans printed and proved. Needs no GPU."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from distgemm import GemmProblem, PlanError, get_schedule, list_schedules, make_plan
from distgemm.derive import SYNCS, WORKSPACES
from distgemm.schedulers import list_families, schedule_aliases, schedule_doc, schedule_mesh_rank, schedule_options
from distgemm.show import LIMIT, show_plan, show_schedule

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]

Mesh = tuple[int, ...]

FILE_WIDTH = 120
"""Width of tables that go to a file or a pipe."""


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
    help="Tensor-parallel GEMMs: schedules, plans and their proofs. Nothing here needs a GPU.",
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
    table.add_column("options", no_wrap=True)
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
) -> None:
    """Draw a schedule: who holds each tile, and who multiplies what when."""
    typer.echo(show_schedule(get_schedule(name, world_size, mesh=_mesh(mesh), **_options(option)), limit=limit))


@app.command("plan")
def plan_command(
    name: Name,
    world_size: WorldSize = None,
    mesh: MeshText = None,
    option: OptionTexts = None,
    m: Annotated[int | None, typer.Option(help="Rows of A and D. [default: 8192, or the sum of --m-per-rank]")] = None,
    n: Annotated[int, typer.Option(help="Rows of B, columns of D.")] = 57344,
    k: Annotated[int, typer.Option(help="Columns of A and B.")] = 8192,
    batches: Annotated[int, typer.Option("--l", help="Batches.")] = 1,
    dtype: Annotated[str, typer.Option(help="Element type of A and B.")] = "bfloat16",
    out_dtype: Annotated[str | None, typer.Option(help="Element type of C and D. [default: as dtype]")] = None,
    partial_dtype: Annotated[str | None, typer.Option(help="Type of partial sums. [default: as out-dtype]")] = None,
    m_per_rank: Annotated[
        str | None, typer.Option(help="Rows of each rank's shard, such as 3,0,5.", show_default=False)
    ] = None,
    workspace: Annotated[str, typer.Option(help=f"One of {', '.join(WORKSPACES)}.")] = WORKSPACES[0],
    sync: Annotated[str, typer.Option(help=f"One of {', '.join(SYNCS)}.")] = SYNCS[0],
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List the ops of all ranks.")] = False,
    rank: Annotated[int | None, typer.Option(help="List the ops of this rank alone.", show_default=False)] = None,
    limit: Limit = LIMIT,
) -> None:
    """Plan a product (a Llama-70B fc1 unless told otherwise) and print what every rank does."""
    rows = None if m_per_rank is None else tuple(_numbers("--m-per-rank", m_per_rank))
    if m is None:
        m = 8192 if rows is None else sum(rows)
    problem = GemmProblem(m, n, k, batches, dtype, out_dtype, partial_dtype, rows)
    options = _options(option)
    plan = make_plan(problem, name, world_size, mesh=_mesh(mesh), workspace=workspace, sync=sync, **options)
    typer.echo(plan.to_json() if json else show_plan(plan, ops=ops, rank=rank, limit=limit))


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
                    _say(f"{schedule} on {'x'.join(map(str, ranks))}, workspace {one}, sync {other}: {error}")
                    break
            counts[result] += 1
            took = f"{1e3 * (time.perf_counter() - start):.0f}"
            facts = ["-", "-", "-"] if result == "skipped" else [str(len(modes)), str(size), took]
            table.add_row(schedule, "x".join(map(str, ranks)), *facts, Text(result + detail))
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
