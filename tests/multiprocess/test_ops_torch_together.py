"""The layers with FSDP2 and activation checkpoints, over gloo, against the same model on one rank."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from distgemm.runtime.launch import launch

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("a source archive has no examples/", allow_module_level=True)

from tests.multiprocess import together_worker as worker
from tests.multiprocess.ops_torch_worker import run_all

CHECKS = {2: [worker.checkpointed_training], 4: [worker.sharded_training, worker.both]}


@lru_cache
def results(ranks: int) -> list[dict[str, Any]]:
    return launch(run_all, ranks, [(check, ()) for check in CHECKS[ranks]], timeout=120)


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        pytest.param(ranks, each.__name__, marks=[] if ranks == 2 else pytest.mark.sample(0))
        for ranks, every in CHECKS.items()
        for each in every
    ],
)
def test_training_follows_the_unsharded_model(ranks: int, check: str) -> None:
    assert [found[check] for found in results(ranks)] == [[]] * ranks
