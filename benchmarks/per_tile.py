"""Measures per-tile kernels on the layers of Llama 3: each rank has the share of one of 8, or of --tp.

    python benchmarks/per_tile.py --json FILE                one GPU, on which everything has arrived
    python benchmarks/per_tile.py --gpus 2 --json FILE       ranks of one process, one on each GPU
    python benchmarks/per_tile.py --variants ...             also variants of the fastest kernel of each row
    python benchmarks/per_tile.py --only gemm+a2a a2a+gemm   all-to-alls: qkv and out, with whole weights on each rank
    python benchmarks/per_tile.py --build                    compile, and end

With one GPU the kernel is that of rank 0 of 8. All its flags are set before, and its peers' memory is in this GPU: what
is measured is the kernel's own cost, with stores that leave as slowly as over a link. With several GPUs the time is
that of the slowest rank, and each result is compared with a product in float32. Kernels and variants of a row are
measured in turn, round by round, in random order. "link" is the time of the bytes that a rank sends, at 376 GB/s. The
row "tiny" has one tile of each shard. "_span" ends the names of kernels whose tiles span shards of few rows; "_columns"
of all-reduces of few rows whose shards are columns, and "_one" of one-shot ones. In "_split_4", 4 blocks split k.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distgemm.gemm.nvcc import build
from distgemm.gemm.per_tile.bind import RankGemm, Space, may_span, params_of
from distgemm.gemm.per_tile.epochs import TICKET_BITS
from distgemm.gemm.per_tile.kernel import GATHERING, KernelTraits, Launch
from distgemm.gemm.per_tile.local import LocalRanks
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control
from distgemm.gemm.per_tile.select import CONFIGS, FLAT, FLAT_M, ONE_SHOT, ONE_SHOT_TALL, SPANNING, traits_of
from distgemm.measure.models import MODELS
from distgemm.measure.timing import order_of_round, time_launches
from distgemm.schedulers import PATTERNS, Pattern

TP = 8
LINK_GB_PER_S = 376.0
EPOCH = 7
"""Of all replays on one GPU."""
TOLERANCE = 0.02
"""Of results, as a share of the largest one."""


class Row(NamedTuple):
    """A layer with so many tokens: the GEMM of each rank.

    Attributes:
        m: tokens of all ranks.
        n: columns of D on a rank.
        k: columns of A on a rank.
    """

    layer: str
    pattern: Pattern
    m: int
    n: int
    k: int

    def link_us(self, ranks: int) -> float:
        """Time on the link, us."""
        sent = self.m * (self.k if self.pattern in GATHERING else self.n)
        sent *= 2 if self.pattern == "gemm+ar" else 1
        return sent * 2 * (ranks - 1) / ranks / LINK_GB_PER_S / 1e3

    def shapes(self, ranks: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of a rank's A, B and D."""
        own_a, own_d = self.pattern in {"ag+gemm", "gemm+a2a"}, self.pattern in {"gemm+rs", "a2a+gemm"}
        of_n, of_k = (ranks if self.pattern == each else 1 for each in ("gemm+a2a", "a2a+gemm"))  # all of B
        m = self.m // ranks
        return (m if own_a else self.m, self.k), (self.n * of_n, self.k * of_k), (m if own_d else self.m, self.n)


@dataclass(frozen=True)
class Variant:
    """What is changed of a kernel.

    Attributes:
        name: for tables.
        traits: fields of KernelTraits.
        gemm: fields of RankGemm.
        call: arguments of params_of.
        sends: whether it is for gathers that send, which one GPU does not.
        gathers: whether the kernel hands out all of A.
    """

    name: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    gemm: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    sends: bool = False
    gathers: bool = False

    def of(self, traits: KernelTraits) -> KernelTraits:
        return replace(traits, **self.traits)

    def fits(self, traits: KernelTraits) -> bool:
        """Whether it is another kernel, or another launch, than the plain one, and one that there is."""
        try:
            return (self.of(traits) != traits or not self.traits) and (traits.sends or not self.sends)
        except ValueError:  # the stages do not fit
            return False


