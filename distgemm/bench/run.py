"""Runs the benchmark on each rank: all cases, one after the other. Rank 0 writes the result after each case."""

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

from distgemm.bench.anchors import compare_anchors, job_of, resumed, select_anchors
from distgemm.bench.cases import Job
from distgemm.bench.methods import (
    auto_method,
    copies_alone,
    cutlass_alone,
    quack_methods,
    quack_version,
    schedule_method,
    without_barrier,
)
from distgemm.bench.report import FACTS, OURS, PART, PEER, Kind, best, figures, label, save
from distgemm.bench.stalls import Stalls
from distgemm.measure.machine_facts import NO_MULTICAST, driver_facts, program_output, supports_multicast
from distgemm.measure.operation import Method, Operation, eager, torch_methods
from distgemm.measure.profiler import replay_timeline
from distgemm.measure.timing import Clock, Sample, attempt, sample
from distgemm.tune import TunedConfig

__all__ = ["Settings", "check_machine", "run_rank"]

EAGER = ("torch fused",)
"""Methods that are also timed without a graph, because that is how people call them."""


class Settings(NamedTuple):
    """Settings of a run.

    Attributes:
        rounds, burst_ms: as :func:`distgemm.measure.timing.sample` takes them.
        auto: also measure what ``schedule="auto"`` selects.
        peers: also measure what is slow to measure: calls without graphs, and other libraries.
        tune: measure tuned configurations before each case.
        timelines: also record kernels and copies of this library's methods on each rank.
        command: the command line, for the file.
        before: a result of these ranks, whose rows come first; None: there is none. Its anchors are measured again.
    """

    rounds: int
    burst_ms: float
    auto: bool
    peers: bool
    tune: bool
    timelines: bool
    command: str
    before: dict[str, Any] | None = None


def run_rank(jobs: list[Job], settings: Settings, path: Path) -> dict[str, Any]:
    """Measure all jobs. A collective call.

    Args:
        jobs: are measured in order.
        settings: of the run.
        path: the file that rank 0 writes after each case.

    Returns:
        The result, the same on all ranks; or, if anchors have other times than before, only the reason in "refused".
    """
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    first = dist.get_rank() == 0
    facts = about(device)
    result: dict[str, Any] = {
        "benchmark": "distgemm bench",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": settings.command,
        "rounds": settings.rounds,
        "burst_ms": settings.burst_ms,
        "peers": settings.peers,
        "planned": len(jobs),
        "complete": False,
        "about": facts,
        "resumptions": [],
        "rows": [],
    }
    with Stalls(dist.get_rank()) as stalls:

        def measured(job: Job, settings: Settings, at: str) -> dict[str, Any]:
            begin = time.perf_counter()
            row = run_case(job, settings, group, device, say=lambda doing: stalls.now(f"{at} {job.case}: {doing}"))
            return row | {"seconds": round(time.perf_counter() - begin, 1)}

        if settings.before is not None:
            check_machine(facts, settings.before["about"])
            pairs = []
            for number, old in enumerate(anchors := select_anchors(settings.before["rows"]), 1):
                # "auto" may select something else by now, and what is tuned would stay if the run is refused.
                fewer = settings._replace(auto=False, tune=False, timelines=False)
                new = measured(job_of(old), fewer, f"anchor [{number}/{len(anchors)}]")
                pairs.append((old, new))
                free(device)
                if first:
                    print(f"anchor {progress(new, number, len(anchors))}", file=sys.stderr, flush=True)
            try:
                result = resumed(result, settings.before, compare_anchors(pairs))
            except ValueError as error:
                return {"refused": f"--resume: {error}"}
        for number, job in enumerate(jobs, 1):
            row = measured(job, settings, f"[{number}/{len(jobs)}]")
            if first and number == 1:
                facts["clocks"] = clocks()  # while the GPUs are warm
            result["rows"].append(row)
            result["complete"] = number == len(jobs)
            free(device)
            if first:
                save(result, path)
                print(progress(row, number, len(jobs)), file=sys.stderr, flush=True)
    return result


