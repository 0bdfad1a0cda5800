"""Linear layers of a model that compute in fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from distgemm import fp8
from distgemm.arguments import function, instance, string
from distgemm.fp8.recipe import read_recipe
from distgemm.nn.tensors import check_forward
from distgemm.plan.scaling import OperandScaling
from distgemm.torch_ops.functional import autocast

__all__ = ["Filter", "all_but", "give_state", "share_state", "state", "state_of", "use_recipe"]

Filter = Callable[[nn.Module, str], bool]
"""Whether a layer computes in fp8, from the module and its name, as torchao's ``module_filter_fn``."""


def all_but(*patterns: str) -> Filter:
    """A filter for :func:`use_recipe`: all layers, except those whose names match a pattern.

    Args:
        *patterns: names with * for any text, such as "head", "blocks.0.*".
    """
    for index, pattern in enumerate(patterns):
        string(f"patterns[{index}]", pattern, "the name of a layer, with * for any text")
    return lambda _, name: not any(fnmatchcase(name, pattern) for pattern in patterns)


def use_recipe(model: nn.Module, recipe: fp8.Recipe | str, only: Filter | None = None) -> list[str]:
    """Let linear layers of a model compute in fp8, forward and backward.

    These are layers and styles of :mod:`distgemm.nn`, and each nn.Linear that is whole on this rank. Layers and styles
    also take a recipe themselves.

    Args:
        model: the model, after parallelize_module.
        recipe: a recipe of :mod:`distgemm.fp8` or its name. Each layer gets a :class:`distgemm.fp8.LayerState` of its
            own, as its module ``fp8``. Linears of one SharedColwiseParallel have one together.
        only: which layers; None: all. Projections between tokens and heads, such as TokensToHeads, have no fp8 and stay
            as they are. The first and the last layers of a model usually stay in bf16:
            ``all_but("head")``.

    Returns:
        The names of the layers that compute in fp8.

    Raises:
        ValueError: if no layer does, or only some of the Linears that share a gather; and for a Linear with a forward
            of its own.
    """
    instance("model", model, nn.Module, "an nn.Module")
    recipe = read_recipe("recipe", recipe)
    if only is not None:
        function("only", only, "a function of a module and its name, such as all_but('head')")
    layers = {
        name: each
        for name, each in model.named_modules()
        if (isinstance(each, nn.Linear) or hasattr(each, "fp8")) and getattr(each, "takes_recipe", True)
    }
    found = [name for name, module in layers.items() if only is None or only(module, name)]
    if not found:
        raise ValueError("no layer of the model computes in fp8: it has no linear layer that `only` takes")
    taken = [layers[name] for name in found]
    for name, module in zip(found, taken, strict=True):
        if isinstance(module, nn.Linear) and not hasattr(module, "fp8"):
            _check_forward_of(name, module)
    for module in taken:
        shared = _sharing(module)
        if lacking := [name for name, each in layers.items() if each in shared and each not in taken]:
            raise ValueError(
                f"Linears that share a gather compute in fp8 together; `only` leaves out {', '.join(lacking)}"
            )
        if shared:
            share_state(shared, recipe)
        else:
            if isinstance(module, nn.Linear) and not hasattr(module, "fp8"):
                module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            give_state(module, fp8.LayerState(recipe, module.weight.device))
    return found


def _check_forward_of(name: str, linear: nn.Linear) -> None:
    try:
        check_forward(linear)
    except ValueError as error:
        raise ValueError(f"{name}: {error}, or leave it out: only=all_but({name!r})" if name else str(error)) from None


def _sharing(module: nn.Module) -> list[nn.Linear]:
    """The Linears that share a gather with this one, as SharedColwiseParallel has made them."""
    run = module.forward
    return list(run.func.__self__.linears.values()) if isinstance(run, partial) else []  # type: ignore[attr-defined]


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    bias = None if self.bias is None else autocast(self.bias)
    found = state(self)
    assert found is not None
    return fp8.linear(autocast(input), autocast(self.weight), bias, recipe=found)


def state(layer: nn.Module) -> fp8.LayerState | None:
    """The state of a layer with a recipe; None: it has no recipe."""
    found: Any = layer.fp8
    return found  # type: ignore[no-any-return]


def give_state(layer: Any, found: fp8.LayerState | None) -> None:
    """Let a layer have a state as its module ``fp8``, or none."""
    layer.fp8 = found


def state_of(recipe: fp8.Recipe | str | None, linear: nn.Linear) -> fp8.LayerState | None:
    """A state for a Linear: of a recipe, or of what the Linear has: a state, or a Float8Linear's configuration."""
    if recipe is None and isinstance(found := getattr(linear, "fp8", None), fp8.LayerState):
        recipe = found.recipe
    elif recipe is None and type(linear).__name__ == "Float8Linear":
        recipe = _recipe_of_torchao(linear.config)
    return None if recipe is None else fp8.LayerState(read_recipe("recipe", recipe), linear.weight.device)


def share_state(linears: Sequence[nn.Linear], recipe: fp8.Recipe | None) -> None:
    """Give several Linears one state, which the first one has.

    Raises:
        ValueError: if they are Float8Linears with several recipes.
    """
    first, *others = linears
    states = [state_of(recipe, linear) for linear in linears]
    if len({None if each is None else each.recipe for each in states}) > 1:
        raise ValueError(
            "Linears that share a gather have one recipe, and these are Linears and Float8Linears of several"
        )
    give_state(first, states[0])
    for each in others:
        give_state(each, None)


def _recipe_of_torchao(config: Any) -> fp8.Recipe:
    """The recipe of a Float8LinearConfig.

    Raises:
        ValueError: for a configuration that no recipe has.
    """

    def pair(*casts: Any) -> Any:
        if all(cast.scaling_type.value == "disabled" for cast in casts):
            return None
        rows = {"tensorwise": None, "axiswise": 1}
        return tuple(OperandScaling(rows[cast.scaling_granularity.value], None) for cast in casts)

    x, w, dy = config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output
    forward, grad_input = pair(x, w), pair(dy, config.cast_config_weight_for_grad_input)
    if (
        forward is None
        or grad_input is None
        or x.target_dtype != w.target_dtype
        or config.enable_fsdp_float8_all_gather
    ):
        raise ValueError(
            "a Float8Linear of torchao has a recipe here if its output and the gradient of its input are in fp8, its "
            "input and weight have one type, and enable_fsdp_float8_all_gather is off; pass recipe= for another one, "
            f"got {config}"
        )
    return fp8.Recipe(
        forward,
        grad_input,
        pair(config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight),
        dtype=x.target_dtype,
        grad_dtype=dy.target_dtype,
        power_of_two=config.round_scales_to_power_of_2,
    )
