"""A plan on this rank's GPU: GEMMs and copy-engine copies, issued on streams or replayed as a CUDA graph."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distgemm.gemm import get_provider
from distgemm.gemm.fused.gemms import COUNTERS
from distgemm.gemm.nvcc import build_together
from distgemm.plan.ops import Copy
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import (
    agree,
    check_bias,
    check_gathered,
    check_scales,
    check_shards,
    resolve_group,
    shard_dtype,
)
from distgemm.runtime.cuda.binding import Binder, Bound, Call
from distgemm.runtime.cuda.lowering import most_flags
from distgemm.runtime.cuda.lowering.actions import GEMM_STREAM, Action, on_one_stream
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, watchdog
from distgemm.runtime.cuda.workspace import Workspace, workspace_for
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["CudaExecutable", "Replay", "compile_plan"]

LOG = logging.getLogger("distgemm")

Tensor = torch.Tensor

GRAPHS = 32
"""Sets of tensors for which an executable keeps graphs, one for each half of the workspace."""


class CudaExecutable:
    """This rank's part of a plan; made by :func:`distgemm.compile`.

    plan, group, device: what it executes, and where
    execution: how GPUs execute the plan
    workspace: the memory that it shares with the group's other executables
    graphs:  how many graphs it has recorded for eager calls, replays not counted
    timeout, on_timeout: as :func:`distgemm.compile` takes them
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        execution: ExecutionConfig,
        *,
        timeout: float = 300.0,
        on_timeout: str = "raise",
        fallback: bool = False,
    ) -> None:
        self.timeout, self.on_timeout = timeout, on_timeout
        self.plan, self.group, self.device, self.execution = plan, group, device, execution
        self.rank = dist.get_rank(group)
        self.graphs = 0
        problem: Exception | None = None
        try:
            self.binder = Binder(plan, self.rank, device, execution, fallback)
            if execution.wait_by == "kernel" and not on_one_stream(self.actions):
                raise ValueError(
                    f"wait_by='kernel' is for plans that multiply and add on one stream, and {plan.schedule} with "
                    f"gemm_streams={execution.gemm_streams} does not: beside other kernels, one that waits may keep an SM from what "
                    "it waits for. wait_by='memory_op' does"
                )
            # What calls without C and bias need; the rest when it comes.
            build_together(self.binder.sources(), self.rank, plan.world_size)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        agree(plan, f"{execution}, timeout {timeout} s, {on_timeout}", group, device, problem)
        flags = most_flags(plan, execution)
        self.workspace: Workspace = workspace_for(
            group, device, max(map(plan.workspace_bytes, range(plan.world_size))), flags
        )
        self.number = self.workspace.register(self)
        self._watched = watchdog().add(self.workspace)
        counters = None
        if execution.single_kernel:
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # calls may be on other streams
        self.binder.attach(self.workspace, self.number, counters)
        self._copied = copied_buffers(plan, self.rank)
        self._shape_of_d, self._dtype_of_d = plan.shard_shape("D", self.rank), shard_dtype(plan, "D")
        # Tensors need not be kept alive: a graph is only replayed for a call that brings the same ones.
        self._recorded: OrderedDict[tuple[Any, ...], dict[int, torch.cuda.CUDAGraph]] = OrderedDict()

    @property
    def actions(self) -> Sequence[Action]:
        """What it puts on streams, in order."""
        return self.binder.actions

    @property
    def provider(self) -> str:
        """Of its GEMMs."""
        return self.execution.provider

    @property
    def transfers(self) -> str:
        return "CUDA runtime"

    def release(self) -> None:
        self.workspace.release(self)

    @property
    def workspace_bytes(self) -> int:
        """What the plan needs of the workspace on this rank, as ``plan.workspace_bytes(rank)`` says."""
        return self.plan.workspace_bytes(self.rank)

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
        """This rank's shard of D = alpha * A @ B.T + beta * C + bias; all ranks of the group call it alike.

        a_shard, b_shard: of the shapes ``plan.shard_shape("A", rank)`` and ``("B", rank)``, of ``problem.dtype``
        c_shard: as D, of ``problem.out_dtype``; read only where beta is not 0
        bias:    a row of D's shard, of ``problem.out_dtype``
        scale_a, scale_b: float32: factors of the whole of A and B, or of every row of the *global* A and B
        out:     where D goes, instead of a new tensor; shares no memory with the shards
        gathered: where all of A goes, where the plan gathers it: (m, k), rows contiguous, of A's type

        The unfused program is that of :class:`distgemm.CollectiveExecutable`. Sums accumulate in float32; partial
        sums are rounded to ``problem.partial_dtype``, D to ``problem.out_dtype``.

        Nothing here waits for the GPU. Tensors that come again are served by graphs: recorded at the second and third
        call, one for each half of the workspace, and replayed from then on. While the current stream is captured, the
        ops become part of that graph.

        Raises ValueError for tensors of another shape, type or device, before anything is sent; ReplayTimeoutError
        once a replay on this workspace has not ended in time on any rank.
        """
        self.raise_if_dead()
        if out is None:
            out = torch.empty(self._shape_of_d, dtype=self._dtype_of_d, device=self.device)
        half, capturing = self.workspace.next_half, torch.cuda.is_current_stream_capturing()
        key = _key((a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered), alpha, beta)
        graphs = None if capturing else self._recorded.get(key)
        graph = None if graphs is None else graphs.get(half)
        if graph is None:
            # What has a graph was checked before it was recorded.
            given = self._check(a_shard, b_shard, c_shard, beta, out, gathered)
            self._check_terms(given, bias, scale_a, scale_b)
            call = Call(given, alpha, beta, bias, scale_a, scale_b)
            if graphs is None:
                self._issue(call, half, captured=capturing)
                if capturing:
                    return out
                graphs = self._recorded[key] = {}  # a call that raised is none
                while len(self._recorded) > GRAPHS:
                    self._recorded.popitem(last=False)
            else:
                graph = graphs[half] = self._record(call, half)
                self.graphs += 1
        if graph is not None:
            self._recorded.move_to_end(key)
            self.workspace.turn()
            graph.replay()
        self._watched.issued(self, weakref.ref(out))
        return out

    def raise_if_dead(self) -> None:
        """Raises ReplayTimeoutError once a replay on this workspace has not ended in time, on any rank; RuntimeError
        once the workspace is closed."""
        if self.workspace.memory is None:
            raise RuntimeError("the workspace of this executable is closed; compile it anew")
        if self.workspace.dead is not None:
            raise ReplayTimeoutError(f"{self.workspace.dead}; no executable on this workspace can be called any more")

    def capture(self, a_shard: Tensor, b_shard: Tensor, c_shard: Tensor | None = None, **how: Any) -> Replay:
        """A graph of one call on these tensors, to be replayed any number of times.

        Takes what a call takes. Allocates D where ``out`` is None: ``replay.out``.
        """
        given = self._check(
            a_shard, b_shard, c_shard, how.get("beta", 0.0), how.pop("out", None), how.pop("gathered", None)
        )
        numbers = {"alpha": 1.0, "beta": 0.0, "bias": None, "scale_a": None, "scale_b": None} | how
        self._check_terms(given, *(numbers[name] for name in ("bias", "scale_a", "scale_b")))
        call = Call(given, **numbers)
        return Replay(self, [self._record(call, half) for half in range(2)], call)

    def _check(
        self,
        a_shard: Tensor,
        b_shard: Tensor,
        c_shard: Tensor | None,
        beta: float,
        out: Tensor | None,
        gathered: Tensor | None = None,
    ) -> dict[str, Tensor]:
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        copied = set(self._copied)
        if gathered is not None:
            if not self.binder.tiles_of_a:
                raise ValueError(
                    f"{self.plan.schedule} does not bring all of A to rank {self.rank}: there is no gathered"
                )
            check_gathered(self.plan, self.rank, gathered, given)
            given["gathered"] = gathered
            copied |= {"A", "gathered"}
        for name in copied & set(given):
            rows, columns = given[name].shape[-2:]
            down, along = given[name].stride()[-2:]
            if (columns > 1 and along != 1) or (rows > 1 and down < columns):
                what = {"D": "out", "gathered": "gathered"}.get(name, f"{name}'s shard")
                raise ValueError(
                    f"{what} on rank {self.rank} is copied by rows, which are to be contiguous and apart, got strides "
                    f"{given[name].stride()}; give it as .contiguous()"
                )
        return given

    def _check_terms(
        self, given: dict[str, Tensor], bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None
    ) -> None:
        check_bias(self.rank, bias, given["D"])
        check_scales(self.plan, scale_a, scale_b)

    def _record(self, call: Call, half: int) -> torch.cuda.CUDAGraph:
        bound = self.binder.bind(call, half)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.workspace.capturing):
            # Another thread (of NCCL, say) may speak to CUDA meanwhile; but a graph that is garbage, collected here
            # and now, would spoil the capture.
            collecting = gc.isenabled()
            gc.disable()
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._put(bound)
                finally:
                    graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        graph.instantiate()
        return graph

    def _issue(self, call: Call, half: int, captured: bool = False) -> None:
        bound = self.binder.bind(call, half)
        if captured:
            self.workspace.keep(self)
        # Not before: a rank that has raised until here has sent nothing, and may call again.
        self.workspace.turn()
        self._put(bound, counted=captured)

    def _put(self, bound: Bound, counted: bool = False) -> None:
        """Put all actions on streams that begin and end with the current one of this device.

        counted: also count the replay, where the watchdog cannot see it begin and end
        """
        # A default stream is that of the current device, whoever's it is said to be.
        with torch.cuda.device(self.device):
            self._put_here(bound, counted)

    def _put_here(self, bound: Bound, counted: bool) -> None:
        main = torch.cuda.current_stream(self.device)
        side = self.workspace.streams
        used = sorted({GEMM_STREAM, *(action.stream for action in bound.actions)})
        streams = {number: main if number == GEMM_STREAM else side[number - (number > GEMM_STREAM)] for number in used}
        for number, stream in streams.items():
            if number != GEMM_STREAM:
                stream.wait_stream(main)
        if counted:
            with torch.cuda.stream(streams[used[-1]]):
                self.workspace.replays.add_(1)
        events: dict[int, torch.cuda.Event] = {}
        for number, (action, launch) in enumerate(zip(bound.actions, bound.launches, strict=True)):
            stream = streams[action.stream]
            for before in action.after:
                stream.wait_event(events[before])
            launch(stream.cuda_stream)
            if action.awaited:
                events[number] = stream.record_event()
        for number, stream in streams.items():
            if number != GEMM_STREAM:
                main.wait_stream(stream)
        bound.leave(main.cuda_stream)


