"""The list of all kernels that layers can ask for, and what calls need, found without running them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode  # noqa: PLC2701  (torch has no public name)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import distgemm
from distgemm.gemm import select as gemm_select
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.per_tile.select import CONFIGS, FLAT, ONE_SHOT, ONE_SHOT_TALL, SPANNING, traits_of
from distgemm.gemm.target import compiling_for
from distgemm.measure.models import MODELS, Layer
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import Pattern
from distgemm.torch_ops import kernels, library
from distgemm.torch_ops.needs import Need, record_needs
from distgemm.torch_ops.warmup import needs_of
from distgemm.tune import gemm as gemm_tuning
from distgemm.tune.cache import look_up
from distgemm.tune.candidates import predicted, shortlist, specs_of
from distgemm.tune.kernels import sources_of
from distgemm.tune.select import fitting

HIDDEN = 64
H200 = "NVIDIA H200"
FIRST_STEP = Path(__file__).parents[2] / "benchmarks" / "first_step.py"


@pytest.fixture(scope="module")
def listed() -> set[KernelSource]:
    """The list in bfloat16. Two ranks stand for all: `test_other_calls` asks for those of more."""
    with pytest.MonkeyPatch.context() as patch, compiling_for("90a"):
        patch.setattr(kernels, "PACKED_RANKS", (2,))
        found = kernels.kernel_sources(["bfloat16"], "tiles")
    assert len(found) == len(set(found))
    return set(found)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """A group of as many ranks as the parameter says, without processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701  (torch has no public name)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [2, 4, 8], indirect=True)
@pytest.mark.parametrize("gpu", ["none", H200])
@pytest.mark.parametrize(
    ("layer", "tokens"),
    [
        (Layer("an MLP of another model", "ag+gemm", 13824, 5120), 4096),
        (Layer("few outputs", "ag+gemm", 2560, 5120), 72),
        (Layer("an MLP of another model", "gemm+rs", 5120, 13824), 24576),
    ],
)
@pytest.mark.sample(1)
def test_other_calls(group: Any, gpu: str, layer: Layer, tokens: int, listed: set[KernelSource]) -> None:
    """Whatever a shape selects and measures is in the list, also shapes for which it was not made."""
    needs = kernels.layer_needs(layer, layer.pattern, tokens, "bfloat16", group)
    assert {need.turned_b for need in needs} == {False, True}
    with compiling_for("90a", gpu):
        found = set(kernels.sources_for(needs, "measured"))
    assert found and found <= listed


