"""From tensors to the parameters of a per-tile kernel: how a workspace is laid out, and what a call passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from distgemm.gemm.per_tile import params as structs
from distgemm.gemm.per_tile.epochs import TICKET_BITS
from distgemm.gemm.per_tile.kernel import (
    BYTES,
    PIECE_BYTES,
    PIECE_ROWS,
    SUBTILE_ROWS,
    SWIZZLE_ROWS,
    WARP_ROWS,
    KernelTraits,
)
from distgemm.gemm.per_tile.order import PieceOrder, TileOrder

__all__ = ["LANES", "Matrices", "RankGemm", "Space", "may_span", "params_of"]

SLOT_ALIGNMENT = 1024
MAX_TICKETS = 1 << TICKET_BITS
PACKET_ROWS, ROW_THREADS = 8, 4
"""Rows whose packets a warp stores together, and its threads that have a row."""
PACKET_BYTES, PACKET_DATA_BYTES = 16, 12
"""Of a packet, and of the partial sum in it. The rest is the epoch."""
LANES = 32
"""Of a warp, each of which reads a flag."""
MAX_SENT_ROWS = (1 << 31) // PIECE_BYTES
"""Of a rank: a kernel's offset of a row of a slice has 32 bits with the sign."""
SMS = 132
"""SMs of a GPU that the order of tiles is made for."""


