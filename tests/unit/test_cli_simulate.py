"""distgemm simulate: predictions of one plan, of all schedules, and of several numbers of chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm import Plan
from distgemm.cli import simulate as command
from distgemm.cli.options import mesh_text, squarest_meshes
from distgemm.cli.simulate import fewest_chunks, moved_operands, unfused_program
from distgemm.layouts import Axis, Modulo, Offset, TVLayout
from distgemm.plan.ops import Copy
from distgemm.schedulers import registry
from distgemm.simulator import Machine, predict_unfused, simulate
from tests.unit.command import invoke, refusal, succeed
from tests.unit.test_cli import schedule_2d

__all__ = ["schedule_2d"]  # a fixture

H200 = Machine.load("h200")
FC1 = distgemm.GemmProblem(8192, 57344, 8192)


@pytest.mark.parametrize(
    ("arguments", "problem", "keywords", "machine", "gemm_streams"),
    [
        ("gemm+rs --ranks 3", FC1, {"world_size": 3}, H200, None),
        ("gemm+rs --mesh 3 --sync barrier", FC1, {"world_size": 3, "sync": "barrier"}, H200, None),
        ("gemm+rs --ranks 4 --mechanism store", FC1, {"world_size": 4, "mechanism": "store"}, H200, None),
        ("ag+gemm --ranks 4 --mechanism pull", FC1, {"world_size": 4, "mechanism": "pull"}, H200, None),
        (
            "gemm+rs --ranks 2 --m 100 --n 200 --k 300 --l 2 --dtype float16 --out-dtype float32 "
            "--partial-dtype float64 --workspace bounded --option chunks=2",
            distgemm.GemmProblem(100, 200, 300, 2, "float16", "float32", "float64"),
            {"world_size": 2, "workspace": "bounded", "chunks": 2},
            H200,
            None,
        ),
        (
            "ag+gemm --ranks 3 --m-per-rank 300 --m-per-rank 0 --m-per-rank 500",
            distgemm.GemmProblem(800, 57344, 8192, m_per_rank=(300, 0, 500)),
            {"world_size": 3},
            H200,
            None,
        ),
        (
            "tensor_parallel_2d --mesh 2x4 --ranks-per-host 4 --gemm-streams 1",
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
    assert json.loads(succeed("simulate", *arguments.split(), "--json", "-")) == json.loads(
        json.dumps(timeline.to_dict())
    )
    about, *rest, note = succeed("simulate", *arguments.split()).splitlines()
    p = problem
    assert about.startswith(f"m {p.m} x n {p.n} x k {p.k}" + " x l 2" * (p.l > 1) + f", {p.dtype}")
    summary = timeline.summary().splitlines()
    assert rest[: len(summary)] == summary
    assert "unfused" in rest[len(summary)]
    assert note.startswith("predictions of a model, not measurements (distgemm simulate --help): ")


def test_help_has_the_facts_that_notes_refer_to() -> None:
    """Whoever installed the package has no docs/, and --help."""
    text = re.sub(r"\s+", " ", succeed("simulate", "--help"))
    assert "51 measured times" in text and "off by 4 % on average and 13 % at most" in text
    assert "docs/" not in (Path(command.__file__)).read_text()


def test_simulate_reads_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    slow = replace(H200, name="a slow one", nvlink=H200.nvlink._replace(bandwidth=10.0))
    slow.save(path)
    text = succeed("simulate", "ag+gemm", "--ranks", "4", "--machine", str(path))
    timeline = simulate(distgemm.make_plan(FC1, "ag+gemm", 4), slow)
    assert "4 ranks on a slow one" in text and f"time {timeline.time:.1f} us" in text and "bound by copies" in text


TRANSPOSED = distgemm.GemmProblem(57344, 8192, 8192)
GATHER_A, GATHER_B = (FC1, "ag+gemm", "all-gather of A, then"), (TRANSPOSED, "ag+gemm", "all-gather of B, then")
SCATTER, REDUCE = (FC1, "gemm+rs", "then a library's reduce-scatter"), (FC1, "gemm+ar", "then a library's all-reduce")
NESTED_SCATTER = " ".join(f"--option {where}=reduce_scatter_1d_pairwise_a" for where in ("inside", "across"))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("all_gather_1d_tiling_cd_rotating_a --ranks 8", GATHER_A),
        ("all_gather_1d_bidirectional_split_a --ranks 8 --option chunks=2", GATHER_A),
        ("all_gather_1d_tiling_k_rotating_a --ranks 8", GATHER_A),
        ("all_gather_1d_tiling_cd_rotating_b --ranks 8", GATHER_B),
        ("reduce_scatter_1d_pairwise_a --ranks 8 --option chunks=2", SCATTER),
        ("reduce_scatter_1d_tiling_b_rotating_c --ranks 8", SCATTER),
        ("all_reduce_1d_pairwise_a --ranks 8", REDUCE),
        ("all_reduce_1d_tiling_b_rotating_c --ranks 8 --option chunks=2", REDUCE),
        ("tensor_parallel_2d_nested --mesh 2x4", GATHER_A),
        (f"tensor_parallel_2d_nested --mesh 2x4 {NESTED_SCATTER}", SCATTER),
        # Meshes with one long axis gather or reduce over all ranks after all; the name has no say.
        ("tensor_parallel_2d --mesh 1x8", GATHER_A),
        ("tensor_parallel_2d --mesh 8x1", GATHER_B),
        ("tensor_parallel_2d_rs --mesh 1x8", SCATTER),
        ("tensor_parallel_2d --mesh 2x4", "A and B move, and not by one collective over all ranks"),
        ("tensor_parallel_2d_rs --mesh 2x4", "A and D move, and not by one collective over all ranks"),
        ("tensor_parallel_3d --mesh 2x2x2", "A, B and D move, and not by one collective over all ranks"),
        ("gemm+rs --ranks 1", "nothing moves between ranks"),
        ("all_gather_1d_tiling_cd_rotating_a --ranks 8 --mechanism pull", GATHER_A),
        ("reduce_scatter_1d_pairwise_a --ranks 8 --mechanism store", SCATTER),
        ("all_reduce_1d_pairwise_a --ranks 8 --mechanism store", REDUCE),
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
    assert moved_operands(plan) == "AB"
    for rank in range(4):
        ops = [
            replace(op, dst=op.dst._replace(rank=rank)) if isinstance(op, Copy) and op.operand == "B" else op
            for op in plan.ops(rank)
        ]
        plan = plan.replace_ops(rank, ops)
    assert moved_operands(plan) == "A"
    assert unfused_program(plan) is None


def test_the_baseline_of_a_gather_of_b_has_no_shares_of_ranks() -> None:
    problem = distgemm.GemmProblem(64, 100, 64, n_per_rank=(40, 60))
    program = unfused_program(distgemm.make_plan(problem, "all_gather_1d_tiling_cd_rotating_b", 2))
    assert program is not None and program.problem == distgemm.GemmProblem(100, 64, 64)


def test_a_gather_into_copies_has_no_baseline() -> None:
    """Every rank gathers A, but all own the whole of D, or hold the whole of A from the start."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), "ag+gemm", 4)
    program = unfused_program(plan)
    assert program is not None and "all-gather of A" in program.title
    a, b, d = plan.shards
    whole = (((0, 1), (0, 64), (0, 64)),) * 4
    assert unfused_program(replace(plan, shards=(a, b, whole))) is None
    assert unfused_program(replace(plan, shards=(whole, b, d))) is None


