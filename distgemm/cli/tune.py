"""``distgemm tune``: the layers of a model measured, and what is fastest for each recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from distgemm.cli.common import check_folder, count_ranks, new_console, new_table
from distgemm.measure.models import MODELS, get_model
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import PATTERNS, Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from distgemm.tune import Tuned

__all__ = ["Case", "cases", "tune_command", "tuned_table"]

PATIENCE = 4 * 3600.0
"""Seconds for everything, with the compilation of kernels."""


class Case(NamedTuple):
    """A layer: what it is called, its pattern, and the problem on so many ranks."""

    label: str
    pattern: Pattern
    problem: GemmProblem


def cases(model: str, ms: list[int], ops: list[str], tp: int, ranks: int, dtype: str) -> list[Case]:
    """The layers of a model. With fewer ranks than ``tp``, each has what it has among tp ranks.

    Raises ValueError for an unknown model or pattern, for layers that tp ranks cannot share evenly, and for more ranks.
    """
    if ranks > tp:
        raise ValueError(f"--ranks {ranks} are at most the --tp {tp} ranks that share a layer")
    if unknown := sorted(set(ops) - set(PATTERNS)):
        raise ValueError(f"--ops are some of {', '.join(PATTERNS)}, got {unknown[0]!r}")
    found = []
    for m in ms:
        for layer in get_model(model).layers:
            n, k = layer.among(ranks, tp)
            for pattern in layer.patterns:
                if pattern in ops:
                    label = f"{model.removeprefix('llama-3-')} {layer.name}"
                    found.append(Case(label, pattern, GemmProblem(m, n, k, dtype=dtype)))
    return found


def tune_command(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Whose layers, of {', '.join(MODELS)}; several likewise, or all. [default: llama-3-70b]"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the layers.")] = 8,
    m: Annotated[
        list[str] | None,
        typer.Option(help="Tokens, rows of A and D; several with blanks or commas between them. [default: 8192]"),
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PATTERNS)}; several likewise. [default: ag+gemm,gemm+rs]")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks to run. With fewer than --tp, each has what it has of --tp. [default: --tp, or as many as "
            "there are GPUs]",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16",
    kernels: Annotated[
        bool, typer.Option(help="Whether configurations of the GEMMs are measured as well; compiles kernels.")
    ] = True,
    write: Annotated[bool, typer.Option(help="Whether the choices are recorded.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where the times of all that was measured go, after each layer.")
    ] = None,
) -> None:
    """Measure what schedule="auto" takes for the layers of a model on the GPUs of this machine, and record it.

    A few plans and the unfused program are measured against each other for each layer; the fastest is recorded in the
    cache folder, by the extents of the whole problem and the number of ranks. What is recorded is measured anew;
    configurations of GEMMs that are known are kept: tune-gemm measures them anew.
    """
    models = _split(model or ["llama-3-70b"])
    shapes = _tokens(m or ["8192"]), _split(ops or ["ag+gemm,gemm+rs"]), tp

    def of_models(size: int) -> list[Case]:
        return [case for name in (MODELS if "all" in models else models) for case in cases(name, *shapes, size, dtype)]

    of_models(ranks or tp)  # arguments are refused before GPUs are looked for
    if json_file is not None:
        check_folder("--json", json_file)
        json_file = json_file.absolute()
    size = count_ranks("tune", ranks, tp)
    found = of_models(size)

    from distgemm.runtime.launch import launch

    tuned: list[Tuned] = launch(_rank_main, size, found, write, kernels, json_file, backend="nccl", timeout=PATIENCE)[0]
    new_console().print(tuned_table(found, tuned))
    for reason in sorted({f"not measured: {name}: {why}" for each in tuned for name, why in each.refused.items()}):
        typer.echo(reason, err=True)
    for path in sorted({str(each.path) for each in tuned if each.path is not None}):
        typer.echo(f"choices are in {path}")


def _split(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(part for text in texts for part in text.split(",") if part))


def _tokens(texts: list[str]) -> list[int]:
    try:
        return [int(part) for part in _split(texts)]
    except ValueError:
        raise ValueError(f"--m is given as 8192 or 2048,8192, got {' '.join(texts)!r}") from None


def _rank_main(found: list[Case], write: bool, kernels: bool, json_file: Path | None) -> list[Tuned]:
    """What each rank does."""
    import torch.distributed as dist

    from distgemm.bench.report import save
    from distgemm.tune import tune

    tuned: list[Tuned] = []
    first = dist.get_rank() == 0
    with _progress(len(found), shown=first) as begin:
        for case in found:
            say = begin(f"{case.label} {case.pattern} m={case.problem.m}")
            tuned.append(tune(case.problem, case.pattern, write=write, kernels=kernels, progress=say))
            if first and json_file is not None:
                save({"layers": measured(found, tuned)}, json_file)
    return tuned


def measured(found: Sequence[Case], tuned: Sequence[Tuned]) -> list[dict[str, Any]]:
    """What ``--json`` writes: of each layer measured so far the choice and the ms of all that was tried."""
    return [
        {
            "layer": case.label,
            "op": case.pattern,
            "problem": dataclasses.asdict(case.problem),
            "choice": str(best.config),
            "ms": dict(sorted(best.times.items(), key=lambda each: each[1])),
            "refused": best.refused,
        }
        for case, best in zip(found, tuned, strict=False)
    ]


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[str], Callable[[str], object]]]:
    """A bar; what is yielded begins a case, and returns what is told of its progress."""
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


def tuned_table(found: list[Case], tuned: list[Tuned]) -> Table:
    """A row for each layer: what was chosen, its time, that of the unfused program."""
    table = new_table()
    for title in ("layer", "op", "m x n x k", "choice"):
        table.add_column(title, overflow="fold")
    for title in ("ms", "unfused", "speed-up"):
        table.add_column(title, justify="right")
    for case, best in zip(found, tuned, strict=True):
        p, beside = case.problem, best.unfused_ms
        figures = ["-", "-"] if beside is None else [f"{beside:.4f}", f"{beside / best.ms:.3f}"]
        shape = f"{p.m} x {p.n} x {p.k}"
        table.add_row(case.label, case.pattern, shape, str(best.config), f"{best.ms:.4f}", *figures)
    return table
