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
    """This rank's part of an input. Raises ValueError for a DTensor that is not sharded as the style multiplies it:
    along its last dimension with ``features``, else along its first."""
    if not isinstance(x, DTensor):
        return x
    dim = x.dim() - 1 if features else 0
    found = x.placements[0] if len(x.placements) == 1 else None
    if not isinstance(found, Shard) or found.dim % x.dim() != dim or x.device_mesh != mesh:
        wanted, given = f"[Shard({dim})]", ", ".join(str(each) for each in x.placements)
        remedy = f"x.redistribute(placements={wanted}) would do"
        if x.device_mesh != mesh:
            given += f" on {x.device_mesh}"
            remedy = f"pass x.to_local() where it is this rank's part of {wanted}"
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

    Input: this rank's tokens, along the first dimension. Output: all tokens, this rank's out_features. Tokens are the
    first dimension, so norms before it take torch's SequenceParallel(sequence_dim=0). A DTensor is taken where its
    placements are [Shard(0)]; for others ValueError is raised.
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
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        group, how = group_name(device_mesh), self.how
        out_features = _uneven(linear.out_features, device_mesh)
        as_dtensor, style = not self.use_local_output, self

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            x = _local_input(style, x, device_mesh, features=False)
            y = all_gather_matmul(x, weight, group=group, bias=bias, out_features=out_features, **how)
            return _as_dtensor(y, self.out_features, device_mesh) if as_dtensor else y

        # Bound, and not closed over the module: a deep copy has its own parameters.
        module.forward = MethodType(forward, module)
        return module


class RowwiseParallel(ParallelStyle):
    """An nn.Linear with in_features split over the ranks: :func:`distgemm.matmul_reduce_scatter`.

    schedule, chunks: as the op takes them

    Input: all tokens, this rank's in_features. Output: this rank's tokens, along the first dimension, which is that of
    the tokens. A DTensor is taken where it is sharded along its last dimension; for others ValueError is raised.
    """

    def __init__(self, *, schedule: str = "auto", chunks: int | None = None) -> None:
        super().__init__()
        check_schedule(schedule, chunks)
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        group, how = group_name(device_mesh), self.how
        in_features, style = _uneven(linear.in_features, device_mesh), self

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            weight, bias = _local(self.weight), _local(self.bias)
            x = _local_input(style, x, device_mesh, features=True)
            return matmul_reduce_scatter(x, weight, group=group, bias=bias, in_features=in_features, **how)

        module.forward = MethodType(forward, module)
        return module


class _Shared:
    """Linears with one input, and those of their outputs that have not been asked for yet."""

    def __init__(
        self,
        style: ParallelStyle,
        linears: dict[str, nn.Linear],
        mesh: DeviceMesh,
        out_features: Sequence[int] | None,
        how: dict[str, Any],
    ) -> None:
        self.style, self.linears, self.mesh, self.how = style, linears, mesh, how
        self.group, self.out_features = group_name(mesh), out_features
        self.clear()

    def clear(self, *_: Any) -> None:
        """Keep nothing: after the module's forward pass, also where it raised."""
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
        """The tensors that outputs are made of, and what else makes them what they are. No values: nothing waits."""
        modes = torch.is_grad_enabled(), autocast_dtype(x.device.type)
        if torch.compiler.is_compiling():
            return [x], modes  # graphs have no versions
        parameters = [each for linear in self.linears.values() for each in (linear.weight, linear.bias)]
        made_of = [x, *(each for each in parameters if each is not None)]
        with torch.no_grad():  # where a DTensor gives its own local tensor, without a view
            versions = [(each.requires_grad, _version(each), _version(_local(each))) for each in made_of]
        return made_of, (*modes, torch.is_inference_mode_enabled(), versions)

    def _compute(self, x: Tensor) -> dict[str, Tensor]:
        outputs = all_gather_matmul(
            _local_input(self.style, x, self.mesh, features=False),
            [_local(linear.weight) for linear in self.linears.values()],
            group=self.group,
            bias=[_local(linear.bias) for linear in self.linears.values()],
            out_features=self.out_features,
            **self.how,
        )
        return dict(zip(self.linears, outputs, strict=True))


def _version(x: Tensor) -> int | None:
    """How often a tensor was changed in place; tensors of inference mode do not know."""
    return None if x.is_inference() else x._version


class SharedColwiseParallel(ParallelStyle):
    """Several nn.Linear of one module, such as q, k and v, that multiply the same input: they share one gather.

    names:  of the Linears, in the module that the style is applied to
    schedule, chunks, keep_gathered: as :func:`distgemm.all_gather_matmul` takes them

    The module stays as it is: it calls each of them once with one tensor. The first call multiplies all; the others
    take their outputs from it, unless the tensor, a parameter, or the mode of gradients or autocast has changed since
    then. What nobody asked for is dropped at the end of the module's forward pass. Changes in place cannot be seen in
    tensors that were made in inference mode, and inside of torch.compile.

    Input and outputs are as those of :class:`ColwiseParallel`: tokens are the first dimension.
    """

    def __init__(
        self, *names: str, schedule: str = "auto", chunks: int | None = None, keep_gathered: bool = False
    ) -> None:
        super().__init__()
        if not names:
            raise ValueError("SharedColwiseParallel takes the names of the Linears that share a gather, got none")
        check_schedule(schedule, chunks)
        self.names = names
        self.how: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        children = dict(module.named_children())
        if lacking := [name for name in self.names if name not in children]:
            raise ValueError(f"{type(module).__name__} has no {', '.join(lacking)}; it has {', '.join(children)}")
        linears = {name: _linear(self, children[name]) for name in self.names}
        for linear in linears.values():
            _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        widths = [linear.out_features for linear in linears.values()]
        uneven = any(width % device_mesh.size() for width in widths)
        shared = _Shared(self, linears, device_mesh, widths if uneven else None, self.how)
        for name, linear in linears.items():
            linear.forward = partial(shared.forward, name)  # type: ignore[method-assign]
        module.register_forward_hook(shared.clear, always_call=True)
        return module
