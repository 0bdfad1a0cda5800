"""The CUDA runtime across hosts, emulated: hosts share no memory and no flags, and messages wait in no buffer."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

import distgemm
from distgemm.gemm import get_provider
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.plan.exchanges import Exchange
from distgemm.plan.ops import Copy, Signal, Wait, link_of
from distgemm.runtime.cuda import nccl
from distgemm.runtime.cuda.binding import Binder
from distgemm.runtime.cuda.lowering import GEMM_STREAM, lower
from distgemm.runtime.cuda.lowering.actions import exchanges_of
from distgemm.runtime.cuda.watched import awaited
from distgemm.runtime.cuda.workspace import FlagValues, Stage, Step
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import schedule_mesh_rank, schedule_options
from tests.gpu import test_hosts
from tests.unit.cuda_emulation import Data, Emulated, Task, machine_of, record_launches, replay_each, run
from tests.unit.test_cuda_watchdog import Freeing

RING, DIRECT = "all_gather_1d_ring_a", "all_gather_1d_tiling_cd_rotating_a"
CHAIN, OTHER_CHAIN = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_tiling_b_rotating_c"
PAIRWISE, ALL_REDUCE = "reduce_scatter_1d_pairwise_a", "all_reduce_1d_tiling_a_rotating_c"
PAIRS = (
    (RING, DIRECT),
    (DIRECT, RING),
    (CHAIN, CHAIN),
    (PAIRWISE, CHAIN),
    (CHAIN, PAIRWISE),
    (RING, OTHER_CHAIN),
    (ALL_REDUCE, ALL_REDUCE),
    ("all_reduce_1d_one_shot_a", "all_reduce_1d_one_shot_a"),
    ("all_to_all_1d_rotating_d", "all_to_all_1d_rotating_d"),
    ("all_to_all_1d_rotating_a", "all_to_all_1d_rotating_a"),
    (RING, "all_to_all_1d_rotating_d"),
    (CHAIN, "all_to_all_1d_rotating_a"),
)
"""Schedules across hosts and inside."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    return record_launches(monkeypatch)


def run_replays(every: list[distgemm.Plan], order: random.Random, recorded: list[Task], queues: bool) -> None:
    """:func:`replay_each`, after which nothing is left in a channel."""
    machine = replay_each(every, order, recorded, queues)
    assert machine.channels
    for (src, dst), channel in machine.channels.items():
        assert every[0].across(src, dst)
        assert channel.moved == len(channel.sent) == len(channel.awaited)


def plans_of(schedule: str, mesh: tuple[int, ...], of_host: int, **options: Any) -> list[distgemm.Plan]:
    chunked = {"chunks": 2} if "chunks" in schedule_options(schedule) else {}
    found = []
    for shape in ({"m": 22, "n": 21, "k": 19}, {"m": 13, "n": 16, "k": 12, "l": 2}):
        problem = distgemm.GemmProblem(**shape, dtype="float32")
        for modes in ({}, {"sync": "barrier"}, {"workspace": "bounded"}, {"sync": "barrier", "workspace": "bounded"}):
            found.append(
                distgemm.make_plan(problem, schedule, mesh=mesh, ranks_per_host=of_host, **modes, **chunked, **options)
            )
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("queues", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("of_host", [1, 2])
@pytest.mark.parametrize("schedule", distgemm.list_schedules())
def test_every_schedule_is_right_on_two_or_more_hosts(
    schedule: str, of_host: int, queues: bool, recorded: list[Task]
) -> None:
    mesh = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}[schedule_mesh_rank(schedule)]
    order = random.Random(f"{schedule} {of_host} {queues}")
    run_replays(plans_of(schedule, mesh, of_host), order, recorded, queues)


@pytest.mark.sample(3)
@pytest.mark.parametrize("queues", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=" across ".join)
def test_nested_schedules_are_right_on_hosts(
    pair: tuple[str, str], mesh: tuple[int, int], queues: bool, recorded: list[Task]
) -> None:
    across, inside = pair
    order = random.Random(f"{pair} {mesh} {queues}")
    names = {"across": across, "inside": inside}
    run_replays(plans_of("tensor_parallel_2d_nested", mesh, mesh[1], **names), order, recorded, queues)