class Matrices(NamedTuple):
    """Equal matrices that are a tensor: one for each shard, or one alone.

    Attributes:
        rows: of each.
        columns: of each.
        number: how many.
        beside: whether they lie beside each other, and not above each other.
    """

    rows: int
    columns: int
    number: int = 1
    beside: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tensor."""
        if self.beside:
            return self.rows, self.columns * self.number
        return self.rows * self.number, self.columns


def may_span(traits: KernelTraits, ranks: int, rows: int) -> bool:
    """Whether tiles of a kernel span the shards of so many ranks, of so many rows each: fewer than a cluster has."""
    height = traits.block_tile[0]
    if traits.pattern not in {"ag+gemm", "gemm+rs"} or ranks == 1:
        return False
    if not 0 < rows < traits.tile[0] * traits.cluster[0]:
        return False
    if traits.gathers:  # the flags of a slice are read by one warp
        shards = min(ranks, -(-(height - 1) // rows) + 1)
        return shards * -(-rows // PIECE_ROWS) <= LANES
    return rows % WARP_ROWS == 0


@dataclass(frozen=True)
class RankGemm:
    """What each rank multiplies.

    Attributes:
        traits: of the kernel.
        distances: of the other ranks' shards, in the order in which they are multiplied.
        m: rows of a shard. A shard has the rows of a rank; for "gemm+a2a" this rank's rows and the columns of a rank;
            in a one-shot all-reduce all of D, as each rank owns all tiles; and where tiles span shards, those of all
            ranks.
        n: columns of D on a rank.
        k: columns of A on a rank.
        group: rows of clusters that are multiplied in turn; 0: so many that tiles at a time span as many rows as
            columns.
        lead: units by which own tiles come earlier or later than others; None: so many that they seldom wait.
        by_columns: of "gemm+ar", whether a shard is n columns of D with all m rows of it. B then is read once, and not
            once for each shard of rows, so this is for few rows.
        spans: whether tiles of "ag+gemm" or "gemm+rs" span shards: they have the rows of several ranks, and all of D is
            one shard. B then is read once, so this is for few rows, too.

    Raises:
        ValueError: for more tiles than there are tickets, for shards of columns with another pattern, and for tiles
            that cannot span shards.
    """

    traits: KernelTraits
    distances: tuple[int, ...]
    m: int
    n: int
    k: int
    group: int = 0
    lead: int | None = None
    by_columns: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        if self.by_columns and self.traits.pattern != "gemm+ar":
            raise ValueError(f'only shards of "gemm+ar" may be columns, got {self.traits.pattern!r}')
        if self.spans and (self.m % self.ranks or not may_span(self.traits, self.ranks, self.rank_rows)):
            raise ValueError(
                f"tiles that span shards have equal shards of fewer rows than a cluster, with at most {LANES} pieces "
                f"in them, and a reduction's shards have multiples of {WARP_ROWS} rows; got {self.m} rows of "
                f"{self.ranks} ranks for {self.traits.name}"
            )
        if self.traits.sends and self.rank_rows > MAX_SENT_ROWS:
            raise ValueError(
                f"a kernel that gathers has 32-bit offsets of rows, so a rank sends at most {MAX_SENT_ROWS} rows, got "
                f"{self.rank_rows}"
            )
        if self.k <= (self.traits.split - 1) * self.traits.tile_k:
            raise ValueError(
                f"each of the {self.traits.split} thread blocks that split k has {self.traits.tile_k} columns of A or "
                f"more, got k={self.k}"
            )

    @property
    def rank_rows(self) -> int:
        """Of the rows of a shard, those of a rank."""
        return self.m // self.ranks if self.spans else self.m

    @cached_property
    def order(self) -> TileOrder:
        """The order of tiles."""
        traits = self.traits
        height, width = (x * y for x, y in zip(traits.tile, traits.cluster, strict=True))
        blocks, columns = -(-self.m // height), -(-self.n // width)
        at_once = traits.clusters_on(SMS)
        to_owners, from_holders = traits.pattern == "gemm+a2a", traits.pattern == "a2a+gemm"
        one = to_owners or from_holders or self.by_columns or traits.one_shot or self.spans
        shards = 1 if one else self.ranks  # whose rows are multiplied at a time
        group = self.group or max(1, min(blocks, round(math.sqrt(at_once * width / height) / shards)))
        usual = blocks * columns if traits.gathers or to_owners else -(-2 * at_once // self.ranks)
        lead = min(blocks * columns, usual if self.lead is None else self.lead)
        distances, lead = ((), 0) if from_holders or traits.one_shot or self.spans else (self.distances, lead)
        order = TileOrder(distances, blocks, columns, group, lead, traits.gathers)
        if order.clusters + 1024 > MAX_TICKETS:
            raise ValueError(f"a kernel has at most {MAX_TICKETS} clusters of tiles, got {order.clusters}")
        return order

    @cached_property
    def pieces(self) -> PieceOrder:
        """The order of pieces of a gather: rows whose tiles are multiplied at a time are sent in turn."""
        traits, order = self.traits, self.order
        rows = -(-self.rank_rows // PIECE_ROWS)
        slices = -(-self.k * BYTES[traits.dtype] // PIECE_BYTES)
        at_once = traits.clusters_on(SMS) // (max(order.shards - 1, 1) * order.columns)
        blocks = max(order.group, min(order.blocks, at_once))
        together = blocks * traits.cluster[0] * traits.tile[0] // PIECE_ROWS
        return PieceOrder(self.distances, rows, slices, together, self.spans)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.distances) + 1

    @property
    def matrices(self) -> dict[str, Matrices]:
        """The tensors of a rank: "a", "b", "d", and "gathered", all of A that it multiplies, if it receives some."""
        pattern, ranks, m, n, k = self.traits.pattern, self.ranks, self.m, self.n, self.k
        if pattern == "ag+gemm":
            count = 1 if self.spans else ranks
            found = {"a": Matrices(self.rank_rows, k), "d": Matrices(m, n, count), "gathered": Matrices(m, k, count)}
        elif pattern == "gemm+a2a":
            found = {"a": Matrices(m, k), "b": Matrices(n, k, ranks), "d": Matrices(m, n, ranks)}
        elif pattern == "a2a+gemm":
            beside = Matrices(m, k, ranks, beside=True)
            found = {"a": Matrices(m, k, ranks), "b": beside._replace(rows=n), "d": Matrices(m, n), "gathered": beside}
        elif self.by_columns:
            found = {"a": Matrices(m, k), "b": Matrices(n, k, ranks), "d": Matrices(m, n, ranks, beside=True)}
        elif self.traits.one_shot or self.spans:
            found = {"a": Matrices(m, k), "d": Matrices(self.rank_rows, n)}
        else:
            found = {"a": Matrices(m, k, ranks), "d": Matrices(m, n, 1 if pattern == "gemm+rs" else ranks)}
        return {"b": Matrices(n, k), **found}

    @property
    def parts(self) -> int:
        """Parts of the tiles of a shard."""
        clusters = self.order.blocks * self.order.columns
        return clusters * self.traits.tiles * self.traits.parts

    @property
    def flags(self) -> int:
        """Number of flags in each buffer of a workspace."""
        if self.traits.gathers:
            return self.pieces.pieces
        if self.traits.one_shot:
            return 0
        return (self.ranks - 1) * self.parts * (2 if self.traits.pattern == "gemm+ar" else 1)

    def slot_of(self, number: int, rank: int) -> tuple[int, str]:
        """What a flag guards.

        Args:
            number: of the flag in its buffer.
            rank: in whose memory it is.

        Returns:
            The rank that sets it, and in words what comes from there.
        """
        distance, what = self._slot_of(number, rank)
        return (rank + distance) % self.ranks, what

    def _slot_of(self, number: int, rank: int) -> tuple[int, str]:
        traits = self.traits
        if traits.gathers:
            rest, piece = divmod(number, self.pieces.slices)
            shard, row = divmod(rest, self.pieces.rows)
            first = row * PIECE_ROWS
            rows = f"rows {first} to {min(first + PIECE_ROWS, self.rank_rows) - 1}"
            if traits.pattern == "a2a+gemm":
                return shard + 1, f"slice {piece} of its columns of A, for {rows} of this rank's rows"
            return shard - rank if self.spans else shard + 1, f"slice {piece} of k, for {rows} of its shard of A"
        rest, part = divmod(number, self.parts)
        row, column = divmod(part // traits.parts, self.order.columns * traits.cluster[1])
        result, distance = divmod(rest, self.ranks - 1)
        if traits.pattern == "gemm+a2a":
            return distance + 1, f"the result of tile ({row}, {column}) of its rows of this rank's columns of D"
        if self.spans:
            return distance + 1, f"the partial sum of this rank's rows of tile ({row}, {column}) of D"
        what, whose = ("result", "its") if result else ("partial sum", "this rank's")
        return distance + 1, f"the {what} of tile ({row}, {column}) of {whose} shard of D"

    @property
    def slot_bytes(self) -> int:
        """Bytes of slots in each buffer of a workspace."""
        if self.traits.gathers:
            return len(self.pieces.receivers) * self.rank_rows * self.pieces.slices * PIECE_BYTES
        return self.flags * self.traits.part_bytes

    @property
    def row_packet_bytes(self) -> int:
        """Bytes of the packets of a tile's row: four threads share the row, and each has packets of its own."""
        data = self.traits.tile[1] * BYTES[self.traits.partial_dtype] // ROW_THREADS
        return ROW_THREADS * -(-data // PACKET_DATA_BYTES) * PACKET_BYTES

    @property
    def packet_bytes(self) -> int:
        """Bytes of packets in each buffer of a workspace: those of the partial sums of all ranks."""
        traits = self.traits
        if not traits.one_shot:
            return 0
        tiles, rows = self.parts // traits.parts, min(traits.tile[0], -(-self.m // PACKET_ROWS) * PACKET_ROWS)
        return self.ranks * tiles * rows * self.row_packet_bytes

    @property
    def loaded_rows(self) -> tuple[int, int]:
        """Rows of A in a box that a thread block loads into a stage, and rows from one box to the next.

        Thread blocks of a cluster divide the rows of a tile, or of a shard that has fewer. To load a row that does not
        exist takes as long.
        """
        rows, blocks = self.traits.shares[0]
        if self.traits.a_major == "m":  # a box has all rows
            return rows, rows
        step = SWIZZLE_ROWS * blocks
        apart = min(rows, -(-self.m // step) * step) // blocks
        return min(apart, self.m), apart


@dataclass(frozen=True)
class Space:
    """Where the workspaces of all ranks are, and how they are laid out.

    Attributes:
        bases: the address of each rank's workspace, in this rank's address space.
        rank: this rank.
        flags: number of flags in each buffer.
        slot_bytes: bytes of slots in each buffer.
        packet_bytes: bytes of packets in each buffer.
    """

    bases: Sequence[int]
    rank: int
    flags: int
    slot_bytes: int
    packet_bytes: int = 0

    @property
    def flags_at(self) -> int:
        """Offset of the flags."""
        return -(-structs.CONTROL_BYTES // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def slots_at(self) -> int:
        """Offset of the slots."""
        return self.flags_at + -(-2 * self.flags * 8 // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def slots_of_buffer(self) -> int:
        """Bytes from the slots of the first buffer to those of the second."""
        return -(-self.slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def packets_at(self) -> int:
        """Offset of the packets."""
        return self.slots_at + 2 * self.slots_of_buffer

    @property
    def size(self) -> int:
        """Bytes of a workspace."""
        return self.packets_at + 2 * self.packet_bytes


def params_of(
    gemm: RankGemm,
    space: Space,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    *,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    beta: float = 0.0,
    gathered: torch.Tensor | None = None,
    gb_per_s: float = 0.0,
    executable: int = 0,
    epochs_a_replay: int = 1,
) -> structs.Params:
    """The parameters of a call.

    Args:
        gemm: what is multiplied.
        space: the workspaces.
        a: A, of the shape that ``gemm.matrices`` gives, as are B, D, C and ``gathered``.
        b: B.
        d: D.
        alpha: factor of the product.
        bias: a number for each column of D.
        c: C, of D's shape.
        beta: factor of C.
        gathered: where all of A goes that this rank multiplies; for shards that have contiguous rows.
        gb_per_s: rate at which stores to peers leave; 0: without a limit.
        executable: its number, by which the watchdog knows it.
        epochs_a_replay: by how much a replay raises the epoch.

    Raises:
        ValueError: for tensors that TMA cannot copy.
    """
    traits, of = gemm.traits, gemm.matrices
    share_a, share_b = (extent // blocks for extent, blocks in traits.shares)
    if traits.a_major == "k":
        share_a = gemm.loaded_rows[0]
    params = structs.Params.new()
    _describe(params.a, "A", a, traits.dtype, of["a"], share_a, traits.a_major == "k")
    _describe(params.b, "B", b, traits.dtype, of["b"], share_b, traits.b_major == "k")
    rows_of_d = WARP_ROWS if gemm.spans and not traits.gathers else SUBTILE_ROWS  # that are stored at a time
    _describe(params.d, "D", d, traits.out_dtype, of["d"], rows_of_d)
    if traits.gathers:
        wide = PIECE_BYTES // BYTES[traits.dtype]
        matrices = 1 if gemm.spans else max(gemm.ranks - 1, 1)
        for buffer, descriptor in enumerate(params.received):
            slots = space.bases[space.rank] + space.slots_at + buffer * space.slots_of_buffer
            extents = (wide, gemm.m, matrices * gemm.pieces.slices)
            structs.describe(descriptor, "the received A", slots, traits.dtype, extents, wide, gemm.m * wide, share_a)
        params.pieces = structs.Pieces.of(gemm.pieces)
    if gathered is not None:
        _describe(params.gathered, "the gathered A", gathered, traits.dtype, of["gathered"], traits.block_tile[0])
        params.gathered_at, params.gathered_stride = gathered.data_ptr(), pitch_of(gathered)
    params.order = structs.Order.of(gemm.order)
    spaces = params.workspaces
    spaces.base[: gemm.ranks] = list(space.bases)
    spaces.flags, spaces.flags_of_buffer = space.flags_at, space.flags * 8
    spaces.slots, spaces.slots_of_buffer = space.slots_at, space.slots_of_buffer
    spaces.packets, spaces.packets_of_buffer = space.packets_at, space.packet_bytes
    spaces.rank, spaces.ranks, spaces.executable = space.rank, gemm.ranks, executable
    spaces.epochs_a_replay = epochs_a_replay
    terms = params.terms
    terms.alpha, terms.beta = alpha, beta
    if bias is not None:
        if bias.stride(0) != 1:
            raise ValueError(f"the bias is contiguous, got strides {bias.stride()}")
        terms.bias = bias.data_ptr()
    if c is not None and beta:
        if c.stride(1) != 1:
            raise ValueError(f"rows of C are contiguous, got strides {c.stride()}")
        terms.c, terms.c_stride = c.data_ptr(), c.stride(0)
    params.shard, params.shard_stride = a.data_ptr(), pitch_of(a)
    params.m, params.n, params.k, params.slices = gemm.m, gemm.n, gemm.k, gemm.pieces.slices
    params.rank_rows, params.by_columns = gemm.rank_rows, gemm.by_columns
    params.box_m, params.loaded_m = gemm.loaded_rows
    params.picoseconds_per_kib = round(1024 * 1000 / gb_per_s) if gb_per_s else 0
    return params


def _describe(
    descriptor: structs.Descriptor,
    name: str,
    x: torch.Tensor,
    dtype: str,
    matrices: Matrices,
    share: int,
    by_rows: bool = True,
) -> None:
    """The descriptor of a tensor of matrices, with contiguous rows or columns. A box has so many of them: the share."""
    if x.stride(int(by_rows)) != 1:
        raise ValueError(f"{'rows' if by_rows else 'columns'} of {name} are contiguous, got strides {x.stride()}")
    rows, columns, number, beside = matrices
    pitch = pitch_of(x) if by_rows else x.stride(1)
    matrix_pitch = (columns if beside else rows) * (pitch if by_rows != beside else 1)
    extents = (columns, rows, number) if by_rows else (rows, columns, number)
    structs.describe(descriptor, name, x.data_ptr(), dtype, extents, pitch, matrix_pitch, share)


def pitch_of(x: torch.Tensor) -> int:
    """Elements from row to row. The stride of a single row means nothing."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
