"""Wrong arguments, by the kind of argument, and the check of how they are refused.

A case is one call with one wrong argument. It must end, within a second, in an error of a documented type. The message
must have the argument's name, what was given and what would be right.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

LIMIT_S = 1.0
"""Time of the processor in which a wrong argument must be refused. Other processes may use the machine as well."""
WALL_LIMIT_S = 20.0
"""Time in which it must be refused. A call that waits for something uses no processor."""

DEPTHS = re.compile(
    r"has no attribute|not subscriptable|not iterable|unhashable|not callable|must be real number|unsupported operand"
    r"|not supported between|cannot be interpreted|object is not|can't multiply|invalid literal|out of range$"
    r"|missing \d+ required|unexpected keyword|takes \d+ positional|maximum recursion|cannot convert|codec can't"
    r"|^'[^']*'$|has no len|list index|Cannot unpack|not enough values|too many values"
)
"""Messages of Python's own errors: they say where the code failed, and not what the caller did wrong."""


class Odd:
    """An object that is no argument of anything."""

    def __repr__(self) -> str:
        return "Odd()"


ODD = Odd()


class Returns:
    """A function that returns a wrong result."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.result

    def __repr__(self) -> str:
        return repr(self.result)


@dataclass(frozen=True)
class Case:
    """A call that must be refused.

    Attributes:
        id: the function, the argument and the value.
        call: makes the call.
        names: the message contains one of them; "" where there is no name.
        value: what is wrong. The message contains a rendering of it.
        remedy: a pattern of what the message says would be right.
        errors: the documented types.
        rendering: the text of the value in the message; None: several are allowed.
    """

    id: str
    call: Callable[[], object]
    names: tuple[str, ...]
    value: Any
    remedy: str
    errors: tuple[type[Exception], ...] = (ValueError,)
    rendering: str | None = None


@dataclass(frozen=True)
class Wrong:
    """Wrong values of one kind of argument, and a pattern of what would be right."""

    values: tuple[Any, ...]
    remedy: str

    def __add__(self, other: Sequence[Any]) -> Wrong:
        return Wrong((*self.values, *other), self.remedy)

    def without(self, *values: Any) -> Wrong:
        """Without values that are right here."""
        kept = (each for each in self.values if not any(type(each) is type(no) and each == no for no in values))
        return Wrong(tuple(kept), self.remedy)


HUGE = 10**400
CONTAINERS = ([1], (1, 2), {1: 2}, {3}, b"8")
NO_NUMBERS = ("8", "", "x", *CONTAINERS, ODD, np.ones(3), int, 1j)
NAN = math.nan
INF = math.inf


def integers(least: int = 1, most: int | None = 2**31 - 1, optional: bool = False) -> Wrong:
    """Wrong values of an integer."""
    values = [*NO_NUMBERS, True, False, 1.5, 8.0, NAN, INF, Fraction(3, 2), np.float32(2), least - 1, -HUGE]
    values += [] if optional else [None]
    values += [] if most is None else [most + 1, 2**70, HUGE]
    return Wrong(tuple(values), r"integer|number of|from \d|0\.\.|at most")


def numbers(zero: bool = True, negative: bool = True, optional: bool = False) -> Wrong:
    """Wrong values of a number."""
    values = [*NO_NUMBERS, True, NAN, INF, -INF, HUGE]
    values += [] if optional else [None]
    values += [] if zero else [0, 0.0]
    values += [] if negative else [-1, -0.5]
    return Wrong(tuple(values), r"number")


def names(*known: str, optional: bool = False) -> Wrong:
    """Wrong values of an argument that is one of some names."""
    first = known[0]
    values = [
        "nope",
        f" {first}",
        first.upper() + "_",
        3,
        1.5,
        True,
        NAN,
        [first],
        (first,),
        {first: 1},
        first.encode(),
    ]
    values += [ODD, str, np.ones(2)] + ([] if optional else [None, ""])
    return Wrong(tuple(values), r"one of|Known|none of|is .* or |name|such as")


def objects(*accepted: type) -> Wrong:
    """Wrong values of an argument that is an object of a class."""
    return Wrong(("nope", 3, 1.5, True, None, [], (), {}, b"x", ODD, np.ones(2), *accepted), r"\b(is|are|takes) ")


def booleans() -> Wrong:
    """Wrong values of a truth value."""
    return Wrong((None, "true", "no", "", 0, 1, 2.5, [], [True], (), {}, ODD, NAN), r"True or False")


def tuples(least: int = 1, optional: bool = False, empty: bool = False) -> Wrong:
    """Wrong values of a tuple of integers."""
    bad = [
        3,
        "12",
        b"12",
        1.5,
        True,
        {1: 2},
        {1, 2},
        ODD,
        int,
        [1.5],
        ["1"],
        [None],
        [True],
        (least - 1,),
        [[1]],
        [NAN],
    ]
    bad += [[-HUGE], [ODD], np.ones(2), (1, "2")] + ([] if optional else [None]) + ([] if empty else [()])
    return Wrong(tuple(bad), r"integer")


def paths() -> Wrong:
    """Wrong values of a path."""
    return Wrong((None, 3, 1.5, True, b"x", [], {}, ODD, "", "a\0b.json"), r"path|file|none of|written")


def texts(optional: bool = False) -> Wrong:
    """Wrong values of a string."""
    return Wrong((3, 1.5, True, [], {}, b"x", ODD, ["x"], *([] if optional else [None])), r"string|text|name|one of")


def shown(value: Any) -> str:
    """A value in the name of a case."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"{'-' * (value < 0)}10^{len(str(abs(value))) - 1}"
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def renderings(value: Any) -> list[str]:
    """Texts of a value, one of which a message has."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**20:
        return [f"e+{len(str(abs(value))) - 1}"]
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        shape = [str(tuple(value.shape))] if type(value).__name__ == "Tensor" else []
        return [f"a {type(value).__name__} of shape", type(value).__name__, str(value.dtype), *shape]
    texts = [repr(value), str(value), type(value).__name__]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    # A message may show the entry that is wrong, with its place.
    texts += [f"got {text}".replace("got got", "got") for each in inner for text in renderings(each)]
    texts += [f"[{text}" for each in inner for text in renderings(each) if text.endswith("of shape")]
    texts += [text for each in inner for text in renderings(each) if text.startswith("e+")]
    if isinstance(value, tuple):
        texts.append(str(list(value)))
    if isinstance(value, str) and len(value.split()) > 1:  # the part of a text that is wrong
        last = value.split()[-1]
        texts += [f"got {part!r}" for part in (last, *last.split("="))] + [f"got {last.rpartition('=')[2]}"]
        texts += [f"unknown schedule {value.split()[0]!r}", f"no option {last.partition('=')[0]!r}"]
    if isinstance(value, dict):
        texts += [f"got {key!r}" for key in value] + [f"has unknown {sorted(map(str, value))[-1:]}", "it lacks ["]
    if len(repr(value)) > 60:
        texts.append(repr(value)[:20])
    return [text for text in texts if text] or ["''"]


def table(
    function: str,
    call: Callable[..., object],
    arguments: dict[str, Wrong],
    named: dict[str, tuple[str, ...]] | None = None,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[Case]:
    """The cases of one function.

    Args:
        function: its name.
        call: makes the call, with one argument replaced by name and all others right.
        arguments: the wrong values of each argument.
        named: further words for an argument, of which messages may have one.
        errors: the documented types.
    """
    for argument, wrong in arguments.items():
        words = (argument, *(named or {}).get(argument, ()))
        for value in wrong.values:
            yield Case(
                f"{function}-{argument}-{shown(value)}",
                lambda argument=argument, value=value: call(**{argument: value}),  # type: ignore[misc]
                words,
                value,
                wrong.remedy,
                errors,
            )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that raises TimeoutError if it takes more time of the processor, or waits."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"not refused within {seconds:g} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WALL_LIMIT_S))
    before = [(number, timer, signal.signal(number, expire)) for number, timer, _ in timers]
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, timer, handler in before:
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def check_refused(case: Case) -> None:
    """Make the call, and check its error."""
    try:
        with time_limit(LIMIT_S):
            found = case.call()
    except case.errors as error:
        if isinstance(error, TimeoutError):
            raise
        check_message(case, str(error))
    except Exception as error:
        pytest.fail(f"{case.id}: an error from the depths, {type(error).__name__}: {error}")
    else:
        pytest.fail(f"{case.id}: accepted, with the result {found!r:.200}")


def check_message(case: Case, message: str) -> None:
    """Check that a message names the argument, the value and the remedy."""
    assert not DEPTHS.search(message), f"{case.id}: words of Python's own errors: {message}"
    assert any(name in message for name in case.names), f"{case.id}: the message does not name the argument: {message}"
    wanted = renderings(case.value) if case.rendering is None else [case.rendering]
    found = any(text in message for text in wanted)
    assert found, f"{case.id}: the message has none of {wanted!s:.300}: {message:.600}"
    assert re.search(case.remedy, message), f"{case.id}: the message says no remedy, {case.remedy}: {message}"
    assert len(message) < 2000, f"{case.id}: a message of {len(message)} characters"


def unique(cases: Iterator[Case] | Sequence[Case]) -> list[Any]:
    """The cases as parameters of a test. Ids are unique."""
    found: dict[str, Case] = {}
    for case in cases:
        name = case.id
        while name in found:
            name += "'"
        found[name] = case
    return [pytest.param(case, id=name) for name, case in found.items()]
