"""``distgemm bench``: layers of models over several GPUs, schedules of ours against what else there is."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from distgemm.cli.common import check_files, check_folder, count_ranks, new_console, write_file
from distgemm.measure.models import MODELS

if TYPE_CHECKING:
    from distgemm.bench.cases import Candidate

__all__ = ["BenchCommand", "bench_command"]

LISTS = ("--model", "--m", "--layers", "--ops")
"""Options that take several values, with blanks or commas between them."""

MODEL, TOKENS = "llama-3-70b", "8192"


class BenchCommand(TyperCommand):
    """Takes ``--m 128 512 2048``: there is nothing else on the line that the further values could be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found: list[str] = []
        for word in args:
            if found and not word.startswith("-") and len(found) > 1 and found[-2] in LISTS:
                found[-1] += f",{word}"
            else:
                found.append(word)
        return super().parse_args(ctx, found)


def _names(texts: Sequence[str] | None, default: str) -> list[str]:
    """Values given with blanks or commas between them, or as several options, each once."""
    return list(dict.fromkeys(name for text in texts or [default] for name in text.replace(",", " ").split()))


Several = "several with blanks or commas between them"


def bench_command(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; {Several}, or all. [default: {MODEL}]")
    ] = None,
    tp: Annotated[int, typer.Option(min=2, help="Ranks that share a layer.")] = 8,
    m: Annotated[list[str] | None, typer.Option(help=f"Tokens; {Several}. [default: {TOKENS}]")] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help=f"Of qkv, out, fc1 (gate and up), fc2; {Several}. [default: all]")
    ] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option(help=f"Of ag+gemm, gemm+rs, gemm+ar; {Several}. [default: ag+gemm,gemm+rs]"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Ranks to run. With fewer than --tp, n and k of each rank stay those of --tp ranks. [default: --tp, "
            "or as many as there are GPUs]",
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of the schedules that are tried by default: 'name chunks=2 provider=cublas'; repeatable.",
            show_default=False,
        ),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help='Also what schedule="auto" takes.')] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer methods and rounds: two minutes on 4 GPUs, kernels compiled.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure configurations and choices first that have not been. Takes long.")
    ] = False,
    timelines: Annotated[
        bool, typer.Option("--timelines", help="Put kernels and copies of rank 0 into the JSON.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="[default: 5; 3 with --quick]")] = None,
    burst_ms: Annotated[float, typer.Option(min=0.1, help="Length of a burst of calls.")] = 4.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for everything.")] = 3600.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to it, after each row.", show_default=False)
    ] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Draw efficiencies into this .svg or .png; repeatable.", show_default=False),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Measure nothing: show what --json wrote.", show_default=False),
    ] = None,
) -> None:
    """Measure layers of models on several GPUs, against NCCL, torch and others, and against roofs.

    Every result is checked, and a wrong one makes the exit status 1. Starts its ranks, or joins those that torchrun
    has started.
    """
    from distgemm.bench.report import load

    check_files("--plot", plot or [])
    if source is not None:
        _report(load(source), plot or [])
        return
    from distgemm.bench.cases import CANDIDATES, FEWER, LAYERS, jobs, parse_schedule

    models = list(MODELS) if model and "all" in _names(model, MODEL) else _names(model, MODEL)
    tried = _unique([parse_schedule(text) for text in schedule or []])
    chosen = (
        models,
        _names(layers, ",".join(LAYERS)),
        _names(ops, "ag+gemm,gemm+rs"),
        [_number(text) for text in _names(m, TOKENS)],
    )
    candidates = tried or (FEWER if quick else CANDIDATES)
    jobs(*chosen, ranks or tp, tp, candidates)  # arguments are refused before GPUs are looked for
    if json is not None:
        check_folder("--json", json)
    size = _ranks(ranks, tp)
    todo = jobs(*chosen, size, tp, candidates)
    from distgemm.bench.run import Settings

    settings = Settings(
        rounds=rounds or (3 if quick else 5),
        burst_ms=burst_ms,
        auto=auto,
        peers=not quick,
        tune=tune,
        timelines=timelines,
        command=shlex.join(["distgemm", *sys.argv[1:]]),
    )
    with tempfile.TemporaryDirectory(prefix="distgemm-") as folder:
        _measure(todo, size, settings, json or Path(folder) / "bench.json", timeout, plot or [])


def _unique(found: Sequence[Candidate]) -> list[Candidate]:
    return list({str(candidate): candidate for candidate in found}.values())


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--m takes numbers of tokens, got {text!r}")
    return int(text)


def _ranks(given: int | None, tp: int) -> int:
    """How many ranks there are to be. Raises ValueError where there are not as many GPUs."""
    size = count_ranks(
        "bench",
        given if "WORLD_SIZE" not in os.environ else 1,
        tp,
        "; --from FILE shows what was measured elsewhere",
    )
    if "WORLD_SIZE" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if given not in (None, size):
            raise ValueError(f"--ranks {given}, but torchrun has started {size}")
    return size


def _measure(todo: list[Any], size: int, settings: Any, path: Path, timeout: float, plots: list[Path]) -> None:
    """Run the ranks, and show what they found, also where they come to a bad end. Exit status 1 for wrong results."""
    from distgemm.bench.report import load, wrong
    from distgemm.bench.run import run_rank
    from distgemm.runtime.launch import init_from_env, launch

    failed = ""
    before = _written(path)
    if "WORLD_SIZE" in os.environ:
        import torch.distributed as dist

        first = init_from_env("nccl", timeout) == 0
        result = run_rank(todo, settings, path)
        dist.barrier()
        dist.destroy_process_group()
    else:
        first = True
        try:
            result = launch(run_rank, size, todo, settings, path, backend="nccl", timeout=timeout)[0]
        except RuntimeError as error:
            failed = str(error)
            if _written(path) == before:
                typer.echo(f"error: {failed}", err=True)
                raise typer.Exit(1) from None
            result = load(path)
    if first:
        _report(result, plots)
    if failed:
        typer.echo(f"error: {failed}", err=True)
    if failed or wrong(result):
        raise typer.Exit(1)


def _written(path: Path) -> int | None:
    """When a file was written; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


# --- showing --------------------------------------------------------------------------------------------


def _report(result: dict[str, Any], plots: Sequence[Path]) -> None:
    """All tables, what stands below them, and the pictures."""
    from distgemm.bench.report import draw, failures, notes, row_table, summary_table, wrong

    console = new_console()
    facts = result["about"]
    typer.echo(
        f"{facts['gpus']} x {facts['gpu']}, driver {facts.get('driver')}, CUDA {facts['cuda']}, torch "
        f"{facts['torch']}, NCCL {facts['nccl']}, NVLS {facts['nvls']}, CUTLASS {facts['cutlass']}; {result['date']}\n"
    )
    for row in result["rows"]:
        console.print(row_table(row))
        for line in failures(row):
            typer.echo(line)
        console.print()
    console.print(summary_table(result))
    console.print()
    for line in notes(result):
        typer.echo(line)
    for line in wrong(result):
        typer.echo(f"WRONG: {line}", err=True)
    for path in plots:
        write_file("--plot", path, _drawer(draw, result))


def _drawer(draw: Callable[[dict[str, Any], Path], None], result: dict[str, Any]) -> Callable[[str], None]:
    return lambda path: draw(result, Path(path))
