"""The ranks of the tests of the layers with FSDP2 and activation checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import distgemm
from tests.multiprocess.nn_worker import differs, follow, llama, whole

CONFIG = llama.Config(vocabulary=32, hidden=16, intermediate=24, heads=4, kv_heads=4)


def _follows(prepare: Callable[[nn.Module, Any], None], dp: int, steps: int = 3) -> list[str]:
    """The differences from the model on one rank: losses and gradients of some steps, and the state after them."""
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    plain = llama.Llama(CONFIG).double()
    parallel = parallelize_module(copy.deepcopy(plain), mesh["tp"], llama.tensor_parallel_plan())
    prepare(parallel, mesh)
    ids = torch.randint(CONFIG.vocabulary, (4 * mesh["tp"].size() + 1, 4))
    wrong, _ = follow(plain, parallel, ids, mesh["dp"], steps)
    return wrong + [
        f"{name} in the end"
        for (name, x), y in zip(parallel.named_parameters(), plain.parameters(), strict=True)
        if differs(whole(x), y)
    ]


def _shard(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def sharded_training() -> list[str]:
    """Parameters are also sharded over replicas, and gathered for each block."""
    return _follows(_shard, 2)


def _checkpoint_blocks(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def checkpointed_training() -> list[str]:
    """Blocks are computed again for the backward pass, with their gathers."""
    wrong: list[str] = []
    gathers = []
    for prepare in (_checkpoint_blocks, lambda model, mesh: None):
        with distgemm.record_calls() as calls:
            wrong += _follows(prepare, 1, steps=1)
        gathers.append(sum(call.function == "all_gather_matmul" for call in calls))
    again, once = gathers
    if not again > once > 0:
        wrong.append(f"nothing was computed again: {again} gathers, and {once} without checkpoints")
    return wrong


def both() -> list[str]:
    """Sharding and checkpoints together."""

    def prepare(model: Any, mesh: Any) -> None:
        _checkpoint_blocks(model, mesh)
        _shard(model, mesh)

    return _follows(prepare, 2)
