"""Choices, what they depend on, their files, and which candidates are measured. No GPU, no process group."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from distgemm import GemmProblem, list_schedules, make_plan, tune
from distgemm.cli import main as cli
from distgemm.cli import tune as tune_command
from distgemm.gemm.cache import file_name
from distgemm.gemm.cublas import CublasProvider
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.select import order
from distgemm.measure.models import MODELS
from distgemm.runtime.cuda.lowering import lower
from distgemm.runtime.executable import ExecutionConfig
from distgemm.simulator.machine import Machine
from distgemm.tune import (
    UNFUSED,
    Tuned,
    TunedConfig,
    bucket,
    candidates,
    choices_file,
    key_of,
    look_up,
    predicted,
    record,
)
from distgemm.tune import cache as records
from distgemm.tune import candidates as predicting
from distgemm.tune import search as measuring
from distgemm.tune.candidates import SCHEDULES, WITHIN, by_one_kernel, specs_of
from distgemm.tune.ranks import device_of

SHIPPED = records.SHIPPED
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
    """An empty cache, and no choices that ship with the package."""
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    providers = {"cutlass": CutlassProvider("90a"), "cublas": CublasProvider()}
    monkeypatch.setattr(predicting, "providers", lambda: providers)
    return tmp_path / "cache"


# --- choices --------------------------------------------------------------------------------------------


def test_choices_as_text() -> None:
    assert str(PLAN) == "all_gather_1d_tiling_cd_rotating_a chunks=2, GEMMs by cublas, 2 gemm_streams"
    assert str(OTHER) == "reduce_scatter_1d_pairwise_a chunks=1, GEMMs by cutlass 64x128x64_1x1_pingpong, 1 branch"
    assert str(UNFUSED) == "unfused" and str(TWO_SHOT) == "unfused, two-shot"


@pytest.mark.parametrize("choice", [PLAN, OTHER, MERGED, UNFUSED, TWO_SHOT], ids=str)
def test_choices_come_back_from_json(choice: TunedConfig) -> None:
    fields = json.loads(json.dumps(choice.to_dict()))
    found = TunedConfig.from_dict(fields | {"ms": 1.5}, "recorded")
    assert found == choice
    assert found.how == "recorded" and choice.how == ""


def test_a_choice_is_the_same_in_whatever_order_its_options_come() -> None:
    """A file has them by name, candidates as they are written."""
    pairs = (("mechanism", "store"), ("stagger", 2), ("chunks", 4))
    one, other = (dataclasses.replace(PLAN, options=options) for options in (pairs, pairs[::-1]))
    assert one == other == TunedConfig.from_dict(one.to_dict()) and str(one) == str(other) and hash(one) == hash(other)


def test_a_choice_pins_what_compile_takes() -> None:
    arguments = PLAN.arguments()
    assert arguments == {
        "schedule": PLAN.schedule, "chunks": 2, "provider": "cublas", "gemm_streams": 2, "config": None, "wait_by": "memory_op",
        "merge_copies": False,
        "transport": "copy_engine",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no plan"):
        UNFUSED.arguments()


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "fused"},
        {"method": "plan", "schedule": ""},
        {"method": "unfused", "schedule": "x"},
        {"execution": ExecutionConfig("mkl")},
        {"execution": ExecutionConfig(config="fast")},
        {"collective": "two-shot"},  # of a plan
        {"method": "unfused", "schedule": "", "collective": "ring"},
    ],
)
def test_choices_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"method is|provider is|a configuration is|collective is"):
        dataclasses.replace(PLAN, **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gemm_streams": 3}, "gemm_streams is 1 or 2, got 3"),
        ({"gemm_streams": True}, "gemm_streams is 1 or 2, got True"),
        ({"waits": "events"}, "waits is one of memory, kernel, gemm"),
        ({"merge_copies": 1}, "merge is True or False"),
        ({"copies": "sm"}, "copies is one of engine, slices, gemm, both"),
        ({"transport": "sm"}, "goes with execution='single_kernel'"),
        (
            {"copies": "both", "execution": "single_kernel", "merge_copies": True},
            "goes with execution='single_kernel' and merge_copies=False",
        ),
        ({"execution": "single_kernel", "provider": "cublas"}, "takes provider 'cutlass'"),
    ],
)
def test_executions_that_make_no_sense(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExecutionConfig(**wrong)


def test_choices_of_older_files_are_by_nccl() -> None:
    assert TunedConfig.from_dict({"method": "unfused", "ms": 1.0}) == UNFUSED


def test_a_collective_that_cannot_add_these_extents_gives_way_to_nccl() -> None:
    kept = dataclasses.replace(TWO_SHOT, how="recorded")
    assert tune.fitting(kept, GemmProblem(8, 8, 8), "gemm+ar", 4) == TWO_SHOT
    half = GemmProblem(8, 8, 8, dtype="float16")
    for problem, ranks in ((GemmProblem(7, 9, 8), 4), (half, 4), (GemmProblem(8, 8, 8), 3)):
        found = tune.fitting(kept, problem, "gemm+ar", ranks)
        assert (found, found.how) == (UNFUSED, "recorded")


def test_the_current_gpu_is_meant_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("cuda:2") == torch.device("cuda", 2) and device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of("cuda") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(None) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None) == torch.device("cpu")


# --- keys and buckets -----------------------------------------------------------------------------------


def test_what_a_choice_depends_on() -> None:
    problems = [
        PROBLEM,
        *(dataclasses.replace(PROBLEM, **{mode: 1024}) for mode in "mnk"),
        dataclasses.replace(PROBLEM, l=2),
        dataclasses.replace(PROBLEM, dtype="float16", out_dtype=None),
        dataclasses.replace(PROBLEM, out_dtype="float32"),
        dataclasses.replace(PROBLEM, partial_dtype="float32"),
    ]
    keys = [key_of(problem, op, size) for problem in problems for op in SCHEDULES for size in (4, 8)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "ag+gemm 2048x8192x4096x1 bfloat16 bfloat16 bfloat16 tp:4"
    uneven = dataclasses.replace(PROBLEM, m_per_rank=(2000, 48))
    assert key_of(uneven, "ag+gemm", 2) == key_of(PROBLEM, "ag+gemm", 2)


def test_buckets_are_powers_of_two_that_hold_m() -> None:
    assert [bucket(m) for m in (1, 64, 65, 128, 129, 8192, 8193)] == [64, 64, 128, 128, 256, 8192, 16384]
    for m in range(1, 3000):
        found = bucket(m)
        assert found >= m and found & (found - 1) == 0 and bucket(found) == found


def test_the_exact_m_stands_before_its_bucket() -> None:
    odd = dataclasses.replace(PROBLEM, m=1500)
    assert look_up(odd, "ag+gemm", 4, GPU) is None
    record(GPU, {key_of(PROBLEM, "ag+gemm", 4): PLAN.to_dict()})
    assert look_up(odd, "ag+gemm", 4, GPU) == look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    record(GPU, {key_of(odd, "ag+gemm", 4): UNFUSED.to_dict()})
    assert look_up(odd, "ag+gemm", 4, GPU) == UNFUSED
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    for problem, op, size, device in (
        (PROBLEM, "gemm+rs", 4, GPU),
        (PROBLEM, "ag+gemm", 8, GPU),
        (PROBLEM, "ag+gemm", 4, "NVIDIA Other"),
        (dataclasses.replace(PROBLEM, m=1024), "ag+gemm", 4, GPU),
    ):
        assert look_up(problem, op, size, device) is None


# --- files ----------------------------------------------------------------------------------------------


def test_ones_own_choice_stands_before_the_shipped_one(cache: Path) -> None:
    key, further = (key_of(PROBLEM, "ag+gemm", size) for size in (4, 8))
    records.SHIPPED.mkdir()
    shipped = {"device": GPU, "choices": {key: OTHER.to_dict(), further: OTHER.to_dict()}}
    (records.SHIPPED / "plans_NVIDIA_Test.json").write_text(json.dumps(shipped))
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == OTHER
    path = record(GPU, {key: PLAN.to_dict() | {"ms": 0.25, "unfused_ms": 0.5}})
    assert path == choices_file(GPU) == cache / "plans_NVIDIA_Test.json"
    assert look_up(PROBLEM, "ag+gemm", 4, GPU) == PLAN
    assert look_up(PROBLEM, "ag+gemm", 8, GPU) == OTHER
    written = json.loads(path.read_text())
    assert written["device"] == GPU and list(written["choices"]) == [key]
    assert written["choices"][key]["ms"] == 0.25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"choices": {"one": "fast"}}',
        '{"choices": {"one": {"method": "plan"}}}',
        json.dumps({"choices": {"one": PLAN.to_dict() | {"provider": "mkl"}}}),
        json.dumps({"choices": {"one": PLAN.to_dict() | {"config": 5}}}),
        json.dumps({"choices": {"one": PLAN.to_dict() | {"schedule": None}}}),
        json.dumps({"choices": {"one": PLAN.to_dict() | {"options": [2]}}}),
        json.dumps({"choices": {"one": PLAN.to_dict() | {"gemm_streams": "2"}}}),
    ],
)
def test_a_broken_file_is_named(text: str) -> None:
    path = choices_file(GPU)
    path.parent.mkdir()
    path.write_text(text)
    for call in (lambda: look_up(PROBLEM, "ag+gemm", 4, GPU), lambda: record(GPU, {"two": PLAN.to_dict()})):
        with pytest.raises(ValueError, match=r"does not hold measured choices .*with: distgemm tune$") as raised:
            call()
        assert str(raised.value).startswith(f"{path} ")
    assert path.read_text() == text


def test_what_is_done_otherwise_comes_back_from_json() -> None:
    by_one = dataclasses.replace(OTHER, execution=ExecutionConfig(execution="single_kernel"), otherwise=MERGED)
    found = TunedConfig.from_dict(json.loads(json.dumps(by_one.to_dict())), "recorded")
    assert found == by_one and found.otherwise == MERGED and found.otherwise.how == "recorded"
    assert "otherwise" not in OTHER.to_dict()


def test_where_rows_are_in_no_equal_chunks_something_else_is_done() -> None:
    """What was measured for that, else what is predicted; never the same chunks with other waits, which may be slow."""
    by_one = TunedConfig(
        "plan", GATHER, (("chunks", 4),), ExecutionConfig(gemm_streams=1, execution="single_kernel", transport="sm")
    )
    fits, odd = (GemmProblem(m, 8192, 4096) for m in (2048, 2042))
    assert tune.fitting(by_one, fits, "ag+gemm", 4) == by_one
    expected = predicted(odd, "ag+gemm", 4)
    assert tune.fitting(by_one, odd, "ag+gemm", 4) == expected and not expected.by_one_kernel
    for otherwise in (PLAN, UNFUSED, dataclasses.replace(by_one, otherwise=MERGED)):
        found = tune.fitting(dataclasses.replace(by_one, otherwise=otherwise), odd, "ag+gemm", 4)
        assert found == (MERGED if otherwise == by_one else otherwise)


def test_an_unfused_program_is_taken_where_a_plan_is_hardly_faster() -> None:
    for ms, expected in (
        ({PLAN: 0.97, TWO_SHOT: 1.2, UNFUSED: 1.0}, PLAN),
        ({PLAN: 0.99, TWO_SHOT: 1.2, UNFUSED: 1.0}, UNFUSED),
        ({PLAN: 0.99, TWO_SHOT: 1.0, UNFUSED: 1.2}, TWO_SHOT),
        ({PLAN: 0.985, TWO_SHOT: 0.99, UNFUSED: 1.0}, UNFUSED),
        ({TWO_SHOT: 0.9, UNFUSED: 1.0, PLAN: 1.1}, TWO_SHOT),
        ({PLAN: 2.0, OTHER: 3.0}, PLAN),
    ):
        times = {str(choice): time for choice, time in ms.items()}
        assert measuring._clearly_fastest(list(ms), times) == expected, ms


@pytest.mark.parametrize("choice", [PLAN, OTHER, MERGED, UNFUSED, TWO_SHOT], ids=str)
def test_choices_come_back_from_text(choice: TunedConfig) -> None:
    found = TunedConfig.parse(choice.text)
    assert found == choice and found.how == "pinned"


def test_the_text_of_a_choice_is_short() -> None:
    assert OTHER.text == "reduce_scatter_1d_pairwise_a chunks=1 config=64x128x64_1x1_pingpong gemm_streams=1"
    assert MERGED.text == f"{GATHER} chunks=2 wait_by=kernel merge_copies=true"
    assert (UNFUSED.text, TWO_SHOT.text) == ("unfused", "unfused collective=two-shot")


def test_shipped_files_hold_choices() -> None:
    for path in SHIPPED.glob("*.json"):
        written = json.loads(path.read_text())
        assert path.name == file_name("plans", written["device"])
        for entry in written["choices"].values():
            choice = TunedConfig.from_dict(entry)
            assert choice.method == "unfused" or choice.schedule in list_schedules()
            assert TunedConfig.parse(choice.text) == choice


# --- candidates -----------------------------------------------------------------------------------------

LAYERS = [
    (layer.op, GemmProblem(m, layer.n, layer.k)) for layer in MODELS["llama-3-70b"].layers for m in (128, 2048, 8192)
]


def kind_of(choice: TunedConfig, problem: GemmProblem, ranks: int) -> str:
    """By what is put on streams."""
    if not choice.by_one_kernel:
        return "kernels"
    plan = choice.plan(problem, ranks)
    actions = lower(plan, 0, 1, choice.execution.merge, gated=True, copies=choice.execution.copies)
    return "alone" if len({action.stream for action in actions}) == 1 else "one kernel"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_best_by_the_model_and_the_unfused_program_are_always_measured(ranks: int) -> None:
    for op, problem in [*LAYERS, *(("gemm+ar", problem) for op, problem in LAYERS if op == "gemm+rs")]:
        found = candidates(problem, op, ranks)
        times = candidates._predictions(problem, op, ranks)
        plans = {choice: time for choice, time in times.items() if choice.method == "plan"}
        unfused = [choice for choice in found if choice.method == "unfused"]
        assert unfused[0] == UNFUSED and found[-len(unfused) :] == unfused
        several = op == "gemm+ar" and ranks in (2, 4, 8)
        assert [each.collective for each in unfused] == ["nccl", *["two-shot", "one-shot"] * several]
        assert found[0] in plans and plans[found[0]] == min(plans.values())
        best: dict[str, float] = {}
        for choice, time in plans.items():
            kind = kind_of(choice, problem, ranks)
            best[kind] = min(time, best.get(kind, time))
        limits = {kind: WITHIN[kind] * time for kind, time in best.items()}
        wanted = {choice for choice, time in plans.items() if time <= limits[kind_of(choice, problem, ranks)]}
        assert set(found[: -len(unfused)]) == wanted
        assert len({str(choice) for choice in found}) == len(found) <= 60
        assert {choice.schedule for choice in found[: -len(unfused)]} <= {name for name, _ in SCHEDULES[op]}


def in_usual_tiles(choice: TunedConfig) -> TunedConfig:
    return dataclasses.replace(choice, execution=dataclasses.replace(choice.execution, config=None))


def test_plans_by_one_kernel_are_tried() -> None:
    problem = GemmProblem(8192, 8192, 2048)

    def by_one(op: str, ranks: int = 4) -> set[tuple[str, str]]:
        return {(each.schedule, each.execution.copies) for each in candidates(problem, op, ranks) if each.by_one_kernel}

    chain, pairwise = ("reduce_scatter_1d_tiling_a_rotating_c", "engine"), ("reduce_scatter_1d_pairwise_a", "engine")
    assert by_one("gemm+rs") == {chain, pairwise}
    # Between two ranks both are the same, but for chunks of columns.
    assert by_one("gemm+rs", 2) == {chain, pairwise}
    every = ("engine", "slices", "gemm", "both")
    assert by_one("ag+gemm") == {("all_gather_1d_tiling_cd_rotating_a", copies) for copies in every}
    names = ("all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a")
    assert by_one("gemm+ar") == {(name, copies) for name in names for copies in ("engine", "gemm")}
    of_two = [each for op in ("gemm+rs", "gemm+ar") for each in candidates(problem, op, 2) if "pairwise" in str(each)]
    by_columns = [each for each in of_two if each.by_one_kernel]
    assert by_columns and all(each.option("along") == "n" for each in by_columns)
    # With one peer engines have nothing to send where a shard is one chunk.
    chunks = {
        ranks: {
            dict(each.options)["chunks"]
            for each in candidates(problem, "ag+gemm", ranks)
            if each.execution.copies == "both"
        }
        for ranks in (2, 4)
    }
    assert chunks == {2: {2}, 4: {1, 2}}


def test_what_one_kernel_does_costs_no_launches() -> None:
    """Of 32 and 64 short products, whose results are delivered to seven peers each, too: the fastest where measured."""
    for n, k, chunks in ((4096, 14336, 4), (8192, 28672, 8)):
        tried = [dict(each.options) for each in candidates(GemmProblem(2048, n, k), "gemm+ar", 8)]
        assert {
            "chunks": chunks,
            "stagger": 2,
            "chunk_mode": "n",
            "final_add": "epilogue",
            "mechanism": "store",
        } in tried


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8])
@pytest.mark.parametrize(("op", "split"), [("ag+gemm", "n"), ("gemm+rs", "k"), ("gemm+ar", "k")])
def test_what_is_measured_has_equal_shards_as_aligned_as_those_of_the_product(op: str, split: str, ranks: int) -> None:
    """Else the choice would be for a product without TMA, and no kernel that waits would be tried."""
    problem = GemmProblem(2048, 8192, 8192)
    whole = measuring._divisible(problem, op, ranks)
    parts = {mode: getattr(whole, mode) // (ranks if mode in ("m", split) else 1) for mode in "mnk"}
    assert parts["n"] % 8 == parts["k"] % 8 == 0
    assert all(getattr(problem, mode) <= getattr(whole, mode) < getattr(problem, mode) + 8 * ranks for mode in "mnk")
    assert whole.m % ranks == getattr(whole, split) % ranks == 0
    assert any(each.by_one_kernel for each in candidates(whole, op, ranks))
    odd = measuring._divisible(GemmProblem(7, 13, 13), op, ranks)
    assert odd.m < 7 + ranks and getattr(odd, split) < 13 + ranks and (odd.n == 13 or odd.k == 13)


def test_words_of_kernels_come_as_fast_on_every_link() -> None:
    """Copies' latency is none of theirs."""
    machine = Machine.load(candidates.MACHINE)
    slow = dataclasses.replace(machine, nvlink=machine.nvlink._replace(latency=100.0, gap=9.0), gemm_launch=50.0)
    assert candidates._inside(slow) == candidates._inside(machine) != machine


