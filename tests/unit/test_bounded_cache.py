"""Caches are bounded by the memory of what they keep."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

import distgemm
from distgemm import GemmProblem, make_plan
from distgemm.plan import derive
from distgemm.schedulers import registry
from distgemm.schedulers.cache import BoundedCache


def test_what_was_used_least_recently_is_dropped() -> None:
    made: list[int] = []

    def make(size: int) -> list[int]:
        made.append(size)
        return [size]

    cache = BoundedCache(make, lambda value: value[0], 10)
    first = cache(4)
    cache(5)
    assert cache(4) is first and made == [4, 5]
    cache(3)  # 12 in total: the 5 goes
    assert cache(4) is first and made == [4, 5, 3]
    cache(5)
    assert made == [4, 5, 3, 5]
    large = cache(100)  # stays alone
    assert cache(100) is large and made == [4, 5, 3, 5, 100]
    cache(4)
    assert made == [4, 5, 3, 5, 100, 4]
    cache.clear()
    cache(4)
    assert made[-2:] == [4, 4]


def test_what_raises_is_not_kept() -> None:
    cache = BoundedCache(lambda size: 1 // size, lambda value: value, 10)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache(0)
    assert cache(1) == 1


def test_plans_are_dropped_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [make_plan(GemmProblem(64, 64, 64 + number), "ag+gemm", 8) for number in range(3)]
    size = derive._size_of(plans[0])
    monkeypatch.setattr(derive._make_plan, "most", int(2.5 * size))
    distgemm.plan.derive.forget_plans()
    first, second, third = (make_plan(plan.problem, "ag+gemm", 8) for plan in plans)
    assert make_plan(third.problem, "ag+gemm", 8) is third
    assert make_plan(second.problem, "ag+gemm", 8) is second
    assert make_plan(first.problem, "ag+gemm", 8) is not first


@pytest.mark.parametrize(
    ("name", "options"), [("ag+gemm", {"mechanism": "pull"}), ("gemm+rs", {"chunks": 2}), ("gemm+ar", {})]
)
def test_the_sizes_of_plans_and_schedules_are_estimated(name: str, options: dict[str, object]) -> None:
    """Within a factor of four, so that the limits mean what they say."""
    chunks = {key: value for key, value in options.items() if key == "chunks"}
    registry._build.clear()
    gc.collect()
    tracemalloc.start()
    try:
        schedule = distgemm.get_schedule(name, 32, **chunks)  # type: ignore[arg-type]
        plan = derive._derive(
            GemmProblem(256, 256, 256), schedule, "full", "credit", options.get("mechanism", "push"), 2
        )
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    estimated = derive._size_of(plan) + registry._size_of(schedule)
    assert taken / 4 < estimated < taken * 4, (taken, estimated)
