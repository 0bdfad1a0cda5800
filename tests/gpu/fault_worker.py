"""What each rank does in the tests of faults: ranks that stop, end or fail, and calls on several streams."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distgemm
from distgemm.gemm.streams import new_stream
from distgemm.runtime.cuda import CudaExecutable, ReplayTimeoutError
from distgemm.runtime.cuda.memops import mem_ops, wait_for
from distgemm.runtime.cuda.order import CallOrder
from distgemm.runtime.cuda.side_queue import SideQueue
from distgemm.runtime.cuda.workspace import FLAG_BYTES
from distgemm.runtime.launch import _shared  # noqa: PLC2701  (launch would stop the ranks that are to survive)
from tests.gpu.cuda_worker import CONFIG, Case, Data, compile_plan, compiled

GROUP_TIMEOUT_S = 60.0
SPAWN_TIMEOUT_S = 90.0
MANY_CALLS = 100_000
GATHER = "all_gather_1d_tiling_cd_rotating_a"


def spawn(folder: Path, ranks: int, function: Callable[..., Any], *args: Any, lost: int = -1) -> dict[int, Any]:
    """What the ranks return, by rank. None is stopped because another one has ended; rank ``lost`` is not awaited."""
    context = torch.multiprocessing.get_context("spawn")
    every = [context.Process(target=_run, args=(str(folder), ranks, rank, function, args)) for rank in range(ranks)]
    for process in every:
        process.start()
    deadline = time.monotonic() + SPAWN_TIMEOUT_S
    for rank, process in enumerate(every):
        if rank != lost:
            process.join(max(0.1, deadline - time.monotonic()))
    for process in every:
        if process.is_alive():
            process.kill()
            process.join()
    return {rank: json.loads(path.read_text()) for rank in range(ranks) if (path := folder / f"{rank}.json").exists()}


def _run(folder: str, ranks: int, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(_shared(rank))
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    found = function(*args)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a rank that has lost others does not wait for them in destroy_process_group


@contextmanager
def noting(found: dict[str, Any]) -> Iterator[None]:
    """Note a ReplayTimeoutError and when it came."""
    start = time.monotonic()
    try:
        yield
    except ReplayTimeoutError as error:
        found["error"] = str(error)
    found["seconds"] = time.monotonic() - start


class Loop:
    """Calls with inputs that change, and what is computed behind them.

    Attributes:
        behind: sums of D, queued behind each call since all calls were known to have ended.
        wanted: for each of them, the sum that is right.
    """

    def __init__(self, exe: CudaExecutable, data: Data) -> None:
        self.exe, self.data = exe, data
        self.sums, self.inputs = [], []
        for seed in range(3):  # two buffers: what an earlier replay left is of another input
            self.sums.append(data.draw(seed).sum().item())
            self.inputs.append({name: data.shards[name].clone() for name in "ABC"})
        self.behind: list[torch.Tensor] = []
        self.wanted: list[float] = []
        self.number = 0

    def run(self, count: int) -> None:
        """Make so many calls."""
        for _ in range(count):
            which = self.number % 3
            self.number += 1
            for name, given in self.inputs[which].items():
                self.data.shards[name].copy_(given)
            self.data.call(self.exe)
            self.behind.append(self.data.shards["D"].double().sum())
            self.wanted.append(self.sums[which])
            if self.number % 8 == 0:
                torch.cuda.synchronize()
                self.behind, self.wanted = [], []


def lose_a_rank(case: Case, victim: int, after: int, how: str) -> dict[str, Any]:
    """A rank is killed, or stops for ever, after some replays. The others report what they raise."""
    exe, data = compiled(case, **({"timeout": 3.0} if how == "SIGSTOP" else {}))
    loop = Loop(exe, data)
    found: dict[str, Any] = {}
    with noting(found):
        loop.run(8 + after)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), getattr(signal, how))
        found["lost_at"] = time.monotonic()
        loop.run(MANY_CALLS)
    torch.cuda.synchronize()
    found["seconds"] = time.monotonic() - found.pop("lost_at", math.inf)
    time.sleep(0.5)  # the watchdog fills D once the calls have ended
    found["d_is_nan"] = bool(data.shards["D"].isnan().all())
    found["behind"] = [
        "nan" if math.isnan(one) else "right" if one == wanted else "wrong"
        for one, wanted in zip([one.item() for one in loop.behind], loop.wanted, strict=False)
    ]
    try:
        data.call(exe)
    except ReplayTimeoutError as again:
        found["called_again"] = str(again)
    return found


def check_a_lost_rank(folder: Path, case: Case, victim: int, after: int, how: str) -> None:
    """The other rank raises, within seconds where the process has ended; what it computes is right or NaN."""
    found = spawn(folder, 2, lose_a_rank, case, victim, after, how, lost=victim)
    assert set(found) == {1 - victim}
    (one,) = found.values()
    assert case.schedule in one["error"] and f"on rank {1 - victim} of 2" in one["error"], one
    assert f"rank {victim}" in one["error"] or f"ranks [{victim}]" in one["error"], one
    assert one["seconds"] < 20
    if how == "SIGKILL":
        assert f"the processes of ranks [{victim}] have ended" in one["error"], one
    assert one["d_is_nan"] and "wrong" not in one["behind"] and one["behind"][-1] == "nan", one
    assert "no executable on this workspace can be called any more" in one["called_again"]


def come_back(case: Case, seconds: float, timeout: float | None) -> dict[str, Any]:
    """Rank 1 stops for some seconds, and goes on: late, or after rank 0 has given up."""
    exe, data = compiled(case, **({} if timeout is None else {"timeout": timeout}))
    wanted = data.draw(0)
    found: dict[str, Any] = {"wrong": 0}
    with noting(found):
        for number in range(40):
            if number == 20 and dist.get_rank() == 1:
                wake = f"import time, os, signal; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
                subprocess.Popen([sys.executable, "-c", wake])
                os.kill(os.getpid(), signal.SIGSTOP)
            data.shards["D"].fill_(float("nan"))
            data.call(exe)
            if number % 10 == 9:
                torch.cuda.synchronize()
                found["wrong"] += int((data.shards["D"].double() != wanted).sum())
    return found


def gather_alone() -> dict[str, Any]:
    """Rank 1 makes no second gather: rank 0 raises in its block, or as it asks for the next chunk."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = distgemm.make_plan(distgemm.GemmProblem(64 * ranks, ranks, 256), GATHER, ranks, sync="barrier", chunks=2)
    exe = compile_plan(plan, provider="cublas", gemm_streams=1, timeout=4.0)
    a = torch.full((64, 256), rank + 1.0, device="cuda", dtype=torch.bfloat16)
    found: dict[str, Any] = {"before": [chunk.float().mean().item() for _, chunk in exe.gather(a)], "chunks": []}
    torch.cuda.synchronize()
    with noting(found):
        if rank == 1:
            time.sleep(9.0)
        for _, chunk in exe.gather(a):
            found["chunks"].append(chunk.float().mean().item())
    try:
        next(exe.gather(a))
    except ReplayTimeoutError as error:
        found["called_again"] = str(error)
    return found


