"""Compiled kernels: nvcc compiles them at first use, with CUTLASS's headers, and they stay on disk.

A compiled kernel is a cubin: code for one GPU architecture and none for the host. Its name is a hash of everything it
is made from: our source, the macros, CUTLASS's version, the architecture, nvcc's options and its version. A manifest
with the cubin's checksum is written after the cubin. A cubin without a matching manifest is compiled again. A cubin is
loaded only if this user or root owns it and its folder, and no other user can write them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distgemm.gemm.packs import Pack, PackError, find_pack, not_usable, write_pack
from distgemm.system import cores, cores_of_rank, read_regular, unsafe

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
    "driver_cuda",
    "find_nvcc",
    "is_there",
    "cubin_path",
    "missing",
    "not_loadable",
    "origin",
    "pack_cubins",
    "sources_hash",
    "stop_compilers",
    "usable_pack",
    "wait_for",
    "works_here",
]

LOG = logging.getLogger("distgemm")

# Without NDEBUG, ptxas serialises wgmma.
FLAGS = ("-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-cubin")
T = TypeVar("T")

SERIALISED = "wgmma.mma_async instructions are serialized"
"""What ptxas says if it serialised wgmma. The numbers of these messages differ by the reason."""
TOOLKIT = "/usr/local/cuda"

VERSION_TIMEOUT_S = 60.0
"""Time in which nvcc must say its version."""
COMPILE_TIMEOUT_S = 1800.0
"""Time in which nvcc must compile a kernel. It takes about 10 s on an idle machine."""
SIGNALS_S = 0.2
"""How long Python waits for compilers at a time. Between two waits it handles signals."""

TOO_OLD = "Unsupported gpu architecture"
NEWER_NVCC = "install a newer nvcc, and set DISTGEMM_NVCC to its path"
OLDER_NVCC = "update the driver, or install an older nvcc and set DISTGEMM_NVCC to its path"
NO_CUTLASS = "CUTLASS's headers are missing; install them with: pip install nvidia-cutlass"
WRITABLE = "set DISTGEMM_CACHE_DIR to a folder that can be written"

_RUNNING: set[int] = set()
"""The process groups of the compilers that run now."""

BUILDING = ".building"
"""Ends the names of folders in which a cubin is compiled."""
HOST = os.uname().nodename.replace(".", "-")
"""Stands in the names of these folders."""
MANIFEST: dict[str, type | tuple[type, ...]] = {
    "kernel": str,
    "arch": str,
    "macros": dict,
    "compiler": str,
    "cutlass": str,
    "seconds": (int, float),
    "sha256": str,
}
"""The entries of a cubin's manifest, and their types."""


class CompilerNotFoundError(RuntimeError):
    """There is neither a compiler nor a compiled cubin that works here. The message says what to install."""


class CompileError(RuntimeError):
    """nvcc failed, did not end, or serialised wgmma. The message has nvcc's output."""


class CacheError(OSError):
    """The cache folder cannot be used: it cannot be written, or others can write it. The message says what to do."""


@dataclass(frozen=True)
class KernelSource:
    """The source of a kernel: a file of the folder ``kernels`` with macros, for one architecture.

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

    @property
    def entry(self) -> str:
        """The kernel's name in the cubin."""
        return f"distgemm_{self.path.stem}"


