"""A thread that notices replays which do not end, says what they wait for, and frees the GPU.

The watchdog looks at events behind calls, and now and then at a copy of the workspace's flags. A replay is stuck when
it has begun, and nothing has changed for the time that its executable allows, or for some seconds where it waits for a
rank whose process has ended. Then the watchdog takes these steps:

1. It reads the flags: which peers have not entered or left, which plan flags are not set. They make the message.
2. It marks the workspace as dead on this rank and, through the group's store, on every rank that answers.
3. It raises a :class:`ReplayTimeoutError` in the thread whose step it is, at the next Python instruction.
4. It fills the slots with NaN. Only then does it abort messages to and from other hosts, and set flags in the place
   of ranks that set none any more, until all calls that were issued have ended. At last it fills D of these calls with
   NaN.

On a workspace with epochs, kernels that begin are mute from step 4 on: they send nothing, and their results are NaN.
Once the slots are NaN, one flag ends all waits.

So no caller gets the result of a stuck call as if it were right, and neither does a kernel that is queued behind the
call: what it reads came in this replay, or is NaN. A rank that comes late finds the workspace dead, and the entry into
its next replay closed. For a graph that the caller captured, the watchdog knows neither the thread nor D: there, only
the next call of an executable raises, or ``raise_if_dead``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.runtime.cuda.processes import has_ended
from distgemm.runtime.cuda.watched import WatchedExecutable, WatchedWorkspace, owed_flags
from distgemm.runtime.cuda.workspace import FlagValues, SharedWorkspace, Values, Workspace, close_workspaces

__all__ = ["ReplayTimeoutError", "Watchdog", "close_workspace", "watchdog"]

POLL_INTERVAL_S = 0.2
"""Time between two looks."""
GONE_AFTER_S = 3.0
"""Time without a change after which a rank that others wait for is looked for."""
ANSWER_TIMEOUT_S = 5.0
"""Time for other ranks to answer that they know, before flags are set in their place."""
RETRY_S = 30.0
"""Time for which looks may fail, such as while the store does not answer, before a workspace is no longer looked at."""
FREE_TIMEOUT_S = 30.0
"""Time for calls to end. In its second half, flags are set in the place of all other ranks."""
FREE_INTERVAL_S = 1e-3
"""Time between two looks at flags that other ranks owe."""

LOG = logging.getLogger("distgemm")


class ReplayTimeoutError(RuntimeError):
    """A replay did not end in time; the message names schedule, rank, iteration, op, tile and peer."""


class Watchdog:
    """The watchdog thread of a process; see :func:`watchdog`.

    Attributes:
        watched: what is watched, by workspace.
    """

    def __init__(self) -> None:
        self.watched: dict[SharedWorkspace, WatchedWorkspace] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, workspace: SharedWorkspace) -> WatchedWorkspace:
        """Watch a workspace.

        Returns:
            The object that notes calls; the same one for the same workspace.
        """
        self.sweep()
        with self._lock:
            known = self.watched.get(workspace)
        made = WatchedWorkspace(workspace, store_of(workspace)) if known is None else known
        with self._lock:
            found = self.watched.setdefault(workspace, made)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(workspace.device,), name="distgemm-watchdog", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)
            return found

    def stop(self) -> None:
        """End the thread, before the interpreter ends and takes away what the thread uses."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def sweep(self) -> None:
        """Stop watching workspaces that no executable can use any more."""
        # The thread does not do this: memory cannot be freed while a capture is under way.
        with self._lock:
            unused = self._take_unused()
        del unused  # without the lock: freeing waits for the GPU, and the thread may have to end what hangs there

    def _take_unused(self) -> list[tuple[SharedWorkspace, WatchedWorkspace]]:
        return [
            (workspace, self.watched.pop(workspace))
            for workspace, watched in list(self.watched.items())
            if workspace.memory is None or (workspace.unused and not watched.pending)
        ]

    def _run(self, device: torch.device) -> None:
        # A thread begins on GPU 0, where its calls would make a context of some hundred MiB.
        torch.cuda.set_device(device)
        # Otherwise this thread's calls of CUDA would spoil a capture in another thread.
        raise_on(
            runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        )
        while not self._stopping.wait(POLL_INTERVAL_S):
            with self._lock:
                self._look_at_all()

    def _look_at_all(self) -> None:
        """Look at each workspace.

        This is a function of its own: once it returns, the thread refers to no workspace, so it never frees one.
        """
        for workspace, watched in self.watched.items():
            over = workspace.dead is not None and watched.failure is None
            if over or workspace.memory is None or watched.failed:
                continue
            try:
                self.look(watched)
                watched.failing_since = None
            except Exception:
                if workspace.memory is None:
                    continue  # closed meanwhile
                now = time.monotonic()
                if watched.failing_since is None:
                    watched.failing_since = now
                    LOG.warning("distgemm's watchdog failed to look at a workspace, and tries again", exc_info=True)
                if workspace.dead is not None or now - watched.failing_since >= RETRY_S:
                    watched.failed = True
                    LOG.exception("distgemm's watchdog failed: it no longer notices hangs on this workspace")

    def look(self, watched: WatchedWorkspace) -> None:
        """Look at one workspace, and end what is stuck."""
        now = time.monotonic()
        workspace = watched.workspace
        if watched.failure is not None:
            self._die(watched, watched.failure, first=True)
            return
        reason = reason_of_other_rank(watched.store)
        if reason is not None:
            self._die(watched, f"another rank has given up: {reason}", first=False)
            return
        watched.reclaim()
        flags, values = read(watched)
        first = next(iter(list(watched.pending)), None)  # a calling thread may take it away meanwhile
        executable = watched.under_way or (None if first is None else first.executable)
        state = flags, watched.ended
        if watched.last_change[0] != state or executable is None:
            watched.last_change, watched.warned = (state, now), False
            return
        unchanged = now - watched.last_change[1]
        ended = set[int]()
        if unchanged > GONE_AFTER_S:
            ended = {rank for rank in workspace.peers if has_ended(workspace.processes[rank])}
        if flags is None and (ended or unchanged > executable.timeout):
            watched.use_own_context()
            flags, values = read(watched)
            watched.last_change = (flags, watched.ended), watched.last_change[1]
            executable = watched.under_way or executable
        if watched.under_way is not None or flags is None:
            message = explain_hang(executable, values, min(executable.timeout, unchanged))
            missing = workspace.peers if values is None else executable.awaited(values)[1]
            if gone := sorted(ended & set(missing)):
                self._die(watched, f"{message}; the processes of ranks {gone} have ended", first=True)
                return
            if unchanged > executable.timeout:
                self._die(watched, message, first=True)
        elif unchanged > executable.timeout and not watched.warned:
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
        workspace.dead, watched.failure = message, None
        LOG.error("%s", message)
        executables = [found for ref in workspace.executables if (found := ref()) is not None]
        if any(executable.on_timeout == "abort" for executable in executables):
            self._await_others(watched)
            LOG.critical("distgemm ends this process: on_timeout is 'abort'")
            os._exit(1)
        # CPython makes the error of its class, without arguments, so the message is part of a class.
        watched.raise_in_threads(type("ReplayTimeoutError", (ReplayTimeoutError,), {"__str__": lambda self: message}))
        silent = self._await_others(watched)
        watched.use_own_context()  # calls that wait may hold all hardware queues of this process's context
        self.free(watched, silent)

    def _await_others(self, watched: WatchedWorkspace) -> set[int]:
        """Wait until all other ranks know, or the time for their answers is over; the ranks that do not answer."""
        workspace = watched.workspace
        silent = set(workspace.peers)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            watched.store.set(f"knows/{workspace.rank}", "")
            while silent:
                silent = {peer for peer in silent if not watched.store.check([f"knows/{peer}"])}
                if time.monotonic() > deadline or all(has_ended(workspace.processes[peer]) for peer in silent):
                    break
                time.sleep(0.05)
        return silent

    def free(self, watched: WatchedWorkspace, silent: set[int]) -> None:
        """Let all calls end that this rank has issued, then fill their results with NaN.

        A rank that answers sets its flags itself, as it frees its own calls. Flags are set in its place only once its
        calls have ended. Otherwise this rank would run ahead of it, and overwrite slots that it still reads.

        Args:
            watched: the workspace.
            silent: the ranks that do not answer.
        """
        workspace = watched.workspace
        rank, everyone = workspace.rank, set(workspace.peers)
        flags, value = workspace.closing()
        if flags:
            watched.write_flags(flags, value)
        watched.poison(rank)
        workspace.abort_messages()
        ranks, flags, value = workspace.ending(silent)
        for peer in ranks:
            watched.poison(peer)
        watched.write_flags(flags, value)
        start, finished = time.monotonic(), set[int]()
        while True:
            _, values = read(watched)
            pending = list(watched.pending)
            idle = values is not None and (values.idle or watched.gave_up)
            if idle and all(call.end.query() for call in pending):  # type: ignore[no-untyped-call]
                break
            seconds = time.monotonic() - start
            if seconds > FREE_TIMEOUT_S:
                LOG.critical("the GPU of rank %d did not come free", rank)
                return
            now = everyone if seconds > FREE_TIMEOUT_S / 2 else silent | finished_ranks(watched.store, everyone)
            if now - finished:
                finished = now
                watched.poison(rank)  # what came from them was for other calls
            if isinstance(values, FlagValues) and watched.under_way is not None:
                assert isinstance(workspace, Workspace)
                owed = owed_flags(workspace.buffers[values.buffer], values, watched.under_way.actions, finished)
                watched.write_flags(owed, 1)
            time.sleep(FREE_INTERVAL_S)
        watched.poison(rank)  # before other ranks read it
        with contextlib.suppress(RuntimeError):
            watched.store.set(f"finished/{rank}", "")
        # A D that was made in inference mode is written in no other mode.
        with torch.inference_mode(), torch.cuda.stream(watched.stream):
            for call in pending:
                if (out := call.out()) is not None:
                    out.fill_(float("nan"))
                    out.record_stream(watched.stream)  # D may be freed now, and its memory used again
        watched.pending.clear()  # these calls keep their executables no longer
        watched.under_way = None