def test_scales_cross_hosts_with_their_tiles(recorded: list[Task]) -> None:
    problem = distgemm.GemmProblem(22, 21, 19, dtype="float8_e4m3fn", out_dtype="float32", scaling="rowwise")
    names = {"across": RING, "inside": DIRECT}
    every = [
        distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=2, sync=sync, **names)
        for sync in ("credit", "barrier")
    ]
    run_replays(every, random.Random(0), recorded, queues=False)


@pytest.mark.parametrize("pair", PAIRS, ids=" across ".join)
def test_only_exchanges_cross_hosts(pair: tuple[str, str]) -> None:
    """On a stream of their own, in the order of rounds; the end of a replay comes behind them."""
    names = dict(zip(("across", "inside"), pair, strict=True))
    problem = distgemm.GemmProblem(m=64, n=64, k=64)
    plan = distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=2, chunks=2, **names)
    for rank in range(4):
        actions = lower(plan, rank, ExecutionConfig(gemm_streams=2))
        assert exchanges_of(actions)
        for action in actions:
            for op in action.ops:
                if isinstance(op, Exchange):
                    assert action.ops == (op,) and action.stream == GEMM_STREAM + 3
                    assert all(plan.across(rank, peer) for peer in op.peers)
                elif isinstance(op, Copy):
                    link = link_of(op)
                    assert link is None or not plan.across(*link)
                elif isinstance(op, (Signal, Wait)):
                    assert not plan.across(rank, op.flag.rank if isinstance(op, Signal) else op.peer)
        # What comes before FINISH, by the order of streams and by events.
        (finish,) = (number for number, action in enumerate(actions) if action.step is Step.FINISH)
        before, found = [finish], {finish}
        for number in before:
            same = [at for at in range(number) if actions[at].stream == actions[number].stream][-1:]
            new = {*actions[number].after, *same} - found
            found |= new
            before += new
        assert {at for at, action in enumerate(actions) if set(action.ops) & set(exchanges_of(actions))} <= found
        rounds = [op.round for op in exchanges_of(actions)]
        assert rounds == sorted(rounds)


def test_what_does_not_work_across_hosts_is_refused_by_name() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), DIRECT, 4, ranks_per_host=2)
    ways: list[tuple[dict[str, Any], str]] = [
        ({"execution": "per_tile"}, "execution='per_tile'"),
        ({"wait_by": "kernel", "gemm_streams": 1}, "wait_by='kernel'"),
        ({"merge_copies": True}, "merge_copies=True"),
    ]
    for options, named in ways:
        with pytest.raises(ValueError, match=f"on hosts of 2 ranks takes execution='multi_kernel', .* got {named}: "):
            lower(plan, 0, ExecutionConfig(**options))


def test_the_watchdog_names_rank_and_host(recorded: list[Task]) -> None:
    plan = distgemm.make_plan(
        distgemm.GemmProblem(64, 64, 64),
        "tensor_parallel_2d_nested",
        mesh=(2, 2),
        ranks_per_host=2,
        across=RING,
        inside=DIRECT,
        sync="barrier",
    )
    one = Emulated(plan, 1, machine_of([plan]).workspaces[1])
    flags = [1] * 64

    def found(exchanged: int, plan_flags: list[int]) -> tuple[str, list[int]]:
        return awaited(one.exe, FlagValues(0, 1, Stage.BODY, [1] * 4, [1] * 4, plan_flags, exchanged))

    text, ranks = found(0, flags)
    assert text.startswith("it waits for rank 3 of host 1 at rank 1 round ") and ": Exchange sends " in text
    assert set(ranks) == {3}
    text, ranks = found(1, [0] * 64)
    assert text.startswith("it waits for rank 0 at rank 1 iteration ") and set(ranks) == {0}
    assert found(1, flags)[0] == "all that it waits for has come, but a kernel or a copy has not ended"


