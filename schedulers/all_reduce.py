"""GEMM + all-reduce: a reduce-scatter whose owners copy finished tiles to every rank.

The rank that owns a tile of D in the reduce-scatter completes it and copies it to all other ranks. Each rank sends
2 (N-1)/N of D in all, not N-1 times D. The final copies of a tile start when the tile is complete, while the
GEMMs of other tiles still run.
"""

from __future__ import annotations

from distgemm.layouts import Axis, TVLayout
from distgemm.schedulers.one_d import (
    ChunkMode,
    reduce_scatter_1d_pairwise_a,
    reduce_scatter_1d_tiling_a_rotating_c,
    reduce_scatter_1d_tiling_b_rotating_c,
)
from distgemm.schedulers.registry import register_schedule
from distgemm.schedulers.routes import AddPlace
from distgemm.schedulers.scheduler import WHOLE, DistributedTileScheduler, Partition

Mesh = tuple[int, ...]


def _on_every_rank(name: str, scatter: DistributedTileScheduler) -> DistributedTileScheduler:
    """The same work and routes, with all of D on every rank."""
    m, n = scatter.grid.m, scatter.grid.n
    everywhere = ((Axis(m, value=(1, 0)),), (Axis(n, value=(0, 1)),), WHOLE)
    partition = Partition(scatter.partition.a, scatter.partition.b, TVLayout(scatter.mesh, (m, n), everywhere))
    return DistributedTileScheduler(name, partition, scatter.work, scatter.route, scatter.chunks)


@register_schedule(default_for_pattern="gemm+ar")
def all_reduce_1d_tiling_a_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue", stagger: int = 0
) -> DistributedTileScheduler:
    """m = r - 1 - i, k = r; partial sums move around the ring, complete tiles from their reducer to every rank."""
    scatter = reduce_scatter_1d_tiling_a_rotating_c(mesh, chunks=chunks, final_add=final_add, stagger=stagger)
    return _on_every_rank("all_reduce_1d_tiling_a_rotating_c", scatter)


@register_schedule()
def all_reduce_1d_tiling_b_rotating_c(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "epilogue", stagger: int = 0
) -> DistributedTileScheduler:
    """n = r - 1 - i, k = r; as tiling A, with tiles of D along N."""
    scatter = reduce_scatter_1d_tiling_b_rotating_c(mesh, chunks=chunks, final_add=final_add, stagger=stagger)
    return _on_every_rank("all_reduce_1d_tiling_b_rotating_c", scatter)


@register_schedule()
def all_reduce_1d_pairwise_a(
    mesh: Mesh, *, chunks: int = 1, final_add: AddPlace = "kernel", stagger: int = 0, chunk_mode: ChunkMode = "m"
) -> DistributedTileScheduler:
    """m = r + 1 + j, k = r; each partial sum moves directly to its reducer, the sum from there to every rank."""
    scatter = reduce_scatter_1d_pairwise_a(
        mesh, chunks=chunks, final_add=final_add, stagger=stagger, chunk_mode=chunk_mode
    )
    return _on_every_rank("all_reduce_1d_pairwise_a", scatter)
