"""Schedules on a mesh of ranks: A and B gathered along some axes, D reduced along another.

Every tile below is one of the finest shards of its mode; blocks are runs of tiles. With ``chunks=c`` each
tile of M is c tiles. The fastest axis of the iterations is the one along which A is gathered; the slowest is that of
the reduction. Gathers begin with the rank's own tile, reductions end with it.
"""

from __future__ import annotations

from distgemm.layouts import Axis, Modulo, Offset, TVLayout
from distgemm.schedulers.registry import register_schedule
from distgemm.schedulers.routes import (
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

GATHERS: dict[str, GatherRoute] = {
    "direct": Direct(),
    "ring": Ring(),
    "bidirectional_full": BidirectionalFull(),
    "bidirectional_split": BidirectionalSplit(),
}
REDUCTIONS: dict[str, ReduceRoute] = {"chain": Chain(), "pairwise": Pairwise()}


def _route(name: str, gather: str, reduce: str = "chain") -> Route:
    for option, given, known in (("gather", gather, GATHERS), ("reduce", reduce, REDUCTIONS)):
        if given not in known:
            raise ValueError(f"{name}: {option} is one of {', '.join(known)}, got {given!r}")
    return Route(GATHERS[gather], GATHERS[gather], REDUCTIONS[reduce])


def _from_own(extent: int, rank: tuple[int, ...], value: tuple[int, ...]) -> Axis:
    """The own index first, then upwards around the ring."""
    return Axis(extent, rank, value, (Modulo(extent),))


def _towards_own(extent: int, rank: tuple[int, ...], value: tuple[int, ...]) -> Axis:
    """From the index before the own one downwards around the ring; the own index last."""
    return Axis(extent, rank, tuple(-stride for stride in value), (Offset(-1), Modulo(extent)))


@register_schedule(mesh_rank=2)
def tensor_parallel_2d(mesh: Mesh, *, chunks: int = 1, gather: str = "direct") -> DistributedTileScheduler:
    """Rank (p, q) of P x Q: A m tile p*Q+q (gathered along q), B n tile q*P+p (gathered along p), D block (p, q).

    Every rank ends with a block of D; A and B each travel along one axis of the mesh only.
    """
    name = "tensor_parallel_2d"
    ps, qs = mesh
    p, q = Axis(ps, rank=(1, 0)), Axis(qs, rank=(0, 1))
    values = (chunks, qs, ps)
    chunk = Axis(chunks, value=(1, 0, 0))
    partition = Partition(
        a=TVLayout(mesh, (chunks,), ((Axis(chunks, value=1), q, p), WHOLE, WHOLE)),
        b=TVLayout(mesh, (1,), ((p, q), WHOLE, WHOLE)),
        d=TVLayout(mesh, values, ((chunk, Axis(qs, value=(0, 1, 0)), p), (Axis(ps, value=(0, 0, 1)), q), WHOLE)),
    )
    work_m = (chunk, _from_own(qs, (0, 1), (0, 1, 0)), p)
    work_n = (_from_own(ps, (1, 0), (0, 0, 1)), q)
    work = TVLayout(mesh, values, (work_m, work_n, WHOLE, WHOLE))
    return DistributedTileScheduler(name, partition, work, _route(name, gather), TileCoord(chunks, 1, 1, 1))


@register_schedule(mesh_rank=2)
def tensor_parallel_2d_rs(
    mesh: Mesh, *, chunks: int = 1, gather: str = "direct", reduce: str = "chain"
) -> DistributedTileScheduler:
    """Rank (q, s) of Q x S: A m tile q, k block s (gathered along q); B n block q, k block s; D n tile q*S+s, all m
    (reduced along s).

    The weights stay where they are; activations are gathered and results reduced along one axis each.
    """
    name = "tensor_parallel_2d_rs"
    qs, ss = mesh
    q, s = Axis(qs, rank=(1, 0)), Axis(ss, rank=(0, 1))
    values = (chunks, qs, ss)
    chunk = Axis(chunks, value=(1, 0, 0))
    every_m = (Axis(chunks, value=(1, 0)), Axis(qs, value=(0, 1)))
    partition = Partition(
        a=TVLayout(mesh, (chunks,), ((Axis(chunks, value=1), q), (s,), WHOLE)),
        b=TVLayout(mesh, (ss,), ((Axis(ss, value=1), q), (s,), WHOLE)),
        d=TVLayout(mesh, (chunks, qs), (every_m, (s, q), WHOLE)),
    )
    work_m = (chunk, _from_own(qs, (1, 0), (0, 1, 0)))
    work_n = (_towards_own(ss, (0, 1), (0, 0, 1)), q)
    work = TVLayout(mesh, values, (work_m, work_n, (s,), WHOLE))
    return DistributedTileScheduler(name, partition, work, _route(name, gather, reduce), TileCoord(chunks, 1, 1, 1))


@register_schedule(mesh_rank=3)
def tensor_parallel_3d(
    mesh: Mesh, *, chunks: int = 1, gather: str = "direct", reduce: str = "chain"
) -> DistributedTileScheduler:
    """Rank (p, q, s) of P x Q x S: A m block p, k tile s*Q+q (gathered along q); B n tile q*P+p, k block s
    (gathered along p); D m tile p*S+s, n block q (reduced along s).

    No matrix is held twice, and each travels along one axis of the mesh only.
    """
    name = "tensor_parallel_3d"
    ps, qs, ss = mesh
    p, q, s = Axis(ps, rank=(1, 0, 0)), Axis(qs, rank=(0, 1, 0)), Axis(ss, rank=(0, 0, 1))
    # K first: a tile of D is complete before the next begins, and its partial sum can leave.
    values = (qs, chunks, ps, ss)
    chunk = Axis(chunks, value=(0, 1, 0, 0))
    m_block = (Axis(chunks, value=(1, 0)), Axis(ss, value=(0, 1)), p)
    partition = Partition(
        a=TVLayout(mesh, (chunks, ss), (m_block, (q, s), WHOLE)),
        b=TVLayout(mesh, (qs,), ((p, q), (Axis(qs, value=1), s), WHOLE)),
        d=TVLayout(mesh, (chunks, ps), ((Axis(chunks, value=(1, 0)), s, p), (Axis(ps, value=(0, 1)), q), WHOLE)),
    )
    work_m = (chunk, _towards_own(ss, (0, 0, 1), (0, 0, 0, 1)), p)
    work_n = (_from_own(ps, (1, 0, 0), (0, 0, 1, 0)), q)
    work_k = (_from_own(qs, (0, 1, 0), (1, 0, 0, 0)), s)
    work = TVLayout(mesh, values, (work_m, work_n, work_k, WHOLE))
    return DistributedTileScheduler(name, partition, work, _route(name, gather, reduce), TileCoord(chunks, 1, 1, 1))
