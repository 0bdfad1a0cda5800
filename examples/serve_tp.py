"""Serve layers of a Llama with tensor parallelism: prefill and decode, with a cache of keys and values.

    python examples/serve_tp.py                                                  # a tiny model on 2 CPU processes
    python examples/serve_tp.py --backend nccl --tp 4 --model llama-3-70b --prompt 4096 --bucket 1024 --check  # 4 GPUs

Prefill has many tokens. Between layers they are split over the ranks: GEMMs overlap with an all-gather or with a
reduce-scatter. Decode has few tokens, and every rank has all of them: GEMMs overlap with an all-reduce. On GPUs, each
shape of decode is one CUDA graph. The first run compiles kernels and measures schedules. With DISTGEMM_TUNE=0 in the
environment, it does not measure.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import distgemm
from distgemm.measure.models import MODELS, Model
from distgemm.runtime.launch import init_from_env, launch

TINY = Model(hidden=64, intermediate=160, heads=8, kv_heads=4, head=8)
VOCABULARY = 512
"""Embedding and head are small, and the same on all ranks: the example is about the layers."""
SEED = 1
REPEATS = 5
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error of logits. Each layer rounds a dozen times."""


@dataclass(frozen=True)
class Options:
    """The arguments of the command line."""

    model: str = "tiny"
    layers: int = 2
    tp: int = 2
    batch: int = 2
    prompt: int = 64
    tokens: int = 16
    bucket: int = 32
    backend: str = "gloo"
    schedule: str = "auto"
    check: bool = False

    @property
    def sizes(self) -> Model:
        """The sizes of the model."""
        return TINY if self.model == "tiny" else MODELS[self.model]


