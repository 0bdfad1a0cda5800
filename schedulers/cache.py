"""A cache that is bounded by the memory of what it keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by key, up to a total size. Those that were used least recently are dropped first.

    The newest value always stays, so that a second look-up finds the same object.

    Args:
        size_of: the size of a value in bytes, or an estimate. It may grow while the value is kept.
        most: the total size in bytes above which values are dropped.
    """

    def __init__(self, size_of: Callable[[Value], int], most: int) -> None:
        self.size_of, self.most = size_of, most
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """The total size of what is kept, in bytes."""
        with self._lock:
            self._measure_newest()
            return self._size

    def get(self, key: Hashable) -> Value | None:
        """The value of a key; None if none is kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._measure_newest()  # it is not the newest any more
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, value: Value) -> Value:
        """Keep a value, and return it. If another thread has kept one for this key, that one is returned."""
        with self._lock:
            if key in self._kept:
                return self._kept[key][0]
            self._measure_newest()
            self._kept[key] = value, 0
            self._measure_newest()
            while len(self._kept) > 1 and self._size > self.most:
                self._size -= self._kept.popitem(last=False)[1][1]
            return value

    def _measure_newest(self) -> None:
        """Measure the value that was used last: what it has grown by since then was not counted."""
        if self._kept:
            key = next(reversed(self._kept))
            value, before = self._kept[key]
            size = self.size_of(value)
            self._kept[key] = value, size
            self._size += size - before

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._kept.clear()
            self._size = 0
