"""A replay on all ranks as the GPUs ran it: kernels and copies as ops of the plan, beside the simulator's prediction.

:func:`record` runs on each rank and needs a GPU. The other functions use what it returned and need none. Times are
microseconds; the profiler's times are nanoseconds of the host's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distgemm.measure.profiler import GpuEvent, profile_replays
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, box_extents, box_size, link_of
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.runtime.checks import shard_dtype
from distgemm.runtime.cuda import compile_plan
from distgemm.runtime.cuda.lowering import COMM, GEMM_STREAM, lower
from distgemm.runtime.executable import ExecutionConfig, WaitBy
from distgemm.simulator import FLAG_LANE, Timeline, arrivals, joined, lane_order, op_title
from distgemm.viz.explorer import Run, Track
from distgemm.viz.perfetto import Arrow, Slice, to_trace

__all__ = ["Figures", "Recording", "Span", "Trace", "align", "attribute", "record", "replay_of"]

PROFILED_REPLAYS = 7
"""Replays under the profiler; the middle one is shown."""
TIMED_REPLAYS = 20
"""Replays that are timed without the profiler."""
CLOCK_TOLERANCE_US = 3.0
"""How much too early for the plan's order an event may begin: the clocks of kernels and copies differ a little."""
OVERTAKING_COST = 0.1
"""Cost, us, of taking an event for an op while an op that was issued earlier has not begun."""
BEAM_WIDTH = 256
"""Assignments of events to streams that are followed at a time."""

KIND_NAMES = {"gemm": "GEMM kernels", "copy": "copies to peers", "sum": "sums", "local": "local copies"}

Interval = tuple[float, float]


class Recording(NamedTuple):
    """What :func:`record` returns on a rank.

    Attributes:
        events: of all replays under the profiler.
        replays: number of these replays.
        alone_us: time of a replay without the profiler, us.
    """

    events: list[GpuEvent]
    replays: int
    alone_us: float


class Span(NamedTuple):
    """An op and when a GPU ran it.

    Attributes:
        rank: the rank that executed it.
        lane: as in :class:`distgemm.simulator.Event`; "sums" for a stream of its own beside the GEMMs.
        op: of the plan.
        start, end: us.
        name: of the kernel; "" for a prediction.
        part: which part of the op it is, if a provider launches several kernels for the op; "" for the op itself.
    """

    rank: int
    lane: str
    op: Op
    start: float
    end: float
    name: str = ""
    part: str = ""


def record(
    plan: Plan, provider: str | None, config: str | None, gemm_streams: int, wait_by: WaitBy = "memory_op"
) -> Recording:
    """Run a plan on this rank's GPU, replay its graph, and record what the GPU does. A collective call.

    Shards are random, and scales are 1. Arguments and errors are those of :func:`distgemm.compile`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    exe = compile_plan(plan, ExecutionConfig(provider, config, gemm_streams, wait_by=wait_by))
    generator = torch.Generator(device).manual_seed(exe.rank)
    a, b = (
        torch.randn(plan.shard_shape(name, exe.rank), generator=generator, device=device).to(shard_dtype(plan, name))
        for name in "AB"
    )
    scales: dict[str, Any] = {
        f"scale_{name[-1].lower()}": torch.ones(plan.shard_shape(name, exe.rank), device=device)
        for name in (SCALE_OPERANDS.values() if plan.problem.scaling else ())
    }
    out = exe(a, b, **scales)  # loads kernels, which a capture must not do
    replay = exe.capture(a, b, out=out, **scales)
    for _ in range(PROFILED_REPLAYS):
        replay()
    dist.barrier(device_ids=[device.index])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(TIMED_REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    events = profile_replays(replay, PROFILED_REPLAYS, device)
    return Recording(events, PROFILED_REPLAYS, float(begin.elapsed_time(end)) * 1e3 / TIMED_REPLAYS)


# --- events to ops --------------------------------------------------------------------------------------


def what(name: str) -> str:
    """The kind of an event, by its name: "gemm", "sum", "copy" or "local".

    "memset" and "tail" belong to a GEMM of cuBLAS. "" is an event that is no op of a plan, such as a kernel that waits
    for flags or counts replays.
    """
    if name.startswith("Mem"):
        found = {"Memcpy PtoP": "copy", "Memcpy DtoD": "local"}.get(name[:11], "")
        return "memset" if name.startswith("Memset") else found
    if "splitK" in name:
        return "tail"
    if "distgemm" in name:
        return {"distgemm_sum": "sum", "distgemm_gemm": "gemm"}.get(name, "")
    return "" if name.startswith(("void at::", "at::", "ncclDev", "ncclKernel")) else "gemm"


def replay_of(recording: Recording) -> tuple[list[GpuEvent], float]:
    """The events of the middle replay, by start, and the time until the next one began, us.

    Raises:
        RuntimeError: if the events are not those of so many equal replays.
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


