"""What each rank of the tests across hosts does, over gloo."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import distgemm
from distgemm import api, tune
from distgemm.runtime import launch
from distgemm.runtime.checks import HOST_MESH, flat_mesh, resolve_group
from distgemm.runtime.collective import CollectiveExecutable
from distgemm.runtime.cuda import fabric, nccl
from distgemm.runtime.cuda.processes import ProcessId
from distgemm.runtime.cuda.workspace import host_group
from distgemm.runtime.groups import ranks_per_host
from distgemm.torch_ops.dispatch import CallRecord
from tests.multiprocess import all_to_all_worker, nn_worker, ops_torch_worker, tune_worker
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
    other = distgemm.make_plan(problem, "gemm+rs", mesh[0] * mesh[1])
    refusals = {
        f"the mesh has {mesh[0]} hosts of {mesh[1]} ranks, and the plan is for 1 of": lambda: distgemm.compile(
            other, group=of_hosts
        ),
        f"are on hosts of {mesh[1]} ranks, as an earlier mesh says, got a mesh with hosts of 1": lambda: compiled(
            "gemm+rs", init_device_mesh("cpu", (mesh[0] * mesh[1], 1), mesh_dim_names=HOST_MESH)
        ),
        "A mesh of hosts has the dimensions ('host', 'rank')": lambda: compiled(
            "gemm+rs", init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
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
    group = resolve_group(flat)
    if ranks_per_host(group) != mesh[1] or group is not dist.group.WORLD:
        failures.append(f"a part of a larger mesh: {group}, {ranks_per_host(group)}")
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


class FakeNccl:
    """NCCL whose communicators are made once all ranks have called it, here as the store says."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.aborted = ranks, threading.Event()
        self.store = dist.PrefixStore("fake NCCL", dist.distributed_c10d._get_default_store())

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if name == "ncclCommInitRankConfig":
                handle, size, _, rank, config = (getattr(each, "_obj", each) for each in arguments)
                assert (size, rank, config.blocking) == (self.ranks, dist.get_rank(), 0)
                handle.value = 77
                self.store.set(str(rank), "")
                return nccl.IN_PROGRESS
            if name == "ncclCommGetAsyncError":
                come = self.store.check([str(rank) for rank in range(self.ranks)])
                arguments[1]._obj.value = nccl.SUCCESS if come else nccl.IN_PROGRESS
            if name == "ncclCommAbort":
                self.aborted.set()
            return nccl.SUCCESS

        return function


def communicators(mesh: tuple[int, int], absent: int | None, ends: bool) -> str:
    """What making a communicator raises, with a fake NCCL.

    Args:
        mesh: hosts, and ranks of a host.
        absent: the rank that does not come, behind the exchange of NCCL's id; None: all come.
        ends: whether its process is known to have ended. Otherwise the time of the group is over.
    """
    rank, ranks, group = dist.get_rank(), mesh[0] * mesh[1], dist.group.WORLD
    assert group is not None
    fake, processes = FakeNccl(ranks), [ProcessId(b"", each, 0) for each in range(ranks)]

    class Absent(BaseException):
        pass

    def come(self: Any) -> None:
        if rank == absent:
            raise Absent
        self._store.set(f"come/{rank}", "")

    with ExitStack() as stack:
        for place, name, value in (
            (nccl, "library", lambda: fake),
            (nccl, "LOOK_S", 0.1),
            (nccl, "group_timeout", lambda *_: 60.0 if ends else 1.0),
            (nccl, "has_ended", lambda process: ends and process.number == absent),
            (nccl._Ranks, "come", come),
            (torch.cuda, "device", lambda _: nullcontext()),
        ):
            stack.enter_context(patch.object(place, name, value))
        found = "made"
        try:
            nccl.Communicator(group, torch.device("cpu"), processes, mesh[1])
        except Absent:
            found = "absent"
        except RuntimeError as error:
            assert fake.aborted.wait(10), "NCCL goes on"
            found = str(error)
        dist.barrier()
    return found


def domains(of_host: int, domain: tuple[int | None, ...]) -> tuple[tuple[int, ...], int]:
    """The shape of ``mesh_from_env("nccl")`` with fabric handles that are replaced, and how many handles were alive.

    Args:
        of_host: ranks of each machine, as torchrun says it.
        domain: by rank, its NVLink domain; None: its GPU exports no handle.
    """
    rank = dist.get_rank()
    mine, alive, tried = (
        domain[rank],
        list[str](),
        dist.PrefixStore("tried", dist.distributed_c10d._get_default_store()),
    )

    @contextmanager
    def exported(device: torch.device) -> Iterator[bytes | None]:
        yield None if mine is None else str(mine).encode()
        alive.append("released")
        others = [f"{other}" for other, one in enumerate(domain) if one is not None]
        assert not others or tried.check(others), "memory is released before all ranks have tried"

    def can_import(handle: bytes) -> bool:
        time.sleep(0.1 * rank)  # some ranks are late
        tried.set(str(rank), "")
        return handle == str(mine).encode()

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(of_host)}))
        for place, name, value in (
            (fabric, "exported", exported),
            (fabric, "can_import", can_import),
            (torch.cuda, "current_device", lambda: 0),
            (launch, "init_device_mesh", lambda kind, shape, mesh_dim_names: (kind, shape, mesh_dim_names)),
        ):
            stack.enter_context(patch.object(place, name, value))
        kind, shape, names = launch.mesh_from_env("nccl")
    assert (kind, names) == ("cuda", HOST_MESH)
    return shape, len(alive)


