"""The interface of a provider of GEMM kernels. It knows nothing about ranks, plans and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.spec import GemmConfig, GemmSpec, Status

if TYPE_CHECKING:
    import torch

__all__ = ["GemmProvider", "GemmTensors", "Kernel", "Launch"]


@dataclass(frozen=True)
class GemmTensors:
    """The tensors and numbers of one GEMM: ``d = alpha * scale_a * scale_b * a @ b.mT + bias + partial + beta * c``.

    Attributes:
        a: (m, k) or (l, m, k).
        b: (n, k) or (l, n, k).
        d: (m, n) or (l, m, n), the output.
        c: as ``d``; None: absent.
        partial: a partial sum, as ``d``; None: absent.
        bias: (n,); None: absent.
        scale_a: float32, one number or one for each row of A; None: 1. With ``block_rows``, a matrix with one number
            for each block: (⌈m / block_rows[0]⌉, ⌈k / 128⌉), of any strides.
        scale_b: float32, one number or one for each row of B; None: 1. With ``block_rows``, as ``scale_a``.
        alpha: factor of the product.
        beta: factor of C; with 0, C is not read.
        dtype: "tfloat32" to multiply float32 tensors with 10 bits of mantissa; None: the tensors' type.
        padded: whether the bytes between the end of D's rows and the next multiple of 16 may be overwritten.
        block_rows: the scales are of blocks of 128 columns and so many rows of A, and of B: 1 or 128. None: they are
            not.
    """

    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    c: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 0.0
    dtype: str | None = None
    padded: bool = False
    block_rows: tuple[int, int] | None = None


class Launch(Protocol):
    """A kernel with its arguments. A call puts it on a stream, captured or not.

    A call allocates nothing, and the host does not wait. The launch keeps its tensors alive. Graphs that have captured
    it may outlive it: other memory that its kernel uses belongs to the :class:`Kernel`.
    """

    def __call__(self, stream: int | None = None) -> None:
        """Launch the kernel.

        Args:
            stream: a cudaStream_t as a number; None: the current stream.
        """


class Kernel(Protocol):
    """A compiled kernel for all specs that differ in extents, strides and addresses only. It is loaded on demand.

    Attributes:
        name: for messages.
    """

    name: str

    def bind(self, tensors: GemmTensors, begins_early: bool = True) -> Launch:
        """A launch with these tensors; encodes the kernel's arguments.

        Args:
            tensors: the tensors and numbers.
            begins_early: see :func:`distgemm.gemm.bind`.

        Raises:
            ValueError: for tensors that the kernel was not compiled for.
        """


class GemmProvider(Protocol):
    """A source of GEMM kernels. The order of calls is: supports, compile, ``Kernel.bind``, ``Launch()``.

    ``streams`` is the number of streams on which such GEMMs alternate; the fastest configuration depends on it.
    ``config=None`` leaves the configuration to the provider.

    Attributes:
        name: the name in :func:`distgemm.gemm.list_providers`.
    """

    name: str

    def configs(self, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
        """Configurations worth trying, the default first; empty if the provider has no configurations."""

    def supports(self, spec: GemmSpec, config: GemmConfig | None = None) -> Status:
        """Whether ``compile`` would return a kernel; if not, falsy with the reason."""

    def sources(
        self, specs: Sequence[GemmSpec], config: GemmConfig | None = None, streams: int = 1
    ) -> list[KernelSource]:
        """The sources to compile for these specs, each once; empty if there is nothing to compile."""

    def compile(self, spec: GemmSpec, config: GemmConfig | None = None, streams: int = 1) -> Kernel:
        """The kernel for a spec.

        Raises:
            ValueError: if the provider does not support it.
        """