def cache_dir() -> Path:
    """The folder of compiled kernels and tuned configurations.

    It is $DISTGEMM_CACHE_DIR, or ``distgemm`` in $XDG_CACHE_HOME, or ``~/.cache/distgemm``.

    A ``~`` in a variable is the home folder, also where no shell has replaced it.

    Raises:
        CacheError: if the user's home is wanted, and there is none.
    """
    try:
        if chosen := os.environ.get("DISTGEMM_CACHE_DIR"):
            return Path(chosen).expanduser()
        if caches := os.environ.get("XDG_CACHE_HOME"):
            return Path(caches).expanduser() / "distgemm"
        return Path.home() / ".cache" / "distgemm"
    except RuntimeError as error:
        raise CacheError(
            f"kernel cache: this user has no home folder ({error}); set DISTGEMM_CACHE_DIR to a folder that can be "
            "written"
        ) from error


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
        CompilerNotFoundError: if the file does not run, does not end, or is no nvcc.
    """
    try:
        status, output = _run([str(nvcc), "--version"], VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerNotFoundError(f"{nvcc} does not run as a compiler: {error}") from error
    if status:
        raise CompilerNotFoundError(
            f"{nvcc} does not run as a compiler: asked for its version, it ends with exit status {status}"
        )
    found = re.search(r"release .*", output)
    if not found:
        raise CompilerNotFoundError(f"{nvcc} does not run as nvcc: asked for its version, it says {output[:200]!r}")
    return found.group()


def _run(words: Sequence[str], timeout: float) -> tuple[int, str]:
    """The exit status of a program, and what it prints.

    Nothing that it started remains when it takes too long, or when this process ends, whatever ends it.

    Raises:
        OSError: if it cannot be started.
        subprocess.TimeoutExpired: if it takes longer than ``timeout`` seconds.
    """
    with (
        _guard() as guard,
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all of its processes can be ended
        ) as process,
    ):
        _RUNNING.add(process.pid)
        try:
            guard(process.pid)
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process.pid)
            raise
        finally:
            _RUNNING.discard(process.pid)
    return process.returncode, output


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], object]]:
    """A shell that kills a process group when this process ends, whatever ends it; it is told which one.

    It waits for the end of a pipe that this process holds. PR_SET_PDEATHSIG would not reach what nvcc has started, and
    needs Python between fork and exec, which is not safe with threads.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", 'read -r group && cat && kill -s KILL -- "-$group"'],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a signal for this process's group does not end it first
    ) as shell:
        try:
            yield lambda group: os.write(shell.stdin.fileno(), b"%d\n" % group)  # type: ignore[union-attr]
        finally:
            shell.kill()  # before its pipe ends


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(group, signal.SIGKILL)


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """Wait until these futures are done, or until Ctrl-C.

    Python waits for a lock. If a signal comes just before, it does not end that wait. So each wait is short.
    """
    for future in futures:
        while wait([future], SIGNALS_S).not_done:
            continue


def stop_compilers(futures: Sequence[Future[Any]]) -> None:
    """Wait until these futures are done. Meanwhile, end every compiler of this process, also those that start."""
    while wait(futures, 0.1).not_done:
        for group in list(_RUNNING):
            _kill(group)


def driver_cuda() -> str | None:
    """The newest CUDA version that this machine's driver serves, such as "12.8"; None without a driver."""
    from cuda.bindings import driver

    try:
        error, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no driver library
        return None
    return None if error or not version else f"{version // 1000}.{version % 1000 // 10}"


def not_loadable(compiler: str, driver: str | None) -> str:
    """Why a driver does not load what a compiler compiles; "" if it does, or if there is no driver.

    Within a major version, an older driver loads what a newer nvcc compiles.

    Args:
        compiler: what nvcc prints about its release.
        driver: the newest CUDA version that the driver serves.
    """
    release = re.search(r"release (\d+)", compiler)
    if driver is None or release is None or int(release[1]) <= int(driver.partition(".")[0]):
        return ""
    return f"the driver serves CUDA up to {driver}, and does not load kernels that nvcc of {compiler} compiles"


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
    raise CompilerNotFoundError(NO_CUTLASS)


def _stem(source: KernelSource, pack: Pack | None = None) -> str:
    """The part of a cubin's name that does not depend on the compiler: as compiled here, or as in a pack."""
    texts = [read_source(source.path.with_name(name)) for name in (source.file, *source.headers)]
    try:
        cutlass = pack.cutlass if pack else importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        raise CompilerNotFoundError(
            f"kernel {source.name} is not compiled yet, {_not_packed()}, and {NO_CUTLASS}"
        ) from None
    made_from = json.dumps([*texts, cutlass, source.macros, source.arch, FLAGS])
    return hashlib.sha256(made_from.encode()).hexdigest()[:24]


@functools.cache
def sources_hash() -> str:
    """The hash of all sources of kernels, and of nvcc's options."""
    folder = Path(__file__).parent / "kernels"
    texts = {path.name: read_source(path) for path in sorted(folder.glob("*.cu*"))}
    return hashlib.sha256(json.dumps([texts, FLAGS]).encode()).hexdigest()[:12]


def usable_pack() -> tuple[Pack | None, str]:
    """The installed pack if this machine can load its cubins; else None and the reason, "" without a pack."""
    try:
        pack = find_pack()
    except PackError as error:
        return None, str(error)
    if pack is None:
        return None, ""
    why = not_usable(pack, sources_hash()) or not_loadable(pack.compiler, driver_cuda())
    return (None, f"{pack} in {pack.folder}: {why}") if why else (pack, "")


def _packed(source: KernelSource) -> tuple[Pack, str] | None:
    """The pack that has the cubin of a source, and the cubin's name in it."""
    pack, _ = usable_pack()
    stem = _stem(source, pack) if pack else ""
    return (pack, stem) if pack and stem in pack.cubins else None


