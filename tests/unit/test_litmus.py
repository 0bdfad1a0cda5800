"""The litmus test without a GPU: its source compiles for the structs of its runner, and its verdict is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distgemm.gemm.nvcc import find_nvcc
from tests.gpu.litmus.__main__ import CONTROLS, OMISSIONS, PROTOCOL, Row, Variant, compiled, opened, shape_on, status_of


@pytest.mark.sample(0)  # a compiler runs for some seconds
@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")
def test_the_source_compiles_for_the_runner(tmp_path: Path) -> None:
    opened(compiled(tmp_path))


def rows(variants: list[Variant]) -> list[Row]:
    return [
        Row(str(variant), 2048, 10, int(variant.control), int(variant.control), 0, 2, 0, 1.0, 10, variant.control)
        for variant in variants
    ]


def test_the_verdict_names_what_is_wrong() -> None:
    variants = [*PROTOCOL, *CONTROLS, *OMISSIONS]
    right = rows(variants)
    assert status_of(right, variants) == 0
    for changed, status in (
        ({0: replace(right[0], stale_rounds=1)}, 1),
        ({1: replace(right[1], newer_words=1)}, 1),
        ({2: replace(right[2], rounds=9)}, 2),
        ({2: replace(right[2], timeouts=1)}, 2),
        ({len(PROTOCOL): replace(right[len(PROTOCOL)], stale_rounds=0)}, 3),
        ({len(right) - 1: replace(right[-1], stale_rounds=5)}, 0),
    ):
        assert status_of([changed.get(number, row) for number, row in enumerate(right)], variants) == status
    assert status_of(right[:-1], variants) == 2


def test_blocks_of_both_ranks_are_resident_at_once() -> None:
    for ranks_on_gpu in (1, 2):
        shape = shape_on(132, ranks_on_gpu, 8192, 16)
        assert ranks_on_gpu * (shape.blocks + shape.further_blocks) <= 132
    for size, blocks in ((2048, 65), (2048, 0), (100, 16), (1 << 17, 16)):
        with pytest.raises(ValueError, match=r"got|wanted"):
            shape_on(132, 2, size, blocks)
