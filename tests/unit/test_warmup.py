"""The kernels of a model's layers are compiled before its first step, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701  (torch has no public name)
from typer.testing import CliRunner

import distgemm
from distgemm.cli import main as cli
from distgemm.gemm import nvcc as compiler
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import CompilerNotFoundError, is_there
from distgemm.gemm.target import compiling_for
from distgemm.measure.models import Layer
from distgemm.system import cores
from distgemm.torch_ops import library, warmup
from distgemm.torch_ops.kernels import layer_needs, sources_for
from distgemm.torch_ops.needs import Need
from distgemm.torch_ops.warmup import needs_of
from tests.unit.test_gemm_kernel_cache import AT_ONCE, Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture
HIDDEN, INTERMEDIATE, TOKENS = 64, 128, 16


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, of which this process is the second one; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A norm, and two linears with something between them."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), up, down

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": x + scale * self.down(torch.relu(self.up(self.norm(x))))}


def layers(mesh: Any) -> Block:
    up = distgemm.nn.ColumnParallelLinear(HIDDEN, INTERMEDIATE, group=mesh)
    block = Block(up, distgemm.nn.RowParallelLinear(INTERMEDIATE, HIDDEN, group=mesh, bias=False))
    return parallelize_module(block, mesh, {"norm": distgemm.nn.SequenceParallel(sequence_dim=0)})


def styles(mesh: Any) -> Block:
    block = Block(nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN, bias=False))
    plan = {
        "norm": distgemm.nn.SequenceParallel(sequence_dim=0),
        "up": distgemm.nn.ColwiseParallel(sequence_dim=0),
        "down": distgemm.nn.RowwiseParallel(sequence_dim=0),
    }
    return parallelize_module(block, mesh, plan)


def need(pattern: Any, n: int, k: int, turned_b: bool = False) -> Need:
    problem = distgemm.GemmProblem(TOKENS, n, k, dtype="float32")
    return Need(pattern, problem, 2, "auto", None, turned_b, "cpu", 1)


class Attention(nn.Module):
    """The projections of attention with an all-to-all before it and behind it: one head of keys for both ranks."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.q, self.k, self.out = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, 16), nn.Linear(64, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, biases = [self.q.weight, self.k.weight], [self.q.bias, self.k.bias]
        q, k = distgemm.matmul_all_to_all(x, weights, group=self.mesh, bias=biases, copies=[1, 2])
        return distgemm.all_to_all_matmul(q * k.repeat(1, 2), self.out.weight, group=self.mesh, bias=self.out.bias)


