"""Calls of a CUDA executable without a GPU: launches, kernels to compile, graphs, and what is refused."""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm import api
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.flags import WAIT, WRITE, WRITE_DOUBLE, FlagOps, MemOp, flag_ops
from distgemm.gemm.tensors import spec_of
from distgemm.plan.ops import Gemm, Wait
from distgemm.runtime.collective import CollectiveExecutable
from distgemm.runtime.cuda import binding, discard_kernel, executable, flag_kernel, memops
from distgemm.runtime.cuda import compile as compilation
from distgemm.runtime.cuda.discard_kernel import DiscardArguments
from distgemm.runtime.cuda.executable import CudaExecutable, copied_buffers
from distgemm.runtime.cuda.lowering.actions import COMM
from distgemm.runtime.cuda.order import CallOrder
from distgemm.runtime.cuda.recording import CallLayout, layout_of
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError
from distgemm.runtime.executable import Executable, ExecutionConfig
from distgemm.runtime.unfused import UnfusedExecutable
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    ANY_TERMS,
    CHAINS,
    GATHER_B,
    GATHERS,
    ONE_TERM,
    Data,
    Emulated,
    EmulatedLaunch,
    Machine,
    Task,
    emulated,
    machine_of,
    plans,
)

# --- from actions to launches ---------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "mechanism"),
    [(GATHERS[0], "push"), (GATHER_B, "push"), (CHAINS[0], "push"), (CHAINS[1], "store"), (ALL_REDUCES[0], "store")],
)
def test_sources_name_the_kernels_of_all_ranks(
    schedule: str, mechanism: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compile builds, before any tensor is known. Calls with a bias need the same kernels."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    problem = distgemm.GemmProblem(64 * ranks, 64 * ranks, 64 * ranks)
    plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", chunks=2, mechanism=mechanism)
    for rank in range(ranks):
        for c in (False, True):
            workspace = Machine(ranks, plan.workspace_bytes(rank)).workspaces[rank]
            binder = Emulated(plan, rank, workspace, 1, wait_by="kernel").binder
            monkeypatch.setattr(binding, "get_provider", lambda name: CutlassProvider("90a"))
            *kernels, flags = binder.sources(c=c)
            assert flags.file == "flags.cu"
            biased = binder._dense_call(c=c, turned_b=False)
            biased.call.bias = biased.call.shards["D"][0, 0]
            ops = [op for action in binder.actions for op in action.ops if isinstance(op, Gemm)]
            given = [biased.gemm_tensors(op)[0] for op in ops]
            assert any(tensors.bias is not None for tensors in given)
            wanted = CutlassProvider("90a").sources([spec_of(tensors) for tensors in given])
            assert [source for source in kernels if source.file == "gemm.cu"] == wanted


def test_kernels_wait_for_gemms_only(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory operations wait for copies that pass chunks on: a kernel would wait beside GEMMs."""
    kernels = []
    monkeypatch.setattr(binding, "bind_flag_ops", lambda phases, device: kernels.append(phases))
    plan = plans(GATHERS[1], 4)[0]
    exe = Emulated(plan, 1, machine_of([plan]).workspaces[1], 1, wait_by="kernel").exe
    exe.binder.bind(Data(plan, 0).calls[1], 0)
    waits = [action.stream for action in exe.actions if action.ops and isinstance(action.ops[0], Wait)]
    assert COMM in waits
    assert len(kernels) == 1 + sum(stream != COMM for stream in waits)  # the exit is one, too


def test_flag_operations_are_split_into_launches() -> None:
    most_ops, most_phases = flag_kernel.OPERATIONS, flag_kernel.PHASES
    ops = [memops.write(8 * number) for number in range(2 * most_ops + 1)]
    launches = flag_kernel.split_launches([ops, ops[:2], [], *[ops[:1]] * most_phases])
    assert all(len(phases) <= most_phases and sum(map(len, phases)) <= most_ops for phases in launches)
    assert [op for phases in launches for phase in phases for op in phase] == ops + ops[:2] + ops[:1] * most_phases
    (phases,) = flag_kernel.split_launches([[memops.wait_for(8)], [*memops.clear([16]), memops.write(24, 7)]])
    encoded = flag_ops(phases)
    assert (encoded.phases, list(encoded.ends)[:2]) == (2, [1, 3])
    found = [(op.address, op.value, op.kind) for op in encoded.operations[:3]]
    assert found == [(8, 1, WAIT), (16, 0, WRITE_DOUBLE), (24, 7, WRITE)]


class FakeCubin:
    """Notes launches with what their parameters hold then."""

    def __init__(self, struct: type[ctypes.Structure]) -> None:
        self.struct, self.launched = struct, list[Any]()

    def launcher(self, device: int, grid: tuple[int, int, int], parameter: int) -> Any:
        def launch(stream: int) -> None:
            copied = self.struct.from_buffer_copy(ctypes.string_at(parameter, ctypes.sizeof(self.struct)))
            self.launched.append((device, grid, copied, stream))

        return launch


def test_all_messages_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = FakeCubin(DiscardArguments)
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    monkeypatch.setattr(discard_kernel, "open_cubin", lambda *_: cubin)
    received = [torch.zeros(1 + number, dtype=torch.bfloat16) for number in range(2 * discard_kernel.MESSAGES + 2)]
    discard_kernel.bind_discard(48, received, 3)(7)
    found = []
    for device, grid, struct, stream in cubin.launched:
        assert (device, stream, struct.aborted) == (3, 7, 48) and grid == (discard_kernel.BLOCKS, 1, 1)
        found += [(each.address, each.bytes) for each in struct.messages[: struct.count]]
    assert len(cubin.launched) == 3 and found == [(each.data_ptr(), each.nbytes) for each in received]


def test_each_part_of_flag_operations_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = FakeCubin(FlagOps)
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    monkeypatch.setattr(flag_kernel, "open_cubin", lambda *_: cubin)
    ops = [memops.write(8 * number, number) for number in range(flag_kernel.OPERATIONS + 5)]
    flag_kernel.bind_flag_ops([ops], 1)(9)
    found = []
    for device, grid, struct, stream in cubin.launched:
        assert (device, grid, stream) == (1, (1, 1, 1), 9)
        found += [(op.address, op.value) for op in struct.operations[: struct.ends[struct.phases - 1]]]
    assert len(cubin.launched) == 2 and found == [(op.address, op.value) for op in ops]


def test_two_flags_are_cleared_at_once() -> None:
    assert memops.clear([8, 12, 20, 24]) == [MemOp(False, at, 0, double=True) for at in (8, 16, 24)]


# --- calls ----------------------------------------------------------------------------------------------


def test_a_rank_that_raises_flips_no_buffer(monkeypatch: pytest.MonkeyPatch, recorded: list[Task]) -> None:
    exe = emulated(GATHERS[1])
    exe._recorded, exe._fixed = OrderedDict(), set()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    exe._watched, exe._order = SimpleNamespace(issued=lambda *_: None), PretendedOrder()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    exe._shape_of_d, exe._dtype_of_d = (16, 8), torch.float32
    monkeypatch.setattr(exe, "raise_if_dead", lambda: None)
    put: list[int] = []
    monkeypatch.setattr(exe, "_put", lambda bound, counted=False: put.append(exe.workspace.current_buffer))
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
    before = exe.workspace.current_buffer
    exe(a, b, out=out)  # eager: the call that raised does not count
    assert put == [1 - before]


class PretendedStream:
    """A stream on which nothing waits: a launch is done when its call has ended."""

    cuda_stream = 0

    def wait_stream(self, other: PretendedStream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()

    def synchronize(self) -> None: ...


class PretendedOrder:
    """The order of calls on a device, as a list of what begins and ends."""

    def __init__(self) -> None:
        self._lock, self._index, self.noted, self.occupied = RLock(), 0, list[str](), False

    issuing = CallOrder.issuing

    def __getattr__(self, name: str) -> Any:
        return lambda stream: self.noted.append(f"{name} {stream}")


class PretendedGraph:
    """A graph of the tasks that are launched while it is captured."""

    def __init__(self, tasks: list[Task], keep_graph: bool) -> None:
        assert keep_graph
        self.tasks, self.captured = tasks, []

    def capture_begin(self, capture_error_mode: str) -> None:
        self.before = len(self.tasks)

    def capture_end(self) -> None:
        self.captured = self.tasks[self.before :]
        del self.tasks[self.before :]

    def replay(self) -> None:
        self.tasks.extend(self.captured)


class PretendedRecording:
    """A recording of such a graph, which serves the tensors that it was made with, or says that it moves."""

    def __init__(self, movable: bool, graph: PretendedGraph, nodes: list[Any], layout: CallLayout) -> None:
        self.graph, self.addresses, self.movable, self.moved = graph, layout.addresses, movable, list[Any]()

    def move(self, addresses: tuple[int, ...]) -> None:
        self.moved.append(addresses)
        self.addresses = addresses

    def replay(self, stream: int) -> None:
        self.graph.replay()


class Pretended:
    """An executable of rank 0 on pretended streams, which puts its tasks into a list.

    Attributes:
        exe: the executable.
        workspace, order: what it uses.
        watched: the executables and results that the watchdog got to know.
        given_up: why the workspace was given up.
        occupied: the gathers that the group's other functions know to be under way.
    """

    def __init__(
        self,
        plan: distgemm.Plan,
        execution: ExecutionConfig,
        recorded: list[Task],
        monkeypatch: pytest.MonkeyPatch,
        movable: bool = True,
    ) -> None:
        self.machine, self.recorded = machine_of([plan]), recorded
        self.workspace: Any = self.machine.workspaces[0]
        self.workspace.memory, self.workspace.streams = torch.empty(0), [PretendedStream()] * 3
        self.workspace.capture_stream = PretendedStream()
        self.watched, self.given_up, self.occupied = list[Any](), list[str](), list[str]()
        self.order = PretendedOrder()
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        watched = SimpleNamespace(
            issued=self._issued, raises_itself=lambda: None, give_up=lambda reason: self.given_up.append(reason)
        )
        for name, value in {
            "check_agreement": lambda *_: None,
            "raise_together": self._told,
            "workspace_for": lambda *_: self.workspace,
            "call_order": lambda device: self.order,
            "watchdog": lambda: SimpleNamespace(add=lambda _: watched),
        }.items():
            monkeypatch.setattr(f"distgemm.runtime.cuda.calls.{name}", value)
        for name, value in {
            "agree_on_kernels": lambda *_: None,
            "build_together": lambda sources, rank, size: None,
            "Recording": functools.partial(PretendedRecording, movable),
            "captured_node": lambda stream: 0,
            "occupied": self._occupied,
        }.items():
            monkeypatch.setattr(executable, name, value)
        monkeypatch.setattr(executable.dist, "get_rank", lambda group: 0)
        for name in ("sources", "choices"):
            monkeypatch.setattr(binding.Binder, name, lambda self, **terms: [])
        monkeypatch.setattr("distgemm.gemm.default_provider", lambda device, dtype: ANY_TERMS)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: PretendedStream())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: PretendedGraph(recorded, keep_graph))
        group: Any = "a group"
        self.exe = CudaExecutable(plan, group, torch.device("cpu"), execution, timeout=5.0)

    def _told(self, problem: Exception | None, failure: str, *_: Any) -> None:
        if problem is not None:
            raise problem

    def _issued(self, exe: CudaExecutable, out: Any, stream: int) -> None:
        assert stream == 7
        self.watched.append((exe, out()))
        exe.raise_if_dead()

    @contextmanager
    def _occupied(self, group: str, by: str) -> Iterator[None]:
        self.occupied.append(by)
        try:
            yield
        finally:
            self.occupied.remove(by)

    def run_all(self) -> None:
        """Do all tasks in order."""
        assert self.recorded
        for task in self.recorded:
            assert any(self.machine.done(task) for _ in range(20)), task
        self.recorded.clear()


@pytest.mark.parametrize(
    "execution",
    [
        ExecutionConfig(),
        ExecutionConfig(ANY_TERMS),
        ExecutionConfig(ANY_TERMS, merge_copies=True),
        ExecutionConfig(ONE_TERM, gemm_streams=1, wait_by="kernel"),
    ],
    ids=str,
)
@pytest.mark.parametrize("movable", [False, True])
@pytest.mark.parametrize("schedule", ["ag+gemm", "gemm+rs"])
def test_calls_are_eager_then_recorded_then_replayed(
    schedule: str, movable: bool, execution: ExecutionConfig, recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, with pretended streams and graphs; there is a graph for each buffer."""
    plan = distgemm.make_plan(distgemm.GemmProblem(24, 16, 8, dtype="float32"), schedule, 1, chunks=3, sync="barrier")
    pretended = Pretended(plan, execution, recorded, monkeypatch, movable)
    exe, workspace, order, watched, run_all = (
        pretended.exe,
        pretended.workspace,
        pretended.order,
        pretended.watched,
        pretended.run_all,
    )
    assert (exe.provider, exe.transfers, exe.timeout) == (execution.provider or ANY_TERMS, "CUDA runtime", 5.0)
    assert exe.graphs == 0
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((24, 8), (16, 8)))
    out = torch.empty(24, 16)
    for number in range(5):
        a.add_(number)
        out.fill_(float("nan"))
        assert exe(a, b, out=out) is out
        run_all()
        assert torch.equal(out, a @ b.T), number
        assert exe.graphs == min(number, 2)
    assert len(watched) == 5 and all(found == (exe, out) for found in watched)
    assert order.noted == ["begin 7", "end 7"] * 5
    many = [(a.clone(), b.clone(), torch.empty_like(out)) for _ in range(40)]
    before = exe.graphs
    for number in range(80):
        x, y, z = many[number % 40]
        exe(x, y, out=z)
        recorded.clear()
    if movable:  # graphs of one layout serve all: there are no more
        assert exe.graphs == before == 2
        moved = [one for found in exe._recorded.values() for recording in found.values() for one in recording.moved]
        assert len(exe._recorded) == 1 and len(moved) == 80 and len(set(moved)) == 40
    else:  # each set of tensors has its own, and 40 sets are too many
        assert exe.graphs == before and len(exe._recorded) == executable.MAX_RECORDED_CALLS
    del watched[:], order.noted[:]
    exe(a, b, out=out)
    run_all()
    replay = exe.capture(a, b)
    assert not recorded
    for number in range(3):
        b.sub_(number)
        found = replay()
        run_all()
        assert found is replay.out and torch.equal(found, a @ b.T)
    for tensor in (a, b, out):
        tensor.requires_grad_()
        with pytest.raises(ValueError, match="requires grad, and executables know no gradients"):
            exe(a, b, out=out)  # also with a graph, which was recorded when it did not
        tensor.requires_grad_(False)
    a.requires_grad_()
    with torch.no_grad():
        replay = exe.capture(a, b)
    with pytest.raises(ValueError, match="A's shard on rank 0 requires grad"):
        replay()
    a.requires_grad_(False)
    recorded.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a replay cannot become part of a graph"):
        replay()
    words = torch.zeros(1)
    workspace.watched_memory = lambda: words
    assert exe(a, b, out=out) is out and order.noted[-2:] == ["begin_captured 7", "end_captured 7"]
    assert workspace.kept == [exe]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    exe.release()
    assert not workspace.kept
    workspace.dead = "a rank did not come"
    with pytest.raises(ReplayTimeoutError, match="a rank did not come"):
        exe(a, b)


def test_work_goes_to_the_gpu_of_the_executable(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another GPU is current: a handle of 0, and an event that is made, are of the current one."""
    current = ["another GPU"]

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    pretended = Pretended(of_chunks(), HANDS_OUT, recorded, monkeypatch)
    exe, where, index = pretended.exe, dict[str, Any](), 3
    exe._index = pretended.order._index = index
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(PretendedOrder, "__getattr__", lambda self, name: lambda _: where.update({name: current[-1]}))
    monkeypatch.setattr(PretendedRecording, "replay", lambda self, stream: where.update(replay=current[-1]))
    a, b = torch.randn(12, 8), torch.randn(1, 8)
    counted = torch.zeros(1, dtype=torch.int32)
    pretended.workspace.watched_memory = lambda: counted

    def gather() -> None:
        for _ in exe.gather(a):
            pass

    calls = {"eager": lambda: exe(a, b), "graph": lambda: exe(a, b), "replay": exe.capture(a, b), "gather": gather}
    found = {}
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        for name, call in calls.items():
            if not (captured and name == "replay"):
                where.clear()
                call()
                found[name, captured] = dict(where)
    unfused: Any = UnfusedExecutable.__new__(UnfusedExecutable)
    unfused.device, unfused.collective, unfused._order = exe.device, "two-shot", pretended.order
    unfused._buffers, unfused._keeper = {"whole": torch.empty(1)}, object()
    for captured in (False, True):
        where.clear()
        with unfused._in_order(captured):
            pass
        found["unfused", captured] = dict(where)
    unfused.release()
    assert set().union(*found.values()) == {"begin", "end", "replay", "begin_captured", "end_captured"}
    assert all(set(devices.values()) == {index} for devices in found.values()), found


HANDS_OUT = ExecutionConfig(ONE_TERM, gemm_streams=1)


def of_chunks(ranks: int = 1, **options: Any) -> distgemm.Plan:
    problem = distgemm.GemmProblem(12, ranks, 8, dtype="float32")
    return distgemm.make_plan(problem, GATHERS[0], ranks, sync="barrier", **({"chunks": 3} | options))


@pytest.mark.parametrize("captured", [False, True])
def test_a_gather_is_one_call(captured: bool, recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(of_chunks(), HANDS_OUT, recorded, monkeypatch)
    exe, noted = pretended.exe, pretended.order.noted
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    counted = torch.zeros(1, dtype=torch.int32)
    pretended.workspace.watched_memory = lambda: counted
    a, b, buffer = torch.randn(12, 8), torch.randn(4, 8), pretended.workspace.current_buffer
    other = exe.capture(a, torch.randn(1, 8))
    found = []
    for rows, chunk in exe.gather(a):
        assert pretended.occupied == ["a gather"] and len(noted) == 1
        for call in (lambda: exe(a, b), lambda: next(exe.gather(a)), other):
            with pytest.raises(RuntimeError, match=r"capture|a gather on this GPU has not ended"):
                call()
        found.append((rows, chunk @ b.T))
    pretended.run_all()
    assert [rows for rows, _ in found] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    torch.testing.assert_close(torch.cat([part for _, part in found]), a @ b.T)
    assert pretended.workspace.current_buffer != buffer and not pretended.occupied
    assert noted == (["begin_captured 7", "end_captured 7"] if captured else ["begin 7", "end 7"])
    assert pretended.watched == [(exe, None)] * (0 if captured else 4)  # behind each chunk, and the end
    assert (int(counted), pretended.workspace.kept) == ((1, [exe]) if captured else (0, []))
    assert not pretended.given_up


@pytest.mark.parametrize("how", ["error", "close", "stream", "dead"])
def test_a_gather_that_ends_early_puts_all_of_its_actions(
    how: str, recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended(of_chunks(2), HANDS_OUT, recorded, monkeypatch)
    exe, a = pretended.exe, torch.randn(6, 8)
    for _ in exe.gather(a):
        pass
    wanted = len(recorded)
    recorded.clear()
    pretended.order.noted.clear()
    chunks = exe.gather(a)
    next(chunks)
    assert len(recorded) < wanted
    if how == "error":
        with pytest.raises(ArithmeticError):
            chunks.throw(ArithmeticError())
    elif how == "close":
        chunks.close()
    elif how == "stream":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 8)
        with pytest.raises(RuntimeError, match="on the stream on which it began"):
            next(chunks)
    else:
        pretended.workspace.dead = "a rank did not come"
        with pytest.raises(ReplayTimeoutError, match="a rank did not come"):
            next(chunks)
    assert len(recorded) == wanted and pretended.order.noted == ["begin 7", "end 7"]
    assert next(chunks, None) is None
    assert not pretended.occupied and not pretended.order.occupied and not pretended.given_up
    if how == "close":
        assert len(list(exe.gather(a))) == 6


def test_a_gather_that_cannot_be_issued_gives_the_workspace_up(
    recorded: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended(of_chunks(), HANDS_OUT, recorded, monkeypatch)
    puts = iter([1])

    def put(stream: int | None = None) -> None:
        if next(puts, None) is None:
            raise OSError("of CUDA")

    monkeypatch.setattr(EmulatedLaunch, "__call__", lambda self, stream: put())
    with pytest.raises(OSError, match="of CUDA"):
        list(pretended.exe.gather(torch.randn(12, 8)))
    (reason,) = pretended.given_up
    assert "failed as it was issued: of CUDA" in reason and not pretended.order.occupied


def test_gathers_are_refused_before_anything_is_sent(recorded: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(12, 8)
    for plan, execution, given, message in (
        (of_chunks(), ExecutionConfig(ONE_TERM), a, "it takes gemm_streams=1, got 2"),
        (of_chunks(), HANDS_OUT, a[1:], "A's shard on rank 0 has shape"),
        (of_chunks(), HANDS_OUT, a.t().contiguous().t(), "copied by rows"),
        (of_chunks(), HANDS_OUT, a.clone().requires_grad_(), "requires grad"),
        (of_chunks(3, workspace="bounded", chunks=2), HANDS_OUT, a[:4], "they share slots; workspace='full' would do"),
        (distgemm.make_plan(distgemm.GemmProblem(12, 8, 8, l=2), GATHERS[0], 1), HANDS_OUT, a, "of one batch"),
        (distgemm.make_plan(distgemm.GemmProblem(12, 8, 8), CHAINS[0], 2), HANDS_OUT, a, "in chunks of whole rows"),
    ):
        pretended = Pretended(plan, execution, recorded, monkeypatch)
        pretended.exe._copied = {"A"}
        before = pretended.workspace.current_buffer
        with pytest.raises(ValueError, match=message):
            next(pretended.exe.gather(given))
        assert not recorded and pretended.workspace.current_buffer == before and not pretended.order.noted


def test_calls_that_differ_in_more_than_addresses_have_graphs_of_their_own() -> None:
    a, scale = torch.zeros(4, 4), torch.zeros(8)[:4]
    calls = [((a, None, part), 1.0) for part in (scale, scale[:1], scale[::2], scale.view(torch.int32), None)]
    calls += [((a, None, scale), 2.0), ((a, scale, None), 1.0), ((a.t(), None, scale), 1.0)]
    calls += [((a, None, scale.to("meta")), 1.0), ((a, None, torch.nn.Parameter(scale)), 1.0)]
    calls += [((a, None, torch.zeros(8)[1:5]), 1.0)]  # aligned otherwise
    assert len({layout_of(tensors, alpha, 0.0).key for tensors, alpha in calls}) == len(calls)
    other = layout_of((a.clone(), None, torch.zeros(4)), 1, 0)
    assert other.key == layout_of(*calls[0], 0.0).key and other.addresses != layout_of(*calls[0], 0.0).addresses


def test_tensors_that_share_memory_are_known() -> None:
    """An address does not say whose it is, so such a graph serves these tensors alone."""
    x = torch.zeros(8, 4)
    assert layout_of((x[:4], x[4:], None), 1.0, 0.0).disjoint
    assert not layout_of((x, x, None), 1.0, 0.0).disjoint
    assert not layout_of((x[:5], None, x[4:]), 1.0, 0.0).disjoint
    assert layout_of((x[:0], x[0:0], x), 1.0, 0.0).disjoint  # empty ones
    assert not layout_of((x[:, :2], x[:, 2:]), 1.0, 0.0).disjoint  # columns of one matrix: their ranges overlap


def test_all_runtimes_satisfy_the_protocol() -> None:
    """mypy checks signatures; this checks that the members exist."""
    members = [name for name in vars(Executable) if not name.startswith("_")]
    assert members == ["plan", "rank", "provider", "transfers", "release"]
    for runtime in (CudaExecutable, CollectiveExecutable, UnfusedExecutable):
        properties = {"plan", "rank", "provider"}  # may be set in __init__
        assert all(hasattr(runtime, name) for name in set(members) - properties)


# --- what is refused ------------------------------------------------------------------------------------


def test_compile_refuses_arguments_before_it_asks_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    ranks = TwoRanks()
    for module in (api, compilation):
        monkeypatch.setattr(module, "resolve_group", lambda group: ranks)
    monkeypatch.setattr(compilation.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(compilation, "CudaExecutable", lambda *_, **__: "made")
    monkeypatch.setattr(compilation, "PerTileExecutable", lambda *_, **__: "made per tile")
    problem = distgemm.GemmProblem(m=16, n=16, k=16)
    plan = distgemm.make_plan(problem, GATHERS[1], 2)

    def compiled(**options: Any) -> Any:
        return distgemm.compile(options.pop("plan", plan), device="cuda:0", **options)

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert compiled() == "made" and compiled(execution="per_tile") == "made per tile"
    for options, message in (
        ({"plan": distgemm.make_plan(problem, GATHERS[1], 3)}, "the plan is for 3 ranks, the group has 2"),
        ({"gemm_streams": 3}, "gemm_streams is an integer from 1 to 2, got 3"),
        ({"execution": "events"}, "execution is one of multi_kernel, per_tile, got 'events'"),
        ({"wait_by": "events"}, "wait_by is one of memory_op, kernel, got 'events'"),
        ({"wait_by": "kernel", "execution": "per_tile"}, "execution='per_tile' waits and copies in its kernel"),
        ({"merge_copies": 1}, "merge_copies is True or False, got 1"),
        ({"provider": "cublas", "execution": "per_tile"}, "execution='per_tile' takes provider 'cutlass'"),
        ({"timeout": 0}, "timeout is a finite number > 0"),
        ({"on_timeout": "ignore"}, "on_timeout is one of raise, abort, got 'ignore'"),
        ({"schedule": "auto", "pattern": "ag+gemm"}, "pattern and tune are for a problem"),
        ({"schedule": GATHERS[1]}, "a plan has its schedule and options already"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(**options)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(RuntimeError, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1: .* unset it, or set it to 8"):
        compiled()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the stream is being captured"):
        compiled()


def test_shards_that_are_copied_have_contiguous_rows() -> None:
    exe = emulated(GATHERS[0])
    assert copied_buffers(exe.plan, 0) == {"A"}
    a, b = torch.zeros(8, 16), torch.zeros(8, 16)
    for refused in (torch.zeros(16, 8).T, torch.zeros(1, 16).expand(8, 16)):
        with pytest.raises(ValueError, match=r"A's shard on rank 0 is copied by rows.*\.contiguous\(\)"):
            exe._check(refused, b, None, 0.0, None)
    exe._check(torch.zeros(8, 24)[:, :16], torch.zeros(16, 8).T, None, 0.0, None)
    exe._check(a, b, None, 0.0, None)


def test_all_reduces_copy_from_and_to_d() -> None:
    assert copied_buffers(emulated(ALL_REDUCES[0]).plan, 0) == {"D"}


def test_gathered_is_refused_where_a_is_not_gathered() -> None:
    exe = emulated(CHAINS[0])
    a, b = torch.zeros(16, 8), torch.zeros(16, 8)
    with pytest.raises(ValueError, match="does not bring rank 0 all columns of A"):
        exe._check(a, b, None, 0.0, None, torch.zeros(16, 16))


def test_gathered_of_another_form_is_refused() -> None:
    exe = emulated(GATHERS[1])
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


def test_a_bias_of_another_shape_is_refused() -> None:
    """A bias of all ranks' columns would be cut, and its first columns added on every rank."""
    exe = emulated(GATHERS[0])
    a, b, d = torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(16, 8)
    exe._checked((a, b, None, torch.zeros(8), None, None, d, None))
    for bias in (torch.zeros(16), torch.zeros(1), torch.zeros(1, 8), torch.zeros(8, dtype=torch.float64), [0.0] * 8):
        with pytest.raises(ValueError, match="bias on rank 0 is "):
            exe._checked((a, b, None, bias, None, None, d, None))
    with pytest.raises(ValueError, match="scale_a on rank 0 is None without a scaling"):
        exe._checked((a, b, None, None, torch.ones(1), None, d, None))
