"""The figure of a benchmark result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from distgemm.bench.figure import PAGE_WIDTH, draw_benchmark
from distgemm.bench.report import load

EXAMPLE = Path(__file__).with_name("test_bench_example.json")


def svg(result: dict[str, Any], path: Path) -> str:
    draw_benchmark(result, path)
    return path.read_text()


def test_a_panel_for_each_pattern_and_number_of_tokens(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = load(EXAMPLE)
    text = svg(result, tmp_path / "x.svg")
    patterns = {(row["pattern"], row["m"]) for row in result["rows"]}
    assert set(re.findall(r">(\S+), (\d+) tokens<", text)) == {(pattern, str(m)) for pattern, m in patterns}
    for words in ("70B fc2", "distgemm", "NCCL + cuBLAS", ">torch<", "efficiency, %", "4 x H200 of a fable"):
        assert words in text
    assert " alone</text>" not in text and "eager" not in text  # the fastest of a group of peers is one bar


def test_it_fits_a_page_and_can_be_read_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = load(EXAMPLE)
    rows = [row | {"model": model, "m": m} for row in result["rows"] for model in ("a", "b", "c") for m in (1, 2, 3, 4)]
    text = svg(result | {"rows": rows}, tmp_path / "x.svg")
    found = re.search(r'width="([\d.]+)pt"', text)
    assert found and float(found[1]) == 72 * PAGE_WIDTH <= 72 * 7.27  # A4 with margins of half an inch
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", text)]
    assert sizes and min(sizes) >= 7


def test_the_fastest_method_stands_for_distgemm_without_auto(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = load(EXAMPLE)
    for row in result["rows"]:
        row["methods"] = [each for each in row["methods"] if each["name"] != "distgemm auto"]
    assert "distgemm, auto or the fastest" in svg(result, tmp_path / "x.svg")


def test_other_files_and_empty_results_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_benchmark(load(EXAMPLE), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_benchmark(load(EXAMPLE) | {"rows": []}, tmp_path / "y.svg")
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        draw_benchmark(load(EXAMPLE), tmp_path / "y.pdf")
