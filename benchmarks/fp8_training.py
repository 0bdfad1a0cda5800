"""Train the small Llama of examples/ in bf16 and with fp8 recipes, and compare the losses.

    python benchmarks/fp8_training.py                                    # on one rank
    python benchmarks/fp8_training.py --tp 2 --recipes bf16 rowwise      # tensor parallel over gloo
    python benchmarks/fp8_training.py --record benchmarks/results/fp8_training.json
    python benchmarks/fp8_training.py --device cuda --tp 2               # over nccl; ranks may share a GPU

Parameters are float32 under torch.autocast in bf16. The head stays in bf16. The learning rate falls to zero in a line.
The loss of a run is the mean of its last steps. On CPUs, blocks of "blockwise" are smaller than 128,
because the shards of this model are. On GPUs the model is larger, since kernels have blocks of 128.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional

import distgemm
from distgemm.runtime.launch import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama
import train_llama

LETTERS = len(train_llama.LETTERS)
CONFIGS = {
    "cpu": llama.Config(LETTERS, hidden=128, intermediate=384),
    "cuda": llama.Config(64, hidden=512, intermediate=1536, kv_heads=8),
}
BLOCKS = {"cpu": 32, "cuda": 128}
EVERY = 10
"""Of so many steps, one loss is recorded."""
LAST = 20
"""Steps whose mean loss is that of the run."""


@dataclass(frozen=True)
class Run:
    """A run: its recipe, how long it is, and the ranks."""

    recipe: str
    scope: str = "global"
    steps: int = 300
    tp: int = 1
    rate: float = 1e-3
    batch: int = 16
    tokens: int = 64
    device: str = "cpu"


def recipe_of(run: Run) -> Any:
    """The recipe of a run; None: bf16."""
    return None if run.recipe == "bf16" else distgemm.fp8.recipe(run.recipe, scope=run.scope, block=BLOCKS[run.device])


def make_model(run: Run, recipe: Any) -> Any:
    """The model, the same on all ranks and for all numbers of ranks."""
    torch.manual_seed(train_llama.SEED)
    model = llama.Llama(CONFIGS[run.device]).to(run.device)
    if run.tp > 1:
        mesh = init_device_mesh(run.device, (run.tp,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, llama.tensor_parallel_plan())
    if recipe is not None:
        distgemm.nn.use_recipe(model, recipe, distgemm.nn.all_but("head"))
    return model


def train(run: Run) -> list[float]:
    """The losses of a run."""
    recipe = recipe_of(run)
    model = make_model(run, recipe)
    if recipe is not None and recipe.amax == "static":
        calibrate(model, run)
    if run.tp > 1 and run.device == "cuda":
        with torch.autocast(run.device, torch.bfloat16):
            distgemm.warmup(model, batch_of(run, 0)[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate)
    losses = []
    for number in range(run.steps):
        optimizer.param_groups[0]["lr"] = run.rate * (1 - number / run.steps)
        losses.append(step(model, optimizer, run, number))
    return losses


def train_on_ranks(run: Run) -> list[float]:
    """The losses of a run on several ranks."""
    if run.device == "cpu":
        return launch(train, run.tp, run, timeout=3600)[0]
    return launch(train, run.tp, run, backend="nccl", timeout=3600, share=torch.cuda.device_count() < run.tp)[0]


def batch_of(run: Run, number: int) -> torch.Tensor:
    """The letters of a step, (tokens + 1, batch)."""
    return train_llama.batch_of(number, train_llama.Options(batch=run.batch, tokens=run.tokens)).to(run.device)


def step(model: Any, optimizer: Any, run: Run, number: int) -> float:
    """One step. Returns its loss."""
    ids = batch_of(run, number)
    optimizer.zero_grad()
    with torch.autocast(run.device, torch.bfloat16):
        logits = model(ids[:-1])
    with loss_parallel() if run.tp > 1 else contextlib.nullcontext():
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[1:].flatten())
        loss.backward()
    optimizer.step()
    return float(train_llama.local(loss.detach()))


def calibrate(model: Any, run: Run) -> None:
    """Set the largest magnitudes of a static recipe: four times those of 3 steps with a delayed one."""
    trial = make_model(run, distgemm.fp8.recipe("tensorwise_delayed"))
    optimizer = torch.optim.AdamW(trial.parameters(), lr=run.rate)
    for number in range(3):
        step(trial, optimizer, run, number)
    for name, found in trial.named_modules():
        if isinstance(found, distgemm.fp8.LayerState):
            x, w, dy = (4 * found.history.max(1).values).tolist()
            model.get_submodule(name).set(x=x, w=w, dy=dy)


def loss_of(losses: list[float]) -> float:
    """The loss of a run."""
    last = losses[-LAST:]
    return sum(last) / len(last)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["bf16", *distgemm.fp8.RECIPES], help="%(default)s")
    parser.add_argument("--scope", choices=["global", "shard"], default="global", help="%(default)s")
    parser.add_argument("--steps", type=int, default=300, help="%(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--device", choices=list(CONFIGS), default="cpu", help="%(default)s")
    parser.add_argument("--record", type=Path, help="a file for the losses, which keeps runs that it has")
    options = parser.parse_args()
    rows = json.loads(options.record.read_text())["runs"] if options.record and options.record.exists() else []
    for name in options.recipes:
        run = Run(name, options.scope, options.steps, options.tp, device=options.device)
        start = time.monotonic()
        losses = train(run) if run.tp == 1 else train_on_ranks(run)
        rows = [row for row in rows if Run(**row["run"]) != run]
        rows.append(
            {"run": asdict(run), "loss": loss_of(losses), "losses": [round(each, 4) for each in losses[::EVERY]]}
        )
        print(f"{name}, {run.scope}, tp {run.tp}: {losses[0]:.4f} to {loss_of(losses):.5f}, "
              f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
        if options.record:
            command = "python benchmarks/fp8_training.py --record FILE, also with --tp, --scope and --device"
            facts = {
                "command": command,
                "torch": torch.__version__,
                "model": asdict(CONFIGS[run.device]),
                "block": BLOCKS[run.device],
            }
            options.record.write_text(
                json.dumps({**facts, "last_steps": LAST, "recorded_every": EVERY, "runs": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
