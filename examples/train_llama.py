"""Train a small Llama with data parallelism and tensor parallelism, on CPUs or GPUs.

    python examples/train_llama.py                       # 2 x 2 ranks on CPUs over gloo
    python examples/train_llama.py --resume              # continue from the last checkpoint, with the same bits
    python examples/train_llama.py --backend nccl --dp 1 --tp 4 --graph        # 4 GPUs, each step is one CUDA graph
    torchrun --nproc-per-node=8 examples/train_llama.py --backend nccl --tp 4  # 2 x 4 ranks on 8 GPUs

The text is sums in words, and each letter is a token. Checkpoints, losses and a plot of the losses go to --folder. On
GPUs, the first run compiles kernels and measures schedules, which takes minutes. With DISTGEMM_TUNE=0 in the
environment, it does not measure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from llama import Config, Llama, tensor_parallel_plan
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional

import distgemm
from distgemm.runtime.launch import init_from_env, launch
from distgemm.torch_ops import CallRecord

LETTERS = " \n.abcdefghijklmnopqrstuvwxyz"
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen", "sixteen")  # fmt: skip
SEED = 1
WARMUP_STEPS = 3
"""Steps before one is captured. They compile kernels, make executables and create the optimizer's state."""


@dataclass(frozen=True)
class Options:
    """The arguments of the command line."""

    steps: int = 100
    dp: int = 2
    tp: int = 2
    batch: int = 16
    tokens: int = 64
    rate: float = 3e-3
    save_every: int = 50
    backend: str = "gloo"
    folder: str = "llama-run"
    resume: bool = False
    graph: bool = False


def text(letters: int, chance: random.Random) -> str:
    """Text of so many letters: sums in words, such as "two plus three is five"."""
    found = ""
    while len(found) < letters:
        a, b = chance.randrange(9), chance.randrange(9)
        found += f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}.\n"
    return found[:letters]


def batch_of(step: int, options: Options) -> torch.Tensor:
    """The batch of a step, (tokens + 1, batch). It is the same on all ranks, and after a restart."""
    chance = random.Random(SEED * 1_000_003 + step)
    lines = [text(options.tokens + 1, chance) for _ in range(options.batch)]
    return torch.tensor([[LETTERS.index(letter) for letter in line] for line in lines]).t()


