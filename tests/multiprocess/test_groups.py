"""Ranks that disagree raise on all ranks, and destroyed groups take all that belongs to them along."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime import groups
from distgemm.runtime.launch import launch
from distgemm.runtime.unfused import UnfusedExecutable
from tests.once import once

TIMEOUT_S = 20.0
ROUNDS = 20
Problem = distgemm.GemmProblem


def caught(function: Callable[[], Any]) -> str:
    """The error that a function raises, as text; "" for none."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- ranks that disagree --------------------------------------------------------------------------------


def gather(rows: int, dtype: torch.dtype = torch.float32, schedule: str = "auto", **more: Any) -> Any:
    a, b = torch.ones(rows, 4, dtype=dtype), torch.ones(6, 4, dtype=dtype)
    return distgemm.all_gather_matmul(a, b, group=dist.group.WORLD, schedule=schedule, **more)  # type: ignore[arg-type]


def scatter(rows: int, dtype: torch.dtype = torch.float32, schedule: str = "auto", **more: Any) -> Any:
    a, b = torch.ones(rows, 4, dtype=dtype), torch.ones(6, 4, dtype=dtype)
    return distgemm.matmul_reduce_scatter(a, b, group=dist.group.WORLD, schedule=schedule, **more)  # type: ignore[arg-type]


def reduce(rows: int, dtype: torch.dtype = torch.float32, schedule: str = "auto", **more: Any) -> Any:
    a, b = torch.ones(rows, 4, dtype=dtype), torch.ones(6, 4, dtype=dtype)
    return distgemm.matmul_all_reduce(a, b, group=dist.group.WORLD, schedule=schedule, **more)  # type: ignore[arg-type]


def planned(mechanism: Any = "push", m: int = 8, **terms: Any) -> Any:
    problem = Problem(m, 4, 4, dtype="float32")
    exe = distgemm.CollectiveExecutable(distgemm.make_plan(problem, "gemm+rs", 2, mechanism=mechanism))
    return exe(torch.ones(m, 2), torch.ones(4, 2), **terms)


def unfused(pattern: Any = "gemm+rs", m: int = 8, **terms: Any) -> Any:
    exe = UnfusedExecutable(Problem(m, 4, 4, dtype="float32"), pattern)
    return exe(*(torch.ones(exe.plan.shard_shape(name, exe.rank)) for name in "AB"), **terms)


def selected(m: int = 8, pattern: Any = "ag+gemm") -> Any:
    """The first step of distgemm.compile with schedule="auto"."""
    return distgemm.tune.select(Problem(m, 4, 4, dtype="float32"), pattern, device="cpu", tune=False)


half, brain = torch.float16, torch.bfloat16
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "rows": (lambda: gather(4), lambda: gather(3), "m: 8 on rank 0, 6 on rank 1"),
    "dtypes, unfused": (
        lambda: gather(4, half, "unfused"),
        lambda: gather(4, brain, "unfused"),
        "dtype: float16 on rank 0, bfloat16 on rank 1",
    ),
    "as many bytes, unfused": (
        lambda: gather(4, torch.float32, "unfused"),
        lambda: gather(8, half, "unfused"),
        "m: 8 on rank 0, 16 on rank 1",
    ),
    "rows, unfused": (lambda: reduce(4, half, "unfused"), lambda: reduce(6, half, "unfused"), "m: 4 on rank 0, 6 on"),
    "plan and unfused": (
        lambda: gather(4, schedule="ag+gemm"),
        lambda: gather(4, schedule="unfused"),
        "schedule: ag+gemm on rank 0, unfused on rank 1",
    ),
    "auto and unfused": (lambda: scatter(4), lambda: scatter(4, schedule="unfused"), "schedule: auto on rank 0, unf"),
    "functions": (
        lambda: gather(5),
        lambda: scatter(10),
        "call: the first call of ag+gemm on rank 0, the first call of gemm+rs on rank 1",
    ),
    "chunks": (lambda: scatter(8, chunks=1), lambda: scatter(8, chunks=2), "chunks: 1 on rank 0, 2 on rank 1"),
    "bias": (lambda: reduce(4), lambda: reduce(4, bias=torch.ones(6)), "bias: none on rank 0, given on rank 1"),
    "mechanisms": (planned, lambda: planned("pull"), "mechanism: push on rank 0, pull on rank 1"),
    "executables": (planned, unfused, "call: the first call of reduce_scatter_1d_"),
    "alpha": (planned, lambda: planned(alpha=2.0), "alpha: 1.0 on rank 0, 2.0 on rank 1"),
    "beta, unfused": (
        unfused,
        lambda: unfused(c_shard=torch.ones(4, 4), beta=2.0),
        "beta: 0.0 on rank 0, 2.0 on rank 1",
    ),
    "auto and a plan": (selected, planned, "call: a selection of ag+gemm on rank 0, the first call of reduce_scatter"),
    "problems of auto": (selected, lambda: selected(16), "m: 8 on rank 0, 16 on rank 1"),
    "patterns of auto": (selected, lambda: selected(8, "gemm+ar"), "a selection of ag+gemm on rank 0, a selection of"),
    "patterns, unfused": (
        unfused,
        lambda: unfused("ag+gemm"),
        "unfused gemm+rs on rank 0, the first call of unfused ag+gemm on rank 1",
    ),
}


