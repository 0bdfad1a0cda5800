"""State dicts with the whole parameters, as the model without tensor parallelism has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from distgemm.nn.linear import ParallelLinear

__all__ = ["full_state_dict", "load_full_state_dict"]

Tensor = torch.Tensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model without tensor parallelism, on every rank. A collective call.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.

    Returns:
        The parameters and buffers by name, each of them whole.
    """
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))  # a layer that is used twice has two names
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
    """Load the state dict of the model without tensor parallelism.

    Every rank passes the whole state dict and keeps its parts. For a model without DTensors this is
    ``model.load_state_dict``.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.
        state_dict: whole parameters and buffers by name, as :func:`full_state_dict` returns them.

    Raises:
        ValueError: if a parameter has another shape.
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
