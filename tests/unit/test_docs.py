"""The pages of the site that come from code are made, and the programs in them run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import distgemm
from distgemm.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a source archive has no docs/")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py, which needs no mkdocs outside of its hooks."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(program: str, *arguments: str, folder: Path | None = None) -> str:
    """What a program prints, in a process of its own; as a file of this folder, with arguments of Python before it."""
    command = [sys.executable, "-W", "error", "-c", program]
    if folder is not None:
        (folder / "program.py").write_text(program)
        command = [sys.executable, *arguments, "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def test_every_schedule_has_a_page(generate: ModuleType):
    listed = [name for names in generate.by_kind().values() for name in names]
    assert sorted(listed) == distgemm.list_schedules()
    index = generate.schedule_index()
    for name in distgemm.list_schedules():
        page = generate.schedule_page(name)
        assert f"({name}.md)" in index
        assert f"# {name}\n" in page
        assert f"({name}.svg)" in page
        assert re.search(r"^- .*\*\*.*[ABE]/.*\*\* bytes to ", page, re.M), "bytes on links"
        assert re.search(r"workspace of \*\*.*\*\* bytes", page)
        assert "work (m, n, k): rows are ranks, columns iterations" in page


def test_formulas_of_a_page_are_put_together(generate: ModuleType):
    page = generate.schedule_page("all_gather_1d_bidirectional_full_a")
    page = page.replace("\N{MINUS SIGN}", "-")
    assert "- **⌊N/2⌋·A/N** bytes to the next rank, **⌊(N-1)/2⌋·A/N** bytes to the rank before" in page
    assert "a workspace of **(N-1)·c·⌈A/(N·c)⌉** bytes." in page


def test_pictures_are_drawn(generate: ModuleType):
    assert b"<svg" in generate.schedule_picture("tensor_parallel_3d")[:1000]
    assert b"<svg" in generate.timeline_picture("fc2")[:1000]


def test_your_own_schedule_plans_verifies_shows_and_runs(generate: ModuleType):
    program = generate.own_schedule_program()
    assert len([line for line in program.splitlines() if line.strip()]) <= 36
    printed = run(program)
    assert printed.startswith("all_gather_1d_ring_b: 4 ranks, 4 iterations")
    assert "routes: A stays; B ring; D stays" in printed
    # 48 x 32 of B in bfloat16: three shards of four to the next rank.
    assert printed.endswith(f"{dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 0)], 2304)}\n")
    assert "all_gather_1d_ring_b" not in distgemm.list_schedules()
    assert printed in generate.fill((DOCS / "own_schedule.md").read_text())


def test_your_own_schedule_is_known_to_the_commands(generate: ModuleType):
    text = generate.own_schedule_commands()
    # The command says what follows it: the imported program prints nothing of its own.
    for command, start in zip(generate.OWN_COMMANDS, ("schedule ", "m 57344 "), strict=True):
        assert f"$ distgemm --import {generate.OWN_FILE} {command}\n{start}" in text
    assert "3 proved, 0 failed, 0 skipped" in text
    assert "all_gather_1d_ring_b: 8 ranks on " in text
    page = (DOCS / "own_schedule.md").read_text()
    assert f"save it as `{generate.OWN_FILE}`" in page
    assert f"`python {generate.OWN_FILE}` prints" in page
    with pytest.raises(RuntimeError, match=r"own_schedule\.md fails"):
        generate.own_schedule_run("-m", "distgemm", "--import", generate.OWN_FILE, "show", "none")


def test_your_own_schedule_with_chunks(generate: ModuleType):
    whole, chunked = programs("own_schedule.md")
    imports = whole.split("\n\n\n")[0]
    program = (
        f"{imports}\nfrom distgemm.schedulers import TileCoord\n{chunked}\n"
        "for chunks in (1, 3):\n"
        "    schedule = distgemm.get_schedule('all_gather_1d_ring_b', 4, chunks=chunks)\n"
        "    plan = distgemm.make_plan(distgemm.GemmProblem(m=64, n=50, k=32), schedule)\n"
        "    plan.verify()\n"
        "    print(schedule.iterations, [plan.shard_shape('B', rank)[0] for rank in range(4)])\n"
        "    print([schedule.work_tile(i, 1)[1] for i in range(schedule.iterations)])\n"
    )
    shards = [13, 13, 13, 11]  # do not depend on the chunks
    every = [3 * shard + chunk for shard in (1, 0, 3, 2) for chunk in range(3)]
    assert run(program) == f"4 {shards}\n[1, 0, 3, 2]\n12 {shards}\n{every}\n"


def test_the_program_for_several_processes_runs(tmp_path: Path):
    """By itself, and under torchrun."""
    (program,) = programs("collective.md")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    for arguments, ranks in (((), 4), (torchrun, 3)):
        errors = [float(each) for each in re.findall(r"\d\.?\d*(?:e-\d+)?", run(program, *arguments, folder=tmp_path))]
        assert len(errors) == ranks
        assert max(errors) < 1e-3


def test_as_said_there_any_order_is_right(generate: ModuleType):
    program = generate.own_schedule_program()
    assert "value=-1" in program
    assert "B ring" in run(program.replace("value=-1", "value=1"))
    assert "B direct" in run(program.replace(", Route(b=Ring())", ""))


def test_the_programs_of_the_guide_run():
    for page in ("index.md", "which_schedule.md"):
        (program,) = programs(page)
        printed = run(program).splitlines()
        said = re.findall(r"print\(.*\)  # (\w+(?:\([^)]*\))?)", program)
        assert [line for line in printed if line in said] == said
    assert len(programs("index.md")[0].splitlines()) <= 25


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    commands = [
        line.split()[1:]
        for page in ("which_schedule.md", "simulator.md")
        for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.S)
        for line in block.splitlines()
        if not line.startswith("#")
    ]
    assert len(commands) == 6
    for command in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.stderr)
        for file in (after for option, after in pairwise(command) if option == "-o"):
            assert (tmp_path / file).stat().st_size
        # What is recommended needs no other chunks.
        assert "--chunks" not in done.stdout.replace("--every-chunks", "")


def test_marked_places_are_known(generate: ModuleType):
    used = {name for page in DOCS.glob("*.md") for name in generate.MARK.findall(page.read_text())}
    assert used == set(generate.MARKS)


def test_tables_of_measurements(generate: ModuleType):
    for kind in ("planning", "planning cubes", "mutation score", "comparison", "against measurement"):
        assert len(generate.MARKS[kind]()) > 100, kind
    for kind, names in (("measured fc1", [generate.GATHER]), ("measured fc2", [generate.RING, generate.PAIRWISE])):
        rows = [[cell.strip() for cell in line.split("|")] for line in generate.MARKS[kind]().splitlines()[2:]]
        found = {how: link for _, _, _, how, link, _, _ in rows}
        assert {link for how, link in found.items() if "NCCL" in how} == {"none"}
        assert {link for how, link in found.items() if "NCCL" not in how} == {f"[{n}](schedules/{n}.md)" for n in names}
    # One prediction; the site makes all.
    table = generate.MARKS["fc2 70B small"]()
    assert table.startswith("Predicted, fc2 of Llama 70B, 2048 tokens (m 2048, n 8192, k 28672)")
    assert all(f"[{name}]" in table for name in distgemm.list_schedules() if name.startswith("reduce_scatter"))


def test_the_crossover_is_where_the_table_turns(generate: ModuleType):
    """From there on the ring is ahead, before it one sum at the end."""
    table = generate.MARKS["fc2 70B tokens"]()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0]) for row in rows] == list(generate.TOKENS)
    ahead = []
    for row in rows:
        times = [float(re.sub(r"\*|\(.*", "", cell)) for cell in row[1:4]]
        assert [time for time, cell in zip(times, row[1:4], strict=True) if "**" in cell] == [min(times)]
        ahead.append(times[0] < times[1])
    crossover = generate.MARKS["crossover 70B"]()
    assert ahead == [int(row[0]) >= int(crossover) for row in rows]
    assert len(set(ahead)) == 2
    # The guide has the number from there.
    summary, _ = (DOCS / "which_schedule.md").read_text().split("```python")
    assert "| fc2 (down), from about <!-- generated: crossover 70B --> tokens on |" in summary
    assert f"| fc2 (down), from about {crossover} tokens on |" in generate.fill(summary)


def reference(file: str) -> tuple[list[dict[str, float]], str]:
    """By row, from the file of a benchmark: peers' times over auto's, and its shares of the roofs. And the day."""
    found = json.loads((DOCS.parent / "benchmarks" / "results" / file).read_text())
    rows = []
    for row in found["rows"]:
        took = {method["name"]: method["ms"] for method in row["methods"]}
        auto = took["distgemm auto"]
        roof, other = sorted(
            (min(took["cuBLAS alone"], took["CUTLASS alone"]), took["copies alone"]),
            reverse=True,
        )
        rows.append(
            {
                "NCCL + cuBLAS": took["NCCL + cuBLAS"] / auto,
                "torch": min(ms for name, ms in took.items() if name.startswith("torch") and ms) / auto,
                "quack": min((ms for name, ms in took.items() if name.startswith("quack") and ms), default=0) / auto,
                "efficiency": roof / auto,
                "pipeline": (roof + other / row["ranks"]) / auto,
            }
        )
    return rows, found["date"][:10]


def mean(figures: list[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))


def cells(table: str) -> list[list[str]]:
    """The rows of a table below its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_summary_of_the_measurements_is_what_the_files_say(generate: ModuleType):
    short, targets = cells(generate.MARKS["in short"]()), cells(generate.MARKS["targets"]())
    assert [row[0] for row in short] == [row[0] for row in targets] == list(generate.RUNS)
    for file, row, target in zip(generate.RUNS.values(), short, targets, strict=True):
        wanted, day = reference(file)
        assert row[1] == str(len(wanted))
        for peer, cell in zip(("NCCL + cuBLAS", "torch", "quack"), row[2:5], strict=True):
            ratios = [each[peer] for each in wanted if each[peer]]
            assert cell == (f"**{mean(ratios):.2f}**, {min(ratios):.3f}" if ratios else "not run")
            named = re.search(rf"{re.escape(peer)}: ([^.]*)", target[4])
            assert sum(ratio <= 1 for ratio in ratios) == len(re.findall(r"\d{3,5}\b(?!b)", named[1]) if named else [])
        shares = [each["efficiency"] for each in wanted]
        assert row[5:] == [f"{mean(shares):.3f}", f"{mean([each['pipeline'] for each in wanted]):.3f}", day]
        assert target[1] == ("yes" if mean(shares) >= 0.92 else "no") + f", {mean(shares):.3f}"
        reached = sum(each["efficiency"] >= 0.85 or each["pipeline"] >= 0.95 for each in wanted)
        assert target[2] == f"{reached} of {len(wanted)}"
        assert len(re.findall(r"\d{3,5}\b(?!b)", target[3])) == len(wanted) - reached


