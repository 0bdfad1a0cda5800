"""Which hosts share memory, with a driver that is replaced; and plans of one domain of 72 ranks."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

import distgemm
from distgemm.plan.patterns import does_pattern
from distgemm.runtime.cuda import fabric
from distgemm.runtime.cuda.fabric import ranks_that_share
from distgemm.simulator import simulate
from distgemm.simulator.machine import Machine

OK, REFUSED = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_PERMITTED
FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
HANDLE = bytes(range(64))


class Driver:
    """The driver's functions for memory with handles.

    Attributes:
        memory: what is allocated or imported, and not released.
    """

    def __init__(self, creates: Any = OK, exports: Any = OK, imports: Any = OK) -> None:
        self.results, self.memory = {"create": creates, "export": exports, "import": imports}, list[int]()

    def __getattr__(self, name: str) -> Any:
        own = {
            "cuMemGetAllocationGranularity": self.granularity,
            "cuMemCreate": self.create,
            "cuMemExportToShareableHandle": self.export,
            "cuMemImportFromShareableHandle": self.take,
            "cuMemRelease": self.release,
        }
        return own.get(name) or getattr(driver, name)  # types and constants

    def granularity(self, prop: Any, option: Any) -> Any:
        return OK, 2 << 20

    def create(self, size: int, prop: Any, flags: int) -> Any:
        assert (size, prop.requestedHandleTypes, prop.location.id, flags) == (2 << 20, FABRIC, 3, 0)
        return self._made("create")

    def export(self, memory: int, kind: Any, flags: int) -> Any:
        assert memory in self.memory and kind == FABRIC
        return self.results["export"], SimpleNamespace(data=HANDLE)

    def take(self, address: int, kind: Any) -> Any:
        assert ctypes.string_at(address, 64) == HANDLE and kind == FABRIC
        return self._made("import")

    def release(self, memory: int) -> Any:
        self.memory.remove(memory)
        return (OK,)

    def _made(self, how: str) -> Any:
        if self.results[how] != OK:
            return self.results[how], None
        self.memory.append(len(self.memory) + 1)
        return OK, self.memory[-1]


@pytest.mark.parametrize(
    ("fake", "wanted"), [(Driver(), HANDLE), (Driver(creates=REFUSED), None), (Driver(exports=REFUSED), None)]
)
def test_memory_is_exported_where_the_gpu_can(fake: Driver, wanted: bytes | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(fabric, "driver", fake)
    with fabric.exported(torch.device("cuda", 3)) as found:
        assert found == wanted
        assert len(fake.memory) == (fake.results["create"] == OK)
    assert fake.memory == []


@pytest.mark.parametrize("result", [OK, REFUSED])
def test_a_handle_is_imported_and_released(result: Any, monkeypatch: Any) -> None:
    fake = Driver(imports=result)
    monkeypatch.setattr(fabric, "driver", fake)
    assert fabric.can_import(HANDLE) == (result == OK)
    assert fake.memory == []


def maps_of(domains: list[int], of_host: int) -> list[list[bool]]:
    """By rank, whether it maps memory of each host, where hosts of one domain share memory."""
    return [[mine == other for other in domains] for mine in domains for _ in range(of_host)]


@pytest.mark.parametrize(
    ("domains", "of_host", "wanted"),
    [
        ([0] * 18, 4, 72),  # an NVL72: 18 machines with 4 GPUs
        ([0] * 18 + [1] * 18, 4, 72),
        ([0] * 18 + [1] * 2, 4, 8),  # 72 and 8 ranks: hosts of 8
        ([0, 1, 2, 3], 8, 8),
        ([0, 1, 0, 1], 8, 8),  # not in a row
        ([0, 0, 0, 1], 2, 2),
        ([0], 8, 8),
    ],
)
def test_hosts_are_as_large_as_domains_allow(domains: list[int], of_host: int, wanted: int) -> None:
    assert ranks_that_share(maps_of(domains, of_host), of_host) == wanted


def test_hosts_share_memory_only_if_all_ranks_of_both_map_it() -> None:
    order = random.Random(0)
    for _ in range(50):
        maps = maps_of([0, 0], 3)
        assert ranks_that_share(maps, 3) == 6
        rank = order.randrange(6)
        maps[rank][1 - rank // 3] = False
        assert ranks_that_share(maps, 3) == 3


FLAT = {
    "ag+gemm": "all_gather_1d_tiling_cd_rotating_a",
    "gemm+rs": "reduce_scatter_1d_pairwise_a",
    "gemm+ar": "all_reduce_1d_pairwise_a",
    "gemm+a2a": "all_to_all_1d_rotating_d",
    "a2a+gemm": "all_to_all_1d_rotating_a",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", FLAT)
def test_plans_of_a_domain_of_72_ranks_are_proved_and_simulated(pattern: str) -> None:
    """One domain is one host: nothing crosses. The simulated time is at least that of a rank's GEMM and of its link."""
    problem = distgemm.GemmProblem(72 * 64, 72 * 128, 72 * 64)
    plan = distgemm.make_plan(problem, FLAT[pattern], 72, sync="barrier")
    plan.verify()
    assert does_pattern(plan, pattern) and plan.ranks_per_host is None and not plan.link_bytes("across")
    machine = Machine.load("h200")
    found = simulate(plan, machine).time
    out_of_rank_0 = sum(size for (src, _), size in plan.link_bytes().items() if src == 0)
    flop = 2 * problem.m * problem.n * problem.k / 72
    assert found > max(out_of_rank_0 / (machine.nvlink.bandwidth * 1e3), flop / (machine.rate("bfloat16").peak * 1e6))


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", FLAT)
def test_plans_of_two_domains_of_72_ranks_are_proved(pattern: str) -> None:
    problem = distgemm.GemmProblem(144 * 8, 144 * 8, 144 * 8)
    names = {"across": FLAT[pattern], "inside": FLAT[pattern]}
    nested = "tensor_parallel_2d_nested"
    plan = distgemm.make_plan(problem, nested, mesh=(2, 72), ranks_per_host=72, sync="barrier", **names)
    plan.verify()
    assert does_pattern(plan, pattern) and plan.link_bytes("across")
