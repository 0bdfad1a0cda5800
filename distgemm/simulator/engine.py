"""When each op of a plan would run: a discrete-event simulation of ``plan.ops`` on a :class:`Machine`.

The simulation reads the ops only: no schedule, no name. Every rank has lanes: streams of GEMMs, streams of copies, the
network, and one lane for local sums and copies. Each lane executes its ops in the order of the rank's list.

* A GEMM is a number of output tiles. They go to the SMs in the order in which the GEMMs start, each to the SM
  that is free first. So a GEMM on a second stream fills the SMs that the last wave of the GEMM before leaves idle.
  A power limit of the whole GPU bounds the rate. A GEMM that stores into another rank's slot ends when the ports of
  both ranks have carried what GEMMs have stored through them so far; the data has arrived one latency later.
* A copy occupies a copy engine of the rank that executes it. It shares the port of the other rank with other copies:
  the receiver's port if it is pushed, the source's port if it is pulled. Copies from a rank's own shards to its slots,
  for others to pull, use the same engine. If the ranks of a host share network adapters, copies across hosts share the
  adapters of both hosts.
* Signals and waits take their latency and occupy nothing.

Times are microseconds.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from distgemm.arguments import finite, function, instance, integer
from distgemm.plan.ops import Barrier, Copy, Flag, Gemm, Op, Reduce, Signal, Wait, box_extents, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.simulator.costs import (
    Port,
    copies_alone_us,
    copy_bandwidth,
    copy_bytes,
    copy_ports,
    gemm_alone_us,
    is_staging,
    ports_of,
    stored_us,
    view_bytes,
)
from distgemm.simulator.machine import GemmCost, Link, Machine, list_machines
from distgemm.simulator.timeline import FLAG_LANE, Event, Interval, Timeline

__all__ = ["MAX_STREAMS", "simulate"]

OUTWARD_LANES = ("copy", "network")
"""How the names of lanes of copies to and from other ranks begin."""

Hook = Callable[[Gemm], float]

MAX_STREAMS = 1024
"""Streams of a rank that are simulated at most."""

REPLAYS, MAX_REPLAYS, AVERAGED_REPLAYS = 4, 12, 8
"""Replays in a row that are simulated; the last one counts. If it differs from the one before, because the ranks have
not fallen into step, MAX_REPLAYS are simulated and the last AVERAGED_REPLAYS are averaged."""
STEADY_TOLERANCE = 1e-3
"""Share by which replays in a row may differ."""


def simulate(
    plan: Plan,
    machine: Machine | str,
    *,
    gemm_streams: int | None = None,
    copy_streams: int = 1,
    gemm_efficiency_hook: Hook | None = None,
) -> Timeline:
    """Predict when each op of a plan runs on a machine.

    Args:
        plan: of all ranks.
        machine: a machine, its name, or the path of its .json file, as :meth:`Machine.load` takes them.
        gemm_streams: streams on which the GEMMs of a rank alternate; None: as the machine says.
        copy_streams: streams on which a rank issues its copies, selected by the other rank.
        gemm_efficiency_hook: gives a factor on the rate of each Gemm, to see what another kernel would bring.

    Raises:
        ValueError: for arguments out of range, or an element type for which the machine has no rate.
        PlanError: for a plan that deadlocks.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    if isinstance(machine, str):
        machine = Machine.load(machine)
    machine = instance("machine", machine, Machine, f"a Machine, one of {', '.join(list_machines())}, or a path")
    machine = machine.of_plan(plan)
    gemm_streams = integer(
        "gemm_streams", machine.gemm_streams if gemm_streams is None else gemm_streams, 1, MAX_STREAMS
    )
    copy_streams = integer("copy_streams", copy_streams, 1, MAX_STREAMS)
    if gemm_efficiency_hook is not None:
        function("gemm_efficiency_hook", gemm_efficiency_hook, "a function of a Gemm that returns a number > 0")
    work = _Work(plan, machine, gemm_streams, copy_streams, gemm_efficiency_hook)
    cold = _Simulation(work, 1)
    cold.run()
    steady = _Simulation(work, REPLAYS)
    steady.run()
    one, other, mean = steady.ends[-1] - steady.ends[-2], steady.ends[-2] - steady.ends[-3], 1
    if abs(one - other) > STEADY_TOLERANCE * one:
        steady, mean = _Simulation(work, MAX_REPLAYS), AVERAGED_REPLAYS
        steady.run()
    before, after = steady.ends[-1 - mean], steady.ends[-1]
    zero = min(steady.begins) - machine.replay
    last = [run for run in steady.runs if run.replay == steady.replays - 1]
    events = tuple(
        Event(run.rank, work.lane[run.rank][run.at], plan.rank_ops[run.rank][run.at], run.start - zero, run.end - zero)
        for run in sorted(last, key=lambda run: (run.rank, run.start, run.at))
    )
    copies = copies_alone_us(plan, machine)
    time = (after - before) / mean
    path = _critical(steady.last, before, after, machine.gemm_launch)
    critical = {what: part / mean for what, part in path.items()}
    slowest = max(last, key=lambda run: run.done).rank if last else 0
    head, tail = _exposed(work, last, slowest, (steady.begins[slowest], after), critical)
    return Timeline(plan, machine, events, time, cold.ends[0], work.gemm_alone, copies, critical, head, tail)