def test_the_outcome_above_each_benchmark_is_what_the_file_says(generate: ModuleType):
    for mark, file in (("benchmark two", "bench_2xh200.json"), ("benchmark small", "bench_small_4xh200.json")):
        wanted, _ = reference(file)
        said = generate.MARKS[mark]()
        for peer in ("NCCL + cuBLAS", "torch", "quack"):
            ratios = [each[peer] for each in wanted if each[peer]]
            if not ratios:
                assert f"Faster than {peer}" not in said
                continue
            ahead = sum(ratio > 1 for ratio in ratios)
            line = (
                f"- Faster than {peer} in {ahead} of {len(ratios)} rows: {mean(ratios):.2f} times in the geometric mean"
            )
            assert f"{line}, from {min(ratios):.3f} (" in said
        assert len(cells(said)) == len(wanted)
    # The readme has some of it.
    readme = re.sub(r"\s+", " ", (DOCS.parent / "README.md").read_text())
    nccl, torch, reduced, older = (
        f"{mean([each[peer] for each in reference(file)[0]]):.2f}"
        for file, peer in (
            ("bench_2xh200.json", "NCCL + cuBLAS"),
            ("bench_2xh200.json", "torch"),
            ("bench_all_reduce_2xh200.json", "NCCL + cuBLAS"),
            ("bench_4xh200.json", "NCCL + cuBLAS"),
        )
    )
    assert f"{nccl} times as fast as NCCL + cuBLAS and {torch} times as torch's fused ops on 2 H200s" in readme
    assert f"all-reduces there are {reduced} times as fast as cuBLAS + NCCL. On 4 H200s it is {older} and " in readme


