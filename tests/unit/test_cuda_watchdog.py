"""The watchdog without a GPU: what it says, when a call is stuck, and what becomes of results."""

from __future__ import annotations

import _thread  # noqa: PLC2701  (starts threads that threading does not know)
import random
import re
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distgemm
from distgemm.plan.ops import Wait
from distgemm.runtime.cuda import watchdog
from distgemm.runtime.cuda.watchdog import Watchdog, explain_hang, reason_of_other_rank, store_of
from distgemm.runtime.cuda.watched import WatchedWorkspace, owed_flags
from distgemm.runtime.cuda.workspace import FLAG_BYTES, FlagValues, Stage, first_plan_flag, stage_index, stage_value
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    CHAINS,
    GATHERS,
    PAIRWISE,
    Data,
    Emulated,
    Machine,
    emulated,
    machine_of,
    run,
)


@pytest.mark.parametrize(
    ("stage", "values", "message"),
    [
        (Stage.ENTRY, {"left": [0, 0, 1, 0]}, r"at its start it waits for ranks \[1, 3\] to leave"),
        (Stage.BODY, {"flags": [1, 0, 0]}, r"it waits for rank 3 at rank 0 iteration 2: Wait .* \(and 1 later ones\)"),
        (Stage.BODY, {"flags": [1, 1, 1]}, "a kernel or a copy has not ended"),
        (Stage.BODY, {"flags": [1, 1, 1], "entered": [0, 1, 0, 1]}, r"at its end it waits for ranks \[2\] to begin"),
    ],
)
def test_the_message_says_what_a_replay_waits_for(stage: Stage, values: dict[str, list[int]], message: str) -> None:
    exe = emulated(ALL_REDUCES[0], 4)
    waits = [op for op in exe.plan.ops(0) if isinstance(op, Wait)]
    flags = [1] * (max(op.flag.number for op in waits) + 1)
    for op, value in zip(waits, values.get("flags", []), strict=False):
        flags[op.flag.number] = value
    for op in waits[3:]:
        flags[op.flag.number] = 1
    read = FlagValues(0, 1, stage, values.get("left", [1] * 4), values.get("entered", [1] * 4), flags)
    found = explain_hang(exe, read, 2.0)
    assert re.search(message, found), found
    assert f"{ALL_REDUCES[0]} on rank 0 of 4 has not ended within 2 s" in found
    assert "cannot be read" in explain_hang(exe, None, 2.0)


def content(flags: torch.Tensor) -> bytes:
    """What a copy of flags has, and a word behind them."""
    return flags.to(torch.int32).numpy().tobytes() + bytes(4)


def watched_without_gpu(workspace: Any, values: torch.Tensor) -> Any:
    """What the watchdog looks at, with flags that a test sets."""
    watched: Any = WatchedWorkspace.__new__(WatchedWorkspace)
    watched.workspace, watched.store, watched.lock, watched.under_way = workspace, None, Lock(), None
    watched.pending, watched.free_events, watched.ended, watched.failure = deque(), deque(), 0, None
    watched.warned, watched.failed, watched.last_change, watched.informed = False, False, (None, 0.0), set()
    watched.failing_since = None
    watched.read_flags = lambda: content(values)
    watched.use_own_context = lambda: None
    return watched


def test_a_call_is_stuck_once_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Machine(2, 256).workspaces[0]
    exe = SimpleNamespace(timeout=2.0, plan=SimpleNamespace(schedule="a schedule"), awaited=lambda values: ("", []))
    workspace.executables.append(lambda: exe)
    values = torch.zeros(2 * (first_plan_flag(2) + 4), dtype=torch.int32)
    watched = watched_without_gpu(workspace, values)
    now, died = [0.0], []
    monkeypatch.setattr(watchdog, "reason_of_other_rank", lambda store: None)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog, "explain_hang", lambda *_: "stuck")
    dog = Watchdog()
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append(now[0]))

    def look(until: float) -> None:
        while now[0] < until:
            now[0] += 0.5
            dog.look(watched)

    look(5)  # idle
    done = [False]
    for _ in range(2):
        watched.pending.append(SimpleNamespace(executable=exe, end=SimpleNamespace(query=lambda: done[0])))
    look(7)
    assert not caplog.records
    look(7.5)  # the replay has not begun: something before it has not ended
    assert not died and [record.levelname for record in caplog.records] == ["WARNING"]
    watched.read_flags = lambda: None  # the GPU does not answer at all
    look(10)
    assert not died
    look(10.5)
    assert died == [10.5]
    died.clear()
    watched.read_flags = lambda: content(values)
    values[stage_index(2)] = stage_value(1, Stage.BODY)
    look(12)
    values[first_plan_flag(2)] = 1  # a flag is set
    look(14.5)
    assert not died
    look(15)
    assert died == [15]
    watched.read_flags = lambda: None  # a replay was under way when the flags could be read last
    look(18)
    assert died == [15, 18]
    done[0] = True
    look(20)
    assert watched.ended == len(watched.free_events) == 2 and not watched.pending and died == [15, 18]