def test_what_is_too_much_for_one_kernel_is_not_tried() -> None:
    problem = GemmProblem(16384, 8192, 8192)
    for chunks, copies, said in (
        (8, "gemm", ""),
        (16, "engine", ""),
        (16, "gemm", "128 products and sends 128 chunks, at most"),  # it sends 112, and takes as many
        (32, "engine", "128 products"),
    ):
        plan = make_plan(
            problem, "all_reduce_1d_tiling_a_rotating_c", 8, chunks=chunks, mechanism="store", sync="barrier"
        )
        status = by_one_kernel(plan, copies)
        assert bool(status) == (not said) and said in status.reason


def test_the_best_kernel_of_each_kind_is_tried_in_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, stored and pushed, and pairwise sums: the first of each, where it is not far behind, and the second in
    fewer, where it is close."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    problem = GemmProblem(8192, 8192, 4096)
    every = candidates(problem, "gemm+rs", 4)
    others = [each for each in every if not each.by_one_kernel and each.method == "plan"]
    kernels = [each for each in every if each.by_one_kernel]
    summed = [each for each in kernels if "pairwise" in each.schedule]
    stored = [each for each in kernels if ("mechanism", "store") in each.options and each not in summed]
    pushed = [each for each in kernels if each not in (*stored, *summed)]
    assert len(stored) > 1 and len(pushed) > 1 and len(summed) > 1

    def found(ran: list[TunedConfig], slow: list[TunedConfig], later: float = 1.1) -> list[TunedConfig]:
        times = {str(each): later if each in (*stored[1:], *pushed[1:], *summed[1:]) else 1.0 for each in ran}
        times |= {str(each): 2.0 for each in slow}
        return tune.finalists(problem, "gemm+rs", 4, ran, times)

    def tiles_of(finalists: list[TunedConfig], one: TunedConfig) -> list[str | None]:
        return [each.execution.config for each in finalists if in_usual_tiles(each) == one]

    ran = [*others[:3], *stored, UNFUSED, *pushed, *summed]
    finalists = found(ran, [])
    assert finalists[:5] == [*ran[:4], UNFUSED]
    for one in (stored[0], pushed[0], summed[0]):
        tiles = tiles_of(finalists, one)
        assert tiles[0] is None and len(set(tiles)) == len(tiles) == 1 + measuring.KERNELS
        assert all(tile and tile.endswith("pingpong") for tile in tiles[1:4]) or one == pushed[0]
    close = found(ran, [], later=1.04)
    for one in (stored[1], pushed[1], summed[1]):
        tiles = tiles_of(close, one)
        assert None in tiles and len(set(tiles)) == len(tiles) == 1 + measuring.KERNELS // 2
    assert not {*stored[1:], *pushed[1:], *summed[1:]} & {in_usual_tiles(each) for each in finalists}
    delivered = [
        each for each in candidates(problem, "gemm+ar", 4) if each.by_one_kernel and each.execution.copies == "gemm"
    ]
    times = {str(each): 1.0 for each in delivered}
    tiles = [str(each.execution.config) for each in tune.finalists(problem, "gemm+ar", 4, delivered, times)]
    assert {"None"} < {*tiles} and all(each == "None" or each.endswith("pingpong") for each in tiles)
    far = found(ran, pushed)
    assert far == [each for each in finalists if in_usual_tiles(each) != pushed[0]]