def _critical(last: _Run | None, before: float, after: float, launch: float) -> dict[str, float]:
    """Time on the critical path between two moments by cause, walked back from the op that finishes last, us."""
    found = {"compute": 0.0, "copies": 0.0, "latency": 0.0}
    run, at = last, after
    while run is not None and at > before:
        kind = "copies" if run.moves else "compute" if run.computes else "latency"
        # A GEMM that waits for SMs waits for computation: only its launch is latency.
        ready = min(run.start, run.issued + launch) if run.computes else run.start
        computed = run.end - run.stores
        for point, what in ((run.end, "latency"), (computed, "copies"), (ready, kind), (run.issued, "latency")):
            if at > before and point < at:
                found[what] += at - max(point, before)
                at = max(point, before)
        run = run.cause
    found["latency"] += max(0.0, at - before)
    return found


def _exposed(
    work: _Work, last: list[_Run], rank: int, span: Interval, critical: dict[str, float]
) -> tuple[float, float]:
    """Exposed head and tail of a rank whose replay has this span."""
    begin, after = span
    gemms = [run for run in last if run.rank == rank and isinstance(work.ops[rank][run.at], Gemm)]
    if not gemms:
        return 0.0, 0.0
    head = min(run.start for run in gemms) - begin
    ends = [run.end for run in gemms]
    if critical["copies"] > critical["compute"]:
        received = [run.end for run in last if (link := work.link[run.rank][run.at]) is not None and link[1] == rank]
        ends = received or ends
    return head, max(0.0, after - max(ends))


@dataclass(eq=False, slots=True)
class _Run:
    """One op in one replay.

    Attributes:
        issued: when its lane reaches it, us.
        start: when it begins.
        end: when it frees its lane.
        done: when its result can be used.
        cause: the run of the op whose end let this one be issued.
        stores: time at its end for which a GEMM waits for its link alone, us.
    """

    rank: int
    at: int
    replay: int
    cause: _Run | None
    issued: float
    start: float = 0.0
    end: float = 0.0
    done: float = 0.0
    moves: bool = False
    computes: bool = False
    stores: float = 0.0


@dataclass(eq=False, slots=True)
class _Flow:
    """A copy between ranks under way: by an engine of its own rank, through ports that it shares."""

    run: _Run
    ports: tuple[Port, ...]
    link: Link
    bandwidth: float  # GB/s where nothing shares
    left: float  # bytes
    since: float
    rate: float = 0.0  # bytes per us
    version: int = 0


