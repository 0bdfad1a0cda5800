"""examples/serve_tp.py as a user runs it: prefill and decode compute what the program on one rank computes."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "serve_tp.py"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="a source archive has no examples/")


def run(*arguments: str) -> str:
    """What the program prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("named", "2"), pytest.param("auto", "4", marks=pytest.mark.sample(0))]
)
def test_logits_are_those_of_one_rank(
    schedule: str, ranks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For several lengths of the cache. The program raises if logits differ.

    In the sample, this process runs the program, so that its ranks are forked.
    """
    arguments = ["--tp", ranks, "--batch", "3", "--prompt", "12", "--tokens", "9", "--bucket", "8"]
    arguments += ["--schedule", schedule, "--check"]
    if schedule == "auto":
        printed = run(*arguments)
    else:
        monkeypatch.syspath_prepend(PROGRAM.parent)
        importlib.import_module("serve_tp").main(arguments)
        printed = capsys.readouterr().out
    assert "logits, relative error" in printed and "tokens/s" in printed
    for function, rows in (("all_gather_matmul", 36), ("matmul_reduce_scatter", 36), ("matmul_all_reduce", 3)):
        (used,) = {line.split(", m ")[1].split()[0] for line in printed.splitlines() if line.startswith(function)}
        assert int(used) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--prompt", "63"),
            "--prompt is a multiple of --tp, because the ranks split the prompt; got 63 and 2, --prompt",
        ),
        (("--tp", "3", "--prompt", "63"), "--tp divides the 4 kv_heads of the model tiny, got 3"),
        (("--tp", "0"), "--tp is 1 or more, got 0"),
        (("--bucket", "0"), "--bucket is 1 or more, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"serve_tp.py: error: {message}")
