"""What each rank of the tests across hosts does, over gloo."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import distgemm
from distgemm import api
from distgemm.runtime.checks import HOST_MESH, group_of_hosts
from distgemm.runtime.collective import CollectiveExecutable
from distgemm.runtime.cuda.workspace import host_group
from tests.multiprocess.worker import Data

PATTERNS = {
    "gather": ("all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"),
    "sum": ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"),
    "all-reduce": ("all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_a_rotating_c"),
    "one-shot": ("all_reduce_1d_one_shot_a", "all_reduce_1d_one_shot_a"),
    "to heads": ("all_to_all_1d_rotating_d", "all_to_all_1d_rotating_d"),
    "from heads": ("all_to_all_1d_rotating_a", "all_to_all_1d_rotating_a"),
    "a ring to heads": ("all_gather_1d_ring_a", "all_to_all_1d_rotating_d"),
    "a ring from heads": ("reduce_scatter_1d_tiling_a_rotating_c", "all_to_all_1d_rotating_a"),
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


def device_mesh(mesh: tuple[int, int]) -> list[str]:
    """Failures: what a DeviceMesh of hosts says for compile, whose executables need GPUs, and what is refused."""
    of_hosts = init_device_mesh("cpu", mesh, mesh_dim_names=HOST_MESH)
    problem, failures = distgemm.GemmProblem(16, 16, 16, dtype="float64"), []

    def compiled(schedule: str, group: Any = of_hosts, **options: Any) -> Any:
        with patch.object(api, "compile_plan", lambda plan, *_, group, **__: (plan, group)):
            return distgemm.compile(problem, schedule, group=group, **options)

    for schedule, shape in (("tensor_parallel_2d_nested", mesh), ("gemm+rs", (mesh[0] * mesh[1],))):
        plan, group = compiled(schedule)
        if (plan.mesh, plan.ranks_per_host) != (shape, mesh[1]) or group is not dist.group.WORLD:
            failures.append(f"{schedule}: {plan.mesh}, {plan.ranks_per_host}, {group}")
    plan, _ = compiled("tensor_parallel_2d_nested", group=None, mesh=mesh)
    if plan.ranks_per_host is not None:
        failures.append("a mesh of ranks alone says nothing of hosts")
    other = distgemm.make_plan(problem, "gemm+rs", mesh[0] * mesh[1])
    a = torch.zeros(4, 4)
    refusals = {
        f"the mesh has {mesh[0]} hosts of {mesh[1]} ranks, and the plan is for 1 of": lambda: distgemm.compile(
            other, group=of_hosts
        ),
        "the ranks of one host so far; name a schedule": lambda: compiled("auto", pattern="gemm+rs"),
        "take the ranks of one host so far: group=mesh['rank']": lambda: distgemm.matmul_reduce_scatter(
            a, a, group=of_hosts
        ),
    }
    for wanted, call in refusals.items():
        try:
            call()
            failures.append(f"accepted: {wanted}")
        except ValueError as error:
            if wanted not in str(error):
                failures.append(f"{error} is not: {wanted}")
    flat = init_device_mesh("cpu", (1, *mesh), mesh_dim_names=("replica", *HOST_MESH))["host", "rank"]
    group, hosts = group_of_hosts(flat)
    if hosts != mesh or group is not dist.group.WORLD:
        failures.append(f"a part of a larger mesh: {group}, {hosts}")
    return failures


def groups_of_hosts(mesh: tuple[int, int]) -> list[str]:
    """Failures: the groups through which ranks of a host map memory, also of a group in another order."""
    failures, rank, (hosts, ranks) = [], dist.get_rank(), mesh
    every = list(range(hosts * ranks))
    backwards = dist.new_group(every[::-1], sort_ranks=False)
    for group in (dist.group.WORLD, backwards):
        assert group is not None
        own = dist.get_rank(group)
        members = every[own // ranks * ranks :][:ranks]  # numbers in the group
        inside, places = host_group(group, members)
        again, _ = host_group(group, members)
        found = {number: dist.get_global_rank(inside, place) for number, place in places.items()}
        if found != {number: dist.get_global_rank(group, number) for number in members} or again is not inside:
            failures.append(f"rank {rank}: {found}")
        total = torch.tensor([rank])
        dist.all_reduce(total, group=inside)
        if total.item() != sum(found.values()):
            failures.append(f"rank {rank}: {total} is not the sum of {found}")
    return failures


def run(mesh: tuple[int, int]) -> dict[str, Any]:
    return {
        "exact": exact(mesh),
        "different_hosts": different_hosts(),
        "device_mesh": device_mesh(mesh),
        "groups_of_hosts": groups_of_hosts(mesh),
    }
