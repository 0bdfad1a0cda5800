"""The CUDA runtime without a GPU: what it puts on streams, executed on CPU tensors.

All ranks run in one process. Their actions run in a random order among those that streams, events and flags allow.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch

import distgemm
from distgemm.gemm import GemmSpec, GemmTensors
from distgemm.gemm.flags import MemOp
from distgemm.gemm.launches import MovableLaunch
from distgemm.plan.ops import Gemm
from distgemm.runtime.checks import TORCH_DTYPES, gathered_box
from distgemm.runtime.cuda import binding, memops
from distgemm.runtime.cuda.binding import Binder, Bound, CallTensors, first_users_of_a
from distgemm.runtime.cuda.executable import CudaExecutable, copied_buffers
from distgemm.runtime.cuda.lowering import lower
from distgemm.runtime.cuda.lowering.actions import Action
from distgemm.runtime.cuda.nccl import Message
from distgemm.runtime.cuda.workspace import BUFFERS, FLAG_BYTES, Workspace, WorkspaceBuffer
from distgemm.runtime.executable import ExecutionConfig, WaitBy
from distgemm.schedulers import schedule_options
from tests.unit.reference_data import Scales

GATHERS = ["all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a", "all_gather_1d_bidirectional_full_a"]
GATHER_B = "all_gather_1d_tiling_cd_rotating_b"
CHAINS = ["reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"]
PAIRWISE = "reduce_scatter_1d_pairwise_a"
ALL_REDUCES = ["all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_b_rotating_c"]
PAIRWISE_ALL_REDUCE = "all_reduce_1d_pairwise_a"

ONE_TERM, ANY_TERMS = "one term", "any terms"
"""Providers of the emulation, by how many terms their epilogues add."""

Task = Any  # a MemOp, a Callable[[], None], an EmulatedExchange, or an EmulatedDiscard


def unused(task: Task) -> Task:
    """The task, or a copy of it where doing it uses it up. Its tensors are the same."""
    if isinstance(task, EmulatedExchange):
        return EmulatedExchange(task.machine, task.rank, task.sends, task.receives)
    return task


class Channel:
    """Messages from one rank to another: begun by the sender, and by the receiver."""

    def __init__(self, aborted: bool = False) -> None:
        self.aborted = aborted
        self.sent: list[torch.Tensor] = []
        self.awaited: list[torch.Tensor] = []
        self.moved = 0

    def move(self) -> None:
        """Move the messages that both ranks have begun, unless one of them has aborted."""
        while not self.aborted and self.moved < min(len(self.sent), len(self.awaited)):
            source, target = self.sent[self.moved], self.awaited[self.moved]
            assert source.shape == target.shape and source.dtype == target.dtype
            target.copy_(source)
            self.moved += 1


class EmulatedExchange:
    """Messages of a rank, all at once. It ends once the peers have begun theirs; no message waits in a buffer."""

    def __init__(self, machine: Machine, rank: int, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.machine, self.rank, self.sends, self.receives = machine, rank, sends, receives
        self.ends: list[tuple[Channel, int]] | None = None

    def done(self) -> bool:
        if self.rank in self.machine.aborted:
            for _, memory in self.receives:
                memory.fill_(3.0)  # not defined
            return True
        if self.ends is None:
            channels, self.ends = self.machine.channels, []
            for peer, memory in self.sends:
                channel = channels[self.rank, peer]
                channel.sent.append(memory)
                self.ends.append((channel, len(channel.sent)))
            for peer, memory in self.receives:
                channel = channels[peer, self.rank]
                channel.awaited.append(memory)
                self.ends.append((channel, len(channel.awaited)))
            for channel, _ in self.ends:
                channel.move()
        return all(channel.moved >= number for channel, number in self.ends)


class EmulatedDiscard(NamedTuple):
    """The kernel that makes messages NaN if a flag says that messages were aborted."""

    aborted: int
    received: Sequence[torch.Tensor]


class Machine:
    """All ranks: their memories, their flags, and the channels between hosts."""

    def __init__(self, ranks: int, slot_bytes: int, ranks_per_host: int | None = None) -> None:
        self.channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
        self.aborted: set[int] = set()
        self.ranks_per_host = ranks_per_host or ranks
        self.slots = [
            [torch.full((slot_bytes + 256,), 0xFF, dtype=torch.uint8) for _ in range(ranks)] for _ in range(BUFFERS)
        ]
        self.flags: dict[int, int] = {}  # by address
        self.workspaces = [FakeWorkspace(self, rank, ranks) for rank in range(ranks)]
        for workspace in self.workspaces:
            for buffer in workspace.buffers:
                for peer in buffer.peers:
                    self.flags[buffer.left(workspace.rank, peer)] = 1

    def abort(self, rank: int) -> None:
        """Let a rank's messages end as they are."""
        self.aborted.add(rank)
        for pair in itertools.product(range(len(self.workspaces)), repeat=2):
            if rank in pair:
                self.channels[pair].aborted = True

    def done(self, task: Task) -> bool:
        """Do a task. False for a wait that goes on."""
        if isinstance(task, EmulatedExchange):
            return task.done()
        if isinstance(task, EmulatedDiscard):
            for memory in task.received if self.flags.get(task.aborted) else ():
                memory.view(torch.uint8).fill_(0xFF)
        elif not isinstance(task, MemOp):
            task()
        elif task.wait:
            return self.flags.get(task.address, 0) == task.value
        else:
            for address in range(task.address, task.address + FLAG_BYTES * (1 + task.double), FLAG_BYTES):
                self.flags[address] = task.value
        return True


