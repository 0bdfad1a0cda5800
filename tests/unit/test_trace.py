"""Traces: events become the ops they are, clocks are set, and figures, JSON and picture say what the events say."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from distgemm import GemmProblem, Plan, make_plan
from distgemm.measure.profiler import GpuEvent
from distgemm.measure.trace import Recording, Span, Trace, align, attribute, replay_of, what
from distgemm.measure.trace_figure import draw_trace
from distgemm.plan.ops import Copy, Gemm, Reduce, Signal, Wait, link_of
from distgemm.runtime.cuda.lowering import lower
from distgemm.runtime.executable import ExecutionConfig
from distgemm.simulator import FLAG_LANE, Timeline, arrivals, simulate
from distgemm.simulator.machine import Machine
from distgemm.viz.perfetto import save_trace

H200 = Machine.load("h200")
GATHER = "all_gather_1d_tiling_cd_rotating_a"
RING = "reduce_scatter_1d_tiling_a_rotating_c"
PAIRWISE = "reduce_scatter_1d_pairwise_a"
DATA = json.loads((Path(__file__).parent / "data" / "trace_4xh200.json").read_text())["rows"]
ALL_REDUCE = "all_reduce_1d_pairwise_a"
CASES = [
    *((GATHER, 4, 1), (GATHER, 4, 2), (GATHER, 8, 4), (RING, 4, 2), (RING, 8, 1)),
    *((PAIRWISE, 4, 1), (PAIRWISE, 4, 2), (ALL_REDUCE, 4, 1), (ALL_REDUCE, 4, 2)),
]
FLAG_KERNEL = "distgemm_flags"
NAMED = {"Gemm": "nvjet_sm90", "Copy": "Memcpy PtoP (Device -> Device)", "Reduce": "distgemm_sum"}
EPOCH = 1_760_000_000_000_000_000
PERIOD = 2000.0


def planned(name: str = GATHER, size: int = 4, chunks: int = 1, **options: str) -> Plan:
    return make_plan(GemmProblem(8192, 1280 * size, 8192), name, size, chunks=chunks, sync="barrier", **options)


def events_of(timeline: Timeline, rank: int, offset: float = 0.0, gemm_streams: int = 2) -> list[GpuEvent]:
    """The simulator's events of a rank, as a profiler would have seen them; clock ahead by so many us."""
    streams = {
        op.id: action.stream
        for action in lower(timeline.plan, rank, ExecutionConfig(gemm_streams=gemm_streams))
        for op in action.ops
    }
    found = []
    for event in timeline.events:
        if event.rank == rank and event.lane != FLAG_LANE:
            stream = 20 + streams[event.op.id]
            start, end = (EPOCH + round((time + offset) * 1e3) for time in (event.start, event.end))
            local = isinstance(event.op, Copy) and link_of(event.op) is None
            name = "Memcpy DtoD (Device -> Device)" if local else NAMED[event.op.kind]
            found.append(GpuEvent(name, stream, start, end))
    return found


def recorded(
    timeline: Timeline, offsets: dict[int, float] | None = None, replays: int = 3, gemm_streams: int = 2
) -> list[Recording]:
    """What the ranks would have recorded."""
    found = []
    for rank in range(timeline.plan.world_size):
        events = [
            event
            for replay in range(replays)
            for event in events_of(timeline, rank, replay * PERIOD + (offsets or {}).get(rank, 0.0), gemm_streams)
        ]
        found.append(Recording(events, replays, timeline.time))
    return found


def traced(
    name: str = GATHER, size: int = 4, chunks: int = 1, offsets: dict[int, float] | None = None, **options: str
) -> Trace:
    timeline = simulate(planned(name, size, chunks, **options), H200)
    return Trace.of(timeline.plan, 2, recorded(timeline, offsets), timeline)


# --- attribution ----------------------------------------------------------------------------------------


def expected_starts(timeline: Timeline, rank: int, events: list[GpuEvent]) -> dict[int, int]:
    """When each op of a rank begins, ns from the first event."""
    zero = min(event.start for event in events) - EPOCH
    shown = (event for event in timeline.events if event.rank == rank and event.lane != FLAG_LANE)
    return {event.op.id: round(event.start * 1e3) - zero for event in shown}


