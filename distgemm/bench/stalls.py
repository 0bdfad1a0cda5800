"""Prints what a benchmark is doing if that takes long. Ranks that wait for each other forever raise no error."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Stalls"]


class Stalls:
    """While entered, a thread prints each step that has taken ``notice_s``, once.

    Args:
        rank: is printed with the step.
        notice_s: time of a step after which it is printed.
    """

    def __init__(self, rank: int, notice_s: float = 60.0) -> None:
        self.rank, self.notice_s = rank, notice_s
        self._doing, self._since = "", time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def now(self, doing: str) -> None:
        """Begin a step."""
        self._doing, self._since = doing, time.monotonic()

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        printed = 0.0
        while not self._left.wait(self.notice_s / 4):
            doing, since = self._doing, self._since
            if doing and since != printed and time.monotonic() - since >= self.notice_s:
                printed = since
                print(f"rank {self.rank} for {self.notice_s:.0f} s: {doing}", file=sys.stderr, flush=True)
