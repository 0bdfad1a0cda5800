"""The model of a page equals the plan and the simulator; pages are written, and say what is missing."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import distgemm
from distgemm.plan.ops import Copy, Gemm, Reduce, Signal, Wait, accesses, box_size, contains, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.schedulers import schedule_mesh_rank
from distgemm.simulator import FLAG_LANE, Machine, simulate
from distgemm.viz.explorer import Track, explorer_model, predicted_track, step_track
from distgemm.viz.page import explore, page_html, page_model, predicted_model, save_page
from tests.unit.command import invoke, refusal
from tests.unit.mutations import mutations

H200 = Machine.load("h200")
MESHES = {1: [(4,), (3,)], 2: [(2, 2), (2, 3)], 3: [(2, 2, 2)]}
CASES = [
    (name, mesh)
    for name in distgemm.list_schedules()
    for mesh in MESHES[schedule_mesh_rank(name)]
    if "xor" not in name or mesh != (3,)  # takes powers of two only
]


def reference_states(plan: Plan, track: Track, time: float) -> dict[tuple[str, int], str]:
    """The state of each tile on each rank at a time, found from the ops that have run: by another way than the model,
    without its event loop.

    Only full workspaces: no tile is overwritten by another one.
    """
    runs = {(run.rank, run.op.id): run for run in track.runs}
    over = [run for run in track.runs if run.done <= time]
    under = [run for run in track.runs if run.start <= time < run.done]
    k_tiles = {k for k in range(plan.grid.k) if plan.edges[2][k] < plan.edges[2][k + 1]}
    found: dict[tuple[str, int], str] = {}

    def tile(operand: str, coordinate: tuple[int, ...]) -> str:
        return f"{operand}({','.join(map(str, coordinate))})"

    def box(operand: str, coordinate: tuple[int, ...]) -> Any:
        row, column, batch = coordinate
        rows, columns = {"A": (0, 2), "B": (1, 2), "D": (0, 1)}[operand]
        where = ((3, batch), (rows, row), (columns, column))
        return tuple((plan.edges[mode][at], plan.edges[mode][at + 1]) for mode, at in where)

    def sums(rank: int, at: tuple[int, ...], flying: bool) -> str:
        """The state of a tile of D on a rank that is not busy with it: what memory holds, and who has used it."""
        views = {}
        for run in over:
            write = accesses(run.op)[1]
            if write is not None and write.rank == rank and d_tile(run.op) == at:
                views[write[1], write[2], write.box] = (
                    write,
                    max(run.done, views.get((*write[1:3], write.box), (0, 0))[1]),
                )
        contents = {key: into(view, time) for key, (view, _) in views.items()}
        whole = sum(box_size(key[2]) for key, content in contents.items() if content == {*k_tiles, "C"})
        if whole and whole >= box_size(box("D", at)):
            return "done"
        used = set()
        for run in over:
            op = run.op
            if d_tile(op) != at:
                continue
            if isinstance(op, Copy):
                reads = [op.src] if link_of(op) is not None and op.src.rank == rank else []
            else:
                reads = [*op.sources] if op.rank == rank else []
            used |= {
                key
                for view in reads
                if (key := (view.buffer, view.slot, view.box)) in views and run.done > views[key][1] - 1e-9
                if accesses(op)[1] != view
            }
        gave = any(d_tile(run.op) == at and (link_of(run.op) or (None,))[0] == rank for run in over)
        if set(views) - used:
            return "partial"
        return "coming" if flying else "sent" if views or gave else "absent"

    def d_tile(op: Any) -> tuple[int, ...] | None:
        if isinstance(op, Gemm):
            return op.tile.m, op.tile.n, op.tile.l
        return tuple(op.tile) if isinstance(op, Reduce) or (isinstance(op, Copy) and op.operand == "D") else None

    def into(view: Any, until: float) -> set[int | str]:
        """The k tiles of what is in a view at a time, and "C" if its term has been added."""
        writers = [
            run
            for run in track.runs
            if (write := accesses(run.op)[1]) is not None
            and (*write[:3], write.box) == (*view[:3], view.box)
            and run.done <= until
        ]
        if not writers:
            return set()
        run = max(writers, key=lambda run: run.done)
        if isinstance(run.op, Copy):
            return into(run.op.src, run.start)
        have: set[int | str] = {run.op.tile.k} if isinstance(run.op, Gemm) else set()
        if run.op.c is not None:  # type: ignore[attr-defined]
            have.add("C")
        return have.union(*(into(source, run.start) for source in run.op.sources))  # type: ignore[attr-defined]

    for operand in "ABD":
        rows, columns = {"A": (0, 2), "B": (1, 2), "D": (0, 1)}[operand]
        for row in range(plan.grid[rows]):
            for column in range(plan.grid[columns]):
                for batch in range(plan.grid.l):
                    at = row, column, batch
                    whole = box(operand, at)
                    if not box_size(whole):
                        continue
                    for rank in range(plan.world_size):
                        uses = [
                            run
                            for run in under
                            if run.rank == rank
                            and (
                                (
                                    isinstance(run.op, Gemm)
                                    and tuple(run.op.tile[each] for each in (rows, columns, 3)) == at
                                )
                                or (isinstance(run.op, Reduce) and operand == "D" and tuple(run.op.tile) == at)
                                or (
                                    isinstance(run.op, Copy)
                                    and operand == run.op.operand == "D"
                                    and link_of(run.op) is None
                                    and tuple(run.op.tile) == at
                                )
                            )
                        ]
                        moves = [
                            run
                            for run in track.runs
                            if isinstance(run.op, Copy)
                            and run.op.operand == operand
                            and tuple(run.op.tile) == at
                            and run.op.dst.rank == rank
                            and link_of(run.op) is not None
                        ]
                        here = sum(box_size(run.op.dst.box) for run in moves if run.done <= time)  # type: ignore
                        flying = any(run.start <= time < run.done for run in moves)
                        if uses:
                            state = "busy"
                        elif operand != "D":
                            if contains(plan.box(operand, rank), whole) or here >= box_size(whole):
                                state = "held"
                            else:
                                state = "coming" if here or flying else "absent"
                        else:
                            state = sums(rank, at, flying)
                        found[tile(operand, at), rank] = state
    assert runs
    return found


def state_at(place: dict[str, Any], time: float, track: int = 0) -> str:
    return [step for step in place["steps"][track] if step[0] <= time][-1][1]


def times_of(track: Track, count: int = 9) -> list[float]:
    """Times between events, and one after the last."""
    moments = sorted({moment for run in track.runs for moment in (run.start, run.done)})
    middles = [(one + other) / 2 for one, other in pairwise(moments) if other - one > 1e-3]
    return [*middles[:: max(1, len(middles) // count)], moments[-1] + 1]


@pytest.mark.sample(6)
@pytest.mark.parametrize("mechanism", ["push", "pull", "store"])
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_states_are_those_of_the_ops(name: str, mesh: tuple[int, ...], mechanism: str) -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(1000, 960, 992), name, mesh=mesh, mechanism=mechanism)
    for track in (predicted_track(simulate(plan, H200)), step_track(plan)):
        model = explorer_model(plan, [track])
        for time in times_of(track):
            states = reference_states(plan, track, time)
            shown = {(place["tile"], place["rank"]): state_at(place, time) for place in model["places"]}
            assert {at: shown.get(at, "absent") for at in states} == states, f"{track.name} at {time}"
            assert set(shown) <= set(states)
        owned = [place for place in model["places"] if place["owner"] and place["tile"][0] == "D"]
        assert {place["steps"][0][-1][1] for place in owned} == {"done"}


@pytest.mark.parametrize("name", ["all_gather_1d_ring_a", "reduce_scatter_1d_pairwise_a", "tensor_parallel_3d"])
def test_ops_and_times_are_those_of_the_plan(name: str) -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(512, 512, 512), name, mesh=MESHES[schedule_mesh_rank(name)][0])
    timeline = simulate(plan, H200)
    model = json.loads(json.dumps(explorer_model(plan, [predicted_track(timeline)])))
    events = {(event.rank, event.op.id): event for event in timeline.events}
    for rank, ops in enumerate(plan.rank_ops):
        assert [row["id"] for row in model["ops"][rank]] == [op.id for op in ops]
        for op, row, time in zip(ops, model["ops"][rank], model["tracks"][0]["times"][rank], strict=True):
            event = events[rank, op.id]
            assert row["text"].startswith(op.describe()) and row["deps"] == list(op.deps)
            assert row.get("link") == (None if link_of(op) is None else list(link_of(op) or ()))
            assert time[0] == event.lane and time[1:3] == pytest.approx([event.start, event.end], abs=1e-3)
            late = time[3] - time[2]
            assert late == pytest.approx(0 if link_of(op) is None else H200.nvlink.latency, abs=1e-3)
            if isinstance(op, Wait) and not op.flag.credit:
                signal = plan.ops(row["signal"][0])
                (found,) = [each for each in signal if each.id == row["signal"][1]]
                assert isinstance(found, Signal) and found.flag == op.flag and row["peer"] == found.rank
    sent = {tuple(link[:2]) for link in model["links"]}
    assert sent == set(plan.link_bytes())
    assert model["lanes"][0] == "gemm 0" and FLAG_LANE not in model["lanes"]


def test_a_tile_that_loses_its_slot_is_gone() -> None:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(512, 512, 512), "all_gather_1d_ring_a", 6, chunks=2, workspace="bounded"
    )
    model = explorer_model(plan, [step_track(plan)])
    states = [[step[1] for step in place["steps"][0]] for place in model["places"]]
    assert any("held" in steps and steps[-1] == "absent" for steps in states)
    for place in model["places"]:
        for step, after in pairwise(place["steps"][0]):
            assert step[0] < after[0]


def test_steps_keep_the_order() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(512, 512, 512), "all_reduce_1d_pairwise_a", 4, sync="barrier")
    at = {(run.rank, run.op.id): run for run in step_track(plan).runs}
    assert len(at) == sum(map(len, plan.rank_ops))
    signals = {op.flag[:2]: op for ops in plan.rank_ops for op in ops if isinstance(op, Signal)}
    for ops in plan.rank_ops:
        for op in ops:
            for dep in op.deps:
                assert at[op.rank, dep].done <= at[op.rank, op.id].start
            if isinstance(op, Wait) and not op.flag.initial:
                signal = signals[op.flag[:2]]
                assert at[signal.rank, signal.id].done <= at[op.rank, op.id].start


def broken(plan: Plan, rank: int = 1) -> tuple[Plan, int]:
    """A plan in which a GEMM no longer waits for the tile that it multiplies, and the GEMM's id."""
    ops = list(plan.ops(rank))
    waits = {op.id for op in ops if isinstance(op, Wait)}
    place, gemm = next((at, op) for at, op in enumerate(ops) if isinstance(op, Gemm) and waits & set(op.deps))
    ops[place] = dataclasses.replace(gemm, deps=tuple(dep for dep in gemm.deps if dep not in waits))
    return plan.replace_ops(rank, ops), gemm.id


