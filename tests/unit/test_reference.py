"""The reference runtime equals numpy, exactly, for every schedule and every order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import distgemm
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, Wait, accesses, box_extents
from distgemm.runtime.reference import RankMemories
from distgemm.schedulers import schedule_mesh_rank, schedule_options
from tests.unit.reference_data import Data

NAMES = distgemm.list_schedules()
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(size,) for size in range(1, 9)],
    2: [(2, 2), (2, 3), (4, 2), (1, 3)],
    3: [(2, 2, 2), (2, 1, 3), (1, 2, 3)],
}


def meshes(name: str) -> list[tuple[int, ...]]:
    if "xor" in name:
        return [(1,), (2,), (4,), (8,)]
    return MESHES[schedule_mesh_rank(name)]


def four(name: str) -> tuple[int, ...]:
    """A mesh of four ranks, or of eight in three dimensions."""
    return [(4,), (2, 2), (2, 2, 2)][schedule_mesh_rank(name) - 1]


def random_problem(rng: random.Random, **fixed: object) -> distgemm.GemmProblem:
    """Sides from 1 up, often smaller than the number of ranks."""
    m, n, k = (rng.choice([1, 2, 3, rng.randint(1, 12), rng.randint(1, 40)]) for _ in range(3))
    return distgemm.GemmProblem(
        m=m,
        n=n,
        k=k,
        l=rng.choice([1, 1, 1, 2, 3]),
        dtype="bfloat16",
        partial_dtype=rng.choice([None, "float32"]),
        **fixed,  # type: ignore[arg-type]
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("beta", [0.0, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_equals_numpy_on_ragged_shapes_in_every_sampled_order(name: str, beta: float):
    for mesh in meshes(name):
        rng = random.Random(f"{name}{mesh}{beta}")
        for draw in range(6):
            options = {"final_add": rng.choice(["epilogue", "kernel"])} if "final_add" in schedule_options(name) else {}
            plan = distgemm.make_plan(
                random_problem(rng),
                name,
                mesh=mesh,
                chunks=rng.choice([1, 1, 2, 3]),
                workspace=rng.choice(["full", "bounded"]),
                sync=rng.choice(["credit", "barrier"]),
                mechanism=rng.choice(["push", "pull", "store"]),
                **options,
            )
            data = Data.draw(plan, draw)
            got = distgemm.run_reference(
                plan,
                data.shards("A"),
                data.shards("B"),
                data.shards("C"),
                alpha=2.0,
                beta=beta,
                order=rng.choice(["random", "random", "issue"]),
                seed=draw,
                replays=rng.choice([1, 2, 3]),
            )
            data.assert_on_every_rank(got, 2.0, beta)


@pytest.mark.parametrize("name", [name for name in NAMES if "final_add" in schedule_options(name)])
def test_an_owners_own_product_waits_for_nothing_where_a_sum_follows(name: str):
    for workspace, partial in (("full", None), ("bounded", "float32")):
        problem = distgemm.GemmProblem(m=16, n=16, k=16, partial_dtype=partial)
        plan = distgemm.make_plan(problem, name, 4, chunks=2, final_add="kernel", workspace=workspace)
        plan.verify()
        for rank in range(4):
            ops = plan.ops(rank)
            own = [op for op in ops if isinstance(op, Gemm)][-2:]
            assert not any(op.sources for op in own)
            sums = [op for op in ops if isinstance(op, Reduce)]
            added = 4 if "pairwise" in name else 2
            assert [len(op.sources) for op in sums] == [added] * 2 and all(op.out.buffer == "D" for op in sums)
    with pytest.raises(ValueError, match="final_add is one of epilogue, kernel, got 'none'"):
        distgemm.make_plan(problem, name, 4, final_add="none")


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_pairwise_with_n_2n_and_4n_iterations_equals_the_product(size: int, chunks: int):
    problem = distgemm.GemmProblem(m=size * chunks * 2 + 1, n=6, k=size + 3)
    plan = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", size, chunks=chunks)
    assert plan.iterations == size * chunks
    plan.verify()
    data = Data.draw(plan, 0)
    data.assert_on_every_rank(distgemm.run_reference(plan, data.shards("A"), data.shards("B")), 1.0, 0.0)


@pytest.mark.parametrize("rows", [(3, 0, 5, 2), (0, 0, 10, 0), (10, 0, 0, 0), (1, 2, 3, 4)])
@pytest.mark.parametrize("name", [name for name in NAMES if "_1d_" in name])
def test_unequal_rows_per_rank(name: str, rows: tuple[int, ...]):
    problem = distgemm.GemmProblem(m=10, n=7, k=9, m_per_rank=rows)
    if "tiling_k" in name or "tiling_b" in name or "all_reduce" in name:
        with pytest.raises(ValueError, match="m_per_rank"):
            distgemm.make_plan(problem, name, 4)
        return
    for chunks in (1, 2):
        plan = distgemm.make_plan(problem, name, 4, chunks=chunks)
        plan.verify()
        sharded = (
            "D" if "reduce" in name or name in ("all_to_all_1d_rotating_a", "all_to_all_1d_pairwise_xor_a") else "A"
        )
        assert tuple(plan.shard_shape(sharded, rank)[0] for rank in range(4)) == rows
        data = Data.draw(plan, 1)
        got = distgemm.run_reference(plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=1.0, replays=2)
        data.assert_on_every_rank(got, 1.0, 1.0)


def test_many_orders_give_bitwise_the_same_result():
    """What is added in which order is the plan's, not the execution's."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        mesh = four(name)
        plan = distgemm.make_plan(distgemm.GemmProblem(m=9, n=10, k=11), name, mesh=mesh, chunks=2)
        ranks = range(plan.world_size)
        a, b = ([rng.standard_normal(plan.shard_shape(operand, rank)) for rank in ranks] for operand in "AB")
        first = distgemm.run_reference(plan, a, b, order="issue")
        for seed in range(8):
            again = distgemm.run_reference(plan, a, b, seed=seed, replays=1 + seed % 2)
            assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True)), (name, seed)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_between_the_rows_of_a_slot_is_neither_read_nor_written(name: str):
    scheduler = distgemm.get_schedule(name, mesh=four(name), chunks=2)
    m, n, k, _ = scheduler.grid
    problem = distgemm.GemmProblem(m=m * 3, n=n * 5, k=k * 7, l=2, dtype="bfloat16", partial_dtype="float32")
    plan = distgemm.make_plan(problem, scheduler)
    assert plan.padded_rows
    data = Data.draw(plan, 2)
    ranks = range(plan.world_size)
    # As run_reference, which holds NaN wherever nothing is written.
    inputs = {
        operand: [
            np.reshape(shard, box_extents(plan.box(operand, rank)))
            for rank, shard in zip(ranks, data.shards(operand), strict=True)
        ]
        for operand in "ABC"
    }
    machine = RankMemories(plan, inputs, alpha=2.0, beta=3.0, replays=1)
    machine.run(random.Random(0))
    data.assert_on_every_rank([d.reshape(plan.shard_shape("D", rank)) for rank, d in enumerate(machine.d)], 2.0, 3.0)
    views = [view for rank in ranks for op in plan.ops(rank) for view in (accesses(op)[1],) if view is not None]
    padding = 0
    for rank, slot, frame, pitch in {(v.rank, v.slot, v.frame, v.pitch) for v in views if v.buffer == "slot"}:
        batches, rows, columns = box_extents(frame)
        between = machine.slots[rank][slot][: batches * rows * pitch].reshape(batches, rows, pitch)[:, :, columns:]
        assert np.isnan(between).all()
        padding += between.size
    assert padding


