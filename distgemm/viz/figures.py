"""Figures of schedules, plans and timelines, as .svg or .png. Needs matplotlib: the extra "pictures"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgemm.arguments import instance
from distgemm.plan.ops import Copy, Gemm, Op, Reduce
from distgemm.plan.plan import Plan
from distgemm.schedulers import DistributedTileScheduler
from distgemm.schedulers.symmetry import MODES
from distgemm.simulator import FLAG_LANE, Event, Timeline, lane_order
from distgemm.viz.canvas import (
    FAINT,
    GLYPH_WIDTH,
    GRID,
    HEAD,
    INCHES_PER_POINT,
    INK,
    MAX_ARROWS,
    MAX_RANKS,
    MAX_TEXT_CELLS,
    OP_COLOURS,
    OP_NAMES,
    SMALL,
    TEXT,
    add_axes,
    add_mosaic,
    add_rectangle,
    add_title,
    dots_per_inch,
    first_that_fits,
    ink_on,
    label_places,
    new_figure,
    numbers_text,
    op_class,
    op_labels,
    problem_text,
    rank_colour,
    save_figure,
    side_label,
    suffix_of,
)
from distgemm.viz.text import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_plan", "draw_schedule", "draw_timeline"]


def draw_schedule(scheduler: DistributedTileScheduler, path: str | Path) -> None:
    """Draw the tile grids of A, B and D, and the tile that each rank multiplies in each iteration.

    A tile has the colour of the rank that holds it.

    Args:
        scheduler: what is drawn.
        path: an .svg or .png file.

    Raises:
        ValueError: for another suffix, and for a file that cannot be written.
    """
    instance("scheduler", scheduler, DistributedTileScheduler, "a DistributedTileScheduler")
    suffix_of(path)  # refused before anything is drawn
    grids = [_Grid.of(scheduler, operand) for operand in "ABD"]
    work = _work_grid(scheduler)
    head, gap, left = 0.95, 0.55, 0.35
    top_row = max(grid.height for grid in grids)
    width = max(left + sum(grid.width for grid in grids) + gap * 2 + 0.3, left + work.width + 0.3, 7.5)
    height = head + top_row + 0.35 + work.height + 0.25
    figure = new_figure(width, height)
    mesh = " x ".join(map(str, scheduler.mesh))
    ranks = f"{scheduler.world_size} rank{'s' * (scheduler.world_size != 1)}" + (
        f" in a mesh {mesh}" if len(scheduler.mesh) > 1 else ""
    )
    about = "Each tile has the colour and the number of the rank that holds it; it. = iteration that multiplies it."
    if max(*scheduler.grid[:3], scheduler.world_size) > MAX_TEXT_CELLS:
        last = scheduler.world_size - 1
        about = f"Each tile has the colour of the rank that holds it, from dark (rank 0) to light (rank {last})."
    add_title(figure, f"{scheduler.name}: {ranks}, {scheduler.iterations} iterations each", about)
    x = left
    for grid in grids:
        grid.draw(figure, x, height - head - grid.height)
        x += grid.width + gap
    work.draw(figure, left, 0.25)
    save_figure(figure, path, dots_per_inch(width, height))


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw a plan: bytes from rank to rank, the workspace of each rank, and the order of each rank's ops.

    Args:
        plan: what is drawn.
        path: an .svg or .png file.

    Raises:
        ValueError: for another suffix, and for a file that cannot be written.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    suffix_of(path)  # refused before anything is drawn
    ranks = plan.world_size
    cell = min(0.62, 11.0 / ranks) if ranks > 12 else 0.72
    side = max(cell * ranks, 1.2)
    shown = range(ranks)[:MAX_RANKS]
    columns, boxes = _rounds(plan, shown)
    step = 0.5 if len(columns) <= 24 else max(0.16, 12.0 / len(columns))
    bars = max(3.0, min(5.0, side))
    width = max(1.0 + side + 1.6 + bars + 1.2, 1.6 + step * len(columns) + 0.5, 8.0)
    lanes = _plan_lanes(plan, shown)
    rows = sum(len(of_rank) for of_rank in lanes.values())
    low = 0.27 * rows + 0.12 * len(shown)
    height = 0.75 + 0.6 + side + 0.75 + low + 0.55
    figure = new_figure(width, height)
    links = plan.link_bytes()
    total, busiest = sum(links.values()), max(links.values(), default=0)
    moved = (
        f"{bytes_text(total)} move in all, at most {bytes_text(busiest)} over one link" if links else "nothing moves"
    )
    hosts = ""
    if plan.ranks_per_host is not None:
        hosts = f" on hosts of {plan.ranks_per_host}"
        moved += f"; {bytes_text(sum(plan.link_bytes('across').values()))} go across hosts"
    head = f"Plan for {ranks} rank{'s' * (ranks != 1)}{hosts}; {moved}."
    add_title(figure, f"{plan.schedule}: {problem_text(plan)}", head)
    _links(add_axes(figure, 1.0, height - 1.35 - side, side, side), plan, links, cell)
    _workspace(add_axes(figure, 1.0 + side + 1.6, height - 1.35 - side, bars, side), plan, cell)
    axes = add_axes(figure, 1.6, 0.55, step * len(columns), low)
    _op_lanes(axes, plan, lanes, boxes, len(columns), step, width - 1.7)
    save_figure(figure, path, dots_per_inch(width, height))


def draw_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw when every rank executes each op, as the simulator predicts it.

    Args:
        timeline: what is drawn.
        path: an .svg or .png file.

    Raises:
        ValueError: for another suffix, and for a file that cannot be written.
    """
    instance("timeline", timeline, Timeline, "a distgemm.simulator.Timeline")
    suffix_of(path)  # refused before anything is drawn
    plan = timeline.plan
    shown = range(plan.world_size)[:MAX_RANKS]
    by_lane: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.lane != FLAG_LANE and event.rank < len(shown):
            by_lane[event.rank, event.lane].append(event)
    lanes = {
        rank: [lane for at, lane in sorted(by_lane, key=lambda at: lane_order(at[1])) if at == rank] for rank in shown
    }
    rows = sum(map(len, lanes.values()))
    across = 12.5
    low = 0.27 * rows + 0.14 * len(shown)
    width, height = 1.75 + across + 0.45, 1.4 + low + 0.75
    figure = new_figure(width, height)
    path_parts = ", ".join(f"{what} {time:.0f}" for what, time in timeline.critical.items())
    add_title(
        figure,
        f"{plan.schedule}: {problem_text(plan)}, {plan.world_size} rank{'s' * (plan.world_size != 1)}",
        f"Predicted on {timeline.machine.name}: {timeline.time:.0f} \u00b5s per replay, "
        f"{100 * timeline.efficiency:.0f} % of the roof",
        f"Bound by {timeline.bound} (\u00b5s of the critical path: {path_parts}); "
        f"{100 * timeline.hidden:.0f} % of the communication is hidden behind GEMMs",
    )
    axes = add_axes(figure, 1.75, 0.75, across, low)
    end = max(timeline.end, timeline.time, timeline.roof, 1e-9) * 1.01
    axes.set_xlim(0, end)
    axes.set_ylim(low, 0)
    per_us = across / end
    centre: dict[tuple[int, str], float] = {}
    y = 0.0
    for rank in shown:
        y += 0.07
        first = y
        for lane in lanes[rank]:
            centre[rank, lane] = y + 0.135
            side_label(axes, -0.06 / per_us, y + 0.135, lane, TEXT, FAINT)
            for event in by_lane[rank, lane]:
                _bar(axes, event, y + 0.03, 0.21, per_us)
            y += 0.27
        side_label(axes, -0.95 / per_us, (first + y) / 2, f"rank {rank}", TEXT + 1, INK)
        y += 0.07
        axes.axhline(y, color=GRID, linewidth=0.8)
    launch = timeline.machine.replay
    if launch:
        axes.axvspan(0, launch, color="#EEEEEE", zorder=0)
        if launch * per_us > 0.3 and low > 1.0:
            axes.text(
                launch / 2, low / 2, "graph launch", rotation=90, ha="center", va="center", size=SMALL, color=FAINT
            )
    _marks(axes, timeline, per_us)
    drawn = [flow for flow in timeline.flows if flow[0].rank < len(shown) and flow[1].rank < len(shown)]
    whose = ""
    if len(drawn) > MAX_ARROWS:
        drawn, whose = [flow for flow in drawn if flow[1].rank == 0], " on rank 0"
    for made, user in drawn if len(drawn) <= MAX_ARROWS else ():
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
        start = made.end, centre[made.rank, made.lane]
        axes.annotate("", (user.start, centre[user.rank, user.lane]), start, arrowprops=style)
    axes.set_yticks([])
    note = "\u00b5s from the end of the replay before"
    if 0 < len(drawn) <= MAX_ARROWS:
        what, did = ("a copy", "brought") if plan.mechanism == "push" else ("an op", "made for another rank")
        note += f"; arrows lead from {what} to the op{whose} that uses what it {did}"
    if plan.world_size > len(shown):
        note += f"; {len(shown)} of {plan.world_size} ranks shown"
    axes.set_xlabel(note, size=TEXT, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
    save_figure(figure, path, dots_per_inch(width, height))


# --- schedules ------------------------------------------------------------------------------------------


class _Grid:
    """A table of coloured cells with text, measured before it is drawn."""

    def __init__(self, title: str, about: str, rows: tuple[str, int], columns: tuple[str, int]) -> None:
        self.title, self.about = title, about
        self.row, self.rows = rows
        self.column, self.columns = columns
        self.cells: dict[tuple[int, int], tuple[str, list[str]]] = {}
        self.cell = (0.5, 0.3)
        self.size = TEXT

    @classmethod
    def of(cls, scheduler: DistributedTileScheduler, operand: str) -> _Grid:
        """The tiles of an operand."""
        row, column, batch = MODES[operand]
        rows, columns, batches = (getattr(scheduler.grid, mode) for mode in (row, column, batch))
        what = {"A": "held at the start", "B": "held at the start", "D": "held at the end"}[operand]
        about = f"{what}; batch 0 of {batches}" if batches > 1 else what
        grid = cls(f"{operand} ({row} x {column})", about, (row, rows), (column, columns))
        uses = _uses(scheduler, operand)
        ranks = scheduler.world_size
        for r in range(rows):
            for c in range(columns):
                owners = scheduler.owner(operand, (r, c, 0))
                lines = [f"rank {numbers_text(owners, ranks)}" if len(owners) < ranks or ranks == 1 else "every rank"]
                used = uses.get((r, c, 0), {})
                if list(used) == list(owners)[:1] and len(used) == 1:
                    lines.append(f"it. {numbers_text(used[owners[0]], scheduler.iterations)}")
                elif used and len({tuple(its) for its in used.values()}) == 1:
                    who = numbers_text(sorted(used), ranks)
                    lines += [f"by {who}", f"it. {numbers_text(next(iter(used.values())), scheduler.iterations)}"]
                elif ranks <= MAX_RANKS:
                    order = sorted(used, key=lambda rank: (used[rank], rank))
                    texts = [f"it. {numbers_text(used[rank], scheduler.iterations)} by {rank}" for rank in order]
                    lines += texts if len(texts) <= 4 else _pairs(texts)
                grid.cells[r, c] = rank_colour(owners[0], ranks), lines
        grid.measure()
        return grid

    def measure(self) -> None:
        """Make cells as large as their text; many cells are small and have no text."""
        if max(self.rows, self.columns) > MAX_TEXT_CELLS:
            side = 9.0 / max(self.rows, self.columns)
            self.cell = max(side, 0.9 / self.columns), side
            self.about += "; too many tiles for text"
            self.cells = {at: (colour, []) for at, (colour, _) in self.cells.items()}
            return
        longest = max(len(line) for _, lines in self.cells.values() for line in lines)
        most = max(len(lines) for _, lines in self.cells.values())
        self.size = TEXT if max(self.rows, self.columns) <= 16 else SMALL
        glyph = self.size * INCHES_PER_POINT
        self.cell = max(0.5, longest * GLYPH_WIDTH * glyph + 0.1), max(0.34, most * glyph * 1.3 + 0.1)

    @property
    def width(self) -> float:
        """Inches, with labels; at least the width of the title."""
        text = max(len(self.title) * HEAD * 0.58, len(self.about) * TEXT * 0.52) * INCHES_PER_POINT
        return 0.5 + max(self.cell[0] * self.columns, text - 0.3)

    @property
    def height(self) -> float:
        """Inches, with labels."""
        return self.cell[1] * self.rows + 0.72

    def draw(self, figure: Figure, x: float, y: float) -> None:
        """Draw with the lower left corner at a place given in inches."""
        width, height = self.cell[0] * self.columns, self.cell[1] * self.rows
        axes = add_axes(figure, x + 0.5, y, width, height)
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(-0.42, -0.62, self.title, size=HEAD - 1, weight="bold", va="center", color=INK)
        axes.text(-0.42, -0.38, self.about, size=TEXT, va="center", color=FAINT)
        if max(self.rows, self.columns) > MAX_TEXT_CELLS:
            colours = [[self.cells[row, column][0] for column in range(self.columns)] for row in range(self.rows)]
            add_mosaic(axes, colours, width, height)
        for (row, column), (colour, lines) in (
            self.cells.items() if max(self.rows, self.columns) <= MAX_TEXT_CELLS else ()
        ):
            x0, y0 = column * self.cell[0], row * self.cell[1]
            add_rectangle(axes, x0, y0, *self.cell, colour)
            if lines:
                text = "\n".join(lines)
                x1, y1 = x0 + self.cell[0] / 2, y0 + self.cell[1] / 2
                axes.text(x1, y1, text, ha="center", va="center", size=self.size, color=ink_on(colour), linespacing=1.2)
        for index in label_places(self.rows, self.cell[1], 0.14):
            side_label(axes, -0.05, (index + 0.5) * self.cell[1], f"{self.row} {index}", TEXT, FAINT)
        label = max(len(f"{self.column} {self.columns - 1}") * GLYPH_WIDTH * TEXT * INCHES_PER_POINT, 0.3)
        for index in label_places(self.columns, self.cell[0], label + 0.05):
            middle = (index + 0.5) * self.cell[0]
            axes.text(middle, -0.05, f"{self.column} {index}", ha="center", va="bottom", size=TEXT, color=FAINT)


def _pairs(texts: Sequence[str]) -> list[str]:
    """Two texts on each line."""
    return [", ".join(texts[at : at + 2]) for at in range(0, len(texts), 2)]


def _uses(scheduler: DistributedTileScheduler, operand: str) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """tile -> rank -> iterations in which the rank multiplies with it, or adds to it."""
    found: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, tiles in enumerate(scheduler.work.tiles):
        for iteration, tile in enumerate(tiles):
            if tile is not None:
                m, n, k, batch = tile
                at = {"A": (m, k, batch), "B": (n, k, batch), "D": (m, n, batch)}[operand]
                found[at][rank].append(iteration)
    return found


def _work_grid(scheduler: DistributedTileScheduler) -> _Grid:
    """The tile of each rank and iteration, in the colour of the rank that holds the operand that moves."""
    ranks, iterations = scheduler.world_size, scheduler.iterations
    modes = [mode for mode, extent in zip("mnkl", scheduler.grid, strict=True) if extent > 1] or ["m"]
    varying = [mode for mode in modes if _varies(scheduler, mode)] or modes[:1]
    operand = _moving(scheduler)
    what = "owns the tile of D" if operand == "D" else f"holds the tile of {operand}"
    about = f"tile that each rank multiplies; the colour is that of the rank that {what}"
    grid = _Grid("Work (rank x iteration)", about, ("rank", ranks), ("it.", iterations))
    for rank in range(ranks):
        for iteration in range(iterations):
            tile = scheduler.work_tile(iteration, rank)
            if tile is None:
                grid.cells[rank, iteration] = "#FFFFFF", ["idle"]
                continue
            at = {"A": (tile.m, tile.k, tile.l), "B": (tile.n, tile.k, tile.l), "D": (tile.m, tile.n, tile.l)}[operand]
            owner = scheduler.owner(operand, at)[0]
            text = " ".join(f"{mode}{getattr(tile, mode)}" for mode in varying)
            grid.cells[rank, iteration] = rank_colour(owner, ranks), [text]
    grid.measure()
    grid.cell = grid.cell[0], min(grid.cell[1], 0.3)
    return grid


def _varies(scheduler: DistributedTileScheduler, mode: str) -> bool:
    at = "mnkl".index(mode)
    return any(len({tile[at] for tile in tiles if tile is not None}) > 1 for tiles in scheduler.work.tiles)


def _moving(scheduler: DistributedTileScheduler) -> str:
    """The first operand of which some rank multiplies a tile that it does not hold."""
    for operand in "ABD":
        for tile, ranks in _uses(scheduler, operand).items():
            owners = scheduler.owner(operand, tile)
            if any(rank not in owners for rank in ranks):
                return operand
    return "D"


# --- plans ----------------------------------------------------------------------------------------------


def _links(axes: Axes, plan: Plan, links: dict[tuple[int, int], int], cell: float) -> None:
    ranks = plan.world_size
    axes.set_xlim(0, ranks)
    axes.set_ylim(ranks, 0)
    busiest = max(links.values(), default=1)
    axes.set_title("Bytes sent, row to column", size=HEAD - 2, weight="bold", loc="left", pad=22, color=INK)
    shades = [[_shade(links.get((src, dst), 0) / busiest) for dst in range(ranks)] for src in range(ranks)]
    if ranks > MAX_TEXT_CELLS:
        add_mosaic(axes, shades, ranks, ranks)
    for src in range(ranks) if ranks <= MAX_TEXT_CELLS else ():
        for dst in range(ranks):
            colour, size = shades[src][dst], links.get((src, dst), 0)
            add_rectangle(axes, dst, src, 1, 1, colour)
            if ranks <= 12:
                text = bytes_text(size).replace(" ", "\n") if size else ("-" if src != dst else "")
                axes.text(dst + 0.5, src + 0.5, text, ha="center", va="center", size=SMALL, color=ink_on(colour))
    if plan.ranks_per_host is not None:  # lines between hosts
        for edge in range(plan.ranks_per_host, ranks, plan.ranks_per_host):
            axes.axhline(edge, color=INK, linewidth=1.2)
            axes.axvline(edge, color=INK, linewidth=1.2)
    if ranks > 12:
        used = sorted({bytes_text(size) for size in links.values()})
        text = f"a coloured cell carries {' or '.join(used[:3])}" if used else "no cell carries anything"
        axes.text(0, ranks * 1.02, text, size=TEXT, va="top", color=INK)
    for index in label_places(ranks, cell, 0.17):
        axes.text(-0.06 / cell, index + 0.5, f"rank {index}", ha="right", va="center", size=TEXT, color=FAINT)
    for index in label_places(ranks, cell, 0.5):
        axes.text(index + 0.5, -0.06 / cell, f"rank {index}", ha="center", va="bottom", size=TEXT, color=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])


