"""Chunks that lie behind one another in memory, multiplied and copied as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace

from distgemm.plan.ops import Copy, Gemm, Op, Signal, View, Wait, box_extents, contains, link_of
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES

__all__ = ["halved", "merged", "of_shards"]


def merged(plan: Plan, rank: int, ops: Sequence[Op], entered: Container[int], fused: bool) -> list[Op]:
    """Ops in which neighbouring chunks are one op, with the id of the first of them."""
    gemms, copies = [] if fused else _neighbours(plan, rank), _sent_together(plan, rank, entered, fused)
    together: list[Sequence[Op]] = [*gemms, *copies]
    first = {op.id: group[0].id for group in together for op in group}
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    users = Counter(dep for op in ops for dep in op.deps)
    # A product waits for all of its chunks, just before it; a copy waits for none, and all are signalled behind it.
    runs: dict[int, list[Op]] = {}
    for group in gemms:
        merged = _one_gemm(group)
        own = [waits[dep] for dep in merged.deps if dep in waits and users[dep] == 1]
        runs[group[-1].id] = [*own, merged]
    for sent in copies:
        ids = {op.id for op in sent}
        signals = [op for op in ops if isinstance(op, Signal) and not ids.isdisjoint(op.deps)]
        runs[sent[0].id] = [_one_copy(sent), *signals]
    placed = {op.id for run in runs.values() for op in run} | first.keys()
    kept = [each for op in ops for each in runs.get(op.id, [] if op.id in placed else [op])]
    return [replace(op, deps=tuple(dict.fromkeys(first.get(dep, dep) for dep in op.deps))) for op in kept]


def _neighbours(plan: Plan, rank: int) -> list[list[Gemm]]:
    """GEMMs that are one where chunks are merged: those of each shard of A but the last."""
    return [group for group in of_shards(plan, rank)[:-1] if len(group) > 1]


def halved(groups: Sequence[list[Gemm]]) -> list[list[Gemm]]:
    """The last group as a half of it, a half of the rest, and so on."""
    if not groups:
        return []
    *others, rest = groups
    while len(rest) > 1:
        others.append(rest[: len(rest) // 2])
        rest = rest[len(rest) // 2 :]
    return [*others, rest]


def of_shards(plan: Plan, rank: int) -> list[list[Gemm]]:
    """GEMMs of the chunks of one shard of A, by the same B, on which no op depends, together."""
    ops = plan.ops(rank)
    needed = {dep for op in ops for dep in op.deps}
    first = {op.a.box: op.id for op in reversed(ops) if isinstance(op, Gemm)}  # to use a tile of A
    groups: list[list[Gemm]] = []
    for op in (op for op in ops if isinstance(op, Gemm)):
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and before.b == op.b
            and not (before.sources or op.sources)
            and needed.isdisjoint((before.id, op.id))
            and (before.c is None) == (op.c is None)
            and (first[before.a.box] == before.id) == (first[op.a.box] == op.id)
            and _follows(plan, before.a, op.a)
            and _follows(plan, before.out, op.out)
            and any(contains(shard, _joined([before.a, op.a]).box) for shard in plan.shards[0])
        ):
            groups[-1].append(op)
        else:
            groups.append([op])
    return groups


def _sent_together(plan: Plan, rank: int, entered: Container[int], fused: bool) -> list[list[Copy]]:
    """Copies to a peer, behind one another on both sides, of what the peer multiplies as one; where its GEMMs are one
    kernel, in halves of halves at the end."""
    together: dict[tuple[int, int], int] = {}
    for peer in range(plan.world_size):
        for group in halved(of_shards(plan, peer)) if fused else _neighbours(plan, peer):
            together |= {(peer, op.a.slot): group[0].id for op in group if op.a.buffer == "slot"}
    groups: list[list[Copy]] = []
    for op in plan.ops(rank):
        if not isinstance(op, Copy) or link_of(op) is None or op.src.rank != rank:
            continue
        number = together.get((op.dst.rank, op.dst.slot))
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and number is not None
            and number == together.get((before.dst.rank, before.dst.slot))
            and all(dep in entered for dep in (*before.deps, *op.deps))
            and _follows(plan, before.src, op.src)
            and _follows(plan, before.dst, op.dst)
        ):
            groups[-1].append(op)
        else:
            groups.append([op])
    return [group for group in groups if len(group) > 1]


def _follows(plan: Plan, one: View, other: View) -> bool:
    """Whether the rows of another view come next, in the matrix and in memory."""
    same = (one.rank, one.buffer, one.pitch, one.box[0], one.box[2]) == (
        other.rank, other.buffer, other.pitch, other.box[0], other.box[2])  # fmt: skip
    if not same or box_extents(one.box)[0] > 1 or one.box[1][1] != other.box[1][0]:
        return False
    if one.buffer != "slot":
        return True
    slots = plan.slots[one.rank]
    end = slots[one.slot].offset + one.elements * DTYPE_BYTES[plan.dtype(one)]
    return one.box == one.frame and other.box == other.frame and end == slots[other.slot].offset


def _joined(views: Sequence[View]) -> View:
    """Views that follow one another as one."""
    batch, (start, _), columns = views[0].box
    box = batch, (start, views[-1].box[1][1]), columns
    return views[0]._replace(box=box, frame=box if views[0].buffer == "slot" else views[0].frame)


def _one_gemm(group: Sequence[Gemm]) -> Gemm:
    return replace(
        group[-1],
        id=group[0].id,
        tile=group[0].tile,
        deps=tuple(dep for op in group for dep in op.deps),
        a=_joined([op.a for op in group]),
        c=None if group[0].c is None else _joined([op.c for op in group if op.c is not None]),
        out=_joined([op.out for op in group]),
    )


def _one_copy(group: Sequence[Copy]) -> Copy:
    return replace(group[0], src=_joined([op.src for op in group]), dst=_joined([op.dst for op in group]))
