"""The schedules against the formulas of the systems that they come from, written out again here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import numpy as np
import pytest

import distgemm
from distgemm.layouts import Axis, TVLayout
from distgemm.plan.ops import Copy, Gemm, Reduce, Wait
from distgemm.schedulers import (
    WHOLE,
    DistributedTileScheduler,
    Partition,
    TileCoord,
    list_patterns,
    register_schedule,
    registry,
    schedule_aliases,
    schedule_options,
)

WORLD_SIZES = range(1, 17)
CHUNKS = (1, 2, 3)

XOR = "all_gather_1d_pairwise_xor_a"
FULL = "all_gather_1d_bidirectional_full_a"
SPLIT = "all_gather_1d_bidirectional_split_a"


def clockwise_full(size: int) -> list[int]:
    """Clockwise distances in tt-metal's order: r, r-1, r+1, r-2, r+2, ..."""
    distances = [0]
    for step in range(1, size):
        for distance in (step, size - step):
            if distance not in distances:
                distances.append(distance)
    return distances


def clockwise_split(size: int) -> list[int]:
    """Own shard, then by arrival max(d, N - d), smaller d first."""
    arrivals = sorted((max(d, size - d), d) for d in range(1, size))
    return [0] + [d for _, d in arrivals]


def tile_of_shards(name: str, size: int, j: int, rank: int) -> tuple[int, int, int]:
    """(m, n, k) of turn j in whole shards, straight from the table of the systems."""
    right, left = (rank + j) % size, (rank - 1 - j) % size
    return {
        "all_gather_1d_tiling_cd_rotating_a": (right, rank, 0),
        "all_gather_1d_tiling_cd_rotating_b": (rank, right, 0),
        "reduce_scatter_1d_tiling_a_rotating_c": (left, 0, rank),
        "reduce_scatter_1d_tiling_b_rotating_c": (0, left, rank),
        "all_gather_1d_ring_a": ((rank - j) % size, rank, 0),
        FULL: ((rank - clockwise_full(size)[j]) % size, rank, 0),
        SPLIT: ((rank - clockwise_split(size)[j]) % size, rank, 0),
        "all_gather_1d_tiling_k_rotating_a": (0, rank, right),
        XOR: (rank ^ j, rank, 0),
        "reduce_scatter_1d_pairwise_a": ((rank + 1 + j) % size, 0, rank),
    }[name]


MOVING = {
    "all_gather_1d_tiling_cd_rotating_b": 1,
    "reduce_scatter_1d_tiling_b_rotating_c": 1,
    "all_gather_1d_tiling_k_rotating_a": 2,
}


def expected_tile(name: str, size: int, chunks: int, iteration: int, rank: int) -> TileCoord:
    if name == "reduce_scatter_1d_pairwise_a":
        chunk, j = divmod(iteration, size)
    else:
        j, chunk = divmod(iteration, chunks)
    tile = list(tile_of_shards(name, size, j, rank))
    moving = MOVING.get(name, 0)
    tile[moving] = tile[moving] * chunks + chunk
    return TileCoord(*tile, 0)


def sizes_of(name: str) -> list[int]:
    return [size for size in WORLD_SIZES if name != XOR or size & (size - 1) == 0]


ONE_D = [name for name in distgemm.list_schedules() if name.startswith(("all_gather_1d", "reduce_scatter_1d"))]


def test_the_ten_schedules_are_listed_without_aliases_or_families():
    assert set(ONE_D) >= {
        "all_gather_1d_bidirectional_full_a",
        "all_gather_1d_bidirectional_split_a",
        "all_gather_1d_pairwise_xor_a",
        "all_gather_1d_ring_a",
        "all_gather_1d_tiling_cd_rotating_a",
        "all_gather_1d_tiling_cd_rotating_b",
        "all_gather_1d_tiling_k_rotating_a",
        "reduce_scatter_1d_pairwise_a",
        "reduce_scatter_1d_tiling_a_rotating_c",
        "reduce_scatter_1d_tiling_b_rotating_c",
    }
    names = distgemm.list_schedules()
    assert names == sorted(names)
    assert not set(names) & {"ag+gemm", "gemm+rs", "auto", "AllGather1D_TilingCD_RotatingA"}


