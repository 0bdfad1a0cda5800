"""The rule of schedule="auto", the schedules of each pattern, why calls do not overlap, and what layers accept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import distgemm
from distgemm import GemmProblem
from distgemm.plan.patterns import does_pattern, schedule_does_pattern
from distgemm.schedulers import PATTERNS, Pattern
from distgemm.torch_ops import CHAIN_TOKENS, ONE_SHOT_TOKENS, CallRecord, dispatch, select_schedule


@pytest.mark.parametrize(
    ("pattern", "tokens", "name", "chunks"),
    [
        ("ag+gemm", 1, "all_gather_1d_tiling_cd_rotating_a", 1),
        ("ag+gemm", 2 * CHAIN_TOKENS, "all_gather_1d_tiling_cd_rotating_a", 1),
        ("gemm+rs", CHAIN_TOKENS - 1, "reduce_scatter_1d_pairwise_a", 1),
        ("gemm+rs", CHAIN_TOKENS, "reduce_scatter_1d_tiling_a_rotating_c", 2),
        ("gemm+ar", 1, "all_reduce_1d_one_shot_a", 1),
        ("gemm+ar", ONE_SHOT_TOKENS, "all_reduce_1d_one_shot_a", 1),
        ("gemm+ar", ONE_SHOT_TOKENS + 1, "all_reduce_1d_pairwise_a", 1),
        ("gemm+ar", CHAIN_TOKENS - 1, "all_reduce_1d_pairwise_a", 1),
        ("gemm+ar", CHAIN_TOKENS, "all_reduce_1d_tiling_a_rotating_c", 2),
    ],
)
def test_auto_takes_a_chain_for_many_tokens(pattern: Pattern, tokens: int, name: str, chunks: int) -> None:
    assert select_schedule(pattern, GemmProblem(tokens, 8, 8)) == (name, {"chunks": chunks})


def test_the_docs_say_from_how_many_tokens_auto_takes_a_chain() -> None:
    assert CHAIN_TOKENS == 6144
    page = Path(__file__).parents[2] / "docs" / "pytorch.md"
    if not page.exists():
        pytest.skip("a source archive has no docs/")
    assert re.findall(r"below (\d+) tokens", page.read_text()) == [str(CHAIN_TOKENS)]
    assert re.findall(r"up to (\d+) tokens", page.read_text()) == [str(ONE_SHOT_TOKENS)]


def test_a_schedule_does_one_pattern_at_most() -> None:
    """A schedule with other shards at its ends does none, whatever its name is."""
    found = {
        name: [pattern for pattern in PATTERNS if schedule_does_pattern(name, pattern)]
        for name in distgemm.list_schedules()
    }
    assert all(len(patterns) <= 1 for patterns in found.values())
    assert [name for name, patterns in found.items() if patterns == ["gemm+rs"]] == [
        "reduce_scatter_1d_pairwise_a",
        "reduce_scatter_1d_tiling_a_rotating_c",
    ]
    assert len([name for name, patterns in found.items() if patterns == ["ag+gemm"]]) == 5
    assert len([name for name, patterns in found.items() if patterns == ["gemm+ar"]]) == 4


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rows", [None, (3, 0, 4, 1)])
@pytest.mark.parametrize("n", [5, 8])
def test_a_plan_with_uneven_shards_does_the_same_pattern(
    pattern: Pattern, rows: tuple[int, ...] | None, n: int
) -> None:
    problem = GemmProblem(8, n, n, m_per_rank=None if pattern == "gemm+ar" else rows)
    name, options = select_schedule(pattern, problem)
    assert does_pattern(distgemm.make_plan(problem, name, 4, **options), pattern)


@pytest.mark.parametrize(
    ("schedule", "ranks", "options", "why"),
    [
        ("gemm+rs", 4, {"chunks": 2}, None),
        ("gemm+rs", 4, {"chunks": 1}, "a chain with one chunk"),
        ("gemm+rs", 4, {}, "a chain with one chunk"),
        ("gemm+rs", 4, {"mechanism": "store"}, "a chain with one chunk"),
        ("gemm+rs", 4, {"final_add": "kernel"}, None),
        ("gemm+ar", 2, {}, "a chain with one chunk"),
        ("gemm+ar", 2, {"chunks": 4}, None),
        ("all_reduce_1d_one_shot_a", 4, {}, "one GEMM on each rank"),
        ("all_reduce_1d_one_shot_a", 4, {"chunks": 2}, None),
        ("ag+gemm", 4, {}, None),
        ("all_gather_1d_ring_a", 4, {}, None),
        ("reduce_scatter_1d_pairwise_a", 4, {}, None),
        ("reduce_scatter_1d_pairwise_a", 4, {"mechanism": "store", "final_add": "epilogue"}, None),
        ("gemm+rs", 1, {"chunks": 2}, "one rank"),
    ],
)
def test_a_call_says_why_it_does_not_overlap(
    schedule: str, ranks: int, options: dict[str, Any], why: str | None
) -> None:
    """The plan decides, and not the schedule's name or which options were given."""
    plan = distgemm.make_plan(GemmProblem(8, 8, 8), schedule, ranks, **options)
    call = CallRecord("matmul_reduce_scatter", plan, tuple(options.items()), "runtime", "torch")
    reason = call.not_overlapped
    assert reason is None if why is None else reason is not None and reason.startswith(why)
    assert ("not overlapped, because" in str(call)) == (why is not None)


def test_torch_is_imported_when_it_is_used_and_the_gpu_code_later() -> None:
    code = (
        "import sys, distgemm; assert 'torch' not in sys.modules; distgemm.nn.ColwiseParallel(); "
        "distgemm.matmul_all_reduce; print('torch' in sys.modules, 'distgemm.gemm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True False\n", done.stderr


def test_before_the_first_call_there_is_no_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.CALLS, "last", None)
    with pytest.raises(ValueError, match="nothing has run yet: call a function of distgemm"):
        distgemm.last_call()


def test_a_layer_that_is_used_twice_has_both_names() -> None:
    linear = torch.nn.Linear(4, 3)
    model = torch.nn.ModuleDict({"one": linear, "other": linear})
    state = distgemm.nn.full_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "schedule", ["gemm+rs chunks=4 provider=cublas", "unfused", "unfused collective=two-shot", "auto"]
)
def test_layers_take_the_text_of_a_configuration(schedule: str) -> None:
    assert distgemm.nn.RowwiseParallel(schedule=schedule).options["schedule"] == schedule


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("gemm+sr chunks=2", "gemm"),
        ("chunks=2", "a configuration is a schedule's name and options"),
        ("gemm+rs wait_by=events", "wait_by is one of"),
        ("gemm+rs provider=mkl", "provider is one of"),
        ("unfused final_add=kernel", "and no final_add"),
    ],
)
def test_layers_refuse_the_text_of_no_configuration(schedule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distgemm.nn.ColwiseParallel(schedule=schedule)
