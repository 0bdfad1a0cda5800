"""The pass that copies shards in slices along k, each with a signal of its own."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeGuard

from distgemm.plan.ops import Copy, Gemm, Op, Signal, View, Wait, box_extents, link_of
from distgemm.plan.plan import Plan, PlanError, once_for_structure
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.executable import Transport

__all__ = ["copies_shard", "ids_of", "max_slices", "slice_copies", "slice_width", "sliced_transport"]

MAX_SLICES: dict[Transport, int] = {"copy_engine_slices": 4, "sm": 16}
"""Most slices of a chunk, by who copies them: a copy engine needs microseconds to start each one."""
MIN_SLICE_BYTES: dict[Transport, int] = {"copy_engine_slices": 1024, "sm": 2048}
"""Least bytes of a row in a slice: a kernel moves shorter ones more slowly."""
SLICE_UNIT_BYTES = 256
"""Bytes of a row that the width of every slice but the last is a multiple of, as the depth of tiles is."""


@once_for_structure
def slice_width(plan: Plan, transport: Transport) -> int:
    """Elements along k of a slice.

    Raises:
        PlanError: where nothing can be sent in slices.
    """
    extents = {
        (*box_extents(op.src.box), plan.dtype(op.src)) for ops in plan.rank_ops for op in ops if copies_shard(op)
    }
    moved = _copies_between_ranks(plan)
    if len({(k, dtype) for _, _, k, dtype in extents}) != 1:
        others = moved and transport == "sm"
        raise PlanError(
            f"{plan.schedule}: transport={transport!r} is for shards that are pushed to peers, and this plan pushes "
            "none" + ("; of all-reduces, for those with mechanism='store'" if others else "")
        )
    if not all(map(copies_shard, moved)):
        raise PlanError(f"{plan.schedule}: shards are copied in slices, and this plan passes on what has arrived")
    _, _, k, dtype = extents.pop()
    row = k * DTYPE_BYTES[dtype]
    count = min(MAX_SLICES[transport], max(1, row // MIN_SLICE_BYTES[transport]))
    return -(-row // count // SLICE_UNIT_BYTES) * SLICE_UNIT_BYTES // DTYPE_BYTES[dtype]


def max_slices(transport: Transport) -> int:
    """The most slices of a chunk with this transport."""
    return MAX_SLICES[transport]


def copies_shard(op: Op) -> TypeGuard[Copy]:
    """Whether an op copies from its rank's shard of A or B to a peer."""
    return isinstance(op, Copy) and op.src.buffer in ("A", "B") and op.src.rank == op.rank and link_of(op) is not None


def _copies_between_ranks(plan: Plan) -> list[Copy]:
    return [op for op in chain.from_iterable(plan.rank_ops) if isinstance(op, Copy) and link_of(op) is not None]


@once_for_structure
def sliced_transport(plan: Plan, transport: Transport) -> bool:
    """Whether copies to peers have slices along k.

    Copy engines copy whole chunks with "copy_engine". The fused kernel does too where all that it copies to peers are
    finished results.
    """
    moved = _copies_between_ranks(plan) if transport == "sm" else []
    only_results = bool(moved) and all(op.src.buffer == "D" and op.src.rank == op.rank for op in moved)
    return transport != "copy_engine" and not only_results


