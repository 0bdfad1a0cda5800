"""What every runtime with a process for each rank checks: the group, the plans of all ranks, the tensors of a call."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from distgemm.arguments import wrong
from distgemm.plan.ops import Box, box_extents
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.groups import failing, note_hosts, ranks_per_host
from distgemm.runtime.torch_arguments import read_tensor

__all__ = [
    "HOST_MESH",
    "TORCH_DTYPES",
    "Comparison",
    "Fields",
    "Group",
    "Report",
    "backends",
    "check_agreement",
    "check_bias",
    "check_gathered",
    "check_gradients",
    "check_hosts",
    "check_scales",
    "check_shard",
    "check_shards",
    "compare",
    "differences",
    "exchange_reports",
    "flat_mesh",
    "gathered_box",
    "group_timeout",
    "plan_fields",
    "problem_fields",
    "process_group",
    "raise_failures",
    "raise_together",
    "refuse_groups",
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
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
}

HOST_MESH = ("host", "rank")
"""Names of the dimensions of a mesh of hosts and of the ranks of each."""

Group = dist.ProcessGroup | DeviceMesh | str
"""The ranks that take part: a process group, a mesh of one dimension (``mesh["tp"]``), a mesh of hosts, whose
dimensions are HOST_MESH, or a group's name."""


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group that ``group`` names.

    Raises:
        ValueError: for anything that names no process group of this rank.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        return flat_mesh(group).get_group()
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group: call init_process_group, or init_from_env")
    if isinstance(group, str):
        by_name: Any = distributed_c10d
        try:
            found: dist.ProcessGroup = by_name._resolve_process_group(group)
        except RuntimeError:
            raise ValueError(
                f"this process has no process group of the name {group!r}: it was destroyed, or never made. Pass one "
                "that exists, or a dimension of a DeviceMesh, such as mesh['tp']"
            ) from None
        return found
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group is a ProcessGroup that this rank is in; rank {dist.get_rank()} is not in the group. new_group "
            "returns no group to the ranks that it leaves out, and these ranks make no call"
        )
    raise ValueError(
        f"group is a ProcessGroup, a DeviceMesh of one dimension or a group's name; got {group!r}. dist.group.WORLD "
        "has all ranks"
    )


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one dimension with the ranks of a mesh: the mesh itself, or all ranks of a mesh of hosts, in its order.

    The group of the ranks of hosts knows then how many of them share memory: see
    :func:`distgemm.runtime.groups.ranks_per_host`. Where there is no such mesh yet, this is a collective call.

    Raises:
        ValueError: for another mesh of several dimensions.
    """
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names != HOST_MESH:
        names = mesh.mesh_dim_names or ("tp",)
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions, and the ranks of one take part: group=mesh[{names[-1]!r}]. A mesh "
            f"of hosts has the dimensions {HOST_MESH}"
        )
    flat = mesh._flatten()
    note_hosts(flat.get_group(), mesh.size(1))
    return flat


def check_hosts(plan: Plan, group: dist.ProcessGroup) -> None:
    """Raise ValueError where a plan is for other hosts than a mesh has said of its group."""
    noted, of_host = ranks_per_host(group), plan.ranks_per_host or plan.world_size
    if noted is not None and noted != of_host:
        raise ValueError(
            f"the mesh has {group.size() // noted} hosts of {noted} ranks, and the plan is for "
            f"{plan.world_size // of_host} of {of_host}: make it with ranks_per_host={noted}"
        )


def refuse_groups(problem: GemmProblem) -> None:
    """Raises ValueError for a grouped GEMM, which only the reference runtime executes."""
    if problem.groups > 1:
        raise ValueError(
            f"groups is 1 for runtimes that move data, got {problem.groups}: plans of grouped GEMMs can be made, "
            "proved, simulated, and executed by distgemm.run_reference"
        )


def resolve_group(group: Group | None) -> dist.ProcessGroup:
    """The process group that ``group`` names; None: all ranks.

    Raises:
        ValueError: where there is no such group, or this rank is not in it.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    found = process_group(group)  # type: ignore[arg-type]
    if dist.get_rank(found) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group")
    return found


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that collectives of a group wait for its ranks, on a device that it serves."""
    backend: Any = group._get_backend(device)
    return float(backend.options._timeout.total_seconds())


PLAN_FIELD = "digest of the plan"
"""The field that stands for the ops of a plan."""
DIGITS = 16
"""Hexadecimal digits of a plan's digest that an error shows."""


