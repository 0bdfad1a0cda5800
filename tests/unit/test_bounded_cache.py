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
    cache = BoundedCache[list[int]](sum, 10)
    first = cache.keep("a", [4])
    cache.keep("b", [5])
    assert cache.get("a") is first and (len(cache), cache.size) == (2, 9)
    cache.keep("c", [3])  # 12 in total: b goes
    assert cache.get("a") is first and cache.get("b") is None and (len(cache), cache.size) == (2, 7)
    large = cache.keep("d", [100])  # stays alone
    assert cache.get("d") is large and cache.get("a") is None and len(cache) == 1
    cache.keep("a", [4])
    assert cache.get("d") is None and cache.size == 4
    cache.clear()
    assert cache.get("a") is None and (len(cache), cache.size) == (0, 0)


def test_what_is_kept_first_stays() -> None:
    cache = BoundedCache[list[int]](sum, 10)
    first = cache.keep("a", [4])
    assert cache.keep("a", [4]) is first


def test_a_value_may_grow_after_it_is_kept() -> None:
    cache = BoundedCache[list[int]](sum, 10)
    cache.keep("a", [1])
    grows = cache.keep("b", [1])
    grows.append(7)
    assert cache.size == 9
    cache.keep("c", [2])
    assert cache.get("a") is None and cache.size == 10
    grows.append(1)  # not seen until it is used again
    assert cache.get("b") is grows and cache.size == 11


def test_plans_are_dropped_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [make_plan(GemmProblem(64, 64, 64 + number), "ag+gemm", 8) for number in range(3)]
    size = derive._size_of(plans[0])
    for kept in (derive._plans, derive._structures):
        monkeypatch.setattr(kept, "most", int(2.5 * size))
    distgemm.plan.derive.forget_plans()
    first, second, third = (make_plan(plan.problem, "ag+gemm", 8) for plan in plans)
    assert make_plan(third.problem, "ag+gemm", 8) is third
    assert make_plan(second.problem, "ag+gemm", 8) is second
    assert make_plan(first.problem, "ag+gemm", 8) is not first


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "options"), [("ag+gemm", {"mechanism": "pull"}), ("gemm+rs", {"chunks": 2}), ("gemm+ar", {})]
)
def test_the_sizes_of_plans_and_schedules_are_estimated(name: str, options: dict[str, object]) -> None:
    """Within a factor of four, so that the limits mean what they say."""
    chunks = {key: value for key, value in options.items() if key == "chunks"}
    registry._built.clear()
    gc.collect()
    tracemalloc.start()
    try:
        schedule = distgemm.get_schedule(name, 32, **chunks)  # type: ignore[arg-type]
        plan = derive._derive(
            GemmProblem(256, 256, 256), schedule, "full", "credit", options.get("mechanism", "push"), 2
        ).plan
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    estimated = derive._size_of(plan) + registry._size_of(schedule)
    assert taken / 4 < estimated < taken * 4, (taken, estimated)
