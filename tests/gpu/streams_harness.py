"""A million replays of all kinds of executables, by ranks that are streams of one process on one GPU.

    python -m tests.gpu.streams_harness --replays 1000000 --ranks 2 --json FILE
    python -m tests.gpu.streams_harness --control                nobody waits for flags: something must be wrong
    python -m tests.gpu.streams_harness --build                  compile the kernels, and end; it needs no GPU

All ranks replay the same executables in the same order, with other inputs each time: eager calls, ordinary calls (which
record graphs by themselves), replays of recorded calls, and graphs of the caller with several calls. Ranks are late at
random, on the GPU and on the host. D is NaN before each call, and every element is compared behind it. Between segments
all flags must be as they were at the start, and slots become NaN.

Each rank's kernels take a share of the SMs, so that all that wait for one another are resident. The other SMs are for
copies, which on one GPU are kernels, and for sums, kernels that wait for flags, and comparisons.

Two ranks in one process share what two processes do not: the hardware's queues. A branch of a rank's graph that waits
may stand before a branch of the other rank's graph in such a queue. A graph that a rank records while kernels of the
other rank wait for it gets stuck, too (``--graphs any``). Then nothing moves, and neither rank is at fault. So a
process that is stuck says what it waits for and ends. The next one takes fewer graphs (``--graphs``), and the result
says so. With two streams of GEMMs graphs have more branches, and get stuck within a thousand replays
(``--gemm-streams 2``).

The last line of the output is one JSON object. The exit status is that of the first process: 0 where all replays were
made and right, 1 where an element was wrong or something was left over, 2 where replays are missing, 3 where nothing
moved, and 4 where it failed otherwise. With ``--control`` it is 0 where something was wrong, and 5 where nothing was.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args

import torch
import typer

from distgemm.gemm.launches import FixedLaunch
from distgemm.gemm.streams import new_stream
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.cuda import Replay
from distgemm.runtime.cuda.binding import Bound
from distgemm.runtime.cuda.lowering import most_flags
from distgemm.runtime.cuda.memops import clear, copy_box, mem_ops, wait_for, write
from distgemm.runtime.cuda.watchdog import explain_hang
from distgemm.runtime.cuda.workspace import Stage
from distgemm.runtime.executable import ExecutionConfig
from tests.gpu.cuda_worker import CONFIG, FROM_HEADS, TO_HEADS, Case, compile_kernels
from tests.gpu.one_process import Ranks, ignored_flags, limited_sms
from tests.gpu.test_cuda import ALL_REDUCE, CHAIN, GATHER, PAIRWISE, RING, mixed
from tests.gpu.test_shared import divisible

Graphs = Literal["any", "ahead", "none"]
"""Which calls become graphs: all; those that are recorded while nothing runs, so no ordinary ones; none."""
Mode = Literal["eager", "call", "replay", "graph"]

SETS, DRAWS = 2, 4
"""Of each executable: sets of tensors, and inputs that are copied into them."""
OUTER_GRAPHS = 24
MAX_BURSTS, MAX_BURST = 6, 3
"""Bursts of an outer graph, and calls of a burst."""
WEIGHTS: dict[Mode, int] = {"eager": 1, "call": 3, "replay": 5, "graph": 11}
"""How often a unit is of a mode. An eager call takes the host a millisecond."""
SEGMENT = 4000
"""Replays from one look at flags to the next."""
AHEAD = 3
"""Units that a rank may be ahead of the last one, and units of a rank that have not ended."""
SHORT_CYCLES, LONG_CYCLES = 60_000, 4_000_000
"""GPU cycles for which a rank sleeps at most: often, and rarely."""
MAX_CONNECTIONS = 32
"""Hardware queues. Each of the streams takes one."""
STREAMS_OF_A_RANK = 5
WRONG, MISSING, STUCK, FAILED, NOTHING_FOUND = 1, 2, 3, 4, 5


def cases(ranks: int, gemm_streams: int = 2) -> list[Case]:
    """Executables of all kinds, with so many streams of GEMMs at most."""
    mesh = (ranks,)
    cublas: dict[str, Any] = {"provider": "cublas", "config": None}
    share = f"{CONFIG}_share_2"
    unequal = tuple(64 * (1 + rank % 3) for rank in range(ranks))
    fp8: dict[str, Any] = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "partial_dtype": "bfloat16"}
    found = [
        *mixed(ranks),
        Case(GATHER, mesh, **cublas),
        Case(CHAIN, mesh, chunks=2, **cublas),
        Case(RING, mesh, chunks=2, workspace="bounded", sync="credit"),
        Case(PAIRWISE, mesh, mechanism="store"),
        Case(GATHER, mesh, chunks=2, config=share),
        Case(CHAIN, mesh, chunks=2, alpha=2.0, mechanism="store", config=share),
        Case(ALL_REDUCE, mesh, chunks=2, mechanism="store"),
        Case(CHAIN, mesh, chunks=2, dtype="float16", mechanism="store"),
        Case(CHAIN, mesh, chunks=2, config=None, mechanism="store", **fp8),
        Case(TO_HEADS[0], mesh),
        Case(TO_HEADS[0], mesh, chunks=2, copies=ranks, beta=1.0),
        Case(TO_HEADS[0], mesh, m=sum(unequal), rows=unequal, n=sum(unequal), n_per_rank=unequal),
        Case(FROM_HEADS[0], mesh, chunks=2),
        Case(FROM_HEADS[0], mesh, m=sum(unequal), rows=unequal, k=sum(unequal), k_per_rank=unequal, beta=1.0),
    ]
    found = [replace(case, gemm_streams=min(case.gemm_streams, gemm_streams)) for case in found]
    return found if ranks & (ranks - 1) == 0 else [divisible(case, ranks) for case in found]


# ---------------------------------------------------------------- what is done


class Spot(NamedTuple):
    """A set of tensors of an executable."""

    job: int
    set: int


Burst = tuple[Spot, ...]
"""Calls without anything between them, each on tensors of its own."""


@dataclass(frozen=True)
class Unit:
    """What a rank issues at once.

    Attributes:
        mode: how calls are made.
        redraws: sets of tensors that get other inputs before, and the numbers of these.
        bursts: the calls.
        graph: the number of the outer graph; -1: none.
    """

    mode: Mode
    redraws: tuple[tuple[Spot, int], ...]
    bursts: tuple[Burst, ...]
    graph: int = -1

    @property
    def replays(self) -> int:
        return sum(map(len, self.bursts))


class UnitSource:
    """Units in a random order, the same on all ranks.

    Args:
        seed: of the order.
        jobs: number of executables.
        graphed: those whose calls may become graphs.
        modes: the modes of units.
    """

    def __init__(self, seed: int, jobs: int, graphed: Sequence[int], modes: Sequence[Mode]) -> None:
        self.chance = random.Random(seed)
        self.jobs, self.graphed, self.modes = range(jobs), list(graphed), modes
        self.outer: list[tuple[Burst, ...]] = []
        for number in range(OUTER_GRAPHS if self.graphed else 0):
            count = self.chance.randint(1, MAX_BURSTS)
            # A graph of a single call for one, and each executable in some graph.
            first = self.graphed[number % len(self.graphed)]
            self.outer.append(
                (self._burst(self.graphed, first), *(self._burst(self.graphed) for _ in range(count - 1)))
            )

    def _burst(self, jobs: Sequence[int], first: int | None = None) -> Burst:
        spots = [Spot(job, chosen) for job in jobs for chosen in range(SETS)]
        found = self.chance.sample(spots, min(len(spots), self.chance.randint(1, MAX_BURST)))
        if first is not None:
            found = [Spot(first, self.chance.randrange(SETS)), *(spot for spot in found if spot.job != first)]
        return tuple(found)

    def next(self) -> Unit:
        """A unit."""
        (mode,) = self.chance.choices(self.modes, [WEIGHTS[mode] for mode in self.modes])
        graph = self.chance.randrange(len(self.outer)) if mode == "graph" else -1
        if mode == "graph":
            bursts = self.outer[graph]
        else:
            bursts = (self._burst(self.jobs if mode == "eager" else self.graphed),)
        spots = dict.fromkeys(spot for burst in bursts for spot in burst)
        redraws = tuple((spot, self.chance.randrange(DRAWS)) for spot in spots if self.chance.random() < 0.7)
        return Unit(mode, redraws, bursts, graph)

    def segment(self, replays: int) -> list[Unit]:
        """Units with at least so many replays."""
        found: list[Unit] = []
        while sum(unit.replays for unit in found) < replays:
            found += [self.next() for _ in range(16)]
        return found


# ---------------------------------------------------------------- executables and their tensors


class Tensors(NamedTuple):
    """The tensors of a call, and the expected D."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    wanted: torch.Tensor
    differs: torch.Tensor


