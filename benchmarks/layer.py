"""Time a layer of Llama, forward and backward, with tensor parallelism over several GPUs.

    python benchmarks/layer.py --ranks 4 --tp 8 --json out.json
    python benchmarks/layer.py --ranks 2 --check      # a tiny layer on CPUs, without timing

The methods are distgemm, NCCL with cuBLAS, and torch's async-TP ops. All have the same autograd structure: tokens are
split over the ranks between GEMMs, the gathered input is kept for the gradient of its weight, and one GEMM computes q,
k and v, as one computes gate and up. All methods are captured into CUDA graphs and checked against NCCL with cuBLAS;
bursts of their replays are interleaved. With fewer ranks than --tp, each rank has the heads and features of one of --tp
ranks. With DISTGEMM_TUNE=0 in the environment, "auto" measures no schedules.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # noqa: F401  (registers torch.ops.symm_mem)
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import distgemm
from distgemm.measure.models import MODELS, Model
from distgemm.measure.timing import order_of_round
from distgemm.runtime.launch import launch

Tensor = torch.Tensor
TINY = Model(hidden=64, intermediate=128, heads=8, kv_heads=4, head=16)
TOLERANCE = 3e-2
"""Largest relative difference between methods, of the output and of each gradient."""
CALLS, ROUNDS = 5, 3
BURST_MS = 150.0
"""Length of a burst of replays. One that is not timed comes before each timed one: then the GPU has the clocks that its
power limit leaves to this method, as in training, and not those that the method before has left."""
BASE = "NCCL + cuBLAS"


# --- two GEMMs with their communication -----------------------------------------------------------------


class Nccl:
    """NCCL and cuBLAS: a collective and a GEMM, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def gather(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of all ranks times b.T, and the tokens of all ranks."""
        whole = x.new_empty(self.ranks * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, x.contiguous(), self.group)
        return whole @ b.t(), whole

    def scatter(self, x: Tensor, b: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks of x times b.T."""
        y = x.new_empty(x.shape[0] // self.ranks, b.shape[0])
        dist.reduce_scatter_tensor(y, x @ b.t(), group=self.group)
        return y


class AsyncTP(Nccl):
    """torch's fused ops, which its compiler uses for async tensor parallelism."""

    def gather(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [b.t()], 0, self.group.group_name)
        return y, whole

    def scatter(self, x: Tensor, b: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), b.t(), "sum", 0, self.group.group_name)


class Ours(Nccl):
    """distgemm's functions, with a schedule and chunks for each."""

    def __init__(self, group: dist.ProcessGroup, gather: tuple[str, int | None], scatter: tuple[str, int | None]):
        super().__init__(group)
        self.gather_schedule, self.scatter_schedule = gather, scatter

    def gather(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        schedule, chunks = self.gather_schedule
        return distgemm.all_gather_matmul(
            x, b, group=self.group, schedule=schedule, chunks=chunks, return_gathered=True
        )

    def scatter(self, x: Tensor, b: Tensor) -> Tensor:
        schedule, chunks = self.scatter_schedule
        return distgemm.matmul_reduce_scatter(x, b, group=self.group, schedule=schedule, chunks=chunks)


class GemmsAlone(Nccl):
    """The GEMMs without communication: the time if all communication were hidden. The results are wrong."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.wholes: dict[torch.Size, Tensor] = {}

    def gather(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        # Random numbers, drawn once: with zeros a GPU draws less power, and multiplies faster.
        if x.shape not in self.wholes:
            self.wholes[x.shape] = x.new_empty(self.ranks * x.shape[0], x.shape[1]).normal_()
        whole = self.wholes[x.shape]
        return whole @ b.t(), whole

    def scatter(self, x: Tensor, b: Tensor) -> Tensor:
        return (x @ b.t())[: x.shape[0] // self.ranks]


GEMMS_ALONE = "products alone, no communication"


def methods(group: dist.ProcessGroup) -> dict[str, Nccl]:
    """The methods, by name."""
    gather = "all_gather_1d_tiling_cd_rotating_a"
    chain, pairwise = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
    return {
        BASE: Nccl(group),
        "torch async-TP": AsyncTP(group),
        "distgemm auto": Ours(group, ("auto", None), ("auto", None)),
        "distgemm gather, chain of 2 chunks": Ours(group, (gather, 1), (chain, 2)),
        "distgemm gather, pairwise": Ours(group, (gather, 1), (pairwise, 1)),
        GEMMS_ALONE: GemmsAlone(group),
    }


# --- the layer --------------------------------------------------------------------------------------------------


class GatherMatmul(torch.autograd.Function):
    """The tokens of all ranks times b.T, with gradients."""

    @staticmethod
    def forward(ctx: Any, method: Nccl, x: Tensor, b: Tensor) -> Tensor:
        y, whole = method.gather(x, b)
        ctx.method = method
        ctx.save_for_backward(whole, b)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole, b = ctx.saved_tensors
        return None, ctx.method.scatter(grad, b.t()), grad.t() @ whole


class MatmulScatter(torch.autograd.Function):
    """This rank's tokens of x times b.T, summed over the ranks, with gradients."""

    @staticmethod
    def forward(ctx: Any, method: Nccl, x: Tensor, b: Tensor) -> Tensor:
        ctx.method = method
        ctx.save_for_backward(x, b)
        return method.scatter(x, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, b = ctx.saved_tensors
        dx, whole = ctx.method.gather(grad, b.t())  # the gradient of the weight uses the gathered gradient, too
        return None, dx, whole.t() @ x


@dataclass
class Layer:
    """One rank's part of a layer, and its inputs.

    Attributes:
        model: sizes of the model.
        tp: number of ranks that share the model; heads and features are those of one of them.
        x: the input, (tokens of this rank, hidden).
        incoming: the gradient of the output, (tokens of this rank, hidden).
        qkv, out, fc1, fc2: this rank's weights, (out_features, in_features).
        norms: weights of both norms, (2, hidden).
    """

    model: Model
    tp: int
    x: Tensor
    incoming: Tensor
    qkv: Tensor
    out: Tensor
    fc1: Tensor
    fc2: Tensor
    norms: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by name."""
        names = ("x", "qkv", "out", "fc1", "fc2", "norms")
        return {name: getattr(self, name) for name in names}

    def forward(self, method: Nccl, x: Tensor) -> Tensor:
        """The output for an input like ``x``."""
        hidden = x.shape[1]
        y = functional.rms_norm(x, (hidden,), self.norms[0])
        y = self.attention(GatherMatmul.apply(method, y, self.qkv))
        x = x + MatmulScatter.apply(method, y, self.out)
        y = GatherMatmul.apply(method, functional.rms_norm(x, (hidden,), self.norms[1]), self.fc1)
        gate, up = y.chunk(2, -1)
        return x + MatmulScatter.apply(method, functional.silu(gate) * up, self.fc2)

    def run(self, method: Nccl) -> dict[str, Tensor]:
        """The output and all gradients, by name."""
        x = self.forward(method, self.x)
        grads = torch.autograd.grad(x, list(self.inputs.values()), self.incoming)
        return {"output": x.detach()} | {f"gradient of {k}": g for k, g in zip(self.inputs, grads, strict=True)}

    def attention(self, qkv: Tensor) -> Tensor:
        """Causal attention of one sequence with all tokens and this rank's heads, without rotary positions."""
        heads, kv_heads = self.model.heads // self.tp, self.model.kv_heads // self.tp
        every = qkv.unflatten(-1, (heads + 2 * kv_heads, self.model.head)).transpose(0, 1)[None]
        q, k, v = every.split([heads, kv_heads, kv_heads], 1)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y[0].transpose(0, 1).flatten(-2)

    def parts(self, method: Nccl) -> dict[str, Callable[[], object]]:
        """Each GEMM of the forward and the backward pass with its communication, by name."""
        ranks = method.ranks
        found: dict[str, Callable[[], object]] = {}
        for name, gathers in (("qkv", True), ("out", False), ("fc1", True), ("fc2", False)):
            b = getattr(self, name).detach()
            few, many = self.x.shape[0], ranks * self.x.shape[0]
            n, k = b.shape
            x, grad = (b.new_empty(few if gathers else many, k).normal_(), b.new_empty(many if gathers else few, n))
            grad.normal_()
            forward, backward = (method.gather, method.scatter) if gathers else (method.scatter, method.gather)
            found[f"{name} forward"] = lambda f=forward, x=x, b=b: f(x, b)
            found[f"{name} backward"] = lambda f=backward, grad=grad, b=b: f(grad, b.t())
        return found


def layer_of(
    model: Model, tp: int, ranks: int, m: int, device: torch.device, dtype: torch.dtype, number: int = 0
) -> Layer:
    """This rank's part of a layer with this number. Each rank draws other numbers; the norms are the same."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank() + number * dist.get_world_size())
    heads, kv_heads, inner = model.heads // tp, model.kv_heads // tp, model.intermediate // tp

    def randn(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(scale).requires_grad_()

    hidden, wide = model.hidden, (heads + 2 * kv_heads) * model.head
    return Layer(
        model,
        tp,
        x=randn(m // ranks, hidden),
        incoming=randn(m // ranks, hidden).detach(),
        qkv=randn(wide, hidden, hidden**-0.5),
        out=randn(hidden, heads * model.head, (heads * model.head * ranks) ** -0.5),
        fc1=randn(2 * inner, hidden, hidden**-0.5),
        fc2=randn(hidden, inner, (inner * ranks) ** -0.5),
        norms=torch.ones(2, hidden, device=device, dtype=dtype, requires_grad=True),
    )


# --- measuring --------------------------------------------------------------------------------------------------


def compare(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative difference of two results. Raises RuntimeError if it is more than rounding."""
    errors = {k: float((found[k].float() - y.float()).norm() / y.float().norm()) for k, y in wanted.items()}
    if not all(error < TOLERANCE for error in errors.values()):
        raise RuntimeError(f"{name} on rank {dist.get_rank()} differs from {BASE}: {errors}")
    return max(errors.values())


def graph_of(run: Callable[[], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and the result of the last call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            found = run()
    return graph, found


def times_of(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a call by method: the median over rounds, on the slowest rank.

    Bursts of the methods are interleaved, each round in an order of its own; each follows one of its own method.
    """
    once = {name: burst(graph, 1, device) for name, graph in graphs.items()}  # a replay that warms up
    slowest = largest(list(once.values()), device)
    replays = {name: math.ceil(BURST_MS / ms) for name, ms in zip(graphs, slowest, strict=True)}  # equal on all ranks
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS):
        for name in order_of_round(graphs, number):
            burst(graphs[name], replays[name], device)
            times[name].append(burst(graphs[name], replays[name], device) / calls / replays[name])
    by_round = zip(*(largest(row, device) for row in zip(*times.values(), strict=True)), strict=True)
    return {name: statistics.median(row) for name, row in zip(times, by_round, strict=True)}


def burst(graph: torch.cuda.CUDAGraph, replays: int, device: torch.device) -> float:
    """Milliseconds of replays one after the other, on this rank. All ranks begin together."""
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def largest(ms: Sequence[float], device: torch.device) -> list[float]:
    """Of each number, that of the rank whose is the largest."""
    found = torch.tensor(ms, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


def rank_main(model: Model, tp: int, m: int, wanted: list[str] | None) -> dict[str, Any]:
    """Time the layer and its parts on this rank, by method."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    layer = layer_of(model, tp, group.size(), m, device, torch.bfloat16)
    every = {name: method for name, method in methods(group).items() if not wanted or name in (BASE, *wanted)}
    expected = {name: x.clone() for name, x in layer.run(every[BASE]).items()}
    graphs, errors, ran = {}, {}, {}
    for name, method in every.items():
        say(f"{name}: capturing")
        with distgemm.record_calls() as calls:
            layer.run(method)
        ran[name] = [str(call) for call in calls]
        graphs[name], found = graph_of(lambda method=method: layer.run(method), CALLS)
        for x in found.values():
            x.fill_(float("nan"))
        graphs[name].replay()
        torch.cuda.synchronize()
        if name != GEMMS_ALONE:
            errors[name] = compare(name, found, expected)
        del found
    say("measuring the layer")
    result: dict[str, Any] = {"layer_ms": times_of(graphs, CALLS, device), "errors": errors, "ran": ran}
    graphs.clear()
    torch.cuda.empty_cache()
    result["parts_ms"] = {}
    parts = {name: layer.parts(method) for name, method in every.items()}
    for part in parts[BASE]:
        say(f"measuring {part}")
        alone = {name: graph_of(runs[part], 4 * CALLS)[0] for name, runs in parts.items()}
        result["parts_ms"][part] = times_of(alone, 4 * CALLS, device)
        del alone
        torch.cuda.empty_cache()
    return result


def say(text: str) -> None:
    """A line of progress, from rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_main() -> dict[str, float]:
    """The largest differences of distgemm from the collectives, on CPUs, by method."""
    group = dist.group.WORLD
    assert group is not None
    layer = layer_of(TINY, group.size(), group.size(), 8 * group.size(), torch.device("cpu"), torch.float32)
    every = {name: method for name, method in methods(group).items() if name.startswith("distgemm") or name == BASE}
    wanted = layer.run(every[BASE])
    for method in every.values():
        for part in layer.parts(method).values():
            part()
    return {name: compare(name, layer.run(method), wanted) for name, method in every.items()}


def table_of(title: str, times: dict[str, float], errors: dict[str, float]) -> Table:
    """The methods, the fastest first; without an error where there is none."""
    table = Table("method", "ms", f"of {BASE}", "relative difference", title=title)
    for name, ms in sorted(times.items(), key=lambda pair: pair[1]):
        error = f"{errors[name]:.1e}" if name in errors else ""
        table.add_row(name, f"{ms:.3f}", f"{ms / times[BASE]:.3f}", error)
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table of the layer, and one of its GEMMs."""
    times = result["layer_ms"]
    console.print(table_of("forward and backward of one layer", times, result["errors"]))
    table = Table("GEMM, ms", *times, title="each GEMM with its communication")
    for part, row in result["parts_ms"].items():
        table.add_row(part, *(f"{row[name]:.3f}" for name in times))
    sums = {name: sum(row[name] for row in result["parts_ms"].values()) for name in times}
    table.add_row("all", *(f"{ms:.3f}" for ms in sums.values()))
    table.add_row("share of the layer", *(f"{sums[name] / times[name]:.0%}" for name in times))
    console.print(table)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks of layers share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3-70b", help="%(default)s")
    parser.add_argument(
        "--ranks", type=int, default=torch.cuda.device_count(), help="ranks to run, one on each GPU [default: all GPUs]"
    )
    parser.add_argument("--tp", type=int, help="ranks that share a layer [default: --ranks]")
    parser.add_argument("--m", type=int, default=8192, help="tokens of one sequence [default: %(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to this file")
    parser.add_argument("--check", action="store_true", help="check tiny layers on CPUs, without timing")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"only these, and {BASE}")
    args = parser.parse_args()
    console = Console(width=200)
    if args.check:
        console.print(launch(check_main, args.ranks, timeout=100)[0])
        return
    model, tp = MODELS[args.model], args.tp or args.ranks
    if args.m % args.ranks or model.kv_heads % tp or model.intermediate % tp:
        parser.error(
            f"--m is a multiple of --ranks; kv_heads and intermediate of the model are multiples of --tp; got {args}"
        )
    result = launch(rank_main, args.ranks, model, tp, args.m, args.methods, backend="nccl", timeout=560)[0]
    show(result, console)
    for name, calls in result["ran"].items():
        if calls:
            console.print(f"{name}:", *sorted(set(calls)), sep="\n  ")
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        about |= {"model": args.model, "ranks": args.ranks, "tp": tp, "m": args.m}
        args.json.write_text(json.dumps(about | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
