"""The GPU for which kernels are selected and compiled, where it is not this machine's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["TARGET", "Target", "compiling_for"]


class Target(NamedTuple):
    """A kind of GPU.

    Attributes:
        arch: its architecture, as nvcc names it.
        gpu: its name, under which measured configurations are recorded; "none": no measured ones.
    """

    arch: str
    gpu: str = "none"


TARGET: ContextVar[Target | None] = ContextVar("TARGET", default=None)
"""None: this machine's GPU."""


@contextlib.contextmanager
def compiling_for(arch: str, gpu: str = "none") -> Iterator[None]:
    """Select and compile for another GPU inside the ``with`` block. Nothing can be launched there."""
    token = TARGET.set(Target(arch, gpu))
    try:
        yield
    finally:
        TARGET.reset(token)
