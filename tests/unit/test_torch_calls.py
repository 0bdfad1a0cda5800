"""What the torch ops hand to runtimes, and what they refuse while a CUDA graph is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.executable import ExecutionConfig
from distgemm.torch_ops import dispatch as calls
from distgemm.torch_ops import functional as functions
from distgemm.torch_ops import library as ops
from distgemm.tune import ranks
from distgemm.tune.config import TunedConfig


@pytest.mark.parametrize("missing", [True, False])
def test_no_executable_is_made_while_a_stream_is_captured(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for other ranks: nothing is begun, and the error names the way."""
    group, made = SimpleNamespace(), []
    monkeypatch.setattr(calls, "_products", {})
    monkeypatch.setattr(calls, "resolve", lambda name: group)
    monkeypatch.setattr(calls, "_make", lambda *args: made.append(args) or "made")
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    asked = ("ag+gemm", distgemm.GemmProblem(m=8, n=6, k=4), "tp", torch.device("cuda", 0), "auto", None)
    if not missing:
        assert calls.product(*asked) == "made"
    capturing = True
    if missing:
        with pytest.raises(RuntimeError, match=r"m 8, n 6, k 4, .* forward and backward pass once before torch\.cuda"):
            calls.product(*asked)
        assert not made and not calls._products["tp"][1]
    else:
        assert calls.product(*asked) == "made" and len(made) == 1


@pytest.mark.parametrize(
    ("shape", "strides", "as_rows", "as_matrix"),
    [
        ((3, 4), (4, 1), True, True),
        ((3, 4), (8, 1), True, True),
        ((3, 4), (1, 3), False, True),
        ((3, 4), (0, 0), False, False),  # the gradient of a sum
        ((3, 4), (0, 1), False, False),  # of a sum over tokens
        ((3, 4), (1, 0), False, False),
        ((1, 4), (0, 1), True, True),
        ((3, 1), (1, 7), True, True),
        ((3, 4), (8, 2), False, False),
    ],
)
def test_matrices_are_copied_only_where_rows_overlap_or_are_not_contiguous(
    shape: tuple[int, int], strides: tuple[int, int], as_rows: bool, as_matrix: bool
) -> None:
    x = torch.arange(64.0).as_strided(shape, strides)
    for prepare, kept in ((calls._rows, as_rows), (calls._rows_or_columns, as_matrix)):
        found = prepare(x)
        assert (found is x) == kept and torch.equal(found, x)


def test_what_is_said_before_there_are_groups() -> None:
    a = torch.ones(2, 2)
    for group in (None, "tp", 3):
        with pytest.raises(ValueError, match=r"has no process group: call init_process_group, or init_from_env"):
            distgemm.all_gather_matmul(a, a, group=group)  # type: ignore[call-overload]
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", 1)
    with pytest.raises(ValueError, match=r"has no process group: call init_process_group, or init_from_env"):
        distgemm.CollectiveExecutable(plan)


def test_a_gather_alone_says_why_nothing_overlaps() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", 2)
    call = distgemm.torch_ops.Call("gather", plan, (), "collective runtime", "torch")
    assert str(call).endswith("not overlapped, because a gather alone: nothing is multiplied meanwhile")


