"""An oracle for plans: it executes three replays of their ops byte by byte.

It imports nothing of distgemm and shares no code with the proof. It reads the fields of a plan, and nothing else:

* **Memory** is bytes. A view is a set of byte addresses, computed from its slot's offset, its frame, its box and its
  pitch. The content of a byte is a symbol: "byte 1 of A[0, 3, 5] of replay 2 as bfloat16", or "byte 0 of the sum of the
  products of k = 0 and 1, without C, for D[0, 3, 4]".
* **Order** is a graph over the ops of three replays and over the caller of each rank, who reads D and writes new inputs
  between two replays. Its edges are dependencies, the Signal that ends each Wait, barriers, and the end of a rank's
  replay. The transitive closure of the graph is a set of bits for each op.
* **A race** is a pair of accesses to one byte, one of them a write, that the closure does not order. All pairs are
  compared. Without a race all orders give the same content, so one order is executed.
* **A signal is lost** if the closure does not order a flag's Wait before the Signal that sets the flag again.

The verdict is "right" if each order of the ops computes the product in each replay, "wrong" if some order does not, and
"undefined" if the plan does not say what is executed. Nobody may execute a plan of the last two kinds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

REPLAYS = 3
SIZES = {"float64": 8, "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LIMIT = 1 << 16
"""The most bytes of a view or a shard that the oracle executes."""

Region = tuple[int, str]
"""The rank, and "A", "B", "C", "D" or "slot" for its workspace."""


class Verdict(NamedTuple):
    """What the oracle says of a plan: "right", "wrong" or "undefined", and why."""

    kind: str
    why: str


class Wrong(Exception):  # noqa: N818  (a finding, not an error)
    """Some order of the ops does not compute the product."""


class Undefined(Exception):  # noqa: N818
    """The plan does not say what is executed, or no runtime can execute it."""


def judge(plan: Any) -> Verdict:
    """Execute a plan.

    Args:
        plan: a plan, or anything with the same fields.
    """
    try:
        _Oracle(plan).run()
    except Wrong as found:
        return Verdict("wrong", str(found))
    except Undefined as found:
        return Verdict("undefined", str(found))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        return Verdict("undefined", f"a field has no meaning: {type(error).__name__}: {error}")
    return Verdict("right", "")


@dataclass(slots=True)
class _Place:
    """The elements of a view: the address of each in its region, in the order of its box, and their bytes as bits."""

    region: Region
    dtype: str
    extents: tuple[int, int, int]
    addresses: list[int]
    bits: int


@dataclass(slots=True)
class _Task:
    """An op in a replay, or a rank's caller after it (op None)."""

    number: int
    replay: int
    rank: int
    op: Any
    before: set[int] = field(default_factory=set)  # numbers of tasks
    reads: dict[Region, int] = field(default_factory=dict)  # bytes as bits
    writes: dict[Region, int] = field(default_factory=dict)


