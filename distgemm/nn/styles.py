"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that overlap GEMMs with communication.

Parameters become DTensors, as with torch's own styles, so that optimizers, gradient clipping and checkpoints work.
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
from distgemm.torch_ops.functional import autocast_dtype, check_schedule

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


def _local_input(style: ParallelStyle, x: Tensor, mesh: DeviceMesh, *, features: bool) -> Tensor:
    """This rank's part of an input.

    Raises ValueError for a DTensor with another sharding than the style takes: along its last dimension with
    ``features``, otherwise along its first.
    """
    if not isinstance(x, DTensor):
        return x
    dim = x.dim() - 1 if features else 0
    found = x.placements[0] if len(x.placements) == 1 else None
    if not isinstance(found, Shard) or found.dim % x.dim() != dim or x.device_mesh != mesh:
        wanted, given = f"[Shard({dim})]", ", ".join(str(each) for each in x.placements)
        remedy = f"x.redistribute(placements={wanted}) would do"
        if x.device_mesh != mesh:
            given += f" on {x.device_mesh}"
            remedy = f"pass x.to_local() if that is this rank's part of {wanted}"
        elif not features:
            remedy += "; tokens are the first dimension, as after SequenceParallel(sequence_dim=0)"
        name = type(style).__name__
        raise ValueError(
            f"distgemm.nn.{name} takes a tensor of this rank, or a DTensor with the placements {wanted} on the style's "
            f"mesh; got [{given}] of shape {tuple(x.shape)}. {remedy}"
        )
    local: Tensor = x.to_local()
    return local


def _uneven(extent: int, mesh: DeviceMesh) -> int | None:
    """The extent as an argument of the function: None if all ranks have the same share."""
    return extent if extent % mesh.size() else None


