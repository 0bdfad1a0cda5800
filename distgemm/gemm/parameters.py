"""The parameter of a CUTLASS kernel: what CUTLASS's host code would make of its arguments.

The kernel's facts say where each field lies, and what CUTLASS's templates decided: the boxes of TMA, the bytes of a
stage. This module computes the rest: the order of tiles, the grid, and the TMA descriptors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

from cuda.bindings import driver

from distgemm.gemm.cubins import Fact
from distgemm.gemm.driver import libcuda
from distgemm.gemm.spec import RASTERS, TMA_ALIGNMENT, GemmConfig

__all__ = [
    "Arguments",
    "BlockScales",
    "DescriptorError",
    "Matrix",
    "Parameter",
    "ParameterLayout",
    "Terms",
    "TileOrder",
    "gemm_parameter",
    "order_of_tiles",
]

GPC_SMS = 18
"""Streaming multiprocessors of a Hopper GPU that can share a cluster."""
STRIPES = ((3, 6), (2, 3), (1, 2), (0, 0))
"""Stripes of tiles: the logarithm of their width, and the fewest tiles along either mode for which they are made."""


class Matrix(ctypes.Structure):
    """struct Matrix of the kernels."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("batch_stride", ctypes.c_int64))


class Terms(ctypes.Structure):
    """struct Terms of terms.cuh. The kernel has the fields of ``aux`` one by one."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("alpha", "source_scale", "aux_scale")),
        *((name, ctypes.c_int32) for name in ("scale_a_step", "scale_b_step")),
        *((name, ctypes.c_void_p) for name in ("scale_a", "scale_b", "bias")),
        ("aux", Matrix),
        *((name, ctypes.c_int64) for name in ("bias_stride", "scale_a_stride", "scale_b_stride")),
    )


class BlockScales(ctypes.Structure):
    """struct BlockScales of blockwise.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "step")),
        *((name, ctypes.c_int32) for name in ("rows", "block_rows")),
    )


class Arguments(ctypes.Structure):
    """What a kernel of one GEMM computes. A struct, so that its addresses are cells: see :mod:`distgemm.gemm.launches`.

    Extents m, n, k and the number of batches l; A, B, D, and the source, which is C or the partial sum; all else that
    is added; the SMs to use, the number of the raster, and the swizzle count; scales of blocks.
    """

    _fields_ = (
        *((name, ctypes.c_int32) for name in "mnkl"),
        *((name, Matrix) for name in ("a", "b", "source", "d")),
        ("terms", Terms),
        *((name, ctypes.c_int32) for name in ("sm_count", "raster", "swizzle")),
        *((name, BlockScales) for name in ("scales_a", "scales_b")),
    )


class DescriptorError(ValueError):
    """TMA cannot describe a tensor, so the kernel cannot be launched. The message says which tensor."""


# --- the order of tiles ---------------------------------------------------------------------------------


class TileOrder(NamedTuple):
    """In which order a persistent kernel computes tiles.

    Attributes:
        fields: those of CUTLASS's PersistentTileSchedulerSm90Params.
        blocks: tiles of a batch, with those outside of D that complete clusters and stripes.
        cluster: thread blocks (m, n) of a cluster.
        along_n: whether consecutive clusters lie along N.
    """

    fields: dict[str, int]
    blocks: int
    cluster: tuple[int, int]
    along_n: bool

    def grid(self, batches: int, sm_count: int, max_clusters: int = 0) -> tuple[int, int, int]:
        """Thread blocks along each dimension: as many as the GPU holds at once, or as there are tiles.

        Args:
            batches: number of products.
            sm_count: SMs to use.
            max_clusters: clusters that the GPU holds at once; 0, or more than so many SMs hold: a formula says it.
        """
        major, minor = (1, 0) if self.along_n else (0, 1)
        size = self.cluster[0] * self.cluster[1]
        known = size > 1 and 0 < max_clusters * size <= sm_count
        at_once = min(max_clusters * size if known else _blocks_at_once(size, sm_count), self.blocks * batches)
        grid = [*self.cluster]
        grid[major] = at_once // self.cluster[minor]
        return grid[0], grid[1], 1


