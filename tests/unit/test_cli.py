"""The distgemm command: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import distgemm
from distgemm import Plan
from distgemm.cli import main as cli
from distgemm.layouts import Axis, Modulo, Offset, TVLayout
from distgemm.plan.ops import Copy, Gemm
from distgemm.plan.options import parse_options
from distgemm.schedulers import registry, schedule_aliases, schedule_doc
from distgemm.simulator import predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.viz.text import show_plan, show_schedule
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
        ("--m 8 --n 8 --k 8 --mechanism pull", {"m": 8, "n": 8, "k": 8}, {"mechanism": "pull"}),
        ("--m 8 --n 8 --k 8 --mechanism store", {"m": 8, "n": 8, "k": 8}, {"mechanism": "store"}),
    ],
)
def test_plan_json(arguments: str, problem: dict[str, Any], keywords: dict[str, Any]) -> None:
    text = succeed("plan", "gemm+rs", "--world-size", "3", *arguments.split(), "--json")
    plan = distgemm.make_plan(distgemm.GemmProblem(**problem), "gemm+rs", 3, **keywords)
    assert Plan.from_json(text) == plan


# --- pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("show gemm+rs --world-size 3", "Each tile has the colour"),
        ("plan gemm+rs --world-size 3 --json", "Plan for 3 ranks"),
        ("simulate gemm+rs --world-size 3 --json", "Predicted on"),
    ],
)
def test_pictures(command: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "a.SVG", tmp_path / "b.png"
    done = invoke(*command.split(), "-o", str(svg), "--output", str(png))
    assert (done.exit_code, done.stderr) == (0, f"wrote {svg}\nwrote {png}\n")
    assert done.stdout == succeed(*command.split())
    assert says in svg.read_text() and png.read_bytes().startswith(b"\x89PNG")


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = invoke("simulate", "gemm+rs", "--world-size", "3", "-o", str(path))
    assert (done.exit_code, done.stderr) == (0, f"wrote {path}\n")
    names = {event["args"].get("name") for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0", "rank 2", "copy", "gemm 0"} <= names


COMMANDS = ("show gemm+rs", "plan gemm+rs", "simulate gemm+rs")


@pytest.mark.parametrize("command", COMMANDS)
def test_outputs_are_checked_first(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("computed before the arguments were checked")

    def refused(path: Path) -> str:
        done = invoke(*command.split(), "--world-size", "2", "-o", str(tmp_path / "good.svg"), "-o", str(path))
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        return line

    monkeypatch.setattr(cli, "make_plan", never)
    monkeypatch.setattr(cli, "get_schedule", never)
    known = ".svg, .png or .json" if "simulate" in command else ".svg or .png"
    for name in ("a.gif", "a", *([] if "simulate" in command else ["a.json"])):
        assert refused(tmp_path / name) == f"error: -o takes a {known} file, got '{tmp_path / name}'"
    assert refused(tmp_path / "none" / "a.svg") == (
        f"error: -o {tmp_path / 'none' / 'a.svg'}: there is no folder {tmp_path / 'none'}"
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = "error: pictures need matplotlib: pip install 'distgemm[pictures]'"
    assert refused(tmp_path / "a.png") == wanted
    assert not list(tmp_path.iterdir())


def test_a_trace_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke("simulate", "gemm+rs", "--world-size", "2", "-o", str(tmp_path / "a.json")).exit_code == 0
    assert (tmp_path / "a.json").stat().st_size


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    done = invoke("simulate", "gemm+rs", "--world-size", "2", "-o", str(tmp_path / "a.json"))
    assert (done.exit_code, done.stderr) == (2, f"error: -o {tmp_path / 'a.json'}: Is a directory\n")


# --- simulate -------------------------------------------------------------------------------------------

H200 = Machine.load("h200")
FC1 = distgemm.GemmProblem(8192, 57344, 8192)


@pytest.mark.parametrize(
    ("arguments", "problem", "keywords", "machine", "gemm_streams"),
    [
        ("gemm+rs --world-size 3", FC1, {"world_size": 3}, H200, None),
        ("gemm+rs --mesh 3 --sync barrier", FC1, {"world_size": 3, "sync": "barrier"}, H200, None),
        ("gemm+rs --world-size 4 --mechanism store", FC1, {"world_size": 4, "mechanism": "store"}, H200, None),
        ("ag+gemm --world-size 4 --mechanism pull", FC1, {"world_size": 4, "mechanism": "pull"}, H200, None),
        (
            "gemm+rs --world-size 2 --m 100 --n 200 --k 300 --l 2 --dtype float16 --out-dtype float32 "
            "--partial-dtype float64 --workspace bounded --option chunks=2",
            distgemm.GemmProblem(100, 200, 300, 2, "float16", "float32", "float64"),
            {"world_size": 2, "workspace": "bounded", "chunks": 2},
            H200,
            None,
        ),
        (
            "ag+gemm --world-size 3 --m-per-rank 300,0,500",
            distgemm.GemmProblem(800, 57344, 8192, m_per_rank=(300, 0, 500)),
            {"world_size": 3},
            H200,
            None,
        ),
        (
            "tensor_parallel_2d --mesh 2x4 --ranks-per-host 4 --gemm_streams 1",
            FC1,
            {"mesh": (2, 4)},
            replace(H200, ranks_per_host=4),
            1,
        ),
    ],
)
def test_simulate(
    arguments: str,
    problem: distgemm.GemmProblem,
    keywords: dict[str, Any],
    machine: Machine,
    gemm_streams: int | None,
) -> None:
    plan = distgemm.make_plan(problem, arguments.split()[0], **keywords)
    timeline = simulate(plan, machine, gemm_streams=gemm_streams)
    assert json.loads(succeed("simulate", *arguments.split(), "--json")) == json.loads(json.dumps(timeline.to_dict()))
    about, *rest, note = succeed("simulate", *arguments.split()).splitlines()
    p = problem
    assert about.startswith(f"m {p.m} x n {p.n} x k {p.k}" + " x l 2" * (p.l > 1) + f", {p.dtype}")
    summary = timeline.summary().splitlines()
    assert rest[: len(summary)] == summary
    assert "unfused" in rest[len(summary)]
    assert note.startswith("predictions of a model, not measurements (distgemm simulate --help): ")


def test_what_the_notes_refer_to_is_there() -> None:
    """Whoever installed the package has no docs/, and --help."""
    text = re.sub(r"\s+", " ", succeed("simulate", "--help"))
    assert "51 measured times" in text and "off by 4 % on average and 13 % at most" in text
    assert "docs/" not in (Path(cli.__file__)).read_text()


def test_simulate_reads_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    slow = replace(H200, name="a slow one", nvlink=H200.nvlink._replace(bandwidth=10.0))
    slow.save(path)
    text = succeed("simulate", "ag+gemm", "--world-size", "4", "--machine", str(path))
    timeline = simulate(distgemm.make_plan(FC1, "ag+gemm", 4), slow)
    assert "4 ranks on a slow one" in text and f"time {timeline.time:.1f} us" in text and "bound by copies" in text


TRANSPOSED = distgemm.GemmProblem(57344, 8192, 8192)
GATHER_A, GATHER_B = (FC1, "ag+gemm", "all-gather of A, then"), (TRANSPOSED, "ag+gemm", "all-gather of B, then")
SCATTER, REDUCE = (FC1, "gemm+rs", "then a library's reduce-scatter"), (FC1, "gemm+ar", "then a library's all-reduce")
NESTED_SCATTER = " ".join(f"--option {where}=reduce_scatter_1d_pairwise_a" for where in ("inside", "across"))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("all_gather_1d_tiling_cd_rotating_a --world-size 8", GATHER_A),
        ("all_gather_1d_bidirectional_split_a --world-size 8 --option chunks=2", GATHER_A),
        ("all_gather_1d_tiling_k_rotating_a --world-size 8", GATHER_A),
        ("all_gather_1d_tiling_cd_rotating_b --world-size 8", GATHER_B),
        ("reduce_scatter_1d_pairwise_a --world-size 8 --option chunks=2", SCATTER),
        ("reduce_scatter_1d_tiling_b_rotating_c --world-size 8", SCATTER),
        ("all_reduce_1d_pairwise_a --world-size 8", REDUCE),
        ("all_reduce_1d_tiling_b_rotating_c --world-size 8 --option chunks=2", REDUCE),
        ("tensor_parallel_2d_nested --mesh 2x4", GATHER_A),
        (f"tensor_parallel_2d_nested --mesh 2x4 {NESTED_SCATTER}", SCATTER),
        # Meshes with one long axis gather or reduce over all ranks after all; the name has no say.
        ("tensor_parallel_2d --mesh 1x8", GATHER_A),
        ("tensor_parallel_2d --mesh 8x1", GATHER_B),
        ("tensor_parallel_2d_rs --mesh 1x8", SCATTER),
        ("tensor_parallel_2d --mesh 2x4", "A and B move, and not by one collective over all ranks"),
        ("tensor_parallel_2d_rs --mesh 2x4", "A and D move, and not by one collective over all ranks"),
        ("tensor_parallel_3d --mesh 2x2x2", "A, B and D move, and not by one collective over all ranks"),
        ("gemm+rs --world-size 1", "nothing moves between ranks"),
        ("all_gather_1d_tiling_cd_rotating_a --world-size 8 --mechanism pull", GATHER_A),
        ("reduce_scatter_1d_pairwise_a --world-size 8 --mechanism store", SCATTER),
        ("all_reduce_1d_pairwise_a --world-size 8 --mechanism store", REDUCE),
        (
            "tensor_parallel_2d_rs --mesh 2x4 --mechanism store",
            "A and D move, and not by one collective over all ranks",
        ),
    ],
)
def test_unfused_baseline(arguments: str, wanted: str | tuple[distgemm.GemmProblem, str, str]) -> None:
    text = succeed("simulate", *arguments.split())
    (line,) = [line for line in text.splitlines() if re.match("unfused|no unfused", line)]
    if isinstance(wanted, str):
        assert line == f"no unfused program to compare with: {wanted}"
        return
    problem, kind, says = wanted
    time = predict_unfused(problem, H200, kind, 8)
    found = re.fullmatch(r"unfused ([\d.]+) us \((.*)\): ([\d.]+) times as long", line)
    assert found and found[1] == f"{time:.1f}" and says in found[2]
    own = re.search(r"^time ([\d.]+) us", text, re.MULTILINE)
    assert own and float(found[3]) == pytest.approx(time / float(own[1]), abs=0.006)


def test_a_gather_over_some_ranks_has_no_baseline() -> None:
    """A 2D plan whose copies of B stay within a rank moves A alone, and not to all."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), "tensor_parallel_2d", mesh=(2, 2))
    assert cli._moved(plan) == "AB"
    for rank in range(4):
        ops = [
            replace(op, dst=op.dst._replace(rank=rank)) if isinstance(op, Copy) and op.operand == "B" else op
            for op in plan.ops(rank)
        ]
        plan = plan.replace_ops(rank, ops)
    assert cli._moved(plan) == "A"
    assert cli._collective(plan) is None


