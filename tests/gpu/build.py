"""Compiles kernels of tests on GPUs, all at once. It needs no GPU:

    python -m tests.gpu.build                 # those of test_gemm.py, test_fp8.py and test_per_tile.py
    python -m tests.gpu.build fp8 per_tile
    python -m tests.gpu.build --list

Without it each test compiles what it needs, one kernel after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest

from distgemm.gemm.nvcc import KernelSource, build
from distgemm.gemm.per_tile.bind import RankGemm
from distgemm.gemm.per_tile.local import LocalRanks
from tests.gpu import fp8_worker, gemm_cases


def of_gemms() -> list[KernelSource]:
    """Those of test_gemm.py."""
    return gemm_cases.kernels([*gemm_cases.cases(), *gemm_cases.fp8_cases()], "90a")


class _Gpus:
    """A plugin of pytest: tests begin as if there were GPUs."""

    def __init__(self, patches: contextlib.ExitStack) -> None:
        self.patches = patches

    def pytest_collection(self) -> None:
        found = mock.patch.object(sys.modules["tests.conftest"], "_devices", return_value=(8, "8 found"))
        self.patches.enter_context(found)


def of_per_tile() -> list[KernelSource]:
    """Those of test_per_tile.py: its tests run until they make their ranks."""
    found: dict[KernelSource, None] = {}

    def noted(self: LocalRanks, gemm: RankGemm, *arguments: Any, others: Sequence[RankGemm] = (), **named: Any) -> None:
        found.update((each.traits.source(), None) for each in (gemm, *others))
        pytest.skip("its kernels are noted")

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--exhaustive", "all", "-x"]
    said = io.StringIO()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(LocalRanks, "__init__", noted))
        patches.enter_context(contextlib.redirect_stdout(said))
        failed = pytest.main([*options, "tests/gpu/test_per_tile.py"], plugins=[_Gpus(patches)])
    if failed:
        raise RuntimeError(f"test_per_tile.py ended with {failed!r} before it asked for kernels:\n{said.getvalue()}")
    return list(found)


KERNELS: dict[str, Callable[[], Iterable[KernelSource]]] = {
    "gemm": of_gemms,
    "fp8": fp8_worker.kernels,
    "per_tile": of_per_tile,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[*KERNELS, []], help="of which tests (all)")
    parser.add_argument("--list", action="store_true", help="print their names, and compile nothing")
    parser.add_argument("--jobs", type=int, help="compilers at a time (one for each core)")
    options = parser.parse_args()
    sources = list(dict.fromkeys(source for name in options.which or KERNELS for source in KERNELS[name]()))
    if options.list:
        print(*(source.name for source in sources), sep="\n")
    else:
        build(sources, jobs=options.jobs)


if __name__ == "__main__":
    main()
