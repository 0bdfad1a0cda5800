"""A plan as one JSON model: tiles, ranks, ops, and when each op runs. :mod:`distgemm.viz.page` draws it.

The model has everything that a page shows. So it can be compared with the plan and the simulator without a browser.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from distgemm.plan.ops import (
    Barrier,
    Box,
    Copy,
    Gemm,
    Op,
    Reduce,
    Signal,
    View,
    Wait,
    accesses,
    box_size,
    contains,
    link_of,
)
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS
from distgemm.schedulers.scheduler import MODES
from distgemm.simulator import FLAG_LANE, Timeline, lane_order, op_title
from distgemm.viz.canvas import op_class, problem_text
from distgemm.viz.text import bytes_text, op_text

__all__ = ["Run", "State", "Track", "explorer_model", "predicted_track", "step_track"]

State = Literal["absent", "coming", "held", "busy", "partial", "sent", "done"]
"""What a rank has of a tile.

absent: nothing. coming: the tile, or a partial sum of it, is on its way to the rank. held: the tile of A or B.
busy: the rank multiplies with the tile, or adds to it. partial: a partial sum of the tile of D.
sent: the rank's partial sum has moved on. done: the finished tile of D.
"""

TileKey = tuple[str, tuple[int, ...]]
"""An operand, and the coordinate of a tile in it."""


class Run(NamedTuple):
    """An op and when it runs.

    Attributes:
        rank: the rank that executes it.
        lane: as in :class:`distgemm.simulator.Event`.
        op: of the plan.
        start: when it begins.
        end: when it frees its lane.
        done: when its result can be used; for a copy, when the data has arrived.
    """

    rank: int
    lane: str
    op: Op
    start: float
    end: float
    done: float


class Track(NamedTuple):
    """When the ops of a plan run, from one source.

    Attributes:
        name: "predicted", "measured" or "steps".
        unit: of the times: "us", or "steps".
        about: where the times come from.
        runs: of all ranks. An op that never starts is left out.
    """

    name: str
    unit: str
    about: str
    runs: tuple[Run, ...]


def predicted_track(timeline: Timeline) -> Track:
    """The track of a predicted replay. What moves over a link has arrived one latency after the op's end."""
    machine, runs = timeline.machine, []
    for rank, lane, op, start, end in timeline.events:
        link = link_of(op)
        late = 0.0 if link is None else machine.link(*link).latency
        runs.append(Run(rank, lane, op, start, end, end + late))
    about = (
        f"Times are predicted for {machine.name}: {timeline.time:.1f} \u00b5s per replay, "
        f"{100 * timeline.efficiency:.0f} % of the roof. They are no measurement."
    )
    return Track("predicted", "us", about, tuple(runs))


def step_track(plan: Plan) -> Track:
    """A track without a machine: each Gemm, Copy and Reduce takes one step, and starts as soon as it may.

    Each lane of a rank executes its ops in the order of the plan. Ops that never start, because the plan deadlocks, are
    left out.
    """
    numbers = {(op.rank, op.id): number for number, op in enumerate(op for ops in plan.rank_ops for op in ops)}
    every = [op for ops in plan.rank_ops for op in ops]
    signals = {op.flag[:2]: op for op in every if isinstance(op, Signal)}
    before: list[list[int]] = [[] for _ in every]
    missing = [0] * len(every)  # what an op waits for and no op does
    last: dict[tuple[int, str], int] = {}
    barriers: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(every):
        if isinstance(op, Barrier):
            barriers[op.round].append(number)
    for number, op in enumerate(every):
        lane = _step_lane(op)
        if lane != FLAG_LANE and (op.rank, lane) in last:
            before[number].append(last[op.rank, lane])
        last[op.rank, lane] = number
        members = [every[member] for member in barriers[op.round]] if isinstance(op, Barrier) else [op]
        needs: list[int | None] = [numbers.get((member.rank, dep)) for member in members for dep in member.deps]
        if isinstance(op, Wait) and not op.flag.initial:
            signal = signals.get(op.flag[:2])
            needs.append(None if signal is None else numbers[signal.rank, signal.id])
        before[number] += [need for need in needs if need is not None]
        missing[number] += sum(need is None for need in needs)
    after: list[list[int]] = [[] for _ in every]
    for number, needed in enumerate(before):
        missing[number] += len(needed)
        for need in needed:
            after[need].append(number)
    start = [0.0] * len(every)
    ready = deque(number for number in range(len(every)) if not missing[number])
    runs = []
    while ready:
        number = ready.popleft()
        op, begin = every[number], start[number]
        end = begin + isinstance(op, (Gemm, Copy, Reduce))
        runs.append(Run(op.rank, _step_lane(op), op, begin, end, end))
        for other in after[number]:
            start[other] = max(start[other], end)
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    left = len(every) - len(runs)
    about = "Each Gemm, Copy and Reduce takes one step: the order of the ops, without a machine's times."
    if left:
        about += f" {left} of {len(every)} ops never start."
    return Track("steps", "steps", about, tuple(sorted(runs, key=lambda run: (run.rank, run.start, run.op.id))))