def _shade(share: float) -> str:
    """Grey for nothing, then from light to dark blue."""
    level = int(245 - 150 * share)
    return f"#{level:02X}{level + 10:02X}FF" if share else "#F6F6F6"


def _workspace(axes: Axes, plan: Plan, cell: float) -> None:
    ranks = plan.world_size
    sizes = [plan.workspace_bytes(rank) for rank in range(ranks)]
    axes.set_xlim(0, max(*sizes, 1) * 1.0)
    axes.set_ylim(ranks, 0)
    axes.set_title("Workspace of each rank", size=HEAD - 2, weight="bold", loc="left", pad=22, color=INK)
    labelled = set(label_places(ranks, cell, 0.17))
    for rank, size in enumerate(sizes):
        add_rectangle(axes, 0, rank + 0.15, size, 0.7, "#A9C8E0")
        if rank in labelled:
            axes.text(
                -0.01 * max(*sizes, 1), rank + 0.5, f"rank {rank}", ha="right", va="center", size=TEXT, color=FAINT
            )
            slots = len(plan.slots[rank])
            text = f" {bytes_text(size)} in {slots} slot{'s' * (slots != 1)}"
            axes.text(0.01, rank + 0.5, text, ha="left", va="center", size=TEXT, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])


def _plan_lanes(plan: Plan, shown: range) -> dict[int, list[str]]:
    order = ("Gemm", "Copy", "Reduce", "LocalCopy")
    return {rank: [kind for kind in order if any(op_class(op) == kind for op in plan.ops(rank))] for rank in shown}


