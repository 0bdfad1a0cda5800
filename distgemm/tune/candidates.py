"""What is worth measuring, by the cost model: schedules, and how GPUs execute them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import torch

from distgemm.gemm import GemmSpec, MatrixSpec
from distgemm.gemm.fused.gemms import PRODUCTS, SENDS
from distgemm.gemm.spec import Status
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Gemm, Reduce, View, box_extents
from distgemm.plan.patterns import does_pattern
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda.lowering import lower, on_one_stream
from distgemm.runtime.executable import ExecutionConfig, ExecutionMode, Transport, WaitBy
from distgemm.runtime.unfused import COLLECTIVES, collective_status, unfused_status
from distgemm.schedulers import DistributedTileScheduler, Pattern, check_pattern, get_schedule, schedule_options
from distgemm.schedulers.registry import BuilderError
from distgemm.simulator import predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.tune.config import UNFUSED, TunedConfig

__all__ = [
    "Candidate",
    "candidates",
    "list_candidates",
    "predicted",
    "providers",
    "register_candidate",
    "single_kernel_status",
    "specs_of",
]

logger = logging.getLogger("distgemm")

MACHINE = "h200"
"""The machine on which candidates are predicted, whatever the GPU: it only says which are worth measuring."""

Group = Literal["multi_kernel", "fused_with_copies", "fused_alone"]

SLOWDOWN_LIMIT: dict[Group, float] = {"multi_kernel": 1.25, "fused_with_copies": 1.4, "fused_alone": 1.4}
"""A plan that is predicted to take this factor longer than the best plan of its group is not measured. The groups: a
kernel for each GEMM; the fused kernel beside copy engines; the fused kernel alone. The model knows too little of what
chunks cost in a fused kernel."""

FLAG_LATENCY_US = 2.0
"""Until what a kernel has stored at a peer has arrived there."""


@dataclass(frozen=True)
class Candidate:
    """A schedule that ``schedule="auto"`` considers, with options.

    Attributes:
        schedule: name of a registered schedule.
        options: of the schedule and of :func:`distgemm.make_plan`, as (name, value) pairs.
        execution: "multi_kernel", with every provider, number of GEMM streams and way to wait that fits; or
            "single_kernel", the fused kernel.
        transport: of the fused kernel.
        min_ranks: the fewest ranks with which it is considered.
    """

    schedule: str
    options: tuple[tuple[str, Any], ...] = ()
    execution: ExecutionMode = "multi_kernel"
    transport: Transport = "copy_engine"
    min_ranks: int = 1


_candidates: dict[Pattern, list[Candidate]] = {}


def register_candidate(
    pattern: Pattern,
    schedule: str,
    *,
    execution: ExecutionMode = "multi_kernel",
    transport: Transport = "copy_engine",
    min_ranks: int = 1,
    **options: Any,
) -> None:
    """Let ``schedule="auto"`` consider a schedule, such as one of your own, for a pattern.

    Args:
        pattern: what the schedule does: "ag+gemm", "gemm+rs" or "gemm+ar".
        schedule: name of a registered schedule.
        execution: how the GEMMs are executed, as :class:`Candidate` says.
        transport: of the fused kernel.
        min_ranks: the fewest ranks with which it is considered.
        **options: of the schedule and of :func:`distgemm.make_plan`.

    Raises:
        ValueError: for an unknown pattern or schedule, and for a candidate that is registered already.
    """
    schedule_options(schedule)  # refuses an unknown name
    ExecutionConfig(execution=execution, transport=transport)
    found = Candidate(schedule, tuple(sorted(options.items())), execution, transport, min_ranks)
    known = _candidates.setdefault(check_pattern(pattern), [])
    if found in known:
        raise ValueError(f"{found} is a candidate for {pattern} already")
    known.append(found)
    for cache in (_predictions, _multi_kernel_predictions):
        cache.cache_clear()


def list_candidates(pattern: Pattern) -> tuple[Candidate, ...]:
    """The candidates of a pattern, in the order in which they were registered."""
    return tuple(_candidates[check_pattern(pattern)])


def _register_defaults() -> None:
    gather, stem = "all_gather_1d_tiling_cd_rotating_a", {"gemm+rs": "reduce_scatter_1d", "gemm+ar": "all_reduce_1d"}
    for chunks in (1, 2, 4):
        register_candidate("ag+gemm", gather, chunks=chunks)
    for chunks in (1, 2, 4):
        register_candidate("ag+gemm", gather, execution="single_kernel", chunks=chunks)
    by_kernel: tuple[Transport, ...] = ("copy_engine_slices", "sm")
    for transport, chunks in product(by_kernel, (1, 2)):
        register_candidate("ag+gemm", gather, execution="single_kernel", transport=transport, chunks=chunks)

    patterns: tuple[Pattern, ...] = ("gemm+rs", "gemm+ar")
    for pattern in patterns:
        chain, pairwise = f"{stem[pattern]}_tiling_a_rotating_c", f"{stem[pattern]}_pairwise_a"
        register_candidate(pattern, pairwise, chunks=1)
        register_candidate(pattern, pairwise, chunks=1, mechanism="store")
        register_candidate(pattern, pairwise, chunks=2)
        register_candidate(pattern, chain, chunks=2)
        register_candidate(pattern, chain, chunks=2, mechanism="store")
        register_candidate(pattern, chain, chunks=4)
        # Chains by a fused kernel: its sums are copied from send slots, or stored at the peer.
        if pattern == "gemm+rs":
            for chunks in (2, 4):
                register_candidate(pattern, chain, execution="single_kernel", chunks=chunks, send_slots=chunks)
        for options in STORED_CHAINS:
            register_candidate(pattern, chain, execution="single_kernel", mechanism="store", **options)
        if pattern == "gemm+ar":
            for options in SENT_CHAINS:
                register_candidate(
                    pattern, chain, execution="single_kernel", transport="sm", mechanism="store", **options
                )
        # Pairwise sums by a fused kernel that stores every partial sum at the rank that adds it. Between two ranks
        # they are the same as a chain, unless chunks are columns.
        sums = PAIRWISE_SUMS if pattern == "gemm+rs" else PAIRWISE_SUMS[1:2]
        for options in sums:
            min_ranks = 1 if "chunk_mode" in options else 3
            register_candidate(
                pattern, pairwise, execution="single_kernel", mechanism="store", min_ranks=min_ranks, **options
            )
        if pattern == "gemm+ar":
            for options in SENT_PAIRWISE_SUMS:
                min_ranks = 1 if "chunk_mode" in options else 3
                register_candidate(
                    pattern,
                    pairwise,
                    execution="single_kernel",
                    transport="sm",
                    mechanism="store",
                    min_ranks=min_ranks,
                    **options,
                )


STORED_CHAINS: tuple[dict[str, Any], ...] = (
    {"chunks": 2},
    {"chunks": 4},
    {"chunks": 4, "stagger": 2},
    {"chunks": 8, "stagger": 2},
    {"chunks": 8, "stagger": 4},
    {"chunks": 16, "stagger": 2},
)
SENT_CHAINS: tuple[dict[str, Any], ...] = (
    {"chunks": 2},
    {"chunks": 4},
    {"chunks": 8, "stagger": 2},
    {"chunks": 16, "stagger": 2},
)
"""The same where the kernel also sends finished tiles: a chunk leaves once it is complete."""
PAIRWISE_SUMS: tuple[dict[str, Any], ...] = tuple(
    {"final_add": "epilogue", **options}
    for options in (
        {"chunks": 1},
        {"chunks": 2},
        {"chunks": 4},
        {"chunks": 4, "stagger": 1},
        {"chunks": 8, "stagger": 2},
        {"chunks": 16, "stagger": 2},
        {"chunks": 4, "stagger": 2, "chunk_mode": "n"},
    )
)
"""No sum takes several hops, as in a chain of more than two ranks. Chunks of columns read B once, however few rows
there are."""
SENT_PAIRWISE_SUMS: tuple[dict[str, Any], ...] = (
    {"final_add": "epilogue", "chunks": 8, "stagger": 2},
    *(
        {"final_add": "epilogue", "chunks": chunks, "stagger": stagger, "chunk_mode": "n"}
        for chunks, stagger in ((4, 2), (8, 1), (8, 2))
    ),
)
"""The same where the kernel also sends finished tiles."""


def candidates(problem: GemmProblem, pattern: Pattern, world_size: int) -> list[TunedConfig]:
    """What is worth measuring: plans by their predicted time, then the unfused program where it computes this.

    Plans that are predicted to take more than ``SLOWDOWN_LIMIT`` times as long as the best plan of their group are left
    out. So are plans with GEMMs that their provider does not compute, and schedules that refuse the problem.

    Raises:
        ValueError: for an unknown pattern, and for a registered candidate whose plan does something else.
    """
    times = _predictions(problem, check_pattern(pattern), world_size)
    plans = sorted((config for config in times if config.method == "plan"), key=lambda config: times[config])
    best: dict[Group, float] = {}
    for config in plans:
        best.setdefault(_group(config, pattern), times[config])
    kept = [
        config
        for config in plans
        if times[config] <= SLOWDOWN_LIMIT[_group(config, pattern)] * best[_group(config, pattern)]
    ]
    return kept + [config for config in times if config.method == "unfused"]


def _group(config: TunedConfig, pattern: Pattern) -> Group:
    if not config.execution.single_kernel:
        return "multi_kernel"
    stored = pattern == "gemm+rs" and config.option("mechanism") == "store"
    return "fused_alone" if stored or config.execution.transport == "sm" else "fused_with_copies"


def predicted(problem: GemmProblem, pattern: Pattern, world_size: int) -> TunedConfig:
    """The candidate that the cost model predicts to be fastest, of those with a kernel for each GEMM.

    Only these run with tensors of any strides. Where a plan and the unfused program are predicted to be as fast, it is
    the unfused program; of several providers it is the first one that computes the plan.

    Raises:
        ValueError: if there is no candidate.
    """
    times = _multi_kernel_predictions(problem, check_pattern(pattern), world_size)
    if not times:
        raise ValueError(f"nothing multiplies {problem} for {pattern} on {world_size} ranks")
    best = min(times, key=lambda config: (times[config], config.method != "unfused"))
    return replace(best, source="predicted")


@lru_cache(maxsize=256)
def _predictions(problem: GemmProblem, pattern: Pattern, world_size: int) -> dict[TunedConfig, float]:
    """us of every candidate."""
    times = _multi_kernel_predictions(problem, pattern, world_size)
    if world_size == 1:
        return times
    return times | dict(_single_kernel(problem, pattern, world_size, Machine.load(MACHINE)))


@lru_cache(maxsize=256)
def _multi_kernel_predictions(problem: GemmProblem, pattern: Pattern, world_size: int) -> dict[TunedConfig, float]:
    """us of the candidates with a kernel for each GEMM, and of the unfused program."""
    machine = Machine.load(MACHINE)
    times = dict(_multi_kernel(problem, pattern, world_size, machine))
    if unfused_status(problem, pattern):
        time = predict_unfused(problem, machine, pattern, world_size)
        for collective in COLLECTIVES:  # NCCL first: it is taken where nothing is measured
            if collective_status(problem, pattern, collective, world_size):
                times[replace(UNFUSED, collective=collective)] = time
    return times


def _plans(
    problem: GemmProblem, pattern: Pattern, world_size: int, execution: ExecutionMode
) -> Iterator[tuple[Candidate, Plan]]:
    for candidate in list_candidates(pattern):
        if candidate.execution != execution or world_size < candidate.min_ranks:
            continue
        try:
            scheduler, plan_options = _scheduler(candidate, world_size)
        except BuilderError:
            raise
        except ValueError as error:  # such as a schedule for powers of two
            logger.info("not a candidate on %d ranks: %s: %s", world_size, candidate.schedule, error)
            continue
        plan = make_plan(problem, scheduler, sync="barrier", **plan_options)
        if not does_pattern(plan, pattern):
            raise ValueError(f"candidate {candidate.schedule} does not start and end with the shards of {pattern}")
        yield candidate, plan


def _scheduler(candidate: Candidate, world_size: int) -> tuple[DistributedTileScheduler, dict[str, Any]]:
    """The candidate's scheduler, and the options that are of the plan."""
    known = schedule_options(candidate.schedule)
    own = {name: value for name, value in candidate.options if name in known}
    rest = {name: value for name, value in candidate.options if name not in known}
    return get_schedule(candidate.schedule, world_size, **own), rest


