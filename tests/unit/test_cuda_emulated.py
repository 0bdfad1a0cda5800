"""The CUDA runtime without a GPU: what it would put on streams, executed on CPU tensors in every order that streams,
events and words allow. Values, deadlocks, and the protocol by which executables share a workspace.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import chain
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm import api as compiling
from distgemm.gemm import GemmSpec, GemmTensors
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.flags import WAIT, WRITE, WRITE_DOUBLE, MemOp, flag_ops
from distgemm.gemm.fused.gemms import FusedGemms
from distgemm.gemm.fused.kernel import fused_source
from distgemm.plan.ops import Barrier, Copy, Gemm, Signal, Wait
from distgemm.plan.plan import PlanError
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.cuda import binding, executable, memops, watchdog
from distgemm.runtime.cuda import flag_kernel as words
from distgemm.runtime.cuda.binding import Binder, Call, tiles_of_a
from distgemm.runtime.cuda.executable import CudaExecutable, _key, copied_buffers
from distgemm.runtime.cuda.lowering import lower, most_flags
from distgemm.runtime.cuda.lowering import single_kernel as one_kernel
from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, waits_of
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, Watchdog, _explain
from distgemm.runtime.cuda.workspace import (
    BODY,
    ENTRY,
    STAGES,
    WORD,
    FlagOps,
    Half,
    Step,
    Workspace,
    first_flag,
    stage_word,
)
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import schedule_options

Task = Any  # a MemOp, a Callable[[], None], or a Together


class Together:
    """Tasks of several that go on beside one another."""

    def __init__(self, parts: list[list[Any]]) -> None:
        self.parts, self.order = [deque(part) for part in parts], random.Random(0)


class Machine:
    """All ranks: their memories and their words."""

    def __init__(self, ranks: int, slot_bytes: int) -> None:
        self.slots = [
            [torch.full((slot_bytes + 256,), 0xFF, dtype=torch.uint8) for _ in range(ranks)] for _ in range(2)
        ]
        self.words: dict[int, int] = {}
        self.moved = False
        self.workspaces = [FakeWorkspace(self, rank, ranks) for rank in range(ranks)]
        for workspace in self.workspaces:
            for half in workspace.halves:
                for peer in half.peers:
                    self.words[half.left(workspace.rank, peer)] = 1

    def done(self, task: Task) -> bool:
        """Does a task, if it is no wait that has to go on."""
        if isinstance(task, Together):
            for part in task.order.sample(task.parts, len(task.parts)):
                while part and self.done(part[0]):
                    part.popleft()
                    self.moved = True
                    if task.order.random() < 0.3:
                        break
            return not any(task.parts)
        if not isinstance(task, MemOp):
            task()
        elif task.wait:
            return self.words.get(task.address, 0) == task.value
        else:
            for address in range(task.address, task.address + WORD * (1 + task.double), WORD):
                self.words[address] = task.value
        return True


class FakeWorkspace(Workspace):
    def __init__(self, machine: Machine, rank: int, ranks: int) -> None:
        self.machine, self.rank, self.world_size = machine, rank, ranks
        self.halves = tuple(Half(rank, [(peer << 32) + (half << 24) for peer in range(ranks)]) for half in range(2))
        self.peers = self.halves[0].peers
        self._turn = 0
        self.dead, self.replaced, self._kept = None, False, []
        self.executables: list[Any] = []

    def slot(self, half: int, rank: int, offset: int, size: int) -> torch.Tensor:
        return self.machine.slots[half][rank][offset : offset + size]


class Emulated:
    """A rank's part of a plan, and the tasks of each of its actions."""

    def __init__(
        self,
        plan: distgemm.Plan,
        rank: int,
        workspace: FakeWorkspace,
        gemm_streams: int,
        waits: str = "memory",
        merge: bool = False,
        copies: str = "engine",
        config: str | None = None,
        gives_way: bool = False,
    ) -> None:
        provider = "cutlass" if waits == "gemm" else "one term" if gemm_streams == 1 else "any terms"
        how = ExecutionConfig(provider, config, gemm_streams, waits, merge, copies)
        self.binder = Binder(plan, rank, torch.device("cpu"), how, gives_way)
        self.actions = self.binder.actions
        exe = CudaExecutable.__new__(CudaExecutable)
        exe.plan, exe.rank, exe.workspace, exe.device = plan, rank, workspace, torch.device("cpu")
        exe.how, exe.binder, exe._copied = how, self.binder, copied_buffers(plan, rank)
        exe.number = workspace.register(exe)
        self.binder.attach(workspace, exe.number, None)
        self.exe = exe

    def tasks(self, call: Call, recorded: list[Task], half: int) -> list[list[Task]]:
        """And of what is behind all of them. From now on the actions are those of this call."""
        bound, found = self.binder.bind(call, half), []
        self.actions = bound.actions
        for launch in (*bound.launches, bound.leave):
            recorded.clear()
            launch(0)
            found.append(list(recorded))
        return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Where launches go instead of streams."""
    tasks: list[Task] = []

    def copy(target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        pairs = memops.rows_of(target, source)
        tasks.append(lambda: [to.copy_(of) for to, of in pairs] and None)

    def multiplied(t: GemmTensors, further: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        def gemm() -> None:
            found = t.alpha * t.a.double() @ t.b.double().mT
            for factor, added in ((1.0, t.partial), (t.beta, t.c), (1.0, t.bias), *((1.0, one) for one in further)):
                if added is not None:
                    found = found + factor * added.double()
            t.d.copy_(found)

        return gemm

    def bind(t: GemmTensors, **_: Any) -> Callable[[int], None]:
        return lambda stream: tasks.append(multiplied(t))

    kernels = itertools.count(1)

    def bind_fused(gemms: FusedGemms, config: Any) -> Callable[[int], None]:
        def words(first: int, columns: int) -> list[int]:
            slices = -(-columns // (gemms.slice_k or columns))
            return [first + WORD * number for number in range(slices if first else 0)]

        opened = memops.wait_for(-next(kernels))  # a word of the kernel's own
        enters: list[Task] = [opened] if gemms.entry else []
        waits: list[list[Task]] = []
        each: list[list[Task]] = []
        whole_operands = gemms.whole_operands or [False] * len(gemms.products)
        addends = gemms.addends or [()] * len(gemms.products)
        for t, word, told, remote, whole, added in zip(
            *(gemms.products, gemms.wait_flags, gemms.done_flags, gemms.remote, whole_operands, addends), strict=True
        ):
            every = words(word, t.a.shape[1])
            every = [*(every[:1] if whole else every), *(one.wait_flag for one in added)]
            waits.append([memops.wait_for(one) for one in every])
            product = multiplied(t, [one.matrix for one in added])
            each.append([*(enters if remote else []), product, *([memops.write(told)] if told else [])])
        products: list[Task] = []
        at = 0
        for size in gemms.tile_interleave or [1] * len(each):
            # A single resident block waits for each of them before the first one has all of its tiles.
            products += chain.from_iterable(waits[at : at + size] + each[at : at + size])
            at += size
        sent: list[Task] = [*enters]
        copied: list[Task] = []
        for send in gemms.sends:
            queue = sent if send.remote else copied
            along = gemms.slice_k or send.source.shape[1]
            queue += [memops.wait_for(send.wait_flag)] if send.wait_flag else []
            for number, word in enumerate(words(send.flag, send.source.shape[1]) or [0]):
                columns = slice(number * along, (number + 1) * along)
                queue += [functools.partial(send.target[:, columns].copy_, send.source[:, columns])]
                queue += [memops.write(word)] if word else []
        entry = [*chain.from_iterable(gemms.entry), *([memops.write(opened.address)] if gemms.entry else [])]
        closed = [memops.write(opened.address, 0), *chain.from_iterable(gemms.exit)] if gemms.exit else []
        parts = [part for part in (entry, products, sent, copied) if part]
        return lambda stream: tasks.extend([Together(parts), *closed] if len(parts) > 1 else products)

    def bind_sum(sources: Any, d: torch.Tensor, *, c: Any = None, beta: float = 0.0, bias: Any = None) -> Any:
        def add() -> None:
            found = sum(source.double() for source in sources)
            found = found + (0 if c is None else beta * c.double()) + (0 if bias is None else bias.double())
            d.copy_(found)

        return lambda stream: tasks.append(add)

    class Provider:
        def __init__(self, name: str) -> None:
            self.name = name

        def supports(self, spec: GemmSpec) -> bool:
            terms = [spec.partial, spec.c, spec.bias]
            return self.name != "one term" or sum(term is not None for term in terms) < 2

    def bind_flag_ops(phases: Any, device: int) -> Any:
        return lambda stream: tasks.extend(op for phase in phases for op in phase)

    monkeypatch.setattr(binding, "bind_flag_ops", bind_flag_ops)
    monkeypatch.setattr(binding, "get_provider", Provider)
    monkeypatch.setattr(binding, "mem_ops", lambda ops, stream: tasks.extend(ops))
    monkeypatch.setattr(binding, "copy_box", copy)
    monkeypatch.setattr(binding, "bind_gemm", bind)
    monkeypatch.setattr(binding, "bind_fused", bind_fused)
    monkeypatch.setattr(binding, "bind_sum", bind_sum)
    return tasks


def run(
    machine: Machine, ranks: list[list[tuple[Emulated, list[list[Task]]]]], order: random.Random, queues: bool
) -> None:
    """Replays of each rank one after the other, their actions as streams and events allow.

    queues: each rank has one queue for all streams: actions run one by one as they were issued
    """
    states: list[list[Any]] = [[0, set()] for _ in ranks]  # replay, actions done
    speed = list(range(len(ranks)))
    progress: list[dict[int, int]] = [{} for _ in ranks]

    def candidates(rank: int) -> list[int]:
        replay, done = states[rank]
        if replay == len(ranks[rank]):
            return []
        emulated, _ = ranks[rank][replay]
        actions = emulated.actions
        if len(done) == len(actions):
            return [len(actions)]
        heads: dict[int, int] = {}
        for number, action in enumerate(actions):
            if number not in done:
                heads.setdefault(0 if queues else action.stream, number)
        return [number for number in heads.values() if all(before in done for before in actions[number].after)]

    while any(states[rank][0] < len(ranks[rank]) for rank in range(len(ranks))):
        choices = [(rank, number) for rank in range(len(ranks)) for number in candidates(rank)]
        order.shuffle(choices)
        if order.random() < 0.02:
            order.shuffle(speed)
        choices.sort(key=lambda choice: speed[choice[0]])  # some ranks run ahead as far as they can
        for rank, number in choices:
            emulated, tasks = ranks[rank][states[rank][0]]
            at = progress[rank].get(number, 0)
            moved = machine.moved = False
            while at < len(tasks[number]) and machine.done(tasks[number][at]):
                at, moved = at + 1, True
            progress[rank][number] = at
            if at == len(tasks[number]):
                moved = True
                if number == len(emulated.actions):
                    states[rank][0] += 1
                    states[rank][1] = set()
                    progress[rank] = {}
                else:
                    states[rank][1].add(number)
            if moved or machine.moved:
                break
        else:
            pytest.fail(f"nothing moves: {[(rank, state[0], sorted(state[1])) for rank, state in enumerate(states)]}")


class Data:
    """Global arrays of small integers, and the shards."""

    def __init__(self, plan: distgemm.Plan, seed: int, alpha: float, beta: float, bias: bool) -> None:
        p, generator = plan.problem, torch.Generator().manual_seed(seed)
        self.schedule = plan.schedule
        lead = (p.l,) if p.l > 1 else ()

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).double()

        whole = {"A": draw(*lead, p.m, p.k), "B": draw(*lead, p.n, p.k), "C": draw(*lead, p.m, p.n)}
        row = draw(p.n) if bias else None
        dtypes = {name: TORCH_DTYPES[str(p.dtype if name in "AB" else p.out_dtype)] for name in "ABCD"}
        self.wanted, self.calls, self.whole = [], [], whole
        product = alpha * whole["A"] @ whole["B"].mT + beta * whole["C"] + (0 if row is None else row)
        for rank in range(plan.world_size):
            shards = {name: x[plan.shard(name, rank)].to(dtypes[name]).contiguous() for name, x in whole.items()}
            shards["D"] = torch.full(plan.shard_shape("D", rank), float("nan"), dtype=dtypes["D"])
            part = None if row is None else row[plan.shard("D", rank)[-1]].to(dtypes["D"])
            if tiles_of_a(plan, rank):
                shards["gathered"] = torch.full(whole["A"].shape, float("nan"), dtype=dtypes["A"])
            self.wanted.append(product[plan.shard("D", rank)])
            self.calls.append(Call(shards, alpha, beta, part, None, None))

    def check(self) -> None:
        """D of all ranks, and all of A where it is gathered."""
        for rank, (call, wanted) in enumerate(zip(self.calls, self.wanted, strict=True)):
            assert torch.equal(call.out.double(), wanted), (self.schedule, rank)
            gathered = call.shards.get("gathered")
            assert gathered is None or torch.equal(gathered.double(), self.whole["A"].view(gathered.shape))


def machine_of(plans: list[distgemm.Plan]) -> Machine:
    """Ranks with room for each of these plans."""
    ranks = plans[0].world_size
    return Machine(ranks, max(plan.workspace_bytes(rank) for plan in plans for rank in range(ranks)))


def plans(schedule: str, ranks: int) -> list[distgemm.Plan]:
    sides = 3 if "3d" in schedule else 2 if "2d" in schedule else 1
    mesh = {1: (ranks,), 2: (2, ranks // 2), 3: (2, 1, ranks // 2)}[sides]
    chunked = {"chunks": 2} if "chunks" in schedule_options(schedule) else {}
    shapes: list[dict[str, Any]] = [{"m": 22, "n": 21, "k": 19}, {"m": 13, "n": 16, "k": 12, "l": 2}]
    found = []
    for shape in shapes:
        problem = distgemm.GemmProblem(**shape, dtype="float32")
        for how in ({"sync": "barrier"}, {"workspace": "bounded"}, {"sync": "barrier", "workspace": "bounded"}):
            # The others where they differ most: by the barrier alone, and by credits within the replay.
            for mechanism in ("push", "pull", "store") if "sync" not in how or len(how) == 1 else ("push",):
                found.append(distgemm.make_plan(problem, schedule, mesh=mesh, mechanism=mechanism, **how, **chunked))
        if "last" in schedule_options(schedule):
            other = "gemm" if "pairwise" in schedule else "sum"
            found.append(distgemm.make_plan(problem, schedule, mesh=mesh, sync="barrier", last=other, **chunked))
    return found


@pytest.mark.parametrize("queues", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("schedule", distgemm.list_schedules())
def test_every_schedule_under_every_order(schedule: str, queues: bool, recorded: list[Task]) -> None:
    """Each plan replayed three times, other executables of the same workspace in between."""
    ranks = 4
    every = plans(schedule, ranks)
    machine = machine_of(every)
    order = random.Random(schedule)
    emulated = [
        [
            Emulated(plan, rank, machine.workspaces[rank], 1 + number % 2, ("memory", "kernel")[number // 2 % 2])
            for rank in range(ranks)
        ]
        for number, plan in enumerate(every)
    ]
    script = [order.randrange(len(every)) for _ in range(3 * len(every))]
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for turn, which in enumerate(script):
        half = order.randrange(2)  # in turn, as calls do, and again and again the same, as replays of captured ones do
        data.append(Data(every[which], turn, alpha=2.0, beta=float(turn % 2), bias=turn % 3 == 0))
        for rank in range(ranks):
            one = emulated[which][rank]
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, half)))
    run(machine, todo, order, queues)
    for drawn in data:
        drawn.check()
    for workspace in machine.workspaces:
        words = {address: value for address, value in machine.words.items() if address >> 32 == workspace.rank}
        left = [words.pop(half.left(workspace.rank, peer)) for half in workspace.halves for peer in half.peers]
        assert set(left) <= {1} and set(words.values()) <= {0}


GATHERS = ["all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a", "all_gather_1d_bidirectional_full_a"]


@pytest.mark.parametrize("schedule", GATHERS)
def test_merged_chunks_under_every_order(schedule: str, recorded: list[Task]) -> None:
    """Rows of 256 bytes, so that slots lie behind one another without a gap."""
    order, ranks = random.Random(schedule), 4
    every = [
        distgemm.make_plan(distgemm.GemmProblem(m, 21, 64, dtype="float32"), schedule, ranks, chunks=chunks, **how)
        for m, chunks in ((22, 2), (37, 3), (64, 4))
        for how in ({"sync": "barrier"}, {"workspace": "bounded"}, {"sync": "barrier", "mechanism": "pull"})
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for turn, plan in enumerate(every * 3):
        data.append(Data(plan, turn, alpha=2.0, beta=float(turn % 2), bias=turn % 3 == 0))
        half = order.randrange(2)
        for rank in range(ranks):
            one = Emulated(plan, rank, machine.workspaces[rank], 1 + turn % 2, merge_copies=True)
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, half)))
    run(machine, todo, order, queues=False)
    for drawn in data:
        drawn.check()
        assert all("gathered" in call.shards for call in drawn.calls)


CHAINS = ["reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"]
PAIRWISE = "reduce_scatter_1d_pairwise_a"
GATHERED = [
    *GATHERS,
    "all_gather_1d_pairwise_xor_a",
    "all_gather_1d_tiling_cd_rotating_b",
    "tensor_parallel_2d_nested",
]


@pytest.mark.parametrize(
    ("schedule", "mechanism", "queues"),
    [
        *((name, "push", queues) for name in GATHERED for queues in (False, True)),
        *((name, "store", queues) for name in CHAINS for queues in (False, True)),
        # The kernel and copies wait for each other.
        *((name, "push", False) for name in CHAINS),
        *(("all_reduce_1d_tiling_a_rotating_c", mechanism, False) for mechanism in ("push", "store")),
        *(("reduce_scatter_1d_pairwise_a", mechanism, mechanism == "store") for mechanism in ("push", "store")),
        ("all_reduce_1d_pairwise_a", "store", False),
    ],
)
def test_one_kernel_that_waits_under_every_order(
    schedule: str, mechanism: str, queues: bool, recorded: list[Task]
) -> None:
    order, ranks = random.Random(schedule), 4
    chunked = [{"chunks": chunks} for chunks in (1, 2, 4) if chunks == 1 or "chunks" in schedule_options(schedule)]
    if "stagger" in schedule_options(schedule):
        chunked += [{"chunks": chunks, "stagger": stagger} for chunks, stagger in ((2, 1), (4, 1), (4, 2), (4, 3))]
    if "along" in schedule_options(schedule):
        chunked += [
            {"chunks": chunks, "stagger": stagger, "chunk_mode": "n"} for chunks, stagger in ((2, 0), (2, 1), (4, 2))
        ]
    summed = {"final_add": "epilogue"} if "pairwise_a" in schedule else {}
    every = [
        distgemm.make_plan(
            distgemm.GemmProblem(32, 16, 64, dtype="float32"),
            schedule,
            mesh=(2, 2) if "2d" in schedule else (4,),
            sync="barrier",
            mechanism=mechanism,
            send_slots=16 if "stagger" in how or summed else 4,
            **how,
            **summed,
        )
        for how in chunked
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for turn, plan in enumerate(every * 6):
        data.append(Data(plan, turn, alpha=2.0, beta=float(turn % 2), bias=turn % 3 == 0))
        half = order.randrange(2)
        for rank in range(ranks):
            # Beside other executables on the same workspace.
            one = Emulated(
                plan, rank, machine.workspaces[rank], 2, ("gemm", "gemm", "memory")[turn % 3], merge=turn % 2 == 1
            )
            assert sum(action.wait_flags != () for action in one.actions) == (turn % 3 < 2)
            if turn % 3 < 2:  # a third stream might stand behind the kernel's
                assert {action.stream for action in one.actions} <= {COMM, GEMM_STREAM}
                of = {action: number for number, action in enumerate(one.actions)}
                (kernel,) = (number for action, number in of.items() if action.wait_flags)
                own = [
                    n for action, n in of.items() if any(isinstance(op, Wait) and op.peer == rank for op in action.ops)
                ]
                assert all(kernel < number for number in own)  # it is issued before what waits for it
                pushed = mechanism == "push" and schedule.startswith("reduce_scatter")
                assert bool(own) == (pushed or schedule.startswith("all_reduce"))
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, half)))
    run(machine, todo, order, queues)
    for drawn in data:
        drawn.check()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", [GATHERS[0], "all_gather_1d_tiling_cd_rotating_b", "all_gather_1d_pairwise_xor_a"])
def test_a_kernel_that_sends_under_every_order(
    schedule: str, ranks: int, recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slice by slice; beside others whose tensors no kernel reads, and beside plans that are done otherwise."""
    order = random.Random(schedule)
    if "xor" in schedule:
        ranks += ranks % 2
    problem = distgemm.GemmProblem(12 * ranks, 8 * ranks, 1600, dtype="float32")
    chunked = [{"chunks": chunks} for chunks in (1, 2) if chunks == 1 or "chunks" in schedule_options(schedule)]
    every = [distgemm.make_plan(problem, schedule, ranks, sync="barrier", **how) for how in chunked]

    def check(sends: list[int], copied: int, copies: str) -> None:
        assert sends == [3] * {"gemm": copied, "both": min(copied, 1)}.get(copies, 0)

    copied_by = ("gemm", "slices", "both", "engine")
    run_where_some_are_refused(every * 8, copied_by, check, order, recorded, monkeypatch)


