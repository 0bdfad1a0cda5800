"""The collective runtime: a process for each rank, over torch.distributed (gloo on the CPU, NCCL on CUDA).

Flags become messages. A posted receive is the credit, its completion is the arrival: of the ops that only
synchronise, just the Waits for arrivals and the Barriers do anything here. See ``docs/collective.md``.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from distgemm.plan.ops import (
    Barrier,
    Box,
    Copy,
    Gemm,
    Op,
    Reduce,
    Signal,
    View,
    Wait,
    box_extents,
    box_size,
    contains,
)
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.validate import validate
from distgemm.runtime.checks import TORCH_DTYPES, agree, check_gathered, check_shards, resolve_group

__all__ = ["CollectiveExecutable", "run_collective"]

Tensor = torch.Tensor


class CollectiveExecutable:
    """This rank's part of a plan, ready to be called any number of times.

    plan:   the same on all ranks of the group; its ops are all that is executed
    group:  a process group of ``plan.world_size`` ranks; None: all
    device: where shards and workspace lie; None: the current CUDA device if the group has NCCL, else the CPU

    A collective call: all ranks of the group make it, and they compare their plans. The workspace is allocated
    here, by ``plan.slots``, and holds NaN before the first call.

    Raises ValueError on all ranks when their plans differ, and names those that do; ValueError for a plan with
    another mechanism than "push", a group that this rank is not in, a group of another size and a device that the
    group does not serve; PlanError for ops that cannot be executed with messages, or that do not write all of D.
    """

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup | None = None, device: torch.device | str | int | None = None
    ) -> None:
        if not isinstance(plan, Plan):
            raise ValueError(f"plan is a distgemm.Plan, got {plan!r}")
        self.plan = plan
        self.group = resolve_group(group)
        self.rank = dist.get_rank(self.group)
        served = _devices(self.group)
        self.device = usual = _device(None, served)
        problem: Exception | None = None
        try:
            self.device = _device(device, served)
            self._prepare(served)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        agree(plan, "", self.group, self.device if self.device.type == usual.type else usual, problem)

    @property
    def provider(self) -> str:
        return "torch"

    @property
    def transfers(self) -> str:
        return f"collective runtime over {dist.get_backend(self.group)}"

    def release(self) -> None: ...

    def _prepare(self, served: dict[str, str]) -> None:
        plan, device = self.plan, self.device
        if plan.mechanism != "push":
            raise ValueError(
                f'the collective runtime sends messages: it takes plans with mechanism="push", got {plan.mechanism!r}'
            )
        if dist.get_world_size(self.group) != plan.world_size:
            size = dist.get_world_size(self.group)
            raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {size}")
        backend = served.get(device.type)
        if backend is None or (device.type == "cuda" and backend != "nccl"):
            raise ValueError(f"the group sends from {_named(served)}; for {device} it takes gloo (CPU) or nccl (CUDA)")
        memory = _Memory(plan, self.rank, device)
        barrier = _barrier(self.group, device if backend == "nccl" else None)
        self._gathers = _gathers(plan, self.rank)
        self._steps, self._messages = _Compiler(plan, self.rank, memory, self.group, barrier).compile()

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
        """This rank's shard of D = alpha * A @ B.T + beta * C; all ranks of the group call it alike.

        a_shard, b_shard: of the shapes ``plan.shard_shape("A", rank)`` and ``("B", rank)``, of ``problem.dtype``
        c_shard: as D, of ``problem.out_dtype``; read only where beta is not 0
        out:     where D goes, instead of a new tensor; shares no memory with the shards
        gathered: where all of A goes, (m, k), on ranks that multiply all of it; shares no memory with the others

        For a schedule that gathers A this is the program ::

            a = torch.empty(m, k); dist.all_gather_into_tensor(a, a_shard, group)
            d = alpha * a @ b_shard.T + beta * c_shard

        and for one that scatters sums ::

            d = torch.empty(m // world_size, n)
            dist.reduce_scatter_tensor(d, alpha * a_shard @ b_shard.T, group=group); d += beta * c_shard

        Products, and what is added to them, accumulate in float32 (float64 for float64); partial sums are rounded
        to ``problem.partial_dtype`` and D to ``problem.out_dtype``. On CUDA nothing but a Barrier blocks the host.

        Raises ValueError for shards of another shape, type or device, for beta without C, for ``gathered`` where this
        rank does not multiply all of A, and for shards that require grad, outside of torch.no_grad(): there are no
        gradients here. A rank that raises leaves the others waiting for its messages.
        """
        if bias is not None:
            c_shard, beta = bias.expand(self.plan.shard_shape("D", self.rank)), 1.0
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        if gathered is not None:
            if not self._gathers:
                raise ValueError(f"gathered is for ranks that multiply all of A; rank {self.rank} does not")
            check_gathered(self.plan, self.rank, gathered, given)
        batched = self.plan.problem.l > 1
        shards = {name: t if batched else t.unsqueeze(0) for name, t in given.items()}
        whole = gathered if batched or gathered is None else gathered.unsqueeze(0)
        call = _Call(shards, float(alpha), float(beta), [None] * self._messages, whole)
        with torch.no_grad():
            for step in self._steps:
                step(call)
        return given["D"]


def run_collective(
    plan: Plan,
    a_shard: Tensor,
    b_shard: Tensor,
    c_shard: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Execute a plan once: :class:`CollectiveExecutable`, made on the device of ``a_shard`` and called.

    Every call allocates a workspace and compares the plans of all ranks; keep an executable to call it again.
    """
    device = a_shard.device if isinstance(a_shard, Tensor) else None
    return CollectiveExecutable(plan, group, device)(a_shard, b_shard, c_shard, alpha=alpha, beta=beta, out=out)


# --- the group ------------------------------------------------------------------------------------------


def _devices(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    pairs = [pair.rpartition(":") for pair in dist.get_backend_config(group).split(",")]
    found = {device: backend for device, _, backend in pairs if device}
    if not found:
        backend = dist.get_backend(group)
        found = {"cuda" if backend == "nccl" else "cpu": backend}
    return found


def _named(served: dict[str, str]) -> str:
    return ", ".join(f"{device} ({backend})" for device, backend in served.items())


def _device(device: torch.device | str | int | None, served: dict[str, str]) -> torch.device:
    if device is None:
        device = "cuda" if served.get("cuda") == "nccl" else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


def _barrier(group: dist.ProcessGroup, device: torch.device | None) -> Callable[[_Call], None]:
    ids = None if device is None else [device.index]
    return lambda call: dist.barrier(group, device_ids=ids)


# --- memory ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call:
    """What one call binds: the shards (l, rows, columns), the scalars, the messages under way, where A is gathered."""

    shards: dict[str, Tensor]
    alpha: float
    beta: float
    works: list[Any]
    gathered: Tensor | None = None


Step = Callable[[_Call], None]
Place = Callable[[_Call], Tensor]
"""Where a view lies, once the shards are known."""


class _Memory:
    """This rank's workspace, and where its views lie. What is made here is written outside of inference mode, too."""

    @torch.inference_mode(False)
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
        self.scratch: dict[str, Tensor] = {}

    def dtype(self, view: View) -> torch.dtype:
        """The element type of the memory of a view, on any rank."""
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
    def temporary(self, name: str, shape: Sequence[int], dtype: torch.dtype, most: int) -> Tensor:
        """A tensor in memory that all ops with this name share, of at most ``most`` elements."""
        if name not in self.scratch:
            self.scratch[name] = torch.empty(most, dtype=dtype, device=self.device)
        size = 1
        for extent in shape:
            size *= extent
        return self.scratch[name][:size].view(tuple(shape))


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: all backends carry them, whatever the type."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# --- steps ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Message:
    """One Copy between ranks, as its sender or its receiver sees it.

    number: among all messages of the plan, the same at both ends
    work:   index in ``_Call.works``
    """

    number: int
    work: int
    copy: Copy
    sends: bool
    peer: int
    place: Place
    dtype: torch.dtype
    staging: Tensor | None = None

    def buffer(self, call: _Call) -> Tensor:
        """The contiguous bytes to send, or to receive into."""
        tensor = self.place(call)
        if not tensor.is_contiguous():
            if self.staging is None:
                with torch.inference_mode(False):
                    self.staging = torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
            if self.sends:
                self.staging.copy_(tensor)
            tensor = self.staging
        return _bytes(tensor)

    def unpack(self, call: _Call) -> None:
        """Put what arrived where it belongs."""
        tensor = self.place(call)
        if self.staging is not None and not tensor.is_contiguous():
            tensor.copy_(self.staging)


@dataclass(slots=True, eq=False)
class _Post:
    """Post all messages of a round."""

    messages: list[_Message]
    group: dist.ProcessGroup

    def __call__(self, call: _Call) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if message.sends else dist.irecv,
                    message.buffer(call),
                    group=self.group,
                    tag=message.number,
                    group_peer=message.peer,
                )
                for message in self.messages
            ]
        )
        # NCCL makes one kernel, and so one work, of the group.
        whole = len(works) != len(self.messages)
        for index, message in enumerate(self.messages):
            call.works[message.work] = works[-1 if whole else index]


