"""Workspace: memory of every rank that all ranks of a group can write, with words to signal through.

    word                    in the memory of   written by   says
    left[peer]              rank               peer         the peer has left its last replay: write to it
    entered[peer]           rank               peer         the peer has seen that word, and reset it
    stage                   rank               itself       how far the replay is, for the watchdog
    flag[number]            rank               one peer     what the plan's flag says, within one replay

Every replay of every executable takes these steps:

    entry    before anything is written at a peer, or where peers read: wait for left of every peer
    entered  behind all copies: reset left; write entered at every peer
    finish   behind the last wait for a flag: wait for entered of every peer; reset them and all flags
    exit     behind all else: write left at every peer

``stage`` says how far they are. So a rank writes another's memory only after that one has left its last replay,
whichever executable that was: they can share slots and flags. Between replays, ``left`` is 1 or on its way, all other
words are 0. ``entered`` keeps a ``left`` from being written before the one before it was seen: no word ever counts.

All of this exists twice. Replays take the two halves in turn, so that the peers have usually left a half long before
it is entered again: else each would begin with a word's way from GPU to GPU. Two replays in a row on one half, as
where a captured graph of a single call is replayed, are right too, only slower.
"""

from __future__ import annotations

import enum
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distgemm.gemm.flags import MemOp
from distgemm.gemm.streams import new_stream
from distgemm.plan.plan import SLOT_ALIGNMENT
from distgemm.runtime.cuda.memops import clear, wait_for, write

__all__ = ["Half", "Step", "Workspace", "close_workspace", "workspace_for"]

WORD = 4
FLAGS = 1024
"""Flags of a workspace, unless a plan has more."""

GROWTH = 256 << 20
"""Bytes by which a workspace at most grows beyond what is asked for."""

ENTRY, BODY = 1, 2
"""Stages of a replay; 0 between replays, and once no more words are waited for."""
STAGES = 3


class Step(enum.Enum):
    """A step of the protocol above."""

    ENTRY = "entry"
    ENTERED = "entered"
    FINISH = "finish"
    EXIT = "exit"


class FlagOps(NamedTuple):
    """A rank's words: which executable is at which stage, and the words by peer and by number of the flag."""

    executable: int
    stage: int
    left: list[int]
    entered: list[int]
    flags: list[int]


class Half:
    """Addresses of the words of one half.

    bases: where its words begin in the memory of each rank
    """

    def __init__(self, rank: int, bases: Sequence[int]) -> None:
        self.rank, self.bases, self.world_size = rank, tuple(bases), len(bases)
        self.peers = [peer for peer in range(self.world_size) if peer != rank]

    def left(self, at: int, by: int) -> int:
        return self.bases[at] + by * WORD

    def entered(self, at: int, by: int) -> int:
        return self.bases[at] + (_even(self.world_size) + by) * WORD

    def flag(self, rank: int, number: int) -> int:
        """Address of a flag."""
        return self.bases[rank] + (first_flag(self.world_size) + number) * WORD

    def steps(self, executable: int, flags: Iterable[int]) -> dict[Step, list[MemOp]]:
        """What the steps of a replay are, for the executable of that number, which waits for the flags of these."""
        left = [self.left(self.rank, peer) for peer in self.peers]
        entered = [self.entered(self.rank, peer) for peer in self.peers]
        return {
            Step.ENTRY: [self._stage(executable, ENTRY), *map(wait_for, left)],
            Step.ENTERED: [
                self._stage(executable, BODY),
                *clear(left),
                *(write(self.entered(peer, self.rank)) for peer in self.peers),
            ],
            Step.FINISH: [
                *map(wait_for, entered),
                *clear(entered),
                *clear(self.flag(self.rank, number) for number in flags),
                self._stage(0, 0),
            ],
            Step.EXIT: [write(self.left(peer, self.rank)) for peer in self.peers],
        }

    def _stage(self, executable: int, stage: int) -> MemOp:
        return write(self.bases[self.rank] + stage_word(self.world_size) * WORD, executable * STAGES + stage)


def stage_word(world_size: int) -> int:
    """FlagOps before the stage: left and entered of all ranks."""
    return 2 * _even(world_size)


def first_flag(world_size: int) -> int:
    """FlagOps before the flags. What is cleared two words at once lies apart from all else."""
    return stage_word(world_size) + 2


def _even(count: int) -> int:
    return count + count % 2


