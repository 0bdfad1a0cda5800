"""The pass that copies neighbouring chunks as one, and multiplies them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import pairwise

from distgemm.plan.ops import Copy, Gemm, Op, Signal, View, Wait, box_extents, contains, link_of
from distgemm.plan.plan import Plan, once_for_structure
from distgemm.plan.problem import DTYPE_BYTES

__all__ = ["merge_copies"]


def merge_copies(plan: Plan, rank: int, ops: Sequence[Op], entry: Container[int]) -> list[Op]:
    """The ops, with neighbouring chunks as one op that has the id of the first of them.

    Args:
        plan: of all ranks.
        rank: whose ops.
        ops: of the rank, without those of the entry.
        entry: ids of the ops that the entry into a replay does.
    """
    own = {op.id: op for op in ops if isinstance(op, Gemm)}
    gemms = [[own[op.id] for op in group] for group in _merged_gemms(plan, rank)]
    copies = _merged_copies(plan, rank, entry)
    groups: list[Sequence[Op]] = [*gemms, *copies]
    first = {op.id: group[0].id for group in groups for op in group}
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    users = Counter(dep for op in ops for dep in op.deps)
    # All Waits of a merged GEMM stand just before it. A merged copy waits for nothing; all its Signals stand behind it.
    placed_at: dict[int, list[Op]] = {}
    for group in gemms:
        gemm = _one_gemm(group)
        awaited = [waits[dep] for dep in gemm.deps if dep in waits and users[dep] == 1]
        placed_at[group[-1].id] = [*awaited, gemm]
    for sent in copies:
        ids = {op.id for op in sent}
        signals = [op for op in ops if isinstance(op, Signal) and not ids.isdisjoint(op.deps)]
        placed_at[sent[0].id] = [_one_copy(sent), *signals]
    moved = {op.id for placed in placed_at.values() for op in placed} | first.keys()
    kept = [each for op in ops for each in placed_at.get(op.id, [] if op.id in moved else [op])]
    found = []
    for op in kept:
        deps = tuple(dict.fromkeys(first.get(dep, dep) for dep in op.deps))
        found.append(op if deps == op.deps else replace(op, deps=deps))
    return found


def _merged_gemms(plan: Plan, rank: int) -> list[list[Gemm]]:
    """Groups of GEMMs to merge, of the plan's structure: the chunks of each shard of A but the last."""
    return [group for group in _gemms_by_shard(plan, rank)[:-1] if len(group) > 1]


def _gemms_by_shard(plan: Plan, rank: int) -> list[list[Gemm]]:
    """A rank's GEMMs in the plan's order. Chunks of one shard of A with the same B are a group, if no op needs them.

    The GEMMs are those of the plan's structure: take their ids, slots and tiles, and no rows.
    """
    groups: list[list[Gemm]] = []
    for run in _runs_by_shard(plan, rank):
        groups.append([run[0]])
        for before, op in pairwise(run):
            a, out = plan.own_view(before.a), plan.own_view(before.out)
            if _is_next(plan, a, op.a) and _is_next(plan, out, op.out):
                groups[-1].append(op)
            else:
                groups.append([op])
    return groups


@once_for_structure
def _runs_by_shard(plan: Plan, rank: int) -> list[list[Gemm]]:
    """The groups of :func:`_gemms_by_shard`, if all slots of neighbouring chunks follow one another."""
    ops = plan.ops(rank)
    needed = {dep for op in ops for dep in op.deps}
    first = {op.a.box: op.id for op in reversed(ops) if isinstance(op, Gemm)}  # to use a tile of A
    runs: list[list[Gemm]] = []
    for op in (op for op in ops if isinstance(op, Gemm)):
        before = runs[-1][-1] if runs else None
        if (
            before is not None
            and before.b == op.b
            and before.scales == op.scales
            and not (before.sources or op.sources)
            and needed.isdisjoint((before.id, op.id))
            and (before.c is None) == (op.c is None)
            and (first[before.a.box] == before.id) == (first[op.a.box] == op.id)
            and _touch(before.a, op.a)
            and _touch(before.out, op.out)
            and any(contains(shard, _joined([before.a, op.a]).box) for shard in plan.shards[0])
        ):
            runs[-1].append(op)
        else:
            runs.append([op])
    return runs


def _merged_copies(plan: Plan, rank: int, entry: Container[int]) -> list[list[Copy]]:
    """Groups of copies to merge: neighbours on both sides, of chunks that the peer multiplies as one."""
    group_of: dict[tuple[int, int], int] = {}  # by the peer and its slot
    for peer in range(plan.world_size):
        for group in _merged_gemms(plan, peer):
            group_of |= {(peer, op.a.slot): group[0].id for op in group if op.a.buffer == "slot"}
    groups: list[list[Copy]] = []
    for op in plan.ops(rank):
        if not isinstance(op, Copy) or link_of(op) is None or op.src.rank != rank:
            continue
        number = group_of.get((op.dst.rank, op.dst.slot))
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and number is not None
            and number == group_of.get((before.dst.rank, before.dst.slot))
            and all(dep in entry for dep in (*before.deps, *op.deps))
            and _follows(plan, before.src, op.src)
            and _follows(plan, before.dst, op.dst)
        ):
            groups[-1].append(op)
        else:
            groups.append([op])
    return [group for group in groups if len(group) > 1]


def _follows(plan: Plan, one: View, other: View) -> bool:
    """Whether the rows of the other view come next, in the matrix and in memory."""
    return _touch(one, other) and _is_next(plan, one, other)


def _touch(one: View, other: View) -> bool:
    """Whether the rows of the other view come next in the matrix, and both views are whole slots or of one shard."""
    same = (one.rank, one.buffer, one.pitch, one.box[0], one.box[2]) == (
        other.rank, other.buffer, other.pitch, other.box[0], other.box[2])  # fmt: skip
    if not same or box_extents(one.box)[0] > 1 or one.box[1][1] != other.box[1][0]:
        return False
    return one.buffer != "slot" or (one.box == one.frame and other.box == other.frame)


def _is_next(plan: Plan, one: View, other: View) -> bool:
    """Whether views that touch follow one another in memory too."""
    if one.buffer != "slot":
        return True
    slots = plan.slots[one.rank]
    end = slots[one.slot].offset + one.elements * DTYPE_BYTES[plan.dtype(one)]
    return end == slots[other.slot].offset


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
