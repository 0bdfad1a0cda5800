"""What a benchmark prints about a step that takes long."""

from __future__ import annotations

import time

import pytest

from distgemm.bench.stalls import Stalls


def test_a_long_step_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Stalls(3, notice_s=0.2) as stalls:
        stalls.now("quack is made")
        time.sleep(0.6)
        stalls.now("quack is measured")
        time.sleep(0.6)
    assert capfd.readouterr().err.splitlines() == ["rank 3 for 0 s: quack is made", "rank 3 for 0 s: quack is measured"]


@pytest.mark.sample(0)  # five seconds of waiting
def test_short_steps_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Stalls(0, notice_s=2.0) as stalls:
        time.sleep(2.5)  # nothing has begun
        for number in range(50):
            stalls.now(f"round {number}")
            time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_it_ends_at_once_and_lets_errors_through() -> None:
    def fails() -> None:
        with Stalls(0, notice_s=100.0) as stalls:
            stalls.now("this")
            raise ValueError("inside")

    begin = time.monotonic()
    with pytest.raises(ValueError, match="inside"):
        fails()
    assert time.monotonic() - begin < 5