def test_tiles_for_all_products_and_for_the_last_one_are_tried_in_turn() -> None:
    problem = GemmProblem(8192, 5120, 4096)
    choice = TunedConfig(
        "plan", GATHER, (("chunks", 2),), ExecutionConfig("cutlass", gemm_streams=1, execution="single_kernel")
    )
    plan = choice.plan(problem, 4)
    chunk = specs_of(plan)[0]
    configs = [one for one in candidates.providers()["cutlass"].configs(chunk) if one.schedule != "plain"]
    of_all, of_one = (order(chunk, configs, count=count) for count in (8, 1))
    assert not set(of_all[:2]) & set(of_one[:2])
    found = [each.execution.config for each in measuring._in_other_tiles(plan, choice, "ag+gemm")]
    assert found[:4] == [str(one) for pair in zip(of_all, of_one, strict=True) for one in pair][:4]
    assert set(found) == set(map(str, configs)) and len(found) == len(configs)


@pytest.mark.parametrize("op", ["ag+gemm", "gemm+rs", "gemm+ar"])
def test_ranks_without_gemms_are_predicted_too(op: str) -> None:
    for extents in ((64, 9, 64), (5, 3, 64), (64, 9, 7)):
        assert not tune.predicted(GemmProblem(*extents), op, 4).by_one_kernel


