"""Recipes: which tensors of a linear layer are quantised, how, and with which scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from distgemm.arguments import boolean, instance, integer, member, wrong
from distgemm.fp8.quantize import FP8_DTYPES
from distgemm.plan.scaling import OperandScaling, ScalingScope
from distgemm.runtime.torch_arguments import read_dtype

__all__ = ["RECIPES", "Amax", "Recipe", "read_recipe", "recipe"]

Amax = Literal["current", "delayed", "static"]
"""Where the largest magnitudes come from. ``"current"``: from the tensor itself. ``"delayed"``: from the tensors of the
steps before. ``"static"``: from numbers that are set once."""

Scalings = tuple[OperandScaling, OperandScaling]


@dataclass(frozen=True)
class Recipe:
    """How a linear layer computes in fp8: the scalings of the operands of its three GEMMs.

    The layer is Y = X · Wᵀ. All operands are in the form A · Bᵀ, so that k is the second dimension of both.

    Attributes:
        forward: the scalings of X and W in Y = X · Wᵀ.
        grad_input: the scalings of dY and Wᵀ in dX = dY · (Wᵀ)ᵀ.
        grad_weight: the scalings of dYᵀ and Xᵀ in dW = dYᵀ · (Xᵀ)ᵀ; None: dW is computed in the type of X and dY.
        dtype: type of the codes of X and W.
        grad_dtype: type of the codes of dY.
        amax: where the largest magnitudes come from. "delayed" and "static" are for one scale for the whole tensor on
            all ranks, and need the layer's :class:`distgemm.fp8.LayerState`.
        history: number of steps of "delayed" whose largest magnitudes count.
        power_of_two: as in :func:`distgemm.fp8.quantize`.
        partial_dtype: type of the partial sums that travel between ranks; None: the type of the result.

    Raises:
        ValueError: for other types, and for "delayed" or "static" with several scales for a tensor.
    """

    forward: Scalings
    grad_input: Scalings
    grad_weight: Scalings | None
    dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e5m2
    amax: Amax = "current"
    history: int = 16
    power_of_two: bool = False
    partial_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "grad_input", "grad_weight"):
            pair = getattr(self, name)
            if pair is None and name == "grad_weight":
                continue
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(p, OperandScaling) for p in pair)):
                raise wrong(f"Recipe: {name}", "a pair of OperandScaling", pair)
        read_dtype("Recipe: dtype", self.dtype, FP8_DTYPES)
        read_dtype("Recipe: grad_dtype", self.grad_dtype, FP8_DTYPES)
        member("Recipe: amax", self.amax, get_args(Amax))
        integer("Recipe: history", self.history)
        boolean("Recipe: power_of_two", self.power_of_two)
        if self.partial_dtype is not None:
            read_dtype("Recipe: partial_dtype", self.partial_dtype, (torch.float32, torch.bfloat16, torch.float16))
        whole = OperandScaling(None, None, scope="global")
        if self.amax != "current" and any(scaling != whole for scaling in self.scalings):
            raise ValueError(
                f"Recipe: amax={self.amax!r} is for one scale for the whole tensor on all ranks, as in "
                f"recipe('tensorwise_{self.amax}'), got {self.scalings}"
            )

    @property
    def scalings(self) -> tuple[OperandScaling, ...]:
        """The scalings of all operands."""
        return self.forward + self.grad_input + (self.grad_weight or ())

    def with_scope(self, scope: ScalingScope) -> Recipe:
        """The same recipe with another scope of scales."""

        def scoped(pair: Scalings) -> Scalings:
            return replace(pair[0], scope=scope), replace(pair[1], scope=scope)

        gw = None if self.grad_weight is None else scoped(self.grad_weight)
        return replace(self, forward=scoped(self.forward), grad_input=scoped(self.grad_input), grad_weight=gw)


def _recipes(block: int) -> dict[str, Recipe]:
    tensor, row = OperandScaling(None, None), OperandScaling(1, None)
    part, square = OperandScaling(1, block), OperandScaling(block, block)
    rowwise: dict[str, Any] = {"grad_dtype": torch.float8_e4m3fn, "power_of_two": True}
    tensorwise = Recipe((tensor, tensor), (tensor, tensor), (tensor, tensor))
    return {
        "tensorwise": tensorwise,
        "tensorwise_delayed": replace(tensorwise, amax="delayed"),
        "tensorwise_static": replace(tensorwise, amax="static"),
        "rowwise": Recipe((row, row), (row, row), (row, row), **rowwise),
        "rowwise_with_gw_hp": Recipe((row, row), (row, tensor), None, **rowwise),
        "blockwise": Recipe((part, square), (part, square), (part, part), grad_dtype=torch.float8_e4m3fn),
    }


RECIPES = tuple(_recipes(128))
"""The names of :func:`recipe`."""


def recipe(name: str, *, scope: ScalingScope = "global", block: int = 128, **fields: Any) -> Recipe:
    """A recipe by its name.

    - ``"tensorwise"``: one scale for each tensor, from the tensor itself; gradients in e5m2. It is torchao's recipe of
      this name.
    - ``"tensorwise_delayed"``: one scale for each tensor, from the tensors of the steps before.
    - ``"tensorwise_static"``: one scale for each tensor, which is set once.
    - ``"rowwise"``: one scale for each row of A and of B: for each token and each output channel. All in e4m3, scales
      are powers of two. It is torchao's recipe of this name.
    - ``"rowwise_with_gw_hp"``: the same, but dW is not computed in fp8, and W has one scale for dX. It is torchao's
      recipe of this name.
    - ``"blockwise"``: one scale for 1 x 128 elements of activations and gradients, and for 128 x 128 of weights, as in
      DeepSeek-V3. All in e4m3.

    Args:
        name: one of RECIPES.
        scope: "global": a scale is the same on all ranks. "shard": each rank uses the largest magnitude of its own
            shard, so that nothing is all-reduced.
        block: the size of blocks of "blockwise".
        **fields: other fields of :class:`Recipe`.

    Raises:
        ValueError: for another name, and for wrong fields.
    """
    integer("block", block)
    found = _recipes(block)[member("recipe", name, RECIPES)].with_scope(member("scope", scope, get_args(ScalingScope)))
    return replace(found, **fields) if fields else found


def read_recipe(name: str, value: Any) -> Recipe:
    """A recipe, from an argument that may also be its name.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str):
        return recipe(value)
    return instance(name, value, Recipe, f"a distgemm.fp8.Recipe, or one of the names {', '.join(RECIPES)}")