def machine_of(plans: list[distgemm.Plan]) -> Machine:
    """Ranks with room for each of these plans."""
    ranks = plans[0].world_size
    size = max(plan.workspace_bytes(rank) for plan in plans for rank in range(ranks))
    return Machine(ranks, size, plans[0].ranks_per_host)


class FakeWorkspace(Workspace):
    """A workspace in the memory of a :class:`Machine`."""

    def __init__(self, machine: Machine, rank: int, ranks: int) -> None:
        self.machine, self.rank, self.world_size = machine, rank, ranks
        first = rank // machine.ranks_per_host * machine.ranks_per_host
        self.ranks = range(first, first + machine.ranks_per_host)
        self.buffers = tuple(
            WorkspaceBuffer(rank, {peer: (peer << 32) + (number << 24) for peer in self.ranks}, ranks)
            for number in range(BUFFERS)
        )
        self.across = self if len(self.ranks) < ranks else None  # type: ignore[assignment]
        self.peers = self.buffers[0].peers
        self.current_buffer = 0
        self.dead, self.replaced, self.kept = None, False, []
        self.executables: list[Any] = []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        raise AssertionError("launches are emulated")

    def slot(self, buffer: int, rank: int, offset: int, size: int) -> torch.Tensor:
        assert rank in self.ranks, "hosts share no memory"
        return self.machine.slots[buffer][rank][offset : offset + size]


class EmulatedLaunch(MovableLaunch):
    """A launch that notes its tasks."""

    def __init__(self, noted: list[Task], *tasks: Task) -> None:
        self.noted, self.tasks = noted, tasks

    def __call__(self, stream: int | None = None) -> None:
        self.noted.extend(self.tasks)


class Emulated:
    """A rank's part of a plan, and the tasks of each of its actions.

    Args:
        plan: of all ranks.
        rank: this rank.
        workspace: its workspace.
        gemm_streams: with 1, the provider's epilogues add one term, else any number.
        **execution: further fields of ExecutionConfig.
    """

    def __init__(
        self, plan: distgemm.Plan, rank: int, workspace: FakeWorkspace, gemm_streams: int = 2, **execution: Any
    ) -> None:
        config = ExecutionConfig(ONE_TERM if gemm_streams == 1 else ANY_TERMS, gemm_streams=gemm_streams, **execution)
        self.binder = Binder(plan, rank, torch.device("cpu"), config)
        self.actions = self.binder.actions
        exe = CudaExecutable.__new__(CudaExecutable)
        exe.plan, exe.rank, exe.workspace = plan, rank, workspace
        exe.device, exe._index = torch.device("cpu"), 0
        exe.execution, exe.binder, exe._copied = config, self.binder, copied_buffers(plan, rank)
        exe.number = workspace.register(exe)
        self.binder.attach(workspace, exe.number)
        self.exe = exe

    def tasks(self, call: CallTensors, recorded: list[Task], buffer: int) -> list[list[Task]]:
        """The tasks of each action, and of the exit. From now on the actions are those of this call."""
        bound = self.binder.bind(call, buffer)
        self.actions = bound.actions
        return noted_tasks(bound, recorded)

    def gather_tasks(
        self,
        a_shard: torch.Tensor,
        recorded: list[Task],
        buffer: int,
        block: Callable[[slice, torch.Tensor], list[Task]],
    ) -> list[list[Task]]:
        """As :meth:`tasks`, of a gather.

        Args:
            a_shard: this rank's shard of A.
            recorded: the fixture.
            buffer: of the workspace.
            block: the tasks of the caller for rows of A and the tensor that will hold them.
        """
        bound, tiles = self.binder.hand_out(CallTensors({"A": a_shard}), buffer)
        self.actions = bound.actions
        found = noted_tasks(bound, recorded)
        for number, (tasks, action) in enumerate(zip(found, bound.actions, strict=False)):
            for op in action.ops:
                if isinstance(op, Gemm):
                    assert not tasks  # nothing is multiplied
                    found[number] = block(slice(*op.a.box[1]), tiles[op.id])
        return found


