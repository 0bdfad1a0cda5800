"""Pictures of schedules and plans, letter by letter for small ones."""

from __future__ import annotations

import re

import pytest

from distgemm import GemmProblem, get_schedule, list_schedules, make_plan
from distgemm.gemm.per_tile.order import TileOrder
from distgemm.layouts import Axis, Modulo, TVLayout
from distgemm.schedulers import WHOLE, Direct, DistributedTileScheduler, Partition, Route
from distgemm.schedulers.scheduler import MODES
from distgemm.viz.text import show_plan, show_schedule, show_tile_order

LEGEND = """\
[r]: r holds the tile of A or B at the start, owns the tile of D at the end
r:i: rank r reads the tile of A or B, or adds to the tile of D, in iteration i; *: in all iterations"""


def mesh_2d(mesh: tuple[int, ...], batches: int = 1) -> DistributedTileScheduler:
    """A is gathered along the second mesh axis, B along the first; D does not move."""
    p, q = mesh
    m = (Axis(q, rank=(0, 1), value=(1, 0, 0), maps=(Modulo(q),)), Axis(p, rank=(1, 0)))
    n = (Axis(p, rank=(1, 0), value=(0, 1, 0), maps=(Modulo(p),)), Axis(q, rank=(0, 1)))
    m_all = (Axis(q, value=(1, 0, 0)), Axis(p, rank=(1, 0)))
    n_all = (Axis(p, value=(0, 1, 0)), Axis(q, rank=(0, 1)))
    own_m, own_n = (Axis(q, rank=(0, 1)), Axis(p, rank=(1, 0))), (Axis(p, rank=(1, 0)), Axis(q, rank=(0, 1)))
    batch, values = (Axis(batches, value=(0, 0, 1)),), (q, p, batches)
    own_batch = (Axis(batches, value=1),)
    partition = Partition(
        a=TVLayout(mesh, (batches,), (own_m, WHOLE, own_batch)),
        b=TVLayout(mesh, (batches,), (own_n, WHOLE, own_batch)),
        d=TVLayout(mesh, values, (m_all, n_all, batch)),
    )
    return DistributedTileScheduler(
        "mesh_2d", partition, TVLayout(mesh, values, (m, n, WHOLE, batch)), Route(a=Direct(), b=Direct())
    )


def test_gather_of_a() -> None:
    assert show_schedule(get_schedule("all_gather_1d_tiling_cd_rotating_a", world_size=3)) == (
        """\
all_gather_1d_tiling_cd_rotating_a: 3 ranks, 3 iterations, work tiles m 3, n 3, k 1, l 1
routes: A direct; B stays; D stays

work (m, n, k): rows are ranks, columns iterations
            0      1      2
rank 0  0,0,0  1,0,0  2,0,0
rank 1  1,1,0  2,1,0  0,1,0
rank 2  2,2,0  0,2,0  1,2,0

A (m, k)
      k 0
    |-----------------|
m 0 | [0] 0:0 2:1 1:2 |
m 1 | [1] 1:0 0:1 2:2 |
m 2 | [2] 2:0 1:1 0:2 |
    |-----------------|

B (n, k)
      k 0
    |---------|
n 0 | [0] 0:* |
n 1 | [1] 1:* |
n 2 | [2] 2:* |
    |---------|

D (m, n)
      n 0       n 1       n 2
    |---------|---------|---------|
m 0 | [0] 0:0 | [1] 1:2 | [2] 2:1 |
m 1 | [0] 0:1 | [1] 1:0 | [2] 2:2 |
m 2 | [0] 0:2 | [1] 1:1 | [2] 2:0 |
    |---------|---------|---------|

"""
        + LEGEND
    )


