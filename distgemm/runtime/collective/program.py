"""The program of the collective runtime: a rank's ops as steps, and copies between ranks as messages.

Flags become messages. A posted receive is the credit, and its completion is the arrival. Of the ops that only
synchronise, just the Waits for arrivals and the Barriers do anything here. See ``docs/collective.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeGuard

import torch

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
    accesses,
    box_size,
    contains,
    overlaps,
)
from distgemm.plan.plan import Plan, PlanError, once_for_structure
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.plan.validate import validate
from distgemm.runtime.checks import TORCH_DTYPES, gathered_box
from distgemm.runtime.collective.memory import Place, ScratchName, Step
from distgemm.runtime.collective.steps import (
    Add,
    Float32Precision,
    Join,
    KeepTile,
    Message,
    Move,
    Multiply,
    Post,
    Sum,
    TileScales,
)

__all__ = ["Program", "brings_a"]


Where = tuple[str, int]
"""Memory of this rank: a view's buffer and slot."""
INPUTS = ("A", "B", "C", *SCALE_OPERANDS.values())


@dataclass(frozen=True)
class Program:
    """What a rank does in a call. All plans of one structure have the same program.

    Attributes:
        steps: in order. Their ops and views are those of the plan's structure.
        ops: the op that each step executes, or comes before.
        messages: number of messages that it sends and receives.
    """

    steps: Sequence[Step]
    ops: Sequence[Op | None]
    messages: int

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device, barrier: Step) -> Program:
        """The program of a rank.

        Args:
            plan: of all ranks.
            rank: this rank.
            device: where shards and workspace lie.
            barrier: the step for a Barrier.

        Raises:
            PlanError: for ops that cannot be executed with messages, or that do not write all of D.
        """
        return _program(plan, rank, device, barrier)


@once_for_structure
def _program(plan: Plan, rank: int, device: torch.device, barrier: Step) -> Program:
    return _Compiler(plan, rank, device, barrier).compile()


@once_for_structure
def brings_a(plan: Plan, rank: int) -> bool:
    """Whether a rank multiplies :func:`distgemm.runtime.checks.gathered_box` of A."""
    boxes = {op.a.box for op in plan.ops(rank) if isinstance(op, Gemm)}
    return _covers(boxes, gathered_box(plan, rank))


@dataclass(slots=True, eq=False)
class _Round:
    """The messages of one round, and what must be done before they are posted.

    Attributes:
        messages: of this rank.
        finished: ids of this rank's ops that must be finished.
        sent: ids of this rank's Copies that must have left completely.
    """

    messages: list[Message] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)


