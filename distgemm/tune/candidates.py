"""What "auto" considers: the registered candidates, and the cost model that says which of them are worth measuring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

import torch

from distgemm.arguments import integer
from distgemm.gemm import GemmSpec, MatrixSpec, default_provider
from distgemm.gemm.cublas import CublasProvider
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.per_tile.model import Costs, predict_per_tile
from distgemm.gemm.per_tile.select import MACHINE, ROW_BYTES, SHORT_M, configs_of, gemm_of
from distgemm.gemm.spec import Status
from distgemm.plan.ops import Gemm, View, box_extents
from distgemm.plan.patterns import does_pattern
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.runtime.cuda.lowering import lower, on_one_stream
from distgemm.runtime.executable import ExecutionConfig, ExecutionMode, WaitBy
from distgemm.runtime.unfused import COLLECTIVES, collective_status, unfused_status
from distgemm.schedulers import PATTERNS, Pattern, check_pattern, schedule_mesh_rank, schedule_options
from distgemm.schedulers.registry import BuilderError
from distgemm.simulator import predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.tune.config import UNFUSED, TunedConfig, options_for

__all__ = [
    "Candidate",
    "list_candidates",
    "list_plans",
    "per_tile_status",
    "predicted",
    "providers",
    "register_candidate",
    "shortlist",
    "specs_of",
]

logger = logging.getLogger("distgemm")

COPIES_BIAS, STORES_BIAS = 1.05, 1.19
"""Measured over simulated times of plans with a kernel for each GEMM, in the mean of 272 configurations whose copy
engines send and 74 whose GEMMs store, on 4 H200s (``simulator_vs_measured.json``)."""

SLOWDOWN_LIMIT: dict[ExecutionMode, float] = {"multi_kernel": 1.25, "per_tile": 1.15}
"""A plan is measured if its predicted time is at most this factor above the best one with the same execution. That of
per-tile kernels is near the largest error of their model with 512 rows and more (docs/per_tile_measured.md)."""

PLAN_OPTIONS = ("workspace", "mechanism", "send_slots")
"""Options of :func:`distgemm.make_plan` that a candidate can set."""


# --- registered candidates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A schedule, with options, that ``schedule="auto"`` considers.

    Attributes:
        schedule: name of a registered schedule.
        options: options of the schedule and of :func:`distgemm.make_plan`, as (name, value) pairs sorted by name.
        execution: "multi_kernel" tries every provider, number of GEMM streams and ``wait_by`` that the plan allows.
            "per_tile" tries ``configs_of`` of gemm/per_tile/select.py.
        min_ranks: the fewest ranks with which it is considered.
    """

    schedule: str
    options: tuple[tuple[str, Any], ...] = ()
    execution: ExecutionMode = "multi_kernel"
    min_ranks: int = 1

    def plan(self, problem: GemmProblem, world_size: int, ranks_per_host: int | None = None) -> Plan:
        """The plan of a problem. Raises ValueError as :func:`distgemm.make_plan`."""
        return TunedConfig("plan", self.schedule, self.options).plan(problem, world_size, ranks_per_host)

    def __str__(self) -> str:
        return " ".join([self.schedule, *(f"{name}={value}" for name, value in self.options)])


REGISTERED: dict[Pattern, list[Candidate]] = {}


def register_candidate(
    pattern: Pattern,
    schedule: str,
    *,
    execution: ExecutionMode = "multi_kernel",
    min_ranks: int = 1,
    **options: int | str,
) -> None:
    """Let ``schedule="auto"`` consider a schedule, such as one of your own, for a pattern.

    Every rank registers the same candidates. Configurations that are recorded already stay as they are: ``distgemm
    tune`` measures them again.

    Args:
        pattern: what the schedule does, as "ag+gemm". If its plan does something else,
            :func:`shortlist` and ``schedule="auto"`` raise ValueError.
        schedule: name of a registered schedule on one axis of ranks.
        execution: how the GEMMs are executed, as in :class:`Candidate`.
        min_ranks: the fewest ranks with which it is considered.
        **options: options of the schedule, and ``workspace``, ``mechanism`` and ``send_slots`` of
            :func:`distgemm.make_plan`.

    Raises:
        ValueError: for an unknown pattern, schedule, option or execution, for a schedule that needs a mesh, and for a
            candidate that is registered already.
    """
    TunedConfig("plan", schedule, execution=ExecutionConfig(execution=execution))
    known = (*schedule_options(schedule), *PLAN_OPTIONS)
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"candidate {schedule} has the options {', '.join(known)}, got {name!r}")
        if not isinstance(value, (int, str)):
            raise ValueError(f"candidate {schedule}: {name} is an integer or a string, got {value!r}")
    if schedule_mesh_rank(schedule) != 1:
        raise ValueError(f"a candidate has one axis of ranks, and schedule {schedule} takes a mesh")
    fewest = integer("min_ranks", min_ranks)
    candidate = Candidate(schedule, tuple(sorted(options.items())), execution, fewest)
    registered = REGISTERED.setdefault(check_pattern(pattern), [])
    if candidate in registered:
        raise ValueError(f"{candidate} is a candidate for {pattern} already")
    registered.append(candidate)
    forget_predictions()


