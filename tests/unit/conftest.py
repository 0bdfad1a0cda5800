"""Fixtures of several test files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list that gets the tasks of the CUDA runtime's launches, in place of streams."""
    import torch

    from tests.unit.cuda_emulation import record_launches

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny, and threads that wait for work take it from other tests
    yield record_launches(monkeypatch)
    torch.set_num_threads(threads)
