"""Compiled kernel libraries in this process. Each is opened once, and loaded on a device before the first launch."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from distgemm.gemm.nvcc import KernelSource, library

__all__ = ["Library", "open_library"]


class Library:
    """An opened kernel library.

    Attributes:
        name: the kernel's name.
        functions: the C functions. All libraries have ``distgemm_load`` and ``distgemm_launch``, which return a
            cudaError_t, ``distgemm_arguments_size`` and ``distgemm_error_string``.

    Raises:
        RuntimeError: if it was compiled for another struct than ``arguments``.
    """

    def __init__(self, source: KernelSource, arguments: type[ctypes.Structure]) -> None:
        self.name = source.name
        path = library(source)
        self.functions = ctypes.CDLL(str(path))
        if self.functions.distgemm_arguments_size() != ctypes.sizeof(arguments):
            raise RuntimeError(f"{path} was compiled for other arguments than this version passes")
        self.functions.distgemm_error_string.restype = ctypes.c_char_p
        self._devices: set[int] = set()
        self._lock = threading.Lock()

    def load_on(self, device: int) -> None:
        """Load the kernel on a device. A first launch could not: it may be captured, or follow a kernel that waits."""
        if device in self._devices:
            return
        with self._lock, torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context current
            self.check(self.functions.distgemm_load(), "load")
            self._devices.add(device)

    def check(self, error: int, what: str) -> None:
        """Raise RuntimeError for a cudaError_t that is not success."""
        if error:
            message = self.functions.distgemm_error_string(error).decode()
            raise RuntimeError(f"CUDA could not {what} kernel {self.name}: {message} (error {error})")


@functools.cache
def open_library(source: KernelSource, arguments: type[ctypes.Structure]) -> Library:
    """The library of a source, compiled if need be. The same source gives the same object."""
    return Library(source, arguments)