def list_candidates(pattern: Pattern) -> tuple[Candidate, ...]:
    """The candidates of a pattern, in the order in which they were registered.

    Raises:
        ValueError: for an unknown pattern.
    """
    return tuple(REGISTERED[check_pattern(pattern)])


def candidates_across(pattern: Pattern) -> list[Candidate]:
    """What "auto" considers on several hosts: the candidates, each nested in itself, across hosts and inside each host.

    Flat and one-shot schedules send more bytes across hosts. Candidates of "per_tile", with another mechanism than
    "push", or with options that nested schedules lack, stay within a host.
    """
    return [
        replace(each, schedule=NESTED, options=(("across", each.schedule), *each.options, ("inside", each.schedule)))
        for each in list_candidates(pattern)
        if each.execution == "multi_kernel" and each.schedule != ONE_SHOT and dict(each.options).keys() <= {"chunks"}
    ]


NESTED = "tensor_parallel_2d_nested"
"""The schedule across hosts."""
GATHER = "all_gather_1d_tiling_cd_rotating_a"
REDUCTIONS: dict[Pattern, tuple[str, str]] = {
    "gemm+rs": ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"),
    "gemm+ar": ("all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"),
}
"""Of each pattern that adds over ranks: the chain around the ring, and pairwise sums."""
BY_COLUMNS = "all_reduce_1d_tiling_b_rotating_c"
"""An all-reduce whose reducers own columns of D. Its per-tile kernels read B once: they are for few rows."""
ALL_TO_ALLS: dict[Pattern, str] = {"gemm+a2a": "all_to_all_1d_rotating_d", "a2a+gemm": "all_to_all_1d_rotating_a"}
"""Of each pattern that exchanges rows and columns."""
ONE_SHOT = "all_reduce_1d_one_shot_a"
"""The all-reduce of one hop, for few tokens."""
ONE_SHOT_ROWS = 128
"""The most rows of a one-shot all-reduce by a per-tile kernel. With 512 rows on two H200s it took 1.2 times as long as
pairwise sums, and with 8192 1.6 times; the model predicts less."""


def _register_defaults() -> None:
    for chunks in (1, 2, 4):
        register_candidate("ag+gemm", GATHER, chunks=chunks)
    for pattern, (chain, pairwise) in REDUCTIONS.items():
        register_candidate(pattern, pairwise, chunks=1)
        register_candidate(pattern, pairwise, chunks=1, mechanism="store")
        register_candidate(pattern, pairwise, chunks=2)
        register_candidate(pattern, chain, chunks=2)
        register_candidate(pattern, chain, chunks=2, mechanism="store")
        register_candidate(pattern, chain, chunks=4)
    for pattern, schedule in ALL_TO_ALLS.items():
        for chunks in (1, 2):
            register_candidate(pattern, schedule, chunks=chunks)
    per_tile: dict[Pattern, str] = {"ag+gemm": GATHER, **{name: sums for name, (_, sums) in REDUCTIONS.items()}}
    for pattern, schedule in (per_tile | ALL_TO_ALLS).items():
        register_candidate(pattern, schedule, execution="per_tile", min_ranks=2)
    register_candidate("gemm+ar", BY_COLUMNS, execution="per_tile", min_ranks=2)
    register_candidate("gemm+ar", ONE_SHOT, execution="per_tile", min_ranks=2)
    register_candidate("gemm+ar", ONE_SHOT, min_ranks=2, chunks=1)
    register_candidate("gemm+ar", ONE_SHOT, min_ranks=2, chunks=2, chunk_mode="n")


# --- predictions --------------------------------------------------------------------------------------------


def shortlist(
    problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None
) -> list[TunedConfig]:
    """The configurations that are worth measuring: plans by predicted time, then the unfused programs.

    A plan is left out if its predicted time is more than ``SLOWDOWN_LIMIT`` times that of the best plan with the
    same execution, if no provider computes its GEMMs, or if its schedule refuses the problem or the number of ranks.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        ValueError: for an unknown pattern, and for a registered candidate whose plan does something else.
    """
    times = predictions(problem, check_pattern(pattern), world_size, ranks_per_host)
    plans = sorted((config for config in times if config.method == "plan"), key=lambda config: times[config])
    best: dict[ExecutionMode, float] = {}
    for config in plans:
        best.setdefault(config.execution.execution, times[config])
    kept = [
        config
        for config in plans
        if times[config] <= SLOWDOWN_LIMIT[config.execution.execution] * best[config.execution.execution]
    ]
    return kept + [config for config in times if config.method == "unfused"]


