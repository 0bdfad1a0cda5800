"""A tensor-parallel MLP on several processes of this machine: what is multiplied where, what moves, and a check.

With GPUs, the layers of Llama 70B on all of them as well: the CUDA runtime beside what torch offers.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from distgemm.cli.doctor import look, runtimes
from distgemm.measure.models import get_model
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Gemm
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.collective.executable import CollectiveExecutable
from distgemm.runtime.launch import launch
from distgemm.schedulers import Pattern

__all__ = ["Measured", "Measurement", "demo", "layers_table", "measurements"]

TOKENS, HIDDEN, INTERMEDIATE = 8192, 8192, 28672
"""Llama 70B: fc1 is gate and up in one, (2 * INTERMEDIATE, HIDDEN); fc2 is (HIDDEN, INTERMEDIATE)."""

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}

REPLAYS = 5

MODEL = "llama-3-70b"

SCHEDULES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "ag+gemm": (("all_gather_1d_tiling_cd_rotating_a", {}),),
    "gemm+rs": (
        ("reduce_scatter_1d_tiling_a_rotating_c", {"chunks": 2}),
        ("reduce_scatter_1d_pairwise_a", {}),
    ),
}
"""Schedules that are measured, with their options: those that docs/which_schedule.md recommends."""

UNFUSED = "NCCL + cuBLAS"
COMPARED = (UNFUSED, "torch fused", "cuBLAS alone")
"""What is measured besides; the last does the local products only, so it is what all others aim at."""

PATIENCE = 900.0
"""Seconds for all layers, with the compilation of what they need."""

# Newer releases of torch have renamed these two.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def demo(
    world_size: int = 4,
    schedule_ag: str = "ag+gemm",
    schedule_rs: str = "gemm+rs",
    scale: int = 16,
    dtype: str = "float32",
    tokens: int | None = None,
    console: Console | None = None,
) -> None:
    """Run all-gather + GEMM and GEMM + reduce-scatter of a Llama 70B MLP, every extent divided by ``scale``.

    schedule_ag, schedule_rs: names of schedules on one axis of ranks
    dtype: element type of the random inputs
    tokens: also measure the layers of Llama 70B, whole, with so many tokens on all GPUs; None: do not

    Every rank is a process that holds its shards: on CUDA devices over NCCL if there are enough, else on the CPU
    over gloo, where times say nothing about GPUs. Prints the work grid, the time of each rank beside that of
    collective and matmul one after the other, and the bytes on each link. Where ``tokens`` are given but the CUDA
    runtime does not work here, says why.

    Raises RuntimeError when a result differs from the unsharded product in float64 by more than the bound of its
    types (of the whole layers: from NCCL and cuBLAS by more than rounding), and ValueError for arguments that do not
    fit.
    """
    console = console or Console()
    if scale < 1:
        raise ValueError(f"scale is an integer >= 1, got {scale!r}")
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype is one of {', '.join(UNIT_ROUNDOFF)}, got {dtype!r}")
    to_measure = None if tokens is None else measurements(tokens, torch.cuda.device_count())
    rows, hidden, intermediate = (max(1, extent // scale) for extent in (TOKENS, HIDDEN, INTERMEDIATE))
    nccl = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    where = "CUDA devices over NCCL" if nccl else "the CPU over gloo"
    problems = (
        ("fc1, all-gather + GEMM", schedule_ag, GemmProblem(m=rows, n=2 * intermediate, k=hidden, dtype=dtype)),
        ("fc2, GEMM + reduce-scatter", schedule_rs, GemmProblem(m=rows, n=hidden, k=intermediate, dtype=dtype)),
    )
    plans = [make_plan(problem, schedule, world_size) for _, schedule, problem in problems]
    for plan, sums in zip(plans, (False, True), strict=True):
        plain = _Plain(plan)  # raises before anything is printed or started
        if plain.sums != sums and world_size > 1:
            option, does = ("schedule_rs", "adds over ranks") if sums else ("schedule_ag", "gathers")
            raise ValueError(f"{option} is one that {does}, got {plan.schedule}")
    console.print(
        f"[bold]MLP of Llama 70B, extents / {scale}:[/] {rows} tokens, hidden {hidden}, intermediate "
        f"{intermediate}, {dtype}; {world_size} ranks on {where}"
    )
    by_rank = launch(_run_rank, world_size, plans, backend="nccl" if nccl else "gloo")
    failed = []
    for index, ((title, _, _), plan) in enumerate(zip(problems, plans, strict=True)):
        found = [results[index] for results in by_rank]
        _print_plan(console, title, plan)
        _print_times(console, plan, found)
        _print_links(console, plan)
        error, bound = _error(plan, [result.d for result in found]), _bound(plan)
        passed = error <= bound
        verdict = "[green]pass[/]" if passed else "[red]FAIL[/]"
        console.print(f"against float64: max |D - exact| / (|A| |B|ᵀ) = {error:.2e}, bound {bound:.2e}: {verdict}\n")
        if not passed:
            failed.append(f"{title}, {plan.schedule}: error {error:.2e} exceeds {bound:.2e}")
    if failed:
        raise RuntimeError("; ".join(failed))
    if to_measure is not None:
        _measure_layers(console, to_measure)


# --- on each rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """What a rank reports: its D, and its median times, in seconds."""

    d: torch.Tensor
    time: float
    plain_time: float
    plain_program: str


def _shard(plan: Plan, operand: str, rank: int) -> torch.Tensor:
    """A shard of random numbers: the same wherever, and by whomever, its box is held."""
    box = plan.box(operand, rank)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((plan.problem, operand, box)).encode()))
    values = torch.randn(plan.shard_shape(operand, rank), generator=generator)
    return values.to(TORCH_DTYPES[plan.problem.dtype])


def _run_rank(plans: list[Plan]) -> list[_Result]:
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    return [_measure(plan, rank, device) for plan in plans]


def _measure(plan: Plan, rank: int, device: torch.device) -> _Result:
    a, b = (_shard(plan, operand, rank).to(device) for operand in "AB")
    executable = CollectiveExecutable(plan)
    plain = _Plain(plan)
    d = executable(a, b)
    plain.run(a, b)
    times: list[float] = []
    plain_times: list[float] = []
    for _ in range(REPLAYS):
        times.append(_timed(lambda: executable(a, b, out=d), device))
        plain_times.append(_timed(lambda: plain.run(a, b), device))
    return _Result(d.cpu(), statistics.median(times), statistics.median(plain_times), plain.program)


def _timed(function: Callable[[], Any], device: torch.device) -> float:
    ids = [device.index] if device.type == "cuda" else None
    dist.barrier(device_ids=ids)
    if ids:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    if ids:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


class _Plain:
    """The program that the plan stands for: collective and matmul, one after the other."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        p = plan.problem
        a, b, d = (plan.box(operand, 0) for operand in "ABD")
        whole_k = (0, p.k)
        self.gathered = ""
        self.sums = a[2] == b[2] != whole_k and plan.world_size > 1
        if not self.sums:
            needed = {"A": (d[1], whole_k), "B": (d[2], whole_k)}
            lacking = [name for name, box in (("A", a), ("B", b)) if box[1:] != needed[name]]
            if len(lacking) > 1:
                raise ValueError(f"the demo compares schedules that move one operand; {plan.schedule} moves A and B")
            self.gathered = "".join(lacking)
        elif a[1] != (0, p.m) or b[1] != (0, p.n):
            raise ValueError(f"the demo compares schedules that move one operand; {plan.schedule} moves more")
        moved = self.gathered or "D"
        boxes = [plan.box(moved, rank) for rank in range(plan.world_size)]
        columns = p.n if moved == "D" else p.k
        rows = boxes[0][1][1] - boxes[0][1][0]
        # Equal blocks of rows in the order of ranks: what torch's own collectives take.
        self.blocks = all(box[1:] == ((rank * rows, (rank + 1) * rows), (0, columns)) for rank, box in enumerate(boxes))
        if self.sums:
            how = _SCATTER if self.blocks else "all_reduce and a slice"
            self.program = f"matmul, {how}"
        elif self.gathered:
            how = _GATHER if self.blocks else "all_gather of padded shards and their assembly"
            self.program = f"{how} of {self.gathered}, matmul"
        else:
            self.program = "matmul"

    def run(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """This rank's D."""
        if self.gathered == "A":
            a = self._gather("A", a)
        elif self.gathered == "B":
            b = self._gather("B", b)
        partial = a @ b.T
        return self._scatter(partial) if self.sums else partial

    def _gather(self, operand: str, shard: torch.Tensor) -> torch.Tensor:
        plan = self.plan
        p = plan.problem
        whole = shard.new_empty((p.m if operand == "A" else p.n, p.k))
        if self.blocks:
            getattr(dist, _GATHER)(whole, shard)
            return whole
        shapes = [plan.shard_shape(operand, rank) for rank in range(plan.world_size)]
        padded = shard.new_zeros(max(rows * columns for rows, columns in shapes))
        padded[: shard.numel()] = shard.flatten()
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded)
        for rank, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            whole[plan.shard(operand, rank)] = part[: shape[0] * shape[1]].view(shape)
        return whole

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        plan, rank = self.plan, dist.get_rank()
        if not self.blocks:
            dist.all_reduce(partial)
            return partial[plan.shard("D", rank)]
        d = partial.new_empty(plan.shard_shape("D", rank))
        getattr(dist, _SCATTER)(d, partial)
        return d


