"""What this machine has for each runtime, and what to do about what it lacks.

:func:`look` gathers facts; the checks are functions of facts alone.
"""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from distgemm.cli.common import new_table
from distgemm.gemm.nvcc import CompilerNotFoundError, cache_dir, cached, cutlass_include, find_nvcc

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["REQUIRABLE", "Check", "Facts", "Gpu", "checks", "look", "runtimes", "table", "unsatisfied"]

OK, FIX, NOTE = "ok", "fix", "note"
"""Statuses: as it should be; something is to be done; to be known, and neither good nor bad."""

TORCH = (2, 11)
CAPABILITY = (8, 0)
"""The oldest torch and the oldest GPU that kernels and the CUDA runtime are for."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""What keeps NCCL and torch's symmetric memory from using multicast."""

PATIENCE = 20.0
"""Seconds that another program may take to answer."""

INSTALL_TORCH = "pip install 'torch>=2.11', a build with CUDA (https://pytorch.org/get-started)"
INSTALL_NVCC = "pip install 'distgemm[nvcc]', or install the CUDA toolkit, or set DISTGEMM_NVCC to its path"


class Check(NamedTuple):
    """One line: what was looked at, "ok", "fix" or "note", what was found, and what is to be done."""

    name: str
    status: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    memory:    bytes
    mem_ops:   what came of waits and writes on a stream: "" if they work, else the error
    multicast: whether it supports NVLink multicast
    nvlinks:   active links; None: not known
    """

    name: str
    capability: tuple[int, int]
    memory: int
    mem_ops: str = ""
    multicast: bool = False
    nvlinks: int | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of this machine. A text that ends in ``_error`` is empty where there was none.

    torch:       its version; None: it cannot be imported, and ``torch_error`` says why
    torch_cuda:  the CUDA version that torch is built for; None: for the CPU
    gpu_error:   what torch said when it was asked for GPUs
    driver:      its version; driver_cuda: the newest CUDA that it serves
    no_peer:     pairs of GPUs of which the first cannot reach the second's memory
    nccl:        its version
    symmetric_error: why torch's symmetric memory cannot be used
    cutlass:     version of the wheel; include: its headers
    nvcc:        path; nvcc_version: what it says
    gxx:         what g++ says of its version
    cache:       folder of kernels; kernels: whole ones in it; broken: others
    environment: variables that matter
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
    environment: Mapping[str, str] = field(default_factory=dict)


# --- checks: of facts alone -----------------------------------------------------------------------------


def check_gpus(facts: Facts) -> Check:
    """Which GPUs there are."""
    if facts.torch is None:
        return Check("GPUs", FIX, "not known without torch", INSTALL_TORCH)
    if not facts.gpus:
        if facts.torch_cuda is None:
            return Check("GPUs", FIX, "torch is built for the CPU and sees none", INSTALL_TORCH)
        why = f": {facts.gpu_error}" if facts.gpu_error else ""
        return Check(
            "GPUs",
            FIX,
            f"none found{why}",
            "run on a machine with NVIDIA GPUs, and unset CUDA_VISIBLE_DEVICES if it is",
        )
    counts: dict[str, int] = {}
    for gpu in facts.gpus:
        what = f"{gpu.name}, compute capability {_dotted(gpu.capability)}, {gpu.memory / 2**30:.0f} GiB"
        counts[what] = counts.get(what, 0) + 1
    detail = "; ".join(f"{count} x {what}" for what, count in counts.items())
    if any(gpu.capability < CAPABILITY for gpu in facts.gpus):
        return Check("GPUs", FIX, detail, f"choose GPUs of compute capability {_dotted(CAPABILITY)} or newer")
    if any(gpu.capability[0] != 9 for gpu in facts.gpus):
        detail += "; kernels with TMA and wgmma are for 9.0 alone, others take plain ones, which are slower"
    return Check("GPUs", OK, detail)


def check_driver(facts: Facts) -> Check:
    """Whether the driver serves the CUDA that torch is built for."""
    if facts.driver is None and facts.driver_cuda is None:
        return Check("driver", FIX, "no NVIDIA driver found", "install NVIDIA's driver, on a machine with its GPUs")
    served = f", for CUDA up to {facts.driver_cuda}" if facts.driver_cuda else ""
    detail = f"{facts.driver or 'of unknown version'}{served}"
    if facts.torch_cuda is None:
        return Check("driver", OK, detail)
    detail += f"; torch is built for CUDA {facts.torch_cuda}"
    # Within a major version, an older driver serves a newer CUDA.
    if facts.driver_cuda and _numbers(facts.driver_cuda)[:1] < _numbers(facts.torch_cuda)[:1]:
        return Check("driver", FIX, detail, f"update the driver, or install a torch built for CUDA {facts.driver_cuda}")
    return Check("driver", OK, detail)


def check_peers(facts: Facts) -> Check:
    """Whether GPUs reach each other's memory."""
    if len(facts.gpus) < 2:
        return Check("peer access", NOTE, "needs two GPUs")
    if facts.no_peer:
        pairs = ", ".join(f"{one} -> {other}" for one, other in facts.no_peer[:4])
        more = f" and {len(facts.no_peer) - 4} more" if len(facts.no_peer) > 4 else ""
        return Check(
            "peer access",
            FIX,
            f"not between all GPUs: {pairs}{more}",
            "choose GPUs that reach each other with CUDA_VISIBLE_DEVICES: nvidia-smi topo -p2p r shows which",
        )
    return Check("peer access", OK, f"between all pairs of {len(facts.gpus)} GPUs")