@pytest.mark.sample(10)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ONE_D)
def test_work_tiles_equal_the_table(name: str, chunks: int):
    for size in sizes_of(name):
        schedule = distgemm.get_schedule(name, world_size=size, chunks=chunks)
        assert (schedule.name, schedule.world_size, schedule.mesh) == (name, size, (size,))
        assert schedule.iterations == size * chunks
        for rank in range(size):
            for iteration in range(schedule.iterations):
                tile = schedule.work_tile(iteration, rank)
                assert tile == expected_tile(name, size, chunks, iteration, rank), (size, rank, iteration)


@pytest.mark.parametrize("name", ["reduce_scatter_1d_pairwise_a", "all_reduce_1d_pairwise_a"])
def test_an_owner_adds_pairwise_sums_by_its_last_products(name: str):
    """Behind all that it sends."""

    def order(size: int, rank: int, **how: int) -> list[tuple[int, int]]:
        schedule = distgemm.get_schedule(name, size, final_add="epilogue", **how)
        chunks = how.get("chunks", 1)
        tiles = [schedule.work_tile(iteration, rank) for iteration in range(schedule.iterations)]
        assert len({*tiles}) == size * chunks and all(tile[1:] == (0, rank, 0) for tile in tiles)
        found = [((tile.m // chunks - rank - 1) % size, tile.m % chunks) for tile in tiles]  # shard in time, chunk
        schedule = distgemm.get_schedule(
            name, size, final_add="epilogue", chunk_mode="n", **how
        )  # the same, by columns of shards
        tiles = [schedule.work_tile(iteration, rank) for iteration in range(schedule.iterations)]
        assert [((tile.m - rank - 1) % size, tile.n) for tile in tiles] == found
        assert {tile[2:] for tile in tiles} == {(rank, 0)}
        return found

    for rank in range(3):
        assert order(3, rank) == [(0, 0), (1, 0), (2, 0)]
        assert order(3, rank, chunks=2) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    with pytest.raises(ValueError, match="final_add is one of epilogue, kernel, got 'none'"):
        distgemm.get_schedule(name, 4, final_add="none")


@pytest.mark.parametrize("name", ["reduce_scatter_1d_pairwise_a", "all_reduce_1d_pairwise_a"])
def test_chunks_of_pairwise_sums_are_rows_or_columns(name: str):
    """What ranks hold is the same; a shard of B is held in as many parts as D's rows are cut into."""
    for size, chunks in ((1, 1), (2, 3), (4, 2)):
        rows, columns = (distgemm.get_schedule(name, size, chunks=chunks, chunk_mode=chunk_mode) for chunk_mode in "mn")
        assert rows.chunks == (chunks, 1, 1, 1) and columns.chunks == (1, chunks, 1, 1)
        assert rows.grid == (size * chunks, 1, size, 1) and columns.grid == (size, chunks, size, 1)
        problem = distgemm.GemmProblem(26, 25, 19)
        by_rows, by_columns = (
            distgemm.make_plan(problem, name, size, chunks=chunks, chunk_mode=chunk_mode, sync="barrier")
            for chunk_mode in "mn"
        )
        for rank in range(size):
            assert all(by_rows.shard(operand, rank) == by_columns.shard(operand, rank) for operand in "ABD")
        assert by_rows.link_bytes() == by_columns.link_bytes()
        problem = distgemm.GemmProblem(24 * size, 48, 8 * size)
        by_rows, by_columns = (
            distgemm.make_plan(problem, name, size, chunks=chunks, chunk_mode=chunk_mode, mechanism="store")
            for chunk_mode in "mn"
        )
        assert all(by_rows.workspace_bytes(rank) == by_columns.workspace_bytes(rank) for rank in range(size))
    with pytest.raises(ValueError, match=r"chunk_mode is one of m, n, got 'k'"):
        distgemm.get_schedule(name, 4, chunk_mode="k")


@pytest.mark.parametrize("chunk_mode", ["m", "n"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pairwise_sums_have_one_place_where_they_are_added(size: int, chunk_mode: str):
    """A single GEMM adds to each tile of D what all others send, in the order in which it comes; no Reduce."""
    problem = distgemm.GemmProblem(24, 24, 24)
    for mechanism in ("push", "store"):
        how = {"final_add": "epilogue", "chunk_mode": chunk_mode, "mechanism": mechanism}
        plan = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", size, chunks=2, sync="barrier", **how)
        for rank, ops in enumerate(plan.rank_ops):
            assert not any(isinstance(op, Reduce) for op in ops)
            adding = [op for op in ops if isinstance(op, Gemm) and op.sources]
            assert [op.out.buffer for op in adding] == ["D", "D"]
            for op in adding:
                waits = {wait.slot: wait.peer for wait in ops if isinstance(wait, Wait)}
                assert [waits[view.slot] for view in op.sources] == [(rank - far) % size for far in range(1, size)]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ONE_D)
def test_grid_is_what_the_work_spans(name: str, chunks: int):
    for size in sizes_of(name):
        schedule = distgemm.get_schedule(name, size, chunks=chunks)
        tiles = {schedule.work_tile(i, r) for i in range(schedule.iterations) for r in range(size)}
        assert tuple(schedule.grid) == tuple(1 + max(tile[mode] for tile in tiles) for mode in range(4))
        assert len(tiles) == size * size * chunks


@pytest.mark.parametrize("name", ONE_D)
def test_owners_are_the_shards_of_torch_tensor_parallelism(name: str):
    chunks = 2
    for size in sizes_of(name):
        schedule = distgemm.get_schedule(name, size, chunks=chunks)
        grid = schedule.grid
        gather_k = "tiling_k" in name
        for operand, extents in (("A", (grid.m, grid.k)), ("B", (grid.n, grid.k)), ("D", (grid.m, grid.n))):
            for row in range(extents[0]):
                for column in range(extents[1]):
                    owner = schedule.owner(operand, (row, column, 0))
                    if name.startswith("reduce_scatter"):
                        along = {
                            "A": column,
                            "B": column,
                            "D": row if "tiling_a" in name or "pairwise" in name else column,
                        }
                        moving = operand == "D"
                    elif "rotating_b" in name:
                        along = {"A": row, "B": row, "D": row}
                        moving = operand == "B"
                    else:
                        along = {"A": column if gather_k else row, "B": row, "D": column}
                        moving = operand == "A"
                    assert owner == (along[operand] // (chunks if moving else 1),), (operand, row, column)


def test_iteration_zero_needs_no_peer_and_a_reducers_own_tile_comes_last():
    for name in ONE_D:
        for size in sizes_of(name):
            schedule = distgemm.get_schedule(name, size)
            for rank in range(size):
                first, last = schedule.work_tile(0, rank), schedule.work_tile(schedule.iterations - 1, rank)
                assert first and last
                if name.startswith("all_gather"):
                    assert rank in schedule.owner("A", (first.m, first.k, 0))
                    assert rank in schedule.owner("B", (first.n, first.k, 0))
                else:
                    assert schedule.owner("D", (last.m, last.n, 0)) == (rank,)


# --- the bidirectional rings -----------------------------------------------------------------------------


def copies_of(plan: distgemm.Plan) -> list[Copy]:
    return [op for rank in range(plan.world_size) for op in plan.ops(rank) if isinstance(op, Copy)]


def hops_before_arrival(plan: distgemm.Plan) -> dict[tuple[int, int], int]:
    """(rank, shard) -> hops after which the shard is complete there, by following each copy's source back."""
    copies = copies_of(plan)

    def depth(copy: Copy) -> int:
        if copy.src.buffer == "A":
            return 1
        before = [
            other
            for other in copies
            if other.dst[:3] == copy.src[:3] and other.dst.box == copy.src.box and other.dst.frame == copy.src.frame
        ]
        assert len(before) == 1
        return 1 + depth(before[0])

    found: dict[tuple[int, int], int] = {}
    for copy in copies:
        key = copy.dst.rank, copy.tile[0]
        found[key] = max(found.get(key, 0), depth(copy))
    return found


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_full_arrives_after_its_ring_distance(size: int):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=2 * size, n=size, k=4), FULL, size)
    arrivals = hops_before_arrival(plan)
    for rank in range(size):
        for distance in range(1, size):
            assert arrivals[rank, (rank - distance) % size] == min(distance, size - distance)
    assert len(arrivals) == size * (size - 1)


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_split_arrives_after_both_halves(size: int):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=2 * size, n=size, k=4), SPLIT, size)
    arrivals = hops_before_arrival(plan)
    for rank in range(size):
        for distance in range(1, size):
            assert arrivals[rank, (rank - distance) % size] == max(distance, size - distance)


@pytest.mark.parametrize("name", [FULL, SPLIT])
def test_both_directions_are_used_at_once(name: str):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=8, k=4), name, 8)
    for rank in range(8):
        rounds: dict[int, list[int]] = {}
        for op in plan.ops(rank):
            if isinstance(op, Copy):
                rounds.setdefault((op.dst.rank - rank) % 8, []).append(op.round)
        assert rounds[7] == rounds[1][: len(rounds[7])] == sorted(set(rounds[7]))