def test_fewest_chunks_within_the_tolerance() -> None:
    """More chunks have to be worth it."""
    assert fewest_chunks([(1, 100.0), (2, 90.0), (4, 89.0)]) == 1
    assert fewest_chunks([(1, 100.0), (2, 99.0), (4, 90.0)]) == 2
    assert fewest_chunks([(1, 100.0), (2, 200.0)]) == fewest_chunks([(1, 101.0), (2, 100.0)]) == 0


def test_other_chunks_are_recommended_if_they_save_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    fc2 = ("--ranks", "8", "--n", "8192", "--k", "28672")
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
    monkeypatch.setattr(command, "MAX_OPS_OF_HINT", None)
    assert json.loads(succeed("simulate", "gemm+rs", *fc2, "--json", "-"))["time_us"] == one


def test_other_chunks_are_not_tried_if_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return simulate(*arguments, **keywords)

    monkeypatch.setattr(command, "simulate", counted)
    arguments = ("simulate", "gemm+rs", "--ranks", "8", "--n", "8192", "--k", "28672")
    succeed(*arguments)
    assert len(calls) == 3
    succeed("simulate", "ag+gemm", "--ranks", "8")  # where the GEMM is the limit, no chunks can help
    assert len(calls) == 4
    monkeypatch.setattr(command, "MAX_OPS_OF_HINT", 100)
    every = "--chunks 1 --chunks 2 --chunks 4"
    assert succeed(*arguments).splitlines()[-2].startswith(f"other chunks may be better: {every} compares")
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

    @registry.register_schedule("a_picky_one")
    def picky(mesh: tuple[int, ...], *, chunks: int = 1) -> distgemm.DistributedTileScheduler:
        if chunks == 2:
            raise ValueError("chunks is odd, got 2")
        return gather(mesh, "a_picky_one", chunks)

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
    text = succeed("simulate", "all", "--ranks", "8", "--n", "10240")
    jobs = compared(text)
    rows = schedules_of(jobs)
    wanted = [
        (name, mesh)
        for name in distgemm.list_schedules()
        for mesh in squarest_meshes(8, distgemm.schedulers.schedule_mesh_rank(name))
    ]
    assert sorted((row[0], row[1]) for row in rows) == sorted((name, "x".join(map(str, mesh))) for name, mesh in wanted)
    assert text.splitlines()[0] == f"m 8192 x n 10240 x k 8192, bfloat16: 8 ranks on {H200.name}"
    assert "predictions of a model, not measurements" in text.splitlines()[-1]
    # With so many tokens, one-shot has four times the bytes of others, and takes more chunks to overlap them.
    assert {row[2] for row in rows if row[0] != "all_reduce_1d_one_shot_a"} == {"1", "2"}
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


