"""distgemm bench --resume on two CPU ranks: anchors are measured again, and say whether new rows belong to old ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distgemm.bench import run
from distgemm.bench.anchors import compare_anchors, job_of, select_anchors
from distgemm.bench.cases import Job
from distgemm.bench.report import AUTO, label, load
from distgemm.bench.run import Settings
from distgemm.runtime import launch
from tests import forked
from tests.unit import command as runner
from tests.unit.command import refusal
from tests.unit.test_bench_sample import FakeClock

EXAMPLE = Path(__file__).with_name("test_bench_example.json")
ABOUT = json.loads(EXAMPLE.read_text())["about"]
Bench = Callable[..., tuple[str, ...]]


def worker(speeds: dict[int, float], todo: list[Job], settings: Settings, path: Path) -> dict[str, Any]:
    """A rank of a run on CPUs. With m rows each call takes 100 * m * speeds[m] ms, more than a burst, or 100 * m ms."""
    real, cpu = run.run_case, torch.device("cpu")
    known = {row["m"] for row in settings.before["rows"]} if settings.before else set()

    def on_cpu(job: Job, settings: Settings, group: Any, device: torch.device, say: Any) -> dict[str, Any]:
        m = job.case.m
        assert {settings.auto, settings.tune, settings.timelines} == {m not in known}  # none of it for an anchor
        clock = FakeClock(100 * m * speeds.get(m, 1.0))
        return real(job, settings._replace(auto=False, tune=False, timelines=False), group, cpu, clock, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(run, "about", lambda device: ABOUT | {"host": str(speeds)})
        patch.setattr(run, "clocks", lambda: f"clocks of {speeds}")
        patch.setattr(run, "run_case", on_cpu)
        return run.run_rank(todo, settings, path)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Makes the arguments of a resumed run of cases with ms rows, whose ranks run on CPUs at given speeds."""
    real = launch.launch

    def arguments(*ms: int, speeds: dict[int, float] | None = None) -> tuple[str, ...]:
        def emulated(function: object, ranks: int, *given: Any, timeout: float, **options: Any) -> list[Any]:
            assert function is run.run_rank
            return real(worker, ranks, speeds or {}, *given, timeout=timeout)

        monkeypatch.setattr(launch, "launch", emulated)
        line = "bench --resume --model llama-3-8b --layer qkv --quick --rounds 1 --ranks 2 --timeout 120"
        more = "--auto --tune --timelines --json"
        return (*line.split(), *more.split(), str(tmp_path / "x.json"), *(word for m in ms for word in ("--m", str(m))))

    forked.fork_ranks(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return arguments


def succeed(*line: str) -> str:
    done = runner.invoke(*line)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_rows_are_added_at_the_same_speed(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    succeed(*bench(2, 4))
    first = load(file)
    assert first["resumptions"] == [] and len(first["rows"]) == 2
    succeed(*bench(6, 8, speeds={2: 1.015, 4: 0.985}))  # it does not measure the anchors for itself
    second = load(file)
    assert second["rows"][:2] == first["rows"] and [row["m"] for row in second["rows"]] == [2, 4, 6, 8]
    assert (second["planned"], second["complete"]) == (4, True)
    text = succeed(*bench(2, 6, 10, speeds={2: 0.981, 6: 1.0, 8: 1.019}))
    third = load(file)
    assert third["rows"][:4] == second["rows"] and third["rows"][4]["m"] == 10
    ratios = [[(each["row"], each["ratio"]) for each in one["anchors"]] for one in third["resumptions"]]
    name = "8b qkv ag+gemm m="
    assert ratios == [
        [(f"{name}2", 1.015), (f"{name}4", 0.985)],
        [(f"{name}2", 0.981), (f"{name}6", 1.0), (f"{name}8", 1.019)],
    ]
    # Facts of each run, and on top those of the first.
    facts = [third, *third["resumptions"]]
    speeds = ["{}", "{2: 1.015, 4: 0.985}", "{2: 0.981, 6: 1.0, 8: 1.019}"]
    assert [one["about"]["host"] for one in facts] == speeds
    assert [one["about"]["clocks"] for one in facts] == [f"clocks of {each}" for each in speeds]
    assert third["date"] == first["date"] <= third["resumptions"][1]["date"]
    line = f"of rows that were measured again: {name}2 0.981, {name}6 1.000, {name}8 1.019"
    assert line in " ".join(text.split())


def test_a_file_of_another_speed_stays_as_it_was(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    succeed(*bench(2, 4, 6))
    before = file.read_bytes()
    for m, speeds in ((2, {2: 1.05, 4: 1.05, 6: 1.05}), (2, {2: 0.95}), (4, {4: 1.025}), (6, {6: 0.975})):
        assert refusal(*bench(2, 8, speeds=speeds)) == (
            f"error: --resume: 8b qkv ag+gemm m={m} was measured again, and takes {speeds[m]:.4f} times as long as in "
            "the file; it may differ by 2 %: measure on the machine as before, or start a new file"
        )
        assert file.read_bytes() == before


def test_nothing_is_measured_where_nothing_is_left(bench: Bench, tmp_path: Path) -> None:
    succeed(*bench(2))
    before = (tmp_path / "x.json").read_bytes()
    line = bench(2, speeds={2: 2.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", None)
        assert "m=2" in succeed(*line)
    assert (tmp_path / "x.json").read_bytes() == before


# --- anchors --------------------------------------------------------------------------------------------


def row(m: int, **times: float | None) -> dict[str, Any]:
    methods = [{"name": name, "kind": "part", "ms": ms, "error": ""} for name, ms in times.items()]
    return {"model": "llama-3-8b", "layer": "qkv", "pattern": "ag+gemm", "m": m, "methods": methods}


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (7, [0, 3, 6])],
)
def test_three_rows_with_times_are_anchors(count: int, wanted: list[int]) -> None:
    rows = [row(m, x=1.0) for m in range(count)]
    failed = row(99, x=1.0)
    failed["methods"][0]["error"] = "out of memory"
    assert [each["m"] for each in select_anchors([row(98, x=None), *rows, failed])] == wanted


def test_the_median_of_common_methods_counts() -> None:
    old, new = row(2, a=1.0, b=2.0, c=4.0, gone=1.0, off=1.0), row(2, a=1.01, b=1.0, c=8.0, more=9.0, off=9.0)
    new["methods"][-1]["error"] = "off by 3"  # else the median were 1.5
    assert compare_anchors([(old, new), (row(4, x=2.0), row(4, x=2.02))]) == [
        {"row": "8b qkv ag+gemm m=2", "ratio": 1.01},
        {"row": "8b qkv ag+gemm m=4", "ratio": 1.01},
    ]
    with pytest.raises(ValueError, match=r"m=2 was measured again, and no method has a time in both runs: measure on"):
        compare_anchors([(old, row(2, more=1.0, a=None))])
    with pytest.raises(ValueError, match=r"m=2 .* nan times"):
        compare_anchors([(old, row(2, a=float("nan")))])


def test_an_anchor_has_the_methods_of_its_row() -> None:
    found = load(EXAMPLE)["rows"][1]
    ours = [each for each in found["methods"] if each["kind"] == "distgemm" and each["name"] != AUTO]
    assert any(each["error"] for each in ours)
    named = {each["name"] for each in ours if not each["error"]}
    found["methods"].append(ours[0] | {"name": "no_such_schedule chunks=2", "error": ""})
    case, candidates = job_of(found)
    assert str(case) == label(found) and case.local == tuple(found["local"])
    assert len(candidates) == len(named) > 1 and {each.text for each in candidates} == named
