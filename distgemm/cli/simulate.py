"""``distgemm simulate``: predicted times of one plan, or of all schedules that do the same job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from distgemm.cli.options import (
    Batches,
    BDtype,
    Dtype,
    JsonFile,
    K,
    KPerRank,
    M,
    MachineOption,
    Mechanism,
    MeshSides,
    MPerRank,
    N,
    NPerRank,
    OutDtype,
    PartialDtype,
    PerTile,
    Ranks,
    Scaling,
    ScheduleNameOrAll,
    ScheduleOptions,
    Sync,
    Timelines,
    Workspace,
    arrangement,
    cases_of,
    check_ranks_of_mesh,
    check_shares,
    gemm_problem,
    mesh_text,
    number,
    ranks_per_host_option,
)
from distgemm.cli.output import (
    Line,
    check_files,
    check_json,
    new_console,
    print_figures,
    print_wrapped,
    wants_text,
    write_file,
    write_json,
)
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES, make_plan
from distgemm.plan.ops import Gemm, accesses, box_size, link_of
from distgemm.plan.options import Mesh, parse_options
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.plan.scaling import scaling_name
from distgemm.schedulers import Pattern, get_schedule, schedule_mesh_rank, schedule_options
from distgemm.schedulers.registry import MAX_CHUNKS, BuilderError
from distgemm.simulator import MAX_STREAMS, Machine, Timeline, predict_unfused, simulate
from distgemm.viz.explorer import predicted_track
from distgemm.viz.page import PAGE_SUFFIX, page_model, save_page

__all__ = ["CHUNKS", "fewest_chunks", "moved_operands", "simulate_command", "unfused_program"]

PREDICTED = (
    "predictions of a model, not measurements (distgemm simulate --help): a few percent more or less mean nothing"
)

CHUNKS = (1, 2, 4)
"""Values of a schedule's option chunks that are tried by default."""

TIE_TOLERANCE = 0.02
"""Share of the time within which two numbers of chunks count as equal; the smaller number is taken then."""

MIN_SAVING = 0.05
"""Share of the time that another number of chunks must save to be recommended."""

MAX_OPS_OF_HINT = 10_000
"""Number of ops up to which other numbers of chunks are tried unasked. They take a second or two."""

OUT_OF_STEP = 1.1
"""Time of a replay in a row of replays, over that of a single one, from which the ranks count as out of step."""


