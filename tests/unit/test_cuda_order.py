"""The order of calls on a device, without a GPU: which events streams wait for and record."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distgemm.runtime.cuda import order
from distgemm.runtime.cuda.order import MAX_CAPTURES, CallOrder, call_order
from tests.unit.stream_model import Graph, Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return streams_of(monkeypatch)


def streams_of(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """A model that stands for the CUDA runtime."""
    made = Streams()
    monkeypatch.setattr(order, "runtime", SimpleNamespace(**{**vars(order.runtime), **made.functions()}))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return made


def call(made: CallOrder, stream: int) -> None:
    """A call on a stream; those from 10 on are captured."""
    captured = stream >= 10
    (made.begin_captured if captured else made.begin)(stream)
    (made.end_captured if captured else made.end)(stream)


def test_a_call_waits_for_the_last_one_where_that_is_on_another_stream(streams: Streams) -> None:
    made = CallOrder(torch.device("cpu"))
    for stream in (1, 1, 2, 2, 1):
        call(made, stream)
    wait, record = "cudaStreamWaitEvent", "cudaEventRecord"
    assert [(name, stream) for name, stream, *_ in streams.asked if name == wait] == [(wait, 1), (wait, 2), (wait, 1)]
    assert [event for name, event, *_ in streams.asked if name == record] == [100] * 5


def test_replays_of_captured_calls_keep_the_order(streams: Streams) -> None:
    def asked_by(stream: int) -> list[tuple[Any, ...]]:
        before = len(streams.asked)
        call(made, stream)
        return [each for each in streams.asked[before:] if each[0] != "cudaStreamGetCaptureInfo"]

    made = CallOrder(torch.device("cpu"))
    call(made, 1)
    streams.begin_capture(10)
    streams.join(11, 10)
    streams.begin_capture(20)
    asked = asked_by(10)
    # The nodes of the graph wait for the device's event, and record it: the flag of external events is 1.
    assert asked[0] == ("cudaStreamWaitEvent", 10, 100, 1)
    assert asked[1][0] == "cudaGraphAddEventRecordNode" and asked[1][-1] == 100
    # Of the same capture: behind the last node of the first call. The node that records comes behind this call.
    asked = asked_by(11)
    assert asked[0] == ("cudaStreamUpdateCaptureDependencies", 11, [0], None, 1, 0)
    assert [name for name, *_ in asked[1:]] == ["cudaGraphRemoveDependencies", "cudaGraphAddDependencies"]
    # Of another capture.
    assert asked_by(20)[0] == ("cudaStreamWaitEvent", 20, 100, 1)
    # The stream of the last call, but replays may have recorded the event since.
    assert asked_by(1)[0] == ("cudaStreamWaitEvent", 1, 100, 0)


def captured_calls(streams: Streams, calls: int, own: bool) -> list[Any]:
    """The nodes of a graph of calls on one stream, with work of the caller behind each, or not."""
    made = CallOrder(torch.device("cpu"))
    graph = streams.begin_capture(7)
    for number in range(calls):
        made.begin_captured(7)
        streams.compute(7, number)
        made.end_captured(7)
        if own:
            streams.compute(7, "own")
    return graph.nodes


def test_no_kernel_of_a_graph_waits_for_the_record(streams: Streams) -> None:
    assert captured_calls(streams, 3, own=False) == [
        ("wait", 100, set()),
        ("work", 0, {0}),
        ("record", 100, {4}),
        ("work", 1, {1}),
        ("work", 2, {3}),
    ]


def test_calls_of_one_stream_and_what_is_between_them_are_one_chain(streams: Streams) -> None:
    assert captured_calls(streams, 2, own=True) == [
        ("wait", 100, set()),
        ("work", 0, {0}),
        ("record", 100, {4}),
        ("work", "own", {1}),
        ("work", 1, {3}),
        ("work", "own", {4}),
    ]


def test_what_is_kept_of_captures_is_bounded(streams: Streams) -> None:
    made = CallOrder(torch.device("cpu"))
    for stream in range(3 * MAX_CAPTURES):
        streams.begin_capture(stream + 10)
        for _ in range(2):
            call(made, stream + 10)
    assert len(made._captured) == MAX_CAPTURES


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

    def __init__(self, of: type[CallOrder], streams: Streams, seed: int) -> None:
        self.rng, self.streams, self.calls = random.Random(seed), streams, list[list[int]]()
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
    """Replays record another event."""

    def end_captured(self, stream: int) -> None:
        ended, self._ended = self._ended, -1
        super().end_captured(stream)
        self._ended = ended


class Unmoved(CallOrder):
    """Replays record the end of their first call."""

    def end_captured(self, stream: int) -> None:
        number, _, ends = order._capture(stream)
        if number in self._captured:
            self._captured[number] = self._captured[number]._replace(ends=ends)
        else:
            super().end_captured(stream)


class Unordered(CallOrder):
    """Calls of one graph do not wait for each other."""

    def begin_captured(self, stream: int) -> None:
        self._captured.clear()
        super().begin_captured(stream)


def programs(of: type[CallOrder], monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    made = []
    for seed in range(300):
        with monkeypatch.context() as patched:
            made.append(Program(of, streams_of(patched), seed))
    return made


def test_each_call_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(CallOrder, monkeypatch)
    assert [program.overlaps() for program in made] == [[]] * len(made)
    assert sum(len(program.calls) for program in made) > 8 * len(made)


@pytest.mark.parametrize("broken", [Unawaited, Unrecorded, Unmoved, Unordered])
def test_a_broken_order_is_found(monkeypatch: pytest.MonkeyPatch, broken: type[CallOrder]) -> None:
    made = programs(broken, monkeypatch)
    assert sum(bool(program.overlaps()) for program in made) > len(made) // 10
