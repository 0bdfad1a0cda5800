"""One process for each rank: start them, or join those that torchrun started."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
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
import torch.distributed.nn  # noqa: F401  (before init_process_group: its functions have the group as a default)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

from distgemm.arguments import boolean, finite, integer, member, wrong
from distgemm.arguments import function as called
from distgemm.runtime.checks import HOST_MESH
from distgemm.schedulers.registry import MAX_RANKS
from distgemm.system import cores

__all__ = ["BACKENDS", "Backend", "LaunchSpec", "init_from_env", "launch", "mesh_from_env", "raise_first_error"]

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

LAUNCH_TIMEOUT_S = 300.0
"""Time for all that the ranks do, unless the caller gives another."""
STOP_TIMEOUT_S = 5.0
"""Time for a rank to stop when it is asked to, before it is killed."""
LENGTH_BYTES = 8
"""Bytes of a report's length."""
SIGNAL_NOTICE_S = 0.5
"""A death by signal leaves no record. It happened at most about this time before it is noticed."""
MAX_TIMEOUT_S = 1e8
"""About three years: a longer time does not fit in what the operating system takes."""


def _variable(name: str, least: int, most: int) -> int:
    """A number that torchrun has put into the environment."""
    text = os.environ[name]
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
        raise wrong(name, f"an integer from {least} to {most} in the environment, as torchrun sets it", text)
    return int(text)