def test_what_no_kernel_waits_for_is_no_candidate() -> None:
    chain = "reduce_scatter_1d_tiling_a_rotating_c"
    for how, said in (
        ({"l": 2}, "single products"),
        ({"dtype": "float32"}, "not of IEEE float32"),
        ({"partial_dtype": "float32"}, "of D's type"),
        ({"n": 60}, "multiples of 16 bytes"),
        ({"m": 66}, "takes equal chunks"),
    ):
        problem = GemmProblem(**({"m": 64, "n": 64, "k": 64} | how))
        plan = make_plan(problem, chain, 4, sync="barrier", mechanism="store")
        assert said in by_one_kernel(plan).reason
    assert by_one_kernel(make_plan(GemmProblem(64, 64, 64), chain, 4, sync="barrier"))
    for k, said in ((64, ""), (60, "multiples of 16 bytes")):  # operands alone: nothing is added
        plan = make_plan(GemmProblem(64, 64, k), GATHER, 4, sync="barrier")
        assert said in by_one_kernel(plan).reason and bool(by_one_kernel(plan)) == (k == 64)


def test_slow_plans_are_left_out() -> None:
    assert len(candidates(GemmProblem(64, 8192, 28672), "gemm+rs", 4)) < len(
        candidates(GemmProblem(8192, 8192, 28672), "gemm+rs", 4)
    )


