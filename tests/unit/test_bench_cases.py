"""What is measured: extents, the schedules that are tried, and what the command line says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from distgemm import make_plan
from distgemm.bench.cases import CANDIDATES, FEWER, LAYERS, OPS, Candidate, Job, boxes, jobs, parse_schedule
from distgemm.cli import bench as bench_command
from distgemm.cli import main as cli
from distgemm.measure.models import MODELS
from distgemm.plan.problem import GemmProblem


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "160"})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (2, 8), (4, 8), (8, 8)])
def test_each_rank_has_what_it_has_among_tp_ranks(model: str, ranks: int, tp: int) -> None:
    found = jobs([model], LAYERS, OPS, [128, 16384], ranks, tp)
    assert len(found) == 2 * (2 + 2 * 2)
    layers = {layer.name: layer for layer in MODELS[model].layers}
    for case, _ in found:
        n, k = (case.n // ranks, case.k) if case.op == "ag+gemm" else (case.n, case.k // ranks)
        assert (case.m, n, k) == layers[case.layer].local(case.m, tp)
        assert case.op in layers[case.layer].ops


def test_order_and_choice_of_cases() -> None:
    found = jobs(["llama-3-8b"], ["fc2", "qkv"], ["ag+gemm", "gemm+ar"], [512, 128], 4, 4)
    assert [(case.layer, case.op, case.m, case.n, case.k) for case, _ in found] == [
        ("qkv", "ag+gemm", 512, 6144, 4096),
        ("qkv", "ag+gemm", 128, 6144, 4096),
        ("fc2", "gemm+ar", 512, 4096, 14336),
        ("fc2", "gemm+ar", 128, 4096, 14336),
    ]
    assert [tried for _, tried in found] == [CANDIDATES["ag+gemm"]] * 2 + [CANDIDATES["gemm+ar"]] * 2


@pytest.mark.parametrize("tried", [CANDIDATES, FEWER])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_default_schedules_do_the_op(tried: dict[str, tuple[Candidate, ...]], op: str, ranks: int) -> None:
    problem = GemmProblem(64, 48, 32)
    for candidate in tried[op]:
        assert candidate.plan(problem, ranks).shards == boxes(op, problem, ranks)
        assert candidate.plan(problem, ranks).sync == "barrier"  # as distgemm.compile plans


def test_schedules_go_where_they_fit() -> None:
    given = [parse_schedule(text) for text in ("gemm+rs", "ag+gemm chunks=2", "gemm+ar gemm_streams=1 provider=cublas")]
    found = jobs(["llama-3-8b"], LAYERS, OPS, [128], 4, 8, given)
    tried = {case.op: [str(one) for one in tried] for case, tried in found}
    assert tried == {
        "ag+gemm": ["ag+gemm chunks=2"],
        "gemm+rs": ["gemm+rs"],
        "gemm+ar": ["gemm+ar gemm_streams=1 provider=cublas"],
    }


def test_parsing_of_schedules() -> None:
    assert parse_schedule("  gemm+rs  chunks=2 provider=cublas ") == Candidate(
        "gemm+rs", {"chunks": 2, "provider": "cublas"}
    )
    meshed = parse_schedule("tensor_parallel_2d mesh=2x2")
    assert meshed.options == {"mesh": (2, 2)}
    problem = GemmProblem(64, 48, 32)
    assert meshed.plan(problem, 4) == make_plan(problem, "tensor_parallel_2d", mesh=(2, 2), sync="barrier")
    for text, said in [
        ("", "takes a name and options"),
        ("chunks=2", "takes a name and options"),
        ("gemm+rs chunks", "chunks=2, got 'chunks'"),
        ("gemm+xs", "gemm\\+xs"),
    ]:
        with pytest.raises(ValueError, match=said):
            parse_schedule(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": ["gpt"]}, "model is one of"),
        ({"layers": ["fc3"]}, "--layers takes some of qkv, out, fc1, fc2, got 'fc3'"),
        ({"ops": ["gemm"]}, "--ops takes some of"),
        ({"ms": [130]}, "--m is a multiple of the 4 ranks, got 130"),
        ({"ms": [0]}, "got 0"),
        ({"tp": 7}, "7 ranks cannot share n = 6144 of qkv evenly"),
        ({"ranks": 16}, "--ranks is at least 2 and at most --tp, got 16 and 8"),
        ({"ranks": 1}, "at least 2"),
        ({"layers": ["qkv"], "ops": ["gemm+rs"]}, "none of the layers qkv runs as gemm\\+rs"),
        ({"candidates": [Candidate("tensor_parallel_2d", {"mesh": (2, 2)})]}, "on 4 ranks it does none of ag\\+gemm"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"models": ["llama-3-8b"], "layers": LAYERS, "ops": OPS, "ms": [128], "ranks": 4, "tp": 8}
    with pytest.raises(ValueError, match=said):
        jobs(**(given | change))


# --- the command ----------------------------------------------------------------------------------------


def test_without_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    done = invoke("--quick")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "bench measures on GPUs, and torch finds none" in done.stderr


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be measured on four GPUs."""
    found: list[dict[str, Any]] = []

    def measure(todo: list[Job], size: int, settings: Any, path: Path, timeout: float, plots: list[Path]) -> None:
        found.append({"todo": todo, "size": size, "settings": settings, "path": path, "plots": plots})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(bench_command, "_measure", measure)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def test_lists_on_the_command_line(measured: list[dict[str, Any]]) -> None:
    for line in (
        "--model llama-3-8b llama-3-70b --m 128 512 2048 --layers qkv,fc2 --tp 8",
        "--model llama-3-8b,llama-3-70b --m 128 --m 512,2048 --layers qkv --layers fc2 --tp=8",
    ):
        done = invoke(*line.split())
        assert done.exit_code == 0, done.output
    one, other = measured
    assert one["todo"] == other["todo"]
    assert [(case.model, case.layer, case.m) for case, _ in one["todo"]] == [
        (model, layer, m)
        for model in ("llama-3-8b", "llama-3-70b")
        for layer in ("qkv", "fc2")
        for m in (128, 512, 2048)
    ]
    assert one["size"] == 4
    assert {(case.ranks, case.tp) for case, _ in one["todo"]} == {(4, 8)}


