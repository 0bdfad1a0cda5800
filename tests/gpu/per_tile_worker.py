"""What each rank of the tests of per-tile executables does."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distgemm.gemm.nvcc import build
from distgemm.gemm.per_tile.select import gemm_of
from distgemm.runtime.cuda import PerTileExecutable, ReplayTimeoutError
from tests.gpu.cuda_worker import Case, Data, compiled

SCHEDULES = {
    "ag+gemm": "all_gather_1d_tiling_cd_rotating_a",
    "gemm+rs": "reduce_scatter_1d_pairwise_a",
    "gemm+ar": "all_reduce_1d_pairwise_a",
    "gemm+a2a": "all_to_all_1d_rotating_d",
    "one-shot gemm+ar": "all_reduce_1d_one_shot_a",
    "a2a+gemm": "all_to_all_1d_rotating_a",
}
BY_COLUMNS = "all_reduce_1d_tiling_b_rotating_c"
"""An all-reduce whose shards of D are columns."""
CONFIGS = (
    "128x128x64_2x1_pingpong",
    "128x256x64_1x2_cooperative",
    "64x128x64_1x1_pingpong",
    "128x192x64_1x2_cooperative",
    "128x160x64_2x1_cooperative",
    "128x224x64_2x1_cooperative",
)


def cases(ranks: int) -> list[Case]:
    """Shapes with tiles that lie partly outside, all patterns, kinds of kernels, and terms."""
    found = []
    for pattern, schedule in [*SCHEDULES.items(), ("gemm+ar", BY_COLUMNS)]:
        by_columns = schedule == BY_COLUMNS
        modes = "mn" if pattern in {"ag+gemm", "gemm+a2a"} else "nk" if by_columns else "mk"  # those that ranks divide
        odd = {mode: extent * (ranks if mode in modes else 1) for mode, extent in (("m", 200), ("n", 328), ("k", 136))}
        even = {mode: extent * (ranks if mode in modes else 1) for mode, extent in (("m", 384), ("n", 512), ("k", 320))}
        one = Case(schedule, (ranks,), **odd, config=CONFIGS[0], execution="per_tile")
        stores_tiles = pattern in {"gemm+rs", "gemm+ar", "gemm+a2a"}  # at peers: rows of 128 bytes
        others = CONFIGS[1:4] if stores_tiles else CONFIGS[1:]
        found += [replace(one, config=config) for config in (None, *others)]
        found += [replace(one, **even, config=CONFIGS[1])]
        if pattern in {"ag+gemm", "gemm+rs"}:  # tiles span shards
            found += [replace(one, m=rows * ranks, config=config) for rows in (16, 48) for config in (None, CONFIGS[1])]
        found += [
            replace(one, alpha=2.0, beta=1.0),
            replace(one, partial_dtype="float32"),
            replace(one, dtype="float16"),
        ]
    return found


def compile_kernels(every: list[Case]) -> None:
    """Compile the kernels of the cases in parallel, also those for columns of B."""
    traits = [gemm_of(case.plan(), case.config).traits for case in every]
    build([one.source() for one in dict.fromkeys([*traits, *(replace(one, b_major="n") for one in traits)])])


def gathered_rows(data: Data) -> torch.Tensor:
    """The rows of A that a call hands out: those of this rank's D."""
    return data.whole["A"][data.plan.shard("D", data.rank)[-2]]


def at_rest(exe: Any) -> list[str]:
    """Failures where ranks do not agree on the epoch once all calls have ended, or a kernel counts as running."""
    assert isinstance(exe, PerTileExecutable)
    torch.cuda.synchronize()
    dist.barrier(device_ids=[exe.device.index])
    torch.cuda.synchronize()
    values = exe.workspace.values(exe.workspace.watched_memory().cpu())
    wrong = values.running or len(set(values.begun)) > 1 or not values.begun[0]
    return [f"rank {exe.rank}: {values.running} thread blocks run, the epochs are {values.begun}"] if wrong else []


