"""Measures the shortlist of a GEMM on the GPUs and takes the fastest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distgemm.gemm import GemmSpec, GemmTensors, MatrixSpec, forget_kernels
from distgemm.gemm import select as gemm_select
from distgemm.gemm.cache import Entries
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource, build_together, is_there, stop_compilers, wait_for
from distgemm.gemm.spec import SCALE_BLOCK, Status
from distgemm.measure.operation import Operation, WrongResultError, executable_method
from distgemm.measure.timing import attempt, sample
from distgemm.plan.problem import QUANTIZED_DTYPES, GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES, Group, resolve_group
from distgemm.runtime.executable import Executable
from distgemm.runtime.groups import ranks_per_host
from distgemm.schedulers import Pattern
from distgemm.tune import gemm as gemm_tuning
from distgemm.tune import ranks
from distgemm.tune.cache import CACHE, gpu_name, key_of
from distgemm.tune.candidates import shortlist, specs_of
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.kernels import sources_of
from distgemm.tune.ranks import device_of, from_all, from_first, refuse_capture

__all__ = [
    "Tuned",
    "entry_of",
    "fastest_of",
    "finalists",
    "measurable",
    "random_tensors",
    "search",
    "tune",
    "with_fallback",
]

MIN_SPEEDUP = 0.02
"""A plan is taken if it saves this share of the unfused program's time: two runs of one program differ by as much."""
FINALISTS = 4
"""Number of the fastest configurations that are measured again."""
FINALS: dict[str, Any] = {"rounds": 9, "burst_ms": 4.0, "rest": 1.0}
"""Settings of the second measurement, with pauses as between the GEMMs of a model. Without pauses a GPU throttles, and
the configuration that takes the least power is the fastest."""
ALIGNED = 8
"""Number of elements that is a multiple of 16 bytes in all types that are measured."""

logger = logging.getLogger("distgemm")


@dataclass(frozen=True)
class Tuned:
    """The result of a measurement.

    Attributes:
        config: the fastest configuration.
        times: ms on the slowest rank of each configuration that was measured, by its text.
        refused: reason for each configuration that could not be compiled or measured, by its text.
        path: the file that ``config`` was written to; None if it was not written.
    """

    config: TunedConfig
    times: dict[str, float]
    refused: dict[str, str]
    path: Path | None

    @property
    def ms(self) -> float:
        """The time of ``config``."""
        return self.times[str(self.config)]

    @property
    def unfused_ms(self) -> float | None:
        """The time of the unfused program with NCCL; None if it was not measured."""
        return self.times.get(str(UNFUSED))


def measurable(problem: GemmProblem) -> Status:
    """Whether :func:`tune` can measure a problem; falsy with the reason."""
    if problem.l > 1:
        return Status(f"batches are not measured: l is 1, got {problem.l}")
    if problem.dtype in QUANTIZED_DTYPES:
        return Status("fp8 is not measured: there is no unfused program to check the results against")
    if problem.n_per_rank is not None or problem.k_per_rank is not None:
        return Status("columns are measured only where all ranks have as many, and different ones")
    return Status()


