"""Small cases of every mechanism of the CUDA runtime, to run under compute-sanitizer:

    python -m tests.gpu.memcheck 2 --build
    compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --error-exitcode 9 \\
        python -m tests.gpu.memcheck 2
    compute-sanitizer --tool racecheck --target-processes all --error-exitcode 9 python -m tests.gpu.memcheck 2

Torch, NCCL and cuda.bindings call CUDA to see what there is. Without the option, memcheck reports such calls as errors.
The first command compiles the kernels, so that no compiler runs under the tool. With fewer GPUs than ranks, ranks share
them.
"""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.cuda_worker import Case
from tests.gpu.test_shared import fitting

GATHER, RING = "all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a"
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
ALL_REDUCE, ALL_REDUCE_CHAIN = "all_reduce_1d_pairwise_a", "all_reduce_1d_tiling_a_rotating_c"


def cases(ranks: int) -> list[Case]:
    """Each case runs eagerly, recorded and replayed. They wait by memory operations or kernels; some are ragged."""
    return [
        Case(GATHER, (ranks,)),
        Case(RING, (ranks,), chunks=2, m=389, n=328, k=456, workspace="bounded", sync="credit", config=None),
        Case(GATHER, (ranks,), gemm_streams=1, wait_by="kernel"),
        Case(GATHER, (ranks,), chunks=2, merge_copies=True),
        Case(CHAIN, (ranks,), chunks=2, beta=1.0),
        Case(PAIRWISE, (ranks,), chunks=2, m=389, n=328, k=456, config=None),
        Case(ALL_REDUCE, (ranks,), chunks=2),
        Case(GATHER, (ranks,), chunks=2, mechanism="pull"),
        Case(PAIRWISE, (ranks,), mechanism="pull"),
        Case(CHAIN, (ranks,), chunks=2, mechanism="store"),
        Case(PAIRWISE, (ranks,), m=389, n=328, k=456, mechanism="store", config=None),
        Case(GATHER, (ranks,), provider="cublas", config=None),
        Case(ALL_REDUCE_CHAIN, (ranks,), chunks=2, mechanism="store", beta=1.0),
        Case(CHAIN, (ranks,), chunks=2, gemm_streams=1, wait_by="kernel", mechanism="store", beta=1.0),
    ]


def run(todo: list[Case], calls: int) -> list[str]:
    """Failures of the cases, one after the other; rank 0 says which one has ended. The tools take long for some."""
    failures = []
    for case in todo:
        failures += worker.exact([case], calls)
        if torch.distributed.get_rank() == 0:
            print(f"ended: {case}", flush=True)
    return failures


def main(
    ranks: Annotated[int, typer.Argument(help="Number of ranks.")] = 2,
    calls: Annotated[int, typer.Option(help="Calls of each case: the first eager, two recorded, others replayed.")] = 5,
    seconds: Annotated[float, typer.Option(help="Time for everything.")] = 900.0,
    only: Annotated[str, typer.Option(help="Only cases with this word.")] = "",
    build: Annotated[bool, typer.Option("--build", help="Compile the kernels, and end.")] = False,
    arch: Annotated[str, typer.Option(help="With --build: the architecture.")] = "90a",
) -> None:
    """Run the cases. The exit status is 1 if one fails."""
    gpus = torch.cuda.device_count()
    every = [case for case in cases(ranks) if only in str(case)]
    if build:
        worker.compile_kernels(every, arch)
        return
    todo = every if gpus >= ranks else fitting(every, ranks)
    if not todo:
        raise typer.BadParameter(f"no case has the word {only!r}")
    found = launch(run, ranks, todo, calls, backend="nccl", timeout=seconds, share=True)
    for failure in (failure for of_rank in found for failure in of_rank):
        print(failure)
    print(f"{len(todo)} of {len(every)} cases, {ranks} ranks, {gpus} GPUs, {sum(map(len, found))} failures", flush=True)
    sys.exit(any(found))


if __name__ == "__main__":
    typer.run(main)
