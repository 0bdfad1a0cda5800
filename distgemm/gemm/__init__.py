"""GEMMs on one GPU: providers of kernels, and the selection of their configurations.

``spec``, ``provider``, ``registry``: what a GEMM is, and who offers kernels for it. ``cutlass``, ``cublas``: the two
providers. ``tiles``, ``select``, ``cache``: the configurations, and which one a shape gets. ``nvcc``, ``libraries``:
compiled kernels on disk and in this process. ``per_tile``: all work of a rank by one persistent kernel. ``sums``,
``flags``: kernels and operations that come with GEMMs of several ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from distgemm.gemm.provider import GemmProvider, GemmTensors, Kernel, Launch
from distgemm.gemm.registry import default_provider, get_provider, list_providers
from distgemm.gemm.spec import GemmConfig, GemmSpec, MatrixSpec, Status

if TYPE_CHECKING:
    import torch

__all__ = [
    # what a GEMM is
    "GemmConfig",
    "GemmSpec",
    "GemmTensors",
    "MatrixSpec",
    "Status",
    # who computes it
    "GemmProvider",
    "Kernel",
    "Launch",
    "default_provider",
    "get_provider",
    "list_providers",
    # in one call
    "bind",
    "forget_kernels",
    "gemm",
]


def bind(
    tensors: GemmTensors,
    *,
    provider: str | None = None,
    config: GemmConfig | str | None = None,
    streams: int = 1,
    begins_early: bool = True,
) -> Launch:
    """A launch of a GEMM: its kernel, compiled if need be, with its arguments encoded.

    Args:
        tensors: the tensors and numbers.
        provider: a name of :func:`list_providers`; None: :func:`default_provider`, with ``config`` "cutlass".
        config: the configuration or its text; None: selected for the shape.
        streams: number of streams on which such GEMMs alternate; the selection depends on it.
        begins_early: whether thread blocks may take SMs while the kernel before them on the stream ends. They wait for
            it before they read or write memory. False: the SMs stay free for kernels on other streams.

    Raises:
        ValueError: if the provider cannot compute it. No other provider is tried.
    """
    from distgemm.gemm.tensors import check_device, spec_of

    if isinstance(config, str):
        config = GemmConfig.parse(config)
    spec = spec_of(tensors)
    check_device(tensors)
    if provider is None:
        provider = default_provider(tensors.d.device, spec.a.dtype) if config is None else "cutlass"
    return _kernel(spec, provider, config, streams).bind(tensors, begins_early)


@lru_cache(maxsize=4096)
def _kernel(spec: GemmSpec, provider: str, config: GemmConfig | None, streams: int) -> Kernel:
    return get_provider(provider).compile(spec, config, streams)


def forget_kernels() -> None:
    """Drop cached kernels, so that the next call of each shape selects its configuration again."""
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
    block_rows: tuple[int, int] | None = None,
    provider: str | None = None,
    config: GemmConfig | str | None = None,
) -> torch.Tensor:
    """``out = alpha * scale_a[:, None] * scale_b * (a @ b.mT) + bias + partial + beta * c``

    It sums in float32 and rounds once.

    Args:
        a: (m, k) or (l, m, k). Rows or columns are contiguous (fp8: rows), with any stride between them.
        b: (n, k) or (l, n, k), with the same freedom.
        out: (m, n) or (l, m, n), rows contiguous.
        c: as ``out``; it may be the same memory.
        partial: a partial sum, as ``out``; it may be the same memory.
        bias: (n,).
        scale_a: float32, one number or one for each row of ``a``. With ``block_rows`` a matrix, one number for each
            block: (⌈m / block_rows[0]⌉, ⌈k / 128⌉).
        scale_b: float32, one number or one for each row of ``b``, or as ``scale_a``.
        alpha: factor of the product.
        beta: factor of ``c``; with 0, ``c`` is not read.
        dtype: "tfloat32" to multiply float32 tensors with 10 bits of mantissa; None: IEEE float32.
        block_rows: rows of ``a`` and rows of ``b``, 1 or 128, that share a scale with 128 columns; None: scales are not
            of blocks.
        provider: a name of :func:`list_providers`; None: :func:`default_provider`, with ``config`` "cutlass".
        config: the configuration or its text; None: selected for the shape.

    Returns:
        ``out``.

    Raises:
        ValueError: if the tensors do not fit together, or if the provider cannot compute this.
    """
    import torch

    tensors = GemmTensors(
        *(a, b, out, c, partial, bias, scale_a, scale_b, alpha, beta), dtype=dtype, block_rows=block_rows
    )
    launch = bind(tensors, provider=provider, config=config)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # its default stream is none of another GPU
        launch()
    return out
