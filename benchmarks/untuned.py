"""Measures how fast the default configurations of CUTLASS are, on shapes that nothing was recorded for.

    python benchmarks/untuned.py --json FILE                           48 held-out shapes, chosen against cuBLAS
    python benchmarks/untuned.py --every --json FILE                   the same shapes, each configuration
    python benchmarks/untuned.py --random 80 --every --json FILE       random shapes, each configuration
    python benchmarks/untuned.py --few 150 --every --json FILE         random shapes with few tiles, each configuration
    python benchmarks/untuned.py --every --build                       compile what any of them needs, and end

Recorded configurations are not read. The held-out shapes are layers of models that no shipped file has: one rank's
share of 2 to 8. With ``--every``, each tile is measured with each of its clusters, unless the heuristic expects it to
be much slower than the best one, and the best tiles with each order of tiles. The constants of
``distgemm.gemm.select`` and ``distgemm.gemm.tiles`` come from such a run with random shapes; the held-out shapes say
how well they serve.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from distgemm.gemm import GemmConfig, GemmSpec, GemmTensors, MatrixSpec, get_provider
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import build
from distgemm.gemm.select import tile_of, work
from distgemm.gemm.tiles import Tile
from distgemm.measure.timing import time_launches
from distgemm.tune.gemm import TILE_ORDERS, candidates

FINALISTS = 4
"""Tiles that are measured in all orders of tiles, each with its best cluster."""
WORTH_MEASURING = 1.3
"""Configurations whose time, roughly estimated, is more than so many times the least one are not measured."""
ALONE, PAIRS, FOURS = ((1, 1),), ((2, 1), (1, 2)), ((4, 1), (2, 2))
FURTHER_TILES = (
    Tile("pingpong", (128, 64), (*ALONE, (2, 1), (4, 1), (4, 2), (2, 4)), rate=0.0),
    Tile("pingpong", (128, 80), (*ALONE, (2, 1), (4, 1), (4, 2), (2, 4)), rate=0.0),
    *(Tile("pingpong", (128, n), (*ALONE, *PAIRS, *FOURS), rate=0.0) for n in (96, 112, 128)),
    *(Tile("pingpong", (128, n), (*ALONE, *PAIRS, (2, 2)), rate=0.0) for n in (144, 160)),
    Tile("pingpong", (128, 192), (*PAIRS, (2, 2)), rate=0.0),
    *(Tile("pingpong", (64, n), (*ALONE, (2, 1), (4, 1)), rate=0.0) for n in (128, 192, 256)),
    *(Tile("cooperative", (128, n), ((2, 1),), rate=0.0) for n in (80, 144, 176, 192, 208, 224, 240)),
    Tile("cooperative", (128, 80), ((4, 2),), rate=0.0),
    *(Tile("cooperative", (256, n), ((1, 2),), rate=0.0) for n in (96, 112)),
    *(Tile("cooperative", (256, n), PAIRS, rate=0.0) for n in (128, 144, 160, 192)),
)
"""Tiles that are not listed, or with other clusters. They are measured with ``--every``."""
MAX_FLOP = 2.5e12
"""Of a random shape: more would take most of the time."""


class Shape(NamedTuple):
    """Extents of one rank's GEMM, and whose they are."""

    m: int
    n: int
    k: int
    name: str

    @property
    def spec(self) -> GemmSpec:
        matrices = [(self.m, self.k), (self.n, self.k), (self.m, self.n)]
        return GemmSpec(*(MatrixSpec("bfloat16", *extents) for extents in matrices))


HIDDEN = {
    "qwen2.5-7b": (3584, 18944, 4608),
    "qwen2.5-32b": (5120, 27648, 7168),
    "qwen2.5-72b": (8192, 29568, 10240),
    "gemma2-27b": (4608, 36864, 8192),
    "phi4": (5120, 17920, 7680),
    "mixtral-8x22b": (6144, 16384, 8192),
    "falcon-180b": (14848, 59392, 15872),
    "gpt3-175b": (12288, 49152, 36864),
    "yi-34b": (7168, 20480, 9216),
    "command-r+": (12288, 33792, 14336),
    "deepseek-v3-dense": (7168, 18432, 24576),
    "nemotron-340b": (18432, 73728, 20480),
}
"""Width, width of the MLP, and outputs of q, k and v together."""


