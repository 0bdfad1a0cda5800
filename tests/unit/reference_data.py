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
