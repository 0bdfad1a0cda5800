"""One process for each rank: spawn them, or join those that torchrun started."""

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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["BACKENDS", "init_from_env", "launch"]

BACKENDS = ("gloo", "nccl")

GRACE = 5.0
"""Seconds that a rank has to stop when it is asked to, before it is killed."""

NOTICE = 0.5
"""A death by signal leaves no record; it happened at most about this many seconds before it is noticed."""


def _backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def init_from_env(backend: str = "gloo", timeout: float = 300.0) -> int:
    """Initialise torch.distributed in a process that torchrun started; returns the rank.

    With "nccl" the rank takes the CUDA device LOCAL_RANK. Does nothing where a process group exists already, as
    in the ranks of :func:`launch`, so that one function runs under both. Raises ValueError where torchrun's
    variables are absent.
    """
    _backend(backend)
    if not dist.is_initialized():
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ValueError(f"{', '.join(absent)} not in the environment: run under torchrun, or use launch")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _init(backend, rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), "env://", timeout)
    return dist.get_rank()


def _init(backend: str, rank: int, world_size: int, local_rank: int, method: str, timeout: float) -> None:
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
    backend: str = "gloo",
    timeout: float = 300.0,
    share: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` new processes that form a group; returns their results by rank.

    function:  a function of a module, so that a new process can import it. It finds torch.distributed
               initialised and its rank in ``dist.get_rank()``. Arguments and results are pickled: return CPU tensors.
               Its process ends behind it, with what atexit knows: files that it leaves open are not flushed
    backend:   "gloo", or "nccl": then the rank is also the number of its CUDA device
    timeout:   seconds for everything, from the start of the processes (which import torch first)
    share:     with "nccl", rank r has device r modulo the number of devices: for tests of more ranks than there are
               GPUs. Kernels of ranks on one GPU take turns, some milliseconds each, and NCCL goes through sockets

    Returns or raises only when all processes have ended. Raises ValueError for arguments that do not fit, and
    RuntimeError with the rank and its traceback when a rank fails: the first one, by time, since the others fail
    for want of their peer. A rank that a signal killed is named with the signal. On a timeout all ranks are
    stopped and the message names those that had not finished.
    """
    _backend(backend)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is an integer >= 1, got {world_size!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds > 0, got {timeout!r}")
    if share and backend != "nccl":
        raise ValueError(f"share=True is for backend 'nccl', whose ranks have CUDA devices; got {backend!r}")
    if backend == "nccl" and (found := torch.cuda.device_count()) < (wanted := 1 if share else world_size):
        raise ValueError(f"nccl with {world_size} ranks takes {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    with tempfile.TemporaryDirectory(prefix="distgemm-") as folder, _started() as processes:
        threads = max(1, (os.cpu_count() or 1) // world_size)
        job = _Job(function, args, world_size, backend, timeout, Path(folder), os.getpid(), threads, share)
        deadline = time.monotonic() + timeout
        context = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, (job,), world_size, join=False, daemon=True, start_method="spawn"
        )
        assert context is not None
        processes += context.processes
        _watch(processes, job, deadline)
        return [pickle.loads(job.result(rank).read_bytes()) for rank in range(world_size)]


@contextlib.contextmanager
def _started() -> Iterator[list[BaseProcess]]:
    """The processes that are started inside; they are gone when it is left, however it is left."""
    before = set(multiprocessing.active_children())
    processes: list[BaseProcess] = []
    try:
        yield processes
    finally:
        # Where starting them was interrupted, only active_children() knows those that run already.
        _stop([*processes, *(set(multiprocessing.active_children()) - before - set(processes))])


def _stop(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True)
class _Job:
    """What the processes are told, and where they report.

    parent:  process id of the launcher
    threads: of torch, for each rank
    share:   whether ranks share CUDA devices
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str
    timeout: float
    folder: Path
    parent: int
    threads: int
    share: bool

    def result(self, rank: int) -> Path:
        return self.folder / f"result-{rank}"

    def error(self, rank: int) -> Path:
        return self.folder / f"error-{rank}"

    @staticmethod
    def report(path: Path, content: bytes) -> None:
        """All of a report or nothing: a rank may be stopped at any time."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)


def _run_rank(rank: int, job: _Job) -> None:
    """The main function of a rank's process."""
    # Torch asks the kernel for SIGINT when the parent dies; Python's handler would not run in a blocked call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != job.parent:
        raise SystemExit("the process that launched this rank is gone")
    try:
        torch.set_num_threads(job.threads)
        # The launcher's own timeout comes first: it says which ranks had not finished.
        store = f"file://{job.folder}/store"
        device = _shared(rank) if job.share else rank
        _init(job.backend, rank, job.world_size, device, store, job.timeout + 4 * GRACE)
        job.report(job.result(rank), pickle.dumps(job.function(*job.args)))
        if dist.is_initialized():
            # A rank that leaves early would break the connections of those still at work.
            dist.barrier(device_ids=[device] if job.backend == "nccl" else None)
    except BaseException as error:
        record = {"time": time.monotonic(), "what": f"{type(error).__name__}: {error}", "text": traceback.format_exc()}
        job.report(job.error(rank), json.dumps(record).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up: a communicator whose peers are gone may block in its destructor.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    # Python's own end, without that of torch's libraries: now and then one of their threads is still there, which
    # aborts the process ("terminate called without an active exception"), all work done.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _shared(rank: int) -> int:
    """The CUDA device of a rank that shares it; says so to torch, and to NCCL, which refuses it within one host."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return rank % torch.cuda.device_count()


def _watch(processes: Sequence[BaseProcess], job: _Job, deadline: float) -> None:
    """Until all ranks have ended well; raises where one has not."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        # A sentinel is ready a little before the exit code is.
        ended = {rank: process for rank, process in running.items() if wait([process.sentinel], 0)}
        codes: dict[int, int | None] = {}
        for rank, process in ended.items():
            process.join(GRACE)
            codes[rank] = process.exitcode
            del running[rank]
        if any(codes.values()) or any(not job.result(rank).exists() for rank in codes):
            _fail(codes, job, now)
        if running and now >= deadline:
            unfinished = [rank for rank in range(job.world_size) if not job.result(rank).exists()]
            raise RuntimeError(
                f"timeout after {job.timeout:g} s: ranks {unfinished} of {job.world_size} had not finished; all stopped"
            )


def _fail(codes: dict[int, int | None], job: _Job, now: float) -> NoReturn:
    """Raise the first error of any rank, by time."""
    failures: list[tuple[float, int, str]] = []
    for rank in range(job.world_size):
        if job.error(rank).exists():
            record = json.loads(job.error(rank).read_bytes())
            failures.append((record["time"], rank, f"rank {rank} failed: {record['what']}\n\n{record['text']}"))
        elif code := codes.get(rank):
            if code < 0:
                failures.append((now - NOTICE, rank, f"rank {rank} was killed by signal {_signal_name(-code)}"))
            else:
                failures.append((now, rank, f"rank {rank} exited with code {code} before it could report"))
        elif rank in codes and not job.result(rank).exists():
            failures.append((now, rank, f"rank {rank} exited without a result"))
    raise RuntimeError(min(failures)[2])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
