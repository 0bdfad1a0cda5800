"""Steps that all ranks of a group take together."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda import CudaExecutable, PerTileExecutable, compile_plan
from distgemm.runtime.groups import ranks_per_host
from distgemm.runtime.torch_arguments import read_device
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import Pattern
from distgemm.tune.cache import key_of
from distgemm.tune.config import TunedConfig

__all__ = ["config_of", "device_of", "from_all", "from_first", "make", "refuse_capture"]

T = TypeVar("T")


def device_of(device: torch.device | str | int | None) -> torch.device:
    """A device with its index. None is the current GPU, or the CPU if there is no GPU."""
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    at = read_device("device", "cuda" if device is None else device, ("cuda", "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if at.type == "cuda" and at.index is None else at


def refuse_capture(
    problem: GemmProblem,
    pattern: Pattern,
    world_size: int,
    device: torch.device,
    ranks_per_host: int | None = None,
) -> None:
    """Raise RuntimeError if the current stream is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        key = key_of(problem, pattern, world_size, ranks_per_host)
        raise RuntimeError(
            f"schedule='auto' has no executable for {key} yet, and none can be made while a graph is captured: "
            f"make this call once before capturing; distgemm.tune.tune(problem, {pattern!r}, group) before that "
            "measures ahead"
        )


def from_first(group: dist.ProcessGroup, device: torch.device, make: Callable[[], T]) -> T:
    """The result of ``make`` on rank 0 of the group, on all ranks. An error of rank 0 is raised on all ranks."""
    sent: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            sent[0] = make()
        except Exception as error:  # raised below, on all ranks
            sent[1] = _sendable(error)
    at = device if dist.get_backend(group) == "nccl" else None
    dist.broadcast_object_list(sent, group=group, group_src=0, device=at)
    if sent[1] is not None:
        raise sent[1]
    result: T = sent[0]
    return result


def _sendable(error: Exception) -> Exception:
    """An error as other ranks can raise it: some cannot be pickled, such as one of a class within a function."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any: the class says how it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def from_all(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """The results of ``make`` on each rank, on all ranks.

    Raises:
        RuntimeError: on all ranks, if ``make`` raises on one.
    """
    mine: tuple[T | None, str | None]
    try:
        mine = make(), None
    except Exception as error:  # raised below, on all ranks
        mine = None, f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    for rank, (_, failure) in enumerate(every):
        if failure is not None:
            raise RuntimeError(f"rank {rank} cannot measure GEMMs: {failure}")
    return [result for result, _ in every]


def make(
    problem: GemmProblem,
    pattern: Pattern,
    config: TunedConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    **options: Any,
) -> CudaExecutable | PerTileExecutable | UnfusedExecutable:
    """This rank's executable of a configuration. A collective call.

    Args:
        problem: the GEMM over all ranks.
        pattern: what the ranks do.
        config: the configuration, the same on all ranks.
        group: the ranks that take part.
        device: this rank's device.
        **options: ``timeout``, ``on_timeout`` and ``turned_b`` of :func:`compile_plan`, for a plan.

    Raises:
        ValueError: on all ranks, if the configuration does not execute the problem.
        PlanError: on all ranks, if the CUDA runtime cannot execute the plan.
    """
    made: CudaExecutable | PerTileExecutable | UnfusedExecutable
    if config.method == "unfused":
        made = UnfusedExecutable(problem, pattern, group, device, config.collective)
    else:
        plan = config.plan(problem, group.size(), ranks_per_host(group))
        made = compile_plan(plan, config.execution, group=group, device=device, copies=True, **options)
    _configs[made] = config
    return made


def config_of(executable: object) -> TunedConfig | None:
    """The configuration that ``schedule="auto"`` selected for an executable; None if the caller named a schedule."""
    return _configs.get(executable)


_configs: WeakKeyDictionary[object, TunedConfig] = WeakKeyDictionary()
