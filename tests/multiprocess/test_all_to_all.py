"""matmul_all_to_all and all_to_all_matmul over gloo, against the whole product. One launch runs all checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm.runtime.launch import launch
from tests.multiprocess import all_to_all_worker as worker
from tests.multiprocess.ops_torch_worker import run_all
from tests.once import once

TO, BACK = "all_to_all_1d_rotating_d", "all_to_all_1d_rotating_a"

CHECKS: dict[int, list[Any]] = {
    2: [
        (worker.gradients, ()),
        (worker.compiled, ()),
        (worker.checked_by_torch, ()),
        (worker.autocast, ()),
    ],
    3: [
        (worker.gradients, ()),
        (worker.what_ran, ()),
        (worker.twice, ()),
        (worker.misuse, ()),
        *([(worker.in_a_model, ())] if worker.EXAMPLES.exists() else []),
        (worker.new_layers, ()),
        (worker.wrong_layers, ()),
    ],
}


@once
def results(ranks: int) -> list[dict[str, Any]]:
    checks = [(worker.equal_to_the_whole, (worker.cases(ranks),)), *CHECKS.get(ranks, [])]
    return launch(run_all, ranks, checks, timeout=240)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", CHECKS)
def test_results_and_gradients_are_those_of_the_whole_product(ranks: int) -> None:
    assert [failure for found in results(ranks) for failure in found["equal_to_the_whole"]] == []


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [1, 4, 5, 6, 7, 8])
def test_other_numbers_of_ranks(ranks: int) -> None:
    assert [failure for found in results(ranks) for failure in found["equal_to_the_whole"]] == []


@pytest.mark.parametrize("ranks", CHECKS)
def test_gradcheck(ranks: int) -> None:
    assert [found["gradients"] for found in results(ranks)] == [[]] * ranks


def test_second_derivatives_are_right_or_raise() -> None:
    assert [found["twice"] for found in results(3)] == [[]] * 3


def test_torch_compile_needs_no_graph_break() -> None:
    assert [found["compiled"] for found in results(2)] == [[], []]


@pytest.mark.sample(0)
def test_inductor_keeps_the_order_of_calls_on_all_ranks() -> None:
    """Ranks with unequal shards need unequal memory, by which inductor reorders what is independent."""
    assert launch(worker.compiled_by_inductor, 2, timeout=240) == [[], []]


def test_opcheck() -> None:
    assert [found["checked_by_torch"] for found in results(2)] == [None, None]


def test_autocast_casts_as_for_a_linear() -> None:
    assert [found["autocast"] for found in results(2)] == [[], []]


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("scatter", [("matmul_all_to_all", TO), ("all_to_all_matmul", BACK)]),
        ("scatter, b frozen", [("matmul_all_to_all", TO), ("all_to_all_matmul", BACK)]),
        ("scatter, a frozen", [("matmul_all_to_all", TO), ("gather", BACK)]),
        ("gather", [("all_to_all_matmul", BACK), ("matmul_all_to_all", TO)]),
        ("gather, b frozen", [("all_to_all_matmul", BACK), ("matmul_all_to_all", TO)]),
    ],
)
def test_only_the_plan_runs(what: str, wanted: list[tuple[str, str]]) -> None:
    """Forward and backward send what the plans' links carry, and nothing else moves."""
    for found in results(3):
        ran, sent, links, last = found["what_ran"][what]
        assert ran == wanted
        assert sent == links and len(links) == 2
        assert wanted[0][1] in last and "collective runtime over gloo, GEMMs by torch; overlapped" in last


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("features", "b (out_features, in_features), as a Linear's weight; got (2, 3) and (4, 5)"),
        ("dtype", "b.to(torch.float32) would do"),
        ("odd columns", "7 columns are not the same number for each of 3 ranks; n_per_rank says how many columns each"),
        ("odd copies", "copies is a divisor of the number of ranks, 3, got 4"),
        ("no copies", "matmul_all_to_all: copies is an integer >= 1"),
        ("columns of copies", "n_per_rank has 3 integers, one for each rank, 3 ranks with the same columns, with"),
        ("unequal copies", "with copies=3, each 3 consecutive ranks have the same columns, got n_per_rank="),
        ("sum of columns", "n_per_rank has 3 integers, one for each rank with the sum 6, got [1, 1, 1]"),
        ("number of columns", "n_per_rank has 3 integers, one for each rank with the sum 6, got [6]"),
        ("negative columns", "matmul_all_to_all: n_per_rank is"),
        ("bias", "bias is (6,)"),
        ("one bias for several", "matmul_all_to_all: bias is a sequence of 2 tensors, as there are 2 b"),
        ("columns for several", "n_per_rank is a sequence of 2 sequences of integers, as there are 2 b"),
        ("copies for several", "copies is a sequence of 2 integers, as there are 2 b"),
        ("none", "b is a tensor, or a sequence of at least one"),
        ("rows of this rank", "m_per_rank has an integer for each of 3 ranks, its rows, and 2 for rank"),
        ("no schedule for it", "is no schedule for gemm+a2a; schedule='auto', or one of all_to_all_1d_pairwise_xor"),
        ("unfused", "gemm+a2a has no unfused program; schedule='auto', or the name of a schedule"),
        ("copies of xor", "copies is a divisor of the number of ranks, 3, got 2"),
        ("shares", "a has 2 columns on this rank and 6 on all ranks, so b is (out_features, 6), as a Linear's"),
        ("columns of this rank", "k_per_rank says "),
        ("odd rows", "7 rows are not the same number for each of 3 ranks"),
        ("sum of rows", "m_per_rank has 3 integers, one for each rank, with the sum 6, got [1, 1, 1]"),
        ("list", "all_to_all_matmul: a is a torch.Tensor"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(what: str, message: str) -> None:
    for rank, found in enumerate(results(3)):
        if what == "columns of this rank" and rank == 0:
            message = "k_per_rank says 6 columns for rank 0, whose a has 2, got [6, 0, 0]"
        assert found["misuse"][what].startswith("ValueError: "), found["misuse"][what]
        assert message.removesuffix("6 columns for rank 0, whose a has 2, got [6, 0, 0]") in found["misuse"][what]
        assert found["misuse"]["after"] == "2"


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", worker.SIZES)
def test_attention_is_that_of_one_rank(ranks: int) -> None:
    assert launch(worker.in_attention, ranks, timeout=120) == [[]] * ranks


@pytest.mark.skipif(not worker.EXAMPLES.exists(), reason="a source archive has no examples/")
def test_a_model_of_styles_is_that_of_one_rank() -> None:
    """4 heads of keys over 3 ranks."""
    assert [found["in_a_model"] for found in results(3)] == [[]] * 3


@pytest.mark.sample(0)
@pytest.mark.skipif(not worker.EXAMPLES.exists(), reason="a source archive has no examples/")
def test_a_model_with_fsdp_over_replicas_that_recomputes_is_that_of_one_rank() -> None:
    assert launch(worker.in_a_model, 4, 2, timeout=120) == [[]] * 4


PAGE = worker.EXAMPLES.parent / "docs" / "sequence_parallelism.md"


@pytest.mark.skipif(not PAGE.exists(), reason="a source archive has no docs/")
@pytest.mark.parametrize("launches", [False, pytest.param(True, marks=pytest.mark.sample(0))])
def test_the_programs_of_the_page_run(launches: bool, tmp_path: Path) -> None:
    """Those of plans one after the other, and attention, whose ranks compare with one rank."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (attention,) = [block for block in blocks if "launch(" in block]
    plans = "".join(block for block in blocks if block != attention)
    (tmp_path / "program.py").write_text(attention if launches else plans)
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not launches or done.stdout == "True\n"


def test_ranks_draw_one_weight() -> None:
    assert [found["new_layers"] for found in results(3)] == [[]] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("part of a head", "distgemm.nn.TokensToHeads: 9 features are no whole heads of 4"),
        ("no divisor", "kv_heads divides the number of heads, 8, got 3"),
        ("few heads", "distgemm.nn.HeadsToTokens: 1 heads of queries are too few for 3 ranks"),
        ("few queries", "2 heads of queries are too few for 3 ranks: each rank has a head"),
        ("a norm", "distgemm.nn.TokensToHeads is for nn.Linear, got LayerNorm"),
        ("head_dim", "head_dim is an integer >= 1, got 0"),
        ("sum_gradients", "sum_gradients is"),
        ("recipe", "TokensToHeadsLinear does not compute in fp8: leave recipe out"),
        ("dimension", "distgemm.nn.TokensToHeads: sequence_dim is None, and it must name the dimension"),
    ],
)
def test_wrong_layers_are_refused(what: str, message: str) -> None:
    for found in results(3):
        assert found["wrong_layers"][what].startswith("ValueError: "), found["wrong_layers"][what]
        assert message in found["wrong_layers"][what]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "wanted"),
    [
        (4, 8, None, ([2, 2, 2, 2], 1)),
        (6, 40, None, ([7, 7, 7, 7, 6, 6], 1)),
        (4, 32, 8, ([8, 8, 8, 8], 1)),
        (3, 10, 5, ([4, 4, 2], 1)),
        (8, 4, None, ([1] * 8, 2)),
        (8, 4, 4, ([1] * 8, 2)),
        (4, 6, 2, ([2, 1, 2, 1], 1)),
        (4, 1, None, ([1] * 4, 4)),
        (1, 3, 1, ([3], 1)),
    ],
)
def test_heads_of_each_rank(ranks: int, heads: int, kv_heads: int | None, wanted: tuple[list[int], int]) -> None:
    found, copies = distgemm.nn.heads_per_rank(ranks, heads, kv_heads)
    assert (found, copies) == wanted and sum(found) == copies * heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 6, None), "6 heads of keys and values are for more ranks if they divide them, got 8 ranks"),
        ((4, 6, 4), "kv_heads divides the number of heads, 6, got 4"),
        ((8, 4, 2), "4 heads of queries are too few for 8 ranks: each rank has a head"),
        ((0, 4, 2), "ranks is an integer >= 1, got 0"),
    ],
)
def test_numbers_of_heads_that_do_not_fit(arguments: tuple[int, int, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distgemm.nn.heads_per_rank(*arguments)
