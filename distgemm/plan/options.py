"""Options of plans: parsers, as the command line and pinned schedules write them, and what hosts add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distgemm.arguments import sequence, string, wrong
from distgemm.schedulers import schedule_mesh_rank

__all__ = ["Mesh", "parse_mesh", "parse_options", "with_hosts"]

Mesh = tuple[int, ...]

MAX_DIGITS = 1000
"""Digits of an integer that a text may have. Python refuses to read integers of thousands of digits."""


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
    sides = text.lower().split("x") if isinstance(text, str) else []
    if not sides or not all(side.isdecimal() and len(side) <= MAX_DIGITS and int(side) for side in sides):
        raise wrong("mesh", "a text such as 2x4, of integers >= 1", text)
    return tuple(map(int, sides))


def parse_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """The options of "key=value" texts, as a dictionary.

    Args:
        texts: one text for each option. None: no options.

    Returns:
        The values by key. A value is an integer or a truth value if it looks like one, otherwise a string.

    Raises:
        ValueError: for a text without a key or without "=", and for a key that is given twice.
    """
    found: dict[str, Any] = {}
    words = {"true": True, "false": False}
    wanted = "a schedule's option as a text such as chunks=2"
    for text in sequence(
        "options", () if texts is None else texts, lambda name, text: string(name, text, wanted), wanted
    ):
        key, equals, value = text.partition("=")
        digits = value.removeprefix("-").isdecimal()
        if not key or not equals or (digits and len(value) > MAX_DIGITS):
            raise wrong("option", wanted, text)
        if key in found:
            raise ValueError(f"option {key} is given once, got {text!r} after {key}={found[key]}")
        found[key] = int(value) if digits else words.get(value.lower(), value)
    return found


def with_hosts(
    schedule: str, options: Mapping[str, Any], world_size: int, ranks_per_host: int | None
) -> dict[str, Any]:
    """Options of :func:`distgemm.make_plan` for ranks that may be on several hosts.

    Args:
        schedule: name of the schedule. One on a mesh of two axes has the hosts on the first.
        options: options that come first.
        world_size: number of ranks.
        ranks_per_host: number of ranks that share memory; None: all.
    """
    if ranks_per_host is None:
        return dict(options)
    nested = schedule_mesh_rank(schedule) == 2
    mesh = {"mesh": (world_size // ranks_per_host, ranks_per_host)} if nested else {}
    return {"ranks_per_host": ranks_per_host, **mesh, **options}
