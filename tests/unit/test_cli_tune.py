"""``distgemm tune``: its cases, its arguments, and what it prints and writes. No GPU, no process group."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from distgemm import GemmProblem, tune
from distgemm.bench.cases import LAYERS, cases
from distgemm.cli import main as cli
from distgemm.cli import tune as tune_command
from distgemm.runtime.executable import ExecutionConfig
from distgemm.tune import CACHE, UNFUSED, Tuned, TunedConfig, look_up

GPU = "NVIDIA Test"
EXAMPLE = Path(__file__).with_name("test_bench_example.json")
TILE = "128x256x64_2x1_cooperative"
GATHER = "all_gather_1d_tiling_cd_rotating_a"
TOKENS = ("--m", "2048", "--m", "8192")
PLAN = TunedConfig("plan", GATHER, (("chunks", 2),), ExecutionConfig("cublas", gemm_streams=2))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_command_prints_and_records(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    launched: list[Any] = []
    monkeypatch.setenv("COLUMNS", "200")

    def launch(
        function: Any, ranks: int, found: list[Any], write: bool, kernels: bool, to: Path | None, **more: Any
    ) -> list[Any]:
        launched.append(
            (ranks, [(case.pattern, case.problem.m) for case in found], write, kernels, to, more["backend"])
        )
        path = CACHE.path(GPU) if write else None
        times = {str(PLAN): 0.5, str(UNFUSED): 0.75}
        return [[Tuned(PLAN, times, {"some plan": "no kernel"}, path) for _ in found]]

    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    run = CliRunner().invoke(cli.app, ["tune", "--tp", "8", "--ranks", "4", *TOKENS, "--pattern", "ag+gemm"])
    assert run.exit_code == 0, run.output
    cases = [("ag+gemm", 2048), ("ag+gemm", 8192)] * 2
    assert launched == [(4, cases, True, True, None, "nccl")]
    assert run.output.count("chunks=2, GEMMs by cublas, 2 GEMM streams") == 4
    assert "0.5000" in run.output and "1.500" in run.output
    assert "not measured: some plan: no kernel" in run.output
    assert str(cache / "plans_NVIDIA_Test.json") in run.output
    run = CliRunner().invoke(cli.app, ["tune", "--no-write", "--no-kernels", "--tp", "4"])
    assert launched[1][0] == 4 and launched[1][2:4] == (False, False)
    assert "configurations are in" not in run.output
    run = CliRunner().invoke(cli.app, ["tune", "--json", "times.json"])
    assert run.exit_code == 0 and launched[-1][4] == Path("times.json").absolute()
    run = CliRunner().invoke(cli.app, ["tune", "--json", "-"])
    assert launched[-1][4] is None and len(json.loads(run.stdout)["layers"]) == 4
    for models in (["all"], ["llama-3-8b", "llama-3-70b", "llama-3-405b"]):
        run = CliRunner().invoke(cli.app, ["tune", *(word for name in models for word in ("--model", name))])
        assert run.exit_code == 0 and len(launched[-1][1]) == 12, run.output
    run = CliRunner().invoke(cli.app, ["tune", "--layer", "fc1", "--layer", "out"], env={"COLUMNS": "80"})
    table, _, path = run.stdout.partition("configurations are in ")
    assert len(launched[-1][1]) == 2 and max(map(len, table.splitlines())) <= 80 and path


def test_a_benchmark_is_recorded(cache: Path, tmp_path: Path) -> None:
    """The fastest method of each row, or the unfused program if that is hardly slower."""
    example = json.loads(EXAMPLE.read_text())
    gather, scatter, reduce = example["rows"]
    tile = {**gather["methods"][0], "name": f"{GATHER} config={TILE} gemm_streams=1 execution=per_tile"}
    tile["rounds"] = [ms / 2 for ms in tile["rounds"]]
    gather["methods"].append(tile)  # per-tile kernels do not execute all calls, so it has a fallback
    for method in scatter["methods"]:
        if method["name"] == "NCCL + cuBLAS":
            method["rounds"] = [0.73]  # the fastest plan takes 0.721: not clearly less
    (two_shot,) = (method for method in reduce["methods"] if method["name"] == "torch two-shot + cuBLAS")
    reduce["methods"].append({**two_shot, "name": "torch two-shot + cuBLAS, copied", "rounds": [0.6]})
    two_shot["rounds"] = [0.5]  # its result stays in symmetric memory: no program of this library does that
    file, table = tmp_path / "bench.json", tmp_path / "times.json"
    file.write_text(json.dumps(example))
    run = CliRunner().invoke(cli.app, ["tune", "--from", str(file), "--json", str(table)])
    assert run.exit_code == 0 and "plans_H200_of_a_fable.json" in run.output, run.output

    found = [
        look_up(GemmProblem(row["m"], row["n"], row["k"]), row["pattern"], row["ranks"], example["about"]["gpu"])
        for row in example["rows"]
    ]
    assert all(found)
    first, *others = [config for config in found if config is not None]
    assert first.execution.config == TILE and first.fallback is not None
    assert first.fallback.text == f"{GATHER} chunks=1 provider=cutlass"
    assert [(config.method, config.collective) for config in others] == [("unfused", "nccl"), ("unfused", "two-shot")]
    assert "CUDA out of memory" in run.output  # a method that was not measured
    layers = json.loads(table.read_text())["layers"]
    assert [next(iter(layer["ms"].values())) for layer in layers] == [0.70555, 0.721, 0.6]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"wrong": True, "error": "off by 3"}, "chunks=1 provider=cutlass was wrong: off by 3"),
        ({"name": "no_such_schedule"}, "no_such_schedule"),
    ],
)
def test_a_benchmark_with_wrong_rows_is_refused(
    changed: dict[str, Any], message: str, cache: Path, tmp_path: Path
) -> None:
    example = json.loads(EXAMPLE.read_text())
    example["rows"][0]["methods"][0] |= changed
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(example))
    run = CliRunner().invoke(cli.app, ["tune", "--from", str(file)], env={"COLUMNS": "300"})
    assert run.exit_code == 2 and message in run.output and not list(cache.glob("*.json"))


def test_a_method_without_times_is_not_recorded(tmp_path: Path) -> None:
    example = json.loads(EXAMPLE.read_text())
    example["rows"][0]["methods"][0]["rounds"] = []
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(example))
    run = CliRunner().invoke(cli.app, ["tune", "--from", str(file)])
    assert run.exit_code == 0 and "it was not measured" in run.stderr, run.output


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It joins the ranks that are there, and the first one reports."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("distgemm.runtime.launch.launch", lambda *given, **more: pytest.fail("ranks are started"))
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    result = Tuned(PLAN, {str(PLAN): 0.5}, {}, None)
    monkeypatch.setattr(tune_command, "run_rank", lambda found, *more: [result for _ in found])
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in (0, 1):
        monkeypatch.setattr("distgemm.runtime.launch.init_from_env", lambda *given, rank=rank: rank)
        run = CliRunner().invoke(cli.app, ["tune", "--layer", "fc1", "--json", "-"])
        assert (run.exit_code, bool(run.stdout)) == (0, rank == 0), run.output


def test_ranks_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*given: Any, **more: Any) -> list[Any]:
        raise RuntimeError("rank 1 was killed")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    run = CliRunner().invoke(cli.app, ["tune"])
    assert (run.exit_code, run.stderr) == (1, "error: rank 1 was killed\n")


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file")
    run = CliRunner().invoke(cli.app, ["tune", "--from", str(EXAMPLE)])
    assert run.exit_code == 2, run.output
    assert "plans_H200_of_a_fable.json cannot be written" in run.stderr and "set DISTGEMM_CACHE_DIR" in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--m", "many"], "--m: a whole number of at least 1, got 'many'"),
        (["--pattern", "ag"], "--pattern: one of ag+gemm, gemm+rs, gemm+ar, gemm+a2a, a2a+gemm, got 'ag'"),
        (["--model", "gpt"], "--model: one of"),
        (["--tp", "7"], "7 ranks cannot share n = 10240 of qkv evenly"),
        (["--json", "no/where/times.json"], "there is no folder no/where"),
        (["--ranks", "4", "--tp", "2"], "--ranks 4 is more than the --tp 2 ranks that share a layer"),
    ],
)
def test_wrong_arguments(words: list[str], message: str) -> None:
    run = CliRunner().invoke(cli.app, ["tune", *words])
    assert run.exit_code == 2 and message in run.output


def test_ranks_tune_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def fake(problem: GemmProblem, pattern: str, *, write: bool, kernels: bool, progress: Any) -> Any:
        progress("measuring")
        seen.append((problem.m, pattern, write, kernels))
        times = {str(UNFUSED): 2.0, str(PLAN): 1.0 + len(seen)}
        return SimpleNamespace(config=PLAN, times=times, refused={"a plan": "no kernel"})

    monkeypatch.setattr(tune, "tune", fake)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: ranks[0])
    found = cases(["llama-3-8b"], LAYERS, ["gemm+rs"], [128], 8, 8)
    written = tmp_path / "times.json"
    ranks = [1]
    assert len(tune_command.run_rank(found, True, False, written)) == 2 and not written.exists()
    ranks = [0]
    assert len(tune_command.run_rank(found, True, False, written)) == 2
    assert seen == [(128, "gemm+rs", True, False)] * 4
    layers = json.loads(written.read_text())["layers"]
    assert [(one["layer"], one["config"]) for one in layers] == [("8b out", str(PLAN)), ("8b fc2", str(PLAN))]
    assert [list(one["ms"].values()) for one in layers] == [[2.0, 4.0], [2.0, 5.0]]  # the fastest first
    assert layers[1]["problem"]["k"] == 14336 and layers[0]["refused"] == {"a plan": "no kernel"}
