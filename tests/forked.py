"""Ranks that are forks of one process. It has imported torch, which takes a rank that is spawned a second or two."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

import distgemm.nn  # noqa: F401
from distgemm.runtime import launch
from tests.once import once

__all__ = ["fork_ranks", "results"]


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let ``launch`` fork ranks from a process that has imported this module. They are new processes all the same."""

    def start(function: Any, args: tuple[launch.LaunchSpec], ranks: int, **options: Any) -> Any:
        multiprocessing.set_forkserver_preload([__name__])
        forked = {**options, "start_method": "forkserver"}
        return start_processes(_run, (function, *args, dict(os.environ)), ranks, **forked)  # type: ignore[no-untyped-call]

    patch.setattr(launch, "start_processes", start)


def _run(rank: int, function: Any, spec: launch.LaunchSpec, environment: dict[str, str]) -> None:
    gc.freeze()  # what was imported: it takes the collector 0.2 s
    os.environ.clear()  # it is that of the first launch
    os.environ.update(environment)
    function(rank, dataclasses.replace(spec, parent=os.getppid()))


@once
def results(ranks: int, check: Callable[..., Any], *args: object) -> list[Any]:
    """What a check finds on each rank. A check has a launch of its own: then no test runs the checks of another one."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        return launch.launch(check, ranks, *args, timeout=120)
