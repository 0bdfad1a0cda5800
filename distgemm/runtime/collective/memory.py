"""Memory of the collective runtime: a group's workspace, and where views lie in it and in the tensors of a call.

Steps name views of a plan's structure. The memory of an executable finds the tensors of its own plan for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist

from distgemm.plan.ops import Gemm, Op, Reduce, View, box_extents, box_size
from distgemm.plan.plan import SLOT_ALIGNMENT, Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.groups import PerGroup

__all__ = ["CallState", "Memory", "Place", "ScratchName", "SharedMemory", "Step", "memory_of"]

Tensor = torch.Tensor

ScratchName = Literal["a", "b", "total"]
"""Scratch memory: for the operands of a GEMM in another dtype, and for sums."""


@dataclass(slots=True, eq=False)
class CallState:
    """What one call brings, and its messages under way.

    Attributes:
        memory: of the executable.
        shards: by name, as (l, rows, columns).
        alpha: factor of A @ B.T.
        beta: factor of C.
        bias: one row of D's shard; None: none.
        gathered: where A goes that this rank multiplies, as (l, rows of its D, k); None: nowhere.
        works: by a message's index, what torch returned for it.
        staging: by a message's index, contiguous memory for a place that is not contiguous.
        group: the ranks.
        at: the op that is under way, of the plan's structure; None: none is yet.
    """

    memory: Memory
    shards: dict[str, Tensor]
    alpha: float
    beta: float
    bias: Tensor | None
    gathered: Tensor | None
    works: list[Any]
    staging: list[Tensor | None]
    group: dist.ProcessGroup
    at: Op | None = None


Step = Callable[[CallState], None]
"""One step of a call."""
Place = Callable[[CallState], Tensor]
"""Where a view lies, once a call has brought its shards."""


MAX_GROWTH_BYTES = 256 << 20
"""Bytes by which memory at most grows beyond what is asked for."""


class SharedMemory:
    """Memory that all executables of a group share on a device, because they are called one after the other.

    It has a workspace and scratch memory, each as large as the largest plan needs it. It begins as NaN: what no message
    brings must not look like a number.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.users: WeakSet[Memory] = WeakSet()
        self._bytes: dict[str, Tensor] = {}

    @torch.inference_mode(False)  # the memory is written outside of inference mode too
    def reserve(self, name: str, size: int) -> Tensor:
        """The memory with this name, at least so many bytes."""
        found = self._bytes.get(name)
        if found is None or found.numel() < size:
            if found is not None:
                # Some more than is asked for: plans that grow slowly would take a new one each.
                size = max(size, found.numel() + min(found.numel(), MAX_GROWTH_BYTES))
                del self._bytes[name], found
                for user in self.users:
                    user.forget()
            found = self._bytes[name] = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xFF)
        return found

    @property
    def size(self) -> int:
        """Bytes of all memory."""
        return sum(each.numel() for each in self._bytes.values())


_SHARED: PerGroup[dict[torch.device, SharedMemory]] = PerGroup(dict)


def memory_of(group: dist.ProcessGroup, device: torch.device) -> SharedMemory:
    """The memory that the executables of a group share on a device."""
    return _SHARED.of(group).setdefault(device, SharedMemory(device))


class Memory:
    """The memory of one plan on one rank.

    Args:
        plan: of all ranks.
        rank: this rank.
        shared: where its workspace lies.
    """

    def __init__(self, plan: Plan, rank: int, shared: SharedMemory) -> None:
        self.plan, self.rank, self.shared = plan, rank, shared
        self._views: dict[int, View] = {}  # of the plan, by the id of the structure's view
        self._tensors: dict[int, Tensor] = {}  # of views in slots, by the same
        self._typed: dict[str, Tensor] = {}  # all slots, by element type
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._largest: dict[ScratchName, int] | None = None
        shared.users.add(self)
        shared.reserve("workspace", plan.workspace_bytes(rank))

    def forget(self) -> None:
        """Forget all tensors: a plan that needs more has replaced the memory."""
        self._typed.clear()
        self._tensors.clear()
        self._scratch.clear()

    def slot(self, number: int) -> Tensor:
        """The elements of a slot."""
        slot = self.plan.slots[self.rank][number]
        first = slot.offset // DTYPE_BYTES[slot.dtype]
        return self._slots_as(slot.dtype)[first : first + slot.elements]

    def own(self, view: View) -> View:
        """The plan's view for a view of its structure."""
        found = self._views.get(id(view))
        if found is None:
            found = self._views[id(view)] = self.plan.own_view(view)
        return found

    def tensor(self, view: View, shards: dict[str, Tensor]) -> Tensor:
        """Where a view of the plan's structure lies, given the shards of a call."""
        found = self._tensors.get(id(view))
        if found is not None:
            return found
        own = self.own(view)
        if own.buffer != "slot":
            return shards[own.buffer][own.slices()]
        if torch.is_inference_mode_enabled():  # the tensor is kept, and is written outside of inference mode too
            with torch.inference_mode(False):
                return self.tensor(view, shards)
        slot = self.plan.slots[self.rank][own.slot]
        (l0, l1), (r0, r1), (c0, c1) = own.box
        (fl, _), (top, bottom), (left, _) = own.frame
        of_batch = (bottom - top) * own.pitch
        first = slot.offset // DTYPE_BYTES[slot.dtype] + (l0 - fl) * of_batch + (r0 - top) * own.pitch + c0 - left
        # One operation of torch: a new number of tokens makes a tensor for each view.
        found = self._slots_as(slot.dtype).as_strided((l1 - l0, r1 - r0, c1 - c0), (of_batch, own.pitch, 1), first)
        self._tensors[id(view)] = found
        return found

    def _slots_as(self, dtype: str) -> Tensor:
        """All slots as elements of a type."""
        found = self._typed.get(dtype)
        if found is None:
            size = self.plan.workspace_bytes(self.rank)
            memory = self.shared.reserve("workspace", size)[: size // SLOT_ALIGNMENT * SLOT_ALIGNMENT]
            found = self._typed[dtype] = memory.view(TORCH_DTYPES[dtype])
        return found

    @torch.inference_mode(False)
    def scratch(self, name: ScratchName, view: View, dtype: torch.dtype) -> Tensor:
        """A tensor for the box of a view of the structure, in memory that all ops share for this name."""
        found = self._scratch.get((name, id(view)))
        if found is None:
            box = self.own(view).box
            most = self._largest_boxes()[name] * dtype.itemsize
            memory = self.shared.reserve(f"{name} {dtype}", most).view(dtype)
            batches, rows, columns = box_extents(box)
            found = memory.as_strided((batches, rows, columns), (rows * columns, columns, 1))
            self._scratch[name, id(view)] = found
        return found

    def _largest_boxes(self) -> dict[ScratchName, int]:
        """The elements of the largest tile of A, of B and of a result that this rank's ops have."""
        if self._largest is None:
            views: dict[ScratchName, list[View]] = {"a": [], "b": [], "total": []}
            for op in self.plan.structure.ops(self.rank):
                if isinstance(op, Gemm):
                    views["a"].append(op.a)
                    views["b"].append(op.b)
                if isinstance(op, Gemm | Reduce):
                    views["total"].append(op.out)
            self._largest = {
                name: max((box_size(self.own(view).box) for view in of_name), default=0)
                for name, of_name in views.items()
            }
        return self._largest
