"""Cubins on disk, with a fake compiler: each is compiled once, complete, and found again."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm import nvcc as compiler
from distgemm.gemm.cutlass import kernel_source
from distgemm.gemm.nvcc import (
    CacheError,
    CompileError,
    CompilerNotFoundError,
    KernelSource,
    build,
    cache_dir,
    cached,
    cubin_path,
    find_nvcc,
    is_there,
    missing,
)
from distgemm.gemm.select import CACHE

SOURCE = KernelSource("a kernel", (("DG_D", "float"), ("DG_TILE_M", "128")), "90a")
MEBIBYTE = 1 << 20

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then
    echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release {release}, V{release}.48"
    exit 0
fi
echo "$*" >>"{log}"
while [ "$1" != -o ]; do shift; done
{does}
"""
WRITES = f'sleep 0.2; head -c {MEBIBYTE} /dev/zero >"$2"'
AT_ONCE = 'echo "$2" >"$2"'


class Nvcc:
    """A script that answers like nvcc and keeps a log of what it was asked to compile."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "nvcc", folder / "log"
        self.set()

    def set(self, does: str = WRITES, release: str = "13.0") -> None:
        self.path.write_text(NVCC.format(does=does, release=release, log=self.log))
        self.path.chmod(0o755)
        compiler.compiler_version.cache_clear()

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    """A compiler, and an empty cache."""
    found = Nvcc(tmp_path)
    monkeypatch.setenv("DISTGEMM_NVCC", str(found.path))
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "driver_cuda", lambda: None)
    return found


def cubins() -> list[str]:
    return sorted(path.name for path in (cache_dir() / "kernels").glob("*") if path.suffix != ".lock")


# --- compiled once --------------------------------------------------------------------------------------


def test_compiled_at_first_use_and_found_again(nvcc: Nvcc) -> None:
    path = cubin_path(SOURCE)
    assert path.parent == cache_dir() / "kernels"
    assert path.stat().st_size == MEBIBYTE
    assert cubin_path(SOURCE) == path
    (call,) = nvcc.calls
    for word in ("-DDG_D=float", "-DDG_TILE_M=128", "-gencode=arch=compute_90a,code=sm_90a", "-DNDEBUG", "-std=c++17"):
        assert word in call.split()
    assert call.endswith("distgemm/gemm/kernels/gemm.cu")
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest.pop("seconds") >= 0.2
    assert manifest == {
        "kernel": "a kernel",
        "arch": "90a",
        "macros": {"DG_D": "float", "DG_TILE_M": "128"},
        "compiler": "release 13.0, V13.0.48",
        "cutlass": importlib.metadata.version("nvidia-cutlass"),
        "sha256": "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58",
    }
    assert cubins() == sorted([path.name, path.with_suffix(".json").name])


CHILD = """
import sys, time
from pathlib import Path
from distgemm.gemm.nvcc import KernelSource, cubin_path
source = KernelSource("a kernel", (("DG_D", "float"), ("DG_TILE_M", "128")), "90a")
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.001)
start = time.process_time()
path = cubin_path(source)
print(time.process_time() - start, path)
"""


def children(go: Path, count: int) -> list[tuple[float, str]]:
    """Seconds of CPU time and path from each of so many processes that ask for the cubin at once."""
    go.unlink(missing_ok=True)
    processes = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(go)], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    found = []
    for process in processes:
        seconds, path = process.communicate(timeout=60)[0].split()
        assert process.returncode == 0
        found.append((float(seconds), path))
    return found


def test_eight_processes_at_once_compile_once(nvcc: Nvcc, tmp_path: Path) -> None:
    paths = {path for _, path in children(tmp_path / "go", 8)}
    assert len(nvcc.calls) == 1
    assert paths == {str(cubin_path(SOURCE))}


def test_later_processes_find_it_in_milliseconds(nvcc: Nvcc, tmp_path: Path) -> None:
    cubin_path(SOURCE)
    # CPU time, and the least of several: other programs use the processor and its caches.
    best = min(children(tmp_path / "go", 1)[0][0] for _ in range(5))
    assert best < 0.1
    assert len(nvcc.calls) == 1


def test_threads_compile_once(nvcc: Nvcc) -> None:
    sources = [replace(SOURCE, name=f"the same {number}") for number in range(8)]
    assert len(set(build(sources, jobs=8))) == 1
    assert len(nvcc.calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"macros": (("DG_D", "float"), ("DG_TILE_M", "64"))},
        {"macros": (("DG_D", "float"),)},
        {"macros": (("DG_TILE_M", "128"), ("DG_D", "float"))},
        {"arch": "80"},
        {"file": "sum.cu"},
    ],
)
def test_another_source_is_another_cubin(nvcc: Nvcc, change: dict[str, object]) -> None:
    other = replace(SOURCE, **change)  # type: ignore[arg-type]
    assert cubin_path(other) != cubin_path(SOURCE)
    assert len(nvcc.calls) == 2
    assert cubin_path(replace(SOURCE, name="a name says nothing")) == cubin_path(SOURCE)
    assert len(nvcc.calls) == 2


def test_the_name_depends_on_all_that_the_cubin_is_made_from(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [cubin_path(SOURCE)]
    nvcc.set(release="13.1")
    paths.append(cubin_path(SOURCE))
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-lineinfo")),
        lambda patch: patch.setattr(compiler, "read_source", lambda path: path.read_text() + "// changed"),
        lambda patch: patch.setattr(importlib.metadata, "version", lambda name: "9.9"),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            paths.append(cubin_path(SOURCE))
    assert len(set(paths)) == 5 == len(nvcc.calls)
    assert cubin_path(SOURCE) == paths[1]
    assert len(nvcc.calls) == 5


def test_the_name_depends_on_included_headers(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels that take scales of blocks include this one."""
    eighths = MatrixSpec("float8_e4m3fn", 256, 256)
    plain = GemmSpec(eighths, eighths, MatrixSpec("bfloat16", 256, 256))
    scaled = replace(plain, scale_a="1x128", scale_b="128x128")
    tile = GemmConfig.parse("128x128x128_2x1_cooperative")

    def names() -> list[Path]:
        return [cubin_path(kernel_source(spec, tile, "90a")) for spec in (plain, scaled)]

    def changed(path: Path) -> str:
        return path.read_text() + "// changed" * (path.name == "blockwise.cuh")

    before = names()
    monkeypatch.setattr(compiler, "read_source", changed)
    assert [one == other for one, other in zip(before, names(), strict=True)] == [True, False]
    assert len(nvcc.calls) == 3


