"""A model of the protocol of epochs: all orders in which ranks, data and flags may move.

Each rank makes the same replays one after the other. In a replay it sends slots to receivers, waits for the flag of
each slot that it gets, and reads it. What is stored at a peer arrives some time later: a flag behind its data, all else
in any order. A slot holds the epoch of its data. Replays of several executables differ in slots. A captured graph is a
sequence of replays: nothing in a replay depends on the graph.

Where ranks are mortal, each may die at any time: it closes, its slots become NaN, then all its waits end. Replays that
it begins once it is closed are mute: they send nothing, and their results are NaN, whatever they read. A replay that is
under way when the rank closes may become silent, or mute, or both, from then on: some of its thread blocks begin later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distgemm.gemm.per_tile.epochs import EPOCHS, before, buffer_of

SLOTS = 2
"""Slots that a rank has for each sender, in each buffer."""


class Send(NamedTuple):
    """A slot that one rank fills at another one."""

    sender: int
    receiver: int
    slot: int


@dataclass(frozen=True)
class Replay:
    """What is sent. A mutant has the buffer that a capture would have noted."""

    sends: frozenset[Send]
    buffer: int | None = None


def everyone(ranks: int, slots: Sequence[int] = (0,), itself: bool = False) -> Replay:
    """Each rank sends to each other one, and to itself if it is one-shot."""
    pairs = ((a, b) for a in range(ranks) for b in range(ranks) if itself or a != b)
    return Replay(frozenset(Send(*pair, slot) for pair in pairs for slot in slots))


def without(ranks: int, *silent: int) -> Replay:
    """As :func:`everyone`, but some ranks send nothing: no such replays exist, and a test shows why."""
    return Replay(frozenset(send for send in everyone(ranks).sends if send.sender not in silent))


class ProtocolError(Exception):
    """A rank has read another epoch's data, or all ranks wait."""


class Rank(NamedTuple):
    """How far a rank is.

    Attributes:
        replay: number of the replay; the number of replays once all have ended.
        epoch: of the replay.
        sent: data that was issued.
        seen: data whose flag was seen.
        read: data that was read.
        slots: by sender, slot and buffer, the epoch of the data.
        flags: likewise, the flag.
        closed: whether replays that it begins are mute and silent.
        poisoned: whether its slots were filled with NaN.
        dead: whether its waits end.
        silent: whether this replay sends no more.
        mute: whether results of what this replay still reads are NaN.
    """

    replay: int
    epoch: int
    sent: frozenset[Send]
    seen: frozenset[Send]
    read: frozenset[Send]
    slots: tuple[int, ...]
    flags: tuple[int, ...]
    closed: bool = False
    poisoned: bool = False
    dead: bool = False
    silent: bool = False
    mute: bool = False


NAN, NONE = -1, -2
"""What a slot holds that the watchdog has filled, and what slots and flags hold at first."""


class Move(NamedTuple):
    """A word under way to a rank."""

    kind: str  # "data" or "flag"
    send: Send
    buffer: int
    epoch: int


State = tuple[tuple[Rank, ...], frozenset[Move]]


@dataclass(frozen=True)
class Protocol:
    """The protocol, or a mutant of it.

    Attributes:
        buffer: what an epoch uses.
        passes: whether a flag lets a wait for an epoch pass.
        ordered: whether a flag arrives behind its data.
        first: the first epoch.
        unset: what flags are at first.
        mortal: whether ranks die.
        poisons: whether slots are NaN before waits end.
        closes: whether replays become mute before slots become NaN; otherwise with the end of the waits.
        frees: whether waits end only once slots are NaN; otherwise once replays become mute.
        mute_sends: whether replays that begin on a closed rank send.
        mute_counts: whether their results are taken for right.
    """

    buffer: Callable[[int], int] = buffer_of
    passes: Callable[[int, int], bool] = int.__eq__
    ordered: bool = True
    first: int = 1
    unset: int = NONE
    mortal: bool = False
    poisons: bool = True
    closes: bool = True
    frees: bool = True
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
    nothing, places = frozenset[Send](), ranks * SLOTS * 2
    slots, flags = (NONE,) * places, (protocol.unset,) * places
    return (Rank(0, protocol.first, nothing, nothing, nothing, slots, flags),) * ranks, frozenset()


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
    for move in sorted(moves):  # so that a seed always gives the same way
        if move.kind == "flag" and protocol.ordered and move._replace(kind="data") in moves:
            continue
        if any(other[:3] == move[:3] and before(other.epoch, move.epoch) for other in moves):
            continue  # words to one place keep their order
        receiver, place = move.send.receiver, _place(move.send, move.buffer)
        at = ranks[receiver]
        if move.kind == "data":
            at = at._replace(slots=_set(at.slots, place, move.epoch))
        else:
            at = at._replace(flags=_set(at.flags, place, move.epoch))
        yield _set(ranks, receiver, at), moves - {move}


def _steps_of(number: int, rank: Rank, state: State, replay: Replay, protocol: Protocol) -> Iterator[State]:
    ranks, moves = state
    epoch = rank.epoch
    buffer = protocol.buffer(epoch) if replay.buffer is None else replay.buffer

    def with_(changed: Rank, added: frozenset[Move] = frozenset()) -> State:
        return _set(ranks, number, changed), moves | added

    to_send = [send for send in sorted(replay.sends) if send.sender == number and send not in rank.sent]
    to_read = [send for send in sorted(replay.sends) if send.receiver == number and send not in rank.read]
    dead = rank.dead if protocol.frees else rank.closed
    if protocol.mortal and not rank.closed and (protocol.closes or rank.dead):
        for silent in sorted({False, bool(to_send)}):
            for mute in sorted({False, bool(to_read)}):
                yield with_(rank._replace(closed=True, silent=silent, mute=mute))
    if protocol.mortal and not rank.poisoned and (rank.closed or not protocol.closes):
        yield with_(rank._replace(poisoned=True, slots=(NAN,) * len(rank.slots) if protocol.poisons else rank.slots))
    if rank.poisoned and not rank.dead:
        yield with_(rank._replace(dead=True))
    if protocol.mute_sends or not rank.silent:
        for send in to_send:
            stored = frozenset(Move(kind, send, buffer, epoch) for kind in ("data", "flag"))
            yield with_(rank._replace(sent=rank.sent | {send}), stored)
    for send in to_read:
        place = _place(send, buffer)
        if send not in rank.seen:
            if dead or protocol.passes(rank.flags[place], epoch):
                yield with_(rank._replace(seen=rank.seen | {send}))
            continue
        if rank.slots[place] not in (epoch, NAN) and (protocol.mute_counts or not rank.mute):
            raise ProtocolError(f"rank {number} reads epoch {rank.slots[place]} of rank {send.sender} in epoch {epoch}")
        yield with_(rank._replace(read=rank.read | {send}))
    arrived = not any(move.send.sender == number for move in moves)
    sent = not to_send or (rank.silent and not protocol.mute_sends)
    if sent and not to_read and arrived:
        nothing = frozenset[Send]()
        ended = rank._replace(replay=rank.replay + 1, epoch=(epoch + 1) % EPOCHS)
        yield with_(ended._replace(sent=nothing, seen=nothing, read=nothing, silent=rank.closed, mute=rank.closed))


def _place(send: Send, buffer: int) -> int:
    return (send.sender * SLOTS + send.slot) * 2 + buffer


def _set(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
