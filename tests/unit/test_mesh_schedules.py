"""2D, 3D, nested and all-reduce schedules: coordinates, owners, bytes, results."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import distgemm
from distgemm.layouts import Axis, TVLayout
from distgemm.plan.ops import Box, Copy, Gemm, Reduce, box_size
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.schedulers import (
    WHOLE,
    DistributedTileScheduler,
    Hop,
    Pairwise,
    Partition,
    Route,
    TileCoord,
    nest,
    ring_of,
)
from tests.unit.reference_data import Data

MESHES_2D = [(1, 1), (2, 2), (2, 3), (4, 2), (1, 3), (3, 1)]
MESHES_3D = [(1, 1, 1), (2, 2, 2), (2, 1, 3), (1, 2, 3), (3, 2, 1)]
GATHERS = ("direct", "ring", "bidirectional_full", "bidirectional_split")
ALL_REDUCE = ("all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_b_rotating_c", "all_reduce_1d_pairwise_a")


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The mesh coordinate of each rank, row-major."""
    return list(itertools.product(*map(range, mesh)))


def wanted_2d(mesh: tuple[int, ...]) -> dict[str, dict[tuple[int, int], int]]:
    """operand -> tile -> rank for tensor_parallel_2d, from its definition."""
    ps, qs = mesh
    found: dict[str, dict[tuple[int, int], int]] = {"A": {}, "B": {}, "D": {}}
    for rank, (p, q) in enumerate(coordinates(mesh)):
        found["A"][p * qs + q, 0] = rank
        found["B"][q * ps + p, 0] = rank
        for m in range(p * qs, (p + 1) * qs):
            for n in range(q * ps, (q + 1) * ps):
                found["D"][m, n] = rank
    return found


def wanted_2d_rs(mesh: tuple[int, ...]) -> dict[str, dict[tuple[int, int], int]]:
    qs, ss = mesh
    found: dict[str, dict[tuple[int, int], int]] = {"A": {}, "B": {}, "D": {}}
    for rank, (q, s) in enumerate(coordinates(mesh)):
        found["A"][q, s] = rank
        for n in range(q * ss, (q + 1) * ss):
            found["B"][n, s] = rank
        for m in range(qs):
            found["D"][m, q * ss + s] = rank
    return found


def wanted_3d(mesh: tuple[int, ...]) -> dict[str, dict[tuple[int, int], int]]:
    ps, qs, ss = mesh
    found: dict[str, dict[tuple[int, int], int]] = {"A": {}, "B": {}, "D": {}}
    for rank, (p, q, s) in enumerate(coordinates(mesh)):
        for m in range(p * ss, (p + 1) * ss):
            found["A"][m, s * qs + q] = rank
        for k in range(s * qs, (s + 1) * qs):
            found["B"][q * ps + p, k] = rank
        for n in range(q * ps, (q + 1) * ps):
            found["D"][p * ss + s, n] = rank
    return found


CASES = [("tensor_parallel_2d", mesh, wanted_2d) for mesh in MESHES_2D]
CASES += [("tensor_parallel_2d_rs", mesh, wanted_2d_rs) for mesh in MESHES_2D]
CASES += [("tensor_parallel_3d", mesh, wanted_3d) for mesh in MESHES_3D]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("name", "mesh", "wanted"), CASES)
def test_owners_equal_the_definition(name: str, mesh: tuple[int, ...], wanted, chunks: int):
    schedule = distgemm.get_schedule(name, mesh=mesh, chunks=chunks)
    assert schedule.mesh == mesh
    assert schedule.world_size == len(coordinates(mesh))
    for operand, tiles in wanted(mesh).items():
        seen = 0
        for (row, column), rank in tiles.items():
            rows = [row] if operand == "B" else range(row * chunks, (row + 1) * chunks)
            for tile in rows:
                assert schedule.owner(operand, (tile, column, 0)) == (rank,)
                seen += 1
        grid = schedule.grid
        assert seen == {"A": grid.m * grid.k, "B": grid.n * grid.k, "D": grid.m * grid.n}[operand]


