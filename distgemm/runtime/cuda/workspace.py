"""Workspace: memory of every rank that all ranks of a group can write, with words to signal through.

    word                    in the memory of   written by   says
    left[peer]              rank               peer         the peer has left its last replay: write to it
    entered[peer]           rank               peer         the peer has seen that word, and reset it
    stage                   rank               itself       how far the replay is, for the watchdog
    flag[number]            rank               one peer     what the plan's flag says, within one replay

Every replay of every executable takes these steps; on streams of their own, but for what others wait for:

    begin    nothing has been done
    entry    before any copy to a peer: wait for left of every peer
    entered  behind entry: reset left; write entered at every peer
    finish   behind the last wait for a flag: wait for entered of every peer; reset them and all flags
    exit     behind all else: write left at every peer

Each says at its start, in ``stage``, how far the replay is. So a rank writes another's memory only after that one has
left its last replay, whichever executable that was: they can share slots and flags. Between replays, ``left`` is 1 or on its way, all other words are 0. ``entered`` keeps a
``left`` from being written before the one before it was seen: no word ever counts.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distgemm.gemm.streams import new_stream
from distgemm.plan import SLOT_ALIGNMENT
from distgemm.runtime.cuda.memops import MemOp, wait_for, write

__all__ = ["Step", "Workspace", "close_workspace", "workspace_for"]

WORD = 4
FLAGS = 1024
"""Flags of a workspace, unless a plan has more."""

ENTRY, BODY, EXIT = 1, 2, 3
"""Stages of a replay; 0 between replays, and once no more words are waited for."""
STAGES = 4


class Step(enum.Enum):
    """A step of the protocol above."""

    BEGIN = "begin"
    ENTRY = "entry"
    ENTERED = "entered"
    FINISH = "finish"
    EXIT = "exit"


class Words(NamedTuple):
    """A rank's words: which executable is at which stage, and the words by peer and by number of the flag."""

    executable: int
    stage: int
    left: list[int]
    entered: list[int]
    flags: list[int]


class Workspace:
    """Symmetric memory of a group.

    group:      its ranks all make it, with the same sizes
    slot_bytes: for slots, on each rank
    flags:      number of flags

    Executables that share it are issued in one order, the same on all ranks, and one after the other: calls on
    several streams at once take groups of their own.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int = FLAGS) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.slot_bytes, self.flags = slot_bytes, flags
        self._first_flag = 2 * self.world_size + 1
        words = (self._first_flag + flags) * WORD
        self._slots_at = -(-words // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        size = self._slots_at + max(slot_bytes, SLOT_ALIGNMENT)
        self.memory: torch.Tensor | None = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self.memory, group)
        self.bases: tuple[int, ...] = tuple(self._handle.buffer_ptrs)
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        # For copies, signals and a second branch of GEMMs; executables here run one after the other, and share them.
        self.streams = [new_stream(device) for _ in range(3)]
        self.capturing = new_stream(device)
        self.dead: str | None = None
        self.executables: list[weakref.ref[Any]] = []
        self._kept: list[Any] = []
        # How many replays of graphs that callers captured are past their copies.
        self.replays = torch.zeros(1, dtype=torch.int32, device=device).add_(1)
        self.memory.fill_(0xFF)  # slots begin as NaN
        self.memory[: self._slots_at].zero_()
        self.memory[: self.world_size * WORD].view(torch.int32).fill_(1)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index] if dist.get_backend(group) == "nccl" else None)

    def register(self, executable: Any) -> int:
        """The number by which an executable is known here, from 1."""
        self.executables.append(weakref.ref(executable))
        return len(self.executables)

    def keep(self, executable: Any) -> None:
        """Keep an executable that has become part of a caller's graph: that may outlive all other references."""
        if not any(executable is kept for kept in self._kept):
            self._kept.append(executable)

    def _left(self, at: int, by: int) -> int:
        return self.bases[at] + by * WORD

    def _entered(self, at: int, by: int) -> int:
        return self.bases[at] + (self.world_size + by) * WORD

    def flag(self, rank: int, number: int) -> int:
        """Address of a flag."""
        return self.bases[rank] + (self._first_flag + number) * WORD

    def steps(self, executable: int, flags: Iterable[int]) -> dict[Step, list[MemOp]]:
        """What the steps of a replay are, for the executable of that number, which waits for the flags of these."""
        left = [self._left(self.rank, peer) for peer in self.peers]
        entered = [self._entered(self.rank, peer) for peer in self.peers]
        return {
            Step.BEGIN: [self._stage(executable, ENTRY)],
            Step.ENTRY: [wait_for(address) for address in left],
            Step.ENTERED: [
                self._stage(executable, BODY),
                *(write(address, 0) for address in left),
                *(write(self._entered(peer, self.rank)) for peer in self.peers),
            ],
            Step.FINISH: [
                self._stage(executable, EXIT),
                *map(wait_for, entered),
                *(write(address, 0) for address in entered),
                *(write(self.flag(self.rank, number), 0) for number in flags),
                self._stage(0, 0),
            ],
            Step.EXIT: [write(self._left(peer, self.rank)) for peer in self.peers],
        }

    def _stage(self, executable: int, stage: int) -> MemOp:
        return write(self.bases[self.rank] + 2 * self.world_size * WORD, executable * STAGES + stage)

    def read(self, words: torch.Tensor) -> Words:
        """What a copy of the words says."""
        values, size = words.tolist(), self.world_size
        executable, stage = divmod(values[2 * size], STAGES)
        return Words(executable, stage, values[:size], values[size : 2 * size], values[self._first_flag :])

    def slot(self, rank: int, offset: int, size: int) -> torch.Tensor:
        """Bytes of a rank's workspace, as a tensor on this device."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        found: torch.Tensor = self._handle.get_buffer(rank, (size,), torch.uint8, self._slots_at + offset)
        return found

    def words(self) -> torch.Tensor:
        """This rank's words, as :meth:`read` takes them."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        return self.memory[: (self._first_flag + self.flags) * WORD].view(torch.int32)

    def close(self) -> None:
        """Give the memory back, once no executable on it is called any more."""
        self.memory = None
        self._handle = None
        self._kept.clear()


_WORKSPACES: dict[tuple[str, int], Workspace] = {}


def workspace_for(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int) -> Workspace:
    """The workspace of a group, which all its executables share. It stays until :func:`close_workspace`.

    A larger one is made where the last is too small, or has died; executables keep the one they were made with. A
    collective call: sizes are the same on all ranks.
    """
    key = (group.group_name, device.index)
    found = _WORKSPACES.get(key)
    if found is not None and found.memory is not None and found.dead is None:
        if found.slot_bytes >= slot_bytes and found.flags >= flags:
            return found
        slot_bytes, flags = max(slot_bytes, found.slot_bytes), max(flags, found.flags)
    found = _WORKSPACES[key] = Workspace(group, device, slot_bytes, max(FLAGS, flags))
    return found


def close_workspace(group: dist.ProcessGroup | None = None) -> None:
    """Give the memory of a group's workspace back, once none of its executables is called any more; None: of all
    ranks' group."""
    whole = dist.group.WORLD if group is None else group
    for key in [key for key in _WORKSPACES if whole is not None and key[0] == whole.group_name]:
        _WORKSPACES.pop(key).close()
