"""The reference runtime: all ranks in one process, in float64, in any legal order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgemm.arguments import finite, instance, integer, member, wrong
from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Reduce, Signal, View, Wait, box_extents
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.scaling import SCALE_OPERANDS

__all__ = ["ORDERS", "run_reference"]

ORDERS = ("random", "issue")
MAX_REPLAYS = 2**16

Array = NDArray[np.float64]

NAMES = {
    "A": "a_shards",
    "B": "b_shards",
    "C": "c_shards",
    "SFA": "scale_a_shards",
    "SFB": "scale_b_shards",
}
"""The arguments that have the shards of operands."""


def run_reference(
    plan: Plan,
    a_shards: Sequence[Any],
    b_shards: Sequence[Any],
    c_shards: Sequence[Any] | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    order: str = "random",
    seed: int = 0,
    replays: int = 1,
    scale_a_shards: Sequence[Any] | None = None,
    scale_b_shards: Sequence[Any] | None = None,
    row_groups: Sequence[int] | None = None,
) -> list[Array]:
    """Execute a plan's ops for all ranks, and return the shard of D of each.

    a_shards, b_shards, c_shards: an array for each rank, of the shape ``plan.shard_shape("A", rank)`` and so
        on; not modified. C is read only where beta is not 0
    order:   "random": one of the legal orders, drawn by ``seed``; "issue": every rank its ops in their order
    replays: executes the plan this many times on the same workspace. All but the last run on other inputs
        (multiples of those given), so that a result made of leftovers would be wrong

    scale_a_shards, scale_b_shards: with ``plan.problem.scaling``, the scales of A and B: an array for each rank, of
             the shape ``plan.shard_shape("SFA", rank)`` and "SFB"; swizzled scales as they lie in memory

    row_groups: with ``plan.problem.groups`` > 1, the group of each of the m rows of A: row i of D is row i of A
             times ``B[row_groups[i]].T``. The plan is the same for all of them

    Everything is added in float64 and nothing is rounded in between. The workspace and D hold NaN before the
    first replay, D before every replay. The program it stands for is ``D = alpha * A @ B.T + beta * C`` on the
    whole matrices, with A and B multiplied by their scales. Elements and scales are numbers, whatever type the plan
    has; elements of "float4_e2m1fn_x2" are pairs, so they are refused.

    Raises ValueError for arguments of another type and for shards of the wrong number or shape, and PlanError where
    the plan blocks or refers to what does not exist.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    alpha, beta = finite("alpha", alpha), finite("beta", beta)
    member("order", order, ORDERS)
    seed, replays = integer("seed", seed, 0), integer("replays", replays, 1, MAX_REPLAYS)
    if beta != 0 and c_shards is None:
        raise ValueError(f"beta is {beta}, which needs c_shards")
    inputs = {"A": _shards(plan, "A", a_shards), "B": _shards(plan, "B", b_shards)}
    if c_shards is not None:
        inputs["C"] = _shards(plan, "C", c_shards)
    if plan.problem.dtype == "float4_e2m1fn_x2":
        raise ValueError("no runtime multiplies float4_e2m1fn_x2: its plans can be made, proved and simulated")
    for operand, given in zip(SCALE_OPERANDS.values(), (scale_a_shards, scale_b_shards), strict=True):
        if (given is None) != (plan.problem.scaling is None):
            wanted = "given with a scaling of the problem" if given is None else "None for a problem without scaling"
            raise wrong(NAMES[operand], wanted, given)
        if given is not None:
            inputs[operand] = _shards(plan, operand, given)
    machine = RankMemories(plan, inputs, alpha, beta, replays, _groups(plan, row_groups))
    machine.run(random.Random(seed) if order == "random" else None)
    return [d.reshape(plan.shard_shape("D", rank)) for rank, d in enumerate(machine.d)]


def _groups(plan: Plan, given: Sequence[int] | None) -> NDArray[np.int64] | None:
    """The group of each row of A; None: the problem has no groups."""
    p = plan.problem
    if p.groups == 1:
        if given is not None:
            raise wrong("row_groups", "None for a problem without groups", given)
        return None
    found = np.asarray(given)
    if found.shape != (p.m,) or found.dtype.kind not in "iu" or not ((found >= 0) & (found < p.groups)).all():
        raise wrong("row_groups", f"{p.m} integers from 0 to {p.groups - 1}, the group of each row of A", given)
    return found


def _shards(plan: Plan, operand: str, given: Sequence[Any]) -> list[Array]:
    name = NAMES[operand]
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != plan.world_size:
        raise wrong(name, f"a sequence of {plan.world_size} arrays, the shard of {operand} of each rank", given)
    result: list[Array] = []
    for rank, shard in enumerate(given):
        shape = plan.shard_shape(operand, rank)
        array = np.asarray(shard)
        if array.shape != shape or array.dtype.kind not in "fiub":
            raise wrong(f"{name}[{rank}]", f"an array of real numbers of shape {shape}", shard)
        result.append(array.astype(np.float64).reshape(box_extents(plan.box(operand, rank))))
    return result