@pytest.mark.parametrize(("device", "sync"), [("cuda", "barrier"), ("cpu", "credit")])
@pytest.mark.parametrize("schedule", ["auto", "all_gather_1d_tiling_cd_rotating_a"])
def test_replays_on_gpus_are_apart_by_barriers(
    device: str, sync: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are named: what is measured is taken without them."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(calls, "executable", lambda plan, *args: (None, "a runtime", "a provider"))
    group: Any = SimpleNamespace(size=lambda: 4)
    problem = distgemm.GemmProblem(m=64, n=64, k=64)
    made = calls._make("ag+gemm", problem, group, torch.device(device, 0), schedule, 2)
    assert (made.plan.sync, made.rank, dict(made.options)) == (sync, 1, {"chunks": 2})


@pytest.mark.parametrize("ns", [(8, 4), (4, 8), (4, 8, 6)])
def test_the_largest_b_is_multiplied_while_a_arrives(ns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows of all ranks, as all do the same; each result stands where its b does."""
    asked: list[tuple[str, int, int]] = []

    def run(op: str, a: torch.Tensor, b: torch.Tensor, bias: Any, whole: torch.Tensor) -> torch.Tensor:
        asked.append((op, b.shape[0], whole.shape[0]))
        whole.copy_(a.repeat(2, 1))
        return whole @ b.t()

    def product(kind: str, problem: distgemm.GemmProblem, *args: Any) -> Any:
        asked.append((kind, problem.n, problem.m))
        return run

    monkeypatch.setattr(ops, "_size_and_rank", lambda group: (2, 0))
    monkeypatch.setattr(ops, "product", product)
    a, bs = torch.randn(3, 5), [torch.randn(n // 2, 5) for n in ns]
    args = ("g", "auto", None, [3, 3], list(ns), False, "forward")
    found = ops.all_gather_matmul(a, bs, [], [False] * len(bs), *args)
    assert asked == [("ag+gemm", 8, 6), ("all_gather_matmul", 4, 6)]
    for result, b in zip(found, bs, strict=True):
        torch.testing.assert_close(result, a.repeat(2, 1) @ b.t())


@pytest.mark.parametrize(
    ("grads", "of_b", "asked", "kept"),
    [
        (True, True, True, True),
        (True, False, True, False),  # frozen
        (False, True, True, False),  # inference
        (True, True, False, False),
    ],
)
def test_what_serves_no_gradient_of_b_is_not_kept(
    grads: bool, of_b: bool, asked: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Any, ...]] = []

    def fake(*args: Any) -> list[torch.Tensor]:
        called.append(args)
        return [torch.zeros(4, 2), torch.zeros(4, 3)]

    monkeypatch.setattr(functions.ops, "all_gather_matmul", fake)
    monkeypatch.setattr(functions, "group_name", lambda group: "g")
    a, b = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=of_b)
    group: Any = object()
    with torch.set_grad_enabled(grads):
        distgemm.all_gather_matmul(a, b, group=group, keep_gathered=asked)
        distgemm.all_gather_matmul(a, b, group=group, keep_gathered=asked, return_gathered=True)
    assert [args[9] for args in called] == [kept, True]


@pytest.mark.parametrize(
    ("schedule", "options", "how"),
    [
        ("all_gather_1d_tiling_cd_rotating_a", {}, ExecutionConfig()),
        ("ag+gemm chunks=4 provider=cublas gemm_streams=1", {"chunks": 4}, ExecutionConfig("cublas", gemm_streams=1)),
        (
            "ag+gemm chunks=2 execution=single_kernel transport=sm",
            {"chunks": 2},
            ExecutionConfig(execution="single_kernel", transport="sm"),
        ),
    ],
)
def test_what_is_named_is_compiled_for_gpus(
    schedule: str, options: dict[str, int], how: ExecutionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[Any, ...]] = []

    def compile_plan(plan: distgemm.Plan, how: ExecutionConfig, *, group: Any, device: torch.device) -> Any:
        compiled.append((plan, how, group, device))
        return SimpleNamespace(provider=how.provider)

    monkeypatch.setattr("distgemm.runtime.cuda.compile_plan", compile_plan)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    group: Any = SimpleNamespace(size=lambda: 4)
    problem, gpu = distgemm.GemmProblem(m=64, n=64, k=64), torch.device("cuda", 1)
    made = calls._make("ag+gemm", problem, group, gpu, schedule, None)
    ((plan, taken, of, device),) = compiled
    assert (taken, of, device) == (how, group, gpu) and dict(made.options) == options
    wanted = distgemm.make_plan(problem, "all_gather_1d_tiling_cd_rotating_a", 4, sync="barrier", **options)
    assert plan == wanted and (made.runtime, made.provider) == ("CUDA runtime", how.provider)


def test_a_choice_is_compiled_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tuner, and for "auto": with the choice itself, so that calls may wait on memory where they have to."""
    compiled: list[tuple[Any, ...]] = []

    def compile_plan(plan: distgemm.Plan, how: ExecutionConfig, **more: Any) -> str:
        compiled.append((plan, how, more))
        return "made"

    monkeypatch.setattr(ranks, "compile_plan", compile_plan)
    choice = TunedConfig.parse("gemm+rs chunks=2 stagger=1 mechanism=store execution=single_kernel gemm_streams=1")
    group: Any = SimpleNamespace(size=lambda: 4)
    problem, gpu = distgemm.GemmProblem(m=64, n=64, k=64), torch.device("cuda", 1)
    made: Any = ranks.make(problem, "gemm+rs", choice, group, gpu, timeout=5.0)
    ((plan, how, more),) = compiled
    assert made == "made" and how == ExecutionConfig(gemm_streams=1, execution="single_kernel")
    assert plan == distgemm.make_plan(problem, "gemm+rs", 4, sync="barrier", chunks=2, stagger=1, mechanism="store")
    assert more == {"group": group, "device": gpu, "choice": choice, "timeout": 5.0}
