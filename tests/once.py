"""Processes that are launched once for many tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


def once(run: Callable[..., T]) -> Callable[..., T]:
    """Runs it once for equal arguments. What it raised is raised again in every test that asks: lru_cache would run
    it anew, and each test would wait for one and the same hang."""
    outcomes: dict[tuple[Hashable, ...], tuple[list[T], Exception | None]] = {}

    @functools.wraps(run)
    def outcome(*args: Hashable) -> T:
        if args not in outcomes:
            try:
                outcomes[args] = [run(*args)], None
            except Exception as error:
                outcomes[args] = [], error
        found, error = outcomes[args]
        if error is not None:
            raise error
        return found[0]

    return outcome
