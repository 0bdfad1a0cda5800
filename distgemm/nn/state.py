"""State dicts of whole models, as one rank without tensor parallelism has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from distgemm.nn.linear import ParallelLinear

__all__ = ["full_state_dict", "load_full_state_dict"]

Tensor = torch.Tensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model that is not sharded, on every rank; a collective call.

    Knows the layers of this package and parameters that are DTensors.
    """
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))  # layers that are tied have several names
    for key, value in model.state_dict().items():
        prefix, _, name = key.rpartition(".")
        module = modules[prefix]
        if isinstance(value, DTensor):
            found[key] = value.full_tensor()
        elif isinstance(module, ParallelLinear):
            found[key] = module.whole(name)
        else:
            found[key] = value
    return found


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load what :func:`full_state_dict` made, or the state dict of the model that is not sharded.

    Every rank has all of it, and takes its part. For models without DTensors this is ``load_state_dict``.
    """
    current = model.state_dict()
    parts = dict(state_dict)
    for key, value in current.items():
        given = parts.get(key)
        if isinstance(value, DTensor) and given is not None and not isinstance(given, DTensor):
            if given.shape != value.shape:
                raise ValueError(f"{key} is {tuple(value.shape)} over all ranks, got {tuple(given.shape)}")
            parts[key] = distribute_tensor(
                given.to(value.device), value.device_mesh, value.placements, src_data_rank=None
            )
    model.load_state_dict(parts)