@pytest.mark.parametrize(("name", "size", "chunks"), CASES)
def test_events_become_their_ops(name: str, size: int, chunks: int) -> None:
    timeline = simulate(planned(name, size, chunks), H200)
    for rank in range(size):
        events = events_of(timeline, rank)
        spans = attribute(timeline.plan, rank, 2, events)
        expected = expected_starts(timeline, rank, events)
        assert {span.op.id: round(span.start * 1e3) for span in spans} == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("gemm_streams", [1, 2])
@pytest.mark.parametrize(
    ("name", "chunks", "options", "lane"),
    [
        (PAIRWISE, 1, {}, "local"),
        (PAIRWISE, 2, {}, "sums"),
        (ALL_REDUCE, 2, {}, "sums"),
        (RING, 2, {"final_add": "kernel"}, "sums"),
        ("all_reduce_1d_tiling_a_rotating_c", 2, {"final_add": "kernel"}, "sums"),
    ],
)
def test_lane_of_sums(name: str, chunks: int, options: dict[str, str], lane: str, gemm_streams: int) -> None:
    """Sums and copies within the rank have a lane of their own where they have a stream of their own."""
    timeline = simulate(planned(name, 4, chunks, **options), H200, gemm_streams=gemm_streams)
    events = events_of(timeline, 0, gemm_streams=gemm_streams)
    spans = attribute(timeline.plan, 0, gemm_streams, events)
    expected = expected_starts(timeline, 0, events)
    assert {span.op.id: round(span.start * 1e3) for span in spans} == pytest.approx(expected, abs=2)
    sums = [span for span in spans if isinstance(span.op, Reduce) or (isinstance(span.op, Copy) and _local(span.op))]
    assert sums and {span.lane for span in sums} == {lane}
    assert {span.lane for span in spans if span not in sums} == {"copy", *(f"gemm {at}" for at in range(gemm_streams))}


DURATIONS = {"Gemm": 60.0, "Copy": 45.0, "Reduce": 13.0}


def scheduled(plan: Plan, gemm_streams: int) -> list[dict[int, GpuEvent]]:
    """What the GPU of each rank did, by op: streams first in, first out, in the order of the plan's lists."""
    streams = [
        {
            op.id: action.stream
            for action in lower(plan, rank, ExecutionConfig(gemm_streams=gemm_streams))
            for op in action.ops
        }
        for rank in range(plan.world_size)
    ]
    ended: dict[tuple[int, int], float] = {}
    free: dict[tuple[int, int], float] = {}
    signalled: dict[tuple[int, int], float] = {}
    found: list[dict[int, GpuEvent]] = [{} for _ in plan.rank_ops]
    # What is signalled has a smaller round than what waits for it.
    for op in sorted((op for ops in plan.rank_ops for op in ops), key=lambda op: op.round):
        start = max((ended[op.rank, dep] for dep in op.deps), default=0.0)
        if isinstance(op, Wait):
            start = max(start, signalled[op.flag[:2]] + 5.0)
        elif isinstance(op, Signal):
            signalled[op.flag[:2]] = start
        ended[op.rank, op.id] = start
        if op.kind in DURATIONS:
            stream = streams[op.rank][op.id]
            start = max(start, free.get((op.rank, stream), 0.0) + 1.0)
            local = isinstance(op, Copy) and link_of(op) is None
            end = start + (7.0 if local else DURATIONS[op.kind])
            free[op.rank, stream] = ended[op.rank, op.id] = end
            name = "Memcpy DtoD (Device -> Device)" if local else NAMED[op.kind]
            found[op.rank][op.id] = GpuEvent(name, 20 + stream, EPOCH + round(start * 1e3), EPOCH + round(end * 1e3))
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("gemm_streams", [1, 2])
@pytest.mark.parametrize("mechanism", ["push", "pull", "store"])
@pytest.mark.parametrize(("name", "size", "chunks"), CASES)
def test_events_of_every_mechanism_become_their_ops(
    name: str, size: int, chunks: int, mechanism: str, gemm_streams: int
) -> None:
    """Copies from shards, for others to pull, have the lane of local copies, and come before what the rank pulls."""
    plan = planned(name, size, chunks, mechanism=mechanism)
    for rank, seen in enumerate(scheduled(plan, gemm_streams)):
        events = sorted(seen.values(), key=lambda event: event.start)
        spans = attribute(plan, rank, gemm_streams, events)
        zero = events[0].start
        assert {span.op.id: span.start for span in spans} == pytest.approx(
            {op: (event.start - zero) / 1e3 for op, event in seen.items()}
        )
        copies = [(span, span.op) for span in spans if isinstance(span.op, Copy)]
        assert {span.lane for span in spans if isinstance(span.op, Gemm)} == {
            f"gemm {at}" for at in range(gemm_streams)
        }
        crossing = [(span, op) for span, op in copies if link_of(op)]
        assert {span.lane for span, _ in crossing} <= {"copy"}
        pulled = {span.op.id for span, op in crossing if link_of(op) == (op.src.rank, rank)}
        assert len(pulled) == (len(crossing) if mechanism == "pull" else 0)
        staged = [span for span, op in copies if not link_of(op) and op.src.buffer == "A"]
        assert len(staged) == (chunks if mechanism == "pull" and name == GATHER else 0)
        assert {span.lane for span in staged} <= {"local"}
        assert all(one.end <= other.start for one in staged for other, _ in crossing)


