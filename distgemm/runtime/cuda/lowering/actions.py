"""What a rank puts on streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from distgemm.plan.ops import Copy, Op, Signal, Wait
from distgemm.runtime.cuda.workspace import Step

__all__ = ["BRANCH", "COMM", "Action", "Sent", "on_one_stream", "waits_of"]

COMM = 0
"""The one stream of copies to peers, or from them, and of signals that they have come. With two copies under way the
bandwidth of both together would be half of one's. Signals and the words of a replay's begin and end stay here too: on
a stream of their own they made captured graphs of several replays hold copies back behind waits.
"""
BRANCH = 1
"""The first stream of GEMMs, the caller's own; further branches follow, and a stream of sums."""


@dataclass(frozen=True)
class Sent:
    """What a kernel of GEMMs copies, to a peer or within the rank: slices of one chunk.

    copies:  of each slice
    signals: behind each of them; empty: nobody is told
    waits:   what it waits for; None: for nothing
    """

    copies: tuple[Copy, ...]
    signals: tuple[Signal, ...] = ()
    waits: Wait | None = None


@dataclass(eq=False)
class Action:
    """Something put on a stream at once.

    stream: COMM, or BRANCH and up
    ops:    one Gemm, Copy or Reduce, or several Waits or Signals; all Gemms, where they are one kernel
    gates:  of several Gemms that are one kernel, what each waits for within it: one signal, or one for each slice, or
            for each source
    tells:  whom each of them tells of its result, None where nobody
    sends:  what the kernel copies besides, in order
    opens:  what it waits for before it copies anything; None: for nothing
    slice:  elements along k of a slice that it sends, or waits for; 0 where chunks are whole
    abreast: of several Gemms that are one kernel, of how many in a row tiles are computed in turn; empty: of each alone
    after:  actions on other streams that come before, by number
    step:   a step of the workspace's protocol (see :mod:`distgemm.runtime.cuda.workspace`), behind the ops
    awaited: whether another stream waits for it
    """

    stream: int
    ops: tuple[Op, ...]
    after: tuple[int, ...] = ()
    step: Step | None = None
    awaited: bool = field(default=False)
    gates: tuple[tuple[Wait, ...], ...] = ()
    tells: tuple[Signal | None, ...] = ()
    sends: tuple[Sent, ...] = ()
    opens: Wait | None = None
    slice: int = 0
    abreast: tuple[int, ...] = ()


def on_one_stream(actions: Sequence[Action]) -> bool:
    """Whether all GEMMs and sums are on one stream, so that none runs beside another."""
    return all(action.stream <= BRANCH for action in actions)


def waits_of(actions: Sequence[Action]) -> list[Wait]:
    """What is waited for, on streams and within kernels."""
    return [
        op
        for action in actions
        for op in (
            *action.ops,
            *chain.from_iterable(action.gates),
            action.opens,
            *(sent.waits for sent in action.sends),
        )
        if isinstance(op, Wait)
    ]
