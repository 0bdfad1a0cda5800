"""Products over the ranks of a group in fp8: of tensors in fp8, and of layers with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor  # noqa: PLC2701  (torch has no public name)

from distgemm.fp8.layer import Exchange, Split, linear_over, multiply
from distgemm.fp8.quantize import Quantized, amax_of, quantize_with, spans
from distgemm.fp8.recipe import Recipe
from distgemm.fp8.state import LayerState
from distgemm.plan.scaling import OperandScaling, Scaling
from distgemm.runtime.checks import compare, process_group
from distgemm.runtime.groups import PerGroup, raise_if_failed
from distgemm.schedulers import Pattern
from distgemm.torch_ops import library
from distgemm.torch_ops.library import split_extent
from distgemm.torch_ops.needs import recording

__all__ = ["RankExchange", "all_reduced", "as_quantized", "gather_products", "product_of", "rank_linear", "ranks_of"]

Tensor = torch.Tensor
COLLECTIVES: Any = torch.ops._c10d_functional
"""The collectives that torch.compile knows, by the name of a group."""
_COMPARED: PerGroup[set[tuple[Recipe, Split]]] = PerGroup(set)
"""The recipes that the ranks of each group have in common."""


class RankExchange(Exchange):
    """What the three GEMMs of a layer need from the ranks of a group.

    Args:
        split: how the tensors of the layer are split over the ranks.
        group: name of the group.
        rows: tokens of each rank, where they are split; None: as many on each.
        features: the extent over all ranks of the dimension of the weight that is split; None: as much on each.
        schedule: of the forward pass.
        chunks: of the forward pass.
        keeps_gathered: whether the gathered codes of the forward pass are kept for the gradient of the weight.
    """

    def __init__(
        self,
        split: Split,
        group: str,
        rows: Sequence[int] | None,
        features: int | None,
        schedule: str = "auto",
        chunks: int | None = None,
        keeps_gathered: bool = False,
    ) -> None:
        self.split, self.group_name, self.rows, self.features = split, group, rows, features
        self.schedule, self.chunks = schedule, chunks
        self.ranks, self.keeps_gathered = ranks_of(group), keeps_gathered

    def check_recipe(self, recipe: Recipe, state: LayerState | None, x: Tensor) -> None:
        """Raise ValueError on all ranks if they call a layer with different recipes, or with different static states.

        On GPUs only the first call of a recipe is collective: later ones may be captured. On CPUs each call is, as
        those of executables are. Calls that are compiled, or first captured, are not compared.
        """
        if recording() or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
            return
        group = process_group(self.group_name)
        raise_if_failed(group)
        compared, key = _COMPARED.of(group), (recipe, self.split)
        if x.is_cuda and (key in compared or torch.cuda.is_current_stream_capturing()):
            return
        fields: dict[str, Any] = {"call": f"a layer in fp8, split as {tuple(self.split)}", "recipe": recipe}
        if state is not None and recipe.amax == "static":
            fields["largest magnitudes of x, w and dy"] = state.history[:, 0].tolist()
        compare(fields, group, x.device)
        compared.add(key)

    def quantize(
        self,
        x: Tensor,
        scaling: OperandScaling,
        dtype: torch.dtype,
        split: int | None,
        amax: Tensor | None,
        recipe: Recipe,
    ) -> Quantized:
        """An operand in fp8. Its largest magnitudes are all-reduced if the scales are those of all shards."""
        if amax is None:
            amax = amax_of(x, scaling)
            if scaling.scope == "global" and spans(scaling, split):
                amax = self.reduce_max(amax)
        return quantize_with(amax, x, scaling, dtype, power_of_two=recipe.power_of_two)

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
        """A · Bᵀ over the ranks, by the plan of a pattern; and all of A, or None."""
        split_a, split_b, split_d = splits
        pattern: Pattern
        if split_a == 1 and split_b == 1:
            pattern = "gemm+rs" if split_d == 0 else "gemm+ar"
        elif split_a == 0 and split_b == 0:
            pattern = "ag+gemm"
        else:
            return multiply(a, b, dtype), None
        options: dict[str, Any] = {"rows": self.rows, "whole": self.features, "partial_dtype": recipe.partial_dtype}
        if forward:
            options |= {"schedule": self.schedule, "chunks": self.chunks}
            keep = self.keeps_gathered
        # A rank without rows of B receives nothing.
        keep = keep and pattern == "ag+gemm" and (self.features is None or all(split_extent(self.features, self.ranks)))
        found = product_of(pattern, a, b, None, self.group_name, dtype, gathered=keep, **options)
        return found[0], whole_scales(a, found[1], self.group_name, self.rows) if keep else None

    def whole(self, x: Tensor | Quantized, split: int | None) -> Any:
        """All columns of an operand, which are the tokens of all ranks."""
        if split != 1:
            return x
        if isinstance(x, Quantized):
            return gather_quantized(x.t(), self.group_name, self.rows).t()
        return library.gather(x.t(), self.group_name, self.rows).t()

    def sum(self, x: Tensor, split: int | None) -> Tensor:
        """The sum over ranks of what each has computed from its tokens."""
        return all_reduced(x, "sum", self.group_name) if split == 0 else x

    def reduce_max(self, x: Tensor) -> Tensor:
        """The maximum over ranks."""
        return all_reduced(x, "max", self.group_name)


def gather_quantized(q: Quantized, group: str, rows: Sequence[int] | None) -> Quantized:
    """All rows of a matrix in fp8, of which each rank has some: codes by a plan, scales by a collective.

    Args:
        q: this rank's rows.
        group: name of the group.
        rows: rows of each rank; None: as many on each.

    Raises:
        ValueError: if a shard begins in the middle of a block.
    """
    # As torch_ops.library.gather: plans gather only for a GEMM, here one with a few rows of zeros.
    b = torch.zeros(library.GATHER_ROWS, q.codes.shape[1], device=q.codes.device).to(q.codes.dtype)
    _, codes = library.scaled_matmul(
        q.codes, b, None, None, None, "ag+gemm", "", group, "auto", None, rows, None, torch.bfloat16, None, True
    )
    return whole_scales(q, codes, group, rows)


def whole_scales(q: Quantized, codes: Tensor, group: str, rows: Sequence[int] | None) -> Quantized:
    """A matrix in fp8 from its gathered codes and this rank's rows: the scales of all ranks."""
    size, scaling = ranks_of(group), q.scaling
    shares = list(rows) if rows is not None else [q.codes.shape[0]] * size
    if scaling.rows is None and scaling.scope == "global":
        return Quantized(codes, q.scales, scaling)
    if scaling.rows is None:  # a scale for the rows of each rank
        scales = _gathered(q.scales, [1] * size, group)
        counts = torch.tensor(shares, device=scales.device)
        scales = scales.repeat_interleave(counts, 0, output_size=sum(shares))
        return Quantized(codes, scales, OperandScaling(1, scaling.columns))
    library.check_blocks("all_gather_matmul", "tokens", shares, scaling.rows)
    return Quantized(codes, _gathered(q.scales, [-(-share // scaling.rows) for share in shares], group), scaling)


def _gathered(x: Tensor, shares: Sequence[int], group: str) -> Tensor:
    """The rows of all ranks."""
    most = max(shares)
    padded = torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[0]))
    if recording():
        return x.new_empty(sum(shares), x.shape[1])
    found = COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(padded.contiguous(), len(shares), group))
    parts = found.view(len(shares), most, x.shape[1])
    return torch.cat([each[:share] for each, share in zip(parts, shares, strict=True)])


def all_reduced(x: Tensor, how: str, group: str) -> Tensor:
    """The "sum" or the "max" over ranks."""
    if recording():
        return x
    found: Tensor = COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x, how, group))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # a graph holds for one number of ranks
