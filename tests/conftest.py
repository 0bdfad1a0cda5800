"""Reproducible property tests, tests that say how many GPUs they need, and samples of exhaustive tests."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from collections import defaultdict
from functools import cache

import pytest

# Before torch is imported. Workers and the ranks that they launch share the cores: more threads would only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A full collection walks all plans that are cached. It would take a quarter of the time of tests that make plans.
gc.set_threshold(*gc.get_threshold()[:2], 1000)
# Compiled graphs of tests are small: tests of the CPU's vector units and compiled headers would take most of the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# Machines with GPUs may run tests/gpu without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("distgemm", derandomize=True, deadline=None, print_blob=True)
    settings.load_profile("distgemm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        choices=["no", "only", "all"],
        default="no",
        help="tests marked sample(count): so many cases of each (no), the other cases (only), or all",
    )


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu(count)`` where there are fewer devices; deselect what --exhaustive leaves out."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        (count,) = marker.args
        found, why = _devices()
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device{'s' * (count != 1)}: {why}"))
    wanted = config.getoption("--exhaustive")
    named = any("::" in argument for argument in config.args)  # who names a test wants it
    if wanted == "all" or named:
        return
    sampled = _sampled(items)
    short = {item for item in items if _marked(item) is None or item in sampled}
    config.hook.pytest_deselected(items=[item for item in items if (item in short) != (wanted == "no")])
    items[:] = [item for item in items if (item in short) == (wanted == "no")]


def _marked(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("sample")
    return None if marker is None else int(marker.args[0])


def _sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test marked ``sample(count)``, that many cases.

    The hash of a case's parameters selects it, so that tests with the same parameters, such as numbers of ranks, run
    the same cases.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _marked(item) is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    found: set[pytest.Item] = set()
    for same in cases.values():
        same.sort(key=lambda item: hashlib.sha256(item.nodeid.partition("[")[2].encode()).digest())
        found.update(same[: _marked(same[0])])
    return found