def test_a_rank_that_does_not_come_holds_its_peers_up(recorded: list[Task]) -> None:
    """Rank 3 stops before its first exchange: rank 1 of the other host does not end, and nothing else moves."""
    problem = distgemm.GemmProblem(64, 64, 64, dtype="float32")
    names = {"across": RING, "inside": DIRECT}
    plan = distgemm.make_plan(problem, "tensor_parallel_2d_nested", mesh=(2, 2), ranks_per_host=2, **names)
    machine = machine_of([plan])
    data = Data(plan, 0)
    todo = []
    for rank in range(4):
        one = Emulated(plan, rank, machine.workspaces[rank])
        todo.append([(one, one.tasks(data.calls[rank], recorded, 0))])
    with pytest.raises(pytest.fail.Exception, match="nothing moves"):
        run(machine, todo, random.Random(0), queues=False, halts={3: 0})
    assert machine.channels[1, 3].moved == 0 and machine.channels[0, 2].moved == 1


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("pair", PAIRS, ids=" across ".join)
def test_queued_calls_give_their_result_or_nan_when_a_rank_stops(
    pair: tuple[str, str], seed: int, recorded: list[Task]
) -> None:
    """A rank stops anywhere. The others abort their messages one after the other; each element is right or NaN."""
    order = random.Random(f"{pair} {seed}")
    problem = distgemm.GemmProblem(24, 24, 48, dtype="float32")
    names = dict(zip(("across", "inside"), pair, strict=True))
    options = {"mesh": (2, 2), "ranks_per_host": 2, "sync": "barrier", **names}
    plan = distgemm.make_plan(problem, "tensor_parallel_2d_nested", **options)
    machine, silent = machine_of([plan]), order.randrange(4)
    data = [Data(plan, 10 * seed + replay) for replay in range(6)]
    todo: list[list[Any]] = [[] for _ in range(4)]
    for rank in range(4):
        one = Emulated(plan, rank, machine.workspaces[rank])
        for replay, drawn in enumerate(data[: 6 - order.randrange(3) * (rank != silent)]):
            drawn.calls[rank].shards.pop("gathered", None)
            todo[rank].append((one, one.tasks(drawn.calls[rank], recorded, replay % 2)))
    freeing = Freeing(machine, todo, silent)
    actions = len(todo[silent][0][0].actions) + 1
    run(machine, todo, order, False, halts={silent: order.randrange(1, 2 * actions)}, stuck=freeing.step)
    lost = 0
    for replay, drawn in enumerate(data):
        for rank in set(range(4)) - {silent}:
            if replay < len(todo[rank]):
                found, wanted = drawn.calls[rank].out.double(), drawn.wanted[rank]
                assert (found.isnan() | (found == wanted)).all(), (replay, rank)
                lost += int(found.isnan().any())
    assert lost and machine.aborted == set(range(4)) - {silent}


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4)], ids=str)
def test_providers_support_all_that_the_cases_for_gpus_multiply(mesh: tuple[int, int]) -> None:
    asked = 0
    with patch.object(CutlassProvider, "arch", "90a"):
        for case in test_hosts.cases(mesh):
            plan, config = case.plan(), ExecutionConfig(**case.execution_options())
            for rank in range(plan.world_size):
                binder = Binder(plan, rank, torch.device("cuda", 0), config)
                for spec in binder.specs(c=bool(case.beta)):
                    status = get_provider(binder.provider).supports(spec, binder.config)
                    assert status, (case, status.reason)
                    asked += 1
                binder.sources(c=bool(case.beta))
    assert asked > len(test_hosts.cases(mesh))


