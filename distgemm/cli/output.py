"""What the commands share: files that are to be written, and where tables go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "check_files",
    "check_folder",
    "count_ranks",
    "new_console",
    "new_table",
    "say",
    "write_file",
]

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


def check_files(option: str, paths: Sequence[Path], *others: str) -> None:
    """Refuses pictures, and files that end in one of ``others``, before anything is computed, where they cannot be
    written."""
    from distgemm.viz.figures import SUFFIXES

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