@pytest.mark.parametrize(
    ("name", "mechanism"), [(GATHER, "pull"), (RING, "pull"), (RING, "store"), (PAIRWISE, "store")]
)
def test_traces_of_other_mechanisms(name: str, mechanism: str, tmp_path: Path) -> None:
    """Clocks are set by what ranks wait for; figures, gaps, JSON and picture are those of the events."""
    exact = traced(name, 4, 2, mechanism=mechanism)
    assert exact.violation == 0
    late = traced(name, 4, 2, offsets={1: -500.0}, mechanism=mechanism)
    at = {(span.rank, span.op.id): span for span in late.spans}
    assert late.violation > 300
    assert all(at[made.rank, made.id].end <= at[user.rank, user.id].start + 1e-3 for made, user in arrivals(late.plan))
    for rank in range(4):
        measured, predicted = exact.figures(rank), exact.figures(rank, predicted=True)
        assert measured[1:4] == pytest.approx(predicted[1:4], abs=0.01)
        assert (measured.copies > 0) == (mechanism == "pull")
    titles = [gap.text for gap in exact.gaps()]
    if mechanism == "pull":
        assert sum(" from rank " in title and title.startswith("between") for title in titles) == 3
    else:
        assert not [title for title in titles if title.startswith("between")]
    last = [title for title in titles if title.startswith("until its last GEMM")]
    assert len(last) == 4
    if name == GATHER:
        # The pull on its own rank.
        assert all(f"from rank {(rank - 1) % 4} on rank {rank} had ended" in title for rank, title in enumerate(last))
    events = exact.to_perfetto()["traceEvents"]
    assert sum(event["ph"] == "s" for event in events) == len(arrivals(exact.plan)) > 0
    pytest.importorskip("matplotlib")
    draw_trace(exact, tmp_path / "trace.svg")


def _local(op: Copy) -> bool:
    return op.src.rank == op.dst.rank


