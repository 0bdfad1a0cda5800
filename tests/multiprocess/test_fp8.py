"""fp8 over gloo, against fp8 on one rank. One launch runs all checks of a number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.once import once

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("a source archive has no examples/", allow_module_level=True)

from tests.multiprocess import fp8_worker as worker
from tests.multiprocess.ops_torch_worker import run_all

CHECKS: dict[int, list[Any]] = {
    1: [worker.functions, worker.layers],
    2: [worker.functions, worker.unequal, worker.without_tokens, worker.tensors_in_fp8, worker.bytes_of_gathers,
        worker.misuse, worker.models, worker.layers, worker.applied, worker.freed],
    3: [worker.functions, worker.unequal, worker.tensors_in_fp8, worker.warmed, worker.compiled],
    4: [worker.functions, worker.unequal, worker.bytes_of_gathers, worker.models, worker.layers],
    8: [worker.functions],
}  # fmt: skip
SAMPLE = [2, *(pytest.param(ranks, marks=pytest.mark.sample(0)) for ranks in (1, 3, 4, 8))]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    return launch(run_all, ranks, [(check, ()) for check in CHECKS[ranks]], timeout=150)


@pytest.mark.parametrize("ranks", SAMPLE)
@pytest.mark.parametrize(
    "check",
    [
        "functions",
        "unequal",
        "without_tokens",
        "tensors_in_fp8",
        "models",
        "layers",
        "applied",
        "freed",
        "warmed",
        "compiled",
    ],
)
def test_ranks_compute_what_one_rank_computes(check: str, ranks: int) -> None:
    if check not in [each.__name__ for each in CHECKS[ranks]]:
        pytest.skip(f"not with {ranks} ranks")
    assert [found[check] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
def test_a_quantised_gather_moves_half_and_the_scales(ranks: int) -> None:
    """Its links carry a byte for each element, and 4 for each scale."""
    tokens, features, block = worker.TOKENS, worker.FEATURES, worker.BLOCK
    for found in results(ranks):
        sent = found["bytes_of_gathers"]
        half = sent["None"] // 2
        assert half == (ranks - 1) * tokens * features
        assert sent["tensorwise"] == half
        assert sent["rowwise"] == half + (ranks - 1) * tokens * 4
        assert sent["blockwise"] == half + (ranks - 1) * tokens * (features // block) * 4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("recipe", "recipe is one of tensorwise, tensorwise_delayed"),
        ("recipes", "the ranks of the group make different calls; recipe: Recipe("),
        (
            "states",
            "different calls; largest magnitudes of x, w and dy: [1.0, 0.5, 0.0] on rank 0, [2.0, 0.5, 0.0] on rank 1",
        ),
        ("no recipe", "the ranks of the group make different calls; call: "),
        ("mixed", "all operands are in fp8, or none; b is not. distgemm.fp8.quantize makes one"),
        ("mixed b", "all_gather_matmul: b is a torch.Tensor"),
        ("twice", "the operands are in fp8 already, so there is no recipe"),
        ("out", "out_dtype is for operands in fp8, got torch.float32"),
        (
            "out of fp8",
            "out_dtype is one of torch.float64, torch.float32, torch.bfloat16, torch.float16, got torch.int32",
        ),
        ("bias", "of torch.bfloat16, as the result, got"),
        ("keep", "keep_gathered is for recipes whose gradient of the weight takes the codes of the forward pass"),
        ("return", "return_gathered has no recipe"),
        ("delayed", "recipe=distgemm.fp8.LayerState(recipe), one for each layer"),
        (
            "blocks",
            "blocks of 64 share a scale, so each rank except the last has a multiple of 64 out_features, got [96",
        ),
        ("several", "with a recipe, several b are stacked, so ranks have equal shares of each"),
        ("k", "a is (tokens, in_features) and b (out_features, in_features), as a Linear's weight"),
        ("dtypes", "b.to(torch.float32) would do"),
        ("scatter dtypes", "matmul_reduce_scatter: a has torch.float32, b has torch.float64"),
        ("reduce dtypes", "matmul_all_reduce: a has torch.float32, b has torch.float64"),
        ("embedding", "an nn.Embedding has no GEMM, so it takes no schedule, chunks or recipe"),
        ("style", "recipe is a distgemm.fp8.Recipe, or one of the names tensorwise"),
        ("layer", "recipe is one of tensorwise, tensorwise_delayed"),
        ("no gradient", "products of fp8 tensors have no gradient"),
    ],
)
def test_wrong_calls_are_refused(what: str, message: str) -> None:
    for found in results(2):
        assert message in found["misuse"][what]
