"""Actions: what a rank puts on its streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from distgemm.plan.exchanges import Exchange
from distgemm.plan.ops import Copy, Op, Signal, Wait
from distgemm.runtime.cuda.workspace import Step

__all__ = ["GEMM_STREAM", "COMM", "Action", "Send", "SingleKernel", "exchanges_of", "on_one_stream", "waits_of"]

COMM = 0
"""The stream of all copies between ranks and of the signals behind them. There is one such stream, because two copies
at once share the link. Signals and the steps of the replay protocol stay on it too: on a stream of their own they made
captured graphs of several replays hold copies back behind waits.
"""
GEMM_STREAM = 1
"""The first stream of GEMMs, which is the caller's own. Further GEMM streams follow, then a stream of sums, then one of
exchanges with other hosts. NCCL keeps the order of messages by the order on this stream."""


@dataclass(frozen=True)
class Send:
    """Slices of one chunk that the fused kernel copies, to a peer or within the rank.

    Attributes:
        copies: one for each slice.
        signals: the signal behind each copy; empty: nobody waits for the copies.
        wait: what the kernel waits for before it copies; None: nothing.
    """

    copies: tuple[Copy, ...]
    signals: tuple[Signal, ...] = ()
    wait: Wait | None = None


@dataclass(eq=False)
class SingleKernel:
    """What the fused kernel does besides its GEMMs, which are the ops of its :class:`Action`.

    Attributes:
        wait_flags: for each GEMM, the flags that the kernel waits for before it: one, one for each slice, or one for
            each source.
        done_flags: for each GEMM, the flag that the kernel sets once the result is stored; None: nobody waits for it.
        sends: what the kernel copies, in order.
        slice_k: elements along k of a slice that the kernel sends or waits for; 0: chunks are whole.
        tile_interleave: sizes of the groups of GEMMs whose tiles the kernel interleaves; empty: no GEMMs are
            interleaved.
    """

    wait_flags: tuple[tuple[Wait, ...], ...] = ()
    done_flags: tuple[Signal | None, ...] = ()
    sends: tuple[Send, ...] = ()
    slice_k: int = 0
    tile_interleave: tuple[int, ...] = ()


@dataclass(eq=False)
class Action:
    """What a rank puts on one stream at once.

    Attributes:
        stream: COMM, or GEMM_STREAM and up.
        ops: one Gemm, Copy, Reduce or Exchange; or several Waits or Signals; or all Gemms of the fused kernel.
        after: numbers of the actions on other streams that come before this one.
        step: a step of the replay protocol, done behind the ops; see :mod:`distgemm.runtime.cuda.workspace`.
        awaited: whether an action on another stream waits for this one.
        kernel: what the fused kernel does besides its GEMMs; None for every other action.
    """

    stream: int
    ops: tuple[Op, ...]
    after: tuple[int, ...] = ()
    step: Step | None = None
    awaited: bool = field(default=False)
    kernel: SingleKernel | None = None


def on_one_stream(actions: Sequence[Action]) -> bool:
    """Whether all GEMMs and sums are on one stream, so that none runs beside another."""
    return all(action.stream <= GEMM_STREAM for action in actions)


def exchanges_of(actions: Sequence[Action]) -> list[Exchange]:
    """The exchanges with other hosts, in order."""
    return [op for action in actions for op in action.ops if isinstance(op, Exchange)]


def waits_of(actions: Sequence[Action]) -> list[Wait]:
    """All Waits of the actions: those on streams and those within the fused kernel."""
    found: list[Op | None] = []
    for action in actions:
        found += action.ops
        if action.kernel is not None:
            found += chain.from_iterable(action.kernel.wait_flags)
            found += [send.wait for send in action.kernel.sends]
    return [op for op in found if isinstance(op, Wait)]
