"""Nested schedules: one 1D schedule across hosts and another inside each host, as one schedule.

The nested schedule is the product of the two. A host takes the place of each rank of the outer schedule, and the grid
of the inner schedule takes the place of each tile of the outer grid. Tiles and partial sums move first along one axis
of the mesh, then along the other, so each link between hosts carries a tile once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from distgemm.arguments import instance, string
from distgemm.schedulers.registry import get_schedule, register_schedule
from distgemm.schedulers.routes import AddPlace, GatherRoute, Hop, Pairwise, ReduceRoute
from distgemm.schedulers.scheduler import DistributedTileScheduler, Partition, Route, TileCoord

__all__ = ["NestedGather", "NestedReduce", "nest"]

Mesh = tuple[int, ...]


def _of_whole(hops: Sequence[Hop], stride: int, first: int) -> list[Hop]:
    """Hops of some ranks of the whole mesh: rank r of the route is rank ``first`` + r * ``stride``."""
    return [hop._replace(src=first + hop.src * stride, dst=first + hop.dst * stride) for hop in hops]


def _by_host(ranks: Sequence[int], local: int) -> dict[int, list[int]]:
    """The local numbers of ranks by host, if a host has ``local`` ranks."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // local, []).append(rank % local)
    return found


@dataclass(frozen=True)
class NestedGather:
    """A gather first across hosts, then inside each host.

    On each host, the rank with the same local number as the holder receives the tile first. It then sends the tile to
    the ranks of its host.

    Attributes:
        across: the route between hosts. It gets the mesh of hosts, and their numbers.
        inside: the route inside a host. It gets the mesh of a host, and local numbers of ranks.
        axes: number of axes of the mesh that are inside a host.
    """

    across: GatherRoute
    inside: GatherRoute
    axes: int = 1

    @property
    def rotates(self) -> bool:
        return bool(getattr(self.across, "rotates", False) and getattr(self.inside, "rotates", False))

    def hops(self, mesh: Mesh, holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        hosts, inside = mesh[: -self.axes], mesh[-self.axes :]
        local = prod(inside)
        host_of_holder, head = divmod(holder, local)
        by_host = _by_host(needers, local)
        found: list[Hop] = []
        remote = [host for host in by_host if host != host_of_holder]
        if remote:
            found += _of_whole(self.across.hops(hosts, host_of_holder, remote), local, head)
        for host, ranks in by_host.items():
            others = [rank for rank in ranks if rank != head]
            if others:
                found += _of_whole(self.inside.hops(inside, head, others), 1, host * local)
        return found


@dataclass(frozen=True)
class NestedReduce:
    """A reduction first inside each host, then across hosts.

    On each host, the rank with the same local number as the reducer collects the sum of its host. It then sends that
    sum to the reducer.

    Attributes:
        across: the route between hosts. It gets the mesh of hosts, and their numbers.
        inside: the route inside a host. It gets the mesh of a host, and local numbers of ranks.
        axes: number of axes of the mesh that are inside a host.
    """

    across: ReduceRoute
    inside: ReduceRoute
    axes: int = 1

    @property
    def add(self) -> AddPlace:
        return "epilogue" if self.across.add == self.inside.add == "epilogue" else "kernel"

    @property
    def final_add(self) -> AddPlace:
        return self.add

    @property
    def rotates(self) -> bool:
        return bool(getattr(self.across, "rotates", False) and getattr(self.inside, "rotates", False))

    def hops(self, mesh: Mesh, contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        hosts, inside = mesh[: -self.axes], mesh[-self.axes :]
        local = prod(inside)
        last, head = divmod(reducer, local)
        by_host = _by_host(contributors, local)
        remote = [host for host in by_host if host != last]
        found: list[Hop] = []
        for host in [*remote, last]:
            others = [rank for rank in by_host.get(host, ()) if rank != head]
            if others:
                found += _of_whole(self.inside.hops(inside, others, head), 1, host * local)
        if remote:
            found += _of_whole(self.across.hops(hosts, remote, last), local, head)
        return found


def nest(
    across: DistributedTileScheduler, inside: DistributedTileScheduler, name: str | None = None
) -> DistributedTileScheduler:
    """The product of two schedules: ``across`` over hosts, ``inside`` over the ranks of each host.

    Rank = host * ranks of a host + local rank. In each mode, tile = outer tile * inner extent + inner tile. Iteration =
    outer iteration * inner iterations + inner iteration.

    If one of the schedules has no final copies (one-shot), the product has none: each partial sum goes directly to
    every owner of its tile, also between hosts.

    Args:
        across: the schedule over hosts. It has no chunks, because only the inner schedule's tiles can be divided.
        inside: the schedule over the ranks of a host. It may have chunks.
        name: name of the product. None: both names, with "across" between them.

    Returns:
        A schedule on the mesh of ``across`` followed by the mesh of ``inside``.

    Raises:
        ValueError: if ``across`` has chunks, or if the route of D of one schedule has a ``final_add`` that differs from
            its ``add``. The reducer of the product has no single GEMM that could make the final addition.
    """
    for where, given in (("across", across), ("inside", inside)):
        instance(where, given, DistributedTileScheduler, "a DistributedTileScheduler")
    if name is not None:
        string("name", name)
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
    axes = len(inside.mesh)
    route = Route(
        a=NestedGather(across.route.a, inside.route.a, axes),
        b=NestedGather(across.route.b, inside.route.b, axes),
        d=NestedReduce(across.route.d, inside.route.d, axes),
    )
    outer, inner = across.route.final_copies, inside.route.final_copies
    if outer is None or inner is None:
        route = replace(route, d=Pairwise(), final_copies=None)
    else:
        route = replace(route, final_copies=NestedGather(outer, inner, axes))
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
    """Two 1D schedules as one: the first across hosts, the second inside each host.

    Args:
        mesh: (hosts, ranks of a host).
        chunks: number of chunks of the schedule inside a host, >= 1.
        across: name of the schedule across hosts.
        inside: name of the schedule inside each host.
    """
    hosts, ranks = mesh
    outer = get_schedule(across, hosts)
    return nest(outer, get_schedule(inside, ranks, chunks=chunks), "tensor_parallel_2d_nested")
