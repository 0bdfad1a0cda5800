"""Ways to compute an operation: this library's schedules, other libraries, and the parts that roofs are made of.

:mod:`distgemm.measure.operation` has those that torch offers.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)

from distgemm.api import compile
from distgemm.gemm import GemmTensors, bind
from distgemm.gemm.streams import new_stream
from distgemm.measure.operation import Method, Operation, executable_method
from distgemm.measure.timing import Sample
from distgemm.runtime.cuda.memops import copy_box
from distgemm.tune import TunedConfig, config_of

__all__ = [
    "auto_method",
    "copies_alone",
    "cutlass_alone",
    "quack_methods",
    "quack_version",
    "schedule_method",
    "without_barrier",
]

COPIES, BARRIER = "copies alone", "barrier alone"
QUACK_TILES = ((128, 256, False), (128, 192, True))
"""Rows and columns of a tile, and whether its kernel schedule is pingpong."""


def schedule_method(operation: Operation, config: TunedConfig) -> Method:
    """A schedule of this library, with its options. A collective call."""
    plan = config.plan(operation.problem, dist.get_world_size(operation.group))
    exe = compile(plan, group=operation.group, **asdict(config.execution))
    return executable_method(operation, config.text, exe)


def auto_method(operation: Operation) -> Method:
    """What ``schedule="auto"`` selects for the operation. The method's detail names it. A collective call."""
    exe = compile(operation.problem, "auto", pattern=operation.pattern, group=operation.group)
    method = executable_method(operation, "distgemm auto", exe)
    selected = config_of(exe)
    assert selected is not None
    method.detail = f"{selected}; {selected.source}"
    return method


def cutlass_alone(operation: Operation) -> Method:
    """The local GEMM by the provider cutlass, with the configuration that it selects for the shape."""
    a, b = operation.local_a, operation.b
    d = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    launch = bind(GemmTensors(a, b, d))

    def run() -> None:
        launch()

    return Method("CUTLASS alone", run)


def copies_alone(operation: Operation) -> list[Method]:
    """The operation's copies without signals and GEMMs, after a barrier of all ranks; and the barrier alone.

    Copy engines push the bytes on one stream: rank r sends to r-1, then to r-2, ... With "ag+gemm" it sends its shard
    of A; with an all-to-all its rows of each peer's columns, or each peer's rows of its columns; else the partial sums
    of each peer's rows of D; with "gemm+ar" then also its own rows of D to all.

    Without the barrier, ranks would fall out of step, and two ranks would send to one at half the speed. The time of
    the copies is the difference of both methods.
    """
    p, group = operation.problem, operation.group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = p.m // size
    columns = {"ag+gemm": p.k, "gemm+a2a": p.n // size, "a2a+gemm": p.k // size}.get(operation.pattern, p.n)
    dtype, device = operation.a.dtype, operation.device
    slots = symmetric_memory.empty(size, rows, columns, dtype=dtype, device=device)  # one for each sender
    handle = symmetric_memory.rendezvous(slots, group)
    # As many bytes as the operation sends, not all from one place.
    sent = operation.a.view(1, rows, columns) if operation.pattern == "ag+gemm" else torch.randn_like(slots)
    pairs = []
    for step in range(1, size):
        peer = (rank - step) % size
        target = handle.get_buffer(peer, (1, rows, columns), dtype, rank * rows * columns)
        pairs.append((target, sent if sent.shape[0] == 1 else sent[peer : peer + 1]))
    if operation.pattern == "gemm+ar":
        pairs += [(target, sent[rank : rank + 1]) for target, _ in pairs]

    def barrier() -> None:
        handle.barrier(channel=0)

    def run() -> None:
        assert slots is not None  # the closure keeps the memory that peers write
        barrier()
        stream = torch.cuda.current_stream(device).cuda_stream
        for target, source in pairs:
            copy_box(target, source, stream)

    return [Method(COPIES, run), Method(BARRIER, barrier)]


def without_barrier(found: dict[str, Sample]) -> dict[str, Sample]:
    """The samples without the barrier; its time is subtracted from that of the copies."""
    kept = {name: one for name, one in found.items() if name != BARRIER}
    if BARRIER in found and not found[COPIES].error:
        both = zip(found[COPIES].rounds, found[BARRIER].rounds, strict=False)
        kept[COPIES] = replace(found[BARRIER], rounds=tuple(copies - barrier for copies, barrier in both))
    return kept


def quack_version() -> str | None:
    """The version of quack-kernels; None if it is not installed."""
    if find_spec("quack") is None:
        return None
    try:
        return version("quack-kernels")
    except PackageNotFoundError:
        return "of unknown version"


def quack_methods(operation: Operation) -> list[Method]:
    """quack's all-gather + GEMM, with several tiles.

    Raises:
        ValueError: if its tiles do not divide the shards.
    """
    runner_of = import_module("quack.distributed").AllGatherRunner
    gemm = import_module("quack.gemm").gemm
    a, b, p = operation.a, operation.b, operation.problem
    rows = a.shape[0]
    if rows % 128:
        raise ValueError(f"its tiles have 128 rows, which do not divide shards of {rows}")
    cluster = (2, 1) if rows % 256 == 0 else (1, 2)
    found = []
    for tile_m, tile_n, pingpong in QUACK_TILES:
        # Its documentation says that replays in a row are faster with capture_lockstep. A runner must not be called
        # between replays of its graphs, so each method has its own runner.
        runner = runner_of(rows, p.k, a.dtype, operation.group, operation.device, capture_lockstep=True)
        # Its streams come from torch's pool of 32. A second use of a stream would put copies behind the kernel that
        # waits for them.
        for stream in ("push_stream", "barrier_stream"):
            getattr(runner, stream)  # raises if it has no such stream
            setattr(runner, stream, new_stream(operation.device))
        runner.handle.barrier(channel=0)  # loads its kernel, which must not happen while a kernel waits
        torch.cuda.synchronize(operation.device)
        d = torch.empty(p.m, b.shape[0], dtype=a.dtype, device=a.device)

        def run(
            runner: object = runner,
            d: torch.Tensor = d,
            tile: tuple[int, ...] = (tile_m, tile_n, *cluster),
            pingpong: bool = pingpong,
        ) -> torch.Tensor:
            with runner.gather(a) as (gathered, arrivals):  # type: ignore[attr-defined]
                gemm(gathered, b, d, None, None, *tile, pingpong=pingpong, ag_args=arrivals)
            return d

        found.append(Method(f"quack {tile_m}x{tile_n} {cluster[0]}x{cluster[1]}{' pingpong' * pingpong}", run))
    return found
