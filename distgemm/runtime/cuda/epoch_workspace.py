"""The workspace of per-tile kernels: flags hold epochs, and nobody resets them. See docs/per_tile.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from distgemm.gemm.per_tile.bind import Space
from distgemm.gemm.per_tile.epochs import TICKET_BITS, buffer_of
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control, Death
from distgemm.runtime.cuda.workspace import SharedWorkspace

__all__ = ["EpochValues", "EpochWorkspace"]


class EpochValues(NamedTuple):
    """What a rank's workspace says.

    Attributes:
        running: thread blocks that work now.
        executable: number of the executable whose replay began last; 0: none did.
        begun: by rank, the last epoch that it has begun, as far as this rank knows.
        flags: int64, of the buffer that this rank's last replay uses.
    """

    running: int
    executable: int
    begun: list[int]
    flags: torch.Tensor

    @property
    def idle(self) -> bool:
        """Whether no replay is under way."""
        return not self.running or not self.executable


class EpochWorkspace(SharedWorkspace):
    """Control, then flags, slots and packets of two buffers: :class:`distgemm.gemm.per_tile.bind.Space` lays them out.

    Executables of different plans share it, with flags and slots at the same places: what another one left in a flag
    is an older epoch.

    Args:
        group: its ranks all make the workspace, with the same sizes.
        device: this rank's GPU.
        slot_bytes: bytes for slots on each rank, in each buffer.
        flags: number of flags of each buffer.
        packet_bytes: bytes for packets on each rank, in each buffer.

    Attributes:
        space: where all ranks' memory is.

    Raises:
        RuntimeError: on all ranks where one has no memory.
    """

    @torch.inference_mode(False)  # the memory is written outside of inference mode too
    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int, packet_bytes: int = 0
    ) -> None:
        self.slot_bytes, self.flags, self.packet_bytes = slot_bytes, flags, packet_bytes
        super().__init__(group, device, Space((), 0, flags, slot_bytes, packet_bytes).size)
        self.space = Space(tuple(self._handle.buffer_ptrs), self.rank, flags, slot_bytes, packet_bytes)
        self.begin()

    def _begin(self) -> None:
        assert self.memory is not None
        self.memory.fill_(0xFF)  # slots begin as NaN, and flags have no epoch
        self.memory[:CONTROL_BYTES].zero_()
        self.memory[:8].view(torch.int64).fill_(1 << TICKET_BITS)  # the first epoch

    def watched_memory(self) -> torch.Tensor:
        return self._own()[: self.space.slots_at].view(torch.int32)

    def slots_of(self, rank: int) -> torch.Tensor:
        if rank != self.rank:
            raise ValueError(f"no rank reads the slots of another one, got rank {rank} on rank {self.rank}")
        return self._own()[self.space.slots_at : self.space.packets_at]

    def _own(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        return self.memory

    def values(self, memory: torch.Tensor) -> EpochValues:
        content = memory.view(torch.uint8)
        control = Control.from_buffer_copy(bytes(content[:CONTROL_BYTES].tolist()))
        begun = list(control.begun[: self.world_size])
        first = self.space.flags_at + buffer_of(begun[self.rank]) * self.flags * 8
        flags = content[first : first + self.flags * 8].view(torch.int64)
        return EpochValues(control.running, control.executable, begun, flags)

    def closing(self) -> tuple[list[int], int]:
        return [self._death], Death.MUTE

    def ending(self, silent: set[int]) -> tuple[set[int], list[int], int]:
        return set(), [self._death], Death.FREE

    @property
    def _death(self) -> int:
        return self.space.bases[self.rank] + Control.dead.offset
