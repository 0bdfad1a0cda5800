"""From a rank's ops to actions on streams: who waits for whom, and on which stream. Nothing is bound yet."""

from __future__ import annotations

from collections.abc import Sequence

from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Reduce, Signal, Wait, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, Action
from distgemm.runtime.cuda.lowering.merge_copies import merged
from distgemm.runtime.cuda.lowering.single_kernel import flags_of, single_kernel
from distgemm.runtime.cuda.lowering.slices import in_slices, most_slices, slice_of, sliced
from distgemm.runtime.cuda.workspace import Step
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["lower", "most_flags"]


def lower(plan: Plan, rank: int, config: ExecutionConfig, *, separate_gemms: bool = False) -> list[Action]:
    """The actions of a rank, in an order in which they can be issued.

    Streams are first in, first out, and actions are issued in the plan's order, in which no op waits for a later
    one: whatever streams the hardware serialises, the ranks come to an end. There is one exception. A fused kernel
    whose sums copy engines pass on waits for copies of peers, and these copies wait for the kernel: the stream of
    copies and the stream of the kernel must run at once.

    Credits that pass from one replay to the next, and Barriers at the start, are part of the entry into a replay
    (see :mod:`distgemm.runtime.cuda.workspace`): their Waits and Signals are left out. A rank leaves a replay only
    after its peers have read its slots: the rank waits for ENTERED of each peer, which stands behind the peer's copies.
    What a fused kernel sends needs no such wait: no peer reads it from this rank's slots.

    Args:
        plan: of all ranks.
        rank: whose actions.
        config: how GPUs execute the plan, the same on all ranks.
        separate_gemms: launch a kernel for each GEMM although ``config`` says "single_kernel". The other ranks see no
            difference: flags and slices are those of ``config``.

    Raises:
        PlanError: for a Barrier that is not at the start, a flag that is waited for twice in a replay, ops that
            depend on what is left out, and GEMMs that cannot be one kernel.
    """
    _check(plan, rank)
    ops = [op for op in plan.ops(rank) if not _passes_replays(op)]
    entered = {op.id for op in ops if _is_entry(op)}
    ops = [op for op in ops if not _is_entry(op)]
    fused = config.single_kernel and not separate_gemms
    if config.merge_copies and not separate_gemms:
        ops = merged(plan, rank, ops, entered, fused)
    slice_k = slices = 0
    if in_slices(plan, config.transport):
        slice_k = slice_of(plan, config.transport)
        ops, slices = sliced(plan, ops, slice_k, last=config.transport == "copy_engine_slices")
    kernel = None
    if fused:
        ops, kernel = single_kernel(plan, ops, entered, slices, config)
    if kernel is not None and kernel.kernel is not None:
        kernel.kernel.slice_k = slice_k
    streams = _streams(ops, 1 if fused else config.gemm_streams)
    actions = [Action(COMM, (), step=Step.ENTRY)]
    of: dict[int, int] = dict.fromkeys(entered, 0)
    waits = []
    for run in _runs(ops, streams):
        local_wait = any(isinstance(op, Wait) and op.peer == rank for op in run)
        if kernel is not None and kernel not in actions and (local_wait or streams[run[0].id] == GEMM_STREAM):
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
    stream = GEMM_STREAM if kernel is not None and not ops else COMM
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


def _streams(ops: Sequence[Op], gemm_streams: int) -> dict[int, int]:
    """The stream of each op. Sums, and copies within a rank, have one of their own behind the gemm_streams where GEMMs
    follow that need no sum: those are not to stand behind what a sum waits for."""
    found: dict[int, int] = {}
    computed = 0
    sums = GEMM_STREAM + gemm_streams if _sums_in_between(ops) else None
    for op in ops:
        if isinstance(op, Copy) and (link_of(op) or op.src.buffer in ("A", "B")):
            found[op.id] = COMM  # to or from a peer, or for peers to take
        elif isinstance(op, (Reduce, Copy)) and sums is not None:
            found[op.id] = sums
        elif isinstance(op, (Gemm, Reduce, Copy)):
            found[op.id] = GEMM_STREAM + computed % gemm_streams
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


def most_flags(plan: Plan, config: ExecutionConfig) -> int:
    """The most flags that the actions of any rank have, as :func:`lower` makes them."""
    flags = flags_of(plan)
    if in_slices(plan, config.transport):
        flags *= most_slices(config.transport)
    if config.single_kernel:  # one for each result that copies on streams wait for
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