PLAIN = Variant("plain")
SPANS = Variant("span", gemm={"spans": True})
COLUMNS = Variant("columns", gemm={"by_columns": True})
ONE_SHOT_ROWS = 256
"""The most rows of all-reduces with shards of columns, and of one-shot ones."""
STORES = (
    *(Variant(f"{rate} GB/s", call={"gb_per_s": float(rate)}) for rate in (340, 374, 390, 0)),
    *(Variant(f"lead {lead}", gemm={"lead": lead}) for lead in (0, 8)),
    *(Variant(f"b{stages}", {"epilogue_stages": stages}) for stages in (2, 3, 4)),
)
VARIANTS: dict[Pattern, Sequence[Variant]] = {
    "ag+gemm": (
        *(Variant(f"{rate} GB/s", call={"gb_per_s": float(rate)}, sends=True) for rate in (360, 374, 0)),
        Variant("gathered", gathers=True),
    ),
    "gemm+rs": STORES,
    "gemm+ar": STORES,
    "gemm+a2a": STORES,
    "a2a+gemm": (Variant("gathered", gathers=True), *(Variant(f"group {x}", gemm={"group": x}) for x in (1, 2, 4))),
}


def rows(tokens: Sequence[int], only: Sequence[str], tp: int = TP) -> Iterator[Row]:
    for m in tokens:
        for name, model in MODELS.items():
            for layer in model.layers:
                for pattern in (*layer.patterns, *layer.all_to_alls):
                    row = Row(f"{name.removeprefix('llama-3-')} {layer.name}", pattern, *layer.local(m, tp))
                    if pattern in only or (pattern in PATTERNS and (not only or row.layer in only)):
                        yield row