def test_inputs_are_not_modified_and_c_is_not_read_without_beta():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), "gemm+rs", 4)
    data = Data.draw(plan, 0)
    given = [data.shards("A"), data.shards("B"), [np.full_like(c, np.nan) for c in data.shards("C")]]
    before = [[shard.copy() for shard in shards] for shards in given]
    data.assert_on_every_rank(distgemm.run_reference(plan, *given, replays=3), 1.0, 0.0)
    for old, new in zip(before, given, strict=True):
        for x, y in zip(old, new, strict=True):
            np.testing.assert_array_equal(x, y)


def outcome(plan: distgemm.Plan, data: Data) -> object:
    try:
        return distgemm.run_reference(
            plan, data.shards("A"), data.shards("B"), data.shards("C"), beta=1.0, order="issue"
        )
    except distgemm.PlanError as error:
        return error


@pytest.mark.sample(16)
@pytest.mark.parametrize("kind", [Copy, Gemm, Reduce])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_plans_ops_are_executed(name: str, kind: type[Op]):
    """Without any one of its ops, a plan gives another result, or stops."""
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), name, mesh=four(name))
    data = Data.draw(plan, 0)
    wanted = outcome(plan, data)
    assert isinstance(wanted, list)
    for rank in range(plan.world_size):
        ops = plan.ops(rank)
        for op in (op for op in ops if isinstance(op, kind)):
            rest = [other for other in ops if other is not op]
            if any(op.id in other.deps for other in rest):
                assert isinstance(outcome(plan.replace_ops(rank, rest), data), distgemm.PlanError)
            got = outcome(dropped(plan, op), data)
            same = isinstance(got, list) and all(np.array_equal(x, y) for x, y in zip(wanted, got, strict=True))
            assert not same, op.describe()


