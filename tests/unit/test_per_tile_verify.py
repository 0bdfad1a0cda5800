"""The proof of per-tile executions agrees with an explicit graph of all ranks, and refuses orders that are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distgemm.gemm.per_tile.bind import RankGemm, may_span
from distgemm.gemm.per_tile.kernel import KernelTraits
from distgemm.gemm.per_tile.order import Piece, PieceOrder, Slice, TileCluster, TileOrder
from distgemm.gemm.per_tile.verify import prove
from distgemm.measure.models import MODELS
from distgemm.plan.schema import PlanError
from distgemm.schedulers import Pattern

PATTERNS: tuple[Pattern, ...] = ("ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a", "a2a+gemm")


@dataclass(frozen=True)
class Listed(TileOrder):
    """An order that a test makes up: its tiles as a list."""

    listed: tuple[TileCluster, ...] = ()

    def at(self, ticket: int) -> TileCluster:
        return self.listed[ticket]


@dataclass(frozen=True)
class ListedPieces(PieceOrder):
    listed: tuple[Piece, ...] = ()

    def at(self, number: int) -> Piece:
        return self.listed[number]


@dataclass(frozen=True)
class Changed(RankGemm):
    """A product whose order of tiles, or of pieces, is another one."""

    tiles: Callable[[list[TileCluster]], list[TileCluster]] = list
    sent: Callable[[list[Piece]], list[Piece]] = list

    @cached_property
    def order(self) -> TileOrder:
        order = super().order
        return Listed(*(getattr(order, x.name) for x in fields(order)), listed=tuple(self.tiles(list(order))))

    @cached_property
    def pieces(self) -> PieceOrder:
        pieces = super().pieces
        every = [pieces.at(number) for number in range(pieces.pieces)]
        return ListedPieces(*(getattr(pieces, x.name) for x in fields(pieces)), listed=tuple(self.sent(every)))


def traits_of(pattern: Pattern, cluster: tuple[int, int] = (2, 1), pingpong: bool = True) -> KernelTraits:
    return KernelTraits(pattern, (128, 128), cluster, pingpong)


@st.composite
def gemms(draw: st.DrawFn) -> RankGemm:
    distances = tuple(draw(st.permutations(range(1, draw(st.integers(1, 5))))))
    pattern, one_shot = draw(st.sampled_from([*((pattern, False) for pattern in PATTERNS), ("gemm+ar", True)]))
    traits = replace(traits_of(pattern, draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))), one_shot=one_shot)
    if pattern == "ag+gemm" and draw(st.booleans()):
        cluster = draw(st.sampled_from([(1, 1), (1, 2), (2, 2)]))
        traits = replace(traits, tile=(64, 64), cluster=cluster, split=4, epilogue_stages=1)
    m, n, k = (draw(st.integers(1 if number < 2 else 200, 900)) for number in range(3))
    spans = may_span(traits, ranks := len(distances) + 1, m) and draw(st.booleans())
    return RankGemm(traits, distances, m * ranks if spans else m, n, k, group=draw(st.integers(0, 3)), spans=spans)


@settings(max_examples=60)
@given(gemms())
def test_every_order_is_proved(gemm: RankGemm) -> None:
    down, across = gemm.traits.cluster
    tiles = gemm.ranks * gemm.order.clusters * down * across
    one = gemm.traits.pattern == "a2a+gemm" or gemm.traits.one_shot or gemm.spans
    assert gemm.order.shards == (1 if one else gemm.ranks)
    proof = prove(gemm)
    assert proof.tiles == tiles
    if gemm.traits.one_shot:
        assert (proof.slots, gemm.flags) == ((gemm.ranks - 1) * tiles * gemm.traits.parts, 0)
    else:
        assert proof.slots == gemm.ranks * gemm.flags


def ends(order: TileOrder) -> bool:
    """Whether a reduction ends with one cluster at a time on each rank: a graph of all tickets of all ranks."""
    ranks = order.shards
    ticket_of = {tile: ticket for ticket, tile in enumerate(order)}
    graph = TopologicalSorter[tuple[int, int]]()
    for rank in range(ranks):
        for ticket, (distance, block, column) in enumerate(order):
            before = [(rank, ticket - 1)] if ticket else []
            if not distance:
                # The rank x behind this one sees this rank's shard N - x behind itself.
                before += [
                    ((rank + x) % ranks, ticket_of[TileCluster(ranks - x, block, column)]) for x in range(1, ranks)
                ]
            graph.add((rank, ticket), *before)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


@settings(max_examples=150)
@given(st.data())
def test_the_proof_is_that_of_the_whole_graph(data: st.DataObject) -> None:
    """For any permutation of tiles, the same on all ranks: it ends if, and only if, the proof says so."""
    ranks, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    swaps = data.draw(st.integers(0, 4))

    def shuffled(tiles: list[TileCluster]) -> list[TileCluster]:
        for _ in range(swaps):
            i, j = (data.draw(st.integers(0, len(tiles) - 1)) for _ in range(2))
            tiles[i], tiles[j] = tiles[j], tiles[i]
        return tiles

    gemm = Changed(traits_of("gemm+rs"), tuple(range(1, ranks)), 256, columns * 128, 64, tiles=shuffled)
    if ends(gemm.order):
        prove(gemm)
    else:
        with pytest.raises(PlanError, match="may wait for ever"):
            prove(gemm)


def own_first(tiles: list[TileCluster]) -> list[TileCluster]:
    return sorted(tiles, key=lambda tile: tile.distance > 0)


def one_sum_late(tiles: list[TileCluster]) -> list[TileCluster]:
    late = next(tile for tile in tiles if tile.distance == 2)
    return [tile for tile in tiles if tile != late] + [late]


def one_tile_twice(tiles: list[TileCluster]) -> list[TileCluster]:
    return [*tiles[:-1], tiles[0]]


def outside(tiles: list[TileCluster]) -> list[TileCluster]:
    return [*tiles[:-1], tiles[-1]._replace(block=99)]


MUTANTS = {
    "own tiles first": (own_first, "may wait for ever"),
    "one sum behind all tiles": (one_sum_late, "ticket .* waits for the sum that rank . makes"),
    "a tile twice": (one_tile_twice, "multiplies each of"),
    "a tile outside": (outside, "a tile has a place from 0 to"),
}


@pytest.mark.parametrize(("tiles", "said"), [MUTANTS["a tile twice"], MUTANTS["a tile outside"]])
def test_mutants_of_a_one_shot_order_are_refused(
    tiles: Callable[[list[TileCluster]], list[TileCluster]], said: str
) -> None:
    gemm = Changed(replace(traits_of("gemm+ar"), one_shot=True), (1, 2, 3), 512, 640, 256)
    assert prove(gemm).waits == 4 * 3 * 4 * 5  # ranks, peers, rows and columns of tiles
    with pytest.raises(PlanError, match=said):
        prove(replace(gemm, tiles=tiles))


@pytest.mark.parametrize(("tiles", "said"), MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("pattern", ["gemm+rs", "gemm+ar"])
def test_mutants_of_the_order_are_refused(
    pattern: Pattern, tiles: Callable[[list[TileCluster]], list[TileCluster]], said: str
) -> None:
    gemm = Changed(traits_of(pattern), (1, 2, 3), 512, 640, 256)
    prove(gemm)
    with pytest.raises(PlanError, match=said):
        prove(replace(gemm, tiles=tiles))


@pytest.mark.parametrize("name", ["a tile twice", "a tile outside"])
def test_mutants_of_all_to_alls_are_refused(name: str) -> None:
    """Their tiles wait for nothing, so own ones may come at any time."""
    gemm = Changed(traits_of("gemm+a2a"), (1, 2, 3), 512, 640, 256)
    for tiles in (list, own_first, one_sum_late):
        prove(replace(gemm, tiles=tiles))
    tiles, said = MUTANTS[name]
    with pytest.raises(PlanError, match=said):
        prove(replace(gemm, tiles=tiles))


def test_the_error_names_both_ranks() -> None:
    """The rank that makes a sum at distance 1 stands one rank before the one that adds it."""

    def late(tiles: list[TileCluster]) -> list[TileCluster]:
        return sorted(tiles, key=lambda tile: tile == TileCluster(1, 0, 0))

    wanted = r"rank 0 multiplies its own tile of row 0 and column 0 .* rank 3 makes with ticket 39"
    with pytest.raises(PlanError, match=wanted):
        prove(Changed(traits_of("gemm+rs"), (1, 2, 3), 512, 640, 256, tiles=late))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_does_not_cover_a_shard_is_refused(pattern: Pattern) -> None:
    gemm = RankGemm(traits_of(pattern), (1, 2, 3), 512, 640, 1024)
    smaller = RankGemm(gemm.traits, gemm.distances, 256, 640, 512)
    other = RankGemm(gemm.traits, gemm.distances, 512, 640, 1024)
    vars(other)["order"] = smaller.order
    with pytest.raises(PlanError, match="2x5 tiles of 128x128 do not cover a shard of 512x640"):
        prove(other)
    if gemm.traits.gathers:
        vars(other).update(order=gemm.order, pieces=smaller.pieces)
        with pytest.raises(PlanError, match="8x2 pieces do not cover a shard of 512x1024"):
            prove(other)


def same_receiver(pieces: list[Piece]) -> list[Piece]:
    return [piece._replace(distance=1) for piece in pieces]


def no_last_slice(pieces: list[Piece]) -> list[Piece]:
    last = max(piece.slice for piece in pieces)
    return [piece for piece in pieces if piece.slice < last] + pieces[: len(pieces) // (last + 1)]


@pytest.mark.parametrize("sent", [same_receiver, no_last_slice])
@pytest.mark.parametrize("pattern", ["ag+gemm", "a2a+gemm"])
def test_mutants_of_the_pieces_are_refused(pattern: Pattern, sent: Callable[[list[Piece]], list[Piece]]) -> None:
    gemm = Changed(traits_of(pattern), (1, 2, 3), 512, 640, 1024)
    prove(gemm)
    with pytest.raises(PlanError, match="peers write each of"):
        prove(replace(gemm, sent=sent))


@pytest.mark.parametrize("peer", [0, 1])
def test_a_sum_without_a_ranks_slices_is_refused(peer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with those of another rank, or its own, twice."""
    gemm = RankGemm(traits_of("a2a+gemm"), (1, 2, 3), 512, 640, 1024)
    prove(gemm)
    right = PieceOrder.slice_of_sum

    def wrong(pieces: PieceOrder, number: int) -> Slice:
        found = right(pieces, number)
        return found._replace(distance=peer) if found == (2, 1) else found

    monkeypatch.setattr(PieceOrder, "slice_of_sum", wrong)
    with pytest.raises(PlanError, match="a tile adds each of"):
        prove(gemm)