def test_a_gather_into_copies_has_no_baseline() -> None:
    """Every rank gathers A, but all own the whole of D, or hold the whole of A from the start."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), "ag+gemm", 4)
    assert cli._collective(plan) == "ag a"
    a, b, d = plan.shards
    whole = (((0, 1), (0, 64), (0, 64)),) * 4
    assert cli._collective(replace(plan, shards=(a, b, whole))) is None
    assert cli._collective(replace(plan, shards=(whole, b, d))) is None


def test_fewest() -> None:
    """More chunks have to be worth it."""
    assert cli._fewest([(1, 100.0), (2, 90.0), (4, 89.0)]) == 1
    assert cli._fewest([(1, 100.0), (2, 99.0), (4, 90.0)]) == 2
    assert cli._fewest([(1, 100.0), (2, 200.0)]) == cli._fewest([(1, 101.0), (2, 100.0)]) == 0


def test_other_chunks_are_mentioned_where_they_are_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    fc2 = ("--world-size", "8", "--n", "8192", "--k", "28672")
    problem = distgemm.GemmProblem(8192, 8192, 28672)

    def hints(*arguments: str) -> list[str]:
        return [line for line in succeed("simulate", *arguments, *fc2).splitlines() if "--chunks" in line]

    one, two = (simulate(distgemm.make_plan(problem, "gemm+rs", 8, chunks=c), H200).time for c in (1, 2))
    wanted = f"--chunks 2 is predicted to take {100 * (1 - two / one):.0f} % less: {two:.1f} us"
    assert hints("gemm+rs") == hints("gemm+rs", "--chunks", "1") == hints("gemm+rs", "--option", "chunks=1") == [wanted]
    # What was given is not recommended, nor what saves a percent or two, nor anything where the GEMM is the limit.
    assert hints("gemm+rs", "--chunks", "2") == hints("gemm+rs", "--chunks", "4") == hints("ag+gemm") == []
    pairwise = "reduce_scatter_1d_pairwise_a"
    times = [simulate(distgemm.make_plan(problem, pairwise, 8, chunks=c), H200).time for c in (1, 2, 4)]
    assert 0.95 * times[0] < times[1] and times[0] < 0.95 * times[2]
    assert hints(pairwise) == []
    (line,) = hints(pairwise, "--chunks", "4")
    assert line.startswith("--chunks 1 is") and f"{times[0]:.1f} us" in line
    # With --json there is no line, and nothing more is simulated.
    monkeypatch.setattr(cli, "_other_chunks", None)
    assert json.loads(succeed("simulate", "gemm+rs", *fc2, "--json"))["time_us"] == one


def test_other_chunks_are_not_tried_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return simulate(*arguments, **keywords)

    monkeypatch.setattr(cli, "simulate", counted)
    arguments = ("simulate", "gemm+rs", "--world-size", "8", "--n", "8192", "--k", "28672")
    succeed(*arguments)
    assert len(calls) == 3
    succeed("simulate", "ag+gemm", "--world-size", "8")  # where the GEMM is the limit, no chunks can help
    assert len(calls) == 4
    monkeypatch.setattr(cli, "QUICK", 100)
    assert succeed(*arguments).splitlines()[-2].startswith("other chunks may be better: --chunks 1,2,4 compares them")
    assert len(calls) == 5


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules with what those of the package have not, registered for one test."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def gather(mesh: tuple[int, ...], name: str, chunks: int = 1) -> distgemm.DistributedTileScheduler:
        return replace(distgemm.get_schedule("all_gather_1d_ring_a", mesh=mesh, chunks=chunks), name=name)

    @registry.register_schedule("reduce_scatter_that_gathers")
    def lying(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
        return gather(mesh, "reduce_scatter_that_gathers")

    @registry.register_schedule("a_choosy_one")
    def choosy(mesh: tuple[int, ...], *, chunks: int = 1) -> distgemm.DistributedTileScheduler:
        if chunks == 2:
            raise ValueError("chunks is odd, got 2")
        return gather(mesh, "a_choosy_one", chunks)

    @registry.register_schedule("a_turned_one")
    def turned(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
        schedule = gather(mesh, "a_turned_one")
        following = (Axis(mesh[0], rank=1, maps=(Offset(1), Modulo(mesh[0]))),)

        def turn(layout: TVLayout, n: int) -> TVLayout:
            return replace(layout, modes=(*layout.modes[:n], following, *layout.modes[n + 1 :]))

        partition = replace(schedule.partition, b=turn(schedule.partition.b, 0), d=turn(schedule.partition.d, 1))
        return replace(schedule, partition=partition, work=turn(schedule.work, 1))


def compared(text: str) -> dict[str, list[list[str]]]:
    """The rows of a comparison, cell by cell, by their job."""
    jobs: dict[str, list[list[str]]] = {}
    for line in text.splitlines()[3:]:
        cells = re.split(r" {2,}", line.strip())
        if " -> " in line and len(cells) == 1:
            rows = jobs.setdefault(line.strip(), [])
        elif len(cells) in (2, 7):
            rows.append(cells)
    return jobs


def schedules_of(jobs: dict[str, list[list[str]]]) -> list[list[str]]:
    """The rows of schedules, in the order shown."""
    return [row for rows in jobs.values() for row in rows if len(row) == 7]


def test_simulate_all() -> None:
    text = succeed("simulate", "all", "--world-size", "8", "--n", "10240")
    jobs = compared(text)
    rows = schedules_of(jobs)
    wanted = [
        (name, mesh)
        for name in distgemm.list_schedules()
        for mesh in cli._meshes(8, distgemm.schedulers.schedule_mesh_rank(name))
    ]
    assert sorted((row[0], row[1]) for row in rows) == sorted((name, "x".join(map(str, mesh))) for name, mesh in wanted)
    assert text.splitlines()[0] == f"m 8192 x n 10240 x k 8192, bfloat16: 8 ranks on {H200.name}"
    assert "predictions of a model, not measurements" in text.splitlines()[-1]
    assert {row[2] for row in rows} == {"1", "2"}
    for same in jobs.values():
        times = [float((row[3] if len(row) == 7 else row[1]).rstrip("*")) for row in same]
        assert times == sorted(times)
    problem = distgemm.GemmProblem(8192, 10240, 8192)
    for name, kind, job, unfused in (
        ("ag+gemm", "ag+gemm", "A m/8, B n/8 -> D n/8", "a library's all-gather of A, then one GEMM"),
        ("gemm+rs", "gemm+rs", "A k/8, B k/8 -> D m/8", "one GEMM, then a library's reduce-scatter"),
    ):
        lines = [simulate(distgemm.make_plan(problem, name, 8, chunks=chunks), H200) for chunks in (1, 2, 4)]
        least = min(line.time for line in lines)
        at = next(at for at, line in enumerate(lines) if line.time <= 1.02 * least)
        timeline = lines[at]
        assert [
            timeline.plan.schedule,
            "8",
            str((1, 2, 4)[at]),
            f"{timeline.time:.0f}",
            f"{100 * timeline.efficiency:.0f} %",
            f"{100 * timeline.hidden:.0f} %",
            timeline.bound,
        ] in jobs[job]
        assert [f"({unfused})", f"{predict_unfused(problem, H200, kind, 8):.0f}"] in jobs[job]
    assert [job for job, same in jobs.items() if ["tensor_parallel_2d_nested", "2x4"] in [row[:2] for row in same]] == [
        "A m/8, B n/8 -> D n/8"
    ]
    assert [row[:2] for row in jobs["A m/8, B n/8 -> D m/2 n/4"]] == [["tensor_parallel_2d", "2x4"]]
    assert [row[:2] for row in jobs["A m/8, B n/8 -> D m/4 n/2"]] == [["tensor_parallel_2d", "4x2"]]
    assert [row[:2] for row in jobs["A m/2 k/4, B n/4 k/2 -> D m/4 n/2"]] == [["tensor_parallel_3d", "2x2x2"]]
    assert "all_reduce_1d_pairwise_a" in [row[0] for row in jobs["A k/8, B k/8 -> D whole"]]


SMALL = ("--m", "512", "--n", "512", "--k", "512")


def test_simulate_all_as_json() -> None:
    jobs = compared(succeed("simulate", "all", "--world-size", "8", *SMALL))
    rows = schedules_of(jobs)
    found = json.loads(succeed("simulate", "all", "--world-size", "8", *SMALL, "--json"))
    shown = [[each["schedule"], cli._sides(each["mesh"]), str(each["chunks"])] for each in found]
    assert shown == [row[:3] for row in rows]
    assert [f"{each['time_us']:.0f}" for each in found] == [row[3].rstrip("*") for row in rows]
    assert [each["job"] for each in found] == [job for job, same in jobs.items() for row in same if len(row) == 7]
    assert {each["unfused_us"] for each in found if each["schedule"] == "tensor_parallel_3d"} == {None}
    assert {each["unfused_us"] for each in found if each["schedule"] == "reduce_scatter_1d_pairwise_a"} == {
        predict_unfused(distgemm.GemmProblem(512, 512, 512), H200, "gemm+rs", 8)
    }


def test_simulate_all_tries_chunks(schedule_2d: str) -> None:
    name = "reduce_scatter_1d_pairwise_a"

    def tried(*arguments: str, of: str = name) -> list[str]:
        rows = schedules_of(compared(succeed("simulate", "all", *SMALL, *arguments)))
        return [row[2] for row in rows if row[0] == of]

    assert sorted(tried("--world-size", "4", "--every-chunks")) == ["1", "2", "4"]
    assert sorted(tried("--world-size", "4", "--every-chunks", "--chunks", "3,1")) == ["1", "3"]
    assert tried("--world-size", "4", "--chunks", "3") == tried("--world-size", "4", "--option", "chunks=3") == ["3"]
    for way in (("--chunks", "3"), ("--option", "chunks=3")):
        assert tried("--mesh", "2x2", *way, of=schedule_2d) == ["-"]
    assert "--every-chunks" not in succeed("simulate", "all", *SMALL, "--world-size", "2", "--every-chunks")
    assert "--every-chunks tries and shows all" in succeed("simulate", "all", *SMALL, "--world-size", "2")


def test_no_more_chunks_are_tried_than_can_bring_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def watched(plan: Plan, *arguments: Any, **keywords: Any) -> Any:
        tried.append((plan.schedule, max(plan.grid)))
        return simulate(plan, *arguments, **keywords)

    monkeypatch.setattr(cli, "simulate", watched)
    arguments = ("simulate", "all", "--world-size", "4", "--n", "11264")
    rows = schedules_of(compared(succeed(*arguments)))
    gather, pairwise = "all_gather_1d_ring_a", "reduce_scatter_1d_pairwise_a"
    assert next(row for row in rows if row[0] == gather)[4] == "100 %"
    assert [grid for name, grid in tried if name == gather] == [4]
    assert [grid for name, grid in tried if name == pairwise] == [4, 8, 16]
    problem, tiling_k = distgemm.GemmProblem(8192, 11264, 8192), "all_gather_1d_tiling_k_rotating_a"
    one, two = (simulate(distgemm.make_plan(problem, tiling_k, 4, chunks=c), H200) for c in (1, 2))
    assert one.efficiency < 0.98 and two.time > 1.02 * one.time
    assert [grid for name, grid in tried if name == tiling_k] == [4, 8]
    tried.clear()
    succeed(*arguments, "--every-chunks")
    assert [grid for name, grid in tried if name in (gather, tiling_k)] == [4, 8, 16] * 2


def test_one_schedule_with_several_chunks() -> None:
    rows = schedules_of(compared(succeed("simulate", "gemm+rs", "--world-size", "4", "--chunks", "1-3")))
    assert sorted(row[:3] for row in rows) == [["gemm+rs", "4", chunks] for chunks in "123"]
    times = {chunks: simulate(distgemm.make_plan(FC1, "gemm+rs", 4, chunks=int(chunks)), H200).time for chunks in "123"}
    assert {row[2]: row[3] for row in rows} == {chunks: f"{time:.0f}" for chunks, time in times.items()}


def test_jobs_are_told_apart_by_shards(schedules: None) -> None:
    jobs = compared(succeed("simulate", "all", "--world-size", "4", *SMALL))
    by_name = {row[0]: job for job, rows in jobs.items() for row in rows}
    job = "A m/4, B n/4 -> D n/4"
    assert by_name["all_gather_1d_ring_a"] == by_name["reduce_scatter_that_gathers"] == job
    assert by_name["a_turned_one"] == f"{job}, dealt otherwise"
    (alone,) = [rows for title, rows in jobs.items() if title.endswith("otherwise")]
    assert [row[0] for row in alone if len(row) == 7] == ["a_turned_one"]
    # A rank without a row has no part.
    assert "A m/3, B n/4 -> D n/4" in compared(succeed("simulate", "all", "--world-size", "4", *SMALL, "--m", "3"))
    # On one rank everything is whole and all do the same.
    assert list(compared(succeed("simulate", "all", "--mesh", "1", *SMALL))) == ["A whole, B whole -> D whole"]


def test_chunks_that_a_schedule_refuses(schedules: None) -> None:
    text = succeed("simulate", "all", "--world-size", "4", "--every-chunks", *SMALL)
    assert sorted(row[2] for row in schedules_of(compared(text)) if row[0] == "a_choosy_one") == ["1", "4"]
    assert [line for line in text.splitlines() if line.startswith("left out")] == [
        "left out: a_choosy_one on 4: chunks is odd, got 2"
    ]
    # They are not mentioned to who did not ask for them.
    assert "chunks is odd" not in succeed("simulate", "a_choosy_one", "--world-size", "4", *SMALL)
    assert "--chunks" not in succeed("simulate", "reduce_scatter_that_gathers", "--world-size", "4", *SMALL)


def test_simulate_all_says_what_is_left_out() -> None:
    text = succeed("simulate", "all", "--world-size", "3", *SMALL)
    xor = "all_gather_1d_pairwise_xor_a"
    names = {row[0] for row in schedules_of(compared(text))}
    assert names == set(distgemm.list_schedules()) - {xor}
    (line,) = [line for line in text.splitlines() if line.startswith("left out")]
    assert line.startswith(f"left out: {xor} on 3: ") and line.endswith("a power of two, got 3")
    done = invoke("simulate", "all", "--world-size", "3", *SMALL, "--json")
    assert done.stderr == line + "\n" and len(json.loads(done.stdout)) == len(schedules_of(compared(text)))


def test_simulate_all_on_a_mesh(schedule_2d: str) -> None:
    rows = schedules_of(compared(succeed("simulate", "all", "--mesh", "2x2", *SMALL)))
    axes = {name: distgemm.schedulers.schedule_mesh_rank(name) for name in distgemm.list_schedules()}
    assert {row[0] for row in rows} == {name for name, count in axes.items() if count == 2}
    assert schedule_2d in axes and {row[1] for row in rows} == {"2x2"}


def test_ranks_out_of_step_are_told() -> None:
    """A barrier is not recommended to who has one."""
    for name, sync, advice in (("all", "credit", True), ("all", "barrier", False)):
        text = succeed("simulate", name, "--world-size", "4", "--sync", sync, "--chunks", "1")
        starred = [row[0] for row in schedules_of(compared(text)) if row[3].endswith("*")]
        assert "all_reduce_1d_pairwise_a" in starred and "all_gather_1d_tiling_cd_rotating_a" not in starred
        (line,) = [line for line in text.splitlines() if line.startswith("*: ")]
        assert line.endswith("; try --sync barrier") is advice
        (line,) = [
            line
            for line in succeed("simulate", starred[0], "--world-size", "4", "--sync", sync).splitlines()
            if "out of step" in line
        ]
        assert line.endswith('; try sync="barrier"') is advice


def test_progress_goes_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich import progress

    disabled: list[bool] = []
    original: Callable[..., None] = progress.Progress.__init__

    def watched(self: progress.Progress, *arguments: Any, **keywords: Any) -> None:
        disabled.append(keywords["disable"])
        original(self, *arguments, **keywords)

    monkeypatch.setattr(progress.Progress, "__init__", watched)
    succeed("simulate", "all", "--mesh", "2", "--m", "64", "--n", "64", "--k", "64")
    assert disabled == [True]
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = invoke("simulate", "all", "--mesh", "2", "--m", "64", "--n", "64", "--k", "64")
    assert disabled == [True, False] and "simulate" in done.stderr


# --- schedules of one's own -----------------------------------------------------------------------------

OWN = """
from __future__ import annotations

