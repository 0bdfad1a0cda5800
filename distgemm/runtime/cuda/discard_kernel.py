"""A kernel behind the messages of an exchange, which makes them NaN if this rank has aborted messages.

What a message leaves that was aborted is not defined. NCCL's protocol for short messages ("LL") ends a wait for data by
storing what its buffer has: the data of an older message. So whatever is received behind an abort is discarded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.launches import StructsLaunch
from distgemm.gemm.nvcc import KernelSource

__all__ = ["DiscardArguments", "bind_discard", "discard_source"]

MESSAGES = 64
"""Messages of one kernel at most."""
BLOCKS = 32
"""Thread blocks. Usually each of them reads a flag, and that is all."""


class _Message(ctypes.Structure):
    """struct Message of discard.cu."""

    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class DiscardArguments(ctypes.Structure):
    """struct Params of discard.cu."""

    _fields_ = (("aborted", ctypes.c_uint64), ("count", ctypes.c_uint64), ("messages", _Message * MESSAGES))


def discard_source() -> KernelSource:
    """What the kernel is compiled from."""
    return KernelSource("discard", (), CutlassProvider().arch, "discard.cu", ("facts.cuh",))


def bind_discard(aborted: int, received: Sequence[Tensor], device: int) -> StructsLaunch:
    """A launch of the kernel.

    Args:
        aborted: address of the flag that says whether messages were aborted.
        received: contiguous memory of each message, which stays where it is.
        device: this rank's GPU.
    """
    messages = [_Message(memory.data_ptr(), memory.nbytes) for memory in received]
    parts = [messages[start : start + MESSAGES] for start in range(0, len(messages), MESSAGES)]
    structs = [DiscardArguments(aborted, len(part), (_Message * MESSAGES)(*part)) for part in parts]
    return StructsLaunch(open_cubin(discard_source(), DiscardArguments), structs, BLOCKS, device)
