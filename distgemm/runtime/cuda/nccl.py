"""Messages between hosts by NCCL: grouped sends and receives on a communicator of distgemm's own.

NCCL's functions are called directly, in the library that torch has loaded. torch's ProcessGroupNCCL would put messages
on a stream of its own, would keep a Work for each, and its watchdog ends the process if a peer dies. Here the kernels
of NCCL stand on the stream on which an exchange stands, so a capture takes them as any other launch, and the watchdog
of distgemm decides what follows an error.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.launches import MovableLaunch
from distgemm.runtime.checks import exchange_reports, raise_failures

__all__ = ["Communicator", "ExchangeLaunch", "Message", "library"]

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
"""Size of an ncclUniqueId."""
NAN_BYTE = 0xFF
"""A float of any type whose bytes are all this one is NaN."""
UINT8 = 1
"""ncclUint8: messages are bytes."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
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
    """Call a function of NCCL. Raises RuntimeError if it returns an error."""
    nccl = library()
    error = getattr(nccl, name)(*arguments)
    if error:
        raise RuntimeError(f"NCCL: {name}: {nccl.ncclGetErrorString(error).decode()} ({error})")


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

    Raises:
        RuntimeError: on all ranks where one finds no NCCL, and for errors of NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
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
        with torch.cuda.device(device):
            first = _UniqueId.from_buffer_copy(reports[0].payload)
            _call("ncclCommInitRank", ctypes.byref(self._handle), size, first, rank)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Put messages on a stream, all at once. Those to or from one peer keep their order.

        Raises:
            RuntimeError: for errors of NCCL, and once the communicator is aborted.
        """
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
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            _call("ncclCommAbort", handle)


class ExchangeLaunch(MovableLaunch):
    """Messages to and from other hosts, in memory that never moves.

    What is received becomes NaN first: so a message that is aborted is right or NaN in each element.

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
        for _, memory in self.receives:
            raise_on(runtime.cudaMemsetAsync(memory.data_ptr(), NAN_BYTE, memory.nbytes, stream))
        self.exchange(self.sends, self.receives, stream)
