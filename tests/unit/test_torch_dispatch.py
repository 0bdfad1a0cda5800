"""The torch functions: which executables they make and call, and what they refuse during a capture."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm.runtime.executable import PER_TILE, ExecutionConfig
from distgemm.runtime.groups import GroupRef
from distgemm.torch_ops import CallRecord, dispatch, functional, library
from distgemm.tune import TunedConfig, config_of, ranks


class FakeGroup:
    """A process group as far as it is asked here."""

    def __init__(self, ranks: int = 2) -> None:
        self.group_name, self.ranks = "tp", ranks

    def size(self) -> int:
        return self.ranks


def prepared(executable: Any, options: Any) -> dispatch.PreparedCall:
    group: Any = FakeGroup()
    return dispatch.PreparedCall(executable, options, GroupRef(group))


def test_auto_takes_measured_configurations_of_equal_columns() -> None:
    problem = distgemm.GemmProblem(m=64, n=64, k=64)
    assert dispatch.is_tuned(problem, "auto", None)
    assert not dispatch.is_tuned(problem, "auto", 2) and not dispatch.is_tuned(problem, "ag+gemm", None)
    for heads in ({"n_per_rank": (40, 24)}, {"k_per_rank": (40, 24)}, {"n": 32, "n_per_rank": (32, 32)}):
        assert not dispatch.is_tuned(dataclasses.replace(problem, **heads), "auto", None)


@pytest.mark.parametrize("missing", ["executable", "comparison with a bias", ""])
def test_no_first_call_is_made_while_a_stream_is_captured(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for other ranks. Nothing is begun, and the error says what to do before."""
    group, made = FakeGroup(), []
    calls = dispatch.KeptCalls()
    executable = SimpleNamespace(plan=distgemm.make_plan(distgemm.GemmProblem(m=8, n=6, k=4), "ag+gemm", 2))
    monkeypatch.setattr(dispatch, "PREPARED", SimpleNamespace(of=lambda group: calls))
    for name in ("raise_if_failed", "compare"):
        monkeypatch.setattr(dispatch, name, lambda *_: None)
    monkeypatch.setattr(dispatch, "process_group", lambda name: group)
    monkeypatch.setattr(dispatch, "make", lambda *args: made.append(args) or prepared(executable, ()))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    arguments = ("ag+gemm", distgemm.GemmProblem(m=8, n=6, k=4), "tp", torch.device("cuda", 0), "auto", None)
    if missing != "executable":
        first = dispatch.prepare(*arguments, biased=False)
    capturing = True
    if missing:
        with pytest.raises(RuntimeError, match=r"m 8, n 6, k 4, .* forward and backward pass once before torch\.cuda"):
            dispatch.prepare(*arguments, biased=True)
        assert len(made) == len(calls) == (missing != "executable")
    else:
        assert dispatch.prepare(*arguments, biased=False) is first and len(made) == 1


