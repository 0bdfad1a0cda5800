"""More ranks than GPUs: ranks that share a GPU take turns, which is slow, but their results are right.

Kernels, plans, flags, graphs and the watchdog are the same as on GPUs of their own. One thing differs: if both ranks of
a copy are on one GPU, a kernel copies instead of a copy engine. That kernel needs SMs, which a fused kernel that waits
for the copy may hold. So fused gathers by copy engines are left out.

Fewer ranks run in one process group than the launcher's timeout allows; each launch has its own timeout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.cuda_worker import Case
from tests.gpu.test_cuda import mixed
from tests.once import once

RANKS = [5, 8]
TIMEOUT_S = 400
pytestmark = pytest.mark.gpu(1)


def needs_no_engine(case: Case) -> bool:
    """Whether no kernel that holds SMs waits for a copy engine."""
    return case.execution != "single_kernel" or case.mechanism == "store" or case.transport == "sm"


def cases(ranks: int) -> list[Case]:
    """Every case of so many ranks that can run on one GPU."""
    every = [case for case in worker.cases(ranks) if needs_no_engine(case)]
    if ranks & (ranks - 1) == 0:
        return every
    return [divisible(case, ranks) for case in every if "xor" not in case.schedule]  # xor: powers of two


def divisible(case: Case, ranks: int) -> Case:
    """A fused kernel takes equal chunks: extents are rounded up."""
    if case.execution != "single_kernel":
        return case
    unit = 16 * ranks * case.chunks
    m, n, k = (-(-extent // unit) * unit for extent in (case.m, case.n, case.k))
    return dataclasses.replace(case, m=m, n=n, k=k)


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's failures, by the check's name."""
    every = cases(ranks)
    fused = [case for case in every if case.execution == "single_kernel"]
    replayed = [divisible(case, ranks) for case in mixed(ranks) if needs_no_engine(case)]
    launch(worker.compile_kernels, 1, [*every, *replayed], backend="nccl", timeout=TIMEOUT_S, share=True)
    checks: list[Any] = [
        (worker.exact, (every,)),
        (worker.bounded_error, (fused[::3],)),
        (worker.repeated, (replayed,)),
    ]
    return launch(worker.run_all, ranks, checks, backend="nccl", timeout=TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", ["exact", "bounded_error", "repeated"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_gpus(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []
