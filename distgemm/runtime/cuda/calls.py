"""Calls of executables on GPUs: what all kinds of executables share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distgemm.plan.plan import Plan
from distgemm.runtime.checks import check_agreement, check_gradients, group_timeout, raise_together, shard_dtype
from distgemm.runtime.cuda.lowering.actions import Action
from distgemm.runtime.cuda.order import CallOrder, call_order
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, watchdog
from distgemm.runtime.cuda.watched import WatchedWorkspace
from distgemm.runtime.cuda.workspace import SharedWorkspace, workspace_for
from distgemm.runtime.executable import ExecutionConfig, OnTimeout, untraced

__all__ = ["GpuExecutable", "PreparedCall"]

Tensor = torch.Tensor


class GpuExecutable(ABC):
    """An executable on this rank's GPU: its calls are issued in order, and watched.

    Attributes:
        plan: what it executes.
        rank: this rank in the group.
        group: the ranks.
        device: this rank's GPU.
        workspace: the memory that it shares with the group's other executables of its kind.
        execution: how GPUs execute the plan.
        kernels: where the kernels come from that were compiled ahead.
        timeout: seconds without a change after which a replay counts as stuck.
        on_timeout: what happens then, as :func:`distgemm.compile` takes it.
    """

    plan: Plan
    rank: int
    group: dist.ProcessGroup
    device: torch.device
    workspace: SharedWorkspace
    execution: ExecutionConfig
    kernels: str
    timeout: float
    on_timeout: OnTimeout
    number: int
    _index: int
    _watched: WatchedWorkspace
    _order: CallOrder
    _shape_of_d: tuple[int, ...]
    _dtype_of_d: torch.dtype

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        execution: ExecutionConfig,
        timeout: float | None,
        on_timeout: OnTimeout,
    ) -> None:
        self.timeout = group_timeout(group, device) if timeout is None else timeout
        self.on_timeout = on_timeout
        self.plan, self.group, self.device, self.execution = plan, group, device, execution
        self.rank, self.kernels = dist.get_rank(group), ""
        self._index = device.index or 0  # torch.cuda.device reads an index faster than a torch.device

    def _agree(self, problem: Exception | None) -> None:
        """Raise on all ranks if plans or arguments differ, or if a rank cannot execute its plan: its problem."""
        arguments = f"{self.execution}, timeout {self.timeout} s, {self.on_timeout}"
        check_agreement(self.plan, arguments, self.group, self.device, problem)

    def _join(
        self, kind: type[SharedWorkspace], slot_bytes: int, flags: int, packet_bytes: int = 0, **options: Any
    ) -> None:
        """Take part in the group's workspace of a kind, in its watchdog, and in the order of calls on the device.

        A collective call.

        Args:
            kind: of the workspace.
            slot_bytes: bytes of slots that a rank needs at most, in each buffer.
            flags: flags that it needs at most.
            packet_bytes: bytes of packets that it needs, in each buffer.
            **options: further arguments of the workspace.

        Raises:
            RuntimeError: on all ranks where one has no memory.
        """
        self.workspace = workspace_for(self.group, self.device, slot_bytes, flags, kind, packet_bytes, **options)
        problem: Exception | None = None
        try:
            self.number = self.workspace.register(self)
            self._watched = watchdog().add(self.workspace)
            self._order = call_order(self.device)
            self._attach()
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        raise_together(problem, "cannot allocate what calls need besides symmetric memory", self.group, self.device)
        self._shape_of_d, self._dtype_of_d = self.plan.shard_shape("D", self.rank), shard_dtype(self.plan, "D")

    def _attach(self) -> None:  # noqa: B027  (most executables need no more than the workspace)
        """Take what calls need besides the workspace."""

    @property
    def actions(self) -> Sequence[Action]:
        """What it puts on streams, in order; none: its kernel does all."""
        return ()

    @abstractmethod
    def awaited(self, values: Any) -> tuple[str, list[int]]:
        """What a replay waits for, in words, and the ranks that it waits for.

        Args:
            values: what its workspace makes of its memory.
        """

    @abstractmethod
    def _put_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        """Put a call on the current stream."""

    @abstractmethod
    def _put_captured_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        """Put a call on the current stream, which is captured."""

    @property
    def provider(self) -> str:
        """The provider of its GEMMs."""
        return str(self.execution.provider)

    def release(self) -> None:
        """Tell the workspace that the caller's graphs with this executable are gone, so that it may go too."""
        self.workspace.release(self)

    def raise_if_dead(self) -> None:
        """Raise where this executable cannot be called any more.

        Raises:
            ReplayTimeoutError: once a replay on this workspace has not ended in time, on any rank.
            RuntimeError: once the workspace is closed.
        """
        if self.workspace.memory is None:
            raise RuntimeError("the workspace of this executable is closed; compile it anew")
        if self.workspace.dead is not None:
            self._watched.raises_itself()
            raise ReplayTimeoutError(f"{self.workspace.dead}; no executable on this workspace can be called any more")

    def __call__(
        self,
        a_shard: Tensor,
        b_shard: Tensor,
        c_shard: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        out: Tensor | None = None,
        gathered: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of D = alpha * A @ B.T + beta * C + bias; all ranks of the group call it in one order.

        :class:`distgemm.CollectiveExecutable` shows the unfused program. Sums accumulate in float32. Partial sums are
        rounded to ``problem.partial_dtype``, D to ``problem.out_dtype``.

        A call does not wait for the GPU. Calls of all executables on a device run one after the other, in the order in
        which they are issued, also on several streams. While the current stream is captured, a call becomes part
        of that graph.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``.
            b_shard: of shape ``plan.shard_shape("B", rank)`` and of B's type.
            c_shard: of D's shape, of ``problem.out_dtype``; read only where ``beta`` is not 0.
            alpha: factor of A @ B.T.
            beta: factor of C.
            bias: one row of D's shard, of ``problem.out_dtype``.
            scale_a: with ``problem.scaling``, the scales of this rank's shard of A, of shape
                ``plan.shard_shape("SFA", rank)`` and of the scaling's dtype. Other shapes of as many elements are taken
                if only one of their sides, and of that shape's, is longer than 1. None: the problem has no scaling.
            scale_b: as ``scale_a``, of this rank's shard of B: "SFB".
            out: where D goes, instead of a new tensor. It shares no memory with the shards.
            gathered: where A goes that this rank multiplies, if the plan brings it all columns of the rows of its D:
                (rows of its D, k), of A's dtype, with contiguous rows.

        Raises:
            ValueError: for tensors of another shape, dtype or device, and for tensors that require grad outside of
                torch.no_grad(), before anything is sent.
            ReplayTimeoutError: once a replay on this workspace has not ended in time on any rank.
        """
        if torch.compiler.is_dynamo_compiling():
            terms: dict[str, Any] = {"alpha": alpha, "beta": beta, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
            return untraced(self, a_shard, b_shard, c_shard, **terms, out=out, gathered=gathered)
        self.raise_if_dead()
        check_gradients(self.rank, a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered)
        if out is None:
            out = self._new_out()
        tensors = (a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered)
        stream = self._current_stream()
        with self._order.issuing():
            if torch.cuda.is_current_stream_capturing():
                self._put_captured_call(tensors, alpha, beta, stream)
            else:
                self._put_call(tensors, alpha, beta, stream)
                self._watched.issued(self, weakref.ref(out), stream)
        return out

    def _current_stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def _new_out(self) -> Tensor:
        return torch.empty(self._shape_of_d, dtype=self._dtype_of_d, device=self.device)

    def _launch(self, launch: Callable[[int], None], stream: int) -> None:
        """Put a launch on the current stream behind the last call on this device."""
        self._order.begin(stream)
        try:
            launch(stream)
            self._order.end(stream)
        except BaseException as error:  # Ctrl-C, too
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """End the workspace on all ranks: a part of a call may have been sent when it failed."""
        said = str(error) or type(error).__name__
        self._watched.give_up(f"{self.plan.schedule} on rank {self.rank} failed as it was issued: {said}")


class PreparedCall:
    """A call on given tensors. Calling it makes the call on the current stream.

    Args:
        executable: whose call it is.
        put: puts it on a stream, which is the current one.
        tensors: of the call, with D, in the order of ``TENSORS_OF_A_CALL``.

    Attributes:
        out: the tensor that it writes.
    """

    def __init__(self, executable: GpuExecutable, put: Callable[[int], None], tensors: Sequence[Tensor | None]) -> None:
        out = tensors[6]
        assert out is not None
        self._executable, self._put, self._tensors, self.out = executable, put, tensors, out
        self._watched_out = weakref.ref(out)

    def __call__(self) -> Tensor:
        executable = self._executable
        executable.raise_if_dead()
        check_gradients(executable.rank, *self._tensors)
        stream = executable._current_stream()
        with executable._order.issuing():
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a replay cannot become part of a graph: call the executable while the stream is captured"
                )
            self._put(stream)
            executable._watched.issued(executable, self._watched_out, stream)
        return self.out
