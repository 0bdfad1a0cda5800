"""A linear layer in fp8, forward and backward, on one rank or over the ranks of an exchange."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses import FakeTensor  # noqa: PLC2701  (torch has no public name)
from torch.autograd.function import once_differentiable

from distgemm.arguments import integer, wrong
from distgemm.fp8.quantize import Quantized, amax_of, dequantize, quantize_with, transposed
from distgemm.fp8.recipe import Recipe, read_recipe
from distgemm.fp8.state import LayerState, Role
from distgemm.plan.scaling import OperandScaling

__all__ = ["Exchange", "Parallel", "Split", "linear", "linear_over", "multiply"]

Tensor = torch.Tensor
Parallel = Literal["column", "row"]


class Split(NamedTuple):
    """The dimension along which each tensor of a layer is split over the ranks; None: every rank has all of it.

    Attributes:
        x: the input, (tokens, in_features).
        w: the weight, (out_features, in_features).
        y: the output and its gradient, (tokens, out_features).
    """

    x: int | None
    w: int | None
    y: int | None


SCALED_MM_MULTIPLE = 16
"""``torch._scaled_mm`` takes k and n that are multiples of it."""
WHOLE = Split(None, None, None)
SPLITS: dict[Parallel, Split] = {"column": Split(0, 0, 1), "row": Split(1, 1, 0)}


def turned(split: int | None) -> int | None:
    """The dimension of the transposed tensor."""
    return None if split is None else 1 - split


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """A · Bᵀ on one rank.

    On CPUs, the dequantised operands are multiplied in float32, or in float64 if that is the result's type. On GPUs it
    is ``torch._scaled_mm``, and :func:`distgemm.gemm.gemm` where blocks have scales, or k or n is no multiple of 16.

    Args:
        a: (m, k).
        b: (n, k).
        dtype: type of the result.

    Raises:
        ValueError: on GPUs, for scales that no kernel has.
    """
    from distgemm.gemm import gemm  # imported here so that layers can be made without the GPU code
    from distgemm.gemm.spec import SCALE_BLOCK

    if not a.codes.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast("cpu", enabled=False):
            return (dequantize(a, wide) @ dequantize(b, wide).t()).to(dtype)
    pair = tuple((each.scaling.rows, each.scaling.columns) for each in (a, b))
    in_blocks = all(columns == SCALE_BLOCK and rows in (1, SCALE_BLOCK) for rows, columns in pair)
    if not in_blocks and not all(columns is None and rows in (1, None) for rows, columns in pair):
        raise ValueError(
            "on GPUs, scales are of tensors, rows, or 1x128 and 128x128 blocks of both operands, got rows and "
            f"columns {pair}"
        )
    shape = a.codes.shape[0], b.codes.shape[0]
    if isinstance(a.codes, FakeTensor):  # a trace, for which only shapes count
        return a.codes.new_empty(shape, dtype=dtype)
    if not a.codes.numel():  # no tokens: kernels take none
        return a.codes.new_zeros(shape, dtype=dtype)
    codes = a.codes.contiguous(), b.codes.contiguous()
    if in_blocks:
        block_rows = (pair[0][0] or 0, pair[1][0] or 0)
        return gemm(
            *codes, codes[0].new_empty(shape, dtype=dtype), scale_a=a.scales, scale_b=b.scales, block_rows=block_rows
        )
    if pair[0] != pair[1]:  # a scale of the whole tensor is the scale of each row
        a, b = _with_scales_of_rows(a), _with_scales_of_rows(b)
    if any(extent % SCALED_MM_MULTIPLE for extent in b.codes.shape):
        out = codes[0].new_empty(shape, dtype=dtype)
        return gemm(*codes, out, scale_a=a.scales.flatten(), scale_b=b.scales.flatten())
    found: Tensor = torch._scaled_mm(codes[0], codes[1].t(), a.scales, b.scales.t().contiguous(), out_dtype=dtype)
    return found


def _with_scales_of_rows(q: Quantized) -> Quantized:
    return Quantized(q.codes, q.scales.expand(q.codes.shape[0], 1).contiguous(), OperandScaling(1, None))


class Exchange:
    """What the three GEMMs of a layer need from other ranks. This one is of a layer that is whole on one rank.

    Args:
        split: how the layer would be split over ``ranks``.
        ranks: scales with ``scope="shard"`` are those that so many ranks would have.
    """

    def __init__(self, split: Split = WHOLE, ranks: int = 1) -> None:
        self.split, self.ranks = split, ranks

    def quantize(
        self,
        x: Tensor,
        scaling: OperandScaling,
        dtype: torch.dtype,
        split: int | None,
        amax: Tensor | None,
        recipe: Recipe,
    ) -> Quantized:
        """An operand in fp8.

        Args:
            x: the operand, (rows, columns).
            scaling: its scaling.
            dtype: type of the codes.
            split: the dimension along which it is split.
            amax: its largest magnitude; None: from the operand.
            recipe: the recipe of the layer.
        """
        options: dict[str, Any] = {"power_of_two": recipe.power_of_two}
        if self.ranks > 1 and split is not None and scaling.scope == "shard":
            # As many ranks quantise it. Each element gets its scale, because shards begin in the middle of blocks.
            parts = []
            for shard in x.chunk(self.ranks, split):
                q = quantize_with(amax_of(shard, scaling) if amax is None else amax, shard, scaling, dtype, **options)
                ones = torch.ones_like(shard, dtype=torch.float32)
                parts.append((q.codes, dequantize(Quantized(ones, q.scales, scaling))))
            codes, scales = (torch.cat(each, split) for each in zip(*parts, strict=True))
            return Quantized(codes, scales, OperandScaling(1, 1))
        return quantize_with(amax_of(x, scaling) if amax is None else amax, x, scaling, dtype, **options)

    def check_recipe(self, recipe: Recipe, state: LayerState | None, x: Tensor) -> None:
        """Raise ValueError on all ranks if they call a layer with different recipes, or with different static states.

        ``x`` is the layer's input.
        """

    def product(
        self,
        a: Quantized,
        b: Quantized,
        splits: tuple[int | None, int | None, int | None],
        dtype: torch.dtype,
        recipe: Recipe,
        *,
        forward: bool = False,
        keep: bool = False,
    ) -> tuple[Tensor, Quantized | None]:
        """A · Bᵀ over the ranks, without a bias; and all of A, or None.

        Args:
            a: (m, k).
            b: (n, k).
            splits: the dimensions along which A, B and the result are split.
            dtype: type of the result.
            recipe: the recipe of the layer.
            forward: whether it is the output of the layer, and not a gradient.
            keep: whether all of A is returned, if it is gathered here.
        """
        return multiply(a, b, dtype), None

    def whole(self, x: Tensor | Quantized, split: int | None) -> Any:
        """All of an operand, (rows, columns), of which each rank has some columns if ``split`` is 1."""
        return x

    def reduce_max(self, x: Tensor) -> Tensor:
        """The maximum over ranks."""
        return x

    def sum(self, x: Tensor, split: int | None) -> Tensor:
        """The sum over ranks of a vector, if each rank has a part of it: of the tokens that are split along 0."""
        return x


class distgemm_fp8_linear(torch.autograd.Function):  # noqa: N801  (it names the nodes of autograd's graph)
    """Y = X · Wᵀ + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        exchange: Exchange,
        recipe: Recipe,
        state: LayerState | None,
        records: bool,
    ) -> Tensor:
        layer = _Layer(exchange, recipe, state, records)
        split = exchange.split
        qx = layer.quantized("x", x, recipe.forward[0], split.x)
        qw = layer.weight(w, recipe.forward[1], split.w)
        y, whole = exchange.product(qx, qw, (split.x, split.w, split.y), x.dtype, recipe, forward=True)
        ctx.layer, ctx.biased = layer, bias is not None
        # Codes instead of the tensor, where the backward pass has use for them.
        ctx.codes = {
            "x": recipe.grad_weight is not None and recipe.grad_weight[1] == transposed(qx.scaling),
            "w": recipe.grad_input[1] == transposed(qw.scaling),
        }
        # A frozen weight has no use for x, and an input without a gradient none for w.
        needs_w, needs_x, *_ = ctx.needs_input_grad
        kept: list[Tensor | None] = []
        for role, given, q, needed in (("x", x, qx, needs_x), ("w", w, qw, needs_w)):
            kept += (None, None) if not needed else (q.codes, q.scales) if ctx.codes[role] else (given, given)
        if whole is not None and needs_x:  # saved as others are, so that it lives until the backward pass
            kept += (whole.codes, whole.scales)
            ctx.gathered = whole.scaling
        ctx.save_for_backward(*kept)
        ctx.dtypes = x.dtype, w.dtype
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        layer: _Layer = ctx.layer
        exchange, recipe, split = layer.exchange, layer.recipe, layer.exchange.split
        x, x_scales, w, w_scales, *gathered = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        qdy: Quantized | None = None
        whole_dy: Quantized | None = None
        if wants_x:
            scaling_dy, scaling_w = recipe.grad_input
            qdy = layer.quantized("dy", dy, scaling_dy, split.y)
            if ctx.codes["w"]:
                qw = Quantized(w, w_scales, recipe.forward[1]).t()
            else:
                qw = layer.weight(w.t(), scaling_w, turned(split.w), is_transposed=True)
            # The gathered codes also serve the gradient of the weight if it takes the same.
            keep = wants_w and recipe.grad_weight is not None and recipe.grad_weight[0] == transposed(scaling_dy)
            dx, whole_dy = exchange.product(qdy, qw, (split.y, turned(split.w), split.x), x_dtype, recipe, keep=keep)
        if wants_w and recipe.grad_weight is None:
            dw = (exchange.whole(dy.t(), turned(split.y)) @ exchange.whole(x.t(), turned(split.x)).t()).to(w_dtype)
        elif wants_w and recipe.grad_weight is not None:
            scaling_dy, scaling_x = recipe.grad_weight
            if qdy is not None and scaling_dy == transposed(qdy.scaling):
                qdyt = qdy.t()
            else:
                qdyt = layer.quantized("dy", dy.t(), scaling_dy, turned(split.y))
            if ctx.codes["x"]:
                qxt = Quantized(x, x_scales, recipe.forward[0]).t()
            else:
                qxt = layer.quantized("x", x.t(), scaling_x, turned(split.x))
            dyt = exchange.whole(qdyt, turned(split.y)) if whole_dy is None else whole_dy.t()
            xt = (
                Quantized(gathered[0], gathered[1], ctx.gathered).t()
                if gathered
                else exchange.whole(qxt, turned(split.x))
            )
            dw = multiply(dyt, xt, w_dtype)
        if ctx.biased and wants_bias:
            dbias = exchange.sum(dy.sum(0), split.y)
        layer.finish()
        return dx, dw, dbias, None, None, None, None


