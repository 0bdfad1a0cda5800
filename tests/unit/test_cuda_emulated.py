"""The CUDA runtime, emulated: values, deadlocks, and the protocol by which executables share a workspace."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch

import distgemm
from distgemm.gemm.flags import MemOp
from distgemm.plan.ops import Gemm
from distgemm.plan.scaling import OperandScaling, Scaling
from distgemm.runtime.cuda import memops
from distgemm.runtime.cuda.workspace import FLAG_BYTES, first_plan_flag
from distgemm.runtime.executable import WaitBy
from distgemm.schedulers import schedule_options
from tests.multiprocess.worker import own_batches, own_columns
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    CHAINS,
    GATHERS,
    PAIRWISE,
    Data,
    Emulated,
    Machine,
    Task,
    machine_of,
    plans,
    replay_each,
    run,
)

# --- a kernel for each GEMM -----------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("queues", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("schedule", distgemm.list_schedules())
def test_every_schedule_is_right_in_every_order(schedule: str, queues: bool, recorded: list[Task]) -> None:
    """Each plan is replayed three times, with other executables of the same workspace in between."""
    waits: tuple[WaitBy, ...] = ("memory_op", "kernel")
    machine = replay_each(plans(schedule, 4), random.Random(schedule), recorded, queues, waits)
    for workspace in machine.workspaces:
        flags = {address: value for address, value in machine.flags.items() if address >> 32 == workspace.rank}
        left = [flags.pop(buffer.left(workspace.rank, peer)) for buffer in workspace.buffers for peer in buffer.peers]
        assert set(left) <= {1} and set(flags.values()) <= {0}


@pytest.mark.sample(8)
@pytest.mark.parametrize("scaling", ["tensorwise", "tensorwise-shard", "rowwise", "rowwise-shard", "blockwise"])
@pytest.mark.parametrize("schedule", distgemm.list_schedules())
def test_every_schedule_is_right_with_scales(schedule: str, scaling: str, recorded: list[Task]) -> None:
    """Scales are powers of two and elements small integers, so products are exact."""
    order, ranks = random.Random(schedule), 4
    sides = 3 if "3d" in schedule else 2 if "2d" in schedule else 1
    mesh = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}[sides]
    blocks = 7 * 128 if scaling == "blockwise" else 0
    problem = distgemm.GemmProblem(
        22, blocks + 21, blocks + 19, dtype="float8_e4m3fn", out_dtype="float32", scaling=scaling
    )
    chunked = {"chunks": 2} if "chunks" in schedule_options(schedule) else {}
    every = [
        distgemm.make_plan(problem, schedule, mesh=mesh, mechanism=mechanism, workspace=workspace, sync=sync, **chunked)
        for mechanism, workspace, sync in (
            ("push", "full", "barrier"),
            ("pull", "full", "barrier"),
            ("store", "bounded", "credit"),
            ("push", "bounded", "barrier"),
        )
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for replay, plan in enumerate(every * 2):
        buffer = order.randrange(2)
        data.append(Data(plan, replay, alpha=2.0, beta=float(replay % 2)))
        for rank in range(ranks):
            merged = {"merge_copies": replay % 2 == 0}
            one = Emulated(plan, rank, machine.workspaces[rank], 1 + replay % 2, **merged)
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, buffer)))
    run(machine, todo, order, queues=bool(order.randrange(2)))
    for drawn in data:
        drawn.check()


def test_scalings_without_kernels_are_refused() -> None:
    part = OperandScaling(1, 128)
    others = [Scaling(part, OperandScaling(*each)) for each in ((1, None), (64, 128), (128, 64))]
    others.append(Scaling(OperandScaling(1, 128, swizzled=True), part))
    for scaling in ("mxfp8", *others):
        problem = distgemm.GemmProblem(512, 256, 512, dtype="float8_e4m3fn", scaling=scaling)
        plan = distgemm.make_plan(problem, GATHERS[0], 2)
        with pytest.raises(ValueError, match="scales of 1x128 and 128x128 blocks of both A and B, and the problem has"):
            Emulated(plan, 0, machine_of([plan]).workspaces[0])
    batches = distgemm.GemmProblem(8, 8, 8, 2, dtype="float8_e4m3fn", scaling="rowwise")
    plan = distgemm.make_plan(batches, GATHERS[0], 2)
    with pytest.raises(ValueError, match="kernels take scales of one batch, got l = 2"):
        Emulated(plan, 0, machine_of([plan]).workspaces[0])


def test_a_rank_gathers_its_own_rows_and_batches_of_a(recorded: list[Task]) -> None:
    for schedule, batches, shape in ((own_batches((3,)), 3, (1, 5, 7)), (own_columns((3,)), 1, (1, 1, 7))):
        problem = distgemm.GemmProblem(5, 6, 7, batches, dtype="float32")
        every = [
            distgemm.make_plan(problem, schedule, mechanism=mechanism)  # type: ignore[arg-type]
            for mechanism in ("push", "pull")
        ]
        assert Data(every[0], 0).calls[2].shards["gathered"].shape == shape
        replay_each(every, random.Random(0), recorded, False)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_shot_all_reduces_of_few_tokens_are_right(ranks: int, recorded: list[Task]) -> None:
    """Also where the last rank has nothing to multiply, and with rows that are padded in slots."""
    order = random.Random(ranks)
    ways: list[tuple[int, int, int, dict[str, Any]]] = [
        (1, 16, 8 * ranks, {}),
        (1, 7, ranks - 1, {"mechanism": "pull"}),
        (5, 9, 5 * ranks, {"chunks": 2, "chunk_mode": "n", "workspace": "bounded"}),
        (16, 21, 3 * ranks - 1, {"chunks": 3, "mechanism": "store"}),
        (64, 8, 2 * ranks, {"chunks": 2, "sync": "barrier"}),
    ]
    every = [
        distgemm.make_plan(distgemm.GemmProblem(m, n, k, dtype="float32"), "all_reduce_1d_one_shot_a", ranks, **options)
        for m, n, k, options in ways
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for replay, plan in enumerate(every * 2):
        buffer = order.randrange(2)
        data.append(Data(plan, replay, alpha=2.0, beta=float(replay % 2), bias=replay % 3 == 0))
        for rank in range(ranks):
            one = Emulated(plan, rank, machine.workspaces[rank], 1, wait_by=("memory_op", "kernel")[replay % 2])
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, buffer)))
    run(machine, todo, order, queues=bool(ranks % 2))
    for drawn in data:
        drawn.check()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pattern", ["gemm+a2a", "a2a+gemm"])
def test_all_to_alls_of_unequal_heads_and_tokens_are_right(pattern: str, ranks: int, recorded: list[Task]) -> None:
    """Also of ranks without a token or a head, with copies, and with a ring of tokens or of sums across hosts."""
    order = random.Random(f"{pattern} {ranks}")
    to_owners = pattern == "gemm+a2a"
    mode, last = ("n", "_d") if to_owners else ("k", "_a")
    rows = tuple(3 * rank % 5 for rank in range(ranks))
    heads = tuple(2 * (3 - rank % 4) for rank in range(ranks))
    shape: dict[str, Any] = {"m": sum(rows), "n": 9, "k": 7, mode: sum(heads), "dtype": "float32"}
    problem = distgemm.GemmProblem(**shape, m_per_rank=rows, **{f"{mode}_per_rank": heads})
    ways: list[dict[str, Any]] = [
        {"chunks": 2, "sync": "barrier"},
        {"chunks": 3, "chunk_mode": mode, "mechanism": "pull"},
        {"mechanism": "store", "workspace": "bounded", "sync": "barrier"},
    ]
    names = [f"all_to_all_1d_rotating{last}", f"all_to_all_1d_pairwise_xor{last}"]
    every = [distgemm.make_plan(problem, name, ranks, **way) for name in names for way in ways]
    if to_owners:
        for copies in (2, ranks):
            few = tuple(4 * (1 + rank // copies % 2) for rank in range(ranks))
            extents = {"m": sum(rows), "n": sum(few) // copies, "k": 7, "dtype": "float32"}
            shared = distgemm.GemmProblem(**extents, m_per_rank=rows, n_per_rank=few)
            every += [distgemm.make_plan(shared, names[0], ranks, copies=copies, **ways[0])]
    if ranks > 2:
        across = "all_gather_1d_ring_a" if to_owners else "reduce_scatter_1d_tiling_a_rotating_c"
        both: dict[str, Any] = {"across": across, "inside": names[0], "chunks": 2}
        whole = distgemm.GemmProblem(22, 21, 19, dtype="float32")
        every += [distgemm.make_plan(whole, "tensor_parallel_2d_nested", mesh=(2, ranks // 2), **both)]
    replay_each(every, order, recorded, bool(order.randrange(2)), ("memory_op", "kernel"))


@pytest.mark.parametrize("schedule", GATHERS)
def test_merged_copies_are_right_in_every_order(schedule: str, recorded: list[Task]) -> None:
    """Rows have 256 bytes, so that slots lie behind one another without a gap."""
    order, ranks = random.Random(schedule), 4
    every = [
        distgemm.make_plan(distgemm.GemmProblem(m, 21, 64, dtype="float32"), schedule, ranks, chunks=chunks, **options)
        for m, chunks in ((22, 2), (37, 3), (64, 4))
        for options in ({"sync": "barrier"}, {"workspace": "bounded"}, {"sync": "barrier", "mechanism": "pull"})
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data = []
    for replay, plan in enumerate(every * 3):
        data.append(Data(plan, replay, alpha=2.0, beta=float(replay % 2), bias=replay % 3 == 0))
        buffer = order.randrange(2)
        for rank in range(ranks):
            one = Emulated(plan, rank, machine.workspaces[rank], 1 + replay % 2, merge_copies=True)
            todo[rank].append((one, one.tasks(data[-1].calls[rank], recorded, buffer)))
    run(machine, todo, order, queues=False)
    for drawn in data:
        drawn.check()
        assert all("gathered" in call.shards for call in drawn.calls)


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_chunks_that_the_caller_multiplies_are_right_in_every_order(
    ranks: int, queues: bool, recorded: list[Task]
) -> None:
    """Beside calls on the same workspace. Ranks have other numbers of rows, or none."""
    order = random.Random(ranks)
    unequal = {1: (5,), 2: (0, 5), 3: (4, 0, 3), 4: (1, 0, 5, 2)}[ranks]
    every = [
        distgemm.make_plan(
            distgemm.GemmProblem(sum(rows), ranks, k, dtype="float32", m_per_rank=rows), schedule, ranks, **options
        )
        for schedule in GATHERS
        for rows in ((4,) * ranks, unequal)
        for k, options in (
            (5, {"sync": "barrier"}),
            (64, {"chunks": 3, "sync": "barrier"}),
            (5, {"chunks": 3, "mechanism": "pull"}),
            *([(5, {"chunks": 2, "workspace": "bounded"})] if ranks < 3 else []),
        )
    ]
    machine = machine_of(every)
    todo: list[list[Any]] = [[] for _ in range(ranks)]
    data: list[tuple[Data, list[Block]]] = []
    for replay, plan in enumerate(every * 2):
        drawn, buffer = Data(plan, replay), order.randrange(2)
        blocks = [Block(drawn.whole["A"]) for _ in range(ranks if replay % 3 != 1 else 0)]
        data.append((drawn, blocks))
        for rank, call in enumerate(drawn.calls):
            wait_by, merges = ("memory_op", "kernel")[replay % 2], plan.problem.k == 64
            one = Emulated(plan, rank, machine.workspaces[rank], 1, wait_by=wait_by, merge_copies=merges)
            if blocks:
                tasks = one.gather_tasks(call.given["A"], recorded, buffer, blocks[rank])
            else:
                tasks = one.tasks(call, recorded, buffer)
            todo[rank].append((one, tasks))
    run(machine, todo, order, queues)
    for (drawn, blocks), plan in zip(data, every * 2, strict=True):
        if not blocks:
            drawn.check()
        for rank, block in enumerate(blocks):
            (own, _) = plan.shard("A", rank)
            first = list(range(own.start, own.stop))
            rows = [row for rows, _ in block.chunks for row in range(rows.start, rows.stop)]
            assert sorted(rows) == list(range(plan.problem.m)) and rows[: len(first)] == first


class Block:
    """The block of a gather: it compares all chunks that it has, also the earlier ones, with the whole A."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.chunks = whole, list[tuple[slice, torch.Tensor]]()

    def __call__(self, rows: slice, chunk: torch.Tensor) -> list[Task]:
        def compare() -> None:
            self.chunks.append((rows, chunk))
            assert all(torch.equal(each.double(), self.whole[at]) for at, each in self.chunks)

        return [compare]


