"""What the figures share: sizes, colours, axes, labels. Needs matplotlib: the extra "pictures"."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from distgemm.arguments import path_of, write, wrong
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, link_of
from distgemm.plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, without black, which is for text."""
OP_COLOURS = {"Gemm": "#0072B2", "Copy": "#E69F00", "Reduce": "#009E73", "LocalCopy": "#CC79A7"}
OP_NAMES = {"Gemm": "GEMM", "Copy": "copy", "Reduce": "sum", "LocalCopy": "local copy"}
INK, FAINT, GRID = "#222222", "#666666", "#D0D0D0"

MAX_RANKS = 8
"""Ranks whose lanes are drawn; a note below them says how many are left out."""
MAX_TEXT_CELLS = 32
"""Rows and columns of a tile grid up to which cells contain text."""
MAX_ARROWS = 24
"""Arrows in a figure; if there are more, only those to rank 0 are drawn."""
SMALL, TEXT, HEAD = 7.0, 8.0, 12.0
INCHES_PER_POINT = 1 / 72
GLYPH_WIDTH = 0.6
"""Width of a character as a share of the font size."""


def suffix_of(path: str | Path) -> str:
    """The format of a figure, from the suffix of its file. Raises ValueError for another suffix than SUFFIXES."""
    suffix = path_of("path", path).suffix.lower()
    if suffix not in SUFFIXES:
        raise wrong("path", f"the path of a picture, a {' or '.join(SUFFIXES)} file", str(path))
    return suffix[1:]


def save_figure(figure: Figure, path: str | Path, dots: float) -> None:
    """Write a figure to a file, with so many dots per inch. Raises ValueError if the file cannot be written."""
    content = BytesIO()
    figure.savefig(content, format=suffix_of(path), dpi=dots)
    write("path", path, content.getvalue())


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text: small files, and readable by search and by screen readers.
    matplotlib.rcParams["svg.fonttype"] = "none"
    return Figure(figsize=(width, height), facecolor="white")


def dots_per_inch(width: float, height: float) -> float:
    """A resolution at which neither side exceeds 6000 pixels."""
    return min(130.0, 6000 / max(width, height))


def add_axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes without a frame, at a place given in inches."""
    whole_width, whole_height = figure.get_size_inches()
    box = (x / whole_width, y / whole_height, width / whole_width, height / whole_height)
    axes = figure.add_axes(box)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def add_title(figure: Figure, title: str, *about: str) -> None:
    """A title, and lines of text below it."""
    width, height = figure.get_size_inches()
    size = min(HEAD, (width - 0.5) / (len(title) * GLYPH_WIDTH * INCHES_PER_POINT))
    figure.text(0.25 / width, 1 - 0.18 / height, title, size=size, weight="bold", color=INK, va="top")
    for number, line in enumerate(about):
        size = min(9.5, (width - 0.5) / (len(line) * 0.52 * INCHES_PER_POINT))
        y = 1 - (0.46 + 0.22 * number) / height
        figure.text(0.25 / width, y, line, size=size, color=INK, va="top")


def rank_colour(rank: int, ranks: int) -> str:
    """The colour of a rank."""
    if ranks <= len(PALETTE):
        return PALETTE[rank]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](rank / (ranks - 1)))


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 120 else "#111111"


def add_rectangle(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """A filled rectangle with a white edge."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8))


def add_mosaic(axes: Axes, colours: list[list[str]], width: float, height: float) -> None:
    """Many cells as one image: a rectangle for each cell would take seconds."""
    from matplotlib.colors import to_rgb

    known = {colour: to_rgb(colour) for row in colours for colour in row}
    image = [[known[colour] for colour in row] for row in colours]
    axes.imshow(image, extent=(0, width, height, 0), aspect="auto", interpolation="nearest")


def side_label(axes: Axes, x: float, y: float, text: str, size: float, colour: str) -> None:
    """Text that ends at a place, for lanes and rows."""
    axes.text(x, y, text, ha="right", va="center", size=size, color=colour)


def problem_text(plan: Plan) -> str:
    """Extents and type of a plan's problem."""
    problem = plan.problem
    batches = f" x {problem.l} batches" if problem.l > 1 else ""
    return f"m {problem.m} x n {problem.n} x k {problem.k}{batches}, {problem.dtype}"


def numbers_text(values: Sequence[int], count: int) -> str:
    """Ascending numbers, with runs as 0-3; "all" if there are ``count`` of them."""
    if len(values) == count and count > 1:
        return "all"
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def label_places(count: int, size: float, room: float) -> range:
    """The indices that get a label, so far apart that the labels do not touch."""
    every = 1
    while size * every < room:
        every *= 2
    return range(0, count, every)


def op_class(op: Op) -> str:
    """The class of an op as figures colour it; copies within a rank are a class of their own."""
    return "LocalCopy" if isinstance(op, Copy) and link_of(op) is None else op.kind


def op_labels(op: Op) -> list[str]:
    """Labels of an op, from long to short."""
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


def first_that_fits(texts: Sequence[str], room: float) -> str:
    """The first text that fits into a width in inches; empty if none does."""
    return next((text for text in texts if len(text) * GLYPH_WIDTH * SMALL * INCHES_PER_POINT + 0.04 <= room), "")
