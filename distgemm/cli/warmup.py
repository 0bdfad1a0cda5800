"""``distgemm warmup``: the kernels of models' layers, compiled before the first step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from distgemm.bench.cases import LAYERS, cases
from distgemm.cli.build import SCOPES, arch_of_gpu, compiler_errors
from distgemm.cli.options import (
    DEFAULT_M,
    Dtype,
    Layers,
    Models,
    Patterns,
    RanksOfLayers,
    TensorParallel,
    Tokens,
    each_once,
    models_of,
    number,
    one_of,
)
from distgemm.measure.models import Layer

__all__ = ["warmup_command"]


def warmup_command(
    model: Models = None,
    layer: Layers = None,
    pattern: Patterns = None,
    m: Tokens = None,
    tp: TensorParallel = 8,
    ranks: RanksOfLayers = None,
    dtype: Dtype = "bfloat16",
    scope: Annotated[
        str | None,
        typer.Option(
            "--scope",
            parser=one_of(SCOPES),
            metavar="SCOPE",
            help='"selected": what layers need if nothing is measured; "measured": also what schedule="auto" measures; '
            '"tiles": every candidate with every tile. [default: measured, with DISTGEMM_TUNE=0 selected]',
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", parser=number(1), help="Compilers at a time. [default: one for each core]"),
    ] = None,
) -> None:
    """Compile the kernels of models' layers, forward and backward, all at once.

    It needs no GPU. Python programs call distgemm.warmup(model, inputs).
    """
    names = (models_of(model), each_once(layer, list(LAYERS)), each_once(pattern, ["ag+gemm", "gemm+rs"]))
    found = cases(*names, each_once(m, [DEFAULT_M]), ranks or tp, tp, dtype)

    from distgemm.gemm.nvcc import KernelSource, build, missing
    from distgemm.gemm.select import gpu_name
    from distgemm.gemm.target import compiling_for
    from distgemm.torch_ops.kernels import group_of, layer_needs, sources_for
    from distgemm.torch_ops.warmup import scope_of_calls

    wanted: Any = scope or scope_of_calls()
    with group_of(ranks or tp) as group:
        needs = [
            need
            for case in found
            for need in layer_needs(
                Layer(case.layer, case.pattern, case.n, case.k), case.pattern, case.m, case.dtype, group
            )
        ]
    arch = arch_of_gpu()
    with compiling_for(arch, gpu_name()), compiler_errors():
        listed: list[KernelSource] = []
        absent: list[KernelSource] = []

        def noted(source: KernelSource) -> KernelSource:
            listed.append(source)
            absent.extend(missing([source]))
            return source

        build(map(noted, sources_for(dict.fromkeys(needs), wanted)), jobs)
    typer.echo(f"sm_{arch}: {len(absent)} compiled, {len(listed) - len(absent)} there already")
