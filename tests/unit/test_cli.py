"""The distgemm command: what it prints, and how it fails."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import distgemm
from distgemm import Plan, cli
from distgemm.ops import Gemm
from distgemm.schedulers import registry, schedule_aliases, schedule_doc
from distgemm.show import show_plan, show_schedule
from tests.unit.test_show import mesh_2d

Arguments = tuple[str, ...]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "150"})


def succeed(*arguments: str) -> str:
    done = invoke(*arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def schedule_2d(monkeypatch: pytest.MonkeyPatch) -> str:
    """A schedule on a mesh of two axes, registered for one test."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @registry.register_schedule("a_test_of_2d", mesh_rank=2)
    def build(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
        """A and B move."""
        return mesh_2d(mesh)

    return "a_test_of_2d"


# --- list and show --------------------------------------------------------------------------------------


def test_list(schedule_2d: str) -> None:
    text = succeed("list")
    rows = {line.split()[0]: line for line in text.splitlines()[2:] if not line.startswith(" ")}
    assert list(rows) == distgemm.list_schedules()
    assert rows["all_gather_1d_tiling_cd_rotating_a"].split()[1:4] == ["ag+gemm", "N", "chunks=1"]
    assert rows["reduce_scatter_1d_pairwise_a"].split()[1:3] == ["N", "chunks=1"]
    assert rows[schedule_2d].split()[1:] == ["PxQ", "A", "and", "B", "move."]
    for name in distgemm.list_schedules():
        assert all(f"\n  {alias} " in text for alias in schedule_aliases(name))
        first = schedule_doc(name).split(",")[0].split(";")[0]
        assert first in rows[name]


def test_show() -> None:
    wanted = show_schedule(distgemm.get_schedule("all_gather_1d_ring_a", world_size=3, chunks=2))
    assert succeed("show", "all_gather_1d_ring_a", "--world-size", "3", "--option", "chunks=2") == wanted + "\n"
    assert "16 of 17 ranks" in succeed("show", "gemm+rs", "--world-size", "17")
    assert "17 ranks shown" not in succeed("show", "gemm+rs", "--world-size", "17", "--limit", "17")


def test_show_mesh(schedule_2d: str) -> None:
    assert "6 ranks as 2x3" in succeed("show", schedule_2d, "--mesh", "2x3")
    assert "6 ranks as 3x2" in succeed("show", schedule_2d, "--mesh", "3x2", "--world-size", "6")


# --- plan -----------------------------------------------------------------------------------------------


def test_plan() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8192, 57344, 8192), "gemm+rs", 4)
    assert succeed("plan", "gemm+rs", "--world-size", "4") == show_plan(plan) + "\n"
    assert succeed("plan", "gemm+rs", "--world-size", "4", "--ops") == show_plan(plan, ops=True) + "\n"
    assert succeed("plan", "gemm+rs", "--world-size", "4", "--rank", "0") == show_plan(plan, rank=0) + "\n"


@pytest.mark.parametrize(
    ("arguments", "problem", "keywords"),
    [
        ("--m 10 --n 20 --k 30", {"m": 10, "n": 20, "k": 30}, {}),
        ("--m 10 --n 20 --k 30 --l 2 --dtype float16", {"m": 10, "n": 20, "k": 30, "l": 2, "dtype": "float16"}, {}),
        (
            "--m 9 --n 9 --k 9 --out-dtype float32 --partial-dtype float64",
            {"m": 9, "n": 9, "k": 9, "out_dtype": "float32", "partial_dtype": "float64"},
            {},
        ),
        ("--n 8 --k 8 --m-per-rank 3,0,5", {"m": 8, "n": 8, "k": 8, "m_per_rank": (3, 0, 5)}, {}),
        (
            "--m 8 --n 8 --k 8 --workspace bounded --sync barrier --option chunks=2",
            {"m": 8, "n": 8, "k": 8},
            {"workspace": "bounded", "sync": "barrier", "chunks": 2},
        ),
    ],
)
def test_plan_json(arguments: str, problem: dict[str, Any], keywords: dict[str, Any]) -> None:
    text = succeed("plan", "gemm+rs", "--world-size", "3", *arguments.split(), "--json")
    plan = distgemm.make_plan(distgemm.GemmProblem(**problem), "gemm+rs", 3, **keywords)
    assert Plan.from_json(text) == plan


# --- verify ---------------------------------------------------------------------------------------------


def results(text: str) -> list[tuple[str, ...]]:
    rows = [line.split() for line in text.splitlines()[2:-1]]
    return [(row[0], row[1], row[5].rstrip(":")) for row in rows if re.fullmatch(r"\d[\dx]*", row[1])]


def test_verify_one() -> None:
    text = succeed("verify", "gemm+rs", "--world-size", "1-2", "--world-size", "4,6")
    assert results(text) == [("gemm+rs", size, "proved") for size in ("1", "2", "4", "6")]
    assert text.endswith("4 proved, 0 failed, 0 skipped\n")
    plans = [
        distgemm.make_plan(distgemm.GemmProblem(101, 77, 59), "gemm+rs", 4, workspace=workspace, sync=sync)
        for workspace in ("full", "bounded")
        for sync in ("credit", "barrier")
    ]
    count = sum(len(plan.ops(rank)) for plan in plans for rank in range(4))
    assert re.search(rf"^gemm\+rs +4 +4 +{count} ", text, re.MULTILINE)


def test_verify_all_skips_what_cannot_be() -> None:
    text = succeed("verify", "all", "--world-size", "3", "--workspace", "full", "--sync", "credit")
    found = {name: result for name, _, result in results(text)}
    assert list(found) == distgemm.list_schedules()
    assert {name for name, result in found.items() if result == "skipped"} == {"all_gather_1d_pairwise_xor_a"}
    assert "a power of two, got 3" in re.sub(r"\s+", " ", text)


