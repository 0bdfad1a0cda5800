"""Errors of cuda.bindings as exceptions."""

from __future__ import annotations

from typing import Any

__all__ = ["raise_on"]


def raise_on(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of cuda.bindings returned behind its error code. Raises RuntimeError if there is an error."""
    error = result[0]
    if error:
        raise RuntimeError(f"CUDA: {error.name} ({int(error)})")
    return result[1:]
