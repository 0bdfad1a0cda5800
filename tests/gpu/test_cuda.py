"""The CUDA runtime on 2, 4 and 8 GPUs, against float64: values, replays with late ranks, graphs, hangs."""

from __future__ import annotations

from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.cuda_worker import Case
from tests.once import once

RANKS = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4, 8)]
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
GATHER, RING = "all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a"
ALL_REDUCE, PAIRWISE_AR = "all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"


STORE: dict[str, Any] = {"mechanism": "store"}
EPILOGUE: dict[str, Any] = {"final_add": "epilogue"}


def mixed(ranks: int) -> list[Case]:
    """Cases that are replayed on one workspace."""
    mesh = (ranks,)
    return [
        Case(GATHER, mesh),
        Case(CHAIN, mesh, chunks=2),
        Case(PAIRWISE, mesh, beta=1.0),
        Case(ALL_REDUCE, mesh, chunks=2, workspace="bounded"),
        Case(RING, mesh, chunks=2, m=1024),
        Case(GATHER, mesh, gemm_streams=1, wait_by="kernel"),
        Case(CHAIN, mesh, chunks=2, gemm_streams=1, wait_by="kernel"),
        Case(GATHER, mesh, chunks=4, merge_copies=True),
        Case(GATHER, mesh, chunks=2, mechanism="pull"),
        Case(PAIRWISE, mesh, mechanism="pull"),
        Case(CHAIN, mesh, chunks=2, **STORE),
        Case(CHAIN, mesh, chunks=2, beta=1.0, gemm_streams=1, wait_by="kernel", **STORE),
        Case(ALL_REDUCE, mesh, chunks=2, beta=1.0, **STORE),
        Case(PAIRWISE, mesh, chunks=2, beta=1.0, **STORE, **EPILOGUE),
        Case(PAIRWISE_AR, mesh, chunks=2, **STORE),
        Case(PAIRWISE, mesh, **EPILOGUE),
    ]


def large(ranks: int) -> list[Case]:
    """Cases with large copies."""
    mesh = (ranks,)
    gather: dict[str, Any] = {"m": 2048 * ranks, "n": 256 * ranks, "k": 8192}
    reduce: dict[str, Any] = {"m": 2048 * ranks, "n": 8192, "k": 256 * ranks}
    cublas: dict[str, Any] = {"provider": "cublas", "config": None}
    return [
        Case(GATHER, mesh, **gather),
        Case(GATHER, mesh, **cublas, **gather),
        Case(CHAIN, mesh, chunks=2, **reduce),
        Case(PAIRWISE, mesh, **reduce),
        Case(GATHER, mesh, gemm_streams=1, wait_by="kernel", **gather),
        Case(GATHER, mesh, chunks=2, merge_copies=True, **gather),
        Case(GATHER, mesh, mechanism="pull", **gather),
        Case(PAIRWISE, mesh, mechanism="pull", **reduce),
        Case(PAIRWISE, mesh, **STORE, **reduce),
        Case(CHAIN, mesh, **STORE, **cublas, **reduce),
        Case(ALL_REDUCE, mesh, chunks=2, **STORE, **reduce),
        Case(CHAIN, mesh, chunks=2, gemm_streams=1, wait_by="kernel", **STORE, **reduce),
    ]