from dataclasses import dataclass, replace

import distgemm


@dataclass
class Fields:  # looks its module up
    chunks: int


@distgemm.register_schedule(aliases=("mine",))
def an_own_one(mesh, *, chunks: int = 1):
    \"\"\"Nothing new.\"\"\"
    return replace(distgemm.get_schedule("ag+gemm", mesh=mesh, chunks=chunks), name="an_own_one")
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder, the current one, from which schedules can be imported for one test."""
    for names in ("_entries", "_other_names", "_patterns"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["own.py", "inner/own.py", "{}/own.py", "own", "inner.own"])
def test_import(given: str, folder: Path) -> None:
    path = folder / ("inner/own.py" if "inner" in given else "own.py")
    path.parent.mkdir(exist_ok=True)
    # A neighbour is found as it is by a program that Python runs, or from where the command is called.
    neighbour = folder / "neighbour.py" if given == "inner.own" else path.with_name("neighbour.py")
    neighbour.write_text("")
    path.write_text(OWN + "import neighbour\n")
    text = succeed("--import", given.format(folder), "show", "mine", "--world-size", "3", "--option", "chunks=2")
    assert text.startswith("an_own_one: 3 ranks, 6 iterations")


def test_an_imported_schedule_is_one_of_all(folder: Path) -> None:
    # Under the name of a module of Python, which stays what it is.
    (folder / "json.py").write_text(OWN)
    (folder / "other.py").write_text(OWN.replace("an_own_one", "another").replace('"mine"', '"yours"'))
    imports = ("--import", "json.py", "--import", "other")
    assert sys.modules["json"] is json
    for command in ("list", "verify all --world-size 2 --sync credit", "simulate all --world-size 2 --m 512"):
        text = invoke(*imports, *command.split()).stdout
        assert {"an_own_one", "another"} <= {line.split()[0] for line in text.splitlines() if line.strip()}, command
        for names in (registry._entries, registry._other_names):
            for name in ("an_own_one", "another", "mine", "yours"):
                names.pop(name, None)  # type: ignore[attr-defined]
        del sys.modules["other"]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("given", "program", "message"),
    [
        ("none.py", "", "--import none.py: there is no such file"),
        ("none", "", "--import none: ModuleNotFoundError: No module named 'none'"),
        ("own.py", "\n\nregister_schedule()", "--import own.py: line 3: NameError: name 'register_schedule' is not"),
        ("own", "\n\nregister_schedule()", "--import own: NameError: name 'register_schedule' is not"),
        ("own.py", "def f(:", "--import own.py: SyntaxError: invalid syntax (own.py, line 1)"),
        ("own.py", "import distgemm", "--import own.py registers no schedule: distgemm.register_schedule is to be"),
        (
            "own.py",
            OWN.replace("an_own_one", "all_gather_1d_ring_a"),
            "--import own.py: line 14: ValueError: schedule 'all_gather_1d_ring_a' is registered already",
        ),
    ],
)
def test_imports_that_fail(given: str, program: str, message: str, folder: Path) -> None:
    (folder / "own.py").write_text(program)
    done = invoke("--import", given, "list")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


# --- verify ---------------------------------------------------------------------------------------------


SYNCS = ("credit", "barrier")


def results(text: str) -> list[tuple[str, ...]]:
    rows = [line.split() for line in text.splitlines()[2:-1]]
    return [(row[0], row[1], row[5].rstrip(":")) for row in rows if re.fullmatch(r"\d[\dx]*", row[1])]


def test_verify_one() -> None:
    text = succeed("verify", "gemm+rs", "--world-size", "1-2", "--world-size", "4,6")
    assert results(text) == [("gemm+rs", size, "proved") for size in ("1", "2", "4", "6")]
    assert text.endswith("4 proved, 0 failed, 0 skipped\n")
    plans = {
        mechanism: [
            distgemm.make_plan(distgemm.GemmProblem(101, 77, 59), "gemm+rs", 4, mechanism=mechanism, **how)
            for how in ({"workspace": one, "sync": other} for one in ("full", "bounded") for other in SYNCS)
        ]
        for mechanism in ("push", "pull", "store")
    }
    counts = {
        mechanism: sum(len(plan.ops(rank)) for plan in of_it for rank in range(4)) for mechanism, of_it in plans.items()
    }
    assert re.search(rf"^gemm\+rs +4 +12 +{sum(counts.values())} ", text, re.MULTILINE)
    for mechanism, count in counts.items():
        text = succeed("verify", "gemm+rs", "--world-size", "4", "--mechanism", mechanism)
        assert re.search(rf"^gemm\+rs +4 +4 +{count} ", text, re.MULTILINE)


def test_verify_all_skips_what_cannot_be() -> None:
    text = succeed("verify", "all", "--world-size", "3", "--workspace", "full", "--sync", "credit")
    found = {name: result for name, _, result in results(text)}
    assert list(found) == distgemm.list_schedules()
    assert {name for name, result in found.items() if result == "skipped"} == {"all_gather_1d_pairwise_xor_a"}
    assert "a power of two, got 3" in re.sub(r"\s+", " ", text)


def test_verify_all_proves_every_mesh() -> None:
    text = succeed("verify", "all", "--world-size", "8,12", "--workspace", "full", "--sync", "credit")
    found = {(name, mesh): result for name, mesh, result in results(text)}
    for name, meshes in (
        ("tensor_parallel_2d", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_2d_rs", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_2d_nested", ("2x4", "4x2", "3x4", "4x3")),
        ("tensor_parallel_3d", ("2x2x2", "2x2x3", "3x2x2")),
        ("all_reduce_1d_pairwise_a", ("8", "12")),
        ("all_reduce_1d_tiling_a_rotating_c", ("8", "12")),
    ):
        assert {mesh: result for (one, mesh), result in found.items() if one == name} == dict.fromkeys(meshes, "proved")


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
    assert "gemm+rs on 2, workspace full, sync credit, mechanism push: " in done.stderr


@pytest.fixture
def broken_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register_schedule("a_test_of_none")(lambda mesh: None)  # type: ignore[arg-type, return-value]
    registry.register_schedule("a_test_of_errors")(lambda mesh: mesh[7])  # type: ignore[arg-type, return-value]


def test_all_goes_on_after_a_builder_that_is_wrong(broken_builders: None) -> None:
    done = invoke("verify", "all", "--world-size", "2", "--workspace", "full", "--sync", "credit")
    assert done.exit_code == 1
    found = {name: result for name, _, result in results(done.stdout)}
    assert {name for name, result in found.items() if result == "failed"} == {"a_test_of_none", "a_test_of_errors"}
    assert found["all_gather_1d_ring_a"] == "proved"
    assert "a_test_of_errors on 2: the builder of schedule 'a_test_of_errors', " in done.stderr
    text = succeed("simulate", "all", "--world-size", "2", "--m", "64", "--n", "64", "--k", "64")
    assert "failed: a_test_of_none on 2: the builder of schedule 'a_test_of_none', " in text
    assert "all_gather_1d_ring_a" in text


# --- demo -----------------------------------------------------------------------------------------------


def test_demo_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    module = ModuleType("distgemm.cli.demo")
    module.demo = lambda **keywords: calls.append(keywords)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distgemm.cli.demo", module)
    succeed("demo")
    succeed(
        "demo", "--world-size", "2", "--schedule-ag", "all_gather_1d_ring_a", "--schedule-rs", "x", "--tokens", "64"
    )
    console = calls[0].pop("console")
    assert hasattr(console, "print")
    assert calls[0] == {"world_size": 4, "schedule_ag": "ag+gemm", "schedule_rs": "gemm+rs", "tokens": 8192}
    calls[1].pop("console")
    assert calls[1] == {"world_size": 2, "schedule_ag": "all_gather_1d_ring_a", "schedule_rs": "x", "tokens": 64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world-size 0", "world_size is an integer >= 1, got 0"),
        ("--schedule-ag nope", "unknown schedule 'nope'"),
        ("--schedule-rs tensor_parallel_2d", "takes a mesh of 2 axes"),
        ("--schedule-ag gemm+rs", "schedule_ag is one that gathers, got reduce_scatter_1d_tiling_a_rotating_c"),
        ("--schedule-rs ag+gemm", "schedule_rs is one that adds over ranks, got all_gather_1d_tiling_cd_rotating_a"),
        ("--tokens 0", "tokens is an integer >= 1, got 0"),
    ],
)
def test_demo_checks_before_it_prints(arguments: str, message: str) -> None:
    done = invoke("demo", *arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


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
        ("plan gemm+rs --world-size 4 --m-per-rank 3,0,5,-1", "--m-per-rank takes no negative numbers, got -1 in '3,0"),
        ("plan gemm+rs --world-size 2 --m-per-rank 1,2,3", "has 3 entries for 2 ranks"),
        ("plan gemm+rs --world-size 2 --workspace huge", "workspace is one of full, bounded, got 'huge'"),
        ("plan gemm+rs --world-size 2 --mechanism carry", "mechanism is one of push, pull, store, got 'carry'"),
        ("plan gemm+rs --world-size 2 --rank 2", "rank 2 is not in 0..1"),
        ("simulate nope --world-size 2", "unknown schedule 'nope'"),
        ("simulate gemm+rs", "needs a world_size or a mesh"),
        ("simulate gemm+rs --world-size 2 --machine h300", "machine 'h300' is none of h200, nor the path of a .json"),
        ("simulate gemm+rs --world-size 2 --machine no/such.json", "machine no/such.json: "),
        ("simulate gemm+rs --world-size 2 --ranks-per-host 0", "ranks_per_host is an integer >= 1, got 0"),
        ("simulate gemm+rs --world-size 2 --mechanism all", "mechanism is one of push, pull, store, got 'all'"),
        ("simulate gemm+rs --world-size 2 --gemm_streams 0", "gemm_streams is an integer >= 1, got 0"),
        ("simulate gemm+rs --world-size 2 --m-per-rank 1,2,3", "has 3 entries for 2 ranks"),
        ("simulate all", "simulate all needs a world_size or a mesh"),
        ("simulate all --world-size 0", "world_size is an integer >= 1, got 0"),
        ("simulate all --world-size 2 --mesh 2x2", "mesh (2, 2) has 4 ranks, world_size says 2"),
        ("simulate all --mesh 1x1x1x2", "no schedule takes a mesh of 4 axes, got (1, 1, 1, 2)"),
        ("simulate all --world-size 2 --option chunks=0", "chunks is an integer >= 1, got 0"),
        ("simulate all --world-size 2 --chunks 1,0", "chunks is an integer >= 1, got 0"),
        ("simulate gemm+rs --world-size 2 --chunks 0", "chunks is an integer >= 1, got 0"),
        ("simulate gemm+rs --world-size 2 --chunks x", "--chunks is given as 4, 1,2,4 or 1-8, got 'x'"),
        ("simulate gemm+rs --world-size 2 --chunks 2 --option chunks=2", "by --chunks or by --option chunks=, not"),
        ("simulate gemm+rs --world-size 2 --every-chunks", "for one schedule, --chunks 1,2,4 shows each"),
        ("simulate gemm+rs --chunks 1,2", "simulate gemm+rs needs a world_size or a mesh"),
        ("simulate all --world-size 2 -o a.svg", "-o draws the timeline of one plan, not of several"),
        ("simulate gemm+rs --world-size 2 --chunks 1,2 -o a.svg", "-o draws the timeline of one plan, not of several"),
        ("trace nope", "unknown schedule 'nope'"),
        ("trace ag+gemm --chunks 0", "chunks is an integer >= 1, got 0"),
        ("trace ag+gemm --mechanism carry", "mechanism is one of push, pull, store, got 'carry'"),
        ("trace ag+gemm", "trace runs on GPUs, and there is none here"),
        ("bench --model nope", "nope"),
        ("bench --m x", "--m takes numbers of tokens, got 'x'"),
        ("bench --json no/such/file.json", "there is no folder no/such"),
        ("bench", "bench measures on GPUs, and torch finds none; --from FILE shows"),
        ("tune --model nope", "nope"),
        ("tune --json no/such/file.json", "there is no folder no/such"),
        ("tune", "tune measures on GPUs, and torch finds none"),
        ("verify nope", "unknown schedule 'nope'"),
        ("verify gemm+rs --world-size 0", "world_size is an integer >= 1, got 0"),
        ("verify gemm+rs --world-size 5-2", "--world-size '5-2' is empty"),
        ("verify gemm+rs --world-size 2 --sync never", "sync is one of credit, barrier, all, got 'never'"),
        ("verify gemm+rs --mechanism carry", "mechanism is one of push, pull, store, all, got 'carry'"),
        ("verify gemm+rs --world-size 3 --mesh 4", "mesh (4,) has 4 ranks, world_size says 3"),
        ("verify all_gather_1d_pairwise_xor_a --world-size 6", "a power of two, got 6"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
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
    assert parse_options(["a=1", "b=-2", "c=true", "d=False", "e=x=y", "f="]) == {
        "a": 1,
        "b": -2,
        "c": True,
        "d": False,
        "e": "x=y",
        "f": "",
    }
    assert parse_options(None) == {}


def test_version() -> None:
    assert re.fullmatch(r"distgemm (\d+\.\d+\.\d+|\(not installed\))\n", succeed("--version"))
