"""Small cases of every mechanism of the CUDA runtime, to run under compute-sanitizer on 2 GPUs or more:

compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 python -m tests.gpu.memcheck 2
"""

from __future__ import annotations

import sys

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu.cuda_worker import Case

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
        Case(GATHER, (ranks,), chunks=4, execution="single_kernel", merge_copies=True),
        Case(CHAIN, (ranks,), chunks=2, execution="single_kernel", mechanism="store", beta=1.0),
        Case(CHAIN, (ranks,), chunks=4, stagger=2, execution="single_kernel", mechanism="store", beta=1.0),
        Case(CHAIN, (ranks,), chunks=2, execution="single_kernel"),
        Case(ALL_REDUCE_CHAIN, (ranks,), chunks=2, execution="single_kernel", mechanism="store"),
        Case(
            ALL_REDUCE_CHAIN,
            (ranks,),
            chunks=4,
            stagger=2,
            execution="single_kernel",
            mechanism="store",
            transport="sm",
            beta=1.0,
        ),
        Case(GATHER, (ranks,), chunks=2, k=1160, execution="single_kernel", transport="sm"),
        Case(GATHER, (ranks,), chunks=2, k=1160, execution="single_kernel", transport="copy_engine_slices"),
    ]


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    found = launch(worker.exact, ranks, cases(ranks), backend="nccl", timeout=900)
    for failure in (failure for of_rank in found for failure in of_rank):
        print(failure)
    print(f"{len(cases(ranks))} cases on {ranks} GPUs, {sum(map(len, found))} failures")
    sys.exit(any(found))
