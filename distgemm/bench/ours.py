"""Our own ways to do an operation, beside those of :mod:`distgemm.measure.timing`."""

from __future__ import annotations

from typing import Any

from distgemm.api import compile
from distgemm.measure.timing import Method, Operation, executable_method
from distgemm.tune import config_of

__all__ = ["auto_method", "schedule_method"]


def schedule_method(operation: Operation, schedule: str, **options: Any) -> Method:
    """A schedule of ours."""
    exe = compile(operation.problem, schedule, group=operation.group, **options)
    name = " ".join([schedule, *(f"{key}={value}" for key, value in options.items())])
    return executable_method(operation, name, exe)


def auto_method(operation: Operation) -> Method:
    """What ``schedule="auto"`` takes for this operation; the method's detail says what that is, and why."""
    exe: Any = compile(operation.problem, "auto", pattern=operation.pattern, group=operation.group)
    method = executable_method(operation, "distgemm auto", exe)
    selected = config_of(exe)
    assert selected is not None
    method.detail = f"{selected}; {selected.source}"
    return method
