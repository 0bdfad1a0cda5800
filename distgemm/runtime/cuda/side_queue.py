"""Copies and writes of flags beside streams that wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver

from distgemm.gemm.cuda_errors import raise_on
from distgemm.runtime.cuda.memops import mem_ops, write

__all__ = ["SideQueue"]


class SideQueue:
    """A stream for copies between host and GPU and for writes of flags. It launches no kernel.

    Kernels need a free hardware queue and free SMs, which calls that wait may hold. A copy between host and GPU needs
    neither, unless it follows a copy in the other direction on its stream. So callers wait before they change the
    direction. Writes of flags need a free hardware queue.

    A context of its own has hardware queues of its own, and its copies end where those of the process's context are
    held back. It takes about a second to create, and some hundred MiB of the GPU.

    Args:
        device: the GPU.
        own_context: whether it has a CUDA context of its own.

    Raises:
        RuntimeError: CUDA cannot create it.
    """

    def __init__(self, device: torch.device, *, own_context: bool = False) -> None:
        (number,) = raise_on(driver.cuDeviceGet(device.index or 0))
        if own_context:
            self._context = _new_context(number)
        else:
            (self._context,) = raise_on(driver.cuDevicePrimaryCtxRetain(number))
        with self._current():
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            (self._stream,) = raise_on(driver.cuStreamCreate(flags))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make its context current in this thread."""
        raise_on(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            raise_on(driver.cuCtxPopCurrent())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target = source; both are contiguous, of as many bytes, and one of them is in pinned host memory."""
        size = source.numel() * source.element_size()
        with self._current():
            raise_on(driver.cuMemcpyAsync(target.data_ptr(), source.data_ptr(), size, self._stream))

    def set_flags(self, addresses: Iterable[int], value: int) -> None:
        """Write a value to flags."""
        with self._current():
            mem_ops([write(address, value) for address in addresses], int(self._stream))

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether all that was put on it has ended, at the latest after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            with self._current():
                (error,) = driver.cuStreamQuery(self._stream)
            if error != driver.CUresult.CUDA_ERROR_NOT_READY:
                raise_on((error,))
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)


def _new_context(device: Any) -> Any:
    """A new context, which is not current in this thread."""
    try:
        (context,) = raise_on(driver.cuCtxCreate(None, 0, device))
    except TypeError:  # cuda.bindings 12 has no first argument
        (context,) = raise_on(driver.cuCtxCreate(0, device))
    raise_on(driver.cuCtxPopCurrent())
    return context
