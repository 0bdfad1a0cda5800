"""Pictures of schedules, plans and timelines, as .svg or .png. Needs matplotlib: the extra "pictures"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgemm.plan.ops import Copy, Gemm, Op, Reduce, link_of
from distgemm.plan.plan import Plan
from distgemm.schedulers import DistributedTileScheduler
from distgemm.schedulers.scheduler import MODES
from distgemm.simulator.engine import FLAGS, Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_plan", "draw_schedule", "draw_timeline"]

SUFFIXES = (".svg", ".png")

# Okabe and Ito's colours, which the colour-blind tell apart; black left out, for text.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
COLOUR = {"Gemm": "#0072B2", "Copy": "#E69F00", "Reduce": "#009E73", "LocalCopy": "#CC79A7"}
NAMED = {"Gemm": "GEMM", "Copy": "copy", "Reduce": "sum", "LocalCopy": "local copy"}
INK, FAINT, GRID = "#222222", "#666666", "#D0D0D0"

RANKS = 8
"""Ranks whose lanes are drawn; what is left out is said below them."""
CELLS = 32
"""Rows and columns of a tile grid up to which cells carry text."""
ARROWS = 24
"""Arrows that a picture shows; where there would be more, only those to rank 0."""
SMALL, TEXT, HEAD = 7.0, 8.0, 12.0
POINT = 1 / 72
GLYPH = 0.6
"""Width of a character, in font sizes."""


def draw_schedule(scheduler: DistributedTileScheduler, path: str | Path) -> None:
    """Draw a schedule's tile grids of A, B and D, coloured by the rank that holds each tile, with the iterations in
    which they are multiplied, and the table of who multiplies what when.

    Raises ValueError for another suffix than .svg and .png.
    """
    kind = _suffix(path)
    grids = [_Grid.of(scheduler, operand) for operand in "ABD"]
    work = _work_grid(scheduler)
    head, gap, left = 0.95, 0.55, 0.35
    top_row = max(grid.height for grid in grids)
    width = max(left + sum(grid.width for grid in grids) + gap * 2 + 0.3, left + work.width + 0.3, 7.5)
    height = head + top_row + 0.35 + work.height + 0.25
    figure = _figure(width, height)
    mesh = " x ".join(map(str, scheduler.mesh))
    ranks = f"{scheduler.world_size} rank{'s' * (scheduler.world_size != 1)}" + (
        f" in a mesh {mesh}" if len(scheduler.mesh) > 1 else ""
    )
    about = "Each tile has the colour and the number of the rank that holds it; it. = iteration that multiplies it."
    if max(*scheduler.grid[:3], scheduler.world_size) > CELLS:
        last = scheduler.world_size - 1
        about = f"Each tile has the colour of the rank that holds it, from dark (rank 0) to light (rank {last})."
    _title(figure, f"{scheduler.name}: {ranks}, {scheduler.iterations} iterations each", about)
    x = left
    for grid in grids:
        grid.draw(figure, x, height - head - grid.height)
        x += grid.width + gap
    work.draw(figure, left, 0.25)
    figure.savefig(path, format=kind, dpi=_dpi(width, height))


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw a plan: bytes from rank to rank, workspace of each rank, and the order of each rank's ops.

    Raises ValueError for another suffix than .svg and .png.
    """
    kind = _suffix(path)
    ranks = plan.world_size
    cell = min(0.62, 11.0 / ranks) if ranks > 12 else 0.72
    side = max(cell * ranks, 1.2)
    shown = range(ranks)[:RANKS]
    columns, boxes = _rounds(plan, shown)
    step = 0.5 if len(columns) <= 24 else max(0.16, 12.0 / len(columns))
    bars = max(3.0, min(5.0, side))
    width = max(1.0 + side + 1.6 + bars + 1.2, 1.6 + step * len(columns) + 0.5, 8.0)
    lanes = _plan_lanes(plan, shown)
    rows = sum(len(of_rank) for of_rank in lanes.values())
    low = 0.27 * rows + 0.12 * len(shown)
    height = 0.75 + 0.6 + side + 0.75 + low + 0.55
    figure = _figure(width, height)
    links = plan.link_bytes()
    total, busiest = sum(links.values()), max(links.values(), default=0)
    moved = f"{_bytes(total)} move in all, at most {_bytes(busiest)} over one link" if links else "nothing moves"
    _title(figure, f"{plan.schedule}: {_problem(plan)}", f"Plan for {ranks} rank{'s' * (ranks != 1)}; {moved}.")
    _links(_axes(figure, 1.0, height - 1.35 - side, side, side), plan, links, cell)
    _workspace(_axes(figure, 1.0 + side + 1.6, height - 1.35 - side, bars, side), plan, cell)
    axes = _axes(figure, 1.6, 0.55, step * len(columns), low)
    _op_lanes(axes, plan, lanes, boxes, len(columns), step, width - 1.7)
    figure.savefig(path, format=kind, dpi=_dpi(width, height))