@pytest.mark.parametrize(("device", "compared"), [("cuda", [False]), ("cpu", [False, False, True])])
def test_calls_without_tokens_are_compared(device: str, compared: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the first one of each kind, and none while a stream is captured."""
    group, calls, capturing, asked = FakeGroup(), dispatch.KeptCalls(), False, []
    monkeypatch.setattr(dispatch, "PREPARED", SimpleNamespace(of=lambda group: calls))
    monkeypatch.setattr(dispatch, "raise_if_failed", lambda *_: None)
    monkeypatch.setattr(dispatch, "process_group", lambda name: group)
    monkeypatch.setattr(dispatch, "compare", lambda fields, *_: asked.append((capturing, fields["m"])))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def call(pattern: Any) -> None:
        arguments = pattern, None, "tp", torch.device(device, 0), "auto", None
        assert dispatch.prepare(*arguments, biased=False) is None and not calls

    call("ag+gemm")
    call("ag+gemm")
    capturing = True
    call("ag+gemm")
    assert asked == [(each, 0) for each in compared]
    if device == "cuda":
        with pytest.raises(
            RuntimeError, match=r"gemm\+rs was not called yet without tokens, .* once before torch\.cuda"
        ):
            call("gemm+rs")


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
    for prepare, kept in ((dispatch.with_rows, as_rows), (dispatch.with_rows_or_columns, as_matrix)):
        found = prepare(x)
        assert (found is x) == kept and torch.equal(found, x)


def test_without_process_groups_the_error_says_how_to_make_them() -> None:
    a = torch.ones(2, 2)
    for group in (None, "tp", 3):
        with pytest.raises(ValueError, match=r"has no process group: call init_process_group, or init_from_env"):
            distgemm.all_gather_matmul(a, a, group=group)  # type: ignore[call-overload]
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", 1)
    with pytest.raises(ValueError, match=r"has no process group: call init_process_group, or init_from_env"):
        distgemm.CollectiveExecutable(plan)


def test_a_gather_alone_has_nothing_to_overlap_with() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", 2)
    call = CallRecord("gather", plan, (), "collective runtime", "torch")
    assert str(call).endswith("not overlapped, because a gather alone: there is no GEMM")


@pytest.mark.parametrize(("device", "sync"), [("cuda", "barrier"), ("cpu", "credit")])
@pytest.mark.parametrize("schedule", ["auto", "all_gather_1d_tiling_cd_rotating_a"])
def test_plans_for_gpus_have_barriers(device: str, sync: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number of chunks, "auto" takes its rule and no measured configuration."""
    monkeypatch.setattr(dispatch, "executable_of", lambda plan, *args: SimpleNamespace(plan=plan))
    group: Any = FakeGroup(4)
    problem = distgemm.GemmProblem(m=64, n=64, k=64)
    made = dispatch.make("ag+gemm", problem, group, torch.device(device, 0), schedule, 2)
    assert (made.executable.plan.sync, dict(made.options), made.tuned) == (sync, {"chunks": 2}, None)


@pytest.mark.parametrize("bias", [None, torch.ones(3)])
def test_a_call_is_handed_to_the_executable_and_recorded(bias: torch.Tensor | None) -> None:
    """All runtimes are called in one way: dispatch does not ask which one it is."""
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", 2)
    called: list[Any] = []

    class Fake:
        transfers, provider = "carrier", "abacus"

        def __init__(self) -> None:
            self.plan = plan

        def __call__(self, a: torch.Tensor, b: torch.Tensor, **arguments: Any) -> torch.Tensor:
            called.append((a.stride(), b.stride(), arguments))
            return torch.zeros(1)

    call = prepared(Fake(), (("chunks", 1),))
    expanded = torch.ones(1, 1).expand(2, 4)
    gathered = torch.zeros(4, 4)
    with distgemm.record_calls() as calls:
        call("all_gather_matmul", expanded, expanded.t(), bias, gathered)
    ((a_stride, b_stride, arguments),) = called
    assert (a_stride, b_stride) == ((4, 1), (2, 1)) and arguments.keys() == {"bias", "gathered", "scale_a", "scale_b"}
    assert arguments["bias"] is bias and arguments["gathered"] is gathered
    assert calls == [CallRecord("all_gather_matmul", plan, (("chunks", 1),), "carrier", "abacus")]
    assert distgemm.last_call() is calls[0]


@pytest.mark.parametrize("ns", [(8, 4), (4, 8), (4, 8, 6)])
def test_the_gemm_of_the_largest_b_overlaps_with_the_gather(
    ns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size over all ranks counts, so that all ranks take the same b. Results have the order of the b."""
    calls: list[tuple[str, int, int]] = []

    def run(function: str, a: torch.Tensor, b: torch.Tensor, bias: Any, whole: torch.Tensor) -> torch.Tensor:
        calls.append((function, b.shape[0], whole.shape[0]))
        whole.copy_(a.repeat(2, 1))
        return whole @ b.t()

    def prepare(pattern: str, problem: distgemm.GemmProblem, *args: Any) -> Any:
        calls.append((pattern, problem.n, problem.m))
        return run

    monkeypatch.setattr(library, "size_and_rank", lambda group: (2, 0))
    monkeypatch.setattr(library, "prepare", prepare)
    a, bs = torch.randn(3, 5), [torch.randn(n // 2, 5) for n in ns]
    args = ("g", "auto", None, [3, 3], list(ns), False, "forward")
    found = library.all_gather_matmul(a, bs, [], [False] * len(bs), *args)
    assert calls == [("ag+gemm", 8, 6), ("all_gather_matmul", 4, 6)]
    for result, b in zip(found, bs, strict=True):
        torch.testing.assert_close(result, a.repeat(2, 1) @ b.t())


@pytest.mark.parametrize(
    ("grads", "weight_grad", "keep", "kept"),
    [
        (True, True, True, True),
        (True, False, True, False),  # frozen
        (False, True, True, False),  # inference
        (True, True, False, False),
    ],
)
def test_the_gathered_input_is_kept_only_for_a_gradient_of_b(
    grads: bool, weight_grad: bool, keep: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Any, ...]] = []

    def fake(*args: Any) -> list[torch.Tensor]:
        called.append(args)
        return [torch.zeros(4, 2), torch.zeros(4, 3)]

    monkeypatch.setattr(library, "all_gather_matmul", fake)
    monkeypatch.setattr(functional, "group_name", lambda group: "g")
    a, b = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=weight_grad)
    group: Any = object()
    with torch.set_grad_enabled(grads):
        distgemm.all_gather_matmul(a, b, group=group, keep_gathered=keep)
        distgemm.all_gather_matmul(a, b, group=group, keep_gathered=keep, return_gathered=True)
    assert [args[9] for args in called] == [kept, True]


@pytest.mark.parametrize(
    ("schedule", "options", "execution"),
    [
        ("all_gather_1d_tiling_cd_rotating_a", {}, ExecutionConfig()),
        ("ag+gemm chunks=4 provider=cublas gemm_streams=1", {"chunks": 4}, ExecutionConfig("cublas", gemm_streams=1)),
        (
            "ag+gemm execution=per_tile config=128x128x64_2x1_pingpong",
            {},
            ExecutionConfig(config="128x128x64_2x1_pingpong", execution="per_tile"),
        ),
    ],
)
def test_a_named_schedule_is_compiled_for_gpus(
    schedule: str, options: dict[str, int], execution: ExecutionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[Any, ...]] = []

    def compile_plan(plan: distgemm.Plan, execution: ExecutionConfig, *, group: Any, device: Any, **terms: bool) -> str:
        assert terms == {"turned_b": True}
        compiled.append((plan, execution, group, device))
        return "made"

    monkeypatch.setattr("distgemm.runtime.cuda.compile_plan", compile_plan)
    group: Any = FakeGroup(4)
    problem, gpu = distgemm.GemmProblem(m=64, n=64, k=64), torch.device("cuda", 1)
    made = dispatch.make("ag+gemm", problem, group, gpu, schedule, None, turned_b=True)
    ((plan, *arguments),) = compiled
    assert arguments == [execution, group, gpu] and dict(made.options) == options
    wanted = distgemm.make_plan(problem, "all_gather_1d_tiling_cd_rotating_a", 4, sync="barrier", **options)
    assert plan == wanted and (made.executable, made.tuned) == ("made", None)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_per_tile_kernel_overlaps_whatever_its_schedule_does(tuned: bool) -> None:
    """Of a chain with one chunk, too: its order of GEMMs is not the kernel's."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), "reduce_scatter_1d_tiling_a_rotating_c", 4, chunks=1)
    config = TunedConfig.parse("gemm+rs execution=per_tile config=128x128x64_2x1_pingpong", "recorded")
    call = CallRecord("matmul_reduce_scatter", plan, (), PER_TILE, "cutlass", config if tuned else None)
    end = ", recorded configuration; overlapped" if tuned else "; overlapped"
    assert str(call).endswith(f"per-tile kernel, GEMMs by cutlass{end}") and call.not_overlapped is None


def test_a_gather_measures_and_compiles_no_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, "auto" takes the rule for CPUs. Its executable serves no call that multiplies."""
    compiled: list[Any] = []
    monkeypatch.setattr("distgemm.runtime.cuda.compile_plan", lambda plan, how, **_: compiled.append((plan, how)))
    monkeypatch.setattr("distgemm.tune.executable", lambda *_, **__: pytest.fail("it measures"))
    group: Any = FakeGroup(4)
    problem, gpu = distgemm.GemmProblem(m=64, n=4, k=64), torch.device("cuda", 1)
    for schedule in ("auto", "all_gather_1d_tiling_cd_rotating_a"):
        dispatch.make("ag+gemm", problem, group, gpu, schedule, None, caller_multiplies=True)
        plan, execution = compiled.pop()
        assert plan.schedule == "all_gather_1d_tiling_cd_rotating_a" and plan.sync == "barrier"
        assert execution == ExecutionConfig("cublas", gemm_streams=1)
    with pytest.raises(ValueError, match=r"gather: provider, .* are options of GEMMs, got .*merge_copies=True"):
        dispatch.make("ag+gemm", problem, group, gpu, "ag+gemm merge_copies=True", None, caller_multiplies=True)
    for name in ("raise_if_failed", "compare"):
        monkeypatch.setattr(dispatch, name, lambda *_: None)
    calls = dispatch.KeptCalls()
    monkeypatch.setattr(dispatch, "PREPARED", SimpleNamespace(of=lambda group: calls))
    monkeypatch.setattr(dispatch, "process_group", lambda name: group)
    monkeypatch.setattr(dispatch, "make", lambda *args: prepared(SimpleNamespace(plan=plan, gathers=args[-1]), ()))
    arguments = ("ag+gemm", problem, "tp", torch.device("cpu"), "auto", None, False)
    for _ in range(2):
        found = [dispatch.prepare(*arguments, caller_multiplies=each) for each in (False, True)]
        assert [each.executable.gathers for each in found] == [False, True]


def test_a_tuned_configuration_is_compiled_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``copies=True``: a call copies tensors that a per-tile kernel cannot read."""

    class Compiled:
        """Can be a key of a weak dictionary."""

    compiled: list[tuple[Any, ...]] = []

    def compile_plan(plan: distgemm.Plan, execution: ExecutionConfig, **options: Any) -> Compiled:
        compiled.append((plan, execution, options))
        return Compiled()

    monkeypatch.setattr(ranks, "compile_plan", compile_plan)
    config = TunedConfig.parse("gemm+rs chunks=2 mechanism=store wait_by=kernel gemm_streams=1")
    group: Any = FakeGroup(4)
    problem, gpu = distgemm.GemmProblem(m=64, n=64, k=64), torch.device("cuda", 1)
    made: Any = ranks.make(problem, "gemm+rs", config, group, gpu, timeout=5.0)
    ((plan, execution, options),) = compiled
    assert isinstance(made, Compiled) and config_of(made) == config and config_of(Compiled()) is None
    assert execution == ExecutionConfig(gemm_streams=1, wait_by="kernel")
    assert plan == distgemm.make_plan(problem, "gemm+rs", 4, sync="barrier", chunks=2, mechanism="store")
    assert options == {"group": group, "device": gpu, "copies": True, "timeout": 5.0}
