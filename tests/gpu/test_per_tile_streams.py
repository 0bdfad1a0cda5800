"""Many replays by ranks of one process; and if nobody waited, the test would see it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("options", [["--replays=4000"], ["--control", "--replays=4000"]], ids=["protocol", "control"])
def test_replays_of_streams(options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.gpu.per_tile_streams", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(row["replays"] >= 4000 for row in found["rows"])
