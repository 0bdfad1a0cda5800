"""Linear layers whose weight is split over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distgemm.arguments import MAX_EXTENT, boolean, instance, integer
from distgemm.fp8 import LayerState, Recipe
from distgemm.fp8.recipe import read_recipe
from distgemm.nn.heads import HeadsProjection
from distgemm.nn.recipes import state_of
from distgemm.nn.state import megatron_sharded_state_dict
from distgemm.nn.tensors import (
    GradientCheck,
    Tokens,
    check_forward,
    check_parameters,
    check_sequence_dim,
    check_tokens,
    dtensor_of_part,
    input_with_features,
    input_with_tokens,
    local,
    tokens_back,
    tokens_now,
    uneven,
)
from distgemm.runtime.checks import Group, flat_mesh, process_group
from distgemm.runtime.torch_arguments import read_device, read_dtype
from distgemm.schedulers import Pattern
from distgemm.torch_ops import all_gather_matmul, group_name, matmul_reduce_scatter
from distgemm.torch_ops.functional import check_schedule

__all__ = [
    "ColumnParallelLinear",
    "HeadsToTokensLinear",
    "ParallelLinear",
    "RowParallelLinear",
    "TokensToHeadsLinear",
]

Tensor = torch.Tensor


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of elements that a layer may have."""


class ParallelLinear(nn.Module):
    """The base of both layers: a linear layer with this rank's part of the weight.

    Parameters are DTensors, so optimizers, gradient clipping and checkpoints treat them as one whole. They are split as
    torch.chunk splits them. ``load_state_dict`` takes DTensors, whole tensors or tensors of this rank.
    :func:`distgemm.nn.full_state_dict` returns the whole parameters.

    A parameter of another module that works on this rank's tokens, such as a norm, an embedding or a head, needs a sum
    of its gradient over the ranks. ``distgemm.nn.SequenceParallel`` on that module does it. A
    layer warns once if its input depends on a parameter that is no DTensor.

    Args:
        in_features: in_features over all ranks.
        out_features: out_features over all ranks.
        group: the ranks that take part: a ProcessGroup, a dimension of a DeviceMesh, or a mesh of hosts. With FSDP2, or
            beside parallelize_module, pass the dimension of the mesh, such as ``mesh["tp"]``.
        bias: whether there is a bias.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        sequence_dim: the dimension of the tokens, 0 or 1 for a tensor (tokens, batch, features) or (batch, tokens,
            features). With another dimension than 0, the input is copied, and the result is a view that is not
            contiguous. None: 0, for inputs of two dimensions only; a DTensor's placement says it as well.
        m_per_rank: tokens of each rank, zeros allowed; or a function that returns them, which each call asks. None: as
            many on each rank, or as the input says if it is a DTensor. A call's own ``m_per_rank`` comes first.
        recipe: compute in fp8, as in :func:`distgemm.all_gather_matmul`: a recipe or its name.
        device: device of the parameters; None: torch's default device if the group serves it.
        dtype: dtype of the parameters.

    Attributes:
        weight: a DTensor, (out_features, in_features).
        bias: a DTensor, (out_features,); None without a bias.
        group: name of the process group.
        mesh: the ranks of the group, as the DTensors have them.
        ranks: number of ranks of the group.
        rank: this rank in the group.
        fp8: the :class:`distgemm.fp8.LayerState` of a layer with a recipe; otherwise None.

    Raises:
        ValueError: for wrong sizes, an unknown group, an unknown schedule or one of another pattern, and for a device
            that the group does not serve.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    split: Mapping[str, int]
    """The dimension along which each parameter is split. A parameter that is absent is the same on all ranks."""

    pattern: Pattern
    """What the layer computes over the ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        schedule: str = "auto",
        chunks: int | None = None,
        sequence_dim: int | None = None,
        m_per_rank: Tokens = None,
        recipe: Recipe | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            integer(f"{type(self).__name__}: {name}", value, 1, MAX_EXTENT)
        boolean("bias", bias)
        if device is not None:
            read_device("device", device, ("cpu", "cuda", "meta"))
        if dtype is not None:
            read_dtype("dtype", dtype, DTYPES)
        check_schedule(schedule, chunks, {self.pattern: type(self).__name__})
        check_sequence_dim(sequence_dim)
        self.in_features, self.out_features = in_features, out_features
        self.group = group_name(group)
        ranks = process_group(self.group)
        self.ranks, self.rank = ranks.size(), dist.get_rank(ranks)
        self.schedule, self.chunks, self.sequence_dim = schedule, chunks, sequence_dim
        self.m_per_rank = check_tokens(m_per_rank)
        self._check = GradientCheck(type(self).__name__)
        self.mesh = flat_mesh(group) if isinstance(group, DeviceMesh) else _mesh_of(ranks, device)
        options: dict[str, Any] = {"device": _parameter_device(device, self.mesh), "dtype": dtype}
        self.fp8 = None if recipe is None else LayerState(read_recipe("recipe", recipe), options["device"])
        for name in ("weight", "bias") if bias else ("weight",):
            whole = torch.empty(self.whole_shape(name), device="meta")
            part = torch.empty(self.part_shape(name), **options)
            self.register_parameter(name, nn.Parameter(dtensor_of_part(part, self.mesh, self._placement(name), whole)))
        if not bias:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters: uniform, with the bounds of an nn.Linear with all in_features.

        A bias that is not split starts with zeros, and a weight that is not split is the same on all ranks. Each rank
        has its own generator. Its seed is a number from torch's default generator plus the number of the rank's part.
        So with the same torch.manual_seed, ranks draw different parts, and data-parallel replicas draw the same. The
        whole weight depends on the number of ranks.
        """
        bound = 1 / math.sqrt(self.in_features)
        # Also drawn for parameters without values, so that torch's generator is in the same state afterwards.
        seed = int(torch.randint(2**62, (), device="cpu"))
        own: torch.Generator | None = None
        for name, parameter in self.named_parameters():
            part = local(parameter.detach())
            if part.is_meta:
                continue
            if name in self.split or name == "weight":
                own = own or torch.Generator(part.device).manual_seed(seed + _part_number(self.weight))
                nn.init.uniform_(part, -bound, bound, generator=own)
            else:
                nn.init.zeros_(part)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group, **options: Any) -> Any:
        """A layer with this rank's part of a Linear.

        Args:
            linear: a Linear with the same parameters on all ranks.
            group: the ranks that take part.
            **options: further options of the constructor. Without ``recipe``, the layer has the recipe of the Linear,
                if that has one by :func:`distgemm.nn.use_recipe` or is a Float8Linear of torchao.
        """
        check_forward(instance("linear", linear, nn.Linear, "an nn.Linear"))
        check_parameters(linear)
        weight, state = linear.weight, state_of(options.pop("recipe", None), linear)
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        layer = cls(linear.in_features, linear.out_features, group=group, bias=linear.bias is not None, **options)
        layer.load_state_dict(dict(linear.named_parameters(recurse=False)))
        layer.fp8 = None if state is None else LayerState(state.recipe, layer.weight.device)
        for name, parameter in linear.named_parameters(recurse=False):
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

    def _placement(self, name: str) -> Shard | Replicate:
        return Shard(self.split[name]) if name in self.split else Replicate()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or not isinstance(parameter, DTensor):
                continue
            mesh, placements = parameter.device_mesh, parameter.placements
            if isinstance(given, DTensor):
                if given.device_mesh == mesh and given.placements != placements:  # ``assign`` would keep them
                    whole: Any = given.detach()
                    state_dict[prefix + name] = whole.redistribute(placements=placements)
            elif tuple(given.shape) == self.whole_shape(name):
                state_dict[prefix + name] = distribute_tensor(given, mesh, placements, src_data_rank=None)
            elif tuple(given.shape) == self.part_shape(name) and mesh.ndim == 1:
                state_dict[prefix + name] = dtensor_of_part(given, mesh, self._placement(name), parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """What ``megatron.core.dist_checkpointing`` saves and loads of this layer, as Megatron's modules return it.

        Args:
            prefix: stands before the names.
            sharded_offsets: as Megatron passes them, for pipeline stages.
            metadata: as Megatron passes it. ``metadata["dp_cp_group"]`` has the replicas.

        Raises:
            ValueError: if the ranks do not divide a parameter, because Megatron's shards have one size.
        """
        return megatron_sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def extra_repr(self) -> str:
        """The arguments of the layer, for print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.rank} of {self.ranks}"
        )