Inputs = list[list[torch.Tensor]]
"""By rank: A, B, C and the expected D."""


class Job:
    """An executable on all ranks, with its tensors.

    Attributes:
        case: what it is.
        plan: its plan.
        executables: by rank.
        sets: by rank and set.
        draws: by number and rank.
        replays: recorded calls by rank and set; empty if its calls become no graphs.
    """

    def __init__(self, case: Case, ranks: Ranks, seed: int) -> None:
        self.case, self.plan = case, case.plan()
        self.executables = ranks.executables(self.plan, ExecutionConfig(**case.execution_options()))
        self.draws = [draw(case, self.plan, ranks.device, seed * DRAWS + number) for number in range(DRAWS)]
        self.sets = [[self._tensors(rank) for _ in range(SETS)] for rank in range(ranks.count)]
        self.replays: list[list[Replay]] = [[] for _ in range(ranks.count)]

    def _tensors(self, rank: int) -> Tensors:
        a, b, c, wanted = (x.clone() for x in self.draws[0][rank])
        return Tensors(a, b, c, torch.empty_like(wanted), wanted, torch.empty_like(wanted, dtype=torch.bool))

    def call(self, rank: int, chosen: int) -> None:
        """An ordinary call."""
        t, options = self.sets[rank][chosen], self._options()
        self.executables[rank](t.a, t.b, t.c if self.case.beta else None, out=t.d, **options)

    def eager(self, rank: int, chosen: int) -> None:
        """A call that takes no graph, even if there is one."""
        made = self.executables[rank]
        stream = made._current_stream()
        with made._order.issuing():
            made._put_eager(self.bind(rank, chosen), stream)

    def bind(self, rank: int, chosen: int) -> Bound:
        """A call that is ready to be put on streams. Its kernels are loaded."""
        t, made = self.sets[rank][chosen], self.executables[rank]
        tensors = (t.a, t.b, t.c if self.case.beta else None, None, None, None, t.d, None)
        return made.binder.bind(made._checked(tensors, **self._options()), made.workspace.next_buffer)

    def replay(self, rank: int, chosen: int) -> None:
        """A replay of a recorded call."""
        self.replays[rank][chosen]()

    def record(self, rank: int) -> None:
        """Record a call on each set of tensors."""
        made = self.executables[rank]
        self.replays[rank] = [
            made.capture(t.a, t.b, t.c if self.case.beta else None, out=t.d, **self._options()) for t in self.sets[rank]
        ]

    def _options(self) -> dict[str, Any]:
        return {"alpha": self.case.alpha, "beta": self.case.beta}