@pytest.mark.sample(8)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("size", [size for size in WORLD_SIZES if size > 2])
def test_bytes_per_direction(size: int, chunks: int):
    rows, k = 2 * chunks, 5
    shard = rows * k * 2
    problem = distgemm.GemmProblem(m=rows * size, n=size, k=k)
    full = distgemm.make_plan(problem, FULL, size, chunks=chunks).link_bytes()
    split = distgemm.make_plan(problem, SPLIT, size, chunks=chunks).link_bytes()
    ring = distgemm.make_plan(problem, "all_gather_1d_ring_a", size, chunks=chunks).link_bytes()
    for rank in range(size):
        up, down = (rank, (rank + 1) % size), (rank, (rank - 1) % size)
        assert full[up] == size // 2 * shard
        assert full.get(down, 0) == (size - 1) // 2 * shard
        assert split[up] == split[down] == (size - 1) * shard // 2
        assert ring[up] == (size - 1) * shard
    assert len(split) == len(full) == 2 * size
    assert len(ring) == size


@pytest.mark.parametrize("name", [FULL, SPLIT, "all_gather_1d_ring_a"])
def test_whole_shards_are_used_in_the_order_of_their_arrival(name: str):
    for size in WORLD_SIZES:
        plan = distgemm.make_plan(distgemm.GemmProblem(m=2 * size, n=size, k=4), name, size)
        schedule, arrivals = distgemm.get_schedule(name, size), hops_before_arrival(plan)
        for rank in range(size):
            shards = [schedule.work_tile(i, rank).m for i in range(1, size)]  # type: ignore[union-attr]
            times = [arrivals[rank, shard] for shard in shards]
            assert times == sorted(times)