def run_where_some_are_refused(
    plans: list[distgemm.Plan],
    copied_by: Sequence[str],
    check: Callable[[list[int], int, str], None],
    order: random.Random,
    recorded: list[Task],
    monkeypatch: pytest.MonkeyPatch,
    queues: bool = False,
) -> None:
    """Replays by one kernel, copies by each of these in turn, where three kernels of ten cannot read their tensors.

    check: takes how many slices each send of a kernel has, how many copies the rank has, and by whom they are
    """

    bind = binding.bind_fused

    def refused(gemms: FusedGemms, config: Any) -> Any:
        if order.random() < 0.3:
            raise ValueError("unaligned")
        return bind(gemms, config)

    monkeypatch.setattr(binding, "bind_fused", refused)
    machine, ranks = machine_of(plans), plans[0].world_size
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for turn, plan in enumerate(plans):
        data.append(Data(plan, turn, alpha=2.0, beta=float(turn % 2), bias=turn % 3 == 0))
        half, copies = order.randrange(2), copied_by[turn % len(copied_by)]
        for rank in range(ranks):
            one = Emulated(plan, rank, machine.workspaces[rank], 2, "gemm", copies=copies, gives_way=True)
            sends = [len(sent.copies) for action in one.actions for sent in action.sends]
            check(sends, sum(isinstance(op, Copy) for op in plan.ops(rank)), copies)
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, half)))
    run(machine, todo, order, queues)
    for drawn in data:
        drawn.check()


