"""The tensor-parallel layers over gloo, against the same model on one rank. One launch for each number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.once import once

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("a source archive has no examples/", allow_module_level=True)

from tests.multiprocess import nn_worker as worker
from tests.multiprocess.ops_torch_worker import run_all

CHECKS: dict[int, list[Any]] = {
    1: [],
    2: [
        worker.shared_gathers,
        worker.compiled,
        worker.misuse,
        worker.initial,
        worker.placements,
        worker.shared_changes,
        worker.replicated,
    ],
    3: [worker.shared_gathers, worker.replicated],
    4: [worker.replicated_training],
}

ANY_RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.sample(0)) for ranks in (1, 3, 4))]
TWO_OR_MORE = [2, pytest.param(3, marks=pytest.mark.sample(0))]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    checks = [worker.layers, worker.states, worker.training, *CHECKS[ranks]]
    return launch(run_all, ranks, [(check, ()) for check in checks], timeout=90)


@pytest.mark.parametrize("ranks", ANY_RANKS)
def test_layers_compute_what_linears_compute_on_one_rank(ranks: int) -> None:
    assert [found["layers"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("ranks", ANY_RANKS)
def test_state_dicts_are_whole_or_of_one_rank(ranks: int) -> None:
    assert [found["states"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("ranks", ANY_RANKS)
def test_a_llama_of_plain_linears_follows_the_unsharded_one(ranks: int) -> None:
    assert [found["training"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_two_hundred_steps_follow_the_unsharded_run() -> None:
    """Takes half a minute. In the sample, the check "training" of all layers stands for it."""
    for difference in launch(worker.long_training, 2, timeout=180):
        assert 0 <= difference < 1e-9, difference


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_styles_of_tokens_that_every_rank_has(ranks: int) -> None:
    assert [found["replicated"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_training_with_data_parallel_replicas() -> None:
    assert [found["replicated_training"] for found in results(4)] == [[]] * 4


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_several_projections_share_a_gather(ranks: int) -> None:
    """Each layer has a gather for q, k and v, and one for gate and up. The head has one."""
    for found in results(ranks):
        loaded, own, calls, error = found["shared_gathers"]
        assert loaded and own, "a deep copy has parameters of its own"
        assert calls == {"all_gather_matmul": 2 * 2 + 1, "matmul_reduce_scatter": 2 * 2}
        assert error.startswith("ValueError: head.weight is (")


def test_ranks_with_the_same_seed_draw_different_parts() -> None:
    assert [found["initial"] for found in results(2)] == [[], []]


def test_dtensors_with_another_sharding_are_refused() -> None:
    assert [found["placements"] for found in results(2)] == [[], []]


def test_a_shared_output_is_what_a_separate_call_computes() -> None:
    assert [found["shared_changes"] for found in results(2)] == [[], []]


def test_torch_compile_needs_no_graph_break() -> None:
    assert [found["compiled"] for found in results(2)] == [[], []]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "norm",
            "distgemm.nn.ColwiseParallel is for nn.Linear, got LayerNorm; for norms take distgemm.nn.SequenceParallel",
        ),
        ("rowwise norm", "distgemm.nn.RowwiseParallel is for nn.Linear and nn.Embedding, got LayerNorm"),
        ("no such name", "ModuleDict has no k; it has q, norm, doubled"),
        ("shared norm", "distgemm.nn.SharedColwiseParallel is for nn.Linear, got LayerNorm"),
        ("own forward", "Doubled has a forward of its own, which would not run; take an nn.Linear"),
        ("own forward of a layer", "Doubled has a forward of its own, which would not run; take an nn.Linear"),
        ("given forward", "Linear has a forward of its own, which would not run; take an nn.Linear"),
        ("weight_norm", "ParametrizedLinear has the parameters parametrizations.weight.original0"),
        ("weight_norm of a layer", "take one whose parameters are weight and bias. torch.nn.utils.parametrize.remove_"),
        ("pruned", "Linear has the parameters bias, weight_orig; take one whose parameters are weight and bias"),
        ("extent", "ColumnParallelLinear: out_features is an integer >= 1, got -4"),
        ("no integer", "RowParallelLinear: in_features is an integer >= 1, got 16.0"),
        ("schedule", "unknown schedule 'ag+gem', did you mean 'ag+gemm'"),
        ("pattern", "'gemm+rs' does not compute ag+gemm, as ColumnParallelLinear does: take 'auto' or 'unfused', or"),
        ("pattern of rows", "'gemm+ar' does not compute gemm+rs, as RowParallelLinear does: take 'auto' or 'unfused'"),
        (
            "pattern to heads",
            "'unfused' does not compute gemm+a2a, as TokensToHeadsLinear does: take 'auto', or one of",
        ),
        ("pattern to tokens", "'gemm+a2a' does not compute a2a+gemm, as HeadsToTokensLinear does: take 'auto', or one"),
        ("schedule of a style", "unknown schedule 'gem+rs', did you mean 'gemm+rs'"),
        ("chunks of a style", "chunks is an integer >= 1, got 0"),
        ("no names", "names is the names of the Linears that share a gather, got ()"),
    ],
)
def test_wrong_modules_are_refused(what: str, message: str) -> None:
    for found in results(2):
        assert found["misuse"][what].startswith("ValueError: ") and message in found["misuse"][what]