def late_backward() -> dict[str, Any]:
    """Rank 1 makes no backward pass: rank 0 raises in the thread that called backward, which makes no call itself."""
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with _patient(4.0):
        y = distgemm.all_gather_matmul(a, b, group=dist.group.WORLD, schedule=GATHER)
        torch.autograd.backward(y.float().sum())  # makes the executables of the backward pass
        y = distgemm.all_gather_matmul(a, b, group=dist.group.WORLD, schedule=GATHER)
        torch.cuda.synchronize()
        found: dict[str, Any] = {}
        with noting(found):
            if dist.get_rank() == 0:
                y.float().sum().backward()
            for _ in range(1000):
                time.sleep(0.02)
    return found


def busy_queues(count: int) -> dict[str, bool]:
    """Whether a context of its own reads and sets flags for which so many streams and branches of a graph wait."""
    device = torch.device("cuda", torch.cuda.current_device())
    flags = torch.zeros(2 * count, dtype=torch.int32, device=device)
    addresses = [flags.data_ptr() + FLAG_BYTES * number for number in range(2 * count)]
    streams = [new_stream(device) for _ in range(2 * count)]
    copy = torch.full_like(flags, 7, device="cpu").pin_memory()
    x = torch.zeros((), dtype=torch.int32, device=device)
    x.add_(0)  # loads the kernel
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def wait_on(used: list[torch.cuda.Stream], awaited: list[int]) -> None:
        for stream, address in zip(used, awaited, strict=True):
            with torch.cuda.stream(stream):
                mem_ops([wait_for(address)], stream.cuda_stream)
                x.add_(0)

    with torch.cuda.stream(main):
        graph.capture_begin(capture_error_mode="thread_local")
        for stream in streams[count:]:
            stream.wait_stream(main)
        wait_on(streams[count:], addresses[count:])
        for stream in streams[count:]:
            main.wait_stream(stream)
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    wait_on(streams[:count], addresses[:count])
    ends = [stream.record_event() for stream in (*streams[:count], main)]
    queue = SideQueue(device, own_context=True)
    queue.copy(copy, flags)
    found = {"read": queue.ended(5.0) and not copy.any().item()}
    queue.set_flags(addresses, 1)
    found["written"] = queue.ended(5.0)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and not all(end.query() for end in ends):
        time.sleep(1e-3)
    found["ended"] = all(end.query() for end in ends)
    if not found["ended"]:  # the end of the process would wait for them
        print(f"with {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')} queues: {found}", flush=True)
        os._exit(1)
    return found