def test_branches_matter_where_a_rank_has_several_gemms() -> None:
    assert {choice.execution.gemm_streams for choice in candidates(PROBLEM, "ag+gemm", 1)} == {1, 2}  # in chunks
    one = [choice for choice in candidates(PROBLEM, "ag+gemm", 1) if choice.options == (("chunks", 1),)]
    assert one and {choice.execution.gemm_streams for choice in one} == {1}


@pytest.mark.parametrize(
    ("dtypes", "op", "providers", "unfused"),
    [
        (("bfloat16", None, None), "ag+gemm", {"cutlass", "cublas"}, True),
        (("bfloat16", "float32", None), "ag+gemm", {"cutlass"}, True),
        (("bfloat16", None, "float32"), "gemm+rs", {"cutlass"}, True),
        (("float16", "bfloat16", "float16"), "gemm+rs", {"cutlass", "cublas"}, True),
        (("float16", None, "bfloat16"), "gemm+rs", {"cutlass"}, False),
        (("float8_e4m3fn", None, None), "ag+gemm", {"cutlass"}, False),
        (("tfloat32", None, None), "ag+gemm", {"cutlass", "cublas"}, False),
        (("float64", None, None), "ag+gemm", {"cublas"}, True),
        (("float64", None, None), "gemm+rs", set(), True),
    ],
)
def test_providers_are_tried_where_they_compute_it(
    dtypes: tuple[str, str | None, str | None], op: str, providers: set[str], unfused: bool
) -> None:
    found = candidates(GemmProblem(512, 512, 512, 1, *dtypes), op, 4)
    assert {choice.execution.provider for choice in found if choice.method == "plan"} == providers
    assert (UNFUSED in found) == unfused