ALL_REDUCES = ["all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_b_rotating_c"]


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", [*ALL_REDUCES, "all_reduce_1d_pairwise_a"])
def test_a_kernel_that_delivers_under_every_order(
    schedule: str, ranks: int, queues: bool, recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that an all-reduce copies, by its kernel; beside others whose tensors no kernel reads, and beside plans that
    are done otherwise."""
    order = random.Random(f"{schedule} {ranks}")
    problem = distgemm.GemmProblem(12 * ranks, 12 * ranks, 16 * ranks, dtype="float32")
    chunked: list[dict[str, Any]] = [
        {"chunks": 1},
        {"chunks": 3},
        {"chunks": 4, "stagger": 1},
        {"chunks": 4, "stagger": 3},
    ]
    if schedule not in ALL_REDUCES:
        chunked = [how | {"final_add": "epilogue", "along": along} for how, along in zip(chunked, "mnmn", strict=True)]
    every = [
        distgemm.make_plan(problem, schedule, ranks, sync=sync, mechanism="store", **how)
        for how, sync in zip(chunked, ("barrier", "barrier", "credit", "barrier"), strict=True)
    ]

    def check(sends: list[int], copied: int, copies: str) -> None:
        assert sends == [1] * (0 if copies == "engine" else copied)

    copied_by = ("gemm", "gemm", "gemm", "gemm", "gemm" if queues else "engine")  # by engines another plan each time
    run_where_some_are_refused(every * 6, copied_by, check, order, recorded, monkeypatch, queues)


def test_what_an_all_reduce_delivers() -> None:
    """Each finished tile to every peer, as a whole, once the kernel says so; and from slots what peers have finished,
    to D. Nothing else is put on streams."""
    problem = distgemm.GemmProblem(64, 64, 64)
    plan = distgemm.make_plan(problem, ALL_REDUCES[0], 4, sync="barrier", mechanism="store", chunks=2)
    actions = lower(plan, 1, 1, gated=True, transport="sm")
    assert {action.stream for action in actions} == {GEMM_STREAM}
    assert [action.step for action in actions] == [Step.ENTRY, Step.ENTERED, None, Step.FINISH]
    (kernel,) = (action for action in actions if action.ops)
    away = [sent for sent in kernel.sends if sent.copies[0].dst.rank != 1]
    here = [sent for sent in kernel.sends if sent not in away]
    assert [sent.copies[0].dst.rank for sent in away] == [0, 3, 2, 0, 3, 2]
    finished = {
        op.out.box: told.flag
        for op, told in zip(kernel.ops, kernel.done_flags, strict=True)
        if told and op.out.rank == 1
    }
    for sent in away:
        (copy,), (signal,) = sent.copies, sent.signals
        assert sent.waits is not None and sent.waits.flag == finished[copy.src.box] and sent.waits.peer == 1
        assert signal.flag.rank == copy.dst.rank
    assert sorted(sent.copies[0].dst.box[1] for sent in here) == [(at, at + 8) for at in (0, 8, 32, 40, 48, 56)]
    for sent in here:
        assert sent.waits is not None and sent.waits.peer != 1 and not sent.signals
    assert {wait.flag for wait in waits_of(actions)} >= {sent.waits.flag for sent in kernel.sends if sent.waits}
    beside = [op for action in lower(plan, 1, 1, transport="sm") for op in action.ops if isinstance(op, Copy)]
    assert [(op.src, op.dst) for op in beside] == [
        (copy.src, copy.dst)
        for sent in sorted(kernel.sends, key=lambda sent: sent.copies[0].id)
        for copy in sent.copies
    ]


@pytest.mark.parametrize("schedule", CHAINS)
def test_room_that_is_used_again_is_waited_for(schedule: str, recorded: list[Task]) -> None:
    """By a product which is not tile_interleave of the one that the room is taken from."""
    problem = distgemm.GemmProblem(24, 24, 16, dtype="float32")
    for chunks in (2, 3, 4):
        for stagger in range(1, chunks):
            how: dict[str, Any] = {"sync": "barrier", "mechanism": "store", "workspace": "bounded"}
            plan = distgemm.make_plan(problem, schedule, 2, chunks=chunks, stagger=stagger, **how)
            run_by_one_kernel(plan, recorded, turns=4)


def run_by_one_kernel(
    plan: distgemm.Plan, recorded: list[Task], turns: int, beta: float = 0.0, copies: str = "engine"
) -> None:
    """Replays that follow one another, on both halves, in a random order of ranks and streams; beta in every second."""
    machine = machine_of([plan])
    todo: list[list[Any]] = [[] for _ in range(plan.world_size)]
    data = [Data(plan, turn, alpha=1.0, beta=beta * (turn % 2), bias=False) for turn in range(turns)]
    for turn, drawn in enumerate(data):
        for rank, call in enumerate(drawn.calls):
            one = Emulated(plan, rank, machine.workspaces[rank], 2, "gemm", copies=copies)
            todo[rank].append((one, one.tasks(call, recorded, turn % 2)))
    run(machine, todo, random.Random(0), queues=False)
    for drawn in data:
        drawn.check()


@pytest.mark.parametrize("copies", ["slices", "gemm", "both"])
@pytest.mark.parametrize("rows", [(16, 0), (0, 16), (8, 0, 8), (16, 0, 0)])
def test_a_rank_that_sends_nothing_waits_for_every_slice(
    rows: tuple[int, ...], copies: str, recorded: list[Task]
) -> None:
    ranks = len(rows)
    problem = distgemm.GemmProblem(16, 8 * ranks, 1600, dtype="float32", m_per_rank=rows)
    plan = distgemm.make_plan(problem, GATHERS[0], ranks, sync="barrier")
    run_by_one_kernel(plan, recorded, turns=6, copies=copies)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [(GATHERS[0], {}), (CHAINS[0], {}), *((CHAINS[0], {"stagger": stagger}) for stagger in (1, 2, 3))],
    ids=str,
)
def test_ranks_whose_kernels_cannot_wait_work_with_others(
    schedule: str,
    how: dict[str, int],
    recorded: list[Task],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where that was chosen for them; where it was asked for, they raise."""

    bind = binding.bind_fused
    refused: list[bool] = []

    def refuse(gemms: FusedGemms, config: Any) -> Any:
        if refused[-1]:
            raise ValueError("unaligned")
        return bind(gemms, config)

    monkeypatch.setattr(binding, "bind_fused", refuse)
    mechanism = "store" if schedule.startswith("reduce") else "push"
    plan = distgemm.make_plan(
        distgemm.GemmProblem(32, 16, 64, dtype="float32"),
        schedule,
        4,
        sync="barrier",
        chunks=4,
        mechanism=mechanism,
        **how,
    )
    machine = Machine(4, max(plan.workspace_bytes(rank) for rank in range(4)))
    todo: list[list[Any]] = [[] for _ in range(4)]
    data = [Data(plan, turn, alpha=2.0, beta=float(turn % 2), bias=False) for turn in range(4)]
    for turn, drawn in enumerate(data):
        for rank, call in enumerate(drawn.calls):
            one = Emulated(
                *(plan, rank, machine.workspaces[rank], 2, "gemm"),
                merge=turn % 2 == 1,
                config="128x128x64_2x1_pingpong",
                gives_way=(rank + turn) % 2 == 1,
            )
            refused.append(one.binder.gives_way)
            todo[rank].append((one, one.tasks(call, recorded, turn % 2)))
            assert any(action.wait_flags for action in one.actions) != one.binder.gives_way
    run(machine, todo, random.Random(0), queues=False)
    for drawn in data:
        assert all(
            torch.equal(call.out.double(), wanted) for call, wanted in zip(drawn.calls, drawn.wanted, strict=True)
        )
    assert "waits on memory for this call: unaligned" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "mechanism"),
    [
        (GATHERS[0], "push"),
        ("all_gather_1d_tiling_cd_rotating_b", "push"),
        (CHAINS[0], "push"),
        (CHAINS[1], "store"),
        ("all_reduce_1d_tiling_a_rotating_c", "store"),
        ("all_reduce_1d_tiling_a_rotating_c", "delivered"),
        ("reduce_scatter_1d_pairwise_a", "store"),
        ("reduce_scatter_1d_pairwise_a", "store along n"),
        ("all_reduce_1d_pairwise_a", "delivered along n"),
    ],
)
def test_kernels_of_all_ranks_are_known_ahead(
    schedule: str, mechanism: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compile builds, with the specs of all products, and what each kernel would be told."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    placed = []
    mechanism, *along = mechanism.split(" along ")
    monkeypatch.setattr(binding, "fused_source", lambda gemms, config: placed.append(gemms) or fused_source(gemms))
    plan = distgemm.make_plan(
        distgemm.GemmProblem(64 * ranks, 64 * ranks, 64 * ranks),
        schedule,
        ranks,
        sync="barrier",
        chunks=2,
        mechanism="store" if mechanism == "delivered" else mechanism,
        **({"final_add": "epilogue", "chunk_mode": "".join(along) or "m"} if "pairwise" in schedule else {}),
    )
    copies = "gemm" if mechanism == "delivered" and ranks > 1 else "engine"
    for rank in range(ranks):
        for c, bias in ((False, False), (True, False), (False, True), (True, True)):
            workspace = Machine(ranks, plan.workspace_bytes(rank)).workspaces[rank]
            binder = Emulated(plan, rank, workspace, 2, "gemm", copies=copies).binder
            monkeypatch.setattr(binding, "get_provider", lambda name: CutlassProvider("90a"))
            (kernel, words) = binder.sources(c=c, bias=bias)
            wanted = "DG_GATHER" if schedule.startswith("all_gather") or ranks == 1 else "DG_REDUCE"
            wanted = "DG_REDUCE_SEND" if copies == "gemm" else wanted
            assert dict(kernel.macros)["DG_KIND"] == wanted and words.file == "flags.cu"
    for gemms in placed:
        assert not any(away and one.bias is not None for one, away in zip(gemms.products, gemms.remote, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "along"),
    [
        *((name, {}) for name in (*CHAINS, "all_reduce_1d_tiling_a_rotating_c")),
        *((name, {"along": along}) for name in (PAIRWISE, "all_reduce_1d_pairwise_a") for along in "mn"),
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [False, True], ids=["", "few rows"])
def test_products_abreast_do_not_wait_for_one_another(
    schedule: str, along: dict[str, str], ranks: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for later ones, on any rank, whether for a sum or for room; without a stagger they are alone, but for those of
    few rows that wait for nothing."""
    if few:
        monkeypatch.setattr(one_kernel, "BALANCE", 1)
    pairwise = "pairwise" in schedule
    together = few and pairwise and ranks > 2

    def kernels(chunks: int, **how: Any) -> list[Any]:
        problem = distgemm.GemmProblem(288, 288, 48)
        how |= along | ({"final_add": "epilogue"} if pairwise else {})
        plan = distgemm.make_plan(problem, schedule, ranks, chunks=chunks, sync="barrier", mechanism="store", **how)
        every = [[action for action in lower(plan, rank, 1, gated=True) if action.wait_flags] for rank in range(ranks)]
        assert all(len(found) == 1 for found in every)
        return [found[0] for found in every]

    def groups(kernel: Any) -> list[int]:
        """Of each product, the number of its group."""
        sizes = kernel.tile_interleave or (1,) * len(kernel.ops)
        assert sum(sizes) == len(kernel.ops) == len(kernel.wait_flags) == len(kernel.done_flags)
        return [number for number, size in enumerate(sizes) for _ in range(size)]

    def check(found: list[Any]) -> None:
        told = {
            tell.flag: number
            for kernel in found
            for number, tell in zip(groups(kernel), kernel.done_flags, strict=True)
            if tell is not None
        }
        waits = 0
        for kernel in found:
            for number, gate in zip(groups(kernel), kernel.wait_flags, strict=True):
                assert all(told[wait.flag] < number for wait in gate)
                waits += len(gate)
        assert waits

    for chunks in (2, 3, 4, 8):
        for stagger in range(1, chunks + 1):
            found = kernels(chunks, stagger=stagger)
            check(found)
            for kernel in found:
                if together:  # chunk by chunk, for all peers, and the own one by itself
                    by_chunk = stagger < chunks or along.get("along") == "n"
                    sizes = [ranks - 1] * chunks if by_chunk else [(ranks - 1) * chunks]
                    assert sorted(kernel.tile_interleave, reverse=True) == [*sizes, *[1] * chunks]
                    continue
                most = 2 if pairwise else min(ranks, -(-chunks // stagger))
                assert max(kernel.tile_interleave, default=1) == (most if stagger < chunks else 1)
        if together:
            check(kernels(chunks))
            if schedule == PAIRWISE and (chunks, ranks) == (2, 3):  # one waits for room, and is alone
                found = kernels(chunks, stagger=1, workspace="bounded")
                check(found)
                assert all(kernel.tile_interleave == (2, 1, 1, 1, 1) for kernel in found)
        else:
            assert not any(kernel.tile_interleave for kernel in kernels(chunks))
        if ranks == 2 and schedule in CHAINS:  # room that is used again within a replay
            check(kernels(chunks, stagger=chunks - 1, workspace="bounded"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "columns", "depth", "how", "sizes"),
    [
        (GATHERS[0], 8, 7168, 16, {}, (1, 1, 2, 4)),
        (GATHERS[0], 8, 7168, 512, {"transport": "sm"}, (1, 3, 4)),
        (GATHERS[0], 8, 13312, 16, {}, (1, 3, 4)),
        (GATHERS[0], 8, 13312, 512, {"transport": "sm"}, (1, 7)),
        (GATHERS[0], 6, 7168, 16, {"chunks": 2, "m": 1536}, (2, 3, 6, 1)),
        (GATHERS[0], 4, 7168, 16, {"chunks": 4}, (4, 7, 5)),
        (
            GATHERS[0],
            4,
            7168,
            16,
            {"chunks": 4, "merge_copies": True},
            (4, 4, 8),
        ),  # what is copied together comes together
        ("all_gather_1d_tiling_cd_rotating_b", 8, 7168, 16, {}, (1, 1, 2, 4)),
        (GATHERS[0], 16, 13312, 16, {}, (1, 3, 11, 1)),
        (GATHERS[0], 8, 3584, 16, {}, ()),  # shards come as slowly as the kernel that takes several has them done
        (GATHERS[0], 8, 3584, 512, {"transport": "sm"}, (1, 1, 2, 4)),
        (GATHERS[0], 8, 3584, 512, {"copies": "both"}, ()),
        (GATHERS[0], 8, 1280, 512, {"transport": "sm"}, ()),
        (GATHERS[0], 4, 13312, 16, {}, (1, 3)),
        (GATHERS[0], 8, 13312, 512, {"transport": "sm", "m": 4096}, (1, 4, 3)),  # 2048 rows at most
        (GATHERS[0], 8, 13312, 16, {"m": 8192}, ()),  # 1024 rows each
        (PAIRWISE, 8, 16, 3584, {}, (7, 1)),
        (PAIRWISE, 8, 16, 1792, {}, ()),
        (PAIRWISE, 4, 16, 3584, {"chunks": 2}, (6, 1, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 4, "stagger": 1}, (3, 1, 3, 1, 3, 1, 3, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 4, "stagger": 2, "chunk_mode": "n"}, (3, 3, 1, 3, 1, 3, 1, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 2, "chunk_mode": "n"}, ()),  # shard by shard, each by another part of B
        (PAIRWISE, 16, 16, 3584, {"chunks": 2, "stagger": 1, "chunk_mode": "n"}, (15, 1, 15, 1)),
        (PAIRWISE, 8, 16, 3584, {"chunks": 2, "stagger": 1, "chunk_mode": "n", "m": 4096}, (4, 3, 1, 4, 3, 1)),
        (PAIRWISE, 4, 16, 3584, {"partial_dtype": "float32"}, ()),
        (CHAINS[0], 8, 16, 3584, {}, ()),  # each is waited for
    ],
)
def test_products_of_few_rows_are_abreast(
    schedule: str, ranks: int, columns: int, depth: int, how: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    gathers, copies, merge = "all_gather" in schedule, how.get("copies", "engine"), how.get("merge", False)
    m, n = how.get("m", 2048), columns * (ranks if gathers else 1)
    m, n = (n, m) if schedule.endswith("_b") else (m, n)
    problem = distgemm.GemmProblem(m, n, depth * ranks, partial_dtype=how.get("partial_dtype"))
    stored = {} if gathers else {"mechanism": "store"} | ({"final_add": "epilogue"} if schedule == PAIRWISE else {})
    chunks = how.get("chunks", 1)
    stored |= {name: how[name] for name in ("stagger", "along") if name in how}
    plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", chunks=chunks, **stored)
    for rank in (0, ranks // 2, ranks - 1):
        (kernel,) = (action for action in lower(plan, rank, 1, merge, gated=True, copies=copies) if action.wait_flags)
        assert kernel.tile_interleave == sizes
        assert [op.out for op in kernel.ops] == [op.out for op in plan.ops(rank) if isinstance(op, Gemm)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "copies", "how"),
    [
        *((GATHERS[0], copies, {}) for copies in ("engine", "slices", "gemm", "both")),
        *(
            (schedule, copies, how)
            for schedule, copies in (
                (PAIRWISE, "engine"),
                ("all_reduce_1d_pairwise_a", "engine"),
                ("all_reduce_1d_pairwise_a", "gemm"),
            )
            for how in ({}, {"stagger": 1}, {"stagger": 1, "chunk_mode": "n"})
        ),
    ],
    ids=str,
)
def test_products_abreast_compute_what_others_do(
    schedule: str,
    copies: str,
    how: dict[str, Any],
    ranks: int,
    recorded: list[Task],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_kernel, "BALANCE", 1)
    pairwise = "pairwise" in schedule
    stored = how | ({"mechanism": "store", "final_add": "epilogue"} if pairwise else {})
    chunks = 2 if pairwise and ranks > 2 else 4
    depth = 1152 if copies != "engine" else 32 * ranks
    problem = distgemm.GemmProblem(16 * ranks, 32 * ranks, depth, dtype="float32")
    plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", chunks=chunks, **stored)
    (kernel,) = (action for action in lower(plan, 0, 1, gated=True, copies=copies) if action.wait_flags)
    assert (max(kernel.tile_interleave, default=1) > 1) == (not pairwise or ranks > 2 or "stagger" in how)
    run_by_one_kernel(plan, recorded, turns=4, copies=copies)


def test_a_kernel_is_told_what_is_abreast(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[FusedGemms] = []
    monkeypatch.setattr(binding, "bind_fused", lambda gemms, config: told.append(gemms) or (lambda stream: None))
    problem = distgemm.GemmProblem(64, 16, 64, dtype="float32")
    for how, wanted in (({}, ()), ({"stagger": 2}, (1, 1, 2, 2, 1, 1))):
        plan = distgemm.make_plan(problem, CHAINS[0], 2, chunks=4, sync="barrier", mechanism="store", **how)
        one = Emulated(plan, 1, machine_of([plan]).workspaces[1], 2, "gemm")
        one.tasks(Data(plan, 0, 1.0, 0.0, False).calls[1], recorded, 0)
        assert told.pop().tile_interleave == wanted


@pytest.mark.parametrize(
    ("schedule", "copies", "how", "rate"),
    [
        (CHAINS[0], "engine", {"mechanism": "store"}, binding.STORE_RATE),
        (CHAINS[0], "engine", {"send_slots": 2}, 0.0),  # its sums stay here until copy engines take them
        ("all_reduce_1d_tiling_a_rotating_c", "gemm", {"mechanism": "store"}, binding.STORE_RATE),
        (GATHERS[0], "engine", {}, 0.0),
        (GATHERS[0], "slices", {}, 0.0),
        (GATHERS[0], "gemm", {}, binding.SEND_RATE),
        (GATHERS[0], "both", {}, binding.SEND_RATE),
    ],
)
def test_what_kernels_write_at_peers_takes_turns(
    schedule: str,
    copies: str,
    how: dict[str, Any],
    rate: float,
    recorded: list[Task],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[FusedGemms] = []
    monkeypatch.setattr(binding, "bind_fused", lambda gemms, config: told.append(gemms) or (lambda stream: None))
    problem = distgemm.GemmProblem(64, 16, 1152, dtype="float32")
    plan = distgemm.make_plan(problem, schedule, 2, chunks=2, sync="barrier", **how)
    machine = machine_of([plan])
    one = Emulated(plan, 1, machine.workspaces[1], 2, "gemm", copies=copies)
    one.tasks(Data(plan, 0, 1.0, 0.0, False).calls[1], recorded, 0)
    (gemms,) = told
    assert gemms.link_rate == rate
    to_peers = [send.remote for send in gemms.sends]
    assert to_peers == ([True, False] * 2 if schedule.startswith("all_reduce") else [True] * len(to_peers))
    assert all(bool(send.flag) == send.remote for send in gemms.sends)
    assert list(gemms.whole_operands) == [False, False, copies in ("slices", "both"), False]


def test_a_kernel_alone_enters_and_leaves_the_replay(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is launched, but where A is asked for, or the words do not fit into one kernel."""
    monkeypatch.setattr(
        binding, "bind_flag_ops", lambda phases, device: lambda stream: recorded.append(memops.write(-1))
    )

    def launches(schedule: str, gathered: bool = False, copies: str = "engine", **how: Any) -> list[int]:
        problem = distgemm.GemmProblem(32, 16, 1152 * 2, dtype="float32")
        plan = distgemm.make_plan(problem, schedule, 2, sync="barrier", **how)
        one = Emulated(plan, 0, machine_of([plan]).workspaces[0], 2, "gemm", copies=copies)
        call = Data(plan, 0, 1.0, 0.0, False).calls[0]
        if not gathered:
            call.shards.pop("gathered", None)
        return [len(tasks) for tasks in one.tasks(call, recorded, 0) if tasks]

    assert len(launches(CHAINS[0], mechanism="store")) == 1
    assert len(launches(ALL_REDUCES[0], mechanism="store", transport="sm")) == 1
    assert len(launches(ALL_REDUCES[0], mechanism="store")) > 3
    assert len(launches(GATHERS[0], transport="sm")) == 1
    assert len(launches(GATHERS[0], transport="sm", gathered=True)) == 3
    assert len(launches(GATHERS[0])) > 3  # copies stand on another stream
    monkeypatch.setattr(binding, "fits", lambda phases: len(phases[0]) > 1)
    assert len(launches(CHAINS[0], mechanism="store")) == 3


def test_a_chain_by_one_kernel_takes_one_stream() -> None:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(64, 64, 64),
        "reduce_scatter_1d_tiling_a_rotating_c",
        4,
        chunks=2,
        sync="barrier",
        mechanism="store",
    )
    actions = lower(plan, 1, 2, gated=True)
    assert {action.stream for action in actions} == {GEMM_STREAM}
    assert [action.step for action in actions] == [Step.ENTRY, Step.ENTERED, None, Step.FINISH]
    (kernel,) = (action for action in actions if action.ops)
    assert [len(waits) for waits in kernel.wait_flags] == [0] * 2 + [1] * 6
    assert [op is not None for op in kernel.done_flags] == [True] * 6 + [False] * 2


def test_what_is_signalled_last_and_the_entry_are_one_batch() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), GATHERS[0], 4, sync="barrier")
    for gated in (False, True):
        steps = [action for action in lower(plan, 1, 1, gated=gated) if action.step is Step.ENTERED]
        assert [type(op) for action in steps for op in action.ops] == [Signal]


