"""The candidates measured against each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distgemm.gemm import GemmSpec, MatrixSpec
from distgemm.gemm.cache import Entries
from distgemm.gemm.fused.gemms import combined_spec
from distgemm.gemm.fused.kernel import pingpong_first
from distgemm.gemm.spec import Status
from distgemm.measure import timing as bench
from distgemm.plan.ops import Gemm
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES, resolve_group
from distgemm.schedulers import Pattern
from distgemm.tune import ranks
from distgemm.tune.cache import CACHE, gpu_name, key_of, look_up
from distgemm.tune.candidates import candidates, providers, specs_of
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.ranks import device_of, from_all, from_first, refuse_capture

__all__ = ["Tuned", "finalists", "measurable", "measure", "tune"]

MIN_SPEEDUP = 0.02
"""Share of an unfused program's time by which a plan has to be faster: what two runs of one thing differ by."""
FINALISTS = 4
FINALS = {"rounds": 9, "burst_ms": 4.0, "rest": 1.0}
"""So many of the fastest are measured again, so often, with pauses as between a model's products: products in a row
throttle a GPU, and then the one that takes the least power wins."""
KERNEL_SLOWDOWN_LIMIT, KERNELS = 1.25, 6
"""Of plans whose GEMMs are one kernel, the best of each way to move things is measured with so many configurations,
where it takes at most this factor longer than the fastest."""
TRANSPORT_SLOWDOWN_LIMIT = 1.05
"""The second of a way, too, with half as many, where it takes at most this factor longer than the first: with tiles
chosen by shape the best of all may be behind."""

ALIGNED = 8
"""Elements that are a multiple of 16 bytes, in all types that are measured."""

logger = logging.getLogger("distgemm")


@dataclass(frozen=True)
class Tuned:
    """What a measurement found.

    config:  the fastest
    times:   ms of all that were measured, by their text; of the slowest rank
    refused: candidates that could not be compiled or measured, with the reason
    path:    the file that the config was written to; None: to none
    """

    config: TunedConfig
    times: dict[str, float]
    refused: dict[str, str]
    path: Path | None

    @property
    def ms(self) -> float:
        """Of the config."""
        return self.times[str(self.config)]

    @property
    def unfused_ms(self) -> float | None:
        """Of the unfused program; None where it was not measured."""
        return self.times.get(str(UNFUSED))


def measurable(problem: GemmProblem) -> Status:
    """Whether :func:`tune` can measure such products; falsy with the reason where it cannot."""
    if problem.l > 1:
        return Status(f"single products are measured, not l = {problem.l} of them")
    if problem.dtype == "float8_e4m3fn":
        return Status("products of fp8 are not measured: they have no unfused program to be checked against")
    return Status()


