"""Schedules with an all-to-all: who holds what, bytes, unequal tokens and heads, and results against numpy."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distgemm
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES
from distgemm.plan.ops import Copy, Gemm, Reduce
from distgemm.plan.patterns import does_pattern
from distgemm.schedulers import list_patterns
from tests.unit.reference_data import Data

TO_OWNERS = ["all_to_all_1d_rotating_d", "all_to_all_1d_pairwise_xor_d"]
FROM_HOLDERS = ["all_to_all_1d_rotating_a", "all_to_all_1d_pairwise_xor_a"]


def shares(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    """A number of rows or columns for each rank. Not all are zero."""
    found = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any))
    return tuple(found)


def ranges(extents: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(extents, initial=0)))


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, distgemm.Plan, int]:
    """The pattern, a plan with unequal tokens and columns, and how many ranks hold each column of D."""
    pattern = draw(st.sampled_from(["gemm+a2a", "a2a+gemm"]))
    ranks = draw(st.integers(1, 8))
    names = TO_OWNERS if pattern == "gemm+a2a" else FROM_HOLDERS
    name = draw(st.sampled_from(names if ranks & (ranks - 1) == 0 else names[:1]))
    rows, columns = shares(draw, ranks), shares(draw, ranks)
    copies = 1
    options: dict[str, Any] = {
        "chunks": draw(st.integers(1, 3)),
        "chunk_mode": draw(st.sampled_from("mn" if pattern == "gemm+a2a" else "mk")),
    }
    if name == TO_OWNERS[0]:
        copies = draw(st.sampled_from([each for each in range(1, ranks + 1) if ranks % each == 0]))
        heads = shares(draw, ranks // copies)
        columns = tuple(width for width in heads for _ in range(copies))
        options["copies"] = copies
    other, batches = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    types = {"dtype": "float32", "partial_dtype": draw(st.sampled_from([None, "float64"]))}
    if pattern == "gemm+a2a":
        shape: dict[str, Any] = {"n": sum(columns) // copies, "k": other, "n_per_rank": columns}
    else:
        shape = {"n": other, "k": sum(columns), "k_per_rank": columns}
    problem = distgemm.GemmProblem(m=sum(rows), l=batches, m_per_rank=rows, **shape, **types)
    for key, values in (("mechanism", MECHANISMS), ("workspace", WORKSPACES), ("sync", SYNCS)):
        options[key] = draw(st.sampled_from(values))
    return pattern, distgemm.make_plan(problem, name, ranks, **options), copies


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 3))
def test_unequal_tokens_and_heads(case: tuple[str, distgemm.Plan, int], seed: int) -> None:
    """Shards are those of the arguments, each link carries one rank's rows of another's columns, and D is right."""
    pattern, plan, copies = case
    p = plan.problem
    assert p.m_per_rank is not None
    rows = ranges(p.m_per_rank)
    columns = p.n_per_rank if pattern == "gemm+a2a" else p.k_per_rank
    assert columns is not None
    before = ranges(columns[::copies])
    for rank in range(plan.world_size):
        own_rows, own_columns = rows[rank], before[rank // copies]
        wanted = {"B": ((0, p.n), (0, p.k))}
        if pattern == "gemm+a2a":
            wanted |= {"A": (own_rows, (0, p.k)), "D": ((0, p.m), own_columns)}
        else:
            wanted |= {"A": ((0, p.m), own_columns), "D": (own_rows, (0, p.n))}
        assert {operand: plan.box(operand, rank)[1:] for operand in wanted} == wanted
    sent: Counter[tuple[int, int]] = Counter()
    size = 8 if pattern == "gemm+a2a" and p.partial_dtype == "float64" else 4
    for tokens in range(plan.world_size):
        for heads in range(plan.world_size):
            link = (tokens, heads) if pattern == "gemm+a2a" else (heads, tokens)
            if tokens != heads:
                sent[link] += p.l * p.m_per_rank[tokens] * columns[heads] * size
    assert plan.link_bytes() == {link: size for link, size in sorted(sent.items()) if size}
    plan.verify()
    assert distgemm.Plan.from_json(plan.to_json()) == plan
    data = Data.draw(plan, seed)
    got = distgemm.run_reference(
        plan, data.shards("A"), data.shards("B"), data.shards("C"), alpha=2.0, beta=3.0, seed=seed, replays=2
    )
    data.assert_on_every_rank(got, 2.0, 3.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_order_of_the_work(ranks: int) -> None:
    """A rank's own tile needs no other rank: it is the last one of a scatter, and the first one of a gather."""
    for name in (*TO_OWNERS, *FROM_HOLDERS):
        if "xor" in name and ranks & (ranks - 1):
            continue
        mode = "n" if name in TO_OWNERS else "k"
        for chunks in (1, 3):
            schedule = distgemm.get_schedule(name, ranks, chunks=chunks)
            assert schedule.iterations == ranks * chunks
            for rank in range(ranks):
                for iteration in range(schedule.iterations):
                    turn, chunk = divmod(iteration, chunks)
                    if name in TO_OWNERS:
                        turn = (turn + 1) % ranks if "rotating" in name else ranks - 1 - turn
                    peer = rank ^ turn if "xor" in name else (rank + turn) % ranks
                    tile = schedule.work_tile(iteration, rank)
                    assert tile is not None
                    assert (tile.m, getattr(tile, mode)) == (rank * chunks + chunk, peer), (name, rank, iteration)


