"""What a GEMM computes, and how a CUTLASS kernel computes it: value objects, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from distgemm.arguments import boolean, instance, integer, member, wrong
from distgemm.plan.problem import DTYPE_BYTES

__all__ = [
    "FP8",
    "SCALE_BLOCK",
    "TMA_ALIGNMENT",
    "Epilogue",
    "GemmConfig",
    "GemmSpec",
    "KernelSchedule",
    "MatrixSpec",
    "Raster",
    "ScaleMode",
    "Status",
    "clusters_at_once",
]

TMA_ALIGNMENT = 16
"""Bytes that divide every address and stride that TMA takes."""

FP8 = ("float8_e4m3fn", "float8_e5m2")
"""Types of 8 bits. A and B may differ in them."""

SCALE_BLOCK = 128
"""Columns of a block that has one scale."""

KernelSchedule = Literal["cooperative", "pingpong", "plain"]
"""``"cooperative"``: two warp groups share a tile. ``"pingpong"``: two warp groups alternate, one multiplies while the
other stores. ``"plain"``: neither TMA nor wgmma, for any alignment."""

Epilogue = Literal["tma", "direct"]
"""How results are stored: through TMA, or from registers (any alignment of D, C and the partial sum)."""

Raster = Literal["heuristic", "m", "n"]
"""The mode along which tiles follow each other; ``"heuristic"``: CUTLASS chooses."""

ScaleMode = Literal["none", "tensor", "row", "1x128", "128x128"]
"""No scale, one number for the tensor, for each row of A or of B, or for each block of so many rows and columns."""

KERNEL_SCHEDULES = get_args(KernelSchedule)
EPILOGUES = get_args(Epilogue)
RASTERS = get_args(Raster)
SHARES = (1, 2)


class Status(NamedTuple):
    """Whether something is possible. It is falsy if not, and then has the reason.

    Attributes:
        reason: why it is not possible; empty: it is.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix in memory, or batches of matrices, without the address.

    Attributes:
        dtype: element type, a key of ``DTYPE_BYTES``.
        rows: extent.
        columns: extent.
        batches: number of matrices.
        row_major: whether the elements of a row are contiguous; else those of a column are.
        stride: elements from row to row (column-major: from column to column); -1: dense.
        batch_stride: elements from batch to batch; -1: dense.
        alignment: the largest power of two, at most 16 bytes, that divides the address and the strides. The given value
            is reduced to what the strides allow.
        padded: whether the bytes between the end of a row and the next multiple of 16 bytes may be overwritten.

    Raises:
        ValueError: for an unknown element type.
    """

    dtype: str
    rows: int
    columns: int
    batches: int = 1
    row_major: bool = True
    stride: int = field(default=-1)
    batch_stride: int = field(default=-1)
    alignment: int = TMA_ALIGNMENT
    padded: bool = False

    def __post_init__(self) -> None:
        member("dtype", self.dtype, DTYPE_BYTES)
        for name in ("rows", "columns", "batches"):
            integer(name, getattr(self, name), 0)
        boolean("row_major", self.row_major)
        boolean("padded", self.padded)
        contiguous, other = (self.columns, self.rows) if self.row_major else (self.rows, self.columns)
        if self.stride == -1:
            object.__setattr__(self, "stride", contiguous)
        if self.batch_stride == -1:
            object.__setattr__(self, "batch_stride", other * self.stride if self.batches > 1 else 0)
        size = DTYPE_BYTES[self.dtype]
        alignment = common_power_of_two(self.alignment, self.stride * size, self.batch_stride * size)
        object.__setattr__(self, "alignment", alignment)

    @property
    def vector(self) -> int:
        """Elements that one load can read: their number divides the contiguous extent, too."""
        contiguous = self.columns if self.row_major else self.rows
        return common_power_of_two(self.alignment, contiguous * DTYPE_BYTES[self.dtype]) // DTYPE_BYTES[self.dtype]

    @property
    def readable(self) -> bool:
        """Whether TMA can read it. TMA cannot read one matrix for all batches (batch stride 0)."""
        return self.alignment == TMA_ALIGNMENT and (self.batches == 1 or self.batch_stride > 0)

    @property
    def writable(self) -> bool:
        """Whether TMA can write it. TMA writes 16 bytes at a time, so rows must end at a multiple or be padded."""
        whole_rows = self.columns * DTYPE_BYTES[self.dtype] % TMA_ALIGNMENT == 0
        return self.alignment == TMA_ALIGNMENT and (whole_rows or self.padded)


def common_power_of_two(*values: int) -> int:
    """The largest power of two, at most 16, that divides all values."""
    power = TMA_ALIGNMENT
    for value in values:
        while value % power:
            power //= 2
    return power


@dataclass(frozen=True)
class GemmSpec:
    """``D = alpha * scale_a * scale_b * A @ B.T + bias + partial + beta * C``, without numbers and addresses.

    Attributes:
        a: A, (m, k).
        b: B, (n, k).
        d: D, (m, n).
        c: C, (m, n); None: absent. It may be the same memory as D.
        partial: a partial sum, (m, n); None: absent. It may be the same memory as D.
        bias: element type of the bias, a row of n; None: absent.
        scale_a: the scales of A.
        scale_b: the scales of B.

    Raises:
        ValueError: if the extents, the types or the scales of A and B do not fit together.
    """

    a: MatrixSpec
    b: MatrixSpec
    d: MatrixSpec
    c: MatrixSpec | None = None
    partial: MatrixSpec | None = None
    bias: str | None = None
    scale_a: ScaleMode = "none"
    scale_b: ScaleMode = "none"

    def __post_init__(self) -> None:
        a, b, d = self.a, self.b, self.d
        for name in ("a", "b", "d", "c", "partial"):
            if name in ("a", "b", "d") or getattr(self, name) is not None:
                instance(name, getattr(self, name), MatrixSpec, "a MatrixSpec")
        for name in ("scale_a", "scale_b"):
            member(name, getattr(self, name), get_args(ScaleMode))
        if a.columns != b.columns:
            raise ValueError(f"A (m, k) and B (n, k) differ in k: {_shape(a)} and {_shape(b)}")
        for name, matrix in (("D", d), ("C", self.c), ("the partial sum", self.partial)):
            if matrix is not None and (matrix.rows, matrix.columns) != (a.rows, b.rows):
                raise ValueError(f"{name} is (m, n) = ({a.rows}, {b.rows}), got {_shape(matrix)}")
        for name, matrix in (("A", a), ("B", b), ("C", self.c), ("the partial sum", self.partial)):
            if matrix is not None and matrix.batches != d.batches:
                raise ValueError(f"D has {d.batches} batches, {name} has {matrix.batches}")
        if a.dtype != b.dtype and not {a.dtype, b.dtype} <= set(FP8):
            raise ValueError(
                f"A and B are of one type, got {a.dtype} and {b.dtype}; only {' and '.join(FP8)} may differ"
            )
        if (self.block_rows_a == 0) != (self.block_rows_b == 0):
            raise ValueError(f"both A and B have scales of blocks, or none has, got {self.scale_a} and {self.scale_b}")

    @property
    def m(self) -> int:
        return self.a.rows

    @property
    def n(self) -> int:
        return self.b.rows

    @property
    def k(self) -> int:
        return self.a.columns

    @property
    def l(self) -> int:  # noqa: E743  (the mode's name in CUTLASS)
        return self.d.batches

    @property
    def block_rows_a(self) -> int:
        """Rows of a block of A that has one scale; 0: blocks have none."""
        return _block_rows(self.scale_a)

    @property
    def block_rows_b(self) -> int:
        """As ``block_rows_a``, of B."""
        return _block_rows(self.scale_b)

    @property
    def results_aligned(self) -> bool:
        """Whether TMA can write D and read the matrix added to it. If there is a partial sum, C is read without TMA."""
        added = self.partial or self.c
        return self.d.writable and (added is None or added.readable)

    @property
    def operands_aligned(self) -> bool:
        """Whether TMA can read A and B."""
        return self.a.readable and self.b.readable


def _block_rows(mode: ScaleMode) -> int:
    return int(mode.partition("x")[0]) if "x" in mode else 0


def _shape(matrix: MatrixSpec) -> str:
    return f"({matrix.rows}, {matrix.columns})"


MAX_TEXT = 100
"""Characters of the longest text of a configuration."""

_CONFIG = re.compile(
    r"(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_(cooperative|pingpong|plain)(_direct)?(?:_raster_(m|n))?(?:_swizzle_(\d+))?(?:_share_(\d+))?(?:_split_(\d+))?"
)


CLUSTERS_AT_ONCE = {4: 30, 8: 15}
"""Clusters of so many thread blocks that an H100 and an H200 held at once. GPUs of one kind may differ in it."""


def clusters_at_once(blocks: int, sms: int) -> int:
    """Clusters of so many thread blocks, one on each SM, that so many SMs hold at once, as estimates count them.

    A cluster lies in one GPC. For a launch, ask the GPU: ``Cubin.max_clusters``.
    """
    return min(sms // blocks, CLUSTERS_AT_ONCE.get(blocks, sms))


@dataclass(frozen=True)
class GemmConfig:
    """How a CUTLASS kernel computes a GEMM.

    Its text is like ``128x256x64_1x2_cooperative``, followed by ``_direct``, ``_raster_m`` (or n), ``_swizzle_4`` and
    ``_share_2`` or ``_split_4`` if these differ from the defaults.

    Attributes:
        tile: elements (m, n, k) that a thread block computes at a time.
        cluster: thread blocks (m, n) that share TMA loads; powers of two, 8 blocks at most.
        kernel_schedule: how warp groups share the work.
        epilogue: how results are stored.
        raster: the order of tiles.
        swizzle: tiles are computed in stripes of up to so many, a power of two.
        share: the kernel occupies one of so many SMs and leaves the others to kernels beside it.
        split: so many thread blocks of a cluster split k: each multiplies all tiles of the cluster, and the first ones
            finish one each; 1: each thread block has a tile. Only per-tile kernels with pingpong tiles split k.

    A "plain" kernel has cluster (1, 1), epilogue "direct", raster "heuristic", swizzle 1 and share 1.

    Raises:
        ValueError: for anything else.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    kernel_schedule: KernelSchedule = "cooperative"
    epilogue: Epilogue = "tma"
    raster: Raster = "heuristic"
    swizzle: int = 1
    share: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        for name, extents, count in (("tile", self.tile, 3), ("cluster", self.cluster, 2)):
            if len(extents) != count or not all(isinstance(x, int) and x > 0 for x in extents):
                raise ValueError(f"{name} is a tuple of {count} integers > 0, got {extents!r}")
        for name, value, known in (
            ("kernel_schedule", self.kernel_schedule, KERNEL_SCHEDULES),
            ("epilogue", self.epilogue, EPILOGUES),
            ("raster", self.raster, RASTERS),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
        if self.swizzle not in (1, 2, 4, 8):
            raise ValueError(f"swizzle is 1, 2, 4 or 8, got {self.swizzle!r}")
        if self.share not in SHARES:
            raise ValueError(f"share is one of {SHARES}, got {self.share!r}")
        if any(x & (x - 1) for x in self.cluster) or self.cluster[0] * self.cluster[1] > 8:
            raise ValueError(f"a cluster has 1, 2, 4 or 8 thread blocks along m and n, 8 at most, got {self.cluster}")
        if self.split not in (1, 2, 4, 8) or (
            self.split > 1 and (self.kernel_schedule != "pingpong" or self.cluster[0] * self.cluster[1] > self.split)
        ):
            raise ValueError(
                "split is 1; or 2, 4 or 8 for a pingpong kernel whose clusters have at most so many tiles, got "
                f"{self.split!r}, {self.kernel_schedule} and clusters of {self.cluster[0]}x{self.cluster[1]}"
            )
        if self.kernel_schedule == "plain" and (self.cluster, self.epilogue, self.raster, self.swizzle, self.share) != (
            (1, 1),
            "direct",
            "heuristic",
            1,
            1,
        ):
            raise ValueError(
                "a plain kernel has cluster (1, 1), epilogue 'direct', raster 'heuristic', swizzle 1 and share 1"
            )

    def __str__(self) -> str:
        text = "x".join(map(str, self.tile)) + f"_{self.cluster[0]}x{self.cluster[1]}_{self.kernel_schedule}"
        text += "_direct" if self.epilogue == "direct" and self.kernel_schedule != "plain" else ""
        text += "" if self.raster == "heuristic" else f"_raster_{self.raster}"
        text += "" if self.swizzle == 1 else f"_swizzle_{self.swizzle}"
        text += "" if self.share == 1 else f"_share_{self.share}"
        return text + ("" if self.split == 1 else f"_split_{self.split}")

    @classmethod
    def parse(cls, text: str) -> GemmConfig:
        """The configuration with this text.

        Raises:
            ValueError: for any other text.
        """
        found = _CONFIG.fullmatch(text) if isinstance(text, str) and len(text) < MAX_TEXT else None
        if not found:
            raise wrong("a configuration", "written like 128x256x64_1x2_cooperative_swizzle_4", text)
        parts: tuple[Any, ...] = found.groups()
        m, n, k, cm, cn, kernel_schedule, direct, raster, swizzle, share, split = parts
        return cls(
            tile=(int(m), int(n), int(k)),
            cluster=(int(cm), int(cn)),
            kernel_schedule=kernel_schedule,
            epilogue="direct" if direct or kernel_schedule == "plain" else "tma",
            raster=raster or "heuristic",
            swizzle=int(swizzle or 1),
            share=int(share or 1),
            split=int(split or 1),
        )
