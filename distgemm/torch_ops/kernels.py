"""The kernels that layers of models can ask for, in forward and backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from distgemm.arguments import member
from distgemm.gemm.nvcc import KernelSource
from distgemm.measure.models import MODELS, Layer
from distgemm.runtime.checks import TORCH_DTYPES, resolve_group
from distgemm.schedulers import Pattern
from distgemm.torch_ops import library
from distgemm.torch_ops.dispatch import is_tuned, named_config
from distgemm.torch_ops.needs import Need, record_needs
from distgemm.tune.cache import bucketed
from distgemm.tune.kernels import Scope, configs_of, sources_of

__all__ = ["PACKED_RANKS", "PACKED_TOKENS", "group_of", "kernel_sources", "layer_needs", "sources_for"]

PACKED_RANKS = (2, 4, 8)
PACKED_TOKENS = (64, 128, 512, 2048, 8192, 16384)
"""Numbers of ranks and of tokens for which kernels are listed."""


def layer_needs(layer: Layer, pattern: Pattern, tokens: int, dtype: str, group: dist.ProcessGroup) -> list[Need]:
    """What a linear layer needs in a forward and a backward pass, with a bias or without.

    The ops themselves say it: they are called with tensors that have no values.

    Args:
        layer: the layer.
        pattern: one of its patterns.
        tokens: tokens of all ranks.
        dtype: element type.
        group: the ranks that share the layer.

    Raises:
        ValueError: for a type that layers do not have, and if the ranks cannot share tokens or layer evenly.
    """
    member("dtype", dtype, library.DTYPE_NAMES.values())
    ranks, name = group.size(), group.group_name
    split = ranks if pattern == "gemm+ar" else tokens
    if split % ranks or (layer.n if pattern in {"ag+gemm", "gemm+a2a"} else layer.k) % ranks:
        raise ValueError(f"{ranks} ranks cannot share {tokens} tokens and the layer {layer} evenly")

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=TORCH_DTYPES[dtype], device="meta", requires_grad=True)

    with record_needs() as found:
        if pattern == "ag+gemm":
            a, b = matrix(tokens // ranks, layer.k), matrix(layer.n // ranks, layer.k)
            (d,) = library.all_gather_matmul(a, [b], [], [False], name, "auto", None, None, None, False, "forward")
        elif pattern == "gemm+a2a":
            a, b = matrix(tokens // ranks, layer.k), matrix(layer.n, layer.k)
            d = library.matmul_all_to_all(a, b, None, name, "auto", None, None, None, 1)
        elif pattern == "a2a+gemm":
            a, b = matrix(tokens, layer.k // ranks), matrix(layer.n, layer.k)
            (d,) = library.all_to_all_matmul(a, b, None, name, "auto", None, None, None, False, "forward")[:1]
        elif pattern == "gemm+rs":
            a, b = matrix(tokens, layer.k // ranks), matrix(layer.n, layer.k // ranks)
            d = library.matmul_reduce_scatter(a, b, None, name, "auto", None, None, None)
        else:
            a, b = matrix(tokens, layer.k // ranks), matrix(layer.n, layer.k // ranks)
            d = library.matmul_all_reduce(a, b, None, name, "auto", None, None)
        d.sum().backward()
    return list(found)


def kernel_sources(dtypes: Sequence[str], scope: Scope) -> list[KernelSource]:
    """The sources of all kernels that tensor-parallel layers can ask for, forward and backward, each once.

    They are for the layers of :data:`distgemm.measure.models.MODELS` and each of ``PACKED_RANKS`` and
    ``PACKED_TOKENS``, on the GPU that :func:`distgemm.gemm.target.compiling_for` names.
    Kernels with all tiles do not depend on extents, so with "tiles" one model and two numbers of tokens stand for all:
    one-shot all-reduces of more than 64 tokens have kernels of their own.

    Args:
        dtypes: element types.
        scope: which kernels.

    Raises:
        RuntimeError: if this process has a process group. The listing makes groups without other processes.
    """
    models, tokens = list(MODELS.values()), list(PACKED_TOKENS)
    if scope == "tiles":
        models, tokens = models[:1], tokens[:2]
    found: dict[KernelSource, None] = {}
    for ranks in PACKED_RANKS:
        needs: dict[Need, None] = {}
        with group_of(ranks) as group:
            for model, dtype, m in product(models, dtypes, tokens):
                for layer in model.layers:
                    for pattern in layer.patterns:
                        needs |= dict.fromkeys(layer_needs(layer, pattern, m, dtype, group))
        found |= dict.fromkeys(sources_for(needs, scope))
    return list(found)


@contextlib.contextmanager
def group_of(ranks: int) -> Iterator[dist.ProcessGroup]:
    """A group of so many ranks that has no other processes, to ask what calls need.

    Raises:
        RuntimeError: if this process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("kernels are listed in a process without a process group, and this one has one")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701  (torch has no public name)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield resolve_group(None)
    finally:
        dist.destroy_process_group()


def sources_for(needs: Iterable[Need], scope: Scope) -> Iterator[KernelSource]:
    """The sources of all kernels that these calls can ask for, each once, while they are found.

    Args:
        needs: the calls.
        scope: which kernels, of calls with ``schedule="auto"``.

    Raises:
        ValueError: for a call whose schedule does not fit.
    """
    known = set[KernelSource]()
    for need in needs:
        if need.device not in ("cuda", "meta"):
            continue  # CPUs need no kernels
        pattern, ranks = need.pattern, need.ranks
        hosts: dict[str, Any] = {"ranks_per_host": need.ranks_per_host}
        terms: dict[str, Any] = {"rank": need.rank, "turned_b": need.turned_b, **hosts}
        found: list[KernelSource] = []
        if is_tuned(need.problem, need.schedule, need.chunks):
            configs = configs_of(need.problem, pattern, ranks, scope, **hosts)
            if scope == "measured":  # a search measures at other rows
                rounded = bucketed(need.problem)
                measured = configs_of(rounded, pattern, ranks, scope, **hosts)
                found = sources_of(rounded, pattern, ranks, measured, **hosts)
        else:
            configs = [named_config(pattern, need.problem, need.schedule, need.chunks, need.ranks_per_host)]
        found += sources_of(need.problem, pattern, ranks, configs, tiles=scope == "tiles", **terms)
        yield from (source for source in dict.fromkeys(found) if source not in known)
        known.update(found)
