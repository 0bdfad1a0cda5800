"""Measures GEMMs on one GPU: cuBLAS and CUTLASS, whole and in chunks of rows, on one stream and on two.

    python benchmarks/gemm.py --json benchmarks/results/gemm_h200.json

The shapes are those of one of 8 ranks in the layers of Llama 3. A row of the table shows TFLOP/s. Its methods run in
CUDA graphs, interleaved round by round, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from distgemm.gemm import GemmTensors, bind
from distgemm.measure.models import MODELS
from distgemm.measure.timing import time_launches
from distgemm.tune.gemm import alternate, tune


def chunked(t: GemmTensors, chunks: int, **options: Any) -> list[Callable[..., None]]:
    """One launch for each chunk of rows."""
    return [bind(GemmTensors(a, t.b, d), **options) for a, d in zip(t.a.chunk(chunks), t.d.chunk(chunks), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+", default=[8192], help="rows of A")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share a layer")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of rows")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    shapes: dict[tuple[int, int, int], list[str]] = {}
    for m in args.m:
        for name in args.models:
            for layer in MODELS[name].layers:
                shapes.setdefault(layer.local(m, args.ranks), []).append(
                    f"{name.removeprefix('llama-3-')} {layer.name}"
                )

    rows = []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for (m, n, k), names in track(shapes.items(), description="measuring", console=Console(stderr=True)):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        b = torch.randn(n, k, device="cuda", dtype=dtype)
        tensors = GemmTensors(a, b, torch.empty(m, n, device="cuda", dtype=dtype))
        whole = tune(tensors)
        part = -(-m // args.chunks)
        chunk = tune(GemmTensors(a[:part], b, tensors.d[:part]))
        two = tune(GemmTensors(a[:part], b, tensors.d[:part]), streams=2)
        cutlass, cublas = bind(tensors), bind(tensors, provider="cublas")
        parts = {
            "cublas": chunked(tensors, args.chunks, provider="cublas"),
            "cutlass": chunked(tensors, args.chunks),
            "pair": chunked(tensors, args.chunks, streams=2),
        }
        methods: dict[str, Callable[[], None]] = {
            "cublas": cublas,
            "cutlass": cutlass,
            "cublas_chunks": lambda parts=parts: alternate(parts["cublas"], streams[:1]),
            "cutlass_chunks": lambda parts=parts: alternate(parts["cutlass"], streams[:1]),
            "cutlass_chunks_two_streams": lambda parts=parts: alternate(parts["pair"], streams),
        }
        measured = time_launches(list(methods.values()), tensors.d.device, rounds=args.rounds)
        times = dict(zip(methods, measured, strict=True))
        flop = 2 * m * n * k
        rows.append(
            {
                "m": m,
                "n": n,
                "k": k,
                "layers": names,
                "config": str(whole.config),
                "chunk_config": str(chunk.config),
                "two_streams_config": str(two.config),
                "ms": {name: round(ms, 5) for name, ms in times.items()},
                "tflops": {name: round(flop / ms / 1e9, 1) for name, ms in times.items()},
            }
        )
    report(rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "benchmark": "gemm",
            "dtype": args.dtype,
            "chunks": args.chunks,
        }
        args.json.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")


def report(rows: list[dict]) -> None:  # type: ignore[type-arg]
    table = Table(
        "layers",
        "m x n x k",
        "cuBLAS",
        "CUTLASS",
        "ratio",
        "chunks: cuBLAS",
        "CUTLASS",
        "two streams",
        "of whole",
        "config",
    )
    ratios, pairs = [], []
    for row in rows:
        rate = row["tflops"]
        ratios.append(rate["cutlass"] / rate["cublas"])
        pairs.append(rate["cutlass_chunks_two_streams"] / rate["cutlass"])
        shape = f"{row['m']}x{row['n']}x{row['k']}"
        figures = [
            rate["cublas"],
            rate["cutlass"],
            ratios[-1],
            rate["cublas_chunks"],
            rate["cutlass_chunks"],
            rate["cutlass_chunks_two_streams"],
            pairs[-1],
        ]
        table.add_row(
            ", ".join(row["layers"]), shape, *(f"{x:.3f}" if x < 2 else f"{x:.0f}" for x in figures), row["config"]
        )
    console = Console(width=200)
    console.print(table)
    console.print(f"CUTLASS / cuBLAS: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
