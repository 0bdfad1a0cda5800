"""The model checker: a plan computes its product on every legal order of its ops, replay after replay.

Two questions settle that, for all ranks together and two consecutive replays:

* **Is every conflicting pair of accesses ordered?** Happens-before is the closure of dependencies within a
  rank, of signals and barriers between ranks, and of the end of a rank's replay before its next begins.
  Where any two accesses to the same memory, one of them a write, are ordered by it, every legal execution
  gives the same values.
* **Are those values right?** One legal execution is followed symbolically: what each piece of memory holds
  is a tile of an operand of this replay, or the sum of certain contributions.

Deadlock is ruled out twice: for ops that start as soon as they may, and for ranks that issue their ops one
by one in the order of the plan. Why two replays are enough, and how this module is itself checked, is in
docs/verify.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise, product
from typing import NamedTuple

from distgemm.ops import (
    Barrier,
    Box,
    Copy,
    Flag,
    Gemm,
    Op,
    Range,
    Reduce,
    Signal,
    View,
    Wait,
    accesses,
    box_extents,
    box_size,
    contains,
    overlaps,
)
from distgemm.plan import SLOT_ALIGNMENT, Plan, PlanError, slot_pitch
from distgemm.problem import DTYPE_BYTES

__all__ = ["verify"]

REPLAYS = 2


def verify(plan: Plan) -> None:
    """Raise :class:`PlanError`, naming rank, iteration and op, where the plan can go wrong."""
    _check_workspace(plan)
    _check_form(plan)
    _Execution(plan, _Order(plan)).run()


def _fail(op: Op, message: str) -> PlanError:
    return PlanError(f"{op.describe()}: {message}")


# --- form ---------------------------------------------------------------------------------------------


def _check_workspace(plan: Plan) -> None:
    """Slots are aligned, hold what they say and do not overlap; every tile of D has an owner."""
    for rank, slots in enumerate(plan.slots):
        end = 0
        for slot in sorted(slots):
            if slot.offset < end or slot.bytes < slot.elements * DTYPE_BYTES[slot.dtype]:
                raise PlanError(f"rank {rank}: {slot} overlaps another slot, or is too small for its elements")
            if slot.offset % SLOT_ALIGNMENT:
                raise PlanError(f"rank {rank}: {slot} does not start at a multiple of {SLOT_ALIGNMENT} bytes")
            end = slot.offset + slot.bytes
    tiles = [list(pairwise(plan.edges[mode])) for mode in (3, 0, 1)]
    owned: set[tuple[Range, ...]] = set()
    for shard in set(plan.shards[2]):
        inside = [
            [tile for tile in of_mode if low <= tile[0] < tile[1] <= high]
            for of_mode, (low, high) in zip(tiles, shard, strict=True)
        ]
        owned.update(product(*inside))
    for tile in product(*tiles):
        if all(low < high for low, high in tile) and tile not in owned:
            raise PlanError(f"no rank owns the tile of D in {tile}")


def _check_form(plan: Plan) -> None:
    """Ops refer to what exists, and say the same thing twice where they say it twice."""
    signals: dict[tuple[int, int], Signal] = {}
    waits: dict[tuple[int, int], Wait] = {}
    for rank, ops in enumerate(plan.rank_ops):
        seen: set[int] = set()
        last_round = 0
        for op in ops:
            if op.rank != rank:
                raise _fail(op, f"stands among the ops of rank {rank}")
            if op.id in seen:
                raise _fail(op, "its id is used twice")
            if not seen.issuperset(op.deps):
                missing = [dep for dep in op.deps if dep not in seen]
                raise _fail(op, f"depends on ops {missing}, which do not come before it")
            if op.round < last_round:
                raise _fail(op, f"its round {op.round} comes after round {last_round}")
            last_round = op.round
            seen.add(op.id)
            if isinstance(op, Signal):
                other: Op | None = signals.setdefault(op.flag[:2], op)
                if other is not op:
                    raise _fail(op, f"{op.flag} is signalled by {other} already")
            elif isinstance(op, Wait):
                if op.flag.rank != rank:
                    raise _fail(op, f"waits for {op.flag}, a flag of another rank")
                other = waits.setdefault(op.flag[:2], op)
                if other is not op:
                    raise _fail(op, f"{op.flag} is waited for by {other} already")
            else:
                _check_views(plan, op)
                _check_pitches(plan, op)
    for key, signal in signals.items():
        if key not in waits:
            raise _fail(signal, "no op waits for this flag")
    for key, wait in waits.items():
        if key not in signals:
            raise _fail(wait, "no op signals this flag: the wait never ends")
        _check_flag(signals[key], wait)


def _check_flag(signal: Signal, wait: Wait) -> None:
    flag: Flag = wait.flag
    if signal.flag != flag:
        raise _fail(wait, f"waits for {flag!r}, but {signal} sets {signal.flag!r}")
    if flag.initial not in (0, 1):
        raise _fail(wait, f"{flag} starts at {flag.initial}; it is 0 or 1")
    if wait.peer != signal.rank:
        raise _fail(wait, f"names rank {wait.peer}, the signal comes from rank {signal.rank}")
    if not flag.initial and wait.round <= signal.round:
        raise _fail(wait, f"waits in round {wait.round} for a signal of round {signal.round}, {signal}")


def _dtype(plan: Plan, view: View) -> str:
    if view.buffer == "slot":
        return plan.slots[view.rank][view.slot].dtype
    return plan.problem.dtype if view.buffer in ("A", "B") else str(plan.problem.out_dtype)


def _check_views(plan: Plan, op: Op) -> None:
    reads, write = accesses(op)
    if write is None:
        return
    for view in (*reads, write):
        if view.rank != op.rank and not (view is write and isinstance(op, Copy) and 0 <= view.rank < plan.world_size):
            raise _fail(op, f"touches {view}, the memory of another rank")
        if not contains(view.frame, view.box) or not box_size(view.box):
            raise _fail(op, f"{view} is empty or reaches out of {view.frame}")
        if view.buffer == "slot":
            slots = plan.slots[view.rank]
            if not 0 <= view.slot < len(slots):
                raise _fail(op, f"{view} names a slot that does not exist")
            if view.elements > slots[view.slot].elements:
                raise _fail(op, f"{view} does not fit into its slot of {slots[view.slot].elements} elements")
        elif view.buffer not in ("A", "B", "C", "D") or view.slot != -1:
            raise _fail(op, f"{view!r} is neither in a slot nor in a shard")
        elif view.frame != plan.box(view.buffer, view.rank):
            raise _fail(op, f"{view} does not lie in the shard of rank {view.rank}")
    if write.buffer not in ("slot", "D"):
        raise _fail(op, f"writes {write.buffer}, an input")
    if write.buffer == "D" and write.rank != op.rank:
        raise _fail(op, f"writes {write}, which is not in the symmetric workspace")
    adds: tuple[View, ...] = op.sources if isinstance(op, (Gemm, Reduce)) else ()
    for view in reads:
        # An op works on its elements in any order: only a sum may replace, element by element, what it adds to.
        if view[:3] == write[:3] and not (view in adds and view.frame == write.frame):
            raise _fail(op, f"writes {write}, which it reads as {view}")
    if isinstance(op, Copy):
        if op.src.box != op.dst.box:
            raise _fail(op, f"copies {op.src} to {op.dst}, another place of the matrix")
        if _dtype(plan, op.src) != _dtype(plan, op.dst):
            raise _fail(op, f"copies {_dtype(plan, op.src)} to a place of {_dtype(plan, op.dst)}")
        return
    assert isinstance(op, (Gemm, Reduce))
    wanted = write.box
    if isinstance(op, Gemm):
        if not all(0 <= index < extent for index, extent in zip(op.tile, plan.grid, strict=True)):
            raise _fail(op, f"its tile is outside the grid {tuple(plan.grid)}")
        rows, columns, depth, batch = (
            (edges[index], edges[index + 1]) for edges, index in zip(plan.edges, op.tile, strict=True)
        )
        for view, box in ((op.a, (batch, rows, depth)), (op.b, (batch, columns, depth))):
            if view.box != box:
                raise _fail(op, f"reads {view} where its tile is {box}")
            if _dtype(plan, view) != plan.problem.dtype:
                raise _fail(op, f"reads {view} of {_dtype(plan, view)} where A and B are {plan.problem.dtype}")
        reads, wanted = reads[2:], (batch, rows, columns)
    rests = plan.problem.partial_dtype if op.c is None else plan.problem.out_dtype
    if _dtype(plan, write) != rests:
        raise _fail(op, f"rounds to {_dtype(plan, write)} in {write} where this sum is {rests}")
    for view in (*reads, write):
        if view.box != wanted:
            raise _fail(op, f"adds {view} where its tile is {wanted}")


def _check_pitches(plan: Plan, op: Op) -> None:
    """Rows are dense in the caller's shards, and aligned in slots."""
    reads, write = accesses(op)
    for view in (*reads, write) if write else ():
        columns = box_extents(view.frame)[2]
        pitch = slot_pitch(columns, _dtype(plan, view)) if view.buffer == "slot" else columns
        if view.pitch != pitch:
            raise _fail(op, f"{view} has rows {view.pitch} elements apart, not {pitch}")


