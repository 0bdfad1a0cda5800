"""The pass that makes all GEMMs of a rank one kernel: what it waits for, which flags it sets, what it copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby

from distgemm.gemm.spec import Moving
from distgemm.plan.ops import Copy, Flag, Gemm, Op, Reduce, Signal, View, Wait, box_extents, link_of
from distgemm.plan.plan import Plan, PlanError, once_for_structure
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.runtime.cuda.lowering.actions import GEMM_STREAM, Action, Send, SingleKernel
from distgemm.runtime.cuda.lowering.merge_copies import gemms_by_shard, halve_last
from distgemm.runtime.cuda.lowering.slices import copies_shard, ids_of
from distgemm.runtime.executable import ExecutionConfig

__all__ = ["flags_of", "fuse_gemms", "moving"]

MAX_NARROW_ROWS, MAX_INTERLEAVED_ROWS = 512, 2048
"""Rows of a narrow GEMM at most, and of a group of interleaved GEMMs together. Narrow GEMMs have few flops for each
byte. One by one they read the shared operand at a large part of the memory's rate; interleaved they read it once."""
BALANCE_EXTENT = 1800
"""Extent at which a chunk takes as long to multiply as to send: columns of B for a chunk of A of any type, and depth k
for a result of A's type. It follows from 700 TFLOP/s of bf16 and 390 GB/s."""


def fuse_gemms(
    plan: Plan, ops: Sequence[Op], entry: Container[int], slices: int, slice_k: int, config: ExecutionConfig
) -> tuple[list[Op], Action | None]:
    """The ops that remain beside the fused kernel, and the fused kernel as one action; None without GEMMs.

    The kernel takes all GEMMs, the Waits that only they need, the Signals that stand behind one of them, and with
    transport "sm" the copies.

    Args:
        plan: of all ranks.
        ops: of one rank, without those of the entry.
        entry: ids of the ops that the entry into a replay does.
        slices: number of slices of a chunk; 0: chunks are whole.
        slice_k: elements along k of a slice; 0: chunks are whole.
        config: how GPUs execute the plan.

    Raises:
        PlanError: for GEMMs that cannot be one kernel.
    """
    gemms = [op for op in ops if isinstance(op, Gemm)]
    moved = next((op for op in ops if op.operand in SCALE_OPERANDS.values()), None)
    if moved is not None:
        raise PlanError(
            f"{moved}: the fused kernel takes scales that each rank has already, and here they move with their tiles; "
            "execution='multi_kernel' takes them"
        )
    scaling = plan.problem.scaling
    if scaling is not None and (scaling.a.columns, scaling.b.columns) != (None, None):
        raise PlanError(
            f"the fused kernel takes scales of tensors and rows, not of blocks, and the problem has {scaling}; "
            "execution='multi_kernel' takes scales of 1x128 and 128x128 blocks"
        )
    if not gemms:
        return list(ops), None
    kernel_copies = config.transport == "sm"
    wait_flags = _wait_flags(ops, gemms, entry, slices)
    arrived = _arrived(plan, gemms, wait_flags, config.merge_copies)
    groups = _interleaved_groups(plan, gemms, arrived, sliced=bool(slices) and kernel_copies)
    adds = _add_sums(plan, gemms)
    multiplied = {op.id for op in gemms}
    done_flags = {
        op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1 and op.deps[0] in multiplied
    }
    signals = {op.id for op in done_flags.values()}
    others = [op for op in ops if op.id not in multiplied and op.id not in signals]
    _check_others(others, multiplied)
    sends: tuple[Send, ...] = ()
    if slices and kernel_copies:
        sends, others = _sends_of_shards(others, entry, slices)
    others = _with_local_flags(plan, others, gemms, done_flags)
    if not slices and kernel_copies:
        sends, others = _sends_of_results(others, entry)
    if done_flags and not adds:
        raise PlanError(
            f"{plan.schedule}: the fused kernel sets flags for sums that GEMMs add, and here GEMMs add no sums"
        )
    needed = {dep for op in others for dep in op.deps}
    kept = [op for op in others if not isinstance(op, Wait) or op.id in needed]
    # The kernel writes peers' memory only after they have left their last replay.
    writes_peers = bool(sends) or any(link_of(op) for op in gemms)
    kernel = SingleKernel(
        wait_flags,
        tuple(done_flags.get(op.id) for op in gemms),
        sends,
        slice_k,
        tile_interleave=tuple(map(len, groups)) if len(groups) < len(gemms) else (),
    )
    return kept, Action(GEMM_STREAM, tuple(gemms), (0,) if writes_peers else (), kernel=kernel)


