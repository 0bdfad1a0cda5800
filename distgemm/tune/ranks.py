"""What all ranks of a group do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda import CudaExecutable, compile_plan
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import Pattern
from distgemm.tune.cache import key_of
from distgemm.tune.config import TunedConfig

__all__ = ["config_of", "device_of", "from_all", "from_first", "make", "refuse_capture"]

T = TypeVar("T")


def device_of(device: torch.device | str | int | None) -> torch.device:
    """None: the current GPU; the CPU where there is none, for what needs no GPU."""
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    at = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if at.type == "cuda" and at.index is None else at


def refuse_capture(problem: GemmProblem, pattern: Pattern, size: int, device: torch.device) -> None:
    """Raises RuntimeError while the current stream is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"schedule='auto' has no executable for {key_of(problem, pattern, size)} yet, and none can be made while a "
            f"graph is captured: make this call once before capturing; distgemm.tune.tune(problem, {pattern!r}, group) "
            "before that measures ahead"
        )


def from_first(group: dist.ProcessGroup, device: torch.device, make: Callable[[], T]) -> T:
    """What the group's rank 0 makes, on all ranks; so is the error that it raises."""
    found: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            found[0] = make()
        except Exception as error:  # raised below, on all ranks
            found[1] = error
    at = device if dist.get_backend(group) == "nccl" else None
    dist.broadcast_object_list(found, group=group, group_src=0, device=at)
    if found[1] is not None:
        raise found[1]
    made: T = found[0]
    return made


def from_all(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """What each rank makes, on all ranks; the error of any rank on all of them."""
    mine: tuple[T | None, str | None]
    try:
        mine = make(), None
    except Exception as error:  # told to all, which would wait for this rank
        mine = None, f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            raise RuntimeError(f"rank {rank} cannot measure GEMMs: {failed}")
    return [found for found, _ in every]


def make(
    problem: GemmProblem,
    pattern: Pattern,
    config: TunedConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    **more: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable of a configuration. A collective call. ``more`` is what ``compile_plan`` takes."""
    made: CudaExecutable | UnfusedExecutable
    if config.method == "unfused":
        made = UnfusedExecutable(problem, pattern, group, device, config.collective)
    else:
        plan = config.plan(problem, group.size())
        made = compile_plan(plan, config.execution, group=group, device=device, fallback=True, **more)
    _configs[made] = config
    return made


def config_of(executable: object) -> TunedConfig | None:
    """What ``schedule="auto"`` selected for an executable; None if the caller named the schedule."""
    return _configs.get(executable)


_configs: WeakKeyDictionary[object, TunedConfig] = WeakKeyDictionary()