@functools.cache
def read_source(path: Path) -> str:
    """The text of a file of kernels."""
    return path.read_text()


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a cubin; None if the cubin or the manifest is missing or damaged, or if they do not match."""
    try:
        manifest = json.loads(read_regular(path.with_suffix(".json")))
        if not all(isinstance(manifest[name], kind) for name, kind in MANIFEST.items()):
            return None
        checksum = hashlib.sha256(read_regular(path)).hexdigest()
        return manifest if checksum == manifest["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_intact(path: Path) -> bool:
    """Whether the cubin exists and matches its manifest."""
    return _manifest(path) is not None


def _cached(source: KernelSource) -> tuple[Path, Path | None]:
    """The cubin's path, which need not exist, and the compiler; None if it exists already, or is in the pack."""
    kernels = cache_dir() / "kernels"
    if (packed := _packed(source)) is not None:
        pack, stem = packed
        return _path_of(stem, pack.compiler), None
    nvcc = find_nvcc()
    stem = _stem(source)
    if nvcc is not None:
        version = compiler_version(nvcc)
        if why := not_loadable(version, driver_cuda()):
            raise CompilerNotFoundError(f"{nvcc} is too new: {why}; {OLDER_NVCC}")
        return _path_of(stem, version), nvcc
    refused = ""
    for path in sorted(kernels.glob(f"{stem}-*.cubin")):
        if (manifest := _manifest(path)) is not None:
            refused = not_loadable(manifest["compiler"], driver_cuda())
            if not refused:
                return path, None
    if refused:
        raise CompilerNotFoundError(f"kernel {source.name} is compiled, but {refused}; {OLDER_NVCC}")
    raise CompilerNotFoundError(
        f"kernel {source.name} is not compiled yet, {_not_packed()}, and nvcc was not found. Install it with: "
        "pip install 'distgemm[nvcc]' (or install the CUDA toolkit, or set DISTGEMM_NVCC to its path), compile ahead "
        "elsewhere with: distgemm build, or name a provider that needs none: provider='cublas'"
    )


def _not_packed() -> str:
    """Why a kernel does not come from a pack."""
    pack, why = usable_pack()
    return f"is not among those of {pack}" if pack else f"the pack is not used ({why})" if why else "no pack has it"


def _path_of(stem: str, compiler: str) -> Path:
    return cache_dir() / "kernels" / f"{stem}-{hashlib.sha256(compiler.encode()).hexdigest()[:8]}.cubin"


def works_here(manifest: dict[str, Any]) -> bool:
    """Whether this machine can load the cubin of a manifest."""
    return not not_loadable(manifest["compiler"], driver_cuda())


def _refuse_unsafe(*paths: Path) -> None:
    """Raise CacheError if another user could have changed a file or a folder."""
    for path in paths:
        if why := unsafe(path):
            raise CacheError(
                f"kernel cache: {why}, so it is not loaded; remove the others' permission with chmod go-w, or set "
                "DISTGEMM_CACHE_DIR to a folder of this user"
            )


def cubin_path(source: KernelSource) -> Path:
    """The path of the compiled cubin. It is compiled if need be, with a spinner if standard error is a terminal.

    Several processes may call this at once: one compiles, the others wait.

    Raises:
        CompilerNotFoundError: if it is not compiled yet and there is no compiler, or if the driver does not load it.
        CompileError: if the compiler fails.
        CacheError: if the cache folder cannot be written, or if other users can write it or the cubin.
    """
    path, _ = _cached(source)
    if not _is_intact(path):
        with _spinner(f"compiling {source.name} (once)"):
            path = _make_once(source)
    real = path.resolve()
    _refuse_unsafe(real.parent, real)
    return path