def draw_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw what every rank does when, as predicted.

    Raises ValueError for another suffix than .svg and .png.
    """
    kind = _suffix(path)
    plan = timeline.plan
    shown = range(plan.world_size)[:RANKS]
    by_lane: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.lane != FLAGS and event.rank < len(shown):
            by_lane[event.rank, event.lane].append(event)
    lanes = {rank: [lane for at, lane in sorted(by_lane, key=_lane_order) if at == rank] for rank in shown}
    rows = sum(map(len, lanes.values()))
    across = 12.5
    low = 0.27 * rows + 0.14 * len(shown)
    width, height = 1.75 + across + 0.45, 1.4 + low + 0.75
    figure = _figure(width, height)
    path_parts = ", ".join(f"{what} {time:.0f}" for what, time in timeline.critical.items())
    _title(
        figure,
        f"{plan.schedule}: {_problem(plan)}, {plan.world_size} rank{'s' * (plan.world_size != 1)}",
        f"Predicted on {timeline.machine.name}: {timeline.time:.0f} \u00b5s per replay, "
        f"{100 * timeline.efficiency:.0f} % of the roof",
        f"Bound by {timeline.bound} (\u00b5s of the critical path: {path_parts}); "
        f"{100 * timeline.hidden:.0f} % of the communication is hidden behind GEMMs",
    )
    axes = _axes(figure, 1.75, 0.75, across, low)
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
            _side(axes, -0.06 / per_us, y + 0.135, lane, TEXT, FAINT)
            for event in by_lane[rank, lane]:
                _bar(axes, event, y + 0.03, 0.21, per_us)
            y += 0.27
        _side(axes, -0.95 / per_us, (first + y) / 2, f"rank {rank}", TEXT + 1, INK)
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
    if len(drawn) > ARROWS:
        drawn, whose = [flow for flow in drawn if flow[1].rank == 0], " on rank 0"
    for made, user in drawn if len(drawn) <= ARROWS else ():
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
        start = made.end, centre[made.rank, made.lane]
        axes.annotate("", (user.start, centre[user.rank, user.lane]), start, arrowprops=style)
    axes.set_yticks([])
    note = "\u00b5s from the end of the replay before"
    if 0 < len(drawn) <= ARROWS:
        what, did = ("a copy", "brought") if plan.mechanism == "push" else ("an op", "made for another rank")
        note += f"; arrows lead from {what} to the op{whose} that uses what it {did}"
    if plan.world_size > len(shown):
        note += f"; {len(shown)} of {plan.world_size} ranks shown"
    axes.set_xlabel(note, size=TEXT, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
    figure.savefig(path, format=kind, dpi=_dpi(width, height))


# --- figures --------------------------------------------------------------------------------------------


def _suffix(path: str | Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"a picture is written as {' or '.join(SUFFIXES)}, got {str(path)!r}")
    return suffix[1:]


def _figure(width: float, height: float) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text: small files, and readable by search and by screen readers.
    matplotlib.rcParams["svg.fonttype"] = "none"
    return Figure(figsize=(width, height), facecolor="white")


def _dpi(width: float, height: float) -> float:
    """Sharp, and no longer than 6000 pixels."""
    return min(130.0, 6000 / max(width, height))


def _axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    whole_width, whole_height = figure.get_size_inches()
    box = (x / whole_width, y / whole_height, width / whole_width, height / whole_height)
    axes = figure.add_axes(box)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _title(figure: Figure, title: str, *about: str) -> None:
    width, height = figure.get_size_inches()
    size = min(HEAD, (width - 0.5) / (len(title) * GLYPH * POINT))
    figure.text(0.25 / width, 1 - 0.18 / height, title, size=size, weight="bold", color=INK, va="top")
    for number, line in enumerate(about):
        size = min(9.5, (width - 0.5) / (len(line) * 0.52 * POINT))
        y = 1 - (0.46 + 0.22 * number) / height
        figure.text(0.25 / width, y, line, size=size, color=INK, va="top")


def _rank_colour(rank: int, ranks: int) -> str:
    if ranks <= len(PALETTE):
        return PALETTE[rank]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](rank / (ranks - 1)))


def _ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 120 else "#111111"


def _rectangle(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8))


def _mosaic(axes: Axes, colours: list[list[str]], width: float, height: float) -> None:
    """Many cells as one image: a rectangle for each takes seconds."""
    from matplotlib.colors import to_rgb

    known = {colour: to_rgb(colour) for row in colours for colour in row}
    image = [[known[colour] for colour in row] for row in colours]
    axes.imshow(image, extent=(0, width, height, 0), aspect="auto", interpolation="nearest")


def _side(axes: Axes, x: float, y: float, text: str, size: float, colour: str) -> None:
    axes.text(x, y, text, ha="right", va="center", size=size, color=colour)


def _problem(plan: Plan) -> str:
    problem = plan.problem
    batches = f" x {problem.l} batches" if problem.l > 1 else ""
    return f"m {problem.m} x n {problem.n} x k {problem.k}{batches}, {problem.dtype}"


def _bytes(size: float) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"


def _numbers(values: Sequence[int], count: int) -> str:
    """Ascending numbers, runs of them as 0-3; "all" if there are so many."""
    if len(values) == count and count > 1:
        return "all"
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


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
                lines = [f"rank {_numbers(owners, ranks)}" if len(owners) < ranks or ranks == 1 else "every rank"]
                used = uses.get((r, c, 0), {})
                if list(used) == list(owners)[:1] and len(used) == 1:
                    lines.append(f"it. {_numbers(used[owners[0]], scheduler.iterations)}")
                elif used and len({tuple(its) for its in used.values()}) == 1:
                    who = _numbers(sorted(used), ranks)
                    lines += [f"by {who}", f"it. {_numbers(next(iter(used.values())), scheduler.iterations)}"]
                elif ranks <= RANKS:
                    order = sorted(used, key=lambda rank: (used[rank], rank))
                    texts = [f"it. {_numbers(used[rank], scheduler.iterations)} by {rank}" for rank in order]
                    lines += texts if len(texts) <= 4 else _pairs(texts)
                grid.cells[r, c] = _rank_colour(owners[0], ranks), lines
        grid.measure()
        return grid

    def measure(self) -> None:
        """Cells as large as their text, or small ones without text."""
        if max(self.rows, self.columns) > CELLS:
            side = 9.0 / max(self.rows, self.columns)
            self.cell = max(side, 0.9 / self.columns), side
            self.about += "; too many tiles for text"
            self.cells = {at: (colour, []) for at, (colour, _) in self.cells.items()}
            return
        longest = max(len(line) for _, lines in self.cells.values() for line in lines)
        most = max(len(lines) for _, lines in self.cells.values())
        self.size = TEXT if max(self.rows, self.columns) <= 16 else SMALL
        self.cell = max(0.5, longest * GLYPH * self.size * POINT + 0.1), max(0.34, most * self.size * POINT * 1.3 + 0.1)

    @property
    def width(self) -> float:
        """Inches, with labels; as wide as the title at least."""
        text = max(len(self.title) * HEAD * 0.58, len(self.about) * TEXT * 0.52) * POINT
        return 0.5 + max(self.cell[0] * self.columns, text - 0.3)

    @property
    def height(self) -> float:
        """Inches, with labels."""
        return self.cell[1] * self.rows + 0.72

    def draw(self, figure: Figure, x: float, y: float) -> None:
        """Draw with the lower left corner at a place given in inches."""
        width, height = self.cell[0] * self.columns, self.cell[1] * self.rows
        axes = _axes(figure, x + 0.5, y, width, height)
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(-0.42, -0.62, self.title, size=HEAD - 1, weight="bold", va="center", color=INK)
        axes.text(-0.42, -0.38, self.about, size=TEXT, va="center", color=FAINT)
        if max(self.rows, self.columns) > CELLS:
            colours = [[self.cells[row, column][0] for column in range(self.columns)] for row in range(self.rows)]
            _mosaic(axes, colours, width, height)
        for (row, column), (colour, lines) in self.cells.items() if max(self.rows, self.columns) <= CELLS else ():
            x0, y0 = column * self.cell[0], row * self.cell[1]
            _rectangle(axes, x0, y0, *self.cell, colour)
            if lines:
                text = "\n".join(lines)
                x1, y1 = x0 + self.cell[0] / 2, y0 + self.cell[1] / 2
                axes.text(x1, y1, text, ha="center", va="center", size=self.size, color=_ink(colour), linespacing=1.2)
        for index in _ticks(self.rows, self.cell[1], 0.14):
            _side(axes, -0.05, (index + 0.5) * self.cell[1], f"{self.row} {index}", TEXT, FAINT)
        label = max(len(f"{self.column} {self.columns - 1}") * GLYPH * TEXT * POINT, 0.3)
        for index in _ticks(self.columns, self.cell[0], label + 0.05):
            middle = (index + 0.5) * self.cell[0]
            axes.text(middle, -0.05, f"{self.column} {index}", ha="center", va="bottom", size=TEXT, color=FAINT)


def _pairs(texts: Sequence[str]) -> list[str]:
    """Two to a line."""
    return [", ".join(texts[at : at + 2]) for at in range(0, len(texts), 2)]


def _ticks(count: int, size: float, room: float) -> range:
    """Every so many indices that their labels do not touch."""
    every = 1
    while size * every < room:
        every *= 2
    return range(0, count, every)


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
    """Ranks by iterations: the tile, in the colour of the rank that holds what has to move for it."""
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
            grid.cells[rank, iteration] = _rank_colour(owner, ranks), [text]
    grid.measure()
    grid.cell = grid.cell[0], min(grid.cell[1], 0.3)
    return grid


def _varies(scheduler: DistributedTileScheduler, mode: str) -> bool:
    at = "mnkl".index(mode)
    return any(len({tile[at] for tile in tiles if tile is not None}) > 1 for tiles in scheduler.work.tiles)


def _moving(scheduler: DistributedTileScheduler) -> str:
    """The first operand of which a rank multiplies tiles that it does not hold."""
    for operand in "ABD":
        for tile, ranks in _uses(scheduler, operand).items():
            owners = scheduler.owner(operand, tile)
            if any(rank not in owners for rank in ranks):
                return operand
    return "D"


# --- plans ----------------------------------------------------------------------------------------------


def _what(op: Op) -> str:
    return "LocalCopy" if isinstance(op, Copy) and link_of(op) is None else op.kind


def _label(op: Op) -> list[str]:
    """What to write on an op, the longest that fits."""
    link = link_of(op)
    if isinstance(op, Copy) and link is not None:
        way, other = ("to", link[1]) if op.rank == link[0] else ("from", link[0])
        return [f"{op.operand}{op.tile[0]},{op.tile[1]} {way} rank {other}", f"{way} {other}"]
    if isinstance(op, Gemm):
        stored = [] if link is None else [f"iteration {op.iteration} to rank {link[1]}", f"{op.iteration} to {link[1]}"]
        return [*stored, f"iteration {op.iteration}", str(op.iteration)]
    if isinstance(op, Reduce):
        return ["sum", "+"]
    assert isinstance(op, Copy)
    return ["local copy", "to D" if op.dst.buffer == "D" else "to slot"]


def _links(axes: Axes, plan: Plan, links: dict[tuple[int, int], int], cell: float) -> None:
    ranks = plan.world_size
    axes.set_xlim(0, ranks)
    axes.set_ylim(ranks, 0)
    busiest = max(links.values(), default=1)
    axes.set_title("Bytes sent, row to column", size=HEAD - 2, weight="bold", loc="left", pad=22, color=INK)
    shades = [[_shade(links.get((src, dst), 0) / busiest) for dst in range(ranks)] for src in range(ranks)]
    if ranks > CELLS:
        _mosaic(axes, shades, ranks, ranks)
    for src in range(ranks) if ranks <= CELLS else ():
        for dst in range(ranks):
            colour, size = shades[src][dst], links.get((src, dst), 0)
            _rectangle(axes, dst, src, 1, 1, colour)
            if ranks <= 12:
                text = _bytes(size).replace(" ", "\n") if size else ("-" if src != dst else "")
                axes.text(dst + 0.5, src + 0.5, text, ha="center", va="center", size=SMALL, color=_ink(colour))
    if ranks > 12:
        used = sorted({_bytes(size) for size in links.values()})
        text = f"a coloured cell carries {' or '.join(used[:3])}" if used else "no cell carries anything"
        axes.text(0, ranks * 1.02, text, size=TEXT, va="top", color=INK)
    for index in _ticks(ranks, cell, 0.17):
        axes.text(-0.06 / cell, index + 0.5, f"rank {index}", ha="right", va="center", size=TEXT, color=FAINT)
    for index in _ticks(ranks, cell, 0.5):
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
    labelled = set(_ticks(ranks, cell, 0.17))
    for rank, size in enumerate(sizes):
        _rectangle(axes, 0, rank + 0.15, size, 0.7, "#A9C8E0")
        if rank in labelled:
            axes.text(
                -0.01 * max(*sizes, 1), rank + 0.5, f"rank {rank}", ha="right", va="center", size=TEXT, color=FAINT
            )
            slots = len(plan.slots[rank])
            text = f" {_bytes(size)} in {slots} slot{'s' * (slots != 1)}"
            axes.text(0.01, rank + 0.5, text, ha="left", va="center", size=TEXT, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])


def _plan_lanes(plan: Plan, shown: range) -> dict[int, list[str]]:
    order = ("Gemm", "Copy", "Reduce", "LocalCopy")
    return {rank: [kind for kind in order if any(_what(op) == kind for op in plan.ops(rank))] for rank in shown}


def _rounds(plan: Plan, shown: range) -> tuple[dict[tuple[int, int], int], dict[tuple[int, str], list[tuple[int, Op]]]]:
    """Columns of the rounds, several where a lane has several ops in one, and the ops of each lane by column."""
    lanes: dict[tuple[int, str], list[Op]] = defaultdict(list)
    for rank in shown:
        for op in plan.ops(rank):
            if isinstance(op, (Gemm, Copy, Reduce)):
                lanes[rank, _what(op)].append(op)
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
    """Each rank's ops in the order of the plan, equal widths: order and not time."""
    rows = sum(map(len, lanes.values()))
    low = 0.27 * rows + 0.12 * len(lanes)
    axes.set_xlim(0, max(columns, 1) * step)
    axes.set_ylim(low, 0)
    title = "Ops of each rank, in the order of the plan (left to right; not to scale in time)"
    axes.set_title(title, size=min(HEAD - 2, room / (len(title) * 0.6 * POINT)), weight="bold", loc="left", color=INK)
    y = 0.0
    for rank, kinds in lanes.items():
        y += 0.06
        first = y
        for kind in kinds:
            _side(axes, -0.06, y + 0.135, NAMED[kind], TEXT, FAINT)
            for column, op in boxes[rank, kind]:
                _rectangle(axes, column * step, y + 0.02, step, 0.23, COLOUR[kind])
                text = _fitting(_label(op)[1:] or _label(op), step)
                if text:
                    middle = (column + 0.5) * step
                    colour = _ink(COLOUR[kind])
                    axes.text(middle, y + 0.14, text, ha="center", va="center", size=SMALL, color=colour)
            y += 0.27
        _side(axes, -0.85, (first + y) / 2, f"rank {rank}", TEXT + 1, INK)
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


