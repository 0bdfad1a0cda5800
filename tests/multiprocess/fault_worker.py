"""One rank of a test of faults: it makes calls until one fails. In the second call the victim signals itself.

Usage: python -m tests.multiprocess.fault_worker RANK FOLDER. The FOLDER has ``fault.json``, a :class:`Fault`. What the
rank has seen goes to FOLDER/report-RANK.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distgemm
from distgemm.runtime.unfused import UnfusedExecutable

START_TIMEOUT_S = 90.0
RESULTS = {24.0: "right", -1.0: "NaN", 7.0: "untouched"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens in the second call.

    Attributes:
        pattern: what the ranks do.
        schedule: the schedule, or "unfused".
        ranks: number of ranks.
        victim: the rank that gets the signal.
        point: where it gets it, as a share of its steps.
        number: the signal's.
        timeout: seconds that the group waits.
    """

    pattern: Any
    schedule: str
    ranks: int
    victim: int
    point: float
    number: int
    timeout: float


def executable(fault: Fault, group: dist.ProcessGroup) -> Any:
    problem = distgemm.GemmProblem(24, 24, 24, dtype="float32")
    if fault.schedule == "unfused":
        return UnfusedExecutable(problem, fault.pattern, group)
    return distgemm.CollectiveExecutable(distgemm.make_plan(problem, fault.schedule, fault.ranks, chunks=2), group)


def lay_trap(exe: Any, fault: Fault) -> None:
    """Signal this process at a point of the next call: before the calls are compared, or before a later step."""

    def trapped(step: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            os.kill(os.getpid(), fault.number)
            return step(*args)

        return act

    if fault.schedule == "unfused":
        names = ["_check", "_gather" if fault.pattern == "ag+gemm" else "_reduce"]
        name = names[int(fault.point * len(names))]
        setattr(exe, name, trapped(getattr(exe, name)))
        return
    steps = list(exe.program.steps)
    at = int(fault.point * (len(steps) + 1))
    if at == len(steps):
        exe._differences = trapped(exe._differences)
    else:
        steps[at] = trapped(steps[at])
        exe.program = dataclasses.replace(exe.program, steps=steps)


def in_shared_memory() -> list[str]:
    """What this process has in /dev/shm."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and _is_open(fd)]
    return mapped + [link for link in links if link.startswith("/dev/shm")]


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def main(rank: int, folder: Path) -> None:
    fault = Fault(**json.loads((folder / "fault.json").read_text()))
    store = f"file://{folder}/store"
    begin = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=fault.ranks, timeout=begin)
    group = dist.new_group(timeout=timedelta(seconds=fault.timeout))
    exe = executable(fault, group)
    a, b, d = (torch.ones(exe.plan.shard_shape(name, rank)) for name in "ABD")
    exe(a, b, out=d)
    report: dict[str, Any] = {"first": bool((d == 24).all()), "shared": in_shared_memory()}
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    if rank == fault.victim:
        lay_trap(exe, fault)
    # A victim that has sent all it owes is missed in the next call only. The last call is on a group that has failed.
    calls: list[tuple[str, str, float]] = []
    while len(calls) < 2 or not calls[-2][0]:
        message, start = "", time.monotonic()
        try:
            exe(a, b, out=d.fill_(7))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        (value,) = d.nan_to_num(-1).unique().tolist()
        result = RESULTS[value]
        calls.append((message, result, time.monotonic() - start))
    report["calls"] = calls
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    signal.alarm(int(3 * START_TIMEOUT_S))  # if the test is killed
    main(int(sys.argv[1]), Path(sys.argv[2]))