class Report(NamedTuple):
    """What one rank reports of a step that all ranks of a group take.

    Attributes:
        payload: bytes, as many on each rank.
        failed: whether an error was raised on the rank.
    """

    payload: bytes
    failed: bool


def exchange_reports(
    payload: bytes, problem: Exception | None, group: dist.ProcessGroup, device: torch.device
) -> list[Report]:
    """The reports of all ranks, by rank. A collective call.

    Args:
        payload: this rank's, of the same length on all ranks.
        problem: the error that was raised on this rank; None: there was none.
        group: the ranks.
        device: one that the group serves, of the same type on all ranks.
    """
    rows = _gather_bytes(bytes([*payload, problem is not None]), group, device)
    return [Report(row[:-1], bool(row[-1])) for row in rows]


def _gather_bytes(payload: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    mine = torch.tensor([*payload], dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group)
    return [bytes(row.tolist()) for row in every]


def raise_failures(reports: Sequence[Report], problem: Exception | None, error: type[Exception], failure: str) -> None:
    """Raise on all ranks of a group where one has failed.

    Args:
        reports: of all ranks, from :func:`exchange_reports`.
        problem: the error that was raised on this rank; None: there was none.
        error: the type of what the other ranks raise.
        failure: what the failed ranks cannot do, as "cannot execute the plan".

    Raises:
        Exception: ``problem`` on the ranks that have one, ``error`` on all others, which names the failed ranks.
    """
    if problem is not None:
        raise problem
    if failed := [rank for rank, report in enumerate(reports) if report.failed]:
        raise error(f"ranks {failed} of the group {failure}; their errors say why")


def raise_together(problem: Exception | None, failure: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on all ranks of a group where one has failed. A collective call, which ends once all ranks have made it.

    Args:
        problem: the error that was raised on this rank; None: there was none.
        failure: as :func:`raise_failures` takes it.
        group: the ranks.
        device: one that the group serves, of the same type on all ranks.

    Raises:
        Exception: ``problem`` on the ranks that have one.
        RuntimeError: on all other ranks then.
    """
    raise_failures(exchange_reports(b"", problem, group, device), problem, RuntimeError, failure)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    pairs = [pair.rpartition(":") for pair in dist.get_backend_config(group).split(",")]
    found = {device: backend for device, _, backend in pairs if device}
    if not found:
        backend = dist.get_backend(group)
        found = {"cuda" if backend == "nccl" else "cpu": backend}
    return found


# --- comparisons ----------------------------------------------------------------------------------------

Fields = Mapping[str, object]
"""What a rank is about to do, by name; values are compared as text. "call" says of which kind it is: calls with other
fields have another "call"."""


class Comparison(NamedTuple):
    """What came of a comparison.

    Attributes:
        reports: of all ranks.
        difference: what differs between ranks, with the values; "": nothing does.
        names: of the fields that differ.
    """

    reports: list[Report]
    difference: str
    names: tuple[str, ...] = ()


def differences(
    fields: Fields, group: dist.ProcessGroup, device: torch.device, problem: Exception | None = None
) -> Comparison:
    """Compare what all ranks of a group are about to do. A collective call.

    All comparisons of all kinds send as many bytes first. So ranks that are about to do different things find out, and
    do not take each other's messages for something else.

    Args:
        fields: what this rank does.
        group: the ranks.
        device: one that the group serves, of the same type on all ranks. A group that serves CPUs compares there.
        problem: the error that was raised on this rank; None: there was none.
    """
    text = json.dumps({name: str(value) for name, value in fields.items()}).encode()
    at = torch.device("cpu") if "cpu" in backends(group) else device
    digest = hashlib.sha256(text).digest()
    reports = exchange_reports(digest, problem, group, at)
    if all(report.payload == digest for report in reports):
        return Comparison(reports, "")
    sizes = [int.from_bytes(size, "little") for size in _gather_bytes(len(text).to_bytes(8, "little"), group, at)]
    texts = _gather_bytes(text.ljust(max(sizes)), group, at)
    return Comparison(reports, *_difference([json.loads(each) for each in texts]))


def _difference(fields: Sequence[Mapping[str, str]]) -> tuple[str, tuple[str, ...]]:
    """What differs between the fields of the ranks, in words and by name. All kinds of calls have "call"."""
    found = {}
    for name in fields[0]:
        if not all(name in each for each in fields):
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(fields):
            ranks_of.setdefault(each[name], []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            found[name] = f"{name}: {values}"
    text = f"the ranks of the group make different calls; {'; '.join(found.values())}. All ranks make the same call"
    return text, tuple(found)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def compare(
    fields: Fields,
    group: dist.ProcessGroup,
    device: torch.device,
    problem: Exception | None = None,
    exact: Mapping[str, Callable[[], object]] | None = None,
) -> list[Report]:
    """:func:`differences`, which raises.

    Args:
        fields: as :func:`differences` takes it, with "call" first.
        group: as :func:`differences` takes it.
        device: as :func:`differences` takes it.
        problem: as :func:`differences` takes it.
        exact: for fields that may differ between ranks that do the same, what they compare where no other field
            differs.

    Raises:
        ValueError: on all ranks where something differs.
        RuntimeError: where the ranks cannot be compared, because one is gone.
    """

    def where() -> str:
        return f"{fields['call']} on rank {dist.get_rank(group)} failed as it was compared with the other ranks"

    with failing(group, where, ()):
        found = differences(fields, group, device, problem)
        if exact is not None and found.names and set(found.names) <= set(exact):
            fields = {**fields, **{name: exact[name]() for name in found.names}}
            found = differences(fields, group, device, problem)
    if found.difference:
        raise ValueError(found.difference) from problem
    return found.reports


def check_agreement(
    plan: Plan, arguments: str, group: dist.ProcessGroup, device: torch.device, problem: Exception | None = None
) -> str:
    """Compare the plans and arguments of all ranks. A collective call.

    Args:
        plan: this rank's.
        arguments: further arguments that are the same on all ranks, as text.
        group: the ranks.
        device: one that the group serves, of the same type on all ranks.
        problem: the error that was raised on this rank as it prepared the plan; None: there was none.

    Returns:
        A hash of what the ranks agree on. It is the same on all ranks.

    Raises:
        ValueError: on all ranks where plans or arguments differ.
        Exception: ``problem`` on the ranks that have one.
        PlanError: on all other ranks then.
    """
    call = f"the first call of {plan.schedule}"
    fields = {"call": call, **plan_fields(plan, plan.fingerprint), "arguments": arguments}
    # A plan from a file and one that make_plan made may be equal and have different fingerprints.
    exact = {PLAN_FIELD: lambda: plan.digest[:DIGITS]}
    reports = compare(fields, group, device, problem, exact)
    raise_failures(reports, problem, PlanError, "cannot execute the plan")
    return reports[0].payload.hex()


def plan_fields(plan: Plan, plan_hash: str) -> dict[str, object]:
    """What ranks compare of a plan.

    Args:
        plan: this rank's.
        plan_hash: what stands for its ops.
    """
    return {
        "schedule": plan.schedule,
        "number of ranks": plan.world_size,
        "ranks per host": plan.ranks_per_host or plan.world_size,
        **problem_fields(plan.problem),
        "workspace": plan.workspace,
        "sync": plan.sync,
        "mechanism": plan.mechanism,
        PLAN_FIELD: plan_hash[:DIGITS],
    }


def problem_fields(problem: GemmProblem) -> dict[str, object]:
    """What ranks compare of a problem."""
    return dict(dataclasses.asdict(problem))


TENSORS_OF_A_CALL = ("A's shard", "B's shard", "C's shard", "bias", "scale_a", "scale_b", "out", "gathered")


def check_gradients(rank: int, *tensors: Any) -> None:
    """Refuse tensors whose gradient a call would lose. Every call makes this check, in the caller's grad mode.

    Args:
        rank: this rank.
        *tensors: those of a call, in the order of ``TENSORS_OF_A_CALL``; None: not given.

    Raises:
        ValueError: where a tensor requires grad while gradients are recorded, and where it has a forward-mode tangent.
    """
    if forward_ad._current_level >= 0:  # torch would refuse the GEMM, when messages are under way
        unpack: Any = forward_ad.unpack_dual
        for name, tensor in zip(TENSORS_OF_A_CALL, tensors, strict=False):
            if isinstance(tensor, Tensor) and unpack(tensor).tangent is not None:
                raise ValueError(f"{name} on rank {rank} has a tangent, and there are no forward-mode derivatives")
    if not torch.is_grad_enabled():
        return
    for number, tensor in enumerate(tensors):
        if tensor is not None and getattr(tensor, "requires_grad", False):
            name = TENSORS_OF_A_CALL[number]
            raise ValueError(
                f"{name} on rank {rank} requires grad, and executables know no gradients: call them under "
                "torch.no_grad(), or take distgemm.all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce"
            )


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
    """The tensors of a call by name, with a new one for D where ``out`` is None.

    Args:
        plan: what is executed.
        rank: this rank.
        device: where the tensors lie.
        a_shard: this rank's shard of A.
        b_shard: this rank's shard of B.
        c_shard: this rank's shard of C; read only where ``beta`` is not 0.
        beta: factor of C.
        out: where D goes; None: a new tensor.

    Raises:
        ValueError: for tensors of another shape, dtype or device, for negated views, and for ``out`` that shares memory
            with a shard, that has overlapping elements, or that is an inference tensor outside of inference mode.
    """
    if beta and c_shard is None:
        raise ValueError(f"c_shard is a torch.Tensor where beta is not 0: beta is {beta}, got None")
    given = {"A": a_shard, "B": b_shard, "C": c_shard, "D": out}
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if tensor is None and name in "CD":
            if name == "D":
                found["D"] = torch.empty(plan.shard_shape("D", rank), dtype=shard_dtype(plan, "D"), device=device)
            continue
        found[name] = check_shard(plan, rank, device, name, tensor)
    if out is not None:
        for name in "ABC":
            if name in found and share_memory(found[name], out):
                raise ValueError(f"out shares memory with {name}'s shard, which is still read when out is written")
    return found


def check_shard(plan: Plan, rank: int, device: torch.device, name: str, tensor: Any) -> Tensor:
    """A tensor of a call, once it is known to fit; see :func:`check_shards`.

    Args:
        plan: what is executed.
        rank: this rank.
        device: where the tensor lies.
        name: "A", "B", "C", or "D" for the tensor that D goes into.
        tensor: the tensor.
    """
    what = "out" if name == "D" else f"{name}'s shard"
    found: Tensor = read_tensor(f"{what} on rank {rank}", tensor)
    for aspect, actual, wanted in (
        ("shape", tuple(found.shape), plan.shard_shape(name, rank)),
        ("dtype", found.dtype, shard_dtype(plan, name)),
        ("device", found.device, device),
    ):
        if actual != wanted:
            raise ValueError(f"{what} on rank {rank} has {aspect} {wanted}, got {actual}")
    _check_memory(what, rank, found, written=name == "D")
    return found


def gathered_box(plan: Plan, rank: int) -> Box:
    """The part of A that a call can return as ``gathered``: all columns of those rows that this rank's D has."""
    batches, rows, _ = plan.box("D", rank)
    return batches, rows, (0, plan.problem.k)


def check_gathered(plan: Plan, rank: int, gathered: Tensor, given: Mapping[str, Tensor]) -> None:
    """Check the tensor that :func:`gathered_box` of A goes into.

    Args:
        plan: what is executed.
        rank: this rank.
        gathered: the tensor.
        given: the tensors of the call by name, from :func:`check_shards`.

    Raises:
        ValueError: where it has another shape than this part of A, or another dtype or device than A's shard, shares
            memory with another tensor of the call, or cannot be written as :func:`check_shards` says of ``out``.
    """
    read_tensor(f"gathered on rank {rank}", gathered)
    a, extents = given["A"], box_extents(gathered_box(plan, rank))
    shape = extents if plan.problem.l > 1 else extents[1:]
    if tuple(gathered.shape) != shape or gathered.dtype != a.dtype or gathered.device != a.device:
        raise ValueError(
            f"gathered on rank {rank} is {shape} of {a.dtype} on {a.device}, got {tuple(gathered.shape)} of "
            f"{gathered.dtype} on {gathered.device}"
        )
    _check_memory("gathered", rank, gathered, written=True)
    for name, other in given.items():
        if share_memory(gathered, other):
            raise ValueError(f"gathered shares memory with {'out' if name == 'D' else f'the shard of {name}'}")


def check_bias(rank: int, bias: Tensor | None, d: Tensor) -> None:
    """Raises ValueError where the bias is not one row of D's shard."""
    if bias is None:
        return
    read_tensor(f"bias on rank {rank}", bias)
    if tuple(bias.shape) != d.shape[-1:] or bias.dtype != d.dtype or bias.device != d.device:
        raise ValueError(
            f"bias on rank {rank} is {tuple(d.shape[-1:])} of {d.dtype} on {d.device}, got {tuple(bias.shape)} of "
            f"{bias.dtype} on {bias.device}"
        )
    _check_memory("bias", rank, bias, written=False)


def check_scales(
    plan: Plan, rank: int, device: torch.device, scale_a: Tensor | None, scale_b: Tensor | None
) -> dict[str, Tensor]:
    """The scales of a call as "SFA" and "SFB", of the shapes of the plan's shards. Empty for a plan without scaling.

    Args:
        plan: what is executed.
        rank: this rank.
        device: where the tensors lie.
        scale_a: the scales of this rank's shard of A.
        scale_b: the scales of this rank's shard of B.

    Raises:
        ValueError: for scales that are missing or that the problem does not have, and for tensors of another shape,
            dtype or device.
    """
    found: dict[str, Tensor] = {}
    for name, scales in (("SFA", scale_a), ("SFB", scale_b)):
        argument = f"scale_{name[-1].lower()} on rank {rank}"
        if plan.problem.scaling is None:
            if scales is not None:
                raise wrong(argument, "None without a scaling, as GemmProblem(..., scaling='rowwise') has it", scales)
            continue
        shape, dtype = plan.shard_shape(name, rank), shard_dtype(plan, name)
        if scales is None:
            raise ValueError(f"{argument} is {shape} of {dtype}, the scales of {name[-1]}'s shard, got None")
        read_tensor(argument, scales)
        same = tuple(scales.shape) == shape or (
            scales.numel() == prod(shape) and max(_long_sides(scales.shape), _long_sides(shape)) < 2
        )
        if not same or scales.dtype != dtype or scales.device != device:
            raise ValueError(
                f"{argument} is {shape} of {dtype} on {device}, got {tuple(scales.shape)} of {scales.dtype} on "
                f"{scales.device}"
            )
        _check_memory(argument, rank, scales, written=False)
        found[name] = scales.detach().reshape(shape)
    return found


def _long_sides(shape: Sequence[int]) -> int:
    """The number of sides that are longer than 1."""
    return sum(side != 1 for side in shape)


def _check_memory(what: str, rank: int, tensor: Tensor, written: bool) -> None:
    """Refuse a tensor whose memory a call cannot read, or cannot write, as it is.

    Args:
        what: the tensor's name.
        rank: this rank.
        tensor: the tensor.
        written: whether the call writes it.

    Raises:
        ValueError: for a negated view; where it is written, also for elements that overlap, and for an inference tensor
            outside of inference mode.
    """
    if tensor.is_neg():
        raise ValueError(
            f"{what} on rank {rank} has its values in memory, got a negated view; {what}.resolve_neg() copies them"
        )
    if not written:
        return
    if _has_overlap(tensor):
        raise ValueError(
            f"{what} on rank {rank} has a place in memory for each element, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}, whose elements overlap; torch.empty makes one without overlap"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{what} on rank {rank} is written outside of inference mode, got an inference tensor; make it outside of "
            "torch.inference_mode(), or make the call within"
        )


def _has_overlap(tensor: Tensor) -> bool:
    """Whether two elements of a tensor have one address."""
    if not tensor.numel():
        return False
    modes = sorted((stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1)
    span = 1  # addresses from the first to the last element of the modes so far
    for stride, extent in modes:
        if stride < span:
            break
        span += (extent - 1) * stride
    else:
        return False
    # Dimensions that interleave may still have an address for each element.
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, extent in modes:
        offsets = (offsets[:, None] + torch.arange(extent, device="cpu") * stride).flatten()
    return len(set(offsets.tolist())) < len(offsets)


def shard_dtype(plan: Plan, name: str) -> torch.dtype:
    """The dtype of a rank's shard of "A", "B", "C" or "D", or of its scales "SFA" or "SFB"."""
    return TORCH_DTYPES[plan.problem.operand_dtype(name)]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether the ranges of memory that the two tensors span overlap, also if they have different storages."""
    if not x.numel() or not y.numel() or x.device != y.device or x.device.type == "meta":
        return False
    (x0, x1), (y0, y1) = _bytes_spanned(x), _bytes_spanned(y)
    return max(x0, y0) < min(x1, y1)


def _bytes_spanned(tensor: Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