# --- damaged cubins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [MEBIBYTE // 2, 0, MEBIBYTE - 1])
def test_a_truncated_cubin_is_compiled_again(nvcc: Nvcc, kept: int) -> None:
    path = cubin_path(SOURCE)
    path.write_bytes(path.read_bytes()[:kept])
    assert missing([SOURCE]) == [SOURCE]
    assert cubin_path(SOURCE) == path
    assert path.stat().st_size == MEBIBYTE
    assert len(nvcc.calls) == 2


@pytest.mark.parametrize("gone", [".cubin", ".json"])
def test_a_cubin_or_manifest_that_is_gone(nvcc: Nvcc, gone: str) -> None:
    path = cubin_path(SOURCE)
    path.with_suffix(gone).unlink()
    assert cubin_path(SOURCE) == path
    assert path.exists() and path.with_suffix(".json").exists()
    assert len(nvcc.calls) == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff\xfe\x00", b"{", b"[]", b"{}", b'"text"', b"7", b"null", b'{"sha256": null}', b"[" * 100_000],
)
def test_a_garbage_manifest(nvcc: Nvcc, garbage: bytes) -> None:
    path = cubin_path(SOURCE)
    path.with_suffix(".json").write_bytes(garbage)
    assert [manifest for _, manifest in cached()] == [None]
    assert cubin_path(SOURCE) == path
    assert json.loads(path.with_suffix(".json").read_text())["kernel"] == "a kernel"
    assert len(nvcc.calls) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("lacking", compiler.MANIFEST)
def test_a_manifest_that_lacks_an_entry(nvcc: Nvcc, lacking: str) -> None:
    """The name of a wrong type counts as lacking."""
    path = cubin_path(SOURCE)
    manifest = json.loads(path.with_suffix(".json").read_text())
    for changed in ({name: value for name, value in manifest.items() if name != lacking}, manifest | {lacking: None}):
        path.with_suffix(".json").write_text(json.dumps(changed))
        assert [found for _, found in cached()] == [None]
        assert missing([SOURCE]) == [SOURCE]
    assert cubin_path(SOURCE) == path
    assert [found and found["kernel"] for _, found in cached()] == ["a kernel"]


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_fifo_in_the_place_of_a_file(nvcc: Nvcc, suffix: str) -> None:
    """Nothing waits for somebody to write it."""
    path = cubin_path(SOURCE)
    path.with_suffix(suffix).unlink()
    os.mkfifo(path.with_suffix(suffix))
    assert [found for _, found in cached()] == [None]
    assert cubin_path(SOURCE) == path
    assert path.with_suffix(suffix).is_file()


def test_a_killed_compiler_leaves_no_cubin(nvcc: Nvcc, tmp_path: Path) -> None:
    nvcc.set(does='printf half >"$2"; exec sleep 3')
    go = tmp_path / "go"
    go.touch()
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(go)], start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while not nvcc.calls:
            assert time.monotonic() < deadline, "the compiler has not been called"
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    nvcc.set()
    assert missing([SOURCE]) == [SOURCE]
    (left,) = (cache_dir() / "kernels").glob("*.building")
    # Any build removes what is left, also of another kernel.
    path = cubin_path(replace(SOURCE, arch="80"))
    assert not left.exists()
    assert cubins() == sorted([path.name, path.with_suffix(".json").name])
    assert cubin_path(SOURCE).stat().st_size == MEBIBYTE
    assert len(nvcc.calls) == 3


