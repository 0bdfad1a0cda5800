"""Docstrings as the API reference shows them.

In the code a docstring lists its arguments one a line, aligned, and continued by indented lines; the site shows
them as a list. Roles such as :func:`distgemm.make_plan` become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*): +(\S.*)")


def as_markdown(text: str) -> str:
    """A docstring as Markdown."""
    text = re.sub(r":(?:\w+:)?\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    # An indented block behind " ::" is a block of code; that is what Markdown makes of it.
    text = re.sub(r" ?::$", ":", text, flags=re.M)
    text = re.sub(r"(?<=\w)\*(?=\w)", r"\\*", text)
    paragraphs = text.split("\n\n")
    return "\n\n".join(_items(paragraph) or paragraph for paragraph in paragraphs)


def _items(paragraph: str) -> str | None:
    """A paragraph of "name: meaning" lines as a list; None for any other."""
    found: list[str] = []
    for line in paragraph.splitlines():
        match = ITEM.fullmatch(line)
        if match:
            found.append(f"- `{match[1]}`: {match[2]}")
        elif found and line.startswith("  "):
            found[-1] += f" {line.strip()}"
        else:
            return None
    return "\n".join(found)


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
