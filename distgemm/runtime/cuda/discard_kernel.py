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
from distgemm.gemm.launches import MovableLaunch
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


class DiscardLaunch(MovableLaunch):
    """The kernel with its messages. Calling it with a stream launches it there."""

    def __init__(self, aborted: int, received: Sequence[Tensor], device: int) -> None:
        cubin = open_cubin(discard_source(), DiscardArguments)
        parts = [received[start : start + MESSAGES] for start in range(0, len(received), MESSAGES)]
        self._arguments = [
            DiscardArguments(
                aborted, len(part), (_Message * MESSAGES)(*(_Message(one.data_ptr(), one.nbytes) for one in part))
            )
            for part in parts
        ]
        addresses = map(ctypes.addressof, self._arguments)
        self._launches = [cubin.launcher(device, (BLOCKS, 1, 1), address) for address in addresses]

    def __call__(self, stream: int | None = None) -> None:
        assert stream is not None
        for launch in self._launches:
            launch(stream)


def bind_discard(aborted: int, received: Sequence[Tensor], device: int) -> DiscardLaunch:
    """A launch of the kernel.

    Args:
        aborted: address of the flag that says whether messages were aborted.
        received: contiguous memory of each message, which stays where it is.
        device: this rank's GPU.
    """
    return DiscardLaunch(aborted, received, device)
