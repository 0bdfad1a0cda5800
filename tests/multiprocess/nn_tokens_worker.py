"""The ranks of the tests of layers with unequal tokens, of layouts of styles, of shards in files, and of LoRA."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel import SequenceParallel as SequenceParallelOfTorch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701  (torch has no public name)
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
    """A norm and an MLP with a gate and an up projection, with a residual connection."""

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


def compiled_tokens() -> list[str]:
    """A block of 2 ranks in torch.compile, without a graph break, whose tokens are others in each call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(13)
    now, wrong = list[int](), []
    plan = {name.partition(".")[2][2:]: style for name, style in plan_of(0, lambda: now).items() if "blocks" in name}
    block = parallelize_module(Block().double(), mesh, plan)
    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    for sizes in ((3, 4), (2, 5), (4, 2)):
        now[:], results = sizes, []
        for run in (block, fast):
            block.zero_grad()
            x = torch.linspace(-1, 1, sizes[mesh.get_local_rank()] * 2 * HIDDEN, dtype=torch.float64)
            x = x.view(-1, 2, HIDDEN).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(whole(each.grad).clone() for each in block.parameters())])
        wrong += [f"{sizes}: {a} instead of {b}" for a, b in zip(*results, strict=True) if differs(a, b)]
    error = error_of(lambda: fast(torch.empty(0, 2, HIDDEN, dtype=torch.float64)))
    return wrong + ([] if "Give each rank a token, or do not compile" in error else [error or "no error"])


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
    embedding = parallelize_module(nn.Embedding(8, 4), mesh, distgemm.nn.RowwiseParallel(m_per_rank=(1,) * ranks))
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
            ("output_layouts is Shard(-1), this rank's features", lambda: column(output_layouts=Shard(1))),
            ("distgemm.nn.RowwiseParallel is for tokens that are split", lambda: column(output_layouts=Shard(0))),
            ("input_layouts is Shard(-1), this rank's features", lambda: row(input_layouts=Shard(0))),
            (
                "embeddings leave some of",
                lambda: parallelize_module(nn.Embedding(ranks - 1, 4), mesh, row()),
            ),
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
        ("is (11, 6) over all ranks, and the shards have the shapes [(6, 6)]", lambda: load(model, [
            {name: states[0][name]}])),
        ("norm.weight is whole on each rank, and the state dicts differ", lambda: load(model, [
            {"norm.weight": torch.ones(6)}, {"norm.weight": torch.zeros(6)}])),
        ("and the shards have the shapes [(6, 6), (5, 7)]", lambda: load(model, [
            {name: torch.ones(6, 6)}, {name: torch.ones(5, 7)}])),
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


