"""From a rank's ops to actions on streams: which stream each op takes, and which actions wait for which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distgemm.plan.exchanges import Exchange, ops_with_exchanges
from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Reduce, Signal, Wait, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, Action
from distgemm.runtime.cuda.lowering.merge_copies import merge_copies
from distgemm.runtime.cuda.workspace import Step
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["check_across", "copies_first", "lower", "most_flags"]


def lower(plan: Plan, rank: int, config: ExecutionConfig) -> list[Action]:
    """The actions of a rank, in an order in which they can be issued.

    Streams are first in, first out, and actions are issued in the plan's order, in which no op waits for a later
    one: whatever streams the hardware serialises, the ranks come to an end.

    Credits that pass from one replay to the next, and Barriers at the start, are part of the entry into a replay
    (see :mod:`distgemm.runtime.cuda.workspace`): their Waits and Signals are left out. A rank leaves a replay only
    after its peers have read its slots: the rank waits for ENTERED of each peer, which stands behind the peer's copies.

    Between hosts there is no such protocol, and there are no flags. All that a rank sends to other hosts and receives
    from them in a round is one Exchange, on a stream of its own.

    Args:
        plan: of all ranks.
        rank: whose actions.
        config: how GPUs execute the plan, the same on all ranks.

    Raises:
        PlanError: for a Barrier that is not at the start, a flag that is waited for twice in a replay, ops that
            depend on what is left out, and what ``ops_with_exchanges`` refuses.
        ValueError: for a ``config`` that does not work across hosts.
    """
    check_across(plan, config)
    _check(plan, rank)
    ops, entry = _without_entry(ops_with_exchanges(plan, rank))
    if config.merge_copies:
        ops = merge_copies(plan, rank, ops, entry)
    actions = _issue(ops, entry, _assign_streams(ops, config.gemm_streams))
    _prune_after(actions)
    return actions


def check_across(plan: Plan, config: ExecutionConfig) -> None:
    """Raise ValueError for an execution that does not work across the hosts of a plan."""
    given = {"execution": config.execution, "wait_by": config.wait_by, "merge_copies": config.merge_copies}
    wanted = {"execution": "multi_kernel", "wait_by": "memory_op", "merge_copies": False}
    if plan.ranks_per_host is not None and given != wanted:
        differs = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != wanted[name])
        raise ValueError(
            f"{plan.schedule} on hosts of {plan.ranks_per_host} ranks takes execution='multi_kernel', "
            f"wait_by='memory_op' and merge_copies=False, got {differs}: other executions stay within one host"
        )


def copies_first(actions: Sequence[Action]) -> list[Action]:
    """The actions in another order: first those that come after no action on the streams of GEMMs.

    A caller that multiplies itself may take its time between two GEMMs. No peer waits for that.
    """
    late: set[int] = set()
    streams: set[int] = set()
    for number, action in enumerate(actions):
        if action.stream >= GEMM_STREAM or action.stream in streams or not late.isdisjoint(action.after):
            late.add(number)
            streams.add(action.stream)
    order = sorted(range(len(actions)), key=late.__contains__)
    place = {number: at for at, number in enumerate(order)}
    return [replace(actions[number], after=tuple(place[each] for each in actions[number].after)) for number in order]


def most_flags(plan: Plan) -> int:
    """The most flags that the actions of any rank have, as :func:`lower` makes them."""
    return max(size.flags for size in plan.sizes)


# --- the entry ------------------------------------------------------------------------------------------


def _is_entry(op: Op) -> bool:
    return isinstance(op, Barrier) or (isinstance(op, Wait) and bool(op.flag.initial))


def _is_for_next_replay(op: Op) -> bool:
    return isinstance(op, Signal) and bool(op.flag.initial)


def _without_entry(ops: Sequence[Op]) -> tuple[list[Op], set[int]]:
    """The ops that the replay protocol does not replace, and the ids of those that the entry does."""
    entry = {op.id for op in ops if _is_entry(op)}
    return [op for op in ops if not _is_for_next_replay(op) and not _is_entry(op)], entry


def _check(plan: Plan, rank: int) -> None:
    awaited = set()
    left_out = {op.id for op in plan.ops(rank) if _is_for_next_replay(op)}
    for op in plan.ops(rank):
        if left_out.intersection(op.deps):
            raise PlanError(f"{op}: depends on a Signal for the next replay, which the CUDA runtime gives at the end")
        if isinstance(op, Wait) and op.flag.initial and op.deps:
            raise PlanError(f"{op}: the CUDA runtime waits for the last replay at the start, after no other op")
        if isinstance(op, Barrier) and op.deps:
            raise PlanError(f"{op}: the CUDA runtime takes a Barrier at the start of a replay only")
        if isinstance(op, Wait):
            if op.flag in awaited:
                raise PlanError(f"{op}: the CUDA runtime waits for a flag once in a replay")
            awaited.add(op.flag)


# --- streams --------------------------------------------------------------------------------------------


def _assign_streams(ops: Sequence[Op], gemm_streams: int) -> dict[int, int]:
    """The stream of each op, by id.

    Sums, and copies within a rank, have a stream of their own where GEMMs follow that need no sum: those GEMMs must not
    stand behind what a sum waits for.
    """
    found: dict[int, int] = {}
    computed = 0
    sums = GEMM_STREAM + gemm_streams if _gemm_follows_sum(ops) else None
    across = GEMM_STREAM + gemm_streams + 1
    for op in ops:
        if isinstance(op, Exchange):
            found[op.id] = across
        elif isinstance(op, Copy) and (link_of(op) or op.src.buffer not in ("D", "slot")):
            found[op.id] = COMM  # to or from a peer, or for peers to read
        elif isinstance(op, (Reduce, Copy)) and sums is not None:
            found[op.id] = sums
        elif isinstance(op, (Gemm, Reduce, Copy)):
            found[op.id] = GEMM_STREAM + computed % gemm_streams
            computed += 1
    waits = {op.id for op in ops if isinstance(op, Wait)}
    for op in ops:
        # A Wait stands on the stream of its first user, so that it holds up no other op.
        for dep in op.deps:
            if dep in waits and dep not in found and op.id in found:
                found[dep] = found[op.id]
    for op in ops:
        if isinstance(op, Signal):
            found[op.id] = found.get(op.deps[-1], COMM) if op.deps else COMM
        found.setdefault(op.id, COMM)
    return found


def _gemm_follows_sum(ops: Sequence[Op]) -> bool:
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


# --- actions --------------------------------------------------------------------------------------------


def _issue(ops: Sequence[Op], entry: set[int], streams: dict[int, int]) -> list[Action]:
    """The actions of the ops and of the replay protocol; ``after`` names every action that must come before."""
    actions = [Action(COMM, (), step=Step.ENTRY)]
    action_of = dict.fromkeys(entry, 0)  # by the op's id
    waiting: list[int] = []  # actions that wait for other ranks
    for batch in _batches(ops, streams):
        stream = streams[batch[0].id]
        after = {action_of[dep] for op in batch for dep in op.deps}
        if isinstance(batch[0], Signal):
            after.add(0)  # the peer has left its last replay: it will not clear the flag any more
        before = actions[-1]
        if isinstance(batch[0], Wait) and not after and stream == before.stream == COMM and _ends_in_signal(before):
            before.ops += batch  # one batch of memory operations
        else:
            actions.append(Action(stream, batch, tuple(sorted(after))))
        action_of |= {op.id: len(actions) - 1 for op in batch}
        if isinstance(batch[0], (Wait, Exchange)):
            waiting.append(len(actions) - 1)
    last = max(number for number, action in enumerate(actions) if action.stream == COMM)
    if isinstance(next(iter(actions[last].ops), None), Signal):
        actions[last].step = Step.ENTERED  # one batch of memory operations
    else:
        actions.append(Action(COMM, (), step=Step.ENTERED))
    actions.append(Action(COMM, (), after=tuple(waiting), step=Step.FINISH))
    return actions


def _ends_in_signal(action: Action) -> bool:
    return bool(action.ops) and isinstance(action.ops[-1], Signal)


def _batches(ops: Sequence[Op], streams: dict[int, int]) -> list[tuple[Op, ...]]:
    """Ops in batches: the Signals behind one op, the Waits for one op, and every other op alone.

    Waits for different ops are not put together: the first op would be held up by what only the second needs.
    """
    users: dict[int, set[int]] = {}
    for op in ops:
        for dep in op.deps:
            users.setdefault(dep, set()).add(op.id)
    batches: list[list[Op]] = []
    for op in ops:
        last = batches[-1] if batches else []
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
            batches.append([op])
    return [tuple(batch) for batch in batches]


def _prune_after(actions: list[Action]) -> None:
    """Remove from ``after`` what the order of streams, or an earlier wait of the same stream, implies."""
    streams = max(action.stream for action in actions) + 1
    # For each stream, the last action of every stream that is known to come before its next action.
    known = [[-1] * streams for _ in range(streams)]
    known_after: list[list[int]] = []
    for number, action in enumerate(actions):
        mine = known[action.stream]
        after = []
        for before in sorted(action.after, reverse=True):
            there = actions[before].stream
            if there != action.stream and mine[there] < before:
                after.append(before)
                actions[before].awaited = True
                for stream, last in enumerate(known_after[before]):
                    mine[stream] = max(mine[stream], last)
        action.after = tuple(sorted(after))
        mine[action.stream] = number
        known_after.append(list(mine))
