"""The registry of schedules: names, and the functions that make the schedules.

A registered schedule is a function of the mesh and of its options. Names, aliases (the C++ names) and patterns
("ag+gemm" names the default schedule of that pattern) share one namespace. Nobody can register a name twice.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args, overload

from distgemm.arguments import function, hashable, integer, integers, member, sequence, shown, string, wrong
from distgemm.schedulers.cache import BoundedCache
from distgemm.schedulers.scheduler import MAX_TILES, DistributedTileScheduler

__all__ = [
    "PATTERNS",
    "BuilderError",
    "Pattern",
    "check_options",
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
Pattern = Literal["ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a", "a2a+gemm"]
"""What a GEMM does over the ranks: all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce, GEMM + all-to-all,
all-to-all + GEMM."""
PATTERNS: tuple[Pattern, ...] = ("ag+gemm", "gemm+rs", "gemm+ar")
"""The patterns of tensor parallelism. These have an unfused program."""


MAX_RANKS, MAX_CHUNKS = 8192, 4096
"""The largest numbers of ranks and of chunks of a schedule. MAX_TILES bounds their product."""
MAX_AXES = 8
"""The largest number of axes of a mesh."""
RESERVED = ("all", "auto", "unfused")
"""Texts that stand in the place of a schedule's name."""


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
        ValueError: if a name, alias or pattern is no string or is registered already, if ``mesh_rank`` is no integer
            >= 1, if the function takes no mesh, and if an option has no default.
    """

    if callable(name):
        return register_schedule()(name)
    if name is not None:
        _new_name("name", name)
    if default_for_pattern is not None:
        _new_name("default_for_pattern", default_for_pattern)
    others = sequence("aliases", aliases, _new_name, "a tuple of names, such as ('name',)")
    axes = integer("mesh_rank", mesh_rank, 1, MAX_AXES)

    def register(build: Builder) -> Builder:
        function("build", build, "a function build(mesh, *, option=...)")
        chosen = name or build.__name__
        options = {}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = next(iter(inspect.signature(build).parameters.values()), None)
        if first is None or first.kind not in positional:
            raise ValueError(f"schedule {chosen!r}: its function takes the mesh first: build(mesh, *, option=...)")
        for position, (key, parameter) in enumerate(inspect.signature(build).parameters.items()):
            if position and parameter.kind is not parameter.KEYWORD_ONLY:
                raise ValueError(f"schedule {chosen!r}: option {key!r} is keyword-only: build(mesh, *, {key}=...)")
            if parameter.kind is parameter.KEYWORD_ONLY:
                if parameter.default is parameter.empty:
                    raise ValueError(f"schedule {chosen!r}: option {key!r} needs a default")
                options[key] = parameter.default
        names = (chosen, *others, *([default_for_pattern] if default_for_pattern else []))
        for place, taken in enumerate(names):
            if taken in _entries or taken in _other_names or taken in _patterns:
                raise ValueError(f"schedule {taken!r} is registered already: a name is given once")
            if taken in names[:place]:
                raise ValueError(f"schedule {chosen!r} has the name {taken!r} twice")
        _entries[chosen] = _Entry(chosen, build, axes, options, others)
        _other_names.update(dict.fromkeys(others, chosen))
        if default_for_pattern:
            _patterns[default_for_pattern] = chosen
        return build

    return register


def _new_name(argument: str, value: object) -> str:
    """A name to register. Texts such as "gemm+rs chunks=2" contain names, so names have neither blanks nor "="."""
    wanted = f"a string without blanks and '=', and none of {', '.join(RESERVED)}"
    name = string(argument, value, wanted)
    if name in RESERVED or "=" in name or name.split() != [name]:
        raise wrong(argument, wanted, value)
    return name


def check_pattern(pattern: str, among: Sequence[Pattern] = get_args(Pattern)) -> Pattern:
    """``pattern`` itself, if it is one of some patterns.

    Args:
        pattern: any string.
        among: the patterns.

    Raises:
        ValueError: if it is no pattern. The message lists the patterns.
    """
    return member("pattern", pattern, among)


def list_schedules() -> list[str]:
    """The names of all schedules, sorted, without aliases and patterns."""
    return sorted(_entries)


def list_patterns() -> dict[str, str]:
    """The name of the default schedule of each pattern."""
    return dict(_patterns)


def _entry(name: str) -> _Entry:
    string("schedule", name, "the name of one of distgemm.list_schedules(), or a pattern")
    resolved = _other_names.get(name) or _patterns.get(name) or name
    if resolved not in _entries:
        known = {each.lower(): each for each in (*_entries, *_patterns, *_other_names)}
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f", did you mean {known[close[0]]!r}?" if close else "."
        if name.lower() == "auto":
            hint = (
                ': "auto" is for the torch functions and layers, which choose by sizes, and for distgemm.tune; here a '
                "schedule has a name."
            )
        known_names = f"Known: {', '.join(list_schedules())}; patterns: {', '.join(_patterns)}"
        raise ValueError(f"unknown schedule {shown(name)}{hint} {known_names}")
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


def _mesh(entry: _Entry, world_size: int | None, mesh: tuple[int, ...] | None) -> tuple[int, ...]:
    size = None if world_size is None else integer("world_size", world_size, 1, MAX_RANKS)
    if mesh is not None:
        sides = integers("mesh", mesh, 1, MAX_RANKS)
        if not sides or prod(sides) > MAX_RANKS:
            raise wrong("mesh", f"a tuple of integers >= 1 whose product is at most {MAX_RANKS}", mesh)
        if size not in (None, prod(sides)):
            raise ValueError(f"world_size is an integer that is the product of mesh {sides}, {prod(sides)}, got {size}")
        if len(sides) != entry.mesh_rank:
            raise ValueError(f"{entry.name} takes a mesh of {entry.mesh_rank} axes, a tuple of integers, got {sides}")
        return sides
    if size is None:
        raise ValueError(f"{entry.name} needs a world_size, an integer >= 1, or a mesh, got None")
    if entry.mesh_rank > 1:
        raise ValueError(f"{entry.name} takes a mesh of {entry.mesh_rank} axes, got world_size={size} alone")
    return (size,)


def check_options(name: str, options: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """All options of a schedule: those that are given, and the defaults of others.

    Raises:
        ValueError: for an unknown name or option, and for an option out of range.
    """
    entry = _entry(name)
    chosen = dict(entry.options)
    for key, value in options.items():
        if key not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise ValueError(f"{entry.name} has no option {key!r}; its options: {known}")
        chosen[key] = _option(f"{entry.name}: {key}", value, entry.options[key])
    return chosen


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
        The scheduler that the registered function made, with the name that it is registered under.

    Raises:
        ValueError: for an unknown name or option (the message lists the known ones), for a world size or mesh that the
            schedule does not take, for an option out of range, and for more than MAX_RANKS
            ranks, MAX_CHUNKS chunks or MAX_TILES tiles.
        BuilderError: if the registered function raises another error, returns no scheduler, or returns one for another
            mesh.
    """
    entry, chosen = _entry(name), check_options(name, options)
    arguments = (entry, _mesh(entry, world_size, mesh), tuple(chosen.items()))
    return _built.get(arguments) or _built.keep(arguments, _make(*arguments))


