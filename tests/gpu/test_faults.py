"""Faults of ranks that share one GPU: ranks that end, stop, come back or do not call; and calls on several streams."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker, fault_worker
from tests.gpu.cuda_worker import Case

pytestmark = pytest.mark.gpu(1)

CHAIN, GATHER, RING = (
    "reduce_scatter_1d_tiling_a_rotating_c",
    "all_gather_1d_tiling_cd_rotating_a",
    "all_gather_1d_ring_a",
)
CASES = [
    Case(GATHER, (2,)),
    Case(CHAIN, (2,), chunks=2),
    Case(CHAIN, (2,), chunks=2, mechanism="store"),
    Case(GATHER, (2,), gemm_streams=1, wait_by="kernel"),
    Case(GATHER, (2,), mechanism="pull"),
]
POINTS = [(how, seed) for how in ("SIGKILL", "SIGSTOP") for seed in range(10)]


@pytest.mark.parametrize(("how", "seed"), POINTS)
def test_the_others_raise_when_a_rank_is_lost(how: str, seed: int, tmp_path: Path) -> None:
    """Within seconds where it has ended. They name op, rank and tile; what they compute is right or NaN."""
    rng = random.Random(f"{how} {seed}")
    case, victim, after = rng.choice(CASES), rng.randrange(2), rng.randrange(100)
    fault_worker.check_a_lost_rank(tmp_path, case, victim, after, how)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_is_late_is_waited_for(case: Case, tmp_path: Path) -> None:
    """With the group's timeout, which is the default."""
    found = fault_worker.spawn(tmp_path, 2, fault_worker.come_back, case, 6.0, None)
    assert len(found) == 2
    for one in found.values():
        assert "error" not in one and one["wrong"] == 0 and one["seconds"] > 5, one


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_rank_that_comes_back_too_late_raises(case: Case, tmp_path: Path) -> None:
    found = fault_worker.spawn(tmp_path, 2, fault_worker.come_back, case, 14.0, 3.0)
    assert len(found) == 2
    assert "has not ended within 3 s" in found[0]["error"]
    assert "another rank has given up" in found[1]["error"]
    assert [one["wrong"] for one in found.values()] == [0, 0]


def test_a_gather_whose_peer_does_not_come_raises(tmp_path: Path) -> None:
    """The chunks that do not come are NaN."""
    found = fault_worker.spawn(tmp_path, 2, fault_worker.gather_alone)
    assert [one["before"] for one in found.values()] == [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0]]
    assert "has not ended within 4 s: " in found[0]["error"] and found[0]["seconds"] < 20, found
    assert "another rank has given up" in found[1]["error"], found
    assert found[0]["chunks"][:2] == [1.0, 1.0] and all(map(math.isnan, found[0]["chunks"][2:])), found
    assert all("no executable on this workspace" in one["called_again"] for one in found.values())


@pytest.mark.parametrize("connections", [None, 2, 4, 8, 32])
def test_flags_are_read_and_set_beside_streams_that_wait(
    connections: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of hardware queues: streams and branches of a graph that wait hold all of them."""
    set_connections(monkeypatch, connections)
    (found,) = launch(fault_worker.busy_queues, 1, 24, backend="nccl", timeout=100, share=True)
    assert found == {"read": True, "written": True, "ended": True}


@pytest.mark.parametrize("connections", [None, 2, 4, 8, 32])
def test_an_error_of_a_backward_pass_reaches_the_thread_of_the_step(
    connections: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two workspaces, whose streams share queues: the calls of the backward pass have larger shards."""
    set_connections(monkeypatch, connections)
    found = fault_worker.spawn(tmp_path, 2, fault_worker.late_backward)
    assert "has not ended within 4 s: " in found[0]["error"] and found[0]["seconds"] < 15, found
    assert "waits for rank" in found[0]["error"], found


def test_calls_of_two_groups_on_several_streams_are_right() -> None:
    cases = [CASES[0], CASES[1], CASES[2], CASES[3]]
    found = launch(fault_worker.streams, 2, cases, 300, backend="nccl", timeout=120, share=True)
    assert [failure for failures in found for failure in failures] == []


def test_calls_on_two_streams_follow_one_another() -> None:
    assert launch(fault_worker.order_of_streams, 1, 50, backend="nccl", timeout=60, share=True) == [[]]


def test_what_the_order_costs_in_a_graph() -> None:
    (found,) = launch(fault_worker.cost_of_order, 1, backend="nccl", timeout=60, share=True)
    print(f"microseconds of a captured call: {found}")
    assert found["ordered"] < found["plain"] + 5


def set_connections(monkeypatch: pytest.MonkeyPatch, connections: int | None) -> None:
    """Give processes that start from now on so many hardware queues."""
    if connections is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    launch(cuda_worker.compile_kernels, 1, CASES, backend="nccl", timeout=400, share=True)
