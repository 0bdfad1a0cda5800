"""Kernel libraries: nvcc compiles them at first use, with CUTLASS's headers, and they stay on disk.

A library's name is a hash of everything it is made from: our source, the macros, CUTLASS's version, the architecture,
nvcc's options and its version. A manifest with the library's checksum is written after the library. A library without a
matching manifest is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = [
    "CacheError",
    "CompileError",
    "CompilerNotFoundError",
    "KernelSource",
    "build",
    "build_together",
    "cache_dir",
    "cached",
    "check_writable",
    "command",
    "compiler_version",
    "cutlass_include",
    "find_nvcc",
    "library",
    "missing",
]

# Without NDEBUG, ptxas serialises wgmma.
FLAGS = ("-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC")
SERIALISED = "C7510"
"""The number of ptxas's warning that it serialised wgmma."""
TOOLKIT = "/usr/local/cuda"


class CompilerNotFoundError(RuntimeError):
    """There is neither a compiler nor a compiled library. The message says what to install."""


class CompileError(RuntimeError):
    """nvcc failed, or serialised wgmma. The message has nvcc's output."""


class CacheError(OSError):
    """The cache folder cannot be written. The message says which, and what to do."""


@dataclass(frozen=True)
class KernelSource:
    """The source of a library: a file of the folder ``kernels`` with macros, for one architecture.

    Attributes:
        name: for messages.
        macros: (name, value) pairs.
        arch: the architecture, as nvcc names it: "90a", "80", ...
        file: name of the file.
        headers: names of the files in ``kernels`` that it includes.
    """

    name: str
    macros: tuple[tuple[str, str], ...]
    arch: str
    file: str = "gemm.cu"
    headers: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(__file__).parent / "kernels" / self.file