def build(sources: Iterable[KernelSource], jobs: int | None = None, progress: bool = True) -> list[Path]:
    """The paths of the compiled cubins of all sources. Missing ones are compiled, several at a time.

    Those that the pack has are unpacked.

    Args:
        sources: the sources; they may repeat. The first ones are compiled while an iterator still lists others.
        jobs: compilers that run at a time; None: one for each core that this process may use.
        progress: whether a progress bar is drawn.

    Raises:
        CompilerNotFoundError: if something is to be compiled and there is no compiler.
        CompileError: if the compiler fails.
        CacheError: if the cache folder cannot be written.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=_console(), disable=not progress)
    task = bar.add_task("compiling kernels", total=0)

    def one(source: KernelSource) -> None:
        _make_once(source)
        bar.advance(task)

    listed: list[KernelSource] = []
    known = set[KernelSource]()
    with contextlib.ExitStack() as drawn, ThreadPoolExecutor(jobs or cores()) as pool:
        futures: list[Future[None]] = []
        try:
            for source in sources:
                listed.append(source)
                if source in known:
                    continue
                known.add(source)
                if missing([source]):
                    if not futures:
                        check_writable(cache_dir() / "kernels")  # before the bar is drawn
                        drawn.enter_context(bar)
                    futures.append(pool.submit(one, source))
                    bar.update(task, total=len(futures))
                elif not _is_intact(_cached(source)[0]):
                    _make_once(source)  # the pack has it
            for future in futures:
                wait_for([future])
                future.result()
        except BaseException as error:
            for future in futures:
                future.cancel()
            if not isinstance(error, Exception):  # Ctrl-C reaches this process alone
                stop_compilers(futures)
            raise
    return [_cached(source)[0] for source in listed]


def build_together(sources: Sequence[KernelSource], rank: int, ranks: int, background: bool = False) -> None:
    """Build the sources on all ranks of a machine at once.

    Each rank begins with another source, and waits for those that another rank compiles. Rank 0 draws the progress bar.

    Args:
        sources: the sources; they may repeat.
        rank: this rank.
        ranks: number of ranks, also on other machines.
        background: whether the ranks do something else meanwhile. Then no bar is drawn, and each rank keeps a core.
    """
    jobs = max(1, cores_of_rank(ranks) - background)
    build(rotated(sources, rank, ranks), jobs, progress=rank == 0 and not background)


def rotated(items: Sequence[T], rank: int, ranks: int) -> list[T]:
    """The items, so that each rank begins with another one."""
    first = rank * len(items) // ranks
    return [*items[first:], *items[:first]]


def missing(sources: Sequence[KernelSource]) -> list[KernelSource]:
    """The sources that are neither compiled yet nor in the pack, each once."""
    return [source for source in dict.fromkeys(sources) if not _packed(source) and not _is_intact(_cached(source)[0])]


def cached() -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The cubins in the cache, each with its manifest; None if the manifest is missing or does not match."""
    for path in sorted((cache_dir() / "kernels").glob("*.cubin")):
        yield path, _manifest(path)


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


def _make_once(source: KernelSource) -> Path:
    """Compile or unpack a cubin, unless another process has done so meanwhile. Returns its path."""
    path, nvcc = _cached(source)
    check_writable(path.parent)
    try:
        _sweep(path.parent)
        with FileLock(path.with_suffix(".lock"), timeout=COMPILE_TIMEOUT_S):
            if not _is_intact(path):
                if (packed := _packed(source)) is not None:
                    _unpack(*packed, path)
                elif nvcc is None:
                    raise CompilerNotFoundError(
                        f"kernel {source.name} vanished from {path.parent}, and nvcc was not found"
                    )
                else:
                    _say_not_packed(usable_pack()[1])
                    _compile(source, nvcc, path)
    except Timeout:
        raise CompileError(
            f"kernel {source.name}: another process has been compiling it for {COMPILE_TIMEOUT_S:.0f} s; end the "
            f"process that holds {path.with_suffix('.lock')}"
        ) from None
    except CacheError:
        raise
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks, with an older filelock
        raise CacheError(f"kernel cache: {path.parent} cannot be written: {error}; {WRITABLE}") from error
    return path


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed have left: folders, and cubins without a manifest."""

    def is_left(path: Path) -> bool:
        if path.suffix != BUILDING:
            return not path.with_suffix(".json").exists()
        # Some file systems do not tell other machines about locks.
        return f".{HOST}." in path.name or time.time() - path.stat().st_mtime > COMPILE_TIMEOUT_S

    for path in [*folder.glob(f"*{BUILDING}"), *folder.glob("*.cubin")]:
        # What cannot be removed stays: another user's, or a folder on NFS that a compiler still writes.
        with contextlib.suppress(OSError):
            if not is_left(path):
                continue
            # Who builds a cubin holds its lock, and may have finished meanwhile.
            with FileLock(folder / f"{path.name.partition('.')[0]}.lock", timeout=0):
                if path.is_dir():
                    shutil.rmtree(path)
                elif is_left(path):
                    path.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Make a folder of the cache, which only this user can write.

    Raises:
        CacheError: if it cannot be made or written, or if other users can write it.
    """
    reason = f"{folder} cannot be written"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} cannot be made: {error.strerror or error}"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"kernel cache: {reason}; {WRITABLE}")
    _refuse_unsafe(folder)