def test_verify_default_is_one_to_eight() -> None:
    text = succeed("verify", "gemm+rs", "--workspace", "full", "--sync", "credit")
    assert [size for _, size, _ in results(text)] == list("12345678")


def test_verify_meshes(schedule_2d: str) -> None:
    text = succeed("verify", schedule_2d, "--world-size", "1,3,4,6")
    assert [mesh for _, mesh, _ in results(text)] == ["1x1", "1x3", "3x1", "2x2", "2x3", "3x2"]
    assert [mesh for _, mesh, _ in results(succeed("verify", schedule_2d, "--mesh", "1x4"))] == ["1x4"]
    text = succeed("verify", "--mesh", "2x2", "--world-size", "4")
    assert {result for name, _, result in results(text) if name == "gemm+rs"} <= {"skipped"}
    assert (schedule_2d, "2x2", "proved") in results(text)


def test_meshes() -> None:
    assert cli._meshes(8, 1) == [(8,)]
    assert cli._meshes(8, 3) == [(2, 2, 2)]
    assert cli._meshes(12, 3) == [(2, 2, 3), (3, 2, 2)]


def test_verify_reports_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **keywords: Any) -> Plan:
        plan = distgemm.make_plan(*arguments, **keywords)
        if plan.world_size != 2:
            return plan
        return plan.replace_ops(1, [op for op in plan.ops(1) if not isinstance(op, Gemm)])

    monkeypatch.setattr(cli, "make_plan", broken)
    done = invoke("verify", "gemm+rs", "--world-size", "1-3")
    assert done.exit_code == 1
    assert [result for _, _, result in results(done.stdout)] == ["proved", "failed", "proved"]
    assert done.stdout.endswith("2 proved, 1 failed, 0 skipped\n")
    with pytest.raises(distgemm.PlanError) as failure:
        broken(distgemm.GemmProblem(101, 77, 59), "gemm+rs", 2).verify()
    assert str(failure.value) in done.stderr


# --- demo -----------------------------------------------------------------------------------------------


def test_demo_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    module = ModuleType("distgemm.demo")
    module.demo = lambda **keywords: calls.append(keywords)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distgemm.demo", module)
    succeed("demo")
    succeed("demo", "--world-size", "2", "--schedule-ag", "all_gather_1d_ring_a", "--schedule-rs", "x")
    console = calls[0].pop("console")
    assert hasattr(console, "print")
    assert calls[0] == {"world_size": 4, "schedule_ag": "ag+gemm", "schedule_rs": "gemm+rs"}
    calls[1].pop("console")
    assert calls[1] == {"world_size": 2, "schedule_ag": "all_gather_1d_ring_a", "schedule_rs": "x"}


# --- mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show gemm+sr --world-size 2", "unknown schedule 'gemm+sr'"),
        ("show gemm+rs", "needs a world_size or a mesh"),
        ("show gemm+rs --world-size 0", "world_size is an integer >= 1, got 0"),
        ("show gemm+rs --mesh 2y4", "a mesh is given as 2x4, got '2y4'"),
        ("show gemm+rs --mesh 2x4", "takes a mesh of 1 axes, got (2, 4)"),
        ("show gemm+rs --world-size 2 --option chunks", "an option of .*|a schedule's option is given as chunks=2"),
        ("show gemm+rs --world-size 2 --option chunk=2", "has no option 'chunk'"),
        ("show gemm+rs --world-size 2 --option chunks=0", "chunks is an integer >= 1, got 0"),
        ("show all_gather_1d_pairwise_xor_a --world-size 6", "a power of two, got 6"),
        ("plan gemm+rs --world-size 2 --dtype int7", "dtype is one of"),
        ("plan gemm+rs --world-size 2 --m 0", "m is an integer >= 1, got 0"),
        ("plan gemm+rs --world-size 2 --m-per-rank 3,x", "--m-per-rank is given as 4, 1,2,4 or 1-8, got '3,x'"),
        ("plan gemm+rs --world-size 2 --m-per-rank 1,2,3", "has 3 entries for 2 ranks"),
        ("plan gemm+rs --world-size 2 --workspace huge", "workspace is one of full, bounded, got 'huge'"),
        ("plan gemm+rs --world-size 2 --rank 2", "rank 2 is not in 0..1"),
        ("verify nope", "unknown schedule 'nope'"),
        ("verify gemm+rs --world-size 0", "world_size is an integer >= 1, got 0"),
        ("verify gemm+rs --world-size 5-2", "--world-size '5-2' is empty"),
        ("verify gemm+rs --world-size 2 --sync never", "sync is one of credit, barrier, all, got 'never'"),
        ("verify gemm+rs --world-size 3 --mesh 4", "mesh (4,) has 4 ranks, world_size says 3"),
        ("verify all_gather_1d_pairwise_xor_a --world-size 6", "a power of two, got 6"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str) -> None:
    done = invoke(*arguments.split())
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert any(part in line for part in message.split("|"))


def test_unknown_flags_and_commands() -> None:
    for arguments in (["show", "gemm+rs", "--bogus"], ["bogus"]):
        done = invoke(*arguments)
        assert done.exit_code == 2 and "bogus" in done.stderr and "Traceback" not in done.stderr


def test_options_are_read() -> None:
    assert cli._options(["a=1", "b=-2", "c=true", "d=False", "e=x=y", "f="]) == {
        "a": 1,
        "b": -2,
        "c": True,
        "d": False,
        "e": "x=y",
        "f": "",
    }
    assert cli._options(None) == {}


def test_version() -> None:
    assert re.fullmatch(r"distgemm (\d+\.\d+\.\d+|\(not installed\))\n", succeed("--version"))