def test_what_comes_last_comes_in_halves() -> None:
    def rows(gated: bool, ranks: int = 3, chunks: int = 8) -> list[list[int]]:
        plan = distgemm.make_plan(
            distgemm.GemmProblem(8 * ranks * chunks, 16, 64), GATHERS[0], ranks, chunks=chunks, sync="barrier"
        )
        sent: dict[int, list[int]] = {}
        for action in lower(plan, 1, 1, merge_copies=True, gated=gated):
            for op in action.ops:
                if isinstance(op, Copy):
                    sent.setdefault(op.dst.rank, []).append(op.src.box[1][1] - op.src.box[1][0])
        return sorted(sent.values())

    # To whom it comes last, and to whom it comes first.
    assert rows(gated=True) == [[32, 16, 8, 8], [64]]
    assert rows(gated=False) == [[8] * 8, [64]]
    assert rows(gated=True, ranks=2, chunks=3) == [[8, 8, 8]]
    assert rows(gated=True, ranks=2, chunks=1) == [[8]]


def test_what_one_kernel_cannot_do_is_refused() -> None:
    def lowered(schedule: str, m: int = 64, copies: str = "engine", ranks: int = 4, **how: Any) -> None:
        plan = distgemm.make_plan(distgemm.GemmProblem(m, 64, 64), schedule, ranks, **({"sync": "barrier"} | how))
        lower(plan, 1, 1, gated=True, copies=copies)

    for said, schedule, how in (
        (r"multiplies 15x16x64x1.* 17x16x64x1.*takes equal chunks", GATHERS[0], {"m": 66}),
        ("wait for one signal of a peer, or none", GATHERS[0], {"mechanism": "pull"}),
        ("a plan with more results has room", "reduce_scatter_1d_pairwise_a", {}),
        ("a plan with more results has room", "reduce_scatter_1d_tiling_a_rotating_c", {"chunks": 4}),
        ("without sums and copies beside it", "reduce_scatter_1d_pairwise_a", {"send_slots": 3}),
        ("without sums and copies beside it", "all_reduce_1d_pairwise_a", {"send_slots": 3}),
        ("without sums and copies beside it", "reduce_scatter_1d_pairwise_a", {"mechanism": "store"}),
        ("sums that are passed on, and here are none", GATHERS[1], {"workspace": "bounded"}),
        *(
            ("are of shards, and here is passed on", name, {"copies": copies})
            for name in (GATHERS[1], "all_gather_1d_bidirectional_full_a")
            for copies in ("slices", "gemm", "both")
        ),
        (
            "wait for one signal of a peer, or none",
            "all_gather_1d_bidirectional_split_a",
            {"transport": "sm", "ranks": 2},
        ),
        ("are pushed to peers, and here are none", GATHERS[0], {"transport": "sm", "mechanism": "pull"}),
        ("are pushed to peers, and here are none", CHAINS[0], {"transport": "sm", "mechanism": "store"}),
        ("are none; of all-reduces, for those with mechanism='store'", ALL_REDUCES[0], {"transport": "sm"}),
        *(
            ("are pushed to peers, and here are none$", ALL_REDUCES[0], {"copies": copies, "mechanism": "store"})
            for copies in ("slices", "both")
        ),
    ):
        with pytest.raises(PlanError, match=said):
            lowered(schedule, **how)
    # One of the sums that a product adds is this rank's own, for which there is no signal.
    problem = distgemm.GemmProblem(64, 64, 64)
    plan = distgemm.make_plan(problem, "tensor_parallel_3d", mesh=(2, 2, 2), sync="barrier", mechanism="store")
    with pytest.raises(PlanError, match="or for one of each sum that they add"):
        lower(plan, 0, 1, gated=True)