def draw(case: Case, plan: Plan, device: torch.device, seed: int) -> Inputs:
    """Inputs of small integers, sparse, so that all sums are exact; and the shards of D that they give."""
    p = plan.problem
    generator = torch.Generator(device).manual_seed(seed)
    lead = (p.l,) if p.l > 1 else ()
    whole = {}
    for name, shape in {"A": (p.m, p.k), "B": (p.n, p.k), "C": (p.m, p.n)}.items():
        drawn = torch.randint(-1, 2, (*lead, *shape), generator=generator, device=device)
        drawn *= torch.rand(drawn.shape, generator=generator, device=device) < 0.25
        whole[name] = drawn.to(TORCH_DTYPES[str(p.dtype if name in "AB" else p.out_dtype)])
    exact = case.alpha * whole["A"].double() @ whole["B"].double().mT + case.beta * whole["C"].double()
    whole["D"] = exact.to(TORCH_DTYPES[str(p.out_dtype)])
    assert torch.equal(whole["D"].double(), exact), f"D is not exact: {case}"
    return [[whole[name][plan.shard(name, rank)].contiguous() for name in "ABCD"] for rank in range(plan.world_size)]


# ---------------------------------------------------------------- a rank


class Lane(Protocol):
    """The stream of a rank."""

    def inside(self) -> Any:
        """A context in which work is put on the stream."""

    def put(self, work: Callable[[], object]) -> None:
        """Put work on the stream that is no call of an executable."""

    def sleep(self, cycles: int) -> None:
        """Let the stream sleep."""

    def mark(self) -> Callable[[], bool]:
        """Says whether all that was put on the stream until now is done."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What replays a graph of the work."""


