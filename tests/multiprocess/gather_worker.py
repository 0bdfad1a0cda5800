"""The ranks of the tests of distgemm.gather, against the whole tensor."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import distgemm
from distgemm import fp8
from distgemm.plan.scaling import OperandScaling
from tests.multiprocess.nn_worker import error_of
from tests.multiprocess.ops_torch_worker import split

Tensor = torch.Tensor
SCHEDULES = ("auto", "all_gather_1d_ring_a chunks=2", "all_gather_1d_bidirectional_full_a", "ag+gemm chunks=3")


def chunks() -> list[str]:
    """The chunks have each row once, this rank's first, and are right until the end of the block."""
    ranks, rank, group, wrong = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, []
    unequal = {1: (5,), 2: (0, 5), 3: (4, 0, 3), 4: (1, 0, 5, 2)}[ranks]
    for schedule in SCHEDULES:
        for m_per_rank, dtype, columns in (
            (None, torch.float64, 6),
            (unequal, torch.float32, 6),
            (unequal, torch.bfloat16, 5),
        ):
            case = f"{schedule}, {m_per_rank}, {dtype}, rank {rank}"
            sizes = m_per_rank or (4,) * ranks
            whole = torch.randn(sum(sizes), columns, generator=torch.Generator().manual_seed(3)).to(dtype)
            mine = split(whole, sizes, rank)
            for given in (mine, mine.t().contiguous().t()):
                with distgemm.gather(given, group=group, schedule=schedule, m_per_rank=m_per_rank) as arriving:
                    found = list(arriving)
                    if any(not torch.equal(chunk.tensor, whole[chunk.rows]) for chunk in found):
                        wrong.append(f"{case}: values")
                rows = [row for chunk in found for row in range(chunk.rows.start, chunk.rows.stop)]
                first = list(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))
                if sorted(rows) != list(range(sum(sizes))) or rows[: len(first)] != first:
                    wrong.append(f"{case}: rows {rows}")
            call = distgemm.last_call()
            said = "one rank: nothing moves" if ranks == 1 else ", GEMMs by the caller; overlapped"
            if call.function != "gather" or said not in str(call):
                wrong.append(f"{case}: {call}")
    return wrong


def behind_the_block() -> list[str]:
    """Chunks that are asked for behind the block raise, whatever was asked for in it."""
    wrong = []
    for asked in (0, 1):
        with distgemm.gather(torch.ones(4, 2), group=dist.group.WORLD) as arriving:
            for _ in range(asked):
                next(arriving)
        said = error_of(lambda arriving=arriving: list(arriving))
        if "the with block of these chunks has ended" not in said:
            wrong.append(f"{asked} in the block: {said}")
    with distgemm.gather(torch.ones(4, 2), group=dist.group.WORLD) as arriving:
        found = [*arriving, *arriving]  # an iterator that has ended stays so
    return wrong + [f"{len(found)} chunks"] * (len(found) != dist.get_world_size())


def without_tokens() -> list[str]:
    """Functions of no tokens, eager and compiled: as a linear of no tokens, and no rank waits."""
    ranks, group, wrong = dist.get_world_size(), dist.group.WORLD, []
    none = (0,) * ranks
    calls: dict[str, tuple[Any, int, tuple[int, ...]]] = {
        "gather": (lambda x, w: distgemm.all_gather_matmul(x, w, group=group), 6, (5,)),
        "unequal": (lambda x, w: distgemm.all_gather_matmul(x, w, group=group, m_per_rank=none), 6, (5,)),
        "scatter": (lambda x, w: distgemm.matmul_reduce_scatter(x, w, group=group), 6, (5,)),
        "all-reduce": (lambda x, w: distgemm.matmul_all_reduce(x, w, group=group), 6, (5,)),
        "to heads": (lambda x, w: distgemm.matmul_all_to_all(x, w, group=group), 6, (2 * ranks,)),
        "to tokens": (lambda x, w: distgemm.all_to_all_matmul(x, w, group=group), 6, (5,)),
    }
    for name, (call, k, (n,)) in calls.items():
        columns = n // ranks if name == "to heads" else n
        for shape, compiled in (((0, k), False), ((0, 3, k), False), ((0, k), True)):
            x = torch.zeros(shape, requires_grad=True)
            w = torch.zeros(n, k * ranks if name == "to tokens" else k, requires_grad=True)
            run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
            y = run(x, w)
            y.sum().backward()
            if y.numel() or y.shape[-1] != columns or y.dim() != len(shape):
                wrong.append(f"{name} of {shape}: {tuple(y.shape)}")
            assert x.grad is not None
            if x.grad.shape != x.shape or w.grad is None or w.grad.count_nonzero() or w.grad.shape != w.shape:
                wrong.append(f"{name} of {shape}: gradients")
    _, whole = distgemm.all_gather_matmul(torch.zeros(0, 6), torch.zeros(5, 6), group=group, return_gathered=True)
    if whole.shape != (0, 6):
        wrong.append(f"gathered {tuple(whole.shape)}")
    for m_per_rank in (None, none):
        with distgemm.gather(torch.zeros(0, 6), group=group, m_per_rank=m_per_rank) as arriving:
            distgemm.all_gather_matmul(torch.zeros(1, 6), torch.zeros(5, 6), group=group)
            wrong += [f"chunk {chunk.rows}" for chunk in arriving]
    dist.barrier(group)
    return wrong