@pytest.mark.parametrize(("name", "mesh", "wanted"), CASES)
def test_every_tile_is_worked_on_once_where_its_operands_meet(name: str, mesh: tuple[int, ...], wanted):
    """A rank only multiplies tiles of its own blocks: what it gathers differs from its own on one axis each."""
    schedule = distgemm.get_schedule(name, mesh=mesh)
    tiles = Counter(schedule.work_tile(i, r) for i in range(schedule.iterations) for r in range(schedule.world_size))
    grid = schedule.grid
    assert tiles == Counter(TileCoord(*t) for t in itertools.product(*map(range, grid)))
    where = coordinates(mesh)
    for rank in range(schedule.world_size):
        for iteration in range(schedule.iterations):
            tile = schedule.work_tile(iteration, rank)
            assert tile is not None
            for operand, coordinate in (
                ("A", (tile.m, tile.k, 0)),
                ("B", (tile.n, tile.k, 0)),
                ("D", (tile.m, tile.n, 0)),
            ):
                (holder,) = schedule.owner(operand, coordinate)
                crossed = [axis for axis in range(len(mesh)) if where[holder][axis] != where[rank][axis]]
                allowed = {
                    "tensor_parallel_2d": {"A": 1, "B": 0},
                    "tensor_parallel_2d_rs": {"A": 0, "D": 1},
                    "tensor_parallel_3d": {"A": 1, "B": 0, "D": 2},
                }[name].get(operand)
                assert crossed in ([], [allowed]), (operand, rank, iteration)


@pytest.mark.sample(12)
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize(("name", "mesh", "wanted"), CASES)
def test_equals_numpy_on_every_route(name: str, mesh: tuple[int, ...], wanted, gather: str):
    rng = random.Random(f"{name}{mesh}{gather}")
    reductions = ({},) if name == "tensor_parallel_2d" else ({"reduce": "chain"}, {"reduce": "pairwise"})
    for reduction, (m, n, k) in itertools.product(reductions, ((24, 24, 24), (13, 11, 17), (1, 2, 3))):
        plan = distgemm.make_plan(
            distgemm.GemmProblem(m=m, n=n, k=k, l=rng.choice([1, 2]), partial_dtype=rng.choice([None, "float32"])),
            name,
            mesh=mesh,
            gather=gather,
            chunks=rng.choice([1, 2, 3]),
            workspace=rng.choice(["full", "bounded"]),
            sync=rng.choice(["credit", "barrier"]),
            mechanism=rng.choice(["push", "pull", "store"]),
            **reduction,
        )
        plan.verify()
        data = Data.draw(plan, 0)
        beta = rng.choice([0.0, 2.0])
        got = distgemm.run_reference(
            plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=beta, seed=m, replays=2
        )
        data.assert_on_every_rank(got, 1.0, beta)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("tensor_parallel_2d_rs", (2, 3)), ("tensor_parallel_3d", (2, 2, 2)), ("tensor_parallel_3d", (1, 2, 3))],
)
def test_chains_add_in_the_epilogue_because_the_own_tile_comes_last(name: str, mesh: tuple[int, ...]):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=24, n=24, k=24), name, mesh=mesh, chunks=2)
    assert not any(isinstance(op, Reduce) for rank in range(plan.world_size) for op in plan.ops(rank))
    schedule = distgemm.get_schedule(name, mesh=mesh)
    for rank in range(plan.world_size):
        tile = schedule.work_tile(schedule.iterations - 1, rank)
        assert tile is not None and schedule.owner("D", (tile.m, tile.n, 0)) == (rank,)


