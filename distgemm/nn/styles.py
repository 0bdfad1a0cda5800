"""Styles for torch.distributed.tensor.parallel.parallelize_module: Linears whose products overlap with what they send.

Parameters become DTensors, as with torch's own styles, so that optimizers, clipping and checkpoints know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from distgemm.torch_ops import all_gather_matmul, group_name, matmul_reduce_scatter

__all__ = ["ColwiseParallel", "RowwiseParallel", "SharedColwiseParallel"]

Tensor = torch.Tensor


def _linear(style: ParallelStyle, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        name = type(style).__name__
        raise ValueError(
            f"distgemm.nn.{name} is for nn.Linear, got {type(module).__name__}; for embeddings and norms take the "
            "styles of torch.distributed.tensor.parallel"
        )
    return module


def _distribute(style: ParallelStyle, module: nn.Linear, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    for name, parameter in list(module.named_parameters()):
        sharded = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _local(parameter: Tensor | None) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _uneven(extent: int, mesh: DeviceMesh) -> int | None:
    """What ops have to be told of an extent: nothing where all ranks have the same share."""
    return extent if extent % mesh.size() else None


def _as_dtensor(y: Tensor, features: int, mesh: DeviceMesh) -> DTensor:
    """Features of this rank as a part of those of all."""
    shape = torch.Size((*y.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    found: DTensor = DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
    return found


class ColwiseParallel(ParallelStyle):
    """An nn.Linear with out_features split over the ranks: :func:`distgemm.all_gather_matmul`.

    schedule, chunks, keep_gathered: as the op takes them
    use_local_output: False: the output is a DTensor, sharded along its last dimension

    Input: this rank's tokens, along the first dimension. Output: all tokens, this rank's out_features.
    """

    def __init__(
        self,
        *,
        schedule: str = "auto",
        chunks: int | None = None,
        keep_gathered: bool = False,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        group, how = group_name(device_mesh), self.how
        out_features = _uneven(linear.out_features, device_mesh)
        as_dtensor = not self.use_local_output

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            y = all_gather_matmul(_local(x), weight, group=group, bias=bias, out_features=out_features, **how)
            return _as_dtensor(y, self.out_features, device_mesh) if as_dtensor else y

        # Bound, and not closed over the module: a deep copy has its own parameters.
        module.forward = MethodType(forward, module)
        return module


class RowwiseParallel(ParallelStyle):
    """An nn.Linear with in_features split over the ranks: :func:`distgemm.matmul_reduce_scatter`.

    schedule, chunks: as the op takes them

    Input: all tokens, this rank's in_features. Output: this rank's tokens, along the first dimension.
    """

    def __init__(self, *, schedule: str = "auto", chunks: int | None = None) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        group, how = group_name(device_mesh), self.how
        in_features = _uneven(linear.in_features, device_mesh)

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            return matmul_reduce_scatter(_local(x), weight, group=group, bias=bias, in_features=in_features, **how)

        module.forward = MethodType(forward, module)
        return module


class _Shared:
    """Linears with one input, and those of their outputs that have not been asked for yet."""

    def __init__(self, linears: dict[str, nn.Linear], group: str, uneven: bool, how: dict[str, Any]) -> None:
        self.linears, self.group, self.how = linears, group, how
        self.out_features: Sequence[int] | None = None
        if uneven:
            self.out_features = [linear.out_features for linear in linears.values()]
        self.x: Tensor | None = None
        self.outputs: dict[str, Tensor] = {}

    def forward(self, name: str, x: Tensor) -> Tensor:
        """The output of one of them."""
        if self.x is not x or name not in self.outputs:
            self.x, self.outputs = x, self._compute(x)
        y = self.outputs.pop(name)
        if not self.outputs:
            self.x = None
        return y

    def _compute(self, x: Tensor) -> dict[str, Tensor]:
        outputs = all_gather_matmul(
            _local(x),
            [_local(linear.weight) for linear in self.linears.values()],
            group=self.group,
            bias=[_local(linear.bias) for linear in self.linears.values()],
            out_features=self.out_features,
            **self.how,
        )
        return dict(zip(self.linears, outputs, strict=True))


class SharedColwiseParallel(ParallelStyle):
    """Several nn.Linear of one module, such as q, k and v, that multiply the same input: they share one gather.

    names:  of the Linears, in the module that the style is applied to
    schedule, chunks, keep_gathered: as :func:`distgemm.all_gather_matmul` takes them

    The module stays as it is: it calls each of them once with one tensor. The first call multiplies all.
    """

    def __init__(
        self, *names: str, schedule: str = "auto", chunks: int | None = None, keep_gathered: bool = False
    ) -> None:
        super().__init__()
        if not names:
            raise ValueError("SharedColwiseParallel takes the names of the Linears that share a gather, got none")
        self.names = names
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        children = dict(module.named_children())
        if lacking := [name for name in self.names if name not in children]:
            raise ValueError(f"{type(module).__name__} has no {', '.join(lacking)}; it has {', '.join(children)}")
        linears = {name: _linear(self, children[name]) for name in self.names}
        for linear in linears.values():
            _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        uneven = any(linear.out_features % device_mesh.size() for linear in linears.values())
        shared = _Shared(linears, group_name(device_mesh), uneven, self.how)
        for name, linear in linears.items():
            linear.forward = partial(shared.forward, name)  # type: ignore[method-assign]
        return module
