"""Schedules by name.

A schedule is registered as a function of the mesh and of its options. Names, aliases (the C++ names) and
families ("ag+gemm": the default schedule of a kind) share one namespace; a name is given once.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from distgemm.schedulers.scheduler import DistributedTileScheduler

__all__ = [
    "get_schedule",
    "list_families",
    "list_schedules",
    "register_schedule",
    "schedule_aliases",
    "schedule_doc",
    "schedule_mesh_rank",
    "schedule_options",
]

Builder = Callable[..., DistributedTileScheduler]


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    build: Builder
    mesh_rank: int
    options: dict[str, Any]
    aliases: tuple[str, ...]


_entries: dict[str, _Entry] = {}
_other_names: dict[str, str] = {}
_families: dict[str, str] = {}


def register_schedule(
    name: str | None = None, *, aliases: tuple[str, ...] = (), default_of: str | None = None, mesh_rank: int = 1
) -> Callable[[Builder], Builder]:
    """Register ``build(mesh, **options) -> DistributedTileScheduler`` under a name (its own by default).

    mesh_rank:  number of axes of the mesh it takes
    default_of: the family whose default it is

    The options are the function's keyword-only arguments, each with a default. Raises ValueError when a
    name, alias or family is taken already. The command line knows what a file registers after
    ``distgemm --import FILE``.
    """

    def register(build: Builder) -> Builder:
        chosen = name or build.__name__
        options = {}
        for position, (key, parameter) in enumerate(inspect.signature(build).parameters.items()):
            if position and parameter.kind is not parameter.KEYWORD_ONLY:
                raise ValueError(f"schedule {chosen!r}: option {key!r} is keyword-only: build(mesh, *, {key}=...)")
            if parameter.kind is parameter.KEYWORD_ONLY:
                if parameter.default is parameter.empty:
                    raise ValueError(f"schedule {chosen!r}: option {key!r} needs a default")
                options[key] = parameter.default
        for taken in (chosen, *aliases, *([default_of] if default_of else [])):
            if taken in _entries or taken in _other_names or taken in _families:
                raise ValueError(f"schedule {taken!r} is registered already")
        _entries[chosen] = _Entry(chosen, build, mesh_rank, options, aliases)
        _other_names.update(dict.fromkeys(aliases, chosen))
        if default_of:
            _families[default_of] = chosen
        return build

    return register


def list_schedules() -> list[str]:
    """Names of all schedules: no aliases, no families."""
    return sorted(_entries)


def list_families() -> dict[str, str]:
    """Each family and the schedule that is its default."""
    return dict(_families)


def _entry(name: str) -> _Entry:
    resolved = _other_names.get(name) or _families.get(name) or name
    if resolved not in _entries:
        close = difflib.get_close_matches(str(name), _entries, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"unknown schedule {name!r}{hint} Known: {', '.join(list_schedules())}; families: {', '.join(_families)}"
        )
    return _entries[resolved]


def schedule_options(name: str) -> dict[str, Any]:
    """The options of a schedule and their defaults."""
    return dict(_entry(name).options)


def schedule_aliases(name: str) -> tuple[str, ...]:
    """Other names of a schedule."""
    return _entry(name).aliases


def schedule_mesh_rank(name: str) -> int:
    """The number of axes of the mesh that a schedule takes."""
    return _entry(name).mesh_rank


def schedule_doc(name: str) -> str:
    """What a schedule does, in one line: the first paragraph of its builder's docstring."""
    return " ".join((inspect.getdoc(_entry(name).build) or "").split("\n\n")[0].split())


def _count(what: str, value: object) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} is an integer >= 1, got {value!r}")
    return number


def _mesh(entry: _Entry, world_size: int | None, mesh: tuple[int, ...] | None) -> tuple[int, ...]:
    size = None if world_size is None else _count("world_size", world_size)
    if mesh is not None:
        if not isinstance(mesh, (tuple, list)) or not mesh:
            raise ValueError(f"mesh is a tuple of integers >= 1, got {mesh!r}")
        sides = tuple(_count("each side of a mesh", side) for side in mesh)
        if size not in (None, prod(sides)):
            raise ValueError(f"mesh {sides} has {prod(sides)} ranks, world_size says {size}")
        if len(sides) != entry.mesh_rank:
            raise ValueError(f"{entry.name} takes a mesh of {entry.mesh_rank} axes, got {sides}")
        return sides
    if size is None:
        raise ValueError(f"{entry.name} needs a world_size or a mesh")
    if entry.mesh_rank > 1:
        raise ValueError(f"{entry.name} takes a mesh of {entry.mesh_rank} axes, got world_size={size} alone")
    return (size,)


def get_schedule(
    name: str, world_size: int | None = None, *, mesh: tuple[int, ...] | None = None, **options: Hashable
) -> DistributedTileScheduler:
    """The schedule of this name (or alias, or family) for a number of ranks.

    world_size: number of ranks, >= 1
    mesh:       their arrangement, for schedules on a mesh; fixes world_size

    Raises ValueError for an unknown name or option (the message lists the known ones), for a world size or
    mesh that the schedule cannot take, and for an option out of range. A second call with equal arguments
    returns the same object.
    """
    entry = _entry(name)
    chosen = dict(entry.options)
    for key, value in options.items():
        if key not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise ValueError(f"{entry.name} has no option {key!r}; its options: {known}")
        default = entry.options[key]
        counts = type(default) is int and (type(value), value) != (int, default)
        chosen[key] = _count(f"{entry.name}: {key}", value) if counts else value
    return _build(entry, _mesh(entry, world_size, mesh), tuple(chosen.items()))


@lru_cache(maxsize=1024)
def _build(entry: _Entry, mesh: tuple[int, ...], options: tuple[tuple[str, Hashable], ...]) -> DistributedTileScheduler:
    return entry.build(mesh, **dict(options))
