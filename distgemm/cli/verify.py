"""``distgemm verify``: plans of schedules, proved."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from distgemm.cli.options import (
    JsonFile,
    MeshSides,
    PerTile,
    RanksPerHost,
    ScheduleOptions,
    cases_of,
    check_ranks_of_mesh,
    each_once,
    mesh_text,
    number,
    one_of,
)
from distgemm.cli.output import (
    Line,
    check_files,
    check_json,
    new_console,
    print_figures,
    say,
    wants_text,
    write_file,
    write_json,
)
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES, make_plan
from distgemm.plan.options import Mesh, parse_options
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import get_schedule
from distgemm.schedulers.registry import MAX_RANKS, BuilderError
from distgemm.viz.page import PAGE_SUFFIX, predicted_model, save_page

__all__ = ["verify_command"]


def _modes(option: str, known: tuple[str, ...], what: str) -> Any:
    """An option that takes one of several modes, or all of them."""
    return typer.Option(
        option, parser=one_of([*known, "all"]), metavar="NAME", help=f"{what}: {', '.join(known)}, or all."
    )


EXTENTS = (101, 77, 59)
PER_TILE_EXTENT = 8192


def _extent(option: str, metavar: str, what: str, mode: int) -> Any:
    """An option for an extent, whose default is another one with --per-tile."""
    help_text = f"{what}. [default: {EXTENTS[mode]}; with --per-tile {PER_TILE_EXTENT}]"
    return typer.Option(option, metavar=metavar, parser=number(1), help=help_text, show_default=False)


def verify_command(
    name: Annotated[str, typer.Argument(metavar="SCHEDULE", help="A schedule, or all.")] = "all",
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--ranks",
            metavar="N",
            parser=number(1, MAX_RANKS),
            help="Number of ranks; repeatable. [default: 1 to 8, each]",
        ),
    ] = None,
    mesh: MeshSides = None,
    option: ScheduleOptions = None,
    m: Annotated[int | None, _extent("--m", "M", "Rows of A and D", 0)] = None,
    n: Annotated[int | None, _extent("--n", "N", "Rows of B, columns of D", 1)] = None,
    k: Annotated[int | None, _extent("--k", "K", "Columns of A and B", 2)] = None,
    workspace: Annotated[str, _modes("--workspace", WORKSPACES, "Slots of the plan")] = "all",
    sync: Annotated[str, _modes("--sync", SYNCS, "How replays are kept apart")] = "all",
    mechanism: Annotated[str, _modes("--mechanism", MECHANISMS, "How data moves")] = "all",
    ranks_per_host: RanksPerHost = None,
    per_tile: PerTile = None,
    json: JsonFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write a .html, a page of the first plan that fails; it opens at the op that is wrong.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Prove plans of one schedule or of all.

    A proof shows that every tile is right, without race or deadlock, in one replay and from each replay to the
    next. With --ranks-per-host, it also shows that no message across hosts is waited for forever; what moves is
    pushed. Exit status 1 when a plan fails, or cannot be built. A schedule that cannot take a number of ranks, a mesh
    or an option is skipped, with the reason. It is an error if all schedules are skipped.

    With --per-tile, it proves executions by that kernel instead of plans: each rank multiplies each tile once, each
    slot has one writer, and no tile waits for a later one of any rank. Other schedules are skipped.
    """
    from rich.progress import Progress

    check_json(json)
    if output is not None:
        check_files([output], PAGE_SUFFIX, pictures=False)
    for size in ranks or []:
        check_ranks_of_mesh(size, mesh)
    cases = cases_of(name, sorted(each_once(ranks, list(range(1, 9)))), mesh)
    usual = EXTENTS if per_tile is None else (PER_TILE_EXTENT,) * 3
    problem, options = GemmProblem(m or usual[0], n or usual[1], k or usual[2]), parse_options(option)
    if per_tile is not None:
        if output is not None:
            raise ValueError("-o draws plans, and --per-tile proves none")
        if {workspace, sync, mechanism} != {"all"} or ranks_per_host is not None:
            raise ValueError(
                "--workspace, --sync, --mechanism and --ranks-per-host are about plans, and --per-tile proves none"
            )
        _verify_per_tile(per_tile, cases, options, problem, json)
        return
    mechanisms = MECHANISMS if ranks_per_host is None else ("push",)
    values = {"workspace": (workspace, WORKSPACES), "sync": (sync, SYNCS), "mechanism": (mechanism, mechanisms)}
    each = [[(mode, one) for one in (known if value == "all" else (value,))] for mode, (value, known) in values.items()]
    modes: list[dict[str, Any]] = [dict(mode) for mode in product(*each)]
    failed: Plan | None = None  # the first one
    rows: list[Line] = []
    found: list[dict[str, Any]] = []
    counts = {"proved": 0, "failed": 0, "skipped": 0}
    reason = ""
    errors = new_console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, on in progress.track(cases, description="verify"):
            start = time.perf_counter()
            ops = 0
            result, detail = "proved", ""
            for mode in modes:
                try:
                    built = get_schedule(schedule, mesh=on, **options)
                    if ranks_per_host is not None and built.world_size % ranks_per_host:
                        raise ValueError(f"--ranks-per-host {ranks_per_host} does not divide {built.world_size} ranks")
                except ValueError as error:
                    result = "failed" if isinstance(error, BuilderError) else "skipped"
                    detail = reason = " ".join(str(error).split())
                    break
                plan = None
                try:
                    plan = make_plan(problem, built, ranks_per_host=ranks_per_host, **mode)
                    ops += sum(size.ops for size in plan.sizes)
                    plan.verify()
                except (ValueError, PlanError) as error:
                    with_mode = ", ".join(f"{key} {value}" for key, value in mode.items())
                    result, detail = "failed", f"{with_mode}: {error}"
                    failed = failed or plan
                    break
            if result == "failed":
                say(f"{schedule} on {mesh_text(on)}: {detail}")
            counts[result] += 1
            ms = 1e3 * (time.perf_counter() - start)
            facts = ["-", "-", "-"] if result == "skipped" else [str(len(modes)), str(ops), f"{ms:.0f}"]
            rows.append(Line(schedule, [mesh_text(on), *facts, result], below=[detail] if result == "skipped" else []))
            found.append({"schedule": schedule, "mesh": on, "result": result, "reason": detail})
    if counts["skipped"] == len(cases):
        raise ValueError(reason)
    if wants_text(json):
        print_figures(["schedule", "mesh", "plans", "ops", "ms", "result"], rows)
        typer.echo(", ".join(f"{count} {result}" for result, count in counts.items()))
    write_json(json, found)
    if output is not None and failed is not None:
        write_file(output, partial(save_page, [predicted_model(failed)]))
    if counts["failed"]:
        raise typer.Exit(1)