@pytest.mark.parametrize("ended", [[], [1], [2]])
def test_a_rank_that_waits_for_a_process_that_has_ended_gives_up_soon(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where the process is late, or where it waits for another one."""
    plan = distgemm.make_plan(distgemm.GemmProblem(24, 24, 24, dtype="float32"), GATHERS[0], 3, sync="barrier")
    workspace = machine_of([plan]).workspaces[0]
    workspace.processes = ["rank 0", "rank 1", "rank 2"]
    exe = Emulated(plan, 0, workspace).exe
    exe.timeout = 600.0
    buffer, base = workspace.buffers[0], workspace.buffers[0].bases[0]
    values = torch.zeros(2 * (first_plan_flag(3) + 64), dtype=torch.int32)
    values[stage_index(3)] = stage_value(1, Stage.ENTRY)
    values[(buffer.left(0, 2) - base) // FLAG_BYTES] = 1  # it waits for rank 1
    now, died = [0.0], list[tuple[float, str]]()
    monkeypatch.setattr(watchdog, "has_ended", lambda process: process in {f"rank {rank}" for rank in ended})
    monkeypatch.setattr(watchdog, "reason_of_other_rank", lambda store: None)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog, watched = Watchdog(), watched_without_gpu(workspace, values)
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append((now[0], message)))
    while now[0] < 700 and not died:
        now[0] += 0.5
        dog.look(watched)
    (at, message) = died[0]
    assert "at its start it waits for ranks [1] to leave" in message
    if ended == [1]:
        assert at < 5 and message.endswith("the processes of ranks [1] have ended")
    else:
        assert at > 600


@pytest.mark.parametrize(("ended", "until"), [(False, 600.0), (True, 3.0)])
def test_flags_that_cannot_be_read_are_read_in_a_context_of_its_own(
    ended: bool, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the timeout, or soon where a process has ended. The context costs memory, so not before."""
    plan = distgemm.make_plan(distgemm.GemmProblem(24, 24, 24, dtype="float32"), GATHERS[0], 3, sync="barrier")
    workspace = machine_of([plan]).workspaces[0]
    workspace.processes = [0, 1, 2]
    exe = Emulated(plan, 0, workspace).exe
    exe.timeout = 600.0
    values = torch.zeros(2 * (first_plan_flag(3) + 64), dtype=torch.int32)
    values[stage_index(3)] = stage_value(1, Stage.ENTRY)
    now, used, died = [0.0], list[float](), list[tuple[float, str]]()
    watched = watched_without_gpu(workspace, values)
    watched.read_flags = lambda: content(values) if used else None
    watched.use_own_context = lambda: used.append(now[0])
    watched.pending.append(SimpleNamespace(executable=exe, end=SimpleNamespace(query=lambda: False)))
    monkeypatch.setattr(watchdog, "has_ended", lambda process: ended and process == 2)
    monkeypatch.setattr(watchdog, "reason_of_other_rank", lambda store: None)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = Watchdog()
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append((now[0], message)))
    while now[0] < 700 and not died:
        now[0] += 0.5
        dog.look(watched)
    ((at, message),) = died
    assert used == [at] and until < at < until + 2
    assert "at its start it waits for ranks [1, 2] to leave their last replay" in message
    assert message.endswith("the processes of ranks [2] have ended") == ended


def test_a_rank_whose_call_failed_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Machine(2, 256).workspaces[0]
    workspace.memory = torch.empty(0)
    watched = watched_without_gpu(workspace, torch.zeros(0))
    watched.give_up("a kernel does not start")
    assert workspace.dead == "a kernel does not start"
    dog, died = Watchdog(), list[tuple[str, bool]]()
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append((message, first)))
    dog.watched[workspace] = watched
    dog._look_at_all()
    assert died == [("a kernel does not start", True)]
    watched.failure = None  # as _die leaves it
    dog._look_at_all()
    assert len(died) == 1


