"""The ranks of the tests of layers with unequal tokens, of layouts of styles, of shards in files, and of LoRA."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel import SequenceParallel as SequenceParallelOfTorch
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


# --- layouts of styles --------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Projections of (batch, tokens, features), and a sum over the tokens before each one."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.wq, self.wv, self.wo = nn.Linear(hidden, inner), nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.wo(torch.tanh(self.wq(x)) * self.wv(x).cumsum(1))
        return found


class AsInTorchtitan(nn.Module):
    """A model whose residual stream is a DTensor, if styles make it one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN), Mixing(HIDDEN, inner)
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        x = x + self.attention(self.attention_norm(x))
        logits: Tensor = self.output(self.norm(x))
        return logits


def layouts() -> list[str]:
    """A plan with the placements of torchtitan's; inputs that are split, outputs that are gathered, and errors."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    column, row, norm = distgemm.nn.ColwiseParallel, distgemm.nn.RowwiseParallel, SequenceParallelOfTorch
    prepare = PrepareModuleInput
    for tokens in (2 * ranks, 2 * ranks + 1):
        torch.manual_seed(3)
        plain = AsInTorchtitan(3 * ranks - 1).double()
        m_per_rank = None if tokens % ranks == 0 else split_of(tokens)
        plan: dict[str, Any] = {
            "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "attention_norm": norm(),
            "attention": prepare(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)),
            "attention.wq": column(input_layouts=Shard(1), output_layouts=Shard(-1)),
            "attention.wv": column(),
            "attention.wo": row(
                input_layouts=Shard(-1), output_layouts=Shard(1), m_per_rank=m_per_rank, use_local_output=False
            ),
            "norm": norm(),
            "output": column(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        model = parallelize_module(copy.deepcopy(plain), mesh, plan)
        ids = torch.randint(VOCABULARY, (2, tokens))
        y, wanted = model(ids), plain(ids)
        weights = torch.randn_like(wanted)
        (y * weights).sum().backward()
        (wanted * weights).sum().backward()
        if type(y) is not Tensor or differs(y, wanted):
            wrong.append(f"{tokens} tokens: {type(y).__name__}")
        wrong += [
            f"{tokens} tokens: gradient of {name}"
            for name, x in model.named_parameters()
            if differs(whole(x.grad), plain.get_parameter(name).grad)
        ]
    # Every rank has all features before the rows; tokens are split, or all on every rank, behind them.
    for to, as_dtensor in ((Shard(0), False), (Replicate(), False), (Shard(0), True), (Replicate(), True)):
        torch.manual_seed(4)
        linear, x = nn.Linear(3 * ranks - 1, 4).double(), torch.randn(2 * ranks, 3 * ranks - 1).double()
        x.requires_grad_()
        style = row(input_layouts=Replicate(), output_layouts=to, use_local_output=not as_dtensor)  # type: ignore[arg-type]
        split_linear = parallelize_module(copy.deepcopy(linear), mesh, style)
        mine = x.detach().clone().requires_grad_()
        y, wanted = split_linear(mine), linear(x)
        (whole(y) if as_dtensor else y).square().sum().backward()
        wanted.square().sum().backward()
        part = wanted if isinstance(to, Replicate) or as_dtensor else wanted.chunk(ranks)[rank]
        if isinstance(y, DTensor) != as_dtensor or differs(whole(y), part):
            wrong.append(f"rows of replicated features, {to}")
        if differs(mine.grad, x.grad) or differs(whole(split_linear.weight.grad), linear.weight.grad):
            wrong.append(f"rows of replicated features, {to}: gradients")
    # Every rank has all tokens, and all features behind the columns.
    torch.manual_seed(5)
    linear, x = nn.Linear(4, 3 * ranks - 1).double(), torch.randn(3, 4).double()
    made = parallelize_module(linear, mesh, column(input_layouts=Replicate(), output_layouts=Replicate()))
    if differs(made(x), nn.functional.linear(x, whole(made.weight), whole(made.bias))):
        wrong.append("columns of replicated tokens, gathered features")
    parts = DTensor.from_local(torch.ones(2, 3 * ranks - 1).double(), mesh, [Replicate()], run_check=False)
    gathered = parallelize_module(nn.Linear(4, 2 * ranks).double(), mesh, {"": prepare(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))})  # fmt: skip
    return wrong + errors_of(
        [
            ("output_layouts is Shard(-1), this rank's features, or Replicate()", lambda: column(output_layouts=Shard(1))),
            ("distgemm.nn.RowwiseParallel is for tokens that are split", lambda: column(output_layouts=Shard(0))),
            ("input_layouts is Shard(-1), this rank's features", lambda: row(input_layouts=Shard(0))),
            ("an nn.Embedding takes input_layouts=Replicate() or None", lambda: parallelize_module(
                nn.Embedding(8, 4), mesh, row(input_layouts=Shard(-1)))),
            ("or input_layouts=Replicate() in the RowwiseParallel", lambda: parallelize_module(
                nn.Linear(3 * ranks - 1, 4).double(), mesh, row())(parts)),
            ("input_layouts=Replicate() in the ColwiseParallel gathers nothing", lambda: parallelize_module(
                gathered, mesh, column())(torch.ones(1, 4).double())),
        ]
    )  # fmt: skip


# --- shards in files ----------------------------------------------------------------------------------------


def shards() -> list[str]:
    """Shards of 2 ranks are loaded by 4, and back: whole weights, stacks of weights, and what is refused."""
    wrong = []
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wide, two = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), square["tp"]

    def made(mesh: DeviceMesh, seed: int, device: str = "cpu") -> nn.Module:
        torch.manual_seed(seed)
        with torch.device(device):
            return parallelize_module(Model(0).double(), mesh, plan_of(0, None))

    def shards_of(model: nn.Module, mesh: DeviceMesh) -> list[dict[str, Tensor]]:
        found: list[Any] = [None] * mesh.size()
        dist.all_gather_object(found, distgemm.nn.shard_state_dict(model), group=mesh.get_group())
        return found

    for source, target in ((two, wide), (wide, two), (two, two)):
        model, wanted = made(source, 1), distgemm.nn.full_state_dict(made(source, 1))
        states = shards_of(model, source)
        if type(states[0]["blocks.0.up.weight"]) is not Tensor:
            wrong.append("no plain tensor")
        for device in ("cpu", "meta"):
            loaded = made(target, 2, device)
            distgemm.nn.load_shard_state_dict(loaded, states, assign=device == "meta")
            state = distgemm.nn.full_state_dict(loaded)
            wrong += [
                f"{source.size()} to {target.size()}: {key}" for key in wanted if differs(state[key], wanted[key])
            ]
    # q, k and v in one layer: each rank has q, k and v of its heads.
    torch.manual_seed(4)
    weights = {name: torch.randn(size, 5, dtype=torch.float64) for name, size in (("q", 8), ("k", 4), ("v", 4))}
    layer = distgemm.nn.ColumnParallelLinear(5, 16, bias=False, group=wide, dtype=torch.float64)
    stacks = [{"weight": torch.cat([each.chunk(2)[rank] for each in weights.values()])} for rank in range(2)]
    distgemm.nn.load_shard_state_dict(layer, stacks, stacked={"weight": (2, 1, 1)})
    mine = torch.cat([each.chunk(4)[wide.get_local_rank()] for each in weights.values()])
    if differs(distgemm.nn.shard_state_dict(layer)["weight"], mine):
        wrong.append("stacked")
    states = shards_of(made(two, 1), two)
    model, name = made(wide, 2), "blocks.0.up.weight"
    load = distgemm.nn.load_shard_state_dict
    sharded = fully_shard(made(two, 3), mesh=square["dp"])
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("state_dicts is a sequence with a state dict for each rank, got []", lambda: load(model, [])),
        ("state_dicts[1] is a mapping from names to tensors", lambda: load(model, [states[0], 3])),  # type: ignore[list-item]
        ("is in the state dicts of the ranks [0] only, of 2 ranks", lambda: load(model, [states[0], {}])),
        ("is (11, 6) over all ranks, and the shards have the shapes [(6, 6)]", lambda: load(model, [{name: states[0][name]}])),
        ("norm.weight is whole on each rank, and the state dicts differ", lambda: load(model, [
            {"norm.weight": torch.ones(6)}, {"norm.weight": torch.zeros(6)}])),
        ("is no stack of parts with the sizes [4, 1]", lambda: load(model, states, stacked={name: (4, 1)})),
        ("stacked has nonsense, which are no parameters", lambda: load(model, states, stacked={"nonsense": (1,)})),
        ("pass assign=True", lambda: load(made(wide, 2, "meta"), states)),
        ("is that of one dimension of a mesh", lambda: distgemm.nn.shard_state_dict(sharded)),
    ]  # fmt: skip
    error = error_of(lambda: load(model, [{"other": torch.ones(1)}]))
    if "Unexpected key" not in error or "Missing key" not in error:
        wrong.append(error)
    load(model, [{}], strict=False)
    return wrong + errors_of(attempts)


def of_megatron(folder: str) -> list[str]:
    """Layers, and a model of styles, whose shards are those of Megatron's layers, and which its checkpoints load."""
    from megatron.core import dist_checkpointing
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers as theirs

    from distgemm.integrations import megatron

    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    mesh, group = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), dist.group.WORLD
    settings: Any = ModelParallelConfig(
        tensor_model_parallel_size=ranks, use_cpu_initialization=True, params_dtype=torch.float64
    )
    options: Any = {"config": settings, "init_method": nn.init.normal_, "skip_bias_add": False, "tp_group": group}
    column: Any = theirs.ColumnParallelLinear(6, 8 * ranks, **options)
    row: Any = theirs.RowParallelLinear(8 * ranks, 6, bias=True, input_is_parallel=True, **options)
    for pair in ((column, distgemm.nn.ColumnParallelLinear(6, 8 * ranks, group=mesh, dtype=torch.float64)),
                 (row, distgemm.nn.RowParallelLinear(8 * ranks, 6, group=mesh, dtype=torch.float64))):  # fmt: skip
        metadata = {"dp_cp_group": None}
        there, here = (each.sharded_state_dict("layer.", ((0, 1, 3),), metadata) for each in pair)
        there = {key: each for key, each in there.items() if not key.endswith("_extra_state")}
        if there.keys() != here.keys():
            wrong.append(f"{there.keys()} and {here.keys()}")
        fields = ("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
        wrong += [
            f"{key}.{field}: {getattr(here[key], field)} instead of {getattr(there[key], field)}"
            for key in there
            for field in (*fields, "prepend_axis_num", "allow_shape_mismatch")
            if getattr(here[key], field) != getattr(there[key], field)
        ]
    torch.manual_seed(1)
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8 * ranks), nn.Linear(8 * ranks, 6)).double()
    plan: dict[str, Any] = {
        "0": distgemm.nn.SequenceParallel(sequence_dim=0),
        "1": distgemm.nn.ColwiseParallel(),
        "2": distgemm.nn.RowwiseParallel(),
    }
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    # Megatron starts a process, and processes of launch may have no children.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    dist_checkpointing.save(megatron.sharded_state_dict(model), folder)
    # Megatron's layers load it, and so do ours.
    for name, layer, dim in (("1", column, 0), ("2", row, 1)):
        wanted: Any = plain[int(name)]
        asked = layer.sharded_state_dict(f"{name}.", (), {"dp_cp_group": None})
        found = dist_checkpointing.load({key: each for key, each in asked.items() if "extra" not in key}, folder)
        bias = wanted.bias if dim else wanted.bias.chunk(ranks)[rank]
        if differs(found[f"{name}.weight"], wanted.weight.chunk(ranks, dim)[rank]) or differs(
            found[f"{name}.bias"], bias
        ):
            wrong.append(f"{name} loaded by Megatron")
    other = parallelize_module(copy.deepcopy(plain), mesh, plan)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    dist_checkpointing.load(megatron.sharded_state_dict(other), folder)
    state = distgemm.nn.full_state_dict(other)
    wrong += [f"{name} loaded" for name, value in plain.state_dict().items() if differs(state[name], value)]
    uneven = distgemm.nn.ColumnParallelLinear(6, 2 * ranks + 1, group=mesh)
    return wrong + errors_of([("Megatron's shards have one size", uneven.sharded_state_dict)])
