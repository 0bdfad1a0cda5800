"""The providers by name. A provider is imported when it is asked for, because it needs torch."""

from __future__ import annotations

from distgemm.gemm.provider import GemmProvider

__all__ = ["get_provider", "list_providers"]


def list_providers() -> list[str]:
    """Names of the providers."""
    return ["cublas", "cutlass"]


def get_provider(name: str) -> GemmProvider:
    """The provider of a name.

    Raises:
        ValueError: for a name that is not listed.
    """
    if name == "cutlass":
        from distgemm.gemm.cutlass import CutlassProvider

        return CutlassProvider()
    if name == "cublas":
        from distgemm.gemm.cublas import CublasProvider

        return CublasProvider()
    raise ValueError(f"provider is one of {', '.join(list_providers())}, got {name!r}")
