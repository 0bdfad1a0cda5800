"""The model checker: a plan computes its product on every legal order of its ops, replay after replay.

Two questions settle that, for all ranks together and two consecutive replays:

* **Is every conflicting pair of accesses ordered?** Happens-before is the closure of dependencies within a
  rank, of signals and barriers between ranks, and of the end of a rank's replay before its next begins.
  Where any two accesses to the same memory, one of them a write, are ordered by it, every legal execution
  gives the same values.
* **Are those values right?** One legal execution is followed symbolically: what each piece of memory holds
  is a tile of an operand of this replay, or the sum of certain contributions.

Deadlock is ruled out twice: for ops that start as soon as they may, and for ranks that issue their ops one
by one in the order of the plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
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
    box_size,
    contains,
    overlaps,
)
from distgemm.plan import Plan, PlanError

__all__ = ["verify"]

REPLAYS = 2


class _Node(NamedTuple):
    """An op in a replay; op -1 is the begin of the rank's replay, -2 its end."""

    replay: int
    rank: int
    op: int


BEGIN, END = -1, -2


def verify(plan: Plan) -> None:
    """Raise :class:`PlanError`, naming rank, iteration and op, where the plan can go wrong."""
    _check_form(plan)
    order = _Order(plan)
    _Execution(plan, order).run()


def _fail(op: Op, message: str) -> PlanError:
    return PlanError(f"{op.describe()}: {message}")


# --- form ---------------------------------------------------------------------------------------------


def _views(op: Op) -> tuple[list[View], View | None]:
    """What an op reads, and what it writes."""
    if isinstance(op, Gemm):
        return [op.a, op.b, *op.sources, *([op.c] if op.c else [])], op.out
    if isinstance(op, Reduce):
        return [*op.sources, *([op.c] if op.c else [])], op.out
    if isinstance(op, Copy):
        return [op.src], op.dst
    return [], None


def _check_form(plan: Plan) -> None:
    """Ops refer to what exists, and say the same thing twice where they say it twice."""
    signals: dict[tuple[int, int], Signal] = {}
    waits: dict[tuple[int, int], Wait] = {}
    for rank in range(plan.world_size):
        seen: set[int] = set()
        last_round = 0
        for op in plan.ops(rank):
            if op.rank != rank:
                raise _fail(op, f"stands among the ops of rank {rank}")
            if op.id in seen:
                raise _fail(op, "its id is used twice")
            missing = [dep for dep in op.deps if dep not in seen]
            if missing:
                raise _fail(op, f"depends on ops {missing}, which do not come before it")
            if op.round < last_round:
                raise _fail(op, f"its round {op.round} comes after round {last_round}")
            last_round = op.round
            seen.add(op.id)
            _check_views(plan, op)
            if isinstance(op, Signal):
                key = op.flag[:2]
                if key in signals:
                    raise _fail(op, f"{op.flag} is signalled by {signals[key].describe()} already")
                signals[key] = op
            elif isinstance(op, Wait):
                key = op.flag[:2]
                if op.flag.rank != rank:
                    raise _fail(op, f"waits for {op.flag}, a flag of another rank")
                if key in waits:
                    raise _fail(op, f"{op.flag} is waited for by {waits[key].describe()} already")
                waits[key] = op
    for key, signal in signals.items():
        if key not in waits:
            raise _fail(signal, "no op waits for this flag")
    for key, wait in waits.items():
        if key not in signals:
            raise _fail(wait, "no op signals this flag: the wait never ends")
        if signals[key].flag != wait.flag:
            raise _fail(
                wait,
                f"waits for {wait.flag} as {wait.flag.initial}, signalled as {signals[key].flag.initial} by rank {signals[key].rank}",
            )
        if wait.peer != signals[key].rank:
            raise _fail(wait, f"names rank {wait.peer}, the signal comes from rank {signals[key].rank}")
        if not wait.flag.initial and wait.round <= signals[key].round:
            raise _fail(wait, f"waits in round {wait.round} for a signal of round {signals[key].round}")