def check_nvlink(facts: Facts) -> Check:
    """How many links each GPU has."""
    if len(facts.gpus) < 2:
        return Check("NVLink", NOTE, "needs two GPUs")
    links = [gpu.nvlinks for gpu in facts.gpus]
    if None in links:
        return Check("NVLink", NOTE, "not known: neither nvidia-ml-py, where it is installed, nor nvidia-smi says")
    if 0 in links:
        without = [number for number, count in enumerate(links) if not count]
        return Check("NVLink", NOTE, f"no active links on GPUs {without}: copies go over PCIe, which hides little")
    counts = sorted({count for count in links if count is not None})
    return Check("NVLink", OK, f"{' or '.join(map(str, counts))} active links on each GPU")


def check_mem_ops(facts: Facts) -> Check:
    """Whether streams wait for words in memory, and write them: tried on each GPU."""
    name = "stream memory operations"
    if not facts.gpus:
        return Check(name, NOTE, "needs a GPU")
    failed = {number: gpu.mem_ops for number, gpu in enumerate(facts.gpus) if gpu.mem_ops}
    if failed:
        number, error = next(iter(failed.items()))
        return Check(name, FIX, f"GPUs {list(failed)} refuse them: GPU {number} says {error}", "update the driver")
    return Check(name, OK, "a wait and a write ran on every GPU")


def check_torch(facts: Facts) -> Check:
    """Torch's version."""
    if facts.torch is None:
        return Check("torch", FIX, facts.torch_error or "not installed", INSTALL_TORCH)
    built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for the CPU"
    detail = f"{facts.torch}, {built}"
    if _numbers(facts.torch)[:2] < TORCH:
        return Check("torch", FIX, f"{detail}; too old", INSTALL_TORCH)
    return Check("torch", OK, detail)


def check_symmetric(facts: Facts) -> Check:
    """Whether there is memory that all ranks can write."""
    name = "symmetric memory"
    if facts.symmetric_error:
        return Check(name, FIX, facts.symmetric_error, INSTALL_TORCH)
    return Check(name, OK, "torch has it")


def check_nccl(facts: Facts) -> Check:
    """NCCL's version."""
    if facts.nccl is None:
        return Check("NCCL", FIX, "this torch has none", INSTALL_TORCH)
    return Check("NCCL", OK, facts.nccl)


def check_cutlass(facts: Facts) -> Check:
    """The headers that kernels are compiled from."""
    if facts.include is None or facts.cutlass is None:
        return Check("CUTLASS", FIX, facts.cutlass_error or "not installed", "pip install nvidia-cutlass")
    return Check("CUTLASS", OK, f"nvidia-cutlass {facts.cutlass}, headers in {facts.include}")


def check_compiler(facts: Facts) -> Check:
    """What compiles kernels."""
    if facts.nvcc_error:
        return Check("compiler", FIX, facts.nvcc_error, INSTALL_NVCC)
    if facts.nvcc is None:
        return Check("compiler", FIX, "nvcc was not found", INSTALL_NVCC)
    detail = f"{facts.nvcc}, {facts.nvcc_version}"
    if facts.gxx is None:
        return Check("compiler", FIX, f"{detail}, but no g++", "install g++: on Debian and Ubuntu, apt install g++")
    return Check("compiler", OK, f"{detail}; g++ {facts.gxx}")


def check_cache(facts: Facts) -> Check:
    """Where compiled kernels are kept."""
    if facts.cache_error:
        fix = "set DISTGEMM_CACHE_DIR to a folder that can be written"
        return Check("kernel cache", FIX, f"{facts.cache}: {facts.cache_error}", fix)
    broken = f", {facts.broken} damaged, which are compiled again when asked for" if facts.broken else ""
    return Check("kernel cache", OK, f"{facts.cache}: {facts.kernels} kernels{broken}")