def ranks_of(group: str) -> int:
    """The number of ranks of a group."""
    return process_group(group).size()


# --- what the functions call ----------------------------------------------------------------------------


def as_quantized(x: Any) -> Quantized | None:
    """A tensor in fp8 as the functions take it: a Quantized, or a tensor of torchao; None for others.

    A Float8TrainingTensor of torchao has the codes in ``_data``, and in ``_scale`` the number that the elements were
    multiplied by: one, or one for each row.

    Raises:
        ValueError: for a tensor of torchao with one scale for each column.
    """
    if isinstance(x, Quantized):
        return x
    if type(x).__name__ != "Float8TrainingTensor":
        return None
    codes, scales = x._data.flatten(0, -2), x._scale.float().reciprocal()
    if scales.numel() == 1:
        return Quantized(codes, scales.view(1, 1), OperandScaling(None, None, "shard"))
    if scales.shape[-1] != 1:
        raise ValueError(
            f"a Float8TrainingTensor of shape {tuple(x.shape)} has scales of shape {tuple(scales.shape)}: one for each "
            "column, along which the product sums. Scale it with axiswise_dim=-1"
        )
    return Quantized(codes, scales.reshape(-1, 1), OperandScaling(1, None, "shard"))


def rank_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Any, split: Split, group: str, **options: Any
) -> Tensor:
    """A layer with a recipe, over the ranks of a group. The options are those of :class:`RankExchange`."""
    return linear_over(RankExchange(split, group, **options), x, w, bias, recipe)


def product_of(
    pattern: Pattern,
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    *,
    schedule: str = "auto",
    chunks: int | None = None,
    rows: Sequence[int] | None = None,
    whole: int | None = None,
    partial_dtype: torch.dtype | None = None,
    gathered: bool = False,
) -> list[Tensor]:
    """A product of a pattern; with ``gathered`` also the codes of all of A. Arguments as of ``library._ScaledCall``."""
    name = library.scaling_name(Scaling(a.scaling, b.scaling))
    operands = a.codes, b.codes, a.scales, b.scales, bias
    if pattern == "gemm+ar":
        rows = None
    terms = schedule, chunks, rows, whole, out_dtype, partial_dtype, gathered
    found: list[Tensor] = library.scaled_matmul(*operands, pattern, name, group, *terms)
    return found


def gather_products(
    a: Quantized,
    bs: Sequence[Quantized],
    biases: Sequence[Tensor | None],
    group: str,
    out_dtype: torch.dtype,
    rows: Sequence[int] | None,
    ns: Sequence[int] | None,
    gathered: bool,
    **options: Any,
) -> tuple[list[Tensor], Quantized | None]:
    """All of A times each B, and the gathered A. The product with the largest B overlaps with the gather."""
    size = ranks_of(group)
    wholes = list(ns) if ns is not None else [b.codes.shape[0] * size for b in bs]
    first = library.largest(wholes, size)
    needs = gathered or len(bs) > 1
    whole_n = None if ns is None else ns[first]
    options |= {"rows": rows, "whole": whole_n, "gathered": needs}
    made = product_of("ag+gemm", a, bs[first], biases[first], group, out_dtype, **options)
    if not needs:
        return made, None
    whole = whole_scales(a, made[1], group, rows)
    found = []
    for index, (b, bias) in enumerate(zip(bs, biases, strict=True)):
        if index == first:
            found.append(made[0])
        else:
            d = multiply(whole, b, out_dtype)
            found.append(d if bias is None else d.add_(bias))
    return found, whole