def test_direct_schedules_pair_every_rank_with_every_other():
    problem = distgemm.GemmProblem(m=64, n=64, k=8)
    for name in ("all_gather_1d_tiling_cd_rotating_a", XOR, "reduce_scatter_1d_pairwise_a"):
        links = distgemm.make_plan(problem, name, 8).link_bytes()
        assert set(links) == {(a, b) for a in range(8) for b in range(8) if a != b}
        assert len(set(links.values())) == 1


def test_pushes_are_staggered():
    """Rank r's j-th send goes to r - j, so that no two ranks send to the same one at the same time."""
    plan = distgemm.make_plan(distgemm.GemmProblem(m=64, n=64, k=8), "all_gather_1d_tiling_cd_rotating_a", 8)
    for rank in range(8):
        order = [op.dst.rank for op in plan.ops(rank) if isinstance(op, Copy)]
        assert order == [(rank - j) % 8 for j in range(1, 8)]


def test_xor_exchanges_in_pairs():
    schedule = distgemm.get_schedule(XOR, 16)
    for iteration in range(16):
        partner = [schedule.work_tile(iteration, rank).m for rank in range(16)]  # type: ignore[union-attr]
        assert [partner[other] for other in partner] == list(range(16))


# --- names and arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("AllGather1D_TilingCD_RotatingA", "all_gather_1d_tiling_cd_rotating_a"),
        ("AllGather1D_TilingCD_RotatingB", "all_gather_1d_tiling_cd_rotating_b"),
        ("ReduceScatter1D_TilingA_RotatingC", "reduce_scatter_1d_tiling_a_rotating_c"),
        ("ReduceScatter1D_TilingB_RotatingC", "reduce_scatter_1d_tiling_b_rotating_c"),
    ],
)
def test_cxx_names_are_aliases(alias: str, name: str):
    assert distgemm.get_schedule(alias, 4) is distgemm.get_schedule(name, 4)
    assert alias in schedule_aliases(name)


def test_families_resolve_to_a_schedule_of_their_kind():
    patterns = list_patterns()
    assert distgemm.get_schedule("ag+gemm", 4).name == patterns["ag+gemm"]
    assert distgemm.get_schedule("gemm+rs", 4, chunks=2).name == patterns["gemm+rs"]
    assert patterns["ag+gemm"].startswith("all_gather") and patterns["gemm+rs"].startswith("reduce_scatter")


