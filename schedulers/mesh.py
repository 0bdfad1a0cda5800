"""Schedules on a mesh of ranks. They gather A and B along some axes, and reduce D along another.

A tile is one of the smallest shards of its mode, and a block is several neighbouring tiles. With ``chunks=c`` each tile
of M is divided into c tiles. In the order of iterations the axis along which A is gathered is the fastest, and the axis
of the reduction the slowest. A gathered axis starts at the rank's own tile. A reduced axis ends there.
"""

from __future__ import annotations

from distgemm.arguments import member
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
        member(f"{name}: {option}", given, known)
    return Route(GATHERS[gather], GATHERS[gather], REDUCTIONS[reduce])


def _from_own(extent: int, rank: tuple[int, ...], value: tuple[int, ...]) -> Axis:
    """The rank's own index first, then ascending modulo ``extent``."""
    return Axis(extent, rank, value, (Modulo(extent),))


def _towards_own(extent: int, rank: tuple[int, ...], value: tuple[int, ...]) -> Axis:
    """The index before the rank's own first, then descending modulo ``extent``. The rank's own index is last."""
    return Axis(extent, rank, tuple(-stride for stride in value), (Offset(-1), Modulo(extent)))


@register_schedule(mesh_rank=2)
def tensor_parallel_2d(mesh: Mesh, *, chunks: int = 1, gather: str = "direct") -> DistributedTileScheduler:
    """Rank (p, q) of P x Q holds m tile p*Q+q of A, n tile q*P+p of B and block (p, q) of D. A is gathered along Q, B
    along P.

    Every rank ends with a block of D. A and B move along one axis of the mesh each.

    Args:
        mesh: (P, Q).
        chunks: number of chunks of each m tile, >= 1.
        gather: route of the tiles of A and B: "direct", "ring", "bidirectional_full" or "bidirectional_split".
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
    """Rank (q, s) of Q x S holds m tile q and k block s of A, n block q and k block s of B, and n tile q*S+s of D with
    all m. A is gathered along Q, D reduced along S.

    The weights B do not move. Activations and partial sums move along one axis of the mesh each.

    Args:
        mesh: (Q, S).
        chunks: number of chunks of each m tile, >= 1.
        gather: route of the tiles of A: "direct", "ring", "bidirectional_full" or "bidirectional_split".
        reduce: route of the partial sums: "chain" or "pairwise".
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
    """Rank (p, q, s) of P x Q x S holds m block p and k tile s*Q+q of A, n tile q*P+p and k block s of B, and m tile
    p*S+s and n block q of D. A is gathered along Q, B along P, and D reduced along S.

    Each tile has one holder, and each matrix moves along one axis of the mesh.

    Args:
        mesh: (P, Q, S).
        chunks: number of chunks of each m tile, >= 1.
        gather: route of the tiles of A and B: "direct", "ring", "bidirectional_full" or "bidirectional_split".
        reduce: route of the partial sums: "chain" or "pairwise".
    """
    name = "tensor_parallel_3d"
    ps, qs, ss = mesh
    p, q, s = Axis(ps, rank=(1, 0, 0)), Axis(qs, rank=(0, 1, 0)), Axis(ss, rank=(0, 0, 1))
    # K is the fastest: a rank completes its part of a tile of D, and can send it, before it starts the next one.
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
