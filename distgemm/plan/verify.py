"""The model checker: a plan computes its product on every legal order of its ops, replay after replay.

Two questions settle that, for all ranks together:

* **Is every conflicting pair of accesses ordered?** Happens-before is the closure of dependencies within a
  rank, of signals and barriers between ranks, and of the end of a rank's replay before its next begins.
  Where any two accesses to the same memory, one of them a write, are ordered by it, every legal execution
  gives the same values.
* **Are those values right?** One legal execution is followed symbolically: what each piece of memory holds
  is a tile of an operand, or the sum of certain contributions.

Deadlock is ruled out twice: for ops that start as soon as they may, and for ranks that issue their ops one
by one in the order of the plan. Why one replay, and what it hands to the next, are enough, and how this module
is itself checked, is in docs/verify.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from distgemm.plan.ops import Barrier, Box, Copy, Gemm, Op, Reduce, Signal, View, Wait, box_size, link_of, overlaps
from distgemm.plan.plan import Plan, PlanError, collector_paused
from distgemm.plan.validate import FlagKey, PlanIndex, fail, validate

__all__ = ["verify"]


def verify(plan: Plan) -> None:
    """Raise :class:`PlanError`, naming rank, iteration and op, where the plan can go wrong."""
    with collector_paused():
        Evaluation(plan, Order(plan, validate(plan))).run()


# --- happens-before -----------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """Which ops directly happen before which, by their places in ``Order.sequence``.

    Attributes:
        number: the place of each op, by rank and id.
        direct, following: of each op, those directly before it, and after it, in the same replay.
        next_wait, last_signal: of a Signal, the Wait of the next replay that it ends; and the other way round.
    """

    number: list[dict[int, int]]
    direct: list[list[int]]
    following: list[list[int]]
    next_wait: dict[int, int]
    last_signal: dict[int, int]


class Order:
    """Happens-before, and one legal order of all ops of a replay.

    Nothing happens before an op that stands later in ``sequence``.
    """

    def __init__(self, plan: Plan, form: PlanIndex) -> None:
        self.plan, self.form, self.ops = plan, form, form.ops
        self.sequence = self._issue()

    def _issue(self) -> list[Op]:
        """One replay of all ranks, each rank issuing its ops one by one; raises where that blocks.

        Rounds that grow, as the form demands, leave no circle to wait in; this makes sure, and is quick.
        An order in which the ranks issue their ops one by one is also legal for ops that start as soon as
        they may. Starting an op never keeps another from starting, so neither can deadlock if this one does
        not; and as it leaves every flag as it found it, nor does the next replay.
        """
        result: list[Op] = []
        ranks = range(self.plan.world_size)
        left = [iter(ops) for ops in self.plan.rank_ops]
        waiting: list[Op | None] = [next(ops, None) for ops in left]  # the op that each rank issues next
        flags = {key for key, wait in self.form.waits.items() if wait.flag.initial}
        missing = dict.fromkeys(self.form.barriers, self.plan.world_size)
        parked: dict[FlagKey, int] = {}
        ready = deque(ranks)
        while ready:
            rank = ready.popleft()
            op = waiting[rank]
            while op is not None:
                if isinstance(op, Signal):
                    key = op.flag[:2]
                    flags.add(key)
                    if key in parked:
                        ready.append(parked.pop(key))
                elif isinstance(op, Wait):
                    key = op.flag[:2]
                    if key not in flags:
                        parked[key] = rank
                        break
                    flags.remove(key)
                elif isinstance(op, Barrier) and missing[op.round]:
                    missing[op.round] -= 1
                    if missing[op.round]:
                        break
                    # The last to come sends the others on.
                    ready.extend(other for other in ranks if other != rank)
                result.append(op)
                op = next(left[rank], None)
            waiting[rank] = op
        stuck = [op for op in waiting if op is not None]
        if stuck:
            others = "; ".join(op.describe() for op in stuck[1:4])
            raise fail(stuck[0], f"deadlock: it never starts{'; nor does ' + others if others else ''}")
        return result

    @cached_property
    def _graph(self) -> _Graph:
        """Only built for orders that are not plain to see."""
        number: list[dict[int, int]] = [{} for _ in self.ops]
        for place, op in enumerate(self.sequence):
            number[op.rank][op.id] = place
        direct = []
        for op in self.sequence:
            members = self.form.barriers[op.round] if isinstance(op, Barrier) else [op]
            direct.append([number[member.rank][dep] for member in members for dep in member.deps])
        next_wait, last_signal = {}, {}
        for key, signal in self.form.signals.items():
            wait = self.form.waits[key]
            given, taken = number[signal.rank][signal.id], number[wait.rank][wait.id]
            if wait.flag.initial:
                next_wait[given], last_signal[taken] = taken, given
            else:
                direct[taken].append(given)
        following: list[list[int]] = [[] for _ in self.sequence]
        for place, needs in enumerate(direct):
            for need in needs:
                following[need].append(place)
        return _Graph(number, direct, following, next_wait, last_signal)

    def before(self, op: Op, other: Op) -> bool:
        """Whether ``op`` has ended before ``other`` of the same replay starts, in every execution.

        Searched from both, nearest first: what orders two ops is nearly always close to both.
        """
        graph = self._graph
        first, then = graph.number[op.rank][op.id], graph.number[other.rank][other.id]
        after, prior = {first}, {then}
        ahead, behind = [first], [then]
        # Where one search comes to its end, nothing connects the two.
        for near, far in zip(ahead, behind, strict=False):
            for place in graph.following[near]:
                if place in prior:
                    return True
                if place < then and place not in after:
                    after.add(place)
                    ahead.append(place)
            for place in graph.direct[far]:
                if place in after:
                    return True
                if place > first and place not in prior:
                    prior.add(place)
                    behind.append(place)
        return False

    def before_next(self, op: Op, other: Op) -> bool:
        """Whether ``op`` of a replay has ended before ``other`` of the next one starts, in every execution.

        What follows ``op`` in its replay and what comes before ``other`` in the next are searched for a pair that
        connects the replays: a Signal and its Wait; two ops of one rank; anything and a Barrier, to which every
        rank comes after its replay before.
        """
        graph = self._graph
        first, then = graph.number[op.rank][op.id], graph.number[other.rank][other.id]
        after, prior = {first}, {then}
        ahead, behind = [first], [then]
        ended: set[int] = set()
        begun: set[int] = set()
        at = 0
        while at < len(ahead) or at < len(behind):
            if at < len(ahead):
                rank = self.sequence[ahead[at]].rank
                if rank in begun or graph.next_wait.get(ahead[at]) in prior:
                    return True
                ended.add(rank)
                new = [place for place in graph.following[ahead[at]] if place not in after]
                after.update(new)
                ahead += new
            if at < len(behind):
                far = self.sequence[behind[at]]
                if far.rank in ended or isinstance(far, Barrier) or graph.last_signal.get(behind[at]) in after:
                    return True
                begun.add(far.rank)
                new = [place for place in graph.direct[behind[at]] if place not in prior]
                prior.update(new)
                behind += new
            at += 1
        return False


# --- values -------------------------------------------------------------------------------------------

INPUTS = ("A", "B", "C")

Content = str | int
"""What a box of memory holds: "A", "B", "C", these elements of it; or a sum: bit 0 for beta * C, bit k + 1 for the
contribution of k tile k."""


class _Piece:
    """A box of memory that was written at once, and who has read which part of it since.

    known: the id of the op after which the memory's rank knows that it was written: the writer, or the Wait for the
           arrival, then with its flag
    """

    __slots__ = ("box", "content", "flag", "frame", "known", "readers", "writer")

    def __init__(self, frame: Box, box: Box, content: Content, writer: Op) -> None:
        self.frame = frame
        self.box = box
        self.content = content
        self.writer = writer
        self.known: int | None = writer.id
        self.flag: FlagKey | None = None
        self.readers: list[tuple[Op, Box]] = []

    def is_for(self, op: Op, view: View) -> bool:
        """Whether it is just what an op reads and replaces, and nobody else has read."""
        return self.frame == view.frame and self.box == view.box and len(self.readers) == 1 and self.readers[0][0] is op

    def part(self, box: Box) -> _Piece:
        """The part in ``box``, which lies in it."""
        part = _Piece(self.frame, box, self.content, self.writer)
        part.known, part.flag = self.known, self.flag
        part.readers = [reader for reader in self.readers if overlaps(reader[1], box)]
        return part


class Evaluation:
    """One legal execution of a replay, and what it hands to the next, with every access checked."""

    def __init__(self, plan: Plan, order: Order) -> None:
        self.plan, self.order = plan, order
        self.signals, self.waits = order.form.signals, order.form.waits
        self.slots: list[list[list[_Piece]]] = [[[] for _ in slots] for slots in plan.slots]
        self.d: list[list[_Piece]] = [[] for _ in plan.rank_ops]
        # For each slot, by rank and number, what writes it, in the order of the ops.
        self.written: dict[tuple[int, int], list[tuple[Op, View]]] = {}
        self.multiplied: dict[tuple[int, ...], Gemm] = {}
        # The Wait for the arrival of what was sent, by the op's rank and id; and flags that need no further look.
        self.arrivals: dict[tuple[int, int], Wait] = {}
        self.handed_over: set[FlagKey] = set()
        self.complete = 1 | sum(2 << k for k, (start, stop) in enumerate(pairwise(plan.edges[2])) if start < stop)

    def run(self) -> None:
        for key, signal in self.signals.items():
            wait = self.waits[key]
            for dep in () if wait.flag.initial else signal.deps:
                sent = self.order.ops[signal.rank][dep]
                if link_of(sent) == (signal.rank, wait.rank):
                    self.arrivals[sent.rank, sent.id] = wait
        for op in self.order.sequence:
            if isinstance(op, Gemm):
                self._gemm(op)
            elif isinstance(op, Copy):
                self._copy(op)
            elif isinstance(op, Reduce):
                self._write(op, op.out, self._sum(op, 0))
        self._end()
        self._next_replay()
        self._check_flags()

    def _end(self) -> None:
        """The caller reads D: every contribution to every element is in it, so every tile was multiplied."""
        for rank, pieces in enumerate(self.d):
            for piece in pieces:
                if piece.content != self.complete:
                    holds = f"D in {piece.box} holds {self._say(piece.content)} at the end of the replay"
                    raise fail(piece.writer, holds)
            if sum(box_size(piece.box) for piece in pieces) != box_size(self.plan.box("D", rank)):
                raise self._missing(rank)

    def _missing(self, rank: int) -> PlanError:
        """Says which tile is not in a rank's D."""
        shard = self.plan.box("D", rank)

        def lacks(box: Box) -> bool:
            held = sum(box_size(_cut(piece.box, box)) for piece in self.d[rank] if overlaps(piece.box, box))
            return overlaps(box, shard) and held != box_size(_cut(box, shard))

        rows, columns, _, batches = (list(pairwise(edges)) for edges in self.plan.edges)
        m, n, batch = next(
            (m, n, batch)
            for m, n, batch in product(range(len(rows)), range(len(columns)), range(len(batches)))
            if lacks((batches[batch], rows[m], columns[n]))
        )
        box = batches[batch], rows[m], columns[n]
        owners = [other for other in range(self.plan.world_size) if overlaps(self.plan.box("D", other), box)]
        where = f"rows {rows[m][0]}:{rows[m][1]}, columns {columns[n][0]}:{columns[n][1]}"
        by = sorted({op.rank for op in self.multiplied.values() if op.out.box == box})
        if by:
            made = f"multiplied on {_ranks(by)}, owned by {_ranks(owners)}"
            return PlanError(f"the tile D({m}, {n}, {batch}), {where}, does not get to rank {rank}: {made}")
        return PlanError(f"no rank multiplies the tile D({m}, {n}, {batch}), {where}, owned by {_ranks(owners)}")

    def _next_replay(self) -> None:
        """What is left in the workspace is overwritten only after all that this replay does with it.

        The next replay does the same ops: it reads only what it has itself written before, as this one did, and
        the order within it is the same. Shards need no order: none but their own rank touches them.
        """
        for (rank, slot), writes in self.written.items():
            left = self.slots[rank][slot]
            for op, view in writes:
                left = self._replaced(left, view, op, self._ended_before_next(op))
                if not left:
                    break

    def _ended_before_next(self, op: Op) -> Callable[[Op], bool]:
        """Asks whether another op of this replay has ended before ``op`` of the next one starts.

        What ``op`` itself waits for, which nearly always says it, is looked at first.
        """
        needs = [self.order.ops[op.rank][dep] for dep in op.deps]
        credits = [self.signals[need.flag[:2]] for need in needs if isinstance(need, Wait) and need.flag.initial]
        # Every rank comes to a Barrier after its replay before.
        barrier = any(isinstance(need, Barrier) for need in needs)

        def ended(other: Op) -> bool:
            if barrier or other.rank == op.rank:
                return True
            for signal in credits:
                if other.rank == signal.rank and other.id in signal.deps:
                    self.handed_over.add(signal.flag[:2])
                    return True
            return self.order.before_next(other, op)

        return ended

    def _check_flags(self) -> None:
        """A flag is set again only after it was waited for.

        Where all conflicting accesses are ordered, flags around a transfer need no search. The Wait for its arrival
        comes before an op that reads what arrived, hence before the transfer of the next replay, and the Signal after
        that. The Wait for the credit comes before the transfer, hence before an op that uses the memory after it,
        and the Signal after that.
        """
        for key, signal in self.signals.items():
            wait = self.waits[key]
            if key in self.handed_over:
                continue
            # A flag that starts at 1 is waited for before it is set in each replay, one that starts at 0 after it.
            ordered = self.order.before if wait.flag.initial else self.order.before_next
            if not ordered(wait, signal):
                raise fail(signal, f"may set {signal.flag} again before {wait} has seen it: a signal would be lost")

    # --- ops --------------------------------------------------------------------------------------------

    def _copy(self, op: Copy) -> None:
        if op.src.buffer in INPUTS:
            self._write(op, op.dst, op.src.buffer)
            return
        for piece in self._read(op, op.src):
            self._write(op, op.dst if piece.box == op.dst.box else op.dst._replace(box=piece.box), piece.content)

    def _gemm(self, op: Gemm) -> None:
        other = self.multiplied.setdefault(op.tile, op)
        if other is not op:
            raise fail(op, f"multiplies a tile that {other} has multiplied")
        if op.a.buffer != "A":
            self._expect(op, op.a, "A")
        if op.b.buffer != "B":
            self._expect(op, op.b, "B")
        self._write(op, op.out, self._sum(op, 2 << op.tile.k))

    def _expect(self, op: Op, view: View, operand: str) -> None:
        if view.buffer in INPUTS:
            raise fail(op, f"reads {view} as {operand}, but it holds {view.buffer}")
        for piece in self._read(op, view):
            if piece.content != operand:
                raise fail(op, f"reads {view} as {operand}, but it holds {self._say(piece.content)}{_by(piece)}")

    def _sum(self, op: Gemm | Reduce, total: int) -> int:
        """What an op makes that adds to its own contribution."""
        for view in op.sources:
            if view.buffer in INPUTS:
                raise fail(op, f"adds {view}, but it holds {view.buffer}")
            pieces = self._read(op, view)
            content = pieces[0].content
            if len(pieces) > 1 and any(piece.content != content for piece in pieces):
                raise fail(op, f"adds {view}, whose parts hold different sums")
            if isinstance(content, str):
                raise fail(op, f"adds {view}, but it holds {content}{_by(pieces[0])}")
            if content & total:
                raise fail(op, f"adds {view}, which holds contributions that are in the sum already")
            total |= content
        if op.c is not None:
            if op.c.buffer != "C":
                self._expect(op, op.c, "C")
            if total & 1:
                raise fail(op, "adds beta * C a second time")
            total |= 1
        return total

    # --- memory -----------------------------------------------------------------------------------------

    def _say(self, content: Content) -> str:
        if isinstance(content, str):
            return content
        parts = [k for k in range(self.plan.grid.k) if content >> k & 2]
        missing = [k for k in range(self.plan.grid.k) if (self.complete & ~content) >> k & 2]
        c = "" if content & 1 else " without C"
        return f"the sum of k tiles {parts}{c}" + (f", not of {missing}" if missing else "")

    def _read(self, op: Op, view: View) -> list[_Piece]:
        """The pieces of a view of a slot or of D, cut to it; every writer must happen before the read."""
        held = self.slots[view.rank][view.slot] if view.buffer == "slot" else self.d[view.rank]
        found = []
        size = 0
        for piece in held:
            whole = piece.box == view.box
            if piece.frame != view.frame or not (whole or overlaps(piece.box, view.box)):
                continue
            if piece.known not in op.deps:
                if not self.order.before(piece.writer, op):
                    raise fail(op, f"reading {view} is not ordered after {piece.writer}")
            elif piece.flag is not None and not piece.readers:
                self.handed_over.add(piece.flag)
            if whole:
                piece.readers.append((op, view.box))
                return [piece]
            box = _cut(piece.box, view.box)
            piece.readers.append((op, box))
            found.append(_Piece(view.frame, box, piece.content, piece.writer))
            size += box_size(box)
        if not held:
            raise fail(op, f"reads {view}, which holds nothing")
        if size != box_size(view.box):
            raise fail(op, f"reads {view}, which does not hold that tile{_by(held[0])}")
        return found

    def _write(self, op: Op, view: View, content: Content) -> None:
        """Replace what a view holds; every earlier access must happen before the write."""
        if view.buffer == "slot":
            places, place = self.slots[view.rank], view.slot
            self.written.setdefault((view.rank, place), []).append((op, view))
        else:
            places, place = self.d, view.rank
        held = places[place]
        if len(held) == 1 and held[0].is_for(op, view):
            held.clear()
        elif held:

            def ended(other: Op) -> bool:
                # Where an op writes what it reads, the form has been checked.
                return other is op or (other.rank == op.rank and other.id in op.deps) or self.order.before(other, op)

            held = places[place] = self._replaced(held, view, op, ended)
        piece = _Piece(view.frame, view.box, content, op)
        if op.rank != view.rank:
            wait = self.arrivals.get((op.rank, op.id))
            if wait is not None:
                piece.known, piece.flag = wait.id, wait.flag[:2]
            else:
                piece.known = None
        held.append(piece)

    def _replaced(self, held: list[_Piece], view: View, op: Op, ended: Callable[[Op], bool]) -> list[_Piece]:
        """What is left of pieces when an op writes ``view``; all ops that used the rest must have ``ended``.

        With another frame the bytes of a tile lie elsewhere in the slot: then all that it held is in the way.
        """
        kept = []
        for piece in held:
            same, whole = piece.frame == view.frame, piece.box == view.box
            if same and not whole and not overlaps(piece.box, view.box):
                kept.append(piece)
                continue
            readers = [reader for reader, box in piece.readers if whole or not same or overlaps(box, view.box)]
            # The writer happens before each reader: where there are any, only they need be looked at.
            for other in readers or [piece.writer]:
                if not ended(other):
                    raise fail(op, f"writing {view} is not ordered after {other}")
            if same and not whole:
                kept += [piece.part(rest) for rest in _subtract(piece.box, view.box)]
        return kept


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by(piece: _Piece) -> str:
    return f", written by {piece.writer}"


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