def test_ctrl_c_ends_the_compilers(nvcc: Nvcc) -> None:
    nvcc.set(does='echo $$ >>"$0.pids"; exec sleep 60')
    sources = [replace(SOURCE, arch=arch) for arch in ("80", "86", "90a")]
    child = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        f"from distgemm.gemm.nvcc import KernelSource, build; build({sources!r}, jobs=2, progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    pids = nvcc.path.with_name("nvcc.pids")
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline, "the compilers have not been called"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        for pid in pids.read_text().split():  # those that still run
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
    assert b"KeyboardInterrupt" in errors and not cubins()
    assert len(nvcc.calls) == 2  # and not the third one


def test_no_wait_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python loses a signal that comes just before a wait for a lock, until that wait ends."""
    timeouts = []

    def waited(futures: list[Future[None]], timeout: float) -> object:
        timeouts.append(timeout)
        return wait(futures, timeout)

    monkeypatch.setattr(compiler, "wait", waited)
    with ThreadPoolExecutor(1) as pool:
        compiler.wait_for([pool.submit(time.sleep, 0.7)])
    assert len(timeouts) >= 2 and max(timeouts) <= 0.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_outlives_the_process_that_started_it(nvcc: Nvcc, number: signal.Signals) -> None:
    """Nor does what the compiler has started. All of them hold a pipe, whose end is read when none is left."""
    nvcc.set(does='exec 9>"$0.alive"; sleep 20 & sleep 0.3; echo begun >&9; wait')
    os.mkfifo(nvcc.path.with_name("nvcc.alive"))
    alive = os.open(nvcc.path.with_name("nvcc.alive"), os.O_RDONLY | os.O_NONBLOCK)
    child = f"from distgemm.gemm.nvcc import cubin_path, KernelSource; cubin_path({SOURCE!r})"
    process = subprocess.Popen([sys.executable, "-c", child])
    try:
        assert select.select([alive], [], [], 60)[0] and os.read(alive, 6) == b"begun\n"
        process.send_signal(number)
        assert process.wait(30) == -number
        assert select.select([alive], [], [], 10)[0] and os.read(alive, 1) == b"", "something is left"
    finally:
        process.kill()
        os.close(alive)


def test_a_cubin_without_a_manifest_is_removed_by_the_next_build(nvcc: Nvcc) -> None:
    """It is left by a process that was killed between the two files. Its source may never be asked for again."""
    left = cubin_path(SOURCE)
    left.with_suffix(".json").unlink()
    other = cubin_path(replace(SOURCE, arch="80"))
    assert cubins() == sorted([other.name, other.with_suffix(".json").name])


def test_what_another_process_builds_is_not_removed(nvcc: Nvcc) -> None:
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True)
    built = kernels / f"abc-1.{compiler.HOST}.x.building"
    built.mkdir()
    with FileLock(kernels / "abc-1.lock"):
        cubin_path(SOURCE)
        assert built.exists()
    cubin_path(replace(SOURCE, arch="80"))
    assert not built.exists()


def test_what_another_machine_builds_is_not_removed(nvcc: Nvcc) -> None:
    """Its lock may not be seen here, as on Lustre with localflock. After half an hour, its compiler has ended."""
    built = cache_dir() / "kernels" / "abc-1.another-machine.x.building"
    built.mkdir(parents=True)
    cubin_path(SOURCE)
    assert built.exists()
    os.utime(built, (time.time() - 2000, time.time() - 2000))
    cubin_path(replace(SOURCE, arch="80"))
    assert not built.exists()


def test_what_cannot_be_removed_stays(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a folder of another user, or one on NFS that a compiler still writes."""
    left = cache_dir() / "kernels" / f"abc-1.{compiler.HOST}.x.building"
    left.mkdir(parents=True)
    rmtree = shutil.rmtree

    def busy(path: Path, *others: object, **more: object) -> None:
        if Path(path) == left:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmtree(path, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler.shutil, "rmtree", busy)
    assert cubin_path(SOURCE).is_file() and left.exists()


