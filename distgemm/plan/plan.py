"""Plan: the ops of all ranks for one problem under one schedule. It is immutable and hashable, and contains no data."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from distgemm.arguments import instance, integer, json_value, member, sequence
from distgemm.plan.ops import (
    Box,
    Gemm,
    Op,
    Reduce,
    Signal,
    Slot,
    View,
    Wait,
    accesses,
    box_extents,
    box_size,
    link_of,
)
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.plan.resize import RankSize, ResizedOps, fixed_views, size_of_rank
from distgemm.plan.scaling import SCALE_OPERANDS, Scaling
from distgemm.plan.schema import Mechanism, PlanError, SyncMode, WorkspaceMode, check_types, read_fields
from distgemm.schedulers import TileCoord

__all__ = [
    "LINK_KINDS",
    "ROW_ALIGNMENT",
    "SLOT_ALIGNMENT",
    "LinkKind",
    "Mechanism",
    "Plan",
    "PlanError",
    "SyncMode",
    "WorkspaceMode",
    "collector_paused",
    "once_for_structure",
    "slot_pitch",
]

SLOT_ALIGNMENT = 256
"""Alignment of the offset and the size of slots in bytes."""

LinkKind = Literal["inside", "across"]
LINK_KINDS: tuple[LinkKind, ...] = get_args(LinkKind)
"""Kinds of links: within a host, whose ranks share memory, and across hosts."""

ROW_ALIGNMENT = 16
"""Alignment of rows in slots in bytes. Kernels load and store with TMA, which requires it."""


MANY_OBJECTS = 50_000
"""Objects of a large plan: the collector takes tens of milliseconds to scan so many."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context in which Python's cyclic garbage collector is off.

    The collector would otherwise scan the ops of a large plan many times. If many objects were made, all objects move
    to the oldest generation at the end, so that the collector does not scan them soon. Otherwise they stay: what of
    them is garbage, such as graphs of the caller, would be collected much later, perhaps while a stream is captured.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY_OBJECTS and not gc.get_freeze_count():
            # These two calls move all objects to the oldest generation.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def slot_pitch(columns: int, dtype: str) -> int:
    """The distance between rows of a tile in a slot, in elements.

    Args:
        columns: number of columns of the tile.
        dtype: element type, a key of ``DTYPE_BYTES``.

    Returns:
        The columns, rounded up so that each row starts at a multiple of ROW_ALIGNMENT bytes.
    """
    size = DTYPE_BYTES[dtype]
    return -(-columns * size // ROW_ALIGNMENT) * ROW_ALIGNMENT // size


Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


def once_for_structure(
    find: Callable[Concatenate[Plan, Arguments], Found],
) -> Callable[Concatenate[Plan, Arguments], Found]:
    """A function of a plan whose result does not depend on rows, which is found once for each :attr:`Plan.structure`.

    Args:
        find: the function. It is called with the structure. Its further arguments are hashable.
    """

    @wraps(find)
    def found(plan: Plan, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        results = vars(plan.structure).setdefault("_found", {})
        key = (find, args, tuple(kwargs.items()))
        if key not in results:
            results[key] = find(plan.structure, *args, **kwargs)
        result: Found = results[key]
        return result

    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ops of every rank for one product, and the memory that they use. :func:`distgemm.make_plan` makes it.

    Attributes:
        problem: the product.
        schedule: name of the schedule.
        mesh: arrangement of the ranks.
        workspace: as given to :func:`distgemm.make_plan`.
        sync: as given to :func:`distgemm.make_plan`.
        mechanism: as given to :func:`distgemm.make_plan`.
        iterations: number of iterations of each rank.
        edges: bounds of the work tiles in the modes m, n, k and l. Tile t of a mode lies between
            its bounds t and t + 1.
        shards: the boxes of A, B and D that each rank holds: ``shards[operand][rank]``.
        rank_ops: the ops of each rank, in an order in which the rank can issue them one by one.
        slots: the slots of each rank's workspace.
        scale_shards: the boxes of SFA and SFB, the scales, that each rank holds: ``scale_shards[operand][rank]``. None
            for a problem without scaling.
        ranks_per_host: the number of ranks that share memory, which follow one another. Links between others go across
            hosts. None: all ranks share memory.
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
    rank_ops: Sequence[tuple[Op, ...]]
    slots: Sequence[tuple[Slot, ...]]
    scale_shards: tuple[tuple[Box, ...], tuple[Box, ...]] | None = None
    ranks_per_host: int | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Without the ops: plans with other ops but all else equal are rare, and ops may not be made yet.
        return hash(
            (
                *(self.problem, self.schedule, self.mesh, self.ranks_per_host),
                *(self.workspace, self.sync, self.mechanism, self.iterations),
            )
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.rank_ops)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def structure(self) -> Plan:
        """A plan that differs from this one in rows of A and D, and in offsets and sizes of slots, and in nothing else.

        :func:`distgemm.make_plan` derives one plan of a structure, and gives it the rows of others. What does not
        depend on rows can be found once for a structure. A plan that was made in another way is its own structure.
        """
        found: Plan = vars(self).get("_structure", self)
        return found

    def own_view(self, view: View) -> View:
        """The view of this plan for a view of its structure.

        Args:
            view: a view of an op of :attr:`structure`, the object itself.
        """
        return self.rank_ops.view(view) if isinstance(self.rank_ops, ResizedOps) else view

    @property
    def grid(self) -> TileCoord:
        """Number of work tiles in each mode."""
        return TileCoord(*(len(edges) - 1 for edges in self.edges))

    def _rank(self, rank: int) -> int:
        return integer("rank", rank, 0, self.world_size - 1)

    def ops(self, rank: int) -> tuple[Op, ...]:
        """The ops of a rank, in an order in which it can issue them one by one.

        Args:
            rank: 0 to world_size - 1.

        Raises:
            ValueError: if there is no such rank.
        """
        return self.rank_ops[self._rank(rank)]

    def replace_ops(self, rank: int, ops: Sequence[Op]) -> Plan:
        """A new plan in which a rank has other ops, for tests and tools. The ops are not checked.

        Args:
            rank: 0 to world_size - 1.
            ops: all ops of the rank in the new plan.

        Raises:
            ValueError: if there is no such rank.
        """
        changed = list(self.rank_ops)
        changed[self._rank(rank)] = sequence("ops", ops, lambda _, op: op, "a sequence of ops")
        return dataclasses.replace(self, rank_ops=tuple(changed))

    def box(self, operand: str, rank: int) -> Box:
        """The box of a rank's shard in global coordinates (l, rows, columns).

        Args:
            operand: "A", "B", "C" or "D". C has the same shards as D. With scaling also "SFA" or "SFB", the scales of A
                and B, with a row and a column for each block of elements that share a scale.
            rank: 0 to world_size - 1.

        Raises:
            ValueError: for another operand or rank.
        """
        a, b, d = self.shards
        known = {"A": a, "B": b, "C": d, "D": d}
        if self.scale_shards is not None:
            known |= zip(SCALE_OPERANDS.values(), self.scale_shards, strict=True)
        return known[member("operand", operand, known)][self._rank(rank)]

    def scale_box(self, operand: str, box: Box) -> Box:
        """The box of SFA or SFB that has the scales of a box of A or B.

        Args:
            operand: "A" or "B".
            box: a box of the operand that lies in the shard of a rank. Its bounds are bounds of blocks.

        Raises:
            ValueError: for another operand, and for a problem without scaling.
        """
        scaling = instance("scaling of the problem", self.problem.scaling, Scaling, "a Scaling")[
            member("operand", operand, ("A", "B"))
        ]
        assert self.scale_shards is not None
        at = "AB".index(operand)
        result = [box[0]]
        for mode in (1, 2):
            low, high = box[mode]
            holders = (
                rank for rank, shard in enumerate(self.shards[at]) if shard[mode][0] <= low < high <= shard[mode][1]
            )
            holder = next(holders, None)
            own = (0, 0) if holder is None else self.scale_shards[at][holder][mode]
            result.append(scaling.scales(mode - 1, box[mode], own))
        return tuple(result)  # type: ignore[return-value]

    def shard(self, operand: str, rank: int) -> tuple[slice, ...]:
        """The slices of a global array that are a rank's shard.

        Args:
            operand: as :meth:`box` takes it.
            rank: 0 to world_size - 1.

        Returns:
            Slices of an array of shape (m, k) for A, (n, k) for B, (m, n) for C and D, and of all scales for SFA and
            SFB. With l > 1, and for B with groups > 1, the first slice is along l or the groups.

        Raises:
            ValueError: for another operand or rank.
        """
        batches, (start, stop), columns = self.box(operand, rank)
        if self._has_batches(operand):
            return slice(*batches), slice(start, stop), slice(*columns)
        # Of a single batch, a rank may hold none.
        return slice(start, stop if batches[0] < batches[1] else start), slice(*columns)

    def _has_batches(self, operand: str) -> bool:
        """Whether shards of an operand have an axis in front of rows and columns."""
        return self.problem.l * self.problem.matrices(operand) > 1

    def shard_shape(self, operand: str, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard, with the axes of :meth:`shard`.

        Args:
            operand: as :meth:`box` takes it.
            rank: 0 to world_size - 1.

        Raises:
            ValueError: for another operand or rank.
        """
        batches, rows, columns = box_extents(self.box(operand, rank))
        return (batches, rows, columns) if self._has_batches(operand) else (batches * rows, columns)

    def host(self, rank: int) -> int:
        """The number of the host of a rank, from 0.

        Args:
            rank: 0 to world_size - 1.

        Raises:
            ValueError: if there is no such rank.
        """
        return self._rank(rank) // (self.ranks_per_host or self.world_size)

    def across(self, src: int, dst: int) -> bool:
        """Whether the link between two ranks goes across hosts.

        Args:
            src: 0 to world_size - 1.
            dst: 0 to world_size - 1.

        Raises:
            ValueError: if there is no such rank.
        """
        return self.ranks_per_host is not None and self.host(src) != self.host(dst)

    def link_bytes(self, kind: LinkKind | None = None) -> dict[tuple[int, int], int]:
        """The bytes that one replay sends over each link, without flags.

        Args:
            kind: "inside" for links within a host, "across" for links between hosts, None for all.

        Returns:
            Bytes by (source rank, destination rank). A link that carries nothing is absent.

        Raises:
            ValueError: for another kind.
        """
        if kind is not None:
            member("kind", kind, LINK_KINDS)
        found: Counter[tuple[int, int]] = Counter()
        for link, view in self._transfers:
            found[link] += box_size(view.box) * DTYPE_BYTES[self.dtype(view)]
        return {
            link: size
            for link, size in sorted(found.items())
            if size and (kind is None or self.across(*link) == (kind == "across"))
        }

    @cached_property
    def _transfers(self) -> tuple[tuple[tuple[int, int], View], ...]:
        """The link (src, dst) and the view that is written, for each op that moves data between ranks."""
        every = ((link_of(op), accesses(op)[1]) for ops in self.rank_ops for op in ops)
        return tuple((link, view) for link, view in every if link is not None and view is not None)

    def dtype(self, view: View) -> str:
        """The element type of a view's memory.

        Args:
            view: a view of this plan.

        Raises:
            ValueError: for anything else than a view.
        """
        instance("view", view, View, "a View of an op")
        if view.buffer == "slot":
            return self.slots[view.rank][view.slot].dtype
        return self.problem.operand_dtype(view.buffer)

    def workspace_bytes(self, rank: int) -> int:
        """The bytes of all slots of a rank, with alignment, without signal memory and scratch memory of kernels.

        Args:
            rank: 0 to world_size - 1.

        Raises:
            ValueError: if there is no such rank.
        """
        return sum(slot.bytes for slot in self.slots[self._rank(rank)])

    @cached_property
    def sizes(self) -> tuple[RankSize, ...]:
        """The numbers of ops, Gemms and flags of each rank. Ops that are not made yet are not made for it."""
        if self.structure is not self:
            return self.structure.sizes
        return tuple(map(size_of_rank, self.rank_ops))

    @cached_property
    def padded_rows(self) -> tuple[tuple[int, int], ...]:
        """The (columns, pitch) of tiles that have padding between their rows in slots, in elements, sorted."""
        if self.structure is not self:
            return self.structure.padded_rows
        # The views that ops write are enough: an op has written each tile that is in a slot.
        written = (view for ops in self.rank_ops for op in ops if (view := accesses(op)[1]) and view.buffer == "slot")
        found = {(box_extents(view.frame)[2], view.pitch) for view in written}
        return tuple(sorted(rows for rows in found if rows[0] != rows[1]))

    def check_types(self) -> None:
        """Check that every field of the plan, of its ops and of their views has its type.

        A plan is immutable, so a second call does nothing.

        Raises:
            PlanError: if a field has another type. The message names the field and its value.
        """
        if self.structure is not self:
            self.structure.check_types()
        elif "_types_checked" not in vars(self):
            check_types(self)
            vars(self)["_types_checked"] = True

    def verify(self) -> None:
        """Prove that the plan computes its product, over all ranks, legal orders of ops, and replays.

        Raises:
            PlanError: if it does not. The message names rank, iteration and op, or the tile that no op computes.
        """
        from distgemm.plan.verify_rotated import verify

        verify(self)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 hash of the plan. Ranks compare it: it is the same for equal plans in every process.

        It is the hash of a text that has all rows of A and D as numbers of a sorted list of rows, and this list.
        """
        self.check_types()
        ops, rows = self.structure._hashed_ops
        if self.structure is not self:
            assert isinstance(self.rank_ops, ResizedOps)
            rows = [self.rank_ops.rows[row] for row in rows]
        slots = {of_rank: repr([tuple(slot) for slot in of_rank]) for of_rank in set(self.slots)}
        header = self._header()
        header |= {"rank_ops": ops, "slots": [slots[of_rank] for of_rank in self.slots]}
        return hashlib.sha256(repr((header, rows)).encode()).hexdigest()

    def _header(self) -> dict[str, Any]:
        """The fields for hashes. Plans of one host, or without scales, have the hashes that they always had."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("scale_shards", "ranks_per_host"):
            if fields[name] is None:
                del fields[name]
        return fields

    @cached_property
    def fingerprint(self) -> str:
        """A hash that ranks compare first. It is the same only for equal plans.

        It is the same for all plans that :func:`distgemm.make_plan` makes of equal arguments. For most plans it is the
        digest. It is another hash, which does not need the ops of other ranks, for plans whose empty tiles were left
        out of a plan without empty tiles, and for plans in which every rank has the ops of rank 0, rotated.
        """
        fields = self._header()
        del fields["rank_ops"], fields["slots"]
        rotated: tuple[Sequence[Op], object] | None = vars(self).get("rotated")
        if rotated is not None:
            first, rotations = rotated
            fields["shards"] = [boxes[0] for boxes in self.shards]
            hashed, rows = _hash_ops([first], self.edges, self.problem.scaling)
            return hashlib.sha256(repr((hashed, rows, self.slots[0], rotations, fields)).encode()).hexdigest()
        whole: tuple[Plan, int] | None = vars(self.structure).get("whole")
        if whole is None:
            return self.digest
        plan, send_slots = whole
        # The fields without ops and slots determine them.
        sizes = [self.workspace_bytes(rank) for rank in range(self.world_size)]
        return hashlib.sha256(repr((plan._hashed_ops[0], send_slots, fields, sizes)).encode()).hexdigest()

    @cached_property
    def _hashed_ops(self) -> tuple[str, list[int]]:
        return _hash_ops(self.rank_ops, self.edges, self.problem.scaling)

    def to_json(self) -> str:
        """The plan as a JSON text that :meth:`from_json` reads.

        Raises:
            PlanError: if a field has another type than a plan's.
        """
        self.check_types()
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "rank_ops"
        }
        fields["problem"] = dataclasses.asdict(self.problem)
        fields["rank_ops"] = [[_to_dict(op) for op in ops] for ops in self.rank_ops]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Args:
            text: a result of :meth:`to_json`.

        Returns:
            The plan. It is not verified.

        Raises:
            PlanError: if the text does not describe a plan. The message names the field that is wrong.
        """
        try:
            fields = json_value("text", instance("text", text, str, "a plan as JSON, from Plan.to_json"))
        except ValueError as error:
            raise PlanError(f"the plan is not JSON: {error}") from None
        with collector_paused():
            plan = cls(**read_fields(fields, [field.name for field in dataclasses.fields(cls)]))
            plan.check_types()
        return plan


def _hash_ops(
    rank_ops: Sequence[Sequence[Op]], edges: tuple[tuple[int, ...], ...], scaling: Scaling | None
) -> tuple[str, list[int]]:
    """The hash of ops with numbers in place of the rows of A and D, and the sorted list of these rows."""
    fixed = fixed_views(rank_ops, scaling)
    views = {id(view): view for ops in rank_ops for op in ops for view in _views(op)}
    rows = set(edges[0])
    for of_view, view in views.items():
        if of_view not in fixed:
            rows |= {*view.frame[1], *view.box[1]}
    order = sorted(rows)
    number = {row: str(at) for at, row in enumerate(order)}
    texts = {
        of_view: repr(tuple(view)) if of_view in fixed else _numbered(view, number) for of_view, view in views.items()
    }
    hashed = hashlib.sha256()
    for ops in rank_ops:
        lines = []
        for op in ops:
            common = op.kind, op.id, op.rank, op.round, op.iteration, op.operand, tuple(op.tile), op.slot, op.deps
            lines.append(f"{common} {' '.join([texts[id(view)] for view in _views(op)])} {_rest(op)}")
        hashed.update("\n".join([*lines, "\n"]).encode())
    return hashed.hexdigest(), order


def _views(op: Op) -> list[View]:
    """All views of an op, in one order."""
    reads, write = accesses(op)
    return reads if write is None else [*reads, write]


def _numbered(view: View, number: Mapping[int, str]) -> str:
    """A view as a text with numbers in place of rows."""
    rank, buffer, slot, frame, box, pitch = view
    rows = [number[row] for row in (*frame[1], *box[1])]
    return f"{rank} {buffer} {slot} {frame[0]} {rows} {frame[2]} {box[0]} {box[2]} {pitch}"


def _rest(op: Op) -> str:
    """What an op has besides the fields of all ops and its views, as a text."""
    if isinstance(op, Signal):
        return repr(tuple(op.flag))
    if isinstance(op, Wait):
        return repr((tuple(op.flag), op.peer))
    return "with C" if isinstance(op, Gemm | Reduce) and op.c is not None else ""


def _to_dict(op: Op) -> dict[str, Any]:
    # Named tuples become lists. The name of the field says which type to read back.
    return {"kind": op.kind, **{field.name: getattr(op, field.name) for field in dataclasses.fields(op)}}