def check_machine(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Raise ValueError if rows are of another kind of GPUs, or of other programs: a result has one set of facts."""
    for name in ("gpu", "driver", *sorted(FACTS)):
        if now.get(name) != before.get(name):
            raise ValueError(
                f"the rows that are there are of {name} {before.get(name)}, and this is {now.get(name)}: measure into "
                "another file"
            )


def progress(row: dict[str, Any], number: int, of: int) -> str:
    """A line about a row."""
    times = ", ".join(f"{one['name']} {one['ms']:.4f} ms" for one in (best(row, OURS), best(row, PEER)) if one)
    failed = sum(bool(each["error"]) for each in row["methods"])
    problems = f", {failed} failed" if failed else ""
    return f"[{number}/{of}] {label(row)}: {row.get('error') or times or 'nothing'}{problems} ({row['seconds']:.0f} s)"


def free(device: torch.device) -> None:
    """Free the tensors, executables and graphs of the last case."""
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
    """Measure a case. A collective call.

    Args:
        job: the case and its candidates.
        settings: of the run.
        group: the ranks.
        device: of this rank.
        clock: of the device; None: CUDA graphs and events.
        say: is called with what is done next.

    Returns:
        A row with figures, the same on all ranks. A method that fails is in it with its error.
    """
    case = job.case
    row: dict[str, Any] = {**case._asdict(), "local": list(case.local), "methods": []}
    if settings.tune:
        say("configurations are tuned")
        _, failed = attempt(group, device, lambda: tune(job, group, device))
        if failed.error:
            row["tune_error"] = failed.error
    operation, failed = attempt(group, device, lambda: Operation(case.problem, case.pattern, group, device))
    if operation is None:
        return figures(row | {"error": failed.error})
    methods: dict[str, tuple[Kind, Method]] = {}
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
        row["timelines"] = {method.name: replay_timeline(operation, method) for method in ours}
    for _, method in methods.values():
        method.release()
    return figures(row)


def record(name: str, kind: Kind, found: Sample, method: Method | None = None) -> dict[str, Any]:
    """A method as the file holds it, before figures."""
    return {
        "name": name,
        "kind": kind,
        "captured": method is None or method.capture,
        "detail": method.detail if method else "",
        "rounds": [round(ms, 6) for ms in found.rounds],
        "error": found.error,
        "wrong": found.wrong,
    }


def makers(job: Job, settings: Settings, operation: Operation) -> list[tuple[str, Kind, Callable[[], list[Method]]]]:
    """Functions that make the methods of a case, each with a name for its failure and the kind of its methods."""

    def of_schedule(config: TunedConfig) -> Callable[[], list[Method]]:
        return lambda: [schedule_method(operation, config)]

    def of_torch() -> list[Method]:
        found = torch_methods(operation)
        return found + [eager(method) for method in found if settings.peers and method.name in EAGER]

    found: list[tuple[str, Kind, Callable[[], list[Method]]]] = [
        (config.text, OURS, of_schedule(config)) for config in job.candidates
    ]
    if settings.auto:
        found.append(("distgemm auto", OURS, lambda: [auto_method(operation)]))
    found.append(("torch", PEER, of_torch))
    if settings.peers and operation.pattern == "ag+gemm" and quack_version():
        found.append(("quack", PEER, lambda: quack_methods(operation)))
    found.append(("CUTLASS alone", PART, lambda: [cutlass_alone(operation)]))
    found.append(("copies alone", PART, lambda: copies_alone(operation)))
    return found


def tune(job: Job, group: dist.ProcessGroup, device: torch.device) -> None:
    """Tune a case: what "auto" selects, the GEMMs of its plans, and, if it has no entry yet, the local GEMM."""
    from distgemm.gemm import GemmTensors
    from distgemm.gemm.select import CACHE, key_of
    from distgemm.gemm.tensors import spec_of
    from distgemm.tune import tune as tune_plan
    from distgemm.tune.gemm import tune as tune_gemm

    case = job.case
    tune_plan(case.problem, case.pattern, group, device=device, kernels=True)
    if dist.get_rank(group) == 0:  # the other ranks wait, and read the file
        m, n, k = case.local
        a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
        whole = GemmTensors(a, b, torch.empty(m, n, device=device, dtype=a.dtype))
        if key_of(spec_of(whole)) not in CACHE.read(torch.cuda.get_device_name(device)):
            tune_gemm(whole)


# --- the machine ----------------------------------------------------------------------------------------


def about(device: torch.device) -> dict[str, Any]:
    """The machine and the versions on which the figures depend."""
    supported = supports_multicast(device.index)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpus": dist.get_world_size(),
        **driver_facts(),
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
    """Each GPU's clocks, MHz, power, W, and temperature, as nvidia-smi prints them; None without nvidia-smi."""
    printed = program_output("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits")
    if printed is None:
        return None
    return [dict(zip(CLOCKS, map(str.strip, line.split(",")), strict=False)) for line in printed.splitlines() if line]
