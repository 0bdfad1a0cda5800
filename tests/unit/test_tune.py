"""Tuned configurations, what they depend on, and the files of the tuning cache. No GPU, no process group."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distgemm import GemmProblem, list_schedules, make_plan, tune
from distgemm.gemm.target import compiling_for
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import PATTERNS
from distgemm.tune import CACHE, UNFUSED, TunedConfig, bucket, kernels, key_of, look_up, predicted
from distgemm.tune.ranks import device_of
from distgemm.tune.search import fastest_of, with_fallback

SHIPPED = CACHE.shipped
GPU = "NVIDIA Test"
GATHER = "all_gather_1d_tiling_cd_rotating_a"
PLAN = TunedConfig("plan", GATHER, (("chunks", 2),), ExecutionConfig("cublas", gemm_streams=2))
TILES = ExecutionConfig("cutlass", "64x128x64_1x1_pingpong", gemm_streams=1)
OTHER = TunedConfig("plan", "reduce_scatter_1d_pairwise_a", (("chunks", 1),), TILES)
MERGED = TunedConfig("plan", GATHER, (("chunks", 2),), ExecutionConfig(wait_by="kernel", merge_copies=True))
TWO_SHOT = dataclasses.replace(UNFUSED, collective="two-shot")
PROBLEM = GemmProblem(2048, 8192, 4096)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no shipped configurations."""
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CACHE, "shipped", tmp_path / "shipped")
    return tmp_path / "cache"


# --- configurations --------------------------------------------------------------------------------------------


def test_a_configuration_is_printed_in_words() -> None:
    assert str(PLAN) == "all_gather_1d_tiling_cd_rotating_a chunks=2, GEMMs by cublas, 2 GEMM streams"
    assert str(OTHER) == "reduce_scatter_1d_pairwise_a chunks=1, GEMMs by cutlass 64x128x64_1x1_pingpong, 1 GEMM stream"
    assert (
        str(MERGED)
        == f"{GATHER} chunks=2, GEMMs by the default provider, 2 GEMM streams, waits by kernel, merged copies"
    )
    per_tile = ExecutionConfig(None, "128x128x64_2x1_pingpong", 1, "per_tile")
    assert str(TunedConfig("plan", GATHER, execution=per_tile)) == f"{GATHER}, per-tile kernel 128x128x64_2x1_pingpong"
    assert str(UNFUSED) == "unfused" and str(TWO_SHOT) == "unfused, two-shot"


@pytest.mark.parametrize("config", [PLAN, OTHER, MERGED, UNFUSED, TWO_SHOT], ids=str)
def test_a_configuration_survives_json(config: TunedConfig) -> None:
    fields = json.loads(json.dumps(config.to_dict()))
    found = TunedConfig.from_dict(fields | {"ms": 1.5}, "recorded")
    assert found == config
    assert found.source == "recorded" and config.source == ""


def test_the_order_of_options_does_not_matter() -> None:
    pairs = (("mechanism", "store"), ("final_add", "kernel"), ("chunks", 4))
    one, other = (dataclasses.replace(PLAN, options=options) for options in (pairs, pairs[::-1]))
    assert one == other == TunedConfig.from_dict(one.to_dict()) and str(one) == str(other) and hash(one) == hash(other)


def test_a_configuration_has_the_arguments_of_compile() -> None:
    arguments = PLAN.arguments()
    assert arguments == {
        "schedule": PLAN.schedule,
        "chunks": 2,
        "provider": "cublas",
        "config": None,
        "gemm_streams": 2,
        "execution": "multi_kernel",
        "wait_by": "memory_op",
        "merge_copies": False,
    }
    with pytest.raises(ValueError, match="has no plan"):
        UNFUSED.arguments()


