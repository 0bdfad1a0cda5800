"""Ranks as streams of one process, for a minute; ``python -m tests.gpu.streams_harness`` makes a million replays."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.gpu(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_replays_of_all_kinds_are_right(ranks: int) -> None:
    build = [sys.executable, "-m", "tests.gpu.streams_harness", f"--ranks={ranks}", "--build"]
    subprocess.run(build, check=True, timeout=600)
    command = [sys.executable, "-m", "tests.gpu.streams_harness", f"--ranks={ranks}", "--replays=20000"]
    done = subprocess.run([*command, "--seconds=240"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])["attempts"]
    assert found["replays"] >= 20_000 and found["wrong_elements"] == 0 and found["graphed"] == found["executables"]


@pytest.mark.gpu(1)
def test_flags_that_nobody_waits_for_are_found() -> None:
    command = [sys.executable, "-m", "tests.gpu.streams_harness", "--control", "--graphs=none", "--replays=2000"]
    done = subprocess.run([*command, "--seconds=120"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
