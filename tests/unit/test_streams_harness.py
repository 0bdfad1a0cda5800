"""The harness of many replays in one process without a GPU: its ranks, its units, and what it finds."""

from __future__ import annotations

import ctypes
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from distgemm.gemm.flags import MemOp
from distgemm.runtime.cuda import executable, workspace
from distgemm.runtime.cuda.binding import Binder
from tests.gpu import one_process, streams_harness
from tests.gpu.cuda_worker import Case
from tests.gpu.streams_harness import (
    DRAWS,
    MISSING,
    STUCK,
    WRONG,
    Harness,
    Job,
    Looker,
    Mode,
    Monitor,
    Options,
    Spot,
    Unit,
    UnitSource,
    attempts,
    cases,
    drive,
    modes_of,
    ranks_for,
)
from tests.gpu.test_cuda import ALL_REDUCE, CHAIN, GATHER, PAIRWISE
from tests.unit.cuda_emulation import Machine, Task, record_launches
from tests.unit.test_cuda_executable import PretendedOrder, PretendedRecording, PretendedStream

SMALL: dict[str, Any] = {"m": 32, "n": 32, "k": 64, "config": None}
CPU = torch.device("cpu")


def small_cases(ranks: int) -> list[Case]:
    """Cases whose actions end also where a rank's streams are one."""
    return [
        Case(GATHER, (ranks,), **SMALL),
        Case(CHAIN, (ranks,), chunks=2, **SMALL),
        Case(PAIRWISE, (ranks,), beta=1.0, **SMALL),
        Case(GATHER, (ranks,), chunks=2, mechanism="pull", **SMALL),
        Case(CHAIN, (ranks,), chunks=2, gemm_streams=1, wait_by="kernel", **SMALL),
        Case(CHAIN, (ranks,), chunks=2, beta=1.0, alpha=2.0, mechanism="store", **SMALL),
        Case(ALL_REDUCE, (ranks,), chunks=2, mechanism="store", **SMALL),
    ]


class MemoryMachine(Machine):
    """Flags are in the memory of the ranks."""

    def __init__(self) -> None: ...

    def done(self, task: Task) -> bool:
        if not isinstance(task, MemOp):
            return super().done(task)
        if task.wait:
            return ctypes.c_int32.from_address(task.address).value == task.value
        kind = ctypes.c_int64 if task.double else ctypes.c_int32
        kind.from_address(task.address).value = task.value
        return True


class PretendedGraph:
    """A graph of tasks."""

    tasks: list[Task]
    capturing = False

    def __init__(self, keep_graph: bool = False) -> None: ...

    def capture_begin(self, capture_error_mode: str) -> None:
        self.before = len(self.tasks)

    def capture_end(self) -> None:
        self.captured = self.tasks[self.before :]
        del self.tasks[self.before :]

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        self.tasks.extend(self.captured)


class CpuLane:
    """A queue of tasks, which runs in order when somebody asks whether it is done."""

    def __init__(self, world: World) -> None:
        self.world, self.queue, self.put_in, self.ended = world, deque[Task](), 0, 0
        self.slept = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        yield
        self._take()

    def _take(self) -> None:
        self.queue.extend(self.world.tasks)
        self.put_in += len(self.world.tasks)
        self.world.tasks.clear()

    def put(self, work: Callable[[], object]) -> None:
        self.world.tasks.append(work)

    def sleep(self, cycles: int) -> None:
        self.slept += 1

    def mark(self) -> Callable[[], bool]:
        self._take()
        end = self.put_in

        def done() -> bool:
            self.world.step()
            return self.ended >= end

        return done

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = PretendedGraph()
        self.world.capturing = True
        graph.capture_begin("thread_local")
        work()
        graph.capture_end()
        self.world.capturing = False
        return graph.replay


