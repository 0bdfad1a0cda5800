"""The order of calls on a device, without a GPU: which events streams wait for and record."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from distgemm.runtime.cuda import order
from distgemm.runtime.cuda.order import MAX_CAPTURES, CallOrder, call_order
from tests.unit.stream_model import Graph, Streams


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of CUDA, in order. Streams 10 and up are captured, streams of one ten by one capture."""
    found: list[Any] = []
    runtime = order.runtime
    events = itertools.count(100)
    done = runtime.cudaError_t.cudaSuccess

    def note(name: str) -> Any:
        return lambda *arguments: found.append((name, *arguments)) or (done,)

    calls = {name: note(name) for name in ("cudaStreamWaitEvent", "cudaEventRecord", "cudaEventRecordWithFlags")}
    calls["cudaEventDestroy"] = note("cudaEventDestroy")
    calls["cudaEventCreateWithFlags"] = lambda flags: note("create")(event := next(events)) + (event,)
    active = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    calls["cudaStreamGetCaptureInfo"] = lambda stream: (done, active, stream // 10)
    for name, value in calls.items():
        monkeypatch.setattr(runtime, name, value)
    without_gpu(monkeypatch)
    return found


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


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


def test_events_of_captures_do_not_add_up(noted: list[Any]) -> None:
    made = CallOrder(torch.device("cpu"))
    for stream in [*range(10, 10 + 30 * MAX_CAPTURES, 10), *range(10, 10 + 30 * MAX_CAPTURES)]:
        call(made, stream)
    created, destroyed = (
        [event for name, event, *_ in noted if name == each] for each in ("create", "cudaEventDestroy")
    )
    assert len(set(destroyed)) == len(destroyed) and len(created) - len(destroyed) == 1 + MAX_CAPTURES


def test_a_device_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_ORDERS", {})
    monkeypatch.setattr(order, "CallOrder", lambda device: SimpleNamespace(device=device))
    first, again, other = (call_order(torch.device("cuda", index)) for index in (0, 0, 1))
    assert first is again is not other


class Program:
    """Calls in a random order: eager ones on three streams, and replays of graphs, in which two streams make calls.

    Attributes:
        calls: the nodes of each call, in the order in which the calls were issued.
    """

    def __init__(self, of: type[CallOrder], seed: int) -> None:
        self.rng, self.streams, self.calls = random.Random(seed), Streams(), list[list[int]]()
        self.own = 0  # work that is no part of a call
        with patch.object(order, "runtime", self.streams_as_runtime()):
            self.order = of(torch.device("cpu"))
            graphs: list[tuple[Graph, int]] = []
            for _ in range(12):
                if self.rng.random() < 0.3:
                    graphs += self._capture(100 + 2 * len(graphs))
                elif graphs and self.rng.random() < 0.6:
                    graph, calls = self.rng.choice(graphs)
                    self._note(calls, lambda stream, graph=graph: self.streams.launch(graph, stream))
                else:
                    self._note(1, lambda stream: self._call(stream, 0))

    def streams_as_runtime(self) -> Any:
        """The runtime's constants, and functions of the model."""
        return SimpleNamespace(**{**vars(order.runtime), **self.streams.functions()})

    def overlaps(self) -> list[int]:
        """The calls that need not have ended before the next one begins."""
        return [
            number
            for number, (nodes, following) in enumerate(pairwise(self.calls))
            if not all(self.streams.is_before(node, other) for node in nodes for other in following)
        ]

    def _note(self, calls: int, issue: Any) -> None:
        issued = len(self.streams.work)
        stream = self.rng.randrange(3)
        self._work(stream)
        issue(stream)
        found = self.streams.work[issued:]
        self.calls += [[node for label, node in found if label == call] for call in range(calls)]

    def _capture(self, first: int) -> list[tuple[Graph, int]]:
        """One or two graphs at the same time, and how many calls they have."""
        streams = [first, first + 2][: self.rng.randint(1, 2)]
        graphs, calls = {stream: self.streams.begin_capture(stream) for stream in streams}, dict.fromkeys(streams, 0)
        for stream in streams:
            self._work(stream)
            self.streams.join(stream + 1, stream)
        for stream in self.rng.choices(streams, k=self.rng.randint(1, 6)):
            on = stream + self.rng.randrange(2)
            self._work(on)
            self._call(on, calls[stream])
            calls[stream] += 1
        for stream, graph in graphs.items():
            self.streams.join(stream, stream + 1)
            self.streams.end_capture(graph)
        return [(graph, calls[stream]) for stream, graph in graphs.items()]

    def _call(self, stream: int, label: int) -> None:
        captured = stream >= 100
        (self.order.begin_captured if captured else self.order.begin)(stream)
        for _ in range(self.rng.randint(1, 3)):
            self.streams.compute(stream, label)
        (self.order.end_captured if captured else self.order.end)(stream)

    def _work(self, stream: int) -> None:
        if self.rng.random() < 0.5:
            self.streams.compute(stream, "own")


class Unawaited(CallOrder):
    """Calls that are no part of a graph wait only for calls on other streams that were no part of one either."""

    def begin(self, stream: int) -> None:
        self._in_graphs = False
        super().begin(stream)


class Unrecorded(CallOrder):
    """Replays do not record their ends."""

    def _record_captured(self, stream: int) -> None: ...


class Unordered(CallOrder):
    """Calls of one graph do not wait for each other."""

    def begin_captured(self, stream: int) -> None:
        self._captured.clear()
        super().begin_captured(stream)


PROGRAMS = 300


def test_each_call_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    programs = [Program(CallOrder, seed) for seed in range(PROGRAMS)]
    assert [program.overlaps() for program in programs] == [[]] * PROGRAMS
    assert sum(len(program.calls) for program in programs) > 8 * PROGRAMS


@pytest.mark.parametrize("broken", [Unawaited, Unrecorded, Unordered])
def test_a_broken_order_is_found(monkeypatch: pytest.MonkeyPatch, broken: type[CallOrder]) -> None:
    without_gpu(monkeypatch)
    assert sum(bool(Program(broken, seed).overlaps()) for seed in range(PROGRAMS)) > PROGRAMS // 10
