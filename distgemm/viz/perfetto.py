"""Traces for ui.perfetto.dev (Chrome trace JSON): predicted timelines and measured replays, by one writer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distgemm.arguments import instance, write, wrong
from distgemm.plan.ops import Copy, box_size
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.simulator import FLAG_LANE, Event, Timeline, op_title

__all__ = ["Arrow", "Slice", "save_trace", "timeline_trace", "to_trace"]


TRACE = "a dictionary of JSON values, as timeline_trace returns it"


class Slice(NamedTuple):
    """Something that a rank does on a lane.

    Attributes:
        rank: the process in the trace.
        lane: the thread in the trace.
        start, end: us.
        name: its title.
        category: by which the viewer filters.
        facts: what the viewer shows when the slice is selected.
    """

    rank: int
    lane: str
    start: float
    end: float
    name: str
    category: str
    facts: dict[str, Any]


class Arrow(NamedTuple):
    """From the end of a slice to the start of the slice that uses its result: (rank, lane, us) of both."""

    source: tuple[int, str, float]
    target: tuple[int, str, float]


def to_trace(
    slices: Iterable[Slice], arrows: Iterable[Arrow], lanes: Sequence[str], ranks: int, summary: dict[str, Any]
) -> dict[str, Any]:
    """Chrome trace JSON: a process for each rank, a thread for each lane, in the order of ``lanes``.

    Args:
        slices: of all ranks.
        arrows: drawn between slices.
        lanes: names of all lanes.
        ranks: number of ranks.
        summary: figures of the whole trace.
    """
    thread = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        for lane, number in thread.items():
            events.append(_metadata("thread_name", rank, number, {"name": lane}))
            events.append(_metadata("thread_sort_index", rank, number, {"sort_index": number}))
    for each in slices:
        times = {"ts": round(each.start, 3), "dur": round(each.end - each.start, 3)}
        place = {"pid": each.rank, "tid": thread[each.lane]}
        events.append({"ph": "X", "name": each.name, "cat": each.category, **times, **place, "args": each.facts})
    for number, arrow in enumerate(arrows):
        flow = {"cat": "copy", "name": "arrives for", "id": number}
        for phase, (rank, lane, at) in (({"ph": "s"}, arrow.source), ({"ph": "f", "bp": "e"}, arrow.target)):
            events.append({**phase, **flow, "pid": rank, "tid": thread[lane], "ts": round(at, 3)})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": summary}


def _metadata(what: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def timeline_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a predicted replay. Arrows lead from copies, and from other ops for another rank, to their users."""
    instance("timeline", timeline, Timeline, "a distgemm.simulator.Timeline")
    shown = [event for event in timeline.events if event.lane != FLAG_LANE]
    arrows = (
        Arrow((made.rank, made.lane, made.end), (user.rank, user.lane, user.start)) for made, user in timeline.flows
    )
    lanes = sorted({event.lane for event in shown})
    slices = (_slice(timeline, event) for event in shown)
    return to_trace(slices, arrows, lanes, timeline.plan.world_size, timeline.to_dict())


def _slice(timeline: Timeline, event: Event) -> Slice:
    op = event.op
    facts: dict[str, Any] = {"op": op.describe(), "iteration": op.iteration, "deps": list(op.deps)}
    if isinstance(op, Copy):
        facts["bytes"] = box_size(op.dst.box) * DTYPE_BYTES[timeline.plan.dtype(op.dst)]
    return Slice(event.rank, event.lane, event.start, event.end, op_title(op), op.kind.lower(), facts)


def save_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Write a trace to a .json file.

    Args:
        trace: a result of :func:`timeline_trace` or :func:`to_trace`.
        path: the file.

    Raises:
        ValueError: if the trace is no JSON object, or the file cannot be written.
    """
    try:
        text = json.dumps(instance("trace", trace, dict, TRACE))
    except TypeError:
        raise wrong("trace", TRACE, trace) from None
    write("path", path, text)
