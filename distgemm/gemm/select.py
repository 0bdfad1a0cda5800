"""Which configuration a shape gets: the measured one if there is one, else the heuristic's.

Measured choices are read from ``gemm_<device>.json`` in the cache folder, which ``distgemm tune-gemm`` writes, and
from the file of that name that ships with the package. The heuristic estimates time as

    waves * (k + overhead) * tile_m * tile_n / rate,    waves = ceil(tiles / thread blocks that run at once)

with a rate and an overhead for each kind of tile, and with waves not rounded up where the GEMM shares the GPU with
another one, on a second stream, that fills its last wave. The rate says what share of the sustained peak such tiles
reach on large problems; the overhead, in elements of k, what a tile costs besides its main loop. Both were set from
measurements on one H200 (``docs/measurements.md``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgemm.gemm.cache import TunedCache
from distgemm.gemm.spec import GemmConfig, GemmSpec

if TYPE_CHECKING:
    from distgemm.gemm.cutlass import CutlassProvider

__all__ = ["CACHE", "key_of", "order", "select_config", "tiles_at_once", "tiles_of"]


def _check(entry: dict[str, Any]) -> None:
    GemmConfig.parse(entry["config"])


CACHE = TunedCache("gemm", Path(__file__).parent / "tuned", _check, "distgemm tune-gemm")

SMS = 132
RATES = {
    ("cooperative", 128, 256): 1.0,
    ("cooperative", 256, 128): 1.0,
    ("cooperative", 256, 144): 1.0,
    ("cooperative", 256, 160): 1.0,
    ("cooperative", 256, 192): 1.0,
    ("cooperative", 256, 208): 1.0,
    ("cooperative", 128, 160): 0.93,
    ("cooperative", 128, 192): 0.97,
    ("cooperative", 128, 224): 0.96,
    ("pingpong", 128, 128): 0.95,
    ("pingpong", 64, 256): 0.85,
    ("pingpong", 64, 128): 0.75,
    ("plain", 128, 128): 0.3,
}
OVERHEADS = {"cooperative": 160, "pingpong": 60, "plain": 160}


def estimate(spec: GemmSpec, config: GemmConfig, streams: int = 1, sms: int = SMS, count: int = 1) -> float:
    """The heuristic's time, in arbitrary units; of so many products by one kernel, without a pause between them."""
    tile_m, tile_n, _ = config.tile
    tiles, at_once = count * tiles_of(spec, config), tiles_at_once(config, sms)
    waves = -(-tiles // at_once) if streams == 1 else max(tiles / at_once, 0.5)
    rate = RATES.get((config.kernel_schedule, tile_m, tile_n), 0.7)
    return waves * (spec.k + OVERHEADS[config.kernel_schedule]) * tile_m * tile_n / rate


def tiles_of(spec: GemmSpec, config: GemmConfig) -> int:
    """How many tiles a product has, those outside of D included by which clusters are made whole."""

    def along(extent: int, tile: int, blocks: int) -> int:
        return -(-extent // (tile * blocks)) * blocks

    return along(spec.m, config.tile[0], config.cluster[0]) * along(spec.n, config.tile[1], config.cluster[1]) * spec.l


def tiles_at_once(config: GemmConfig, sms: int) -> int:
    """How many tiles so many SMs compute at once, in whole clusters; one cluster at least."""
    cluster = config.cluster[0] * config.cluster[1]
    return max(1, sms // cluster) * cluster


def order(spec: GemmSpec, configs: list[GemmConfig], streams: int = 1, count: int = 1) -> list[GemmConfig]:
    """Configurations by the heuristic's time, the best first; for so many products by one kernel."""
    return sorted(configs, key=lambda config: estimate(spec, config, streams, count=count))


def key_of(spec: GemmSpec, streams: int = 1) -> str:
    """What a choice depends on, as text: extents, types, majors and terms; how many streams such GEMMs alternate on."""
    majors = "".join("r" if matrix.row_major else "c" for matrix in (spec.a, spec.b))
    terms = [
        f"{name}:{matrix.dtype}" for name, matrix in (("c", spec.c), ("partial", spec.partial)) if matrix is not None
    ]
    terms += [f"bias:{spec.bias}"] if spec.bias else []
    terms += [f"{name}:{kind}" for name, kind in (("a", spec.scale_a), ("b", spec.scale_b)) if kind == "row"]
    terms += [f"streams:{streams}"] if streams > 1 else []
    return " ".join([f"{spec.m}x{spec.n}x{spec.k}x{spec.l}", f"{spec.a.dtype}_{majors}", spec.d.dtype, *terms])


def select_config(provider: CutlassProvider, spec: GemmSpec, streams: int = 1) -> GemmConfig:
    """The configuration for this shape. A measured one that does not fit these strides is passed over."""
    found = CACHE.read(_device()).get(key_of(spec, streams))
    if found is not None:
        config = GemmConfig.parse(found["config"])
        if provider.supports(spec, config):
            return config
    return provider.configs(spec, streams)[0]


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