def cache_dir() -> Path:
    """The folder of compiled kernels and tuned configurations.

    It is $DISTGEMM_CACHE_DIR, or ``distgemm`` in $XDG_CACHE_HOME, or ``~/.cache/distgemm``.
    """
    if chosen := os.environ.get("DISTGEMM_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distgemm"


def find_nvcc() -> Path | None:
    """The path of nvcc; None if there is none.

    It looks at $DISTGEMM_NVCC, the PATH, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda, and the PyPI packages of
    ``distgemm[nvcc]``, in this order.

    Raises:
        CompilerNotFoundError: if $DISTGEMM_NVCC is set but names no file.
    """
    if chosen := os.environ.get("DISTGEMM_NVCC"):
        if not Path(chosen).is_file():
            raise CompilerNotFoundError(f"DISTGEMM_NVCC is {chosen!r}, where there is no file")
        return Path(chosen)
    if found := shutil.which("nvcc"):
        return Path(found)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    packages = importlib.util.find_spec("nvidia")
    for place in packages.submodule_search_locations or () if packages else ():
        for nvcc in sorted(Path(place).glob("cu*/bin/nvcc"), reverse=True):
            return nvcc
    return None


@functools.cache
def compiler_version(nvcc: Path) -> str:
    """The release of nvcc, as it prints it.

    Raises:
        CompilerNotFoundError: if the file does not run, or is no nvcc.
    """
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFoundError(f"{nvcc} does not run as a compiler: {error}") from error
    found = re.search(r"release .*", output)
    if not found:
        raise CompilerNotFoundError(f"{nvcc} does not run as nvcc: asked for its version, it says {output[:200]!r}")
    return found.group()


@functools.cache
def cutlass_include() -> Path:
    """The folder of headers in the nvidia-cutlass wheel.

    Raises:
        CompilerNotFoundError: if they are missing.
    """
    spec = importlib.util.find_spec("cutlass_library")
    for place in spec.submodule_search_locations or () if spec else ():
        include = Path(place) / "source" / "include"
        if (include / "cutlass" / "cutlass.h").is_file():
            return include
    raise CompilerNotFoundError("CUTLASS's headers are missing; install them with: pip install nvidia-cutlass")


def _stem(source: KernelSource) -> str:
    """The part of a library's name that does not depend on the compiler."""
    texts = [read_source(source.path.with_name(name)) for name in (source.file, *source.headers)]
    made_from = json.dumps([*texts, importlib.metadata.version("nvidia-cutlass"), source.macros, source.arch, FLAGS])
    return hashlib.sha256(made_from.encode()).hexdigest()[:24]


@functools.cache
def read_source(path: Path) -> str:
    """The text of a file of kernels."""
    return path.read_text()


def _is_intact(path: Path) -> bool:
    """Whether the library exists and matches its manifest."""
    try:
        manifest = json.loads(path.with_suffix(".json").read_text())
        return bool(hashlib.sha256(path.read_bytes()).hexdigest() == manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _cached(source: KernelSource) -> tuple[Path, Path | None]:
    """The library's path, which need not exist, and the compiler. Without a compiler: that of an existing library."""
    kernels = cache_dir() / "kernels"
    nvcc = find_nvcc()
    stem = _stem(source)
    if nvcc is not None:
        version = hashlib.sha256(compiler_version(nvcc).encode()).hexdigest()[:8]
        return kernels / f"{stem}-{version}.so", nvcc
    for path in sorted(kernels.glob(f"{stem}-*.so")):
        if _is_intact(path):
            return path, None
    raise CompilerNotFoundError(
        f"kernel {source.name} is not compiled yet and nvcc was not found. Install it with: pip install "
        "'distgemm[nvcc]' (or install the CUDA toolkit, or set DISTGEMM_NVCC to its path), compile ahead elsewhere "
        "with: distgemm build, or name a provider that needs none: provider='cublas'"
    )


def library(source: KernelSource) -> Path:
    """The path of the compiled library. It is compiled if need be, with a spinner if standard error is a terminal.

    Several processes may call this at once: one compiles, the others wait.

    Raises:
        CompilerNotFoundError: if it is not compiled yet and there is no compiler.
        CompileError: if the compiler fails.
        CacheError: if the cache folder cannot be written.
    """
    path, _ = _cached(source)
    if _is_intact(path):
        return path
    with _spinner(f"compiling {source.name} (once)"):
        return _compile_once(source)


def build(sources: Sequence[KernelSource], jobs: int | None = None, progress: bool = True) -> list[Path]:
    """The paths of the compiled libraries of all sources. Missing ones are compiled, several at a time.

    Args:
        sources: the sources; they may repeat.
        jobs: compilers that run at a time; None: one for each core.
        progress: whether a progress bar is drawn.

    Raises:
        CompilerNotFoundError: if something is to be compiled and there is no compiler.
        CompileError: if the compiler fails.
        CacheError: if the cache folder cannot be written.
    """
    lacking = missing(sources)
    if lacking:
        check_writable(cache_dir() / "kernels")  # before the bar is drawn
        _build(lacking, jobs, progress)
    return [_cached(source)[0] for source in sources]


def build_together(sources: Sequence[KernelSource], rank: int, ranks: int) -> None:
    """Build the sources on all ranks of a machine at once.

    Each rank begins with another source, and waits for those that another rank compiles. Rank 0 draws the progress bar.
    """
    first = rank * len(sources) // ranks
    rotated = [*sources[first:], *sources[:first]]
    build(rotated, jobs=max(1, (os.cpu_count() or 1) // ranks), progress=rank == 0)


def missing(sources: Sequence[KernelSource]) -> list[KernelSource]:
    """The sources that are not compiled yet, each once."""
    return [source for source in dict.fromkeys(sources) if not _is_intact(_cached(source)[0])]


def _build(sources: Sequence[KernelSource], jobs: int | None, drawn: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=_console(), disable=not drawn)
    with bar as progress, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        task = progress.add_task("compiling kernels", total=len(sources))

        def one(source: KernelSource) -> None:
            _compile_once(source)
            progress.advance(task)

        list(pool.map(one, sources))


def cached() -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The libraries in the cache, each with its manifest; None if the manifest is missing or does not match."""
    for path in sorted((cache_dir() / "kernels").glob("*.so")):
        yield path, json.loads(path.with_suffix(".json").read_text()) if _is_intact(path) else None


def _console() -> Console:
    return Console(stderr=True)


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def _compile_once(source: KernelSource) -> Path:
    path, nvcc = _cached(source)
    check_writable(path.parent)
    with FileLock(path.with_suffix(".lock")):
        if not _is_intact(path):
            if nvcc is None:
                raise CompilerNotFoundError(f"kernel {source.name} vanished from {path.parent}, and nvcc was not found")
            _compile(source, nvcc, path)
    return path


def check_writable(folder: Path) -> None:
    """Make a folder of the cache.

    Raises:
        CacheError: if it cannot be made or written.
    """
    reason = f"{folder} cannot be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} cannot be made: {error.strerror or error}"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"kernel cache: {reason}; set DISTGEMM_CACHE_DIR to a folder that can be written")


def command(source: KernelSource, nvcc: Path, out: Path) -> list[str]:
    """The command that compiles a source."""
    macros = [f"-D{name}={value}" for name, value in source.macros]
    arch = f"-gencode=arch=compute_{source.arch},code=sm_{source.arch}"
    # nvcc looks for its runtime in lib64; the PyPI packages have it in lib.
    packaged = nvcc.parent.parent / "lib"
    libraries = [f"-L{packaged}"] if (packaged / "libcudart_static.a").is_file() else []
    return [
        *(str(nvcc), *FLAGS, arch, f"-I{cutlass_include()}", *libraries, *macros),
        *("-o", str(out), str(source.path)),
    ]


def _compile(source: KernelSource, nvcc: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        start = time.monotonic()
        done = subprocess.run(command(source, nvcc, out), capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            raise CompileError(f"{' '.join(done.args)}\nfailed with exit status {done.returncode}:\n{_excerpt(output)}")
        if SERIALISED in output:
            raise CompileError(f"ptxas serialised wgmma in {source.name}, which makes it slow:\n{_excerpt(output)}")
        manifest = {
            "kernel": source.name,
            "arch": source.arch,
            "macros": dict(source.macros),
            "compiler": compiler_version(nvcc),
            "cutlass": importlib.metadata.version("nvidia-cutlass"),
            "seconds": round(time.monotonic() - start, 1),
            "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        }
        written = out.with_suffix(".json")
        written.write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(out, path)
        os.replace(written, path.with_suffix(".json"))


def _excerpt(output: str, lines: int = 30) -> str:
    """The first lines that are no warnings; all lines if there are only warnings."""
    kept = [line for line in output.splitlines() if "warning" not in line.lower()] or output.splitlines()
    return "\n".join(kept[:lines])
