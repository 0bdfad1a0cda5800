"""Plans that are none: PlanError names what is wrong, when a plan is read from JSON and when it is proved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import distgemm
from distgemm import GemmProblem, Plan, PlanError
from distgemm.plan.ops import Copy, Gemm, Signal, Slot, Wait

BIG = int("9" * 400)


def plan_of(**options: Any) -> Plan:
    return distgemm.make_plan(GemmProblem(m=8, n=4, k=4), "ag+gemm", 2, **options)


def with_op(plan: Plan, kind: type, **fields: Any) -> Plan:
    op = next(op for op in plan.ops(0) if isinstance(op, kind))
    changed = dataclasses.replace(op, **fields)
    return plan.replace_ops(0, [changed if other is op else other for other in plan.ops(0)])


def _grown(plan: Plan, **extents: int) -> Plan:
    return dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, **extents))


def _with_edges(plan: Plan, mode: int, edges: Any) -> Plan:
    return dataclasses.replace(plan, edges=(*plan.edges[:mode], edges, *plan.edges[mode + 1 :]))


def _with_shard(plan: Plan, operand: int, box: Any) -> Plan:
    boxes = (box, *plan.shards[operand][1:])
    return dataclasses.replace(plan, shards=(*plan.shards[:operand], boxes, *plan.shards[operand + 1 :]))


def _with_slot(plan: Plan, slot: Any) -> Plan:
    return dataclasses.replace(plan, slots=((slot, *plan.slots[0][1:]), *plan.slots[1:]))


def _view(**fields: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        copy = next(op for op in plan.ops(0) if isinstance(op, Copy))
        return with_op(plan, Copy, dst=copy.dst._replace(**fields))

    return change


# What does not fit the problem: a plan that would be right for a smaller one.
SMALLER = [
    (lambda plan: _grown(plan, m=9), r"bounds of tiles in mode m go from 0 up to 9, .* got \(0, 4, 8\)"),
    (lambda plan: _grown(plan, n=8), "in mode n go from 0 up to 8"),
    (lambda plan: _grown(plan, k=5), "in mode k go from 0 up to 5"),
    (lambda plan: _grown(plan, l=2), "in mode l go from 0 up to 2"),
    (lambda plan: _grown(plan, m=7), "in mode m go from 0 up to 7"),
    (lambda plan: _with_edges(plan, 0, (0, 4)), "in mode m"),
    (lambda plan: _with_edges(plan, 0, (0, 9, 8)), "in mode m"),
    (lambda plan: _with_edges(plan, 0, (1, 4, 8)), "in mode m"),
    (lambda plan: _with_edges(plan, 2, ()), "in mode k"),
    (lambda plan: _with_shard(plan, 0, ((0, 1), (0, 4), (0, 5))), "rank 0: its shard .* of A reaches out"),
    (lambda plan: _with_shard(plan, 2, ((0, 1), (-1, 8), (0, 2))), "rank 0: its shard .* of D reaches out"),
    (lambda plan: _grown(plan, m_per_rank=(3, 5)), r"have m_per_rank = \(3, 5\) rows"),
    (lambda plan: dataclasses.replace(plan, mesh=(4,)), "ops for 2 ranks, but its mesh are for 4"),
    (lambda plan: dataclasses.replace(plan, mesh=(-1, -2)), "each side is 1 or more"),
    (lambda plan: dataclasses.replace(plan, slots=plan.slots[:1]), "ops for 2 ranks, but its slots are for 1"),
    (
        lambda plan: dataclasses.replace(plan, shards=(plan.shards[0][:1], *plan.shards[1:])),
        "ops for 2 ranks, but its shards of A are for 1",
    ),
    (lambda plan: dataclasses.replace(plan, rank_ops=(), slots=(), shards=((), (), ()), mesh=(0,)), "for 0 ranks"),
    (lambda plan: _with_slot(plan, plan.slots[0][0]._replace(offset=256)), "its slots end at 512, its workspace at"),
    (lambda plan: _with_slot(plan, plan.slots[0][0]._replace(elements=-1)), "too small for its elements"),
    (lambda plan: dataclasses.replace(plan, mechanism="pull"), 'touches|with mechanism="pull"'),
    (lambda plan: with_op(plan, Copy, slot=-1), "names slot -1, but writes slot 0"),
    (lambda plan: with_op(plan, Wait, slot=7), "is about slot 7, but"),
]

# What is no plan at all.
MALFORMED = [
    (lambda plan: dataclasses.replace(plan, problem=None), r"plan's problem is a GemmProblem, got None"),
    (lambda plan: dataclasses.replace(plan, schedule=3), "plan's schedule is a string, got 3"),
    (lambda plan: dataclasses.replace(plan, mesh=None), "plan's mesh is a tuple of integers, got None"),
    (lambda plan: dataclasses.replace(plan, mesh=(2.0,)), r"plan's mesh is a tuple of integers, got \(2\.0,\)"),
    (lambda plan: dataclasses.replace(plan, workspace="half"), "plan's workspace is one of full, bounded, got 'half'"),
    (lambda plan: dataclasses.replace(plan, sync=["credit"]), r"plan's sync is one of"),
    (lambda plan: dataclasses.replace(plan, mechanism=None), r"plan's mechanism is one of push, pull, store"),
    (
        lambda plan: dataclasses.replace(plan, iterations="2"),
        "plan's iterations is an integer from 1 to 2147483647, got '2'",
    ),
    (lambda plan: dataclasses.replace(plan, edges=plan.edges[:3]), "plan's edges is a tuple of 4"),
    (lambda plan: _with_edges(plan, 0, (0, None, 8)), r"plan's edges\[0\] is a tuple of integers"),
    (lambda plan: dataclasses.replace(plan, shards=plan.shards[:2]), "plan's shards is a tuple of 3"),
    (lambda plan: _with_shard(plan, 1, (0, 1)), r"plan's shards\[1\]\[0\] is a box"),
    (lambda plan: _with_shard(plan, 1, None), r"plan's shards\[1\]\[0\] is a box"),
    (lambda plan: dataclasses.replace(plan, rank_ops=None), "plan's rank_ops is a tuple"),
    (lambda plan: dataclasses.replace(plan, rank_ops=(None, None)), r"plan's rank_ops\[0\] is a tuple of ops"),
    (lambda plan: plan.replace_ops(1, ["x"]), r"plan's rank_ops\[1\]\[0\] is a Barrier, Copy, .*, got 'x'"),
    (lambda plan: with_op(plan, Gemm, id=None), r"plan's rank_ops\[0\]\[\d\].id is an integer, got None"),
    (lambda plan: with_op(plan, Gemm, rank="0"), r"\.rank is an integer, got '0'"),
    (lambda plan: with_op(plan, Gemm, round=True), r"\.round is an integer, got True"),
    (lambda plan: with_op(plan, Gemm, round=1.0), r"\.round is an integer, got 1\.0"),
    (lambda plan: with_op(plan, Gemm, tile=(0, 0, 0)), r"\.tile is a TileCoord of integers, got \(0, 0, 0\)"),
    (lambda plan: with_op(plan, Gemm, deps=None), r"\.deps is a tuple of integers, got None"),
    (lambda plan: with_op(plan, Gemm, deps=([],)), r"\.deps is a tuple of integers"),
    (lambda plan: with_op(plan, Gemm, sources=None), r"\.sources is a tuple of Views, got None"),
    (lambda plan: with_op(plan, Gemm, sources=(None,)), r"\.sources is a tuple of Views"),
    (lambda plan: with_op(plan, Gemm, a=None), r"\.a is a View, got None"),
    (lambda plan: with_op(plan, Gemm, c=3), r"\.c is a View or None, got 3"),
    (lambda plan: with_op(plan, Copy, operand=0), r"\.operand is 'A', 'B', 'D', 'SFA' or 'SFB', got 0"),
    (lambda plan: with_op(plan, Copy, dst=()), r"\.dst is a View, got \(\)"),
    (lambda plan: with_op(plan, Signal, flag=(1, 0, 0, False)), r"\.flag is a Flag"),
    (lambda plan: with_op(plan, Wait, peer=None), r"\.peer is an integer, got None"),
    (_view(rank=None), r"\.dst is a View"),
    (_view(slot=0.0), r"\.dst is a View"),
    (_view(frame=()), r"\.dst is a View"),
    (_view(box=((0, 1), (0, 4), (0, "4"))), r"\.dst is a View"),
    (_view(pitch=None), r"\.dst is a View"),
    (_view(buffer=None), r"\.dst is a View"),
    (lambda plan: dataclasses.replace(plan, slots=(None, None)), r"plan's slots\[0\] is a tuple of Slots"),
    (lambda plan: _with_slot(plan, (0, 256, "bfloat16", 16)), r"plan's slots\[0\]\[0\] is a Slot"),
    (lambda plan: _with_slot(plan, Slot(0, 256, "int8", 16)), r"plan's slots\[0\]\[0\] is a Slot"),
    (lambda plan: _with_slot(plan, Slot(0, None, "bfloat16", 16)), r"plan's slots\[0\]\[0\] is a Slot"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("change", "message"), SMALLER + MALFORMED)
def test_a_plan_that_does_not_fit_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    plan = plan_of()
    plan.verify()
    with pytest.raises(PlanError, match=message):
        change(plan).verify()


@pytest.mark.parametrize(("change", "message"), SMALLER)
def test_a_plan_that_does_not_fit_its_problem_is_refused_from_json(
    change: Callable[[Plan], Plan], message: str
) -> None:
    again = Plan.from_json(change(plan_of()).to_json())
    with pytest.raises(PlanError, match=message):
        again.verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: [], r"plan's plan is a JSON object, got \[\]"),
        (lambda plan: {}, "has no 'edges', no 'iterations'"),
        (lambda plan: plan | {"more": 1}, "has unknown 'more'"),
        (lambda plan: plan | {"problem": None}, "plan's problem is a JSON object, got None"),
        (lambda plan: plan | {"problem": {}}, "plan's problem has no 'b_dtype', no 'dtype'"),
        (lambda plan: plan | {"problem": plan["problem"] | {"m": "8"}}, "m is an integer >= 1, got '8'"),
        (
            lambda plan: plan | {"problem": plan["problem"] | {"m": BIG}},
            "m is an integer from 1 to 2147483647, got 1.000e",
        ),
        (lambda plan: plan | {"problem": plan["problem"] | {"dtype": []}}, r"dtype is one of .*, got \[\]"),
        (lambda plan: plan | {"problem": plan["problem"] | {"out_dtype": ""}}, "out_dtype is one of .*, got ''"),
        (lambda plan: plan | {"rank_ops": 3}, "plan's rank_ops is a list, got 3"),
        (lambda plan: plan | {"rank_ops": {}}, r"plan's rank_ops is a list, got \{\}"),
        (lambda plan: plan | {"rank_ops": [3]}, r"plan's rank_ops\[0\] is a list, got 3"),
        (lambda plan: plan | {"rank_ops": [[3]]}, r"plan's rank_ops\[0\]\[0\] is a JSON object, got 3"),
        (lambda plan: plan | {"slots": None}, "plan's slots is a list, got None"),
        (lambda plan: plan | {"slots": [[[0, 256]], []]}, r"plan's slots\[0\]\[0\] is a Slot"),
        (lambda plan: plan | {"edges": BIG}, "plan's edges is a tuple of 4, got 1.000e.400"),
        (lambda plan: plan | {"mesh": float("nan")}, "plan's mesh is a tuple of integers, got nan"),
        (
            lambda plan: plan | {"iterations": float("inf")},
            "plan's iterations is an integer from 1 to 2147483647, got inf",
        ),
    ],
)
def test_json_that_is_no_plan_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    fields = json.loads(plan_of().to_json())
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(change(fields)))


@pytest.mark.parametrize("name", ["maker", "link_of", "Op", "accesses", "TypeVar", "__name__", "", None, 3, ["Gemm"]])
def test_json_names_kinds_of_ops_and_nothing_else(name: Any) -> None:
    fields = json.loads(plan_of().to_json())
    fields["rank_ops"][1][2]["kind"] = name
    wanted = r"plan's rank_ops\[1\]\[2\].kind is one of Barrier, Copy, Gemm, Reduce, Signal, Wait, got "
    with pytest.raises(PlanError, match=wanted):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize(("key", "value"), [("deps", None), ("more", 0)])
def test_an_op_of_json_has_the_fields_of_its_kind(key: str, value: Any) -> None:
    fields = json.loads(plan_of().to_json())
    op = fields["rank_ops"][0][0]
    if key in op:
        del op[key]
    else:
        op[key] = value
    with pytest.raises(PlanError, match=r"plan's rank_ops\[0\]\[0\] has (no 'deps'|unknown 'more'); its fields are"):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, b"\xff\xfe\xfa", None, 3, "[" * 900 + "]" * 900],
)
def test_a_text_that_is_no_json_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match=r"the plan is not JSON|a JSON object"):
        Plan.from_json(text)


@pytest.mark.parametrize("field", ["mesh", "edges", "shards", "schedule"])
def test_json_that_is_nested_too_deeply_is_refused(field: str) -> None:
    fields = json.loads(plan_of().to_json())
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    for place in ([deep], [[deep]] * 3, deep):
        with pytest.raises(PlanError, match=f"plan's {field}"):
            Plan.from_json(json.dumps(fields | {field: place}))


def test_a_plan_of_many_empty_tiles_is_refused_at_once() -> None:
    plan = plan_of()
    for mode in range(4):
        plan = _with_edges(plan, mode, (*[0] * 100_000, *plan.edges[mode]))
    with pytest.raises(PlanError, match="where its tile is"):
        plan.verify()
    large = dataclasses.replace(
        plan_of(),
        problem=GemmProblem(100_000, 100_000, 4),
        edges=(tuple(range(100_001)), tuple(range(100_001)), (0, 4), (0, 1)),
    )
    with pytest.raises(PlanError, match="divides D into 10000000000 tiles, and has only"):
        large.verify()
