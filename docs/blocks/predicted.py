"""What the simulator predicts for layers of Llama."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import distgemm
from blocks import rows_of, table
from distgemm.simulator import Machine, Timeline, predict_unfused, simulate

RANKS = 8
MACHINE = Machine.load("h200")
CHUNKS = (1, 2, 4)
FEW_CHUNKS = CHUNKS[:2]
TIE_TOLERANCE = 0.02
"""More chunks are shown only where they save more than this share of the time."""
MODELS = {"8B": (4096, 14336), "70B": (8192, 28672)}
"""Hidden and intermediate size of Llama."""
TOKENS = (512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 16384)
GATHER = "all_gather_1d_tiling_cd_rotating_a"
CHAIN = "reduce_scatter_1d_tiling_a_rotating_c"
PAIRWISE = "reduce_scatter_1d_pairwise_a"
RECOMMENDED = {"fc1": (GATHER,), "fc2": (CHAIN, PAIRWISE)}
PATTERNS = {"fc1": "ag+gemm", "fc2": "gemm+rs"}


def layer_problem(layer: str, model: str, tokens: int) -> distgemm.GemmProblem:
    """The product of fc1 (gate and up in one) or of fc2."""
    hidden, intermediate = MODELS[model]
    sides = (2 * intermediate, hidden) if layer == "fc1" else (hidden, intermediate)
    return distgemm.GemmProblem(tokens, *sides)


@cache
def timeline(problem: distgemm.GemmProblem, schedule: str, chunks: int) -> Timeline:
    """The predicted replay of a schedule on 8 H200s."""
    return simulate(distgemm.make_plan(problem, schedule, RANKS, chunks=chunks), MACHINE)


def _best(problem: distgemm.GemmProblem, schedule: str) -> tuple[int, Timeline]:
    """The fewest chunks within the tolerance of the best, and their timeline."""
    lines = [(chunks, timeline(problem, schedule, chunks)) for chunks in CHUNKS]
    limit = min(line.time for _, line in lines) * (1 + TIE_TOLERANCE)
    return next((chunks, line) for chunks, line in lines if line.time <= limit)


@table
def predictions(layer: str, model: str, tokens: str) -> str:
    """Predicted times of all 1D schedules of a layer, by chunks."""
    problem = layer_problem(layer, model, int(tokens))
    stem = "all_gather_1d" if layer == "fc1" else "reduce_scatter_1d"
    found = []
    for name in (name for name in distgemm.list_schedules() if name.startswith(stem)):
        lines = [timeline(problem, name, chunks) for chunks in CHUNKS]
        best = min(line.time for line in lines)
        times = [f"**{_ms(line.time)}**" if line.time == best else _ms(line.time) for line in lines]
        sent = sum(size for (source, _), size in lines[0].plan.link_bytes().items() if source == 0)
        workspace = max(line.plan.workspace_bytes(0) for line in lines)
        found.append((best, [_link(name), *times, str(sent >> 20), str(workspace >> 20)]))
    heads = " | ".join(f"chunks={chunks}, ms" for chunks in CHUNKS)
    head = f"schedule | {heads} | sent by a rank, MiB | workspace, MiB"
    roof = timeline(problem, RECOMMENDED[layer][0], 1).roof
    unfused = predict_unfused(problem, MACHINE, PATTERNS[layer], RANKS)
    return (
        f"Predicted for {layer} of Llama {model} with {tokens} tokens (m {problem.m}, n {problem.n}, k {problem.k}), "
        f"bfloat16, 8 H200s:\n\n{rows_of(head, [row for _, row in sorted(found)])}\n\n"
        f"The longer of the local GEMM alone and the copies alone takes {_ms(roof)} ms. A library's collective and "
        f"then one GEMM take {_ms(unfused)} ms."
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}"


def _link(schedule: str) -> str:
    return f"[{schedule}](schedules/{schedule}.md)"


@table
def predictions_by_tokens(layer: str, model: str) -> str:
    """Predicted times of the recommended schedules of a layer, by the number of tokens."""
    rows = []
    for tokens in TOKENS:
        problem = layer_problem(layer, model, tokens)
        best = [_best(problem, name) for name in RECOMMENDED[layer]]
        times = [line.time for _, line in best] + [predict_unfused(problem, MACHINE, PATTERNS[layer], RANKS)]
        cells = [f"**{_ms(time)}**" if time == min(times) else _ms(time) for time in times]
        cells[:-1] = [f"{cell} ({chunks})" for cell, (chunks, _) in zip(cells, best, strict=False)]
        rows.append([str(tokens), *cells, _ms(best[0][1].gemm_alone)])
    heads = " | ".join(f"{_link(name)}, ms" for name in RECOMMENDED[layer])
    head = f"tokens | {heads} | a library's collective, then one GEMM, ms | the local GEMM alone, ms"
    return (
        f"Predicted for {layer} of Llama {model}, bfloat16, 8 H200s. The number of chunks is in brackets:\n\n"
        f"{rows_of(head, rows)}"
    )


@table
def crossover(model: str) -> str:
    """The fewest tokens in the table of fc2 with which the chain is faster than pairwise sums."""
    for tokens in TOKENS:
        chain, pairwise = (_best(layer_problem("fc2", model, tokens), name)[1].time for name in RECOMMENDED["fc2"])
        if chain < pairwise:
            return str(tokens)
    raise RuntimeError(f"the chain is never faster in fc2 of {model}: docs/which_schedule.md has to say so")


LONG = (32768, 131072, 1048576)
"""Tokens of long sequences."""
TO_HEADS = "all_to_all_1d_rotating_d"
FROM_HEADS = "all_to_all_1d_rotating_a"


@table
def sequence_parallelism() -> str:
    """Predicted times of both ways to compute the projections of attention, by the number of tokens."""
    hidden, columns = 8192, 10240
    rows = []
    for tokens in LONG:
        qkv, out = distgemm.GemmProblem(tokens, columns, hidden), distgemm.GemmProblem(tokens, hidden, hidden)
        for layer, problem, schedules in (("qkv", qkv, (GATHER, TO_HEADS)), ("out", out, (CHAIN, FROM_HEADS))):
            best = [_best(problem, name) for name in schedules]
            times = [line.time for _, line in best]
            cells = [f"**{_ms(time)}**" if time == min(times) else _ms(time) for time in times]
            cells = [f"{cell} ({chunks})" for cell, (chunks, _) in zip(cells, best, strict=True)]
            sent = [sum(b for (src, _), b in line.plan.link_bytes().items() if src == 0) >> 20 for _, line in best]
            rows.append([f"{tokens:,}", layer, *cells, _ms(best[0][1].gemm_alone), *map(str, sent)])
    head = (
        "tokens | layer | tensor parallelism, ms | all-to-all, ms | the local GEMM alone, ms | "
        "sent by a rank, MiB, tensor parallelism | all-to-all"
    )
    return (
        "Predicted for the projections of attention of Llama 70B (64 heads of queries, 8 of keys and values), "
        "bfloat16, 8 H200s. The number of chunks is in brackets. Tensor parallelism is "
        f"{_link(GATHER)} and {_link(CHAIN)}; all-to-all is {_link(TO_HEADS)} and {_link(FROM_HEADS)}:\n\n"
        f"{rows_of(head, rows)}"
    )


HOSTS = (2, 8)
FLAT = {"fc1": (GATHER, "all_gather_1d_ring_a"), "fc2": (PAIRWISE, CHAIN)}
NESTED = {"fc1": ("all_gather_1d_ring_a", GATHER), "fc2": (PAIRWISE, PAIRWISE)}
"""The schedules across hosts and inside each of them."""


@table
def two_hosts() -> str:
    """Predicted times of two layers of Llama 405B on two hosts, by schedule."""
    hidden, intermediate = 16384, 53248
    machine = dataclasses.replace(MACHINE, ranks_per_host=HOSTS[1])
    shared = dataclasses.replace(machine, adapters_per_host=1)
    rows = []
    for tokens in (4096, 16384):
        for layer, sides in (("fc1", (2 * intermediate, hidden)), ("fc2", (hidden, intermediate))):
            problem = distgemm.GemmProblem(tokens, *sides)
            across, inside = NESTED[layer]
            ranks = HOSTS[0] * HOSTS[1]
            named: list[tuple[str, dict[str, Any]]] = [(name, {"world_size": ranks}) for name in FLAT[layer]]
            named.append(("tensor_parallel_2d_nested", {"mesh": HOSTS, "across": across, "inside": inside}))
            cells = []
            for name, options in named:
                plans = [
                    distgemm.make_plan(problem, name, chunks=c, ranks_per_host=HOSTS[1], **options) for c in FEW_CHUNKS
                ]
                line = min((simulate(plan, machine) for plan in plans), key=lambda each: each.time)
                cells.append((line, sum(line.plan.link_bytes("across").values())))
            nested = cells[-1][0]
            unfused = predict_unfused(problem, machine, PATTERNS[layer], ranks)
            times = [unfused, *(line.time for line, _ in cells)]
            rows.append(
                [
                    f"{layer}, {tokens}",
                    *(f"**{_ms(time)}**" if time == min(times) else _ms(time) for time in times),
                    _ms(nested.gemm_alone),
                    f"{100 * nested.hidden:.0f} %",
                    _ms(max(0.0, nested.time - nested.gemm_alone)),
                    _ms(min(simulate(plan, shared).time for plan in plans)),
                    " / ".join(str(between >> 20) for _, between in cells),
                ]
            )
    head = (
        "layer, tokens | a library's collective, then one GEMM, ms | flat, direct, ms | flat ring, ms | nested, ms | "
        "the local GEMM alone, ms | transfers of nested that GEMMs hide | not hidden, ms | "
        "nested, one adapter for each host, ms | between hosts, MiB: direct / ring / nested"
    )
    return (
        "Predicted for Llama 405B, bfloat16, tensor parallelism of 16 on two hosts of 8 H200s, one adapter of "
        f"400 Gbit/s for each GPU, the best of 1 and 2 chunks:\n\n{rows_of(head, rows)}"
    )


FP8_LAYERS = {
    "8B qkv": (6144, 4096),
    "8B fc1": (28672, 4096),
    "70B qkv": (10240, 8192),
    "70B fc1": (57344, 8192),
    "405B qkv": (18432, 16384),
    "405B fc1": (106496, 16384),
}


@table
def fp8_gathers() -> str:
    """Predicted times of all-gather + GEMM in bf16 and in fp8, by when A is quantised."""
    nvlink = MACHINE.nvlink._replace(bandwidth=MACHINE.nvlink.bandwidth / 2)
    half = dataclasses.replace(
        MACHINE, nvlink=nvlink
    )  # twice the bytes take as long as the same bytes at half the rate
    fp8 = {"dtype": "float8_e4m3fn", "scaling": "rowwise"}
    ways: list[tuple[Machine, dict[str, Any]]] = [(MACHINE, {}), (half, fp8), (MACHINE, fp8)]
    rows = []
    for layer, (n, k) in FP8_LAYERS.items():
        for tokens in (2048, 8192):
            cells = []
            for ranks in (2, 4, 8):
                times = []
                for machine, options in ways:
                    problem = distgemm.GemmProblem(tokens, n, k, **options)
                    plans = [distgemm.make_plan(problem, GATHER, ranks, chunks=chunks) for chunks in FEW_CHUNKS]
                    times.append(min(simulate(plan, machine).time for plan in plans))
                shown = [f"{time:.0f}" for time in times]
                at = times.index(min(times[::-1]))
                shown[at] = f"**{shown[at]}**"
                cells.append(" / ".join(shown))
            rows.append([f"{layer}, {tokens}", *cells])
    head = "layer, tokens | TP 2 | TP 4 | TP 8"
    return (
        "Predicted for all-gather + GEMM on H200s, us: in bf16 / in fp8, quantised after the gather / in fp8 with "
        f"rowwise scales, quantised before it. The best of 1 and 2 chunks:\n\n{rows_of(head, rows)}"
    )
