"""Configurations whose kernels are compiled or packed are preferred to those that are a little faster by prediction."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import distgemm
from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec, select
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource, build
from distgemm.gemm.select import CACHE, NEAR_BEST, estimate, gpu_name, key_of
from distgemm.gemm.target import compiling_for
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.cuda.binding import Binder
from distgemm.runtime.cuda.executable import agree_on_kernels, describe_kernels
from distgemm.runtime.executable import ExecutionConfig
from distgemm.tune import UNFUSED, search
from tests.forked import results
from tests.unit.test_gemm_kernel_cache import AT_ONCE, Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture
HOPPER = CutlassProvider("90a")


def spec(m: int, n: int, k: int) -> GemmSpec:
    return GemmSpec(MatrixSpec("bfloat16", m, k), MatrixSpec("bfloat16", n, k), MatrixSpec("bfloat16", m, n))


SHAPES = [spec(*shape) for shape in ((8192, 8192, 8192), (4096, 7168, 8192), (1024, 28672, 8192))]


@pytest.fixture(autouse=True)
def nothing_recorded(nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no measured configurations, and no group that has agreed."""
    nvcc.set(AT_ONCE)
    monkeypatch.setattr(CACHE, "shipped", tmp_path / "shipped")
    monkeypatch.setattr(select, "_AGREED", None)
    monkeypatch.setattr(CutlassProvider, "arch", "90a")


def source_of(product: GemmSpec, config: GemmConfig) -> KernelSource:
    return kernel_source(product, config, "90a")


def selected(product: GemmSpec) -> KernelSource:
    (found,) = HOPPER.sources([product])
    return found


@pytest.mark.parametrize("product", SHAPES)
def test_what_is_there_is_taken_within_three_percent(product: GemmSpec) -> None:
    configs = HOPPER.configs(product)
    times = [estimate(product, config) / estimate(product, configs[0]) for config in configs]
    near = [config for config, time in zip(configs, times, strict=True) if time <= 1.03]
    best, far = source_of(product, near[0]), source_of(product, configs[len(near)])
    assert 1 < len(near) < len(configs) and NEAR_BEST == 1.03
    assert HOPPER.near_best(product) == near
    assert selected(product) == best
    build([far], progress=False)
    assert selected(product) == best  # it is there, and too slow
    for config in near[:0:-1]:  # of those that are there, the best
        build([source_of(product, config)], progress=False)
        assert selected(product) == source_of(product, config)
        with compiling_for("90a"):
            assert selected(product) == best
    build([best], progress=False)
    assert selected(product) == best


def test_a_measured_configuration_is_taken_though_another_one_is_there() -> None:
    product = SHAPES[0]
    near = HOPPER.near_best(product)
    build([source_of(product, near[0])], progress=False)
    CACHE.record(gpu_name(), {key_of(product): {"config": "64x128x64_1x1_pingpong"}})
    assert [str(config) for config in HOPPER.near_best(product)] == ["64x128x64_1x1_pingpong"]
    assert "64x128x64_1x1_pingpong" in selected(product).name


def test_a_damaged_library_is_not_there(nvcc: Nvcc) -> None:
    product = SHAPES[0]
    near = HOPPER.near_best(product)
    (path,) = build([source_of(product, near[1])], progress=False)
    assert selected(product) != source_of(product, near[0])
    path.write_bytes(b"")
    assert selected(product) == source_of(product, near[0])


