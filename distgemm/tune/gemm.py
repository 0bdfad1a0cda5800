"""Measuring configurations on the GPU at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distgemm.gemm import GemmConfig, GemmSpec, GemmTensors, Kernel, forget_kernels, get_provider
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import build
from distgemm.gemm.select import CACHE, key_of
from distgemm.gemm.spec import RASTERS, SHARES
from distgemm.gemm.streams import new_stream
from distgemm.gemm.tensors import check_device, spec_of

__all__ = ["Measured", "alternate", "candidates", "time_graphs", "tune"]

BURST_MS = 4.0
PAIRS = 3
"""GEMMs on each stream, where they alternate."""
ORDERS = tuple((raster, swizzle) for raster in RASTERS[1:] for swizzle in (1, 2, 4, 8))


def time_graphs(launches: Sequence[Callable[[], object]], rounds: int = 5, burst_ms: float = BURST_MS) -> list[float]:
    """Milliseconds of each launch (a whole operation), the median over rounds.

    Each is captured into a graph as often as fills ``burst_ms``; the graphs are replayed in turn, round by round,
    so that all see the same clocks.
    """
    graphs = []
    for launch in launches:
        launch()
        torch.cuda.synchronize()
        once = _replay_ms(_capture(launch, 3), 3)
        graphs.append(_capture(launch, max(1, round(burst_ms / max(once, 1e-3)))))
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds + 1):
        for (graph, count), found in zip(graphs, times, strict=True):
            elapsed = _replay_ms((graph, count), count)
            if number:  # the first round warms up
                found.append(elapsed)
    return [statistics.median(found) for found in times]


def _capture(launch: Callable[[], object], count: int) -> tuple[torch.cuda.CUDAGraph, int]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    return graph, count


def _replay_ms(captured: tuple[torch.cuda.CUDAGraph, int], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    captured[0].replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def alternate(launches: Sequence[Callable[[int], object]], streams: Sequence[torch.cuda.Stream]) -> None:
    """Launches in turn on streams that begin and end with the current one."""
    here = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(here)
    for number, launch in enumerate(launches):
        launch(streams[number % len(streams)].cuda_stream)
    for stream in streams:
        here.wait_stream(stream)


@dataclass(frozen=True)
class Measured:
    """What a search found.

    config: the fastest; ms: its time; times: of all that were tried, by name; cublas_ms: of cuBLAS, None where it
            does not compute this
    """

    config: GemmConfig
    ms: float
    times: dict[str, float]
    cublas_ms: float | None


def candidates(provider: CutlassProvider, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
    """Configurations that are worth measuring, without orders of tiles; for several streams also those that leave SMs
    to the others. Raises ValueError where there are none."""
    configs = provider.configs(spec, streams)
    if not configs:
        raise ValueError(f"provider cutlass: {provider.supports(spec).reason}")
    # The one without TMA is for what the others cannot do.
    fast = [config for config in configs if config.kernel_schedule != "plain"]
    shared = [replace(config, share=streams) for config in fast] if streams in SHARES[1:] else []
    return fast + shared or configs


def _elsewhere(tensors: GemmTensors) -> GemmTensors:
    """Other A and D with the same strides: a kernel may depend on them."""
    a, d = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (tensors.a, tensors.d))
    return replace(tensors, a=a.copy_(tensors.a), d=d)


def tune(tensors: GemmTensors, streams: int = 1, finalists: int = 3, write: bool = True) -> Measured:
    """Searches the configurations for these tensors: all tiles in CUTLASS's own order, on two streams also with half of
    the SMs each, then the best few in all orders. Seconds, once the kernels are compiled. Overwrites D.

    streams:   2 to measure several such GEMMs that alternate on two streams, as the chunks of an operation do
    finalists: tiles that are tried in all orders
    write:     whether the choice is recorded for later

    Raises ValueError for tensors that no kernel multiplies or that are on no GPU.
    """
    check_device(tensors)
    provider = CutlassProvider()
    spec = spec_of(tensors)
    configs = candidates(provider, spec, streams)
    build([kernel_source(spec, config, provider.arch) for config in configs])

    cublas = get_provider("cublas")
    kernels: list[Kernel] = [cublas.compile(spec)] if cublas.supports(spec) else []
    # As chunks of one operation: B is the same, A and D are not.
    each = [tensors, *(_elsewhere(tensors) for _ in range(1, PAIRS * streams if streams > 1 else 1))]
    used = [new_stream(tensors.d.device) for _ in range(streams)]

    def run(kernel: Kernel) -> Callable[[], None]:
        if streams == 1:
            return kernel.bind(tensors)
        launches = [kernel.bind(one) for one in each]
        return lambda: alternate(launches, used)

    def measure(tried: list[GemmConfig]) -> tuple[dict[GemmConfig, float], float | None]:
        every = [*(provider.compile(spec, config) for config in tried), *kernels]
        times = [ms / (1 if streams == 1 else streams * PAIRS) for ms in time_graphs([*map(run, every)], rounds=3)]
        return dict(zip(tried, times, strict=False)), times[-1] if kernels else None

    found, _ = measure(configs)
    best = sorted(found, key=lambda config: found[config])[:finalists]
    ordered = [replace(config, raster=raster, swizzle=swizzle) for config in best for raster, swizzle in ORDERS]
    again, cublas_ms = measure(best + ordered)
    config = min(again, key=lambda config: again[config])
    result = Measured(config, again[config], {str(key): ms for key, ms in (found | again).items()}, cublas_ms)
    if write:
        chosen: dict[str, Any] = {"config": str(config), "ms": round(result.ms, 5)}
        CACHE.record(torch.cuda.get_device_name(), {key_of(spec, streams): chosen})
        forget_kernels()  # so that this process takes the choice too
    return result