def simulate_command(
    name: ScheduleNameOrAll,
    ranks: Ranks = None,
    mesh: MeshSides = None,
    option: ScheduleOptions = None,
    m: M = None,
    n: N = 57344,
    k: K = 8192,
    batches: Batches = 1,
    dtype: Dtype = "bfloat16",
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    b_dtype: BDtype = None,
    scaling: Scaling = None,
    m_per_rank: MPerRank = None,
    n_per_rank: NPerRank = None,
    k_per_rank: KPerRank = None,
    workspace: Workspace = WORKSPACES[0],
    sync: Sync = SYNCS[0],
    mechanism: Mechanism = MECHANISMS[0],
    machine: MachineOption = "h200",  # type: ignore[assignment]
    ranks_per_host: Annotated[
        int | None,
        ranks_per_host_option("Ranks that NVLink connects. [default: the machine's]"),
    ] = None,
    gemm_streams: Annotated[
        int | None,
        typer.Option(
            "--gemm-streams",
            metavar="N",
            parser=number(1, MAX_STREAMS),
            help="GEMMs of a rank in flight. [default: the machine's]",
        ),
    ] = None,
    chunks: Annotated[
        list[int] | None,
        typer.Option(
            "--chunks",
            metavar="N",
            parser=number(1, MAX_CHUNKS),
            help="The schedule's option chunks; repeatable: several values are compared. "
            f"[default: {', '.join(map(str, CHUNKS))} for all, else the schedule's own]",
            show_default=False,
        ),
    ] = None,
    every_chunks: Annotated[
        bool, typer.Option("--every-chunks", help="With all: try and show every value of --chunks, not only the best.")
    ] = False,
    per_tile: PerTile = None,
    json: JsonFile = None,
    output: Timelines = None,
) -> None:
    """Predict the time of a plan, or of all schedules.

    It also says what bounds the time. The GEMM is the layer fc1 of Llama 70B by default. "all" groups the
    schedules by the shards with which each rank begins and ends: schedules in one group do the same job, and are
    ranked. It shows the fewest chunks of each schedule that are within 2 % of the best; it tries more chunks as
    long as they are not slower.

    Times are predictions of a model, not measurements: GEMMs as waves of tiles on SMs, copies on engines and ports,
    latencies of signals. Compared with 51 measured times of 4 and 8 H200s, the model is off by 4 % on average and
    13 % at most; its figures were set with these times known. Other numbers of ranks and several hosts are
    extrapolated.

    With --per-tile, it predicts the time of that kernel instead, or of each (all). Compared with 42 measured times of
    two H100s, that model is off by 4 % on average and 17 % at most; 4 and 8 GPUs and the H200 are extrapolated.
    """
    paths = output or []
    check_files(paths, PAGE_SUFFIX, ".json")
    check_json(json)
    problem = gemm_problem(
        m, n, k, batches, dtype, out_dtype, partial_dtype, m_per_rank, n_per_rank, k_per_rank, b_dtype, scaling
    )
    if ranks_per_host is not None:
        machine = dataclasses.replace(machine, ranks_per_host=ranks_per_host)
    options = parse_options(option)
    if per_tile is not None:
        if paths:
            raise ValueError("-o draws the timeline of a plan, and --per-tile predicts a kernel")
        if name == "all":
            raise ValueError("--per-tile predicts kernels of one schedule, got all; --per-tile all tries every kernel")
        of_plans = (workspace, sync, mechanism) != (WORKSPACES[0], SYNCS[0], MECHANISMS[0])
        if of_plans or chunks or every_chunks or gemm_streams is not None or ranks_per_host is not None:
            raise ValueError(
                "--chunks, --every-chunks, --gemm-streams, --ranks-per-host, --workspace, --sync and --mechanism are "
                "about plans, and --per-tile predicts a kernel"
            )
        _simulate_per_tile(name, arrangement(name, ranks, mesh), options, problem, per_tile, machine, json)
        return
    given = _chunks(chunks, options)
    several = name == "all" or len(given) > 1
    if several and paths:
        raise ValueError("-o draws the timeline of one plan, not of several")
    if every_chunks and not several:
        raise ValueError("--every-chunks goes with all; for one schedule, --chunks 1 --chunks 2 shows both")
    modes: dict[str, Any] = {"workspace": workspace, "sync": sync, "mechanism": mechanism}

    def predict(schedule: str, on: Mesh, chunks: int | None) -> Timeline:
        chosen = options if chunks is None else {**options, "chunks": chunks}
        check_shares(problem, on)
        plan = make_plan(problem, schedule, mesh=on, **{**modes, **chosen})
        return simulate(plan, machine, gemm_streams=gemm_streams)

    if several:
        cases = _compared(name, ranks, mesh)
        every = every_chunks or name != "all"
        tries = [(schedule, on, _tries(schedule, given, name == "all")) for schedule, on in cases]
        rows, left_out = _predictions(tries, predict, every)
        jobs = _jobs(rows)
        if wants_text(json):
            _print_jobs(jobs, every)
        for line in left_out:
            print_wrapped(line, err=not wants_text(json))
        if wants_text(json):
            print_wrapped(PREDICTED)
        write_json(json, [_row_dict(job, row) for job, same in jobs.items() for row in same])
        return
    on = arrangement(name, ranks, mesh)
    chosen = given[0] if given else None
    timeline = predict(name, on, chosen)
    if wants_text(json):
        lines = [_about(problem), *timeline.summary().splitlines(), _unfused_line(timeline)]
        for line in [
            *lines,
            *_other_chunks(timeline, name, chosen, lambda chunks: predict(name, on, chunks)),
            PREDICTED,
        ]:
            print_wrapped(line)
    write_json(json, timeline.to_dict())
    for path in paths:
        write_file(path, lambda path: _write_timeline(timeline, path))


# --- per-tile kernels -----------------------------------------------------------------------------------


