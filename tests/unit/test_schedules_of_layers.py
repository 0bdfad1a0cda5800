"""Layers, styles and plug-ins refuse a named schedule of another pattern when they get it, before the first call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed.tensor import Replicate

import distgemm
from distgemm.integrations import sglang, transformers, vllm
from distgemm.schedulers import get_schedule, registry


class RowLinear(nn.Module):
    """What the plug-ins read of a RowParallelLinear of vLLM or SGLang on two ranks."""

    tp_size, use_dp_attention_reduce = 2, False
    tp_group = mock.Mock(world_size=2)
    input_is_parallel = reduce_results = True

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.quant_method = method


class Unquantized:
    """The method of linears that are not quantised."""


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Make modules of a framework, with these names."""
    for path, names in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, package.__name__, package)
        module = ModuleType(path)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.fixture(params=["vllm", "sglang"])
def plug_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in for a server whose linears are stand-ins."""
    linear, method = {"RowParallelLinear": RowLinear}, {"UnquantizedLinearMethod": Unquantized}
    parallel = mock.Mock(tp_group=mock.Mock(world_size=2))
    stand_in(
        monkeypatch,
        {
            "vllm.model_executor.layers.linear": linear | method,
            "sglang.srt.layers.linear": linear,
            "sglang.srt.layers.quantization.unquant": method,
            "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        },
    )
    return {"vllm": vllm, "sglang": sglang}[request.param]


@pytest.mark.parametrize("schedule", ["ag+gemm", "gemm+rs chunks=2", "all_to_all_1d_rotating_d"])
def test_plug_ins_of_servers_refuse_a_schedule_before_they_change_a_layer(plug_in: Any, schedule: str) -> None:
    model = nn.ModuleDict({"one": RowLinear(Unquantized()), "other": RowLinear(Unquantized())})
    with pytest.raises(ValueError, match="does not compute") as caught:
        plug_in.apply(model, schedule)
    assert str(caught.value) == (
        f"schedule={schedule!r} does not compute gemm+ar, as a RowLinear of this model does: take 'auto' or 'unfused', "
        "or one of all_reduce_1d_one_shot_a, all_reduce_1d_pairwise_a, all_reduce_1d_tiling_a_rotating_c, "
        "all_reduce_1d_tiling_b_rotating_c"
    )
    assert not any("forward" in layer.__dict__ for layer in model.values())


@pytest.mark.parametrize("schedule", ["auto", "unfused", "gemm+ar chunks=2", "all_reduce_1d_one_shot_a"])
def test_plug_ins_of_servers_take_a_schedule_of_their_layers(plug_in: Any, schedule: str) -> None:
    model = nn.ModuleDict({"one": RowLinear(Unquantized()), "other": RowLinear(mock.Mock())})
    done = plug_in.apply(model, schedule)
    assert done.layers == ("one",) and list(done.left) == ["other"]
    plug_in.remove(model)
    assert "forward" not in model["one"].__dict__


def test_a_schedule_of_no_layer_is_a_schedule_all_the_same(plug_in: Any) -> None:
    left = RowLinear(mock.Mock())
    assert plug_in.apply(left, "ag+gemm").layers == ()
    with pytest.raises(ValueError, match="unknown schedule 'gemm\\+arr'"):
        plug_in.apply(left, "gemm+arr")


def test_install_of_transformers_refuses_a_schedule_that_is_no_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    class Styles(dict[str, Any]):
        register = dict.__setitem__

    styles = Styles(colwise="colwise of theirs", rowwise="rowwise of theirs")
    names = {"ALL_PARALLEL_STYLES": styles, "ColwiseParallel": object, "RowwiseParallel": object}
    stand_in(monkeypatch, {"transformers.distributed.tensor_parallel": names})
    with pytest.raises(
        ValueError, match="'gemm\\+rs' does not compute gemm\\+ar, as a rowwise linear does: take 'auto"
    ):
        transformers.install("gemm+rs")
    assert styles == {"colwise": "colwise of theirs", "rowwise": "rowwise of theirs"}
    transformers.install("gemm+ar chunks=2")
    transformers.uninstall()
    assert styles == {"colwise": "colwise of theirs", "rowwise": "rowwise of theirs"}


@pytest.mark.parametrize(
    ("make", "wrong", "right", "message"),
    [
        (
            distgemm.nn.ColwiseParallel,
            "gemm+rs",
            "all_gather_1d_ring_a",
            "ag+gemm, as distgemm.nn.ColwiseParallel does",
        ),
        (distgemm.nn.RowwiseParallel, "gemm+ar", "gemm+rs", "gemm+rs, as distgemm.nn.RowwiseParallel does"),
        (
            lambda **options: distgemm.nn.RowwiseParallel(output_layouts=Replicate(), **options),
            "gemm+rs",
            "gemm+ar",
            "gemm+ar, as distgemm.nn.RowwiseParallel does",
        ),
        (
            lambda **options: distgemm.nn.SharedColwiseParallel("q", **options),
            "gemm+rs",
            "ag+gemm",
            "ag+gemm, as distgemm.nn.SharedColwiseParallel does",
        ),
        (
            lambda **options: distgemm.nn.TokensToHeads(head_dim=8, **options),
            "a2a+gemm",
            "gemm+a2a",
            "gemm+a2a, as distgemm.nn.TokensToHeads does: take 'auto', or one of all_to_all_1d_pairwise_xor_d, ",
        ),
        (
            lambda **options: distgemm.nn.HeadsToTokens(head_dim=8, **options),
            "unfused",
            "a2a+gemm",
            "a2a+gemm, as distgemm.nn.HeadsToTokens does: take 'auto', or one of all_to_all_1d_pairwise_xor_a, ",
        ),
    ],
)
def test_styles_refuse_a_schedule_of_another_pattern(
    make: Callable[..., Any], wrong: str, right: str, message: str
) -> None:
    with pytest.raises(ValueError, match="does not compute") as caught:
        make(schedule=wrong)
    assert str(caught.value).startswith(f"schedule={wrong!r} does not compute {message}")
    make(schedule=right)
    make(schedule="tensor_parallel_2d_nested mesh=2x2")  # on a mesh, only a call can tell


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ag+gemm chnks=2", "all_gather_1d_tiling_cd_rotating_a has no option 'chnks'; its options: chunks"),
        (
            "ag+gemm chunks=999999",
            "all_gather_1d_tiling_cd_rotating_a: chunks is an integer from 1 to 4096, got 999999",
        ),
    ],
)
def test_options_are_refused_when_layers_are_made(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distgemm.nn.ColwiseParallel(schedule=text)
    with pytest.raises(ValueError, match=message):
        distgemm.install(gather=text)
    distgemm.nn.ColwiseParallel(schedule="ag+gemm chunks=2 workspace=small sync=barrier")


def test_install_refuses_a_schedule_of_the_other_op() -> None:
    for options, message in (
        ({"gather": "gemm+rs"}, "ag\\+gemm, as fused_all_gather_matmul does"),
        ({"scatter": "ag+gemm"}, "gemm\\+rs, as fused_matmul_reduce_scatter does"),
    ):
        with pytest.raises(ValueError, match=f"does not compute {message}: take 'auto' or 'unfused', or one of"):
            distgemm.install(**options)
    with distgemm.install(gather="all_gather_1d_ring_a", scatter="unfused"):
        pass


def test_a_schedule_that_does_not_take_two_ranks_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @distgemm.register_schedule("of_four_ranks")
    def build(mesh: tuple[int, ...]) -> Any:
        if mesh != (4,):
            raise ValueError(f"it takes 4 ranks, got {mesh}")
        return get_schedule("all_gather_1d_ring_a", 4)

    assert get_schedule("of_four_ranks", 4).world_size == 4
    assert distgemm.nn.ColwiseParallel(schedule="of_four_ranks").options["schedule"] == "of_four_ranks"
    with pytest.raises(ValueError, match="'gemm\\+rs' does not compute ag\\+gemm") as caught:
        distgemm.nn.ColwiseParallel(schedule="gemm+rs")
    assert "of_four_ranks" not in str(caught.value)
