"""``distgemm bench``: layers of models on several GPUs, by this library and by its peers."""

from __future__ import annotations

import math
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distgemm.arguments import shown
from distgemm.bench.cases import CANDIDATES, FEWER_CANDIDATES, LAYERS, cases, jobs
from distgemm.bench.report import (
    AUTO,
    OURS,
    PART,
    PEER,
    Row,
    best,
    failures,
    label,
    load,
    notes,
    of_executions,
    percent,
    wrong,
)
from distgemm.cli.options import (
    DEFAULT_M,
    JsonFile,
    Layers,
    Models,
    Patterns,
    Pictures,
    RanksOfLayers,
    TensorParallel,
    Tokens,
    benchmark_file,
    count_ranks,
    each_once,
    join_ranks,
    models_of,
    named,
    number,
)
from distgemm.cli.output import (
    Line,
    check_files,
    check_json,
    print_figures,
    print_wrapped,
    say,
    wants_text,
    write_file,
    write_json,
)

__all__ = ["bench_command"]


def bench_command(
    model: Models = None,
    layer: Layers = None,
    pattern: Patterns = None,
    m: Tokens = None,
    tp: TensorParallel = 8,
    ranks: RanksOfLayers = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            metavar="TEXT",
            help="Instead of the schedules that are tried by default: 'NAME chunks=2 provider=cublas'; repeatable.",
            show_default=False,
        ),
    ] = None,
    executions: Annotated[
        int | None,
        typer.Option(
            "--executions",
            metavar="N",
            parser=number(1),
            help="Instead of the schedules: of each execution (multi_kernel, per_tile) the N "
            "configurations that are predicted to be the fastest, and recorded ones.",
            show_default=False,
        ),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help='Also what schedule="auto" selects.')] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer methods and rounds: two minutes on 4 GPUs, without compilation.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="First measure tuned configurations that are not known. Takes long.")
    ] = False,
    build: Annotated[
        bool, typer.Option("--build", help="Compile all kernels of the schedules at once, and end. Needs no GPU.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that the file of --json has, and measure the others.")
    ] = False,
    timelines: Annotated[
        bool, typer.Option("--timelines", help="Put kernels and copies of rank 0 into the JSON.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", metavar="N", parser=number(1), help="Bursts of each method. [default: 11; 7 with --quick]"
        ),
    ] = None,
    burst_ms: Annotated[
        float,
        typer.Option("--burst-ms", metavar="MS", parser=number(0.1, kind=float), help="Length of a burst of calls."),
    ] = 4.0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", parser=number(1, kind=float), help="Time in which everything must end."
        ),
    ] = 3600.0,
    source: Annotated[Any, benchmark_file("Measure nothing: show what --json wrote.")] = None,
    json: JsonFile = None,
    output: Pictures = None,
) -> None:
    """Measure layers of models, and what peers take.

    It measures this library, NCCL, torch and others on several GPUs, and the parts that make the roofs. Every
    result is checked; a wrong one makes the exit status 1. The command starts its ranks, or joins those that
    torchrun has started. It writes the file of --json after each row. -o draws the efficiencies.
    """
    paths = output or []
    check_files(paths)
    check_json(json)
    if source is not None:
        _report(source, json, paths)
        return
    names = (models_of(model), each_once(layer, list(LAYERS)), each_once(pattern, ["ag+gemm", "gemm+rs"]))
    ms = each_once(m, [DEFAULT_M])
    candidates = each_once(schedule, []) or (FEWER_CANDIDATES if quick else CANDIDATES)
    # Arguments are refused before GPUs are looked for.
    if executions and schedule:
        raise ValueError("--executions selects the schedules: give it or --schedule")
    if resume and (json is None or not wants_text(json)):
        raise ValueError("--resume takes the file with the rows that are there: --json FILE")
    found = cases(*names, ms, ranks or tp, tp)
    for text in schedule or []:
        with named(f"--schedule {shown(text)}"):
            jobs(found, [text])
    jobs(found, candidates)
    advice = "; --from FILE shows what was measured elsewhere"
    size = (ranks or tp) if build else count_ranks("bench", ranks, tp, advice)
    todo = jobs(cases(*names, ms, size, tp), candidates)
    if executions:
        from distgemm.bench.executions import of_each_execution

        todo = [of_each_execution(case, executions) for case, _ in todo]
    if build:
        _build(todo)
        return
    before = load(json) if resume and json is not None and json.exists() else None
    if before is not None:
        known = {label(row) for row in before["rows"] if (row["ranks"], row["tp"]) == (size, tp)}
        if len(known) < len(before["rows"]):
            raise ValueError(f"--resume: {json} has rows of other ranks than {size} of --tp {tp}")
        todo = [job for job in todo if str(job.case) not in known]
        if not todo:
            _report(before, None, paths)
            if wrong(before):
                raise typer.Exit(1)
            return
    from distgemm.bench.run import Settings

    settings = Settings(
        rounds=rounds or (7 if quick else 11),
        burst_ms=burst_ms,
        auto=auto,
        peers=not quick,
        tune=tune,
        timelines=timelines,
        command=shlex.join(["distgemm", *sys.argv[1:]]),
        before=before,
    )
    if before is not None:
        for name in ("rounds", "burst_ms", "peers"):
            old, new = before.get(name), getattr(settings, name)
            if old != new:
                raise ValueError(
                    f"--resume: the rows of {json} have {name} {old}, and this run has {new}: give --rounds, "
                    "--burst-ms and --quick as before"
                )
    with tempfile.TemporaryDirectory(prefix="distgemm-") as folder:
        path = json if json is not None and wants_text(json) else Path(folder) / "bench.json"
        measure(todo, size, settings, path, timeout, json, paths)