def test_numpy_integers_and_lists_are_as_good_as_integers_and_tuples():
    wanted = distgemm.get_schedule("ag+gemm", 4, chunks=2)
    assert distgemm.get_schedule("ag+gemm", np.int64(4), chunks=np.int32(2)) is wanted
    assert distgemm.get_schedule("ag+gemm", mesh=[np.int64(4)], chunks=2) is wanted  # type: ignore[arg-type]


def test_mesh_alone_fixes_the_world_size():
    name = "all_gather_1d_ring_a"
    assert distgemm.get_schedule(name, mesh=(5,)).world_size == 5
    assert distgemm.get_schedule(name, world_size=5, mesh=(5,)) == distgemm.get_schedule(name, 5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_gather_1d_rings_a", 4), {}, "did you mean 'all_gather_1d_ring_a'"),
        (("ag+gem", 4), {}, r"did you mean 'ag\+gemm'"),
        (("AG+GEMM", 4), {}, r"did you mean 'ag\+gemm'"),
        (("allgather1d_tilingcd_rotatinga", 4), {}, "did you mean 'AllGather1D_TilingCD_RotatingA'"),
        (("auto", 4), {}, "unknown schedule 'auto': \"auto\" is for the torch functions and layers"),
        (("ag+gemm", 100_000), {}, "world_size is an integer from 1 to 8192, got 100000"),
        (("tensor_parallel_2d",), {"mesh": (1000, 1000)}, "whose product is at most 8192, got \\(1000, 1000\\)"),
        (("ag+gemm", 4), {"chunks": 1_000_000}, "chunks is an integer from 1 to 4096, got 1000000"),
        (("nothing like it", 4), {}, "reduce_scatter_1d_pairwise_a"),
        (("ag+gemm", 0), {}, "integer >= 1, got 0"),
        (("ag+gemm", -2), {}, "integer >= 1, got -2"),
        (("ag+gemm", 2.0), {}, "integer >= 1, got 2.0"),
        (("ag+gemm", True), {}, "integer >= 1, got True"),
        (("ag+gemm",), {}, "needs a world_size, .* or a mesh"),
        (("ag+gemm", 4), {"chunks": 0}, "chunks is an integer >= 1, got 0"),
        (("ag+gemm", 4), {"chunks": -1}, "got -1"),
        (("ag+gemm", 4), {"chunks": 1.5}, "got 1.5"),
        (("ag+gemm", 4), {"chunks": "2"}, "got '2'"),
        (("ag+gemm", 4), {"chunks": [2]}, r"got \[2\]"),
        (("ag+gemm", 4), {"chunk": 2}, "no option 'chunk'; its options: chunks"),
        (("ag+gemm", 4), {"mesh": (2, 3)}, "product of mesh \\(2, 3\\), 6, got 4"),
        (("ag+gemm", 4), {"mesh": (2, 2)}, "mesh of 1 axes"),
        (("ag+gemm",), {"mesh": (0,)}, "mesh\\[0\\] is an integer >= 1, got 0"),
        (("ag+gemm",), {"mesh": ()}, "tuple of integers >= 1"),
        (("ag+gemm",), {"mesh": 4}, "tuple of integers >= 1, got 4"),
        ((XOR, 6), {}, "power of two, got 6"),
    ],
)
def test_bad_arguments_say_what_would_be_right(arguments: tuple, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        distgemm.get_schedule(*arguments, **options)


@pytest.mark.parametrize(("iteration", "rank"), [(-1, 0), (8, 0), (0, -1), (0, 4)])
def test_work_tile_refuses_what_does_not_exist(iteration: int, rank: int):
    schedule = distgemm.get_schedule("ag+gemm", 4, chunks=2)
    with pytest.raises(ValueError, match=r"is an integer from 0 to"):
        schedule.work_tile(iteration, rank)


@pytest.mark.parametrize(("operand", "tile"), [("C", (0, 0, 0)), ("A", (4, 0, 0)), ("A", (0, 0)), ("D", (0, -1, 0))])
def test_owner_refuses_what_does_not_exist(operand: str, tile: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"operand|inside the grid"):
        distgemm.get_schedule("ag+gemm", 4).owner(operand, tile)


def build(mesh: tuple[int, ...], *, chunks: int = 1) -> DistributedTileScheduler:
    return distgemm.get_schedule("ag+gemm", mesh=mesh, chunks=chunks)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "all_gather_1d_ring_a"},
        {"name": "new", "aliases": ("AllGather1D_TilingCD_RotatingA",)},
        {"name": "new", "default_for_pattern": "ag+gemm"},
        {"name": "ag+gemm"},
    ],
)
def test_double_registration_is_an_error(arguments: dict):
    before = distgemm.list_schedules()
    with pytest.raises(ValueError, match="is registered already"):
        register_schedule(**arguments)(build)
    assert distgemm.list_schedules() == before


