"""Workspace: memory of every rank that all ranks of a group can write, with words to signal through.

    word                    in the memory of   written by   says
    left[peer]              rank               peer         the peer has left its last replay: write to it
    entered[peer]           rank               peer         the peer has seen that word, and reset it
    flag[number]            rank               one peer     what the plan's flag says, within one replay

Every replay of every executable begins and ends alike:

    entry   wait for left[peer] of every peer and reset it; write entered at every peer
    exit    (all else is done) reset the flags; wait for entered[peer] of every peer and reset it; write left at
            every peer

So a rank writes another's memory only after that one has left its last replay, whichever executable that was: they
can share slots and flags. Between replays, ``left`` is 1 or on its way, all other words are 0. ``entered`` keeps a
``left`` from being written before the one before it was seen: no word ever counts.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distgemm.plan import SLOT_ALIGNMENT
from distgemm.runtime.cuda.memops import MemOp, wait_for, write

__all__ = ["Workspace", "workspace_for"]

WORD = 4
FLAGS = 4096
"""Flags of a workspace, unless a plan has more."""


class Workspace:
    """Symmetric memory of a group.

    group:      its ranks all make it, with the same sizes
    slot_bytes: for slots, on each rank
    flags:      number of flags

    Executables that share it are issued in one order, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int = FLAGS) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.slot_bytes, self.flags = slot_bytes, flags
        words = (2 * self.world_size + flags) * WORD
        self._slots_at = -(-words // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        size = self._slots_at + max(slot_bytes, SLOT_ALIGNMENT)
        self.memory: torch.Tensor | None = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self.memory, group)
        self.bases: tuple[int, ...] = tuple(self._handle.buffer_ptrs)
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self.memory.fill_(0xFF)  # slots begin as NaN
        self.memory[: self._slots_at].zero_()
        self.memory[: self.world_size * WORD].view(torch.int32).fill_(1)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index] if dist.get_backend(group) == "nccl" else None)

    def _left(self, at: int, by: int) -> int:
        return self.bases[at] + by * WORD

    def _entered(self, at: int, by: int) -> int:
        return self.bases[at] + (self.world_size + by) * WORD

    def flag(self, rank: int, number: int) -> int:
        """Address of a flag."""
        return self.bases[rank] + (2 * self.world_size + number) * WORD

    def entry(self) -> list[MemOp]:
        """What is done before a peer's memory is written."""
        waits = [op for peer in self.peers for op in self._take(self._left(self.rank, peer))]
        return waits + [write(self._entered(peer, self.rank)) for peer in self.peers]

    def exit(self) -> list[MemOp]:
        """What is done after all else, besides resetting flags."""
        waits = [op for peer in self.peers for op in self._take(self._entered(self.rank, peer))]
        return waits + [write(self._left(peer, self.rank)) for peer in self.peers]

    @staticmethod
    def _take(address: int) -> list[MemOp]:
        return [wait_for(address), write(address, 0)]

    def slot(self, rank: int, offset: int, size: int) -> torch.Tensor:
        """Bytes of a rank's workspace, as a tensor on this device."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        found: torch.Tensor = self._handle.get_buffer(rank, (size,), torch.uint8, self._slots_at + offset)
        return found

    def words(self) -> torch.Tensor:
        """This rank's words: left, entered, flags."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        return self.memory[: (2 * self.world_size + self.flags) * WORD].view(torch.int32)

    def close(self) -> None:
        """Give the memory back. No executable on it may be called any more; a collective call."""
        self.memory = None
        self._handle = None


_WORKSPACES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], Workspace]] = (
    weakref.WeakKeyDictionary()
)


def workspace_for(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int) -> Workspace:
    """The workspace of a group and the current stream, which all executables of that group and stream share.

    A larger one is made where the last is too small; executables keep the one they were made with. A collective
    call: sizes are the same on all ranks.
    """
    known = _WORKSPACES.setdefault(group, {})
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    found = known.get(key)
    if found is None or found.memory is None or found.slot_bytes < slot_bytes or found.flags < flags:
        found = known[key] = Workspace(group, device, slot_bytes, max(FLAGS, flags))
    return found


def close_workspaces(group: dist.ProcessGroup) -> None:
    """Close all workspaces of a group."""
    for found in _WORKSPACES.pop(group, {}).values():
        with contextlib.suppress(RuntimeError):
            found.close()