def recorded(ranks: int) -> list[Case]:
    """Cases whose graphs are looked at."""
    mesh = (ranks,)
    return [
        Case(GATHER, mesh),
        Case(CHAIN, mesh, chunks=2),
        Case(PAIRWISE, mesh),
        Case(GATHER, mesh, chunks=4, merge_copies=True),
        Case(GATHER, mesh, mechanism="pull"),
        Case(PAIRWISE, mesh, **STORE),
        Case(GATHER, mesh, gemm_streams=1, wait_by="kernel"),
        Case(CHAIN, mesh, chunks=2, gemm_streams=1, wait_by="kernel", **STORE),
        Case(ALL_REDUCE, mesh, chunks=2, **STORE),
    ]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's results by the check's name. One group of processes serves all checks that end well."""
    mesh = (ranks,)
    traced = [
        Case(CHAIN, mesh, m=4096, n=4096, k=4096, chunks=2),
        Case(GATHER, mesh, m=4096, n=4096, k=4096, chunks=2, mechanism="pull"),
    ]
    waiting = [case for case in large(ranks) if case.wait_by == "kernel"]
    checks: list[Any] = [
        (worker.exact, (worker.cases(ranks),)),
        (worker.bounded_error, (worker.cases(ranks),)),
        (worker.poisoned, (large(ranks),)),
        (worker.stress, (mixed(ranks), 1000, ranks)),
        (worker.repeated, (mixed(ranks),)),
        (worker.crowded, (mixed(ranks),)),
        (worker.crossed, (waiting,)),
        (worker.graph_nodes, (recorded(ranks),)),
        (worker.engines, (traced,)),
        (worker.different_plans, (Case(GATHER, mesh),)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=500)


def failures(ranks: int, name: str) -> list[str]:
    return [failure for found in results(ranks) for failure in found[name]]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_exact_on_integers(ranks: int) -> None:
    assert failures(ranks, "exact") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_errors_stay_within_the_bound_of_the_roundings(ranks: int) -> None:
    assert failures(ranks, "bounded_error") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_read_before_it_has_arrived(ranks: int) -> None:
    assert failures(ranks, "poisoned") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_thousand_replays_of_late_ranks_are_right(ranks: int) -> None:
    assert failures(ranks, "stress") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_reruns_are_bitwise_equal(ranks: int) -> None:
    assert failures(ranks, "repeated") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_calls_in_a_graph_of_many_streams_come_to_an_end(ranks: int) -> None:
    assert failures(ranks, "crowded") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_kernels_that_wait_leave_sms_to_nccl(ranks: int) -> None:
    assert failures(ranks, "crossed") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_graphs_hold_what_the_plan_says(ranks: int) -> None:
    """They hold kernels of GEMMs and sums, copies, memory operations, and exactly the edges of the lowering."""
    assert failures(ranks, "graph_nodes") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_copies_run_on_copy_engines_under_gemms(ranks: int) -> None:
    assert failures(ranks, "engines") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_different_plans_raise_on_all_ranks(ranks: int) -> None:
    for found in results(ranks):
        assert "the ranks of the group make different calls; m: " in found["different_plans"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "case",
    [
        Case(GATHER, (0,)),
        Case(CHAIN, (0,), chunks=2),
        Case(GATHER, (0,), gemm_streams=1, wait_by="kernel"),
        Case(ALL_REDUCE, (0,), **STORE),
    ],
    ids=lambda case: f"{case.schedule} {case.mechanism} {case.wait_by}",
)
def test_a_rank_that_raises_makes_all_raise(ranks: int, case: Case) -> None:
    case = worker.on(case, ranks)
    for rank, found in enumerate(launch(worker.late_rank, ranks, case, 1, 2.0, backend="nccl", timeout=120)):
        assert "has not ended within 2 s" in found["error"], found
        assert case.schedule in found["error"]
        assert found["called_again"] == "ReplayTimeoutError"
        assert found["poisoned"]
        if rank == 1:
            assert found["own"].startswith("ValueError: A's shard on rank 1 has shape")


@pytest.mark.parametrize("ranks", RANKS)
def test_a_killed_rank_makes_the_others_raise(ranks: int) -> None:
    case = Case(CHAIN, (ranks,), chunks=2)
    with pytest.raises(RuntimeError, match="rank 1 was killed by signal SIGKILL"):
        launch(worker.killed_rank, ranks, case, 1, 2.0, backend="nccl", timeout=60)


@pytest.mark.gpu(2)
def test_calls_leave_a_gpu_alone_that_is_the_current_one() -> None:
    cases = [Case(GATHER, (2,)), Case(CHAIN, (2,), chunks=2), Case(ALL_REDUCE, (2,), **STORE)]
    cases += [Case(schedule, (2,), execution="per_tile") for schedule in (GATHER, PAIRWISE, PAIRWISE_AR)]
    assert launch(worker.beside_another_gpu, 2, cases, backend="nccl", timeout=120) == [[], []]


@pytest.mark.gpu(2)
def test_survivors_of_a_killed_rank_name_it() -> None:
    assert "waits for rank" in worker.survivor_of_a_kill(Case(CHAIN, (2,), chunks=2), 2.0)