def test_the_prediction_is_a_candidate_that_computes_it() -> None:
    for op, problem in LAYERS:
        found = predicted(problem, op, 4)
        assert found in candidates(problem, op, 4) and found.how == "predicted"
    assert predicted(GemmProblem(64, 8192, 28672), "gemm+rs", 4) == UNFUSED
    assert predicted(GemmProblem(8192, 8192, 28672), "gemm+rs", 4).method == "plan"


def test_where_nothing_is_won_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in SCHEDULES:
        assert predicted(PROBLEM, op, 1) == UNFUSED
    for tied in ((PLAN, UNFUSED), (UNFUSED, PLAN)):
        monkeypatch.setattr(predicting, "_waiting_outside", lambda *args, tied=tied: dict.fromkeys(tied, 1.0))
        assert predicted(PROBLEM, "ag+gemm", 4) == UNFUSED


def test_nothing_computes_it() -> None:
    problem = GemmProblem(64, 64, 64, dtype="float64", out_dtype="float32")
    assert candidates(problem, "ag+gemm", 2) == []
    with pytest.raises(ValueError, match="nothing multiplies"):
        predicted(problem, "ag+gemm", 2)
    with pytest.raises(ValueError, match=r"op is one of ag\+gemm, gemm\+rs, gemm\+ar, got 'ag'"):
        candidates(problem, "ag", 2)


