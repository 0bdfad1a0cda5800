"""Linear layers whose weight is split over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distgemm.runtime.checks import Group, process_group
from distgemm.torch_ops import all_gather_matmul, group_name, matmul_reduce_scatter
from distgemm.torch_ops.functional import check_schedule

__all__ = ["ColumnParallelLinear", "ParallelLinear", "RowParallelLinear"]

Tensor = torch.Tensor


class ParallelLinear(nn.Module):
    """The base of both layers: a linear layer with this rank's part of the weight.

    Weights are split as torch.chunk splits them. ``state_dict()`` has this rank's parts. ``load_state_dict`` takes this
    rank's parts or the whole parameters. :func:`distgemm.nn.full_state_dict` returns the whole parameters.

    Args:
        in_features: in_features over all ranks.
        out_features: out_features over all ranks.
        group: the ranks that take part: a ProcessGroup, or a dimension of a DeviceMesh.
        bias: whether there is a bias.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        weight: (out_features, in_features), this rank's part.
        bias: (out_features,), this rank's part; None without a bias.
        group: name of the process group.
        ranks: number of ranks of the group.
        rank: this rank in the group.

    Raises:
        ValueError: for wrong sizes, an unknown group or an unknown schedule.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    split: Mapping[str, int]
    """The dimension along which each parameter is split. A parameter that is absent is the same on all ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        schedule: str = "auto",
        chunks: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{type(self).__name__}: {name} is an integer >= 1, over all ranks; got {value!r}")
        check_schedule(schedule, chunks)
        self.in_features, self.out_features = in_features, out_features
        self.group = group_name(group)
        ranks = process_group(self.group)
        self.ranks, self.rank = ranks.size(), dist.get_rank(ranks)
        self.schedule, self.chunks = schedule, chunks
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.part_shape("weight"), **options))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.part_shape("bias"), **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters: uniform, with the bounds of an nn.Linear with all in_features.

        A bias that is not split starts with zeros. Each rank has its own generator. Its seed is a number from torch's
        default generator plus the rank in the group. So with the same torch.manual_seed, ranks draw different parts,
        and data-parallel replicas draw the same. The whole weight depends on the number of ranks.
        """
        bound = 1 / math.sqrt(self.in_features)
        # Also drawn for parameters without values, so that torch's generator is in the same state afterwards.
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        own = None if self.weight.is_meta else torch.Generator(self.weight.device).manual_seed(seed)
        nn.init.uniform_(self.weight, -bound, bound, generator=own)
        if self.bias is not None and "bias" in self.split:
            nn.init.uniform_(self.bias, -bound, bound, generator=own)
        elif self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group, **options: Any) -> Any:
        """A layer with this rank's part of a Linear.

        Args:
            linear: a Linear with the same parameters on all ranks.
            group: the ranks that take part.
            **options: further options of the constructor.
        """
        weight = linear.weight
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        layer = cls(linear.in_features, linear.out_features, group=group, bias=linear.bias is not None, **options)
        layer.load_state_dict(linear.state_dict())
        for name, parameter in linear.named_parameters():
            layer.get_parameter(name).requires_grad_(parameter.requires_grad)
        return layer

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape of "weight" or "bias" over all ranks."""
        return (self.out_features, self.in_features) if name == "weight" else (self.out_features,)

    def part_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of "weight" or "bias"."""
        shape = list(self.whole_shape(name))
        if name in self.split:
            dim = self.split[name]
            length = -(-shape[dim] // self.ranks)
            shape[dim] = max(0, min(length, shape[dim] - self.rank * length))
        return tuple(shape)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter: a view."""
        if name not in self.split:
            return whole
        dim = self.split[name]
        length = -(-whole.shape[dim] // self.ranks)
        start = min(self.rank * length, whole.shape[dim])
        return whole.narrow(dim, start, self.part_shape(name)[dim])

    def whole(self, name: str) -> Tensor:
        """The whole parameter, on each rank. A collective call."""
        mine = self.get_parameter(name).detach()
        if name not in self.split or self.ranks == 1:
            return mine.clone()
        dim = self.split[name]
        length = -(-self.whole_shape(name)[dim] // self.ranks)
        # Not every backend gathers blocks of different sizes.
        block = mine.new_zeros(*mine.shape[:dim], length, *mine.shape[dim + 1 :])
        block.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        blocks = [torch.empty_like(block) for _ in range(self.ranks)]
        dist.all_gather(blocks, block, group=process_group(self.group))
        return torch.cat(blocks, dim).narrow(dim, 0, self.whole_shape(name)[dim]).contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            given = state_dict.get(prefix + name)
            if given is not None and tuple(given.shape) == self.whole_shape(name) != self.part_shape(name):
                state_dict[prefix + name] = self.part(name, given)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _even(self, extent: int) -> int | None:
        """The extent as an argument of the function: None if all ranks have the same share."""
        return extent if extent % self.ranks else None

    def extra_repr(self) -> str:
        """The arguments of the layer, for print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.rank} of {self.ranks}"
        )


class ColumnParallelLinear(ParallelLinear):
    """A linear layer with some out_features on each rank: :func:`distgemm.all_gather_matmul`.

    The input is (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., out_features of this
    rank). Out_features are split over the ranks as torch.chunk splits them.

    Args:
        in_features: in_features over all ranks.
        out_features: out_features over all ranks.
        keep_gathered: as in :func:`distgemm.all_gather_matmul`.
        **options: group, bias, schedule, chunks, device and dtype, as in :class:`ParallelLinear`.
    """

    split = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(self, in_features: int, out_features: int, *, keep_gathered: bool = False, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.keep_gathered = keep_gathered

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """The tokens of all ranks, with this rank's out_features.

        Args:
            x: (tokens of this rank, ..., in_features).
            m_per_rank: tokens of each rank; None: as many on each.
        """
        return all_gather_matmul(
            x,
            self.weight,
            group=self.group,
            bias=self.bias,
            schedule=self.schedule,
            chunks=self.chunks,
            m_per_rank=m_per_rank,
            out_features=self._even(self.out_features),
            keep_gathered=self.keep_gathered,
        )


class RowParallelLinear(ParallelLinear):
    """A linear layer with some in_features on each rank: :func:`distgemm.matmul_reduce_scatter`.

    The input is (tokens of all ranks, ..., in_features of this rank), the output (tokens of this rank, ...,
    out_features). In_features are split over the ranks as torch.chunk splits them. The bias is the same on all ranks,
    and so is its gradient. The arguments are those of :class:`ParallelLinear`.
    """

    split = {"weight": 1}  # noqa: RUF012

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """This rank's tokens, with all out_features.

        Args:
            x: (tokens of all ranks, ..., in_features of this rank).
            m_per_rank: tokens that each rank keeps; None: as many on each.
        """
        return matmul_reduce_scatter(
            x,
            self.weight,
            group=self.group,
            bias=self.bias,
            schedule=self.schedule,
            chunks=self.chunks,
            m_per_rank=m_per_rank,
            in_features=self._even(self.in_features),
        )
