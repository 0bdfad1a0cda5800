"""From a rank's ops to actions on streams: who waits for whom, and on which stream. Nothing is bound yet."""

from __future__ import annotations

from collections.abc import Sequence

from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Reduce, Signal, Wait, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.runtime.cuda.lowering.actions import BRANCH, COMM, Action
from distgemm.runtime.cuda.lowering.merge_copies import merged
from distgemm.runtime.cuda.lowering.single_kernel import flags_of, one_kernel
from distgemm.runtime.cuda.lowering.slices import SLICES, in_slices, slice_of, sliced
from distgemm.runtime.cuda.workspace import Step

__all__ = ["lower", "most_flags"]


def lower(
    plan: Plan, rank: int, branches: int, merge: bool = False, gated: bool = False, copies: str = "engine"
) -> list[Action]:
    """The actions of a rank, in an order in which they can be issued.

    merge: chunks that lie behind one another in memory are multiplied as one, and copied as one, but for those that a
           rank multiplies last: few chunks in between, small ones where they are waited for. With ``gated`` they are
           copied so only, and of those that come last half at once, half of the rest, and so on
    gated: all GEMMs are one kernel that waits for each chunk by itself, and tells of each result by itself
    copies: of shards to peers, as ``distgemm.compile`` takes it. Where there are slices along k, each has a flag of its
           own; with ``gated`` the kernel sends them if "gemm" or "both". With "gemm" also those of an all-reduce's
           results, to peers and from slots to D, as a whole

    Streams are first in, first out, and actions are issued in the plan's order, in which no op waits for a later
    one: whatever streams the hardware serialises, the ranks come to an end. There is one exception: a kernel whose sums
    copies pass on waits for copies of peers, and copies for it, so that those streams are to run at once.

    Credits that pass from one replay to the next, and Barriers at the start, are what the entry into a replay
    waits for (see :mod:`distgemm.runtime.cuda.workspace`); such Waits and Signals vanish. What peers have taken from
    a rank's slots they have before it leaves the replay: their ENTERED, for which it waits, is behind their copies,
    but for what a kernel sends, which no peer takes from there.

    Raises PlanError for a Barrier that is not at the start, a flag that is waited for twice in a replay, ops that
    depend on what vanishes, and GEMMs that cannot be one kernel.
    """
    _check(plan, rank)
    ops = [op for op in plan.ops(rank) if not _passes_replays(op)]
    entered = {op.id for op in ops if _is_entry(op)}
    ops = [op for op in ops if not _is_entry(op)]
    if merge:
        ops = merged(plan, rank, ops, entered, gated)
    along = slices = 0
    if in_slices(plan, copies):
        along = slice_of(plan, copies)
        ops, slices = sliced(plan, ops, along, copies != "gemm")
    kernel = None
    if gated:
        ops, kernel = one_kernel(plan, ops, entered, slices, copies, merge)
    if kernel is not None:
        kernel.slice = along
    streams = _streams(ops, 1 if gated else branches)
    actions = [Action(COMM, (), step=Step.ENTRY)]
    of: dict[int, int] = dict.fromkeys(entered, 0)
    waits = []
    for run in _runs(ops, streams):
        told_here = any(isinstance(op, Wait) and op.peer == rank for op in run)
        if kernel is not None and kernel not in actions and (told_here or streams[run[0].id] == BRANCH):
            waits.append(len(actions))
            actions.append(kernel)  # before what waits for it, or stands behind it on its stream
        needed = {of[dep] for op in run for dep in op.deps}
        if isinstance(run[0], Signal):
            needed.add(0)  # the peer has left its last replay: it will not clear the flag any more
        for op in run:
            of[op.id] = len(actions)
        stream = streams[run[0].id]
        if isinstance(run[0], Wait):
            waits.append(len(actions))
            before = actions[-1]
            if not needed and stream == before.stream == COMM and before.ops and isinstance(before.ops[-1], Signal):
                waits[-1] -= 1
                before.ops += run  # one batch
                of |= {op.id: waits[-1] for op in run}
                continue
        actions.append(Action(stream, run, tuple(sorted(needed))))
    # Where nothing is copied, one stream will do.
    stream = BRANCH if kernel is not None and not ops else COMM
    actions[0].stream = stream
    last = max((number for number, action in enumerate(actions) if action.stream == stream), default=0)
    if isinstance(next(iter(actions[last].ops), None), Signal):
        actions[last].step = Step.ENTERED  # one batch
    else:
        actions.append(Action(stream, (), step=Step.ENTERED))
    if kernel is not None and kernel not in actions:
        waits.append(len(actions))
        actions.append(kernel)  # last, so that no copy stands behind it
    actions.append(Action(stream, (), after=tuple(waits), step=Step.FINISH))
    _prune(actions)
    return actions