def test_a_mesh_in_a_text_is_one_for_the_plan_and_for_compile() -> None:
    config = TunedConfig.parse("tensor_parallel_2d mesh=2x2")
    arguments = config.arguments()
    problem = GemmProblem(64, 64, 64)
    direct = make_plan(problem, arguments["schedule"], mesh=arguments["mesh"], sync="barrier")
    assert arguments["mesh"] == (2, 2) and config.text == "tensor_parallel_2d mesh=2x2"
    assert config.plan(problem, 4).digest == direct.digest


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "fused"},
        {"method": "plan", "schedule": ""},
        {"method": "unfused", "schedule": "x"},
        {"execution": ExecutionConfig("mkl")},
        {"execution": ExecutionConfig(config="fast")},
        {"collective": "two-shot"},  # a plan has no collective
        {"method": "unfused", "schedule": "", "collective": "ring"},
    ],
)
def test_values_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"method is|provider is|a configuration is|collective is"):
        dataclasses.replace(PLAN, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gemm_streams": 3}, "gemm_streams is an integer from 1 to 2, got 3"),
        ({"gemm_streams": True}, "gemm_streams is an integer from 1 to 2, got True"),
        ({"execution": "fused"}, "execution is one of multi_kernel, per_tile, got 'fused'"),
        ({"wait_by": "events"}, "wait_by is one of memory_op, kernel"),
        ({"wait_by": "kernel", "execution": "per_tile"}, "it takes wait_by='memory_op' and merge_copies=False"),
        ({"merge_copies": 1}, "merge_copies is True or False"),
        ({"execution": "per_tile", "provider": "cublas"}, "takes provider 'cutlass'"),
    ],
)
def test_executions_that_do_not_go_together_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExecutionConfig(**wrong)


def test_the_deleted_execution_is_refused_with_what_replaces_it() -> None:
    """In a text, and in a file of older versions."""
    fields = PLAN.to_dict() | {"execution": "single_kernel", "provider": "cutlass", "transport": "sm"}
    text = f"{GATHER} chunks=2 gemm_streams=1 execution=single_kernel transport=sm"
    for call in (lambda: TunedConfig.parse(text), lambda: TunedConfig.from_dict(fields)):
        with pytest.raises(ValueError, match=r"single_kernel is gone: take execution=per_tile, or multi_kernel"):
            call()
    assert TunedConfig.from_dict(PLAN.to_dict() | {"transport": "copy_engine"}) == PLAN  # as older versions wrote it


def test_an_unfused_program_without_a_collective_uses_nccl() -> None:
    assert TunedConfig.from_dict({"method": "unfused", "ms": 1.0}) == UNFUSED


def test_nccl_replaces_a_collective_that_does_not_support_the_problem() -> None:
    recorded = dataclasses.replace(TWO_SHOT, source="recorded")
    assert tune.fitting(recorded, GemmProblem(8, 8, 8), "gemm+ar", 4) == TWO_SHOT
    half = GemmProblem(8, 8, 8, dtype="float16")
    for problem, ranks in ((GemmProblem(7, 9, 8), 4), (half, 4), (GemmProblem(8, 8, 8), 3)):
        found = tune.fitting(recorded, problem, "gemm+ar", ranks)
        assert (found, found.source) == (UNFUSED, "recorded")


def test_without_a_device_the_current_gpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("cuda:2") == torch.device("cuda", 2) and device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of("cuda") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(None) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None) == torch.device("cpu")


# --- keys and buckets -----------------------------------------------------------------------------------


def test_the_key_has_all_that_a_configuration_depends_on() -> None:
    problems = [
        PROBLEM,
        *(dataclasses.replace(PROBLEM, **{mode: 1024}) for mode in "mnk"),
        dataclasses.replace(PROBLEM, l=2),
        dataclasses.replace(PROBLEM, dtype="float16", out_dtype=None),
        dataclasses.replace(PROBLEM, out_dtype="float32"),
        dataclasses.replace(PROBLEM, partial_dtype="float32"),
    ]
    sizes = ((4,), (8,), (8, 2), (8, 4))  # ranks, and those of a host
    keys = [key_of(problem, pattern, *size) for problem in problems for pattern in PATTERNS for size in sizes]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "ag+gemm 2048x8192x4096x1 bfloat16 bfloat16 bfloat16 tp:4"
    assert key_of(PROBLEM, "ag+gemm", 8, 2).endswith(" tp:4x2")
    uneven = dataclasses.replace(PROBLEM, m_per_rank=(2000, 48))
    assert key_of(uneven, "ag+gemm", 2) == key_of(PROBLEM, "ag+gemm", 2)


def test_buckets_are_powers_of_two_that_hold_m() -> None:
    assert [bucket(m) for m in (1, 64, 65, 128, 129, 8192, 8193)] == [64, 64, 128, 128, 256, 8192, 16384]
    for m in range(1, 3000):
        found = bucket(m)
        assert found >= m and found & (found - 1) == 0 and bucket(found) == found


