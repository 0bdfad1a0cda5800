"""Compiles the kernels of a model before its first step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode  # noqa: PLC2701  (torch has no public name)
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: PLC2701  (torch has no public name)

from distgemm.arguments import boolean, instance
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import build, rotated
from distgemm.gemm.select import gpu_name
from distgemm.gemm.target import compiling_for
from distgemm.system import cores_of_rank, switch
from distgemm.torch_ops.kernels import sources_for
from distgemm.torch_ops.needs import Need, record_needs
from distgemm.tune.kernels import Scope

__all__ = ["scope_of_calls", "needs_of", "warmup"]


def warmup(model: nn.Module, *inputs: Any, backward: bool = True, **options: Any) -> list[Need]:
    """Compile all kernels that a step of a model needs, at once, before the first step.

    Every rank calls it. Ranks of one machine share the work; one progress bar shows it. The model does not run: it is
    traced with tensors that have no values, as ``torch.compile`` traces it. Kernels of calls with ``schedule="auto"``
    are those of the recorded or predicted configuration. If such a call would measure, they are also those that it
    measures. Kernels that are compiled already, or packed, are not compiled again.

    Example::

        distgemm.warmup(model, torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda"))

    Args:
        model: a module with layers or styles of :mod:`distgemm.nn`, or calls of the functions of distgemm. With FSDP2,
            before ``fully_shard``.
        *inputs: what it is called with in a step; shapes, types and devices of tensors count, and no values.
        backward: whether there is a backward pass, too.
        **options: keyword arguments of the model.

    Returns:
        The calls of distgemm in a step, each once.

    Raises:
        CompilerNotFoundError: if a kernel is to be compiled, and there is no compiler.
        CompileError: if the compiler fails.
        Exception: what the model raises, such as for an operation that cannot be traced.
    """
    needs = needs_of(model, *inputs, backward=boolean("backward", backward), **options)
    if any(need.device == "cuda" for need in needs):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with compiling_for(CutlassProvider().arch, gpu_name()):  # the best, whatever is there
            sources = sources_for(rotated(needs, rank, ranks), scope_of_calls())
            build(sources, cores_of_rank(ranks), progress=rank == 0)
    return needs


def scope_of_calls() -> Scope:
    """Which kernels calls with ``schedule="auto"`` ask for: those that they measure, unless DISTGEMM_TUNE=0."""
    return "measured" if switch("DISTGEMM_TUNE", True) else "selected"


def needs_of(model: nn.Module, *inputs: Any, backward: bool = True, **options: Any) -> list[Need]:
    """The calls of distgemm in a step of a model, each once. See :func:`warmup` for the arguments."""
    instance("model", model, nn.Module, "an nn.Module")
    # Tensors that the module keeps besides its parameters and buffers may have values.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, record_needs() as found:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (inputs, options))
        every: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state: dict[str, torch.Tensor] = {name: mode.from_tensor(each) for name, each in every.items()}
        outputs = torch.func.functional_call(model, state, args, kwargs)
        if backward:
            ends, starts = _with_gradients(outputs), _with_gradients((state, args, kwargs))
            if ends and starts:  # otherwise everything is frozen
                torch.autograd.grad(ends, starts, [torch.ones_like(each) for each in ends], allow_unused=True)
    return list(found)


def _with_gradients(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and each.requires_grad]
