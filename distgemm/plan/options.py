"""Parsers for the values of options, as the command line and pinned schedules write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Mesh", "parse_mesh", "parse_options"]

Mesh = tuple[int, ...]


def parse_mesh(text: str | None) -> Mesh | None:
    """The sides of a mesh such as "2x4", as a tuple.

    Args:
        text: the sides, separated by "x". None: no mesh.

    Returns:
        The sides. None if ``text`` is None.

    Raises:
        ValueError: for another text.
    """
    if text is None:
        return None
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"a mesh is given as 2x4, got {text!r}") from None


def parse_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """The options of "key=value" texts, as a dictionary.

    Args:
        texts: one text for each option. None: no options.

    Returns:
        The values by key. A value is an integer or a truth value if it looks like one, otherwise a string.

    Raises:
        ValueError: for a text without a key or without "=".
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
