"""Per-tile kernels: what distinguishes them, what they are compiled from, and a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.cutlass import ELEMENTS
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.per_tile.params import LINE, Params
from distgemm.gemm.spec import GemmConfig, KernelSchedule, clusters_at_once
from distgemm.schedulers import Pattern

__all__ = ["BYTES", "GATHERING", "PIECE_BYTES", "PIECE_ROWS", "SUBTILE_ROWS", "WARP_ROWS", "KernelTraits", "Launch"]

PATTERN_NUMBERS: dict[Pattern, int] = {"ag+gemm": 1, "gemm+rs": 2, "gemm+ar": 3, "gemm+a2a": 4, "a2a+gemm": 5}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element."""

ONE_SHOT_NUMBER = 6
SHARED_BYTES = 227 << 10
"""Shared memory of a thread block."""
RESERVED_BYTES = 2 << 10
"""Of these, for the alignment and for barriers."""
GROUPS = 2
"""Warp groups that multiply."""
SUBTILE_ROWS = 64
WARP_ROWS = 16
"""Of these, rows of a warp."""
SUBTILE_BYTES = SUBTILE_ROWS * LINE
"""Bytes of what warps pass to each other at a time."""
PIECE_BYTES = 512
"""Bytes of each row in a piece of a shard that is sent."""
PIECE_ROWS = 32
"""Rows of a piece, which divide those of a tile."""
MAX_STAGES = 8
COLUMNS = range(64, 257, 16)
"""Columns of a tile: a subtile of D has 64, and the last one may overlap the one before."""
SWIZZLE_ROWS = 8
"""Rows whose swizzle repeats: a thread block loads multiples of them."""
MAX_PART, MAX_ADDING_PART = 128 * 192, 128 * 128
"""Accumulators of a warp group that fit into its registers; of reductions, which also need some for what they add."""
SEND_GB_PER_S, STORE_GB_PER_S = 340.0, 360.0
"""Rates at which pieces, and tiles, leave for peers: a little less than the NVLink of a Hopper GPU takes."""
GATHERING: tuple[Pattern, ...] = ("ag+gemm", "a2a+gemm")
"""Patterns whose tiles wait for slices of A in slots, to which a warp of each peer sends its shard."""
TAKING: tuple[Pattern, ...] = ("gemm+ar", "gemm+a2a")
"""Patterns whose results peers store in slots, from which a warp takes them to D."""


