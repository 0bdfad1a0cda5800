"""The same selection on all ranks, tuning with fakes, and schedule="auto", over gloo. One launch runs all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distgemm.runtime.launch import launch
from tests.multiprocess import tune_worker as worker
from tests.once import once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def found(folder: str) -> list[dict[str, Any]]:
    return _results(folder)


CHECKS = (worker.agreement, worker.measuring, worker.all_to_alls, worker.kernels, worker.overlapping, worker.compiled)


@once
def _results(folder: str) -> list[dict[str, Any]]:
    checks: list[Any] = [(check, (folder,)) for check in CHECKS]
    return launch(worker.run_all, 2, checks, timeout=90)


def test_all_ranks_take_the_configuration_of_rank_0(found: list[dict[str, Any]]) -> None:
    for each in (rank["agreement"] for rank in found):
        assert each["different"] == worker.PLAN != worker.OTHER
        assert each["different"].source == "recorded"
        assert each["on rank 1"].source == "predicted"
        assert each["broken on rank 1"] == worker.PLAN


def test_a_broken_file_on_rank_0_raises_everywhere(found: list[dict[str, Any]]) -> None:
    for rank in found:
        text = rank["agreement"]["broken on rank 0"]
        assert text.startswith("ValueError") and text.endswith("measure anew with: distgemm tune")


def test_the_fastest_is_taken_and_recorded_by_rank_0_alone(found: list[dict[str, Any]]) -> None:
    name = "reduce_scatter_1d_pairwise_a chunks=1, GEMMs by cutlass, 1 GEMM stream"
    for number, each in enumerate(rank["measuring"] for rank in found):
        tuned = each["fastest"]
        assert str(tuned.config) == name and tuned.config.source == "measured"
        assert tuned.ms == 1.0 and tuned.unfused_ms == 2.0 and not tuned.refused
        assert each["kept"] == 0  # the workspace keeps nothing of it
        (final,) = each["finals"]
        assert each["steps"][-1] == f"measuring {len(final)} candidates"
        assert len(final) == 5 and {name, "unfused"} <= set(final)
        assert each["files"] == (["plans_none.json", "plans_none.lock"] if number == 0 else [])
        entry = tuned.config.to_dict() | {"ms": 1.0, "unfused_ms": 2.0}
        assert each["written"] == ([entry] if number == 0 else [])
        assert each["again"] == (tuned.config, "recorded", 1)


def test_a_per_tile_kernel_is_recorded_with_what_executes_more(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        config = each["per tile"].config
        assert config.execution.execution == "per_tile"
        # 1023 rows do not divide into equal shards.
        assert [execution for _, execution, _ in each["of m"]] == ["per_tile", "multi_kernel", "per_tile"]
        assert {source for source, _, _ in each["of m"]} == {"recorded"}
        first, fallback, again = (text for _, _, text in each["of m"])
        assert first == again == str(config)
        assert fallback == each["fallback"] and fallback in each["per tile"].times


@pytest.mark.parametrize("pattern", ["gemm+a2a", "a2a+gemm"])
def test_all_to_alls_are_measured_and_recorded(found: list[dict[str, Any]], pattern: str) -> None:
    for each in (rank["all_to_alls"] for rank in found):
        tuned, again, measured = each[pattern]
        assert tuned.config.execution.execution == "per_tile" and tuned.unfused_ms is None
        assert tuned.config.fallback.execution.execution == "multi_kernel"
        assert again == tuned.config and (again.source, measured) == ("recorded", 1)


def test_a_plan_must_be_faster_than_the_unfused_program(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert str(each["tie"]) == str(each["slower"]) == str(each["hardly faster"]) == "unfused"
        assert each["clearly faster"].method == "plan"


def test_a_configuration_that_one_rank_cannot_make_is_left_out_on_all(found: list[dict[str, Any]]) -> None:
    configs = [rank["measuring"]["refused by one rank"] for rank in found]
    assert {config.execution.provider for config in configs} == {"cutlass"} and len(set(configs)) == 1


def test_a_configuration_that_cannot_be_compiled_is_left_out_with_the_reason(found: list[dict[str, Any]]) -> None:
    for number, each in enumerate(rank["measuring"] for rank in found):
        tuned = each["refused"]
        assert "cublas" not in str(tuned.config) and all("cublas" not in name for name in tuned.times)
        assert tuned.refused and all("cublas" in name for name in tuned.refused)
        assert set(tuned.refused.values()) == {f"no kernel on rank {number}"}
        assert tuned.path is None and each["not written"] is None
        assert each["nothing"].startswith("RuntimeError: no candidate for ag+gemm 256x128x64x1 bfloat16")


def test_all_ranks_learn_that_one_has_no_memory_to_measure(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert each["no memory"].startswith("RuntimeError: no candidate for ag+gemm")
        assert "rank 1: MemoryError: no memory" in each["no memory"]


def test_a_configuration_that_fails_is_left_out_and_a_wrong_result_raises(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        tuned = each["fails"]
        assert "cublas" not in str(tuned.config) and set(tuned.refused.values()) == {"no memory"}
        assert all("cublas" in name for name in tuned.refused) and not set(tuned.refused) & set(tuned.times)
        assert each["all fail"].startswith("RuntimeError: no candidate for ag+gemm 256x128x64x1 bfloat16")
        assert each["wrong"].startswith("WrongResultError: all_gather_1d_tiling_cd_rotating_a chunks=")


def test_ranks_with_different_times_take_the_same_configuration(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert "cutlass" in each["ranks disagree"]


def test_one_measurement_serves_all_m_in_its_reach(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert each["buckets"] == [
            (100, "measured", [128]),
            (65, "recorded", [128]),
            (128, "recorded", [128]),
            (127, "recorded", [128]),
            (129, "recorded", [128]),
            (1, "measured", [128, 64]),
            (2, "recorded", [128, 64]),
            (64, "recorded", [128, 64]),
            (1000, "measured", [128, 64, 1024]),
        ]
        assert each["uneven"] == "recorded"
        p = each["rounded up"]
        assert (p.m, p.n, p.k) == (102, 127, 64)
        assert each["odd"]


def test_nothing_is_measured_if_that_is_off_or_impossible(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert [config.source for config in each["off"]] == ["predicted"] * 3
        assert each["off measured"] == 0
        assert each["neither"] == (
            "ValueError: DISTGEMM_TUNE is 1, true, yes or on, or else 0, false, no or off; got 'never'"
        )
        assert each["batches"] == "ValueError: batches are not measured: l is 1, got 2"


def test_a_file_that_cannot_be_written_raises_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "plans_none" in rank["measuring"]["unwritable"]
        assert rank["measuring"]["unwritable measured"] == 0


def test_auto_works_without_a_file(found: list[dict[str, Any]]) -> None:
    for config in (rank["measuring"]["unwritable auto"] for rank in found):
        assert config.source == "measured" and config.option("chunks") == 2


def test_the_tiles_of_each_gemm_are_measured_once_on_one_rank(found: list[dict[str, Any]]) -> None:
    rows = {512: " streams:2", 256: " streams:2", 128: ""}
    wanted = {f"{m}x512x1024x1 bfloat16_rr bfloat16{streams}" for m, streams in rows.items()}
    first, second = (rank["kernels"]["measures"] for rank in found)
    for number, (text, keys, built, _) in enumerate((first, second)):
        assert text == "nothing" and 0 < len(keys) == len(set(keys)) < 3
        assert built == [(2, 2, number, 2)]  # the kernels of both tiles, each once, by all ranks together
    assert {*first[1], *second[1]} == wanted and not {*first[1]} & {*second[1]}
    recorded = {
        key: {"config": str(worker.TILES), "ms": ms} for keys, ms in ((first[1], 0.12346), (second[1], 1.12346))
        for key in keys
    }  # fmt: skip
    for each in (rank["kernels"] for rank in found):
        assert each["measures"][3] == each["again"][3] == recorded
        assert each["again"][:3] == ("nothing", [], [])


def test_kernels_are_compiled_while_others_are_measured(found: list[dict[str, Any]]) -> None:
    """Ranks stay in lock step: what one of them lacks, both measure later."""
    first, second = (rank["overlapping"] for rank in found)
    assert first["config"] == second["config"] and "pairwise_a chunks=1, GEMMs by cutlass, 1" in first["config"]
    names = [name for name in first["times"] if "pairwise_a chunks=1, GEMMs by cutlass" in name]
    assert len(names) > 1
    # Rank 0 has all kernels, and compiles none.
    (built,) = (each for each in second["order"] if isinstance(each, list))
    measured = [each for each in second["order"] if each is not built]
    assert sorted(built) == sorted(f"kernel of {name}" for name in names)
    for order in (measured, first["order"]):
        (early, _, some), (late, _, others), *finals = order
        assert (early, late) == (False, True) and sorted(others) == sorted(names) and len(finals) == 1
        assert set(some) | set(others) == set(first["times"]) and not set(some) & set(others)
    assert [done for _, done, _ in measured] == [False, True, True]


def test_gemms_that_one_rank_cannot_measure_raise_on_all(found: list[dict[str, Any]]) -> None:
    for each in (rank["kernels"] for rank in found):
        text, _, _, recorded = each["fails"]
        assert text == "RuntimeError: rank 1 cannot measure GEMMs: ValueError: no memory" and not recorded


def test_compile_makes_the_recorded_configuration(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        config, source, executable = each["config"]
        assert (str(config), source, executable) == ("unfused", "recorded", "UnfusedExecutable")
        assert each["equal"] and each["function"]
        assert each["a plan on CPUs"].startswith("ValueError: device is a GPU, got cpu")
        assert each["on CPUs"] == ("unfused", "UnfusedExecutable")
        assert each["tuned on CPUs"].startswith("ValueError: tune=True measures on GPUs")
        assert torch.cuda.is_available() or each["no GPU"].startswith(
            "ValueError: device is a GPU, and torch finds none"
        )
        assert "groups" in each["groups"]
        text, tuned = each["last"]
        assert tuned == config
        assert text == (
            "all_gather_matmul: unfused on 2 ranks, m 16 x n 8 x k 16, float64; gloo, GEMMs by torch, recorded "
            "configuration; not overlapped, because unfused: a collective and one GEMM"
        )


def test_wrong_arguments_of_compile_are_refused(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        first, second, third, *options, last = each["wrong"]
        for text in (first, second, third):
            assert text.startswith("ValueError: pattern and tune are for a problem with schedule='auto', got ")
        assert all(text.startswith("ValueError: schedule='auto' selects provider, config, gemm_") for text in options)
        assert last == "ValueError: pattern is one of ag+gemm, gemm+rs, gemm+ar, gemm+a2a, a2a+gemm, got 'ag'"


def test_the_error_in_a_capture_names_the_call_to_make_before(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        text = each["capturing"]
        assert text.startswith("RuntimeError: schedule='auto' has no executable for ag+gemm 16x8x16x1 float64")
        assert "make this call once before capturing" in text and "distgemm.tune.tune(problem, 'ag+gemm'" in text
