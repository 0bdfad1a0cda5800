"""Wrong arguments of everything that plans, proves, predicts and draws."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import distgemm
from distgemm import layouts, schedulers
from distgemm.plan.options import parse_mesh, parse_options
from distgemm.plan.patterns import does_pattern, schedule_does_pattern
from distgemm.plan.plan import PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.simulator import Machine, predict_unfused, simulate
from distgemm.viz.figures import draw_plan, draw_schedule, draw_timeline
from distgemm.viz.perfetto import save_trace, timeline_trace
from distgemm.viz.text import show_plan, show_schedule
from tests.unit.bad_inputs import (
    HUGE,
    INF,
    NAN,
    ODD,
    Case,
    Returns,
    Wrong,
    booleans,
    check_refused,
    integers,
    names,
    numbers,
    objects,
    paths,
    table,
    texts,
    tuples,
    unique,
)

PROBLEM = distgemm.GemmProblem(8, 8, 8)
RING = distgemm.get_schedule("gemm+rs", 2)
PLAN = distgemm.make_plan(PROBLEM, RING)
H200 = Machine.load("h200")
TIMELINE = simulate(PLAN, H200)
TYPES = names(*DTYPE_BYTES)
RANK = integers(0, 1)


def call(function: Any, **right: Any) -> Any:
    """Makes calls of a function with these arguments, unless others are given."""
    return lambda **given: function(**{**right, **given})


def method(bound: Any, *order: str, **right: Any) -> Any:
    """As :func:`call`, with positional arguments in this order."""
    return lambda **given: bound(*({**right, **given}[name] for name in order))


# --- problems, schedules and plans ----------------------------------------------------------------------


SHARES = ("m_per_rank", "n_per_rank", "k_per_rank")


def planning() -> Iterator[Case]:
    yield from table(
        "GemmProblem",
        call(distgemm.GemmProblem, m=8, n=8, k=8),
        {
            **dict.fromkeys("mnkl", integers()),
            "dtype": TYPES,
            **dict.fromkeys(("out_dtype", "partial_dtype"), names(*DTYPE_BYTES, optional=True) + ["float8_e4m3fn"]),
            **dict.fromkeys(SHARES, tuples(0, optional=True).without(0) + [(8, 1), (0, 0), (2**31, 8)]),
        },
        {name: (name,) for name in SHARES},
    )
    yield from table(
        "make_plan",
        call(distgemm.make_plan, problem=PROBLEM, schedule="ag+gemm", world_size=2),
        {
            "problem": objects(distgemm.GemmProblem),
            "schedule": names("ag+gemm"),
            "world_size": integers(1, 8192),
            "mesh": tuples(optional=True) + [(3,), (2, 2)],
            "workspace": names("full", "bounded"),
            "sync": names("credit", "barrier"),
            "mechanism": names("push", "pull", "store"),
            "send_slots": integers(1, None),
            "ranks_per_host": integers(1, 2, optional=True),
            "chunks": integers(1, 4096),
            "no_such_option": Wrong(("no_such_option",), "options"),
        },
        {"mesh": ("world_size",), "no_such_option": ("no_such_option",)},
    )
    yield from table(
        "make_plan(scheduler)",
        call(distgemm.make_plan, problem=PROBLEM, schedule=RING),
        {"world_size": integers(2, 2, optional=True), "mesh": tuples(optional=True) + [(3,), (2, 2)]},
    )


def registry() -> Iterator[Case]:
    get = distgemm.get_schedule
    yield from table(
        "get_schedule",
        call(get, name="gemm+rs", world_size=2),
        {
            "name": names("gemm+rs"),
            "world_size": integers(1, 8192),
            "mesh": tuples(optional=True) + [(3,), (2, 2), (10**9,), (2**31, 2**31)],
            "chunks": integers(1, 4096),
            "final_add": names("epilogue", "kernel"),
        },
        {"name": ("schedule",), "mesh": ("world_size",)},
    )
    yield from table(
        "get_schedule(pairwise)",
        call(get, name="reduce_scatter_1d_pairwise_a", world_size=2),
        {"chunk_mode": names("m", "n"), "final_add": names("epilogue", "kernel")},
    )
    yield from table(
        "get_schedule(2d)",
        call(get, name="tensor_parallel_2d_rs", mesh=(2, 2)),
        {
            "gather": names("direct", "ring"),
            "reduce": names("chain", "pairwise"),
            "chunks": integers(1, 4096),
            "mesh": tuples(),
            "world_size": integers(4, 4, optional=True),
        },
        {"mesh": ("world_size", "mesh")},
    )
    yield from table(
        "get_schedule(nested)",
        call(get, name="tensor_parallel_2d_nested", mesh=(2, 2)),
        {"across": names("all_gather_1d_ring_a"), "inside": names("all_gather_1d_ring_a")},
        {"across": ("schedule",), "inside": ("schedule",)},
    )
    for function in (
        schedulers.schedule_options,
        schedulers.schedule_aliases,
        schedulers.schedule_mesh_rank,
        schedulers.schedule_doc,
    ):
        yield from table(function.__name__, call(function), {"name": names("gemm+rs")}, {"name": ("schedule",)})
    yield from table("check_pattern", call(schedulers.check_pattern), {"pattern": names("ag+gemm")})
    yield from table(
        "does_pattern",
        call(does_pattern, plan=PLAN, pattern="gemm+rs"),
        {"plan": objects(), "pattern": names("ag+gemm")},
    )
    yield from table(
        "schedule_does_pattern",
        call(schedule_does_pattern, name="gemm+rs", pattern="gemm+rs"),
        {"name": names("gemm+rs"), "pattern": names("ag+gemm")},
        {"name": ("schedule",)},
    )

    def register(build: Any = lambda mesh: RING, **given: Any) -> Any:
        return distgemm.register_schedule(**{"name": "never", **given})(build)

    words = Wrong(
        (3, 1.5, True, [], {}, b"x", ODD, "", "gemm+rs", "auto", "all", "unfused", "a b", "x=1"), "name|string"
    )
    yield from table(
        "register_schedule",
        register,
        {
            "name": words.without("") + [""],
            "default_for_pattern": words,
            "aliases": Wrong((3, "abc", b"x", 1.5, True, {}, {"x"}, ODD, [3], [None], [""], ["a b"]), "name"),
            "mesh_rank": integers(1, 8),
            "build": Wrong((3, "x", None, [], ODD, int), "function"),
        },
        dict.fromkeys(("name", "aliases", "default_for_pattern"), ("schedule",)),
    )
    builders: dict[str, Any] = {
        "takes the mesh first": lambda: 1,
        "'chunks' is keyword-only": lambda mesh, chunks: 1,
        "'a' is keyword-only": lambda mesh, *a: 1,
        "'b' is keyword-only": lambda mesh, **b: 1,
        "mesh first: build(mesh": lambda *, mesh=1: 1,
        "'c' needs a default": lambda mesh, *, c: 1,
    }
    for text, build in builders.items():
        yield Case(
            f"register_schedule-build-{text}",
            partial(register, build),
            ("never",),
            build,
            "mesh|default",
            rendering=text,
        )


def schedules() -> Iterator[Case]:
    work, partition = RING.work, RING.partition
    yield from table(
        "DistributedTileScheduler",
        call(
            distgemm.DistributedTileScheduler,
            name="x",
            partition=partition,
            work=work,
            route=RING.route,
            chunks=RING.chunks,
        ),
        {
            "name": texts(),
            "partition": objects(),
            "work": objects() + [partition.a],
            "route": objects(),
            "chunks": Wrong(
                (
                    None,
                    3,
                    "x",
                    (1, 1, 1),
                    [1, 1, 1, 1],
                    ODD,
                    *(schedulers.TileCoord(x, 1, 1, 1) for x in ("1", 0, -1, 1.0, None, True, [1], 5)),
                ),
                "TileCoord|integer|divide",
            ),
        },
    )
    yield from table(
        "Partition",
        call(schedulers.Partition, a=partition.a, b=partition.b, d=partition.d),
        dict.fromkeys("abd", objects(layouts.TVLayout)),
    )
    yield from table(
        "Route",
        schedulers.Route,
        dict.fromkeys(("a", "b", "d", "final_copies"), objects(schedulers.Direct)),
    )
    yield from table("Chain", schedulers.Chain, dict.fromkeys(("add", "final_add"), names("epilogue", "kernel")))
    yield from table("Pairwise", schedulers.Pairwise, dict.fromkeys(("add", "final_add"), names("epilogue", "kernel")))
    yield from table("work_tile", call(RING.work_tile, iteration=0, rank=0), {"iteration": RANK, "rank": RANK})
    yield from table(
        "owner",
        call(RING.owner, operand="A", tile=(0, 0, 0)),
        {"operand": names("A", "B", "D") + ["C"], "tile": tuples(0) + [(0, 0), (9, 0, 0), (-1, 0, 0), (HUGE, 0, 0)]},
    )
    other = distgemm.get_schedule("ag+gemm", 2)
    yield from table(
        "nest",
        call(schedulers.nest, across=other, inside=other, name="x"),
        {"across": objects(), "inside": objects(), "name": texts(optional=True)},
    )
    yield from table(
        "ring_of",
        call(schedulers.ring_of, mesh=(2, 2), start=0, others=[1]),
        {"mesh": tuples(empty=True), "start": integers(0, 3), "others": tuples(0, empty=True) + [(9,), (1, 2)]},
        {"others": ("others", "ranks")},
    )


def plans() -> Iterator[Case]:
    yield from table("Plan.ops", call(PLAN.ops), {"rank": RANK})
    yield from table("Plan.workspace_bytes", call(PLAN.workspace_bytes), {"rank": RANK})
    for function in (PLAN.box, PLAN.shard, PLAN.shard_shape):
        yield from table(
            f"Plan.{function.__name__}",
            call(function, operand="A", rank=0),
            {"operand": names("A", "B", "C", "D"), "rank": RANK},
        )
    yield from table(
        "Plan.replace_ops",
        call(PLAN.replace_ops, rank=0, ops=PLAN.ops(0)),
        {"rank": RANK, "ops": Wrong((None, 3, "x", {}, ODD), "ops")},
    )
    yield from table("Plan.dtype", call(PLAN.dtype), {"view": objects()})
    text = PLAN.to_json()
    fields = json.loads(text)
    no_texts = Wrong((None, 3, 1.5, True, [], {}, ODD, "", "x", "[" * 100000, "{" * 100000, text[:100]), "JSON")
    yield from table("Plan.from_json", call(distgemm.Plan.from_json), {"text": no_texts}, errors=(PlanError,))
    for broken in ("[]", "3", "null", "{}", '"x"', "NaN", '{"x": 1}', "1e999", "9" * 5000):
        read = partial(distgemm.Plan.from_json, broken)
        yield Case(f"Plan.from_json-{broken[:10]}", read, ("plan",), broken, "JSON|fields", (PlanError,), "")
    for key in fields:
        for value in (None, 3, "x", 1.5, True, [], {}, [[]], [[3]], {"x": 1}, -1, HUGE, [None], NAN, [NAN]):
            broken = {**fields, key: value}
            if value == fields[key] or (key, value) in (("iterations", 3), ("schedule", "x")):
                continue  # it is right, too
            yield Case(
                f"Plan.from_json-{key}-{str(value)[:10]}",
                lambda broken=broken: distgemm.Plan.from_json(json.dumps(broken)).verify(),  # type: ignore[misc]
                ("",), value, ".", (PlanError,), "",
            )  # fmt: skip
        less = {name: value for name, value in fields.items() if name != key}
        yield Case(
            f"Plan.from_json-without {key}",
            lambda less=less: distgemm.Plan.from_json(json.dumps(less)),  # type: ignore[misc]
            (key,), key, ".", (PlanError,),
        )  # fmt: skip
    yield from table(
        "parse_mesh",
        call(parse_mesh),
        {
            "text": Wrong(
                ("", "x", "2x", "2xx4", "axb", "2.5x2", "-1x2", "0x2", 3, 1.5, [], b"2x2", ODD, "9" * 5000), "2x4"
            )
        },
        {"text": ("mesh",)},
    )
    yield from table(
        "parse_options",
        call(parse_options),
        {
            "texts": Wrong(
                ("chunks=2", 3, [3], [None], ["chunks"], ["=2"], [""], ODD, [b"x=1"], ["chunks=" + "9" * 5000]),
                "chunks=2",
            )
        },
        {"texts": ("option",)},
    )


# --- layouts --------------------------------------------------------------------------------------------


def layout_cases() -> Iterator[Case]:
    line = layouts.Layout((2, 4))
    tv = RING.work
    yield from table(
        "Layout",
        call(layouts.Layout, shape=(2, 4)),
        {
            "shape": Wrong(
                (
                    None,
                    0,
                    -1,
                    1.5,
                    "x",
                    "12",
                    True,
                    [2, 4],
                    (),
                    (2, ()),
                    (2, 0),
                    (2, "4"),
                    (2, None),
                    {2: 4},
                    ODD,
                    (2.0,),
                    (True, 2),
                    np.ones(2),
                    HUGE,
                    (2, HUGE),
                ),
                "integer",
            ),
            "stride": Wrong(
                (
                    3,
                    "x",
                    1.5,
                    (1,),
                    (1, 2, 3),
                    [1, 2],
                    (1, "2"),
                    (1, None),
                    (1, 2.0),
                    (1, True),
                    {1: 2},
                    ODD,
                    (HUGE, 1),
                ),
                "integer",
            ),
        },
    )
    for name in ("coalesce", "left_inverse", "right_inverse"):
        yield from table(name, call(getattr(layouts, name)), {"layout": objects(layouts.Layout)})
    for name in ("composition", "logical_divide", "logical_product"):
        yield from table(
            name,
            call(getattr(layouts, name), a=line, b=layouts.Layout(2)),
            dict.fromkeys("ab", objects(layouts.Layout)),
        )
    yield from table("complement", call(layouts.complement, layout=line), {"layout": objects(), "size": integers()})
    yield from table(
        "flatten",
        call(layouts.flatten),
        {"value": Wrong(("x", None, 1.5, True, [1], {1: 1}, ODD, (1, "x"), (1, None)), "integer")},
    )
    yield from table(
        "product",
        call(layouts.product),
        {"value": Wrong(("x", None, 1.5, True, [1], {1: 1}, ODD, (1, "x"), (1, None)), "integer")},
    )
    yield from table("Offset", layouts.Offset, {"amount": integers(-(2**31) + 1)})
    yield from table("Modulo", layouts.Modulo, {"extent": integers()})
    yield from table(
        "Swizzle",
        call(layouts.Swizzle, bits=1, base=0, shift=1),
        {"bits": integers(0, 62) + [3], "base": integers(0, 62), "shift": integers(-62, 62) + [0]},
    )
    yield from table(
        "ComposedLayout",
        method(layouts.ComposedLayout, "layout", "map", layout=line, map=layouts.Offset(1)),
        {"layout": objects(), "map": objects()},
        {"map": ("maps",)},
    )
    yield from table(
        "Axis",
        call(layouts.Axis, extent=2),
        {
            "extent": integers(),
            "rank": Wrong((None, "x", 1.5, [1], {1: 1}, ODD, (1, "x"), True, HUGE), "integer"),
            "value": Wrong((None, "x", 1.5, [1], {1: 1}, ODD, (1, "x"), True, HUGE), "integer"),
            "maps": Wrong((None, 3, "x", [], ODD, (3,), ("x",), (None,), {}), "map"),
        },
    )
    axes = ((layouts.Axis(2, rank=1),),)
    yield from table(
        "TVLayout",
        call(layouts.TVLayout, mesh=(2,), values=(1,), modes=axes),
        {
            "mesh": tuples(),
            "values": tuples(),
            "modes": Wrong((None, 3, "x", (), [], ODD, (3,), ((3,),), (("x",),), ((),), (None,), {}), "Axis|mode"),
            "order": Wrong((None, 3, "x", [0], ODD, (1,), (0, 0), ("0",), (0.0,), (True,), {}), "permutation"),
        },
    )
    yield from table("TVLayout.call", method(tv, "rank", "value", rank=0, value=0), {"rank": RANK, "value": RANK})
    for name in ("inverse", "holders"):
        yield from table(
            f"TVLayout.{name}", call(getattr(tv, name)), {"tile": tuples(0) + [(0,), (9, 0, 0, 0), (HUGE, 0, 0, 0)]}
        )
    yield from table(
        "TVLayout.reorder",
        call(tv.reorder),
        {
            "order": Wrong(
                (None, 3, "x", "01", ODD, (1,), (0, 0), ("0", "1"), (0, 1.0), (True, False), {}), "permutation"
            )
        },
    )
    yield from table("TVLayout.nest", call(tv.nest), {"inner": objects(layouts.TVLayout) + [tv_of_two()]})
    yield from table(
        "TVLayout.grids",
        lambda **given: list(tv.grids(**given)),
        {"rows": integers(0, 3) + [1], "columns": integers(0, 3) + [0]},
    )


def tv_of_two() -> layouts.TVLayout:
    return layouts.TVLayout((2,), (1,), ((layouts.Axis(2, rank=1),), (layouts.Axis(1),)))


# --- machines, predictions, text and pictures -----------------------------------------------------------


def machines() -> Iterator[Case]:
    yield from table(
        "simulate",
        call(simulate, plan=PLAN, machine=H200),
        {
            "plan": objects(distgemm.Plan),
            "machine": names("h200") + ["missing.json.gz"],
            "gemm_streams": integers(1, 1024, optional=True),
            "copy_streams": integers(1, 1024),
            "gemm_efficiency_hook": Wrong(
                (
                    3,
                    "x",
                    [],
                    ODD,
                    True,
                    Returns(0),
                    Returns(-1),
                    Returns(NAN),
                    Returns(INF),
                    Returns("x"),
                    Returns(None),
                ),
                "function|number",
            ),
        },
        {"machine": ("machine",)},
    )
    yield from table(
        "predict_unfused",
        call(predict_unfused, problem=PROBLEM, machine=H200, pattern="ag+gemm", world_size=2),
        {
            "problem": objects(),
            "machine": objects(),
            "pattern": names("ag+gemm"),
            "world_size": integers(1, 8192),
            "collective": names("nccl"),
        },
    )
    yield from table(
        "Machine.load",
        call(Machine.load),
        {"name": names("h200").without(ODD) + paths().values},
        {"name": ("machine",)},
    )
    right = H200.to_dict()
    figures = numbers(negative=False)
    positive = numbers(zero=False, negative=False)
    counts = integers(1, None)
    kinds: dict[str, Wrong] = {
        "name": texts(),
        **dict.fromkeys(("sms", "copy_streams", "gemm_streams"), counts),
        **dict.fromkeys(("ranks_per_host", "adapters_per_host"), integers(1, None, optional=True)),
        **dict.fromkeys(
            ("sustained", "memory", "sum_memory", "pull_bandwidth", "contended"), positive + [1e-320, 1e300]
        ),
        "store_bandwidth": numbers(zero=False, negative=False, optional=True) + [1e-320, 1e300],
        **dict.fromkeys(
            (
                "gemm_launch",
                "tile_overhead",
                "boost",
                "signal",
                "wait",
                "copy_launch",
                "signal_gap",
                "barrier",
                "replay",
                "entry",
            ),
            figures + [1e300],
        ),
        **dict.fromkeys(
            ("nvlink", "network", "collective"),
            Wrong((None, 3, "x", [], {}, [1, 2, 3], {"bandwidth": 1.0}, ODD), "fields"),
        ),
        **dict.fromkeys(
            ("small_collective", "symmetric"), Wrong((3, "x", [], {}, [1, 2, 3], {"bandwidth": 1.0}, ODD), "fields")
        ),
        "rates": Wrong(
            (None, 3, "x", [], {}, {"nope": {"peak": 1, "power": 1}}, {"float32": 3}, {"float32": {"peak": 1}}, ODD),
            ".",
        ),
        "tiles": Wrong((None, 3, "x", [], {}, [3], [{}], [None], ODD), "."),
        "sources": Wrong((None, 3, "x", [], {"x": 3}, ODD), "."),
    }
    assert set(kinds) == set(right)
    yield from table("Machine.from_dict", lambda **given: Machine.from_dict({**right, **given}), kinds)
    for link in ("nvlink", "network", "collective"):
        inner = {"bandwidth": positive + [1e-320], "gap": figures, "latency": figures}
        yield from table(
            f"Machine.from_dict({link})",
            lambda link=link, **given: Machine.from_dict({**right, link: {**right[link], **given}}),
            inner,
        )  # type: ignore[misc]
    yield from table(
        "Machine.from_dict(rates)",
        lambda **given: Machine.from_dict({**right, "rates": {"float32": {"peak": 1.0, "power": 1.0, **given}}}),
        {"peak": positive + [1e-320], "power": positive + [1e-320]},
    )
    yield from table(
        "Machine.from_dict(tiles)",
        lambda **given: Machine.from_dict({**right, "tiles": [{"m": 1, "n": 1, "efficiency": 1.0, **given}]}),
        {"m": integers(1, None), "n": integers(1, None), "efficiency": positive + [1e-320]},
    )
    yield from table(
        "Machine.from_dict",
        lambda fields: Machine.from_dict(fields),
        {"fields": Wrong((None, 3, "x", [], ODD, {}, {"x": 1}, {**right, "x": 1}), ".")},
        {"fields": ("object", "no [", "unknown")},
    )
    yield from table("Machine.rate", call(H200.rate), {"dtype": names("float32")}, {"dtype": ("rate",)})
    yield from table(
        "Machine.same_host", call(H200.same_host, one=0, other=0), dict.fromkeys(("one", "other"), integers(0, None))
    )
    yield from table("Machine.link", call(H200.link, src=0, dst=1), dict.fromkeys(("src", "dst"), integers(0, None)))
    yield from table(
        "Machine.gemm",
        call(H200.gemm, m=8, n=8, k=8, dtype="bfloat16"),
        {
            **dict.fromkeys(("m", "n", "k", "batches"), integers()),
            "dtype": TYPES,
            "out_bytes": integers(0, None),
            "read_bytes": integers(0, None),
        },
        {"dtype": ("rate",)},
    )
    yield from table(
        "Machine.clock",
        call(H200.clock, dtype="bfloat16", flop=1.0),
        {"dtype": TYPES, "flop": numbers(negative=False)},
        {"dtype": ("rate",)},
    )
    yield from table(
        "Machine.copy_us",
        call(H200.copy_us, size=8),
        {"size": numbers(negative=False), "src": integers(0, None), "dst": integers(0, None)},
    )
    yield from table("Machine.save", call(H200.save), {"path": paths()})


def pictures() -> Iterator[Case]:
    sizes = {"limit": integers(1, None), "width": integers(1, None, optional=True)}
    yield from table("show_schedule", call(show_schedule, scheduler=RING), {"scheduler": objects(), **sizes})
    yield from table(
        "show_plan",
        call(show_plan, plan=PLAN),
        {"plan": objects(), **sizes, "rank": integers(0, 1, optional=True), "ops": booleans()},
    )
    pictured = Wrong((*paths().values, "x", "x.pdf", "x.json", "/no/such/folder/x.svg"), "path|file|written|folder")
    yield from table(
        "draw_schedule",
        call(draw_schedule, scheduler=RING, path="x.svg"),
        {"scheduler": objects(), "path": pictured},
        {"path": ("picture", "path")},
    )
    yield from table(
        "draw_plan",
        call(draw_plan, plan=PLAN, path="x.svg"),
        {"plan": objects(), "path": pictured},
        {"path": ("picture", "path")},
    )
    yield from table(
        "draw_timeline",
        call(draw_timeline, timeline=TIMELINE, path="x.svg"),
        {"timeline": objects(), "path": pictured},
        {"path": ("picture", "path")},
    )
    yield from table("timeline_trace", call(timeline_trace), {"timeline": objects()})
    yield from table(
        "save_trace",
        call(save_trace, trace={}, path="x.json"),
        {
            "trace": Wrong((None, 3, "x", [], ODD, {"x": ODD}, {ODD: 1}), "trace|JSON"),
            "path": paths() + ["/no/such/folder/x.json"],
        },
    )
    yield from table(
        "Timeline.busy",
        call(TIMELINE.busy, rank=0, kind=distgemm.plan.ops.Gemm),
        {"rank": RANK, "kind": Wrong((None, 3, "x", "Gemm", [], ODD, int), "class")},
    )


def reference() -> Iterator[Case]:
    shards = [np.ones(PLAN.shard_shape("A", rank)) for rank in range(2)]
    bad = Wrong(
        (
            None,
            3,
            "x",
            1.5,
            {},
            ODD,
            [],
            shards[:1],
            [None, None],
            ["x", "y"],
            [3, 3],
            [np.ones(2)] * 2,
            [[["x"]]] * 2,
            [np.ones((8, 4)) * 1j] * 2,
        ),
        "shard|array",
    )
    words = {f"{name}_shards": (f"{name.upper()} has", f"{name.upper()}'s shard") for name in "abc"}
    yield from table(
        "run_reference",
        call(distgemm.run_reference, plan=PLAN, a_shards=shards, b_shards=shards),
        {
            "plan": objects(),
            "a_shards": bad,
            "b_shards": bad,
            "c_shards": bad.without(None),
            "alpha": numbers(),
            "beta": numbers(),
            "order": names("random", "issue"),
            "seed": integers(0, None),
            "replays": integers(1, 2**31 - 1),
        },
        words,
    )


# --- the tests ------------------------------------------------------------------------------------------

GROUPS = (planning, registry, schedules, plans, layout_cases, machines, pictures, reference)
CASES = unique([case for group in GROUPS for case in group()])


@pytest.mark.sample(150)
@pytest.mark.parametrize("case", CASES)
def test_refused(case: Case, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(case)


def ring() -> distgemm.DistributedTileScheduler:
    """The schedule that is kept now; large ones may have replaced it."""
    return distgemm.get_schedule("gemm+rs", 2)


ACCEPTED: dict[str, Any] = {
    "extents of numpy": lambda: distgemm.GemmProblem(np.int64(8), np.int32(8), np.uint8(8)) == PROBLEM,
    "rows of numpy": lambda: distgemm.GemmProblem(8, 8, 8, m_per_rank=np.array([4, 4])).m_per_rank == (4, 4),
    "world_size of numpy": lambda: distgemm.get_schedule("gemm+rs", np.int64(2)) is ring(),
    "mesh of numpy": lambda: distgemm.get_schedule("gemm+rs", mesh=[np.int64(2)]) is ring(),
    "chunks of numpy": lambda: distgemm.get_schedule("gemm+rs", 2, chunks=np.int64(1)) is ring(),
    "send_slots of numpy": lambda: distgemm.make_plan(PROBLEM, RING, send_slots=np.int64(2)).digest == PLAN.digest,
    "rank of numpy": lambda: PLAN.ops(np.int64(1)) == PLAN.ops(1),
    "streams of numpy": lambda: simulate(PLAN, H200, gemm_streams=np.int64(2)).time > 0,
    "path as a text": lambda: Machine.load("h200") == H200,
    "replays of numpy": lambda: distgemm.run_reference(
        PLAN, *[[np.ones(PLAN.shard_shape(operand, rank)) for rank in range(2)] for operand in "AB"], replays=np.int8(2)
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert ACCEPTED[name]()


def test_plans_survive_their_json() -> None:
    assert distgemm.Plan.from_json(PLAN.to_json()) == PLAN
    assert dataclasses.replace(PLAN) == PLAN
