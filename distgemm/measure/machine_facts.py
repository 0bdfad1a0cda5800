"""Facts of this machine: its GPUs, its driver, torch, CUTLASS, the compiler and the cache of kernels."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "NO_MULTICAST",
    "QUEUES",
    "Facts",
    "Gpu",
    "driver_facts",
    "look",
    "parse_nvlinks",
    "program_output",
    "supports_multicast",
]

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables, and values of them, with which NCCL and torch's symmetric memory do not use multicast."""

PROGRAM_TIMEOUT_S = 20.0
"""Time in which another program must answer."""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: its name.
        capability: major and minor number of its compute capability.
        memory: bytes.
        mem_ops: error of waits and writes on a stream; "" if they work.
        multicast: whether it supports NVLink multicast.
        nvlinks: number of active links; None if it is not known.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    mem_ops: str = ""
    multicast: bool = False
    nvlinks: int | None = None


@dataclass(frozen=True)
class Facts:
    """Facts of a machine. A text whose name ends in ``_error`` is empty if there was no error.

    Attributes:
        torch: its version; None if it cannot be imported, for the reason in ``torch_error``.
        torch_error: why torch cannot be imported.
        torch_cuda: CUDA version that torch is built for; None if it is built for the CPU.
        gpus: all GPUs that torch finds.
        gpu_error: torch's error when it was asked for GPUs.
        driver: version of the driver.
        driver_cuda: newest CUDA version that the driver serves.
        no_peer: pairs of GPUs; the first one cannot reach the memory of the second.
        gloo: whether torch has gloo.
        nccl: version of NCCL; None if torch has none.
        symmetric_error: why torch's symmetric memory cannot be used.
        cutlass: version of the wheel nvidia-cutlass.
        include: folder of CUTLASS's headers.
        cutlass_error: why there are no headers.
        nvcc: path of nvcc.
        nvcc_version: what nvcc prints about itself.
        nvcc_error: why there is no nvcc.
        gxx: version of g++.
        cache: cache folder.
        cache_error: why nothing can be written there.
        kernels: number of compiled kernels in the cache that this machine can load.
        broken: number of incomplete kernels in the cache.
        pack: the pack of kernels that this machine can load; None if there is none.
        packed: number of kernels in the pack.
        pack_error: why the pack that is installed is not used.
        environment: variables that matter.
    """

    torch: str | None = None
    torch_error: str = ""
    torch_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    driver: str | None = None
    driver_cuda: str | None = None
    no_peer: tuple[tuple[int, int], ...] = ()
    gloo: bool = False
    nccl: str | None = None
    symmetric_error: str = ""
    cutlass: str | None = None
    include: str | None = None
    cutlass_error: str = ""
    nvcc: str | None = None
    nvcc_version: str | None = None
    nvcc_error: str = ""
    gxx: str | None = None
    cache: str = ""
    cache_error: str = ""
    kernels: int = 0
    broken: int = 0
    pack: str | None = None
    packed: int = 0
    pack_error: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def look() -> Facts:
    """The facts of this machine. Makes a CUDA context on each GPU."""
    found: dict[str, Any] = {
        "environment": {name: os.environ[name] for name in (QUEUES, *NO_MULTICAST) if name in os.environ}
    }
    for part in (_torch_facts, driver_facts, _compiler_facts, _pack_facts, _cache_facts):
        found |= part()
    return Facts(**found)


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: one of its libraries is not there
        return {"torch_error": _line(error), "symmetric_error": "torch cannot be imported"}
    found: dict[str, Any] = {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    if dist.is_available():
        found["gloo"] = dist.is_gloo_available()
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found["symmetric_error"] = _symmetric_error() if torch.version.cuda else "torch is built for the CPU"
    if not torch.version.cuda:
        return found
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        numbers = range(torch.cuda.device_count())
        links = _nvlinks([str(torch.cuda.get_device_properties(at).uuid) for at in numbers])
        found["gpus"] = tuple(_gpu(at, links) for at in numbers)
        found["no_peer"] = tuple(
            (one, other)
            for one in numbers
            for other in numbers
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        )
    except RuntimeError as error:
        found["gpu_error"] = _line(error)
    return found


def _symmetric_error() -> str:
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return _line(error)
    absent = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    return f"torch's symmetric memory lacks {', '.join(absent)}" if absent else ""


def _gpu(at: int, links: Mapping[str, int]) -> Gpu:
    import torch

    about = torch.cuda.get_device_properties(at)
    return Gpu(
        name=about.name,
        capability=(about.major, about.minor),
        memory=about.total_memory,
        mem_ops=_mem_ops_error(at),
        multicast=supports_multicast(at),
        nvlinks=links.get(str(about.uuid)),
    )


def supports_multicast(at: int) -> bool:
    """Whether a GPU, given by its number, supports NVLink multicast."""
    from cuda.bindings import driver

    error, device = driver.cuDeviceGet(at)
    if error:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    error, supported = driver.cuDeviceGetAttribute(attribute, device)
    return not error and bool(supported)


def _mem_ops_error(at: int) -> str:
    """The error of a write and a wait for it on one stream; "" without one."""
    import torch

    from distgemm.gemm.streams import new_stream
    from distgemm.runtime.cuda.memops import mem_ops, wait_for, write

    device = torch.device("cuda", at)
    try:
        with torch.cuda.device(device):
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)
            stream = new_stream(device)
            mem_ops([write(flag.data_ptr()), wait_for(flag.data_ptr())], stream.cuda_stream)
            stream.synchronize()
            return "" if flag.item() == 1 else f"a write of 1 left {flag.item()}"
    except RuntimeError as error:
        return _line(error)