def run(mesh: tuple[int, int]) -> dict[str, Any]:
    return {
        "exact": exact(mesh),
        "different_hosts": different_hosts(),
        "device_mesh": device_mesh(mesh),
        "groups_of_hosts": groups_of_hosts(mesh),
    }


def of_several_hosts(calls: list[CallRecord], mesh: tuple[int, int]) -> list[str]:
    """Failures: calls whose plans are not for these hosts. The unfused program executes no plan."""
    plans = [call.plan for call in calls if not call.unfused]
    assert plans
    return [f"{plan.schedule}: {plan.ranks_per_host}" for plan in plans if plan.ranks_per_host != mesh[1]]


def calls(mesh: tuple[int, int], check: str) -> list[str]:
    """Failures of a check of the functions or the layers, whose group is a mesh of hosts.

    Once a mesh has said it, the group of all ranks spans hosts, too: checks that take this group run across hosts.
    """
    of_hosts = init_device_mesh("cpu", mesh, mesh_dim_names=HOST_MESH)
    ranks = mesh[0] * mesh[1]
    flat_mesh(of_hosts)

    def functions() -> list[str]:
        todo = ops_torch_worker.cases(ranks)[:: 1 + ranks]
        return [found for seed, case in enumerate(todo) if (found := ops_torch_worker.run_case(case, seed, of_hosts))]

    def all_to_alls() -> list[str]:
        todo = all_to_all_worker.cases(ranks)[::3]
        return [found for seed, case in enumerate(todo) if (found := all_to_all_worker.run_case(case, seed, of_hosts))]

    def opcheck() -> list[str]:
        ops_torch_worker.checked_by_torch()
        all_to_all_worker.checked_by_torch()
        return []

    def compiled() -> list[str]:
        return [*ops_torch_worker.compiled(), *all_to_all_worker.compiled(), *compiled_with_a_mesh()]

    def compiled_with_a_mesh() -> list[str]:
        """The mesh itself is the group of a function that torch compiles."""

        def layer(a: torch.Tensor) -> torch.Tensor:
            return distgemm.matmul_reduce_scatter(a, a[:3], group=of_hosts)

        a = torch.linspace(-1, 1, ranks * 5, dtype=torch.float64).view(ranks, 5)
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(a)
        return [] if torch.equal(found, layer(a)) else [f"{found} instead of {layer(a)}"]

    def layers() -> list[str]:
        return nn_worker.layers(of_hosts)

    def training() -> list[str]:
        return nn_worker.training(of_hosts)

    def bytes_across() -> list[str]:
        """The messages that all ranks send across hosts, forward and backward, are as few bytes as can be."""
        sent = {name: found[1] for name, found in ops_torch_worker.what_ran().items()}
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, sent)
        element, tokens, lacking = 4, 4 * ranks, mesh[0] - 1  # each host lacks all shards but its own
        gathered, summed = tokens * ops_torch_worker.K, tokens * 5
        wrong = []
        for name, elements in {
            "gather": 3 * gathered,  # A, the sum of its gradient, and A once more for the gradient of b
            "gather, kept": 2 * gathered,
            "gather, b frozen": 2 * gathered,
            "scatter": 2 * summed,  # the sum, and its gradient
        }.items():
            across = [
                size for one in every for (src, dst), size in one[name].items() if src // mesh[1] != dst // mesh[1]
            ]
            if sum(across) != lacking * elements * element:
                wrong.append(f"{name}: {sum(across)} bytes across hosts, not {lacking * elements * element}")
        return wrong

    checks: dict[str, Callable[[], list[str]]] = {
        "functions": functions,
        "all-to-alls": all_to_alls,
        "gathered": ops_torch_worker.gathered,
        "bytes": bytes_across,
        "compiled": compiled,
        "opcheck": opcheck,
        "layers": layers,
        "training": training,
    }
    with distgemm.record_calls() as ran:
        failures = checks[check]()
    return failures + of_several_hosts(ran, mesh)


def noted_later(mesh: tuple[int, int]) -> list[int | None]:
    """The ranks of a host in the plans of equal calls on all ranks, before and after a mesh says it."""
    a = torch.ones(2, 3)
    with distgemm.record_calls() as ran:
        for _ in range(2):
            distgemm.all_gather_matmul(a, a, group=dist.group.WORLD)
        flat_mesh(init_device_mesh("cpu", mesh, mesh_dim_names=HOST_MESH))
        for _ in range(2):
            distgemm.all_gather_matmul(a, a, group=dist.group.WORLD)
    return [call.plan.ranks_per_host for call in ran]


def tuned(mesh: tuple[int, int], folder: str) -> dict[str, Any]:
    """What "auto" takes across hosts: predicted, then measured with fakes, recorded, and found again."""
    of_hosts = init_device_mesh("cpu", mesh, mesh_dim_names=HOST_MESH)
    problem, cpu = distgemm.GemmProblem(1024, 1024, 1024), torch.device("cpu")
    flat = tune_worker.PLAN  # recorded for as many ranks of one host
    tune_worker.own_cache(folder, "hosts")
    tune_worker.record(flat, problem, "gemm+rs")
    found: dict[str, Any] = {"predicted": tune.select(problem, "gemm+rs", of_hosts, device=cpu, tune=False)}
    with tune_worker.Bench(lambda name: 1.0 if "inside=reduce_scatter_1d_pairwise_a" in name else 2.0) as fakes:
        found["tuned"] = tune.tune(problem, "gemm+rs", of_hosts, device=cpu)
        found["again"] = tune.select(problem, "gemm+rs", of_hosts, device=cpu)
        found["measured"] = len(fakes.measured)
    return found
