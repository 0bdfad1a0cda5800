"""A thread that notices replays which do not end, says what they wait for, and frees the GPU.

It watches from the side: events behind calls, and a copy of the workspace's words now and then. A replay is stuck
when it has begun, and nothing has moved for the time that its executable allows. What follows, in this order:

1. the words are read: which peers have not entered or left, which flags have not come. From there the message;
2. the workspace is dead on this rank, and through the group's store on every rank that answers;
3. the thread that made the calls has a :class:`ReplayTimeoutError` raised in it, at the next Python instruction;
4. only then are waits satisfied, so that the GPU comes free, and D of every unfinished call is filled with NaN.

So no result of a stuck call reaches a caller as if it were one. A graph that the caller captured is the caller's:
there, only the next call of an executable raises, or ``raise_if_dead``.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import runtime

from distgemm.gemm.streams import new_stream
from distgemm.runtime.cuda.lowering.actions import waits_of
from distgemm.runtime.cuda.memops import raise_on
from distgemm.runtime.cuda.workspace import ENTRY, FlagOps, Workspace

if TYPE_CHECKING:
    from distgemm.runtime.cuda.executable import CudaExecutable

__all__ = ["ReplayTimeoutError", "Watchdog", "watchdog"]

INTERVAL = 0.2
"""Seconds between two looks."""
GRACE = 5.0
"""Seconds that other ranks have to answer that they know, before waits are satisfied here."""
FREEING = 30.0
"""Seconds that a freed GPU has to come to an end."""

LOG = logging.getLogger("distgemm")


class ReplayTimeoutError(RuntimeError):
    """A replay did not end in time; the message names schedule, rank, iteration, op, tile and peer."""


class _Pending(NamedTuple):
    """A call that has not been seen to end."""

    executable: CudaExecutable
    end: torch.cuda.Event
    out: weakref.ref[torch.Tensor]
    thread: int


class _Watched:
    """What is known of a workspace."""

    @torch.inference_mode(False)  # what is made here is written outside of it, too
    def __init__(self, workspace: Workspace, store: Any) -> None:
        self.workspace, self.store = workspace, store
        self.pending: deque[_Pending] = deque()
        self.ended = 0  # calls that have been seen to end
        self.free: deque[torch.cuda.Event] = deque()  # theirs
        self.lock = threading.Lock()  # between those who take calls out of ``pending``
        self.streams: dict[int, torch.cuda.Stream] = {}  # by their handles, that torch takes microseconds to wrap
        self.failed = self.warned = False
        self.last: tuple[Any, float] = None, 0.0  # words and ended calls, and since when they have not changed
        self.under_way: CudaExecutable | None = None  # whose replay the words spoke of when they were last read
        self.stream = new_stream(workspace.device)
        self.copy = torch.empty(1 + workspace.words().numel(), dtype=torch.int32, pin_memory=True)
        self.ones = torch.ones(workspace.words().numel(), dtype=torch.int32).pin_memory()

    def issued(self, executable: CudaExecutable, out: weakref.ref[torch.Tensor]) -> None:
        """A call was issued on the current stream."""
        if not self.free:
            self.reclaim()
        end = self.free.popleft() if self.free else torch.cuda.Event()  # type: ignore[no-untyped-call]
        handle = torch._C._cuda_getCurrentRawStream(executable.device.index or 0)
        stream = self.streams.get(handle)
        if stream is None:
            stream = self.streams[handle] = torch.cuda.current_stream(executable.device)
        end.record(stream)
        self.pending.append(_Pending(executable, end, out, threading.get_ident()))
        executable.raise_if_dead()  # it may have died meanwhile: then nobody else done_flags this call

    def reclaim(self) -> None:
        """Calls that have ended need not be watched any more; their events serve again."""
        with self.lock:
            while self.pending and self.pending[0].end.query():  # type: ignore[no-untyped-call]
                self.free.append(self.pending.popleft().end)
                self.ended += 1

    def words(self) -> list[int] | None:
        """The count of replays and the words now; None where even a copy does not end."""
        with torch.cuda.stream(self.stream):
            self.copy[:1].copy_(self.workspace.replays, non_blocking=True)
            self.copy[1:].copy_(self.workspace.words(), non_blocking=True)
            done = self.stream.record_event()
        deadline = time.monotonic() + 2.0
        while not done.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        return list(self.copy.tolist())


class Watchdog:
    """The thread of this process; see :func:`watchdog`."""

    def __init__(self) -> None:
        self._watched: dict[Workspace, _Watched] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, workspace: Workspace) -> _Watched:
        """Watch a workspace, and return what is to be told of calls. A collective call: all ranks make it in the same
        order."""
        with self._lock:
            self._sweep()
            if workspace in self._watched:
                return self._watched[workspace]
            found = self._watched[workspace] = _Watched(workspace, _store(workspace))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distgemm-watchdog", daemon=True)
                self._thread.start()
            return found

    def sweep(self) -> None:
        """Let go of workspaces that nobody can use any more."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        # Not by the thread: memory cannot be freed while a capture is under way.
        for workspace, watched in list(self._watched.items()):
            if workspace.memory is None or (workspace.unused and not watched.pending):
                del self._watched[workspace]

    def _run(self) -> None:
        # Otherwise what this thread asks of CUDA would spoil a capture in another one.
        raise_on(
            runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        )
        while True:
            time.sleep(INTERVAL)
            with self._lock:
                self._look_at_all()

    def _look_at_all(self) -> None:
        """A look at each workspace. Once it is over, and the lock free, the thread holds on to none of them: what
        others let go of is not freed here."""
        for workspace, watched in self._watched.items():
            if workspace.dead is not None or workspace.memory is None or watched.failed:
                continue
            try:
                self._look(watched)
            except Exception:
                if workspace.memory is None:
                    continue  # closed meanwhile
                watched.failed = True
                LOG.exception("distgemm's watchdog failed: hangs of executables on this workspace go unnoticed")

    def _look(self, watched: _Watched) -> None:
        now = time.monotonic()
        workspace = watched.workspace
        told = _told(watched.store)
        if told is not None:
            self._die(watched, f"another rank has given up: {told}", first=False)
            return
        watched.reclaim()
        words = watched.words()
        read = None if words is None else workspace.read(torch.tensor(words[1:]))
        if read is not None:  # also of a graph that the caller captured
            watched.under_way = workspace.executables[read.executable - 1]() if read.stage else None
        first = next(iter(list(watched.pending)), None)  # who calls may take it away meanwhile
        executable = watched.under_way or (None if first is None else first.executable)
        state = words, watched.ended
        if watched.last[0] != state or executable is None:
            watched.last, watched.warned = (state, now), False
            return
        if now - watched.last[1] <= executable.timeout:
            return
        if watched.under_way is not None:
            self._die(watched, _explain(executable, read, executable.timeout), first=True)
        elif not watched.warned:
            watched.warned = True
            LOG.warning(
                "a call of %s on rank %d has not ended within %g s. It waits for no other rank: something before it on "
                "its stream has not ended, or its last kernel has not",
                executable.plan.schedule,
                workspace.rank,
                executable.timeout,
            )

    def _die(self, watched: _Watched, message: str, first: bool) -> None:
        workspace = watched.workspace
        if first:
            with contextlib.suppress(RuntimeError):  # the store dies with the rank that keeps it
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
        self._free(watched)

    def _await_others(self, watched: _Watched) -> None:
        """Until all other ranks know, or some do not answer."""
        deadline = time.monotonic() + GRACE
        with contextlib.suppress(RuntimeError):
            watched.store.set(f"knows/{watched.workspace.rank}", "")
            keys = [f"knows/{peer}" for peer in watched.workspace.peers]
            while keys and not watched.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _free(self, watched: _Watched) -> None:
        """Satisfy all waits until the calls have ended, then see to it that their results are none."""
        words = watched.workspace.words()
        deadline = time.monotonic() + FREEING
        while time.monotonic() < deadline:
            with torch.cuda.stream(watched.stream):
                words.copy_(watched.ones, non_blocking=True)  # by a copy engine: kernels that wait may occupy all SMs
            pending = list(watched.pending)
            if pending and all(call.end.query() for call in pending):  # type: ignore[no-untyped-call]
                break
            if not pending and (watched.words() or [])[1:] == [1] * words.numel():
                break
            time.sleep(0.05)
        else:
            LOG.critical("the GPU of rank %d did not come free", watched.workspace.rank)
            return
        # D may have been made in inference mode, and is written in no other.
        with torch.inference_mode(), torch.cuda.stream(watched.stream):
            for call in pending:
                if (out := call.out()) is not None:
                    out.fill_(float("nan"))
        watched.pending.clear()  # they are told, and keep their executables no longer
        watched.under_way = None