def _as_dtensor(y: Tensor, features: int, mesh: DeviceMesh) -> DTensor:
    """A DTensor of all features, from this rank's features."""
    shape = torch.Size((*y.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    found: DTensor = DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
    return found


class ColwiseParallel(ParallelStyle):
    """Splits the out_features of an nn.Linear over the ranks: :func:`distgemm.all_gather_matmul`.

    The input is (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., out_features of this
    rank). Tokens are the first dimension, so norms before the layer take torch's SequenceParallel(sequence_dim=0). An
    input that is a DTensor has the placements [Shard(0)]; with others, the layer raises ValueError.

    Args:
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        keep_gathered: as in :func:`distgemm.all_gather_matmul`.
        use_local_output: whether the output is this rank's tensor. If False, it is a DTensor that is sharded along its
            last dimension.

    Raises:
        ValueError: for an unknown schedule or wrong chunks.
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
        check_schedule(schedule, chunks)
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        group, options = group_name(device_mesh), self.options
        out_features = _uneven(linear.out_features, device_mesh)
        as_dtensor, style = not self.use_local_output, self

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            x = _local_input(style, x, device_mesh, features=False)
            y = all_gather_matmul(x, weight, group=group, bias=bias, out_features=out_features, **options)
            return _as_dtensor(y, self.out_features, device_mesh) if as_dtensor else y

        # A method and no closure over the module, so that a deep copy uses its own parameters.
        module.forward = MethodType(forward, module)
        return module


class RowwiseParallel(ParallelStyle):
    """Splits the in_features of an nn.Linear over the ranks: :func:`distgemm.matmul_reduce_scatter`.

    The input is (tokens of all ranks, ..., in_features of this rank), the output (tokens of this rank, ...,
    out_features). An input that is a DTensor is sharded along its last dimension; with other placements, the layer
    raises ValueError.

    Args:
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.

    Raises:
        ValueError: for an unknown schedule or wrong chunks.
    """

    def __init__(self, *, schedule: str = "auto", chunks: int | None = None) -> None:
        super().__init__()
        check_schedule(schedule, chunks)
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        group, options = group_name(device_mesh), self.options
        in_features, style = _uneven(linear.in_features, device_mesh), self

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            x = _local_input(style, x, device_mesh, features=True)
            return matmul_reduce_scatter(x, weight, group=group, bias=bias, in_features=in_features, **options)

        module.forward = MethodType(forward, module)
        return module


class _Shared:
    """Linears that share one input, and their outputs that were not used yet."""

    def __init__(
        self,
        style: ParallelStyle,
        linears: dict[str, nn.Linear],
        mesh: DeviceMesh,
        out_features: Sequence[int] | None,
        options: dict[str, Any],
    ) -> None:
        self.style, self.linears, self.mesh, self.options = style, linears, mesh, options
        self.group, self.out_features = group_name(mesh), out_features
        self.clear()

    def clear(self, *_: Any) -> None:
        """Drop all outputs, after the module's forward pass or if it raises."""
        self.made_of: list[Tensor] = []
        self.state: Any = None
        self.outputs: dict[str, Tensor] = {}

    def forward(self, name: str, x: Tensor) -> Tensor:
        """The output of one of them."""
        made_of, state = self._made_of(x)
        same = len(made_of) == len(self.made_of) and all(a is b for a, b in zip(made_of, self.made_of, strict=True))
        if not same or state != self.state or name not in self.outputs:
            self.clear()
            self.outputs = self._compute(x)
            self.made_of, self.state = made_of, state
        y = self.outputs.pop(name)
        if not self.outputs:
            self.clear()
        return y

    def _made_of(self, x: Tensor) -> tuple[list[Tensor], Any]:
        """The tensors and the state that the outputs depend on. Compares no values, so nothing waits for the GPU."""
        modes = torch.is_grad_enabled(), autocast_dtype(x.device.type)
        if torch.compiler.is_compiling():
            return [x], modes  # graphs have no versions
        parameters = [each for linear in self.linears.values() for each in (linear.weight, linear.bias)]
        made_of = [x, *(each for each in parameters if each is not None)]
        with torch.no_grad():  # here to_local returns the local tensor itself and no view
            versions = [(each.requires_grad, _version(each), _version(_local(each))) for each in made_of]
        return made_of, (*modes, torch.is_inference_mode_enabled(), versions)

    def _compute(self, x: Tensor) -> dict[str, Tensor]:
        outputs = all_gather_matmul(
            _local_input(self.style, x, self.mesh, features=False),
            [_local(linear.weight) for linear in self.linears.values()],
            group=self.group,
            bias=[_local(linear.bias) for linear in self.linears.values()],
            out_features=self.out_features,
            **self.options,
        )
        return dict(zip(self.linears, outputs, strict=True))


def _version(x: Tensor) -> int | None:
    """The number of changes in place; None for a tensor of inference mode, which does not count them."""
    return None if x.is_inference() else x._version


class SharedColwiseParallel(ParallelStyle):
    """Shares one gather between several nn.Linear of a module that take the same input, such as q, k and v.

    The code of the module stays the same: it calls each Linear once, with the same tensor. The first call computes all
    outputs. The other calls take theirs, unless the tensor, a parameter, the gradient mode or autocast has changed.
    Outputs that are not used are dropped at the end of the module's forward pass. Changes in place are not seen in
    tensors that were made in inference mode, and inside torch.compile.

    Inputs and outputs are those of :class:`ColwiseParallel`.

    Args:
        *names: names of the Linears in the module that the style is applied to.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        keep_gathered: as in :func:`distgemm.all_gather_matmul`.

    Raises:
        ValueError: without names, for an unknown schedule and for wrong chunks.
    """

    def __init__(
        self, *names: str, schedule: str = "auto", chunks: int | None = None, keep_gathered: bool = False
    ) -> None:
        super().__init__()
        if not names:
            raise ValueError("SharedColwiseParallel takes the names of the Linears that share a gather, got none")
        check_schedule(schedule, chunks)
        self.names = names
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        children = dict(module.named_children())
        if lacking := [name for name in self.names if name not in children]:
            raise ValueError(f"{type(module).__name__} has no {', '.join(lacking)}; it has {', '.join(children)}")
        linears = {name: _linear(self, children[name]) for name in self.names}
        for linear in linears.values():
            _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        widths = [linear.out_features for linear in linears.values()]
        uneven = any(width % device_mesh.size() for width in widths)
        shared = _Shared(self, linears, device_mesh, widths if uneven else None, self.options)
        for name, linear in linears.items():
            linear.forward = partial(shared.forward, name)  # type: ignore[method-assign]
        module.register_forward_hook(shared.clear, always_call=True)
        return module
