"""The barriers of a per-tile kernel's cluster: none is completed again, and no ticket overwritten, before it is read.

The warps of a cluster are processes that wait for barriers and complete them, as in per_tile.cu. What each does depends
on nothing else. So the others get furthest ahead of a process that stands still before one of its waits until nothing
else moves. That is tried for all processes and waits of some tiles.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

TILES, HELD_TILES = 32, 3
"""Processes stand still before waits of the first tiles only: later ones are the same."""
GROUPS = 2


class BarrierError(Exception):
    """A barrier was completed again before a process had looked, or a ticket was overwritten."""


@dataclass(frozen=True)
class Kernel:
    """A kernel; ``depth`` is the number of stages that a tile needs.

    Attributes:
        lent: sets of barriers for subtiles in the last stage of operands, which is free when they are stored; 0: all
            subtiles take epilogue stages.
        split: thread blocks that split k, and pass sums to those that finish tiles; 1: each block has a tile.
        mutant: what these do wrong. "at once": they send sums before those that they sent for the tile before have been
            added. "early turn": a warp group multiplies before the other one has waited for that.
    """

    cluster: tuple[int, int]
    stages: int
    epilogue_stages: int
    subtiles: int
    pingpong: bool
    depth: int = 1
    lent: int = 0
    split: int = 1
    mutant: str = ""

    @property
    def tiles(self) -> int:
        return self.cluster[0] * self.cluster[1]

    @property
    def blocks(self) -> int:
        return max(self.tiles, self.split)

    @property
    def parts(self) -> int:
        return 1 if self.pingpong else GROUPS

    @property
    def behind(self) -> int:
        """As ``kBehind`` of per_tile.cu has it."""
        steps = 2 if min(self.cluster) > 1 and self.split == 1 else 1
        ahead = 2 if self.split > 1 and self.tiles > 1 else 0
        return steps * self.stages + (2 if self.pingpong else 1) * (1 + self.epilogue_stages // self.subtiles) + ahead

    def sharing(self, block: int) -> list[int]:
        """Blocks that load into the same stages as a block."""
        if self.split > 1:
            return [block]
        high = self.cluster[0]
        return [x for x in range(self.blocks) if x % high == block % high or x // high == block // high]


class Wait:
    """For a barrier's phases up to one, none for -1; or for a ticket, if there is no barrier."""

    def __init__(self, barrier: tuple[Any, ...] | None, phase: int) -> None:
        self.barrier, self.phase = barrier, phase