def test_a_failed_proof_names_its_op() -> None:
    plan, gemm = broken(distgemm.make_plan(distgemm.GemmProblem(512, 512, 512), "all_gather_1d_ring_a", 4))
    with pytest.raises(PlanError) as found:
        plan.verify()
    failure = predicted_model(plan)["failure"]
    assert failure == {"message": str(found.value), "op": [1, gemm]} and "is not ordered after" in failure["message"]


def test_a_deadlock_is_shown_in_steps() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(512, 512, 512), "all_gather_1d_ring_a", 4)
    ops = [op for op in plan.ops(0) if not isinstance(op, Signal) or op.flag.credit]
    model = predicted_model(plan.replace_ops(0, ops))
    (track,) = model["tracks"]
    assert track["unit"] == "steps" and "ops never start" in track["about"]
    never = [(rank, at) for rank, times in enumerate(track["times"]) for at, time in enumerate(times) if time is None]
    assert never and "never ends" in model["failure"]["message"]


def test_plans_that_fail_can_be_shown() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8, 6, 4), "reduce_scatter_1d_pairwise_a", 3, mechanism="store")
    shown = 0
    for number, mutation in enumerate(mutations(plan)):
        if number % 4:
            continue
        failure = failure_of(mutation.plan)
        model = predicted_model(mutation.plan)
        assert (model["failure"] or {"message": None})["message"] == (None if failure is None else str(failure))
        json.dumps(model)
        shown += failure is not None
    assert shown > 50