def predicted(
    problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None
) -> TunedConfig:
    """The configuration that the cost model predicts to be fastest.

    If a plan and the unfused program have the same predicted time, the unfused program is taken; if two providers have,
    the default one if it computes the plan.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        world_size: number of ranks.
        ranks_per_host: number of ranks that share memory; None: all.

    Raises:
        ValueError: if no candidate computes the problem, for an unknown pattern, and for a registered candidate whose
            plan does something else.
    """
    times = predictions(problem, check_pattern(pattern), world_size, ranks_per_host)
    if not times:
        raise ValueError(f"nothing multiplies {problem} for {pattern} on {world_size} ranks")
    best = min(times, key=lambda config: (times[config], config.method != "unfused"))
    return replace(best, source="predicted")


def forget_predictions() -> None:
    """Predict anew, after candidates have been registered."""
    predictions.cache_clear()


@lru_cache(maxsize=256)
def predictions(
    problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None
) -> dict[TunedConfig, float]:
    """Predicted us of every configuration: the plans with a kernel for each GEMM, the unfused programs, and the
    per-tile kernels, which stay within a host."""
    machine = replace(Machine.load(MACHINE), ranks_per_host=ranks_per_host)
    times = {config: time() for config, time in _multi_kernel(problem, pattern, world_size, machine)}
    # It multiplies scaled operands on CPUs only.
    if pattern in PATTERNS and unfused_status(problem, pattern) and problem.scaling is None:
        for collective in COLLECTIVES if ranks_per_host is None else COLLECTIVES[:1]:  # others are within a host
            if collective_status(problem, pattern, collective, world_size):
                time = predict_unfused(problem, machine, pattern, world_size, collective)
                times[replace(UNFUSED, collective=collective)] = time
    return times | {config: time() for config, time in _per_tile(problem, pattern, world_size, machine)}


def list_plans(
    problem: GemmProblem, pattern: Pattern, world_size: int, ranks_per_host: int | None = None
) -> list[TunedConfig]:
    """Every configuration of :func:`predictions` that executes a plan, without its time."""
    machine = replace(Machine.load(MACHINE), ranks_per_host=ranks_per_host)
    return [
        config
        for kind in (_multi_kernel, _per_tile)
        for config, _ in kind(problem, check_pattern(pattern), world_size, machine)
    ]


def _plans(
    problem: GemmProblem, pattern: Pattern, world_size: int, machine: Machine, execution: ExecutionMode
) -> Iterator[tuple[Candidate, Plan]]:
    """The candidates with such an execution that take the problem and the number of ranks."""
    ranks_per_host = machine.ranks_per_host
    flat = ranks_per_host is None or problem.copies > 1  # nested schedules have no copies
    for candidate in list_candidates(pattern) if flat else candidates_across(pattern):
        if candidate.execution != execution or world_size < candidate.min_ranks:
            continue
        candidate = replace(candidate, options=options_for(problem, candidate.options))
        try:
            plan = candidate.plan(problem, world_size, ranks_per_host)
        except BuilderError:
            raise
        except PlanError as error:
            raise PlanError(f"candidate {candidate} for {pattern}: {error}") from error
        except ValueError as error:  # for example, the schedule takes only powers of two
            logger.info("no candidate for %s on %d ranks: %s: %s", pattern, world_size, candidate, error)
            continue
        if not does_pattern(plan, pattern, problem.copies):
            raise ValueError(
                f"candidate {candidate} does not do {pattern}: its plan begins or ends with other shards; register it "
                "for the pattern that it does"
            )
        yield candidate, plan


def _multi_kernel(
    problem: GemmProblem, pattern: Pattern, world_size: int, machine: Machine
) -> Iterator[tuple[TunedConfig, Callable[[], float]]]:
    """Configurations with a kernel for each GEMM, and what predicts their us. The default provider comes first."""
    preferred = default_provider()
    for candidate, plan in _plans(problem, pattern, world_size, machine, "multi_kernel"):
        able = [name for name in sorted(providers(), key=lambda name: name != preferred) if _computes(name, plan)]
        most = max(sum(isinstance(op, Gemm) for op in plan.ops(rank)) for rank in range(world_size))
        for gemm_streams in (1, 2) if most > 1 and able else (1,):
            time = _prediction(plan, machine, gemm_streams)
            plain = ExecutionConfig(gemm_streams=gemm_streams)
            actions = lower(plan, 0, plain)
            waits: tuple[WaitBy, ...] = ("memory_op",)
            fewer = False
            if plan.ranks_per_host is None:  # across hosts, nothing else runs
                if world_size > 1 and on_one_stream(actions):
                    waits = ("memory_op", "kernel")
                fewer = len(lower(plan, 0, replace(plain, merge_copies=True))) < len(actions)
            for provider, wait_by, merge_copies in product(able, waits, (False, True) if fewer else (False,)):
                execution = replace(plain, provider=provider, wait_by=wait_by, merge_copies=merge_copies)
                yield TunedConfig("plan", candidate.schedule, candidate.options, execution), time


