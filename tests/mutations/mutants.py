"""Mutants of plans: one or two things changed at random, in any field of ops and plans, or in the JSON of a plan."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distgemm.plan.ops import Copy, Flag, Gemm, Op, Reduce, Signal, Slot, View, Wait
from distgemm.plan.plan import Plan

ODD: tuple[Any, ...] = (None, "x", "", 1.5, True, (), ((),), -1, 2**40, 10**30, float("nan"))
"""Values of other types, and numbers out of range."""


class Mutant(NamedTuple):
    """A plan with something changed.

    Attributes:
        kind: what was changed: a name of ``KINDS``.
        plan: the plan. None: the mutant is a text.
        text: the plan as JSON. None: the mutant is an object.
    """

    kind: str
    plan: Plan | None
    text: str | None = None


class NoChange(Exception):  # noqa: N818
    """There is nothing of this kind to change."""


Random = random.Random
Change = Callable[[Plan, Random], Plan]


def mutant(plan: Plan, kind: str, rng: Random) -> Mutant:
    """A mutant of a kind.

    Args:
        plan: the plan.
        kind: a name of ``KINDS``.
        rng: draws what is changed.

    Raises:
        NoChange: if the plan has nothing of the kind, or the change left it equal.
    """
    if kind == "JSON":
        text = _json(plan, rng)
        return Mutant(kind, None, text)
    changed = KINDS[kind](plan, rng)
    if kind != "two of these" and rng.random() < 0.3:
        changed = agree(changed)
    # Ops and slots are compared as texts, in which True is not 1.
    if repr(changed) == repr(plan):
        raise NoChange
    return Mutant(kind, changed)


# --- helpers ------------------------------------------------------------------------------------------


def _pick(rng: Random, values: Sequence[Any]) -> Any:
    if not values:
        raise NoChange
    return rng.choice(values)


def _ops(plan: Plan, *kinds: type) -> list[Op]:
    return [op for ops in plan.rank_ops for op in ops if not kinds or isinstance(op, kinds)]


def _set(op: Op, **fields: Any) -> Op:
    return dataclasses.replace(op, **fields)


def _with(plan: Plan, *changes: tuple[Op, Op | None]) -> Plan:
    """The plan with ops replaced, or (None) without them."""
    by_id = {id(old): new for old, new in changes}
    ranks = tuple(tuple(new for op in ops if (new := by_id.get(id(op), op)) is not None) for ops in plan.rank_ops)
    return dataclasses.replace(plan, rank_ops=ranks)


def _at(values: Sequence[Any], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _views(op: Op) -> dict[str, View]:
    """The views of an op by field; the sources as sources0, sources1, ..."""
    found: dict[str, View] = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if isinstance(value, View):
            found[field.name] = value
        elif field.name == "sources":
            found |= {f"sources{place}": view for place, view in enumerate(value)}
    return found


def _set_views(op: Op, change: Callable[[str, View], View]) -> Op:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if isinstance(value, View):
            fields[field.name] = change(field.name, value)
        elif field.name == "sources":
            fields["sources"] = tuple(change(f"sources{place}", view) for place, view in enumerate(value))
    return _set(op, **fields)


def _written(op: Op) -> View | None:
    return op.dst if isinstance(op, Copy) else op.out if isinstance(op, Gemm | Reduce) else None


def agree(plan: Plan) -> Plan:
    """The plan with the slots that ops, Signals and Waits name set to those that are written."""
    slots: dict[tuple[int, int], int] = {}
    changes: list[tuple[Op, Op | None]] = []
    by_id = {(op.rank, op.id): op for op in _ops(plan)}
    for op in _ops(plan):
        written = _written(op)
        if written is not None:
            changes.append((op, _set(op, slot=written.slot)))
        elif isinstance(op, Signal):
            before = [_written(by_id[op.rank, dep]) for dep in op.deps if (op.rank, dep) in by_id]
            found = [view.slot for view in before if view is not None and not op.flag.credit]
            slots[op.flag[:2]] = (found or [op.slot])[0]
            changes.append((op, _set(op, slot=slots[op.flag[:2]])))
    for op in _ops(plan, Wait):
        assert isinstance(op, Wait)
        changes.append((op, _set(op, slot=slots.get(op.flag[:2], op.slot))))
    return _with(plan, *changes)


def _number(value: Any, others: Sequence[int], rng: Random) -> Any:
    """Another value for an integer."""
    near = [value + 1, value - 1, value + 2, -value, 0, 1]
    return rng.choice([rng.choice(near), rng.choice([*others, value + 1]), rng.choice(ODD)])


def _box(box: Any, rng: Random) -> Any:
    mode, end = rng.randrange(3), rng.randrange(2)
    return _at(box, mode, _at(box[mode], end, box[mode][end] + rng.choice((-1, 1, 2, -2))))


def _view(view: View, others: Sequence[View], rng: Random) -> Any:
    name = rng.choice((*View._fields, "frame and box", "all"))
    if name == "all":
        return rng.choice([*others, *ODD]) if rng.random() < 0.8 else tuple(view)
    if name == "frame and box":
        box = _box(view.box, rng)
        return view._replace(frame=box, box=box)
    if name in ("frame", "box"):
        new = _box(getattr(view, name), rng) if rng.random() < 0.7 else getattr(rng.choice([*others, view]), name)
        return view._replace(**{name: new if rng.random() < 0.9 else rng.choice(ODD)})
    if name == "buffer":
        return view._replace(buffer=rng.choice(("A", "B", "C", "D", "slot", "E", None)))
    return view._replace(**{name: _number(getattr(view, name), [getattr(v, name) for v in others], rng)})


# --- fields -------------------------------------------------------------------------------------------


def _field(plan: Plan, rng: Random) -> Plan:
    """One field of one op."""
    op = _pick(rng, _ops(plan))
    name = _pick(rng, [field.name for field in dataclasses.fields(op)])
    value, same = getattr(op, name), [other for other in _ops(plan) if hasattr(other, name)]
    views = [view for other in _ops(plan) for view in _views(other).values()]
    if rng.random() < 0.1:
        new: Any = rng.choice(ODD)
    elif rng.random() < 0.2:
        new = getattr(rng.choice(same), name)
    elif isinstance(value, int):
        new = _number(value, [getattr(other, name) for other in same], rng)
    elif isinstance(value, View):
        new = _view(value, views, rng)
    elif isinstance(value, Flag):
        part = rng.choice(Flag._fields)
        new = value._replace(**{part: rng.choice([getattr(other.flag, part) for other in same] + [0, 1, True, None])})  # type: ignore[attr-defined]
    elif name == "deps":
        new = _deps(op, plan, rng)
    elif name == "tile":
        place = rng.randrange(len(value)) if value else 0
        new = type(value)(*_at(value, place, value[place] + rng.choice((-1, 1)))) if isinstance(op, Gemm) else (
            _at(value, place, value[place] + rng.choice((-1, 1))) if value else (0,)
        )  # fmt: skip
    elif name == "sources":
        new = _sources(op, views, rng)  # type: ignore[arg-type]
    elif name == "c":
        frame = plan.shards[2][op.rank]
        box = op.out.box  # type: ignore[attr-defined]
        new = View(op.rank, "C", -1, frame, box, frame[2][1] - frame[2][0])
    else:
        new = rng.choice(("A", "B", "D"))
    return _with(plan, (op, _set(op, **{name: new})))


def _deps(op: Op, plan: Plan, rng: Random) -> tuple[Any, ...]:
    ids = [other.id for other in plan.rank_ops[op.rank]]
    deps = list(op.deps)
    way = rng.randrange(6)
    if way == 0 and deps:
        deps.pop(rng.randrange(len(deps)))
    elif way == 1:
        deps.append(rng.choice([*ids, max(ids) + 1, -1]))
    elif way == 2 and deps:
        deps[rng.randrange(len(deps))] = rng.choice(ids)
    elif way == 3:
        # The id of an op of another rank, which this rank has too.
        far = _pick(rng, [other for other in _ops(plan) if other.rank != op.rank])
        deps = [far.id] if far.id in ids else []
    elif way == 4:
        deps = []
    else:
        deps = deps[1:] + deps[:1] + deps[:1]
    return tuple(deps)


def _sources(op: Gemm | Reduce, views: Sequence[View], rng: Random) -> tuple[Any, ...]:
    sources = list(op.sources)
    way = rng.randrange(5)
    if way == 0 and sources:
        sources.pop(rng.randrange(len(sources)))
    elif way == 1:
        sources.append(rng.choice(views))
    elif way == 2 and sources:
        place = rng.randrange(len(sources))
        sources[place] = _view(sources[place], views, rng)
    elif way == 3:
        sources += sources[:1] or [op.out]
    else:
        sources.reverse()
    return tuple(sources)


def _dependency(plan: Plan, rng: Random) -> Plan:
    """The dependencies of one op."""
    op = _pick(rng, _ops(plan))
    return _with(plan, (op, _set(op, deps=_deps(op, plan, rng))))


def _number_of_another_rank(plan: Plan, rng: Random) -> Plan:
    """A copy that reads another rank waits for an op of its own with the writer's id, not for that rank."""
    pull = _pick(rng, [op for op in _ops(plan, Copy) if op.src.rank != op.rank])  # type: ignore[attr-defined]
    ids = {op.id: op for op in plan.rank_ops[pull.rank]}
    writers = [op.id for op in _ops(plan) if _written(op) == pull.src and op.id in ids]
    kept = tuple(dep for dep in pull.deps if not isinstance(ids.get(dep), Wait) or rng.random() < 0.3)
    return _with(plan, (pull, _set(pull, deps=(*kept, *writers))))