def test_scatter_of_d() -> None:
    """The illustration in CUTLASS's header for ReduceScatter1D_TilingA_RotatingC: A's iterations by (m, k)."""
    text = show_schedule(get_schedule("ReduceScatter1D_TilingA_RotatingC", world_size=4))
    assert "routes: A stays; B stays; D chain (each rank adds what it receives)" in text
    assert (
        """\
A (m, k)
      k 0       k 1       k 2       k 3
    |---------|---------|---------|---------|
m 0 | [0] 0:3 | [1] 1:0 | [2] 2:1 | [3] 3:2 |
m 1 | [0] 0:2 | [1] 1:3 | [2] 2:0 | [3] 3:1 |
m 2 | [0] 0:1 | [1] 1:2 | [2] 2:3 | [3] 3:0 |
m 3 | [0] 0:0 | [1] 1:1 | [2] 2:2 | [3] 3:3 |
    |---------|---------|---------|---------|

B (n, k)
      k 0       k 1       k 2       k 3
    |---------|---------|---------|---------|
n 0 | [0] 0:* | [1] 1:* | [2] 2:* | [3] 3:* |
    |---------|---------|---------|---------|

D (m, n)
      n 0
    |---------------------|
m 0 | [0] 1:0 2:1 3:2 0:3 |
m 1 | [1] 2:0 3:1 0:2 1:3 |
m 2 | [2] 3:0 0:1 1:2 2:3 |
m 3 | [3] 0:0 1:1 2:2 3:3 |
    |---------------------|
"""
        in text
    )


def test_final_add() -> None:
    """The text says where the owner of a tile adds the partial sums that it receives."""
    for name, said in (
        (
            "reduce_scatter_1d_tiling_a_rotating_c",
            "D chain (each rank adds what it receives, the last one in a kernel of its own)",
        ),
        ("all_reduce_1d_tiling_a_rotating_c", "in a kernel of its own), final copies direct"),
    ):
        assert said in show_schedule(get_schedule(name, world_size=4, final_add="kernel"))
        assert "kernel of its own" not in show_schedule(get_schedule(name, world_size=4))
    assert "D pairwise (one final sum on every owner)\n" in show_schedule(get_schedule("all_reduce_1d_one_shot_a", 4))
    for final_add, said in (
        ("epilogue", "D pairwise (added in the epilogue of the reducer's last GEMM)"),
        ("kernel", "(one final sum)"),
    ):
        assert said in show_schedule(get_schedule("reduce_scatter_1d_pairwise_a", world_size=4, final_add=final_add))


def test_chunks() -> None:
    text = show_schedule(get_schedule("reduce_scatter_1d_pairwise_a", world_size=2, chunks=2))
    assert "routes: A stays; B stays; D pairwise (one final sum)" in text
    assert (
        """\
A (m, k)
      k 0       k 1
    |---------|---------|
m 0 | [0] 0:1 | [1] 1:0 |
m 1 | [0] 0:3 | [1] 1:2 |
m 2 | [0] 0:0 | [1] 1:1 |
m 3 | [0] 0:2 | [1] 1:3 |
    |---------|---------|
"""
        in text
    )


def test_mesh() -> None:
    text = show_schedule(mesh_2d((2, 2)))
    assert text.startswith("mesh_2d: 4 ranks as 2x2, 4 iterations, work tiles m 4, n 4, k 1, l 1\n")
    assert "routes: A direct; B direct; D stays" in text
    assert (
        """\
A (m, k)
      k 0
    |-----------------|
m 0 | [0] 0:0,2 1:1,3 |
m 1 | [1] 1:0,2 0:1,3 |
m 2 | [2] 2:0,2 3:1,3 |
m 3 | [3] 3:0,2 2:1,3 |
    |-----------------|
"""
        in text
    )


def test_batches_have_a_grid_each() -> None:
    text = show_schedule(mesh_2d((1, 2), batches=2))
    assert [line for line in text.splitlines() if re.match(r"[ABD] \(", line)] == [
        "A (m, k), l 0",
        "A (m, k), l 1",
        "B (n, k), l 0",
        "B (n, k), l 1",
        "D (m, n), l 0",
        "D (m, n), l 1",
    ]
    assert "work (m, n, k, l): rows" in text
    assert "0,0,0,1" in text


def test_one_rank_is_not_all_ranks() -> None:
    text = show_schedule(get_schedule("gemm+rs", world_size=1))
    assert text.count("0 | [0] 0:0 |") == 3
    assert "routes: A stays; B stays; D stays" in text


@pytest.mark.parametrize(("runs", "first", "second"), [(2, "0,1", "2,3"), (3, "0-2", "3-5")])
def test_runs_of_iterations(runs: int, first: str, second: str) -> None:
    mesh, values = (1,), (runs, 2)
    m, n = (Axis(2, value=(0, 1)),), (Axis(runs, value=(1, 0)),)
    partition = Partition(
        a=TVLayout(mesh, values, (m, WHOLE, WHOLE)),
        b=TVLayout(mesh, values, (n, WHOLE, WHOLE)),
        d=TVLayout(mesh, values, (m, n, WHOLE)),
    )
    text = show_schedule(DistributedTileScheduler("runs", partition, TVLayout(mesh, values, (m, n, WHOLE, WHOLE))))
    assert re.search(rf"m 0 \| \[0\] 0:{first} +\|\nm 1 \| \[0\] 0:{second} +\|", text)
    assert f"n 1 | [0] 0:1,{runs + 1} |" in text


