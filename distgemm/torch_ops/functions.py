"""The operations that users call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distgemm.torch_ops import ops

__all__ = ["Group", "all_gather_matmul", "group_name", "matmul_all_reduce", "matmul_reduce_scatter"]

Tensor = torch.Tensor
Group = dist.ProcessGroup | DeviceMesh | str
"""The ranks that take part: a process group, a mesh of one dimension (``mesh["tp"]``), or a group's name."""


def group_name(group: Group) -> str:
    """The name by which ops know a group. Raises ValueError for what is none, or does not have this rank."""
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("tp",)
            raise ValueError(
                f"the mesh has {group.ndim} dimensions, and the ranks of one take part: group=mesh[{names[-1]!r}]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is a ProcessGroup that this rank is in, or a dimension of a DeviceMesh; got {group!r}. "
            "dist.group.WORLD has all ranks"
        )
    return group.group_name


def _matrix(name: str, x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise ValueError(
            f"{name} is (tokens, ..., in_features), got shape {tuple(x.shape)}; x.unsqueeze(0) is one token"
        )
    return x.flatten(0, -2)


def _rows(m_per_rank: Sequence[int] | None, between: Sequence[int]) -> list[int] | None:
    """Rows of the flattened matrix, from entries of its first dimension."""
    return None if m_per_rank is None else [tokens * prod(between) for tokens in m_per_rank]


def _unflattened(x: Tensor, between: Sequence[int]) -> Tensor:
    return x.reshape(x.shape[0] // prod(between), *between, x.shape[1]) if between else x


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | None = None,
    keep_gathered: bool = False,
) -> Tensor: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Sequence[Tensor],
    *,
    group: Group,
    bias: Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: Sequence[int] | None = None,
    keep_gathered: bool = False,
) -> list[Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | None = None,
    keep_gathered: bool = False,
    return_gathered: bool,
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Sequence[Tensor],
    *,
    group: Group,
    bias: Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: Sequence[int] | None = None,
    keep_gathered: bool = False,
    return_gathered: bool,
) -> tuple[list[Tensor], Tensor]: ...


def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor | Sequence[Tensor],
    *,
    group: Group,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | Sequence[int] | None = None,
    keep_gathered: bool = False,
    return_gathered: bool = False,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """The tokens of all ranks times this rank's part of a weight; all ranks of the group call it alike ::

        a = torch.cat(all_gather(a_shard, group))  # along the first dimension
        return torch.nn.functional.linear(a, b, bias)  # of each b; and a, with return_gathered

    a_shard:  (tokens of this rank, ..., in_features)
    b:        (out_features of this rank, in_features), as a Linear's weight. Several, such as those of q, k and v,
              share one gather: the largest is multiplied while tokens arrive, the others afterwards
    bias:     (out_features of this rank,); for several b a sequence, with None for those without
    schedule: a name of ``distgemm.list_schedules()``; with options, as in "gemm+rs chunks=2 provider=cublas", whatever
              :meth:`distgemm.tune.Choice.parse` reads; or "auto": on CUDA tensors what was measured (docs/tuning.md),
              on CPU tensors, and with chunks, the rule of :func:`distgemm.torch_ops.choose_schedule`
    chunks:   of the schedule; None: what "auto" takes, or the schedule's default
    m_per_rank: tokens of each rank, zeros allowed; None: as many on each
    out_features: of b over all ranks, where they are not the same number on each: rank r then has the r-th part of
              ``torch.chunk``'s; a sequence for several b
    keep_gathered: keep a for the gradient of b. It is an ordinary tensor, held until the backward pass, of the size
              of all ranks' tokens; otherwise a_shard is kept, and gathered a second time
    return_gathered: return a, too. No gradient goes through it

    The gradient of a_shard is a :func:`matmul_reduce_scatter`. Nobody is asked for sizes: what the arguments say is
    compared with the other ranks in the first call with these sizes, which makes a plan, and not after that.

    Raises ValueError for tensors that do not fit.
    """
    several = not isinstance(b, Tensor)
    bs = [b] if isinstance(b, Tensor) else list(b)
    if not bs:
        raise ValueError("all_gather_matmul: b is a tensor, or a sequence of at least one, got none")
    biases = [bias] if isinstance(bias, Tensor) or bias is None else list(bias)
    if several and bias is None:
        biases = [None] * len(bs)
    if len(biases) != len(bs) or (several and isinstance(bias, Tensor)):
        raise ValueError(f"all_gather_matmul: there are {len(bs)} b, so bias is a sequence of {len(bs)}, None for none")
    ns = [out_features] if isinstance(out_features, int) else out_features
    between = a_shard.shape[1:-1]
    # What is kept serves only the gradients of b.
    keeps = keep_gathered and torch.is_grad_enabled() and any(each.requires_grad for each in bs)
    found = ops.all_gather_matmul(
        _matrix("a_shard", a_shard),
        bs,
        [each for each in biases if each is not None],
        [each is not None for each in biases],
        group_name(group),
        schedule,
        chunks,
        _rows(m_per_rank, between),
        ns,
        keeps or return_gathered,
        "forward",
    )
    results = [_unflattened(each, between) for each in found[: len(bs)]]
    chosen = results if several else results[0]
    return (chosen, _unflattened(found[-1].detach(), between)) if return_gathered else chosen


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    in_features: int | None = None,
) -> Tensor:
    """This rank's tokens of the product, summed over the ranks; all ranks of the group call it alike ::

        d = torch.nn.functional.linear(a, b)  # one summand of each token
        return reduce_scatter(d, group) + bias  # along the first dimension

    a:        (all tokens, ..., in_features of this rank)
    b:        (out_features, in_features of this rank)
    bias:     (out_features,), the same on all ranks; added once. Its gradient is that of all tokens, on all ranks
    schedule, chunks: as :func:`all_gather_matmul` takes them
    m_per_rank: tokens that each rank keeps, zeros allowed; None: as many on each
    in_features: over all ranks, where they are not the same number on each: as torch.chunk splits them

    The gradient of a is an :func:`all_gather_matmul`, whose gathered gradient serves b and bias, too.

    Raises ValueError for tensors that do not fit.
    """
    between = a.shape[1:-1]
    rows = _rows(m_per_rank, between)
    flat = _matrix("a", a)
    found = ops.matmul_reduce_scatter(flat, b, bias, group_name(group), schedule, chunks, rows, in_features)
    return _unflattened(found, between)


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """All tokens of the product, summed over the ranks, on every rank; all ranks of the group call it alike ::

        d = torch.nn.functional.linear(a, b)  # a summand
        return all_reduce(d, group) + bias

    a:        (all tokens, ..., in_features of this rank)
    b:        (out_features, in_features of this rank)
    bias:     (out_features,), the same on all ranks; added once
    schedule, chunks: as :func:`all_gather_matmul` takes them
    in_features: over all ranks, where they are not the same number on each: as torch.chunk splits them

    Every rank has the whole result, and is taken to do the same with it: gradients need no communication.

    Raises ValueError for tensors that do not fit.
    """
    found = ops.matmul_all_reduce(_matrix("a", a), b, bias, group_name(group), schedule, chunks, in_features)
    return _unflattened(found, a.shape[1:-1])
