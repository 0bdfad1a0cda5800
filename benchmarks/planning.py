"""How long planning and verifying take, by world size: ``python benchmarks/planning.py [--cubes|--own] [--json FILE]``.

Times are CPU times of the process, the best of three on a cold plan cache (one try from 100,000 ops on). "new m" is the
plan of another number of rows behind it, with the ops of one rank and the fingerprint that ranks compare. "few rows" is
the same for numbers of rows that leave tiles empty, and other tiles than all numbers of rows before: the slowest of
them. A look-up is a second ``make_plan`` with equal arguments.

With ``--own`` the figures are those of one rank of many: its own ops from the name of the schedule on, the proof, and
the fingerprint, each in a new process, with the peak of its memory. Tiles have 16 rows and 16 columns.
"""

from __future__ import annotations

import json
import platform
import resource
import timeit
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import inf, prod
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import distgemm
from distgemm.plan import derive
from distgemm.plan.movement import tile_edges
from distgemm.schedulers import registry

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 72)
CUBES = (1, 2, 4, 6, 8)
FEW = 12
"""Most numbers of rows that leave tiles empty. The first one finds what all of them have in common."""
FIGURES = ("plan_ms", "verify_ms", "new_m_ms", "few_rows_ms", "us_per_op", "look_up_us")


def measure(name: str, mesh: tuple[int, ...], chunks: int) -> dict[str, object]:
    """Milliseconds to plan and verify, microseconds of a look-up."""
    problem = distgemm.GemmProblem(m=8192, n=57344, k=8192)
    others = [replace(problem, m=rows) for rows in range(4097, 8192, 455)]
    scheduler = distgemm.get_schedule(name, mesh=mesh, chunks=chunks)
    every = (replace(problem, m=rows) for rows in range(1, 2 * scheduler.grid.m))
    few = [other for other in every if has_empty_tile(other, scheduler)]
    few = few[:: -(-len(few) // FEW) or 1]
    restricting: dict[int, float] = {}
    planning, resizing, verifying, ops = [], [], [], 0
    while len(planning) < (3 if ops < 100_000 else 1):
        derive.forget_plans()
        start = process_time()
        plan = distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks)
        planned = process_time()
        plan.verify()
        verified = process_time()
        for other in others[:1] + others:  # the first one finds what all plans of the structure have in common
            resizing.append(new_rows(other, name, mesh, chunks))
        for other in few:
            restricting[other.m] = min(restricting.get(other.m, inf), new_rows(other, name, mesh, chunks))
        planning.append(planned - start)
        verifying.append(verified - planned)
        ops = sum(map(len, plan.rank_ops))
    look_up = timeit.timeit(lambda: distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks), number=2000) / 2000
    return {
        "schedule": name,
        "mesh": mesh,
        "world_size": prod(mesh),
        "chunks": chunks,
        "ops": ops,
        "plan_ms": min(planning) * 1e3,
        "verify_ms": min(verifying) * 1e3,
        "new_m_ms": median(resizing) * 1e3,
        "few_rows_ms": max(list(restricting.values())[1:]) * 1e3 if len(restricting) > 1 else None,
        "us_per_op": (min(planning) + min(verifying)) / ops * 1e6,
        "look_up_us": look_up * 1e6,
    }


OWN: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("all_gather_1d_tiling_cd_rotating_a", (128,)),
    ("all_gather_1d_tiling_cd_rotating_a", (512,)),
    ("all_gather_1d_ring_a", (512,)),
    ("reduce_scatter_1d_tiling_a_rotating_c", (512,)),
    ("reduce_scatter_1d_pairwise_a", (512,)),
    ("tensor_parallel_2d_nested", (8, 64)),
    ("tensor_parallel_2d_nested", (64, 72)),
    ("tensor_parallel_2d_rs", (64, 72)),
    ("tensor_parallel_3d", (16, 16, 16)),
)


