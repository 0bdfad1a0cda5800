"""A new number of tokens: what the torch functions keep, and what is made once for all numbers.

The group is torch's fake one: this process is rank 0 of 8, and nothing is sent.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701  (torch has no public name)

import distgemm
from distgemm import GemmProblem
from distgemm.plan import derive
from distgemm.plan.resize import ResizedOps
from distgemm.runtime import checks
from distgemm.runtime.collective import program
from distgemm.runtime.collective.memory import memory_of
from distgemm.runtime.cuda import executable, lowering
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import PATTERNS, Pattern
from distgemm.torch_ops import dispatch

RANKS, CPU = 8, torch.device("cpu")
HIDDEN, INTERMEDIATE = 4096, 14336
SIZES = range(8, 8 * 513, 8)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of which this process is rank 0. All ranks report what this one reports."""
    monkeypatch.setattr(
        checks,
        "exchange_reports",
        lambda payload, problem, *_: [checks.Report(payload, problem is not None)] * RANKS,
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def prepare(
    group: dist.ProcessGroup, m: int, pattern: Pattern = "ag+gemm", chunks: int | None = None, n: int = INTERMEDIATE
) -> dispatch.PreparedCall:
    return dispatch.prepare(pattern, GemmProblem(m, n, HIDDEN), group.group_name, CPU, "auto", chunks, False)


def test_512_sizes_of_a_layer_are_kept(group: dist.ProcessGroup) -> None:
    """Of both products of a Llama 8B layer. The report says how many bytes they take, and of how many."""
    products: list[tuple[Pattern, int]] = [("ag+gemm", INTERMEDIATE), ("gemm+rs", HIDDEN)]
    first = [prepare(group, SIZES[0], pattern, n=n) for pattern, n in products]
    for m in SIZES:
        for pattern, n in products:
            prepare(group, m, pattern, n=n)
    assert [prepare(group, SIZES[0], pattern, n=n) for pattern, n in products] == first
    (kept,) = distgemm.report().kept.values()
    assert kept.executables == 2 * 512 and kept.bytes <= kept.most_bytes == dispatch.KEPT_BYTES
    text = f"kept for group {group.group_name}: 1024 executables of {kept.bytes / (1 << 20):.1f} MiB, at most 512.0 MiB"
    assert text in str(distgemm.report())
    # They share one workspace, which is as large as the largest one needs it, and may have grown to it by doubling.
    most = max(call.executable.plan.workspace_bytes(0) for call in dispatch.PREPARED.of(group).values())
    assert most <= memory_of(group, CPU).size <= 2 * most


def test_memory_stays_bounded_and_the_least_recently_used_size_is_dropped(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = dispatch.PREPARED.of(group)
    first = prepare(group, 1024, chunks=16)
    size = dispatch.size_of(first.executable.plan)
    monkeypatch.setattr(dispatch, "KEPT_BYTES", 10 * size)
    second = prepare(group, 1152, chunks=16)
    first.used = next(dispatch.USES)  # it is called
    for m in range(1280, 1024 + 128 * 20, 128):
        prepare(group, m, chunks=16)
        assert len(calls) <= 10 and calls.size == len(calls) * size
        first.used = next(dispatch.USES)
    assert prepare(group, 1024, chunks=16) is first
    assert prepare(group, 1152, chunks=16) is not second
    monkeypatch.setattr(dispatch, "KEPT_BYTES", 0)
    last = prepare(group, 512)
    assert list(calls.values()) == [last] and calls.size == dispatch.size_of(last.executable.plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("pattern", "chunks"), [("ag+gemm", 1), ("gemm+ar", 1), ("gemm+rs", 16)])
def test_the_memory_of_an_executable_is_estimated(group: dist.ProcessGroup, pattern: Pattern, chunks: int) -> None:
    """Within a factor of five, after a call."""

    def call(m: int) -> distgemm.Plan:
        prepared = prepare(group, m, pattern, chunks, n=64)
        plan = prepared.executable.plan
        a, b = (torch.zeros(plan.shard_shape(name, 0), dtype=torch.bfloat16) for name in "AB")
        prepared("all_gather_matmul", a, b)
        return plan

    call(4096)
    call(3968)
    gc.collect()
    tracemalloc.start()
    try:
        plans = [call(m) for m in (2048, 2304, 2560)]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] / len(plans)
    finally:
        tracemalloc.stop()
    assert taken / 5 < dispatch.size_of(plans[0]) < taken * 5, taken


@pytest.mark.parametrize("chunks", [None, 16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_new_number_of_tokens_derives_and_compiles_nothing(
    group: dist.ProcessGroup, pattern: Pattern, chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the ops of no rank, and has the program of the first number of tokens."""
    derive.forget_plans()
    first: Any = prepare(group, 4096, pattern, chunks)
    for module, name in ((derive, "_derive"), (program, "_Compiler"), (program, "validate")):
        monkeypatch.setattr(module, name, None)
    for m in (2048, 3072, 3200):
        found: Any = prepare(group, m, pattern, chunks)
        assert found is not first and found.executable.program is first.executable.program
        assert isinstance(found.executable.plan.rank_ops, ResizedOps) and found.executable.plan.rank_ops.made == 0


def test_a_new_number_of_tokens_lowers_the_ops_of_one_rank() -> None:
    derive.forget_plans()
    for m in (4096, 2048):
        plan = distgemm.make_plan(GemmProblem(m, 64, 64), "ag+gemm", RANKS, chunks=4, sync="barrier")
        lowering.lower(plan, 3, ExecutionConfig())
        lowering.most_flags(plan)
    assert isinstance(plan.rank_ops, ResizedOps) and plan.rank_ops.made == len(plan.ops(3))


def test_executables_of_other_sizes_allocate_nothing_on_the_gpu(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tensors nor streams nor events: workspace and streams belong to the group."""
    from tests.unit.cuda_emulation import machine_of

    plans = [
        distgemm.make_plan(GemmProblem(m, 64, 64), "ag+gemm", RANKS, chunks=2, sync="barrier") for m in (512, 256, 128)
    ]
    workspace = machine_of(plans).workspaces[0]
    workspace.device = CPU
    monkeypatch.setattr(executable, "build_together", lambda *_: None)
    for shared, value in {
        "workspace_for": lambda *_: workspace,
        "check_agreement": lambda *arguments: _raise(arguments[-1]),
        "call_order": lambda device: None,  # one for each device
        "watchdog": lambda: type("None", (), {"add": lambda self, workspace: None})(),
    }.items():
        monkeypatch.setattr(f"distgemm.runtime.cuda.calls.{shared}", value)
    for name in ("sources", "choices"):
        monkeypatch.setattr(executable.Binder, name, lambda self, **terms: [])

    def allocates(*_: Any, **__: Any) -> Any:
        raise AssertionError("an executable allocates")

    for name in ("empty", "zeros", "full", "tensor", "ones"):
        monkeypatch.setattr(torch, name, allocates)
    for name in ("Stream", "ExternalStream", "Event", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, allocates)
    made = [executable.CudaExecutable(plan, group, CPU, ExecutionConfig("cutlass"), timeout=1.0) for plan in plans]
    assert {id(each.workspace) for each in made} == {id(workspace)}
    assert [each.number for each in made] == [1, 2, 3]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
