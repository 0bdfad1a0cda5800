"""Reproducible property tests, and tests that say how many GPUs they need."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest

# Machines with GPUs may run tests/gpu without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("distgemm", derandomize=True, deadline=None, print_blob=True)
    settings.load_profile("distgemm")


@cache
def _devices() -> tuple[int, str]:
    """How many CUDA devices there are, and why there are no more."""
    try:
        import torch
    except ImportError:
        return 0, "torch is not installed"
    if not torch.backends.cuda.is_built():
        return 0, "this torch is built without CUDA"
    count = torch.cuda.device_count()
    return count, f"{count} found"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu(count)`` where there are fewer devices; torch is imported only for them."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        (count,) = marker.args
        found, why = _devices()
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device{'s' * (count != 1)}: {why}"))