@dataclass(slots=True, eq=False)
class _Join:
    """Wait for messages; each is waited for once. ``unpack``: what arrived is used next."""

    messages: list[_Message]
    unpack: bool

    def __call__(self, call: _Call) -> None:
        for message in self.messages:
            call.works[message.work].wait()
            if self.unpack:
                message.unpack(call)


@dataclass(slots=True, eq=False)
class _Sum:
    """The epilogue of a Gemm, and a whole Reduce: sources and beta * C are added before the single rounding.

    total: where it is added, in the accumulation type; None: in ``out``
    """

    sources: list[Place]
    c: Place | None
    out: Place
    total: Tensor
    in_place: bool

    def target(self, call: _Call) -> Tensor:
        return self.out(call) if self.in_place and not self._adds_c(call) else self.total

    def _adds_c(self, call: _Call) -> bool:
        return self.c is not None and call.beta != 0

    def finish(self, call: _Call, target: Tensor) -> None:
        for source in self.sources:
            target.add_(source(call))
        if self.c is not None and call.beta != 0:  # C need not even be given where beta is 0
            target.add_(self.c(call), alpha=call.beta)
        if target is self.total:
            self.out(call).copy_(target)


@dataclass(slots=True, eq=False)
class _Multiply:
    """A Gemm. ``wide``: where its operands are converted to the type that is multiplied; empty: they have it."""

    a: Place
    b: Place
    wide: list[Tensor]
    sum: _Sum
    out_dtype: torch.dtype | None
    precision: str | None

    def __call__(self, call: _Call) -> None:
        a, b = self.a(call), self.b(call)
        if self.wide:
            a, b = self.wide[0].copy_(a), self.wide[1].copy_(b)
        target = self.sum.target(call)
        with _float32_precision(target.device, self.precision):
            _matmul(a, b, target, self.out_dtype)
        if call.alpha != 1:
            target.mul_(call.alpha)
        self.sum.finish(call, target)


