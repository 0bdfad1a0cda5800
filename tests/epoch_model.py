"""A model of the protocol of epochs: all orders in which ranks, data, flags and words of begun epochs may move.

Each rank makes the same replays one after the other. In a replay it says that it has begun, sends one slot to each
receiver, waits for the flag of each sender and reads its slot. What is stored at a peer arrives some time later: a flag
behind its data, all else in any order. A slot holds the epoch of its data.

Where ranks are mortal, each may die at any time: it closes, its slots become NaN, then all its waits end. Replays that
it begins once it is closed are mute: they send nothing, and their results are NaN, whatever they read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distgemm.gemm.per_tile.epochs import Clock

Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Replay:
    """Who sends to whom, and whether a rank ends it only after all have begun it."""

    pairs: Pairs
    closed: bool


def everyone(ranks: int) -> Replay:
    """Each rank sends to each other."""
    return Replay(frozenset((a, b) for a in range(ranks) for b in range(ranks) if a != b), closed=True)


def without(ranks: int, *silent: int) -> Replay:
    """As :func:`everyone`, but some ranks send nothing."""
    return Replay(frozenset(pair for pair in everyone(ranks).pairs if pair[0] not in silent), closed=False)


class ProtocolError(Exception):
    """A rank has read another epoch's data, or all ranks wait."""


class Rank(NamedTuple):
    """How far a rank is.

    Attributes:
        replay: number of the replay; the number of replays once all have ended.
        clock: of the replay.
        sent: receivers to which data was issued.
        seen: senders whose flag was seen.
        read: senders whose slot was read.
        begun: by rank, the last epoch that it is known to have begun.
        slots: by (sender, buffer), the epoch of the data.
        flags: by (sender, buffer), the flag.
        closed: whether replays that it begins are mute.
        poisoned: whether its slots were filled with NaN.
        dead: whether its waits end.
        mute: whether this replay sends nothing and gives NaN.
    """

    replay: int
    clock: Clock
    told: bool
    sent: frozenset[int]
    seen: frozenset[int]
    read: frozenset[int]
    begun: tuple[int, ...]
    slots: tuple[int, ...]
    flags: tuple[int, ...]
    closed: bool = False
    poisoned: bool = False
    dead: bool = False
    mute: bool = False


NAN = -1
"""What a slot holds that the watchdog has filled."""


class Move(NamedTuple):
    """A word under way to a rank."""

    kind: str  # "begun", "data" or "flag"
    sender: int
    receiver: int
    buffer: int
    epoch: int


State = tuple[tuple[Rank, ...], frozenset[Move]]


@dataclass(frozen=True)
class Protocol:
    """The protocol, or a mutant of it.

    Attributes:
        next: the clock of the next replay.
        passes: whether a flag lets a wait for an epoch pass.
        waits: whether a rank heeds the clock's word that it waits.
        ordered: whether a flag arrives behind its data.
        first: the first epoch.
        mortal: whether ranks die.
        poisons: whether slots are NaN before waits end.
        closes: whether replays become mute before slots become NaN; otherwise with the end of the waits.
        mute_sends: whether mute replays send.
        mute_counts: whether the results of mute replays are taken for right.
    """

    next: Callable[[Clock, bool], Clock] = Clock.next
    passes: Callable[[int, int], bool] = int.__eq__
    waits: bool = True
    ordered: bool = True
    first: int = 1
    mortal: bool = False
    poisons: bool = True
    closes: bool = True
    mute_sends: bool = False
    mute_counts: bool = False


def check(ranks: int, replays: Sequence[Replay], protocol: Protocol = Protocol()) -> int:
    """Go through all states. Returns their number.

    Raises:
        ProtocolError: as its docstring says.
    """
    todo = [_start(ranks, protocol)]
    known = set(todo)
    while todo:
        for one in _following(todo.pop(), replays, protocol):
            if one not in known:
                known.add(one)
                todo.append(one)
    return len(known)


def walk(ranks: int, replays: Sequence[Replay], seed: int, protocol: Protocol = Protocol()) -> None:
    """Go one random way through the states.

    Raises:
        ProtocolError: as :func:`check`.
    """
    rng, state = random.Random(seed), _start(ranks, protocol)
    while following := _following(state, replays, protocol):
        state = rng.choice(following)


