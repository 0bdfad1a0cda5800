"""Packs of compiled kernels: the wheel ``distgemm-kernels``, from which kernels are taken before any is compiled.

A pack is the package ``distgemm_kernels``. Its ``pack.json`` says what it is for, and has the manifest of each cubin,
with its checksum. Cubins are alike, so they are compressed in blocks: a tenth of what they take one by one. A
cubin that is asked for is written into the cache, and loaded from there as if it had been compiled there.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import io
import json
import lzma
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distgemm.system import read_regular, switch, unsafe, write_atomically

__all__ = ["DISTRIBUTION", "Pack", "PackError", "PackedCubin", "find_pack", "not_usable", "write_pack"]

DISTRIBUTION, PACKAGE = "distgemm-kernels", "distgemm_kernels"
INDEX = "pack.json"
LICENCE = "LICENSE-CUTLASS.txt"
"""The notice that CUTLASS's licence wants to stand beside what is compiled from CUTLASS."""
FORMAT = 2
BLOCK_CUBINS = 16
"""Cubins of a block. More make a smaller pack, of which more is unpacked to get one cubin."""

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Compiled kernels of distgemm, for CUDA {cuda} and sm_{arch}
License-Expression: BSD-3-Clause
License-File: {licence}
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: distgemm
Root-Is-Purelib: true
Tag: {tag}
"""


class PackError(RuntimeError):
    """A pack is damaged. The message says how to install it again."""


class PackedCubin(NamedTuple):
    """A cubin of a pack.

    Attributes:
        block: the name of the file that has it.
        offset: where it begins in the block, in bytes, once that is unpacked.
        size: in bytes.
        manifest: as it stands beside a cubin in the cache.
    """

    block: str
    offset: int
    size: int
    manifest: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Pack:
    """An installed pack.

    Attributes:
        folder: the package's folder.
        version: its version.
        sources: the hash of the kernels' sources that it was compiled from.
        arch: the architecture, as nvcc names it.
        compiler: what nvcc printed about its release.
        cutlass: the version of CUTLASS.
        cubins: by their names without a suffix.
    """

    folder: Path
    version: str
    sources: str
    arch: str
    compiler: str
    cutlass: str
    cubins: dict[str, PackedCubin]

    def __str__(self) -> str:
        return f"{DISTRIBUTION} {self.version}"

    def read(self, name: str) -> bytes:
        """A cubin.

        Raises:
            PackError: if it does not have the checksum of its manifest.
        """
        found = self.cubins[name]
        try:
            content = _block(self.folder / found.block)[found.offset : found.offset + found.size]
        except (OSError, lzma.LZMAError) as error:
            raise PackError(f"{self} is damaged: {found.block}: {error}; {_reinstall(self.version)}") from error
        if hashlib.sha256(content).hexdigest() != found.manifest["sha256"]:
            raise PackError(
                f"{self} is damaged: kernel {found.manifest['kernel']} does not have its checksum; "
                f"{_reinstall(self.version)}"
            )
        return content


def _reinstall(version: str) -> str:
    return f"install it again: pip install --force-reinstall {DISTRIBUTION}=={version}"


@functools.lru_cache(maxsize=2)
def _block(path: Path) -> bytes:
    return lzma.decompress(read_regular(path))


def find_pack() -> Pack | None:
    """The installed pack; None if there is none, or if the environment has DISTGEMM_PACK=0.

    Raises:
        PackError: if it cannot be read, or if another user could have changed it.
    """
    if not switch("DISTGEMM_PACK", True):
        return None
    package = importlib.util.find_spec(PACKAGE)
    for place in package.submodule_search_locations or () if package else ():
        index = Path(place) / INDEX
        if index.is_file():
            return _read_index(index.resolve(), index.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=1)
def _read_index(path: Path, changed: int) -> Pack:
    try:
        found = json.loads(read_regular(path))
        if found["format"] != FORMAT:
            raise PackError(
                f"{DISTRIBUTION} {found['version']} in {path.parent} has the format {found['format']}, and this "
                f"distgemm reads {FORMAT}; install the pack of this distgemm"
            )
        cubins = {name: PackedCubin(*entry) for name, entry in found["cubins"].items()}
        facts = {name: str(found[name]) for name in ("version", "sources", "arch", "compiler", "cutlass")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(f"{path} is damaged ({type(error).__name__}: {error}); reinstall {DISTRIBUTION}") from error
    for each in (path.parent, path, *(path.parent / block for block in {x.block for x in cubins.values()})):
        if not each.exists():
            raise PackError(f"{DISTRIBUTION} {facts['version']}: {each} is missing; {_reinstall(facts['version'])}")
        if why := unsafe(each):
            raise PackError(
                f"{DISTRIBUTION} {facts['version']}: {why}; remove the others' permission with chmod -R go-w "
                f"{path.parent}, or install it again as this user or as root, with a umask of 022"
            )
    return Pack(path.parent, cubins=cubins, **facts)


def not_usable(pack: Pack, sources: str) -> str:
    """Why the cubins of a pack are not those that this distgemm needs on this machine; "" if they are.

    Args:
        pack: the pack.
        sources: the hash of this distgemm's sources.
    """
    if pack.sources != sources:
        return (
            f"it was compiled from kernels with the hash {pack.sources}, and this distgemm has kernels with the hash "
            f"{sources}; install the {DISTRIBUTION} whose version ends in {sources}"
        )
    return ""


# --- writing --------------------------------------------------------------------------------------------


def write_pack(
    folder: Path, version: str, sources: str, cubins: Sequence[tuple[str, bytes, dict[str, Any]]], licence: bytes
) -> Path:
    """Write the wheel of a pack. The same cubins give the same bytes. Returns its path.

    Args:
        folder: where the wheel goes.
        version: the version of distgemm.
        sources: the hash of the kernels' sources.
        cubins: for each cubin its name, its content and its manifest.
        licence: the text of CUTLASS's licence.

    Raises:
        ValueError: if there are none, or if they differ in compiler, CUTLASS or architecture.
        OSError: if the wheel cannot be written.
    """
    if not cubins:
        raise ValueError("a pack has at least one kernel, got none")
    facts: dict[str, str] = {}
    for name in ("arch", "compiler", "cutlass"):
        values = sorted({manifest[name] for _, _, manifest in cubins})
        if len(values) > 1:
            raise ValueError(f"all kernels of a pack have the same {name}, got {' and '.join(values)}")
        facts[name] = values[0]
    cuda = facts["compiler"].removeprefix("release ").partition(".")[0]
    version = f"{version}+cu{cuda}.sm{facts['arch']}.{sources}"
    files: dict[str, bytes] = {f"{PACKAGE}/__init__.py": b'"""Compiled kernels of distgemm."""\n'}
    index: dict[str, PackedCubin] = {}
    # Neighbours are alike: they differ in a macro.
    ordered = sorted(cubins, key=lambda each: json.dumps(each[2]["macros"]))
    for first in range(0, len(ordered), BLOCK_CUBINS):
        block, content = f"kernels_{first // BLOCK_CUBINS:02}.xz", b""
        for name, cubin, manifest in ordered[first : first + BLOCK_CUBINS]:
            index[name] = PackedCubin(block, len(content), len(cubin), manifest)
            content += cubin
        files[f"{PACKAGE}/{block}"] = lzma.compress(content, preset=9)
    described = {"format": FORMAT, "version": version, "sources": sources, **facts, "cubins": index}
    files[f"{PACKAGE}/{INDEX}"] = json.dumps(described).encode()

    tag = "py3-none-any"  # code for GPUs alone
    info = f"{PACKAGE}-{version}.dist-info"
    files[f"{info}/METADATA"] = METADATA.format(
        name=DISTRIBUTION, version=version, cuda=cuda, licence=LICENCE, **facts
    ).encode()
    files[f"{info}/licenses/{LICENCE}"] = licence
    files[f"{info}/WHEEL"] = WHEEL.format(tag=tag).encode()
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
        for name, content in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{version}-{tag}.whl"
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980, so that the same cubins give the same bytes
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, content, zipfile.ZIP_STORED if name.endswith(".xz") else zipfile.ZIP_DEFLATED)
    write_atomically(path, whole.getvalue())
    return path