def dropped(plan: distgemm.Plan, op: Op) -> distgemm.Plan:
    """Without an op, and without waiting for it."""
    rest = [other for other in plan.ops(op.rank) if other is not op]
    rest = [replace(other, deps=tuple(dep for dep in other.deps if dep != op.id)) for other in rest]
    return plan.replace_ops(op.rank, rest)


def test_leftovers_of_an_earlier_replay_show_as_wrong_results():
    """A GEMM that does not wait reads NaN in the first replay and, later, another replay's numbers."""
    plan = distgemm.make_plan(distgemm.GemmProblem(m=4, n=4, k=4), "ag+gemm", 2)
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm) and op.a.buffer == "slot")
    # What follows it waits in its stead.
    deps = {op.id: op.deps + gemm.deps if gemm.id in op.deps else op.deps for op in plan.ops(0)} | {gemm.id: ()}
    broken = plan.replace_ops(0, [replace(op, deps=deps[op.id]) for op in plan.ops(0)])
    data = Data.draw(plan, 0)
    wanted = data.product(1.0, 0.0)[plan.shard("D", 0)]
    seen = set()
    for seed in range(50):
        got = distgemm.run_reference(broken, data.shards("A"), data.shards("B"), seed=seed, replays=2)[0]
        kind = "unwritten" if np.isnan(got).any() else "right" if np.array_equal(got, wanted) else "left over"
        seen.add(kind)
    assert seen == {"right", "left over"}


def test_a_signal_that_nobody_has_seen_yet_is_not_given_again():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=4, n=4, k=4), "ag+gemm", 2)
    credit = next(op for op in plan.ops(0) if isinstance(op, Wait) and op.flag.credit)
    data = Data.draw(plan, 0)
    with pytest.raises(distgemm.PlanError, match=r"rank 1 iteration 1: Signal .* a signal would be lost"):
        distgemm.run_reference(dropped(plan, credit), data.shards("A"), data.shards("B"))


def test_a_plan_that_blocks_says_which_ops_never_start():
    plan = distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), "gemm+rs", 2)
    signal = next(op for op in plan.ops(0) if op.kind == "Signal")
    broken = plan.replace_ops(0, [op for op in plan.ops(0) if op is not signal])
    data = Data.draw(plan, 0)
    with pytest.raises(distgemm.PlanError, match=r"deadlock.*rank 1 iteration \d+: Wait"):
        distgemm.run_reference(broken, data.shards("A"), data.shards("B"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "fastest"}, "order is one of random, issue, got 'fastest'"),
        ({"replays": 0}, "replays is an integer >= 1, got 0"),
        ({"beta": 1.0}, "needs c_shards"),
        ({"a_shards": []}, r"a_shards is a sequence of 2 arrays, the shard of A of each rank, got \[\]"),
        (
            {"a_shards": [np.zeros((4, 8)), np.zeros((8, 4))]},
            r"a_shards\[1\] is an array .* of shape \(4, 8\), got a ndarray of shape \(8, 4\)",
        ),
        (
            {"b_shards": [np.zeros((1, 4, 8))] * 2},
            r"b_shards\[0\] is an array .* of shape \(4, 8\), got a ndarray of shape \(1, 4, 8\)",
        ),
        (
            {"c_shards": [np.zeros((8, 3))] * 2},
            r"c_shards\[0\] is an array .* of shape \(8, 4\), got a ndarray of shape \(8, 3\)",
        ),
    ],
)
def test_bad_arguments_say_what_would_be_right(change: dict, message: str):
    plan = distgemm.make_plan(distgemm.GemmProblem(m=8, n=8, k=8), "ag+gemm", 2)
    shards = {"a_shards": [np.zeros((4, 8))] * 2, "b_shards": [np.zeros((4, 8))] * 2}
    with pytest.raises(ValueError, match=message):
        distgemm.run_reference(plan, **{**shards, **change})