def disagreements() -> dict[str, list[Any]]:
    """For each case the error of this rank; then the same for calls whose executables all ranks have already."""
    rank, found = dist.get_rank(), {}
    for name, (first, second, _) in CASES.items():
        before = caught([first, second][rank])
        both = [caught(call) for call in (first, second)]  # as they are meant: by all ranks
        after = caught([first, second][rank])
        found[name] = [before, both, after]
    return found


@once
def disagreed() -> list[dict[str, list[Any]]]:
    return launch(disagreements, 2, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_disagree_raise_and_name_both_values(name: str) -> None:
    for found in disagreed():
        before, both, after = found[name]
        for message in (before, after):
            assert message.startswith("ValueError: the ranks of the group make different calls; ")
        assert CASES[name][2] in before
        assert name == "mechanisms" or both == ["", ""]


def cached() -> list[str]:
    """Rank 0 has 4 tokens, rank 1 has 3; each finds an executable for as many tokens on all ranks."""
    rank = dist.get_rank()
    gather(4), gather(3)
    found = [caught(lambda: gather(4 - rank))]
    found += [caught(lambda: gather(4 - rank, schedule="unfused")), caught(lambda: gather(5 - rank))]
    d = gather(4 - rank, m_per_rank=(4, 3))  # 7 tokens
    return [*found, str(tuple(d.shape)), *(str(float(gather(rows).sum())) for rows in (4, 3))]


def test_executables_that_differ_between_ranks_are_not_called() -> None:
    """Gloo would end the process at the first message of another size."""
    for first, unfused_call, new, shape, *sums in launch(cached, 2, timeout=60):
        assert "m: 8 on rank 0, 6 on rank 1" in first and "m: 8 on rank 0, 6 on rank 1" in unfused_call
        assert "the first call of ag+gemm on rank 0, a call of all_gather_1d_" in new and "m: 10 on rank 0, 8 on" in new
        assert shape == "(7, 6)" and sums == [str(8 * 6 * 4.0), str(6 * 6 * 4.0)]


# --- groups that go -------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def rounds() -> dict[str, Any]:
    """Make a group, call everything on it, destroy it."""
    found: dict[str, Any] = {"resources": [], "alive": 0}
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    reduce(4), scatter(8), gather(4)  # torch leaves a cycle of frames behind when it first calls an op
    gc.collect()
    gc.disable()  # destroyed groups must not wait for it
    for _ in range(ROUNDS):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        for schedule in ("auto", "unfused"):
            distgemm.all_gather_matmul(a, b, group=group, schedule=schedule).sum().backward()  # type: ignore[no-untyped-call]
            distgemm.matmul_reduce_scatter(a, b, group=group, schedule=schedule)
        problem = Problem(8, 8, 8, dtype="float32")
        exe = distgemm.CollectiveExecutable(distgemm.make_plan(problem, "ag+gemm", 2), group)
        other = UnfusedExecutable(problem, "ag+gemm", group)
        made = weakref.ref(group)
        dist.destroy_process_group(group)
        found["destroyed"] = [caught(lambda exe=exe: exe(None, None)) for exe in (exe, other)]  # type: ignore[misc]
        del group
        found["gone"] = [caught(lambda exe=exe: exe(None, None)) for exe in (exe, other)]  # type: ignore[misc]
        found["alive"] += made() is not None
        deadline = time.monotonic() + 5
        while found["resources"] and resources() != found["resources"][0] and time.monotonic() < deadline:
            time.sleep(0.01)  # threads of gloo end
        found["resources"].append(resources())
    return found


def test_destroyed_groups_leave_no_descriptors_and_no_threads() -> None:
    for found in launch(rounds, 2, timeout=120):
        assert found["alive"] == 0
        assert found["resources"] == found["resources"][:1] * ROUNDS
        for message in (*found["destroyed"], *found["gone"]):
            assert "of this executable was destroyed; make an executable with another group" in message


def test_threads_may_add_groups_while_others_look_theirs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    monkeypatch.setattr(groups, "_is_destroyed", lambda group: False)
    values: groups.PerGroup[list[int]] = groups.PerGroup(list)
    made: list[Any] = []
    errors: list[str] = []

    def look_up(new: bool) -> None:
        group: Any = None
        for _ in range(2000):
            group = Group() if new or group is None else group
            made.append(group)
            if error := caught(lambda group=group: values.of(group)):  # type: ignore[misc]
                errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look_up, args=(new,)) for new in (False, False, True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
