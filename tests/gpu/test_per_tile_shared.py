"""Per-tile executables between processes that share one GPU.

It is slow: kernels of ranks on one GPU alternate, some milliseconds each. All kernels are compiled first.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker, fault_worker
from tests.gpu import per_tile_worker as worker
from tests.gpu.cuda_worker import Case
from tests.gpu.per_tile_worker import SCHEDULES
from tests.once import once

RANKS = [2, 3, 4, 5, 8]
CHECKS = ["exact", "bounded_error", "repeated", "terms", "replayed", "stress"]
LAUNCH_TIMEOUT_S = 400.0
pytestmark = pytest.mark.gpu(1)


@once
def results(ranks: int) -> list[dict[str, Any]]:
    """Each rank's failures, by the check's name."""
    cases = worker.cases(ranks)
    launch(worker.compile_kernels, 1, cases, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)
    with_c = [case for case in cases if case.beta]
    one_of_each = [next(case for case in cases if case.schedule == schedule) for schedule in SCHEDULES.values()]
    checks: list[Any] = [
        (cuda_worker.exact, (cases,)),
        (cuda_worker.bounded_error, (cases,)),
        (cuda_worker.repeated, (cases,)),
        (worker.terms, (with_c,)),
        (worker.replayed, (one_of_each,)),
        (cuda_worker.stress, ([*one_of_each, *with_c], 200, 3)),
    ]
    return launch(cuda_worker.run_all, ranks, checks, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_results_are_right(ranks: int, check: str) -> None:
    assert [failure for found in results(ranks) for failure in found[check]] == []


# --- faults ---------------------------------------------------------------------------------------------

FAULTY = [
    Case(schedule, (2,), config="128x128x64_2x1_pingpong", execution="per_tile") for schedule in SCHEDULES.values()
]


@pytest.fixture(scope="module")
def _kernels() -> None:
    launch(worker.compile_kernels, 1, FAULTY, backend="nccl", timeout=LAUNCH_TIMEOUT_S, share=True)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("case", FAULTY, ids=str)
@pytest.mark.parametrize(("how", "seed"), [(how, seed) for how in ("SIGKILL", "SIGSTOP") for seed in range(3)])
def test_the_others_raise_when_a_rank_is_lost(how: str, seed: int, case: Case, tmp_path: Path) -> None:
    """Within seconds where it has ended. What they compute is right or NaN."""
    rng = random.Random(f"{how} {seed}")
    victim, after = rng.randrange(2), rng.randrange(100)
    fault_worker.check_a_lost_rank(tmp_path, case, victim, after, how)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("case", FAULTY, ids=str)
@pytest.mark.parametrize(("seconds", "timeout"), [(6.0, None), (14.0, 3.0)])
def test_a_rank_comes_back(case: Case, seconds: float, timeout: float | None, tmp_path: Path) -> None:
    """It is waited for, or raises if the others have given up."""
    found = fault_worker.spawn(tmp_path, 2, fault_worker.come_back, case, seconds, timeout)
    assert [one["wrong"] for one in found.values()] == [0, 0]
    if timeout is None:
        assert all("error" not in one and one["seconds"] > 5 for one in found.values()), found
    else:
        assert "has not ended within 3 s" in found[0]["error"]
        assert "another rank has given up" in found[1]["error"]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("case", FAULTY, ids=str)
def test_a_captured_graph_that_is_stuck_ends(case: Case, tmp_path: Path) -> None:
    """So do later replays, with NaN: what they may find in slots is of earlier replays."""
    found = fault_worker.spawn(tmp_path, 2, worker.stuck_graph, case)
    assert len(found) == 2
    for one in found.values():
        assert one["right"] and one["partly_wrong"] == 0 and one["later_is_nan"] and one["seconds"] < 20, one
    assert case.schedule in found[0]["error"] and "ranks [1] have not begun this replay" in found[0]["error"], found
    assert "another rank has given up" in found[1]["error"], found
