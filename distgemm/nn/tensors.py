"""What layers and styles check and do with tensors: local parts of DTensors, the dimension of the tokens, gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distgemm.arguments import MAX_EXTENT, function, integer, integers
from distgemm.runtime.torch_arguments import read_tensor
from distgemm.torch_ops.library import split_extent

__all__ = [
    "GradientCheck",
    "Tokens",
    "check_forward",
    "check_parameters",
    "check_sequence_dim",
    "check_tokens",
    "dtensor_of_part",
    "dtensor_of_tokens",
    "feature_layout",
    "input_replicated",
    "input_with_features",
    "input_with_tokens",
    "local",
    "token_dim",
    "token_layout",
    "tokens_back",
    "tokens_now",
    "uneven",
]

Tensor = torch.Tensor
Tokens: TypeAlias = Sequence[int] | Callable[[], Sequence[int] | None] | None
"""Tokens of each rank, as layers and styles take them: for all calls, a function that each call asks, or None."""


def local(parameter: Tensor | None) -> Any:
    """The local tensor of a DTensor; other tensors as they are."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def check_forward(linear: nn.Linear) -> None:
    """Raises ValueError for a Linear that computes something else, which would not run.

    A Float8Linear of torchao has a recipe here. A Linear with ``fp8`` has the forward of a style or of use_recipe.
    """
    kind = type(linear)
    own = kind.forward is not nn.Linear.forward and kind.__name__ != "Float8Linear"
    if own or ("forward" in linear.__dict__ and not hasattr(linear, "fp8")):
        raise ValueError(f"{kind.__name__} has a forward of its own, which would not run; take an nn.Linear")


def check_parameters(module: nn.Module, names: Collection[str] = ("weight", "bias")) -> None:
    """Raises ValueError for other parameters than ``names``, and for a weight that is none, as with weight_norm."""
    own = dict(module.named_parameters(recurse=False))
    computed = [name for name in names if name not in own and getattr(module, name, None) is not None]
    if computed or own.keys() - set(names):
        raise ValueError(
            f"{type(module).__name__} has the parameters {', '.join(name for name, _ in module.named_parameters())}; "
            "take one whose parameters are weight and bias. torch.nn.utils.parametrize.remove_parametrizations, "
            "remove_weight_norm and prune.remove make them parameters again"
        )


def uneven(extent: int, ranks: int) -> int | None:
    """The extent as an argument of the function: None if all ranks have the same share."""
    return extent if extent % ranks else None


def dtensor_of_part(part: Tensor, mesh: DeviceMesh, placement: Placement, whole: Tensor) -> DTensor:
    """A DTensor from this rank's part. No rank sends anything.

    Args:
        part: this rank's part.
        mesh: the ranks.
        placement: how the parts make up the whole.
        whole: a tensor with the shape and the strides of the whole, which may be on the device "meta".
    """
    found: DTensor = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return found


# --- the dimension of the tokens ------------------------------------------------------------------------


def check_sequence_dim(sequence_dim: int | None) -> None:
    """Check the argument of a layer or a style when it is made.

    Raises:
        ValueError: if ``sequence_dim`` is neither None nor an integer.
    """
    if sequence_dim is None:
        return
    try:
        integer("sequence_dim", sequence_dim, least=None)
    except ValueError as error:
        raise ValueError(
            f"{error}. It is the dimension of the tokens: 0 for (tokens, batch, features), 1 for (batch, tokens, "
            "features), or None"
        ) from None


def token_layout(name: str, layout: Placement | None, sequence_dim: int | None) -> tuple[bool, int | None]:
    """Whether every rank has all tokens, and the dimension of the tokens, from the arguments of a style.

    Args:
        name: "input_layouts" or "output_layouts".
        layout: that argument.
        sequence_dim: the style's other argument.

    Raises:
        ValueError: for another placement, and if both are given.
    """
    check_sequence_dim(sequence_dim)
    if layout is None:
        return False, sequence_dim
    if not isinstance(layout, (Replicate, Shard)):
        raise ValueError(f"{name} is Replicate(), Shard(dimension of the tokens) or None, got {layout!r}")
    if sequence_dim is not None:
        raise ValueError(
            f"{name}={layout} and sequence_dim={sequence_dim} both say where the tokens are: give one of them"
        )
    return (False, layout.dim) if isinstance(layout, Shard) else (True, None)


def feature_layout(name: str, layout: Placement | None) -> bool:
    """Whether every rank has all features, from the argument of a style.

    Args:
        name: "input_layouts" or "output_layouts".
        layout: that argument.

    Raises:
        ValueError: for another placement than Shard(-1) and Replicate().
    """
    if layout is None or isinstance(layout, Replicate) or (type(layout) is Shard and layout.dim == -1):
        return isinstance(layout, Replicate)
    remedy = ""
    if isinstance(layout, Shard):
        other = "RowwiseParallel" if name == "output_layouts" else "ColwiseParallel"
        remedy = f"; distgemm.nn.{other} is for tokens that are split over the ranks there"
    raise ValueError(
        f"{name} is Shard(-1), this rank's features, or Replicate(), all features on every rank; got {layout!r}{remedy}"
    )