def test_idle_ranks_and_several_owners() -> None:
    """Rank 1 idles in iteration 1, and both ranks own D at the end."""
    mesh = (2,)
    partition = Partition(
        a=TVLayout(mesh, (3,), ((Axis(3, value=1),), WHOLE, WHOLE)),
        b=TVLayout(mesh, (1,), (WHOLE, WHOLE, WHOLE)),
        d=TVLayout(mesh, (3,), ((Axis(3, value=1),), WHOLE, WHOLE)),
    )
    work = TVLayout(mesh, (2,), ((Axis(3, rank=2, value=1),), WHOLE, WHOLE, WHOLE))
    text = show_schedule(DistributedTileScheduler("idle", partition, work))
    assert "columns iterations; -: idle" in text
    assert re.search(r"^rank 1 +2,0,0 +-$", text, re.MULTILINE)
    assert "D stays, final copies direct" in text
    assert "m 2 | [all] 1:0 |" in text


@pytest.mark.parametrize("name", list_schedules())
@pytest.mark.parametrize("chunks", [1, 2])
def test_cells_are_the_schedule(name: str, chunks: int) -> None:
    """Every cell of every grid, read back, is what the schedule says."""
    try:
        scheduler = get_schedule(name, world_size=4, chunks=chunks)
    except ValueError:
        mesh = (2, 2) if "2d" in name else (2, 2, 1)
        scheduler = get_schedule(name, mesh=mesh, **({"chunks": chunks} if chunks > 1 else {}))
    text = show_schedule(scheduler)
    for operand, modes in MODES.items():
        (block,) = [block for block in text.split("\n\n") if block.startswith(f"{operand} (")]
        grid: list[list[list[str]]] = []
        for line in block.splitlines():
            cells = [cell.split() for cell in line.split("|")[1:-1]]
            if line.startswith(f"{modes[0]} "):
                grid.append(cells)
            elif cells and not line.strip().startswith("|-"):
                grid[-1] = [above + below for above, below in zip(grid[-1], cells, strict=True)]
        rows, columns, _ = (getattr(scheduler.grid, mode) for mode in modes)
        assert (len(grid), len(grid[0])) == (rows, columns)
        for row in range(rows):
            for column in range(columns):
                owner, *uses = grid[row][column]
                ranks = scheduler.owner(operand, (row, column, 0))
                assert owner == f"[{'all' if len(ranks) == 4 else ','.join(map(str, ranks))}]"
                found = {(int(use.split(":")[0]), use.split(":")[1]) for use in uses}
                wanted: dict[int, list[int]] = {}
                for rank in range(4):
                    for iteration in range(scheduler.iterations):
                        tile = scheduler.work_tile(iteration, rank)
                        if tile and (getattr(tile, modes[0]), getattr(tile, modes[1])) == (row, column):
                            wanted.setdefault(rank, []).append(iteration)
                assert {rank for rank, _ in found} == set(wanted)
                for rank, when in found:
                    spans = [part.split("-") for part in when.replace("*", f"0-{scheduler.iterations - 1}").split(",")]
                    assert wanted[rank] == [i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)]


def test_a_grid_of_16_by_16_is_whole_and_aligned() -> None:
    text = show_schedule(get_schedule("gemm+rs", world_size=16))
    assert "..." not in text
    (block,) = [block for block in text.split("\n\n") if block.startswith("A (")]
    lines = block.splitlines()[2:]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) < 150
    assert lines[1].split("|")[1:3] == [" [0]   ", " [1]   "]
    assert lines[2].split("|")[1:3] == [" 0:15  ", " 1:0   "]


def test_larger_ones_say_what_they_leave_out() -> None:
    text = show_schedule(get_schedule("gemm+rs", world_size=20, chunks=2))
    assert "... 16 of 20 ranks and 16 of 40 iterations shown, 544 of 800 cells left out" in text
    assert "... 16 of 40 rows (m) and 16 of 20 columns (k) shown, 544 of 800 cells left out" in text
    assert "... 16 of 20 columns (k) shown, 4 of 20 cells left out" in text
    assert "+4 more" in text
    assert "m 16" not in text and "rank 16 " not in text
    assert "..." not in show_schedule(get_schedule("gemm+rs", world_size=20, chunks=2), limit=40)
    few = show_schedule(mesh_2d((1, 1), batches=3), limit=2)
    assert "... 2 of 3 grids of A (l) shown" in few