def test_looks_that_fail_are_repeated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    workspace = Machine(2, 256).workspaces[0]
    workspace.memory = torch.empty(0)
    watched = watched_without_gpu(workspace, torch.zeros(0))
    now, looks, broken = [0.0], list[float](), [True]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = Watchdog()
    dog.watched[workspace] = watched

    def look(watched: Any) -> None:
        looks.append(now[0])
        if broken[0]:
            raise ConnectionError("the store does not answer")

    monkeypatch.setattr(dog, "look", look)

    def look_until(end: float) -> None:
        while now[0] < end:
            now[0] += 1
            dog._look_at_all()

    look_until(30)
    assert looks[-1] == 30 and [record.levelname for record in caplog.records] == ["WARNING"]
    broken[0] = False
    look_until(31)
    broken[0] = True
    look_until(61)
    assert not watched.failed
    look_until(100)
    assert watched.failed and looks[-1] == 62
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert "no longer notices hangs" in caplog.records[-1].message


def test_a_failure_while_a_workspace_ends_is_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been done must not be done twice."""
    workspace = Machine(2, 256).workspaces[0]
    workspace.memory = torch.empty(0)
    watched = watched_without_gpu(workspace, torch.zeros(0))
    watched.give_up("a kernel does not start")
    dog = Watchdog()
    monkeypatch.setattr(dog, "_die", lambda *_, first: 1 / 0)
    dog.watched[workspace] = watched
    dog._look_at_all()
    assert watched.failed


def test_an_error_goes_to_the_thread_whose_step_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to a thread of autograd, which makes the calls of a backward pass and has no Python of its own."""
    workspace = Machine(2, 256).workspaces[0]
    watched = watched_without_gpu(workspace, torch.zeros(0))
    watched.owner, watched.streams = 0, {7: object()}
    watched.reclaim = lambda: None
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    exe: Any = SimpleNamespace(device=torch.device("cpu"), raise_if_dead=lambda: None)
    callers: list[int] = []

    def forward_or_backward() -> None:
        callers.append(threading.get_ident())
        watched.issued(exe, lambda: None, 7)

    def step() -> None:
        forward_or_backward()
        _thread.start_new_thread(forward_or_backward, ())  # as autograd starts its own
        while len(watched.pending) < 2:
            time.sleep(1e-3)

    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join()
    assert callers[0] != callers[1]
    assert [call.thread for call in watched.pending] == [stepping.ident] * 2


class StuckError(Exception):
    """What a thread gets."""


@pytest.mark.parametrize("first", ["watchdog", "call", "failed call"])
def test_a_thread_gets_one_error(first: str) -> None:
    """Of the watchdog, of its next call, or of one that could not be issued. A second one would come while the first is
    handled."""
    watched = watched_without_gpu(Machine(2, 256).workspaces[0], torch.zeros(0))
    watched.pending.append(SimpleNamespace(thread=threading.get_ident()))
    handled = 0
    try:
        if first == "watchdog":
            watched.raise_in_threads(StuckError)
        else:
            watched.raises_itself() if first == "call" else watched.give_up("a message is refused")
            raise StuckError
        for _ in range(1000):
            time.sleep(1e-5)
    except StuckError:
        handled += 1
        for _ in range(1000):
            time.sleep(1e-5)
        watched.raise_in_threads(StuckError)
        for _ in range(1000):
            time.sleep(1e-5)
    assert handled == 1


def test_a_call_may_be_issued_while_others_get_their_error() -> None:
    watched = watched_without_gpu(Machine(2, 256).workspaces[0], torch.zeros(0))

    class Call:
        """A call that another thread issues as soon as the watchdog asks for the thread of this one."""

        @property
        def thread(self) -> int:
            watched.pending.append(SimpleNamespace(thread=1))
            return 0  # no thread has this number

    watched.pending.append(Call())
    watched.raise_in_threads(StuckError)
    assert watched.informed == {0}


# --- what becomes of calls that were issued -------------------------------------------------------------