def test_a_file_system_without_locks(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock before 3.21 raises this; later ones lock in another way."""

    def acquire(*given: object, **more: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    for make in (lambda: cubin_path(SOURCE), lambda: CACHE.record("a GPU", {})):
        with pytest.raises(CacheError, match="does not appear to support flock; set DISTGEMM_CACHE_DIR to a folder"):
            make()


# --- owners and modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
@pytest.mark.parametrize("of", ["folder", "cubin"])
def test_a_cubin_that_others_can_write_is_refused(nvcc: Nvcc, of: str, mode: int) -> None:
    path = cubin_path(SOURCE)
    changed = path if of == "cubin" else path.parent
    before = changed.stat().st_mode
    changed.chmod(mode)
    with pytest.raises(CacheError, match=rf"can write {changed} \(mode {mode:o}\), so it is not loaded; .*chmod go-w"):
        cubin_path(SOURCE)
    changed.chmod(before)
    assert cubin_path(SOURCE) == path
    assert len(nvcc.calls) == 1


def test_nothing_is_compiled_into_a_folder_that_others_can_write(nvcc: Nvcc) -> None:
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    for call in (lambda: cubin_path(SOURCE), lambda: build([SOURCE])):
        with pytest.raises(CacheError, match=f"can write {kernels}"):
            call()
    assert nvcc.calls == []


@pytest.mark.parametrize("of", ["folder", "cubin"])
def test_a_cubin_of_another_user_is_refused(nvcc: Nvcc, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cubin_path(SOURCE)
    changed = path if of == "cubin" else path.parent
    stat, owner = Path.stat, os.geteuid() + 1

    def with_owner(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        return os.stat_result([*found[:4], owner, *found[5:]]) if self == changed else found

    monkeypatch.setattr(Path, "stat", with_owner)
    with pytest.raises(CacheError, match=f"{changed} belongs to the user with number {owner}, and not to this user"):
        cubin_path(SOURCE)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    if of == "folder":
        path.chmod(0o755)
    others = {"folder": path, "cubin": path.parent}[of]
    if others.stat().st_uid != 0:  # root's files are everybody's
        with pytest.raises(CacheError, match=f"{others} belongs to the user"):
            cubin_path(SOURCE)
    else:
        assert cubin_path(SOURCE) == path


def test_a_link_is_followed_to_the_folder_that_holds_the_cubin(nvcc: Nvcc, tmp_path: Path) -> None:
    path = cubin_path(SOURCE)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    moved = open_to_all / path.name
    shutil.move(path, moved)
    path.symlink_to(moved)
    with pytest.raises(CacheError, match=f"can write {open_to_all}"):
        cubin_path(SOURCE)


def test_a_loose_umask_leaves_folder_and_cubin_to_their_owner(nvcc: Nvcc) -> None:
    before = os.umask(0)
    try:
        path = cubin_path(SOURCE)
    finally:
        os.umask(before)
    assert [oct(each.stat().st_mode & 0o777) for each in (path.parent, path)] == ["0o755", "0o644"]


# --- failures -------------------------------------------------------------------------------------------


def test_an_error_has_the_compilers_output(nvcc: Nvcc) -> None:
    says = 'echo "kernel.cu(3): warning: unused" >&2; echo "kernel.cu(7): error: no instance of tile" >&2'
    nvcc.set(does=f'{says}; printf half >"$2"; exit 3')
    with pytest.raises(CompileError) as raised:
        cubin_path(SOURCE)
    text = str(raised.value)
    assert text.startswith(f"{nvcc.path} -O3 ")
    assert "failed with exit status 3:\nkernel.cu(7): error: no instance of tile" in text
    assert "warning" not in text
    assert cubins() == []
    nvcc.set()
    assert cubin_path(SOURCE).exists()


def test_a_compiler_that_is_too_old(nvcc: Nvcc) -> None:
    nvcc.set(does="echo \"nvcc fatal   : Unsupported gpu architecture 'compute_90a'\"; exit 1", release="11.5")
    with pytest.raises(CompileError, match=r"'compute_90a'\nrelease 11\.5.* is too old for sm_90a; .*DISTGEMM_NVCC"):
        cubin_path(SOURCE)


def test_a_failure_with_warnings_only_shows_them(nvcc: Nvcc) -> None:
    nvcc.set(does='echo "warning treated as error" >&2; exit 1')
    with pytest.raises(CompileError, match="warning treated as error"):
        cubin_path(SOURCE)


@pytest.mark.parametrize("number", ["C7510", "C7514"])
def test_serialised_wgmma_is_a_failure(nvcc: Nvcc, number: str) -> None:
    says = f"ptxas info : ({number}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    nvcc.set(does=f'echo "{says}"; {WRITES}')
    with pytest.raises(CompileError, match="ptxas serialised wgmma in a kernel") as raised:
        cubin_path(SOURCE)
    assert says in str(raised.value)
    assert cubins() == []


def test_a_compiler_that_writes_nothing(nvcc: Nvcc) -> None:
    nvcc.set(does='echo "nothing to do"')
    with pytest.raises(CompileError, match="ended with exit status 0 and wrote no cubin:\nnothing to do"):
        cubin_path(SOURCE)
    assert cubins() == []


def test_a_compiler_that_does_not_end(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs that it started do not remain, either."""
    nvcc.set(does=f'(sleep 60; touch "{tmp_path}/remained") & echo $! >"{tmp_path}/child"; wait')
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 1.0)
    start = time.monotonic()
    with pytest.raises(CompileError, match="did not end within 1 s, and was stopped"):
        cubin_path(SOURCE)
    assert time.monotonic() - start < 10
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    deadline = time.monotonic() + 10
    while child.exists() and "Z (zombie)" not in child.read_text():
        assert time.monotonic() < deadline, "a program of the compiler still runs"
        time.sleep(0.01)
    assert cubins() == []


