"""A schedule written here, with its own partition, work and routes, is as good as one of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import distgemm
from distgemm.layouts import Axis, Divide, Map, Modulo, TVLayout
from distgemm.plan.ops import Gemm
from distgemm.schedulers import (
    WHOLE,
    BidirectionalFull,
    BidirectionalSplit,
    Direct,
    DistributedTileScheduler,
    GatherRoute,
    Hop,
    Partition,
    Ring,
    Route,
    TileCoord,
    nest,
)
from tests.unit.reference_data import Data


@dataclass(frozen=True)
class Tree:
    """A gather by doubling: in turn t every rank that has the tile sends it 2**t ranks further."""

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        size, found, reached = mesh[0], [], 1
        turn = 0
        while reached < size:
            for near in range(min(reached, size - reached)):
                found.append(Hop((holder + near) % size, (holder + near + reached) % size, turn=turn))
            reached, turn = 2 * reached, turn + 1
        return found


@dataclass(frozen=True)
class Halving:
    """A reduction by a binary tree; every rank adds what it receives in a sum of its own."""

    add: str = "kernel"
    final_add: str = "kernel"

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        ranks, found = [reducer, *contributors], []
        while len(ranks) > 1:
            half = (len(ranks) + 1) // 2
            found += [Hop(src, dst) for src, dst in zip(ranks[half:], ranks, strict=False)]
            ranks = ranks[:half]
        return found


def stationary_a(mesh: tuple[int, ...], route: Route, chunks: int = 1) -> DistributedTileScheduler:
    """A is sharded along K and stays; B is sharded along N and gathered; D is scattered along M.

    Both a gather and a reduction in one schedule: B's k blocks are not where they are needed, and every rank
    adds into all of D.
    """
    (size,) = mesh
    own, every = (Axis(size, rank=1),), (Axis(size, value=1),)
    chunk = Axis(chunks, value=(1, 0))
    partition = Partition(
        a=TVLayout(mesh, (chunks, size), ((chunk, Axis(size, value=(0, 1))), own, WHOLE)),
        b=TVLayout(mesh, (size,), (own, every, WHOLE)),
        d=TVLayout(mesh, (chunks, size), ((chunk, Axis(size, rank=1)), (Axis(size, value=(0, 1)),), WHOLE)),
    )
    # Iterations: chunks fastest, then rows (own last), then columns.
    work = TVLayout(
        mesh,
        (chunks, size, size),
        (
            (Axis(chunks, value=(1, 0, 0)), Axis(size, rank=1, value=(0, 1, 0), maps=(Modulo(size),))),
            (Axis(size, rank=1, value=(0, 0, 1), maps=(Modulo(size),)),),
            own,
            WHOLE,
        ),
    )
    return DistributedTileScheduler("stationary_a", partition, work, route, TileCoord(chunks, 1, 1, 1))


ROUTES = {
    "direct and pairwise": Route(d=distgemm.schedulers.Pairwise()),
    "ring and chain": Route(b=distgemm.schedulers.Ring()),
    "both ways and chain with sums in kernels": Route(
        b=distgemm.schedulers.BidirectionalSplit(), d=distgemm.schedulers.Chain(add="kernel", final_add="kernel")
    ),
    "tree and halving": Route(b=Tree(), d=Halving()),
}


def test_where_partial_sums_are_added():
    """Whatever the number of ranks, unless it says that the reducer does."""
    problem = distgemm.GemmProblem(60, 60, 60)
    for size in (2, 3):
        for route, folds in (
            (distgemm.schedulers.Chain(add="kernel", final_add="kernel"), False),
            (distgemm.schedulers.Chain(), True),
            (distgemm.schedulers.Chain(final_add="kernel"), size > 2),
            (distgemm.schedulers.Pairwise(), False),
            (distgemm.schedulers.Pairwise(final_add="epilogue"), True),
        ):
            schedule = distgemm.get_schedule("reduce_scatter_1d_tiling_a_rotating_c", size)
            plan = distgemm.make_plan(problem, dataclasses.replace(schedule, route=Route(d=route)))
            assert any(op.sources for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)) == folds


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_it_plans_verifies_and_runs(route: str, size: int):
    for chunks, (m, n, k) in ((1, (12, 12, 12)), (2, (13, 7, 5)), (1, (2, 1, 3))):
        schedule = stationary_a((size,), ROUTES[route], chunks)
        for workspace in ("full", "bounded"):
            for partial in ("bfloat16", "float32"):
                problem = distgemm.GemmProblem(m=m, n=n, k=k, partial_dtype=partial)
                plan = distgemm.make_plan(problem, schedule, workspace=workspace)
                plan.verify()
                data = Data.draw(plan, size)
                for seed in range(3):
                    got = distgemm.run_reference(
                        plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=2.0, seed=seed, replays=2
                    )
                    data.assert_on_every_rank(got, 1.0, 2.0)


def test_a_tree_takes_logarithmically_many_turns():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), stationary_a((8,), Route(b=Tree())))
    sends = [op for rank in range(8) for op in plan.ops(rank) if op.kind == "Copy" and op.operand == "B"]
    assert len({op.round for op in sends}) == 3


def gather_b(size: int, route: GatherRoute) -> DistributedTileScheduler:
    """A schedule on one axis that gathers B."""
    return dataclasses.replace(distgemm.get_schedule("all_gather_1d_tiling_cd_rotating_b", size), route=Route(b=route))


@pytest.mark.parametrize("route", [Tree(), Ring()])
def test_routes_of_nested_schedules_see_their_own_level(route: GatherRoute):
    """So one that knows one axis works on each level, also of a nest in a nest."""
    a, b, c = gather_b(2, route), gather_b(3, route), gather_b(2, route)
    problem = distgemm.GemmProblem(m=24, n=24, k=8)
    for schedule in (nest(a, b), nest(a, nest(b, c)), nest(nest(a, b), c)):
        size = schedule.world_size
        plan = distgemm.make_plan(problem, schedule, ranks_per_host=size // 2)
        plan.verify()
        data = Data.draw(plan, size)
        data.assert_on_every_rank(distgemm.run_reference(plan, data.shards("A"), data.shards("B")), 1.0, 0.0)
        whole = 24 * 8 * 2
        assert sum(plan.link_bytes("across").values()) == whole, "each of two hosts receives the other half once"
        assert sum(plan.link_bytes().values()) == (size - 1) * whole


@dataclass(frozen=True)
class Broken:
    """A route whose hops are given."""

    given: Sequence[object]
    add: str = "epilogue"
    final_add: str = "epilogue"

    def hops(self, mesh: tuple[int, ...], holders: object, needers: object) -> Sequence[Hop]:
        return self.given  # type: ignore[return-value]


@dataclass(frozen=True)
class Circle:
    """A reduction in which the contributors send to one another."""

    add: str = "epilogue"
    final_add: str = "epilogue"

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        return [Hop(contributors[0], contributors[1]), Hop(contributors[1], contributors[0])]


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (Route(b=Broken(())), "does not bring all of it to rank"),
        (Route(b=Broken((Hop(1, 2), Hop(0, 1), Hop(0, 2)))), "passes on what did not arrive there"),
        (Route(b=Broken((Hop(0, 1), Hop(0, 1), Hop(0, 2)))), "brings what has arrived there already"),
        (Route(b=Broken((Hop(0, 1, 0, 2), Hop(0, 2)))), "does not bring all of it to rank 1"),
        (Route(d=Broken(())), "does not send on the partial sums of ranks"),
        (Route(d=Broken((Hop(0, 1), Hop(1, 2), Hop(0, 2)))), "does not fit"),
        (Route(d=Circle()), "circle"),
        (Route(d=Broken((Hop(1, 0, 0, 2), Hop(2, 0, 0, 2)))), "partial sums move as whole tiles"),
    ],
)
def test_a_route_that_cannot_work_is_refused_with_the_reason(route: Route, message: str):
    with pytest.raises(ValueError, match=message):
        distgemm.make_plan(distgemm.GemmProblem(m=9, n=9, k=9), stationary_a((3,), route))


@pytest.mark.parametrize(
    ("route", "named"),
    [
        (Route(b=Broken((Hop(0, 3),))), "the route Broken of B.*rank 3 is none of the 3 ranks 0 to 2"),
        (Route(b=Broken((Hop(-1, 1),))), "the route Broken of B.*rank -1 is none of the 3 ranks"),
        (Route(d=Broken((Hop(0, 7),))), "the route Broken of D.*rank 7 is none of the 3 ranks"),
        (Route(b=Broken(None)), "the route Broken of B.* returns None, which is no sequence of Hop"),  # type: ignore
        (Route(b=Broken(((0, 1),))), r"the route Broken of B.* returns \(0, 1\), which is no Hop"),
        (Route(b=Broken((Hop(0, 1.0),))), "the route Broken of B.* whose fields are integers"),  # type: ignore
        (Route(b=Broken((Hop(0, 1, turn=0.5),))), "the route Broken of B.* whose fields are integers"),  # type: ignore
        (Route(b=Broken((Hop(0, 1, 2, 2),))), "the route Broken of B.*part is none of its 2 parts"),
        (Route(b=Broken((Hop(0, 1, 0, 0),))), "the route Broken of B.*part is none of its 0 parts"),
    ],
)
def test_a_route_with_a_hop_that_does_not_exist_is_refused(route: Route, named: str):
    schedule = stationary_a((3,), route)
    with pytest.raises(distgemm.PlanError, match=f"{schedule.name}: {named}"):
        distgemm.make_plan(distgemm.GemmProblem(m=9, n=9, k=9), schedule)


class Yielding:
    """A route that yields hops of numpy's integers, and empties its arguments."""

    add = final_add = "kernel"

    def hops(self, mesh: tuple[int, ...], first: object, second: object) -> object:
        if isinstance(first, list):
            while first:
                yield Hop(np.int64(first.pop()), np.int64(second))  # type: ignore[arg-type, call-overload]
        else:
            while second:
                yield Hop(np.int64(first), np.int64(second.pop()))  # type: ignore[attr-defined, call-overload]


