"""What all runtimes share: the options of execution on GPUs, and the protocol of executables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from distgemm.arguments import boolean, integer, member, string

if TYPE_CHECKING:
    import torch

    from distgemm.plan import Plan

__all__ = [
    "EXECUTION_FIELDS",
    "PER_TILE",
    "Executable",
    "ExecutionConfig",
    "ExecutionMode",
    "OnTimeout",
    "WaitBy",
    "untraced",
]

ExecutionMode = Literal["multi_kernel", "per_tile"]
WaitBy = Literal["memory_op", "kernel"]
OnTimeout = Literal["raise", "abort"]

PER_TILE = "per-tile kernel"
"""Who moves data where all work of a rank is one per-tile kernel, for reports."""


def untraced(executable: Callable[..., torch.Tensor], *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """Call an executable from code that torch.compile traces. The graph breaks here, and no part of the call is traced.

    Traced code would be resumed in the middle of a call, when messages are under way.
    """
    import torch

    found: torch.Tensor = torch.compiler.disable(executable)(*tensors, **options)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class ExecutionConfig:
    """How GPUs execute a plan.

    Attributes:
        provider: provider of the GEMMs, a name of :func:`distgemm.gemm.list_providers`. None: "cutlass" with
            "per_tile" or a ``config``, else :func:`distgemm.gemm.default_provider` of the GPU.
        config: name of the provider's tile configuration for all GEMMs; None: the shape decides.
        gemm_streams: streams on which the GEMMs of a rank alternate, 1 or 2.
        execution: "multi_kernel" launches a kernel for each GEMM. "per_tile" multiplies, adds and moves all data of a
            rank in one persistent kernel, tile by tile; see docs/per_tile.md for what it executes.
        wait_by: with "multi_kernel", who waits for other ranks: a "memory_op" of the stream, or a "kernel" of one
            warp, which needs ``gemm_streams=1``. With "per_tile" it stays "memory_op".
        merge_copies: with "multi_kernel", copy neighbouring chunks as one, and multiply them as one.

    Raises:
        ValueError: if values are unknown or do not go together. Names of providers and configurations are checked where
            they are looked up.
    """

    provider: str | None = None
    config: str | None = None
    gemm_streams: int = 2
    execution: ExecutionMode = "multi_kernel"
    wait_by: WaitBy = "memory_op"
    merge_copies: bool = False

    def __post_init__(self) -> None:
        for name in ("provider", "config"):
            if getattr(self, name) is not None:
                string(name, getattr(self, name), f"the name of a {name}")
        object.__setattr__(self, "gemm_streams", integer("gemm_streams", self.gemm_streams, 1, 2))
        for name, known in (("execution", ExecutionMode), ("wait_by", WaitBy)):
            member(name, getattr(self, name), get_args(known))
        boolean("merge_copies", self.merge_copies)
        if self.execution == "per_tile" and (self.wait_by != "memory_op" or self.merge_copies):
            raise ValueError(
                "execution='per_tile' waits and copies in its kernel: it takes wait_by='memory_op' and "
                f"merge_copies=False, got {self.wait_by!r} and {self.merge_copies}"
            )
        per_tile = self.execution == "per_tile"
        if self.provider is None and (per_tile or self.config is not None):
            object.__setattr__(self, "provider", "cutlass")
        if per_tile and self.provider != "cutlass":
            raise ValueError(
                f"execution='per_tile' takes provider 'cutlass', whose kernels can wait, got {self.provider!r}"
            )

    def on(self, device: torch.device, dtype: str = "bfloat16") -> ExecutionConfig:
        """The same, with the provider named that multiplies elements of this type on a GPU."""
        from distgemm.gemm import default_provider  # the GPU code is imported where it is needed

        return self if self.provider else replace(self, provider=default_provider(device, dtype))


EXECUTION_FIELDS = tuple(ExecutionConfig.__dataclass_fields__)
"""Names of the fields of :class:`ExecutionConfig`, as options of :func:`distgemm.compile`."""


class Executable(Protocol):
    """One rank's part of an operation, ready to be called with shards.

    Executables of all runtimes satisfy this protocol. All ranks of the group call them in one order.

    Attributes:
        plan: what is executed. The unfused program has a plan with the same shards, and does not execute it.
        rank: this rank in the group.
        provider: who computes the GEMMs, for reports.
        transfers: who moves data between ranks, for reports.
    """

    @property
    def plan(self) -> Plan: ...

    @property
    def rank(self) -> int: ...

    @property
    def provider(self) -> str: ...

    @property
    def transfers(self) -> str: ...

    def __call__(
        self,
        a_shard: torch.Tensor,
        b_shard: torch.Tensor,
        c_shard: torch.Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        gathered: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's shard of D = alpha * A @ B.T + beta * C + bias.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``.
            b_shard: of shape ``plan.shard_shape("B", rank)`` and of B's type.
            c_shard: of D's shape, of ``problem.out_dtype``; read only where ``beta`` is not 0.
            alpha: factor of A @ B.T.
            beta: factor of C.
            bias: one row of D's shard, of ``problem.out_dtype``.
            scale_a: with ``problem.scaling``, the scales of this rank's shard of A, of shape
                ``plan.shard_shape("SFA", rank)`` and of the scaling's dtype. Other shapes of as many elements are taken
                if only one of their sides, and of that shape's, is longer than 1. None: the problem has no scaling.
            scale_b: as ``scale_a``, of this rank's shard of B: "SFB".
            out: where D goes, instead of a new tensor. It shares no memory with the shards.
            gathered: where A goes that this rank receives, (rows of its D, k), if it receives all columns of these
                rows: with an all-gather all of A. It shares no memory with the others.

        Raises:
            ValueError: for tensors of another shape, dtype or device, for shards that require grad outside of
                torch.no_grad(), and for what the runtime cannot compute.
        """
        ...

    def release(self) -> None:
        """Tell the runtime that this executable and graphs with it are not used any more."""
        ...
