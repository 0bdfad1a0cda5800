"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that overlap GEMMs with communication.

Parameters become DTensors, as with torch's own styles, so that optimizers, gradient clipping and checkpoints work.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import SequenceParallel as SequenceParallelOfTorch
from torch.utils.weak import WeakTensorKeyDictionary

from distgemm.arguments import boolean, string, wrong
from distgemm.fp8 import Recipe
from distgemm.fp8.recipe import read_recipe
from distgemm.nn.heads import HeadsProjection
from distgemm.nn.recipes import give_state, share_state, state, state_of
from distgemm.nn.replicated import linear_of_replicated
from distgemm.nn.tensors import (
    GradientCheck,
    Tokens,
    check_forward,
    check_parameters,
    check_sequence_dim,
    check_tokens,
    dtensor_of_part,
    dtensor_of_tokens,
    feature_layout,
    input_replicated,
    input_with_features,
    input_with_tokens,
    local,
    token_dim,
    token_layout,
    tokens_back,
    tokens_now,
    uneven,
)
from distgemm.runtime.checks import flat_mesh
from distgemm.torch_ops import all_gather_matmul, group_name, matmul_all_reduce, matmul_reduce_scatter
from distgemm.torch_ops.functional import autocast_dtype, check_schedule
from distgemm.torch_ops.library import split_extent

__all__ = [
    "ColwiseParallel",
    "HeadsToTokens",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedColwiseParallel",
    "TokensToHeads",
]

Tensor = torch.Tensor

_DISTRIBUTED: Any = WeakTensorKeyDictionary()
"""The DTensor, by weak reference, that a style has made of a parameter. Modules that share the parameter share it."""


