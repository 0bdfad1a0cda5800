"""The registry of schedules: names, and the functions that make the schedules.

A registered schedule is a function of the mesh and of its options. Names, aliases (the C++ names) and patterns
("ag+gemm" names the default schedule of that pattern) share one namespace. Nobody can register a name twice.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, get_args, overload

from distgemm.schedulers.scheduler import DistributedTileScheduler

__all__ = [
    "PATTERNS",
    "BuilderError",
    "Pattern",
    "check_pattern",
    "get_schedule",
    "list_patterns",
    "list_schedules",
    "register_schedule",
    "schedule_aliases",
    "schedule_doc",
    "schedule_mesh_rank",
    "schedule_options",
]

Builder = Callable[..., DistributedTileScheduler]
Pattern = Literal["ag+gemm", "gemm+rs", "gemm+ar"]
"""What a tensor-parallel GEMM does over the ranks: all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce."""
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


class BuilderError(ValueError):
    """The builder of a schedule has an error: it raised one, or it returned no scheduler.

    A builder that refuses its arguments raises ValueError, which is no BuilderError.
    """


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    build: Builder
    mesh_rank: int
    options: dict[str, Any]
    aliases: tuple[str, ...]


_entries: dict[str, _Entry] = {}
_other_names: dict[str, str] = {}
_patterns: dict[str, str] = {}


@overload
def register_schedule(name: Builder) -> Builder: ...


@overload
def register_schedule(
    name: str | None = None,
    *,
    aliases: tuple[str, ...] = (),
    default_for_pattern: str | None = None,
    mesh_rank: int = 1,
) -> Callable[[Builder], Builder]: ...


def register_schedule(
    name: str | Builder | None = None,
    *,
    aliases: tuple[str, ...] = (),
    default_for_pattern: str | None = None,
    mesh_rank: int = 1,
) -> Builder | Callable[[Builder], Builder]:
    """Decorator that registers a function ``build(mesh, **options) -> DistributedTileScheduler`` as a schedule.

    The options are the function's keyword-only arguments. Each option needs a default. The decorator may stand without
    parentheses. ``distgemm --import FILE`` makes the schedules of a file known to the command line.

    Args:
        name: name of the schedule. None: the name of the function. Plans show the name of the scheduler that ``build``
            returns, so the two should be equal.
        aliases: further names.
        default_for_pattern: the pattern for which it becomes the default schedule.
        mesh_rank: number of axes of the mesh that it takes.

    Returns:
        The function itself, or without a function the decorator.

    Raises:
        ValueError: if a name, alias or pattern is registered already, or an option has no default.
    """

    if callable(name):
        return register_schedule()(name)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"a schedule's name is a string, got {name!r}")

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
        for taken in (chosen, *aliases, *([default_for_pattern] if default_for_pattern else [])):
            if taken in _entries or taken in _other_names or taken in _patterns:
                raise ValueError(f"schedule {taken!r} is registered already")
        _entries[chosen] = _Entry(chosen, build, mesh_rank, options, aliases)
        _other_names.update(dict.fromkeys(aliases, chosen))
        if default_for_pattern:
            _patterns[default_for_pattern] = chosen
        return build

    return register


def check_pattern(pattern: str) -> Pattern:
    """``pattern`` itself, if it is one of PATTERNS.

    Args:
        pattern: any string.

    Raises:
        ValueError: if it is no pattern. The message lists the patterns.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern is one of {', '.join(PATTERNS)}, got {pattern!r}")
    return pattern


def list_schedules() -> list[str]:
    """The names of all schedules, sorted, without aliases and patterns."""
    return sorted(_entries)


def list_patterns() -> dict[str, str]:
    """The name of the default schedule of each pattern."""
    return dict(_patterns)


def _entry(name: str) -> _Entry:
    resolved = _other_names.get(name) or _patterns.get(name) or name
    if resolved not in _entries:
        known = {each.lower(): each for each in (*_entries, *_patterns, *_other_names)}
        close = difflib.get_close_matches(str(name).lower(), known, n=1)
        hint = f", did you mean {known[close[0]]!r}?" if close else "."
        if str(name).lower() == "auto":
            hint = (
                ': "auto" is for the torch functions and layers, which choose by sizes, and for distgemm.tune; here a '
                "schedule has a name."
            )
        raise ValueError(
            f"unknown schedule {name!r}{hint} Known: {', '.join(list_schedules())}; patterns: {', '.join(_patterns)}"
        )
    return _entries[resolved]


