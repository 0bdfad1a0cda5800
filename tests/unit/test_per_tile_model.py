"""The model of per-tile kernels: closed forms of simple cases, and the recorded comparison with measurements."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from distgemm.gemm.per_tile.bind import RankGemm
from distgemm.gemm.per_tile.model import LINK_SHARE, TILES, Costs, predict_per_tile
from distgemm.gemm.per_tile.select import CONFIGS, ONE_SHOT, traits_of
from distgemm.schedulers import Pattern
from distgemm.simulator import Machine
from distgemm.simulator.machine import MAX_FIGURE, Rate

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine.load("h200")
UNLIMITED = replace(MACHINE, memory=MAX_FIGURE, rates={"bfloat16": Rate(930.0, MAX_FIGURE)})
"""A machine that only its SMs limit."""
SLOW = 5.0 / LINK_SHARE
"""The pace at which the link carries 5 GB/s."""


def gemm(pattern: Pattern, ranks: int, m: int, n: int, k: int, kernel: str = "128x256x64_2x1_cooperative") -> RankGemm:
    return RankGemm(traits_of(kernel, pattern), tuple(range(1, ranks)), m // ranks, n, k)


@pytest.mark.parametrize("m", [256, 2048, 8192, 20480])
def test_one_rank_is_waves_of_tiles(m: int) -> None:
    costs = Costs(UNLIMITED)
    one = gemm("gemm+rs", 1, m, 4096, 4096)
    waves = ceil(m * 4096 / (256 * 256) / 66)
    multiply = 2 * 128 * 256 * 4096 / (930e6 / 132 * TILES[128, 256].peak)
    tile = multiply + TILES[128, 256].overhead + one.traits.part_bytes / 8192 * costs.write_subtile
    assert predict_per_tile(one, costs).time == pytest.approx(costs.start + waves * tile + costs.stored)


@pytest.mark.parametrize("pattern", ["ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a", "a2a+gemm"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_link_bounds_the_time(pattern: Pattern, ranks: int) -> None:
    """The last that a rank waits for is the last byte of the link, and what it does with it."""
    slow = Costs(MACHINE, send_gb_per_s=SLOW, store_gb_per_s=SLOW)
    for kernel in CONFIGS[pattern]:
        found = predict_per_tile(gemm(pattern, ranks, 4096, 3072, 1024, kernel), slow)
        passes = 2 if pattern == "gemm+ar" else 1
        size = 4096 * (1024 if pattern in {"ag+gemm", "a2a+gemm"} else 3072) * 2 / ranks * (ranks - 1) * passes
        assert found.link == pytest.approx(slow.start + size / 5e3)
        assert found.bound == "link"
        assert found.link < found.time < 1.1 * found.link + 60


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_one_shot_all_reduce_sends_all_tiles_to_all_peers(ranks: int) -> None:
    slow, quick = Costs(MACHINE, store_gb_per_s=SLOW), Costs(MACHINE)
    for kernel in ONE_SHOT:
        one = RankGemm(traits_of(kernel, "gemm+ar", one_shot=True), tuple(range(1, ranks)), 64, 8192, 1024)
        found = predict_per_tile(one, slow)
        assert found.link == pytest.approx(slow.start + 1.5 * 64 * 8192 * 2 * (ranks - 1) / 5e3)
        assert found.link < found.time < 1.1 * found.link + 60
        two = RankGemm(traits_of("64x128x64_1x2_pingpong", "gemm+ar"), one.distances, 8 // ranks, 8192, 1024)
        assert predict_per_tile(replace(one, m=8), quick).time < predict_per_tile(two, quick).time
        for m in (1, 17, 100):
            found = predict_per_tile(replace(one, m=m), slow)
            assert found.link == pytest.approx(slow.start + 1.5 * m * 8192 * 2 * (ranks - 1) / 5e3)


@pytest.mark.parametrize(("pattern", "sent"), [("ag+gemm", 16384), ("gemm+rs", 13312)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tiles_that_span_shards_read_b_once(pattern: Pattern, sent: int, ranks: int) -> None:
    """A rank sends its rows of A, or each peer's rows of D, and no padding. Few rows then cost less than half."""
    traits = traits_of("128x128x64_1x2_cooperative", pattern)
    ends = RankGemm(traits, tuple(range(1, ranks)), 128 // ranks, 13312, 16384)
    one = replace(ends, m=128, spans=True)
    found = predict_per_tile(one, Costs(MACHINE, send_gb_per_s=SLOW, store_gb_per_s=SLOW))
    assert found.link == pytest.approx(Costs(MACHINE).start + 128 * sent * 2 * (ranks - 1) / ranks / 5e3)
    assert found.bound == "link" and found.link < found.time < 1.1 * found.link + 150
    few, whole = (predict_per_tile(gemm, Costs(MACHINE)).time for gemm in (one, ends))
    assert few < (1 / ranks + 0.12) * whole


@pytest.mark.parametrize(
    ("config", "block_tile", "tiles"),
    [("64x64x64_1x1_pingpong_split_4", (64, 64), 1), ("64x64x64_2x2_pingpong_split_4", (128, 128), 4)],
)
def test_blocks_that_split_k_multiply_a_part_of_it(config: str, block_tile: tuple[int, int], tiles: int) -> None:
    """One cluster of tiles: a quarter of the stages, rounded up, at half of half of the rate; four sums of a tile."""
    costs, k = Costs(UNLIMITED, exchange=3.0, split_share=0.5), 64 * 401
    one = RankGemm(traits_of(config, "ag+gemm"), (), *block_tile, k)
    assert one.order.clusters == 1 and one.parts == tiles
    multiply = 2 * block_tile[0] * block_tile[1] * 64 * 101 / (930e6 / 132 * TILES[block_tile].peak * 0.5**2)
    others = 4 * 2 * 3.0 + TILES[block_tile].overhead + costs.write_subtile
    assert predict_per_tile(one, costs).time == pytest.approx(costs.start + multiply + others + costs.stored)


def test_k_is_split_where_tiles_leave_sms_idle() -> None:
    plain, split = "64x64x64_1x2_pingpong", "64x64x64_1x1_pingpong_split_4"
    for n, faster in ((768, True), (64 * 132, False)):
        times = [
            predict_per_tile(gemm("ag+gemm", 1, 64, n, 4096, kernel), Costs(MACHINE)).time for kernel in (plain, split)
        ]
        assert (times[1] < times[0]) == faster


def test_pieces_of_a_batch_arrive_together() -> None:
    """Where the other shard is one batch, its tiles are multiplied behind all of it; else while the rest arrives."""
    costs = Costs(UNLIMITED)
    for k, batches in ((1024, 1), (4096, 4)):
        one = gemm("ag+gemm", 2, 2048, 768, k, "128x128x64_2x1_pingpong")
        assert -(-one.pieces.pieces // UNLIMITED.sms) == batches
        found = predict_per_tile(one, costs)
        multiply = 2 * 128 * 128 * k / (930e6 / 132 * TILES[128, 128].peak)
        assert (found.time > found.link + costs.stored + costs.flag + multiply) == (batches == 1)


def test_memory_holds_back_what_is_read_once() -> None:
    """Few rows: B is read from memory, and sets the time."""
    few = gemm("gemm+rs", 1, 64, 16384, 16384, "64x128x64_2x1_pingpong")
    slow = replace(MACHINE, memory=100.0)
    assert predict_per_tile(few, Costs(slow)).time > 16384 * 16384 * 2 / 100e3
    assert predict_per_tile(few, Costs(slow)).time > 5 * predict_per_tile(few, Costs(MACHINE)).time


def test_own_tiles_at_once_wait_for_sums() -> None:
    """Without a lead, each wave waits for the flags of its own sums; the order's lead avoids that."""
    usual = gemm("gemm+rs", 4, 8192, 4096, 512, "128x128x64_2x1_pingpong")
    at_once = replace(usual, lead=0)
    assert predict_per_tile(at_once, Costs(MACHINE)).time > 1.05 * predict_per_tile(usual, Costs(MACHINE)).time


def test_results_of_peers_are_taken_to_d() -> None:
    """The last one comes behind the tiles, unless there are so many own tiles, which come last."""
    for own_last, ends_with_a_take in ((None, False), (0, True)):
        one = replace(gemm("gemm+a2a", 2, 8192, 4096, 4096), lead=own_last)
        quick, slow = (predict_per_tile(one, Costs(UNLIMITED, take=take)).time for take in (0.0, 50.0))
        assert (slow > quick + 20) == ends_with_a_take


def test_other_tiles_are_refused() -> None:
    other = gemm("gemm+rs", 2, 512, 512, 512, "64x192x64_2x1_pingpong")
    with pytest.raises(ValueError, match=r"tiles of 128x256, 128x224, .*, 64x64, got 64x192"):
        predict_per_tile(other, Costs(MACHINE))


def test_the_power_limit_counts_long_products() -> None:
    """Beyond the machine's boost, a replay takes as long as the rate that remains says."""
    quick = replace(MACHINE, rates={"bfloat16": Rate(1e6, 500.0)})
    for m, n, k in ((8192, 4096, 4096), (16384, 16384, 16384)):
        one, flop = gemm("gemm+rs", 1, m, n, k), 2.0 * m * n * k
        rate = 500e6 * TILES[128, 256].power * quick.clock("bfloat16", flop)
        assert predict_per_tile(one, Costs(quick)).time == pytest.approx(Costs(quick).start + flop / rate)
    assert quick.clock("bfloat16", flop) < 1.0


def test_the_recorded_comparison_is_that_of_this_model() -> None:
    """benchmarks/results/per_tile_model.json has the model's present errors. They are small."""
    recorded = json.loads((ROOT / "benchmarks/results/per_tile_model.json").read_text())
    program = runpy.run_path(str(ROOT / "benchmarks/per_tile_model.py"))
    found = program["errors_of_kernels"]()
    assert found == recorded["per_tile_4xh200"]
    assert found["mean_abs_error"] < 0.05 and found["selected_costs_mean"] < 0.05
    for file, error, costs in (
        ("executions_4xh200", 0.04, 0.02),
        ("executions_few_4xh200", 0.1, 0.05),
        ("executions_2xh200", 0.05, 0.03),
        ("executions_few_2xh200", 0.06, 0.03),
    ):
        found = program["compared"](file)
        assert found == recorded[file]
        assert found["mean_abs_error"] < error and found["selected"]["mean"] < costs