def _plan_field(plan: Plan, rng: Random) -> Plan:
    """One field of the plan, or an entry of it."""
    name = rng.choice([field.name for field in dataclasses.fields(plan)])
    value = getattr(plan, name)
    if rng.random() < 0.15:
        return dataclasses.replace(plan, **{name: rng.choice(ODD)})
    if name == "problem":
        part = rng.choice([field.name for field in dataclasses.fields(value)])
        old = getattr(value, part)
        if isinstance(old, int):
            new: Any = old + rng.choice((-1, 1, 2, 2**20, old))
        elif part == "m_per_rank":
            boxes = plan.shards[rng.choice((0, 2))]
            new = tuple(high - low + rng.choice((0, 0, 0, 1)) for _, (low, high), _ in boxes)
        else:
            new = rng.choice(("float32", "bfloat16", "float16", "float64", "tfloat32"))
        try:
            return dataclasses.replace(plan, problem=dataclasses.replace(value, **{part: new}))
        except ValueError:
            raise NoChange from None
    if name == "slots":
        return _slot_field(plan, rng)
    if name == "edges":
        mode = rng.randrange(4)
        edges = list(value[mode])
        place = rng.randrange(len(edges))
        way = rng.randrange(4)
        if way == 0:
            edges[place] += rng.choice((-1, 1))
        elif way == 1:
            edges.pop(place)
        elif way == 2:
            edges.insert(place, edges[place])
        else:
            edges[place] = rng.choice(ODD)
        return dataclasses.replace(plan, edges=_at(value, mode, tuple(edges)))
    if name == "shards":
        operand = rng.randrange(3)
        rank, other = (rng.randrange(len(value[operand])) for _ in range(2))
        box = rng.choice((_box(value[operand][rank], rng), value[operand][other], rng.choice(ODD)))
        return dataclasses.replace(plan, shards=_at(value, operand, _at(value[operand], rank, box)))
    if name == "rank_ops":
        one, other = (rng.randrange(len(value)) for _ in range(2))
        swapped = _at(_at(value, one, value[other]), other, value[one])
        return dataclasses.replace(plan, rank_ops=rng.choice((swapped, value[:-1], (*value, ()), _at(value, one, ()))))
    if name == "mesh":
        return dataclasses.replace(plan, mesh=rng.choice(((*value, 1), (*value, 2), value[1:], (-value[0],), (0,))))
    if name == "iterations":
        return dataclasses.replace(plan, iterations=_number(value, [0], rng))
    known = {"workspace": ("full", "bounded"), "sync": ("credit", "barrier"), "mechanism": ("push", "pull", "store")}
    return dataclasses.replace(plan, **{name: rng.choice((*known.get(name, ("other",)), "neither"))})


