"""What the generated blocks of the pages say: a function for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "FORMULAS", "ROOT", "TABLES", "read", "rows_of", "table"]

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
FORMULAS: dict[str, Any] = json.loads((DOCS / "formulas.json").read_text(encoding="utf-8"))
"""Bytes on links and workspace of every schedule. Formulas are texts; docs/formulas.md explains the symbols."""
TABLES: dict[str, Callable[..., str]] = {}
"""The functions whose names may stand in a block."""


def table(make: Callable[..., str]) -> Callable[..., str]:
    """Register a function whose name may stand in a block."""
    TABLES[make.__name__] = make
    return make


def read(file: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text(encoding="utf-8"))


def rows_of(head: str, rows: list[list[str]]) -> str:
    """A Markdown table. ``head`` has the titles, with bars between them."""
    titles = head.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
