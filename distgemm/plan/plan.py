"""Plan: what all ranks will do for one problem under one schedule. Immutable, hashable, made from metadata."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

from distgemm.plan import ops as _ops
from distgemm.plan.ops import Box, Flag, Op, Slot, View, accesses, box_extents, box_size, link_of
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.schedulers import TileCoord

__all__ = [
    "ROW_ALIGNMENT",
    "SLOT_ALIGNMENT",
    "STORED_ALIGNMENT",
    "Mechanism",
    "Plan",
    "PlanError",
    "SyncMode",
    "WorkspaceMode",
    "collector_paused",
    "slot_pitch",
]

WorkspaceMode = Literal["full", "bounded"]
SyncMode = Literal["credit", "barrier"]
Mechanism = Literal["push", "pull", "store"]

SLOT_ALIGNMENT = 256
"""Slots start at, and take up, multiples of this many bytes."""

STORED_ALIGNMENT = 1 << 16
"""The same, where GEMMs store at several peers. To TMA that is one tensor, whose batches are multiples of a distance
apart, fewer than 2**31 of them, and memories of peers may be 2**47 bytes apart."""

ROW_ALIGNMENT = 16
"""Rows in slots start at multiples of this many bytes: TMA, by which kernels load and store, demands it."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector: it would go through the ops of a large plan again and again.

    What was made meanwhile counts as old, as if it had been gone through: nothing of it is garbage.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # Moves everything to the oldest generation.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def slot_pitch(columns: int, dtype: str) -> int:
    """Elements from row to row of a tile that rests in a slot: its columns, rounded up to ROW_ALIGNMENT."""
    size = DTYPE_BYTES[dtype]
    return -(-columns * size // ROW_ALIGNMENT) * ROW_ALIGNMENT // size


class PlanError(Exception):
    """A plan that does not compute its product; the message names rank, iteration and op, or what no op does."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ops of every rank, and what they refer to. Made by :func:`distgemm.make_plan`.

    Attributes:
        problem: the product.
        schedule: the schedule's name.
        mesh: arrangement of the ranks.
        workspace, sync, mechanism: as given to :func:`distgemm.make_plan`.
        iterations: local GEMMs of each rank.
        edges: for each of m, n, k, l the bounds of the work tiles: tile t is edges[t]:edges[t+1].
        shards: the box of each rank, for "A", "B" and "D".
        rank_ops: the ops of each rank, in an order in which they can be issued one by one.
        slots: the workspace of each rank.
    """

    problem: GemmProblem
    schedule: str
    mesh: tuple[int, ...]
    workspace: WorkspaceMode
    sync: SyncMode
    mechanism: Mechanism
    iterations: int
    edges: tuple[tuple[int, ...], ...]
    shards: tuple[tuple[Box, ...], tuple[Box, ...], tuple[Box, ...]]
    rank_ops: tuple[tuple[Op, ...], ...]
    slots: tuple[tuple[Slot, ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.problem, self.schedule, self.mesh, self.workspace, self.sync, self.mechanism, self.rank_ops))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.rank_ops)

    @property
    def grid(self) -> TileCoord:
        """Number of work tiles in each mode."""
        return TileCoord(*(len(edges) - 1 for edges in self.edges))

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1}")
        return rank

    def ops(self, rank: int) -> tuple[Op, ...]:
        """The ops of a rank."""
        return self.rank_ops[self._rank(rank)]

    def replace_ops(self, rank: int, ops: Sequence[Op]) -> Plan:
        """A new plan in which ``rank`` does these ops instead; for tests and tools. Nothing is checked."""
        changed = list(self.rank_ops)
        changed[self._rank(rank)] = tuple(ops)
        return dataclasses.replace(self, rank_ops=tuple(changed))

    def box(self, operand: str, rank: int) -> Box:
        """A rank's shard of "A", "B" or "D" (and "C", as "D") in global coordinates (l, rows, columns)."""
        if operand not in ("A", "B", "C", "D"):
            raise ValueError(f"operand {operand!r} is none of 'A', 'B', 'C', 'D'")
        return self.shards[{"A": 0, "B": 1}.get(operand, 2)][self._rank(rank)]

    def shard(self, operand: str, rank: int) -> tuple[slice, ...]:
        """The slices of the global array that a rank holds: A (m, k), B (n, k), D and C (m, n); with l > 1, l first."""
        slices = tuple(slice(start, stop) for start, stop in self.box(operand, rank))
        return slices if self.problem.l > 1 else slices[1:]

    def shard_shape(self, operand: str, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard, laid out as :meth:`shard`."""
        shape = box_extents(self.box(operand, rank))
        return shape if self.problem.l > 1 else shape[1:]

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Payload bytes sent over each link (src, dst) in one replay; links that carry nothing are absent."""
        found: Counter[tuple[int, int]] = Counter()
        for link, view in self._transfers:
            found[link] += box_size(view.box) * DTYPE_BYTES[self.dtype(view)]
        return {link: size for link, size in sorted(found.items()) if size}

    @cached_property
    def _transfers(self) -> tuple[tuple[tuple[int, int], View], ...]:
        """(src, dst) and what is written, for all that goes from rank to rank."""
        every = ((link_of(op), accesses(op)[1]) for ops in self.rank_ops for op in ops)
        return tuple((link, view) for link, view in every if link is not None and view is not None)

    def dtype(self, view: View) -> str:
        """The element type of the memory in which a view lies."""
        if view.buffer == "slot":
            return self.slots[view.rank][view.slot].dtype
        return self.problem.dtype if view.buffer in ("A", "B") else str(self.problem.out_dtype)

    def workspace_bytes(self, rank: int) -> int:
        """Symmetric workspace of a rank with alignment, without signals and kernel scratch."""
        return sum(slot.bytes for slot in self.slots[self._rank(rank)])

    @cached_property
    def padded_rows(self) -> tuple[tuple[int, int], ...]:
        """Tiles that rest in slots with padding between their rows: (columns, elements from row to row)."""
        # What rests in a slot was written there.
        written = (view for ops in self.rank_ops for op in ops if (view := accesses(op)[1]) and view.buffer == "slot")
        found = {(box_extents(view.frame)[2], view.pitch) for view in written}
        return tuple(sorted(rows for rows in found if rows[0] != rows[1]))

    def verify(self) -> None:
        """Prove the plan over all ranks and all replays; raises :class:`PlanError` where it fails."""
        from distgemm.plan.verify import verify

        verify(self)

    @cached_property
    def digest(self) -> str:
        """A hash that is the same for equal plans in every process, for ranks to agree on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` reads it back."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "rank_ops"
        }
        fields["problem"] = dataclasses.asdict(self.problem)
        fields["rank_ops"] = [[_to_dict(op) for op in ops] for ops in self.rank_ops]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        fields = json.loads(text)
        problem = fields.pop("problem")
        ranks = fields.pop("rank_ops")
        slots = fields.pop("slots")
        return cls(
            problem=GemmProblem(**problem),
            rank_ops=tuple(tuple(_from_dict(op) for op in ops) for ops in ranks),
            slots=tuple(tuple(Slot(*slot) for slot in of_rank) for of_rank in slots),
            **{name: _tuples(value) for name, value in fields.items()},
        )


def _to_dict(op: Op) -> dict[str, Any]:
    # Named tuples become lists; what they are is known from the op's class.
    return {"kind": op.kind, **{field.name: getattr(op, field.name) for field in dataclasses.fields(op)}}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _view(value: Any) -> View:
    return View(*_tuples(value))


_READ: dict[str, Callable[[Any], Any]] = {
    "src": _view,
    "dst": _view,
    "a": _view,
    "b": _view,
    "out": _view,
    "c": lambda value: None if value is None else _view(value),
    "sources": lambda value: tuple(map(_view, value)),
    "flag": lambda value: Flag(*value),
}
"""How the fields of an op are read back; all others are numbers, strings and tuples of them."""


def _from_dict(fields: dict[str, Any]) -> Op:
    kind = getattr(_ops, fields["kind"])
    values = {name: _READ.get(name, _tuples)(value) for name, value in fields.items() if name != "kind"}
    if kind is _ops.Gemm:
        values["tile"] = TileCoord(*values["tile"])
    op: Op = kind(**values)
    return op
