"""The unfused program over gloo, against float64. One launch runs all checks of a number of ranks."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from distgemm import GemmProblem, make_plan
from distgemm.runtime import unfused
from distgemm.runtime.checks import check_gathered
from distgemm.runtime.launch import launch
from distgemm.schedulers import PATTERNS
from tests.multiprocess import tune_worker as worker
from tests.once import once


@once
def results(ranks: int) -> list[dict[str, Any]]:
    checks: list[Any] = [(worker.equal_to_numpy, ())]
    if ranks == 2:
        checks += [(worker.no_allocation, ()), (worker.no_memory, ()), (worker.misuse, ())]
    return launch(worker.run_all, ranks, checks, timeout=120)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_integers_are_exact(ranks: int) -> None:
    assert [failure for found in results(ranks) for failure in found["equal_to_numpy"]] == []


def test_every_value_of_every_argument_occurs() -> None:
    cases = worker.unfused_cases()
    for pattern in PATTERNS:
        found = [case for case in cases if case.pattern == pattern]
        names = ["alpha", "beta", "bias", "l", "strided", "out", "dtypes", *["rows"] * (pattern != "gemm+ar")]
        for name in names:
            assert len({getattr(case, name) for case in found}) > 1, (pattern, name)
        assert {(case.l > 1, case.rows) for case in found} >= {(False, False), (True, False)}
        assert len({case.shape for case in found}) == 5
    assert any(case.gathered and case.rows for case in cases)
    assert any(case.gathered and case.l > 1 for case in cases)


def test_warm_calls_allocate_nothing() -> None:
    assert [found["no_allocation"] for found in results(2)] == [[], []]


def test_all_ranks_learn_that_one_has_no_memory() -> None:
    here, there = (found["no_memory"] for found in results(2))
    assert set(there) == {"MemoryError: no memory"}
    wanted = r"RuntimeError: ranks \[1\] of the group have no memory for the \d+ bytes of the unfused program"
    assert len(here) == 3 and all(re.match(wanted, text) for text in here)


def test_wrong_calls_are_refused() -> None:
    for found in results(2):
        wanted = [
            "ValueError: scale_a on rank",
            "ValueError: bias on rank",
            "ValueError: c_shard is a torch.Tensor where beta is not 0: beta is 1.0, got None",
            "ValueError: gathered on rank",
            "ValueError: gemm+rs does not bring all of A",
            "ValueError: graphs are of GPUs, this executable is on cpu",
            "ValueError: the unfused program has no products of float8_e4m3fn",
            "ValueError: the unfused program has no products of tfloat32",
            "ValueError: the unfused program multiplies bfloat16 into bfloat16 or, from 16 bits, float32, not float16",
            "ValueError: pattern is one of ag+gemm, gemm+rs, gemm+ar, got 'ag'",
            "ValueError: collective is one of nccl, two-shot, one-shot, got 'ring'",
            "ValueError: symmetric memory's two-shot collective is an all-reduce, and this is gemm+rs",
            "ValueError: symmetric memory's one-shot all-reduce is of GPUs, this is a cpu",
        ]
        for text, start in zip(found["misuse"], wanted, strict=True):
            assert text.startswith(start)


def test_ieee_is_set_during_a_call_and_the_setting_is_restored() -> None:
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    try:
        for value in ("tf32", "ieee"):
            setting.fp32_precision = value
            with contextlib.suppress(KeyError), unfused._ieee():
                assert setting.fp32_precision == "ieee"
                raise KeyError
            assert setting.fp32_precision == value
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("capturing", [True, False])
def test_graphs_keep_the_buffers_that_they_use(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is released. Calls are behind the last one on the GPU. GEMMs of float32 use IEEE float32."""
    exe: Any = object.__new__(unfused.UnfusedExecutable)
    exe.pattern, exe.collective, exe._group, exe.rank, exe._ieee = "gemm+ar", "nccl", lambda: None, 0, True
    exe.device, exe.plan = SimpleNamespace(type="cuda"), SimpleNamespace(problem=GemmProblem(8, 8, 4))
    exe._buffers, exe._keeper = {"whole": torch.empty(1, 8, 8)}, object()
    order = exe._order = mock.MagicMock()
    seen: list[str] = []
    kept: dict[object, torch.UntypedStorage] = {}
    matmul: Any = torch.backends.cuda.matmul
    monkeypatch.setattr(unfused, "_kept", kept)
    monkeypatch.setattr(unfused, "raise_if_failed", lambda group: None)
    monkeypatch.setattr(unfused, "check_shards", lambda *args: {"D": args[-1]})
    monkeypatch.setattr(unfused, "_multiply", lambda *args: seen.append(matmul.fp32_precision))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    a, d = torch.ones(8, 4), torch.ones(8, 8)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        for _ in range(2):
            exe(a, a, out=d)
    finally:
        matmul.fp32_precision = before
    whole = exe._buffers["whole"].untyped_storage().data_ptr()
    assert seen == ["ieee"] * 2 and [each.data_ptr() for each in kept.values()] == [whole] * capturing
    kind = "_captured" * capturing
    assert [call[0] for call in order.method_calls] == ["issuing", f"begin{kind}", f"end{kind}"] * 2
    exe.release()
    assert not kept