def slice_copies(plan: Plan, ops: Sequence[Op], slice_k: int, only_last: bool) -> tuple[list[Op], int]:
    """The ops with copies of shards, the Signals behind them and the Waits for these split: one for each slice.

    Flag f becomes as many flags as a chunk has slices, from f times that number on.

    Args:
        plan: of all ranks.
        ops: of one rank, without those of the entry.
        slice_k: elements along k of a slice.
        only_last: split only the chunk that each peer multiplies last. Every other copy stays whole, with one Signal.

    Returns:
        The ops, and the number of slices of a chunk.
    """
    split = _multiplied_last(plan) if only_last else None
    count, counts, whole = _slices_of_flags(plan, slice_k, only_last)
    first = ids_of(plan)
    ids: dict[int, list[int]] = {}
    found: list[Op] = []
    signals: dict[int, Op] = {}  # by the slice that they follow
    for op in ops:
        slices = 1
        if copies_shard(op) and _goes_into(split, op):
            slices = count
        elif _has_flag(op) and (op.flag.rank, op.flag.number) not in whole:
            slices = counts.get((op.flag.rank, op.flag.number), 1)
        ids[op.id] = [op.id] if slices == 1 else [first + op.id * count + number for number in range(slices)]
        for number, own in enumerate(ids[op.id]):
            changed: dict[str, Any] = {"id": own}
            if _has_flag(op):
                changed["flag"] = op.flag._replace(number=op.flag.number * count + number)
            if copies_shard(op) and slices > 1:
                changed |= {"src": _split(op.src, slice_k)[number], "dst": _split(op.dst, slice_k)[number]}
            follows = [ids.get(dep, [dep]) for dep in op.deps]  # ops of the entry are not split
            if isinstance(op, Signal) and slices > 1 and len(follows[0]) == slices:
                after = follows[0][number]
                signals[after] = replace(op, **changed, deps=(after,))
            else:
                found.append(replace(op, **changed, deps=tuple(chain.from_iterable(follows))))
    return [each for op in found for each in (op, signals.get(op.id)) if each is not None], count


@once_for_structure
def _slices_of_flags(
    plan: Plan, slice_k: int, only_last: bool
) -> tuple[int, dict[tuple[int, int], int], set[tuple[int, int]]]:
    """The number of slices of a chunk; the number for each flag of a chunk, by rank and number of the flag; and the
    flags of chunks that stay whole."""
    split = _multiplied_last(plan) if only_last else None
    counts: dict[tuple[int, int], int] = {}  # slices, by the flag's rank and number
    whole: set[tuple[int, int]] = set()  # flags of copies that are not split
    for rank_ops in plan.rank_ops:
        sent = {op.id: _split(op.src, slice_k) for op in rank_ops if copies_shard(op)}
        kept = {op.id for op in rank_ops if copies_shard(op) and not _goes_into(split, op)}
        for op in rank_ops:
            if isinstance(op, Signal) and not sent.keys().isdisjoint(op.deps):
                counts[op.flag.rank, op.flag.number] = len(sent[op.deps[0]]) if len(op.deps) == 1 else 0
                if not kept.isdisjoint(op.deps):
                    whole.add((op.flag.rank, op.flag.number))
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise PlanError(
            f"{plan.schedule}: each copy in slices has a signal of its own, and here one signal stands behind several"
        )
    return next(iter(counts.values()), 1), counts, whole


@once_for_structure
def ids_of(plan: Plan) -> int:
    """A number from which on no op of the plan has an id."""
    return 1 + max(op.id for ops in plan.rank_ops for op in ops)


def _goes_into(slots: Container[tuple[int, int]] | None, op: Copy) -> bool:
    """Whether a copy goes into one of these slots, by rank and number; None: into any."""
    return slots is None or (op.dst.rank, op.dst.slot) in slots


@once_for_structure
def _multiplied_last(plan: Plan) -> set[tuple[int, int]]:
    """Rank and slot of the chunk that each rank multiplies last."""
    found = set()
    for rank in range(plan.world_size):
        views = [view for op in plan.ops(rank) if isinstance(op, Gemm) for view in (op.a, op.b)]
        found |= {(rank, view.slot) for view in [view for view in views if view.buffer == "slot"][-1:]}
    return found


def _has_flag(op: Op) -> TypeGuard[Signal | Wait]:
    return isinstance(op, (Signal, Wait))


def _split(view: View, slice_k: int) -> list[View]:
    batch, rows, (start, stop) = view.box
    return [view._replace(box=(batch, rows, (at, min(at + slice_k, stop)))) for at in range(start, stop, slice_k)]