def test_without_a_compiler_the_selection_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that an error then names."""
    monkeypatch.setattr("distgemm.gemm.nvcc.find_nvcc", lambda: None)
    assert selected(SHAPES[0]) == source_of(SHAPES[0], HOPPER.configs(SHAPES[0])[0])


# --- ranks ----------------------------------------------------------------------------------------------


def choose(folder: str) -> tuple[str, str, list[str]]:
    """What a rank would select by its own cache, and what it selects once the ranks agree. Each has another cache."""
    rank = dist.get_rank()
    os.environ["DISTGEMM_CACHE_DIR"] = f"{folder}/{rank}"
    os.environ["DISTGEMM_NVCC"] = f"{folder}/nvcc"
    product, group = SHAPES[1], dist.group.WORLD
    assert group is not None
    near = [source_of(product, config) for config in HOPPER.near_best(product)]
    build([near[1 + rank], source_of(product, GemmConfig.parse("64x128x64_1x1_pingpong"))], progress=False)
    alone = select.preferred(near).name
    # Rank 1 has failed before and offers nothing; it takes part all the same.
    agree_on_kernels([near] if rank != 1 else [], group, torch.device("cpu"))
    together = select.preferred(near).name
    build([near[0]], progress=False)  # what is compiled later changes nothing
    assert select.preferred(near).name == together
    return alone, together, [source.name for source in near]


def test_all_ranks_select_what_the_first_one_has(nvcc: Nvcc, tmp_path: Path) -> None:
    found = results(2, choose, str(tmp_path))
    near = found[0][2]
    assert [alone for alone, _, _ in found] == [near[1], near[2]]
    assert [together for _, together, _ in found] == [near[1], near[1]]


def fail_to_choose(folder: str) -> tuple[str, bool]:
    """What a rank gets to know where the first one cannot say what it has, and whether it takes it to have nothing."""
    os.environ["DISTGEMM_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    if dist.get_rank() == 0:
        os.environ["DISTGEMM_PACK"] = "perhaps"
    near = [source_of(SHAPES[1], config) for config in HOPPER.near_best(SHAPES[1])]
    assert dist.group.WORLD is not None
    found = agree_on_kernels([near], dist.group.WORLD, torch.device("cpu"))
    return str(found), select._AGREED is not None and not select._AGREED


def test_all_ranks_go_on_where_the_first_one_cannot_say_what_it_has(tmp_path: Path) -> None:
    """It raises its error where all ranks learn of it. The others would wait for what it has."""
    first, second = results(2, fail_to_choose, str(tmp_path))
    assert "DISTGEMM_PACK is 1, true, yes or on" in first[0] and second[0] == "None"
    assert first[1] and second[1]


def look_for_kernels() -> str:
    """What a rank says where the first one cannot look for the kernels of candidates."""
    operation: Any = type("Operation", (), {"device": torch.device("cpu"), "group": dist.group.WORLD})
    operation.problem = operation.pattern = None
    there = mock.Mock(side_effect=[OSError("no folder"), True][dist.get_rank() :])
    pretended = {"has_kernels": lambda device: True, "sources_of": lambda *_, **__: ["a kernel"], "is_there": there}
    with mock.patch.multiple(search, **pretended), pytest.raises(RuntimeError) as raised:
        search.lacking_kernels(operation, [UNFUSED])
    return str(raised.value)


def test_all_ranks_learn_that_one_cannot_look_for_kernels() -> None:
    first, second = results(2, look_for_kernels)
    assert first == second and "rank 0 " in first and "no folder" in first


def test_one_rank_asks_nobody() -> None:
    group: Any = type("Group", (), {"size": lambda self: 1})()
    assert agree_on_kernels([], group, torch.device("cpu")) is None
    assert select._AGREED is None


# --- what calls say -------------------------------------------------------------------------------------


def test_the_choices_of_a_plan_are_those_of_its_sources() -> None:
    """Kernels of other choices come into the sources as soon as they are there."""
    plan = distgemm.make_plan(GemmProblem(8192, 8192, 4096), "gemm+rs", 2, chunks=2, sync="barrier")
    binder = Binder(plan, 0, torch.device("cuda", 0), ExecutionConfig(provider="cutlass"))
    choices = binder.choices(turned_b=True)
    multiply = {source for source in binder.sources(turned_b=True) if source.file == "gemm.cu"}
    assert multiply == {choice[0] for choice in choices} and any(len(choice) > 1 for choice in choices)
    build([choice[-1] for choice in choices], progress=False)
    sources = binder.sources(turned_b=True)
    assert {choice[-1] for choice in choices} & set(sources) and not multiply & set(sources)
    named = replace(binder.execution, config="128x128x64_2x1_pingpong")
    with_config = Binder(plan, 0, torch.device("cuda", 0), named)
    assert all(len(choice) == 1 for choice in with_config.choices(turned_b=True))

    build(sources, progress=False)
    text = describe_kernels(sources, choices)
    assert text.startswith(f"{len(sources)} kernels compiled on this machine, ")
    assert "up to 3 % slower than one that is not compiled" in text and "distgemm warmup" in text
    assert all((choice[0].name in text) for choice in choices if len(choice) > 1)
    assert describe_kernels(sources[:1], []) == "1 kernel compiled on this machine"


def test_a_call_says_it() -> None:
    plan = distgemm.make_plan(GemmProblem(4, 4, 4), "ag+gemm", 2)
    from distgemm.torch_ops.dispatch import CallRecord

    call = CallRecord("gather", plan, (), "CUDA runtime", "cutlass", kernels="3 kernels from the pack")
    assert str(call).endswith("; 3 kernels from the pack") and call.what_ran.endswith("; 3 kernels from the pack")