def _step_lane(op: Op) -> str:
    if isinstance(op, (Gemm, Copy, Reduce)):
        return {"Gemm": "gemm 0", "Copy": "copy"}.get(op_class(op), "local")
    return FLAG_LANE


# --- what each rank has of each tile --------------------------------------------------------------------


def tiles_of(op: Op) -> list[TileKey]:
    """The tiles that an op is about."""
    if isinstance(op, Gemm):
        m, n, k, batch = op.tile
        return [("A", (m, k, batch)), ("B", (n, k, batch)), ("D", (m, n, batch))]
    if isinstance(op, Barrier):
        return []
    # The flag of a GEMM that stores to another rank has the coordinate of the work tile.
    operand = op.operand[-1]  # scales belong to their tile
    return [(operand, (*op.tile[:2], op.tile[3]) if len(op.tile) == 4 else tuple(op.tile))]


def _tile_box(plan: Plan, key: TileKey) -> Box:
    operand, (row, column, batch) = key
    rows, columns, batches = (plan.edges["mnkl".index(mode)] for mode in MODES[operand])
    return (batches[batch], batches[batch + 1]), (rows[row], rows[row + 1]), (columns[column], columns[column + 1])


C_TERM = -1
"""Stands for beta * C among the k tiles of a sum."""

Content = frozenset[int]
"""The k tiles of a sum, and C_TERM; empty for a tile of A or B."""


class _Place:
    """What one rank has of one tile, while the events of a track are gone through."""

    def __init__(self, key: TileKey, owner: bool, size: int) -> None:
        self.key, self.owner, self.size = key, owner, size
        self.coming: Counter[int] = Counter()  # by the rank that sends
        self.busy: Counter[str] = Counter()  # by what the rank does
        self.pieces: dict[tuple[str, int, Box], Content] = {}
        self.moved: set[tuple[str, int, Box]] = set()  # pieces that have been sent on
        self.sources: dict[tuple[str, int, Box], int] = {}
        self.steps: list[tuple[float, State, str]] = []

    def whole(self, wanted: Content) -> bool:
        """Whether pieces with this content are the whole tile."""
        return sum(box_size(box) for box in {at[2] for at, held in self.pieces.items() if held == wanted}) >= self.size

    def state(self, complete: Content) -> tuple[State, str]:
        """The state, and a text for people."""
        coming = f"on its way from {_ranks(self.coming)}" if self.coming else ""
        if self.busy:
            return "busy", " and ".join(sorted(self.busy))
        if self.key[0] != "D":
            if self.owner:
                return "held", "in its shard"
            if self.whole(frozenset()):
                return "held", f"arrived from {_ranks(self.sources.values())}"
            part = f"a part has arrived from {_ranks(self.sources.values())}" if self.pieces else ""
            return ("coming", ", ".join(filter(None, (part, coming)))) if part or coming else ("absent", "not here")
        if self.whole(complete):
            return "done", "finished"
        sums = [held for at, held in self.pieces.items() if at not in self.moved]
        if sums:
            have, all_k = frozenset().union(*sums) - {C_TERM}, complete - {C_TERM}
            text = f"{len(have)} of {len(all_k)} k tiles summed: k {', '.join(map(str, sorted(have)))}"
            if have == all_k:
                text = "all k tiles are here, not yet in one finished tile"
            return "partial", ", ".join(filter(None, (text, coming)))
        if coming:
            return "coming", coming
        return ("sent", "its partial sum has moved on") if self.moved else ("absent", "not here")

    def note(self, time: float, complete: Content) -> None:
        """Add a step if the state has changed."""
        state = self.state(complete)
        if self.steps and self.steps[-1][0] == time:
            self.steps.pop()
        if not self.steps or self.steps[-1][1:] != state:
            self.steps.append((time, *state))


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


