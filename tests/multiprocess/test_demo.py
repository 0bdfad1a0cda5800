"""The demo: it passes and prints that, and fails if the result is further off than rounding explains."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from distgemm.bench import methods
from distgemm.cli import demo_run as module
from distgemm.cli.demo_run import MeasuredLayer, UnfusedProgram, demo, layers_table, measurements
from distgemm.cli.doctor import Check
from distgemm.measure import operation, timing
from distgemm.measure.operation import Method
from distgemm.plan.problem import GemmProblem
from distgemm.tune import TunedConfig


def test_demo_passes_on_uneven_shards() -> None:
    text = io.StringIO()
    schedules = ("all_gather_1d_tiling_cd_rotating_b", "reduce_scatter_1d_tiling_b_rotating_c")
    demo(3, *schedules, scale=256, dtype="bfloat16", console=Console(file=text, width=160))
    printed = text.getvalue()
    assert printed.count(": pass") == 2 and printed.count(": equal") == 2
    for expected in (*schedules, "padded shards", "all_reduce and a slice", "2, 2, 0"):
        assert expected in printed


def test_demo_raises_when_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "error_bound", lambda plan: 1e-12)
    with pytest.raises(RuntimeError, match=r"exceeds 1\.00e-12"):
        demo(2, scale=256, console=Console(file=io.StringIO()))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="scale"):
        demo(2, scale=0)
    with pytest.raises(ValueError, match="dtype is one of float64"):
        demo(2, dtype="float8_e4m3fn")


# --- whole layers on GPUs -------------------------------------------------------------------------------

RESULTS = [
    MeasuredLayer(
        "fc1", GemmProblem(8192, 57344, 8192), {"NCCL + cuBLAS": 4.0, "all_gather_x": 3.0, "cuBLAS alone": 2.8}
    ),
    MeasuredLayer("fc2", GemmProblem(8192, 8192, 28672), {"reduce_scatter_x chunks=2": 2.0, "NCCL + cuBLAS": 1.6}),
]


def printed(*what: object) -> str:
    text = io.StringIO()
    Console(file=text, width=140).print(*what)
    return text.getvalue()


def test_the_table_of_layers() -> None:
    lines = [" ".join(line.split()) for line in printed(layers_table(RESULTS, 4)).splitlines() if "%" in line]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert rows == [
        ["fc1, 8192 x 57344 x 8192", "cuBLAS alone", "2.800", "687", "70 %"],
        ["", "all_gather_x", "3.000", "641", "75 %"],
        ["", "NCCL + cuBLAS", "4.000", "481", "100 %"],
        ["fc2, 8192 x 8192 x 28672", "NCCL + cuBLAS", "1.600", "601", "100 %"],
        ["", "reduce_scatter_x chunks=2", "2.000", "481", "125 %"],
    ]


def test_the_layers_that_are_measured() -> None:
    what = measurements(8192, 4)
    assert (what.ranks, what.tokens) == (4, 8192)
    assert [(name, pattern, p.m, p.n, p.k) for name, pattern, p in what.layers] == [
        ("qkv", "ag+gemm", 8192, 10240, 8192),
        ("out", "gemm+rs", 8192, 8192, 8192),
        ("fc1", "ag+gemm", 8192, 57344, 8192),
        ("fc2", "gemm+rs", 8192, 8192, 28672),
    ]
    assert [measurements(8192, gpus).ranks for gpus in (0, 1, 2, 3, 6, 8)] == [0, 1, 2, 2, 4, 8]
    with pytest.raises(ValueError, match="must be a multiple of the 4 GPUs in use, got 8190"):
        measurements(8190, 4)


def test_layers_are_measured_if_the_cuda_runtime_works(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def launch(function: Callable[..., Any], ranks: int, *arguments: Any, **keywords: Any) -> list[Any]:
        launched.append((function, ranks, arguments, keywords["backend"]))
        return [RESULTS] * ranks

    def run(works: Check, gpus: int) -> str:
        text = io.StringIO()
        monkeypatch.setattr(module, "runtimes", lambda facts: [Check("reference", "ok", ""), works])
        module.measure_layers(Console(file=text, width=140), measurements(8192, gpus))
        return text.getvalue()

    monkeypatch.setattr(module, "look", lambda: None)
    monkeypatch.setattr(module, "launch", launch)
    text = run(Check("cuda", "fix", "compiler: nvcc was not found"), 4)
    assert text == ("The CUDA runtime is not measured: compiler: nvcc was not found (see distgemm doctor)\n")
    assert "it needs two GPUs to move anything" in run(Check("cuda", "ok", ""), 1)
    assert not launched
    text = run(Check("cuda", "ok", ""), 2)
    assert launched == [(module.run_layers, 2, (measurements(8192, 2).layers,), "nccl")]
    assert "8192 tokens, bfloat16, on 2 GPUs" in text and "all_gather_x" in text


def test_each_rank_measures_all_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def method(operation: Any, config: TunedConfig) -> Method:
        return Method(f"{operation[1]}: {config.text}", lambda: None)

    def others(operation: Any) -> list[Method]:
        names = ("NCCL + cuBLAS", "torch fused", "cuBLAS alone", "NCCL alone")
        return [Method(name, lambda: None) for name in names]

    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD="all"))
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(operation, "Operation", lambda problem, pattern, *more: (problem, pattern, *more))
    monkeypatch.setattr(methods, "schedule_method", method)
    monkeypatch.setattr(operation, "torch_methods", others)
    monkeypatch.setattr(timing, "measure", lambda operation, methods: {each.name: 1.0 for each in methods})
    qkv, out, *_ = module.run_layers(measurements(8192, 2).layers)
    assert list(qkv.ms) == ["ag+gemm: all_gather_1d_tiling_cd_rotating_a", *module.COMPARED]
    assert list(out.ms) == [
        "gemm+rs: reduce_scatter_1d_tiling_a_rotating_c chunks=2",
        "gemm+rs: reduce_scatter_1d_pairwise_a",
        *module.COMPARED,
    ]
    assert "measuring qkv (1 of 4)" in capsys.readouterr().err


def test_the_measured_schedules_do_the_layers_patterns() -> None:
    for _, pattern, problem in measurements(8192, 4).layers:
        for text in module.SCHEDULES[pattern]:
            plan = TunedConfig.parse(text).plan(problem, 4)
            moved = UnfusedProgram(plan)
            assert (moved.gathered, moved.sums, moved.blocks) == (
                ("A", False, True) if pattern == "ag+gemm" else ("", True, True)
            )
