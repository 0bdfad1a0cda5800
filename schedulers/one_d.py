"""The 1D schedules: one axis of ranks 0..N-1. r: rank, i: iteration, all ranks modulo N.

The grids show world size 4, chunks 1: rows are tiles of the first mode, columns of the second.
With ``chunks=c`` a shard is c tiles along the mode that moves: tile = shard * c + chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from distgemm.layouts import Axis, Modulo, Offset, Swizzle, TVLayout
from distgemm.schedulers.registry import register_schedule
from distgemm.schedulers.routes import (
    AddPlace,
    BidirectionalFull,
    BidirectionalSplit,
    Chain,
    Direct,
    GatherRoute,
    Pairwise,
    ReduceRoute,
    Ring,
)
from distgemm.schedulers.scheduler import WHOLE, DistributedTileScheduler, Partition, Route, TileCoord

Mesh = tuple[int, ...]
ChunkMode = Literal["m", "n"]
Axes = tuple[Axis, ...]

ONE = (1,)


def _own(ranks: int) -> Axes:
    """Shard r of N."""
    return (Axis(ranks, rank=1),)


def _own_chunks(ranks: int, chunks: int) -> Axes:
    """The chunks of shard r; values (chunks,)."""
    return (Axis(chunks, value=1), Axis(ranks, rank=1))


def _all_chunks(ranks: int, chunks: int) -> Axes:
    """The chunks of every shard; values (chunks, N)."""
    return (Axis(chunks, value=(1, 0)), Axis(ranks, value=(0, 1)))


def _rotate(ranks: int, chunks: int, direction: int = 1, offset: int = 0) -> Axes:
    """Chunk by chunk, shard r + offset + direction * j; iterations (chunks, N)."""
    wrap = (Offset(offset), Modulo(ranks))
    return (Axis(chunks, value=(1, 0)), Axis(ranks, rank=1, value=(0, direction), maps=wrap))


def _chunk_order(shards: list[int], chunks: int) -> list[int]:
    """The order of iterations (chunks, N) that takes whole shards in the given order."""
    return [shard * chunks + chunk for shard in shards for chunk in range(chunks)]


def _staggered(name: str, work: TVLayout, stagger: int) -> TVLayout:
    """Work of iterations (chunks, N) in which each shard starts ``stagger`` chunks after the one before it.

    Of chunks that get the same place, the one of the shard that starts last comes first. 0 leaves the work as it is.
    """
    if not stagger:
        return work
    _check_stagger(name, stagger, work.values[0])
    return _in_order(work, lambda shard, chunk: (chunk + stagger * shard, chunk))


def _check_stagger(name: str, stagger: int, chunks: int) -> None:
    if stagger > chunks:
        raise ValueError(f"{name}: stagger is at most as many as there are chunks, {chunks}, got {stagger}")


def _in_order(work: TVLayout, key: Callable[[int, int], tuple[int, int]]) -> TVLayout:
    """Work of iterations (chunks, N), sorted by a key of the numbers of the shard and the chunk."""
    chunks, shards = work.values
    pairs = [(shard, chunk) for shard in range(shards) for chunk in range(chunks)]
    pairs.sort(key=lambda pair: key(*pair))
    return work.reorder([shard * chunks + chunk for shard, chunk in pairs])


# --- all-gather + GEMM: A is sharded along M, B and D along N -----------------------------------------
#
#        A (m, k)      B (n, k)      D (m, n)           iteration of (m, n), rotating A
#   m 0  | rank 0 |   | rank 0 |   | 0 | 1 | 2 | 3 |    | 0 | 3 | 2 | 1 |
#     1  | rank 1 |   | rank 1 |   | 0 | 1 | 2 | 3 |    | 1 | 0 | 3 | 2 |
#     2  | rank 2 |   | rank 2 |   | 0 | 1 | 2 | 3 |    | 2 | 1 | 0 | 3 |
#     3  | rank 3 |   | rank 3 |   | 0 | 1 | 2 | 3 |    | 3 | 2 | 1 | 0 |


def _gather_a(name: str, mesh: Mesh, chunks: int, work_m: Axes, route: GatherRoute) -> DistributedTileScheduler:
    (ranks,) = mesh
    partition = Partition(
        a=TVLayout(mesh, (chunks,), (_own_chunks(ranks, chunks), WHOLE, WHOLE)),
        b=TVLayout(mesh, ONE, (_own(ranks), WHOLE, WHOLE)),
        d=TVLayout(mesh, (chunks, ranks), (_all_chunks(ranks, chunks), _own(ranks), WHOLE)),
    )
    work = TVLayout(mesh, (chunks, ranks), (work_m, _own(ranks), WHOLE, WHOLE))
    return DistributedTileScheduler(name, partition, work, Route(a=route), TileCoord(chunks, 1, 1, 1))


@register_schedule(aliases=("AllGather1D_TilingCD_RotatingA",), default_for_pattern="ag+gemm")
def all_gather_1d_tiling_cd_rotating_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r + i, n = r; each shard of A comes straight from its owner (CUTLASS AllGather1D_TilingCD_RotatingA)."""
    return _gather_a("all_gather_1d_tiling_cd_rotating_a", mesh, chunks, _rotate(mesh[0], chunks), Direct())


