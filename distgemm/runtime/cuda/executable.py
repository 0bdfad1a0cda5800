"""A plan on this rank's GPU: GEMMs and copy-engine copies, issued on streams or replayed as a CUDA graph."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from distgemm.gemm import GemmConfig, GemmTensors, Launch, get_provider
from distgemm.gemm import bind as bind_gemm
from distgemm.gemm.compiler import KernelSource, build_together
from distgemm.gemm.gated import COUNTERS, Further, GatedGemms, GatedSend, bind_gated, gated_source
from distgemm.gemm.sums import bind_sum, sum_source_of
from distgemm.gemm.tensors import matrix_spec, spec_of
from distgemm.gemm.words import MemOp, fits
from distgemm.ops import Copy, Gemm, Reduce, Signal, View, Wait, box_extents, box_size, link_of
from distgemm.plan import Plan
from distgemm.problem import DTYPE_BYTES
from distgemm.runtime.arguments import (
    TORCH_DTYPES,
    Execution,
    agree,
    check_gathered,
    check_shards,
    resolve_group,
    shard_dtype,
)
from distgemm.runtime.cuda.actions import BRANCH, COMM, Action, on_one_stream, waits_of
from distgemm.runtime.cuda.lowering import lower, most_flags
from distgemm.runtime.cuda.memops import copy_box, mem_ops, wait_for, write
from distgemm.runtime.cuda.one_kernel import moving
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, watchdog
from distgemm.runtime.cuda.words import bind_words, word_source
from distgemm.runtime.cuda.workspace import Step, Workspace, workspace_for

if TYPE_CHECKING:
    from distgemm.choice import Choice

__all__ = ["CudaExecutable", "Replay", "compile_plan"]

LOG = logging.getLogger("distgemm")

Tensor = torch.Tensor

Phases = Sequence[Sequence[MemOp]]

STORE_RATE, SEND_RATE = 360.0, 310.0
"""GB/s at which kernels store and deliver results at other GPUs, and send shards to them: a little less than Hopper's
NVLink takes."""
GRAPHS = 32
"""Sets of tensors for which an executable keeps graphs, one for each half of the workspace."""


class CudaExecutable:
    """This rank's part of a plan; made by :func:`distgemm.compile`.

    plan, group, device: what it executes, and where
    how:     it executes it: a :class:`distgemm.runtime.arguments.Execution`
    workspace: the memory that it shares with the group's other executables
    actions: what it puts on streams, in order
    graphs:  how many graphs it has recorded for eager calls, replays not counted
    choice:  what ``schedule="auto"`` chose; None where the caller did
    timeout, on_timeout: as :func:`distgemm.compile` takes them
    """

    _counters: Tensor | None = None

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        how: Execution,
        *,
        timeout: float = 300.0,
        on_timeout: str = "raise",
        choice: Choice | None = None,
    ) -> None:
        self.timeout, self.on_timeout = timeout, on_timeout
        self.plan, self.group, self.device, self.how, self.choice = plan, group, device, how, choice
        self.rank = dist.get_rank(group)
        self.graphs = 0
        self._multiplied = "tfloat32" if plan.problem.dtype == "tfloat32" else None
        problem: Exception | None = None
        try:
            self.actions = lower(plan, self.rank, how.branches, how.merge, how.waits == "gemm", how.copies)
            if how.waits == "kernel" and not on_one_stream(self.actions):
                raise ValueError(
                    f"waits='kernel' is for plans that multiply and add on one stream, and {plan.schedule} with "
                    f"branches={how.branches} does not: beside other kernels, one that waits may keep an SM from what "
                    "it waits for. waits='memory' does"
                )
            # What calls without C and bias need; the rest when it comes.
            build_together(self.sources(), self.rank, plan.world_size)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        agree(plan, f"{how}, timeout {timeout} s, {on_timeout}", group, device, problem)
        flags = most_flags(plan, how.waits == "gemm", how.copies)
        self.workspace: Workspace = workspace_for(
            group, device, max(map(plan.workspace_bytes, range(plan.world_size))), flags
        )
        self.number = self.workspace.register(self)
        self._watched = watchdog().add(self.workspace)
        flags_here = [op.flag.number for op in waits_of(self.actions)]
        self._steps = [half.steps(self.number, flags_here) for half in self.workspace.halves]
        if how.waits == "gemm":
            self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # calls may be on other streams
        self._copied = copied_buffers(plan, self.rank)
        self._tiles_of_a = tiles_of_a(plan, self.rank)
        self._shape_of_d, self._dtype_of_d = plan.shard_shape("D", self.rank), shard_dtype(plan, "D")
        # Tensors need not be kept alive: a graph is only replayed for a call that brings the same ones.
        self._recorded: OrderedDict[tuple[Any, ...], dict[int, torch.cuda.CUDAGraph]] = OrderedDict()

    @property
    def provider(self) -> str:
        """Of its GEMMs."""
        return self.how.provider

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
            call = _Call(given, alpha, beta, bias, scale_a, scale_b)
            call.half = half
            if graphs is None:
                self._issue(call, captured=capturing)
                if capturing:
                    return out
                graphs = self._recorded[key] = {}  # a call that raised is none
                while len(self._recorded) > GRAPHS:
                    self._recorded.popitem(last=False)
            else:
                graph = graphs[half] = self._record(call)
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
        call = _Call(given, **numbers)
        graphs = []
        for half in range(2):
            call.half = half
            graphs.append(self._record(call))
        return Replay(self, graphs, call)

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
            if not self._tiles_of_a:
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

    def _record(self, call: _Call) -> torch.cuda.CUDAGraph:
        launches = self._bind(call)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.workspace.capturing):
            # Another thread (of NCCL, say) may speak to CUDA meanwhile; but a graph that is garbage, collected here
            # and now, would spoil the capture.
            collecting = gc.isenabled()
            gc.disable()
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._put(call.way.actions, launches)
                finally:
                    graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        graph.instantiate()
        return graph

    def _issue(self, call: _Call, captured: bool = False) -> None:
        launches = self._bind(call)
        if captured:
            self.workspace.keep(self)
        # Not before: a rank that has raised until here has sent nothing, and may call again.
        self.workspace.turn()
        self._put(call.way.actions, launches, counted=captured)

    def sources(self, c: bool = False, bias: bool = False) -> list[KernelSource]:
        """The kernels that calls with dense tensors need, with C or a bias or without; no GPU is asked."""
        shards = {
            name: torch.empty(self.plan.shard_shape(name, self.rank), dtype=shard_dtype(self.plan, name), device="meta")
            for name in "ABCD"
        }
        row = shards["D"].new_empty(shards["D"].shape[-1]) if bias else None
        call = _Call(shards, 1.0, float(c), row, None, None)
        ops = [op for action in self.actions for op in action.ops]
        if self.how.waits == "gemm":
            kernels = [action for action in self.actions if action.gates]
            return [*(self._gated_source(action, call) for action in kernels), word_source()]
        gemms = [self._gemm_tensors(op, call) for op in ops if isinstance(op, Gemm)]
        specs = dict.fromkeys(spec_of(tensors) for tensors, _ in gemms)
        provider = get_provider(self.provider)
        sources = provider.sources(list(specs), self._config, self.how.branches)
        for tensors, rest in gemms:
            if rest is not None:
                summed = [matrix_spec("a source", source) for source in (tensors.d, *rest.sums)]
                sources.append(sum_source_of(summed, summed[0]))
        for op in ops:
            if isinstance(op, Reduce):
                summed = [matrix_spec("a source", self._tensor(view, call)) for view in op.sources]
                sources.append(sum_source_of(summed, matrix_spec("D", self._tensor(op.out, call))))
        if self.how.waits == "kernel":
            sources.append(word_source())
        return list(dict.fromkeys(sources))

    # --- binding: ops to launches ---------------------------------------------------------------------

    def _bind(self, call: _Call) -> list[Callable[[int], None]]:
        """What each action does to a stream, and what the exit does."""
        call.way = self._way(call)
        call.passage = self._passage(call)
        return [*(self._action(action, call) for action in call.way.actions), self._exit(call)]

    def _way(self, call: _Call) -> _Way:
        """How a call is done: as it was compiled, unless ``schedule="auto"`` chose one kernel for all GEMMs and that
        cannot read these tensors. To the other ranks both are the same."""
        chosen = _Way(self.actions, self.how.waits, self.how.config)
        if self.how.waits != "gemm" or self.choice is None:
            return chosen
        try:
            for action in self.actions:
                if action.gates:
                    self._gated_source(action, call)
        except ValueError as error:
            LOG.warning("%s on rank %d waits on memory for this call: %s", self.plan.schedule, self.rank, error)
            return _Way(lower(self.plan, self.rank, self.how.branches, copies=self.how.copies), "memory", None)
        return chosen

    def _passage(self, call: _Call) -> _Passage | None:
        """How a kernel that does everything enters the replay and leaves it; None where others stand beside it."""
        actions = call.way.actions
        alone = any(action.gates for action in actions) and all(action.stream == BRANCH for action in actions)
        if not alone or "gathered" in call.shards:
            return None
        found = _Passage(self._entry_phases(call), self._exit_phases(call))
        return found if fits(found.entry) and fits(found.exit) else None

    def _entry_phases(self, call: _Call) -> Phases:
        """Where nothing is on another stream, what comes before everything."""
        steps = self._steps[call.half]
        entered = steps[Step.ENTERED]  # peers are told once left is reset
        resets, tells = ([op for op in entered if (op.value == 1) == told] for told in (False, True))
        return [steps[Step.ENTRY], resets, tells]

    def _exit_phases(self, call: _Call) -> Phases:
        """What is done by a kernel behind all else."""
        steps = self._steps[call.half]
        finish = steps[Step.FINISH]
        return [[op for op in finish if op.wait], [op for op in finish if not op.wait], steps[Step.EXIT]]

    def _action(self, action: Action, call: _Call) -> Callable[[int], None]:
        if action.step is Step.FINISH and call.way.waits != "memory":
            return lambda stream: None  # a part of the exit
        steps = self._steps[call.half]
        if action.step is not None and action.stream == BRANCH:  # kernels alone: the first is all that comes before
            if action.step is Step.ENTERED or call.passage is not None:
                return lambda stream: None
            return bind_words(self._entry_phases(call), self._index)
        step = [] if action.step is None else steps[action.step]
        if not action.ops:
            return lambda stream: mem_ops(step, stream)
        first = action.ops[0]
        if action.gates:
            launches = self._gemms(action, call)
        elif isinstance(first, Gemm):
            launches = self._gemm(first, call)
        elif isinstance(first, Reduce):
            launches = [self._reduce(first, call)]
        elif isinstance(first, Copy):
            target, source = self._tensor(first.dst, call), self._tensor(first.src, call)
            return lambda stream: copy_box(target, source, stream)
        else:
            ops = [self._memop(op, call.half) for op in action.ops if isinstance(op, (Wait, Signal))]
            if call.way.waits != "memory" and isinstance(first, Wait) and action.stream != COMM:
                return bind_words([ops], self._index)
            return lambda stream: mem_ops([*ops, *step], stream)

        def launch(stream: int) -> None:
            for each in launches:
                each(stream)

        return launch

    def _exit(self, call: _Call) -> Callable[[int], None]:
        """What is done behind all else."""
        if call.way.waits == "memory":
            exit_step = self._steps[call.half][Step.EXIT]
            return lambda stream: mem_ops(exit_step, stream)
        if call.passage is not None:
            return lambda stream: None  # a part of the kernel
        return bind_words(self._exit_phases(call), self._index)

    @property
    def _index(self) -> int:
        return self.device.index or 0

    def _memop(self, op: Wait | Signal, half: int) -> MemOp:
        address = self.workspace.halves[half].flag(op.flag.rank, op.flag.number)
        return wait_for(address) if isinstance(op, Wait) else write(address)

    def _tensor(self, view: View, call: _Call) -> Tensor:
        """A view as a tensor (l, rows, columns)."""
        if view.buffer != "slot":
            return call.shards[view.buffer][view.slices()]
        slot = self.plan.slots[view.rank][view.slot]
        size = view.elements * DTYPE_BYTES[slot.dtype]  # chunks that are merged take up several slots
        if call.out.is_meta:  # addresses that are multiples of the slots' alignment, and nothing else
            memory = torch.empty(size, dtype=torch.uint8, device="meta").view(TORCH_DTYPES[slot.dtype])
        else:
            memory = self.workspace.slot(call.half, view.rank, slot.offset, size).view(TORCH_DTYPES[slot.dtype])
        batches, rows, columns = box_extents(view.frame)
        frame = memory.as_strided((batches, rows, columns), (rows * view.pitch, view.pitch, 1))
        return frame[view.slices()]

    def _gemms(self, action: Action, call: _Call) -> list[Launch]:
        """All GEMMs of the rank by one kernel."""
        copies = [self._to_gathered(op, call) for op in action.ops if isinstance(op, Gemm)]
        gemms = self._products(action, call, lambda op: self._memop(op, call.half).address)
        return [bind_gated(gemms, self._config), *chain.from_iterable(copies)]

    def _whole(self, slices: Sequence[View], call: _Call) -> Tensor:
        """Neighbouring columns of a matrix as one."""
        batch, rows, (start, _) = slices[0].box
        return _matrix(self._tensor(slices[0]._replace(box=(batch, rows, (start, slices[-1].box[2][1]))), call))

    def _gated_source(self, action: Action, call: _Call) -> KernelSource:
        return gated_source(self._products(action, call, lambda op: 1), self._config)

    @property
    def _config(self) -> GemmConfig | None:
        return None if self.how.config is None else GemmConfig.parse(self.how.config)

    def _products(self, action: Action, call: _Call, word: Callable[[Wait | Signal], int]) -> GatedGemms:
        """The GEMMs of a kernel and what it sends, with the addresses of words."""
        gemms = [op for op in action.ops if isinstance(op, Gemm)]
        products, further = [], []
        for op, waits in zip(gemms, action.gates, strict=True):
            tensors, rest = self._gemm_tensors(replace(op, sources=op.sources[:1]), call)
            pairs = zip(op.sources[1:], waits[1:], strict=True) if op.sources else ()
            further.append([Further(_matrix(self._tensor(view, call)), word(wait)) for view, wait in pairs])
            if rest is not None:
                raise ValueError(f"waits='gemm' takes GEMMs that do all by themselves, and none adds C to {op}")
            products.append(tensors)
        sends = [
            GatedSend(
                self._whole([copy.src for copy in sent.copies], call),
                self._whole([copy.dst for copy in sent.copies], call),
                word(sent.signals[0]) if sent.signals else 0,
                waits=word(sent.waits) if sent.waits else 0,
                away=link_of(sent.copies[0]) is not None,
            )
            for sent in action.sends
        ]
        stored = any(op.out.rank != self.rank for op in gemms)
        return GatedGemms(
            products,
            moving=moving(gemms),
            waits=[word(ops[0]) if ops else 0 for ops in action.gates],
            tells=[0 if op is None else word(op) for op in action.tells],
            away=[op.out.buffer == "slot" for op in gemms],
            counters=self._counters,
            sends=sends,
            opens=word(action.opens) if action.opens else 0,
            rate=STORE_RATE if stored else SEND_RATE if sends else 0.0,
            slice=action.slice,
            entire=[action.slice > 0 and len(ops) == 1 for ops in action.gates],
            abreast=action.abreast,
            entry=call.passage.entry if call.passage else (),
            exit=call.passage.exit if call.passage else (),
            further=further if any(further) else (),
        )

    def _gemm(self, op: Gemm, call: _Call) -> list[Launch]:
        tensors, rest = self._gemm_tensors(op, call)
        config = call.way.config
        launches: list[Launch] = [bind_gemm(tensors, provider=self.provider, config=config, streams=self.how.branches)]
        if rest is not None:
            launches.append(bind_sum([tensors.d, *rest.sums], tensors.d, c=rest.c, beta=call.beta, bias=rest.bias))
        return [*launches, *self._to_gathered(op, call)]

    def _to_gathered(self, op: Gemm, call: _Call) -> list[Launch]:
        """What brings a GEMM's tile of A to where the caller wants all of A; empty where he does not. It comes behind
        the tile's first GEMM: its slot may be written again once all its GEMMs are done."""
        if op.id not in self._tiles_of_a or "gathered" not in call.shards:
            return []
        (l0, l1), (m0, m1), (k0, k1) = op.a.box
        source, target = self._tensor(op.a, call), call.shards["gathered"][l0:l1, m0:m1, k0:k1]
        return [lambda stream=None: copy_box(target, source, stream)]

    def _gemm_tensors(self, op: Gemm, call: _Call) -> tuple[GemmTensors, _Rest | None]:
        """The tensors of a GEMM, and what is to be added to its result because the GEMM does not: an epilogue adds two
        matrices, cuBLAS one term."""
        d = self._tensor(op.out, call)
        sources = [self._tensor(view, call) for view in op.sources]
        c = self._tensor(op.c, call) if op.c is not None and call.beta else None
        beta = call.beta if c is not None else 0.0
        rest = None
        further, c_term, c_factor = sources[1:], c, beta
        if further:
            # The second sum takes C's place; C, if there is one, and other sums are added to the result.
            others = [_matrix(source) for source in further[1:]]
            if others and others[0].dtype != d.dtype:
                raise ValueError(
                    f"an epilogue adds two sums, and what is left is added to D: of one type, got {len(sources)} of "
                    f"{others[0].dtype} for D of {d.dtype}; last='sum' adds sums of any type"
                )
            rest = _Rest(None if c is None else _matrix(c), None, others) if others or c is not None else None
            c_term, c_factor = further[0], 1.0
        (_, rows, _), (_, columns, _) = op.a.box, op.b.box
        tensors = GemmTensors(
            a=_matrix(self._tensor(op.a, call)),
            b=_matrix(self._tensor(op.b, call)),
            d=_matrix(d),
            c=None if c_term is None else _matrix(c_term),
            partial=_matrix(sources[0]) if sources else None,
            bias=call.bias_of(op.out) if op.c is not None else None,
            scale_a=_rows(call.scale_a, rows),
            scale_b=_rows(call.scale_b, columns),
            alpha=call.alpha,
            beta=c_factor,
            dtype=self._multiplied,
            padded=op.out.buffer == "slot",
        )
        provider = get_provider(self.provider)
        if not provider.supports(spec_of(tensors)):
            bare = replace(tensors, c=None, beta=0.0, bias=None)
            if provider.supports(spec_of(bare)):
                return bare, _Rest(None if c is None else _matrix(c), tensors.bias, [_matrix(x) for x in further])
        return tensors, rest

    def _reduce(self, op: Reduce, call: _Call) -> Launch:
        c = self._tensor(op.c, call) if op.c is not None and call.beta else None
        sources = [self._tensor(view, call) for view in op.sources]
        bias = call.bias_of(op.out) if op.c is not None else None
        return bind_sum(sources, self._tensor(op.out, call), c=c, beta=call.beta, bias=bias)

    # --- issuing: launches to streams -----------------------------------------------------------------

    def _put(self, actions: Sequence[Action], launches: list[Callable[[int], None]], counted: bool = False) -> None:
        """Put all actions on streams that begin and end with the current one.

        counted: also count the replay, where the watchdog cannot see it begin and end
        """
        main = torch.cuda.current_stream(self.device)
        side = self.workspace.streams
        used = sorted({BRANCH, *(action.stream for action in actions)})
        streams = {number: main if number == BRANCH else side[number - (number > BRANCH)] for number in used}
        for number, stream in streams.items():
            if number != BRANCH:
                stream.wait_stream(main)
        if counted:
            with torch.cuda.stream(streams[used[-1]]):
                self.workspace.replays.add_(1)
        events: dict[int, torch.cuda.Event] = {}
        *of_actions, leave = launches
        for number, (action, launch) in enumerate(zip(actions, of_actions, strict=True)):
            stream = streams[action.stream]
            for before in action.after:
                stream.wait_event(events[before])
            launch(stream.cuda_stream)
            if action.awaited:
                events[number] = stream.record_event()
        for number, stream in streams.items():
            if number != BRANCH:
                main.wait_stream(stream)
        leave(main.cuda_stream)


