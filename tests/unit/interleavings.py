"""All legal interleavings of a plan over two replays, by execution: no happens-before, no boxes.

Memory is single elements at byte addresses, flags are binary words, ops take time. Between its replays a
rank's caller checks and spoils D and writes new inputs, as an op of its own.

An op that has been started has not yet touched all of its memory until it ends. Nothing but its end follows
from its start, so instead of exploring starts and ends it is enough to look, in every state, at all ops that
could be under way at once: two of them that touch the same element, one writing, are a race. Ops then execute
at once, in every order.

The state is what has been done: it decides the flags, and, as long as no race or lost signal was found, the
memory too, since two paths to one state differ by swaps of ops that could be under way at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Reduce, Signal, View, Wait, box_extents
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES

REPLAYS = 2

Cell = tuple[int, str, int]
"""rank, "A", "B", "C", "D", "SFA", "SFB" or "workspace", address of one element in bytes."""

Value = tuple[Any, ...]
"""("A", replay, l, row, column, dtype), or ("D", replay, l, row, column, dtype, k's that are in it, C in it)."""


class Fault(Exception):  # noqa: N818  (a finding, not an error)
    """What went wrong, where."""


@dataclass(eq=False)
class Task:
    """An op in a replay, or (op None) the rank's caller after it."""

    index: int
    replay: int
    rank: int
    op: Op | None
    needs: int = 0  # the tasks that must be done before
    members: tuple[int, ...] = ()  # of a barrier: what each rank must have done
    reads: set[Cell] = field(default_factory=set)
    writes: set[Cell] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.op or f'caller of rank {self.rank}'} in replay {self.replay}"


