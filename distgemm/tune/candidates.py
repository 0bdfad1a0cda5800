"""What is worth measuring, by the cost model: schedules, and how GPUs execute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from distgemm.gemm import GemmSpec, MatrixSpec
from distgemm.gemm.fused.gemms import PRODUCTS, SENDS
from distgemm.gemm.spec import Status
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Gemm, Reduce, View, box_extents
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import Execution
from distgemm.runtime.cuda.lowering import lower
from distgemm.runtime.cuda.lowering.actions import on_one_stream
from distgemm.runtime.unfused import COLLECTIVES, collective_status, unfused_status
from distgemm.simulator.engine import predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.tune.config import UNFUSED, Choice

__all__ = ["SCHEDULES", "by_one_kernel", "candidates", "check_op", "predicted", "providers", "specs_of"]

MACHINE = "h200"
"""The machine on which candidates are predicted, whatever the GPU: it only says which are worth measuring."""

WITHIN = {"kernels": 1.25, "one kernel": 1.4, "alone": 1.4}
"""Plans predicted to take longer than the best one of their kind by more than this factor are not measured: with a
kernel for each GEMM, with one beside copy engines, with one that does all. Of what chunks cost where GEMMs are one
kernel the model knows too little."""

WORD = 2.0
"""us until what a kernel has stored at a peer is there."""

GATHER = "all_gather_1d_tiling_cd_rotating_a"
SUMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pairwise_a", {"chunks": 1}),
    ("pairwise_a", {"chunks": 1, "mechanism": "store"}),
    ("pairwise_a", {"chunks": 2}),
    ("tiling_a_rotating_c", {"chunks": 2}),
    ("tiling_a_rotating_c", {"chunks": 2, "mechanism": "store"}),
    ("tiling_a_rotating_c", {"chunks": 4}),
)
SCHEDULES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "ag+gemm": tuple((GATHER, {"chunks": chunks}) for chunks in (1, 2, 4)),
    "gemm+rs": tuple((f"reduce_scatter_1d_{name}", options) for name, options in SUMS),
    "gemm+ar": tuple((f"all_reduce_1d_{name}", options) for name, options in SUMS),
}
"""For each op, the schedules that are tried, with their options."""
STORED = (
    {"chunks": 2},
    {"chunks": 4},
    {"chunks": 4, "lag": 2},
    {"chunks": 8, "lag": 2},
    {"chunks": 8, "lag": 4},
    {"chunks": 16, "lag": 2},
)
"""Chains by one kernel that stores its sums."""
DELIVERED = ({"chunks": 2}, {"chunks": 4}, {"chunks": 8, "lag": 2}, {"chunks": 16, "lag": 2})
"""The same, where it delivers what is finished, too: a chunk leaves once it is complete."""
SUMMED: tuple[dict[str, Any], ...] = (
    {"chunks": 1, "last": "gemm"},
    {"chunks": 2, "last": "gemm"},
    {"chunks": 4, "last": "gemm"},
    {"chunks": 4, "last": "gemm", "lag": 1},
    {"chunks": 8, "last": "gemm", "lag": 2},
    {"chunks": 16, "last": "gemm", "lag": 2},
    {"chunks": 4, "last": "gemm", "lag": 2, "along": "n"},
)
"""Pairwise sums by one kernel that stores all parts where they are added: no sum takes several hops, as in a chain of
more than two ranks. Chunks of columns read B once, however few rows there are."""
FINISHED: tuple[dict[str, Any], ...] = (
    {"chunks": 8, "last": "gemm", "lag": 2},
    *({"chunks": chunks, "last": "gemm", "lag": lag, "along": "n"} for chunks, lag in ((4, 2), (8, 1), (8, 2))),
)
"""The same, where it delivers what is finished, too."""
CHAIN, ALL_REDUCE = "reduce_scatter_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_a_rotating_c"
PAIRWISE = {"gemm+rs": "reduce_scatter_1d_pairwise_a", "gemm+ar": "all_reduce_1d_pairwise_a"}
BY_ONE_KERNEL: dict[str, tuple[tuple[str, dict[str, Any], str], ...]] = {
    "ag+gemm": (
        *((GATHER, {"chunks": chunks}, "engine") for chunks in (1, 2, 4)),
        *((GATHER, {"chunks": chunks}, copies) for copies in ("slices", "gemm", "both") for chunks in (1, 2)),
    ),
    "gemm+rs": (
        (CHAIN, {"chunks": 2, "results": 2}, "engine"),
        (CHAIN, {"chunks": 4, "results": 4}, "engine"),
        *((CHAIN, {"mechanism": "store", **how}, "engine") for how in STORED),
        *((PAIRWISE["gemm+rs"], {"mechanism": "store", **how}, "engine") for how in SUMMED),
    ),
    "gemm+ar": (
        *((ALL_REDUCE, {"mechanism": "store", **how}, "engine") for how in STORED),
        *((ALL_REDUCE, {"mechanism": "store", **how}, "gemm") for how in DELIVERED),
        (PAIRWISE["gemm+ar"], {"mechanism": "store", **SUMMED[1]}, "engine"),
        *((PAIRWISE["gemm+ar"], {"mechanism": "store", **how}, "gemm") for how in FINISHED),
    ),
}
"""The same for plans whose GEMMs are one kernel that waits by itself, with who copies."""


def candidates(problem: GemmProblem, op: str, world_size: int) -> list[Choice]:
    """What is worth measuring: plans by their predicted time, then the unfused program where it computes this.

    op: "ag+gemm", "gemm+rs" or "gemm+ar"

    Plans that are predicted to take more than ``WITHIN`` times as long as the best one of their kind are left out; so
    are those with GEMMs that their provider does not compute. Raises ValueError for another op.
    """
    times = _predictions(problem, check_op(op), world_size)
    plans = sorted((choice for choice in times if choice.method == "plan"), key=lambda choice: times[choice])
    best: dict[str, float] = {}
    for choice in plans:
        best.setdefault(_kind(choice, op), times[choice])
    kept = [choice for choice in plans if times[choice] <= WITHIN[_kind(choice, op)] * best[_kind(choice, op)]]
    return kept + [choice for choice in times if choice.method == "unfused"]


def _kind(choice: Choice, op: str) -> str:
    """Of WITHIN's."""
    if not choice.by_one_kernel:
        return "kernels"
    stored = op == "gemm+rs" and choice.option("mechanism") == "store"
    return "alone" if stored or choice.execution.copies == "gemm" else "one kernel"


