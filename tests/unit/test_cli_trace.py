"""The command distgemm trace: what it refuses, what it asks the ranks to do, what it prints and writes."""

from __future__ import annotations

import json
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
    """What is launched, instead of ranks that need GPUs; they would record what is predicted, rank 1's clock late."""
    calls: list[tuple[Any, ...]] = []

    def launch(function: Any, world_size: int, *args: Any, **how: Any) -> Any:
        calls.append((function, world_size, *args, how["backend"]))
        return recorded(simulate(args[0], H200), {1: -500.0})

    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.setenv("COLUMNS", "120")  # a row is a line
    return calls


def test_trace_runs_the_plan(launched: list[tuple[Any, ...]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "t.json"), "--picture", str(tmp_path / "t.svg")]
    found = RUN.invoke(app, [*SMALL, "--chunks", "2", "--provider", "cublas", *files])
    assert found.exit_code == 0, found.output
    ((function, world_size, plan, *how),) = launched
    assert function is record and world_size == plan.world_size == 2 and how == ["cublas", None, 2, "memory", "nccl"]
    assert plan.sync == "barrier" and plan.iterations == 4 and plan.problem.n == 1024
    lines = found.stdout.splitlines()
    assert lines[0] == f"{GATHER}: 2 ranks, m 1024 x n 1024 x k 512, bfloat16"
    predicted = simulate(plan, H200).time
    assert lines[1].endswith(f"predicted {predicted:.1f} us (+0 %)")
    rows = [line.split() for line in lines if "measured " in line or "predicted " in line][1:]
    assert [row[:2] if row[0].isdigit() else row[:1] for row in rows] == [
        *(["0", "measured"], ["predicted"], ["1", "measured"], ["predicted"])
    ]
    assert rows[0][2] == "2000.0" and rows[1][1] == f"{predicted:.1f}"
    assert rows[0][3:7] == rows[1][2:6]
    assert sum("until its last GEMM" in line for line in lines) == 2
    assert lines[-1].startswith("clocks: a chunk was used ") and "set forward by 0.0, " in lines[-1]
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["world_size"] == 2
    assert (tmp_path / "t.svg").stat().st_size > 5000


def test_waits_by_a_kernel(launched: list[tuple[Any, ...]]) -> None:
    found = RUN.invoke(app, [*SMALL, "--gemm_streams", "1", "--waits", "kernel"])
    assert found.exit_code == 0, found.output
    assert launched[0][3:] == ("cutlass", None, 1, "kernel", "nccl")


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
        (["--json", "nowhere/t.json"], "nowhere/t.json: there is no folder nowhere"),
        (["--picture", "t.gif"], "--picture takes a .svg or .png file, got 't.gif'"),
        (["--mesh", "2by4"], "a mesh is given as 2x4, got '2by4'"),
        (["--dtype", "int3"], "int3"),
        (["--machine", "h2000"], "machine 'h2000' is none of"),
        (["--mechanism", "carry"], "mechanism is one of push, pull, store, got 'carry'"),
        (["--waits", "gpu"], "--waits is memory or kernel, got 'gpu'"),
        (["--waits", "kernel"], "--waits kernel takes --gemm_streams 1, got 2"),
    ],
)
def test_mistakes_start_nothing(launched: list[tuple[Any, ...]], arguments: list[str], message: str) -> None:
    found = RUN.invoke(app, [*SMALL, *arguments])
    assert found.exit_code == 2 and message in found.stderr
    assert not launched


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = RUN.invoke(app, ["trace", GATHER])
    assert found.exit_code == 2 and "trace runs on GPUs, and there is none here" in found.stderr
