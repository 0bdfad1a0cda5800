"""Measures per-tile kernels on the layers of Llama 3: each rank has the share of one of 8.

    python benchmarks/per_tile.py --json FILE                one GPU, on which everything has arrived
    python benchmarks/per_tile.py --gpus 2 --json FILE       ranks of one process, one on each GPU
    python benchmarks/per_tile.py --build                    compile, and end

With one GPU the kernel is that of rank 0 of 8. All its flags are set before, and its peers' memory is in this GPU: what
is measured is the kernel's own cost, with stores that leave as slowly as over a link. With several GPUs the time is
that of the slowest rank. "link" is the time of the bytes that a rank sends, at 376 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distgemm.gemm.nvcc import build
from distgemm.gemm.per_tile.bind import RankGemm, Space, params_of
from distgemm.gemm.per_tile.epochs import Clock
from distgemm.gemm.per_tile.kernel import KernelTraits, Launch
from distgemm.gemm.per_tile.local import LocalRanks
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control
from distgemm.measure.models import MODELS
from distgemm.measure.timing import time_launches
from distgemm.schedulers import Pattern

TP = 8
LINK_GB_PER_S = 376.0
RATES = {"ag+gemm": 340.0, "gemm+rs": 360.0, "gemm+ar": 360.0}
"""GB/s at which a kernel's stores to peers leave."""
EPOCH = 7
"""Of all replays on one GPU."""
PINGPONG, COOPERATIVE = ((128, 128), (2, 1), True), ((128, 256), (2, 1), False)
OPTIONS: dict[Pattern, Sequence[tuple[Any, int]]] = {
    "ag+gemm": [(PINGPONG, 2), (COOPERATIVE, 2), (COOPERATIVE, 1), (((64, 128), (2, 1), True), 2)],
    "gemm+rs": [(PINGPONG, 4), (COOPERATIVE, 3), (COOPERATIVE, 2), (((64, 128), (2, 1), True), 2)],
    "gemm+ar": [(PINGPONG, 3), (COOPERATIVE, 3), (COOPERATIVE, 1), (((64, 128), (2, 1), True), 2)],
}
"""Tile, cluster and schedule of each kernel that is measured, and its epilogue stages."""


class Row(NamedTuple):
    """A layer with so many tokens: the GEMM of each rank."""

    layer: str
    pattern: Pattern
    m: int
    n: int
    k: int

    def link_us(self, ranks: int) -> float:
        """Time on the link, us."""
        sent = {"ag+gemm": self.m * self.k, "gemm+rs": self.m * self.n, "gemm+ar": 2 * self.m * self.n}[self.pattern]
        return sent * 2 * (ranks - 1) / ranks / LINK_GB_PER_S / 1e3


def rows(tokens: Sequence[int]) -> Iterator[Row]:
    for m in tokens:
        for name, model in MODELS.items():
            for layer in model.layers:
                for pattern in layer.patterns:
                    yield Row(f"{name.removeprefix('llama-3-')} {layer.name}", pattern, *layer.local(m, TP))


def kernels(pattern: Pattern, sends: bool) -> list[KernelTraits]:
    gathers = pattern == "ag+gemm"
    return [
        KernelTraits(pattern, *kind, sends=sends and gathers, epilogue_stages=stages)
        for kind, stages in OPTIONS[pattern]
    ]


def label(traits: KernelTraits) -> str:
    return f"{traits.name.split()[-1]}, {traits.epilogue_stages} epilogue stages, {traits.stages} stages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--m", type=int, nargs="+", default=[2048, 8192], help="rows of A, of all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build", action="store_true", help="compile the kernels, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    args = parser.parse_args()
    every = [traits for pattern in OPTIONS for sends in (False, True) for traits in kernels(pattern, sends)]
    build([traits.source() for traits in dict.fromkeys(every)], jobs=os.cpu_count())
    if args.build:
        return
    found = []
    for row in rows(args.m):
        us = on_one_gpu(row, args.rounds) if args.gpus == 1 else on_gpus(row, args.gpus, args.rounds)
        found.append({**row._asdict(), "link_us": row.link_us(TP if args.gpus == 1 else args.gpus), "us": us})
        print(f"{row.layer:9} {row.pattern} {row.m}x{row.n}x{row.k}", us, flush=True)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "gpus": args.gpus, "torch": torch.__version__}
        args.json.write_text(json.dumps({"benchmark": "per_tile", **about, "rows": found}, indent=1) + "\n")