def predicted(problem: GemmProblem, op: str, world_size: int) -> Choice:
    """The candidate that the cost model takes for the fastest, of those that wait outside of GEMMs: which are that fast
    with any tensors. Of a plan and the unfused program that are as fast, the unfused one, of providers the first that
    computes it. Raises ValueError where there is no candidate."""
    times = _waiting_outside(problem, check_op(op), world_size)
    if not times:
        raise ValueError(f"nothing multiplies {problem} for {op} on {world_size} ranks")
    best = min(times, key=lambda choice: (times[choice], choice.method != "unfused"))
    return replace(best, how="predicted")


@lru_cache(maxsize=256)
def _predictions(problem: GemmProblem, op: str, world_size: int) -> dict[Choice, float]:
    """us of everything that could be tried."""
    times = _waiting_outside(problem, op, world_size)
    return times if world_size == 1 else times | dict(_by_one_kernel(problem, op, world_size, Machine.load(MACHINE)))


@lru_cache(maxsize=256)
def _waiting_outside(problem: GemmProblem, op: str, world_size: int) -> dict[Choice, float]:
    """The same of what does not wait within GEMMs."""
    machine = Machine.load(MACHINE)
    times = dict(_by_kernels(problem, op, world_size, machine))
    if unfused_status(problem, op):
        time = predict_unfused(problem, machine, op, world_size)
        for collective in COLLECTIVES:  # NCCL first: it is taken where nothing is measured
            if collective_status(problem, op, collective, world_size):
                times[replace(UNFUSED, collective=collective)] = time
    return times


def _by_kernels(problem: GemmProblem, op: str, world_size: int, machine: Machine) -> Iterator[tuple[Choice, float]]:
    """Plans with a kernel for each GEMM."""
    for schedule, options in SCHEDULES[op]:
        plan = make_plan(problem, schedule, world_size, sync="barrier", **options)
        able = [name for name in ("cutlass", "cublas") if _computes(name, plan)]
        most = max(sum(isinstance(each, Gemm) for each in plan.ops(rank)) for rank in range(world_size))
        for branches in (1, 2) if most > 1 and able else (1,):
            time = simulate(plan, machine, branches=branches).time
            actions = lower(plan, 0, branches)
            ways = ("memory", "kernel") if world_size > 1 and on_one_stream(actions) else ("memory",)
            merges = (False, True) if len(lower(plan, 0, branches, merge=True)) < len(actions) else (False,)
            for provider, waits, merge in product(able, ways, merges):
                execution = Execution(provider, branches=branches, waits=waits, merge=merge)
                yield Choice("plan", schedule, tuple(options.items()), execution), time