@contextmanager
def _patient(seconds: float) -> Iterator[None]:
    """All executables of torch functions get a short timeout, and one tile configuration."""
    from tests.gpu import torch_worker

    before, torch_worker.TIMEOUT_S = torch_worker.TIMEOUT_S, seconds
    try:
        with torch_worker.quick():
            yield
    finally:
        torch_worker.TIMEOUT_S = before


def streams(cases: list[Case], calls: int) -> list[str]:
    """Executables of two groups, called on three streams and in graphs that are replayed on any of them."""
    common = random.Random(7)
    second = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    made = []
    for group in (dist.group.WORLD, second):
        for case in cases:
            exe = compile_plan(case.plan(), **case.execution_options(), group=group)
            data = Data(case, exe.plan, exe.device)
            made.append((exe, data, data.draw(len(made))))
    side = [torch.cuda.Stream() for _ in range(3)]
    graphs = []
    for exe, data, _ in made:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side[0]):
            graph.capture_begin(capture_error_mode="thread_local")
            data.call(exe)
            graph.capture_end()
        graphs.append(graph)
    torch.cuda.synchronize()
    wrong = torch.zeros(len(made), dtype=torch.int64, device="cuda")
    ends: dict[int, Any] = {}
    for _ in range(calls):
        which, stream = common.randrange(len(made)), side[common.randrange(3)]
        exe, data, wanted = made[which]
        with torch.cuda.stream(stream):
            if which in ends:
                stream.wait_event(ends[which])  # its tensors are the same in each call
            data.shards["D"].fill_(float("nan"))
            if common.random() < 0.3:
                graphs[which].replay()
            else:
                data.call(exe)
            wrong[which] += (data.shards["D"].double() != wanted).sum()
            ends[which] = stream.record_event()
    torch.cuda.synchronize()
    return [f"rank {dist.get_rank()}: {wrong.tolist()} wrong elements"] * bool(wrong.any())


def order_of_streams(rounds: int) -> list[str]:
    """Whether calls on two streams, eager and in graphs, follow one another as CallOrder says. It needs one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    order, failures = CallOrder(device), []
    x = torch.zeros((), dtype=torch.int64, device=device)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def call(digit: str, captured: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        (order.begin_captured if captured else order.begin)(stream)
        torch.cuda._sleep(4_000_000)  # about 2 ms
        x.mul_(10).add_(int(digit))
        (order.end_captured if captured else order.end)(stream)

    graphs = {}
    for digits in ("1", "12", "121"):  # one, two and three calls
        graphs[digits] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams[0]):
            graph.capture_begin(capture_error_mode="thread_local")
            for digit in digits:
                call(digit, captured=True)
            graph.capture_end()
    torch.cuda.synchronize()
    rng = random.Random(0)
    for number in range(rounds):
        x.zero_()
        torch.cuda.synchronize()
        wanted = ""
        for _ in range(6):
            digits = rng.choice([*graphs, "3"])
            with torch.cuda.stream(streams[rng.randrange(2)]):
                if digits in graphs:
                    graphs[digits].replay()
                else:
                    call(digits)
            wanted += digits
        torch.cuda.synchronize()
        if x.item() != int(wanted):
            failures.append(f"round {number}: {x.item()} instead of {wanted}")
    return failures


def cost_of_order(calls: int = 50) -> dict[str, float]:
    """Microseconds of a captured call of one rank, with the nodes that keep the order and without."""
    exe, data = compiled(Case(GATHER, (1,), m=256, n=256, k=256, config=CONFIG))
    data.draw(0)
    data.call(exe)

    def graph_of() -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(calls):
                data.call(exe)
            graph.capture_end()
        return graph

    def time_of(graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(20):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        return best * 1e3 / calls

    ordered = graph_of()
    begin, end = CallOrder.begin_captured, CallOrder.end_captured
    CallOrder.begin_captured = CallOrder.end_captured = lambda self, stream: None  # type: ignore[method-assign]
    try:
        plain = graph_of()
    finally:
        CallOrder.begin_captured, CallOrder.end_captured = begin, end  # type: ignore[method-assign]
    return {"ordered": time_of(ordered), "plain": time_of(plain)}
