"""The flags of per-tile kernels pass no stale data: between two ranks on one GPU, and on two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("gpus", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 2)])
def test_no_block_loads_stale_data(gpus: int) -> None:
    command = [sys.executable, "-m", "tests.gpu.litmus", f"--gpus={gpus}", "--rounds=200000", "--seconds=100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"release seen on {gpus} GPUs: {found['release_seen']}")
