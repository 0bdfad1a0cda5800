"""What a rank exchanges with other hosts: messages, in an order that the plan fixes.

Ranks of one host write each other's memory and set each other's flags. Ranks of different hosts send messages, and all
messages of a rank in one round are one :class:`Exchange`. It replaces the copies to other hosts, their flags, and the
waits for what comes from there:

- The exchange starts when everything that the rank sends is complete, and when the slots that it receives into may be
  written. So no credit crosses hosts: a rank that receives is its own creditor.
- Messages from one rank to another arrive in the order in which they were sent. So a pair of ranks is one channel, and
  the number of a message in it says which one it is.
- A rank makes its exchanges in the order of rounds. Two ranks that exchange something do it in the same round.

A runtime therefore needs no buffers for messages: a send may wait for the receive. docs/verify.md says why no rank
waits forever, and :func:`check_exchanges` executes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from distgemm.plan.ops import Barrier, Copy, Op, Signal, Wait, link_of
from distgemm.plan.plan import Plan, PlanError

__all__ = ["Exchange", "check_exchanges", "ops_with_exchanges"]


@dataclass(frozen=True, slots=True)
class Exchange(Op):
    """All messages of a rank to and from other hosts in one round, at once.

    Its id is one that no op of the rank has. Its operand, tile and slot are those of its first message.

    Attributes:
        sends: the copies that this rank sends, in the order of its ops.
        receives: the copies that others send to it, by sender, then in the order of the sender's ops.
    """

    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]

    @property
    def peers(self) -> list[int]:
        """The ranks to which or from which messages go, in ascending order."""
        return sorted({op.dst.rank for op in self.sends} | {op.src.rank for op in self.receives})

    def describe(self) -> str:
        to = ", ".join(str(op.dst) for op in self.sends) or "nothing"
        into = ", ".join(f"{op.dst} from rank {op.src.rank}" for op in self.receives) or "nothing"
        return f"rank {self.rank} round {self.round}: Exchange sends {to}; receives {into}"


def ops_with_exchanges(plan: Plan, rank: int) -> tuple[Op, ...]:
    """The ops of a rank, with an Exchange for each round in which it sends or receives across hosts.

    Args:
        plan: of all ranks.
        rank: 0 to world_size - 1.

    Returns:
        The ops in an order in which the rank can issue them one by one: that of the plan, with each Exchange behind the
        other ops of its round that do not need it. Those of the plan itself if nothing crosses hosts.

    Raises:
        PlanError: for another mechanism than "push", for a flag across hosts that is neither a credit nor the arrival
            of messages, and for messages of one round that need one another.
    """
    ops = plan.ops(rank)
    if plan.ranks_per_host is None:
        return ops
    if plan.mechanism != "push":
        raise PlanError(f"ranks send to other hosts, whose memory they do not access; got mechanism {plan.mechanism!r}")
    return _Rewriting(plan, rank).ops()


class _Messages(NamedTuple):
    """What comes from one rank of another host.

    Attributes:
        copies: the messages to this rank, in order.
        flags: for each arrival flag of this rank that the other one sets, the rounds of the messages before it.
        credits: for each message, by its id, the flags that this rank sets before it within a replay.
    """

    copies: list[Copy]
    flags: dict[int, set[int]]
    credits: dict[int, list[int]]


class _Rewriting:
    """The exchanges of one rank, and its other ops."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.own = plan, rank, plan.ops(rank)
        self.by_id = {op.id: op for op in self.own}

    def ops(self) -> tuple[Op, ...]:
        plan, rank = self.plan, self.rank
        sends: dict[int, list[Copy]] = defaultdict(list)
        for op in self.own:
            if self._sends(op):
                assert isinstance(op, Copy)
                sends[op.round].append(op)
        waits = [op for op in self.own if isinstance(op, Wait) and plan.across(rank, op.peer)]
        senders = sorted({op.peer for op in waits if not op.flag.credit})
        come = {peer: _messages(plan, peer, rank) for peer in senders}
        receives: dict[int, list[Copy]] = defaultdict(list)
        for messages in come.values():
            for copy in messages.copies:
                receives[copy.round].append(copy)
        rounds = sorted(sends.keys() | receives.keys())
        first = max(self.by_id, default=-1) + 1
        number = {round_: first + at for at, round_ in enumerate(rounds)}
        # What stands for an op that is left out.
        instead: dict[int, tuple[int, ...]] = {op.id: (number[op.round],) for each in sends.values() for op in each}
        for wait in waits:
            instead[wait.id] = () if wait.flag.credit else self._arrival(wait, come[wait.peer], number)
        for op in self.own:
            if isinstance(op, Signal) and plan.across(rank, op.flag.rank):
                self._check_signal(op)
                instead[op.id] = ()
        exchanges = {}
        for round_ in rounds:
            sent, got = sends[round_], receives[round_]
            deps = [dep for op in sent for dep in op.deps]
            deps += [dep for op in got for dep in self._credits(op, come[op.src.rank])]
            head = (sent or got)[0]
            about = head.iteration, head.operand, head.tile, head.slot
            needs = _mapped(deps, instead)
            exchanges[round_] = Exchange(number[round_], rank, round_, *about, needs, tuple(sent), tuple(got))
        kept = [
            op if not instead.keys() & set(op.deps) else replace(op, deps=_mapped(op.deps, instead))
            for op in self.own
            if op.id not in instead
        ]
        return tuple(_in_order(kept, exchanges))

    def _sends(self, op: Op) -> bool:
        link = link_of(op)
        return link is not None and self.plan.across(*link)

    def _arrival(self, wait: Wait, messages: _Messages, number: Mapping[int, int]) -> tuple[int, ...]:
        rounds = messages.flags.get(wait.flag.number, set())
        if not rounds:
            raise PlanError(f"{wait.describe()}: a flag across hosts is the arrival of messages, and none come", wait)
        return tuple(number[round_] for round_ in sorted(rounds))

    def _credits(self, copy: Copy, messages: _Messages) -> Iterable[int]:
        """Ids of the ops that must have ended before a message is received."""
        for flag in messages.credits.get(copy.id, ()):
            yield from self._signals[copy.rank, flag].deps

    @cached_property
    def _signals(self) -> dict[tuple[int, int], Signal]:
        return {op.flag[:2]: op for op in self.own if isinstance(op, Signal)}

    def _check_signal(self, op: Signal) -> None:
        """Raise PlanError for the arrival of anything else than messages."""
        for dep in () if op.flag.credit else op.deps:
            moved = self.by_id[dep]
            if link_of(moved) != (self.rank, op.flag.rank):
                raise PlanError(
                    f"{op.describe()}: a flag across hosts is the arrival of messages, and it comes after {moved}", op
                )