class Freeing:
    """The watchdogs of all ranks, on a workspace that has died: :meth:`Watchdog.free` without threads and a GPU.

    Args:
        machine: all ranks.
        ranks: by rank, its replays.
        silent: the rank that does not answer.
    """

    def __init__(self, machine: Machine, ranks: list[list[tuple[Emulated, Any]]], silent: int) -> None:
        self.machine, self.ranks, self.silent = machine, ranks, silent
        self.finished: dict[int, set[int]] = {}
        self.written: list[int] = []

    def poison(self, rank: int) -> None:
        """Fill a rank's slots with NaN."""
        for slots in self.machine.slots:
            slots[rank].fill_(0xFF)

    def values(self, workspace: Any) -> FlagValues:
        """What a copy of a rank's flags says."""
        size = first_plan_flag(workspace.world_size) + 64
        flags = [
            [self.machine.flags.get(buffer.bases[workspace.rank] + FLAG_BYTES * at, 0) for at in range(size)]
            for buffer in workspace.buffers
        ]
        return workspace.read(torch.tensor(flags))

    def step(self, ended: list[int]) -> bool:
        """One look of each watchdog; whether one of them wrote a flag."""
        done = {rank for rank, replays in enumerate(self.ranks) if ended[rank] == len(replays)} | {self.silent}
        for rank in range(len(self.ranks)):
            if self.finished.get(rank) != done:
                self.finished[rank] = done
                self.poison(rank)  # each its own, and one that of the silent rank
            if rank not in {*self.machine.aborted, self.silent} and self.machine.workspaces[rank].across is not None:
                flags, value = self.machine.workspaces[rank].closing()
                self.machine.flags |= dict.fromkeys(flags, value)
                self.machine.abort(rank)
                return True
        self.written = []
        for rank, replays in enumerate(self.ranks):
            if rank in done:
                continue
            workspace = self.machine.workspaces[rank]
            values = self.values(workspace)
            actions = replays[ended[rank]][0].actions
            self.written += owed_flags(workspace.buffers[values.buffer], values, actions, done - {rank})
        for address in self.written:
            assert self.machine.flags.get(address, 0) == 0
            self.machine.flags[address] = 1
        return bool(self.written)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (GATHERS[0], {}),
        (GATHERS[0], {"mechanism": "pull"}),
        (GATHERS[1], {"chunks": 2}),
        (CHAINS[0], {"mechanism": "store"}),
        (PAIRWISE, {"final_add": "epilogue", "mechanism": "store"}),
        (PAIRWISE, {"mechanism": "pull"}),
        (ALL_REDUCES[0], {"mechanism": "store"}),
    ],
)
def test_queued_calls_of_a_dead_workspace_give_their_result_or_nan(
    schedule: str, options: dict[str, Any], seed: int, recorded: list[Any]
) -> None:
    """A rank stops anywhere. Others have issued several calls, not equally many; each D element is right or NaN."""
    ranks, order = 3, random.Random(f"{schedule} {options} {seed}")
    plan = distgemm.make_plan(
        distgemm.GemmProblem(24, 24, 48, dtype="float32"), schedule, ranks, sync="barrier", **options
    )
    machine = machine_of([plan])
    silent = order.randrange(ranks)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = [Data(plan, 10 * seed + replay) for replay in range(6)]
    for rank in range(ranks):
        one = Emulated(plan, rank, machine.workspaces[rank])
        for replay, drawn in enumerate(data[: 6 - order.randrange(3) * (rank != silent)]):
            drawn.calls[rank].shards.pop("gathered", None)
            todo[rank].append((one, one.tasks(drawn.calls[rank], recorded, replay % 2)))
    actions = len(todo[silent][0][0].actions) + 1
    freeing = Freeing(machine, todo, silent)
    run(machine, todo, order, False, halts={silent: order.randrange(1, 2 * actions)}, stuck=freeing.step)
    assert freeing.finished  # the others were stuck
    lost = 0
    for replay, drawn in enumerate(data):
        for rank in set(range(ranks)) - {silent}:
            if replay < len(todo[rank]):
                found, wanted = drawn.calls[rank].out.double(), drawn.wanted[rank]
                assert (found.isnan() | (found == wanted)).all(), (replay, rank)
                lost += int(found.isnan().any())
    assert lost


