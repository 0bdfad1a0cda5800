"""What calls and replays of executables cost the host, us, while the GPU is kept busy with something else.

    python benchmarks/host_time.py --ranks 2 --json FILE
    python benchmarks/host_time.py --ranks 2 --auto --json FILE
    python benchmarks/host_time.py --ranks 2 --layers --json FILE
    python benchmarks/host_time.py --ranks 2 --functions --json FILE

The second takes the layers of Llama with ``schedule="auto"``, and also says how long a replay takes the GPU. The third
takes models of 1 to 256 equal layers: one executable, other tensors and a new D in each call. The fourth calls the
functions for torch, with and without gradients, beside ``torch.matmul`` on the same tensors.

"call" is an eager call on tensors of an earlier call. "replay" is a replay of a captured call. "graph" is the launch of
its graph alone, which is the part that the CUDA runtime cannot save.
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
from distgemm import tune
from distgemm.bench.cases import LAYERS, cases
from distgemm.measure.models import MODELS
from distgemm.runtime.launch import launch
from distgemm.schedulers import PATTERNS

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
]
"""Schedule, extents (n of a gather, k of a reduction for each rank), options."""
SLEEP_CYCLES = 40_000_000
"""Clock cycles for which the GPU sleeps first, so that calls queue up behind."""
TOKENS = (2048, 8192)
TP = 8
"""Number of ranks that share a layer."""
LAYER_COUNTS = (1, 33, 80, 126, 256)
LAYER_CASES = (CASES[0], CASES[3])
HOST_LIMIT_US, HOST_LIMIT_SHARE = 20.0, 0.05
"""What a replay may cost the host: so many us, or this share of what it takes the GPU."""


def host_us(run: Callable[[], object], calls: int = 40, rounds: int = 9) -> float:
    """Time of the host for a call, us: the median of rounds."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def current_stream() -> int:
    """The handle of the current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def prepared(exe: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Shards of A, B and D on this rank, and a captured call of them. Eager calls replay graphs from now on."""
    a, b, d = (torch.randn(exe.plan.shard_shape(name, dist.get_rank()), device="cuda").bfloat16() for name in "ABD")
    for _ in range(4):  # eager, and recorded for both buffers of the workspace
        exe(a, b, out=d)
    return (a, b, d), exe.capture(a, b, out=d)


def measure() -> list[dict[str, Any]]:
    """The rows of named schedules, on each rank."""
    ranks = dist.get_world_size()
    rows = []
    for schedule, (m, n, k), options in CASES:
        n, k = (n * ranks, k) if schedule == GATHER else (n, k * ranks)
        exe: Any = distgemm.compile(distgemm.GemmProblem(m, n, k), schedule, **options)
        (a, b, d), replay = prepared(exe)
        recordings = itertools.cycle(replay.recordings)  # the buffers alternate, on all ranks in the same order
        us = {
            "call": host_us(lambda exe=exe, a=a, b=b, d=d: exe(a, b, out=d)),
            "replay": host_us(replay),
            "graph": host_us(lambda recordings=recordings: next(recordings).replay(current_stream())),
        }
        rows.append({"schedule": schedule, "m": m, "n": n, "k": k, "options": options, "us": us})
    return rows


def measure_auto() -> list[dict[str, Any]]:
    """The rows of ``schedule="auto"``, on each rank."""
    rows = []
    for case in cases(list(MODELS), LAYERS, PATTERNS, TOKENS, dist.get_world_size(), TP):
        exe: Any = distgemm.compile(case.problem, "auto", pattern=case.pattern)
        _, replay = prepared(exe)
        us = {"replay": host_us(replay), "gpu": gpu_us(replay)}
        rows.append(
            {
                "schedule": str(case),
                "m": case.m,
                "n": case.n,
                "k": case.k,
                "options": str(tune.config_of(exe)),
                "us": us,
            }
        )
    return rows


