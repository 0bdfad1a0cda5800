"""GEMM + all-to-all and all-to-all + GEMM: rows of one matrix on each rank before, columns of it on each rank after.

This is for sequence parallelism as in DeepSpeed Ulysses: each rank holds some tokens, and in attention some heads. The
projection of queries, keys and values multiplies a rank's tokens, and the columns of each head go to the rank of that
head. The output projection needs all columns of a rank's tokens. B is the weight, and every rank has all of it.

r is the rank and i the iteration. All sums are modulo N. The grids are for 4 ranks and one chunk.
"""

from __future__ import annotations

from typing import Literal, get_args

from distgemm.arguments import integer, member
from distgemm.layouts import Axis, Divide, Modulo, Offset, TVLayout
from distgemm.schedulers.one_d import ChunkMode, partner
from distgemm.schedulers.registry import register_schedule
from distgemm.schedulers.routes import Direct, Pairwise
from distgemm.schedulers.scheduler import WHOLE, DistributedTileScheduler, Partition, Route, TileCoord

Mesh = tuple[int, ...]
Axes = tuple[Axis, ...]
GatherChunkMode = Literal["m", "k"]

# --- GEMM + all-to-all: A is sharded along M, D along N, every rank has B ------------------------------
#
#        A (m, k)     B (n, k)     D (m, n)             rank that multiplies (m, n)   its iteration
#   m 0  | rank 0 |   | every |   | 0 | 1 | 2 | 3 |    | 0 | 0 | 0 | 0 |             | 3 | 0 | 1 | 2 |
#     1  | rank 1 |   | every |   | 0 | 1 | 2 | 3 |    | 1 | 1 | 1 | 1 |             | 2 | 3 | 0 | 1 |
#     2  | rank 2 |   | every |   | 0 | 1 | 2 | 3 |    | 2 | 2 | 2 | 2 |             | 1 | 2 | 3 | 0 |
#     3  | rank 3 |   | every |   | 0 | 1 | 2 | 3 |    | 3 | 3 | 3 | 3 |             | 0 | 1 | 2 | 3 |


def _to_owners(
    name: str, mesh: Mesh, chunks: int, chunk_mode: ChunkMode, shards: int, owned: Axis, shard: Axis
) -> DistributedTileScheduler:
    """A schedule whose rank r multiplies its rows by all of B, and sends each tile to the rank of its columns.

    Args:
        name: name of the schedule.
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each tile.
        chunk_mode: "m": chunks are rows of a rank. "n": they are columns of a shard.
        shards: number of shards of N.
        owned: rank -> its shard of N.
        shard: (rank, iteration) -> the shard of N that it multiplies. The shape of the iterations is (chunks, shards).
    """
    (ranks,) = mesh
    member(f"{name}: chunk_mode", chunk_mode, get_args(ChunkMode))
    values = (chunks, shards)
    own, every = Axis(ranks, rank=1), Axis(shards, value=(0, 1))
    chunk = Axis(chunks, value=(1, 0))
    if chunk_mode == "m":
        a = TVLayout(mesh, (chunks,), ((Axis(chunks, value=1), own), WHOLE, WHOLE))
        b = TVLayout(mesh, (shards,), ((Axis(shards, value=1),), WHOLE, WHOLE))
        d = TVLayout(mesh, (chunks, ranks), ((chunk, Axis(ranks, value=(0, 1))), (owned,), WHOLE))
        modes: tuple[Axes, ...] = ((chunk, own), (shard,), WHOLE, WHOLE)
        tiles = TileCoord(chunks, 1, 1)
    else:
        a = TVLayout(mesh, (1,), ((own,), WHOLE, WHOLE))
        b = TVLayout(mesh, values, ((chunk, every), WHOLE, WHOLE))
        d = TVLayout(mesh, (chunks, ranks), ((Axis(ranks, value=(0, 1)),), (chunk, owned), WHOLE))
        modes, tiles = ((own,), (chunk, shard), WHOLE, WHOLE), TileCoord(1, chunks, 1)
    work = TVLayout(mesh, values, modes)
    # Each tile has one contributor, whose product goes to every owner without a stop.
    return DistributedTileScheduler(name, Partition(a, b, d), work, Route(d=Pairwise(), final_copies=None), tiles)


@register_schedule(default_for_pattern="gemm+a2a")
def all_to_all_1d_rotating_d(
    mesh: Mesh, *, chunks: int = 1, chunk_mode: ChunkMode = "m", copies: int = 1
) -> DistributedTileScheduler:
    """m = r, n = r + 1 + i. Each tile goes directly to the rank that holds its columns; the rank's own tile is last.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each tile, >= 1.
        chunk_mode: "m": a chunk is some of the rank's rows. "n": a chunk is some columns of a shard.
        copies: number of ranks that hold each shard of D, a divisor of N: the ranks 0 to ``copies`` - 1 hold the first
            of N / ``copies`` shards, and so on. Select more than 1 where there are fewer heads of keys and values than
            ranks (grouped-query attention).

    Raises:
        ValueError: if ``copies`` does not divide N.
    """
    (ranks,) = mesh
    name = "all_to_all_1d_rotating_d"
    if ranks % integer(f"{name}: copies", copies, 1):
        raise ValueError(f"{name}: copies is a divisor of the number of ranks, {ranks}, got {copies}")
    shards, divide = ranks // copies, (Divide(copies),) * (copies > 1)
    owned = Axis(shards, rank=1, maps=divide)
    shard = Axis(shards, rank=1, value=(0, copies), maps=(Offset(copies), *divide, Modulo(shards)))
    return _to_owners(name, mesh, chunks, chunk_mode, shards, owned, shard)