def _rounds(plan: Plan, shown: range) -> tuple[dict[tuple[int, int], int], dict[tuple[int, str], list[tuple[int, Op]]]]:
    """A column for each round, or several if a lane has several ops in it; and the ops of each lane by column."""
    lanes: dict[tuple[int, str], list[Op]] = defaultdict(list)
    for rank in shown:
        for op in plan.ops(rank):
            if isinstance(op, (Gemm, Copy, Reduce)):
                lanes[rank, op_class(op)].append(op)
    slots: set[tuple[int, int]] = set()
    placed: dict[tuple[int, str], list[tuple[tuple[int, int], Op]]] = defaultdict(list)
    for lane, ops in lanes.items():
        seen: dict[int, int] = defaultdict(int)
        for op in ops:
            at = op.round, seen[op.round]
            seen[op.round] += 1
            slots.add(at)
            placed[lane].append((at, op))
    columns = {at: number for number, at in enumerate(sorted(slots))}
    return columns, {lane: [(columns[at], op) for at, op in ops] for lane, ops in placed.items()}


def _op_lanes(
    axes: Axes,
    plan: Plan,
    lanes: dict[int, list[str]],
    boxes: dict[tuple[int, str], list[tuple[int, Op]]],
    columns: int,
    step: float,
    room: float,
) -> None:
    """Each rank's ops in the order of the plan; all have the same width."""
    rows = sum(map(len, lanes.values()))
    low = 0.27 * rows + 0.12 * len(lanes)
    axes.set_xlim(0, max(columns, 1) * step)
    axes.set_ylim(low, 0)
    title = "Ops of each rank, in the order of the plan (left to right; not to scale in time)"
    axes.set_title(
        title, size=min(HEAD - 2, room / (len(title) * 0.6 * INCHES_PER_POINT)), weight="bold", loc="left", color=INK
    )
    y = 0.0
    for rank, kinds in lanes.items():
        y += 0.06
        first = y
        for kind in kinds:
            side_label(axes, -0.06, y + 0.135, OP_NAMES[kind], TEXT, FAINT)
            for column, op in boxes[rank, kind]:
                add_rectangle(axes, column * step, y + 0.02, step, 0.23, OP_COLOURS[kind])
                text = first_that_fits(op_labels(op)[1:] or op_labels(op), step)
                if text:
                    middle = (column + 0.5) * step
                    colour = ink_on(OP_COLOURS[kind])
                    axes.text(middle, y + 0.14, text, ha="center", va="center", size=SMALL, color=colour)
            y += 0.27
        side_label(axes, -0.85, (first + y) / 2, f"rank {rank}", TEXT + 1, INK)
        y += 0.06
        axes.axhline(y, color=GRID, linewidth=0.8)
    gemms = 'iterations ("to": and the rank that they store to)' if plan.mechanism == "store" else "iterations"
    copies = "the rank that they come from" if plan.mechanism == "pull" else "the receiving rank"
    note = f"numbers on GEMMs are {gemms}; on copies, {copies}"
    if plan.world_size > len(lanes):
        note += f"; {len(lanes)} of {plan.world_size} ranks shown"
    axes.text(0, low + 0.12, note, size=TEXT, va="top", color=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])