@dataclass(slots=True, eq=False)
class _Add:
    """A Reduce."""

    sum: _Sum

    def __call__(self, call: _Call) -> None:
        total = self.sum.total.zero_()
        self.sum.finish(call, total)


@dataclass(slots=True, eq=False)
class _Keep:
    """A tile of A goes where the caller wants all of A, after its first Gemm: later the slot may be reused."""

    tile: Place
    where: tuple[slice, ...]

    def __call__(self, call: _Call) -> None:
        if call.gathered is not None:
            call.gathered[self.where].copy_(self.tile(call))


@dataclass(slots=True, eq=False)
class _Move:
    """A Copy within the rank."""

    src: Place
    dst: Place

    def __call__(self, call: _Call) -> None:
        self.dst(call).copy_(self.src(call))


def _matmul(a: Tensor, b: Tensor, out: Tensor, out_dtype: torch.dtype | None) -> None:
    """out = a @ b.T for each l. ``out_dtype``: the type of out, where the operands have another."""
    if a.shape[0] == 1:
        a, b, out = a[0], b[0], out[0]
    product: Any = torch.mm if a.dim() == 2 else torch.bmm
    if out_dtype is None:
        product(a, b.transpose(-1, -2), out=out)
    else:
        product(a, b.transpose(-1, -2), out_dtype=out_dtype, out=out)


