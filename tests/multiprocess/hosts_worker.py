"""What each rank of the tests across hosts does, over gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

import distgemm
from distgemm.runtime.collective import CollectiveExecutable
from tests.multiprocess.worker import Data

PATTERNS = {
    "gather": ("all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"),
    "sum": ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"),
    "all-reduce": ("all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_a_rotating_c"),
    "one-shot": ("all_reduce_1d_one_shot_a", "all_reduce_1d_one_shot_a"),
    "to heads": ("all_to_all_1d_rotating_d", "all_to_all_1d_rotating_d"),
    "from heads": ("all_to_all_1d_rotating_a", "all_to_all_1d_rotating_a"),
}
"""Schedules across hosts and inside."""


def plans(pattern: str, mesh: tuple[int, int]) -> list[distgemm.Plan]:
    """Plans of a pattern on hosts, with everything that the derivation may do otherwise."""
    across, inside = PATTERNS[pattern]
    ranks = mesh[0] * mesh[1]
    found = []
    for m, n, k, l in ((4 * ranks, 3 * ranks, 2 * ranks, 1), (13, 16, 12, 2)):  # noqa: E741
        problem = distgemm.GemmProblem(m, n, k, l, dtype="float64")
        for modes in ({"chunks": 2}, {"workspace": "bounded"}, {"sync": "barrier", "workspace": "bounded"}):
            options = {"across": across, "inside": inside, "ranks_per_host": mesh[1], **modes}
            found.append(distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=mesh, **options))
    return found


def exact(mesh: tuple[int, int]) -> list[str]:
    """Failures: results that differ from numpy, for each pattern."""
    rank, failures = dist.get_rank(), []
    for pattern in PATTERNS:
        for number, plan in enumerate(plans(pattern, mesh)):
            executable = CollectiveExecutable(plan)
            for call in range(2):
                data = Data(plan, 10 * number + call)
                a, b, c = data.shards("cpu")
                found = executable(a, b, c, alpha=2.0, beta=float(call))
                if not np.array_equal(found.numpy(), data.expected(2.0, float(call))):
                    failures.append(f"rank {rank} {pattern} plan {number} call {call}")
    return failures


def different_hosts() -> str:
    """The error of each rank where rank 1 has a plan for one host."""
    problem, ranks = distgemm.GemmProblem(16, 16, 16, dtype="float64"), dist.get_world_size()
    of_host = None if dist.get_rank() == 1 else 2
    plan = distgemm.make_plan(problem, "ag+gemm", ranks, ranks_per_host=of_host)
    try:
        CollectiveExecutable(plan)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def run(mesh: tuple[int, int]) -> dict[str, Any]:
    return {"exact": exact(mesh), "different_hosts": different_hosts()}