@pytest.mark.parametrize("schedule", GATHERS)
def test_no_rank_waits_for_what_a_caller_multiplies(schedule: str, recorded: list[Task]) -> None:
    """Rank 1 ends its first block when all others have ended their last one, also where it has one queue."""
    for ranks, chunks in product((2, 3, 4), (1, 2)):
        problem = distgemm.GemmProblem(4 * ranks, ranks, 5, dtype="float32")
        plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", chunks=chunks)
        machine, drawn = machine_of([plan]), Data(plan, 0)
        todo: list[list[Any]] = [[] for _ in range(ranks)]
        ends = [memops.write(-FLAG_BYTES * (rank + 1)) for rank in range(ranks)]
        waits = [memops.wait_for(end.address) for rank, end in enumerate(ends) if rank != 1]
        for rank, call in enumerate(drawn.calls):
            one, blocks = Emulated(plan, rank, machine.workspaces[rank], 1), list[list[Task]]()

            def block(rows: slice, chunk: torch.Tensor, blocks: list[list[Task]] = blocks) -> list[Task]:
                blocks.append([])
                return blocks[-1]

            tasks = one.gather_tasks(call.given["A"], recorded, 0, block)
            assert len(blocks) == ranks * chunks
            if rank == 1:
                blocks[0] += waits
            else:
                blocks[-1].append(ends[rank])
            todo[rank].append((one, tasks))
        run(machine, todo, random.Random(0), queues=True)


