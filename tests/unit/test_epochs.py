"""The protocol of epochs: every order of events is right, and each rule is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from distgemm.gemm.per_tile.epochs import EPOCHS, TICKET_BITS, before, buffer_of
from tests.epoch_model import Protocol, ProtocolError, Replay, check, everyone, walk, without

SLOTS = ((0,), (1,), (0, 1))
GRAPHS = (
    [everyone(2)],
    [everyone(2), everyone(2, slots=(0, 1)), everyone(2, slots=(1,))],
    [everyone(2, slots=(1,)), everyone(2)],
    [everyone(2, slots=(0, 1))],
)
"""What captured graphs replay: executables that differ in slots, some of them odd in number."""


def test_epochs_wrap_around() -> None:
    for epoch in (0, 1, 5, 2**32, EPOCHS // 2, EPOCHS - 1):
        for steps in (1, 2, 1000, EPOCHS // 2 - 1):
            later = (epoch + steps) % EPOCHS
            assert before(epoch, later) and not before(later, epoch) and not before(epoch, epoch)
    assert EPOCHS << TICKET_BITS == 2**64 and buffer_of(EPOCHS - 1) != buffer_of(0)


def test_two_ranks() -> None:
    """All sequences of three replays that differ in slots, and one of five."""
    for slots in itertools.product(SLOTS, repeat=3):
        assert check(2, [everyone(2, each) for each in slots]) > 100
    assert check(2, [everyone(2)] * 10) > 500


def test_one_shot_replays() -> None:
    """Ranks have slots for their own sums, too; beside replays that have none, and where ranks die."""
    replays = [everyone(2, itself=True), everyone(2), everyone(2, itself=True)]
    assert check(2, replays) > 500
    for seed in range(300):
        walk(3, [everyone(3, itself=itself) for itself in (True, False, True, True)], seed)
        walk(2, [*replays, replays[0]], seed, Protocol(mortal=True))


@pytest.mark.sample(0)
def test_all_orders_of_three_ranks() -> None:
    assert check(3, [everyone(3)] * 3) > 200_000


def test_three_ranks() -> None:
    for number, slots in enumerate(itertools.product(SLOTS, repeat=4)):
        walk(3, [everyone(3, each) for each in slots], number)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [1, 2**32 - 2, EPOCHS - 2])
def test_graphs_of_several_executables(first: int) -> None:
    random_graphs(Protocol(first=first))


def test_all_orders_of_an_odd_graph() -> None:
    """Of executables that differ in slots, where epochs wrap around."""
    assert check(2, GRAPHS[1], Protocol(first=EPOCHS - 2)) > 1000


def random_graphs(protocol: Protocol) -> None:
    for seed, graphs in enumerate(itertools.product(GRAPHS, repeat=4)):
        walk(2, [*itertools.chain(*graphs)], seed, protocol)


def test_ranks_that_die() -> None:
    """No order of events gives a wrong result that is not NaN, and no replay of a dead rank hangs."""
    deaths(Protocol(mortal=True))


def deaths(protocol: Protocol) -> None:
    """All orders of events of three replays, and random ways through four."""
    assert check(2, [everyone(2)] * 3, protocol) > 30_000
    for seed in range(1000):
        walk(2, [everyone(2)] * 4, seed, protocol)
    for number, slots in enumerate(itertools.product(SLOTS, repeat=4)):
        walk(3, [everyone(3, each) for each in slots], number, protocol)


MUTANTS = {
    "all replays use one buffer": Protocol(buffer=lambda epoch: 0),
    "a flag overtakes its data": Protocol(ordered=False),
    "any flag lets pass": Protocol(passes=lambda flag, epoch: True),
    "an older flag lets pass": Protocol(passes=lambda flag, epoch: 0 <= epoch - 2 <= flag),
    "flags are compared by their lowest bit": Protocol(passes=lambda flag, epoch: flag >= 0 and not (flag - epoch) % 2),
}


MORTAL_MUTANTS = {
    "replays become mute late": Protocol(mortal=True, closes=False),
    "slots keep their data": Protocol(mortal=True, poisons=False),
    "waits end before slots are NaN": Protocol(mortal=True, frees=False),
    "mute replays send": Protocol(mortal=True, mute_sends=True),
    "results of mute replays count": Protocol(mortal=True, mute_counts=True),
}


@pytest.mark.parametrize("mutant", MORTAL_MUTANTS.values(), ids=MORTAL_MUTANTS)
def test_mutants_that_die_fail(mutant: Protocol) -> None:
    with pytest.raises(ProtocolError, match="reads epoch"):
        deaths(mutant)


def every_sequence(mutant: Protocol) -> None:
    check(2, [everyone(2)] * 4, mutant)


def random_ways(mutant: Protocol) -> None:
    for seed in range(3000):
        walk(3, [everyone(3)] * 4, seed, mutant)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("search", [every_sequence, random_ways])
def test_mutants_fail(search: Callable[[Protocol], None], mutant: Protocol) -> None:
    with pytest.raises(ProtocolError):
        search(mutant)


def test_a_rank_that_sends_nothing_fails() -> None:
    """Nobody waits for it, so the others write what it may still read."""
    with pytest.raises(ProtocolError):
        check(2, [without(2, 0)] * 3)


def test_a_flag_that_begins_as_an_epoch_fails() -> None:
    """The first data in a slot comes in epoch 0, and its flag began as 0."""
    with pytest.raises(ProtocolError, match=r"reads epoch -2 of rank . in epoch 0"):
        random_graphs(Protocol(first=EPOCHS - 1, unset=0))


def test_a_buffer_noted_at_the_capture_fails() -> None:
    """If the number of replays of a graph is odd: its last and the next one's first replay use the same buffer."""

    def noted(replays: int) -> list[Replay]:
        return [replace(everyone(2), buffer=number % 2) for number in range(replays)] * (6 // replays)

    check(2, noted(2)[:4])
    with pytest.raises(ProtocolError, match="reads epoch"):
        check(2, noted(3))
