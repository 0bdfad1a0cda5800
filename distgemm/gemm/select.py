"""Selects the configuration for a shape: the measured one if there is one, else the heuristic's.

Of configurations that the heuristic finds about equally fast, one whose kernel is compiled or packed is taken.

Measured configurations are read from ``gemm_<device>.json`` in the cache folder, which ``distgemm tune-gemm`` writes,
and from the file of that name that ships with the package. The heuristic estimates time as

    (waves * (k + overhead) + last) * step,    waves = ceil(tiles / thread blocks that run at once)

The overhead, in elements of k, is the time of a tile besides its main loop, and ``last`` what the epilogue of the last
tile of a thread block adds where no other tile hides it. A step is an element of k of all tiles that run at once:

    step = (multiply^4 + load^4)^(1/4) * tiles / tiles inside of D
    multiply = tile_m * tile_n / rate,    load = ROW_TIME * rows

The rate of a tile is its share of the throughput of the fastest tile (:mod:`distgemm.gemm.tiles`). The rows are those
of A and of B that are read from L2: each cluster reads its rows once for all its blocks. More than ``MERGED_READS``
clusters that read the same rows at once cost no more. Clusters that go beyond D take longer, though their loads are
fewer. If GEMMs alternate on several streams, waves are not rounded up: the next GEMM fills the last wave. An H100 and
an H200 measured all of this (``docs/measurements_parts.md``). For fp8, loads do not count.

Tiles that run at once read rows of A and B. Where they have fewer distinct ones in another order of tiles than in
CUTLASS's own, that order is selected, unless it needs more tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distgemm.gemm.cache import TunedCache
from distgemm.gemm.nvcc import KernelSource, is_there
from distgemm.gemm.parameters import Arguments, order_of_tiles
from distgemm.gemm.provider import GemmProvider
from distgemm.gemm.spec import FP8, RASTERS, GemmConfig, GemmSpec, KernelSchedule, clusters_at_once
from distgemm.gemm.target import TARGET
from distgemm.gemm.tiles import FP8_TILES, PLAIN_TILE, TILES, UNLISTED_RATE

__all__ = [
    "CACHE",
    "NEAR_BEST",
    "agree",
    "estimate",
    "gpu_name",
    "key_of",
    "near_best",
    "order",
    "preferred",
    "recorded_config",
    "select_config",
    "tile_order",
    "tile_of",
    "tiles_at_once",
    "tiles_of",
    "work",
]


def _check(entry: dict[str, Any]) -> None:
    GemmConfig.parse(entry["config"])


CACHE = TunedCache("gemm", Path(__file__).parent / "tuned", _check, "distgemm tune-gemm")
"""Measured configurations of GEMMs, by :func:`key_of`."""

SMS = 132
"""SMs of the GPU that the heuristic assumes (H100 and H200 SXM)."""
RATES, FP8_RATES = (
    {(tile.kernel_schedule, *tile.extents): tile.rate for tile in (*tiles, PLAIN_TILE)} for tiles in (TILES, FP8_TILES)
)
"""Rates of tiles, and those of tiles for fp8, by kernel schedule, m and n."""
BLOCK_RATES = {(tile.kernel_schedule, *tile.extents): tile.block_rate for tile in FP8_TILES}
"""Rates of tiles for fp8 with scales of blocks."""
OVERHEADS: dict[KernelSchedule, int] = {"cooperative": 292, "pingpong": 34, "plain": 160}
FP8_OVERHEADS: dict[KernelSchedule, int] = {"cooperative": 200, "pingpong": 40, "plain": 160}
"""Time of a tile besides its main loop, in elements of k."""
LAST: dict[KernelSchedule, int] = {"cooperative": 0, "pingpong": 179, "plain": 0}
"""Time of the last epilogue of a thread block, in elements of k, where OVERHEADS has that of hidden ones."""
ROW_TIME = 0.68
"""Time in which L2 gives a row of A or B, in that of an element of D of the fastest tile."""
MERGED_READS = 12
"""So many clusters that read the same rows at once take the time of L2; those beyond find them on the way."""

MIN_SAVING = 0.8
"""Another order of tiles is taken if tiles that run at once read at most this share of the rows of A and B."""
NEAR_BEST = 1.03
"""A configuration that is there is taken if its predicted time is at most so many times the best one's."""


