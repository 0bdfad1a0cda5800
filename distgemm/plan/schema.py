"""The types of a plan's fields: what :meth:`distgemm.Plan.from_json` reads and what the proof may rely on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, get_args

from distgemm.arguments import MAX_EXTENT, shown
from distgemm.plan.ops import Barrier, Copy, Flag, Gemm, Op, Reduce, Signal, Slot, View, Wait
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.plan.resize import OfRanks
from distgemm.plan.scaling import SCALE_OPERANDS, OperandScaling, Scaling
from distgemm.schedulers import TileCoord

__all__ = ["Mechanism", "PlanError", "SyncMode", "WorkspaceMode", "check_types", "read_fields"]

WorkspaceMode = Literal["full", "bounded"]
SyncMode = Literal["credit", "barrier"]
Mechanism = Literal["push", "pull", "store"]


class PlanError(Exception):
    """A plan that does not compute its product, or that a runtime cannot execute.

    The message names rank, iteration and op, or what no op does.

    Attributes:
        op: the op that is wrong. None if the error is about no single op.
    """

    def __init__(self, message: str, op: Op | None = None) -> None:
        super().__init__(message)
        self.op = op


OPS: dict[str, type[Op]] = {kind.__name__: kind for kind in (Barrier, Copy, Gemm, Reduce, Signal, Wait)}
"""The kinds of ops that a plan may have, by name."""

CHOICES: dict[str, tuple[str, ...]] = {
    "workspace": get_args(WorkspaceMode),
    "sync": get_args(SyncMode),
    "mechanism": get_args(Mechanism),
}
INTEGERS = {int}
OPERANDS = {"A", "B", "D", *SCALE_OPERANDS.values()}

OPTIONAL_VIEWS = ("c", "scale_a", "scale_b")
"""Fields of ops that are a view or None."""


def _is_integer(value: Any) -> bool:
    return type(value) is int  # True and numpy's integers are none


def _are_integers(value: Any) -> bool:
    return type(value) is tuple and set(map(type, value)) <= INTEGERS


def _are_indices(value: Any) -> bool:
    return (type(value) is tuple or type(value) is TileCoord) and set(map(type, value)) <= INTEGERS


def _is_tile(value: Any) -> bool:
    return type(value) is TileCoord and set(map(type, value)) == INTEGERS


def _is_box(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 3
        and all(type(edges) is tuple and len(edges) == 2 and set(map(type, edges)) == INTEGERS for edges in value)
    )


def _is_view(value: Any) -> bool:
    if type(value) is not View:
        return False
    rank, buffer, slot, frame, box, pitch = value
    return (
        type(rank) is type(slot) is type(pitch) is int
        and type(buffer) is str
        and _is_box(frame)
        and (box is frame or _is_box(box))
    )


def _are_views(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_view, value))


def _is_flag(value: Any) -> bool:
    if type(value) is not Flag:
        return False
    rank, number, initial, credit = value
    return type(rank) is type(number) is type(initial) is int and type(credit) is bool


def _is_slot(value: Any) -> bool:
    return (
        type(value) is Slot
        and type(value.offset) is type(value.bytes) is type(value.elements) is int
        and type(value.dtype) is str
        and value.dtype in DTYPE_BYTES
    )


Check = Callable[[Any], bool]
INTEGER = "an integer"
FIELDS: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("id", "rank", "round", "iteration", "slot", "peer"), (_is_integer, INTEGER)),
    "operand": (lambda value: type(value) is str and value in OPERANDS, "'A', 'B', 'D', 'SFA' or 'SFB'"),
    "tile": (_are_indices, "a tuple of integers"),
    "deps": (_are_integers, "a tuple of integers"),
    **dict.fromkeys(("a", "b", "out", "src", "dst"), (_is_view, "a View")),
    **dict.fromkeys(OPTIONAL_VIEWS, (lambda value: value is None or _is_view(value), "a View or None")),
    "sources": (_are_views, "a tuple of Views"),
    "flag": (_is_flag, "a Flag"),
}
"""For each field of ops: a function that says whether a value has the right type, and the type in words."""

_numbers: dict[type[Op], Callable[[Op], tuple[Any, ...]]] = {}
_others: dict[type[Op], list[tuple[str, Check, str]]] = {}
for _kind in OPS.values():
    _fields = [field.name for field in dataclasses.fields(_kind)]
    _numbers[_kind] = attrgetter(*(name for name in _fields if FIELDS[name][1] == INTEGER))
    _others[_kind] = [(name, *FIELDS[name]) for name in _fields if FIELDS[name][1] != INTEGER]
    if _kind is Gemm:
        _others[_kind] = [
            (name, _is_tile, "a TileCoord of integers") if name == "tile" else (name, *FIELDS[name])
            for name, *_ in _others[_kind]
        ]


def check_types(plan: Any) -> None:
    """Check that every field of a plan, of its ops and of their views has its type.

    Args:
        plan: a :class:`distgemm.Plan` of any origin.

    Raises:
        PlanError: if a field has another type. The message names the field and its value.
    """
    if type(plan.problem) is not GemmProblem:
        raise _wrong("problem", "a GemmProblem", plan.problem)
    if type(plan.schedule) is not str:
        raise _wrong("schedule", "a string", plan.schedule)
    for name, known in CHOICES.items():
        value = getattr(plan, name)
        if type(value) is not str or value not in known:
            raise _wrong(name, f"one of {', '.join(known)}", value)
    if not _is_integer(plan.iterations) or not 1 <= plan.iterations <= MAX_EXTENT:
        raise _wrong("iterations", f"{INTEGER} from 1 to {MAX_EXTENT}", plan.iterations)
    if not _are_integers(plan.mesh):
        raise _wrong("mesh", "a tuple of integers", plan.mesh)
    if plan.ranks_per_host is not None and not _is_integer(plan.ranks_per_host):
        raise _wrong("ranks_per_host", f"{INTEGER} or None", plan.ranks_per_host)
    _check_each("edges", plan.edges, 4, _are_integers, "a tuple of integers")
    _check_each("shards", plan.shards, 3, lambda value: type(value) is tuple, "a tuple of boxes")
    for operand, boxes in enumerate(plan.shards):
        _check_each(f"shards[{operand}]", boxes, None, _is_box, "a box: three pairs of integers")
    if plan.problem.scaling is None:
        if plan.scale_shards is not None:
            raise _wrong("scale_shards", "None for a problem without scaling", plan.scale_shards)
    else:
        _check_each("scale_shards", plan.scale_shards, 2, lambda value: type(value) is tuple, "a tuple of boxes")
        for operand, boxes in enumerate(plan.scale_shards):
            _check_each(f"scale_shards[{operand}]", boxes, None, _is_box, "a box: three pairs of integers")
    every_slot = tuple(plan.slots) if isinstance(plan.slots, OfRanks) else plan.slots
    _check_each("slots", every_slot, None, lambda value: type(value) is tuple, "a tuple of Slots")
    for rank, slots in enumerate(every_slot):
        wanted = f"a Slot of integers and one of the types {', '.join(DTYPE_BYTES)}"
        _check_each(f"slots[{rank}]", slots, None, _is_slot, wanted)
    rank_ops = tuple(plan.rank_ops) if isinstance(plan.rank_ops, OfRanks) else plan.rank_ops
    _check_each("rank_ops", rank_ops, None, lambda value: type(value) is tuple, "a tuple of ops")
    if not _have_types(rank_ops):
        for rank, ops in enumerate(rank_ops):
            for place, op in enumerate(ops):
                _check_op(op, rank, place)


def _have_types(rank_ops: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether all fields of all ops have their types: what ``_check_op`` checks, field by field and so fast."""
    by_kind: dict[type[Op], list[Any]] = defaultdict(list)
    for op in chain.from_iterable(rank_ops):
        by_kind[type(op)].append(op)
    views: list[Any] = []
    for kind, ops in by_kind.items():
        if kind not in _numbers or not _only(chain.from_iterable(map(_numbers[kind], ops)), int):
            return False
        for name, *_ in _others[kind]:
            values = list(map(attrgetter(name), ops))
            if name == "operand":
                good = _only(values, str) and set(values) <= OPERANDS
            elif name in ("deps", "tile"):
                kinds = {"deps": (tuple,), "tile": (TileCoord,) if kind is Gemm else (tuple, TileCoord)}[name]
                good = _only(values, *kinds) and _only(chain.from_iterable(values), int)
            elif name == "flag":
                good = _only(values, Flag) and all(map(_only, zip(*values, strict=True), (int, int, int, bool)))
            else:
                if name == "sources":
                    good = _only(values, tuple)
                    values = list(chain.from_iterable(values)) if good else []
                else:
                    good = True
                views += [view for view in values if view is not None] if name in OPTIONAL_VIEWS else values
            if not good:
                return False
    return _are_typed_views(views)


