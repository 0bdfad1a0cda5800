"""What each rank of the tests of the CUDA runtime does."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.arguments import TORCH_DTYPES
from distgemm.runtime.cuda import CudaExecutable, ReplayTimeoutError
from distgemm.runtime.cuda import compile as compile_plan

CONFIG = "128x128x64_2x1_pingpong"


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan, and how it is called."""

    schedule: str
    mesh: tuple[int, ...]
    m: int = 512
    n: int = 512
    k: int = 512
    l: int = 1  # noqa: E741
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    partial_dtype: str | None = None
    rows: tuple[int, ...] | None = None
    chunks: int = 1
    workspace: str = "full"
    sync: str = "barrier"
    alpha: float = 1.0
    beta: float = 0.0
    branches: int = 2
    config: str | None = CONFIG

    def plan(self) -> distgemm.Plan:
        problem = distgemm.GemmProblem(
            self.m, self.n, self.k, self.l, self.dtype, self.out_dtype, self.partial_dtype, self.rows
        )
        options = {} if self.chunks == 1 else {"chunks": self.chunks}
        return distgemm.make_plan(
            problem, self.schedule, mesh=self.mesh, workspace=self.workspace, sync=self.sync, **options
        )


class Data:
    """Shards on this rank's GPU, redrawn in place; the reference in float64 of all ranks' data."""

    def __init__(self, case: Case, plan: distgemm.Plan, device: torch.device, integers: bool = True) -> None:
        self.case, self.plan, self.device, self.integers = case, plan, device, integers
        self.rank = dist.get_rank()
        p = plan.problem
        lead = (p.l,) if p.l > 1 else ()
        self.shapes = {"A": (*lead, p.m, p.k), "B": (*lead, p.n, p.k), "C": (*lead, p.m, p.n)}
        self.dtypes = {name: TORCH_DTYPES[str(p.dtype if name in "AB" else p.out_dtype)] for name in "ABCD"}
        self.shards = {
            name: torch.empty(plan.shard_shape(name, self.rank), dtype=self.dtypes[name], device=device)
            for name in "ABCD"
        }

    def draw(self, seed: int) -> torch.Tensor:
        """New inputs; returns what D's shard is to be."""
        generator = torch.Generator(self.device).manual_seed(seed)
        whole = {}
        for name, shape in self.shapes.items():
            if self.integers:
                drawn = torch.randint(-1, 2, shape, generator=generator, device=self.device)
                # Sparse, so that sums stay exact in 8 bits of mantissa.
                drawn *= torch.rand(shape, generator=generator, device=self.device) < 0.25
            else:
                drawn = torch.randn(shape, generator=generator, device=self.device)
            whole[name] = drawn.to(self.dtypes[name])
            self.shards[name].copy_(whole[name][self.plan.shard(name, self.rank)])
        case = self.case
        a = whole["A"][..., self.plan.shard("D", self.rank)[-2], :].double()
        b = whole["B"][..., self.plan.shard("D", self.rank)[-1], :].double()
        c = whole["C"][self.plan.shard("D", self.rank)].double()
        self.shards["D"].fill_(float("nan"))
        return case.alpha * a @ b.mT + case.beta * c

    def call(self, exe: CudaExecutable) -> torch.Tensor:
        c = self.shards["C"] if self.case.beta else None
        return exe(
            self.shards["A"], self.shards["B"], c, alpha=self.case.alpha, beta=self.case.beta, out=self.shards["D"]
        )


def compiled(case: Case) -> tuple[CudaExecutable, Data]:
    plan = case.plan()
    plan.verify()
    exe = compile_plan(plan, branches=case.branches, config=case.config)
    return exe, Data(case, plan, exe.device)


def exact(cases: list[Case], calls: int = 4, late: bool = True) -> list[str]:
    """Failures of cases called several times with other inputs: eager first, recorded second, replayed then."""
    failures = []
    for number, case in enumerate(cases):
        try:
            exe, data = compiled(case)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
            raise
        chance = random.Random(number * 100 + dist.get_rank())
        for call in range(calls):
            wanted = data.draw(1000 * number + call)
            if late and chance.random() < 0.5:
                torch.cuda._sleep(chance.randrange(1, 4_000_000))
            found = data.call(exe)
            if not torch.equal(found.double(), wanted):
                wrong = (found.double() != wanted).sum().item()
                failures.append(f"rank {dist.get_rank()} call {call}: {wrong} of {wanted.numel()} wrong: {case}")
                break
    return failures


