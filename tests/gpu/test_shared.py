"""More ranks than GPUs: ranks share a GPU, which is slow, but results must be right.

Kernels, plans, flags, graphs and the watchdog are the same as on GPUs of their own. One thing differs: where both ranks
of a copy are on one GPU, a kernel copies instead of a copy engine.

All kernels are compiled first, in parallel. Each launch has a timeout of its own.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu import torch_worker
from tests.gpu.cuda_worker import Case
from tests.gpu.test_cuda import mixed
from tests.once import once

RANKS = [5, 8]
TORCH_CHECKS = [
    "after_inference",
    "equal_to_the_whole",
    "all_to_all",
    "captured_all_to_all",
    "per_tile_all_to_all",
    "per_tile",
    "float64",
    "recorded_steps",
    "graphed_callables",
    "refused_captures",
    "gather_chunks",
    "many_shapes",
    "many_graphs",
    "depth",
    "many_layers",
    "modules",
    "styles",
    "compiled",
]
LAUNCH_TIMEOUT_S = 400.0
pytestmark = pytest.mark.gpu(1)


def fitting(cases: list[Case], ranks: int) -> list[Case]:
    """The cases that can run on one GPU, with extents that so many ranks divide.

    Schedules that an odd number of ranks cannot take are left out.
    """
    power_of_two = ranks & (ranks - 1) == 0
    found = [case for case in cases if prod(case.mesh) == ranks]
    if power_of_two:
        return found
    return [divisible(case, ranks) for case in found if "xor" not in case.schedule]


def divisible(case: Case, ranks: int) -> Case:
    """The case with equal, aligned chunks, which fixed tile configurations take. One that says its shares has them."""
    if case.config is None or case.rows is not None:
        return case
    unit = 16 * ranks * case.chunks
    m, n, k = (-(-extent // unit) * unit for extent in (case.m, case.n, case.k))
    return dataclasses.replace(case, m=m, n=n, k=k)


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's failures, by the check's name."""
    every, replayed = fitting(worker.cases(ranks), ranks), fitting(mixed(ranks), ranks)
    launch(worker.compile_kernels, 1, [*every, *replayed], backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [
        (worker.exact, (every,)),
        (worker.bounded_error, (every[::3],)),
        (worker.repeated, (replayed,)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", ["exact", "bounded_error", "repeated"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_a_gpu_are_right(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []


@once
def one_shot_results(ranks: int) -> list[dict[str, Any]]:
    """Of one-shot all-reduces of few tokens: each rank's failures, and the digests of its results."""
    cases = worker.one_shot_cases(ranks)
    launch(worker.compile_kernels, 1, cases, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [(check, (cases,)) for check in (worker.exact, worker.bounded_error, worker.equal_bits)]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_shot_all_reduces_are_right(ranks: int) -> None:
    assert [
        failure for found in one_shot_results(ranks) for check in ("exact", "bounded_error") for failure in found[check]
    ] == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_shot_all_reduces_have_the_same_bits_on_all_ranks_and_in_all_calls(ranks: int) -> None:
    digests = one_shot_results(ranks)[0]["equal_bits"]
    assert [found["equal_bits"] for found in one_shot_results(ranks)] == [digests] * ranks
    assert digests[::2] == digests[1::2]


@once
def torch_results(ranks: int) -> list[dict[str, list[str]]]:
    """Each rank's failures of checks of the torch functions, by the check's name."""
    launch(torch_worker.compile_ahead, 1, None, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [(getattr(torch_worker, name), ()) for name in TORCH_CHECKS]
    return launch(torch_worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", TORCH_CHECKS)
def test_torch_functions_of_ranks_that_share_a_gpu_are_right(check: str) -> None:
    assert [failure for found in torch_results(2) for failure in found[check]] == []


def test_warmup_compiles_all_that_the_first_step_needs() -> None:
    """Processes of their own: a kernel that another check has opened would not be looked for."""
    found = launch(torch_worker.warmed_up, 2, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    assert [failure for failures in found for failure in failures] == []