def check_queues(facts: Facts) -> Check:
    """How many streams the hardware done_flags apart."""
    text = facts.environment.get(QUEUES)
    if not text:
        return Check(QUEUES, OK, "not set: 8 hardware queues for streams, enough for copies beside two GEMMs")
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        return Check(QUEUES, FIX, f"{text!r}, where CUDA takes 1 to 32", f"unset {QUEUES}")
    if int(text) < 4:
        return Check(
            QUEUES,
            FIX,
            f"{text}: streams share {text} hardware queue{'s' * (text != '1')}, where copies may wait behind GEMMs "
            "instead of running beside them",
            f"unset {QUEUES} (8), unless another library asks for it",
        )
    return Check(QUEUES, OK, f"{text} hardware queues for streams")


def check_multicast(facts: Facts) -> Check:
    """Whether NVLink multicast (NVLS) is on. The CUDA runtime does not use it; NCCL and torch may."""
    if not facts.gpus or not all(gpu.multicast for gpu in facts.gpus):
        return Check("multicast (NVLS)", NOTE, "not supported here; not needed")
    off = [f"{name}={value}" for name, value in NO_MULTICAST.items() if facts.environment.get(name) == value]
    state = f"off, by {' and '.join(off)}" if len(off) == len(NO_MULTICAST) else "on"
    if off and len(off) < len(NO_MULTICAST):
        state = f"off in part, by {off[0]}"
    return Check("multicast (NVLS)", NOTE, f"{state}; the CUDA runtime does without, NCCL and torch may use it")


def checks(facts: Facts) -> list[Check]:
    """All checks, in the order in which they are shown."""
    every = (
        check_gpus,
        check_driver,
        check_peers,
        check_nvlink,
        check_mem_ops,
        check_torch,
        check_symmetric,
        check_nccl,
        check_cutlass,
        check_compiler,
        check_cache,
        check_queues,
        check_multicast,
    )
    return [check(facts) for check in every]


# --- runtimes -------------------------------------------------------------------------------------------

GLOO, NCCL, CUDA = "collective over gloo", "collective over NCCL", "cuda"
REQUIRABLE = {"reference": ("reference",), "collective": (GLOO, NCCL), "cuda": (CUDA,)}
"""What can be required, and the runtimes of which one is enough."""


def runtimes(facts: Facts) -> list[Check]:
    """Which runtimes work here, and what those lack that do not."""
    torch = check_torch(facts)
    return [
        Check("reference", OK, "all ranks in one process, with numpy"),
        _runtime(GLOO, "a process for each rank, on the CPU", torch, _gloo(facts)),
        _runtime(NCCL, _ranks(facts), torch, check_gpus(facts), check_nccl(facts)),
        _runtime(
            CUDA,
            _ranks(facts),
            *(torch, check_gpus(facts), check_driver(facts), check_peers(facts), check_mem_ops(facts)),
            *(check_nccl(facts), check_symmetric(facts), *_kernels(facts)),
        ),
    ]


def _gloo(facts: Facts) -> Check:
    return Check("gloo", OK, "") if facts.gloo else Check("gloo", FIX, "this torch has none", INSTALL_TORCH)


def _kernels(facts: Facts) -> list[Check]:
    """What is needed to have kernels: to compile them, or to have compiled them."""
    needed = [check_cutlass(facts), check_compiler(facts), check_cache(facts)]
    if facts.kernels and facts.nvcc is None and not facts.nvcc_error:
        return [needed[0]]  # those of the cache serve
    return needed


def _ranks(facts: Facts) -> str:
    return "one rank" if len(facts.gpus) == 1 else f"up to {len(facts.gpus)} ranks"


def _runtime(name: str, detail: str, *needed: Check) -> Check:
    lacking = [check for check in needed if check.status == FIX]
    if not lacking:
        return Check(name, OK, detail)
    fixes = "; ".join(dict.fromkeys(check.fix for check in lacking))
    return Check(name, FIX, "; ".join(f"{check.name}: {check.detail}" for check in lacking), fixes)


def unsatisfied(found: list[Check], required: list[str]) -> list[str]:
    """Those of the required that no runtime satisfies. Raises ValueError for what cannot be required."""
    for name in required:
        if name not in REQUIRABLE:
            raise ValueError(f"--require is one of {', '.join(REQUIRABLE)}, got {name!r}")
    working = {check.name for check in found if check.status == OK}
    return [name for name in dict.fromkeys(required) if not working.intersection(REQUIRABLE[name])]