def measure_own(name: str, mesh: tuple[int, ...], chunks: int) -> dict[str, object]:
    """Milliseconds that one rank needs, the best of three, and the peak of memory of this process in MB."""
    tiles = distgemm.get_schedule(name, mesh=mesh, chunks=chunks).grid
    problem = distgemm.GemmProblem(m=16 * tiles.m, n=16 * tiles.n, k=16 * tiles.k)
    rank = prod(mesh) // 2 + 1
    found: dict[str, list[float]] = {"own_ms": [], "proof_ms": [], "fingerprint_ms": []}
    for _ in range(3):
        derive.forget_plans()
        registry._built.clear()
        times = [process_time()]
        plan = distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks)
        ops = len(plan.ops(rank))
        times.append(process_time())
        plan.verify()
        times.append(process_time())
        assert plan.fingerprint
        times.append(process_time())
        for figures, (start, end) in zip(found.values(), pairwise(times), strict=True):
            figures.append((end - start) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"schedule": name, "mesh": mesh, "world_size": prod(mesh), "chunks": chunks, "ops_of_rank": ops}
    return {**row, **{figure: min(times) for figure, times in found.items()}, "peak_mb": peak}


def has_empty_tile(problem: distgemm.GemmProblem, scheduler: distgemm.DistributedTileScheduler) -> bool:
    """Whether a tile along M has no rows."""
    return any(low == high for low, high in pairwise(tile_edges(problem, scheduler)[0]))


def new_rows(problem: distgemm.GemmProblem, name: str, mesh: tuple[int, ...], chunks: int) -> float:
    """Seconds for what rank 0 needs of the plan of another number of rows."""
    start = process_time()
    plan = distgemm.make_plan(problem, name, mesh=mesh, chunks=chunks)
    assert plan.ops(0) is not None and plan.fingerprint
    return process_time() - start


def main(
    output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    chunks: int = 1,
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks; may be repeated.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Only these schedules; may be repeated.")] = None,
    cubes: Annotated[bool, typer.Option(help="The 3D schedule on cubes of up to 512 ranks, instead of 1D.")] = False,
    own: Annotated[bool, typer.Option(help="What one rank of hundreds or thousands needs.")] = False,
) -> None:
    """Print a table of all 1D schedules, or of the 3D one, by world size."""
    names = schedule or [name for name in distgemm.list_schedules() if "_1d_" in name]
    cases: list[tuple[str, tuple[int, ...]]] = [
        (name, (size,))
        for name in names
        for size in ranks or WORLD_SIZES
        if "xor" not in name or size & (size - 1) == 0
    ]
    if cubes:
        cases = [("tensor_parallel_3d", (side,) * 3) for side in CUBES]
    console = Console(stderr=True)
    if own:
        # A new process for each case, because of its peak of memory.
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
            of_cases = [processes.submit(measure_own, name, mesh, chunks) for name, mesh in OWN]
            rows = [of_case.result() for of_case in track(of_cases, "planning", console=console)]
        table = Table("schedule", "mesh", "ops of a rank", "own ops, ms", "proof, ms", "fingerprint, ms", "peak, MB")
        for row in rows:
            figures = (f"{row[key]:.1f}" for key in ("own_ms", "proof_ms", "fingerprint_ms", "peak_mb"))
            table.add_row(str(row["schedule"]), str(row["mesh"]), str(row["ops_of_rank"]), *figures)
    else:
        rows = [measure(name, mesh, chunks) for name, mesh in track(cases, "planning", console=console)]
        table = Table(
            "schedule", "ranks", "ops", "plan ms", "verify ms", "new m ms", "few rows ms", "us/op", "look-up us"
        )
        for row in rows:
            figures = ("-" if row[key] is None else f"{row[key]:.1f}" for key in FIGURES)
            table.add_row(str(row["schedule"]), str(row["world_size"]), str(row["ops"]), *figures)
    Console(width=120).print(table)
    if output is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        output.write_text(json.dumps({"benchmark": "planning", **machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