def _linear(style: ParallelStyle, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        also = " and nn.Embedding" if isinstance(style, RowwiseParallel) else ""
        raise ValueError(
            f"{_name(style)} is for nn.Linear{also}, got {type(module).__name__}; for norms take "
            "distgemm.nn.SequenceParallel"
        )
    check_forward(module)
    return module


def _name(style: ParallelStyle) -> str:
    return f"distgemm.nn.{type(style).__name__}"


def _distribute(style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    check_parameters(module, placements)
    for name, parameter in list(module.named_parameters(recurse=False)):
        made = _DISTRIBUTED.get(parameter)
        sharded = None if made is None else made()
        if sharded is None:
            found = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank)
            sharded = nn.Parameter(found, requires_grad=parameter.requires_grad)
            _DISTRIBUTED[parameter] = weakref.ref(sharded)
        elif sharded.device_mesh != mesh or sharded.placements != (placements[name],):
            raise ValueError(
                f"{_name(style)}: {name} of {type(module).__name__} is also a parameter of a module that is split as "
                f"{list(sharded.placements)} on {sharded.device_mesh}, and here as [{placements[name]}] on {mesh}; use "
                "styles that split both in the same way, or two parameters"
            )
        module.register_parameter(name, sharded)


def _as_dtensor(y: Tensor, dim: int, features: int, mesh: DeviceMesh) -> DTensor:
    """A DTensor of all features, from this rank's features. The tokens are dimension ``dim`` of y."""
    first = y.movedim(dim, 0)
    whole = tokens_back(torch.empty(*first.shape[:-1], features, device="meta"), dim)
    return dtensor_of_part(y, mesh, Shard(y.dim() - 1), whole)


class ColwiseParallel(ParallelStyle):
    """Splits the out_features of an nn.Linear over the ranks: :func:`distgemm.all_gather_matmul`.

    The input is (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., out_features of this
    rank). With ``sequence_dim=1`` they are (batch, tokens, features). Norms before the layer take
    :class:`SequenceParallel` with the same ``sequence_dim``. An input that is a DTensor is sharded along its tokens;
    with other placements, the layer raises ValueError.

    Args:
        sequence_dim: the dimension of the tokens, 0 or 1. With another dimension than 0, the input is copied, and the
            result is a view that is not contiguous. None: the dimension along which a DTensor is sharded, or 0 for
            tensors of two dimensions. The layer raises ValueError for tensors of more dimensions.
        input_layouts: as in torch's style. Shard(d) is ``sequence_dim=d``. With Replicate(), every rank has all tokens.
            Then the forward pass needs no transfer, and the gradient of the input is a
            :func:`distgemm.matmul_all_reduce`. None: ``sequence_dim`` holds.
        output_layouts: as in torch's style: Shard(-1), or None, is this rank's features. With Replicate(), every rank
            gets all features, by an all-gather behind the GEMM that nothing overlaps with.
        m_per_rank: tokens of each rank, zeros allowed; or a function that returns them, which each call asks. None: as
            many on each rank, or as the input says if it is a DTensor. Not with input_layouts=Replicate().
        schedule: as in :func:`distgemm.all_gather_matmul`. Not with input_layouts=Replicate().
        chunks: as in :func:`distgemm.all_gather_matmul`. Not with input_layouts=Replicate().
        keep_gathered: as in :func:`distgemm.all_gather_matmul`. Not with input_layouts=Replicate().
        recipe: compute in fp8: a recipe or its name, as in :func:`distgemm.all_gather_matmul`. None: no fp8, unless the
            module has a recipe by :func:`distgemm.nn.use_recipe`, or is a Float8Linear of torchao.
        use_local_output: whether the output is this rank's tensor. If False, it is a DTensor with the placement
            ``output_layouts``.

    Raises:
        ValueError: for an unknown schedule or one of another pattern, wrong chunks, other placements, and arguments
            that exclude each other.
    """

    def __init__(
        self,
        *,
        sequence_dim: int | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        m_per_rank: Tokens = None,
        schedule: str = "auto",
        chunks: int | None = None,
        keep_gathered: bool = False,
        recipe: Recipe | str | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.replicated, self.sequence_dim = token_layout("input_layouts", input_layouts, sequence_dim)
        check_schedule(schedule, chunks, {} if self.replicated else {"ag+gemm": _name(self)})
        self.gathers_features = feature_layout("output_layouts", output_layouts)
        self.recipe = None if recipe is None else read_recipe("recipe", recipe)
        self.m_per_rank = check_tokens(m_per_rank)
        if self.replicated and (m_per_rank, schedule, chunks, keep_gathered) != (None, "auto", None, False):
            raise ValueError(
                "with input_layouts=Replicate() nothing is gathered: no m_per_rank, schedule, chunks or keep_gathered"
            )
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}
        boolean("keep_gathered", keep_gathered)
        self.use_local_output = boolean("use_local_output", use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        device_mesh = flat_mesh(device_mesh)
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        give_state(linear, state_of(self.recipe, linear))
        group, options = group_name(device_mesh), self.options
        out_features = uneven(linear.out_features, device_mesh.size())
        as_dtensor, gathers_features = not self.use_local_output, self.gathers_features
        sequence_dim, m_per_rank, check = self.sequence_dim, self.m_per_rank, GradientCheck(_name(self))

        def output(y: Tensor, dim: int, features: int) -> Tensor:
            if not gathers_features and not as_dtensor:
                return y
            made = _as_dtensor(y, dim, features, device_mesh)
            if gathers_features:
                made = made.redistribute(placements=[Replicate()])
            return made if as_dtensor else made.to_local()

        def forward_of_replicated(self: nn.Linear, input: Tensor) -> Tensor:
            x = input_replicated(check.name, input, device_mesh)
            y = linear_of_replicated(x, local(self.weight), local(self.bias), group, out_features, state(self))
            return output(y, 0, self.out_features)

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            x, dim, rows = input_with_tokens(check.name, input, device_mesh, sequence_dim, tokens_now(m_per_rank))
            check(x, device_mesh)
            weight, bias = local(self.weight), local(self.bias)
            y = all_gather_matmul(
                x,
                weight,
                group=group,
                bias=bias,
                m_per_rank=rows,
                out_features=out_features,
                recipe=state(self),
                **options,
            )
            return output(tokens_back(y, dim), dim, self.out_features)

        # A method and no closure over the module, so that a deep copy uses its own parameters.
        module.forward = MethodType(forward_of_replicated if self.replicated else forward, module)
        return module


class RowwiseParallel(ParallelStyle):
    """Splits the in_features of an nn.Linear over the ranks: :func:`distgemm.matmul_reduce_scatter`.

    The input is (tokens of all ranks, ..., in_features of this rank), the output (tokens of this rank, ...,
    out_features). With ``sequence_dim=1`` they are (batch, tokens, features). An input that is a DTensor is sharded
    along its last dimension; with other placements, the layer raises ValueError.

    It also splits the vocabulary of an nn.Embedding. The input then has the ids of all tokens, on every rank, and the
    output is that of torch's RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(sequence_dim)). The output
    of torch's style is a collective that has not finished, and torch.compile of the module that takes it loses its
    gradient. The output of this style is finished.

    Args:
        sequence_dim: the dimension of the tokens, 0 or 1. With another dimension than 0, the input of a Linear is
            copied, and the result is a view that is not contiguous. None: 0 for outputs of two dimensions. The layer
            raises ValueError for outputs of more dimensions.
        input_layouts: as in torch's style: Shard(-1), or None, is this rank's features. With Replicate(), every rank
            has all features, and takes its own; the gradient of the input is gathered, which nothing overlaps with. An
            nn.Embedding takes None and Replicate().
        output_layouts: as in torch's style. Shard(d) is ``sequence_dim=d``. With Replicate(), every rank gets all
            tokens: the layer is a :func:`distgemm.matmul_all_reduce`. Not for an nn.Embedding. None: ``sequence_dim``
            holds.
        m_per_rank: tokens that each rank keeps, zeros allowed; or a function that returns them, which each call asks.
            None: as many on each rank; of an nn.Embedding, as torch.chunk splits them. Not with
            output_layouts=Replicate().
        schedule: as in :func:`distgemm.all_gather_matmul`. Not for an nn.Embedding.
        chunks: as in :func:`distgemm.all_gather_matmul`. Not for an nn.Embedding.
        recipe: as in :class:`ColwiseParallel`. Not for an nn.Embedding.
        use_local_output: whether the output is this rank's tensor. If False, it is a DTensor that is sharded along the
            tokens, or replicated. The tokens must then be split as torch.chunk splits them.

    Raises:
        ValueError: for an unknown schedule or one of another pattern, wrong chunks, other placements, and arguments
            that exclude each other.
    """

    def __init__(
        self,
        *,
        sequence_dim: int | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        m_per_rank: Tokens = None,
        schedule: str = "auto",
        chunks: int | None = None,
        recipe: Recipe | str | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.recipe = None if recipe is None else read_recipe("recipe", recipe)
        self.input_layouts, self.splits_features = input_layouts, feature_layout("input_layouts", input_layouts)
        self.replicated, self.sequence_dim = token_layout("output_layouts", output_layouts, sequence_dim)
        check_schedule(schedule, chunks, {"gemm+ar" if self.replicated else "gemm+rs": _name(self)})
        self.m_per_rank = check_tokens(m_per_rank)
        if self.replicated and m_per_rank is not None:
            raise ValueError("with output_layouts=Replicate() every rank gets all tokens: no m_per_rank")
        self.use_local_output = boolean("use_local_output", use_local_output)
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        device_mesh = flat_mesh(device_mesh)
        if isinstance(module, nn.Embedding):
            return self._apply_to_embedding(module, device_mesh)
        linear = _linear(self, module)
        _distribute(self, linear, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        give_state(linear, state_of(self.recipe, linear))
        group, options, as_dtensor = group_name(device_mesh), self.options, not self.use_local_output
        sequence_dim, m_per_rank, splits_features = self.sequence_dim, self.m_per_rank, self.splits_features
        in_features, check = uneven(linear.in_features, device_mesh.size()), GradientCheck(_name(self))

        def forward_to_replicated(self: nn.Linear, input: Tensor) -> Tensor:
            x, _ = input_with_features(check.name, input, device_mesh, 0, replicated=splits_features)
            if not splits_features:
                check(x, device_mesh)
            weight, bias = local(self.weight), local(self.bias)
            y = matmul_all_reduce(
                x, weight, group=group, bias=bias, in_features=in_features, recipe=state(self), **options
            )
            return DTensor.from_local(y, device_mesh, [Replicate()], run_check=False) if as_dtensor else y

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            x, dim = input_with_features(check.name, input, device_mesh, sequence_dim, replicated=splits_features)
            if not splits_features:  # otherwise the gradient of x is gathered: it is whole
                check(x, device_mesh)
            weight, bias, rows = local(self.weight), local(self.bias), tokens_now(m_per_rank)
            y = matmul_reduce_scatter(
                x,
                weight,
                group=group,
                bias=bias,
                m_per_rank=rows,
                in_features=in_features,
                recipe=state(self),
                **options,
            )
            y = tokens_back(y, dim)
            return dtensor_of_tokens(y, dim, rows, device_mesh) if as_dtensor else y

        module.forward = MethodType(forward_to_replicated if self.replicated else forward, module)
        return module

    def _apply_to_embedding(self, module: nn.Embedding, device_mesh: DeviceMesh) -> nn.Module:
        if self.replicated:
            raise ValueError(f"{_name(self)}: the output of an nn.Embedding is sharded, got output_layouts=Replicate()")
        if self.input_layouts is not None and not self.splits_features:
            raise ValueError(
                f"{_name(self)}: every rank has the ids of all tokens, so an nn.Embedding takes "
                f"input_layouts=Replicate() or None, got {self.input_layouts}"
            )
        if self.options != {"schedule": "auto", "chunks": None} or self.recipe is not None:
            raise ValueError(f"{_name(self)}: an nn.Embedding has no GEMM, so it takes no schedule, chunks or recipe")
        if not all(split_extent(module.num_embeddings, device_mesh.size())):
            raise ValueError(
                f"{_name(self)}: {module.num_embeddings} embeddings leave some of {device_mesh.size()} ranks without "
                "one, and torch cannot look up ids there; use more embeddings"
            )
        _distribute(self, module, device_mesh, {"weight": Shard(0)})
        name, sequence_dim, m_per_rank, as_dtensor = (
            _name(self),
            self.sequence_dim,
            self.m_per_rank,
            not self.use_local_output,
        )

        def forward(self: nn.Embedding, input: Tensor) -> Tensor:
            ids = input_replicated(name, input, device_mesh)
            rows = tokens_now(m_per_rank)
            dim = token_dim(name, ids.unsqueeze(-1).expand(*ids.shape, self.embedding_dim), sequence_dim)
            if rows is not None:
                ids = _in_equal_shares(name, ids, dim, rows, device_mesh.size())
            y = type(self).forward(self, DTensor.from_local(ids, device_mesh, [Replicate()], run_check=False))
            assert isinstance(y, DTensor)
            y = y.redistribute(placements=[Shard(dim)])
            if rows is None:
                return y if as_dtensor else y.to_local()  # waits for the collective
            found: Tensor = y.to_local().narrow(dim, 0, rows[device_mesh.get_local_rank()])
            return dtensor_of_tokens(found, dim, rows, device_mesh) if as_dtensor else found

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


def _in_equal_shares(name: str, ids: Tensor, dim: int, m_per_rank: Sequence[int], ranks: int) -> Tensor:
    """The ids with as many for each rank: behind those of a rank are zeros, up to the most that any rank has."""
    tokens = list(m_per_rank)
    if len(tokens) != ranks or sum(tokens) != ids.shape[dim]:
        raise ValueError(
            f"{name}: m_per_rank has {ranks} integers, one for each rank, with the sum {ids.shape[dim]}, got {tokens}"
        )
    most = max(tokens)
    shares = []
    for part in torch.split(ids, tokens, dim):
        shape = list(part.shape)
        shape[dim] = most - part.shape[dim]
        shares += [part, part.new_zeros(shape)]
    return torch.cat(shares, dim)


class SequenceParallel(SequenceParallelOfTorch):
    """Sums the gradients of a module that works on this rank's tokens, such as a norm, an embedding or a head.

    It is torch's SequenceParallel: parameters become DTensors that are the same on all ranks. Their values are those of
    the first rank, as with the other styles, and tied ones stay tied. In addition, gradients are summed when backward
    computes them. Those of torch's style stay partial sums until an optimizer sums them, and
    ``clip_grad_norm_`` of torch 2.11 does not clip partial sums. FSDP2 sums them in its own way. A deep copy of the
    module, and one whose parameters ``to``, ``to_empty`` or ``assign=True`` have replaced, has gradients as torch's
    style.

    Ranks may have different numbers of tokens, and none. A rank without tokens computes one token of zeros, whose
    gradient is zero, so that it takes part in the sums. In torch.compile each rank needs a token.

    Args:
        sequence_dim: the dimension of the input that is split over the ranks: the tokens, or the heads.
        use_local_output: whether the output is this rank's tensor. If False, it is a DTensor, whose shape is right only
            if all ranks have as many tokens.

    Raises:
        ValueError: if ``sequence_dim`` is no integer; in a call, if the input is empty along another dimension, or if a
            rank has no tokens in torch.compile.
    """

    def __init__(self, *, sequence_dim: int, use_local_output: bool = True) -> None:
        check_sequence_dim(sequence_dim)
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        # Torch's takes each rank's own values, makes tied parameters two, and trains frozen ones.
        own = [name for name, _ in module.named_parameters(recurse=False)]
        _distribute(self, module, device_mesh, dict.fromkeys(own, Replicate()))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        device_mesh = flat_mesh(device_mesh)
        module = super()._apply(module, device_mesh)
        for parameter in module.parameters():
            trained = parameter.requires_grad
            parameter.requires_grad_()  # a hook is also for one that is frozen now
            parameter.register_hook(_summed)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)
        # A method takes the module, also of a deep copy. What else the module was given as its forward does not.
        own: Any = module.forward
        run = getattr(own, "__func__", lambda _, x: own(x))
        (sharding,) = self.sequence_sharding

        def forward(self: nn.Module, x: DTensor) -> DTensor:
            mine = x.to_local()
            if mine.numel() or device_mesh.size() == 1:
                found: DTensor = run(self, x)
                return found
            shape = list(mine.shape)
            shape[sharding.dim] = 1
            if 0 in shape:
                raise ValueError(
                    f"distgemm.nn.SequenceParallel: the input of {type(self).__name__} has the shape "
                    f"{tuple(mine.shape)}; only dimension {sharding.dim}, that of the tokens, may be empty"
                )
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"distgemm.nn.SequenceParallel in torch.compile: the input of {type(self).__name__} has the shape "
                    f"{tuple(mine.shape)}. The graph of a rank without tokens is another one, whose backward may make "
                    "the calls in another order than the other ranks. Give each rank a token, or do not compile"
                )
            # Cat and not a new tensor, so that backward goes on to what made x, where this rank takes part in sums.
            padded = torch.cat([mine, mine.new_zeros(shape)], sharding.dim)
            y = run(self, DTensor.from_local(padded, device_mesh, [sharding], run_check=False))
            return DTensor.from_local(y.to_local().narrow(sharding.dim, 0, 0), device_mesh, [sharding], run_check=False)

        module.forward = MethodType(forward, module)
        return module


def _summed(gradient: Tensor) -> Tensor:
    """The sum over ranks of a gradient of which each rank has a part."""
    if not isinstance(gradient, DTensor):
        return gradient
    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    found: Tensor = gradient.redistribute(placements=placements)
    return found


class _Shared:
    """Linears that share one input, and their outputs that were not used yet."""

    def __init__(
        self,
        style: ParallelStyle,
        linears: dict[str, nn.Linear],
        mesh: DeviceMesh,
        out_features: Sequence[int] | None,
        sequence_dim: int | None,
        m_per_rank: Tokens,
        options: dict[str, Any],
    ) -> None:
        self.linears, self.mesh, self.sequence_dim, self.options = linears, mesh, sequence_dim, options
        self.m_per_rank = m_per_rank
        self.check = GradientCheck(_name(style))
        self.group, self.out_features = group_name(mesh), out_features
        self.clear()

    def clear(self, *_: Any) -> None:
        """Drop all outputs, after the module's forward pass or if it raises."""
        self.made_of: list[Tensor] = []
        self.state: Any = None
        self.outputs: dict[str, Tensor] = {}

    def forward(self, name: str, input: Tensor) -> Tensor:
        """The output of one of them."""
        made_of, state = self._made_of(input)
        same = len(made_of) == len(self.made_of) and all(a is b for a, b in zip(made_of, self.made_of, strict=True))
        if not same or state != self.state or name not in self.outputs:
            self.clear()
            self.outputs = self._compute(input)
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
            versions = [(each.requires_grad, _version(each), _version(local(each))) for each in made_of]
        return made_of, (*modes, torch.is_inference_mode_enabled(), versions)

    def _compute(self, x: Tensor) -> dict[str, Tensor]:
        rows = tokens_now(self.m_per_rank)
        x, dim, rows = input_with_tokens(self.check.name, x, self.mesh, self.sequence_dim, rows)
        self.check(x, self.mesh)
        outputs = all_gather_matmul(
            x,
            [local(linear.weight) for linear in self.linears.values()],
            group=self.group,
            bias=[local(linear.bias) for linear in self.linears.values()],
            m_per_rank=rows,
            out_features=self.out_features,
            recipe=state(next(iter(self.linears.values()))),
            **self.options,
        )
        return {name: tokens_back(y, dim) for name, y in zip(self.linears, outputs, strict=True)}


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
        sequence_dim: as in :class:`ColwiseParallel`.
        m_per_rank: as in :class:`ColwiseParallel`.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        keep_gathered: as in :func:`distgemm.all_gather_matmul`.
        recipe: as in :class:`ColwiseParallel`. The Linears have the scales of one stacked weight.

    Raises:
        ValueError: without names, for an unknown schedule or one of another pattern, and for wrong chunks.
    """

    def __init__(
        self,
        *names: str,
        sequence_dim: int | None = None,
        m_per_rank: Tokens = None,
        schedule: str = "auto",
        chunks: int | None = None,
        keep_gathered: bool = False,
        recipe: Recipe | str | None = None,
    ) -> None:
        super().__init__()
        wanted = "the names of the Linears that share a gather"
        if not names:
            raise wrong("names", wanted, names)
        self.names = tuple(string(f"names[{index}]", name, wanted) for index, name in enumerate(names))
        check_schedule(schedule, chunks, {"ag+gemm": _name(self)})
        boolean("keep_gathered", keep_gathered)
        check_sequence_dim(sequence_dim)
        self.sequence_dim, self.m_per_rank = sequence_dim, check_tokens(m_per_rank)
        self.recipe = None if recipe is None else read_recipe("recipe", recipe)
        self.options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "keep_gathered": keep_gathered}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        device_mesh = flat_mesh(device_mesh)
        children = dict(module.named_children())
        if lacking := [name for name in self.names if name not in children]:
            raise ValueError(f"{type(module).__name__} has no {', '.join(lacking)}; it has {', '.join(children)}")
        linears = {name: _linear(self, children[name]) for name in self.names}
        for linear in linears.values():
            _distribute(self, linear, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        share_state(list(linears.values()), self.recipe)
        widths = [linear.out_features for linear in linears.values()]
        divides = not any(width % device_mesh.size() for width in widths)
        out_features = None if divides else widths
        shared = _Shared(self, linears, device_mesh, out_features, self.sequence_dim, self.m_per_rank, self.options)
        for name, linear in linears.items():
            linear.forward = partial(shared.forward, name)  # type: ignore[method-assign]
        module.register_forward_hook(shared.clear, always_call=True)
        return module


class TokensToHeads(ParallelStyle):
    """Brings all tokens of this rank's heads from an nn.Linear before attention: :func:`distgemm.matmul_all_to_all`.

    It is for the projections of queries, keys and values in sequence parallelism as in DeepSpeed Ulysses. The input is
    (tokens of this rank, ..., in_features), the output (tokens of all ranks, ..., head_dim times this rank's number of
    heads). With ``sequence_dim=1`` they are (batch, tokens, features). :func:`distgemm.nn.heads_per_rank` says which
    heads a rank has. :class:`HeadsToTokens` leads back.

    Every rank has the whole weight, as a DTensor that is replicated. Its gradient is summed over the ranks when
    backward computes it.

    Args:
        head_dim: out_features of a head.
        kv_heads: number of heads of keys and values, the same for all projections of an attention; None: as many as of
            queries.
        sequence_dim: as in :class:`ColwiseParallel`.
        m_per_rank: as in :class:`ColwiseParallel`.
        schedule: as in :func:`distgemm.matmul_all_to_all`.
        chunks: as in :func:`distgemm.matmul_all_to_all`.
        sum_gradients: False: the parameters stay as they are, and so do their gradients, which are those of this rank's
            tokens. FSDP2 or DistributedDataParallel over these ranks sums the gradients of the whole model.

    Raises:
        ValueError: for an unknown schedule or one of another pattern, and for wrong numbers; where it is applied, if
            out_features are no whole heads, and for numbers of heads that :func:`distgemm.nn.heads_per_rank` refuses.
    """

    to_heads = True

    def __init__(
        self,
        *,
        head_dim: int,
        kv_heads: int | None = None,
        sequence_dim: int | None = None,
        m_per_rank: Tokens = None,
        schedule: str = "auto",
        chunks: int | None = None,
        sum_gradients: bool = True,
    ) -> None:
        super().__init__()
        self.m_per_rank = check_tokens(m_per_rank)
        self.settings = HeadsProjection(
            _name(self),
            to_heads=self.to_heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            sequence_dim=sequence_dim,
            schedule=schedule,
            chunks=chunks,
            sum_gradients=sum_gradients,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        device_mesh = flat_mesh(device_mesh)
        linear = _linear(self, module)
        features = linear.out_features if self.to_heads else linear.in_features
        projection = self.settings.of(features, device_mesh)
        if self.settings.sums:
            _distribute(self, linear, device_mesh, {"weight": Replicate(), "bias": Replicate()})
        run, m_per_rank = projection.to_heads if self.to_heads else projection.to_tokens, self.m_per_rank

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            return run(input, self.weight, self.bias, tokens_now(m_per_rank))

        linear.takes_recipe = False  # type: ignore[assignment]
        module.forward = MethodType(forward, module)
        return module


class HeadsToTokens(TokensToHeads):
    """Brings this rank's tokens from an nn.Linear behind attention: :func:`distgemm.all_to_all_matmul`.

    The input is (tokens of all ranks, ..., head_dim times this rank's number of heads), the output (tokens of this
    rank, ..., out_features). The arguments are those of :class:`TokensToHeads`, and in_features are those of all heads
    of queries. ``m_per_rank`` is the tokens that each rank keeps.
    """

    to_heads = False