def _are_typed_views(views: list[Any]) -> bool:
    if not _only(views, View):
        return False
    unique = {id(view): view for view in views}  # most views belong to several ops
    if not unique:
        return True
    ranks, buffers, slots, frames, boxes, pitches = zip(*unique.values(), strict=True)
    every = list({id(box): box for box in chain(frames, boxes)}.values())
    if not (_only(chain(ranks, slots, pitches), int) and _only(buffers, str) and _only(every, tuple)):
        return False
    edges = list(chain.from_iterable(every))
    return (
        set(map(len, every)) == {3}
        and _only(edges, tuple)
        and set(map(len, edges)) == {2}
        and _only(chain.from_iterable(edges), int)
    )


def _only(values: Iterable[Any], *kinds: type) -> bool:
    """Whether all values have one of these types, and no subtype."""
    return set(map(type, values)) <= set(kinds)


def _check_op(op: Op, rank: int, place: int) -> None:
    kind = type(op)
    if kind not in _numbers:
        raise _wrong(f"rank_ops[{rank}][{place}]", f"a {', '.join(OPS)}", op)
    for name, (check, wanted) in FIELDS.items():
        if wanted == INTEGER and hasattr(op, name) and not check(getattr(op, name)):
            raise _wrong(f"rank_ops[{rank}][{place}].{name}", wanted, getattr(op, name))
    for name, check, wanted in _others[kind]:
        value = getattr(op, name)
        if not check(value):
            raise _wrong(f"rank_ops[{rank}][{place}].{name}", wanted, value)


