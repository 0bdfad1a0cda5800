"""All single mutations of a plan: one thing dropped, doubled, exchanged or moved at a time."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from distgemm.plan.ops import (
    Box,
    Copy,
    Flag,
    Gemm,
    Op,
    Reduce,
    Signal,
    Slot,
    View,
    Wait,
    accesses,
    box_extents,
    box_size,
)
from distgemm.plan.plan import Plan
from tests.unit.interleavings import Cell, Fault, Machine, Task

Label = tuple[int, int, int]

KINDS = (
    "drop an op",
    "drop an op, spliced",
    "drop a dependency",
    "swap two tiles",
    "swap two transfers",
    "swap two ops in the list",
    "reuse a slot early",
    "move one view to another slot",
    "move a place to a new slot",
    "move rows together",
    "double a tile",
    "double a transfer",
    "change a flag",
    "change a sum",
    "cut a transfer",
)


class Mutation(NamedTuple):
    """A plan with one thing changed."""

    kind: str
    what: str
    plan: Plan


def _replace(op: Op, **fields: Any) -> Op:
    return dataclasses.replace(op, **fields)


def _with(plan: Plan, *changed: Op) -> Plan:
    """The plan with these ops in the place of those with their rank and id."""
    by_id = {(op.rank, op.id): op for op in changed}
    for rank in {op.rank for op in changed}:
        plan = plan.replace_ops(rank, [by_id.get((rank, op.id), op) for op in plan.ops(rank)])
    return plan


def mutations(plan: Plan) -> Iterator[Mutation]:
    """Every single mutation of a plan that changes it at all."""
    for source in (_drops, _dependencies, _swaps, _order, _slots, _pitches, _doubles, _flags, _sums, _cuts):
        for mutation in source(plan):
            if mutation.plan.rank_ops != plan.rank_ops or mutation.plan.slots != plan.slots:
                yield mutation._replace(plan=agree(mutation.plan))


def agree(plan: Plan) -> Plan:
    """The plan with the slots that ops name for readers: those that they write, or that they say are written."""
    by_id = {(op.rank, op.id): op for op in _all(plan)}
    signals: dict[tuple[int, int], int] = {}
    changed: list[Op] = []

    def name(op: Op, slot: int) -> None:
        if op.slot != slot:
            changed.append(_replace(op, slot=slot))

    for op in _all(plan):
        if (written := accesses(op)[1]) is not None:
            name(op, written.slot)
        elif isinstance(op, Signal):
            sent = [accesses(by_id[op.rank, dep])[1] for dep in op.deps if (op.rank, dep) in by_id]
            slots = [view.slot for view in sent if view is not None and not op.flag.credit]
            signals[op.flag[:2]] = (slots or [op.slot])[0]
            name(op, signals[op.flag[:2]])
    for op in _all(plan):
        if isinstance(op, Wait):
            name(op, signals.get(op.flag[:2], op.slot))
    return _with(plan, *changed)


def _all(plan: Plan) -> list[Op]:
    return [op for ops in plan.rank_ops for op in ops]


def _drops(plan: Plan) -> Iterator[Mutation]:
    for op in _all(plan):
        rest = [other for other in plan.ops(op.rank) if other is not op]
        yield Mutation("drop an op", f"{op}", plan.replace_ops(op.rank, rest))
        spliced = [
            _replace(
                other, deps=tuple(dict.fromkeys(d for dep in other.deps for d in (op.deps if dep == op.id else (dep,))))
            )
            for other in rest
        ]
        yield Mutation("drop an op, spliced", f"{op}", plan.replace_ops(op.rank, spliced))


def _dependencies(plan: Plan) -> Iterator[Mutation]:
    for op in _all(plan):
        for dep in op.deps:
            deps = tuple(other for other in op.deps if other != dep)
            yield Mutation("drop a dependency", f"{op}: dep {dep}", _with(plan, _replace(op, deps=deps)))


def _exchange(plan: Plan, first: Op, second: Op, *names: str) -> Plan:
    def taken(mine: Op, other: Op) -> Op:
        return _replace(mine, **{name: getattr(other, name) for name in names})

    return _with(plan, taken(first, second), taken(second, first))


def _swaps(plan: Plan) -> Iterator[Mutation]:
    flavours = [
        ("tile",),
        ("a",),
        ("b",),
        ("out",),
        ("sources",),
        ("c",),
        ("scale_a",),
        ("scale_b",),
        ("tile", "a", "b"),
        ("tile", "a", "b", "scale_a", "scale_b", "sources", "c", "out"),
        ("tile", "a", "b", "scale_a", "scale_b", "sources", "c", "out", "deps"),
    ]
    for ops in plan.rank_ops:
        for first, second in combinations([op for op in ops if isinstance(op, Gemm)], 2):
            for names in flavours:
                if names[-1] == "deps" and (first.id in second.deps or any(dep >= first.id for dep in second.deps)):
                    continue
                yield Mutation(
                    "swap two tiles", f"{first}, {second}: {', '.join(names)}", _exchange(plan, first, second, *names)
                )
        for first, second in combinations([op for op in ops if isinstance(op, Copy)], 2):
            for names in (("src",), ("dst",), ("src", "dst")):
                yield Mutation(
                    "swap two transfers",
                    f"{first}, {second}: {', '.join(names)}",
                    _exchange(plan, first, second, *names),
                )
        for first, second in combinations([op for op in ops if isinstance(op, Reduce)], 2):
            for names in (("out",), ("sources",), ("sources", "out", "c")):
                yield Mutation(
                    "swap two tiles", f"{first}, {second}: {', '.join(names)}", _exchange(plan, first, second, *names)
                )


def _order(plan: Plan) -> Iterator[Mutation]:
    for rank, ops in enumerate(plan.rank_ops):
        for place in range(len(ops) - 1):
            first, second = ops[place : place + 2]
            if first.round == second.round:
                swapped = [*ops[:place], second, first, *ops[place + 2 :]]
                yield Mutation("swap two ops in the list", f"{first}, {second}", plan.replace_ops(rank, swapped))


def _map_views(op: Op, change: Callable[[View], View]) -> Op:
    """The op with each of its views changed."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if isinstance(value, View):
            fields[field.name] = change(value)
        elif field.name == "sources":
            fields[field.name] = tuple(change(view) for view in value)
    return _replace(op, **fields)