def test_a_compiler_that_does_not_say_its_version(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc.path.write_text("#!/bin/sh\nsleep 60\n")
    compiler.compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "VERSION_TIMEOUT_S", 0.5)
    with pytest.raises(CompilerNotFoundError, match=r"does not run as a compiler: .* timed out after 0.5 seconds"):
        cubin_path(SOURCE)


def test_a_lock_that_another_process_keeps(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cubin_path(SOURCE)
    path.unlink()
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.5)
    lock = path.with_suffix(".lock")
    with FileLock(lock), pytest.raises(CompileError, match=f"another process has been compiling it .* holds {lock}"):
        cubin_path(SOURCE)


def test_a_full_disk(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    with pytest.raises(CacheError, match=r"cannot be written: .*No space left on device; set DISTGEMM_CACHE_DIR"):
        cubin_path(SOURCE)


def test_a_failure_among_several(nvcc: Nvcc) -> None:
    sources = [replace(SOURCE, macros=(("DG_TILE_M", str(tile)),)) for tile in (64, 128, 256)]
    nvcc.set(does=f'grep -q "TILE_M=128" "{nvcc.log}" && exit 1; {WRITES}')
    with pytest.raises(CompileError, match="-DDG_TILE_M=128"):
        build(sources, jobs=1)
    assert missing(sources) == sources[1:]


# --- several at a time ----------------------------------------------------------------------------------


def test_build_compiles_what_is_missing(nvcc: Nvcc, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [replace(SOURCE, macros=(("DG_TILE_M", str(tile)),)) for tile in (64, 128, 256)]
    cubin_path(sources[1])
    assert missing(sources) == [sources[0], sources[2]]
    capsys.readouterr()
    paths = build([*sources, sources[0]], jobs=2)
    assert "compiling kernels" in capsys.readouterr().err
    assert len(paths) == 4 and paths[0] == paths[3]
    assert len(nvcc.calls) == 3
    assert missing(sources) == []
    assert paths[:3] == [cubin_path(source) for source in sources]
    build(sources)
    assert capsys.readouterr().err == ""
    assert len(nvcc.calls) == 3
    assert {(path, manifest and manifest["macros"]["DG_TILE_M"]) for path, manifest in cached()} == set(
        zip(paths, ("64", "128", "256"), strict=False)
    )


def test_the_first_kernels_are_compiled_while_others_are_listed(nvcc: Nvcc) -> None:
    first, second = (replace(SOURCE, macros=(("DG_TILE_M", str(tile)),)) for tile in (64, 128))

    def listed() -> Iterator[KernelSource]:
        yield first
        deadline = time.monotonic() + 20
        while not is_there(first):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield second

    assert len(build(listed(), jobs=1)) == len(nvcc.calls) == 2


def test_an_error_of_the_listing_ends_the_build(nvcc: Nvcc) -> None:
    def listed() -> Iterator[KernelSource]:
        yield SOURCE
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build(listed())


@pytest.mark.parametrize("usable", [1, 3])
def test_as_many_compilers_as_cores(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, usable: int) -> None:
    """Not as many as the machine has, of which this process may use only some."""
    monkeypatch.setattr(compiler, "cores", lambda: usable)
    jobs = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            jobs.append(count)
            super().__init__(count)

    monkeypatch.setattr(compiler, "ThreadPoolExecutor", Pool)
    build([SOURCE], progress=False)
    compiler.build_together([replace(SOURCE, arch="80")], 0, 2)
    assert jobs == [usable, max(1, usable // 2)]


# --- the driver -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "driver", "loads"),
    [
        ("13.0", None, True),
        ("13.0", "13.0", True),
        ("13.1", "13.0", True),
        ("12.9", "13.0", True),
        ("13.0", "12.8", False),
        ("13.0", "12.9", False),
        ("14.0", "13.2", False),
    ],
)
def test_a_compiler_that_is_too_new_for_the_driver(
    nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, release: str, driver: str | None, loads: bool
) -> None:
    """Within a major version, an older driver loads kernels of a newer compiler. Without one, nothing is loaded."""
    nvcc.set(release=release)
    monkeypatch.setattr(compiler, "driver_cuda", lambda: driver)
    if loads:
        assert cubin_path(SOURCE).exists()
        return
    for call in (lambda: cubin_path(SOURCE), lambda: build([SOURCE])):
        with pytest.raises(CompilerNotFoundError) as raised:
            call()
        assert str(raised.value) == (
            f"{nvcc.path} is too new: the driver serves CUDA up to {driver}, and does not load kernels that nvcc of "
            f"release {release}, V{release}.48 compiles; update the driver, or install an older nvcc and set "
            "DISTGEMM_NVCC to its path"
        )
    assert nvcc.calls == []


def test_without_a_compiler_a_cubin_that_is_too_new_for_the_driver(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("DISTGEMM_NVCC", str(put(tmp_path / "nvcc-elsewhere")))
        elsewhere.setenv("PATH", os.defpath)
        path = cubin_path(SOURCE)
    monkeypatch.setattr(compiler, "driver_cuda", lambda: "12.8")
    with pytest.raises(CompilerNotFoundError, match=r"a kernel is compiled, but the driver serves CUDA up to 12.8"):
        cubin_path(SOURCE)
    monkeypatch.setattr(compiler, "driver_cuda", lambda: "13.0")
    assert cubin_path(SOURCE) == path


def test_the_driver_of_this_machine() -> None:
    has_driver = Path("/proc/driver/nvidia/version").exists()
    found = compiler.driver_cuda()
    assert (found is None) is not has_driver
    assert found is None or re.fullmatch(r"\d+\.\d", found)


# --- the compiler ---------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No compiler in any place where one is looked for; the folder stands for the site-packages."""
    compiler.cutlass_include()  # is found now, and stays known
    monkeypatch.setattr(compiler, "driver_cuda", lambda: None)
    for name in ("DISTGEMM_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(compiler, "TOOLKIT", str(tmp_path / "toolkit"))
    packages = tmp_path / "packages"
    monkeypatch.setattr(
        compiler.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(packages / name)]}),
    )
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    return packages


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NVCC.format(does=WRITES, release="13.0", log="/dev/null"))
    path.chmod(0o755)
    return path


def test_where_nvcc_is_looked_for(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_nvcc() is None
    put(nowhere / "nvidia" / "cu12" / "bin" / "nvcc")
    newest = put(nowhere / "nvidia" / "cu13" / "bin" / "nvcc")
    assert find_nvcc() == newest
    toolkit = put(tmp_path / "toolkit" / "bin" / "nvcc")
    assert find_nvcc() == toolkit
    for name in ("CUDA_PATH", "CUDA_HOME"):
        home = put(tmp_path / name / "bin" / "nvcc")
        monkeypatch.setenv(name, str(tmp_path / name))
        assert find_nvcc() == home
    on_path = put(tmp_path / "bin" / "nvcc")
    assert find_nvcc() == on_path
    chosen = put(tmp_path / "mine" / "nvcc-13")
    monkeypatch.setenv("DISTGEMM_NVCC", str(chosen))
    assert find_nvcc() == chosen


def test_without_a_compiler_the_error_says_what_to_install(nowhere: Path) -> None:
    for call in (lambda: cubin_path(SOURCE), lambda: build([SOURCE])):
        with pytest.raises(CompilerNotFoundError) as raised:
            call()
        text = str(raised.value)
        assert text.startswith("kernel a kernel is not compiled yet, no pack has it, and nvcc was not found. ")
        for advice in ("'distgemm[nvcc]'", "CUDA toolkit", "DISTGEMM_NVCC", "distgemm build", "provider='cublas'"):
            assert advice in text


def test_without_a_compiler_cubins_from_elsewhere_are_used(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("DISTGEMM_NVCC", str(put(tmp_path / "nvcc-elsewhere")))
        elsewhere.setenv("PATH", os.defpath)
        path = cubin_path(SOURCE)
    assert find_nvcc() is None
    assert cubin_path(SOURCE) == path
    assert build([SOURCE]) == [path]
    with pytest.raises(CompilerNotFoundError):
        cubin_path(replace(SOURCE, arch="80"))
    path.write_bytes(b"")
    with pytest.raises(CompilerNotFoundError, match="not compiled yet"):
        cubin_path(SOURCE)


@pytest.mark.parametrize("chosen", ["/no/such/nvcc", "nvcc", "/tmp"])
def test_a_chosen_compiler_that_is_not_there(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    cubin_path(SOURCE)
    monkeypatch.setenv("DISTGEMM_NVCC", chosen)
    with pytest.raises(CompilerNotFoundError, match=f"DISTGEMM_NVCC is '{chosen}', where there is no file"):
        cubin_path(SOURCE)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\nexit 5\n", "does not run as a compiler: .*exit status 5"),
        ("#!/bin/sh\necho gcc 12\n", "does not run as nvcc: asked for its version, it says 'gcc 12"),
        ("", "does not run as a compiler: .*Exec format error"),
    ],
)
def test_a_chosen_file_that_is_no_compiler(
    nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, says: str
) -> None:
    path = tmp_path / "other"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("DISTGEMM_NVCC", str(path))
    with pytest.raises(CompilerNotFoundError, match=f"{path} {says}"):
        cubin_path(SOURCE)


# --- the cache folder and CUTLASS -----------------------------------------------------------------------


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTGEMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/distgemm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_dir() == Path("/caches/distgemm")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")  # as no shell expands it in a container's environment
    assert cache_dir() == Path("/home/somebody/caches/distgemm")
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", "/kernels")
    assert cache_dir() == Path("/kernels")
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", "~/kernels")
    assert cache_dir() == Path("/home/somebody/kernels")
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", "~nobody-of-this-name/kernels")
    with pytest.raises(CacheError, match="no home folder"):
        cache_dir()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DISTGEMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(CacheError, match=r"this user has no home folder .*; set DISTGEMM_CACHE_DIR to a folder"):
        cache_dir()


def test_cutlass_lies_in_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    include = compiler.cutlass_include()
    assert (include / "cutlass" / "gemm" / "collective" / "collective_builder.hpp").is_file()
    compiler.cutlass_include.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CompilerNotFoundError, match="headers are missing; install them with: pip install nvidia-"):
            compiler.cutlass_include()
