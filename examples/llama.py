"""A small Llama of plain torch modules, and the plan that makes it tensor parallel.

Tensors are (tokens, batch, features). Between layers, the tokens are split over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import distgemm


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 256
    hidden: int = 64
    intermediate: int = 176
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    theta: float = 10000.0


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.features, self.theta = config.hidden // config.heads, config.theta
        self.wq = nn.Linear(config.hidden, config.heads * self.features, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * self.features, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * self.features, bias=False)
        self.wo = nn.Linear(config.heads * self.features, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The projections have the numbers of tokens and heads. With tensor parallelism, x has this rank's tokens, and
        # q has all tokens of this rank's heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.features)).permute(1, 2, 0, 3) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q), self.rotate(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.permute(2, 0, 1, 3).flatten(-2))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        tokens, half = x.shape[-2], self.features // 2
        frequencies = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.arange(tokens, device=x.device, dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class MLP(nn.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """From token ids (tokens, batch) to logits (tokens, batch, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel_plan() -> dict[str, Any]:
    """The styles for parallelize_module.

    Logits are DTensors with a part of the vocabulary on each rank, as torch's loss_parallel takes them.
    """
    return {
        "embedding": distgemm.nn.RowwiseParallel(sequence_dim=0),
        "blocks.*.attention_norm": distgemm.nn.SequenceParallel(sequence_dim=0),
        "blocks.*.attention": distgemm.nn.SharedColwiseParallel("wq", "wk", "wv", sequence_dim=0),
        "blocks.*.attention.wo": distgemm.nn.RowwiseParallel(sequence_dim=0),
        "blocks.*.mlp_norm": distgemm.nn.SequenceParallel(sequence_dim=0),
        "blocks.*.mlp": distgemm.nn.SharedColwiseParallel("gate", "up", sequence_dim=0),
        "blocks.*.mlp.down": distgemm.nn.RowwiseParallel(sequence_dim=0),
        "norm": distgemm.nn.SequenceParallel(sequence_dim=0),
        "head": distgemm.nn.ColwiseParallel(sequence_dim=0, use_local_output=False),
    }
