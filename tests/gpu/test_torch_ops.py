"""The torch ops, their gradients, layers and graphs on 2 and 4 GPUs, against the unsharded program."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import torch_worker as worker
from tests.once import once

RANKS = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


def failures(ranks: int, name: str) -> list[str]:
    """What went wrong in a check, on any rank."""
    return [failure for of_rank in results(ranks) for failure in of_rank[name]]


@once
def results(ranks: int) -> list[dict[str, list[str]]]:
    """One group of processes for all checks."""
    with tempfile.TemporaryDirectory() as folder:
        checks: list[Any] = [
            (worker.after_inference, ()),
            (worker.equal_to_the_whole, ()),
            (worker.recorded_steps, ()),
            (worker.graphed_callables, ()),
            (worker.refused_captures, ()),
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
def test_what_was_made_in_inference_mode_serves_training(ranks: int) -> None:
    assert failures(ranks, "after_inference") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_results_and_gradients_are_those_of_the_whole_product(ranks: int) -> None:
    assert failures(ranks, "equal_to_the_whole") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_recorded_step_is_the_eager_step_bit_by_bit(ranks: int) -> None:
    assert failures(ranks, "recorded_steps") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_graphed_callables(ranks: int) -> None:
    assert failures(ranks, "graphed_callables") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_capture_that_would_have_to_make_something_is_refused(ranks: int) -> None:
    assert failures(ranks, "refused_captures") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_shapes_that_come_and_go_take_a_bounded_memory(ranks: int) -> None:
    assert failures(ranks, "many_shapes") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_share_executables_and_a_workspace(ranks: int) -> None:
    assert failures(ranks, "depth") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_modules_are_the_linears_on_one_gpu(ranks: int) -> None:
    assert failures(ranks, "modules") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_styles_are_the_model_on_one_gpu(ranks: int) -> None:
    assert failures(ranks, "styles") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_compiled_without_a_graph_break(ranks: int) -> None:
    assert failures(ranks, "compiled") == []


@pytest.mark.gpu(4)
def test_groups_of_a_mesh() -> None:
    assert failures(4, "subgroups") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_automatic_schedules(ranks: int) -> None:
    assert failures(ranks, "automatic") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_training_run_follows_one_gpu_and_is_resumed_bit_by_bit(ranks: int) -> None:
    assert failures(ranks, "training") == []