# --- the model ----------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """The weights of one layer on this rank, each (out_features, in_features) as in nn.Linear.

    q, k and v are one weight, and so are gate and up. A rank has some heads and some intermediate features.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def draw(model: Model, layer: int, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> Weights:
    """A rank's part of a layer. Every rank draws the same numbers and keeps its part."""
    generator = torch.Generator(device).manual_seed(SEED * 1000 + layer)

    def randn(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return drawn.div_(columns**0.5)

    def part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(ranks, dim)[rank]

    q, k, v = (part(randn(heads * model.head, model.hidden)) for heads in (model.heads, *[model.kv_heads] * 2))
    out = part(randn(model.hidden, model.heads * model.head), 1).contiguous()
    gate, up = (part(randn(model.intermediate, model.hidden)) for _ in range(2))
    down = part(randn(model.hidden, model.intermediate), 1).contiguous()
    return Weights(torch.cat([q, k, v]), out, torch.cat([gate, up]), down)


class Projections:
    """The projections of a layer on one rank. Activations are (tokens, batch, features)."""

    def column_parallel(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """From the hidden features to this rank's features, for all tokens."""
        return functional.linear(x, weight)

    def row_parallel(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """From this rank's features to the hidden features, summed over the ranks."""
        return functional.linear(x, weight)


class Prefill(Projections):
    """The projections if the tokens are split over the ranks between layers."""

    def __init__(self, group: dist.ProcessGroup, schedule: str) -> None:
        self.group = group
        self.gather, self.scatter = ("auto", "auto") if schedule == "auto" else ("ag+gemm", "gemm+rs")

    def column_parallel(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return distgemm.all_gather_matmul(x, weight, group=self.group, schedule=self.gather)

    def row_parallel(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return distgemm.matmul_reduce_scatter(x, weight, group=self.group, schedule=self.scatter)


class Decode(Projections):
    """The projections if every rank has all tokens."""

    def __init__(self, group: dist.ProcessGroup, schedule: str) -> None:
        self.group, self.schedule = group, "auto" if schedule == "auto" else "gemm+ar"

    def row_parallel(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return distgemm.matmul_all_reduce(x, weight, group=self.group, schedule=self.schedule)


class Server:
    """This rank's part of the layers, and the cache of keys and values, (layers, batch, heads, tokens, features).

    Args:
        options: the arguments of the command line.
        rank: this rank.
        ranks: number of ranks; 1 for the program without tensor parallelism.
        device: device of all tensors.
        dtype: dtype of weights and activations.
    """

    def __init__(self, options: Options, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
        model = self.model = options.sizes
        self.options, self.ranks, self.device = options, ranks, device
        self.layers = [draw(model, layer, rank, ranks, device, dtype) for layer in range(options.layers)]
        generator = torch.Generator(device).manual_seed(SEED)
        self.embedding = torch.randn(VOCABULARY, model.hidden, generator=generator, device=device, dtype=dtype)
        self.longest = -(-(options.prompt + options.tokens) // options.bucket) * options.bucket
        shape = (options.layers, options.batch, model.kv_heads // ranks, self.longest, model.head)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        half = torch.arange(model.head // 2, device=device, dtype=torch.float64) / (model.head // 2)
        angles = torch.arange(self.longest, device=device, dtype=torch.float64)[:, None] * 500000.0**-half
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(self, x: torch.Tensor, projections: Projections, at: torch.Tensor, length: int) -> torch.Tensor:
        """All layers for tokens at positions ``at``. They attend to the first ``length`` positions of the cache."""
        allowed = torch.arange(length, device=self.device) <= at[:, None]
        for number, weights in enumerate(self.layers):
            y = projections.column_parallel(_norm(x), weights.qkv)
            x = x + projections.row_parallel(self._attention(number, y, at, allowed), weights.out)
            gate, up = projections.column_parallel(_norm(x), weights.gate_up).chunk(2, -1)
            x = x + projections.row_parallel(functional.silu(gate) * up, weights.down)
        return x

    def _attention(self, layer: int, qkv: torch.Tensor, at: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        model, length = self.model, allowed.shape[1]
        heads, kv_heads = model.heads // self.ranks, model.kv_heads // self.ranks
        # (tokens, batch, heads * features) to (batch, heads, tokens, features)
        every = qkv.unflatten(-1, (heads + 2 * kv_heads, model.head)).permute(1, 2, 0, 3)
        q, k, v = every.split([heads, kv_heads, kv_heads], 1)
        self.keys[layer].index_copy_(2, at, self._rotated(k, at))
        self.values[layer].index_copy_(2, at, v)
        k, v = self.keys[layer, :, :, :length], self.values[layer, :, :, :length]
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        whole = length == len(at)  # prefill
        y = functional.scaled_dot_product_attention(
            self._rotated(q, at), k, v, attn_mask=None if whole else allowed, is_causal=whole
        )
        return y.permute(2, 0, 1, 3).flatten(-2)

    def _rotated(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (tokens, batch) to the residual stream."""
        return functional.embedding(ids, self.embedding)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the vocabulary, in float32."""
        return functional.linear(_norm(x), self.embedding).float() / self.model.hidden**0.5


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), eps=1e-5)


# --- serving ------------------------------------------------------------------------------------------------


class Parallel:
    """Prefill and decode on this rank of a group."""

    def __init__(self, server: Server, group: dist.ProcessGroup) -> None:
        self.server, self.group = server, group
        self.prefill_projections = Prefill(group, server.options.schedule)
        self.decode_projections = Decode(group, server.options.schedule)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """From the prompt (tokens, batch) to the logits of the next token (batch, vocabulary), on all ranks."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        mine = ids.chunk(ranks)[rank]
        at = torch.arange(len(ids), device=ids.device)
        x = self.server.run(self.server.embed(mine), self.prefill_projections, at, len(ids))
        last = x[-1].clone()  # the last rank has the last token of the prompt
        dist.broadcast(last, group=self.group, group_src=ranks - 1)
        return self.server.logits(last)

    def decode(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """From one token of each sequence (batch,) to the logits of the next token.

        On a GPU this replays a graph, and the logits are valid until the next call.
        """
        bucket = self.server.options.bucket
        length = -(-(position + 1) // bucket) * bucket
        if ids.device.type != "cuda":
            return self.step(ids, torch.tensor([position]), length)
        shape = (len(ids), length)
        if shape not in self.graphs:
            self.graphs[shape] = self._record(ids, position, length)
        graph, ids_in, at, logits = self.graphs[shape]
        ids_in.copy_(ids)
        at.fill_(position)
        graph.replay()
        return logits

    def step(self, ids: torch.Tensor, at: torch.Tensor, length: int) -> torch.Tensor:
        """One step of decode, which a graph captures."""
        x = self.server.run(self.server.embed(ids[None]), self.decode_projections, at, length)
        return self.server.logits(x[0])

    def _record(
        self, ids: torch.Tensor, position: int, length: int
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The graph of a shape, and the tensors that it reads and writes: ids, position, logits."""
        ids_in, at = ids.clone(), torch.full((1,), position, device=ids.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # makes executables; the replay writes the same keys and values again
                self.step(ids_in, at, length)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.step(ids_in, at, length)
        return graph, ids_in, at, logits


@dataclass(frozen=True)
class Report:
    """The results of a run. Times are medians in seconds on the slowest rank.

    Attributes:
        prefill: time of a prompt.
        decode: time of each further token.
        eager: time of a token without a graph.
        tokens: the generated tokens, (tokens, batch).
        error: the largest relative error of logits against the program on one rank; None if not checked.
        calls: the calls that ran.
    """

    prefill: float
    decode: float
    eager: float
    tokens: list[list[int]]
    error: float | None
    calls: tuple[str, ...]


@torch.inference_mode()
def serve(options: Options) -> Report:
    """Run a prompt and generate tokens, on this rank."""
    rank = init_from_env(options.backend)
    group = dist.group.WORLD
    assert group is not None
    gpu = options.backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    server = Server(options, rank, options.tp, device, dtype)
    parallel = Parallel(server, group)
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(VOCABULARY, (options.prompt, options.batch), generator=generator).to(device)
    with distgemm.record_calls() as calls:
        parallel.prefill(prompt)  # makes executables
        prefill = _seconds([lambda: parallel.prefill(prompt)] * REPEATS, device)
        logits = [parallel.prefill(prompt)]
        ids, generated = logits[0].argmax(-1), []
        times = []
        for position in range(options.prompt, options.prompt + options.tokens):
            generated.append(ids)
            parallel.decode(ids, position)  # captures the graph of a new shape; later calls write the same values
            times.append(_seconds([lambda ids=ids, at=position: parallel.decode(ids, at)], device))
            logits.append(parallel.decode(ids, position).clone())
            ids = logits[-1].argmax(-1)
        last = torch.tensor([options.prompt + options.tokens - 1], device=device)
        eager = _seconds([lambda: parallel.step(generated[-1], last, server.longest)] * REPEATS, device)
    error = _error(options, prompt, generated, logits, device, dtype) if options.check else None
    tokens = torch.stack(generated).tolist()
    distinct = tuple(sorted({str(call) for call in calls}))
    return Report(prefill, sorted(times)[len(times) // 2], eager, tokens, error, distinct)


def _seconds(runs: list[Callable[[], object]], device: torch.device) -> float:
    """The median time of runs on the slowest rank. Each run starts after a barrier."""
    times = []
    for run in runs:
        _wait(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def _wait(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _error(
    options: Options,
    prompt: torch.Tensor,
    generated: list[torch.Tensor],
    logits: list[torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """The largest relative error of logits, against one forward pass of all tokens on one rank.

    Raises RuntimeError if it is more than rounding.
    """
    whole = Server(options, 0, 1, device, dtype)
    ids = torch.cat([prompt, torch.stack(generated)])
    at = torch.arange(len(ids), device=device)
    x = whole.run(whole.embed(ids), Projections(), at, len(ids))
    wanted = whole.logits(x[options.prompt - 1 :])
    error = float(((torch.stack(logits) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    if not error < TOLERANCES[dtype]:
        raise RuntimeError(f"logits differ from those of one rank by {error:.1e}, more than {TOLERANCES[dtype]:.0e}")
    return error


def show(options: Options, report: Report) -> None:
    """Print a table of times, and the calls that ran."""
    model = options.sizes
    title = f"{options.model}: {options.layers} layers, {options.tp} ranks, {options.batch} sequences"
    table = Table("", "", title=title)
    tokens = options.prompt * options.batch
    table.add_row(f"prefill of {options.prompt} tokens each", f"{report.prefill * 1e3:.2f} ms")
    table.add_row("", f"{tokens / report.prefill:.0f} tokens/s")
    graph = ", one graph" if options.backend == "nccl" else ""
    table.add_row(f"a token of each sequence{graph}", f"{report.decode * 1e3:.3f} ms")
    if options.backend == "nccl":
        table.add_row("the same without a graph", f"{report.eager * 1e3:.3f} ms")
    if report.error is not None:
        table.add_row("logits, relative error against one rank", f"{report.error:.1e}")
    console = Console()
    console.print(f"hidden {model.hidden}, intermediate {model.intermediate}, {model.heads} heads of {model.head}")
    console.print(table)
    print("calls:", *report.calls, sep="\n")


def main(arguments: list[str] | None = None) -> Report | None:
    """The command. Returns the report of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        elif name in ("model", "schedule"):
            choices = ["tiny", *MODELS] if name == "model" else ["auto", "named"]
            parser.add_argument(option, choices=choices, default=default, help="%(default)s")
        else:
            parser.add_argument(option, type=type(default), default=default, help="%(default)s")
    options = Options(**vars(parser.parse_args(arguments)))
    for name in ("layers", "tp", "batch", "prompt", "tokens", "bucket"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} is 1 or more, got {value}")
    if options.prompt % options.tp:
        more = options.prompt + -options.prompt % options.tp
        parser.error(
            f"--prompt is a multiple of --tp, because the ranks split the prompt; got {options.prompt} and "
            f"{options.tp}, --prompt {more} would do"
        )
    if (heads := options.sizes.kv_heads) % options.tp:
        parser.error(f"--tp divides the {heads} kv_heads of the model {options.model}, got {options.tp}")
    if "RANK" in os.environ:  # torchrun started this process, and one for each other rank
        report = serve(options)
        if dist.get_rank() == 0:
            show(options, report)
        dist.destroy_process_group()
        return report
    found: Report = launch(serve, options.tp, options, backend=options.backend, timeout=540)[0]
    show(options, found)
    return found


if __name__ == "__main__":
    main()