def _views(op: Op) -> list[View]:
    found: list[View] = []

    def collect(view: View) -> View:
        found.append(view)
        return view

    _map_views(op, collect)
    return found


def _slots(plan: Plan) -> Iterator[Mutation]:
    ops = _all(plan)
    places = dict.fromkeys((v.rank, v.slot, v.frame) for op in ops for v in _views(op) if v.buffer == "slot")
    for rank, slot, frame in places:
        of_rank = plan.slots[rank]
        # The first slot of the rank that does not exist yet, for a move that changes nothing.
        end = max(other.offset + other.bytes for other in of_rank)
        grown = (*of_rank, Slot(end, of_rank[slot].bytes, of_rank[slot].dtype, of_rank[slot].elements))
        wider = dataclasses.replace(plan, slots=(*plan.slots[:rank], grown, *plan.slots[rank + 1 :]))

        def moved(view: View, to: int, place: tuple[int, int, Any] = (rank, slot, frame)) -> View:
            here = view.buffer == "slot" and (view.rank, view.slot, view.frame) == place
            return view._replace(slot=to) if here else view

        for to in range(len(grown)):
            if to == slot:
                continue
            new = to == len(of_rank)
            base = wider if new else plan
            changed = [_map_views(op, lambda view, to=to: moved(view, to)) for op in ops]  # type: ignore[misc]
            kind = "move a place to a new slot" if new else "reuse a slot early"
            yield Mutation(kind, f"slot {slot}@{rank}{frame} to {to}", _with(base, *changed))
            for op in ops:
                for place, view in enumerate(_views(op)):
                    if moved(view, to) == view:
                        continue
                    count = iter(range(len(_views(op))))
                    one = _map_views(op, lambda v, c=count, p=place, to=to: moved(v, to) if next(c) == p else v)  # type: ignore[misc]
                    yield Mutation("move one view to another slot", f"{op}: {view} to {to}", _with(base, one))