@pytest.mark.parametrize("mesh", MESHES_2D)
def test_unequal_rows_on_a_mesh(mesh: tuple[int, ...]):
    ranks = coordinates(mesh)
    rng = random.Random(f"{mesh}")
    own = [rng.choice([0, 1, 4, 7]) for _ in ranks[:-1]] + [3]
    shared = [[2, 0, 5, 3][q] for q, _ in ranks]
    for name, rows, m in (
        ("tensor_parallel_2d", own, sum(own)),
        ("tensor_parallel_2d_rs", shared, sum(shared) // mesh[1]),
    ):
        plan = distgemm.make_plan(
            distgemm.GemmProblem(m=m, n=9, k=10, m_per_rank=tuple(rows)), name, mesh=mesh, chunks=2
        )
        plan.verify()
        assert [plan.shard_shape("A", rank)[0] for rank in range(plan.world_size)] == rows
        data = Data.draw(plan, 0)
        data.assert_on_every_rank(distgemm.run_reference(plan, data.shards("A"), data.shards("B")), 1.0, 0.0)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_bytes_equal_the_closed_formulas(gather: str, chunks: int):
    size, partial = 2, 4

    def sent(name: str, mesh: tuple[int, ...], m: int, n: int, k: int) -> set[int]:
        options = {"chunks": chunks, "gather": gather}
        problem = distgemm.GemmProblem(m=m, n=n, k=k, partial_dtype="float32")
        plan = distgemm.make_plan(problem, name, mesh=mesh, **options)
        found = Counter[int]()
        for (src, _), count in plan.link_bytes().items():
            found[src] += count
        return {found[rank] for rank in range(plan.world_size)}

    for p, q in ((2, 2), (2, 3), (4, 2), (1, 3)):
        m, n, k = 8 * p * q, 4 * p * q, 6
        a, b = m * k // (p * q) * size, n * k // (p * q) * size
        assert sent("tensor_parallel_2d", (p, q), m, n, k) == {(q - 1) * a + (p - 1) * b}
    for q, s in ((2, 2), (2, 3), (4, 2), (1, 3)):
        m, n, k = 8 * q * s, 4 * q * s, 6 * s
        a, d = m * k // (q * s) * size, m * n // (q * s) * partial
        assert sent("tensor_parallel_2d_rs", (q, s), m, n, k) == {(q - 1) * a + (s - 1) * d}
    for p, q, s in ((2, 2, 2), (2, 1, 3), (1, 2, 3)):
        m, n, k = 8 * p * s, 4 * p * q, 6 * q * s
        ranks = p * q * s
        a, b, d = m * k // ranks * size, n * k // ranks * size, m * n // ranks * partial
        wanted = (q - 1) * a + (p - 1) * b + (s - 1) * d
        assert sent("tensor_parallel_3d", (p, q, s), m, n, k) == {wanted}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tensor_parallel_2d", {"mesh": (2, 2), "gather": "tree"}, "gather is one of direct, ring"),
        ("tensor_parallel_3d", {"mesh": (2, 2, 2), "reduce": "star"}, "reduce is one of chain, pairwise, got 'star'"),
        ("tensor_parallel_2d", {"mesh": (2, 2), "reduce": "chain"}, "no option 'reduce'; its options: chunks, gather"),
        ("tensor_parallel_2d", {"mesh": (2, 2, 2)}, "takes a mesh of 2 axes"),
        ("tensor_parallel_3d", {"mesh": (2, 4)}, "takes a mesh of 3 axes"),
        ("tensor_parallel_3d", {"world_size": 8}, "takes a mesh of 3 axes, got world_size=8 alone"),
    ],
)
def test_bad_arguments_say_what_would_be_right(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        distgemm.get_schedule(name, **options)


def test_a_ring_runs_along_one_axis_of_the_mesh():
    assert ring_of((2, 3), 4, [3, 5]) == [4, 5, 3]
    assert ring_of((2, 3), 4, [1]) == [4, 1]
    assert ring_of((2, 2, 2), 3, [7]) == [3, 7]
    assert ring_of((5,), 3, [0]) == [3, 4, 0, 1, 2]
    assert ring_of((2, 3), 4, [4]) == [4]
    with pytest.raises(
        ValueError,
        match=r"ranks that differ from rank 4 on one axis of the mesh \(2, 3\), got \[0\]",
    ):
        ring_of((2, 3), 4, [0])


# --- all-reduce --------------------------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_leaves_all_of_d_on_every_rank(name: str, size: int):
    schedule = distgemm.get_schedule(name, size, chunks=2)
    scatter = distgemm.get_schedule(name.replace("all_reduce", "reduce_scatter"), size, chunks=2)
    assert schedule.work == scatter.work
    assert schedule.owner("D", (0, 0, 0)) == tuple(range(size))
    for seed, (m, n, k) in enumerate(((16, 16, 16), (7, 5, 11), (1, 1, 1))):
        plan = distgemm.make_plan(distgemm.GemmProblem(m=m, n=n, k=k), schedule)
        plan.verify()
        data = Data.draw(plan, seed)
        got = distgemm.run_reference(
            plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=3.0, seed=seed, replays=2
        )
        data.assert_on_every_rank(got, 1.0, 3.0)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_sends_twice_not_n_times(name: str, size: int):
    m, n, k = 8 * size, 4 * size, 2 * size
    plan = distgemm.make_plan(distgemm.GemmProblem(m=m, n=n, k=k), name, size)
    sent = Counter[int]()
    for (src, _), count in plan.link_bytes().items():
        sent[src] += count
    assert set(sent.values()) == {2 * (size - 1) * m * n * 2 // size}


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_final_copies_are_staggered(name: str):
    """The j-th final copy of a rank goes to rank r - j, so no two ranks begin with the same one."""
    plan = distgemm.make_plan(distgemm.GemmProblem(m=64, n=64, k=64), name, 8)
    for rank in range(8):
        order = [op.dst.rank for op in plan.ops(rank) if isinstance(op, Copy) and op.src.buffer == "D"]
        assert order == [(rank - j) % 8 for j in range(1, 8)]


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_final_copies_start_where_the_reduce_scatter_leaves_tiles(name: str):
    scatter = distgemm.get_schedule(name.replace("all_reduce", "reduce_scatter"), 4)
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), name, 4)
    copied = [op for rank in range(4) for op in plan.ops(rank) if isinstance(op, Copy) and op.src.buffer == "D"]
    assert len(copied) == 4 * 3
    assert all(scatter.owner("D", op.tile) == (op.rank,) for op in copied)