def attribute(plan: Plan, rank: int, gemm_streams: int, events: Sequence[GpuEvent]) -> list[Span]:
    """Assign the events of one replay of a rank to ops of its plan.

    Copies to peers, or from them, run in the order in which they are issued. GEMMs, sums and local copies run on
    ``gemm_streams`` streams and, in some plans, on a stream of sums. Each stream keeps its order, and so do copies from
    shards that peers pull. The kinds of the events, the dependencies of the ops and the profiler's streams decide which
    event belongs to which stream; the profiler's streams are not always those on which the graph was captured. Kernels
    that wait for flags are ignored.

    Args:
        plan: what was replayed.
        rank: whose events.
        gemm_streams: of the execution.
        events: of one replay.

    Returns:
        The spans by start, us from the start of the first event.

    Raises:
        ValueError: for a plan with batches, whose copies are in parts.
        RuntimeError: if the events are not those of the plan, with what was found.
    """
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
    for number, op, event, part in _assign(rank, numbers, chains, computed, list(zip(sent, copies, strict=True))):
        lane = f"gemm {number}" if isinstance(op, Gemm) else "sums" if sums and number == gemm_streams else "local"
        found.append(Span(rank, lane, op, (event.start - zero) / 1e3, (event.end - zero) / 1e3, event.name, part))
    return sorted(found, key=lambda span: span.start)


def _kind(op: Op) -> str:
    return "gemm" if isinstance(op, Gemm) else "sum" if isinstance(op, Reduce) else "local"


def _check_counts(rank: int, events: Sequence[GpuEvent], expected: Counter[str]) -> None:
    seen = Counter(what(event.name) for event in events)
    # A GEMM of cuBLAS may copy the matrix that it adds to, so there may be more local copies.
    if any(seen[kind] != expected[kind] for kind in ("gemm", "copy", "sum")) or seen["local"] < expected["local"]:
        listed = "; ".join(f"{KIND_NAMES[kind]} {expected[kind]}, seen {seen[kind]}" for kind in KIND_NAMES)
        names = ", ".join(sorted({event.name[:60] for event in events}))
        raise RuntimeError(f"rank {rank}: the profiler saw other events than the plan has: {listed}. They are: {names}")


class _Assignment(NamedTuple):
    """An assignment of the first events to streams.

    Attributes:
        cost: what :func:`_assign` minimises.
        wrong: the largest contradiction to the plan's order, us.
        at: for each stream, how many of its ops have run.
        last: for each stream, its last event.
        assigned: (stream, op, event, part of the op) of the last event.
        before: the assignment of the events before it.
    """

    cost: float
    wrong: float
    at: tuple[int, ...]
    last: tuple[GpuEvent | None, ...]
    assigned: tuple[int, Op, GpuEvent, str] | None = None
    before: _Assignment | None = None