class Workspace:
    """Symmetric memory of a group: the words of both halves, then their slots.

    group:      its ranks all make it, with the same sizes
    slot_bytes: for slots, on each rank, in each half
    flags:      number of flags of a half

    Executables that share it are issued in one order, the same on all ranks, and one after the other: calls on
    several streams at once take groups of their own.
    """

    @torch.inference_mode(False)  # what is made here is written outside of it, too
    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int = FLAGS) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.slot_bytes, self.flags = _aligned(max(slot_bytes, 1)), flags
        self._half_words = first_flag(self.world_size) + _even(flags)
        self._slots_at = _aligned(2 * self._half_words * WORD)
        self.memory: torch.Tensor | None = None
        self.memory, self.token = self._allocated(self._slots_at + 2 * self.slot_bytes)
        self._handle: Any = symmetric_memory.rendezvous(self.memory, group)
        bases = self._handle.buffer_ptrs
        self.halves = tuple(
            Half(self.rank, [base + half * self._half_words * WORD for base in bases]) for half in range(2)
        )
        self._turn = 0
        self.peers = self.halves[0].peers
        # For copies, a second branch of GEMMs, and sums; executables here run one after the other, and share them.
        self.streams = [new_stream(device) for _ in range(3)]
        self.capturing = new_stream(device)
        self.dead: str | None = None
        self.replaced = False  # by a larger one
        self.executables: list[weakref.ref[Any]] = []
        self._kept: list[Any] = []
        # How many replays of graphs that callers captured have begun.
        self.replays = torch.zeros(1, dtype=torch.int32, device=device).add_(1)
        self.memory.fill_(0xFF)  # slots begin as NaN
        words = self.words().zero_()
        for half in words.view(2, -1):
            half[: self.world_size] = 1
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index] if dist.get_backend(group) == "nccl" else None)

    def _allocated(self, size: int) -> tuple[torch.Tensor, int]:
        """Symmetric memory, and a number that all ranks have and no other workspace had. Raises on all ranks where one
        has no memory: they would wait for it."""
        mine = torch.tensor([0, secrets.randbits(62)], dtype=torch.int64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.group.size())]
        made: torch.Tensor | None = None
        problem: Exception | None = None
        try:
            made = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
            mine[0] = 1
        dist.all_gather(every, mine, self.group)
        if problem is not None:
            raise problem
        if failed := [rank for rank, one in enumerate(every) if one[0]]:
            raise RuntimeError(
                f"ranks {failed} of the group cannot allocate {size} bytes of symmetric memory; their errors say why"
            )
        assert made is not None
        return made, int(every[0][1])

    def release(self, executable: Any) -> None:
        """Do not keep an executable any longer: the caller's graphs with it are gone."""
        self._kept = [kept for kept in self._kept if kept is not executable]

    @property
    def unused(self) -> bool:
        """Whether nobody can make a replay on it any more."""
        return self.replaced and not self._kept and all(ref() is None for ref in self.executables)

    @property
    def next_half(self) -> int:
        """The half that the next replay takes: the same on all ranks, for all issue replays in one order."""
        return self._turn ^ 1

    def turn(self) -> int:
        """Take the next half."""
        self._turn ^= 1
        return self._turn

    def register(self, executable: Any) -> int:
        """The number by which an executable is known here, from 1."""
        self.executables.append(weakref.ref(executable))
        return len(self.executables)

    def keep(self, executable: Any) -> None:
        """Keep an executable that has become part of a caller's graph: that may outlive all other references."""
        if not any(executable is kept for kept in self._kept):
            self._kept.append(executable)

    def read(self, words: torch.Tensor) -> FlagOps:
        """What a copy of the words says of the half that a replay is on; of the first if there is none."""
        size, at = self.world_size, stage_word(self.world_size)
        halves: list[list[int]] = words.view(2, -1).tolist()
        values = max(halves, key=lambda values: values[at] > 0)
        executable, stage = divmod(values[at], STAGES)
        entered = _even(size)
        return FlagOps(executable, stage, values[:size], values[entered : entered + size], values[first_flag(size) :])

    def slot(self, half: int, rank: int, offset: int, size: int) -> torch.Tensor:
        """Bytes of a rank's slots, as a tensor on this device."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        at = self._slots_at + half * self.slot_bytes + offset
        found: torch.Tensor = self._handle.get_buffer(rank, (size,), torch.uint8, at)
        return found

    def words(self) -> torch.Tensor:
        """This rank's words of both halves, as :meth:`read` takes them."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        return self.memory[: 2 * self._half_words * WORD].view(torch.int32)

    def close(self) -> None:
        """Give the memory back, once no executable on it is called any more. Raises RuntimeError during a capture."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the stream is being captured: memory is given back before or after that")
        self.memory = None
        self._handle = None
        self._kept.clear()


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


_WORKSPACES: dict[tuple[str, int], Workspace] = {}


def workspace_for(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int) -> Workspace:
    """The workspace of a group, which all its executables share. It stays until :func:`close_workspace`.

    A larger one is made where the last is too small, or has died, or is of a group that is gone, whose name came again;
    executables keep the one they were made with. A collective call: sizes are the same on all ranks.
    """
    key = (group.group_name, device.index)
    found = _WORKSPACES.get(key)
    if found is not None and found.memory is not None and found.dead is None and found.group is group:
        if found.slot_bytes >= slot_bytes and found.flags >= flags:
            return found
        # Some more than is asked for: shapes that grow slowly would take a new one each.
        slot_bytes = max(slot_bytes, found.slot_bytes + min(found.slot_bytes, GROWTH))
        flags = max(flags, found.flags)
    made = _WORKSPACES[key] = Workspace(group, device, slot_bytes, max(FLAGS, flags))
    if found is not None and found.memory is not None:
        found.replaced = True
    return made


def close_workspace(group: dist.ProcessGroup | None = None) -> None:
    """Give the memory of a group's workspace back, once none of its executables is called any more; None: of all
    ranks' group. Raises RuntimeError during a capture."""
    from distgemm.runtime.cuda.watchdog import watchdog

    whole = dist.group.WORLD if group is None else group
    for key in [key for key in _WORKSPACES if whole is not None and key[0] == whole.group_name]:
        _WORKSPACES[key].close()
        del _WORKSPACES[key]
    watchdog().sweep()  # earlier ones, too, that were too small
