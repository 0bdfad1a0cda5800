"""What every runtime with a process per rank checks: the group, the plans of all ranks, the shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from distgemm.plan.plan import Plan, PlanError

__all__ = [
    "TORCH_DTYPES",
    "Group",
    "agree",
    "check_bias",
    "check_gathered",
    "check_scales",
    "check_shards",
    "process_group",
    "resolve_group",
    "shard_dtype",
    "share_memory",
]

Tensor = torch.Tensor

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

Group = dist.ProcessGroup | DeviceMesh | str
"""The ranks that take part: a process group, a mesh of one dimension (``mesh["tp"]``), or a group's name."""


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group that is meant. Raises ValueError for what is none."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("tp",)
            raise ValueError(
                f"the mesh has {group.ndim} dimensions, and the ranks of one take part: group=mesh[{names[-1]!r}]"
            )
        return group.get_group()
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group: call init_process_group, or init_from_env")
    if isinstance(group, str):
        by_name: Any = distributed_c10d
        try:
            found: dist.ProcessGroup = by_name._resolve_process_group(group)
        except RuntimeError:
            raise ValueError(
                f"no process group of this process has the name {group!r}: pass the group itself, or mesh[{group!r}] "
                "of a DeviceMesh with that dimension"
            ) from None
        return found
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group is a ProcessGroup that this rank is in; rank {dist.get_rank()} is not in the group: new_group "
            "returns no group to ranks that it leaves out, and they make no call"
        )
    raise ValueError(
        f"group is a ProcessGroup, a DeviceMesh of one dimension or a group's name; got {group!r}. dist.group.WORLD "
        "has all ranks"
    )


def resolve_group(group: Group | None) -> dist.ProcessGroup:
    """The group, or that of all ranks. Raises ValueError where there is none, or this rank is not in it."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    found = process_group(group)  # type: ignore[arg-type]
    if dist.get_rank(found) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group")
    return found


def agree(
    plan: Plan, further: str, group: dist.ProcessGroup, device: torch.device, problem: Exception | None = None
) -> None:
    """Compare the plans of all ranks, and ``further`` arguments. Raises ValueError on all ranks where they differ;
    ``problem`` on the ranks that have one, PlanError on all others then.

    device: one that the group serves, of the same type on all ranks
    """
    digest = hashlib.sha256(f"{plan.digest} {further}".encode()).digest()
    mine = torch.tensor([*digest, int(problem is not None)], dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group)
    gathered = [bytes(row.tolist()) for row in every]
    digests = [row[:-1] for row in gathered]
    usual = max(digests, key=lambda found: (digests.count(found), -digests.index(found)))
    if others := [rank for rank, found in enumerate(digests) if found != usual]:
        alike = [rank for rank, found in enumerate(digests) if found == usual]
        here = f"{plan.schedule} for {plan.world_size} ranks, {plan.problem}" + (f", {further}" if further else "")
        raise ValueError(
            f"the ranks of the group differ in their plans or arguments: ranks {others} differ from ranks {alike}; "
            f"here {here}"
        )
    if problem is not None:
        raise problem
    if failed := [rank for rank, row in enumerate(gathered) if row[-1]]:
        raise PlanError(f"ranks {failed} of the group cannot execute the plan; their errors say why")


def check_shards(
    plan: Plan,
    rank: int,
    device: torch.device,
    a_shard: Tensor,
    b_shard: Tensor,
    c_shard: Tensor | None,
    beta: float,
    out: Tensor | None,
) -> dict[str, Tensor]:
    """The shards by name, with D allocated where ``out`` is None. Raises ValueError where they do not fit, and where a
    gradient would be lost: to be called in the caller's grad mode."""
    if beta and c_shard is None:
        raise ValueError(f"beta is {beta}, which needs c_shard")
    given = {"A": a_shard, "B": b_shard, "C": c_shard, "D": out}
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        dtype = shard_dtype(plan, name)
        shape = plan.shard_shape(name, rank)
        if tensor is None:
            if name == "D":
                found["D"] = torch.empty(shape, dtype=dtype, device=device)
            continue
        what = "out" if name == "D" else f"{name}'s shard"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{what} on rank {rank} is a torch.Tensor, got {type(tensor).__name__}")
        for kind, is_, wanted in (
            ("shape", tuple(tensor.shape), shape),
            ("dtype", tensor.dtype, dtype),
            ("device", tensor.device, device),
        ):
            if is_ != wanted:
                raise ValueError(f"{what} on rank {rank} has {kind} {wanted}, got {is_}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{what} on rank {rank} requires grad, and executables know no gradients: call them under "
                "torch.no_grad(), or take distgemm.all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce"
            )
        found[name] = tensor
    if out is not None:
        for name in "ABC":
            if name in found and share_memory(found[name], out):
                raise ValueError(f"out shares memory with {name}'s shard, which is still read when out is written")
    return found


def check_gathered(plan: Plan, rank: int, gathered: Tensor, given: Mapping[str, Tensor]) -> None:
    """Raises ValueError where ``gathered`` is not of the shape of all of A, and of the type and device of its shard, or
    shares memory with what :func:`check_shards` found."""
    if not isinstance(gathered, Tensor):
        raise ValueError(f"gathered on rank {rank} is a torch.Tensor, got {type(gathered).__name__}")
    p, a = plan.problem, given["A"]
    shape = (p.l, p.m, p.k) if p.l > 1 else (p.m, p.k)
    if tuple(gathered.shape) != shape or gathered.dtype != a.dtype or gathered.device != a.device:
        raise ValueError(
            f"gathered on rank {rank} is {shape} of {a.dtype} on {a.device}, got {tuple(gathered.shape)} of "
            f"{gathered.dtype} on {gathered.device}"
        )
    for name, other in given.items():
        if share_memory(gathered, other):
            raise ValueError(f"gathered shares memory with {'out' if name == 'D' else f'the shard of {name}'}")


def check_bias(rank: int, bias: Tensor | None, d: Tensor) -> None:
    """Raises ValueError where the bias is no row of D's shard."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise ValueError(f"bias on rank {rank} is a torch.Tensor, got {type(bias).__name__}")
    if tuple(bias.shape) != d.shape[-1:] or bias.dtype != d.dtype or bias.device != d.device:
        raise ValueError(
            f"bias on rank {rank} is {tuple(d.shape[-1:])} of {d.dtype} on {d.device}, got {tuple(bias.shape)} of "
            f"{bias.dtype} on {bias.device}"
        )


def check_scales(plan: Plan, scale_a: Tensor | None, scale_b: Tensor | None) -> None:
    """Raises ValueError where a scale is neither one number nor one for each row of all of A, or B."""
    for name, scale, rows in (("scale_a", scale_a, plan.problem.m), ("scale_b", scale_b, plan.problem.n)):
        if scale is not None and scale.numel() not in (1, rows):
            raise ValueError(
                f"{name} is one number, or {rows} for the rows of all of {name[-1].upper()}, got {tuple(scale.shape)}"
            )


def shard_dtype(plan: Plan, name: str) -> torch.dtype:
    """The type of a rank's shard of "A", "B", "C" or "D"."""
    return TORCH_DTYPES[str(plan.problem.dtype if name in "AB" else plan.problem.out_dtype)]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether the ranges of memory that two tensors span overlap."""
    if not x.numel() or not y.numel() or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (x0, x1), (y0, y1) = _bytes_spanned(x), _bytes_spanned(y)
    return max(x0, y0) < min(x1, y1)


def _bytes_spanned(tensor: Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
