"""Provider "cutlass": CUTLASS 3.x kernels, compiled at first use and launched through the driver.

The tiles that it tries are listed in :mod:`distgemm.gemm.tiles`.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.launches import KernelLaunch, address_cells
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.parameters import (
    Arguments,
    BlockScales,
    Matrix,
    Parameter,
    ParameterLayout,
    Terms,
    gemm_parameter,
)
from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.select import near_best, order, preferred, recorded_config
from distgemm.gemm.spec import (
    FP8,
    RASTERS,
    SCALE_BLOCK,
    Epilogue,
    GemmConfig,
    GemmSpec,
    KernelSchedule,
    MatrixSpec,
    Status,
)
from distgemm.gemm.target import TARGET
from distgemm.gemm.tensors import check_device, spec_of
from distgemm.gemm.tiles import FP8_TILES, MAX_COLUMN_SCALED_SUMS, PLAIN_TILE, TILES
from distgemm.plan.problem import DTYPE_BYTES

__all__ = [
    "ELEMENTS",
    "BoundKernel",
    "CutlassKernel",
    "CutlassLaunch",
    "CutlassProvider",
    "arguments_of",
    "as_matrix",
    "kernel_source",
    "sm_count",
]

ELEMENTS = {
    "bfloat16": "cutlass::bfloat16_t",
    "float16": "cutlass::half_t",
    "float32": "float",
    "tfloat32": "cutlass::tfloat32_t",
    "float8_e4m3fn": "cutlass::float_e4m3_t",
    "float8_e5m2": "cutlass::float_e5m2_t",
}
PTX_TYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "tfloat32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
RESULTS = ("bfloat16", "float16", "float32")
SCHEDULE_MACROS: dict[KernelSchedule, str] = {
    "cooperative": "DG_COOPERATIVE",
    "pingpong": "DG_PINGPONG",
}
EPILOGUE_MACROS: dict[Epilogue, str] = {"tma": "DG_TMA", "direct": "DG_DIRECT"}
HEADERS = ("terms.cuh", "facts.cuh", "gemm_facts.cuh", "loads.cuh", "wgmma.cuh", "promotion.cuh", "epilogue.cuh")
PLAIN_HEADERS = ("terms.cuh", "facts.cuh")
TMA_DEPTH_BYTES = 128
PLAIN_DEPTH_BYTES = 64
INT32_MAX = 2**31 - 1
MAX_GRID = 2**16 - 1
"""Thread blocks along the second and the third dimension of a grid, at most."""

_ARCH = re.compile(r"(\d{2,3})[af]?")


def _depth(dtype: str, kernel_schedule: KernelSchedule) -> int:
    """Elements of k in a tile."""
    size = PLAIN_DEPTH_BYTES if kernel_schedule == "plain" else TMA_DEPTH_BYTES
    return size // DTYPE_BYTES[dtype]


def _plain(dtype: str) -> GemmConfig:
    return GemmConfig((*PLAIN_TILE.extents, _depth(dtype, "plain")), (1, 1), "plain", "direct")


def _configs(spec: GemmSpec) -> list[GemmConfig]:
    """All configurations that are tried for a spec, if they fit."""
    dtype = spec.a.dtype
    epilogue: Epilogue = "tma" if spec.results_aligned else "direct"
    tiles = FP8_TILES if dtype in FP8 else TILES
    if spec.block_rows_b == 1:
        tiles = tuple(tile for tile in tiles if tile.sums <= MAX_COLUMN_SCALED_SUMS)
    found = [
        GemmConfig((*tile.extents, _depth(dtype, tile.kernel_schedule)), cluster, tile.kernel_schedule, epilogue)
        for tile in tiles
        for cluster in tile.clusters
    ]
    return [*found, _plain(dtype)]


def kernel_source(spec: GemmSpec, config: GemmConfig, arch: str) -> KernelSource:
    """The source of the kernel for a spec and a configuration.

    It does not depend on extents and orders of tiles, and on strides only if they decide how much one load reads.

    Args:
        spec: what is computed.
        config: how.
        arch: the architecture, as nvcc names it.
    """
    source, aux = (spec.partial, spec.c) if spec.partial else (spec.c, None)
    plain, direct = config.kernel_schedule == "plain", config.epilogue == "direct"
    result = ELEMENTS[spec.d.dtype]

    def element(matrix: MatrixSpec | None) -> str:
        return ELEMENTS[matrix.dtype] if matrix else result

    values: dict[str, Any] = {
        "ELEMENT": ELEMENTS[spec.a.dtype],
        "ELEMENT_B": ELEMENTS[spec.b.dtype],
        "D": result,
        # A kernel sees at run time which terms there are. But with TMA, the source takes shared memory.
        "SOURCE": element(source) if source or direct else "void",
        "AUX": element(aux),
        "BIAS": ELEMENTS[spec.bias] if spec.bias else result,
        "A_ROW": int(spec.a.row_major),
        "B_ROW": int(spec.b.row_major),
        "MMA_K": 32 // DTYPE_BYTES[spec.a.dtype],
        "PTX_A": PTX_TYPES[spec.a.dtype],
        "PTX_B": PTX_TYPES[spec.b.dtype],
    }
    if plain:
        values |= {
            f"VECTOR_{name}": matrix.vector if matrix.row_major else 1
            for name, matrix in (("A", spec.a), ("B", spec.b))
        }
    else:
        values |= {
            "TILE_M": config.tile[0],
            "TILE_N": config.tile[1],
            "TILE_K": config.tile[2],
            "CLUSTER_M": config.cluster[0],
            "CLUSTER_N": config.cluster[1],
            "SCHEDULE": SCHEDULE_MACROS[config.kernel_schedule],
            "EPILOGUE": EPILOGUE_MACROS[config.epilogue],
            "SCALE_ROWS_B": spec.block_rows_b,
        }
    terms = [spec.a.dtype, "row" if spec.a.row_major else "column", "row" if spec.b.row_major else "column"]
    terms += [f"B {spec.b.dtype}"] if spec.b.dtype != spec.a.dtype else []
    terms += [f"scales of B {spec.scale_b}"] if spec.block_rows_b else []
    name = f"{replace(config, raster='heuristic', swizzle=1, share=1)} ({', '.join(terms)} -> {spec.d.dtype})"
    macros = tuple((f"DG_{key}", str(value)) for key, value in values.items())
    if plain:
        return KernelSource(name, macros, arch, "plain.cu", PLAIN_HEADERS)
    headers = (*HEADERS, "blockwise.cuh") if spec.block_rows_b else HEADERS
    return KernelSource(name, macros, arch, headers=headers)


@functools.cache
def sm_count(device: int) -> int:
    """The number of streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class CutlassKernel:
    """A compiled kernel; implements :class:`distgemm.gemm.Kernel`.

    Attributes:
        name: the source's name.
    """

    def __init__(self, source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> None:
        self.name = source.name
        self._source, self._config, self._provider = source, config, provider
        self._cubin = open_cubin(source)
        self._layout = ParameterLayout(self.name, self._cubin.facts)

    def bind(self, tensors: GemmTensors, begins_early: bool = True) -> CutlassLaunch:
        """A launch with these tensors.

        Args:
            tensors: the tensors and numbers.
            begins_early: see :func:`distgemm.gemm.bind`.

        Raises:
            ValueError: for tensors that the kernel was not compiled for.
            DescriptorError: for tensors that TMA cannot describe; it is a ValueError.
        """
        spec = spec_of(tensors)
        arguments = arguments_of(tensors, spec, self._source, self._config, self._provider)
        device = tensors.d.device.index
        self._cubin.load_on(device)
        bound = None
        if spec.m and spec.n and spec.l:
            cluster = self._config.cluster
            # A pair always fits: SMs come in pairs.
            many = cluster[0] * cluster[1] > 2
            max_clusters = self._cubin.max_clusters(device, cluster) if many else 0
            parameter, grid = gemm_parameter(self._layout, self._config, arguments, max_clusters)
            launch = self._cubin.launcher(device, grid, parameter.address, begins_early)
            bound = BoundKernel(arguments, parameter, launch)
        return CutlassLaunch(self.name, tensors, bound)


def arguments_of(
    tensors: GemmTensors, spec: GemmSpec, source: KernelSource, config: GemmConfig, provider: CutlassProvider
) -> Arguments:
    """The arguments of one GEMM.

    Args:
        tensors: its tensors.
        spec: of these tensors.
        source: what the kernel was compiled from.
        config: the kernel's configuration.
        provider: which compiled it.

    Raises:
        ValueError: for tensors that the kernel was not compiled for.
    """
    check_device(tensors)
    provider.raise_unsupported(spec, config)
    if kernel_source(spec, config, source.arch).macros != source.macros:
        raise ValueError(f"kernel {source.name} was compiled for other types, majors or terms than these tensors have")
    c = tensors.c if spec.c is not None else None
    partial, aux = (tensors.partial, c) if spec.partial else (c, None)
    partial_spec, aux_spec = (spec.partial, spec.c) if spec.partial else (spec.c, None)
    blocks = spec.block_rows_a > 0
    scales = (None, None) if blocks else (tensors.scale_a, tensors.scale_b)
    return Arguments(
        spec.m,
        spec.n,
        spec.k,
        spec.l,
        as_matrix(tensors.a, spec.a),
        as_matrix(tensors.b, spec.b),
        as_matrix(partial, partial_spec),
        as_matrix(tensors.d, spec.d),
        Terms(
            tensors.alpha,
            1.0 if spec.partial else tensors.beta,
            tensors.beta,
            *(int(scale == "row") for scale in (spec.scale_a, spec.scale_b)),
            *(None if one is None else one.data_ptr() for one in (*scales, tensors.bias)),
            as_matrix(aux, aux_spec),
        ),
        sm_count(tensors.d.device.index) // config.share,
        RASTERS.index(config.raster),
        config.swizzle,
        _block_scales(tensors.scale_a if blocks else None, spec.m, spec.block_rows_a),
        _block_scales(tensors.scale_b if blocks else None, spec.n, spec.block_rows_b),
    )


def as_matrix(tensor: torch.Tensor | None, spec: MatrixSpec | None) -> Matrix:
    """The struct of a tensor; of zeros for None."""
    if tensor is None or spec is None:
        return Matrix(None, 0, 0)
    return Matrix(tensor.data_ptr(), spec.stride, spec.batch_stride)


def _block_scales(scale: torch.Tensor | None, rows: int, block_rows: int) -> BlockScales:
    """The struct of an operand's scales of blocks; of zeros for None."""
    if scale is None:
        return BlockScales()
    return BlockScales(scale.data_ptr(), *scale.stride(), rows, block_rows)


class BoundKernel(NamedTuple):
    """A kernel with what it computes.

    Attributes:
        arguments: with the addresses of tensors.
        parameter: made from them.
        launch: launches the kernel with the parameter on a stream.
    """

    arguments: ctypes.Structure
    parameter: Parameter
    launch: Callable[[int], None]


class CutlassLaunch(KernelLaunch):
    """A kernel with its parameter; implements :class:`distgemm.gemm.Launch`.

    Args:
        name: the kernel's name.
        tensors: those that it reads and writes, which it keeps alive.
        bound: the kernel; None: it launches nothing, because D is empty.

    Attributes:
        name: as given.
    """

    def __init__(self, name: str, tensors: GemmTensors, bound: BoundKernel | None) -> None:
        self.name, self._bound = name, bound
        self._tensors: GemmTensors | None = tensors
        self._device = tensors.d.device

    def __call__(self, stream: int | None = None) -> None:
        if self._bound is None:
            return
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        self._bound.launch(stream)

    def cells(self) -> list[ctypes.c_uint64]:
        return [] if self._bound is None else address_cells(self._bound.arguments)

    @property
    def parameter(self) -> int:
        assert self._bound is not None
        self._bound.parameter.update()
        return self._bound.parameter.address

    def forget(self) -> None:
        self._tensors = None


class CutlassProvider:
    """CUTLASS kernels: with TMA and wgmma for sm_90a, without them for sm_80 and newer.

    Args:
        arch: the architecture to compile for, as nvcc names it; None: that of the current device.

    Raises:
        ValueError: if ``arch`` is not written as nvcc does.
    """

    name = "cutlass"

    def __init__(self, arch: str | None = None) -> None:
        if arch is not None and not _ARCH.fullmatch(arch):
            raise ValueError(f"arch is written as nvcc does, such as 90a or 80, got {arch!r}")
        self._arch, self._given = arch, arch is not None

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for.

        Raises:
            RuntimeError: if it was not given, :func:`distgemm.gemm.target.compiling_for` names none, and there is no
                CUDA device.
        """
        if not self._given and (target := TARGET.get()) is not None:
            return target.arch
        if self._arch is None:
            if not torch.cuda.is_available():
                raise RuntimeError("there is no CUDA device; where nothing is to run, name one: CutlassProvider('90a')")
            major, minor = torch.cuda.get_device_capability()
            self._arch = f"{major}{minor}" + ("a" if major >= 9 else "")
        return self._arch

    def configs(self, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
        """Configurations worth trying for this spec, the default first: each tile with each of its clusters."""
        return order(spec, [config for config in _configs(spec) if self.supports(spec, config)], streams)

    def near_best(self, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
        """The measured configuration; without one, those that are predicted to be about the fastest, the best first.

        Raises:
            ValueError: if the spec is not supported.
        """
        self.raise_unsupported(spec, None)
        measured = recorded_config(self, spec, streams)
        return [measured] if measured else near_best(spec, self.configs(spec, streams), streams)

    def supports(self, spec: GemmSpec, config: GemmConfig | None = None) -> Status:
        """Whether ``compile`` would return a kernel; if not, falsy with the reason."""
        dtype = spec.a.dtype
        if dtype not in ELEMENTS:
            return Status(f"A and B are of {', '.join(ELEMENTS)}, not {dtype}")
        for name, matrix in (("D", spec.d), ("C", spec.c), ("the partial sum", spec.partial)):
            if matrix is not None and matrix.dtype not in RESULTS:
                return Status(f"{name} is of {', '.join(RESULTS)}, not {matrix.dtype}")
        if spec.bias is not None and spec.bias not in RESULTS:
            return Status(f"bias is of {', '.join(RESULTS)}, not {spec.bias}")
        if spec.k == 0:
            return Status("k is 0: there is nothing to multiply")
        if max(spec.m, spec.n, spec.k, spec.l) > INT32_MAX:
            return Status(f"extents are below 2**31, got {spec.m}x{spec.n}x{spec.k}x{spec.l}")
        if dtype in FP8 and not (spec.a.row_major and spec.b.row_major):
            return Status("rows of A and B are contiguous in fp8: neither can be column-major")
        if spec.l > 1 and not {spec.scale_a, spec.scale_b} <= {"none", "tensor"}:
            return Status("scales of rows or blocks are for one batch")
        if spec.block_rows_a and dtype not in FP8:
            return Status(f"A and B are of {' or '.join(FP8)} if blocks have scales, not {dtype}")
        if config is not None:
            if config.split > 1:
                return Status(f"only per-tile kernels split k among thread blocks, got {config}")
            return self._fits(spec, config)
        # The plain kernel supports all that other kernels support, but for the number of batches.
        status = self._fits(spec, _plain(dtype))
        return status if status or not any(self._fits(spec, each) for each in _configs(spec)) else Status()

    def _fits(self, spec: GemmSpec, config: GemmConfig) -> Status:
        dtype, (m, n, k) = spec.a.dtype, config.tile
        number = int(self.arch.rstrip("af"))
        if number < 80:
            return Status(f"kernels are for sm_80 and newer, this is sm_{self.arch}")
        if config.kernel_schedule == "plain":
            if (tile := _plain(dtype).tile) != (m, n, k):
                return Status(f"plain kernels for {dtype} have tiles of {'x'.join(map(str, tile))}")
            if dtype in FP8 and number < 89:
                return Status(f"sm_{self.arch} does not multiply fp8")
            if spec.block_rows_a:
                return Status(
                    "only kernels with TMA, for sm_90a, take scales of blocks; addresses and strides of A and B are "
                    "multiples of 16 bytes for them"
                )
            if spec.l > MAX_GRID or -(-spec.n // n) > MAX_GRID:
                return Status(
                    f"plain kernels compute at most {MAX_GRID} batches of at most {MAX_GRID * n} columns, got {spec.l} "
                    f"of {spec.n}"
                )
            return Status()
        if self.arch != "90a":
            return Status(
                f"{config.kernel_schedule} kernels are for sm_90a, this is sm_{self.arch}; plain ones are not"
            )
        if dtype == "float32":
            return Status("tensor cores do not multiply IEEE float32: take a plain kernel, or dtype tfloat32")
        if dtype == "tfloat32" and spec.a.row_major and not spec.b.row_major:
            return Status("with TMA, tfloat32 wants rows of B contiguous where those of A are: take a plain kernel")
        if not spec.operands_aligned:
            return Status(
                "TMA wants addresses and strides of A and B in multiples of 16 bytes, and not 0: take a plain kernel"
            )
        if config.epilogue == "tma" and not spec.results_aligned:
            return Status("TMA wants addresses, strides and rows of D, C and the partial sum in multiples of 16 bytes")
        least = 128 if config.kernel_schedule == "cooperative" else 64
        if m % least or n % 8 or not 8 <= n <= 256:
            return Status(f"tiles of {config.kernel_schedule} kernels are multiples of {least} by 8..256, got {m}x{n}")
        if dtype == "tfloat32" and n > 32 and n % 32:
            return Status(f"tiles of tfloat32 are multiples of 32 wide: CUTLASS does not compile others, got {m}x{n}")
        if spec.block_rows_a and k != SCALE_BLOCK:
            return Status(f"tiles of kernels that take scales of blocks are {SCALE_BLOCK} deep, got {k}")
        if k * DTYPE_BYTES[dtype] % 32:
            return Status(f"depths of tiles are multiples of 32 bytes, got {k} elements")
        return Status()

    def sources(
        self, specs: Sequence[GemmSpec], config: GemmConfig | None = None, streams: int = 1
    ) -> list[KernelSource]:
        """The sources to compile for these specs, each once.

        Raises:
            ValueError: if a spec is not supported.
        """
        found = {}
        for spec in specs:
            source = kernel_source(spec, self._configuration(spec, config, streams), self.arch)
            found[source.macros] = source
        return list(found.values())

    def compile(self, spec: GemmSpec, config: GemmConfig | None = None, streams: int = 1) -> CutlassKernel:
        """The kernel for a spec; with config None, of the configuration that :mod:`distgemm.gemm.select` selects.

        Of configurations that are predicted to be about equally fast, one is selected whose kernel is there.

        Raises:
            ValueError: if it is not supported.
            CompilerNotFoundError: if it is not compiled yet and there is no compiler.
            CompileError: if the compiler fails.
        """
        config = self._configuration(spec, config, streams)
        return _kernel(kernel_source(spec, config, self.arch), config, self)

    def _configuration(self, spec: GemmSpec, config: GemmConfig | None, streams: int) -> GemmConfig:
        if config is None:
            near = self.near_best(spec, streams)
            sources = [kernel_source(spec, each, self.arch) for each in near]
            config = near[sources.index(preferred(sources))]
        self.raise_unsupported(spec, config)
        return config

    def raise_unsupported(self, spec: GemmSpec, config: GemmConfig | None) -> None:
        """Raise ValueError with the reason if a spec is not supported."""
        status = self.supports(spec, config)
        if not status:
            raise ValueError(f"provider cutlass, {config or 'any configuration'}: {status.reason}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CutlassProvider) and self.arch == other.arch

    def __hash__(self) -> int:
        return hash(self.arch)


@functools.cache
def _kernel(source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> CutlassKernel:
    return CutlassKernel(source, config, provider)