@register_schedule()
def all_gather_1d_ring_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r - i, n = r; each shard of A is passed on from neighbour to neighbour, r to r + 1."""
    return _gather_a("all_gather_1d_ring_a", mesh, chunks, _rotate(mesh[0], chunks, -1), Ring())


def _bidirectional(
    name: str, mesh: Mesh, chunks: int, distances: list[int], route: GatherRoute
) -> DistributedTileScheduler:
    """Shard r - d, d the clockwise distances in the order in which the shards arrive."""
    schedule = _gather_a(name, mesh, chunks, _rotate(mesh[0], chunks, -1), route)
    work = schedule.work.reorder(_chunk_order(distances, chunks))
    return DistributedTileScheduler(name, schedule.partition, work, schedule.route, schedule.chunks)


@register_schedule()
def all_gather_1d_bidirectional_full_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r, r-1, r+1, r-2, r+2, ...; whole shards of A both ways round the ring (tt-metal FULL_TENSOR).

    The shard at ring distance d has arrived after d hops; the busier direction carries floor(N/2) shards.
    """
    (ranks,) = mesh
    distances = sorted(range(ranks), key=lambda d: (min(d, ranks - d), d))
    return _bidirectional("all_gather_1d_bidirectional_full_a", mesh, chunks, distances, BidirectionalFull())


@register_schedule()
def all_gather_1d_bidirectional_split_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r - d, ordered by max(d, N - d); half of each shard of A each way round (tt-metal SPLIT_TENSOR).

    The shard at clockwise distance d has arrived after max(d, N - d) hops; each direction carries
    (N - 1) / 2 shards.
    """
    (ranks,) = mesh
    distances = sorted(range(ranks), key=lambda d: (d != 0, max(d, ranks - d), d))
    return _bidirectional("all_gather_1d_bidirectional_split_a", mesh, chunks, distances, BidirectionalSplit())


@register_schedule()
def all_gather_1d_pairwise_xor_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r xor i, n = r; in every iteration the ranks exchange in pairs. World sizes are powers of two."""
    (ranks,) = mesh
    if ranks & (ranks - 1):
        raise ValueError(f"all_gather_1d_pairwise_xor_a pairs r with r xor i: world_size a power of two, got {ranks}")
    bits = ranks.bit_length() - 1
    partner = Axis(ranks, rank=1, value=(0, ranks), maps=(Swizzle(bits, 0, bits), Modulo(ranks)))
    work_m = (Axis(chunks, value=(1, 0)), partner)
    return _gather_a("all_gather_1d_pairwise_xor_a", mesh, chunks, work_m, Direct())


