"""The words that docs/glossary.md has replaced stay replaced: in code, docs, data and file names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    "site",
    "build",
    "dist",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
}
EXEMPT = {
    "CHANGELOG.md",  # says what was renamed
    "docs/glossary.md",  # the same
    "tests/unit/test_vocabulary.py",
    "tests/equivalence/digests.py",  # runs the code before the change, too
    "tests/equivalence/renames.json",
}
SUFFIXES = {".py", ".md", ".cu", ".cuh", ".json", ".txt", ".toml", ".yml", ".yaml", ".cff", ".css", ".svg", ""}

PATTERNS = {
    "pattern": r"\bdefault_of\b|\blist_families\b|\bfamilies\b|--ops[= ](ag|gemm)\+"
    r"|\b(op|kind|family)\"?[:=] ?\"(ag|gemm)\+",
    "kernel_schedule": r"(?<!kernel_)\bschedule=\"(cooperative|pingpong|plain)\"",
    "final_add": r"\blast=[\"']?(gemm|sum)\b|\"last\": \"(gemm|sum)\"|\bfold_last\b|\bfold=|\.fold\b",
    "chunk_mode": r"\balong=[\"']?[mn]\b|\"along\": \"",
    "send_slots": r"\bresults=\d|\"results\": \d",
    "gemm_streams": r"\bbranches=|--branches\b|\"branches\"|\b[12] branch(es)?\b",
    "merge_copies": r"\bmerge=(True|False|true|false)\b|\"merge\":|\bmerged chunks\b|\bchunks merged\b",
    "execution and wait_by": r"\bwaits=[\"']?(memory|kernel|gemm)\b|\"waits\":|\bwaits by gemm\b|\bgated\b|\bGated"
    r"|_gated\b|one kernel for all GEMMs",
    "flags": r"\bwords\.cuh?\b|\bword_source\b|\bwords_of\b|\bWordLaunch\b|\bbind_words\b|\bWords\b"
    r"|_word\b|\bWORD\b",
    "double-buffered workspace": r"\.halves\b|\bnext_half\b|\.turn\(|\bclass Half\b|\bhalves of the workspace\b",
    "link pacing": r"turns on the link|\bPace\b",
    "final copies": r"\bdeliver(s|ed|y|ies|ing)?\b|_delivered\b|DELIVERIES",
    "tuned configuration": r"\bChoices?\b|\bchoices_file\b|(?<!rng)\.choice\b|\bchoose_schedule\b|\btune\.choose\b"
    r"|\bmeasured choices?\b|\brecorded choices?\b|\bshipped choices?\b|distgemm\.texts",
    "candidates and search": r"tune[./](predicting|measuring|choosing)\b|tune import (predicting|measuring|choosing)",
    "ExecutionConfig": r"\bExecution\(",
    "one package per subject": r"distgemm[./]benchmarking|\b(bench|trace|tune)_command\.py"
    r"|(?<!dist)(?<!tune\.)gemm[./]tune\b",
    "torch_ops": r"torch_ops[./](ops|functions|calls|auto)\b",
    "validate": r"\bcheck_form\b|distgemm[./]form\b",
    "constants": r"\b(PATIENCE|CLEARLY|ALIKE|WITHIN|FEW_ROWS|WITHIN_KERNELS|WITHIN_WAY)\b",
}
"""For each row of the glossary's table of renames, named by the new word, what must not be found."""


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(each for each in folders if each not in SKIPPED_FOLDERS)  # os.walk goes into these
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
                yield path


@cache
def lines() -> list[tuple[str, str]]:
    """Where a line stands, and the line, of every file that is not exempt; file names are lines, too."""
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name in EXEMPT or any(part.endswith(".egg-info") for part in path.parts):
            continue
        found.append((name, name))
        found += [(f"{name}:{number}", line) for number, line in enumerate(path.read_text().splitlines(), 1)]
    return found


@pytest.mark.parametrize("row", PATTERNS)
def test_a_replaced_word_is_not_used(row: str) -> None:
    pattern = re.compile(PATTERNS[row])
    found = [f"{where}: {line.strip()[:120]}" for where, line in lines() if pattern.search(line)]
    assert not found, f"{len(found)} lines, such as:\n" + "\n".join(found[:30])


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("pattern", '@register_schedule(default_of="ag+gemm")'),
        ("pattern", "distgemm tune --ops ag+gemm"),
        ("kernel_schedule", 'GemmConfig((64, 128, 64), schedule="pingpong")'),
        ("final_add", 'make_plan(problem, name, 4, last="gemm")'),
        ("chunk_mode", "reduce_scatter_1d_pairwise_a chunks=4 along=n"),
        ("send_slots", "make_plan(problem, name, 4, results=4)"),
        ("gemm_streams", "GEMMs by cublas, 2 branches"),
        ("merge_copies", "compile(plan, merge=True)"),
        ("execution and wait_by", "ag+gemm chunks=2 waits=gemm"),
        ("flags", "what is compiled from words.cu"),
        ("double-buffered workspace", "workspace.turn()"),
        ("link pacing", "stores take turns on the link"),
        ("final copies", "deliveries of an all-reduce"),
        ("tuned configuration", "exe.choice"),
        ("candidates and search", "from distgemm.tune import predicting"),
        ("ExecutionConfig", 'Execution(provider="cublas")'),
        ("one package per subject", "distgemm.benchmarking.run"),
        ("torch_ops", "distgemm.torch_ops.calls"),
        ("validate", "check_form(plan)"),
        ("constants", "PATIENCE = 60.0"),
    ],
)
def test_a_replaced_word_would_be_found(row: str, line: str) -> None:
    assert re.search(PATTERNS[row], line)


@pytest.mark.parametrize(
    "line",
    [
        "Each op names rank, iteration and tile.",
        "The rows along k are contiguous.",
        "The last GEMM adds the partial sums.",
        'table.add_column("what it does", overflow="fold")',
        "The results of both runs are equal.",
        "A rank waits for the flag of its peer.",
        "The copies are made by copy engines.",
        "half of every tile clockwise",
    ],
)
def test_ordinary_english_is_not_found(line: str) -> None:
    assert not [row for row, pattern in PATTERNS.items() if re.search(pattern, line)]
