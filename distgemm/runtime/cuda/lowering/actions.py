"""Actions: what a rank puts on its streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distgemm.plan.exchanges import Exchange
from distgemm.plan.ops import Op, Wait
from distgemm.plan.plan import Plan
from distgemm.runtime.cuda.workspace import Step
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["GEMM_STREAM", "COMM", "Action", "check_waits", "exchanges_of", "on_one_stream", "waits_of"]

COMM = 0
"""The stream of all copies between ranks and of the signals behind them. There is one such stream, because two copies
at once share the link. Signals and the steps of the replay protocol stay on it too: on a stream of their own they made
captured graphs of several replays hold copies back behind waits.
"""
GEMM_STREAM = 1
"""The first stream of GEMMs, which is the caller's own. Further GEMM streams follow, then a stream of sums, then one of
exchanges with other hosts. NCCL keeps the order of messages by the order on this stream."""


@dataclass(eq=False)
class Action:
    """What a rank puts on one stream at once.

    Attributes:
        stream: COMM, or GEMM_STREAM and up.
        ops: one Gemm, Copy, Reduce or Exchange; or several Waits or Signals.
        after: numbers of the actions on other streams that come before this one.
        step: a step of the replay protocol, done behind the ops; see :mod:`distgemm.runtime.cuda.workspace`.
        awaited: whether an action on another stream waits for this one.
    """

    stream: int
    ops: tuple[Op, ...]
    after: tuple[int, ...] = ()
    step: Step | None = None
    awaited: bool = field(default=False)


def on_one_stream(actions: Sequence[Action]) -> bool:
    """Whether all GEMMs and sums are on one stream, so that none runs beside another."""
    return all(action.stream <= GEMM_STREAM for action in actions)


def check_waits(plan: Plan, execution: ExecutionConfig, actions: Sequence[Action]) -> None:
    """Check that kernels which wait run beside no other ones, from which they could keep an SM.

    Raises:
        ValueError: where GEMMs and sums are on several streams.
    """
    if execution.wait_by == "kernel" and not on_one_stream(actions):
        raise ValueError(
            f"wait_by='kernel' is for plans that multiply and add on one stream, and {plan.schedule} with "
            f"gemm_streams={execution.gemm_streams} does not: beside other kernels, a kernel that waits may keep an SM "
            "from what it waits for. wait_by='memory_op' works"
        )


def exchanges_of(actions: Sequence[Action]) -> list[Exchange]:
    """The exchanges with other hosts, in order."""
    return [op for action in actions for op in action.ops if isinstance(op, Exchange)]


def waits_of(actions: Sequence[Action]) -> list[Wait]:
    """All Waits of the actions."""
    return [op for action in actions for op in action.ops if isinstance(op, Wait)]
