"""Epochs: how replays on a workspace are numbered, and when one may write at a peer. The twin of ``epochs.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["EPOCHS", "TICKET_BITS", "Clock", "before"]

TICKET_BITS = 18
"""Lowest bits of the clock: tickets of a replay. Above them are the bit of a wait, that of a buffer, and the epoch."""
EPOCHS = 1 << (64 - TICKET_BITS - 2)
"""Number of epochs: they wrap around from the last one to 0."""


def before(one: int, other: int) -> bool:
    """Whether an epoch comes before another one, which is less than half of all epochs away."""
    return (other - one) % EPOCHS in range(1, EPOCHS // 2 + 1)


@dataclass(frozen=True)
class Clock:
    """What a rank knows at the beginning of a replay.

    A replay is *closed* if a rank ends it only after all ranks have begun it: each rank receives from every other, at
    least through others.

    Attributes:
        epoch: number of the replay, from 1; 0 follows the last one.
        buffer: buffer of the workspace that it uses.
        waits: whether it stores at peers only after all of them have begun the epoch.
        last: of each buffer, the last epoch that may still be read when a peer begins the next.
    """

    epoch: int = 1
    buffer: int = 0
    waits: bool = False
    last: tuple[int, int] = (0, 0)

    @property
    def word(self) -> int:
        """The word from which clusters take tickets, before the first one."""
        return self.epoch << (TICKET_BITS + 2) | self.buffer << (TICKET_BITS + 1) | self.waits << TICKET_BITS

    @staticmethod
    def buffer_of(epoch: int) -> int:
        """The buffer of an epoch, if the first one is 1, and each replay takes one. The number of epochs is even."""
        return (epoch - 1) % 2

    def next(self, closed: bool) -> Clock:
        """The clock of the next replay, behind one that is closed or not.

        A rank that ends a closed replay e knows that all ranks have ended e - 1. So what was last used in e - 1 may be
        written in e + 1. Where e + 1 would use what e did, or may still be in use because e is not closed, it waits.
        """
        buffer = 1 - self.buffer
        last = (self.epoch, self.epoch) if not closed else _with(self.last, self.buffer, self.epoch)
        epoch = (self.epoch + 1) % EPOCHS
        return replace(self, epoch=epoch, buffer=buffer, waits=last[buffer] == self.epoch, last=last)


def _with(pair: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if index == 0 else (pair[0], value)
