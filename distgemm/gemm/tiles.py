"""The tiles that CUTLASS kernels are tried with. To add a tile configuration, add a row to :data:`TILES`.

Nothing else lists tiles: the provider tries each row with each of its clusters, the heuristic of
:mod:`distgemm.gemm.select` ranks them by their rate, and the tests and the GPU tests run all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from distgemm.gemm.spec import KernelSchedule

__all__ = [
    "FP8_TILES",
    "MAX_COLUMN_SCALED_SUMS",
    "MAX_FP8_SUMS",
    "PLAIN_TILE",
    "TILES",
    "TMA_TILES",
    "UNLISTED_RATE",
    "Tile",
]


class Tile(NamedTuple):
    """A tile of D and how fast kernels with it are.

    Attributes:
        kernel_schedule: how warp groups share a tile.
        extents: elements (m, n). The element type decides the depth (k).
        clusters: thread blocks (m, n) that share TMA loads: the shapes worth trying.
        rate: throughput where loads do not limit it, as a share of the fastest tile's. Fitted to what an H100 and an
            H200 measured (``docs/measurements_parts.md``); a first guess only changes the order in which
            configurations are tried.
        block_rate: the same, for operands with scales of blocks.
    """

    kernel_schedule: KernelSchedule
    extents: tuple[int, int]
    clusters: tuple[tuple[int, int], ...]
    rate: float
    block_rate: float = 0.0

    @property
    def sums(self) -> int:
        """Elements of the tile that a thread of the warp groups that multiply it has."""
        return self.extents[0] * self.extents[1] // (256 if self.kernel_schedule == "cooperative" else 128)


TILES: tuple[Tile, ...] = (
    Tile("cooperative", (256, 128), ((1, 2), (2, 1)), rate=0.945),
    Tile("cooperative", (256, 144), ((1, 2),), rate=0.956),
    Tile("cooperative", (256, 160), ((1, 2),), rate=0.963),
    Tile("cooperative", (256, 176), ((1, 2),), rate=0.962),
    Tile("cooperative", (256, 208), ((2, 1),), rate=0.963),
    Tile("cooperative", (128, 256), ((1, 2), (2, 1)), rate=0.941),
    Tile("cooperative", (128, 240), ((2, 1),), rate=0.953),
    Tile("cooperative", (128, 224), ((2, 1),), rate=0.987),
    Tile("cooperative", (128, 176), ((2, 1),), rate=0.942),
    Tile("cooperative", (128, 144), ((2, 1),), rate=1.0),
    Tile("cooperative", (128, 80), ((4, 2),), rate=0.905),
    Tile("pingpong", (128, 192), ((2, 1), (1, 2)), rate=0.973),
    Tile("pingpong", (128, 160), ((2, 1), (1, 2), (1, 1)), rate=0.998),
    Tile("pingpong", (128, 144), ((1, 2),), rate=0.897),
    Tile("pingpong", (128, 128), ((2, 1), (1, 2), (4, 1), (1, 1)), rate=0.954),
    Tile("pingpong", (128, 96), ((2, 1), (4, 1), (1, 1)), rate=0.893),
    Tile("pingpong", (128, 64), ((2, 1), (4, 1), (2, 4)), rate=0.797),
    Tile("pingpong", (64, 192), ((1, 1),), rate=0.878),
    Tile("pingpong", (64, 128), ((1, 1),), rate=0.859),
)
"""Tiles of kernels with TMA and wgmma. Of configurations with equal estimates, the first listed is taken."""

MAX_FP8_SUMS = 128
"""Kernels for fp8 with TMA have registers for all sums, and for one or two products, which are added to them after
every 128 of k. The compiler spills those of larger tiles."""

MAX_COLUMN_SCALED_SUMS = 80
"""As ``MAX_FP8_SUMS``, if each column of D has scales of its own, which take registers, too."""

FP8_TILES: tuple[Tile, ...] = (
    Tile("cooperative", (128, 128), ((2, 1), (1, 2)), rate=0.955, block_rate=0.835),
    Tile("cooperative", (128, 144), ((1, 2), (2, 1)), rate=0.937, block_rate=0.799),
    Tile("cooperative", (128, 192), ((2, 1), (1, 2)), rate=1.0, block_rate=0.923),
    Tile("cooperative", (128, 256), ((1, 2), (2, 1)), rate=0.985, block_rate=0.962),
    Tile("cooperative", (256, 128), ((1, 2),), rate=0.991, block_rate=1.0),
    Tile("cooperative", (128, 224), ((2, 1),), rate=0.955, block_rate=0.897),
    Tile("cooperative", (128, 160), ((2, 1),), rate=0.983, block_rate=0.877),
    Tile("cooperative", (128, 96), ((1, 2), (2, 1)), rate=0.947, block_rate=0.78),
    Tile("pingpong", (64, 128), ((1, 1),), rate=0.59, block_rate=0.594),
)
"""Tiles of kernels for fp8 with TMA. Their rates were fitted to what one H100 measured (``gemm_fp8_h100.json``)."""

PLAIN_TILE = Tile("plain", (128, 128), ((1, 1),), rate=0.3)
"""The only tile of kernels without TMA."""

UNLISTED_RATE = 0.7
"""The rate of a tile that is not listed, but named by the user."""

TMA_TILES = tuple((tile.extents, cluster, tile.kernel_schedule) for tile in TILES for cluster in tile.clusters)
"""(extents, cluster, kernel schedule) of each configuration with TMA, for types of 16 and 32 bits."""