def kernels(row: Row, ranks: int, sends: bool, names: Sequence[str]) -> dict[str, tuple[KernelTraits, Variant]]:
    """Those that executables have, and the same without spanning; 64x128 with clusters of 1x2 only for 64 rows.

    Of these, those whose names have one of the parts.
    """
    found = {}
    flat = (FLAT,) if row.pattern in {"gemm+rs", "gemm+ar"} and row.m // ranks <= FLAT_M else ()
    for config in (*ONE_SHOT, *ONE_SHOT_TALL) if row.pattern == "gemm+ar" and row.m <= ONE_SHOT_ROWS else ():
        one = traits_of(config, row.pattern, one_shot=True)
        found[f"{label(one)}_one"] = one, PLAIN
    for config in dict.fromkeys((*CONFIGS[row.pattern], *SPANNING.get(row.pattern, ()), *flat)):
        traits = traits_of(config, row.pattern)
        spans = may_span(traits, ranks, row.m // ranks)
        traits = replace(traits, sends=sends and traits.sends)
        if config in (*CONFIGS[row.pattern][: None if row.m // ranks <= 64 else -1], *flat):
            found[label(traits)] = traits, PLAIN
        if spans:
            found[f"{label(traits)}_span"] = traits, SPANS
        if row.pattern == "gemm+ar" and row.m <= ONE_SHOT_ROWS:
            found[f"{label(traits)}_columns"] = traits, COLUMNS
    return {label: kernel for label, kernel in found.items() if any(part in label for part in names)}


def label(traits: KernelTraits) -> str:
    """Tile, cluster, stages and epilogue stages."""
    config = traits.name.split()[-1].replace("x64_", "_").replace("cooperative", "co").replace("pingpong", "pp")
    return f"{config}_s{traits.stages}_b{traits.epilogue_stages}"


def every_kernel(measured: Sequence[Row], gpus: int, variants: bool, names: Sequence[str]) -> list[KernelTraits]:
    """All kernels that may be launched."""
    found: dict[KernelTraits, None] = {}
    for row in measured:
        for traits, _ in kernels(row, TP if gpus == 1 else gpus, gpus > 1, names).values():
            found[traits] = None
            for variant in VARIANTS[row.pattern] if variants else ():
                if variant.fits(traits):
                    found[variant.of(traits)] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--m", type=int, nargs="+", default=[2048, 8192], help="rows of A, of all ranks")
    parser.add_argument("--tp", type=int, default=TP, help="n and k of each rank are those of so many ranks")
    parser.add_argument("--only", nargs="*", default=[], help="layers or patterns, such as '8b qkv' or ag+gemm")
    parser.add_argument("--kernels", nargs="*", default=[""], help="parts of names: only kernels that have one of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", action="store_true", help="also measure variants of each row's fastest kernel")
    parser.add_argument("--tiny", action="store_true", help="also measure the smallest replays, with one GPU")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row begins")
    parser.add_argument("--build", action="store_true", help="compile the kernels, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    args = parser.parse_args()
    began = time.monotonic()
    measured = list(rows(args.m, args.only, args.tp))
    sources = [traits.source() for traits in every_kernel(measured, args.gpus, args.variants, args.kernels)]
    if args.tiny:
        sources += [traits.source() for row in TINY for traits in tiny_kernels(row).values()]
    build(list(dict.fromkeys(sources)), jobs=os.cpu_count())
    if args.build:
        return
    about = {"gpu": torch.cuda.get_device_name(), "gpus": args.gpus, "torch": torch.__version__}
    found: list[dict[str, Any]] = []
    for row in [*(TINY if args.tiny else ()), *measured]:
        if time.monotonic() - began > args.limit:
            print(f"no time for {row.layer} {row.pattern} {row.m}", flush=True)
            continue
        options = args.rounds, args.variants, args.kernels
        us = tiny(row, args.rounds) if row in TINY else measure(row, args.gpus, *options)
        found.append({**row._asdict(), "link_us": row.link_us(TP if args.gpus == 1 else args.gpus), "us": us})
        print(f"{row.layer} {row.pattern} {row.m}x{row.n}x{row.k}:", *(f"{x} {y};" for x, y in us.items()), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if args.json:  # what was found is kept if a later row fails
            args.json.write_text(json.dumps({"benchmark": "per_tile", **about, "rows": found}, indent=1) + "\n")


def measure(row: Row, gpus: int, rounds: int, variants: bool, names: Sequence[str]) -> dict[str, float]:
    """The time of each kernel, us, and that of each variant of the fastest one."""
    there = _OneGpu(row) if gpus == 1 else _Gpus(row, gpus)
    pairs = kernels(row, there.ranks, gpus > 1, names)
    found = there.time(pairs, rounds)
    if variants:
        best, plain = pairs[min(pairs, key=lambda name: found[name])]
        changed = {"again": plain}
        for one in VARIANTS[row.pattern]:
            if one.fits(best):
                changed[one.name] = replace(one, gemm={**plain.gemm, **one.gemm})
        found |= there.time({name: (best, variant) for name, variant in changed.items()}, rounds)
    return found


class _Place:
    """Where a row is measured."""

    ranks: int
    row: Row

    def gemm(self, traits: KernelTraits, variant: Variant) -> RankGemm:
        row = self.row
        gemm = RankGemm(variant.of(traits), tuple(range(1, self.ranks)), row.m // self.ranks, row.n, row.k)
        changes = dict(variant.gemm)
        if gemm.traits.one_shot or changes.keys() & {"spans", "by_columns"}:
            changes["m"] = row.m
        if "by_columns" in changes:
            changes["n"] = row.n // self.ranks
        if "lead" in changes:
            changes["lead"] = min(changes["lead"], gemm.order.units)
        return RankGemm(**{each.name: getattr(gemm, each.name) for each in fields(gemm)} | changes)


class _OneGpu(_Place):
    """The first of 8 ranks, for which everything has arrived."""

    def __init__(self, row: Row) -> None:
        self.row, self.ranks = row, TP
        _, b, _ = row.shapes(TP)
        self.a, self.b = (torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in ((row.m, row.k), b))
        self.d = torch.empty(row.m, row.n, device="cuda", dtype=torch.bfloat16)
        self.gathered = torch.empty_like(self.a)

    def launch(self, traits: KernelTraits, variant: Variant) -> tuple[Launch, torch.Tensor]:
        row, gemm = self.row, self.gemm(traits, variant)
        gathers = gemm.traits.gathers
        sizes = gemm.flags, gemm.slot_bytes, gemm.packet_bytes
        layout = Space((), 0, *sizes)
        memory = torch.zeros(TP, layout.size, dtype=torch.uint8, device="cuda")
        own = memory[0]
        own[:8].view(torch.int64).fill_(EPOCH << TICKET_BITS)
        own[Control.begun.offset : CONTROL_BYTES].view(torch.int64).fill_(EPOCH)
        own[layout.slots_at :].view(torch.bfloat16).normal_()  # with zeros, a GPU draws less power and runs faster
        own[layout.flags_at : layout.flags_at + 2 * gemm.flags * 8].view(torch.int64).fill_(EPOCH)
        own[layout.packets_at :].view(torch.int32).fill_(EPOCH)
        space = Space([x.data_ptr() for x in memory], 0, *sizes)
        (rows_of_a, _), _, (rows_of_d, _) = row.shapes(self.ranks)
        shard, result = self.a[:rows_of_a], self.d[:rows_of_d]
        call = {"gb_per_s": 0.0 if gathers else gemm.traits.gb_per_s, **variant.call}
        if variant.gathers:
            call["gathered"] = self.gathered if row.pattern == "ag+gemm" else self.gathered.view(gemm.m, -1)
        params = params_of(gemm, space, shard, self.b, result, epochs_a_replay=0, **call)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return Launch(gemm.traits, params, sms, 0), memory

    def time(self, which: Mapping[str, tuple[KernelTraits, Variant]], rounds: int) -> dict[str, float]:
        # The same work in one GEMM: of an all-to-all, this rank's rows and all of B.
        a = self.a[: self.row.m // TP] if self.row.pattern == "gemm+a2a" else self.a.view(-1, self.b.shape[1])
        d = self.d.flatten()[: len(a) * len(self.b)].view(len(a), len(self.b))
        launches: dict[str, Any] = {"cublas": lambda: torch.mm(a, self.b.T, out=d)}
        kept = []
        for name, (traits, variant) in which.items():
            launches[name], memory = self.launch(traits, variant)
            kept.append(memory)
        times = time_launches(list(launches.values()), self.d.device, rounds=rounds)
        return {name: round(ms * 1e3, 1) for name, ms in zip(launches, times, strict=True)}


TINY = tuple(Row("tiny", pattern, 128, 128, 64) for pattern in ("ag+gemm", "gemm+rs", "gemm+ar"))


def tiny_kernels(row: Row) -> dict[str, KernelTraits]:
    small = traits_of("64x128x64_2x1_pingpong", row.pattern)
    return {"plain": replace(small, sends=False)} | ({"sends": small} if small.sends else {})


def tiny(row: Row, rounds: int) -> dict[str, float]:
    """The time of the smallest replay, us, and of a kernel that fills a matrix."""
    there = _OneGpu(row)
    launches: dict[str, Any] = {"fill": functools.partial(torch.empty(row.m, row.n, device="cuda").fill_, 0.0)}
    kept = []
    for name, traits in tiny_kernels(row).items():
        launches[name], memory = there.launch(traits, PLAIN)
        kept.append(memory)
    times = time_launches(list(launches.values()), there.d.device, rounds=rounds)
    return {name: round(ms * 1e3, 2) for name, ms in zip(launches, times, strict=True)}


class _Gpus(_Place):
    """All ranks, one on each GPU."""

    def __init__(self, row: Row, gpus: int) -> None:
        self.row, self.ranks = row, gpus
        gathers, scatters = row.pattern == "ag+gemm", row.pattern == "gemm+rs"
        m = row.m // gpus
        self.calls, self.wanted = [], []
        of_a, of_b, of_d = row.shapes(gpus)
        for device in range(gpus):
            a, b = (torch.randn(x, device=f"cuda:{device}", dtype=torch.bfloat16) for x in (of_a, of_b))
            self.calls.append({"a": a, "b": b, "d": a.new_empty(of_d)})
        self.gathered = [call["a"].new_empty((row.m, row.k) if gathers else (m, gpus * row.k)) for call in self.calls]
        if row.pattern == "gemm+a2a":
            by_rows = [(call["a"].float() @ call["b"].float().T).chunk(gpus, 1) for call in self.calls]
            for columns, call in zip(zip(*by_rows, strict=True), self.calls, strict=True):
                self.wanted.append(torch.cat([x.to(call["a"].device) for x in columns]))
        elif row.pattern == "a2a+gemm":
            for rank, call in enumerate(self.calls):
                own = torch.cat([other["a"].chunk(gpus)[rank].to(call["a"].device) for other in self.calls], 1)
                self.wanted.append(own.float() @ call["b"].float().T)
        elif gathers:
            for call in self.calls:
                whole = torch.cat([other["a"].to(call["a"].device) for other in self.calls])
                self.wanted.append(whole.float() @ call["b"].float().T)
        else:
            parts = [call["a"].float() @ call["b"].float().T for call in self.calls]
            for rank, call in enumerate(self.calls):
                total = sum(part.to(call["a"].device) for part in parts)
                self.wanted.append(total[rank * m :][:m] if scatters else total)

    def check(self, name: str) -> None:
        """Ends the benchmark if a result is wrong. Results become NaN then."""
        for rank, (call, wanted) in enumerate(zip(self.calls, self.wanted, strict=True)):
            error = ((call["d"].float() - wanted).abs().max() / wanted.abs().max()).item()
            if not error < TOLERANCE:
                sys.exit(f"{self.row}, {name}: rank {rank} is wrong by {error:.3g} of the largest value")
            call["d"].fill_(float("nan"))

    def time(self, which: Mapping[str, tuple[KernelTraits, Variant]], rounds: int) -> dict[str, float]:
        """The median over rounds of the slowest rank, us."""
        ready = {}
        for name, (traits, variant) in which.items():
            there = LocalRanks(self.gemm(traits, variant), self.ranks)
            options = {"gb_per_s": traits.gb_per_s, **variant.call}
            calls = self.calls
            if variant.gathers:
                calls = [{**call, "gathered": x} for call, x in zip(calls, self.gathered, strict=True)]
            launches = there.launches(calls, **options)
            there.run(launches)
            self.check(name)
            ready[name] = there, launches, _graphs(there, launches)
        times: dict[str, list[float]] = {name: [] for name in ready}
        for number in range(rounds + 1):
            for name in order_of_round(ready, number):
                there, _, graphs = ready[name]
                times[name].append(_replay(there, graphs))
        for name, (there, launches, _) in ready.items():
            for call in self.calls:
                call["d"].fill_(float("nan"))
            there.run(launches)
            self.check(name)
        # The first round warms up.
        return {name: round(statistics.median(found[1:]) * 1e3, 1) for name, found in times.items()}


CALLS = 20
"""In a graph."""


def _graphs(there: LocalRanks, launches: Sequence[Launch]) -> list[torch.cuda.CUDAGraph]:
    graphs = []
    for rank, launch in enumerate(launches):
        with torch.cuda.device(there.devices[rank]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=there.streams[rank]):
                for _ in range(CALLS):
                    launch()
            graphs.append(graph)
    return graphs


def _replay(there: LocalRanks, graphs: Sequence[torch.cuda.CUDAGraph]) -> float:
    """The time of a call on the slowest rank, ms."""
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
    return max(start.elapsed_time(end) for start, end in events) / CALLS


if __name__ == "__main__":
    main()
