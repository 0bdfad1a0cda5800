"""Which process is a rank, and whether that process has ended."""

from __future__ import annotations

import hashlib
import os
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessId", "has_ended", "this_process"]

_FIELDS = struct.Struct("<16sqq")
_STATE, _START = 0, 19  # fields of /proc/PID/stat behind the name of the program


class ProcessId(NamedTuple):
    """A process that other processes of its host can look for.

    Attributes:
        host: names the host, its last start, and the namespace of process numbers.
        number: the process number.
        start: when it started, in clock ticks of the host: process numbers are used again.
    """

    host: bytes
    number: int
    start: int

    def pack(self) -> bytes:
        """As many bytes for each process."""
        return _FIELDS.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> ProcessId:
        """The process of :meth:`pack`."""
        return cls(*_FIELDS.unpack(packed))


def this_process() -> ProcessId:
    """The process that asks."""
    found = _read_stat(os.getpid())
    assert found is not None
    return ProcessId(_this_host(), os.getpid(), int(found[_START]))


def has_ended(process: ProcessId) -> bool:
    """Whether a process has ended. False for one of another host, of which nothing is known."""
    if process.host != _this_host():
        return False
    found = _read_stat(process.number)
    return found is None or found[_STATE] in "ZX" or int(found[_START]) != process.start


@cache
def _this_host() -> bytes:
    start = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{start} {Path('/proc/self/ns/pid').stat().st_ino}".encode()).digest()[:16]


def _read_stat(number: int) -> list[str] | None:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