class _Work:
    """What is equal in every replay: lanes, dependents and costs."""

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
                alone[shapes] = gemm_alone_us(plan, machine, rank)
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
        computed = 0  # sums and local copies count too, as on the streams of the CUDA runtime
        for op in ops:
            if isinstance(op, Gemm):
                found.append(f"gemm {computed % gemm_streams}")
                computed += 1
            elif isinstance(op, Copy) and (is_staging(op) or link_of(op) is not None):
                if not self.machine.same_host(op.src.rank, op.dst.rank):
                    found.append("network")
                else:
                    other = op.dst.rank if op.rank == op.src.rank else op.src.rank
                    found.append(f"copy {other % self.copy_streams}" if self.copy_streams > 1 else "copy")
            elif isinstance(op, (Copy, Reduce)):
                found.append("local")
                computed += 1
            else:
                found.append(FLAG_LANE)
        lanes: dict[str, list[int]] = defaultdict(list)
        for at, lane in enumerate(found):
            if lane != FLAG_LANE:
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
            factor = finite(f"gemm_efficiency_hook: its result for {op.describe()}", hook(op), above=0)
            return cost._replace(tile_us=cost.tile_us / factor)
        if isinstance(op, Copy):
            size = copy_bytes(plan, op)
            return 2 * size / (machine.memory * 1e3) if link_of(op) is None else size
        if isinstance(op, Reduce):
            return sum(view_bytes(plan, view) for view in (*op.sources, op.out)) / (machine.sum_memory * 1e3)
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
    """The state of a rank."""

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
        self.runs: list[_Run] = []
        self.last: _Run | None = None
        self.ends = [0.0] * replays
        self.begins = [0.0] * len(work.ops)
        self.flags: dict[tuple[int, int], int] = {}
        self.setters: dict[tuple[int, int], _Run] = {}
        self.waiting: dict[tuple[int, int], _Run] = {}
        self.barriers: dict[tuple[int, int], list[_Run]] = defaultdict(list)
        self.engines: dict[int, list[_Flow]] = defaultdict(list)
        self.ports: dict[Port, list[_Flow]] = defaultdict(list)
        self.stored: dict[Port, float] = defaultdict(float)  # until when it carries what GEMMs store
        for ops in work.ops:
            for op in ops:
                if isinstance(op, (Signal, Wait)):
                    self.flags[op.flag[:2]] = op.flag.initial

    # --- events ---------------------------------------------------------------------------------------

    def post(self, time: float, kind: int, what: Any, at: int = 0) -> None:
        """Schedule an event, caused by the op at this place of its rank's list."""
        # Rounding and the place order events of equal time alike on all ranks. Without them the last bit of a number
        # would decide, differently on each rank, and symmetric ranks would fall out of step.
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
            heads = [self.work.ops[run.rank][run.at].describe() for run in self.waiting.values()]
            raise PlanError(f"deadlock: {'; '.join(heads[:4]) or f'ranks {blocked} cannot go on'}")

    def _begin(self, number: int, cause: _Run | None, time: float) -> None:
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
            if work.lane[number][at] == FLAG_LANE:
                self._flag_op(number, at, cause, time)
        rank.entered = None
        self.post(time + self.machine.entry, _ENTERED, (number, cause))
        for lane in rank.heads:
            self._start_next(number, lane, cause, time)

    def _enter(self, number: int, cause: _Run | None, time: float) -> None:
        """From now on the rank may access the memory of others."""
        rank = self.ranks[number]
        rank.entered = time
        for lane in rank.heads:
            # A GEMM may store.
            self._start_next(number, lane, cause, time)

    def _finish(self, number: int, run: _Run | None, time: float) -> None:
        rank = self.ranks[number]
        if time >= self.ends[rank.replay]:
            self.ends[rank.replay] = time
            if rank.replay == self.replays - 1:
                self.last = run
        if rank.replay + 1 < self.replays:
            self.post(time + self.machine.replay, _BEGIN, (number, run))

    def _start_next(self, number: int, lane: str, cause: _Run | None, time: float) -> None:
        """Start the op at the head of a lane, if it can start."""
        rank, order = self.ranks[number], self.work.lanes[number][lane]
        head = rank.heads[lane]
        if rank.busy[lane] or head == len(order) or rank.missing[order[head]]:
            return
        at = order[head]
        outward = lane.startswith(OUTWARD_LANES)
        if rank.entered is None and (outward or self.work.link[number][at] is not None):
            return
        rank.busy[lane] = True
        rank.heads[lane] = head + 1
        run = _Run(number, at, rank.replay, cause, time)
        self.runs.append(run)
        op = self.work.ops[number][at]
        if isinstance(op, Gemm):
            self._gemm(run, self.work.cost[number][at], time)
        elif isinstance(op, Copy) and outward:
            self._copy(run, op, time)
        else:
            self._sum(run, self.work.cost[number][at], time)

    def _end(self, run: _Run, time: float) -> None:
        """An op frees its lane, unless its replay is over."""
        if run.replay != self.ranks[run.rank].replay:
            return
        lane = self.work.lane[run.rank][run.at]
        self.ranks[run.rank].busy[lane] = False
        self._start_next(run.rank, lane, run, time)

    def _done(self, run: _Run, time: float) -> None:
        """The result of an op can be used: its dependents may start."""
        run.done = time
        work, rank = self.work, self.ranks[run.rank]
        for at in work.dependents[run.rank][run.at]:
            rank.missing[at] -= 1
            if rank.missing[at]:
                continue
            rank.ready[at] = time
            lane = work.lane[run.rank][at]
            if lane == FLAG_LANE:
                self._flag_op(run.rank, at, run, time)
            else:
                self._start_next(run.rank, lane, run, time)
        rank.left -= 1
        if not rank.left:
            self._finish(run.rank, run, time)

    # --- signals --------------------------------------------------------------------------------------

    def _flag_op(self, number: int, at: int, cause: _Run | None, time: float) -> None:
        op = self.work.ops[number][at]
        run = _Run(number, at, self.ranks[number].replay, cause, time, time, time, time)
        self.runs.append(run)
        if isinstance(op, Signal):
            self.post(time + self.machine.signal, _SET, (op.flag, run), at)
            self.post(time, _DONE, run, at)
        elif isinstance(op, Wait):
            if self.flags[op.flag[:2]]:
                self._pass(op.flag, run, time)
            else:
                self.waiting[op.flag[:2]] = run
        else:
            assert isinstance(op, Barrier)
            here = self.barriers[run.replay, op.round]
            here.append(run)
            if len(here) == len(self.ranks):
                for each in here:
                    each.cause = run if each is not run else run.cause
                    each.issued = each.start = time
                    # A barrier at the start is the entry: every rank waits for a flag of every other rank.
                    each.end = time + (
                        self.machine.barrier if op.deps else max(self.machine.barrier, self.machine.entry)
                    )
                    self.post(each.end, _DONE, each, each.at)

    def _set(self, flag: Flag, setter: _Run, time: float) -> None:
        if self.flags[flag[:2]]:
            op = self.work.ops[setter.rank][setter.at]
            raise PlanError(f"{op.describe()}: the flag is set already, a signal would be lost")
        self.flags[flag[:2]] = 1
        self.setters[flag[:2]] = setter
        run = self.waiting.pop(flag[:2], None)
        if run is not None:
            run.cause = setter
            self._pass(flag, run, time)

    def _pass(self, flag: Flag, run: _Run, time: float) -> None:
        """A wait finds its flag set, and resets it."""
        self.flags[flag[:2]] = 0
        # A flag that was set before anyone waited costs what it costs to look.
        run.issued = run.start = time
        run.end = time + self.machine.wait
        self.post(run.end, _DONE, run, run.at)

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

    def _gemm(self, run: _Run, cost: GemmCost, time: float) -> None:
        rank = self.ranks[run.rank]
        run.start, end = self._dispatch(rank, time + self.machine.gemm_launch, cost.tiles, cost.tile_us)
        rank.power_free = max(rank.power_free, run.start) + cost.flop / self.work.power[run.rank]
        run.end = max(end, rank.power_free)
        run.computes = True
        if self.work.link[run.rank][run.at] is not None:
            self.post(run.start, _STORES, run, run.at)  # by then all GEMMs that store earlier have begun
            return
        self.post(run.end, _DONE, run, run.at)
        self.post(run.end, _END, run, run.at)

    def _store(self, run: _Run, time: float) -> None:
        """A GEMM begins that ends once it has computed and its link has carried what it stores."""
        ends, op = self.work.link[run.rank][run.at], self.work.ops[run.rank][run.at]
        assert isinstance(op, Gemm) and ends is not None
        link, computed = self.machine.link(*ends), run.end
        for port in ports_of(self.machine, ends):
            carried = stored_us(self.work.plan, self.machine, op, port.bandwidth)
            self.stored[port] = max(self.stored[port], time) + carried
            run.end = max(run.end, self.stored[port])
        run.stores = run.end - computed
        self.post(run.end + link.latency, _DONE, run, run.at)
        self.post(run.end, _END, run, run.at)

    def _sum(self, run: _Run, duration: float, time: float) -> None:
        """A kernel bound by memory takes all SMs, after the tiles that they have already."""
        rank = self.ranks[run.rank]
        run.start, run.end = self._dispatch(rank, time + self.machine.gemm_launch, self.machine.sms, duration)
        run.computes = True
        self.post(run.end, _DONE, run, run.at)
        self.post(run.end, _END, run, run.at)

    # --- links ----------------------------------------------------------------------------------------

    def _copy(self, run: _Run, op: Copy, time: float) -> None:
        rank, cost, ends = self.ranks[run.rank], self.work.cost[run.rank][run.at], self.work.link[run.rank][run.at]
        assert rank.entered is not None
        time = run.start = max(time, max(rank.ready[run.at], rank.entered) + self.machine.copy_launch)
        run.moves = True
        if ends is None:
            self._copied(run, time + cost, 0.0)
            return
        link = self.machine.link(*ends)
        bandwidth = copy_bandwidth(self.machine, op, link)
        flow = _Flow(run, copy_ports(self.machine, op, ends), link, bandwidth, float(cost), time)
        self.post(time + link.gap, _FLOWS, (flow, -1), run.at)

    def _flow_event(self, flow: _Flow, version: int, time: float) -> None:
        """A copy begins to flow (version -1), or ends if its rate has not changed since the end was scheduled."""
        if version == -1:
            self.engines[flow.run.rank].append(flow)
            for port in flow.ports:
                self.ports[port].append(flow)
            flow.since = time
            self._rates(flow, time)
        elif version == flow.version:
            self.engines[flow.run.rank].remove(flow)
            for port in flow.ports:
                self.ports[port].remove(flow)
            self._copied(flow.run, time, flow.link.latency)
            self._rates(flow, time)

    def _copied(self, run: _Run, time: float, latency: float) -> None:
        """The engine has finished a copy."""
        run.end = time
        self.post(time + latency, _DONE, run, run.at)
        held = self.machine.signal_gap if run.at in self.work.signalled[run.rank] else 0.0
        self.post(time + held, _END, run, run.at)

    def _rates(self, changed: _Flow, time: float) -> None:
        """Schedule anew the ends of copies that share an engine or a port with one that begins or ends."""
        near = chain.from_iterable(self.ports[port] for port in changed.ports)
        for flow in dict.fromkeys((*self.engines[changed.run.rank], *near)):
            moving = sum(other.link is flow.link for other in self.engines[flow.run.rank])
            each = flow.bandwidth
            if moving > self.machine.copy_streams and flow.link is self.machine.nvlink:
                each = self.machine.contended / moving
            rate = min(each, *(port.bandwidth / len(self.ports[port]) for port in flow.ports)) * 1e3
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (time - flow.since))
                flow.since, flow.rate = time, rate
                flow.version += 1
                self.post(time + flow.left / rate, _FLOWS, (flow, flow.version), flow.run.at)
