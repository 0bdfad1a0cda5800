"""What each rank of the tests of the CUDA runtime does."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from cuda.bindings import driver, runtime
from torch.autograd import DeviceType

import distgemm
from distgemm.api import compile as compile_plan
from distgemm.gemm.cuda_errors import raise_on
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import KernelSource, build
from distgemm.plan.ops import Copy, Gemm, Reduce, Signal, Wait, link_of
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.cuda import CudaExecutable, ReplayTimeoutError
from distgemm.runtime.cuda.binding import Binder, CallTensors
from distgemm.runtime.cuda.lowering.actions import GEMM_STREAM, Action, exchanges_of
from distgemm.runtime.cuda.nccl import ExchangeLaunch
from distgemm.runtime.cuda.workspace import BUFFERS, Step
from distgemm.runtime.executable import EXECUTION_FIELDS, ExecutionConfig, ExecutionMode, WaitBy
from distgemm.runtime.unfused import COLLECTIVES, Collective, UnfusedExecutable
from distgemm.schedulers import Pattern, schedule_options

CONFIG = "128x128x64_2x1_pingpong"


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan, the arguments of its calls, and how GPUs execute it."""

    schedule: str
    mesh: tuple[int, ...]
    m: int = 512
    n: int = 512
    k: int = 512
    l: int = 1  # noqa: E741
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    partial_dtype: str | None = None
    rows: tuple[int, ...] | None = None
    chunks: int = 1
    workspace: str = "full"
    sync: str = "barrier"
    mechanism: str = "push"
    alpha: float = 1.0
    beta: float = 0.0
    gemm_streams: int = 2
    config: str | None = CONFIG
    provider: str = "cutlass"
    execution: ExecutionMode = "multi_kernel"
    wait_by: WaitBy = "memory_op"
    merge_copies: bool = False
    final_add: str = ""
    chunk_mode: str = ""
    across: str = ""
    inside: str = ""
    ranks_per_host: int | None = None
    n_per_rank: tuple[int, ...] | None = None
    k_per_rank: tuple[int, ...] | None = None
    copies: int = 1

    def plan(self) -> distgemm.Plan:
        problem = distgemm.GemmProblem(
            *(self.m, self.n, self.k, self.l, self.dtype, self.out_dtype, self.partial_dtype, self.rows),
            n_per_rank=self.n_per_rank,
            k_per_rank=self.k_per_rank,
        )
        given: dict[str, Any] = {
            "chunks": self.chunks * (self.chunks > 1),
            "final_add": self.final_add,
            "chunk_mode": self.chunk_mode,
            "across": self.across,
            "inside": self.inside,
            "copies": self.copies * (self.copies > 1),
        }
        options = {name: value for name, value in given.items() if value}
        return distgemm.make_plan(
            problem,
            self.schedule,
            mesh=self.mesh,
            workspace=self.workspace,
            sync=self.sync,
            mechanism=self.mechanism,
            send_slots=2,
            ranks_per_host=self.ranks_per_host,
            **options,
        )

    def execution_options(self) -> dict[str, Any]:
        """The fields of its ExecutionConfig."""
        return {name: getattr(self, name) for name in EXECUTION_FIELDS}


def compile_kernels(cases: list[Case], arch: str | None = None) -> None:
    """Compile the kernels of the cases in parallel, so that no launch with a timeout waits for a compiler.

    Args:
        cases: the cases.
        arch: the architecture; None: that of the GPU.
    """
    sources: dict[KernelSource, None] = {}
    with nullcontext() if arch is None else patch.object(CutlassProvider, "arch", arch):
        for case in cases:
            plan = case.plan()
            for rank in range(plan.world_size):
                binder = Binder(plan, rank, torch.device("cuda", 0), ExecutionConfig(**case.execution_options()))
                sources |= dict.fromkeys(binder.sources())  # an executable builds these
                sources |= dict.fromkeys(binder.sources(c=bool(case.beta)))
    build(list(sources))


