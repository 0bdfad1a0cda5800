"""fp8 on one rank: codes, scales and layers against float64, with bounds that the formats imply."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode  # noqa: PLC2701  (torch has no public name)

import distgemm
from distgemm import fp8
from distgemm.fp8 import layer
from distgemm.fp8.quantize import quantize_with
from distgemm.plan import scaling as scalings
from distgemm.plan.scaling import OperandScaling
from tests.unit.fp8_reference import element_bound, quantized, smallest_step

SCALINGS = [(None, None), (1, None), (None, 1), (1, 16), (16, 16), (1, 1)]
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, with outliers and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    x[rows // 2, columns // 3] = 100.0
    x[rows // 3] = 0.0
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("blocks", SCALINGS)
@pytest.mark.parametrize("shape", [(48, 64), (37, 53)])
def test_codes_are_those_of_float64(shape: Any, blocks: Any, dtype: torch.dtype, power_of_two: bool) -> None:
    x, scaling = matrix(*shape), OperandScaling(*blocks)
    q = fp8.quantize(x, scaling, dtype, power_of_two=power_of_two)
    true = x.double().numpy()
    wanted, scales = quantized(true, scaling, name_of(dtype), power_of_two)
    found = fp8.dequantize(q, torch.float64).numpy()
    assert q.codes.dtype == dtype and q.codes.shape == x.shape
    assert q.scales.shape == tuple(1 if size is None else -(-n // size) for n, size in zip(shape, blocks, strict=True))
    np.testing.assert_array_equal(found, wanted)
    assert (np.abs(found - true) <= element_bound(true, scales, name_of(dtype))).all()
    assert np.abs(found - true).max() > 0  # otherwise the bound says nothing
    back = fp8.dequantize(q.t(), torch.float64).numpy()
    np.testing.assert_array_equal(back, found.T)


def test_scales_that_are_powers_of_two_are_the_smallest_that_fit() -> None:
    x = torch.cat([torch.tensor([[448.0, 1.0], [449.0, 1.0], [1e-30, 0.0]]), torch.zeros(1, 2)])
    q = fp8.quantize(x, OperandScaling(1, None), power_of_two=True)
    assert q.scales[:2].flatten().tolist() == [1.0, 2.0]
    assert torch.equal(torch.frexp(q.scales).mantissa, torch.full((4, 1), 0.5))
    assert fp8.dequantize(q)[3].tolist() == [0.0, 0.0]


def test_nan_and_infinity_are_not_hidden() -> None:
    x = torch.ones(2, 4)
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    found = fp8.dequantize(fp8.quantize(x, OperandScaling(1, None)))
    assert found[0].isnan().all() and not found[1, 2].isfinite()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_layer_does_not_hide_infinity(name: str, power_of_two: bool) -> None:
    x = torch.ones(2, 16)
    x[1, 2] = float("inf")
    recipe = fp8.recipe(name, power_of_two=power_of_two)
    assert not fp8.linear(x, torch.eye(16), recipe=recipe)[1].isfinite().all()


def test_elements_beyond_a_given_magnitude_become_the_largest() -> None:
    x = torch.tensor([[1.0, -8.0, 2.0]])
    q = quantize_with(torch.tensor([[2.0]]), x, OperandScaling(None, None), torch.float8_e4m3fn)
    assert fp8.dequantize(q).tolist() == [[1.0, -2.0, 2.0]]


def test_an_empty_shard_has_scales() -> None:
    q = fp8.quantize(torch.empty(0, 8), OperandScaling(None, None))
    assert q.codes.shape == (0, 8) and q.scales.shape == (1, 1)
    assert fp8.quantize(torch.empty(0, 8), OperandScaling(1, None)).scales.shape == (0, 1)


# --- layers -----------------------------------------------------------------------------------------------

TOKENS, FEATURES, OUT = 48, 64, 32
CASES = [
    (name, scope, parallel, ranks)
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
    for scope, parallel, ranks in (("global", None, 1), ("shard", "column", 4), ("shard", "row", 3))
]


def expected(recipe: fp8.Recipe, parallel: Any, ranks: int, x: Any, w: Any, dy: Any) -> list[Any]:
    """Y, dX and dW in float64 from dequantised operands, each with the sum of magnitudes of its products."""
    splits = {"column": (0, 0, 1), "row": (1, 1, 0), None: (None, None, None)}[parallel]
    dtypes = {"x": recipe.dtype, "w": recipe.dtype, "dy": recipe.grad_dtype}
    of_role = dict(zip(("x", "w", "dy"), splits, strict=True))
    values = {"x": x, "w": w, "dy": dy}

    def operand(role: str, scaling: Any, transposed: bool) -> Any:
        split = of_role[role]
        value = values[role].T if transposed else values[role]
        split = None if split is None else 1 - split if transposed else split
        return quantized(value, scaling, name_of(dtypes[role]), recipe.power_of_two, split, ranks)[0]

    a, b = operand("x", recipe.forward[0], False), operand("w", recipe.forward[1], False)
    found = [(a @ b.T, np.abs(a) @ np.abs(b).T)]
    a, b = operand("dy", recipe.grad_input[0], False), operand("w", recipe.grad_input[1], True)
    found.append((a @ b.T, np.abs(a) @ np.abs(b).T))
    if recipe.grad_weight is None:
        a, b = dy.T, x.T
    else:
        a, b = operand("dy", recipe.grad_weight[0], True), operand("x", recipe.grad_weight[1], True)
    found.append((a @ b.T, np.abs(a) @ np.abs(b).T))
    return found


@pytest.mark.parametrize(("name", "scope", "parallel", "ranks"), CASES)
def test_a_layer_computes_what_its_recipe_says(name: str, scope: Any, parallel: Any, ranks: int) -> None:
    compare_with_float64(fp8.recipe(name, scope=scope, block=16), parallel, ranks)


def test_each_operand_has_the_scaling_that_a_recipe_gives_it() -> None:
    """All six differ, so none can stand in another's place."""
    scalings = [OperandScaling(*blocks) for blocks in ((1, 16), (16, 16), (1, None), (None, None), (16, 1), (1, 8))]
    forward, grad_input, grad_weight = zip(scalings[::2], scalings[1::2], strict=True)
    compare_with_float64(fp8.Recipe(forward, grad_input, grad_weight), None, 1)


