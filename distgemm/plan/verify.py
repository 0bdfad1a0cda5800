"""The model checker: it proves that a plan computes its product in every legal order of its ops, in every replay.

It answers two questions, for all ranks together:

* **Is every conflicting pair of accesses ordered?** Two accesses to the same memory conflict if one of them is a write.
  Happens-before is the transitive closure of dependencies within a rank, of signals and barriers between ranks, and of
  the order of a rank's replays. If happens-before orders all conflicting pairs, every legal execution computes the same
  values.
* **Are these values right?** The checker executes one legal order symbolically. Each piece of memory then holds a tile
  of an operand, or the sum of certain contributions.

The checker also proves that there is no deadlock, in two cases: ops start as soon as they may, or each rank issues its
ops one by one in the order of the plan. docs/verify.md says why it is enough to check one replay and what it leaves to
the next one. It also says how this module is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import cached_property, partial
from itertools import pairwise, product
from typing import NamedTuple

from distgemm.plan.ops import Barrier, Box, Copy, Gemm, Op, Reduce, Signal, View, Wait, box_size, link_of, overlaps
from distgemm.plan.plan import Plan, PlanError, collector_paused
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.plan.validate import FlagKey, PlanIndex, fail, not_multiplied, tile_box, validate

__all__ = ["verify"]


def verify(plan: Plan) -> None:
    """Prove that a plan computes its product, in every legal order of its ops and in every replay.

    Args:
        plan: a plan of any origin.

    Raises:
        PlanError: if it does not. The message names rank, iteration and op, or the tile that no op computes.
    """
    with collector_paused():
        Evaluation(plan, Order(plan, validate(plan))).run()


# --- happens-before -----------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """The direct edges of happens-before. Ops are numbers, their positions in ``Order.sequence``.

    Attributes:
        number: the number of each op, by rank and id.
        direct: for each op, the ops directly before it in the same replay.
        following: for each op, the ops directly after it in the same replay.
        next_wait: for the Signal of a flag that starts at 1, the Wait in the next replay that it ends.
        last_signal: for the Wait of such a flag, the Signal in the replay before that ends it.
    """

    number: list[dict[int, int]]
    direct: list[list[int]]
    following: list[list[int]]
    next_wait: dict[int, int]
    last_signal: dict[int, int]


class Order:
    """Happens-before, and ``sequence``, one legal order of all ops of a replay.

    If an op happens before another op of the same replay, it stands before it in ``sequence``.

    Args:
        plan: the plan.
        form: its ops, as :func:`distgemm.plan.validate.validate` returns them.

    Raises:
        PlanError: if the plan deadlocks.
    """

    def __init__(self, plan: Plan, form: PlanIndex) -> None:
        self.plan, self.form, self.ops = plan, form, form.ops
        self.sequence = self._issue()

    def _issue(self) -> list[Op]:
        """The ops of one replay, in an order in which each rank issues its ops one by one.

        validate() has checked that rounds grow, so there is no cycle of waits. This method makes sure of that, and is
        fast. The order that it finds is also legal if ops start as soon as they may. Starting an op never prevents
        another op from starting. So if this order does not deadlock, no other order does. The order leaves every flag
        as it found it, so the next replay does not deadlock either.

        Raises:
            PlanError: if the ranks deadlock.
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
                    # The last rank to arrive lets the others continue.
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
        """The graph of happens-before. It is made only if the ops' own dependencies do not show an order."""
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
        """Whether ``op`` has always ended before ``other`` of the same replay starts.

        The dependencies of ``other`` itself nearly always answer this. Otherwise this is a breadth-first search from
        both ops at once, because the connecting path is nearly always short.
        """
        # Ids count for each rank, so only ops of one rank can be compared by id.
        if op.rank == other.rank and op.id in other.deps:
            return True
        for dep in other.deps:
            need = self.ops[other.rank][dep]
            if isinstance(need, Wait) and not need.flag.initial:
                signal = self.form.signals[need.flag[:2]]
                if signal.rank == op.rank and op.id in signal.deps:
                    return True
        graph = self._graph
        first, then = graph.number[op.rank][op.id], graph.number[other.rank][other.id]
        after, prior = {first}, {then}
        ahead, behind = [first], [then]
        # If one of the two searches is exhausted, no path connects the ops.
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
        """Whether ``op`` of a replay has always ended before ``other`` of the next replay starts.

        The search goes from ``op`` to the ops after it in its replay, and from ``other`` to the ops before it in the
        next one. It ends at a pair that connects the replays: a Signal and its Wait, two ops of one rank, or any op and
        a Barrier, which every rank enters after its replay before.
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

INPUTS = ("A", "B", "C", *SCALE_OPERANDS.values())

Content = str | int
"""The content of a box of memory: an operand, or the bits of a sum. "A", "B", "C", "SFA" or "SFB" means the elements of
that operand in the same box. In a sum, bit 0 stands for beta * C, and bit k + 1 for the contribution of k tile k."""


class _Piece:
    """A box of memory that one op has written, and the ops that have read parts of it since.

    Attributes:
        frame: the frame of the view that was written.
        box: the part of the frame.
        content: what the op has written.
        writer: the op.
        known: id of the op on the memory's rank after which the content is there: the writer, or the Wait for its
            arrival. None if there is no such op. An op of another rank may have the same id.
        flag: the flag of that Wait. None without a Wait.
        readers: each op that has read since, and the box that it read.
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
        """Whether ``op`` writes exactly this piece and is its only reader."""
        return self.frame == view.frame and self.box == view.box and len(self.readers) == 1 and self.readers[0][0] is op

    def users(self, box: Box | None = None) -> list[Op]:
        """The last ops that used the piece, or its part in ``box``: the readers, or the writer if there are none.

        The writer happens before each reader, so it is enough to look at the readers.
        """
        readers = [reader for reader, read in self.readers if box is None or overlaps(read, box)]
        return readers or [self.writer]

    def part(self, box: Box) -> _Piece:
        """The part of this piece in ``box``, which lies in the piece."""
        part = _Piece(self.frame, box, self.content, self.writer)
        part.known, part.flag = self.known, self.flag
        part.readers = [reader for reader in self.readers if overlaps(reader[1], box)]
        return part


