"""Workspace: memory of every rank that all ranks of a group can write, with flags to signal through.

    flag                in the memory of   set by      meaning
    left[peer]          rank               peer        the peer has left its last replay: this rank may write to it
    entered[peer]       rank               peer        the peer has seen left[rank], and reset it
    stage               rank               rank        how far the replay is; the watchdog reads it
    exchanged           rank               rank        the exchanges that have ended in this replay, if there are hosts
    aborted             rank               watchdog    what this rank receives from other hosts becomes NaN
    plan_flag[number]   rank               one peer    what the plan's flag says, within one replay

Every replay of every executable takes these steps:

    entry    before anything is written at a peer, or where peers read: wait for left of every peer
    entered  behind all copies: reset left; set entered at every peer
    finish   behind the last wait for a flag: wait for entered of every peer; reset them and all plan flags
    exit     behind all else: set left at every peer

``stage`` says how far they are. So a rank writes another's memory only after that one has left its last replay,
whichever executable that was: executables can share slots and flags. Between replays, ``left`` is 1 or on its way, and
all other flags are 0. ``entered`` keeps a peer from setting ``left`` again before this rank has seen the last one: no
flag ever counts.

The workspace is double-buffered: all of this exists twice, and replays alternate between the two buffers. The peers
have usually left a buffer long before a rank enters it again. With one buffer each replay would begin with the time
that a flag takes from GPU to GPU. Two replays in a row on one buffer, as where a captured graph of a single call is
replayed, are right too, only slower.

With several hosts, peers are the ranks of the own host, and only they share memory and flags. Ranks of other hosts send
messages, which arrive where this rank receives them and when it receives them: they need no protocol.
"""

from __future__ import annotations

import enum
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)

from distgemm.gemm.flags import MemOp
from distgemm.gemm.streams import new_stream
from distgemm.plan.plan import SLOT_ALIGNMENT
from distgemm.runtime.checks import exchange_reports, raise_failures, raise_together
from distgemm.runtime.cuda.memops import clear, wait_for, write
from distgemm.runtime.cuda.nccl import Communicator
from distgemm.runtime.cuda.processes import ProcessId, this_process
from distgemm.runtime.groups import PerGroup

__all__ = [
    "BUFFERS",
    "FLAG_BYTES",
    "FlagValues",
    "SharedWorkspace",
    "Stage",
    "Step",
    "Values",
    "Workspace",
    "WorkspaceBuffer",
    "close_workspaces",
    "host_group",
    "workspace_for",
]

FLAG_BYTES = 4
MIN_PLAN_FLAGS = 1024
"""Plan flags of each buffer at least."""
MAX_GROWTH_BYTES = 256 << 20
"""Bytes by which a workspace at most grows beyond what is asked for."""
TOKEN_BYTES = 8
BUFFERS = 2
"""Buffers of a workspace."""


class Stage(enum.IntEnum):
    """How far a replay is, for the watchdog."""

    IDLE = 0  # between replays, and once the replay waits for no more flags
    ENTRY = 1
    BODY = 2


class Step(enum.Enum):
    """A step of the protocol above."""

    ENTRY = "entry"
    ENTERED = "entered"
    FINISH = "finish"
    EXIT = "exit"


class FlagValues(NamedTuple):
    """Values of a rank's flags in one buffer.

    Attributes:
        buffer: the buffer's number.
        executable: number of the executable whose replay is under way; 0: none.
        stage: how far its replay is.
        left: by peer.
        entered: by peer.
        plan_flags: by number.
        exchanged: how many exchanges have ended.
    """

    buffer: int
    executable: int
    stage: Stage
    left: list[int]
    entered: list[int]
    plan_flags: list[int]
    exchanged: int = 0

    @property
    def idle(self) -> bool:
        """Whether no replay is under way that waits."""
        return self.stage is Stage.IDLE