def _simulate_per_tile(
    schedule: str,
    on: Mesh,
    options: dict[str, Any],
    problem: GemmProblem,
    kernel: str,
    machine: Machine,
    json: Path | None,
) -> None:
    from distgemm.gemm.per_tile.model import Costs, predict_per_tile
    from distgemm.gemm.per_tile.select import configs_of, gemm_of

    plan = make_plan(problem, get_schedule(schedule, mesh=on, **options))
    found = []
    for name in configs_of(plan) if kernel == "all" else [kernel]:
        found.append((name, predict_per_tile(gemm_of(plan, name), Costs(machine))))
    found.sort(key=lambda pair: pair[1].time)
    if wants_text(json):
        print_wrapped(f"{_about(problem)}: {plan.world_size} ranks on {machine.name}")
        rows = [Line(name, [*(f"{us:.1f}" for us in times), times.bound]) for name, times in found]
        print_figures(["kernel", "us", "tiles alone", "link alone", "bound by"], rows)
        print_wrapped(PREDICTED)
    write_json(json, [{"kernel": name, **times._asdict(), "bound": times.bound} for name, times in found])


# --- chunks ---------------------------------------------------------------------------------------------


def _chunks(given: list[int] | None, options: dict[str, Any]) -> list[int]:
    """The numbers of chunks that --chunks or --option gives; none if neither does. Takes them out of the options."""
    if given and "chunks" in options:
        raise ValueError("chunks are given by --chunks or by --option chunks=, not by both")
    if "chunks" not in options:
        return sorted(set(given or []))
    value = options.pop("chunks")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"--option chunks= takes a number of at least 1, got {value!r}")
    return [value]


def _tries(schedule: str, given: Sequence[int], optional: bool) -> Sequence[int | None]:
    """The numbers of chunks to try; None, the plan as it is, if the schedule has no such option and need not."""
    if optional and "chunks" not in schedule_options(schedule):
        return [None]
    return given or CHUNKS


def fewest_chunks(times: Iterable[tuple[int | None, float]]) -> int:
    """The place of the fewest chunks that are as fast as the best within ``TIE_TOLERANCE``.

    Args:
        times: pairs of chunks and time, chunks ascending.
    """
    found = [time for _, time in times]
    return next(at for at, time in enumerate(found) if time <= min(found) * (1 + TIE_TOLERANCE))


def _other_chunks(timeline: Timeline, name: str, given: int | None, predict: Callable[[int], Timeline]) -> list[str]:
    """A line that recommends another number of chunks, if one saves ``MIN_SAVING``."""
    options = schedule_options(name)
    if "chunks" not in options or timeline.efficiency > 1 - MIN_SAVING:  # no plan is faster than the roof
        return []
    if sum(map(len, timeline.plan.rank_ops)) > MAX_OPS_OF_HINT:
        values = " ".join(f"--chunks {chunks}" for chunks in CHUNKS)
        return [f"other chunks may be better: {values} compares them, which takes a while for so many ranks"]
    found: list[tuple[int, float]] = []
    for chunks in CHUNKS:
        if chunks != (options["chunks"] if given is None else given):
            try:
                found.append((chunks, predict(chunks).time))
            except (ValueError, PlanError):  # a schedule may refuse a number of chunks that the caller did not ask for
                continue
    if not found:
        return []
    chunks, time = found[fewest_chunks(found)]
    saved = 1 - time / timeline.time
    if saved <= MIN_SAVING:
        return []
    return [f"--chunks {chunks} is predicted to take {100 * saved:.0f} % less: {time:.1f} us"]


# --- all schedules --------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A prediction of a comparison; chunks are None if the schedule has no such option."""

    schedule: str
    chunks: int | None
    timeline: Timeline


def _compared(name: str, ranks: int | None, sides: Mesh | None) -> list[tuple[str, Mesh]]:
    """The schedules to compare, each with its mesh."""
    if name != "all":
        return [(name, arrangement(name, ranks, sides))]
    check_ranks_of_mesh(ranks, sides)
    if ranks is None and sides is None:
        raise ValueError("simulate all takes --ranks or --mesh, got neither")
    cases = cases_of(name, [] if ranks is None else [ranks], sides)
    cases = [(schedule, on) for schedule, on in cases if schedule_mesh_rank(schedule) == len(on)]
    if not cases and sides is not None:
        raise ValueError(f"no schedule takes a mesh of {len(sides)} axes, got --mesh {mesh_text(sides)}")
    return cases