class Data:
    """Shards on this rank's GPU, redrawn in place; the reference in float64 of all ranks' data."""

    def __init__(self, case: Case, plan: distgemm.Plan, device: torch.device, integers: bool = True) -> None:
        self.case, self.plan, self.device, self.integers = case, plan, device, integers
        self.rank = dist.get_rank()
        p = plan.problem
        lead = (p.l,) if p.l > 1 else ()
        self.shapes = {"A": (*lead, p.m, p.k), "B": (*lead, p.n, p.k), "C": (*lead, p.m, p.n)}
        self.dtypes = {name: TORCH_DTYPES[str(p.dtype if name in "AB" else p.out_dtype)] for name in "ABCD"}
        self.shards = {
            name: torch.empty(plan.shard_shape(name, self.rank), dtype=self.dtypes[name], device=device)
            for name in "ABCD"
        }

    def draw(self, seed: int) -> torch.Tensor:
        """Draw new inputs, and return the expected shard of D."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self.whole = whole = dict[str, torch.Tensor]()
        for name, shape in self.shapes.items():
            if self.integers:
                drawn = torch.randint(-1, 2, shape, generator=generator, device=self.device)
                # Sparse, so that sums stay exact in 8 bits of mantissa.
                drawn *= torch.rand(shape, generator=generator, device=self.device) < 0.25
            else:
                drawn = torch.randn(shape, generator=generator, device=self.device)
            whole[name] = drawn.to(self.dtypes[name])
            self.shards[name].copy_(whole[name][self.plan.shard(name, self.rank)])
        case = self.case
        a = whole["A"][..., self.plan.shard("D", self.rank)[-2], :].double()
        b = whole["B"][..., self.plan.shard("D", self.rank)[-1], :].double()
        c = whole["C"][self.plan.shard("D", self.rank)].double()
        self.shards["D"].fill_(float("nan"))
        self.magnitude = abs(case.alpha) * a.abs() @ b.abs().mT + abs(case.beta) * c.abs()
        return case.alpha * a @ b.mT + case.beta * c

    @property
    def terms(self) -> dict[str, Any]:
        """C, if the case adds it, and the factors, as a call and a capture take them."""
        case = self.case
        return {"c_shard": self.shards["C"] if case.beta else None, "alpha": case.alpha, "beta": case.beta}

    def call(self, exe: CudaExecutable, **more: torch.Tensor) -> torch.Tensor:
        shards = self.shards
        return exe(shards["A"], shards["B"], out=shards["D"], **self.terms, **more)


def compiled(case: Case, **more: Any) -> tuple[CudaExecutable, Data]:
    plan = case.plan()
    plan.verify()
    exe = compile_plan(plan, **case.execution_options(), **more)
    return exe, Data(case, plan, exe.device)


def exact(cases: list[Case], calls: int = 5, late: bool = True) -> list[str]:
    """Failures of cases called several times with other inputs: eager, then recorded twice, then replayed."""
    failures = []
    for number, case in enumerate(cases):
        try:
            exe, data = compiled(case)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
            raise
        chance = random.Random(number * 100 + dist.get_rank())
        for call in range(calls):
            wanted = data.draw(1000 * number + call)
            if late and chance.random() < 0.5:
                torch.cuda._sleep(chance.randrange(1, 4_000_000))
            found = data.call(exe)
            if not torch.equal(found.double(), wanted):
                wrong = (found.double() != wanted).sum().item()
                failures.append(f"rank {dist.get_rank()} call {call}: {wrong} of {wanted.numel()} wrong: {case}")
                break
    return failures


def poisoned(cases: list[Case], calls: int = 10) -> list[str]:
    """Failures of cases whose slots hold NaN before each call: nothing is read before it has arrived."""
    failures = []
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"], **data.terms)
        for call in range(calls):
            wanted = data.draw(100 * number + call)
            for buffer in range(BUFFERS):
                exe.workspace.slot(buffer, exe.rank, 0, exe.workspace.slot_bytes).fill_(0xFF)
            if exe.binder.staging:
                exe.binder.staging_memory.fill_(0xFF)
            torch.cuda.synchronize()
            dist.barrier(device_ids=[exe.device.index])
            # A call on new tensors is issued eagerly.
            found = replay() if call % 2 else exe(data.shards["A"], data.shards["B"].clone(), **data.terms)
            wrong = (found.double() != wanted).sum().item()
            if wrong:
                failures.append(f"rank {exe.rank} call {call}: {wrong} of {wanted.numel()} wrong: {case}")
    return failures


def beside_another_gpu(cases: list[Case], calls: int = 4) -> list[str]:
    """Failures of calls while another GPU is the current one, and of plans' calls that touch that GPU.

    Each call is eager, recorded, replayed or captured, on the default stream of its own GPU, or on another one of it.
    """
    device, rank = torch.device("cuda", torch.cuda.current_device()), dist.get_rank()
    other = (device.index + 1) % torch.cuda.device_count()
    made: list[tuple[Any, Data, str]] = [(*compiled(case), str(case)) for case in cases]
    failures = []
    for number, (exe, data, name) in enumerate(made):
        wanted = data.draw(number)
        if not torch.equal(data.call(exe).double(), wanted):
            failures.append(f"rank {rank}, its own GPU: {name}")
    time.sleep(0.5)  # the watchdog looks, too
    _, active = raise_on(driver.cuDevicePrimaryCtxGetState(other))
    if active:
        failures.append(f"rank {rank} has made a context on GPU {other}")
    problem = distgemm.GemmProblem(512, 512, 512)
    unfused: list[tuple[Pattern, Collective]] = [("ag+gemm", "nccl"), ("gemm+rs", "nccl")]
    for pattern, collective in [*unfused, *(("gemm+ar", one) for one in COLLECTIVES)]:
        program = UnfusedExecutable(problem, pattern, device=device, collective=collective)
        data = Data(Case(pattern, (dist.get_world_size(),)), program.plan, device)
        made.append((program, data, f"{pattern} by {collective}"))
    side = torch.cuda.Stream(device)
    for number, (exe, data, name) in enumerate(made):
        for call in range(calls):
            wanted = data.draw(10 * number + call)
            stream = side if call % 2 else torch.cuda.default_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.cuda.device(other):
                found = data.call(exe).clone()
            torch.cuda.current_stream(device).wait_stream(stream)
            if not torch.equal(found.double(), wanted):
                failures.append(f"rank {rank} call {call} beside GPU {other}: {name}")
        with torch.cuda.device(other):
            replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"], **data.terms)
        for call in range(calls):
            wanted = data.draw(10 * number + call + 5)
            with torch.cuda.device(other):
                found = replay()
            if not torch.equal(found.double(), wanted):
                failures.append(f"rank {rank} replay {call} beside GPU {other}: {name}")
    return failures


def stress(cases: list[Case], replays: int, seed: int) -> list[str]:
    """Several executables on one workspace in random order, eager and within outer graphs."""
    done = replay_at_random(cases, replays, seed)
    assert done.made >= replays
    few = [f"few graphs: {done.graphs}"] * (done.graphs < 1 and any(case.execution != "per_tile" for case in cases))
    return [f"rank {dist.get_rank()}: {done.wrong} wrong elements"] * bool(done.wrong) + few


class Replays(NamedTuple):
    """Replays that a rank made.

    Attributes:
        made: how many.
        wrong: elements that were wrong.
        graphs: graphs that the executables recorded.
        eager: calls of an executable that were not within an outer graph.
        seconds: how long they took.
    """

    made: int
    wrong: int
    graphs: int
    eager: int
    seconds: float


REPLAYS_PER_LOOK = 200
"""Replays from one look at the clock to the next. A look waits for the GPU and for all ranks."""


def replay_at_random(
    cases: list[Case], replays: int, seed: int, seconds: float = 1e9, noise_elements: int = 1 << 20
) -> Replays:
    """Several executables on one workspace in random order, eager and within outer graphs.

    A rank is late at random, and NCCL runs on another stream. Every result is compared on the GPU.

    Args:
        cases: the executables.
        replays: at least so many are made.
        seed: of the order and of the inputs.
        seconds: time after which no more are made.
        noise_elements: what NCCL sums meanwhile.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rank = dist.get_rank()
    common, own = random.Random(seed), random.Random(seed * 1000 + rank)
    made = [compiled(case) for case in cases]
    wanted = [[data.draw(seed * 100 + index * 10 + draw) for draw in range(3)] for index, (_, data) in enumerate(made)]
    inputs = []
    for index, (_, data) in enumerate(made):
        inputs.append([])
        for draw in range(3):
            data.draw(seed * 100 + index * 10 + draw)
            inputs[index].append({name: data.shards[name].clone() for name in "ABC"})
    outer = []
    for exe, data in made:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(3):  # an odd number of replays in one graph
                data.call(exe)
            graph.capture_end()
        outer.append(graph)
    traffic = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    noise = torch.zeros(noise_elements, device=device)
    other = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    done, eager, looks, start = 0, 0, 0, time.monotonic()
    while done < replays:
        if done >= (looks + 1) * REPLAYS_PER_LOOK:
            looks += 1
            late = torch.tensor(time.monotonic() - start, device=device)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if rank == 0 and not looks % 10:
                print(f"{done} replays after {late.item():.0f} s, {wrong.item()} wrong elements", flush=True)
            if late.item() > seconds:
                break
        index, draw = common.randrange(len(made)), common.randrange(3)
        exe, data = made[index]
        for name in "ABC":
            data.shards[name].copy_(inputs[index][draw][name])
        data.shards["D"].fill_(float("nan"))
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(1, 20_000_000))  # up to 10 ms
        if common.random() < 0.3:
            with torch.cuda.stream(other):
                dist.all_reduce(noise, group=traffic)
        if common.random() < 0.4:
            outer[index].replay()
            done += 3
        else:
            data.call(exe)
            done += 1
            eager += 1
        wrong += (data.shards["D"].double() != wanted[index][draw]).sum()
    torch.cuda.synchronize()
    graphs = sum(exe.graphs for exe, _ in made if isinstance(exe, CudaExecutable))
    return Replays(done, int(wrong.item()), graphs, eager, time.monotonic() - start)


