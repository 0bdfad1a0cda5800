"""The pages of the site that come from code are made, and the programs in them run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import distgemm

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


def run(program: str) -> str:
    """What a program prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
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


def test_marked_places_are_known(generate: ModuleType):
    used = {name for page in DOCS.glob("*.md") for name in generate.MARK.findall(page.read_text())}
    assert used == set(generate.MARKS)


def test_tables_of_measurements(generate: ModuleType):
    for kind in ("planning", "planning cubes", "mutation score", "comparison", "measured fc1", "measured fc2"):
        assert len(generate.MARKS[kind]()) > 100, kind
    # One prediction; the site makes all.
    table = generate.MARKS["fc2 70B small"]()
    assert table.startswith("Predicted, fc2 of Llama 70B, 2048 tokens (m 2048, n 8192, k 28672)")
    assert all(f"[{name}]" in table for name in distgemm.list_schedules() if name.startswith("reduce_scatter"))
