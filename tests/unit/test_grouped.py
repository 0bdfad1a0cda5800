"""Grouped GEMMs: one plan, proved once, for every assignment of rows to groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distgemm
from distgemm.plan.ops import Copy, Gemm
from distgemm.plan.plan import PlanError
from distgemm.runtime.checks import refuse_groups
from distgemm.schedulers import schedule_mesh_rank

MESHES: dict[int, tuple[int, ...]] = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}


def expected(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Row by row, as the definition says."""
    return np.stack([b[group] @ row for row, group in zip(a, groups, strict=True)])


@settings(max_examples=60)
@given(
    st.sampled_from(distgemm.list_schedules()),
    st.integers(2, 5),
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_every_assignment_is_right(name: str, groups: int, shape: tuple[int, int, int], chunks: int, seed: int) -> None:
    """Rows sorted by group within each rank's shard, as kernels need them, and in any order; with empty groups."""
    mesh = MESHES[schedule_mesh_rank(name)]
    problem = distgemm.GemmProblem(*shape, dtype="float32", groups=groups)
    plan = distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks)
    plan.verify()
    assert distgemm.Plan.from_json(plan.to_json()) == plan
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-8, 9, (problem.m, problem.k)), rng.integers(-8, 9, (groups, problem.n, problem.k))
    a_shards, b_shards = ([each[plan.shard(name, rank)] for rank in range(4)] for name, each in (("A", a), ("B", b)))
    assert all(shard.shape == plan.shard_shape("B", rank) for rank, shard in enumerate(b_shards))
    for at_most in (groups, 1):
        row_groups = rng.integers(0, at_most, problem.m)
        if seed % 2:
            for rows in {plan.box("A", rank)[1] for rank in range(4)}:
                row_groups[slice(*rows)].sort()
        wanted = expected(a, b, row_groups)
        got = distgemm.run_reference(plan, a_shards, b_shards, row_groups=row_groups, seed=seed, replays=2)
        for rank, shard in enumerate(got):
            np.testing.assert_array_equal(shard, wanted[plan.shard("D", rank)])


def test_what_moves() -> None:
    """A gather moves no more than without groups; weights stay where they are."""
    for pattern in ("ag+gemm", "gemm+rs", "gemm+ar"):
        one, eight = (
            distgemm.make_plan(distgemm.GemmProblem(64, 64, 64, groups=groups), pattern, 4) for groups in (1, 8)
        )
        assert one.link_bytes() == eight.link_bytes() and one.digest != eight.digest
        assert eight.box("B", 0)[0] == (0, 8) and eight.box("A", 0)[0] == eight.box("D", 0)[0] == (0, 1)
        assert [op.dst.box for op in one.ops(0) if isinstance(op, Copy)] == [
            op.dst.box for op in eight.ops(0) if isinstance(op, Copy)
        ]
    moved = [
        distgemm.make_plan(
            distgemm.GemmProblem(64, 64, 64, groups=groups), "all_gather_1d_tiling_cd_rotating_b", 4
        ).link_bytes()
        for groups in (1, 8)
    ]
    assert {link: 8 * size for link, size in moved[0].items()} == moved[1]


def test_a_gemm_that_reads_fewer_groups_is_refused() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64, groups=4), "ag+gemm", 2)
    ops = list(plan.ops(0))
    at = next(index for index, op in enumerate(ops) if isinstance(op, Gemm))
    gemm = ops[at]
    assert isinstance(gemm, Gemm)
    ops[at] = replace(gemm, b=gemm.b._replace(box=((0, 3), *gemm.b.box[1:])))
    with pytest.raises(PlanError, match="where its tile is"):
        plan.replace_ops(0, ops).verify()


@pytest.mark.parametrize(
    ("row_groups", "said"),
    [
        (None, "row_groups is 8 integers from 0 to 2"),
        ([0] * 7, "row_groups is 8 integers from 0 to 2"),
        ([0] * 7 + [3], "row_groups is 8 integers from 0 to 2"),
        ([0.0] * 8, "row_groups is 8 integers from 0 to 2"),
    ],
)
def test_wrong_groups(row_groups: Any, said: str) -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8, 4, 4, groups=3), "ag+gemm", 2)
    shards = [np.ones(plan.shard_shape("A", 0))] * 2, [np.ones(plan.shard_shape("B", 0))] * 2
    with pytest.raises(ValueError, match=said):
        distgemm.run_reference(plan, *shards, row_groups=row_groups)


def test_groups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="a grouped GEMM has neither batches nor a scaling, got l=2"):
        distgemm.GemmProblem(8, 8, 8, l=2, groups=2)
    with pytest.raises(ValueError, match="groups is an integer >= 1, got 0"):
        distgemm.GemmProblem(8, 8, 8, groups=0)
    with pytest.raises(ValueError, match=r"plans of grouped GEMMs can be made, proved, simulated"):
        refuse_groups(distgemm.GemmProblem(8, 8, 8, groups=2))
    plan = distgemm.make_plan(distgemm.GemmProblem(8, 4, 4), "ag+gemm", 2)
    with pytest.raises(ValueError, match="row_groups is None for a problem without groups"):
        distgemm.run_reference(plan, [np.ones((4, 4))] * 2, [np.ones((2, 4))] * 2, row_groups=[0] * 8)