def _explain(executable: CudaExecutable, words: FlagOps | None, seconds: float) -> str:
    plan, rank = executable.plan, executable.rank
    head = f"{plan.schedule} on rank {rank} of {plan.world_size} has not ended within {seconds:g} s"
    if words is None:
        return f"{head}; its words cannot be read, the GPU answers nothing"
    late = [peer for peer in executable.workspace.peers if not words.left[peer]]
    if words.stage == ENTRY and late:
        return f"{head}: at its start it waits for ranks {late} to leave their last replay"
    waits = [op for op in waits_of(executable.actions) if op.peer != rank]
    missing = sorted((op for op in waits if not words.flags[op.flag.number]), key=lambda op: op.round)
    if missing:
        first = missing[0]
        more = f" (and {len(missing) - 1} later ones)" if len(missing) > 1 else ""
        return f"{head}: it waits for rank {first.peer} at {first.describe()}{more}"
    late = [peer for peer in executable.workspace.peers if not words.entered[peer]]
    if late:
        return f"{head}: at its end it waits for ranks {late} to begin this replay"
    return f"{head}: all that it waits for has come, but a kernel or a copy has not ended"


def _told(store: Any) -> str | None:
    """What the first rank that gave up said."""
    try:
        return bytes(store.get("dead")).decode() if store.check(["dead"]) else None
    except RuntimeError:
        return None  # its keeper is gone: what comes of it is noticed by the time it takes


def _store(workspace: Workspace) -> Any:
    """A part of the default group's store, the same on all ranks, and of this workspace alone: a store may outlive its
    groups, and groups take names that others had."""
    base = dist.distributed_c10d._get_default_store()
    store = base.clone() if hasattr(base, "clone") else base
    return dist.PrefixStore(f"distgemm/{workspace.token:x}", store)  # type: ignore[attr-defined]


def _raise_in(thread: int, message: str) -> None:
    """Raise in a thread, at its next Python instruction; a message travels as the class's own."""
    error = type("ReplayTimeoutError", (ReplayTimeoutError,), {"__str__": lambda self: message})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_WATCHDOG = Watchdog()


def watchdog() -> Watchdog:
    """The watchdog of this process."""
    return _WATCHDOG