def test_one_of_many_and_the_other_tables_are_what_the_files_say(generate: ModuleType):
    results = DOCS.parent / "benchmarks" / "results"
    rows = json.loads((results / "one_of_many_2xh200.json").read_text())["rows"]
    found = {
        (f"{row['case']['model'][8:]} {row['case']['layer']}", row["case"]["ranks"]): f"{row['ms']:.4f}"
        for row in rows
        if row["case"]["m"] == 2048 and row["case"]["op"] != "gemm+ar"
    }
    table = cells(generate.MARKS["one of many"]())
    assert {(row[0].removesuffix(" rs"), ranks): row[at] for row in table for ranks, at in ((4, 1), (8, 4))} == found
    # Two candidates by hand, of those that are compared with 4 GPUs.
    said = generate.MARKS["one of many beside four"]()
    assert re.match(
        r"\d{3} candidates, 0\.99\d in the geometric mean, eight of ten between 0\.9\d\d and 1\.0\d\d", said
    )
    four = json.loads((results / "tune_reductions_2048_4xh200.json").read_text())["layers"]
    (there,) = (each["ms"] for each in four if each["layer"] == "8b out")
    (here,) = (row["times"] for row in rows if row["case"] == rows[0]["case"])
    tiles = "GEMMs by cutlass 128x128x64_2x1_pingpong, 1 branch, waits by gemm"
    ratio = (
        here[f"reduce_scatter_1d_tiling_a_rotating_c chunks=4 mechanism=store, {tiles}"]
        / there[f"reduce_scatter_1d_tiling_a_rotating_c mechanism=store chunks=4, {tiles}"]
    )
    assert said.endswith(f" and {ratio:.3f}"), "the row that is farthest off"
    layer = json.loads((results / "layer_4xh200.json").read_text())
    assert {row[0]: float(row[1]) for row in cells(generate.MARKS["layer"]())} == {
        name: round(ms, 3) for name, ms in layer["layer_ms"].items()
    }
    gemms = json.loads((results / "gemm_h200.json").read_text())["rows"]
    ratios = [row["ms"]["cublas"] / row["ms"]["cutlass"] for row in gemms]
    assert f"{mean(ratios):.3f} of cuBLAS's rate" in generate.MARKS["gemms outcome"]()
    assert len(cells(generate.MARKS["gemms"]())) == len(gemms)
    host = json.loads((results / "host_time_2xh200.json").read_text())["rows"]
    assert [row[1] for row in cells(generate.MARKS["host time"]())] == [f"{row['us']['call']:.0f}" for row in host]


def test_the_measurements_name_files_that_exist():
    results = {path.name for path in (DOCS.parent / "benchmarks" / "results").iterdir()}
    text = (DOCS / "measurements.md").read_text()
    assert set(re.findall(r"\b\w+_(?:\dx)?h200\.(?:json|txt)", text)) <= results


def test_every_measured_file_is_named():
    """By the measurements, or by what reads it. What a command printed lies beside what it wrote."""
    results = {path.name for path in (DOCS.parent / "benchmarks" / "results").iterdir()}
    pages = "".join(path.read_text() for path in [*DOCS.glob("*.md"), DOCS / "generate.py"])
    programs = (DOCS.parent / "benchmarks" / "simulator_vs_measured.py").read_text()
    read = {f"bench_schedules_{ranks}xh200.json" for ranks in (2, 4) if "bench_schedules_{ranks}xh200.json" in programs}
    assert {
        name for name in results - read if name not in pages and name.replace(".txt", ".json") not in pages
    } == set()