@contextlib.contextmanager
def _float32_precision(device: torch.device, precision: str | None) -> Iterator[None]:
    """How float32 is multiplied, "ieee" or "tf32", whatever the caller's settings, which stay as they are."""
    backends: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend = backends.matmul
    before = backend.fp32_precision
    if precision is None or precision == before or (precision == "ieee" and before == "none"):
        yield
        return
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before


# --- from ops to steps ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Group:
    """The messages of one round, and what must have been done before they are posted."""

    messages: list[_Message] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)  # ops of this rank
    sent: set[int] = field(default_factory=set)  # Copies of this rank, completely


class _Compiler:
    """The steps of one rank. All ranks' ops are looked at, once, for the messages that come in."""

    def __init__(self, plan: Plan, rank: int, memory: _Memory, group: dist.ProcessGroup, barrier: Step) -> None:
        self.plan, self.rank, self.memory, self.group, self.barrier = plan, rank, memory, group, barrier
        form = validate(plan)
        self.ops, self.signals = form.ops, form.signals
        self.steps: list[Step] = []
        self.finished: set[int] = set()
        self.posted: set[int] = set()  # numbers of messages
        self.joined: set[int] = set()
        self.multiplied: set[Box] = set()  # boxes of A
        self.barriers_passed = 0
        self.barriers = sorted(form.barriers)
        self.sends: dict[int, _Message] = {}  # by the id of the Copy
        self.receives: dict[tuple[int, int], _Message] = {}  # by the rank and id of the Copy
        self.groups = self._groups()
        largest = [(box_size(op.a.box), box_size(op.b.box)) for op in plan.ops(rank) if isinstance(op, Gemm)]
        self.largest_a = max((a for a, _ in largest), default=0)
        self.largest_b = max((b for _, b in largest), default=0)
        self.largest_out = max(
            (box_size(op.out.box) for op in plan.ops(rank) if isinstance(op, Gemm | Reduce)), default=0
        )

    def compile(self) -> tuple[list[Step], int]:
        """The steps of a call, and how many messages it has."""
        waiting = sorted(self.groups)
        for op in self.plan.ops(self.rank):
            self._post(waiting, op)
            self._issue(op)
        self._post(waiting, None)
        self._check_written()
        # The caller's tensors are no longer read, and no message is left over, when a call returns.
        messages = [*self.sends.values(), *self.receives.values()]
        self._join([message for message in messages if message.number not in self.joined], unpack=False)
        return self.steps, len(messages)

    # --- messages -----------------------------------------------------------------------------------------

    def _groups(self) -> dict[int, _Group]:
        groups: dict[int, _Group] = defaultdict(_Group)
        copies = [op for ops in self.ops for op in ops.values() if _crosses(op) and box_size(op.src.box)]
        for number, copy in enumerate(copies):
            if copy.rank == self.rank:
                self.sends[copy.id] = self._message(copy, number, sends=True)
                groups[copy.round].messages.append(self.sends[copy.id])
            elif copy.dst.rank == self.rank:
                self.receives[copy.rank, copy.id] = self._message(copy, number, sends=False)
                groups[copy.round].messages.append(self.receives[copy.rank, copy.id])
        for group in groups.values():
            for message in group.messages:
                self._need(group, message.copy.deps if message.sends else self._credits(message.copy))
        return groups

    def _message(self, op: Copy, number: int, sends: bool) -> _Message:
        view, peer = (op.src, op.dst.rank) if sends else (op.dst, op.src.rank)
        work = len(self.sends) + len(self.receives)
        return _Message(number, work, op, sends, peer, self.memory.place(view), self.memory.dtype(view))

    def _credits(self, copy: Copy) -> set[int]:
        """Ids of this rank's ops that happen before a Copy into its memory, in the same replay: the last of them."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        stack = [(copy.rank, dep) for dep in copy.deps]
        while stack:
            rank, op_id = stack.pop()
            if (rank, op_id) in seen:
                continue
            seen.add((rank, op_id))
            if rank == self.rank:
                found.add(op_id)
                continue
            op = self.ops[rank][op_id]
            stack += [(rank, dep) for dep in op.deps]
            # A flag that is set at the start stands for what the replay before did.
            if isinstance(op, Wait) and not op.flag.initial:
                signal = self.signals[op.flag[:2]]
                stack.append((signal.rank, signal.id))
        return found

    def _needs(self, ids: Iterable[int]) -> tuple[set[int], set[int]]:
        """The ops that must be finished, and the Copies that must have left, before an op with these deps."""
        finished: set[int] = set()
        sent: set[int] = set()
        stack = list(ids)
        while stack:
            op_id = stack.pop()
            op = self.ops[self.rank][op_id]
            if isinstance(op, Signal):
                stack += op.deps
            elif op_id in self.sends:
                sent.add(op_id)
            else:
                finished.add(op_id)
        return finished, sent

    def _need(self, group: _Group, ids: Iterable[int]) -> None:
        finished, sent = self._needs(ids)
        # The receiver's credit is the receive that it posts.
        group.finished |= {op_id for op_id in finished if not _is_credit(self.ops[self.rank][op_id])}
        group.sent |= sent

    def _post(self, waiting: list[int], before: Op | None) -> None:
        """Post the groups that can be posted: as soon as nothing has to be waited for, at the latest after the
        ops of their round. Rounds ascend on all ranks, so no group waits for a later one."""
        while waiting:
            round_ = waiting[0]
            group = self.groups[round_]
            last_chance = before is None or before.round > round_
            passed = self.barriers_passed == sum(barrier <= round_ for barrier in self.barriers)
            ready = passed and group.finished <= self.finished
            left = [self.sends[op_id] for op_id in sorted(group.sent) if self.sends[op_id].number not in self.joined]
            if not ready or left:
                if not last_chance:
                    return
                if not ready or any(message.number not in self.posted for message in left):
                    first = min(group.messages, key=lambda message: message.number).copy
                    raise PlanError(f"{first.describe()}: a message of round {round_} needs what comes after it")
                self._join(left, unpack=False)
            waiting.pop(0)
            group.messages.sort(key=lambda message: message.number)
            self.steps.append(_Post(group.messages, self.group))
            self.posted |= {message.number for message in group.messages}

    def _join(self, messages: Sequence[_Message], unpack: bool) -> None:
        # A second wait for one message would block.
        messages = [message for message in messages if message.number not in self.joined]
        self.joined |= {message.number for message in messages}
        if messages:
            self.steps.append(_Join(messages, unpack))

    # --- ops ----------------------------------------------------------------------------------------------

    def _issue(self, op: Op) -> None:
        if isinstance(op, Gemm | Reduce | Barrier) or (isinstance(op, Copy) and not _crosses(op)):
            _, sent = self._needs(op.deps)
            self._join([self.sends[op_id] for op_id in sorted(sent)], unpack=False)
        if isinstance(op, Gemm):
            self.steps.append(self._multiply(op))
            if op.a.box not in self.multiplied:
                self.multiplied.add(op.a.box)
                self.steps.append(_Keep(self.memory.place(op.a), tuple(slice(*edges) for edges in op.a.box)))
        elif isinstance(op, Reduce):
            self.steps.append(_Add(self._sum(op)))
        elif isinstance(op, Barrier):
            self.steps.append(self.barrier)
            self.barriers_passed += 1
        elif isinstance(op, Wait):
            self._wait(op)
        elif isinstance(op, Copy) and not _crosses(op):
            self.steps.append(_Move(self.memory.place(op.src), self.memory.place(op.dst)))
        self.finished.add(op.id)

    def _wait(self, op: Wait) -> None:
        signal = self.signals[op.flag[:2]]
        if op.flag.credit:
            for other in self.ops[self.rank].values():
                if op.id in other.deps and not (_crosses(other) and other.dst.rank == signal.rank):
                    raise PlanError(f"{other.describe()}: only a Copy into rank {signal.rank} can use {op.flag}")
            return
        copies = [copy for copy in self._before(signal) if copy.dst.rank == self.rank]
        if not copies:
            raise PlanError(f"{op.describe()}: its Signal follows no Copy to rank {self.rank}")
        keys = [(copy.rank, copy.id) for copy in copies]
        messages = [self.receives[key] for key in keys if key in self.receives]
        if any(message.number not in self.posted for message in messages):
            raise PlanError(f"{op.describe()}: it waits for a chunk in the round in which the chunk is sent")
        self._join(messages, unpack=True)

    def _before(self, signal: Signal) -> list[Copy]:
        """The Copies to other ranks that a Signal follows."""
        ops = self.ops[signal.rank]
        found: list[Copy] = []
        seen: set[int] = set()
        stack = list(signal.deps)
        while stack:
            op_id = stack.pop()
            if op_id in seen:
                continue
            seen.add(op_id)
            op = ops[op_id]
            if _crosses(op):
                found.append(op)
            stack += op.deps
        return sorted(found, key=lambda copy: copy.id)

    def _sum(self, op: Gemm | Reduce) -> _Sum:
        accumulation = _accumulation(self.plan)
        total = self.memory.temporary("total", box_extents(op.out.box), accumulation, self.largest_out)
        in_place = not op.sources and self.memory.dtype(op.out) == accumulation
        sources = [self.memory.place(source) for source in op.sources]
        c = None if op.c is None else self.memory.place(op.c)
        return _Sum(sources, c, self.memory.place(op.out), total, in_place)

    def _multiply(self, op: Gemm) -> _Multiply:
        dtype = self.plan.problem.dtype
        accumulation = _accumulation(self.plan)
        on_cuda = self.memory.device.type == "cuda"
        factors = TORCH_DTYPES[dtype]
        if factors.itemsize < 4 and not on_cuda:
            factors = accumulation
        elif factors.itemsize == 1:
            factors = torch.bfloat16  # holds all values of float8_e4m3fn
        wide = []
        if factors != TORCH_DTYPES[dtype]:
            wide = [
                self.memory.temporary("a", box_extents(op.a.box), factors, self.largest_a),
                self.memory.temporary("b", box_extents(op.b.box), factors, self.largest_b),
            ]
        precision = None
        if factors == torch.float32:
            precision = "tf32" if dtype == "tfloat32" and on_cuda else "ieee"
        out_dtype = accumulation if factors != accumulation else None
        return _Multiply(self.memory.place(op.a), self.memory.place(op.b), wide, self._sum(op), out_dtype, precision)

    def _check_written(self) -> None:
        """That the ops write all of this rank's D: what they leave out would be whatever the memory held."""
        shard = self.plan.box("D", self.rank)
        boxes = {
            view.box
            for ops in self.ops
            for op in ops.values()
            for view in ((op.dst,) if isinstance(op, Copy) else (op.out,) if isinstance(op, Gemm | Reduce) else ())
            if view.buffer == "D" and view.rank == self.rank
        }
        if not _covers(boxes, shard):
            raise PlanError(f"rank {self.rank}: no op writes some of its shard of D, {shard}")


def _gathers(plan: Plan, rank: int) -> bool:
    """Whether a rank multiplies all of A."""
    p = plan.problem
    boxes = {op.a.box for op in plan.ops(rank) if isinstance(op, Gemm)}
    return _covers(boxes, ((0, p.l), (0, p.m), (0, p.k)))


def _accumulation(plan: Plan) -> torch.dtype:
    return torch.float64 if plan.problem.dtype == "float64" else torch.float32


def _crosses(op: Op) -> TypeGuard[Copy]:
    return isinstance(op, Copy) and op.src.rank != op.dst.rank


def _is_credit(op: Op) -> bool:
    return isinstance(op, Wait) and op.flag.credit


def _covers(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether boxes together make up a whole box."""
    boxes = list(boxes)
    cells: list[list[tuple[int, int]]] = []
    for mode in range(3):
        edges = {edge for box in (*boxes, whole) for edge in box[mode] if whole[mode][0] <= edge <= whole[mode][1]}
        cells.append(list(pairwise(sorted(edges))))
    return all(
        any(contains(box, (batch, rows, columns)) for box in boxes)
        for batch in cells[0]
        for rows in cells[1]
        for columns in cells[2]
    )
