"""Which workspace a group's executables share; the memory itself is of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distgemm.runtime.cuda import watchdog, workspace
from distgemm.runtime.cuda.workspace import GROWTH, workspace_for

REAL = workspace.Workspace


@dataclass(eq=False)
class Memoryless:
    """What is known of a workspace without its memory."""

    group: Any
    device: torch.device
    slot_bytes: int
    flags: int
    memory: Any = ()
    dead: str | None = None
    replaced: bool = False


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACES", {})
    monkeypatch.setattr(workspace, "Workspace", Memoryless)


GPU = torch.device("cuda", 0)


def _group(name: str = "tp") -> Any:
    return SimpleNamespace(group_name=name)


def test_a_group_has_one_that_is_large_enough() -> None:
    group = _group()
    first = workspace_for(group, GPU, 1024, 4)
    assert workspace_for(group, GPU, 1024, 4) is first and workspace_for(group, GPU, 100, 2) is first
    larger = workspace_for(group, GPU, 1025, 4)
    assert larger is not first and first.replaced and not larger.replaced
    assert larger.slot_bytes == 1024 + min(1024, GROWTH), "shapes that grow slowly would take a new one each"
    more_flags = workspace_for(group, GPU, 1024, larger.flags + 1)
    assert more_flags is not larger and more_flags.slot_bytes >= larger.slot_bytes


def test_groups_and_gpus_have_their_own() -> None:
    group = _group()
    found = [
        workspace_for(*key, 1024, 4) for key in ((group, GPU), (_group("dp"), GPU), (group, torch.device("cuda", 1)))
    ]
    assert len(set(map(id, found))) == 3 and not any(each.replaced for each in found)


def test_one_that_cannot_be_made_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group()
    first: Any = workspace_for(group, GPU, 1024, 4)

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(workspace, "Workspace", no_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        workspace_for(group, GPU, 4096, 4)
    assert not first.replaced and workspace_for(group, GPU, 1024, 4) is first


class Exchange:
    """torch.distributed and symmetric memory as rank 0 of three sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failed: list[int]) -> None:
        self.failed = failed
        monkeypatch.setattr(workspace.dist, "all_gather", self.all_gather)
        monkeypatch.setattr(workspace.symmetric_memory, "empty", self.empty)
        self.made = REAL.__new__(REAL)
        self.made.group, self.made.device = SimpleNamespace(size=lambda: 3), torch.device("cpu")

    def all_gather(self, every: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        assert bool(mine[0]) == (0 in self.failed)
        every[0].copy_(mine)
        for rank in (1, 2):
            every[rank].copy_(torch.tensor([int(rank in self.failed), rank]))

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if 0 in self.failed:
            raise RuntimeError("this rank is out of memory")
        return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ([0], "this rank is out of memory"),
        ([0, 2], "this rank is out of memory"),
        ([1, 2], r"ranks \[1, 2\] of the gro"),
    ],
)
def test_all_ranks_raise_where_one_has_no_memory(failed: list[int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of waiting for it in the rendezvous."""
    with pytest.raises(RuntimeError, match=said):
        Exchange(monkeypatch, failed).made._allocated(64)


def test_workspaces_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(monkeypatch, [])
    numbers = {exchange.made._allocated(64)[1] for _ in range(4)}
    assert len(numbers) == 4 and exchange.made._allocated(64)[0].numel() == 64


def test_what_was_said_of_one_workspace_is_not_of_another() -> None:
    """The store outlives groups, and groups take names that others had."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, again, other = (watchdog._store(SimpleNamespace(token=token)) for token in (3, 3, 4))
        first.compare_set("dead", "", "rank 0 did not come")
        assert (watchdog._told(again), watchdog._told(other)) == ("rank 0 did not come", None)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("end", ["dead", "closed", "the group is gone"])
def test_nobody_gets_one_that_has_ended(end: str) -> None:
    """A group may take the name of one that was destroyed, with other ranks: the peers' memory is another."""
    group: Any = _group()
    first: Any = workspace_for(group, GPU, 1024, 4)
    if end == "dead":
        first.dead = "rank 1 did not come"
    elif end == "closed":
        first.memory = None
    else:
        group = _group()
    second = workspace_for(group, GPU, 1024, 4)
    assert second is not first and second.group is group
    assert first.replaced == (end != "closed"), "one that is closed has no memory to give back"
    assert workspace_for(group, GPU, 1024, 4) is second