def _messages(plan: Plan, sender: int, to: int) -> _Messages:
    """What a rank sends to a rank of another host."""
    found = _Messages([], {}, {})
    own: dict[int, Op] = {}
    for op in plan.ops(sender):
        own[op.id] = op
        if isinstance(op, Copy) and link_of(op) == (sender, to):
            found.copies.append(op)
            needs = [own[dep] for dep in op.deps]
            credits = [need for need in needs if isinstance(need, Wait) and plan.across(sender, need.peer)]
            for wait in credits:
                if wait.flag.credit and wait.peer != to:
                    raise PlanError(f"{wait.describe()}: a credit across hosts comes from the rank that receives", wait)
            found.credits[op.id] = [wait.flag.number for wait in credits if wait.flag.credit and not wait.flag.initial]
        elif isinstance(op, Signal) and op.flag.rank == to and not op.flag.credit:
            moved = [own[dep] for dep in op.deps]
            found.flags[op.flag.number] = {each.round for each in moved if link_of(each) == (sender, to)}
    return found


def _mapped(deps: Iterable[int], instead: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(new for dep in deps for new in instead.get(dep, (dep,))))


def _in_order(ops: Sequence[Op], exchanges: Mapping[int, Exchange]) -> list[Op]:
    """The ops with the exchanges: each behind what it needs, and as late in its round as possible."""
    found: list[Op] = []
    done: set[int] = set()
    of_round: dict[int, list[Op]] = {round_: list(group) for round_, group in groupby(ops, key=lambda op: op.round)}
    for round_ in sorted(of_round.keys() | exchanges.keys()):
        left = deque([*of_round.get(round_, []), *([exchanges[round_]] if round_ in exchanges else [])])
        delayed = 0
        while left:
            op = left.popleft()
            if done.issuperset(op.deps):
                found.append(op)
                done.add(op.id)
                # What was delayed goes first again.
                left.rotate(delayed)
                delayed = 0
            elif delayed == len(left):
                raise PlanError(f"{op.describe()}: needs a message of its own round, {round_}", op)
            else:
                left.append(op)
                delayed += 1
    return found


# --- the proof ------------------------------------------------------------------------------------------


def check_exchanges(plan: Plan) -> None:
    """Check that no rank waits forever for a message, without any buffer for messages.

    Each rank issues its ops one by one. For each pair of ranks a counter has the messages that the sender has begun,
    and another one those that the receiver has begun. An Exchange ends once its counters are equal. If this order comes
    to an end, so does every other one, because beginning an op never keeps another op from beginning.

    Args:
        plan: a plan whose structure :func:`distgemm.plan.validate.validate` has checked.

    Raises:
        PlanError: if ranks wait for each other forever. The message names the ops.
    """
    ranks = range(plan.world_size)
    left = [deque(ops_with_exchanges(plan, rank)) for rank in ranks]
    flags = {op.flag[:2] for ops in left for op in ops if isinstance(op, Wait) and op.flag.initial}
    # For each channel (sender, receiver): how many messages the sender, and the receiver, has begun.
    sent: Counter[tuple[int, int]] = Counter()
    awaited: Counter[tuple[int, int]] = Counter()
    begun: set[int] = set()  # ranks that are within an exchange
    at_barrier: dict[int, set[int]] = defaultdict(set)

    def ended(rank: int, peer: int) -> bool:
        return awaited[rank, peer] >= sent[rank, peer] and sent[peer, rank] >= awaited[peer, rank]

    def passes(op: Op) -> bool:
        if isinstance(op, Exchange):
            if op.rank not in begun:
                begun.add(op.rank)
                sent.update((op.rank, copy.dst.rank) for copy in op.sends)
                awaited.update((copy.src.rank, op.rank) for copy in op.receives)
            return all(ended(op.rank, peer) for peer in op.peers)
        if isinstance(op, Wait):
            if op.flag[:2] not in flags:
                return False
            flags.remove(op.flag[:2])
        elif isinstance(op, Signal):
            flags.add(op.flag[:2])
        elif isinstance(op, Barrier):
            at_barrier[op.round].add(op.rank)
            return len(at_barrier[op.round]) == len(ranks)
        return True

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while left[rank] and passes(left[rank][0]):
                begun.discard(rank)
                left[rank].popleft()
                moved = True
    stuck = [ops[0] for ops in left if ops]
    if stuck:
        others = "; ".join(op.describe() for op in stuck[1:4])
        raise PlanError(
            f"{stuck[0].describe()}: deadlock across hosts: it never ends{'; nor does ' + others if others else ''}",
            stuck[0],
        )
