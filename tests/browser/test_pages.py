"""Pages in a real browser: what they show at a time equals the plan and the simulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import distgemm
from distgemm.measure.trace import Trace
from distgemm.plan.ops import Copy, Gemm, Reduce, link_of
from distgemm.schedulers import schedule_mesh_rank
from distgemm.simulator import Timeline, op_title, simulate
from distgemm.viz.explorer import Track, predicted_track, step_track
from distgemm.viz.page import EXAMPLE, explore, page_model, predicted_model, save_page
from tests.browser.conftest import Page
from tests.unit.test_explorer import H200, broken, reference_states, times_of
from tests.unit.test_trace import recorded

MESHES = {1: [(4,), (8,)], 2: [(2, 2), (2, 4)], 3: [(1, 2, 2), (2, 2, 2)]}
CASES = [(name, mesh) for name in distgemm.list_schedules() for mesh in MESHES[schedule_mesh_rank(name)]]
PROBLEM = distgemm.GemmProblem(1024, 1024, 1024)
GATHER = "all_gather_1d_ring_a"


def predicted(name: str, mesh: tuple[int, ...]) -> Timeline:
    return simulate(distgemm.make_plan(PROBLEM, name, mesh=mesh), H200)


def compare(page: Page, track: Track, timeline: Timeline, time: float) -> None:
    """What the page shows at a time is what the ops do then."""
    page.seek(time)
    states = reference_states(timeline.plan, track, time)
    shown = page.states()
    assert {at: shown.get(at, "absent") for at in states} == states, f"at {time}"
    assert set(shown) <= set(states)
    arriving = [run for run in track.runs if link_of(run.op) is not None and run.start <= time < run.done]
    assert page.links() == {link_of(run.op) for run in arriving}
    works = [run for run in track.runs if isinstance(run.op, (Gemm, Copy, Reduce))]
    for rank, ids in page.running().items():
        now = [run for run in works if run.rank == rank and run.start <= time]
        assert ids == {run.op.id for run in now if time < (run.done if link_of(run.op) else run.end)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_page_shows_what_the_simulator_says(page: Page, name: str, mesh: tuple[int, ...], tmp_path: Path) -> None:
    timeline = predicted(name, mesh)
    track = predicted_track(timeline)
    save_page([page_model(timeline.plan, [track])], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.text("h1") == name and page.texts(".failure") == []
    for time in times_of(track, 7)[:-1]:
        compare(page, track, timeline, time)
    # Play to the end.
    page.seek(0)
    page.run("explorer.speed = 40")
    page.click(".play")
    page.wait("return !('playing' in explorer.root.dataset)")
    assert page.run("return explorer.at === explorer.end")
    last = max(run.done for run in track.runs)
    assert page.run("return explorer.at") == pytest.approx(last, abs=1e-3)
    owned = {(tile, rank): state for (tile, rank), state in page.states().items() if tile[0] == "D"}
    places = [place for place in page.run("return explorer.views[0].model.places") if place["owner"]]
    assert {owned[place["tile"], place["rank"]] for place in places if place["tile"][0] == "D"} == {"done"}
    page.check_console()
    # Every op can be selected: its text is that of the plan.
    for ops in timeline.plan.rank_ops[:2]:
        for op in ops[:: max(1, len(ops) // 6)]:
            page.run("explorer.views[0].pick({ op: [arguments[0], arguments[1]] })", op.rank, op.id)
            assert page.text(".details pre").startswith(op.describe())
    page.check_console()


def test_a_tile_has_a_history(page: Page, tmp_path: Path) -> None:
    timeline = simulate(distgemm.make_plan(EXAMPLE, GATHER, 4), H200)
    save_page([page_model(timeline.plan, [predicted_track(timeline)])], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    page.click('.pip[data-tile="A(3,0,0)"][data-rank="1"]')
    assert page.text(".details h2") == "Tile A(3,0,0) on rank 1"
    copies = [event for event in timeline.events if isinstance(event.op, Copy) and event.op.tile == (3, 0, 0)]
    (copy,) = [event for event in copies if link_of(event.op) == (0, 1)]
    (gemm,) = [
        event for event in timeline.events if event.rank == 1 and isinstance(event.op, Gemm) and event.op.tile.m == 3
    ]
    arrived = copy.end + H200.nvlink.latency
    rows = page.texts(".history tbody tr td:nth-child(2)")
    assert any(
        row.startswith(
            f"rank 0 copies: A(3,0,0) to rank 1, 32 MiB, {copy.start:.1f} \u00b5s to {copy.end:.1f} \u00b5s, "
            f"arrived on rank 1 at {arrived:.1f} \u00b5s."
        )
        for row in rows
    ), rows
    assert any(
        row.startswith(f"rank 1 multiplies: Gemm {gemm.op.iteration} (3,1,0,0), {gemm.start:.1f} \u00b5s")
        and "A(3,0,0) from rank 0 (arrival flag " in row
        and f"there at {arrived:.1f} \u00b5s" in row
        for row in rows
    ), rows
    # It is there long before the GEMM starts: first the lane is busy, then the GEMM before occupies the SMs.
    (row,) = [row for row in rows if row.startswith("rank 1 multiplies")]
    gemms = {event.op.iteration: event for event in timeline.events if event.rank == 1 and isinstance(event.op, Gemm)}
    number = gemm.op.iteration
    assert gemms[number - 2].lane == gemm.lane and arrived < gemms[number - 2].end < gemm.start < gemms[number - 1].end
    assert row.endswith(
        f"Its lane is busy with {op_title(gemms[number - 2].op)} until {gemms[number - 2].end:.1f} \u00b5s. "
        f"{op_title(gemms[number - 1].op)} occupies the SMs until it starts."
    )
    # A row leads to its time, the op's number to the op.
    page.click(f'.history tr[data-op="0:{copy.op.id}"] td:first-child button')
    assert page.run("return explorer.at") == pytest.approx(copy.start, abs=1e-3)
    assert page.text(".details .state") == (
        f"At {copy.start:.1f} \u00b5s: on its way from rank 0. What rank 0 sends arrives at {arrived:.1f} \u00b5s."
    )
    page.seek(0)
    assert page.text(".details .state") == (
        f"At 0.0 \u00b5s: not here. What rank 0 sends arrives at {arrived:.1f} \u00b5s."
    )
    page.seek(arrived + 1)
    assert page.text(".details .state").endswith(": arrived from rank 0.")
    page.click(f'.history tr[data-op="0:{copy.op.id}"] td:last-child button')
    assert page.text(".details pre").startswith(copy.op.describe())
    # A rank has its ops.
    page.click('.node[data-rank="2"]')
    assert page.text(".details h2") == "Rank 2"
    assert len(page.texts(".history tbody tr")) == len(timeline.plan.ops(2))
    page.check_console()


@pytest.mark.sample(0)
def test_keys(page: Page, tmp_path: Path) -> None:
    timeline = predicted(GATHER, (4,))
    save_page([page_model(timeline.plan, [predicted_track(timeline)])], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.run("return explorer.at") == 0
    moments: list[float] = [0]
    for event in timeline.events:
        link = link_of(event.op)
        if isinstance(event.op, (Gemm, Copy, Reduce)):
            moments += [event.start, event.end + (0 if link is None else H200.nvlink.latency)]
    page.press("\ue014")  # right
    first = min(moment for moment in moments if moment > 0)
    assert page.run("return explorer.at") == pytest.approx(first, abs=1e-3)
    page.press("\ue010")  # end
    assert page.run("return explorer.at === explorer.end")
    page.press("\ue011", " ")  # home, play
    assert page.run("return 'playing' in explorer.root.dataset")
    page.press(" ", "+")
    assert page.run("return !('playing' in explorer.root.dataset) && explorer.views[0].zoom.k > 1.5")
    page.run("document.querySelector('.grid svg').focus({ focusVisible: true })")
    page.press("\ue015", "\ue007")  # down, Enter
    assert page.text(".details h2").startswith("Tile A(1,0,0) on rank ")
    page.press("\ue00c")  # Escape
    assert page.text(".details h2") == "History"
    page.check_console()


def test_a_failed_proof_opens_at_its_op(page: Page, tmp_path: Path) -> None:
    plan, gemm = broken(distgemm.make_plan(PROBLEM, GATHER, 4))
    save_page([predicted_model(plan)], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    op = next(op for op in plan.ops(1) if op.id == gemm)
    assert page.text(".failure").startswith(f"The proof fails: {op.describe()}: reading slot")
    assert page.text(".details h2").startswith(f"Op #{gemm} of rank 1")
    (event,) = [event for event in simulate(plan, H200).events if (event.rank, event.op.id) == (1, gemm)]
    assert page.run("return explorer.at") == pytest.approx(event.start, abs=1e-3)
    page.check_console()


@pytest.mark.sample(0)
def test_a_deadlock_opens_at_the_op_that_never_starts(page: Page, tmp_path: Path) -> None:
    plan = distgemm.make_plan(PROBLEM, GATHER, 4)
    ops = list(plan.ops(0))
    last = next(at for at, op in enumerate(ops) if isinstance(op, Gemm) and at > 3)
    later = next(op for op in ops[last:] if op.kind == "Signal")
    ops[last] = dataclasses.replace(ops[last], deps=(*ops[last].deps, later.id))
    save_page([page_model(plan.replace_ops(0, ops), [step_track(plan.replace_ops(0, ops))])], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert "does not come before it" in page.text(".failure")
    assert page.text(".details h2").startswith(f"Op #{ops[last].id} of rank 0")
    page.check_console()


def test_a_trace_shows_both_times(page: Page, tmp_path: Path) -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(1024, 1024, 512), GATHER, 2, sync="barrier")
    timeline = simulate(plan, H200)
    trace = Trace.of(plan, 2, recorded(timeline, {1: -500.0}), timeline)
    save_page([page_model(plan, trace.tracks())], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.texts(".tracks option") == ["measured", "predicted"] and "Measured on 2 GPUs" in page.text(".about")
    for spans in (trace.spans, trace.prediction):
        # The first op of a rank that is no flag.
        copy = next(span for span in spans if link_of(span.op) == (0, 1))
        page.seek((copy.start + copy.end) / 2)
        assert page.links() >= {(0, 1)} and copy.op.id in page.running()[0]
        page.run("explorer.views[0].pick({ op: [0, arguments[0]] })", copy.op.id)
        assert f"{copy.start:.1f} \u00b5s to {copy.end:.1f} \u00b5s" in page.text(".sentence")
        page.run(
            "const node = document.querySelector('.tracks'); node.value = 1;node.dispatchEvent(new Event('change'))"
        )
    assert "Predicted for" in page.text(".about")
    page.check_console()


@pytest.mark.sample(0)
def test_plans_beside_each_other_have_one_clock(page: Page, tmp_path: Path) -> None:
    timelines = [predicted(name, (4,)) for name in (GATHER, "reduce_scatter_1d_pairwise_a")]
    tracks = [predicted_track(timeline) for timeline in timelines]
    models = [page_model(track_of.plan, [track]) for track_of, track in zip(timelines, tracks, strict=True)]
    save_page(models, tmp_path / "page.html", "beside", "One <beside> the other", play=True)
    page.open(tmp_path / "page.html")
    assert page.texts("h1") == [timeline.plan.schedule for timeline in timelines]
    assert page.text("main > .about") == page.driver.title == "One <beside> the other"
    page.run("explorer.speed = 40")
    page.wait("return explorer.at === explorer.end")
    page.run("explorer.speed = 0.2")
    page.wait("return explorer.at < explorer.end")  # it plays again
    page.press(" ")
    assert page.run("return !explorer.looping && !('playing' in explorer.root.dataset)")
    last = [max(run.done for run in track.runs) for track in tracks]
    assert page.run("return explorer.end") == pytest.approx(max(last), abs=1e-3)
    time = min(last) * 0.4
    page.seek(time)
    for number, (timeline, track) in enumerate(zip(timelines, tracks, strict=True)):
        shown = page.states(number)
        states = reference_states(timeline.plan, track, time)
        assert {at: shown.get(at, "absent") for at in states} == states
    assert page.run("return new Set(explorer.views.map(({ scale }) => scale.domain().join())).size") == 1


@pytest.mark.sample(0)
def test_a_selector_of_plans(page: Page, tmp_path: Path) -> None:
    names = [GATHER, "all_gather_1d_tiling_cd_rotating_a"]
    explore(names, [2, 4], [1, 2], problem=PROBLEM).save(tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert (page.text("h1"), len(page.texts(".now li"))) == (names[0], 2)
    for key, value in (("schedule", names[1]), ("ranks", "4"), ("chunks", "2")):
        page.run(
            "const node = document.querySelector(`select[data-key=${arguments[0]}]`); node.value = arguments[1];"
            "node.dispatchEvent(new Event('change'))",
            key,
            value,
        )
    assert page.text("h1") == names[1] and page.run("return explorer.views[0].model.iterations") == 8
    assert len(page.texts(".now li")) == 4
    page.check_console()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "dark"), [(360, False), (820, True), (1400, False)])
def test_pages_fit_their_window(page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    timeline = predicted("reduce_scatter_1d_tiling_a_rotating_c", (8,))
    save_page([page_model(timeline.plan, [predicted_track(timeline)])], tmp_path / "page.html")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    try:
        page.open(tmp_path / "page.html")
        page.click('.node[data-rank="2"]')
        assert page.run("return document.documentElement.scrollWidth") <= width
        paper = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark
        small = page.run(
            "return [...document.querySelectorAll('button, select')].filter((each) => each.offsetHeight < 24).length"
        )
        assert small == 0
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.sample(0)
def test_a_notebook_shows_a_page_in_a_frame(page: Page, tmp_path: Path) -> None:
    frame = distgemm.make_plan(PROBLEM, GATHER, 3)._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><html data-ready><body>{frame}</body></html>")
    page.open(tmp_path / "notebook.html")
    page.driver.switch_to.frame(0)
    try:
        page.wait("return 'ready' in document.documentElement.dataset")
        assert page.text("h1") == GATHER and len(page.texts(".node")) == 3
        page.check_console()
    finally:
        page.driver.switch_to.default_content()