def _option(name: str, value: Hashable, default: Any) -> Hashable:
    """The value of an option. It is a number if its default is one."""
    if type(default) is int:
        return integer(name, value, min(default, 1), MAX_CHUNKS)
    return hashable(name, value, f"a value such as {default!r}")


def _make(entry: _Entry, mesh: tuple[int, ...], options: tuple[tuple[str, Hashable], ...]) -> DistributedTileScheduler:
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
    if found.mesh != mesh:
        raise BuilderError(
            f"the builder of schedule {entry.name!r}, {_where(entry)}, returns a scheduler for the mesh {mesh}; it "
            f"returned one for {found.mesh}"
        )
    # Reports, plans and tuned configurations find the schedule by the name that it is registered under.
    return found if found.name == entry.name else replace(found, name=entry.name)


CACHE_BYTES = 64 << 20
"""The most memory of the schedulers that are kept, in bytes."""

TILE_BYTES = 1 << 8
"""Estimated memory of a tile of a layout in the tables that planning makes, in bytes."""


def _size_of(scheduler: DistributedTileScheduler) -> int:
    # Nobody makes the tables of all ranks for more tiles than MAX_TILES.
    return TILE_BYTES * sum(min(layout.ranks * layout.size, MAX_TILES) for layout in scheduler.layouts)


_built = BoundedCache(_size_of, CACHE_BYTES)


def _where(entry: _Entry) -> str:
    return f"{entry.build.__module__}.{entry.build.__qualname__}"