def test_limits_are_checked() -> None:
    scheduler = get_schedule("ag+gemm", world_size=2)
    with pytest.raises(ValueError, match="limit is an integer >= 1, got 0"):
        show_schedule(scheduler, limit=0)
    with pytest.raises(ValueError, match="limit is an integer >= 1, got 0"):
        show_plan(make_plan(GemmProblem(4, 4, 4), scheduler), limit=0)


# --- plans ----------------------------------------------------------------------------------------------


def test_plan() -> None:
    plan = make_plan(GemmProblem(8, 16, 16, m_per_rank=(3, 0, 5)), "ag+gemm", 3)
    assert (
        show_plan(plan).split("\n\nops ")[0]
        == """\
all_gather_1d_tiling_cd_rotating_a: 3 ranks, 3 iterations, workspace full, sync credit, mechanism push
problem: m 8, n 16, k 16, l 1, m per rank 3,0,5; bfloat16 -> bfloat16, partial sums bfloat16
tiles: m 3 x 0..5, n 3 x 4..6, k 1 x 16, l 1 x 1

shards     A     B  D (and C)
rank 0  3x16  6x16        8x6
rank 1  0x16  6x16        8x6
rank 2  5x16  4x16        8x4

workspace  slots  bytes
rank 0         1  256 B  1 x 80 bfloat16
rank 1         2  512 B  1 x 80 bfloat16, 1 x 48 bfloat16
rank 2         1  256 B  1 x 48 bfloat16"""
    )
    assert """\
link bytes   to 0   to 1  to 2   sent
from 0          .   96 B  96 B  192 B
from 1          .      .     .    0 B
from 2      160 B  160 B     .  320 B
received    160 B  256 B  96 B  512 B

totals: """ in show_plan(plan)
    assert show_plan(plan).endswith(
        "4096 flop, 512 bytes over 4 links (160 on the busiest), at most 512 bytes of workspace on a rank"
    )


def test_plan_counts_are_the_plan() -> None:
    plan = make_plan(GemmProblem(64, 64, 64), "gemm+rs", 4)
    text = show_plan(plan)
    for rank in range(4):
        row = re.search(rf"^rank {rank} +(\d+(?: +\d+){{6}})$", text, re.MULTILINE)
        assert row is not None
        counts = list(map(int, row[1].split()))
        kinds = [op.kind for op in plan.ops(rank)]
        assert counts == [
            *(kinds.count(kind) for kind in ("Gemm", "Copy", "Reduce", "Signal", "Wait", "Barrier")),
            len(kinds),
        ]
    assert f"totals: {sum(len(plan.ops(rank)) for rank in range(4))} ops, {2 * 64**3} flop" in text


def test_plan_ops() -> None:
    plan = make_plan(GemmProblem(8, 8, 8), "reduce_scatter_1d_pairwise_a", 2)
    assert "ops of rank" not in show_plan(plan)
    one = show_plan(plan, rank=1).split("ops of rank 1\n")[1].splitlines()
    assert len(one) == len(plan.ops(1))
    for op, line in zip(plan.ops(1), one, strict=True):
        assert line.startswith(op.describe())
        assert line.endswith(f"; after {', '.join(f'#{dep}' for dep in op.deps)}") == bool(op.deps)
    (reduce,) = [line for line in one if "Reduce" in line]
    assert re.search(r": slot \d\[.*\]@1 \+ D\[.*\]@1 \+ beta \* C\[.*\]@1 -> D\[.*\]@1; after", reduce)
    every = show_plan(plan, ops=True)
    assert "ops of rank 0\n" in every and "\n".join(one) in every
    with pytest.raises(ValueError, match=r"rank is an integer from 0 to 1, got 2"):
        show_plan(plan, rank=2)