def noted_tasks(bound: Bound, recorded: list[Task]) -> list[list[Task]]:
    """The tasks of each action, and of the exit."""
    found = []
    for launches in (*bound.launches, bound.leave):
        recorded.clear()
        for launch in launches:
            launch(0)
        found.append(list(recorded))
    return found


def scales_of_elements(scale: torch.Tensor | None, operand: torch.Tensor, block_rows: int | None) -> Any:
    """The factor of each element of an operand, as a number or a tensor that broadcasts to it."""
    if scale is None:
        return 1.0
    if block_rows is None:
        return scale.double().view(-1, 1)
    rows, columns = operand.shape
    assert scale.shape == (-(-rows // block_rows), -(-columns // 128))
    return scale.double().repeat_interleave(block_rows, 0).repeat_interleave(128, 1)[:rows, :columns]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """A list that gets the tasks of launches, in place of streams."""
    tasks: list[Task] = []

    def copies_of(target: torch.Tensor, source: torch.Tensor) -> list[MovableLaunch]:
        return [EmulatedLaunch(tasks, functools.partial(to.copy_, of)) for to, of in memops.rows_of(target, source)]

    def multiplied(t: GemmTensors) -> Callable[[], None]:
        def gemm() -> None:
            a, b = (
                operand.double() * scales_of_elements(scale, operand, t.block_rows and t.block_rows[number])
                for number, (operand, scale) in enumerate(((t.a, t.scale_a), (t.b, t.scale_b)))
            )
            found = t.alpha * a @ b.mT
            for factor, added in ((1.0, t.partial), (t.beta, t.c), (1.0, t.bias)):
                if added is not None:
                    found = found + factor * added.double()
            t.d.copy_(found)

        return gemm

    def bind(t: GemmTensors, **_: Any) -> Callable[[int], None]:
        return EmulatedLaunch(tasks, multiplied(t))

    def bind_sum(sources: Any, d: torch.Tensor, *, c: Any = None, beta: float = 0.0, bias: Any = None) -> Any:
        def add() -> None:
            found = sum(source.double() for source in sources)
            found = found + (0 if c is None else beta * c.double()) + (0 if bias is None else bias.double())
            d.copy_(found)

        return EmulatedLaunch(tasks, add)

    class Provider:
        def __init__(self, name: str) -> None:
            self.name = name

        def supports(self, spec: GemmSpec) -> bool:
            terms = [spec.partial, spec.c, spec.bias]
            return self.name != ONE_TERM or sum(term is not None for term in terms) < 2

    def bind_flag_ops(phases: Any, device: int) -> Any:
        return EmulatedLaunch(tasks, *chain.from_iterable(phases))

    def exchange(put: Any, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        workspace = put.__self__
        return EmulatedLaunch(tasks, EmulatedExchange(workspace.machine, workspace.rank, sends, receives))

    def bind_discard(aborted: int, received: Sequence[torch.Tensor], device: int) -> Any:
        return EmulatedLaunch(tasks, EmulatedDiscard(aborted, received))

    monkeypatch.setattr(binding, "ExchangeLaunch", exchange)
    monkeypatch.setattr(binding, "bind_discard", bind_discard)
    monkeypatch.setattr(binding, "bind_flag_ops", bind_flag_ops)
    monkeypatch.setattr(binding, "get_provider", Provider)
    monkeypatch.setattr(binding, "FlagOpsLaunch", lambda ops: EmulatedLaunch(tasks, *ops))
    monkeypatch.setattr(binding, "copies_of", copies_of)
    monkeypatch.setattr(binding, "bind_gemm", bind)
    monkeypatch.setattr(binding, "bind_sum", bind_sum)
    return tasks


def run(
    machine: Machine,
    ranks: list[list[tuple[Emulated, list[list[Task]]]]],
    order: random.Random,
    queues: bool,
    *,
    halts: dict[int, int] | None = None,
    stuck: Callable[[list[int]], bool] = lambda replays: False,
) -> None:
    """Run the replays of each rank one after the other, and their actions as streams and events allow.

    Args:
        machine: all ranks.
        ranks: by rank, the replays with the tasks of their actions.
        order: which action runs next.
        queues: whether each rank has one queue for all streams, so that actions run one by one as they were issued.
        halts: by rank, the number of actions that it runs before it runs no more.
        stuck: is called where nothing moves, with the number of replays that each rank has ended; True: try again.
    """
    left = dict(halts or {})
    states: list[list[Any]] = [[0, set()] for _ in ranks]  # replay, actions done
    speed = list(range(len(ranks)))
    progress: list[dict[int, int]] = [{} for _ in ranks]

    def candidates(rank: int) -> list[int]:
        replay, done = states[rank]
        if replay == len(ranks[rank]) or left.get(rank, 1) <= 0:
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

    while any(states[rank][0] < len(ranks[rank]) for rank in range(len(ranks)) if left.get(rank, 1) > 0):
        runnable = [(rank, number) for rank in range(len(ranks)) for number in candidates(rank)]
        order.shuffle(runnable)
        if order.random() < 0.02:
            order.shuffle(speed)
        runnable.sort(key=lambda action: speed[action[0]])  # some ranks run ahead as far as they can
        for rank, number in runnable:
            emulated, tasks = ranks[rank][states[rank][0]]
            at = progress[rank].get(number, 0)
            moved = False
            while at < len(tasks[number]) and machine.done(tasks[number][at]):
                at, moved = at + 1, True
            progress[rank][number] = at
            if at == len(tasks[number]):
                moved = True
                if rank in left:
                    left[rank] -= 1
                if number == len(emulated.actions):
                    states[rank][0] += 1
                    states[rank][1] = set()
                    progress[rank] = {}
                else:
                    states[rank][1].add(number)
            if moved:
                break
        else:
            if not stuck([replay for replay, _ in states]):
                pytest.fail(f"nothing moves: {[(rank, one[0], sorted(one[1])) for rank, one in enumerate(states)]}")


class Data:
    """Global arrays of small integers, and the shards of a call on each rank."""

    def __init__(self, plan: distgemm.Plan, seed: int, alpha: float = 1.0, beta: float = 0.0, bias: bool = False):
        p, generator = plan.problem, torch.Generator().manual_seed(seed)
        self.plan, self.schedule = plan, plan.schedule
        lead = (p.l,) if p.l > 1 else ()

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).double()

        whole = {"A": draw(*lead, p.m, p.k), "B": draw(*lead, p.n, p.k), "C": draw(*lead, p.m, p.n)}
        row = draw(p.n) if bias else None
        dtypes = {name: TORCH_DTYPES[str(p.dtype if name in "AB" else p.out_dtype)] for name in "ABCD"}
        self.wanted, self.calls, self.whole = [], [], whole
        scales = None if p.scaling is None else Scales.draw(plan, seed)
        multiplied = {name: whole[name] for name in "AB"}
        if scales is not None:
            multiplied = {name: x * torch.from_numpy(scales.of_elements[name][0]) for name, x in multiplied.items()}
        product = alpha * multiplied["A"] @ multiplied["B"].mT + beta * whole["C"] + (0 if row is None else row)
        for rank in range(plan.world_size):
            shards = {name: x[plan.shard(name, rank)].to(dtypes[name]).contiguous() for name, x in whole.items()}
            shards["D"] = torch.full(plan.shard_shape("D", rank), float("nan"), dtype=dtypes["D"])
            part = None if row is None else row[plan.shard("D", rank)[-1]].to(dtypes["D"])
            if first_users_of_a(plan, rank):
                shards["gathered"] = torch.full(self._gathered(rank).shape, float("nan"), dtype=dtypes["A"])
            if scales is not None:
                shards |= {name: torch.from_numpy(drawn[rank]).float() for name, drawn in scales.shards.items()}
            self.wanted.append(product[plan.shard("D", rank)])
            self.calls.append(CallTensors(shards, alpha, beta, part))

    def check(self) -> None:
        """Check D of all ranks, and A where it is gathered."""
        for rank, (call, wanted) in enumerate(zip(self.calls, self.wanted, strict=True)):
            assert torch.equal(call.out.double(), wanted), (self.schedule, rank)
            gathered = call.shards.get("gathered")
            assert gathered is None or torch.equal(gathered.double(), self._gathered(rank).view(gathered.shape))

    def _gathered(self, rank: int) -> torch.Tensor:
        a, p = self.whole["A"], self.plan.problem
        found = a.view(p.l, p.m, p.k)[tuple(slice(*edges) for edges in gathered_box(self.plan, rank))]
        return found if a.dim() == 3 else found[0]


def replay_each(
    every: list[distgemm.Plan],
    order: random.Random,
    recorded: list[Task],
    queues: bool,
    waits: Sequence[WaitBy] = ("memory_op",),
) -> Machine:
    """Replay each plan three times in a random order, with late ranks, and compare every element.

    The executables share a workspace, have one or two GEMM streams, and take turns with what waits.
    """
    ranks, machine = range(every[0].world_size), machine_of(every)
    emulated = [
        [
            Emulated(plan, rank, machine.workspaces[rank], 1 + number % 2, wait_by=waits[number // 2 % len(waits)])
            for rank in ranks
        ]
        for number, plan in enumerate(every)
    ]
    script = [order.randrange(len(every)) for _ in range(3 * len(every))]
    todo: list[list[Any]] = [[] for _ in ranks]
    data = []
    for replay, which in enumerate(script):
        # Calls alternate between buffers. Replays of captured calls may use the same one again and again.
        buffer = order.randrange(2)
        data.append(Data(every[which], replay, alpha=2.0, beta=float(replay % 2), bias=replay % 3 == 0))
        for rank in ranks:
            one = emulated[which][rank]
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, buffer)))
    run(machine, todo, order, queues)
    for drawn in data:
        drawn.check()
    return machine


def plans(schedule: str, ranks: int) -> list[distgemm.Plan]:
    """Plans of a schedule with all mechanisms, workspaces and ways to synchronise."""
    sides = 3 if "3d" in schedule else 2 if "2d" in schedule else 1
    mesh = {1: (ranks,), 2: (2, ranks // 2), 3: (2, 1, ranks // 2)}[sides]
    chunked = {"chunks": 2} if "chunks" in schedule_options(schedule) else {}
    shapes: list[dict[str, Any]] = [{"m": 22, "n": 21, "k": 19}, {"m": 13, "n": 16, "k": 12, "l": 2}]
    found = []
    for shape in shapes:
        problem = distgemm.GemmProblem(**shape, dtype="float32")
        for options in ({"sync": "barrier"}, {"workspace": "bounded"}, {"sync": "barrier", "workspace": "bounded"}):
            # The others where they differ most: by the barrier alone, and by credits within the replay.
            for mechanism in ("push", "pull", "store") if "sync" not in options or len(options) == 1 else ("push",):
                found.append(
                    distgemm.make_plan(problem, schedule, mesh=mesh, mechanism=mechanism, **options, **chunked)
                )
        if "final_add" in schedule_options(schedule):
            other = "epilogue" if "pairwise" in schedule else "kernel"
            found.append(distgemm.make_plan(problem, schedule, mesh=mesh, sync="barrier", final_add=other, **chunked))
    return found


def actions_of(plan: distgemm.Plan, rank: int, gemm_streams: int = 1, **execution: Any) -> list[Action]:
    """The actions of a rank."""
    return lower(plan, rank, ExecutionConfig(gemm_streams=gemm_streams, **execution))


def emulated(schedule: str, ranks: int = 2, **options: Any) -> CudaExecutable:
    """The executable of rank 0 for a small problem."""
    plan = distgemm.make_plan(
        distgemm.GemmProblem(m=16, n=16, k=16, dtype="float32"), schedule, ranks, sync="barrier", **options
    )
    machine = Machine(ranks, plan.workspace_bytes(0))
    return Emulated(plan, 0, machine.workspaces[0], 2).exe
