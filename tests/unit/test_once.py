"""What many tests share is made once, whether it comes to something or fails."""

from __future__ import annotations

import pytest

from tests.once import once


def test_what_fails_is_not_tried_again() -> None:
    ran: list[int] = []

    @once
    def half(number: int) -> int | None:
        ran.append(number)
        if number % 2:
            raise RuntimeError(f"{number} is odd")
        return number // 2 or None

    for _ in range(3):
        assert half(4) == 2 and half(0) is None
        with pytest.raises(RuntimeError, match="3 is odd"):
            half(3)
    assert ran == [4, 0, 3]
