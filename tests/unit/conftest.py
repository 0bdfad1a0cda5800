"""Fixtures of several test files."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets the tasks of the CUDA runtime's launches, in place of streams."""
    from tests.unit.cuda_emulation import record_launches  # imports torch

    return record_launches(monkeypatch)
