import sys, torch, time
import torch.distributed as dist
from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as w

def main(n):
    cases=[]
    for ch in (1,2):
        for s in ("all_gather_1d_tiling_cd_rotating_a","all_gather_1d_ring_a","reduce_scatter_1d_tiling_a_rotating_c","reduce_scatter_1d_pairwise_a","all_reduce_1d_tiling_a_rotating_c"):
            for ws in ("full","bounded"):
                cases.append(w.Case(s,(n,),chunks=ch,workspace=ws))
    cases.append(w.Case("reduce_scatter_1d_tiling_a_rotating_c",(n,),chunks=2,sync="credit"))
    for r in launch(w.exact, n, cases, backend="nccl", timeout=100): print(r)

if __name__=="__main__": main(int(sys.argv[1]))