def tiles_of_a(plan: Plan, rank: int) -> set[int]:
    """The GEMMs that are the first to use a tile of A, by id, where a rank multiplies all of A; else none."""
    first = {op.a.box: op.id for op in reversed(plan.ops(rank)) if isinstance(op, Gemm)}
    p = plan.problem
    return set(first.values()) if sum(map(box_size, first)) == p.l * p.m * p.k else set()


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


class _Rest(NamedTuple):
    """What a GEMM leaves to a sum behind it."""

    c: Tensor | None
    bias: Tensor | None
    sums: Sequence[Tensor] = ()


class _Passage(NamedTuple):
    """What a kernel waits for and writes, in phases, to enter a replay and to leave it."""

    entry: Phases
    exit: Phases


class _Way(NamedTuple):
    """What a call puts on streams, by what it waits, and the configuration of its GEMMs."""

    actions: Sequence[Action]
    waits: str
    config: str | None


class _Call:
    """The tensors and numbers of one call, shards as (l, rows, columns); the half of the workspace that it takes, the
    way in which it is done, and how a kernel enters and leaves the replay by itself."""

    way: _Way
    passage: _Passage | None = None

    def __init__(
        self,
        given: dict[str, Tensor],
        alpha: float,
        beta: float,
        bias: Tensor | None,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
    ) -> None:
        self.out = given["D"]
        self.half = 0
        self.shards = {name: x if x.dim() == 3 else x.unsqueeze(0) for name, x in given.items()}
        self.alpha, self.beta = float(alpha), float(beta)
        self.bias, self.scale_a, self.scale_b = bias, scale_a, scale_b

    def bias_of(self, view: View) -> Tensor | None:
        """The part of the bias that belongs to a view of D."""
        if self.bias is None:
            return None
        _, _, columns = view.slices()
        return self.bias[columns]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor[0] if tensor.shape[0] == 1 else tensor


