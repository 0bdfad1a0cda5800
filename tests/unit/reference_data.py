"""Integer-valued problems and their shards, for tests that compare exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgemm import Plan

Array = NDArray[np.float64]


@dataclass
class Data:
    """A, B and C of a plan's problem with small integers, and the product computed by numpy."""

    plan: Plan
    a: Array
    b: Array
    c: Array

    @classmethod
    def draw(cls, plan: Plan, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        p = plan.problem
        batch = (p.l,) if p.l > 1 else ()
        draw = [
            rng.integers(-8, 9, (*batch, *shape)).astype(np.float64) for shape in ((p.m, p.k), (p.n, p.k), (p.m, p.n))
        ]
        return cls(plan, *draw)

    def shards(self, operand: str) -> list[Array]:
        whole = {"A": self.a, "B": self.b, "C": self.c}[operand]
        return [whole[self.plan.shard(operand, rank)] for rank in range(self.plan.world_size)]

    def product(self, alpha: float, beta: float) -> Array:
        return alpha * (self.a @ np.swapaxes(self.b, -1, -2)) + beta * self.c

    def assert_on_every_rank(self, d_shards: Sequence[Array], alpha: float, beta: float) -> None:
        """Every shard equals its part of the product, and the shards cover D."""
        wanted = self.product(alpha, beta)
        covered = np.zeros(wanted.shape, dtype=bool)
        for rank, shard in enumerate(d_shards):
            slices = self.plan.shard("D", rank)
            np.testing.assert_array_equal(shard, wanted[slices], err_msg=f"rank {rank}")
            covered[slices] = True
        assert covered.all()


@dataclass
class Scales:
    """Scales of a plan's A and B, and what they make of each element. No code of the library says which is whose.

    Attributes:
        shards: by "SFA" and "SFB", the scales of each rank, as calls take them.
        of_elements: by "A" and "B", the scale of each element, (l, rows, columns).
    """

    shards: dict[str, list[Array]]
    of_elements: dict[str, Array]

    @classmethod
    def draw(cls, plan: Plan, seed: int, powers: bool = True) -> Scales:
        """Powers of two, or any numbers from 0.5 to 2."""
        rng = np.random.default_rng(seed)
        p = plan.problem
        assert p.scaling is not None
        shards, of_elements = {}, {}
        for operand, rows in (("A", p.m), ("B", p.n)):
            name, scaling = f"SF{operand}", p.scaling[operand]
            boxes, held = ([plan.box(each, rank) for rank in range(plan.world_size)] for each in (name, operand))
            places, counts = [], []
            for mode, extent, shared in ((1, rows, scaling.rows), (2, p.k, scaling.columns)):
                place = np.zeros(extent, dtype=int)
                if shared is not None:
                    place = np.arange(extent) // shared
                elif scaling.scope == "shard":
                    for box, own in zip(held, boxes, strict=True):
                        place[slice(*box[mode])] = own[mode][0]
                places.append(place)
                counts.append(max([int(place.max()) + 1, *(own[mode][1] for own in boxes if shared is None)]))
            drawn = rng.integers(-3, 4, (p.l, *counts))
            whole = 2.0**drawn if powers else rng.uniform(0.5, 2, (p.l, *counts))
            of_elements[operand] = whole[:, places[0][:, None], places[1][None, :]]
            if scaling.swizzled:
                shards[name] = [_swizzled(whole, box, scaling.columns or 1) for box in held]
            else:
                shards[name] = [whole[tuple(slice(*edges) for edges in box)] for box in boxes]
            shards[name] = [each.reshape(plan.shard_shape(name, rank)) for rank, each in enumerate(shards[name])]
        return cls(shards, of_elements)


def _swizzled(whole: Array, box: tuple[tuple[int, int], ...], columns: int) -> Array:
    """The scales of a box in atoms of 128 x 4, as torch.nn.functional's and torchao's ``to_blocked`` arrange them."""
    batch, (top, bottom), (left, right) = box
    blocks_across = slice(left // columns, -(-right // columns) if left < right else left // columns)
    found = whole[slice(*batch), top:bottom, blocks_across]
    l, rows, wide = found.shape  # noqa: E741
    across, down = -(-rows // 128), -(-wide // 4)
    padded = np.zeros((l, across * 128, down * 4))
    padded[:, :rows, :wide] = found
    blocks = padded.reshape(l, across, 128, down, 4).transpose(0, 1, 3, 2, 4)
    atoms = blocks.reshape(l, across, down, 4, 32, 4).transpose(0, 1, 2, 4, 3, 5)
    return atoms.reshape(l, across, down * 512)
