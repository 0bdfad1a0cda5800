"""From a rank's ops to actions on streams: who waits for whom, and on which stream. Nothing is bound yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, TypeGuard

from distgemm.ops import Barrier, Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, box_extents, contains, link_of
from distgemm.plan import Plan, PlanError
from distgemm.problem import DTYPE_BYTES
from distgemm.runtime.cuda.workspace import Step

__all__ = [
    "BRANCH",
    "COMM",
    "Action",
    "Sent",
    "flags_of",
    "lower",
    "most_flags",
    "moving",
    "on_one_stream",
    "waits_of",
]

COMM = 0
"""The one stream of copies to peers, or from them, and of signals that they have come. With two copies under way the
bandwidth of both together would be half of one's. Signals and the words of a replay's begin and end stay here too: on
a stream of their own they made captured graphs of several replays hold copies back behind waits.
"""
BRANCH = 1
"""The first stream of GEMMs, the caller's own; further branches follow, and a stream of sums."""

SLICES = {"slices": 4, "gemm": 16, "both": 16}
"""How many slices a chunk is sent in at most, by who copies it: a copy engine takes microseconds to begin one."""
SLICE_BYTES = {"slices": 1024, "gemm": 2048, "both": 2048}
"""How long slices of a row are at least: a kernel moves short ones more slowly."""
SLICE_UNIT = 256
"""Slices are multiples of so many bytes of a row, as the depths of tiles are."""

FEW_ROWS, ROWS_ABREAST = 512, 2048
"""Products of so few rows, computed one by one, read what they are multiplied by at a large part of memory's rate: they
have so few flops for each byte. So tiles of several are computed in turn, of so many rows at most."""
BALANCE = 1800
"""By so many columns a chunk of A is multiplied while another one comes, whatever its type; so deep is a product that
is computed while another one's result leaves, if that is of A's type: 700 TFLOP/s of bf16 beside 390 GB/s."""


@dataclass(frozen=True)
class Sent:
    """What a kernel of GEMMs copies, to a peer or within the rank: slices of one chunk.

    copies:  of each slice
    signals: behind each of them; empty: nobody is told
    waits:   what it waits for; None: for nothing
    """

    copies: tuple[Copy, ...]
    signals: tuple[Signal, ...] = ()
    waits: Wait | None = None


@dataclass(eq=False)
class Action:
    """Something put on a stream at once.

    stream: COMM, or BRANCH and up
    ops:    one Gemm, Copy or Reduce, or several Waits or Signals; all Gemms, where they are one kernel
    gates:  of several Gemms that are one kernel, what each waits for within it: one signal, or one for each slice, or
            for each source
    tells:  whom each of them tells of its result, None where nobody
    sends:  what the kernel copies besides, in order
    opens:  what it waits for before it copies anything; None: for nothing
    slice:  elements along k of a slice that it sends, or waits for; 0 where chunks are whole
    abreast: of several Gemms that are one kernel, of how many in a row tiles are computed in turn; empty: of each alone
    after:  actions on other streams that come before, by number
    step:   a step of the workspace's protocol (see :mod:`distgemm.runtime.cuda.workspace`), behind the ops
    awaited: whether another stream waits for it
    """

    stream: int
    ops: tuple[Op, ...]
    after: tuple[int, ...] = ()
    step: Step | None = None
    awaited: bool = field(default=False)
    gates: tuple[tuple[Wait, ...], ...] = ()
    tells: tuple[Signal | None, ...] = ()
    sends: tuple[Sent, ...] = ()
    opens: Wait | None = None
    slice: int = 0
    abreast: tuple[int, ...] = ()


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
        ops = _merged(plan, rank, ops, entered, gated)
    along = slices = 0
    if _in_slices(plan, copies):
        along = _slice_of(plan, copies)
        ops, slices = _sliced(plan, ops, along, copies != "gemm")
    kernel = None
    if gated:
        ops, kernel = _gated(plan, ops, entered, slices, copies, merge)
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


def on_one_stream(actions: Sequence[Action]) -> bool:
    """Whether all GEMMs and sums are on one stream, so that none runs beside another."""
    return all(action.stream <= BRANCH for action in actions)


