"""All GEMMs of a rank as one kernel: what each of them waits for and done_flags, and what the kernel copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any

from distgemm.gemm.spec import Moving
from distgemm.plan.ops import Copy, Flag, Gemm, Op, Reduce, Signal, Wait, box_extents, link_of
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.runtime.cuda.lowering.actions import GEMM_STREAM, Action, Send, SingleKernel
from distgemm.runtime.cuda.lowering.merge_copies import halved, of_shards
from distgemm.runtime.cuda.lowering.slices import is_sent
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["flags_of", "moving", "single_kernel"]

FEW_ROWS, INTERLEAVED_ROWS = 512, 2048
"""Products of so few rows, computed one by one, read what they are multiplied by at a large part of memory's rate: they
have so few flops for each byte. So tiles of several are computed in turn, of so many rows at most."""
BALANCE = 1800
"""By so many columns a chunk of A is multiplied while another one comes, whatever its type; so deep is a product that
is computed while another one's result leaves, if that is of A's type: 700 TFLOP/s of bf16 beside 390 GB/s."""


def single_kernel(
    plan: Plan, ops: Sequence[Op], entered: Container[int], slices: int, config: ExecutionConfig
) -> tuple[list[Op], Action | None]:
    """The ops that remain beside the fused kernel, and the fused kernel as one action; None without GEMMs.

    The kernel takes all GEMMs, the Waits that only they need, the Signals that stand behind one of them, and with
    transport "sm" the copies.

    Args:
        plan: of all ranks.
        ops: of one rank, without what the entry into a replay does.
        entered: ids of the ops that the entry does.
        slices: number of slices of a chunk; 0: chunks are whole.
        config: how GPUs execute the plan.

    Raises:
        PlanError: for GEMMs that cannot be one kernel.
    """
    gemms = [op for op in ops if isinstance(op, Gemm)]
    if not gemms:
        return list(ops), None
    by_sm = config.transport == "sm"
    wait_flags = _wait_flags(ops, gemms, entered, slices)
    groups = _interleaved(
        plan, gemms, _arrived(plan, gemms, wait_flags, config.merge_copies), sliced=bool(slices) and by_sm
    )
    sums = _adds(plan, gemms)
    multiplied = {op.id for op in gemms}
    done_flags = {
        op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1 and op.deps[0] in multiplied
    }
    signalled = {op.id for op in done_flags.values()}
    others = [op for op in ops if op.id not in multiplied and op.id not in signalled]
    _check_others(others, multiplied)
    sends: tuple[Send, ...] = ()
    if slices and by_sm:
        sends, others = _sends(others, entered, slices)
    others = _with_local_flags(plan, others, gemms, done_flags)
    if not slices and by_sm:
        sends, others = _final_copies(others, entered)
    if done_flags and not sums:
        raise PlanError(
            f"{plan.schedule}: one kernel for all GEMMs sets flags for sums that are passed on, and this plan has none"
        )
    needed = {dep for op in others for dep in op.deps}
    kept = [op for op in others if not isinstance(op, Wait) or op.id in needed]
    # The kernel writes peers' memory only after they have left their last replay.
    writes_peers = bool(sends) or any(link_of(op) for op in gemms)
    interleave = tuple(map(len, groups)) if len(groups) < len(gemms) else ()
    kernel = SingleKernel(wait_flags, tuple(done_flags.get(op.id) for op in gemms), sends, tile_interleave=interleave)
    return kept, Action(GEMM_STREAM, tuple(gemms), (0,) if writes_peers else (), kernel=kernel)


def _wait_flags(
    ops: Sequence[Op], gemms: Sequence[Gemm], entered: Container[int], slices: int
) -> tuple[tuple[Wait, ...], ...]:
    """What each GEMM waits for. Raises PlanError where the kernel cannot, and for GEMMs of different extents."""
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    passed_on = {op.id for op in ops if isinstance(op, Copy) and op.src.buffer == "slot" and link_of(op)}
    wait_flags: list[tuple[Wait, ...]] = []
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
        wait_flags.append(found)
    return tuple(wait_flags)


def _adds(plan: Plan, gemms: Sequence[Gemm]) -> bool:
    """Whether the GEMMs add sums. Raises PlanError where they wait for operands, too, and where they share none."""
    brought = any(view.buffer == "slot" for op in gemms for view in (op.a, op.b))
    sums = any(op.sources for op in gemms)
    if (brought or not sums) and len({op.a for op in gemms}) > 1 and len({op.b for op in gemms}) > 1:
        raise PlanError(f"{plan.schedule}: one kernel for all GEMMs takes plans in which they share A or B")
    if brought and sums:
        raise PlanError(f"{plan.schedule}: one kernel for all GEMMs waits for operands or for sums, not for both")
    return sums


def _check_others(others: Sequence[Op], multiplied: set[int]) -> None:
    """Raises PlanError for what would stand on a third stream, of which graphs may put one behind the waits of
    another."""
    for op in others:
        here = isinstance(op, Reduce) or (isinstance(op, Copy) and link_of(op) is None)
        if here and not multiplied.isdisjoint(op.deps):
            raise PlanError(f"{op}: one kernel for all GEMMs takes plans without sums and copies beside it")


def moving(gemms: Sequence[Gemm]) -> Moving:
    """The operand by which the GEMMs of a kernel differ, "a" or "b"; "a" where they do by both."""
    return "b" if len({op.a for op in gemms}) == 1 < len({op.b for op in gemms}) else "a"


def _interleaved(plan: Plan, gemms: Sequence[Gemm], arrived: Mapping[int, int], sliced: bool) -> list[list[Gemm]]:
    """A rank's GEMMs in groups whose tiles are computed in turn, in the plan's order: those of few rows; or those of a
    chain, or of pairwise sums, that its ``stagger`` puts in one place, of which some store at a peer and some do not, so
    that the link has something to carry until the end.

    arrived: of the GEMMs that wait for an operand or a sum, by id, how many have it once this one has
    sliced: whether all operands that are waited for come in slices, those of several at once
    """
    place = _places(plan) if plan.mechanism == "store" else None
    if place is not None and len({place[op.rank, op.id] for op in gemms}) == len(gemms):
        place = None  # the own shard comes behind all others
    if _of_few_rows(plan, gemms):
        return _read_once(plan, gemms, arrived, sliced, place)
    if place is not None:
        return [list(group) for _, group in groupby(gemms, key=lambda op: place[op.rank, op.id])]
    return [[op] for op in gemms]


def _arrived(
    plan: Plan, gemms: Sequence[Gemm], wait_flags: Sequence[Sequence[Wait]], merge_copies: bool
) -> dict[int, int]:
    """Of the GEMMs that wait, by id, how many have what they wait for once this one has: what is copied together comes
    together."""
    waiting = {op.id for op, waits in zip(gemms, wait_flags, strict=True) if waits}
    found: dict[int, int] = {}
    for group in halved(of_shards(plan, gemms[0].rank)) if merge_copies else [[op] for op in gemms]:
        together = [op.id for op in group if op.id in waiting]
        found |= dict.fromkeys(together, len(found) + len(together))
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
    arrived: Mapping[int, int],
    sliced: bool,
    place: Mapping[tuple[int, int], int] | None,
) -> list[list[Gemm]]:
    """GEMMs in groups that read what they are multiplied by once. Of those that wait for operands each group has as
    many as have come when it is begun; whole ones are to come in half that time, as tiles of a group are begun early.
    Of pairwise sums they are those that wait for none, where chunks follow one another those of one chunk.
    """
    rows, columns, _ = _shape(gemms)
    most = INTERLEAVED_ROWS // rows
    groups: list[list[Gemm]] = []
    if any(op.sources for op in gemms):
        fixed = "a" if moving(gemms) == "b" else "b"

        def together(op: Gemm) -> tuple[Any, ...]:
            chunk = 0 if place is None else place[op.rank, op.id] // (plan.world_size - 1)
            return (op.id,) if op.id in arrived else (chunk, getattr(op, fixed))

        for _, run in groupby(gemms, key=together):
            group = list(run)
            groups += [group[first : first + most] for first in range(0, len(group), most)]
        return groups
    transfer = BALANCE / columns * (1 if sliced else 2)  # of what a product takes
    for number, op in enumerate(gemms):
        group = groups[-1] if groups else []
        if group and transfer * arrived.get(op.id, 0) <= number - len(group) and len(group) < most:
            group.append(op)
        else:
            groups.append([op])
    return groups


@lru_cache(maxsize=8)
def _places(plan: Plan) -> dict[tuple[int, int], int] | None:
    """The place of each GEMM, by rank and id, in a chain whose shards stagger behind one another, and in pairwise sums that
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
    begun, stagger = Counter[int](), Counter[int]()
    for key, op in sorted(every.items(), key=lambda item: item[1].round):
        sums = [before for before in needs[key] if link_of(every[before]) is not None]
        if sums:
            stagger.setdefault(op.rank, begun[op.rank])
            place[key] = place[sums[0]] + stagger[op.rank]
        else:
            place[key] = begun[op.rank]
            begun[op.rank] += 1
    alike = (
        len(set(begun.values())) == len(set(stagger.values())) == 1 and len(begun) == len(stagger) == plan.world_size
    )
    orders = [[place[rank, op.id] for op in ops if (rank, op.id) in every] for rank, ops in enumerate(plan.rank_ops)]
    in_order = all(order == sorted(order) for order in orders)
    earlier = all(place[before] < place[key] for key, waited_for in needs.items() for before in waited_for)
    return place if alike and min(stagger.values()) > 0 and in_order and earlier else None


