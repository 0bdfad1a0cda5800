"""Fused kernels: their sources, the selection of their configurations, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from distgemm.gemm.cutlass import CutlassKernel, CutlassLaunch, CutlassProvider, kernel_source
from distgemm.gemm.fused.arguments import FusedArguments, place, row_pitch, send_groups
from distgemm.gemm.fused.gemms import FusedGemms, FusedSend
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.select import near_best, order, preferred, recorded_config, tiles_of
from distgemm.gemm.spec import GemmConfig, Status

__all__ = ["FusedKernel", "bind_fused", "fused_source", "near_best_sources", "pingpong_first"]


def fused_source(gemms: FusedGemms, config: GemmConfig | None = None) -> KernelSource:
    """The source of the kernel.

    Args:
        gemms: what the kernel does.
        config: its configuration. None: the one selected for a GEMM as large as all of them, unless its tiles would
            reach beyond each GEMM; the first pingpong one if stores to other GPUs are paced. If none was measured, one
            that is about as fast and compiled already is taken before it.

    Raises:
        ValueError: if there is no such kernel.
    """
    provider = CutlassProvider()
    return _source(provider, gemms, _configuration(provider, gemms, config))


def bind_fused(gemms: FusedGemms, config: GemmConfig | None = None) -> CutlassLaunch:
    """A launch of the kernel, compiled if need be, with its arguments encoded.

    Args:
        gemms: what the kernel does.
        config: as in :func:`fused_source`.

    Raises:
        ValueError: if there is no such kernel, or if tensors do not lie as :class:`FusedGemms` says.
    """
    provider = CutlassProvider()
    config = _configuration(provider, gemms, config)
    return _kernel(_source(provider, gemms, config), config, provider).bind_fused(gemms)


def pingpong_first(configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """The configurations in another order, for kernels with paced stores: a pingpong kernel's warp group multiplies
    while the other one waits for the link."""
    return sorted(configs, key=lambda config: config.kernel_schedule != "pingpong")


def _source(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig) -> KernelSource:
    return kernel_source(gemms.spec, config, provider.arch, gemms.kind)


def near_best_sources(gemms: FusedGemms, config: GemmConfig | None = None) -> list[KernelSource]:
    """The sources of the kernels that are predicted to be about the fastest, the best first.

    Args:
        gemms: what the kernel does.
        config: as in :func:`fused_source`; if it is given, there is one.

    Raises:
        ValueError: if there is no such kernel.
    """
    provider = CutlassProvider()
    return [_source(provider, gemms, each) for each in _near_best(provider, gemms, config)]


def _configuration(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig | None) -> GemmConfig:
    near = _near_best(provider, gemms, config)
    sources = [_source(provider, gemms, each) for each in near]
    return near[sources.index(preferred(sources))]


def _near_best(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig | None) -> list[GemmConfig]:
    if not (status := provider.supports(gemms.spec)):
        raise ValueError(f"provider cutlass, fused kernel: {status.reason}")
    measured = config or recorded_config(provider, gemms.combined_spec)
    candidates = [config] if config is not None else _by_shape(provider, gemms, measured)
    paced = bool(gemms.link_rate and gemms.has_partial_sums)
    if paced:
        candidates = pingpong_first(candidates)
    found = [candidate for candidate in candidates if _supports(provider, gemms, candidate)]
    if not found:
        status = _supports(provider, gemms, candidates[0])
        raise ValueError(f"provider cutlass, fused kernel, {config or 'any configuration'}: {status.reason}")
    if found[0] == measured:
        return found[:1]
    alike = [each for each in found if not paced or each.kernel_schedule == found[0].kernel_schedule]
    return list(dict.fromkeys(near_best(gemms.spec, alike, count=len(gemms.products))))


def _by_shape(provider: CutlassProvider, gemms: FusedGemms, measured: GemmConfig | None) -> list[GemmConfig]:
    """Configurations, the best first: that of a GEMM as large as all, unless its tiles would reach beyond each GEMM."""
    combined, count = gemms.combined_spec, len(gemms.products)
    configs = provider.configs(combined)
    found, selected = order(gemms.spec, configs, count=count), measured or configs[0]
    fits = count * tiles_of(gemms.spec, selected) <= tiles_of(combined, selected)
    return [selected, *found] if fits else found


def _supports(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig) -> Status:
    if not gemms.spec.operands_aligned:
        return Status("TMA wants addresses and strides of A and B in multiples of 16 bytes, and not 0")
    if gemms.has_partial_sums and not gemms.spec.results_aligned:
        return Status("TMA wants addresses, strides and rows of D, C and the partial sum in multiples of 16 bytes")
    if config.kernel_schedule == "plain" or (gemms.has_partial_sums and config.epilogue != "tma"):
        return Status("only warps that load through TMA wait for flags: take a configuration with TMA")
    if gemms.slice_k % config.tile[2] and gemms.slice_k < gemms.spec.k:
        return Status(f"slices of {gemms.slice_k} elements are no multiple of the depth of tiles, {config.tile[2]}")
    if not all(map(_can_be_sent, gemms.sends)):
        return Status("a send has addresses, strides and rows in multiples of 16 bytes")
    return provider.supports(gemms.spec, config)


def _can_be_sent(send: FusedSend) -> bool:
    """Whether TMA can copy it."""
    sizes = [send.source.shape[1] * send.source.element_size(), send.source.data_ptr(), send.target.data_ptr()]
    return not any(size % 16 for size in (*sizes, row_pitch(send.source), row_pitch(send.target)))


class FusedKernel(CutlassKernel):
    """A compiled fused kernel."""

    arguments = FusedArguments

    def bind_fused(self, gemms: FusedGemms) -> CutlassLaunch:
        """A launch with these tensors.

        Raises:
            ValueError: for tensors that the kernel was not compiled for, or that lie otherwise than it needs.
        """
        spec = gemms.spec
        if not (spec.m and spec.n):
            return self.launch(gemms.products, None)
        arguments = FusedArguments(self.encode(gemms.template, spec, gemms.kind))
        gathers = not gemms.has_partial_sums
        place(arguments, gemms, send_groups(gemms, self.config, arguments.base.sm_count) if gathers else ())
        return self.launch(gemms.products, arguments)


@functools.cache
def _kernel(source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> FusedKernel:
    return FusedKernel(source, config, provider)