def _nvlinks(uuids: list[str]) -> dict[str, int]:
    """Number of active links by the GPU's uuid without "GPU-"; empty if no program knows."""
    found: dict[str, int] = {}
    if not uuids:
        return found
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return parse_nvlinks(program_output("nvidia-smi", "nvlink", "--status") or "")
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for uuid in uuids:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            found[uuid] = sum(_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
        nvml.nvmlShutdown()
    return found


def _active(nvml: Any, handle: object, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False  # no such link on this GPU


def parse_nvlinks(status: str) -> dict[str, int]:
    """Number of active links by the GPU's uuid, from the output of ``nvidia-smi nvlink --status``."""
    found = {}
    for block in re.split(r"^(?=GPU \d+:)", status, flags=re.M):
        if uuid := re.match(r"GPU \d+:.*\(UUID: GPU-([^)]+)\)", block):
            found[uuid[1]] = len(re.findall(r"^\s*Link \d+: [\d.]+ GB/s", block, re.M))
    return found


def driver_facts() -> dict[str, Any]:
    """The fields ``driver`` and ``driver_cuda`` of :class:`Facts`, as far as they are known."""
    from distgemm.gemm.nvcc import driver_cuda

    found: dict[str, Any] = {}
    try:
        module = Path("/proc/driver/nvidia/version").read_text()
        if number := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", module):
            found["driver"] = number[1]
    except OSError:
        if output := program_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
            found["driver"] = output.split()[0]
    found["driver_cuda"] = driver_cuda()
    return found


def _compiler_facts() -> dict[str, Any]:
    from distgemm.gemm.nvcc import CompilerNotFoundError, compiler_version, cutlass_include, find_nvcc

    found: dict[str, Any] = {}
    try:
        found["cutlass"] = importlib.metadata.version("nvidia-cutlass")
        found["include"] = str(cutlass_include())
    except (CompilerNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        found["cutlass_error"] = _line(error)
    try:
        nvcc = find_nvcc()
        if nvcc is not None:
            found |= {"nvcc": str(nvcc), "nvcc_version": compiler_version(nvcc)}
    except CompilerNotFoundError as error:
        found["nvcc_error"] = _line(error)
    if output := program_output("g++", "-dumpfullversion", "-dumpversion"):
        found["gxx"] = output.strip()
    return found


def _pack_facts() -> dict[str, Any]:
    from distgemm.gemm.nvcc import usable_pack

    pack, why = usable_pack()
    return {"pack": str(pack), "packed": len(pack.cubins)} if pack else {"pack_error": why}


def _cache_facts() -> dict[str, Any]:
    from distgemm.gemm.nvcc import CacheError, cache_dir, cached, works_here
    from distgemm.system import unsafe

    try:
        folder = cache_dir()
    except CacheError as error:
        return {"cache_error": str(error)}
    manifests = [manifest for _, manifest in cached()]
    kernels = folder / "kernels"
    there = next(path for path in (kernels, *kernels.absolute().parents) if os.path.exists(path))
    problem = "" if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
    if not problem and there == kernels:
        problem = unsafe(kernels)
    return {
        "cache": str(folder),
        "cache_error": problem,
        "kernels": sum(manifest is not None and works_here(manifest) for manifest in manifests),
        "broken": manifests.count(None),
    }


def program_output(*command: str) -> str | None:
    """The standard output of a program; None if it does not exist, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
