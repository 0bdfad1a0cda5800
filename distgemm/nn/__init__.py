"""Tensor-parallel layers: modules, and styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from distgemm.nn.linear import ColumnParallelLinear, RowParallelLinear
from distgemm.nn.recipes import all_but, use_recipe
from distgemm.nn.state import full_state_dict, load_full_state_dict, load_shard_state_dict, shard_state_dict
from distgemm.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedColwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedColwiseParallel",
    "all_but",
    "full_state_dict",
    "load_full_state_dict",
    "load_shard_state_dict",
    "shard_state_dict",
    "use_recipe",
]
