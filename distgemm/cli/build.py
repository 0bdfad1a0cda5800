"""``distgemm build`` and ``distgemm tune-gemm``: kernels compiled ahead of use, configurations measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from distgemm.cli.common import new_console, new_table
from distgemm.measure.models import MODELS, get_model
from distgemm.plan.problem import GemmProblem

if TYPE_CHECKING:
    from rich.table import Table

    from distgemm.gemm import GemmSpec, GemmTensors
    from distgemm.tune.gemm import Measured

__all__ = ["build_command", "tune_gemm_command"]

ARCH = "90a"
"""What is compiled for where there is no GPU to ask."""

EXTENT = 256
"""Of what is compiled ahead: kernels do not depend on extents, as long as TMA can be used."""

TERMS = ("c", "partial", "bias", "row_scales")

Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="Type of A and B; repeatable. [default: bfloat16]")]
OutDtype = Annotated[str | None, typer.Option(help="Type of D, C and bias. [default: as dtype; bfloat16 for fp8]")]
PartialDtype = Annotated[str | None, typer.Option(help="Type of the partial sum. [default: as out-dtype]")]
Majors = Annotated[
    list[str] | None,
    typer.Option(help="Whether rows (r) or columns (c) of A and of B are contiguous; repeatable. [default: rr]"),
]
Terms = Annotated[
    str,
    typer.Option(help=f"What is added to the product: none, or some of {', '.join(TERMS)} joined by +; with commas."),
]


class Product(NamedTuple):
    """A product of dense matrices.

    majors: "r" or "c" for A and for B
    terms:  some of ``TERMS``
    """

    problem: GemmProblem
    majors: str
    terms: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.problem.dtype, self.majors, f"-> {self.problem.out_dtype}", *self.terms])

    @property
    def shape(self) -> str:
        return f"{self.problem.m} x {self.problem.n} x {self.problem.k}"

    @property
    def spec(self) -> GemmSpec:
        """As providers know it."""
        from distgemm.gemm import GemmSpec, MatrixSpec

        p = self.problem
        d = MatrixSpec(str(p.out_dtype), p.m, p.n)
        scale = "row" if "row_scales" in self.terms else "none"
        return GemmSpec(
            MatrixSpec(p.dtype, p.m, p.k, row_major=self.majors[0] == "r"),
            MatrixSpec(p.dtype, p.n, p.k, row_major=self.majors[1] == "r"),
            d,
            c=d if "c" in self.terms else None,
            partial=MatrixSpec(str(p.partial_dtype), p.m, p.n) if "partial" in self.terms else None,
            bias=d.dtype if "bias" in self.terms else None,
            scale_a=scale,
            scale_b=scale,
        )

    def tensors(self) -> GemmTensors:
        """Random ones on the GPU."""
        import torch

        from distgemm.gemm import GemmTensors

        p = self.problem

        def types(name: str) -> torch.dtype:
            found: torch.dtype = getattr(torch, "float32" if name == "tfloat32" else name)
            return found

        def drawn(rows: int, columns: int, dtype: str, major: str = "r") -> torch.Tensor:
            shape = (rows, columns) if major == "r" else (columns, rows)
            matrix = torch.randn(shape, device="cuda").to(types(dtype))
            return matrix if major == "r" else matrix.mT

        def scale(rows: int) -> torch.Tensor | None:
            if "row_scales" in self.terms:
                return torch.ones(rows, device="cuda")
            return torch.ones(1, device="cuda") if p.dtype == "float8_e4m3fn" else None

        out = str(p.out_dtype)
        return GemmTensors(
            drawn(p.m, p.k, p.dtype, self.majors[0]),
            drawn(p.n, p.k, p.dtype, self.majors[1]),
            torch.empty(p.m, p.n, device="cuda", dtype=types(out)),
            c=drawn(p.m, p.n, out) if "c" in self.terms else None,
            partial=drawn(p.m, p.n, str(p.partial_dtype)) if "partial" in self.terms else None,
            bias=drawn(1, p.n, out)[0] if "bias" in self.terms else None,
            scale_a=scale(p.m),
            scale_b=scale(p.n),
            beta=1.0 if "c" in self.terms else 0.0,
            dtype="tfloat32" if p.dtype == "tfloat32" else None,
        )


def _products(problems: list[GemmProblem], majors: list[str] | None, terms: str) -> list[Product]:
    for pair in majors or []:
        if pair not in ("rr", "rc", "cr", "cc"):
            raise ValueError(f"--majors is one of rr, rc, cr, cc, got {pair!r}")
    sets = []
    for part in terms.split(","):
        added = () if part == "none" else tuple(part.split("+"))
        if not set(added) <= set(TERMS) or len(set(added)) < len(added):
            raise ValueError(f"--terms takes none, or some of {', '.join(TERMS)} joined by +, got {part!r}")
        sets.append(added)
    return [Product(problem, pair, added) for problem in problems for pair in majors or ["rr"] for added in sets]


@contextlib.contextmanager
def _compiler_errors() -> Iterator[None]:
    """What the compiler says keeps its lines; exit status 1. A cache that cannot be written is the caller's mistake."""
    from distgemm.gemm.nvcc import CacheError, CompileError, CompilerNotFoundError

    try:
        yield
    except CacheError as error:
        raise ValueError(str(error)) from None
    except (CompileError, CompilerNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _table(*titles: str) -> Table:
    """An empty table; titles that end in a blank are of figures."""
    table = new_table()
    for title in titles:
        table.add_column(title.strip(), justify="right" if title.endswith(" ") else "left", overflow="fold")
    return table


# --- build ----------------------------------------------------------------------------------------------


def build_command(
    dtype: Dtypes = None,
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    majors: Majors = None,
    terms: Terms = "none,partial",
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A configuration such as 128x256x64_1x2_cooperative; repeatable. [default: all with TMA; the one "
            "without where no other multiplies this]",
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help=f"Architecture, as nvcc names it. [default: the GPU's; without one, {ARCH}]")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time. [default: one for each core]")] = None,
    show: Annotated[bool, typer.Option("--list", help="Show what is in the cache, compile nothing.")] = False,
) -> None:
    """Compile kernels ahead of their first use. Needs no GPU."""
    if show:
        _list()
        return
    from distgemm.gemm import GemmConfig
    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.nvcc import build, missing
    from distgemm.tune.gemm import candidates

    problems = [
        GemmProblem(EXTENT, EXTENT, EXTENT, dtype=name, out_dtype=out_dtype, partial_dtype=partial_dtype)
        for name in dtype or ["bfloat16"]
    ]
    products = _products(problems, majors, terms)
    configs = [GemmConfig.parse(text) for text in config or []]
    provider = CutlassProvider(arch or _arch())
    sources = {}
    for product in products:
        for one in configs or candidates(provider, product.spec):
            if not (status := provider.supports(product.spec, one)):
                raise ValueError(f"{one} for {product}: {status.reason}")
            source = kernel_source(product.spec, one, provider.arch)
            sources[source.macros] = source
    with _compiler_errors():
        lacking = missing(list(sources.values()))
        paths = build(list(sources.values()), jobs)
    size = sum(path.stat().st_size for path in paths)
    typer.echo(
        f"sm_{provider.arch}: {len(lacking)} compiled, {len(paths) - len(lacking)} there already, "
        f"{size / 2**20:.1f} MiB in {paths[0].parent}"
    )


def _arch() -> str:
    import torch

    from distgemm.gemm.cutlass import CutlassProvider

    if torch.cuda.is_available():
        return CutlassProvider().arch
    typer.echo(f"no GPU found: compiling for sm_{ARCH}; --arch names another", err=True)
    return ARCH


def _list() -> None:
    from rich.text import Text

    from distgemm.gemm.nvcc import cache_dir, cached

    table = _table("kernel", "terms", "arch", "compiler", "CUTLASS", "s ", "KiB ")
    sizes = []
    for path, manifest in cached():
        sizes.append(path.stat().st_size)
        size = f"{sizes[-1] / 2**10:.0f}"
        if manifest is None:
            table.add_row(Text(f"{path.name}: not whole, is compiled again when it is asked for"), *[""] * 5, size)
            continue
        facts = (manifest["arch"], manifest["compiler"], manifest["cutlass"], str(manifest["seconds"]), size)
        table.add_row(Text(manifest["kernel"]), _terms(manifest["macros"]), *facts)
    if sizes:
        new_console().print(table)
    typer.echo(f"total {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB in {cache_dir() / 'kernels'}")


def _terms(macros: dict[str, str]) -> str:
    """What a GEMM's library can add to the product."""
    names = {"DG_SOURCE": "C or partial", "DG_AUX": "C beside partial", "DG_BIAS": "bias"}
    direct = macros.get("DG_EPILOGUE") == "DG_DIRECT"
    found = ["any"] if direct else [name for key, name in names.items() if macros.get(key, "void") != "void"]
    return ", ".join(found + ["row scales"] * (macros.get("DG_ROW_SCALE_A") == "1"))


# --- tune-gemm ------------------------------------------------------------------------------------------


def tune_gemm_command(
    m: Annotated[int | None, typer.Argument(min=1, help="Rows of A and D.", show_default=False)] = None,
    n: Annotated[int | None, typer.Argument(min=1, help="Rows of B, columns of D.", show_default=False)] = None,
    k: Annotated[int | None, typer.Argument(min=1, help="Columns of A and B.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Instead: the layers of {', '.join(MODELS)}.", show_default=False)
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks that share the model's layers. [default: 8]")] = None,
    tokens: Annotated[
        int | None, typer.Option("--m", min=1, help="Rows of A in the model's layers. [default: 8192]")
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Measure one of so many chunks of rows as well.")] = 1,
    dtype: Dtypes = None,
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    majors: Majors = None,
    terms: Terms = "none",
    streams: Annotated[
        int, typer.Option(min=1, max=2, help="2 to measure GEMMs that alternate on two streams, as chunks do.")
    ] = 1,
    record: Annotated[bool, typer.Option(help="Whether the choices are kept for later.")] = True,
) -> None:
    """Measure configurations on this GPU, and keep the fastest for each shape."""
    import torch

    shapes = _shapes((m, n, k), model, tp, tokens, chunks)
    problems = [
        GemmProblem(*shape, dtype=name, out_dtype=out_dtype, partial_dtype=partial_dtype)
        for name in dtype or ["bfloat16"]
        for shape in shapes
    ]
    products = _products(problems, majors, terms)
    if not torch.cuda.is_available():
        raise ValueError("tune-gemm measures on a GPU, and torch finds none; distgemm build needs none")
    found = _measure(products, streams, record)
    _report(products, found, shapes)
    if record:
        from distgemm.gemm.select import CACHE

        typer.echo(f"choices are in {CACHE.path(torch.cuda.get_device_name())}")


def _shapes(
    extents: tuple[int | None, int | None, int | None],
    model: str | None,
    tp: int | None,
    tokens: int | None,
    chunks: int,
) -> dict[tuple[int, int, int], str]:
    """Shapes, each with what it is of."""
    m, n, k = extents
    whole: dict[tuple[int, int, int], str] = {}
    if model is not None:
        if extents != (None, None, None):
            raise ValueError("tune-gemm takes M N K or --model, not both")
        for layer in get_model(model).layers:
            shape = layer.local(tokens or 8192, tp or 8)
            whole[shape] = f"{whole[shape]}, {layer.name}" if shape in whole else layer.name
    elif tp is not None or tokens is not None:
        raise ValueError("--tp and --m are of a --model; without one, give what a rank multiplies as M N K")
    elif m is None or n is None or k is None:
        raise ValueError("tune-gemm takes M N K, such as 8192 7168 8192, or --model")
    else:
        whole[m, n, k] = ""
    found = dict(whole)
    if chunks > 1:
        for (m, n, k), name in whole.items():
            found.setdefault((-(-m // chunks), n, k), f"{name} / {chunks}".strip())
    return found


def _measure(products: list[Product], streams: int, record: bool) -> list[Measured]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.nvcc import build
    from distgemm.tune.gemm import candidates, tune

    provider = CutlassProvider()
    sources = [kernel_source(x.spec, one, provider.arch) for x in products for one in candidates(provider, x.spec)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _compiler_errors():
        build(sources)
        with Progress(*columns, console=new_console(stderr=True)) as progress:
            task = progress.add_task("measuring", total=len(products))
            found = []
            for product in products:
                progress.update(task, description=f"measuring {product.shape}")
                found.append(tune(product.tensors(), streams, write=record))
                progress.advance(task)
    return found


def _report(products: list[Product], found: list[Measured], names: dict[tuple[int, int, int], str]) -> None:

    table = _table("of", "m x n x k", "types", "configuration", "ms ", "TFLOP/s ", "cuBLAS ", "ratio ")
    for product, best in zip(products, found, strict=True):
        p = product.problem
        flop = 2 * p.m * p.n * p.k
        beside = ["-", "-"]
        if best.cublas_ms is not None:
            beside = [f"{flop / best.cublas_ms / 1e9:.0f}", f"{best.cublas_ms / best.ms:.3f}"]
        figures = [f"{best.ms:.4f}", f"{flop / best.ms / 1e9:.0f}", *beside]
        table.add_row(names[p.m, p.n, p.k], product.shape, str(product), str(best.config), *figures)
    new_console().print(table)
