"""Train a small Llama on long sequences, whose tokens are split over the ranks as in DeepSpeed Ulysses, with FSDP2.

    python examples/train_long_context.py                # 32,768 tokens on 4 ranks on CPUs over gloo, some minutes
    python examples/train_long_context.py --tokens 1024  # the same in seconds
    python examples/train_long_context.py --backend nccl --ranks 8 --tokens 131072 --hidden 4096 --layers 8 \
        --heads 32 --kv-heads 8                           # 8 GPUs, in bfloat16

Each rank has some tokens of the sequence. For attention, an all-to-all brings it all tokens of some heads. FSDP2 shards
all parameters over the same ranks and sums their gradients, so nothing but the projections of attention knows of the
split. On CPUs, the program computes in float64, trains the same model in one process, too, and compares losses and
parameters: they are equal to 1e-10.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llama import Config, Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from train_llama import LETTERS, local, text

import distgemm
from distgemm.runtime.launch import launch

SEED = 1
BOUND = 1e-10
"""The largest difference from the model of one process, on CPUs."""


@dataclass(frozen=True)
class Options:
    """The arguments of the command line."""

    tokens: int = 32768
    steps: int = 2
    ranks: int = 4
    layers: int = 1
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    rate: float = 3e-3
    backend: str = "gloo"

    @property
    def config(self) -> Config:
        """Sizes of the model."""
        sizes = {"layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads, "theta": 500_000.0}
        return Config(vocabulary=len(LETTERS), hidden=self.hidden, intermediate=3 * self.hidden, **sizes)


def sequence(step: int, options: Options) -> torch.Tensor:
    """The sequence of a step, (tokens + 1, 1). It is the same on all ranks."""
    letters = text(options.tokens + 1, random.Random(SEED * 1_000_003 + step))
    return torch.tensor([LETTERS.index(letter) for letter in letters])[:, None]


def model_of(options: Options) -> nn.Module:
    """The whole model, with the same parameters in each process."""
    torch.manual_seed(SEED)
    model = Llama(options.config)
    return model.double() if options.backend == "gloo" else model


def sharded(model: nn.Module, options: Options) -> nn.Module:
    """The model on this rank's tokens, with its parameters sharded over the ranks."""
    config = options.config
    device = "cuda" if options.backend == "nccl" else "cpu"
    mesh = init_device_mesh(device, (options.ranks,), mesh_dim_names=("sp",))
    # FSDP2 sums the gradients of all parameters over these ranks.
    split: dict[str, Any] = {"head_dim": config.hidden // config.heads, "kv_heads": config.kv_heads}
    split |= {"sequence_dim": 0, "sum_gradients": False}
    to_heads, to_tokens = distgemm.nn.TokensToHeads(**split), distgemm.nn.HeadsToTokens(**split)
    plan = {f"blocks.*.attention.{name}": to_heads for name in ("wq", "wk", "wv")}
    parallelize_module(model, mesh, plan | {"blocks.*.attention.wo": to_tokens})
    policy = MixedPrecisionPolicy()
    if options.backend == "nccl":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens
    return model


def run(model: nn.Module, options: Options, rank: int, ranks: int, device: str) -> list[float]:
    """Train on part ``rank`` of the tokens. Returns the losses of the whole sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses = []
    for step in range(options.steps):
        start = time.monotonic()
        ids = sequence(step, options).to(device)
        mine, wanted = ids[:-1].chunk(ranks)[rank], ids[1:].chunk(ranks)[rank]
        optimizer.zero_grad()
        logits = model(mine).flatten(0, 1)
        part = functional.cross_entropy(logits, wanted.flatten(), reduction="sum") / options.tokens
        part.backward()
        optimizer.step()
        loss = part.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {time.monotonic() - start:.1f} s", flush=True)
    return losses


def train(options: Options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank. Returns the losses, and the whole parameters."""
    rank = dist.get_rank()
    device = "cuda" if options.backend == "nccl" else "cpu"
    model = sharded(model_of(options).to(device), options)
    with distgemm.record_calls() as calls:
        losses = run(model, options, rank, options.ranks, device)
    if rank == 0:
        print("calls:", *sorted({str(call) for call in calls}), sep="\n", flush=True)
    parameters = {name: local(each.full_tensor()).detach().cpu() for name, each in model.named_parameters()}  # type: ignore[attr-defined]
    return losses, parameters


def difference(options: Options, losses: list[float], parameters: dict[str, torch.Tensor]) -> float:
    """The largest difference of losses and parameters from those of the model in one process."""
    model = model_of(options)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    print("the same in one process", flush=True)
    found = [abs(a - b) for a, b in zip(run(model, options, 0, 1, "cpu"), losses, strict=True)]
    for name, each in model.named_parameters():
        if torch.equal(each, before[name]):
            raise RuntimeError(f"{name} was not trained")
        found.append((each - parameters[name]).abs().max().item())
    return max(found)


def main(arguments: list[str] | None = None) -> None:
    """The command.

    Raises:
        RuntimeError: if losses or parameters differ from those of the model in one process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help="%(default)s")
    options = Options(**vars(parser.parse_args(arguments)))
    for name in ("tokens", "steps", "ranks", "layers", "hidden", "heads", "kv_heads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, got {getattr(options, name)}")
    if options.tokens % options.ranks or options.hidden % (2 * options.heads):
        parser.error(f"--tokens is a multiple of --ranks, --hidden of twice --heads; got {options}")
    if options.backend not in ("gloo", "nccl"):
        parser.error(f"--backend is gloo or nccl, got {options.backend}")
    if options.heads < options.ranks:
        parser.error(f"--heads is at least --ranks: each rank computes a head; got {options}")
    try:
        distgemm.nn.heads_per_rank(options.ranks, options.heads, options.kv_heads)
    except ValueError as error:
        parser.error(str(error))
    found: Any = launch(train, options.ranks, options, backend=options.backend, timeout=3600)
    if options.backend == "gloo":
        largest = difference(options, *found[0])
        print(f"largest difference of losses and parameters: {largest:.1e}")
        if not largest < BOUND:
            raise RuntimeError(f"the difference is at most {BOUND:.0e}, got {largest:.1e}")


if __name__ == "__main__":
    main()