def repeated(cases: list[Case]) -> list[str]:
    """Two runs on the same inputs are equal, bit by bit."""
    failures = []
    late = random.Random(dist.get_rank())  # otherwise on each rank, the same in each run
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        data.integers = False
        data.draw(number)
        first = data.call(exe).clone()
        for _ in range(3):
            torch.cuda._sleep(late.randrange(1, 2_000_000))
            if not torch.equal(first, data.call(exe)):
                failures.append(f"rank {dist.get_rank()}: {case}")
                break
    return failures


def late_rank(case: Case, late: int, seconds: float) -> dict[str, Any]:
    """One rank raises for a wrong shape and does not take part: all ranks raise, and no rank gets a result."""
    exe, _ = compiled(case, timeout=seconds)
    data = Data(case, exe.plan, exe.device)
    data.draw(0)
    data.call(exe)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"poisoned": True, "error": "nothing was raised"}
    try:
        if dist.get_rank() == late:
            try:
                exe(data.shards["A"][:-1], data.shards["B"])
            except ValueError as error:
                found["own"] = f"ValueError: {error}"
            _until(lambda: exe.raise_if_dead(), 20 * seconds)
        else:
            data.call(exe)
            _until(lambda: None, 20 * seconds)
    except ReplayTimeoutError as error:
        found["error"] = str(error)
        torch.cuda.synchronize()  # the GPU comes free
        if dist.get_rank() != late:
            time.sleep(1.0)
            found["poisoned"] = bool(data.shards["D"].isnan().all())
        try:
            data.call(exe)
        except ReplayTimeoutError as again:
            found["called_again"] = type(again).__name__
    return found


