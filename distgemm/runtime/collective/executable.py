"""The collective runtime: a process for each rank, over torch.distributed (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distgemm.plan.plan import Plan
from distgemm.runtime.checks import (
    check_agreement,
    check_bias,
    check_gathered,
    check_gradients,
    check_shards,
    resolve_group,
)
from distgemm.runtime.collective.memory import CallState, Memory, Step
from distgemm.runtime.collective.program import Program, multiplies_all_of_a
from distgemm.runtime.executable import Executable

__all__ = ["CollectiveExecutable", "run_collective"]

Tensor = torch.Tensor


class CollectiveExecutable:
    """This rank's part of a plan over torch.distributed, ready to be called any number of times.

    It satisfies :class:`distgemm.runtime.executable.Executable`. Making one is a collective call: all ranks of the
    group make it, and they compare their plans. It allocates the workspace by ``plan.slots``, filled with NaN.

    Args:
        plan: the same on all ranks of the group. Its ops are all that is executed.
        group: a process group of ``plan.world_size`` ranks; None: all.
        device: where shards and workspace lie; None: the current CUDA device if the group has NCCL, else the CPU.

    Attributes:
        plan: what it executes.
        rank: this rank in the group.
        group: the ranks.
        device: where shards and workspace lie.
        program: what a call does.

    Raises:
        ValueError: on all ranks where their plans differ. Also for a plan with another mechanism than "push", a group
            that this rank is not in, a group of another size, and a device that the group does not serve.
        PlanError: for ops that cannot be executed with messages, or that do not write all of D.
    """

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup | None = None, device: torch.device | str | int | None = None
    ) -> None:
        if not isinstance(plan, Plan):
            raise ValueError(f"plan is a distgemm.Plan, got {plan!r}")
        self.plan = plan
        self.group = resolve_group(group)
        self.rank = dist.get_rank(self.group)
        served = _backends(self.group)
        self.device = usual = _device(None, served)
        problem: Exception | None = None
        try:
            self.device = _device(device, served)
            self._prepare(served)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        check_agreement(plan, "", self.group, self.device if self.device.type == usual.type else usual, problem)

    def _prepare(self, served: dict[str, str]) -> None:
        plan, device = self.plan, self.device
        if plan.mechanism != "push":
            raise ValueError(
                f'the collective runtime sends messages: it takes plans with mechanism="push", got {plan.mechanism!r}'
            )
        if dist.get_world_size(self.group) != plan.world_size:
            size = dist.get_world_size(self.group)
            raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {size}")
        backend = served.get(device.type)
        if backend is None or (device.type == "cuda" and backend != "nccl"):
            named = ", ".join(f"{device_type} ({each})" for device_type, each in served.items())
            raise ValueError(f"the group sends from {named}; for {device} it takes gloo (CPU) or nccl (CUDA)")
        self._multiplies_all_of_a = multiplies_all_of_a(plan, self.rank)
        barrier = _barrier(self.group, device if backend == "nccl" else None)
        self.program = Program.of(plan, self.rank, Memory(plan, self.rank, device), self.group, barrier)

    @property
    def provider(self) -> str:
        """Who computes the GEMMs."""
        return "torch"

    @property
    def transfers(self) -> str:
        """Who moves data between ranks."""
        return f"collective runtime over {dist.get_backend(self.group)}"

    def release(self) -> None:
        """Do nothing: the runtime keeps nothing of an executable that the caller drops."""

    def __call__(
        self,
        a_shard: Tensor,
        b_shard: Tensor,
        c_shard: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        out: Tensor | None = None,
        gathered: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of D = alpha * A @ B.T + beta * C + bias; all ranks of the group call it in one order.

        For a schedule that gathers A this is the program ::

            a = torch.empty(m, k); dist.all_gather_into_tensor(a, a_shard, group)
            d = alpha * a @ b_shard.T + beta * c_shard + bias

        and for one that scatters sums ::

            d = torch.empty(m // world_size, n)
            dist.reduce_scatter_tensor(d, alpha * a_shard @ b_shard.T, group=group); d += beta * c_shard + bias

        Products, and what is added to them, accumulate in float32 (float64 for float64). Partial sums are rounded to
        ``problem.partial_dtype``, D to ``problem.out_dtype``. On GPUs only a Barrier blocks the host.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``.
            b_shard: of shape ``plan.shard_shape("B", rank)`` and of ``problem.dtype``.
            c_shard: of D's shape, of ``problem.out_dtype``; read only where ``beta`` is not 0.
            alpha: factor of A @ B.T.
            beta: factor of C.
            bias: one row of D's shard, of ``problem.out_dtype``.
            scale_a: None; this runtime has no scales.
            scale_b: None; this runtime has no scales.
            out: where D goes, instead of a new tensor. It shares no memory with the shards.
            gathered: where all of A goes, (m, k), on ranks that multiply all of it. It shares no memory with the
                others.

        Raises:
            ValueError: for tensors of another shape, dtype or device, for beta without C, for scales, for ``gathered``
                where this rank does not multiply all of A, and for shards that require grad outside of torch.no_grad().
                A rank that raises leaves the others waiting for its messages.
        """
        if scale_a is not None or scale_b is not None:
            raise ValueError("the collective runtime has no scales; the CUDA runtime has, for fp8")
        check_gradients(self.rank, a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered)
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        check_bias(self.rank, bias, given["D"])
        if gathered is not None:
            if not self._multiplies_all_of_a:
                raise ValueError(f"gathered is for ranks that multiply all of A; rank {self.rank} does not")
            check_gathered(self.plan, self.rank, gathered, given)
        batched = self.plan.problem.l > 1
        shards = {name: t if batched else t.unsqueeze(0) for name, t in given.items()}
        whole = gathered if batched or gathered is None else gathered.unsqueeze(0)
        call = CallState(shards, float(alpha), float(beta), bias, whole, [None] * self.program.messages)
        with torch.no_grad():
            for step in self.program.steps:
                step(call)
        return given["D"]


def run_collective(
    plan: Plan,
    a_shard: Tensor,
    b_shard: Tensor,
    c_shard: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Execute a plan once: make a :class:`CollectiveExecutable` on the device of ``a_shard`` and call it.

    Every call allocates a workspace and compares the plans of all ranks. To call it again, keep an executable.
    """
    device = a_shard.device if isinstance(a_shard, Tensor) else None
    exe = CollectiveExecutable(plan, group, device)
    return exe(a_shard, b_shard, c_shard, alpha=alpha, beta=beta, bias=bias, out=out)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    pairs = [pair.rpartition(":") for pair in dist.get_backend_config(group).split(",")]
    found = {device: backend for device, _, backend in pairs if device}
    if not found:
        backend = dist.get_backend(group)
        found = {"cuda" if backend == "nccl" else "cpu": backend}
    return found


def _device(device: torch.device | str | int | None, served: dict[str, str]) -> torch.device:
    if device is None:
        device = "cuda" if served.get("cuda") == "nccl" else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


def _barrier(group: dist.ProcessGroup, device: torch.device | None) -> Step:
    ids = None if device is None else [device.index]
    return lambda call: dist.barrier(group, device_ids=ids)


if TYPE_CHECKING:
    _satisfies_protocol: type[Executable] = CollectiveExecutable