class _Memory:
    """What a slot or a shard of D holds.

    Attributes:
        held: the pieces that can be read, by their boxes, which are disjoint. All of them have one frame.
        replaced: the ops that used the tile that the slot held before, with another frame. If a tile arrives in parts,
            each part must wait for these ops, because the bytes of a part may be anywhere in the old tile.
        tiles: disjoint boxes. If all pieces have been some of them, another one overlaps no piece.
    """

    __slots__ = ("_only_tiles", "held", "replaced", "tiles")

    def __init__(self, tiles: Collection[Box] = ()) -> None:
        self.held: dict[Box, _Piece] = {}
        self.replaced: list[Op] = []
        self.tiles = tiles
        self._only_tiles = True

    @property
    def first(self) -> _Piece:
        """The piece that was written first."""
        return next(iter(self.held.values()))

    def add(self, piece: _Piece) -> None:
        """Add a piece that overlaps no other one."""
        self.held[piece.box] = piece
        self._only_tiles = self._only_tiles and piece.box in self.tiles

    def near(self, box: Box) -> list[_Piece]:
        """The pieces that may overlap a box: if one has this box, no other one does."""
        piece = self.held.get(box)
        if piece is not None:
            return [piece]
        return [] if self._only_tiles and box in self.tiles else list(self.held.values())

    def replace(self, view: View, op: Op, ended: Callable[[Op], bool]) -> None:
        """Remove what ``op`` replaces when it writes ``view``.

        Raises:
            PlanError: if an op that used a replaced part has not ``ended``.
        """
        if self.held and self.first.frame != view.frame:
            # The op comes after everything that used the held tile, and so after what used the tile before that one.
            self.replaced = [user for piece in self.held.values() for user in piece.users()]
            self.held = {}
        _check_ended(self.replaced, view, op, ended)
        if view.box == view.frame:
            # What is written into this frame later comes after this op.
            self.replaced = []
        for piece in self.near(view.box):
            whole = piece.box == view.box
            if not whole and not overlaps(piece.box, view.box):
                continue
            _check_ended(piece.users(None if whole else view.box), view, op, ended)
            del self.held[piece.box]
            if not whole:
                for rest in _subtract(piece.box, view.box):
                    self.add(piece.part(rest))


def _check_ended(users: list[Op], view: View, op: Op, ended: Callable[[Op], bool]) -> None:
    for other in users:
        if not ended(other):
            raise fail(op, f"writing {view} is not ordered after {other}")


