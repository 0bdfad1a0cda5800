"""What each rank of the tests of the CUDA runtime does."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.arguments import TORCH_DTYPES
from distgemm.runtime.cuda import CudaExecutable
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


def run_all(checks: list[tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """The result of each function by its name; one group of processes serves many tests."""
    return {function.__name__: function(*arguments) for function, arguments in checks}