class _Compiler:
    """Makes the steps of one rank. It looks at all ranks' ops for the messages that come in."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, barrier: Step) -> None:
        self.plan, self.rank, self.device, self.barrier = plan, rank, device, barrier
        index = validate(plan)
        self.ops, self.signals = index.ops, index.signals
        self.steps: list[Step] = []
        self.step_ops: list[Op | None] = []  # the op of each step
        self.current: Op | None = None
        self.finished: set[int] = set()
        self.posted: set[int] = set()  # numbers of messages
        self.joined: set[int] = set()
        self.in_flight: dict[Where, list[Message]] = defaultdict(list)  # posted and not joined, by their memory
        self.to_receive: dict[Where, list[Message]] = defaultdict(list)  # not posted
        self.multiplied: set[Box] = set()  # boxes of A
        self.barriers_passed = 0
        self.barriers = sorted(index.barriers)
        self.sends: dict[int, Message] = {}  # by the id of the Copy
        self.receives: dict[tuple[int, int], Message] = {}  # by the rank and id of the Copy
        self.rounds = self._rounds()

    def compile(self) -> Program:
        waiting = sorted(self.rounds)
        for op in self.plan.ops(self.rank):
            self.current = op
            self._post(waiting, op)
            self._issue(op)
        self._post(waiting, None)
        self._check_written()
        # When a call returns, it reads the caller's tensors no longer, and has no message left over.
        messages = [*self.sends.values(), *self.receives.values()]
        self._join([message for message in messages if message.number not in self.joined], unpack=False)
        return Program(tuple(self.steps), tuple(self.step_ops), len(messages))

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self.step_ops.append(self.current)

    # --- messages -----------------------------------------------------------------------------------------

    def _rounds(self) -> dict[int, _Round]:
        rounds: dict[int, _Round] = defaultdict(_Round)
        copies = [op for ops in self.ops for op in ops.values() if _crosses(op) and box_size(op.src.box)]
        for number, copy in enumerate(copies):
            if copy.rank == self.rank:
                self.sends[copy.id] = self._message(copy, number, sends=True)
                rounds[copy.round].messages.append(self.sends[copy.id])
            elif copy.dst.rank == self.rank:
                self.receives[copy.rank, copy.id] = self._message(copy, number, sends=False)
                rounds[copy.round].messages.append(self.receives[copy.rank, copy.id])
        for message in self.receives.values():
            self.to_receive[_where(message.view)].append(message)
        for each in rounds.values():
            for message in each.messages:
                self._need(each, message.copy.deps if message.sends else self._credits(message.copy))
        return rounds

    def _dtype(self, view: View) -> torch.dtype:
        """The dtype of a view, on any rank."""
        return TORCH_DTYPES[self.plan.dtype(view)]

    def _message(self, op: Copy, number: int, sends: bool) -> Message:
        view, peer = (op.src, op.dst.rank) if sends else (op.dst, op.src.rank)
        work = len(self.sends) + len(self.receives)
        return Message(number, work, op, sends, peer, _place(view), self._dtype(view))

    def _credits(self, copy: Copy) -> set[int]:
        """Ids of the last ops of this rank that happen before a Copy into its memory, in the same replay."""
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

    def _need(self, of_round: _Round, ids: Iterable[int]) -> None:
        finished, sent = self._needs(ids)
        # The receiver's credit is the receive that it posts.
        of_round.finished |= {op_id for op_id in finished if not _is_credit(self.ops[self.rank][op_id])}
        of_round.sent |= sent

    def _post(self, waiting: list[int], before: Op | None) -> None:
        """Post the rounds that can be posted.

        A round is posted as soon as it needs to wait for nothing, at the latest after the ops of its round. Rounds
        ascend on all ranks, so no round waits for a later one.
        """
        while waiting:
            number = waiting[0]
            current = self.rounds[number]
            last_chance = before is None or before.round > number
            passed = self.barriers_passed == sum(barrier <= number for barrier in self.barriers)
            ready = passed and current.finished <= self.finished
            left = [self.sends[op_id] for op_id in sorted(current.sent) if self.sends[op_id].number not in self.joined]
            # Flags may order a message after another one, without a dependency on this rank.
            left += [
                each for message in current.messages for each in self._conflicting(message.view, not message.sends)
            ]
            if not ready or left:
                if not last_chance:
                    return
                if not ready or any(message.number not in self.posted for message in left):
                    first = min(current.messages, key=lambda message: message.number).copy
                    raise PlanError(f"{first.describe()}: a message of round {number} needs what comes after it")
                self._join([message for message in left if message.sends], unpack=False)
                self._join([message for message in left if not message.sends], unpack=True)
            waiting.pop(0)
            current.messages.sort(key=lambda message: message.number)
            self._add(Post(current.messages))
            for message in current.messages:
                self.posted.add(message.number)
                self.in_flight[_where(message.view)].append(message)
                if not message.sends:
                    self.to_receive[_where(message.view)].remove(message)

    def _conflicting(self, view: View, writes: bool) -> list[Message]:
        """The messages in flight whose memory ``view`` shares, if one of the two accesses is a write."""
        if view.buffer in INPUTS:
            return []
        in_flight = self.in_flight[_where(view)]
        return [each for each in in_flight if (writes or not each.sends) and _shares(view, each.view)]

    def _settle(self, op: Op) -> None:
        """Join the messages that an op's memory waits for, although the op itself depends on no Wait for them.

        A plan may order an op after an arrival by other means than the arrival's flag: a credit, which says that the
        other rank has gone on, or a Barrier. Flags are messages here, so only the message itself orders the op.
        """
        reads, write = accesses(op)
        views = [(view, False) for view in reads] + ([] if write is None else [(write, True)])
        for view, writes in views:
            for late in self.to_receive[_where(view)]:
                # Rounds ascend, so a message of a later round comes after the op.
                passed = self.barriers_passed >= sum(barrier <= late.copy.round for barrier in self.barriers)
                if late.copy.round <= op.round and passed and _shares(view, late.view):
                    raise PlanError(f"{op.describe()}: touches {view} in the round in which {late.copy} brings it")
            found = self._conflicting(view, writes)
            self._join([message for message in found if message.sends], unpack=False)
            self._join([message for message in found if not message.sends], unpack=True)

    def _join(self, messages: Sequence[Message], unpack: bool) -> None:
        # A second wait for one message would block.
        messages = [message for message in dict.fromkeys(messages) if message.number not in self.joined]
        for message in messages:
            self.joined.add(message.number)
            if message.number in self.posted:
                self.in_flight[_where(message.view)].remove(message)
        if messages:
            self._add(Join(messages, unpack))

    # --- ops ----------------------------------------------------------------------------------------------

    def _issue(self, op: Op) -> None:
        if isinstance(op, Gemm | Reduce | Barrier) or (isinstance(op, Copy) and not _crosses(op)):
            _, sent = self._needs(op.deps)
            self._join([self.sends[op_id] for op_id in sorted(sent)], unpack=False)
            self._settle(op)
        if isinstance(op, Gemm):
            self._add(self._multiply(op))
            if op.a.box not in self.multiplied:
                self.multiplied.add(op.a.box)
                self._add(KeepTile(_place(op.a), op.a))
        elif isinstance(op, Reduce):
            self._add(Add(self._sum(op)))
        elif isinstance(op, Barrier):
            self._add(self.barrier)
            self.barriers_passed += 1
        elif isinstance(op, Wait):
            self._wait(op)
        elif isinstance(op, Copy) and not _crosses(op):
            self._add(Move(_place(op.src), _place(op.dst)))
        self.finished.add(op.id)

    def _wait(self, op: Wait) -> None:
        signal = self.signals[op.flag[:2]]
        if op.flag.credit:
            for other in self.ops[self.rank].values():
                if op.id in other.deps and not (_crosses(other) and other.dst.rank == signal.rank):
                    raise PlanError(f"{other.describe()}: only a Copy into rank {signal.rank} can use {op.flag}")
            return
        copies = [copy for copy in self._copies_before(signal) if copy.dst.rank == self.rank]
        if not copies:
            raise PlanError(f"{op.describe()}: its Signal follows no Copy to rank {self.rank}")
        keys = [(copy.rank, copy.id) for copy in copies]
        messages = [self.receives[key] for key in keys if key in self.receives]
        if any(message.number not in self.posted for message in messages):
            raise PlanError(f"{op.describe()}: it waits for a chunk in the round in which the chunk is sent")
        self._join(messages, unpack=True)

    def _copies_before(self, signal: Signal) -> list[Copy]:
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

    def _sum(self, op: Gemm | Reduce) -> Sum:
        accumulation = _accumulation(self.plan)
        total = _scratch("total", op.out, accumulation)
        in_place = not op.sources and self._dtype(op.out) == accumulation
        sources = [_place(source) for source in op.sources]
        c = None if op.c is None else _place(op.c)
        bias_columns = slice(0) if op.c is None else op.c.slices()[2]
        return Sum(sources, c, bias_columns, _place(op.out), total, in_place)

    def _multiply(self, op: Gemm) -> Multiply:
        problem = self.plan.problem
        dtype = problem.dtype
        accumulation = _accumulation(self.plan)
        on_cuda = self.device.type == "cuda"
        factors = TORCH_DTYPES[dtype]
        if problem.scaling is not None or (factors.itemsize < 4 and not on_cuda):
            factors = accumulation
        elif factors.itemsize == 1:
            factors = torch.bfloat16  # holds all values of fp8
        converted = []
        if factors != TORCH_DTYPES[dtype]:
            converted = [_scratch("a", op.a, factors), _scratch("b", op.b, factors)]
        precision: Float32Precision | None = None
        if factors == torch.float32:
            precision = "tf32" if dtype == "tfloat32" and on_cuda else "ieee"
        out_dtype = accumulation if factors != accumulation else None
        scales = []
        if problem.scaling is not None:
            scales = [
                TileScales(_place(view), problem.scaling[operand])
                for view, operand in zip(op.scales, SCALE_OPERANDS, strict=True)
            ]
        return Multiply(_place(op.a), _place(op.b), converted, scales, self._sum(op), out_dtype, precision)

    def _check_written(self) -> None:
        """Check that the ops write all of this rank's D: the rest of a new D would be whatever its memory held."""
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


def _place(view: View) -> Place:
    """Where a view lies."""
    return lambda call: call.memory.tensor(view, call.shards)


def _scratch(name: ScratchName, view: View, dtype: torch.dtype) -> Place:
    """Scratch memory for the box of a view."""
    return lambda call: call.memory.scratch(name, view, dtype)


def _accumulation(plan: Plan) -> torch.dtype:
    return torch.float64 if plan.problem.dtype == "float64" else torch.float32


def _crosses(op: Op) -> TypeGuard[Copy]:
    return isinstance(op, Copy) and op.src.rank != op.dst.rank


def _where(view: View) -> Where:
    return view.buffer, view.slot


def _shares(view: View, other: View) -> bool:
    """Whether two views of one slot or shard share memory. With other frames, their elements are anywhere in it."""
    return view.frame != other.frame or overlaps(view.box, other.box)


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
