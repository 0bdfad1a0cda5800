"""What a warm eager call of a function costs over gloo, beside the collective and the linear that it replaces.

    python benchmarks/eager_calls.py --ranks 2 --json FILE

The GEMM is the out projection of Llama 8B, split over the ranks along K: GEMM + all-reduce, in float32. "planned" is
``distgemm.matmul_all_reduce``, "unfused" the same with ``schedule="unfused"``. ``--schedule`` adds further schedules,
by name. The methods take turns, call by call.
All ranks begin each call together. Times are those of the slowest rank, ms: the median of the calls.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import distgemm
from distgemm.measure.models import MODELS
from distgemm.runtime.launch import launch

MODEL, M = MODELS["llama-3-8b"], [64, 2048]
WARM_UP = 3


def measure(m: int, calls: int, schedules: Sequence[str]) -> dict[str, float]:
    """Milliseconds of each method."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    a, b = torch.randn(m, MODEL.hidden // ranks), torch.randn(MODEL.hidden, MODEL.hidden // ranks)

    def separate() -> None:
        dist.all_reduce(torch.nn.functional.linear(a, b))

    methods: dict[str, Callable[[], Any]] = {
        "linear + all_reduce": separate,
        "planned": lambda: distgemm.matmul_all_reduce(a, b, group=group),
        "unfused": lambda: distgemm.matmul_all_reduce(a, b, group=group, schedule="unfused"),
    }
    for schedule in schedules:
        methods[schedule] = partial(distgemm.matmul_all_reduce, a, b, group=group, schedule=schedule)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for call in range(WARM_UP + calls):
        for name, run in methods.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if call >= WARM_UP:
                times[name].append(took.item() * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 2,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each method.")] = 40,
    m: Annotated[list[int], typer.Option(min=1, help="Number of tokens.")] = M,
    schedule: Annotated[list[str], typer.Option(help="A schedule to call, too.")] = [],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Measure."""
    rows = []
    for tokens in m:
        found = launch(measure, ranks, tokens, calls, schedule, timeout=300)[0]
        rows.append({"m": tokens, **found})
        ratios = [f"{name} {took:.3f} ms ({took / found['linear + all_reduce']:.2f})" for name, took in found.items()]
        print(f"m {tokens}: {', '.join(ratios)}", flush=True)
    if json_file is not None:
        command = " ".join(["python", *sys.argv])
        result = {"command": command, "torch": torch.__version__, "ranks": ranks, "rows": rows}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