def _check_each(name: str, value: Any, count: int | None, check: Check, wanted: str) -> None:
    if type(value) is not tuple or (count is not None and len(value) != count):
        raise _wrong(name, "a tuple" if count is None else f"a tuple of {count}", value)
    for place, each in enumerate(value):
        if not check(each):
            raise _wrong(f"{name}[{place}]", wanted, each)


def _wrong(where: str, wanted: str, value: Any) -> PlanError:
    return PlanError(f"the plan's {where} is {wanted}, got {shown(value)}")


# --- JSON ---------------------------------------------------------------------------------------------


def read_fields(fields: Any, names: Collection[str]) -> dict[str, Any]:
    """The fields of the plan that JSON describes. Their types are not checked yet.

    Args:
        fields: a plan as lists, dictionaries, numbers and strings, as ``json.loads`` returns it.
        names: names of the fields of :class:`distgemm.Plan`.

    Returns:
        Arguments for :class:`distgemm.Plan`.

    Raises:
        PlanError: if ``fields`` does not describe a plan. The message names the field.
    """
    fields = _known(fields, "plan", names)
    problem = _known(fields["problem"], "problem", _names(GemmProblem))
    if problem["scaling"] is not None:
        scaling = _known(problem["scaling"], "problem.scaling", _names(Scaling))
        for name in scaling:
            scaling[name] = _known(scaling[name], f"problem.scaling.{name}", _names(OperandScaling))
    try:
        if problem["scaling"] is not None:
            problem["scaling"] = Scaling(**{name: OperandScaling(**each) for name, each in scaling.items()})
        fields["problem"] = GemmProblem(**problem)
    except (ValueError, TypeError) as error:
        raise PlanError(f"the plan's problem: {error}") from None
    fields["rank_ops"] = tuple(
        tuple(_op(op, f"rank_ops[{rank}][{place}]") for place, op in enumerate(_list(ops, f"rank_ops[{rank}]")))
        for rank, ops in enumerate(_list(fields["rank_ops"], "rank_ops"))
    )
    fields["slots"] = tuple(
        tuple(_made(Slot, slot) for slot in _list(slots, f"slots[{rank}]"))
        for rank, slots in enumerate(_list(fields["slots"], "slots"))
    )
    return {name: _tuples(value) for name, value in fields.items()}


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _known(value: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    """The fields of an object, if it has exactly those of these names."""
    if type(value) is not dict:
        raise _wrong(where, "a JSON object", value)
    wrong = [f"no {name!r}" for name in sorted(set(names) - value.keys())]
    wrong += [f"unknown {shown(name)}" for name in sorted(value.keys() - set(names))]
    if wrong:
        raise PlanError(f"the plan's {where} has {', '.join(wrong)}; its fields are {', '.join(names)}")
    return dict(value)


def _list(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise _wrong(where, "a list", value)
    return value


DEPTH = 4
"""The nesting of the lists of the deepest field, ``shards``."""


def _tuples(value: Any, depth: int = DEPTH) -> Any:
    """Lists as tuples. Lists that are nested deeper than in a plan stay lists, and ``check_types`` refuses them."""
    return tuple([_tuples(each, depth - 1) for each in value]) if type(value) is list and depth else value


def _made(kind: Any, value: Any) -> Any:
    """A named tuple from a list of as many values. What is no such list stays as it is."""
    return kind(*_tuples(value)) if type(value) is list and len(value) == len(kind._fields) else value


READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("a", "b", "out", "src", "dst", *OPTIONAL_VIEWS), lambda value: _made(View, value)),
    "sources": lambda value: tuple(_made(View, view) for view in value) if type(value) is list else value,
    "flag": lambda value: _made(Flag, value),
}
"""Readers for fields of ops, by name. All other fields are numbers, strings and tuples of them."""


def _op(value: Any, where: str) -> Op:
    if type(value) is not dict:
        raise _wrong(where, "a JSON object", value)
    name = value.get("kind")
    kind = OPS.get(name) if type(name) is str else None
    if kind is None:
        raise _wrong(f"{where}.kind", f"one of {', '.join(OPS)}", name)
    fields = _known({key: each for key, each in value.items() if key != "kind"}, where, _names(kind))
    made = {name: READERS.get(name, _tuples)(each) for name, each in fields.items()}
    if kind is Gemm:
        made["tile"] = _made(TileCoord, fields["tile"])
    return kind(**made)
