"""What schedules of ours are measured against, beside what torch offers: parts for roofs, and other libraries."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distgemm.gemm import GemmTensors, bind
from distgemm.gemm.streams import new_stream
from distgemm.measure.timing import Method, Operation, Sample
from distgemm.runtime.cuda.memops import copy_box

__all__ = ["copies_alone", "cutlass_alone", "quack_methods", "quack_version", "without_barrier"]

COPIES, BARRIER = "copies alone", "barrier alone"
QUACK_TILES = ((128, 256, False), (128, 192, True))
"""Rows and columns of a tile, and whether it is "pingpong"."""


def cutlass_alone(operation: Operation) -> Method:
    """The whole local product by our provider, in the configuration that it chooses for the shape."""
    a, b = operation.local_a, operation.b
    d = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    launch = bind(GemmTensors(a, b, d))

    def run() -> None:
        launch()

    return Method("CUTLASS alone", run)


def copies_alone(operation: Operation) -> list[Method]:
    """The operation's bytes pushed to all peers by copy engines, in turn on one stream: rank r sends to r-1, r-2, ...

    "ag+gemm": a rank's shard of A; otherwise the partial sums of each peer's rows of D; "gemm+ar": its own rows of D
    besides, to all. No signals, no GEMMs.

    Behind a barrier of all ranks, for without one they fall out of step, and two of them send to one at half the
    speed. What the barrier takes is the second method: the copies take the difference.
    """
    p, group = operation.problem, operation.group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows, columns = p.m // size, p.k if operation.pattern == "ag+gemm" else p.n
    dtype, device = operation.a.dtype, operation.device
    slots = symmetric_memory.empty(size, rows, columns, dtype=dtype, device=device)  # one for each sender
    handle = symmetric_memory.rendezvous(slots, group)
    # As many bytes as the operation sends, and not all from the same place.
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
        assert slots is not None  # kept for as long as it is written
        barrier()
        stream = torch.cuda.current_stream(device).cuda_stream
        for target, source in pairs:
            copy_box(target, source, stream)

    return [Method(COPIES, run), Method(BARRIER, barrier)]


def without_barrier(found: dict[str, Sample]) -> dict[str, Sample]:
    """Samples in which the copies alone take what they take more than the barrier; without the barrier itself."""
    kept = {name: one for name, one in found.items() if name != BARRIER}
    if BARRIER in found and not found[COPIES].error:
        both = zip(found[COPIES].rounds, found[BARRIER].rounds, strict=False)
        kept[COPIES] = replace(found[BARRIER], rounds=tuple(copies - barrier for copies, barrier in both))
    return kept


def quack_version() -> str | None:
    """The version of quack-kernels; None where it is not installed."""
    if find_spec("quack") is None:
        return None
    try:
        return version("quack-kernels")
    except PackageNotFoundError:
        return "of unknown version"


def quack_methods(operation: Operation) -> list[Method]:
    """quack's all-gather + GEMM, with several tiles. Raises ValueError where its tiles do not divide the shards."""
    runner_of = import_module("quack.distributed").AllGatherRunner
    gemm = import_module("quack.gemm").gemm
    a, b, p = operation.a, operation.b, operation.problem
    rows = a.shape[0]
    if rows % 128:
        raise ValueError(f"its tiles have 128 rows, which do not divide shards of {rows}")
    cluster = (2, 1) if rows % 256 == 0 else (1, 2)
    found = []
    for tile_m, tile_n, pingpong in QUACK_TILES:
        # Graphs that are replayed in a row are faster with capture_lockstep, its documentation says. Each method has a
        # runner of its own: one may not be called between replays of its graphs.
        runner = runner_of(rows, p.k, a.dtype, operation.group, operation.device, capture_lockstep=True)
        # Its streams are of torch's pool, which after 32 gives the first again: captured on that one, copies
        # would stand behind the kernel that waits for them.
        for stream in ("push_stream", "barrier_stream"):
            getattr(runner, stream)  # raises where it has none of that name
            setattr(runner, stream, new_stream(operation.device))
        runner.handle.barrier(channel=0)  # loads its kernel, which must not happen beside a kernel that waits
        torch.cuda.synchronize(operation.device)
        d = torch.empty(p.m, b.shape[0], dtype=a.dtype, device=a.device)

        def run(
            runner: object = runner,
            d: torch.Tensor = d,
            how: tuple[int, ...] = (tile_m, tile_n, *cluster),
            pingpong: bool = pingpong,
        ) -> torch.Tensor:
            with runner.gather(a) as (gathered, arrivals):  # type: ignore[attr-defined]
                gemm(gathered, b, d, None, None, *how, pingpong=pingpong, ag_args=arrivals)
            return d

        found.append(Method(f"quack {tile_m}x{tile_n} {cluster[0]}x{cluster[1]}{' pingpong' * pingpong}", run))
    return found
