"""What commands print and write: tables, lines for people, files."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from distgemm.arguments import shown, write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Line",
    "check_files",
    "check_json",
    "console_width",
    "figures_table",
    "is_page",
    "new_console",
    "new_table",
    "print_figures",
    "print_wrapped",
    "say",
    "wants_text",
    "wrapped",
    "write_file",
    "write_json",
]

FILE_WIDTH = 120
"""Characters of a line in a file or a pipe."""
INDENT = "    "
STANDARD_OUTPUT = Path("-")


# --- lines and tables -----------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    typer.echo(text, err=True)


def new_console(stderr: bool = False) -> Console:
    """Where tables and progress bars go: as wide as the terminal, or else ``FILE_WIDTH``."""
    from rich.console import Console

    found = Console(stderr=stderr)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Console(stderr=stderr, width=FILE_WIDTH)


def console_width() -> int:
    """Characters of a line of standard output."""
    return new_console().width


def new_table(title: str | None = None) -> Table:
    """An empty table with the lines that all commands' tables have."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """A text in lines of at most ``width`` characters, if its words allow that."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def print_wrapped(text: str, err: bool = False) -> None:
    """Print a text in lines that fit the console."""
    for line in wrapped(text, console_width()):
        typer.echo(line, err=err)


class Line(NamedTuple):
    """A row of a table of figures.

    Attributes:
        name: what the figures are about.
        figures: short texts, one for each further column; fewer leave the last columns empty.
        style: as rich names styles.
        below: texts that stand below the row.
    """

    name: str
    figures: Sequence[str] = ()
    style: str = ""
    below: Sequence[str] = ()


def figures_table(heads: Sequence[str], rows: Iterable[Line | str], width: int) -> Text:
    """A table of names and figures in lines of at most ``width`` characters.

    A name that does not fit into the line of its figures has a line of its own.

    Args:
        heads: the title of the names, then those of the figures.
        rows: lines, and titles of groups of lines.
        width: characters of a line.
    """
    from rich.text import Text

    shown = list(rows)
    lines = [row for row in shown if isinstance(row, Line)]
    cells = [[*heads[1:]], *([*row.figures] for row in lines)]
    widths = [max(len(row[at]) if at < len(row) else 0 for row in cells) for at in range(len(heads) - 1)]
    room = max(width - sum(widths) - 2 * len(widths), len(heads[0]))
    names = min(room, max([len(heads[0]), *(len(row.name) for row in lines)]))

    def figures(row: Sequence[str]) -> str:
        return "".join(f"  {cell:>{size}}" for cell, size in zip(row, widths, strict=False)).rstrip()

    found = Text(f"{heads[0].ljust(names)}{figures(heads[1:])}\n", style="bold")
    found.append(f"{'─' * (names + sum(widths) + 2 * len(widths))}\n", style="not bold")
    for number, row in enumerate(shown):
        if isinstance(row, str):
            title = "\n".join(wrapped(row, width))
            found.append(f"\n{title}\n" if number else f"{title}\n", style="bold")
            continue
        style = row.style or "not bold"
        if len(row.name) <= names:
            found.append(f"{row.name.ljust(names)}{figures(row.figures)}".rstrip() + "\n", style=style)
        else:
            parts = [*wrapped(row.name, width), f"{' ' * names}{figures(row.figures)}".rstrip()]
            found.append("\n".join(filter(None, parts)) + "\n", style=style)
        for text in row.below:
            found.append("\n".join(wrapped(text, width, INDENT)) + "\n", style="not bold")
    found.rstrip()
    return found


def print_figures(heads: Sequence[str], rows: Iterable[Line | str], title: str | None = None) -> None:
    """Print a :func:`figures_table` as wide as the console."""
    console = new_console()
    if title is not None:
        for line in wrapped(title, console.width):
            console.print(line, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(figures_table(heads, rows, console.width), soft_wrap=True)


# --- files ----------------------------------------------------------------------------------------------


def check_files(paths: Sequence[Path], *others: str, pictures: bool = True) -> None:
    """Check the files of -o before anything is computed.

    Args:
        paths: what -o gives.
        others: further suffixes that are allowed.
        pictures: whether the suffixes of pictures are allowed.

    Raises:
        ValueError: for another suffix, for a folder that does not exist, and for pictures without matplotlib or
            pages without D3.
    """
    from distgemm.viz.canvas import SUFFIXES
    from distgemm.viz.page import d3_source

    suffixes = (*(SUFFIXES if pictures else ()), *others)
    for path in paths:
        if path.suffix.lower() not in suffixes:
            known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise ValueError(f"-o takes a {known} file, got {shown(str(path))}")
        _check_target("-o", path)
    if any(path.suffix.lower() in SUFFIXES for path in paths) and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'distgemm[pictures]'")
    if any(is_page(path) for path in paths):
        d3_source()  # raises ValueError if it is not installed


def is_page(path: Path) -> bool:
    """Whether a file of -o is a page."""
    from distgemm.viz.page import PAGE_SUFFIX

    return path.suffix.lower() == PAGE_SUFFIX


def check_json(path: Path | None) -> None:
    """Raises ValueError if the file of --json is in a folder that does not exist, or is a folder."""
    if path is not None and path != STANDARD_OUTPUT:
        _check_target("--json", path)


def _check_target(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{option} {path}: a file is needed, and this is a folder")


def write_file(path: Path, write: Callable[[str], None], option: str = "-o") -> None:
    """Write a file that an option names, and say so.

    Raises:
        ValueError: if it cannot be written.
    """
    try:
        write(str(path))
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror or error}") from None
    except ValueError as error:  # from a function of the library, which names its argument
        raise ValueError(f"{option} {str(error).removeprefix('path ')}") from None
    say(f"wrote {path}")


def wants_text(json_file: Path | None) -> bool:
    """Whether a command prints text: not if --json is on standard output."""
    return json_file != STANDARD_OUTPUT


def write_json(path: Path | None, content: Any) -> None:
    """Write what --json asks for: to its file, or to standard output; nothing without the option.

    Args:
        path: the option's value.
        content: what JSON holds, or JSON as a text.
    """
    if path is None:
        return
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    if path == STANDARD_OUTPUT:
        typer.echo(text)
    else:
        write_file(path, lambda name: write("path", name, f"{text}\n"), "--json")
