"""Scaled fp8 on gloo: the collective runtime and the unfused program against float64 products."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import scaled_worker
from tests.once import once

ALL_RANKS = [3, *(pytest.param(ranks, marks=pytest.mark.sample(0)) for ranks in (1, 2, 4, 8))]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    return launch(scaled_worker.run_all, ranks, 1 if ranks == 3 else 3, timeout=240)


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_every_schedule_is_within_the_bound_of_its_formats(ranks: int) -> None:
    assert [found["plans"] for found in results(ranks)] == [[]] * ranks


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_the_unfused_program_is_within_the_bound_of_its_formats(ranks: int) -> None:
    assert [found["unfused"] for found in results(ranks)] == [[]] * ranks


def test_scales_of_another_shape_are_refused() -> None:
    for rank, found in enumerate(results(3)):
        wrong = found["wrong"]
        assert wrong["another shape"] == ""
        begin = f"ValueError: scale_a on rank {rank} is (8, 1) of torch.float32"
        assert wrong["missing"] == f"{begin}, the scales of A's shard, got None"
        assert wrong["of all ranks"] == f"{begin} on cpu, got (24, 1) of torch.float32 on cpu"
        assert wrong["dtype"] == f"{begin} on cpu, got (8, 1) of torch.float64 on cpu"
        assert wrong["of columns"].endswith("got (1, 5) of torch.float32 on cpu") and "scale_b" in wrong["of columns"]
        assert "no runtime multiplies float4_e2m1fn_x2" in wrong["nvfp4"]