@register_schedule()
def all_to_all_1d_pairwise_xor_d(
    mesh: Mesh, *, chunks: int = 1, chunk_mode: ChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r, n = r xor (N - 1 - i). In each iteration ranks exchange tiles in pairs. N is a power of two.

    Args:
        mesh: (N,), the number of ranks, a power of two.
        chunks: as in ``all_to_all_1d_rotating_d``.
        chunk_mode: as in ``all_to_all_1d_rotating_d``.

    Raises:
        ValueError: if N is no power of two.
    """
    (ranks,) = mesh
    name = "all_to_all_1d_pairwise_xor_d"
    shard = partner(name, ranks, own_last=True)
    return _to_owners(name, mesh, chunks, chunk_mode, ranks, Axis(ranks, rank=1), shard)


# --- all-to-all + GEMM: A is sharded along K, D along M, every rank has B -----------------------------
#
#        A (m, k)            B (n, k)   D (m, n)     iteration of (m, k) on rank m
#   m 0  | 0 | 1 | 2 | 3 |   | every |  | rank 0 |   | 0 | 1 | 2 | 3 |
#     1  | 0 | 1 | 2 | 3 |              | rank 1 |   | 3 | 0 | 1 | 2 |
#     2  | 0 | 1 | 2 | 3 |              | rank 2 |   | 2 | 3 | 0 | 1 |
#     3  | 0 | 1 | 2 | 3 |              | rank 3 |   | 1 | 2 | 3 | 0 |


def _from_holders(
    name: str, mesh: Mesh, chunks: int, chunk_mode: GatherChunkMode, shard: Axis
) -> DistributedTileScheduler:
    """A schedule whose rank r gathers its rows of A, a shard of k from each rank, and adds up the products.

    Args:
        name: name of the schedule.
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each tile of A.
        chunk_mode: "m": chunks are rows of a rank. "k": they are columns of a shard.
        shard: (rank, iteration) -> the shard of K. The shape of the iterations is (chunks, N).
    """
    (ranks,) = mesh
    member(f"{name}: chunk_mode", chunk_mode, get_args(GatherChunkMode))
    values = (chunks, ranks)
    own, every = Axis(ranks, rank=1), Axis(ranks, value=(0, 1))
    chunk = Axis(chunks, value=(1, 0))
    if chunk_mode == "m":
        a = TVLayout(mesh, values, ((chunk, every), (own,), WHOLE))
        b = TVLayout(mesh, (ranks,), (WHOLE, (Axis(ranks, value=1),), WHOLE))
        d = TVLayout(mesh, (chunks,), ((Axis(chunks, value=1), own), WHOLE, WHOLE))
        modes: tuple[Axes, ...] = ((chunk, own), WHOLE, (shard,), WHOLE)
        tiles = TileCoord(chunks, 1, 1)
    else:
        a = TVLayout(mesh, values, ((every,), (chunk, own), WHOLE))
        b = TVLayout(mesh, values, (WHOLE, (chunk, every), WHOLE))
        d = TVLayout(mesh, (1,), ((own,), WHOLE, WHOLE))
        modes, tiles = ((own,), WHOLE, (chunk, shard), WHOLE), TileCoord(1, 1, chunks)
    return DistributedTileScheduler(name, Partition(a, b, d), TVLayout(mesh, values, modes), Route(a=Direct()), tiles)


@register_schedule(default_for_pattern="a2a+gemm")
def all_to_all_1d_rotating_a(
    mesh: Mesh, *, chunks: int = 1, chunk_mode: GatherChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r, k = r + i. Each rank's rows of A come directly from the ranks of their columns; its own are first.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each tile of A, >= 1.
        chunk_mode: "m": a chunk is some of the rank's rows. "k": a chunk is some columns of a shard.
    """
    (ranks,) = mesh
    shard = Axis(ranks, rank=1, value=(0, 1), maps=(Modulo(ranks),))
    return _from_holders("all_to_all_1d_rotating_a", mesh, chunks, chunk_mode, shard)


@register_schedule()
def all_to_all_1d_pairwise_xor_a(
    mesh: Mesh, *, chunks: int = 1, chunk_mode: GatherChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r, k = r xor i. In each iteration ranks exchange tiles of A in pairs. N is a power of two.

    Args:
        mesh: (N,), the number of ranks, a power of two.
        chunks: as in ``all_to_all_1d_rotating_a``.
        chunk_mode: as in ``all_to_all_1d_rotating_a``.

    Raises:
        ValueError: if N is no power of two.
    """
    name = "all_to_all_1d_pairwise_xor_a"
    return _from_holders(name, mesh, chunks, chunk_mode, partner(name, mesh[0]))
