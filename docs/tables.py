"""Fills the generated blocks of the Markdown pages, and writes the pages of the schedules.

    python docs/tables.py            # write
    python docs/tables.py --check    # write nothing; exit status 1 and the names of stale blocks

A block stands between ``<!-- begin generated: NAME ARGUMENTS -->`` and ``<!-- end generated -->``. A function NAME in
docs/blocks makes its text.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from blocks import DOCS, ROOT, TABLES, benchmark, fp8, measured, own_schedule, per_tile, predicted, schedules

import distgemm

__all__ = [
    "PAGES",
    "benchmark",
    "changes",
    "fill",
    "fp8",
    "main",
    "measured",
    "own_schedule",
    "per_tile",
    "predicted",
    "schedules",
]

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"<!-- begin generated: (.+?) -->(.*?)<!-- end generated -->", re.S)


def fill(text: str) -> tuple[str, list[str]]:
    """A page with its blocks filled, and the names of the blocks that change."""
    stale = []

    def made(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[1])
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; docs/blocks has {', '.join(TABLES)}")
        body = TABLES[name](*arguments)
        body = f"\n\n{body}\n\n" if "\n" in body else body
        if body != match[2]:
            stale.append(match[1])
        return f"<!-- begin generated: {match[1]} -->{body}<!-- end generated -->"

    return BLOCK.sub(made, text), stale


def changes(pages: Sequence[Path] = PAGES) -> Iterator[tuple[Path, str | None, str]]:
    """Of the pages of schedules and these pages, those that are not as they should be.

    Yields:
        The path, the new text (None: to be removed), and what is stale.
    """
    folder = DOCS / "schedules"
    made = {folder / f"{name}.md": schedules.schedule_page(name) for name in distgemm.list_schedules()}
    made[folder / "index.md"] = schedules.schedule_index()
    for path, text in made.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield path, text, "the page"
    for path in sorted(folder.glob("*.md")):
        if path not in made:
            yield path, None, "a page of no schedule"
    for path in pages:
        text, stale = fill(path.read_text(encoding="utf-8"))
        if stale:
            yield path, text, ", ".join(stale)


def main() -> int:
    """Write the stale files, or only name them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a block is stale")
    check = parser.parse_args().check
    stale = False
    for path, text, what in changes():
        stale = True
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}: {what}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    if check and stale:
        print("run `python docs/tables.py` and commit what it writes", file=sys.stderr)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