class WorkspaceBuffer:
    """Addresses of the flags in one of the two buffers.

    Args:
        rank: this rank.
        bases: by rank, the address of the buffer's first flag in that rank's memory; for ranks of this host.
        world_size: number of ranks, of all hosts.
    """

    def __init__(self, rank: int, bases: Mapping[int, int], world_size: int) -> None:
        self.rank, self.bases, self.world_size = rank, dict(bases), world_size
        self.peers = [peer for peer in self.bases if peer != rank]

    def left(self, at: int, by: int) -> int:
        """Address of the flag in the memory of rank ``at`` that rank ``by`` sets."""
        return self.bases[at] + by * FLAG_BYTES

    def entered(self, at: int, by: int) -> int:
        """Address of the flag in the memory of rank ``at`` that rank ``by`` sets."""
        return self.bases[at] + (_even(self.world_size) + by) * FLAG_BYTES

    def plan_flag(self, at: int, number: int) -> int:
        """Address of a plan's flag in the memory of rank ``at``."""
        return self.bases[at] + (first_plan_flag(self.world_size) + number) * FLAG_BYTES

    def steps(self, executable: int, flags: Iterable[int]) -> dict[Step, list[MemOp]]:
        """The steps of a replay.

        Args:
            executable: its number.
            flags: numbers of the plan flags that it waits for.
        """
        left = [self.left(self.rank, peer) for peer in self.peers]
        begin = [self._stage(executable, Stage.ENTRY)]
        if len(self.bases) < self.world_size:
            begin.append(self.exchanged(0))
        entered = [self.entered(self.rank, peer) for peer in self.peers]
        return {
            Step.ENTRY: [*begin, *map(wait_for, left)],
            Step.ENTERED: [
                self._stage(executable, Stage.BODY),
                *clear(left),
                *(write(self.entered(peer, self.rank)) for peer in self.peers),
            ],
            Step.FINISH: [
                *map(wait_for, entered),
                *clear(entered),
                *clear(self.plan_flag(self.rank, number) for number in flags),
                self._stage(0, Stage.IDLE),
            ],
            Step.EXIT: [write(self.left(peer, self.rank)) for peer in self.peers],
        }

    def exchanged(self, count: int) -> MemOp:
        """Note that so many exchanges of the replay have ended."""
        return write(self.bases[self.rank] + (stage_index(self.world_size) + 1) * FLAG_BYTES, count)

    def _stage(self, executable: int, stage: Stage) -> MemOp:
        address = self.bases[self.rank] + stage_index(self.world_size) * FLAG_BYTES
        return write(address, stage_value(executable, stage))


def stage_value(executable: int, stage: Stage) -> int:
    """The value of the stage flag: of an executable's number and its stage."""
    return executable * len(Stage) + stage


def stage_index(world_size: int) -> int:
    """The number of flags before the stage: left and entered of all ranks."""
    return 2 * _even(world_size)


def first_plan_flag(world_size: int) -> int:
    """The number of flags before the plan's. Flags that are cleared two at once share 8 bytes with no other kind."""
    return stage_index(world_size) + 4  # stage, exchanged, aborted, and an unused one


def _even(count: int) -> int:
    return count + count % 2


class Values(Protocol):
    """What a rank's flags say to the watchdog."""

    @property
    def executable(self) -> int: ...

    @property
    def idle(self) -> bool: ...


