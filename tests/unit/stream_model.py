"""Streams, events and graphs of CUDA, without a GPU: what CUDA orders, and nothing else.

Work is a graph of nodes. Issuing work adds nodes behind those that CUDA promises to end before it: the work before it
on its stream, and what an event recorded last. Whether one piece of work always ends before another one begins is then
a question of paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from cuda.bindings import runtime

DONE = runtime.cudaError_t.cudaSuccess
ACTIVE = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive


class Template(NamedTuple):
    """A node of a graph: work, or "wait" for or "record" of an event."""

    kind: str
    label: Any
    behind: set[int]


@dataclass
class Graph:
    """A graph, and the capture that makes it."""

    number: int
    nodes: list[Template] = field(default_factory=list)

    def add(self, kind: str, label: Any, behind: set[int]) -> int:
        self.nodes.append(Template(kind, label, set(behind)))
        return len(self.nodes) - 1


class Streams:
    """The part of the CUDA runtime that orders work.

    Attributes:
        work: what was issued, in order: labels of work, and the numbers of their nodes.
        asked: the calls of the runtime's functions, in order: names and arguments.
    """

    def __init__(self) -> None:
        self.work: list[tuple[Any, int]] = []
        self.asked: list[tuple[Any, ...]] = []
        self._before: list[set[int]] = []  # of each node, all that ends before it begins
        self._tails: dict[int, set[int]] = {}
        self._numbers_of_events = itertools.count(100)
        self._records: dict[int, set[int]] = {}
        self._captures: dict[int, tuple[Graph, set[int]]] = {}  # by stream, with the stream's last nodes
        self._numbers = itertools.count(1)

    # What the caller does.

    def compute(self, stream: int, label: Any) -> None:
        """Issue a kernel."""
        if stream in self._captures:
            graph, tail = self._captures[stream]
            self._captures[stream] = graph, {graph.add("work", label, tail)}
        else:
            self._tails[stream] = {self._issue(label, self._tails.get(stream, set()))}

    def begin_capture(self, stream: int) -> Graph:
        graph = Graph(next(self._numbers))
        self._captures[stream] = graph, set()
        return graph

    def join(self, stream: int, other: int) -> None:
        """Let a stream wait for another one. If that one is captured, its capture includes this stream from here on."""
        if other in self._captures:
            graph, tail = self._captures[other]
            self._captures[stream] = graph, self._captures.get(stream, (graph, set()))[1] | tail
        else:
            self._tails[stream] = self._tails.get(stream, set()) | self._tails.get(other, set())

    def end_capture(self, graph: Graph) -> None:
        self._captures = {stream: (of, tail) for stream, (of, tail) in self._captures.items() if of is not graph}

    def launch(self, graph: Graph, stream: int) -> None:
        """Issue a graph. If it records an event several times, and in no order, any of these may be the last one."""
        first, issued = self._tails.get(stream, set()), dict[int, int]()
        records: dict[int, list[int]] = {}
        nodes = {number: node.behind for number, node in enumerate(graph.nodes)}
        for number in TopologicalSorter(nodes).static_order():
            kind, label, behind = graph.nodes[number]
            awaited = self._records.get(label, set()) if kind == "wait" else set()
            label_of_work = label if kind == "work" else None
            issued[number] = self._issue(label_of_work, first.union(awaited, (issued[each] for each in behind)))
            if kind == "record":
                records.setdefault(label, []).append(issued[number])
        for event, found in records.items():
            last = [each for each in found if not any(self.is_before(each, other) for other in found)]
            self._records[event] = set.intersection(*(self._before[each] | {each} for each in last))
        self._tails[stream] = first.union(issued.values())

    def is_before(self, node: int, other: int) -> bool:
        """Whether a node always ends before another one begins."""
        return node in self._before[other]

    def _issue(self, label: Any, behind: set[int]) -> int:
        self._before.append(behind.union(*(self._before[each] for each in behind)))
        number = len(self._before) - 1
        if label is not None:
            self.work.append((label, number))
        return number

    # What the runtime does.

    def functions(self) -> dict[str, Any]:
        """The functions, by their names in the runtime."""

        def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: (self.asked.append((name, *arguments)), function(*arguments))[1]

        functions: dict[str, Callable[..., Any]] = {
            "cudaEventCreateWithFlags": self._create_event,
            "cudaEventRecord": self._record,
            "cudaStreamWaitEvent": self._wait,
            "cudaStreamGetCaptureInfo": self._capture_info,
            "cudaGraphAddEventRecordNode": self._add_record,
            "cudaGraphAddDependencies": self._add_dependencies,
            "cudaGraphRemoveDependencies": self._remove_dependencies,
            "cudaStreamUpdateCaptureDependencies": self._add_to_stream,
        }
        return {name: noting(name, function) for name, function in functions.items()}

    def _create_event(self, flags: Any) -> Any:
        return DONE, next(self._numbers_of_events)

    def _record(self, event: int, stream: int) -> Any:
        assert stream not in self._captures
        self._records[event] = set(self._tails.get(stream, set()))
        return (DONE,)

    def _wait(self, stream: int, event: int, flags: Any) -> Any:
        if flags == runtime.cudaEventWaitExternal:
            graph, tail = self._captures[stream]
            self._captures[stream] = graph, {graph.add("wait", event, tail)}
        else:
            assert stream not in self._captures
            self._tails[stream] = self._tails.get(stream, set()) | self._records.get(event, set())
        return (DONE,)

    def _capture_info(self, stream: int) -> Any:
        graph, tail = self._captures[stream]
        return DONE, ACTIVE, graph.number, graph, sorted(tail), None, len(tail)

    def _add_record(self, graph: Graph, behind: list[int], count: int, event: int) -> Any:
        assert len(behind) == count
        return DONE, graph.add("record", event, set(behind))

    def _add_dependencies(self, graph: Graph, first: list[int], then: list[int], data: None, count: int) -> Any:
        assert len(first) == len(then) == count
        for one, other in zip(first, then, strict=True):
            assert one not in graph.nodes[other].behind
            graph.nodes[other].behind.add(one)
        return (DONE,)

    def _remove_dependencies(self, graph: Graph, first: list[int], then: list[int], data: None, count: int) -> Any:
        assert len(first) == len(then) == count
        for one, other in zip(first, then, strict=True):
            graph.nodes[other].behind.remove(one)
        return (DONE,)

    def _add_to_stream(self, stream: int, behind: list[int], data: None, count: int, flags: int) -> Any:
        graph, tail = self._captures[stream]
        assert behind and len(behind) == count and not tail & set(behind)
        self._captures[stream] = graph, tail.union(behind)
        return (DONE,)