def test_plan_of_several_hosts() -> None:
    problem = GemmProblem(m=16, n=16, k=16)
    plan = make_plan(problem, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=2)
    text = show_plan(plan)
    assert "4 ranks as 2x2 on 2 hosts of 2, " in text
    assert re.search(r"^from 0 +\. +256 B +128 B\* +\. +384 B$", text, re.MULTILINE) and "\n* across hosts\n" in text
    assert "1536 bytes over 8 links, 512 of them across hosts over 4 links" in text
    one = show_plan(make_plan(problem, "tensor_parallel_2d_nested", mesh=(2, 2)))
    assert "host" not in one and "*" not in one


def test_plan_of_other_mechanisms() -> None:
    """Links lead from where a tile was to where it goes, whoever moves it; ops name the rank that they touch."""
    problem = GemmProblem(8, 8, 8)
    for name in ("ag+gemm", "gemm+rs"):
        plans = [make_plan(problem, name, 2, mechanism=mechanism) for mechanism in ("push", "pull", "store")]
        links = [re.search(r"^link bytes.*?\n\n", show_plan(plan), re.MULTILINE | re.DOTALL) for plan in plans]
        assert links[0] is not None and {found and found[0] for found in links} == {links[0][0]}
        for plan in plans:
            assert (
                show_plan(plan).splitlines()[0].endswith(f", workspace full, sync credit, mechanism {plan.mechanism}")
            )
    pulled = show_plan(make_plan(problem, "ag+gemm", 2, mechanism="pull"), rank=1)
    assert re.search(r"Copy #\d+ A\(1, 0, 0\) slot 0: A\[.*\]@1 -> slot 0\[.*\]@1", pulled)
    assert re.search(r"Copy #\d+ A\(0, 0, 0\) slot 1: slot 0\[.*\]@0 -> slot 1\[.*\]@1", pulled)
    stored = show_plan(make_plan(problem, "gemm+rs", 2, mechanism="store"), rank=1)
    assert re.search(r"Gemm #\d+ D\(0, 0, 1, 0\) slot 0: A\[.*\]@1 \* B\[.*\]@1 -> slot 0\[.*\]@0", stored)


def test_plan_without_movement_and_large_plans() -> None:
    alone = show_plan(make_plan(GemmProblem(8, 8, 8), "ag+gemm", 1))
    assert "link bytes: none, nothing moves between ranks" in alone
    large = show_plan(make_plan(GemmProblem(64, 64, 64), "ag+gemm", 18))
    assert large.count("... 16 of 18 ranks shown") == 3
    assert "... 16 of 18 senders and 16 of 18 receivers shown, 68 of 324 cells left out" in large


def test_order_of_tiles() -> None:
    order = TileOrder((1, 2), blocks=3, columns=2, group=2, lead=2, own_first=False)
    assert show_tile_order(order, 1) == (
        """\
rank 1 of 3: 3x2 clusters of tiles in each shard, 2 rows of clusters in turn; own tiles come 2 units later; \
shards in the order 2, 0

units of a shard, by row and column of clusters
         0  1
block 0  0  2
block 1  1  3
block 2  4  5

tickets of D; [t]: own shard, of rank 1
                     0     1
shard 0, block 0    1     5
shard 0, block 1    3     8
shard 0, block 2   11    14
shard 1, block 0   [6]  [12]
shard 1, block 1   [9]  [15]
shard 1, block 2  [16]  [17]
shard 2, block 0    0     4
shard 2, block 1    2     7
shard 2, block 2   10    13"""
    )
    gather = show_tile_order(TileOrder((1, 2), 3, 2, 1, 1, own_first=True), 2)
    assert "1 row of clusters in turn; own tiles come 1 unit earlier; shards in the order 0, 1\n" in gather
    assert "\nshard 2, block 0   [0]   [3]\n" in gather
    one = show_tile_order(TileOrder((), 1, 2, 1, 0, own_first=True), 1, ranks=3)
    assert (
        "rank 1 of 3: 1x2 clusters of tiles in each shard, 1 row of clusters in turn; its tiles are of one shard\n"
        in one
    )
    assert one.endswith("tickets of D\n         0  1\nblock 0  0  1")
    with pytest.raises(ValueError, match=r"rank is an integer from 0 to 2, got 3"):
        show_tile_order(order, 3)


def test_orders_of_many_tiles_are_cut() -> None:
    order = TileOrder((1, 2, 3), blocks=2, columns=30, group=2, lead=4, own_first=False)
    text = show_tile_order(order, limit=3, width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "... 3 of 30 columns shown, 54 of 60 cells left out" in text
    assert "... 3 of 8 rows and 3 of 30 columns shown, 231 of 240 cells left out" in text
