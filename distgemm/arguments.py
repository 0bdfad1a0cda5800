"""Readers of arguments: each returns an argument in its proper type, or raises ValueError.

The message has the argument's name, what would be right, and what was given. All public functions read their arguments
here, so an argument of one kind is treated alike everywhere.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from distgemm.system import read_regular

__all__ = [
    "MAX_EXTENT",
    "boolean",
    "finite",
    "function",
    "hashable",
    "instance",
    "integer",
    "integers",
    "json_value",
    "member",
    "path_of",
    "read_json",
    "read_text",
    "sequence",
    "shown",
    "string",
    "write",
    "wrong",
]

T = TypeVar("T")

MAX_EXTENT = 2**31 - 1
"""The largest extent of a mode. CUTLASS's kernels count in 32 bits."""

TECHNICAL_LIMIT = 512
"""Upper bounds above this number are limits of the package. A message has them only if they were exceeded."""

MAX_DIGITS = 20
"""Integers of more digits are shown as a power of ten."""


# --- messages -------------------------------------------------------------------------------------------


class _Shown(reprlib.Repr):
    """A short text for any value: bounded in length and in time, and without the elements of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 160
        self.maxtuple = self.maxlist = 12

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x)
        if not isinstance(x, np.generic) and hasattr(kind, "shape") and hasattr(kind, "dtype"):
            # A tensor or an array. To print its elements may wait for a GPU, and fails for some kinds of tensors.
            try:
                return f"a {kind.__name__} of shape {tuple(x.shape)} and {x.dtype}"
            except Exception:
                return f"a {kind.__name__}"
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**MAX_DIGITS else f"{Decimal(x):.3e}"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A short text of a value, for messages."""
    return " ".join(_SHOWN.repr(value).split())


def wrong(name: str, wanted: str, value: object) -> ValueError:
    """The error for an argument.

    Args:
        name: name of the argument.
        wanted: what would be right, as "an integer >= 1".
        value: what was given.
    """
    return ValueError(f"{name} is {wanted}, got {shown(value)}")


# --- numbers and names ----------------------------------------------------------------------------------


def integer(name: str, value: object, least: int | None = 1, most: int | None = None) -> int:
    """An integer within bounds, also from numpy. Truth values are no integers.

    Args:
        name: name of the argument.
        value: what was given.
        least: the smallest allowed value. None: no bound.
        most: the largest allowed value. None: no bound.

    Raises:
        ValueError: for anything else.
    """
    if type(value) is int and (least is None or value >= least) and (most is None or value <= most):
        return value
    found = None
    if not isinstance(value, bool) and hasattr(type(value), "__index__"):
        try:
            found = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # an array of several elements
            found = None
    if found is not None and (least is None or found >= least) and (most is None or found <= most):
        return found
    exceeded = found is not None and most is not None and found > most
    if most is None or (most > TECHNICAL_LIMIT and not exceeded):
        bounds = "" if least is None else f" >= {least}"
    else:
        bounds = f" <= {most}" if least is None else f" from {least} to {most}"
    raise wrong(name, f"an integer{bounds}", value)


def finite(
    name: str, value: object, least: float | None = None, above: float | None = None, most: float | None = None
) -> float:
    """A finite number within bounds, also from numpy. Truth values are no numbers.

    Args:
        name: name of the argument.
        value: what was given.
        least: the smallest allowed value. None: no bound.
        above: a bound that the value must exceed. None: no bound.
        most: the largest allowed value. None: no bound.

    Raises:
        ValueError: for anything else.
    """
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
    inside = (least is None or found >= least) and (above is None or found > above) and (most is None or found <= most)
    if math.isfinite(found) and inside:
        return found
    limits = ((">=", least), (">", above), ("<=", most))
    bounds = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    raise wrong(name, f"a finite number {bounds}".strip(), value)


def boolean(name: str, value: object) -> bool:
    """True or False, also from numpy.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise wrong(name, "True or False", value)


def string(name: str, value: object, wanted: str = "a non-empty string") -> str:
    """A string that is not empty.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str) and value:
        return value
    raise wrong(name, wanted, value)


