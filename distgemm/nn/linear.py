"""Linear layers of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distgemm.torch_ops import all_gather_matmul, group_name, matmul_reduce_scatter
from distgemm.torch_ops.dispatch import resolve
from distgemm.torch_ops.functional import Group, check_schedule

__all__ = ["ColumnParallelLinear", "ParallelLinear", "RowParallelLinear"]

Tensor = torch.Tensor


class ParallelLinear(nn.Module):
    """What both kinds share: a part of the weight, which is split as torch.chunk does.

    Parameters are drawn by :meth:`reset_parameters`: ranks that are seeded alike draw different parts.
    ``state_dict()`` has this rank's part. ``load_state_dict`` takes that, or the whole weight, of which it keeps this
    rank's part; :func:`distgemm.nn.full_state_dict` makes the whole one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    split: Mapping[str, int]
    """The dimension along which each parameter is split. Those that are absent are the same on all ranks."""

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
        found = resolve(self.group)
        self.ranks, self.rank = found.size(), dist.get_rank(found)
        self.schedule, self.chunks = schedule, chunks
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.part_shape("weight"), **made))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.part_shape("bias"), **made))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within the bounds of an nn.Linear with all in_features; a bias that is not split begins with zeros.

        Each rank draws its part from a generator of its own, whose seed is a number drawn from torch's default
        generator plus the rank in the group: ranks that are seeded alike (torch.manual_seed) have different parts, and
        replicas that are seeded alike have the same. What the whole weight is depends on the number of ranks.
        """
        bound = 1 / math.sqrt(self.in_features)
        # Drawn also where the parameters have no values yet, so that what is drawn next is the same.
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        own = None if self.weight.is_meta else torch.Generator(self.weight.device).manual_seed(seed)
        nn.init.uniform_(self.weight, -bound, bound, generator=own)
        if self.bias is not None and "bias" in self.split:
            nn.init.uniform_(self.bias, -bound, bound, generator=own)
        elif self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group, **options: Any) -> Any:
        """This rank's part of a Linear, which is the same on all ranks; with the options of the constructor."""
        weight = linear.weight
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        made = cls(linear.in_features, linear.out_features, group=group, bias=linear.bias is not None, **options)
        made.load_state_dict(linear.state_dict())
        for name, parameter in linear.named_parameters():
            getattr(made, name).requires_grad_(parameter.requires_grad)
        return made

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
        """A parameter over all ranks, on each of them; a collective call."""
        mine: Tensor = getattr(self, name).detach()
        if name not in self.split or self.ranks == 1:
            return mine.clone()
        dim = self.split[name]
        length = -(-self.whole_shape(name)[dim] // self.ranks)
        # Equal blocks, since a group may take no others.
        block = mine.new_zeros(*mine.shape[:dim], length, *mine.shape[dim + 1 :])
        block.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        blocks = [torch.empty_like(block) for _ in range(self.ranks)]
        dist.all_gather(blocks, block, group=resolve(self.group))
        return torch.cat(blocks, dim).narrow(dim, 0, self.whole_shape(name)[dim]).contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            given = state_dict.get(prefix + name)
            if given is not None and tuple(given.shape) == self.whole_shape(name) != self.part_shape(name):
                state_dict[prefix + name] = self.part(name, given)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _even(self, extent: int) -> int | None:
        """The extent that ops have to be told of: none where all ranks have the same share of it."""
        return extent if extent % self.ranks else None

    def extra_repr(self) -> str:
        """Its arguments, for print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.rank} of {self.ranks}"
        )


class ColumnParallelLinear(ParallelLinear):
    """A Linear of which each rank holds some out_features: tokens of this rank in, all tokens of them out.

    in_features, out_features: over all ranks; ranks hold as much of out_features as torch.chunk gives them
    group:    the ranks that take part: a ProcessGroup, or a dimension of a DeviceMesh
    schedule, chunks, keep_gathered: as :func:`distgemm.all_gather_matmul` takes them

    Input (tokens of this rank, ..., in_features), output (tokens of all ranks, ..., out_features of this rank).
    """

    split = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(self, in_features: int, out_features: int, *, keep_gathered: bool = False, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.keep_gathered = keep_gathered

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """``m_per_rank``: tokens of each rank, where they are not as many on each."""
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
    """A Linear of which each rank holds some in_features: all tokens of them in, tokens of this rank out.

    in_features, out_features: over all ranks; ranks hold as much of in_features as torch.chunk gives them
    group:    the ranks that take part: a ProcessGroup, or a dimension of a DeviceMesh
    schedule, chunks: as :func:`distgemm.matmul_reduce_scatter` takes them

    Input (tokens of all ranks, ..., in_features of this rank), output (tokens of this rank, ..., out_features). The
    bias is the same on all ranks, and so is its gradient.
    """

    split = {"weight": 1}  # noqa: RUF012

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """``m_per_rank``: tokens that each rank gets, where they are not as many for each."""
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