def test_what_is_waited_for_is_an_operand_or_a_sum() -> None:
    """Of a kernel that adds sums, waits are for these; operands may both differ there, and only there."""
    how: dict[str, Any] = {"mechanism": "store", "final_add": "epilogue", "sync": "barrier"}
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), PAIRWISE, 4, chunks=2, stagger=1, chunk_mode="n", **how)
    lower(plan, 1, 1, gated=True)
    first = next(op for op in plan.ops(1) if isinstance(op, Gemm))
    from_slot = dataclasses.replace(first, a=first.a._replace(buffer="slot", slot=0))
    others = [op for op in plan.ops(1) if op is not first]
    with pytest.raises(PlanError, match="share A or B"):
        lower(plan.replace_ops(1, [from_slot, *others]), 1, 1, gated=True)
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), PAIRWISE, 4, **how)
    first, *others = plan.ops(1)
    assert isinstance(first, Barrier)
    gemm, *others = others
    assert isinstance(gemm, Gemm)
    from_slot = dataclasses.replace(gemm, a=gemm.a._replace(buffer="slot", slot=0))
    with pytest.raises(PlanError, match="waits for operands or for sums, not for both"):
        lower(plan.replace_ops(1, [first, from_slot, *others]), 1, 1, gated=True)


@pytest.mark.parametrize(("schedule", "mesh"), [("tensor_parallel_2d_rs", (1, 3)), ("tensor_parallel_2d_rs", (1, 4))])
def test_chains_may_differ_in_both_operands(schedule: str, mesh: tuple[int, ...], recorded: list[Task]) -> None:
    """Chunks of A's rows, and of B the columns of each rank."""
    problem = distgemm.GemmProblem(32 * mesh[1], 16 * mesh[1], 16 * mesh[1], dtype="float32")
    plan = distgemm.make_plan(problem, schedule, mesh=mesh, chunks=2, sync="barrier", mechanism="store")
    (kernel,) = (action for action in lower(plan, 0, 1, gated=True) if action.wait_flags)
    gemms = [op for op in kernel.ops if isinstance(op, Gemm)]
    assert len({op.a for op in gemms}) == 2 and len({op.b for op in gemms}) == mesh[1]
    run_by_one_kernel(plan, recorded, turns=4, beta=1.0)


def test_sums_of_another_type_than_d_are_left_to_a_sum(recorded: list[Task]) -> None:
    """An epilogue adds two; what is left is added to what it has rounded."""
    problem = distgemm.GemmProblem(64, 64, 64, partial_dtype="float32")
    for ranks, last, fits in ((4, "gemm", False), (3, "gemm", True), (4, "sum", True)):
        plan = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", ranks, sync="barrier", last=last)
        one = Emulated(plan, 1, machine_of([plan]).workspaces[1], 2)
        call = Data(plan, 0, 1.0, 0.0, False).calls[1]
        if fits:
            one.tasks(call, recorded, 0)
        else:
            with pytest.raises(
                ValueError, match=r"got 3 of torch.float32 for D of torch.bfloat16; final_add='kernel' adds"
            ):
                one.tasks(call, recorded, 0)


def test_a_kernel_that_sends_takes_one_stream_and_slices() -> None:
    """Sixteen at most, of 2 KiB at least; with copies by engines the slices are the same."""
    for k, dtype, widths in (
        (65536, "bfloat16", [4096] * 16),
        (4096, "bfloat16", [1024] * 4),
        (2056, "bfloat16", [1152, 904]),
        (2040, "bfloat16", [2040]),
        (5000, "float8_e4m3fn", [2560, 2440]),
    ):
        problem = distgemm.GemmProblem(64, 64, k, dtype=dtype, out_dtype="bfloat16")
        plan = distgemm.make_plan(problem, GATHERS[0], 4, sync="barrier", chunks=2)
        actions = lower(plan, 1, 1, gated=True, transport="sm")
        assert {action.stream for action in actions} == {GEMM_STREAM}
        (kernel,) = (action for action in actions if action.ops)
        found = [[copy.src.box[2][1] - copy.src.box[2][0] for copy in sent.copies] for sent in kernel.sends]
        assert found == [widths] * 6
        assert [len(waits) for waits in kernel.wait_flags] == [0] * 2 + [len(widths)] * 6
        beside = [op for action in lower(plan, 1, 1, transport="sm") for op in action.ops if isinstance(op, Copy)]
        assert beside == [copy for sent in kernel.sends for copy in sent.copies]
        flags = [wait.flag for waits in kernel.wait_flags for wait in waits]
        assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("k", "dtype", "widths"),
    [(1160, "bfloat16", [640, 520]), (500, "bfloat16", [500]), (3000, "float8_e4m3fn", [1536, 1464]),
     (65536, "bfloat16", [16384] * 4)],
)  # fmt: skip
def test_slices_by_engines_are_few(k: int, dtype: str, widths: list[int]) -> None:
    """Four at most, of 1 KiB at least."""
    problem = distgemm.GemmProblem(64, 64, k, dtype=dtype, out_dtype="bfloat16")
    plan = distgemm.make_plan(problem, GATHERS[0], 4, sync="barrier")
    ops = [op for action in lower(plan, 1, 1, gated=True, transport="copy_engine_slices") for op in action.ops]
    found = [op.src.box[2][1] - op.src.box[2][0] for op in ops if isinstance(op, Copy)]
    assert sorted(found) == sorted([*widths, k, k])