def of_megatron() -> list[str]:
    """Layers and a model of styles have the shards that Megatron's own layers have."""
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
    torch.manual_seed(1)
    up, down = nn.Linear(6, 8 * ranks).double(), nn.Linear(8 * ranks, 6).double()
    styled = parallelize_module(
        nn.ModuleDict({"up": copy.deepcopy(up), "down": copy.deepcopy(down)}),
        mesh,
        {"up": distgemm.nn.ColwiseParallel(), "down": distgemm.nn.RowwiseParallel()},
    )
    ours = {
        "up": distgemm.nn.ColumnParallelLinear.from_linear(up, group=mesh),
        "down": distgemm.nn.RowParallelLinear.from_linear(down, group=mesh),
    }
    fields = ("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
    for offsets in ((), ((0, 1, 3),)):  # the second is the layer 1 of 3 of a pipeline
        metadata = {"dp_cp_group": None}
        of_styles = megatron.sharded_state_dict(styled, "model.", offsets, metadata)
        for name, layer, linear, dim in (("up", column, up, 0), ("down", row, down, 1)):
            wanted = layer.sharded_state_dict(f"model.{name}.", offsets, metadata)
            wanted = {key: each for key, each in wanted.items() if "_extra_state" not in key}
            of_layer = ours[name].sharded_state_dict(f"model.{name}.", offsets, metadata)
            for found in (of_layer, {key: each for key, each in of_styles.items() if f".{name}." in key}):
                if found.keys() != wanted.keys():
                    wrong.append(f"{found.keys()} and {wanted.keys()}")
                wrong += [
                    f"{key}.{field}: {getattr(found[key], field)} instead of {getattr(wanted[key], field)}"
                    for key in wanted
                    for field in (*fields, "prepend_axis_num", "allow_shape_mismatch")
                    if getattr(found[key], field) != getattr(wanted[key], field)
                ]
                bias = linear.bias if dim else linear.bias.chunk(ranks)[rank]
                part = linear.weight.chunk(ranks, dim)[rank]
                for key, value in (("weight", part), ("bias", bias)):
                    if differs(found[f"model.{name}.{key}"].data, value):
                        wrong.append(f"{key} of {name}")
    uneven = distgemm.nn.ColumnParallelLinear(6, 2 * ranks + 1, group=mesh)
    of_two = nn.Linear(2, 2 * ranks, bias=False)  # as FSDP2 makes it
    two = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    of_two.weight = nn.Parameter(distribute_tensor(of_two.weight, two, [Shard(0), Shard(0)]))
    return wrong + errors_of(
        [
            ("Megatron's shards have one size", uneven.sharded_state_dict),
            ("weight is split over DeviceMesh", lambda: megatron.sharded_state_dict(of_two)),
        ]
    )


# --- LoRA -------------------------------------------------------------------------------------------------


class LoraColumn(nn.Module):
    """The layer of docs/pytorch.md: frozen columns, and adapters whose gather is that of the columns."""

    def __init__(self, base_layer: distgemm.nn.ColumnParallelLinear, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        mesh = base_layer.mesh
        self.base_layer, self.scaling = base_layer.requires_grad_(False), scaling
        self.lora_A = nn.Parameter(distribute_tensor(a, mesh, [Replicate()], src_data_rank=None))
        self.lora_B = nn.Parameter(distribute_tensor(b, mesh, [Shard(0)], src_data_rank=None))
        self.lora_A.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        bias = None if base.bias is None else base.bias.to_local()  # type: ignore[union-attr]
        # Each rank computes the gradient of A that its out_features have a part in.
        a = self.lora_A.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        y, h = distgemm.all_gather_matmul(
            x,
            [base.weight.to_local(), a],  # type: ignore[attr-defined]
            group=base.group,
            bias=[bias, None],
            out_features=[base.out_features, a.shape[0] * base.ranks],
        )
        found: Tensor = y + self.scaling * nn.functional.linear(h, self.lora_B.to_local())  # type: ignore[attr-defined]
        return found


class LoraRow(nn.Module):
    """Frozen rows, and adapters with a small reduce-scatter of their own."""

    def __init__(self, base_layer: distgemm.nn.RowParallelLinear, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        mesh = base_layer.mesh
        self.base_layer, self.scaling = base_layer.requires_grad_(False), scaling
        self.lora_A = nn.Parameter(distribute_tensor(a, mesh, [Shard(1)], src_data_rank=None))
        self.lora_B = nn.Parameter(distribute_tensor(b, mesh, [Replicate()], src_data_rank=None))
        self.lora_B.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        h = distgemm.matmul_reduce_scatter(x, self.lora_A.to_local(), group=base.group, in_features=base.in_features)  # type: ignore[attr-defined]
        b = self.lora_B.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]  # of this rank's tokens
        found: Tensor = base(x) + self.scaling * nn.functional.linear(h, b)
        return found


class Products(TorchDispatchMode):
    """The shapes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(found.shape))
        return found


def lora() -> list[str]:
    """Results and gradients of adapters beside frozen layers, which compute no gradient and gather for none."""
    ranks, rank, r, wrong = dist.get_world_size(), dist.get_rank(), 2, []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(8)
    up, down = nn.Linear(6, 4 * ranks - 1).double(), nn.Linear(4 * ranks - 1, 5).double()
    x = torch.randn(3 * ranks, 6, dtype=torch.float64, requires_grad=True)
    adapters = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((r, 6), (4 * ranks - 1, r), (r, 4 * ranks - 1), (5, r))
    ]
    a, b, c, d = adapters
    y = down(hidden := torch.tanh(up(x) + 0.5 * x @ a.t() @ b.t())) + 0.5 * hidden @ c.t() @ d.t()
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    first = LoraColumn(distgemm.nn.ColumnParallelLinear.from_linear(up, group=mesh), a.detach(), b.detach(), 0.5)
    second = LoraRow(distgemm.nn.RowParallelLinear.from_linear(down, group=mesh), c.detach(), d.detach(), 0.5)
    mine = x.detach().chunk(ranks)[rank].clone().requires_grad_()
    with distgemm.record_calls() as forward:
        found = second(torch.tanh(first(mine)))
    with distgemm.record_calls() as backward, Products() as products:
        (found * weights.chunk(ranks)[rank]).sum().backward()
    made = Counter(call.function for call in forward), Counter(call.function for call in backward)
    if made != (
        {"all_gather_matmul": 1, "matmul_reduce_scatter": 2},
        # Behind: base and A of the rows. Before: the input of both, and A's gather; none for a frozen weight.
        {"all_gather_matmul": 2, "matmul_reduce_scatter": 1, "gather": 1},
    ):
        wrong.append(f"{made}")
    for shape in (first.base_layer.part_shape("weight"), second.base_layer.part_shape("weight")):
        if shape in products.shapes:
            wrong.append(f"a product of {shape}, the gradient of a frozen weight: {products.shapes}")
    if differs(found, y.chunk(ranks)[rank]) or differs(mine.grad, x.grad.chunk(ranks)[rank]):  # type: ignore[union-attr]
        wrong.append("result, or gradient of the input")
    for name, parameter, plain in zip(
        ("A", "B", "A of rows", "B of rows"),
        (first.lora_A, first.lora_B, second.lora_A, second.lora_B),
        adapters,
        strict=True,
    ):
        assert isinstance(parameter.grad, DTensor)
        if parameter.grad.placements != parameter.placements or differs(whole(parameter.grad), plain.grad):  # type: ignore[attr-defined]
            wrong.append(f"gradient of {name}")
    if any(each.grad is not None for each in (*first.base_layer.parameters(), *second.base_layer.parameters())):
        wrong.append("a frozen parameter has a gradient")
    names = {"base_layer.weight", "base_layer.bias", "lora_A", "lora_B"}
    if set(distgemm.nn.full_state_dict(first)) != names:
        wrong.append("names")
    # Nothing wants the gathered input: no second gather, no all-gather behind rows that only their input needs.
    with distgemm.record_calls() as calls:
        second.base_layer(torch.tanh(first.base_layer(mine))).sum().backward()
    functions = [call.function for call in calls]
    if functions != ["all_gather_matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_reduce_scatter"]:
        wrong.append(f"frozen layers: {functions}")
    return wrong