def copied_buffers(plan: Plan, rank: int) -> set[str]:
    """Which of the caller's "A", "B" and "D" a rank copies from or to."""
    copies = [op for op in plan.ops(rank) if isinstance(op, Copy)]
    return {view.buffer for op in copies for view in (op.src, op.dst)} - {"slot"}


def _key(tensors: Sequence[Tensor | None], alpha: float, beta: float) -> tuple[Any, ...]:
    """The same for calls that one graph serves."""
    where = [
        (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else None if x is None else id(x)
        for x in tensors
    ]
    return (*where, float(alpha), float(beta))


class Replay:
    """A recorded call. Calling it replays it on the current stream; ``out`` is what it writes."""

    def __init__(self, executable: CudaExecutable, graphs: list[torch.cuda.CUDAGraph], call: Call) -> None:
        self._executable, self._graphs, self._call = executable, graphs, call
        self._replays = [graph.replay for graph in graphs]
        self.out, self._watched_out = call.out, weakref.ref(call.out)

    @property
    def graph(self) -> torch.cuda.CUDAGraph:
        """The graph for one half of the workspace, to be looked at."""
        return self._graphs[0]

    def __call__(self) -> Tensor:
        executable = self._executable
        executable.raise_if_dead()
        self._replays[executable.workspace.turn()]()
        executable._watched.issued(executable, self._watched_out)
        return self.out


def compile_plan(
    plan: Plan,
    execution: ExecutionConfig | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    timeout: float = 300.0,
    on_timeout: str = "raise",
    fallback: bool = False,
) -> CudaExecutable:
    """This rank's executable for a plan: :func:`distgemm.compile`, for those who have a plan.

    fallback: calls whose tensors the fused kernel cannot read launch a kernel for each GEMM instead, with a warning;
        otherwise they raise ValueError
    """
    whole = resolve_group(group)
    execution = ExecutionConfig() if execution is None else execution
    if on_timeout not in ("raise", "abort") or not timeout > 0:
        raise ValueError(f"timeout > 0 and on_timeout 'raise' or 'abort', got {timeout!r} and {on_timeout!r}")
    get_provider(execution.provider)
    if plan.world_size != dist.get_world_size(whole):
        raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {dist.get_world_size(whole)}")
    at = torch.device("cuda" if device is None else device)
    if at.type != "cuda":
        raise ValueError(f"device is a GPU, got {at}; on CPUs take distgemm.CollectiveExecutable")
    if at.index is None:
        at = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the stream is being captured: compile waits for the other ranks, and comes before that")
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise RuntimeError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: with a single hardware queue, graphs whose gemm_streams wait for other "
            "ranks have not been shown to come to an end; unset it, or set it to 8"
        )
    return CudaExecutable(plan, whole, at, execution, timeout=timeout, on_timeout=on_timeout, fallback=fallback)
