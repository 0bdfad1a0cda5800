"""distgemm trace: what it refuses, what it asks the ranks to do, what it prints and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distgemm.cli.main import app
from distgemm.measure.trace import record
from distgemm.simulator import simulate
from tests.unit.test_trace import GATHER, H200, recorded

RUN = CliRunner()
SMALL = ["trace", GATHER, "--m", "1024", "--n", "1024", "--k", "512", "--ranks", "2"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of launch, in place of ranks with GPUs. They record the prediction; rank 1's clock is late."""
    calls: list[tuple[Any, ...]] = []

    def launch(function: Any, world_size: int, *args: Any, **keywords: Any) -> Any:
        calls.append((function, world_size, *args, keywords["backend"]))
        return recorded(simulate(args[0], H200), {1: -500.0})

    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.setenv("COLUMNS", "120")  # a row is a line
    return calls


def test_trace_runs_the_plan(launched: list[tuple[Any, ...]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["-o", str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg"), "--json", str(tmp_path / "figures.json")]
    found = RUN.invoke(app, [*SMALL, "--chunks", "2", "--provider", "cublas", *files])
    assert found.exit_code == 0, found.output
    ((function, world_size, plan, *execution),) = launched
    assert (
        function is record
        and world_size == plan.world_size == 2
        and execution == ["cublas", None, 2, "memory_op", "nccl"]
    )
    assert plan.sync == "barrier" and plan.iterations == 4 and plan.problem.n == 1024
    lines = found.stdout.splitlines()
    assert lines[0] == f"{GATHER}: 2 ranks, m 1024 x n 1024 x k 512, bfloat16"
    predicted = simulate(plan, H200).time
    assert lines[1].endswith(f"predicted {predicted:.1f} us (+0 %)")
    rows = [line.split() for line in lines if re.match(r"\d (measured|predicted) ", line)]
    assert [row[:2] for row in rows] == [[rank, what] for rank in "01" for what in ("measured", "predicted")]
    assert rows[0][2] == "2000.0" and rows[1][2] == f"{predicted:.1f}"
    assert rows[0][3:7] == rows[1][3:7]
    assert sum("until its last GEMM" in line for line in lines) == 2
    assert lines[-1].startswith("clocks: a chunk was used ") and "set forward by 0.0, " in lines[-1]
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["world_size"] == 2
    assert (tmp_path / "t.svg").stat().st_size > 5000
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["predicted_us"] == predicted and len(figures["measured"]) == 2
    assert json.loads(RUN.invoke(app, [*SMALL, "--chunks", "2", "--json", "-"]).stdout) == figures


def test_lines_fit_80_columns(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = RUN.invoke(app, SMALL).stdout
    assert "0 measured" in text and max(map(len, text.splitlines())) <= 80


def test_waits_by_a_kernel(launched: list[tuple[Any, ...]]) -> None:
    found = RUN.invoke(app, [*SMALL, "--gemm-streams", "1", "--wait-by", "kernel"])
    assert found.exit_code == 0, found.output
    assert launched[0][3:] == (None, None, 1, "kernel", "nccl")


def test_mechanism(launched: list[tuple[Any, ...]]) -> None:
    for mechanism in ("push", "pull", "store"):
        found = RUN.invoke(app, [*SMALL, "--mechanism", mechanism])
        assert found.exit_code == 0, found.output
        plan = launched.pop()[2]
        assert (plan.mechanism, plan.sync) == (mechanism, "barrier")
    assert RUN.invoke(app, SMALL).exit_code == 0 and launched.pop()[2].mechanism == "push"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "nowhere/t.json"], "--json nowhere/t.json: there is no folder nowhere"),
        (["-o", "t.gif"], "-o takes a .svg, .png, .html or .json file, got 't.gif'"),
        (["--mesh", "2by4"], "--mesh: a text such as 2x4, of integers >= 1, got '2by4'"),
        (["--dtype", "int3"], "--dtype: one of float64"),
        (["--machine", "h2000"], "--machine: one of h100, h200,"),
        (["--mechanism", "carry"], "--mechanism: one of push, pull, store, got 'carry'"),
        (["--wait-by", "gpu"], "--wait-by: one of memory_op, kernel, got 'gpu'"),
        (["--wait-by", "kernel"], "--wait-by kernel takes --gemm-streams 1, got 2"),
        (["--chunks", "2", "--option", "chunks=2"], "by --chunks or by --option chunks=, not by both"),
    ],
)
def test_mistakes_start_nothing(launched: list[tuple[Any, ...]], arguments: list[str], message: str) -> None:
    found = RUN.invoke(app, [*SMALL, *arguments])
    assert found.exit_code == 2 and message in found.stderr
    assert not launched


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = RUN.invoke(app, ["trace", GATHER])
    assert found.exit_code == 2 and "trace runs on GPUs, and torch finds none" in found.stderr