@pytest.mark.parametrize("gemm_streams", [1, 2])
def test_gemms_that_add_two_partial_sums_are_right(gemm_streams: int, recorded: list[Task]) -> None:
    """With epilogues that add one term, and with others; see Emulated."""
    problem = distgemm.GemmProblem(m=24, n=16, k=16, dtype="float32")
    plan = distgemm.make_plan(problem, "tensor_parallel_3d", mesh=(2, 2, 2), sync="barrier")
    assert any(isinstance(op, Gemm) and len(op.sources) == 2 for op in plan.ops(0))
    machine = machine_of([plan])
    todo: list[list[Any]] = [[] for _ in range(8)]
    data = [Data(plan, replay, 2.0, float(replay % 2), replay == 2) for replay in range(3)]
    for rank in range(8):
        one = Emulated(plan, rank, machine.workspaces[rank], gemm_streams)
        todo[rank] = [(one, one.tasks(drawn.calls[rank], recorded, replay % 2)) for replay, drawn in enumerate(data)]
    run(machine, todo, random.Random(gemm_streams), queues=False)
    for drawn in data:
        assert all(torch.equal(drawn.calls[rank].out.double(), drawn.wanted[rank]) for rank in range(8))


def test_sums_of_another_dtype_than_d_are_refused_where_d_is_added_to(recorded: list[Task]) -> None:
    """An epilogue adds two sums. Further ones are added to its rounded result."""
    problem = distgemm.GemmProblem(64, 64, 64, partial_dtype="float32")
    for ranks, final_add, fits in ((4, "epilogue", False), (3, "epilogue", True), (4, "kernel", True)):
        plan = distgemm.make_plan(problem, PAIRWISE, ranks, sync="barrier", final_add=final_add)
        one = Emulated(plan, 1, machine_of([plan]).workspaces[1])
        call = Data(plan, 0).calls[1]
        if fits:
            one.tasks(call, recorded, 0)
        else:
            with pytest.raises(
                ValueError, match=r"got 3 of torch.float32 for D of torch.bfloat16; final_add='kernel' adds"
            ):
                one.tasks(call, recorded, 0)


