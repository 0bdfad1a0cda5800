"""Scales as operands of plans: what they are, what moves of them, and that plans with them are proved."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distgemm
from distgemm import GemmProblem, Plan, PlanError, make_plan
from distgemm.plan import derive
from distgemm.plan.ops import Copy, Gemm, box_size, link_of
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.resize import ResizedOps
from distgemm.plan.scaling import SCALINGS, OperandScaling, Scaling, read_scaling, scaling_name
from distgemm.schedulers import schedule_mesh_rank, schedule_options
from distgemm.tune.cache import key_of
from tests.unit.mutations import changed, effect, mutations
from tests.unit.reference_data import Data, Scales
from tests.unit.test_reference import meshes
from tests.unit.test_verify_interleavings import CONTRADICTIONS, SYNCHRONISED, small, verdict

GATHER, RING, SPLIT = (
    "all_gather_1d_tiling_cd_rotating_a",
    "all_gather_1d_ring_a",
    "all_gather_1d_bidirectional_split_a",
)
OTHERS = {
    "blocks of rows of both": Scaling(OperandScaling(2, 3), OperandScaling(4, 5)),
    "shards of A, blocks of B": Scaling(OperandScaling(None, 7, "shard"), OperandScaling(3, None, "shard")),
}
SMALL = {
    "rowwise": SCALINGS["rowwise"],
    "tensorwise-shard": SCALINGS["tensorwise-shard"],
    "blocks": Scaling(OperandScaling(1, 2), OperandScaling(2, 2)),
}


def problem(scaling: str | Scaling, m: int = 512, n: int = 256, k: int = 512, **more: Any) -> GemmProblem:
    dtype = "float4_e2m1fn_x2" if scaling == "nvfp4" else "float8_e4m3fn"
    return GemmProblem(m, n, k, **{"dtype": dtype, **more}, scaling=scaling)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of every schedule and scaling, on up to eight ranks, also of unequal and misaligned rows."""
    name = draw(st.sampled_from(distgemm.list_schedules()))
    scaling = draw(st.sampled_from([*SCALINGS, *OTHERS]))
    extents = [draw(st.one_of(st.integers(1, 40), st.sampled_from([128, 260, 384, 500]))) for _ in range(3)]
    chunks = draw(st.integers(1, 3))
    options = {"chunks": chunks} if "chunks" in schedule_options(name) else {}
    scheduler = distgemm.get_schedule(name, mesh=draw(st.sampled_from(meshes(name))), **options)
    rows = None
    if schedule_mesh_rank(name) == 1 and draw(st.booleans()):
        unit = read_scaling(OTHERS.get(scaling, scaling)).a.unit[0]
        sizes = st.integers(0, 3) if unit > 1 else st.integers(0, 40)
        rows = tuple(unit * draw(sizes) for _ in range(scheduler.world_size))
        extents[0] = sum(rows) or extents[0]
        rows = rows if sum(rows) else None
    made = problem(OTHERS.get(scaling, scaling), *extents, l=draw(st.sampled_from([1, 1, 2])), m_per_rank=rows)
    if scaling == "nvfp4":
        made = replace(made, dtype="float4_e2m1fn_x2", scaling=SCALINGS["nvfp4"])
    how = {
        "workspace": draw(st.sampled_from(derive.WORKSPACES)),
        "sync": draw(st.sampled_from(derive.SYNCS)),
        "mechanism": draw(st.sampled_from(derive.MECHANISMS)),
    }
    with contextlib.suppress(ValueError):  # these rows do not fit the schedule
        return make_plan(made, scheduler, **how)
    return make_plan(replace(made, m_per_rank=None), scheduler, **how)


def scale_copies(plan: Plan) -> list[Copy]:
    every = (op for ops in plan.rank_ops for op in ops)
    return [op for op in every if isinstance(op, Copy) and op.operand in ("SFA", "SFB")]


