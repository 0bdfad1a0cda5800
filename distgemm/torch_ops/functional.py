"""The operations that users call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import overload

import torch

from distgemm.runtime.checks import Group, process_group
from distgemm.schedulers import schedule_options
from distgemm.torch_ops import library as ops

__all__ = [
    "Group",
    "autocast_dtype",
    "check_schedule",
    "all_gather_matmul",
    "group_name",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

Tensor = torch.Tensor


def group_name(group: Group) -> str:
    """The name by which ops know a group. Raises ValueError for what is none, or does not have this rank."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return group  # the op looks for it
    return process_group(group).group_name


def _matrix(name: str, x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise ValueError(
            f"{name} is (tokens, ..., in_features), got shape {tuple(x.shape)}; x.unsqueeze(0) is one token"
        )
    return x.flatten(0, -2)


def _check_tensors(op: str, tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} is a torch.Tensor, got {type(x).__name__}; torch.as_tensor makes one")


def check_schedule(schedule: str, chunks: int | None) -> None:
    """What layers ask where they are made. Raises ValueError for a schedule that is not known, and wrong chunks."""
    if schedule != "auto":
        from distgemm.tune.config import TunedConfig

        config = TunedConfig.parse(schedule)
        if config.method == "plan":
            schedule_options(config.schedule)
    _check_chunks(f"schedule {schedule!r}", chunks)


def _check_chunks(op: str, chunks: int | None) -> None:
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"{op}: chunks is an integer >= 1, or None, got {chunks!r}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that torch.autocast asks for on devices of a type; None where it is not enabled."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(x: Tensor) -> Tensor:
    """A tensor as torch.autocast passes it to F.linear: float64 stays what it is."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)


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
              :meth:`distgemm.tune.TunedConfig.parse` reads; or "auto": on CUDA tensors what was measured (docs/tuning.md),
              on CPU tensors, and with chunks, the rule of :func:`distgemm.torch_ops.select_schedule`
    chunks:   of the schedule; None: what "auto" takes, or the schedule's default
    m_per_rank: tokens of each rank, zeros allowed; None: as many on each
    out_features: of b over all ranks, where they are not the same number on each: rank r then has the r-th part of
              ``torch.chunk``'s; a sequence for several b
    keep_gathered: keep a for the gradient of b. It is an ordinary tensor, held until the backward pass, of the size
              of all ranks' tokens; otherwise a_shard is kept, and gathered a second time
    return_gathered: return a, too. No gradient goes through it

    The gradient of a_shard is a :func:`matmul_reduce_scatter`. Nobody is asked for sizes: what the arguments say is
    compared with the other ranks in the first call with these sizes, which makes a plan, and not after that.

    Under torch.autocast, tensors are cast as F.linear's are.

    Raises ValueError for tensors that do not fit.
    """
    several = not isinstance(b, Tensor)
    bs = [b] if isinstance(b, Tensor) else list(b)
    if not bs:
        raise ValueError("all_gather_matmul: b is a tensor, or a sequence of at least one, got none")
    biases = [bias] if isinstance(bias, Tensor) or bias is None else list(bias)
    if several and bias is None:
        biases = [None] * len(bs)
    names = {f"b[{i}]": each for i, each in enumerate(bs)} | {f"bias[{i}]": each for i, each in enumerate(biases)}
    _check_tensors("all_gather_matmul", {"a_shard": a_shard, **names})
    _check_chunks("all_gather_matmul", chunks)
    if len(biases) != len(bs) or (several and isinstance(bias, Tensor)):
        raise ValueError(f"all_gather_matmul: there are {len(bs)} b, so bias is a sequence of {len(bs)}, None for none")
    ns = [out_features] if isinstance(out_features, int) else out_features
    between = a_shard.shape[1:-1]
    # What is kept serves only the gradients of b.
    keeps = keep_gathered and torch.is_grad_enabled() and any(each.requires_grad for each in bs)
    found = ops.all_gather_matmul(
        _autocast(_matrix("a_shard", a_shard)),
        [_autocast(each) for each in bs],
        [_autocast(each) for each in biases if each is not None],
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
    _check_tensors("matmul_reduce_scatter", {"a": a, "b": b, "bias": bias})
    _check_chunks("matmul_reduce_scatter", chunks)
    between = a.shape[1:-1]
    rows = _rows(m_per_rank, between)
    flat, b, bias = _autocast(_matrix("a", a)), _autocast(b), None if bias is None else _autocast(bias)
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
    _check_tensors("matmul_all_reduce", {"a": a, "b": b, "bias": bias})
    _check_chunks("matmul_all_reduce", chunks)
    flat, b, bias = _autocast(_matrix("a", a)), _autocast(b), None if bias is None else _autocast(bias)
    found = ops.matmul_all_reduce(flat, b, bias, group_name(group), schedule, chunks, in_features)
    return _unflattened(found, a.shape[1:-1])