def _rows(scale: Tensor | None, rows: tuple[int, int]) -> Tensor | None:
    if scale is None or scale.numel() == 1:
        return scale
    return scale[rows[0] : rows[1]]


class Replay:
    """A recorded call. Calling it replays it on the current stream; ``out`` is what it writes."""

    def __init__(self, executable: CudaExecutable, graphs: list[torch.cuda.CUDAGraph], call: _Call) -> None:
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
    how: Execution | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    timeout: float = 300.0,
    on_timeout: str = "raise",
    choice: Choice | None = None,
) -> CudaExecutable:
    """This rank's executable for a plan: :func:`distgemm.compile`, for those who have a plan.

    choice: what ``schedule="auto"`` chose, if it did
    """
    whole = resolve_group(group)
    how = Execution() if how is None else how
    if on_timeout not in ("raise", "abort") or not timeout > 0:
        raise ValueError(f"timeout > 0 and on_timeout 'raise' or 'abort', got {timeout!r} and {on_timeout!r}")
    get_provider(how.provider)
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
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: with a single hardware queue, graphs whose branches wait for other "
            "ranks have not been shown to come to an end; unset it, or set it to 8"
        )
    return CudaExecutable(plan, whole, at, how, timeout=timeout, on_timeout=on_timeout, choice=choice)