def test_the_decorator_may_be_bare(monkeypatch: pytest.MonkeyPatch):
    for names in ("_entries", "_other_names", "_patterns"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))

    @register_schedule
    def bare(mesh: tuple[int, ...], *, chunks: int = 1) -> DistributedTileScheduler:
        return build(mesh, chunks=chunks)

    wanted = dataclasses.replace(distgemm.get_schedule("ag+gemm", 4, chunks=2), name="bare")
    assert distgemm.get_schedule("bare", 4, chunks=2) == wanted
    with pytest.raises(ValueError, match=r"name is a string .* got 3"):
        register_schedule(3)  # type: ignore[call-overload]


def test_a_builder_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @register_schedule("empty")
    def nothing(mesh: tuple[int, ...]) -> DistributedTileScheduler:
        return None  # type: ignore[return-value]

    @register_schedule("crashing")
    def crash(mesh: tuple[int, ...]) -> DistributedTileScheduler:
        return mesh[7]  # type: ignore[return-value]

    with pytest.raises(registry.BuilderError, match=r"schedule 'empty', .*nothing, returns a Dist.*returned None"):
        distgemm.get_schedule("empty", 4)
    with pytest.raises(registry.BuilderError, match=r"schedule 'crashing', .*crash, raised IndexError: tuple"):
        distgemm.get_schedule("crashing", 4)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ("_entries", "_other_names", "_patterns"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))


@pytest.mark.usefixtures("own_registry")
def test_a_builder_that_ignores_its_mesh_is_named():
    @register_schedule("for_three")
    def three(mesh: tuple[int, ...]) -> DistributedTileScheduler:
        return build((3,))

    made = distgemm.get_schedule("for_three", 3)
    assert (made.mesh, made.name) == ((3,), "for_three") and build((3,)).name != "for_three"
    wanted = r"'for_three', .*three, returns a scheduler for the mesh \(4,\); it returned one for \(3,\)"
    with pytest.raises(registry.BuilderError, match=wanted):
        distgemm.make_plan(distgemm.GemmProblem(8, 8, 8), "for_three", 4)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name is a string .* got ''"),
        ({"name": "new", "aliases": "abc"}, r"aliases is a tuple of names, such as \('name',\), got 'abc'"),
        ({"name": "new", "aliases": None}, "aliases is a tuple of names"),
        ({"name": "new", "aliases": (3,)}, "aliases is a tuple of names"),
        ({"name": "new", "aliases": ("",)}, "aliases is a tuple of names"),
        ({"name": "new", "aliases": ("a", "a")}, "schedule 'new' has the name 'a' twice"),
        ({"name": "new", "aliases": ("new",)}, "schedule 'new' has the name 'new' twice"),
        ({"name": "new", "default_for_pattern": ("ag+gemm",)}, "default_for_pattern is a string .* got"),
        ({"name": "new", "default_for_pattern": ""}, "default_for_pattern is a string .* got ''"),
        ({"name": "new", "mesh_rank": 0}, "mesh_rank is an integer from 1 to 8, got 0"),
        ({"name": "new", "mesh_rank": -1}, "mesh_rank is an integer from 1 to 8, got -1"),
        ({"name": "new", "mesh_rank": "2"}, "mesh_rank is an integer from 1 to 8, got '2'"),
        ({"name": "new", "mesh_rank": True}, "mesh_rank is an integer from 1 to 8, got True"),
    ],
)
def test_wrong_arguments_of_a_registration_are_refused(arguments: dict, message: str):
    before = registry._entries | registry._other_names | registry._patterns  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        register_schedule(**arguments)(build)
    assert registry._entries | registry._other_names | registry._patterns == before  # type: ignore[operator]


