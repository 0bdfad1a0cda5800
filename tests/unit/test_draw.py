"""Pictures are made, say what they show, and no two texts lie on each other."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from distgemm import GemmProblem, get_schedule, list_schedules, make_plan
from distgemm.simulator import simulate
from distgemm.simulator.machine import Machine
from distgemm.viz.figures import draw_plan, draw_schedule, draw_timeline
from distgemm.viz.text import bytes_text

pytest.importorskip("matplotlib")

GATHER = "all_gather_1d_tiling_cd_rotating_a"
RING = "reduce_scatter_1d_tiling_a_rotating_c"
PAIRWISE = "reduce_scatter_1d_pairwise_a"
PROBLEM = GemmProblem(8192, 10240, 8192)
CASES = [(GATHER, 1, 1), (GATHER, 4, 1), (GATHER, 8, 2), (RING, 4, 2), (PAIRWISE, 8, 1), (GATHER, 20, 1)]


def draw(what: str, name: str, size: int, chunks: int, path: Path, mechanism: str = "push") -> None:
    scheduler = get_schedule(name, size, chunks=chunks)
    plan = make_plan(PROBLEM, scheduler, mechanism=mechanism)
    if what == "schedule":
        draw_schedule(scheduler, path)
    elif what == "plan":
        draw_plan(plan, path)
    else:
        draw_timeline(simulate(plan, Machine.load("h200")), path)


def texts(path: Path) -> str:
    """All text of a picture."""
    return " ".join(
        re.sub(r"<[^>]*>", "", text) for text in re.findall(r"<text[^>]*>.*?</text>", path.read_text(), re.S)
    )


@pytest.mark.parametrize("what", ["schedule", "plan", "timeline"])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_are_made(what: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    draw(what, GATHER, 4, 1, path)
    data = path.read_bytes()
    assert len(data) > 5000
    assert data.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in data[:1000]


@pytest.mark.parametrize("what", ["schedule", "plan", "timeline"])
def test_other_suffixes_are_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a \.svg or \.png file, got .*picture\.gif"):
        draw(what, GATHER, 2, 1, tmp_path / "picture.gif")
    assert not list(tmp_path.iterdir())


def test_a_schedule_says(tmp_path: Path) -> None:
    draw("schedule", GATHER, 4, 1, tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    for part in (
        GATHER,
        "4 ranks, 4 iterations each",
        "A (m x k)",
        "B (n x k)",
        "D (m x n)",
        "Work",
        "rank 3",
        "it. 3",
    ):
        assert part in found, part
    assert found.count("m 0") == 2  # of A and of D
    for rank in range(4):
        assert found.count(f"rank {rank}") == 1 + 1 + 4 + 1  # A, B, a column of D, a row of the work


def test_a_plan_says(tmp_path: Path) -> None:
    draw("plan", RING, 4, 2, tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    for part in (RING, "m 8192 x n 10240 x k 8192, bfloat16", "Plan for 4 ranks", "480 MiB move in all", "Workspace"):
        assert part in found, part
    for part in (
        "at most 120 MiB over one link",
        "GEMM",
        "copy",
        "160 MiB in 8 slots",
        "numbers on GEMMs are iterations",
    ):
        assert part in found, part


def test_a_plan_says_what_crosses_hosts(tmp_path: Path) -> None:
    names = {"across": "all_gather_1d_ring_a", "inside": "all_gather_1d_ring_a"}
    plan = make_plan(PROBLEM, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=2, **names)
    draw_plan(plan, tmp_path / "plan.svg")
    across = sum(plan.link_bytes("across").values())
    assert "Plan for 4 ranks on hosts of 2; " in texts(tmp_path / "plan.svg")
    assert f"{bytes_text(across)} go across hosts." in texts(tmp_path / "plan.svg")


def test_a_timeline_says(tmp_path: Path) -> None:
    draw("timeline", PAIRWISE, 8, 1, tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    timeline = simulate(make_plan(PROBLEM, PAIRWISE, 8), Machine.load("h200"))
    for part in ("Predicted on H200", f"{timeline.time:.0f} \u00b5s per replay", "Bound by copies"):
        assert part in found, part
    for part in ("gemm 0", "gemm 1", "copy", "sum", "rank 7", "roof", "to rank 3", "hidden behind"):
        assert part in found, part
    draw("timeline", GATHER, 4, 1, tmp_path / "b.svg")
    for part in ("iteration 3", "A0,0 to rank 3", "arrows lead from a copy to the op that uses what it brought"):
        assert part in texts(tmp_path / "b.svg"), part


def test_pulls_say_where_from_and_stores_where_to(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw("plan", GATHER, 4, 1, path, "pull")
    for part in ("from 0", "from 3", "local copy", "to slot", "on copies, the rank that they come from"):
        assert part in texts(path), part
    assert not re.search(r"\bto \d", texts(path))
    draw("timeline", GATHER, 4, 1, path, "pull")
    for part in ("A3,0 from rank 3", "arrows lead from an op to the op that uses what it made for another rank"):
        assert part in texts(path), part
    draw("plan", RING, 4, 1, path, "store")
    found = texts(path)
    for part in ("0 to 1", "2 to 0", 'numbers on GEMMs are iterations ("to": and the rank that they store to)'):
        assert part in found, part
    assert "local copy" not in found
    draw("timeline", RING, 4, 1, path, "store")
    for part in ("iteration 0 to rank 1", "iteration 3", "arrows lead from an op to the op that uses what it made"):
        assert part in texts(path), part


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    for what in ("plan", "timeline"):
        draw(what, GATHER, 20, 1, tmp_path / "a.svg")
        assert "8 of 20 ranks shown" in texts(tmp_path / "a.svg")
    draw_schedule(get_schedule(GATHER, 40), tmp_path / "a.svg")
    assert "too many tiles for text" in texts(tmp_path / "a.svg")
    assert "from dark (rank 0) to light (rank 39)" in texts(tmp_path / "a.svg")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("what", "name", "size", "chunks", "mechanism"),
    [
        *((what, *case, "push") for case in CASES for what in ("schedule", "plan", "timeline")),
        *((what, *case, how) for case in CASES for what in ("plan", "timeline") for how in ("pull", "store")),
    ],
)
def test_no_text_lies_on_another(
    what: str, name: str, size: int, chunks: int, mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: kept.append(self))
    draw(what, name, size, chunks, tmp_path / "a.png", mechanism)
    (figure,) = kept
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    boxes = []
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label]
        low, high = axes.get_xlim()
        ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        found += [label for at, label in ticks if low <= at <= high]
    for text in found:
        if text.get_text().strip() and text.get_visible():
            box = text.get_window_extent(canvas.get_renderer())
            boxes.append((text.get_text(), box))
            assert box.x0 >= -1, text.get_text()
            assert box.y0 >= -1, text.get_text()
            assert box.x1 <= width + 1, text.get_text()
            assert box.y1 <= height + 1, text.get_text()
    slack = 1.0
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 + slack or b.x1 <= a.x0 + slack or a.y1 <= b.y0 + slack or b.y1 <= a.y0 + slack
        assert apart, (one, other)


def test_every_schedule_has_pictures(tmp_path: Path) -> None:
    for name in list_schedules():
        if "_1d_" in name:
            draw_schedule(get_schedule(name, 4), tmp_path / "schedule.svg")
            draw_plan(make_plan(PROBLEM, name, 4), tmp_path / "plan.svg")
            # At A, at B unless all hold it, at a column of D unless all hold it, and at its work; at its ops, twice at
            # its links, and at its workspace.
            grid = get_schedule(name, 4).grid
            labels = grid.m + grid.n + 1 if "all_reduce" in name else 6 if "all_to_all" in name else 7
            for what, times in (("schedule", labels), ("plan", 4)):
                path = tmp_path / f"{what}.svg"
                found = re.findall(r">(rank \d+)</text>", path.read_text())
                assert Counter(found) == {f"rank {rank}": times for rank in range(4)}, (name, what)
                assert name in texts(path)
                path.unlink()


def test_matplotlib_is_imported_late() -> None:
    code = (
        "import distgemm.viz.figures, distgemm.simulator, sys; "
        "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