def one_without_tokens() -> list[str]:
    """All ranks raise if one has no tokens and others have some: in first and later calls, eager and compiled."""
    ranks, rank, group, wrong = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, []

    def gather(x: Tensor) -> None:
        with distgemm.gather(x, group=group) as arriving:
            list(arriving)

    w, heads, scaling = torch.zeros(2 * ranks, 6), torch.zeros(5, 6 * ranks), OperandScaling(1, None)
    codes = fp8.quantize(w, scaling)
    calls: dict[str, tuple[Any, bool]] = {  # and whether m is the sum of what ranks have
        "all-gather": (lambda x: distgemm.all_gather_matmul(x, w, group=group), True),
        "reduce-scatter": (lambda x: distgemm.matmul_reduce_scatter(x, w, group=group), False),
        "all-reduce": (lambda x: distgemm.matmul_all_reduce(x, w, group=group), False),
        "to heads": (lambda x: distgemm.matmul_all_to_all(x, w, group=group), True),
        "to tokens": (lambda x: distgemm.all_to_all_matmul(x, heads, group=group), False),
        "gather": (gather, True),
        "codes": (lambda x: distgemm.all_gather_matmul(fp8.quantize(x, scaling), codes, group=group), True),
        "recipe": (lambda x: distgemm.matmul_reduce_scatter(x, w, group=group, recipe="tensorwise"), False),
    }
    for name, (call, adds) in calls.items():
        runs = [call]
        if name not in ("gather", "codes", "recipe"):
            runs.append(torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False))
        for run in runs:
            for before in (None, 4 * ranks, 0):  # tokens of an earlier call of all ranks
                if before is not None:
                    run(torch.zeros(before, 6))
                error = error_of(lambda run=run: run(torch.zeros(4 * ranks if rank else 0, 6)))
                differs = f"m: 0 on rank 0, {4 * ranks * (ranks if adds else 1)} on rank"
                if "ValueError: the ranks of the group make different calls" not in error or differs not in error:
                    wrong.append(f"{name} after {before}: {error or 'no error'}")
    dist.barrier(group)
    return wrong


def flops() -> list[str]:
    """torch counts the local product of each function, and those of gradients."""
    ranks, group, found = dist.get_world_size(), dist.group.WORLD, []
    x, w, w2 = torch.randn(4, 8), torch.randn(6, 8), torch.randn(8, 6)
    rows, heads = 4 * ranks, ranks
    heads_of_all = torch.ones(rows, 2)
    calls: list[tuple[Any, int]] = [
        (lambda: distgemm.all_gather_matmul(x, w, group=group), rows * 8 * 6),
        (lambda: distgemm.all_gather_matmul(x, [w, w], group=group), rows * 8 * 12),
        (lambda: distgemm.matmul_reduce_scatter(torch.ones(rows, 6), w2, group=group), rows * 6 * 8),
        (lambda: distgemm.matmul_all_reduce(torch.ones(rows, 6), w2, group=group), rows * 6 * 8),
        (lambda: distgemm.matmul_all_to_all(x, torch.ones(heads, 8), group=group), 4 * 8 * heads),
        (
            lambda: distgemm.all_to_all_matmul(heads_of_all, torch.ones(5, 2 * ranks), group=group),
            4 * 5 * 2 * ranks,
        ),
    ]
    for number, (call, wanted) in enumerate(calls):
        call()  # makes the op known to the counter
        with FlopCounterMode(display=False) as counter:
            call()
        if counter.get_total_flops() != 2 * wanted:
            found.append(f"{number}: {counter.get_total_flops()}, not {2 * wanted}")
    return found