# --- happens-before -----------------------------------------------------------------------------------


class _Order:
    """Happens-before over two replays, and one legal order of all ops.

    A node, an op in a replay, is a number: replay * (number of ops) + place in the legal order of one
    replay. Nothing happens before a node of a smaller number.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.signals: dict[tuple[int, int], Signal] = {}
        self.waits: dict[tuple[int, int], Wait] = {}
        self.barriers: dict[int, list[Barrier]] = defaultdict(list)
        for op in (op for ops in plan.rank_ops for op in ops):
            if isinstance(op, Signal):
                self.signals[op.flag[:2]] = op
            elif isinstance(op, Wait):
                self.waits[op.flag[:2]] = op
            elif isinstance(op, Barrier):
                self.barriers[op.round].append(op)
        for round_, barriers in self.barriers.items():
            ranks = sorted(op.rank for op in barriers)
            if ranks != list(range(plan.world_size)):
                raise _fail(barriers[0], f"the barrier of round {round_} is entered by ranks {ranks}")
        self.sequence = self._sequence()
        self.size = len(self.sequence)
        self.place = {(op.rank, op.id): place for place, op in enumerate(self.sequence)}
        self.needs = [self._needs(op) for op in self.sequence]
        # The signal of the replay before that a Wait waits for.
        self.earlier = {
            self.place[wait.rank, wait.id]: self.place[self.signals[key].rank, self.signals[key].id]
            for key, wait in self.waits.items()
            if wait.flag.initial
        }
        # The ops of each rank on which no op of the rank depends: all others have ended when these have.
        needed = [{dep for op in ops for dep in op.deps} for ops in plan.rank_ops]
        self.last: list[list[int]] = [[] for _ in plan.rank_ops]
        for place, op in enumerate(self.sequence):
            if op.id not in needed[op.rank]:
                self.last[op.rank].append(place)

    def op(self, node: int) -> Op:
        return self.sequence[node % self.size]

    def node(self, replay: int, op: Op) -> int:
        return replay * self.size + self.place[op.rank, op.id]

    def _sequence(self) -> list[Op]:
        """One replay of all ranks, each rank issuing its ops one by one; raises where that blocks.

        Rounds that grow, as the form demands, leave no circle to wait in; this makes sure, and is quick.
        An order in which the ranks issue their ops one by one is also legal for ops that start as soon as
        they may. Starting an op never keeps another from starting, so neither can deadlock if this one does
        not; and as it leaves every flag as it found it, nor does the next replay.
        """
        result: list[Op] = []
        issued = [0] * self.plan.world_size
        flags = {key: wait.flag.initial for key, wait in self.waits.items()}
        at_barrier: dict[int, set[int]] = defaultdict(set)
        parked: dict[tuple[int, int], int] = {}
        ready = deque(range(self.plan.world_size))
        while ready:
            rank = ready.popleft()
            ops = self.plan.rank_ops[rank]
            while issued[rank] < len(ops):
                op = ops[issued[rank]]
                if isinstance(op, Wait):
                    if not flags[op.flag[:2]]:
                        parked[op.flag[:2]] = rank
                        break
                    flags[op.flag[:2]] = 0
                elif isinstance(op, Signal):
                    flags[op.flag[:2]] = 1
                    if op.flag[:2] in parked:
                        ready.append(parked.pop(op.flag[:2]))
                elif isinstance(op, Barrier) and rank not in at_barrier[op.round]:
                    at_barrier[op.round].add(rank)
                    if len(at_barrier[op.round]) < self.plan.world_size:
                        break
                    ready.extend(other for other in range(self.plan.world_size) if other != rank)
                result.append(op)
                issued[rank] += 1
        stuck = [ops[count] for ops, count in zip(self.plan.rank_ops, issued, strict=True) if count < len(ops)]
        if stuck:
            others = "; ".join(op.describe() for op in stuck[1:4])
            raise _fail(stuck[0], f"deadlock: it never starts{'; nor does ' + others if others else ''}")
        return result

    def _needs(self, op: Op) -> list[int]:
        """Places of the ops of the same replay that directly happen before an op."""
        members = self.barriers[op.round] if isinstance(op, Barrier) else [op]
        found = [self.place[member.rank, dep] for member in members for dep in member.deps]
        if isinstance(op, Wait) and not op.flag.initial:
            signal = self.signals[op.flag[:2]]
            found.append(self.place[signal.rank, signal.id])
        return found

    def happens_before(self, first: int, then: int) -> bool:
        """Whether ``first`` has finished before ``then`` starts, in every execution.

        A search backwards from ``then``, nearest first. That all ops of a rank's replay before have ended when
        it begins the next is used last: it is rarely needed, and leads to many ops.
        """
        size, needs, earlier = self.size, self.needs, self.earlier
        rank = self.op(first).rank
        seen = {then}
        queue = [then]
        begun: set[int] = set()  # ranks whose replay before must have ended
        for node in queue:
            base = 0
            if node >= size > first:
                op = self.op(node)
                if op.rank == rank or isinstance(op, Barrier):
                    return True
                begun.add(op.rank)
            if node >= size:
                base = size
                if earlier.get(node - size, -1) == first:
                    return True
            place = node - base
            for need in needs[place]:
                if base + need == first:
                    return True
                if base + need > first and base + need not in seen:
                    seen.add(base + need)
                    queue.append(base + need)
            if base and earlier.get(place, -1) > first and earlier[place] not in seen:
                seen.add(earlier[place])
                queue.append(earlier[place])
            if node == queue[-1]:
                # Looked at all that is near.
                for other in begun:
                    ends = [end for end in self.last[other] if end >= first and end not in seen]
                    if first in ends:
                        return True
                    seen.update(ends)
                    queue += ends
                begun.clear()
        return False


# --- values -------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """What a box of memory holds: these elements of an operand. operand "?": nothing known."""

    operand: str
    replay: int
    parts: int = 0  # of a sum: bit k for each k tile in it
    c: bool = False  # of a sum: whether beta * C is in it


UNKNOWN = _Content("?", -1)

CALLER = -1


class _Piece:
    """A box of memory that was written at once, and who has read which part of it since.

    writer: a node, or CALLER
    """

    __slots__ = ("box", "content", "frame", "readers", "writer")

    def __init__(self, frame: Box, box: Box, content: _Content, writer: int) -> None:
        self.frame = frame
        self.box = box
        self.content = content
        self.writer = writer
        self.readers: list[tuple[int, Box]] = []

    def part(self, box: Box) -> _Piece:
        """The part in ``box``, which lies in it."""
        part = _Piece(self.frame, box, self.content, self.writer)
        part.readers = [reader for reader in self.readers if overlaps(reader[1], box)]
        return part


class _Execution:
    """One legal execution of two replays, with every access checked against those before it."""

    def __init__(self, plan: Plan, order: _Order) -> None:
        self.plan = plan
        self.order = order
        self.memory: dict[tuple[int, str, int], list[_Piece]] = defaultdict(list)
        self.multiplied: dict[tuple[int, ...], Gemm] = {}
        self.all_parts = sum(1 << k for k, (start, stop) in enumerate(pairwise(plan.edges[2])) if start < stop)

    def run(self) -> None:
        for replay in range(REPLAYS):
            self.multiplied.clear()
            self._begin(replay)
            for place, op in enumerate(self.order.sequence):
                node = replay * self.order.size + place
                if isinstance(op, Gemm):
                    self._gemm(op, replay, node)
                elif isinstance(op, Reduce):
                    self._write(op.out, self._sum(op, op.sources, op.c, _Content("D", replay), node), node)
                elif isinstance(op, Copy):
                    self._copy(op, replay, node)
                elif isinstance(op, Signal):
                    self._signal(op, replay, node)
            self._end(replay)

    def _begin(self, replay: int) -> None:
        """The caller has written the inputs of this replay, and D holds nothing.

        Only its own rank touches a shard: what the caller does to it between replays needs no order.
        """
        for rank in range(self.plan.world_size):
            for operand in "ABCD":
                box = self.plan.box(operand, rank)
                content = UNKNOWN if operand == "D" else _Content(operand, replay)
                self.memory[rank, operand, -1] = [_Piece(box, box, content, CALLER)]

    def _end(self, replay: int) -> None:
        """The caller reads D: every contribution to every element is in it, so every tile was multiplied."""
        wanted = _Content("D", replay, self.all_parts, True)
        for rank, ops in enumerate(self.plan.rank_ops):
            for piece in self.memory[rank, "D", -1]:
                if piece.content == wanted or not box_size(piece.box):
                    continue
                holds = f"D in {piece.box} holds {self._say(piece.content)} at the end of the replay"
                if piece.writer != CALLER:
                    raise _fail(self.order.op(piece.writer), holds)
                if not ops:
                    raise PlanError(f"rank {rank} iteration 0: it has no op, and {holds}")
                raise _fail(ops[-1], f"is the last op of its rank, and {holds}")

    def _copy(self, op: Copy, replay: int, node: int) -> None:
        for piece in self._read(op.src, node):
            if piece.content.replay != replay:
                raise _fail(op, f"copies {op.src}, which holds {self._say(piece.content)}{self._by(piece)}")
            self._write(op.dst._replace(box=piece.box), piece.content, node)

    def _gemm(self, op: Gemm, replay: int, node: int) -> None:
        other = self.multiplied.setdefault(op.tile, op)
        if other is not op:
            raise _fail(op, f"multiplies a tile that {other} has multiplied")
        self._expect(op, op.a, _Content("A", replay), node)
        self._expect(op, op.b, _Content("B", replay), node)
        own = _Content("D", replay, 1 << op.tile.k)
        self._write(op.out, self._sum(op, op.sources, op.c, own, node), node)

    def _expect(self, op: Op, view: View, wanted: _Content, node: int) -> None:
        for piece in self._read(view, node):
            if piece.content != wanted:
                raise _fail(
                    op, f"reads {view} as {wanted.operand}, but it holds {self._say(piece.content)}{self._by(piece)}"
                )

    def _sum(self, op: Op, sources: tuple[View, ...], c: View | None, own: _Content, node: int) -> _Content:
        """What an op makes that adds ``sources`` to its own contribution."""
        _, replay, parts, has_c = own
        for view in sources:
            pieces = self._read(view, node)
            content = pieces[0].content
            if any(piece.content != content for piece in pieces):
                raise _fail(op, f"adds {view}, whose parts hold different sums")
            if content.operand != "D" or content.replay != replay:
                raise _fail(op, f"adds {view}, but it holds {self._say(content)}{self._by(pieces[0])}")
            if content.parts & parts or (content.c and has_c):
                raise _fail(op, f"adds {view}, which holds contributions that are in the sum already")
            parts, has_c = parts | content.parts, has_c or content.c
        if c is not None:
            self._expect(op, c, _Content("C", replay), node)
            if has_c:
                raise _fail(op, "adds beta * C a second time")
        return _Content("D", replay, parts, has_c or c is not None)

    def _signal(self, op: Signal, replay: int, node: int) -> None:
        """A flag may be set again only after it was waited for."""
        wait = self.order.waits[op.flag[:2]]
        seen_in = replay - 1 + op.flag.initial
        if seen_in >= 0 and not self.order.happens_before(self.order.node(seen_in, wait), node):
            raise _fail(op, f"may set {op.flag} again before {wait} has seen it: a signal would be lost")

    # --- memory -----------------------------------------------------------------------------------------

    def _say(self, content: _Content) -> str:
        if content == UNKNOWN:
            return "nothing"
        if content.operand != "D":
            return f"{content.operand} of replay {content.replay}"
        parts = [k for k in range(self.plan.grid.k) if content.parts >> k & 1]
        missing = [k for k in range(self.plan.grid.k) if (self.all_parts & ~content.parts) >> k & 1]
        c = "" if content.c else " without C"
        return f"the sum of k tiles {parts}{c} of replay {content.replay}" + (f", not of {missing}" if missing else "")

    def _name(self, node: int) -> str:
        return f"{self.order.op(node)} in replay {node // self.order.size}"

    def _by(self, piece: _Piece) -> str:
        return "" if piece.writer == CALLER else f", written by {self._name(piece.writer)}"

    def _check_order(self, first: int, then: int, what: str, view: View) -> None:
        if first != CALLER and not self.order.happens_before(first, then):
            raise _fail(self.order.op(then), f"{what} {view} is not ordered after {self._name(first)}")

    def _read(self, view: View, node: int) -> list[_Piece]:
        """The pieces of a view, cut to it; every writer must happen before the read."""
        held = self.memory[view.rank, view.buffer, view.slot]
        found = []
        size = 0
        for piece in held:
            if piece.frame != view.frame or not overlaps(piece.box, view.box):
                continue
            self._check_order(piece.writer, node, "reading", view)
            box = piece.box if piece.box == view.box else _cut(piece.box, view.box)
            piece.readers.append((node, box))
            found.append(_Piece(piece.frame, box, piece.content, piece.writer))
            size += box_size(box)
        if size != box_size(view.box):
            by = self._by(held[0]) if held else ""
            raise _fail(self.order.op(node), f"reads {view}, which does not hold that tile{by}")
        return found

    def _write(self, view: View, content: _Content, node: int) -> None:
        """Replace what a view holds; every earlier access must happen before the write.

        With another frame the bytes of a tile lie elsewhere in the slot: then all that it held is in the way.
        """
        kept = []
        for piece in self.memory[view.rank, view.buffer, view.slot]:
            same = piece.frame == view.frame
            if same and not overlaps(piece.box, view.box):
                kept.append(piece)
                continue
            self._check_order(piece.writer, node, "writing", view)
            for reader, box in piece.readers:
                # Where an op writes what it reads, the form has been checked.
                if reader != node and (not same or overlaps(box, view.box)):
                    self._check_order(reader, node, "writing", view)
            if same and piece.box != view.box:
                kept += [piece.part(rest) for rest in _subtract(piece.box, view.box)]
        kept.append(_Piece(view.frame, view.box, content, node))
        self.memory[view.rank, view.buffer, view.slot] = kept


def _cut(box: Box, to: Box) -> Box:
    """What two boxes share."""
    (l0, l1), (r0, r1), (c0, c1) = box
    (m0, m1), (s0, s1), (d0, d1) = to
    return (max(l0, m0), min(l1, m1)), (max(r0, s0), min(r1, s1)), (max(c0, d0), min(c1, d1))


def _subtract(box: Box, cut: Box) -> list[Box]:
    """What is left of ``box`` without ``cut``, in disjoint boxes."""
    batch, rows, columns = box
    shared = _cut(box, cut)
    rest: list[Box] = [((low, high), rows, columns) for low, high in _outside(batch, shared[0])]
    rest += [(shared[0], (low, high), columns) for low, high in _outside(rows, shared[1])]
    return rest + [(shared[0], shared[1], (low, high)) for low, high in _outside(columns, shared[2])]


def _outside(whole: tuple[int, int], part: tuple[int, int]) -> list[tuple[int, int]]:
    """What is left of a range without a part of it."""
    return [(low, high) for low, high in ((whole[0], part[0]), (part[1], whole[1])) if low < high]