# --- plans ----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(plans())
def test_every_plan_with_scales_is_proved(plan: Plan) -> None:
    plan.verify()
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    # The bytes of scales come on top of those of the same plan without scales, of as many rows.
    moved = sum(box_size(op.dst.box) * DTYPE_BYTES[plan.dtype(op.dst)] for op in scale_copies(plan) if link_of(op))
    tiles = sum(
        box_size(op.dst.box) * DTYPE_BYTES[plan.dtype(op.dst)]
        for ops in plan.rank_ops
        for op in ops
        if isinstance(op, Copy) and op.operand in ("A", "B", "D") and link_of(op)
    )
    stored = sum(
        box_size(op.out.box) * DTYPE_BYTES[plan.dtype(op.out)]
        for ops in plan.rank_ops
        for op in ops
        if isinstance(op, Gemm) and link_of(op)
    )
    assert sum(plan.link_bytes().values()) == moved + tiles + stored


@pytest.mark.sample(6)
@pytest.mark.parametrize("scaling", ["tensorwise-shard", "rowwise", "blockwise"])
@pytest.mark.parametrize("name", [each for each in distgemm.list_schedules() if "gather" in each])
def test_scales_that_move_are_proved_in_all_ways(name: str, scaling: str) -> None:
    """Also where a rank passes on what it received, from slots that are used again."""
    for mechanism, (workspace, sync) in product(derive.MECHANISMS, SYNCHRONISED):
        how = {"workspace": workspace, "sync": sync, "mechanism": mechanism}
        plan = make_plan(problem(scaling, 1024, 512, 512), name, 4, chunks=2, **how)
        # Each rank has the scales of all rows, if they belong to all of k.
        assert bool(scale_copies(plan)) == ((name, scaling) != ("all_gather_1d_tiling_k_rotating_a", "rowwise"))
        plan.verify()


