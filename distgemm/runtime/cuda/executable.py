"""A plan on this rank's GPU: GEMMs, copies and memory operations on streams, or replayed as a CUDA graph."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distgemm.gemm.launches import MovableLaunch
from distgemm.gemm.nvcc import KernelSource, build_together, is_there, origin
from distgemm.gemm.select import NEAR_BEST, agree, preferred
from distgemm.plan.ops import Copy, Gemm, box_size
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import (
    check_bias,
    check_gathered,
    check_gradients,
    check_scales,
    check_shard,
    check_shards,
    gathered_box,
)
from distgemm.runtime.cuda.binding import Binder, Bound, CallTensors
from distgemm.runtime.cuda.calls import GpuExecutable, PreparedCall
from distgemm.runtime.cuda.lowering import most_flags
from distgemm.runtime.cuda.lowering.actions import GEMM_STREAM, Action, check_waits, exchanges_of
from distgemm.runtime.cuda.recording import CallLayout, Recording, captured_node, layout_of
from distgemm.runtime.cuda.watched import awaited
from distgemm.runtime.cuda.workspace import BUFFERS, FlagValues, Workspace
from distgemm.runtime.executable import Executable, ExecutionConfig, OnTimeout
from distgemm.runtime.gathering import GatheredChunk, check_gathers
from distgemm.runtime.groups import occupied

__all__ = ["CudaExecutable", "Replay", "copied_buffers"]

LOG = logging.getLogger("distgemm")

Tensor = torch.Tensor

MAX_RECORDED_CALLS = 32
"""Layouts for which an executable keeps graphs, one graph for each buffer of the workspace. Each set of tensors counts
where graphs cannot go on with others."""


class CudaExecutable(GpuExecutable):
    """This rank's part of a plan on its GPU; :func:`distgemm.compile` makes it.

    It satisfies :class:`distgemm.runtime.executable.Executable`. Calls on tensors of the same layout are served by
    graphs: the second and third calls record one graph for each buffer of the workspace, and later calls replay them,
    with the addresses of their tensors. Graphs of GEMMs by cuBLAS, and of copies of rows with gaps, serve the tensors
    that they were recorded with.

    Attributes:
        plan: what it executes.
        rank: this rank in the group.
        group: the ranks.
        device: this rank's GPU.
        execution: how GPUs execute the plan.
        workspace: the memory that it shares with the group's other executables.
        kernels: where the kernels come from that were compiled ahead, and whether faster ones could be compiled.
        graphs: number of graphs that it has recorded for eager calls; replays from :meth:`capture` do not count.
        timeout: seconds without a change after which a replay counts as stuck; None: the group's timeout.
        on_timeout: what happens then, as :func:`distgemm.compile` takes it.
    """

    workspace: Workspace

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        execution: ExecutionConfig,
        *,
        timeout: float | None = None,
        on_timeout: OnTimeout = "raise",
        turned_b: bool = False,
    ) -> None:
        execution = execution.on(device, plan.problem.dtype)
        super().__init__(plan, group, device, execution, timeout, on_timeout)
        self.graphs = 0
        problem: Exception | None = None
        try:
            self.binder = Binder(plan, self.rank, device, execution)
            check_waits(plan, execution, self.actions)
            choices = self.binder.choices(turned_b=turned_b)
        except Exception as error:  # raised below, once all ranks know of it
            problem, choices = error, []
        problem = agree_on_kernels(choices, group, device) or problem
        try:
            if problem is None:
                # What calls with dense tensors and these majors need; others build the rest.
                sources = self.binder.sources(turned_b=turned_b)
                build_together(sources, self.rank, plan.world_size)
                self.kernels = describe_kernels(sources, choices)
        except Exception as error:  # as above
            problem = error
        self._agree(problem)
        slot_bytes = max(map(plan.workspace_bytes, range(plan.world_size)))
        hosts = {} if plan.ranks_per_host is None else {"ranks_per_host": plan.ranks_per_host}
        self._join(Workspace, slot_bytes, most_flags(plan), **hosts)
        if self.workspace.across is not None:
            exchanges = exchanges_of(self.actions)
            to = sorted({copy.dst.rank for op in exchanges for copy in op.sends})
            from_ = sorted({copy.src.rank for op in exchanges for copy in op.receives})
            self.workspace.across.connect(to, from_, device)
        self._copied = copied_buffers(plan, self.rank)
        # By layout, or by layout and addresses: for each buffer, its recording. Tensors need not be kept alive: a graph
        # is only replayed for a call with tensors at its addresses.
        self._recorded: OrderedDict[Any, dict[int, Recording]] = OrderedDict()
        self._fixed: set[Any] = set()  # layouts whose graphs cannot go on with other tensors

    def _attach(self) -> None:
        self.binder.attach(self.workspace, self.number)

    @property
    def actions(self) -> Sequence[Action]:
        """What it puts on streams, in order."""
        return self.binder.actions

    @property
    def transfers(self) -> str:
        """Who moves data between ranks."""
        return "CUDA runtime" if self.plan.ranks_per_host is None else "CUDA runtime, NCCL across hosts"

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the plan needs of the workspace on this rank: ``plan.workspace_bytes(rank)``."""
        return self.plan.workspace_bytes(self.rank)

    def awaited(self, values: FlagValues) -> tuple[str, list[int]]:
        """What a replay waits for, in words, and the ranks that it waits for."""
        return awaited(self, values)

    def _put_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        buffer = self.workspace.next_buffer
        layout = layout_of(tensors, alpha, beta)
        key: Any = layout.key
        if not layout.disjoint or key in self._fixed:
            key = key, layout.addresses
        recordings = self._recorded.get(key)
        if recordings is None:
            self._put_eager(self.binder.bind(self._checked(tensors, alpha, beta), buffer), stream)
            self._recorded[key] = {}  # not for a call that has raised
            while len(self._recorded) > MAX_RECORDED_CALLS:
                self._recorded.popitem(last=False)
        else:
            recording = recordings.get(buffer)
            if recording is None:
                recording = self._record(self._checked(tensors, alpha, beta), buffer, layout)
                if not recording.movable and key is layout.key:
                    self._fixed.add(key)
                    del self._recorded[key]
                    key, recordings = (key, layout.addresses), {}
                    self._recorded[key] = recordings
                recordings[buffer] = recording
                self.graphs += 1
            elif recording.addresses != layout.addresses:
                del recordings[buffer]  # an error may leave addresses of two calls
                recording.move(layout.addresses)  # the key has all else that was checked
                recordings[buffer] = recording
            self._recorded.move_to_end(key)
            self._replay(recording, stream)

    def _put_captured_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        bound = self.binder.bind(self._checked(tensors, alpha, beta), self.workspace.next_buffer)
        self.workspace.keep(self)
        self.workspace.flip()
        self._order.begin_captured(stream)
        self._put(bound, counted=True)
        self._order.end_captured(stream)

    def gather(self, a_shard: Tensor) -> Iterator[GatheredChunk]:
        """The chunks of the gathered A, in the order in which the plan multiplies them. The caller multiplies.

        The first chunk comes behind all copies of this rank: they wait neither for the caller nor for its GEMMs. Nobody
        waits for the GPU: the current stream waits for each chunk before the caller gets it. A chunk is memory of the
        workspace, or of ``a_shard``. It stays as it is for what the caller puts on the current stream until it has
        asked for all chunks. Until then, there is no other call on this GPU, and all chunks are asked for on this
        stream. While the stream is captured, all of this becomes part of that graph.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``. It must not change until all
                chunks were asked for.

        Raises:
            ValueError: as a call raises it, for plans as :func:`distgemm.runtime.gathering.check_gathers` refuses
                them, and for an executable with two streams of GEMMs.
            ReplayTimeoutError: as a call raises it. The chunks are NaN then.
            RuntimeError: inside another gather on this GPU, and where another stream is current for a later chunk.
                The gather has ended then, and the next call may follow.
        """
        self.raise_if_dead()
        check_gathers(self.plan)
        if self.plan.ranks_per_host is not None:
            raise ValueError(
                "a gather hands out chunks that ranks of one host copy; across hosts call the executable, or gather "
                "with distgemm.CollectiveExecutable"
            )
        if self.execution.gemm_streams != 1:
            raise ValueError(
                f"a gather hands out chunks on one stream: it takes gemm_streams=1, got {self.execution.gemm_streams}"
            )
        check_gradients(self.rank, a_shard, *[None] * 7)
        given = {"A": check_shard(self.plan, self.rank, self.device, "A", a_shard).detach()}
        self._check_rows(given, self._copied)
        stream = self._current_stream()
        with self._order.issuing():
            captured = torch.cuda.is_current_stream_capturing()
            bound, tiles = self.binder.hand_out(CallTensors(given), self.workspace.next_buffer)
            if captured:
                self.workspace.keep(self)
            self.workspace.flip()
            (self._order.begin_captured if captured else self._order.begin)(stream)
            self._order.occupied = True
        actions = self._actions_put(bound, captured)

        def put_next() -> Action | None:
            # The caller's code runs in between, and another device may be current there.
            try:
                with torch.cuda.device(self._index):
                    return next(actions, None)
            except BaseException as error:
                if not captured:
                    self._give_up(error)
                raise

        def note() -> None:
            if not captured:
                self._watched.issued(self, lambda: None, stream)

        with occupied(self.group, "a gather"):
            try:
                while (action := put_next()) is not None:
                    op = next(iter(action.ops), None)
                    if isinstance(op, Gemm) and op.id in tiles:
                        note()
                        yield GatheredChunk(slice(*op.a.box[1]), tiles[op.id])
                        if self._current_stream() != stream:
                            raise RuntimeError("ask for the chunks of a gather on the stream on which it began")
            finally:  # other ranks need the rest of this one's steps
                while put_next() is not None:
                    pass
                self._order.occupied = False
                with torch.cuda.device(self._index):
                    (self._order.end_captured if captured else self._order.end)(stream)
        note()

    def capture(self, a_shard: Tensor, b_shard: Tensor, c_shard: Tensor | None = None, **options: Any) -> Replay:
        """A graph of one call on these tensors, to be replayed any number of times.

        Args:
            a_shard: as a call takes it.
            b_shard: as a call takes it.
            c_shard: as a call takes it.
            **options: the keyword arguments of a call. Where ``out`` is None, D is a new tensor: ``replay.out``.
        """
        names = ("bias", "scale_a", "scale_b", "out", "gathered")
        terms = {name: options.pop(name, None) for name in names}
        tensors = (a_shard, b_shard, c_shard, *terms.values())
        check_gradients(self.rank, *tensors)
        with self._order.issuing():
            call = self._checked(tensors, **options)
            layout = layout_of(tensors, call.alpha, call.beta)
            recordings = [self._record(call, buffer, layout) for buffer in range(BUFFERS)]
            return Replay(self, recordings, (*tensors[:6], call.out, tensors[7]))

    def _checked(self, tensors: Sequence[Tensor | None], alpha: float = 1.0, beta: float = 0.0) -> CallTensors:
        """The tensors of a call, once they are known to fit; in the order of ``TENSORS_OF_A_CALL``."""
        a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered = tensors
        assert a_shard is not None and b_shard is not None
        given = self._check(a_shard, b_shard, c_shard, beta, out, gathered)
        check_bias(self.rank, bias, given["D"])
        scales = check_scales(self.plan, self.rank, self.device, scale_a, scale_b)
        self._check_rows(scales, self._copied)
        return CallTensors(given | scales, alpha, beta, bias)

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
            if not self.binder.first_users_of_a and box_size(gathered_box(self.plan, self.rank)):
                raise ValueError(
                    f"{self.plan.schedule} does not bring rank {self.rank} all columns of A: there is no gathered"
                )
            check_gathered(self.plan, self.rank, gathered, given)
            given["gathered"] = gathered
            copied |= {"A", "gathered"}
        self._check_rows(given, copied)
        return given

    def _check_rows(self, given: dict[str, Tensor], copied: set[str]) -> None:
        for name in copied & set(given):
            rows, columns = given[name].shape[-2:]
            row_stride, column_stride = given[name].stride()[-2:]
            if (columns > 1 and column_stride != 1) or (rows > 1 and row_stride < columns):
                names = {"D": "out", "gathered": "gathered", "SFA": "scale_a", "SFB": "scale_b"}
                what = names.get(name, f"{name}'s shard")
                raise ValueError(
                    f"{what} on rank {self.rank} is copied by rows, which must be contiguous and must not overlap, got "
                    f"strides {given[name].stride()}; pass it as .contiguous()"
                )

    def _record(self, call: CallTensors, buffer: int, layout: CallLayout) -> Recording:
        bound = self.binder.bind(call, buffer)
        nodes: list[tuple[MovableLaunch, int]] = []
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.workspace.capture_stream):
            # Another thread (of NCCL, say) may call CUDA meanwhile. But an unused graph that the garbage collector
            # destroys now would spoil the capture.
            collecting = gc.isenabled()
            gc.disable()
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._put(bound, nodes=nodes)
                finally:
                    graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        return Recording(graph, nodes, layout)

    def _put_eager(self, bound: Bound, stream: int) -> None:
        self._launch(lambda _: self._put(bound), stream)

    def _replay(self, recording: Recording, stream: int) -> None:
        self._launch(recording.replay, stream)

    def _launch(self, launch: Callable[[int], None], stream: int) -> None:
        def flip_and_launch(stream: int) -> None:
            # Not before: a rank that has raised until here has sent nothing, and may call again.
            self.workspace.flip()
            launch(stream)

        super()._launch(flip_and_launch, stream)

    def _put(self, bound: Bound, counted: bool = False, nodes: list[tuple[MovableLaunch, int]] | None = None) -> None:
        """Put all actions on streams that begin and end with the current stream. This device is the current one.

        Args:
            bound: the actions.
            counted: also count the replay, because the watchdog cannot see a captured one begin and end.
            nodes: gets the launches with addresses of tensors that move, and their nodes in the graph.
        """
        for _ in self._actions_put(bound, counted, nodes):
            pass

    def _actions_put(
        self, bound: Bound, counted: bool, nodes: list[tuple[MovableLaunch, int]] | None = None
    ) -> Iterator[Action]:
        """The actions, each once it is put on its stream; see :meth:`_put`. This device is current for each."""
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
        for number, (action, launches) in enumerate(zip(bound.actions, bound.launches, strict=True)):
            stream = streams[action.stream]
            for before in action.after:
                stream.wait_event(events[before])
            for launch in launches:
                launch(stream.cuda_stream)
                if nodes is not None and launch.cells():
                    nodes.append((launch, captured_node(stream.cuda_stream) if launch.movable else 0))
            if action.awaited:
                events[number] = stream.record_event()
            yield action
        for number, stream in streams.items():
            if number != GEMM_STREAM:
                main.wait_stream(stream)
        for launch in bound.leave:
            launch(main.cuda_stream)