def _multi_kernel(
    problem: GemmProblem, pattern: Pattern, world_size: int, machine: Machine
) -> Iterator[tuple[TunedConfig, float]]:
    """Plans with a kernel for each GEMM."""
    for candidate, plan in _plans(problem, pattern, world_size, "multi_kernel"):
        able = [name for name in ("cutlass", "cublas") if _computes(name, plan)]
        most = max(sum(isinstance(op, Gemm) for op in plan.ops(rank)) for rank in range(world_size))
        for gemm_streams in (1, 2) if most > 1 and able else (1,):
            time = simulate(plan, machine, gemm_streams=gemm_streams).time
            plain = ExecutionConfig(gemm_streams=gemm_streams)
            actions = lower(plan, 0, plain)
            waits: tuple[WaitBy, ...] = ("memory_op",)
            if world_size > 1 and on_one_stream(actions):
                waits = ("memory_op", "kernel")
            fewer = len(lower(plan, 0, replace(plain, merge_copies=True))) < len(actions)
            for provider, wait_by, merge_copies in product(able, waits, (False, True) if fewer else (False,)):
                execution = replace(plain, provider=provider, wait_by=wait_by, merge_copies=merge_copies)
                yield TunedConfig("plan", candidate.schedule, candidate.options, execution), time