# --- timelines ------------------------------------------------------------------------------------------


def _bar(axes: Axes, event: Event, y: float, height: float, per_us: float) -> None:
    colour = OP_COLOURS[op_class(event.op)]
    add_rectangle(axes, event.start, y, event.end - event.start, height, colour)
    text = first_that_fits(op_labels(event.op), (event.end - event.start) * per_us)
    if text:
        middle: Any = (event.start + event.end) / 2
        axes.text(
            middle, y + height / 2, text, ha="center", va="center", size=SMALL, color=ink_on(colour), clip_on=True
        )


def _marks(axes: Axes, timeline: Timeline, per_us: float) -> None:
    """The roof and the end, named above the lanes."""
    what = "copies alone" if timeline.copies_alone > timeline.gemm_alone else "the local GEMM alone"
    marks = [
        (timeline.roof, f"roof {timeline.roof:.0f} \u00b5s: {what} ", 0.06, "#D55E00"),
        (timeline.time, f"each replay takes {timeline.time:.0f} \u00b5s ", 0.24, INK),
    ]
    for time, text, above, colour in marks:
        axes.axvline(time, color=colour, linewidth=1.2, linestyle="--" if colour != INK else "-", zorder=3)
        left = time * per_us > len(text) * GLYPH_WIDTH * TEXT * INCHES_PER_POINT
        side = "right" if left else "left"
        axes.text(time, -above, text if left else f" {text}", ha=side, va="center", size=TEXT, color=colour)