def _slot_field(plan: Plan, rng: Random) -> Plan:
    rank = rng.randrange(len(plan.slots))
    of_rank = plan.slots[rank]
    place = rng.randrange(len(of_rank)) if of_rank else 0
    way = rng.randrange(6)
    if way == 0 or not of_rank:
        end = sum(slot.bytes for slot in of_rank)
        new = (*of_rank, Slot(end, rng.choice((0, 256)), "bfloat16", 0))
    elif way == 1:
        new = _at(of_rank, place, rng.choice(of_rank))
    elif way == 2:
        new = of_rank[:place] + of_rank[place + 1 :]
    else:
        slot = of_rank[place]
        name = rng.choice(Slot._fields)
        if name == "dtype":
            slot = slot._replace(dtype=rng.choice(("float32", "bfloat16", "float16", "int8")))
        else:
            steps = (-1, 1, 256, -256, -getattr(slot, name), rng.choice((16, 128)))
            slot = slot._replace(**{name: getattr(slot, name) + rng.choice(steps)})
        new = _at(of_rank, place, slot)
    return dataclasses.replace(plan, slots=_at(plan.slots, rank, new))


# --- ops ----------------------------------------------------------------------------------------------


def _drop(plan: Plan, rng: Random) -> Plan:
    """One op less. What depended on it depends on what it depended on, on nothing instead, or still on it."""
    op = _pick(rng, _ops(plan))
    way = rng.randrange(3)
    changes: list[tuple[Op, Op | None]] = [(op, None)]
    for other in plan.rank_ops[op.rank]:
        if other is not op and op.id in other.deps and way:
            rest = [dep for dep in other.deps if dep != op.id] + (list(op.deps) if way == 1 else [])
            changes.append((other, _set(other, deps=tuple(dict.fromkeys(rest)))))
    return _with(plan, *changes)