def _check_views(plan: Plan, op: Op) -> None:
    reads, write = _views(op)
    for view in [*reads, *([write] if write else [])]:
        if view.rank != op.rank and not (isinstance(op, Copy) and view is write):
            raise _fail(op, f"touches {view}, the memory of another rank")
        if not contains(view.frame, view.box):
            raise _fail(op, f"{view} reaches out of {view.frame}")
        if view.buffer == "slot":
            slots = plan.slots[view.rank]
            if not 0 <= view.slot < len(slots):
                raise _fail(op, f"{view} names a slot that does not exist")
            if box_size(view.frame) > slots[view.slot].elements:
                raise _fail(op, f"{view} does not fit into its slot of {slots[view.slot].elements} elements")
        elif view.frame != plan.box(view.buffer, view.rank):
            raise _fail(op, f"{view} does not lie in the shard of rank {view.rank}")
    if write is not None and write.buffer not in ("slot", "D"):
        raise _fail(op, f"writes {write.buffer}, an input")
    if write is not None and write.buffer == "D" and write.rank != op.rank:
        raise _fail(op, f"writes {write}, which is not in the symmetric workspace")
    if isinstance(op, Copy) and op.src.box != op.dst.box:
        raise _fail(op, f"copies {op.src} to {op.dst}, another place of the matrix")
    if isinstance(op, Gemm):
        m, n, k, batch = op.tile
        if not all(0 <= index < extent for index, extent in zip(op.tile, plan.grid, strict=True)):
            raise _fail(op, f"its tile is outside the grid {tuple(plan.grid)}")
        rows, columns, depth, batches = (
            (plan.edges[mode][index], plan.edges[mode][index + 1]) for mode, index in enumerate((m, n, k, batch))
        )
        for view, box in ((op.a, (batches, rows, depth)), (op.b, (batches, columns, depth))):
            if view.box != box:
                raise _fail(op, f"reads {view} where its tile is {box}")
        wanted = (batches, rows, columns)
    elif isinstance(op, Reduce):
        wanted = op.out.box
    else:
        return
    for view in [op.out, *op.sources, *([op.c] if op.c else [])]:
        if view.box != wanted:
            raise _fail(op, f"adds {view} where its tile is {wanted}")


# --- happens-before -----------------------------------------------------------------------------------


