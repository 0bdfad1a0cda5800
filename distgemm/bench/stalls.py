"""Says where a benchmark stands when nothing has happened for a while: ranks that wait for each other raise nothing."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Stalls"]


class Stalls:
    """While entered, a thread says what has been under way for ``patience`` seconds, once for each thing that is.

    rank: who says so
    """

    def __init__(self, rank: int, patience: float = 60.0) -> None:
        self.rank, self.patience = rank, patience
        self._doing, self._since = "", time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def now(self, doing: str) -> None:
        """What is being done from now on."""
        self._doing, self._since = doing, time.monotonic()

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        said = 0.0
        while not self._left.wait(self.patience / 4):
            doing, since = self._doing, self._since
            if doing and since != said and time.monotonic() - since >= self.patience:
                said = since
                print(f"rank {self.rank} for {self.patience:.0f} s: {doing}", file=sys.stderr, flush=True)