@pytest.mark.parametrize(("pattern", "rows"), [("ag+gemm", 20), ("ag+gemm", 200), ("gemm+rs", 32), ("gemm+rs", 208)])
def test_tiles_that_span_shards_are_proved(pattern: Pattern, rows: int) -> None:
    """They wait for nothing that comes with a higher ticket, so their order does not matter."""
    gemm = Changed(traits_of(pattern), (3, 1, 2), 4 * rows, 640, 256, spans=True)
    tiles, waits = -(-4 * rows // 128), 0
    if pattern == "ag+gemm":
        for row in range(tiles):
            owners = {x // rows for x in range(row * 128, min(row * 128 + 128, 4 * rows))}
            waits += 4 * len(owners) * -(-rows // 32) * 5  # ranks, shards, rows of pieces, columns of tiles
        assert gemm.flags == 4 * -(-rows // 32)
    else:
        waits = 4 * 3 * rows // 16 * 5  # ranks, peers, warps' rows, columns of tiles
    assert prove(gemm).waits == waits
    prove(replace(gemm, tiles=lambda tiles: tiles[::-1]))
    for name in ("a tile twice", "a tile outside"):
        changed, said = MUTANTS[name]
        with pytest.raises(PlanError, match=said):
            prove(replace(gemm, tiles=changed))


@pytest.mark.parametrize("sent", [same_receiver, no_last_slice])
def test_mutants_of_the_pieces_of_spanned_shards_are_refused(sent: Callable[[list[Piece]], list[Piece]]) -> None:
    """Also those that a rank sends to itself."""
    gemm = Changed(traits_of("ag+gemm"), (1, 2, 3), 128, 640, 1024, spans=True)
    with pytest.raises(PlanError, match="peers write each of"):
        prove(replace(gemm, sent=sent))


def test_spanned_shards_that_no_kernel_has_are_refused() -> None:
    for pattern, m, ranks, tile in (
        ("gemm+rs", 20, 2, (128, 128)),  # a warp's rows would have two owners
        ("gemm+rs", 256, 2, (128, 128)),
        ("ag+gemm", 256, 2, (128, 128)),
        ("gemm+ar", 32, 2, (128, 128)),
        ("ag+gemm", 2, 40, (128, 128)),  # a warp would read 40 flags of a slice
    ):
        traits = KernelTraits(pattern, tile, (2, 1), True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tiles that span shards have equal shards"):
            RankGemm(traits, tuple(range(1, ranks)), m * ranks, 640, 256, spans=True)
    gemm = RankGemm(traits_of("gemm+rs"), (1, 2, 3), 4 * 32, 640, 256, spans=True)
    object.__setattr__(gemm, "m", 4 * 40)
    with pytest.raises(PlanError, match="16 rows of a warp have one owner, got shards of 40 rows"):
        prove(gemm)


def test_own_tiles_of_a_gather_may_come_first_or_last() -> None:
    for tiles in (own_first, lambda tiles: own_first(tiles)[::-1]):
        prove(Changed(traits_of("ag+gemm"), (2, 1), 512, 640, 256, tiles=tiles))


def test_the_largest_layers_are_proved_at_once() -> None:
    for layer in MODELS["llama-3-405b"].layers:
        m, n, k = layer.local(8192, 8)
        for pattern in layer.patterns:
            gemm = RankGemm(traits_of(pattern), tuple(range(1, 8)), m // 8, n, k)
            begin = time.perf_counter()
            prove(gemm)
            assert time.perf_counter() - begin < 2
