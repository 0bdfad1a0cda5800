"""The collective runtime: a process for each rank, over torch.distributed (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distgemm.arguments import finite, instance
from distgemm.plan.ops import Op
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import (
    backends,
    check_agreement,
    check_bias,
    check_gathered,
    check_gradients,
    check_hosts,
    check_scales,
    check_shard,
    check_shards,
    differences,
    plan_fields,
    refuse_groups,
    resolve_group,
)
from distgemm.runtime.collective.memory import CallState, Memory, memory_of
from distgemm.runtime.collective.program import Program, brings_a
from distgemm.runtime.collective.steps import KeepTile, Multiply, Synchronize
from distgemm.runtime.executable import Executable, untraced
from distgemm.runtime.gathering import GatheredChunk, check_gathers
from distgemm.runtime.groups import GroupRef, failing, occupied, raise_if_failed
from distgemm.runtime.torch_arguments import read_device

__all__ = ["CollectiveExecutable", "run_collective"]

Tensor = torch.Tensor


class CollectiveExecutable:
    """This rank's part of a plan over torch.distributed, ready to be called any number of times.

    It satisfies :class:`distgemm.runtime.executable.Executable`. Making one is a collective call: all ranks of the
    group make it, and they compare their plans. The executables of a group share one workspace, as large as the
    largest ``plan.slots`` need it. It is filled with NaN when it is allocated.

    Args:
        plan: the same on all ranks of the group. Its ops are all that is executed.
        group: a process group of ``plan.world_size`` ranks, or a DeviceMesh ("host", "rank") of them; None: all.
        device: where shards and workspace lie; None: the current CUDA device if the group has NCCL, else the CPU.

    Attributes:
        plan: what it executes.
        rank: this rank in the group.
        device: where shards and workspace lie.
        program: what a call does.
        memory: where it has its slots.

    Raises:
        ValueError: on all ranks where their plans differ. Also for a plan with another mechanism than "push", a group
            that this rank is not in, a group of another size, and a device that the group does not serve.
        PlanError: for ops that cannot be executed with messages, or that do not write all of D.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.plan = instance("plan", plan, Plan, "a distgemm.Plan")
        self._group = GroupRef(resolve_group(group))
        self.rank = dist.get_rank(self.group)
        raise_if_failed(self.group)
        served = backends(self.group)
        self.device = usual = _device(None, served)
        problem: Exception | None = None
        try:
            check_hosts(plan, self.group)
            self.device = _device(device, served)
            self._prepare(served)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        at = self.device if self.device.type == usual.type else usual
        agreed = check_agreement(plan, "", self.group, at, problem)
        self._fields = {"call": f"a call of {plan.schedule}", **plan_fields(plan, agreed)}

    def _prepare(self, served: dict[str, str]) -> None:
        plan, device = self.plan, self.device
        if plan.mechanism != "push":
            raise ValueError(
                f'the collective runtime sends messages: it takes plans with mechanism="push", got {plan.mechanism!r}'
            )
        refuse_groups(plan.problem)
        if plan.problem.dtype == "float4_e2m1fn_x2":
            raise ValueError("no runtime multiplies float4_e2m1fn_x2: its plans can be made, proved and simulated")
        if dist.get_world_size(self.group) != plan.world_size:
            size = dist.get_world_size(self.group)
            raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {size}")
        backend = served.get(device.type)
        if backend is None or (device.type == "cuda" and backend != "nccl"):
            named = ", ".join(f"{device_type} ({each})" for device_type, each in served.items())
            raise ValueError(f"the group sends from {named}; for {device} it takes gloo (CPU) or nccl (CUDA)")
        self._brings_a = brings_a(plan, self.rank)
        self._compares = device.type == "cpu"
        barrier = Synchronize(device if backend == "nccl" else None)
        self.program = Program.of(plan, self.rank, device, barrier)
        self.memory = Memory(plan, self.rank, memory_of(self.group, device))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks. The executable does not keep the group alive.

        Raises:
            ValueError: once the group is destroyed.
        """
        return self._group()

    @property
    def provider(self) -> str:
        """Who computes the GEMMs."""
        return "torch"

    @property
    def transfers(self) -> str:
        """Who moves data between ranks."""
        return f"collective runtime over {backends(self.group)[self.device.type]}"

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
        ``problem.partial_dtype``, D to ``problem.out_dtype``. On GPUs only a Barrier blocks the host. On CPUs each call
        compares what the ranks call before it sends anything else.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``.
            b_shard: of shape ``plan.shard_shape("B", rank)`` and of B's type.
            c_shard: of D's shape, of ``problem.out_dtype``; read only where ``beta`` is not 0.
            alpha: factor of A @ B.T.
            beta: factor of C.
            bias: one row of D's shard, of ``problem.out_dtype``.
            scale_a: with ``problem.scaling``, the scales of this rank's shard of A, of shape
                ``plan.shard_shape("SFA", rank)``. Each element is multiplied by its scale in float32.
            scale_b: as ``scale_a``, of this rank's shard of B: "SFB".
            out: where D goes, instead of a new tensor. It shares no memory with the shards.
            gathered: where A goes that this rank multiplies, (rows of its D, k), if it multiplies all columns of these
                rows. It shares no memory with the others.

        Raises:
            ValueError: for tensors of another shape, dtype or device, for beta without C, for ``gathered``
                where this rank does not multiply that much of A, and for shards that require grad outside of
                torch.no_grad(). A rank that raises has sent nothing and may call again; the others wait for it. On CPUs
                also on all ranks where they call different executables, or with another ``alpha``, ``beta`` or bias.
            RuntimeError: where a rank is gone, or does not come within the group's timeout. The error names schedule,
                rank, op and tile. ``out`` and ``gathered`` are NaN then, and the group takes no further calls.
        """
        if torch.compiler.is_dynamo_compiling():
            terms: dict[str, Any] = {"alpha": alpha, "beta": beta, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
            return untraced(self, a_shard, b_shard, c_shard, **terms, out=out, gathered=gathered)
        group = self.group
        raise_if_failed(group)
        alpha, beta = finite("alpha", alpha), finite("beta", beta)
        check_gradients(self.rank, a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered)
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        check_bias(self.rank, bias, given["D"])
        given |= check_scales(self.plan, self.rank, self.device, scale_a, scale_b)
        if gathered is not None:
            if not self._brings_a:
                raise ValueError(
                    f"gathered is for ranks that multiply all columns of A, of the rows of their D; rank {self.rank} "
                    "does not"
                )
            check_gathered(self.plan, self.rank, gathered, given)
        batched = self.plan.problem.l > 1
        shards = {name: t if batched else t.unsqueeze(0) for name, t in given.items()}
        whole = gathered if batched or gathered is None else gathered.unsqueeze(0)
        messages = self.program.messages
        works: list[Any] = [None] * messages
        call = CallState(self.memory, shards, alpha, beta, bias, whole, works, [None] * messages, group)
        odd = ""
        with failing(group, lambda: self._where(call), (given["D"], gathered)):
            if self._compares:
                odd = self._differences(call)
            if not odd:
                with torch.no_grad():
                    for step, call.at in zip(self.program.steps, self.program.ops, strict=True):
                        step(call)
        if odd:
            raise ValueError(odd)
        return given["D"]

    def gather(self, a_shard: Tensor) -> Iterator[GatheredChunk]:
        """The chunks of the gathered A as they arrive, in the order in which the plan multiplies them.

        The caller multiplies, and all ops of the plan but the GEMMs are executed: the chunks that follow travel while
        the caller has a chunk. A chunk is memory of the workspace, or of ``a_shard``: it stays as it is until the next
        call on the group. The caller asks for all chunks. Until then, there is no other call on the group.

        Args:
            a_shard: of shape ``plan.shard_shape("A", rank)`` and of ``problem.dtype``. It must not change until all
                chunks were asked for.

        Raises:
            ValueError: for another shard, for plans as :func:`distgemm.runtime.gathering.check_gathers` refuses them,
                and where the ranks call different executables.
            RuntimeError: as for a call.
        """
        group = self.group
        raise_if_failed(group)
        check_gathers(self.plan)
        check_gradients(self.rank, a_shard, *[None] * 7)
        shards = {"A": check_shard(self.plan, self.rank, self.device, "A", a_shard).detach().unsqueeze(0)}
        messages = self.program.messages
        works: list[Any] = [None] * messages
        call = CallState(self.memory, shards, 1.0, 0.0, None, None, works, [None] * messages, group)
        with failing(group, lambda: self._where(call), ()):
            odd = self._differences(call) if self._compares else ""
        if odd:
            raise ValueError(odd)
        with occupied(group, "a gather"), failing(group, lambda: self._where(call), ()):
            for step, call.at in zip(self.program.steps, self.program.ops, strict=True):
                if isinstance(step, KeepTile):  # behind the first GEMM of each tile
                    rows = slice(*self.memory.own(step.view).box[1])
                    yield GatheredChunk(rows, step.tile(call)[0])
                elif not isinstance(step, Multiply):
                    step(call)

    def _differences(self, call: CallState) -> str:
        """What the ranks call differently, in words; otherwise ""."""
        terms = {"alpha": call.alpha, "beta": call.beta, "bias": "none" if call.bias is None else "given"}
        return differences(self._fields | terms, call.group, self.device).difference

    def _where(self, call: CallState) -> str:
        """How far a call has come."""
        begun = f"{self.plan.schedule} failed on rank {self.rank}"
        if call.at is not None:
            return f"{begun} at {self._own_op(call.at).describe()}"
        first = next((op for op in self.program.ops if op is not None), None)
        before = "" if first is None else f" before {self._own_op(first).describe()}"
        return f"{begun} as the ranks compared their calls{before}"

    def _own_op(self, op: Op) -> Op:
        """The plan's op for an op of its structure."""
        ops = self.plan.structure.ops(op.rank)
        return self.plan.ops(op.rank)[next(at for at, each in enumerate(ops) if each is op)]


def run_collective(
    plan: Plan,
    a_shard: Tensor,
    b_shard: Tensor,
    c_shard: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Execute a plan once: make a :class:`CollectiveExecutable` on the device of ``a_shard`` and call it.

    Every call allocates a workspace and compares the plans of all ranks. To call it again, keep an executable.
    """
    device = a_shard.device if isinstance(a_shard, Tensor) else None
    exe = CollectiveExecutable(plan, group, device)
    return exe(a_shard, b_shard, c_shard, alpha=alpha, beta=beta, bias=bias, out=out)


def _device(device: torch.device | str | int | None, served: dict[str, str]) -> torch.device:
    if device is None:
        device = "cuda" if served.get("cuda") == "nccl" else "cpu"
    found = read_device("device", device, ("cpu", "cuda"))
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


if TYPE_CHECKING:
    _satisfies_protocol: type[Executable] = CollectiveExecutable
