"""``distgemm build``: kernels compiled ahead of their first use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from distgemm.cli.options import OutDtype, PartialDtype, each_once, named, number, one_of
from distgemm.cli.output import Line, print_figures, print_wrapped, say
from distgemm.plan.problem import DTYPES, GemmProblem

if TYPE_CHECKING:
    import torch

    from distgemm.gemm import GemmSpec, GemmTensors
    from distgemm.gemm.nvcc import KernelSource
    from distgemm.gemm.spec import ScaleMode

__all__ = [
    "SCOPES",
    "DenseGemm",
    "Dtypes",
    "Majors",
    "Terms",
    "arch_of_gpu",
    "build_command",
    "compiler_errors",
    "gemms_of",
]

DEFAULT_ARCH = "90a"
"""The architecture to compile for without a GPU."""

EXTENT = 256
"""Extents of GEMMs that are compiled ahead. Kernels do not depend on extents that TMA can use."""

SCOPES = ("selected", "measured", "tiles")
"""The values of :data:`distgemm.tune.kernels.Scope`."""

TERMS = ("c", "partial", "bias", "row_scales")
MAJORS = ("rr", "rc", "cr", "cc")

Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        parser=one_of(DTYPES),
        metavar="TYPE",
        help="Type of A and B; repeatable. [default: bfloat16]",
    ),
]
Majors = Annotated[
    list[str] | None,
    typer.Option(
        "--majors",
        parser=one_of(MAJORS),
        metavar="XY",
        help="Whether rows (r) or columns (c) of A and of B are contiguous: rr, rc, cr, cc; repeatable. [default: rr]",
    ),
]
Terms = Annotated[
    list[str] | None,
    typer.Option(
        "--terms",
        metavar="TERMS",
        help=f"Terms added to A @ B.T: none, or some of {', '.join(TERMS)} joined by +; repeatable.",
        show_default=False,
    ),
]


class DenseGemm(NamedTuple):
    """A GEMM of dense matrices on one GPU.

    Attributes:
        problem: extents and types.
        majors: for A and for B, "r" if rows are contiguous, "c" if columns are.
        terms: some of ``TERMS``.
    """

    problem: GemmProblem
    majors: str
    terms: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.problem.dtype, self.majors, f"-> {self.problem.out_dtype}", *self.terms])

    @property
    def shape(self) -> str:
        """m x n x k."""
        return f"{self.problem.m} x {self.problem.n} x {self.problem.k}"

    @property
    def spec(self) -> GemmSpec:
        """The spec that providers take."""
        from distgemm.gemm import GemmSpec, MatrixSpec

        p = self.problem
        d = MatrixSpec(str(p.out_dtype), p.m, p.n)
        scale: ScaleMode = "row" if "row_scales" in self.terms else "none"
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
        """Random tensors on the GPU."""
        import torch

        from distgemm.gemm import GemmTensors
        from distgemm.gemm.spec import FP8

        p = self.problem

        def torch_dtype(name: str) -> torch.dtype:
            found: torch.dtype = getattr(torch, "float32" if name == "tfloat32" else name)
            return found

        def random(rows: int, columns: int, dtype: str, major: str = "r") -> torch.Tensor:
            shape = (rows, columns) if major == "r" else (columns, rows)
            matrix = torch.randn(shape, device="cuda").to(torch_dtype(dtype))
            return matrix if major == "r" else matrix.mT

        def scale(rows: int) -> torch.Tensor | None:
            if "row_scales" in self.terms:
                return torch.ones(rows, device="cuda")
            return torch.ones(1, device="cuda") if p.dtype in FP8 else None

        out = str(p.out_dtype)
        return GemmTensors(
            random(p.m, p.k, p.dtype, self.majors[0]),
            random(p.n, p.k, p.dtype, self.majors[1]),
            torch.empty(p.m, p.n, device="cuda", dtype=torch_dtype(out)),
            c=random(p.m, p.n, out) if "c" in self.terms else None,
            partial=random(p.m, p.n, str(p.partial_dtype)) if "partial" in self.terms else None,
            bias=random(1, p.n, out)[0] if "bias" in self.terms else None,
            scale_a=scale(p.m),
            scale_b=scale(p.n),
            beta=1.0 if "c" in self.terms else 0.0,
            dtype="tfloat32" if p.dtype == "tfloat32" else None,
        )


def gemms_of(problems: list[GemmProblem], majors: list[str] | None, terms: list[str]) -> list[DenseGemm]:
    """A GEMM for each problem, each value of --majors and each value of --terms.

    Raises:
        ValueError: if a value of --terms is not written as documented.
    """
    sets = []
    for text in each_once(terms, []):
        added = () if text == "none" else tuple(text.split("+"))
        if not set(added) <= set(TERMS) or len(set(added)) < len(added):
            raise ValueError(f"--terms takes none, or some of {', '.join(TERMS)} joined by +, got {text!r}")
        sets.append(added)
    pairs = each_once(majors, ["rr"])
    return [DenseGemm(problem, pair, added) for problem in problems for pair in pairs for added in sets]


@contextlib.contextmanager
def compiler_errors() -> Iterator[None]:
    """Print what the compiler prints, line by line, and exit with status 1.

    Raises:
        ValueError: if the cache cannot be written, which is the caller's mistake.
    """
    from distgemm.gemm.nvcc import CacheError, CompileError, CompilerNotFoundError
    from distgemm.gemm.packs import PackError

    try:
        yield
    except CacheError as error:
        raise ValueError(str(error)) from None
    except (CompileError, CompilerNotFoundError, PackError) as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None


def build_command(
    dtype: Dtypes = None,
    out_dtype: OutDtype = None,
    partial_dtype: PartialDtype = None,
    majors: Majors = None,
    terms: Terms = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="A tile configuration such as 128x256x64_1x2_cooperative; repeatable. [default: all with TMA; the one "
            "without TMA if no other computes the GEMM]",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help=f"Architecture, as nvcc names it. [default: the GPU's; without one, {DEFAULT_ARCH}]",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", parser=number(1), help="Compilers at a time. [default: one for each core]"),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(
            "--pack",
            metavar="FOLDER",
            help="Write the kernels as the wheel distgemm-kernels into this folder: without --config, --majors and "
            "--terms, all those that tensor-parallel layers can ask for, in bfloat16 and float16.",
            show_default=False,
        ),
    ] = None,
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            parser=one_of(SCOPES),
            metavar="SCOPE",
            help='With --pack: "selected" takes what layers need if nothing is measured, "measured" also what '
            'schedule="auto" measures, "tiles" every candidate with every tile.',
        ),
    ] = "tiles",
    show: Annotated[bool, typer.Option("--list", help="Show what is in the cache, compile nothing.")] = False,
) -> None:
    """Compile kernels ahead of their first use.

    It needs no GPU. By default --terms none and --terms partial.
    """
    if show:
        _list()
        return
    from distgemm.gemm import GemmConfig
    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.nvcc import build, missing, pack_cubins
    from distgemm.tune.gemm import candidates

    gemms = gemms_of(
        [
            GemmProblem(EXTENT, EXTENT, EXTENT, dtype=name, out_dtype=out_dtype, partial_dtype=partial_dtype)
            for name in each_once(dtype, ["bfloat16"])
        ],
        majors,
        terms or ["none", "partial"],
    )
    with named("--config"):
        configs = [GemmConfig.parse(text) for text in config or []]
    if pack is not None:
        os.environ["DISTGEMM_PACK"] = "0"  # an installed pack is no source of another one
        arch = arch or DEFAULT_ARCH
        try:
            pack.mkdir(parents=True, exist_ok=True)  # before anything is compiled
        except OSError as error:
            raise ValueError(f"--pack {pack}: the folder cannot be made: {error.strerror}") from None
    provider = CutlassProvider(arch_of_gpu("; --arch names another") if arch is None else arch)
    by_macros = {}
    if pack is not None and not (config or majors or terms):
        for source in _layers_sources(provider.arch, each_once(dtype, ["bfloat16", "float16"]), scope):
            by_macros[source.macros] = source
    else:
        for gemm in gemms:
            for one in configs or candidates(provider, gemm.spec):
                if not (status := provider.supports(gemm.spec, one)):
                    raise ValueError(f"{one} for {gemm}: {status.reason}")
                source = kernel_source(gemm.spec, one, provider.arch)
                by_macros[source.macros] = source
    sources = list(by_macros.values())
    with compiler_errors():
        absent = missing(sources)
        paths = build(sources, jobs)
    size = sum(path.stat().st_size for path in paths)
    typer.echo(
        f"sm_{provider.arch}: {len(absent)} compiled, {len(paths) - len(absent)} there already, "
        f"{size / 2**20:.1f} MiB in {paths[0].parent}"
    )
    if pack is not None:
        try:
            wheel = pack_cubins(sources, pack, version("distgemm"))
        except OSError as error:
            raise ValueError(f"--pack {pack}: the wheel cannot be written: {error.strerror or error}") from None
        typer.echo(f"{wheel}: {len(paths)} kernels, {wheel.stat().st_size / 2**20:.1f} MiB")


def _layers_sources(arch: str, dtypes: list[str], scope: Any) -> list[KernelSource]:
    """All kernels that tensor-parallel layers can ask for."""
    if arch != DEFAULT_ARCH:
        raise ValueError(f"--pack of all layers' kernels is for sm_{DEFAULT_ARCH}, got --arch {arch}; name a --config")
    from distgemm.gemm.select import CACHE
    from distgemm.gemm.target import compiling_for
    from distgemm.torch_ops.kernels import kernel_sources

    found: dict[KernelSource, None] = {}
    for gpu in ["none", *CACHE.shipped_devices()] if scope != "tiles" else ["none"]:
        with compiling_for(arch, gpu):
            found |= dict.fromkeys(kernel_sources(dtypes, scope))
    return list(found)


def arch_of_gpu(advice: str = "") -> str:
    """The architecture of the GPU; without one, DEFAULT_ARCH, and a line that says so and ends with the advice."""
    import torch

    from distgemm.gemm.cutlass import CutlassProvider

    if torch.cuda.is_available():
        return CutlassProvider().arch
    say(f"no GPU found: compiling for sm_{DEFAULT_ARCH}{advice}")
    return DEFAULT_ARCH


def _list() -> None:
    from distgemm.gemm.nvcc import cache_dir, cached, usable_pack

    rows = []
    sizes = []
    for path, manifest in cached():
        sizes.append(path.stat().st_size if path.exists() else 0)  # 0: a link to nowhere
        size = f"{sizes[-1] / 2**10:.0f}"
        if manifest is None:
            rows.append(Line(f"{path.name}: incomplete, is compiled again at its next use", ["", "", "", "", size]))
            continue
        facts = [manifest["arch"], manifest["compiler"], manifest["cutlass"], str(manifest["seconds"]), size]
        terms = _terms(manifest["macros"])
        rows.append(Line(manifest["kernel"], facts, below=[f"can add {terms}"] if terms else []))
    if rows:
        print_figures(["kernel", "arch", "compiler", "CUTLASS", "s", "KiB"], rows)
    pack, why = usable_pack()
    if pack or why:
        print_wrapped(f"pack {pack}: {len(pack.cubins)} kernels" if pack else f"the pack is not used: {why}")
    print_wrapped(f"total {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB in {cache_dir() / 'kernels'}")


def _terms(macros: dict[str, str]) -> str:
    """The terms that a kernel can add to A @ B.T."""
    return "bias, row scales" if macros.get("DG_SOURCE", "void") == "void" else "any term"
