"""Copies of shards in slices along k, each with a signal of its own."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeGuard

from distgemm.plan.ops import Copy, Gemm, Op, Signal, View, Wait, box_extents, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.executable import Transport

__all__ = ["in_slices", "is_sent", "most_slices", "slice_of", "sliced"]

MAX_SLICES: dict[Transport, int] = {"copy_engine_slices": 4, "sm": 16}
"""Most slices of a chunk, by who copies them: a copy engine needs microseconds to start each one."""
MIN_SLICE_BYTES: dict[Transport, int] = {"copy_engine_slices": 1024, "sm": 2048}
"""Least bytes of a row in a slice: a kernel moves shorter ones more slowly."""
SLICE_UNIT_BYTES = 256
"""Slices are multiples of so many bytes of a row, as the depths of tiles are."""


def slice_of(plan: Plan, transport: Transport) -> int:
    """Elements along k of a slice of what is copied to peers. Raises PlanError where nothing can be sent in slices."""
    extents = {(*box_extents(op.src.box), plan.dtype(op.src)) for ops in plan.rank_ops for op in ops if is_sent(op)}
    moved = _to_peers(plan)
    if len({(k, dtype) for _, _, k, dtype in extents}) != 1:
        others = moved and transport == "sm"
        raise PlanError(
            f"{plan.schedule}: transport={transport!r} is for shards that are pushed to peers, and here are none"
            + ("; of all-reduces, for those with mechanism='store'" if others else "")
        )
    if not all(map(is_sent, moved)):
        raise PlanError(f"{plan.schedule}: copies in slices are of shards, and here is passed on what has come")
    _, _, k, dtype = extents.pop()
    row = k * DTYPE_BYTES[dtype]
    count = min(MAX_SLICES[transport], max(1, row // MIN_SLICE_BYTES[transport]))
    return -(-row // count // SLICE_UNIT_BYTES) * SLICE_UNIT_BYTES // DTYPE_BYTES[dtype]


def most_slices(transport: Transport) -> int:
    """The most slices of a chunk with this transport."""
    return MAX_SLICES[transport]


def is_sent(op: Op) -> TypeGuard[Copy]:
    """Whether it copies from the rank's shard to a peer."""
    return isinstance(op, Copy) and op.src.buffer in ("A", "B") and op.src.rank == op.rank and link_of(op) is not None


def _to_peers(plan: Plan) -> list[Copy]:
    """Copies between ranks, of all ranks."""
    return [op for op in chain.from_iterable(plan.rank_ops) if isinstance(op, Copy) and link_of(op) is not None]


def in_slices(plan: Plan, transport: Transport) -> bool:
    """Whether copies to peers have slices along k. Engines copy as a whole; so does a kernel where all that it copies
    to peers are results, from where they are finished."""
    moved = _to_peers(plan) if transport == "sm" else []
    results = bool(moved) and all(op.src.buffer == "D" and op.src.rank == op.rank for op in moved)
    return transport != "copy_engine" and not results


def sliced(plan: Plan, ops: Sequence[Op], slice_k: int, last: bool) -> tuple[list[Op], int]:
    """Ops in which copies of shards, the signals behind them, and the waits for these are one for each slice; and how
    many these are. Flag f becomes the flags from f times that number on. With ``last`` a copy is whole, with one
    signal, unless the peer multiplies it last."""
    cut = set(_multiplied_last(plan)) if last else None
    counts: dict[tuple[int, int], int] = {}  # of slices, by flag
    whole: set[tuple[int, int]] = set()  # flags of copies that are not cut
    for rank_ops in plan.rank_ops:
        sent = {op.id: _cut(op.src, slice_k) for op in rank_ops if is_sent(op)}
        kept = {op.id for op in rank_ops if is_sent(op) and not _goes_into(cut, op)}
        for op in rank_ops:
            if isinstance(op, Signal) and not sent.keys().isdisjoint(op.deps):
                counts[op.flag.rank, op.flag.number] = len(sent[op.deps[0]]) if len(op.deps) == 1 else 0
                if not kept.isdisjoint(op.deps):
                    whole.add((op.flag.rank, op.flag.number))
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise PlanError(f"{plan.schedule}: copies in slices are signalled one by one, and here are some together")
    count = next(iter(counts.values()), 1)
    first = 1 + max(op.id for ops in plan.rank_ops for op in ops)
    ids: dict[int, list[int]] = {}
    found: list[Op] = []
    signals: dict[int, Op] = {}  # by the slice that they follow
    for op in ops:
        slices = 1
        if is_sent(op) and _goes_into(cut, op):
            slices = count
        elif _has_flag(op) and (op.flag.rank, op.flag.number) not in whole:
            slices = counts.get((op.flag.rank, op.flag.number), 1)
        ids[op.id] = [op.id] if slices == 1 else [first + op.id * count + number for number in range(slices)]
        for number, own in enumerate(ids[op.id]):
            changed: dict[str, Any] = {"id": own}
            if _has_flag(op):
                changed["flag"] = op.flag._replace(number=op.flag.number * count + number)
            if is_sent(op) and slices > 1:
                changed |= {"src": _cut(op.src, slice_k)[number], "dst": _cut(op.dst, slice_k)[number]}
            follows = [ids.get(dep, [dep]) for dep in op.deps]  # the entry has no slices
            if isinstance(op, Signal) and slices > 1 and len(follows[0]) == slices:
                after = follows[0][number]
                signals[after] = replace(op, **changed, deps=(after,))
            else:
                found.append(replace(op, **changed, deps=tuple(chain.from_iterable(follows))))
    return [each for op in found for each in (op, signals.get(op.id)) if each is not None], count


def _goes_into(slots: Container[tuple[int, int]] | None, op: Copy) -> bool:
    """Whether it copies into one of these slots, by rank and number; None: any."""
    return slots is None or (op.dst.rank, op.dst.slot) in slots


def _multiplied_last(plan: Plan) -> Iterator[tuple[int, int]]:
    """Rank and slot of the chunk that each rank multiplies last."""
    for rank in range(plan.world_size):
        views = [view for op in plan.ops(rank) if isinstance(op, Gemm) for view in (op.a, op.b)]
        yield from [(rank, view.slot) for view in views if view.buffer == "slot"][-1:]


def _has_flag(op: Op) -> TypeGuard[Signal | Wait]:
    return isinstance(op, (Signal, Wait))


def _cut(view: View, slice_k: int) -> list[View]:
    batch, rows, (start, stop) = view.box
    return [view._replace(box=(batch, rows, (at, min(at + slice_k, stop)))) for at in range(start, stop, slice_k)]
