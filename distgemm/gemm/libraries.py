"""Compiled kernel libraries in this process: loaded once, their kernels on each device ahead of the first launch."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from distgemm.gemm.nvcc import KernelSource, library

__all__ = ["Library", "open_library"]


class Library:
    """A library with the functions that all of them have.

    functions: the library: ``distgemm_launch``, which returns a cudaError_t, and what else it has

    Raises RuntimeError where it was compiled for other arguments than ``arguments``.
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
        """Loads the kernel on a device: its first launch may be captured, or stand behind a kernel that waits."""
        if device in self._devices:
            return
        with self._lock, torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context current
            self.check(self.functions.distgemm_load(), "load")
            self._devices.add(device)

    def check(self, error: int, what: str) -> None:
        """Raises RuntimeError for a cudaError_t that is not success."""
        if error:
            said = self.functions.distgemm_error_string(error).decode()
            raise RuntimeError(f"CUDA could not {what} kernel {self.name}: {said} (error {error})")


@functools.cache
def open_library(source: KernelSource, arguments: type[ctypes.Structure]) -> Library:
    """The library of a source, compiled where it is not; the same object for the same source."""
    return Library(source, arguments)
