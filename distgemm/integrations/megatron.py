"""Megatron-core's tensor-parallel linears, computed by distgemm.

:func:`apply` changes the ``ColumnParallelLinear`` and ``RowParallelLinear`` of a model in place. Parameters,
checkpoints and optimizers stay Megatron's. :func:`sharded_state_dict` lets Megatron's ``dist_checkpointing`` save and
load a model with layers or styles of :mod:`distgemm.nn`. Written for megatron-core 0.16.1, and tested with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from distgemm.integrations.layers import Applied, Replaced, replace, restore, with_bias
from distgemm.nn.state import megatron_sharded_state_dict as sharded_state_dict
from distgemm.torch_ops.functional import (
    all_gather_matmul,
    autocast,
    group_name,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from distgemm.torch_ops.library import gather

__all__ = ["AddedToMainGrad", "apply", "remove", "sharded_state_dict"]

Tensor = torch.Tensor
Function = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
FUNCTIONS: dict[Function, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}


def apply(model: torch.nn.Module, schedule: str = "auto") -> Applied:
    """Let distgemm compute the tensor-parallel linears of a model.

    With sequence parallelism a column-parallel layer is an :func:`distgemm.all_gather_matmul`, and a row-parallel layer
    a :func:`distgemm.matmul_reduce_scatter`, forward and backward. Without, a row-parallel layer is a
    :func:`distgemm.matmul_all_reduce`. All ranks call this for the same model. Where Megatron turns
    ``sequence_parallel`` of a column-parallel layer off, as in inference, its own product runs.

    With ``gradient_accumulation_fusion`` the gradient of a weight is added to ``weight.main_grad``, in the dtype of
    ``main_grad`` and without rounding before.

    Args:
        model: a model that Megatron has built.
        schedule: as in :func:`distgemm.all_gather_matmul`. A named one is for a model whose layers are all
            column-parallel, or all row-parallel. Others take "auto" or "unfused". If ``sequence_parallel`` of a
            layer changes later, only a call finds that the schedule does not fit.

    Returns:
        The layers that distgemm computes, and why others are left.

    Raises:
        ValueError: if there is no such schedule, if it does not compute each of the layers, or if the model has no
            tensor-parallel linear.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    def find(layer: Any) -> Replaced | str | None:
        if isinstance(layer, ColumnParallelLinear):
            return _why_not_column(layer) or Replaced("_forward_impl", _column, "ag+gemm")
        if isinstance(layer, RowParallelLinear):
            return _why_not_row(layer) or Replaced("forward", _row, "gemm+rs" if layer.sequence_parallel else "gemm+ar")
        return None

    return replace(model, find, "ColumnParallelLinear or RowParallelLinear of Megatron-core", schedule)


def remove(model: torch.nn.Module) -> None:
    """Let Megatron compute all layers of a model again."""
    restore(model)


class AddedToMainGrad(torch.autograd.Function):
    """A product whose weight gradient is added to ``weight.main_grad`` (Megatron's gradient_accumulation_fusion)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, function: Function, group: str, schedule: str) -> Tensor:
        """The product.

        Args:
            ctx: autograd's.
            x: the input, as ``function`` takes it.
            weight: (out_features of this rank, in_features of this rank), with an attribute ``main_grad``.
            function: which function of distgemm computes it.
            group: name of the group.
            schedule: of the forward pass.
        """
        x, cast = autocast(x), autocast(weight)
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.function, ctx.group = weight, function, group
        found: Tensor = FUNCTIONS[function](x, cast, group=group, schedule=schedule)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """The gradient of the input. Megatron's hooks want a tensor where they note that a gradient was added."""
        (x, cast), (wants_a, wants_b) = ctx.saved_tensors, ctx.needs_input_grad[:2]
        gathers = ctx.function == "all_gather_matmul"
        da: Tensor | None = None
        if ctx.function == "matmul_reduce_scatter":
            da, grad = all_gather_matmul(grad, cast.t(), group=ctx.group, return_gathered=True)
        elif wants_a:
            da = matmul_reduce_scatter(grad, cast.t(), group=ctx.group) if gathers else grad @ cast
        weight = ctx.weight
        if not wants_b:
            return da, None, None, None, None
        a = gather(x.flatten(0, -2), ctx.group, None) if gathers else x.flatten(0, -2)
        _add_product(weight.main_grad, grad.flatten(0, -2).t(), a)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return da, None, None, None, None
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        return da, torch.zeros_like(weight) if zero else torch.empty_like(weight), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a sum, in the sum's dtype."""
    if a.is_cuda and total.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        total.add_(torch.mm(a, b, out_dtype=torch.float32))  # CPUs have no such product
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


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


def _product(
    layer: Any, function: Function, x: Tensor, weight: Tensor, schedule: str, bias: Tensor | None = None
) -> Tensor:
    if not layer.gradient_accumulation_fusion:
        found: Tensor = FUNCTIONS[function](x, weight, group=layer.tp_group, bias=bias, schedule=schedule)
        return found
    add: Callable[..., Tensor] = AddedToMainGrad.apply
    found = add(x, weight, function, group_name(layer.tp_group), schedule)
    return found if bias is None else found + bias


def _column(layer: Any, schedule: str, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    if not options["sequence_parallel"]:  # Megatron turns it off for calls of inference: the input has all tokens
        found: Tensor = type(layer)._forward_impl(layer, input, weight, bias=bias, **options)
        return found
    return _product(layer, "all_gather_matmul", input, weight, schedule, bias=bias)


def _row(layer: Any, schedule: str, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    function: Function = "matmul_reduce_scatter" if layer.sequence_parallel else "matmul_all_reduce"
    # Not a bias of the call: with sequence parallelism Megatron sums the bias's gradient over ranks.
    return with_bias(layer, _product(layer, function, input_, layer.weight, schedule))