@pytest.mark.parametrize(
    "change",
    [
        {"tile": distgemm.TileCoord(9, 0, 0, 0)},
        {"tile": (1, 2)},
        {"rank": 7},
        {"deps": (99,)},
        {"slot": 9},
        {"id": 0},
        {"round": 0},
    ],
)
def test_ops_that_make_no_sense_can_be_shown(change: dict[str, Any]) -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8, 6, 4), "all_gather_1d_ring_a", 3)
    for kind in (Copy, Signal, Wait, *([] if change.get("tile") == (1, 2) else [Gemm])):
        at = [place for place, op in enumerate(plan.ops(1)) if isinstance(op, kind)][-1]
        ops = list(plan.ops(1))
        ops[at] = dataclasses.replace(ops[at], **change)
        wrong = plan.replace_ops(1, ops)
        failure = failure_of(wrong)
        model = predicted_model(wrong)
        assert (model["failure"] or {"message": None})["message"] == (None if failure is None else str(failure))
        assert json.dumps(model)


def failure_of(plan: Plan) -> PlanError | None:
    try:
        plan.verify()
    except PlanError as error:
        return error
    return None


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8, 6, 4), "all_gather_1d_ring_a", 3)
    with pytest.raises(PlanError, match="its mesh are for 4"):
        page_model(dataclasses.replace(plan, mesh=(4,)))
    with pytest.raises(ValueError, match="models is at least one"):
        page_html([])
    with pytest.raises(ValueError, match="layout is one of one, beside, choose"):
        page_html([page_model(plan)], "above")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan is a distgemm.Plan"):
        page_model("all_gather_1d_ring_a")  # type: ignore[arg-type]


