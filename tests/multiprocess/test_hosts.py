"""Plans of several hosts over gloo, a process for each rank: the same plans as on GPUs, the same results."""

from __future__ import annotations

import pytest

from tests.forked import results
from tests.multiprocess import hosts_worker as worker

MESHES = [(2, 2), (2, 4)]


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