def _until(look: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.02)
        look()


def killed_rank(case: Case, victim: int, seconds: float) -> None:
    """One rank dies by a signal in a loop of replays; the others raise."""
    exe = compile_plan(case.plan(), config=case.config, timeout=seconds)
    data = Data(case, exe.plan, exe.device)
    data.draw(0)
    for number in range(1_000_000):
        if number == 50 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        data.call(exe)
        if number % 10 == 0:
            torch.cuda.synchronize()


def survivor_of_a_kill(case: Case, seconds: float) -> str:
    """The message that rank 0 raises when rank 1 is killed.

    It starts two processes itself, because the launcher would stop rank 0 first.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_survive, args=(rank, case, seconds, f"{folder}/store", f"{folder}/message"))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            if process.is_alive():
                process.kill()
        message = Path(folder, "message")
        return message.read_text() if message.exists() else "rank 0 raised nothing"


def _survive(rank: int, case: Case, seconds: float, store: str, message: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    try:
        killed_rank(case, 1, seconds)
    except ReplayTimeoutError as error:
        Path(message).write_text(str(error))
    os._exit(0)


def graph_nodes(cases: list[Case]) -> list[str]:
    """Failures of cases whose graphs do not hold what the plan and the lowering say."""
    failures = []
    for case in cases:
        exe, data = compiled(case)
        data.draw(0)
        replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"])
        kinds, edges = _nodes_and_edges(replay.graph)
        # With wait_by="kernel", waits on the stream of GEMMs are kernels, and one kernel does finish and exit.
        kernel_waits = exe.execution.wait_by == "kernel"
        left_out = {Step.FINISH} if kernel_waits else set()
        actions = [action for action in exe.actions if action.step not in left_out or action.ops]
        computed = [
            action
            for action in actions
            if action.ops
            and (
                isinstance(action.ops[0], (Gemm, Reduce))
                or (kernel_waits and isinstance(action.ops[0], Wait) and action.stream == GEMM_STREAM)
            )
        ]
        others = [action for action in actions if action not in computed]
        copies = [op for action in others for op in action.ops if isinstance(op, Copy)]
        memops = [action for action in others if not action.ops or isinstance(action.ops[0], (Wait, Signal))]
        memory = len(memops) + 1 - kernel_waits
        wanted = {"KERNEL": len(computed) + kernel_waits, "MEMCPY": len(copies), "BATCH_MEM_OP": memory}
        wanted = {kind: count for kind, count in wanted.items() if count}
        counted = {kind: kinds.count(kind) for kind in {*kinds, *wanted} - {"EMPTY"}}
        if counted != wanted:
            failures.append(f"rank {exe.rank} {case}: nodes {counted}, wanted {wanted}")
        if not kernel_waits and edges != _edges_of(actions):
            failures.append(f"rank {exe.rank} {case}: {edges} edges, wanted {_edges_of(actions)}")
    return failures


def _nodes_and_edges(graph: torch.cuda.CUDAGraph) -> tuple[list[str], int]:
    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(handle)
    _, nodes, count = runtime.cudaGraphGetNodes(handle, count)
    kinds = [driver.cuGraphNodeGetType(driver.CUgraphNode(int(node)))[1].name for node in nodes[:count]]
    return [kind.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds], int(runtime.cudaGraphGetEdges(handle)[-1])


def _edges_of(actions: list[Action]) -> int:
    """Edges of actions in streams that fork from nothing and join in the exit."""
    edges, last = 0, {}
    for action in actions:
        edges += len(action.after) + (action.stream in last)
        last[action.stream] = action
    return edges + len(last)


def crowded(cases: list[Case], streams: int = 16, calls: int = 12) -> list[str]:
    """Calls in a graph of the caller with more streams beside them than the GPU has hardware queues."""
    failures = []
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        wanted = data.draw(9000 + number)
        sides = [torch.cuda.Stream() for _ in range(streams)]
        scratch = torch.zeros(streams, 1 << 16, device=exe.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            here = torch.cuda.current_stream()
            for index, side in enumerate(sides):
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    for _ in range(2 * calls):
                        scratch[index].add_(1)
            for _ in range(calls):
                found = data.call(exe)
            for side in sides:
                here.wait_stream(side)
        for _ in range(5):
            found.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(found.double(), wanted):
            failures.append(f"rank {exe.rank}: {int((found.double() != wanted).sum())} wrong: {case}")
        graph.reset()
    return failures


def crossed(cases: list[Case], calls: int = 6) -> list[str]:
    """Calls beside NCCL on another stream, which is called first on every second rank.

    Each of the two holds SMs that the other one needs on the peers.
    """
    failures = []
    traffic = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    rank, other = dist.get_rank(), torch.cuda.Stream()
    noise = torch.zeros(1 << 26, device="cuda")

    def reduce() -> None:
        with torch.cuda.stream(other):
            dist.all_reduce(noise, group=traffic)

    for number, case in enumerate(cases):
        exe, data = compiled(case, timeout=10.0)
        for call in range(calls):
            wanted = data.draw(100 * number + call)
            torch.cuda.synchronize()
            dist.barrier(device_ids=[exe.device.index])
            torch.cuda.synchronize()
            steps = [reduce, functools.partial(data.call, exe)]
            for step in steps if (rank + call) % 2 else steps[::-1]:
                step()
                time.sleep(0.003)
            torch.cuda.synchronize()
            if not torch.equal(data.shards["D"].double(), wanted):
                failures.append(f"rank {rank} call {call}: {case}")
    return failures


def engines(cases: list[Case]) -> list[str]:
    """Failures of traces: each copy between GPUs is a memcpy, which takes no SM, and half of them run under GEMMs."""
    return [failure for case in cases for failure in _engines(case)]


def messages(cases: list[Case]) -> list[str]:
    """Failures of cases whose messages across hosts are not those of the plan: in bytes, and in kernels of NCCL."""
    failures = []
    for case in cases:
        exe, data = compiled(case)
        wanted = data.draw(0)
        call = CallTensors(dict(data.shards))
        launches = [one for action in exe.binder.bind(call, 0).launches for one in action]
        sent = sum(x.nbytes for one in launches if isinstance(one, ExchangeLaunch) for _, x in one.sends)
        planned = sum(size for (src, _), size in exe.plan.link_bytes("across").items() if src == exe.rank)
        if sent != planned:
            failures.append(f"rank {exe.rank}: sends {sent} bytes across hosts, the plan {planned}: {case}")
        replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"], **data.terms)
        kernels = sum(event.name().startswith("nccl") for event in _profiled(exe, replay))
        exchanges = PROFILED_REPLAYS * len(exchanges_of(exe.actions))
        if kernels != exchanges:
            failures.append(f"rank {exe.rank}: {kernels} kernels of NCCL in {exchanges} exchanges: {case}")
        if not torch.equal(data.shards["D"].double(), wanted):
            failures.append(f"rank {exe.rank}: wrong: {case}")
    return failures


PROFILED_REPLAYS = 5


def _profiled(exe: Any, replay: Callable[[], Any]) -> list[Any]:
    """What the GPU did in ``PROFILED_REPLAYS`` replays, behind one that is not counted. A collective call."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    dist.barrier(device_ids=[exe.device.index])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_REPLAYS):
            replay()
        torch.cuda.synchronize()
    return [e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]