def tune(
    problem: GemmProblem,
    pattern: Pattern,
    group: Group | None = None,
    *,
    device: torch.device | str | int | None = None,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Tuned:
    """Measure the configurations of :func:`distgemm.tune.shortlist` as CUDA graphs, and take the fastest.

    A collective call. All inputs are drawn at random. Extents that the number of ranks does not divide are rounded up.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do, as "ag+gemm".
        group: the ranks that take part, also a mesh of hosts; None: all.
        device: this rank's GPU; None: the current one. CPUs are not measured.
        write: whether rank 0 records the configuration in its cache folder.
        kernels: whether tiles are measured first for the GEMMs that have no recorded tiles. The GEMMs are spread over
            the ranks, and their tiles are recorded. Compiles several kernels for each GEMM.
        progress: called on every rank with a line about each step.

    Raises:
        ValueError: for a problem that is not :func:`measurable`, for a device that is no GPU, and for a broken file in
            the cache folder.
        RuntimeError: if no configuration can be measured, and while the current stream is captured.
        WrongResultError: if a configuration computes a wrong result.
    """
    whole, at = resolve_group(group), device_of(device)
    refuse_capture(problem, pattern, whole.size(), at, ranks_per_host(whole))
    return search(problem, pattern, whole, at, write=write, kernels=kernels, progress=progress)


def search(
    problem: GemmProblem,
    pattern: Pattern,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
    must_write: bool = True,
) -> Tuned:
    """:func:`tune` for a given group and device.

    With ``must_write=False``, a file that cannot be written is a warning and not an error.
    """
    if not (status := measurable(problem)):
        raise ValueError(status.reason)
    check_gpu(device)
    report = progress or (lambda line: None)
    size = group.size()
    on = size, ranks_per_host(group)
    key = key_of(problem, pattern, *on)
    whole = round_up(problem, pattern, size)

    def check_file() -> None:
        CACHE.read(gpu_name(device))
        if must_write:
            CACHE.record(gpu_name(device), {})

    if write:  # finds a file that is broken or cannot be written before anything is measured
        from_first(group, device, check_file)
    tried = from_first(group, device, lambda: shortlist(whole, pattern, *on))
    if kernels:
        _tune_gemms(whole, tried, group, device, report)
    operation, failed = attempt(group, device, lambda: Operation(whole, pattern, group, device))
    if operation is None:
        raise RuntimeError(f"{key} cannot be measured: {failed.error}")
    trial = _Trial(operation, report)
    ran = trial.run(tried)
    again = finalists(ran)
    if len(again) > 1:  # clocks vary by more than the fastest configurations differ
        ran = trial.run(again, **FINALS)
    times = trial.times
    fastest = with_fallback(fastest_of(ran, times), tried, times)

    def record() -> tuple[TunedConfig, dict[str, float], Path | None]:
        if not write:
            return fastest, times, None
        try:
            return fastest, times, CACHE.record(gpu_name(device), {key: entry_of(fastest, times)})
        except OSError as error:
            if must_write:
                raise
            logger.warning("%s was measured, and cannot be recorded: %s", key, error)
            return fastest, times, None

    config, times, path = from_first(group, device, record)
    logger.info("%s: %s, %.4f ms; tried %s", key, config, times[str(config)], times)
    return Tuned(replace(config, source="measured"), times, trial.refused, path)


def check_gpu(device: torch.device) -> None:
    """Raise ValueError for a device that is no GPU."""
    if device.type != "cuda":
        raise ValueError(
            f"tuning measures on GPUs: device is a GPU of this rank, such as 'cuda:0', got {str(device)!r}; "
            "distgemm.tune.select(problem, pattern, group, tune=False) predicts without one"
        )


def entry_of(config: TunedConfig, times: Mapping[str, float]) -> dict[str, Any]:
    """What the cache records of a configuration, with its ms and those of the unfused program."""
    entry = config.to_dict() | {"ms": round(times[str(config)], 5)}
    return entry | ({"unfused_ms": round(times[str(UNFUSED)], 5)} if str(UNFUSED) in times else {})


def fastest_of(ran: Sequence[TunedConfig], times: Mapping[str, float]) -> TunedConfig:
    """The fastest configuration, or an unfused program that is slower by less than ``MIN_SPEEDUP``.

    Args:
        ran: the configurations that were measured, the fastest first.
        times: their ms, by their text.
    """
    unfused = [config for config in ran if config.method == "unfused"]
    for simpler in (UNFUSED, *unfused):  # NCCL's before the others
        if simpler in unfused and times[str(ran[0])] > (1 - MIN_SPEEDUP) * times[str(simpler)]:
            return simpler
    return ran[0]


def with_fallback(config: TunedConfig, others: Sequence[TunedConfig], times: Mapping[str, float]) -> TunedConfig:
    """A configuration; one with a per-tile kernel has the fastest of the others, which execute more, as ``fallback``.

    Args:
        config: the configuration.
        others: configurations. Those that were measured count.
        times: ms of the configurations that were measured, by their text.
    """
    measured = [one for one in others if str(one) in times and one.execution.execution == "multi_kernel"]
    if config.execution.execution != "per_tile" or not measured:
        return config
    best = fastest_of(sorted(measured, key=lambda one: times[str(one)]), times)
    return replace(config, fallback=replace(best, source="measured"))


@dataclass
class _Trial:
    """The measurements of one operation so far: ms by a configuration's text, and the reasons of those without."""

    operation: Operation
    report: Callable[[str], object]
    times: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    made: int = 0

    def run(self, wanted: list[TunedConfig], **settings: Any) -> list[TunedConfig]:
        """Measure configurations with settings of ``sample``. Returns those that ran, the fastest first.

        Those whose kernels are there on all ranks come first. The other kernels are compiled meanwhile, all at once.
        """
        operation = self.operation
        lacking = lacking_kernels(operation, wanted)
        later = [config for config in wanted if config in lacking]
        first = [config for config in wanted if config not in lacking]
        sources = list(dict.fromkeys(chain.from_iterable(lacking.values())))
        ran: list[TunedConfig] = []
        with compiling(sources, operation.group) as finish:
            if first:
                ran += self._measure(first, settings)
            if later:
                self.report(f"compiling {len(sources)} kernels")
                finish()
                ran += self._measure(later, settings)
        if not ran:
            what = "measured" if self.made else "compiled"
            raise RuntimeError(f"no candidate for {self._key} can be {what}: {self.refused}")
        return sorted(ran, key=lambda config: self.times[str(config)])

    def _measure(self, wanted: list[TunedConfig], settings: dict[str, Any]) -> list[TunedConfig]:
        operation = self.operation
        executables, failures = _executables(operation, wanted, self.report)
        self.refused |= failures
        self.made += len(executables)
        if not executables:
            return []
        self.report(f"measuring {len(executables)} candidates")
        methods, failed = attempt(
            operation.group,
            operation.device,
            lambda: [executable_method(operation, str(config), exe) for config, exe in executables.items()],
        )
        if methods is None:  # a rank has no memory for D
            self.refused |= dict.fromkeys(map(str, executables), failed.error)
            for exe in executables.values():
                exe.release()
            return []
        try:
            samples = sample(operation, methods, **settings)
        finally:
            for method in methods:
                method.release()
        for name, each in samples.items():
            if each.wrong:
                raise WrongResultError(f"{name}: {each.error}")
            if each.error:
                self.refused[name] = each.error
                logger.warning("not measured: %s: %s", name, each.error)
            else:
                self.times[name] = each.ms
        return [config for config in executables if str(config) in samples and not samples[str(config)].error]

    @property
    def _key(self) -> str:
        group = self.operation.group
        return key_of(self.operation.problem, self.operation.pattern, group.size(), ranks_per_host(group))


def finalists(ran: Sequence[TunedConfig]) -> list[TunedConfig]:
    """The configurations that are measured a second time: the fastest ones, and the unfused program.

    Args:
        ran: the configurations that were measured, the fastest first.
    """
    return list(dict.fromkeys([*ran[:FINALISTS], *(config for config in ran if config == UNFUSED)]))


def round_up(problem: GemmProblem, pattern: Pattern, world_size: int) -> GemmProblem:
    """The problem with equal shards: the extents that are split are rounded up.

    Shards that TMA can read stay so.
    """

    def rounded(extent: int) -> int:
        unit = world_size if extent % ALIGNED else world_size * ALIGNED
        return -(-extent // unit) * unit

    m = -(-problem.m // world_size) * world_size
    if pattern in {"ag+gemm", "gemm+a2a"}:
        return replace(problem, m=m, n=rounded(problem.n), m_per_rank=None)
    return replace(problem, m=m, k=rounded(problem.k), m_per_rank=None)


def has_kernels(device: torch.device) -> bool:
    """Whether the executables on a device have kernels that are compiled."""
    return device.type == "cuda"


def lacking_kernels(operation: Operation, wanted: Sequence[TunedConfig]) -> dict[TunedConfig, list[KernelSource]]:
    """The configurations with kernels that some rank still lacks, and those that this rank lacks. A collective call."""
    if not has_kernels(operation.device):
        return {}
    rank, size = dist.get_rank(operation.group), operation.group.size()
    terms: dict[str, Any] = {"rank": rank, "ranks_per_host": ranks_per_host(operation.group)}

    def lacks(config: TunedConfig) -> list[KernelSource]:
        try:
            sources = sources_of(operation.problem, operation.pattern, size, [config], **terms)
        except ValueError:  # whoever makes its executable says why
            return []
        return [source for source in sources if not is_there(source)]

    mine: dict[TunedConfig, list[KernelSource]] = {}

    def lacking() -> list[TunedConfig]:
        mine.update((config, lacks(config)) for config in wanted)
        return [config for config, sources in mine.items() if sources]

    every = from_all(operation.group, lacking)
    return {config: mine[config] for config in wanted if any(config in theirs for theirs in every)}


@contextlib.contextmanager
def compiling(sources: Sequence[KernelSource], group: dist.ProcessGroup) -> Iterator[Callable[[], object]]:
    """Compile on all ranks of a machine at once, in the background, inside the ``with`` block.

    A core stays free for each rank. Yields a function that waits for the end. It raises nothing: whoever needs a
    kernel that cannot be compiled gets the error.
    """
    rank, size = dist.get_rank(group), group.size()
    with ThreadPoolExecutor(1) as pool:
        compiled = [pool.submit(build_together, sources, rank, size, background=True)] if sources else []
        try:
            yield lambda: wait_for(compiled)
        except KeyboardInterrupt:
            stop_compilers(compiled)
            raise


def _executables(
    operation: Operation, tried: list[TunedConfig], report: Callable[[str], object]
) -> tuple[dict[TunedConfig, Executable], dict[str, str]]:
    """Executables of configurations, and the reasons of those without one. All ranks get the same configurations."""
    made: dict[TunedConfig, Executable] = {}
    refused: dict[str, str] = {}
    problem, pattern, group, device = operation.problem, operation.pattern, operation.group, operation.device
    # The largest workspace comes first, so that all others fit into it.
    for config in sorted(tried, key=lambda config: _workspace_bytes(problem, config, group), reverse=True):
        report(f"compiling {config}")
        try:
            made[config] = ranks.make(problem, pattern, config, group, device)
        except Exception as error:  # any error: every rank raises if one rank does
            refused[str(config)] = str(error)
            logger.warning("not measured: %s: %s", config, error)
    return made, refused


def _workspace_bytes(problem: GemmProblem, config: TunedConfig, group: dist.ProcessGroup) -> int:
    if config.method == "unfused":
        return 0
    plan = config.plan(problem, group.size(), ranks_per_host(group))
    return max(map(plan.workspace_bytes, range(plan.world_size)))


def _tune_gemms(
    problem: GemmProblem,
    tried: list[TunedConfig],
    group: dist.ProcessGroup,
    device: torch.device,
    report: Callable[[str], object],
) -> None:
    """Measure tiles for the CUTLASS GEMMs that have no recorded ones, each on one rank, and record them on all."""
    rank, size = dist.get_rank(group), group.size()
    known = from_first(group, device, lambda: set(gemm_select.CACHE.read(gpu_name(device))))
    wanted: dict[str, tuple[GemmSpec, int]] = {}
    for config in tried:
        execution = config.execution
        if config.method == "plan" and execution.provider == "cutlass" and execution.execution != "per_tile":
            plan = config.plan(problem, size, ranks_per_host(group))
            for spec in specs_of(plan):
                key = gemm_select.key_of(spec, execution.gemm_streams)
                if key not in known:
                    wanted.setdefault(key, (spec, execution.gemm_streams))

    def measured() -> Entries:
        report(f"compiling kernels for {len(wanted)} GEMMs")
        provider = CutlassProvider()

        def tiles_of(spec: GemmSpec, streams: int) -> list[KernelSource]:
            tiles = gemm_tuning.candidates(provider, spec, streams)
            return [kernel_source(spec, tile, provider.arch) for tile in tiles]

        sources = chain.from_iterable(tiles_of(*each) for each in wanted.values())
        entries: Entries = {}
        mine = list(wanted.items())[rank::size]
        ready = [key for key, each in mine if all(map(is_there, tiles_of(*each)))]
        with compiling(list(dict.fromkeys(sources)), group) as finish:
            for key, (spec, streams) in sorted(mine, key=lambda each: each[0] not in ready):
                if key not in ready:
                    finish()
                report(f"measuring GEMM {key}")
                best = gemm_tuning.tune(random_tensors(spec, device), streams=streams, write=False)
                entries[key] = {"config": str(best.config), "ms": round(best.ms, 5)}
        return entries

    if not wanted:
        return
    every = {key: entry for entries in from_all(group, measured) for key, entry in entries.items()}
    from_all(group, lambda: gemm_select.CACHE.record(gpu_name(device), every))
    forget_kernels()  # so that this process uses the new tiles


def random_tensors(spec: GemmSpec, device: torch.device) -> GemmTensors:
    """Random tensors of a GEMM without batches.

    Scales of blocks are 1. Those of tensors and rows are left out, because they need no other kernel.
    """

    def drawn(matrix: MatrixSpec) -> torch.Tensor:
        whole = torch.randn(matrix.rows, matrix.stride, device=device).to(TORCH_DTYPES[matrix.dtype])
        return whole[:, : matrix.columns]

    partial = None if spec.partial is None else drawn(spec.partial)
    dtype = "tfloat32" if spec.a.dtype == "tfloat32" else None
    a, b, d = map(drawn, (spec.a, spec.b, spec.d))
    scales: dict[str, Any] = {}
    if spec.block_rows_a:
        block_rows = spec.block_rows_a, spec.block_rows_b
        scale_a, scale_b = (
            torch.ones(-(-extent // rows), -(-spec.k // SCALE_BLOCK), device=device)
            for extent, rows in zip((spec.m, spec.n), block_rows, strict=True)
        )
        scales = {"scale_a": scale_a, "scale_b": scale_b, "block_rows": block_rows}
    return GemmTensors(a, b, d, partial=partial, dtype=dtype, padded=spec.d.padded, **scales)