# --- the tokens of each rank ----------------------------------------------------------------------------


def check_tokens(m_per_rank: Tokens) -> Tokens:
    """Check the argument ``m_per_rank`` of a layer or a style when it is made.

    Raises:
        ValueError: if it is no sequence of numbers of tokens, no function and not None.
    """
    if m_per_rank is None:
        return None
    if callable(m_per_rank):
        wanted = "a sequence with the tokens of each rank, a function that returns it, or None"
        return function("m_per_rank", m_per_rank, wanted)
    return integers("m_per_rank", m_per_rank, 0, MAX_EXTENT)


def tokens_now(m_per_rank: Tokens) -> Sequence[int] | None:
    """The tokens of each rank in this call; None: as many on each. The functions check them."""
    return m_per_rank() if callable(m_per_rank) else m_per_rank


def dtensor_of_tokens(y: Tensor, dim: int, m_per_rank: Sequence[int] | None, mesh: DeviceMesh) -> DTensor:
    """A DTensor of the tokens of all ranks, from those of this rank, which are dimension ``dim`` of y.

    Raises:
        ValueError: if the tokens are not split as torch.chunk splits them.
    """
    ranks = mesh.size()
    tokens = list(m_per_rank) if m_per_rank is not None else [y.shape[dim]] * ranks
    if tokens != split_extent(sum(tokens), ranks):
        raise ValueError(
            f"use_local_output=False makes a DTensor, which is split as torch.chunk splits it: "
            f"m_per_rank={split_extent(sum(tokens), ranks)}, got {tokens}; use_local_output=True has no such limit"
        )
    first = y.movedim(dim, 0)
    whole = tokens_back(torch.empty(sum(tokens), *first.shape[1:], device="meta"), dim)
    return dtensor_of_part(y, mesh, Shard(dim), whole)


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, DTensor):
        read_tensor(f"{name}: the input", x)


def token_dim(name: str, x: Tensor, sequence_dim: int | None) -> int:
    """The dimension of the tokens in x, which has the features in its last dimension.

    Raises:
        ValueError: if ``sequence_dim`` is no such dimension, or None for a tensor of more than two dimensions.
    """
    shape = tuple(x.shape)
    if sequence_dim is None:
        if x.dim() > 2:
            raise ValueError(
                f"{name}: sequence_dim is None, and it must name the dimension of the tokens in a tensor of shape "
                f"{shape}: sequence_dim=0 for (tokens, batch, features), sequence_dim=1 for (batch, tokens, features)"
            )
        return 0
    if not -x.dim() <= sequence_dim < x.dim() or (x.dim() > 1 and sequence_dim % x.dim() == x.dim() - 1):
        raise ValueError(
            f"{name}: sequence_dim is {sequence_dim}, and the input has the shape {shape}, where the last dimension "
            f"has the features; sequence_dim is one of {list(range(max(1, x.dim() - 1)))}"
        )
    return sequence_dim % x.dim()


def input_with_tokens(
    name: str, x: Tensor, mesh: DeviceMesh, sequence_dim: int | None, m_per_rank: Sequence[int] | None
) -> tuple[Tensor, int, Sequence[int] | None]:
    """This rank's tokens, with the tokens as the first dimension; the dimension that they had; the tokens of each rank.

    A DTensor says how many tokens each rank has, unless ``m_per_rank`` does.

    Raises:
        ValueError: for a DTensor that is not sharded along the tokens, and if nothing says which dimension has them.
    """
    _check_tensor(name, x)
    if isinstance(x, DTensor):
        if sequence_dim is None and x.dim() > 1 and len(x.placements) == 1 and x.device_mesh == mesh:
            found = x.placements[0]
            if isinstance(found, Shard) and found.dim % x.dim() != x.dim() - 1:
                sequence_dim = found.dim % x.dim()
        dim = 0 if sequence_dim is None else token_dim(name, x, sequence_dim)
        tokens = x.shape[dim]
        x = _local_input(name, x, mesh, dim, features=False)
        if m_per_rank is None and tokens % mesh.size():
            m_per_rank = split_extent(tokens, mesh.size())
    else:
        dim = token_dim(name, x, sequence_dim)
    return (x.movedim(dim, 0) if dim else x), dim, m_per_rank


def input_with_features(
    name: str, x: Tensor, mesh: DeviceMesh, sequence_dim: int | None, *, replicated: bool = False
) -> tuple[Tensor, int]:
    """This rank's features of all tokens, with the tokens as the first dimension, and the dimension that they had.

    Args:
        name: the layer, for messages.
        x: the input.
        mesh: the ranks.
        sequence_dim: the dimension of the tokens, as a layer takes it.
        replicated: whether every rank has all features of x, and takes its own. The gradient has all features, too.

    Raises:
        ValueError: for a DTensor that is not sharded along the features, and if nothing says which dimension has the
            tokens.
    """
    _check_tensor(name, x)
    if replicated:
        x = input_replicated(name, x, mesh)
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = whole.redistribute(placements=[Shard(x.dim() - 1)]).to_local()
    elif isinstance(x, DTensor):
        x = _local_input(name, x, mesh, x.dim() - 1, features=True)
    dim = token_dim(name, x, sequence_dim)
    return (x.movedim(dim, 0) if dim else x), dim


