"""Whole models over gloo, against the unsharded model in float64: training, checkpoints, batch-first, torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distgemm.runtime.launch import launch
from tests.once import once

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("a source archive has no examples/", allow_module_level=True)

from tests.multiprocess import nn_models_worker as worker
from tests.multiprocess import nn_tokens_worker as tokens_worker
from tests.multiprocess.ops_torch_worker import BOUND, run_all

ON_TOKENS = [
    tokens_worker.unequal_tokens,
    tokens_worker.tokens_of_layers,
    tokens_worker.layouts,
    tokens_worker.lora,
]
CHECKS: dict[int, list[Any]] = {
    2: [
        worker.modules_on_tokens,
        worker.copies,
        worker.devices,
        worker.tied,
        worker.forgotten,
        worker.batch_first,
        worker.embeddings,
    ],
    3: [worker.modules_on_tokens, worker.tied, worker.batch_first, worker.embeddings],
}

TWO_OR_MORE = [2, pytest.param(3, marks=pytest.mark.sample(0))]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    return launch(run_all, ranks, [(check, ()) for check in CHECKS[ranks]], timeout=300)


@once
def results_on_tokens(ranks: int) -> list[dict[str, Any]]:
    checks = [*ON_TOKENS, *([tokens_worker.compiled_tokens] if ranks == 2 else [])]
    return launch(run_all, ranks, [(check, ()) for check in checks], timeout=300)


@pytest.mark.sample(0)  # half a minute
@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_layers_beside_other_modules_train_as_the_unsharded_model(ranks: int) -> None:
    """Norms of gradients, gradients and parameters over several steps, with clipping and activation checkpoints."""
    assert launch(worker.layers_train, ranks, timeout=300) == [[]] * ranks


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_modules_on_tokens_have_the_sum_of_the_gradients(ranks: int) -> None:
    assert [found["modules_on_tokens"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_layers_train_with_fsdp() -> None:
    assert launch(worker.layers_train_sharded, 4, timeout=300) == [[]] * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, launch(worker.save, 2, str(folder), timeout=120)


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_checkpoint_of_two_ranks_is_loaded_by_others(ranks: int, saved: Any) -> None:
    """The step after the checkpoint has the same result, so weights and moments of the optimizer are right."""
    folder, (wanted, other) = saved
    assert all(torch.equal(wanted[name], other[name]) for name in wanted)
    for loaded, after in launch(worker.load, ranks, str(folder), timeout=120):
        assert all(float((after[name] - wanted[name]).abs().max()) < BOUND for name in wanted)
        assert any(float((loaded[name] - wanted[name]).abs().max()) > 1e-3 for name in wanted), "the step has no effect"
        assert all(float((loaded[name] - wanted[name]).abs().max()) < 0.02 for name in wanted)


def test_copies_have_the_same_parameters_and_their_own_memory() -> None:
    assert [found["copies"] for found in results(2)] == [[], []]


def test_parameters_are_on_a_device_that_the_group_serves() -> None:
    error = "ValueError: device is cuda, and the ranks of the group are on cpu; leave device out"
    for found in results(2):
        assert found["devices"] == {"group": "cpu", "meta": "meta cpu", "name": "True", "cuda": error}


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_tied_weights_stay_tied(ranks: int) -> None:
    assert [found["tied"] for found in results(ranks)] == [[]] * ranks


def test_a_gradient_that_nothing_sums_is_found() -> None:
    """Layers and styles warn once, gradient clipping and whole state dicts of parameters that differ raise."""
    for found in results(2):
        each = found["forgotten"]
        assert each["without gradients"] == 0
        assert len(each["warnings"]) == 2  # of the first layer of two blocks
        assert all("ColumnParallelLinear: its input depends on a parameter" in text for text in each["warnings"])
        (style,), (whole,) = each["styles"], each["whole tokens"]
        assert style == whole and style.startswith(
            "distgemm.nn.RowwiseParallel: its input depends on a parameter of shape (2,)"
        )
        assert each["before"] is True
        assert "mixed torch.Tensor and DTensor" in each["clip"]
        assert each["after"].startswith("ValueError: embedding.weight, blocks.0.norm.weight, blocks.0.norm.bias, ")
        assert "Nothing has summed its gradient" in each["after"]


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_batch_first_models(ranks: int) -> None:
    assert [found["batch_first"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_compiled_batch_first_models() -> None:
    """In the sample, the compiled blocks and the compiled Llama of test_ops_torch_nn.py stand for it."""
    assert launch(worker.batch_first, 2, True, timeout=300) == [[], []]


@pytest.mark.parametrize("ranks", TWO_OR_MORE)
def test_embeddings_with_a_split_vocabulary(ranks: int) -> None:
    assert [found["embeddings"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.sample(0))])
def test_compiled_blocks_have_the_gradients_of_the_unsharded_model(sharded: bool) -> None:
    """With FSDP2 and without it. Inputs of which torch.compile loses the gradient are refused."""
    assert launch(worker.compiled_blocks, 2, sharded, timeout=300) == [[], []]


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_unequal_tokens_train_as_the_unsharded_model(ranks: int) -> None:
    assert [found["unequal_tokens"] for found in results_on_tokens(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_four_ranks_with_unequal_tokens() -> None:
    (found,) = {tuple(found) for found in launch(tokens_worker.unequal_tokens, 4, timeout=180)}
    assert not found


@pytest.mark.sample(0)
def test_ranks_with_unequal_tokens_train_with_fsdp() -> None:
    assert launch(tokens_worker.unequal_tokens_sharded, 4, timeout=300) == [[]] * 4


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [2, 3])
def test_where_layers_have_the_tokens_of_each_rank_from(ranks: int) -> None:
    assert [found["tokens_of_layers"] for found in results_on_tokens(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
def test_a_function_for_the_tokens_needs_no_graph_break() -> None:
    assert [found["compiled_tokens"] for found in results_on_tokens(2)] == [[], []]


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [2, 3])
def test_layouts_of_styles(ranks: int) -> None:
    assert [found["layouts"] for found in results_on_tokens(ranks)] == [[]] * ranks


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranks", [2, 3])
def test_adapters_beside_frozen_layers(ranks: int) -> None:
    assert [found["lora"] for found in results_on_tokens(ranks)] == [[]] * ranks


def test_shards_of_other_numbers_of_ranks_are_loaded() -> None:
    assert launch(tokens_worker.shards, 4, timeout=300) == [[]] * 4
