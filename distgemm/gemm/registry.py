"""The providers by name. A provider is imported when it is asked for, because it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distgemm.arguments import member
from distgemm.gemm.provider import GemmProvider
from distgemm.gemm.target import TARGET

if TYPE_CHECKING:
    import torch

__all__ = ["default_provider", "get_provider", "list_providers"]

HOPPER, HOPPER_ARCH = (9, 0), "90a"
"""The compute capability, and nvcc's name of the architecture, for which "cutlass" has kernels with TMA and wgmma."""


def list_providers() -> list[str]:
    """Names of the providers."""
    return ["cublas", "cutlass"]


def default_provider(device: torch.device | None = None, dtype: str = "bfloat16") -> str:
    """The provider that is taken if the caller names none.

    It is "cutlass" on GPUs of compute capability 9.0, for which it has kernels with TMA and wgmma. On other GPUs it has
    slower kernels only, so it is "cublas". Without a GPU it is "cutlass", to plan and to compile for Hopper. It is
    "cublas" for float64, which "cutlass" does not multiply.

    Args:
        device: the GPU; None: the current one.
        dtype: element type of A and B.
    """
    import torch

    if dtype == "float64":
        return "cublas"
    if (target := TARGET.get()) is not None:
        return "cutlass" if target.arch == HOPPER_ARCH else "cublas"
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return "cutlass"
    return "cutlass" if torch.cuda.get_device_capability(device) == HOPPER else "cublas"


def get_provider(name: str) -> GemmProvider:
    """The provider of a name.

    Raises:
        ValueError: for a name that is not listed.
    """
    name = member("provider", name, list_providers())
    if name == "cutlass":
        from distgemm.gemm.cutlass import CutlassProvider

        return CutlassProvider()
    if name == "cublas":
        from distgemm.gemm.cublas import CublasProvider

        return CublasProvider()
    raise AssertionError(name)