class _Order:
    """Happens-before over two replays, and one legal order of all ops."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ops: list[dict[int, Op]] = [{op.id: op for op in plan.ops(rank)} for rank in range(plan.world_size)]
        self.signal_of: dict[tuple[int, int], Signal] = {}
        self.wait_of: dict[tuple[int, int], Wait] = {}
        self.barriers: dict[int, list[Barrier]] = defaultdict(list)
        needed: list[set[int]] = []
        for rank in range(plan.world_size):
            used: set[int] = set()
            for op in plan.ops(rank):
                used.update(op.deps)
                if isinstance(op, Signal):
                    self.signal_of[op.flag[:2]] = op
                elif isinstance(op, Wait):
                    self.wait_of[op.flag[:2]] = op
                elif isinstance(op, Barrier):
                    self.barriers[op.round].append(op)
            needed.append(used)
        self.sinks = [[op for op in ops if op not in used] for ops, used in zip(self.ops, needed, strict=True)]
        for round_, barriers in self.barriers.items():
            if sorted(op.rank for op in barriers) != list(range(plan.world_size)):
                ranks = [op.rank for op in barriers]
                raise _fail(barriers[0], f"the barrier of round {round_} is entered by ranks {ranks} only")
        self.sequence = self._sequence()
        self.place = {(op.rank, op.id): index for index, op in enumerate(self.sequence)}

    def op(self, node: _Node) -> Op:
        return self.ops[node.rank][node.op]

    def _sequence(self) -> list[Op]:
        """One replay of all ranks, each rank issuing its ops one by one; raises where that blocks.

        An order in which the ranks issue their ops one by one is also legal for ops that start as soon as
        they may, so neither can deadlock if this one does not.
        """
        plan = self.plan
        result: list[Op] = []
        issued = [0] * plan.world_size
        # A flag that starts at 1 is waited for once before it is signalled.
        flags = {op.flag[:2]: op.flag.initial for ops in plan.rank_ops for op in ops if isinstance(op, Wait)}
        at_barrier: dict[int, list[int]] = defaultdict(list)
        passed: set[int] = set()
        parked: dict[tuple[int, int], int] = {}
        ready = deque(range(plan.world_size))
        while ready:
            rank = ready.popleft()
            ops = plan.ops(rank)
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
                elif isinstance(op, Barrier) and op.round not in passed:
                    at_barrier[op.round].append(rank)
                    if len(at_barrier[op.round]) < plan.world_size:
                        break
                    passed.add(op.round)
                    ready.extend(other for other in at_barrier[op.round] if other != rank)
                result.append(op)
                issued[rank] += 1
        stuck = [plan.ops(rank)[count] for rank, count in enumerate(issued) if count < len(plan.ops(rank))]
        if stuck:
            others = "; ".join(op.describe() for op in stuck[1:4])
            raise _fail(stuck[0], f"deadlock: it never starts{'; nor does ' + others if others else ''}")
        return result

    def before(self, node: _Node) -> Iterator[_Node]:
        """What directly happens before a node; nothing before the first replay."""
        replay, rank, op_id = node
        if op_id == END:
            yield from (_Node(replay, rank, op) for op in self.sinks[rank])
            yield _Node(replay, rank, BEGIN)
            return
        if op_id == BEGIN:
            if replay > 0:
                yield _Node(replay - 1, rank, END)
            return
        op = self.ops[rank][op_id]
        members: Iterable[Op] = self.barriers[op.round] if isinstance(op, Barrier) else (op,)
        if isinstance(op, Wait):
            signal = self.signal_of[op.flag[:2]]
            if replay >= op.flag.initial:
                yield _Node(replay - op.flag.initial, signal.rank, signal.id)
        for member in members:
            yield from (_Node(replay, member.rank, dep) for dep in member.deps)
            yield _Node(replay, member.rank, BEGIN)

    def _rank_of(self, node: _Node) -> tuple[int, int]:
        """Where a node stands in the legal order, coarsely: nothing happens before what stands later."""
        if node.op == BEGIN:
            return node.replay, -1
        if node.op == END:
            return node.replay, len(self.sequence)
        return node.replay, self.place[node.rank, node.op]

    def happens_before(self, first: _Node, then: _Node) -> bool:
        """Whether ``first`` has finished before ``then`` starts, in every execution.

        A search backwards from ``then``, nearest first; what begins or ends a replay is looked at last,
        because it is rarely needed and has many ops before it.
        """
        if first == then:
            return True
        floor = self._rank_of(first)
        # Only a rank's own order leads to the begin of its replay, and from there to all of the one before.
        seen = {then}
        near: deque[_Node] = deque([then])
        far: deque[_Node] = deque()
        while near or far:
            node = near.popleft() if near else far.popleft()
            if node.op == BEGIN and node.replay == first.replay + 1 and node.rank == first.rank:
                return True
            for previous in self.before(node):
                if previous == first:
                    return True
                if previous in seen or previous.replay < first.replay:
                    continue
                if previous.replay == first.replay and self._rank_of(previous) < floor:
                    continue
                seen.add(previous)
                (far if previous.op < 0 else near).append(previous)
        return False


# --- values -------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """What a box of memory holds. operand "?" is nothing known."""

    operand: str
    replay: int
    parts: int = 0  # of a sum: bit k for each k tile in it
    c: bool = False  # of a sum: whether beta * C is in it


UNKNOWN = _Content("?", -1)


class _Piece:
    """A box of memory that was written at once, and who has read it since."""

    __slots__ = ("box", "content", "frame", "readers", "writer")

    def __init__(self, frame: Box, box: Box, content: _Content, writer: _Node) -> None:
        self.frame = frame
        self.box = box
        self.content = content
        self.writer = writer
        self.readers: list[_Node] = []


class _Execution:
    """One legal execution of two replays, with every access checked against those before it."""

    def __init__(self, plan: Plan, order: _Order) -> None:
        self.plan = plan
        self.order = order
        self.memory: dict[tuple[int, str, int], list[_Piece]] = defaultdict(list)
        self.multiplied: dict[tuple[int, ...], Gemm] = {}
        self.used: set[tuple[int, int]] = set()
        self.tile_of = {
            (batches, rows, columns): (m, n, batch)
            for batch, batches in enumerate(self._ranges(3))
            for m, rows in enumerate(self._ranges(0))
            for n, columns in enumerate(self._ranges(1))
        }
        self.depth = [stop - start for start, stop in self._ranges(2)]
        self.all_parts = sum(1 << k for k, depth in enumerate(self.depth) if depth)

    def _ranges(self, mode: int) -> list[Range]:
        edges = self.plan.edges[mode]
        return list(zip(edges, edges[1:], strict=False))

    def run(self) -> None:
        for replay in range(REPLAYS):
            self.multiplied.clear()
            for rank in range(self.plan.world_size):
                self._begin(_Node(replay, rank, BEGIN))
            for op in self.order.sequence:
                node = _Node(replay, op.rank, op.id)
                if isinstance(op, Gemm):
                    self._gemm(op, node)
                elif isinstance(op, Reduce):
                    self._write(op.out, self._sum(op, op.sources, node, op.c), node)
                elif isinstance(op, Copy):
                    for piece in self._read(op.src, node):
                        self._write(op.dst._replace(box=piece.box), piece.content, node)
                elif isinstance(op, Signal):
                    self._signal(op, replay)
            self._check_product()
            for rank in range(self.plan.world_size):
                self._end(_Node(replay, rank, END))

    def _begin(self, node: _Node) -> None:
        """The caller has written the inputs of this replay, and D holds nothing."""
        for operand in ("A", "B", "C", "D"):
            box = self.plan.box(operand, node.rank)
            content = UNKNOWN if operand == "D" else _Content(operand, node.replay)
            if box_size(box):
                self._write(View(node.rank, operand, -1, box, box), content, node)

    def _end(self, node: _Node) -> None:
        """The caller reads D."""
        box = self.plan.box("D", node.rank)
        if not box_size(box):
            return
        wanted = _Content("D", node.replay, self.all_parts, True)
        for piece in self._read(View(node.rank, "D", -1, box, box), node):
            if piece.content != wanted:
                raise PlanError(
                    f"rank {node.rank} iteration {self.plan.iterations - 1}: at the end of a replay its shard of D "
                    f"holds {self._say(piece.content)} in {piece.box}, written by {self._name(piece.writer)}"
                )

    def _gemm(self, op: Gemm, node: _Node) -> None:
        if op.tile in self.multiplied:
            raise _fail(op, f"multiplies a tile that {self.multiplied[op.tile].describe()} has multiplied")
        self.multiplied[op.tile] = op
        for operand, view in (("A", op.a), ("B", op.b)):
            for piece in self._read(view, node):
                if piece.content != _Content(operand, node.replay):
                    raise _fail(
                        op,
                        f"reads {view} as {operand}, but it holds {self._say(piece.content)}, "
                        f"written by {self._name(piece.writer)}",
                    )
        own = _Content("D", node.replay, 1 << op.tile.k)
        self._write(op.out, self._sum(op, op.sources, node, op.c, own), node)

    def _sum(
        self, op: Op, sources: tuple[View, ...], node: _Node, c: View | None, start: _Content | None = None
    ) -> _Content:
        result = start or _Content("D", node.replay)
        for view in sources:
            pieces = self._read(view, node)
            contents = {piece.content for piece in pieces}
            if len(contents) > 1:
                raise _fail(op, f"adds {view}, whose parts hold different sums")
            (content,) = contents
            if content.operand != "D" or content.replay != node.replay:
                raise _fail(
                    op, f"adds {view}, but it holds {self._say(content)}, written by {self._name(pieces[0].writer)}"
                )
            if content.parts & result.parts or (content.c and result.c):
                raise _fail(op, f"adds {view}, which holds contributions that are in the sum already")
            result = _Content("D", node.replay, result.parts | content.parts, result.c or content.c)
        if c is not None:
            self._read(c, node)
            if result.c:
                raise _fail(op, "adds beta * C a second time")
            result = result._replace(c=True)
        return result

    def _signal(self, op: Signal, replay: int) -> None:
        """A flag may be set again only after it was waited for."""
        wait_replay = replay - 1 + op.flag.initial
        if wait_replay < 0:
            return
        wait = self.order.wait_of[op.flag[:2]]
        if not self.order.happens_before(_Node(wait_replay, wait.rank, wait.id), _Node(replay, op.rank, op.id)):
            raise _fail(op, f"may set {op.flag} again before {wait.describe()} has seen it: a signal would be lost")

    def _check_product(self) -> None:
        """Every tile with elements was multiplied; that none was twice is checked on the way."""
        for m, rows in enumerate(self._ranges(0)):
            for n, columns in enumerate(self._ranges(1)):
                for k, depth in enumerate(self.depth):
                    for batch, batches in enumerate(self._ranges(3)):
                        empty = rows[0] == rows[1] or columns[0] == columns[1] or not depth or batches[0] == batches[1]
                        if not empty and (m, n, k, batch) not in self.multiplied:
                            raise PlanError(f"no rank multiplies the tile (m, n, k, l) = ({m}, {n}, {k}, {batch})")

    # --- memory -----------------------------------------------------------------------------------------

    def _say(self, content: _Content) -> str:
        if content.operand == "?":
            return "nothing"
        if content.operand != "D":
            return f"{content.operand} of replay {content.replay}"
        parts = [k for k in range(len(self.depth)) if content.parts >> k & 1]
        missing = [k for k in range(len(self.depth)) if (self.all_parts & ~content.parts) >> k & 1]
        c = "" if content.c else " without C"
        return f"the sum of k tiles {parts}{c} of replay {content.replay}" + (f", not of {missing}" if missing else "")

    def _name(self, node: _Node) -> str:
        if node.op == BEGIN:
            return f"the caller of rank {node.rank} before replay {node.replay}"
        if node.op == END:
            return f"the caller of rank {node.rank} after replay {node.replay}"
        return f"{self.order.op(node).describe()} in replay {node.replay}"

    def _ordered(self, first: _Node, then: _Node, what: str, view: View) -> None:
        if not self.order.happens_before(first, then):
            raise PlanError(f"{self._name(then)}: {what} {view} is not ordered after {self._name(first)}")

    def _read(self, view: View, node: _Node) -> list[_Piece]:
        """The pieces of a view, cut to it; every writer must happen before the read."""
        if not box_size(view.box):
            return []
        found = []
        size = 0
        for piece in self.memory[view.rank, view.buffer, view.slot]:
            if piece.frame != view.frame:
                # The slot holds, or held, another tile: its bytes lie elsewhere, and all of them count.
                self._ordered(piece.writer, node, "reading", view)
                continue
            if overlaps(piece.box, view.box):
                self._ordered(piece.writer, node, "reading", view)
                piece.readers.append(node)
                box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(piece.box, view.box, strict=True))
                part = _Piece(piece.frame, box, piece.content, piece.writer)  # type: ignore[arg-type]
                found.append(part)
                size += box_size(part.box)
        if size != box_size(view.box):
            held = self.memory[view.rank, view.buffer, view.slot]
            by = f", but what {self._name(held[0].writer)} wrote" if held else ""
            raise PlanError(f"{self._name(node)}: reads {view}, which does not hold that tile{by}")
        return found

    def _write(self, view: View, content: _Content, node: _Node) -> None:
        """Replace what a view holds; every earlier access must happen before the write."""
        kept = []
        for piece in self.memory[view.rank, view.buffer, view.slot]:
            if piece.frame == view.frame and not overlaps(piece.box, view.box):
                kept.append(piece)
                continue
            self._ordered(piece.writer, node, "writing", view)
            for reader in piece.readers:
                self._ordered(reader, node, "writing", view)
            if piece.frame == view.frame:
                kept += [_rest(piece, box) for box in _subtract(piece.box, view.box)]
        kept.append(_Piece(view.frame, view.box, content, node))
        self.memory[view.rank, view.buffer, view.slot] = kept


def _rest(piece: _Piece, box: Box) -> _Piece:
    rest = _Piece(piece.frame, box, piece.content, piece.writer)
    rest.readers = list(piece.readers)
    return rest


def _subtract(box: Box, cut: Box) -> list[Box]:
    """What is left of ``box`` without ``cut``, in disjoint boxes."""
    rest = []
    current = list(box)
    for axis, (low, high) in enumerate(cut):
        start, stop = current[axis]
        for piece in ((start, min(low, stop)), (max(high, start), stop)):
            if piece[0] < piece[1]:
                rest.append((*current[:axis], piece, *current[axis + 1 :]))
        current[axis] = (max(start, low), min(stop, high))
    return rest  # type: ignore[return-value]