def test_the_gemms_of_a_plan() -> None:
    """A chain's epilogue adds what arrived."""
    plan = make_plan(GemmProblem(64, 32, 48), "reduce_scatter_1d_tiling_a_rotating_c", 2, chunks=2)
    specs = specs_of(plan)
    assert {(spec.m, spec.n, spec.k) for spec in specs} == {(16, 32, 24)}
    assert {spec.partial is None for spec in specs} == {True, False}
    assert all(spec.c is None and spec.bias is None for spec in specs)


# --- the command ----------------------------------------------------------------------------------------


def test_the_cases_of_a_model() -> None:
    found = tune_command.cases("llama-3-70b", [2048, 8192], ["ag+gemm", "gemm+ar"], 8, 4, "float16")
    assert [(case.label, case.op) for case in found[:4]] == [
        ("70b qkv", "ag+gemm"), ("70b out", "gemm+ar"), ("70b fc1", "ag+gemm"), ("70b fc2", "gemm+ar"),
    ]  # fmt: skip
    fc1, fc2 = (case.problem for case in found[6:])
    assert (fc1.m, fc1.n, fc1.k, fc1.dtype) == (8192, 57344 // 2, 8192, "float16")  # per rank as with 8
    assert (fc2.m, fc2.n, fc2.k) == (8192, 8192, 28672 // 2)


def test_the_command(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    launched: list[Any] = []
    monkeypatch.setenv("COLUMNS", "200")

    def launch(
        function: Any, ranks: int, found: list[Any], write: bool, kernels: bool, to: Path | None, **more: Any
    ) -> list[Any]:
        launched.append((ranks, [(case.op, case.problem.m) for case in found], write, kernels, to, more["backend"]))
        path = choices_file(GPU) if write else None
        times = {str(PLAN): 0.5, str(UNFUSED): 0.75}
        return [[Tuned(PLAN, times, {"some plan": "no kernel"}, path) for _ in found]]

    monkeypatch.setattr("distgemm.runtime.launch.launch", launch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    run = CliRunner().invoke(cli.app, ["tune", "--tp", "8", "--ranks", "4", "--m", "2048", "8192", "--ops", "ag+gemm"])
    assert run.exit_code == 0, run.output
    ops = [("ag+gemm", 2048), ("ag+gemm", 2048), ("ag+gemm", 8192), ("ag+gemm", 8192)]
    assert launched == [(4, ops, True, True, None, "nccl")]
    assert run.output.count("chunks=2, GEMMs by cublas, 2 gemm_streams") == 4
    assert "0.5000" in run.output and "1.500" in run.output
    assert "not measured: some plan: no kernel" in run.output
    assert str(cache / "plans_NVIDIA_Test.json") in run.output
    run = CliRunner().invoke(cli.app, ["tune", "--no-write", "--no-kernels", "--tp", "4"])
    assert launched[1][0] == 4 and launched[1][2:4] == (False, False)
    assert "choices are in" not in run.output
    run = CliRunner().invoke(cli.app, ["tune", "--json", "times.json"])
    assert run.exit_code == 0 and launched[-1][4] == Path("times.json").absolute()
    for models in (["all"], ["llama-3-8b,llama-3-70b", "llama-3-405b"]):
        run = CliRunner().invoke(cli.app, ["tune", "--model", *models])
        assert run.exit_code == 0 and len(launched[-1][1]) == 12, run.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--m", "many"], "--m is given as 8192 or 2048,8192, got 'many'"),
        (["--ops", "ag"], "--ops are some of ag+gemm, gemm+rs, gemm+ar, got 'ag'"),
        (["--model", "gpt"], "model is one of"),
        (["--tp", "7"], "7 ranks cannot share n = 10240 of qkv evenly"),
        (["--json", "no/where/times.json"], "there is no folder no/where"),
        (["--ranks", "4", "--tp", "2"], "--ranks 4 are at most the --tp 2 ranks that share a layer"),
    ],
)
def test_wrong_arguments(words: list[str], said: str) -> None:
    run = CliRunner().invoke(cli.app, ["tune", *words])
    assert run.exit_code == 2 and said in run.output


def test_ranks_tune_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def fake(problem: GemmProblem, op: str, *, write: bool, kernels: bool, progress: Any) -> Any:
        progress("measuring")
        seen.append((problem.m, op, write, kernels))
        times = {str(UNFUSED): 2.0, str(PLAN): 1.0 + len(seen)}
        return SimpleNamespace(choice=PLAN, times=times, refused={"a plan": "no kernel"})

    monkeypatch.setattr(tune, "tune", fake)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: ranks[0])
    found = tune_command.cases("llama-3-8b", [128], ["gemm+rs"], 8, 8, "bfloat16")
    written = tmp_path / "times.json"
    ranks = [1]
    assert len(tune_command._rank_main(found, True, False, written)) == 2 and not written.exists()
    ranks = [0]
    assert len(tune_command._rank_main(found, True, False, written)) == 2
    assert seen == [(128, "gemm+rs", True, False)] * 4
    layers = json.loads(written.read_text())["layers"]
    assert [(one["layer"], one["choice"]) for one in layers] == [("8b out", str(PLAN)), ("8b fc2", str(PLAN))]
    assert [list(one["ms"].values()) for one in layers] == [[2.0, 4.0], [2.0, 5.0]]  # the fastest first
    assert layers[1]["problem"]["k"] == 14336 and layers[0]["refused"] == {"a plan": "no kernel"}