# --- in the parent --------------------------------------------------------------------------------------


def _whole(plan: Plan, operand: str, shards: list[torch.Tensor]) -> torch.Tensor:
    p = plan.problem
    shape = {"A": (p.m, p.k), "B": (p.n, p.k), "D": (p.m, p.n)}[operand]
    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    for rank, shard in enumerate(shards):
        whole[plan.shard(operand, rank)] = shard.double()
    return whole


def _error(plan: Plan, d_shards: list[torch.Tensor]) -> float:
    """The largest error of an element, relative to the sum of the absolute values of what it adds."""
    a, b = (_whole(plan, operand, [_shard(plan, operand, r) for r in range(plan.world_size)]) for operand in "AB")
    difference = (_whole(plan, "D", d_shards) - a @ b.T).abs()
    worst = float((difference / (a.abs() @ b.abs().T)).max())
    return float("inf") if worst != worst else worst


def _bound(plan: Plan) -> float:
    """What rounding can amount to: k products and sums, a partial sum that each rank passes on, the result."""
    p = plan.problem
    accumulation = UNIT_ROUNDOFF["float64" if p.dtype == "float64" else "float32"]
    products = 2 * UNIT_ROUNDOFF["tfloat32"] if p.dtype == "tfloat32" else 0.0
    partial, out = UNIT_ROUNDOFF[str(p.partial_dtype)], UNIT_ROUNDOFF[str(p.out_dtype)]
    return products + (p.k + plan.world_size) * accumulation + plan.world_size * partial + out