def _per_tile(
    problem: GemmProblem, pattern: Pattern, world_size: int, machine: Machine
) -> Iterator[tuple[TunedConfig, Callable[[], float]]]:
    """Configurations with per-tile kernels, and what predicts their us; none on GPUs that are not Hopper."""
    if providers()["cutlass"].arch != "90a":
        return
    costs = Costs(machine)
    for candidate, plan in _plans(problem, pattern, world_size, machine, "per_tile"):
        for name in configs_of(plan):
            if not (status := per_tile_status(plan, name)):
                logger.info("no candidate for %s on %d ranks: %s", pattern, world_size, status.reason)
                continue
            gemm = gemm_of(plan, name)
            if gemm.by_columns and gemm.m > gemm.ranks * SHORT_M:
                continue  # a shard of rows has most of a cluster's rows, and B is read as often
            if gemm.traits.one_shot and gemm.m > ONE_SHOT_ROWS:
                continue
            execution = ExecutionConfig(config=name, gemm_streams=1, execution="per_tile")
            time = cache(lambda gemm=gemm: predict_per_tile(gemm, costs).time)
            yield TunedConfig("plan", candidate.schedule, candidate.options, execution), time


def per_tile_status(plan: Plan, config: str | None) -> Status:
    """Whether a per-tile kernel executes a plan, whether rows or columns of B are contiguous; falsy with the reason."""
    try:
        gemm = [gemm_of(plan, config, turned_b=turned_b) for turned_b in (False, True)][-1]
    except (PlanError, ValueError) as error:
        return Status(str(error))
    if gemm.n * DTYPE_BYTES[plan.problem.dtype] % ROW_BYTES:
        return Status(
            f"{plan.schedule} is not executed per tile in backward passes: columns of B are multiples of {ROW_BYTES} "
            f"bytes, got {gemm.n} elements of {plan.problem.dtype}"
        )
    return Status()


def _prediction(plan: Plan, machine: Machine, gemm_streams: int) -> Callable[[], float]:
    """The predicted us of a plan, found when it is first asked for."""
    bias = STORES_BIAS if plan.mechanism == "store" else COPIES_BIAS
    return cache(lambda: simulate(plan, machine, gemm_streams=gemm_streams).time * bias)


def _computes(provider: str, plan: Plan) -> bool:
    """Whether a provider computes all GEMMs of a plan."""
    found = providers().get(provider)
    return found is not None and all(found.supports(spec) for spec in specs_of(plan))


@lru_cache(maxsize=1)
def providers() -> dict[str, Any]:
    """The providers of candidates by name. Without a GPU, they are those for Hopper."""
    return {
        "cutlass": CutlassProvider() if torch.cuda.is_available() else CutlassProvider("90a"),
        "cublas": CublasProvider(),
    }


def specs_of(plan: Plan) -> list[GemmSpec]:
    """The distinct GEMMs of all ranks for dense shards, without C and bias."""
    dtype = plan.problem.dtype

    def extents(view: View, dtype: str) -> tuple[Any, ...]:
        batches, rows, columns = box_extents(view.box)
        _, frame_rows, _ = box_extents(view.frame)
        between = frame_rows * view.pitch if batches > 1 else 0
        return dtype, rows, columns, batches, view.pitch, between, view.buffer == "slot"

    found: dict[tuple[Any, Any, Any, Any], None] = {}
    for op in (op for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)):
        partial = extents(op.sources[0], plan.dtype(op.sources[0])) if op.sources else None
        d = extents(op.out, plan.dtype(op.out))
        found[extents(op.a, dtype), extents(op.b, plan.problem.operand_dtype("B")), d, partial] = None

    def matrix(dtype: str, rows: int, columns: int, batches: int, pitch: int, between: int, padded: bool) -> MatrixSpec:
        return MatrixSpec(dtype, rows, columns, batches, stride=pitch, batch_stride=between, padded=padded)

    # Plans have thousands of ops and few distinct GEMMs, so specs are made last.
    return [
        GemmSpec(matrix(*a), matrix(*b), matrix(*d), partial=matrix(*partial) if partial else None)
        for a, b, d, partial in found
    ]


_register_defaults()
