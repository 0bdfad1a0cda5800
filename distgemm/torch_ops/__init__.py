"""Functions on torch tensors, with gradients.

``functional`` has the functions that users call, ``library`` the ops that torch knows, and ``dispatch`` the executables
that they run.
"""

from distgemm.torch_ops.dispatch import (
    CHAIN_TOKENS,
    KEPT_BYTES,
    ONE_SHOT_TOKENS,
    CallRecord,
    last_call,
    record_calls,
    select_schedule,
)
from distgemm.torch_ops.functional import (
    all_gather_matmul,
    all_to_all_matmul,
    gather,
    group_name,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)

__all__ = [
    "CHAIN_TOKENS",
    "KEPT_BYTES",
    "ONE_SHOT_TOKENS",
    "CallRecord",
    "all_gather_matmul",
    "all_to_all_matmul",
    "gather",
    "group_name",
    "last_call",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "record_calls",
    "select_schedule",
]
