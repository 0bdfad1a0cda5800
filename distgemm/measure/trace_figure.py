"""The figure of a measured replay beside its prediction. Needs matplotlib: the extra "pictures"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distgemm.measure.trace import Span, Trace
from distgemm.simulator import lane_order
from distgemm.viz.canvas import (
    FAINT,
    GRID,
    INK,
    MAX_RANKS,
    OP_COLOURS,
    SMALL,
    TEXT,
    add_axes,
    add_title,
    dots_per_inch,
    first_that_fits,
    ink_on,
    new_figure,
    op_class,
    op_labels,
    problem_text,
    save_figure,
    side_label,
    suffix_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_trace"]


def draw_trace(trace: Trace, path: str | Path) -> None:
    """Draw what every rank did and what was predicted, one rank below the other.

    Args:
        trace: what is drawn.
        path: an .svg or .png file.

    Raises:
        ValueError: for another suffix, and for a file that cannot be written.
    """
    suffix_of(path)  # refused before anything is drawn
    plan = trace.plan
    shown = range(plan.world_size)[:MAX_RANKS]
    rows: list[tuple[int, bool, str]] = []
    for rank in shown:
        for predicted in (False, True):
            lanes = {span.lane for span in trace.of_rank(rank, predicted)}
            rows += [(rank, predicted, lane) for lane in sorted(lanes, key=lane_order)]
    across, row, between = 12.5, 0.25, 0.16
    low = row * len(rows) + between * 2 * len(shown)
    width, height = 2.6 + across + 0.45, 1.2 + low + 0.75
    figure = new_figure(width, height)
    add_title(
        figure,
        f"{plan.schedule}: {problem_text(plan)}, {plan.world_size} ranks",
        f"Measured: {trace.alone:.0f} \u00b5s per replay. Predicted on {trace.predicted.machine.name} (pale): "
        f"{trace.predicted.time:.0f} \u00b5s",
        "\u00b5s from the first op of any rank; each rank's prediction begins with its first op",
    )
    axes = add_axes(figure, 2.6, 0.6, across, low)
    end = max(span.end for span in (*trace.spans, *trace.prediction)) * 1.01
    axes.set_xlim(0, end)
    axes.set_ylim(low, 0)
    per_us = across / end
    y = 0.0
    before: tuple[int, bool] | None = None
    for rank, predicted, lane in rows:
        if before != (rank, predicted):
            y += between
            if before is not None and before[0] != rank:
                axes.axhline(y - between / 2, color=GRID, linewidth=0.8)
            side_label(axes, -1.75 / per_us, y + row / 2, "" if predicted else f"rank {rank}", TEXT + 1, INK)
            before = rank, predicted
        side_label(axes, -0.06 / per_us, y + row / 2, "predicted " * predicted + lane, TEXT, FAINT)
        for span in trace.of_rank(rank, predicted):
            if span.lane == lane:
                _bar(axes, span, y + 0.03, row - 0.05, per_us, predicted)
        y += row
    axes.set_yticks([])
    note = "\u00b5s"
    if plan.world_size > len(shown):
        note += f"; {len(shown)} of {plan.world_size} ranks shown"
    axes.set_xlabel(note, size=TEXT, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
    save_figure(figure, path, dots_per_inch(width, height))


def _bar(axes: Axes, span: Span, y: float, height: float, per_us: float, predicted: bool) -> None:
    from matplotlib.patches import Rectangle

    colour = "#BBBBBB" if span.part else OP_COLOURS[op_class(span.op)]
    alpha = 0.45 if predicted else 1.0
    length = span.end - span.start
    axes.add_patch(
        Rectangle((span.start, y), length, height, facecolor=colour, edgecolor="white", linewidth=0.6, alpha=alpha)
    )
    text = "" if span.part else first_that_fits(op_labels(span.op), length * per_us)
    if text:
        middle = (span.start + span.end) / 2
        ink = "#111111" if predicted else ink_on(colour)
        axes.text(middle, y + height / 2, text, ha="center", va="center", size=SMALL, color=ink, clip_on=True)