@pytest.mark.parametrize("schedule", [GATHERS[0], "all_gather_1d_tiling_cd_rotating_b"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_engines_send_what_comes_last_in_slices(schedule: str, chunks: int) -> None:
    """Each with its signal behind it; all else as a whole, with one. Or the kernel sends it, and engines all else."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 4096), schedule, 4, sync="barrier", chunks=chunks)
    every = [lower(plan, rank, 1, gated=True, transport="copy_engine_slices") for rank in range(4)]
    (wait_flags,) = ([waits for waits in action.wait_flags if waits] for action in every[1] if action.wait_flags)
    assert [len(waits) for waits in wait_flags] == [1] * (3 * chunks - 1) + [4]
    sent = [[op for action in actions for op in action.ops if isinstance(op, Copy)] for actions in every]
    for copies in sent:
        widths = [copy.src.box[2][1] - copy.src.box[2][0] for copy in copies]
        assert sorted(widths) == [1024] * 4 + [4096] * (3 * chunks - 1)
    brought = {copy.dst.slot: copy for copies in sent for copy in copies if copy.dst.rank == 1}
    last = next(op for action in every[1] for op in reversed(action.ops) if isinstance(op, Gemm))
    slot = (last.a if schedule.endswith("_a") else last.b).slot
    for number, copy in brought.items():
        assert (copy.src.box[2][1] - copy.src.box[2][0] < 4096) == (number == slot)
    for actions in every:
        streamed = [action for action in actions if action.stream == COMM and action.ops]
        for copy, signals in zip(streamed[::2], streamed[1::2], strict=True):
            (one,) = copy.ops
            assert {signal.deps for signal in signals.ops} == {(one.id,)}
            assert len(signals.ops) == 1
    waited = {wait.flag for waits in wait_flags for wait in waits}
    told = [op.flag for actions in every for action in actions for op in action.ops if isinstance(op, Signal)]
    assert waited == {flag for flag in told if flag.rank == 1} and len(set(told)) == len(told)
    for actions, rank in zip(every, range(4), strict=True):
        shared = lower(plan, rank, 1, gated=True, copies="both")
        (kernel,) = (action for action in shared if action.wait_flags)
        moved = [op for action in shared for op in action.ops if isinstance(op, Copy)]
        (last_sent,) = kernel.sends
        assert {*moved, *last_sent.copies} == {op for action in actions for op in action.ops if isinstance(op, Copy)}
        told = next(op for action in shared for op in action.ops if isinstance(op, Signal) and op.flag.rank == rank)
        assert kernel.opens is not None and kernel.opens.flag == told.flag and told.deps == (moved[-1].id,)
        assert len(moved) == 3 * chunks - 1 and kernel.wait_flags == next(
            action.wait_flags for action in actions if action.wait_flags
        )


@pytest.mark.parametrize(("ranks", "chunks", "m"), [(3, 1, 2), (4, 1, 3), (4, 2, 5), (4, 4, 9), (5, 4, 16), (8, 1, 2)])
@pytest.mark.parametrize(("mechanism", "copies"), [("push", "engine"), ("store", "engine"), ("store", "gemm")])
def test_all_reduces_by_one_kernel_of_ranks_without_rows(
    ranks: int, chunks: int, m: int, mechanism: str, copies: str, recorded: list[Task]
) -> None:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m, 16, 64, dtype="float32"),
        "all_reduce_1d_tiling_a_rotating_c",
        ranks,
        sync="barrier",
        chunks=chunks,
        mechanism=mechanism,
        send_slots=2 * chunks,
    )
    run_by_one_kernel(plan, recorded, turns=4, beta=1.0, copies=copies)


@pytest.mark.parametrize(
    ("schedule", "gated", "copies"),
    [
        (GATHERS[0], False, "engine"),
        (GATHERS[0], True, "slices"),
        (GATHERS[0], True, "gemm"),
        (GATHERS[0], True, "both"),
        (CHAINS[0], True, "engine"),
        ("all_reduce_1d_tiling_a_rotating_c", True, "engine"),
        ("all_reduce_1d_tiling_a_rotating_c", True, "gemm"),
    ],
)
def test_workspaces_have_a_word_for_each_flag(schedule: str, gated: bool, copies: str) -> None:
    problem = distgemm.GemmProblem(64, 64, 65536)  # as many slices as there are at most
    how = {"mechanism": "store"} if schedule in ALL_REDUCES and copies == "gemm" else {}
    plan = distgemm.make_plan(problem, schedule, 4, sync="barrier", chunks=2, send_slots=2, **how)
    for rank in range(4):
        actions = lower(plan, rank, 1, gated=gated, copies=copies)
        told = [op for action in actions for op in (*action.ops, *action.done_flags) if isinstance(op, Signal)]
        told += [signal for action in actions for sent in action.sends for signal in sent.signals]
        numbers = [op.flag.number for op in (*told, *waits_of(actions))]
        assert len(set(numbers)) > 2 and max(numbers) < most_flags(plan, gated, copies)
    if schedule in ALL_REDUCES and copies == "gemm":  # no slices: a flag for each that comes, one for each product
        assert most_flags(plan, gated, copies) == (2 * 3 + 2 * 3) + 2 * 4


def test_all_but_the_last_shard_is_merged() -> None:
    problem = distgemm.GemmProblem(m=64, n=16, k=64, dtype="float32")

    def rows(ranks: int, merge: bool, schedule: str = GATHERS[0], **how: Any) -> dict[str, list[int]]:
        plan = distgemm.make_plan(problem, schedule, ranks, chunks=4, sync="barrier", **how)
        ops = [op for action in lower(plan, 1, 1, merge) for op in action.ops]
        extents = {
            "Gemm": [op.a.box[1][1] - op.a.box[1][0] for op in ops if isinstance(op, Gemm)],
            "Copy": [op.src.box[1][1] - op.src.box[1][0] for op in ops if isinstance(op, Copy)],
        }
        batches = [
            action.ops
            for action in lower(plan, 1, 1, merge)
            if action.ops and isinstance(action.ops[0], (Wait, Signal))
        ]
        return extents | {"words": [len(batch) for batch in batches]}

    assert rows(4, False)["Gemm"] == [4] * 16
    found = rows(4, True)
    assert found["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and sorted(found["Copy"]) == [4, 4, 4, 4, 16, 16]
    assert sorted(found["words"]) == [1] * 8 + [4] * 4  # all signals of a copy at once, all waits of a product
    assert rows(2, True)["Gemm"] == [32, 8, 8, 8, 8]
    ring = rows(4, True, "all_gather_1d_ring_a")
    assert ring["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and set(ring["Copy"]) == {4, 16}
    scatter = rows(4, True, "reduce_scatter_1d_tiling_a_rotating_c")
    assert set(scatter["Gemm"]) == {4}  # others wait for them
    odd = distgemm.make_plan(distgemm.GemmProblem(64, 16, 24), GATHERS[0], 4, chunks=4, sync="barrier")
    gemms = [op for action in lower(odd, 1, 1, True) for op in action.ops if isinstance(op, Gemm)]
    assert [op.a.buffer for op in gemms] == ["A"] + ["slot"] * 12  # there are gaps between slots


@pytest.mark.parametrize("gemm_streams", [1, 2])
def test_two_partial_sums_meet_a_gemm(gemm_streams: int, recorded: list[Task]) -> None:
    """With one term and with several in an epilogue (see Emulated)."""
    problem = distgemm.GemmProblem(m=24, n=16, k=16, dtype="float32")
    plan = distgemm.make_plan(problem, "tensor_parallel_3d", mesh=(2, 2, 2), sync="barrier")
    assert any(isinstance(op, Gemm) and len(op.sources) == 2 for op in plan.ops(0))
    machine = Machine(8, max(map(plan.workspace_bytes, range(8))))
    todo: list[list[Any]] = [[] for _ in range(8)]
    data = [Data(plan, turn, 2.0, float(turn % 2), turn == 2) for turn in range(3)]
    for rank in range(8):
        one = Emulated(plan, rank, machine.workspaces[rank], gemm_streams)
        todo[rank] = [(one, one.tasks(drawn.calls[rank], recorded, turn % 2)) for turn, drawn in enumerate(data)]
    run(machine, todo, random.Random(gemm_streams), queues=False)
    for drawn in data:
        assert all(torch.equal(drawn.calls[rank].out.double(), drawn.wanted[rank]) for rank in range(8))


def test_a_rank_that_raises_takes_no_turn(monkeypatch: pytest.MonkeyPatch, recorded: list[Task]) -> None:
    exe = _emulated("all_gather_1d_ring_a")
    exe._recorded = OrderedDict()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    exe._watched = SimpleNamespace(issued=lambda *_: None)
    exe._shape_of_d, exe._dtype_of_d = (16, 8), torch.float32
    monkeypatch.setattr(exe, "raise_if_dead", lambda: None)
    put: list[int] = []
    monkeypatch.setattr(exe, "_put", lambda bound, counted=False: put.append(exe.workspace._turn))
    a, b, out = torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(16, 8)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("no kernel")

    bind = binding.bind_gemm
    monkeypatch.setattr(binding, "bind_gemm", refuse)
    with pytest.raises(ValueError, match="no kernel"):
        exe(a, b, out=out)
    with pytest.raises(ValueError, match="A's shard on rank 0 has shape"):
        exe(a[1:], b)
    monkeypatch.setattr(binding, "bind_gemm", bind)
    before = exe.workspace._turn
    exe(a, b, out=out)  # eager: the call that raised was none
    assert put == [1 - before]


class PretendedStream:
    """Nothing waits: what is launched is done when the call has ended."""

    cuda_stream = 0

    def wait_stream(self, other: PretendedStream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()

    def synchronize(self) -> None: ...


class PretendedGraph:
    """Holds what is launched while it is captured."""

    def __init__(self, tasks: list[Task], keep_graph: bool) -> None:
        assert keep_graph
        self.tasks, self.captured = tasks, []

    def capture_begin(self, capture_error_mode: str) -> None:
        self.before = len(self.tasks)

    def capture_end(self) -> None:
        self.captured = self.tasks[self.before :]
        del self.tasks[self.before :]

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        self.tasks.extend(map(deepcopy, self.captured))  # those of several are used up


@pytest.mark.parametrize(
    "how",
    [
        ExecutionConfig("any terms"),
        ExecutionConfig("any terms", merge_copies=True),
        ExecutionConfig("one term", gemm_streams=1, wait_by="kernel"),
        ExecutionConfig("cutlass", execution="single_kernel"),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["ag+gemm", "gemm+rs"])
def test_calls_of_an_executable(
    schedule: str, how: ExecutionConfig, recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, with pretended streams and graphs: eager, then recorded for each half, then replayed."""
    plan = distgemm.make_plan(distgemm.GemmProblem(24, 16, 8, dtype="float32"), schedule, 1, chunks=3, sync="barrier")
    machine = machine_of([plan])
    workspace = machine.workspaces[0]
    workspace.memory, workspace.streams, workspace.capturing = (
        torch.empty(0),
        [PretendedStream()] * 3,
        PretendedStream(),
    )
    watched: list[Any] = []
    for name, value in {
        "agree": lambda *_: None,
        "build_together": lambda sources, rank, size: None,
        "workspace_for": lambda *_: workspace,
        "watchdog": lambda: SimpleNamespace(
            add=lambda _: SimpleNamespace(issued=lambda exe, out: watched.append((exe, out())))
        ),
    }.items():
        monkeypatch.setattr(executable, name, value)
    monkeypatch.setattr(executable.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(binding.Binder, "sources", lambda self: [])
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: PretendedStream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: PretendedGraph(recorded, keep_graph))

    def done() -> None:
        assert recorded
        for task in recorded:
            assert any(machine.done(task) for _ in range(20)), task
        recorded.clear()

    group: Any = "a group"
    exe = CudaExecutable(plan, group, torch.device("cpu"), how, timeout=5.0)
    assert (exe.provider, exe.timeout, exe.graphs) == (how.provider, 5.0, 0)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((24, 8), (16, 8)))
    out = torch.empty(24, 16)
    for number in range(5):
        a.add_(number)
        out.fill_(float("nan"))
        assert exe(a, b, out=out) is out
        done()
        assert torch.equal(out, a @ b.T), number
        assert exe.graphs == min(number, 2), "one for each half of the workspace"
    assert len(watched) == 5 and all(found == (exe, out) for found in watched)
    replay = exe.capture(a, b)
    assert not recorded
    for number in range(3):
        b.sub_(number)
        found = replay()
        done()
        assert found is replay.out and torch.equal(found, a @ b.T)
    workspace.dead = "a rank did not come"
    with pytest.raises(ReplayTimeoutError, match="a rank did not come"):
        exe(a, b)


def test_what_compile_refuses_before_it_asks_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiling, executable):
        monkeypatch.setattr(module, "resolve_group", lambda group: "two ranks")
    monkeypatch.setattr(executable.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(executable, "CudaExecutable", lambda *_, **__: "made")
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_ring_a", 2)

    def compiled(**how: Any) -> Any:
        return distgemm.compile(how.pop("plan", plan), device="cuda:0", **how)

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert compiled() == "made"
    three = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_ring_a", 3)
    for how, said in (
        ({"plan": three}, "the plan is for 3 ranks, the group has 2"),
        ({"gemm_streams": 3}, "gemm_streams is 1 or 2, got 3"),
        ({"waits": "events"}, "waits is one of memory, kernel, gemm, got .events."),
        ({"merge_copies": 1}, "merge is True or False, got 1"),
        ({"copies": "sm"}, "copies is one of engine, slices, gemm, both, got 'sm'"),
        ({"transport": "sm"}, "goes with execution='single_kernel' and merge_copies=False, got 'memory' and False"),
        ({"transport": "sm", "execution": "single_kernel", "merge_copies": True}, "got 'gemm' and True"),
        ({"timeout": 0}, "timeout > 0"),
        ({"schedule": "auto", "op": "ag+gemm"}, "op and tune are for a problem"),
        ({"schedule": "all_gather_1d_ring_a"}, "a plan has its schedule and options already"),
    ):
        with pytest.raises(ValueError, match=said):
            compiled(**how)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(RuntimeError, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1: .* unset it, or set it to 8"):
        compiled()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the stream is being captured"):
        compiled()


def test_only_gemms_wait_by_a_kernel(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that pass on what came wait on memory, or a kernel would wait beside GEMMs."""
    by_kernel = []
    monkeypatch.setattr(binding, "bind_flag_ops", lambda phases, device: by_kernel.append(phases))
    plan = plans("all_gather_1d_ring_a", 4)[0]
    exe = Emulated(plan, 1, Machine(4, plan.workspace_bytes(1)).workspaces[1], 1, "kernel").exe
    exe.binder.bind(Data(plan, 0, 1.0, 0.0, False).calls[1], 0)
    waits = [action.stream for action in exe.actions if action.ops and isinstance(action.ops[0], Wait)]
    assert COMM in waits
    assert len(by_kernel) == 1 + sum(stream != COMM for stream in waits)  # and the exit


@pytest.mark.parametrize("forgotten", ["entered", "left", "arrival"])
def test_without_a_word_the_emulation_fails(forgotten: str, recorded: list[Task]) -> None:
    """What these tests are good for: leave out a wait, and garbage or a hang is found.

    In 2D, ranks 0 and 3 exchange nothing: without ``entered``, 3 leaves a replay before 0 has seen that it left the
    one before. The 1D schedule after it then waits for ever.
    """
    problem = distgemm.GemmProblem(m=16, n=16, k=16, dtype="float32")
    two = distgemm.make_plan(problem, "tensor_parallel_2d", mesh=(2, 2), sync="barrier")
    one_d = distgemm.make_plan(problem, "all_gather_1d_ring_a", 4, sync="barrier")
    script = [two, two, one_d, two, two, one_d]
    found = 0
    for seed in range(40):
        machine = Machine(4, max(two.workspace_bytes(0), one_d.workspace_bytes(0)))
        todo: list[list[Any]] = [[] for _ in range(4)]
        data = [Data(plan, seed * 10 + turn, 1.0, 0.0, False) for turn, plan in enumerate(script)]
        for rank in range(4):
            made = {plan: Emulated(plan, rank, machine.workspaces[rank], 2) for plan in (two, one_d)}
            size = machine.workspaces[rank].world_size * 4
            for plan, drawn in zip(script, data, strict=True):
                one = made[plan]
                tasks = one.tasks(drawn.calls[rank], recorded, 0)
                base = machine.workspaces[rank].halves[0].bases[rank]
                spans = {"left": (0, size), "entered": (size, 2 * size), "arrival": (first_flag(4) * WORD, 1 << 23)}
                low, high = spans[forgotten]
                kept = [
                    [t for t in part if not (isinstance(t, MemOp) and t.wait and low <= t.address - base < high)]
                    for part in tasks
                ]
                todo[rank].append((one, kept))
        try:
            run(machine, todo, random.Random(seed), queues=False)
        except pytest.fail.Exception:
            found += 1
            continue
        found += any(
            not torch.equal(drawn.calls[rank].out.double(), drawn.wanted[rank]) for drawn in data for rank in range(4)
        )
    assert found


def test_copies_leave_on_one_stream() -> None:
    for schedule in distgemm.list_schedules():
        for plan in plans(schedule, 4):
            for action in lower(plan, 1, 2):
                crosses = [op for op in action.ops if getattr(op, "dst", None) is not None and op.dst.rank != op.rank]
                assert not crosses or action.stream == COMM


def test_gemms_do_not_stand_behind_sums() -> None:
    """Sums have a stream of their own where GEMMs of a later chunk follow, and none where they come last."""
    problem = distgemm.GemmProblem(m=64, n=16, k=16)
    for chunks, streams in (
        (1, {COMM, GEMM_STREAM, GEMM_STREAM + 1}),
        (2, {COMM, GEMM_STREAM, GEMM_STREAM + 1, GEMM_STREAM + 2}),
    ):
        plan = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", 4, chunks=chunks, sync="barrier")
        actions = lower(plan, 1, 2)
        assert {action.stream for action in actions} == streams
        waited = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Wait)}
        multiplied = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Gemm)}
        assert multiplied == {GEMM_STREAM, GEMM_STREAM + 1} and (chunks == 1 or not waited & multiplied)


def test_a_barrier_in_the_middle_is_refused() -> None:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_tiling_cd_rotating_a", 2, sync="barrier"
    )
    barrier, *others = plan.ops(0)
    moved = dataclasses.replace(barrier, id=99, deps=(others[0].id,))
    with pytest.raises(PlanError, match="at the start"):
        lower(plan.replace_ops(0, [*others, moved]), 0, 2)


def _emulated(schedule: str, ranks: int = 2, **options: Any) -> CudaExecutable:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m=16, n=16, k=16, dtype="float32"), schedule, ranks, sync="barrier", **options
    )
    machine = Machine(ranks, plan.workspace_bytes(0))
    return Emulated(plan, 0, machine.workspaces[0], 2).exe


def test_shards_that_travel_have_contiguous_rows() -> None:
    exe = _emulated("all_gather_1d_tiling_cd_rotating_a")
    assert exe._copied == {"A"}
    a, b = torch.zeros(8, 16), torch.zeros(8, 16)
    for refused in (torch.zeros(16, 8).T, torch.zeros(1, 16).expand(8, 16)):
        with pytest.raises(ValueError, match=r"A's shard on rank 0 is copied by rows.*\.contiguous\(\)"):
            exe._check(refused, b, None, 0.0, None)
    exe._check(torch.zeros(8, 24)[:, :16], torch.zeros(16, 8).T, None, 0.0, None)
    exe._check(a, b, None, 0.0, None)


def test_gathered_is_asked_for_where_there_is_none() -> None:
    exe = _emulated("reduce_scatter_1d_tiling_a_rotating_c")
    a, b = torch.zeros(16, 8), torch.zeros(16, 8)
    with pytest.raises(ValueError, match="does not bring all of A"):
        exe._check(a, b, None, 0.0, None, torch.zeros(16, 16))
    exe = _emulated("all_gather_1d_ring_a")
    a, b = torch.zeros(8, 16), torch.zeros(8, 16)
    with pytest.raises(ValueError, match=r"gathered on rank 0 is \(16, 16\)"):
        exe._check(a, b, None, 0.0, None, torch.zeros(8, 16))
    with pytest.raises(ValueError, match="gathered on rank 0 is copied by rows"):
        exe._check(a, b, None, 0.0, None, torch.zeros(16, 16).T)
    assert "gathered" in exe._check(a, b, None, 0.0, None, torch.zeros(16, 16))
    gathered = torch.zeros(16, 16)
    with pytest.raises(ValueError, match="gathered shares memory with the shard of A"):
        exe._check(gathered[:8], b, None, 0.0, None, gathered)
    with pytest.raises(ValueError, match="gathered shares memory with out"):
        exe._check(a, b, None, 0.0, gathered.view(-1)[:128].view(16, 8), gathered)


def test_terms_of_another_shape_raise() -> None:
    """A bias of all ranks' columns would be cut, and the first ones added on every rank."""
    exe = _emulated("all_gather_1d_tiling_cd_rotating_a")
    given = exe._check(torch.zeros(8, 16), torch.zeros(8, 16), None, 0.0, None)
    exe._check_terms(given, torch.zeros(8), torch.zeros(1), torch.zeros(16))
    exe._check_terms(given, None, torch.zeros(16), None)
    for bias in (torch.zeros(16), torch.zeros(1), torch.zeros(1, 8), torch.zeros(8, dtype=torch.float64), [0.0] * 8):
        with pytest.raises(ValueError, match="bias on rank 0 is "):
            exe._check_terms(given, bias, None, None)
    for name, scales in (("scale_a", (torch.zeros(8), None)), ("scale_b", (None, torch.zeros(17)))):
        with pytest.raises(ValueError, match=f"{name} is one number, or 16 for the rows of all of"):
            exe._check_terms(given, None, *scales)


def test_what_waits_for_room_is_not_delivered_by_a_kernel() -> None:
    problem = distgemm.GemmProblem(1, 64, 64)
    how = {"mechanism": "store", "workspace": "bounded", "chunks": 2}
    plan = distgemm.make_plan(problem, "all_reduce_1d_tiling_a_rotating_c", 4, sync="barrier", **how)
    with pytest.raises(PlanError, match=r"delivers what waits for one signal.*workspace='full'"):
        lower(plan, 0, 1, gated=True, transport="sm")


def test_all_reduce_copies_from_and_to_d() -> None:
    assert copied_buffers(_emulated("all_reduce_1d_tiling_a_rotating_c").plan, 0) == {"D"}


def test_calls_that_differ_in_more_than_addresses_have_other_graphs() -> None:
    a, scale = torch.zeros(4, 4), torch.zeros(4)
    calls = [((a, None, part), 1.0) for part in (scale, scale[:1], scale[::2], scale.view(torch.int32), None)]
    calls += [((a, None, scale), 2.0), ((a, scale, None), 1.0), ((a.t(), None, scale), 1.0), (("a", None, None), 1.0)]
    assert len({_key(tensors, alpha, 0.0) for tensors, alpha in calls}) == len(calls)
    assert _key((a, None, scale[:]), 1, 0) == _key(*calls[0], 0.0)


def test_a_flag_is_waited_for_once_and_the_last_replay_first() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_tiling_cd_rotating_a", 2)
    lower(plan, 0, 1)
    ops = plan.ops(0)
    for wait in (op for op in ops if isinstance(op, Wait)):
        with pytest.raises(PlanError, match="waits for a flag once in a replay"):
            lower(plan.replace_ops(0, [*ops, dataclasses.replace(wait, id=99)]), 0, 1)
    gemm = next(op for op in ops if isinstance(op, Gemm))
    late = [dataclasses.replace(op, deps=(gemm.id,)) if isinstance(op, Wait) and op.flag.initial else op for op in ops]
    with pytest.raises(PlanError, match="waits for the last replay at the start, after no other op"):
        lower(plan.replace_ops(0, late), 0, 1)


def test_one_kernel_for_all_tells_of_each_product_once() -> None:
    """A peer, or this rank's own copies."""
    problem, how = distgemm.GemmProblem(64, 64, 64), {"mechanism": "store", "sync": "barrier"}
    plan = distgemm.make_plan(problem, ALL_REDUCES[0], 4, chunks=2, **how)
    lower(plan, 1, 1, gated=True)
    told = next(op for op in plan.ops(1) if isinstance(op, Signal))  # of the first product
    copy = next(op for op in plan.ops(1) if isinstance(op, Copy))
    more = [dataclasses.replace(op, deps=(*op.deps, *told.deps)) if op is copy else op for op in plan.ops(1)]
    with pytest.raises(PlanError, match="of which a peer is told, and one kernel for all done_flags once"):
        lower(plan.replace_ops(1, more), 1, 1, gated=True)


def test_ops_that_need_what_the_next_replay_is_told_are_refused() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(m=16, n=16, k=16), "all_gather_1d_tiling_cd_rotating_a", 2)
    told = next(op for op in plan.ops(0) if isinstance(op, Signal) and op.flag.initial)
    *others, last = [op for op in plan.ops(0) if not isinstance(op, Signal)]
    late = dataclasses.replace(last, deps=(*last.deps, told.id))
    with pytest.raises(PlanError, match="Signal for the next replay"):
        lower(plan.replace_ops(0, [*(op for op in plan.ops(0) if op.id != last.id), late]), 0, 2)
    assert others


@pytest.mark.parametrize(
    ("stage", "words", "said"),
    [
        (ENTRY, {"left": [0, 0, 1, 0]}, r"at its start it waits for ranks \[1, 3\] to leave"),
        (BODY, {"flags": [1, 0, 0]}, r"it waits for rank 3 at rank 0 iteration 2: Wait .* \(and 1 later ones\)"),
        (BODY, {"flags": [1, 1, 1]}, "a kernel or a copy has not ended"),
        (BODY, {"flags": [1, 1, 1], "entered": [0, 1, 0, 1]}, r"at its end it waits for ranks \[2\] to begin"),
    ],
)
def test_what_the_watchdog_says(stage: int, words: dict[str, list[int]], said: str) -> None:
    exe = _emulated("all_reduce_1d_tiling_a_rotating_c", 4)
    waits = [op for op in exe.plan.ops(0) if isinstance(op, Wait)]
    flags = [1] * (max(op.flag.number for op in waits) + 1)
    for op, value in zip(waits, words.get("flags", []), strict=False):
        flags[op.flag.number] = value
    for op in waits[3:]:
        flags[op.flag.number] = 1
    read = FlagOps(1, stage, words.get("left", [1] * 4), words.get("entered", [1] * 4), flags)
    assert re.search(said, _explain(exe, read, 2.0)), _explain(exe, read, 2.0)
    assert "all_reduce_1d_tiling_a_rotating_c on rank 0 of 4 has not ended within 2 s" in _explain(exe, read, 2.0)
    assert "cannot be read" in _explain(exe, None, 2.0)


def test_the_watchdog_knows_slices() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(16, 16, 4096), GATHERS[0], 2, sync="barrier", chunks=2)
    exe = Emulated(plan, 0, machine_of([plan]).workspaces[0], 1, "gemm", transport="sm").exe
    for missing in range(8):
        said = _explain(exe, FlagOps(1, BODY, [1] * 2, [1] * 2, [int(number != missing) for number in range(8)]), 2.0)
        assert re.search(rf"waits for rank 1 at .*arrival flag {missing}@0, from rank 1$", said), said


def test_a_call_is_stuck_once_nothing_has_moved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    workspace = Machine(2, 256).workspaces[0]
    exe = SimpleNamespace(timeout=2.0, plan=SimpleNamespace(schedule="a schedule"))
    workspace.executables.append(lambda: exe)
    values = torch.zeros(2 * (first_flag(2) + 4), dtype=torch.int32)
    watched: Any = watchdog._Watched.__new__(watchdog._Watched)
    watched.workspace, watched.store, watched.lock, watched.under_way = workspace, None, Lock(), None
    watched.pending, watched.free, watched.ended, watched.warned, watched.last = deque(), deque(), 0, False, (None, 0.0)
    watched.words = lambda: [0, *values.tolist()]
    now, died = [0.0], []
    monkeypatch.setattr(watchdog, "_told", lambda store: None)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog, "_explain", lambda *_: "stuck")
    dog = Watchdog()
    monkeypatch.setattr(dog, "_die", lambda watched, message, first: died.append(now[0]))

    def look(until: float) -> None:
        while now[0] < until:
            now[0] += 0.5
            dog._look(watched)

    look(5)  # idle
    done = [False]
    for _ in range(2):
        watched.pending.append(SimpleNamespace(executable=exe, end=SimpleNamespace(query=lambda: done[0])))
    look(7)
    assert not caplog.records
    look(7.5)  # not begun: something before it takes its time
    assert not died and [record.levelname for record in caplog.records] == ["WARNING"]
    watched.words = lambda: None  # the copy stands behind it, too
    look(10)
    assert not died
    watched.words = lambda: [0, *values.tolist()]
    values[stage_word(2)] = STAGES + BODY
    look(12)
    values[first_flag(2)] = 1  # a flag comes
    look(14.5)
    assert not died
    look(15)
    assert died == [15]
    watched.words = lambda: None  # nothing can be read any more, of what was under way
    look(18)
    assert died == [15, 18]
    done[0] = True
    look(20)
    assert watched.ended == len(watched.free) == 2 and not watched.pending and died == [15, 18]


