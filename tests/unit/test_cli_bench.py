"""distgemm bench: what it measures, refuses, prints and writes. No GPU; the example's figures are invented."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import Result

from distgemm.bench import executions
from distgemm.bench.cases import Job, cases, jobs
from distgemm.bench.report import load, save
from distgemm.bench.run import Settings, check_machine
from distgemm.cli import bench as command
from distgemm.cli import output
from distgemm.gemm.cublas import CublasProvider
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.target import compiling_for
from distgemm.measure.models import MODELS
from distgemm.runtime.executable import ExecutionMode
from distgemm.tune import candidates, look_up
from distgemm.tune.kernels import sources_of
from tests.unit import command as runner
from tests.unit.command import refusal, succeed

EXAMPLE = Path(__file__).with_name("test_bench_example.json")


def invoke(*arguments: str) -> Result:
    return runner.invoke("bench", *arguments)


def example() -> dict[str, Any]:
    return load(EXAMPLE)


# --- what is measured -----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be measured on four GPUs."""
    found: list[dict[str, Any]] = []

    def measure(
        todo: list[Job], size: int, settings: Any, path: Path, timeout: float, json: Path | None, pictures: list[Path]
    ) -> None:
        found.append({"todo": todo, "size": size, "settings": settings, "path": path, "pictures": pictures})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def test_repeated_options(measured: list[dict[str, Any]]) -> None:
    line = "--model llama-3-8b --model llama-3-70b --m 128 --m 512 --m 128 --layer qkv --layer fc2 --tp 8"
    done = invoke(*line.split())
    assert done.exit_code == 0, done.output
    (one,) = measured
    assert [(case.model, case.layer, case.m) for case, _ in one["todo"]] == [
        (model, layer, m) for model in ("llama-3-8b", "llama-3-70b") for layer in ("qkv", "fc2") for m in (128, 512)
    ]
    assert one["size"] == 4
    assert {(case.ranks, case.tp) for case, _ in one["todo"]} == {(4, 8)}


def test_defaults_and_quick(measured: list[dict[str, Any]]) -> None:
    assert invoke().exit_code == 0
    assert invoke("--quick").exit_code == 0
    assert invoke("--model", "all", "--pattern", "gemm+ar", "--schedule", "gemm+ar", "--rounds", "5").exit_code == 0
    usual, quick, every = measured
    assert {str(case) for case, _ in usual["todo"]} == {str(case) for case, _ in quick["todo"]}
    assert {case.model for case, _ in usual["todo"]} == {"llama-3-70b"}
    assert [len(tried) for _, tried in usual["todo"]] == [4, 5, 4, 5]
    assert [len(tried) for _, tried in quick["todo"]] == [2, 2, 2, 2]
    assert (usual["settings"].rounds, quick["settings"].rounds, every["settings"].rounds) == (11, 7, 5)
    assert (usual["settings"].peers, quick["settings"].peers) == (True, False)
    assert [(case.model, case.layer) for case, _ in every["todo"]] == [
        (model, layer) for model in MODELS for layer in ("out", "fc2")
    ]
    assert {one.text for _, tried in every["todo"] for one in tried} == {"gemm+ar"}


EXECUTIONS = "--model llama-3-8b --pattern ag+gemm --pattern gemm+rs --m 2048 --ranks 2 --executions"