def estimate(spec: GemmSpec, config: GemmConfig, streams: int = 1, sms: int = SMS) -> float:
    """The heuristic's time, in arbitrary units.

    Args:
        spec: what is computed.
        config: how.
        streams: number of streams on which such GEMMs alternate.
        sms: number of SMs.
    """
    if spec.a.dtype in FP8:
        rates = BLOCK_RATES if spec.block_rows_a else FP8_RATES
        return work(spec, config, streams, sms) / rates.get(tile_of(config), UNLISTED_RATE)
    tile_m, tile_n, _ = config.tile
    tiles, at_once = tiles_of(spec, config), tiles_at_once(config, sms)
    inside = -(-spec.m // tile_m) * -(-spec.n // tile_n) * spec.l
    if not inside:
        return 0.0
    multiply = tile_m * tile_n / RATES.get(tile_of(config), UNLISTED_RATE)
    load = ROW_TIME * _rows_loaded(spec, config, sms)
    step: float = (multiply**4 + load**4) ** (1 / 4) * tiles / inside
    waves = _waves(tiles, at_once, streams)
    return (waves * (spec.k + OVERHEADS[config.kernel_schedule]) + LAST[config.kernel_schedule]) * step


def work(spec: GemmSpec, config: GemmConfig, streams: int = 1, sms: int = SMS) -> float:
    """The time with a rate of 1 where loads do not count; see :func:`estimate` for the arguments."""
    tile_m, tile_n, _ = config.tile
    waves = _waves(tiles_of(spec, config), tiles_at_once(config, sms), streams)
    return waves * (spec.k + FP8_OVERHEADS[config.kernel_schedule]) * tile_m * tile_n


def _waves(tiles: int, at_once: int, streams: int) -> float:
    return -(-tiles // at_once) if streams == 1 else max(tiles / at_once, 0.5)


def tile_of(config: GemmConfig) -> tuple[KernelSchedule, int, int]:
    """By what rates are listed: the kernel schedule, and the tile's m and n."""
    return config.kernel_schedule, *config.tile[:2]


def tiles_of(spec: GemmSpec, config: GemmConfig) -> int:
    """The number of tiles of a GEMM, including those outside of D that complete clusters."""

    def tiles(extent: int, tile: int, blocks: int) -> int:
        return -(-extent // (tile * blocks)) * blocks

    return tiles(spec.m, config.tile[0], config.cluster[0]) * tiles(spec.n, config.tile[1], config.cluster[1]) * spec.l


def tiles_at_once(config: GemmConfig, sms: int) -> int:
    """The number of tiles that so many SMs compute at once: whole clusters, at least one."""
    cluster = config.cluster[0] * config.cluster[1]
    return max(1, clusters_at_once(cluster, sms)) * cluster


def order(spec: GemmSpec, configs: list[GemmConfig], streams: int = 1) -> list[GemmConfig]:
    """Configurations by the heuristic's time, the fastest first, each with its :func:`tile_order`.

    See :func:`estimate` for the arguments.
    """
    return [tile_order(spec, one) for one in sorted(configs, key=lambda one: estimate(spec, one, streams))]


def tile_order(spec: GemmSpec, config: GemmConfig, sms: int = SMS) -> GemmConfig:
    """A configuration with the order of tiles in which those that run at once read the fewest rows of A and B.

    CUTLASS's own order stays if another one saves little, or if its stripes need tiles outside of D. It stays for fp8,
    where stripes of 4 and 8 tiles were slower in most measurements, and where D has no elements.
    """
    if config.kernel_schedule == "plain" or spec.a.dtype in FP8 or not spec.m * spec.n:
        return config

    def reads(one: GemmConfig) -> tuple[int, float]:
        blocks, along_m, along_n = _at_once(spec, one, sms)
        return blocks, along_m * one.tile[0] + along_n * one.tile[1]

    blocks, rows = reads(config)
    found, least = config, MIN_SAVING * rows
    for raster in RASTERS[1:]:
        for swizzle in (1, 2, 4, 8):
            one = replace(config, raster=raster, swizzle=swizzle)
            needed, rows = reads(one)
            if needed <= blocks and rows < least:
                found, least = one, rows
    return found


def _rows_loaded(spec: GemmSpec, config: GemmConfig, sms: int) -> float:
    """Rows of A and of B that a step of all tiles that run at once reads from L2, in CUTLASS's order of tiles."""
    blocks, *along = _at_once(spec, replace(config, raster="heuristic", swizzle=1), sms)
    readers = [max(1.0, count / size) for count, size in zip(along, config.cluster, strict=True)]
    rows = sum(
        count * tile * min(of_other, MERGED_READS)
        for count, tile, of_other in zip(along, config.tile, reversed(readers), strict=False)
    )
    return rows * min(spec.l, max(1.0, tiles_at_once(config, sms) / blocks))


def _at_once(spec: GemmSpec, config: GemmConfig, sms: int) -> tuple[int, float, float]:
    """The number of tiles of a batch; how many tiles along m, and how many along n, those cover that run at once."""
    raster, swizzle = RASTERS.index(config.raster), config.swizzle
    tiles = order_of_tiles(config, Arguments(spec.m, spec.n, spec.k, spec.l, raster=raster, swizzle=swizzle))
    major, minor = (1, 0) if tiles.along_n else (0, 1)
    counts = [-(-extent // tile) for extent, tile in zip((spec.m, spec.n), config.tile, strict=False)]
    stripe = min(config.cluster[minor] << tiles.fields["log_swizzle_size_"], counts[minor])
    along = min(tiles_at_once(config, sms) / stripe, counts[major])
    across = min(max(stripe, tiles_at_once(config, sms) / along), counts[minor])
    return tiles.blocks, *((across, along) if tiles.along_n else (along, across))


def key_of(spec: GemmSpec, streams: int = 1) -> str:
    """The key of a measured configuration: extents, types, majors, terms, and the number of streams.

    A bias is not part of it: calls with and without one share a kernel.
    """
    majors = "".join("r" if matrix.row_major else "c" for matrix in (spec.a, spec.b))
    terms = [
        f"{name}:{matrix.dtype}" for name, matrix in (("c", spec.c), ("partial", spec.partial)) if matrix is not None
    ]
    terms += [
        f"{name}:{mode}" for name, mode in (("a", spec.scale_a), ("b", spec.scale_b)) if mode not in ("none", "tensor")
    ]
    terms += [f"b:{spec.b.dtype}"] if spec.b.dtype != spec.a.dtype else []
    terms += [f"streams:{streams}"] if streams > 1 else []
    return " ".join([f"{spec.m}x{spec.n}x{spec.k}x{spec.l}", f"{spec.a.dtype}_{majors}", spec.d.dtype, *terms])


def select_config(provider: GemmProvider, spec: GemmSpec, streams: int = 1) -> GemmConfig:
    """The configuration for a shape: the measured one if the provider supports it with these strides, else its first.

    Raises:
        ValueError: if the file of measured configurations is broken.
    """
    return recorded_config(provider, spec, streams) or provider.configs(spec, streams)[0]


def recorded_config(provider: GemmProvider, spec: GemmSpec, streams: int = 1) -> GemmConfig | None:
    """The measured configuration for a shape; None without one that the provider supports with these strides.

    Raises:
        ValueError: if the file of measured configurations is broken.
    """
    entry = CACHE.read(gpu_name()).get(key_of(spec, streams))
    config = None if entry is None else GemmConfig.parse(entry["config"])
    return config if config is not None and provider.supports(spec, config) else None


# --- what is there is preferred -------------------------------------------------------------------------


def near_best(spec: GemmSpec, configs: Sequence[GemmConfig], streams: int = 1) -> list[GemmConfig]:
    """The configurations whose time is at most ``NEAR_BEST`` times the first one's; see :func:`estimate`."""
    limit = NEAR_BEST * estimate(spec, configs[0], streams)
    return [config for config in configs if estimate(spec, config, streams) <= limit]


def preferred(sources: Sequence[KernelSource]) -> KernelSource:
    """The first source whose kernel is there; if none is, the first.

    A kernel is there if it is compiled or packed. Once :func:`agree` was called, it is there if the first rank has it,
    so that all ranks select alike. Inside ``compiling_for`` none is: then the best is wanted.

    Args:
        sources: of kernels that are about equally fast, the best first.
    """
    if len(sources) == 1 or TARGET.get() is not None:
        return sources[0]
    there = is_there if _AGREED is None else _AGREED.__contains__
    return next(filter(there, sources), sources[0])


def agree(there: Iterable[KernelSource]) -> None:
    """Add kernels to those that are there for this process: the ones that the first rank of a group has."""
    global _AGREED
    _AGREED = (_AGREED or set()).union(there)


_AGREED: set[KernelSource] | None = None
"""None: no group has agreed, and what is there is looked for on disk."""


def gpu_name() -> str:
    """The name of the current GPU; "none" without one. Inside ``compiling_for``: the name that it was given."""
    import torch

    if (target := TARGET.get()) is not None:
        return target.gpu
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