class _States:
    """Goes through the events of a track in the order of time."""

    def __init__(self, plan: Plan, track: Track) -> None:
        self.plan = plan
        depth = plan.edges[2]
        self.complete = frozenset([C_TERM, *(k for k in range(plan.grid.k) if depth[k] < depth[k + 1])])
        self.places: dict[tuple[TileKey, int], _Place] = {}
        self.in_slot: dict[tuple[int, int], set[tuple[TileKey, Box]]] = defaultdict(set)
        self.begin = min([0.0, *(run.start for run in track.runs)])
        self.boxes: dict[TileKey, Box] = {}
        for operand, modes in MODES.items():
            for tile in product(*(range(getattr(plan.grid, mode)) for mode in modes)):
                key = operand, tile
                box = self.boxes[key] = _tile_box(plan, key)
                for rank in range(plan.world_size) if box_size(box) else ():
                    if contains(plan.box(operand, rank), box):
                        self._place(key, rank)
        for ops in plan.rank_ops:
            for op in filter(self._known, ops):
                for key in tiles_of(op):
                    self._place(key, op.rank)
                link = link_of(op)
                if link is not None:
                    self._place(tiles_of(op)[-1], link[1])
        # At equal times results arrive before ops start, except that an op starts before its own result.
        events = []
        for run in track.runs:
            if isinstance(run.op, (Gemm, Copy, Reduce)) and self._known(run.op):
                events += [(run.start, 1, run), (run.done, 2 if run.done == run.start else 0, run)]
        for time, phase, run in sorted(events, key=lambda event: event[:2]):
            (self._start if phase == 1 else self._done)(run, time)

    def _known(self, op: Op) -> bool:
        """Whether an op is about tiles and ranks of the plan, as every op of a plan with a proof is."""
        return all(key in self.boxes for key in tiles_of(op)) and all(
            0 <= rank < self.plan.world_size for rank in (op.rank, *(link_of(op) or ()))
        )

    def _place(self, key: TileKey, rank: int) -> _Place:
        place = self.places.get((key, rank))
        if place is None:
            box = self.boxes[key]
            owner = contains(self.plan.box(key[0], rank), box)
            place = self.places[key, rank] = _Place(key, owner, box_size(box))
            place.note(self.begin, self.complete)
        return place

    def _start(self, run: Run, time: float) -> None:
        op = run.op
        if op.operand in SCALE_OPERANDS.values():
            return  # pages show tiles, without their scales
        write = accesses(op)[1]
        assert write is not None
        changed = [self._place(key, op.rank) for key in tiles_of(op)]
        if isinstance(op, Copy):
            if link_of(op) is None:
                changed = changed if op.operand == "D" else []
                for place in changed:
                    place.busy["copied within the rank"] += 1
            else:
                changed = [self._place(tiles_of(op)[0], op.dst.rank)]
                changed[0].coming[op.src.rank] += 1
        else:
            what = "multiplied now" if isinstance(op, Gemm) else "partial sums are added now"
            for place in changed:
                place.busy[what] += 1
        changed += self._clear(write, tiles_of(op)[-1])
        for place in changed:
            place.note(time, self.complete)

    def _clear(self, write: View, key: TileKey) -> list[_Place]:
        """The places that lose a tile because another tile is written into its slot."""
        if write.buffer != "slot":
            return []
        lost = []
        held = self.in_slot[write.rank, write.slot]
        for other, box in [each for each in held if each[0] != key]:
            place = self._place(other, write.rank)
            place.pieces.pop(("slot", write.slot, box), None)
            held.discard((other, box))
            lost.append(place)
        return lost

    def _done(self, run: Run, time: float) -> None:
        op = run.op
        if op.operand in SCALE_OPERANDS.values():
            return
        write = accesses(op)[1]
        assert write is not None
        keys = tiles_of(op)
        target = self._place(keys[-1], write.rank)
        changed = [target]
        at = (write.buffer, write.slot, write.box)
        if isinstance(op, Copy):
            source = self._place(keys[0], op.src.rank)
            content: Content = frozenset()
            if op.operand == "D":
                content = source.pieces.get((op.src.buffer, op.src.slot, op.src.box), content)
            if link_of(op) is None:
                if op.operand != "D":
                    return  # a tile of a shard in a slot, for other ranks to pull
                _less(target.busy, "copied within the rank")
            else:
                _less(target.coming, op.src.rank)
                target.sources[at] = op.src.rank
                if op.operand == "D":
                    source.moved.add((op.src.buffer, op.src.slot, op.src.box))
                    changed.append(source)
        else:
            assert isinstance(op, (Gemm, Reduce))
            content = frozenset([op.tile.k]) if isinstance(op, Gemm) else frozenset()
            own = self._place(keys[-1], op.rank)
            for view in op.sources:
                content |= own.pieces.get((view.buffer, view.slot, view.box), frozenset())
                own.moved.add((view.buffer, view.slot, view.box))
            content |= {C_TERM} if op.c is not None else set()
            for key in keys:
                place = self._place(key, op.rank)
                _less(place.busy, "multiplied now" if isinstance(op, Gemm) else "partial sums are added now")
                changed.append(place)
            if write.rank != op.rank:
                own.moved.add(at)  # the result went to the other rank at once
        target.pieces[at] = content
        target.moved.discard(at)
        if write.buffer == "slot":
            self.in_slot[write.rank, write.slot].add((keys[-1], write.box))
        for place in changed:
            place.note(time, self.complete)