def travels_meanwhile() -> list[str]:
    """The chunks of a rank that is busy with its first one arrive at the others."""
    store = dist.distributed_c10d._get_default_store()
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for busy in range(ranks):
        with distgemm.gather(torch.full((1000, 300), float(rank)), group=group) as arriving:
            next(arriving)
            if rank == busy:
                store.wait(
                    [f"all {busy} {other}" for other in range(ranks) if other != busy], datetime.timedelta(seconds=30)
                )
            found = [float(a.mean()) for _, a in arriving]
            store.set(f"all {busy} {rank}", "")
        if sorted(found) != [float(other) for other in range(ranks) if other != rank]:
            return [f"{found}"]
    return []


def ends() -> list[str]:
    """What happens at the end of the block, and what is refused inside it."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    a, b, elsewhere = torch.full((3, 4), float(rank)), torch.ones(2, 4), dist.new_group()

    def gathered() -> list[float]:
        with distgemm.gather(a, group=mesh) as arriving:
            return sorted(float(x.mean()) for _, x in arriving)

    def fails(after: int) -> None:
        with distgemm.gather(a, group=mesh) as arriving:
            for number, _ in enumerate(arriving):
                if number == after:
                    raise ArithmeticError("of the caller")

    def stops() -> None:
        with distgemm.gather(a, group=mesh):
            pass

    inside = []
    wanted = [float(each) for each in range(ranks)]
    for after in range(ranks):  # a rank may fail, and the others go on
        if rank == 0:
            error = error_of(lambda: fails(after))  # noqa: B023
            wrong += [] if error == "ArithmeticError: of the caller" else [error]
        else:
            gathered()
        if gathered() != wanted:
            wrong.append("after an error")
    stops() if rank else gathered()
    with distgemm.gather(a, group=mesh) as arriving:
        for call in (gathered, lambda: distgemm.all_gather_matmul(a, b, group=mesh)):
            inside.append(error_of(call))
        other = distgemm.all_gather_matmul(a, b, group=elsewhere)
        if sorted(float(x.mean()) for _, x in arriving) != wanted or other.shape != (3 * ranks, 2):
            wrong.append("another group")
    said = "RuntimeError: a gather on this process group has not ended: make this call behind its with block"
    wrong += [f"inside: {error}" for error in inside if error != said]
    if gathered() != wanted:
        wrong.append("after refused calls")

    def enter(x: Any, **options: Any) -> None:
        with distgemm.gather(x, group=mesh, **options):
            pass

    for message, x, options in (
        ("ValueError: gather: a_shard is (tokens, in_features), got shape (3,)", a[:, 0], {}),
        ("ValueError: gather: a_shard requires grad, and no gradient goes", a.clone().requires_grad_(), {}),
        ("ValueError: gather: a_shard is a torch.Tensor", [1.0], {}),
        ("ValueError: gather: the unfused program has no chunks", a, {"schedule": "unfused"}),
        ("ValueError: gather: m_per_rank has an integer for each of", a, {"m_per_rank": [3]}),
        ("ValueError: gather: a is one of float64", a.int(), {}),
        ("ValueError: a gather keeps all chunks", torch.ones(24, 4), {
            "schedule": "ag+gemm workspace=bounded chunks=2"}),
    ):  # fmt: skip
        error = error_of(lambda: enter(x, **options))  # noqa: B023
        if not error.startswith(message) and (ranks > 2 or "keeps" not in message):
            wrong.append(f"{message}: {error or 'no error'}")
    summed = distgemm.CollectiveExecutable(distgemm.make_plan(distgemm.GemmProblem(6, 4, 6), "gemm+rs", ranks))
    error = error_of(lambda: next(summed.gather(torch.ones(6, 6 // ranks))))
    wrong += [] if "in chunks of whole rows" in error else [error or "no error"]
    with torch.no_grad():
        enter(a.clone().requires_grad_())
    if ranks > 1:
        error = error_of(lambda: enter(a if rank else torch.ones(3, 5)))
        wrong += [] if error.startswith("ValueError") and "k" in error else [f"ranks differ: {error or 'no error'}"]
    return wrong
