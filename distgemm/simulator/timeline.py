"""A predicted replay: when each op runs, and what bounds it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from distgemm.arguments import integer, wrong
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, Signal, Wait, link_of
from distgemm.plan.plan import Plan
from distgemm.simulator.costs import stored_us
from distgemm.simulator.machine import Machine

__all__ = ["FLAG_LANE", "Event", "Interval", "Timeline", "arrivals", "joined", "lane_order", "op_title"]

FLAG_LANE = "flags"
"""The lane of signals, waits and barriers: they overlap, and occupy nothing."""

LANE_ORDER = ("gemm", "copy", "network", "sums", "local")
"""How the names of lanes begin, in the order in which they are drawn. Only measured replays have "sums"."""

Interval = tuple[float, float]


class Event(NamedTuple):
    """An op and when it ran.

    Attributes:
        rank: the rank that executes it.
        lane: "gemm 0", "gemm 1", ..., "copy", "network", "local" or "flags".
        op: of the plan.
        start: when the first tile of a GEMM starts, or the copy engine starts; us from the end of the replay before,
            on the rank that ended that one first.
        end: us. What a copy moved or a GEMM stored has arrived one latency of its link later, and can then be
            signalled.
    """

    rank: int
    lane: str
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A predicted replay of a plan. Times are us.

    Attributes:
        plan: what is replayed.
        machine: on what.
        events: every op of every rank, by rank and start, of the last of several replays in a row.
        time: of each replay in a row of replays; the mean if they differ.
        cold: of a single replay that all ranks start at once.
        gemm_alone: of a replay that is the whole local GEMM, on the rank with most of it.
        copies_alone: of a replay that only copies between ranks, and moves what GEMMs store.
        critical: time on the critical path by cause: "compute", "copies", "latency". The parts add up to ``time``.
        head: exposed time before the slowest rank's first GEMM, without the time between replays.
        tail: exposed time after its last GEMM; if copies bound the plan, after the last tile that it receives.
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
        """Time for which each link (src, dst) carries a copy, or what a GEMM stores, us."""
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for event in self.events:
            link = link_of(event.op)
            if link is not None:
                busy[link] += self._carried(event, link)
        return dict(sorted(busy.items()))

    @cached_property
    def hidden(self) -> float:
        """Share of the time of copies between ranks during which their receiver multiplies; 1 without copies.

        What a GEMM stores counts as a copy that is spread over the GEMM.
        """
        gemms: dict[int, list[Interval]] = defaultdict(list)
        for event in self.events:
            if isinstance(event.op, Gemm):
                gemms[event.rank].append((event.start, event.end))
        busy = {rank: joined(intervals) for rank, intervals in gemms.items()}
        total = covered = 0.0
        for event in self.events:
            link = link_of(event.op)
            if link is None:
                continue
            total += self._carried(event, link)
            both = covered_length(busy.get(link[1], []), event.start, event.end)
            if isinstance(event.op, Copy):
                covered += both
            elif both:
                covered += self._carried(event, link) * both / (event.end - event.start)
        return covered / total if total else 1.0

    def _carried(self, event: Event, link: tuple[int, int]) -> float:
        """Time for which a link carries what an op moves over it, us."""
        if isinstance(event.op, Gemm):
            return stored_us(self.plan, self.machine, event.op, self.machine.link(*link).bandwidth)
        return event.end - event.start

    def busy(self, rank: int, kind: type[Op]) -> float:
        """Time for which a rank has an op of this class running, us."""
        rank = integer("rank", rank, 0, self.plan.world_size - 1)
        if not isinstance(kind, type) or not issubclass(kind, Op):
            raise wrong("kind", "a class of ops, such as Gemm", kind)
        found = [(e.start, e.end) for e in self.events if e.rank == rank and isinstance(e.op, kind)]
        return sum(end - start for start, end in joined(found))

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
        """Pairs of events as :func:`arrivals` pairs their ops, by the start of the second one."""
        at = {(event.rank, event.op.id): event for event in self.events}
        found = [(at[copy.rank, copy.id], at[user.rank, user.id]) for copy, user in arrivals(self.plan)]
        return tuple(sorted(found, key=lambda pair: (pair[1].rank, pair[1].start)))


def arrivals(plan: Plan) -> tuple[tuple[Op, Op], ...]:
    """Pairs of an op and an op on another rank that uses its result, for every signal that is not a credit.

    With mechanism "push" a pair is a copy and the op that uses the tile. With "pull" it is the op that wrote a slot,
    such as a local copy from a shard, and the copy from that slot. With "store" it is a GEMM and the op that adds to
    the partial sum.
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


def op_title(op: Op) -> str:
    """The name of an op in a timeline: its iteration or operand, its tile, and the other rank."""
    tile = ",".join(map(str, op.tile))
    what = f"{op.operand}({tile})" if isinstance(op, Copy) else f"{op.kind} {op.iteration} ({tile})"
    link = link_of(op)
    if link is None:
        return what
    src, dst = link
    return f"{what} to rank {dst}" if op.rank == src else f"{what} from rank {src}"


def lane_order(lane: str) -> tuple[int, str]:
    """The place of a lane among those of a rank, as a key for sorting."""
    return LANE_ORDER.index(lane.split()[0]), lane


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals, in ascending order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def covered_length(busy: Sequence[Interval], start: float, end: float) -> float:
    """The length of start..end that disjoint ascending intervals cover."""
    covered = 0.0
    at = max(bisect_left(busy, (start, start)) - 1, 0)
    while at < len(busy) and busy[at][0] < end:
        covered += max(0.0, min(end, busy[at][1]) - max(start, busy[at][0]))
        at += 1
    return covered
