"""Megatron-core's tensor-parallel linears, computed by distgemm.

:func:`apply` changes the ``ColumnParallelLinear`` and ``RowParallelLinear`` of a model in place. Parameters,
checkpoints and optimizers stay Megatron's. :func:`sharded_state_dict` lets Megatron's ``dist_checkpointing`` save and
load a model with layers or styles of :mod:`distgemm.nn`. Written for megatron-core 0.16.1, and tested with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from distgemm.arguments import instance
from distgemm.nn.state import megatron_sharded_state_dict as sharded_state_dict
from distgemm.torch_ops.functional import all_gather_matmul, check_schedule, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["Applied", "MainGrad", "apply", "remove", "sharded_state_dict"]

Tensor = torch.Tensor


class Applied(NamedTuple):
    """What :func:`apply` has done.

    Attributes:
        layers: names of the layers that distgemm computes.
        left: why others are left to Megatron, by name.
    """

    layers: tuple[str, ...]
    left: dict[str, str]


def apply(model: torch.nn.Module, schedule: str = "auto") -> Applied:
    """Let distgemm compute the tensor-parallel linears of a model.

    With sequence parallelism a column-parallel layer is an :func:`distgemm.all_gather_matmul`, and a row-parallel layer
    a :func:`distgemm.matmul_reduce_scatter`, forward and backward. Without, a row-parallel layer is a
    :func:`distgemm.matmul_all_reduce`. All ranks call this for the same model.

    With ``gradient_accumulation_fusion`` the gradient of a weight is added to ``weight.main_grad``. It is rounded to
    the weight's dtype first, where Megatron's fused kernel is not.

    Args:
        model: a model that Megatron has built.
        schedule: as in :func:`distgemm.all_gather_matmul`.

    Returns:
        The layers that distgemm computes, and why others are left.

    Raises:
        ValueError: if there is no such schedule, or if the model has no tensor-parallel linear.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    instance("model", model, torch.nn.Module, "a torch.nn.Module")
    check_schedule(schedule, None)
    done, left = list[str](), dict[str, str]()
    for name, layer in model.named_modules():
        compute: Callable[..., Any]
        if isinstance(layer, ColumnParallelLinear):
            reason, method, compute = _why_not_column(layer), "_forward_impl", _column
        elif isinstance(layer, RowParallelLinear):
            reason, method, compute = _why_not_row(layer), "forward", _row
        else:
            continue
        if reason is not None:
            left[name] = reason
        else:
            # An instance's attribute, in the place of the class's method.
            layer.__dict__[method] = partial(compute, layer, schedule)
            done.append(name)
    if not done and not left:
        raise ValueError("model has no ColumnParallelLinear or RowParallelLinear of Megatron-core")
    return Applied(tuple(done), left)


def remove(model: torch.nn.Module) -> None:
    """Let Megatron compute all layers of a model again."""
    for layer in model.modules():
        for method, compute in (("_forward_impl", _column), ("forward", _row)):
            found = layer.__dict__.get(method)
            if isinstance(found, partial) and found.func is compute:
                del layer.__dict__[method]


class MainGrad(torch.autograd.Function):
    """A weight whose gradient is added to its ``main_grad``, as with Megatron's ``gradient_accumulation_fusion``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """The weight."""
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        """Add the gradient. Megatron's hooks want a tensor where they note that this was done."""
        weight = ctx.weight
        weight.main_grad.add_(grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(grad) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(grad)


def _weight(layer: Any, weight: Tensor) -> Tensor:
    to_main_grad: Callable[[Tensor], Tensor] = MainGrad.apply
    return to_main_grad(weight) if layer.gradient_accumulation_fusion else weight


def _why_not(layer: Any) -> str | None:
    if layer.tp_group.size() == 1:
        return "its group has one rank"
    if layer.explicit_expert_comm:
        return "it is part of an expert, whose communication is explicit"
    if layer.config.cpu_offloading:
        return "cpu_offloading is on"
    if layer.gradient_accumulation_fusion and hasattr(layer.weight, "__fsdp_param__"):
        return "Megatron-FSDP makes main_grad in the backward pass"
    return None


def _why_not_column(layer: Any) -> str | None:
    if not layer.sequence_parallel:
        return "sequence_parallel is off, so nothing is gathered"
    if layer.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute is on"
    return _why_not(layer)


def _why_not_row(layer: Any) -> str | None:
    if not layer.input_is_parallel:
        return "input_is_parallel is off"
    return _why_not(layer)


def _column(layer: Any, schedule: str, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    found: Tensor = all_gather_matmul(input, _weight(layer, weight), bias=bias, group=layer.tp_group, schedule=schedule)
    return found


def _row(layer: Any, schedule: str, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    compute: Callable[..., Tensor] = matmul_reduce_scatter if layer.sequence_parallel else matmul_all_reduce
    output = compute(input_, _weight(layer, layer.weight), group=layer.tp_group, schedule=schedule)
    # Not a bias of the call: Megatron sums the bias's gradient over ranks with sequence parallelism.
    if layer.skip_bias_add or layer.bias is None:
        return output, layer.bias if layer.skip_bias_add else None
    return output + layer.bias, None