class GpuLane:
    """A stream of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = new_stream(device)
        self.events: deque[torch.cuda.Event] = deque()

    def inside(self) -> Any:
        return torch.cuda.stream(self.stream)

    def put(self, work: Callable[[], object]) -> None:
        work()

    def sleep(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def mark(self) -> Callable[[], bool]:
        event = self.events.popleft() if self.events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)

        def done() -> bool:
            if not event.query():  # type: ignore[no-untyped-call]
                return False
            self.events.append(event)
            return True

        return done

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        gc.disable()  # a graph that is destroyed meanwhile would spoil the capture
        try:
            with self.inside():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            gc.enable()
        graph.instantiate()
        return graph.replay


class RankRunner:
    """Issues units on one rank.

    Attributes:
        wrong: by job, how many elements were wrong.
        position: number of units that were issued.
        replays: number of replays by mode.
        late: how often it slept.
    """

    def __init__(self, rank: int, jobs: Sequence[Job], lane: Lane, device: torch.device, seed: int) -> None:
        self.rank, self.jobs, self.lane = rank, jobs, lane
        self.chance = random.Random(seed * 1000 + rank)
        self.wrong = torch.zeros(len(jobs), dtype=torch.int64, device=device)
        self.graphs: list[Callable[[], None]] = []
        self.unfinished: deque[Callable[[], bool]] = deque()
        self.position = self.late = 0
        self.replays: Counter[Mode] = Counter()

    def capture(self, outer: Sequence[tuple[Burst, ...]]) -> Iterator[None]:
        """Capture the outer graphs, one for each step of the iterator."""
        for bursts in outer:
            self.graphs.append(self.lane.capture(partial(self._captured, bursts)))
            yield

    def _captured(self, bursts: tuple[Burst, ...]) -> None:
        for burst in bursts:
            if self.chance.random() < 0.3:
                self.lane.sleep(self.chance.randrange(1, SHORT_CYCLES))
            self._burst(burst, Job.call)

    def issue(self, unit: Unit) -> None:
        """Issue a unit."""
        with self.lane.inside():
            if self.chance.random() < 0.15:
                limit = LONG_CYCLES if self.chance.random() < 0.05 else SHORT_CYCLES
                self.lane.sleep(self.chance.randrange(1, limit))
                self.late += 1
            for spot, number in unit.redraws:
                t = self.jobs[spot.job].sets[self.rank][spot.set]
                drawn = self.jobs[spot.job].draws[number][self.rank]
                for to, of in zip((t.a, t.b, t.c, t.wanted), drawn, strict=True):
                    self.lane.put(partial(to.copy_, of))
            if unit.mode == "graph":
                self.graphs[unit.graph]()
            else:
                make = {"eager": Job.eager, "call": Job.call, "replay": Job.replay}[unit.mode]
                for burst in unit.bursts:
                    self._burst(burst, make)
            self.unfinished.append(self.lane.mark())
        self.position += 1
        self.replays[unit.mode] += unit.replays

    def _burst(self, burst: Burst, make: Callable[[Job, int, int], None]) -> None:
        tensors = [self.jobs[spot.job].sets[self.rank][spot.set] for spot in burst]
        for t in tensors:
            self.lane.put(partial(t.d.fill_, float("nan")))
        for spot in burst:
            make(self.jobs[spot.job], self.rank, spot.set)
        for spot, t in zip(burst, tensors, strict=True):
            self.lane.put(partial(self._compare, t, self.wrong[spot.job]))

    @staticmethod
    def _compare(t: Tensors, wrong: torch.Tensor) -> None:
        torch.ne(t.d, t.wanted, out=t.differs)
        wrong.add_(t.differs.sum())

    def reap(self) -> int:
        """Forget units that have ended, and return how many there were."""
        before = len(self.unfinished)
        while self.unfinished and self.unfinished[0]():
            self.unfinished.popleft()
        return before - len(self.unfinished)


def drive(
    runners: Sequence[RankRunner], units: Sequence[Unit], chance: random.Random, beat: Callable[[], None]
) -> None:
    """Issue units on all ranks, in a random order that keeps that of each rank, and wait until all have ended.

    Args:
        runners: the ranks.
        units: what all of them issue.
        chance: which rank is next, and which one the host is late for.
        beat: is called whenever a unit has ended.
    """
    start = [runner.position for runner in runners]
    held: dict[int, int] = {}  # turns for which the host issues nothing on a rank
    while True:
        if sum(runner.reap() for runner in runners):
            beat()
        positions = [runner.position - first for runner, first in zip(runners, start, strict=True)]
        possible = [
            rank
            for rank, runner in enumerate(runners)
            if positions[rank] < min(len(units), min(positions) + AHEAD) and len(runner.unfinished) < AHEAD
        ]
        if not possible:
            if min(positions) == len(units) and not any(runner.unfinished for runner in runners):
                return
            time.sleep(2e-5)
            continue
        held = {rank: turns - 1 for rank, turns in held.items() if turns > 1}
        if chance.random() < 0.05:
            held[chance.randrange(len(runners))] = chance.randrange(1, 2 * AHEAD)
        ready = [rank for rank in possible if rank not in held]
        if ready:
            rank = ready[chance.randrange(len(ready))]
            runners[rank].issue(units[positions[rank]])
        elif chance.random() < 0.2:
            time.sleep(chance.random() * 2e-4)


# ---------------------------------------------------------------- where nothing moves


@dataclass
class Monitor:
    """A thread that ends the process where nothing moves.

    Attributes:
        stuck_s: for so many seconds.
        explain: says what the ranks wait for.
        phase: what is done.
        facts: what the result says.
    """

    stuck_s: float
    explain: Callable[[], list[str]]
    facts: dict[str, Any]
    phase: str = ""
    armed: bool = False
    last: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def beat(self) -> None:
        """Note that something has ended."""
        self.last = time.monotonic()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A time in which something ends every few seconds."""
        self.phase, self.last, self.armed = phase, time.monotonic(), True
        yield
        self.armed = False

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if self.armed and time.monotonic() > self.last + self.stuck_s:
                self._end()

    def _end(self) -> None:
        print(f"nothing has ended for {self.stuck_s:.0f} s, at: {self.phase}", flush=True)
        in_any_case = threading.Timer(8.0, self._exit)  # the driver may not answer
        in_any_case.start()
        for line in self.explain():
            print(f"  {line}", flush=True)
        in_any_case.cancel()
        self._exit()

    def _exit(self) -> None:
        print(json.dumps(self.facts | {"status": STUCK, "stuck_at": self.phase}), flush=True)
        os._exit(STUCK)


