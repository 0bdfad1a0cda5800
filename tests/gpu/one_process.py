"""Ranks as streams of one process on one GPU: fast, and at the same time. Processes that share a GPU take turns.

Plans, kernels, launches, graphs, flags and workspaces are those of the package. Three things take another's place while
an executable is made: plain memory stands for symmetric memory, an order of calls for each rank for that of the device,
and nothing for the exchanges between processes and the watchdog.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from distgemm.gemm import cutlass, sums
from distgemm.plan.plan import Plan
from distgemm.runtime.cuda import binding, calls, executable, workspace
from distgemm.runtime.cuda.executable import CudaExecutable
from distgemm.runtime.cuda.memops import wait_for
from distgemm.runtime.cuda.order import CallOrder
from distgemm.runtime.cuda.processes import this_process
from distgemm.runtime.cuda.workspace import BUFFERS, Workspace
from distgemm.runtime.executable import ExecutionConfig

MEMORY_ALIGNMENT = 2 << 20
"""Bytes that divide the distance from one rank's memory to the next, as with symmetric memory."""


@contextmanager
def limited_sms(count: int) -> Iterator[None]:
    """GEMMs and sums that are bound inside take so many SMs.

    Kernels of all ranks that wait for one another must be resident at once.
    """
    with (
        patch.object(cutlass, "sm_count", lambda device: count),
        patch.object(sums, "sm_count", lambda device: count),
    ):
        yield


@contextmanager
def ignored_flags(device: torch.device) -> Iterator[None]:
    """Calls that are bound inside do not wait for flags of plans: a control, which must give wrong elements."""
    one = torch.ones(2, dtype=torch.int32, device=device)
    with patch.object(binding, "wait_for", lambda address: wait_for(one.data_ptr())):
        yield


class PlainMemory:
    """The memory of all ranks, as torch's handle of symmetric memory gives it.

    Attributes:
        parts: by rank; empty until the first rank asks for its part.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.parts: list[torch.Tensor] = []

    def allocate(self, size: int, group: Any, device: torch.device) -> tuple[torch.Tensor, int, list[Any]]:
        """A rank's part, in the place of :func:`distgemm.runtime.cuda.workspace.allocate`."""
        if not self.parts:
            step = -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
            whole = torch.empty(self.ranks * step + MEMORY_ALIGNMENT, dtype=torch.uint8, device=self.device)
            first = -whole.data_ptr() % MEMORY_ALIGNMENT
            self.parts = [whole[first + rank * step :][:size] for rank in range(self.ranks)]
        return self.parts[group.rank], 0, [this_process()] * self.ranks

    @property
    def buffer_ptrs(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        assert dtype == torch.uint8
        return self.parts[rank][offset : offset + sizes[0]]


class Unwatched:
    """In the place of the watchdog: nothing is watched."""

    def add(self, workspace: Workspace) -> Unwatched:
        return self

    def issued(self, executable: CudaExecutable, out: object, stream: int) -> None: ...

    def give_up(self, reason: str) -> None: ...

    def raises_itself(self) -> None: ...


def raise_alone(problem: Exception | None, *_: Any) -> None:
    """Raise a rank's error: nobody tells the others."""
    if problem is not None:
        raise problem


class Ranks:
    """All ranks, each with a workspace.

    Args:
        count: how many.
        device: their GPU.
        slot_bytes: bytes for slots of each rank, in each buffer.
        flags: plan flags of each buffer.

    Attributes:
        workspaces: by rank.
    """

    def __init__(self, count: int, device: torch.device, slot_bytes: int, flags: int) -> None:
        self.count, self.device = count, device
        memory = PlainMemory(count, device)
        self._groups: list[Any] = [SimpleNamespace(rank=rank, group_name=f"rank {rank}") for rank in range(count)]
        self._dist = SimpleNamespace(
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: count,
        )
        symmetric_memory = SimpleNamespace(rendezvous=lambda part, group: memory)
        with patch.multiple(
            workspace,
            dist=self._dist,
            allocate=memory.allocate,
            symmetric_memory=symmetric_memory,
            raise_together=raise_alone,
        ):
            self.workspaces = [Workspace(group, device, slot_bytes, flags) for group in self._groups]
        self._orders = [CallOrder(device) for _ in range(count)]
        self._idle = [self._flags(rank) for rank in range(count)]

    def executables(self, plan: Plan, execution: ExecutionConfig) -> list[CudaExecutable]:
        """The executable of each rank. Their kernels are compiled already."""
        return [self._executable(rank, plan, execution) for rank in range(self.count)]

    def _executable(self, rank: int, plan: Plan, execution: ExecutionConfig) -> CudaExecutable:
        def workspace_for(
            group: Any, device: torch.device, slot_bytes: int, flags: int, kind: Any, packet_bytes: int
        ) -> Workspace:
            found = self.workspaces[rank]
            if slot_bytes > found.slot_bytes or flags > found.flags:
                raise ValueError(f"{plan.schedule} needs {slot_bytes} bytes of slots and {flags} flags")
            return found

        def check_agreement(*arguments: Any) -> None:
            if arguments[-1] is not None:
                raise arguments[-1]

        with (
            patch.multiple(executable, agree_on_kernels=lambda *_: None, build_together=lambda *_: None),
            patch.multiple(
                calls,
                dist=self._dist,
                check_agreement=check_agreement,
                raise_together=raise_alone,
                workspace_for=workspace_for,
                watchdog=Unwatched,
                call_order=lambda device: self._orders[rank],
            ),
        ):
            return CudaExecutable(plan, self._groups[rank], self.device, execution, timeout=60.0)

    def _flags(self, rank: int) -> torch.Tensor:
        """A rank's flags, without the one that the rank itself would set: it is reset together with its neighbour."""
        flags = self.workspaces[rank].flag_memory().clone()
        flags.view(BUFFERS, -1)[:, rank] = 0
        return flags

    def leftovers(self) -> list[str]:
        """What the replays of all ranks, which have all ended, should have reset and have not."""
        found = []
        for rank, idle in enumerate(self._idle):
            flags = self._flags(rank)
            if not torch.equal(flags, idle):
                values = [(int(i), int(flags[i])) for i in (flags != idle).nonzero()[:8, 0]]
                found.append(f"rank {rank}: flags (number, value) {values}")
        return found

    def poison(self) -> None:
        """Make all slots NaN, while nothing runs."""
        for rank, one in enumerate(self.workspaces):
            one.slots_of(rank).fill_(0xFF)
