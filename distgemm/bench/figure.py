"""The figure of a benchmark result: how close each method comes to the roof. Needs matplotlib: the extra "pictures"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distgemm.bench.report import AUTO, OURS, PEER, Result, Row, best
from distgemm.viz.canvas import FAINT, GRID, INK, PALETTE, dots_per_inch, new_figure, save_figure, suffix_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_benchmark"]

PAGE_WIDTH = 7.0
"""Width of the figure, inches: A4 and letter paper have room for it."""
PANELS_ACROSS = 3
SMALL, TEXT, HEAD = 7.0, 7.5, 10.0
"""Sizes of type, points."""

BAR, GROUP_GAP = 0.105, 0.09
"""Height of a bar, which its number fits, and pause between rows, inches."""
LEFT, RIGHT, TOP, BOTTOM = 0.68, 0.1, 0.32, 0.28
"""Room around a panel for its labels, inches."""


class _Series(NamedTuple):
    """Bars of one colour: in each row the fastest method whose name starts with a prefix."""

    title: str
    colour: str
    prefixes: tuple[str, ...]


PEERS = (
    _Series("NCCL + cuBLAS", PALETTE[7], ("NCCL + cuBLAS",)),
    _Series("torch", PALETTE[1], ("torch",)),
    _Series("quack", PALETTE[2], ("quack",)),
)
LIBRARY = _Series("distgemm", PALETTE[4], ())
OTHER = _Series("other peers", PALETTE[6], ())


def draw_benchmark(result: Result, path: str | Path) -> None:
    """Draw the efficiency of each method: a panel for each pattern and number of tokens, a row for each layer.

    The figure is as wide as a page. A row has a bar for "auto", or for the fastest schedule if "auto" was not measured,
    and a bar for the fastest method of each group of peers.

    Args:
        result: a result with figures.
        path: a .svg or .png file.

    Raises:
        ValueError: for another suffix, or if no row has an efficiency.
    """
    suffix_of(path)  # refused before anything is drawn
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in result["rows"]:
        if _bars(row):
            panels.setdefault((row["pattern"], row["m"]), []).append(row)
    if not panels:
        raise ValueError("there is nothing to draw: no row has a method with an efficiency")
    patterns = list(dict.fromkeys(pattern for pattern, _ in panels))
    lines: list[list[tuple[str, int]]] = []
    for pattern in patterns:
        places = [place for place in panels if place[0] == pattern]
        lines += [places[at : at + PANELS_ACROSS] for at in range(0, len(places), PANELS_ACROSS)]
    across = max(map(len, lines))
    panel_width = (PAGE_WIDTH - 0.1) / across
    heights = [max(_height(panels[place]) for place in line) for line in lines]
    head, legend = 0.65, 0.3
    height = head + sum(heights) + (TOP + BOTTOM) * len(lines) + legend
    figure = new_figure(PAGE_WIDTH, height)
    limit = max(1.0, *(value for rows in panels.values() for row in rows for value in _bars(row).values())) * 1.12
    y = height - head
    for line, tall in zip(lines, heights, strict=True):
        for number, place in enumerate(line):
            rows = panels[place]
            own = _height(rows)
            box = (number * panel_width + LEFT, y - TOP - own, panel_width - LEFT - RIGHT, own)
            axes = figure.add_axes((box[0] / PAGE_WIDTH, box[1] / height, box[2] / PAGE_WIDTH, box[3] / height))
            _panel(axes, rows, limit)
            axes.set_title(f"{place[0]}, {place[1]} tokens", size=TEXT, weight="bold", color=INK, loc="left", pad=4)
        y -= tall + TOP + BOTTOM
    _texts(figure, result, [series for series in _all_series() if _is_drawn(series, panels)], height)
    save_figure(figure, path, dots_per_inch(PAGE_WIDTH, height))


def _all_series() -> tuple[_Series, ...]:
    return (LIBRARY, *PEERS, OTHER)


def _is_drawn(series: _Series, panels: dict[tuple[str, int], list[Row]]) -> bool:
    return any(series.title in _bars(row) for rows in panels.values() for row in rows)


def _bars(row: Row) -> dict[str, float]:
    """The efficiencies of a row, by the title of their series."""
    ours = _auto(row) or best(row, OURS)
    found: dict[str, float] = {}
    if ours and ours["efficiency"] is not None:
        found[LIBRARY.title] = ours["efficiency"]
    for each in row["methods"]:
        if each["kind"] == PEER and each["efficiency"] is not None:
            series = next((one for one in PEERS if each["name"].startswith(one.prefixes)), OTHER)
            found[series.title] = max(found.get(series.title, 0.0), each["efficiency"])
    return found


def _auto(row: Row) -> dict[str, Any] | None:
    """What "auto" selected, if that was measured."""
    found = (each for each in row["methods"] if each["name"] == AUTO and each["efficiency"] is not None)
    return next(found, None)


def _height(rows: list[Row]) -> float:
    return sum(BAR * len(_bars(row)) + GROUP_GAP for row in rows)


def _panel(axes: Axes, rows: list[Row], limit: float) -> None:
    """The rows of a panel, with the first on top."""
    y = 0.0
    places, labels = [], []
    for row in rows:
        bars = _bars(row)
        places.append(y + BAR * len(bars) / 2)
        labels.append(f"{row['model'].removeprefix('llama-3-').upper()} {row['layer']}")
        for series in _all_series():
            if series.title in bars:
                value = bars[series.title]
                axes.barh(y + BAR / 2, value, BAR * 0.92, color=series.colour)
                axes.text(value + 0.01 * limit, y + BAR / 2, f"{100 * value:.0f}", size=SMALL, va="center", color=INK)
                y += BAR
        y += GROUP_GAP
    axes.set_ylim(y - GROUP_GAP / 2, -GROUP_GAP / 2)
    axes.set_xlim(0, limit)
    axes.axvline(1, color=FAINT, linewidth=0.8)
    axes.set_yticks(places, labels, size=SMALL, color=INK)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"], size=SMALL, color=INK)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _texts(figure: Figure, result: Result, shown: list[_Series], height: float) -> None:
    """The title above the panels, and the legend below them."""
    from matplotlib.patches import Patch

    about = result["about"]
    ranks = {(row["ranks"], row["tp"]) for row in result["rows"]}
    share = "".join(f"; each GPU has the share of one of {tp}" for size, tp in sorted(ranks) if size != tp)
    title = f"distgemm on {about['gpus']} x {about['gpu']}, multicast {about['nvls']}"
    figure.text(0.1 / PAGE_WIDTH, 1 - 0.16 / height, title, size=HEAD, weight="bold", color=INK, va="top")
    line = f"efficiency, %: the longer of the best GEMM alone and the copies alone, over the time{share}"
    figure.text(0.1 / PAGE_WIDTH, 1 - 0.4 / height, line, size=TEXT, color=INK, va="top")
    labels = {LIBRARY: "distgemm auto" if all(map(_auto, result["rows"])) else "distgemm, auto or the fastest"}
    handles = [Patch(color=series.colour, label=labels.get(series, series.title)) for series in shown]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.05 / PAGE_WIDTH, 0.02 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=TEXT,
    )