def rows_that_serve(recorded: list[int], wanted: list[int], **options: Any) -> list[int | None]:
    """The recorded rows whose configuration serves each of the wanted rows."""
    configs = {m: dataclasses.replace(PLAN, options=(("chunks", m),)) for m in recorded}
    CACHE.record(
        GPU, {key_of(dataclasses.replace(PROBLEM, m=m), "ag+gemm", 4): each.to_dict() for m, each in configs.items()}
    )
    found = [look_up(dataclasses.replace(PROBLEM, m=m), "ag+gemm", 4, GPU, **options) for m in wanted]
    return [None if each is None else dict(each.options)["chunks"] for each in found]


def test_ranges_end_at_the_geometric_mean_of_recorded_rows() -> None:
    """Of 100 and 400 it is 200, which belongs to 400. Of 400 and 900 it is 600."""
    wanted, served = [100, 199, 200, 400, 599, 600, 900, 1799], [100, 100, 400, 400, 400, 900, 900, 900]
    assert rows_that_serve([900, 100, 400], wanted, reach=math.inf) == served


def test_rows_out_of_reach_are_measured_and_served_where_nothing_is_measured() -> None:
    wanted = [1, 50, 51, 199, 200, 10_000]
    assert rows_that_serve([100], wanted) == [100, 100, 100, 100, None, None]
    assert rows_that_serve([100], wanted, reach=math.inf) == [100] * 6


def test_each_bucket_reaches_all_its_rows_and_no_further_than_two_buckets() -> None:
    assert rows_that_serve([bucket(129)], [129]) == [256]
    assert rows_that_serve([64, 128, 256, 512], [1, 64, 65, 90, 91, 129, 181, 182, 1023, 1024]) == [
        64, 64, 64, 64, 128, 128, 128, 256, 512, None]  # fmt: skip


def test_few_rows_are_served_by_the_nearest_ones() -> None:
    """All of them are in reach of the smallest bucket, and of each other."""
    assert rows_that_serve([4], [1, 64, 65, 127, 128]) == [4, 4, 4, 4, None]
    wanted, served = [1, 7, 8, 31, 32, 63, 65, 127], [4, 4, 16, 16, 64, 64, 64, 64]
    assert rows_that_serve([4, 16, 64], wanted) == served


def test_the_exact_rows_are_looked_up_before_their_bucket() -> None:
    odd = dataclasses.replace(PROBLEM, m=1500)
    assert look_up(odd, "ag+gemm", 4, GPU) is None
    CACHE.record(GPU, {key_of(PROBLEM, "ag+gemm", 4): PLAN.to_dict()})
    assert look_up(odd, "ag+gemm", 4, GPU) == look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    CACHE.record(GPU, {key_of(odd, "ag+gemm", 4): UNFUSED.to_dict()})
    assert look_up(odd, "ag+gemm", 4, GPU) == UNFUSED
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    for problem, pattern, size, device in (
        (PROBLEM, "gemm+rs", 4, GPU),
        (PROBLEM, "ag+gemm", 8, GPU),
        (PROBLEM, "ag+gemm", 4, "NVIDIA Other"),
        (dataclasses.replace(PROBLEM, m=700), "ag+gemm", 4, GPU),
    ):
        assert look_up(problem, pattern, size, device) is None


# --- files ----------------------------------------------------------------------------------------------


def test_the_users_configuration_replaces_the_shipped_one(cache: Path) -> None:
    key, further = (key_of(PROBLEM, "ag+gemm", size) for size in (4, 8))
    CACHE.shipped.mkdir()
    shipped = {"device": GPU, "configs": {key: OTHER.to_dict(), further: OTHER.to_dict()}}
    (CACHE.shipped / "plans_NVIDIA_Test.json").write_text(json.dumps(shipped))
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == OTHER
    path = CACHE.record(GPU, {key: PLAN.to_dict() | {"ms": 0.25, "unfused_ms": 0.5}})
    assert path == CACHE.path(GPU) == cache / "plans_NVIDIA_Test.json"
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    assert look_up(PROBLEM, "ag+gemm", 8, GPU) == OTHER
    written = json.loads(path.read_text())
    assert written["device"] == GPU and list(written["configs"]) == [key]
    assert written["configs"][key]["ms"] == 0.25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"configs": {"one": "fast"}}',
        '{"configs": {"one": {"method": "plan"}}}',
        json.dumps({"configs": {"one": PLAN.to_dict() | {"provider": "mkl"}}}),
        json.dumps({"configs": {"one": PLAN.to_dict() | {"config": 5}}}),
        json.dumps({"configs": {"one": PLAN.to_dict() | {"schedule": None}}}),
        json.dumps({"configs": {"one": PLAN.to_dict() | {"options": [2]}}}),
        json.dumps({"configs": {"one": PLAN.to_dict() | {"gemm_streams": "2"}}}),
    ],
)
def test_a_broken_file_is_named(text: str) -> None:
    path = CACHE.path(GPU)
    path.parent.mkdir()
    path.write_text(text)
    for call in (lambda: look_up(PROBLEM, "ag+gemm", 4, GPU), lambda: CACHE.record(GPU, {"two": PLAN.to_dict()})):
        with pytest.raises(ValueError, match=r"does not hold tuned configurations .*with: distgemm tune$") as raised:
            call()
        assert str(raised.value).startswith(f"{path} ")
    assert path.read_text() == text