def _pitches(plan: Plan) -> Iterator[Mutation]:
    """The rows of a place one element nearer to each other: for all ops alike, and for one of them."""
    kind = "move rows together"
    ops = _all(plan)

    def nearer(view: View, place: tuple[int, int, Box]) -> View:
        here = view.buffer == "slot" and (view.rank, view.slot, view.frame) == place
        return view._replace(pitch=view.pitch - 1) if here else view

    places = dict.fromkeys((v.rank, v.slot, v.frame) for op in ops for v in _views(op) if v.buffer == "slot")
    for place in places:
        changed = [_map_views(op, lambda view, place=place: nearer(view, place)) for op in ops]  # type: ignore[misc]
        yield Mutation(kind, f"slot {place[1]}@{place[0]}{place[2]}", _with(plan, *changed))
        if box_extents(place[2])[1] > 1:
            for before, after in zip(ops, changed, strict=True):
                yield Mutation(kind, f"{before}: slot {place[1]}@{place[0]}{place[2]}", _with(plan, after))


def _doubles(plan: Plan) -> Iterator[Mutation]:
    for op in _all(plan):
        if not isinstance(op, Gemm | Copy):
            continue
        ops = list(plan.ops(op.rank))
        new = max(other.id for other in ops) + 1
        for deps, how in ((op.deps, "beside it"), ((op.id,), "after it")):
            double = _replace(op, id=new, deps=deps)
            at = ops.index(op) + 1
            doubled = plan.replace_ops(op.rank, [*ops[:at], double, *ops[at:]])
            yield Mutation("double a tile" if isinstance(op, Gemm) else "double a transfer", f"{op} {how}", doubled)
        if isinstance(op, Copy):
            before = [*ops[: at - 1], _replace(op, id=new), *ops[at - 1 :]]
            yield Mutation("double a transfer", f"{op} before it", plan.replace_ops(op.rank, before))
            continue
        for other in ops:
            # The work of another GEMM of the rank becomes this one's.
            if isinstance(other, Gemm) and other is not op:
                same = {"tile": op.tile, "a": op.a, "b": op.b, "scale_a": op.scale_a, "scale_b": op.scale_b}
                again = _replace(other, **same)
                yield Mutation("double a tile", f"{op} in the place of {other}", _with(plan, again))


def _flags(plan: Plan) -> Iterator[Mutation]:
    kind = "change a flag"
    ops = _all(plan)
    waits = [op for op in ops if isinstance(op, Wait)]
    signals = [op for op in ops if isinstance(op, Signal)]
    for first in waits:
        for second in waits:
            if first is not second and first.rank == second.rank:
                yield Mutation(kind, f"{first} waits for {second.flag}", _with(plan, _replace(first, flag=second.flag)))
    for first in signals:
        for second in signals:
            if first is not second and first.flag.rank == second.flag.rank:
                yield Mutation(kind, f"{first} sets {second.flag}", _with(plan, _replace(first, flag=second.flag)))
    for side, names in ((waits, ("flag", "peer")), (waits, ("flag",)), (signals, ("flag",))):
        for first, second in combinations(side, 2):
            if isinstance(first, Signal) or first.rank == second.rank:
                yield Mutation(kind, f"{first}, {second} exchange {names}", _exchange(plan, first, second, *names))
    by_flag = {op.flag: op for op in signals}
    for wait in waits:
        flag: Flag = wait.flag._replace(initial=1 - wait.flag.initial)
        yield Mutation(kind, f"{wait} starts at {flag.initial}, says the Wait", _with(plan, _replace(wait, flag=flag)))
        both = _replace(wait, flag=flag), _replace(by_flag[wait.flag], flag=flag)
        yield Mutation(kind, f"{wait} starts at {flag.initial}", _with(plan, *both))