class Cluster:
    """A cluster at work."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.passed, self.behind = kernel, 1, 0
        self.completed = Counter[tuple[Any, ...]]()
        self.arrived = defaultdict[tuple[Any, ...], set[Any]](set)
        self.processes: list[Iterator[Wait]] = []
        for block in range(kernel.blocks):
            self.processes += [self.load(block), self.multiply(block, 0), self.multiply(block, 1)]
            self.processes += [self.store(block)] if block < kernel.tiles else []

    def arrive(self, barrier: tuple[Any, ...], who: Any, expected: int = 1) -> None:
        if who in self.arrived[barrier]:
            raise BarrierError(f"{who} arrives twice in a phase of {barrier}")
        self.arrived[barrier].add(who)
        if len(self.arrived[barrier]) == expected:
            self.arrived[barrier].clear()
            self.completed[barrier] += 1

    def release(self, block: int, stage: int, group: int) -> None:
        kernel = self.kernel
        for other in kernel.sharing(block):
            self.arrive(("empty", other, stage), (block, group), len(kernel.sharing(other)) * kernel.parts)

    def load(self, block: int) -> Iterator[Wait]:
        kernel, use = self.kernel, 0
        for tile in range(TILES):
            yield Wait(None, tile)
            for _ in range(kernel.depth):
                yield Wait(("empty", block, use % kernel.stages), use // kernel.stages - 1)
                for other in kernel.sharing(block):
                    self.arrive(("full", other, use % kernel.stages), block, len(kernel.sharing(other)))
                use += 1
            if block == 0:
                self.passed = tile + 2
        yield Wait(None, TILES)
        for last in range(use, use + kernel.stages):
            yield Wait(("empty", block, last % kernel.stages), last // kernel.stages - 1)

    def multiply(self, block: int, group: int) -> Iterator[Wait]:
        kernel, uses = self.kernel, 0
        for tile in range(TILES):
            yield Wait(None, tile)
            if kernel.pingpong and tile % GROUPS != group:
                continue
            if kernel.pingpong and tile:
                yield Wait(("turn", block), tile - 1)
            first = tile * kernel.depth
            for use in range(first, first + kernel.depth):
                yield Wait(("full", block, use % kernel.stages), use // kernel.stages)
                if use > first:
                    self.release(block, (use - 1) % kernel.stages, group)
            early = kernel.split == 1 or kernel.mutant == "early turn"
            if kernel.pingpong and early:
                self.arrive(("turn", block), group)
            if kernel.lent:
                self.arrive(("both", block), group, GROUPS)
                yield Wait(("both", block), tile)
            else:
                self.release(block, use % kernel.stages, group)
            if kernel.split > 1:
                if kernel.mutant != "at once":
                    yield Wait(("taken", block), tile - 1)
                if not early:
                    self.arrive(("turn", block), group)
                for other in range(kernel.tiles):
                    self.arrive(("summed", other), block, kernel.blocks)
                if block >= kernel.tiles:
                    continue
                yield Wait(("summed", block), tile)
                for other in range(kernel.blocks):
                    self.arrive(("taken", other), block, kernel.tiles)
            for subtile in range(kernel.subtiles):
                if kernel.lent and subtile >= kernel.epilogue_stages:
                    self.arrive(("lent", block, group, subtile, tile % kernel.lent), group)
                    continue
                stage = block, group, uses % kernel.epilogue_stages
                yield Wait(("free", *stage), uses // kernel.epilogue_stages - 1)
                self.arrive(("written", *stage), group)
                uses += 1
        yield Wait(None, TILES)
        if kernel.split > 1 and group != TILES % GROUPS:
            yield Wait(("taken", block), TILES - 1)

    def store(self, block: int) -> Iterator[Wait]:
        kernel, uses = self.kernel, [0] * GROUPS
        stored: list[tuple[Any, ...]] = []  # what a store may still read
        for tile in range(TILES):
            yield Wait(None, tile)
            groups = [tile % GROUPS] if kernel.pingpong else [*range(GROUPS)]
            for subtile in range(kernel.subtiles):
                for group in groups:
                    if lent := kernel.lent and subtile >= kernel.epilogue_stages:
                        wait = Wait(("lent", block, group, subtile, tile % kernel.lent), tile // kernel.lent)
                    else:
                        stage = block, group, uses[group] % kernel.epilogue_stages
                        wait = Wait(("written", *stage), uses[group] // kernel.epilogue_stages)
                        uses[group] += 1
                    if not self.is_over(wait):
                        while stored:
                            self.arrive(stored.pop(), "store")
                    yield wait
                    while stored:
                        self.arrive(stored.pop(), "store")
                    if not lent:
                        stored.append(("free", *stage))
            for group in range(GROUPS if kernel.lent else 0):
                self.release(block, ((tile + 1) * kernel.depth - 1) % kernel.stages, group)
        yield Wait(None, TILES)

    def is_over(self, wait: Wait) -> bool:
        if wait.barrier is None:
            self.behind = max(self.behind, self.passed - 1 - wait.phase)
            return self.passed > wait.phase
        ahead = self.completed[wait.barrier] - 1 - wait.phase
        if ahead > 0:
            raise BarrierError(f"phase {wait.phase} of {wait.barrier} has passed, and {ahead} behind it")
        if ahead < -1:  # a parity is that of the phase two before, which has passed
            raise BarrierError(f"phase {wait.phase} of {wait.barrier} is waited for before the one before has passed")
        return ahead == 0

    def run(self, held: int, at: int) -> bool:
        """All processes come to an end, but one stands still before a wait until no other moves.

        Returns:
            Whether to go on with the next wait.
        """
        waits = [next(process, None) for process in self.processes]
        count, tile = 0, 0
        still, moved = True, True
        while moved or still:
            still, moved = still and moved, False
            for number, process in enumerate(self.processes):
                while (wait := waits[number]) and not (still and number == held and count == at):
                    if not self.is_over(wait):
                        break
                    if number == held and still:
                        count += 1
                        tile = wait.phase if wait.barrier is None else tile
                    waits[number], moved = next(process, None), True
        if any(waits):
            raise BarrierError(f"these wait for ever: {[wait.barrier for wait in waits if wait]}")
        return tile < HELD_TILES


def behind(kernel: Kernel) -> int:
    """By how many tickets a process is behind the last one, at most."""
    found = 0
    processes = len(Cluster(kernel).processes)
    last = 4 * kernel.tiles
    # Of the first block, the last one that finishes a tile, and the last one.
    for held in {*range(4), *range(last - 4, last), *range(processes - 3, processes)}:
        for at in itertools.count():
            cluster = Cluster(kernel)
            goes_on = cluster.run(held, at)
            found = max(found, cluster.behind)
            if not goes_on:
                break
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "kernel",
    [
        Kernel((2, 1), 4, 2, 4, pingpong=False),
        Kernel((1, 2), 3, 1, 4, pingpong=False),
        Kernel((2, 1), 5, 4, 4, pingpong=True),
        Kernel((1, 1), 8, 4, 1, pingpong=True),
        Kernel((1, 1), 8, 3, 1, pingpong=False),
        Kernel((2, 2), 6, 4, 2, pingpong=True),
        Kernel((2, 2), 4, 1, 4, pingpong=False),
        Kernel((1, 2), 3, 1, 6, pingpong=False),
    ],
    ids=str,
)
def test_warps_are_never_further_apart(kernel: Kernel) -> None:
    assert behind(kernel) == kernel.behind


@pytest.mark.parametrize("kernel", [Kernel((1, 2), 8, 4, 1, pingpong=True), Kernel((2, 1), 4, 1, 4, pingpong=False)])
def test_one_shot_kernels_are_less_far_apart(kernel: Kernel) -> None:
    """They also write the sum of each tile, in as many subtiles."""
    assert behind(replace(kernel, subtiles=2 * kernel.subtiles)) <= kernel.behind


@pytest.mark.parametrize("kernel", [Kernel((2, 1), 5, 4, 4, pingpong=True), Kernel((2, 1), 4, 1, 4, pingpong=False)])
def test_tiles_of_more_stages_are_less_far_apart(kernel: Kernel) -> None:
    assert behind(replace(kernel, depth=2)) < kernel.behind


@pytest.mark.sample(2)
@pytest.mark.parametrize(("cluster", "split"), [((1, 1), 2), ((1, 1), 4), ((2, 1), 2), ((1, 2), 4), ((2, 2), 8)])
def test_blocks_that_divide_k_wait_for_each_other(cluster: tuple[int, int], split: int) -> None:
    """Otherwise a block sends the sums of a tile before those of the tile before."""
    kernel = Kernel(cluster, 4, 2, 2, pingpong=True, split=split)
    assert behind(kernel) == kernel.behind
    assert behind(replace(kernel, depth=2)) < kernel.behind
    with pytest.raises(BarrierError, match=r"arrives twice in a phase of \('summed'"):
        behind(replace(kernel, mutant="at once"))
    with pytest.raises(BarrierError, match=r"of \('taken', \d\) is waited for before the one before has passed"):
        behind(replace(kernel, mutant="early turn"))


def test_borrowed_stages_need_two_sets_of_barriers() -> None:
    """A tile that needs all stages waits for the one that the tile before has lent. A smaller one does not."""
    kernel = Kernel((2, 1), 4, 2, 4, pingpong=False, lent=1)
    for depth in (1, 2, 3):
        with pytest.raises(BarrierError, match=r"phase \d+ of \('lent', .* has passed"):
            behind(replace(kernel, depth=depth))
    behind(replace(kernel, depth=4))
    behind(replace(kernel, lent=2))
