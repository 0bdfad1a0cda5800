"""Which hosts share memory: those whose GPUs map each other's memory by fabric handles, as in one NVLink domain.

torch's symmetric memory takes fabric handles where GPUs support them. Such a handle is 64 bytes, which any process can
try to import. So the ranks try it, and ask neither for names of machines nor for the NVLink topology.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver

from distgemm.gemm.cuda_errors import raise_on

__all__ = ["can_import", "exported", "ranks_of_domain", "ranks_that_share"]

LOG = logging.getLogger("distgemm")

FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
DONE = driver.CUresult.CUDA_SUCCESS


@contextmanager
def exported(device: torch.device) -> Iterator[bytes | None]:
    """The fabric handle of some memory of a GPU, which stays inside the ``with`` block; None: the GPU exports none."""
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = FABRIC
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.index
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    result, size = driver.cuMemGetAllocationGranularity(prop, least)
    memory: Any = None
    if result == DONE:
        result, memory = driver.cuMemCreate(size, prop, 0)
    if result != DONE:
        LOG.info("GPU %s has no memory with fabric handles: %s", device, result)
        yield None
        return
    try:
        result, handle = driver.cuMemExportToShareableHandle(memory, FABRIC, 0)
        if result != DONE:
            LOG.info("GPU %s exports no fabric handles: %s", device, result)
        yield bytes(handle.data) if result == DONE else None
    finally:
        raise_on(driver.cuMemRelease(memory))


def can_import(handle: bytes) -> bool:
    """Whether this process can import memory that another one has exported."""
    given = driver.CUmemFabricHandle()
    given.data = handle
    result, memory = driver.cuMemImportFromShareableHandle(given.getPtr(), FABRIC)
    if result == DONE:
        raise_on(driver.cuMemRelease(memory))
    return bool(result == DONE)


def ranks_of_domain(ranks_per_host: int, device: torch.device) -> int:
    """How many ranks in a row share memory, on all hosts alike: those of a host, or of several. A collective call.

    Args:
        ranks_per_host: ranks of each host, which follow one another.
        device: this rank's GPU.
    """
    ranks = dist.get_world_size()
    if ranks == ranks_per_host:
        return ranks
    handles: list[Any] = [None] * ranks
    maps: list[Any] = [None] * ranks
    with exported(device) as mine:
        dist.all_gather_object(handles, mine)
        firsts = handles[::ranks_per_host]
        tried = [mine is not None and first is not None and can_import(first) for first in firsts]
        dist.all_gather_object(maps, tried)  # all have tried before any memory is released
    return ranks_that_share(maps, ranks_per_host)


def ranks_that_share(maps: Sequence[Sequence[bool]], ranks_per_host: int) -> int:
    """How many ranks in a row share memory, on all hosts alike.

    Hosts share memory if each rank of one maps memory of the other. Runs of such hosts may differ in length; then it is
    their greatest common divisor.

    Args:
        maps: by rank, for each host, whether the rank maps memory of it.
        ranks_per_host: ranks of each host.
    """
    hosts = len(maps) // ranks_per_host
    on = [maps[host * ranks_per_host : (host + 1) * ranks_per_host] for host in range(hosts)]

    def share(one: int, other: int) -> bool:
        return all(mine[other] for mine in on[one]) and all(mine[one] for mine in on[other])

    runs: list[list[int]] = []
    for host in range(hosts):
        if runs and all(share(host, other) for other in runs[-1]):
            runs[-1].append(host)
        else:
            runs.append([host])
    return ranks_per_host * gcd(*map(len, runs))