def _sums(plan: Plan) -> Iterator[Mutation]:
    kind = "change a sum"
    for op in _all(plan):
        if not isinstance(op, Gemm | Reduce):
            continue
        for place, view in enumerate(op.sources):
            less = op.sources[:place] + op.sources[place + 1 :]
            yield Mutation(kind, f"{op}: without {view}", _with(plan, _replace(op, sources=less)))
            yield Mutation(kind, f"{op}: {view} twice", _with(plan, _replace(op, sources=(*op.sources, view))))
        if op.c is not None:
            yield Mutation(kind, f"{op}: without C", _with(plan, _replace(op, c=None)))
            for buffer in ("A", "B", "D"):
                other = op.c._replace(buffer=buffer)
                yield Mutation(kind, f"{op}: C from {buffer}", _with(plan, _replace(op, c=other)))
        else:
            frame = plan.box("C", op.rank)
            c = View(op.rank, "C", -1, frame, op.out.box, box_extents(frame)[2])
            yield Mutation(kind, f"{op}: with C", _with(plan, _replace(op, c=c)))
        yield Mutation(kind, f"{op}: adds what it replaces", _with(plan, _replace(op, sources=(*op.sources, op.out))))


def _cuts(plan: Plan) -> Iterator[Mutation]:
    for op in _all(plan):
        if not isinstance(op, Copy):
            continue
        for axis, extent in enumerate(box_extents(op.src.box)):
            low, high = op.src.box[axis]
            shorter = (*op.src.box[:axis], (low, high - 1), *op.src.box[axis + 1 :])
            if extent < 2 or not box_size(shorter):  # type: ignore[arg-type]
                continue
            src, dst = op.src._replace(box=shorter), op.dst._replace(box=shorter)  # type: ignore[arg-type]
            yield Mutation("cut a transfer", f"{op}: axis {axis}", _with(plan, _replace(op, src=src, dst=dst)))
            yield Mutation("cut a transfer", f"{op}: axis {axis} of its source", _with(plan, _replace(op, src=src)))


# --- what a mutation does ------------------------------------------------------------------------------


class Effect(NamedTuple):
    """What holds of a plan in all executions of two replays, by brute force.

    order: for each op that touches memory (and each caller between replays), by (replay, rank, id), those
           that have finished before it starts; None where some op never starts
    fault: a race, a lost signal, a deadlock or a wrong value; None: the plan is right
    does:  what the op of each label does to which memory
    """

    order: dict[Label, frozenset[Label]] | None
    fault: str | None
    does: dict[Label, Hashable]


def effect(plan: Plan) -> Effect:
    """The happens-before closure between accesses to memory, and whether the data flow is right.

    The closure is computed for all ops, and every pair of accesses to one element is looked up in it. The
    data flow is right if there is no race, and one execution gives the right values.
    """
    try:
        machine = Machine(plan)
    except Fault as found:
        return Effect(None, str(found), {})
    past = _closure(machine)
    if past is None:
        return Effect(None, "some op never starts", {})
    tasks = machine.tasks
    labels = [(task.replay, task.rank, task.op.id if task.op else -1) for task in tasks]
    does = {label: (*label[:2], _does(task.op)) for label, task in zip(labels, tasks, strict=True)}
    memory = [task for task in tasks if task.reads or task.writes]
    order = {
        labels[task.index]: frozenset(labels[other.index] for other in memory if past[task.index] >> other.index & 1)
        for task in memory
    }
    return Effect(order, _race(machine, past) or _lost(machine, past) or _wrong(machine), does)


