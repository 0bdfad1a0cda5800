"""The parameters of a per-tile kernel, as per_tile.cu and its headers declare them."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from distgemm.gemm.driver import error_text, libcuda
from distgemm.gemm.per_tile.order import RANKS, PieceOrder, TileOrder
from distgemm.plan.problem import DTYPE_BYTES

__all__ = [
    "CONTROL_BYTES",
    "Control",
    "Death",
    "Descriptor",
    "Order",
    "Params",
    "Pieces",
    "Terms",
    "Workspaces",
    "describe",
]


def _fields(kind: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, kind) for name in names)


class Descriptor(ctypes.Structure):
    """A CUtensorMap."""

    _fields_ = (("bytes", ctypes.c_uint64 * 16),)


class Order(ctypes.Structure):
    """struct TileOrder."""

    _fields_ = (
        *_fields(ctypes.c_uint32, "shards", "blocks", "columns", "group", "lead"),
        ("distances", ctypes.c_uint8 * RANKS),
    )

    @classmethod
    def of(cls, order: TileOrder) -> Order:
        """The struct of an order."""
        distances = (ctypes.c_uint8 * RANKS)(*order.distances)
        return cls(order.shards, order.blocks, order.columns, order.group, order.lead, distances)


class Pieces(ctypes.Structure):
    """struct PieceOrder."""

    _fields_ = (
        *_fields(ctypes.c_uint32, "rows", "slices", "group", "receivers"),
        ("distances", ctypes.c_uint8 * RANKS),
    )

    @classmethod
    def of(cls, order: PieceOrder) -> Pieces:
        """The struct of an order."""
        distances = (ctypes.c_uint8 * RANKS)(*order.receivers)
        return cls(order.rows, order.slices, order.group, len(order.receivers), distances)


class Death(enum.IntEnum):
    """enum Death."""

    MUTE = 1
    FREE = 2


class Control(ctypes.Structure):
    """struct Control."""

    _fields_ = (
        ("clock", ctypes.c_uint64),
        ("link_free", ctypes.c_uint64),
        *_fields(ctypes.c_uint32, "counter", "dead", "running", "executable"),
        ("unused", ctypes.c_uint64 * 12),
        ("begun", ctypes.c_uint64 * RANKS),
    )


CONTROL_BYTES = ctypes.sizeof(Control)


class Workspaces(ctypes.Structure):
    """struct Workspaces."""

    _fields_ = (
        ("base", ctypes.c_uint64 * RANKS),
        *_fields(
            ctypes.c_uint64, "flags", "flags_of_buffer", "slots", "slots_of_buffer", "packets", "packets_of_buffer"
        ),
        *_fields(ctypes.c_uint32, "rank", "executable", "ranks", "epochs_a_replay"),
    )


class Terms(ctypes.Structure):
    """struct Terms."""

    _fields_ = (
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        *_fields(ctypes.c_uint64, "bias", "c"),
        ("c_stride", ctypes.c_int64),
    )


class Params(ctypes.Structure):
    """struct Params, which is a multiple of 128 bytes long."""

    _fields_ = (
        ("a", Descriptor),
        ("b", Descriptor),
        ("d", Descriptor),
        ("received", Descriptor * 2),
        ("gathered", Descriptor),
        ("order", Order),
        ("pieces", Pieces),
        ("workspaces", Workspaces),
        ("terms", Terms),
        *_fields(ctypes.c_uint64, "shard", "gathered_at"),
        *_fields(ctypes.c_int64, "shard_stride", "gathered_stride"),
        *_fields(ctypes.c_int32, "m", "n", "k", "rank_rows", "box_m", "loaded_m"),
        *_fields(ctypes.c_uint32, "slices", "picoseconds_per_kib", "by_columns"),
        ("padding", ctypes.c_uint32 * 25),
    )

    @classmethod
    def new(cls) -> Params:
        """Zeros, at an address where the driver encodes descriptors."""
        memory = (ctypes.c_uint8 * (ctypes.sizeof(cls) + ALIGNMENT))()
        return cls.from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)

    def move(self, a: int, b: int, d: int, bias: int, c: int, gathered: int) -> None:
        """Go on with tensors at other addresses, all else being the same. A tensor that it has not stays 0.

        Raises:
            ValueError: if TMA cannot read or write there.
        """
        here: Any = self
        at, kind = ctypes.addressof(self), type(self)
        moved = [(kind.a.offset, a), (kind.b.offset, b), (kind.d.offset, d)]
        if here.gathered_at:
            moved.append((kind.gathered.offset, gathered))
        for offset, address in moved:
            if error := libcuda().cuTensorMapReplaceAddress(at + offset, address):
                raise ValueError(f"TMA cannot go on with a matrix at {address:#x}: {error_text(error)}")
        here.shard, here.gathered_at = a, gathered if here.gathered_at else 0
        terms = here.terms
        terms.bias = bias if terms.bias else 0
        terms.c = c if terms.c else 0


ALIGNMENT = 128
"""Of the parameters, in bytes."""
DATA_TYPES = {
    "bfloat16": int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
    "float16": int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
    "float32": int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
}
CHOICES = (
    int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
    int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
    int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
    int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
)
LINE = 128
"""Bytes of a row in shared memory, which TMA swizzles."""
_STEPS = (ctypes.c_uint32 * 3)(1, 1, 1)


def describe(
    descriptor: Descriptor,
    name: str,
    address: int,
    dtype: str,
    extents: tuple[int, int, int],
    pitch: int,
    matrix_pitch: int,
    rows: int,
) -> None:
    """Make the TMA descriptor of equal matrices, which are copied in boxes of 128 bytes of so many rows.

    Args:
        descriptor: a field of parameters that :meth:`Params.new` has made.
        name: of the matrix, for messages.
        address: of the first matrix, a multiple of 16.
        dtype: of the elements.
        extents: of the contiguous mode, of the other one, and number of matrices.
        pitch: elements from row to row: a multiple of 16 bytes.
        matrix_pitch: elements from matrix to matrix: a multiple of 16 bytes.
        rows: of a box.

    Raises:
        ValueError: if TMA cannot copy them.
    """
    size = DTYPE_BYTES[dtype]
    pitches = pitch * size, matrix_pitch * size
    if any(x % 16 for x in (address, *pitches)):
        raise ValueError(
            f"{name} begins at a multiple of 16 bytes, and so does each of its rows (or columns, where these are "
            f"contiguous); got the address {address:#x}, {pitches[0]} bytes from one to the next, and {pitches[1]} "
            "from shard to shard"
        )
    error = libcuda().cuTensorMapEncodeTiled(
        *(ctypes.addressof(descriptor), DATA_TYPES[dtype], 3, address, (ctypes.c_uint64 * 3)(*extents)),
        *((ctypes.c_uint64 * 2)(pitches[0], max(pitches[1], 16)), (ctypes.c_uint32 * 3)(LINE // size, rows, 1)),
        *(_STEPS, *CHOICES),
    )
    if error:
        raise ValueError(
            f"TMA cannot describe {name}: {extents} of {dtype}, {pitches} bytes apart: {error_text(error)}"
        )