def waits_of(actions: Sequence[Action]) -> list[Wait]:
    """What is waited for, on streams and within kernels."""
    return [
        op
        for action in actions
        for op in (
            *action.ops,
            *chain.from_iterable(action.gates),
            action.opens,
            *(sent.waits for sent in action.sends),
        )
        if isinstance(op, Wait)
    ]


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


def _slice_of(plan: Plan, copies: str) -> int:
    """Elements along k of a slice of what is copied to peers. Raises PlanError where nothing can be sent in slices.

    copies: "slices", "gemm" or "both", as in :func:`lower`
    """
    extents = {(*box_extents(op.src.box), plan.dtype(op.src)) for ops in plan.rank_ops for op in ops if _is_sent(op)}
    moved = _to_peers(plan)
    if len({(k, dtype) for _, _, k, dtype in extents}) != 1:
        others = moved and copies == "gemm"
        raise PlanError(
            f"{plan.schedule}: copies={copies!r} is for shards that are pushed to peers, and here are none"
            + ("; of all-reduces, for those with mechanism='store'" if others else "")
        )
    if not all(map(_is_sent, moved)):
        raise PlanError(f"{plan.schedule}: copies in slices are of shards, and here is passed on what has come")
    _, _, k, dtype = extents.pop()
    row = k * DTYPE_BYTES[dtype]
    count = min(SLICES[copies], max(1, row // SLICE_BYTES[copies]))
    return -(-row // count // SLICE_UNIT) * SLICE_UNIT // DTYPE_BYTES[dtype]


def _is_sent(op: Op) -> TypeGuard[Copy]:
    """Whether it copies from the rank's shard to a peer."""
    return isinstance(op, Copy) and op.src.buffer in ("A", "B") and op.src.rank == op.rank and link_of(op) is not None


def _to_peers(plan: Plan) -> list[Copy]:
    """Copies between ranks, of all ranks."""
    return [op for op in chain.from_iterable(plan.rank_ops) if isinstance(op, Copy) and link_of(op) is not None]


def _in_slices(plan: Plan, copies: str) -> bool:
    """Whether copies to peers have slices along k. Engines copy as a whole; so does a kernel where all that it copies
    to peers are results, from where they are finished."""
    moved = _to_peers(plan) if copies == "gemm" else []
    results = bool(moved) and all(op.src.buffer == "D" and op.src.rank == op.rank for op in moved)
    return copies != "engine" and not results


def _sliced(plan: Plan, ops: Sequence[Op], along: int, last: bool) -> tuple[list[Op], int]:
    """Ops in which copies of shards, the signals behind them, and the waits for these are one for each slice; and how
    many these are. Flag f becomes the flags from f times that number on. With ``last`` a copy is whole, with one
    signal, unless the peer multiplies it last."""
    cut = set(_multiplied_last(plan)) if last else None
    counts: dict[tuple[int, int], int] = {}  # of slices, by flag
    whole: set[tuple[int, int]] = set()  # flags of copies that are not cut
    for rank_ops in plan.rank_ops:
        sent = {op.id: _cut(op.src, along) for op in rank_ops if _is_sent(op)}
        kept = {op.id for op in rank_ops if _is_sent(op) and not _goes_into(cut, op)}
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
        if _is_sent(op) and _goes_into(cut, op):
            slices = count
        elif _has_flag(op) and (op.flag.rank, op.flag.number) not in whole:
            slices = counts.get((op.flag.rank, op.flag.number), 1)
        ids[op.id] = [op.id] if slices == 1 else [first + op.id * count + number for number in range(slices)]
        for number, own in enumerate(ids[op.id]):
            changed: dict[str, Any] = {"id": own}
            if _has_flag(op):
                changed["flag"] = op.flag._replace(number=op.flag.number * count + number)
            if _is_sent(op) and slices > 1:
                changed |= {"src": _cut(op.src, along)[number], "dst": _cut(op.dst, along)[number]}
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


def _cut(view: View, along: int) -> list[View]:
    batch, rows, (start, stop) = view.box
    return [view._replace(box=(batch, rows, (at, min(at + along, stop)))) for at in range(start, stop, along)]


def _gated(
    plan: Plan, ops: Sequence[Op], entered: Container[int], slices: int, copies: str, merge: bool
) -> tuple[list[Op], Action | None]:
    """All ops but GEMMs, what only they wait for, and what only they tell; the GEMMs as one action.

    slices: of which each chunk is, 0 where they are whole
    copies: with "gemm" they are a part of the action, with "both" those of what peers multiply last
    merge:  whether neighbouring chunks are copied together
    """
    gemms = [op for op in ops if isinstance(op, Gemm)]
    if not gemms:
        return list(ops), None
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    groups = _abreast(plan, gemms, _come(plan, gemms, waits, merge), bool(slices) and copies == "gemm")
    tells = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    multiplied = {op.id for op in gemms}
    passed_on = {op.id for op in ops if isinstance(op, Copy) and op.src.buffer == "slot" and link_of(op)}
    gates: list[tuple[Wait, ...]] = []
    first = gemms[0]
    for op in gemms:
        found = tuple(waits[dep] for dep in op.deps if dep in waits)
        further = {dep for dep in op.deps if dep not in waits and dep not in entered}
        if len(op.sources) > 1:  # each of them with a wait of its own
            alike = [wait.slot for wait in found] == [view.slot for view in op.sources]
        else:
            alike = len({wait.flag.number // (slices or 1) for wait in found}) <= 1
        if not alike or further:
            hint = "; a plan with more results has room for its sum" if further & passed_on else ""
            raise PlanError(
                f"{op}: one kernel for all GEMMs takes GEMMs that wait for one signal of a peer, or none, or for one "
                f"of each sum that they add{hint}"
            )
        if [*map(box_extents, (op.a.box, op.b.box))] != [*map(box_extents, (first.a.box, first.b.box))]:
            raise PlanError(
                f"{op} multiplies {_extents(op)}, {first} {_extents(first)}: one kernel for all GEMMs takes equal "
                "chunks; choose extents that ranks and chunks divide"
            )
        if slices and any(view.buffer == "slot" and view.box != view.frame for view in (op.a, op.b)):
            raise PlanError(f"{op}: a kernel that waits for slices takes GEMMs of whole chunks, and this is of a part")
        gates.append(found)
    brought = any(view.buffer == "slot" for op in gemms for view in (op.a, op.b))
    sums = any(op.sources for op in gemms)
    if (brought or not sums) and len({op.a for op in gemms}) > 1 and len({op.b for op in gemms}) > 1:
        raise PlanError(f"{plan.schedule}: one kernel for all GEMMs takes plans in which they share A or B")
    if brought and sums:
        raise PlanError(f"{plan.schedule}: one kernel for all GEMMs waits for operands or for sums, not for both")
    tells = {dep: op for dep, op in tells.items() if dep in multiplied}
    told = {op.id for op in tells.values()}
    others = [op for op in ops if op.id not in multiplied and op.id not in told]
    for other in others:
        here = isinstance(other, Reduce) or (isinstance(other, Copy) and link_of(other) is None)
        if here and not multiplied.isdisjoint(other.deps):
            # It would take a third stream, of which graphs may put one behind the waits of another.
            raise PlanError(f"{other}: one kernel for all GEMMs takes plans without sums and copies beside it")
    sent: tuple[Sent, ...] = ()
    if slices and copies in ("gemm", "both"):
        last = set(_multiplied_last(plan)) if copies == "both" else None
        sent, others = _sends(others, entered, slices, last)
    opens = None
    if sent and copies == "both":
        others, opens = _behind_engines(others, Flag(first.rank, flags_of(plan) * slices, 0, False))
    others = _told_here(plan, others, gemms, tells)
    if not slices and copies == "gemm":
        sent, others = _deliveries(others, entered)
    if tells and not sums:
        raise PlanError(
            f"{plan.schedule}: one kernel for all GEMMs tells of sums that are passed on, and here are none"
        )
    needed = {dep for op in others for dep in op.deps}
    kept = [op for op in others if not isinstance(op, Wait) or op.id in needed]
    # At peers, once they have left their last replay: behind engines' copies they have.
    writes = (bool(sent) and opens is None) or any(link_of(op) for op in gemms)
    told_of = tuple(tells.get(op.id) for op in gemms)
    kernel = Action(
        BRANCH, tuple(gemms), (0,) if writes else (), gates=tuple(gates), tells=told_of, sends=sent, opens=opens
    )
    if len(groups) < len(gemms):
        kernel.abreast = tuple(map(len, groups))
    return kept, kernel


def moving(gemms: Sequence[Gemm]) -> str:
    """The operand by which the GEMMs of a kernel differ, "a" or "b"; "a" where they do by both."""
    return "b" if len({op.a for op in gemms}) == 1 < len({op.b for op in gemms}) else "a"


def _abreast(plan: Plan, gemms: Sequence[Gemm], come: Mapping[int, int], sliced: bool) -> list[list[Gemm]]:
    """A rank's GEMMs in groups whose tiles are computed in turn, in the plan's order: those of few rows; or those of a
    chain, or of pairwise sums, that its ``lag`` puts in one place, of which some store at a peer and some do not, so
    that the link has something to carry until the end.

    come:   of the GEMMs that wait for an operand or a sum, by id, how many have it once this one has
    sliced: whether all operands that are waited for come in slices, those of several at once
    """
    place = _places(plan) if plan.mechanism == "store" else None
    if place is not None and len({place[op.rank, op.id] for op in gemms}) == len(gemms):
        place = None  # the own shard comes behind all others
    if _of_few_rows(plan, gemms):
        return _read_once(plan, gemms, come, sliced, place)
    if place is not None:
        return [list(group) for _, group in groupby(gemms, key=lambda op: place[op.rank, op.id])]
    return [[op] for op in gemms]


def _come(plan: Plan, gemms: Sequence[Gemm], waits: Container[int], merge: bool) -> dict[int, int]:
    """Of the GEMMs that wait, by id, how many have what they wait for once this one has: what is copied together comes
    together."""
    found: dict[int, int] = {}
    for group in _halved(_of_shards(plan, gemms[0].rank)) if merge else [[op] for op in gemms]:
        waiting = [op.id for op in group if any(dep in waits for dep in op.deps)]
        found |= dict.fromkeys(waiting, len(found) + len(waiting))
    return found


def _of_few_rows(plan: Plan, gemms: Sequence[Gemm]) -> bool:
    """Whether several GEMMs are to read what they are multiplied by once. Not where communication takes longer than
    multiplication of sums; and neither in chains nor between two ranks, where somebody waits for each."""
    rows, _, depth = _shape(gemms)
    sources = max(len(op.sources) for op in gemms)
    balance = BALANCE * DTYPE_BYTES[plan.dtype(gemms[0].out)] / DTYPE_BYTES[plan.dtype(gemms[0].a)]
    return rows <= FEW_ROWS and sources != 1 and not (sources and depth <= balance)


def _shape(gemms: Sequence[Gemm]) -> tuple[int, int, int]:
    """Extents of one of the GEMMs of a kernel: along the mode of the operand that moves, the other one, and k."""
    (_, m, k), (_, n, _) = box_extents(gemms[0].a.box), box_extents(gemms[0].b.box)
    return (n, m, k) if moving(gemms) == "b" else (m, n, k)


def _read_once(
    plan: Plan,
    gemms: Sequence[Gemm],
    come: Mapping[int, int],
    sliced: bool,
    place: Mapping[tuple[int, int], int] | None,
) -> list[list[Gemm]]:
    """GEMMs in groups that read what they are multiplied by once. Of those that wait for operands each group has as
    many as have come when it is begun; whole ones are to come in half that time, as tiles of a group are begun early.
    Of pairwise sums they are those that wait for none, where chunks follow one another those of one chunk.
    """
    rows, columns, _ = _shape(gemms)
    most = ROWS_ABREAST // rows
    groups: list[list[Gemm]] = []
    if any(op.sources for op in gemms):
        fixed = "a" if moving(gemms) == "b" else "b"

        def together(op: Gemm) -> tuple[Any, ...]:
            chunk = 0 if place is None else place[op.rank, op.id] // (plan.world_size - 1)
            return (op.id,) if op.id in come else (chunk, getattr(op, fixed))

        for _, run in groupby(gemms, key=together):
            group = list(run)
            groups += [group[first : first + most] for first in range(0, len(group), most)]
        return groups
    transfer = BALANCE / columns * (1 if sliced else 2)  # of what a product takes
    for number, op in enumerate(gemms):
        group = groups[-1] if groups else []
        if group and transfer * come.get(op.id, 0) <= number - len(group) and len(group) < most:
            group.append(op)
        else:
            groups.append([op])
    return groups


@lru_cache(maxsize=8)
def _places(plan: Plan) -> dict[tuple[int, int], int] | None:
    """The place of each GEMM, by rank and id, in a chain whose shards lag behind one another, and in pairwise sums that
    GEMMs add, where the own one does; None for other plans.

    No GEMM waits for one in its own place, or in a later one, on any rank, neither for its sum nor for room, and each
    rank has them in the order of places: ranks come to an end.
    """
    every = {(op.rank, op.id): op for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)}
    tellers: dict[Flag, list[tuple[int, int]]] = {}
    for op in chain.from_iterable(plan.rank_ops):
        if isinstance(op, Signal):
            tellers[op.flag] = [(op.rank, dep) for dep in op.deps if (op.rank, dep) in every]
    every_op = chain.from_iterable(plan.rank_ops)
    # Credits are waited for with the entry.
    flags = {(op.rank, op.id): op.flag for op in every_op if isinstance(op, Wait) and not op.flag.initial}
    needs = {
        key: [teller for dep in op.deps if (op.rank, dep) in flags for teller in tellers.get(flags[op.rank, dep], ())]
        for key, op in every.items()
    }
    place: dict[tuple[int, int], int] = {}
    begun, lag = Counter[int](), Counter[int]()
    for key, op in sorted(every.items(), key=lambda item: item[1].round):
        sums = [before for before in needs[key] if link_of(every[before]) is not None]
        if sums:
            lag.setdefault(op.rank, begun[op.rank])
            place[key] = place[sums[0]] + lag[op.rank]
        else:
            place[key] = begun[op.rank]
            begun[op.rank] += 1
    alike = len(set(begun.values())) == len(set(lag.values())) == 1 and len(begun) == len(lag) == plan.world_size
    orders = [[place[rank, op.id] for op in ops if (rank, op.id) in every] for rank, ops in enumerate(plan.rank_ops)]
    in_order = all(order == sorted(order) for order in orders)
    earlier = all(place[before] < place[key] for key, waited_for in needs.items() for before in waited_for)
    return place if alike and min(lag.values()) > 0 and in_order and earlier else None


def _sends(
    ops: Sequence[Op], entered: Container[int], slices: int, only: Container[tuple[int, int]] | None
) -> tuple[tuple[Sent, ...], list[Op]]:
    """Copies of shards with the signals behind them, those of a chunk together; and all other ops. only: to which rank
    and slot; None: to all."""
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    chunks: dict[tuple[int, int], list[tuple[Copy, Signal]]] = {}
    taken = set()
    for op in ops:
        if not _is_sent(op) or op.id not in signals or not all(dep in entered for dep in op.deps):
            continue
        if _goes_into(only, op):
            signal = signals[op.id]
            chunks.setdefault((op.dst.rank, signal.flag.number // slices), []).append((op, signal))
            taken |= {op.id, signal.id}
    found = [Sent(tuple(copy for copy, _ in pairs), tuple(signal for _, signal in pairs)) for pairs in chunks.values()]
    return tuple(found), [op for op in ops if op.id not in taken]


def _deliveries(ops: Sequence[Op], entered: Container[int]) -> tuple[tuple[Sent, ...], list[Op]]:
    """Copies of finished results to peers, each with what it waits for and the signal behind it, and copies from slots
    of what peers have finished; and all other ops.
    """
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    sent: list[Sent] = []
    taken = set()
    for op in ops:
        if isinstance(op, Copy):
            (wait,) = (waits[dep] for dep in op.deps if dep not in entered)
            behind = (signals[op.id],) if op.id in signals else ()
            sent.append(Sent((op,), behind, wait))
            taken |= {op.id, wait.id, *(signal.id for signal in behind)}
    return tuple(sent), [op for op in ops if op.id not in taken]


def _behind_engines(others: Sequence[Op], flag: Flag) -> tuple[list[Op], Wait | None]:
    """Ops in which this rank is told, too, when its last copy to a peer has ended; and the Wait for it, None where
    there is none. Until then a kernel that sends would take bandwidth from the copy engines, and more from its GEMMs.
    """
    copies = [op for op in others if _is_sent(op)]
    if not copies:
        return list(others), None
    last = copies[-1]
    at = 1 + max(number for number, op in enumerate(others) if op.id == last.id or last.id in op.deps)
    where = (last.rank, last.round, last.iteration, last.operand, last.tile, last.slot)
    told = Signal(-1, *where, (last.id,), flag)
    return [*others[:at], told, *others[at:]], Wait(-2, *where, (), flag, last.rank)


def _told_here(plan: Plan, others: Sequence[Op], gemms: Sequence[Gemm], tells: dict[int, Signal]) -> list[Op]:
    """Ops that wait for a word of this rank's own where they need a GEMM; ``tells`` gets who writes it."""
    first_id, first_flag = 1 + max(op.id for ops in plan.rank_ops for op in ops), flags_of(plan)
    number = {op.id: at for at, op in enumerate(gemms)}
    found: list[Op] = []
    waits: dict[int, int] = {}
    for op in others:
        for dep in op.deps:
            if dep not in number or dep in waits:
                continue
            gemm = gemms[number[dep]]
            if dep in tells:
                raise PlanError(f"{op}: it needs a GEMM of which a peer is told, and one kernel for all tells once")
            flag = Flag(gemm.rank, first_flag + number[dep], 0, False)
            waits[dep] = first_id + number[dep]
            where = (gemm.rank, gemm.round, gemm.iteration, "D", gemm.tile, gemm.slot)
            tells[dep] = Signal(-1 - number[dep], *where, (dep,), flag)
            found.append(Wait(waits[dep], *where, (), flag, gemm.rank))
        found.append(replace(op, deps=tuple(waits.get(dep, dep) for dep in op.deps)))
    return found


def flags_of(plan: Plan) -> int:
    """How many flags each rank has in a plan."""
    return 1 + max((op.flag.number for ops in plan.rank_ops for op in ops if isinstance(op, Wait)), default=-1)


def most_flags(plan: Plan, gated: bool, copies: str) -> int:
    """How many flags the actions of each rank have at most, as :func:`lower` makes them."""
    flags = flags_of(plan) * (SLICES[copies] if _in_slices(plan, copies) else 1)
    if gated:  # one for each result, of which copies are told
        flags += max(sum(isinstance(op, Gemm) for op in ops) for ops in plan.rank_ops)
    return flags


def _extents(op: Gemm) -> str:
    (batches, m, k), (_, n, _) = box_extents(op.a.box), box_extents(op.b.box)
    return "x".join(map(str, (m, n, k, batches)))


def _merged(plan: Plan, rank: int, ops: Sequence[Op], entered: Container[int], gated: bool) -> list[Op]:
    """Ops in which neighbouring chunks are one op, with the id of the first of them."""
    gemms, copies = [] if gated else _neighbours(plan, rank), _sent_together(plan, rank, entered, gated)
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
    return [group for group in _of_shards(plan, rank)[:-1] if len(group) > 1]


def _halved(groups: Sequence[list[Gemm]]) -> list[list[Gemm]]:
    """The last group as a half of it, a half of the rest, and so on."""
    if not groups:
        return []
    *others, rest = groups
    while len(rest) > 1:
        others.append(rest[: len(rest) // 2])
        rest = rest[len(rest) // 2 :]
    return [*others, rest]


def _of_shards(plan: Plan, rank: int) -> list[list[Gemm]]:
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


def _sent_together(plan: Plan, rank: int, entered: Container[int], gated: bool) -> list[list[Copy]]:
    """Copies to a peer, behind one another on both sides, of what the peer multiplies as one; where its GEMMs are one
    kernel, in halves of halves at the end."""
    together: dict[tuple[int, int], int] = {}
    for peer in range(plan.world_size):
        for group in _halved(_of_shards(plan, peer)) if gated else _neighbours(plan, peer):
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