class _Layer(NamedTuple):
    """What quantises the tensors of a layer."""

    exchange: Exchange
    recipe: Recipe
    state: LayerState | None
    records: bool
    """Whether there will be a backward pass, at whose end the history moves on."""

    def quantized(self, role: Role, x: Tensor, scaling: OperandScaling, split: int | None) -> Quantized:
        """An operand in fp8, with the scales that the recipe says."""
        dtype = self.recipe.grad_dtype if role == "dy" else self.recipe.dtype
        amax = None if self.state is None else self.state.amax(role)
        if self.state is not None and self.records and self.recipe.amax == "delayed":
            self.state.note(role, amax_of(x, scaling))
        return self.exchange.quantize(x, scaling, dtype, split, amax, self.recipe)

    def weight(self, w: Tensor, scaling: OperandScaling, split: int | None, is_transposed: bool = False) -> Quantized:
        """The weight in fp8, or its transpose."""

        def make() -> Quantized:
            return self.quantized("w", w, scaling, split)

        return make() if self.state is None else self.state.weight(is_transposed, make)

    def finish(self) -> None:
        """The end of a backward pass."""
        if self.state is not None:
            self.state.advance(self.exchange.reduce_max)


def linear_over(
    exchange: Exchange, x: Tensor, w: Tensor, bias: Tensor | None, given: Recipe | LayerState | str
) -> Tensor:
    """The linear layer of an exchange, for matrices.

    Args:
        exchange: what it needs from other ranks.
        x: (tokens, in_features).
        w: (out_features, in_features).
        bias: (out_features,).
        given: its recipe, the recipe's name, or a state that has the recipe.
    """
    state = given if isinstance(given, LayerState) else None
    recipe = read_recipe("recipe", given) if state is None else state.recipe
    if recipe.amax != "current" and state is None:
        raise ValueError(
            f"a recipe with amax={recipe.amax!r} keeps largest magnitudes between calls: "
            "recipe=distgemm.fp8.LayerState(recipe), one for each layer"
        )
    if state is not None:
        state.check_device(x.device)
    exchange.check_recipe(recipe, state, x)
    records = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w, bias))
    terms = exchange, recipe, state, records
    found: Tensor = distgemm_fp8_linear.apply(x, w, bias, *terms)  # type: ignore[no-untyped-call]
    return found


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | LayerState | str,
    parallel: Parallel | None = None,
    ranks: int = 1,
) -> Tensor:
    """``torch.nn.functional.linear`` in fp8 on one rank, with gradients.

    It is the reference of the functions over ranks: :func:`distgemm.all_gather_matmul` is the layer with
    ``parallel="column"``, :func:`distgemm.matmul_reduce_scatter` the layer with ``parallel="row"``. They differ by the
    rounding of partial sums.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).
        recipe: a recipe or its name, or a :class:`distgemm.fp8.LayerState` with it. Recipes with "delayed" and
            "static" scaling need the state of the layer.
        parallel: for recipes with ``scope="shard"``: how the layer would be split over the ranks. "column": tokens of
            the input and out_features, as torch.chunk splits them. "row": in_features, and tokens of the output.
        ranks: number of those ranks.

    Returns:
        (..., out_features), of the type of x.

    Raises:
        ValueError: for a recipe that needs a state, and wrong arguments.
    """
    integer("ranks", ranks)
    if parallel is not None and parallel not in SPLITS:
        raise wrong("parallel", "'column', 'row' or None", parallel)
    if ranks > 1 and parallel is None:
        raise wrong("parallel", f"'column' or 'row' for {ranks} ranks", parallel)
    for name, each in (("x", x), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        if not isinstance(each, Tensor) or not each.is_floating_point():
            raise wrong(name, "a tensor of a floating type", each.dtype if isinstance(each, Tensor) else each)
    if not x.dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x is (..., in_features) and weight (out_features, in_features), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias is ({weight.shape[0]},) as weight's rows, got {tuple(bias.shape)}")
    exchange = Exchange(WHOLE if parallel is None else SPLITS[parallel], ranks)
    y = linear_over(exchange, x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0), weight, bias, recipe)
    return y.view(*x.shape[:-1], y.shape[-1])
