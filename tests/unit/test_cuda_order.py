"""The order of calls on a device, without a GPU: which events streams wait for and record."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distgemm.runtime.cuda import order
from distgemm.runtime.cuda.order import CallOrder, call_order


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of CUDA, in order. Streams 10 and up are captured, streams of one ten by one capture."""
    found: list[Any] = []
    runtime = order.runtime
    events = iter(range(100, 200))
    done = runtime.cudaError_t.cudaSuccess

    def note(name: str) -> Any:
        return lambda *arguments: found.append((name, *arguments)) or (done,)

    calls = {name: note(name) for name in ("cudaStreamWaitEvent", "cudaEventRecord", "cudaEventRecordWithFlags")}
    calls["cudaEventDestroy"] = lambda event: (done,)
    calls["cudaEventCreateWithFlags"] = lambda flags: (done, next(events))
    active = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    calls["cudaStreamGetCaptureInfo"] = lambda stream: (done, active, stream // 10)
    for name, value in calls.items():
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return found


def call(made: CallOrder, stream: int) -> None:
    """A call on a stream."""
    captured = stream >= 10
    (made.begin_captured if captured else made.begin)(stream)
    (made.end_captured if captured else made.end)(stream)


def test_a_call_waits_for_the_last_one_where_that_is_on_another_stream(noted: list[Any]) -> None:
    made = CallOrder(torch.device("cpu"))
    for stream in (1, 1, 2, 2, 1):
        call(made, stream)
    wait, record = "cudaStreamWaitEvent", "cudaEventRecord"
    assert [(name, stream) for name, stream, *_ in noted if name == wait] == [(wait, 1), (wait, 2), (wait, 1)]
    assert [event for name, event, *_ in noted if name == record] == [100] * 5


def test_replays_of_captured_calls_keep_the_order(noted: list[Any]) -> None:
    made = CallOrder(torch.device("cpu"))
    call(made, 1)
    noted.clear()
    call(made, 10)
    # The nodes of the graph wait for the device's event, and record it: the flag of external events is 1.
    assert noted[0] == ("cudaStreamWaitEvent", 10, 100, 1)
    assert ("cudaEventRecordWithFlags", 100, 10, 1) in noted
    noted.clear()
    call(made, 11)  # of the same capture: behind the first one, within the graph
    assert noted[0] == ("cudaStreamWaitEvent", 11, 101, 0)
    noted.clear()
    call(made, 20)  # of another capture
    assert noted[0] == ("cudaStreamWaitEvent", 20, 100, 1)
    noted.clear()
    call(made, 1)  # the stream of the last call, but replays may have recorded the event since
    assert noted[0] == ("cudaStreamWaitEvent", 1, 100, 0)


def test_a_device_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_ORDERS", {})
    monkeypatch.setattr(order, "CallOrder", lambda device: SimpleNamespace(device=device))
    first, again, other = (call_order(torch.device("cuda", index)) for index in (0, 0, 1))
    assert first is again is not other
