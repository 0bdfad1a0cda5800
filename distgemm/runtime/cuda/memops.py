"""What the runtime puts on streams besides kernels: waits for flags, writes of flags, copies of boxes.

CUDA graphs capture all of it as memory operations and memcpy nodes, which occupy no SM.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from cuda.bindings import driver, runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.flags import MemOp
from distgemm.gemm.launches import MovableLaunch, address_cells

__all__ = [
    "FlagOpsLaunch",
    "RowsCopy",
    "clear",
    "copies_of",
    "copy_box",
    "mem_ops",
    "rows_of",
    "wait_for",
    "write",
]

MAX_BATCH_OPS = 255
"""Memory operations that CUDA takes in one call."""


def wait_for(address: int, value: int = 1) -> MemOp:
    """A wait until the flag at an address equals the value."""
    return MemOp(True, address, value)


def write(address: int, value: int = 1) -> MemOp:
    """A write of the flag at an address, once all that is before it on the stream is visible to all GPUs."""
    return MemOp(False, address, value)


def clear(addresses: Iterable[int]) -> list[MemOp]:
    """Writes of 0 to flags and to their neighbours in the same 8 bytes: each write takes 0.7 us, whatever its size."""
    return [MemOp(False, address, 0, double=True) for address in sorted({address & -8 for address in addresses})]


def mem_ops(ops: Sequence[MemOp], stream: int) -> None:
    """Put memory operations on a stream, in this order."""
    for start in range(0, len(ops), MAX_BATCH_OPS):
        part = ops[start : start + MAX_BATCH_OPS]
        raise_on(driver.cuStreamBatchMemOp(stream, len(part), [_parameters(op) for op in part], 0))


def _parameters(op: MemOp) -> driver.CUstreamBatchMemOpParams:
    kinds = driver.CUstreamBatchMemOpType
    found = driver.CUstreamBatchMemOpParams()
    if op.wait:
        kind = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    else:
        kind = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64 if op.double else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    found.operation = kind
    fields = found.waitValue if op.wait else found.writeValue
    fields.operation = kind
    fields.address = driver.CUdeviceptr(op.address)
    if op.double:
        fields.value64 = driver.cuuint64_t(op.value)
    else:
        fields.value = driver.cuuint32_t(op.value)
    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    fields.flags = int(flags) if op.wait else int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    return found


def copy_box(target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """target = source by a copy engine; both are (l, rows, columns) of one dtype, with contiguous rows."""
    for copy in copies_of(target, source):
        copy(stream)


def copies_of(target: torch.Tensor, source: torch.Tensor) -> list[RowsCopy]:
    """The copies of which :func:`copy_box` consists. They do not keep the tensors alive."""
    return [RowsCopy(to, of) for to, of in rows_of(target, source)]


class _Places(ctypes.Structure):
    _fields_ = (("target", ctypes.c_uint64), ("source", ctypes.c_uint64))


class RowsCopy(MovableLaunch):
    """A copy of a matrix by a copy engine. Only a copy of contiguous bytes can move.

    Args:
        target: (rows, columns), with contiguous rows.
        source: as ``target``, of the same dtype.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.rows, columns = target.shape
        size = target.element_size()
        self.width = columns * size
        self.pitches = [max(x.stride(0) * size, self.width) for x in (target, source)]
        self.movable = self.rows == 1 or self.pitches == [self.width, self.width]
        self._places = _Places(target.data_ptr(), source.data_ptr())

    def __call__(self, stream: int | None = None) -> None:
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        at, (to, of), width, rows = self._places, self.pitches, self.width, self.rows
        if self.movable:
            raise_on(runtime.cudaMemcpyAsync(at.target, at.source, rows * width, kind, stream))
        else:
            raise_on(runtime.cudaMemcpy2DAsync(at.target, to, at.source, of, width, rows, kind, stream))

    def cells(self) -> list[ctypes.c_uint64]:
        return address_cells(self._places)

    def update(self, graph: int, node: int) -> None:
        kind, at = runtime.cudaMemcpyKind.cudaMemcpyDefault, self._places
        raise_on(
            runtime.cudaGraphExecMemcpyNodeSetParams1D(graph, node, at.target, at.source, self.rows * self.width, kind)
        )


class FlagOpsLaunch(MovableLaunch):
    """Memory operations on flags, which lie in the workspace and never move.

    Args:
        ops: the operations, in order.
    """

    def __init__(self, ops: Sequence[MemOp]) -> None:
        self.ops = ops

    def __call__(self, stream: int | None = None) -> None:
        assert stream is not None
        mem_ops(self.ops, stream)


def rows_of(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of matrices (rows, columns) to copy: one for each batch, or one where rows of batches follow each other."""
    if target.numel() == 0:
        return []
    joined = [_joined(target), _joined(source)]
    if joined[0] is not None and joined[1] is not None:
        return [(joined[0], joined[1])]
    return list(zip(target.unbind(0), source.unbind(0), strict=True))


def _joined(tensor: torch.Tensor) -> torch.Tensor | None:
    batches, rows, columns = tensor.shape
    if batches == 1:
        return tensor[0]
    if tensor.stride(0) == rows * tensor.stride(1):
        return tensor.as_strided((batches * rows, columns), (tensor.stride(1), 1))
    return None
