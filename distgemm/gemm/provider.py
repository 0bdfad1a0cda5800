"""What a provider of kernels offers. It knows nothing about ranks, plans and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.spec import GemmConfig, GemmSpec, Status

if TYPE_CHECKING:
    import torch

__all__ = ["GemmProvider", "GemmTensors", "Kernel", "Launch", "get_provider", "list_providers"]


@dataclass(frozen=True)
class GemmTensors:
    """The tensors and numbers of one GEMM; see :class:`distgemm.gemm.GemmSpec` for what they are.

    dtype: "tfloat32" to multiply float32 tensors with 10 bits of mantissa; None: as the tensors say
    beta:  with 0, C is not read
    padded: whether columns between the end of D's rows and the next multiple of 16 bytes may be overwritten
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


class Launch(Protocol):
    """A kernel with its arguments. Calling it puts it on a stream, captured or not; nothing is allocated, and the
    host waits for nothing. It keeps its tensors alive.
    """

    def __call__(self, stream: int | None = None) -> None:
        """stream: a cudaStream_t as a number; None: the current one"""


class Kernel(Protocol):
    """A compiled kernel, loaded on demand, for all specs that differ in extents, strides and addresses only."""

    name: str

    def bind(self, tensors: GemmTensors) -> Launch:
        """Encodes the arguments. Raises ValueError for tensors that the kernel was not compiled for."""


class GemmProvider(Protocol):
    """supports -> compile -> bind -> launch"""

    name: str

    def configs(self, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
        """Configurations worth trying for this spec, the one taken by default first; empty if it has none to choose.

        streams: on how many streams such GEMMs alternate
        """

    def supports(self, spec: GemmSpec, config: GemmConfig | None = None) -> Status:
        """Whether ``compile`` would give a kernel; falsy with the reason if not."""

    def sources(
        self, specs: Sequence[GemmSpec], config: GemmConfig | None = None, streams: int = 1
    ) -> list[KernelSource]:
        """What is to be compiled for these specs, each once; empty where nothing is."""

    def compile(self, spec: GemmSpec, config: GemmConfig | None = None, streams: int = 1) -> Kernel:
        """The kernel; None: the configuration is chosen for the shape. Raises ValueError where not supported."""


def list_providers() -> list[str]:
    """Names of the providers."""
    return ["cublas", "cutlass"]


def get_provider(name: str) -> GemmProvider:
    """The provider of that name. Raises ValueError for a name that is not listed."""
    if name == "cutlass":
        from distgemm.gemm.cutlass import CutlassProvider

        return CutlassProvider()
    if name == "cublas":
        from distgemm.gemm.cublas import CublasProvider

        return CublasProvider()
    raise ValueError(f"provider is one of {', '.join(list_providers())}, got {name!r}")
