"""What is generated in the pages is up to date, and the programs and commands in them run."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import distgemm
from distgemm.cli.main import app
from distgemm.plan.ops import Copy, Gemm
from distgemm.simulator import Machine, predict_unfused, simulate

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a source archive has no docs/")


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """docs/tables.py."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("tables")
    finally:
        sys.path.remove(str(DOCS))


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


PREDICTED = ("fp8.md", "sequence_parallelism.md", "which_schedule.md")
"""Pages with hundreds of predictions, which take 14 s. `make docs` checks them, too."""


@pytest.mark.parametrize("predicted", [False, pytest.param(True, marks=pytest.mark.sample(0))])
def test_no_generated_block_is_stale(predicted: bool, tables: ModuleType) -> None:
    pages = [page for page in tables.PAGES if (page.name in PREDICTED) == predicted]
    stale = [f"{path.relative_to(DOCS.parent)}: {what}" for path, _, what in tables.changes(pages)]
    assert not stale, "run `python docs/tables.py` and commit what it writes"


def test_a_stale_block_is_named_and_filled(tables: ModuleType) -> None:
    page = "about <!-- begin generated: crossover 70B -->17<!-- end generated --> tokens"
    text, stale = tables.fill(page)
    assert stale == ["crossover 70B"]
    assert re.fullmatch(r"about <!-- .* -->\d{4}<!-- end generated --> tokens", text)
    assert tables.fill(text) == (text, [])
    with pytest.raises(ValueError, match="there is no table 'nonsense'; docs/blocks has ratio, "):
        tables.fill("<!-- begin generated: nonsense --><!-- end generated -->")


