"""What the commands share: texts as values, files that are to be written, and where tables go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "Mesh",
    "check_files",
    "check_folder",
    "count_ranks",
    "new_console",
    "new_table",
    "parse_mesh",
    "parse_numbers",
    "parse_options",
    "say",
    "write_file",
]

Mesh = tuple[int, ...]

FILE_WIDTH = 120
"""Width of tables that go to a file or a pipe."""


def say(text: str) -> None:
    """A line for people, on stderr."""
    typer.echo(text, err=True)


def new_console(stderr: bool = False) -> Console:
    """Where tables and bars go: as wide as the terminal, else ``FILE_WIDTH``."""
    from rich.console import Console

    found = Console(stderr=stderr)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Console(stderr=stderr, width=FILE_WIDTH)


def new_table(title: str | None = None) -> Table:
    """An empty table as all commands show them."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def parse_numbers(what: str, text: str) -> list[int]:
    """ "3,0,5" and "1-8" as numbers."""
    found: list[int] = []
    if negative := [part for part in text.split(",") if part.strip()[:1] == "-" and part.strip()[1:].isdecimal()]:
        raise ValueError(f"{what} takes no negative numbers, got {negative[0].strip()} in {text!r}")
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise ValueError(f"{what} is given as 4, 1,2,4 or 1-8, got {text!r}") from None
    if not found:
        raise ValueError(f"{what} {text!r} is empty")
    return found


def count_ranks(command: str, given: int | None, tp: int, otherwise: str = "") -> int:
    """How many ranks a command starts: one on each GPU, ``tp`` at most. Raises ValueError where there are not as many
    GPUs as are given, and where there is none: ``otherwise`` says what would do then."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise ValueError(f"{command} measures on GPUs, and torch finds none{otherwise}")
    size = given or min(tp, gpus)
    if size > gpus:
        raise ValueError(f"{size} ranks take as many GPUs, found {gpus}")
    return size


def parse_mesh(text: str | None) -> Mesh | None:
    """ "2x4" as sides."""
    if text is None:
        return None
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"a mesh is given as 2x4, got {text!r}") from None


def parse_options(texts: list[str] | None) -> dict[str, Any]:
    """ "key=value" pairs; values that look like integers or truth values are."""
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"a schedule's option is given as chunks=2, got {text!r}")
        words = {"true": True, "false": False}
        digits = value.removeprefix("-").isdecimal()
        found[key] = int(value) if digits else words.get(value.lower(), value)
    return found


def check_files(option: str, paths: Sequence[Path], *others: str) -> None:
    """Refuses pictures, and files that end in one of ``others``, before anything is computed, where they cannot be
    written."""
    from distgemm.draw import SUFFIXES

    suffixes = (*SUFFIXES, *others)
    for path in paths:
        if path.suffix.lower() not in suffixes:
            known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
            raise ValueError(f"{option} takes a {known} file, got {str(path)!r}")
        check_folder(option, path)
    if any(path.suffix.lower() in SUFFIXES for path in paths) and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'distgemm[pictures]'")


def check_folder(option: str, path: Path) -> None:
    """Raises ValueError where a file's folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def write_file(option: str, path: Path, write: Callable[[str], None]) -> None:
    """Writes a file that an option names, and says so."""
    try:
        write(str(path))
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror or error}") from None
    say(f"wrote {path}")