class Evaluation:
    """A symbolic execution of one replay, with a check of every access, also against those of the next replay.

    Args:
        plan: the plan.
        order: happens-before, and the order of the execution.
    """

    def __init__(self, plan: Plan, order: Order) -> None:
        self.plan, self.order = plan, order
        self.signals, self.waits = order.form.signals, order.form.waits
        self.slots = [[_Memory() for _ in slots] for slots in plan.slots]
        batches, rows, columns = (
            [tile for tile in pairwise(plan.edges[mode]) if tile[0] < tile[1]] for mode in (3, 0, 1)
        )
        tiles = set(product(batches, rows, columns))
        self.d = [_Memory(tiles) for _ in plan.rank_ops]
        # The writes to each slot, by rank and number of the slot, in the order of the ops.
        self.written: dict[tuple[int, int], list[tuple[Op, View]]] = {}
        self.multiplied: dict[tuple[int, ...], Gemm] = {}
        # The Wait for the arrival of what an op has sent, by rank and id of that op. handed_over: flags whose Wait and
        # Signal other checks have ordered already.
        self.arrivals: dict[tuple[int, int], Wait] = {}
        self.handed_over: set[FlagKey] = set()
        self.complete = 1 | sum(2 << k for k, (start, stop) in enumerate(pairwise(plan.edges[2])) if start < stop)

    def run(self) -> None:
        """Check the plan.

        Raises:
            PlanError: if the plan does not compute its product.
        """
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
        """Check that every element of D holds all its contributions, so that every tile was multiplied."""
        for rank, memory in enumerate(self.d):
            for piece in memory.held.values():
                if piece.content != self.complete:
                    holds = f"D in {piece.box} holds {self._say(piece.content)} at the end of the replay"
                    raise fail(piece.writer, holds)
            if sum(map(box_size, memory.held)) != box_size(self.plan.box("D", rank)):
                raise self._missing(rank)

    def _missing(self, rank: int) -> PlanError:
        """The error that names a tile that is missing in a rank's D."""
        shard = self.plan.box("D", rank)

        def lacks(box: Box) -> bool:
            held = sum(box_size(_cut(other, box)) for other in self.d[rank].held if overlaps(other, box))
            return overlaps(box, shard) and held != box_size(_cut(box, shard))

        rows, columns, _, batches = (
            [index for index, (start, stop) in enumerate(pairwise(edges)) if start < stop] for edges in self.plan.edges
        )
        tile = next(tile for tile in product(rows, columns, batches) if lacks(tile_box(self.plan, tile)))
        _, (top, bottom), (left, right) = box = tile_box(self.plan, tile)
        by = sorted({op.rank for op in self.multiplied.values() if op.out.box == box})
        if not by:
            return not_multiplied(self.plan, tile)
        owners = [other for other in range(self.plan.world_size) if overlaps(self.plan.box("D", other), box)]
        where = f"rows {top}:{bottom}, columns {left}:{right}"
        made = f"multiplied on {_ranks(by)}, owned by {_ranks(owners)}"
        return PlanError(f"the tile D{tile}, {where}, does not get to rank {rank}: {made}")

    def _next_replay(self) -> None:
        """Check that the next replay overwrites a slot only after this replay's accesses to it have ended.

        The next replay executes the same ops. As this one, it reads only what it has written itself, and the order
        within it is the same. Shards need no check: only their own rank accesses them.
        """
        for (rank, slot), writes in self.written.items():
            memory = self.slots[rank][slot]
            left, replaced, frame = _Memory(), memory.replaced, memory.first.frame
            left.held = dict(memory.held)
            for op, view in writes:
                if view.frame == frame:
                    _check_ended(replaced, view, op, partial(self.order.before_next, other=op))
                left.replace(view, op, self._ended_before_next(op))
                if view.frame != frame or view.box == view.frame:
                    replaced = []
                if not (left.held or left.replaced or replaced):
                    break

    def _ended_before_next(self, op: Op) -> Callable[[Op], bool]:
        """A function that says whether another op of this replay has ended before ``op`` of the next one starts.

        The function looks first at the dependencies of ``op`` itself, which nearly always give the answer.
        """
        needs = [self.order.ops[op.rank][dep] for dep in op.deps]
        credits = [self.signals[need.flag[:2]] for need in needs if isinstance(need, Wait) and need.flag.initial]
        # Every rank enters a Barrier after its replay before.
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
        """Check that a flag is set again only after the Wait for it has ended.

        If all conflicting accesses are ordered, the flags of a transfer need no search. The Wait for its arrival
        happens before an op that reads the data. That op happens before the transfer of the next replay, and the
        transfer before the Signal of the arrival. The Wait for a credit happens before the transfer. The transfer
        happens before an op that uses the slot next, and that op before the Signal of the credit.
        """
        for key, signal in self.signals.items():
            wait = self.waits[key]
            if key in self.handed_over:
                continue
            # In each replay the Wait of a flag that starts at 1 comes before its Signal. If the flag starts at 0, the
            # Wait comes after its Signal, and before the Signal of the next replay.
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
        # validate() has checked that the boxes of scales are those of the tiles.
        for view, operand in zip((op.a, op.b, *op.scales), ("A", "B", *SCALE_OPERANDS.values()), strict=False):
            if view.buffer != operand:
                self._expect(op, view, operand)
        self._write(op, op.out, self._sum(op, 2 << op.tile.k))

    def _expect(self, op: Op, view: View, operand: str) -> None:
        if view.buffer in INPUTS:
            raise fail(op, f"reads {view} as {operand}, but it holds {view.buffer}")
        for piece in self._read(op, view):
            if piece.content != operand:
                raise fail(op, f"reads {view} as {operand}, but it holds {self._say(piece.content)}{_by(piece)}")

    def _sum(self, op: Gemm | Reduce, total: int) -> int:
        """The content of an op's result: its own contribution ``total``, its sources and C.

        Raises:
            PlanError: if a source is no sum, or a contribution or C would be added twice.
        """
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
        """The pieces of a view of a slot or of D, cut to its box.

        Raises:
            PlanError: if a writer does not happen before the read, or the view holds something else.
        """
        memory = self._memory(view)
        found = []
        size = 0
        for piece in memory.near(view.box):
            whole = piece.box == view.box
            if piece.frame != view.frame or not (whole or overlaps(piece.box, view.box)):
                continue
            if op.rank == view.rank and piece.known in op.deps:
                if piece.flag is not None and not piece.readers:
                    self.handed_over.add(piece.flag)
            elif not self.order.before(piece.writer, op):
                raise fail(op, f"reading {view} is not ordered after {piece.writer}")
            if whole:
                piece.readers.append((op, view.box))
                return [piece]
            box = _cut(piece.box, view.box)
            piece.readers.append((op, box))
            found.append(_Piece(view.frame, box, piece.content, piece.writer))
            size += box_size(box)
        if not memory.held:
            raise fail(op, f"reads {view}, which holds nothing")
        if size != box_size(view.box):
            raise fail(op, f"reads {view}, which does not hold that tile{_by(memory.first)}")
        return found

    def _write(self, op: Op, view: View, content: Content) -> None:
        """Replace what a view holds.

        Raises:
            PlanError: if an earlier access does not happen before the write.
        """
        memory = self._memory(view)
        if view.buffer == "slot":
            self.written.setdefault((view.rank, view.slot), []).append((op, view))
        if len(memory.held) == 1 and memory.first.is_for(op, view):
            memory.held = {}
        elif memory.held:

            def ended(other: Op) -> bool:
                # validate() has checked ops that write what they read.
                return other is op or self.order.before(other, op)

            memory.replace(view, op, ended)
        piece = _Piece(view.frame, view.box, content, op)
        if op.rank != view.rank:
            wait = self.arrivals.get((op.rank, op.id))
            if wait is not None:
                piece.known, piece.flag = wait.id, wait.flag[:2]
            else:
                piece.known = None
        memory.add(piece)

    def _memory(self, view: View) -> _Memory:
        return self.slots[view.rank][view.slot] if view.buffer == "slot" else self.d[view.rank]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by(piece: _Piece) -> str:
    return f", written by {piece.writer}"


def _cut(box: Box, to: Box) -> Box:
    """The intersection of two boxes."""
    (l0, l1), (r0, r1), (c0, c1) = box
    (m0, m1), (s0, s1), (d0, d1) = to
    return (max(l0, m0), min(l1, m1)), (max(r0, s0), min(r1, s1)), (max(c0, d0), min(c1, d1))


def _subtract(box: Box, cut: Box) -> list[Box]:
    """``box`` without ``cut``, as disjoint boxes."""
    batch, rows, columns = box
    shared = _cut(box, cut)
    rest: list[Box] = [((low, high), rows, columns) for low, high in _outside(batch, shared[0])]
    rest += [(shared[0], (low, high), columns) for low, high in _outside(rows, shared[1])]
    return rest + [(shared[0], shared[1], (low, high)) for low, high in _outside(columns, shared[2])]


def _outside(whole: tuple[int, int], part: tuple[int, int]) -> list[tuple[int, int]]:
    """A range without a part of it, as up to two ranges."""
    return [(low, high) for low, high in ((whole[0], part[0]), (part[1], whole[1])) if low < high]
