"""Packs of compiled kernels: written as a wheel, installed, and found before anything is compiled."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from distgemm.cli import doctor
from distgemm.cli import main as cli
from distgemm.cli.build import SCOPES
from distgemm.gemm import nvcc as compiler
from distgemm.gemm import packs
from distgemm.gemm.nvcc import (
    CompilerNotFoundError,
    build,
    cached,
    cubin_path,
    find_nvcc,
    is_there,
    missing,
    origin,
    usable_pack,
)
from distgemm.gemm.packs import PackError
from distgemm.measure.machine_facts import look
from distgemm.tune.kernels import Scope
from tests.unit.test_gemm_kernel_cache import AT_ONCE, SOURCE, Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture

SOURCES = [replace(SOURCE, macros=(("DG_TILE_M", str(tile)),), name=f"kernel {tile}") for tile in range(20)]
"""More than a block has."""
PARTS = Path("distgemm_kernels")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of SOURCES."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        other = Nvcc(folder)
        other.set(AT_ONCE, release="12.9")
        patch.setenv("DISTGEMM_NVCC", str(other.path))
        patch.setenv("DISTGEMM_CACHE_DIR", str(folder / "cache"))
        patch.setattr(compiler, "driver_cuda", lambda: None)
        build(SOURCES, progress=False)
        assert len(other.calls) == len(SOURCES)
        return compiler.pack_cubins(SOURCES, folder / "dist", "0.1")


@pytest.fixture
def wheel(packed: Path, nvcc: Nvcc) -> Path:
    """The pack. The cache is empty, and the compiler fails."""
    nvcc.set("exit 1", release="13.0")
    return packed


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the installed package."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    compiler._say_not_packed.cache_clear()
    yield site / PARTS
    importlib.invalidate_caches()


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = folder / packs.INDEX
    found = json.loads(index.read_text())
    change(found)
    index.write_text(json.dumps(found))
    os.utime(index, (1, os.stat(index).st_mtime + 1))


# --- found ----------------------------------------------------------------------------------------------


def test_kernels_come_from_the_pack(installed: Path, nvcc: Nvcc) -> None:
    """Before anything is compiled, whatever compiler there is, with its own manifest."""
    assert not missing(SOURCES) and {origin(source) for source in SOURCES} == {"packed"}
    paths = build(SOURCES, progress=False)
    assert not nvcc.calls
    assert len({path.read_text() for path in paths}) == len(SOURCES) and cubin_path(SOURCES[0]) == paths[0]
    manifests = dict(cached())
    assert set(manifests) == set(paths)
    pack, why = usable_pack()
    assert pack is not None and not why
    for source, path in zip(SOURCES, paths, strict=True):
        manifest = manifests[path]
        assert manifest is not None and path.stat().st_mode & 0o777 == 0o644
        assert manifest["kernel"] == source.name and manifest["pack"] == str(pack)
        assert manifest["compiler"].startswith("release 12.9")
    assert len(pack.cubins) == len(SOURCES) and len({each.block for each in pack.cubins.values()}) == 2


def test_without_a_compiler_and_without_cutlass(
    installed: Path, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    monkeypatch.setattr(compiler.importlib.metadata, "version", lambda name: pytest.fail(f"asks for {name}"))
    assert cubin_path(SOURCES[3]).is_file()
    monkeypatch.undo()


def test_what_the_pack_lacks_is_compiled(installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(SOURCE, arch="80")
    nvcc.set()
    assert missing([*SOURCES, other]) == [other] and origin(other) == "missing"
    build([*SOURCES, other], progress=False)
    assert origin(other) == "compiled" and not caplog.messages


def test_the_error_without_a_compiler_names_the_pack(
    installed: Path, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    with pytest.raises(CompilerNotFoundError, match=r"is not among those of distgemm-kernels 0\.1\+cu12"):
        cubin_path(replace(SOURCE, arch="80"))


def test_the_error_without_cutlass_names_the_pack(installed: Path, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiler.importlib.metadata, "version", version)
    other = replace(SOURCE, arch="80")
    with pytest.raises(CompilerNotFoundError, match=r"among those of distgemm-kernels .* pip install nvidia-cutlass"):
        cubin_path(other)
    assert not is_there(other) and is_there(SOURCES[0])


def test_the_switch(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGEMM_PACK", "0")
    assert usable_pack() == (None, "") and missing(SOURCES) == SOURCES


# --- refused --------------------------------------------------------------------------------------------


def refused_for(installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """The pack is not used for this reason; a kernel is compiled, with one warning; doctor says it, too."""
    pack, reason = usable_pack()
    assert pack is None and re.search(why, reason), reason
    nvcc.set()
    compiler._say_not_packed.cache_clear()
    calls = len(nvcc.calls)
    with caplog.at_level(logging.WARNING, "distgemm"):
        for source in SOURCES[:2]:
            cubin_path(source)
    assert len(nvcc.calls) == calls + 2 and origin(SOURCES[0]) == "compiled"
    assert [re.search(why, text) is not None for text in caplog.messages] == [True]
    (check,) = [check for check in doctor.checks(look()) if check.name == "kernel pack"]
    assert check.status == "fix" and re.search(why, check.detail) and "distgemm-kernels" in check.fix


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("sources", "f00", r"hash f00, and this distgemm has .* version ends in [0-9a-f]{12}"),
        ("format", 1, r"has the format 1, and this distgemm reads 2"),
        ("cubins", 3, r"is damaged"),
    ],
)
def test_a_pack_for_something_else(
    name: str, value: object, why: str, installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture
) -> None:
    change_index(installed, lambda index: index.update({name: value}))
    refused_for(installed, nvcc, caplog, why)
    assert str(installed) in usable_pack()[1]  # there may be another one, which this one hides


def test_an_older_driver(
    installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "driver_cuda", lambda: "12.1")
    assert usable_pack()[0] is not None  # a driver of the same major version loads it
    monkeypatch.setattr(compiler, "driver_cuda", lambda: "11.8")
    pack, why = usable_pack()
    assert pack is None and "the driver serves CUDA up to 11.8" in why and "release 12.9" in why


@pytest.mark.parametrize("name", [".", packs.INDEX, "kernels_01.xz"])
def test_a_pack_that_others_can_write(name: str, installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture) -> None:
    (installed / name).chmod(0o777)
    packs._read_index.cache_clear()
    refused_for(
        installed, nvcc, caplog, f"users other than its owner can write .* chmod -R go-w {installed}, or install"
    )


def test_a_missing_block(installed: Path, nvcc: Nvcc, caplog: pytest.LogCaptureFixture) -> None:
    (installed / "kernels_01.xz").unlink()
    packs._read_index.cache_clear()
    refused_for(installed, nvcc, caplog, r"kernels_01\.xz is missing; install it again: pip install --force")


def test_a_damaged_cubin_is_not_loaded(installed: Path) -> None:
    """Neither one with another content, nor one of a block that is no archive."""
    pack, _ = usable_pack()
    assert pack is not None
    one, other = list(pack.cubins.values())[:: len(SOURCES) - 1]
    assert one.block != other.block
    content = bytearray(packs.lzma.decompress((installed / one.block).read_bytes()))
    content[one.offset] ^= 1
    (installed / one.block).write_bytes(packs.lzma.compress(bytes(content)))
    (installed / other.block).write_bytes(b"no archive")
    packs._block.cache_clear()
    by_name = {source.name: source for source in SOURCES}
    for each, why in ((one, "does not have its checksum"), (other, "is damaged")):
        with pytest.raises(PackError, match=f"{why}.*--force-reinstall distgemm-kernels==0.1"):
            cubin_path(by_name[each.manifest["kernel"]])
    assert not list(cached())


# --- the wheel ------------------------------------------------------------------------------------------


def test_the_wheel_is_for_any_host_and_for_these_sources(wheel: Path, nvcc: Nvcc, tmp_path: Path) -> None:
    digest = compiler.sources_hash()
    assert wheel.name == f"distgemm_kernels-0.1+cu12.sm90a.{digest}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        index = json.loads(content.read(f"{PARTS}/{packs.INDEX}"))
        (licence,) = [content.read(name) for name in content.namelist() if "/licenses/" in name]
    assert index["sources"] == digest and index["compiler"].startswith("release 12.9")
    # CUTLASS's licence wants its notice beside what is compiled from it.
    assert b"Copyright" in licence and b"NVIDIA" in licence and b"Redistributions in binary form" in licence


def test_the_same_cubins_give_the_same_bytes(nvcc: Nvcc, tmp_path: Path) -> None:
    nvcc.set(AT_ONCE)
    build(SOURCES, progress=False)
    one, other = (
        compiler.pack_cubins(order, tmp_path / str(number), "0.1").read_bytes()
        for number, order in enumerate((SOURCES, SOURCES[::-1]))
    )
    assert one == other


def test_what_is_no_pack(nvcc: Nvcc, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one kernel"):
        compiler.pack_cubins([], tmp_path, "0.1")
    with pytest.raises(ValueError, match="kernel a kernel is not compiled"):
        compiler.pack_cubins([SOURCE], tmp_path, "0.1")
    mixed = [SOURCE, replace(SOURCE, arch="80")]
    build(mixed, progress=False)
    with pytest.raises(ValueError, match="the same arch, got 80 and 90a"):
        compiler.pack_cubins(mixed, tmp_path, "0.1")


def test_a_pack_that_cannot_be_written_leaves_the_one_before(
    nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build([SOURCE], progress=False)
    path = compiler.pack_cubins([SOURCE], tmp_path / "dist", "0.1")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        compiler.pack_cubins([SOURCE], path.parent, "0.1")
    assert [*path.parent.iterdir()] == [path] and path.read_bytes() == before


def test_the_command(nvcc: Nvcc, tmp_path: Path) -> None:
    chosen = ["--config", "128x128x64_2x1_pingpong", "--terms", "none"]
    done = CliRunner().invoke(cli.app, ["build", "--pack", str(tmp_path / "dist"), *chosen], env={"DISTGEMM_PACK": ""})
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "dist").iterdir()
    assert f"{path}: 1 kernels, " in done.stdout and path.name.startswith("distgemm_kernels-0.1.0+cu13.sm90a.")
    assert get_args(Scope) == SCOPES
    done = CliRunner().invoke(cli.app, ["build", "--pack", str(tmp_path), "--arch", "80"], env={"DISTGEMM_PACK": ""})
    assert done.exit_code == 2 and "--arch 80" in done.stderr


# --- end to end -----------------------------------------------------------------------------------------

CHILD = """
import json
from distgemm.gemm import nvcc
from distgemm.gemm.cubins import read_facts
from distgemm.gemm.target import compiling_for
from distgemm.runtime.cuda.flag_kernel import flag_source
nvcc.TOOLKIT = "/nowhere"
find = nvcc.importlib.util.find_spec
nvcc.importlib.util.find_spec = lambda name: None if name == "nvidia" else find(name)
assert nvcc.find_nvcc() is None
with compiling_for("90a"):
    source = flag_source()
path = nvcc.cubin_path(source)
print(json.dumps([nvcc.origin(source), str(path), read_facts(path.read_bytes())["size"].value]))
"""


@pytest.mark.sample(0)  # a compiler runs for some seconds
def test_a_real_pack_without_a_compiler(tmp_path: Path) -> None:
    """A kernel is compiled and packed; pip installs the wheel; another process finds it, and has no compiler."""
    if find_nvcc() is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    from distgemm.gemm.flags import FlagOps
    from distgemm.gemm.target import compiling_for
    from distgemm.runtime.cuda.flag_kernel import flag_source

    with compiling_for("90a"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
        build([flag_source()], progress=False)
        wheel = compiler.pack_cubins([flag_source()], tmp_path / "dist", "0.1")
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    paths = [str(site), str(Path(__file__).parents[2])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "DISTGEMM_CACHE_DIR": str(tmp_path / "other"), "PATH": "/bin"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found, path, size = json.loads(done.stdout)
    assert found == "packed" and Path(path).parent == tmp_path / "other" / "kernels"
    assert size == ctypes.sizeof(FlagOps)