@register_schedule(aliases=("AllGather1D_TilingCD_RotatingB",))
def all_gather_1d_tiling_cd_rotating_b(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r, n = r + i; the shards of B move, A and D are sharded along M (CUTLASS AllGather1D_TilingCD_RotatingB)."""
    (ranks,) = mesh
    partition = Partition(
        a=TVLayout(mesh, ONE, (_own(ranks), WHOLE, WHOLE)),
        b=TVLayout(mesh, (chunks,), (_own_chunks(ranks, chunks), WHOLE, WHOLE)),
        d=TVLayout(mesh, (chunks, ranks), (_own(ranks), _all_chunks(ranks, chunks), WHOLE)),
    )
    work = TVLayout(mesh, (chunks, ranks), (_own(ranks), _rotate(ranks, chunks), WHOLE, WHOLE))
    name = "all_gather_1d_tiling_cd_rotating_b"
    return DistributedTileScheduler(name, partition, work, Route(b=Direct()), TileCoord(1, chunks, 1, 1))


@register_schedule()
def all_gather_1d_tiling_k_rotating_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """k = r + i, n = r; A is sharded along K and gathered chunk by chunk while D accumulates."""
    (ranks,) = mesh
    partition = Partition(
        a=TVLayout(mesh, (chunks,), (WHOLE, _own_chunks(ranks, chunks), WHOLE)),
        b=TVLayout(mesh, (chunks, ranks), (_own(ranks), _all_chunks(ranks, chunks), WHOLE)),
        d=TVLayout(mesh, ONE, (WHOLE, _own(ranks), WHOLE)),
    )
    work = TVLayout(mesh, (chunks, ranks), (WHOLE, _own(ranks), _rotate(ranks, chunks), WHOLE))
    name = "all_gather_1d_tiling_k_rotating_a"
    return DistributedTileScheduler(name, partition, work, Route(a=Direct()), TileCoord(1, 1, chunks, 1))


# --- GEMM + reduce-scatter: A and B are sharded along K, D along M or N -------------------------------
#
#        A (m, k)            B (n, k)            D (m, n)     iteration of (m, k), rotating C
#   m 0  | 0 | 1 | 2 | 3 |   | 0 | 1 | 2 | 3 |   | rank 0 |   | 3 | 0 | 1 | 2 |
#     1  | 0 | 1 | 2 | 3 |                       | rank 1 |   | 2 | 3 | 0 | 1 |
#     2  | 0 | 1 | 2 | 3 |                       | rank 2 |   | 1 | 2 | 3 | 0 |
#     3  | 0 | 1 | 2 | 3 |                       | rank 3 |   | 0 | 1 | 2 | 3 |


def _check_final_add(name: str, final_add: AddPlace) -> None:
    if final_add not in get_args(AddPlace):
        raise ValueError(f"{name}: final_add is {' or '.join(get_args(AddPlace))}, got {final_add!r}")


def _scatter_m(
    name: str,
    mesh: Mesh,
    chunks: int,
    iterations: tuple[int, int],
    work: Axes,
    route: ReduceRoute,
    chunk_mode: ChunkMode = "m",
) -> DistributedTileScheduler:
    """A schedule whose D is sharded along M.

    Args:
        name: of the schedule.
        mesh: one axis of ranks.
        chunks: of each shard of D.
        iterations: shape of the iterations.
        work: the axis of chunks and the axis of shards.
        route: of partial sums.
        chunk_mode: chunks are rows ("m") or columns ("n") of a shard.
    """
    (ranks,) = mesh
    chunk, shard = work
    own, every = _own(ranks), (Axis(ranks, value=1),)
    if chunk_mode == "m":
        partition = Partition(
            a=TVLayout(mesh, (chunks, ranks), (_all_chunks(ranks, chunks), own, WHOLE)),
            b=TVLayout(mesh, ONE, (WHOLE, own, WHOLE)),
            d=TVLayout(mesh, (chunks,), (_own_chunks(ranks, chunks), WHOLE, WHOLE)),
        )
        modes: tuple[Axes, ...] = ((chunk, shard), WHOLE, own, WHOLE)
        tiles = TileCoord(chunks, 1, 1, 1)
    elif chunk_mode == "n":
        columns = (Axis(chunks, value=1),)
        partition = Partition(
            a=TVLayout(mesh, (ranks,), (every, own, WHOLE)),
            b=TVLayout(mesh, (chunks,), (columns, own, WHOLE)),
            d=TVLayout(mesh, (chunks,), (own, columns, WHOLE)),
        )
        modes, tiles = ((shard,), (chunk,), own, WHOLE), TileCoord(1, chunks, 1, 1)
    else:
        raise ValueError(f"{name}: chunk_mode is m (chunks are rows of a shard) or n (columns), got {chunk_mode!r}")
    return DistributedTileScheduler(name, partition, TVLayout(mesh, iterations, modes), Route(d=route), tiles)


@register_schedule(aliases=("ReduceScatter1D_TilingA_RotatingC",), default_for_pattern="gemm+rs")
def reduce_scatter_1d_tiling_a_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue", stagger: int = 0
) -> DistributedTileScheduler:
    """m = r - 1 - i, k = r; partial sums of D travel around the ring, r to r + 1, each rank adding its part
    (CUTLASS ReduceScatter1D_TilingA_RotatingC).

    Args:
        mesh: one axis of ranks.
        chunks: of each shard of D.
        final_add: where the owner of a tile adds the sum that arrives last. "epilogue": in its own GEMM, which waits
            for the sum. "kernel": in a kernel after its own GEMM, which waits for nothing: the replay ends sooner, for
            more memory traffic.
        stagger: each shard starts so many chunks after the one before it, 1 to ``chunks``. The chunks of an owner's own
            shard, which travel nowhere, then come between others, and sums are on their way until shortly before the
            end. 0: shard by shard, the own one last.
    """
    (ranks,) = mesh
    name = "reduce_scatter_1d_tiling_a_rotating_c"
    _check_final_add(name, final_add)
    work = _rotate(ranks, chunks, direction=-1, offset=-1)
    schedule = _scatter_m(name, mesh, chunks, (chunks, ranks), work, Chain(final_add=final_add))
    return replace(schedule, work=_staggered(name, schedule.work, stagger))


@register_schedule()
def reduce_scatter_1d_pairwise_a(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "kernel", stagger: int = 0, chunk_mode: ChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r + 1 + j, k = r; each partial result goes directly to its owner, which adds all N once.

    There are S = chunks * N iterations; the rank's own slice comes last (nvFuser's ring GEMM + reduce-scatter).

    Args:
        mesh: one axis of ranks.
        chunks: of each shard of D.
        final_add: where an owner adds the partial results. "kernel": in a kernel of its own, with i = chunk * N + j.
            "epilogue": in the epilogue of its own GEMM, with i = j * chunks + chunk; its own shard, which waits for all
            others, comes after all of them.
        stagger: with final_add="epilogue", 1 to ``chunks``: chunk by chunk, with chunk c of the own shard just before
            chunk c + stagger of the others. 0: shard by shard, the own one last.
        chunk_mode: "m": a chunk is some rows of a shard of D, multiplied by all of B. "n": a chunk is some columns of
            all rows, multiplied by a part of B. Columns are for shards of few rows, whose chunks of rows would be
            smaller than tiles.
    """
    (ranks,) = mesh
    name = "reduce_scatter_1d_pairwise_a"
    _check_final_add(name, final_add)
    if final_add == "epilogue":
        _check_stagger(name, stagger, chunks)
        work = _rotate(ranks, chunks, offset=1)
        schedule = _scatter_m(name, mesh, chunks, (chunks, ranks), work, Pairwise(final_add="epilogue"), chunk_mode)
        if not stagger:
            return schedule
        own = ranks - 1

        def place(shard: int, chunk: int) -> tuple[int, int]:
            return ((chunk + stagger) * own, 0) if shard == own else (chunk * own + shard, 1)

        return replace(schedule, work=_in_order(schedule.work, place))
    if stagger:
        raise ValueError(
            f"{name}: stagger goes with final_add='epilogue', where an owner adds chunk by chunk, got {final_add!r}"
        )
    slices = Axis(ranks, rank=1, value=(1, 0), maps=(Offset(1), Modulo(ranks)))
    return _scatter_m(name, mesh, chunks, (ranks, chunks), (Axis(chunks, value=(0, 1)), slices), Pairwise(), chunk_mode)


@register_schedule(aliases=("ReduceScatter1D_TilingB_RotatingC",))
def reduce_scatter_1d_tiling_b_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue", stagger: int = 0
) -> DistributedTileScheduler:
    """n = r - 1 - i, k = r; as tiling A, with D sharded along N (CUTLASS ReduceScatter1D_TilingB_RotatingC)."""
    (ranks,) = mesh
    name = "reduce_scatter_1d_tiling_b_rotating_c"
    _check_final_add(name, final_add)
    partition = Partition(
        a=TVLayout(mesh, ONE, (WHOLE, _own(ranks), WHOLE)),
        b=TVLayout(mesh, (chunks, ranks), (_all_chunks(ranks, chunks), _own(ranks), WHOLE)),
        d=TVLayout(mesh, (chunks,), (WHOLE, _own_chunks(ranks, chunks), WHOLE)),
    )
    work_n = _rotate(ranks, chunks, direction=-1, offset=-1)
    work = _staggered(name, TVLayout(mesh, (chunks, ranks), (WHOLE, work_n, _own(ranks), WHOLE)), stagger)
    return DistributedTileScheduler(
        name, partition, work, Route(d=Chain(final_add=final_add)), TileCoord(1, chunks, 1, 1)
    )