def _check_pickled(name: str, value: Any) -> None:
    """Raises ValueError for what cannot be sent to another process."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise wrong(name, f"something that can be pickled (here: {error})", value) from None


def init_from_env(backend: Backend = "gloo", timeout: float = LAUNCH_TIMEOUT_S) -> int:
    """Initialise torch.distributed in a process that torchrun started, and return the rank.

    It does nothing where a process group exists already, as in the ranks of :func:`launch`. So one function runs under
    both.

    Args:
        backend: "gloo", or "nccl": then the rank takes the CUDA device LOCAL_RANK.
        timeout: seconds that collectives and the start wait for other ranks.

    Raises:
        ValueError: where torchrun's variables are absent or wrong, and for a wrong argument.
    """
    member("backend", backend, BACKENDS)
    timeout = finite("timeout", timeout, above=0, most=MAX_TIMEOUT_S)
    if not dist.is_initialized():
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if absent:
            raise ValueError(
                f"absent from the environment, or '': {', '.join(absent)}; run under torchrun, or use launch"
            )
        world_size = _variable("WORLD_SIZE", 1, MAX_RANKS)
        rank = _variable("RANK", 0, world_size - 1)
        _variable("MASTER_PORT", 0, 2**16 - 1)
        local_rank = _variable("LOCAL_RANK", 0, rank) if "LOCAL_RANK" in os.environ else rank
        _init(backend, rank, world_size, local_rank, "env://", timeout)
        # A thread of gloo that drops a tensor of Python while the interpreter ends aborts the process (PyTorch issue
        # 190489). A group ends its threads once nothing refers to it, but meshes of torch are cycles.
        atexit.register(gc.collect)
    return dist.get_rank()


def mesh_from_env(backend: Backend = "gloo", timeout: float = LAUNCH_TIMEOUT_S) -> DeviceMesh:
    """A mesh ("host", "rank") of the ranks that torchrun started: its hosts, and the ranks of each of them.

    With "nccl", machines whose GPUs share memory are one host, such as those of one NVLink domain of 72 GPUs: the ranks
    find it out, see :mod:`distgemm.runtime.cuda.fabric`. torch.distributed is initialised as :func:`init_from_env` does
    it.

    Args:
        backend: as :func:`init_from_env` takes it.
        timeout: as :func:`init_from_env` takes it.

    Returns:
        The mesh, of CUDA devices with "nccl", otherwise of CPUs. ``distgemm.compile``, functions and layers take it as
        their group.

    Raises:
        ValueError: as :func:`init_from_env` raises it, and where hosts have different numbers of ranks.
    """
    rank = init_from_env(backend, timeout)
    if not os.environ.get("LOCAL_WORLD_SIZE"):
        raise ValueError("absent from the environment, or '': LOCAL_WORLD_SIZE; run under torchrun")
    ranks = dist.get_world_size()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, _variable("LOCAL_WORLD_SIZE", 1, ranks))
    if len(set(every)) > 1 or ranks % every[rank]:
        raise ValueError(f"each host has as many ranks as the others, got by rank {every}: start torchrun with one")
    of_host = every[rank]
    if backend == "nccl":
        from distgemm.runtime.cuda.fabric import ranks_of_domain  # ranks on CPUs need no CUDA

        of_host = ranks_of_domain(of_host, torch.device("cuda", torch.cuda.current_device()))
    shape = ranks // of_host, of_host
    return init_device_mesh("cuda" if backend == "nccl" else "cpu", shape, mesh_dim_names=HOST_MESH)


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
    member("backend", backend, BACKENDS)
    world_size = integer("world_size", world_size, 1, MAX_RANKS)
    timeout = finite("timeout", timeout, above=0, most=MAX_TIMEOUT_S)
    boolean("share", share)
    if share and backend != "nccl":
        raise ValueError(f"share=True is for backend 'nccl', whose ranks have CUDA devices; got {backend!r}")
    if backend == "nccl" and (found := torch.cuda.device_count()) < (wanted := 1 if share else world_size):
        raise ValueError(f"nccl with {world_size} ranks takes {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    _check_pickled("function", called("function", function, "a function of a module"))
    for index, argument in enumerate(args):
        _check_pickled(f"args[{index}]", argument)
    with contextlib.ExitStack() as stack:
        store, *reports = (stack.enter_context(_nameless_file()) for _ in range(1 + 2 * world_size))
        results, errors = tuple(reports[:world_size]), tuple(reports[world_size:])
        processes = stack.enter_context(_started())
        threads = max(1, cores() // world_size)
        spec = LaunchSpec(
            function, args, world_size, backend, timeout, store, results, errors, os.getpid(), threads, share
        )
        deadline = time.monotonic() + timeout
        context = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, (spec,), world_size, join=False, daemon=True, start_method="spawn"
        )
        assert context is not None
        processes += context.processes
        _watch(processes, spec, deadline)
        return [pickle.loads(spec.content(path) or b"") for path in results]


@contextlib.contextmanager
def _nameless_file() -> Iterator[Path]:
    """A path by which other processes open a file that has no name: it goes with this process, however that ends."""
    with tempfile.TemporaryFile() as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


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
        store: file for the store of the group.
        results: by rank, the file with its result.
        errors: by rank, the file with its error.
        parent: process id of the launcher.
        threads: threads of torch, for each rank.
        share: whether ranks share CUDA devices.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: Backend
    timeout: float
    store: Path
    results: tuple[Path, ...]
    errors: tuple[Path, ...]
    parent: int
    threads: int
    share: bool

    @staticmethod
    def report(path: Path, content: bytes) -> None:
        """Write a report, with its length behind it: a rank may be stopped at any time."""
        path.write_bytes(content + len(content).to_bytes(LENGTH_BYTES, "little"))

    @staticmethod
    def content(path: Path) -> bytes | None:
        """What was reported; None where no report, or not all of it, was written."""
        written = path.read_bytes()
        content, length = written[:-LENGTH_BYTES], written[-LENGTH_BYTES:]
        return content if length == len(content).to_bytes(LENGTH_BYTES, "little") else None


def _run_rank(rank: int, spec: LaunchSpec) -> None:
    """The main function of a rank's process."""
    # Torch asks the kernel for SIGINT when the parent dies; Python's handler would not run in a blocked call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()  # a rank that crashes prints where its threads were
    if os.getppid() != spec.parent:
        raise SystemExit("the process that launched this rank is gone")
    try:
        torch.set_num_threads(spec.threads)
        # Longer than the launcher's timeout, whose message says which ranks had not finished.
        store = f"file://{spec.store}"
        device = _shared(rank) if spec.share else rank
        _init(spec.backend, rank, spec.world_size, device, store, spec.timeout + 4 * STOP_TIMEOUT_S)
        spec.report(spec.results[rank], pickle.dumps(spec.function(*spec.args)))
        if dist.is_initialized():
            # A rank that leaves early would break the connections of those that still run.
            dist.barrier(device_ids=[device] if spec.backend == "nccl" else None)
    except BaseException as error:
        record = {"time": time.monotonic(), "what": f"{type(error).__name__}: {error}", "text": traceback.format_exc()}
        spec.report(spec.errors[rank], json.dumps(record).encode())
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
        if any(codes.values()) or any(spec.content(spec.results[rank]) is None for rank in codes):
            raise_first_error(codes, spec, now)
        if running and now >= deadline:
            unfinished = [rank for rank, path in enumerate(spec.results) if spec.content(path) is None]
            what = f"ranks {unfinished} of {spec.world_size} had not finished"
            if not unfinished:  # they wait for each other's messages, or for an exit handler
                what = f"ranks {list(running)} of {spec.world_size} had returned, and did not end"
            raise RuntimeError(f"timeout after {spec.timeout:g} s: {what}; all stopped")


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
        if (report := spec.content(spec.errors[rank])) is not None:
            record = json.loads(report)
            failures.append((record["time"], rank, f"rank {rank} failed: {record['what']}\n\n{record['text']}"))
        elif code := codes.get(rank):
            if code < 0:
                failures.append(
                    (now - SIGNAL_NOTICE_S, rank, f"rank {rank} was killed by signal {_signal_name(-code)}")
                )
            else:
                failures.append((now, rank, f"rank {rank} exited with code {code} before it could report"))
        elif rank in codes and spec.content(spec.results[rank]) is None:
            failures.append((now, rank, f"rank {rank} exited without a result"))
    raise RuntimeError(min(failures)[2])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
