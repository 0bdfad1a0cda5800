"""State dicts with the whole parameters, as the model without tensor parallelism has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from distgemm.arguments import instance, wrong

__all__ = ["full_state_dict", "load_full_state_dict"]

Tensor = torch.Tensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model without tensor parallelism, on every rank. A collective call.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.

    Returns:
        The parameters and buffers by name, each of them whole. They share no memory with the model.

    Raises:
        ValueError: on all ranks, if a parameter that is no DTensor differs between the ranks of a DTensor. Then nothing
            has summed its gradient.
    """
    instance("model", model, nn.Module, "an nn.Module")
    state: dict[str, Tensor] = model.state_dict()
    meshes = {value.device_mesh for value in state.values() if isinstance(value, DTensor)}
    names = [name for name, _ in model.named_parameters()]
    _check_replicas({name: state[name] for name in names if name in state}, meshes)
    return {key: _whole(value) for key, value in state.items()}


def _whole(x: Tensor) -> Tensor:
    """A whole tensor that shares no memory with x."""
    if not isinstance(x, DTensor):
        return x.clone() if isinstance(x, Tensor) else x  # the extra state of a module is no tensor
    mine, found = x.to_local(), x.full_tensor()  # this rank's tensor itself, if nothing has to be gathered
    return found.clone() if found.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr() else found


def _check_replicas(parameters: Mapping[str, Tensor], meshes: Iterable[DeviceMesh]) -> None:
    """Raise if a parameter that is no DTensor does not have the same bits on all ranks of the meshes."""
    plain = {name: x for name, x in parameters.items() if not isinstance(x, DTensor) and x.numel() and not x.is_meta}
    for mesh in sorted(meshes, key=lambda mesh: str(mesh.mesh.tolist())):  # in the same order on all ranks
        different = [name for name, x in plain.items() if not _same_on_all_ranks(x, mesh)]
        if different:
            raise ValueError(
                f"{', '.join(different)}: no DTensor, and not the same on all ranks of {mesh}. Nothing has summed its "
                "gradient over the ranks; distgemm.nn.SequenceParallel on its module does it"
            )


def _same_on_all_ranks(x: Tensor, mesh: DeviceMesh) -> bool:
    # Bytes, so that a NaN is equal to itself.
    mine = x.detach().flatten().to(mesh.device_type).view(torch.uint8)
    least, largest = mine.clone(), mine.clone()
    for dim in range(mesh.ndim):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return torch.equal(least, largest)


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True, assign: bool = False
) -> None:
    """Load the state dict of the model without tensor parallelism.

    Every rank passes the whole state dict and keeps its parts. For a model without DTensors this is
    ``model.load_state_dict``.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.
        state_dict: whole parameters and buffers by name, as :func:`full_state_dict` returns them.
        strict: as in ``load_state_dict``.
        assign: as in ``load_state_dict``. A model on the device "meta" takes True.

    Raises:
        ValueError: if a parameter has another shape, or is on the device "meta" without ``assign``.
    """
    instance("model", model, nn.Module, "an nn.Module")
    wanted = "a mapping from names to whole tensors"
    named = isinstance(state_dict, Mapping) and all(isinstance(name, str) for name in state_dict)
    if not named:
        raise wrong("state_dict", wanted, state_dict)
    parts = dict(state_dict)
    for key, value in model.state_dict().items():
        given = parts.get(key)
        if given is None:
            continue
        if isinstance(value, Tensor) and not isinstance(given, Tensor):
            raise wrong(f"state_dict[{key!r}]", "a torch.Tensor", given)
        if value.is_meta and not assign:
            raise ValueError(f"{key} is on the device meta and can keep no value; pass assign=True")
        if isinstance(value, DTensor) and not isinstance(given, DTensor):
            if given.shape != value.shape:
                raise ValueError(f"{key} is {tuple(value.shape)} over all ranks, got {tuple(given.shape)}")
            parts[key] = distribute_tensor(given, value.device_mesh, value.placements, src_data_rank=None)
    model.load_state_dict(parts, strict=strict, assign=assign)