def stress(cases: list[Case], replays: int, seed: int) -> list[str]:
    """Several executables on one workspace in random order, eager and within outer graphs, one rank late at random,
    NCCL traffic on another stream; every result is compared on the GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rank = dist.get_rank()
    common, own = random.Random(seed), random.Random(seed * 1000 + rank)
    made = [compiled(case) for case in cases]
    wanted = [[data.draw(seed * 100 + index * 10 + draw) for draw in range(3)] for index, (_, data) in enumerate(made)]
    inputs = []
    for index, (_, data) in enumerate(made):
        inputs.append([])
        for draw in range(3):
            data.draw(seed * 100 + index * 10 + draw)
            inputs[index].append({name: data.shards[name].clone() for name in "ABC"})
    outer = []
    for exe, data in made:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(3):  # an odd number of replays in one graph
                data.call(exe)
            graph.capture_end()
        outer.append(graph)
    traffic = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    noise = torch.zeros(1 << 20, device=device)
    other = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    done = 0
    while done < replays:
        index, draw = common.randrange(len(made)), common.randrange(3)
        exe, data = made[index]
        for name in "ABC":
            data.shards[name].copy_(inputs[index][draw][name])
        data.shards["D"].fill_(float("nan"))
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(1, 20_000_000))  # up to 10 ms
        if common.random() < 0.3:
            with torch.cuda.stream(other):
                dist.all_reduce(noise, group=traffic)
        if common.random() < 0.4:
            outer[index].replay()
            done += 3
        else:
            data.call(exe)
            done += 1
        wrong += (data.shards["D"].double() != wanted[index][draw]).sum()
    torch.cuda.synchronize()
    graphs = sum(exe.graphs for exe, _ in made)
    return [f"rank {rank}: {int(wrong)} wrong elements"] * bool(wrong.item()) + [f"few graphs: {graphs}"] * (graphs < 1)


def repeated(cases: list[Case]) -> list[str]:
    """Two runs on the same inputs are equal, bit by bit."""
    failures = []
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        data.integers = False
        data.draw(number)
        first = data.call(exe).clone()
        for _ in range(3):
            torch.cuda._sleep(random.randrange(1, 2_000_000))
            if not torch.equal(first, data.call(exe)):
                failures.append(f"rank {dist.get_rank()}: {case}")
                break
    return failures


def late_rank(case: Case, late: int, seconds: float) -> str:
    """One rank raises for a wrong shape and does not take part: the others are told whom they wait for."""
    plan = case.plan()
    exe = compile_plan(plan, config=case.config, timeout=seconds)
    data = Data(case, plan, exe.device)
    data.draw(0)
    data.call(exe)
    torch.cuda.synchronize()
    rank = dist.get_rank()
    try:
        if rank == late:
            try:
                exe(data.shards["A"][:-1], data.shards["B"])
            except ValueError as error:
                message = f"ValueError: {error}"
            deadline = time.monotonic() + 20 * seconds
            while time.monotonic() < deadline:
                time.sleep(0.05)
                exe.raise_if_dead()
            return "never told"
        data.call(exe)
        deadline = time.monotonic() + 20 * seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
    except ReplayTimeoutError as error:
        torch.cuda.synchronize()  # the GPU is free
        poisoned = bool(data.shards["D"].isnan().all()) if rank != late else True
        try:
            data.call(exe)
        except ReplayTimeoutError:
            return f"{error} | poisoned {poisoned} | " + (message if rank == late else "raised")
        return "a dead executable was called"
    return "nothing was raised"


def killed_rank(case: Case, victim: int, seconds: float) -> None:
    """One rank dies by a signal in a loop of replays; the others raise."""
    exe = compile_plan(case.plan(), config=case.config, timeout=seconds)
    data = Data(case, exe.plan, exe.device)
    data.draw(0)
    for number in range(1_000_000):
        if number == 50 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        data.call(exe)
        if number % 10 == 0:
            torch.cuda.synchronize()


def graph_nodes(case: Case) -> dict[str, Any]:
    """Nodes of the recorded graph by type, and its copies' kinds."""
    from cuda.bindings import driver, runtime

    exe, data = compiled(case)
    data.draw(0)
    replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"])
    handle = runtime.cudaGraph_t(replay.graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(handle)
    _, nodes, count = runtime.cudaGraphGetNodes(handle, count)
    names = []
    for node in nodes[:count]:
        _, kind = driver.cuGraphNodeGetType(driver.CUgraphNode(int(node)))
        names.append(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_"))
    edges = runtime.cudaGraphGetEdges(handle)
    return {"nodes": names, "edges": int(edges[-1]), "ops": [op.kind for op in exe.plan.ops(exe.rank)]}


def run_all(checks: list[tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """The result of each function by its name; one group of processes serves many tests."""
    return {function.__name__: function(*arguments) for function, arguments in checks}
