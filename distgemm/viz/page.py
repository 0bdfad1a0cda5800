"""Pages on which a plan moves: one HTML file each, without a server and without a network. Needs D3, by the extra
"pictures".

D3 comes from the package mpld3, which has the file. A page contains it, so a page works wherever it is copied to.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from distgemm.arguments import instance, member, write, wrong
from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.plan.validate import validate
from distgemm.schedulers import DistributedTileScheduler, schedule_mesh_rank, schedule_options
from distgemm.simulator import Machine, simulate
from distgemm.viz.explorer import Track, explorer_model, predicted_track, step_track
from distgemm.viz.text import show_plan, show_schedule

__all__ = [
    "EXAMPLE",
    "PAGE_SUFFIX",
    "Explorer",
    "d3_source",
    "explore",
    "notebook_html",
    "page_html",
    "page_model",
    "predicted_model",
    "save_page",
]

PAGE_SUFFIX = ".html"
FILES = Path(__file__).parent / "page_files"
D3_FILE = "d3.v5.min.js"
"""The version for which the script is written, and D3_LICENSE is the licence."""
NEEDS = "pages need D3: pip install 'distgemm[pictures]'"

D3_LICENSE = """D3, https://d3js.org
Copyright 2010-2018 Mike Bostock

Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:

* Redistributions of source code must retain the above copyright notice, this list of conditions and the following
  disclaimer.
* Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
  disclaimer in the documentation and/or other materials provided with the distribution.
* Neither the name of the author nor the names of contributors may be used to endorse or promote products derived from
  this software without specific prior written permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT OWNER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF
THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE."""

EXAMPLE = GemmProblem(8192, 57344, 8192)
"""The layer fc1 of Llama 70B: the product of a page that is given none."""

FRAME_HEIGHT = 900
"""Height of a page in a notebook, pixels."""

Layout = Literal["one", "beside", "choose"]
"""How a page shows its plans: one; all beside each other, with one clock; or one at a time, selected by the reader."""


def d3_source() -> str:
    """The text of D3. Raises ValueError if it is not installed."""
    found = find_spec("mpld3")
    folders = [] if found is None else found.submodule_search_locations or []
    # The file is read without importing mpld3, which would import matplotlib.
    for folder in folders:
        path = Path(folder, "js", D3_FILE)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ValueError(NEEDS)


def page_model(plan: Plan, tracks: Sequence[Track] = (), label: dict[str, Any] | None = None) -> dict[str, Any]:
    """The model of a plan, with the result of its proof.

    Args:
        plan: what is shown. It need not be right: the page of a plan whose proof fails opens at the op that fails.
        tracks: when its ops run. None given: one step each.
        label: what selects the model on a page of several.

    Raises:
        PlanError: if there is nothing to draw: the plan's fields have other types than a plan's, or its extents,
            shards and slots are not those of its ranks and its problem.
    """
    failure = _structural_failure(plan)
    if failure is None:
        try:
            plan.verify()
        except PlanError as error:
            failure = error
    return {"label": label or {}, **explorer_model(plan, tracks or [step_track(plan)], failure)}


def predicted_model(plan: Plan, machine: Machine | str = "h200", label: dict[str, Any] | None = None) -> dict[str, Any]:
    """The model of a plan with predicted times, or in steps if the plan cannot be simulated, which the page says.

    Raises:
        ValueError: for an element type that the machine has no rate for.
        PlanError: as :func:`page_model`.
    """
    failure = _structural_failure(plan)
    if failure is None:
        try:
            return page_model(plan, [predicted_track(simulate(plan, machine))], label)
        except PlanError as error:  # a deadlock
            failure = error
    steps = step_track(plan)
    return page_model(plan, [steps._replace(about=f"No times: {failure}. {steps.about}")], label)


def _structural_failure(plan: Plan) -> PlanError | None:
    """The error of an op that the structural checks refuse. Raises PlanError for an error of the plan as a whole."""
    try:
        validate(instance("plan", plan, Plan, "a distgemm.Plan"))
    except PlanError as error:
        if error.op is None:
            raise
        return error
    return None


def page_html(models: Sequence[dict[str, Any]], layout: Layout = "one", title: str = "", *, play: bool = False) -> str:
    """The text of a page.

    Args:
        models: results of :func:`page_model`.
        layout: how several are shown.
        title: a line above them.
        play: play when the page opens, again and again.

    Raises:
        ValueError: without a model, for another layout, and if D3 is not installed.
    """
    if not models:
        raise wrong("models", "at least one result of page_model", models)
    member("layout", layout, get_args(Layout))
    text = json.dumps({"title": title, "layout": layout, "play": play, "models": list(models)}, separators=(",", ":"))
    parts = {
        "title": html.escape(title or models[0]["schedule"]),
        "style": (FILES / "explorer.css").read_text(encoding="utf-8"),
        "model": base64.b64encode(zlib.compress(text.encode(), 9)).decode(),
        "d3_license": D3_LICENSE,
        "d3": d3_source(),
        "script": (FILES / "explorer.js").read_text(encoding="utf-8"),
    }
    page = (FILES / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace("{{" + name + "}}", part)
    return page


def save_page(
    models: Sequence[dict[str, Any]],
    path: str | Path,
    layout: Layout = "one",
    title: str = "",
    *,
    play: bool = False,
) -> None:
    """Write a page to a file. Raises ValueError if it cannot be written, or if D3 is not installed."""
    write("path", path, page_html(models, layout, title, play=play))


# --- notebooks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explorer:
    """A page of one plan or of several, for a notebook or a file. :func:`explore` makes it.

    Attributes:
        models: of the plans.
        layout: how several are shown.
    """

    models: tuple[dict[str, Any], ...]
    layout: Layout = "one"

    def save(self, path: str | Path) -> None:
        """Write the page to a file. Raises ValueError if it cannot be written, or if D3 is not installed."""
        save_page(self.models, path, self.layout)

    def _repr_html_(self) -> str:
        return _frame(page_html(self.models, self.layout))


def explore(
    schedules: str | Sequence[str],
    ranks: int | Sequence[int | tuple[int, ...]] = 4,
    chunks: int | Sequence[int] = 1,
    *,
    problem: GemmProblem = EXAMPLE,
    machine: Machine | str = "h200",
    **options: Any,
) -> Explorer:
    """A page with a selector of schedule, ranks and chunks. In a notebook, the last expression of a cell shows it.

    Args:
        schedules: names of schedules.
        ranks: numbers of ranks, or meshes such as (2, 4). Those with another number of axes than a schedule takes are
            left out for it.
        chunks: values of the option chunks, for schedules that have it.
        problem: the product.
        machine: for which times are predicted.
        **options: further options of :func:`distgemm.make_plan` and of the schedules.

    Raises:
        ValueError: for a schedule that does not take what is given, and if nothing is left.
    """
    models = []
    for name in [schedules] if isinstance(schedules, str) else schedules:
        for size in [ranks] if isinstance(ranks, int) else ranks:
            mesh = (size,) if isinstance(size, int) else tuple(size)
            if len(mesh) != schedule_mesh_rank(name):
                continue
            tried = [chunks] if isinstance(chunks, int) else list(chunks)
            for count in tried if "chunks" in schedule_options(name) else [None]:
                chosen: dict[str, Any] = {} if count is None else {"chunks": count}
                plan = make_plan(problem, name, mesh=mesh, **chosen, **options)
                label = {"schedule": name, "ranks": "x".join(map(str, mesh)), "chunks": count or 1}
                models.append(predicted_model(plan, machine, label))
    if not models:
        raise ValueError(f"no schedule of {schedules!r} takes the ranks {ranks!r}")
    return Explorer(tuple(models), "choose" if len(models) > 1 else "one")


def notebook_html(shown: Plan | DistributedTileScheduler) -> str:
    """The page of a plan, with times that are predicted for an H200; or of a schedule, in steps."""
    try:
        d3_source()
    except ValueError as error:
        text = show_plan(shown) if isinstance(shown, Plan) else show_schedule(shown)
        return f"<pre>{html.escape(text)}</pre><p>{html.escape(str(error))}</p>"
    model = predicted_model(shown) if isinstance(shown, Plan) else page_model(make_plan(EXAMPLE, shown))
    return _frame(page_html([model]))


def _frame(page: str) -> str:
    """A page in a frame of a notebook, in which scripts and styles of page and notebook do not meet."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" title="explorer of a plan" '
        f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
    )
