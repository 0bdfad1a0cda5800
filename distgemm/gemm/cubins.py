"""Compiled kernels in this process: read from their files, and loaded on a device before a launch.

A cubin has no host code. It contains a table of facts that the host must know of its kernel, see
``kernels/facts.cuh``. So what CUTLASS's templates decide is written down nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from cuda.bindings import driver, runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.driver import EARLY, LaunchConfig, error_text, libcuda
from distgemm.gemm.nvcc import KernelSource, cubin_path
from distgemm.system import read_regular

__all__ = ["Cubin", "Fact", "open_cubin", "read_facts"]

FACTS = "_ZN8distgemm5factsE"
"""The symbol of the table in ``kernels/facts.cuh``."""
_FACT = struct.Struct("<52s3I")
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
INVALID_CONTEXT = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
SYMBOLS = 2
"""The type of the section that has an ELF file's symbols."""


class Fact(NamedTuple):
    """A number, or a field of a kernel's parameter.

    Attributes:
        offset: of the field, in bytes.
        size: of the field, in bytes; 0: this is a number.
        value: the number, or what the field always holds.
    """

    offset: int
    size: int
    value: int


def read_facts(image: bytes) -> dict[str, Fact]:
    """The facts of a cubin, by their names.

    Raises:
        ValueError: if it has none, or is no cubin.
    """
    try:
        table = _contents(image, FACTS)
        found = {name.rstrip(b"\0").decode(): Fact(*numbers) for name, *numbers in _FACT.iter_unpack(table)}
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"this is no cubin with facts about its kernel: {error}") from error
    found.pop("", None)
    return found


def _contents(image: bytes, name: str) -> bytes:
    """What a variable of an ELF file holds at first."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [_SECTION.unpack_from(image, start + number * size) for number in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != SYMBOLS:
            continue
        names = sections[link][4]
        for at, _, _, section, value, extent in _SYMBOL.iter_unpack(image[offset : offset + length]):
            if image.startswith(name.encode() + b"\0", names + at):
                begin = sections[section][4] + value
                return image[begin : begin + extent]
    raise ValueError(f"this is no cubin with facts about its kernel: it has no {name}")


class Cubin:
    """A kernel that was compiled for a GPU alone.

    Attributes:
        name: the source's name.
        facts: about the kernel.

    Raises:
        ValueError: if the file has no facts.
    """

    def __init__(self, source: KernelSource) -> None:
        self.name, self._entry = source.name, source.entry
        self._image = read_regular(cubin_path(source))
        self.facts = read_facts(self._image)
        self.threads, self.shared_bytes = self.number("threads"), self.number("shared_bytes")
        self._waits = "begins_early" in self.facts and bool(self.number("begins_early"))
        self._functions: dict[int, int] = {}
        self._max_clusters: dict[int, int] = {}
        self._lock = threading.Lock()

    def number(self, name: str) -> int:
        """The value of a fact."""
        return self.facts[name].value

    def load_on(self, device: int) -> int:
        """Load the kernel on a device. A first launch could not: it may be captured, or follow a kernel that waits.

        Returns:
            The CUfunction.

        Raises:
            RuntimeError: if the driver does not load it.
        """
        if device not in self._functions:
            with self._lock, torch.cuda.device(device):
                if device not in self._functions:
                    raise_on(runtime.cudaSetDevice(device))  # torch does not if the device is the default one
                    self._functions[device] = self._load()
        return self._functions[device]

    def _load(self) -> int:
        try:
            (module,) = raise_on(driver.cuModuleLoadData(self._image))  # never unloaded: graphs may hold the kernel
            # This loads the kernel, also with lazy loading.
            (function,) = raise_on(driver.cuModuleGetFunction(module, self._entry.encode()))
            if self.shared_bytes:
                size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                raise_on(driver.cuFuncSetAttribute(function, size, self.shared_bytes))
        except RuntimeError as error:
            raise RuntimeError(f"CUDA could not load kernel {self.name}: {error}") from error
        return int(function)

    def max_clusters(self, device: int, cluster: tuple[int, int]) -> int:
        """Clusters of the kernel that a device holds at once. GPUs of one kind differ in it: they lack other SMs.

        Args:
            device: the device; the kernel is loaded there.
            cluster: the thread blocks of a cluster, as the kernel was compiled.

        Raises:
            RuntimeError: if the driver does not say it.
        """
        if device not in self._max_clusters:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = *cluster, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
            config.sharedMemBytes = self.shared_bytes
            function = driver.CUfunction(self.load_on(device))
            with torch.cuda.device(device):
                (self._max_clusters[device],) = raise_on(driver.cuOccupancyMaxActiveClusters(function, config))
        return self._max_clusters[device]

    def launcher(
        self, device: int, grid: tuple[int, int, int], parameter: int, begins_early: bool = False
    ) -> Callable[[int], None]:
        """A function that launches the kernel on a stream.

        Args:
            device: the device; the kernel is loaded there.
            grid: thread blocks along each dimension.
            parameter: address of the kernel's only parameter. A launch copies it.
            begins_early: whether it may begin while the kernel before it on the stream ends. A kernel that does not
                wait for that one itself never does.

        Raises:
            RuntimeError: the function, if the driver refuses the launch.
        """
        launch, function = libcuda().cuLaunchKernelEx, self.load_on(device)
        pointers = (ctypes.c_void_p * 1)(parameter)
        attributes = (ctypes.addressof(EARLY), 1) if begins_early and self._waits else (None, 0)
        configs: dict[int, tuple[LaunchConfig, int]] = {}  # one for each stream: threads may launch at the same time

        def on(stream: int) -> None:
            if (config := configs.get(stream)) is None:
                made = LaunchConfig(grid, (self.threads, 1, 1), self.shared_bytes, stream, *attributes)
                config = configs[stream] = made, ctypes.addressof(made)
            error = launch(config[1], function, pointers, None)
            if error == INVALID_CONTEXT and _make_current(device):
                error = launch(config[1], function, pointers, None)
            if error:
                raise RuntimeError(f"CUDA could not launch kernel {self.name}: {error_text(error)}")

        return on


def _make_current(device: int) -> bool:
    """Make a device's context current if this thread has none. Returns whether it had none."""
    (context,) = raise_on(driver.cuCtxGetCurrent())
    if int(context):
        return False
    raise_on(runtime.cudaSetDevice(device))
    return True


@functools.cache
def open_cubin(source: KernelSource, parameter: type[ctypes.Structure] | None = None) -> Cubin:
    """The cubin of a source, compiled if need be. The same source gives the same object.

    Args:
        source: the source.
        parameter: the struct that is the kernel's parameter, if it always is the same one.

    Raises:
        RuntimeError: if the kernel was compiled for another struct.
    """
    found = Cubin(source)
    if parameter is not None and found.number("size") != ctypes.sizeof(parameter):
        raise RuntimeError(f"{cubin_path(source)} was compiled for another parameter than this version passes")
    return found
