"""Ranks of one process, for tests and benchmarks: each has a stream and a workspace on one of the process's GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.per_tile.bind import RankGemm, Space, params_of
from distgemm.gemm.per_tile.epochs import EPOCHS, TICKET_BITS
from distgemm.gemm.per_tile.kernel import Launch
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control

__all__ = ["LocalRanks"]

CLUSTER_BLOCKS = 8
"""A grid has a multiple of so many thread blocks, which all clusters divide."""


class LocalRanks:
    """Ranks that share this process. Rank r is on GPU r modulo the number of GPUs, and has a share of its SMs.

    Attributes:
        gemm: what each rank multiplies, unless launches are for another GEMM.
        devices: of each rank.
        streams: of each rank.
        memory: the workspace of each rank.
        spaces: where each rank sees all workspaces.

    Args:
        gemm: as above.
        gpus: how many GPUs the ranks are on.
        epoch: the first epoch.
        others: further GEMMs of as many ranks. All share the workspace.
        sms: of each GPU, which its ranks share; None: all.

    Raises:
        RuntimeError: if the GPUs cannot access each other's memory.
    """

    def __init__(
        self,
        gemm: RankGemm,
        gpus: int = 1,
        epoch: int = 1,
        others: Sequence[RankGemm] = (),
        sms: int | None = None,
    ) -> None:
        self.gemm = gemm
        self.devices = [rank % gpus for rank in range(gemm.ranks)]
        _give_access(gpus)
        flags = max(one.flags for one in (gemm, *others))
        sizes = flags, *(max(getattr(one, name) for one in (gemm, *others)) for name in ("slot_bytes", "packet_bytes"))
        layout = Space((), 0, *sizes)
        self.memory: list[torch.Tensor] = []
        for device in self.devices:  # slots are NaN, and flags have no epoch
            self.memory.append(torch.full((layout.size,), 0xFF, dtype=torch.uint8, device=device))
        bases = [memory.data_ptr() for memory in self.memory]
        self.spaces = [Space(bases, rank, *sizes) for rank in range(gemm.ranks)]
        control = Control(clock=epoch << TICKET_BITS)
        control.begun[: gemm.ranks] = [(epoch - 1) % EPOCHS] * gemm.ranks
        for memory in self.memory:
            memory[:CONTROL_BYTES] = torch.frombuffer(bytearray(control), dtype=torch.uint8)
        self.streams: list[torch.cuda.Stream] = []
        for device in self.devices:
            self.streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        sms = sms or torch.cuda.get_device_properties(0).multi_processor_count
        sharing = -(-gemm.ranks // gpus)
        self._blocks = sms if sharing == 1 else max(sms // sharing // CLUSTER_BLOCKS, 1) * CLUSTER_BLOCKS

    def controls(self) -> list[Control]:
        """What the workspaces of all ranks say."""
        return [Control.from_buffer_copy(bytes(memory[:CONTROL_BYTES].tolist())) for memory in self.memory]

    def launches(
        self, calls: Sequence[Mapping[str, Any]], gemm: RankGemm | None = None, **options: Any
    ) -> list[Launch]:
        """A launch of each rank.

        Args:
            calls: of each rank, the keyword arguments of :func:`distgemm.gemm.per_tile.bind.params_of`.
            gemm: what is multiplied; None: the first GEMM.
            **options: of all ranks.
        """
        gemm, found = gemm or self.gemm, []
        for space, call, device in zip(self.spaces, calls, self.devices, strict=True):
            with torch.cuda.device(device):
                params = params_of(gemm, space, **call, **options)
                found.append(Launch(gemm.traits, params, self._blocks, device))
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
