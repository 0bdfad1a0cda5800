"""Nesting: one 1D schedule across hosts, another inside each host, as one schedule.

The nested schedule is the product of the two: every rank of the outer one is a host, every tile of its grid is
the whole grid of the inner one. Its movements go first along one axis of the mesh and then along the other, so
that each link between hosts carries a tile once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distgemm.schedulers.registry import get_schedule, register_schedule
from distgemm.schedulers.routes import AddPlace, GatherRoute, Hop, ReduceRoute
from distgemm.schedulers.scheduler import DistributedTileScheduler, Partition, Route, TileCoord

__all__ = ["NestedGather", "NestedReduce", "nest"]

Mesh = tuple[int, ...]


@dataclass(frozen=True)
class NestedGather:
    """First across hosts, to the rank in the holder's place on each host; then from there inside the host."""

    across: GatherRoute
    inside: GatherRoute

    def hops(self, mesh: Mesh, holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        local = mesh[-1]
        hosts = dict.fromkeys(rank // local for rank in needers)
        heads = {host: host * local + holder % local for host in hosts}
        found: list[Hop] = []
        remote = [head for head in heads.values() if head != holder]
        if remote:
            found += self.across.hops(mesh, holder, remote)
        for host, head in heads.items():
            others = [rank for rank in needers if rank // local == host and rank != head]
            if others:
                found += self.inside.hops(mesh, head, others)
        return found


@dataclass(frozen=True)
class NestedReduce:
    """First inside each host, to the rank in the reducer's place; then across hosts from there."""

    across: ReduceRoute
    inside: ReduceRoute

    @property
    def add(self) -> AddPlace:
        return "epilogue" if self.across.add == self.inside.add == "epilogue" else "kernel"

    @property
    def final_add(self) -> AddPlace:
        return self.add

    def hops(self, mesh: Mesh, contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        local = mesh[-1]
        hosts = dict.fromkeys(rank // local for rank in contributors)
        hosts.pop(reducer // local, None)
        heads = {host: host * local + reducer % local for host in [*hosts, reducer // local]}
        found: list[Hop] = []
        for host, head in heads.items():
            others = [rank for rank in contributors if rank // local == host and rank != head]
            if others:
                found += self.inside.hops(mesh, others, head)
        if hosts:
            found += self.across.hops(mesh, [heads[host] for host in hosts], reducer)
        return found


def nest(
    across: DistributedTileScheduler, inside: DistributedTileScheduler, name: str | None = None
) -> DistributedTileScheduler:
    """The product of two schedules: ``across`` over hosts, ``inside`` over the ranks of each host.

    Rank = host * ranks of a host + place in it; tile = outer tile * inner extent + inner tile in each mode;
    iteration = outer iteration * inner iterations + inner iteration.

    Args:
        across: over hosts, without chunks: only the inner schedule's tiles can be divided.
        inside: over the ranks of a host.
        name: of the product; None: made of both names.

    Raises:
        ValueError: if ``across`` has chunks, or the route of D of either schedule has a ``final_add`` that differs from
            its ``add``: the product has no one last GEMM.
    """
    if set(across.chunks) != {1}:
        raise ValueError(f"the schedule across hosts has no chunks, {across.name} has {tuple(across.chunks)}")
    for schedule in (across, inside):
        if schedule.route.d.final_add != schedule.route.d.add:
            raise ValueError(
                f"nested schedules add partial sums in one place; the route of D of {schedule.name} has "
                f"add={schedule.route.d.add!r} and final_add={schedule.route.d.final_add!r}"
            )
    partition = Partition(
        a=across.partition.a.nest(inside.partition.a),
        b=across.partition.b.nest(inside.partition.b),
        d=across.partition.d.nest(inside.partition.d),
    )
    route = Route(
        a=NestedGather(across.route.a, inside.route.a),
        b=NestedGather(across.route.b, inside.route.b),
        d=NestedReduce(across.route.d, inside.route.d),
        final_copies=NestedGather(across.route.final_copies, inside.route.final_copies),
    )
    chosen = name or f"{across.name} across {inside.name}"
    return DistributedTileScheduler(chosen, partition, across.work.nest(inside.work), route, TileCoord(*inside.chunks))


@register_schedule(mesh_rank=2)
def tensor_parallel_2d_nested(
    mesh: Mesh,
    *,
    chunks: int = 1,
    across: str = "all_gather_1d_ring_a",
    inside: str = "all_gather_1d_tiling_cd_rotating_a",
) -> DistributedTileScheduler:
    """Two 1D schedules in one: across hosts, and inside each host; the mesh is (hosts, ranks of a host)."""
    hosts, ranks = mesh
    outer = get_schedule(across, hosts)
    return nest(outer, get_schedule(inside, ranks, chunks=chunks), "tensor_parallel_2d_nested")