@pytest.mark.sample(0)
def test_simulate_all_as_json() -> None:
    jobs = compared(succeed("simulate", "all", "--ranks", "8", *SMALL))
    rows = schedules_of(jobs)
    found = json.loads(succeed("simulate", "all", "--ranks", "8", *SMALL, "--json", "-"))
    shown = [[each["schedule"], mesh_text(each["mesh"]), str(each["chunks"])] for each in found]
    assert shown == [row[:3] for row in rows]
    assert [f"{each['time_us']:.0f}" for each in found] == [row[3].rstrip("*") for row in rows]
    assert [each["job"] for each in found] == [job for job, same in jobs.items() for row in same if len(row) == 7]
    assert {each["unfused_us"] for each in found if each["schedule"] == "tensor_parallel_3d"} == {None}
    assert {each["unfused_us"] for each in found if each["schedule"] == "reduce_scatter_1d_pairwise_a"} == {
        predict_unfused(distgemm.GemmProblem(512, 512, 512), H200, "gemm+rs", 8)
    }


@pytest.mark.sample(0)
def test_simulate_all_tries_chunks(schedule_2d: str) -> None:
    name = "reduce_scatter_1d_pairwise_a"

    def tried(*arguments: str, of: str = name) -> list[str]:
        rows = schedules_of(compared(succeed("simulate", "all", *SMALL, *arguments)))
        return [row[2] for row in rows if row[0] == of]

    assert sorted(tried("--ranks", "4", "--every-chunks")) == ["1", "2", "4"]
    assert sorted(tried("--ranks", "4", "--every-chunks", "--chunks", "3", "--chunks", "1")) == ["1", "3"]
    assert tried("--ranks", "4", "--chunks", "3") == tried("--ranks", "4", "--option", "chunks=3") == ["3"]
    for way in (("--chunks", "3"), ("--option", "chunks=3")):
        assert tried("--mesh", "2x2", *way, of=schedule_2d) == ["-"]
    assert "--every-chunks" not in succeed("simulate", "all", *SMALL, "--ranks", "2", "--every-chunks")
    assert "--every-chunks tries and shows all" in succeed("simulate", "all", *SMALL, "--ranks", "2")


def test_more_chunks_are_tried_only_if_they_can_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def watched(plan: Plan, *arguments: Any, **keywords: Any) -> Any:
        tried.append((plan.schedule, max(plan.grid)))
        return simulate(plan, *arguments, **keywords)

    monkeypatch.setattr(command, "simulate", watched)
    arguments = ("simulate", "all", "--ranks", "4", "--n", "11264")
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
    rows = schedules_of(
        compared(succeed("simulate", "gemm+rs", "--ranks", "4", "--chunks", "1", "--chunks", "2", "--chunks", "3"))
    )
    assert sorted(row[:3] for row in rows) == [["gemm+rs", "4", chunks] for chunks in "123"]
    times = {chunks: simulate(distgemm.make_plan(FC1, "gemm+rs", 4, chunks=int(chunks)), H200).time for chunks in "123"}
    assert {row[2]: row[3] for row in rows} == {chunks: f"{time:.0f}" for chunks, time in times.items()}


def test_jobs_differ_by_shards(schedules: None) -> None:
    jobs = compared(succeed("simulate", "all", "--ranks", "4", *SMALL))
    by_name = {row[0]: job for job, rows in jobs.items() for row in rows}
    job = "A m/4, B n/4 -> D n/4"
    assert by_name["all_gather_1d_ring_a"] == by_name["reduce_scatter_that_gathers"] == job
    assert by_name["a_turned_one"] == f"{job}, in another order"
    (alone,) = [rows for title, rows in jobs.items() if title.endswith("order")]
    assert [row[0] for row in alone if len(row) == 7] == ["a_turned_one"]
    # A rank without a row has no part.
    assert "A m/3, B n/4 -> D n/4" in compared(succeed("simulate", "all", "--ranks", "4", *SMALL, "--m", "3"))
    # On one rank everything is whole and all do the same.
    assert list(compared(succeed("simulate", "all", "--mesh", "1", *SMALL))) == ["A whole, B whole -> D whole"]