def _build(todo: list[Any]) -> None:
    """Compile the kernels of jobs, several at a time."""
    from distgemm.bench.executions import kernels_of
    from distgemm.cli.build import arch_of_gpu, compiler_errors
    from distgemm.gemm.nvcc import build, missing
    from distgemm.gemm.select import gpu_name
    from distgemm.gemm.target import compiling_for

    arch = arch_of_gpu()
    with compiling_for(arch, gpu_name()), compiler_errors():
        sources = list(dict.fromkeys(kernels_of(todo)))
        absent = missing(sources)
        build(sources)
    typer.echo(f"sm_{arch}: {len(absent)} compiled, {len(sources) - len(absent)} there already")


def measure(
    todo: list[Any], size: int, settings: Any, path: Path, timeout: float, json: Path | None, pictures: list[Path]
) -> None:
    """Run the ranks, and report what they found, also if they fail. Exit status 1 for failures and wrong results.

    Args:
        todo: the jobs.
        size: number of ranks.
        settings: of the run.
        path: the file that rank 0 writes after each row.
        timeout: seconds.
        json, pictures: what --json and -o give.

    Raises:
        ValueError: if the ranks refuse to continue a file, whose rows were measured at another speed.
    """
    from distgemm.bench.run import run_rank
    from distgemm.runtime.launch import launch

    failed = ""
    before = _written(path)
    if "WORLD_SIZE" in os.environ:
        result, first = join_ranks(timeout, run_rank, todo, settings, path)
    else:
        first = True
        try:
            result = launch(run_rank, size, todo, settings, path, backend="nccl", timeout=timeout)[0]
        except RuntimeError as error:
            failed = str(error)
            if _written(path) == before:
                say(f"error: {failed}")
                raise typer.Exit(1) from None
            result = load(path)
    if "refused" in result:
        raise ValueError(result["refused"])
    if first:
        _report(result, None if json == path else json, pictures)
    if failed:
        say(f"error: {failed}")
    if failed or wrong(result):
        raise typer.Exit(1)