class Looker:
    """Reads flags beside ranks that are stuck."""

    def __init__(self, ranks: Ranks, runners: Sequence[RankRunner], stuck_s: float) -> None:
        self.ranks, self.runners, self.stuck_s = ranks, runners, stuck_s
        self.stream = new_stream(ranks.device)
        self.copies = [torch.empty_like(one.flag_memory(), device="cpu").pin_memory() for one in ranks.workspaces]

    def __call__(self) -> list[str]:
        found = [f"rank {r.rank}: {r.position} units issued, {len(r.unfinished)} not ended" for r in self.runners]
        with torch.cuda.stream(self.stream):
            for copy, one in zip(self.copies, self.ranks.workspaces, strict=True):
                copy.copy_(one.flag_memory(), non_blocking=True)
            event = self.stream.record_event()
        deadline = time.monotonic() + 4.0
        while not event.query():
            if time.monotonic() > deadline:
                return [*found, "the GPU copies no flags"]
            time.sleep(0.01)
        for rank, (copy, one) in enumerate(zip(self.copies, self.ranks.workspaces, strict=True)):
            flags = one.read(copy)
            made = None if flags.stage is Stage.IDLE else one.executables[flags.executable - 1]()
            if made is None:
                found.append(f"rank {rank}: between replays, left {flags.left}, entered {flags.entered}")
            else:
                found.append(explain_hang(made, flags, self.stuck_s))
                found.append(f"  {made.execution}, buffer {flags.buffer}, left {flags.left}, entered {flags.entered}")
        return found


# ---------------------------------------------------------------- one process


class Options(NamedTuple):
    """What a process runs.

    Attributes:
        replays: how many, of all ranks together: each is one on every rank.
        ranks: number of ranks.
        seed: of everything that is random.
        deadline: the time at which it ends, replays or not.
        graphs: which calls become graphs.
        reserve: SMs that GEMMs of no rank take.
        word: only cases with this word.
        stuck_s: seconds without a change after which the process ends.
        control: whether no call waits for flags.
        gemm_streams: streams of GEMMs of a call, at most.
    """

    replays: int
    ranks: int
    seed: int
    deadline: float
    graphs: Graphs
    reserve: int
    word: str
    stuck_s: float
    control: bool = False
    gemm_streams: int = 1