def _less(counter: Counter[Any], what: Any) -> None:
    counter[what] -= 1
    if not counter[what]:
        del counter[what]


# --- the model ------------------------------------------------------------------------------------------


def explorer_model(plan: Plan, tracks: Sequence[Track], failure: PlanError | None = None) -> dict[str, Any]:
    """Everything that a page shows of a plan, as JSON values.

    Args:
        plan: what is shown. Its ops may be wrong, but its fields have their types.
        tracks: one, or a measured and a predicted one.
        failure: what the proof of the plan has found; None if the plan is proved.

    Returns:
        A dictionary. ``ops`` has the ops of each rank. ``tracks`` has for each op a lane, a start, an end and when its
        result is there, or null if it never starts. ``places`` says what each rank has of each tile: steps of (time,
        state, text), each valid until the next one.
    """
    links: Counter[tuple[int, int]] = Counter()
    for ops in plan.rank_ops:
        for op in ops:
            link = _link(plan, op)
            if link is not None:
                links[link] += _moved_bytes(plan, op)
    signals = {op.flag[:2]: op for ops in plan.rank_ops for op in ops if isinstance(op, Signal)}
    found = [(track, _States(plan, track)) for track in map(_rounded, tracks)]
    places = sorted({at for _, states in found for at in states.places})
    lanes = {run.lane for track in tracks for run in track.runs if run.lane != FLAG_LANE}
    return {
        "schedule": plan.schedule,
        "problem": problem_text(plan),
        "ranks": plan.world_size,
        "mesh": list(plan.mesh),
        "mechanism": plan.mechanism,
        "workspace": plan.workspace,
        "sync": plan.sync,
        "iterations": plan.iterations,
        "moved": bytes_text(sum(links.values())) if links else "nothing",
        "links": [[src, dst, bytes_text(size)] for (src, dst), size in sorted(links.items())],
        "failure": None if failure is None else _failure(plan, failure),
        "grids": [
            {"operand": operand, "modes": list(modes), "shape": [getattr(plan.grid, mode) for mode in modes]}
            for operand, modes in MODES.items()
        ],
        "lanes": sorted(lanes, key=lane_order),
        "ops": [[_op_row(plan, op, signals) for op in ops] for ops in plan.rank_ops],
        "tracks": [_track_row(plan, track, states.begin) for track, states in found],
        "places": [
            {
                "tile": tile_text(key),
                "rank": rank,
                "owner": next(iter(found))[1].places[key, rank].owner,
                "steps": [states.places[key, rank].steps for _, states in found],
            }
            for key, rank in places
        ],
    }