def _start(ranks: int, protocol: Protocol) -> State:
    none, slots = frozenset[int](), (0,) * (2 * ranks)
    rank = Rank(0, Clock(protocol.first), False, none, none, none, (0,) * ranks, slots, slots)
    return (rank,) * ranks, frozenset()


def _following(state: State, replays: Sequence[Replay], protocol: Protocol) -> list[State]:
    found = list(_steps(state, replays, protocol))
    if not found and not all(rank.replay == len(replays) for rank in state[0]):
        raise ProtocolError(f"all ranks wait: {state}")
    return found


def _steps(state: State, replays: Sequence[Replay], protocol: Protocol) -> Iterator[State]:
    ranks, moves = state
    for number, rank in enumerate(ranks):
        if rank.replay < len(replays):
            yield from _steps_of(number, rank, state, replays[rank.replay], protocol)
    for move in moves:
        if move.kind == "flag" and protocol.ordered and move._replace(kind="data") in moves:
            continue
        if any(other[:4] == move[:4] and other.epoch < move.epoch for other in moves):
            continue  # words to one place keep their order
        at = ranks[move.receiver]
        place = move.sender * 2 + move.buffer
        if move.kind == "begun":
            at = at._replace(begun=_set(at.begun, move.sender, move.epoch))
        elif move.kind == "data":
            at = at._replace(slots=_set(at.slots, place, move.epoch))
        else:
            at = at._replace(flags=_set(at.flags, place, move.epoch))
        yield _set(ranks, move.receiver, at), moves - {move}


def _steps_of(number: int, rank: Rank, state: State, replay: Replay, protocol: Protocol) -> Iterator[State]:
    ranks, moves = state
    clock, epoch, buffer = rank.clock, rank.clock.epoch, rank.clock.buffer
    others = [other for other in range(len(ranks)) if other != number]

    def with_(changed: Rank, added: frozenset[Move] = frozenset()) -> State:
        return _set(ranks, number, changed), moves | added

    if protocol.mortal and not rank.closed and (protocol.closes or rank.dead):
        yield with_(rank._replace(closed=True))
    if protocol.mortal and not rank.poisoned and (rank.closed or not protocol.closes):
        yield with_(rank._replace(poisoned=True, slots=(NAN,) * len(rank.slots) if protocol.poisons else rank.slots))
    if rank.poisoned and not rank.dead:
        yield with_(rank._replace(dead=True))
    if not rank.told:
        yield with_(rank._replace(told=True), frozenset(Move("begun", number, x, 0, epoch) for x in others))
    may_store = not (protocol.waits and clock.waits) or all(rank.begun[x] >= epoch for x in others)
    if rank.dead and not rank.mute and not may_store:
        yield with_(rank._replace(mute=True))
    may_store = may_store and (protocol.mute_sends or not rank.mute)
    for receiver in others:
        if (number, receiver) in replay.pairs and receiver not in rank.sent and may_store:
            stored = {Move(kind, number, receiver, buffer, epoch) for kind in ("data", "flag")}
            yield with_(rank._replace(sent=rank.sent | {receiver}), frozenset(stored))
    senders = [x for x in others if (x, number) in replay.pairs]
    for sender in senders:
        place = sender * 2 + buffer
        if sender not in rank.seen and (rank.dead or protocol.passes(rank.flags[place], epoch)):
            yield with_(rank._replace(seen=rank.seen | {sender}))
        if sender in rank.seen and sender not in rank.read:
            if rank.slots[place] not in (epoch, NAN) and (protocol.mute_counts or not rank.mute):
                raise ProtocolError(f"rank {number} reads epoch {rank.slots[place]} of rank {sender} in epoch {epoch}")
            yield with_(rank._replace(read=rank.read | {sender}))
    receivers = [x for x in others if (number, x) in replay.pairs]
    arrived = not any(move.sender == number and move.kind != "begun" for move in moves)
    sent = len(rank.sent) == len(receivers) or (rank.mute and not protocol.mute_sends)
    if rank.told and sent and len(rank.read) == len(senders) and arrived:
        none = frozenset[int]()
        ended = rank._replace(replay=rank.replay + 1, told=False, sent=none, seen=none, read=none, mute=rank.closed)
        yield with_(ended._replace(clock=protocol.next(clock, replay.closed)))


def _set(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
