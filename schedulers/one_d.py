"""The schedules on one axis of N ranks.

r is the rank and i the iteration. "m = r + i, n = r" means: in iteration i rank r multiplies shard r + i of mode m with
shard r of mode n. All sums are modulo N.

The grids in the comments are for 4 ranks and one chunk. Their rows are tiles of the first mode, their columns tiles of
the second. With ``chunks=c`` a shard is c tiles along the mode of the shards that move: tile = shard * c + chunk.
"""

from __future__ import annotations

from typing import Literal, get_args

from distgemm.arguments import member
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
    """Shard r of N on rank r."""
    return (Axis(ranks, rank=1),)


def _own_chunks(ranks: int, chunks: int) -> Axes:
    """The chunks of shard r on rank r. The value shape is (chunks,)."""
    return (Axis(chunks, value=1), Axis(ranks, rank=1))


def _all_chunks(ranks: int, chunks: int) -> Axes:
    """The chunks of all shards on every rank. The value shape is (chunks, N)."""
    return (Axis(chunks, value=(1, 0)), Axis(ranks, value=(0, 1)))


def _rotate(ranks: int, chunks: int, direction: int = 1, offset: int = 0) -> Axes:
    """The chunks of shard r + offset + direction * j for j = 0, 1, ... The shape of the iterations is (chunks, N)."""
    wrap = (Offset(offset), Modulo(ranks))
    return (Axis(chunks, value=(1, 0)), Axis(ranks, rank=1, value=(0, direction), maps=wrap))


def partner(name: str, ranks: int, own_last: bool = False) -> Axis:
    """Shard r xor j for j = 0, 1, ..., or for j = N - 1, N - 2, ... The shape of the iterations is (chunks, N).

    Raises:
        ValueError: if N is no power of two.
    """
    if ranks & (ranks - 1):
        raise ValueError(f"{name} pairs r with r xor i: world_size a power of two, got {ranks}")
    bits = ranks.bit_length() - 1
    pairs = (Swizzle(bits, 0, bits), Modulo(ranks))
    if own_last:
        return Axis(ranks, rank=1, value=(0, -ranks), maps=(Offset(ranks * (ranks - 1)), *pairs))
    return Axis(ranks, rank=1, value=(0, ranks), maps=pairs)


def _chunk_order(shards: list[int], chunks: int) -> list[int]:
    """The order of iterations of shape (chunks, N) that takes the shards one after the other, as given."""
    return [shard * chunks + chunk for shard in shards for chunk in range(chunks)]


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
    """m = r + i, n = r. Each shard of A comes directly from its owner (CUTLASS AllGather1D_TilingCD_RotatingA).

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of A, >= 1.
    """
    return _gather_a("all_gather_1d_tiling_cd_rotating_a", mesh, chunks, _rotate(mesh[0], chunks), Direct())


@register_schedule()
def all_gather_1d_ring_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r - i, n = r. Each rank r sends the shards of A that it holds or receives to its neighbour r + 1.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of A, >= 1.
    """
    return _gather_a("all_gather_1d_ring_a", mesh, chunks, _rotate(mesh[0], chunks, -1), Ring())


def _bidirectional(
    name: str, mesh: Mesh, chunks: int, distances: list[int], route: GatherRoute
) -> DistributedTileScheduler:
    """A schedule with m = r - d, where ``distances`` are the values of d in the order in which the shards arrive."""
    schedule = _gather_a(name, mesh, chunks, _rotate(mesh[0], chunks, -1), route)
    work = schedule.work.reorder(_chunk_order(distances, chunks))
    return DistributedTileScheduler(name, schedule.partition, work, schedule.route, schedule.chunks)


@register_schedule()
def all_gather_1d_bidirectional_full_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r, r-1, r+1, r-2, r+2, ... Whole shards of A go both ways round the ring (tt-metal FULL_TENSOR).

    A shard from a rank at ring distance d arrives after d hops. The busier direction carries floor(N/2) shards.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of A, >= 1.
    """
    (ranks,) = mesh
    distances = sorted(range(ranks), key=lambda d: (min(d, ranks - d), d))
    return _bidirectional("all_gather_1d_bidirectional_full_a", mesh, chunks, distances, BidirectionalFull())


@register_schedule()
def all_gather_1d_bidirectional_split_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r - d, ordered by max(d, N - d). Half of each shard of A goes each way round (tt-metal SPLIT_TENSOR).

    A shard from a rank at clockwise distance d is complete after max(d, N - d) hops. Each direction carries (N - 1) / 2
    shards.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of A, >= 1.
    """
    (ranks,) = mesh
    distances = sorted(range(ranks), key=lambda d: (d != 0, max(d, ranks - d), d))
    return _bidirectional("all_gather_1d_bidirectional_split_a", mesh, chunks, distances, BidirectionalSplit())


@register_schedule()
def all_gather_1d_pairwise_xor_a(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r xor i, n = r. In each iteration ranks exchange shards of A in pairs. N is a power of two.

    Args:
        mesh: (N,), the number of ranks, a power of two.
        chunks: number of chunks of each shard of A, >= 1.

    Raises:
        ValueError: if N is no power of two.
    """
    work_m = (Axis(chunks, value=(1, 0)), partner("all_gather_1d_pairwise_xor_a", mesh[0]))
    return _gather_a("all_gather_1d_pairwise_xor_a", mesh, chunks, work_m, Direct())


