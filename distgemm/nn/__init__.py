"""Tensor-parallel layers: modules, and styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from distgemm.nn.heads import heads_per_rank
from distgemm.nn.linear import ColumnParallelLinear, HeadsToTokensLinear, RowParallelLinear, TokensToHeadsLinear
from distgemm.nn.recipes import all_but, use_recipe
from distgemm.nn.state import full_state_dict, load_full_state_dict, load_shard_state_dict, shard_state_dict
from distgemm.nn.styles import (
    ColwiseParallel,
    HeadsToTokens,
    RowwiseParallel,
    SequenceParallel,
    SharedColwiseParallel,
    TokensToHeads,
)

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "HeadsToTokens",
    "HeadsToTokensLinear",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedColwiseParallel",
    "TokensToHeads",
    "TokensToHeadsLinear",
    "all_but",
    "full_state_dict",
    "heads_per_rank",
    "load_full_state_dict",
    "load_shard_state_dict",
    "shard_state_dict",
    "use_recipe",
]
