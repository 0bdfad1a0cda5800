"""benchmarks/first_step.py: what it measures, and when it says that all kernels came from the pack."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "first_step.py"
pytestmark = pytest.mark.skipif(not BENCHMARK.is_file(), reason="a source archive has no benchmarks/")
PACKED = "all_gather_matmul: s on 2 ranks; GEMMs by cutlass; 1 kernel from the pack"
COMPILED = "matmul_reduce_scatter: s on 2 ranks; 1 kernel from the pack, 1 kernel compiled on this machine"
UNFUSED = "matmul_reduce_scatter: unfused on 2 ranks; GEMMs by torch"


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("first_step", BENCHMARK)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    every = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, env=every, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.sample(0)  # ten seconds
def test_phases_follow_each_other(tmp_path: Path) -> None:
    """On CPUs, from the import to the second step; an untrained model guesses among 256 letters."""
    done = run("--check", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    ended = found["seconds since import torch"]
    assert [*ended.values()] == sorted(ended.values()) and ended["rank started"] > 0
    assert found["first step"] == ended["first backward"] > found["first step of a rank"] > 0
    assert abs(found["loss"] - log(256)) < 1
    functions = {call.partition(":")[0] for call in found["calls"]}
    assert functions == {"all_gather_matmul", "matmul_reduce_scatter", "gather"}
    assert found["kernels"]["compiled"] == found["kernels"]["from the pack"] == []
    assert f"{found['first step']:.2f} s after import torch" in done.stdout


def test_only_packed(module: Any) -> None:
    """A call without kernels is fine beside one with them."""
    module.only_packed([], [PACKED, UNFUSED])
    for compiled, calls, message in (
        (["a kernel"], [PACKED], "not from the pack: a kernel"),
        ([], [PACKED, COMPILED], "not from the pack: matmul_reduce_scatter"),
        ([], [UNFUSED], "no call names a kernel from the pack"),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.only_packed(compiled, calls)


def test_a_compiler_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGEMM_NVCC", sys.executable)
    with pytest.raises(RuntimeError, match=f"without a compiler, and {sys.executable} is one"):
        module.refuse_compiler()
    monkeypatch.setattr(module, "find_nvcc", lambda: None)
    module.refuse_compiler()
    monkeypatch.setattr(sys, "argv", ["first_step.py", "--packed", "--check"])
    with pytest.raises(SystemExit):
        module.main()