def test_a_route_may_yield_hops_and_change_its_arguments():
    route = Route(b=Yielding(), d=Yielding())  # type: ignore[arg-type]
    plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=9, k=9), stationary_a((3,), route))
    plan.verify()
    assert distgemm.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("route", [Direct(), Ring(), BidirectionalFull(), BidirectionalSplit()])
@pytest.mark.parametrize("holders", [(0, 1), (0, 3), (0, 1, 2, 4)])
def test_ranks_on_the_way_may_hold_the_tile_too(route: GatherRoute, holders: tuple[int, ...]):
    """The route of one holder leads through others, and through ranks that another holder serves."""
    size = 6
    rest = next(rank for rank in range(size) if rank not in holders)
    own = Axis(size, rank=1)
    # Ranks that hold no tile of B have an index outside the grid.
    held = Axis(1, rank=1, maps=(Held(holders),))
    partition = Partition(
        a=TVLayout((size,), (1,), ((own,), WHOLE, WHOLE)),
        b=TVLayout((size,), (1,), ((held,), WHOLE, WHOLE)),
        d=TVLayout((size,), (1,), ((own,), WHOLE, WHOLE)),
    )
    work = TVLayout((size,), (1,), ((own,), WHOLE, WHOLE, WHOLE))
    schedule = DistributedTileScheduler("replicated", partition, work, Route(b=route))
    for mechanism in ("push", "pull"):
        plan = distgemm.make_plan(distgemm.GemmProblem(12, 8, 4), schedule, mechanism=mechanism)  # type: ignore
        plan.verify()
        data = Data.draw(plan, size)
        data.assert_on_every_rank(distgemm.run_reference(plan, data.shards("A"), data.shards("B")), 1.0, 0.0)
        assert plan.shard_shape("B", rest) == (0, 0)
        tile = 8 * 4 * 2
        assert sum(plan.link_bytes().values()) == tile * (size - len(holders)), "each rank receives it once"


