"""What per_tile.cu does with its parameters, on a CPU: descriptors, slots and orders give the results of each pattern.

The ranks share a process, and one thread does their steps in turn. Which matrix of a descriptor a tile has, and which
slot, is computed as in the kernel. Tiles are multiplied with what descriptors address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distgemm.gemm.per_tile import params as structs
from distgemm.gemm.per_tile.bind import RankGemm, Space, params_of
from distgemm.gemm.per_tile.kernel import GATHERING, PATTERN_NUMBERS, PIECE_BYTES, PIECE_ROWS, WARP_ROWS, KernelTraits
from distgemm.schedulers import Pattern
from tests.unit.test_cuda_per_tile import Driver
from tests.unit.test_gemm_parameters import Recorded

Tensor = torch.Tensor
M, N, K = 72, 136, 328
"""Of a rank: rows of a shard, columns of D, columns of A. Tiles and slices lie partly outside."""


class Tile:
    """A tile of a rank.

    Attributes:
        distance, row, column: as in the kernel.
        rows, columns: of it in its shard, without those outside.
        number: of it in its shard.
    """

    def __init__(self, gemm: RankGemm, distance: int, block: int, column: int, number: int) -> None:
        (height, width), (down, across) = gemm.traits.tile, gemm.traits.cluster
        self.distance, self.row, self.column = distance, block * down + number % down, column * across + number // down
        self.rows = slice(min(self.row * height, gemm.m), min(self.row * height + height, gemm.m))
        self.columns = slice(self.column * width, min(self.column * width + width, gemm.n))
        self.number = self.row * gemm.order.columns * across + self.column


def described(descriptor: structs.Descriptor) -> Tensor:
    """The matrices of a descriptor: (number, other mode, contiguous mode)."""
    found = Recorded.from_buffer_copy(descriptor)
    shape, strides = tuple(reversed(found.extents)), (found.strides[1] // 2, found.strides[0] // 2, 1)
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint16 * size).from_address(found.address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(shape, strides)


def of_slice(matrix: Tensor, columns: slice) -> Tensor:
    """A slice, and zeros behind the last column of the matrix."""
    found = matrix[:, columns]
    return torch.nn.functional.pad(found, (0, PIECE_BYTES // 2 - found.shape[1]))


class Ranks:
    """The ranks of a pattern, each with its tensors and its workspace."""

    def __init__(self, gemm: RankGemm, tensors: list[dict[str, Tensor]]) -> None:
        self.gemm, self.ranks, self.pattern = gemm, gemm.ranks, gemm.traits.pattern
        self.tensors = tensors
        self.memory = [
            torch.full((Space((), 0, gemm.flags, gemm.slot_bytes).size // 2,), float("nan")).bfloat16() for _ in tensors
        ]
        bases = [memory.data_ptr() for memory in self.memory]
        self.params = [
            params_of(gemm, Space(bases, rank, gemm.flags, gemm.slot_bytes), **given)
            for rank, given in enumerate(tensors)
        ]
        self.slots: dict[tuple[int, int], Tensor] = {}  # by rank and number
        self.strips: dict[tuple[int, int, int], Tensor] = {}  # by rank, number and first row in the tile

    def tiles(self, own: bool) -> Iterator[Tile]:
        size = self.gemm.traits.cluster[0] * self.gemm.traits.cluster[1]
        for distance, block, column in self.gemm.order:
            if own == (distance == 0):
                yield from (Tile(self.gemm, distance, block, column, number) for number in range(size))

    def send(self, rank: int) -> None:
        """Warp 1 of a kernel that gathers: pieces go to slots of the receivers."""
        gemm, params = self.gemm, self.params[rank]
        own = self.tensors[rank]["a"]
        assert (params.shard, params.shard_stride) == (own.data_ptr(), own.stride(0))
        for number in range(gemm.pieces.pieces):
            piece = gemm.pieces.at(number)
            peer = (rank + self.ranks - piece.distance) % self.ranks
            m = params.rank_rows
            first = peer * m if self.pattern == "a2a+gemm" else 0
            slots = self.memory[peer][params.workspaces.slots // 2 :]  # of the first buffer
            shard = rank if gemm.spans else piece.distance - 1
            slots = slots[: gemm.slot_bytes // 2].view(-1, params.slices, gemm.m, PIECE_BYTES // 2)
            slots = slots[0, :, shard * m : (shard + 1) * m] if gemm.spans else slots[shard]
            rows = slice(piece.row * PIECE_ROWS, min(piece.row * PIECE_ROWS + PIECE_ROWS, m))
            columns = slice(piece.slice * PIECE_BYTES // 2, (piece.slice + 1) * PIECE_BYTES // 2)
            assert slots[piece.slice, rows].isnan().all()
            slots[piece.slice, rows] = of_slice(own[first : first + m], columns)[rows]

    def product(self, rank: int, tile: Tile) -> Tensor:
        """A tile's sum over its slices."""
        gemm, params = self.gemm, self.params[rank]
        a, received, b = described(params.a), None, described(params.b)
        if gemm.traits.gathers:
            received = described(params.received[0])
        from_holders = self.pattern == "a2a+gemm"
        count = params.slices * (self.ranks if from_holders else 1)
        total: Any = 0
        for number in range(count):
            distance, piece = gemm.pieces.slice_of_sum(number) if from_holders else (tile.distance, number)
            k, owner = slice(piece * PIECE_BYTES // 2, (piece + 1) * PIECE_BYTES // 2), (rank + distance) % self.ranks
            receives = gemm.traits.gathers and (distance or gemm.spans)
            if receives:
                assert received is not None
                of_a = received[(0 if gemm.spans else distance - 1) * params.slices + piece]
            else:
                by_rows = self.pattern in {"gemm+rs", "gemm+ar", "a2a+gemm"} and not (
                    gemm.by_columns or gemm.traits.one_shot or gemm.spans
                )
                of_a = a[owner if by_rows else 0]
            of_b = b[owner if self.pattern in {"gemm+a2a", "a2a+gemm"} or gemm.by_columns else 0]
            of_a = of_a if gemm.traits.a_major == "k" else of_a.T
            of_b = of_b if gemm.traits.b_major == "k" else of_b.T
            of_k = of_a if receives else of_slice(of_a, k)
            total = total + of_k[tile.rows].float() @ of_slice(of_b, k)[tile.columns].float().T
        return total

    def slot(self, distance: int, tile: Tile, results: bool = False) -> int:
        number = distance - 1 + results * (self.ranks - 1)
        return number * self.gemm.parts // self.gemm.traits.parts + tile.number

    def store(self, rank: int, slot: int, what: Tensor) -> None:
        assert (rank, slot) not in self.slots and slot < self.gemm.flags // self.gemm.traits.parts
        self.slots[rank, slot] = what

    def write(self, rank: int, tile: Tile, what: Tensor) -> None:
        own_rows = self.pattern in {"gemm+rs", "a2a+gemm"} or self.gemm.traits.one_shot or self.gemm.spans
        matrix = described(self.params[rank].d)[0 if own_rows else (rank + tile.distance) % self.ranks]
        assert matrix[tile.rows, tile.columns].isnan().all()
        matrix[tile.rows, tile.columns] = what.bfloat16()

    def run_one_shot(self) -> None:
        """Every rank gets all sums of a tile, and adds them in the order of ranks."""
        sums: dict[tuple[int, int], Tensor] = {}
        for rank in range(self.ranks):
            for tile in self.tiles(own=True):
                sums[rank, tile.number] = self.product(rank, tile)
        for rank in range(self.ranks):
            for tile in self.tiles(own=True):
                self.write(rank, tile, sum(sums[sender, tile.number] for sender in range(self.ranks)))

    def run_spanning_sums(self) -> None:
        """Every rank has its rows of the sums of a tile, by 16 rows. TMA stores rows that D has."""
        peers = range(1, self.ranks)
        for rank in range(self.ranks):
            for tile in self.tiles(own=True):
                found = self.product(rank, tile)
                for first in range(0, len(found), WARP_ROWS):
                    owner = (tile.rows.start + first) // self.params[rank].rank_rows
                    if owner != rank:
                        slot = self.slot((rank - owner) % self.ranks, tile)
                        self.strips[owner, slot, first] = found[first : first + WARP_ROWS]
        for rank in range(self.ranks):
            d, m = described(self.params[rank].d)[0], self.params[rank].rank_rows
            assert len(d) == m
            for tile in self.tiles(own=True):
                found = self.product(rank, tile)
                for first in range(0, len(found), WARP_ROWS):
                    row = tile.rows.start + first - rank * m
                    if 0 <= row < m:
                        strips = [self.strips.pop((rank, self.slot(distance, tile), first)) for distance in peers]
                        total = found[first : first + WARP_ROWS] + sum(strips)
                        d[row : row + WARP_ROWS, tile.columns] = total.bfloat16()
        assert not self.strips

    def run(self) -> None:
        everyone, gathers = range(self.ranks), self.gemm.traits.gathers
        for rank in everyone:
            if gathers:
                self.send(rank)
        for rank in everyone:
            for tile in self.tiles(own=False):
                found = self.product(rank, tile)
                if gathers:
                    self.write(rank, tile, found)
                else:
                    self.store((rank + tile.distance) % self.ranks, self.slot(self.ranks - tile.distance, tile), found)
        for rank in everyone:
            for tile in self.tiles(own=True):
                found = self.product(rank, tile)
                for distance in range(1, self.ranks if self.pattern in {"gemm+rs", "gemm+ar"} else 0):
                    found = found + self.slots.pop((rank, self.slot(distance, tile)))
                self.write(rank, tile, found)
                for distance in range(1, self.ranks if self.pattern == "gemm+ar" else 0):
                    self.store((rank - distance) % self.ranks, self.slot(distance, tile, results=True), found)
        if self.pattern in {"gemm+ar", "gemm+a2a"}:
            for rank in everyone:
                for distance in range(1, self.ranks):
                    for tile in self.tiles(own=True):
                        tile.distance = distance
                        self.write(
                            rank, tile, self.slots.pop((rank, self.slot(distance, tile, self.pattern == "gemm+ar")))
                        )
        assert not self.slots


def drawn(
    pattern: Pattern, ranks: int, by_columns: bool = False, one_shot: bool = False, m: int = M
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The tensors of each rank, and its D."""
    chance = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=chance).bfloat16()

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x.float() @ y.float().T).bfloat16()

    if pattern == "ag+gemm":
        a, b = numbers(m * ranks, K), numbers(N * ranks, K)
        parts, wanted = (a.chunk(ranks), b.chunk(ranks)), product(a, b).chunk(ranks, 1)
    elif pattern == "gemm+a2a":
        a, b = numbers(M * ranks, K), numbers(N * ranks, K)
        parts, wanted = (a.chunk(ranks), [b] * ranks), product(a, b).chunk(ranks, 1)
    elif pattern == "a2a+gemm":
        a, b = numbers(M * ranks, K * ranks), numbers(N, K * ranks)
        parts, wanted = (a.chunk(ranks, 1), [b] * ranks), product(a, b).chunk(ranks)
    else:
        a = numbers(m * (1 if by_columns or one_shot else ranks), K * ranks)
        b = numbers(N * (ranks if by_columns else 1), K * ranks)
        every = product(a, b)
        parts = a.chunk(ranks, 1), b.chunk(ranks, 1)
        wanted = every.chunk(ranks) if pattern == "gemm+rs" else [every] * ranks
    tensors = []
    for x, y, d in zip(*parts, wanted, strict=True):
        tensors.append({"a": x.contiguous(), "b": y.contiguous(), "d": torch.full_like(d, float("nan")).contiguous()})
    return tensors, list(wanted)


@pytest.mark.parametrize(
    ("pattern", "by_columns"), [*((pattern, False) for pattern in PATTERN_NUMBERS), ("gemm+ar", True)]
)
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "k"), ("k", "n"), ("m", "k")])
@pytest.mark.parametrize("distances", [(1,), (2, 3, 1)], ids=str)
def test_results(
    pattern: Pattern,
    by_columns: bool,
    a_major: Any,
    b_major: Any,
    distances: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends = pattern in GATHERING
    if sends and a_major == "m":
        pytest.skip("a gather sends rows")
    monkeypatch.setattr(structs, "libcuda", Driver)
    traits = KernelTraits(pattern, (64, 128), (2, 1), True, a_major=a_major, b_major=b_major, sends=sends)
    gemm = RankGemm(traits, distances, M, N, K, by_columns=by_columns)
    tensors, wanted = drawn(pattern, gemm.ranks, by_columns)
    for given in tensors:
        if a_major == "m":
            given["a"] = given["a"].T.contiguous().T
        if b_major == "n":
            given["b"] = given["b"].T.contiguous().T
    Ranks(gemm, tensors).run()
    for given, d in zip(tensors, wanted, strict=True):
        assert torch.equal(given["d"], d)


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("distances", [(1,), (2, 3, 1)], ids=str)
def test_one_shot_all_reduces(b_major: Any, distances: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "libcuda", Driver)
    traits = KernelTraits("gemm+ar", (64, 64), (1, 2), True, b_major=b_major, one_shot=True)
    gemm = RankGemm(traits, distances, M, N, K)
    tensors, wanted = drawn("gemm+ar", gemm.ranks, one_shot=True)
    if b_major == "n":
        for given in tensors:
            given["b"] = given["b"].T.contiguous().T
    Ranks(gemm, tensors).run_one_shot()
    for given, d in zip(tensors, wanted, strict=True):
        assert torch.equal(given["d"], d)


@pytest.mark.parametrize(
    ("tile", "cluster", "split"),
    [((64, 128), (1, 2), 1), ((128, 128), (1, 2), 1), ((64, 64), (2, 2), 4), ((64, 64), (1, 1), 2)],
    ids=str,
)
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "k"), ("k", "n"), ("m", "k")])
@pytest.mark.parametrize("distances", [(1,), (2, 3, 1)], ids=str)
@pytest.mark.parametrize(
    ("pattern", "m"), [("ag+gemm", m) for m in (1, 20, 40, 63)] + [("gemm+rs", m) for m in (16, 48)]
)
def test_tiles_that_span_shards(
    pattern: Pattern,
    m: int,
    tile: tuple[int, int],
    cluster: tuple[int, int],
    split: int,
    a_major: Any,
    b_major: Any,
    distances: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends = pattern in GATHERING
    if sends and a_major == "m":
        pytest.skip("a gather sends rows")
    monkeypatch.setattr(structs, "libcuda", Driver)
    traits = KernelTraits(pattern, tile, cluster, True, a_major=a_major, b_major=b_major, sends=sends, split=split)
    gemm = RankGemm(traits, distances, m * (len(distances) + 1), N, K, spans=True)
    tensors, wanted = drawn(pattern, gemm.ranks, m=m)
    for given in tensors:
        if a_major == "m":
            given["a"] = given["a"].T.contiguous().T
        if b_major == "n":
            given["b"] = given["b"].T.contiguous().T
    ranks = Ranks(gemm, tensors)
    assert described(ranks.params[1].d).shape == (1, *wanted[0].shape)
    if sends:
        for rank in range(gemm.ranks):
            ranks.send(rank)
        for rank in range(gemm.ranks):
            for one in ranks.tiles(own=True):
                ranks.write(rank, one, ranks.product(rank, one))
    else:
        ranks.run_spanning_sums()
    for given, d in zip(tensors, wanted, strict=True):
        assert torch.equal(given["d"], d)
