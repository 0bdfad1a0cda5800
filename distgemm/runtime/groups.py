"""Process groups: what lives as long as they do, their hosts, and what follows a failure on them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = [
    "GroupRef",
    "PerGroup",
    "failing",
    "note_hosts",
    "occupied",
    "raise_if_failed",
    "ranks_per_host",
]

Tensor = torch.Tensor
T = TypeVar("T")


# --- lifetime -------------------------------------------------------------------------------------------


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    # Torch informs nobody when it destroys a group.
    torch_groups: Any = distributed_c10d
    return group not in torch_groups._world.pg_map


class GroupRef:
    """A process group that this reference does not keep alive: sockets and threads of gloo live as long as it does.

    Calling it returns the group.

    Args:
        group: the group.

    Raises:
        ValueError: by a call, once the group is destroyed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._name = group.group_name
        self._failure = _FAILURES.of(group)
        self._hosts = _HOSTS.of(group)
        self._noted = self._hosts.ranks

    def __call__(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None or _is_destroyed(group):
            raise ValueError(
                f"the process group {self._name!r} of this executable was destroyed; make an executable with another "
                "group"
            )
        return group

    def takes_calls(self) -> bool:
        """Whether the group exists, has the hosts that it had, and :func:`raise_if_failed` would not raise."""
        group, failure = self._group(), self._failure
        same = self._hosts.ranks == self._noted
        return same and group is not None and not failure.reason and not failure.occupied and not _is_destroyed(group)


class PerGroup(Generic[T]):
    """A value for each process group. It is dropped when its group is destroyed.

    Values that hold their group strongly are dropped when the value of any group is next asked for.

    Args:
        make: makes the value of a group.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: weakref.WeakKeyDictionary[dist.ProcessGroup, T] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> list[tuple[dist.ProcessGroup, T]]:
        """The groups that exist, and their values."""
        return [(group, self.of(group)) for group in self._groups() if not _is_destroyed(group)]

    def of(self, group: dist.ProcessGroup) -> T:
        """The value of a group, made the first time.

        Args:
            group: a group that exists.
        """
        for other in self._groups():
            if _is_destroyed(other):
                self._values.pop(other, None)
        if group not in self._values:
            self._values.setdefault(group, self._make())
        return self._values[group]

    def _groups(self) -> list[dist.ProcessGroup]:
        # Other threads may add groups meanwhile; a list of references is made at once.
        groups = [ref() for ref in self._values.keyrefs()]
        return [group for group in groups if group is not None]


# --- hosts ----------------------------------------------------------------------------------------------


class _Hosts:
    """How many ranks of a group share memory; None: all, as far as is known."""

    ranks: int | None = None


_HOSTS: PerGroup[_Hosts] = PerGroup(_Hosts)


def note_hosts(group: dist.ProcessGroup, ranks: int) -> None:
    """Note that each ``ranks`` ranks in a row of a group share memory. All ranks of the group note the same.

    Raises:
        ValueError: if another number was noted.
    """
    found = _HOSTS.of(group)
    if found.ranks not in (None, ranks):
        raise ValueError(
            f"the ranks of the process group {group.group_name!r} are on hosts of {found.ranks} ranks, as an earlier "
            f"mesh says, got a mesh with hosts of {ranks}"
        )
    found.ranks = ranks


def ranks_per_host(group: dist.ProcessGroup) -> int | None:
    """How many ranks of a group share memory, as a mesh of hosts has said; None: all of them do."""
    ranks = _HOSTS.of(group).ranks
    return None if ranks == group.size() else ranks


# --- failures -------------------------------------------------------------------------------------------


class _Failure:
    """Why nothing can be called on a group any more, or now; None while that is not so."""

    reason: str | None = None
    occupied: str | None = None


_FAILURES: PerGroup[_Failure] = PerGroup(_Failure)


@contextlib.contextmanager
def occupied(group: dist.ProcessGroup, by: str) -> Iterator[None]:
    """Let :func:`raise_if_failed` raise inside the ``with`` block: messages of ``by`` are under way."""
    failure = _FAILURES.of(group)
    failure.occupied = by
    try:
        yield
    finally:
        failure.occupied = None


def raise_if_failed(group: dist.ProcessGroup) -> None:
    """Raises RuntimeError where a call on the group has failed: its ranks are at different places of the program.

    Also inside the block of a :func:`distgemm.gather` of the group, whose messages further ones would meet.
    """
    if by := _FAILURES.of(group).occupied:
        raise RuntimeError(f"{by} on this process group has not ended: make this call behind its with block")
    if reason := _FAILURES.of(group).reason:
        raise RuntimeError(
            f"an earlier call on this process group failed, so no rank of it can make a further one; destroy the group "
            f"and make another. That call: {reason}"
        )


@contextlib.contextmanager
def failing(group: dist.ProcessGroup, where: Callable[[], str], written: Sequence[Tensor | None]) -> Iterator[None]:
    """What follows an error once a call has begun to send: results become NaN, and the group takes no further calls.

    Args:
        group: the ranks.
        where: names the operation, this rank, and how far it has come.
        written: what the call writes.

    Raises:
        RuntimeError: in the place of each other error.
    """
    try:
        yield
    except BaseException as error:
        reason = f"{where()}: {error}"
        _FAILURES.of(group).reason = reason
        for tensor in written:
            if tensor is not None:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
        if isinstance(error, Exception):
            raise RuntimeError(f"{reason}. The result is NaN" if written else reason) from error
        raise