def table(title: str, found: list[Check]) -> Table:
    """Checks as a table; what is to be done stands below what was found."""
    from rich.text import Text

    shown = new_table()
    shown.add_column(title, no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("found, and what to do", overflow="fold")
    styles = {OK: "green", FIX: "bold red", NOTE: "dim"}
    for check in found:
        to_do = f"\n-> {check.fix}" if check.fix else ""
        shown.add_row(check.name, Text(check.status, styles[check.status]), Text(check.detail + to_do))
    return shown


# --- looking: what touches the machine ------------------------------------------------------------------


def look() -> Facts:
    """The facts of this machine. Makes a CUDA context on each GPU."""
    found: dict[str, Any] = {
        "environment": {name: os.environ[name] for name in (QUEUES, *NO_MULTICAST) if name in os.environ}
    }
    for part in (_look_at_torch, _look_at_driver, _look_at_compiler, _look_at_cache):
        found |= part()
    return Facts(**found)


def _look_at_torch() -> dict[str, Any]:
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
    return f"this torch's lacks {', '.join(absent)}" if absent else ""


def _gpu(at: int, links: Mapping[str, int]) -> Gpu:
    import torch

    about = torch.cuda.get_device_properties(at)
    return Gpu(
        name=about.name,
        capability=(about.major, about.minor),
        memory=about.total_memory,
        mem_ops=_mem_ops_error(at),
        multicast=_multicast(at),
        nvlinks=links.get(str(about.uuid)),
    )


def _multicast(at: int) -> bool:
    from cuda.bindings import driver

    error, device = driver.cuDeviceGet(at)
    if error:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    error, supported = driver.cuDeviceGetAttribute(attribute, device)
    return not error and bool(supported)


def _mem_ops_error(at: int) -> str:
    """What comes of a write and a wait for it, in this order on one stream."""
    import torch

    from distgemm.gemm.streams import new_stream
    from distgemm.runtime.cuda.memops import mem_ops, wait_for, write

    device = torch.device("cuda", at)
    try:
        with torch.cuda.device(device):
            word = torch.zeros(1, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)
            stream = new_stream(device)
            mem_ops([write(word.data_ptr()), wait_for(word.data_ptr())], stream.cuda_stream)
            stream.synchronize()
            return "" if word.item() == 1 else f"a write left {word.item()} where it was to leave 1"
    except RuntimeError as error:
        return _line(error)


def _nvlinks(uuids: list[str]) -> dict[str, int]:
    """Active links of each GPU, by its uuid without "GPU-"; nothing where nobody says."""
    found: dict[str, int] = {}
    if not uuids:
        return found
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return parse_nvlinks(_said("nvidia-smi", "nvlink", "--status") or "")
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


def parse_nvlinks(said: str) -> dict[str, int]:
    """Active links by uuid, from what ``nvidia-smi nvlink --status`` said."""
    found = {}
    for block in re.split(r"^(?=GPU \d+:)", said, flags=re.M):
        if uuid := re.match(r"GPU \d+:.*\(UUID: GPU-([^)]+)\)", block):
            found[uuid[1]] = len(re.findall(r"^\s*Link \d+: [\d.]+ GB/s", block, re.M))
    return found


def _look_at_driver() -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        module = Path("/proc/driver/nvidia/version").read_text()
        if number := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", module):
            found["driver"] = number[1]
    except OSError:
        if said := _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
            found["driver"] = said.split()[0]
    # cuda.bindings says in exceptions of its own that there is no driver.
    with contextlib.suppress(ImportError, RuntimeError):
        from cuda.bindings import driver

        error, number_ = driver.cuDriverGetVersion()
        if not error:
            found["driver_cuda"] = f"{number_ // 1000}.{number_ % 1000 // 10}"
    return found


def _look_at_compiler() -> dict[str, Any]:
    from distgemm.gemm.nvcc import compiler_version

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
    if said := _said("g++", "-dumpfullversion", "-dumpversion"):
        found["gxx"] = said.strip()
    return found


def _look_at_cache() -> dict[str, Any]:
    folder = cache_dir()
    libraries = [manifest is not None for _, manifest in cached()]
    kernels = folder / "kernels"
    there = next(path for path in (kernels, *kernels.absolute().parents) if os.path.exists(path))
    writable = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return {
        "cache": str(folder),
        "cache_error": "" if writable else f"{there} cannot be written",
        "kernels": sum(libraries),
        "broken": len(libraries) - sum(libraries),
    }


def _said(*command: str) -> str | None:
    """What a program said on standard output; None where it is not there, or failed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