class _Rank:
    """How far a rank has come in its current replay."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = {op.id: op for op in ops}
        self.dependents: dict[int, list[int]] = defaultdict(list)
        for op in ops:
            for dep in op.deps:
                if dep not in self.ops:
                    raise PlanError(f"{op.describe()}: depends on op {dep}, which does not exist")
                self.dependents[dep].append(op.id)
        self.replay = -1
        self.begin()

    def begin(self) -> None:
        self.replay += 1
        self.missing = {op.id: len(op.deps) for op in self.ops.values()}
        self.ready = [op_id for op_id, count in self.missing.items() if count == 0]
        self.left = len(self.ops)

    def finish(self, op_id: int) -> None:
        self.left -= 1
        for dependent in self.dependents[op_id]:
            self.missing[dependent] -= 1
            if self.missing[dependent] == 0:
                self.ready.append(dependent)


class RankMemories:
    def __init__(
        self,
        plan: Plan,
        inputs: dict[str, list[Array]],
        alpha: float,
        beta: float,
        replays: int,
        row_groups: NDArray[np.int64] | None = None,
    ) -> None:
        self.plan, self.row_groups = plan, row_groups
        self.inputs = inputs
        self.alpha, self.beta, self.replays = alpha, beta, replays
        self.ranks = [_Rank(plan.ops(rank)) for rank in range(plan.world_size)]
        self.slots = [[np.full(slot.elements, np.nan) for slot in slots] for slots in plan.slots]
        self.d = [self._fresh(rank) for rank in range(plan.world_size)]
        self.flags = {
            op.flag[:2]: op.flag.initial for ops in plan.rank_ops for op in ops if isinstance(op, (Signal, Wait))
        }
        self.at_barrier: dict[tuple[int, int], set[int]] = defaultdict(set)

    def _fresh(self, rank: int) -> Array:
        return np.full(box_extents(self.plan.box("D", rank)), np.nan)

    def run(self, rng: random.Random | None) -> None:
        """Execute ops until every rank has done all its replays; ``rng`` None: each rank's ops in their order."""
        while True:
            for rank, state in enumerate(self.ranks):
                if not state.left and state.replay + 1 < self.replays:
                    state.begin()
                    self.d[rank] = self._fresh(rank)
            startable = [(rank, op) for rank, state in enumerate(self.ranks) for op in self._startable(state, rng)]
            if not startable:
                break
            rank, op = rng.choice(startable) if rng else startable[0]
            self._execute(rank, op)
        blocked = [state for state in self.ranks if state.left]
        if blocked:
            heads = [state.ops[min(state.ready)].describe() for state in blocked if state.ready]
            raise PlanError(f"deadlock: {'; '.join(heads[:4]) or 'no op can start'}")

    def _startable(self, state: _Rank, rng: random.Random | None) -> list[Op]:
        ops = [state.ops[op_id] for op_id in (state.ready if rng else sorted(state.ready)[:1])]
        return [op for op in ops if not isinstance(op, (Wait, Barrier)) or self._may_start(op, state)]

    def _may_start(self, op: Wait | Barrier, state: _Rank) -> bool:
        if isinstance(op, Wait):
            return self.flags[op.flag[:2]] == 1
        arrived = self.at_barrier[state.replay, op.round]
        arrived.add(op.rank)
        return len(arrived) == self.plan.world_size

    def _execute(self, rank: int, op: Op) -> None:
        if isinstance(op, Gemm):
            a, b = self._operand("A", op.a, op.scale_a), self._operand("B", op.b, op.scale_b)
            if self.row_groups is None:
                product = np.einsum("lmk,lnk->lmn", a, b)
            else:
                product = np.einsum("lmk,mnk->lmn", a, b[self.row_groups[slice(*op.a.box[1])]])
            self._write(op.out, self._sum(op, self.alpha * product))
        elif isinstance(op, Reduce):
            self._write(op.out, self._sum(op, np.zeros(box_extents(op.out.box))))
        elif isinstance(op, Copy):
            self._write(op.dst, self._read(op.src).copy())
        elif isinstance(op, Signal):
            if self.flags[op.flag[:2]]:
                raise PlanError(f"{op.describe()}: the flag is set already, a signal would be lost")
            self.flags[op.flag[:2]] = 1
        elif isinstance(op, Wait):
            self.flags[op.flag[:2]] = 0
        self.ranks[rank].ready.remove(op.id)
        self.ranks[rank].finish(op.id)

    def _operand(self, operand: str, view: View, scales: View | None) -> Array:
        """A tile of A or B, multiplied by its scales."""
        tile, scaling = self._read(view), self.plan.problem.scaling
        if scales is None or scaling is None:
            return tile
        factors: Array = scaling[operand].expand(self._read(scales), *tile.shape[1:])
        return tile * factors

    def _sum(self, op: Gemm | Reduce, result: Array) -> Array:
        for source in op.sources:
            result = result + self._read(source)
        if op.c is not None and self.beta != 0:
            result = result + self.beta * self._read(op.c)
        return result

    def _read(self, view: View) -> Array:
        if view.buffer in self.inputs:
            # Earlier replays of the rank see other inputs.
            later = self.replays - 1 - self.ranks[view.rank].replay
            array = self.inputs[view.buffer][view.rank][view.slices()]
            return array if later == 0 else array * -(later + 1.0)
        return self._memory(view)[view.slices()]

    def _write(self, view: View, value: Array) -> None:
        self._memory(view)[view.slices()] = value

    def _memory(self, view: View) -> Array:
        if view.buffer == "D":
            return self.d[view.rank]
        batches, rows, _ = box_extents(view.frame)
        return self.slots[view.rank][view.slot][: view.elements].reshape(batches, rows, view.pitch)