@pytest.mark.parametrize("schedule", CHAINS)
def test_a_chain_waits_for_room_that_is_used_again(schedule: str, recorded: list[Task]) -> None:
    """A GEMM waits for the room that an earlier one gives back."""
    problem = distgemm.GemmProblem(24, 24, 16, dtype="float32")
    for chunks in (2, 3, 4):
        options: dict[str, Any] = {"sync": "barrier", "mechanism": "store", "workspace": "bounded"}
        run_replays(distgemm.make_plan(problem, schedule, 2, chunks=chunks, **options), recorded)


@pytest.mark.parametrize(("ranks", "chunks", "m"), [(3, 1, 2), (4, 1, 3), (4, 2, 5), (4, 4, 9), (5, 4, 16), (8, 1, 2)])
@pytest.mark.parametrize("mechanism", ["push", "store"])
def test_all_reduces_of_ranks_without_rows_are_right(
    ranks: int, chunks: int, m: int, mechanism: str, recorded: list[Task]
) -> None:
    problem = distgemm.GemmProblem(m, 16, 64, dtype="float32")
    options: dict[str, Any] = {"sync": "barrier", "mechanism": mechanism, "send_slots": 2 * chunks}
    run_replays(distgemm.make_plan(problem, ALL_REDUCES[0], ranks, chunks=chunks, **options), recorded)


