"""The parameters of a per-tile kernel, as per_tile.cu and its headers declare them."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from distgemm.gemm.per_tile.order import RANKS, PieceOrder, TileOrder

__all__ = [
    "CONTROL_BYTES",
    "Control",
    "Descriptor",
    "Order",
    "Params",
    "Pieces",
    "Terms",
    "Workspaces",
    "descriptor",
]


class Descriptor(ctypes.Structure):
    """A CUtensorMap."""

    _fields_ = (("bytes", ctypes.c_uint64 * 16),)


class Order(ctypes.Structure):
    """struct TileOrder."""

    _fields_ = (
        ("ranks", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("lead", ctypes.c_uint32),
        ("distances", ctypes.c_uint8 * RANKS),
    )

    @classmethod
    def of(cls, order: TileOrder) -> Order:
        """The struct of an order."""
        found = cls(order.ranks, order.blocks, order.columns, order.group, order.lead)
        found.distances[: order.ranks - 1] = order.distances
        return found


class Pieces(ctypes.Structure):
    """struct PieceOrder."""

    _fields_ = (
        ("rows", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, order: PieceOrder) -> Pieces:
        """The struct of an order."""
        return cls(order.rows, order.slices, order.group)


class Control(ctypes.Structure):
    """struct Control."""

    _fields_ = (
        ("clock", ctypes.c_uint64),
        ("last", ctypes.c_uint64 * 2),
        ("link_free", ctypes.c_uint64),
        ("tickets", ctypes.c_uint32),
        ("dead", ctypes.c_uint32),
        ("unused", ctypes.c_uint64 * 11),
        ("begun", ctypes.c_uint64 * RANKS),
    )


CONTROL_BYTES = ctypes.sizeof(Control)


class Workspaces(ctypes.Structure):
    """struct Workspaces."""

    _fields_ = (
        ("base", ctypes.c_uint64 * RANKS),
        ("flags", ctypes.c_uint64),
        ("flags_of_buffer", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("slots_of_buffer", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("closed", ctypes.c_bool),
        ("epochs_a_replay", ctypes.c_uint8),
    )


class Terms(ctypes.Structure):
    """struct Terms."""

    _fields_ = (
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("scale_a", ctypes.c_uint64),
        ("scale_b", ctypes.c_uint64),
        ("scale_a_step", ctypes.c_int32),
        ("scale_b_step", ctypes.c_int32),
        ("bias", ctypes.c_uint64),
        ("c", ctypes.c_uint64),
        ("c_stride", ctypes.c_int64),
    )


class Params(ctypes.Structure):
    """struct Params, which is a multiple of 128 bytes long."""

    _fields_ = (
        ("a", Descriptor),
        ("b", Descriptor),
        ("d", Descriptor),
        ("received", Descriptor * 2),
        ("order", Order),
        ("pieces", Pieces),
        ("workspaces", Workspaces),
        ("terms", Terms),
        ("shard", ctypes.c_uint64),
        ("shard_stride", ctypes.c_int64),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("slices", ctypes.c_uint32),
        ("picoseconds_per_kib", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 21),
    )


DATA_TYPES = {
    "bfloat16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "float16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "float32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "float8_e4m3fn": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
LINE = 128
"""Bytes of a row in shared memory, which TMA swizzles."""


def descriptor(
    address: int,
    dtype: str,
    extents: tuple[int, int, int],
    pitch: int,
    matrix_pitch: int,
    rows: int,
    element_bytes: int,
) -> Descriptor:
    """The TMA descriptor of equal matrices, which are copied in boxes of 128 bytes of so many rows.

    Args:
        address: of the first matrix, a multiple of 16.
        dtype: of the elements.
        extents: of the contiguous mode, of the other one, and number of matrices.
        pitch: bytes from row to row, a multiple of 16.
        matrix_pitch: bytes from matrix to matrix, a multiple of 16.
        rows: of a box.
        element_bytes: bytes of an element.

    Raises:
        ValueError: if TMA cannot copy them.
    """
    if address % 16 or pitch % 16 or matrix_pitch % 16:
        raise ValueError(
            "a matrix begins at a multiple of 16 bytes, and so do its rows; got the address "
            f"{address}, rows of {pitch} bytes, matrices of {matrix_pitch}"
        )
    status, found = driver.cuTensorMapEncodeTiled(
        DATA_TYPES[dtype],
        3,
        address,
        [driver.cuuint64_t(x) for x in extents],
        [driver.cuuint64_t(x) for x in (pitch, max(matrix_pitch, 16))],
        [driver.cuuint32_t(x) for x in (LINE // element_bytes, rows, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise ValueError(
            f"TMA cannot describe {extents} of {dtype} with {pitch} and {matrix_pitch} bytes: {status.name}"
        )
    return Descriptor.from_buffer_copy(ctypes.string_at(int(found.getPtr()), ctypes.sizeof(Descriptor)))