# --- one-shot all-reduce -----------------------------------------------------------------------------------------

ONE_SHOT = "all_reduce_1d_one_shot_a"
ONE_SHOT_CASES = [
    (size, *extents, *how)
    for number, (size, extents) in enumerate(
        itertools.product((1, 2, 3, 4, 8), ((1, 8, 8, 1), (7, 5, 3, 1), (16, 12, 1, 2), (33, 24, 20, 1), (64, 9, 6, 2)))
    )
    for how in [
        (("m", "n")[number % 2], 1 + number % 3, ("push", "pull", "store")[number % 3], workspace, sync, partial)
        for workspace, sync, partial in (("full", "credit", None), ("bounded", "barrier", "float32"))
    ]
]


def one_shot(
    size: int, m: int, n: int, k: int, batches: int, mode: str, chunks: int, *how: str | None
) -> distgemm.Plan:
    mechanism, workspace, sync, partial = how
    problem = distgemm.GemmProblem(m, n, k, l=batches, partial_dtype=partial)
    return distgemm.make_plan(
        problem, ONE_SHOT, size, chunks=chunks, chunk_mode=mode, mechanism=mechanism, workspace=workspace, sync=sync
    )  # type: ignore[call-overload]


def computed_by(plan: distgemm.Plan) -> dict[tuple[int, int, Box], int]:
    """The rank whose GEMM made what a slot holds, by rank, slot and box. No slot of a full workspace changes hands."""
    found = {}
    copies = []
    for op in itertools.chain.from_iterable(plan.rank_ops):
        if isinstance(op, Gemm):
            found[op.out.rank, op.out.slot, op.out.box] = op.rank
        elif isinstance(op, Copy):
            copies.append(op)
    for copy in copies:
        found[copy.dst.rank, copy.dst.slot, copy.dst.box] = found[copy.src.rank, copy.src.slot, copy.src.box]
    return found