def member(name: str, value: object, known: Iterable[T]) -> T:
    """One of some strings.

    Args:
        name: name of the argument.
        value: what was given.
        known: the allowed strings.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str):
        for each in known:
            if each == value:
                return each
    raise wrong(name, f"one of {', '.join(map(str, known))}", value)


# --- objects and containers -----------------------------------------------------------------------------


def instance(name: str, value: object, kind: type[T] | tuple[type[T], ...], wanted: str) -> T:
    """An object of a class.

    Args:
        name: name of the argument.
        value: what was given.
        kind: the class, or several.
        wanted: the class in words, as "a distgemm.Plan".

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, kind):
        return value
    raise wrong(name, wanted, value)


def hashable(name: str, value: T, wanted: str) -> T:
    """Something that can be a key, which what is cached needs.

    Raises:
        ValueError: for anything else.
    """
    try:
        hash(value)
    except TypeError:
        raise wrong(name, wanted, value) from None
    return value


def function(name: str, value: T, wanted: str = "a function") -> T:
    """Something that can be called.

    Raises:
        ValueError: for anything else.
    """
    if callable(value) and not isinstance(value, type):
        return value
    raise wrong(name, wanted, value)


def sequence(
    name: str, value: object, read: Callable[[str, Any], T], wanted: str, length: int | None = None
) -> tuple[T, ...]:
    """A tuple of values that are read one by one.

    Args:
        name: name of the argument.
        value: a sequence. Texts, mappings and sets are refused.
        read: reads one value, given its name and the value.
        wanted: what the sequence has, as "a tuple of integers >= 1".
        length: the number of values. None: any.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not hasattr(type(value), "__iter__"):
        raise wrong(name, wanted, value)
    try:
        found: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    except TypeError:  # an array without axes
        raise wrong(name, wanted, value) from None
    if length is not None and len(found) != length:
        raise ValueError(f"{name} is {wanted}, {length} of them, got {len(found)}: {shown(value)}")
    try:
        return tuple(read(f"{name}[{index}]", each) for index, each in enumerate(found))
    except ValueError as error:
        raise ValueError(f"{name} is {wanted}, got {shown(value)}: {error}") from None


def integers(
    name: str, value: object, least: int | None = 1, most: int | None = None, length: int | None = None
) -> tuple[int, ...]:
    """A tuple of integers within bounds.

    Args:
        name: name of the argument.
        value: a sequence.
        least: the smallest allowed value. None: no bound.
        most: the largest allowed value. None: no bound.
        length: the number of integers. None: any.

    Raises:
        ValueError: for anything else.
    """
    wanted = "a tuple of integers" + ("" if least is None else f" >= {least}")
    return sequence(name, value, lambda item, each: integer(item, each, least, most), wanted, length)


# --- files ----------------------------------------------------------------------------------------------


def path_of(name: str, value: object, wanted: str = "the path of a file") -> Path:
    """A path.

    Args:
        name: name of the argument.
        value: what was given.
        wanted: what would be right.

    Raises:
        ValueError: for anything but a non-empty string or a path.
    """
    if isinstance(value, (str, os.PathLike)) and not isinstance(value, bytes) and str(value) and "\0" not in str(value):
        return Path(value)
    raise wrong(name, wanted, value)


def read_text(name: str, value: object) -> str:
    """The text of a file.

    Args:
        name: name of the argument.
        value: the file's path.

    Raises:
        ValueError: for another value than a path, and for a file that cannot be read: a missing one, a folder, a pipe,
            or one that is no text in UTF-8.
    """
    path = path_of(name, value)
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise ValueError(f"{name} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} {path}: it is no text in UTF-8: {error.reason}") from None


def write(name: str, value: object, content: str | bytes) -> None:
    """Write a file that the caller names.

    Args:
        name: name of the argument.
        value: the file's path. Pipes and devices are written, too: a pipe without a reader is an error.
        content: its new content.

    Raises:
        ValueError: for another value than a path, and for a file that cannot be written.
    """
    path = path_of(name, value)
    try:
        # Without O_NONBLOCK, open would wait for a pipe's reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        os.set_blocking(descriptor, True)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ValueError(f"{name} {path}: the file cannot be written: {error.strerror or error}") from None


def json_value(name: str, text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: for a text that is no JSON, or that is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{name}: the JSON is nested too deeply, got {shown(text)}") from None
    except ValueError as error:
        raise ValueError(f"{name}: it is no JSON: {error}, got {shown(text)}") from None


def read_json(name: str, value: object) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: as :func:`read_text` and :func:`json_value`.
    """
    return json_value(f"{name} {value}", read_text(name, value))
