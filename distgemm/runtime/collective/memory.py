"""Memory of the collective runtime: a rank's workspace, and where views lie in it and in a call's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from distgemm.plan.ops import Op, View, box_extents
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.checks import TORCH_DTYPES

__all__ = ["CallState", "Memory", "Place", "Step"]

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class CallState:
    """What one call brings, and its messages under way.

    Attributes:
        shards: by name, as (l, rows, columns).
        alpha: factor of A @ B.T.
        beta: factor of C.
        bias: one row of D's shard; None: none.
        gathered: where all of A goes, as (l, m, k); None: nowhere.
        works: by a message's index, what torch returned for it.
        group: the ranks.
        at: the op that is under way; None: none is yet.
    """

    shards: dict[str, Tensor]
    alpha: float
    beta: float
    bias: Tensor | None
    gathered: Tensor | None
    works: list[Any]
    group: dist.ProcessGroup
    at: Op | None = None


Step = Callable[[CallState], None]
"""One step of a call."""
Place = Callable[[CallState], Tensor]
"""Where a view lies, once a call has brought its shards."""


class Memory:
    """This rank's workspace, filled with NaN, and scratch memory."""

    @torch.inference_mode(False)  # the memory is written outside of inference mode too
    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.workspace = torch.empty(plan.workspace_bytes(rank), dtype=torch.uint8, device=device)
        self.slots = [
            self.workspace[slot.offset : slot.offset + slot.elements * DTYPE_BYTES[slot.dtype]].view(
                TORCH_DTYPES[slot.dtype]
            )
            for slot in plan.slots[rank]
        ]
        for slot in self.slots:
            # What no message brings must not look like a number.
            slot.fill_(float("nan"))
        self._scratch: dict[str, Tensor] = {}

    def dtype(self, view: View) -> torch.dtype:
        """The dtype of a view, on any rank."""
        return TORCH_DTYPES[self.plan.dtype(view)]

    def place(self, view: View) -> Place:
        """Where a view of this rank lies."""
        where, buffer = view.slices(), view.buffer
        if buffer != "slot":
            return lambda call: call.shards[buffer][where]
        batches, rows, _ = box_extents(view.frame)
        fixed = self.slots[view.slot][: view.elements].view(batches, rows, view.pitch)[where]
        return lambda call: fixed

    @torch.inference_mode(False)
    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype, most: int) -> Tensor:
        """A tensor in scratch memory of at most ``most`` elements, which all ops with this name share."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(most, dtype=dtype, device=self.device)
        return self._scratch[name][: prod(shape)].view(tuple(shape))