def selected(options: Options) -> list[Case]:
    """The cases of the options."""
    return [case for case in cases(options.ranks, options.gemm_streams) if options.word in str(case)]


def jobs_of(ranks: Ranks, found: Sequence[Case], seed: int) -> list[Job]:
    """The executables."""
    return [Job(case, ranks, seed * 1000 + number) for number, case in enumerate(found)]


def ranks_for(count: int, device: torch.device, found: Sequence[Case]) -> Ranks:
    """Ranks with room for all cases."""
    plans = [case.plan() for case in found]
    slot_bytes = max(plan.workspace_bytes(rank) for plan in plans for rank in range(count))
    flags = max(map(most_flags, plans))
    return Ranks(count, device, slot_bytes, flags)


def modes_of(graphs: Graphs, graphed: bool) -> list[Mode]:
    """The modes in which calls are made."""
    if not graphed:
        return ["eager"]
    every: list[Mode] = list(get_args(Mode))
    return [mode for mode in every if mode != "call" or graphs == "any"]


class Harness:
    """Executables, ranks and units.

    Args:
        options: what to run.
        ranks: the ranks.
        jobs: the executables.
        lanes: a stream for each rank.
    """

    def __init__(self, options: Options, ranks: Ranks, jobs: Sequence[Job], lanes: Sequence[Lane]) -> None:
        self.options, self.ranks, self.jobs = options, ranks, jobs
        self.graphed = [] if options.graphs == "none" else list(range(len(jobs)))
        self.modes = modes_of(options.graphs, bool(self.graphed))
        self.source = UnitSource(options.seed, len(jobs), self.graphed, self.modes)
        self.runners = [RankRunner(rank, jobs, lane, ranks.device, options.seed) for rank, lane in enumerate(lanes)]
        self.chance = random.Random(options.seed + 1)
        self.made = 0

    def drive(self, units: Sequence[Unit], beat: Callable[[], None]) -> list[str]:
        """Run units on all ranks. Returns what is wrong behind them."""
        drive(self.runners, units, self.chance, beat)
        self.made += sum(unit.replays for unit in units)
        return [*self.wrong(), *self.ranks.leftovers()]

    def wrong(self) -> list[str]:
        """The executables that gave wrong elements until now."""
        return [
            f"rank {runner.rank}: {count} wrong elements: {self.jobs[number].case}"
            for runner in self.runners
            for number, count in enumerate(runner.wrong.tolist())
            if count
        ]

    def first_units(self, mode: Mode, times: int = 1) -> Iterator[tuple[Case, list[Unit]]]:
        """Each executable by itself."""
        numbers = range(len(self.jobs)) if mode == "eager" else self.graphed
        for number in numbers:
            spots = [Spot(number, chosen) for chosen in range(SETS)]
            units = [Unit(mode, ((spot, turn % DRAWS),), ((spot,),)) for turn in range(times) for spot in spots]
            yield self.jobs[number].case, units

    def capture(self) -> None:
        """Capture the outer graphs. Ranks flip the buffers of their workspaces alike."""
        for _ in zip(*(runner.capture(self.source.outer) for runner in self.runners), strict=True):
            pass

    def facts(self) -> dict[str, Any]:
        """What the result says."""
        modes: Counter[Mode] = Counter()
        for runner in self.runners:
            modes.update(runner.replays)
        return {
            "replays": self.made,
            "ranks": self.options.ranks,
            "rank_replays": modes.total(),
            "modes": dict(modes),
            "executables": len(self.jobs),
            "graphed": len(self.graphed),
            "outer_graphs": len(self.source.outer),
            "late": sum(runner.late for runner in self.runners),
            "seed": self.options.seed,
            "graphs": self.options.graphs,
        }


