"""The watchdog without a GPU: what it says, when a call is stuck, and what becomes of results."""

from __future__ import annotations

import re
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
from distgemm.runtime.cuda.watchdog import Watchdog, WatchedWorkspace, explain_hang, reason_of_other_rank, store_of
from distgemm.runtime.cuda.workspace import FlagValues, Stage, first_plan_flag, stage_index, stage_value
from tests.unit.cuda_emulation import ALL_REDUCES, GATHERS, Emulated, Machine, emulated, machine_of


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
    read = FlagValues(1, stage, values.get("left", [1] * 4), values.get("entered", [1] * 4), flags)
    found = explain_hang(exe, read, 2.0)
    assert re.search(message, found), found
    assert f"{ALL_REDUCES[0]} on rank 0 of 4 has not ended within 2 s" in found
    assert "cannot be read" in explain_hang(exe, None, 2.0)


def test_the_message_knows_slices() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(16, 16, 4096), GATHERS[0], 2, sync="barrier", chunks=2)
    workspace = machine_of([plan]).workspaces[0]
    exe = Emulated(plan, 0, workspace, execution="single_kernel", transport="sm").exe
    for missing in range(8):
        flags = [int(number != missing) for number in range(8)]
        found = explain_hang(exe, FlagValues(1, Stage.BODY, [1] * 2, [1] * 2, flags), 2.0)
        assert re.search(rf"waits for rank 1 at .*arrival flag {missing}@0, from rank 1$", found), found


def test_a_call_is_stuck_once_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Machine(2, 256).workspaces[0]
    exe = SimpleNamespace(timeout=2.0, plan=SimpleNamespace(schedule="a schedule"))
    workspace.executables.append(lambda: exe)
    values = torch.zeros(2 * (first_plan_flag(2) + 4), dtype=torch.int32)
    watched: Any = WatchedWorkspace.__new__(WatchedWorkspace)
    watched.workspace, watched.store, watched.lock, watched.under_way = workspace, None, Lock(), None
    watched.pending, watched.free_events, watched.ended = deque(), deque(), 0
    watched.warned, watched.last_change = False, (None, 0.0)
    watched.read_flags = lambda: [0, *values.tolist()]
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
    watched.read_flags = lambda: None  # the copy of the flags stands behind it, too
    look(10)
    assert not died
    watched.read_flags = lambda: [0, *values.tolist()]
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


def test_results_of_stuck_calls_become_nan_also_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with torch.inference_mode():
        outs = [torch.zeros(2)]
    outs.append(torch.zeros(2))
    watched: Any = WatchedWorkspace.__new__(WatchedWorkspace)
    watched.workspace = SimpleNamespace(flag_memory=lambda: torch.zeros(4, dtype=torch.int32))
    watched.stream, watched.ones = None, torch.ones(4, dtype=torch.int32)
    ended = SimpleNamespace(query=lambda: True)
    watched.pending = deque(SimpleNamespace(end=ended, out=lambda out=out: out) for out in outs)
    Watchdog().free(watched)
    assert all(out.isnan().all() for out in outs) and not watched.pending


def test_a_message_is_for_one_workspace_alone() -> None:
    """The store outlives groups, and groups take names that others had."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, again, other = (store_of(SimpleNamespace(token=token)) for token in (3, 3, 4))
        first.compare_set("dead", "", "rank 0 did not come")
        assert (reason_of_other_rank(again), reason_of_other_rank(other)) == ("rank 0 did not come", None)
    finally:
        dist.destroy_process_group()
