"""The benchmark's cases: extents, and the schedules that are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import pytest

from distgemm import make_plan
from distgemm.bench.cases import CANDIDATES, FEWER_CANDIDATES, LAYERS, cases, jobs, parse_candidate
from distgemm.measure.models import MODELS
from distgemm.plan.patterns import does_pattern
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import PATTERNS, Pattern, list_patterns


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (2, 8), (4, 8), (8, 8)])
def test_each_rank_has_the_share_of_one_of_tp_ranks(model: str, ranks: int, tp: int) -> None:
    found = cases([model], LAYERS, PATTERNS, [128, 16384], ranks, tp)
    assert len(found) == 2 * (2 + 2 * 2)
    layers = {layer.name: layer for layer in MODELS[model].layers}
    for case in found:
        n, k = (case.n // ranks, case.k) if case.pattern == "ag+gemm" else (case.n, case.k // ranks)
        assert (case.m, n, k) == case.local == layers[case.layer].local(case.m, tp)
        assert case.pattern in layers[case.layer].patterns
        assert case.problem == GemmProblem(case.m, case.n, case.k)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (2, 8), (8, 8)])
def test_each_rank_of_an_all_to_all_has_its_rows_and_whole_weights(ranks: int, tp: int) -> None:
    """It multiplies as much as with the layer's other pattern."""
    found = cases(["llama-3-70b"], LAYERS, list_patterns(), [2048], ranks, tp)
    by_pattern = {(case.layer, case.pattern): case for case in found}
    assert {layer: pattern for layer, pattern in by_pattern if pattern not in PATTERNS} == {
        "qkv": "gemm+a2a",
        "out": "a2a+gemm",
    }
    for layer, pattern, other in (("qkv", "gemm+a2a", "ag+gemm"), ("out", "a2a+gemm", "gemm+rs")):
        case, sharded = by_pattern[layer, pattern], by_pattern[layer, other]
        assert case.problem == sharded.problem and case.local == (case.m // ranks, case.n, case.k)
        assert prod(case.local) == prod(sharded.local)


def test_the_order_of_cases_and_their_candidates() -> None:
    found = jobs(cases(["llama-3-8b"], ["fc2", "qkv"], ["ag+gemm", "gemm+ar"], [512, 128], 4, 4, "float16"))
    assert [(case.layer, case.pattern, case.m, case.n, case.k) for case, _ in found] == [
        ("qkv", "ag+gemm", 512, 6144, 4096),
        ("qkv", "ag+gemm", 128, 6144, 4096),
        ("fc2", "gemm+ar", 512, 4096, 14336),
        ("fc2", "gemm+ar", 128, 4096, 14336),
    ]
    assert {case.problem.dtype for case, _ in found} == {"float16"}
    for case, tried in found:
        assert tuple(config.text for config in tried) == CANDIDATES[case.pattern]


@pytest.mark.parametrize("tried", [CANDIDATES, FEWER_CANDIDATES])
@pytest.mark.parametrize("pattern", list_patterns())
@pytest.mark.parametrize("ranks", [2, 4])
def test_default_schedules_do_the_pattern(tried: Mapping[Pattern, Sequence[str]], pattern: Pattern, ranks: int) -> None:
    for text in tried[pattern]:
        plan = parse_candidate(text).plan(GemmProblem(64, 48, 32), ranks)
        assert [other for other in list_patterns() if does_pattern(plan, other)] == [pattern]
        assert plan.sync == "barrier"  # as distgemm.compile plans


def test_schedules_are_tried_on_the_cases_whose_pattern_they_do() -> None:
    given = ["gemm+rs", "ag+gemm chunks=2", "gemm+ar gemm_streams=1 provider=cublas"]
    found = jobs(cases(["llama-3-8b"], LAYERS, PATTERNS, [128], 4, 8), given)
    tried = {case.pattern: [config.text for config in tried] for case, tried in found}
    assert tried == {
        "ag+gemm": ["ag+gemm chunks=2"],
        "gemm+rs": ["gemm+rs"],
        "gemm+ar": ["gemm+ar provider=cublas gemm_streams=1"],
    }


def test_a_schedule_on_a_mesh() -> None:
    problem = GemmProblem(64, 48, 32)
    meshed = parse_candidate("tensor_parallel_2d mesh=2x2")
    assert meshed.plan(problem, 4) == make_plan(problem, "tensor_parallel_2d", mesh=(2, 2), sync="barrier")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a schedule's name and options"),
        ("chunks=2", "a schedule's name and options"),
        ("gemm+rs chunks", "chunks=2, got 'chunks'"),
        ("gemm+xs", "gemm\\+xs"),
        ("gemm+rs gemm_streams=3", "gemm_streams is an integer from 1 to 2"),
        ("unfused", "a schedule is wanted"),
    ],
)
def test_candidates_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_candidate(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ["gpt"]}, "model is one of"),
        ({"layers": ["fc3"]}, "--layer is one of qkv, out, fc1, fc2, got 'fc3'"),
        ({"patterns": ["gemm"]}, "--pattern is one of"),
        ({"ms": [130]}, "--m is a multiple of the 4 ranks, got 130"),
        ({"tp": 7}, "7 ranks cannot share n = 6144 of qkv evenly"),
        ({"ranks": 16}, "--ranks 16 is more than the --tp 8 ranks that share a layer"),
        ({"ranks": 1}, "--ranks is at least 2, got 1"),
        ({"layers": ["qkv"], "patterns": ["gemm+rs"]}, "none of the layers qkv has the pattern gemm\\+rs"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"models": ["llama-3-8b"], "layers": LAYERS, "patterns": PATTERNS, "ms": [128]}
    with pytest.raises(ValueError, match=message):
        jobs(cases(**({**given, "ranks": 4, "tp": 8} | change)))


def test_a_schedule_that_does_no_pattern_is_refused() -> None:
    found = cases(["llama-3-8b"], LAYERS, PATTERNS, [128], 4, 8)
    with pytest.raises(ValueError, match="mesh=2x2: on 4 ranks it does none of ag\\+gemm"):
        jobs(found, ["tensor_parallel_2d mesh=2x2"])