def test_chunks_that_a_schedule_refuses(schedules: None) -> None:
    text = succeed("simulate", "all", "--ranks", "4", "--every-chunks", *SMALL)
    assert sorted(row[2] for row in schedules_of(compared(text)) if row[0] == "a_picky_one") == ["1", "4"]
    assert [line for line in text.splitlines() if line.startswith("left out")] == [
        "left out: a_picky_one on 4: chunks is odd, got 2"
    ]
    # They are not mentioned to who did not ask for them.
    assert "chunks is odd" not in succeed("simulate", "a_picky_one", "--ranks", "4", *SMALL)
    assert "--chunks" not in succeed("simulate", "reduce_scatter_that_gathers", "--ranks", "4", *SMALL)


def test_simulate_all_says_what_is_left_out() -> None:
    text = succeed("simulate", "all", "--ranks", "3", *SMALL)
    xor = [name for name in distgemm.list_schedules() if "xor" in name]
    names = {row[0] for row in schedules_of(compared(text))}
    assert names == set(distgemm.list_schedules()) - set(xor)
    lines = [line for line in text.splitlines() if line.startswith("left out")]
    for name, line in zip(xor, lines, strict=True):
        assert line.startswith(f"left out: {name} on 3: ") and line.endswith("a power of two, got 3")
    done = invoke("simulate", "all", "--ranks", "3", *SMALL, "--json", "-")
    assert done.stderr.splitlines() == lines and len(json.loads(done.stdout)) == len(schedules_of(compared(text)))


def test_simulate_all_on_a_mesh(schedule_2d: str) -> None:
    rows = schedules_of(compared(succeed("simulate", "all", "--mesh", "2x2", *SMALL)))
    axes = {name: distgemm.schedulers.schedule_mesh_rank(name) for name in distgemm.list_schedules()}
    assert {row[0] for row in rows} == {name for name, count in axes.items() if count == 2}
    assert schedule_2d in axes and {row[1] for row in rows} == {"2x2"}


def test_ranks_out_of_step_have_a_star() -> None:
    """A barrier is not recommended to who has one."""
    for name, sync, advice in (("all", "credit", True), ("all", "barrier", False)):
        text = succeed("simulate", name, "--ranks", "4", "--sync", sync, "--chunks", "1")
        starred = [row[0] for row in schedules_of(compared(text)) if row[3].endswith("*")]
        assert "all_reduce_1d_pairwise_a" in starred and "all_gather_1d_tiling_cd_rotating_a" not in starred
        (line,) = [line for line in text.splitlines() if line.startswith("*: ")]
        assert line.endswith("; try --sync barrier") is advice
        (line,) = [
            line
            for line in succeed("simulate", starred[0], "--ranks", "4", "--sync", sync).splitlines()
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


def test_per_tile_kernels() -> None:
    problem = ("--m", "2048", "--n", "4096", "--k", "4096")
    text = succeed("simulate", "gemm+rs", "--ranks", "8", "--per-tile", "all", *problem)
    assert "predictions of a model, not measurements" in text
    found = json.loads(succeed("simulate", "gemm+rs", "--ranks", "8", "--per-tile", "all", *problem, "--json", "-"))
    times = [row["time"] for row in found]
    assert times == sorted(times) and len(times) == 3
    assert f"{found[0]['kernel']} " in text and f" {times[0]:.1f} " in text
    one = ("simulate", "gemm+rs", "--ranks", "8", "--per-tile", "128x256x64_2x1_cooperative")
    for more, said in (
        (("--dtype", "float64"), "its operands are bfloat16 or float16, got float64"),
        (("--l", "2"), "it takes one matrix, got 2 batches"),
        (("-o", "x.svg"), "-o draws the timeline of a plan"),
        (("--chunks", "2"), "are about plans, and --per-tile"),
        (("--mechanism", "pull"), "are about plans, and --per-tile"),
        (("--sync", "barrier"), "are about plans, and --per-tile"),
        (("--workspace", "bounded"), "are about plans, and --per-tile"),
    ):
        assert said in refusal(*one, *more)
    every = refusal("simulate", "all", "--ranks", "8", "--per-tile", "all")
    assert "--per-tile predicts kernels of one schedule" in every
