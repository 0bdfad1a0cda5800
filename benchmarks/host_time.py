"""What calls and replays of executables cost the host: us, while the GPU is kept busy with something else.

    python benchmarks/host_time.py --ranks 2 --json benchmarks/results/host_time_2xh200.json
    python benchmarks/host_time.py --ranks 2 --auto --json benchmarks/results/host_time_auto_2xh200.json

The second takes the layers of Llama, as ``schedule="auto"`` does them, and also says how long a replay takes the GPU.
"call" is an eager call on tensors that have come before; "replay" that of a captured one; "graph" the launch of its
graph by torch alone, which is what of it the CUDA runtime cannot save.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import distgemm
from distgemm.bench.cases import LAYERS, cases
from distgemm.measure.models import MODELS
from distgemm.runtime.launch import launch
from distgemm.schedulers import PATTERNS
from distgemm.tune import config_of

GATHER, CHAIN, PAIRWISE = (
    "all_gather_1d_tiling_cd_rotating_a",
    "reduce_scatter_1d_tiling_a_rotating_c",
    "reduce_scatter_1d_pairwise_a",
)
CASES: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    (GATHER, (2048, 1280, 8192), {}),
    (GATHER, (2048, 1280, 8192), {"gemm_streams": 1, "provider": "cublas"}),
    (GATHER, (2048, 1280, 8192), {"gemm_streams": 1, "provider": "cublas", "wait_by": "kernel"}),
    (CHAIN, (2048, 8192, 1024), {"chunks": 2}),
    (CHAIN, (2048, 8192, 1024), {"chunks": 2, "gemm_streams": 1, "wait_by": "kernel"}),
    (PAIRWISE, (2048, 8192, 1024), {"gemm_streams": 1}),
    (PAIRWISE, (2048, 8192, 1024), {"gemm_streams": 1, "mechanism": "store"}),
    (GATHER, (2048, 1280, 8192), {"execution": "single_kernel", "config": "128x128x64_2x1_pingpong"}),
    (
        CHAIN,
        (2048, 8192, 1024),
        {"execution": "single_kernel", "mechanism": "store", "config": "128x128x64_2x1_pingpong"},
    ),
]
"""Schedule, extents (n of a gather, k of a reduction for each rank), options."""
BUSY = 40_000_000
"""Clock cycles for which the GPU sleeps first, so that calls queue up behind."""
TOKENS = (2048, 8192)
FREE, SHARE = 20.0, 0.05
"""us, or share of what it takes the GPU, that a replay may cost the host."""


def timed(run: Callable[[], object], calls: int = 40, rounds: int = 9) -> float:
    """us per call, median over rounds."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def prepared(exe: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Shards of A, B and D on this rank, and a recorded call of them; eager ones are recorded, too."""
    a, b, d = (torch.randn(exe.plan.shard_shape(name, dist.get_rank()), device="cuda").bfloat16() for name in "ABD")
    for _ in range(4):  # eager, and recorded for both halves of the workspace
        exe(a, b, out=d)
    return (a, b, d), exe.capture(a, b, out=d)


def measure() -> list[dict[str, Any]]:
    """The rows, on each rank."""
    ranks = dist.get_world_size()
    rows = []
    for schedule, (m, n, k), options in CASES:
        n, k = (n * ranks, k) if schedule == GATHER else (n, k * ranks)
        exe: Any = distgemm.compile(distgemm.GemmProblem(m, n, k), schedule, **options)
        (a, b, d), replay = prepared(exe)
        graphs = itertools.cycle(replay._graphs)  # the halves in turn, on all ranks alike
        us = {
            "call": timed(lambda exe=exe, a=a, b=b, d=d: exe(a, b, out=d)),
            "replay": timed(replay),
            "graph": timed(lambda graphs=graphs: next(graphs).replay()),
        }
        rows.append({"schedule": schedule, "m": m, "n": n, "k": k, "options": options, "us": us})
    return rows


def measure_auto() -> list[dict[str, Any]]:
    """The rows of what ``schedule="auto"`` does, on each rank."""
    rows = []
    for case in cases(list(MODELS), LAYERS, PATTERNS, TOKENS, dist.get_world_size(), tp=8):
        exe: Any = distgemm.compile(case.problem, "auto", pattern=case.pattern)
        _, replay = prepared(exe)
        us = {"replay": timed(replay), "gpu": on_gpu(replay)}
        rows.append(
            {"schedule": str(case), "m": case.m, "n": case.n, "k": case.k, "options": str(config_of(exe)), "us": us}
        )
    return rows


def on_gpu(replay: Callable[[], object], replays: int = 20, rounds: int = 5) -> float:
    """us of the GPU per replay, of some behind one another, median over rounds."""
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(BUSY)
        replay()
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / replays * 1e3)
    return statistics.median(found)


def main(
    ranks: Annotated[int, typer.Option(help="GPUs.")] = 2,
    auto: Annotated[bool, typer.Option("--auto", help="Layers of Llama, as auto does them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Print what a call, a replay and the launch of its graph cost the host, us; the slowest rank."""
    of_ranks = launch(measure_auto if auto else measure, ranks, backend="nccl", timeout=300)
    rows = of_ranks[0]
    for number, row in enumerate(rows):
        row["us"] = {name: round(max(found[number]["us"][name] for found in of_ranks), 1) for name in row["us"]}
    table = (
        Table("row", "done by", "replay", "GPU") if auto else Table("schedule", "options", "call", "replay", "graph")
    )
    for row in rows:
        options = row["options"]
        if not auto:
            options = ", ".join(f"{key}={value}" for key, value in options.items())
        table.add_row(row["schedule"], options, *(f"{us:.1f}" for us in row["us"].values()))
    console = Console(width=160)
    console.print(table)
    if auto:
        within = [row["us"]["replay"] <= max(FREE, SHARE * row["us"]["gpu"]) for row in rows]
        console.print(f"{sum(within)} of {len(rows)} rows within {FREE:.0f} us or {SHARE:.0%} of what the GPU takes")
    if json_file:
        about = {
            "benchmark": "host_time",
            "gpus": ranks,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        json_file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
