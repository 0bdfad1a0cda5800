"""A workspace as the watchdog sees it: the calls on it that have not ended, its flags, and writes to it."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from distgemm.gemm.streams import new_stream
from distgemm.plan.exchanges import Exchange
from distgemm.plan.ops import Wait
from distgemm.plan.plan import Plan
from distgemm.runtime.cuda.lowering.actions import Action, exchanges_of, waits_of
from distgemm.runtime.cuda.side_queue import SideQueue
from distgemm.runtime.cuda.workspace import FlagValues, SharedWorkspace, Stage, Values, WorkspaceBuffer
from distgemm.runtime.executable import OnTimeout

__all__ = ["PendingCall", "WatchedExecutable", "WatchedWorkspace", "awaited", "owed_flags"]

LOG = logging.getLogger("distgemm")
COPY_TIMEOUT_S = 2.0
"""Time for the copy of the flags; a GPU that is stuck may not end it."""
POISON_BYTES = 1 << 20
"""NaN in host memory, from which a copy engine fills slots: kernels that wait may occupy all SMs."""


class WatchedExecutable(Protocol):
    """What the watchdog knows of an executable on GPUs.

    Attributes:
        actions: what it puts on streams, with flags that count no epochs.
    """

    plan: Plan
    rank: int
    device: torch.device
    timeout: float
    on_timeout: OnTimeout

    @property
    def workspace(self) -> SharedWorkspace: ...

    @property
    def actions(self) -> Sequence[Action]: ...

    def awaited(self, values: Any) -> tuple[str, list[int]]:
        """What its replay waits for, in words, and the ranks that it waits for.

        Args:
            values: what its workspace makes of its memory.
        """

    def raise_if_dead(self) -> None: ...


class PendingCall(NamedTuple):
    """A call that is not known to have ended.

    Attributes:
        executable: what was called.
        end: an event behind the call.
        out: returns the tensor that the call writes; None: it is gone, or there is none.
        thread: the thread to which an error is raised.
    """

    executable: WatchedExecutable
    end: torch.cuda.Event
    out: Callable[[], torch.Tensor | None]
    thread: int


class WatchedWorkspace:
    """A workspace with the calls on it that are not known to have ended.

    Args:
        workspace: the workspace.
        store: a store of all ranks, for this workspace alone.

    Attributes:
        ended: number of calls that are known to have ended.
        has_own_context: whether flags are read in a CUDA context of its own.
        under_way: the executable whose replay the flags named when they were last read; None: they named none.
        failed: whether the watchdog itself has failed here.
        informed: threads that have raised the error of this workspace, or will.
        gave_up: whether this rank has given the workspace up.
        failure: why this rank gives the workspace up, until the watchdog has informed the others; None: it does not.
    """

    @torch.inference_mode(False)  # the tensors are written outside of inference mode too
    def __init__(self, workspace: SharedWorkspace, store: Any) -> None:
        self.workspace, self.store = workspace, store
        self.pending: deque[PendingCall] = deque()
        self.ended = 0
        self.free_events: deque[torch.cuda.Event] = deque()
        self.lock = threading.Lock()  # between threads that take calls out of ``pending``, or raise
        self.streams: dict[int, torch.cuda.Stream] = {}  # by handle: torch takes microseconds to wrap one
        self.owner = threading.main_thread().ident or 0
        self.informed: set[int] = set()
        self.failed = self.warned = self.gave_up = False
        self.failing_since: float | None = None  # when the looks began to fail, if the last one has
        self.failure: str | None = None
        self.last_change: tuple[Any, float] = None, 0.0  # flags and ended calls, and when they last changed
        self.under_way: WatchedExecutable | None = None
        self.stream = new_stream(workspace.device)
        self.queue = SideQueue(workspace.device)
        self.has_own_context = False
        # A queue that is given up may still write to the first of two.
        self.copies = torch.empty(
            2, workspace.watched_memory().numel(), dtype=torch.int32, device="cpu", pin_memory=True
        )
        self.poison_source = torch.full((POISON_BYTES,), 0xFF, dtype=torch.uint8, device="cpu").pin_memory()

    def issued(self, executable: WatchedExecutable, out: Callable[[], torch.Tensor | None], stream: int) -> None:
        """Note that a call, or a part of a gather, was issued on the current stream.

        Args:
            executable: what was called.
            out: as in :class:`PendingCall`.
            stream: the handle of the current stream.

        Raises:
            ReplayTimeoutError: where the workspace has died meanwhile: nobody else would raise it for this call.
        """
        if not self.free_events:
            self.reclaim()
        end = self.free_events.popleft() if self.free_events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        known = self.streams.get(stream)
        if known is None:
            known = self.streams[stream] = torch.cuda.current_stream(executable.device)
        end.record(known)
        if not isinstance(threading.current_thread(), threading._DummyThread):
            # Otherwise autograd's thread makes the call, for the step of the thread that called last.
            self.owner = threading.get_ident()
        self.pending.append(PendingCall(executable, end, out, self.owner))
        executable.raise_if_dead()

    def raise_in_threads(self, error: type[Exception]) -> None:
        """Raise an error in the threads of all calls that have not ended, at their next Python instruction."""
        with self.lock:
            threads = {call.thread for call in list(self.pending)} - self.informed  # a thread may add calls meanwhile
            self.informed |= threads
            for thread in threads:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))

    def raises_itself(self) -> None:
        """Note that the calling thread raises the error by itself: it does not get a second one."""
        thread = threading.get_ident()
        with self.lock:
            if thread in self.informed:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
            self.informed.add(thread)

    def give_up(self, reason: str) -> None:
        """End the workspace: calls raise from now on, and the watchdog informs the other ranks.

        The calling thread raises an error by itself. A part of its call is missing, so its replay does not end.
        """
        self.raises_itself()
        self.gave_up = True
        self.workspace.dead = self.failure = reason

    def reclaim(self) -> None:
        """Stop watching calls that have ended, and reuse their events."""
        with self.lock:
            while self.pending and self.pending[0].end.query():  # type: ignore[no-untyped-call]
                self.free_events.append(self.pending.popleft().end)
                self.ended += 1

    def use_own_context(self) -> None:
        """Read and write in a CUDA context of its own from now on: the one of this process may not answer."""
        if self.has_own_context:
            return
        try:
            self.queue, self.has_own_context = SideQueue(self.workspace.device, own_context=True), True
        except RuntimeError as error:
            LOG.warning("distgemm's watchdog goes on without a CUDA context of its own: %s", error)

    def read_flags(self) -> bytes | None:
        """What the watchdog looks at, as it is now; None where even a copy does not end."""
        copy = self.copies[int(self.has_own_context)]
        if self.queue.ended(COPY_TIMEOUT_S):
            self.queue.copy(copy, self.workspace.watched_memory())
            if self.queue.ended(COPY_TIMEOUT_S):
                return copy.numpy().tobytes()
        return None

    def write_flags(self, addresses: Iterable[int], value: int) -> None:
        """Write flags."""
        self.queue.set_flags(addresses, value)

    def poison(self, rank: int) -> None:
        """Fill the slots of a rank with NaN, by a copy engine."""
        for part in torch.split(self.workspace.slots_of(rank), POISON_BYTES):
            self.queue.copy(part, self.poison_source[: part.numel()])
        self.queue.ended(COPY_TIMEOUT_S)

    def executable_of(self, values: Values) -> WatchedExecutable | None:
        """The executable whose replay the flags name; None: they name none, or it is gone."""
        return None if values.idle else self.workspace.executables[values.executable - 1]()


def awaited(executable: WatchedExecutable, flags: FlagValues) -> tuple[str, list[int]]:
    """What a replay waits for, in words, and the ranks that it waits for."""
    peers = executable.workspace.peers
    late = [peer for peer in peers if not flags.left[peer]]
    if flags.stage is Stage.ENTRY and late:
        return f"at its start it waits for ranks {late} to leave their last replay", late
    unset = [op for op in waits_of(executable.actions) if not flags.plan_flags[op.flag.number]]
    exchanges = exchanges_of(executable.actions)[flags.exchanged :]
    missing: list[Wait | Exchange] = sorted([*unset, *exchanges], key=lambda op: op.round)
    if missing:
        first = missing[0]
        more = f" (and {len(missing) - 1} later ones)" if len(missing) > 1 else ""
        ranks = [*(op.peer for op in unset), *(peer for op in exchanges for peer in op.peers)]
        if isinstance(first, Wait):
            return f"it waits for rank {first.peer} at {first.describe()}{more}", ranks
        by_host = ", ".join(f"rank {peer} of host {executable.plan.host(peer)}" for peer in first.peers)
        return f"it waits for {by_host} at {first.describe()}{more}", ranks
    late = [peer for peer in peers if not flags.entered[peer]]
    if late:
        return f"at its end it waits for ranks {late} to begin this replay", late
    return "all that it waits for has come, but a kernel or a copy has not ended", []


def owed_flags(
    buffer: WorkspaceBuffer, flags: FlagValues, actions: Sequence[Action], finished: Iterable[int]
) -> list[int]:
    """Addresses of the flags that a replay waits for now, and that ranks owe which will set no more.

    Only flags that are 0 and that the replay itself resets: each is written once for each replay, so none stays set for
    a later replay.

    Args:
        buffer: that of the replay.
        flags: this rank's.
        actions: those of the replay.
        finished: the ranks that will set no more.
    """
    rank, found = buffer.rank, sorted(set(finished))
    if flags.stage is Stage.IDLE:
        return []
    # Between its entry and ENTERED, a replay has seen left, and waits for plan flags already.
    starts = [buffer.left(rank, peer) for peer in found if flags.stage is Stage.ENTRY and not flags.left[peer]]
    numbers = dict.fromkeys(op.flag.number for op in waits_of(actions) if op.peer in found)
    inner = [buffer.plan_flag(rank, number) for number in numbers if not flags.plan_flags[number]]
    ends = [buffer.entered(rank, peer) for peer in found if not flags.entered[peer]]
    return starts + inner + ends
