"""The launcher: results by rank, the first error, stopped ranks, and no process that is left over."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distgemm.runtime.launch import LaunchSpec, init_from_env, launch, raise_first_error

FOREVER_S = 1000.0


def _note_pid(folder: str) -> int:
    rank = dist.get_rank()
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()  # all have started
    return rank


def _returns(folder: str, factor: int) -> tuple[int, int, torch.Tensor]:
    rank = _note_pid(folder)
    assert init_from_env() == rank
    return rank, factor * rank, torch.full((2,), rank)


def _fails(folder: str) -> None:
    rank = _note_pid(folder)
    if rank == 2:
        time.sleep(0.2)
        raise KeyError("the cause")
    # The other ranks fail at once when their peer is gone.
    dist.recv(torch.zeros(1), 2)


def _is_killed(folder: str) -> None:
    rank = _note_pid(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), 1)


def _crashes(folder: str) -> None:
    rank = _note_pid(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.recv(torch.zeros(1), 1)


def _leaves(folder: str) -> None:
    rank = _note_pid(folder)
    if rank == 1:
        os._exit(7)
    time.sleep(FOREVER_S)


def _does_not_end(folder: str) -> None:
    if _note_pid(folder) == 1:
        atexit.register(time.sleep, FOREVER_S)


def _hangs(folder: str) -> None:
    if _note_pid(folder) == 1:
        # Not even a request to stop gets through.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER_S)


def _blocks(folder: str) -> None:
    """Both ranks wait for a message in a call that no Python signal handler interrupts."""
    dist.recv(torch.zeros(1), 1 - _note_pid(folder))


def _alive(folder: Path) -> list[int]:
    found = []
    for path in folder.iterdir():
        try:
            os.kill(int(path.read_text()), 0)
        except ProcessLookupError:
            continue
        found.append(int(path.name))
    return found


def _error(function: Callable[[str], Any], ranks: int, folder: Path, timeout: float = 60.0) -> str:
    with pytest.raises(RuntimeError) as caught:
        launch(function, ranks, str(folder), timeout=timeout)
    assert len(list(folder.iterdir())) == ranks, "the ranks had not started"
    assert _alive(folder) == []
    assert multiprocessing.active_children() == []
    return str(caught.value)


def test_results_come_in_rank_order(tmp_path: Path) -> None:
    results = launch(_returns, 2, str(tmp_path), 3)
    assert [result[:2] for result in results] == [(0, 0), (1, 3)]
    assert all(torch.equal(result[2], torch.full((2,), rank)) for rank, result in enumerate(results))
    assert _alive(tmp_path) == []


def test_the_first_error_wins_and_the_others_stop(tmp_path: Path) -> None:
    message = _error(_fails, 3, tmp_path)
    assert message.startswith("rank 2 failed: KeyError: 'the cause'")
    assert "Traceback" in message and "in _fails" in message


@pytest.mark.parametrize(
    ("records", "codes", "message"),
    [
        # Ranks 0 and 2 have failed, rank 2 earlier. The launcher has noticed rank 0.
        ({0: -1.0, 2: -1.1}, {0: 1}, "rank 2 failed: its error"),
        # Rank 1 has just been killed, and rank 0 has noticed it before the launcher has.
        ({0: -0.1}, {1: -signal.SIGKILL, 0: 1}, "rank 1 was killed by signal SIGKILL"),
        # Rank 0 had failed long before rank 1 aborted, because rank 0 was gone.
        ({0: -5.0}, {1: -signal.SIGABRT}, "rank 0 failed: its error"),
        ({}, {1: 0}, "rank 1 exited without a result"),
    ],
)
def test_the_earliest_error_is_raised(
    records: dict[int, float], codes: dict[int, int | None], message: str, tmp_path: Path
) -> None:
    results, errors = (tuple(tmp_path / f"{name}-{rank}" for rank in range(3)) for name in ("result", "error"))
    for path in (*results, *errors):
        path.touch()
    spec = LaunchSpec(_blocks, (), 3, "gloo", 1.0, tmp_path / "store", results, errors, 0, 1, False)
    now = 100.0
    for rank, when in records.items():
        record = {"time": now + when, "what": "its error", "text": ""}
        spec.report(spec.errors[rank], json.dumps(record).encode())
    with pytest.raises(RuntimeError, match=message):
        raise_first_error(codes, spec, now)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    assert _error(_is_killed, 2, tmp_path) == "rank 1 was killed by signal SIGKILL"


def test_a_rank_that_crashes_prints_its_stack(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _error(_crashes, 2, tmp_path) == "rank 1 was killed by signal SIGSEGV"
    assert "in _crashes" in capfd.readouterr().err


def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    assert _error(_leaves, 2, tmp_path) == "rank 1 exited with code 7 before it could report"


@pytest.mark.sample(0)  # it waits for 20 s
def test_a_timeout_names_ranks_that_returned_and_did_not_end(tmp_path: Path) -> None:
    message = _error(_does_not_end, 2, tmp_path, timeout=20.0)
    assert message == "timeout after 20 s: ranks [1] of 2 had returned, and did not end; all stopped"


@pytest.mark.sample(0)  # it waits for 20 s
def test_a_timeout_names_the_unfinished_and_stops_them(tmp_path: Path) -> None:
    begin = time.monotonic()
    message = _error(_hangs, 2, tmp_path, timeout=20.0)
    assert message == "timeout after 20 s: ranks [1] of 2 had not finished; all stopped"
    assert time.monotonic() - begin < 35


def test_a_report_that_was_cut_off_is_none(tmp_path: Path) -> None:
    path = tmp_path / "report"
    LaunchSpec.report(path, b"result")
    whole = path.read_bytes()
    assert LaunchSpec.content(path) == b"result"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert LaunchSpec.content(path) is None


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_parent(number: signal.Signals, tmp_path: Path) -> None:
    """Neither a rank nor a file."""
    program = f"""
import signal
from distgemm.runtime.launch import launch
from tests.multiprocess.test_launch import _blocks
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background
    launch(_blocks, 2, {str(tmp_path)!r})
"""
    script = tmp_path.parent / "launches.py"
    script.write_text(program)
    root = str(Path(__file__).parents[2])
    temporary = tmp_path.parent / f"temporary-{number.name}"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(temporary)}
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, cwd=root)
    try:
        deadline = time.monotonic() + 40
        while len(_complete(tmp_path)) < 2:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(number)
        parent.wait(20)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while _alive(tmp_path):
        assert time.monotonic() < deadline, f"ranks {_alive(tmp_path)} are still there"
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.read_text()]


def test_wrong_arguments_raise() -> None:
    for arguments, options, named in (
        ((0,), {}, "world_size"),
        ((True,), {}, "world_size"),
        ((2,), {"backend": "mpi"}, "gloo, nccl"),
        ((2,), {"timeout": 0}, "timeout"),
        ((1000,), {"backend": "nccl"}, "1000 ranks takes 1000 CUDA devices"),
        ((2,), {"share": True}, "share=True is for backend 'nccl'"),
    ):
        with pytest.raises(ValueError, match=named):
            launch(_blocks, *arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="function is something that can be pickled"):
        launch(lambda: None, 2)
    assert multiprocessing.active_children() == []


def test_init_from_env_needs_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="or '': RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        init_from_env()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        assert init_from_env() == 0
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_rank_that_was_never_launched_makes_the_others_raise() -> None:
    program = 'from distgemm.runtime.launch import init_from_env; init_from_env("gloo", timeout=3)'
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | rank, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "Timed out after" in ended.stderr and "1/2 clients joined" in ended.stderr