def test_check_writes_nothing(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = DOCS / "formulas.md"
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    monkeypatch.setattr(tables, "changes", lambda: iter([(path, "new", "routes")]))
    before = path.read_text()
    assert tables.main() == 1
    assert path.read_text() == before
    assert capsys.readouterr().out == "stale: docs/formulas.md: routes\n"
    monkeypatch.setattr(tables, "changes", lambda: iter([]))
    assert tables.main() == 0


def test_every_begin_of_a_block_has_its_end() -> None:
    for path in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        marks = re.findall(r"<!-- (begin|end) generated", path.read_text())
        assert marks == ["begin", "end"] * (len(marks) // 2), path
        # On a code host nothing of a line that begins with a comment is Markdown.
        assert not re.search(r"^ *<!-- begin generated: [^>]+ -->\S", path.read_text(), re.M), path


def test_every_schedule_has_a_page() -> None:
    pages = {path.stem for path in (DOCS / "schedules").glob("*.md")}
    assert pages == {"index", *distgemm.list_schedules()}
    index, site = (DOCS / "schedules" / "index.md").read_text(), (DOCS.parent / "mkdocs.yml").read_text()
    for name in distgemm.list_schedules():
        page = (DOCS / "schedules" / f"{name}.md").read_text()
        assert f"({name}.md)" in index
        assert f"schedules/{name}.md" in site
        assert f"# {name}\n" in page
        assert f"<!-- picture: {name}.svg " in page
        assert re.search(r"^- .*\*\*.*[ABE].*\*\* bytes to ", page, re.M), "bytes on links"
        assert re.search(r"workspace takes \*\*.*\*\* bytes", page)
        assert "work (m, n, k): rows are ranks, columns iterations" in page


def test_the_page_of_a_schedule_has_its_formulas() -> None:
    page = (DOCS / "schedules" / "all_gather_1d_bidirectional_full_a.md").read_text().replace("\N{MINUS SIGN}", "-")
    assert "- **⌊N/2⌋·A/N** bytes to the next rank, **⌊(N-1)/2⌋·A/N** bytes to the previous rank" in page
    assert "Its workspace takes **(N-1)·c·⌈A/(N·c)⌉** bytes." in page


def test_arguments_of_a_docstring_become_a_list(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        """First line, 2 * N.

        More of it.

        Args:
            chunks: how many
                there are.
            depth: by how many.

        Raises:
            ValueError: if not.
        """

    monkeypatch.setattr(tables.schedules.one_d, "all_gather_1d_ring_a", build)
    assert tables.schedules.docstring("all_gather_1d_ring_a") == (
        "First line, 2 · N.\n\nMore of it.\n\n- `chunks`: how many there are.\n- `depth`: by how many."
    )


def test_every_picture_of_a_page_is_drawn(tables: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    hook = importlib.import_module("pictures")
    drawn = hook.pictures()
    used = {
        str(path.relative_to(DOCS).parent / name)
        for path in [*DOCS.glob("*.md"), *(DOCS / "schedules").glob("*.md")]
        for name, _ in hook.PICTURE.findall(path.read_text())
    }
    assert used == set(drawn)
    for place in ("schedules/tensor_parallel_3d.svg", "fc2.svg"):
        drawn[place](tmp_path / "picture.svg")
        assert b"<svg" in (tmp_path / "picture.svg").read_bytes()[:1000]
    shown = hook.on_page_markdown("<!-- picture: a.svg What it shows -->", page=None, config=None, files=None)
    assert shown == "[![What it shows](a.svg)](a.svg)"


def test_your_own_schedule_plans_verifies_shows_and_runs() -> None:
    program = programs("own_schedule.md")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 36
    printed = run(program)
    assert printed.startswith("all_gather_1d_ring_b: 4 ranks, 4 iterations")
    assert "routes: A stays; B ring; D stays" in printed
    # 48 x 32 of B in bfloat16: three shards of four to the next rank.
    assert printed.endswith(f"{dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 0)], 2304)}\n")
    assert "all_gather_1d_ring_b" not in distgemm.list_schedules()
    assert printed in (DOCS / "own_schedule.md").read_text()


def test_your_own_schedule_is_known_to_the_commands(tables: ModuleType) -> None:
    page = (DOCS / "own_schedule.md").read_text()
    assert "3 proved, 0 failed, 0 skipped" in page
    assert "all_gather_1d_ring_b: 8 ranks on " in page
    file = tables.own_schedule.OWN_FILE
    assert f"save it as `{file}`" in page
    assert f"`python {file}` prints" in page
    with pytest.raises(RuntimeError, match=r"own_schedule\.md fails"):
        tables.own_schedule.run_beside_own_program("-m", "distgemm", "--import", file, "show", "none")


def test_your_own_schedule_with_chunks():
    whole, _, chunked = programs("own_schedule.md")
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


def test_your_own_map_pairs_the_ranks() -> None:
    _, program, _ = programs("own_schedule.md")
    printed = run(program)
    assert printed == "[1, 0, 3, 2]\n" and f"# {printed}" in program


def test_the_blocks_of_your_own_routes_and_candidates_run() -> None:
    blocks = re.findall(r"```py\n(.*?)```", (DOCS / "own_schedule.md").read_text(), re.S)
    assert len(blocks) == 2
    check = """
from distgemm.schedulers import Direct, GatherRoute, Pairwise, ReduceRoute
from inspect import signature
for mine, others in ((MyGather, (GatherRoute, Direct)), (MyReduce, (ReduceRoute, Pairwise))):
    assert all(list(signature(mine.hops).parameters) == list(signature(each.hops).parameters) for each in others)
print([each.schedule for each in distgemm.tune.list_candidates("ag+gemm")][-1])
"""
    assert run("\n".join([programs("own_schedule.md")[0], *blocks, check])).endswith("all_gather_1d_ring_b\n")


@pytest.mark.sample(0)
def test_the_program_for_several_processes_runs(tmp_path: Path):
    """By itself, and under torchrun."""
    (program,) = programs("collective.md")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    for arguments, ranks in (((), 4), (torchrun, 3)):
        errors = [float(each) for each in re.findall(r"\d\.?\d*(?:e-\d+)?", run(program, *arguments, folder=tmp_path))]
        assert len(errors) == ranks
        assert max(errors) < 1e-3


def test_any_order_of_your_own_schedule_is_right() -> None:
    program = programs("own_schedule.md")[0]
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


@pytest.mark.sample(0)
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


def block(page: str, name: str) -> str:
    """What stands in a generated block of a page."""
    (found,) = set(re.findall(rf"<!-- begin generated: {name} -->(.*?)<!-- end generated -->", read(page), re.S))
    return str(found)


def read(page: str) -> str:
    return (DOCS / page).read_text()


def cells(table: str) -> list[list[str]]:
    """The rows of a table below its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_crossover_is_where_the_table_turns() -> None:
    """From there on the chain is faster, before it pairwise sums."""
    faster, tokens = [], []
    for row in cells(block("which_schedule.md", "predictions_by_tokens fc2 70B")):
        times = [float(re.sub(r"\*|\(.*", "", cell)) for cell in row[1:4]]
        assert [time for time, cell in zip(times, row[1:4], strict=True) if "**" in cell] == [min(times)]
        faster.append(times[0] < times[1])
        tokens.append(int(row[0]))
    crossover = int(block("which_schedule.md", "crossover 70B"))
    assert faster == [each >= crossover for each in tokens]
    assert len(set(faster)) == 2


def result(file: str) -> Any:
    return json.loads((DOCS.parent / "benchmarks" / "results" / file).read_text())


def reference(file: str) -> dict[str, dict[str, float]]:
    """By row, from the file of a benchmark: the ms of the fastest method of each kind, and of each peer."""
    rows = {}
    for row in result(file)["rows"]:
        took = {
            (method["kind"], method["name"]): statistics.median(method["rounds"])
            for method in row["methods"]
            if method["rounds"]
        }
        ours = [(name, ms) for (kind, name), ms in took.items() if kind == "distgemm"]
        rows[f"{row['model'].removeprefix('llama-3-')} {row['layer']} {row['pattern']} {row['m']}"] = {
            "ours": min(ms for _, ms in ours),
            "per_tile": min(ms for name, ms in ours if "execution=per_tile" in name),
            "NCCL": min(ms for (_, name), ms in took.items() if name.startswith("NCCL + cuBLAS")),
            "torch": min((ms for (_, name), ms in took.items() if name.startswith("torch")), default=math.inf),
        }
    return rows


def mean(figures: list[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))


@pytest.mark.parametrize("page", ["measurements.md", "../README.md"])
@pytest.mark.parametrize("file", ["executions_4xh200", "executions_few_4xh200"])
def test_ratios_are_what_the_files_say(page: str, file: str) -> None:
    rows, text = reference(f"{file}.json").values(), read(page)
    for peer in ("NCCL", "torch"):
        said = re.findall(rf"begin generated: ratio {file} {peer} -->([^<]*)<", text)
        wanted = mean([row[peer] / row["ours"] for row in rows])
        assert said == [f"{wanted:.2f}"]


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("measurements.md", "executions_4xh200"),
        ("measurements.md", "executions_few_4xh200"),
        ("measurements_parts.md", "executions_all_to_all_4xh200"),
    ],
)
def test_the_tables_of_executions_are_what_the_files_say(page: str, file: str) -> None:
    rows, said = reference(f"{file}.json"), block(page, f"executions {file}")
    table = cells(said)
    peers = [min(row["NCCL"], row["torch"]) / row["ours"] for row in rows.values()]
    assert len(table) == len(rows)
    assert f"a per-tile kernel in {sum(row['per_tile'] == row['ours'] for row in rows.values())}." in said
    assert f"{mean(peers):.2f} times as long in the geometric mean, {min(peers):.2f} times at least" in said
    assert f"it is faster in {sum(each < 1 for each in peers)} rows" in said
    for row, shown in zip(rows.values(), table, strict=True):
        assert f"{row['ours'] * 1e3:.1f}" in [cell.strip("*") for cell in shown[1:-3]]


def test_the_other_tables_are_what_the_files_say() -> None:
    gemms = result("gemm_h200.json")["rows"]
    ratios = [row["tflops"]["cutlass"] / row["tflops"]["cublas"] for row in gemms]
    assert f"{mean(ratios):.3f} of cuBLAS's rate" in block("measurements_parts.md", "gemms_outcome")
    assert len(cells(block("measurements_parts.md", "gemms"))) == len(gemms)
    host = result("host_time_2xh200.json")["rows"]
    table = cells(block("measurements_parts.md", "host_time"))
    assert [row[1] for row in table] == [f"{row['us']['call']:.0f}" for row in host]


def test_results_are_small_and_each_is_read() -> None:
    """What no page prints belongs in the history."""
    folder = DOCS.parent / "benchmarks" / "results"
    read_by = "".join(path.read_text() for path in [*DOCS.glob("*.md"), *(DOCS / "blocks").glob("*.py")])
    program = (DOCS.parent / "benchmarks" / "simulator_vs_measured.py").read_text()
    assert "bench_schedules_{ranks}xh200.json" in program
    for path in folder.iterdir():
        assert re.search(rf"\b{path.stem}\b", read_by) or path.stem.startswith("bench_schedules_"), path.name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_200_000


def test_full_results_are_in_the_history() -> None:
    """Every raw file that the measurements name is in a commit that they name, or in the folder."""
    page = "".join(map(read, ("measurements.md", "measurements_parts.md", "tests_on_gpus.md")))
    there = {path.name for path in (DOCS.parent / "benchmarks" / "results").iterdir()}
    for commit in set(re.findall(r"git show (\w{7}):benchmarks/results/", page)):
        git = ["git", "-C", str(DOCS.parent), "ls-tree", "--name-only", f"{commit}:benchmarks/results"]
        listed = subprocess.run(git, capture_output=True, text=True, check=False)
        if listed.returncode:
            pytest.skip("this checkout has no history")
        there |= set(listed.stdout.split())
    named = set(re.findall(r"\b[a-z]\w+\.(?:json|txt)\b", page))
    assert len(named) > 30
    assert named <= there


def test_every_explorer_of_the_site_is_made(tables: ModuleType) -> None:
    explorers = importlib.import_module("blocks.explorers").explorers()
    named = {
        (path.parent / name).relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        for name in re.findall(r"<!-- explorer: (\S+)", path.read_text())
    }
    assert named == set(explorers)
    assert {f"schedules/{name}_explorer.html" for name in distgemm.list_schedules()} < named


def test_the_unfused_plan_waits_for_the_whole_all_gather(tables: ModuleType) -> None:
    unfused = importlib.import_module("blocks.explorers").unfused
    plan = distgemm.make_plan(distgemm.GemmProblem(2048, 57344, 8192), "ag+gemm", 4)
    changed = unfused(plan)
    changed.verify()
    machine = Machine.load("h200")
    fused, slower = simulate(plan, machine), simulate(changed, machine)
    for rank in range(4):
        events = [event for event in slower.events if event.rank == rank]
        first = min(event.start for event in events if isinstance(event.op, Gemm))
        assert first >= max(event.end for event in events if isinstance(event.op, Copy))
    assert changed.link_bytes() == plan.link_bytes() and slower.time > fused.time
    # It is the unfused program but for the collective's own speed.
    assert slower.time == pytest.approx(predict_unfused(plan.problem, machine, "ag+gemm", 4), rel=0.05)