def _print_plan(console: Console, title: str, plan: Plan) -> None:
    p = plan.problem
    console.print(f"[bold]{title}[/]: D({p.m}, {p.n}) = A({p.m}, {p.k}) · B({p.n}, {p.k})ᵀ, {plan.schedule}")
    table = Table(title="tile (m, n, k) by iteration", title_justify="left")
    table.add_column("rank", justify="right")
    for iteration in range(plan.iterations):
        table.add_column(str(iteration), justify="center")
    for rank in range(plan.world_size):
        work = {op.iteration: op.tile for op in plan.ops(rank) if isinstance(op, Gemm)}
        cells = [", ".join(map(str, work[i][:3])) if i in work else "" for i in range(plan.iterations)]
        table.add_row(str(rank), *cells)
    console.print(table)


def _print_times(console: Console, plan: Plan, found: list[_Result]) -> None:
    table = Table(title=f"ms, median of {REPLAYS} replays", title_justify="left")
    table.add_column("", justify="left")
    for rank in range(plan.world_size):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("slowest", justify="right")
    rows = (("plan", [r.time for r in found]), (found[0].plain_program, [r.plain_time for r in found]))
    for name, times in rows:
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in (*times, max(times))))
    console.print(table)


def _print_links(console: Console, plan: Plan) -> None:
    p, ranks = plan.problem, plan.world_size
    links = plan.link_bytes()
    moved = _Plain(plan).gathered or "D"
    extents = {"A": p.m * p.k, "B": p.n * p.k, "D": p.m * p.n}[moved]
    size = extents * DTYPE_BYTES[str(p.partial_dtype if moved == "D" else p.dtype)]
    table = Table(title="KB by link (row sends to column)", title_justify="left")
    table.add_column("", justify="right")
    for rank in range(ranks):
        table.add_column(str(rank), justify="right")
    for src in range(ranks):
        cells = [f"{links[src, dst] / 1e3:,.1f}" if (src, dst) in links else "" for dst in range(ranks)]
        table.add_row(str(src), *cells)
    console.print(table)
    total, formula = sum(links.values()), (ranks - 1) * size
    same = "equal" if total == formula else "NOT equal"
    console.print(f"all links {total:,} bytes; (N - 1) · |{moved}| = {ranks - 1} · {size:,} = {formula:,}: {same}")


