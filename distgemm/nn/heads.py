"""Projections from tokens to heads and back, which layers and styles share: attention as in DeepSpeed Ulysses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from distgemm.arguments import MAX_EXTENT, boolean, integer
from distgemm.nn.tensors import (
    GradientCheck,
    check_sequence_dim,
    input_with_features,
    input_with_tokens,
    local,
    tokens_back,
)
from distgemm.torch_ops import all_to_all_matmul, group_name, matmul_all_to_all
from distgemm.torch_ops.functional import check_schedule
from distgemm.torch_ops.quantized import all_reduced

__all__ = ["HeadsProjection", "heads_per_rank"]

Tensor = torch.Tensor


def heads_per_rank(ranks: int, heads: int, kv_heads: int | None = None) -> tuple[list[int], int]:
    """The heads of each rank, and the number of consecutive ranks that have the same ones.

    With grouped-query attention, each rank has the heads of keys and values that its heads of queries use. Where the
    ranks do not divide the heads, the first ranks have one head (of keys) more.

    Args:
        ranks: number of ranks.
        heads: number of heads of queries, or of keys and values.
        kv_heads: number of heads of keys and values, a divisor of ``heads``; None: as many as ``heads``.

    Returns:
        The heads of each rank, and the number of copies. It is more than 1 for fewer heads of keys than ranks. Ranks
        with the same heads count them once each, so the sum of the heads is the number of copies times ``heads``.

    Raises:
        ValueError: if ``kv_heads`` does not divide ``heads``; for fewer heads of keys than ranks also if it does not
            divide ``ranks``, and if there are fewer heads of queries than ranks.
    """
    integer("ranks", ranks, 1, MAX_EXTENT)
    integer("heads", heads, 1, MAX_EXTENT)
    groups = heads if kv_heads is None else integer("kv_heads", kv_heads, 1, MAX_EXTENT)
    if heads % groups:
        raise ValueError(f"kv_heads divides the number of heads, {heads}, got {groups}")
    each = heads // groups
    if groups >= ranks:
        return [each * share for share in _balanced(groups, ranks)], 1
    if ranks % groups:
        raise ValueError(f"{groups} heads of keys and values are for more ranks if they divide them, got {ranks} ranks")
    copies = ranks // groups
    if each == 1:
        return [1] * ranks, copies
    if each < copies:
        raise ValueError(f"{heads} heads of queries are too few for {ranks} ranks: each rank has a head")
    return _balanced(each, copies) * groups, 1


def _balanced(extent: int, parts: int) -> list[int]:
    """Parts of an extent that differ by at most one, larger ones first."""
    return [extent // parts + (part < extent % parts) for part in range(parts)]


class _Summed(torch.autograd.Function):
    """A parameter that all ranks have. Each rank computes a part of its gradient, and gets the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad.contiguous(), "sum", ctx.group), None


class HeadsProjection:
    """What a projection before or behind attention does, in a layer or a style.

    Args:
        name: the layer, for messages.
        to_heads: whether it is before attention, where several ranks may have the same heads of keys.
        head_dim: columns of a head.
        kv_heads: as in :func:`heads_per_rank`.
        sequence_dim: as in :class:`distgemm.nn.ColwiseParallel`.
        schedule: as in :func:`distgemm.matmul_all_to_all`.
        chunks: as in :func:`distgemm.matmul_all_to_all`.
        sum_gradients: whether the gradients of the parameters are summed over the ranks.

    Raises:
        ValueError: for arguments of other types, for an unknown schedule, and for one of another pattern.
    """

    def __init__(
        self,
        name: str,
        *,
        to_heads: bool,
        head_dim: int,
        kv_heads: int | None = None,
        sequence_dim: int | None = None,
        schedule: str = "auto",
        chunks: int | None = None,
        sum_gradients: bool = True,
    ) -> None:
        self.head_dim = integer("head_dim", head_dim, 1, MAX_EXTENT)
        self.kv_heads = None if kv_heads is None else integer("kv_heads", kv_heads, 1, MAX_EXTENT)
        check_sequence_dim(sequence_dim)
        check_schedule(schedule, chunks, {"gemm+a2a" if to_heads else "a2a+gemm": name})
        self.name, self.to_heads, self.sequence_dim = name, to_heads, sequence_dim
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}
        self.sums = boolean("sum_gradients", sum_gradients)

    def of(self, features: int, mesh: DeviceMesh) -> BoundProjection:
        """The projection of a layer.

        Args:
            features: columns of all heads.
            mesh: the ranks.

        Raises:
            ValueError: as :func:`heads_per_rank`, for part of a head, and for copies behind attention.
        """
        heads, left = divmod(features, self.head_dim)
        if left or not heads:
            raise ValueError(f"{self.name}: {features} features are no whole heads of {self.head_dim}")
        try:
            each, copies = heads_per_rank(mesh.size(), heads, self.kv_heads)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if copies > 1 and not self.to_heads:
            raise ValueError(
                f"{self.name}: {heads} heads of queries are too few for {mesh.size()} ranks: each rank has a head"
            )
        return BoundProjection(self, mesh, [self.head_dim * count for count in each], copies)


class BoundProjection:
    """A :class:`HeadsProjection` of one layer.

    Args:
        settings: what its layer or style was given.
        mesh: the ranks.
        columns: columns of each rank.
        copies: number of consecutive ranks with the same columns.
    """

    def __init__(self, settings: HeadsProjection, mesh: DeviceMesh, columns: Sequence[int], copies: int) -> None:
        self.settings, self.mesh, self.columns, self.copies = settings, mesh, columns, copies
        self.group, self.check = group_name(mesh), GradientCheck(settings.name)

    def to_heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, m_per_rank: Sequence[int] | None) -> Tensor:
        """All tokens of this rank's heads."""
        given = self.settings
        x, dim, rows = input_with_tokens(given.name, x, self.mesh, given.sequence_dim, m_per_rank)
        self._check(x)
        y = matmul_all_to_all(
            x,
            self._whole(weight),
            group=self.group,
            bias=self._whole(bias),
            m_per_rank=rows,
            n_per_rank=self.columns,
            copies=self.copies,
            **given.options,
        )
        return tokens_back(y, dim)

    def to_tokens(self, x: Tensor, weight: Tensor, bias: Tensor | None, m_per_rank: Sequence[int] | None) -> Tensor:
        """This rank's tokens, from its heads of all tokens."""
        given = self.settings
        x, dim = input_with_features(given.name, x, self.mesh, given.sequence_dim)
        self._check(x)
        y = all_to_all_matmul(
            x,
            self._whole(weight),
            group=self.group,
            bias=self._whole(bias),
            m_per_rank=m_per_rank,
            k_per_rank=self.columns,
            **given.options,
        )
        return tokens_back(y, dim)

    def _check(self, x: Tensor) -> None:
        if self.settings.sums:  # otherwise whoever has the parameters sums all gradients
            self.check(x, self.mesh)

    def _whole(self, parameter: Tensor | None) -> Any:
        """The parameter, of whose gradient each rank computes a part."""
        found, summed = local(parameter), self.settings.sums and parameter is not None
        return _Summed.apply(found, self.group) if summed else found  # type: ignore[no-untyped-call]
