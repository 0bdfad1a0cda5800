"""Operations on torch tensors, with gradients: what users call, the ops that torch knows, and what they run."""

from distgemm.torch_ops.auto import CHAIN_TOKENS, select_schedule
from distgemm.torch_ops.dispatch import CACHED, CallRecord, last_call, record_calls
from distgemm.torch_ops.functional import all_gather_matmul, group_name, matmul_all_reduce, matmul_reduce_scatter

__all__ = [
    "CACHED",
    "CHAIN_TOKENS",
    "CallRecord",
    "all_gather_matmul",
    "select_schedule",
    "group_name",
    "last_call",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "record_calls",
]
