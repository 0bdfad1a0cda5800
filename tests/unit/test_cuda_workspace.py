"""Which workspace a group's executables share; the memory itself is of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distgemm.runtime.cuda import workspace
from distgemm.runtime.cuda.workspace import GROWTH, workspace_for


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
