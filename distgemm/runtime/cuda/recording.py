"""Recorded calls: CUDA graphs of a call, which go on with other tensors of the same layout."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.launches import MovableLaunch

__all__ = ["CallLayout", "Recording", "captured_node", "layout_of"]

ALIGNMENT = 16
"""Kernels are selected by the alignment of addresses, up to these bytes."""


class CallLayout(NamedTuple):
    """What two calls have in common that one graph can serve, and where the tensors of one of them lie.

    Attributes:
        key: all that a call is checked for, except gradients: kinds of its tensors, alignment, and its numbers.
        addresses: of the tensors; 0 for those that are not given.
        disjoint: whether no two tensors share bytes. Otherwise an address does not say whose it is.
    """

    key: LayoutKey
    addresses: tuple[int, ...]
    disjoint: bool


class LayoutKey:
    """A key that is hashed once: calls look it up several times.

    Attributes:
        kinds: the numbers of the call; and for each tensor its kind, or None if it is not given.
        sizes: bytes that each tensor spans.
        given: numbers of the tensors that span bytes.
    """

    __slots__ = ("_hash", "given", "kinds", "sizes")

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.kinds, self._hash = kinds, hash(kinds)
        self.sizes = tuple(_bytes_spanned(*kind[1:4]) if isinstance(kind, tuple) else 0 for kind in kinds[2:])
        self.given = tuple(number for number, size in enumerate(self.sizes) if size)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LayoutKey) and self.kinds == other.kinds)


_layout_key = functools.lru_cache(maxsize=4096)(LayoutKey)


def layout_of(tensors: Sequence[torch.Tensor | None], alpha: float, beta: float) -> CallLayout:
    """The layout of a call with these tensors and numbers."""
    kinds: list[Any] = [float(alpha), float(beta)]
    addresses = []
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
            addresses.append(0)
        elif isinstance(tensor, torch.Tensor):
            address, shape, strides, dtype = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            kinds.append((type(tensor), shape, strides, dtype, tensor.device, tensor.is_neg(), address % ALIGNMENT))
            addresses.append(address)
        else:  # the call is refused
            kinds.append(id(tensor))
            addresses.append(0)
    key = _layout_key(tuple(kinds))
    end, disjoint = 0, True
    sizes = key.sizes
    for address, number in sorted([(addresses[number], number) for number in key.given]):
        disjoint = disjoint and address >= end
        end = max(end, address + sizes[number])
    return CallLayout(key, tuple(addresses), disjoint)


def _bytes_spanned(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> int:
    if not all(shape):
        return 0
    return (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * dtype.itemsize


class _Move(NamedTuple):
    """A launch with addresses of the caller's tensors."""

    launch: MovableLaunch
    node: int
    places: list[tuple[ctypes.c_uint64, int, int]]  # cell, number of the tensor, bytes behind its start


class Recording:
    """A call as a CUDA graph, for one buffer of the workspace.

    Args:
        graph: the captured graph, with ``keep_graph=True``.
        nodes: the launches in it, each with its node.
        layout: of the call.

    Attributes:
        graph: as given.
        addresses: of the tensors that the next replay reads and writes.
        movable: whether it can go on with other tensors of this layout.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, nodes: Sequence[tuple[MovableLaunch, int]], layout: CallLayout
    ) -> None:
        self.graph, self.addresses = graph, layout.addresses
        (executable,) = raise_on(runtime.cudaGraphInstantiate(graph.raw_cuda_graph(), 0))
        self._executable = int(executable)
        weakref.finalize(self, runtime.cudaGraphExecDestroy, executable)
        sizes = layout.key.sizes
        spans = [(number, at := layout.addresses[number], at + sizes[number]) for number in layout.key.given]
        self._moves = []
        for launch, node in nodes:
            launch.forget()
            places = [
                (cell, number, cell.value - start)
                for cell in launch.cells()
                for number, start, end in spans
                if start <= cell.value < end
            ]
            if places:
                self._moves.append(_Move(launch, node, places))
        self.movable = layout.disjoint and all(move.launch.movable for move in self._moves)
        if not self.movable:
            self._moves.clear()  # launches of cuBLAS would keep their tensors alive

    def move(self, addresses: tuple[int, ...]) -> None:
        """Go on with tensors at other addresses. Replays that are under way do not change.

        Raises:
            RuntimeError: if it is not movable, or if CUDA refuses.
        """
        if not self.movable:
            raise RuntimeError("this graph serves one set of tensors")
        for launch, node, places in self._moves:
            for cell, number, offset in places:
                cell.value = addresses[number] + offset
            launch.update(self._executable, node)
        self.addresses = addresses

    def replay(self, stream: int) -> None:
        """Launch the graph on a stream."""
        raise_on(runtime.cudaGraphLaunch(self._executable, stream))


def captured_node(stream: int) -> int:
    """The node that was captured last on a stream.

    Raises:
        RuntimeError: if the last launch captured several nodes that nothing follows, or none.
    """
    found = raise_on(runtime.cudaStreamGetCaptureInfo(stream))
    nodes = found[3]
    if len(nodes) != 1:
        raise RuntimeError(f"a launch captures one node behind all others, got {len(nodes)}")
    return int(nodes[0])
