"""python -m tests.gpu.packed: a session of tests with compiled kernels, and one with the same kernels from a pack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_gemm_kernel_cache import AT_ONCE, Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture

ASKS = """
import os
from dataclasses import replace
from distgemm.gemm.nvcc import build
from tests.unit.test_gemm_kernel_cache import SOURCE

def test_some() -> None:
    build([SOURCE, replace(SOURCE, name="other", macros=(("DG_TILE_M", "7"),))], progress=False)

def test_more() -> None:
    if MORE and "DISTGEMM_TESTS_PACKED" in os.environ:
        build([replace(SOURCE, arch="80")], progress=False)
"""


@pytest.mark.sample(0)  # four sessions
@pytest.mark.parametrize(("more", "status", "printed"), [(0, 0, "all 2 kernels"), (1, 1, "nvcc was not found")])
def test_sessions_with_compiled_and_packed_kernels(
    more: int, status: int, printed: str, nvcc: Nvcc, tmp_path: Path
) -> None:
    """What the first session has compiled serves the second one; what only the second one asks for is an error."""
    nvcc.set(AT_ONCE)
    (tmp_path / "test_asks.py").write_text(f"MORE = {more}\n{ASKS}")
    command = [sys.executable, "-m", "tests.gpu.packed", "-q", str(tmp_path / "test_asks.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == status and printed in done.stdout, done.stdout + done.stderr
    assert len(nvcc.calls) == 2 and "whl: 2 kernels, " in done.stdout
