"""State dicts of plain tensors: of the whole parameters, and of each rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distgemm.arguments import MAX_EXTENT, instance, integers, sequence, wrong
from distgemm.nn.tensors import dtensor_of_part, local
from distgemm.torch_ops.library import split_extent

__all__ = [
    "full_state_dict",
    "load_full_state_dict",
    "load_shard_state_dict",
    "megatron_sharded_state_dict",
    "shard_state_dict",
]

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
        ValueError: if a DTensor has another shape, or a parameter is on the device "meta" without ``assign``.
        RuntimeError: as ``load_state_dict``.
    """
    instance("model", model, nn.Module, "an nn.Module")
    parts = _named("state_dict", state_dict)
    for key, value in model.state_dict().items():
        given = parts.get(key)
        if given is None:
            continue
        if isinstance(value, Tensor) and not isinstance(given, Tensor):
            raise wrong(f"state_dict[{key!r}]", "a torch.Tensor", given)
        _check_keeps_values(key, value, assign)
        if isinstance(value, DTensor) and not isinstance(given, DTensor):
            if given.shape != value.shape:
                raise ValueError(f"{key} is {tuple(value.shape)} over all ranks, got {tuple(given.shape)}")
            parts[key] = distribute_tensor(given, value.device_mesh, value.placements, src_data_rank=None)
    model.load_state_dict(parts, strict=strict, assign=assign)


def _named(name: str, state_dict: object) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise wrong(name, "a mapping from names to tensors", state_dict)
    return dict(state_dict)


def _check_keeps_values(key: str, value: Any, assign: bool) -> None:
    if isinstance(value, Tensor) and value.is_meta and not assign:
        raise ValueError(f"{key} is on the device meta and can keep no value; pass assign=True")


# --- shards -----------------------------------------------------------------------------------------------


def shard_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards as plain tensors, for a file of each rank, as Megatron's ``mp_rank_00/model_optim_rng.pt``.

    The shards are those that ``torch.chunk`` makes of the whole parameters.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.

    Returns:
        The parameters and buffers by name. They share memory with the model, as those of ``model.state_dict`` do.

    Raises:
        ValueError: if a parameter is a DTensor of several dimensions of a mesh, as FSDP2 makes it.
    """
    instance("model", model, nn.Module, "an nn.Module")
    state: dict[str, Tensor] = model.state_dict()
    for key, value in state.items():
        _split_dim(key, value)
    with torch.no_grad():
        return {key: local(value) for key, value in state.items()}


def load_shard_state_dict(
    model: nn.Module,
    state_dicts: Sequence[Mapping[str, Tensor]],
    *,
    stacked: Mapping[str, Sequence[int]] | None = None,
    strict: bool = True,
    assign: bool = False,
) -> None:
    """Load the shards of all ranks of a checkpoint, which may be another number of ranks than the model has.

    Every rank passes the shards of all ranks, and copies only what it keeps. So pass tensors that
    ``torch.load(file, mmap=True)`` has mapped. No rank sends anything.

    Args:
        model: a model with layers of :mod:`distgemm.nn`, or with DTensors as parameters.
        state_dicts: for each rank of the checkpoint its shards by name, as :func:`shard_state_dict` returns them.
        stacked: parameters in which the shard of each rank is a stack of the rank's shares of several weights, by name:
            the relative sizes of these shares. ``(1, 1)`` is a gate and an up projection, ``(4, 1, 1)`` is q, k and v
            with 4 heads of q for one of k. Each rank of the model then gets such a stack, too. Without an entry, the
            shards are parts of one weight, one behind the other. The fused q, k and v of Megatron need no entry: they
            are stacked for each group of heads, and ranks have whole groups.
        strict: as in ``load_state_dict``.
        assign: as in ``load_state_dict``. A model on the device "meta" takes True.

    Raises:
        ValueError: if shards do not make up the parameter, if ranks differ in a parameter that all of them have whole,
            if a parameter is a DTensor of several dimensions of a mesh, or is on the device "meta" without ``assign``.
    """
    instance("model", model, nn.Module, "an nn.Module")
    given = sequence("state_dicts", state_dicts, _named, "a sequence with a state dict for each rank")
    if not given:
        raise wrong("state_dicts", "a sequence with a state dict for each rank", state_dicts)
    state = model.state_dict()
    stacks = {key: integers(f"stacked[{key!r}]", sizes, 1, MAX_EXTENT) for key, sizes in (stacked or {}).items()}
    if unknown := sorted(key for key in stacks if key not in state):
        raise ValueError(f"stacked has {', '.join(unknown)}, which are no parameters of the model")
    parts = dict(given[0])
    for key, value in state.items():
        present = [rank for rank, each in enumerate(given) if key in each]
        if not present:
            continue
        if len(present) != len(given):
            raise ValueError(f"{key} is in the state dicts of the ranks {present} only, of {len(given)} ranks")
        pieces = [each[key] for each in given]
        if not isinstance(value, Tensor):  # the extra state of a module
            continue
        for rank, piece in enumerate(pieces):
            instance(f"state_dicts[{rank}][{key!r}]", piece, Tensor, "a torch.Tensor")
        _check_keeps_values(key, value, assign)
        dim = _split_dim(key, value)
        if dim is None:
            if any(piece.shape != pieces[0].shape or not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                raise ValueError(f"{key} is whole on each rank, and the state dicts differ in it")
            parts[key] = pieces[0]
            if isinstance(value, DTensor):
                parts[key] = distribute_tensor(pieces[0], value.device_mesh, value.placements, src_data_rank=None)
            continue
        assert isinstance(value, DTensor)
        fits = all(_without(piece, dim) == _without(value, dim) for piece in pieces)
        mine = _share(key, pieces, dim, stacks.get(key, (1,)), value.device_mesh) if fits else None
        if mine is None or mine.shape != local(value).shape:
            raise ValueError(
                f"{key} is {tuple(value.shape)} over all ranks, and the shards have the shapes "
                f"{[tuple(piece.shape) for piece in pieces]}, split along dimension {dim}"
            )
        parts[key] = dtensor_of_part(mine, value.device_mesh, Shard(dim), value)
    model.load_state_dict(parts, strict=strict, assign=assign)


def _without(x: Tensor, dim: int) -> list[int]:
    """The shape of a tensor without one dimension."""
    return [*x.shape[:dim], *x.shape[dim + 1 :]]


def _split_dim(key: str, value: Any) -> int | None:
    """The dimension along which a parameter is split over the ranks; None: every rank has the whole."""
    if not isinstance(value, DTensor):
        return None
    if len(value.placements) != 1:
        raise ValueError(
            f"{key} is split over {value.device_mesh}, and a shard of a rank is that of one dimension of a mesh; take "
            "torch.distributed.checkpoint, or load before fully_shard"
        )
    (placement,) = value.placements
    return placement.dim if isinstance(placement, Shard) else None


def _share(key: str, pieces: Sequence[Tensor], dim: int, sizes: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """This rank's share of a parameter, from the shards of all ranks of a checkpoint."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    stacks = []
    for piece in pieces:
        if piece.dim() <= dim or piece.shape[dim] % sum(sizes):
            raise ValueError(
                f"{key}: a shard of shape {tuple(piece.shape)} is no stack of parts with the sizes {list(sizes)} along "
                f"dimension {dim}"
            )
        unit = piece.shape[dim] // sum(sizes)
        stacks.append(torch.split(piece, [size * unit for size in sizes], dim))
    found = []
    for parts in zip(*stacks, strict=True):
        shares = split_extent(sum(part.shape[dim] for part in parts), ranks)
        start = sum(shares[:rank])
        found += _range(parts, dim, start, start + shares[rank])
    return torch.cat(found, dim)


