"""``distgemm tune-gemm``: tile configurations of GEMMs, measured on this GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distgemm.cli.build import DenseGemm, Dtypes, Majors, Terms, compiler_errors, gemms_of
from distgemm.cli.options import DEFAULT_M, JsonFile, OutDtype, PartialDtype, each_once, models_of, number, one_of
from distgemm.cli.output import Line, check_json, new_console, print_figures, wants_text, write_json
from distgemm.measure.models import MODELS, get_model
from distgemm.plan.problem import GemmProblem

if TYPE_CHECKING:
    from distgemm.tune.gemm import Measured

__all__ = ["shapes_of", "tune_gemm_command"]

Shape = tuple[int, int, int]


def tune_gemm_command(
    m: Annotated[
        int | None, typer.Argument(metavar="M", parser=number(1), help="Rows of A and D.", show_default=False)
    ] = None,
    n: Annotated[
        int | None, typer.Argument(metavar="N", parser=number(1), help="Rows of B, columns of D.", show_default=False)
    ] = None,
    k: Annotated[
        int | None, typer.Argument(metavar="K", parser=number(1), help="Columns of A and B.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            parser=one_of([*MODELS, "all"]),
            metavar="NAME",
            help=f"Instead of M N K, the layers of {', '.join(MODELS)}, or all; repeatable.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", parser=number(1), help="Ranks that share a layer of --model. [default: 8]"),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--m",
            metavar="M",
            parser=number(1),
            help=f"Tokens of --model, which are rows of A; repeatable. [default: {DEFAULT_M}]",
        ),
    ] = None,
    chunks: Annotated[
        list[int] | None,
        typer.Option(
            "--chunks",
            metavar="N",
            parser=number(1),
            help="Also measure one of so many chunks of rows; repeatable.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtypes = None,
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    majors: Majors = None,
    terms: Terms = None,
    gemm_streams: Annotated[
        int,
        typer.Option(
            "--gemm-streams",
            metavar="N",
            parser=number(1, 2),
            help="2: measure GEMMs that alternate on two streams, as chunks do.",
        ),
    ] = 1,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Whether the fastest is kept for later.")] = True,
    json: JsonFile = None,
) -> None:
    """Measure tile configurations of GEMMs on this GPU.

    The cache folder keeps the fastest one for each shape. By default --terms none.
    """
    import torch

    check_json(json)
    shapes = shapes_of((m, n, k), model, tp, tokens, chunks)
    problems = [
        GemmProblem(*shape, dtype=name, out_dtype=out_dtype, partial_dtype=partial_dtype)
        for name in each_once(dtype, ["bfloat16"])
        for shape in shapes
    ]
    gemms = gemms_of(problems, majors, terms or ["none"])
    if not torch.cuda.is_available():
        raise ValueError("tune-gemm measures on a GPU, and torch finds none; distgemm build needs none")
    found = _measure(gemms, gemm_streams, write)
    if wants_text(json):
        _report(gemms, found, shapes)
    write_json(json, [_entry(gemm, best) for gemm, best in zip(gemms, found, strict=True)])
    if write and wants_text(json):
        from distgemm.gemm.select import CACHE

        typer.echo(f"configurations are in {CACHE.path(torch.cuda.get_device_name())}")


def shapes_of(
    extents: tuple[int | None, int | None, int | None],
    model: list[str] | None,
    tp: int | None,
    tokens: list[int] | None,
    chunks: list[int] | None,
) -> dict[Shape, str]:
    """m, n, k of the GEMMs to measure, each with the names of its layers.

    Args:
        extents: M, N and K.
        model, tp, tokens, chunks: what --model, --tp, --m and --chunks give.

    Raises:
        ValueError: unless either M N K or --model is given.
    """
    m, n, k = extents
    whole: dict[Shape, list[str]] = {}
    if model:
        if extents != (None, None, None):
            raise ValueError("tune-gemm takes M N K or --model, not both")
        names = models_of(model)
        for name in names:
            for rows in each_once(tokens, [DEFAULT_M]):
                for layer in get_model(name).layers:
                    title = layer.name if len(names) == 1 else f"{name.removeprefix('llama-3-')} {layer.name}"
                    whole.setdefault(layer.local(rows, tp or 8), []).append(title)
    elif tp is not None or tokens:
        raise ValueError("--tp and --m go with --model; without it, give the GEMM of one rank as M N K")
    elif m is None or n is None or k is None:
        raise ValueError("tune-gemm takes M N K, such as 8192 7168 8192, or --model")
    else:
        whole[m, n, k] = []
    found = {shape: ", ".join(names) for shape, names in whole.items()}
    for count in each_once(chunks, []):
        for (m, n, k), names in whole.items():
            found.setdefault((-(-m // count), n, k), f"{', '.join(names)} / {count}".strip())
    return found


def _measure(gemms: list[DenseGemm], gemm_streams: int, write: bool) -> list[Measured]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.nvcc import build
    from distgemm.tune.gemm import candidates, tune

    provider = CutlassProvider()
    sources = [
        kernel_source(gemm.spec, config, provider.arch) for gemm in gemms for config in candidates(provider, gemm.spec)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with compiler_errors():
        build(sources)
        with Progress(*columns, console=new_console(stderr=True)) as progress:
            task = progress.add_task("measuring", total=len(gemms))
            found = []
            for gemm in gemms:
                progress.update(task, description=f"measuring {gemm.shape}")
                found.append(tune(gemm.tensors(), gemm_streams, write=write))
                progress.advance(task)
    return found


def _report(gemms: list[DenseGemm], found: list[Measured], names: dict[Shape, str]) -> None:
    rows = []
    for gemm, best in zip(gemms, found, strict=True):
        p = gemm.problem
        flop = 2 * p.m * p.n * p.k
        cublas = ["-", "-"]
        if best.cublas_ms is not None:
            cublas = [f"{flop / best.cublas_ms / 1e9:.0f}", f"{best.cublas_ms / best.ms:.3f}"]
        figures = [f"{best.ms:.4f}", f"{flop / best.ms / 1e9:.0f}", *cublas]
        name = f"{names[p.m, p.n, p.k]}: {gemm.shape}" if names[p.m, p.n, p.k] else gemm.shape
        rows.append(Line(name, figures, below=[f"{gemm}: {best.config}"]))
    print_figures(["GEMM", "ms", "TFLOP/s", "cuBLAS", "ratio"], rows)


def _entry(gemm: DenseGemm, best: Measured) -> dict[str, object]:
    p = gemm.problem
    return {
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "types": str(gemm),
        "config": str(best.config),
        "ms": best.ms,
        "cublas_ms": best.cublas_ms,
        "times": best.times,
    }
