"""When each op of a plan would run: a discrete-event simulation of ``plan.ops`` on a :class:`Machine`.

Nothing but the ops is looked at: no schedule, no name. Every rank has lanes that work off their ops in the order
of the rank's list: GEMM gemm_streams, copy streams, the network, and one for local sums and copies.

* A GEMM is a number of output tiles. They go to the SMs in the order in which the GEMMs start, each to the SM
  that is free first, so that a GEMM on a second branch fills the SMs that the last wave of the one before
  leaves idle. A power limit on the whole GPU holds the sum back. One that stores into another rank's slot does not
  end before the ports of both ranks have carried what GEMMs have stored through them so far; it has arrived one
  latency later.
* A copy occupies a copy engine of the rank that executes it, and shares the other rank's port with other copies
  through it: where it is pushed, the receiver's; where it is pulled, that of its source. Copies from a rank's own
  shards, for others to pull, take their turn with these.
* Signals and waits take their latency and occupy nothing.

Times are microseconds.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from distgemm.plan.ops import Barrier, Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, box_extents, box_size, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.simulator.machine import GemmCost, Link, Machine

__all__ = ["FLAGS", "Event", "Timeline", "arrivals", "op_title", "predict_unfused", "simulate"]

FLAGS = "flags"
"""The lane of signals, waits and barriers: they overlap, and occupy nothing."""

OUTWARD = ("copy", "network")
"""How lanes of copies to and from other ranks begin."""

Hook = Callable[[Gemm], float]
Interval = tuple[float, float]

REPLAYS, MANY, MEAN = 4, 12, 8
"""So many replays in a row, of which the last counts. Where it differs from the one before, because the ranks have not
fallen into step, so many, of which the last MEAN are averaged."""
SETTLED = 1e-3
"""Share by which replays in a row may differ."""


class Event(NamedTuple):
    """An op and when it ran.

    lane:  "gemm 0", "gemm 1", ..., "copy", "network", "local" or "flags"
    start: us from the end of the replay before, on the rank that ended it first: the first tile of a GEMM starts,
           the copy engine starts
    end:   us; what a copy moved or a GEMM stored has arrived, and can be signalled, one latency of its link later
    """

    rank: int
    lane: str
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A predicted replay of a plan. Times are us.

    events:      every op of every rank, by rank and start; of the last of several replays in a row
    time:        what each replay takes in a row of replays; their mean, where they differ
    cold:        a single replay, all ranks starting at once
    gemm_alone:  the whole local GEMM of the rank with most of it, in a replay of its own
    copies_alone: all copies between ranks, and what GEMMs store, in a replay of their own
    critical:    how the time of the critical path divides: "compute", "copies", "latency"; adds up to ``time``
    head:        until the slowest rank's first GEMM, without what passes between replays: exposed
    tail:        what follows its last GEMM, or the last that it receives if copies bound the plan: exposed
    """

    plan: Plan
    machine: Machine
    events: tuple[Event, ...]
    time: float
    cold: float
    gemm_alone: float
    copies_alone: float
    critical: dict[str, float]
    head: float
    tail: float

    @property
    def roof(self) -> float:
        """The larger of the whole local GEMM alone and the copies alone, us."""
        return max(self.gemm_alone, self.copies_alone)

    @property
    def efficiency(self) -> float:
        """roof / time"""
        return self.roof / self.time if self.time else 1.0

    @property
    def bound(self) -> str:
        """What most of the critical path consists of: "compute", "copies" or "latency"."""
        return max(self.critical, key=lambda what: self.critical[what])

    @property
    def end(self) -> float:
        """When the last op ends, us."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def link_busy(self) -> dict[tuple[int, int], float]:
        """us for which each link (src, dst) carries a copy, or what a GEMM stores."""
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for event in self.events:
            link = link_of(event.op)
            if link is not None:
                busy[link] += self._carried(event, link)
        return dict(sorted(busy.items()))

    @cached_property
    def hidden(self) -> float:
        """Share of the time of copies between ranks during which their receiver multiplies; 1 without copies. What a
        GEMM stores counts as a copy that is spread over the GEMM."""
        gemms: dict[int, list[Interval]] = defaultdict(list)
        for event in self.events:
            if isinstance(event.op, Gemm):
                gemms[event.rank].append((event.start, event.end))
        busy = {rank: merged(intervals) for rank, intervals in gemms.items()}
        total = covered = 0.0
        for event in self.events:
            link = link_of(event.op)
            if link is None:
                continue
            total += self._carried(event, link)
            both = _within(busy.get(link[1], []), event.start, event.end)
            if isinstance(event.op, Copy):
                covered += both
            elif both:
                covered += self._carried(event, link) * both / (event.end - event.start)
        return covered / total if total else 1.0

    def _carried(self, event: Event, link: tuple[int, int]) -> float:
        """us for which a link carries what an op moves over it."""
        if isinstance(event.op, Gemm):
            return _stored_us(self.plan, self.machine, event.op, link)
        return event.end - event.start

    def busy(self, rank: int, kind: str) -> float:
        """us for which a rank has an op of this kind ("Gemm", "Copy", "Reduce") running."""
        found = [(e.start, e.end) for e in self.events if e.rank == rank and e.op.kind == kind]
        return sum(end - start for start, end in merged(found))

    def summary(self) -> str:
        """Time, efficiency and what bounds it, in a few lines."""
        parts = ", ".join(f"{what} {time:.0f} us" for what, time in self.critical.items())
        busiest = max(self.link_busy.values(), default=0.0)
        lines = [
            f"{self.plan.schedule}: {self.plan.world_size} ranks on {self.machine.name}",
            f"time {self.time:.1f} us per replay ({self.cold:.1f} us for a single one)",
            f"efficiency {100 * self.efficiency:.0f} % of the roof {self.roof:.1f} us "
            f"(local GEMM alone {self.gemm_alone:.1f}, copies alone {self.copies_alone:.1f})",
            f"bound by {self.bound}: critical path {parts}",
            f"exposed head {self.head:.0f} us, exposed tail {self.tail:.0f} us; "
            f"{100 * self.hidden:.0f} % of the communication hidden behind GEMMs",
            f"busiest link carries copies for {busiest:.0f} us",
        ]
        if self.time > 1.1 * self.cold:
            advice = '; try sync="barrier"' if self.plan.sync != "barrier" else ""
            lines.append(f"in a row of replays the ranks fall out of step and meet at the same ports{advice}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The figures of :meth:`summary`, for JSON."""
        return {
            "schedule": self.plan.schedule,
            "world_size": self.plan.world_size,
            "machine": self.machine.name,
            "time_us": self.time,
            "cold_us": self.cold,
            "efficiency": self.efficiency,
            "roof_us": self.roof,
            "gemm_alone_us": self.gemm_alone,
            "copies_alone_us": self.copies_alone,
            "bound": self.bound,
            "critical_path_us": dict(self.critical),
            "exposed_head_us": self.head,
            "exposed_tail_us": self.tail,
            "hidden_share": self.hidden,
            "link_busy_us": [[src, dst, time] for (src, dst), time in self.link_busy.items()],
        }

    @cached_property
    def flows(self) -> tuple[tuple[Event, Event], ...]:
        """(op, op on another rank that uses what it made) as :func:`arrivals` has them, by the latter's start."""
        at = {(event.rank, event.op.id): event for event in self.events}
        found = [(at[copy.rank, copy.id], at[user.rank, user.id]) for copy, user in arrivals(self.plan)]
        return tuple(sorted(found, key=lambda pair: (pair[1].rank, pair[1].start)))

    def to_perfetto(self) -> dict[str, Any]:
        """Chrome trace JSON for ui.perfetto.dev: a process per rank, a thread per lane, arrows from copies, and other
        ops for another rank, to what uses them. ``json.dump`` writes it."""
        lanes = sorted({event.lane for event in self.events if event.lane != FLAGS})
        thread = {lane: number for number, lane in enumerate(lanes)}
        trace: list[dict[str, Any]] = []
        for rank in range(self.plan.world_size):
            trace.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
            trace.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
            for lane in lanes:
                named = {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread[lane], "args": {"name": lane}}
                trace.append(named)
        for event in self.events:
            if event.lane == FLAGS:
                continue
            op = event.op
            facts: dict[str, Any] = {"op": op.describe(), "iteration": op.iteration, "deps": list(op.deps)}
            if isinstance(op, Copy):
                facts["bytes"] = _copy_bytes(self.plan, op)
            span = {"ts": event.start, "dur": event.end - event.start, "pid": event.rank, "tid": thread[event.lane]}
            trace.append({"ph": "X", "name": op_title(op), "cat": op.kind.lower(), **span, "args": facts})
        for number, (copy, user) in enumerate(self.flows):
            flow = {"cat": "copy", "name": "arrives for", "id": number}
            trace.append({"ph": "s", **flow, "pid": copy.rank, "tid": thread[copy.lane], "ts": copy.end})
            trace.append({"ph": "f", "bp": "e", **flow, "pid": user.rank, "tid": thread[user.lane], "ts": user.start})
        return {"traceEvents": trace, "displayTimeUnit": "ns", "otherData": self.to_dict()}

    def save_perfetto(self, path: str) -> None:
        """Write :meth:`to_perfetto` to a file."""
        with open(path, "w") as file:
            json.dump(self.to_perfetto(), file)


