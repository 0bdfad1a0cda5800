"""Messages between hosts by NCCL: grouped sends and receives on a communicator of distgemm's own.

NCCL's functions are called directly, in the library that torch has loaded. torch's ProcessGroupNCCL would put messages
on a stream of its own, would keep a Work for each, and its watchdog ends the process if a peer dies. Here the kernels
of NCCL stand on the stream on which an exchange stands, so a capture takes them as any other launch, and the watchdog
of distgemm decides what follows an error.

The communicator is a non-blocking one: no function of NCCL waits for another rank. So a rank that waits for the others
notices when one of them has ended, says which ones have not come, and another thread can abort what it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distgemm.gemm.launches import MovableLaunch
from distgemm.runtime.checks import exchange_reports, group_timeout, raise_failures
from distgemm.runtime.cuda.processes import ProcessId, has_ended

__all__ = ["Communicator", "ExchangeLaunch", "Message", "library"]

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
"""Size of an ncclUniqueId."""
UINT8 = 1
"""ncclUint8: messages are bytes."""
SUCCESS, IN_PROGRESS = 0, 7
"""Of ncclResult_t."""
CONFIG_MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21400
"""What an ncclConfig_t begins with. NCCL 2.14 had the first one; later versions give further fields their defaults."""
FIRST_POLL_S, POLL_S = 20e-6, 10e-3
"""Times between two looks at what NCCL does: the first one, and the longest."""
LOOK_S = 1.0
"""Time between two looks at the other ranks."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT, ctypes.POINTER(_Config)),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
}
"""The functions that are called, by name, with the types of their arguments."""


@functools.cache
def library() -> Any:
    """NCCL's library, the one that torch has loaded.

    Raises:
        RuntimeError: if there is none.
    """
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"messages across hosts go by NCCL, and {LIBRARY} cannot be loaded: {error}") from None
    for name, types in _FUNCTIONS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, _INT
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = (_INT,), ctypes.c_char_p
    return found