def read(watched: WatchedWorkspace) -> tuple[bytes | None, Values | None]:
    """The flags with all else that is watched, and what the flags say. Both are None where they cannot be read.

    It notes the executable whose replay the flags name, also for a graph that the caller captured.
    """
    flags = watched.read_flags()
    if flags is None:
        return None, None
    values = watched.workspace.values(torch.frombuffer(bytearray(flags), dtype=torch.int32))
    watched.under_way = watched.executable_of(values)
    return flags, values


def explain_hang(executable: WatchedExecutable, flags: Values | None, seconds: float) -> str:
    """What a stuck replay waits for, for the error.

    Args:
        executable: whose replay it is.
        flags: this rank's; None: they cannot be read.
        seconds: for which nothing has changed.
    """
    head = f"{executable.plan.schedule} on rank {executable.rank} of {executable.plan.world_size}"
    head = f"{head} has not ended within {seconds:.3g} s"
    if flags is None:
        return f"{head}; its flags cannot be read, the GPU does not answer"
    return f"{head}: {executable.awaited(flags)[0]}"


def reason_of_other_rank(store: Any) -> str | None:
    """The message of the first rank that has given up; None: no rank has."""
    try:
        return bytes(store.get("dead")).decode() if store.check(["dead"]) else None
    except RuntimeError:
        return None  # the rank that keeps the store is gone; this rank notices by its own timeout


def finished_ranks(store: Any, ranks: set[int]) -> set[int]:
    """The ranks whose calls have all ended, after the workspace has died."""
    try:
        return {rank for rank in ranks if store.check([f"finished/{rank}"])}
    except RuntimeError:
        return set()  # as above: their time ends


def store_of(workspace: SharedWorkspace) -> Any:
    """A part of the default group's store, the same on all ranks, for this workspace alone.

    A store may outlive its groups, and groups take names that others had, so the key has the workspace's token.
    """
    base = dist.distributed_c10d._get_default_store()
    store = base.clone() if hasattr(base, "clone") else base
    return dist.PrefixStore(f"distgemm/{workspace.token:x}", store)  # type: ignore[attr-defined]


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
