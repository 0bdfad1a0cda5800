"""Fused kernels: their sources, the selection of their configurations, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.cutlass import BoundKernel, CutlassLaunch, CutlassProvider, arguments_of, kernel_source
from distgemm.gemm.fused.arguments import FusedArguments, cut_pieces, place, row_pitch, send_groups
from distgemm.gemm.fused.gemms import FusedGemms, FusedSend
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.parameters import SOURCE, Arguments, Parameter, ParameterLayout, pointer_in, put_problem
from distgemm.gemm.select import near_best, order, preferred, recorded_config, tiles_of
from distgemm.gemm.spec import GemmConfig, Status

__all__ = [
    "FusedKernel",
    "bind_fused",
    "fused_arguments",
    "fused_parameter",
    "fused_source",
    "near_best_sources",
    "pingpong_first",
]


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


class FusedKernel:
    """A compiled fused kernel.

    Attributes:
        name: the source's name.
    """

    def __init__(self, source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> None:
        self.name = source.name
        self._source, self._config, self._provider = source, config, provider
        self._cubin = open_cubin(source)
        self._layout = ParameterLayout(self.name, self._cubin.facts)

    def bind_fused(self, gemms: FusedGemms) -> CutlassLaunch:
        """A launch with these tensors.

        Raises:
            ValueError: for tensors that the kernel was not compiled for, or that lie otherwise than it needs.
        """
        spec, device = gemms.spec, gemms.template.d.device.index
        if not (spec.m and spec.n):
            return CutlassLaunch(self.name, gemms.products, None)
        base = arguments_of(gemms.template, spec, self._source, self._config, self._provider, gemms.kind)
        self._cubin.load_on(device)
        arguments = fused_arguments(gemms, self._config, base)
        parameter, grid = fused_parameter(self._layout, self._config, arguments)
        launch = self._cubin.launcher(device, grid, parameter.address)
        return CutlassLaunch(self.name, gemms.products, BoundKernel(arguments, parameter, launch))


def fused_arguments(gemms: FusedGemms, config: GemmConfig, base: Arguments) -> FusedArguments:
    """What the kernel does.

    Args:
        gemms: the GEMMs.
        config: the kernel's configuration.
        base: the arguments of ``gemms.template``.

    Raises:
        ValueError: for tensors that lie otherwise than the kernel needs.
    """
    arguments = FusedArguments(base)
    place(arguments, gemms, () if gemms.has_partial_sums else send_groups(gemms, config, base.sm_count))
    return arguments


def fused_parameter(
    layout: ParameterLayout, config: GemmConfig, arguments: FusedArguments
) -> tuple[Parameter, tuple[int, int, int]]:
    """The parameter of a fused kernel, and the grid.

    Args:
        layout: of the parameter.
        config: the kernel's configuration.
        arguments: what the kernel does. They may change their addresses; see :meth:`Parameter.update`.

    Raises:
        DescriptorError: if TMA cannot describe a tensor.
    """
    given, base, made = arguments, arguments.base, Parameter(layout)
    cut_pieces(given.sender, *(layout.number(name) for name in ("send_part", "send_parts", "send_unit")))
    tiles = put_problem(made, config, base)
    made.put("mainloop.moving", given.moving)
    made.put("mainloop.slice_tiles", -(-given.slice_k // config.tile[2]))
    made.put("scheduler.clusters", tiles.blocks // (tiles.cluster[0] * tiles.cluster[1]))
    _put_operands(made, given)
    _put_results(made, given)
    for name, struct in (
        ("mainloop.operands", given.operands),
        ("epilogue.results", given.results),
        ("scheduler.groups", given.groups),
        ("sender", given.sender),
        ("handshake", given.handshake),
    ):
        made.copy(name, struct)
    if "epilogue.counters" in layout:  # it adds partial sums
        made.copy("epilogue.addends", given.addends)
        made.put("epilogue.tiles", tiles.blocks)
        made.put("epilogue.waits_for_start", int(given.handshake.entry.phases > 0))
        for name in ("epilogue.counters", "scheduler.counters"):
            made.copy(name, pointer_in(given.handshake, "counters"))
    # All SMs copy, even if there are fewer tiles.
    sends = any(queue.pieces for queue in given.sender.queues)
    return made, tiles.grid(max(base.l, base.sm_count) if sends else base.l, base.sm_count)


def _put_operands(made: Parameter, given: FusedArguments) -> None:
    """Set the TMA descriptors of A and B, and of these with the operand that arrives."""
    base, moving = given.base, "ab"[given.moving]
    received = {moving: given.received_operand}
    for field, count in (("mainloop", given.local_operands), ("mainloop.received", given.received_operands)):
        for name, rows in (("a", base.m), ("b", base.n)):
            arrives = field == "mainloop.received" and name == moving
            made.describe(
                f"{field}.tma_load_{name}.tma_desc_",
                name,
                "the operand that arrives" if arrives else name.upper(),
                received[name] if arrives else getattr(base, name),
                (rows, base.k, count if name == moving else given.other_operands),
                bool(made.layout.number(f"{name}_row_major")),
            )


def _put_results(made: Parameter, given: FusedArguments) -> None:
    """Set what the epilogue adds, and where it stores."""
    base = given.base
    made.copy("epilogue.terms", base.terms)
    if "has_source" not in made.layout:
        made.copy("epilogue.source", base.source)
        made.copy("epilogue.d", base.d)
        return
    reduces = "epilogue.remote.terms" in made.layout
    sources, results = (given.sources, given.local_results) if reduces else (base.l, base.l)
    places = [("epilogue", "D", base.d, results)]
    if reduces:
        places.append(("epilogue.remote", "D of another rank", given.remote_d, given.remote_results))
        made.copy("epilogue.remote.terms", given.remote_terms)
        made.copy("epilogue.remote.pacing", given.pacing)
    for field, what, d, count in places:
        if made.layout.number("has_source"):
            shape = (base.m, base.n, sources)
            made.describe(f"{field}.source", "source", SOURCE, base.source, shape)
        made.describe(f"{field}.d", "d", what, d, (base.m, base.n, count))


@functools.cache
def _kernel(source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> FusedKernel:
    return FusedKernel(source, config, provider)
