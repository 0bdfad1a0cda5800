"""What the torch ops hand to runtimes, and what they refuse while a CUDA graph is captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import distgemm
from distgemm.torch_ops import calls


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