def run_replays(plan: distgemm.Plan, recorded: list[Task]) -> None:
    """Run four replays one after the other, on both buffers, with beta in every second."""
    machine = machine_of([plan])
    todo: list[list[Any]] = [[] for _ in range(plan.world_size)]
    data = [Data(plan, replay, beta=float(replay % 2)) for replay in range(4)]
    for replay, drawn in enumerate(data):
        for rank, call in enumerate(drawn.calls):
            one = Emulated(plan, rank, machine.workspaces[rank])
            todo[rank].append((one, one.tasks(call, recorded, replay % 2)))
    run(machine, todo, random.Random(0), queues=False)
    for drawn in data:
        drawn.check()


# --- the emulation itself -------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("forgotten", ["entered", "left", "plan_flag"])
def test_the_emulation_fails_without_a_wait(forgotten: str, recorded: list[Task]) -> None:
    """Where a wait for one kind of flag is left out, garbage or a hang is found.

    In 2D, ranks 0 and 3 exchange nothing: without ``entered``, rank 3 leaves a replay before rank 0 has seen that it
    left the one before. The 1D schedule after it then waits for ever.
    """
    problem = distgemm.GemmProblem(m=16, n=16, k=16, dtype="float32")
    two_d = distgemm.make_plan(problem, "tensor_parallel_2d", mesh=(2, 2), sync="barrier")
    one_d = distgemm.make_plan(problem, "all_gather_1d_ring_a", 4, sync="barrier")
    script = [two_d, two_d, one_d, two_d, two_d, one_d]
    found = 0
    for seed in range(40):
        machine = Machine(4, max(two_d.workspace_bytes(0), one_d.workspace_bytes(0)))
        todo: list[list[Any]] = [[] for _ in range(4)]
        data = [Data(plan, seed * 10 + number) for number, plan in enumerate(script)]
        for rank in range(4):
            made = {plan: Emulated(plan, rank, machine.workspaces[rank]) for plan in (two_d, one_d)}
            size = 4 * FLAG_BYTES
            spans = {
                "left": (0, size),
                "entered": (size, 2 * size),
                "plan_flag": (first_plan_flag(4) * FLAG_BYTES, 1 << 23),
            }
            low, high = spans[forgotten]
            base = machine.workspaces[rank].buffers[0].bases[rank]
            for plan, drawn in zip(script, data, strict=True):
                tasks = made[plan].tasks(drawn.calls[rank], recorded, 0)
                kept = [
                    [t for t in part if not (isinstance(t, MemOp) and t.wait and low <= t.address - base < high)]
                    for part in tasks
                ]
                todo[rank].append((made[plan], kept))
        try:
            run(machine, todo, random.Random(seed), queues=False)
        except pytest.fail.Exception:
            found += 1
            continue
        found += any(
            not torch.equal(drawn.calls[rank].out.double(), drawn.wanted[rank]) for drawn in data for rank in range(4)
        )
    assert found