def _by_one_kernel(problem: GemmProblem, op: str, world_size: int, machine: Machine) -> Iterator[tuple[Choice, float]]:
    """Plans whose GEMMs are one kernel that waits by itself."""
    inside = _inside(machine)
    for schedule, options, copies in BY_ONE_KERNEL[op]:
        if world_size == 2 and schedule == PAIRWISE.get(op) and "along" not in options:
            continue  # the same as a chain
        plan = make_plan(problem, schedule, world_size, sync="barrier", **options)
        if not (_computes("cutlass", plan) and by_one_kernel(plan, copies)):
            continue
        actions = lower(plan, 0, 1, gated=True, copies=copies)
        if copies == "both" and not any(action.opens for action in actions):
            continue  # nothing is left for engines: the same as by the kernel alone
        fewer = copies == "engine" and len(lower(plan, 0, 1, True, gated=True)) < len(actions)
        for merge in (False, True) if fewer else (False,):
            execution = Execution("cutlass", branches=1, waits="gemm", merge=merge, copies=copies)
            choice = Choice("plan", schedule, tuple(options.items()), execution)
            # Tiles of the next product fill the SMs that one leaves idle, as on two branches.
            yield choice, simulate(plan, inside if _kind(choice, op) == "alone" else machine, branches=2).time


def _inside(machine: Machine) -> Machine:
    """Where one kernel does all: nothing is launched, and words that it waits for are seen at once."""
    link = machine.nvlink._replace(gap=0.0, latency=WORD)
    return replace(machine, gemm_launch=0.0, wait=0.0, copy_launch=0.0, signal_gap=0.0, nvlink=link)


def by_one_kernel(plan: Plan, copies: str = "engine") -> Status:
    """Whether each rank's GEMMs can be one kernel that waits by itself, with copies as ``distgemm.compile`` takes it;
    falsy with the reason."""
    try:
        kernels = [
            action
            for rank in range(plan.world_size)
            for action in lower(plan, rank, 1, gated=True, copies=copies)
            if action.gates
        ]
    except PlanError as error:
        return Status(str(error))
    if any(len(action.ops) > PRODUCTS or len(action.sends) > SENDS for action in kernels):
        return Status(f"one kernel computes {PRODUCTS} products and sends {SENDS} chunks, at most")
    gemms = specs_of(plan)
    if plan.problem.l > 1 or plan.problem.dtype == "float32":
        return Status("single products are multiplied by kernels that wait, and not of IEEE float32")
    if any(spec.partial for spec in gemms) and len({spec.d.dtype for spec in gemms}) > 1:
        return Status("sums that are passed on are of D's type")
    if not all(spec.operands_aligned and (spec.results_aligned or spec.partial is None) for spec in gemms):
        return Status("TMA wants addresses and strides in multiples of 16 bytes")
    return Status()


def _computes(provider: str, plan: Plan) -> bool:
    """Whether a provider multiplies what a plan has."""
    found = providers().get(provider)
    sums_in_float64 = "float64" in (plan.problem.out_dtype, plan.problem.partial_dtype)
    # Sums behind a GEMM add C and a bias, too, where the GEMM has added a partial sum and its provider adds no more.
    if sums_in_float64 and any(isinstance(op, (Gemm, Reduce)) and op.sources for ops in plan.rank_ops for op in ops):
        return False
    return found is not None and all(found.supports(spec) for spec in specs_of(plan))


@lru_cache(maxsize=1)
def providers() -> dict[str, Any]:
    """By name. Without a GPU, those for Hopper."""
    from distgemm.gemm.cublas import CublasProvider
    from distgemm.gemm.cutlass import CutlassProvider

    return {
        "cutlass": CutlassProvider() if torch.cuda.is_available() else CutlassProvider("90a"),
        "cublas": CublasProvider(),
    }


def specs_of(plan: Plan) -> list[GemmSpec]:
    """The GEMMs of all ranks with dense shards, each once, without C and bias."""
    p = plan.problem

    def matrix(view: View) -> MatrixSpec:
        batches, rows, columns = box_extents(view.box)
        _, frame_rows, _ = box_extents(view.frame)
        between = frame_rows * view.pitch if batches > 1 else 0
        return MatrixSpec(plan.dtype(view), rows, columns, batches, stride=view.pitch, batch_stride=between,
                          padded=view.buffer == "slot")  # fmt: skip

    found: dict[GemmSpec, None] = {}
    for op in (op for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)):
        d = matrix(op.out)
        a, b = (replace(matrix(view), dtype=p.dtype) for view in (op.a, op.b))
        partial = matrix(op.sources[0]) if op.sources else None
        found[GemmSpec(a, b, d, partial=partial)] = None
    return list(found)


def check_op(op: str) -> str:
    """The op. Raises ValueError for another one than there are."""
    if op not in SCHEDULES:
        raise ValueError(f"op is one of {', '.join(SCHEDULES)}, got {op!r}")
    return op
