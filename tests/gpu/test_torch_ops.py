"""The torch functions, their gradients, layers and graphs on 2 and 4 GPUs, against the program on one GPU."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import torch_worker as worker
from tests.once import once

RANKS = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


def failures(ranks: int, name: str) -> list[str]:
    """The failures of a check, on all ranks."""
    return [failure for found in results(ranks) for failure in found[name]]


@once
def results(ranks: int) -> list[dict[str, list[str]]]:
    """One launch runs all checks."""
    with tempfile.TemporaryDirectory() as folder:
        checks: list[Any] = [
            (worker.after_inference, ()),
            (worker.equal_to_the_whole, ()),
            (worker.all_to_all, ()),
            (worker.captured_all_to_all, ()),
            (worker.per_tile_all_to_all, ()),
            (worker.per_tile, ()),
            (worker.float64, ()),
            (worker.recorded_steps, ()),
            (worker.graphed_callables, ()),
            (worker.refused_captures, ()),
            (worker.gather_chunks, ()),
            (worker.many_shapes, ()),
            (worker.depth, ()),
            (worker.modules, ()),
            (worker.styles, ()),
            (worker.compiled, ()),
            *([(worker.subgroups, ())] if ranks == 4 else []),
            (worker.automatic, ()),
            (worker.training, (folder,)),
        ]
        return launch(worker.run_all, ranks, checks, backend="nccl", timeout=400)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_executable_from_inference_mode_serves_training(ranks: int) -> None:
    assert failures(ranks, "after_inference") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_results_and_gradients_are_those_of_the_whole_product(ranks: int) -> None:
    assert failures(ranks, "equal_to_the_whole") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_go_to_heads_and_back(ranks: int) -> None:
    assert failures(ranks, "all_to_all") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_captured_all_to_all_has_the_bits_of_eager_calls(ranks: int) -> None:
    assert failures(ranks, "captured_all_to_all") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_per_tile_kernels_bring_tokens_to_heads_and_back(ranks: int) -> None:
    assert failures(ranks, "per_tile_all_to_all") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_auto_runs_per_tile_kernels_that_are_recorded(ranks: int) -> None:
    assert failures(ranks, "per_tile") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_of_float64_add_in_float64(ranks: int) -> None:
    assert failures(ranks, "float64") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_captured_step_has_the_bits_of_an_eager_step(ranks: int) -> None:
    assert failures(ranks, "recorded_steps") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_graphed_callables_have_the_bits_of_the_module(ranks: int) -> None:
    assert failures(ranks, "graphed_callables") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_capture_that_needs_a_new_executable_is_refused(ranks: int) -> None:
    assert failures(ranks, "refused_captures") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_chunks_that_the_caller_multiplies_are_right(ranks: int) -> None:
    assert failures(ranks, "gather_chunks") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_many_shapes_take_bounded_memory(ranks: int) -> None:
    assert failures(ranks, "many_shapes") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_share_executables_and_a_workspace(ranks: int) -> None:
    assert failures(ranks, "depth") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_modules_compute_what_linears_compute_on_one_gpu(ranks: int) -> None:
    assert failures(ranks, "modules") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_styles_compute_what_the_model_computes_on_one_gpu(ranks: int) -> None:
    assert failures(ranks, "styles") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_compile_needs_no_graph_break(ranks: int) -> None:
    assert failures(ranks, "compiled") == []


@pytest.mark.gpu(4)
def test_both_groups_of_a_mesh_run_at_once() -> None:
    assert failures(4, "subgroups") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_auto_without_measuring(ranks: int) -> None:
    assert failures(ranks, "automatic") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_training_follows_one_gpu_and_resumes_with_the_same_bits(ranks: int) -> None:
    assert failures(ranks, "training") == []
