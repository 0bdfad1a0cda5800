"""Files of measured choices: one for each kind of choice and each GPU, the user's own over the one that ships."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from distgemm.gemm.nvcc import cache_dir

__all__ = ["Choices", "file_name", "own_file", "read_choices", "record_choices"]

Choices = dict[str, dict[str, Any]]
"""What was chosen, by what the choice depends on; as JSON knows it."""

Check = Callable[[dict[str, Any]], object]
"""Raises ValueError, KeyError or TypeError for what is no choice."""


def file_name(kind: str, device: str) -> str:
    """The name of the file with choices of a kind for a GPU."""
    return f"{kind}_{re.sub('[^A-Za-z0-9.-]', '_', device)}.json"


def own_file(kind: str, device: str) -> Path:
    """Where the user's own choices are: in the cache folder."""
    return cache_dir() / file_name(kind, device)


def read_choices(shipped: Path, own: Path, check: Check, command: str) -> Choices:
    """The choices of both files; those in ``own`` stand before. Files that are absent hold none.

    check:   is called with every choice
    command: that makes the file anew, for the message

    Raises ValueError where a file is broken.
    """
    return _read(shipped, own, own.stat().st_mtime_ns if own.exists() else 0, check, command)


@functools.lru_cache(maxsize=8)
def _read(shipped: Path, own: Path, stamp: int, check: Check, command: str) -> Choices:
    del stamp  # only makes a changed file be read again
    found: Choices = {}
    for path in (shipped, own):
        if path.exists():
            found |= _parse(path, check, command)
    return found


def _parse(path: Path, check: Check, command: str) -> Choices:
    try:
        choices: Choices = json.loads(path.read_text())["choices"]
        for choice in choices.values():
            check(choice)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not hold measured choices ({type(error).__name__}: {error}); delete it, and measure anew "
            f"with: {command}"
        ) from error
    return choices


def record_choices(path: Path, device: str, choices: Choices, check: Check, command: str) -> Path:
    """Adds choices to a file, beside what other processes add: under a lock, all or nothing. Returns its path.

    Raises ValueError where the file is broken, which stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        known = _parse(path, check, command) if path.exists() else {}
        written = path.with_suffix(f".{os.getpid()}.new")
        written.write_text(json.dumps({"device": device, "choices": known | choices}, indent=1) + "\n")
        os.replace(written, path)
    return path