def test_results_of_stuck_calls_become_nan_also_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots become NaN before a flag is set, and D once the calls have ended."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(watchdog, "finished_ranks", lambda store, ranks: set())
    used: list[tuple[int, Any]] = []  # memory that is not given to others before this stream has written it
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: used.append((x.data_ptr(), stream)))
    with torch.inference_mode():
        outs = [torch.zeros(2)]
    outs.append(torch.zeros(2))
    workspace = machine_of([emulated(GATHERS[0]).plan]).workspaces[0]
    stage = stage_value(1, Stage.ENTRY)
    flags = torch.zeros(2, first_plan_flag(2) + 4, dtype=torch.int32)
    flags[1, stage_index(2)] = stage
    flags[1, 3] = 1  # entered
    workspace.executables.append(lambda: SimpleNamespace(actions=[]))
    watched: Any = WatchedWorkspace.__new__(WatchedWorkspace)
    watched.workspace, watched.store, watched.under_way = workspace, SimpleNamespace(set=lambda *_: None), None
    watched.stream, watched.gave_up = "the watchdog's stream", False
    watched.read_flags = lambda: content(flags)
    did: list[Any] = []
    watched.poison = lambda rank: did.append(("poison", rank))

    def write(addresses: list[int], value: int) -> None:
        did.append((list(addresses), value))
        flags[1, stage_index(2)] *= 1 - value  # the replay goes on

    watched.write_flags = write
    watched.pending = deque(
        SimpleNamespace(end=SimpleNamespace(query=lambda: not flags[1, stage_index(2)]), out=lambda out=out: out)
        for out in outs
    )
    Watchdog().free(watched, {1})
    assert all(out.isnan().all() for out in outs) and not watched.pending
    assert used == [(out.data_ptr(), watched.stream) for out in outs]
    entry = workspace.buffers[1].left(0, 1)
    closed = [buffer.left(1, 0) for buffer in workspace.buffers]
    assert did == [("poison", 0), ("poison", 1), (closed, 0), ("poison", 0), ([entry], 1), ("poison", 0)]
    # Where this rank failed as it issued a call, the flags stay as its part left them.
    flags[1, stage_index(2)], watched.under_way, watched.gave_up = stage, None, True
    out = torch.zeros(2)
    watched.pending.append(SimpleNamespace(end=SimpleNamespace(query=lambda: True), out=lambda: out))
    Watchdog().free(watched, {1})
    assert out.isnan().all() and flags[1, stage_index(2)] == stage


# --- the thread -----------------------------------------------------------------------------------------


class WatchedGpu:
    """A workspace of a GPU, as far as the watchdog's thread asks for it."""

    device, memory, dead, unused = torch.device("cuda", 1), True, None, True


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """A watchdog that finds nothing to do."""
    monkeypatch.setattr(watchdog, "WatchedWorkspace", lambda workspace, store: SimpleNamespace(pending=(), failed=True))
    monkeypatch.setattr(watchdog, "store_of", lambda workspace: None)
    monkeypatch.setattr(watchdog.atexit, "register", lambda function: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    exchange = "cudaThreadExchangeStreamCaptureMode"
    monkeypatch.setattr(watchdog.runtime, exchange, lambda mode: (watchdog.runtime.cudaError_t.cudaSuccess, mode))
    return Watchdog()


def test_the_thread_makes_no_context_on_another_gpu(idle: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 is current as a thread begins, and calls of CUDA make a context on the current GPU."""
    did: list[Any] = []
    exchange = watchdog.runtime.cudaThreadExchangeStreamCaptureMode
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append((device, threading.current_thread().name)))
    noted = lambda mode: did.append("a call") or exchange(mode)  # noqa: E731
    monkeypatch.setattr(watchdog.runtime, "cudaThreadExchangeStreamCaptureMode", noted)
    idle.add(WatchedGpu())  # type: ignore[arg-type]
    idle.stop()
    assert did == [(WatchedGpu.device, "distgemm-watchdog"), "a call"]


def test_memory_is_freed_while_the_thread_can_look(idle: Watchdog) -> None:
    """Freeing waits for the GPU, where calls on other workspaces may hang until the watchdog ends them."""
    free: list[bool] = []

    def is_freed() -> None:
        free.append(idle._lock.acquire(blocking=False))
        if free[-1]:
            idle._lock.release()

    kept: Any = WatchedGpu()
    kept.unused = False
    for sweep in (idle.sweep, lambda: idle.add(kept)):
        workspace: Any = WatchedGpu()
        workspace.unused = False
        idle.add(workspace)
        workspace.unused = True
        weakref.finalize(workspace, is_freed)
        del workspace
        sweep()
    idle.stop()
    assert free == [True, True] and list(idle.watched) == [kept]


def test_a_message_is_for_one_workspace_alone() -> None:
    """The store outlives groups, and groups take names that others had."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, again, other = (store_of(SimpleNamespace(token=token)) for token in (3, 3, 4))
        first.compare_set("dead", "", "rank 0 did not come")
        assert (reason_of_other_rank(again), reason_of_other_rank(other)) == ("rank 0 did not come", None)
    finally:
        dist.destroy_process_group()
