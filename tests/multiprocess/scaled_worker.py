"""What each rank does for test_scaled.py: plans with scales, and the unfused program, against float64."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distgemm import CollectiveExecutable, GemmProblem, Plan, list_schedules, make_plan
from distgemm.plan.ops import Copy, Gemm, Reduce
from distgemm.plan.scaling import SCALINGS
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import PATTERNS
from tests.multiprocess.worker import caught, meshes
from tests.unit.reference_data import Scales

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
RUNNABLE = [name for name in SCALINGS if name != "nvfp4"]

Array = np.ndarray[Any, Any]


class Operands:
    """fp8 elements and float32 or e8m0 scales of a plan, and the product of what they stand for."""

    def __init__(self, plan: Plan, seed: int) -> None:
        p = self.problem = plan.problem
        assert p.scaling is not None
        generator = torch.Generator().manual_seed(seed)
        batch = (p.l,) if p.l > 1 else ()
        self.plan, self.elements = plan, {}
        for operand, rows in (("A", p.m), ("B", p.n)):
            drawn = torch.randn(*batch, rows, p.k, generator=generator)
            self.elements[operand] = drawn.to(TORCH_DTYPES[p.operand_dtype(operand)])
        self.scales = Scales.draw(plan, seed, powers=p.scaling.a.dtype == "float8_e8m0fnu")
        for name, shards in self.scales.shards.items():  # as the plan's type holds them
            dtype = TORCH_DTYPES[p.operand_dtype(name)]
            self.scales.shards[name] = [torch.from_numpy(each).to(dtype) for each in shards]
        factors = {name: x.astype(np.float32).astype(float) for name, x in self.scales.of_elements.items()}
        a, b = (factors[name].reshape(x.shape) * x.double().numpy() for name, x in self.elements.items())
        self.product: Array = a @ b.swapaxes(-1, -2)
        self.absolute: Array = np.abs(a) @ np.abs(b).swapaxes(-1, -2)

    def call(self, rank: int) -> dict[str, Any]:
        """The arguments of a call."""
        given = {f"{name.lower()}_shard": x[self.plan.shard(name, rank)] for name, x in self.elements.items()}
        scales = {f"scale_{name[-1].lower()}": each[rank] for name, each in self.scales.shards.items()}
        return given | scales

    def error(self, d: torch.Tensor, rank: int, roundings: int, adds: int) -> str:
        """What is wrong with this rank's D; "" if its error is within what the formats imply.

        Args:
            d: this rank's shard.
            rank: the rank.
            roundings: how often a partial sum is rounded to ``partial_dtype``, at most.
            adds: how many partial sums are added, at most.
        """
        p = self.problem
        single, partial, out = (UNIT_ROUNDOFF[name] for name in ("float32", str(p.partial_dtype), str(p.out_dtype)))
        where = self.plan.shard("D", rank)
        wanted, absolute = self.product[where], self.absolute[where]
        # Elements times scales are rounded, twice in a product; a product of k terms, and sums of sums.
        terms = (p.k + 2 + adds) * single
        error = terms / (1 - terms) * absolute
        error += ((1 + partial) ** roundings - 1) * (absolute + error)
        bound = error + out * (np.abs(wanted) + error)
        found = np.abs(d.double().numpy() - wanted)
        if np.isnan(found).any() or (found > bound).any():
            return f"rank {rank}: {float((found / bound).max(initial=0)):.2f} times the bound: {p} {self.plan.schedule}"
        return ""


def roundings_of(plan: Plan) -> tuple[int, int]:
    """How often ops write the partial sums of one tile, and how many sums they add, at most."""
    written: Counter[Any] = Counter()
    added: Counter[Any] = Counter()
    for ops in plan.rank_ops:
        for op in ops:
            if isinstance(op, Gemm | Reduce):
                written[op.out.box] += op.c is None
                added[op.out.box] += 1 + len(op.sources)
    return max(written.values(), default=0), max(added.values(), default=0)


def problems(rng: random.Random) -> GemmProblem:
    """Extents that nothing divides, and those of blocks; e5m2 by e4m3; all types of results."""
    dtype, b_dtype = rng.choice([("float8_e4m3fn", None), ("float8_e5m2", "float8_e4m3fn")])
    return GemmProblem(
        *rng.choice([(37, 29, 300), (3, 130, 513), (260, 40, 256)]),
        l=rng.choice([1, 1, 2]),
        dtype=dtype,
        b_dtype=b_dtype,
        out_dtype=rng.choice(["bfloat16", "float16", "float32"]),
        partial_dtype=rng.choice([None, "float32", "bfloat16"]),
        scaling=rng.choice(RUNNABLE),  # type: ignore[arg-type]
    )


def plans_equal_float64(draws: int) -> list[str]:
    """The failures of this rank, of plans of every schedule."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for name in list_schedules():
        for mesh in meshes(name, ranks):
            rng = random.Random(f"{name}{mesh}")
            for seed in range(draws):
                problem = problems(rng)
                how = {"workspace": rng.choice(["full", "bounded"]), "sync": rng.choice(["credit", "barrier"])}
                plan = make_plan(problem, name, mesh=mesh, chunks=rng.choice([1, 2, 3]), **how)
                operands = Operands(plan, seed)
                d = CollectiveExecutable(plan)(**operands.call(rank))
                wrong.append(operands.error(d, rank, *roundings_of(plan)))
    return [each for each in wrong if each]


def unfused_equals_float64(draws: int) -> list[str]:
    """The failures of this rank, of the unfused program, also with unequal rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for pattern in PATTERNS:
        rng = random.Random(pattern)
        for seed in range(draws):
            problem = problems(rng)
            executable = UnfusedExecutable(problem, pattern)
            operands = Operands(executable.plan, seed)
            d = executable(**operands.call(rank))
            # The collective rounds each product, and each sum of two.
            count = 0 if pattern == "ag+gemm" else 2 * ranks + 1
            wrong.append(operands.error(d, rank, count, count))
    return [each for each in wrong if each]


def wrong_scales() -> dict[str, str]:
    """The errors of calls with other scales than the plan's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = make_plan(GemmProblem(8 * ranks, 8, 16, dtype="float8_e4m3fn", scaling="rowwise"), "ag+gemm", ranks)
    exe, right = CollectiveExecutable(plan), Operands(plan, 0).call(rank)

    def call(**changes: Any) -> str:
        return caught(lambda: exe(**(right | changes)))

    whole = torch.ones(8 * ranks, 1)
    found = {
        "missing": call(scale_a=None),
        "of all ranks": call(scale_a=whole),
        "dtype": call(scale_a=right["scale_a"].double()),
        "of columns": call(scale_b=torch.ones(1, 5)),
        "nvfp4": caught(lambda: CollectiveExecutable(_without_numbers(ranks))),
        "another shape": call(scale_a=right["scale_a"].view(-1), scale_b=right["scale_b"].view(1, -1)),
    }
    dropped = [op for op in plan.ops(0) if isinstance(op, Copy) and op.operand == "SFA"]
    assert dropped if ranks > 1 else not dropped
    return found


def _without_numbers(ranks: int) -> Plan:
    problem = GemmProblem(128 * ranks, 128, 64, dtype="float4_e2m1fn_x2", scaling="nvfp4")  # type: ignore[arg-type]
    return make_plan(problem, "ag+gemm", ranks)


def run_all(draws: int) -> dict[str, Any]:
    return {
        "plans": plans_equal_float64(draws),
        "unfused": unfused_equals_float64(4 * draws),
        "wrong": wrong_scales(),
    }
