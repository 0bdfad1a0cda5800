"""One replay on all ranks, as the GPUs ran it: kernels and copies as ops of the plan, beside what the simulator says.

:func:`record` runs on each rank and needs a GPU. All else takes what it returned and needs none. Times are
microseconds; those of a profiler are nanoseconds of the host's clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distgemm.plan.ops import Copy, Gemm, Op, Reduce, box_extents, box_size, link_of
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.executable import WaitBy
from distgemm.simulator.engine import FLAGS, Timeline, arrivals, merged, op_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Figures", "Recording", "Seen", "Span", "Trace", "align", "attribute", "draw_trace", "record", "replay_of"]

REPLAYS = 7
"""Replays under the profiler; the middle one is shown."""
TIMED = 20
"""Replays that are timed without it."""
APART = 3.0
"""us by which an event may begin too early for the plan's order: the clocks of kernels and copies differ a little."""
OVERTAKING = 0.1
"""What it costs, in us, to take an event for an op although one that was issued earlier has not begun."""
BEAM = 256
"""Ways to deal events to streams that are followed at a time."""

NAMES = {"gemm": "GEMM kernels", "copy": "copies to peers", "sum": "sums", "local": "local copies"}
ORDER = ("gemm", "copy", "network", "sums", "local")

Interval = tuple[float, float]


class Seen(NamedTuple):
    """Something that a GPU did, as the profiler saw it.

    stream:     the profiler's number for it
    start, end: ns
    """

    name: str
    stream: int
    start: int
    end: int


class Recording(NamedTuple):
    """What :func:`record` returns on a rank.

    events:   of all replays under the profiler
    replays:  how many they are
    alone_us: us of a replay without the profiler
    """

    events: list[Seen]
    replays: int
    alone_us: float


class Span(NamedTuple):
    """An op and when a GPU ran it.

    lane:       as :class:`distgemm.simulator.engine.Event` has them; "sums" for what has a stream of its own beside the GEMMs
    start, end: us
    name:       of the kernel, "" for a prediction
    part:       what it is of the op, where a provider does more than one thing for it; "" for the op itself
    """

    rank: int
    lane: str
    op: Op
    start: float
    end: float
    name: str = ""
    part: str = ""


# --- on the GPU -----------------------------------------------------------------------------------------