def copied_buffers(plan: Plan, rank: int) -> set[str]:
    """Which of the caller's "A", "B", "D", "SFA" and "SFB" a rank copies from or to."""
    copies = [op for op in plan.ops(rank) if isinstance(op, Copy)]
    return {view.buffer for op in copies for view in (op.src, op.dst)} - {"slot"}


class Replay(PreparedCall):
    """A recorded call. Calling it replays it on the current stream.

    Attributes:
        recordings: one for each buffer of the workspace.
        out: the tensor that it writes.
    """

    def __init__(
        self, executable: CudaExecutable, recordings: list[Recording], tensors: Sequence[Tensor | None]
    ) -> None:
        self.recordings, workspace = recordings, executable.workspace
        super().__init__(
            executable, lambda stream: executable._replay(recordings[workspace.next_buffer], stream), tensors
        )

    @property
    def graph(self) -> torch.cuda.CUDAGraph:
        """The graph for the first buffer, to look at."""
        return self.recordings[0].graph


def agree_on_kernels(
    choices: Sequence[Sequence[KernelSource]], group: dist.ProcessGroup, device: torch.device
) -> Exception | None:
    """Let all ranks of a group select among these kernels by what its first rank has. A collective call.

    What is there may differ from rank to rank: machines have caches of their own, and another process may compile.

    Returns:
        On the first rank, the error for which it cannot say what it has. Then all ranks take it to have nothing.
    """
    if group.size() == 1:
        return None
    there: list[Any] = [[]]
    problem: Exception | None = None
    if dist.get_rank(group) == 0:
        several = dict.fromkeys(chain.from_iterable(each for each in choices if len(each) > 1))
        try:
            there = [[source for source in several if is_there(source)]]
        except Exception as error:  # the others wait for what this rank has
            problem = error
    at = device if dist.get_backend(group) == "nccl" else None
    dist.broadcast_object_list(there, group=group, group_src=0, device=at)
    agree(there[0])
    return problem


def describe_kernels(sources: Sequence[KernelSource], choices: Sequence[Sequence[KernelSource]]) -> str:
    """Where compiled kernels come from, and which faster ones could be compiled."""
    origins = [origin(source) for source in sources]
    counts = ((origins.count("packed"), "from the pack"), (origins.count("compiled"), "compiled on this machine"))
    found = [f"{count} kernel{'s' * (count > 1)} {where}" for count, where in counts if count]
    better = dict.fromkeys(each[0].name for each in choices if preferred(each) != each[0])
    if better:
        slower = f"up to {100 * (NEAR_BEST - 1):.0f} % slower"
        found.append(
            f"of these, {len(better)} may be {slower} than one that is not compiled: {', '.join(better)}; distgemm "
            "warmup compiles it, distgemm tune measures"
        )
    return ", ".join(found)


if TYPE_CHECKING:
    _satisfies_protocol: type[Executable] = CudaExecutable
