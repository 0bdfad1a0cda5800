"""One process for each rank: start them, or join those that torchrun started."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from distgemm.system import cores

__all__ = ["BACKENDS", "Backend", "LaunchSpec", "init_from_env", "launch", "raise_first_error"]

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

LAUNCH_TIMEOUT_S = 300.0
"""Time for all that the ranks do, unless the caller gives another."""
STOP_TIMEOUT_S = 5.0
"""Time for a rank to stop when it is asked to, before it is killed."""
SIGNAL_NOTICE_S = 0.5
"""A death by signal leaves no record. It happened at most about this time before it is noticed."""


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}, got {backend!r}")


def init_from_env(backend: Backend = "gloo", timeout: float = LAUNCH_TIMEOUT_S) -> int:
    """Initialise torch.distributed in a process that torchrun started, and return the rank.

    It does nothing where a process group exists already, as in the ranks of :func:`launch`. So one function runs under
    both.

    Args:
        backend: "gloo", or "nccl": then the rank takes the CUDA device LOCAL_RANK.
        timeout: seconds that collectives and the start wait for other ranks.

    Raises:
        ValueError: where torchrun's variables are absent.
    """
    _check_backend(backend)
    if not dist.is_initialized():
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ValueError(f"{', '.join(absent)} not in the environment: run under torchrun, or use launch")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _init(backend, rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), "env://", timeout)
    return dist.get_rank()


def _init(backend: Backend, rank: int, world_size: int, local_rank: int, method: str, timeout: float) -> None:
    device = None
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: Backend = "gloo",
    timeout: float = LAUNCH_TIMEOUT_S,
    share: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` new processes that form a group.

    It returns or raises only when all processes have ended.

    Args:
        function: a function of a module, so that a new process can import it. It finds torch.distributed initialised,
            and its rank in ``dist.get_rank()``. Its process ends right behind it and runs what atexit knows: files that
            it leaves open are not flushed.
        world_size: number of ranks.
        *args: arguments. They and results are pickled: return CPU tensors.
        backend: "gloo", or "nccl": then the rank is also the number of its CUDA device.
        timeout: seconds for everything, from the start of the processes (which import torch first).
        share: with "nccl", rank r has device r modulo the number of devices. It is for tests of more ranks than there
            are GPUs: kernels of ranks on one GPU alternate, some milliseconds each, and NCCL goes through sockets.

    Returns:
        The results by rank.

    Raises:
        ValueError: for arguments that do not fit.
        RuntimeError: with the rank and its traceback when a rank fails. It is the first rank by time, since the others
            fail because their peer is gone. A rank that a signal killed is named with the signal. On a timeout all
            ranks are stopped, and the message names those that had not finished.
    """
    _check_backend(backend)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is an integer >= 1, got {world_size!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds > 0, got {timeout!r}")
    if share and backend != "nccl":
        raise ValueError(f"share=True is for backend 'nccl', whose ranks have CUDA devices; got {backend!r}")
    if backend == "nccl" and (found := torch.cuda.device_count()) < (wanted := 1 if share else world_size):
        raise ValueError(f"nccl with {world_size} ranks takes {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    with tempfile.TemporaryDirectory(prefix="distgemm-") as folder, _started() as processes:
        threads = max(1, cores() // world_size)
        spec = LaunchSpec(function, args, world_size, backend, timeout, Path(folder), os.getpid(), threads, share)
        deadline = time.monotonic() + timeout
        context = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, (spec,), world_size, join=False, daemon=True, start_method="spawn"
        )
        assert context is not None
        processes += context.processes
        _watch(processes, spec, deadline)
        return [pickle.loads(spec.result(rank).read_bytes()) for rank in range(world_size)]


@contextlib.contextmanager
def _started() -> Iterator[list[BaseProcess]]:
    """A list for the processes that are started inside. They are gone when the context is left, however it is left."""
    before = set(multiprocessing.active_children())
    processes: list[BaseProcess] = []
    try:
        yield processes
    finally:
        # If the start was interrupted, only active_children() knows the processes that run already.
        _stop([*processes, *(set(multiprocessing.active_children()) - before - set(processes))])


def _stop(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True)
class LaunchSpec:
    """What the processes of one launch need, and where they report.

    Attributes:
        function: what each rank calls.
        args: its arguments.
        world_size: number of ranks.
        backend: of the group.
        timeout: seconds for everything.
        folder: for reports, and for the store of the group.
        parent: process id of the launcher.
        threads: threads of torch, for each rank.
        share: whether ranks share CUDA devices.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: Backend
    timeout: float
    folder: Path
    parent: int
    threads: int
    share: bool

    def result(self, rank: int) -> Path:
        """The file with a rank's result."""
        return self.folder / f"result-{rank}"

    def error(self, rank: int) -> Path:
        """The file with a rank's error."""
        return self.folder / f"error-{rank}"

    @staticmethod
    def report(path: Path, content: bytes) -> None:
        """Write all of a report or nothing: a rank may be stopped at any time."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)


def _run_rank(rank: int, spec: LaunchSpec) -> None:
    """The main function of a rank's process."""
    # Torch asks the kernel for SIGINT when the parent dies; Python's handler would not run in a blocked call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != spec.parent:
        raise SystemExit("the process that launched this rank is gone")
    try:
        torch.set_num_threads(spec.threads)
        # Longer than the launcher's timeout, whose message says which ranks had not finished.
        store = f"file://{spec.folder}/store"
        device = _shared(rank) if spec.share else rank
        _init(spec.backend, rank, spec.world_size, device, store, spec.timeout + 4 * STOP_TIMEOUT_S)
        spec.report(spec.result(rank), pickle.dumps(spec.function(*spec.args)))
        if dist.is_initialized():
            # A rank that leaves early would break the connections of those that still run.
            dist.barrier(device_ids=[device] if spec.backend == "nccl" else None)
    except BaseException as error:
        record = {"time": time.monotonic(), "what": f"{type(error).__name__}: {error}", "text": traceback.format_exc()}
        spec.report(spec.error(rank), json.dumps(record).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up: a communicator whose peers are gone may block in its destructor.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    # Python's own exit handlers, without those of torch's libraries: now and then one of their threads is still there,
    # and aborts the process ("terminate called without an active exception") although all work is done.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _shared(rank: int) -> int:
    """The CUDA device of a rank that shares it; sets what torch and NCCL need, since NCCL refuses it on one host."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return rank % torch.cuda.device_count()


def _watch(processes: Sequence[BaseProcess], spec: LaunchSpec, deadline: float) -> None:
    """Wait until all ranks have ended. Raises RuntimeError where one fails."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        # A sentinel is ready a little before the exit code is.
        ended = {rank: process for rank, process in running.items() if wait([process.sentinel], 0)}
        codes: dict[int, int | None] = {}
        for rank, process in ended.items():
            process.join(STOP_TIMEOUT_S)
            codes[rank] = process.exitcode
            del running[rank]
        if any(codes.values()) or any(not spec.result(rank).exists() for rank in codes):
            raise_first_error(codes, spec, now)
        if running and now >= deadline:
            unfinished = [rank for rank in range(spec.world_size) if not spec.result(rank).exists()]
            raise RuntimeError(
                f"timeout after {spec.timeout:g} s: ranks {unfinished} of {spec.world_size} had not finished; "
                "all stopped"
            )


def raise_first_error(codes: dict[int, int | None], spec: LaunchSpec, now: float) -> NoReturn:
    """Raise the first error of any rank, by time.

    Args:
        codes: exit codes by rank, of those that have ended.
        spec: of the launch.
        now: when the end was noticed, as time.monotonic().

    Raises:
        RuntimeError: always.
    """
    failures: list[tuple[float, int, str]] = []
    for rank in range(spec.world_size):
        if spec.error(rank).exists():
            record = json.loads(spec.error(rank).read_bytes())
            failures.append((record["time"], rank, f"rank {rank} failed: {record['what']}\n\n{record['text']}"))
        elif code := codes.get(rank):
            if code < 0:
                failures.append(
                    (now - SIGNAL_NOTICE_S, rank, f"rank {rank} was killed by signal {_signal_name(-code)}")
                )
            else:
                failures.append((now, rank, f"rank {rank} exited with code {code} before it could report"))
        elif rank in codes and not spec.result(rank).exists():
            failures.append((now, rank, f"rank {rank} exited without a result"))
    raise RuntimeError(min(failures)[2])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
