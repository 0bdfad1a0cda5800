"""The demo: a tensor-parallel MLP on several processes of this machine, with a check of its results.

With GPUs, the demo also measures the layers of Llama 70B on all of them: the CUDA runtime, and what torch offers.
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

from distgemm.cli.doctor import runtimes
from distgemm.cli.options import DEFAULT_M, DEFAULT_MODEL, TIMEOUT_S, named
from distgemm.measure.machine_facts import look
from distgemm.measure.models import get_model
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Gemm
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.collective.executable import CollectiveExecutable
from distgemm.runtime.launch import Backend, launch
from distgemm.schedulers import Pattern

__all__ = ["MeasuredLayer", "Measurement", "UnfusedProgram", "demo", "layers_table", "measure_layers", "measurements"]

TOKENS, HIDDEN, INTERMEDIATE = DEFAULT_M, 8192, 28672
"""Extents of Llama 70B: fc1 is gate and up in one, (2 * INTERMEDIATE, HIDDEN); fc2 is (HIDDEN, INTERMEDIATE)."""

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}

REPLAYS = 5

SCHEDULES: dict[Pattern, tuple[str, ...]] = {
    "ag+gemm": ("all_gather_1d_tiling_cd_rotating_a",),
    "gemm+rs": ("reduce_scatter_1d_tiling_a_rotating_c chunks=2", "reduce_scatter_1d_pairwise_a"),
}
"""The schedules that are measured, with their options. docs/which_schedule.md recommends them."""

UNFUSED = "NCCL + cuBLAS"
COMPARED = (UNFUSED, "torch fused", "cuBLAS alone")
"""What else is measured. The last one computes only the local GEMMs, so no operation is faster."""

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

    Every rank is a process that holds its shards. The ranks use CUDA devices and NCCL if there are enough devices, and
    else the CPU and gloo, where times say nothing about GPUs. The demo prints the work grid, the time of each rank, the
    time of a collective and a matmul one after the other, and the bytes of each link.

    Args:
        world_size: number of ranks.
        schedule_ag, schedule_rs: names of schedules on one axis of ranks.
        scale: divides every extent.
        dtype: element type of the random inputs.
        tokens: also measure the whole layers of Llama 70B with so many tokens on all GPUs, or print why the CUDA
            runtime does not work here; None: do neither.
        console: where tables are printed.

    Raises:
        RuntimeError: if a result differs from the unsharded GEMM in float64 by more than the bound of its types, or
            that of a whole layer from NCCL and cuBLAS by more than rounding.
        ValueError: if arguments do not fit.
    """
    console = console or Console()
    if scale < 1:
        raise ValueError(f"scale is an integer >= 1, got {scale!r}")
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype is one of {', '.join(UNIT_ROUNDOFF)}, got {dtype!r}")
    to_measure = None if tokens is None else measurements(tokens, torch.cuda.device_count())
    rows, hidden, intermediate = (max(1, extent // scale) for extent in (TOKENS, HIDDEN, INTERMEDIATE))
    nccl = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    backend: Backend = "nccl" if nccl else "gloo"
    where = "CUDA devices over NCCL" if nccl else "the CPU over gloo"
    problems = (
        ("fc1, all-gather + GEMM", schedule_ag, GemmProblem(m=rows, n=2 * intermediate, k=hidden, dtype=dtype)),
        ("fc2, GEMM + reduce-scatter", schedule_rs, GemmProblem(m=rows, n=hidden, k=intermediate, dtype=dtype)),
    )
    plans = []
    for (_, schedule, problem), sums in zip(problems, (False, True), strict=True):
        # Arguments are refused before anything is printed or started.
        argument, does = ("schedule_rs", "adds over ranks") if sums else ("schedule_ag", "gathers")
        with named(argument):
            plan = make_plan(problem, schedule, world_size)
            if UnfusedProgram(plan).sums != sums and world_size > 1:
                raise ValueError(f"the demo takes a schedule that {does}, got {schedule!r}, which is {plan.schedule}")
        plans.append(plan)
    console.print(
        f"[bold]MLP of Llama 70B, extents / {scale}:[/] {rows} tokens, hidden {hidden}, intermediate "
        f"{intermediate}, {dtype}; {world_size} ranks on {where}"
    )
    by_rank = launch(_run_rank, world_size, plans, backend=backend)
    failed = []
    for index, ((title, _, _), plan) in enumerate(zip(problems, plans, strict=True)):
        found = [results[index] for results in by_rank]
        _print_plan(console, title, plan)
        _print_times(console, plan, found)
        _print_links(console, plan)
        error, bound = _error(plan, [result.d for result in found]), error_bound(plan)
        passed = error <= bound
        verdict = "[green]pass[/]" if passed else "[red]FAIL[/]"
        console.print(f"against float64: max |D - exact| / (|A| |B|ᵀ) = {error:.2e}, bound {bound:.2e}: {verdict}\n")
        if not passed:
            failed.append(f"{title}, {plan.schedule}: error {error:.2e} exceeds {bound:.2e}")
    if failed:
        raise RuntimeError("; ".join(failed))
    if to_measure is not None:
        measure_layers(console, to_measure)


# --- on each rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """The result of a rank: its D, and its median times, s."""

    d: torch.Tensor
    time: float
    unfused_time: float
    unfused_program: str


def _shard(plan: Plan, operand: str, rank: int) -> torch.Tensor:
    """A shard of random numbers. Every rank that holds the same box gets the same numbers."""
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
    unfused = UnfusedProgram(plan)
    d = executable(a, b)
    unfused.run(a, b)
    times: list[float] = []
    unfused_times: list[float] = []
    for _ in range(REPLAYS):
        times.append(_timed(lambda: executable(a, b, out=d), device))
        unfused_times.append(_timed(lambda: unfused.run(a, b), device))
    return _Result(d.cpu(), statistics.median(times), statistics.median(unfused_times), unfused.title)


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


class UnfusedProgram:
    """The unfused program that does a plan's job: a collective and a matmul, one after the other.

    Attributes:
        title: what it calls.
        gathered: the operand that it gathers, "A" or "B"; "" if it gathers nothing.
        sums: whether it adds partial sums over the ranks.
        blocks: whether the shards are equal blocks of rows in the order of ranks, which torch's collectives take.

    Raises:
        ValueError: for a plan that moves more than one operand.
    """

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
                raise ValueError(f"the demo takes schedules that move one operand; {plan.schedule} moves A and B")
            self.gathered = "".join(lacking)
        elif a[1] != (0, p.m) or b[1] != (0, p.n):
            raise ValueError(f"the demo takes schedules that move one operand; {plan.schedule} moves more")
        moved = self.gathered or "D"
        boxes = [plan.box(moved, rank) for rank in range(plan.world_size)]
        columns = p.n if moved == "D" else p.k
        rows = boxes[0][1][1] - boxes[0][1][0]
        self.blocks = all(box[1:] == ((rank * rows, (rank + 1) * rows), (0, columns)) for rank, box in enumerate(boxes))
        if self.sums:
            collective = _SCATTER if self.blocks else "all_reduce and a slice"
            self.title = f"matmul, {collective}"
        elif self.gathered:
            collective = _GATHER if self.blocks else "all_gather of padded shards and their assembly"
            self.title = f"{collective} of {self.gathered}, matmul"
        else:
            self.title = "matmul"

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
    """The largest error of an element, relative to the sum of the absolute values of its terms."""
    a, b = (_whole(plan, operand, [_shard(plan, operand, r) for r in range(plan.world_size)]) for operand in "AB")
    difference = (_whole(plan, "D", d_shards) - a @ b.T).abs()
    worst = float((difference / (a.abs() @ b.abs().T)).max())
    return float("inf") if worst != worst else worst


def error_bound(plan: Plan) -> float:
    """The largest error by rounding: of k products and their sums, of the partial sum of each rank, and of D."""
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
    rows = (("plan", [r.time for r in found]), (found[0].unfused_program, [r.unfused_time for r in found]))
    for name, times in rows:
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in (*times, max(times))))
    console.print(table)