def measure_layers() -> list[dict[str, Any]]:
    """The rows of models with many equal layers, on each rank. A step calls each layer, and keeps all results."""
    rows = []
    for schedule, (m, n, k), options in LAYER_CASES:
        n, k = (n * dist.get_world_size(), k) if schedule == GATHER else (n, k * dist.get_world_size())
        exe: Any = distgemm.compile(distgemm.GemmProblem(m, n, k), schedule, **options)
        shapes = [exe.plan.shard_shape(name, dist.get_rank()) for name in "AB"]
        for layers in LAYER_COUNTS:
            tensors = [[torch.randn(shape, device="cuda").bfloat16() for shape in shapes] for _ in range(layers)]

            def step(exe: Any = exe, tensors: Any = tensors) -> list[torch.Tensor]:
                return [exe(a, b) for a, b in tensors]

            step()
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            before = exe.graphs
            steps = max(1, 40 // layers)
            us = {"step 2": host_us(step, 1, 1) / layers, "later steps": host_us(step, steps, 3) / layers}
            torch.cuda.synchronize()
            facts = {"layers": layers, "graphs": exe.graphs - before, "bytes": free - torch.cuda.mem_get_info()[0]}
            rows.append({"schedule": schedule, "m": m, "n": n, "k": k, "options": options | facts, "us": us})
            del tensors
    return rows


FUNCTIONS: list[tuple[str, str, tuple[int, int, int]]] = [
    ("all_gather_matmul", GATHER, (2048, 1280, 8192)),
    ("matmul_reduce_scatter", PAIRWISE, (2048, 8192, 1024)),
    ("matmul_all_reduce", "all_reduce_1d_pairwise_a", (2048, 8192, 1024)),
]
"""Function, schedule, extents (n of a gather, k of a reduction for each rank)."""


def measure_functions() -> list[dict[str, Any]]:
    """The rows of the functions for torch, on each rank."""
    rows = []
    for name, schedule, (m, n, k) in FUNCTIONS:
        n, k = (n * dist.get_world_size(), k) if schedule == GATHER else (n, k * dist.get_world_size())
        exe: Any = distgemm.compile(distgemm.GemmProblem(m, n, k), schedule)
        (a, b, _), replay = prepared(exe)
        recordings = itertools.cycle(replay.recordings)
        weight, turned = torch.nn.Parameter(b), b.t()
        function = getattr(distgemm, name)

        def call(x: torch.Tensor, function: Any = function, a: Any = a, schedule: str = schedule) -> Any:
            return function(a, x, group=dist.group.WORLD, schedule=schedule)

        us = {
            "launch": host_us(lambda recordings=recordings: next(recordings).replay(current_stream())),
            "matmul": host_us(lambda a=a, turned=turned: torch.matmul(a, turned)),
            "function": host_us(lambda call=call, b=b: call(b)),
            "linear, with gradients": host_us(lambda a=a, w=weight: torch.nn.functional.linear(a, w)),
            "function, with gradients": host_us(lambda call=call, w=weight: call(w)),
        }
        rows.append({"schedule": f"{name}, {schedule}", "m": m, "n": n, "k": k, "options": {}, "us": us})
    return rows


def gpu_us(replay: Callable[[], object], replays: int = 20, rounds: int = 5) -> float:
    """Time of the GPU for a replay among several in a row, us: the median of rounds."""
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        replay()
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / replays * 1e3)
    return statistics.median(found)


def main(
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    auto: Annotated[bool, typer.Option("--auto", help="The layers of Llama with schedule='auto'.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Models of 1 to 256 equal layers.")] = False,
    functions: Annotated[bool, typer.Option("--functions", help="The functions for torch.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Let all ranks share one GPU.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Print what a call, a replay and the launch of its graph cost the host on the slowest rank, us."""
    run = measure_auto if auto else measure_layers if layers else measure_functions if functions else measure
    of_ranks = launch(run, ranks, backend="nccl", timeout=300, share=share)
    rows = of_ranks[0]
    for number, row in enumerate(rows):
        row["us"] = {name: round(max(found[number]["us"][name] for found in of_ranks), 1) for name in row["us"]}
    table = Table("row", "configuration", "replay", "GPU") if auto else Table("schedule", "options", *rows[0]["us"])
    for row in rows:
        options = row["options"]
        if not auto:
            options = ", ".join(f"{key}={value}" for key, value in options.items())
        table.add_row(row["schedule"], options, *(f"{us:.1f}" for us in row["us"].values()))
    console = Console(width=160)
    console.print(table)
    if auto:
        within = [row["us"]["replay"] <= max(HOST_LIMIT_US, HOST_LIMIT_SHARE * row["us"]["gpu"]) for row in rows]
        console.print(
            f"{sum(within)} of {len(rows)} rows within {HOST_LIMIT_US:.0f} us or {HOST_LIMIT_SHARE:.0%} of GPU time"
        )
    if json_file:
        about = {
            "benchmark": "host_time",
            "gpus": 1 if share else ranks,
            "ranks": ranks,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        json_file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