def test_fewer_heads_than_ranks() -> None:
    """Two heads of keys on four ranks: each rank gets the columns of one head from all ranks, and adds nothing."""
    problem = distgemm.GemmProblem(m=64, n=32, k=16, dtype="float32")
    plan = distgemm.make_plan(problem, "gemm+a2a", 4, copies=2)
    assert [plan.box("D", rank)[2] for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert set(plan.link_bytes().values()) == {16 * 16 * 4} and len(plan.link_bytes()) == 12
    gemms = [op for rank in range(4) for op in plan.ops(rank) if isinstance(op, Gemm)]
    assert len(gemms) == 8  # nothing is multiplied twice
    assert all(len(op.sources) == 1 for rank in range(4) for op in plan.ops(rank) if isinstance(op, Reduce))
    with pytest.raises(ValueError, match="copies is a divisor of the number of ranks, 4, got 3"):
        distgemm.get_schedule("gemm+a2a", 4, copies=3)


def test_patterns() -> None:
    problem = distgemm.GemmProblem(m=16, n=16, k=16)
    for name in distgemm.list_schedules():
        if name.startswith("all_to_all"):
            plan = distgemm.make_plan(problem, name, 4)
            found = [pattern for pattern in list_patterns() if does_pattern(plan, pattern)]
            assert found == ["gemm+a2a" if name in TO_OWNERS else "a2a+gemm"]
    pairs = distgemm.make_plan(problem, "gemm+a2a", 4, copies=2)
    assert [does_pattern(pairs, "gemm+a2a", copies) for copies in (1, 2, 4)] == [False, True, False]
    assert not does_pattern(pairs, "gemm+rs", 2)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ({"n": 8, "n_per_rank": (4, 3)}, "n_per_rank is a tuple of integers >= 0 whose sum is a multiple of n = 8"),
        ({"n": 8, "n_per_rank": (8, 0, 0)}, "has 3 entries for 2 ranks"),
        ({"n": 8, "n_per_rank": (8, 8)}, "makes 16 in all, the problem has n = 8"),
        ({"k_per_rank": (4, 4)}, "k_per_rank .* makes 4 in all, the problem has k = 8"),
    ],
)
def test_shares_that_do_not_fit(problem: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distgemm.make_plan(distgemm.GemmProblem(**{"m": 8, "n": 8, "k": 8} | problem), "gemm+a2a", 2)


def test_copies_have_the_same_columns() -> None:
    problem = distgemm.GemmProblem(8, 8, 8, n_per_rank=(4, 3, 4, 5))
    with pytest.raises(ValueError, match="rank 1 holds the same shard as a rank with another number"):
        distgemm.make_plan(problem, "gemm+a2a", 4, copies=2)


def test_each_chunk_is_copied_once() -> None:
    """With chunks, each chunk is copied once to each rank that needs it."""
    for name in (*TO_OWNERS, *FROM_HOLDERS):
        plan = distgemm.make_plan(distgemm.GemmProblem(m=48, n=48, k=48), name, 4, chunks=3)
        copies = Counter((op.dst.rank, op.tile) for rank in range(4) for op in plan.ops(rank) if isinstance(op, Copy))
        assert len(copies) == 4 * 3 * 3 and set(copies.values()) == {1}


@pytest.mark.parametrize("names", [TO_OWNERS, FROM_HOLDERS])
def test_across_hosts_and_inside(names: list[str]) -> None:
    """Tokens go to heads over both axes of a mesh. Each element crosses the network between hosts at most once."""
    for across, inside in product(names, names):
        for mesh, chunks in (((2, 2), 1), ((2, 4), 2), ((4, 2), 2)):
            problem = distgemm.GemmProblem(m=24, n=20, k=28, dtype="float32")
            options = {"across": across, "inside": inside, "chunks": chunks}
            plan = distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=mesh, **options)
            plan.verify()
            data = Data.draw(plan, 0)
            got = distgemm.run_reference(plan, data.shards("A"), data.shards("B"))
            data.assert_on_every_rank(got, 1.0, 0.0)
            ranks, local = plan.world_size, mesh[1]
            moved = problem.m * (problem.n if names is TO_OWNERS else problem.k) * 4
            links = plan.link_bytes().items()
            between = sum(size for (src, dst), size in links if src // local != dst // local)
            pairs = product(range(ranks), repeat=2)
            stays = sum(_overlap(plan, one, other, names) for one, other in pairs if one // local == other // local)
            assert between == moved - 4 * stays


def _overlap(plan: distgemm.Plan, one: int, other: int, names: list[str]) -> int:
    """Elements of one rank's rows in another rank's columns."""
    if names is TO_OWNERS:
        rows, columns = plan.box("A", one)[1], plan.box("D", other)[2]
    else:
        rows, columns = plan.box("D", one)[1], plan.box("A", other)[2]
    return (rows[1] - rows[0]) * (columns[1] - columns[0])
