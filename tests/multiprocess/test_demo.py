"""The demo: it passes, says so, and fails when the result is further off than its types explain."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from distgemm import demo as module
from distgemm.demo import demo


def test_demo_passes_on_uneven_shards() -> None:
    text = io.StringIO()
    schedules = ("all_gather_1d_tiling_cd_rotating_b", "reduce_scatter_1d_tiling_b_rotating_c")
    demo(3, *schedules, scale=256, dtype="bfloat16", console=Console(file=text, width=160))
    printed = text.getvalue()
    assert printed.count(": pass") == 2 and printed.count(": equal") == 2
    for expected in (*schedules, "padded shards", "all_reduce and a slice", "2, 2, 0"):
        assert expected in printed


def test_demo_raises_when_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bound", lambda plan: 1e-12)
    with pytest.raises(RuntimeError, match=r"exceeds 1\.00e-12"):
        demo(2, scale=256, console=Console(file=io.StringIO()))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="scale"):
        demo(2, scale=0)
    with pytest.raises(ValueError, match="dtype is one of float64"):
        demo(2, dtype="float8_e4m3fn")
