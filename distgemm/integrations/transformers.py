"""Hugging Face transformers' tensor parallelism, computed by distgemm.

transformers looks its styles up by name: a model's ``tp_plan`` says "colwise" and "rowwise". :func:`install` puts other
styles under these names. Parameters, loading and checkpoints stay those of transformers. Written for transformers
5.17.0, and tested with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from distgemm.nn.replicated import linear_of_replicated
from distgemm.nn.tensors import input_replicated, local, uneven
from distgemm.torch_ops.functional import check_schedule, group_name, matmul_all_reduce

__all__ = ["install", "uninstall"]

Tensor = torch.Tensor
_THEIRS: dict[str, Any] = {}
"""transformers' own styles, while distgemm's are in their place."""


def install(schedule: str = "auto") -> None:
    """Let distgemm compute the linears of models that are loaded with a ``tp_plan`` from now on, on all ranks.

    A "rowwise" nn.Linear is a :func:`distgemm.matmul_all_reduce`. A "colwise" one needs no transfer in the forward
    pass, and the gradient of its input is a GEMM + all-reduce. Embeddings, quantised linears and all other styles stay
    those of transformers.

    Args:
        schedule: of the all-reduces, as in :func:`distgemm.matmul_all_reduce`. Gradients take "auto".

    Raises:
        RuntimeError: if it is installed already.
        ValueError: if there is no such schedule, or if it computes no all-reduce.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, RowwiseParallel

    class Colwise(ColwiseParallel):  # type: ignore[misc]  # transformers is imported at the call
        def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> Any:
            if not _is_plain(module):
                return super().install_forward(module, mesh)
            module.forward = partial(_colwise, module, mesh)  # type: ignore[method-assign]
            return module

    class Rowwise(RowwiseParallel):  # type: ignore[misc]  # as above
        def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> Any:
            if not _is_plain(module):
                return super().install_forward(module, mesh)
            module.forward = partial(_rowwise, module, mesh, schedule)  # type: ignore[method-assign]
            return module

    check_schedule(schedule, None, {"gemm+ar": "a rowwise linear"})
    if _THEIRS:
        raise RuntimeError("install() was called before: distgemm.integrations.transformers.uninstall() comes first")
    for name, style in (("colwise", Colwise()), ("rowwise", Rowwise())):
        _THEIRS[name] = ALL_PARALLEL_STYLES[name]
        ALL_PARALLEL_STYLES.register(name, style)


def uninstall() -> None:
    """Give transformers its own styles back, for models that are loaded from now on.

    Raises:
        RuntimeError: if nothing is installed.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if not _THEIRS:
        raise RuntimeError("distgemm.integrations.transformers.install() was not called")
    for name in list(_THEIRS):
        ALL_PARALLEL_STYLES.register(name, _THEIRS.pop(name))


def _is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    if not isinstance(module, torch.nn.Linear) or getattr(module, "_hf_quantized_needs_local_tp", False):
        return False
    return type(module).forward is torch.nn.Linear.forward  # others compute something else, such as a quantised product


def _colwise(module: torch.nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    x = input_replicated("colwise", x, mesh)
    out_features = uneven(module.out_features, mesh.size())
    return linear_of_replicated(x, local(module.weight), local(module.bias), group_name(mesh), out_features)


def _rowwise(module: torch.nn.Linear, mesh: DeviceMesh, schedule: str, x: Tensor) -> Tensor:
    found: Tensor = matmul_all_reduce(
        local(x),
        local(module.weight),
        group=group_name(mesh),
        bias=local(module.bias),
        schedule=schedule,
        in_features=uneven(module.in_features, mesh.size()),
    )
    return found