def command(source: KernelSource, nvcc: Path, out: Path) -> list[str]:
    """The command that compiles a source."""
    macros = [f"-D{name}={value}" for name, value in source.macros]
    arch = f"-gencode=arch=compute_{source.arch},code=sm_{source.arch}"
    return [str(nvcc), *FLAGS, arch, f"-I{cutlass_include()}", *macros, "-o", str(out), str(source.path)]


def _compile(source: KernelSource, nvcc: Path, path: Path) -> None:
    with _building(path) as folder:
        out = Path(folder) / path.name
        words = command(source, nvcc, out)
        start = time.monotonic()
        try:
            status, output = _run(words, COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"{' '.join(words)}\ndid not end within {COMPILE_TIMEOUT_S:.0f} s, and was stopped"
            ) from None
        if status:
            old = f"\n{compiler_version(nvcc)} is too old for sm_{source.arch}; {NEWER_NVCC}" * (TOO_OLD in output)
            raise CompileError(f"{' '.join(words)}\nfailed with exit status {status}:\n{_excerpt(output)}{old}")
        if SERIALISED in output:
            raise CompileError(f"ptxas serialised wgmma in {source.name}, which makes it slow:\n{_excerpt(output)}")
        if not out.is_file():
            raise CompileError(f"{' '.join(words)}\nended with exit status 0 and wrote no cubin:\n{_excerpt(output)}")
        manifest = {
            "kernel": source.name,
            "arch": source.arch,
            "macros": dict(source.macros),
            "compiler": compiler_version(nvcc),
            "cutlass": importlib.metadata.version("nvidia-cutlass"),
            "seconds": round(time.monotonic() - start, 1),
            "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        }
        _install(out, manifest, path)


def _building(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder in which a cubin is compiled or unpacked."""
    return tempfile.TemporaryDirectory(prefix=f"{path.stem}.{HOST}.", suffix=BUILDING, dir=path.parent)


def _unpack(pack: Pack, stem: str, path: Path) -> None:
    with _building(path) as folder:
        out = Path(folder) / path.name
        out.write_bytes(pack.read(stem))
        _install(out, pack.cubins[stem].manifest | {"pack": str(pack)}, path)


def _install(cubin: Path, manifest: dict[str, Any], path: Path) -> None:
    """Put a cubin and its manifest into the cache. The manifest goes last: a cubin is complete if it has one."""
    cubin.chmod(0o644)
    written = cubin.with_suffix(".json")
    written.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(cubin, path)
    os.replace(written, path.with_suffix(".json"))


@functools.cache
def _say_not_packed(why: str) -> None:
    """Warn, once, that kernels are compiled although a pack is installed."""
    if why:
        LOG.warning("kernels are compiled here, because the pack cannot be used: %s", why)


def is_there(source: KernelSource) -> bool:
    """Whether a cubin is compiled already, or in the pack. Nothing is compiled or unpacked."""
    try:
        return not missing([source])
    except (CompilerNotFoundError, CacheError):
        return False


def origin(source: KernelSource) -> str:
    """Where the cubin of a source comes from: "packed" or "compiled"; "missing" if it is not there."""
    if _packed(source):
        return "packed"
    return "compiled" if is_there(source) else "missing"


def pack_cubins(sources: Sequence[KernelSource], folder: Path, version: str) -> Path:
    """Write the wheel with the compiled cubins of these sources. Returns its path.

    Args:
        sources: the sources.
        folder: where the wheel goes.
        version: the version of distgemm.

    Raises:
        ValueError, OSError: as :func:`distgemm.gemm.packs.write_pack`.
    """
    cubins = []
    for source in dict.fromkeys(sources):
        path, _ = _cached(source)
        manifest = _manifest(path)
        if manifest is None:
            raise ValueError(f"kernel {source.name} is not compiled: call build first")
        manifest.pop("pack", None)
        cubins.append((path.stem.partition("-")[0], read_regular(path), manifest))
    return write_pack(folder, version, sources_hash(), cubins, _cutlass_licence())


def _cutlass_licence() -> bytes:
    """The text of CUTLASS's licence, from the nvidia-cutlass wheel.

    Raises:
        ValueError: if it is missing.
    """
    for file in importlib.metadata.files("nvidia-cutlass") or ():
        if file.name.startswith("LICENSE"):
            return file.read_binary()
    raise ValueError("nvidia-cutlass has no LICENSE file, which a pack must contain; install the wheel again")


def _excerpt(output: str, lines: int = 30) -> str:
    """The first lines that are no warnings; all lines if there are only warnings."""
    kept = [line for line in output.splitlines() if "warning" not in line.lower()] or output.splitlines()
    return "\n".join(kept[:lines])