def _engines(case: Case) -> list[str]:
    exe, data = compiled(case)
    data.draw(0)
    replay = exe.capture(data.shards["A"], data.shards["B"], out=data.shards["D"])
    events = _profiled(exe, replay)
    copies = [e for e in events if e.name().startswith("Memcpy PtoP")]
    kernels = [e for e in events if not e.name().startswith("Memcpy")]
    ops = exe.plan.ops(exe.rank)
    failures = []
    wanted = PROFILED_REPLAYS * sum(isinstance(op, Copy) and link_of(op) is not None for op in ops)
    if len(copies) != wanted:
        failures.append(f"rank {exe.rank}: {len(copies)} copies to peers, wanted {wanted}")
    if len(kernels) != PROFILED_REPLAYS * sum(isinstance(op, (Gemm, Reduce)) for op in ops):
        failures.append(f"rank {exe.rank}: kernels {sorted({e.name()[:60] for e in kernels})}")
    overlapped = sum(
        any(
            k.start_ns() < c.start_ns() + c.duration_ns() and c.start_ns() < k.start_ns() + k.duration_ns()
            for k in kernels
        )
        for c in copies
    )
    if 2 * overlapped < len(copies):
        failures.append(f"rank {exe.rank}: {overlapped} of {len(copies)} copies ran under a GEMM")
    return failures