@pytest.mark.parametrize("case", ONE_SHOT_CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_owner_adds_all_parts_in_the_order_of_ranks(case: tuple[Any, ...]):
    """So results are bitwise equal. What a rank sends is what its GEMM made, in one hop; nothing follows a sum."""
    size, m, n, k = case[:4]
    plan = one_shot(*case)
    plan.verify()
    multiplying = [rank for rank in range(size) if any(isinstance(op, Gemm) for op in plan.ops(rank))]
    part = DTYPE_BYTES[str(plan.problem.partial_dtype)] * m * n * plan.problem.l
    assert plan.link_bytes() == {(src, dst): part for src in multiplying for dst in range(size) if src != dst}
    if size == 1:
        assert not any(isinstance(op, Reduce) for op in plan.ops(0))
        return
    parts = computed_by(plan)
    sums = [op for op in itertools.chain.from_iterable(plan.rank_ops) if isinstance(op, Reduce)]
    for op in sums:
        assert [parts[view.rank, view.slot, view.box] for view in op.sources] == multiplying
        assert op.out.buffer == "D" and op.c is not None
    for rank in range(size):
        assert sum(box_size(op.out.box) for op in sums if op.rank == rank) == m * n * plan.problem.l
    if k < size:
        assert len(multiplying) < size


@pytest.mark.parametrize("case", ONE_SHOT_CASES[::3], ids=lambda case: "-".join(map(str, case)))
def test_a_one_shot_all_reduce_is_right(case: tuple[Any, ...]):
    plan = one_shot(*case)
    data = Data.draw(plan, 7)
    got = distgemm.run_reference(plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=3.0, replays=2)
    data.assert_on_every_rank(got, 1.0, 3.0)


def test_the_first_send_of_no_two_ranks_goes_to_the_same_rank():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=64, k=64), ONE_SHOT, 8)
    for rank in range(8):
        order = [op.dst.rank for op in plan.ops(rank) if isinstance(op, Copy)]
        assert order == [(rank - j) % 8 for j in range(1, 8)]


def test_several_owners_on_part_of_a_mesh_add_for_themselves():
    """Route and partition say who adds, and no name. Here all four ranks multiply, and two of them own D."""
    mesh = (2, 2)
    depth = (Axis(4, rank=(2, 1)),)
    operand, owned = (
        TVLayout(mesh, (1,), modes) for modes in ((WHOLE, depth, WHOLE), ((Axis(1, rank=(1, 0)),), WHOLE, WHOLE))
    )
    work = TVLayout(mesh, (1,), (WHOLE, WHOLE, depth, WHOLE))
    route = Route(d=Pairwise(), final_copies=None)
    schedule = DistributedTileScheduler("two_owners", Partition(operand, operand, owned), work, route)
    assert schedule.owner("D", (0, 0, 0)) == (0, 1)
    for mechanism in ("push", "pull", "store"):
        plan = distgemm.make_plan(distgemm.GemmProblem(m=4, n=6, k=9), schedule, mechanism=mechanism)
        plan.verify()
        parts = computed_by(plan)
        sums = [op for op in itertools.chain.from_iterable(plan.rank_ops) if isinstance(op, Reduce)]
        assert [[parts[view.rank, view.slot, view.box] for view in op.sources] for op in sums] == [[0, 1, 2]] * 2
        data = Data.draw(plan, 3)
        got = distgemm.run_reference(plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=2.0)
        data.assert_on_every_rank(got, 1.0, 2.0)


@dataclass(frozen=True)
class ByWayOf(Pairwise):
    """Partial sums go to the reducer by way of its neighbour."""

    def hops(self, mesh: tuple[int, ...], contributors: Sequence[int], reducer: int) -> Sequence[Hop]:
        by = (reducer + 1) % mesh[0]
        return [*(Hop(rank, by) for rank in contributors if rank != by), Hop(by, reducer)]


def test_a_route_without_final_copies_is_direct():
    with pytest.raises(ValueError, match=r"an epilogue adds its rank's own part first; got add='epilogue'"):
        Route(final_copies=None)
    with pytest.raises(ValueError, match=r"got add='kernel' and final_add='epilogue'"):
        Route(d=Pairwise(final_add="epilogue"), final_copies=None)
    with pytest.raises(ValueError, match=r"final_copies is a GatherRoute, such as Direct\(\) or None, got 3"):
        Route(final_copies=3)  # type: ignore[arg-type]
    schedule = distgemm.get_schedule(ONE_SHOT, 3)
    detour = dataclasses.replace(schedule, route=Route(d=ByWayOf(), final_copies=None))
    with pytest.raises(
        ValueError, match=r"every owner adds if there are no final copies, so partial sums go to it dir"
    ):
        distgemm.make_plan(distgemm.GemmProblem(8, 8, 8), detour)
    with pytest.raises(ValueError, match="chunk_mode is one of m, n, got 'k'"):
        distgemm.get_schedule(ONE_SHOT, 3, chunk_mode="k")


