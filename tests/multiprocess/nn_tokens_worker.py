"""The ranks of the tests of layers with unequal tokens, of layouts of styles, of shards in files, and of LoRA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, loss_parallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint as recompute

import distgemm
from tests.multiprocess.nn_worker import differs, error_of, whole
from tests.multiprocess.ops_torch_worker import split

Tensor = torch.Tensor
VOCABULARY, HIDDEN, INTERMEDIATE, BATCH = 13, 6, 11, 2
SIZES: dict[int, list[tuple[int, ...]]] = {
    2: [(3, 4), (0, 5), (7, 0)],
    3: [(4, 0, 3), (1, 2, 5), (0, 0, 6)],
    4: [(1, 0, 5, 2), (3, 3, 3, 1), (0, 6, 0, 0)],
}
"""Tokens of each rank, in each step."""


class Block(nn.Module):
    """A norm and a gated MLP, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.down(torch.tanh(self.gate(y)) * self.up(y))
        return found


class Model(nn.Module):
    """From ids of all tokens to logits of all tokens; in between, each rank has its tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.recomputes = dim, False
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plan_of(dim: int, m_per_rank: Any) -> dict[str, Any]:
    each = {"sequence_dim": dim, "m_per_rank": m_per_rank}
    norm = distgemm.nn.SequenceParallel(sequence_dim=dim)
    return {
        "embedding": distgemm.nn.RowwiseParallel(**each),
        "blocks.*.norm": norm,
        "blocks.*": distgemm.nn.SharedColwiseParallel("gate", "up", **each),
        "blocks.*.down": distgemm.nn.RowwiseParallel(**each),
        "norm": norm,
        "head": distgemm.nn.ColwiseParallel(use_local_output=False, **each),
    }


def _train(dim: int, tp: DeviceMesh, dp: DeviceMesh | None, recomputes: bool) -> list[str]:
    """Steps with other numbers of tokens each: losses, gradients, and parameters."""
    torch.manual_seed(13)
    plain, now = Model(dim).double(), list[int]()
    model = parallelize_module(copy.deepcopy(plain), tp, plan_of(dim, lambda: now))
    model.recomputes = recomputes
    if dp is not None:
        for module in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(module, mesh=dp)
            module.set_gradient_divide_factor(1.0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    wrong = []
    for step, sizes in enumerate(SIZES[tp.size()]):
        now[:] = sizes
        tokens = sum(sizes)
        shape = (tokens, 2 * BATCH) if dim == 0 else (2 * BATCH, tokens)
        ids, targets = torch.randint(VOCABULARY, shape), torch.randint(VOCABULARY, shape)
        if dp is None:
            mine = ids, targets
        else:
            mine = ids.chunk(2, 1 - dim)[dp.get_local_rank()], targets.chunk(2, 1 - dim)[dp.get_local_rank()]
        losses = []
        for each, optimizer, (given, wanted) in zip((plain, model), optimizers, ((ids, targets), mine), strict=True):
            optimizer.zero_grad()
            with loss_parallel():
                logits = each(given)
                loss = (
                    nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) * wanted.numel() / ids.numel()
                )
                loss.backward()
            losses.append(whole(loss).detach().clone())
        if dp is not None:
            dist.all_reduce(losses[1], group=dp.get_group())
        if differs(*losses):
            wrong.append(f"dim {dim}, step {step}: loss {losses}")
        for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
            if differs(whole(x.grad), y.grad):
                wrong.append(f"dim {dim}, step {step}: gradient of {name}")
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            clip_grad_norm_(each.parameters(), 0.05)
            optimizer.step()
    state = distgemm.nn.full_state_dict(model)
    return wrong + [name for name, value in plain.state_dict().items() if differs(state[name], value)]


def unequal_tokens() -> list[str]:
    """Models of styles, whose ranks have unequal numbers of tokens, and none, that change with each step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _train(0, mesh, None, recomputes=False) + _train(1, mesh, None, recomputes=True)