def _drop_flag(plan: Plan, rng: Random) -> Plan:
    """A flag less: its Signal and its Wait."""
    wait = _pick(rng, _ops(plan, Wait))
    gone = [op for op in _ops(plan, Signal, Wait) if op.flag[:2] == wait.flag[:2]]  # type: ignore[attr-defined]
    changes: list[tuple[Op, Op | None]] = [(op, None) for op in gone]
    for op in _ops(plan):
        ids = [other.id for other in gone if other.rank == op.rank]
        if op not in gone and set(ids) & set(op.deps):
            changes.append((op, _set(op, deps=tuple(dep for dep in op.deps if dep not in ids))))
    return _with(plan, *changes)


def _double(plan: Plan, rng: Random) -> Plan:
    op = _pick(rng, _ops(plan))
    ops = list(plan.rank_ops[op.rank])
    again = _set(op, id=max(each.id for each in ops) + 1, deps=rng.choice((op.deps, (op.id,))))
    ops.insert(ops.index(op) + 1, again)
    return plan.replace_ops(op.rank, ops)


def _reorder(plan: Plan, rng: Random) -> Plan:
    """One op of a rank's list stands elsewhere; its round, too, or not."""
    rank = rng.randrange(plan.world_size)
    ops = list(plan.rank_ops[rank])
    if len(ops) < 2:
        raise NoChange
    op = ops.pop(rng.randrange(len(ops)))
    place = rng.randrange(len(ops))
    ops.insert(place, _set(op, round=ops[place].round) if rng.random() < 0.7 else op)
    return plan.replace_ops(rank, ops)


def _exchange(plan: Plan, rng: Random) -> Plan:
    """Two ops of a kind exchange some of their fields."""
    one = _pick(rng, _ops(plan))
    other = _pick(rng, [op for op in _ops(plan, type(one)) if op is not one])
    names = [field.name for field in dataclasses.fields(one) if field.name not in ("id", "rank")]
    chosen = rng.sample(names, rng.randrange(1, 4)) if rng.random() < 0.5 else names[5:]
    first = _set(one, **{name: getattr(other, name) for name in chosen})
    return _with(plan, (one, first), (other, _set(other, **{name: getattr(one, name) for name in chosen})))


def _flag(plan: Plan, rng: Random) -> Plan:
    """The Signal and the Wait of a flag agree on another first value, credit, number or rank."""
    wait = _pick(rng, _ops(plan, Wait))
    both = [op for op in _ops(plan, Signal, Wait) if op.flag == wait.flag]  # type: ignore[attr-defined]
    flag = wait.flag
    flag = rng.choice(
        (
            flag._replace(initial=1 - flag.initial),
            flag._replace(credit=not flag.credit),
            flag._replace(number=flag.number + rng.choice((1, 100))),
            flag._replace(initial=1 - flag.initial, credit=not flag.credit),
        )
    )
    return _with(plan, *((op, _set(op, flag=flag)) for op in both))


def _place(plan: Plan, rng: Random) -> Plan:
    """A tile rests in another slot, for all ops or for some."""
    views = [view for op in _ops(plan) for view in _views(op).values() if view.buffer == "slot"]
    moved = _pick(rng, views)
    to = rng.randrange(len(plan.slots[moved.rank]))
    key = moved.rank, moved.slot, moved.frame
    share = rng.choice((1.0, 0.5))

    def change(name: str, view: View) -> View:
        here = (view.rank, view.slot, view.frame) == key and rng.random() < share
        return view._replace(slot=to) if here and view.buffer == "slot" else view

    return agree(_with(plan, *((op, _set_views(op, change)) for op in _ops(plan))))