def _fitting(texts: Sequence[str], room: float) -> str:
    """The first text that fits into so many inches, or none."""
    return next((text for text in texts if len(text) * GLYPH * SMALL * POINT + 0.04 <= room), "")


# --- timelines ------------------------------------------------------------------------------------------


def _lane_order(at: tuple[int, str]) -> tuple[int, int, str]:
    rank, lane = at
    return rank, ("gemm", "copy", "network", "local").index(lane.split()[0]), lane


def _bar(axes: Axes, event: Event, y: float, height: float, per_us: float) -> None:
    colour = COLOUR[_what(event.op)]
    _rectangle(axes, event.start, y, event.end - event.start, height, colour)
    text = _fitting(_label(event.op), (event.end - event.start) * per_us)
    if text:
        middle: Any = (event.start + event.end) / 2
        axes.text(middle, y + height / 2, text, ha="center", va="center", size=SMALL, color=_ink(colour), clip_on=True)


def _marks(axes: Axes, timeline: Timeline, per_us: float) -> None:
    """The roof and the end, named above the lanes."""
    what = "copies alone" if timeline.copies_alone > timeline.gemm_alone else "the local GEMM alone"
    marks = [
        (timeline.roof, f"roof {timeline.roof:.0f} \u00b5s: {what} ", 0.06, "#D55E00"),
        (timeline.time, f"each replay takes {timeline.time:.0f} \u00b5s ", 0.24, INK),
    ]
    for time, text, above, colour in marks:
        axes.axvline(time, color=colour, linewidth=1.2, linestyle="--" if colour != INK else "-", zorder=3)
        left = time * per_us > len(text) * GLYPH * TEXT * POINT
        side = "right" if left else "left"
        axes.text(time, -above, text if left else f" {text}", ha=side, va="center", size=TEXT, color=colour)