def different_plans(case: Case) -> str:
    """The error of each rank where rank 1 has another plan."""
    mine = dataclasses.replace(case, m=2 * case.m) if dist.get_rank() == 1 else case
    try:
        compile_plan(mine.plan(), config=case.config)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def on(case: Case, ranks: int) -> Case:
    """The case on a mesh of one side."""
    return dataclasses.replace(case, mesh=(ranks,))


def meshes(schedule: str, ranks: int) -> tuple[int, ...]:
    """A mesh that a schedule takes."""
    sides = 3 if "3d" in schedule else 2 if "2d" in schedule else 1
    return {1: (ranks,), 2: (2, ranks // 2), 3: (2, 1, ranks // 2) if ranks < 8 else (2, 2, 2)}[sides]


def cases(ranks: int) -> list[Case]:
    """Every schedule, with the values of all other axes spread over them."""
    found = []
    chance = random.Random(ranks)
    unequal = tuple(chance.randrange(0, 200) * 8 // 8 for _ in range(ranks - 1)) + (0,)
    axes: list[dict[str, Any]] = [
        {},
        {"chunks": 2, "beta": 1.0},
        {"dtype": "float16", "workspace": "bounded"},
        {"m": 389, "n": 328, "k": 456, "alpha": 2.0},  # rows are aligned, extents are ragged
        {"m": 130, "n": 75, "k": 61, "beta": -1.0},  # nothing is aligned
        {"dtype": "float8_e4m3fn", "chunks": 2},
        {"dtype": "float32", "m": 200, "n": 136, "k": 72},
        {"dtype": "tfloat32", "m": 256, "n": 256, "k": 128},
        {"partial_dtype": "float32", "chunks": 2},
        {"sync": "credit", "chunks": 2, "workspace": "bounded"},
        {"gemm_streams": 1, "wait_by": "kernel"},
        {"mechanism": "pull", "chunks": 2},
        {"chunks": 2, "merge_copies": True},
        {"mechanism": "store", "beta": 1.0},
        {"mechanism": "pull", "workspace": "bounded", "sync": "credit", "m": 389, "n": 328, "k": 456},
        {"l": 2, "m": 256, "n": 128, "k": 128},
    ]
    for number, schedule in enumerate(distgemm.list_schedules()):
        for turn in (0, 1, 2 + number % 3, 5 + number % 3, 8 + number % 8, 11 + number % 5):
            options = dict(axes[turn])
            if "chunks" in options and "chunks" not in schedule_options(schedule):
                options.pop("chunks")
            found.append(Case(schedule, meshes(schedule, ranks), config=None, **options))
    for schedule in ("all_gather_1d_tiling_cd_rotating_a", "reduce_scatter_1d_tiling_a_rotating_c"):
        rows = unequal if sum(unequal) else (8,) * ranks
        found.append(Case(schedule, (ranks,), m=sum(rows), rows=rows, config=None))
    return found


TO_HEADS = ("all_to_all_1d_rotating_d", "all_to_all_1d_pairwise_xor_d")
FROM_HEADS = ("all_to_all_1d_rotating_a", "all_to_all_1d_pairwise_xor_a")


def all_to_all_cases(ranks: int) -> list[Case]:
    """All-to-alls, for a power of two of ranks: equal and unequal heads and tokens, copies, chunks, and meshes."""
    mesh, found = (ranks,), list[Case]()
    rows = tuple(8 * (1 + 3 * rank % 5) for rank in range(ranks - 1)) + (0,)
    heads = tuple(64 * (1 + rank % 3) for rank in range(ranks))
    for schedules, mode in ((TO_HEADS, "n"), (FROM_HEADS, "k")):
        unequal: dict[str, Any] = {"m": sum(rows), "rows": rows, mode: sum(heads), f"{mode}_per_rank": heads}
        ways: list[dict[str, Any]] = [
            {"chunks": 2},
            {"config": None, **unequal},
            {"config": None, "chunks": 2, "chunk_mode": mode, "beta": 1.0, **unequal},
            {"config": None, "mechanism": "pull", "workspace": "bounded", "sync": "credit", "chunks": 2, **unequal},
            {"config": None, "mechanism": "store", "alpha": 2.0, **unequal},
            {"config": None, "m": 130, "n": 75, "k": 61},  # nothing is aligned
            {"provider": "cublas", "config": None, "chunks": 2},
        ]
        if mode == "k" or ranks == 2:  # else kernels that copy results from slots to D run beside GEMMs
            ways.append({"gemm_streams": 1, "wait_by": "kernel"})
        found += [Case(schedule, mesh, **way) for schedule in schedules for way in ways]
        if ranks > 2:
            found += [
                Case("tensor_parallel_2d_nested", (2, ranks // 2), across=across, inside=schedules[0], chunks=chunks)
                for across in schedules
                for chunks in (1, 2)
            ]
    for copies in (2, 4, 8)[: ranks.bit_length() - 1]:
        few = tuple(64 * (1 + rank // copies % 2) for rank in range(ranks))
        found += [
            Case(TO_HEADS[0], mesh, copies=copies),
            Case(TO_HEADS[0], mesh, copies=copies, config=None, n=sum(few) // copies, n_per_rank=few, chunks=2),
        ]
    return found


def one_shot_cases(ranks: int) -> list[Case]:
    """One-shot all-reduces of 1 to 64 tokens."""
    name, usual = "all_reduce_1d_one_shot_a", {"n": 512, "k": 64 * ranks}
    ways: list[dict[str, Any]] = [{"m": m} for m in (1, 2, 7, 8, 16, 33, 64)]
    ways += [
        {"m": 1, "beta": 1.0, "gemm_streams": 1, "wait_by": "kernel"},
        {"m": 3, "chunks": 2, "chunk_mode": "n", "alpha": 2.0},
        {"m": 16, "chunks": 2, "partial_dtype": "float32", "workspace": "bounded", "sync": "credit"},
        {"m": 5, "n": 75, "k": 61, "beta": -1.0},  # nothing is aligned
        {"m": 4, "k": ranks - 1, "beta": 1.0},  # the last rank has nothing to multiply
        {"m": 16, "mechanism": "pull", "chunks": 3, "beta": 1.0},
        {"m": 16, "mechanism": "store", "dtype": "float16"},
        {"m": 7, "dtype": "float32", "l": 2, "n": 136},
        {"m": 32, "provider": "cublas"},
    ]
    return [Case(name, (ranks,), config=None, **(usual | way)) for way in ways]


def equal_bits(cases: list[Case]) -> list[str]:
    """Digests of D of cases on random numbers, to compare between ranks: of an eager call, then of a replayed one."""
    found = []
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        data.integers = False
        digests = []
        for _ in range(3):  # the second call records a graph
            data.draw(9000 + number)
            d = data.call(exe).contiguous().view(torch.uint8).cpu()
            digests.append(f"{case}: {hashlib.sha256(d.numpy().tobytes()).hexdigest()}")
        found += [digests[0], digests[-1]]
    return found


def bounded_error(cases: list[Case]) -> list[str]:
    """Failures of cases on random numbers, within a bound: roundings of D and of each partial sum, and additions."""
    failures = []
    for number, case in enumerate(cases):
        exe, data = compiled(case)
        data.integers = False
        wanted, magnitude = data.draw(7000 + number), data.magnitude
        found = data.call(exe).double()
        problem = exe.plan.problem
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
        addition = {"float8_e4m3fn": 2.0**-11, "tfloat32": 2.0**-9}.get(problem.dtype, problem.k * 2.0**-23)
        allowed = rounding[problem.out_dtype] * wanted.abs() + addition * magnitude
        # Each rank's term is rounded at most once on its way.
        allowed += exe.plan.world_size * rounding[problem.partial_dtype] * magnitude
        excess = ((found - wanted).abs() / (allowed + 1e-30)).max().item() if wanted.numel() else 0.0
        if not excess <= 1:
            failures.append(f"rank {exe.rank}: {excess:.2f} times the bound: {case}")
    return failures


def run_all(checks: list[tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """The result of each function by its name; one group of processes serves many tests."""
    found = {}
    for function, arguments in checks:
        start = time.monotonic()
        found[function.__name__] = function(*arguments)
        if dist.get_rank() == 0:
            print(f"{function.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    return found
