"""On each rank: all cases, one after the other; rank 0 writes what was found after each."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distgemm.bench.cases import Job
from distgemm.bench.ours import auto_method, schedule_method
from distgemm.bench.peers import copies_alone, cutlass_alone, quack_methods, quack_version, without_barrier
from distgemm.bench.report import OURS, PART, PEER, best, figures, label, save
from distgemm.bench.stalls import Stalls
from distgemm.measure.timing import (
    Clock,
    Method,
    Operation,
    Sample,
    attempt,
    eager,
    sample,
    timeline,
    torch_methods,
)

__all__ = ["Settings", "run_rank"]

EAGER = ("torch fused",)
"""What is also timed without a graph: people call it so."""


class Settings(NamedTuple):
    """How it is measured.

    rounds, burst_ms: as :func:`distgemm.measure.timing.sample` takes them
    auto:      also what ``schedule="auto"`` takes
    peers:     also what is slow to measure: calls without graphs, and other libraries
    tune:      measure configurations and choices before each case
    timelines: also kernels and copies of our methods on each rank
    command:   the command line, for the file
    """

    rounds: int
    burst_ms: float
    auto: bool
    peers: bool
    tune: bool
    timelines: bool
    command: str


def run_rank(jobs: list[Job], settings: Settings, path: Path) -> dict[str, Any]:
    """What was found, the same on all ranks; after each case rank 0 writes it to ``path``."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    first = dist.get_rank() == 0
    result: dict[str, Any] = {
        "benchmark": "distgemm bench",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": settings.command,
        "rounds": settings.rounds,
        "burst_ms": settings.burst_ms,
        "peers": settings.peers,
        "planned": len(jobs),
        "complete": False,
        "about": about(device) if first else {},
        "rows": [],
    }
    with Stalls(dist.get_rank()) as stalls:
        for number, job in enumerate(jobs, 1):
            begin = time.perf_counter()

            def say(doing: str, at: str = f"[{number}/{len(jobs)}] {job.case}") -> None:
                stalls.now(f"{at}: {doing}")

            row = run_case(job, settings, group, device, say=say)
            if first and number == 1:
                result["about"]["clocks"] = clocks()  # while the GPUs are warm
            row["seconds"] = round(time.perf_counter() - begin, 1)
            result["rows"].append(row)
            result["complete"] = number == len(jobs)
            free(device)
            if first:
                save(result, path)
                print(progress(row, number, len(jobs)), file=sys.stderr, flush=True)
    return result


def progress(row: dict[str, Any], number: int, of: int) -> str:
    """A line about a row."""
    found = [best(row, kind) for kind in (OURS, PEER)]
    said = ", ".join(f"{each['name']} {each['ms']:.4f} ms" for each in found if each)
    failed = sum(bool(each["error"]) for each in row["methods"])
    problems = f", {failed} failed" if failed else ""
    return f"[{number}/{of}] {label(row)}: {row.get('error') or said or 'nothing'}{problems} ({row['seconds']:.0f} s)"