def test_results_of_stuck_calls_are_marked_also_those_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with torch.inference_mode():
        outs = [torch.zeros(2)]
    outs.append(torch.zeros(2))
    watched: Any = watchdog._Watched.__new__(watchdog._Watched)
    watched.workspace, watched.stream = SimpleNamespace(words=lambda: torch.zeros(4, dtype=torch.int32)), None
    watched.ones = torch.ones(4, dtype=torch.int32)
    ended = SimpleNamespace(query=lambda: True)
    watched.pending = deque(SimpleNamespace(end=ended, out=lambda out=out: out) for out in outs)
    Watchdog()._free(watched)
    assert all(out.isnan().all() for out in outs) and not watched.pending


@pytest.mark.parametrize("half", range(2))
def test_words_are_read_as_they_are_written(half: int) -> None:
    workspace = Machine(3, 256).workspaces[1]
    words = torch.zeros(2, first_flag(3) + 4, dtype=torch.int32)
    words[half] = torch.arange(words.shape[1])
    here = workspace.halves[half]
    stage = stage_word(3)
    words[half, stage] = 5 * STAGES + BODY
    assert workspace.read(words.flatten()) == (5, BODY, [0, 1, 2], [4, 5, 6], [10, 11, 12, 13])
    assert [here.left(1, 2), here.entered(1, 2), here.flag(1, 3)] == [here.bases[1] + WORD * n for n in (2, 6, 13)]
    steps = [op for step in here.steps(5, []).values() for op in step]
    stages = [op.value for op in steps if op.address == here.bases[1] + stage * WORD]
    assert stages == [5 * STAGES + ENTRY, 5 * STAGES + BODY, 0]