@pytest.mark.parametrize("name", [GATHER, RING, PAIRWISE])
def test_waits_by_a_kernel_are_passed_over(name: str) -> None:
    """A kernel that waits before each GEMM, one at the end, and one that counts replays, all on the GEMMs' stream."""
    timeline = simulate(planned(name), H200, gemm_streams=1)
    exact = recorded(timeline, gemm_streams=1)[0]
    waits = [
        GpuEvent(FLAG_KERNEL, event.stream, event.start - 2000, event.start - 500)
        for event in exact.events
        if event.name == NAMED["Gemm"]
    ]
    begin, end = min(event.start for event in exact.events), max(event.end for event in exact.events)
    counts = GpuEvent("void at::native::vectorized_elementwise_kernel<4>", 21, begin - 4000, begin - 3000)
    leaves = GpuEvent(FLAG_KERNEL, 21, end + 500, end + 2000)
    events, period = replay_of(exact._replace(events=[counts, *waits, *exact.events, leaves]))
    assert (events, period) == replay_of(exact)
    again = events_of(timeline, 0, gemm_streams=1)
    alone = attribute(timeline.plan, 0, 1, again)
    assert attribute(timeline.plan, 0, 1, [counts, *waits[: len(waits) // 3], *again, leaves]) == alone
    assert {span.op.kind for span in alone} <= {"Gemm", "Copy", "Reduce"}


def test_a_sum_follows_its_own_gemm() -> None:
    """It lies on another stream than the GEMM, and no copy is between them: only the dependency says so."""
    timeline = simulate(planned(PAIRWISE, 4, 2), H200)
    events = sorted(events_of(timeline, 0), key=lambda event: event.start)
    spans = attribute(timeline.plan, 0, 2, events)
    last, total = events[-1], spans[-1].op
    assert isinstance(total, Reduce)
    # The last one of its stream.
    (gemm,) = (events[at] for at, span in enumerate(spans) if isinstance(span.op, Gemm) and span.op.id in total.deps)
    others = [event for event in events if event not in (gemm, last)]
    late = gemm._replace(end=last.start + 90_000)
    with pytest.raises(RuntimeError, match=r"an op begins 90\.0 us before one that it follows has ended"):
        attribute(timeline.plan, 0, 2, [*others, late, last])
    with pytest.raises(RuntimeError, match="contradict the plan"):  # the GEMM begins behind the sum
        attribute(timeline.plan, 0, 2, [*others, gemm._replace(start=last.end, end=last.end + 1000), last])


@pytest.mark.parametrize("row", DATA, ids=lambda row: row["schedule"])
def test_measured_events(row: dict[str, Any]) -> None:
    """Of 4 H200s: every op once, in lanes that do not overlap, after what it depends on."""
    problem = GemmProblem(row["m"], row["n"], row["k"])
    plan = make_plan(problem, row["schedule"], 4, chunks=row["chunks"], sync="barrier")
    spans = attribute(plan, 0, 2, [GpuEvent(*event) for event in row["events"]])
    ops = {op.id for op in plan.ops(0) if isinstance(op, (Gemm, Copy, Reduce))}
    whole = {span.op.id: span for span in spans if not span.part}
    assert set(whole) == ops and len(spans) - len(ops) == sum(bool(span.part) for span in spans)
    for lane in {span.lane for span in spans}:
        for one, other in itertools.pairwise(span for span in spans if span.lane == lane):
            assert one.end <= other.start
    for span in whole.values():
        assert all(span.start >= whole[dep].end for dep in span.op.deps if dep in whole), span
        before = [each for each in spans if each.op.id == span.op.id and each.part]
        assert all(each.end <= span.start and each.lane == span.lane for each in before)


def test_measured_streams_may_swap() -> None:
    """The second GEMM on the second stream waits for nothing, so it begins before the one issued before it."""
    row = next(row for row in DATA if row["schedule"] == PAIRWISE)
    plan = make_plan(GemmProblem(row["m"], row["n"], row["k"]), PAIRWISE, 4, sync="barrier")
    spans = attribute(plan, 0, 2, [GpuEvent(*event) for event in row["events"]])
    assert [s.op.iteration for s in spans if isinstance(s.op, Gemm) and not s.part] == [0, 1, 3, 2]
    assert [span.part for span in spans if span.part] == ["memset before"] * 4


@pytest.mark.parametrize("row", DATA, ids=lambda row: row["schedule"])
def test_ops_are_found_without_streams(row: dict[str, Any]) -> None:
    """The order within a stream, and what an op depends on, say which is which where the profiler's streams do not."""
    problem = GemmProblem(row["m"], row["n"], row["k"])
    plan = make_plan(problem, row["schedule"], 4, chunks=row["chunks"], sync="barrier")
    events = [GpuEvent(*event) for event in row["events"]]
    known = [span for span in attribute(plan, 0, 2, events) if not span.part]
    found = [span for span in attribute(plan, 0, 2, [event._replace(stream=1) for event in events]) if not span.part]
    assert [span.op.id for span in found] == [span.op.id for span in known]


def test_order_within_a_stream_is_kept() -> None:
    """GEMMs that overlap are on two streams, whatever the profiler says."""
    timeline = simulate(planned(GATHER, 4, 2), H200)
    events = events_of(timeline, 0)
    gemms = [at for at, event in enumerate(events) if event.name == NAMED["Gemm"]]
    events[gemms[1]] = events[gemms[1]]._replace(stream=events[gemms[0]].stream)
    assert events[gemms[1]].start < events[gemms[0]].end
    lanes = [span.lane for span in attribute(timeline.plan, 0, 2, events) if isinstance(span.op, Gemm)]
    assert lanes == ["gemm 0", "gemm 1"] * 4
    for gemm in gemms:
        events[gemm] = events[gemm]._replace(end=events[gemm].end + 400_000)
    with pytest.raises(RuntimeError, match="contradict the plan"):
        attribute(timeline.plan, 0, 2, events)


def test_kinds_of_events() -> None:
    kinds = {
        "Memcpy PtoP (Device -> Device)": "copy",
        "Memcpy DtoD (Device -> Device)": "local",
        "Memcpy DtoH (Device -> Pinned)": "",
        "Memset (Unknown)": "memset",
        "distgemm_sum": "sum",
        "distgemm_gemm": "gemm",
        FLAG_KERNEL: "",
        "void at::native::vectorized_elementwise_kernel<4>": "",
        "ncclDevKernel_AllReduce_Sum_f32": "",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel": "gemm",
        "nvjet_sm90_tst_128x160_64x5_2x1_v_bz_TNT": "gemm",
        "void cublasLt::splitKreduce_kernel<32>": "tail",
    }
    assert {name: what(name) for name in kinds} == kinds


def test_missing_and_strange_events_are_named() -> None:
    timeline = simulate(planned(), H200)
    events = events_of(timeline, 1)
    with pytest.raises(RuntimeError, match=r"rank 1: .*GEMM kernels 4, seen 3; copies to peers 3, seen 3.*nvjet_sm90"):
        attribute(timeline.plan, 1, 2, [event for event in events if event is not events[0]])
    with pytest.raises(RuntimeError, match=r"copies to peers 3, seen 4"):
        attribute(timeline.plan, 1, 2, [*events, next(event for event in events if "PtoP" in event.name)])
    # A GEMM of the ring that ends behind the copy that sends its result.
    ring = simulate(planned(RING, 4, 2), H200)
    events = events_of(ring, 0)
    copy = next(at for at, event in enumerate(events) if "PtoP" in event.name)
    early = events[0].start
    events[copy] = events[copy]._replace(start=early, end=early + 1000)
    with pytest.raises(RuntimeError, match=r"rank 0: the events contradict the plan: .* begins \d+\.\d us before"):
        attribute(ring.plan, 0, 2, events)
    with pytest.raises(ValueError, match="a single product, got 2 batches"):
        attribute(make_plan(GemmProblem(8, 8, 8, 2), GATHER, 2), 0, 2, [])


def test_middle_replay() -> None:
    timeline = simulate(planned(), H200)
    recording = recorded(timeline, replays=5)[0]
    shuffled = Recording([*recording.events[::-1], GpuEvent("Memcpy DtoH (x)", 1, EPOCH, EPOCH + 9)], 5, 1.0)
    events, period = replay_of(shuffled)
    assert events == sorted(recording.events, key=lambda event: event.start)[14:21]
    assert period == pytest.approx(PERIOD)
    with pytest.raises(RuntimeError, match=r"saw 34 events of 5 replays.*'copy': 14.*run it again"):
        replay_of(Recording([event for event in recording.events if event.start != events[1].start], 5, 1.0))


def test_a_replay_alone_takes_as_long_as_on_the_slowest_rank() -> None:
    timeline = simulate(planned(), H200)
    recordings = [one._replace(alone_us=us) for one, us in zip(recorded(timeline), (3.0, 5.0, 2.0, 4.0), strict=True)]
    assert Trace.of(timeline.plan, 2, recordings, timeline).alone == 5.0


# --- clocks ---------------------------------------------------------------------------------------------


def spans_of(timeline: Timeline) -> list[Span]:
    return [Span(*event) for event in timeline.events if event.lane != FLAG_LANE]


def test_right_clocks_are_left_alone() -> None:
    timeline = simulate(planned(), H200)
    assert align(timeline.plan, spans_of(timeline)) == ((0.0,) * 4, 0.0)


def test_least_shifts() -> None:
    """Rank 2 is set forward by just so much that nothing is used before it has come; and those that depend on it."""
    timeline = simulate(planned(), H200)
    spans = [
        span._replace(start=span.start - 60.0 * (span.rank == 2), end=span.end - 60.0 * (span.rank == 2))
        for span in spans_of(timeline)
    ]
    shifts, violation = align(timeline.plan, spans)
    assert shifts[0] == shifts[1] == shifts[3] == 0 and shifts[2] == violation > 0
    at = {(span.rank, span.op.id): span for span in spans}
    slack = [
        at[user.rank, user.id].start + shifts[user.rank] - at[copy.rank, copy.id].end - shifts[copy.rank]
        for copy, user in arrivals(timeline.plan)
    ]
    assert min(slack) == pytest.approx(0, abs=1e-6)


def test_impossible_events_are_refused() -> None:
    """Every rank uses what came before its sender has sent it: no shift of clocks helps."""
    timeline = simulate(planned(), H200)
    spans = [span._replace(start=0.0) if isinstance(span.op, Gemm) else span for span in spans_of(timeline)]
    with pytest.raises(RuntimeError, match="no shift of clocks"):
        align(timeline.plan, spans)


def test_shifts_survive_into_the_trace() -> None:
    exact, late = traced(), traced(offsets={1: -500.0})
    assert exact.violation == 0 and late.violation > 400
    at = {(span.rank, span.op.id): span for span in late.spans}
    for copy, user in arrivals(late.plan):
        assert at[copy.rank, copy.id].end <= at[user.rank, user.id].start + 1e-3
    assert min(span.start for span in late.spans) == 0


# --- figures --------------------------------------------------------------------------------------------


def test_figures_of_a_perfect_prediction() -> None:
    """Events that are the prediction have the prediction's figures, but for the total."""
    trace = traced(RING, 4, 2)
    for rank in range(4):
        measured, predicted = trace.figures(rank), trace.figures(rank, predicted=True)
        assert measured.total == pytest.approx(PERIOD) and predicted.total == trace.predicted.time
        assert measured[1:6] == pytest.approx(predicted[1:6], abs=0.01)
        assert measured.start + measured.gemms + measured.middle + measured.end == pytest.approx(PERIOD)
        assert 0 < measured.both <= min(measured.gemms, measured.copies)
        assert measured.gemms == pytest.approx(trace.predicted.busy(rank, Gemm), abs=0.01)


def test_what_comes_before_the_first_gemm_is_exposed() -> None:
    trace = traced(GATHER, 4, 1)
    spans = [
        span._replace(start=span.start + 40.0, end=span.end + 40.0) if isinstance(span.op, Gemm) else span
        for span in trace.spans
    ]
    later, before = dataclasses.replace(trace, spans=tuple(spans)).figures(0), trace.figures(0)
    copy = next(span for span in trace.of_rank(0) if isinstance(span.op, Copy))
    assert before.start == 0 and later.start == pytest.approx(40.0 - copy.start)
    assert later.end == pytest.approx(before.end - 40.0 + copy.start)


def test_gaps_are_the_longest() -> None:
    trace = traced(RING, 4, 4)
    gaps = trace.gaps(count=2)
    assert len(gaps) == 2 + 4
    between = [
        other.start - one.end
        for rank in range(4)
        for one, other in itertools.pairwise(s for s in trace.of_rank(rank) if s.lane == "copy")
    ]
    assert [gap.us for gap in gaps[:2]] == sorted(between)[:-3:-1] and min(between) < max(between) - 1
    last = {gap.rank: gap for gap in gaps[2:]}
    for rank in range(4):
        gemm = max((s for s in trace.of_rank(rank) if isinstance(s.op, Gemm)), key=lambda s: s.start)
        (copy,) = (copy for copy, user in arrivals(trace.plan) if (user.rank, user.id) == (rank, gemm.op.id))
        sent = next(s for s in trace.of_rank(copy.rank) if s.op is copy)
        before = max(s.end for s in trace.of_rank(rank) if s.lane == gemm.lane and s is not gemm)
        assert last[rank].us == pytest.approx(gemm.start - max(sent.end, before))
        assert (f"on rank {copy.rank} had ended" in last[rank].text) == (sent.end > before)


@pytest.mark.parametrize(("chunks", "sums"), [(1, "local"), (2, "sums")])
def test_perfetto(tmp_path: Path, chunks: int, sums: str) -> None:
    trace = traced(PAIRWISE, 4, chunks)
    save_trace(trace.to_perfetto(), tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    events = found["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [name for (pid, _), name in sorted(names.items()) if pid == 2] == [
        *("gemm 0", "gemm 1", "copy", sums),
        *("predicted gemm 0", "predicted gemm 1", "predicted copy", "predicted local"),
    ]
    slices = [event for event in events if event["ph"] == "X"]
    ops = sum(isinstance(op, (Gemm, Copy, Reduce)) for each in trace.plan.rank_ops for op in each)
    assert len(slices) == 2 * ops
    for event in slices:
        assert names[event["pid"], event["tid"]].startswith("predicted") == (event["cat"] == "predicted")
        assert ("kernel" in event["args"]) == (event["cat"] != "predicted")
    first = {
        (predicted, rank): min(e["ts"] for e in slices if e["pid"] == rank and (e["cat"] == "predicted") == predicted)
        for predicted in (False, True)
        for rank in range(4)
    }
    assert all(first[True, rank] == pytest.approx(first[False, rank], abs=0.002) for rank in range(4))
    copy = next(event for event in slices if event["cat"] == "copy")
    assert copy["args"]["bytes"] == 2048 // chunks * 5120 * 2
    assert copy["args"]["GB/s"] == pytest.approx(copy["args"]["bytes"] / copy["dur"] / 1e3, rel=0.01)
    gemm = next(event for event in slices if event["cat"] == "gemm")
    assert gemm["args"]["flop"] == 2 * 2048 // chunks * 5120 * 2048
    assert gemm["args"]["TFLOP/s"] == pytest.approx(gemm["args"]["flop"] / gemm["dur"] / 1e6, rel=0.01)
    reduce = next(event for event in slices if event["cat"] == "reduce")
    assert reduce["args"]["bytes"] == 5 * 2048 // chunks * 5120 * 2  # four parts and their sum
    assert reduce["args"]["GB/s"] == pytest.approx(reduce["args"]["bytes"] / reduce["dur"] / 1e3, rel=0.01)
    flows = [(event["ph"], event["id"]) for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * len(arrivals(trace.plan)) == 2 * len(set(flows)) // 2
    assert found["otherData"]["clock_violation_us"] == 0


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = traced(RING, 4, 2)
    for suffix in ("svg", "png"):
        draw_trace(trace, tmp_path / f"trace.{suffix}")
    svg = (tmp_path / "trace.svg").read_text()
    texts = [re.sub(r"<[^>]*>", "", text).strip() for text in re.findall(r"<text[^>]*>.*?</text>", svg, re.S)]
    assert [texts.count(f"rank {rank}") for rank in range(4)] == [1] * 4
    assert texts.count("gemm 0") == texts.count("predicted gemm 0") == texts.count("predicted copy") == 4
    assert any(text.startswith("Measured:") for text in texts)
    with pytest.raises(ValueError, match=r"a \.svg or \.png file"):
        draw_trace(trace, tmp_path / "trace.gif")
