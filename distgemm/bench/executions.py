"""What a comparison of executions measures: the configurations of each that are predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from distgemm.bench.cases import Case, Job
from distgemm.gemm import GemmSpec, MatrixSpec
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.select import gpu_name, select_config
from distgemm.tune.cache import CACHE, look_up
from distgemm.tune.candidates import predictions
from distgemm.tune.config import TunedConfig
from distgemm.tune.kernels import sources_of

__all__ = ["kernels_of", "of_each_execution"]


def of_each_execution(case: Case, count: int) -> Job:
    """The configurations of each execution that are predicted to be the fastest, and recorded ones.

    Configurations that differ only in streams, waits or merged copies count as one: the first of them is taken. Those
    that are recorded for this GPU, and those that the package has for others, are of the nearest number of rows.

    Args:
        case: what is measured.
        count: configurations of each execution.
    """
    times = predictions(case.problem, case.pattern, case.ranks)
    found: dict[tuple[object, ...], TunedConfig] = {}
    for config in sorted((config for config in times if config.method == "plan"), key=lambda config: times[config]):
        execution = config.execution
        if sum(each.execution.execution == execution.execution for each in found.values()) < count:
            key = config.schedule, config.options, execution.execution, execution.provider, execution.config
            found.setdefault(key, config)
    devices = dict.fromkeys([gpu_name(), *CACHE.shipped_devices()])
    recorded = [look_up(case.problem, case.pattern, case.ranks, device, inf) for device in devices]
    plans = [config for config in recorded if config is not None and config.method == "plan"]
    return Job(case, tuple(dict.fromkeys([*found.values(), *plans])))


def kernels_of(jobs: Sequence[Job]) -> Iterator[KernelSource]:
    """All kernels that a measurement of jobs needs, also CUTLASS's alone."""
    provider = CutlassProvider()
    for case, candidates in jobs:
        for rank in range(case.ranks):
            yield from sources_of(case.problem, case.pattern, case.ranks, candidates, rank=rank)
        m, n, k = case.local
        spec = GemmSpec(MatrixSpec(case.dtype, m, k), MatrixSpec(case.dtype, n, k), MatrixSpec(case.dtype, m, n))
        yield kernel_source(spec, select_config(provider, spec), provider.arch)