def arrivals(plan: Plan) -> tuple[tuple[Op, Op], ...]:
    """(op, op on another rank that uses what it made) for all that is signalled, but for credits.

    Pushed: a copy and what uses the tile that it brought. Pulled: what wrote a slot, such as a local copy from a shard,
    and the copy that takes the tile from there. Stored: a GEMM, and what adds to the partial sum.
    """
    made: dict[tuple[int, int], Op] = {}
    for ops in plan.rank_ops:
        makers = {op.id: op for op in ops if isinstance(op, (Copy, Gemm, Reduce))}
        for op in ops:
            if isinstance(op, Signal) and not op.flag.credit:
                made.update({op.flag[:2]: makers[dep] for dep in op.deps if dep in makers})
    found = []
    for ops in plan.rank_ops:
        waits = {op.id: op.flag[:2] for op in ops if isinstance(op, Wait) and not op.flag.credit}
        for op in ops:
            if isinstance(op, (Gemm, Copy, Reduce)):
                found += [(made[waits[dep]], op) for dep in op.deps if waits.get(dep) in made]
    return tuple(found)


def simulate(
    plan: Plan,
    machine: Machine | str,
    *,
    gemm_streams: int | None = None,
    copy_streams: int = 1,
    gemm_efficiency_hook: Hook | None = None,
) -> Timeline:
    """Predict when each op of a plan runs on a machine.

    machine:      or its name, or the path of its .json file, as :meth:`Machine.load` takes them
    gemm_streams:     GEMMs of a rank in flight, alternating over its list; None: what the machine says
    copy_streams: streams over which a rank deals its copies, by the other rank
    gemm_efficiency_hook: for each Gemm a factor on its rate, to try what another kernel would bring

    Raises ValueError for arguments that make no sense or an element type that the machine has no rate of, and
    PlanError for a plan that blocks.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a distgemm.Plan, got {plan!r}")
    if isinstance(machine, str):
        machine = Machine.load(machine)
    if not isinstance(machine, Machine):
        raise ValueError(f"machine is a Machine or the name of one, got {machine!r}")
    gemm_streams = machine.gemm_streams if gemm_streams is None else gemm_streams
    for name, value in (("gemm_streams", gemm_streams), ("copy_streams", copy_streams)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is an integer >= 1, got {value!r}")
    work = _Work(plan, machine, gemm_streams, copy_streams, gemm_efficiency_hook)
    cold = _Simulation(work, 1)
    cold.run()
    steady = _Simulation(work, REPLAYS)
    steady.run()
    one, other, mean = steady.ends[-1] - steady.ends[-2], steady.ends[-2] - steady.ends[-3], 1
    if abs(one - other) > SETTLED * one:
        steady, mean = _Simulation(work, MANY), MEAN
        steady.run()
    before, after = steady.ends[-1 - mean], steady.ends[-1]
    zero = min(steady.begins) - machine.replay
    last = [job for job in steady.jobs if job.replay == steady.replays - 1]
    events = tuple(
        Event(job.rank, work.lane[job.rank][job.at], plan.rank_ops[job.rank][job.at], job.start - zero, job.end - zero)
        for job in sorted(last, key=lambda job: (job.rank, job.start, job.at))
    )
    copies = _copies_alone(plan, machine)
    time = (after - before) / mean
    path = _critical(steady.last, before, after, machine.gemm_launch)
    critical = {what: part / mean for what, part in path.items()}
    slowest = max(last, key=lambda job: job.done).rank if last else 0
    head, tail = _exposed(work, last, slowest, (steady.begins[slowest], after), critical)
    return Timeline(plan, machine, events, time, cold.ends[0], work.gemm_alone, copies, critical, head, tail)


def predict_unfused(problem: GemmProblem, machine: Machine, kind: str, world_size: int) -> float:
    """us of the unfused program: a library's collective, and one GEMM before or behind it.

    kind: "ag+gemm" (A gathered, B and D sharded along N), "gemm+rs" (K sharded, D scattered), "gemm+ar"

    Raises ValueError for another kind or a world_size below 1.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is an integer >= 1, got {world_size!r}")
    out = DTYPE_BYTES[str(problem.out_dtype)]
    m, n, k = problem.m, problem.n, problem.k
    if kind == "ag+gemm":
        n = -(-n // world_size)
        size, passes = problem.m * problem.k * problem.l * DTYPE_BYTES[problem.dtype], 1
    elif kind in ("gemm+rs", "gemm+ar"):
        k = -(-k // world_size)
        size, passes = problem.m * problem.n * problem.l * out, 1 if kind == "gemm+rs" else 2
    else:
        raise ValueError(f"kind is one of ag+gemm, gemm+rs, gemm+ar, got {kind!r}")
    gemm = _whole(machine, m, n, k, problem.l, problem.dtype, out)
    if world_size == 1:
        return machine.replay + gemm
    bandwidth = machine.collective.bandwidth
    if not machine.same_host(0, world_size - 1):
        bandwidth = min(bandwidth, machine.network.bandwidth)
    moved = passes * size * (world_size - 1) / world_size
    return machine.replay + gemm + machine.collective.latency + moved / (bandwidth * 1e3)


def _whole(machine: Machine, m: int, n: int, k: int, batches: int, dtype: str, out: int) -> float:
    """us of one GEMM that has the GPU for itself, at the clock that it leaves it."""
    cost = machine.gemm(m, n, k, batches, dtype=dtype, out_bytes=out)
    at_limit = cost.flop / (machine.rate(dtype).power * 1e6 * machine.clock(dtype, cost.flop))
    return max(cost.alone, machine.gemm_launch + at_limit)


def op_title(op: Op) -> str:
    """What an op is called in a timeline: its iteration or operand, its tile, and where it goes."""
    tile = ",".join(map(str, op.tile))
    what = f"{op.operand}({tile})" if isinstance(op, Copy) else f"{op.kind} {op.iteration} ({tile})"
    link = link_of(op)
    if link is None:
        return what
    src, dst = link
    return f"{what} to rank {dst}" if op.rank == src else f"{what} from rank {src}"


def _view_bytes(plan: Plan, view: View) -> int:
    return box_size(view.box) * DTYPE_BYTES[plan.dtype(view)]


def _copy_bytes(plan: Plan, op: Copy) -> int:
    return _view_bytes(plan, op.dst)


def _stages(op: Copy) -> bool:
    """Whether a copy puts a tile of the rank's shard where others find it."""
    return op.src.buffer in ("A", "B") and link_of(op) is None


def _copy_bandwidth(machine: Machine, op: Copy, link: Link) -> float:
    """GB/s of an engine that has a single copy between ranks; a port may carry less."""
    pulled = op.rank != op.src.rank and link is machine.nvlink
    return machine.pull_bandwidth if pulled else link.bandwidth


def _stored_us(plan: Plan, machine: Machine, op: Gemm, link: tuple[int, int]) -> float:
    """us for which a link carries what a GEMM stores over it."""
    return _view_bytes(plan, op.out) / (machine.link(*link).bandwidth * 1e3)


_Port = tuple[int, bool, Link]
"""One direction of a rank's link: (rank, whether it receives, link)."""


def _ports(ends: tuple[int, int], link: Link) -> tuple[_Port, _Port]:
    """Where what goes from rank to rank leaves, and where it arrives."""
    src, dst = ends
    return (src, False, link), (dst, True, link)


def _port(op: Copy, ends: tuple[int, int], link: Link) -> _Port:
    """The port of the rank that does not execute a copy; that of the one that does is its engine's."""
    leaves, arrives = _ports(ends, link)
    return arrives if op.rank == leaves[0] else leaves


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same, in order, none of which overlap."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _within(busy: Sequence[Interval], start: float, end: float) -> float:
    """Length of start..end that disjoint ascending intervals cover."""
    covered = 0.0
    at = max(bisect_left(busy, (start, start)) - 1, 0)
    while at < len(busy) and busy[at][0] < end:
        covered += max(0.0, min(end, busy[at][1]) - max(start, busy[at][0]))
        at += 1
    return covered


def _union(ranges: Iterable[tuple[int, int]]) -> int:
    return int(sum(end - start for start, end in merged(set(ranges))))


# --- roofs ----------------------------------------------------------------------------------------------


def _gemm_alone(plan: Plan, machine: Machine, rank: int) -> float:
    """us of a replay that consists of the whole local product."""
    gemms = [op for op in plan.rank_ops[rank] if isinstance(op, Gemm)]
    if not gemms:
        return 0.0
    m = _union(op.out.box[1] for op in gemms)
    n = _union(op.out.box[2] for op in gemms)
    k = _union(op.a.box[2] for op in gemms)
    batches = _union(op.out.box[0] for op in gemms)
    volume = sum(box_size(op.out.box) * box_extents(op.a.box)[2] for op in gemms)
    if volume != m * n * k * batches:  # the tiles make up no box: one as wide, of the same volume
        m = max(1, round(volume / (n * k * batches)))
    out = DTYPE_BYTES[str(plan.problem.out_dtype)]
    return machine.replay + _whole(machine, m, n, k, batches, plan.problem.dtype, out)


def _copies_alone(plan: Plan, machine: Machine) -> float:
    """us of a replay that consists of all that crosses between ranks, each engine and each port without a pause.

    What GEMMs store occupies the ports of both ends, and no engine.
    """
    engines: dict[tuple[int, Link], float] = defaultdict(float)
    ports: dict[_Port, float] = defaultdict(float)
    launch = machine.gemm_launch
    for ops in plan.rank_ops:
        for op in ops:
            ends = link_of(op)
            if ends is None:
                continue
            link = machine.link(*ends)
            if isinstance(op, Copy):
                launch, size = machine.copy_launch, _copy_bytes(plan, op)
                engines[op.rank, link] += link.gap + size / (_copy_bandwidth(machine, op, link) * 1e3)
                ports[_port(op, ends, link)] += size / (link.bandwidth * 1e3)
            elif isinstance(op, Gemm):
                for port in _ports(ends, link):
                    ports[port] += _stored_us(plan, machine, op, ends)
    found = [busy + link.latency for (_, link), busy in engines.items()]
    found += [busy + link.latency for (_, _, link), busy in ports.items()]
    return machine.replay + machine.entry + launch + max(found) if found else 0.0


# --- what bounds a timeline -----------------------------------------------------------------------------


def _critical(last: _Job | None, before: float, after: float, launch: float) -> dict[str, float]:
    """What the critical path between two moments consists of, walked back from the op that finishes last."""
    found = {"compute": 0.0, "copies": 0.0, "latency": 0.0}
    job, at = last, after
    while job is not None and at > before:
        kind = "copies" if job.moves else "compute" if job.computes else "latency"
        # A GEMM that waits for SMs waits for computation: only its launch is latency.
        ready = min(job.start, job.issued + launch) if job.computes else job.start
        computed = job.end - job.stores
        for point, what in ((job.end, "latency"), (computed, "copies"), (ready, kind), (job.issued, "latency")):
            if at > before and point < at:
                found[what] += at - max(point, before)
                at = max(point, before)
        job = job.cause
    found["latency"] += max(0.0, at - before)
    return found


def _exposed(
    work: _Work, last: list[_Job], rank: int, span: Interval, critical: dict[str, float]
) -> tuple[float, float]:
    """Exposed head and tail of a rank whose replay has this span."""
    begin, after = span
    gemms = [job for job in last if job.rank == rank and isinstance(work.ops[rank][job.at], Gemm)]
    if not gemms:
        return 0.0, 0.0
    head = min(job.start for job in gemms) - begin
    ends = [job.end for job in gemms]
    if critical["copies"] > critical["compute"]:
        received = [job.end for job in last if (link := work.link[job.rank][job.at]) is not None and link[1] == rank]
        ends = received or ends
    return head, max(0.0, after - max(ends))


# --- the simulation -------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Job:
    """One op in one replay.

    issued, start, end, done: when its lane turns to it, it begins, it frees its lane, it has taken effect
    cause: the job whose end let it be issued
    stores: us at its end for which a GEMM waits for its link alone
    """

    rank: int
    at: int
    replay: int
    cause: _Job | None
    issued: float
    start: float = 0.0
    end: float = 0.0
    done: float = 0.0
    moves: bool = False
    computes: bool = False
    stores: float = 0.0


@dataclass(eq=False, slots=True)
class _Flow:
    """A copy between ranks under way, by an engine of its job's rank through a port of the other one."""

    job: _Job
    port: _Port
    link: Link
    bandwidth: float  # GB/s where nothing shares
    left: float  # bytes
    since: float
    rate: float = 0.0  # bytes per us
    version: int = 0


class _Work:
    """What is the same in every replay: lanes, dependents and costs."""

    def __init__(self, plan: Plan, machine: Machine, gemm_streams: int, copy_streams: int, hook: Hook | None) -> None:
        self.plan, self.machine = plan, machine
        self.copy_streams = copy_streams
        self.ops = plan.rank_ops
        self.lane: list[list[str]] = []
        self.lanes: list[dict[str, list[int]]] = []
        self.missing: list[list[int]] = []
        self.dependents: list[list[list[int]]] = []
        self.signalled: list[set[int]] = []  # copies that a signal follows
        self.roots: list[list[int]] = []
        self.link = [[link_of(op) for op in ops] for ops in self.ops]
        self.cost: list[list[Any]] = []
        self.power: list[float] = []  # flop per us
        alone: dict[tuple[Any, ...], float] = {}
        for rank, ops in enumerate(self.ops):
            self._order(ops)
            self._deal(ops, gemm_streams)
            flop = 0.0
            costs: list[Any] = []
            for op in ops:
                cost = self._cost(op, hook)
                flop += cost.flop if isinstance(cost, GemmCost) else 0.0
                costs.append(cost)
            self.cost.append(costs)
            dtype = plan.problem.dtype
            self.power.append(machine.rate(dtype).power * 1e6 * machine.clock(dtype, flop))
            shapes = tuple(sorted(Counter(op.out.box + op.a.box for op in ops if isinstance(op, Gemm))))
            if shapes not in alone:
                alone[shapes] = _gemm_alone(plan, machine, rank)
        self.gemm_alone = max(alone.values(), default=0.0)

    def _order(self, ops: Sequence[Op]) -> None:
        index = {op.id: at for at, op in enumerate(ops)}
        dependents: list[list[int]] = [[] for _ in ops]
        for at, op in enumerate(ops):
            for dep in op.deps:
                if dep not in index:
                    raise PlanError(f"{op.describe()}: depends on op {dep}, which does not exist")
                dependents[index[dep]].append(at)
        self.dependents.append(dependents)
        self.signalled.append(
            {at for at, after in enumerate(dependents) if any(isinstance(ops[each], Signal) for each in after)}
        )
        self.missing.append([len(op.deps) for op in ops])
        self.roots.append([at for at, op in enumerate(ops) if not op.deps])

    def _deal(self, ops: Sequence[Op], gemm_streams: int) -> None:
        """The lane of each op."""
        found: list[str] = []
        computed = 0  # sums and local copies take their turn as well, as they do on the streams of the CUDA runtime
        for op in ops:
            if isinstance(op, Gemm):
                found.append(f"gemm {computed % gemm_streams}")
                computed += 1
            elif isinstance(op, Copy) and (_stages(op) or link_of(op) is not None):
                if not self.machine.same_host(op.src.rank, op.dst.rank):
                    found.append("network")
                else:
                    other = op.dst.rank if op.rank == op.src.rank else op.src.rank
                    found.append(f"copy {other % self.copy_streams}" if self.copy_streams > 1 else "copy")
            elif isinstance(op, (Copy, Reduce)):
                found.append("local")
                computed += 1
            else:
                found.append(FLAGS)
        lanes: dict[str, list[int]] = defaultdict(list)
        for at, lane in enumerate(found):
            if lane != FLAGS:
                lanes[lane].append(at)
        self.lane.append(found)
        self.lanes.append(dict(lanes))

    def _cost(self, op: Op, hook: Hook | None) -> Any:
        """A GemmCost; us on all SMs of a sum or a local copy; bytes of a copy between ranks."""
        machine, plan = self.machine, self.plan
        if isinstance(op, Gemm):
            batches, m, k = box_extents(op.a.box)
            n = box_extents(op.b.box)[1]
            read = sum(DTYPE_BYTES[plan.dtype(view)] for view in op.sources)
            out = DTYPE_BYTES[plan.dtype(op.out)]
            cost = self._gemm_cost(m, n, k, batches, out, read)
            if hook is None:
                return cost
            factor = hook(op)
            if not factor > 0:
                raise ValueError(f"gemm_efficiency_hook gives {factor!r} for {op.describe()}; it must be > 0")
            return cost._replace(tile_us=cost.tile_us / factor)
        if isinstance(op, Copy):
            size = _copy_bytes(plan, op)
            return 2 * size / (machine.memory * 1e3) if link_of(op) is None else size
        if isinstance(op, Reduce):
            return sum(_view_bytes(plan, view) for view in (*op.sources, op.out)) / (machine.sum_memory * 1e3)
        return None

    def _gemm_cost(self, *shape: int) -> GemmCost:
        found = self._shapes.get(shape)
        if found is None:
            m, n, k, batches, out, read = shape
            found = self.machine.gemm(m, n, k, batches, dtype=self.plan.problem.dtype, out_bytes=out, read_bytes=read)
            self._shapes[shape] = found
        return found

    @cached_property
    def _shapes(self) -> dict[tuple[int, ...], GemmCost]:
        return {}


@dataclass(eq=False, slots=True)
class _Rank:
    """A rank on its way through its replays."""

    pools: list[tuple[float, int]]  # (free from, SMs): a heap
    power_free: float = 0.0
    replay: int = -1
    left: int = 0
    entered: float | None = None  # when it might touch the memory of others
    missing: list[int] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)  # when nothing was missing any more
    heads: dict[str, int] = field(default_factory=dict)
    busy: dict[str, bool] = field(default_factory=dict)


# What can happen, in the order in which it happens at equal times.
_END, _DONE, _SET, _FLOWS, _ENTERED, _BEGIN, _STORES = range(7)


class _Simulation:
    def __init__(self, work: _Work, replays: int) -> None:
        self.work, self.machine, self.replays = work, work.machine, replays
        self.ranks = [_Rank([(0.0, work.machine.sms)]) for _ in work.ops]
        self.queue: list[tuple[float, int, int, int, Any]] = []
        self.count = 0
        self.jobs: list[_Job] = []
        self.last: _Job | None = None
        self.ends = [0.0] * replays
        self.begins = [0.0] * len(work.ops)
        self.flags: dict[tuple[int, int], int] = {}
        self.setters: dict[tuple[int, int], _Job] = {}
        self.waiting: dict[tuple[int, int], _Job] = {}
        self.barriers: dict[tuple[int, int], list[_Job]] = defaultdict(list)
        self.engines: dict[int, list[_Flow]] = defaultdict(list)
        self.ports: dict[_Port, list[_Flow]] = defaultdict(list)
        self.stored: dict[_Port, float] = defaultdict(float)  # until when it carries what GEMMs store
        for ops in work.ops:
            for op in ops:
                if isinstance(op, (Signal, Wait)):
                    self.flags[op.flag[:2]] = op.flag.initial

    # --- events ---------------------------------------------------------------------------------------

    def post(self, time: float, kind: int, what: Any, at: int = 0) -> None:
        """Something will happen, on account of the op at this place of its rank's list."""
        # Rounding and the place make ranks that do the same thing at the same time do it in the same order: else
        # the last bit of a number would decide, differently on each, and symmetric ranks would fall out of step.
        self.count += 1
        heapq.heappush(self.queue, (round(time, 7), kind, at, self.count, what))

    def run(self) -> None:
        for rank in range(len(self.ranks)):
            self.post(self.machine.replay, _BEGIN, (rank, None))
        while self.queue:
            time, kind, _, _, what = heapq.heappop(self.queue)
            if kind == _END:
                self._end(what, time)
            elif kind == _DONE:
                self._done(what, time)
            elif kind == _SET:
                flag, setter = what
                self._set(flag, setter, time)
            elif kind == _FLOWS:
                flow, version = what
                self._flow_event(flow, version, time)
            elif kind == _ENTERED:
                number, cause = what
                self._enter(number, cause, time)
            elif kind == _STORES:
                self._store(what, time)
            else:
                number, cause = what
                self._begin(number, cause, time)
        blocked = [number for number, rank in enumerate(self.ranks) if rank.left or rank.replay + 1 < self.replays]
        if blocked:
            heads = [self.work.ops[job.rank][job.at].describe() for job in self.waiting.values()]
            raise PlanError(f"deadlock: {'; '.join(heads[:4]) or f'ranks {blocked} cannot go on'}")

    def _begin(self, number: int, cause: _Job | None, time: float) -> None:
        rank, work = self.ranks[number], self.work
        rank.replay += 1
        rank.left = len(work.ops[number])
        rank.missing = list(work.missing[number])
        rank.ready = [time] * rank.left
        rank.heads = dict.fromkeys(work.lanes[number], 0)
        rank.busy = dict.fromkeys(work.lanes[number], False)
        self.begins[number] = time
        if not rank.left:
            self._finish(number, None, time)
            return
        for at in work.roots[number]:
            if work.lane[number][at] == FLAGS:
                self._flag_op(number, at, cause, time)
        rank.entered = None
        self.post(time + self.machine.entry, _ENTERED, (number, cause))
        for lane in rank.heads:
            self._turn(number, lane, cause, time)

    def _enter(self, number: int, cause: _Job | None, time: float) -> None:
        """From now on the rank may touch the memory of others."""
        rank = self.ranks[number]
        rank.entered = time
        for lane in rank.heads:
            # A GEMM may store.
            self._turn(number, lane, cause, time)

    def _finish(self, number: int, job: _Job | None, time: float) -> None:
        rank = self.ranks[number]
        if time >= self.ends[rank.replay]:
            self.ends[rank.replay] = time
            if rank.replay == self.replays - 1:
                self.last = job
        if rank.replay + 1 < self.replays:
            self.post(time + self.machine.replay, _BEGIN, (number, job))

    def _turn(self, number: int, lane: str, cause: _Job | None, time: float) -> None:
        """Start the op at the head of a lane, if nothing holds it back."""
        rank, order = self.ranks[number], self.work.lanes[number][lane]
        head = rank.heads[lane]
        if rank.busy[lane] or head == len(order) or rank.missing[order[head]]:
            return
        at = order[head]
        outward = lane.startswith(OUTWARD)
        if rank.entered is None and (outward or self.work.link[number][at] is not None):
            return
        rank.busy[lane] = True
        rank.heads[lane] = head + 1
        job = _Job(number, at, rank.replay, cause, time)
        self.jobs.append(job)
        op = self.work.ops[number][at]
        if isinstance(op, Gemm):
            self._gemm(job, self.work.cost[number][at], time)
        elif isinstance(op, Copy) and outward:
            self._copy(job, op, time)
        else:
            self._sum(job, self.work.cost[number][at], time)

    def _end(self, job: _Job, time: float) -> None:
        """An op frees its lane; of a replay that is over, nothing is left to free."""
        if job.replay != self.ranks[job.rank].replay:
            return
        lane = self.work.lane[job.rank][job.at]
        self.ranks[job.rank].busy[lane] = False
        self._turn(job.rank, lane, job, time)

    def _done(self, job: _Job, time: float) -> None:
        """What an op did is there: its dependents may start."""
        job.done = time
        work, rank = self.work, self.ranks[job.rank]
        for at in work.dependents[job.rank][job.at]:
            rank.missing[at] -= 1
            if rank.missing[at]:
                continue
            rank.ready[at] = time
            lane = work.lane[job.rank][at]
            if lane == FLAGS:
                self._flag_op(job.rank, at, job, time)
            else:
                self._turn(job.rank, lane, job, time)
        rank.left -= 1
        if not rank.left:
            self._finish(job.rank, job, time)

    # --- signals --------------------------------------------------------------------------------------

    def _flag_op(self, number: int, at: int, cause: _Job | None, time: float) -> None:
        op = self.work.ops[number][at]
        job = _Job(number, at, self.ranks[number].replay, cause, time, time, time, time)
        self.jobs.append(job)
        if isinstance(op, Signal):
            self.post(time + self.machine.signal, _SET, (op.flag, job), at)
            self.post(time, _DONE, job, at)
        elif isinstance(op, Wait):
            if self.flags[op.flag[:2]]:
                self._pass(op.flag, job, time)
            else:
                self.waiting[op.flag[:2]] = job
        else:
            assert isinstance(op, Barrier)
            here = self.barriers[job.replay, op.round]
            here.append(job)
            if len(here) == len(self.ranks):
                for each in here:
                    each.cause = job if each is not job else job.cause
                    each.issued = each.start = time
                    # One at the start is what the entry consists of: every rank hears from all others.
                    each.end = time + (
                        self.machine.barrier if op.deps else max(self.machine.barrier, self.machine.entry)
                    )
                    self.post(each.end, _DONE, each, each.at)

    def _set(self, flag: Flag, setter: _Job, time: float) -> None:
        if self.flags[flag[:2]]:
            op = self.work.ops[setter.rank][setter.at]
            raise PlanError(f"{op.describe()}: the flag is set already, a signal would be lost")
        self.flags[flag[:2]] = 1
        self.setters[flag[:2]] = setter
        job = self.waiting.pop(flag[:2], None)
        if job is not None:
            job.cause = setter
            self._pass(flag, job, time)

    def _pass(self, flag: Flag, job: _Job, time: float) -> None:
        """A wait finds its flag set, and resets it."""
        self.flags[flag[:2]] = 0
        # A flag that was set before anyone waited costs what it costs to look.
        job.issued = job.start = time
        job.end = time + self.machine.wait
        self.post(job.end, _DONE, job, job.at)

    # --- SMs ------------------------------------------------------------------------------------------

    def _dispatch(self, rank: _Rank, ready: float, tiles: int, tile_us: float) -> tuple[float, float]:
        """Give tiles to the SMs that are free first; (start of the first, end of the last)."""
        pool = rank.pools
        first, end = -1.0, ready
        while tiles:
            free, sms = heapq.heappop(pool)
            start = max(free, ready)
            while pool and pool[0][0] <= start:
                sms += heapq.heappop(pool)[1]
            used = min(sms, tiles)
            tiles -= used
            first = start if first < 0 else first
            end = max(end, start + tile_us)
            heapq.heappush(pool, (start + tile_us, used))
            if used < sms:
                heapq.heappush(pool, (start, sms - used))
        return max(first, ready), end

    def _gemm(self, job: _Job, cost: GemmCost, time: float) -> None:
        rank = self.ranks[job.rank]
        job.start, end = self._dispatch(rank, time + self.machine.gemm_launch, cost.tiles, cost.tile_us)
        rank.power_free = max(rank.power_free, job.start) + cost.flop / self.work.power[job.rank]
        job.end = max(end, rank.power_free)
        job.computes = True
        if self.work.link[job.rank][job.at] is not None:
            self.post(job.start, _STORES, job, job.at)  # by then it is known what else has begun to store
            return
        self.post(job.end, _DONE, job, job.at)
        self.post(job.end, _END, job, job.at)

    def _store(self, job: _Job, time: float) -> None:
        """A GEMM begins that ends when it has computed and its link has carried what it stores."""
        ends, op = self.work.link[job.rank][job.at], self.work.ops[job.rank][job.at]
        assert isinstance(op, Gemm) and ends is not None
        link, computed = self.machine.link(*ends), job.end
        carried = _stored_us(self.work.plan, self.machine, op, ends)
        for port in _ports(ends, link):
            self.stored[port] = max(self.stored[port], time) + carried
            job.end = max(job.end, self.stored[port])
        job.stores = job.end - computed
        self.post(job.end + link.latency, _DONE, job, job.at)
        self.post(job.end, _END, job, job.at)

    def _sum(self, job: _Job, duration: float, time: float) -> None:
        """A kernel that memory holds back takes all SMs, behind the tiles that they have got."""
        rank = self.ranks[job.rank]
        job.start, job.end = self._dispatch(rank, time + self.machine.gemm_launch, self.machine.sms, duration)
        job.computes = True
        self.post(job.end, _DONE, job, job.at)
        self.post(job.end, _END, job, job.at)

    # --- links ----------------------------------------------------------------------------------------

    def _copy(self, job: _Job, op: Copy, time: float) -> None:
        rank, cost, ends = self.ranks[job.rank], self.work.cost[job.rank][job.at], self.work.link[job.rank][job.at]
        assert rank.entered is not None
        time = job.start = max(time, max(rank.ready[job.at], rank.entered) + self.machine.copy_launch)
        job.moves = True
        if ends is None:
            self._copied(job, time + cost, 0.0)
            return
        link = self.machine.link(*ends)
        bandwidth = _copy_bandwidth(self.machine, op, link)
        flow = _Flow(job, _port(op, ends, link), link, bandwidth, float(cost), time)
        self.post(time + link.gap, _FLOWS, (flow, -1), job.at)

    def _flow_event(self, flow: _Flow, version: int, time: float) -> None:
        """A copy begins to flow (version -1), or ends if its rate is still the one it was foretold with."""
        if version == -1:
            self.engines[flow.job.rank].append(flow)
            self.ports[flow.port].append(flow)
            flow.since = time
            self._rates(flow, time)
        elif version == flow.version:
            self.engines[flow.job.rank].remove(flow)
            self.ports[flow.port].remove(flow)
            self._copied(flow.job, time, flow.link.latency)
            self._rates(flow, time)

    def _copied(self, job: _Job, time: float, latency: float) -> None:
        """The engine is through with a copy."""
        job.end = time
        self.post(time + latency, _DONE, job, job.at)
        held = self.machine.signal_gap if job.at in self.work.signalled[job.rank] else 0.0
        self.post(time + held, _END, job, job.at)

    def _rates(self, changed: _Flow, time: float) -> None:
        """Foretell anew the copies that share an engine or a port with one that begins or ends."""
        for flow in dict.fromkeys((*self.engines[changed.job.rank], *self.ports[changed.port])):
            sharing = len(self.ports[flow.port])
            moving = sum(other.link is flow.link for other in self.engines[flow.job.rank])
            each = flow.bandwidth
            if moving > self.machine.copy_streams and flow.link is self.machine.nvlink:
                each = self.machine.contended / moving
            rate = min(each, flow.link.bandwidth / sharing) * 1e3
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (time - flow.since))
                flow.since, flow.rate = time, rate
                flow.version += 1
                self.post(time + flow.left / rate, _FLOWS, (flow, flow.version), flow.job.at)
