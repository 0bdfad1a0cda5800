"""Layers of models: their sizes are those that were published."""

from __future__ import annotations

import pytest

from distgemm.measure.models import MODELS, get_model

VOCABULARY = 128256
# Blocks, and parameters as the published checkpoints have them.
PUBLISHED = {
    "llama-3-8b": (32, 8_030_261_248),
    "llama-3-70b": (80, 70_553_706_496),
    "llama-3-405b": (126, 405_853_388_800),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    model = get_model(name)
    blocks, parameters = PUBLISHED[name]
    norms = 2 * model.hidden
    block = sum(layer.n * layer.k for layer in model.layers) + norms
    embeddings = 2 * VOCABULARY * model.hidden  # in and out
    assert blocks * block + embeddings + model.hidden == parameters


def test_all_models_are_published() -> None:
    assert set(PUBLISHED) == set(MODELS)


def test_layers_of_70b() -> None:
    assert [tuple(layer) for layer in get_model("llama-3-70b").layers] == [
        ("qkv", "ag+gemm", 10240, 8192),
        ("out", "gemm+rs", 8192, 8192),
        ("fc1", "ag+gemm", 57344, 8192),
        ("fc2", "gemm+rs", 8192, 28672),
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_share_a_layer(name: str, world_size: int) -> None:
    for layer in MODELS[name].layers:
        m, n, k = layer.local(512, world_size)
        assert m == 512
        assert (n, k) == (
            (layer.n // world_size, layer.k) if layer.pattern == "ag+gemm" else (layer.n, layer.k // world_size)
        )
        assert n * k * world_size == layer.n * layer.k


def test_shares_are_rounded_up() -> None:
    qkv, out, *_ = MODELS["llama-3-8b"].layers
    assert qkv.local(7, 5) == (7, 1229, 4096)
    assert out.local(7, 5) == (7, 4096, 820)


def test_unknown_models() -> None:
    with pytest.raises(ValueError, match="model is one of llama-3-8b, llama-3-70b, llama-3-405b, got 'gpt-2'"):
        get_model("gpt-2")