def test_a_replaced_workspace_is_unused_once_its_executables_are_gone() -> None:
    workspace = Machine(2, 256).workspaces[0]
    exe = Emulated(
        distgemm.make_plan(distgemm.GemmProblem(16, 16, 16, dtype="float32"), "all_gather_1d_ring_a", 2),
        0,
        workspace,
        1,
    ).exe
    workspace.keep(exe)
    del exe
    assert not workspace.unused
    workspace.replaced = True
    assert not workspace.unused  # kept for a caller's graph
    workspace.release(workspace._kept[0])
    assert workspace.unused


def test_words_of_a_kernel_are_split_into_launches() -> None:
    ops = [memops.write(8 * number) for number in range(2 * words.OPERATIONS + 1)]
    launches = words.split([ops, ops[:2], [], *[ops[:1]] * words.PHASES])
    assert all(len(phases) <= words.PHASES and sum(map(len, phases)) <= words.OPERATIONS for phases in launches)
    assert [op for phases in launches for phase in phases for op in phase] == ops + ops[:2] + ops[:1] * words.PHASES
    (phases,) = words.split([[memops.wait_for(8)], [*memops.clear([16]), memops.write(24, 7)]])
    encoded = flag_ops(phases)
    assert (encoded.phases, list(encoded.ends)[:2]) == (2, [1, 3])
    found = [(op.address, op.value, op.kind) for op in encoded.operations[:3]]
    assert found == [(8, 1, WAIT), (16, 0, WRITE_DOUBLE), (24, 7, WRITE)]


def test_two_words_are_cleared_at_once() -> None:
    assert memops.clear([8, 12, 20, 24]) == [MemOp(False, at, 0, double=True) for at in (8, 16, 24)]


def test_replays_take_the_halves_in_turn() -> None:
    workspace = Machine(2, 256).workspaces[0]
    assert [workspace.turn() for _ in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
