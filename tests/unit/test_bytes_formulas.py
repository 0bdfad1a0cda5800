"""Bytes per link and workspace equal the closed formulas in docs/formulas.json, which docs/formulas.md shows."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.schedulers import schedule_mesh_rank, schedule_options

DATA = Path(__file__).parents[2] / "docs" / "formulas.json"
pytestmark = pytest.mark.skipif(not DATA.is_file(), reason="the formulas are in docs/, which a source archive lacks")

MESHES = {
    1: [(size,) for size in range(1, 9)],
    2: [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 2), (1, 3), (3, 1)],
    3: [(1, 1, 1), (2, 2, 2), (2, 1, 3), (1, 2, 3), (3, 2, 1), (1, 1, 3), (1, 1, 2), (1, 2, 2), (1, 3, 1)],
}
SIDES = {
    "tensor_parallel_2d": "PQ",
    "tensor_parallel_2d_rs": "QS",
    "tensor_parallel_3d": "PQS",
    "tensor_parallel_2d_nested": "HL",
}
CHAIN, ALL_REDUCE = "reduce_scatter_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_a_rotating_c"
GATHERS = ("direct", "ring", "bidirectional_full", "bidirectional_split")
OPTIONS = {"gather": GATHERS, "reduce": ("chain", "pairwise"), "final_add": ("epilogue", "kernel")}
SHAPES = {
    "aligned": (26, 40, 24),
    "padded": (26, 34, 37),  # rows of 68 and 74 bytes in bfloat16
}
"""m, n, k of a tile. Halves of it may travel, by rows; its bytes are no multiples of 256."""


@cache
def formulas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def value(formula: str, **symbols: int | Fraction) -> int:
    """A formula of the page in numbers."""
    for sign, code in (("·", "*"), ("\N{MINUS SIGN}", "-"), ("⌈", "up("), ("⌉", ")"), ("⌊", "down("), ("⌋", ")")):
        formula = formula.replace(sign, code)
    names = {name: Fraction(number) for name, number in symbols.items()}
    result = eval(
        formula, {"up": lambda x: -(-x // 256) * 256, "down": math.floor, "min": min, "__builtins__": {}}, names
    )
    assert result == int(result), f"{formula} = {result} on shapes that divide"
    return int(result)


def links(mesh: tuple[int, ...], axis: int, route: str, share: int) -> Counter[tuple[int, int]]:
    """What the table of routes says, for every rank of a mesh."""
    found: Counter[tuple[int, int]] = Counter()
    extent = mesh[axis]
    after, before, every = (value(cell, X=extent, T=share) for cell in formulas()["routes"][route].values())
    ranks = {place: rank for rank, place in enumerate(itertools.product(*map(range, mesh)))}
    for place, rank in ranks.items():
        for distance in range(1, extent):
            peer = ranks[(*place[:axis], (place[axis] + distance) % extent, *place[axis + 1 :])]
            found[rank, peer] += every + after * (distance == 1) + before * (distance == extent - 1)
    return found


def cases() -> Iterator[tuple[str, tuple[int, ...], dict[str, object]]]:
    """Every schedule with every combination of its options that the page has formulas for."""
    names = distgemm.list_schedules()
    for name in names:
        choices: dict[str, list[object]] = {"chunks": [1, 2]}
        choices |= {key: list(OPTIONS[key]) for key in schedule_options(name) if key in OPTIONS}
        if "across" in schedule_options(name):
            moves_a = [other for other in names if re.match(r"all_gather_1d_.*_a$", other) and "_k_" not in other]
            choices |= {"chunks": [2], "across": list(moves_a), "inside": list(moves_a)}
        for mesh in MESHES[schedule_mesh_rank(name)]:
            for picked in itertools.product(*choices.values()):
                options = dict(zip(choices, picked, strict=True))
                asked = dict(zip(("across", "inside"), mesh, strict=False)) | ({} if len(mesh) > 1 else {"": mesh[0]})
                named = {"": name} | {key: str(options[key]) for key in ("across", "inside") if key in options}
                if not any("xor" in which and asked.get(at, 1) & (asked.get(at, 1) - 1) for at, which in named.items()):
                    yield name, mesh, options


def problem_for(grid: distgemm.TileCoord, shape: str = "aligned", **more: object) -> distgemm.GemmProblem:
    m, n, k = SHAPES[shape]
    return distgemm.GemmProblem(m=grid.m * m, n=grid.n * n, k=grid.k * k, **more)  # type: ignore[arg-type]


def sizes(problem: distgemm.GemmProblem, grid: distgemm.TileCoord, aligned_to: int = 1) -> dict[str, int]:
    """Bytes of the matrices, with the rows of their tiles rounded up to a multiple of so many bytes."""

    def matrix(rows: int, columns: int, tiles: int, dtype: str | None) -> int:
        row = columns // tiles * DTYPE_BYTES[str(dtype)]
        return problem.l * rows * tiles * -(-row // aligned_to) * aligned_to

    m, n, k = problem.m, problem.n, problem.k
    return {
        "A": matrix(m, k, grid.k, problem.dtype),
        "B": matrix(n, k, grid.k, problem.dtype),
        "D": matrix(m, n, grid.n, problem.out_dtype),
        "E": matrix(m, n, grid.n, problem.partial_dtype),
    }


def compare_links(
    plan: distgemm.Plan,
    moves: list[dict[str, str]],
    sides: str,
    symbols: dict[str, int],
    by: dict[str, str],
    where: str,
) -> None:
    """``by``: the route for each name in the formula that is not a route itself."""
    wanted: Counter[tuple[int, int]] = Counter()
    for move in moves:
        route = by.get(move["route"], move["route"])
        along = (plan.mesh, sides.index(move["axis"])) if move["axis"] in sides else ((plan.world_size,), 0)
        wanted += links(*along, route, value(move["share"], **symbols))
    assert plan.link_bytes() == dict(sorted(wanted.items())), where


def compare_workspace(plan: distgemm.Plan, formula: str, waiting: str, symbols: dict[str, int], where: str) -> None:
    w = value(waiting, **symbols) if waiting else 0
    found = {plan.workspace_bytes(rank) for rank in range(plan.world_size)}
    assert found == {value(formula, W=w, **symbols)}, where


def compare(
    name: str, mesh: tuple[int, ...], options: dict[str, object], shape: str = "aligned", **more: object
) -> None:
    rows = formulas()["schedules"]
    moves, workspace, waiting = rows[name].values()
    scheduler = distgemm.get_schedule(name, mesh=mesh, **options)  # type: ignore[arg-type]
    problem = problem_for(scheduler.grid, shape, **more)
    plan = distgemm.make_plan(problem, scheduler)
    sides = SIDES.get(name, "N")
    symbols = dict(zip(sides, mesh, strict=True)) | {
        "c": int(str(options["chunks"])),
        "F": int(problem.partial_dtype != problem.out_dtype),
    }
    # The route of a level of a nested schedule is that of its first move.
    by = {key: str(option) for key, option in options.items()}
    by |= {key: rows[option]["moves"][0]["route"] for key, option in by.items() if option in rows}
    where = f"{name} on {mesh} with {options}, {problem}"
    compare_links(plan, moves, sides, symbols | sizes(problem, scheduler.grid), by, where)
    chosen = waiting.keys() & {"", *map(str, options.values())}
    assert len(chosen) == bool(waiting), where
    needed = waiting[chosen.pop()] if chosen else ""
    compare_workspace(plan, workspace, needed, symbols | sizes(problem, scheduler.grid, 16), where)


def test_every_schedule_has_a_formula_and_every_formula_a_schedule():
    assert sorted(formulas()["schedules"]) == distgemm.list_schedules()


@pytest.mark.sample(10)
@pytest.mark.parametrize("partial", [None, "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_plans_equal_the_formulas(name: str, shape: str, partial: str | None):
    count = 0
    for case, mesh, options in cases():
        if case == name:
            compare(name, mesh, options, shape, partial_dtype=partial)
            count += 1
    assert count >= 6


@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_element_types_and_batches(name: str):
    mesh = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}[schedule_mesh_rank(name)]
    options = {**schedule_options(name), "chunks": 2}
    compare(name, mesh, options, l=3, dtype="float16", out_dtype="float32", partial_dtype="float32")
    compare(name, mesh, options, "padded", l=2, dtype="float8_e4m3fn", out_dtype="float16", partial_dtype="bfloat16")
    compare(name, mesh, options, "padded", dtype="float64", partial_dtype="float32")


@pytest.mark.sample(0)
@pytest.mark.parametrize("partial", [None, "float32"])
def test_bounded_is_at_most_full(partial: str | None):
    for name, mesh, options in cases():
        if name == "tensor_parallel_2d_nested":
            continue
        scheduler = distgemm.get_schedule(name, mesh=mesh, **options)  # type: ignore[arg-type]
        problem = problem_for(scheduler.grid, partial_dtype=partial)
        full, bounded = (distgemm.make_plan(problem, scheduler, workspace=kind) for kind in ("full", "bounded"))
        assert full.link_bytes() == bounded.link_bytes()
        for rank in range(full.world_size):
            assert bounded.workspace_bytes(rank) <= full.workspace_bytes(rank), f"{name} on {mesh} with {options}"


LEVELS = {
    "chain": ("reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"),
    "pairwise": ("reduce_scatter_1d_pairwise_a",),
    "gather of A": ("all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"),
    "gather of B": ("all_gather_1d_tiling_cd_rotating_b",),
    "to owners": ("all_to_all_1d_rotating_d", "all_to_all_1d_pairwise_xor_d"),
    "from holders": ("all_to_all_1d_rotating_a", "all_to_all_1d_pairwise_xor_a"),
}
"""Schedules for what the tables of nested schedules call a level."""

ONE_BOX = {"gather of A": "tiling_b", "gather of B": "_a"}
"""Inside a gather, only these leave the rows or columns of D that a rank holds in one piece."""


NESTED = [f"{across}, {inside}" for across in ("chain", "pairwise") for inside in ("chain", "pairwise")]
NESTED += ["gather of A, chain", "gather of B, chain", "gather of B, pairwise"]


def nested() -> list[tuple[str, str, str]]:
    """The row, and the schedules across and inside."""
    found = []
    for row in NESTED:
        levels = row.split(", ")
        for across, inside in itertools.product(*(LEVELS[level] for level in levels)):
            if ONE_BOX.get(levels[0], "") in inside:
                found.append((row, across, inside))
    return found


def test_every_nested_reduction_has_a_formula():
    assert list(formulas()["nested_reductions"]) == NESTED


@pytest.mark.sample(2)
@pytest.mark.parametrize(("shape", "partial"), [("aligned", None), ("padded", "float32"), ("padded", None)])
@pytest.mark.parametrize(("row", "across", "inside"), nested())
def test_nested_reductions_equal_the_formulas(row: str, across: str, inside: str, shape: str, partial: str | None):
    moves, workspace, waiting = formulas()["nested_reductions"][row].values()
    for mesh, chunks in itertools.product([*MESHES[2], (3, 2), (2, 4), (3, 3), (4, 4)], (1, 2, 3)):
        scheduler = distgemm.get_schedule(
            "tensor_parallel_2d_nested", mesh=mesh, across=across, inside=inside, chunks=chunks
        )
        problem = problem_for(scheduler.grid, shape, partial_dtype=partial)
        plan = distgemm.make_plan(problem, scheduler)
        symbols = {"H": mesh[0], "L": mesh[1], "c": chunks, "F": int(problem.partial_dtype != problem.out_dtype)}
        route = {"gather": formulas()["schedules"][across]["moves"][0]["route"]}
        where = f"{across} across {inside} on {mesh}, {chunks} chunks, {problem}"
        compare_links(plan, moves, "HL", symbols | sizes(problem, scheduler.grid), route, where)
        compare_workspace(plan, workspace, waiting[""], symbols | sizes(problem, scheduler.grid, 16), where)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("shape", "partial"), [("aligned", None), ("padded", "float32")])
@pytest.mark.parametrize("row", formulas()["nested_all_to_alls"])
def test_nested_all_to_alls_equal_the_formulas(row: str, shape: str, partial: str | None):
    """What leaves each rank for each other one; and every plan is proved."""
    pairs = itertools.product(*(LEVELS[level] for level in row.split(", ")))
    for across, inside in ((a, i) for a, i in pairs if "tiling_b" not in a):  # D would be no box
        for mesh, chunks in itertools.product([(2, 2), (2, 4), (4, 2), (3, 2), (2, 1), (1, 2)], (1, 2)):
            if any("xor" in name and side == 3 for name, side in ((across, mesh[0]), (inside, mesh[1]))):
                continue
            both = {"across": across, "inside": inside, "chunks": chunks}
            scheduler = distgemm.get_schedule("tensor_parallel_2d_nested", mesh=mesh, **both)  # type: ignore[arg-type]
            problem = problem_for(scheduler.grid, shape, partial_dtype=partial)
            plan = distgemm.make_plan(problem, scheduler)
            symbols = {"H": mesh[0], "L": mesh[1]} | sizes(problem, scheduler.grid)
            route = {"gather": formulas()["schedules"][across]["moves"][0]["route"]}
            moves = formulas()["nested_all_to_alls"][row]
            compare_links(plan, moves, "HL", symbols, route, f"{both} on {mesh}, {problem}")
            plan.verify()


@pytest.mark.sample(1)
@pytest.mark.parametrize("partial", [None, "float32"])
def test_nested_all_reduces_add_the_final_copies(partial: str | None):
    formula = formulas()["nested_all_reduce"]
    reductions = {row: each for row, each in formulas()["nested_reductions"].items() if "gather" not in row}
    for row, each in reductions.items():
        workspace, waiting = each["workspace"], each["waiting"][""]
        levels = [list(LEVELS[level]) for level in row.split(", ")]
        options = [names + [name.replace("reduce_scatter", "all_reduce") for name in names] for names in levels]
        for across, inside, mesh, chunks in itertools.product(*options, [(2, 2), (2, 3), (3, 2), (1, 2)], (1, 2)):
            everywhere = [name.startswith("all_reduce") for name in (across, inside)]
            if everywhere == [True, False] and ("tiling_b" in across) == ("tiling_b" in inside):
                continue  # what a rank would hold of D is not one box
            scheduler = distgemm.get_schedule(
                "tensor_parallel_2d_nested", mesh=mesh, across=across, inside=inside, chunks=chunks
            )
            problem = problem_for(scheduler.grid, partial_dtype=partial)
            plan = distgemm.make_plan(problem, scheduler)
            owners = math.prod(side for side, all_of_it in zip(mesh, everywhere, strict=True) if all_of_it)
            symbols = {"H": mesh[0], "L": mesh[1], "c": chunks, "o": owners} | sizes(problem, scheduler.grid, 16)
            symbols["F"] = int(problem.partial_dtype != problem.out_dtype)
            compare_workspace(plan, f"{workspace} + {formula}", waiting, symbols, f"{across} {inside} {mesh}")


ACROSS_HOSTS = {
    "all-gather": ("all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a"),
    "reduce-scatter": (CHAIN, "reduce_scatter_1d_pairwise_a", CHAIN),
    "all-reduce": (
        "all_reduce_1d_tiling_a_rotating_c",
        "all_reduce_1d_pairwise_a",
        "all_reduce_1d_tiling_a_rotating_c",
    ),
}
"""For each pattern: the schedule that is nested in itself, the flat direct one, and the flat ring."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", ACROSS_HOSTS)
def test_bytes_across_hosts_equal_the_formulas(pattern: str):
    assert list(formulas()["across_hosts"]) == list(ACROSS_HOSTS)
    nested, direct, ring = ACROSS_HOSTS[pattern]
    for hosts, local, chunks in itertools.product((2, 3, 4), (1, 2, 3, 4), (1, 2)):
        mesh, ranks = (hosts, local), hosts * local
        both = {"across": nested, "inside": nested}
        schedulers = {
            "nested": distgemm.get_schedule("tensor_parallel_2d_nested", mesh=mesh, chunks=chunks, **both),
            "direct": distgemm.get_schedule(direct, ranks, chunks=chunks),
            "ring": distgemm.get_schedule(ring, ranks, chunks=chunks),
        }
        for name, scheduler in schedulers.items():
            problem = problem_for(scheduler.grid, partial_dtype="float32")
            plan = distgemm.make_plan(problem, scheduler, ranks_per_host=local)
            symbols = {"H": hosts, "L": local} | sizes(problem, scheduler.grid)
            across, inside = plan.link_bytes("across"), plan.link_bytes("inside")
            wanted = value(formulas()["across_hosts"][pattern][name], **symbols)
            assert sum(across.values()) == wanted, (name, mesh, chunks)
            assert across | inside == plan.link_bytes() and not across.keys() & inside.keys()
            assert all((src // local == dst // local) for src, dst in inside)


ONE_MOVES = [name for name in distgemm.list_schedules() if re.match("all_gather|reduce_scatter", name)]


@pytest.mark.parametrize("across", ONE_MOVES)
def test_nested_schedules_bring_nothing_to_a_host_twice(across: str):
    """Whatever route they take across hosts and inside: no host gets more than what its ranks lack."""
    hosts, local = 4, 2
    inside = across.replace("ring", "tiling_cd_rotating")
    scheduler = distgemm.get_schedule("tensor_parallel_2d_nested", mesh=(hosts, local), across=across, inside=inside)
    problem = problem_for(scheduler.grid, partial_dtype="float32")
    plan = distgemm.make_plan(problem, scheduler, ranks_per_host=local)
    moved = "E" if "reduce_scatter" in across else "B" if across.endswith("_b") else "A"
    most = (hosts - 1) * sizes(problem, scheduler.grid)[moved] // hosts
    for host in range(hosts):
        assert sum(size for (_, dst), size in plan.link_bytes("across").items() if dst // local == host) == most


@pytest.mark.parametrize("results", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"])
def test_results_that_wait_take_as_many_slots_as_a_plan_says(name: str, results: int):
    """Or as there are of them; bytes on links do not depend on it, and every such plan is right."""
    ranks, chunks = 3, 4
    problem = distgemm.GemmProblem(m=32 * ranks * chunks, n=64, k=16 * ranks)
    plan, two = (
        distgemm.make_plan(problem, name, ranks, chunks=chunks, send_slots=count, sync="barrier")
        for count in (results, 2)
    )
    arrive = (ranks - 1) * chunks
    if "rotating_c" in name:
        assert len(plan.slots[0]) == arrive + min(results, chunks)
    else:  # a rank's own product comes in between, so that fewer may do
        assert arrive < len(plan.slots[0]) <= arrive + min(results, arrive)
    assert plan.link_bytes() == two.link_bytes()
    plan.verify()
    with pytest.raises(ValueError, match="send_slots is an integer >= 1, got 0"):
        distgemm.make_plan(problem, name, ranks, send_slots=0)