def _assign(
    rank: int,
    issued: dict[int, int],
    chains: Sequence[Sequence[Op]],
    events: Sequence[GpuEvent],
    copies: Sequence[tuple[Op, GpuEvent]],
) -> list[tuple[int, Op, GpuEvent, str]]:
    """(stream, op, event, part) for each event that is no copy to a peer: the assignment of least cost.

    The cost is the time, us, by which an op begins before the op before it in its stream, or an op that it depends on,
    has ended, and by which it ends after a copy that depends on it has begun; plus 1 for each change of the profiler's
    stream; plus a little for each op that overtakes one issued earlier. No op comes before one that it depends on.
    """
    place = {op.id: (number, at) for number, chain in enumerate(chains) for at, op in enumerate(chain)}
    ended = {op.id: event.end for op, event in copies}
    begun = {dep: event.start for op, event in reversed(copies) for dep in op.deps}
    assignments = [_Assignment(0.0, 0.0, (0,) * len(chains), (None,) * len(chains))]
    for event in events:
        found: dict[tuple[Any, ...], _Assignment] = {}
        for assignment in assignments:
            for stream, chain in enumerate(chains):
                for op, part, step in _parts(chain, assignment.at[stream], event):
                    last = assignment.last[stream]
                    wrong = max(0.0, (last.end - event.start) / 1e3) if last else 0.0
                    if not part:
                        needed = [place[dep] for dep in op.deps if dep in place]
                        if any(assignment.at[number] <= at for number, at in needed):
                            continue
                        early = [ended[dep] - event.start for dep in op.deps if dep in ended]
                        # Ops before the last event of their stream had ended when that event began.
                        newest = [assignment.last[number] for number, at in needed if assignment.at[number] == at + 1]
                        early += [each.end - event.start for each in newest if each is not None]
                        late = event.end - begun.get(op.id, event.end)
                        wrong = max(wrong, max([late, *early]) / 1e3)
                    waiting = [chains[each][at] for each, at in enumerate(assignment.at) if at < len(chains[each])]
                    overtaken = sum(issued[other.id] < issued[op.id] for other in waiting)
                    cost = (
                        assignment.cost
                        + wrong
                        + (last is not None and last.stream != event.stream)
                        + OVERTAKING_COST * overtaken
                    )
                    at = (*assignment.at[:stream], assignment.at[stream] + step, *assignment.at[stream + 1 :])
                    lasts = (*assignment.last[:stream], event, *assignment.last[stream + 1 :])
                    key = (at, tuple(map(id, lasts)))
                    if key not in found or cost < found[key].cost:
                        assigned = (stream, op, event, part)
                        found[key] = _Assignment(cost, max(assignment.wrong, wrong), at, lasts, assigned, assignment)
        assignments = sorted(found.values(), key=lambda assignment: assignment.cost)[:BEAM_WIDTH]
    done = tuple(map(len, chains))
    best: _Assignment | None = next((assignment for assignment in assignments if assignment.at == done), None)
    if best is None:
        order = ", ".join(what(event.name) for event in events)
        expected = "; ".join(", ".join(_kind(op) for op in chain) for chain in chains)
        raise RuntimeError(f"rank {rank}: events {order} are in no order of the plan's streams: {expected}")
    if best.wrong > CLOCK_TOLERANCE_US:
        raise RuntimeError(
            f"rank {rank}: the events contradict the plan: in the best order an op begins {best.wrong:.1f} us before "
            "one that it follows has ended"
        )
    parts: list[tuple[int, Op, GpuEvent, str]] = []
    while best is not None and best.assigned is not None:
        parts.append(best.assigned)
        best = best.before
    return parts[::-1]


def _parts(chain: Sequence[Op], at: int, event: GpuEvent) -> list[tuple[Op, str, int]]:
    """What an event can be at a place of a stream: (op, part of it, number of ops that it completes)."""
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
    """The shift of each rank's clock, us, and the largest violation before the shifts.

    An op does not use the result of an op of another rank, such as a copy, before that op has ended. The shifts are the
    least ones with which this holds; they are 0 if it holds already. An offset of clocks that contradicts nothing stays
    unknown: between two ranks it is at most the pause between such an op and its user.

    Raises:
        RuntimeError: if no shifts make this hold.
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

    Attributes:
        total: from the rank's first event to the first event of the next replay.
        gemms: while it multiplies.
        copies: while it sends or pulls.
        both: while it does both.
        start, middle, end: without multiplication, before its first GEMM, between GEMMs, and after its last one. A sum
            is no multiplication.
    """

    total: float
    gemms: float
    copies: float
    both: float
    start: float
    middle: float
    end: float


class Gap(NamedTuple):
    """A pause, us: between two copies of a rank, or before its last GEMM."""

    us: float
    rank: int
    text: str