def _is_entry(op: Op) -> bool:
    return isinstance(op, Barrier) or (isinstance(op, Wait) and bool(op.flag.initial))


def _passes_replays(op: Op) -> bool:
    return isinstance(op, Signal) and bool(op.flag.initial)


def _check(plan: Plan, rank: int) -> None:
    waited = set()
    vanish = {op.id for op in plan.ops(rank) if _passes_replays(op)}
    for op in plan.ops(rank):
        if vanish.intersection(op.deps):
            raise PlanError(f"{op}: depends on a Signal for the next replay, which the CUDA runtime gives at the end")
        if isinstance(op, Wait) and op.flag.initial and op.deps:
            raise PlanError(f"{op}: the CUDA runtime waits for the last replay at the start, after no other op")
        if isinstance(op, Barrier) and op.deps:
            raise PlanError(f"{op}: the CUDA runtime takes a Barrier at the start of a replay only")
        if isinstance(op, Wait):
            if op.flag in waited:
                raise PlanError(f"{op}: the CUDA runtime waits for a flag once in a replay")
            waited.add(op.flag)


def _streams(ops: Sequence[Op], branches: int) -> dict[int, int]:
    """The stream of each op. Sums, and copies within a rank, have one of their own behind the branches where GEMMs
    follow that need no sum: those are not to stand behind what a sum waits for."""
    found: dict[int, int] = {}
    computed = 0
    sums = BRANCH + branches if _sums_in_between(ops) else None
    for op in ops:
        if isinstance(op, Copy) and (link_of(op) or op.src.buffer in ("A", "B")):
            found[op.id] = COMM  # to or from a peer, or for peers to take
        elif isinstance(op, (Reduce, Copy)) and sums is not None:
            found[op.id] = sums
        elif isinstance(op, (Gemm, Reduce, Copy)):
            found[op.id] = BRANCH + computed % branches
            computed += 1
    waits = {op.id for op in ops if isinstance(op, Wait)}
    for op in ops:
        # A Wait goes where its first user is, so that nobody else is held up.
        for dep in op.deps:
            if dep in waits and dep not in found and op.id in found:
                found[dep] = found[op.id]
    for op in ops:
        if isinstance(op, Signal):
            found[op.id] = found.get(op.deps[-1], COMM) if op.deps else COMM
        found.setdefault(op.id, COMM)
    return found


def _sums_in_between(ops: Sequence[Op]) -> bool:
    """Whether a GEMM follows a sum that it does not need."""
    needs_sums: set[int] = set()
    summed = False
    for op in ops:
        if isinstance(op, Reduce) or not needs_sums.isdisjoint(op.deps):
            needs_sums.add(op.id)
            summed = True
        elif isinstance(op, Gemm) and summed:
            return True
    return False


def _runs(ops: Sequence[Op], streams: dict[int, int]) -> list[tuple[Op, ...]]:
    """Ops, with what one batch of memory operations can do put together: Signals of one op, and Waits of one op.

    Waits are not put together for different users: the first would be held up by what only the second needs.
    """
    users: dict[int, set[int]] = {}
    for op in ops:
        for dep in op.deps:
            users.setdefault(dep, set()).add(op.id)
    runs: list[list[Op]] = []
    for op in ops:
        last = runs[-1] if runs else []
        joins = (
            last
            and type(last[0]) is type(op)
            and streams[last[0].id] == streams[op.id]
            and (
                (isinstance(op, Signal) and op.deps == last[0].deps)
                or (isinstance(op, Wait) and not op.deps and users.get(op.id) == users.get(last[0].id))
            )
        )
        if joins:
            last.append(op)
        else:
            runs.append([op])
    return [tuple(run) for run in runs]


def most_flags(plan: Plan, gated: bool, copies: str) -> int:
    """How many flags the actions of each rank have at most, as :func:`lower` makes them."""
    flags = flags_of(plan) * (SLICES[copies] if in_slices(plan, copies) else 1)
    if gated:  # one for each result, of which copies are told
        flags += max(sum(isinstance(op, Gemm) for op in ops) for ops in plan.rank_ops)
    return flags


def _prune(actions: list[Action]) -> None:
    """Leave out what streams' own order, or an earlier wait of the same stream, says already."""
    streams = max(action.stream for action in actions) + 1
    # The last action of each stream that is known to come before the next one of this stream.
    known = [[-1] * streams for _ in range(streams)]
    after_each: list[list[int]] = []
    for number, action in enumerate(actions):
        mine = known[action.stream]
        needed = []
        for before in sorted(action.after, reverse=True):
            there = actions[before].stream
            if there != action.stream and mine[there] < before:
                needed.append(before)
                actions[before].awaited = True
                for stream, last in enumerate(after_each[before]):
                    mine[stream] = max(mine[stream], last)
        action.after = tuple(sorted(needed))
        mine[action.stream] = number
        after_each.append(list(mine))
