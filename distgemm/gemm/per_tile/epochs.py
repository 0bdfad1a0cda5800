"""Epochs: how replays on a workspace are numbered. The twin of ``epochs.cuh``."""

from __future__ import annotations

__all__ = ["EPOCHS", "TICKET_BITS", "before", "buffer_of"]

TICKET_BITS = 18
"""Lowest bits of the clock, the word from which clusters take tickets: tickets of a replay. Above them is the epoch."""
EPOCHS = 1 << (64 - TICKET_BITS)
"""Number of epochs: they wrap around from the last one to 0."""


def before(one: int, other: int) -> bool:
    """Whether an epoch comes before another one, which is less than half of all epochs away."""
    return (other - one) % EPOCHS in range(1, EPOCHS // 2 + 1)


def buffer_of(epoch: int) -> int:
    """The buffer of the workspace that a replay uses. The number of epochs is even, so that buffers always alternate.

    Each rank sends to each other one in each replay, and ends it only when it has received that. So a rank that has
    ended epoch e knows that all others have begun e, and have ended e - 1. What was last read in e - 1 may be written
    in e + 1, and nobody waits.
    """
    return epoch % 2
