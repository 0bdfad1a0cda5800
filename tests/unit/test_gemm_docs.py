"""The programs and commands of docs/gemm.md run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import distgemm.gemm
from tests.unit.test_cli_build import invoke
from tests.unit.test_docs import DOCS, programs, run
from tests.unit.test_gemm_kernel_cache import Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a source archive has no docs/")


def page() -> str:
    return (DOCS / "gemm.md").read_text() if DOCS.is_dir() else ""


def shell() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page(), re.S)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words[0] == "distgemm"]


def test_what_would_run_can_be_asked_without_a_gpu() -> None:
    (program,) = [text for text in programs("gemm.md") if "cuda" not in text]
    said = re.findall(r"print\(.*\)  # (.*)", program)
    printed = run(program).splitlines()
    assert len(said) == len(printed) == 4
    for comment, line in zip(said, printed, strict=True):
        assert line.startswith(comment.removesuffix("...")) if comment.endswith("...") else line == comment


@pytest.mark.gpu(1)
def test_the_example_for_a_gpu() -> None:
    (program,) = [text for text in programs("gemm.md") if "cuda" in text]
    run(program)


def test_commands_are_those_of_the_page() -> None:
    commands = ["build"] + ["warmup"] * 2 + ["build"] * 4 + ["tune-gemm"] * 3
    assert [words[1] for words in shell()] == commands


# The listing of all layers' kernels takes minutes; test_kernels_listed.py has it.
BUILDS = [words for words in shell() if words[1] in ("build", "warmup") and "--pack" not in words and "8" not in words]


@pytest.mark.parametrize("words", BUILDS, ids=" ".join)
def test_builds(nvcc: Nvcc, words: list[str]) -> None:
    nvcc.set(does='echo >"$2"')
    done = invoke(*words[1:])
    assert done.exit_code == 0, done.stderr
    assert bool(nvcc.calls) is ("--list" not in words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [words for words in shell() if words[1] == "tune-gemm"], ids=" ".join)
def test_tunings(words: list[str]) -> None:
    """All but the GPU is there."""
    done = invoke(*words[1:])
    assert (done.exit_code, done.stderr[:35]) == (2, "error: tune-gemm measures on a GPU,")


def test_variables_are_those_of_the_code() -> None:
    sources = Path(distgemm.gemm.__file__).parent.glob("*.py")
    used = {name for path in sources for name in re.findall(r'"((?:DISTGEMM|CUDA|XDG)_\w+)"', path.read_text())}
    assert used == set(re.findall(r"\b((?:DISTGEMM|CUDA|XDG)_\w+)\b", page()))


def test_files_that_are_named_are_there() -> None:
    for name in re.findall(r"`((?:distgemm|tests)/[\w/]+\.(?:py|cu))`", page()):
        assert (DOCS.parent / name).is_file(), name