class _Oracle:
    def __init__(self, plan: Any) -> None:
        self.plan, self.problem = plan, plan.problem
        self.ranks = range(len(plan.rank_ops))
        p = plan.problem
        self.matrices = {"A": (p.l, p.m, p.k), "B": (p.l, p.n, p.k), "C": (p.l, p.m, p.n), "D": (p.l, p.m, p.n)}
        self.shards = {"A": plan.shards[0], "B": plan.shards[1], "C": plan.shards[2], "D": plan.shards[2]}
        self.dtypes = {"A": p.dtype, "B": p.dtype, "C": p.out_dtype, "D": p.out_dtype}
        self.every_k = (1 << min(p.k, LIMIT)) - 1
        self.places: dict[int, _Place] = {}  # by id() of a view, which the plan keeps alive
        self.numbers: dict[Region, dict[int, int]] = defaultdict(dict)  # of bytes, by address
        self.memory: dict[Region, dict[int, Any]] = defaultdict(dict)

    def run(self) -> None:
        self._labels()
        self._check_shards()
        of_kind: dict[str, list[Any]] = defaultdict(list)
        for rank, ops in enumerate(self.plan.rank_ops):
            rounds = [op.round for op in ops]
            if rounds != sorted(rounds):
                raise Undefined(f"rank {rank}: the rounds of its ops do not ascend")
            if len({op.id for op in ops}) != len(ops):
                raise Undefined(f"rank {rank}: two ops have one id")
            for op in ops:
                if op.rank != rank:
                    raise Undefined(f"{op}: stands among the ops of rank {rank}")
                of_kind[type(op).__name__].append(op)
        if of_kind.keys() - {"Gemm", "Copy", "Reduce", "Signal", "Wait", "Barrier"}:
            raise Undefined(f"ops of the kinds {sorted(of_kind)}")
        flags = self._flags(of_kind["Signal"], of_kind["Wait"])
        self._barriers(of_kind["Barrier"])
        tasks = self._tasks()
        self._connect(tasks, flags)
        for one_by_one in (True, False):
            order, past = self._closure(tasks, one_by_one)
        self._lost(tasks, flags, past)
        self._races(order, past)
        for rank, operand in product(self.ranks, "ABC"):
            self._give(rank, operand, 0)
        for task in order:
            self._execute(task)

    # --- what the plan says ---------------------------------------------------------------------------

    def _labels(self) -> None:
        ranks = len(self.ranks)
        sides = 1
        for side in self.plan.mesh:
            sides *= side
            if side < 1:
                raise Undefined(f"the mesh {self.plan.mesh}")
        counts = {len(self.plan.slots), *(len(boxes) for boxes in self.plan.shards), sides}
        if counts != {ranks} or not ranks or len(self.plan.shards) != 3:
            raise Undefined("not all fields are about the same ranks")
        for label, known in (
            (self.plan.workspace, ("full", "bounded")),
            (self.plan.sync, ("credit", "barrier")),
            (self.plan.mechanism, ("push", "pull", "store")),
        ):
            if label not in known:
                raise Undefined(f"the label {label!r}")

    def _check_shards(self) -> None:
        """The callers have no elements but those of the matrices, and get all of D."""
        for operand, matrix in self.matrices.items():
            for rank, box in enumerate(self.shards[operand]):
                for (low, high), extent in zip(box, matrix, strict=True):
                    if not 0 <= low <= high <= extent:
                        raise Wrong(f"the shard {box} of {operand} on rank {rank} reaches out of {matrix}")
                if _count(box) * 8 > LIMIT:
                    raise Undefined(f"the shard {box} is larger than the oracle's memory")
        owned = {element for box in self.shards["D"] for element in _elements(box)}
        if len(owned) != self.problem.l * self.problem.m * self.problem.n:
            raise Wrong("no rank owns some of D")
        given = self.problem.m_per_rank
        if given is not None and all(
            [box[1][1] - box[1][0] for box in self.shards[operand]] != list(given) for operand in "AD"
        ):
            raise Wrong(f"the shards do not have m_per_rank = {given} rows")

    def _flags(self, signals: list[Any], waits: list[Any]) -> list[tuple[Any, Any]]:
        """Each flag's Signal and Wait."""
        setters: dict[tuple[int, int], list[Any]] = defaultdict(list)
        readers: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for op in signals:
            setters[op.flag.rank, op.flag.number].append(op)
        for op in waits:
            readers[op.flag.rank, op.flag.number].append(op)
        pairs = []
        for key in setters.keys() | readers.keys():
            if len(setters[key]) != 1 or len(readers[key]) != 1:
                raise Undefined(f"the flag {key} has {len(setters[key])} Signals and {len(readers[key])} Waits")
            (signal,), (wait,) = setters[key], readers[key]
            if signal.flag != wait.flag or wait.flag.initial not in (0, 1) or wait.peer != signal.rank:
                raise Undefined(f"{signal} and {wait} contradict each other")
            if wait.flag.rank != wait.rank:
                raise Undefined(f"{wait} waits for a flag in another rank's memory")
            if not wait.flag.initial and wait.round <= signal.round:
                raise Undefined(f"{wait} is not in a later round than {signal}")
            pairs.append((signal, wait))
        return pairs

    def _barriers(self, barriers: list[Any]) -> None:
        entered: dict[int, list[int]] = defaultdict(list)
        for op in barriers:
            entered[op.round].append(op.rank)
        if any(sorted(ranks) != list(self.ranks) for ranks in entered.values()):
            raise Undefined("not every rank enters a barrier")

    # --- order ----------------------------------------------------------------------------------------

    def _tasks(self) -> list[_Task]:
        tasks: list[_Task] = []
        for replay, rank in product(range(REPLAYS), self.ranks):
            for op in (*self.plan.rank_ops[rank], None):
                task = _Task(len(tasks), replay, rank, op)
                tasks.append(task)
                reads, writes = self._caller(rank) if op is None else self._touched(op)
                for found, views in ((task.reads, reads), (task.writes, writes)):
                    for place in views:
                        found[place.region] = found.get(place.region, 0) | place.bits
        return tasks

    def _connect(self, tasks: list[_Task], flags: list[tuple[Any, Any]]) -> None:
        """Set what is before each task."""
        index = {(task.replay, task.rank, task.op and task.op.id): task for task in tasks}
        members: dict[tuple[int, int], list[_Task]] = defaultdict(list)
        for task in tasks:
            if task.replay:
                task.before.add(index[task.replay - 1, task.rank, None].number)
            if task.op is None:
                task.before |= {index[task.replay, task.rank, op.id].number for op in self.plan.rank_ops[task.rank]}
                continue
            for dep in task.op.deps:
                if (task.replay, task.rank, dep) not in index or dep is None:
                    raise Undefined(f"{task.op}: depends on op {dep}, which does not exist")
                task.before.add(index[task.replay, task.rank, dep].number)
            if type(task.op).__name__ == "Barrier":
                members[task.replay, task.op.round].append(task)
        for together in members.values():
            everything = set().union(*(task.before for task in together))
            for task in together:
                task.before = everything
        for signal, wait in flags:
            for replay in range(wait.flag.initial, REPLAYS):
                given = index[replay - wait.flag.initial, signal.rank, signal.id]
                index[replay, wait.rank, wait.id].before.add(given.number)

    def _closure(self, tasks: list[_Task], one_by_one: bool) -> tuple[list[_Task], list[int]]:
        """The tasks in one order, and for each the tasks that always end before it starts, as bits.

        one_by_one: each rank starts an op when the op before it in the list has ended.
        """
        before = [set(task.before) for task in tasks]
        if one_by_one:
            # A barrier of a rank ends when all ranks have come to theirs, in the orders of their lists.
            earlier = {task.number: {task.number - 1} for task in tasks if task.number and task.op is not None}
            for task in tasks:
                if task.number and tasks[task.number - 1].op is None and task.op is not None:
                    del earlier[task.number]  # the first op of a rank's list
            for number, previous in earlier.items():
                before[number] |= previous
            barriers: dict[tuple[int, int], list[int]] = defaultdict(list)
            for task in tasks:
                if type(task.op).__name__ == "Barrier":
                    barriers[task.replay, task.op.round].append(task.number)
            for together in barriers.values():
                everything = set().union(*(before[number] for number in together))
                for number in together:
                    before[number] = everything - {number}
        after: list[list[int]] = [[] for _ in tasks]
        missing = [len(needs) for needs in before]
        for number, needs in enumerate(before):
            for need in needs:
                after[need].append(number)
        past = [0] * len(tasks)
        ready = [number for number, count in enumerate(missing) if not count]
        order: list[_Task] = []
        while ready:
            number = ready.pop()
            order.append(tasks[number])
            own = past[number] | 1 << number
            for later in after[number]:
                past[later] |= own
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        if len(order) != len(tasks):
            stuck = next(task for task in tasks if missing[task.number])
            raise Wrong(f"deadlock: {stuck.op or 'a caller'} in replay {stuck.replay} never starts")
        return order, past

    def _lost(self, tasks: list[_Task], flags: list[tuple[Any, Any]], past: list[int]) -> None:
        index = {(task.replay, task.rank, task.op.id): task.number for task in tasks if task.op is not None}
        for signal, wait in flags:
            for replay in range(REPLAYS):
                again = replay + 1 - wait.flag.initial
                if again < REPLAYS:
                    seen, given = index[replay, wait.rank, wait.id], index[again, signal.rank, signal.id]
                    if not past[given] >> seen & 1:
                        raise Wrong(f"{signal} may set its flag before {wait} has seen the last signal")

    def _races(self, order: list[_Task], past: list[int]) -> None:
        accesses: dict[Region, list[tuple[_Task, int, int]]] = defaultdict(list)
        for task in order:
            for region in task.reads.keys() | task.writes.keys():
                accesses[region].append((task, task.reads.get(region, 0), task.writes.get(region, 0)))
        for region, found in accesses.items():
            for place, (later, reads, writes) in enumerate(found):
                known = past[later.number]
                both = reads | writes
                for earlier, others, written in found[:place]:
                    if (written & both or others & writes) and not known >> earlier.number & 1:
                        raise Wrong(
                            f"{earlier.op or 'a caller'} of replay {earlier.replay} and {later.op or 'a caller'} of "
                            f"replay {later.replay} race for {region}"
                        )

    # --- memory ---------------------------------------------------------------------------------------

    def _touched(self, op: Any) -> tuple[list[_Place], list[_Place]]:
        """The places that an op reads and writes."""
        kind = type(op).__name__
        if kind == "Copy":
            views, out = [op.src], op.dst
        elif kind in ("Gemm", "Reduce"):
            views, out = [*([op.a, op.b] if kind == "Gemm" else []), *op.sources], op.out
            views += [] if op.c is None else [op.c]
        else:
            return [], []
        far = [view for view in views if view.rank != op.rank]
        mechanism = self.plan.mechanism
        if out.buffer in ("A", "B", "C"):
            raise Undefined(f"{op}: writes an input")
        if far and (kind != "Copy" or out.rank != op.rank or views[0].buffer != "slot" or mechanism != "pull"):
            raise Undefined(f"{op}: reads memory of another rank")
        if out.rank != op.rank and (
            kind == "Reduce" or out.buffer != "slot" or mechanism == "pull" or (kind == "Gemm" and mechanism != "store")
        ):
            raise Undefined(f"{op}: writes memory of another rank")
        reads, write = [self._place(view) for view in views], self._place(out)
        if len(set(write.addresses)) * SIZES[write.dtype] != write.bits.bit_count():
            raise Wrong(f"{op}: writes elements to overlapping addresses")
        return reads, [write]

    def _caller(self, rank: int) -> tuple[list[_Place], list[_Place]]:
        places = [self._shard(operand, rank) for operand in "ABCD" if _count(self.shards[operand][rank])]
        return [], places

    def _shard(self, operand: str, rank: int) -> _Place:
        box = self.shards[operand][rank]
        count, size = _count(box), SIZES[self.dtypes[operand]]
        extents = tuple(high - low for low, high in box)
        addresses = [size * number for number in range(count)]
        bits = self._bits((rank, operand), addresses, size)
        return _Place((rank, operand), self.dtypes[operand], extents, addresses, bits)  # type: ignore[arg-type]

    def _place(self, view: Any) -> _Place:
        found = self.places.get(id(view))
        if found is None:
            found = self.places[id(view)] = self._new_place(view)
        return found

    def _new_place(self, view: Any) -> _Place:
        if not 0 <= view.rank < len(self.ranks):
            raise Undefined(f"{view}: there is no such rank")
        if view.buffer == "slot":
            slots = self.plan.slots[view.rank]
            if not 0 <= view.slot < len(slots):
                raise Undefined(f"{view}: there is no such slot")
            slot = slots[view.slot]
            dtype = slot.dtype
            start = slot.offset
            end = min(start + min(slot.bytes, slot.elements * SIZES[dtype]), sum(each.bytes for each in slots))
        elif view.buffer in self.shards and view.slot == -1:
            dtype = self.dtypes[view.buffer]
            start, end = 0, _count(self.shards[view.buffer][view.rank]) * SIZES[dtype]
        else:
            raise Undefined(f"{view}: there is no such memory")
        size = SIZES[dtype]
        for (low, high), (first, last) in zip(view.frame, view.box, strict=True):
            if not low <= first < last <= high:
                raise Undefined(f"{view}: its box is empty or not in its frame")
        (l0, _), (r0, r1), (c0, _) = view.frame
        strides = (r1 - r0) * view.pitch, view.pitch, 1
        corners = [
            sum(stride * (at - origin) for stride, at, origin in zip(strides, corner, (l0, r0, c0), strict=True))
            for corner in product(*((low, high - 1) for low, high in view.box))
        ]
        if start < 0 or start + size * min(corners) < start or start + size * (max(corners) + 1) > end:
            raise Wrong(f"{view}: reaches out of its memory")
        if _count(view.box) * size > LIMIT:
            raise Undefined(f"{view}: is larger than the oracle's memory")
        (b0, b1), (s0, s1), (d0, d1) = view.box
        addresses: list[int] = []
        for batch, row in product(range(b0, b1), range(s0, s1)):
            at = start + size * ((batch - l0) * strides[0] + (row - r0) * strides[1] + d0 - c0)
            addresses += range(at, at + size * (d1 - d0), size)
        region = view.rank, view.buffer
        return _Place(region, dtype, (b1 - b0, s1 - s0, d1 - d0), addresses, self._bits(region, addresses, size))

    def _bits(self, region: Region, addresses: list[int], size: int) -> int:
        """Bytes as bits: each byte of a region that any view covers has a number, so that the sets are small."""
        numbers = self.numbers[region]
        bits = 0
        for address in addresses:
            for byte in range(address, address + size):
                bits |= 1 << numbers.setdefault(byte, len(numbers))
        return bits

    def _read(self, place: _Place) -> list[Any]:
        """The content of each element; None where its bytes are not those of one element of the place's type."""
        memory, dtype = self.memory[place.region], place.dtype
        size = range(SIZES[dtype])
        found: list[Any] = []
        for address in place.addresses:
            content = memory.get(address)
            if content is None or content[1:] != (dtype, 0):
                found.append(None)
                continue
            whole = all(memory.get(address + byte) == (content[0], dtype, byte) for byte in size)
            found.append(content[0] if whole else None)
        return found

    def _write(self, place: _Place, values: list[Any]) -> None:
        memory, dtype = self.memory[place.region], place.dtype
        size = range(SIZES[dtype])
        for address, value in zip(place.addresses, values, strict=True):
            for byte in size:
                if value is None:
                    memory.pop(address + byte, None)
                else:
                    memory[address + byte] = (value, dtype, byte)

    # --- execution ------------------------------------------------------------------------------------

    def _execute(self, task: _Task) -> None:
        kind = type(task.op).__name__
        if task.op is None:
            self._call(task)
        elif kind == "Copy":
            src, dst = self._place(task.op.src), self._place(task.op.dst)
            if src.dtype != dst.dtype or src.extents != dst.extents:
                raise Wrong(f"{task.op}: copies {src.extents} of {src.dtype} to {dst.extents} of {dst.dtype}")
            if src.region == dst.region and src.bits & dst.bits:
                raise Wrong(f"{task.op}: copies onto itself")
            self._write(dst, self._read(src))
        elif kind in ("Gemm", "Reduce"):
            self._sum(task, kind == "Gemm")

    def _give(self, rank: int, operand: str, replay: int) -> None:
        """The caller writes an input."""
        elements = [(operand, replay, *at) for at in _elements(self.shards[operand][rank])]
        if elements:
            self._write(self._shard(operand, rank), elements)

    def _call(self, task: _Task) -> None:
        """The caller reads D, and writes the inputs of the next replay."""
        if _count(self.shards["D"][task.rank]):
            place = self._shard("D", task.rank)
            for at, value in zip(_elements(self.shards["D"][task.rank]), self._read(place), strict=True):
                if value != ("sum", task.replay, *at, self.every_k, True):
                    raise Wrong(f"rank {task.rank}: after replay {task.replay}, D{at} is {value}")
            self._write(place, [None] * len(place.addresses))
        for operand in "ABC":
            self._give(task.rank, operand, task.replay + 1)

    def _sum(self, task: _Task, multiplies: bool) -> None:
        op = task.op
        out = self._place(op.out)
        batches, rows, columns = out.extents
        result: list[Any]
        if multiplies:
            a, b = self._place(op.a), self._place(op.b)
            if (a.extents[0], a.extents[1], b.extents[0], b.extents[1], a.extents[2]) != (
                batches, rows, batches, columns, b.extents[2],
            ):  # fmt: skip
                raise Wrong(f"{op}: multiplies {a.extents} by {b.extents} into {out.extents}")
            left, right = self._vectors(task, op.a, "A"), self._vectors(task, op.b, "B")
            result = []
            for batch, row, column in product(range(batches), range(rows), range(columns)):
                l, i, ks = left[batch * rows + row]  # noqa: E741
                other, j, js = right[batch * columns + column]
                if l != other or ks != js:
                    raise Wrong(f"{op}: multiplies A[{l}, {i}, {ks}] by B[{other}, {j}, {js}]")
                result.append(("sum", task.replay, l, i, j, sum(1 << k for k in ks), False))
            inputs = [(op.a, a), (op.b, b)]
        else:
            result = [None] * len(out.addresses)
            inputs = []
        for view in op.sources:
            source = self._place(view)
            if source.extents != out.extents:
                raise Wrong(f"{op}: adds {source.extents} to {out.extents}")
            if source.region == out.region and not _in_place(source, out):
                raise Wrong(f"{op}: overwrites {view} before it is added")
            for place, value in enumerate(self._read(source)):
                mine = result[place]
                if value is None or value[0] != "sum" or value[1] != task.replay:
                    raise Wrong(f"{op}: adds {value}")
                if mine is None:
                    result[place] = value
                    continue
                if mine[2:5] != value[2:5] or mine[5] & value[5] or (mine[6] and value[6]):
                    raise Wrong(f"{op}: adds {value} to {mine}")
                result[place] = (*mine[:5], mine[5] | value[5], mine[6] or value[6])
        if op.c is not None:
            inputs.append((op.c, self._place(op.c)))
            if inputs[-1][1].extents != out.extents:
                raise Wrong(f"{op}: adds C of {inputs[-1][1].extents} to {out.extents}")
            for place, value in enumerate(self._read(inputs[-1][1])):
                mine = result[place]
                if mine is None or value is None or value != ("C", *mine[1:5]) or mine[6]:
                    raise Wrong(f"{op}: adds beta * {value} to {mine}")
                result[place] = (*mine[:6], True)
        if any(place.region == out.region and place.bits & out.bits for _, place in inputs):
            raise Wrong(f"{op}: writes what it reads")
        rounded = self.problem.partial_dtype if op.c is None else self.problem.out_dtype
        if out.dtype != rounded:
            raise Wrong(f"{op}: rounds to {out.dtype}, not to {rounded}")
        self._write(out, result)

    def _vectors(self, task: _Task, view: Any, operand: str) -> list[tuple[int, int, list[int]]]:
        """For each row of an operand its batch, its row in the matrix and its columns."""
        place = self._place(view)
        if place.dtype != self.problem.dtype:
            raise Wrong(f"{task.op}: multiplies {place.dtype}")
        values, columns = self._read(place), place.extents[2]
        found = []
        for start in range(0, len(values), columns):
            row = values[start : start + columns]
            if any(value is None or value[:2] != (operand, task.replay) for value in row):
                raise Wrong(f"{task.op}: multiplies {row} as {operand}")
            ks = [value[4] for value in row]
            if len({value[2:4] for value in row}) != 1 or len(set(ks)) != len(ks):
                raise Wrong(f"{task.op}: multiplies {row}, which is not of one row")
            found.append((*row[0][2:4], ks))
        return found


def _in_place(source: _Place, out: _Place) -> bool:
    """Whether a result overwrites no element of a source, or each by the sum that it is added to."""
    shared = out.bits & source.bits
    if not shared:
        return True
    at = {address: place for place, address in enumerate(out.addresses)}
    same = [address for place, address in enumerate(source.addresses) if at.get(address) == place]
    return source.dtype == out.dtype and len(same) * SIZES[out.dtype] == shared.bit_count()


def _count(box: Any) -> int:
    count = 1
    for low, high in box:
        count *= high - low
    return int(count)


def _elements(box: Any) -> list[tuple[int, ...]]:
    return list(product(*(range(low, high) for low, high in box)))