def _print_links(console: Console, plan: Plan) -> None:
    p, ranks = plan.problem, plan.world_size
    links = plan.link_bytes()
    moved = UnfusedProgram(plan).gathered or "D"
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
    """The layers to measure.

    Attributes:
        ranks: number of ranks, one on each GPU.
        tokens: rows of A and D.
        layers: name, pattern and problem of each layer.
    """

    ranks: int
    tokens: int
    layers: tuple[tuple[str, Pattern, GemmProblem], ...]


class MeasuredLayer(NamedTuple):
    """A layer, and the time of each method on the slowest rank, ms."""

    name: str
    problem: GemmProblem
    ms: dict[str, float]


def measurements(tokens: int, gpus: int) -> Measurement:
    """The layers of Llama 70B on the largest number of GPUs that divides all extents.

    Raises:
        ValueError: if the GPUs cannot share the tokens evenly.
    """
    layers = get_model(DEFAULT_MODEL).layers
    ranks = max(
        (count for count in range(1, gpus + 1) if not any(x.n % count or x.k % count for x in layers)), default=0
    )
    if tokens < 1 or (ranks and tokens % ranks):
        raise ValueError(f"the number of tokens must be a multiple of the {max(ranks, 1)} GPUs in use, got {tokens}")
    problems = tuple((layer.name, layer.pattern, GemmProblem(m=tokens, n=layer.n, k=layer.k)) for layer in layers)
    return Measurement(ranks, tokens, problems)


