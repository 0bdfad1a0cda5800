"""One choice on all ranks, measuring with fakes, and schedule="auto", over gloo. All in one launch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distgemm.runtime.launch import launch
from tests.multiprocess import tune_worker as worker
from tests.once import once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def found(folder: str) -> list[dict[str, Any]]:
    return _results(folder)


CHECKS = (worker.agreement, worker.measuring, worker.kernels, worker.compiled)


@once
def _results(folder: str) -> list[dict[str, Any]]:
    checks: list[Any] = [(check, (folder,)) for check in CHECKS]
    return launch(worker.run_all, 2, checks, timeout=90)


def test_all_ranks_take_what_rank_0_finds(found: list[dict[str, Any]]) -> None:
    for each in (rank["agreement"] for rank in found):
        assert each["different"] == worker.PLAN != worker.OTHER
        assert each["different"].how == "recorded"
        assert each["elsewhere"].how == "predicted"
        assert each["broken elsewhere"] == worker.PLAN


def test_a_broken_file_on_rank_0_raises_everywhere(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["agreement"]["broken on rank 0"]
        assert said.startswith("ValueError") and said.endswith("measure anew with: distgemm tune")


def test_the_fastest_is_taken_and_recorded_by_rank_0_alone(found: list[dict[str, Any]]) -> None:
    name = "reduce_scatter_1d_pairwise_a chunks=1, GEMMs by cutlass, 1 branch"
    for number, each in enumerate(rank["measuring"] for rank in found):
        tuned = each["fastest"]
        assert str(tuned.choice) == name and tuned.choice.how == "measured"
        assert tuned.ms == 1.0 and tuned.unfused_ms == 2.0 and not tuned.refused
        assert each["kept"] == 0  # the workspace keeps nothing of it
        (final,) = each["finals"]
        assert each["said"][-1] == f"measuring {len(final)} candidates"
        assert len(final) == 5 and {name, "unfused"} <= set(final)
        assert each["files"] == (["plans_NVIDIA_Test.json", "plans_NVIDIA_Test.lock"] if number == 0 else [])
        of_choice = tuned.choice.to_dict() | {"ms": 1.0, "unfused_ms": 2.0}
        assert each["written"] == ([of_choice] if number == 0 else [])
        choice, how, times = each["again"]
        assert (choice, how, times) == (tuned.choice, "recorded", 1)


def test_one_kernel_for_all_gemms_is_measured_with_other_tiles(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert each["one kernel"].choice.by_one_kernel and "cooperative" in each["one kernel"].choice.execution.config
        (final,) = each["one kernel finals"]
        assert len({tile for name in final for tile in re.findall(r"cutlass (\d+x\w+)", name)}) == 6
        (final,) = each["far behind"]
        assert not any("waits by gemm" in name for name in final)
        # 1022 rows are in no four equal chunks.
        assert [by_one for _, by_one, _ in each["of m"]] == [True, False, True]
        assert {how for how, _, _ in each["of m"]} == {"recorded"}
        first, without, again = (text for _, _, text in each["of m"])
        assert first == again == str(each["one kernel"].choice)
        assert without == each["otherwise"] and without in each["one kernel"].times


def test_a_plan_must_be_faster_than_the_unfused_program(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert str(each["tie"]) == str(each["slower"]) == str(each["hardly faster"]) == "unfused"
        assert each["clearly faster"].method == "plan"


def test_what_one_rank_cannot_make_is_left_out_on_all(found: list[dict[str, Any]]) -> None:
    choices = [rank["measuring"]["refused by one rank"] for rank in found]
    assert {choice.execution.provider for choice in choices} == {"cutlass"} and len(set(choices)) == 1


def test_what_cannot_be_compiled_is_left_out_and_said(found: list[dict[str, Any]]) -> None:
    for number, each in enumerate(rank["measuring"] for rank in found):
        tuned = each["refused"]
        assert "cublas" not in str(tuned.choice) and all("cublas" not in name for name in tuned.times)
        assert tuned.refused and all("cublas" in name for name in tuned.refused)
        assert set(tuned.refused.values()) == {f"no kernel on rank {number}"}
        assert tuned.path is None and each["not written"] is None
        assert each["nothing"].startswith("RuntimeError: no candidate for ag+gemm 256x128x64x1 bfloat16")


def test_what_fails_is_left_out_and_what_is_wrong_raises(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        tuned = each["fails"]
        assert "cublas" not in str(tuned.choice) and set(tuned.refused.values()) == {"no memory"}
        assert all("cublas" in name for name in tuned.refused) and not set(tuned.refused) & set(tuned.times)
        assert each["all fail"].startswith("RuntimeError: no candidate for ag+gemm 256x128x64x1 bfloat16")
        assert each["wrong"].startswith("WrongResultError: all_gather_1d_tiling_cd_rotating_a chunks=")


def test_ranks_that_measure_otherwise_take_the_same(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert "cutlass" in each["ranks disagree"]


def test_one_measurement_serves_all_m_of_a_bucket(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert each["buckets"] == [
            (100, "measured", [128]),
            (65, "recorded", [128]),
            (128, "recorded", [128]),
            (127, "recorded", [128]),
            (129, "measured", [128, 256]),
            (1, "measured", [128, 256, 64]),
            (2, "recorded", [128, 256, 64]),
            (64, "recorded", [128, 256, 64]),
            (1000, "measured", [128, 256, 64, 1024]),
        ]
        assert each["uneven"] == "recorded"
        p = each["rounded up"]
        assert (p.m, p.n, p.k) == (102, 127, 64)
        assert each["odd"]


def test_nothing_is_measured_where_that_is_off_or_cannot_be(found: list[dict[str, Any]]) -> None:
    for each in (rank["measuring"] for rank in found):
        assert [choice.how for choice in each["off"]] == ["predicted"] * 3
        assert each["off measured"] == 0
        assert each["batches"] == "ValueError: single products are measured, not l = 2 of them"


def test_a_file_that_cannot_be_written_raises_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "plans_NVIDIA_Test" in rank["measuring"]["unwritable"]


def test_auto_goes_on_without_a_file(found: list[dict[str, Any]]) -> None:
    for choice in (rank["measuring"]["unwritable auto"] for rank in found):
        assert choice.how == "measured" and choice.option("chunks") == 2


def test_configurations_of_gemms_are_measured_once_each_on_one_rank(found: list[dict[str, Any]]) -> None:
    """Those of a plan by one kernel are asked for as one product, of all its rows."""
    rows = {512: " streams:2", 256: " streams:2", 1024: ""}
    wanted = {f"{m}x512x1024x1 bfloat16_rr bfloat16{streams}" for m, streams in rows.items()}
    first, second = (rank["kernels"]["measures"] for rank in found)
    for number, (said, asked, built, _) in enumerate((first, second)):
        assert said == "nothing" and 0 < len(asked) == len(set(asked)) < 3
        assert built == [(2, 2, number, 2)]  # together, the kernels of both configurations, each once
    assert {*first[1], *second[1]} == wanted and not {*first[1]} & {*second[1]}
    recorded = {
        key: {"config": str(worker.TILES), "ms": ms} for asked, ms in ((first[1], 0.12346), (second[1], 1.12346))
        for key in asked
    }  # fmt: skip
    for each in (rank["kernels"] for rank in found):
        assert each["measures"][3] == each["again"][3] == recorded
        assert each["again"][:3] == ("nothing", [], [])


def test_gemms_that_one_rank_cannot_measure_raise_on_all(found: list[dict[str, Any]]) -> None:
    for each in (rank["kernels"] for rank in found):
        said, _, _, recorded = each["fails"]
        assert said == "RuntimeError: rank 1 cannot measure GEMMs: ValueError: no memory" and not recorded


def test_compile_makes_what_is_recorded(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        choice, how, kind = each["choice"]
        assert (str(choice), how, kind) == ("unfused", "recorded", "UnfusedExecutable")
        assert each["equal"] and each["op"]
        assert each["a plan on CPUs"].startswith("ValueError: device is a GPU, got cpu")
        said, of_call = each["last"]
        assert of_call == choice
        assert said == (
            "all_gather_matmul: unfused on 2 ranks, m 16 x n 8 x k 16, float64; gloo, GEMMs by torch, recorded "
            "choice; not overlapped, because unfused: a collective, and one product"
        )


def test_what_compile_refuses(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        first, second, third, *chooses, last = each["wrong"]
        for said in (first, second, third):
            assert said.startswith("ValueError: op and tune are for a problem with schedule='auto', got ")
        assert all(said.startswith("ValueError: schedule='auto' chooses provider, config, br") for said in chooses)
        assert last == "ValueError: op is one of ag+gemm, gemm+rs, gemm+ar, got 'ag'"


def test_in_a_capture_the_error_names_the_call_to_make_before(found: list[dict[str, Any]]) -> None:
    for each in (rank["compiled"] for rank in found):
        said = each["capturing"]
        assert said.startswith("RuntimeError: schedule='auto' has no executable for ag+gemm 16x8x16x1 float64")
        assert "make this call once before capturing" in said and "distgemm.tune.tune(problem, 'ag+gemm'" in said