def _range(parts: Sequence[Tensor], dim: int, start: int, stop: int) -> list[Tensor]:
    """The parts of the tensors, one behind the other along ``dim``, from ``start`` to ``stop``."""
    found = []
    for part, end in zip(parts, accumulate(part.shape[dim] for part in parts), strict=True):
        begin = end - part.shape[dim]
        low = min(max(start, begin), end)
        high = max(min(stop, end), low)
        found.append(part.narrow(dim, low - begin, high - low))
    return found


# --- Megatron-core ----------------------------------------------------------------------------------------


def megatron_sharded_state_dict(
    module: nn.Module, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: Any = None
) -> dict[str, Any]:
    """What ``megatron.core.dist_checkpointing`` saves and loads of a module, as Megatron's modules return it.

    Written for megatron-core 0.16.1.

    Args:
        module: a module with layers of :mod:`distgemm.nn`, or with DTensors as parameters.
        prefix: stands before the names.
        sharded_offsets: as Megatron passes them, for pipeline stages.
        metadata: as Megatron passes it. ``metadata["dp_cp_group"]`` has the replicas.

    Returns:
        Megatron's ShardedTensors by name. They share memory with the module.

    Raises:
        ValueError: if the ranks do not divide a parameter, because Megatron's shards have one size; if a parameter is a
            DTensor of several dimensions of a mesh; and for a state that is no tensor.
    """
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

    state: dict[str, Any] = module.state_dict()
    dims = {key: _split_dim(key, value) for key, value in state.items()}
    mesh = next((value.device_mesh for value in state.values() if isinstance(value, DTensor)), None)
    groups: dict[str, Any] = {
        "tp_group": None if mesh is None else mesh.get_group(),
        "dp_cp_group": (metadata or {}).get("dp_cp_group"),
    }
    found: dict[str, Any] = {}
    for key, value in state.items():
        name, part = prefix + key, local(instance(key, value, Tensor, "a torch.Tensor").detach())
        dim = dims[key]
        if dim is None:
            found[name] = make_sharded_tensor_for_checkpoint(part, name, prepend_offsets=sharded_offsets, **groups)
        elif value.shape[dim] % value.device_mesh.size():
            raise ValueError(
                f"{key}: Megatron's shards have one size, and {value.device_mesh.size()} ranks do not divide "
                f"{value.shape[dim]}; torch.distributed.checkpoint and distgemm.nn.shard_state_dict take any size"
            )
        else:
            groups_of_it = groups | {"tp_group": value.device_mesh.get_group()}
            found[name] = make_tp_sharded_tensor_for_checkpoint(
                part, name, dim, prepend_offsets=sharded_offsets, **groups_of_it
            )
    return found
