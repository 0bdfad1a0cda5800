"""Bytes per link and workspace equal the closed formulas of docs/formulas.md, which are read from there."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

import distgemm
from distgemm.problem import DTYPE_BYTES
from distgemm.schedulers import schedule_mesh_rank, schedule_options

PAGE = Path(__file__).parents[2] / "docs" / "formulas.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the formulas are in docs/, which a source archive lacks")

MESHES = {
    1: [(size,) for size in range(1, 9)],
    2: [(1, 1), (2, 2), (2, 3), (4, 2), (1, 3), (3, 1)],
    3: [(1, 1, 1), (2, 2, 2), (2, 1, 3), (1, 2, 3), (3, 2, 1), (1, 1, 3)],
}
SIDES = {
    "tensor_parallel_2d": "PQ",
    "tensor_parallel_2d_rs": "QS",
    "tensor_parallel_3d": "PQS",
    "tensor_parallel_2d_nested": "HL",
}
GATHERS = ("direct", "ring", "bidirectional_full", "bidirectional_split")
OPTIONS = {"gather": GATHERS, "reduce": ("chain", "pairwise")}


@cache
def table(title: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by their first cell."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


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
    after, before, every = (value(cell, X=extent, T=share) for cell in table("Routes")[route])
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


def problem_for(grid: distgemm.TileCoord, **more: object) -> distgemm.GemmProblem:
    # Tiles have an even number of rows, as half a tile may travel; sizes of tiles are no multiples of 256.
    return distgemm.GemmProblem(m=grid.m * 6, n=grid.n * 10, k=grid.k * 7, **more)  # type: ignore[arg-type]


def sizes(problem: distgemm.GemmProblem) -> dict[str, int]:
    m, n, k, batches = problem.m, problem.n, problem.k, problem.l
    element, out, partial = (
        DTYPE_BYTES[str(dtype)] for dtype in (problem.dtype, problem.out_dtype, problem.partial_dtype)
    )
    a, b, d = batches * m * k * element, batches * n * k * element, batches * m * n * out
    return {"A": a, "B": b, "D": d, "E": d // out * partial}


def compare(name: str, mesh: tuple[int, ...], options: dict[str, object], **more: object) -> None:
    rows = table("Schedules")
    moves, workspace, waiting = rows[name]
    scheduler = distgemm.get_schedule(name, mesh=mesh, **options)  # type: ignore[arg-type]
    problem = problem_for(scheduler.grid, **more)
    plan = distgemm.make_plan(problem, scheduler)
    sides = SIDES.get(name, "N")
    symbols = {**sizes(problem), **dict(zip(sides, mesh, strict=True)), "c": int(str(options["chunks"]))}
    wanted: Counter[tuple[int, int]] = Counter()
    for move in moves.split("; "):
        match = re.fullmatch(r"(\S+) by `(\w+)` along (\w)", move)
        assert match, move
        share, route, axis = match.groups()
        route = str(options.get(route, route))
        if route in rows:  # a nested schedule's: the route of its first move
            route = rows[route][0].split("`")[1]
        wanted += links(mesh, sides.index(axis), route, value(share, **symbols))
    where = f"{name} on {mesh} with {options}"
    assert plan.link_bytes() == dict(sorted(wanted.items())), where
    if problem.partial_dtype == problem.out_dtype:
        if ": " in waiting:
            by_route = dict(part.split(": ") for part in waiting.split("; "))
            waiting = by_route[f"`{options['reduce']}`"]
        w = value(waiting, **symbols) if waiting else 0
        found = {plan.workspace_bytes(rank) for rank in range(plan.world_size)}
        assert found == {value(workspace, W=w, **symbols)}, where


def test_every_schedule_has_a_formula_and_every_formula_a_schedule():
    assert sorted(table("Schedules")) == distgemm.list_schedules()


@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_plans_equal_the_formulas(name: str):
    count = 0
    for case, mesh, options in cases():
        if case == name:
            compare(name, mesh, options)
            count += 1
    assert count >= 6


@pytest.mark.parametrize("name", distgemm.list_schedules())
def test_element_types_and_batches(name: str):
    mesh = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}[schedule_mesh_rank(name)]
    options = {**schedule_options(name), "chunks": 2}
    compare(name, mesh, options, l=3, dtype="float16", out_dtype="float32", partial_dtype="float32")
    compare(name, mesh, options, dtype="bfloat16", out_dtype="bfloat16", partial_dtype="float32")


def test_bounded_is_at_most_full():
    for name, mesh, options in cases():
        if name == "tensor_parallel_2d_nested":
            continue
        scheduler = distgemm.get_schedule(name, mesh=mesh, **options)  # type: ignore[arg-type]
        problem = problem_for(scheduler.grid)
        full, bounded = (distgemm.make_plan(problem, scheduler, workspace=kind) for kind in ("full", "bounded"))
        assert full.link_bytes() == bounded.link_bytes()
        for rank in range(full.world_size):
            assert bounded.workspace_bytes(rank) <= full.workspace_bytes(rank), f"{name} on {mesh} with {options}"


def test_nested_reductions_move_by_the_same_rule():
    ring, pairwise = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
    routes = {ring: "chain", pairwise: "pairwise"}
    for mesh, across, inside, chunks in itertools.product(MESHES[2], routes, routes, (1, 2)):
        scheduler = distgemm.get_schedule(
            "tensor_parallel_2d_nested", mesh=mesh, across=across, inside=inside, chunks=chunks
        )
        problem = problem_for(scheduler.grid)
        hosts, ranks = mesh
        wanted = links(mesh, 0, routes[across], sizes(problem)["E"] // (hosts * ranks))
        wanted += links(mesh, 1, routes[inside], sizes(problem)["E"] // ranks)
        plan = distgemm.make_plan(problem, scheduler)
        assert plan.link_bytes() == dict(sorted(wanted.items())), (mesh, across, inside)
