"""Tensors that a call cannot read or write as they are: refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.unfused import UnfusedExecutable

M, N, K = 6, 4, 2
Tensor = torch.Tensor


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def executables(pattern: Any = "ag+gemm") -> list[Any]:
    problem = distgemm.GemmProblem(M, N, K, dtype="float32")
    plan = distgemm.make_plan(problem, pattern, 1)
    return [distgemm.CollectiveExecutable(plan), UnfusedExecutable(problem, pattern)]


def negated(*shape: int) -> Tensor:
    """A view of 1, ..., whose memory holds -1, ..."""
    found = torch.complex(torch.zeros(shape), -torch.ones(shape)).conj().imag
    assert found.is_neg() and bool((found == 1).all())
    return found


def made_for_inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.empty(shape)


OUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "expanded rows": (lambda: torch.empty(1, N).expand(M, N), r"strides \(0, 1\), whose elements overlap"),
    "expanded columns": (lambda: torch.empty(M, 1).expand(M, N), "whose elements overlap"),
    "sliding": (lambda: torch.empty(M + N).as_strided((M, N), (1, 1)), "whose elements overlap"),
    "rows that overlap": (lambda: torch.empty(M * N).as_strided((M, N), (3, 1)), "whose elements overlap"),
    "interleaved": (lambda: torch.empty(100).as_strided((M, N), (2, 4)), "whose elements overlap"),
    "negated": (lambda: negated(M, N), r"got a negated view; out\.resolve_neg\(\) copies them"),
    "inference": (lambda: made_for_inference(M, N), "got an inference tensor"),
}


@pytest.mark.parametrize("what", OUTS)
def test_out_that_cannot_be_written_is_refused(what: str, group: dist.ProcessGroup) -> None:
    make, message = OUTS[what]
    for exe in executables():
        given = torch.ones(M, K), torch.ones(N, K), make()
        with torch.device("meta"), pytest.raises(ValueError, match=r"out on rank 0 .*" + message):
            exe(*given[:2], out=given[2])


def test_gathered_that_cannot_be_written_is_refused(group: dist.ProcessGroup) -> None:
    cases = (
        (torch.empty(1, K).expand(M, K), "overlap"),
        (negated(M, K), "negated"),
        (made_for_inference(M, K), "inference"),
    )
    for exe in executables():
        for gathered, message in cases:
            with pytest.raises(ValueError, match=rf"gathered on rank 0 .*{message}"):
                exe(torch.ones(M, K), torch.ones(N, K), gathered=gathered)


def test_negated_operands_are_refused(group: dist.ProcessGroup) -> None:
    a, b = torch.ones(M, K), torch.ones(N, K)
    for exe in executables():
        for name, call in {
            "A's shard": lambda exe=exe: exe(negated(M, K), b),
            "B's shard": lambda exe=exe: exe(a, negated(N, K)),
            "C's shard": lambda exe=exe: exe(a, b, negated(M, N), beta=1.0),
            "bias": lambda exe=exe: exe(a, b, bias=negated(N)),
        }.items():
            with pytest.raises(ValueError, match=f"{name} on rank 0 .* got a negated view"):
                call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("size", "strides"),
    [((M, N), (2 * N, 2)), ((M, N), (1, M)), ((M, N), (2, 15)), ((3, 2), (2, 3)), ((1, N), (0, 1))],
)
def test_out_with_an_address_for_each_element_is_written(
    size: tuple[int, int], strides: tuple[int, int], group: dist.ProcessGroup
) -> None:
    m, n = size
    problem = distgemm.GemmProblem(m, n, K, dtype="float32")
    exe = distgemm.CollectiveExecutable(distgemm.make_plan(problem, "ag+gemm", 1))
    a, b = torch.randn(m, K), torch.randn(n, K)
    out = torch.empty(200).as_strided(size, strides)
    assert exe(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b.T)
    with torch.inference_mode():
        out = torch.empty(size)
        torch.testing.assert_close(exe(a, b, out=out), a @ b.T)


def test_functions_take_negated_views(group: dist.ProcessGroup) -> None:
    x, weight, bias = negated(M, K), negated(N, K), negated(N)
    for function in (distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce):
        found: Any = function(x, weight, group=group, bias=bias)  # type: ignore[operator]
        assert bool((found == K + 1).all())


def test_functions_refuse_to_keep_inference_tensors(group: dist.ProcessGroup) -> None:
    """Torch would refuse it, too, but only after the ranks have computed the result."""
    x, weight = made_for_inference(M, K), torch.ones(N, K, requires_grad=True)
    for function in (distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce):
        with distgemm.record_calls() as calls, pytest.raises(ValueError, match=r"a(_shard)? is kept for gradients"):
            function(x, weight, group=group)  # type: ignore[operator]
        assert calls == []
        with torch.no_grad():
            function(x, weight, group=group)  # type: ignore[operator]
