"""FlagOps in memory that ranks signal through, as kernels wait for them and write them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["OPERATIONS", "PHASES", "MemOp", "FlagOps", "fits", "flag_ops"]

OPERATIONS, PHASES = 192, 8
"""Operations, and phases of them, that a kernel performs at most."""

WAIT, WRITE, WRITE_DOUBLE = range(3)


class MemOp(NamedTuple):
    """A wait until the word at an address equals a value, or a write of it; double: of two words at once, to 0."""

    wait: bool
    address: int
    value: int
    double: bool = False


class _Operation(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("value", ctypes.c_uint32), ("kind", ctypes.c_uint32))


class FlagOps(ctypes.Structure):
    """The struct FlagOps of flags.cuh."""

    _fields_ = (
        ("phases", ctypes.c_int32),
        ("ends", ctypes.c_int32 * PHASES),
        ("operations", _Operation * OPERATIONS),
    )


def fits(phases: Sequence[Sequence[MemOp]]) -> bool:
    """Whether a kernel performs so many."""
    return len(phases) <= PHASES and sum(map(len, phases)) <= OPERATIONS


def flag_ops(phases: Sequence[Sequence[MemOp]]) -> FlagOps:
    """The operations of each phase at once, the phases one after the other. Raises ValueError for too many."""
    if not fits(phases):
        raise ValueError(
            f"a kernel performs at most {OPERATIONS} operations in {PHASES} phases, got {sum(map(len, phases))} in "
            f"{len(phases)}"
        )
    found = FlagOps(len(phases))
    end = 0
    for number, phase in enumerate(phases):
        for op in phase:
            kind = WAIT if op.wait else WRITE_DOUBLE if op.double else WRITE
            found.operations[end] = _Operation(op.address, op.value, kind)
            end += 1
        found.ends[number] = end
    return found