@settings(max_examples=25)
@given(plans(), st.integers(0, 99))
def test_the_reference_multiplies_each_element_by_its_scale(plan: Plan, seed: int) -> None:
    """Exactly: elements are small integers, and scales powers of two."""
    if plan.problem.dtype == "float4_e2m1fn_x2":
        return
    data, scales = Data.draw(plan, seed), Scales.draw(plan, seed)
    a, b = data.shards("A"), data.shards("B")
    shards = {f"scale_{name[-1].lower()}_shards": each for name, each in scales.shards.items()}
    got = distgemm.run_reference(plan, a, b, data.shards("C"), beta=2.0, seed=seed, replays=1 + seed % 2, **shards)
    data.a = data.a * scales.of_elements["A"].reshape(data.a.shape)
    data.b = data.b * scales.of_elements["B"].reshape(data.b.shape)
    data.assert_on_every_rank(got, 1.0, 2.0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mechanism", derive.MECHANISMS)
@pytest.mark.parametrize(
    ("scaling", "scale_bytes"),
    [
        ("tensorwise", lambda rows, k, chunks: 0),
        ("tensorwise-shard", lambda rows, k, chunks: 4 * chunks),  # with each chunk
        ("rowwise", lambda rows, k, chunks: 4 * rows),
        ("rowwise-shard", lambda rows, k, chunks: 4 * rows),
        ("blockwise", lambda rows, k, chunks: 4 * rows * (k // 128)),
        ("mxfp8", lambda rows, k, chunks: rows * (k // 32)),
    ],
)
def test_a_quantised_gather_moves_half_of_bf16_and_the_scales(scaling: str, scale_bytes: Any, mechanism: str) -> None:
    """All scales of A, from each rank to each other one; on the ring and by the bidirectional split too."""
    for name, ranks, chunks in product((GATHER, RING, SPLIT), (2, 4, 8), (1, 2)):
        m, k = 256 * 8, 1024
        how = {"chunks": chunks, "mechanism": mechanism}
        scaled = make_plan(problem(scaling, m, 1024, k), name, ranks, **how).link_bytes()
        bf16 = make_plan(GemmProblem(m, 1024, k), name, ranks, **how).link_bytes()
        shard = scale_bytes(m // ranks, k, chunks)
        assert sum(scaled.values()) == sum(bf16.values()) / 2 + (ranks - 1) * ranks * shard
        if name == GATHER:
            assert scaled == {link: size / 2 + shard for link, size in bf16.items()}


def test_sums_move_without_scales() -> None:
    """The scales of A and B have been applied to them."""
    for scaling in RUNNABLE:
        plan = make_plan(problem(scaling, 1024, 256, 1024), "gemm+rs", 4)
        assert not scale_copies(plan)
        assert plan.link_bytes() == make_plan(GemmProblem(1024, 256, 1024), "gemm+rs", 4).link_bytes()


RUNNABLE = [name for name in SCALINGS if name != "nvfp4"]


def test_scales_move_before_the_signal_of_their_tile() -> None:
    """No flag of their own, by the same hops; and those that all ranks have do not move."""
    for name in (GATHER, RING, SPLIT):
        with_scales, without = (make_plan(problem(each), name, 4) for each in ("rowwise", "tensorwise"))
        kinds = [
            [sum(op.kind == kind for op in plan.ops(0)) for kind in ("Signal", "Wait", "Gemm")]
            for plan in (with_scales, without)
        ]
        assert kinds[0] == kinds[1] and not scale_copies(without)
        copies = [op for op in with_scales.ops(0) if isinstance(op, Copy)]
        moved = {(op.operand[-1], op.tile, op.dst.rank, op.src.box[1], op.deps) for op in copies}
        assert len(copies) == 2 * len(moved)  # each tile and its scales


# --- proofs ---------------------------------------------------------------------------------------------

GATHERS = [SPLIT, "all_gather_1d_tiling_cd_rotating_b", "all_gather_1d_tiling_k_rotating_a"]
HOW = [(mechanism, *how) for mechanism in ("push", "pull") for how in SYNCHRONISED]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("mechanism", "workspace", "sync"), HOW)
@pytest.mark.parametrize("scaling", SMALL)
@pytest.mark.parametrize("name", GATHERS)
def test_a_mutation_is_caught_exactly_if_it_changes_order_or_data_flow(
    name: str, scaling: str, mechanism: str, workspace: str, sync: str
) -> None:
    """Equivalence is brute force, element by element, as it is for plans without scales."""
    check_mutations(name, 2, scaling, mechanism, workspace, sync)


@pytest.mark.sample(0)
@pytest.mark.parametrize(("mechanism", "workspace", "sync"), HOW)
@pytest.mark.parametrize("scaling", SMALL)
def test_a_mutation_of_scales_that_are_passed_on_is_caught(
    scaling: str, mechanism: str, workspace: str, sync: str
) -> None:
    check_mutations(RING, 3, scaling, mechanism, workspace, sync)


def check_mutations(name: str, ranks: int, scaling: str, mechanism: str, workspace: str, sync: str) -> None:
    plan = small(name, (ranks,), 1, workspace, sync, mechanism, SMALL[scaling])
    before = effect(plan)
    assert before.fault is None
    refused = set()
    for mutation in mutations(plan):
        said = verdict(mutation.plan)
        what = f"{mutation.kind}: {mutation.what}: {said}"
        after = effect(mutation.plan)
        # Scales that all parts of a tile share wait for the readers of all parts in a slot for peers to pull.
        slack = mechanism == "pull" and mutation.kind == "drop a dependency" and " SF" in mutation.what
        if changed(before, after):
            assert said is not None or (slack and after.fault is None), what
        elif said is not None:
            assert any(part in said for part in CONTRADICTIONS), what
        if said is not None and " SF" in mutation.what:
            refused.add(mutation.kind)
    assert refused >= ({"drop an op, spliced", "drop a dependency"} if scale_copies(plan) else set())


def test_what_is_wrong_with_scales_is_named() -> None:
    plan = make_plan(problem("rowwise"), GATHER, 2)
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm) and op.a.buffer == "slot")
    own = next(op for op in plan.ops(0) if isinstance(op, Gemm) and op.a.buffer == "A")
    assert gemm.scale_a is not None and own.scale_a is not None

    def said(**fields: Any) -> str:
        ops = [replace(op, **fields) if op is gemm else op for op in plan.ops(0)]
        return str(verdict(plan.replace_ops(0, ops)))

    assert "as the scales of its tile of A, which are ((0, 1), (256, 512), (0, 1))" in said(scale_a=own.scale_a)
    assert "reads no scales of A where the problem has the scaling" in said(scale_a=None)
    assert "elements apart" in said(scale_a=gemm.scale_a._replace(pitch=0))
    assert "its scales" not in said(scale_b=own.scale_b)
    unscaled = make_plan(GemmProblem(512, 256, 512, dtype="float8_e4m3fn"), GATHER, 2)
    gemm, plan = next(op for op in unscaled.ops(0) if isinstance(op, Gemm)), unscaled
    assert "reads the scales" in said(scale_a=own.scale_a._replace(buffer="A"))
    for shards in ((plan.shards[0], plan.shards[1]), None):
        scaled = make_plan(problem("rowwise"), GATHER, 2)
        with pytest.raises(PlanError, match=r"of SFA is not that of|scale_shards is a tuple of 2"):
            replace(scaled, scale_shards=shards).verify()
        with pytest.raises(PlanError, match="scale_shards is None for a problem without scaling"):
            replace(unscaled, scale_shards=scaled.scale_shards).verify()
    blocks = make_plan(problem("blockwise"), "gemm+rs", 2)
    m, n, _, batches = blocks.edges
    with pytest.raises(PlanError, match=r"mode k are multiples of 128, or 512, so that they divide no block"):
        replace(blocks, edges=(m, n, (0, 200, 512), batches)).verify()


# --- extents --------------------------------------------------------------------------------------------


def test_bounds_of_tiles_divide_no_block() -> None:
    plan = make_plan(problem("blockwise", 512, 300, 1000), "gemm+rs", 3)
    assert plan.edges[2] == (0, 384, 768, 1000)  # as torch.chunk divides the 8 blocks
    assert [plan.shard_shape("SFA", rank) for rank in range(3)] == [(512, 3), (512, 3), (512, 2)]
    assert [plan.shard_shape("SFB", rank) for rank in range(3)] == [(3, 3), (3, 3), (3, 2)]
    chunked = make_plan(problem("mxfp8", 1000, 384, 256), GATHER, 2, chunks=3)
    assert chunked.edges[0] == (0, 256, 512, 512, 768, 1000, 1000)
    assert chunked.shard_shape("SFA", 1) == (4, 2 * 512)
    for low, high in pairwise(chunked.edges[0]):
        assert low % 128 == 0 or low == 1000 == high


def test_rows_that_divide_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shards are multiples of 128, except the last one; such as \[128, 272\]"):
        make_plan(problem("mxfp8", 400, m_per_rank=(100, 300)), GATHER, 2)
    make_plan(problem("mxfp8", 400, m_per_rank=(128, 272)), GATHER, 2).verify()
    make_plan(problem("blockwise", 400, m_per_rank=(101, 299)), GATHER, 2).verify()  # each row has scales of its own


@pytest.mark.sample(1)
@pytest.mark.parametrize("scaling", [*RUNNABLE, *OTHERS])
def test_a_plan_of_other_rows_is_the_derived_plan(scaling: str) -> None:
    rng = random.Random(scaling)
    derive.forget_plans()
    resized = 0
    for name, mechanism in product((GATHER, RING, SPLIT, "gemm+rs", "gemm+ar"), derive.MECHANISMS):
        scheduler = distgemm.get_schedule(name, 4, **({"chunks": 2} if "chunks" in schedule_options(name) else {}))
        workspace, sync = rng.choice(SYNCHRONISED)
        for m in (1000, 1, 5, 2000, 64, 3):
            made = problem(OTHERS.get(scaling, scaling), m, 64, 512)
            plan = make_plan(made, scheduler, workspace=workspace, sync=sync, mechanism=mechanism)  # type: ignore[arg-type]
            derived = derive._derive(made, scheduler, workspace, sync, mechanism, 2).plan  # type: ignore[arg-type]
            assert plan.digest == derived.digest and plan == derived
            assert plan.sizes == derived.sizes and plan.to_json() == derived.to_json()
            resized += isinstance(plan.rank_ops, ResizedOps)
    assert resized or read_scaling(OTHERS.get(scaling, scaling)).a.unit[0] > 1


# --- problems and scalings ------------------------------------------------------------------------------

DIGESTS = [
    ("ag+gemm", {}, 520, "6c02dcd79b8d7a7b"),
    ("ag+gemm", {"workspace": "bounded", "mechanism": "pull", "chunks": 2}, 520, "a4c9374937af58a7"),
    ("ag+gemm", {"mechanism": "store", "chunks": 2, "sync": "barrier"}, 7, "6972493cc1493d52"),
    ("gemm+rs", {}, 7, "afe1e00a1449aaf5"),
    ("gemm+rs", {"mechanism": "store", "chunks": 2, "sync": "barrier"}, 520, "493fbbfcc9bb93ae"),
    ("gemm+ar", {}, 520, "8571b7bb523522ff"),
    ("gemm+ar", {"workspace": "bounded", "mechanism": "pull", "chunks": 2}, 7, "e70e9e5d9b88ef8f"),
]
"""Beginnings of digests, as they were before there were scales; of "store", with slots aligned as all others are since
then. 7 rows are of fp8."""


@pytest.mark.parametrize(("pattern", "options", "m", "digest"), DIGESTS)
def test_plans_without_scales_have_the_digests_that_they_had(pattern: str, options: Any, m: int, digest: str) -> None:
    more = {"dtype": "float8_e4m3fn", "partial_dtype": "float32"} if m == 7 else {}
    assert make_plan(GemmProblem(m, 264, 400, **more), pattern, 4, **options).digest.startswith(digest)


def test_digests_differ_by_scaling() -> None:
    plans = [
        make_plan(problem(each, 32, 32, 32), "gemm+rs", 1) for each in ("tensorwise", "tensorwise-shard", "rowwise")
    ]
    assert len({plan.digest for plan in plans}) == len({plan.fingerprint for plan in plans}) == 3


def test_equal_problems_are_one_key() -> None:
    named, made = problem("blockwise"), problem(Scaling(OperandScaling(1, 128, "shard"), OperandScaling(128, 128)))
    assert named == made and hash(named) == hash(made)
    assert problem("rowwise") != problem("rowwise-shard")
    assert GemmProblem(1, 1, 1, dtype="float8_e5m2", b_dtype="float8_e5m2") == GemmProblem(1, 1, 1, dtype="float8_e5m2")
    mixed = GemmProblem(1, 1, 1, dtype="float8_e5m2", b_dtype="float8_e4m3fn", scaling="rowwise")  # type: ignore[arg-type]
    assert [mixed.operand_dtype(each) for each in ("A", "B", "D", "SFA")] == [
        "float8_e5m2", "float8_e4m3fn", "bfloat16", "float32"]  # fmt: skip
    assert {scaling_name(each) for each in SCALINGS.values()} == set(SCALINGS)
    assert scaling_name(Scaling(OperandScaling(2, None), OperandScaling(1, 1))) == "2xall and 1x1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling": "rows"}, "scaling is a Scaling or one of tensorwise, .* got 'rows'"),
        ({"scaling": 1}, "scaling is a Scaling"),
        (
            {"scaling": "rowwise", "dtype": "bfloat16"},
            "dtype is one of float8_e4m3fn, .* with a scaling, got 'bfloat16'",
        ),
        ({"scaling": "nvfp4"}, "dtype is float4_e2m1fn_x2 with scales of float8_e4m3fn, got 'float8_e4m3fn'"),
        ({"b_dtype": "bfloat16"}, "b_dtype is a float8 type as dtype is, got 'bfloat16'"),
        ({"dtype": "bfloat16", "b_dtype": "float16"}, "b_dtype is 'bfloat16', the dtype of A, got 'float16'"),
        ({"b_dtype": "e4m3"}, "b_dtype is one of"),
        ({"out_dtype": "float8_e5m2"}, "out_dtype is one of"),
        ({"dtype": "float8_e8m0fnu"}, "dtype is one of"),
    ],
)
def test_wrong_problems_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GemmProblem(8, 8, 8, **{"dtype": "float8_e4m3fn", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "rows of a scaling is an integer >= 1, got 0"),
        ((1, "x"), "columns of a scaling is an integer >= 1, got 'x'"),
        ((1, 1, "rank"), "scope of a scaling is one of global, shard, got 'rank'"),
        ((1, 1, "global", "bfloat16"), "dtype of a scaling is one of float32, .* got 'bfloat16'"),
        ((2, 32, "global", "float8_e8m0fnu", True), "swizzled scales have rows=1 and a number of columns, got rows=2"),
        ((1, None, "global", "float8_e8m0fnu", True), "swizzled scales have rows=1 and a number of columns"),
    ],
)
def test_wrong_scalings_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperandScaling(*arguments)