def held_out() -> list[Shape]:
    """48 shapes: of each model all four layers, with another number of tokens and of ranks each."""
    found = []
    tokens, ranks = (512, 1024, 2048, 4096, 8192, 16384), (2, 4, 8)
    for number, (name, (hidden, mlp, qkv)) in enumerate(HIDDEN.items()):
        for layer, (of, n, k) in enumerate(
            [("qkv", qkv, hidden), ("out", hidden, hidden), ("fc1", mlp, hidden), ("fc2", hidden, mlp)]
        ):
            m, tp = tokens[(number + layer) % len(tokens)], ranks[(number + 2 * layer) % len(ranks)]
            n, k = (n // tp, k) if of in ("qkv", "fc1") else (n, k // tp)
            found.append(Shape(m, n, k, f"{name} {of} tp{tp}"))
    return found


def drawn(count: int, seed: int = 0) -> list[Shape]:
    """Random shapes."""
    chance = random.Random(seed)
    found: list[Shape] = []
    while len(found) < count:
        (m,) = chance.choices([256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384])
        n, k = (64 * round(2 ** chance.uniform(3, 8.6)) for _ in range(2))
        if 2 * m * n * k <= MAX_FLOP:
            found.append(Shape(m, n, k, "random"))
    return found


def few_tiles(count: int, seed: int = 0) -> list[Shape]:
    """Random shapes that take one to three waves of tiles of 128 x 128, or less than a wave."""
    chance = random.Random(seed)
    rows = [128 * tiles for tiles in (2, 3, 4, 6, 8, 12, 16, 24, 32)]
    found: list[Shape] = []
    while len(found) < count:
        m = rows[chance.randrange(len(rows))]
        n, k = (64 * round(2 ** chance.uniform(*logs)) for logs in ((3, 7.2), (2.5, 7)))
        if 48 <= -(-m // 128) * -(-n // 128) <= 400:
            found.append(Shape(m, n, k, "few tiles"))
    return found


def default(provider: CutlassProvider, spec: GemmSpec) -> GemmConfig:
    """What is taken where nothing was recorded."""
    return provider.configs(spec)[0]


def rough_rate(config: GemmConfig) -> float:
    """The rate of a tile if nothing was measured: elements of D for each element of A and B decide."""
    m, n, _ = config.tile
    return min(1.0, 0.2 + m * n / (m + n) / 80)


def every_config(provider: CutlassProvider, spec: GemmSpec, worth: float = WORTH_MEASURING) -> list[GemmConfig]:
    """The configurations with listed and further tiles that may be fast, each in one order of tiles."""
    listed = candidates(provider, spec)
    further = (
        GemmConfig((*tile.extents, listed[0].tile[2]), cluster, tile.kernel_schedule)
        for tile in FURTHER_TILES
        for cluster in tile.clusters
    )
    times = {one: work(spec, one) / rough_rate(one) for one in [*listed, *further]}
    limit = worth * min(times.values())
    return [one for one, time in times.items() if one == listed[0] or time <= limit]


def measured(
    shape: Shape, every: bool, rounds: int, burst_ms: float, finalists: int = FINALISTS, worth: float = WORTH_MEASURING
) -> dict[str, Any]:
    """The times of a shape, ms: cuBLAS, the default, and with ``every`` all that could be taken."""
    provider, spec = CutlassProvider(), shape.spec
    a, b = (torch.randn(rows, shape.k, device="cuda").bfloat16() for rows in (shape.m, shape.n))
    tensors = GemmTensors(a, b, torch.empty(shape.m, shape.n, device="cuda", dtype=torch.bfloat16))
    cublas = get_provider("cublas").compile(spec).bind(tensors)

    def times(configs: list[GemmConfig]) -> dict[str, float]:
        launches = [cublas, *(provider.compile(spec, config).bind(tensors) for config in configs)]
        found = time_launches(launches, tensors.d.device, rounds=rounds, burst_ms=burst_ms)
        return dict(zip(["cublas", *map(str, configs)], (round(ms, 6) for ms in found), strict=True))

    chosen = default(provider, spec)
    tiles = every_config(provider, spec, worth) if every else [replace(chosen, raster="heuristic", swizzle=1)]
    tiles += [chosen] * (chosen not in tiles)
    found = times(tiles)
    if every and finalists:
        fastest: dict[tuple[Any, ...], GemmConfig] = {}
        for config in sorted(tiles, key=lambda config: found[str(config)]):
            fastest.setdefault(tile_of(config), config)
        best = list(fastest.values())[:finalists]
        orders = [replace(config, raster=raster, swizzle=swizzle) for config in best for raster, swizzle in TILE_ORDERS]
        again = times(best + orders)
        found = again | {
            name: ms * again["cublas"] / found["cublas"] for name, ms in found.items() if name not in again
        }
    return {**shape._asdict(), "chosen": str(chosen), "ms": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="each configuration, not only the chosen one")
    parser.add_argument("--random", type=int, metavar="N", help="N random shapes instead of the held-out ones")
    parser.add_argument("--few", type=int, metavar="N", help="N random shapes with few tiles instead")
    parser.add_argument("--finalists", type=int, default=FINALISTS, help="tiles measured in all orders, with --every")
    parser.add_argument("--worth", type=float, default=WORTH_MEASURING, help="measure what may take so many times more")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=3.0)
    parser.add_argument("--build", action="store_true", help="compile the kernels, and end; it needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    args = parser.parse_args()
    shapes = drawn(args.random) if args.random else few_tiles(args.few) if args.few else held_out()
    provider = CutlassProvider("90a") if args.build else CutlassProvider()

    def wanted(provider: CutlassProvider, spec: GemmSpec) -> list[GemmConfig]:
        return every_config(provider, spec, args.worth) if args.every else [default(provider, spec)]

    built = [*shapes, *drawn(args.random or 80), *few_tiles(args.few or 150)] if args.build else shapes
    build([kernel_source(shape.spec, one, provider.arch) for shape in built for one in wanted(provider, shape.spec)])
    if args.build:
        return 0
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for shape in track(shapes, description="measuring", console=Console(stderr=True)):
        if time.monotonic() - begin > args.seconds:
            break
        row = measured(shape, args.every, args.rounds, args.burst_ms, args.finalists, args.worth)
        rows.append(row)
        ms = row["ms"]
        best = min(ms, key=lambda name: math.inf if name == "cublas" else ms[name])
        print(
            f"{shape.m:6} {shape.n:6} {shape.k:6}  cuBLAS {ms['cublas']:.4f} ms, chosen / cuBLAS "
            f"{ms['cublas'] / ms[row['chosen']]:.3f} {row['chosen']}, best {ms['cublas'] / ms[best]:.3f} {best}  "
            f"{shape.name}",
            flush=True,
        )
        if args.json:
            text = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "rows": rows}
            args.json.write_text(json.dumps(text, indent=1) + "\n")
    ratios = [row["ms"]["cublas"] / row["ms"][row["chosen"]] for row in rows]
    print(
        f"{len(ratios)} shapes, cuBLAS / chosen: mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