def test_flags_of_a_host(recorded: list[Task]) -> None:
    """Steps of the protocol name this host's ranks only, and a replay begins to count its exchanges anew."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), DIRECT, 6, ranks_per_host=3)
    buffer = machine_of([plan]).workspaces[4].buffers[0]
    assert buffer.peers == [3, 5]
    steps = buffer.steps(7, [])
    assert buffer.exchanged(0) in steps[Step.ENTRY]
    assert {op.address >> 32 for ops in steps.values() for op in ops} == {3, 4, 5}
    one = machine_of([distgemm.make_plan(distgemm.GemmProblem(64, 64, 64), DIRECT, 6)]).workspaces[4].buffers[0]
    assert one.exchanged(0) not in one.steps(7, [])[Step.ENTRY] and one.peers == [0, 1, 2, 3, 5]


def test_nccl_is_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.library.cache_clear()
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl.so.no")
    with pytest.raises(RuntimeError, match=r"messages across hosts go by NCCL, and libnccl.so.no cannot be loaded"):
        nccl.library()


def test_messages_are_grouped_and_errors_end_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages between the start and the end of one group: bytes, in order; also where one is refused."""
    called: list[Any] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            def function(*arguments: Any) -> Any:
                if name == "ncclGetErrorString":
                    return b"invalid usage"
                called.append((name, *arguments))
                return 5 if name == "ncclRecv" and arguments[3] == 9 else 0

            return function

    monkeypatch.setattr(nccl, "library", Library)
    communicator = nccl.Communicator.__new__(nccl.Communicator)
    communicator._lock, communicator._handle, communicator._aborted = threading.Lock(), ctypes.c_void_p(77), False
    memory = torch.zeros(2, 3, dtype=torch.bfloat16)
    sends = [nccl.Message(2, memory), nccl.Message(3, memory[1])]
    communicator.exchange(sends, [nccl.Message(2, memory[0])], 55)
    names = [name for name, *_ in called]
    assert names == ["ncclGroupStart", "ncclSend", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclCommGetAsyncError"]
    assert [(size, kind, peer, stream) for _, _, size, kind, peer, _, stream in called[1:4]] == [
        (12, nccl.UINT8, 2, 55),
        (6, nccl.UINT8, 3, 55),
        (6, nccl.UINT8, 2, 55),
    ]
    assert [address for _, address, *_ in called[1:4]] == [memory.data_ptr(), memory[1].data_ptr(), memory.data_ptr()]
    called.clear()
    with pytest.raises(RuntimeError, match=r"NCCL: ncclRecv: invalid usage \(5\)"):
        communicator.exchange([], [nccl.Message(9, memory)], 55)
    assert called[-1] == ("ncclGroupEnd",)
    communicator.abort()
    communicator.abort()
    assert [name for name, *_ in called].count("ncclCommAbort") == 1
    with pytest.raises(RuntimeError, match="the communicator for messages across hosts was aborted"):
        communicator.exchange([], [], 55)


def test_an_exchange_that_does_not_end_is_aborted_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the communicator back first: nothing calls NCCL with a communicator that is gone."""
    called: list[str] = []
    waits = threading.Event()

    class Library:
        def __getattr__(self, name: str) -> Any:
            def function(*arguments: Any) -> int:
                called.append(name)
                if name == "ncclCommGetAsyncError":
                    arguments[1]._obj.value = nccl.IN_PROGRESS
                    waits.set()
                return nccl.IN_PROGRESS if name == "ncclGroupEnd" else nccl.SUCCESS

            return function

    monkeypatch.setattr(nccl, "library", Library)
    communicator = nccl.Communicator.__new__(nccl.Communicator)
    communicator._lock, communicator._handle, communicator._aborted = threading.Lock(), ctypes.c_void_p(77), False
    errors: list[str] = []

    def exchange() -> None:
        try:
            communicator.exchange([nccl.Message(1, torch.zeros(1))], [], 55)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=exchange)
    thread.start()
    assert waits.wait(10) and thread.is_alive()
    communicator.abort()
    thread.join(10)
    assert errors == ["the communicator for messages across hosts was aborted"]
    assert called.count("ncclCommAbort") == 1 and called[-1] == "ncclCommAbort"


def test_the_configuration_of_nccl_is_its_first_one() -> None:
    """size_t size; unsigned magic, version; int blocking: at these places in every version of ncclConfig_t."""
    config = nccl._Config(ctypes.sizeof(nccl._Config), nccl.CONFIG_MAGIC, nccl.CONFIG_VERSION, 0)
    raw = bytes(config)
    assert raw[:8] == len(raw).to_bytes(8, "little") and len(raw) == 24
    assert raw[8:20] == b"".join(each.to_bytes(4, "little") for each in (0xCAFEBEEF, 2 * 10000 + 14 * 100, 0))


def test_exchanges_are_counted_in_order(recorded: list[Task]) -> None:
    """The flag that the watchdog reads says how many exchanges have ended, also with ids in any order."""
    plan = test_hosts.mixed((2, 4))[0].plan()
    for rank in range(plan.world_size):
        one = Emulated(plan, rank, machine_of([plan]).workspaces[rank])
        every = exchanges_of(one.actions)
        assert [one.binder.exchange_numbers[op.id] for op in every] == [*range(1, len(every) + 1)]
