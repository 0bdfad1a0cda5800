import sys, torch, time
import torch.distributed as dist
from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as w


def main(n):
    cases = []
    for ch in (1, 2):
        for s in (
            "all_gather_1d_tiling_cd_rotating_a",
            "all_gather_1d_ring_a",
            "reduce_scatter_1d_tiling_a_rotating_c",
            "reduce_scatter_1d_pairwise_a",
            "all_reduce_1d_tiling_a_rotating_c",
        ):
            for ws in ("full", "bounded"):
                cases.append(w.Case(s, (n,), chunks=ch, workspace=ws))
    cases.append(w.Case("reduce_scatter_1d_tiling_a_rotating_c", (n,), chunks=2, sync="credit"))
    cases += [
        w.Case("tensor_parallel_2d", (2, n // 2)),
        w.Case("tensor_parallel_2d_rs", (2, n // 2), chunks=2),
        w.Case("all_gather_1d_tiling_k_rotating_a", (n,)),
        w.Case("all_gather_1d_bidirectional_split_a", (n,)),
        w.Case("tensor_parallel_3d", (1, 2, n // 2)),
        w.Case("tensor_parallel_3d", (2, 1, n // 2)),
        w.Case("all_reduce_1d_pairwise_a", (n,)),
        w.Case("all_gather_1d_tiling_cd_rotating_b", (n,)),
    ]
    pp = [
        w.Case("all_gather_1d_tiling_cd_rotating_a", (n,)),
        w.Case("reduce_scatter_1d_tiling_a_rotating_c", (n,), chunks=2),
        w.Case("reduce_scatter_1d_pairwise_a", (n,), beta=1.0),
        w.Case("all_reduce_1d_tiling_a_rotating_c", (n,), chunks=2, workspace="bounded"),
        w.Case("all_gather_1d_ring_a", (n,), chunks=2, m=1024),
    ]
    checks = [
        (w.exact, (cases,)),
        (w.stress, (pp, 1000, 1)),
        (w.repeated, (pp,)),
        (w.graph_nodes, (pp[1],)),
        (w.late_rank, (pp[1], 1, 3.0)),
    ]
    for r in launch(w.run_all, n, checks, backend="nccl", timeout=150):
        print(r)
    try:
        launch(w.killed_rank, n, pp[1], 1, 3.0, backend="nccl", timeout=60)
    except RuntimeError as e:
        print("killed:", str(e)[-1500:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
