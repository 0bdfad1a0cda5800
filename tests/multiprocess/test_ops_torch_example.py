"""examples/train_llama.py as a user runs it: the loss falls, and a resumed run computes what one run computes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "train_llama.py"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="a source archive has no examples/")


def run(folder: Path, *arguments: str) -> tuple[str, list[float]]:
    command = [sys.executable, str(PROGRAM), "--folder", str(folder), "--steps", "8", "--save-every", "4", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "losses.json").read_text())


def state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    dcp_to_torch_save(folder / "step-8", folder / "whole.pt")
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            found[prefix] = value

    collect("", torch.load(folder / "whole.pt"))
    return found


def refused(
    program: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run a program in this process, and look at what it says about its arguments."""
    monkeypatch.setattr(sys, "argv", [str(program), *arguments])
    monkeypatch.syspath_prepend(program.parent)
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(program), run_name="__main__")
    assert raised.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.sample(0)  # two runs of half a minute
def test_a_resumed_run_has_the_bits_of_one_run(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    printed, losses = run(once)
    assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]
    assert "8/8" in printed and "matmul_reduce_scatter: reduce_scatter_1d_pairwise_a" in printed
    if "loss.svg" in printed:
        assert b"<svg" in (once / "loss.svg").read_bytes()[:1000]
    again.mkdir()
    shutil.copytree(once / "step-4", again / "step-4")
    (again / "losses.json").write_text(json.dumps(losses[:4]))
    _, resumed = run(again, "--resume")
    assert resumed == losses
    one, two = state(once), state(again)
    assert one.keys() == two.keys() and any("exp_avg" in key for key in one) and any("wq" in key for key in one)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dp 0", "--dp is at least 1, got 0"),
        ("--save-every 0", "--save-every is at least 1, got 0"),
        ("--tp 8 --dp 1", "--tp divides the 4 heads of keys and values that the model has; got 8"),
        ("--batch 3", "--batch is a multiple of --dp"),
        ("--backend nccl --dp 100", "--backend nccl takes a GPU for each of 200 ranks, found "),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    refused(PROGRAM, ["--folder", str(folder), "--batch", "100", *arguments.split()], message, monkeypatch, capsys)
    assert not folder.exists()


LONG = ROOT / "examples" / "train_long_context.py"


def run_long(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LONG), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.sample(0)
@pytest.mark.parametrize("arguments", ["--ranks 2 --layers 2", "--ranks 4", "--ranks 3 --tokens 258 --kv-heads 4"])
def test_a_long_sequence_trains_as_in_one_process(arguments: str) -> None:
    """The program itself compares losses, gradients and parameters, and fails if they differ."""
    done = run_long("--tokens", "256", *arguments.split())
    assert done.returncode == 0, done.stderr
    assert re.search(r"largest difference of losses, gradients and parameters: \d\.\de-1[1-9]\n$", done.stdout), (
        done.stdout
    )
    assert "\nmatmul_all_to_all: " in done.stdout and "\nall_to_all_matmul: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 30", "--tokens is a multiple of --ranks"),
        ("--heads 2", "--heads is at least --ranks"),
        ("--steps 0", "--steps is at least 1, got 0"),
        ("--kv-heads 3", "kv_heads divides the number of heads, 4, got 3"),
        ("--backend mpi", "--backend is gloo or nccl, got mpi"),
    ],
)
def test_arguments_of_a_long_sequence(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(LONG, arguments.split(), message, monkeypatch, capsys)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("program", "checked"),
    [("layer", {"NCCL + cuBLAS": 1, "distgemm": 3}), ("end_to_end", {"training": 1, "decode": 1})],
)
def test_all_methods_of_a_benchmark_compute_the_same(program: str, checked: dict[str, int]) -> None:
    """Outputs and gradients of tiny layers on CPUs: by collectives, and by distgemm with several schedules."""
    path = ROOT / "benchmarks" / f"{program}.py"
    if not path.exists():
        pytest.skip("a source archive has no benchmarks/")
    command = [sys.executable, str(path), "--ranks", "2", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert {name: done.stdout.count(name) for name in checked} == checked


@pytest.mark.sample(0)  # many launches; the program of the README runs in test_torchrun.py
def test_the_programs_of_the_docs_run(tmp_path: Path) -> None:
    """The MLP prints the call and True, the training True. The plan in the docs is that of the example."""
    page = ROOT / "docs" / "pytorch.md"
    if not page.exists():
        pytest.skip("a source archive has no docs/")
    mlp, plan, training, chunks, record = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for program, printed in (
        (mlp, r"matmul_reduce_scatter: .*\nTrue\n|gather: .*\nTrue\n"),
        (training, r"True\n"),
        (chunks, r"True\n"),
    ):
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(printed, done.stdout), done.stdout
    shown = plan[plan.index("plan = {") : plan.index("}\n") + 1].removeprefix("plan = ")
    body = (ROOT / "examples" / "llama.py").read_text()
    assert shown.replace(" ", "") in body.replace(" ", "")
    compile(record, "record", "exec")