def _does(op: Op | None) -> Hashable:
    """What an op does to which memory, whatever it is called."""
    match op:
        case Gemm():
            return op.kind, op.tile, op.a, op.b, op.sources, op.c, op.out, op.scales
        case Reduce():
            return op.kind, op.sources, op.c, op.out
        case Copy():
            return op.kind, op.src, op.dst
    return None


def _closure(machine: Machine) -> list[int] | None:
    """The tasks that happen before each task, a bit for each."""
    tasks = machine.tasks
    signals = {(t.replay, t.op.flag[:2]): 1 << t.index for t in tasks if isinstance(t.op, Signal)}
    direct = []
    for task in tasks:
        needs = task.needs
        for member in task.members:
            needs |= member
        if isinstance(task.op, Wait):
            starts_at = bool(machine.flags & machine.flag_bit[task.op.flag[:2]])
            if task.replay >= starts_at:
                # Bit 100000 is never set: a signal that nobody gives.
                needs |= signals.get((task.replay - starts_at, task.op.flag[:2]), 1 << 100_000)
        direct.append(needs)
    past = [0] * len(tasks)
    known = 0
    left = list(tasks)
    while left:
        waiting = []
        for task in left:
            if direct[task.index] & ~known:
                waiting.append(task)
                continue
            past[task.index] = direct[task.index]
            for other in tasks:
                if direct[task.index] >> other.index & 1:
                    past[task.index] |= past[other.index]
            known |= 1 << task.index
        if len(waiting) == len(left):
            return None
        left = waiting
    return past


def _race(machine: Machine, past: list[int]) -> str | None:
    accesses: dict[Cell, list[Task]] = defaultdict(list)
    for task in machine.tasks:
        for cell in task.reads | task.writes:
            accesses[cell].append(task)
    for cell, tasks in accesses.items():
        for first, then in combinations(tasks, 2):
            ordered = past[then.index] >> first.index & 1 or past[first.index] >> then.index & 1
            if not ordered and (cell in first.writes or cell in then.writes):
                return f"{first} and {then} race for {cell}"
    return None


def _lost(machine: Machine, past: list[int]) -> str | None:
    of_flag: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for task in machine.tasks:
        if isinstance(task.op, Signal | Wait):
            of_flag[task.op.flag[:2]].append(task)
    for tasks in of_flag.values():
        ids = {(type(task.op), task.rank, task.op.id) for task in tasks if task.op}
        if len(ids) != 2 or {kind for kind, _, _ in ids} != {Signal, Wait}:
            return f"{tasks[0]}: not one Signal and one Wait share its flag"
        # Any two of a flag's Signals and Waits are ordered: else one could be lost, or seen twice.
        for first, then in combinations(tasks, 2):
            if not (past[then.index] >> first.index & 1 or past[first.index] >> then.index & 1):
                return f"{first} and {then} are not ordered"
    return None


def _wrong(machine: Machine) -> str | None:
    try:
        machine.explore(0)
        machine.issue_in_order()
    except Fault as found:
        return str(found)
    return None


def changed(before: Effect, after: Effect) -> bool:
    """Whether the order of accesses to memory, among ops that both plans have, or the data flow changed."""
    if after.fault is not None or after.order is None or before.order is None:
        return True
    orders = [before.order, after.order]
    renamed = [{made.does[label] for label in order} for made, order in zip((before, after), orders, strict=True)]
    if renamed[0] == renamed[1] and all(len(names) == len(order) for names, order in zip(renamed, orders, strict=True)):
        # The same accesses: they are compared as such, for ops that change places only exchange their names.
        orders = [
            {made.does[label]: frozenset(made.does[other] for other in past) for label, past in order.items()}
            for made, order in zip((before, after), orders, strict=True)
        ]
    common = orders[0].keys() & orders[1].keys()
    return any(orders[0][label] & common != orders[1][label] & common for label in common)