def compare_with_float64(recipe: fp8.Recipe, parallel: Any, ranks: int) -> None:
    x, w, dy = matrix(TOKENS, FEATURES, 1), matrix(OUT, FEATURES, 2), matrix(TOKENS, OUT, 3)
    x.requires_grad_(), w.requires_grad_()
    y = fp8.linear(x, w, recipe=recipe, parallel=parallel, ranks=ranks)
    y.backward(dy)
    arrays = [each.detach().double().numpy() for each in (x, w, dy)]
    for found, (true, size) in zip((y, x.grad, w.grad), expected(recipe, parallel, ranks, *arrays), strict=True):
        assert found is not None
        # Each dequantised element is rounded in float32, and so are the sums.
        error = np.abs(found.detach().double().numpy() - true)
        assert (error <= (FEATURES + 3) * 2.0**-24 * size + 1e-30).all()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_the_error_of_a_layer_is_bounded_by_its_formats(name: str) -> None:
    """Against the layer in float64 without fp8: the bound of each element, summed over k."""
    recipe = fp8.recipe(name, block=16)
    x, w = matrix(TOKENS, FEATURES, 1), matrix(OUT, FEATURES, 2)
    y = fp8.linear(x, w, recipe=recipe).double().numpy()
    errors = []
    for operand, scaling in zip((x, w), recipe.forward, strict=True):
        true = operand.double().numpy()
        _, scales = quantized(true, scaling, name_of(recipe.dtype), recipe.power_of_two)
        errors.append((true, element_bound(true, scales, name_of(recipe.dtype))))
    (a, da), (b, db) = errors
    bound = da @ np.abs(b).T + np.abs(a) @ db.T + da @ db.T + (FEATURES + 3) * 2.0**-23 * (np.abs(a) @ np.abs(b).T)
    error = np.abs(y - a @ b.T)
    assert (error <= bound).all() and error.max() > 0.001 * bound.max()