class Machine:
    """The tasks of a plan and the rules by which they execute."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inputs = ("A", "B", "C", *(("SFA", "SFB") if plan.problem.scaling else ()))
        self.tasks: list[Task] = []
        self.flag_bit: dict[tuple[int, int], int] = {}
        self.flags = 0
        self.products: dict[tuple[int, ...], Task] = {}
        self.depth = (1 << plan.problem.k) - 1
        self.cells_of: dict[View, dict[tuple[int, int, int], Cell]] = {}
        for ops in plan.rank_ops:
            for op in ops:
                if isinstance(op, Signal | Wait) and op.flag[:2] not in self.flag_bit:
                    self.flag_bit[op.flag[:2]] = 1 << len(self.flag_bit)
                    self.flags |= self.flag_bit[op.flag[:2]] * op.flag.initial
        callers = [0] * plan.world_size
        for replay in range(REPLAYS):
            barriers: dict[int, list[Task]] = defaultdict(list)
            for rank, ops in enumerate(plan.rank_ops):
                first = len(self.tasks)
                index = {op.id: first + place for place, op in enumerate(ops)}
                for op in ops:
                    needs = callers[rank]
                    for dep in op.deps:
                        if dep not in index:
                            raise Fault(f"{op}: waits for op {dep}, which does not exist")
                        needs |= 1 << index[dep]
                    task = self._add(Task(len(self.tasks), replay, rank, op, needs))
                    reads, writes = touched(op)
                    task.reads = {cell for view in reads for cell in self.cells(view).values()}
                    task.writes = {cell for view in writes for cell in self.cells(view).values()}
                    if isinstance(op, Barrier):
                        barriers[op.round].append(task)
                everything = ((1 << len(ops)) - 1) << first
                caller = self._add(Task(len(self.tasks), replay, rank, None, everything | callers[rank]))
                caller.writes = {cell for operand in (*self.inputs, "D") for cell in self.shard(operand, rank).values()}
                callers[rank] = 1 << caller.index
            for members in barriers.values():
                missing = plan.world_size - len({task.rank for task in members})
                for task in members:
                    # A rank that never comes: something that is never done.
                    never = (1 << 100_000,) if missing else ()
                    task.members = tuple(other.needs for other in members) + never
        self.memory: dict[Cell, Value] = {}
        for rank in range(plan.world_size):
            self._inputs(rank, 0, self.memory)

    def _add(self, task: Task) -> Task:
        self.tasks.append(task)
        return task

    # --- memory -----------------------------------------------------------------------------------------

    def cells(self, view: View) -> dict[tuple[int, int, int], Cell]:
        """The element's cell for each global coordinate of a view."""
        if view not in self.cells_of:
            slots = self.plan.slots[view.rank]
            in_slot = view.buffer == "slot"
            space = "workspace" if in_slot else view.buffer
            start = slots[view.slot].offset if in_slot else 0
            size = DTYPE_BYTES[self.dtype(view)]
            (l0, _), (r0, r1), (c0, _) = view.frame
            (b0, b1), (s0, s1), (d0, d1) = view.box
            self.cells_of[view] = {
                (x, y, z): (
                    view.rank,
                    space,
                    start + size * (((x - l0) * (r1 - r0) + y - r0) * view.pitch + z - c0),
                )
                for x in range(b0, b1)
                for y in range(s0, s1)
                for z in range(d0, d1)
            }
        return self.cells_of[view]

    def shard(self, operand: str, rank: int) -> dict[tuple[int, int, int], Cell]:
        box = self.plan.box(operand, rank)
        return self.cells(View(rank, operand, -1, box, box, box_extents(box)[2]))

    def dtype(self, view: View) -> str:
        if view.buffer == "slot":
            return self.plan.slots[view.rank][view.slot].dtype
        if view.buffer in ("SFA", "SFB"):
            return "float32"
        return self.plan.problem.dtype if view.buffer in "AB" else str(self.plan.problem.out_dtype)

    def _inputs(self, rank: int, replay: int, memory: dict[Cell, Value]) -> None:
        for operand in self.inputs:
            dtype = self.dtype(View(rank, operand, -1, *[self.plan.box(operand, rank)] * 2, 0))
            for at, cell in self.shard(operand, rank).items():
                memory[cell] = (operand, replay, *at, dtype)
        for cell in self.shard("D", rank).values():
            memory.pop(cell, None)

    # --- execution --------------------------------------------------------------------------------------

    def may_run(self, task: Task, done: int, flags: int) -> bool:
        if task.needs & ~done:
            return False
        if isinstance(task.op, Wait):
            return bool(flags & self.flag_bit[task.op.flag[:2]])
        return not any(needs & ~done for needs in task.members)

    def execute(self, task: Task, flags: int, memory: dict[Cell, Value]) -> tuple[int, dict[Cell, Value]]:
        """Flags and memory afterwards."""
        op = task.op
        if isinstance(op, Signal):
            bit = self.flag_bit[op.flag[:2]]
            if flags & bit:
                raise Fault(f"{task}: the flag is set already, a signal is lost")
            return flags | bit, memory
        if isinstance(op, Wait):
            return flags & ~self.flag_bit[op.flag[:2]], memory
        if isinstance(op, Barrier):
            return flags, memory
        memory = dict(memory)
        if op is None:
            self._caller(task, memory)
        elif isinstance(op, Copy):
            self._copy(task, op, memory)
        elif isinstance(op, Gemm | Reduce):
            self._sum(task, op, memory)
        return flags, memory

    def _caller(self, task: Task, memory: dict[Cell, Value]) -> None:
        for at, cell in self.shard("D", task.rank).items():
            value = memory.get(cell)
            if value is None or (value[:5], value[6:]) != (("D", task.replay, *at), (self.depth, True)):
                raise Fault(f"{task}: D{at} is {value}")
        self._inputs(task.rank, task.replay + 1, memory)

    def _copy(self, task: Task, op: Copy, memory: dict[Cell, Value]) -> None:
        values = [memory.get(cell) for cell in self.cells(op.src).values()]
        targets = list(self.cells(op.dst).values())
        if len(values) != len(targets) or self.dtype(op.src) != self.dtype(op.dst):
            raise Fault(f"{task}: copies {len(values)} elements to {len(targets)}, or of another type")
        if task.reads & task.writes:
            raise Fault(f"{task}: copies onto itself")
        for cell, value in zip(targets, values, strict=True):
            if value is None or value[1] != task.replay:
                raise Fault(f"{task}: copies {value} from {op.src}, before anything arrived")
            memory[cell] = value

    def _sum(self, task: Task, op: Gemm | Reduce, memory: dict[Cell, Value]) -> None:
        def read(view: View) -> list[Value | None]:
            dtype = self.dtype(view)
            values = [memory.get(cell) for cell in self.cells(view).values()]
            return [value if value is not None and value[5] == dtype else None for value in values]

        outs = list(self.cells(op.out).values())
        result: list[Value]
        replay = task.replay
        sources = [(read(view), view) for view in op.sources]
        if isinstance(op, Gemm):
            rows, columns = matrix(read(op.a), op.a), matrix(read(op.b), op.b)
            result = [
                self._product(task, row, column)
                for a, b in zip(rows, columns, strict=True)
                for row in a
                for column in b
            ]
            self._check_scales(task, op, memory)
            if any(set(self.cells(view).values()) & task.writes for view in (op.a, op.b, *op.scales)):
                raise Fault(f"{task}: writes what it multiplies")
        else:
            result = [("D", replay, *at, 0, False) for at in self.cells(op.out)]
        for values, view in sources:
            cells = list(self.cells(view).values())
            if len(values) != len(result) or any(
                cell in task.writes and cell != out for cell, out in zip(cells, outs, strict=True)
            ):
                raise Fault(f"{task}: {view} does not fit to {op.out}")
            for place, value in enumerate(values):
                mine = result[place]
                if (
                    value is None
                    or value[0] != "D"
                    or value[1:5] != mine[1:5]
                    or value[6] & mine[5]
                    or (value[7] and mine[6])
                ):
                    raise Fault(f"{task}: adds {value} from {view} to {mine}")
                result[place] = (*mine[:5], mine[5] | value[6], mine[6] or value[7])
        if op.c is not None:
            for place, value in enumerate(read(op.c)):
                mine = result[place]
                if value is None or value[:5] != ("C", *mine[1:5]) or mine[6]:
                    raise Fault(f"{task}: adds beta * {value} to {mine}")
                result[place] = (*mine[:6], True)
        if len(result) != len(outs):
            raise Fault(f"{task}: makes {len(result)} elements for {op.out}")
        dtype = self.dtype(op.out)
        for cell, value in zip(outs, result, strict=True):
            memory[cell] = (*value[:5], dtype, *value[5:])

    def _check_scales(self, task: Task, op: Gemm, memory: dict[Cell, Value]) -> None:
        """That a GEMM finds the scale of each element of its tiles, and that of no other element."""
        if self.plan.problem.scaling is None:
            return
        for operand, tile, view in (("A", op.a, op.scale_a), ("B", op.b, op.scale_b)):
            (l0, l1), rows, columns = tile.box
            wanted = {
                self._scale(operand, (batch, row, column))
                for batch in range(l0, l1)
                for row in range(*rows)
                for column in range(*columns)
            }
            found = set() if view is None else {memory.get(cell) for cell in self.cells(view).values()}
            expected = {(f"SF{operand}", task.replay, *at, "float32") for at in wanted}
            if found != expected or (view is not None and set(self.cells(view)) != wanted):
                raise Fault(f"{task}: reads {found} as scales of {operand}, which are {expected}")

    def _scale(self, operand: str, at: tuple[int, int, int]) -> tuple[int, int, int]:
        """Where the scale of an element of A or B is: worked out element by element."""
        scaling = self.plan.problem.scaling
        assert scaling is not None
        of_operand = scaling[operand]
        found = [at[0]]
        for mode, shared in ((1, of_operand.rows), (2, of_operand.columns)):
            if shared is not None:
                found.append(at[mode] // shared)
            elif of_operand.scope == "global":
                found.append(0)
            else:  # the shards in which the element may lie, from the first one on
                starts = {box[mode] for box in self.plan.shards["AB".index(operand)] if box[mode][0] < box[mode][1]}
                found.append(sorted(starts).index(next(each for each in starts if each[0] <= at[mode] < each[1])))
        return tuple(found)  # type: ignore[return-value]

    def _product(self, task: Task, row: list[Value | None], column: list[Value | None]) -> Value:
        """One element of A @ B.T, from a row of A and a row of B."""
        found: set[tuple[int, ...]] = set()
        parts = 0
        if len(row) != len(column):
            raise Fault(f"{task}: multiplies {row} by {column}")
        for a, b in zip(row, column, strict=True):
            if a is None or b is None or (a[0], b[0], a[1], b[1]) != ("A", "B", task.replay, task.replay):
                raise Fault(f"{task}: multiplies {a} by {b}")
            (_, _, l, m, k, _), (_, _, other_l, n, other_k, _) = a, b  # noqa: E741
            if (l, k) != (other_l, other_k) or parts >> k & 1:
                raise Fault(f"{task}: multiplies {a} by {b}")
            if self.products.setdefault((task.replay, l, m, n, k), task) is not task:
                raise Fault(f"{task}: multiplies what {self.products[task.replay, l, m, n, k]} has multiplied")
            parts |= 1 << k
            found.add((l, m, n))
        if len(found) != 1:
            raise Fault(f"{task}: multiplies parts of different rows")
        return ("D", task.replay, *found.pop(), parts, False)

    # --- exploration ------------------------------------------------------------------------------------

    def explore(self, visible: int | None = None) -> int:
        """Execute in all orders of the tasks in ``visible`` (a bit for each; None: all); returns the states seen.

        Other tasks execute as soon as they may. No task keeps another from running or changes what another
        that may run at the same time does, so that this only lets more tasks of ``visible`` be under way at
        once: whatever they can do wrong with each other is still found. (A flag with one Wait and one Signal
        is assumed; see ``fault``.)
        """
        tasks = self.tasks
        everything = (1 << len(tasks)) - 1
        visible = everything if visible is None else visible
        seen: set[int] = set()
        stack: list[tuple[int, int, dict[Cell, Value]]] = [(0, self.flags, self.memory)]
        while stack:
            done, flags, memory = stack.pop()
            moved = True
            running: list[Task] = []
            while moved:
                moved = False
                running = []
                for task in tasks:
                    if done >> task.index & 1 or not self.may_run(task, done, flags):
                        continue
                    if visible >> task.index & 1:
                        running.append(task)
                        continue
                    flags, memory = self.execute(task, flags, memory)
                    done |= 1 << task.index
                    moved = True
            if done in seen:
                continue
            seen.add(done)
            self._races(running)
            if not running and done != everything:
                stuck = next(task for task in tasks if not done >> task.index & 1)
                raise Fault(f"{stuck}: deadlock")
            for task in running:
                after = self.execute(task, flags, memory)
                stack.append((done | 1 << task.index, *after))
        return len(seen)

    @staticmethod
    def _races(running: list[Task]) -> None:
        for place, first in enumerate(running):
            for second in running[:place]:
                shared = first.writes & (second.reads | second.writes) or first.reads & second.writes
                if shared:
                    raise Fault(f"{first} and {second} race for {min(shared)}")

    def groups(self) -> Iterator[int]:
        """The tasks that touch one piece of memory or one flag, for each."""
        found: dict[Any, int] = defaultdict(int)
        clashing = 0
        signals: dict[tuple[int, int], set[int]] = defaultdict(set)
        waits: dict[tuple[int, int], set[int]] = defaultdict(set)
        for task in self.tasks:
            if isinstance(task.op, Signal | Wait):
                side = signals if isinstance(task.op, Signal) else waits
                side[task.op.flag[:2]].add(task.op.rank << 20 | task.op.id)
                found[task.op.flag[:2]] |= 1 << task.index
            for cell in task.reads | task.writes:
                found[cell] |= 1 << task.index
        for key in self.flag_bit:
            if len(signals[key]) > 1 or len(waits[key]) > 1:
                clashing |= found[key]
        for group in sorted(set(found.values())):
            if group.bit_count() > 1:
                yield group | clashing

    def issue_in_order(self) -> None:
        """Each rank starts its ops one by one. Nothing keeps an op from starting but what has not been done,
        so that the choice among ranks does not matter."""
        done, flags, memory = 0, self.flags, self.memory
        of_rank = [[task for task in self.tasks if task.rank == rank] for rank in range(self.plan.world_size)]
        arrived = [0] * self.plan.world_size
        moved = True
        while moved:
            moved = False
            for rank, tasks in enumerate(of_rank):
                while arrived[rank] < len(tasks):
                    task = tasks[arrived[rank]]
                    if isinstance(task.op, Barrier):
                        # The others must have come to this barrier, in their order too.
                        waiting = [self._at(of_rank[other], arrived[other], task) for other in range(len(of_rank))]
                        if not all(waiting):
                            break
                    if not self.may_run(task, done, flags):
                        break
                    flags, memory = self.execute(task, flags, memory)
                    done |= 1 << task.index
                    arrived[rank] += 1
                    moved = True
        if done != (1 << len(self.tasks)) - 1:
            stuck = next(task for task in self.tasks if not done >> task.index & 1)
            raise Fault(f"{stuck}: deadlock where ops are issued in order")

    @staticmethod
    def _at(tasks: list[Task], arrived: int, barrier: Task) -> bool:
        assert barrier.op is not None
        for task in tasks[: arrived + 1]:
            if isinstance(task.op, Barrier) and (task.replay, task.op.round) == (barrier.replay, barrier.op.round):
                return True
        return False


def touched(op: Op) -> tuple[list[View], list[View]]:
    """What an op reads and writes."""
    if isinstance(op, Gemm):
        return [op.a, op.b, *op.sources, *([op.c] if op.c else []), *op.scales], [op.out]
    if isinstance(op, Reduce):
        return [*op.sources, *([op.c] if op.c else [])], [op.out]
    if isinstance(op, Copy):
        return [op.src], [op.dst]
    return [], []


def matrix(values: Iterable[Value | None], view: View) -> list[list[list[Value | None]]]:
    """Values in the order of a view's box as [l][row][column]."""
    (b0, b1), (s0, s1), (d0, d1) = view.box
    flat = iter(values)
    return [[[next(flat) for _ in range(d0, d1)] for _ in range(s0, s1)] for _ in range(b0, b1)]


def fault(plan: Plan, exhaustive: bool) -> str | None:
    """The first fault found in any execution of two replays, or None.

    exhaustive: explore all orders of all ops at once; else, for each element of memory and each flag, all
                orders of the ops that touch it, which finds the same (see ``Machine.explore``) with less work
    """
    try:
        machine = Machine(plan)
        machine.explore(0)  # one order, which finds most faults
        machine.issue_in_order()
        if exhaustive:
            machine.explore()
        else:
            for group in machine.groups():
                machine.explore(group)
    except Fault as found:
        return str(found)
    return None
