"""From actions to launches: a rank's ops with the tensors of a call and the addresses of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch

from distgemm.gemm import GemmConfig, GemmSpec, GemmTensors, get_provider
from distgemm.gemm import bind as bind_gemm
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.flags import MemOp
from distgemm.gemm.launches import FixedLaunch, MovableLaunch
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.spec import SCALE_BLOCK
from distgemm.gemm.sums import bind_sum, sum_source_of
from distgemm.gemm.tensors import matrix_spec, spec_of
from distgemm.plan.exchanges import Exchange
from distgemm.plan.ops import Copy, Gemm, Reduce, Signal, View, Wait, box_extents, box_size, contains
from distgemm.plan.plan import SLOT_ALIGNMENT, Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS, OperandScaling
from distgemm.runtime.checks import TORCH_DTYPES, gathered_box, shard_dtype
from distgemm.runtime.cuda.discard_kernel import bind_discard, discard_source
from distgemm.runtime.cuda.flag_kernel import bind_flag_ops, flag_source
from distgemm.runtime.cuda.lowering import copies_first, lower
from distgemm.runtime.cuda.lowering.actions import COMM, Action, exchanges_of, waits_of
from distgemm.runtime.cuda.memops import FlagOpsLaunch, copies_of, wait_for, write
from distgemm.runtime.cuda.nccl import ExchangeLaunch, Message
from distgemm.runtime.cuda.workspace import Step, Workspace
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["Binder", "Binding", "Bound", "CallTensors", "first_users_of_a"]

Tensor = torch.Tensor


class CallTensors:
    """The tensors and numbers of one call.

    Args:
        given: tensors by name, as :func:`distgemm.runtime.checks.check_shards` finds them; "gathered"; and the scales
            "SFA" and "SFB". A alone where the caller multiplies.
        alpha: factor of A @ B.T.
        beta: factor of C.
        bias: one row of D's shard; None: none.

    Attributes:
        given: as given.
        shards: the tensors by name, as (l, rows, columns).
    """

    def __init__(
        self,
        given: dict[str, Tensor],
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        self.given = given
        self.shards = {name: x if x.dim() == 3 else x.unsqueeze(0) for name, x in given.items()}
        self.alpha, self.beta = float(alpha), float(beta)
        self.bias = bias

    @property
    def out(self) -> Tensor:
        """D as it was given."""
        return self.given["D"]

    def bias_of(self, view: View) -> Tensor | None:
        """The part of the bias for a view of D."""
        if self.bias is None:
            return None
        _, _, columns = view.slices()
        return self.bias[columns]


class Bound(NamedTuple):
    """A call as it is put on streams.

    Attributes:
        actions: in order.
        launches: for each action, what puts it on its stream, in order.
        leave: what puts the exit from the replay behind all actions.
    """

    actions: Sequence[Action]
    launches: Sequence[Sequence[MovableLaunch]]
    leave: Sequence[MovableLaunch]


class Binder:
    """A rank's part of a plan, ready for the tensors of calls.

    Args:
        plan: of all ranks.
        rank: this rank.
        device: this rank's GPU.
        execution: how GPUs execute the plan.

    Attributes:
        actions: what the rank puts on streams.
        first_users_of_a: as :func:`first_users_of_a` finds them.

    Raises:
        PlanError: as :func:`distgemm.runtime.cuda.lowering.lower.lower` raises it.
        ValueError: for a scaling that no kernel has.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, execution: ExecutionConfig) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.execution = execution.on(device, plan.problem.dtype)
        self.provider = str(self.execution.provider)
        self.config = None if execution.config is None else GemmConfig.parse(execution.config)
        _check_scaling(plan)
        self.first_users_of_a = first_users_of_a(plan, rank)
        self.actions: Sequence[Action] = lower(plan, rank, execution)

    def attach(self, workspace: Workspace, number: int) -> None:
        """Set where calls find slots and flags.

        Args:
            workspace: the workspace.
            number: the executable's number in the workspace.
        """
        self.workspace = workspace
        flags = [op.flag.number for op in waits_of(self.actions)]
        # Messages are contiguous, and NCCL keeps their addresses in a graph: what is neither goes by this memory.
        self.staging: dict[Copy, int] = {}
        size = 0
        self.exchange_numbers: dict[int, int] = {}  # by id, from 1
        for number, op in enumerate(exchanges_of(self.actions), start=1):
            self.exchange_numbers[op.id] = number
            for copy, view in (*((copy, copy.src) for copy in op.sends), *((copy, copy.dst) for copy in op.receives)):
                if view.buffer != "slot" or not _is_dense(view):
                    self.staging[copy] = size
                    taken = box_size(view.box) * DTYPE_BYTES[self.plan.dtype(view)]
                    size += -(-taken // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if size:
            self.staging_memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.steps = [buffer.steps(number, flags) for buffer in workspace.buffers]

    def bind(self, call: CallTensors, buffer: int) -> Bound:
        """A call on one buffer of the workspace."""
        return Binding(self, call, buffer).bound()

    def hand_out(self, call: CallTensors, buffer: int) -> tuple[Bound, dict[int, Tensor]]:
        """A call that launches no GEMM, because the caller multiplies.

        Returns:
            The call, whose copies come first, and A of each GEMM that is the first to use it, by the GEMM's id.
        """
        binding = Binding(self, call, buffer)
        binding.actions = self._copies_first
        gemms = [op for action in self.actions for op in action.ops if isinstance(op, Gemm)]
        return binding.bound(), {op.id: binding.tensor(op.a)[0] for op in gemms if op.id in self.first_users_of_a}

    @cached_property
    def _copies_first(self) -> Sequence[Action]:
        return copies_first(self.actions)

    def sources(self, c: bool = False, turned_b: bool = False) -> list[KernelSource]:
        """The kernels that calls with dense tensors need. It asks no GPU.

        Kernels of CUTLASS serve calls with and without a bias. Where cuBLAS adds a partial sum, it does not add a bias:
        the first call with both compiles the kernel that does.

        Args:
            c: whether the calls have C.
            turned_b: whether columns of B are contiguous, and not its rows.
        """
        found = self._dense_call(c, turned_b)
        ops = [op for action in self.actions for op in action.ops]
        gemms = [found.gemm_tensors(op) for op in ops if isinstance(op, Gemm)]
        specs = dict.fromkeys(spec_of(tensors) for tensors, _ in gemms)
        provider = get_provider(self.provider)
        sources = provider.sources(list(specs), self.config, self.execution.gemm_streams)
        for tensors, rest in gemms:
            if rest is not None:
                summed = [matrix_spec("a source", source) for source in (tensors.d, *rest.sums)]
                sources.append(sum_source_of(summed, summed[0]))
        for op in ops:
            if isinstance(op, Reduce):
                summed = [matrix_spec("a source", found.tensor(view)) for view in op.sources]
                sources.append(sum_source_of(summed, matrix_spec("D", found.tensor(op.out))))
        if self.execution.wait_by == "kernel":
            sources.append(flag_source())
        if any(op.receives for op in exchanges_of(self.actions)):
            sources.append(discard_source())
        return list(dict.fromkeys(sources))

    def specs(self, c: bool = False, turned_b: bool = False) -> list[GemmSpec]:
        """What the kernels of :meth:`sources` that multiply compute, without their configurations."""
        found = self._dense_call(c, turned_b)
        ops = [op for action in self.actions for op in action.ops if isinstance(op, Gemm)]
        return list(dict.fromkeys(spec_of(found.gemm_tensors(op)[0]) for op in ops))

    def choices(self, c: bool = False, turned_b: bool = False) -> list[list[KernelSource]]:
        """For each kernel that multiplies: the sources that are about equally fast, the best first.

        :func:`distgemm.gemm.select.preferred` selects among them.
        """
        provider = get_provider(self.provider)
        if self.config is not None or not isinstance(provider, CutlassProvider):
            return []
        return [
            [kernel_source(spec, each, provider.arch) for each in provider.near_best(spec, self.execution.gemm_streams)]
            for spec in self.specs(c, turned_b)
        ]

    def _dense_call(self, c: bool, turned_b: bool) -> Binding:
        """A call with dense tensors that have no memory."""
        shards = {
            name: torch.empty(self.plan.shard_shape(name, self.rank), dtype=shard_dtype(self.plan, name), device="meta")
            for name in ("A", "B", "C", "D", *(SCALE_OPERANDS.values() if self.plan.problem.scaling else ()))
        }
        if turned_b:
            shards["B"] = shards["B"].mT.contiguous().mT
        return Binding(self, CallTensors(shards, beta=float(c)), 0)


class Binding:
    """A call on one buffer of the workspace, on its way to launches.

    Args:
        binder: the rank's part of the plan.
        call: the call's tensors.
        buffer: number of the workspace's buffer.
    """

    def __init__(self, binder: Binder, call: CallTensors, buffer: int) -> None:
        self.binder, self.call, self.buffer = binder, call, buffer
        self.plan, self.rank = binder.plan, binder.rank
        self.actions, self.config = binder.actions, binder.config
        self.kernel_waits = binder.execution.wait_by == "kernel"

    def bound(self) -> Bound:
        """The launches of all actions."""
        return Bound(self.actions, [self._action(action) for action in self.actions], self._exit())

    def _action(self, action: Action) -> list[MovableLaunch]:
        if action.step is Step.FINISH and self.kernel_waits:
            return []  # a part of the exit
        steps = self.binder.steps[self.buffer]
        step = [] if action.step is None else steps[action.step]
        if not action.ops:
            return [FlagOpsLaunch(step)]
        first = action.ops[0]
        if isinstance(first, Gemm):
            return self._gemm(first) if "B" in self.call.shards else []  # the caller multiplies
        if isinstance(first, Reduce):
            return [self._reduce(first)]
        if isinstance(first, Copy):
            return [*copies_of(self.tensor(first.dst), self.tensor(first.src))]
        if isinstance(first, Exchange):
            return self._exchange(first)
        ops = [self.memop(op) for op in action.ops if isinstance(op, (Wait, Signal))]
        if self.kernel_waits and isinstance(first, Wait) and action.stream != COMM:
            return [bind_flag_ops([ops], self._device_index)]
        return [FlagOpsLaunch([*ops, *step])]

    def _exit(self) -> list[MovableLaunch]:
        """What is done behind all actions."""
        if not self.kernel_waits:
            return [FlagOpsLaunch(self.binder.steps[self.buffer][Step.EXIT])]
        finish = self.binder.steps[self.buffer][Step.FINISH]
        waits, resets = ([op for op in finish if op.wait is wait] for wait in (True, False))
        return [bind_flag_ops([waits, resets, self.binder.steps[self.buffer][Step.EXIT]], self._device_index)]

    @property
    def _device_index(self) -> int:
        return self.binder.device.index or 0

    def memop(self, op: Wait | Signal) -> MemOp:
        """The memory operation that waits for a plan's flag, or sets it."""
        address = self.binder.workspace.buffers[self.buffer].plan_flag(op.flag.rank, op.flag.number)
        return wait_for(address) if isinstance(op, Wait) else write(address)

    def _exchange(self, op: Exchange) -> list[MovableLaunch]:
        """Messages to and from other hosts, between copies to and from staging memory."""
        workspace = self.binder.workspace
        assert workspace.across is not None
        before: list[MovableLaunch] = []
        behind: list[MovableLaunch] = []
        sends, receives = [], []
        for copy in op.sends:
            memory, staged = self._message(copy, copy.src)
            before += copies_of(memory, self.tensor(copy.src)) if staged else ()
            sends.append(Message(copy.dst.rank, memory))
        for copy in op.receives:
            memory, staged = self._message(copy, copy.dst)
            behind += copies_of(self.tensor(copy.dst), memory) if staged else ()
            receives.append(Message(copy.src.rank, memory))
        if receives:
            received = [memory for _, memory in receives]
            behind.insert(0, bind_discard(workspace.aborted, received, self._device_index))
        ended = FlagOpsLaunch([workspace.buffers[self.buffer].exchanged(self.binder.exchange_numbers[op.id])])
        return [*before, ExchangeLaunch(workspace.across.exchange, sends, receives), *behind, ended]

    def _message(self, copy: Copy, view: View) -> tuple[Tensor, bool]:
        """The contiguous memory of a message, (l, rows, columns), and whether it is staging memory."""
        start = self.binder.staging.get(copy)
        if start is None:
            return self.tensor(view), False
        dtype = TORCH_DTYPES[self.plan.dtype(view)]
        size = box_size(view.box) * dtype.itemsize
        return self.binder.staging_memory[start : start + size].view(dtype).view(box_extents(view.box)), True

    def tensor(self, view: View) -> Tensor:
        """A view as a tensor (l, rows, columns)."""
        if view.buffer != "slot":
            return self.call.shards[view.buffer][view.slices()]
        slot = self.plan.slots[view.rank][view.slot]
        size = view.elements * DTYPE_BYTES[slot.dtype]  # neighbours that are merged take up several slots
        if self.call.shards["A"].is_meta:  # for sources(): alignment counts, and memory does not
            memory = torch.empty(size, dtype=torch.uint8, device="meta").view(TORCH_DTYPES[slot.dtype])
        else:
            memory = self.binder.workspace.slot(self.buffer, view.rank, slot.offset, size).view(
                TORCH_DTYPES[slot.dtype]
            )
        batches, rows, columns = box_extents(view.frame)
        frame = memory.as_strided((batches, rows, columns), (rows * view.pitch, view.pitch, 1))
        return frame[view.slices()]

    def _gemm(self, op: Gemm) -> list[MovableLaunch]:
        tensors, rest = self.gemm_tensors(op)
        execution = self.binder.execution
        # Sums and signals of other streams need the SMs between two GEMMs, so the second one does not begin early.
        bound = bind_gemm(
            tensors,
            provider=self.binder.provider,
            config=self.config,
            streams=execution.gemm_streams,
            begins_early=False,
        )
        launches = [bound if isinstance(bound, MovableLaunch) else FixedLaunch(bound, tensors)]
        if rest is not None:
            launches.append(bind_sum([tensors.d, *rest.sums], tensors.d, c=rest.c, beta=self.call.beta, bias=rest.bias))
        return [*launches, *self._to_gathered(op)]

    def _to_gathered(self, op: Gemm) -> list[MovableLaunch]:
        """The copy of a GEMM's tile of A to ``gathered``; empty where the caller wants none.

        It stands behind the tile's first GEMM: once all GEMMs of the tile are done, its slot may be written again.
        """
        if op.id not in self.binder.first_users_of_a or "gathered" not in self.call.shards:
            return []
        (l0, l1), (m0, m1), (k0, k1) = op.a.box
        (batch, _), (row, _), _ = gathered_box(self.binder.plan, self.binder.rank)
        target = self.call.shards["gathered"][l0 - batch : l1 - batch, m0 - row : m1 - row, k0:k1]
        return [*copies_of(target, self.tensor(op.a))]

    def gemm_tensors(self, op: Gemm) -> tuple[GemmTensors, _RemainingTerms | None]:
        """The tensors of a GEMM, and the terms that a sum adds to its result because the GEMM does not.

        An epilogue of CUTLASS adds two matrices, cuBLAS adds one term.
        """
        d = self.tensor(op.out)
        sources = [self.tensor(view) for view in op.sources]
        c = self.tensor(op.c) if op.c is not None and self.call.beta else None
        beta = self.call.beta if c is not None else 0.0
        rest = None
        further, c_term, c_factor = sources[1:], c, beta
        if further:
            # The second sum takes C's place. C, if there is one, and other sums are added to the result.
            others = [_matrix(source) for source in further[1:]]
            if others and others[0].dtype != d.dtype:
                raise ValueError(
                    f"an epilogue adds two sums, and further sums are added to D, of D's dtype: got {len(sources)} of "
                    f"{others[0].dtype} for D of {d.dtype}; final_add='kernel' adds sums of any dtype"
                )
            if others or c is not None:
                rest = _RemainingTerms(None if c is None else _matrix(c), None, others)
            c_term, c_factor = further[0], 1.0
        tensors = GemmTensors(
            a=_matrix(self.tensor(op.a)),
            b=_matrix(self.tensor(op.b)),
            d=_matrix(d),
            c=None if c_term is None else _matrix(c_term),
            partial=_matrix(sources[0]) if sources else None,
            bias=self.call.bias_of(op.out) if op.c is not None else None,
            scale_a=self._scales(op.scale_a),
            scale_b=self._scales(op.scale_b),
            alpha=self.call.alpha,
            beta=c_factor,
            dtype="tfloat32" if self.plan.problem.dtype == "tfloat32" else None,
            padded=op.out.buffer == "slot",
            block_rows=self._block_rows(),
        )
        provider = get_provider(self.binder.provider)
        if not provider.supports(spec_of(tensors)):
            bare = replace(tensors, c=None, beta=0.0, bias=None)
            if provider.supports(spec_of(bare)):
                left = _RemainingTerms(None if c is None else _matrix(c), tensors.bias, [_matrix(x) for x in further])
                return bare, left
        return tensors, rest

    def _scales(self, view: View | None) -> Tensor | None:
        """The scales of a GEMM's tile: one number, one for each row, or a matrix with one for each block."""
        if view is None:
            return None
        scales = self.tensor(view)
        return scales.reshape(-1) if self._block_rows() is None else scales[0]

    def _block_rows(self) -> tuple[int, int] | None:
        """The rows of blocks of A and of B; None: blocks have no scales."""
        scaling = self.plan.problem.scaling
        if scaling is None or scaling.a.rows is None or scaling.b.rows is None or scaling.a.columns is None:
            return None
        return scaling.a.rows, scaling.b.rows

    def _reduce(self, op: Reduce) -> MovableLaunch:
        c = self.tensor(op.c) if op.c is not None and self.call.beta else None
        sources = [self.tensor(view) for view in op.sources]
        bias = self.call.bias_of(op.out) if op.c is not None else None
        return bind_sum(sources, self.tensor(op.out), c=c, beta=self.call.beta, bias=bias)


def first_users_of_a(plan: Plan, rank: int) -> set[int]:
    """Ids of the GEMMs that are the first to use a tile of A; empty where a rank multiplies no :func:`gathered_box`."""
    wanted = gathered_box(plan, rank)
    gemms = [op for op in reversed(plan.ops(rank)) if isinstance(op, Gemm) and contains(wanted, op.a.box)]
    first = {op.a.box: op.id for op in gemms}
    return set(first.values()) if sum(map(box_size, first)) == box_size(wanted) else set()


def _check_scaling(plan: Plan) -> None:
    """Check that kernels multiply with the scaling of a plan.

    Raises:
        ValueError: if none does.
    """
    p = plan.problem
    if p.scaling is None:
        return
    taken = [
        all(part(p.scaling[operand]) and p.scaling[operand].dtype == "float32" for operand in "AB")
        for part in (_of_rows, _of_blocks)
    ]
    if not any(taken):
        raise ValueError(
            "kernels take one float32 scale for a tile or for each of its rows, or scales of 1x128 and 128x128 blocks "
            f"of both A and B, and the problem has {p.scaling}; CollectiveExecutable multiplies with others"
        )
    if p.l > 1:
        raise ValueError(f"kernels take scales of one batch, got l = {p.l}; CollectiveExecutable takes several")


def _of_rows(scaling: OperandScaling) -> bool:
    return scaling.columns is None and scaling.rows in (None, 1)


def _of_blocks(scaling: OperandScaling) -> bool:
    return scaling.columns == SCALE_BLOCK and scaling.rows in (1, SCALE_BLOCK) and not scaling.swizzled


class _RemainingTerms(NamedTuple):
    """What a sum adds to the result of a GEMM."""

    c: Tensor | None
    bias: Tensor | None
    sums: Sequence[Tensor] = ()


def _is_dense(view: View) -> bool:
    """Whether the memory of a view is contiguous."""
    batches, rows, columns = box_extents(view.box)
    return columns == view.pitch and (batches == 1 or rows == box_extents(view.frame)[1])


def _matrix(tensor: Tensor) -> Tensor:
    return tensor[0] if tensor.shape[0] == 1 else tensor