def test_a_layer_has_a_bias_and_more_dimensions_and_16_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    w, bias = torch.randn(OUT, FEATURES).bfloat16().requires_grad_(), torch.randn(OUT).bfloat16().requires_grad_()
    y = fp8.linear(x, w, bias, recipe="rowwise")
    y.sum().backward()
    without = fp8.linear(x, w, recipe="rowwise")
    assert y.shape == (3, 5, OUT) and torch.equal(y, without + bias)
    assert (
        y.dtype == torch.bfloat16
        and bias.grad is not None
        and torch.equal(bias.grad, torch.full((OUT,), 15.0).bfloat16())
    )
    assert x.grad is not None and x.grad.shape == x.shape


def scales_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scales of all tensors that are quantised from now on."""
    found: list[float] = []

    def noted(*args: Any, **options: Any) -> Any:
        q = quantize_with(*args, **options)
        found.append(float(q.scales.max()))
        return q

    monkeypatch.setattr(layer, "quantize_with", noted)
    return found


def test_delayed_scales_are_those_of_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = fp8.recipe("tensorwise_delayed", history=2)
    state = fp8.LayerState(recipe)
    w = torch.ones(4, 8, requires_grad=True)
    scales = scales_of(monkeypatch)
    seen = []
    for size in (8.0, 4.0, 2.0, 1.0):
        x = torch.full((2, 8), size, requires_grad=True)
        for evaluation in (True, False):
            scales.clear()
            y = fp8.linear(x, w, recipe=state)
            if evaluation:
                continue  # without a backward pass, as a pass that is computed again
            y.backward(torch.full((2, 4), size))
            seen.append([round(scales[0] * 448, 4), round(scales[-1] * 57344, 4)])
    # Before the first step the current magnitudes, then the largest of the last two steps.
    assert seen == [[8, 8], [8, 8], [8, 8], [4, 4]]
    saved = state.state_dict()
    other = fp8.LayerState(recipe)
    other.load_state_dict(saved)
    assert float(other.amax("x")) == 2.0  # type: ignore[arg-type]


DELAYED = fp8.recipe("tensorwise_delayed", history=2)


def train(state: fp8.LayerState, x: float = 1.0, dy: float = 1.0) -> torch.Tensor:
    """A step of a layer that returns its input; the gradient of the input, which is dy."""
    given, w = torch.full((2, 16), x, requires_grad=True), torch.eye(16, requires_grad=True)
    y = fp8.linear(given, w, recipe=state)
    y.backward(torch.full_like(y, dy))
    assert given.grad is not None
    return given.grad


@pytest.mark.parametrize("is_frozen", [False, True])
def test_passes_without_a_backward_pass_leave_the_history(is_frozen: bool) -> None:
    state = fp8.LayerState(DELAYED)
    train(state)
    with torch.set_grad_enabled(is_frozen):  # a frozen layer whose input has no gradient
        fp8.linear(torch.full((2, 16), 1000.0), torch.eye(16), recipe=state)
    train(state)
    assert torch.equal(state.history, torch.ones(3, 2))


@pytest.mark.parametrize("dy", [0.0, float("inf"), float("nan")])
def test_steps_without_a_magnitude_repeat_the_one_before(dy: float) -> None:
    """Gradients that are masked, or that overflow under loss scaling, spoil no later step."""
    state = fp8.LayerState(DELAYED)
    train(state)
    for _ in range(3):
        train(state, dy=dy)
    assert torch.equal(train(state), torch.ones(2, 16)) and state.history.isfinite().all()


def test_several_forward_passes_before_their_backward_passes_keep_the_history() -> None:
    """As in a pipeline. The first backward pass moves on what all of them have noted."""
    state, w = fp8.LayerState(DELAYED), torch.eye(16, requires_grad=True)
    train(state)
    for y in [fp8.linear(torch.ones(2, 16), w, recipe=state) for _ in range(4)]:
        y.sum().backward()
    assert torch.equal(fp8.linear(torch.ones(2, 16), w, recipe=state), torch.ones(2, 16))
    with fp8.fixed_weights():  # notes the weight once
        for _ in range(4):
            fp8.linear(torch.ones(2, 16), w, recipe=state).sum().backward()
    assert torch.equal(state.history, torch.tensor([[1.0], [1.0], [1.0]]).expand(3, 2))


def test_a_state_that_is_loaded_or_reset_forgets_what_was_before() -> None:
    state = fp8.LayerState(DELAYED)
    empty = copy.deepcopy(state.state_dict())
    for forget in (lambda: state.load_state_dict(empty), state.reset_parameters):
        for _ in range(2):
            train(state)
        fp8.linear(torch.full((2, 16), 1000.0), torch.eye(16, requires_grad=True), recipe=state)  # no backward pass
        forget()
        y = fp8.linear(torch.full((2, 16), 4.0), torch.eye(16, requires_grad=True), recipe=state)
        y.sum().backward()
        assert torch.equal(y, torch.full((2, 16), 4.0)) and state.history[0].tolist() == [4.0, 0.0]


def test_the_history_stays_in_float32() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    distgemm.nn.use_recipe(model, "tensorwise_static")
    state: Any = model[0].fp8
    state.set(x=1e-9, w=1e9)
    assert torch.equal(model.half()[0].fp8.history, torch.tensor([[1e-9], [1e9], [0.0]]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert fp8.LayerState("tensorwise_delayed").history.dtype == torch.float32
        assert fp8.quantize(torch.empty(0, 8), OperandScaling(None, None)).scales.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_history_is_where_the_weight_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, device="meta"))
    distgemm.nn.use_recipe(model, "tensorwise_delayed")
    state = model[0].fp8
    assert isinstance(state, fp8.LayerState)
    assert state.history.device.type == "meta"
    with pytest.raises(ValueError, match=r"LayerState is on meta, and the layer's input is on cpu.*LayerState.to"):
        fp8.linear(torch.ones(2, 16), torch.eye(16), recipe=state)
    model.to_empty(device="cpu")
    state.history.fill_(float("nan"))  # as memory may be
    state.reset_parameters()
    x = torch.ones(2, 16)
    assert torch.equal(fp8.linear(x, torch.eye(16), recipe=state), x)


def test_static_scales_are_those_that_were_set() -> None:
    recipe = fp8.recipe("tensorwise_static")
    state = fp8.LayerState(recipe)
    x, w = torch.full((1, 16), 3.0), torch.eye(16)
    with pytest.raises(ValueError, match="there is no largest magnitude of 'x'"):
        fp8.linear(x, w, recipe=state)
    state.set(x=2.0, w=1.0)
    assert fp8.linear(x, w, recipe=state).tolist() == [[2.0] * 16]


def test_weights_are_quantised_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = fp8.recipe(
        "rowwise"
    )  # a weight is quantised for the forward pass, and its transpose for the backward pass
    state = fp8.LayerState(recipe)
    w = torch.ones(16, 16, requires_grad=True)
    scales = scales_of(monkeypatch)

    def count() -> int:
        scales.clear()
        for _ in range(3):
            x = torch.full((2, 16), 5.0, requires_grad=True)
            fp8.linear(x, w, recipe=state).sum().backward()
        return len(scales)

    each_time = count()
    with fp8.fixed_weights():
        once = count()
    assert (each_time, once) == (3 * 6, 3 * 4 + 2)
    with torch.no_grad():
        w.mul_(2)
    with fp8.fixed_weights():
        x = torch.ones(1, 16)
        assert torch.equal(fp8.linear(x, w, recipe=state), x @ w.t())  # of the new weight


def test_weights_that_are_quantised_once_live_as_long_as_their_step() -> None:
    state, w = fp8.LayerState("tensorwise"), torch.ones(16, 16, requires_grad=True)
    with fp8.fixed_weights():
        with torch.inference_mode():
            fp8.linear(torch.ones(1, 16), w, recipe=state)  # an evaluation, whose tensors autograd does not save
        fp8.linear(torch.ones(1, 16), w, recipe=state).sum().backward()
        size = len(pickle.dumps(copy.deepcopy(state)))
    assert size == len(pickle.dumps(fp8.LayerState("tensorwise"))) and w.grad is not None


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_autocast_leaves_products_of_fp8_in_float32(name: str) -> None:
    x, w = matrix(TOKENS, FEATURES, 1), matrix(OUT, FEATURES, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = fp8.linear(x, w, recipe=name)
    assert torch.equal(found, fp8.linear(x, w, recipe=name))


def test_a_second_derivative_is_refused() -> None:
    x, w = torch.ones(2, 16, requires_grad=True), torch.ones(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(fp8.linear(x, w, recipe="tensorwise").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_layer_takes_one_token() -> None:
    y = fp8.linear(torch.ones(16), torch.eye(16), recipe="tensorwise")
    assert torch.equal(y, torch.ones(16))


def test_scope_of_shards_differs_from_the_whole() -> None:
    x, w = matrix(TOKENS, FEATURES, 1), matrix(OUT, FEATURES, 2)
    one = fp8.linear(x, w, recipe=fp8.recipe("tensorwise"), parallel="row", ranks=4)
    two = fp8.linear(x, w, recipe=fp8.recipe("tensorwise", scope="shard"), parallel="row", ranks=4)
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.recipe("mxfp4"), "recipe is one of tensorwise, tensorwise_delayed"),
        (lambda: fp8.recipe("tensorwise", scope="rank"), "scope is one of global, shard, got 'rank'"),  # type: ignore[arg-type]
        (lambda: fp8.recipe("tensorwise", dtype=torch.int8), "Recipe: dtype is one of torch.float8_e4m3fn"),
        (lambda: fp8.recipe("rowwise", amax="delayed"), "is for one scale for the whole tensor on all ranks"),
        (lambda: fp8.recipe("tensorwise_delayed", scope="shard"), "is for one scale for the whole tensor on all"),
        (
            lambda: fp8.quantize(torch.ones(3), OperandScaling(None, None)),
            "x is a matrix of a floating type, got shape (3,)",
        ),
        (
            lambda: fp8.quantize(torch.ones(3, 3), OperandScaling(None, None), torch.int8),
            "dtype is one of torch.float8_e4m3fn",
        ),
        (lambda: fp8.quantize(torch.ones(3, 3), "row"), "scaling is an OperandScaling, got 'row'"),  # type: ignore[arg-type]
        (lambda: fp8.linear(torch.ones(2, 4), torch.ones(3, 4), recipe="fp8"), "recipe is one of tensorwise"),
        (lambda: fp8.linear(torch.ones(2, 4), torch.ones(3, 4), recipe="rowwise", ranks=2), "'column' or 'row' for 2"),
        (
            lambda: fp8.linear(torch.ones(2, 4), torch.ones(3, 4), recipe="tensorwise_delayed"),
            "recipe=distgemm.fp8.LayerState(recipe), one for each layer",
        ),
        (lambda: fp8.LayerState("e4m3"), "recipe is one of tensorwise"),
        (lambda: fp8.LayerState(fp8.recipe("rowwise")).set(x=1.0, w=1.0), "such as 'tensorwise_static', got one with"),
        (lambda: fp8.linear([1.0], torch.ones(3, 4), recipe="rowwise"), "x is a tensor of a floating type"),  # type: ignore[arg-type]
        (
            lambda: fp8.linear(torch.ones(2, 4).int(), torch.ones(3, 4), recipe="rowwise"),
            "floating type, got torch.int",
        ),
        (lambda: fp8.linear(torch.ones(2, 4), torch.ones(4, 3), recipe="rowwise"), "(out_features, in_features), got"),
        (lambda: fp8.linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(1), recipe="rowwise"), "bias is (3,)"),
        (lambda: distgemm.nn.use_recipe(nn.ReLU(), "rowwise"), "no layer of the model computes in fp8"),
        (lambda: distgemm.nn.all_but(3), "patterns[0] is the name of a layer"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_linear_with_a_forward_of_its_own_is_refused() -> None:
    given = nn.Linear(16, 16)
    given.forward = partial(torch.nn.functional.linear, weight=given.weight)  # type: ignore[method-assign]
    for other in (Doubled(16, 16), given):
        model = nn.Sequential(nn.Linear(16, 16), other)
        x = torch.randn(4, 16)
        wanted = model(x)
        with pytest.raises(ValueError, match=r"1: .* has a forward of its own, .* leave it out: only=all_but"):
            distgemm.nn.use_recipe(model, "rowwise")
        assert torch.equal(model(x), wanted)
        assert distgemm.nn.use_recipe(model, "rowwise", distgemm.nn.all_but("1")) == ["0"]


def test_a_linear_takes_the_keyword_input() -> None:
    linear, x = nn.Linear(16, 8), torch.randn(4, 16)
    distgemm.nn.use_recipe(linear, "rowwise")
    assert torch.equal(linear(input=x), linear(x))


def test_a_filter_leaves_layers_in_bf16() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 8))
    model = copy.deepcopy(plain)
    assert distgemm.nn.use_recipe(model, "tensorwise", distgemm.nn.all_but("0", "3")) == ["2"]
    x = torch.randn(4, 16)
    hidden = torch.relu(plain[0](x))
    wanted = plain[3](fp8.linear(hidden, plain[2].weight, plain[2].bias, recipe="tensorwise"))  # type: ignore[arg-type]
    assert torch.equal(model(x), wanted) and not torch.equal(model(x), plain(x))
    model(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it
def test_torch_compile_computes_the_same() -> None:
    x, w = matrix(TOKENS, FEATURES, 1), matrix(OUT, FEATURES, 2).requires_grad_()
    recipe = replace(fp8.recipe("blockwise", block=16), power_of_two=True)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fp8.linear(x, w, recipe=recipe)

    compiled: Any = torch.compile(linear, fullgraph=True, backend="aot_eager")
    found = []
    for run in (linear, compiled):
        w.grad = None
        y = run(x, w)
        y.square().sum().backward()
        found.append((y, w.grad))
    for one, two in zip(*found, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


def test_the_smallest_steps_are_those_of_torch() -> None:
    for dtype in DTYPES:
        assert smallest_step(name_of(dtype)) == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "fp8_training.json"


@pytest.mark.skipif(not RECORDED.is_file(), reason="a source archive has no benchmarks/")
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_recorded_losses_follow_bf16_and_one_rank(recipe: str, ranks: int) -> None:
    runs = {
        (run["run"]["recipe"], run["run"]["tp"]): run
        for run in json.loads(RECORDED.read_text())["runs"]
        if run["run"]["scope"] == "global" and run["run"]["steps"] == 300
    }
    found, alone = runs[recipe, ranks], runs[recipe, 1]
    assert found["loss"] == pytest.approx(runs["bf16", 1]["loss"], rel=0.01)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_products_of_a_trace_have_only_shapes(recipe: str) -> None:
    """As ``warmup`` traces them, for a GPU; also with numbers of tokens that no library function takes."""
    of = scalings.SCALINGS[recipe]
    with FakeTensorMode():
        x, w = (torch.randn(rows, 531, device="cuda", dtype=torch.bfloat16) for rows in (37, 64))
        found = layer.multiply(fp8.quantize(x, of.a), fp8.quantize(w, of.b), torch.bfloat16)
        assert found.shape == (37, 64) and found.device.type == "cuda" and found.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="on GPUs, scales are of tensors, rows, or 1x128 and 128x128 blocks"):
            layer.multiply(*(fp8.quantize(each, OperandScaling(1, 16)) for each in (x, w)), torch.bfloat16)