def unequal_tokens_sharded() -> list[str]:
    """The same with FSDP2 over two replicas, each with a half of the batch."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return _train(0, mesh["tp"], mesh["dp"], recomputes=False)


def tokens_of_layers() -> list[str]:
    """Where a layer or a style has the tokens of each rank from: its constructor, a call, or a DTensor."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    up, down = nn.Linear(5, 2 * ranks).double(), nn.Linear(2 * ranks, 3).double()
    sizes, other = SIZES[ranks][0], SIZES[ranks][1]
    now: list[tuple[int, ...] | None] = [sizes]

    def both(**options: Any) -> Callable[..., Tensor]:
        first = distgemm.nn.ColumnParallelLinear.from_linear(up, group=mesh, **options)
        second = distgemm.nn.RowParallelLinear.from_linear(down, group=mesh, **options)
        return lambda x, *tokens: second(torch.tanh(first(x, *tokens)), *tokens)

    def check(what: str, run: Callable[..., Tensor], tokens: tuple[int, ...], *given: Any) -> None:
        x = torch.randn(sum(tokens), 5, dtype=torch.float64)
        wanted = split(down(torch.tanh(up(x))), tokens, rank)
        if differs(run(split(x, tokens, rank), *given), wanted):
            wrong.append(what)

    check("constructor", both(m_per_rank=sizes), sizes)
    check("call", both(), sizes, sizes)
    check("call before constructor", both(m_per_rank=sizes), other, other)
    asked = both(m_per_rank=lambda: now[0])
    check("function", asked, sizes)
    now[0] = other
    check("function, changed", asked, other)
    now[0] = None
    check("function, None", asked, (2,) * ranks)
    # A DTensor says how many tokens each rank has: here the last rank has fewer, or none.
    for tokens in (3 * ranks - 1, ranks + 1):
        x = torch.randn(tokens, 5, dtype=torch.float64)
        parts = [len(part) for part in x.chunk(ranks)] + [0] * (ranks - len(x.chunk(ranks)))
        given = DTensor.from_local(split(x, parts, rank), mesh, [Shard(0)], shape=x.shape, stride=x.stride())
        style = parallelize_module(copy.deepcopy(up), mesh, distgemm.nn.ColwiseParallel(use_local_output=False))
        layer = distgemm.nn.ColumnParallelLinear.from_linear(up, group=mesh)
        if differs(whole(style(given)), up(x)) or differs(layer(given), up(x).chunk(ranks, 1)[rank]):
            wrong.append(f"a DTensor of {tokens} tokens")
    tokens = split_of(2 * ranks + 1)
    row = distgemm.nn.RowwiseParallel(m_per_rank=lambda: now[0], use_local_output=False)
    styled = parallelize_module(copy.deepcopy(down), mesh, row)
    x, now[0] = torch.randn(sum(tokens), 2 * ranks, dtype=torch.float64), tokens
    y = styled(x.chunk(ranks, 1)[rank])
    if not isinstance(y, DTensor) or y.placements != (Shard(0),) or differs(y.full_tensor(), down(x)):
        wrong.append("a DTensor of a RowwiseParallel")
    now[0] = (0, *tokens[1:-1], tokens[0] + tokens[-1])
    ones = torch.ones(1, 5, dtype=torch.float64)
    embedding = parallelize_module(nn.Embedding(4, 4), mesh, distgemm.nn.RowwiseParallel(m_per_rank=(1,) * ranks))
    attempts: list[tuple[str, Callable[[], Any]]] = [
        (
            "use_local_output=False makes a DTensor, which is split as torch.chunk",
            lambda: styled(x.chunk(ranks, 1)[rank]),
        ),
        ("m_per_rank[0] is an integer >= 0", lambda: both(m_per_rank=(-1,) * ranks)),
        ("m_per_rank is a tuple of integers >= 0, got 3", lambda: both(m_per_rank=3)),
        ("m_per_rank has an integer for each of", lambda: both(m_per_rank=(1,) * (ranks + 1))(ones)),
        ("m_per_rank is a tuple of integers >= 0, got 3", lambda: both(m_per_rank=lambda: 3)(ones)),
        ("one for each rank, with the sum 9, got", lambda: embedding(torch.zeros(9, dtype=torch.long))),
        (
            "with input_layouts=Replicate() nothing is gathered",
            lambda: distgemm.nn.ColwiseParallel(input_layouts=Replicate(), m_per_rank=sizes),
        ),
        (
            "with output_layouts=Replicate() every rank gets all tokens",
            lambda: distgemm.nn.RowwiseParallel(output_layouts=Replicate(), m_per_rank=sizes),
        ),
    ]
    return wrong + errors_of(attempts)


def split_of(tokens: int) -> tuple[int, ...]:
    ranks = dist.get_world_size()
    parts = [len(part) for part in torch.empty(tokens).chunk(ranks)]
    return (*parts, *[0] * (ranks - len(parts)))


def errors_of(attempts: list[tuple[str, Callable[[], Any]]]) -> list[str]:
    """The attempts that do not raise a ValueError with their message."""
    found = [(message, error_of(attempt)) for message, attempt in attempts]
    return [f"{m}: {error or 'no error'}" for m, error in found if not error.startswith("ValueError") or m not in error]