def test_per_tile_kernels_are_listed(listed: set[KernelSource]) -> None:
    """Those of each candidate, with rows of B and, where a backward pass has it, with columns of B."""
    patterns: tuple[tuple[Pattern, bool], ...] = (("ag+gemm", True), ("gemm+rs", True), ("gemm+ar", False))
    wanted = {
        traits_of(config, pattern, turned_b=turned_b).source()
        for pattern, both in patterns
        for turned_b in {False, both}
        for config in (
            *CONFIGS[pattern],
            *SPANNING.get(pattern, ()),
            *(() if pattern == "ag+gemm" else (FLAT,)),
        )
    }
    wanted |= {traits_of(config, "gemm+ar", one_shot=True).source() for config in (*ONE_SHOT, *ONE_SHOT_TALL)}
    assert len(wanted) == 61 and wanted == {source for source in listed if source.file == "per_tile.cu"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_per_tile_kernels_that_are_predicted_are_listed(group: Any, listed: set[KernelSource]) -> None:
    found: dict[bool, set[KernelSource]] = {True: set(), False: set()}
    for layer in MODELS["llama-3-70b"].layers:
        for pattern in layer.patterns:
            with compiling_for("90a"):
                needs = kernels.layer_needs(layer, pattern, 2048, "bfloat16", group)
                for source in kernels.sources_for(needs, "selected"):
                    found[source.file == "per_tile.cu"].add(source)
    assert found[True] and found[True] | found[False] <= listed


def test_what_the_search_compiles(listed: set[KernelSource]) -> None:
    """The search asks for tiles of each GEMM of its candidates."""
    problem, asked = GemmProblem(4096, 5120, 13824), set()
    with compiling_for("90a"):
        provider = CutlassProvider()
        for config in shortlist(problem, "gemm+rs", 4):
            if config.method == "unfused" or config.execution.provider == "cublas":
                continue
            if config.execution.execution == "per_tile":
                continue
            for spec in specs_of(config.plan(problem, 4)):
                tiles = gemm_tuning.candidates(provider, spec, config.execution.gemm_streams)
                asked |= {kernel_source(spec, tile, provider.arch) for tile in tiles}
    assert len(asked) > 20 and asked <= listed


# --- calls as GPUs select them ----------------------------------------------------------------------------


@pytest.fixture
def on_h200(listed: set[KernelSource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection takes this machine for one with an H200, and all kernels of the list are there."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    monkeypatch.setattr(gemm_select, "gpu_name", lambda: H200)
    monkeypatch.setattr(gemm_select, "is_there", listed.__contains__)


def asked_for(needs: Iterable[Need]) -> set[KernelSource]:
    """The kernels that calls with schedule="auto" ask for on H200s if they measure nothing, as `tune.select` does."""
    found: set[KernelSource] = set()
    for need in needs:
        assert need.schedule == "auto" and need.chunks is None
        call = (need.problem, need.pattern, need.ranks)
        config = fitting(look_up(*call, H200, inf) or predicted(*call), *call)
        found |= {*sources_of(*call, [config], rank=need.rank, turned_b=need.turned_b)}
    return found


@pytest.mark.parametrize("group", [2, 4, 8], indirect=True)
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
@pytest.mark.parametrize("tokens", kernels.PACKED_TOKENS)
@pytest.mark.sample(2)
def test_the_first_step_of_models(
    group: Any, model: str, tokens: int, listed: set[KernelSource], on_h200: None
) -> None:
    """Forward and backward, on the first and the last rank."""
    layers = [(layer, pattern) for layer in MODELS[model].layers for pattern in layer.patterns]
    needs = [need for each in layers for need in kernels.layer_needs(*each, tokens, "bfloat16", group)]
    found = asked_for(replace(need, rank=rank) for need in dict.fromkeys(needs) for rank in (0, group.size() - 1))
    assert found <= listed, [source.name for source in found - listed]
    assert found or tokens <= 64  # so few take the unfused program, which needs none


@pytest.mark.parametrize("group", [2], indirect=True)
def test_the_first_step_of_the_benchmark(group: Any, listed: set[KernelSource], on_h200: None) -> None:
    """The model of benchmarks/first_step.py, traced with the styles that it has."""
    if not FIRST_STEP.is_file():
        pytest.skip("a source archive has no benchmarks/")
    spec = importlib.util.spec_from_file_location("first_step", FIRST_STEP)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    model = benchmark.Llama(replace(benchmark.SMALL, layers=1)).bfloat16()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallel = parallelize_module(model, mesh, benchmark.tensor_parallel_plan())
    needs = needs_of(parallel, torch.zeros(2048, 1, dtype=torch.long))
    assert {need.problem.dtype for need in needs} == {"bfloat16"}
    assert {need.pattern for need in needs} == {"ag+gemm", "gemm+rs"}
    assert {need.turned_b for need in needs} == {False, True}
    found = asked_for(needs)
    assert found and found <= listed, [source.name for source in found - listed]


def test_files_and_terms(listed: set[KernelSource]) -> None:
    files = [source.file for source in listed]
    assert files.count("flags.cu") == files.count("sum.cu") == 1
    macros = [dict(source.macros) for source in listed if source.file == "gemm.cu"]
    assert {each["DG_B_ROW"] for each in macros} == {"0", "1"}
    assert all(each["DG_A_ROW"] == "1" for each in macros)


def test_not_beside_a_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="without a process group"):
            kernels.kernel_sources(["bfloat16"], "selected")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("group", [4], indirect=True)
def test_what_the_projections_around_an_all_to_all_need(group: Any) -> None:
    """Whole weights, forward; and the other pattern by the same weight in a backward pass."""
    qkv, out, *others = MODELS["llama-3-8b"].layers
    for layer, pattern, back in ((qkv, "gemm+a2a", "a2a+gemm"), (out, "a2a+gemm", "gemm+a2a")):
        assert layer.all_to_alls == (pattern,)
        forward, *backward = kernels.layer_needs(layer, pattern, 2048, "bfloat16", group)
        assert (forward.pattern, forward.problem) == (pattern, GemmProblem(2048, layer.n, layer.k))
        assert not forward.turned_b
        (gradient,) = [need for need in backward if need.pattern == back]
        assert gradient.problem == GemmProblem(2048, layer.k, layer.n) and gradient.turned_b
    assert [layer.all_to_alls for layer in others] == [(), ()]


@pytest.mark.parametrize("group", [4], indirect=True)
@pytest.mark.parametrize(
    ("layer", "pattern", "tokens"),
    [
        (Layer("", "ag+gemm", 66, 64), "ag+gemm", 8),
        (Layer("", "gemm+rs", 64, 64), "gemm+rs", 6),
        (Layer("", "ag+gemm", 66, 64), "gemm+a2a", 8),
        (Layer("", "gemm+rs", 64, 66), "a2a+gemm", 8),
        (Layer("", "gemm+rs", 64, 64), "a2a+gemm", 6),
    ],
)
def test_layers_that_ranks_cannot_share(group: Any, layer: Layer, pattern: Pattern, tokens: int) -> None:
    with pytest.raises(ValueError, match="4 ranks cannot share"):
        kernels.layer_needs(layer, pattern, tokens, "bfloat16", group)


# --- needs ----------------------------------------------------------------------------------------------


def step(pattern: str, biased: bool, keep: bool) -> None:
    """A forward and a backward pass of an op."""
    a, b = (torch.ones(rows, HIDDEN, requires_grad=True) for rows in (16, 32))
    bias = torch.ones(32, requires_grad=True) if biased else None
    if pattern == "ag+gemm":
        d = distgemm.all_gather_matmul(a, b, group=dist.group.WORLD, bias=bias, keep_gathered=keep)
    elif pattern == "gemm+rs":
        d = distgemm.matmul_reduce_scatter(a, b, group=dist.group.WORLD, bias=bias)
    elif pattern == "gemm+ar":
        d = distgemm.matmul_all_reduce(a, b, group=dist.group.WORLD, bias=bias)
    elif pattern == "gemm+a2a":
        d = distgemm.matmul_all_to_all(a, b, group=dist.group.WORLD, bias=bias)
    else:
        d = distgemm.all_to_all_matmul(a, b, group=dist.group.WORLD, bias=bias)
    assert d.shape == (16, 32)
    d.sum().backward()
    assert a.grad is not None and a.grad.shape == a.shape and b.grad is not None and b.grad.shape == b.shape


@pytest.mark.parametrize("pattern", ["ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a", "a2a+gemm"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_needs_are_what_runs(pattern: str, biased: bool, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded calls are those that a pass makes, forward and backward, and recording runs none."""
    asked, prepare = {}, library.prepare

    def noted(pattern: Any, problem: GemmProblem, group: str, at: Any, *rest: Any, **more: Any) -> Any:
        schedule, chunks, _, *majors = rest  # whether there is a bias changes nothing
        asked[Need(pattern, problem, 1, schedule, chunks, *majors, at.type)] = None
        return prepare(pattern, problem, group, at, *rest, **more)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record_needs() as found, distgemm.record_calls() as ran:
            with FakeTensorMode():
                step(pattern, biased, keep)
            with record_needs() as inner:  # a recording inside of another one
                pass
        assert not ran and not inner
        monkeypatch.setattr(library, "prepare", noted)
        with distgemm.record_calls() as ran:
            step(pattern, biased, keep)
        assert list(found) == list(asked)
        assert len(ran) == {"ag+gemm": 2 if keep else 3, "gemm+ar": 1}.get(pattern, 2)
    finally:
        dist.destroy_process_group()
