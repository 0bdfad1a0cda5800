"""Train a small Llama on long sequences, whose tokens are split over the ranks as in DeepSpeed Ulysses, with FSDP2.

    python examples/train_long_context.py                # 32,768 tokens on 4 ranks on CPUs over gloo, some minutes
    python examples/train_long_context.py --tokens 1024  # the same in seconds
    python examples/train_long_context.py --backend nccl --ranks 8 --tokens 131072 --hidden 4096 --layers 8 \
        --heads 32 --kv-heads 8 --rate 3e-4               # 8 GPUs, in bfloat16
    python examples/train_long_context.py --backend nccl --ranks 4 --tokens 4096 --hidden 512 --layers 2 --heads 8 \
        --compare                                         # the same compared with one rank; ranks may share a GPU

Each rank has some tokens of the sequence. For attention, an all-to-all brings it all tokens of some heads. FSDP2 shards
all parameters over the same ranks and sums their gradients, so nothing but the projections of attention knows of the
split.

On CPUs, the program computes in float64, trains the same model in one process, too, and compares losses, the gradients
of the first step, and parameters: they are equal to 1e-10. On GPUs with --compare, it trains the model on one rank in
bfloat16 and in float32, too. The ranks' losses and gradients differ from those in float32 by at most twice as much as
those of the one rank in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from llama import Config, Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from train_llama import LETTERS, local, text

import distgemm
from distgemm.runtime.launch import launch

SEED = 1
BOUND = 1e-10
"""The largest difference from the model of one process, on CPUs."""
ROUNDING = 2.0
"""The largest error of several ranks in bfloat16, over that of one rank in bfloat16."""


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
    compare: bool = False

    @property
    def device(self) -> str:
        """What tensors lie on."""
        return "cuda" if self.backend == "nccl" else "cpu"

    @property
    def config(self) -> Config:
        """Sizes of the model."""
        sizes = {"layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads, "theta": 500_000.0}
        return Config(vocabulary=len(LETTERS), hidden=self.hidden, intermediate=3 * self.hidden, **sizes)


class Trained(NamedTuple):
    """What is compared.

    Attributes:
        losses: of each step.
        tensors: the gradients of the first step and the parameters behind the last one, by name, on rank 0. Empty if
            they are not compared.
    """

    losses: list[float]
    tensors: dict[str, torch.Tensor]


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
    mesh = init_device_mesh(options.device, (options.ranks,), mesh_dim_names=("sp",))
    # FSDP2 sums the gradients of all parameters over these ranks.
    split: dict[str, Any] = {"head_dim": config.hidden // config.heads, "kv_heads": config.kv_heads}
    split |= {"sequence_dim": 0, "sum_gradients": False}
    to_heads, to_tokens = distgemm.nn.TokensToHeads(**split), distgemm.nn.HeadsToTokens(**split)
    plan = {f"blocks.*.attention.{name}": to_heads for name in ("wq", "wk", "wv")}
    if options.ranks > 1:
        parallelize_module(model, mesh, plan | {"blocks.*.attention.wo": to_tokens})
    policy = MixedPrecisionPolicy()
    if options.device == "cuda":
        ids = torch.empty(options.tokens // options.ranks, 1, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):  # as FSDP2 casts parameters below
            distgemm.warmup(model, ids)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens
    return model


def run(model: nn.Module, options: Options, rank: int, ranks: int) -> Trained:
    """Train on part ``rank`` of the tokens. The losses are those of the whole sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses: list[float] = []
    tensors: dict[str, torch.Tensor] = {}

    def keep(what: str, values: dict[str, Any]) -> None:
        if options.compare:
            whole = {name: local(x.full_tensor() if isinstance(x, DTensor) else x) for name, x in values.items()}
            tensors.update({f"{what}{name}": x.detach().clone().cpu() for name, x in whole.items() if rank == 0})

    for step in range(options.steps):
        start = time.monotonic()
        ids = sequence(step, options).to(options.device)
        mine, wanted = ids[:-1].chunk(ranks)[rank], ids[1:].chunk(ranks)[rank]
        optimizer.zero_grad()
        logits = model(mine).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        part = functional.cross_entropy(logits, wanted.flatten(), reduction="sum") / options.tokens
        part.backward()
        if step == 0:
            keep("gradient of ", {name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        loss = part.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {time.monotonic() - start:.1f} s", flush=True)
    keep("", dict(model.named_parameters()))
    return Trained(losses, tensors)


def train(options: Options) -> Trained:
    """Train on this rank."""
    rank = dist.get_rank()
    model = sharded(model_of(options).to(options.device), options)
    with distgemm.record_calls() as calls:
        found = run(model, options, rank, options.ranks)
    if rank == 0 and calls:
        print("calls:", *sorted({str(call) for call in calls}), sep="\n", flush=True)
    return found


def train_alone(options: Options) -> Trained:
    """Train the model of one process, in the type in which it is made: without distgemm and FSDP2."""
    model = model_of(options).to(options.device)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    found = run(model, options, 0, 1)
    for name, each in model.named_parameters():
        if torch.equal(each, before[name]):
            raise RuntimeError(f"{name} was not trained")
    return found


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of losses, gradients and parameters."""
    found = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return max(*found, *((one.tensors[name] - other.tensors[name]).abs().max().item() for name in other.tensors))


def errors(found: Trained, true: Trained) -> dict[str, float]:
    """The largest relative error of the losses, and of the gradients, each of a whole tensor."""
    pairs = [(found.tensors[name], each) for name, each in true.tensors.items() if name.startswith("gradient")]
    return {
        "losses": max(abs(a - b) / b for a, b in zip(found.losses, true.losses, strict=True)),
        "gradients": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
    }


def check_on_gpus(options: Options, found: Trained) -> None:
    """Compare ranks in bfloat16 with one rank in bfloat16 and one in float32.

    Raises:
        RuntimeError: if the errors of the ranks are larger than roundings explain.
    """
    alone = replace(options, ranks=1)
    print("one rank, bfloat16", flush=True)
    rounded = launch(train, 1, alone, backend="nccl", timeout=3600)[0]
    print("one rank, float32", flush=True)
    true = train_alone(alone)
    ours, usual = errors(found, true), errors(rounded, true)
    print(f"relative errors of {options.ranks} ranks:", *(f"{name} {error:.1e}" for name, error in ours.items()))
    print("relative errors of one rank:", *(f"{name} {error:.1e}" for name, error in usual.items()))
    # Roundings may cancel in the one rank's loss, so the rounding of a number is allowed.
    bounds = {"losses": max(ROUNDING * usual["losses"], 2.0**-8), "gradients": ROUNDING * usual["gradients"]}
    for name, bound in bounds.items():
        if not ours[name] <= bound:
            raise RuntimeError(f"the relative error of {name} is at most {bound:.1e}, got {ours[name]:.1e}")


def main(arguments: list[str] | None = None) -> None:
    """The command.

    Raises:
        RuntimeError: if losses, gradients or parameters differ from those of the model in one process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        if name != "compare":
            parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help="%(default)s")
    parser.add_argument("--compare", action="store_true", help="also on GPUs, compare with one rank")
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
    if options.backend == "gloo":
        options = replace(options, compare=True)
    share = options.device == "cuda" and 0 < torch.cuda.device_count() < options.ranks
    if share:
        print(f"{options.ranks} ranks share {torch.cuda.device_count()} GPUs: times mean nothing")
    found: Trained = launch(train, options.ranks, options, backend=options.backend, timeout=3600, share=share)[0]
    if options.compare and options.device == "cuda":
        check_on_gpus(options, found)
    elif options.compare:
        print("the same in one process", flush=True)
        largest = difference(found, train_alone(options))
        print(f"largest difference of losses, gradients and parameters: {largest:.1e}")
        if not largest < BOUND:
            raise RuntimeError(f"the difference is at most {BOUND:.0e}, got {largest:.1e}")


if __name__ == "__main__":
    main()
