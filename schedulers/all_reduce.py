"""GEMM + all-reduce: a reduce-scatter, after which every finished tile goes to all ranks; or one hop to all ranks.

In the first form, the rank that owns a tile of D in the reduce-scatter completes it, and sends it to all other ranks.
Each rank sends 2 (N-1)/N times the bytes of D in total, not N-1 times. The final copies of a tile start when the tile
is complete, while ranks still multiply other tiles.

In the second form (one-shot), every rank gets all partial sums and adds them itself. That is N-1 times the bytes of D,
and one hop instead of two.
"""

from __future__ import annotations

from typing import get_args

from distgemm.arguments import member
from distgemm.layouts import Axis, TVLayout
from distgemm.schedulers.one_d import (
    ChunkMode,
    reduce_scatter_1d_pairwise_a,
    reduce_scatter_1d_tiling_a_rotating_c,
    reduce_scatter_1d_tiling_b_rotating_c,
)
from distgemm.schedulers.registry import register_schedule
from distgemm.schedulers.routes import AddPlace, Pairwise
from distgemm.schedulers.scheduler import WHOLE, DistributedTileScheduler, Partition, Route, TileCoord

Mesh = tuple[int, ...]


def _on_every_rank(name: str, scatter: DistributedTileScheduler) -> DistributedTileScheduler:
    """The schedule of a reduce-scatter with the same work and routes, but with all of D on every rank."""
    m, n = scatter.grid.m, scatter.grid.n
    everywhere = ((Axis(m, value=(1, 0)),), (Axis(n, value=(0, 1)),), WHOLE)
    partition = Partition(scatter.partition.a, scatter.partition.b, TVLayout(scatter.mesh, (m, n), everywhere))
    return DistributedTileScheduler(name, partition, scatter.work, scatter.route, scatter.chunks)


@register_schedule(default_for_pattern="gemm+ar")
def all_reduce_1d_tiling_a_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue"
) -> DistributedTileScheduler:
    """m = r - 1 - i, k = r. Partial sums move around the ring, and finished tiles from their reducer to all ranks.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each 1/N of the rows of D, >= 1.
        final_add: as in ``reduce_scatter_1d_tiling_a_rotating_c``.
    """
    scatter = reduce_scatter_1d_tiling_a_rotating_c(mesh, chunks=chunks, final_add=final_add)
    return _on_every_rank("all_reduce_1d_tiling_a_rotating_c", scatter)


@register_schedule()
def all_reduce_1d_tiling_b_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue"
) -> DistributedTileScheduler:
    """n = r - 1 - i, k = r. As tiling A, but with tiles of D along N.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each 1/N of the columns of D, >= 1.
        final_add: as in ``reduce_scatter_1d_tiling_a_rotating_c``.
    """
    scatter = reduce_scatter_1d_tiling_b_rotating_c(mesh, chunks=chunks, final_add=final_add)
    return _on_every_rank("all_reduce_1d_tiling_b_rotating_c", scatter)


@register_schedule()
def all_reduce_1d_pairwise_a(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "kernel", chunk_mode: ChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r + 1 + j, k = r. Each partial sum goes directly to the tile's reducer, and the result to all ranks.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of each 1/N of the rows of D, >= 1.
        final_add: as in ``reduce_scatter_1d_pairwise_a``.
        chunk_mode: as in ``reduce_scatter_1d_pairwise_a``.
    """
    scatter = reduce_scatter_1d_pairwise_a(mesh, chunks=chunks, final_add=final_add, chunk_mode=chunk_mode)
    return _on_every_rank("all_reduce_1d_pairwise_a", scatter)


@register_schedule()
def all_reduce_1d_one_shot_a(mesh: Mesh, *, chunks: int = 1, chunk_mode: ChunkMode = "m") -> DistributedTileScheduler:
    """m = i, k = r. Each partial sum goes directly to all ranks, and every rank adds all of them in the same order.

    A result takes one hop instead of two, and all ranks have the same bits. Each rank sends N-1 times the bytes of D,
    not 2 (N-1)/N times. So it is for few tokens, where latency counts more than bytes.

    Args:
        mesh: (N,), the number of ranks.
        chunks: number of chunks of D, >= 1.
        chunk_mode: "m": a chunk is some rows of D. "n": a chunk is some columns of D. Select "n" if D has so few rows
            that chunks of rows would be smaller than the tiles of the kernel.
    """
    (ranks,) = mesh
    name = "all_reduce_1d_one_shot_a"
    member(f"{name}: chunk_mode", chunk_mode, get_args(ChunkMode))
    parts = (Axis(chunks, value=1),)
    rows, columns = (parts, WHOLE) if chunk_mode == "m" else (WHOLE, parts)
    own, values = (Axis(ranks, rank=1),), (chunks,)
    partition = Partition(
        a=TVLayout(mesh, values, (rows, own, WHOLE)),
        b=TVLayout(mesh, values, (columns, own, WHOLE)),
        d=TVLayout(mesh, values, (rows, columns, WHOLE)),
    )
    work = TVLayout(mesh, values, (rows, columns, own, WHOLE))
    tiles = TileCoord(chunks, 1, 1) if chunk_mode == "m" else TileCoord(1, chunks, 1)
    return DistributedTileScheduler(name, partition, work, Route(d=Pairwise(), final_copies=None), tiles)