def test_a_schedule_that_is_not_registered_names_the_file() -> None:
    """Of another program, or of a newer version. Other entries of the file are of use."""
    mine = dataclasses.replace(PLAN, schedule="my_schedule")
    path = CACHE.record(GPU, {key_of(PROBLEM, "ag+gemm", size): mine.to_dict() for size in (2, 4)})
    CACHE.record(GPU, {key_of(PROBLEM, "ag+gemm", 4): PLAN.to_dict()})
    with pytest.raises(
        ValueError, match=r"has schedule 'my_schedule' for ag\+gemm .* not registered .*: distgemm tune"
    ):
        look_up(PROBLEM, "ag+gemm", 2, GPU)
    with pytest.raises(ValueError, match=str(path)):
        look_up(PROBLEM, "ag+gemm", 2, GPU)
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN


def test_the_fallback_survives_json() -> None:
    per_tile = dataclasses.replace(OTHER, execution=ExecutionConfig(execution="per_tile"), fallback=MERGED)
    found = TunedConfig.from_dict(json.loads(json.dumps(per_tile.to_dict())), "recorded")
    assert found == per_tile and found.fallback == MERGED and found.fallback.source == "recorded"
    assert "fallback" not in OTHER.to_dict()


PER_TILE = TunedConfig("plan", GATHER, (), ExecutionConfig(None, "128x128x64_2x1_pingpong", 1, "per_tile"))


def test_what_per_tile_kernels_do_not_execute_takes_the_fallback() -> None:
    """Without one, the prediction is taken."""
    fits, odd, narrow = (GemmProblem(m, n, 4096) for m, n in ((2048, 8192), (2042, 8192), (2048, 8196)))
    for fallback in (MERGED, UNFUSED):
        config = dataclasses.replace(PER_TILE, fallback=fallback)
        assert tune.fitting(config, fits, "ag+gemm", 4) == PER_TILE
        for problem in (odd, narrow):
            assert tune.fitting(config, problem, "ag+gemm", 4) == fallback
    found = tune.fitting(PER_TILE, odd, "ag+gemm", 4)
    assert found == predicted(odd, "ag+gemm", 4) and found.execution.execution == "multi_kernel"


def test_the_fallback_of_a_per_tile_kernel_is_the_fastest_that_executes_more() -> None:
    other = dataclasses.replace(PER_TILE, execution=ExecutionConfig(execution="per_tile"))
    every = [MERGED, PLAN, UNFUSED, other, PER_TILE]
    times = {str(config): ms for config, ms in zip(every, (1.3, 1.2, 1.4, 1.05, 1.0), strict=True)}
    found = with_fallback(PER_TILE, every, times)
    assert (found, found.fallback) == (PER_TILE, PLAN)
    assert found.fallback and found.fallback.source == "measured" and found.fallback.fallback is None
    assert with_fallback(PLAN, every, times).fallback is None
    del times[str(PLAN)]  # it was refused
    assert with_fallback(PER_TILE, every, times).fallback == MERGED
    assert with_fallback(PER_TILE, every, {str(PER_TILE): 1.0}).fallback is None