# --- whole layers on GPUs -------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """What is to be measured: the layers of the model, on so many GPUs."""

    ranks: int
    tokens: int
    layers: tuple[tuple[str, Pattern, GemmProblem], ...]  # name, pattern of schedules, extents


class Measured(NamedTuple):
    """Milliseconds of a layer by method, those of the slowest rank."""

    name: str
    problem: GemmProblem
    ms: dict[str, float]


def measurements(tokens: int, gpus: int) -> Measurement:
    """The layers of the model on as many of the GPUs as divide all its extents.

    Raises ValueError where tokens cannot be divided among them.
    """
    layers = get_model(MODEL).layers
    ranks = max(
        (count for count in range(1, gpus + 1) if not any(x.n % count or x.k % count for x in layers)), default=0
    )
    if tokens < 1:
        raise ValueError(f"tokens is an integer >= 1, got {tokens}")
    if ranks and tokens % ranks:
        raise ValueError(f"the layers are measured on {ranks} GPUs, which are to share the tokens evenly, got {tokens}")
    problems = tuple((layer.name, layer.pattern, GemmProblem(m=tokens, n=layer.n, k=layer.k)) for layer in layers)
    return Measurement(ranks, tokens, problems)


def _measure_layers(console: Console, what: Measurement) -> None:
    (cuda,) = (check for check in runtimes(look()) if check.name == "cuda")
    if cuda.status != "ok" or what.ranks < 2:
        why = cuda.detail if cuda.status != "ok" else "it takes two GPUs to move anything"
        console.print(f"The CUDA runtime is not measured. {why} (distgemm doctor says what to do)", markup=False)
        return
    console.print(
        f"[bold]Layers of Llama 70B[/], {what.tokens} tokens, bfloat16, on {what.ranks} GPUs with the CUDA runtime. "
        "Kernels are compiled at first use: a few minutes."
    )
    results: list[Measured] = launch(_run_layers, what.ranks, what.layers, backend="nccl", timeout=PATIENCE)[0]
    console.print(layers_table(results, what.ranks))
    console.print(
        "ms: median of CUDA graphs replayed in turn, slowest rank; TFLOP/s of each GPU. Every result was checked.\n"
        f"{COMPARED[-1]}: the local product, with nothing to move."
    )


def _run_layers(layers: Sequence[tuple[str, Pattern, GemmProblem]]) -> list[Measured]:
    """On each rank: all layers, one after the other."""
    from distgemm.bench.ours import schedule_method
    from distgemm.measure.timing import Operation, measure, torch_methods

    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    errors = Console(stderr=True, quiet=dist.get_rank() != 0)
    found = []
    for number, (name, pattern, problem) in enumerate(layers):
        errors.print(f"measuring {name} ({number + 1} of {len(layers)})")
        operation = Operation(problem, pattern, group, device)
        methods = [schedule_method(operation, schedule, **options) for schedule, options in SCHEDULES[pattern]]
        methods += [method for method in torch_methods(operation) if method.name in COMPARED]
        found.append(Measured(name, problem, measure(operation, methods)))
        del operation, methods
        torch.cuda.empty_cache()  # of the layer before: its graphs and tensors
    return found


def layers_table(results: Sequence[Measured], ranks: int) -> Table:
    """Times of all methods, the fastest first, each beside that of NCCL with cuBLAS."""
    table = Table(title=f"Llama 70B on {ranks} GPUs", title_justify="left")
    table.add_column("layer")
    table.add_column("method", overflow="fold")
    for title in ("ms", "TFLOP/s", f"time, of {UNFUSED}"):
        table.add_column(title, justify="right")
    for name, p, times in results:
        table.add_section()
        label = f"{name}, {p.m} x {p.n} x {p.k}"
        for method, ms in sorted(times.items(), key=lambda pair: pair[1]):
            speed = 2 * p.m * p.n * p.k / ranks / ms / 1e9
            style = None if method in COMPARED else "bold"
            table.add_row(label, method, f"{ms:.3f}", f"{speed:.0f}", f"{100 * ms / times[UNFUSED]:.0f} %", style=style)
            label = ""
    return table


if __name__ == "__main__":
    demo(tokens=TOKENS)