@dataclass(frozen=True)
class Trace:
    """A replay on all ranks, with its prediction.

    Attributes:
        plan: what was replayed.
        spans: of all ranks, us from the start of the first one.
        periods: of each rank, until the next replay began, us.
        alone: time of a replay without the profiler on the slowest rank, us.
        shifts, violation: as :func:`align` returns them; the spans are shifted.
        predicted: the simulator's timeline.
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
        """The trace of what :func:`record` returned on each rank."""
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
        """The simulator's events, shifted on each rank so that the first op begins when it was measured to begin."""
        begin = {rank: min(span.start for span in self.of_rank(rank)) for rank in range(self.plan.world_size)}
        events = [event for event in self.predicted.events if event.lane != FLAG_LANE]
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
        gemms = joined((span.start, span.end) for span in spans if isinstance(span.op, Gemm) and not span.part)
        copies = joined((span.start, span.end) for span in spans if _crosses(span.op))
        both = _length(gemms) + _length(copies) - _length(joined([*gemms, *copies]))
        begin, busy = spans[0].start, _length(gemms)
        start = gemms[0][0] - begin if gemms else total
        middle = gemms[-1][1] - gemms[0][0] - busy if gemms else 0.0
        end = max(0.0, begin + total - gemms[-1][1]) if gemms else 0.0
        return Figures(total, busy, _length(copies), both, start, middle, end)

    def gaps(self, count: int = 3) -> list[Gap]:
        """The longest pauses between copies of a rank, and the pause of each rank's last GEMM after what it needs."""
        found = []
        for rank in range(self.plan.world_size):
            copies = [span for span in self.of_rank(rank) if _crosses(span.op)]
            for one, other in pairwise(copies):
                found.append(
                    Gap(other.start - one.end, rank, f"between {span_title(one.op)} and {span_title(other.op)}")
                )
        found = sorted(found, reverse=True)[:count]
        at = {(span.rank, span.op.id): span for span in self.spans if not span.part}
        for rank in range(self.plan.world_size):
            gemms = [span for span in self.of_rank(rank) if isinstance(span.op, Gemm) and not span.part]
            if not gemms:
                continue
            last = gemms[-1]
            before = [(span.end, f"{span_title(span.op)} had ended") for span in gemms[:-1] if span.lane == last.lane]
            # The ops that it waits for: of other ranks, and pulls of its own rank.
            needed = [made for made, user in arrivals(self.plan) if (user.rank, user.id) == (rank, last.op.id)]
            needed += [op for op in self.plan.ops(rank) if op.id in last.op.deps and _pulls(op)]
            for op in needed:
                title = f"the copy {span_title(op)}" if isinstance(op, Copy) else span_title(op)
                before.append((at[op.rank, op.id].end, f"{title} on rank {op.rank} had ended"))
            if before:
                end, text = max(before)
                found.append(Gap(last.start - end, rank, f"until its last GEMM, {span_title(last.op)}, after {text}"))
        return found

    def tracks(self) -> tuple[Track, Track]:
        """The measured and the predicted times, for a page."""
        ranks = range(self.plan.world_size)
        alone = f"{self.alone:.1f} \u00b5s per replay on the slowest rank, without the profiler"
        predicted = (
            f"Predicted for {self.predicted.machine.name}: {self.predicted.time:.1f} \u00b5s per replay. On each rank "
            "the first op begins when it was measured to begin."
        )
        about = {"measured": f"Measured on {len(ranks)} GPUs: {alone}. Flags are not measured.", "predicted": predicted}
        # What a measured copy moved has arrived when the copy ends.
        measured, shifted = (
            tuple(Run(span.rank, span.lane, span.op, span.start, span.end, span.end) for span in spans if not span.part)
            for spans in (self.spans, self.prediction)
        )
        return (
            Track("measured", "us", about["measured"], measured),
            Track("predicted", "us", about["predicted"], shifted),
        )

    def to_perfetto(self) -> dict[str, Any]:
        """The trace for ui.perfetto.dev: the measured lanes of each rank, and below them the predicted ones."""
        slices: list[Slice] = []
        lanes: dict[str, None] = {}
        for predicted, spans in ((False, self.spans), (True, self.prediction)):
            prefix = "predicted " * predicted
            lanes |= dict.fromkeys(prefix + lane for lane in sorted({span.lane for span in spans}, key=lane_order))
            for span in spans:
                title = span_title(span.op) + (f", {span.part}" if span.part else "")
                category = "predicted" if predicted else span.op.kind.lower()
                facts = _facts(self.plan, span)
                slices.append(Slice(span.rank, prefix + span.lane, span.start, span.end, title, category, facts))
        at = {(span.rank, span.op.id): span for span in self.spans if not span.part}
        pairs = [(at[op.rank, op.id], at[user.rank, user.id]) for op, user in arrivals(self.plan)]
        arrows = [Arrow((made.rank, made.lane, made.end), (used.rank, used.lane, used.start)) for made, used in pairs]
        return to_trace(slices, arrows, list(lanes), self.plan.world_size, self.to_dict())

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


def _moved(span: Span, by: float) -> Span:
    return span._replace(start=span.start + by, end=span.end + by)


def _crosses(op: Op) -> bool:
    return isinstance(op, Copy) and link_of(op) is not None


def _pulls(op: Op) -> bool:
    return isinstance(op, Copy) and op.src.rank != op.rank


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def span_title(op: Op) -> str:
    return op_title(op) + (", local" if isinstance(op, Copy) and not _crosses(op) else "")


def _facts(plan: Plan, span: Span) -> dict[str, Any]:
    """What the viewer shows when a span is selected."""
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
