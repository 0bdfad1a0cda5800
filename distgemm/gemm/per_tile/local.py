"""Ranks of one process, for tests and benchmarks: each has a stream and a workspace on one of the process's GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.per_tile.bind import RankGemm, Space, params_of
from distgemm.gemm.per_tile.epochs import Clock
from distgemm.gemm.per_tile.kernel import Launch

__all__ = ["LocalRanks"]

CLUSTER_BLOCKS = 8
"""A grid has a multiple of so many thread blocks, which all clusters divide."""


class LocalRanks:
    """Ranks that share this process. Rank r is on GPU r modulo the number of GPUs, and has a share of its SMs.

    Attributes:
        gemm: what each rank multiplies.
        devices: of each rank.
        streams: of each rank.
        memory: the workspace of each rank; slots begin as NaN.

    Args:
        gemm: as above.
        gpus: how many GPUs the ranks are on.
        epoch: the first epoch.

    Raises:
        RuntimeError: if the GPUs cannot access each other's memory.
    """

    def __init__(self, gemm: RankGemm, gpus: int = 1, epoch: int = 1) -> None:
        self.gemm = gemm
        self.devices = [rank % gpus for rank in range(gemm.ranks)]
        _give_access(gpus)
        layout = Space((), 0, gemm.flags, gemm.slot_bytes)
        self.memory = [torch.zeros(layout.size, dtype=torch.uint8, device=device) for device in self.devices]
        bases = [memory.data_ptr() for memory in self.memory]
        self._spaces = [Space(bases, rank, gemm.flags, gemm.slot_bytes) for rank in range(gemm.ranks)]
        for memory in self.memory:
            memory[layout.slots_at :].fill_(0xFF)
            memory[:8].view(torch.int64).fill_(Clock(epoch).word)
        self.streams: list[torch.cuda.Stream] = []
        for device in self.devices:
            self.streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        sharing = -(-gemm.ranks // gpus)
        self._blocks = sms if sharing == 1 else max(sms // sharing // CLUSTER_BLOCKS, 1) * CLUSTER_BLOCKS

    def launches(self, calls: Sequence[Mapping[str, Any]], early: bool = False, **options: Any) -> list[Launch]:
        """A launch of each rank.

        Args:
            calls: of each rank, the keyword arguments of :func:`distgemm.gemm.per_tile.bind.params_of`.
            early: as of :class:`Launch`.
            **options: of all ranks.
        """
        found = []
        for space, call, device in zip(self._spaces, calls, self.devices, strict=True):
            with torch.cuda.device(device):
                params = params_of(self.gemm, space, **call, **options)
                found.append(Launch(self.gemm.traits, params, self._blocks, device, early))
        return found

    def run(self, launches: Sequence[Launch], delays: Sequence[int] = ()) -> None:
        """Launch on all ranks, and wait for them.

        Args:
            launches: of all ranks.
            delays: of each rank, cycles before it begins; empty: none.
        """
        self.synchronize()  # the streams do not wait for the one that made the tensors
        for rank, launch in enumerate(launches):
            with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
                if delays:
                    torch.cuda._sleep(delays[rank])  # type: ignore[no-untyped-call]
                launch()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all GPUs."""
        for device in set(self.devices):
            torch.cuda.synchronize(device)


def _give_access(gpus: int) -> None:
    for device, peer in itertools.permutations(range(gpus), 2):
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context current
            (status,) = runtime.cudaDeviceEnablePeerAccess(peer, 0)
            if status != runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled:
                raise_on((status,))