def test_kernels_of_an_all_to_all(mesh: Any) -> None:
    """A call with copies takes the rule also on GPUs, so it needs the kernels of one plan. Others are measured."""
    needs = needs_of(Attention(mesh), torch.empty(TOKENS // 2, HIDDEN, requires_grad=True))
    assert [each.pattern for each in needs] == ["gemm+a2a"] * 2 + ["a2a+gemm", "gemm+a2a"] + ["a2a+gemm"] * 2
    assert [each.problem.n_per_rank for each in needs[:2]] == [None, (16, 16)]
    assert needs[4].problem.k == 32  # the gradients of both copies
    with compiling_for("90a", "NVIDIA H200"):
        on_gpus = [replace(each, device="cuda", problem=replace(each.problem, dtype="bfloat16")) for each in needs]
        found = [{source.file for source in sources_for([each], "measured")} for each in on_gpus[:3]]
    measured = {"gemm.cu", "sum.cu", "per_tile.cu"}
    assert found[1] == {"gemm.cu", "sum.cu"} and found[0] >= measured and found[2] >= {"gemm.cu", "per_tile.cu"}


FORWARD = [need("ag+gemm", INTERMEDIATE, HIDDEN), need("gemm+rs", HIDDEN, INTERMEDIATE)]
BACKWARD = [
    need("ag+gemm", INTERMEDIATE, HIDDEN, turned_b=True),  # of dY, and by the weight of down
    need("gemm+rs", HIDDEN, INTERMEDIATE, turned_b=True),
    need("ag+gemm", 2 * library.GATHER_ROWS, HIDDEN),  # the input again, for the gradient of the weight of up
]


@pytest.mark.parametrize("make", [layers, styles])
def test_the_calls_of_a_step(make: Any, mesh: Any) -> None:
    """Forward and backward, by tracing: parameters, their gradients and torch's generator stay as they are."""
    model = make(mesh)
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    drawn = torch.get_rng_state()
    x = torch.full((TOKENS // 2, HIDDEN), torch.nan)
    with distgemm.record_calls() as ran:
        assert needs_of(model, x, scale=2.0) == [*FORWARD, *BACKWARD]
        assert needs_of(model, x, backward=False) == FORWARD
        assert needs_of(model.requires_grad_(False), x) == FORWARD
    assert not ran and torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, each in model.state_dict().items():
        local, kept = (t.to_local() if hasattr(t, "to_local") else t for t in (each, before[name]))
        # As bits: nothing is sent, so parts of styles have not been initialized.
        assert torch.equal(local.view(torch.int32), kept.view(torch.int32))


def test_cpus_need_no_kernels(mesh: Any, nvcc: Nvcc) -> None:
    x = torch.ones(TOKENS // 2, HIDDEN)
    assert distgemm.warmup(layers(mesh), x) == [*FORWARD, *BACKWARD]
    assert not nvcc.calls and not list(sources_for(FORWARD, "selected"))
    with pytest.raises(ValueError, match=r"model is an nn\.Module"):
        distgemm.warmup(lambda: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backward is"):
        distgemm.warmup(layers(mesh), x, backward=1)  # type: ignore[arg-type]


def bfloat16() -> list[Need]:
    """The calls of layers of a usual size, as on GPUs. Torch without CUDA cannot trace a backward pass there."""
    group = dist.group.WORLD
    assert group is not None
    calls: list[Need] = []
    for layer in (Layer("up", "ag+gemm", 14336, 4096), Layer("down", "gemm+rs", 4096, 14336)):
        calls += layer_needs(layer, layer.pattern, 4096, "bfloat16", group)
    return [replace(call, device="cuda") for call in dict.fromkeys(calls)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("tuning", "scope"), [("0", "selected"), ("1", "measured")])
def test_all_kernels_at_once(tuning: str, scope: Any, mesh: Any, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that calls measure, too, unless that is off. The best ones, whatever is there."""
    nvcc.set(AT_ONCE)
    monkeypatch.setenv("DISTGEMM_TUNE", tuning)
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    builds: list[Any] = []

    def build(sources: Any, jobs: int, progress: bool) -> None:
        builds.append((list(sources), jobs, progress))
        compiler.build(builds[-1][0], jobs, progress)

    monkeypatch.setattr(warmup, "build", build)
    monkeypatch.setattr(warmup, "needs_of", lambda *given, **more: bfloat16())
    needs = distgemm.warmup(nn.Identity())
    assert len(needs) == 5 and {each.turned_b for each in needs} == {False, True}
    ((sources, jobs, progress),) = builds
    with compiling_for("90a"):
        assert set(sources) == set(sources_for(needs, scope))
        assert sources == list(sources_for([*needs[2:], *needs[:2]], scope))  # rank 1 of 2 begins in the middle
    assert jobs == max(1, cores() // 2) and not progress
    assert len(nvcc.calls) == len(set(sources)) == len(sources) and all(map(is_there, sources))
    distgemm.warmup(nn.Identity())
    assert len(nvcc.calls) == len(sources)


def test_a_named_schedule(mesh: Any) -> None:
    """Its kernels are those of its plan, as a call compiles it, whatever "auto" would select."""
    problem = distgemm.GemmProblem(4096, 8192, 4096)
    name, tile = "ag+gemm chunks=2", "64x256x64_1x1_pingpong"
    with compiling_for("90a"):
        pinned = Need("ag+gemm", problem, 2, f"{name} provider=cutlass config={tile}")
        assert [tile in source.name for source in sources_for([pinned], "measured")] == [True]
        assert (
            list(sources_for([Need("ag+gemm", problem, 2, "ag+gemm", 2)], "selected"))
            == list(sources_for([Need("ag+gemm", problem, 2, name)], "tiles"))[:1]
        )
        assert list(sources_for([Need("ag+gemm", problem, 2, "unfused")], "tiles")) == []
        with pytest.raises(ValueError, match="both set the number of chunks"):
            list(sources_for([Need("ag+gemm", problem, 2, name, 4)], "selected"))


# --- the command ----------------------------------------------------------------------------------------


def invoke(*arguments: str, status: int = 0) -> Any:
    """The command on a machine without a GPU, or with one."""
    done = CliRunner().invoke(cli.app, ["warmup", *arguments], env={"DISTGEMM_TUNE": "", "COLUMNS": "200"})
    assert done.exit_code == status, done.output
    return done


def test_the_command(nvcc: Nvcc) -> None:
    nvcc.set(AT_ONCE)
    chosen = ["--model", "llama-3-8b", "--layer", "fc1", "--layer", "fc2", "--m", "2048", "--tp", "2"]
    done = invoke(*chosen, "--scope", "selected")
    assert "--arch" not in done.stderr  # it has no such option
    text = done.stdout
    count = len(nvcc.calls)
    assert text == f"sm_90a: {count} compiled, 0 there already\n" and count > 2
    assert invoke(*chosen, "--scope", "selected").stdout == f"sm_90a: 0 compiled, {count} there already\n"
    assert "there already" in invoke(*chosen).stdout and len(nvcc.calls) > count  # what "auto" measures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dtype tfloat32", "dtype is one of"),
        ("--scope all", "--scope: one of selected, measured, tiles"),
        ("--tp 3", "3 ranks cannot share"),
        ("--m 8191", "8 ranks cannot share 8191 tokens"),
    ],
)
def test_what_the_command_refuses(arguments: str, message: str, nvcc: Nvcc) -> None:
    assert message in invoke(*arguments.split(), status=2).stderr and not nvcc.calls


def test_without_a_compiler(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("distgemm.gemm.nvcc.find_nvcc", lambda: None)
    text = invoke("--layer", "fc1", "--tp", "2", "--scope", "selected", status=1).stderr
    assert "nvcc was not found" in text and CompilerNotFoundError.__name__ not in text