def order_of_tiles(config: GemmConfig, arguments: Arguments) -> TileOrder:
    """The order of tiles, as CUTLASS's host code computes it.

    Thread blocks of a cluster compute neighbouring tiles, and clusters are taken in stripes along the raster's mode.

    Args:
        config: its tile and cluster count.
        arguments: extents, raster and swizzle count.
    """
    cluster = config.cluster
    blocks = [
        _round_up(-(-extent // tile), blocks)
        for extent, tile, blocks in zip((arguments.m, arguments.n), config.tile, cluster, strict=False)
    ]
    log = next(log for log, fewest in STRIPES if arguments.swizzle >= 1 << log and min(blocks) >= fewest)
    m, n = (_round_up(count, each << log) for count, each in zip(blocks, cluster, strict=True))
    raster = RASTERS[arguments.raster]
    along_n = raster == "n" or (raster == "heuristic" and n <= m)
    major, minor = (1, 0) if along_n else (0, 1)
    fields = {
        **_shift("divmod_cluster_shape_major_", cluster[major]),
        **_shift("divmod_cluster_shape_minor_", cluster[minor]),
        **_division("divmod_batch_", m * n),
        **_division("divmod_cluster_blk_major_", (m, n)[major] // cluster[major]),
        "blocks_per_problem_": m * n * arguments.l,
        "log_swizzle_size_": log,
        "raster_order_": int(along_n),
        "problem_tiles_m_": m // cluster[0],
        "problem_tiles_n_": n // cluster[1],
        "problem_tiles_l_": arguments.l,
    }
    return TileOrder(fields, m * n, cluster, along_n)


def _blocks_at_once(cluster: int, sm_count: int) -> int:
    """Thread blocks, in clusters of so many, that a GPU holds at once if all GPCs but one have all their SMs.

    A cluster lies in one GPC. It is CUTLASS's formula, for a GPU that nobody asked. GPUs have other GPCs, so they may
    hold more or fewer clusters of 4 and 8.
    """
    full, rest = divmod(sm_count, GPC_SMS) if sm_count >= GPC_SMS else (1, 0)
    return min(full * (GPC_SMS - GPC_SMS % cluster) + rest - rest % cluster, sm_count)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shift(name: str, divisor: int) -> dict[str, int]:
    """A FastDivmodU64Pow2."""
    return {f"{name}.divisor": divisor, f"{name}.shift_right": divisor.bit_length() - 1}


def _division(name: str, divisor: int) -> dict[str, int]:
    """A FastDivmodU64: x // divisor is the high half of (x + round_up) * multiplier, shifted."""
    shift = divisor.bit_length() - 1
    power = 1 << shift
    multiplier = 0 if divisor == power else ((power << 64) + power) // divisor
    round_up = int(multiplier > 0 and (power << 64) // divisor == multiplier)
    return _shift(name, divisor) | {f"{name}.multiplier": multiplier, f"{name}.round_up": round_up}


# --- the parameter --------------------------------------------------------------------------------------

DESCRIPTOR_BYTES = 128
"""A CUtensorMap."""
INTERLEAVE = int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)
L2_PROMOTION = int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B)
OUTSIDE = int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
"""What TMA reads outside of a tensor: zeros."""
MODES = 3
_ELEMENT_STRIDES = (ctypes.c_uint32 * MODES)(1, 1, 1)


class _Box(NamedTuple):
    """What a TMA descriptor says besides the address, the extents and the strides."""

    type: int
    swizzle: int
    element_bytes: int
    extents: ctypes.Array[ctypes.c_uint32]


class ParameterLayout:
    """How the parameter of a kernel lies in memory.

    Args:
        kernel: the kernel's name.
        facts: of the kernel.

    Attributes:
        kernel: as given.
        size: bytes of the parameter.
        alignment: bytes.
        image: the parameter, with the fields that always hold the same.
    """

    def __init__(self, kernel: str, facts: Mapping[str, Fact]) -> None:
        self.kernel, self._facts = kernel, facts
        self.size, self.alignment = facts["size"].value, facts["alignment"].value
        image = bytearray(self.size)
        for fact in facts.values():
            if fact.value and fact.size:
                image[fact.offset : fact.offset + fact.size] = fact.value.to_bytes(fact.size, "little")
        self.image = bytes(image)
        self._boxes: dict[str, _Box] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def number(self, name: str) -> int:
        """The value of a fact."""
        return self._facts[name].value

    def field(self, name: str, size: int | None = None) -> tuple[int, int]:
        """Offset and size of a field, in bytes.

        Raises:
            RuntimeError: if it has not the given size: the kernel was compiled for another struct.
        """
        fact = self._facts[name]
        if size is not None and fact.size != size:
            raise RuntimeError(
                f"kernel {self.kernel} has {fact.size} bytes for {name}, and this version of distgemm passes {size}"
            )
        return fact.offset, fact.size

    def box(self, name: str) -> _Box:
        """What descriptors of a matrix have in common. Names are a, b, source and d."""
        if name not in self._boxes:
            kind, swizzle, size = (self.number(f"{name}.{each}") for each in ("type", "swizzle", "element_bytes"))
            extents = (ctypes.c_uint32 * MODES)(*(self.number(f"{name}.box_{mode}") for mode in range(MODES)))
            self._boxes[name] = _Box(kind, swizzle, size, extents)
        return self._boxes[name]


class Parameter:
    """A kernel's parameter in host memory. Its fields are 0, or what they always hold, until they are set.

    Args:
        layout: of the parameter.

    Attributes:
        layout: as given.
        address: where it lies.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout = layout
        self._buffer = ctypes.create_string_buffer(layout.size + layout.alignment)
        self.address = -(-ctypes.addressof(self._buffer) // layout.alignment) * layout.alignment
        ctypes.memmove(self.address, layout.image, layout.size)
        self._copied: list[tuple[int, int, int]] = []
        self._descriptors: list[_Descriptor] = []
        self._kept: list[object] = []

    def put(self, name: str, value: int) -> None:
        """Set a field to an integer."""
        offset, size = self.layout.field(name)
        ctypes.memmove(self.address + offset, value.to_bytes(size, "little", signed=value < 0), size)

    def copy(self, name: str, data: Any) -> None:
        """Set a field to what a ctypes object holds, now and at each :meth:`update`.

        Raises:
            RuntimeError: if the kernel has another struct there.
        """
        offset, size = self.layout.field(name, ctypes.sizeof(data))
        self._copied.append((self.address + offset, ctypes.addressof(data), size))
        self._kept.append(data)
        ctypes.memmove(*self._copied[-1])

    def describe(
        self, name: str, box: str, what: str, matrix: Matrix, shape: tuple[int, int, int], row_major: bool = True
    ) -> None:
        """Set a field to a TMA descriptor. :meth:`update` takes the address that the matrix then has.

        Args:
            name: of the field.
            box: which matrix of the kernel it is: a, b, source or d.
            what: what the matrix is, for messages.
            matrix: its address and strides.
            shape: rows, columns and batches.
            row_major: whether rows are contiguous; else columns are.

        Raises:
            DescriptorError: if TMA cannot describe the matrix.
        """
        offset, _ = self.layout.field(name, DESCRIPTOR_BYTES)
        rows, columns, batches = shape
        extents = (columns, rows, batches) if row_major else (rows, columns, batches)
        made = _Descriptor(self.layout, self.address + offset, self.layout.box(box), what, matrix, extents)
        self._descriptors.append(made)

    def update(self) -> None:
        """Take the addresses that the arguments hold now.

        Raises:
            DescriptorError: if TMA cannot describe a tensor.
        """
        for target, source, size in self._copied:
            ctypes.memmove(target, source, size)
        for descriptor in self._descriptors:
            descriptor.update()


class _Descriptor:
    """A TMA descriptor in a parameter."""

    def __init__(
        self, layout: ParameterLayout, at: int, box: _Box, what: str, matrix: Matrix, extents: tuple[int, int, int]
    ) -> None:
        self._kernel, self._at, self._box, self._what, self._matrix = layout.kernel, at, box, what, matrix
        self._extents = (ctypes.c_uint64 * MODES)(*extents)
        strides = (stride * box.element_bytes for stride in (matrix.stride, matrix.batch_stride))
        self._strides = (ctypes.c_uint64 * (MODES - 1))(*strides)
        self._address: int | None = matrix.data
        error = libcuda().cuTensorMapEncodeTiled(
            *(at, box.type, MODES, self._address, self._extents, self._strides, box.extents, _ELEMENT_STRIDES),
            *(INTERLEAVE, box.swizzle, L2_PROMOTION, OUTSIDE),
        )
        self._raise_on(error)

    def update(self) -> None:
        """Take the address that the matrix has now."""
        address = self._matrix.data
        if address != self._address:
            self._raise_on(libcuda().cuTensorMapReplaceAddress(self._at, address))
            self._address = address

    def _raise_on(self, error: int) -> None:
        if error:
            dtype = driver.CUtensorMapDataType(self._box.type).name.rpartition("_TYPE_")[2].lower()
            raise DescriptorError(
                f"kernel {self._kernel}: TMA cannot describe {self._what}: extents {tuple(self._extents)}, the "
                f"contiguous one first, strides {tuple(self._strides)} bytes, {dtype} at {self._matrix.data or 0:#x} "
                f"({driver.CUresult(error).name}). Extents are 1 to 2**32, strides multiples of {TMA_ALIGNMENT} and "
                "below 2**40 bytes"
            )


def gemm_parameter(
    layout: ParameterLayout, config: GemmConfig, arguments: Arguments, max_clusters: int = 0
) -> tuple[Parameter, tuple[int, int, int]]:
    """The parameter of a kernel of one GEMM, and the grid.

    Args:
        layout: of the parameter.
        config: the kernel's configuration.
        arguments: what the kernel computes. They may change their addresses; see :meth:`Parameter.update`.
        max_clusters: clusters of the kernel that the GPU holds at once; 0: not known.

    Raises:
        DescriptorError: if TMA cannot describe a tensor.
    """
    given, made = arguments, Parameter(layout)
    if config.kernel_schedule == "plain":
        for name in ("m", "n", "k"):
            made.put(name, getattr(given, name))
        for name in ("a", "b", "source", "d", "terms"):
            made.copy(name, getattr(given, name))
        tile_m, tile_n, _ = config.tile
        return made, (-(-given.m // tile_m), -(-given.n // tile_n), given.l)
    made.copy("epilogue.terms", given.terms)
    if "has_source" in layout:
        if layout.number("has_source"):
            made.describe(
                "epilogue.source", "source", "C or the partial sum", given.source, (given.m, given.n, given.l)
            )
        made.describe("epilogue.d", "d", "D", given.d, (given.m, given.n, given.l))
    else:
        made.copy("epilogue.source", given.source)
        made.copy("epilogue.d", given.d)
    tiles = _put_problem(made, config, given)
    for name, matrix, rows in (("a", given.a, given.m), ("b", given.b, given.n)):
        field, row_major = f"mainloop.tma_load_{name}.tma_desc_", bool(layout.number(f"{name}_row_major"))
        made.describe(field, name, name.upper(), matrix, (rows, given.k, given.l), row_major)
    if "mainloop.scales_a" in layout:
        made.copy("mainloop.scales_a", given.scales_a)
        made.copy("mainloop.scales_b", given.scales_b)
    return made, tiles.grid(given.l, given.sm_count, max_clusters)


def _put_problem(parameter: Parameter, config: GemmConfig, arguments: Arguments) -> TileOrder:
    """Set the extents and the order of tiles of a kernel with TMA. Returns the order."""
    given, tiles = arguments, order_of_tiles(config, arguments)
    parameter.put("problem_shape", _packed(given.m, given.n, given.k, given.l, size=4))
    parameter.put("hw_info.sm_count", given.sm_count)
    for name, value in tiles.fields.items():
        parameter.put(f"scheduler.{name}", value)
    return tiles


def _packed(*values: int, size: int) -> int:
    """Integers of ``size`` bytes as one, the first at the lowest address."""
    return sum((value & ((1 << 8 * size) - 1)) << 8 * size * number for number, value in enumerate(values))
