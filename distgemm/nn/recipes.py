"""Linear layers of a model that compute in fp8."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from types import MethodType

import torch
from torch import nn

from distgemm import fp8
from distgemm.arguments import function, instance, string
from distgemm.fp8.recipe import read_recipe
from distgemm.torch_ops.functional import autocast

__all__ = ["Filter", "all_but", "use_recipe"]

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

    Args:
        model: a model with nn.Linear on one rank.
        recipe: a recipe of :mod:`distgemm.fp8` or its name. Each layer gets a :class:`distgemm.fp8.LayerState` of its
            own, as its module ``fp8``.
        only: which layers; None: all. The first and the last layers of a model usually stay in bf16:
            ``all_but("head")``.

    Returns:
        The names of the layers that compute in fp8.

    Raises:
        ValueError: if no layer does.
    """
    instance("model", model, nn.Module, "an nn.Module")
    recipe = read_recipe("recipe", recipe)
    if only is not None:
        function("only", only, "a function of a module and its name, such as all_but('head')")
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (only is None or only(module, name)):
            module.fp8 = fp8.LayerState(recipe)
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            found.append(name)
    if not found:
        raise ValueError("no layer of the model computes in fp8: it has no nn.Linear that `only` takes")
    return found


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    state = self.fp8
    assert isinstance(state, fp8.LayerState)
    bias = None if self.bias is None else autocast(self.bias)
    return fp8.linear(autocast(x), autocast(self.weight), bias, recipe=state)
