"""What a GPU did during replays, read from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from distgemm.measure.operation import Method, Operation

__all__ = ["GpuEvent", "middle_replay", "profile_replays", "replay_timeline"]


class GpuEvent(NamedTuple):
    """A kernel or a copy, as the profiler saw it.

    Attributes:
        name: of the kernel, or "Memcpy ..." and "Memset ...".
        stream: the profiler's number of the stream.
        start, end: ns of the host's clock.
    """

    name: str
    stream: int
    start: int
    end: int


def profile_replays(replay: Callable[[], object], replays: int, device: torch.device) -> list[GpuEvent]:
    """All kernels and copies of so many replays on this rank, by start.

    The first replays may be slow: profilers of ranks start at different times, and ranks wait for each other.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize(device)
    # Times stay whole numbers: a float has only a quarter of a microsecond left at such values.
    events = [
        GpuEvent(event.name(), event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
    return sorted(events, key=lambda event: event.start)


def middle_replay(events: list[GpuEvent], replays: int) -> list[GpuEvent]:
    """The events of the middle one of so many equal replays."""
    each = len(events) // replays
    return events[replays // 2 * each :][:each]


def replay_timeline(operation: Operation, method: Method, replays: int = 7) -> list[dict[str, Any]]:
    """Kernels and copies of one replay of a method on this rank: name, stream, start and duration, us."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method.run()
    dist.barrier(operation.group, device_ids=[operation.device.index])
    events = middle_replay(profile_replays(graph.replay, replays, operation.device), replays)
    return [
        {
            "name": event.name,
            "stream": event.stream,
            "start": round((event.start - events[0].start) / 1e3, 2),
            "us": (event.end - event.start) / 1e3,
        }
        for event in events
    ]
