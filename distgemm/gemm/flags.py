"""Operations on flags, as kernels perform them. A flag is an int32 in memory that ranks signal through."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["OPERATIONS", "PHASES", "FlagOps", "MemOp", "flag_ops"]

OPERATIONS, PHASES = 192, 8
"""Operations, and phases of operations, that one kernel performs at most."""

WAIT, WRITE, WRITE_DOUBLE = range(3)


class MemOp(NamedTuple):
    """One operation on a flag.

    Attributes:
        wait: whether it waits until the flag equals the value; else it writes the value.
        address: the flag's address.
        value: the value.
        double: whether the write also sets the next flag, to 0.
    """

    wait: bool
    address: int
    value: int
    double: bool = False


class _Operation(ctypes.Structure):
    """struct Operation of flags.cuh."""

    _fields_ = (("address", ctypes.c_uint64), ("value", ctypes.c_uint32), ("kind", ctypes.c_uint32))


class FlagOps(ctypes.Structure):
    """struct FlagOps of flags.cuh."""

    _fields_ = (
        ("phases", ctypes.c_int32),
        ("ends", ctypes.c_int32 * PHASES),
        ("operations", _Operation * OPERATIONS),
    )


def flag_ops(phases: Sequence[Sequence[MemOp]]) -> FlagOps:
    """The struct of these phases. The kernel performs the phases in order, and the operations of a phase at once.

    Raises:
        ValueError: if there are too many.
    """
    if len(phases) > PHASES or sum(map(len, phases)) > OPERATIONS:
        raise ValueError(
            f"a kernel performs at most {OPERATIONS} operations in {PHASES} phases, got {sum(map(len, phases))} in "
            f"{len(phases)}"
        )
    struct = FlagOps(len(phases))
    end = 0
    for number, phase in enumerate(phases):
        for op in phase:
            kind = WAIT if op.wait else WRITE_DOUBLE if op.double else WRITE
            struct.operations[end] = _Operation(op.address, op.value, kind)
            end += 1
        struct.ends[number] = end
    return struct
