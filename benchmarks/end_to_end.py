"""Time training steps and decode of layers of Llama, with each method of tensor parallelism.

    python benchmarks/end_to_end.py --ranks 4 --json FILE
    python benchmarks/end_to_end.py --ranks 2 --check      # tiny layers on CPUs, without timing

A training step is the forward and backward pass of some layers, and AdamW. Layers and methods are those of layer.py. A
step of decode has one token of each sequence, layers of examples/serve_tp.py with a cache of keys and values, and
products whose sums over the ranks are distgemm's, NCCL's or torch's in symmetric memory. Each step is one CUDA graph.
All methods are checked against NCCL with cuBLAS; bursts of their replays are interleaved as in layer.py. With
DISTGEMM_TUNE=0 in the environment, "auto" measures no schedules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
from layer import (
    BASE,
    TINY,
    AsyncTP,
    Layer,
    Nccl,
    Ours,
    compare,
    graph_of,
    layer_of,
    parser_of,
    say,
    table_of,
    times_of,
)
from rich.console import Console
from torch.nn import functional

import distgemm
from distgemm.measure.models import MODELS, Model
from distgemm.runtime.launch import launch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import serve_tp

Tensor = torch.Tensor
RATE = 1e-6
"""The learning rate. Steps change weights, and the next method goes on with them: it has the same work."""
OURS = "distgemm auto"


# --- training -----------------------------------------------------------------------------------------------


class Training:
    """Some layers, and their optimizer.

    Args:
        layers: of this rank.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.weights = {
            f"{name} of layer {number}": weight
            for number, layer in enumerate(layers)
            for name, weight in layer.inputs.items()
            if name != "x"
        }
        gpu = layers[0].x.is_cuda
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=RATE, capturable=gpu, fused=gpu)

    def gradients(self, method: Nccl) -> dict[str, Tensor]:
        """The output and all gradients, by name."""
        self.optimizer.zero_grad()
        x = self.layers[0].x.detach()
        for layer in self.layers:
            x = layer.forward(method, x)
        x.backward(self.layers[-1].incoming)
        grads = {f"gradient of {name}": weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        return {"output": x.detach()} | grads

    def step(self, method: Nccl) -> Tensor:
        """A step. Returns the output of the layers."""
        output = self.gradients(method)["output"]
        self.optimizer.step()
        return output


def training_methods(group: dist.ProcessGroup) -> dict[str, Nccl]:
    """The methods, by name."""
    return {BASE: Nccl(group), "torch async-TP": AsyncTP(group), OURS: Ours(group, ("auto", None), ("auto", None))}


# --- decode -------------------------------------------------------------------------------------------------


class NcclDecode(serve_tp.Projections):
    """cuBLAS, and NCCL's all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def row_parallel(self, x: Tensor, weight: Tensor) -> Tensor:
        y = functional.linear(x, weight)
        dist.all_reduce(y, group=self.group)
        return y


class TorchDecode(NcclDecode):
    """cuBLAS into symmetric memory, and torch's all-reduce there. The next call overwrites a result of two shots."""

    def __init__(self, group: dist.ProcessGroup, shots: int) -> None:
        super().__init__(group)
        self.shots, self.buffers = shots, dict[tuple[int, int], Tensor]()

    def row_parallel(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shape = rows.shape[0], weight.shape[0]
        if shape not in self.buffers:
            found = symmetric_memory.empty(*shape, dtype=x.dtype, device=x.device)
            symmetric_memory.rendezvous(found, self.group)
            self.buffers[shape] = found
        y, name = self.buffers[shape], self.group.group_name
        torch.mm(rows, weight.t(), out=y)
        if self.shots == 1:
            y = torch.ops.symm_mem.one_shot_all_reduce(y, "sum", name)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", name)
        return y.view(*x.shape[:2], -1)


def decode_methods(group: dist.ProcessGroup) -> dict[str, serve_tp.Projections]:
    """The methods, by name."""
    return {
        BASE: NcclDecode(group),
        "torch one-shot + cuBLAS": TorchDecode(group, 1),
        "torch two-shot + cuBLAS": TorchDecode(group, 2),
        OURS: serve_tp.Decode(group, "auto"),
    }


class Decoding:
    """A server whose cache has a prompt of random keys and values.

    Args:
        options: of the server.
        device: of its tensors.
        dtype: of its tensors.
    """

    def __init__(self, options: serve_tp.Options, device: torch.device, dtype: torch.dtype) -> None:
        self.server = serve_tp.Server(options, dist.get_rank(), options.tp, device, dtype)
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        for cache in (self.server.keys, self.server.values):
            cache.normal_(generator=generator)
        self.ids = torch.zeros(options.batch, dtype=torch.int64, device=device)
        self.at = torch.full((1,), options.prompt, device=device)

    def step(self, method: serve_tp.Projections) -> dict[str, Tensor]:
        """The logits of the next tokens. It writes the same keys and values each time."""
        server = self.server
        x = server.run(server.embed(self.ids[None]), method, self.at, server.longest)
        return {"logits": server.logits(x[0])}


# --- measuring --------------------------------------------------------------------------------------------------


def rank_main(model: str, tp: int, layers: int, m: int, batches: list[int], prompt: int) -> dict[str, Any]:
    """The times of steps on this rank, by method."""
    found = {"training": time_training(MODELS[model], tp, layers, m)}
    for batch in batches:
        options = serve_tp.Options(model, layers, dist.get_world_size(), batch, prompt, tokens=1)
        found[f"decode, {batch} sequences"] = time_decode(options)
    return found


def time_training(model: Model, tp: int, layers: int, m: int) -> dict[str, Any]:
    """The times of a training step, by method; how far methods are from NCCL with cuBLAS, and what ran."""
    group = dist.group.WORLD
    assert group is not None
    say("training: the first steps")
    device, ranks = torch.device("cuda", torch.cuda.current_device()), group.size()
    numbers = range(layers)
    training = Training([layer_of(model, tp, ranks, m, device, torch.bfloat16, number) for number in numbers])
    every = training_methods(group)
    wanted = {name: x.clone() for name, x in training.gradients(every[BASE]).items()}
    errors, ran, graphs = {}, {}, {}
    for name, method in every.items():
        with distgemm.record_calls() as calls:
            errors[name] = compare(name, training.gradients(method), wanted)
        ran[name] = sorted({str(call) for call in calls})
    del wanted
    for name, method in every.items():
        graphs[name], output = graph_of(lambda method=method: training.step(method), 1)
        output.fill_(float("nan"))
        graphs[name].replay()
        if not output.isfinite().all():
            raise RuntimeError(f"{name}: a replay of a training step left elements that are not finite")
    say("training: measuring")
    return {"ms": times_of(graphs, 1, device), "errors": errors, "ran": ran}


@torch.inference_mode()
def time_decode(options: serve_tp.Options) -> dict[str, Any]:
    """The same of a step of decode."""
    group = dist.group.WORLD
    assert group is not None
    say(f"decode: {options.batch} sequences")
    device = torch.device("cuda", torch.cuda.current_device())
    decoding, every = Decoding(options, device, torch.bfloat16), decode_methods(group)
    wanted = {name: x.clone() for name, x in decoding.step(every[BASE]).items()}
    errors, ran, graphs = {}, {}, {}
    for name, method in every.items():
        with distgemm.record_calls() as calls:
            decoding.step(method)
        ran[name] = sorted({str(call) for call in calls})
        graphs[name], found = graph_of(lambda method=method: decoding.step(method), 1)
        found["logits"].fill_(float("nan"))
        graphs[name].replay()
        torch.cuda.synchronize()
        errors[name] = compare(name, found, wanted)
    return {"ms": times_of(graphs, 1, device), "errors": errors, "ran": ran}


def check_main() -> dict[str, float]:
    """The largest differences of distgemm from the collectives, on CPUs."""
    group = dist.group.WORLD
    assert group is not None
    device, ranks = torch.device("cpu"), group.size()
    layers = [layer_of(TINY, ranks, ranks, 8 * ranks, device, torch.float32, number) for number in range(2)]
    training, methods = Training(layers), training_methods(group)
    wanted = {name: x.clone() for name, x in training.gradients(methods[BASE]).items()}
    found = {"training": compare(OURS, training.gradients(methods[OURS]), wanted)}
    before = {name: weight.detach().clone() for name, weight in training.weights.items()}
    training.step(methods[OURS])
    if unchanged := [name for name, weight in training.weights.items() if torch.equal(weight, before[name])]:
        raise RuntimeError(f"a training step has not changed {', '.join(unchanged)}")
    with torch.inference_mode():
        decoding = Decoding(serve_tp.Options(tp=ranks, batch=3, tokens=1), device, torch.float32)
        every = decode_methods(group)
        found["decode"] = compare(OURS, decoding.step(every[OURS]), decoding.step(every[BASE]))
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table of each kind of step."""
    for title, found in result.items():
        console.print(table_of(title, found["ms"], found["errors"]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sequences of decode [%(default)s]")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens in the cache [%(default)s]")
    args = parser.parse_args()
    console = Console(width=160)
    if args.check:
        console.print(launch(check_main, args.ranks, timeout=100)[0])
        return
    model: Model = MODELS[args.model]
    tp = args.tp or args.ranks
    if args.m % args.ranks or any(x % each for x in (model.kv_heads, model.intermediate) for each in (tp, args.ranks)):
        parser.error(f"--m is a multiple of --ranks, kv_heads and intermediate of --ranks and --tp; got {args}")
    arguments = (args.model, tp, args.layers, args.m, args.batches, args.prompt)
    result = launch(rank_main, args.ranks, *arguments, backend="nccl", timeout=560)[0]
    show(result, console)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model, "tp": tp}
        about |= {"ranks": args.ranks, "layers": args.layers, "m": args.m, "prompt": args.prompt}
        args.json.write_text(json.dumps(about | {"steps": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
