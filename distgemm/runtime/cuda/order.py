"""The order of calls on a device: one after the other, whatever executables and streams they are on.

Two calls at the same time might never end: kernels of one call may hold the SMs that the other needs before it can
send. On one workspace they would also use the same slots. So each call waits for the end of the call before it, through
an event of the device. Ranks issue the calls of all their groups in one order, so this order is the same on all ranks.

A graph that the caller captures has nodes that wait for this event and record it, so its replays keep the order, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on

__all__ = ["CallOrder", "call_order"]

MAX_CAPTURES = 16
"""Captures whose last call is known: nobody says when a capture ends. Few are under way at the same time."""


class CallOrder:
    """The order of the calls on one device.

    Args:
        device: the device.

    Attributes:
        occupied: whether a gather is under way, between whose chunks the caller's code runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock, self._index = threading.RLock(), device.index or 0
        self.occupied = False
        with torch.cuda.device(self._index):
            torch.cuda.current_stream()  # makes the context current
            (self._ended,) = raise_on(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))
        self._stream: int | None = None  # of the last call that was no part of a capture
        self._in_graphs = False  # whether replays of captured graphs record the event, on streams nobody knows
        self._captured: dict[int, _LastCall] = {}  # by the id of a capture

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """A block that issues a call: no other thread does so meanwhile, and the device is the current one.

        Raises:
            RuntimeError: while a gather is under way: its end would come behind the end of this call.
        """
        with self._lock, torch.cuda.device(self._index):  # stream 0 is that of the current device
            if self.occupied:
                raise RuntimeError("a gather on this GPU has not ended: make this call behind its with block")
            yield

    def begin(self, stream: int) -> None:
        """Let a stream wait for the end of the last call."""
        if self._in_graphs or stream != self._stream:
            raise_on(runtime.cudaStreamWaitEvent(stream, self._ended, runtime.cudaEventWaitDefault))

    def end(self, stream: int) -> None:
        """Note that a call ends with what is on the stream now."""
        raise_on(runtime.cudaEventRecord(self._ended, stream))
        self._stream = stream

    def begin_captured(self, stream: int) -> None:
        """:meth:`begin` for a stream that is captured: each replay of the graph waits for the last call before it."""
        number, _, before = _capture(stream)
        last = self._captured.get(number)
        if last is None:
            raise_on(runtime.cudaStreamWaitEvent(stream, self._ended, runtime.cudaEventWaitExternal))
        elif stream != last.stream and (behind := [end for end in last.ends if end not in before]):
            add = _with_edges("cudaStreamUpdateCaptureDependencies")
            raise_on(add(stream, behind, None, len(behind), 0))

    def end_captured(self, stream: int) -> None:
        """:meth:`end` for a stream that is captured: each replay of the graph records the event.

        A graph has one node that does so, behind the last call. No other node waits for it.
        """
        number, graph, ends = _capture(stream)
        last = self._captured.pop(number, None)
        if last is None:
            (record,) = raise_on(runtime.cudaGraphAddEventRecordNode(graph, ends, len(ends), self._ended))
        else:  # its ends are behind those of the last call
            record = last.record
            for name, of in (("cudaGraphRemoveDependencies", last.ends), ("cudaGraphAddDependencies", ends)):
                raise_on(_with_edges(name)(graph, of, [record] * len(of), None, len(of)))
        self._captured[number] = _LastCall(stream, record, ends)
        if len(self._captured) > MAX_CAPTURES:
            del self._captured[next(iter(self._captured))]
        self._in_graphs = True


class _LastCall(NamedTuple):
    """Of a capture: the call's stream, the node that records its end, and the nodes that it ends with."""

    stream: int
    record: Any
    ends: list[Any]


def _capture(stream: int) -> tuple[int, Any, list[Any]]:
    """The capture of a stream: its id, its graph, and the nodes behind which the stream's next node comes."""
    status, number, graph, ends, *_ = raise_on(runtime.cudaStreamGetCaptureInfo(stream))
    assert status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    return int(number), graph, list(ends)


def _with_edges(name: str) -> Any:
    """The function of the runtime that takes data of edges. Before CUDA 13 it has _v2 in its name."""
    return getattr(runtime, f"{name}_v2", None) or getattr(runtime, name)


_ORDERS: dict[int, CallOrder] = {}


def call_order(device: torch.device) -> CallOrder:
    """The order of the calls on a device."""
    index = device.index or 0
    found = _ORDERS.get(index)
    if found is None:
        found = _ORDERS[index] = CallOrder(device)
    return found
