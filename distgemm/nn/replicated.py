"""A column-parallel Linear whose input every rank has whole."""

from __future__ import annotations

from typing import Any

import torch

from distgemm.fp8 import LayerState
from distgemm.fp8.layer import Split
from distgemm.torch_ops import matmul_all_reduce
from distgemm.torch_ops.functional import autocast
from distgemm.torch_ops.library import without_gradient
from distgemm.torch_ops.quantized import rank_linear

__all__ = ["linear_of_replicated"]

Tensor = torch.Tensor


def linear_of_replicated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    out_features: int | None,
    recipe: LayerState | None = None,
) -> Tensor:
    """This rank's features of all tokens. The gradient of x is a GEMM + all-reduce.

    The unfused program is ``torch.nn.functional.linear(x, weight, bias)``; in the backward pass, the gradient of x is
    summed over the ranks.

    Args:
        x: (tokens, ..., in_features), the same on all ranks.
        weight: (out_features of this rank, in_features).
        bias: (out_features of this rank,) or None.
        group: name of the group.
        out_features: over all ranks, if ranks have different shares; otherwise None.
        recipe: the state of a layer with a recipe.

    Returns:
        (tokens, ..., out_features of this rank).
    """
    if x.dim() == 1:  # one token, as nn.Linear takes it
        return linear_of_replicated(x.unsqueeze(0), weight, bias, group, out_features, recipe).squeeze(0)
    linear: Any = distgemm_linear_of_replicated.apply
    cast = None if bias is None else autocast(bias)
    if recipe is not None:
        split, options = Split(None, 0, 1), {"rows": None, "features": out_features}
        y = rank_linear(autocast(x).flatten(0, -2), autocast(weight), cast, recipe, split, group, **options)
        return y.view(*x.shape[:-1], y.shape[-1])
    found: Tensor = linear(autocast(x), autocast(weight), cast, group, out_features)
    return found


class distgemm_linear_of_replicated(torch.autograd.Function):  # noqa: N801  (it names the nodes of autograd's graph)
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, out_features: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.out_features = group, out_features
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if wants_x and not x.numel():  # an all-reduce has at least one token
            dx = torch.zeros_like(x)
        elif wants_x:
            dx = matmul_all_reduce(dy, weight.t(), group=ctx.group, in_features=ctx.out_features)
        rows = dy.flatten(0, -2)
        if wants_weight:
            dw = rows.t() @ without_gradient(x).flatten(0, -2)
        if wants_bias:
            db = rows.sum(0)
        return dx, dw, db, None, None
