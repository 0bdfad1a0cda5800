"""SGLang's row-parallel linears, computed by distgemm.

:func:`apply` changes the ``RowParallelLinear`` of a model in place. Written for SGLang 0.5.23, and tested with it.
"""

from __future__ import annotations

from typing import Any

import torch

from distgemm.integrations.layers import Applied, Replaced, replace, restore, with_bias
from distgemm.torch_ops.functional import matmul_all_reduce

__all__ = ["apply", "remove"]

Tensor = torch.Tensor


def apply(model: torch.nn.Module, schedule: str = "auto") -> Applied:
    """Let distgemm compute the row-parallel linears of a model: each is a :func:`distgemm.matmul_all_reduce`.

    Call it in every worker, behind the construction of the model and before CUDA graphs are captured. Where SGLang
    reduces later, or not at all, its own forward runs: with ``skip_all_reduce``, where the decoder reduce-scatters
    (``mlp_reduce_scatter``), with a caller's ``output_tensor``, and where communication is quantised. With
    ``--enable-layernorm-sp``, its own forward calls torch's fused ops, which :func:`distgemm.install` serves.

    Args:
        model: a model that SGLang has built.
        schedule: as in :func:`distgemm.matmul_all_reduce`.

    Returns:
        The layers that distgemm computes, and why others are left.

    Raises:
        ValueError: if there is no such schedule, if it does not compute the layers, or if the model has no row-parallel
            linear.
    """
    from sglang.srt.layers.linear import RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    def find(layer: Any) -> Replaced | str | None:
        if not isinstance(layer, RowParallelLinear):
            return None
        if layer.tp_group is None or layer.tp_group.world_size == 1:
            return "its group has one rank"
        if layer.tp_group.world_size != _group(layer).world_size:
            return "its weight is split over other ranks than its sum"
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            return f"its weight is quantised: {type(layer.quant_method).__name__}"
        if not layer.input_is_parallel or not layer.reduce_results:
            return "input_is_parallel or reduce_results is off"
        return Replaced("forward", _row, "gemm+ar")

    return replace(model, find, "RowParallelLinear of SGLang", schedule)


def remove(model: torch.nn.Module) -> None:
    """Let SGLang compute all layers of a model again."""
    restore(model)


def _group(layer: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_group if layer.use_dp_attention_reduce else get_parallel().tp_group


def _row(
    layer: Any,
    schedule: str,
    input_: Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: Tensor | None = None,
) -> Any:
    from sglang.srt.runtime_context import get_exec, get_forward

    flags = get_forward()
    reduces_later = skip_all_reduce or flags.mlp_reduce_scatter or flags.sp_active
    quantised = forward_batch is not None and get_exec().comm.enable_quant_communications
    if reduces_later or quantised or output_tensor is not None:
        return type(layer).forward(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    group = _group(layer).device_group
    return with_bias(layer, matmul_all_reduce(input_, layer.weight, group=group, schedule=schedule))
