"""A rank is killed or stopped in the middle of a call: the others raise, their results are NaN, nothing stays."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.fault_worker import START_TIMEOUT_S, Fault

ROOT = Path(__file__).parents[2]
POINTS = 10
TIMEOUT_S = 4.0
SLACK_S = 6.0
"""Ranks are processes on busy cores."""
SCHEDULES = (
    ("ag+gemm", "all_gather_1d_tiling_cd_rotating_a"),
    ("ag+gemm", "all_gather_1d_ring_a"),
    ("gemm+rs", "reduce_scatter_1d_tiling_a_rotating_c"),
    ("gemm+rs", "reduce_scatter_1d_pairwise_a"),
    ("gemm+ar", "all_reduce_1d_pairwise_a"),
    ("ag+gemm", "unfused"),
    ("gemm+rs", "unfused"),
    ("gemm+ar", "unfused"),
)


def fault_of(number: signal.Signals, case: int) -> Fault:
    rng = random.Random(f"{number.name} {case}")
    pattern, schedule = SCHEDULES[(case + rng.randrange(2)) % len(SCHEDULES)]
    ranks = rng.choice([2, 3, 4])
    return Fault(pattern, schedule, ranks, rng.randrange(ranks), rng.random(), number, TIMEOUT_S)


def start(rank: int, folder: Path) -> subprocess.Popen[str]:
    (folder / "temporary").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.multiprocess.fault_worker", str(rank), str(folder)],
        env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def stopped(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def left(process: subprocess.Popen[str]) -> bool:
    """Whether any process of a rank's session is there."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def report_of(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"report-{rank}.json").read_text())


def named(fault: Fault, rank: int) -> str:
    """What the error of a rank looks like: schedule, rank, op and tile."""
    begun = rf"RuntimeError: {re.escape(fault.schedule)} failed on rank {rank}"
    if fault.schedule != "unfused":
        op = r"rank \d iteration \d+: (Copy|Gemm|Reduce|Wait|Signal) #\d+ [ABD]\(\d+(, \d+)*\)"
        return rf"{begun} (at|as the ranks compared their calls before) {op}.*: .+\. The result is NaN"
    collective = {"ag+gemm": "all-gather of A", "gemm+rs": "reduce-scatter of D", "gemm+ar": "all-reduce of D"}
    tile = rf"the {collective[fault.pattern]}\[0:1, 0:24, 0:24\]"
    begun = rf"RuntimeError: unfused {re.escape(fault.pattern)} failed on rank {rank}"
    return rf"{begun} at (the comparison of calls before )?{tile}: .+\. The result is NaN"


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", range(POINTS))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_raise_and_nothing_stays(number: signal.Signals, case: int, tmp_path: Path) -> None:
    fault = fault_of(number, case)
    (tmp_path / "fault.json").write_text(json.dumps(dataclasses.asdict(fault)))
    processes = [start(rank, tmp_path) for rank in range(fault.ranks)]
    victim, others = processes[fault.victim], [rank for rank in range(fault.ranks) if rank != fault.victim]
    try:
        for rank in others:
            _, errors = processes[rank].communicate(timeout=START_TIMEOUT_S)
            assert processes[rank].returncode == 0, errors
        if number == signal.SIGSTOP:
            assert stopped(victim)
            victim.send_signal(signal.SIGCONT)  # it comes back when the others have given up
            _, errors = victim.communicate(timeout=START_TIMEOUT_S)
            assert victim.returncode == 0, errors
        else:
            victim.communicate(timeout=START_TIMEOUT_S)
            assert victim.returncode == -signal.SIGKILL
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    limit = SLACK_S + (TIMEOUT_S if number == signal.SIGSTOP else 0)
    for rank in range(fault.ranks):
        report = report_of(tmp_path, rank)
        assert report["first"] and report["shared"] == []
        if rank == fault.victim and number == signal.SIGKILL:
            continue
        *passed, (message, result, seconds), last = report["calls"]
        assert [call[:2] for call in passed] == [["", "right"]] * len(passed) and len(passed) < 2
        assert re.fullmatch(named(fault, rank), message, re.DOTALL), message
        assert result == "NaN" and (seconds < limit or rank == fault.victim)
        assert (
            last[0].startswith("RuntimeError: an earlier call on this process group failed") and last[1] == "untouched"
        )
    time.sleep(0.1)
    assert not any(left(process) for process in processes)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_all_schedules_and_both_kinds_of_points_occur() -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        faults = [fault_of(number, case) for case in range(POINTS)]
        assert {fault.ranks for fault in faults} == {2, 3, 4}
        assert {fault.schedule == "unfused" for fault in faults} == {True, False}
        assert len({fault.schedule for fault in faults}) > 3
