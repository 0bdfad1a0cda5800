"""Layers of Llama over several GPUs: schedules of ours against NCCL with cuBLAS and torch's fused ops.

    python benchmarks/tensor_parallel.py --ranks 4 --models llama-3-70b --m 8192 --json out.json

With fewer than --tp ranks, N and K of each rank stay those of --tp ranks: the local product is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from distgemm.bench import Method, Operation, measure, schedule_method, timeline, torch_methods
from distgemm.gemm import GemmTensors
from distgemm.gemm.tune import tune
from distgemm.models import MODELS
from distgemm.problem import GemmProblem
from distgemm.runtime.launch import launch

SCHEDULES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "ag+gemm": [
        ("all_gather_1d_tiling_cd_rotating_a", {}),
        ("all_gather_1d_tiling_cd_rotating_a", {"chunks": 2}),
        ("all_gather_1d_tiling_cd_rotating_a", {"provider": "cublas"}),
        ("all_gather_1d_tiling_cd_rotating_a", {"provider": "cublas", "chunks": 2}),
    ],
    "gemm+rs": [
        ("reduce_scatter_1d_tiling_a_rotating_c", {"chunks": 2}),
        ("reduce_scatter_1d_tiling_a_rotating_c", {"chunks": 4}),
        ("reduce_scatter_1d_pairwise_a", {}),
        ("reduce_scatter_1d_pairwise_a", {"provider": "cublas"}),
        ("reduce_scatter_1d_tiling_a_rotating_c", {"provider": "cublas", "chunks": 2}),
    ],
}


def rank_main(cases: list[tuple[str, str, GemmProblem]], traced: bool = False) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for label, op, problem in cases:
        operation = Operation(problem, op, group, device)
        methods: list[Method] = [schedule_method(operation, name, **options) for name, options in SCHEDULES[op]]
        times = measure(operation, methods + torch_methods(operation))
        rows.append({"layer": label, "op": op, "m": problem.m, "n": problem.n, "k": problem.k, "ms": times})
        if traced:
            rows[-1]["timelines"] = {method.name: timeline(operation, method) for method in methods}
        if dist.get_rank() == 0:
            print(label, {name: round(ms, 4) for name, ms in times.items()}, flush=True)
    return rows


def tune_chunks(cases: list[tuple[str, str, GemmProblem]], ranks: int) -> None:
    """Measures configurations for the GEMMs that the schedules split these problems into, on one GPU."""
    for _, op, p in cases:
        n, k = (p.n // ranks, p.k) if op == "ag+gemm" else (p.n, p.k // ranks)
        for chunks in (1, 2, 4):
            m = p.m // ranks // chunks
            a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
            d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            tune(GemmTensors(a, b, d), streams=2)
            if op == "gemm+rs":
                tune(GemmTensors(a, b, d, partial=torch.randn_like(d)), streams=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=["llama-3-70b"])
    parser.add_argument("--m", type=int, nargs="+", default=[8192])
    parser.add_argument("--tune", action="store_true", help="measure configurations first")
    parser.add_argument("--timelines", action="store_true", help="with kernels and copies of rank 0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = []
    for m in args.m:
        for name in args.models:
            for layer in MODELS[name].layers:
                # Per rank as with tp ranks.
                n = layer.n * args.ranks // args.tp if layer.op == "ag+gemm" else layer.n
                k = layer.k * args.ranks // args.tp if layer.op == "gemm+rs" else layer.k
                label = f"{name.removeprefix('llama-3-')} {layer.name}"
                cases.append((label, layer.op, GemmProblem(m=m, n=n, k=k)))
    if args.tune:
        tune_chunks(cases, args.ranks)
        torch.cuda.empty_cache()
    rows = launch(rank_main, args.ranks, cases, args.timelines, backend="nccl", timeout=500)[0]
    console = Console(width=160)
    for row in rows:
        table = Table("method", "ms", "of NCCL + cuBLAS", title=f"{row['layer']}, {row['m']} x {row['n']} x {row['k']}")
        for method, ms in sorted(row["ms"].items(), key=lambda pair: pair[1]):
            table.add_row(method, f"{ms:.4f}", f"{ms / row['ms']['NCCL + cuBLAS']:.3f}")
        console.print(table)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "ranks": args.ranks, "tp": args.tp, "torch": torch.__version__}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
