"""The search for the fastest tile configuration of one GEMM on this GPU."""

from __future__ import annotations

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
from distgemm.measure.timing import time_launches

__all__ = ["Measured", "alternate", "candidates", "tune"]

GEMMS_PER_STREAM = 3
"""GEMMs on each stream when several streams are measured."""
TILE_ORDERS = tuple((raster, swizzle) for raster in RASTERS[1:] for swizzle in (1, 2, 4, 8))


def alternate(launches: Sequence[Callable[[int], object]], streams: Sequence[torch.cuda.Stream]) -> None:
    """Put launches on streams alternately; the streams begin and end with the current one."""
    here = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(here)
    for number, launch in enumerate(launches):
        launch(streams[number % len(streams)].cuda_stream)
    for stream in streams:
        here.wait_stream(stream)


@dataclass(frozen=True)
class Measured:
    """The result of a search.

    Attributes:
        config: the fastest configuration.
        ms: its time.
        times: of all configurations that were measured, by name, ms.
        cublas_ms: of cuBLAS; None if it does not compute this GEMM.
    """

    config: GemmConfig
    ms: float
    times: dict[str, float]
    cublas_ms: float | None


def candidates(provider: CutlassProvider, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
    """The configurations worth measuring, each in the order of tiles that is predicted to be the best.

    For several streams also configurations that leave SMs to the other streams.

    Raises:
        ValueError: if there are none.
    """
    configs = provider.configs(spec, streams)
    if not configs:
        raise ValueError(f"provider cutlass: {provider.supports(spec).reason}")
    # The plain kernel has no TMA: it is only for what the others cannot compute.
    fast = [config for config in configs if config.kernel_schedule != "plain"]
    shared = [replace(config, share=streams) for config in fast] if streams in SHARES[1:] else []
    return fast + shared or configs


def with_other_memory(tensors: GemmTensors) -> GemmTensors:
    """The same GEMM with A and D in other memory, with the same strides: a kernel may depend on them."""
    a, d = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (tensors.a, tensors.d))
    return replace(tensors, a=a.copy_(tensors.a), d=d)


def tune(tensors: GemmTensors, streams: int = 1, finalists: int = 3, write: bool = True) -> Measured:
    """Search the fastest configuration for these tensors. Takes seconds once the kernels are compiled. Overwrites D.

    All tile shapes are measured in the predicted order of tiles, on two streams also with half of the SMs each. Then
    the best few are measured in all orders.

    Args:
        tensors: of the GEMM, on the GPU.
        streams: 2 to measure several such GEMMs that alternate on two streams, as the chunks of an operation do.
        finalists: tile shapes that are measured in all orders.
        write: whether the result is recorded.

    Raises:
        ValueError: for tensors that no kernel multiplies or that are on no GPU.
    """
    check_device(tensors)
    provider = CutlassProvider()
    spec = spec_of(tensors)
    configs = candidates(provider, spec, streams)
    build([kernel_source(spec, config, provider.arch) for config in configs])

    cublas = get_provider("cublas")
    kernels: list[Kernel] = [cublas.compile(spec)] if cublas.supports(spec) else []
    # As for the chunks of one operation, B is shared, A and D are not.
    each = [tensors, *(with_other_memory(tensors) for _ in range(1, GEMMS_PER_STREAM * streams if streams > 1 else 1))]
    used = [new_stream(tensors.d.device) for _ in range(streams)]

    def run(kernel: Kernel) -> Callable[[], None]:
        if streams == 1:
            return kernel.bind(tensors)
        launches = [kernel.bind(one, begins_early=False) for one in each]  # as those of executables
        return lambda: alternate(launches, used)

    def measure(tried: list[GemmConfig]) -> tuple[dict[GemmConfig, float], float | None]:
        every = [*(provider.compile(spec, config) for config in tried), *kernels]
        count = 1 if streams == 1 else streams * GEMMS_PER_STREAM
        launches = [*map(run, every)]
        times = [ms / count for ms in time_launches(launches, tensors.d.device, rounds=3)]
        return dict(zip(tried, times, strict=False)), times[-1] if kernels else None

    found, _ = measure(configs)
    best = sorted(found, key=lambda config: found[config])[:finalists]
    ordered = [replace(config, raster=raster, swizzle=swizzle) for config in best for raster, swizzle in TILE_ORDERS]
    again, cublas_ms = measure(best + ordered)
    config = min(again, key=lambda config: again[config])
    result = Measured(config, again[config], {str(key): ms for key, ms in (found | again).items()}, cublas_ms)
    if write:
        entry: dict[str, Any] = {"config": str(config), "ms": round(result.ms, 5)}
        CACHE.record(torch.cuda.get_device_name(), {key_of(spec, streams): entry})
        forget_kernels()  # so that this process uses the result too
    return result