def train(options: Options) -> list[float]:
    """Train on this rank. Returns the losses of all steps."""
    rank = init_from_env(options.backend)
    device = torch.device("cuda", torch.cuda.current_device()) if options.backend == "nccl" else torch.device("cpu")
    mesh = init_device_mesh(device.type, (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(SEED)  # every rank draws the whole model and keeps its part
    model = parallelize_module(Llama(Config(vocabulary=len(LETTERS))).to(device), mesh["tp"], tensor_parallel_plan())
    # Capturable: the optimizer's step count is on the GPU, so that a graph can contain the step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, capturable=device.type == "cuda")
    folder = Path(options.folder)
    losses = load(folder, model, optimizer) if options.resume else []
    calls: list[CallRecord] = []

    def one_step(ids: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, ids, mesh["dp"])

    run = GraphedStep(one_step) if options.graph else one_step
    with progress(rank, len(losses), options.steps) as report:
        for step in range(len(losses), options.steps):
            ids = batch_of(step, options).chunk(options.dp, 1)[mesh.get_local_rank("dp")].to(device)
            with distgemm.record_calls() as made:
                losses.append(run(ids).item())
            calls = made or calls  # a replay makes no calls
            report(losses[-1])
            if step + 1 == options.steps or (step + 1) % options.save_every == 0:
                save(folder, model, optimizer, losses)
    if rank == 0:
        print("calls of a step:", *sorted({str(call) for call in calls}), sep="\n")
        draw(folder, losses)
    return losses


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, dp: DeviceMesh
) -> torch.Tensor:
    """One step on this replica's part of the batch. Returns the loss of the whole batch. The host does not wait."""
    optimizer.zero_grad()
    with loss_parallel():
        logits = model(ids[:-1])
        part = functional.cross_entropy(logits.flatten(0, 1), ids[1:].flatten())
        part.backward()
    loss = local(part.detach()).clone()
    for each in (loss, *(local(parameter.grad) for parameter in model.parameters())):
        dist.all_reduce(each, group=dp.get_group())
        each.div_(dp.size())
    optimizer.step()
    return loss


class GraphedStep:
    """A step as one CUDA graph. The first calls run the step itself; later calls replay the graph.

    All calls have inputs of one shape. A result is valid until the next call. A replay runs the same kernels in the
    same order, so losses have the same bits as without a graph.
    """

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.step, self.warmup_steps = step, WARMUP_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.warmup_steps:
            self.warmup_steps -= 1
            return self._run_on_side_stream(ids)
        if self.graph is None:
            self.ids, graph = ids.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # captures and does not run
                self.loss = self.step(self.ids)
            self.graph = graph
        self.ids.copy_(ids)
        self.graph.replay()
        return self.loss

    def _run_on_side_stream(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the step on another stream, as torch requires before a backward pass is captured."""
        stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            loss = self.step(ids)
        stream.wait_stream(side)
        return loss


def local(x: Any) -> torch.Tensor:
    """The local tensor of a DTensor; other tensors as they are."""
    return x.to_local() if isinstance(x, DTensor) else x


# --- checkpoints ----------------------------------------------------------------------------------------


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Save a checkpoint, which a run with another number of ranks can load, too."""
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{len(losses)}")
    if dist.get_rank() == 0:
        # Written last, so that it refers to a complete checkpoint.
        partial = folder / "losses.partial"
        partial.write_text(json.dumps(losses))
        partial.replace(folder / "losses.json")
    dist.barrier()


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load the last checkpoint. Returns the losses before it."""
    if not (folder / "losses.json").exists():
        raise ValueError(f"{folder} has no checkpoint: run without --resume first")
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder / f"step-{len(losses)}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return losses


# --- output -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(rank: int, done: int, steps: int) -> Iterator[Any]:
    """A progress bar on rank 0, which shows the last loss."""
    if rank:
        yield lambda loss: None
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console()) as bar:
        task = bar.add_task("train", total=steps, completed=done, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def draw(folder: Path, losses: list[float]) -> None:
    """Plot the losses to loss.svg."""
    if importlib.util.find_spec("matplotlib") is None:
        print("losses are not plotted: matplotlib is missing; pip install 'distgemm[pictures]' installs it")
        return
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats per letter", ylim=(0, None), title="Llama on sums in words")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.svg")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; plot in {folder / 'loss.svg'}")


def main(arguments: list[str] | None = None) -> list[float]:
    """The command. Returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(default), default=default, help="%(default)s")
    options = Options(**vars(parser.parse_args(arguments)))
    least = ("steps", "dp", "tp", "batch", "tokens", "save_every")
    if small := [name for name in least if getattr(options, name) < 1]:
        parser.error(f"--{small[0].replace('_', '-')} is at least 1, got {getattr(options, small[0])}")
    if Config().kv_heads % options.tp:
        heads = Config().kv_heads
        parser.error(f"--tp divides the {heads} heads of keys and values that the model has; got {options.tp}")
    if options.batch % options.dp or options.tokens % options.tp:
        parser.error(f"--batch is a multiple of --dp, --tokens of --tp; got {options}")
    if options.graph and options.backend != "nccl":
        parser.error("--graph captures CUDA graphs: it takes GPUs and --backend nccl")
    ranks = options.dp * options.tp
    launched = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    if launched not in (None, ranks):
        parser.error(f"--dp {options.dp} and --tp {options.tp} take {ranks} ranks, torchrun has started {launched}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.backend == "nccl" and gpus < (1 if launched else ranks):
        parser.error(f"--backend nccl takes a GPU for each of {ranks} ranks, found {gpus}; --backend gloo takes none")
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:  # torchrun started this process, and one for each other rank
        losses = train(options)
        dist.destroy_process_group()
        return losses
    found: list[float] = launch(train, ranks, options, backend=options.backend, timeout=3600)[0]
    return found


if __name__ == "__main__":
    main()
