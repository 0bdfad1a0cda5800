"""The configuration that a shape gets: the heuristic, measured configurations, and the files that keep them."""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec, select
from distgemm.gemm import cache as tuned_cache
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.select import (
    CACHE,
    FP8_RATES,
    LAST,
    OVERHEADS,
    RATES,
    ROW_TIME,
    estimate,
    gpu_name,
    key_of,
    order,
    select_config,
    tile_order,
    tiles_at_once,
    work,
)
from distgemm.gemm.tiles import FP8_TILES, TILES, TMA_TILES
from distgemm.measure.models import MODELS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HOPPER = CutlassProvider("90a")
DEVICE = "NVIDIA H200"


def spec(m: int, n: int, k: int, dtype: str = "bfloat16") -> GemmSpec:
    d = MatrixSpec(dtype, m, n)
    return GemmSpec(MatrixSpec(dtype, m, k), MatrixSpec(dtype, n, k), d)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no shipped configurations, and one device."""
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CACHE, "shipped", tmp_path / "shipped")
    monkeypatch.setattr(select, "gpu_name", lambda: DEVICE)
    return tmp_path / "cache"


def ship(entries: dict[str, dict[str, Any]]) -> Path:
    """Write the file that ships with the package. Returns its path."""
    CACHE.shipped.mkdir()
    path = CACHE.shipped / "gemm_NVIDIA_H200.json"
    path.write_text(json.dumps({"device": DEVICE, "configs": entries}))
    return path


# --- the heuristic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "name", "waves", "outside", "rows"),
    [
        # 64 x 28 tiles on 132 SMs: those that run at once are 33/7 x 28. 12 of 14 clusters along n read A.
        ((8192, 7168, 8192), "128x256x64_1x2_cooperative", 14, 1, 33 / 7 * 128 * 12 + 28 * 256 * 33 / 7),
        # One tile, and an idle one of its cluster.
        ((128, 256, 8192), "128x256x64_1x2_cooperative", 1, 2, 128 + 256),
        # Each of 132 tiles reads all of B: as much as 12.
        ((132 * 64, 128, 64), "64x128x64_1x1_pingpong", 1, 1, 132 * 64 + 12 * 128),
        ((132 * 64 + 1, 128, 64), "64x128x64_1x1_pingpong", 2, 1, 132 * 64 + 12 * 128),
        ((2048, 2048, 64), "128x128x64_2x1_pingpong", 2, 1, 8.25 * 128 * 12 + 16 * 128 * 8.25 / 2),
        # 4 x 29 tiles in clusters of 8, of which 15 run at once: 30 columns, one of them outside.
        ((512, 2320, 3584), "128x80x64_4x2_cooperative", 1, 30 / 29, 4 * 128 * 12 + 29 * 80),
    ],
)
def test_the_estimate_is_the_formula(
    shape: tuple[int, int, int], name: str, waves: int, outside: float, rows: float
) -> None:
    config = GemmConfig.parse(name)
    m, n, _ = config.tile
    multiply = m * n / RATES[config.kernel_schedule, m, n]
    step = (multiply**4 + (ROW_TIME * rows) ** 4) ** (1 / 4) * outside
    steps = waves * (shape[2] + OVERHEADS[config.kernel_schedule]) + LAST[config.kernel_schedule]
    assert estimate(spec(*shape), config) == pytest.approx(steps * step)


def test_clusters_share_loads() -> None:
    """Tiles of 112 blocks in one wave: what they load decides, and larger clusters load less."""
    product = spec(1024, 1792, 5120)
    times = [estimate(product, GemmConfig.parse(f"128x128x64_{cluster}_pingpong")) for cluster in ("1x1", "2x1", "4x1")]
    assert times == sorted(times, reverse=True) and times[0] > 1.1 * times[-1]
    three = GemmSpec(*(replace(x, batches=3, batch_stride=-1) for x in (product.a, product.b, product.d)))
    assert estimate(three, GemmConfig.parse("128x128x64_2x1_pingpong")) > 2 * times[1]


def test_as_many_clusters_run_at_once_as_a_gpu_holds() -> None:
    found = {
        cluster: tiles_at_once(GemmConfig.parse(f"128x64x64_{cluster}_pingpong"), 132)
        for cluster in ("1x1", "2x1", "2x2", "4x1", "2x4")
    }
    assert found == {"1x1": 132, "2x1": 132, "2x2": 120, "4x1": 120, "2x4": 120}


def test_on_two_streams_waves_are_not_rounded_up() -> None:
    config = GemmConfig((128, 256, 64), (1, 1))
    one, half = spec(132 * 128, 256, 64), spec(198 * 128, 256, 64)
    assert estimate(one, config, streams=2) == estimate(one, config)
    assert estimate(half, config) == 2 * estimate(one, config)
    assert estimate(half, config, streams=2) == 1.5 * estimate(one, config)


def test_clusters_occupy_their_sms_together() -> None:
    alone, pair = (GemmConfig((128, 256, 64), cluster) for cluster in ((1, 1), (2, 1)))
    tall = spec(3 * 128, 44 * 256, 64)  # 132 tiles, but 176 with four in each column
    assert work(tall, pair) == 2 * work(tall, alone)
    six = spec(6 * 128, 256, 64)
    assert work(six, pair, sms=6) == work(six, alone, sms=6)
    assert work(spec(14 * 128, 256, 64), pair, sms=7) == 3 * work(six, pair, sms=6)
    assert work(six, pair, sms=5) == 2 * work(six, pair, sms=6)
    assert work(spec(5 * 128, 256, 64), alone, sms=5) == work(six, pair, sms=6)


def test_large_tiles_for_large_shapes() -> None:
    large, small = (HOPPER.configs(spec(*shape))[0].tile for shape in ((8192, 7168, 8192), (64, 256, 4096)))
    assert large[0] * large[1] >= 128 * 160
    assert small[:2] == (64, 128)


def test_tiles_that_run_at_once_read_few_rows() -> None:
    config = GemmConfig.parse("128x128x64_2x1_pingpong")
    # In CUTLASS's order, 132 of 128 x 64 tiles fill two rows. In stripes of 16 they read 8 columns and 16 rows.
    assert str(tile_order(spec(128 * 128, 64 * 128, 4096), config)) == f"{config}_raster_n_swizzle_8"
    # Stripes would need more tiles, or all tiles run at once.
    for m, n in ((128 * 128, 7 * 128), (127 * 128, 67 * 128), (512, 512)):
        assert tile_order(spec(m, n, 4096), config) == config
    plain = GemmConfig.parse("128x128x32_1x1_plain")
    assert tile_order(spec(128 * 128, 64 * 128, 4096), plain) == plain


@pytest.mark.parametrize(("m", "n"), [(0, 64), (64, 0), (0, 0), (1, 8)])
def test_few_or_no_elements_have_a_configuration(m: int, n: int) -> None:
    """A rank without tokens selects one, too: its launch does nothing."""
    product = spec(m, n, 64)
    assert select_config(HOPPER, product) == HOPPER.configs(product)[0]


@pytest.mark.parametrize("model", MODELS)
def test_the_first_is_the_fastest_by_the_formula(model: str) -> None:
    for layer in MODELS[model].layers:
        product = spec(*layer.local(8192, 8))
        configs = HOPPER.configs(product)
        times = [estimate(product, config) for config in configs]
        assert times == sorted(times)
        assert [estimate(product, config) for config in order(product, configs[::-1])] == times
        assert select_config(HOPPER, product) == configs[0]
        assert configs[0].kernel_schedule != "plain"


def test_every_tile_has_one_rate() -> None:
    assert (len(RATES), len(FP8_RATES)) == (len(TILES) + 1, len(FP8_TILES) + 1)
    matrices = (MatrixSpec(dtype, 256, 256) for dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16"))
    for product, rates in ((spec(256, 256, 256), RATES), (GemmSpec(*matrices), FP8_RATES)):
        assert {(one.kernel_schedule, *one.tile[:2]) for one in HOPPER.configs(product)} == set(rates)


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="a source archive has no benchmarks/")
@pytest.mark.parametrize(("scaling", "shapes"), [("tensorwise", 24), ("rowwise", 24), ("blockwise", 24)])
def test_the_selected_tile_for_fp8_is_about_the_fastest(scaling: str, shapes: int) -> None:
    """Of the configurations that an H100 measured, with the rates that are listed."""
    excess = runpy.run_path(str(BENCHMARKS / "gemm_fp8.py"))["excess"]
    rows = json.loads((BENCHMARKS / "results" / "gemm_fp8_h100.json").read_text())["rows"]
    slower = [excess(row) for row in rows if row["scaling"] == scaling]
    assert len(slower) == shapes
    assert statistics.geometric_mean(slower) <= 1.025


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="a source archive has no benchmarks/")
@pytest.mark.parametrize(
    ("shapes", "measured", "of_best", "of_cublas"),
    [("held_out", 45, 1.025, 1.035), ("few_tiles", 126, 1.04, 0.995), ("random", 14, 1.01, 1.05)],
)
def test_the_selected_tile_is_about_the_fastest(shapes: str, measured: int, of_best: float, of_cublas: float) -> None:
    """Of the configurations that an H100 measured. A few shapes select one that it did not measure with them."""
    rows = json.loads((BENCHMARKS / "results" / "untuned_every_h100.json").read_text())[shapes]
    slower, faster = [], []
    for row in rows:
        config, ms = HOPPER.configs(spec(row["m"], row["n"], row["k"]))[0], row["ms"]
        found = ms.get(str(config), ms.get(str(replace(config, raster="heuristic", swizzle=1))))
        if found is not None:
            slower.append(found / min(time for name, time in ms.items() if name != "cublas"))
            faster.append(ms["cublas"] / found)
    assert len(slower) >= measured
    assert statistics.geometric_mean(slower) <= of_best
    assert statistics.geometric_mean(faster) >= of_cublas


@pytest.mark.parametrize("path", sorted(Path(select.__file__).parent.glob("tuned/*.json")), ids=lambda path: path.stem)
def test_shipped_configurations_are_of_listed_tiles(path: Path) -> None:
    """Only those are in the wheel of kernels."""
    found = [GemmConfig.parse(one["config"]) for one in json.loads(path.read_text())["configs"].values()]
    assert found
    assert {(one.tile[:2], one.cluster, one.kernel_schedule) for one in found} <= set(TMA_TILES)


# --- measured configurations ----------------------------------------------------------------------------

SHAPE = spec(8192, 7168, 8192)
OTHER = "64x128x64_1x1_pingpong_raster_m_swizzle_4"


def test_a_measured_configuration_wins() -> None:
    assert str(select_config(HOPPER, SHAPE)) != OTHER
    CACHE.record(DEVICE, {key_of(SHAPE): {"config": OTHER, "ms": 1.0}})
    assert str(select_config(HOPPER, SHAPE)) == OTHER
    assert str(select_config(HOPPER, spec(8192, 7168, 8200))) != OTHER


def test_measured_configurations_are_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.record(DEVICE, {key_of(SHAPE): {"config": OTHER}})
    monkeypatch.setattr(select, "gpu_name", lambda: "NVIDIA H100")
    assert str(select_config(HOPPER, SHAPE)) != OTHER


def test_the_users_entry_replaces_the_shipped_one() -> None:
    shipped = "128x128x64_2x1_pingpong"
    ship({key_of(SHAPE): {"config": shipped}, "elsewhere": {"config": shipped}})
    assert str(select_config(HOPPER, SHAPE)) == shipped
    CACHE.record(DEVICE, {key_of(SHAPE): {"config": OTHER}})
    assert str(select_config(HOPPER, SHAPE)) == OTHER
    assert CACHE.read(DEVICE)["elsewhere"] == {"config": shipped}
    assert "elsewhere" not in CACHE.path(DEVICE).read_text()


def test_a_measured_configuration_that_does_not_fit_these_strides_is_ignored() -> None:
    CACHE.record(DEVICE, {key_of(SHAPE): {"config": OTHER}})
    odd = replace(SHAPE, a=replace(SHAPE.a, stride=8193))
    assert key_of(odd) == key_of(SHAPE)
    assert select_config(HOPPER, odd).kernel_schedule == "plain"
    assert select_config(CutlassProvider("80"), SHAPE).kernel_schedule == "plain"


def test_a_later_entry_replaces_and_is_seen_at_once() -> None:
    for name in (OTHER, "128x256x64_1x2_cooperative_raster_n", OTHER):
        CACHE.record(DEVICE, {key_of(SHAPE): {"config": name}})
        assert str(select_config(HOPPER, SHAPE)) == name


def test_the_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert gpu_name() == (torch.cuda.get_device_name() if torch.cuda.is_available() else "none")


def test_gemms_on_two_streams_have_their_own_entries() -> None:
    CACHE.record(DEVICE, {key_of(SHAPE, streams=2): {"config": OTHER}})
    assert str(select_config(HOPPER, SHAPE, streams=2)) == OTHER
    assert select_config(HOPPER, SHAPE) == HOPPER.configs(SHAPE)[0]


# --- keys -----------------------------------------------------------------------------------------------


def test_a_key_has_all_that_a_configuration_depends_on() -> None:
    d, f32 = SHAPE.d, replace(SHAPE.d, dtype="float32")
    columns = replace(SHAPE.a, row_major=False, stride=8192)
    specs = [
        SHAPE,
        spec(8192, 7168, 8200),
        spec(8192, 7168, 8192, "float16"),
        replace(SHAPE, a=columns),
        replace(SHAPE, b=replace(SHAPE.b, row_major=False, stride=7168)),
        replace(SHAPE, d=f32),
        replace(SHAPE, c=d),
        replace(SHAPE, partial=d),
        replace(SHAPE, partial=f32),
        replace(SHAPE, partial=f32, c=d),
        replace(SHAPE, scale_a="row"),
        replace(SHAPE, scale_b="row"),
        GemmSpec(*(replace(x, batches=2, batch_stride=-1) for x in (SHAPE.a, SHAPE.b, d))),
    ]
    keys = [key_of(one) for one in specs]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "8192x7168x8192x1 bfloat16_rr bfloat16"
    assert key_of(SHAPE, streams=2) == f"{keys[0]} streams:2"
    same = replace(SHAPE, a=replace(SHAPE.a, stride=8200), scale_a="tensor", scale_b="tensor", bias="bfloat16")
    assert key_of(same) == keys[0]


# --- files ----------------------------------------------------------------------------------------------

GOOD = {"config": OTHER, "ms": 0.5}


def test_the_file_names_the_device(cache: Path) -> None:
    assert CACHE.record(DEVICE, {"one": GOOD}) == CACHE.path(DEVICE) == cache / "gemm_NVIDIA_H200.json"
    assert json.loads(CACHE.path(DEVICE).read_text()) == {"device": DEVICE, "configs": {"one": GOOD}}
    assert CACHE.path("Quadro RTX 6000/8000").parent == cache
    assert sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") == ["gemm_NVIDIA_H200.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"configs": {"one": {"config": "128x',
        "[]",
        "{}",
        '{"configs": []}',
        '{"configs": {"one": "fast"}}',
        '{"configs": {"one": {"ms": 1.0}}}',
        '{"configs": {"one": {"config": "fast"}}}',
        '{"configs": {"one": {"config": 5}}}',
        '{"configs": ' + "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.parametrize("where", ["own", "shipped"])
def test_a_broken_file_is_named(text: str, where: str) -> None:
    shipped = ship({})
    path = CACHE.path(DEVICE) if where == "own" else shipped
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    calls = [lambda: select_config(HOPPER, SHAPE)]
    if where == "own":
        calls.append(lambda: CACHE.record(DEVICE, {"two": GOOD}))
    for call in calls:
        with pytest.raises(ValueError, match=r"does not hold tuned configurations .*delete it, and measure") as raised:
            call()
        assert str(raised.value).startswith(f"{path} ")
        assert str(raised.value).endswith(": distgemm tune-gemm")
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_named() -> None:
    path = CACHE.path(DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)

    def loop() -> None:
        path.symlink_to(path)

    makers: dict[str, Callable[[], object]] = {
        "it is no regular file": lambda: os.mkfifo(path),
        "Too many levels of symbolic links": loop,
    }
    for reason, make in makers.items():
        make()
        with pytest.raises(
            ValueError, match=f"^tuned configurations: {path} cannot be read: {reason}; delete it, make"
        ):
            select_config(HOPPER, SHAPE)
        path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path} cannot be read: it is no regular file"):
        CACHE.record(DEVICE, {"two": GOOD})


def test_two_writes_at_one_time_are_both_read() -> None:
    """File systems have times of up to a second."""
    written = []
    for name in ("one", "two"):
        path = CACHE.record(DEVICE, {name: GOOD})
        os.utime(path, ns=(1, 1))
        written.append(set(CACHE.read(DEVICE)))
    assert written == [{"one"}, {"one", "two"}]


def test_a_record_is_not_written_through_links(cache: Path, tmp_path: Path) -> None:
    """Neither through a link in the place of the file, nor in the place of a file that it becomes."""
    victim = tmp_path / "victim"
    victim.write_text('{"configs": {}}')
    cache.mkdir(parents=True, exist_ok=True)
    path = CACHE.path(DEVICE)
    path.symlink_to(victim)
    for name in (f"{path.stem}.{os.getpid()}.new", f"{path.name}.new", f"{path.name}.tmp"):
        (cache / name).symlink_to(victim)
    CACHE.record(DEVICE, {"one": GOOD})
    assert victim.read_text() == '{"configs": {}}'
    assert not path.is_symlink()
    assert CACHE.read(DEVICE) == {"one": GOOD}


def test_a_lock_that_another_process_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    path = CACHE.path(DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tuned_cache, "LOCK_TIMEOUT_S", 0.2)
    with FileLock(path.with_suffix(".lock")), pytest.raises(OSError, match="could not be acquired"):
        CACHE.record(DEVICE, {"one": GOOD})


ADDING = """
import sys, time
from pathlib import Path
from distgemm.gemm.select import CACHE
number, go = sys.argv[1], Path(sys.argv[2])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
for count in range(20):
    CACHE.record("NVIDIA H200", {f"{number} {count}": {"config": "64x128x64_1x1_pingpong"}})
"""


@pytest.mark.sample(0)  # ten seconds
def test_eight_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    processes = [
        subprocess.Popen([sys.executable, "-c", ADDING, str(number), str(go)], stdout=subprocess.PIPE)
        for number in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    go.touch()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert set(CACHE.read(DEVICE)) == {f"{number} {count}" for number in range(8) for count in range(20)}
