"""``distgemm tune``: the layers of models measured, and the fastest configuration of each recorded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distgemm.bench.cases import LAYERS, Case, cases
from distgemm.bench.report import save
from distgemm.cli.options import (
    DEFAULT_M,
    Dtype,
    JsonFile,
    Layers,
    Models,
    Patterns,
    RanksOfLayers,
    TensorParallel,
    Tokens,
    benchmark_file,
    count_ranks,
    each_once,
    join_ranks,
    models_of,
    named,
)
from distgemm.cli.output import Line, check_json, new_console, print_figures, say, wants_text, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from distgemm.tune import Tuned

__all__ = ["measured_layers", "run_rank", "tune_command", "tuned_lines"]

ROW_FIELDS = Case._fields[:-1]
"""Fields of a row of a benchmark, whose operands are bfloat16."""
TUNE_TIMEOUT_S = 4 * 3600.0
"""Time in which all ranks must end. It includes the compilation of kernels."""


def tune_command(
    model: Models = None,
    layer: Layers = None,
    pattern: Patterns = None,
    m: Tokens = None,
    tp: TensorParallel = 8,
    ranks: RanksOfLayers = None,
    dtype: Dtype = "bfloat16",
    kernels: Annotated[
        bool,
        typer.Option("--kernels/--no-kernels", help="Whether tile configurations of GEMMs are measured as well."),
    ] = True,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Whether the fastest is recorded.")] = True,
    source: Annotated[
        Any,
        benchmark_file("Measure nothing: record the fastest of each row of a benchmark, which bench --json wrote."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Measure and record what "auto" selects.

    These are the layers of models on the GPUs of this machine, and the configurations of schedule="auto". A few
    plans and the unfused program are measured for each layer. The cache folder keeps the fastest one, by the
    extents of the whole problem and the number of ranks. A recorded layer is measured again. Tile configurations
    that are known are kept: tune-gemm measures them again. With --kernels, kernels are compiled. The command starts
    its ranks, or joins those that torchrun has started. The file of --json is written after each layer.
    """
    check_json(json)
    if source is not None:
        from distgemm.bench.choices import record_benchmark

        rows = [Case(*(row[field] for field in ROW_FIELDS)) for row in source["rows"]]
        with named("--from"):
            recorded = record_benchmark(source, write=write)
        if json is not None and wants_text(json):
            save({"layers": measured_layers(rows, recorded)}, json)
        _report(rows, recorded, json)
        return
    names = (models_of(model), each_once(layer, list(LAYERS)), each_once(pattern, ["ag+gemm", "gemm+rs"]))
    ms = each_once(m, [DEFAULT_M])
    cases(*names, ms, ranks or tp, tp, dtype)  # arguments are refused before GPUs are looked for
    size = count_ranks("tune", ranks, tp)
    found = cases(*names, ms, size, tp, dtype)

    from distgemm.runtime.launch import launch

    path = json.absolute() if json is not None and wants_text(json) else None
    arguments = found, write, kernels, path
    if "WORLD_SIZE" in os.environ:
        tuned, first = join_ranks(TUNE_TIMEOUT_S, run_rank, *arguments)
        if not first:
            return
    else:
        try:
            tuned = launch(run_rank, size, *arguments, backend="nccl", timeout=TUNE_TIMEOUT_S)[0]
        except RuntimeError as error:
            say(f"error: {error}")
            raise typer.Exit(1) from None
    _report(found, tuned, json)


def _report(found: Sequence[Case], tuned: Sequence[Tuned], json: Path | None) -> None:
    """Print or write what was measured, and where it is recorded."""
    if wants_text(json):
        heads = ["layer", "m x n x k", "ms", "unfused", "speed-up"]
        print_figures(heads, tuned_lines(found, tuned))
    else:
        write_json(json, {"layers": measured_layers(found, tuned)})
    for reason in sorted({f"not measured: {name}: {why}" for each in tuned for name, why in each.refused.items()}):
        say(reason)
    for file in sorted({str(each.path) for each in tuned if each.path is not None}):
        typer.echo(f"configurations are in {file}", err=not wants_text(json))


def run_rank(found: Sequence[Case], write: bool, kernels: bool, json: Path | None) -> list[Tuned]:
    """Tune all cases. Each rank calls this; rank 0 writes the file after each case."""
    import torch.distributed as dist

    from distgemm.tune import tune

    tuned: list[Tuned] = []
    first = dist.get_rank() == 0
    with _progress(len(found), shown=first) as begin:
        for case in found:
            progress = begin(str(case))
            tuned.append(tune(case.problem, case.pattern, write=write, kernels=kernels, progress=progress))
            if first and json is not None:
                save({"layers": measured_layers(found, tuned)}, json)
    return tuned


def measured_layers(found: Sequence[Case], tuned: Sequence[Tuned]) -> list[dict[str, Any]]:
    """The content of the file of --json: for each layer the configuration, and the ms of everything that was tried."""
    return [
        {
            "layer": f"{case.model.removeprefix('llama-3-')} {case.layer}",
            "pattern": case.pattern,
            "problem": dataclasses.asdict(case.problem),
            "config": str(best.config),
            "ms": dict(sorted(best.times.items(), key=lambda each: each[1])),
            "refused": best.refused,
        }
        for case, best in zip(found, tuned, strict=False)
    ]


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[str], Callable[[str], object]]]:
    """A progress bar. The function that it yields begins a case, and returns what takes the texts of its progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: Any = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=new_console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("", total=total)
        begun = -1

        def begin(label: str) -> Callable[[str], object]:
            nonlocal begun
            begun += 1
            progress.update(task, completed=begun)
            return lambda text: progress.update(task, description=f"{label}: {text}")

        yield begin
        progress.update(task, completed=total, description="")


def tuned_lines(found: Sequence[Case], tuned: Sequence[Tuned]) -> list[Line]:
    """A row for each layer: its time, that of the unfused program, and the configuration below."""
    lines = []
    for case, best in zip(found, tuned, strict=True):
        p, unfused = case.problem, best.unfused_ms
        figures = ["-", "-"] if unfused is None else [f"{unfused:.4f}", f"{unfused / best.ms:.3f}"]
        shape = f"{p.m} x {p.n} x {p.k}"
        lines.append(Line(case.label, [shape, f"{best.ms:.4f}", *figures], below=[str(best.config)]))
    return lines