def _cut(plan: Plan, rng: Random) -> Plan:
    """A transfer moves another box, at both ends."""
    copy = _pick(rng, _ops(plan, Copy))
    box = _box(copy.src.box, rng)
    return _with(plan, (copy, _set(copy, src=copy.src._replace(box=box), dst=copy.dst._replace(box=box))))


def _split(plan: Plan, rng: Random) -> Plan:
    """A transfer becomes two, of half of the rows or columns each. What waited for one waits for one or both."""
    copy = _pick(rng, _ops(plan, Copy))
    mode = rng.choice((1, 2))
    low, high = copy.src.box[mode]
    if high - low < 2:
        raise NoChange
    new = max(op.id for op in plan.rank_ops[copy.rank]) + 1
    boxes = [_at(copy.src.box, mode, (low, low + 1)), _at(copy.src.box, mode, (low + 1, high))]
    one, other = (
        _set(copy, id=number, src=copy.src._replace(box=box), dst=copy.dst._replace(box=box))
        for number, box in zip((copy.id, new), boxes, strict=True)
    )
    if rng.random() < 0.5 and other.deps:
        other = _set(other, deps=other.deps[:-1])
    ops: list[Op] = []
    for op in plan.rank_ops[copy.rank]:
        later = copy.id in op.deps and rng.random() < 0.8
        ops += [one, other] if op is copy else [_set(op, deps=(*op.deps, new)) if later else op]
    return plan.replace_ops(copy.rank, ops)


def _shape(plan: Plan, rng: Random) -> Plan:
    """The frame of all views of a place, so that its elements have other addresses."""
    views = [view for op in _ops(plan) for view in _views(op).values() if view.buffer == "slot"]
    moved = _pick(rng, views)
    frame = _box(moved.frame, rng)
    pitch = moved.pitch + rng.choice((0, 0, 1, 8, -1))

    def change(name: str, view: View) -> View:
        here = (view.rank, view.slot, view.frame) == (moved.rank, moved.slot, moved.frame) and view.buffer == "slot"
        return view._replace(frame=frame, pitch=pitch) if here else view

    return _with(plan, *((op, _set_views(op, change)) for op in _ops(plan)))


def _two(plan: Plan, rng: Random) -> Plan:
    """Two changes, each of which alone is likely to be refused."""
    kinds = [kind for kind in KINDS if kind not in ("two of these", "JSON", "a field of the plan")]
    for _ in range(2):
        changed = KINDS[rng.choice(kinds)](plan, rng)
        try:
            plan = agree(changed)
        except (TypeError, AttributeError, ValueError):  # a value of another type
            return changed
    return plan


# --- JSON ---------------------------------------------------------------------------------------------


def _json(plan: Plan, rng: Random) -> str:
    """The text of the plan, with one entry of its JSON changed, or cut."""
    text = plan.to_json()
    if rng.random() < 0.02:
        return text[: rng.randrange(len(text))]
    tree = json.loads(text)
    holder, key = _entry(tree, rng)
    others = _entry(tree, rng)
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif way == 2:
        holder[key] = others[0][others[1]]
    elif way == 3:
        holder[key] = [holder[key]]
    elif way == 4 and isinstance(holder, dict):
        holder[rng.choice((key + "s", "kind", "__class__"))] = holder.pop(key)
    else:
        odd = (None, "x", "maker", 1.5, True, [], {}, -1, 0, 1, 2, 2**40, 10**400, float("inf"), [[[[[0]]]]])
        holder[key] = rng.choice(odd)
    try:
        return json.dumps(tree)
    except ValueError:  # an entry was put into itself
        raise NoChange from None


def _entry(tree: Any, rng: Random) -> tuple[Any, Any]:
    """A list or dictionary somewhere in a tree, and a key of it."""
    path = []
    while isinstance(tree, list | dict) and tree:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path.append((tree, key))
        tree = tree[key]
    return path[-1] if rng.random() < 0.6 else rng.choice(path)


KINDS: dict[str, Change] = {
    "a field of an op": _field,
    "a field of the plan": _plan_field,
    "a slot": _slot_field,
    "the dependencies of an op": _dependency,
    "an id of another rank": _number_of_another_rank,
    "drop an op": _drop,
    "drop a flag": _drop_flag,
    "double an op": _double,
    "move an op in its list": _reorder,
    "exchange fields of two ops": _exchange,
    "both ends of a flag": _flag,
    "the slot of a tile": _place,
    "the box of a transfer": _cut,
    "split a transfer": _split,
    "the frame of a tile": _shape,
    "two of these": _two,
    "JSON": lambda plan, rng: Plan.from_json(_json(plan, rng)),
}
