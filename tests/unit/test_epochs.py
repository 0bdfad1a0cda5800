"""The protocol of epochs: every order of events is right, and each rule is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from distgemm.gemm.per_tile.epochs import Clock
from tests.epoch_model import Protocol, ProtocolError, check, everyone, walk, without

TWO = (everyone(2), without(2, 0), without(2, 1))


def test_two_ranks() -> None:
    """All sequences of three replays, in which both ranks send, or one; and one of five."""
    for replays in itertools.product(TWO, repeat=3):
        assert check(2, replays) > 100
    assert check(2, [everyone(2)] * 5) > 10000


def test_three_ranks() -> None:
    kinds = (everyone(3), without(3, 0), without(3, 1, 2))
    for number, replays in enumerate(itertools.product(kinds, repeat=4)):
        walk(3, replays, number)


def test_ranks_that_die() -> None:
    """No order of events gives a wrong result that is not NaN, and no replay of a dead rank hangs."""
    assert check(2, [everyone(2)] * 2, Protocol(mortal=True)) > 100_000
    random_deaths(Protocol(mortal=True))


def test_epochs_beyond_32_bits() -> None:
    check(2, [everyone(2)] * 4, Protocol(first=2**32 - 2))


def buffer_kept(clock: Clock, closed: bool) -> Clock:
    """Each replay uses the same buffer, and nobody waits."""
    return replace(clock.next(closed), buffer=0, waits=False)


def always_closed(clock: Clock, closed: bool) -> Clock:
    return clock.next(True)


MUTANTS = {
    "no rank waits": Protocol(waits=False),
    "one buffer, no wait": Protocol(next=buffer_kept),
    "each replay counts as closed": Protocol(next=always_closed),
    "a flag overtakes its data": Protocol(ordered=False),
    "any flag lets pass": Protocol(passes=lambda flag, epoch: True),
    "an older flag lets pass": Protocol(passes=lambda flag, epoch: flag >= epoch - 2),
}


def random_deaths(protocol: Protocol) -> None:
    for seed in range(1000):
        walk(2, [everyone(2)] * 4, seed, protocol)
    for number, replays in enumerate(itertools.product((everyone(3), without(3, 0), without(3, 1, 2)), repeat=4)):
        walk(3, replays, number, protocol)


MORTAL_MUTANTS = {
    "replays become mute late": Protocol(mortal=True, closes=False),
    "slots keep their data": Protocol(mortal=True, poisons=False),
    "mute replays send": Protocol(mortal=True, mute_sends=True),
    "results of mute replays count": Protocol(mortal=True, mute_counts=True),
}


@pytest.mark.parametrize("mutant", MORTAL_MUTANTS.values(), ids=MORTAL_MUTANTS)
def test_mutants_that_die_fail(mutant: Protocol) -> None:
    with pytest.raises(ProtocolError, match="reads epoch"):
        random_deaths(mutant)


def every_sequence(mutant: Protocol) -> None:
    for replays in itertools.product(TWO, repeat=4):
        check(2, replays, mutant)


def random_ways(mutant: Protocol) -> None:
    for seed in range(3000):
        walk(3, [everyone(3), without(3, 0), everyone(3), without(3, 1, 2)], seed, mutant)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("search", [every_sequence, random_ways])
def test_mutants_fail(search: Callable[[Protocol], None], mutant: Protocol) -> None:
    with pytest.raises(ProtocolError):
        search(mutant)