def _sends(ops: Sequence[Op], entered: Container[int], slices: int) -> tuple[tuple[Send, ...], list[Op]]:
    """Copies of shards with the signals behind them, those of a chunk together; and all other ops."""
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    chunks: dict[tuple[int, int], list[tuple[Copy, Signal]]] = {}
    taken = set()
    for op in ops:
        if not is_sent(op) or op.id not in signals or not all(dep in entered for dep in op.deps):
            continue
        signal = signals[op.id]
        chunks.setdefault((op.dst.rank, signal.flag.number // slices), []).append((op, signal))
        taken |= {op.id, signal.id}
    found = [Send(tuple(copy for copy, _ in pairs), tuple(signal for _, signal in pairs)) for pairs in chunks.values()]
    return tuple(found), [op for op in ops if op.id not in taken]


def _final_copies(ops: Sequence[Op], entered: Container[int]) -> tuple[tuple[Send, ...], list[Op]]:
    """Copies of finished results to peers, each with what it waits for and the signal behind it, and copies from slots
    of what peers have finished; and all other ops.
    """
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    sent: list[Send] = []
    taken = set()
    for op in ops:
        if isinstance(op, Copy):
            needed = [dep for dep in op.deps if dep not in entered]
            if len(needed) != 1 or needed[0] not in waits:
                raise PlanError(
                    f"{op}: a kernel delivers what waits for one signal, and this waits for room, too; "
                    "workspace='full' has room for all"
                )
            wait = waits[needed[0]]
            behind = (signals[op.id],) if op.id in signals else ()
            sent.append(Send((op,), behind, wait))
            taken |= {op.id, wait.id, *(signal.id for signal in behind)}
    return tuple(sent), [op for op in ops if op.id not in taken]


def _with_local_flags(
    plan: Plan, others: Sequence[Op], gemms: Sequence[Gemm], done_flags: dict[int, Signal]
) -> list[Op]:
    """Ops that wait for a word of this rank's own where they need a GEMM; ``done_flags`` gets who writes it."""
    first_id, first_flag = 1 + max(op.id for ops in plan.rank_ops for op in ops), flags_of(plan)
    number = {op.id: at for at, op in enumerate(gemms)}
    found: list[Op] = []
    waits: dict[int, int] = {}
    for op in others:
        for dep in op.deps:
            if dep not in number or dep in waits:
                continue
            gemm = gemms[number[dep]]
            if dep in done_flags:
                raise PlanError(
                    f"{op}: it needs a GEMM of which a peer is told, and one kernel for all done_flags once"
                )
            flag = Flag(gemm.rank, first_flag + number[dep], 0, False)
            waits[dep] = first_id + number[dep]
            where = (gemm.rank, gemm.round, gemm.iteration, "D", gemm.tile, gemm.slot)
            done_flags[dep] = Signal(-1 - number[dep], *where, (dep,), flag)
            found.append(Wait(waits[dep], *where, (), flag, gemm.rank))
        found.append(replace(op, deps=tuple(waits.get(dep, dep) for dep in op.deps)))
    return found


def _extents(op: Gemm) -> str:
    (batches, m, k), (_, n, _) = box_extents(op.a.box), box_extents(op.b.box)
    return "x".join(map(str, (m, n, k, batches)))


def flags_of(plan: Plan) -> int:
    """How many flags each rank has in a plan."""
    return 1 + max((op.flag.number for ops in plan.rank_ops for op in ops if isinstance(op, Wait)), default=-1)