def record(
    plan: Plan, provider: str, config: str | None, gemm_streams: int, wait_by: WaitBy = "memory_op"
) -> Recording:
    """Run a plan on this rank's GPU, replay its graph, and note what the GPU does. All ranks call it.

    Shards are random; the arguments are those of :func:`distgemm.compile`. Raises what that raises.
    """
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from distgemm.runtime.checks import shard_dtype
    from distgemm.runtime.cuda import compile_plan
    from distgemm.runtime.executable import ExecutionConfig

    device = torch.device("cuda", torch.cuda.current_device())
    exe = compile_plan(plan, ExecutionConfig(provider, config, gemm_streams, wait_by=wait_by))
    generator = torch.Generator(device).manual_seed(exe.rank)
    a, b = (
        torch.randn(plan.shard_shape(name, exe.rank), generator=generator, device=device).to(shard_dtype(plan, name))
        for name in "AB"
    )
    scale = torch.ones(1, device=device) if plan.problem.dtype == "float8_e4m3fn" else None
    out = exe(a, b, scale_a=scale, scale_b=scale)  # loads what a capture may not
    replay = exe.capture(a, b, out=out, scale_a=scale, scale_b=scale)
    for _ in range(REPLAYS):
        replay()
    dist.barrier(device_ids=[device.index])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(TIMED):
        replay()
    end.record()
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    # Ranks begin apart, since profilers take their time to start; the first replays wait for the last rank.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize(device)
    # Differences are taken of whole numbers: a float has a quarter of a microsecond left at such times.
    events = [
        Seen(event.name(), event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
    return Recording(events, REPLAYS, float(begin.elapsed_time(end)) * 1e3 / TIMED)


# --- events to ops --------------------------------------------------------------------------------------


def what(name: str) -> str:
    """What an event is, by its name: "gemm", "sum", "copy", "local"; "memset" and "tail", which belong to a GEMM of
    cuBLAS; "" for what is no op of a plan, such as a kernel that waits for words or counts replays."""
    if name.startswith("Mem"):
        found = {"Memcpy PtoP": "copy", "Memcpy DtoD": "local"}.get(name[:11], "")
        return "memset" if name.startswith("Memset") else found
    if "splitK" in name:
        return "tail"
    if "distgemm" in name:
        return "sum" if "distgemm::sum" in name or "8distgemm3sum" in name else ""
    return "" if name.startswith(("void at::", "at::", "ncclDev", "ncclKernel")) else "gemm"


def replay_of(recording: Recording) -> tuple[list[Seen], float]:
    """The events of the middle replay, by start, and the us until the next one began.

    Raises RuntimeError where the events are not those of so many equal replays.
    """
    events = sorted((event for event in recording.events if what(event.name)), key=lambda event: event.start)
    each, over = divmod(len(events), recording.replays)
    slices = [events[at * each :][:each] for at in range(recording.replays)]
    counts = [Counter(what(event.name) for event in one) for one in slices]
    if not each or over or any(count != counts[0] for count in counts):
        raise RuntimeError(
            f"the profiler saw {len(events)} events of {recording.replays} replays, which are not as many of each kind "
            f"in every replay: {dict(Counter(what(event.name) for event in events))}; run it again"
        )
    middle = recording.replays // 2
    return slices[middle], (slices[middle + 1][0].start - slices[middle][0].start) / 1e3


def attribute(plan: Plan, rank: int, gemm_streams: int, events: Sequence[Seen]) -> list[Span]:
    """The events of one replay of a rank as ops of its plan, by start.

    Copies to peers, or from them, come in the order in which they are issued. What is computed lies on ``gemm_streams``
    streams and, in some plans, a stream of sums behind them, each of which keeps its order, as do copies from shards
    that peers pull; which event is of which stream is found by the kinds of the events, the dependencies of the ops,
    and the profiler's streams, which are not always those on which the graph was captured. Kernels that wait for words
    are passed over.

    start and end are us of the host's clock, less the start of the first event.

    Raises RuntimeError, with what was found, where the events are not those of the plan.
    """
    from distgemm.runtime.cuda.lowering import lower
    from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM
    from distgemm.runtime.executable import ExecutionConfig

    if plan.problem.l > 1:
        raise ValueError(f"a trace is of a single product, got {plan.problem.l} batches: their copies come in parts")
    actions = lower(plan, rank, ExecutionConfig(gemm_streams=gemm_streams))
    issued = [(action.stream, op) for action in actions for op in action.ops]
    numbers = {op.id: number for number, (_, op) in enumerate(issued)}
    copied = [op for stream, op in issued if stream == COMM and isinstance(op, Copy)]
    sent, staged = ([op for op in copied if _crosses(op) == crosses] for crosses in (True, False))
    chains: list[list[Op]] = [
        [op for on, op in issued if on == stream and isinstance(op, (Gemm, Reduce, Copy))]
        for stream in range(GEMM_STREAM, 1 + max(action.stream for action in actions))
    ]
    sums = len(chains) > gemm_streams
    if staged:
        chains.append([*staged])
    events = sorted((event for event in events if what(event.name)), key=lambda event: event.start)
    copies = [event for event in events if what(event.name) == "copy"]
    computed = [event for event in events if what(event.name) != "copy"]
    _check_counts(rank, events, Counter([*(_kind(op) for chain in chains for op in chain), *["copy"] * len(sent)]))
    zero = events[0].start if events else 0
    found = [
        Span(rank, "copy", op, (event.start - zero) / 1e3, (event.end - zero) / 1e3, event.name)
        for op, event in zip(sent, copies, strict=True)
    ]
    for number, op, event, part in _deal(rank, numbers, chains, computed, list(zip(sent, copies, strict=True))):
        lane = f"gemm {number}" if isinstance(op, Gemm) else "sums" if sums and number == gemm_streams else "local"
        found.append(Span(rank, lane, op, (event.start - zero) / 1e3, (event.end - zero) / 1e3, event.name, part))
    return sorted(found, key=lambda span: span.start)


def _kind(op: Op) -> str:
    return "gemm" if isinstance(op, Gemm) else "sum" if isinstance(op, Reduce) else "local"


def _check_counts(rank: int, events: Sequence[Seen], expected: Counter[str]) -> None:
    seen = Counter(what(event.name) for event in events)
    # A GEMM of cuBLAS may copy what it adds to: of local copies there may be more.
    if any(seen[kind] != expected[kind] for kind in ("gemm", "copy", "sum")) or seen["local"] < expected["local"]:
        listed = "; ".join(f"{NAMES[kind]} {expected[kind]}, seen {seen[kind]}" for kind in NAMES)
        names = ", ".join(sorted({event.name[:60] for event in events}))
        raise RuntimeError(f"rank {rank}: the profiler saw other events than the plan has: {listed}. They are: {names}")


class _Way(NamedTuple):
    """A way to deal the first events to streams.

    at, last: of each stream, how many ops it has done, and its last event
    dealt:    (stream, op, event, part of the op) of the last event, and the way before it
    """

    cost: float
    wrong: float
    at: tuple[int, ...]
    last: tuple[Seen | None, ...]
    dealt: tuple[int, Op, Seen, str] | None = None
    before: _Way | None = None


def _deal(
    rank: int,
    issued: dict[int, int],
    chains: Sequence[Sequence[Op]],
    events: Sequence[Seen],
    copies: Sequence[tuple[Op, Seen]],
) -> list[tuple[int, Op, Seen, str]]:
    """(stream, op, event, part) for each event that is no copy to a peer: the way that costs least.

    What costs is to begin before the op before it in its stream, or one that it depends on, has ended, or to end
    after a copy that depends on it has begun (us); to change the profiler's stream (1 each); and a little, to go before
    what was issued earlier. No way has an op before what it depends on.
    """
    place = {op.id: (number, at) for number, chain in enumerate(chains) for at, op in enumerate(chain)}
    ended = {op.id: event.end for op, event in copies}
    begun = {dep: event.start for op, event in reversed(copies) for dep in op.deps}
    ways = [_Way(0.0, 0.0, (0,) * len(chains), (None,) * len(chains))]
    for event in events:
        found: dict[tuple[Any, ...], _Way] = {}
        for way in ways:
            for branch, chain in enumerate(chains):
                for op, part, step in _parts(chain, way.at[branch], event):
                    last = way.last[branch]
                    wrong = max(0.0, (last.end - event.start) / 1e3) if last else 0.0
                    if not part:
                        needed = [place[dep] for dep in op.deps if dep in place]
                        if any(way.at[number] <= at for number, at in needed):
                            continue
                        early = [ended[dep] - event.start for dep in op.deps if dep in ended]
                        # What came before the last event of its stream had ended when that began.
                        newest = [way.last[number] for number, at in needed if way.at[number] == at + 1]
                        early += [each.end - event.start for each in newest if each is not None]
                        late = event.end - begun.get(op.id, event.end)
                        wrong = max(wrong, max([late, *early]) / 1e3)
                    waiting = [chains[each][at] for each, at in enumerate(way.at) if at < len(chains[each])]
                    overtaken = sum(issued[other.id] < issued[op.id] for other in waiting)
                    cost = (
                        way.cost + wrong + (last is not None and last.stream != event.stream) + OVERTAKING * overtaken
                    )
                    at = (*way.at[:branch], way.at[branch] + step, *way.at[branch + 1 :])
                    lasts = (*way.last[:branch], event, *way.last[branch + 1 :])
                    key = (at, tuple(map(id, lasts)))
                    if key not in found or cost < found[key].cost:
                        dealt = (branch, op, event, part)
                        found[key] = _Way(cost, max(way.wrong, wrong), at, lasts, dealt, way)
        ways = sorted(found.values(), key=lambda way: way.cost)[:BEAM]
    done = tuple(map(len, chains))
    best: _Way | None = next((way for way in ways if way.at == done), None)
    if best is None:
        order = ", ".join(what(event.name) for event in events)
        expected = "; ".join(", ".join(_kind(op) for op in chain) for chain in chains)
        raise RuntimeError(f"rank {rank}: events {order} are in no order of the plan's streams: {expected}")
    if best.wrong > APART:
        raise RuntimeError(
            f"rank {rank}: the events contradict the plan: in the best order an op begins {best.wrong:.1f} us before "
            "one that it follows has ended"
        )
    parts: list[tuple[int, Op, Seen, str]] = []
    while best is not None and best.dealt is not None:
        parts.append(best.dealt)
        best = best.before
    return parts[::-1]


def _parts(chain: Sequence[Op], at: int, event: Seen) -> list[tuple[Op, str, int]]:
    """What an event may be at a place of a stream: (op, part of it, ops that it completes)."""
    kind = what(event.name)
    head = chain[at] if at < len(chain) else None
    found: list[tuple[Op, str, int]] = []
    if head is not None and kind == _kind(head):
        found.append((head, "", 1))
    if isinstance(head, Gemm) and kind in ("memset", "local"):
        found.append((head, "memset before" if kind == "memset" else "copy before", 0))
    if kind == "tail" and at and isinstance(chain[at - 1], Gemm):
        found.append((chain[at - 1], "sum behind", 0))
    return found


# --- clocks ---------------------------------------------------------------------------------------------


def align(plan: Plan, spans: Iterable[Span]) -> tuple[tuple[float, ...], float]:
    """(us by which each rank's clock is to be set forward, the largest violation before that).

    No op uses what an op of another rank made, such as a copy, before that has ended. These are the least shifts, of
    each rank, with which that holds for all; 0 everywhere if it holds already. An offset that contradicts nothing
    cannot be seen: between two ranks it is at most as large as the pause between such an op and the user.

    Raises RuntimeError where no shifts help.
    """
    at = {(span.rank, span.op.id): span for span in spans if not span.part}
    early = [
        (made.rank, user.rank, at[made.rank, made.id].end - at[user.rank, user.id].start)
        for made, user in arrivals(plan)
    ]
    shifts = [0.0] * plan.world_size
    for _ in range(plan.world_size):
        moved = False
        for src, dst, by in early:
            if shifts[src] + by > shifts[dst] + 1e-6:
                shifts[dst], moved = shifts[src] + by, True
        if not moved:
            return tuple(shifts), max([0.0, *(by for _, _, by in early)])
    raise RuntimeError(
        "no shift of clocks lets every op end before another rank uses what it made: the events are not right"
    )


# --- what came out --------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Where a rank's time goes, us.

    total:  from the rank's first event to that of the next replay
    gemms:  for which it multiplies
    copies: for which it sends, or pulls
    both:   for which it does both
    start, middle, end: for which it does not multiply: before its first GEMM, between GEMMs, behind its last one.
            A sum is no multiplication.
    """

    total: float
    gemms: float
    copies: float
    both: float
    start: float
    middle: float
    end: float


class Gap(NamedTuple):
    """us for which something waits: the copies of a rank between two of them, or its last GEMM."""

    us: float
    rank: int
    text: str


@dataclass(frozen=True)
class Trace:
    """A replay on all ranks, with its prediction.

    spans:     of all ranks, us from the start of the first
    periods:   of each rank, until the next replay began
    alone:     us of a replay without the profiler, of the slowest rank
    shifts, violation: as :func:`align` has found them; the spans are shifted
    predicted: the simulator's timeline
    """

    plan: Plan
    spans: tuple[Span, ...]
    periods: tuple[float, ...]
    alone: float
    shifts: tuple[float, ...]
    violation: float
    predicted: Timeline

    @classmethod
    def of(cls, plan: Plan, gemm_streams: int, recordings: Sequence[Recording], predicted: Timeline) -> Trace:
        """From what :func:`record` returned on each rank."""
        middle = [replay_of(recording) for recording in recordings]
        zero = min(events[0].start for events, _ in middle)
        spans = []
        for rank, (events, _) in enumerate(middle):
            later = (events[0].start - zero) / 1e3
            spans += [_moved(span, later) for span in attribute(plan, rank, gemm_streams, events)]
        shifts, violation = align(plan, spans)
        spans = [_moved(span, shifts[span.rank]) for span in spans]
        first = min(span.start for span in spans)
        return cls(
            plan,
            tuple(_moved(span, -first) for span in spans),
            tuple(period for _, period in middle),
            max(recording.alone_us for recording in recordings),
            shifts,
            violation,
            predicted,
        )

    @cached_property
    def prediction(self) -> tuple[Span, ...]:
        """The simulator's events, those of each rank shifted so that its first op begins as it was measured to."""
        begin = {rank: min(span.start for span in self.of_rank(rank)) for rank in range(self.plan.world_size)}
        events = [event for event in self.predicted.events if event.lane != FLAGS]
        shift = {
            rank: begin[rank] - min(event.start for event in events if event.rank == rank)
            for rank in {event.rank for event in events}
        }
        return tuple(_moved(Span(*event), shift[event.rank]) for event in events)

    def of_rank(self, rank: int, predicted: bool = False) -> list[Span]:
        """The spans of a rank, by start."""
        spans = self.prediction if predicted else self.spans
        return sorted((span for span in spans if span.rank == rank), key=lambda span: span.start)

    def figures(self, rank: int, predicted: bool = False) -> Figures:
        """Where a rank's time goes."""
        spans = self.of_rank(rank, predicted)
        total = self.predicted.time if predicted else self.periods[rank]
        gemms = merged((span.start, span.end) for span in spans if isinstance(span.op, Gemm) and not span.part)
        copies = merged((span.start, span.end) for span in spans if _crosses(span.op))
        both = _length(gemms) + _length(copies) - _length(merged([*gemms, *copies]))
        begin, busy = spans[0].start, _length(gemms)
        start = gemms[0][0] - begin if gemms else total
        middle = gemms[-1][1] - gemms[0][0] - busy if gemms else 0.0
        end = max(0.0, begin + total - gemms[-1][1]) if gemms else 0.0
        return Figures(total, busy, _length(copies), both, start, middle, end)

    def gaps(self, count: int = 3) -> list[Gap]:
        """The longest pauses between copies of a rank, and what each rank's last GEMM waits after what it needs."""
        found = []
        for rank in range(self.plan.world_size):
            copies = [span for span in self.of_rank(rank) if _crosses(span.op)]
            for one, other in pairwise(copies):
                found.append(Gap(other.start - one.end, rank, f"between {_title(one.op)} and {_title(other.op)}"))
        found = sorted(found, reverse=True)[:count]
        at = {(span.rank, span.op.id): span for span in self.spans if not span.part}
        for rank in range(self.plan.world_size):
            gemms = [span for span in self.of_rank(rank) if isinstance(span.op, Gemm) and not span.part]
            if not gemms:
                continue
            last = gemms[-1]
            before = [(span.end, f"{_title(span.op)} had ended") for span in gemms[:-1] if span.lane == last.lane]
            # What it was waiting for: on other ranks, or its own rank's pulls.
            needed = [made for made, user in arrivals(self.plan) if (user.rank, user.id) == (rank, last.op.id)]
            needed += [op for op in self.plan.ops(rank) if op.id in last.op.deps and _pulls(op)]
            for op in needed:
                title = f"the copy {_title(op)}" if isinstance(op, Copy) else _title(op)
                before.append((at[op.rank, op.id].end, f"{title} on rank {op.rank} had ended"))
            if before:
                end, text = max(before)
                found.append(Gap(last.start - end, rank, f"until its last GEMM, {_title(last.op)}, after {text}"))
        return found

    def to_perfetto(self) -> dict[str, Any]:
        """Chrome trace JSON for ui.perfetto.dev: a process per rank; the lanes as measured, those of the prediction
        below them; arrows from copies, and other ops for another rank, to what uses them."""
        events: list[dict[str, Any]] = []
        thread: dict[tuple[str, bool], int] = {}
        for predicted, spans in ((False, self.spans), (True, self.prediction)):
            for lane in sorted({span.lane for span in spans}, key=_lane_order):
                thread[lane, predicted] = len(thread)
        for rank in range(self.plan.world_size):
            events.append(_named("process_name", rank, 0, {"name": f"rank {rank}"}))
            events.append(_named("process_sort_index", rank, 0, {"sort_index": rank}))
            for (lane, predicted), number in thread.items():
                events.append(_named("thread_name", rank, number, {"name": "predicted " * predicted + lane}))
                events.append(_named("thread_sort_index", rank, number, {"sort_index": number}))
        for predicted, spans in ((False, self.spans), (True, self.prediction)):
            for span in spans:
                place = {"pid": span.rank, "tid": thread[span.lane, predicted]}
                title = _title(span.op) + (f", {span.part}" if span.part else "")
                times = {"ts": round(span.start, 3), "dur": round(span.end - span.start, 3)}
                category = "predicted" if predicted else span.op.kind.lower()
                events.append(
                    {"ph": "X", "name": title, "cat": category, **times, **place, "args": _facts(self.plan, span)}
                )
        at = {(span.rank, span.op.id): span for span in self.spans if not span.part}
        for number, (op, user) in enumerate(arrivals(self.plan)):
            made, used = at[op.rank, op.id], at[user.rank, user.id]
            flow = {"cat": "copy", "name": "arrives for", "id": number}
            start, end = round(made.end, 3), round(used.start, 3)
            events.append({"ph": "s", **flow, "pid": op.rank, "tid": thread[made.lane, False], "ts": start})
            events.append({"ph": "f", "bp": "e", **flow, "pid": user.rank, "tid": thread[used.lane, False], "ts": end})
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": self.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        ranks = range(self.plan.world_size)
        return {
            "schedule": self.plan.schedule,
            "world_size": self.plan.world_size,
            "machine": self.predicted.machine.name,
            "measured_us": self.alone,
            "predicted_us": self.predicted.time,
            "clock_shifts_us": list(self.shifts),
            "clock_violation_us": self.violation,
            "measured": [self.figures(rank)._asdict() for rank in ranks],
            "predicted": [self.figures(rank, predicted=True)._asdict() for rank in ranks],
            "gaps": [gap._asdict() for gap in self.gaps()],
        }

    def save_perfetto(self, path: str | Path) -> None:
        """Write :meth:`to_perfetto` to a file."""
        Path(path).write_text(json.dumps(self.to_perfetto()))


def _moved(span: Span, by: float) -> Span:
    return span._replace(start=span.start + by, end=span.end + by)


def _crosses(op: Op) -> bool:
    return isinstance(op, Copy) and link_of(op) is not None


def _pulls(op: Op) -> bool:
    return isinstance(op, Copy) and op.src.rank != op.rank


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _lane_order(lane: str) -> tuple[int, str]:
    return ORDER.index(lane.split()[0]), lane


def _title(op: Op) -> str:
    return op_title(op) + (", local" if isinstance(op, Copy) and not _crosses(op) else "")


def _named(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _facts(plan: Plan, span: Span) -> dict[str, Any]:
    """What a click on a span shows."""
    op, us = span.op, span.end - span.start
    facts: dict[str, Any] = {"op": op.describe(), "iteration": op.iteration, "tile": list(op.tile)}
    if span.name:
        facts["kernel"] = span.name
    if span.part:
        return facts
    if isinstance(op, Copy):
        moved = box_size(op.dst.box) * DTYPE_BYTES[plan.dtype(op.dst)]
        facts |= {"bytes": moved, "GB/s": round(moved / us / 1e3, 1) if us else None}
    elif isinstance(op, Reduce):
        views = (*op.sources, op.out)
        moved = sum(box_size(view.box) * DTYPE_BYTES[plan.dtype(view)] for view in views)
        facts |= {"bytes": moved, "GB/s": round(moved / us / 1e3, 1) if us else None}
    elif isinstance(op, Gemm):
        flop = 2 * box_size(op.out.box) * box_extents(op.a.box)[2]
        facts |= {"flop": flop, "TFLOP/s": round(flop / us / 1e6, 1) if us else None}
    return facts


# --- picture --------------------------------------------------------------------------------------------


def draw_trace(trace: Trace, path: str | Path) -> None:
    """Draw what every rank did and what was predicted, ranks below each other, as .svg or .png. Needs matplotlib: the
    extra "pictures".

    Raises ValueError for another suffix.
    """
    from distgemm.viz.figures import (
        FAINT,
        GRID,
        INK,
        RANKS,
        TEXT,
        _axes,
        _dpi,
        _figure,
        _problem,
        _side,
        _suffix,
        _title,
    )

    kind = _suffix(path)
    plan = trace.plan
    shown = range(plan.world_size)[:RANKS]
    rows: list[tuple[int, bool, str]] = []
    for rank in shown:
        for predicted in (False, True):
            lanes = {span.lane for span in trace.of_rank(rank, predicted)}
            rows += [(rank, predicted, lane) for lane in sorted(lanes, key=_lane_order)]
    across, row, between = 12.5, 0.25, 0.16
    low = row * len(rows) + between * 2 * len(shown)
    width, height = 2.6 + across + 0.45, 1.2 + low + 0.75
    figure = _figure(width, height)
    _title(
        figure,
        f"{plan.schedule}: {_problem(plan)}, {plan.world_size} ranks",
        f"Measured: {trace.alone:.0f} \u00b5s per replay. Predicted on {trace.predicted.machine.name} (pale): "
        f"{trace.predicted.time:.0f} \u00b5s",
        "\u00b5s from the first op of any rank; each rank's prediction begins with its first op",
    )
    axes = _axes(figure, 2.6, 0.6, across, low)
    end = max(span.end for span in (*trace.spans, *trace.prediction)) * 1.01
    axes.set_xlim(0, end)
    axes.set_ylim(low, 0)
    per_us = across / end
    y = 0.0
    before: tuple[int, bool] | None = None
    for rank, predicted, lane in rows:
        if before != (rank, predicted):
            y += between
            if before is not None and before[0] != rank:
                axes.axhline(y - between / 2, color=GRID, linewidth=0.8)
            _side(axes, -1.75 / per_us, y + row / 2, "" if predicted else f"rank {rank}", TEXT + 1, INK)
            before = rank, predicted
        _side(axes, -0.06 / per_us, y + row / 2, "predicted " * predicted + lane, TEXT, FAINT)
        for span in trace.of_rank(rank, predicted):
            if span.lane == lane:
                _bar(axes, span, y + 0.03, row - 0.05, per_us, predicted)
        y += row
    axes.set_yticks([])
    note = "\u00b5s"
    if plan.world_size > len(shown):
        note += f"; {len(shown)} of {plan.world_size} ranks shown"
    axes.set_xlabel(note, size=TEXT, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
    figure.savefig(path, format=kind, dpi=_dpi(width, height))


def _bar(axes: Axes, span: Span, y: float, height: float, per_us: float, predicted: bool) -> None:
    from matplotlib.patches import Rectangle

    from distgemm.viz.figures import COLOUR, SMALL, _fitting, _ink, _label, _what

    colour = "#BBBBBB" if span.part else COLOUR[_what(span.op)]
    alpha = 0.45 if predicted else 1.0
    length = span.end - span.start
    axes.add_patch(
        Rectangle((span.start, y), length, height, facecolor=colour, edgecolor="white", linewidth=0.6, alpha=alpha)
    )
    text = "" if span.part else _fitting(_label(span.op), length * per_us)
    if text:
        middle = (span.start + span.end) / 2
        ink = "#111111" if predicted else _ink(colour)
        axes.text(middle, y + height / 2, text, ha="center", va="center", size=SMALL, color=ink, clip_on=True)
