"""Files of tuned configurations, one for each kind and GPU. The user's own entries replace the shipped ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from distgemm.gemm.nvcc import WRITABLE, CacheError, cache_dir
from distgemm.system import read_regular, write_atomically

__all__ = ["Entries", "TunedCache"]

Entries = dict[str, dict[str, Any]]
"""Tuned configurations as they stand in JSON, by their keys."""

LOCK_TIMEOUT_S = 60.0
"""Time after which a lock that another process holds is an error. Writing takes milliseconds."""


class TunedCache:
    """Tuned configurations of one kind.

    Args:
        kind: begins the names of the files, as in ``plans_NVIDIA_H200.json``.
        shipped: folder of the files that ship with the package.
        check: is called with every entry; raises ValueError, KeyError or TypeError for a broken one.
        command: the command that writes the file anew, for error messages.
    """

    def __init__(self, kind: str, shipped: Path, check: Callable[[dict[str, Any]], object], command: str) -> None:
        self.kind, self.shipped, self.command = kind, shipped, command
        self._check = check
        self._known: dict[Path, tuple[tuple[int, ...] | None, Entries]] = {}

    def path(self, device: str) -> Path:
        """The user's own file for a GPU, in the cache folder."""
        return cache_dir() / self._name(device)

    def _name(self, device: str) -> str:
        return f"{self.kind}_{re.sub('[^A-Za-z0-9.-]', '_', device)}.json"

    def read(self, device: str) -> Entries:
        """All entries for a GPU; the user's own replace the shipped ones. Files that are absent hold none.

        Raises:
            ValueError: if a file is broken or cannot be read.
        """
        return self._read(self.shipped / self._name(device)) | self._read(self.path(device))

    def shipped_devices(self) -> list[str]:
        """The names of the GPUs that files of the package are for."""
        return [json.loads(path.read_text())["device"] for path in sorted(self.shipped.glob(f"{self.kind}_*.json"))]

    def _read(self, path: Path) -> Entries:
        """The entries of a file, read again when it has changed."""
        stamp: tuple[int, ...] | None
        try:
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_ino, status.st_size  # two writes may have one time
        except (FileNotFoundError, NotADirectoryError):
            stamp = None
        except OSError as error:
            raise self._unreadable(path, error) from error
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = stamp, self._parse(path) if stamp else {}
        return known[1]

    @staticmethod
    def _unreadable(path: Path, error: OSError) -> ValueError:
        return ValueError(
            f"tuned configurations: {path} cannot be read: {error.strerror or error}; delete it, make it readable, or "
            "set DISTGEMM_CACHE_DIR to another folder"
        )

    def _parse(self, path: Path) -> Entries:
        try:
            entries: Entries = json.loads(read_regular(path))["configs"]
            for entry in entries.values():
                self._check(entry)
        except OSError as error:
            raise self._unreadable(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold tuned configurations ({type(error).__name__}: {error}); delete it, and measure "
                f"anew with: {self.command}"
            ) from error
        return entries

    def record(self, device: str, entries: Entries) -> Path:
        """Add entries to the user's file, under a lock, all or nothing. Returns the file's path.

        Raises:
            ValueError: if the file is broken or cannot be read; it stays as it is.
            CacheError: if it cannot be written, or if another process holds its lock.
        """
        path = self.path(device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
                known = self._parse(path) if path.exists() else {}
                write_atomically(path, json.dumps({"device": device, "configs": known | entries}, indent=1) + "\n")
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks, an older filelock
            raise CacheError(f"tuned configurations: {path} cannot be written: {error}; {WRITABLE}") from error
        return path