def schedule_options(name: str) -> dict[str, Any]:
    """The options of a schedule and their defaults.

    Args:
        name: name or alias of a schedule, or a pattern.

    Raises:
        ValueError: for an unknown name.
    """
    return dict(_entry(name).options)


def schedule_aliases(name: str) -> tuple[str, ...]:
    """The aliases of a schedule.

    Args:
        name: name or alias of a schedule, or a pattern.

    Raises:
        ValueError: for an unknown name.
    """
    return _entry(name).aliases


def schedule_mesh_rank(name: str) -> int:
    """The number of axes of the mesh that a schedule takes.

    Args:
        name: name or alias of a schedule, or a pattern.

    Raises:
        ValueError: for an unknown name.
    """
    return _entry(name).mesh_rank


def schedule_doc(name: str) -> str:
    """The first paragraph of the docstring of a schedule's function, as one line.

    Args:
        name: name or alias of a schedule, or a pattern.

    Raises:
        ValueError: for an unknown name.
    """
    return " ".join((inspect.getdoc(_entry(name).build) or "").split("\n\n")[0].split())


MAX_RANKS, MAX_CHUNKS = 2048, 4096
"""The largest numbers of ranks and of chunks of a schedule. A plan has ops for each chunk of each pair of ranks. With
larger numbers planning takes minutes and uses up the memory."""


def _count(what: str, value: object, most: int | None = None) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} is an integer >= 1, got {value!r}")
    if most is not None and number > most:
        raise ValueError(f"{what} is at most {most}, got {number}")
    return number


def _mesh(entry: _Entry, world_size: int | None, mesh: tuple[int, ...] | None) -> tuple[int, ...]:
    size = None if world_size is None else _count("world_size", world_size, MAX_RANKS)
    if mesh is not None:
        if not isinstance(mesh, (tuple, list)) or not mesh:
            raise ValueError(f"mesh is a tuple of integers >= 1, got {mesh!r}")
        sides = tuple(_count("each side of a mesh", side) for side in mesh)
        _count("the number of ranks of a mesh", prod(sides), MAX_RANKS)
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
    """The schedule with a name for a number of ranks.

    A second call with equal arguments returns the same object.

    Args:
        name: name or alias of a schedule, or a pattern, which means its default schedule.
        world_size: number of ranks, >= 1.
        mesh: arrangement of the ranks, with as many axes as the schedule takes. It determines ``world_size``.
        **options: options of the schedule.

    Returns:
        The scheduler that the registered function made.

    Raises:
        ValueError: for an unknown name or option (the message lists the known ones), for a world size or mesh that the
            schedule does not take, for an option out of range, and for more than MAX_RANKS ranks or MAX_CHUNKS chunks.
        BuilderError: if the registered function raises another error or returns no scheduler.
    """
    entry = _entry(name)
    chosen = dict(entry.options)
    for key, value in options.items():
        if key not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise ValueError(f"{entry.name} has no option {key!r}; its options: {known}")
        default = entry.options[key]
        counts = type(default) is int and (type(value), value) != (int, default)
        chosen[key] = _count(f"{entry.name}: {key}", value, MAX_CHUNKS) if counts else value
    return _build(entry, _mesh(entry, world_size, mesh), tuple(chosen.items()))


@lru_cache(maxsize=1024)
def _build(entry: _Entry, mesh: tuple[int, ...], options: tuple[tuple[str, Hashable], ...]) -> DistributedTileScheduler:
    try:
        found = entry.build(mesh, **dict(options))
    except ValueError:  # the builder refuses its arguments
        raise
    except Exception as error:
        raise BuilderError(
            f"the builder of schedule {entry.name!r}, {_where(entry)}, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, DistributedTileScheduler):
        raise BuilderError(
            f"the builder of schedule {entry.name!r}, {_where(entry)}, returns a DistributedTileScheduler; it returned "
            f"{found!r}"
        )
    return found


def _where(entry: _Entry) -> str:
    return f"{entry.build.__module__}.{entry.build.__qualname__}"