def _single_kernel(
    problem: GemmProblem, pattern: Pattern, world_size: int, machine: Machine
) -> Iterator[tuple[TunedConfig, float]]:
    """Plans with the fused kernel."""
    inside = _without_launches(machine)
    for candidate, plan in _plans(problem, pattern, world_size, "single_kernel"):
        if not (_computes("cutlass", plan) and single_kernel_status(plan, candidate.transport)):
            continue
        plain = ExecutionConfig(gemm_streams=1, execution="single_kernel", transport=candidate.transport)
        executions = [plain]
        if candidate.transport == "copy_engine":
            merged = replace(plain, merge_copies=True)
            if len(lower(plan, 0, merged)) < len(lower(plan, 0, plain)):
                executions.append(merged)
        for execution in executions:
            config = TunedConfig("plan", candidate.schedule, candidate.options, execution)
            # Tiles of the next GEMM fill the SMs that one leaves idle, as on two streams.
            alone = _group(config, pattern) == "fused_alone"
            yield config, simulate(plan, inside if alone else machine, gemm_streams=2).time


def _without_launches(machine: Machine) -> Machine:
    """The machine for a fused kernel alone: nothing is launched, and flags are seen at once."""
    link = machine.nvlink._replace(gap=0.0, latency=FLAG_LATENCY_US)
    return replace(machine, gemm_launch=0.0, wait=0.0, copy_launch=0.0, signal_gap=0.0, nvlink=link)


def single_kernel_status(plan: Plan, transport: Transport = "copy_engine") -> Status:
    """Whether the GEMMs of each rank can be one kernel; falsy with the reason."""
    execution = ExecutionConfig(execution="single_kernel", transport=transport)
    try:
        kernels = [
            action for rank in range(plan.world_size) for action in lower(plan, rank, execution) if action.kernel
        ]
    except PlanError as error:
        return Status(str(error))
    if any(len(action.ops) > PRODUCTS or (action.kernel and len(action.kernel.sends) > SENDS) for action in kernels):
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


_register_defaults()