def _written(path: Path) -> int | None:
    """When a file was written; None if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


# --- the report -----------------------------------------------------------------------------------------


def _report(result: dict[str, Any], json: Path | None, pictures: Sequence[Path]) -> None:
    """Print all tables and the notes below them, and write the files."""
    if wants_text(json):
        facts = result["about"]
        print_wrapped(
            f"{facts['gpus']} x {facts['gpu']}, driver {facts.get('driver')}, CUDA {facts['cuda']}, torch "
            f"{facts['torch']}, NCCL {facts['nccl']}, NVLS {facts['nvls']}, CUTLASS {facts['cutlass']}; "
            f"{result['date']}"
        )
        typer.echo()
        for row in result["rows"]:
            print_row(row)
            typer.echo()
        print_summary(result["rows"])
        print_executions(result["rows"])
        typer.echo()
        for line in notes(result):
            print_wrapped(line)
    write_json(json, result)
    for line in wrong(result):
        say(f"WRONG: {line}")
    for path in pictures:
        write_file(path, lambda path: _draw(result, path))


def _draw(result: dict[str, Any], path: str) -> None:
    from distgemm.bench.figure import draw_benchmark

    draw_benchmark(result, path)


def print_executions(rows: Sequence[Row]) -> None:
    """Print each row's fastest method of each execution, if there are several."""
    found = [(row, of_executions(row)) for row in rows]
    names = list(dict.fromkeys(name for _, times in found for name in times))
    if len(names) < 2:
        return
    typer.echo()
    lines = [Line(label(row), [_ms(times.get(name)) for name in names]) for row, times in found]
    print_figures(["row", *names], lines, "ms of the fastest of each execution")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def print_row(row: Row) -> None:
    """Print the methods of a row with figures, the fastest first and those that failed last."""
    as_with = f", n and k of each rank as with {row['tp']}" if row["tp"] != row["ranks"] else ""
    title = f"{label(row)}: {row['m']} x {row['n']} x {row['k']} on {row['ranks']} ranks{as_with}"
    lines = []
    for each in sorted(row["methods"], key=lambda each: math.inf if each["ms"] is None else each["ms"]):
        below = [each["detail"]] if each["detail"] else []
        if each["ms"] is None:
            lines.append(Line(each["name"], ["WRONG" if each["wrong"] else "failed"], "red", below))
            continue
        figures = [
            _ms(each["ms"]),
            percent((each["max_ms"] - each["min_ms"]) / each["ms"]),
            "-" if each["tflops"] is None else f"{each['tflops']:.0f}",
            percent(each["efficiency"]),
            percent(each["pipeline_efficiency"]),
            percent(each["hidden"]),
            percent(each["relative"]),
        ]
        lines.append(Line(each["name"], figures, {OURS: "bold", PART: "dim"}.get(each["kind"], ""), below))
    heads = ["method", "ms", "spread", "TFLOP/s", "efficiency", "of pipeline", "hidden", "of NCCL"]
    print_figures(heads, lines, title)
    for text in failures(row):
        print_wrapped(text)


def print_summary(rows: Sequence[Row]) -> None:
    """Print each row's fastest method of distgemm and its fastest peer."""
    lines = []
    for row in rows:
        ours, peer = best(row, OURS), best(row, PEER)
        auto = next((each for each in row["methods"] if each["name"] == AUTO), None)
        figures = [
            _ms(ours["ms"] if ours else None),
            percent(ours["efficiency"] if ours else None),
            _ms(auto["ms"] if auto else None),
            _ms(peer["ms"] if peer else None),
            f"{peer['ms'] / ours['ms']:.2f}" if ours and peer else "-",
        ]
        names = f"{ours['name'] if ours else '-'}; peer: {peer['name'] if peer else '-'}"
        lines.append(Line(label(row), figures, below=[names]))
    heads = ["row; best methods", "ms", "efficiency", "auto", "peer ms", "peer / ours"]
    print_figures(heads, lines, "all rows")