def _predictions(
    cases: Sequence[tuple[str, Mesh, Sequence[int | None]]],
    predict: Callable[[str, Mesh, int | None], Timeline],
    every: bool,
) -> tuple[list[_Row], list[str]]:
    """The predictions of all cases, and why there are none of others.

    Args:
        cases: schedules, meshes, and the numbers of chunks to try.
        predict: predicts one of them.
        every: keep every number of chunks, not only the best.
    """
    from rich.progress import Progress

    found: list[_Row] = []
    left_out: dict[str, None] = {}
    reason = ""
    errors = new_console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for schedule, on, tries in progress.track(cases, description="simulate"):
            rows: list[_Row] = []
            for chunks in tries:
                try:
                    rows.append(_Row(schedule, chunks, predict(schedule, on, chunks)))
                except (ValueError, PlanError) as error:
                    reason = " ".join(str(error).split())
                    verdict = "failed" if isinstance(error, BuilderError | PlanError) else "left out"
                    left_out[f"{verdict}: {schedule} on {mesh_text(on)}: {reason}"] = None
                    continue
                if not every and _enough([row.timeline for row in rows]):
                    break
            if rows and not every:
                rows = [rows[fewest_chunks((row.chunks, row.timeline.time) for row in rows)]]
            found += rows
    if not found:
        raise ValueError(reason)
    return found, list(left_out)


def _enough(tried: Sequence[Timeline]) -> bool:
    """Whether more chunks are hopeless: the roof is reached, or the last ones were slower."""
    *before, last = tried
    return last.efficiency >= 1 - TIE_TOLERANCE or (bool(before) and last.time > (1 + TIE_TOLERANCE) * before[-1].time)


