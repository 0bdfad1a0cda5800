"""The CUDA runtime across hosts: ranks share one GPU, and their hosts are emulated.

Plans say that there are two hosts. Ranks of different hosts map no memory of each other, and NCCL sends over sockets,
because each rank has a host of its own for NCCL. So everything is as on real hosts, except for the network.

All kernels are compiled first, in parallel: mostly sums, as cuBLAS multiplies in all cases but one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu import fault_worker, hosts_worker, torch_worker
from tests.gpu.cuda_worker import Case, meshes
from tests.once import once

pytestmark = pytest.mark.gpu(1)

MESHES = [(2, 2), (2, 4)]
"""Hosts, and ranks of a host."""
LAUNCH_TIMEOUT_S = 300.0
REPLAYS = 1000
CUBLAS: dict[str, Any] = {"provider": "cublas", "config": None}
RING, DIRECT = "all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
ALL_REDUCE, ONE_SHOT = "all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_one_shot_a"
TO_HEADS, FROM_HEADS = "all_to_all_1d_rotating_d", "all_to_all_1d_rotating_a"
NESTED = "tensor_parallel_2d_nested"


def nested(mesh: tuple[int, int], across: str, inside: str, **options: Any) -> Case:
    return Case(NESTED, mesh, across=across, inside=inside, ranks_per_host=mesh[1], **CUBLAS, **options)


def mixed(mesh: tuple[int, int]) -> list[Case]:
    """A nested schedule of each pattern."""
    return [
        nested(mesh, RING, DIRECT, chunks=2),
        nested(mesh, CHAIN, CHAIN, beta=1.0),
        nested(mesh, ALL_REDUCE, ALL_REDUCE),
        nested(mesh, TO_HEADS, TO_HEADS),
        nested(mesh, FROM_HEADS, FROM_HEADS),
    ]


def cases(mesh: tuple[int, int]) -> list[Case]:
    """Every pattern nested, then every flat schedule on the same hosts."""
    ranks, of_host = mesh[0] * mesh[1], mesh[1]
    found = [
        *mixed(mesh),
        nested(mesh, DIRECT, RING, workspace="bounded", sync="credit", alpha=2.0),
        nested(mesh, RING, RING, chunks=2, workspace="bounded"),
        nested(mesh, RING, DIRECT, m=389, n=75, k=61, dtype="float32"),  # rows are padded in slots, so they are staged
        nested(mesh, RING, DIRECT, l=2, m=256, n=128, k=128),
        nested(mesh, PAIRWISE, PAIRWISE, chunks=2, gemm_streams=1),
        # By CUTLASS: torch multiplies bfloat16 into bfloat16 alone.
        Case(NESTED, mesh, across=CHAIN, inside=PAIRWISE, ranks_per_host=mesh[1], partial_dtype="float32"),
        nested(mesh, CHAIN, PAIRWISE, m=130, n=75, k=61, dtype="float32", beta=-1.0),
        nested(mesh, ONE_SHOT, ONE_SHOT, m=16),
        nested(mesh, ALL_REDUCE, ALL_REDUCE, chunks=2, workspace="bounded", sync="credit", beta=1.0),
    ]
    flat = [name for name in distgemm.list_schedules() if name != NESTED]
    found += [Case(name, meshes(name, ranks), ranks_per_host=of_host, **CUBLAS) for name in flat]
    # The largest workspace first, so that all cases share it, and its communicator.
    return sorted(found, key=lambda case: -max(map(case.plan().workspace_bytes, range(ranks))))


@once
def kernels() -> None:
    """Compile the kernels of all mixed cases: they do not depend on the mesh."""
    launch(worker.compile_kernels, 1, mixed((2, 2)), backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@once
def results(mesh: tuple[int, int]) -> list[dict[str, Any]]:
    """Each rank's failures, by the check's name."""
    every = cases(mesh)
    launch(worker.compile_kernels, 1, every, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    checks: list[Any] = [
        (worker.exact, (every,)),
        (worker.poisoned, (mixed(mesh), 4)),
        (worker.repeated, (mixed(mesh),)),
    ]
    return launch(worker.run_all, mesh[0] * mesh[1], checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@once
def calls() -> list[dict[str, Any]]:
    """Each rank's failures in calls of functions and layers on 2 x 2, by the check's name."""
    checks = [hosts_worker.functions, *(getattr(torch_worker, name) for name in CALLS)]
    return launch(hosts_worker.run_all, 4, (2, 2), checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


CALLS = ("all_to_all", "modules", "styles", "compiled", "recorded_steps", "automatic")
"""Checks of ``torch_worker`` that run across hosts."""


@pytest.mark.parametrize("check", ["functions", *CALLS, "hosts"])
def test_functions_and_layers_are_right_across_hosts(check: str) -> None:
    """Forward and backward, in torch.compile, in graphs of the caller; and every plan that ran is for these hosts."""
    assert [failure for found in calls() for failure in found[check]] == []


@pytest.mark.parametrize("check", ["exact", "poisoned", "repeated"])
@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "2x4"])
def test_hosts_are_right(mesh: tuple[int, int], check: str) -> None:
    """Eager, recorded and replayed, with late ranks."""
    assert [failure for found in results(mesh) for failure in found[check]] == []


@once
def moved(mesh: tuple[int, int]) -> list[dict[str, Any]]:
    """Each rank's failures in what goes across hosts, by the check's name."""
    kernels()
    checks: list[Any] = [(hosts_worker.nodes, (mixed(mesh),)), (worker.messages, (mixed(mesh),))]
    return launch(worker.run_all, mesh[0] * mesh[1], checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", ["nodes", "messages"])
@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "2x4"])
def test_what_crosses_hosts_is_what_the_plan_says(mesh: tuple[int, int], check: str) -> None:
    """In bytes, and in kernels of NCCL, of the graph that is read back and of its replays."""
    assert [failure for found in moved(mesh) for failure in found[check]] == []


def test_many_replays_with_late_ranks_are_right() -> None:
    """Eager calls, and graphs of the caller with three calls each, in a random order, beside NCCL of the caller."""
    mesh = (2, 2)
    kernels()
    found = launch(worker.stress, 4, mixed(mesh), REPLAYS, 5, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    assert [failure for failures in found for failure in failures] == []


@pytest.mark.parametrize("case", [mixed((2, 2))[0], mixed((2, 2))[1]], ids=["gather", "sum"])
def test_ranks_of_both_hosts_raise_when_a_rank_is_killed(case: Case, tmp_path: Path) -> None:
    """The rank of its host says which one has ended. Others say whom they waited for, or what it said."""
    kernels()
    victim = 3
    found = fault_worker.spawn(tmp_path, 4, fault_worker.lose_a_rank, case, victim, 20, "SIGKILL", lost=victim)
    assert set(found) == {0, 1, 2}
    assert any(f"the processes of ranks [{victim}] have ended" in one["error"] for one in found.values()), found
    for rank, one in found.items():
        assert "on rank" in one["error"] and case.schedule in one["error"], (rank, one)
        assert one["seconds"] < 40 and one["d_is_nan"] and "wrong" not in one["behind"], (rank, one)
        assert "no executable on this workspace can be called any more" in one["called_again"], (rank, one)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "timeout"])
def test_a_rank_that_dies_before_nccl_connects_is_named(noticed: bool, tmp_path: Path) -> None:
    """The others abort NCCL and raise: at once where they see that its process has ended, otherwise in time."""
    case, victim = mixed((2, 2))[0], 2
    kernels()
    found = fault_worker.spawn(tmp_path, 4, hosts_worker.die_before_nccl, case, victim, noticed, lost=victim)
    assert set(found) == {0, 1, 3}
    for rank, one in found.items():
        assert one["error"].startswith("ncclCommInitRankConfig of NCCL has not ended after "), (rank, one)
        assert "rank 2 of host 1 did not come" in one["error"], (rank, one)
        assert ("rank 2 of host 1 has ended" in one["error"]) == noticed, (rank, one)
        assert one["seconds"] < 30 and one["sum"] == 2048.0, (rank, one)


@pytest.mark.parametrize("case", [mixed((2, 2))[0], mixed((2, 2))[1]], ids=["gather", "sum"])
def test_eager_calls_that_are_queued_when_a_rank_dies_are_right_or_nan(case: Case, tmp_path: Path) -> None:
    case = dataclasses.replace(case, beta=0.0)  # powers of two as alpha keep results exact
    kernels()
    found = fault_worker.spawn(tmp_path, 4, hosts_worker.queued_calls, case, 3, lost=3)
    assert set(found) == {0, 1, 2}
    for rank, one in found.items():
        assert one["error"] and one["graphs"] == 0, (rank, one)
        assert "wrong" not in one["results"] and "nan" in one["results"], (rank, one)
        assert one["seconds"] < 40 and "can be called any more" in one["called_again"], (rank, one)
    assert max(one["issued"] for one in found.values()) > 1, "no call was queued behind another one"
