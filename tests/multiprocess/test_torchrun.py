"""Ranks that torchrun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distgemm.runtime.launch import Backend

PROGRAM = Path(__file__).with_name("torchrun_main.py")


def torchrun(ranks: int, backend: Backend) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, str(PROGRAM), backend], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_started_by_torchrun_compute_the_product(ranks: int) -> None:
    assert torchrun(ranks, "gloo").split() == ["right"]


@pytest.mark.gpu(2)
def test_ranks_started_by_torchrun_compute_the_product_on_gpus() -> None:
    assert torchrun(2, "nccl").split() == ["right"]