def on_one_gpu(row: Row, rounds: int) -> dict[str, float]:
    """The time of cuBLAS and of each kernel, us, as the first of 8 ranks."""
    gathers = row.pattern == "ag+gemm"
    a, b = (torch.randn(x, row.k, device="cuda", dtype=torch.bfloat16) for x in (row.m, row.n))
    d = torch.empty(row.m, row.n, device="cuda", dtype=torch.bfloat16)
    launches: dict[str, Any] = {"cuBLAS": lambda: torch.mm(a, b.T, out=d)}
    kept = []
    for traits in kernels(row.pattern, sends=False):
        gemm = RankGemm(traits, tuple(range(1, TP)), row.m // TP, row.n, row.k)
        layout = Space((), 0, gemm.flags, gemm.slot_bytes)
        memory = torch.zeros(TP, layout.size, dtype=torch.uint8, device="cuda")
        own = memory[0]
        own[:8].view(torch.int64).fill_(Clock(EPOCH).word)
        own[Control.begun.offset : CONTROL_BYTES].view(torch.int64).fill_(EPOCH)
        own[layout.slots_at :].view(torch.bfloat16).normal_()  # with zeros, a GPU draws less power and runs faster
        own[layout.flags_at : layout.flags_at + 2 * gemm.flags * 8].view(torch.int64).fill_(EPOCH)
        space = Space([x.data_ptr() for x in memory], 0, gemm.flags, gemm.slot_bytes)
        shard = a[: row.m // TP] if gathers else a
        result = d[: row.m // TP] if row.pattern == "gemm+rs" else d
        rate = 0.0 if gathers else RATES[row.pattern]
        params = params_of(gemm, space, shard, b, result, gb_per_s=rate, epochs_a_replay=0)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        launches[label(traits)] = Launch(traits, params, sms, 0)
        kept.append(memory)
    times = time_launches(list(launches.values()), d.device, rounds=rounds)
    return {name: round(ms * 1e3, 1) for name, ms in zip(launches, times, strict=True)}


def on_gpus(row: Row, gpus: int, rounds: int) -> dict[str, float]:
    """The time of each kernel, us: the median over rounds of the slowest rank."""
    found = {}
    for traits in kernels(row.pattern, sends=True):
        gemm = RankGemm(traits, tuple(range(1, gpus)), row.m // gpus, row.n, row.k)
        there = LocalRanks(gemm, gpus)
        gathers, scatters = row.pattern == "ag+gemm", row.pattern == "gemm+rs"
        calls = []
        for device in there.devices:
            shape = (gemm.m if gathers else row.m, row.k)
            a, b = (torch.randn(x, device=device, dtype=torch.bfloat16) for x in (shape, (row.n, row.k)))
            d = torch.empty(gemm.m if scatters else row.m, row.n, device=device, dtype=torch.bfloat16)
            calls.append({"a": a, "b": b, "d": d})
        launches = there.launches(calls, gb_per_s=RATES[row.pattern])
        there.run(launches)
        found[label(traits)] = round(_timed(there, launches, rounds) * 1e3, 1)
    return found


def _timed(there: LocalRanks, launches: Sequence[Launch], rounds: int, calls: int = 20) -> float:
    graphs = []
    for rank, launch in enumerate(launches):
        with torch.cuda.device(there.devices[rank]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=there.streams[rank]):
                for _ in range(calls):
                    launch()
            graphs.append(graph)
    found = []
    for _ in range(rounds + 1):
        there.synchronize()
        events = []
        for rank, graph in enumerate(graphs):
            with torch.cuda.device(there.devices[rank]), torch.cuda.stream(there.streams[rank]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events.append((start, end))
        there.synchronize()
        found.append(max(start.elapsed_time(end) for start, end in events) / calls)
    return statistics.median(found[1:])  # the first round warms up


if __name__ == "__main__":
    main()