@register_schedule(aliases=("AllGather1D_TilingCD_RotatingB",))
def all_gather_1d_tiling_cd_rotating_b(mesh: Mesh, *, chunks: int = 1) -> DistributedTileScheduler:
    """m = r, n = r + i. Shards of B move; A and D are sharded along M (CUTLASS AllGather1D_TilingCD_RotatingB).

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of B, >= 1.
    """
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
    """k = r + i, n = r. A is sharded along K. Each rank gathers it chunk by chunk and accumulates D.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of A, >= 1.
    """
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
        name: name of the schedule.
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of D.
        iterations: shape of the iterations.
        work: the axis of chunks and the axis of shards.
        route: path of the partial sums.
        chunk_mode: "m": chunks are rows of a shard. "n": chunks are columns.
    """
    (ranks,) = mesh
    member(f"{name}: chunk_mode", chunk_mode, get_args(ChunkMode))
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
    else:
        columns = (Axis(chunks, value=1),)
        partition = Partition(
            a=TVLayout(mesh, (ranks,), (every, own, WHOLE)),
            b=TVLayout(mesh, (chunks,), (columns, own, WHOLE)),
            d=TVLayout(mesh, (chunks,), (own, columns, WHOLE)),
        )
        modes, tiles = ((shard,), (chunk,), own, WHOLE), TileCoord(1, chunks, 1, 1)
    return DistributedTileScheduler(name, partition, TVLayout(mesh, iterations, modes), Route(d=route), tiles)


@register_schedule(aliases=("ReduceScatter1D_TilingA_RotatingC",), default_for_pattern="gemm+rs")
def reduce_scatter_1d_tiling_a_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue"
) -> DistributedTileScheduler:
    """m = r - 1 - i, k = r. Partial sums of D move around the ring from r to r + 1, and each rank adds its part
    (CUTLASS ReduceScatter1D_TilingA_RotatingC).

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of D, >= 1.
        final_add: where the owner of a tile adds the partial sum that it receives. "epilogue": in its own GEMM, which
            waits for the partial sum. "kernel": in a kernel after its own GEMM. That GEMM does not wait, so the replay
            ends sooner, but causes more memory traffic.
    """
    (ranks,) = mesh
    name = "reduce_scatter_1d_tiling_a_rotating_c"
    work = _rotate(ranks, chunks, direction=-1, offset=-1)
    return _scatter_m(name, mesh, chunks, (chunks, ranks), work, Chain(final_add=final_add))


@register_schedule()
def reduce_scatter_1d_pairwise_a(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "kernel", chunk_mode: ChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r + 1 + j, k = r for j = 0..N-1. Each partial sum goes directly to the owner, which adds all N at once.

    There are chunks * N iterations. The rank's own shard comes last (nvFuser's ring GEMM + reduce-scatter).

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of D, >= 1.
        final_add: where an owner adds the partial sums. "kernel": in a separate kernel, with i = chunk * N + j.
            "epilogue": in the epilogue of its own GEMM, with i = j * chunks + chunk. That GEMM waits for the partial
            sums of all other ranks, so the rank's own shard comes after all others.
        chunk_mode: "m": a chunk is some rows of a shard of D, multiplied by all of B. "n": a chunk is some columns of
            all rows of a shard, multiplied by a part of B. Select "n" if a shard has so few rows that chunks of rows
            would be smaller than the tiles of the kernel.
    """
    (ranks,) = mesh
    name = "reduce_scatter_1d_pairwise_a"
    route = Pairwise(final_add=final_add)
    if final_add == "epilogue":
        work = _rotate(ranks, chunks, offset=1)
        return _scatter_m(name, mesh, chunks, (chunks, ranks), work, route, chunk_mode)
    slices = Axis(ranks, rank=1, value=(1, 0), maps=(Offset(1), Modulo(ranks)))
    return _scatter_m(name, mesh, chunks, (ranks, chunks), (Axis(chunks, value=(0, 1)), slices), route, chunk_mode)


@register_schedule(aliases=("ReduceScatter1D_TilingB_RotatingC",))
def reduce_scatter_1d_tiling_b_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue"
) -> DistributedTileScheduler:
    """n = r - 1 - i, k = r. As tiling A, but D is sharded along N (CUTLASS ReduceScatter1D_TilingB_RotatingC).

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each shard of D, >= 1.
        final_add: as in ``reduce_scatter_1d_tiling_a_rotating_c``.
    """
    (ranks,) = mesh
    name = "reduce_scatter_1d_tiling_b_rotating_c"
    partition = Partition(
        a=TVLayout(mesh, ONE, (WHOLE, _own(ranks), WHOLE)),
        b=TVLayout(mesh, (chunks, ranks), (_all_chunks(ranks, chunks), _own(ranks), WHOLE)),
        d=TVLayout(mesh, (chunks,), (WHOLE, _own_chunks(ranks, chunks), WHOLE)),
    )
    work_n = _rotate(ranks, chunks, direction=-1, offset=-1)
    work = TVLayout(mesh, (chunks, ranks), (WHOLE, work_n, _own(ranks), WHOLE))
    return DistributedTileScheduler(
        name, partition, work, Route(d=Chain(final_add=final_add)), TileCoord(1, chunks, 1, 1)
    )
