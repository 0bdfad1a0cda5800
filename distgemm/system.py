"""What the package asks of the operating system: cores, switches in the environment, and files."""

from __future__ import annotations

import errno
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cores", "cores_of_rank", "read_regular", "switch", "unsafe", "write_atomically"]

SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def switch(name: str, default: bool) -> bool:
    """The value of an environment variable that is true or false.

    Args:
        name: the variable.
        default: the value if the variable is not set, or empty.

    Raises:
        ValueError: for any other text than those of ``SWITCHES``, in upper or lower case.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if text.lower() not in SWITCHES:
        raise ValueError(f"{name} is 1, true, yes or on, or else 0, false, no or off; got {text!r}")
    return SWITCHES[text.lower()]


def cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use: those it may run on, and no more than its cgroup has time for.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(root))]))


def cores_of_rank(ranks: int) -> int:
    """The share of these cores that a rank has where each of this machine's ranks takes one; at least 1.

    Args:
        ranks: number of ranks, also on other machines: torchrun says in LOCAL_WORLD_SIZE how many are on this one.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores() // min(ranks, int(local) if local.isdigit() and int(local) else ranks))


def _quotas(root: Path) -> Iterator[float]:
    """Cores for which the process's cgroup, and each group around it, has time. A group without a limit has none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        path = mount / group.strip("/")
        for each in (path, *path.parents):
            if not each.is_relative_to(mount):
                break
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            try:
                quota, period = " ".join((each / name).read_text() for name in names).split()
            except OSError:  # a container may not see the groups around it
                continue
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: if it cannot be read, or is no regular file. A FIFO does not make the caller wait.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def unsafe(path: Path) -> str:
    """Why another user could have changed a file or a folder; "" if no other user but root can."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to the user with number {found.st_uid}, and not to this user ({os.geteuid()}) or root"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"users other than its owner can write {path} (mode {stat.S_IMODE(found.st_mode):03o})"
    return ""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, all or nothing.

    What stands at the path, even a link, is replaced and not written through.

    Raises:
        OSError: if it cannot be written; the file stays as it is.
    """
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            os.fchmod(descriptor, 0o644)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
