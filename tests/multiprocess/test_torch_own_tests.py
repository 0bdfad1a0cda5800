"""The runner of torch's own tests, with a file of tests as torch writes them, over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.torch_own_tests import GATHER, SCATTER, kernels

FILE = """
import unittest

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

ops = torch.ops.symm_mem


def gather(dtype=torch.float64):
    a, b = torch.ones(4, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    _, (found,) = ops.fused_all_gather_matmul(a, [b], 0, dist.group.WORLD.group_name)
    assert found.eq(3).all() and found.shape == (8, 2)


class LongLived(MultiProcContinuousTest):
    world_size = 2

    def test_a_gather(self):
        gather()

    def test_b_of_integers(self):
        gather(torch.int64)

    def test_c_kernel_of_torch(self):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            gather()
        self.assertTrue(any("PersistentAsyncInputScheduler" in event.key for event in seen.events()))

    def test_d_kernel_of_torch_without_a_call(self):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.ones(2).sum()
        self.assertTrue(any("PersistentAsyncInputScheduler" in event.key for event in seen.events()))

    @unittest.skip("as it is")
    def test_e_skipped(self):
        raise AssertionError

    def test_f_with_new_processes(self):
        gather()


class ShortLived(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_scatter_on_two_groups_in_turn(self):
        for name in ("first", "second"):
            store = dist.FileStore(self.file_name + name, 2)
            dist.init_process_group("gloo", world_size=2, rank=self.rank, store=store)
            a, b = torch.ones(4, 3), torch.ones(3, 2)
            found = ops.fused_matmul_reduce_scatter(a, b, "avg", 0, dist.group.WORLD.group_name)
            assert found.eq(3).all() and found.shape == (2, 2)
            dist.destroy_process_group()
"""


def run(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    path, saved = folder / "test_of_torch.py", folder / "outcomes.json"
    path.write_text(FILE)
    command = [sys.executable, "-m", "tests.gpu.torch_own_tests", str(path), "--json", str(saved), *options]
    root = Path(__file__).parents[2]
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    found = subprocess.run(command, cwd=root, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert saved.exists(), found.stdout + found.stderr
    return found.returncode, found.stdout, json.loads(saved.read_text())


def test_kernels_ahead_are_of_each_dtype_and_layout() -> None:
    found = {kernel.name.partition(" ")[2] for kernel in kernels(2, GATHER, SCATTER, "90a")}
    gemms = {f"({dtype}, row, {b} -> {dtype})" for dtype in ("float32", "bfloat16") for b in ("row", "column")}
    assert found == {*gemms, "(float32 -> float32, 4 at once)"}


NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None,
    reason="expecttest is not installed: pip install --no-deps -r tests/frameworks.txt",
)


@NEEDED
@pytest.mark.sample(0)
@pytest.mark.parametrize("gather", [GATHER, "unfused"])
def test_processes_of_a_test_install(tmp_path: Path, gather: str) -> None:
    status, text, found = run(tmp_path, "--install", "-k", "test_a_gather", "--gather", gather)
    ((outcome, events),) = [(test["outcome"], test["events"]) for test in found["tests"]]
    assert (status, outcome, [event["kind"] for event in events]) == (0, "passed", ["served"] * 2), text
    transfers = "gloo, GEMMs by torch" if gather == "unfused" else "collective runtime over gloo, GEMMs by torch"
    assert all(transfers in event["text"] for event in events), text
    assert "fused_all_gather_matmul: called in 1 tests; distgemm computed it in 1, and did not in 0" in text


@NEEDED
@pytest.mark.sample(0)
def test_each_outcome(tmp_path: Path) -> None:
    status, text, found = run(tmp_path, "--install")
    outcomes = {test["name"].partition(".")[2]: test for test in found["tests"]}
    assert {name: test["outcome"] for name, test in outcomes.items()} == {
        "test_a_gather": "passed",
        "test_b_of_integers": "passed",
        "test_c_kernel_of_torch": "passed",
        "test_d_kernel_of_torch_without_a_call": "failed",
        "test_e_skipped": "skipped",
        "test_f_with_new_processes": "passed",
        "test_scatter_on_two_groups_in_turn": "passed",
    }, text
    assert status == 1
    kinds = {name: sorted(event["kind"] for event in test["events"]) for name, test in outcomes.items()}
    assert kinds["test_a_gather"] == ["served"] * 2
    assert kinds["test_b_of_integers"] == ["not served"] * 2
    assert kinds["test_c_kernel_of_torch"] == ["served"] * 2 + ["waived"] * 2
    assert kinds["test_scatter_on_two_groups_in_turn"] == ["served"] * 4
    assert outcomes["test_e_skipped"]["reason"] == "as it is"
    assert "fused_all_gather_matmul: called in 4 tests; distgemm computed it in 3, and did not in 1" in text
    assert "do not take torch.int64" in text
    assert "5 passed, 1 skipped, 1 failed" in text


@NEEDED
@pytest.mark.sample(0)
@pytest.mark.parametrize("word", ["test_a_gather", "test_scatter"])
def test_without_install_torch_has_no_kernel_for_cpus(tmp_path: Path, word: str) -> None:
    status, text, found = run(tmp_path, "-k", word)
    ((outcome, events),) = [(test["outcome"], test["events"]) for test in found["tests"]]
    assert (status, outcome, events) == (1, "failed", []), text
    assert "NotImplementedError: Could not run" in text