def _call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL. It may not have ended. Raises RuntimeError if it returns an error."""
    _raise_on(getattr(library(), name)(*arguments), name)


def _raise_on(result: int, name: str) -> None:
    if result not in (SUCCESS, IN_PROGRESS):
        raise RuntimeError(f"NCCL: {name}: {library().ncclGetErrorString(result).decode()} ({result})")


class Message(NamedTuple):
    """Bytes that are sent or received.

    Attributes:
        peer: the rank to which, or from which, they go.
        memory: contiguous memory of this rank.
    """

    peer: int
    memory: torch.Tensor


class Communicator:
    """A communicator of all ranks of a group, for messages only.

    Args:
        group: its ranks all make the communicator, in one order.
        device: this rank's GPU.
        processes: by rank.
        ranks_per_host: number of ranks that share memory, for errors.

    Raises:
        RuntimeError: on all ranks where one finds no NCCL, or does not come within the timeout of the group, or has
            ended; and for errors of NCCL.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, processes: Sequence[ProcessId], ranks_per_host: int
    ) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own, problem = _UniqueId(), None
        try:
            _call("ncclGetUniqueId", ctypes.byref(own))
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        reports = exchange_reports(bytes(own), problem, group, device)
        raise_failures(reports, problem, RuntimeError, "cannot send messages by NCCL")
        self._lock = threading.Lock()
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        self._aborted = False
        self._ranks = _Ranks(reports[0].payload, rank, processes, ranks_per_host, group_timeout(group, device))
        config = _Config(ctypes.sizeof(_Config), CONFIG_MAGIC, CONFIG_VERSION, 0)
        name, first = "ncclCommInitRankConfig", _UniqueId.from_buffer_copy(reports[0].payload)
        try:
            self._ranks.come()
            with torch.cuda.device(device):
                _call(name, ctypes.byref(self._handle), size, first, rank, ctypes.byref(config))
                self._await_end(name)
        except BaseException:
            threading.Thread(target=self.abort, name="distgemm-abort", daemon=True).start()
            raise

    def _await_end(self, name: str) -> None:
        """Wait until NCCL has done on the host what was asked of it. It needs the other ranks for connections only.

        Raises:
            RuntimeError: for an error of NCCL, once another thread aborts, and where a rank does not come.
        """
        state, wait = ctypes.c_int(), FIRST_POLL_S
        start = looked = time.monotonic()
        while True:
            if self._aborted:
                raise RuntimeError("the communicator for messages across hosts was aborted")
            _call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
            _raise_on(state.value, name)
            if state.value == SUCCESS:
                return
            if (now := time.monotonic()) > looked + LOOK_S:
                looked = now
                self._ranks.raise_if_lost(name, now - start)
            time.sleep(wait)
            wait = min(2 * wait, POLL_S)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Put messages on a stream, all at once. Those to or from one peer keep their order.

        Raises:
            RuntimeError: for errors of NCCL, and once the communicator is aborted.
        """
        with self._lock:
            handle = self._handle
            if handle is None:
                raise RuntimeError("the communicator for messages across hosts was aborted")
            _call("ncclGroupStart")
            try:
                for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
                    for peer, memory in messages:
                        size = memory.numel() * memory.element_size()
                        _call(name, memory.data_ptr(), size, UINT8, peer, handle, stream)
            finally:
                _call("ncclGroupEnd")
            self._await_end("ncclGroupEnd")

    def connect(self, sends_to: Sequence[int], receives_from: Sequence[int], device: torch.device) -> None:
        """Send and receive a byte to and from peers, so that NCCL has connected them before a capture.

        All ranks call it, each with its own peers.
        """
        with torch.cuda.device(device):
            memory = torch.zeros(2, dtype=torch.uint8, device=device)
            stream = torch.cuda.current_stream(device)
            sends = [Message(peer, memory[:1]) for peer in sends_to]
            receives = [Message(peer, memory[1:]) for peer in receives_from]
            self.exchange(sends, receives, stream.cuda_stream)
            stream.synchronize()

    def abort(self) -> None:
        """End all messages, also those that a peer never sends; what was received is not defined. It may block."""
        self._aborted = True  # an exchange that waits gives the lock back
        with self._lock:
            handle, self._handle = self._handle, None
        if handle:  # a null pointer: NCCL has made none
            _call("ncclCommAbort", handle)


class _Ranks:
    """Which ranks have come to make a communicator, in the store of torch.distributed.

    Args:
        token: bytes that all ranks have, and no other communicator had.
        rank: this rank.
        processes: by rank.
        ranks_per_host: number of ranks that share memory.
        timeout: seconds for all ranks to come.
    """

    def __init__(
        self, token: bytes, rank: int, processes: Sequence[ProcessId], ranks_per_host: int, timeout: float
    ) -> None:
        name = f"distgemm/nccl/{hashlib.sha256(token).hexdigest()[:16]}"
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        self._rank, self._processes, self._timeout = rank, processes, timeout
        self._of_host, self._every = ranks_per_host, range(len(processes))

    def come(self) -> None:
        """Note that this rank has come."""
        self._store.set(f"come/{self._rank}", "")

    def raise_if_lost(self, name: str, seconds: float) -> None:
        """Raise RuntimeError if a rank of this machine has ended, another rank has raised this, or the time is over.

        Args:
            name: the function of NCCL that has not ended.
            seconds: since when.
        """
        text, late = "", list[int]()
        with contextlib.suppress(RuntimeError):  # the store ends with the rank that keeps it
            text = bytes(self._store.get("lost")).decode() if self._store.check(["lost"]) else ""
            late = [rank for rank in self._every if not self._store.check([f"come/{rank}"])]
        if text:
            raise RuntimeError(text)
        ended = [rank for rank in self._every if has_ended(self._processes[rank])]
        if not ended and seconds <= self._timeout:
            return
        whom = [f"{self._named(late)} did not come"] * bool(late) + [f"{self._named(ended)} has ended"] * bool(ended)
        text = f"{name} of NCCL has not ended after {seconds:.3g} s: {'; '.join(whom) or 'all ranks have come'}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("lost", "", text)
        raise RuntimeError(text)

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} of host {rank // self._of_host}" for rank in ranks)


class ExchangeLaunch(MovableLaunch):
    """Messages to and from other hosts, in memory that never moves.

    Args:
        exchange: the function of a :class:`Communicator` that puts them on a stream.
        sends: what this rank sends.
        receives: what it receives.
    """

    def __init__(
        self,
        exchange: Callable[[Sequence[Message], Sequence[Message], int], None],
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        self.exchange, self.sends, self.receives = exchange, sends, receives

    def __call__(self, stream: int | None = None) -> None:
        assert stream is not None
        self.exchange(self.sends, self.receives, stream)
