"""A thread that notices replays which do not end, says what they wait for, and frees the GPU.

The watchdog looks at events behind calls, and now and then at a copy of the workspace's flags. A replay is stuck when
it has begun, and nothing has changed for the time that its executable allows. Then the watchdog takes these steps:

1. It reads the flags: which peers have not entered or left, which plan flags are not set. They make the message.
2. It marks the workspace as dead on this rank and, through the group's store, on every rank that answers.
3. It raises a :class:`ReplayTimeoutError` in the thread that made the calls, at the next Python instruction.
4. Only then does it satisfy all waits, so that the GPU comes free, and fill D of every unfinished call with NaN.

So no caller gets the result of a stuck call as if it were right. For a graph that the caller captured, the watchdog
knows neither the thread nor D: there, only the next call of an executable raises, or ``raise_if_dead``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from cuda.bindings import runtime

from distgemm.gemm.streams import new_stream
from distgemm.plan.plan import Plan
from distgemm.runtime.cuda.lowering.actions import Action, waits_of
from distgemm.runtime.cuda.memops import raise_on
from distgemm.runtime.cuda.workspace import FlagValues, Stage, Workspace, close_workspaces
from distgemm.runtime.executable import OnTimeout

__all__ = ["ReplayTimeoutError", "WatchedWorkspace", "Watchdog", "close_workspace", "watchdog"]

POLL_INTERVAL_S = 0.2
"""Time between two looks."""
COPY_TIMEOUT_S = 2.0
"""Time for the copy of the flags; a GPU that is stuck may not end it."""
ANSWER_TIMEOUT_S = 5.0
"""Time for other ranks to answer that they know, before waits are satisfied here."""
FREE_TIMEOUT_S = 30.0
"""Time for calls to end once their waits are satisfied."""

LOG = logging.getLogger("distgemm")


class ReplayTimeoutError(RuntimeError):
    """A replay did not end in time; the message names schedule, rank, iteration, op, tile and peer."""


class WatchedExecutable(Protocol):
    """What the watchdog knows of a :class:`distgemm.CudaExecutable`."""

    plan: Plan
    rank: int
    device: torch.device
    workspace: Workspace
    timeout: float
    on_timeout: OnTimeout

    @property
    def actions(self) -> Sequence[Action]: ...

    def raise_if_dead(self) -> None: ...


class _PendingCall(NamedTuple):
    """A call that is not known to have ended."""

    executable: WatchedExecutable
    end: torch.cuda.Event
    out: weakref.ref[torch.Tensor]
    thread: int


class WatchedWorkspace:
    """A workspace with the calls on it that are not known to have ended.

    Args:
        workspace: the workspace.
        store: a store of all ranks, for this workspace alone.

    Attributes:
        ended: number of calls that are known to have ended.
        under_way: the executable whose replay the flags named when they were last read; None: they named none.
        failed: whether the watchdog itself has failed here.
    """

    @torch.inference_mode(False)  # the tensors are written outside of inference mode too
    def __init__(self, workspace: Workspace, store: Any) -> None:
        self.workspace, self.store = workspace, store
        self.pending: deque[_PendingCall] = deque()
        self.ended = 0
        self.free_events: deque[torch.cuda.Event] = deque()
        self.lock = threading.Lock()  # between threads that take calls out of ``pending``
        self.streams: dict[int, torch.cuda.Stream] = {}  # by handle: torch takes microseconds to wrap one
        self.failed = self.warned = False
        self.last_change: tuple[Any, float] = None, 0.0  # flags and ended calls, and when they last changed
        self.under_way: WatchedExecutable | None = None
        self.stream = new_stream(workspace.device)
        self.copy = torch.empty(1 + workspace.flag_memory().numel(), dtype=torch.int32, pin_memory=True)
        self.ones = torch.ones(workspace.flag_memory().numel(), dtype=torch.int32).pin_memory()

    def issued(self, executable: WatchedExecutable, out: weakref.ref[torch.Tensor]) -> None:
        """Note that a call was issued on the current stream.

        Raises:
            ReplayTimeoutError: where the workspace has died meanwhile: nobody else would raise it for this call.
        """
        if not self.free_events:
            self.reclaim()
        end = self.free_events.popleft() if self.free_events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        handle = torch._C._cuda_getCurrentRawStream(executable.device.index or 0)
        stream = self.streams.get(handle)
        if stream is None:
            stream = self.streams[handle] = torch.cuda.current_stream(executable.device)
        end.record(stream)
        self.pending.append(_PendingCall(executable, end, out, threading.get_ident()))
        executable.raise_if_dead()

    def reclaim(self) -> None:
        """Stop watching calls that have ended, and reuse their events."""
        with self.lock:
            while self.pending and self.pending[0].end.query():  # type: ignore[no-untyped-call]
                self.free_events.append(self.pending.popleft().end)
                self.ended += 1

    def read_flags(self) -> list[int] | None:
        """The count of replays and the flags now; None where even a copy does not end."""
        with torch.cuda.stream(self.stream):
            self.copy[:1].copy_(self.workspace.replays, non_blocking=True)
            self.copy[1:].copy_(self.workspace.flag_memory(), non_blocking=True)
            done = self.stream.record_event()
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while not done.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        return list(self.copy.tolist())


class Watchdog:
    """The watchdog thread of a process; see :func:`watchdog`.

    Attributes:
        watched: what is watched, by workspace.
    """

    def __init__(self) -> None:
        self.watched: dict[Workspace, WatchedWorkspace] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, workspace: Workspace) -> WatchedWorkspace:
        """Watch a workspace. A collective call: all ranks make it in the same order.

        Returns:
            The object that notes calls; the same one for the same workspace.
        """
        with self._lock:
            self._sweep()
            if workspace in self.watched:
                return self.watched[workspace]
            found = self.watched[workspace] = WatchedWorkspace(workspace, store_of(workspace))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distgemm-watchdog", daemon=True)
                self._thread.start()
            return found

    def sweep(self) -> None:
        """Stop watching workspaces that no executable can use any more."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        # The thread does not do this: memory cannot be freed while a capture is under way.
        for workspace, watched in list(self.watched.items()):
            if workspace.memory is None or (workspace.unused and not watched.pending):
                del self.watched[workspace]

    def _run(self) -> None:
        # Otherwise this thread's calls of CUDA would spoil a capture in another thread.
        raise_on(
            runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        )
        while True:
            time.sleep(POLL_INTERVAL_S)
            with self._lock:
                self._look_at_all()

    def _look_at_all(self) -> None:
        """Look at each workspace.

        This is a function of its own: once it returns, the thread refers to no workspace, so it never frees one.
        """
        for workspace, watched in self.watched.items():
            if workspace.dead is not None or workspace.memory is None or watched.failed:
                continue
            try:
                self.look(watched)
            except Exception:
                if workspace.memory is None:
                    continue  # closed meanwhile
                watched.failed = True
                LOG.exception("distgemm's watchdog failed: it no longer notices hangs on this workspace")

    def look(self, watched: WatchedWorkspace) -> None:
        """Look at one workspace, and end what is stuck."""
        now = time.monotonic()
        workspace = watched.workspace
        reason = reason_of_other_rank(watched.store)
        if reason is not None:
            self._die(watched, f"another rank has given up: {reason}", first=False)
            return
        watched.reclaim()
        flags = watched.read_flags()
        values = None if flags is None else workspace.read(torch.tensor(flags[1:]))
        if values is not None:  # also for a graph that the caller captured
            watched.under_way = None if values.stage is Stage.IDLE else workspace.executables[values.executable - 1]()
        first = next(iter(list(watched.pending)), None)  # a calling thread may take it away meanwhile
        executable = watched.under_way or (None if first is None else first.executable)
        state = flags, watched.ended
        if watched.last_change[0] != state or executable is None:
            watched.last_change, watched.warned = (state, now), False
            return
        if now - watched.last_change[1] <= executable.timeout:
            return
        if watched.under_way is not None:
            self._die(watched, explain_hang(executable, values, executable.timeout), first=True)
        elif not watched.warned:
            watched.warned = True
            LOG.warning(
                "a call of %s on rank %d has not ended within %g s. It waits for no other rank: something before it on "
                "its stream has not ended, or its last kernel has not",
                executable.plan.schedule,
                workspace.rank,
                executable.timeout,
            )

    def _die(self, watched: WatchedWorkspace, message: str, first: bool) -> None:
        """End a workspace; ``first``: no other rank has done so before."""
        workspace = watched.workspace
        if first:
            with contextlib.suppress(RuntimeError):  # the store ends with the rank that keeps it
                watched.store.compare_set("dead", "", message)
        workspace.dead = message
        LOG.error("%s", message)
        self._await_others(watched)
        executables = [found for ref in workspace.executables if (found := ref()) is not None]
        if any(executable.on_timeout == "abort" for executable in executables):
            LOG.critical("distgemm ends this process: on_timeout is 'abort'")
            os._exit(1)
        for thread in {call.thread for call in list(watched.pending)}:
            _raise_in(thread, message)
        self.free(watched)

    def _await_others(self, watched: WatchedWorkspace) -> None:
        """Wait until all other ranks know, or the time for their answers is over."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            watched.store.set(f"knows/{watched.workspace.rank}", "")
            keys = [f"knows/{peer}" for peer in watched.workspace.peers]
            while keys and not watched.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)

    def free(self, watched: WatchedWorkspace) -> None:
        """Satisfy all waits until the calls have ended, then fill their results with NaN."""
        flags = watched.workspace.flag_memory()
        deadline = time.monotonic() + FREE_TIMEOUT_S
        while time.monotonic() < deadline:
            with torch.cuda.stream(watched.stream):
                flags.copy_(watched.ones, non_blocking=True)  # by a copy engine: kernels that wait may occupy all SMs
            pending = list(watched.pending)
            if pending and all(call.end.query() for call in pending):  # type: ignore[no-untyped-call]
                break
            if not pending and (watched.read_flags() or [])[1:] == [1] * flags.numel():
                break
            time.sleep(0.05)
        else:
            LOG.critical("the GPU of rank %d did not come free", watched.workspace.rank)
            return
        # A D that was made in inference mode is written in no other mode.
        with torch.inference_mode(), torch.cuda.stream(watched.stream):
            for call in pending:
                if (out := call.out()) is not None:
                    out.fill_(float("nan"))
        watched.pending.clear()  # these calls keep their executables no longer
        watched.under_way = None


def explain_hang(executable: WatchedExecutable, flags: FlagValues | None, seconds: float) -> str:
    """What a stuck replay waits for, for the error.

    Args:
        executable: whose replay it is.
        flags: this rank's; None: they cannot be read.
        seconds: for which nothing has changed.
    """
    plan, rank = executable.plan, executable.rank
    head = f"{plan.schedule} on rank {rank} of {plan.world_size} has not ended within {seconds:g} s"
    if flags is None:
        return f"{head}; its flags cannot be read, the GPU does not answer"
    late = [peer for peer in executable.workspace.peers if not flags.left[peer]]
    if flags.stage is Stage.ENTRY and late:
        return f"{head}: at its start it waits for ranks {late} to leave their last replay"
    waits = [op for op in waits_of(executable.actions) if op.peer != rank]
    missing = sorted((op for op in waits if not flags.plan_flags[op.flag.number]), key=lambda op: op.round)
    if missing:
        first = missing[0]
        more = f" (and {len(missing) - 1} later ones)" if len(missing) > 1 else ""
        return f"{head}: it waits for rank {first.peer} at {first.describe()}{more}"
    late = [peer for peer in executable.workspace.peers if not flags.entered[peer]]
    if late:
        return f"{head}: at its end it waits for ranks {late} to begin this replay"
    return f"{head}: all that it waits for has come, but a kernel or a copy has not ended"


def reason_of_other_rank(store: Any) -> str | None:
    """The message of the first rank that has given up; None: no rank has."""
    try:
        return bytes(store.get("dead")).decode() if store.check(["dead"]) else None
    except RuntimeError:
        return None  # the rank that keeps the store is gone; this rank notices by its own timeout


def store_of(workspace: Workspace) -> Any:
    """A part of the default group's store, the same on all ranks, for this workspace alone.

    A store may outlive its groups, and groups take names that others had, so the key has the workspace's token.
    """
    base = dist.distributed_c10d._get_default_store()
    store = base.clone() if hasattr(base, "clone") else base
    return dist.PrefixStore(f"distgemm/{workspace.token:x}", store)  # type: ignore[attr-defined]


def _raise_in(thread: int, message: str) -> None:
    """Raise ReplayTimeoutError in a thread, at its next Python instruction.

    CPython makes the error of its class, without arguments, so the message is part of a class.
    """
    error = type("ReplayTimeoutError", (ReplayTimeoutError,), {"__str__": lambda self: message})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_WATCHDOG = Watchdog()


def watchdog() -> Watchdog:
    """The watchdog of this process."""
    return _WATCHDOG


def close_workspace(group: dist.ProcessGroup | None = None) -> None:
    """Give the memory of a group's workspace back, once none of its executables is called any more.

    Args:
        group: the group; None: all ranks.

    Raises:
        RuntimeError: during a capture.
    """
    whole = dist.group.WORLD if group is None else group
    if whole is not None:
        close_workspaces(whole)
    watchdog().sweep()  # earlier ones too, which were too small