def test_each_execution(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    providers = {"cutlass": CutlassProvider("90a"), "cublas": CublasProvider()}
    monkeypatch.setattr(candidates, "providers", lambda: providers)
    for count in (1, 2):
        with compiling_for("90a"):
            done = invoke(*EXECUTIONS.split(), str(count))
        assert done.exit_code == 0, done.output
        todo = measured.pop()["todo"]
        assert [case.layer for case, _ in todo] == ["qkv", "out", "fc1", "fc2"]
        for case, tried in todo:
            every_time = candidates.predictions(case.problem, case.pattern, 2)
            times = {each: time for each, time in every_time.items() if each.method == "plan"}
            recorded = look_up(case.problem, case.pattern, 2, "NVIDIA H200", math.inf)
            assert recorded in tried and len(set(tried)) == len(tried)
            for mode in get_args(ExecutionMode):
                found = [each for each in tried if each.execution.execution == mode]
                every = [time for each, time in times.items() if each in found]
                plans = {each: time for each, time in times.items() if each.method == "plan"}
                best = min(time for each, time in plans.items() if each.execution.execution == mode)
                assert min(every) == best and count <= len(found) <= count + (recorded.execution.execution == mode)
                kinds = {(each.schedule, each.options, replace(each.execution, wait_by="memory_op")) for each in found}
                assert len(kinds) == len(found)


def test_build_compiles_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, for all ranks."""
    built: list[KernelSource] = []
    monkeypatch.setattr("distgemm.gemm.nvcc.build", built.extend)
    monkeypatch.setattr("distgemm.gemm.nvcc.missing", lambda sources: sources[1:])
    done = invoke(*EXECUTIONS.split(), "2", "--build")
    assert done.exit_code == 0 and len(built) == len(set(built)) > 6
    assert f"sm_90a: {len(built) - 1} compiled, 1 there already" in done.output
    with compiling_for("90a"):
        for case in cases(["llama-3-8b"], ["qkv", "fc2"], ["ag+gemm", "gemm+rs"], [2048], 2, 8):
            todo = executions.of_each_execution(case, 2)
            for config in todo.candidates:
                assert set(sources_of(case.problem, case.pattern, 2, [config], rank=1)) <= set(built), config
    files = {source.file for source in built}
    assert files == {"gemm.cu", "per_tile.cu"}


def test_resume_measures_what_is_missing(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    patterns = ("--pattern", "ag+gemm", "--pattern", "gemm+rs")
    line = ("--ranks", "4", "--m", "8192", *patterns, "--rounds", "5", "--json", str(file))
    assert invoke(*line, "--resume").exit_code == 0  # nothing is there yet
    assert measured[0]["settings"].before is None and len(measured.pop()["todo"]) == 4
    result = example()
    save(result, file)
    done = invoke(*line, "--resume")
    assert done.exit_code == 0, done.output
    assert [case.layer for case, _ in measured[0]["todo"]] == ["qkv", "out"]
    assert measured.pop()["settings"].before["rows"] == result["rows"]
    assert "70b fc1 ag+gemm m=8192" in succeed("bench", *line, "--layer", "fc1", "--layer", "fc2", "--resume")
    assert measured == []  # all was there
    assert "have rounds 5, and this run has 7: give --rounds" in refusal("bench", *line, "--resume", "--rounds", "7")
    assert "have --burst-ms 4.0, and this run has 2.0" in refusal("bench", *line, "--resume", "--burst-ms", "2")
    assert "have peers True, and this run has False: give" in refusal("bench", *line, "--resume", "--quick")
    result["rows"][0]["methods"][0] |= {"wrong": True, "error": "off by 3"}
    save(result, file)
    assert invoke(*line, "--layer", "fc1", "--layer", "fc2", "--resume").exit_code == 1
    result["rows"][0]["tp"] = 4
    save(result, file)
    assert f"--resume: {file} has rows of other ranks than 4 of --tp 8" in refusal("bench", *line, "--resume")


@pytest.mark.parametrize("fact", ["gpu", "driver", "torch", "nccl", "nvls"])
def test_rows_of_another_machine_are_not_continued(fact: str) -> None:
    about = example()["about"]
    check_machine(about | {"distgemm": "0.2"}, about)
    with pytest.raises(ValueError, match=f"are of {fact} {about[fact]}, and this is another: measure into another"):
        check_machine(about | {fact: "another"}, about)


def test_the_fastest_of_each_execution_is_printed(tmp_path: Path) -> None:
    result = example()
    row = result["rows"][0]
    method = row["methods"][0]
    for name, ms in (("x execution=per_tile config=128x128x64_2x1_pingpong", 1.5), ("x execution=per_tile", 1.25)):
        row["methods"].append(method | {"name": name, "rounds": [ms]})
    file = tmp_path / "rows.json"
    save(result, file)
    table = succeed("bench", "--from", str(file)).split("ms of the fastest of each execution\n")[1]
    first, second, _ = (line.split() for line in table.splitlines() if line.startswith("70b fc"))
    least = min(each["ms"] for each in row["methods"] if each["kind"] == "distgemm" and "x exec" not in each["name"])
    assert first[-2:] == [f"{least:.4f}", "1.2500"] and second[-1] == "-"
    assert "each execution" not in succeed("bench", "--from", str(EXAMPLE))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--executions 0", "--executions: a whole number of at least 1, got '0'"),
        ("--executions 1 --schedule gemm+rs", "--executions selects the schedules: give it or --schedule"),
        ("--resume", "--resume takes the file with the rows that are there: --json FILE"),
        ("--resume --json -", "--resume takes the file"),
        ("--ranks 8", "--ranks 8 needs 8 GPUs, found 4"),
        ("--ranks 1", "--ranks is at least 2, got 1"),
        ("--m many", "--m: a whole number of at least 1, got 'many'"),
        ("--layer fc3", "--layer: one of qkv, out, fc1, fc2, got 'fc3'"),
        ("-o x.pdf", "-o takes a .svg or .png file, got 'x.pdf'"),
        ("--json nowhere/x.json", "there is no folder nowhere"),
        ("--schedule gemm+ar", "--schedule gemm+ar: on 8 ranks it does none of ag+gemm, gemm+rs"),
    ],
)
def test_lines_that_are_refused(measured: list[dict[str, Any]], line: str, message: str) -> None:
    assert message in refusal("bench", *line.split())
    assert measured == []


def test_without_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    assert "bench measures on GPUs, and torch finds none" in refusal("bench", "--quick")


def test_under_torchrun(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke().exit_code == 0
    assert measured[0]["size"] == 2
    assert "--ranks 4, but torchrun has started 2" in invoke("--ranks", "4").stderr


# --- the report -----------------------------------------------------------------------------------------


def test_the_table_of_a_row() -> None:
    found = example()["rows"][1]
    text = succeed("bench", "--from", str(EXAMPLE))
    assert "70b fc2 gemm+rs m=8192: 8192 x 8192 x 14336 on 4 ranks, n and k of each rank as with 8" in text
    table = text.split("70b fc2 gemm+rs m=8192: ")[1].split("\n\n")[0].splitlines()
    lines = {each["name"]: line for each in found["methods"] for line in table if line.startswith(f"{each['name']}  ")}
    assert set(lines) == {each["name"] for each in found["methods"]}  # none is left out
    assert lines["reduce_scatter_1d_tiling_a_rotating_c chunks=2"].split()[2:] == [
        *["0.7210", "7", "%", "667", "97", "%", "106", "%", "92", "%", "68", "%"]
    ]
    assert lines["copies alone"].split()[2:] == [*["0.2600", "7", "%", "-", "-", "-", "-", "-"]]
    assert "failed" in lines["reduce_scatter_1d_pairwise_a chunks=4"]
    times = [line.split(" 7 %")[0].split()[-1] for line in table if " 7 %" in line]
    assert times == sorted(times, key=float)


def test_the_summary_has_all_rows() -> None:
    result = example()
    table = succeed("bench", "--from", str(EXAMPLE)).split("all rows\n")[1]
    shown = [line.split()[:3] for line in table.splitlines() if line.startswith("70b")]
    assert shown == [["70b", row["layer"], row["pattern"]] for row in result["rows"]]
    assert "; peer: " in table


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "executions_2xh200.json"


@pytest.mark.parametrize("path", [EXAMPLE, RECORDED], ids=["example", "recorded"])
def test_lines_fit_80_columns(path: Path) -> None:
    narrow = succeed("bench", "--from", str(path), columns=80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_narrow_lines_have_all_words() -> None:
    narrow = succeed("bench", "--from", str(EXAMPLE), columns=80)
    wide = succeed("bench", "--from", str(EXAMPLE), columns=300)
    assert sorted(re.findall(r"[^\s─]+", narrow)) == sorted(re.findall(r"[^\s─]+", wide))


def test_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = invoke("--from", str(EXAMPLE), "-o", str(tmp_path / "x.svg"), "--json", str(tmp_path / "x.json"))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("4 x H200 of a fable, driver 580.0, CUDA 13.0, torch 2.11.0, NCCL 2.28.9, NVLS off")
    assert "reduce_scatter_1d_pairwise_a chunks=4 failed: all ranks: OutOfMemoryError" in done.stdout
    assert (tmp_path / "x.svg").exists()
    assert load(tmp_path / "x.json") == example()
    assert json.loads(succeed("bench", "--from", str(EXAMPLE), "--json", "-"))["rows"] == example()["rows"]
    assert invoke("--from", "none.json").exit_code == 2


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    line = refusal("bench", "--from", str(EXAMPLE), "-o", "x.svg")
    assert line == "error: pictures need matplotlib: pip install 'distgemm[pictures]'"


# --- a run ----------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, path: Path, end: dict[str, Any] | Exception, *more: str) -> Result:
    """A run whose ranks write the example and then end in this way."""

    def launch(function: Any, ranks: int, todo: Any, settings: Settings, to: Path, **keywords: Any) -> list[Any]:
        assert (function.__name__, ranks, keywords) == ("run_rank", 2, {"backend": "nccl", "timeout": 9.0})
        assert more or to == path
        assert settings.command.startswith("distgemm")
        if path.parent.name != "nothing":
            save(example(), to)
        if isinstance(end, Exception):
            raise end
        return [end] * ranks

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return invoke(*(more or ("--json", str(path))), "--timeout", "9")


def test_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What the run is asked for exists.
    assert jobs(cases(["llama-3-70b"], ["fc1"], ["ag+gemm"], [8192], 2, 8))
    done = run(monkeypatch, tmp_path / "x.json", example())
    assert done.exit_code == 0, done.output  # a method that failed is no error
    bad = copy.deepcopy(example())
    bad["rows"][0]["methods"][0] |= {"error": "rank 1: bad", "wrong": True, "ms": None}
    done = run(monkeypatch, tmp_path / "x.json", bad)
    assert done.exit_code == 1
    assert "WRONG: 70b fc1 ag+gemm m=8192, all_gather_1d_tiling_cd_rotating_a chunks=1" in done.stderr


def test_json_on_standard_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run(monkeypatch, tmp_path / "x.json", example(), "--json", "-")
    assert (done.exit_code, json.loads(done.stdout)) == (0, example())


def test_a_run_that_is_cut_short_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run(monkeypatch, tmp_path / "x.json", RuntimeError("rank 1 was killed"))
    assert (done.exit_code, "all rows" in done.stdout) == (1, True)
    assert done.stderr == "error: rank 1 was killed\n"
    (tmp_path / "nothing").mkdir()
    save(example(), tmp_path / "nothing" / "x.json")  # of an earlier run
    done = run(monkeypatch, tmp_path / "nothing" / "x.json", RuntimeError("rank 1 was killed"))
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "error: rank 1 was killed\n")
