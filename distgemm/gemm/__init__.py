"""GEMMs of one GPU: providers of kernels, and the choice among their configurations."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from distgemm.gemm.provider import GemmProvider, GemmTensors, Kernel, Launch, get_provider, list_providers
from distgemm.gemm.spec import GemmConfig, GemmSpec, MatrixSpec, Status

if TYPE_CHECKING:
    import torch

__all__ = [
    # what is asked for
    "GemmConfig",
    "GemmSpec",
    "GemmTensors",
    "MatrixSpec",
    "Status",
    # who does it
    "GemmProvider",
    "Kernel",
    "Launch",
    "get_provider",
    "list_providers",
    # in one call
    "bind",
    "forget_kernels",
    "gemm",
]


def bind(
    tensors: GemmTensors, *, provider: str = "cutlass", config: GemmConfig | str | None = None, streams: int = 1
) -> Launch:
    """A kernel for these tensors, compiled if need be, with its arguments encoded.

    config:  the configuration, or its name; None: chosen for the shape
    streams: on how many streams such GEMMs alternate: what fits best depends on it

    Raises ValueError where the provider cannot compute it; nothing else is tried in its place.
    """
    from distgemm.gemm.tensors import check_device, spec_of

    if isinstance(config, str):
        config = GemmConfig.parse(config)
    spec = spec_of(tensors)
    check_device(tensors)
    return _kernel(spec, provider, config, streams).bind(tensors)


@lru_cache(maxsize=4096)
def _kernel(spec: GemmSpec, provider: str, config: GemmConfig | None, streams: int) -> Kernel:
    return get_provider(provider).compile(spec, config, streams)


def forget_kernels() -> None:
    """Select a configuration anew at the next call of every shape, after configurations have been recorded."""
    _kernel.cache_clear()


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: str | None = None,
    provider: str = "cutlass",
    config: GemmConfig | str | None = None,
) -> torch.Tensor:
    """``out = alpha * scale_a[:, None] * scale_b * (a @ b.mT) + bias + partial + beta * c``

    All is summed in float32 and rounded once.

    a: (m, k) or (l, m, k), b: (n, k) or (l, n, k): rows or columns contiguous (fp8: rows); any strides between them
    out, c, partial: (m, n) or (l, m, n), rows contiguous; each may be the same memory
    bias: (n,); scale_a, scale_b: float32, one number or one for each row
    dtype: "tfloat32" to multiply float32 tensors with 10 bits of mantissa; else IEEE float32
    """
    tensors = GemmTensors(a, b, out, c, partial, bias, scale_a, scale_b, alpha, beta, dtype)
    bind(tensors, provider=provider, config=config)()
    return out