@dataclass(frozen=True)
class KernelTraits:
    """What a kernel is compiled for. The operands have 16-bit elements.

    Attributes:
        pattern: the pattern.
        tile: rows and columns. A warp group has 64 or 128 rows of it and 64 to 256 columns, a multiple of 16, as far
            as its registers hold them.
        cluster: tiles along rows and columns of a cluster of thread blocks. Each block has one, and blocks share loads.
        pingpong: whether each of the two warp groups has tiles of its own. Otherwise both share each tile.
        dtype: of A and B.
        out_dtype: of D, C and the bias.
        partial_dtype: of partial sums.
        a_major: "k" if rows of A are contiguous, "m" if columns are.
        b_major: "k" if rows of B are contiguous, "n" if columns are.
        sends: whether a kernel that gathers sends its shard of A.
        one_shot: whether all ranks add all partial sums of an all-reduce. Otherwise the owner of a tile does.
        epilogue_stages: subtiles that each warp group has in shared memory, to be stored.
        split: so many thread blocks of a cluster split k. Each multiplies all tiles of the cluster, with pingpong
            tiles; the first ones finish one each. 1: k is not split.

    Raises:
        ValueError: for values that do not go together, and if the tile does not fit into shared memory.
    """

    pattern: Pattern
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    partial_dtype: str = "bfloat16"
    a_major: Literal["k", "m"] = "k"
    b_major: Literal["k", "n"] = "k"
    sends: bool = False
    one_shot: bool = False
    epilogue_stages: int = 2
    split: int = 1

    def __post_init__(self) -> None:
        if BYTES.get(self.dtype) != 2:
            raise ValueError(f"dtype is bfloat16 or float16, got {self.dtype!r}")
        if self.sends and (not self.gathers or self.a_major != "k"):
            raise ValueError(f"a kernel sends rows of a gather, got {self.pattern!r} and a_major={self.a_major!r}")
        if self.one_shot and self.pattern != "gemm+ar":
            raise ValueError(f"an all-reduce is one-shot, got {self.pattern!r}")
        if self.takes and self.pattern == "gemm+ar" and BYTES[self.out_dtype] > BYTES[self.partial_dtype]:
            raise ValueError(
                f"results of an all-reduce are no wider than partial sums, whose slots they take: got {self.out_dtype} "
                f"and {self.partial_dtype}"
            )
        if self.pattern == "gemm+a2a" and self.out_dtype != self.partial_dtype:
            raise ValueError(f"slots have results in {self.out_dtype}, and no partial sums in {self.partial_dtype}")
        rows, columns = self.tile[0] // self.parts, self.tile[1]
        most = MAX_ADDING_PART if self.pattern in {"gemm+rs", "gemm+ar"} else MAX_PART
        if self.tile[0] % self.parts or rows not in {64, 128} or columns not in COLUMNS or rows * columns > most:
            raise ValueError(
                f"a warp group of {self.pattern} has 64 or 128 rows of a tile and {COLUMNS.start} to {COLUMNS[-1]} "
                f"columns, a multiple of {COLUMNS.step}, at most {most} elements in all; got "
                f"{self.tile[0]}x{self.tile[1]} with pingpong={self.pingpong}"
            )
        if not self.gathers and not self.one_shot and columns * BYTES[self.partial_dtype] % LINE:
            raise ValueError(
                f"rows of a tile that goes to a peer are multiples of {LINE} bytes, got {columns} columns of "
                f"{self.partial_dtype} for {self.pattern}"
            )
        if any(extent % (SWIZZLE_ROWS * blocks) for extent, blocks in self.shares):
            raise ValueError(
                f"each thread block of a cluster loads a multiple of {SWIZZLE_ROWS} rows of A and B, got tiles of "
                f"{self.tile[0]}x{self.tile[1]} and clusters of {self.cluster[0]}x{self.cluster[1]}"
            )
        if self.split > 1 and self.pattern not in {"ag+gemm", "gemm+rs"} and not self.one_shot:
            raise ValueError(f'only kernels for "ag+gemm", "gemm+rs" and one-shot all-reduces split k, got {self.name}')
        accumulators = self.block_tile[0] * self.block_tile[1] + self.tile[0] * self.tile[1]
        if self.split > 1 and self.name and accumulators > MAX_PART:  # the name checks the configuration
            raise ValueError(
                f"where thread blocks split k, tiles of a cluster have at most {MAX_PART} elements with one of them "
                f"again, got {self.name}"
            )
        if self.stages < 3:
            raise ValueError(f"{self} leaves shared memory for {self.stages} stages, and 3 are needed")

    @property
    def gathers(self) -> bool:
        """Whether slices of A come from peers: of their rows, or of their columns of this rank's rows."""
        return self.pattern in GATHERING

    @property
    def gb_per_s(self) -> float:
        """The rate at which its stores to peers leave."""
        return SEND_GB_PER_S if self.gathers else STORE_GB_PER_S

    @property
    def stages(self) -> int:
        """Stages of operands: as many as fit."""
        copied = 2 * SUBTILE_BYTES if self.sends or self.takes else 0
        left = SHARED_BYTES - RESERVED_BYTES - GROUPS * self.epilogue_stages * SUBTILE_BYTES - copied
        if self.split > 1:  # float32 sums of all blocks
            left -= self.split * self.tile[0] * self.tile[1] * 4
        return min(left // ((self.block_tile[0] + self.loaded_columns) * LINE), MAX_STAGES)

    @property
    def tiles(self) -> int:
        """Tiles of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def blocks(self) -> int:
        """Thread blocks of a cluster."""
        return max(self.tiles, self.split)

    def clusters_on(self, sms: int) -> int:
        """Clusters that run at a time on so many SMs, as estimates count them."""
        return clusters_at_once(self.blocks, sms)

    @property
    def block_tile(self) -> tuple[int, int]:
        """Rows and columns that a thread block multiplies: a tile; if k is split, all tiles of a cluster."""
        down, across = (1, 1) if self.split == 1 else self.cluster
        return self.tile[0] * down, self.tile[1] * across

    @property
    def loaded_columns(self) -> int:
        """Columns of B in a stage. If these are contiguous, whole boxes are loaded, so wide as a stage is deep."""
        columns = self.block_tile[1]
        return columns if self.b_major == "k" else -(-columns // self.tile_k) * self.tile_k

    @property
    def shares(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and B, the rows of a box, or k where columns are contiguous, and the thread blocks that divide them."""
        rows_a = self.block_tile[0] if self.a_major == "k" else self.tile_k
        rows_b = self.block_tile[1] if self.b_major == "k" else self.tile_k
        down, across = self.cluster if self.split == 1 else (1, 1)
        return (rows_a, across), (rows_b, down)

    @property
    def takes(self) -> bool:
        """Whether a warp takes results of peers to D."""
        return self.pattern in TAKING and not self.one_shot

    @property
    def tile_k(self) -> int:
        """Elements of k in a stage."""
        return LINE // BYTES[self.dtype]

    @property
    def parts(self) -> int:
        """Parts of a tile: one for each warp group that multiplies it."""
        return 1 if self.pingpong else GROUPS

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a partial sum or result in a slot: whole subtiles."""
        sums = self.tile[0] // self.parts * self.tile[1] * BYTES[self.partial_dtype]
        return -(-sums // SUBTILE_BYTES) * SUBTILE_BYTES

    @property
    def name(self) -> str:
        """A name for messages."""
        schedule: KernelSchedule = "pingpong" if self.pingpong else "cooperative"
        config = GemmConfig((*self.tile, self.tile_k), self.cluster, schedule, split=self.split)
        return f"per_tile {self.pattern}{' one-shot' if self.one_shot else ''} {config}"

    def source(self, arch: str = "90a") -> KernelSource:
        """What the kernel is compiled from."""
        macros = {
            "DG_PATTERN": ONE_SHOT_NUMBER if self.one_shot else PATTERN_NUMBERS[self.pattern],
            "DG_TILE_M": self.tile[0],
            "DG_TILE_N": self.tile[1],
            "DG_CLUSTER_M": self.cluster[0],
            "DG_CLUSTER_N": self.cluster[1],
            "DG_SPLIT": self.split,
            "DG_PINGPONG": int(self.pingpong),
            "DG_STAGES": self.stages,
            "DG_EPILOGUE_STAGES": self.epilogue_stages,
            "DG_SENDS": int(self.sends),
            "DG_ELEMENT": ELEMENTS[self.dtype],
            "DG_RESULT": ELEMENTS[self.out_dtype],
            "DG_PARTIAL": ELEMENTS[self.partial_dtype],
            "DG_A_K_MAJOR": int(self.a_major == "k"),
            "DG_B_K_MAJOR": int(self.b_major == "k"),
        }
        pairs = tuple((name, str(value)) for name, value in macros.items())
        return KernelSource(self.name, pairs, arch, "per_tile.cu", ("epochs.cuh", "facts.cuh", "tile_order.cuh"))


class Launch:
    """A kernel with parameters. Calling it with a stream launches it there.

    Args:
        traits: of the kernel, which is compiled if need be.
        params: the parameters.
        blocks: thread blocks, at most one for each SM.
        device: number of the GPU.
    """

    def __init__(self, traits: KernelTraits, params: Params, blocks: int, device: int) -> None:
        self.params, self._device = params, device
        cubin, clusters = open_cubin(traits.source(), Params), blocks // traits.blocks
        if traits.blocks > 2:  # a pair always fits: SMs come in pairs
            clusters = min(clusters, cubin.max_clusters(device, (traits.blocks, 1)))
        grid = (clusters * traits.blocks, 1, 1)
        self._launch: Callable[[int], None] = cubin.launcher(device, grid, ctypes.addressof(params))

    def __call__(self, stream: int | None = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        self._launch(stream)