def measure_layers(console: Console, what: Measurement) -> None:
    """Measure layers, or print why the CUDA runtime does not work here."""
    (cuda,) = (check for check in runtimes(look()) if check.name == "cuda")
    if cuda.status != "ok" or what.ranks < 2:
        why = cuda.detail if cuda.status != "ok" else "it needs two GPUs to move anything"
        console.print(f"The CUDA runtime is not measured: {why} (see distgemm doctor)", markup=False)
        return
    console.print(
        f"[bold]Layers of Llama 70B[/], {what.tokens} tokens, bfloat16, on {what.ranks} GPUs with the CUDA runtime. "
        "Kernels are compiled at first use: a few minutes."
    )
    results: list[MeasuredLayer] = launch(run_layers, what.ranks, what.layers, backend="nccl", timeout=TIMEOUT_S)[0]
    console.print(layers_table(results, what.ranks))
    console.print(
        "ms: median over rounds of CUDA graphs, slowest rank; TFLOP/s of each GPU. Every result was checked.\n"
        f"{COMPARED[-1]}: the local GEMM, with nothing to move."
    )


def run_layers(layers: Sequence[tuple[str, Pattern, GemmProblem]]) -> list[MeasuredLayer]:
    """Measure all layers, one after the other. Each rank calls this."""
    from distgemm.bench.methods import schedule_method
    from distgemm.measure.operation import Operation, torch_methods
    from distgemm.measure.timing import measure
    from distgemm.tune import TunedConfig

    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    errors = Console(stderr=True, quiet=dist.get_rank() != 0)
    found = []
    for number, (name, pattern, problem) in enumerate(layers):
        errors.print(f"measuring {name} ({number + 1} of {len(layers)})")
        operation = Operation(problem, pattern, group, device)
        methods = [schedule_method(operation, TunedConfig.parse(text)) for text in SCHEDULES[pattern]]
        methods += [method for method in torch_methods(operation) if method.name in COMPARED]
        found.append(MeasuredLayer(name, problem, measure(operation, methods)))
        del operation, methods
        torch.cuda.empty_cache()  # the graphs and tensors of this layer
    return found


def layers_table(results: Sequence[MeasuredLayer], ranks: int) -> Table:
    """A table of the times of all methods, the fastest first, also as a share of the time of NCCL + cuBLAS."""
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
