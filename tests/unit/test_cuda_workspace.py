"""The workspace without a GPU: flags and buffers, and which workspace a group's executables share."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm.runtime import checks
from distgemm.runtime.cuda import calls, workspace
from distgemm.runtime.cuda.calls import GpuExecutable
from distgemm.runtime.cuda.processes import ProcessId, this_process
from distgemm.runtime.cuda.workspace import (
    FLAG_BYTES,
    MAX_GROWTH_BYTES,
    SharedWorkspace,
    Stage,
    allocate,
    first_plan_flag,
    stage_index,
    stage_value,
    workspace_for,
)
from tests.unit.cuda_emulation import GATHERS, Emulated, Machine, emulated

# --- flags and buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(2))
def test_flags_are_read_as_they_are_written(number: int) -> None:
    workspace = Machine(3, 256).workspaces[1]
    flags = torch.zeros(2, first_plan_flag(3) + 4, dtype=torch.int32)
    flags[number] = torch.arange(flags.shape[1])
    buffer = workspace.buffers[number]
    flags[number, stage_index(3)] = stage_value(5, Stage.BODY)
    assert workspace.read(flags.flatten()) == (number, 5, Stage.BODY, [0, 1, 2], [4, 5, 6], [12, 13, 14, 15], 9)
    addresses = [buffer.left(1, 2), buffer.entered(1, 2), buffer.plan_flag(1, 3)]
    assert addresses == [buffer.bases[1] + FLAG_BYTES * index for index in (2, 6, 15)]
    steps = [op for step in buffer.steps(5, []).values() for op in step]
    stages = [op.value for op in steps if op.address == buffer.bases[1] + stage_index(3) * FLAG_BYTES]
    assert stages == [stage_value(5, Stage.ENTRY), stage_value(5, Stage.BODY), 0]


def test_replays_alternate_between_buffers() -> None:
    workspace = Machine(2, 256).workspaces[0]
    flips = [(workspace.next_buffer, workspace.flip()) for _ in range(4)]
    assert flips in ([(0, 0), (1, 1)] * 2, [(1, 1), (0, 0)] * 2)


def test_a_replaced_workspace_is_unused_once_its_executables_are_gone() -> None:
    workspace = Machine(2, 256).workspaces[0]
    plan = distgemm.make_plan(distgemm.GemmProblem(16, 16, 16, dtype="float32"), GATHERS[1], 2)
    exe = Emulated(plan, 0, workspace, 1).exe
    workspace.keep(exe)
    del exe
    assert not workspace.unused
    workspace.replaced = True
    assert not workspace.unused  # kept for a caller's graph
    workspace.release(workspace.kept[0])
    assert workspace.unused


# --- the workspace of a group ---------------------------------------------------------------------------


@dataclass(eq=False)
class Memoryless(SharedWorkspace):
    """A workspace without memory."""

    group: Any
    device: torch.device
    slot_bytes: int
    flags: int
    memory: Any = ()
    dead: str | None = None
    replaced: bool = False


@pytest.fixture(autouse=True)
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACES", {})


GPU = torch.device("cuda", 0)


def _group(name: str = "tp") -> Any:
    return SimpleNamespace(group_name=name)


def test_executables_of_a_group_share_a_workspace_that_is_large_enough() -> None:
    group = _group()
    first = workspace_for(group, GPU, 1024, 4, Memoryless)
    assert (
        workspace_for(group, GPU, 1024, 4, Memoryless) is first
        and workspace_for(group, GPU, 100, 2, Memoryless) is first
    )
    larger = workspace_for(group, GPU, 1025, 4, Memoryless)
    assert larger is not first and first.replaced and not larger.replaced
    assert larger.slot_bytes == 1024 + min(1024, MAX_GROWTH_BYTES), "shapes that grow slowly would take a new one each"
    more_flags = workspace_for(group, GPU, 1024, larger.flags + 1, Memoryless)
    assert more_flags is not larger and more_flags.slot_bytes >= larger.slot_bytes


def test_groups_and_gpus_have_workspaces_of_their_own() -> None:
    group = _group()
    found = [
        workspace_for(*key, 1024, 4, Memoryless)
        for key in ((group, GPU), (_group("dp"), GPU), (group, torch.device("cuda", 1)))
    ]
    assert len(set(map(id, found))) == 3 and not any(each.replaced for each in found)


def test_a_workspace_that_cannot_be_made_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group()
    first: Any = workspace_for(group, GPU, 1024, 4, Memoryless)

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Memoryless, "__init__", no_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        workspace_for(group, GPU, 4096, 4, Memoryless)
    assert not first.replaced and workspace_for(group, GPU, 1024, 4, Memoryless) is first


class Exchange:
    """torch.distributed and symmetric memory as rank 0 of three sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failed: list[int]) -> None:
        self.failed, self.gathers = failed, 0
        monkeypatch.setattr(checks.dist, "all_gather", self.all_gather)
        monkeypatch.setattr(workspace.symmetric_memory, "empty", self.empty)

    def all_gather(self, every: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        assert bool(mine[-1]) == (0 in self.failed)
        self.gathers += 1
        for rank, report in enumerate(every):
            report.copy_(mine)
            report[-1] = int(rank in self.failed)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if 0 in self.failed:
            raise RuntimeError("this rank is out of memory")
        return torch.empty(size, dtype=dtype)

    def allocate(self) -> tuple[torch.Tensor, int, list[ProcessId]]:
        group: Any = SimpleNamespace(size=lambda: 3)
        return allocate(64, group, torch.device("cpu"))


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        ([0], "this rank is out of memory"),
        ([0, 2], "this rank is out of memory"),
        ([1, 2], r"ranks \[1, 2\] of the group cannot allocate 64 bytes of symmetric memory; their errors say why"),
    ],
)
def test_all_ranks_raise_where_one_has_no_memory(
    failed: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would wait for it in the rendezvous."""
    exchange = Exchange(monkeypatch, failed)
    with pytest.raises(RuntimeError, match=message):
        exchange.allocate()


class Unprepared(Memoryless):
    """A workspace for which rank 0 makes streams, if it can."""

    fails = False

    def _begin(self) -> None:
        if self.fails:
            raise RuntimeError("this rank is out of memory")


class Attaching(GpuExecutable):
    """An executable that takes memory for its calls."""

    fails = False
    _put_call = _put_captured_call = awaited = None  # type: ignore[assignment]

    def __init__(self, plan: distgemm.Plan, group: Any) -> None:
        self.plan, self.group, self.device, self.rank = plan, group, torch.device("cpu"), 0

    def _attach(self) -> None:
        if self.fails:
            raise RuntimeError("this rank is out of memory")


@pytest.mark.parametrize("where", ["workspace", "watchdog", "executable"])
@pytest.mark.parametrize(
    ("failed", "message"), [([0], "this rank is out of memory"), ([1], r"ranks \[1\] of the group")]
)
def test_all_ranks_raise_where_one_cannot_take_part(
    where: str, failed: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allocated behind symmetric memory counts, too. The others would wait in their first call."""
    exchange, group = Exchange(monkeypatch, failed), SimpleNamespace(size=lambda: 3)
    made: Any = Unprepared(group, torch.device("cpu"), 64, 4)
    made.executables, made.fails = [], where == "workspace" and 0 in failed

    def add(of: Any) -> None:
        if where == "watchdog" and 0 in failed:
            raise RuntimeError("this rank is out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(calls, "workspace_for", lambda *_: made)
    monkeypatch.setattr(calls, "watchdog", lambda: SimpleNamespace(add=add))
    monkeypatch.setattr(calls, "call_order", lambda device: None)
    exe = Attaching(emulated(GATHERS[0]).plan, group)
    exe.fails = where == "executable" and 0 in failed
    with pytest.raises(RuntimeError, match=message):
        made.begin() if where == "workspace" else exe._join(Unprepared, 64, 4)
    assert exchange.gathers == 1


def test_workspaces_have_tokens_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(monkeypatch, [])
    tokens = {exchange.allocate()[1] for _ in range(4)}
    assert len(tokens) == 4 and exchange.allocate()[0].numel() == 64
    assert exchange.allocate()[2] == [this_process()] * 3


@pytest.mark.parametrize("end", ["dead", "closed", "the group is gone"])
def test_a_workspace_that_has_ended_is_not_used_again(end: str) -> None:
    """A group may take the name of a group that was destroyed, and have other ranks."""
    group: Any = _group()
    first: Any = workspace_for(group, GPU, 1024, 4, Memoryless)
    if end == "dead":
        first.dead = "rank 1 did not come"
    elif end == "closed":
        first.memory = None
    else:
        group = _group()
    second = workspace_for(group, GPU, 1024, 4, Memoryless)
    assert second is not first and second.group is group
    assert first.replaced == (end != "closed"), "one that is closed has no memory to give back"
    assert workspace_for(group, GPU, 1024, 4, Memoryless) is second
