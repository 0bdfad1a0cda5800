"""Linears of frameworks that are changed in place: what the plug-ins for Megatron-core, vLLM and SGLang share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from distgemm.arguments import instance
from distgemm.schedulers import Pattern
from distgemm.torch_ops.functional import check_schedule

__all__ = ["Applied", "Replaced", "replace", "restore", "with_bias"]

Tensor = torch.Tensor


class Applied(NamedTuple):
    """What a plug-in has done to a model.

    Attributes:
        layers: names of the layers that distgemm computes.
        left: why others are left to the framework, by name.
    """

    layers: tuple[str, ...]
    left: dict[str, str]


class Replaced(NamedTuple):
    """A method of a layer that distgemm computes.

    Attributes:
        method: name of the method.
        compute: is called in its place, with the layer and the schedule before the method's arguments.
        pattern: what it computes over the ranks.
    """

    method: str
    compute: Callable[..., Any]
    pattern: Pattern


class _Method(partial[Any]):
    """An instance's attribute in the place of the class's method."""


def replace(
    model: torch.nn.Module, find: Callable[[Any], Replaced | str | None], wanted: str, schedule: str
) -> Applied:
    """Replace methods of a model's layers. If it raises, no layer is changed.

    Args:
        model: the model.
        find: of a layer the method to replace, or why it is left; None: it is none of the layers that are meant.
        wanted: what the error calls these layers.
        schedule: of all layers.

    Raises:
        ValueError: if there is no such schedule, if it does not compute each of the layers, or if the model has no such
            layer.
    """
    instance("model", model, torch.nn.Module, "a torch.nn.Module")
    layers = [(name, layer, find(layer)) for name, layer in model.named_modules()]
    users: dict[Pattern, str] = {
        found.pattern: f"a {type(layer).__name__} of this model"
        for _, layer, found in layers
        if isinstance(found, Replaced)
    }
    check_schedule(schedule, None, users)
    done, left = list[str](), dict[str, str]()
    for name, layer, found in layers:
        if isinstance(found, str):
            left[name] = found
        elif found is not None:
            layer.__dict__[found.method] = _Method(found.compute, layer, schedule)
            done.append(name)
    if not done and not left:
        raise ValueError(f"model has no {wanted}")
    return Applied(tuple(done), left)


def restore(model: torch.nn.Module) -> None:
    """Give the layers of a model their own methods back."""
    for layer in model.modules():
        for name in [name for name, value in layer.__dict__.items() if isinstance(value, _Method)]:
            del layer.__dict__[name]


def with_bias(layer: Any, output: Tensor) -> tuple[Tensor, Tensor | None]:
    """A row-parallel linear's result, and the layer's bias if the caller adds it (``skip_bias_add``)."""
    if layer.skip_bias_add or layer.bias is None:
        return output, layer.bias if layer.skip_bias_add else None
    return output + layer.bias, None
