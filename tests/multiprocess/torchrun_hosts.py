"""A program for torchrun on several hosts: one product, compared with numpy.

Each rank prints its host and "right", and when the interpreter ends, how many threads of gloo are left.
"""

from __future__ import annotations

import atexit
import faulthandler
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.launch import mesh_from_env


def print_threads() -> None:
    """A thread of gloo can abort a process whose interpreter ends."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"left:{sum(name.startswith('pt_gloo') for name in names)}")


def main() -> None:
    atexit.register(print_threads)  # before what distgemm registers, so it is called behind that
    faulthandler.register(signal.SIGTERM, chain=True)  # what a rank waited for when its test took too long
    mesh = mesh_from_env("gloo")
    hosts, ranks = mesh.shape
    rank = dist.get_rank()
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m=16, n=8, k=8, dtype="float64"),
        "tensor_parallel_2d_nested",
        mesh=(hosts, ranks),
        ranks_per_host=ranks,
    )
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (16, 8)).astype(np.float64), rng.integers(-4, 5, (8, 8)).astype(np.float64)
    shards = [torch.from_numpy(x[plan.shard(name, rank)].copy()) for name, x in (("A", a), ("B", b))]
    d = distgemm.run_collective(plan, *shards, group=mesh)
    np.testing.assert_array_equal(d.numpy(), (a @ b.T)[plan.shard("D", rank)])
    np.testing.assert_array_equal(distgemm.all_gather_matmul(*shards, group=mesh), d)
    refused = 0
    try:
        distgemm.run_collective(distgemm.make_plan(plan.problem, "ag+gemm", 4), *shards, group=mesh)
    except ValueError as error:
        refused += "host" in str(error)
    dist.barrier()
    print(f"{mesh.get_local_rank('host')}:{mesh.get_local_rank('rank')}:right:{refused}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