@dataclass(frozen=True)
class Held:
    """0 for some ranks, and 1 for the others."""

    ranks: tuple[int, ...]

    def __call__(self, value):
        return 1 - np.isin(value, self.ranks).astype(np.int64)


class NoKey:
    """A map and a route that cannot be a key."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, value):
        return value

    def hops(self, mesh: tuple[int, ...], holder: int, needers: Sequence[int]) -> Sequence[Hop]:
        return [Hop(holder, rank) for rank in needers]


def test_maps_and_routes_are_hashable():
    for what, make in (("a is a GatherRoute", lambda: Route(a=NoKey())), ("maps", lambda: Axis(4, maps=(NoKey(),)))):
        with pytest.raises(ValueError, match=f"{what}.*hashable"):
            make()


def test_a_route_adds_in_one_of_two_places():
    for place in ("add", "final_add"):
        with pytest.raises(ValueError, match=rf"d\.{place} is one of epilogue, kernel, got 'sum'"):
            Route(d=Halving(**{place: "sum"}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda value: value / 2, "the result of map .* is an array of integers of shape .*float64"),
        (lambda value: value.tolist(), r"the result of map .* is an array of integers of shape .*got \["),
        (lambda value: 1, "the result of map .* is an array of integers of shape .*got 1"),
        (
            lambda value: value if value < 4 else value - 4,
            "the map .* takes an array of integers; it raised ValueError",
        ),
    ],
)
def test_a_map_that_returns_no_array_of_integers_is_refused(wrong: Map, message: str):
    for maps in ((wrong,), (Divide(1), wrong)):
        axis = Axis(4, rank=1, maps=maps)
        layout = TVLayout((4,), (2,), ((axis,), WHOLE, WHOLE))
        for use in (layout.covers, lambda layout=layout: layout.table, lambda layout=layout: layout.of_rank(1)):
            with pytest.raises(ValueError, match=message):
                use()


def test_a_rank_may_hold_no_batch():
    """Of a single batch, which shards do not have as an axis."""
    mesh, batches = (2,), (Axis(2, rank=1),)
    held = TVLayout(mesh, (1,), (WHOLE, WHOLE, batches))
    work = TVLayout(mesh, (1,), (WHOLE, WHOLE, WHOLE, batches))
    schedule = DistributedTileScheduler("batches", Partition(held, held, held), work)
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 5, 6), schedule)
    plan.verify()
    a, b = np.random.rand(4, 6), np.random.rand(5, 6)
    assert [plan.shard_shape("D", rank) for rank in range(2)] == [(4, 5), (0, 5)]
    shards = ([x[plan.shard(name, rank)] for rank in range(2)] for name, x in (("A", a), ("B", b)))
    first, second = distgemm.run_reference(plan, *shards)
    np.testing.assert_allclose(first, a @ b.T)
    assert second.shape == (0, 5)


def test_tiles_that_do_not_make_up_a_box_are_refused():
    good = stationary_a((4,), Route())
    scattered = TVLayout((4,), (2,), ((Axis(4, rank=1, value=2, maps=(Modulo(4),)),), WHOLE, WHOLE))
    every = TVLayout((4,), (4,), ((Axis(4, value=1),), WHOLE, WHOLE))
    work = TVLayout((4,), (4,), ((Axis(4, value=1),), (Axis(4, rank=1),), WHOLE, WHOLE))
    columns = TVLayout((4,), (4,), ((Axis(4, value=1),), (Axis(4, rank=1),), WHOLE))
    own = TVLayout((4,), (1,), ((Axis(4, rank=1),), WHOLE, WHOLE))
    assert good.world_size == every.ranks
    schedule = DistributedTileScheduler("scattered", Partition(scattered, own, columns), work)
    with pytest.raises(ValueError, match="do not make up one box"):
        distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), schedule)


def test_work_that_misses_or_doubles_a_tile_does_not_verify():
    good = distgemm.get_schedule("ag+gemm", 4)
    same = TVLayout((4,), (4,), ((Axis(4, value=1, maps=(Modulo(3),)),), (Axis(4, rank=1),), WHOLE, WHOLE))
    doubled = DistributedTileScheduler("doubled", good.partition, same)
    with pytest.raises(distgemm.PlanError, match=r"rank \d iteration 3: Gemm .* multiplies a tile that"):
        distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), doubled).verify()
    late = TVLayout(
        (4,), (4,), ((Axis(4, value=1, maps=(distgemm.layouts.Offset(1),)),), (Axis(4, rank=1),), WHOLE, WHOLE)
    )
    idle = DistributedTileScheduler("idle", good.partition, late)
    assert idle.work_tile(3, 0) is None
    with pytest.raises(distgemm.PlanError, match=r"no rank multiplies the tile D\(0, 0, 0\), .*, owned by rank 0"):
        distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), idle).verify()