def flags_of(plan: Plan) -> int:
    """How many flags each rank has in a plan."""
    return max(size.flags for size in plan.sizes)


def moving(gemms: Sequence[Gemm]) -> Moving:
    """The operand by which the GEMMs of a kernel differ; "a" where they differ by both."""
    return "b" if len({op.a for op in gemms}) == 1 < len({op.b for op in gemms}) else "a"


# --- what the kernel waits for --------------------------------------------------------------------------


def _wait_flags(
    ops: Sequence[Op], gemms: Sequence[Gemm], entry: Container[int], slices: int
) -> tuple[tuple[Wait, ...], ...]:
    """What each GEMM waits for. Raises PlanError where the kernel cannot, and for GEMMs of different extents."""
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    passed_on = {op.id for op in ops if isinstance(op, Copy) and op.src.buffer == "slot" and link_of(op)}
    wait_flags: list[tuple[Wait, ...]] = []
    first = gemms[0]
    for op in gemms:
        found = tuple(waits[dep] for dep in op.deps if dep in waits)
        further = {dep for dep in op.deps if dep not in waits and dep not in entry}
        if len(op.sources) > 1:  # each of them with a wait of its own
            fits = [wait.slot for wait in found] == [view.slot for view in op.sources]
        else:
            fits = len({wait.flag.number // (slices or 1) for wait in found}) <= 1
        if not fits or further:
            hint = "; a plan with more send_slots has room for its sum" if further & passed_on else ""
            raise PlanError(
                f"{op}: the fused kernel takes GEMMs that wait for one signal of a peer, for none, or for one signal "
                f"of each sum that they add{hint}"
            )
        if [*map(box_extents, (op.a.box, op.b.box))] != [*map(box_extents, (first.a.box, first.b.box))]:
            raise PlanError(
                f"{op} multiplies {_extents(op)}, {first} {_extents(first)}: the fused kernel takes equal chunks; "
                "choose extents that ranks and chunks divide"
            )
        if slices and any(view.buffer == "slot" and view.box != view.frame for view in (op.a, op.b)):
            raise PlanError(f"{op}: a kernel that waits for slices takes GEMMs of whole chunks, and this is of a part")
        wait_flags.append(found)
    return tuple(wait_flags)


def _add_sums(plan: Plan, gemms: Sequence[Gemm]) -> bool:
    """Whether the GEMMs add sums.

    Raises PlanError where they wait for operands too, and where they share neither A nor B.
    """
    receive_operands = any(view.buffer == "slot" for op in gemms for view in (op.a, op.b))
    sums = any(op.sources for op in gemms)
    if (receive_operands or not sums) and len({op.a for op in gemms}) > 1 and len({op.b for op in gemms}) > 1:
        raise PlanError(f"{plan.schedule}: the fused kernel takes plans in which all GEMMs of a rank share A or B")
    if receive_operands and sums:
        raise PlanError(f"{plan.schedule}: the fused kernel waits for operands or for sums, not for both")
    return sums


def _check_others(others: Sequence[Op], multiplied: set[int]) -> None:
    """Raises PlanError for sums and copies of a rank's own results.

    They would take a third stream, and a graph may put one stream behind the waits of another.
    """
    for op in others:
        here = isinstance(op, Reduce) or (isinstance(op, Copy) and link_of(op) is None)
        if here and not multiplied.isdisjoint(op.deps):
            raise PlanError(f"{op}: the fused kernel takes plans without sums and copies beside it")


def _extents(op: Gemm) -> str:
    (batches, m, k), (_, n, _) = box_extents(op.a.box), box_extents(op.b.box)
    return "x".join(map(str, (m, n, k, batches)))


# --- which GEMMs are interleaved ------------------------------------------------------------------------


def _interleaved_groups(
    plan: Plan, gemms: Sequence[Gemm], arrived: Mapping[int, int], sliced: bool
) -> list[list[Gemm]]:
    """A rank's GEMMs in the plan's order, in groups whose tiles the kernel interleaves.

    A group has narrow GEMMs, which then read the shared operand once. Or it has the GEMMs of one step of a staggered
    plan: some of them store at a peer and some do not, so that the link carries data until the end.

    Args:
        plan: of all ranks.
        gemms: of one rank.
        arrived: by id of the GEMMs that wait: how many of them have their data once this one has it.
        sliced: whether all operands that the kernel waits for come in slices, the slices of several at once.
    """
    step = _staggered_steps(plan) if plan.mechanism == "store" else None
    if step is not None and len({step[op.rank, op.id] for op in gemms}) == len(gemms):
        step = None  # each GEMM has a step of its own
    if _are_narrow(plan, gemms):
        return _group_narrow(plan, gemms, arrived, sliced, step)
    if step is not None:
        return [list(group) for _, group in groupby(gemms, key=lambda op: step[op.rank, op.id])]
    return [[op] for op in gemms]


def _arrived(
    plan: Plan, gemms: Sequence[Gemm], wait_flags: Sequence[Sequence[Wait]], merge_copies: bool
) -> dict[int, int]:
    """By id of the GEMMs that wait: how many of them have their data once this one has it.

    Chunks that are copied together arrive together.
    """
    waiting = {op.id for op, waits in zip(gemms, wait_flags, strict=True) if waits}
    found: dict[int, int] = {}
    for group in halve_last(gemms_by_shard(plan, gemms[0].rank)) if merge_copies else [[op] for op in gemms]:
        together = [op.id for op in group if op.id in waiting]
        found |= dict.fromkeys(together, len(found) + len(together))
    return found


def _are_narrow(plan: Plan, gemms: Sequence[Gemm]) -> bool:
    """Whether the GEMMs have few rows and gain from reading the shared operand once.

    They do not gain where sums take longer to send than to multiply, nor where each GEMM adds one sum, as in chains and
    between two ranks: there a peer waits for each result.
    """
    rows, _, depth = _shape(gemms)
    sources = max(len(op.sources) for op in gemms)
    balance = BALANCE_EXTENT * DTYPE_BYTES[plan.dtype(gemms[0].out)] / DTYPE_BYTES[plan.dtype(gemms[0].a)]
    return rows <= MAX_NARROW_ROWS and sources != 1 and not (sources and depth <= balance)


def _shape(gemms: Sequence[Gemm]) -> tuple[int, int, int]:
    """Extents of one of the GEMMs of a kernel: along the mode of the operand that moves, the other one, and k."""
    (_, m, k), (_, n, _) = box_extents(gemms[0].a.box), box_extents(gemms[0].b.box)
    return (n, m, k) if moving(gemms) == "b" else (m, n, k)


def _group_narrow(
    plan: Plan,
    gemms: Sequence[Gemm],
    arrived: Mapping[int, int],
    sliced: bool,
    step: Mapping[tuple[int, int], int] | None,
) -> list[list[Gemm]]:
    """Narrow GEMMs in groups that read the shared operand once.

    Of GEMMs that wait for operands, a group has as many as will have arrived when it begins. Tiles of a whole group
    begin early, so chunks that are not sliced must arrive in half that time. Of pairwise sums, a group has GEMMs that
    wait for no sum, and of a staggered plan those of one chunk.
    """
    rows, columns, _ = _shape(gemms)
    most = MAX_INTERLEAVED_ROWS // rows
    groups: list[list[Gemm]] = []
    if any(op.sources for op in gemms):
        moving_b = moving(gemms) == "b"

        def key(op: Gemm) -> tuple[int] | tuple[int, View]:
            if op.id in arrived:  # it waits for a sum, and is alone
                return (op.id,)
            chunk = 0 if step is None else step[op.rank, op.id] // (plan.world_size - 1)
            return chunk, op.a if moving_b else op.b

        for _, same in groupby(gemms, key=key):
            group = list(same)
            groups += [group[first : first + most] for first in range(0, len(group), most)]
        return groups
    transfer = BALANCE_EXTENT / columns * (1 if sliced else 2)  # time to send a chunk, in GEMMs
    for number, op in enumerate(gemms):
        group = groups[-1] if groups else []
        if group and transfer * arrived.get(op.id, 0) <= number - len(group) and len(group) < most:
            group.append(op)
        else:
            groups.append([op])
    return groups


@once_for_structure
def _staggered_steps(plan: Plan) -> dict[tuple[int, int], int] | None:
    """The step in which each GEMM of a staggered plan runs, by rank and id; None for plans without a stagger.

    Such a plan is a chain, or has pairwise sums that GEMMs add. The stagger is the number of GEMMs that a rank begins
    sums with before its first GEMM that adds a peer's sum. A GEMM that begins a sum takes the next step of its rank. A
    GEMM that adds a sum runs as many steps after the GEMM that made the sum as the stagger says.

    No GEMM waits, for its sum or for room, for a GEMM in its own step or a later one, on any rank. Each rank has its
    GEMMs in the order of steps. So GEMMs of one step can be interleaved, and all ranks still come to an end.
    """
    every_op = list(chain.from_iterable(plan.rank_ops))
    gemms = {(op.rank, op.id): op for op in every_op if isinstance(op, Gemm)}
    signalled: dict[Flag, list[tuple[int, int]]] = {}  # the GEMMs before the Signal that sets a flag
    for op in every_op:
        if isinstance(op, Signal):
            signalled[op.flag] = [(op.rank, dep) for dep in op.deps if (op.rank, dep) in gemms]
    # The entry into a replay waits for initial flags.
    flags = {(op.rank, op.id): op.flag for op in every_op if isinstance(op, Wait) and not op.flag.initial}
    waits_for = {
        key: [before for dep in op.deps if (op.rank, dep) in flags for before in signalled.get(flags[op.rank, dep], ())]
        for key, op in gemms.items()
    }
    step: dict[tuple[int, int], int] = {}
    begun, stagger = Counter[int](), Counter[int]()  # by rank
    for key, op in sorted(gemms.items(), key=lambda item: item[1].round):
        sums = [before for before in waits_for[key] if link_of(gemms[before]) is not None]
        if sums:
            stagger.setdefault(op.rank, begun[op.rank])
            step[key] = step[sums[0]] + stagger[op.rank]
        else:
            step[key] = begun[op.rank]
            begun[op.rank] += 1
    equal_ranks = (
        len(set(begun.values())) == len(set(stagger.values())) == 1 and len(begun) == len(stagger) == plan.world_size
    )
    orders = [[step[rank, op.id] for op in ops if (rank, op.id) in gemms] for rank, ops in enumerate(plan.rank_ops)]
    in_order = all(order == sorted(order) for order in orders)
    waits_for_earlier = all(step[before] < step[key] for key, befores in waits_for.items() for before in befores)
    return step if equal_ranks and min(stagger.values()) > 0 and in_order and waits_for_earlier else None


# --- what the kernel copies -----------------------------------------------------------------------------


def _sends_of_shards(ops: Sequence[Op], entry: Container[int], slices: int) -> tuple[tuple[Send, ...], list[Op]]:
    """Copies of shards with the signals behind them, one Send for each chunk; and all other ops."""
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    chunks: dict[tuple[int, int], list[tuple[Copy, Signal]]] = {}
    moved = set()
    for op in ops:
        if not copies_shard(op) or op.id not in signals or not all(dep in entry for dep in op.deps):
            continue
        signal = signals[op.id]
        chunks.setdefault((op.dst.rank, signal.flag.number // slices), []).append((op, signal))
        moved |= {op.id, signal.id}
    found = [Send(tuple(copy for copy, _ in pairs), tuple(signal for _, signal in pairs)) for pairs in chunks.values()]
    return tuple(found), [op for op in ops if op.id not in moved]


def _sends_of_results(ops: Sequence[Op], entry: Container[int]) -> tuple[tuple[Send, ...], list[Op]]:
    """The final copies of an all-reduce as Sends, and all other ops.

    They are copies of this rank's results to peers, and copies from slots of results that peers have finished.
    """
    waits = {op.id: op for op in ops if isinstance(op, Wait)}
    signals = {op.deps[0]: op for op in ops if isinstance(op, Signal) and len(op.deps) == 1}
    sends: list[Send] = []
    moved = set()
    for op in ops:
        if isinstance(op, Copy):
            needed = [dep for dep in op.deps if dep not in entry]
            if len(needed) != 1 or needed[0] not in waits:
                raise PlanError(
                    f"{op}: the fused kernel copies what waits for one signal, and this copy waits for room too; "
                    "workspace='full' has room for all"
                )
            wait = waits[needed[0]]
            behind = (signals[op.id],) if op.id in signals else ()
            sends.append(Send((op,), behind, wait))
            moved |= {op.id, wait.id, *(signal.id for signal in behind)}
    return tuple(sends), [op for op in ops if op.id not in moved]


def _with_local_flags(
    plan: Plan, others: Sequence[Op], gemms: Sequence[Gemm], done_flags: dict[int, Signal]
) -> list[Op]:
    """Ops with a Wait for a flag of this rank in place of each GEMM that they need.

    ``done_flags`` gets the Signals that set these flags.
    """
    first_id, first_flag = ids_of(plan), flags_of(plan)
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
                    f"{op}: a peer and this rank need the same GEMM, and the fused kernel sets one flag for each GEMM"
                )
            flag = Flag(gemm.rank, first_flag + number[dep], 0, False)
            waits[dep] = first_id + number[dep]
            where = (gemm.rank, gemm.round, gemm.iteration, "D", gemm.tile, gemm.slot)
            done_flags[dep] = Signal(-1 - number[dep], *where, (dep,), flag)
            found.append(Wait(waits[dep], *where, (), flag, gemm.rank))
        if not waits.keys().isdisjoint(op.deps):
            op = replace(op, deps=tuple(waits.get(dep, dep) for dep in op.deps))
        found.append(op)
    return found
