"""What all runtimes share of gathers whose chunks the caller multiplies."""

from __future__ import annotations

from typing import NamedTuple

import torch

from distgemm.plan.ops import Gemm, Reduce, box_size
from distgemm.plan.plan import Plan, once_for_structure

__all__ = ["GatheredChunk", "check_gathers"]


class GatheredChunk(NamedTuple):
    """Some rows of the gathered A.

    Attributes:
        rows: which rows of A.
        tensor: these rows, (rows, k).
    """

    rows: slice
    tensor: torch.Tensor


def check_gathers(plan: Plan) -> None:
    """Check that the callers of all ranks can multiply the chunks of A.

    Raises:
        ValueError: for a plan with scales or several batches, that does not bring every rank all of A, that cuts A
            along k, or whose chunks share slots.
    """
    if reason := _why_not(plan):
        raise ValueError(reason)


@once_for_structure
def _why_not(plan: Plan) -> str:
    p = plan.problem
    if p.scaling is not None:
        return "a gather hands out chunks of A without scales, and the problem has a scaling"
    for rank, ops in enumerate(plan.rank_ops):
        tiles = {op.a for op in ops if isinstance(op, Gemm)}
        covered = sum(map(box_size, {tile.box for tile in tiles})) == p.m * p.k
        cut = any(tile.box[2] != (0, p.k) for tile in tiles) or any(isinstance(op, Reduce) for op in ops)
        if p.l > 1 or not covered or cut:
            return f"{plan.schedule} does not bring rank {rank} all of A, of one batch, in chunks of whole rows"
        if len({tile.slot for tile in tiles}) < len({(tile.slot, tile.frame) for tile in tiles}):
            return "a gather keeps all chunks, and in this plan they share slots; workspace='full' would do"
    return ""
