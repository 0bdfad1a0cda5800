"""Plans of several hosts over gloo, a process for each rank: the same plans as on GPUs, the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from distgemm.runtime.launch import launch
from tests.forked import results
from tests.multiprocess import hosts_worker as worker

MESHES = [(2, 2), pytest.param((2, 4), marks=pytest.mark.sample(0))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_across_hosts_are_those_of_numpy(mesh: tuple[int, int]) -> None:
    found = results(mesh[0] * mesh[1], worker.run, mesh)
    assert [failure for one in found for failure in one["exact"]] == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_do_not_agree_on_hosts_raise(mesh: tuple[int, int]) -> None:
    for one in results(mesh[0] * mesh[1], worker.run, mesh):
        assert "ranks per host: 2 on ranks 0, 2, 3" in one["different_hosts"]
        assert f", {mesh[0] * mesh[1]} on rank 1" in one["different_hosts"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_device_mesh_says_which_ranks_are_on_a_host(mesh: tuple[int, int]) -> None:
    assert [one["device_mesh"] for one in results(mesh[0] * mesh[1], worker.run, mesh)] == [[]] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_of_a_host_have_a_group(mesh: tuple[int, int]) -> None:
    found = results(mesh[0] * mesh[1], worker.run, mesh)
    assert [failure for one in found for failure in one["groups_of_hosts"]] == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_plans_are_proved(mesh: tuple[int, int]) -> None:
    for pattern in worker.PATTERNS:
        for plan in worker.plans(pattern, mesh):
            plan.verify()
            assert plan.link_bytes("across")


ON_2X4 = ("functions", "all-to-alls", "layers")
"""Checks that also run on 2 x 4 ranks."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mesh", "check"),
    [
        *(((2, 2), check) for check in (*ON_2X4, "gathered", "bytes", "compiled", "opcheck", "training")),
        *(((2, 4), check) for check in ON_2X4),
    ],
    ids=str,
)
def test_functions_and_layers_across_hosts_are_right(mesh: tuple[int, int], check: str) -> None:
    """Against the whole product in float64, as without hosts; and each plan that ran is for these hosts."""
    ranks = mesh[0] * mesh[1]
    assert results(ranks, worker.calls, mesh, check) == [[]] * ranks


def test_auto_across_hosts_is_predicted_and_measured_by_all_ranks(tmp_path: Path) -> None:
    found = launch(worker.tuned, 4, (2, 2), str(tmp_path), timeout=120)
    for each in found:
        assert each["predicted"].source == "predicted" and each["predicted"] == found[0]["predicted"]
        best, times = each["tuned"].config, each["tuned"].times
        assert best.schedule == "tensor_parallel_2d_nested" and best.option("inside") == worker.PATTERNS["sum"][1]
        assert best == found[0]["tuned"].config and best.source == "measured"
        assert "unfused" in times and not each["tuned"].refused
        for name in times.keys() - {"unfused"}:
            assert name.startswith("tensor_parallel_2d_nested across=") and "waits by kernel" not in name
        assert (each["again"], each["again"].source, each["measured"]) == (best, "recorded", 1)


@pytest.mark.parametrize("ends", [False, True], ids=["late", "ended"])
def test_a_rank_that_does_not_come_to_nccl_is_named(ends: bool) -> None:
    """It took part in the exchange of NCCL's id. The others give up, abort, and name it and its host."""
    first, second, absent, last = results(4, worker.communicators, (2, 2), 2, ends)
    assert absent == "absent"
    for found in (first, second, last):
        assert found.startswith("ncclCommInitRankConfig of NCCL has not ended after ")
        assert found.endswith("rank 2 of host 1 did not come" + "; rank 2 of host 1 has ended" * ends)


def test_all_ranks_that_come_to_nccl_make_a_communicator() -> None:
    assert results(4, worker.communicators, (2, 2), None, False) == ["made"] * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("of_host", "domain", "wanted", "alive"),
    [
        (1, (0, 0, 0, 0), (1, 4), 1),  # one domain of four machines
        (1, (0, 0, 1, 1), (2, 2), 1),
        (1, (0, 0, 0, None), (4, 1), 1),  # a rank without fabric handles
        (2, (None,) * 4, (2, 2), 1),
        (4, (None,) * 4, (1, 4), 0),  # one machine: nothing is tried
    ],
)
def test_a_host_is_what_shares_memory(
    of_host: int, domain: tuple[int | None, ...], wanted: tuple[int, int], alive: int
) -> None:
    assert results(4, worker.domains, of_host, domain) == [(wanted, alive)] * 4


def test_calls_that_are_prepared_know_what_a_mesh_says_later() -> None:
    assert results(4, worker.noted_later, (2, 2)) == [[None, None, 2, 2]] * 4