# --- nesting -----------------------------------------------------------------------------------------------------

NAMES_1D = [name for name in distgemm.list_schedules() if "_1d_" in name]


@pytest.mark.sample(2)
@pytest.mark.parametrize("across", NAMES_1D)
def test_any_1d_schedule_nests_in_any_other(across: str):
    for inside in NAMES_1D:
        rng = random.Random(across + inside)
        hosts, ranks = rng.choice([(2, 2), (2, 3), (3, 2)])
        hosts, ranks = (2 if "xor" in across else hosts), (2 if "xor" in inside else ranks)
        schedule = nest(
            distgemm.get_schedule(across, hosts), distgemm.get_schedule(inside, ranks, chunks=rng.choice([1, 2]))
        )
        for m, n, k in ((24, 24, 24), (7, 5, 11)):
            problem = distgemm.GemmProblem(m=m, n=n, k=k)
            try:
                plan = distgemm.make_plan(problem, schedule, workspace=rng.choice(["full", "bounded"]))
            except ValueError as error:
                # Some products spread a rank's shard over the matrix.
                assert "do not make up one box" in str(error)  # noqa: PT017
                continue
            plan.verify()
            data = Data.draw(plan, 0)
            got = distgemm.run_reference(
                plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=1.0, replays=2
            )
            data.assert_on_every_rank(got, 1.0, 1.0)


@pytest.mark.parametrize("across", ["all_gather_1d_ring_a", "all_gather_1d_bidirectional_full_a"])
@pytest.mark.parametrize("inside", ["reduce_scatter_1d_pairwise_a", "all_gather_1d_bidirectional_split_a"])
def test_nested_tiles_are_outer_tiles_of_inner_tiles(across: str, inside: str):
    outer, inner = distgemm.get_schedule(across, 3), distgemm.get_schedule(inside, 4, chunks=2)
    both = nest(outer, inner)
    assert (both.mesh, both.iterations) == ((3, 4), outer.iterations * inner.iterations)
    for rank, iteration in itertools.product(range(12), range(both.iterations)):
        slow = outer.work_tile(iteration // inner.iterations, rank // 4)
        fast = inner.work_tile(iteration % inner.iterations, rank % 4)
        assert slow and fast
        wanted = [s * extent + f for s, f, extent in zip(slow, fast, inner.grid, strict=True)]
        assert both.work_tile(iteration, rank) == TileCoord(*wanted)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 4), (4, 2), (3, 3)])
def test_a_nested_gather_crosses_between_hosts_once_for_each_tile_and_host(hosts: int, ranks: int):
    m, k = 4 * hosts * ranks, 8
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m=m, n=hosts * ranks, k=k), "tensor_parallel_2d_nested", mesh=(hosts, ranks)
    )
    tile = m // (hosts * ranks) * k * 2
    between = {link: count for link, count in plan.link_bytes().items() if link[0] // ranks != link[1] // ranks}
    assert sum(between.values()) == (hosts - 1) * hosts * ranks * tile
    assert all(src % ranks == dst % ranks for src, dst in between)
    inside = sum(plan.link_bytes().values()) - sum(between.values())
    assert inside == hosts * (ranks - 1) * hosts * ranks * tile


def test_only_the_inner_schedule_has_chunks():
    with pytest.raises(ValueError, match="the schedule across hosts has no chunks"):
        nest(distgemm.get_schedule("ag+gemm", 2, chunks=2), distgemm.get_schedule("ag+gemm", 2))


@pytest.mark.parametrize(
    ("name", "final_add"),
    [("reduce_scatter_1d_tiling_a_rotating_c", "kernel"), ("reduce_scatter_1d_pairwise_a", "epilogue")],
)
@pytest.mark.parametrize("outside", [True, False])
def test_what_completes_sums_in_its_own_way_is_not_nested(name: str, final_add: str, outside: bool):
    usual, other = (distgemm.get_schedule(name, 2, **options) for options in ({}, {"final_add": final_add}))
    nest(usual, usual)
    with pytest.raises(ValueError, match=f"the route of D of {name} has add="):
        nest(*((other, usual) if outside else (usual, other)))