def _jobs(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """The rows by job, which is what each rank holds before and after. Each job's rows have the fastest first."""
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
            title += ", in another order"
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
    lines: list[Line | str] = []
    for job, rows in jobs.items():
        timed: list[tuple[float, Line]] = []
        for row in rows:
            timeline = row.timeline
            facts = [
                mesh_text(timeline.plan.mesh),
                "-" if row.chunks is None else str(row.chunks),
                f"{timeline.time:.0f}" + "*" * _out_of_step(timeline),
                f"{100 * timeline.efficiency:.0f} %",
                f"{100 * timeline.hidden:.0f} %" if moved_operands(timeline.plan) else "-",
                timeline.bound,
            ]
            timed.append((timeline.time, Line(row.schedule, facts)))
        for unfused in dict.fromkeys(_unfused(row.timeline) for row in rows):
            if unfused is not None:
                timed.append((unfused[1], Line(f"({unfused[0]})", ["", "", f"{unfused[1]:.0f}"])))
        lines += [job, *(line for _, line in sorted(timed, key=lambda each: round(each[0], 1)))]
    timelines = [row.timeline for rows in jobs.values() for row in rows]
    plan, gpus = timelines[0].plan, timelines[0].machine
    print_wrapped(f"{_about(plan.problem)}: {plan.world_size} ranks on {gpus.name}")
    print_figures(["schedule", "mesh", "chunks", "us", "of roof", "hidden", "bound by"], lines)
    print_wrapped(
        "A m/8: cut along m into 8 parts, one on each rank; whole: all of it on each rank. Rows below such a line do "
        "the same job, rows below different lines do not. (...): unfused, a library's collective and one GEMM"
    )
    if not every:
        tolerance = f"{100 * TIE_TOLERANCE:.0f} %"
        print_wrapped(f"chunks: the fewest within {tolerance} of the best; --every-chunks tries and shows all")
    if any(map(_out_of_step, timelines)):
        advice = "; try --sync barrier" if plan.sync != "barrier" else ""
        print_wrapped(f"*: in a row of replays the ranks fall out of step and meet at the same ports{advice}")


def _out_of_step(timeline: Timeline) -> bool:
    return timeline.time > OUT_OF_STEP * timeline.cold


# --- what a plan does -----------------------------------------------------------------------------------


def _about(problem: GemmProblem) -> str:
    p = problem
    batches = f" x l {p.l}" if p.l > 1 else ""
    out = f", D {p.out_dtype}" if p.out_dtype != p.dtype else ""
    partial = f", partial sums {p.partial_dtype}" if p.partial_dtype != p.out_dtype else ""
    b = f" x {p.b_dtype}" if p.b_dtype else ""
    scaling = f", scales {scaling_name(p.scaling)}" if p.scaling else ""
    return f"m {p.m} x n {p.n} x k {p.k}{batches}, {p.dtype}{b}{out}{partial}{scaling}"


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


def moved_operands(plan: Plan) -> str:
    """The operands that move from rank to rank: "A", "AB", ... Scales move with their operand, and are left out."""
    every = (op for ops in plan.rank_ops for op in ops if op.operand in ("A", "B", "D"))
    moves = ((op.operand, accesses(op)[1]) for op in every if link_of(op) is not None)
    return "".join(sorted({operand for operand, view in moves if view is not None and box_size(view.box)}))


class UnfusedProgram(NamedTuple):
    """One collective over all ranks and one GEMM on each.

    Attributes:
        title: what it does, in a few words.
        pattern: what it does over the ranks.
        problem: the GEMM; its A is gathered.
    """

    title: str
    pattern: Pattern
    problem: GemmProblem


def unfused_program(plan: Plan) -> UnfusedProgram | None:
    """The unfused program that does the plan's job; None if no single collective over all ranks does it."""
    p, moved = plan.problem, moved_operands(plan)
    if moved not in ("A", "B", "D"):
        return None
    size = {"A": p.m * p.k * p.l, "B": p.n * p.k * p.l, "D": p.m * p.n * p.l}
    held = {operand: sum(box_size(plan.box(operand, rank)) for rank in range(plan.world_size)) for operand in "ABD"}
    for ops in plan.rank_ops:
        gemms = [op for op in ops if isinstance(op, Gemm)]
        boxes = {{"A": op.a, "B": op.b, "D": op.out}[moved].box for op in gemms}
        if gemms and sum(map(box_size, boxes)) != size[moved]:
            return None  # this rank uses only a part of the operand, or adds to a part
    if moved == "D":
        if held["D"] == size["D"]:
            return UnfusedProgram("one GEMM, then a library's reduce-scatter", "gemm+rs", p)
        if held["D"] == plan.world_size * size["D"]:
            return UnfusedProgram("one GEMM, then a library's all-reduce", "gemm+ar", p)
        return None
    if held[moved] != size[moved] or held["D"] != size["D"]:
        return None
    if moved == "B":  # the transposed GEMM gathers its A
        turned = p.scaling and dataclasses.replace(p.scaling, a=p.scaling.b, b=p.scaling.a)
        types = p.operand_dtype("B"), p.dtype
        p = dataclasses.replace(
            p, m=p.n, n=p.m, m_per_rank=None, n_per_rank=None, scaling=turned, dtype=types[0], b_dtype=types[1]
        )
    return UnfusedProgram(f"a library's all-gather of {moved}, then one GEMM", "ag+gemm", p)


def _unfused(timeline: Timeline) -> tuple[str, float] | None:
    """The unfused program that does the same job, and its predicted time, us."""
    program = unfused_program(timeline.plan)
    if program is None:
        return None
    time = predict_unfused(program.problem, timeline.machine, program.pattern, timeline.plan.world_size)
    return program.title, time


def _unfused_line(timeline: Timeline) -> str:
    unfused = _unfused(timeline)
    if unfused is not None:
        return f"unfused {unfused[1]:.1f} us ({unfused[0]}): {unfused[1] / timeline.time:.2f} times as long"
    operands = list(moved_operands(timeline.plan))
    if not operands:
        return "no unfused program to compare with: nothing moves between ranks"
    *most, last = operands
    moved = f"{', '.join(most)} and {last} move" if most else f"{last} moves"
    return f"no unfused program to compare with: {moved}, and not by one collective over all ranks"


def _write_timeline(timeline: Timeline, path: str) -> None:
    if path.lower().endswith(".json"):
        from distgemm.viz.perfetto import save_trace, timeline_trace

        save_trace(timeline_trace(timeline), path)
    elif path.lower().endswith(PAGE_SUFFIX):
        save_page([page_model(timeline.plan, [predicted_track(timeline)])], path)
    else:
        from distgemm.viz.figures import draw_timeline

        draw_timeline(timeline, path)