def test_the_reference_refuses_missing_scales_and_pairs() -> None:
    plan = make_plan(problem("rowwise", 8, 8, 8), GATHER, 1)
    a, b = [np.ones((8, 8))], [np.ones((8, 8))]
    with pytest.raises(ValueError, match="scale_b_shards is given with a scaling of the problem, got None"):
        distgemm.run_reference(plan, a, b, scale_a_shards=[np.ones((8, 1))])
    with pytest.raises(ValueError, match=r"scale_a_shards\[0\] is an array of real numbers of shape \(8, 1\)"):
        distgemm.run_reference(plan, a, b, scale_a_shards=[np.ones(8)], scale_b_shards=[np.ones((8, 1))])
    unscaled = make_plan(GemmProblem(8, 8, 8), GATHER, 1)
    with pytest.raises(ValueError, match="scale_a_shards is None for a problem without scaling"):
        distgemm.run_reference(unscaled, a, b, scale_a_shards=[np.ones((8, 1))])
    with pytest.raises(ValueError, match="no runtime multiplies float4_e2m1fn_x2"):
        distgemm.run_reference(make_plan(problem("nvfp4", 8, 8, 8), GATHER, 1), a, b)


@given(st.sampled_from([*SCALINGS.values(), *OTHERS.values()]), st.integers(1, 300), st.integers(1, 300))
def test_torch_and_numpy_expand_scales_alike(scaling: Scaling, rows: int, columns: int) -> None:
    each = scaling.b
    _, high = each.scales(0, (0, rows), (0, 1))
    _, wide = each.scales(1, (0, columns), (0, 1))
    scales = np.arange(2.0 * high * wide).reshape(2, high, wide)
    found = np.broadcast_to(each.expand(scales, rows, columns), (2, rows, columns))
    assert np.array_equal(found, each.expand(torch.from_numpy(scales), rows, columns).expand(2, rows, columns).numpy())
    assert len(np.unique(found)) == 2 * -(-rows // (each.rows or rows)) * -(-columns // (each.columns or columns))


def test_the_tuning_cache_keeps_scalings_apart() -> None:
    known = [problem(each) for each in RUNNABLE] + [problem("rowwise", dtype="float8_e5m2", b_dtype="float8_e4m3fn")]
    known.append(GemmProblem(512, 256, 512, dtype="float8_e4m3fn"))
    assert len({key_of(each, "ag+gemm", 4) for each in known}) == len(known)
