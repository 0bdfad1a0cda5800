"""Time from ``import torch`` to the end of the first training step of a small Llama, in new processes.

    python benchmarks/first_step.py --packed --json FILE  # two ranks share one GPU; all kernels come from the pack
    python benchmarks/first_step.py                       # kernels that are missing are compiled
    python benchmarks/first_step.py --check               # a tiny model on CPUs

The model is that of examples/llama.py in bfloat16. Its layers call with ``schedule="auto"``, and nothing is measured
(DISTGEMM_TUNE=0). The kernel cache is a new folder. With --packed, it is an error if there is a compiler, or if a
kernel of the step does not come from the pack.

Times are seconds since the launching process began to import torch, on the slowest rank. Each rank imports torch once
more, and "of a rank" counts from there. The second step shows how much of the first one is spent on its start.
"""

# ruff: noqa: E402  (the clock starts before the imports that it times)
from __future__ import annotations

import time

START = time.monotonic()

import torch

TORCH = time.monotonic()

import distgemm

DISTGEMM = time.monotonic()

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional

from distgemm.gemm.nvcc import cached, find_nvcc, usable_pack
from distgemm.runtime.launch import launch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from llama import Config, Llama, tensor_parallel_plan

SMALL = Config(vocabulary=32000, hidden=1024, intermediate=2816, layers=4, heads=16, kv_heads=8)
TINY = Config()
SEED = 1


def first_step(config: Config, tokens: int, device_type: str) -> dict[str, Any]:
    """The first two steps on this rank: when each phase ended, by the clock that all processes share."""
    ended = {"rank started": START, "torch imported": TORCH, "distgemm imported": DISTGEMM}

    def end(phase: str) -> None:
        if device_type == "cuda":
            torch.cuda.synchronize()
        ended[phase] = time.monotonic()

    end("process group")
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(SEED)  # every rank draws the whole model and keeps its part
    with device:
        model = Llama(config).bfloat16()
        ids = torch.randint(config.vocabulary, (tokens + 1, 1))
    model = parallelize_module(model, mesh, tensor_parallel_plan())
    end("model")
    with loss_parallel(), distgemm.record_calls() as calls:
        for step in ("first", "second"):
            loss = functional.cross_entropy(model(ids[:-1]).flatten(0, 1).float(), ids[1:].flatten())
            end(f"{step} forward")
            loss.backward()
            end(f"{step} backward")
    without = [
        name
        for name, each in model.named_parameters()
        if each.grad is None or not each.grad.to_local().isfinite().all()
    ]
    if without:
        raise RuntimeError(f"parameters without a finite gradient: {', '.join(without)}")
    return {"ended": ended, "loss": float(loss.detach().full_tensor()), "calls": [*dict.fromkeys(map(str, calls))]}


def kernels() -> dict[str, Any]:
    """The compiler and the pack of this machine, and what is in the kernel cache."""
    pack, why = usable_pack()
    compiler = find_nvcc()
    manifests = [manifest for _, manifest in cached() if manifest is not None]
    return {
        "compiler": None if compiler is None else str(compiler),
        "pack": str(pack) if pack else why or "none",
        "compiled": sorted(each["kernel"] for each in manifests if "pack" not in each),
        "from the pack": sorted(each["kernel"] for each in manifests if "pack" in each),
    }


def refuse_compiler() -> None:
    """Raise RuntimeError if there is a compiler: without one, a kernel that is missing is an error."""
    if (found := find_nvcc()) is not None:
        raise RuntimeError(f"--packed is for machines without a compiler, and {found} is one")


def only_packed(compiled: list[str], calls: list[str]) -> None:
    """Raise RuntimeError unless the kernels of the calls come from the pack.

    Args:
        compiled: names of the kernels in the cache that do not come from the pack.
        calls: what ran, as texts.
    """
    if other := compiled or [call for call in calls if "compiled on this machine" in call]:
        raise RuntimeError(f"not from the pack: {'; '.join(other)}")
    if not any("from the pack" in call for call in calls):
        raise RuntimeError(f"no call names a kernel from the pack: {'; '.join(calls)}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="they share the GPUs; %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="%(default)s")
    parser.add_argument("--packed", action="store_true", help="all kernels come from the pack, or it is an error")
    parser.add_argument("--check", action="store_true", help="a tiny model on CPUs")
    parser.add_argument("--json", type=Path, help="file for the times, the calls and the kernels")
    options = parser.parse_args()
    if options.packed and options.check:
        parser.error("--packed is for GPUs, and --check takes CPUs")
    os.environ["DISTGEMM_TUNE"] = "0"
    config, tokens, backend = (TINY, 64, "gloo") if options.check else (SMALL, options.tokens, "nccl")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DISTGEMM_CACHE_DIR"] = folder
        if options.packed:
            refuse_compiler()
        device = "cpu" if options.check else "cuda"
        ranks = launch(first_step, options.ranks, config, tokens, device, backend=backend, share=not options.check)
        found = kernels()
    calls = ranks[0]["calls"]
    if options.packed:
        only_packed(found["compiled"], calls)
    times = {phase: round(max(rank["ended"][phase] for rank in ranks) - START, 3) for phase in ranks[0]["ended"]}
    result = {
        "device": torch.cuda.get_device_name() if not options.check else "CPUs",
        "ranks": options.ranks,
        "tokens": tokens,
        "model": vars(config),
        "torch": torch.__version__,
        "distgemm": importlib.metadata.version("distgemm"),
        "seconds since import torch": times,
        "first step": times["first backward"],
        "first step of a rank": round(
            max(rank["ended"]["first backward"] - rank["ended"]["rank started"] for rank in ranks), 3
        ),
        "launching process": {
            "torch imported": round(TORCH - START, 3),
            "distgemm imported": round(DISTGEMM - START, 3),
        },
        "loss": ranks[0]["loss"],
        "kernels": found,
        "calls": calls,
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print the times as a table, and what ran."""
    table = Table("phase", "ended after s", "took s", title=f"first step: {result['ranks']} ranks, {result['device']}")
    before = 0.0
    for phase, seconds in result["seconds since import torch"].items():
        table.add_row(phase, f"{seconds:.2f}", f"{seconds - before:.2f}")
        before = seconds
    console = Console()
    console.print(table)
    console.print(
        f"first step: {result['first step']:.2f} s after import torch, {result['first step of a rank']:.2f} s of a rank"
    )
    for call in result["calls"]:
        console.print(call, soft_wrap=True)
    console.print(f"kernels: {result['kernels']}", soft_wrap=True)


if __name__ == "__main__":
    main()