def _mesh_of(group: dist.ProcessGroup, device: Any) -> DeviceMesh:
    """The ranks of a group as a mesh, on the type of device that the parameters have or will have."""
    served = [each.type for each in group._device_types]
    wanted = (torch.get_default_device() if device is None else torch.device(device)).type
    if wanted not in served:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        wanted = accelerator.type if accelerator is not None and accelerator.type in served else "cpu"
    return DeviceMesh.from_group(group, wanted)


def _parameter_device(device: Any, mesh: DeviceMesh) -> torch.device:
    """Where parameters lie: on the mesh's type of device, or without values on "meta"."""
    wanted = torch.get_default_device() if device is None else torch.device(device)
    if wanted.type in (mesh.device_type, "meta"):
        return wanted
    if device is not None:
        raise ValueError(f"device is {wanted}, and the ranks of the group are on {mesh.device_type}; leave device out")
    return torch.device(mesh.device_type)


def _part_number(parameter: Tensor) -> int:
    """The number of this rank's part, where ranks with the same part of the parameter have the same number."""
    assert isinstance(parameter, DTensor)
    mesh, number = parameter.device_mesh, 0
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number


class ColumnParallelLinear(ParallelLinear):
    """A linear layer with some out_features on each rank: :func:`distgemm.all_gather_matmul`.

    The input is (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., out_features of this
    rank). With ``sequence_dim=1`` they are (batch, tokens, features). Out_features are split over the ranks as
    torch.chunk splits them.

    Args:
        in_features: in_features over all ranks.
        out_features: out_features over all ranks.
        keep_gathered: as in :func:`distgemm.all_gather_matmul`.
        **options: group, bias, schedule, chunks, sequence_dim, m_per_rank, recipe, device and dtype, as in
            :class:`ParallelLinear`.
    """

    split = {"weight": 0, "bias": 0}  # noqa: RUF012
    pattern = "ag+gemm"

    def __init__(self, in_features: int, out_features: int, *, keep_gathered: bool = False, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.keep_gathered = boolean("keep_gathered", keep_gathered)

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """The tokens of all ranks, with this rank's out_features.

        Args:
            x: (tokens of this rank, ..., in_features).
            m_per_rank: tokens of each rank; None: as the layer was made.
        """
        m_per_rank = tokens_now(self.m_per_rank) if m_per_rank is None else m_per_rank
        x, dim, m_per_rank = input_with_tokens(type(self).__name__, x, self.mesh, self.sequence_dim, m_per_rank)
        self._check(x, self.mesh)
        y = all_gather_matmul(
            x,
            local(self.weight),
            group=self.group,
            bias=local(self.bias),
            schedule=self.schedule,
            chunks=self.chunks,
            m_per_rank=m_per_rank,
            out_features=uneven(self.out_features, self.ranks),
            keep_gathered=self.keep_gathered,
            recipe=self.fp8,
        )
        return tokens_back(y, dim)


class RowParallelLinear(ParallelLinear):
    """A linear layer with some in_features on each rank: :func:`distgemm.matmul_reduce_scatter`.

    The input is (tokens of all ranks, ..., in_features of this rank), the output (tokens of this rank, ...,
    out_features). With ``sequence_dim=1`` they are (batch, tokens, features). In_features are split over the ranks as
    torch.chunk splits them. The bias is the same on all ranks, and so is its gradient. The arguments are those of
    :class:`ParallelLinear`.
    """

    split = {"weight": 1}  # noqa: RUF012
    pattern = "gemm+rs"

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """This rank's tokens, with all out_features.

        Args:
            x: (tokens of all ranks, ..., in_features of this rank).
            m_per_rank: tokens that each rank keeps; None: as the layer was made.
        """
        m_per_rank = tokens_now(self.m_per_rank) if m_per_rank is None else m_per_rank
        x, dim = input_with_features(type(self).__name__, x, self.mesh, self.sequence_dim)
        self._check(x, self.mesh)
        y = matmul_reduce_scatter(
            x,
            local(self.weight),
            group=self.group,
            bias=local(self.bias),
            schedule=self.schedule,
            chunks=self.chunks,
            m_per_rank=m_per_rank,
            in_features=uneven(self.in_features, self.ranks),
            recipe=self.fp8,
        )
        return tokens_back(y, dim)


class TokensToHeadsLinear(ParallelLinear):
    """A linear layer before attention, as in DeepSpeed Ulysses: :func:`distgemm.matmul_all_to_all`.

    The input is (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., head_dim times this
    rank's number of heads). With ``sequence_dim=1`` they are (batch, tokens, features). Every rank has the whole
    weight, and the sum of its gradient over the ranks.

    Args:
        in_features: in_features.
        out_features: out_features of all heads.
        head_dim: as in :class:`distgemm.nn.TokensToHeads`.
        kv_heads: as in :class:`distgemm.nn.TokensToHeads`.
        **options: group, bias, schedule, chunks, sequence_dim, m_per_rank, device and dtype, as in
            :class:`ParallelLinear`.

    Raises:
        ValueError: as :class:`ParallelLinear` and :class:`distgemm.nn.TokensToHeads`, and for a recipe.
    """

    split = {}  # noqa: RUF012
    pattern: Pattern = "gemm+a2a"
    to_heads = True
    takes_recipe = False

    def __init__(
        self, in_features: int, out_features: int, *, head_dim: int, kv_heads: int | None = None, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        if self.fp8 is not None:
            raise ValueError(f"{type(self).__name__} does not compute in fp8: leave recipe out")
        settings = HeadsProjection(
            type(self).__name__,
            to_heads=self.to_heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            sequence_dim=self.sequence_dim,
            schedule=self.schedule,
            chunks=self.chunks,
        )
        features = out_features if self.to_heads else in_features
        self.projection = settings.of(features, self.mesh)

    def forward(self, x: Tensor, m_per_rank: Sequence[int] | None = None) -> Tensor:
        """All tokens of this rank's heads, or behind attention this rank's tokens.

        Args:
            x: the input.
            m_per_rank: tokens of each rank; None: as the layer was made.
        """
        run = self.projection.to_heads if self.to_heads else self.projection.to_tokens
        return run(x, self.weight, self.bias, tokens_now(self.m_per_rank) if m_per_rank is None else m_per_rank)


class HeadsToTokensLinear(TokensToHeadsLinear):
    """A linear layer behind attention, as in DeepSpeed Ulysses: :func:`distgemm.all_to_all_matmul`.

    The input is (tokens of all ranks, ..., head_dim times this rank's number of heads), the output (tokens of this
    rank, ..., out_features). In_features are those of all heads of queries. The other arguments are those of
    :class:`TokensToHeadsLinear`.
    """

    pattern = "a2a+gemm"
    to_heads = False
