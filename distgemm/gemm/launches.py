"""Launches that can go on with other tensors once they are nodes of a CUDA graph.

A graph keeps a copy of each kernel's parameter. It changes through the struct from which the parameter was made: the
caller writes other addresses into the struct, and the node takes the new parameter.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.provider import GemmTensors, Launch

if TYPE_CHECKING:
    from distgemm.gemm.cubins import Cubin

__all__ = ["FixedLaunch", "KernelLaunch", "KernelNode", "MovableLaunch", "StructsLaunch", "address_cells"]


class MovableLaunch(ABC):
    """A launch whose node in a graph can go on with other addresses.

    Attributes:
        movable: whether it can. If not, or if it puts several nodes into a graph, the graph serves one set of tensors.
    """

    movable: bool = True

    @abstractmethod
    def __call__(self, stream: int | None = None) -> None:
        """Put it on a stream, captured or not. None: the current stream."""

    def cells(self) -> list[ctypes.c_uint64]:
        """The places, in host memory, of all addresses of tensors that it was made with; empty: of none."""
        return []

    def update(self, graph: int, node: int) -> None:
        """Let its node go on with the addresses that the cells hold now.

        Args:
            graph: a cudaGraphExec_t. Launches of the graph that are under way do not change.
            node: the cudaGraphNode_t in the graph from which it was made.
        """
        raise NotImplementedError(f"{type(self).__name__} has no addresses that change")

    def forget(self) -> None:  # noqa: B027  (most launches keep no tensors alive)
        """Keep the tensors alive no longer: the caller knows that they are."""


class FixedLaunch(MovableLaunch):
    """A launch that a provider made, of whose nodes nothing is known.

    Args:
        launch: the launch.
        tensors: those that it reads and writes.
    """

    movable = False

    def __init__(self, launch: Launch, tensors: GemmTensors) -> None:
        self._launch = launch
        given = (getattr(tensors, field.name) for field in fields(tensors))
        self._addresses = [tensor.data_ptr() for tensor in given if isinstance(tensor, torch.Tensor)]

    def __call__(self, stream: int | None = None) -> None:
        self._launch(stream)

    def cells(self) -> list[ctypes.c_uint64]:
        return [*map(ctypes.c_uint64, self._addresses)]


class KernelLaunch(MovableLaunch):
    """A launch of a kernel whose only parameter is a struct in host memory."""

    _node: KernelNode | None = None

    @property
    @abstractmethod
    def parameter(self) -> int:
        """Address of the parameter, for the addresses that the cells hold now."""

    def update(self, graph: int, node: int) -> None:
        if self._node is None:
            self._node = KernelNode(node)
        self._node.update(graph, self.parameter)


class StructsLaunch(MovableLaunch):
    """A kernel, launched once for each of several structs, which never change.

    Args:
        cubin: the kernel.
        structs: its parameters.
        blocks: thread blocks of each launch.
        device: the device, on whose current stream it is launched if none is given.
    """

    def __init__(self, cubin: Cubin, structs: Sequence[ctypes.Structure], blocks: int, device: int) -> None:
        self._device, self._structs = device, structs  # launches read the structs
        self._launches = [cubin.launcher(device, (blocks, 1, 1), ctypes.addressof(each)) for each in structs]

    def __call__(self, stream: int | None = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        for launch in self._launches:
            launch(stream)


class KernelNode:
    """A kernel's node in a graph.

    Args:
        node: a cudaGraphNode_t.
    """

    def __init__(self, node: int) -> None:
        self._node = driver.CUgraphNode(node)
        (self._params,) = raise_on(driver.cuGraphKernelNodeGetParams(self._node))
        self._pointer = ctypes.c_void_p()
        self._params.kernelParams = ctypes.addressof(self._pointer)

    def update(self, graph: int, parameter: int) -> None:
        """Let it go on with the parameter at an address; the parameter is copied."""
        self._pointer.value = parameter
        raise_on(driver.cuGraphExecKernelNodeSetParams(driver.CUgraphExec(graph), self._node, self._params))


def address_cells(struct: ctypes.Structure) -> list[ctypes.c_uint64]:
    """The fields of a struct that hold addresses: those of type ``c_void_p`` and ``c_uint64``."""
    return [ctypes.c_uint64.from_address(address) for address in _addresses(type(struct), ctypes.addressof(struct))]


def _addresses(kind: Any, at: int) -> Iterator[int]:
    if kind in (ctypes.c_void_p, ctypes.c_uint64):
        yield at
    elif issubclass(kind, ctypes.Array):
        size = ctypes.sizeof(kind._type_)
        for number in range(kind._length_):
            yield from _addresses(kind._type_, at + number * size)
    elif issubclass(kind, ctypes.Structure):
        for name, field, *_ in kind._fields_:
            yield from _addresses(field, at + getattr(kind, name).offset)