def test_kernels_of_fallbacks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with columns of B, as in backward passes."""
    problem = GemmProblem(2048, 8192, 4096)
    several = TunedConfig("plan", GATHER, (), TILES)
    monkeypatch.setattr(kernels, "look_up", lambda *_: dataclasses.replace(PER_TILE, fallback=several))
    found = kernels.configs_of(problem, "ag+gemm", 4, "selected")
    assert found == [PER_TILE, several]
    for turned_b, major in ((False, "1"), (True, "0")):
        with compiling_for("90a"):
            first, *others = kernels.sources_of(problem, "ag+gemm", 4, found, turned_b=turned_b)
        assert first.file == "per_tile.cu" and dict(first.macros)["DG_B_K_MAJOR"] == major
        assert others and all(each.file != "per_tile.cu" for each in others)


def test_a_plan_must_be_clearly_faster_than_an_unfused_program() -> None:
    for ms, expected in (
        ({PLAN: 0.97, TWO_SHOT: 1.2, UNFUSED: 1.0}, PLAN),
        ({PLAN: 0.99, TWO_SHOT: 1.2, UNFUSED: 1.0}, UNFUSED),
        ({PLAN: 0.99, TWO_SHOT: 1.0, UNFUSED: 1.2}, TWO_SHOT),
        ({PLAN: 0.985, TWO_SHOT: 0.99, UNFUSED: 1.0}, UNFUSED),
        ({TWO_SHOT: 0.9, UNFUSED: 1.0, PLAN: 1.1}, TWO_SHOT),
        ({PLAN: 2.0, OTHER: 3.0}, PLAN),
    ):
        times = {str(config): time for config, time in ms.items()}
        assert fastest_of(list(ms), times) == expected, ms


@pytest.mark.parametrize("config", [PLAN, OTHER, MERGED, UNFUSED, TWO_SHOT], ids=str)
def test_a_configuration_survives_its_text(config: TunedConfig) -> None:
    found = TunedConfig.parse(config.text)
    assert found == config and found.source == "pinned"


@pytest.mark.parametrize("value", ["Ring", "ring", 2, True, False, (2, 4)], ids=str)
def test_an_option_survives_text_and_file(value: object) -> None:
    config = TunedConfig("plan", "mine", (("mesh" if isinstance(value, tuple) else "way", value),))
    assert TunedConfig.parse(config.text) == config == TunedConfig.from_dict(config.to_dict())
    if isinstance(value, tuple):
        assert config.arguments()["mesh"] == value


def test_the_text_has_only_what_differs_from_the_defaults() -> None:
    assert OTHER.text == "reduce_scatter_1d_pairwise_a chunks=1 config=64x128x64_1x1_pingpong gemm_streams=1"
    assert MERGED.text == f"{GATHER} chunks=2 wait_by=kernel merge_copies=true"
    named = dataclasses.replace(MERGED, execution=dataclasses.replace(MERGED.execution, provider="cutlass"))
    assert named.text == f"{GATHER} chunks=2 provider=cutlass wait_by=kernel merge_copies=true"
    assert PER_TILE.text == f"{GATHER} config=128x128x64_2x1_pingpong gemm_streams=1 execution=per_tile"
    assert (UNFUSED.text, TWO_SHOT.text) == ("unfused", "unfused collective=two-shot")


def test_shipped_files_hold_configurations() -> None:
    paths = list(SHIPPED.glob("*.json"))
    assert paths
    for path in paths:
        written = json.loads(path.read_text())
        assert path.name == CACHE.path(written["device"]).name
        for entry in written["configs"].values():
            config = TunedConfig.from_dict(entry)
            assert config.method == "unfused" or config.schedule in list_schedules()
            assert TunedConfig.parse(config.text) == config


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_cpus_are_not_measured(device: Any) -> None:
    problem = GemmProblem(m=64, n=64, k=64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for measure in (tune.tune, tune.select):
            with pytest.raises(
                ValueError, match=r"tuning measures on GPUs: device is a GPU .*, got 'cpu'; .*tune=False"
            ):
                measure(problem, "ag+gemm", device=device)  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


def test_any_error_of_the_first_rank_is_raised_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that cannot be pickled, or not be made again: the others would wait for it."""

    class LocalError(Exception):
        """No other process finds it by its name."""

    messages: list[bytes] = []

    def broadcast(sent: list[Any], **_: Any) -> None:
        if not messages:  # the first rank
            messages.append(pickle.dumps(sent))
        sent[:] = pickle.loads(messages[0])

    monkeypatch.setattr(tune.ranks.dist, "get_rank", lambda group: len(messages))
    monkeypatch.setattr(tune.ranks.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(tune.ranks.dist, "broadcast_object_list", broadcast)
    group: Any = "a group"
    errors = ValueError("a bad file"), LocalError("of a function"), UnpicklableError("two", "arguments")
    for error, kind in zip(errors, (ValueError, RuntimeError, RuntimeError), strict=True):
        messages.clear()
        for _ in range(2):
            with pytest.raises(kind, match=f"{error}$"):
                tune.ranks.from_first(group, torch.device("cpu"), mock.Mock(side_effect=error))


class UnpicklableError(Exception):
    """Pickle makes an exception of all that Exception.__init__ got, here one argument."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")