def unpacked(text: str) -> Any:
    found = re.search(r'<script id="model" type="text/plain">([^<]*)</script>', text)
    assert found
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def test_a_page_is_one_small_file_without_addresses(tmp_path: Path) -> None:
    pytest.importorskip("mpld3")
    plan = distgemm.make_plan(distgemm.GemmProblem(8192, 57344, 8192), "ag+gemm", 8, chunks=16)
    model = page_model(plan)
    save_page([model], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert unpacked(text) == {"title": "", "layout": "one", "play": False, "models": [json.loads(json.dumps(model))]}
    assert len(text) < 1_500_000
    assert "Copyright 2010-2018 Mike Bostock" in text
    # The browser tests see that nothing is loaded; D3 has functions that could, and nobody calls them.
    own = (text[: text.index("/*!")], text[text.rindex("<script>") :])
    assert not any(re.search(r"https?://(?!www.w3.org/2000/svg)|<link|<img|@import|fetch\(", part) for part in own)


@pytest.mark.parametrize(
    ("command", "track"),
    [
        ("show gemm+rs", "steps"),
        ("plan gemm+rs --m 512 --n 512 --k 512", "predicted"),
        ("simulate gemm+rs", "predicted"),
    ],
)
def test_commands_write_pages(command: str, track: str, tmp_path: Path) -> None:
    pytest.importorskip("mpld3")
    path = tmp_path / "page.html"
    done = invoke(*command.split(), "--ranks", "3", "-o", str(path))
    assert (done.exit_code, done.stderr) == (0, f"wrote {path}\n")
    (model,) = unpacked(path.read_text())["models"]
    assert (model["ranks"], model["tracks"][0]["name"], model["failure"]) == (3, track, None)


def test_notebooks_show_pages() -> None:
    pytest.importorskip("mpld3")
    schedule = distgemm.get_schedule("all_gather_1d_ring_a", 3)
    plan = distgemm.make_plan(distgemm.GemmProblem(512, 512, 512), schedule)
    for shown, track in ((schedule, "steps"), (plan, "predicted")):
        frame = shown._repr_html_()
        (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', frame)
        (model,) = unpacked(html.unescape(page))["models"]
        assert (model["schedule"], model["ranks"], model["tracks"][0]["name"]) == (schedule.name, 3, track)


def test_notebooks_without_d3_show_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgemm.viz.page.find_spec", lambda name: None)
    text = distgemm.get_schedule("all_gather_1d_ring_a", 3)._repr_html_()
    assert "all_gather_1d_ring_a: 3 ranks" in text and "pip install" in text


def test_explore_makes_a_plan_of_each_kind() -> None:
    names = ["all_gather_1d_ring_a", "tensor_parallel_2d"]
    found = explore(names, [2, 4, (2, 2)], [1, 2], problem=distgemm.GemmProblem(512, 512, 512))
    labels = [tuple(model["label"].values()) for model in found.models]
    assert labels[:4] == [(names[0], ranks, chunks) for ranks in "24" for chunks in (1, 2)]
    assert {label[:2] for label in labels[4:]} == {(names[1], "2x2")} and found.layout == "choose"
    assert [model["iterations"] for model in found.models[:4]] == [2, 4, 4, 8]
    with pytest.raises(ValueError, match="takes the ranks"):
        explore("tensor_parallel_2d", 4)


def test_without_d3_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("distgemm.viz.page.find_spec", lambda name: None)
    message = refusal("plan", "gemm+rs", "--ranks", "3", "-o", str(tmp_path / "a.html"))
    assert message == "error: pages need D3: pip install 'distgemm[pictures]'"
    assert not list(tmp_path.iterdir())
