"""What schedule="auto" takes, which schedules an op takes, and that torch is imported only when it is needed."""

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
from distgemm.torch_ops import CHAIN_TOKENS, choose_schedule
from distgemm.torch_ops.dispatch import Call, _does, _schedule_does

KINDS = ("ag+gemm", "gemm+rs", "gemm+ar")


@pytest.mark.parametrize(
    ("kind", "tokens", "name", "chunks"),
    [
        ("ag+gemm", 1, "all_gather_1d_tiling_cd_rotating_a", 1),
        ("ag+gemm", 2 * CHAIN_TOKENS, "all_gather_1d_tiling_cd_rotating_a", 1),
        ("gemm+rs", CHAIN_TOKENS - 1, "reduce_scatter_1d_pairwise_a", 1),
        ("gemm+rs", CHAIN_TOKENS, "reduce_scatter_1d_tiling_a_rotating_c", 2),
        ("gemm+ar", CHAIN_TOKENS - 1, "all_reduce_1d_pairwise_a", 1),
        ("gemm+ar", CHAIN_TOKENS, "all_reduce_1d_tiling_a_rotating_c", 2),
    ],
)
def test_auto(kind: str, tokens: int, name: str, chunks: int) -> None:
    assert choose_schedule(kind, GemmProblem(tokens, 8, 8), 4) == (name, {"chunks": chunks})


def test_the_chain_is_taken_from_as_many_tokens_on_as_the_docs_say() -> None:
    assert CHAIN_TOKENS == 6144
    page = Path(__file__).parents[2] / "docs" / "pytorch.md"
    if not page.exists():
        pytest.skip("a source archive has no docs/")
    assert re.findall(r"below (\d+) tokens", page.read_text()) == [str(CHAIN_TOKENS)]


def test_schedules_are_of_one_kind_at_most() -> None:
    """Those with other shards at their ends are of none, however they are called."""
    found = {name: [kind for kind in KINDS if _schedule_does(name, kind)] for name in distgemm.list_schedules()}
    assert all(len(kinds) <= 1 for kinds in found.values())
    assert [name for name, kinds in found.items() if kinds == ["gemm+rs"]] == [
        "reduce_scatter_1d_pairwise_a",
        "reduce_scatter_1d_tiling_a_rotating_c",
    ]
    assert len([name for name, kinds in found.items() if kinds == ["ag+gemm"]]) == 5
    assert len([name for name, kinds in found.items() if kinds == ["gemm+ar"]]) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, (3, 0, 4, 1)])
@pytest.mark.parametrize("n", [5, 8])
def test_uneven_shards_change_nothing_about_the_kind(kind: str, rows: tuple[int, ...] | None, n: int) -> None:
    problem = GemmProblem(8, n, n, m_per_rank=None if kind == "gemm+ar" else rows)
    name, options = choose_schedule(kind, problem, 4)
    assert _does(distgemm.make_plan(problem, name, 4, **options), kind)


@pytest.mark.parametrize(
    ("schedule", "ranks", "options", "why"),
    [
        ("gemm+rs", 4, {"chunks": 2}, None),
        ("gemm+rs", 4, {"chunks": 1}, "a chain with one chunk"),
        ("gemm+rs", 4, {}, "a chain with one chunk"),
        ("gemm+rs", 4, {"mechanism": "store"}, "a chain with one chunk"),
        ("gemm+rs", 4, {"final_add": "kernel"}, None),
        ("gemm+ar", 2, {}, "a chain with one chunk"),
        ("gemm+ar", 2, {"chunks": 4, "stagger": 2}, None),
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
    """Whatever the schedule is called, and whether its options were given or are the usual ones."""
    plan = distgemm.make_plan(GemmProblem(8, 8, 8), schedule, ranks, **options)
    call = Call("matmul_reduce_scatter", plan, tuple(options.items()), "runtime", "torch")
    said = call.not_overlapped
    assert said is None if why is None else said is not None and said.startswith(why)
    assert ("not overlapped, because" in str(call)) == (why is not None)


def test_torch_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, distgemm; assert 'torch' not in sys.modules; distgemm.nn.ColwiseParallel(); "
        "distgemm.matmul_all_reduce; print('torch' in sys.modules, 'distgemm.gemm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True False\n", done.stderr


def test_before_the_first_call_there_is_no_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgemm.torch_ops.dispatch._Last.call", None)
    with pytest.raises(ValueError, match="nothing has run yet: call all_gather_matmul"):
        distgemm.last_call()


def test_layers_that_are_tied_have_all_their_names() -> None:
    linear = torch.nn.Linear(4, 3)
    model = torch.nn.ModuleDict({"one": linear, "other": linear})
    state = distgemm.nn.full_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "schedule", ["gemm+rs chunks=4 provider=cublas", "unfused", "unfused collective=two-shot", "auto"]
)
def test_layers_take_what_pins_a_choice(schedule: str) -> None:
    assert distgemm.nn.RowwiseParallel(schedule=schedule).how["schedule"] == schedule


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("gemm+sr chunks=2", "gemm"),
        ("chunks=2", "a choice is a schedule's name and options"),
        ("gemm+rs waits=events", "waits is one of"),
        ("gemm+rs provider=mkl", "provider is one of"),
        ("unfused stagger=2", "and no stagger"),
    ],
)
def test_layers_refuse_what_pins_no_choice(schedule: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distgemm.nn.ColwiseParallel(schedule=schedule)