def test_gathered_shares_no_memory_with_what_is_read_or_written() -> None:
    plan = make_plan(GemmProblem(8, 8, 8), "ag+gemm", 2)
    memory = torch.zeros(256, dtype=torch.bfloat16)
    gathered = memory[:64].view(8, 8)
    beyond = {"A": memory[64:96].view(4, 8), "B": memory[96:128].view(4, 8), "D": memory[128:160].view(8, 4)}
    check_gathered(plan, 0, gathered, beyond)
    for name, other in (("A", "the shard of A"), ("B", "the shard of B"), ("D", "out")):
        within = beyond | {name: memory[48:80].view(beyond[name].shape)}
        with pytest.raises(ValueError, match=f"^gathered shares memory with {other}$"):
            check_gathered(plan, 0, gathered, within)


def of_symmetric_memory(collective: str) -> Any:
    """An executable of which only the sum works."""
    exe: Any = object.__new__(unfused.UnfusedExecutable)
    exe.pattern, exe.collective, exe._group = "gemm+ar", collective, lambda: SimpleNamespace(group_name="0")
    exe._buffers = {"whole": torch.empty(1, 8, 8, dtype=torch.bfloat16)}
    return exe


def test_two_shot_sums_are_copied_from_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(partial: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
        assert (reduction, group) == ("sum", "0")
        return partial.mul_(2)

    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", add, raising=False)
    a, b = (torch.ones(1, 8, 4, dtype=torch.bfloat16) for _ in "ab")
    for dtype in (torch.bfloat16, torch.float32):
        d = torch.full((1, 8, 8), torch.nan, dtype=dtype)
        of_symmetric_memory("two-shot")._reduce(a, b, d, 1.0)
        assert torch.all(d == 8)


def test_one_shot_sums_are_added_into_aligned_results_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes 16 bytes at once. For another address or dtype it adds into a new tensor, copied to D."""
    exe = of_symmetric_memory("one-shot")
    added: list[int] = []

    def add(partial: torch.Tensor, reduction: str, group: str, out: torch.Tensor) -> torch.Tensor:
        added.append(out.data_ptr())
        return out.copy_(2 * partial)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", add, raising=False)
    a, b = (torch.ones(1, 8, 4, dtype=torch.bfloat16) for _ in "ab")
    memory = torch.zeros(256, dtype=torch.bfloat16)
    for at, dtype, direct in ((0, torch.bfloat16, True), (8, torch.bfloat16, True), (1, torch.bfloat16, False)):
        d = memory[at : at + 64].view(dtype).view(1, 8, 8).fill_(float("nan"))
        exe._reduce(a, b, d, 1.0)
        assert (added.pop() == d.data_ptr()) == direct and torch.all(d == 8)
    wide = torch.full((1, 8, 16), torch.nan, dtype=torch.bfloat16)
    for d in (wide[:, :, :8], torch.full((1, 8, 8), torch.nan)):
        exe._reduce(a, b, d, 1.0)
        assert added.pop() != d.data_ptr() and torch.all(d == 8)
    assert torch.all(wide[:, :, 8:].isnan())