def warm(lane: GpuLane, streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Load what torch and the driver load at the first use: nothing is loaded beside kernels that wait."""
    for stream in (lane.stream, *streams):
        with torch.cuda.stream(stream):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = torch.ones(64, 64, dtype=dtype, device=device)
                y = torch.empty_like(x)
                for _ in range(2):
                    torch.mm(x, x, out=y)
                    torch.addmm(y, x, x, out=y)
                y.copy_(x)
                copy_box(y[None], x[None], stream.cuda_stream)
                copy_box(y[None, :, :32], x[None, :, 32:], stream.cuda_stream)
                y.fill_(float("nan"))
                differs = torch.ne(x, y)
                torch.zeros((), dtype=torch.int64, device=device).add_(differs.sum())
            x.to(torch.float8_e4m3fn).clone()
            torch.cuda._sleep(10)  # type: ignore[no-untyped-call]
            flags = torch.zeros(2, dtype=torch.int32, device=device)
            at = flags.data_ptr()
            mem_ops([write(at), wait_for(at), *clear([at])], stream.cuda_stream)
        stream.synchronize()


def load(bound: Bound, streams: Sequence[torch.cuda.Stream]) -> None:
    """Load the kernels of a call: one that is loaded later might wait for those that run.

    What binds the kernels of CUTLASS loads them. cuBLAS selects and loads its own when it multiplies.
    """
    for launch in chain.from_iterable(bound.launches):
        if isinstance(launch, FixedLaunch):
            for stream in streams:
                launch(stream.cuda_stream)


def run(options: Options) -> int:
    """Run the harness in this process. Returns the exit status."""
    started = time.monotonic()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    found = selected(options)
    if not found:
        raise ValueError(f"no case has the word {options.word!r}")
    if options.ranks * STREAMS_OF_A_RANK > MAX_CONNECTIONS:
        raise ValueError(f"at most {MAX_CONNECTIONS // STREAMS_OF_A_RANK} ranks, got {options.ranks}")
    properties = torch.cuda.get_device_properties(device)
    sms = (properties.multi_processor_count - options.reserve) // options.ranks // 2 * 2
    print(f"{len(found)} executables on {options.ranks} ranks, {sms} SMs each, graphs: {options.graphs}", flush=True)
    compile_kernels(found)
    print(f"compiled or found after {time.monotonic() - started:.1f} s", flush=True)
    with limited_sms(sms), ignored_flags(device) if options.control else nullcontext():
        ranks = ranks_for(options.ranks, device, found)
        lanes = [GpuLane(device) for _ in range(options.ranks)]
        for lane, one in zip(lanes, ranks.workspaces, strict=True):
            warm(lane, [*one.streams, one.capture_stream], device)
        harness = Harness(options, ranks, jobs_of(ranks, found, options.seed), lanes)
        for job in harness.jobs:
            for rank in range(options.ranks):
                load(job.bind(rank, 0), [lanes[rank].stream, *ranks.workspaces[rank].streams])
        torch.cuda.synchronize()
        ranks.poison()  # what was loaded has written into slots
        torch.cuda.synchronize()
        print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
        facts: dict[str, Any] = {"gpu": properties.name, "sms_of_a_rank": sms, "command": " ".join(sys.argv)}
        monitor = Monitor(options.stuck_s, Looker(ranks, harness.runners, options.stuck_s), facts)
        monitor.start()
        problems = first_replays(harness, monitor) or many_replays(harness, monitor)
    facts |= harness.facts()
    status = WRONG if problems else MISSING if harness.made < options.replays else 0
    if options.control:
        status = 0 if problems else NOTHING_FOUND
    for problem in problems:
        print(problem, flush=True)
    wrong = sum(int(runner.wrong.sum()) for runner in harness.runners)
    facts |= {"wrong_elements": wrong, "problems": problems[:20], "status": status}
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts), flush=True)
    return status


def first_replays(harness: Harness, monitor: Monitor) -> list[str]:
    """Each executable by itself, in each mode, then each outer graph. Returns what is wrong."""

    def each(mode: Mode, times: int) -> list[str]:
        for case, units in harness.first_units(mode, times):
            with monitor.during(f"{mode}, {case}"):
                if problems := harness.drive(units, monitor.beat):
                    return problems
        print(f"each executable alone, {mode}: right", flush=True)
        return []

    if problems := each("eager", 2):
        return problems
    if not harness.graphed:
        return []
    for number in harness.graphed:
        for rank in range(harness.ranks.count):
            harness.jobs[number].record(rank)
    harness.capture()
    torch.cuda.synchronize()
    for mode in harness.modes:
        if mode in ("replay", "call") and (problems := each(mode, 4)):
            return problems
    for number, bursts in enumerate(harness.source.outer):
        with monitor.during(f"outer graph {number} of {sum(map(len, bursts))} calls"):
            if problems := harness.drive([Unit("graph", (), bursts, number)] * 3, monitor.beat):
                return problems
    print(f"{len(harness.source.outer)} outer graphs: right", flush=True)
    return []


def many_replays(harness: Harness, monitor: Monitor) -> list[str]:
    """All of it at random. Returns what is wrong."""
    options, began, told = harness.options, time.monotonic(), 0.0
    before = harness.made
    while harness.made < options.replays and time.time() < options.deadline:
        units = harness.source.segment(min(SEGMENT, options.replays - harness.made))
        with monitor.during(f"replay {harness.made} and later ones"):
            if problems := harness.drive(units, monitor.beat):
                return [f"in replays {harness.made - sum(unit.replays for unit in units)}..{harness.made}:", *problems]
        harness.ranks.poison()
        torch.cuda.synchronize()
        if time.monotonic() > told + 5.0:
            told = time.monotonic()
            each = (told - began) / (harness.made - before) * 1e6
            print(f"{harness.made:,} replays, 0 wrong elements, {each:.0f} us each", flush=True)
    return []


# ---------------------------------------------------------------- processes


def attempts(graphs: Graphs) -> list[Graphs]:
    """What processes take, one after the other, as long as they are stuck."""
    every: list[Graphs] = list(get_args(Graphs))
    return every[every.index(graphs) :]


def supervise(arguments: Sequence[str], graphs: Graphs, deadline: float) -> tuple[int, list[dict[str, Any]]]:
    """Run processes until one is not stuck. Returns the exit status, and what each has found.

    The status is that of the first process, so what it could not do is not forgotten.
    """
    found: list[dict[str, Any]] = []
    for attempt in attempts(graphs):
        environment = os.environ | {
            "CUDA_DEVICE_MAX_CONNECTIONS": str(MAX_CONNECTIONS),
            "CUDA_MODULE_LOADING": "EAGER",  # a kernel that is loaded later waits for those that run
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "tests.gpu.streams_harness", *arguments, "--child", "--graphs", attempt]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            killer = threading.Timer(max(1.0, deadline + 45.0 - time.time()), process.kill)
            killer.start()
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line
            status = process.wait()
            killer.cancel()
        found.append(json.loads(last) if last.startswith("{") else {"status": FAILED, "graphs": attempt})
        if status != STUCK or time.time() > deadline:
            break
    return int(found[0]["status"]), found


def main(
    replays: Annotated[int, typer.Option(help="How many; each is one on every rank.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time for everything.")] = 480.0,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    graphs: Annotated[str, typer.Option(help="Calls that become graphs: any, ahead, none.")] = "ahead",
    reserve: Annotated[int, typer.Option(help="SMs that GEMMs of no rank take.")] = 28,
    word: Annotated[str, typer.Option(help="Only executables with this word.")] = "",
    stuck: Annotated[float, typer.Option(help="Seconds without a change after which a process ends.")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    gemm_streams: Annotated[int, typer.Option(help="Streams of GEMMs of a call, at most.")] = 1,
    control: Annotated[bool, typer.Option("--control", help="Do not wait for flags.")] = False,
    build: Annotated[bool, typer.Option("--build", help="Compile the kernels, and end.")] = False,
    arch: Annotated[str, typer.Option(help="With --build: the architecture.")] = "90a",
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    until: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Run the harness."""
    if graphs not in get_args(Graphs) or replays < 1 or ranks < 2:
        raise typer.BadParameter(
            f"graphs is one of {', '.join(get_args(Graphs))}, replays > 0 and ranks > 1; got {graphs}, {replays}, "
            f"{ranks}"
        )
    chosen: Graphs = graphs  # type: ignore[assignment]
    if build:
        compile_kernels([case for case in cases(ranks, gemm_streams) if word in str(case)], arch)
        return
    if child:
        try:
            status = run(Options(replays, ranks, seed, until, chosen, reserve, word, stuck, control, gemm_streams))
        except Exception:
            traceback.print_exc()
            status = FAILED
        sys.stdout.flush()
        os._exit(status)  # the end of the interpreter would wait for what the GPU still does
    deadline = time.time() + seconds
    arguments = [f"--replays={replays}", f"--ranks={ranks}", f"--seed={seed}", f"--reserve={reserve}"]
    arguments += [f"--word={word}", f"--stuck={stuck}", f"--until={deadline}", f"--gemm-streams={gemm_streams}"]
    arguments += ["--control"] * control
    status, found = supervise(arguments, chosen, deadline)
    result = {"command": " ".join(sys.argv), "status": status, "attempts": found}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    sys.exit(status)


if __name__ == "__main__":
    typer.run(main)
