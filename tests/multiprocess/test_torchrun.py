"""Ranks that torchrun starts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distgemm.runtime.launch import Backend

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("torchrun_main.py")
HOSTS_PROGRAM = Path(__file__).with_name("torchrun_hosts.py")


def torchrun(ranks: int, backend: Backend) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, str(PROGRAM), backend], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_started_by_torchrun_compute_the_product(ranks: int) -> None:
    assert torchrun(ranks, "gloo").split() == ["right"]


def on_two_hosts(program: Path) -> str:
    """What a program prints that two commands start, both on this machine: a node is what one command starts.

    Where a rank fails, its command ends, but the other one waits for it for 300 s: both are ended here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=hosts", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        started = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) for _ in range(2)
        ]
        end = time.monotonic() + 120
        while (codes := [process.poll() for process in started]) != [0, 0]:
            if any(codes) or time.monotonic() > end:
                break
            time.sleep(0.1)
        for process in started:
            process.terminate()  # it ends its ranks
        for process in started:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        printed = output.read()
    assert codes == [0, 0], printed
    return printed


@pytest.mark.sample(0)  # many launches
def test_two_commands_start_two_hosts() -> None:
    # Ranks share a file, so a line may begin before another one's end.
    found = on_two_hosts(HOSTS_PROGRAM)
    lines = sorted(re.findall(r"\d:\d:right:\d", found))
    assert lines == [f"{host}:{rank}:right:1" for host in range(2) for rank in range(2)]
    assert re.findall(r"left:(\d)", found) == ["0"] * 4


@pytest.mark.sample(0)  # many launches
def test_the_program_of_layers_across_hosts_runs(tmp_path: Path) -> None:
    """Each rank says what its last call was: a nested schedule, over gloo where there is no GPU."""
    text = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    (program,) = (each for each in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "distgemm.nn" in each)
    (tmp_path / "layers_hosts.py").write_text(program)
    found = on_two_hosts(tmp_path / "layers_hosts.py")
    assert found.count("all_gather_matmul: tensor_parallel_2d_nested, across=all_gather_1d_tiling_cd_rotating_a") == 4


@pytest.mark.gpu(2)
def test_ranks_started_by_torchrun_compute_the_product_on_gpus() -> None:
    assert torchrun(2, "nccl").split() == ["right"]


@pytest.mark.sample(0)  # inductor compiles it for 20 s
def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    """The report of each rank has the three products, and nothing that was not fused."""
    (program,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "mlp.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mlp.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("computed by distgemm: 3\n") == 2, done.stdout
    assert done.stdout.count("not fused, in compiled graphs: 0\n") == 2, done.stdout
