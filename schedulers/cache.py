"""A cache that is bounded by the memory of what it keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """The results of a function, as :func:`functools.lru_cache` keeps them, up to a total size instead of a number.

    The newest result always stays, so that a second call with equal arguments returns the same object.

    Args:
        make: the function. Its arguments are hashable.
        size_of: the size of a result in bytes, or an estimate.
        most: the total size in bytes above which the results that were used least recently are dropped.
    """

    def __init__(self, make: Callable[..., Value], size_of: Callable[[Value], int], most: int) -> None:
        self.make, self.size_of, self.most = make, size_of, most
        self._kept: OrderedDict[tuple[object, ...], tuple[Value, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def __call__(self, *arguments: object) -> Value:
        """The result for these arguments, kept or made."""
        with self._lock:
            if arguments in self._kept:
                self._kept.move_to_end(arguments)
                return self._kept[arguments][0]
        value = self.make(*arguments)
        with self._lock:
            # Another thread may have made it meanwhile.
            if arguments not in self._kept:
                size = self.size_of(value)
                self._kept[arguments] = value, size
                self._size += size
                while len(self._kept) > 1 and self._size > self.most:
                    self._size -= self._kept.popitem(last=False)[1][1]
            return self._kept[arguments][0]

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._kept.clear()
            self._size = 0
