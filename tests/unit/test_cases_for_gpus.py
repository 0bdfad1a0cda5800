"""What tests for GPUs execute can be executed: each rank's part can be lowered, and each GEMM has a kernel."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.per_tile.select import gemm_of
from distgemm.plan.ops import Gemm
from distgemm.runtime.cuda.binding import Binder
from distgemm.runtime.cuda.lowering import check_waits
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import list_patterns
from tests.gpu import cuda_worker as worker
from tests.gpu import per_tile_streams, per_tile_worker
from tests.gpu.cuda_worker import Case

EVERY = [
    pytest.param(case, id=f"{ranks}-{number}-{case.schedule}")
    for ranks in (2, 4, 8)
    for number, case in enumerate(
        [*worker.cases(ranks), *worker.all_to_all_cases(ranks), *worker.one_shot_cases(ranks)]
    )
]


def binders(case: Case) -> list[Binder]:
    """The parts of all ranks."""
    plan, execution = case.plan(), ExecutionConfig(**case.execution_options())
    found = [Binder(plan, rank, torch.device("cuda", 0), execution) for rank in range(plan.world_size)]
    for binder in found:
        check_waits(plan, execution, binder.actions)
    return found


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", EVERY)
def test_every_rank_can_execute_its_part(case: Case) -> None:
    with patch.object(CutlassProvider, "arch", "90a"):
        for binder in binders(case):
            multiplies = any(isinstance(op, Gemm) for op in binder.plan.ops(binder.rank))
            assert binder.sources(c=bool(case.beta)) or not multiplies or case.provider == "cublas"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_per_tile_kernels_execute_their_cases(ranks: int) -> None:
    every = per_tile_worker.cases(ranks)
    assert {gemm_of(case.plan(), case.config).traits.pattern for case in every} == set(list_patterns())
    assert all(gemm.order.clusters for gemm in per_tile_streams.gemms(ranks))


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        (Case("all_to_all_1d_rotating_d", (2,), gemm_streams=1, wait_by="kernel"), False),
        (Case("all_to_all_1d_rotating_d", (4,), gemm_streams=1, wait_by="kernel"), True),
        (Case("all_gather_1d_tiling_cd_rotating_a", (4,), gemm_streams=1, wait_by="kernel"), False),
        (Case("all_gather_1d_tiling_cd_rotating_a", (4,), gemm_streams=2, wait_by="kernel"), True),
    ],
)
def test_kernels_wait_only_beside_no_other_kernel(case: Case, refused: bool) -> None:
    if not refused:
        assert binders(case)
        return
    with pytest.raises(ValueError, match=f"{case.schedule} with gemm_streams={case.gemm_streams} does not"):
        binders(case)
