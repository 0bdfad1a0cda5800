"""Values from texts of the command line and of tuned configurations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Mesh", "parse_mesh", "parse_options"]

Mesh = tuple[int, ...]


def parse_mesh(text: str | None) -> Mesh | None:
    """The sides of a mesh from a text such as "2x4".

    Raises:
        ValueError: if the text has another form.
    """
    if text is None:
        return None
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"a mesh is given as 2x4, got {text!r}") from None


def parse_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """Options from texts such as "chunks=2". Integers and truth values are converted; other values stay texts.

    Raises:
        ValueError: if a text has another form.
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"a schedule's option is given as chunks=2, got {text!r}")
        words = {"true": True, "false": False}
        digits = value.removeprefix("-").isdecimal()
        found[key] = int(value) if digits else words.get(value.lower(), value)
    return found