def free(device: torch.device) -> None:
    """Give back what the last case held: its tensors, executables and graphs."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- one case -------------------------------------------------------------------------------------------


def run_case(
    job: Job,
    settings: Settings,
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Clock | None = None,
    say: Callable[[str], object] = lambda doing: None,
) -> dict[str, Any]:
    """A row, with figures. What fails is in it with its error, on all ranks alike.

    say: is told what is being done, before it is
    """
    case = job.case
    row: dict[str, Any] = {**case._asdict(), "methods": []}
    n, k = (case.n // case.ranks, case.k) if case.pattern == "ag+gemm" else (case.n, case.k // case.ranks)
    row["local"] = [case.m, n, k]
    if settings.tune:
        say("choices are measured")
        _, failed = attempt(group, device, lambda: tune(job, group, device))
        if failed.error:
            row["tune_error"] = failed.error
    operation, failed = attempt(group, device, lambda: Operation(case.problem, case.pattern, group, device))
    if operation is None:
        return figures(row | {"error": failed.error})
    methods: dict[str, tuple[str, Method]] = {}
    for name, kind, make in makers(job, settings, operation):
        say(f"{name} is made")
        made, failed = attempt(group, device, make)
        if made is None:
            row["methods"].append(record(name, kind, failed))
        for method in made or []:
            methods[method.name] = (PART if method.name.endswith(" alone") else kind, method)
    measured = [method for _, method in methods.values()]
    found = sample(operation, measured, settings.rounds, settings.burst_ms, clock, say=say)
    for name, one in without_barrier(found).items():
        kind, method = methods[name]
        row["methods"].append(record(name, kind, one, method))
    if settings.timelines:
        ours = [method for name, (kind, method) in methods.items() if kind == OURS and not found[name].error]
        row["timelines"] = {method.name: timeline(operation, method) for method in ours}
    for _, method in methods.values():
        method.release()
    return figures(row)


def record(name: str, kind: str, found: Sample, method: Method | None = None) -> dict[str, Any]:
    """What the file holds of a method, before figures."""
    return {
        "name": name,
        "kind": kind,
        "captured": method is None or method.capture,
        "detail": method.detail if method else "",
        "rounds": [round(ms, 6) for ms in found.rounds],
        "error": found.error,
        "wrong": found.wrong,
    }


def makers(job: Job, settings: Settings, operation: Operation) -> list[tuple[str, str, Callable[[], list[Method]]]]:
    """What makes the methods of a case: for each a name for its failure, and the kind of the methods."""

    def ours(schedule: str, options: dict[str, Any]) -> Callable[[], list[Method]]:
        return lambda: [schedule_method(operation, schedule, **options)]

    def torchs() -> list[Method]:
        found = torch_methods(operation)
        return found + [eager(method) for method in found if settings.peers and method.name in EAGER]

    found: list[tuple[str, str, Callable[[], list[Method]]]] = [
        (str(each), OURS, ours(each.schedule, dict(each.options))) for each in job.candidates
    ]
    if settings.auto:
        found.append(("distgemm auto", OURS, lambda: [auto_method(operation)]))
    found.append(("torch", PEER, torchs))
    if settings.peers and operation.pattern == "ag+gemm" and quack_version():
        found.append(("quack", PEER, lambda: quack_methods(operation)))
    found.append(("CUTLASS alone", PART, lambda: [cutlass_alone(operation)]))
    found.append(("copies alone", PART, lambda: copies_alone(operation)))
    return found


def tune(job: Job, group: dist.ProcessGroup, device: torch.device) -> None:
    """Measure what has not been: configurations of the GEMMs that schedules split this case into, and of the whole
    local product, and which schedule "auto" takes."""
    from distgemm.gemm import GemmTensors
    from distgemm.gemm.select import CACHE, key_of
    from distgemm.gemm.tensors import spec_of
    from distgemm.tune import tune as tune_plan
    from distgemm.tune.gemm import tune as tune_gemm

    case = job.case
    tune_plan(case.problem, case.pattern, group, device=device, kernels=True)
    if dist.get_rank(group) == 0:  # the others wait, and find it in the file
        n, k = (case.n // case.ranks, case.k) if case.pattern == "ag+gemm" else (case.n, case.k // case.ranks)
        a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (case.m, n))
        whole = GemmTensors(a, b, torch.empty(case.m, n, device=device, dtype=a.dtype))
        if key_of(spec_of(whole)) not in CACHE.read(torch.cuda.get_device_name(device)):
            tune_gemm(whole)


# --- the machine ----------------------------------------------------------------------------------------


def about(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    from distgemm.cli.doctor import NO_MULTICAST, _look_at_driver, _multicast

    supported = _multicast(device.index)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpus": dist.get_world_size(),
        **_look_at_driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl)),
        "nvls": "on" if supported and os.environ.get("NCCL_NVLS_ENABLE") != "0" else "off",
        "multicast_supported": supported,
        "environment": {name: os.environ.get(name) for name in NO_MULTICAST},
        "cutlass": _installed("nvidia-cutlass"),
        "distgemm": _installed("distgemm"),
        "quack": quack_version(),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def clocks() -> list[dict[str, str]] | None:
    """What nvidia-smi says of each GPU's clocks, in MHz, power and temperature; None where it says nothing."""
    from distgemm.cli.doctor import _said

    said = _said("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits")
    if said is None:
        return None
    return [dict(zip(CLOCKS, map(str.strip, line.split(",")), strict=False)) for line in said.splitlines() if line]
