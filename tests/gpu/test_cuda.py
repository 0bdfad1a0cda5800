"""The CUDA runtime on 2, 4 and 8 GPUs, against float64: values, replays under skew, graphs, hangs."""

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


def mixed(ranks: int) -> list[Case]:
    """What is replayed on one workspace."""
    by_kernel: dict[str, Any] = {"execution": "single_kernel", "mechanism": "store", "transport": "sm"}
    return [
        Case(GATHER, (ranks,)),
        Case(CHAIN, (ranks,), chunks=2),
        Case(PAIRWISE, (ranks,), beta=1.0),
        Case(ALL_REDUCE, (ranks,), chunks=2, workspace="bounded"),
        Case(RING, (ranks,), chunks=2, m=1024),
        Case(GATHER, (ranks,), gemm_streams=1, wait_by="kernel"),
        Case(CHAIN, (ranks,), chunks=2, gemm_streams=1, wait_by="kernel"),
        Case(GATHER, (ranks,), chunks=4, merge_copies=True),
        Case(GATHER, (ranks,), chunks=2, mechanism="pull"),
        Case(PAIRWISE, (ranks,), mechanism="pull"),
        Case(CHAIN, (ranks,), chunks=2, mechanism="store"),
        Case(GATHER, (ranks,), chunks=4, execution="single_kernel", merge_copies=True),
        Case(CHAIN, (ranks,), chunks=2, execution="single_kernel", mechanism="store", beta=1.0),
        Case(CHAIN, (ranks,), chunks=4, execution="single_kernel"),
        Case(CHAIN, (ranks,), chunks=4, stagger=2, execution="single_kernel", mechanism="store"),
        Case(CHAIN, (ranks,), chunks=2, stagger=1),
        Case(ALL_REDUCE, (ranks,), chunks=2, execution="single_kernel", mechanism="store", beta=1.0),
        Case(
            ALL_REDUCE,
            (ranks,),
            chunks=4,
            stagger=2,
            execution="single_kernel",
            mechanism="store",
            transport="sm",
            beta=1.0,
        ),
        Case(GATHER, (ranks,), chunks=2, k=1536, execution="single_kernel", transport="sm"),
        Case(GATHER, (ranks,), chunks=2, k=1536, execution="single_kernel", transport="copy_engine_slices"),
        Case(
            PAIRWISE, (ranks,), chunks=2, execution="single_kernel", mechanism="store", final_add="epilogue", beta=1.0
        ),
        Case(PAIRWISE_AR, (ranks,), chunks=2, final_add="epilogue", **by_kernel),
        Case(PAIRWISE_AR, (ranks,), chunks=4, stagger=1, chunk_mode="n", final_add="epilogue", **by_kernel),
        Case(PAIRWISE, (ranks,), final_add="epilogue"),
    ]


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's results by the check's name, of one group of processes for all checks that end well."""
    large = [
        Case(GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192),
        Case(GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192, provider="cublas", config=None),
        Case(CHAIN, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks, chunks=2),
        Case(PAIRWISE, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks),
        Case(GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192, gemm_streams=1, wait_by="kernel"),
        Case(GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192, chunks=2, merge_copies=True),
        Case(GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192, mechanism="pull"),
        Case(PAIRWISE, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks, mechanism="pull"),
        Case(PAIRWISE, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks, mechanism="store"),
        Case(CHAIN, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks, mechanism="store", provider="cublas", config=None),
        Case(
            GATHER,
            (ranks,),
            m=2048 * ranks,
            n=256 * ranks,
            k=8192,
            chunks=8,
            execution="single_kernel",
            merge_copies=True,
        ),
        Case(
            CHAIN,
            (ranks,),
            m=2048 * ranks,
            n=8192,
            k=256 * ranks,
            chunks=4,
            execution="single_kernel",
            mechanism="store",
        ),
        Case(CHAIN, (ranks,), m=2048 * ranks, n=8192, k=256 * ranks, chunks=4, execution="single_kernel"),
        Case(
            CHAIN,
            (ranks,),
            m=2048 * ranks,
            n=8192,
            k=256 * ranks,
            chunks=8,
            stagger=2,
            execution="single_kernel",
            mechanism="store",
        ),
        Case(
            *(ALL_REDUCE, (ranks,), 2048 * ranks, 8192, 256 * ranks),
            chunks=4,
            stagger=1,
            execution="single_kernel",
            mechanism="store",
        ),
        Case(
            ALL_REDUCE,
            (ranks,),
            m=2048 * ranks,
            n=8192,
            k=256 * ranks,
            chunks=2,
            execution="single_kernel",
            mechanism="store",
        ),
        Case(
            *(ALL_REDUCE, (ranks,), 2048 * ranks, 8192, 256 * ranks),
            chunks=4,
            execution="single_kernel",
            mechanism="store",
            transport="sm",
        ),
        Case(
            *(PAIRWISE, (ranks,), 2048 * ranks, 8192, 256 * ranks),
            chunks=2,
            execution="single_kernel",
            mechanism="store",
            final_add="epilogue",
        ),
        Case(
            GATHER, (ranks,), m=2048 * ranks, n=256 * ranks, k=8192, chunks=2, execution="single_kernel", transport="sm"
        ),
        Case(
            GATHER,
            (ranks,),
            m=2048 * ranks,
            n=256 * ranks,
            k=8192,
            chunks=2,
            execution="single_kernel",
            transport="copy_engine_slices",
        ),
    ]
    nodes = [
        Case(GATHER, (ranks,)),
        Case(CHAIN, (ranks,), chunks=2),
        Case(PAIRWISE, (ranks,)),
        Case(GATHER, (ranks,), chunks=4, merge_copies=True),
        Case(GATHER, (ranks,), mechanism="pull"),
        Case(PAIRWISE, (ranks,), mechanism="store"),
        Case(GATHER, (ranks,), chunks=4, execution="single_kernel", merge_copies=True),
        Case(CHAIN, (ranks,), chunks=2, execution="single_kernel", mechanism="store"),
        Case(CHAIN, (ranks,), chunks=4, stagger=1, execution="single_kernel", mechanism="store"),
        Case(CHAIN, (ranks,), chunks=2, execution="single_kernel"),
        Case(ALL_REDUCE, (ranks,), chunks=2, execution="single_kernel", mechanism="store"),
        Case(ALL_REDUCE, (ranks,), chunks=2, execution="single_kernel", mechanism="store", transport="sm"),
        Case(GATHER, (ranks,), chunks=2, k=1536, execution="single_kernel", transport="sm"),
        Case(GATHER, (ranks,), chunks=2, k=1536, execution="single_kernel", transport="copy_engine_slices"),
    ]
    traced = [
        Case(CHAIN, (ranks,), m=4096, n=4096, k=4096, chunks=2),
        Case(GATHER, (ranks,), m=4096, n=4096, k=4096, chunks=2, mechanism="pull"),
    ]
    checks: list[Any] = [
        (worker.exact, (worker.cases(ranks),)),
        (worker.bounded_error, (worker.cases(ranks),)),
        (worker.poisoned, (large,)),
        (worker.stress, (mixed(ranks), 1000, ranks)),
        (worker.repeated, (mixed(ranks),)),
        (worker.crowded, (mixed(ranks),)),
        (worker.crossed, (large[-10:],)),
        (worker.graph_nodes, (nodes,)),
        (worker.engines, (traced,)),
        (worker.different_plans, (Case(GATHER, (ranks,)),)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=500)


def failures(ranks: int, name: str) -> list[str]:
    return [failure for found in results(ranks) for failure in found[name]]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_exact_on_integers(ranks: int) -> None:
    assert failures(ranks, "exact") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_errors_stay_within_what_the_roundings_allow(ranks: int) -> None:
    assert failures(ranks, "bounded_error") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_read_before_it_has_come(ranks: int) -> None:
    assert failures(ranks, "poisoned") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_thousand_replays_under_skew(ranks: int) -> None:
    assert failures(ranks, "stress") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_reruns_are_bitwise_equal(ranks: int) -> None:
    assert failures(ranks, "repeated") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_calls_in_a_graph_of_many_branches_come_to_an_end(ranks: int) -> None:
    assert failures(ranks, "crowded") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_kernels_that_wait_leave_sms_to_nccl(ranks: int) -> None:
    assert failures(ranks, "crossed") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_graphs_hold_what_the_plan_says(ranks: int) -> None:
    """GEMM and sum kernels, copies of memory, memory operations; each edge that the lowering asks for, none more."""
    assert failures(ranks, "graph_nodes") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_copies_run_on_copy_engines_under_gemms(ranks: int) -> None:
    assert failures(ranks, "engines") == []


@pytest.mark.parametrize("ranks", RANKS)
def test_different_plans_raise_on_all_ranks(ranks: int) -> None:
    for found in results(ranks):
        assert "ranks [1] differ" in found["different_plans"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "case",
    [
        Case(GATHER, (0,)),
        Case(CHAIN, (0,), chunks=2),
        Case(GATHER, (0,), execution="single_kernel"),
        Case(CHAIN, (0,), execution="single_kernel", mechanism="store"),
        Case(GATHER, (0,), execution="single_kernel", transport="sm"),
        Case(ALL_REDUCE, (0,), execution="single_kernel", mechanism="store", transport="sm"),
    ],
    ids=lambda case: f"{case.schedule} {case.waits} {case.copies}",
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
def test_survivors_of_a_killed_rank_say_whom_they_wait_for() -> None:
    assert "waits for rank" in worker.survivor_of_a_kill(Case(CHAIN, (2,), chunks=2), 2.0)
