"""What per-tile kernels are compiled for, and how a workspace is laid out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.nvcc import cubin_path
from distgemm.gemm.per_tile.bind import RankGemm, Space
from distgemm.gemm.per_tile.kernel import KernelTraits, Launch
from distgemm.gemm.per_tile.order import TileOrder
from distgemm.gemm.per_tile.params import CONTROL_BYTES, Control, Order, Params
from tests.unit.sass import instructions, loads, main_loop

GATHER = KernelTraits("ag+gemm", (128, 256), (2, 1), sends=True, epilogue_stages=1)
SPLIT = KernelTraits("ag+gemm", (64, 64), (2, 2), True, sends=True, epilogue_stages=1, split=4)
REDUCE = KernelTraits("gemm+rs", (128, 128), (2, 1), pingpong=True, epilogue_stages=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "dtype is bfloat16 or float16"),
        ({"tile": (96, 256)}, "64 or 128 rows of a tile and 64 to 256 columns"),
        ({"tile": (128, 200)}, "a multiple of 16"),
        ({"tile": (256, 256)}, "at most 24576 elements in all; got 256x256"),
        ({"tile": (256, 160), "pattern": "gemm+rs", "sends": False}, "at most 16384 elements in all; got 256x160"),
        ({"tile": (128, 160), "cluster": (3, 1)}, "a multiple of 8 rows .* of 128x160 and clusters of 3x1"),
        (
            {"pattern": "gemm+a2a", "tile": (128, 160), "sends": False},
            "multiples of 128 bytes, got 160 columns of bfloat16 for gemm.a2a",
        ),
        ({"pattern": "gemm+rs", "tile": (128, 160), "sends": False}, "128 bytes, got 160 .* of bfloat16 for gemm.rs"),
        ({"epilogue_stages": 6}, "2 stages, and 3 are needed"),
        ({"a_major": "m"}, "sends rows of a gather"),
        ({"pattern": "gemm+rs"}, "sends rows of a gather"),
        ({"one_shot": True}, "an all-reduce is one-shot"),
        ({"pattern": "gemm+ar", "sends": False, "out_dtype": "float32"}, "no wider than partial sums"),
    ],
)
def test_other_kernels_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(GATHER, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pingpong": False, "tile": (128, 64)}, "2, 4 or 8 for a pingpong kernel .*, got 4, cooperative"),
        ({"pattern": "a2a+gemm"}, 'only kernels for "ag.gemm", "gemm.rs" and one-shot .* split k, got per_tile a2a'),
        ({"pattern": "gemm+ar", "sends": False}, 'only kernels for "ag.gemm", .* split k, got per_tile gemm.ar'),
        ({"split": 2}, "clusters have at most so many tiles, got 2, pingpong and clusters of 2x2"),
        ({"cluster": (2, 1), "tile": (128, 128)}, "at most 24576 elements with one of them again, got per_tile ag"),
        ({"tile": (64, 128), "cluster": (1, 1), "split": 8}, "-3 stages, and 3 are needed"),
    ],
)
def test_ways_to_divide_k_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SPLIT, **changes)


def test_each_block_that_splits_k_has_some() -> None:
    with pytest.raises(ValueError, match=r"each of the 4 thread blocks that split k has 64 columns .*, got k=192"):
        RankGemm(SPLIT, (1,), 64, 128, 192)
    assert RankGemm(SPLIT, (1,), 64, 128, 200).order.clusters == 2


def test_blocks_that_divide_k_multiply_all_tiles_of_a_cluster() -> None:
    assert (SPLIT.tiles, SPLIT.blocks, SPLIT.block_tile, SPLIT.loaded_columns) == (4, 4, (128, 128), 128)
    one = (128 + 128) * 128
    others = 4 * 64 * 64 * 4 + (2 + 2) * 8192 + 2048  # sums, subtiles, what is sent, and the rest
    assert SPLIT.stages == 4 and 4 * one + others <= 227 << 10 < 5 * one + others
    assert [replace(SPLIT, cluster=(1, 1), split=split).clusters_on(132) for split in (2, 4, 8)] == [66, 30, 15]
    gemm = RankGemm(SPLIT, (1, 2, 3), 300, 500, 640)
    assert (gemm.order.blocks, gemm.order.columns, gemm.parts, gemm.loaded_rows) == (3, 4, 6 * 8, (128, 128))
    lone = replace(SPLIT, cluster=(1, 1))
    assert (lone.tiles, lone.blocks, lone.block_tile, lone.stages) == (1, 4, (64, 64), 8)
    assert RankGemm(lone, (1, 2, 3), 300, 500, 640).loaded_rows == (64, 64)


@pytest.mark.parametrize(
    ("tile", "b_major", "columns", "stages"),
    [
        ((128, 256), "k", 256, 4),
        ((128, 224), "k", 224, 4),
        ((128, 224), "n", 256, 4),
        ((128, 160), "k", 160, 5),
        ((128, 160), "n", 192, 4),
        ((256, 192), "k", 192, 3),
        ((256, 160), "n", 192, 3),
    ],
)
def test_stages_are_as_many_as_fit(tile: tuple[int, int], b_major: Any, columns: int, stages: int) -> None:
    traits = replace(GATHER, tile=tile, b_major=b_major)
    assert (traits.loaded_columns, traits.stages) == (columns, stages)
    one = (tile[0] + columns) * 128
    others = (2 + 2) * 8192 + 2048  # subtiles, what is sent, and the rest
    assert stages * one + others <= 227 << 10 < (stages + 1) * one + others


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 262144 clusters"):
        _ = RankGemm(REDUCE, tuple(range(1, 8)), 1 << 18, 1 << 15, 64).order


def test_slots_and_flags_lie_behind_each_other() -> None:
    gemm = RankGemm(REDUCE, (1, 2, 3), 300, 500, 64)
    tiles = 4 * 4  # 2 rows and 4 columns of clusters of 256x128
    assert gemm.flags == 3 * tiles
    assert gemm.slot_bytes == gemm.flags * 128 * 128 * 2
    exact = replace(REDUCE, tile=(128, 160), pingpong=False, partial_dtype="float32", epilogue_stages=1)
    assert RankGemm(exact, (1, 2, 3), 300, 500, 64).slot_bytes == 3 * (2 * 2 * 4 * 2) * 5 * 8192
    both = RankGemm(replace(REDUCE, pattern="gemm+ar", epilogue_stages=3), (1, 2, 3), 300, 500, 64)
    assert both.flags == 2 * gemm.flags
    gather = RankGemm(GATHER, (1, 2, 3), 300, 500, 640)
    assert gather.flags == 3 * 10 * 3  # peers, rows of pieces, slices of 256
    assert gather.slot_bytes == 3 * 300 * 3 * 512
    for each in (gemm, both, gather):
        space = Space((), 0, each.flags, each.slot_bytes)
        assert space.flags_at >= Control.begun.offset + 72 * 8
        assert space.slots_at >= space.flags_at + 2 * 8 * each.flags
        assert space.slots_of_buffer >= each.slot_bytes
        assert space.size == space.slots_at + 2 * space.slots_of_buffer
        assert space.slots_at % 1024 == space.slots_of_buffer % 1024 == 0


@pytest.mark.parametrize(
    ("distances", "columns", "rows"), [((1,), 6, 8), ((1,), 14, 4), ((1, 2, 3), 6, 3), ((1, 2, 3), 30, 1)]
)
def test_rows_of_tiles_at_a_time_are_sent_in_turn(distances: tuple[int, ...], columns: int, rows: int) -> None:
    """66 clusters of 256x128 multiply at a time: so many rows of clusters of each other shard."""
    gemm = RankGemm(replace(GATHER, tile=(128, 128)), distances, 2048, 128 * columns, 512, group=1)
    assert gemm.pieces.group * 32 == 256 * rows


def test_a_lead_can_be_set() -> None:
    gemm = RankGemm(REDUCE, (1, 2, 3), 2048, 2048, 512)
    assert gemm.order.lead == 33
    assert replace(gemm, lead=5).order.lead == 5


def test_the_struct_of_an_order() -> None:
    order = TileOrder((2, 1), 3, 5, 2, 4, False)
    struct = Order.of(order)
    assert (struct.shards, struct.blocks, struct.columns, struct.group, struct.lead) == (3, 3, 5, 2, 4)
    assert [*struct.distances[:2]] == [2, 1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "traits",
    [
        GATHER,
        REDUCE,
        replace(REDUCE, pattern="gemm+ar", tile=(256, 128), pingpong=False, epilogue_stages=3, b_major="n"),
        replace(REDUCE, partial_dtype="float32", dtype="float16", out_dtype="float16", a_major="m"),
        replace(GATHER, tile=(256, 192), cluster=(1, 2)),
        replace(REDUCE, pattern="gemm+ar", tile=(64, 64), cluster=(1, 2), one_shot=True),
        replace(GATHER, tile=(128, 160), b_major="n"),
        replace(REDUCE, tile=(128, 224), pingpong=False, partial_dtype="float32", epilogue_stages=1),
        replace(REDUCE, pattern="gemm+a2a", epilogue_stages=3, b_major="n"),
        replace(GATHER, pattern="a2a+gemm"),
        SPLIT,
        replace(SPLIT, cluster=(1, 2), b_major="n"),
        replace(SPLIT, pattern="gemm+rs", cluster=(2, 1), sends=False, split=2),
    ],
    ids=lambda traits: traits.name,
)
def test_kernels_compile(traits: KernelTraits) -> None:
    """ptxas serialises no wgmma, copies no descriptor, and the kernel has the parameters that Python passes."""
    cubin = open_cubin(traits.source(), Params)
    assert cubin.threads == 384
    assert cubin.shared_bytes <= 227 << 10
    # wgmmas and TMA take operands from uniform registers. ptxas keeps them there if it can prove that lanes agree.
    path = cubin_path(traits.source())
    assert "R2UR" not in main_loop(path)
    assert not {"R2UR", "ELECT"} & set(loads(path))
    control = [cubin.number(name) for name in ("control.dead", "control.begun", "control")]
    assert control == [Control.dead.offset, Control.begun.offset, CONTROL_BYTES]
    fields = {name: fact for name, fact in cubin.facts.items() if fact.size}
    assert len(fields) == 20
    for name, fact in fields.items():
        kind: Any = Params
        offset = 0
        for part in name.split("."):
            field = getattr(kind, part)
            offset, size, kind = offset + field.offset, field.size, dict(kind._fields_)[part]
        assert (offset, size) == (fact.offset, fact.size), name


@pytest.mark.parametrize(
    ("columns", "partial_dtype", "packets"), [(64, "bfloat16", 3), (128, "bfloat16", 6), (64, "float32", 6)]
)
def test_a_packet_is_one_access(columns: int, partial_dtype: str, packets: int) -> None:
    """The kernel has one instruction of 16 bytes for each store and each load of a packet.

    A warp has 16 rows of a tile, in two halves. It loads the packets of several ranks at a time, and again where they
    have not come; behind those that it adds, it loads those of the next ranks.
    """
    traits = KernelTraits("gemm+ar", (64, columns), (1, 2), True, partial_dtype=partial_dtype, one_shot=True)
    gemm = RankGemm(traits, (1,), 64, 512, 256)
    assert gemm.row_packet_bytes == 4 * packets * 16
    open_cubin(traits.source(), Params)
    found = instructions(cubin_path(traits.source()))
    halves, ranks, places = 2, 12 // packets, 3
    assert found.count("STG.E.128.STRONG.SYS") == halves * packets
    assert found.count("LDG.E.128.STRONG.SYS") == halves * packets * ranks * places


@pytest.mark.parametrize(("held", "sms", "grid"), [(30, 132, 120), (33, 132, 132), (30, 16, 16)])
def test_a_launch_has_the_clusters_that_a_gpu_holds(
    held: int, sms: int, grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clusters of four blocks; pairs always fit, so nobody asks for them."""
    launched = []

    class Held:
        def max_clusters(self, device: int, cluster: tuple[int, int]) -> int:
            assert cluster == (4, 1)
            return held

        def launcher(self, device: int, blocks: tuple[int, int, int], parameter: int) -> None:
            launched.append(blocks)

    monkeypatch.setattr("distgemm.gemm.per_tile.kernel.open_cubin", lambda source, params: Held())
    for traits in (SPLIT, replace(SPLIT, cluster=(2, 1), split=1)):
        Launch(traits, Params(), sms, 0)
    assert launched == [(grid, 1, 1), (sms, 1, 1)]
