"""A program for torchrun: one product on the ranks that it started, compared with numpy. Prints "right" on rank 0."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.launch import Backend, init_from_env


def main(backend: Backend) -> None:
    rank = init_from_env(backend)
    device = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
    plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=7, k=8, dtype="float32"), "gemm+rs", dist.get_world_size())
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (9, 8)).astype(np.float32), rng.integers(-4, 5, (7, 8)).astype(np.float32)
    shards = [torch.from_numpy(x[plan.shard(name, rank)].copy()).to(device) for name, x in (("A", a), ("B", b))]
    d = distgemm.run_collective(plan, *shards)
    np.testing.assert_array_equal(d.cpu().numpy(), (a @ b.T)[plan.shard("D", rank)])
    dist.barrier()
    if rank == 0:
        print("right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main("nccl" if sys.argv[1] == "nccl" else "gloo")