@pytest.mark.usefixtures("own_registry")
def test_a_builder_takes_a_mesh():
    for wrong in (lambda: None, lambda *, mesh: None, lambda *mesh: None):
        with pytest.raises(ValueError, match="schedule 'new': its function takes the mesh first"):
            register_schedule("new")(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="build is a function"):
        register_schedule("new")(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, 3, [], {}, b"ag+gemm", ("ag+gemm",)])
def test_a_name_is_a_string(name: object):
    with pytest.raises(ValueError, match="schedule is the name of one"):
        distgemm.get_schedule(name, 2)  # type: ignore[arg-type]


def test_an_option_that_no_schedule_can_have_is_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_2d: gather is a value such as 'direct', got \[\]"):
        distgemm.get_schedule("tensor_parallel_2d", mesh=(2, 2), gather=[])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ag+gemm", {"world_size": 2048, "chunks": 256}),
        ("gemm+rs", {"world_size": 4096, "chunks": 128}),
        ("gemm+ar", {"world_size": 1024}),
        ("all_gather_1d_pairwise_xor_a", {"world_size": 1024}),
        ("all_reduce_1d_one_shot_a", {"world_size": 1024, "chunks": 1024}),
        ("ag+gemm", {"world_size": 128, "chunks": 4096}),
        ("tensor_parallel_2d", {"mesh": (32, 64), "chunks": 256}),
    ],
)
def test_schedules_that_use_up_the_memory_are_refused_at_once(name: str, arguments: dict):
    start = time.perf_counter()
    message = r"\d+ ranks with \d+ tiles of (work|[ABD]) each; a (schedule|plan) .*at most 262144 in total.*: take few"
    with pytest.raises(ValueError, match=message):
        distgemm.make_plan(distgemm.GemmProblem(2**20, 2**12, 2**12), name, **arguments)
    assert time.perf_counter() - start < 5


def test_options_are_keyword_only_and_have_defaults():
    with pytest.raises(ValueError, match=r"option 'chunks' is keyword-only: build\(mesh, \*, chunks="):
        register_schedule("new")(lambda mesh, chunks=1: build(mesh, chunks=chunks))
    with pytest.raises(ValueError, match="option 'chunks' needs a default"):
        register_schedule("new")(lambda mesh, *, chunks: build(mesh, chunks=chunks))
    assert "new" not in distgemm.list_schedules()


def test_options_are_known_with_their_defaults():
    for name in ONE_D:
        assert schedule_options(name)["chunks"] == 1


def test_parts_that_do_not_fit_together_are_refused():
    good = distgemm.get_schedule("ag+gemm", 4)
    other = distgemm.get_schedule("ag+gemm", 3)
    with pytest.raises(ValueError, match="on the mesh"):
        DistributedTileScheduler("x", other.partition, good.work)
    with pytest.raises(ValueError, match="partitioned into a grid"):
        DistributedTileScheduler("x", good.partition, distgemm.get_schedule("ag+gemm", 4, chunks=2).work)
    with pytest.raises(ValueError, match="divides the 4 tiles of mode m, got 3"):
        DistributedTileScheduler("x", good.partition, good.work, chunks=TileCoord(3, 1, 1, 1))
    with pytest.raises(ValueError, match=r"chunks is a TileCoord\(m, n, k, l\) of integers >= 1, got 2"):
        DistributedTileScheduler("x", good.partition, good.work, chunks=2)  # type: ignore[arg-type]
    only_first = TVLayout((4,), (1,), ((Axis(4),), WHOLE, WHOLE))
    with pytest.raises(ValueError, match="without a holder"):
        DistributedTileScheduler("x", Partition(only_first, good.partition.b, good.partition.d), good.work)
    with pytest.raises(ValueError, match=r"a TVLayout of 4 modes, .* got 3"):
        DistributedTileScheduler("x", good.partition, good.partition.a)


def test_every_wait_names_the_rank_that_signals():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "gemm+rs", 4)
    waits = [op for op in plan.ops(2) if isinstance(op, Wait)]
    assert {(op.peer, op.flag.credit) for op in waits} == {(1, False), (3, True)}


def test_schedules_import_neither_torch_nor_cuda():
    code = (
        "import sys, distgemm\n"
        "distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), 'gemm+rs', 4).verify()\n"
        "assert not {'torch', 'cuda', 'cuda.bindings'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
