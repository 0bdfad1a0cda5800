"""``distgemm doctor``: what this machine has for each runtime, and what to do about what it lacks.

The checks are functions of :class:`distgemm.measure.machine_facts.Facts`, and look at nothing themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from distgemm.cli.options import JsonFile
from distgemm.cli.output import check_json, new_console, new_table, say, wants_text, write_json
from distgemm.gemm.nvcc import NEWER_NVCC, OLDER_NVCC, not_loadable
from distgemm.gemm.packs import DISTRIBUTION
from distgemm.measure.machine_facts import NO_MULTICAST, QUEUES, Facts, look

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["REQUIRABLE", "Check", "Status", "checks", "checks_table", "doctor_command", "runtimes", "unsatisfied"]

Status = Literal["ok", "fix", "note"]
OK: Status = "ok"
FIX: Status = "fix"
NOTE: Status = "note"
"""A note is worth knowing, and neither good nor bad."""

MIN_TORCH = (2, 11)
MIN_CAPABILITY = (8, 0)
MIN_NVCC = (12, 0)
"""The oldest torch and the oldest GPU that kernels and the CUDA runtime support, and the oldest nvcc for Hopper."""

MIN_QUEUES = 4
"""Hardware queues from which copies do not wait behind two GEMMs."""

INSTALL_TORCH = "pip install 'torch>=2.11', a build with CUDA (https://pytorch.org/get-started)"
INSTALL_NVCC = "pip install 'distgemm[nvcc]', or install the CUDA toolkit, or set DISTGEMM_NVCC to its path"


NOT_NEEDED = "not needed for kernels of the pack"


class Check(NamedTuple):
    """A line of the report.

    Attributes:
        name: what was looked at.
        status: whether it is as it should be.
        detail: what was found.
        fix: what to do; "" if there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor_command(
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="RUNTIME",
            help="Exit with status 1 unless this runtime works: reference, collective or cuda; repeatable.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Check what this machine lacks for each runtime.

    For everything that is missing, it says what to do.
    """
    check_json(json)
    unsatisfied([], require or [])  # refuses unknown names before it looks at anything
    facts = look()
    found, works = checks(facts), runtimes(facts)
    if wants_text(json):
        console = new_console()
        console.print(checks_table("check", found))
        console.print()
        console.print(checks_table("runtime", works))
    write_json(json, {"checks": [each._asdict() for each in found], "runtimes": [each._asdict() for each in works]})
    if lacking := unsatisfied(works, require or []):
        say(f"required, and does not work here: {', '.join(lacking)}")
        raise typer.Exit(1)


# --- checks ---------------------------------------------------------------------------------------------


def check_gpus(facts: Facts) -> Check:
    """The GPUs."""
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
    if any(gpu.capability < MIN_CAPABILITY for gpu in facts.gpus):
        return Check("GPUs", FIX, detail, f"choose GPUs of compute capability {_dotted(MIN_CAPABILITY)} or newer")
    if any(gpu.capability[0] != 9 for gpu in facts.gpus):
        detail += (
            "; the default provider is cutlass on 9.0 alone, for which it has kernels with TMA and wgmma, and cublas "
            "on others, for which cutlass has plain kernels, which are slower"
        )
    return Check("GPUs", OK, detail)


def check_driver(facts: Facts) -> Check:
    """The driver, and whether it serves the CUDA that torch is built for."""
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
    """The active NVLink links of each GPU."""
    if len(facts.gpus) < 2:
        return Check("NVLink", NOTE, "needs two GPUs")
    links = [gpu.nvlinks for gpu in facts.gpus]
    if None in links:
        return Check("NVLink", NOTE, "not known: neither nvidia-ml-py nor nvidia-smi reports links")
    if 0 in links:
        without = [number for number, count in enumerate(links) if not count]
        return Check("NVLink", NOTE, f"no active links on GPUs {without}: copies go over PCIe, which hides little")
    counts = sorted({count for count in links if count is not None})
    return Check("NVLink", OK, f"{' or '.join(map(str, counts))} active links on each GPU")


def check_mem_ops(facts: Facts) -> Check:
    """Whether streams can wait for flags in memory and write them, as tried on each GPU."""
    name = "stream memory operations"
    if not facts.gpus:
        return Check(name, NOTE, "needs a GPU")
    failed = {number: gpu.mem_ops for number, gpu in enumerate(facts.gpus) if gpu.mem_ops}
    if failed:
        number, error = next(iter(failed.items()))
        return Check(name, FIX, f"GPUs {list(failed)} refuse them: GPU {number} says {error}", "update the driver")
    return Check(name, OK, "a wait and a write ran on every GPU")


def check_torch(facts: Facts) -> Check:
    """The version of torch."""
    if facts.torch is None:
        return Check("torch", FIX, facts.torch_error or "not installed", INSTALL_TORCH)
    built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for the CPU"
    detail = f"{facts.torch}, {built}"
    if _numbers(facts.torch)[:2] < MIN_TORCH:
        return Check("torch", FIX, f"{detail}; too old", INSTALL_TORCH)
    return Check("torch", OK, detail)


def check_symmetric(facts: Facts) -> Check:
    """Whether torch has symmetric memory, which all ranks can write."""
    name = "symmetric memory"
    if facts.symmetric_error:
        return Check(name, FIX, facts.symmetric_error, INSTALL_TORCH)
    return Check(name, OK, "torch has it")


def check_nccl(facts: Facts) -> Check:
    """The version of NCCL."""
    if facts.nccl is None:
        return Check("NCCL", FIX, "this torch has none", INSTALL_TORCH)
    return Check("NCCL", OK, facts.nccl)


def check_cutlass(facts: Facts) -> Check:
    """CUTLASS's headers, from which kernels are compiled."""
    if facts.include is None or facts.cutlass is None:
        if facts.pack:
            return Check("CUTLASS", NOTE, f"{facts.cutlass_error or 'not installed'}; {NOT_NEEDED}")
        return Check("CUTLASS", FIX, facts.cutlass_error or "not installed", "pip install nvidia-cutlass")
    return Check("CUTLASS", OK, f"nvidia-cutlass {facts.cutlass}, headers in {facts.include}")


def check_compiler(facts: Facts) -> Check:
    """The compiler of kernels: nvcc and g++."""
    if facts.nvcc_error:
        return Check("compiler", FIX, facts.nvcc_error, INSTALL_NVCC)
    if facts.nvcc is None:
        if facts.pack:
            return Check("compiler", NOTE, f"nvcc was not found; {NOT_NEEDED}")
        return Check("compiler", FIX, "nvcc was not found", INSTALL_NVCC)
    detail = f"{facts.nvcc}, {facts.nvcc_version}"
    if why := not_loadable(facts.nvcc_version or "", facts.driver_cuda):
        return Check("compiler", FIX, f"{detail}, too new: {why}", OLDER_NVCC)
    release = _numbers(facts.nvcc_version or "")
    if release and release < MIN_NVCC and (not facts.gpus or any(gpu.capability == (9, 0) for gpu in facts.gpus)):
        return Check("compiler", FIX, f"{detail}, too old for sm_90a, which CUDA {_dotted(MIN_NVCC)} knows", NEWER_NVCC)
    if facts.gxx is None:
        return Check("compiler", FIX, f"{detail}, but no g++", "install g++: on Debian and Ubuntu, apt install g++")
    return Check("compiler", OK, f"{detail}; g++ {facts.gxx}")


def check_pack(facts: Facts) -> Check:
    """The pack of compiled kernels."""
    if facts.pack_error:
        fix = f"install the {DISTRIBUTION} of this distgemm; until then, kernels are compiled at their first use"
        return Check("kernel pack", FIX, f"not used: {facts.pack_error}", fix)
    if not facts.pack:
        return Check("kernel pack", NOTE, f"not installed; with pip install {DISTRIBUTION}, kernels come compiled")
    return Check("kernel pack", OK, f"{facts.pack}: {facts.packed} kernels")


def check_cache(facts: Facts) -> Check:
    """The cache of compiled kernels."""
    if facts.cache_error:
        fix = "set DISTGEMM_CACHE_DIR to a folder that this user can write, and no other user"
        return Check("kernel cache", FIX, f"{facts.cache}: {facts.cache_error}", fix)
    broken = f", {facts.broken} damaged, which are compiled again at their next use" if facts.broken else ""
    return Check("kernel cache", OK, f"{facts.cache}: {facts.kernels} kernels{broken}")


def check_queues(facts: Facts) -> Check:
    """The number of hardware queues, over which streams are spread."""
    text = facts.environment.get(QUEUES)
    if not text:
        return Check(QUEUES, OK, "not set: 8 hardware queues for streams, enough for copies during two GEMMs")
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        return Check(QUEUES, FIX, f"{text!r}, where CUDA takes 1 to 32", f"unset {QUEUES}")
    if int(text) < MIN_QUEUES:
        return Check(
            QUEUES,
            FIX,
            f"{text}: streams share {text} hardware queue{'s' * (text != '1')}, so copies may wait behind GEMMs "
            "instead of overlapping with them",
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
    return Check("multicast (NVLS)", NOTE, f"{state}; the CUDA runtime does not use it, NCCL and torch may")


def checks(facts: Facts) -> list[Check]:
    """All checks, in the order of the report."""
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
        check_pack,
        check_cache,
        check_queues,
        check_multicast,
    )
    return [check(facts) for check in every]


# --- runtimes -------------------------------------------------------------------------------------------

GLOO, NCCL, CUDA = "collective over gloo", "collective over NCCL", "cuda"
REQUIRABLE = {"reference": ("reference",), "collective": (GLOO, NCCL), "cuda": (CUDA,)}
"""For each value of --require, the runtimes that satisfy it; one of them is enough."""


def runtimes(facts: Facts) -> list[Check]:
    """The runtimes: whether each works here, and what it lacks if it does not."""
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
    """The checks without which there are no kernels: they are compiled, or in the cache already, or in the pack."""
    needed = [check_cutlass(facts), check_compiler(facts), check_cache(facts)]
    if facts.pack:
        return needed[2:]
    if facts.kernels and facts.nvcc is None and not facts.nvcc_error:
        return [needed[0]]  # the kernels in the cache are enough
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
    """The required names that no working runtime satisfies.

    Args:
        found: the checks of runtimes.
        required: keys of ``REQUIRABLE``.

    Raises:
        ValueError: for an unknown name.
    """
    for name in required:
        if name not in REQUIRABLE:
            raise ValueError(f"--require is one of {', '.join(REQUIRABLE)}, got {name!r}")
    working = {check.name for check in found if check.status == OK}
    return [name for name in dict.fromkeys(required) if not working.intersection(REQUIRABLE[name])]


def checks_table(title: str, found: list[Check]) -> Table:
    """Checks as a table. What to do stands below what was found."""
    from rich.text import Text

    shown = new_table()
    shown.add_column(title, no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("found, and what to do", overflow="fold")
    styles: dict[Status, str] = {"ok": "green", "fix": "bold red", "note": "dim"}
    for check in found:
        to_do = f"\n-> {check.fix}" if check.fix else ""
        shown.add_row(check.name, Text(check.status, styles[check.status]), Text(check.detail + to_do))
    return shown


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
