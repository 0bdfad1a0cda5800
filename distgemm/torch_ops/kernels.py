"""The kernels that layers of models can ask for, in forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from distgemm.gemm.nvcc import KernelSource
from distgemm.measure.models import MODELS, Layer
from distgemm.runtime.checks import TORCH_DTYPES, resolve_group
from distgemm.schedulers import Pattern
from distgemm.torch_ops import library
from distgemm.torch_ops.needs import Need, record_needs
from distgemm.tune.kernels import Scope, configs_of, sources_of

__all__ = ["PACKED_RANKS", "PACKED_TOKENS", "kernel_sources", "layer_needs", "sources_for"]

PACKED_RANKS = (2, 4, 8)
PACKED_TOKENS = (64, 512, 2048, 8192, 16384)
"""Numbers of ranks and of tokens for which kernels are listed."""


def layer_needs(
    layer: Layer, pattern: Pattern, tokens: int, dtype: str, group: dist.ProcessGroup, biases: Sequence[bool]
) -> list[Need]:
    """What a linear layer needs in a forward and a backward pass.

    The ops themselves say it: they are called with tensors that have no values.

    Args:
        layer: the layer.
        pattern: one of its patterns.
        tokens: tokens of all ranks.
        dtype: element type.
        group: the ranks that share the layer.
        biases: whether the layer has a bias; several values: both kinds of layer.

    Raises:
        ValueError: if the ranks cannot share the tokens or the layer evenly.
    """
    ranks, name = group.size(), group.group_name
    split = tokens if pattern == "ag+gemm" or pattern == "gemm+rs" else ranks
    if split % ranks or (layer.n if pattern == "ag+gemm" else layer.k) % ranks:
        raise ValueError(f"{ranks} ranks cannot share {tokens} tokens and the layer {layer} evenly")

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=TORCH_DTYPES[dtype], device="meta", requires_grad=True)

    with record_needs() as found:
        for biased in biases:
            bias = matrix(1, layer.n // (ranks if pattern == "ag+gemm" else 1))[0] if biased else None
            if pattern == "ag+gemm":
                a, b = matrix(tokens // ranks, layer.k), matrix(layer.n // ranks, layer.k)
                given = [] if bias is None else [bias]
                (d,) = library.all_gather_matmul(
                    a, [b], given, [biased], name, "auto", None, None, None, False, "forward"
                )
            elif pattern == "gemm+rs":
                a, b = matrix(tokens, layer.k // ranks), matrix(layer.n, layer.k // ranks)
                d = library.matmul_reduce_scatter(a, b, bias, name, "auto", None, None, None)
            else:
                a, b = matrix(tokens, layer.k // ranks), matrix(layer.n, layer.k // ranks)
                d = library.matmul_all_reduce(a, b, bias, name, "auto", None, None)
            d.sum().backward()
    return list(found)


def kernel_sources(dtypes: Sequence[str], scope: Scope) -> list[KernelSource]:
    """The sources of all kernels that tensor-parallel layers can ask for, forward and backward, each once.

    They are for the layers of :data:`distgemm.measure.models.MODELS` and each of ``PACKED_RANKS`` and
    ``PACKED_TOKENS``, with and without a bias, on the GPU that :func:`distgemm.gemm.target.compiling_for` names.
    Kernels with all tiles do not depend on extents, so with "tiles" one model and one number of tokens stand for all.

    Args:
        dtypes: element types.
        scope: which kernels.

    Raises:
        RuntimeError: if this process has a process group. The listing makes groups without other processes.
    """
    if dist.is_initialized():
        raise RuntimeError("kernels are listed in a process without a process group, and this one has one")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701  (torch has no public name)

    few = 1 if scope == "tiles" else None
    models, tokens = list(MODELS.values())[:few], PACKED_TOKENS[:few]
    found: dict[KernelSource, None] = {}
    for ranks in PACKED_RANKS:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            group, needs = resolve_group(None), dict[Need, None]()
            for model, dtype, m in product(models, dtypes, tokens):
                for layer in model.layers:
                    for pattern in layer.patterns:
                        needs |= dict.fromkeys(layer_needs(layer, pattern, m, dtype, group, biases=(False, True)))
        finally:
            dist.destroy_process_group()
        found |= dict.fromkeys(sources_for(needs, scope))
    return list(found)


def sources_for(needs: Iterable[Need], scope: Scope, rank: int = 0) -> list[KernelSource]:
    """The sources of all kernels that these calls can ask for, each once."""
    found: dict[KernelSource, None] = {}
    for need in needs:
        problem, pattern, ranks = need.problem, need.pattern, need.ranks
        configs = configs_of(problem, pattern, ranks, scope)
        terms = {"bias": need.biased, "turned_b": need.turned_b}
        found |= dict.fromkeys(sources_of(problem, pattern, ranks, configs, rank=rank, tiles=scope == "tiles", **terms))
    return list(found)