def terms(every: list[Case]) -> list[str]:
    """Failures of calls with a bias, beside C and alpha, on new tensors, and on B whose columns are contiguous.

    Calls that gather hand out all of A, or this rank's rows of it.
    """
    failures = []
    for number, case in enumerate(every):
        exe, data = compiled(case)
        width = data.shards["D"].shape[1]
        bias = torch.arange(case.n, device=exe.device)[data.plan.shard("D", dist.get_rank())[-1]] % 7
        assert len(bias) == width
        for call in range(4):
            wanted = data.draw(500 * number + call) + bias
            shards = {name: x.clone() for name, x in data.shards.items()}
            if call % 2:
                shards["B"] = shards["B"].T.contiguous().T
            given = {"alpha": case.alpha, "beta": case.beta, "bias": bias.to(shards["D"].dtype), "out": shards["D"]}
            if exe.gemm.traits.sends:
                given["gathered"] = torch.full_like(gathered_rows(data), float("nan"))
            found = exe(shards["A"], shards["B"], shards["C"], **given)
            wrong = int((found.double() != wanted).sum())
            if exe.gemm.traits.sends:
                wrong += int((given["gathered"] != gathered_rows(data)).sum())
            if wrong:
                failures.append(f"rank {dist.get_rank()} call {call}: {wrong} of {wanted.numel()} wrong: {case}")
        failures += at_rest(exe)
    return failures


def replayed(every: list[Case], replays: int = 100) -> list[str]:
    """Failures of captured graphs, each of two calls, whose inputs change while a rank is late at random."""
    failures, chance = [], random.Random(dist.get_rank())
    for number, case in enumerate(every):
        exe, data = compiled(case)
        other = Data(case, data.plan, exe.device)
        sums, inputs = [], []
        for seed in range(3):
            sums.append(data.draw(900 * number + seed).clone())
            inputs.append({name: data.shards[name].clone() for name in "ABC"})
        wanted_of_other = other.draw(900 * number + 7)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            data.call(exe)
            other.call(exe)
            graph.capture_end()
        wrong = torch.zeros((), dtype=torch.int64, device=exe.device)
        for replay in range(replays):
            for name, given in inputs[replay % 3].items():
                data.shards[name].copy_(given)
            for one in (data, other):
                one.shards["D"].fill_(float("nan"))
            if chance.random() < 0.2:
                torch.cuda._sleep(chance.randrange(1, 4_000_000))
            graph.replay()
            wrong += (data.shards["D"].double() != sums[replay % 3]).sum()
            wrong += (other.shards["D"].double() != wanted_of_other).sum()
            if replay % 10 == 3:  # a call that is no part of a graph, in between
                data.shards["D"].fill_(float("nan"))
                data.call(exe)
                wrong += (data.shards["D"].double() != sums[replay % 3]).sum()
        if wrong.item():
            failures.append(f"rank {dist.get_rank()}: {wrong.item()} wrong: {case}")
        failures += at_rest(exe)
    return failures


def stuck_graph(case: Case) -> dict[str, Any]:
    """Rank 1 replays a captured graph once less: both raise, and later replays end with NaN on a dead workspace.

    So does the gathered A.
    """
    exe, data = compiled(case, timeout=3.0)
    wanted, more = data.draw(0), {}
    if exe.gemm.traits.sends:
        more["gathered"] = torch.empty_like(gathered_rows(data))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        data.call(exe, **more)
        graph.capture_end()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    right = torch.equal(data.shards["D"].double(), wanted)
    right = right and all(torch.equal(x, gathered_rows(data)) for x in more.values())
    found: dict[str, Any] = {"right": right, "error": ""}
    results = [(data.shards["D"], wanted), *((x, gathered_rows(data).double()) for x in more.values())]
    for x, _ in results:
        x.fill_(float("nan"))
    if dist.get_rank() == 0:
        graph.replay()
    start = time.monotonic()
    while time.monotonic() < start + 40 and not found["error"]:
        time.sleep(0.05)
        try:
            exe.raise_if_dead()
        except ReplayTimeoutError as error:
            found["error"] = str(error)
    torch.cuda.synchronize()  # the kernel ends
    found["seconds"] = time.monotonic() - start
    found["partly_wrong"] = sum(int((~x.isnan() & (x.double() != y)).sum()) for x, y in results)
    time.sleep(8.0)  # the other rank's watchdog has released its waits, too
    for x, _ in results:
        x.zero_()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    found["later_is_nan"] = all(bool(x.isnan().all()) for x, _ in results)
    return found