def tune(
    problem: GemmProblem,
    pattern: Pattern,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Tuned:
    """Measures the :func:`candidates` against each other, in graphs, and takes the fastest. A collective call.

    write:    whether rank 0 records the config
    kernels:  whether configurations of the plans' GEMMs that have no measured one are measured before
              (:func:`distgemm.tune.gemm.tune`), spread over the ranks, and recorded; compiles several kernels for each
              kind of GEMM
    progress: is told, on every rank, what is being done

    Extents are measured as they are, rounded up to multiples of the number of ranks; all operands are drawn anew.
    Raises ValueError for products that :func:`measurable` says cannot be measured; RuntimeError where no candidate is
    left, or where one computes something wrong (:class:`distgemm.measure.timing.WrongResultError`).
    """
    whole, at = resolve_group(group), device_of(device)
    refuse_capture(problem, pattern, whole.size(), at)
    return measure(problem, pattern, whole, at, write, kernels, progress)


def measure(
    problem: GemmProblem,
    pattern: Pattern,
    group: dist.ProcessGroup,
    device: torch.device,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
    must_write: bool = True,
) -> Tuned:
    """What :func:`tune` does, for a group and a device that are known.

    must_write: whether a file that cannot be written is an error; else it is logged
    """
    if not (status := measurable(problem)):
        raise ValueError(status.reason)
    say = progress or (lambda text: None)
    size = group.size()
    whole = _divisible(problem, pattern, size)
    if write:  # a file that is broken is found before anything is measured
        from_first(group, device, lambda: look_up(problem, pattern, size, gpu_name(device)))
    tried = from_first(group, device, lambda: candidates(whole, pattern, size))
    if kernels:
        _tune_gemms(whole, tried, group, device, say)
    operation, failed = bench.attempt(group, device, lambda: bench.Operation(whole, pattern, group, device))
    if operation is None:
        raise RuntimeError(f"{key_of(problem, pattern, size)} cannot be measured: {failed.error}")
    trial = _Trial(operation, say)
    ran = trial.run(tried)
    again = from_first(group, device, lambda: finalists(whole, pattern, size, ran, trial.times))
    if len(again) > 1:
        # What differs by less than clocks do in the first run is told apart by one more.
        ran = trial.run(again, **FINALS)
    times = trial.times
    fastest = _clearly_fastest(ran, times)
    if fastest.execution.single_kernel:
        others = [config for config in tried if not config.execution.single_kernel and str(config) in times]
        others.sort(key=lambda config: times[str(config)])
        if others:
            fastest = replace(fastest, fallback=replace(_clearly_fastest(others, times), source="measured"))

    def settle() -> tuple[TunedConfig, dict[str, float], Path | None]:
        if not write:
            return fastest, times, None
        entry = fastest.to_dict() | {"ms": round(times[str(fastest)], 5)}
        if str(UNFUSED) in times:
            entry["unfused_ms"] = round(times[str(UNFUSED)], 5)
        try:
            path = CACHE.record(gpu_name(device), {key_of(problem, pattern, size): entry})
        except OSError as error:
            if must_write:
                raise
            logger.warning("%s was measured, and cannot be recorded: %s", key_of(problem, pattern, size), error)
            path = None
        return fastest, times, path

    config, times, path = from_first(group, device, settle)
    logger.info("%s: %s, %.4f ms; tried %s", key_of(problem, pattern, size), config, times[str(config)], times)
    return Tuned(replace(config, source="measured"), times, trial.refused, path)


def _clearly_fastest(ran: Sequence[TunedConfig], times: Mapping[str, float]) -> TunedConfig:
    """The first of what ran, the fastest; or, where that is hardly faster, an unfused program: NCCL's, if that is as
    fast."""
    unfused = [config for config in ran if config.method == "unfused"]
    for simpler in (UNFUSED, *unfused):
        if simpler in unfused and times[str(ran[0])] > (1 - MIN_SPEEDUP) * times[str(simpler)]:
            return simpler
    return ran[0]


@dataclass
class _Trial:
    """What has been measured of one operation so far: ms by a config's text, and why others have none."""

    operation: bench.Operation
    say: Callable[[str], object]
    times: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def run(self, wanted: list[TunedConfig], **how: Any) -> list[TunedConfig]:
        """Those of them that ran, the fastest first. ``how`` is what :func:`distgemm.measure.timing.sample` takes."""
        operation = self.operation
        made, failures = _executables(operation, wanted, self.say)
        self.refused |= failures
        if not made:
            raise RuntimeError(f"no candidate for {self._key} can be compiled: {self.refused}")
        self.say(f"measuring {len(made)} candidates")
        methods = [bench.executable_method(operation, str(config), exe) for config, exe in made.items()]
        try:
            samples = bench.sample(operation, methods, **how)
        finally:
            for method in methods:
                method.release()
        for name, one in samples.items():
            if one.wrong:
                raise bench.WrongResultError(f"{name}: {one.error}")
            if one.error:
                self.refused[name] = one.error
                logger.warning("not measured: %s: %s", name, one.error)
            else:
                self.times[name] = one.ms
        ran = [config for config in made if str(config) in samples and not samples[str(config)].error]
        if not ran:
            raise RuntimeError(f"no candidate for {self._key} can be measured: {self.refused}")
        return sorted(ran, key=lambda config: self.times[str(config)])

    @property
    def _key(self) -> str:
        return key_of(self.operation.problem, self.operation.pattern, self.operation.group.size())


def finalists(
    problem: GemmProblem, pattern: Pattern, world_size: int, ran: Sequence[TunedConfig], times: Mapping[str, float]
) -> list[TunedConfig]:
    """The fastest, the unfused program, and the fastest plans by one kernel with other configurations of it, where that
    may become the fastest of all. No other measurement done_flags which of them is best at waiting, or at sending."""
    found = [*ran[:FINALISTS], *(config for config in ran if config == UNFUSED)]
    by_way: dict[tuple[Any, ...], list[TunedConfig]] = {}
    for config in ran:
        if config.execution.single_kernel and times[str(config)] <= KERNEL_SLOWDOWN_LIMIT * times[str(ran[0])]:
            way = config.schedule, config.execution.transport, config.option("mechanism")
            by_way.setdefault(way, []).append(config)
    for best, *others in by_way.values():
        second = [one for one in others[:1] if times[str(one)] <= TRANSPORT_SLOWDOWN_LIMIT * times[str(best)]]
        for one, most in zip([best, *second], (KERNELS, KERNELS // 2), strict=False):
            found += [one, *_in_other_tiles(one.plan(problem, world_size), one, pattern)[:most]]
    return list(dict.fromkeys(found))


def _in_other_tiles(plan: Plan, config: TunedConfig, pattern: Pattern) -> list[TunedConfig]:
    """One with each configuration of its kernel, by what multiplies everything fastest, and what multiplies a chunk
    fastest: the rest once the last one has come."""
    from distgemm.gemm.select import order

    chunk = _chunk(plan)
    configs = providers()["cutlass"].configs(chunk)
    best = [order(chunk, configs, count=number) for number in (_count(plan), 1)]
    found = [config for config in chain.from_iterable(zip(*best, strict=True)) if config.kernel_schedule != "plain"]
    if config.option("mechanism") == "store":
        found = pingpong_first(found)
    if _delivers(config, pattern):
        found = [config for config in found if config.kernel_schedule == "pingpong"]
    executions = (replace(config.execution, config=str(config)) for config in dict.fromkeys(found))
    return [replace(config, execution=execution) for execution in executions]


def _delivers(config: TunedConfig, pattern: Pattern) -> bool:
    """Whether a kernel copies results. Beside its buffers the largest tiles (128x256, 256x128, 256x192) are left two
    stages, with which 128x256 took 1.5 times as long as with copies by engines; 128x192, with three, was slower than
    pingpong tiles, too."""
    return pattern == "gemm+ar" and config.execution.transport == "sm"


def _whole(plan: Plan) -> GemmSpec:
    """A product as large as all of rank 0's, as if they differed in A."""
    return combined_spec(_chunk(plan), _count(plan), "a")


def _count(plan: Plan) -> int:
    """How many products rank 0 computes."""
    return sum(isinstance(op, Gemm) for op in plan.ops(0))


def _chunk(plan: Plan) -> GemmSpec:
    """One of the products, with a partial sum if there are any."""
    return max(specs_of(plan), key=lambda spec: spec.partial is not None)


def _divisible(problem: GemmProblem, pattern: Pattern, size: int) -> GemmProblem:
    """With equal shards: what is split rounded up, and nothing else. Where rows of shards would be aligned for TMA they
    still are."""

    def rounded(extent: int) -> int:
        unit = size if extent % ALIGNED else size * ALIGNED
        return -(-extent // unit) * unit

    m = -(-problem.m // size) * size
    if pattern == "ag+gemm":
        return replace(problem, m=m, n=rounded(problem.n), m_per_rank=None)
    return replace(problem, m=m, k=rounded(problem.k), m_per_rank=None)


def _executables(
    operation: bench.Operation, tried: list[TunedConfig], say: Callable[[str], object]
) -> tuple[dict[TunedConfig, Any], dict[str, str]]:
    """Executables of the candidates, and why some have none: the same on all ranks."""
    made: dict[TunedConfig, Any] = {}
    refused: dict[str, str] = {}
    problem, pattern, group, device = operation.problem, operation.pattern, operation.group, operation.device
    # The largest workspace first: all the others fit in.
    for config in sorted(tried, key=lambda config: _workspace_bytes(problem, config, group.size()), reverse=True):
        say(f"compiling {config}")
        try:
            made[config] = ranks.make(problem, pattern, config, group, device)
        except Exception as error:  # of whatever kind: the other ranks were told that this one cannot
            refused[str(config)] = str(error)
            logger.warning("not measured: %s: %s", config, error)
    return made, refused


def _workspace_bytes(problem: GemmProblem, config: TunedConfig, world_size: int) -> int:
    if config.method == "unfused":
        return 0
    plan = config.plan(problem, world_size)
    return max(map(plan.workspace_bytes, range(world_size)))


def _tune_gemms(
    problem: GemmProblem,
    tried: list[TunedConfig],
    group: dist.ProcessGroup,
    device: torch.device,
    say: Callable[[str], object],
) -> None:
    """Measures configurations for the CUTLASS GEMMs of these plans that have none, each on one rank, and records them
    where every rank finds them."""
    from distgemm import gemm
    from distgemm.gemm import select as gemm_select
    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.nvcc import build_together
    from distgemm.tune.gemm import candidates as configurations
    from distgemm.tune.gemm import tune as tune_gemm

    rank, size = dist.get_rank(group), group.size()
    known = from_first(group, device, lambda: set(gemm_select.CACHE.read(gpu_name(device))))
    wanted: dict[str, tuple[GemmSpec, int]] = {}
    for config in tried:
        how = config.execution
        if config.method == "plan" and how.provider == "cutlass":
            plan = config.plan(problem, group.size())
            for spec in [_whole(plan)] if config.execution.single_kernel else specs_of(plan):
                key = gemm_select.key_of(spec, how.gemm_streams)
                if key not in known:
                    wanted.setdefault(key, (spec, how.gemm_streams))

    def measured() -> Entries:
        say(f"compiling kernels for {len(wanted)} kinds of GEMMs")
        provider = CutlassProvider()
        every = [
            (spec, config) for spec, streams in wanted.values() for config in configurations(provider, spec, streams)
        ]
        sources = list(dict.fromkeys(kernel_source(spec, config, provider.arch) for spec, config in every))
        build_together(sources, rank, size)
        found: Entries = {}
        for key, (spec, streams) in list(wanted.items())[rank::size]:
            say(f"measuring GEMMs {key}")
            best = tune_gemm(_tensors(spec, device), streams=streams, write=False)
            found[key] = {"config": str(best.config), "ms": round(best.ms, 5)}
        return found

    if not wanted:
        return
    found = from_all(group, measured)
    every = {key: config for each in found for key, config in each.items()}
    from_all(group, lambda: gemm_select.CACHE.record(gpu_name(device), every))
    gemm.forget_kernels()  # so that this process takes the configs too


def _tensors(spec: GemmSpec, device: torch.device) -> Any:
    """Random ones of a GEMM without batches."""
    from distgemm.gemm import GemmTensors

    def drawn(matrix: MatrixSpec) -> torch.Tensor:
        whole = torch.randn(matrix.rows, matrix.stride, device=device).to(TORCH_DTYPES[matrix.dtype])
        return whole[:, : matrix.columns]

    partial = None if spec.partial is None else drawn(spec.partial)
    dtype = "tfloat32" if spec.a.dtype == "tfloat32" else None
    a, b, d = map(drawn, (spec.a, spec.b, spec.d))
    return GemmTensors(a, b, d, partial=partial, dtype=dtype, padded=spec.d.padded)