class SharedWorkspace:
    """Symmetric memory of a group, and the executables that share it.

    They are issued in one order, the same on all ranks, and one after the other. Calls on several streams at once take
    groups of their own.

    Args:
        group: its ranks all make the workspace, with the same sizes.
        device: this rank's GPU.
        size: bytes on each rank.
        ranks_per_host: number of ranks that share memory; None: all.

    Attributes:
        memory: this rank's part; None once it is closed.
        processes: by rank.
        peers: the other ranks of this host.
        across: for messages to ranks of other hosts; None: there are none.
        slot_bytes: bytes for slots on each rank, in each buffer.
        flags: number of the plan's flags in each buffer.
        packet_bytes: bytes for packets of per-tile kernels on each rank, in each buffer.
        dead: why no replay can be made any more; None while that is not so.
        replaced: whether a larger workspace has taken its place.

    Raises:
        RuntimeError: on all ranks where one has no memory.
    """

    slot_bytes: int
    flags: int
    packet_bytes = 0

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, size: int, ranks_per_host: int | None = None
    ) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        of_host = ranks_per_host or self.world_size
        first = self.rank // of_host * of_host
        ranks = range(first, first + of_host)
        self.peers = [peer for peer in ranks if peer != self.rank]
        self.memory: torch.Tensor | None = None
        self.memory, self.token, self.processes = allocate(size, group, device)
        inside, self._place = (group, dict(zip(ranks, ranks, strict=True)))
        if of_host < self.world_size:
            inside, self._place = host_group(group, ranks)
        try:
            self._handle: Any = symmetric_memory.rendezvous(self.memory, inside)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {ranks.start} to {ranks.stop - 1} cannot map each other's memory; ranks on several hosts take "
                f"plans with ranks_per_host. torch says: {error}"
            ) from error
        self.across = None
        if of_host < self.world_size:
            self.across = Communicator(group, device, self.processes, of_host)
        self.dead: str | None = None
        self.replaced = False
        self.executables: list[weakref.ref[Any]] = []
        self.kept: list[Any] = []

    def _begin(self) -> None:
        """Make what replays need besides the memory, and write what the memory begins with."""
        raise NotImplementedError

    def begin(self) -> None:
        """Make a new workspace ready for replays, and wait until it is so on all ranks. A collective call.

        Raises:
            RuntimeError: on all ranks where one fails.
        """
        problem: Exception | None = None
        try:
            self._begin()
            torch.cuda.synchronize(self.device)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        raise_together(problem, "cannot prepare the workspace", self.group, self.device)

    def register(self, executable: Any) -> int:
        """The number by which an executable is known here, from 1."""
        self.executables.append(weakref.ref(executable))
        return len(self.executables)

    def keep(self, executable: Any) -> None:
        """Keep an executable that has become part of a caller's graph, which may outlive all other references."""
        if not any(executable is kept for kept in self.kept):
            self.kept.append(executable)

    def release(self, executable: Any) -> None:
        """Do not keep an executable any longer: the caller's graphs with it are gone."""
        self.kept = [kept for kept in self.kept if kept is not executable]

    @property
    def unused(self) -> bool:
        """Whether no executable can make a replay on it any more."""
        return self.replaced and not self.kept and all(ref() is None for ref in self.executables)

    def watched_memory(self) -> torch.Tensor:
        """All that the watchdog looks at, int32. One copy reads it, also from another CUDA context."""
        raise NotImplementedError

    def slots_of(self, rank: int) -> torch.Tensor:
        """The bytes of all slots of a rank, of both buffers, as a tensor on this device."""
        raise NotImplementedError

    def values(self, memory: torch.Tensor) -> Values:
        """What a copy of :meth:`watched_memory` says."""
        raise NotImplementedError

    def abort_messages(self) -> None:
        """Let all messages to and from other hosts end, also those that a peer never sends. It does not block."""
        if self.across is not None:
            # NCCL ends its kernels, and may then wait for the GPU, and until all graphs with messages are gone.
            threading.Thread(target=self.across.abort, name="distgemm-abort", daemon=True).start()

    def closing(self) -> tuple[list[int], int]:
        """Addresses of flags, and what is written there, before the slots of this rank become NaN."""
        raise NotImplementedError

    def ending(self, silent: set[int]) -> tuple[set[int], list[int], int]:
        """What follows: no wait is left that nobody ends, and no replay begins that could give wrong results.

        Args:
            silent: the ranks that do not answer.

        Returns:
            The ranks whose slots become NaN, too; then addresses of flags, and what is written there.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give the memory back, once no executable on it is called any more.

        Raises:
            RuntimeError: during a capture.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the stream is being captured: memory is given back before or after that")
        self.memory = None
        self._handle = None
        self.kept.clear()
        self.abort_messages()


class Workspace(SharedWorkspace):
    """The flags of both buffers, then their slots.

    Args:
        group: its ranks all make the workspace, with the same sizes.
        device: this rank's GPU.
        slot_bytes: bytes for slots on each rank, in each buffer.
        flags: number of plan flags of each buffer.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        RuntimeError: on all ranks where one has no memory.
    """

    @torch.inference_mode(False)  # the memory is written outside of inference mode too
    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        slot_bytes: int,
        flags: int = MIN_PLAN_FLAGS,
        ranks_per_host: int | None = None,
    ) -> None:
        self.slot_bytes, self.flags = _aligned(max(slot_bytes, 1)), flags
        self._flags_of_buffer = first_plan_flag(dist.get_world_size(group)) + _even(flags)
        self._slots_at = _aligned((BUFFERS * self._flags_of_buffer + 1) * FLAG_BYTES)
        super().__init__(group, device, self._slots_at + BUFFERS * self.slot_bytes, ranks_per_host)
        bases = {rank: self._handle.buffer_ptrs[place] for rank, place in self._place.items()}
        size = self._flags_of_buffer * FLAG_BYTES
        self.buffers = tuple(
            WorkspaceBuffer(self.rank, {rank: base + number * size for rank, base in bases.items()}, self.world_size)
            for number in range(BUFFERS)
        )
        self.current_buffer = 0
        self.begin()

    def _begin(self) -> None:
        assert self.memory is not None
        # For copies, a second stream of GEMMs, sums, and messages. Executables run one after the other, and share them.
        self.streams = [new_stream(self.device) for _ in range(4)]
        self.capture_stream = new_stream(self.device)
        self.memory.fill_(0xFF)  # slots begin as NaN
        self.watched_memory().zero_().add_(1).zero_()  # add_ loads the kernel that graphs of callers have
        for values in self.flag_memory().view(BUFFERS, -1):
            values[: self.world_size] = 1  # left

    @property
    def next_buffer(self) -> int:
        """The number of the buffer that the next replay takes.

        It is the same on all ranks, because all issue replays in one order.
        """
        return (self.current_buffer + 1) % BUFFERS

    def flip(self) -> int:
        """Make the next buffer the current one, and return its number."""
        self.current_buffer = self.next_buffer
        return self.current_buffer

    def values(self, memory: torch.Tensor) -> FlagValues:
        return self.read(memory[:-1])

    def read(self, flags: torch.Tensor) -> FlagValues:
        """The values in the buffer that a replay is on; in the first buffer if there is no replay.

        Args:
            flags: a copy of :meth:`flag_memory`.
        """
        size, at = self.world_size, stage_index(self.world_size)
        buffers: list[list[int]] = flags.view(BUFFERS, -1).tolist()
        buffer, values = max(enumerate(buffers), key=lambda one: one[1][at] > 0)
        executable, stage = divmod(values[at], len(Stage))
        entered = _even(size)
        return FlagValues(
            buffer,
            executable,
            Stage(stage),
            values[:size],
            values[entered : entered + size],
            values[first_plan_flag(size) :],
            values[at + 1],
        )

    @property
    def aborted(self) -> int:
        """Address of the flag that says whether messages were aborted: what is received then is not defined."""
        return self.buffers[0].bases[self.rank] + (stage_index(self.world_size) + 2) * FLAG_BYTES

    def closing(self) -> tuple[list[int], int]:
        return [self.aborted] if self.across is not None else [], 1

    def ending(self, silent: set[int]) -> tuple[set[int], list[int], int]:
        # Plans may read the slots of other ranks. Those enter no more.
        return silent, [buffer.left(peer, self.rank) for peer in sorted(silent) for buffer in self.buffers], 0

    def slot(self, buffer: int, rank: int, offset: int, size: int) -> torch.Tensor:
        """Bytes of a rank's slots in one buffer, as a tensor on this device."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        at = self._slots_at + buffer * self.slot_bytes + offset
        found: torch.Tensor = self._handle.get_buffer(self._place[rank], (size,), torch.uint8, at)
        return found

    def slots_of(self, rank: int) -> torch.Tensor:
        return self.slot(0, rank, 0, BUFFERS * self.slot_bytes)

    def watched_memory(self) -> torch.Tensor:
        """This rank's flags, int32, then the count of :attr:`replays`."""
        if self.memory is None:
            raise RuntimeError("the workspace is closed")
        return self.memory[: (BUFFERS * self._flags_of_buffer + 1) * FLAG_BYTES].view(torch.int32)

    def flag_memory(self) -> torch.Tensor:
        """This rank's flags of both buffers, int32, as :meth:`read` takes them."""
        return self.watched_memory()[:-1]

    @property
    def replays(self) -> torch.Tensor:
        """How many replays of graphs that callers captured have begun, int32."""
        return self.watched_memory()[-1:]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, int, list[ProcessId]]:
    """Symmetric memory, a token that all ranks have and no other memory had, and the processes. A collective call.

    Args:
        size: bytes on each rank, the same on all ranks.
        group: the ranks.
        device: this rank's GPU.

    Raises:
        RuntimeError: on all ranks where one has no memory. Otherwise they would wait for that one in the rendezvous.
    """
    made: torch.Tensor | None = None
    problem: Exception | None = None
    try:
        made = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except Exception as error:  # raised below, once all ranks know of it
        problem = error
    reports = exchange_reports(secrets.token_bytes(TOKEN_BYTES) + this_process().pack(), problem, group, device)
    raise_failures(reports, problem, RuntimeError, f"cannot allocate {size} bytes of symmetric memory")
    assert made is not None
    processes = [ProcessId.unpack(report.payload[TOKEN_BYTES:]) for report in reports]
    return made, int.from_bytes(reports[0].payload[:TOKEN_BYTES], "little"), processes


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