def _rounded(track: Track) -> Track:
    """The track with shorter numbers, which are equal where they were equal."""
    return track._replace(runs=tuple(Run(*run[:3], *(round(time, 4) for time in run[3:])) for run in track.runs))


def tile_text(key: TileKey) -> str:
    """The name of a tile in the model, such as "A(3,0,0)"."""
    return f"{key[0]}({','.join(map(str, key[1]))})"


def _failure(plan: Plan, error: PlanError) -> dict[str, Any]:
    # The op may name another rank than the one in whose list it stands.
    at = [[rank, op.id] for rank, ops in enumerate(plan.rank_ops) for op in ops if op is error.op]
    return {"message": str(error), "op": at[0] if at else None}


def _op_row(plan: Plan, op: Op, signals: dict[tuple[int, int], Signal]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": op.id,
        "kind": op_class(op),
        "title": op_title(op),
        "text": op_text(op),
        "tiles": [tile_text(key) for key in tiles_of(op)],
        "deps": list(op.deps),
    }
    link = _link(plan, op)
    if link is not None:
        row["link"] = list(link)
        row["bytes"] = bytes_text(_moved_bytes(plan, op))
    if isinstance(op, (Signal, Wait)):
        row["title"] = f"{op.kind} {op.flag}"
        row["flag"] = str(op.flag)
        row["credit"] = op.flag.credit
    if isinstance(op, Wait):
        row["peer"] = op.peer
    if isinstance(op, Wait) and not op.flag.initial and op.flag[:2] in signals:
        signal = signals[op.flag[:2]]
        row["signal"] = [signal.rank, signal.id]
    return row


def _link(plan: Plan, op: Op) -> tuple[int, int] | None:
    """The link of an op, if its ranks exist."""
    link = link_of(op)
    return link if link is not None and all(0 <= rank < plan.world_size for rank in link) else None


def _moved_bytes(plan: Plan, op: Op) -> int:
    """The bytes that an op moves over its link; 0 if its slot does not exist."""
    write = accesses(op)[1]
    assert write is not None
    if write.buffer == "slot" and not 0 <= write.slot < len(plan.slots[write.rank]):
        return 0
    return box_size(write.box) * DTYPE_BYTES[plan.dtype(write)]


def _track_row(plan: Plan, track: Track, begin: float) -> dict[str, Any]:
    at = {(run.rank, run.op.id): run for run in track.runs}
    times: list[list[list[Any] | None]] = []
    for ops in plan.rank_ops:
        runs = [at.get((op.rank, op.id)) for op in ops]
        times.append([None if run is None else [run.lane, *run[3:]] for run in runs])
    return {
        "name": track.name,
        "unit": track.unit,
        "about": track.about,
        "begin": begin,
        "end": max([begin, *(run.done for run in track.runs)]),
        "times": times,
    }