class World:
    """All ranks on the CPU."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks, self.machine, self.capturing = tasks, MemoryMachine(), False
        self.lanes: list[CpuLane] = []
        self.chance, self.idle = random.Random(1), 0

    def step(self) -> None:
        """Let a lane go on for some tasks."""
        lane = self.lanes[self.chance.randrange(len(self.lanes))]
        for _ in range(self.chance.randrange(1, 40)):
            if not lane.queue or not self.machine.done(lane.queue[0]):
                self.idle += 1
                assert self.idle < 20_000, f"nothing moves: {[one.queue[:1] for one in self.lanes]}"
                return
            lane.queue.popleft()
            lane.ended += 1
            self.idle = 0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    tasks = record_launches(monkeypatch)
    PretendedGraph.tasks = tasks
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: PretendedStream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(executable, "Recording", partial(PretendedRecording, False))
    monkeypatch.setattr(executable, "captured_node", lambda stream: 0)
    monkeypatch.setattr(workspace, "new_stream", lambda device, **_: PretendedStream())
    monkeypatch.setattr(one_process, "CallOrder", lambda device: PretendedOrder())
    for name in ("sources", "choices"):
        monkeypatch.setattr(Binder, name, lambda self, **_: [])
    return tasks


def harness_of(tasks: list[Task], monkeypatch: pytest.MonkeyPatch, found: list[Case], ranks: int = 2) -> Harness:
    world = World(tasks)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: world.capturing)
    world.lanes = [CpuLane(world) for _ in range(ranks)]
    made = ranks_for(ranks, CPU, found)
    jobs = [Job(case, made, number) for number, case in enumerate(found)]
    return Harness(Options(400, ranks, 3, 0.0, "any", 0, "", 20.0), made, jobs, world.lanes)


class Calm:
    """A monitor that ends nothing."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        yield


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_kinds_of_calls_are_right(
    recorded: list[Task], monkeypatch: pytest.MonkeyPatch, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    harness, calm = harness_of(recorded, monkeypatch, small_cases(ranks), ranks), Calm()
    monitor: Any = calm
    assert streams_harness.first_replays(harness, monitor) == []
    first = harness.made
    harness = harness_with(harness, deadline=4e9, replays=first + 400 // ranks)
    assert streams_harness.many_replays(harness, monitor) == []
    facts = harness.facts()
    assert facts["replays"] == harness.made >= first + 400 // ranks
    assert facts["rank_replays"] == ranks * harness.made and set(facts["modes"]) == set(get_args(Mode))
    assert calm.beats and facts["late"]
    assert sum(made.graphs for job in harness.jobs for made in job.executables) > 0
    assert "outer graphs: right" in capsys.readouterr().out


def harness_with(harness: Harness, **options: Any) -> Harness:
    harness.options = harness.options._replace(**options)
    return harness


@pytest.mark.parametrize("number", range(7))
def test_flags_that_nobody_waits_for_are_found(
    recorded: list[Task], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    harness = harness_of(recorded, monkeypatch, small_cases(2)[number : number + 1])
    units = [Unit("eager", ((spot, turn % DRAWS),), ((spot,),)) for turn in range(20) for spot in (Spot(0, 0),)]
    with one_process.ignored_flags(CPU):
        problems = harness.drive(units, lambda: None)
    assert any("wrong elements" in problem for problem in problems)


def test_wrong_elements_and_leftovers_are_counted(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_of(recorded, monkeypatch, small_cases(2)[:2])
    units = [Unit("eager", (), ((spot,),)) for spot in harness.source.outer[0][0][:1] for _ in range(2)]
    assert harness.drive(units, lambda: None) == []
    (spot,) = units[0].bursts[0]
    harness.jobs[spot.job].sets[1][spot.set].wanted[3, 5] += 1
    (problem,) = harness.drive(units, lambda: None)
    assert problem.startswith("rank 1: 2 wrong elements: Case(")
    harness.ranks.workspaces[0].flag_memory()[-1] = 1
    assert [line.split(":")[0] for line in harness.ranks.leftovers()] == ["rank 0"]
    harness.ranks.poison()
    assert all(one.slots_of(0).eq(0xFF).all() for one in harness.ranks.workspaces)


def test_units_are_the_same_for_a_seed_and_use_everything() -> None:
    one, other, third = (UnitSource(seed, 30, range(0, 30, 2), get_args(Mode)) for seed in (5, 5, 6))
    assert one.outer == other.outer != third.outer
    units = one.segment(12000)
    assert units == other.segment(12000) and sum(unit.replays for unit in units) >= 12000
    assert {unit.mode for unit in units} == set(get_args(Mode))
    spots = {spot for unit in units for burst in unit.bursts for spot in burst}
    assert {spot.job for spot in spots} == set(range(30))
    assert all(len(set(burst)) == len(burst) for unit in units for burst in unit.bursts)
    graphed = {s.job for u in units if u.mode != "eager" for burst in u.bursts for s in burst}
    assert graphed == set(range(0, 30, 2)) == {spot.job for g in one.outer for burst in g for spot in burst}
    assert {number for unit in units for _, number in unit.redraws} == set(range(DRAWS))
    assert {unit.mode for unit in UnitSource(0, 3, [], modes_of("any", False)).segment(50)} == {"eager"}


def test_a_rank_keeps_its_order_and_is_not_far_ahead() -> None:
    order: list[tuple[int, int]] = []

    class Runner:
        def __init__(self, rank: int) -> None:
            self.rank, self.position, self.unfinished = rank, 7, deque[int]()

        def issue(self, unit: int) -> None:
            order.append((self.rank, unit))
            self.position += 1
            self.unfinished.append(unit)

        def reap(self) -> int:
            ended = 0
            while self.unfinished and all(one.position - 7 > self.unfinished[0] for one in runners):
                self.unfinished.popleft()
                ended += 1
            return ended

    runners: Any = [Runner(rank) for rank in range(3)]
    ended: list[int] = []
    units: Any = range(200)
    drive(runners, units, random.Random(2), lambda: ended.append(1))
    assert all([unit for rank, unit in order if rank == wanted] == list(range(200)) for wanted in range(3))
    positions, ahead = [0, 0, 0], Counter[int]()
    for rank, _ in order:
        positions[rank] += 1
        ahead[max(positions) - min(positions)] += 1
    assert max(ahead) == streams_harness.AHEAD and len({order[i][0] for i in range(0, 600, 3)}) == 3
    assert ended


def test_there_are_enough_executables_of_all_kinds() -> None:
    for ranks in (2, 3, 4):
        found = cases(ranks)
        assert len(found) >= 20 and len(set(found)) == len(found)
        for name in ("mechanism", "wait_by", "provider", "sync", "workspace", "dtype"):
            assert len({getattr(case, name) for case in found}) > 1, name
        assert all(case.plan().world_size == ranks for case in found)


def test_calls_become_graphs_as_asked_for() -> None:
    assert modes_of("any", True) == ["eager", "call", "replay", "graph"]
    assert modes_of("ahead", True) == ["eager", "replay", "graph"] and modes_of("none", False) == ["eager"]


def test_a_stuck_process_says_what_it_waits_for(
    recorded: list[Task], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = harness_of(recorded, monkeypatch, [small_cases(2)[0]])
    (unit,) = [Unit("eager", (), ((Spot(0, 1),),))]
    harness.runners[0].issue(unit)  # and not on rank 1
    assert not any(harness.runners[0].unfinished[0]() for _ in range(500))

    class Stream(PretendedStream):
        def record_event(self) -> Any:
            return SimpleNamespace(query=lambda: True)

    monkeypatch.setattr(streams_harness, "new_stream", lambda device, **_: Stream())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    looker = Looker(harness.ranks, harness.runners, 5.0)
    statuses: list[int] = []
    monkeypatch.setattr(streams_harness.os, "_exit", statuses.append)
    monitor = Monitor(0.0, looker, {"gpu": "none"})
    with monitor.during("eager"):
        monitor.beat()
        monitor._end()
    assert statuses == [STUCK] and not monitor.armed
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"gpu": "none", "status": STUCK, "stuck_at": "eager"}
    text = "\n".join(lines)
    assert "rank 0: 1 units issued, 1 not ended" in text and "rank 1: 0 units issued, 0 not ended" in text
    assert f"{GATHER} on rank 0 of 2 has not ended within 5 s: it waits for rank 1 at" in text
    assert "rank 1: between replays, left [" in text


def test_a_process_that_is_stuck_is_followed_by_one_with_fewer_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempts("any") == ["any", "ahead", "none"] and attempts("none") == ["none"]
    given: list[list[str]] = []
    ends = iter([(STUCK, f'{{"status": {STUCK}}}\n'), (0, '{"status": 0}\n')])

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            given.append(command)
            self.status, self.stdout = next(ends)
            self.stdout = ["a line\n", self.stdout]

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> int:
            return self.status

        def kill(self) -> None: ...

    monkeypatch.setattr(streams_harness, "subprocess", SimpleNamespace(Popen=Process, PIPE=-1))
    status, found = streams_harness.supervise(["--ranks=2"], "any", 4e9)
    assert status == STUCK and [one["status"] for one in found] == [STUCK, 0]
    assert [command[-1] for command in given] == ["any", "ahead"]
    assert len({WRONG, MISSING, STUCK, 0}) == 4
