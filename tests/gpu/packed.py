"""Tests with kernels that were compiled, and once more with the same kernels from a pack:

    python -m tests.gpu.packed tests/gpu/test_gemm.py

Arguments are those of pytest. The first session compiles its kernels: into an empty cache, or beside those of
$DISTGEMM_CACHE_DIR. It notes which kernels it asks for, and they become a pack. The second one has an empty cache, this
pack, and no compiler: a kernel that does not come from the pack is an error. It is for tests that launch no other
processes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from distgemm.gemm import nvcc
from distgemm.gemm.nvcc import KernelSource, cached, is_there, pack_cubins

PLUGIN = "tests.gpu.packed"
ASKED, PACKED = "DISTGEMM_TESTS_ASKED", "DISTGEMM_TESTS_PACKED"
"""Environment variables of the sessions: the file for what the first one asks for; set in the second one."""


# --- the plugin of both sessions --------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Note each source that is made, or hide the compiler."""
    if os.environ.get(PACKED):
        nvcc.find_nvcc = lambda: None
    if os.environ.get(ASKED):
        make = KernelSource.__init__
        config.stash[MADE] = made = {}

        def noted(source: KernelSource, *arguments: Any, **named: Any) -> None:
            make(source, *arguments, **named)
            made[source] = None

        KernelSource.__init__ = noted  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down which of the sources have been compiled."""
    if MADE in session.config.stash:
        found = [*filter(is_there, session.config.stash[MADE])]
        Path(os.environ[ASKED]).write_bytes(pickle.dumps(found))


MADE: pytest.StashKey[dict[KernelSource, None]] = pytest.StashKey()


# --- both sessions ----------------------------------------------------------------------------------------


def run(arguments: Sequence[str], **environment: str) -> None:
    """Run a session. Ends this process with its status if it fails."""
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main(arguments: Sequence[str]) -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed, asked, site = (folder / each for each in ("packed", "asked", "site"))
        compiled = os.environ.get("DISTGEMM_CACHE_DIR", folder / "compiled")
        run(arguments, DISTGEMM_CACHE_DIR=str(compiled), DISTGEMM_PACK="0", **{ASKED: str(asked)})
        with mock.patch.dict(os.environ, {"DISTGEMM_CACHE_DIR": str(compiled), "DISTGEMM_PACK": "0"}):
            sources = pickle.loads(asked.read_bytes())
            wheel = pack_cubins(sources, folder, version("distgemm"))
        print(f"{wheel.name}: {len(sources)} kernels, {wheel.stat().st_size / 2**20:.1f} MiB")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(site)
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        run(arguments, DISTGEMM_CACHE_DIR=str(packed), DISTGEMM_PACK="1", PYTHONPATH=path, **{PACKED: "1"})
        with mock.patch.dict(os.environ, {"DISTGEMM_CACHE_DIR": str(packed)}):
            manifests = [manifest for _, manifest in cached()]
        if other := [each for each in manifests if each is None or "pack" not in each]:
            sys.exit(f"{len(other)} of {len(manifests)} kernels do not come from the pack, such as {other[0]}")
        print(f"all {len(manifests)} kernels of the second session come from the pack; it found no compiler")


if __name__ == "__main__":
    main(sys.argv[1:])