def input_replicated(name: str, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The input that every rank has whole.

    Raises:
        ValueError: for a DTensor that is not replicated.
    """
    _check_tensor(name, x)
    return _local_input(name, x, mesh, None, features=True) if isinstance(x, DTensor) else x


def tokens_back(y: Tensor, dim: int) -> Tensor:
    """A view with the tokens, which are the first dimension of y, as dimension ``dim``."""
    return y.movedim(0, dim) if dim else y


def _local_input(name: str, x: DTensor, mesh: DeviceMesh, dim: int | None, *, features: bool) -> Tensor:
    """This rank's part of a DTensor that is sharded along ``dim``, None: of none; raises ValueError for others."""
    found = x.placements[0] if len(x.placements) == 1 else None
    fits = isinstance(found, Replicate) if dim is None else isinstance(found, Shard) and found.dim % x.dim() == dim
    if not fits or x.device_mesh != mesh:
        wanted = "[Replicate()]" if dim is None else f"[Shard({dim})]"
        given = ", ".join(str(each) for each in x.placements)
        remedy = f"x.redistribute(placements={wanted}) would do"
        if x.device_mesh != mesh:
            given += f" on {x.device_mesh}"
            remedy = f"pass x.to_local() if that is this rank's part of {wanted}"
        elif not features:
            remedy += f", or sequence_dim={dim} in the SequenceParallel of the norm before it"
            if isinstance(found, Replicate):
                remedy += "; input_layouts=Replicate() in the ColwiseParallel gathers nothing"
        elif isinstance(found, Replicate):
            remedy += ", or input_layouts=Replicate() in the RowwiseParallel"
        raise ValueError(
            f"{name} takes a tensor of this rank, or a DTensor with the placements {wanted} on its mesh; got "
            f"[{given}] of shape {tuple(x.shape)}. {remedy}"
        )
    part: Tensor = x.to_local()
    return part


# --- gradients ------------------------------------------------------------------------------------------


class GradientCheck:
    """Checks of the inputs of one layer: whether the gradients behind them will be those of all ranks.

    Args:
        name: the layer, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name, self.done = name, False

    def __call__(self, x: Tensor, mesh: DeviceMesh) -> None:
        """Warn, at the first call with gradients, of a parameter whose gradient is only this rank's part.

        A parameter that the input depends on, and that is no DTensor, gets the gradient of this rank's tokens or
        features alone. The check reads the autograd graph up to the next call of distgemm. It costs nothing later.

        Raises:
            ValueError: in torch.compile, for a graph whose input is a collective that has not finished.
        """
        if torch.compiler.is_dynamo_compiling():
            _refuse_unfinished_inputs(self.name)
        if torch.compiler.is_compiling() or self.done:
            return
        if torch.is_grad_enabled() and x.requires_grad and mesh.size() > 1:
            self.done = True
            parameter = _plain_parameter_behind(x)
            if parameter is not None:
                warnings.warn(
                    f"{self.name}: its input depends on a parameter of shape {tuple(parameter.shape)} that is no "
                    f"DTensor. Each of the {mesh.size()} ranks computes a part of its gradient, and nothing sums the "
                    "parts. distgemm.nn.SequenceParallel on the module of the parameter makes "
                    "it a DTensor, whose gradient is summed (docs/pytorch.md, Gradients of other modules). Ignore "
                    "this warning if your program sums the gradient",
                    stacklevel=4,
                )


def _plain_parameter_behind(x: Tensor) -> nn.Parameter | None:
    """A parameter that x depends on, without a call of distgemm between them, and that is no DTensor."""
    if isinstance(x, nn.Parameter):
        return x
    seen, todo = set(), [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or "distgemm_" in node.name():
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only nodes that accumulate a leaf's gradient have it
        if isinstance(leaf, nn.Parameter) and not isinstance(leaf, DTensor):
            return leaf
        todo += [each for each, _ in node.next_functions]
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # runs while dynamo traces, and leaves nothing in the graph
def _refuse_unfinished_inputs(name: str) -> None:
    """Raise if an input of the graph that dynamo traces is a collective that eager code has started.

    AOTAutograd waits for such an input and loses its autograd history, so that gradients behind it are wrong. One
    within a DTensor is not waited for.
    """
    unfinished: Any = dist._functional_collectives.AsyncCollectiveTensor
    tracer: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    for argument in tracer.output.graphargs:
        given: Any = argument.example if argument.is_tensor else None
        inside = isinstance(given, DTensor) and isinstance(given._local_tensor, unfinished)
        if inside or (isinstance(given, unfinished) and given.requires_grad):
            raise ValueError(
                f"{name} in torch.compile: an input of the compiled module, of shape {tuple(given.shape)}, is a "
                "collective that has not finished. torch.compile loses the gradient of such an input. "
                "distgemm.nn.RowwiseParallel on the embedding, instead of torch's, finishes it; compiling the whole "
                "model is right, too; or pass x.clone()"
            )