def _verify_per_tile(
    kernel: str, cases: list[tuple[str, Mesh]], options: dict[str, Any], problem: GemmProblem, json: Path | None
) -> None:
    from distgemm.gemm.per_tile.select import configs_of, gemm_of
    from distgemm.gemm.per_tile.verify import prove

    rows: list[Line] = []
    found: list[dict[str, Any]] = []
    counts = {"proved": 0, "failed": 0, "skipped": 0}
    plans: list[tuple[str, Mesh, str, Plan | Exception]] = []
    for schedule, on in cases:
        try:
            made = make_plan(problem, get_schedule(schedule, mesh=on, **options))
        except (ValueError, PlanError) as error:
            plans.append((schedule, on, kernel, error))
        else:
            plans += [(schedule, on, name, made) for name in (configs_of(made) if kernel == "all" else [kernel])]
    for schedule, on, name, plan in plans:
        start = time.perf_counter()
        facts, result, reason = ["-", "-", "-"], "skipped", ""
        try:
            if isinstance(plan, Exception):
                raise plan
            gemm = gemm_of(plan, name)
        except (ValueError, PlanError) as error:
            reason = " ".join(str(error).split())
        else:
            try:
                facts, result = list(map(str, prove(gemm))), "proved"
            except PlanError as error:
                result, reason = "failed", str(error)
                say(f"{schedule} on {mesh_text(on)}, {name}: {reason}")
        counts[result] += 1
        ms = "-" if result == "skipped" else f"{1e3 * (time.perf_counter() - start):.0f}"
        below = [reason] if result == "skipped" else []
        rows.append(Line(f"{schedule}, {name}", [mesh_text(on), *facts, ms, result], below=below))
        found.append({"schedule": schedule, "mesh": on, "kernel": name, "result": result, "reason": reason})
    if counts["skipped"] == len(rows):
        raise ValueError(found[-1]["reason"])
    if wants_text(json):
        print_figures(["schedule, kernel", "mesh", "tiles", "slots", "waits", "ms", "result"], rows)
        typer.echo(", ".join(f"{count} {result}" for result, count in counts.items()))
    write_json(json, found)
    if counts["failed"]:
        raise typer.Exit(1)