def test_defaults_and_quick(measured: list[dict[str, Any]]) -> None:
    assert invoke().exit_code == 0
    assert invoke("--quick").exit_code == 0
    assert invoke("--model", "all", "--ops", "gemm+ar", "--schedule", "gemm+ar", "--rounds", "7").exit_code == 0
    usual, quick, every = measured
    assert {str(case) for case, _ in usual["todo"]} == {str(case) for case, _ in quick["todo"]}
    assert {case.model for case, _ in usual["todo"]} == {"llama-3-70b"}
    assert [len(tried) for _, tried in usual["todo"]] == [4, 5, 4, 5]
    assert [len(tried) for _, tried in quick["todo"]] == [2, 2, 2, 2]
    assert (usual["settings"].rounds, quick["settings"].rounds, every["settings"].rounds) == (5, 3, 7)
    assert (usual["settings"].peers, quick["settings"].peers) == (True, False)
    assert [(case.model, case.layer) for case, _ in every["todo"]] == [
        (model, layer) for model in MODELS for layer in ("out", "fc2")
    ]
    assert {str(one) for _, tried in every["todo"] for one in tried} == {"gemm+ar"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ranks 8", "8 ranks take as many GPUs, found 4"),
        ("--m many", "--m takes numbers of tokens, got 'many'"),
        ("--plot x.pdf", "--plot takes a .svg or .png file, got 'x.pdf'"),
        ("--json nowhere/x.json", "there is no folder nowhere"),
        ("--schedule gemm+ar", "--schedule gemm+ar: on 8 ranks it does none of ag+gemm, gemm+rs"),
    ],
)
def test_refused_lines(measured: list[dict[str, Any]], line: str, said: str) -> None:
    done = invoke(*line.split())
    assert (done.exit_code, done.stdout, measured) == (2, "", [])
    assert said in done.stderr


def test_values_in_quotes(measured: list[dict[str, Any]]) -> None:
    assert invoke("--m", "128 512", "--layers", "out,fc2").exit_code == 0
    assert {case.m for case, _ in measured[0]["todo"]} == {128, 512}
    assert {case.layer for case, _ in measured[0]["todo"]} == {"out", "fc2"}


def test_under_torchrun(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke().exit_code == 0
    assert measured[0]["size"] == 2
    assert "--ranks 4, but torchrun has started 2" in invoke("--ranks", "4").stderr