_HOST_GROUPS: PerGroup[dict[int, dist.ProcessGroup]] = PerGroup(dict)
"""For each group, the groups of the ranks of this host, by their number."""


def host_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> tuple[dist.ProcessGroup, dict[int, int]]:
    """A group of some ranks of a group, through which they map each other's memory. Only these ranks call it.

    It is made once, and lives as long as torch.distributed: workspaces that follow use it again. It is one of gloo,
    because a group of NCCL cannot be made by some ranks alone if the default group is bound to a device.

    Args:
        group: the whole group.
        ranks: numbers in the group.

    Returns:
        The group, and the number of each rank in it.
    """
    order = sorted(ranks, key=lambda rank: dist.get_global_rank(group, rank))
    known = _HOST_GROUPS.of(group)
    if len(ranks) not in known:
        members = [dist.get_global_rank(group, rank) for rank in order]
        known[len(ranks)] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return known[len(ranks)], {rank: place for place, rank in enumerate(order)}


_WORKSPACES: dict[tuple[Any, ...], Any] = {}
AnyWorkspace = TypeVar("AnyWorkspace", bound=SharedWorkspace)


def workspace_for(
    group: dist.ProcessGroup,
    device: torch.device,
    slot_bytes: int,
    flags: int,
    kind: Callable[..., AnyWorkspace],
    packet_bytes: int = 0,
    **options: Any,
) -> AnyWorkspace:
    """The workspace of a kind of a group, which all its executables share. It stays until it is closed.

    A new one is made where the last one is too small, or has died, or belongs to a group that is gone and whose name
    came again. Executables keep the workspace that they were made with. A collective call: sizes are the same on all
    ranks.
    """
    key = (group.group_name, device.index, kind, *options.items())
    found: AnyWorkspace | None = _WORKSPACES.get(key)
    if found is not None and found.memory is not None and found.dead is None and found.group is group:
        if found.slot_bytes >= slot_bytes and found.flags >= flags and found.packet_bytes >= packet_bytes:
            return found
        slot_bytes, packet_bytes = _grown(found.slot_bytes, slot_bytes), _grown(found.packet_bytes, packet_bytes)
        flags = max(flags, found.flags)
    if packet_bytes:
        options["packet_bytes"] = packet_bytes
    made = _WORKSPACES[key] = kind(group, device, slot_bytes, max(MIN_PLAN_FLAGS, flags), **options)
    if found is not None and found.memory is not None:
        found.replaced = True
    return made


def _grown(size: int, asked: int) -> int:
    """A size, or a larger one if more is asked for: some more than that, as shapes that grow slowly would take a new
    workspace each."""
    return size if asked <= size else max(asked, size + min(size, MAX_GROWTH_BYTES))


def close_workspaces(group: dist.ProcessGroup) -> None:
    """Close the workspaces of a group, on all devices. Raises RuntimeError during a capture."""
    for key in [key for key in _WORKSPACES if key[0] == group.group_name]:
        _WORKSPACES[key].close()
        del _WORKSPACES[key]
