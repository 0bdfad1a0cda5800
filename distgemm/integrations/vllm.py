"""vLLM's row-parallel linears, computed by distgemm.

:func:`apply` changes the ``RowParallelLinear`` of a model in place. Written for vLLM 0.31.0 and 0.33.0, and tested with
them.
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

    Call it in every worker, behind the construction of a model that vLLM does not compile. vLLM's ``LLM.apply_model``
    does so with ``enforce_eager=True``.

    Args:
        model: a model that vLLM has built.
        schedule: as in :func:`distgemm.matmul_all_reduce`.

    Returns:
        The layers that distgemm computes, and why others are left.

    Raises:
        ValueError: if there is no such schedule, if it does not compute the layers, or if the model has no row-parallel
            linear.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    def find(layer: Any) -> Replaced | str | None:
        if not isinstance(layer, RowParallelLinear):
            return None
        if layer.tp_size == 1:
            return "its group has one rank"
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            return f"its weight is quantised: {type(layer.quant_method).__name__}"
        if not layer.input_is_parallel or not layer.reduce_results:
            return "input_is_parallel or reduce_results is off"
        return Replaced("forward", _row, "gemm+ar")

    return replace(model, find, "RowParallelLinear of vLLM", schedule)


def remove(model: torch.nn.Module) -> None:
    """Let vLLM compute all layers of a model again."""
    restore(model)


def _row(layer: Any, schedule: str, input_: Tensor) -> Any:
    from vllm.distributed import get_tp_group

    output = matmul_all_reduce(input_, layer.weight, group=get_tp_group().device_group, schedule=schedule)
    found = with_bias(layer, output)
    return found if layer.return_bias else found[0]
