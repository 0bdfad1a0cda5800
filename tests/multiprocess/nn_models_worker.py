"""The ranks of the tests of whole models: training, checkpoints, batch-first models, torch.compile of blocks."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint as recompute

import distgemm
from tests.multiprocess.nn_worker import differs, error_of, loss_of, whole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama

Tensor = torch.Tensor
VOCABULARY, HIDDEN, TOKENS, BATCH = 13, 6, 12, 2
INTERMEDIATE = 11
"""A number that 2, 3 and 4 ranks do not divide."""
ON_TOKENS: Any = partial(distgemm.nn.SequenceParallel, sequence_dim=0)


class Block(nn.Module):
    """A norm and an MLP of layers, with a residual connection."""

    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        if mesh is None:
            self.up: nn.Module = nn.Linear(HIDDEN, INTERMEDIATE, dtype=torch.float64)
            self.down: nn.Module = nn.Linear(INTERMEDIATE, HIDDEN, dtype=torch.float64)
        else:
            options = {"group": mesh, "dtype": torch.float64, "sequence_dim": 0, **options}
            self.up = distgemm.nn.ColumnParallelLinear(HIDDEN, INTERMEDIATE, **options)
            self.down = distgemm.nn.RowParallelLinear(INTERMEDIATE, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """From ids of this rank's tokens (tokens, batch) to their logits. Without a mesh, of all tokens."""

    def __init__(self, mesh: DeviceMesh | None = None, recomputes: bool = False, **options: Any) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(mesh, **options) for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the parameters of modules that work on this rank's tokens DTensors, whose gradients torch sums."""
    names = ("embedding", "blocks.*.norm", "norm", "head")
    return parallelize_module(model, mesh, {name: ON_TOKENS() for name in names})


def reference() -> Model:
    torch.manual_seed(21)
    return Model()


def parallel(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The reference model with layers, on this rank."""
    model = sum_gradients(Model(mesh, **options), mesh)
    distgemm.nn.load_full_state_dict(model, reference().state_dict())
    return model


def modules_on_tokens() -> list[str]:
    """Gradients of modules that each rank applies to its tokens, also with other numbers of tokens, and twice."""
    ranks, wrong = dist.get_world_size(), []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    makes: dict[str, Callable[[], nn.Module]] = {
        "LayerNorm": lambda: nn.LayerNorm(6),
        "RMSNorm": lambda: nn.RMSNorm(6),
        "Linear": lambda: nn.Linear(6, 5),
        "Embedding": lambda: nn.Embedding(7, 6),
    }
    for name, make in makes.items():
        for sizes in ((3,) * ranks, tuple(range(1, ranks + 1)), tuple(range(ranks))):
            torch.manual_seed(0)
            plain = make().double()
            style = distgemm.nn.SequenceParallel(sequence_dim=0)
            made = parallelize_module(copy.deepcopy(plain), mesh, style)
            start = sum(sizes[: dist.get_rank()])
            mine = slice(start, start + sizes[dist.get_rank()])
            for _ in range(2):  # gradients are accumulated
                x = torch.randn(sum(sizes), 2, 6).double()
                x = x if name != "Embedding" else torch.randint(7, x.shape[:2])
                wanted, found = plain(x), made(x[mine])
                weights = torch.randn_like(wanted)
                (wanted * weights).sum().backward()
                (found * weights[mine]).sum().backward()
            if differs(found, wanted[mine]):
                wrong.append(f"{name}, {sizes}")
            for key, parameter in made.named_parameters():
                gradient = parameter.grad
                assert isinstance(gradient, DTensor)
                if differs(gradient.to_local(), plain.get_parameter(key).grad):  # summed already
                    wrong.append(f"{name}, {sizes}: gradient of {key}")
    frozen = nn.LayerNorm(6)
    frozen.bias.requires_grad_(False)
    parallelize_module(frozen, mesh, distgemm.nn.SequenceParallel(sequence_dim=0))
    if not frozen.weight.requires_grad or frozen.bias.requires_grad:
        wrong.append("a frozen parameter is trained")
    frozen.bias.requires_grad_(True)
    frozen(torch.ones(1, 6)).sum().backward()
    assert isinstance(frozen.bias.grad, DTensor)
    if differs(frozen.bias.grad.to_local(), torch.full((6,), float(ranks))):
        wrong.append("the gradient of a parameter that was frozen is not summed")
    given = nn.Identity()
    given.forward = lambda x: 2 * x  # type: ignore[method-assign]
    parallelize_module(given, mesh, distgemm.nn.SequenceParallel(sequence_dim=0))
    if differs(given(torch.ones(2)), torch.full((2,), 2.0)):
        wrong.append("a forward that the module was given")
    error = error_of(lambda: made(x[:1, :0]))
    if "ValueError: distgemm.nn.SequenceParallel: the input of Embedding has the shape (1, 0)" not in error:
        wrong.append(error or "no error")
    return wrong


def ids_of(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (TOKENS + 1, BATCH), generator=torch.Generator().manual_seed(step))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, part: Callable[[Tensor], Tensor]) -> Any:
    """The total norm of the gradients of one step. The loss is the mean over all tokens."""
    optimizer.zero_grad()
    logits, targets = model(part(ids[:-1])), part(ids[1:])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (TOKENS * BATCH)
    loss.backward()
    norm = whole(clip_grad_norm_(model.parameters(), 0.05))  # less than the norm, so that it has an effect
    optimizer.step()
    return norm


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def follow(model: nn.Module, part: Callable[[Tensor], Tensor], steps: int = 4) -> list[str]:
    """Train the model and the unsharded one. Returns the differences of norms, gradients and parameters."""
    plain = reference()
    optimizers = optimizer_of(plain), optimizer_of(model)
    wrong = []
    for step in range(steps):
        wanted = step_of(plain, optimizers[0], ids_of(step), lambda ids: ids)
        found = step_of(model, optimizers[1], ids_of(step), part)
        if differs(found, wanted):
            wrong.append(f"step {step}: norm {found} instead of {wanted}")
        for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
            if differs(whole(x.grad), y.grad):
                wrong.append(f"step {step}: gradient of {name}")
    state = distgemm.nn.full_state_dict(model)
    return wrong + [name for name, value in plain.state_dict().items() if differs(state[name], value)]


def layers_train() -> list[str]:
    """Clipped steps of a model of layers, also with activation checkpoints: norms, gradients, parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    wrong = []
    for recomputes in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no warning of a gradient that is not summed
            model = parallel(mesh, recomputes=recomputes)
            wrong += follow(model, lambda ids: ids.chunk(mesh.size())[mesh.get_local_rank()])
    return wrong


def layers_train_sharded() -> list[str]:
    """The same with FSDP2 over two replicas of two ranks; each replica has a half of the batch."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    model = parallel(tp)
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=dp)
        module.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens

    def part(ids: Tensor) -> Tensor:
        return ids.chunk(2, 1)[dp.get_local_rank()].chunk(tp.size())[tp.get_local_rank()]

    wrong = follow(model, part)
    # Without values first: each part of the sharded weight is drawn anew, and no two parts are the same.
    torch.manual_seed(3)
    layer = distgemm.nn.ColumnParallelLinear(40, 64, group=tp, device="meta")
    fully_shard(layer, mesh=dp)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    drawn = whole(layer.weight).detach()
    if len(drawn.unique()) < 0.99 * drawn.numel() or not 0.95 * 40**-0.5 < float(drawn.abs().max()) <= 40**-0.5:
        wrong.append(f"drawn: {len(drawn.unique())} numbers, {drawn.abs().max()}")
    return wrong


# --- state ----------------------------------------------------------------------------------------------


def on_ranks(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.chunk(mesh.size())[mesh.get_local_rank()]


def save(folder: str) -> dict[str, Tensor]:
    """Save a model and its optimizer after two steps. Returns the whole parameters after a third one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallel(mesh)
    optimizer = optimizer_of(model)
    for step in range(2):
        step_of(model, optimizer, ids_of(step), on_ranks(mesh))
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    checkpoint.save(model.state_dict(), checkpoint_id=f"{folder}/plain")
    step_of(model, optimizer, ids_of(2), on_ranks(mesh))
    return distgemm.nn.full_state_dict(model)


def load(folder: str) -> list[dict[str, Tensor]]:
    """Load both on this number of ranks. Returns the whole parameters of one, then after a third step of the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = sum_gradients(Model(mesh), mesh)
    state: dict[str, Any] = model.state_dict()
    checkpoint.load(state, checkpoint_id=f"{folder}/plain")
    model.load_state_dict(state)
    loaded = {name: value.clone() for name, value in distgemm.nn.full_state_dict(model).items()}
    model = sum_gradients(Model(mesh), mesh)
    optimizer = optimizer_of(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step_of(model, optimizer, ids_of(2), on_ranks(mesh))
    return [loaded, distgemm.nn.full_state_dict(model)]


def copies() -> list[str]:
    """Each way to copy a model of layers gives the same outputs, and the same parameters in its type."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model, ids = parallel(mesh), on_ranks(mesh)(ids_of(0)[:-1])
    wanted, state = model(ids).detach(), distgemm.nn.full_state_dict(model)

    def fresh(**options: Any) -> nn.Module:
        return sum_gradients(Model(mesh, **options), mesh)

    def saved() -> nn.Module:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        made = fresh()
        made.load_state_dict(torch.load(file, weights_only=False))
        return made

    def loaded(**options: Any) -> nn.Module:
        made = fresh()
        distgemm.nn.load_full_state_dict(made, copy.deepcopy(state), **options)
        return made

    def parts() -> nn.Module:
        """From a state dict of this rank's tensors for the layers."""
        made, given = fresh(), dict(model.state_dict())
        for name in list(given):
            if ".up." in name or ".down." in name:
                given[name] = given[name].to_local().clone()
        made.load_state_dict(given)
        return made

    def no_values() -> nn.Module:
        with torch.device("meta"):
            made = Model(mesh)
        sum_gradients(made, mesh)
        error = error_of(lambda: distgemm.nn.load_full_state_dict(made, state))
        assert error == "ValueError: embedding.weight is on the device meta and can keep no value; pass assign=True"
        distgemm.nn.load_full_state_dict(made, copy.deepcopy(state), assign=True)
        return made

    def emptied() -> nn.Module:
        made = fresh(device="meta").to_empty(device="cpu")
        distgemm.nn.load_full_state_dict(made, state)
        return made

    def converted() -> nn.Module:
        return copy.deepcopy(model).float().double()

    ways: dict[str, Callable[[], nn.Module]] = {
        "deepcopy": lambda: copy.deepcopy(model),
        "torch.save of the state": saved,
        "whole": loaded,
        "assign": lambda: loaded(assign=True),
        "parts": parts,
        "meta": no_values,
        "to_empty": emptied,
        "dtype": converted,
    }
    wrong = []
    for name, make in ways.items():
        made = make()
        bound = 1e-5 if name == "dtype" else 1e-12
        if not float((made(ids).detach() - wanted).abs().max()) < bound:
            wrong.append(f"{name}: another output")
        if not all(isinstance(each, DTensor) and each.device.type == "cpu" for each in made.parameters()):
            wrong.append(f"{name}: a parameter is no DTensor")
        with torch.no_grad():  # a copy has its own memory
            for each in made.parameters():
                each.add_(1)
        if differs(model(ids).detach(), wanted):
            wrong.append(f"{name}: shares memory")
        if any(differs(value, state[key]) for key, value in distgemm.nn.full_state_dict(model).items()):
            wrong.append(f"{name}: changes the parameters")
    # torch.save of modules; torch cannot save the hooks of SequenceParallel.
    block, x, file = Block(mesh), torch.ones(2, 1, HIDDEN, dtype=torch.float64), io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    with torch.no_grad():
        if differs(torch.load(file, weights_only=False)(x), block(x)):
            wrong.append("torch.save of modules")
    strict = error_of(lambda: distgemm.nn.load_full_state_dict(fresh(), {**state, "other": torch.ones(1)}))
    if 'Unexpected key(s) in state_dict: "other"' not in strict:
        wrong.append(f"strict: {strict}")
    distgemm.nn.load_full_state_dict(fresh(), {"head.weight": state["head.weight"]}, strict=False)
    return wrong


def devices() -> dict[str, str]:
    """Where parameters lie that are made for a group, and the error for a device that it does not serve."""
    group: Any = dist.group.WORLD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make = distgemm.nn.ColumnParallelLinear
    with torch.device("meta"):
        empty = make(4, 4, group=group)
    return {
        "group": f"{make(4, 4, group=group).weight.device_mesh.device_type}",  # type: ignore[attr-defined]
        "meta": f"{empty.weight.device} {empty.mesh.device_type}",
        "name": str(make(4, 4, group=group.group_name).mesh == make(4, 4, group=group).mesh),
        "cuda": error_of(lambda: make(4, 4, group=mesh, device="cuda")),
    }


# --- tied weights -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A head with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(ids)))
        return logits


def tied() -> list[str]:
    """A tied weight stays tied, and has the gradient of both uses. Styles that split it in two ways are refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    plain = Tied()
    made = copy.deepcopy(plain)
    parallelize_module(
        made,
        mesh,
        {
            "embedding": distgemm.nn.RowwiseParallel(sequence_dim=0),
            "norm": ON_TOKENS(),
            "head": distgemm.nn.ColwiseParallel(sequence_dim=0, use_local_output=False),
        },
    )
    wrong = [] if made.head.weight is made.embedding.weight else ["the weight is not tied any more"]
    loss_of(plain, ids_of(0)).backward()
    with loss_parallel():
        loss_of(made, ids_of(0)).backward()
    wrong += [name for name, x in made.named_parameters() if differs(whole(x.grad), plain.get_parameter(name).grad)]
    torch.manual_seed(2 + dist.get_rank())  # the first rank's values count
    made = parallelize_module(Tied(), mesh, dict.fromkeys(("embedding", "norm", "head"), ON_TOKENS()))  # type: ignore[assignment]
    wrong += [] if made.head.weight is made.embedding.weight else ["the replicated weight is not tied any more"]
    plain.zero_grad()
    loss_of(plain, ids_of(0)).backward()
    ids = ids_of(0)[:-1].tensor_split(dist.get_world_size())[dist.get_rank()]
    targets = ids_of(0)[1:].tensor_split(dist.get_world_size())[dist.get_rank()]
    logits = made(ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss / ids_of(0)[1:].numel()).backward()
    for name, x in made.named_parameters():
        wanted = plain.get_parameter(name)
        if differs(x.to_local(), wanted) or differs(x.grad.to_local(), wanted.grad):  # type: ignore[attr-defined, union-attr]
            wrong.append(f"replicated {name}")
    square = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    square["other"].weight = square["one"].weight
    plan = {"one": distgemm.nn.ColwiseParallel(), "other": distgemm.nn.RowwiseParallel()}
    error = error_of(lambda: parallelize_module(square, mesh, plan))
    if "ValueError: distgemm.nn.RowwiseParallel: weight of Linear is also a parameter" not in error:
        wrong.append(error or "two splits of one weight")
    return wrong


# --- gradients that nothing sums ------------------------------------------------------------------------------


def forgotten() -> dict[str, Any]:
    """Warnings and errors of a model whose norms, embedding and head are ordinary modules."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model, part = Model(mesh), on_ranks(mesh)
    found: dict[str, Any] = {}
    model.load_state_dict(reference().state_dict())
    with torch.no_grad(), warnings.catch_warnings(record=True) as made:
        warnings.simplefilter("always")
        model(part(ids_of(0)[:-1]))
        found["without gradients"] = len(made)
    with warnings.catch_warnings(record=True) as made:
        warnings.simplefilter("always")
        for _ in range(2):
            logits = model(part(ids_of(0)[:-1]))
        found["warnings"] = [str(each.message) for each in made]
    logits.square().sum().backward()
    found["before"] = sorted(distgemm.nn.full_state_dict(model)) == sorted(model.state_dict())
    found["clip"] = error_of(lambda: clip_grad_norm_(model.parameters(), 1.0))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found["after"] = error_of(lambda: distgemm.nn.full_state_dict(model))
    # With styles, too, and behind a projection that each rank has some features of.
    styled = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(2), nn.Linear(4, 4))
    parallelize_module(styled, mesh, {"0": distgemm.nn.ColwiseParallel(), "2": distgemm.nn.RowwiseParallel()})
    with warnings.catch_warnings(record=True) as made:
        warnings.simplefilter("always")
        styled(torch.ones(2, 4))
        found["styles"] = [str(each.message) for each in made]
    # Also if all ranks have all tokens: of the norm between the projections, not of that before them.
    whole = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(2), nn.Linear(4, 4))
    column = distgemm.nn.ColwiseParallel(input_layouts=Replicate())
    parallelize_module(whole, mesh, {"1": column, "3": distgemm.nn.RowwiseParallel(output_layouts=Replicate())})
    with warnings.catch_warnings(record=True) as made:
        warnings.simplefilter("always")
        whole(torch.ones(2, 4))
        found["whole tokens"] = [str(each.message) for each in made]
    split = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    parallelize_module(split, mesh, {"1": distgemm.nn.RowwiseParallel(input_layouts=Replicate())})
    between = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(between, mesh, {"1": column, "2": distgemm.nn.RowwiseParallel()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split(torch.ones(2, 4))
        between(torch.ones(2, 4))
    # A frozen parameter has no gradient to sum.
    frozen = nn.Sequential(nn.LayerNorm(4).requires_grad_(False), distgemm.nn.ColumnParallelLinear(4, 4, group=mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(torch.ones(2, 4, requires_grad=True))
    return found


# --- batch-first models -------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of tensors (batch, tokens, features)."""

    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return found


class BatchFirst(nn.Module):
    """From ids (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=torch.float64)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=torch.float64) for _ in range(2))
        self.attentions = nn.ModuleList(Attention(hidden, features) for _ in range(2))
        self.norm = nn.RMSNorm(hidden, dtype=torch.float64)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch_first(compiled: bool = False) -> list[str]:
    """Logits and gradients of a batch-first model. Without sequence_dim, its tensors are refused or understood."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(9)
    plain = BatchFirst(4 * ranks, 2)
    ids = torch.randint(VOCABULARY, (3, 4 * ranks + 1))
    wanted = plain(ids[:, :-1])

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    loss(wanted).backward()

    def made(dim: int | None, norm: SequenceParallel) -> nn.Module:
        plan = {
            "embedding": distgemm.nn.RowwiseParallel(sequence_dim=1),
            "norms.*": norm,
            "attentions.*": distgemm.nn.SharedColwiseParallel("wq", "wk", "wv", sequence_dim=dim),
            "attentions.*.wo": distgemm.nn.RowwiseParallel(sequence_dim=1),
            "norm": norm,
            "head": distgemm.nn.ColwiseParallel(sequence_dim=dim, use_local_output=False),
        }
        return parallelize_module(copy.deepcopy(plain), mesh, plan)

    wrong = []
    for dim, norm in (
        (1, SequenceParallel()),
        (None, SequenceParallel()),  # the DTensor says that dimension 1 has the tokens
        (1, SequenceParallel(use_local_output=True)),
        (-2, SequenceParallel(use_local_output=True)),
    ):
        model = made(dim, norm)
        if compiled and dim != 1:
            continue
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        logits = run(ids[:, :-1])
        if differs(whole(logits), wanted):
            wrong.append(f"{dim}, {norm}: logits")
        with loss_parallel():
            loss(logits).backward()
        wrong += [
            f"{dim}, {norm}: gradient of {name}"
            for name, x in model.named_parameters()
            if differs(whole(x.grad), plain.get_parameter(name).grad)
        ]
    for dim, norm, message in (
        (None, SequenceParallel(use_local_output=True), "sequence_dim is None, and it must name the dimension"),
        (0, SequenceParallel(), "or sequence_dim=0 in the SequenceParallel of the norm before it"),
        (2, SequenceParallel(use_local_output=True), "sequence_dim is one of [0, 1]"),
    ):
        error = error_of(lambda: made(dim, norm)(ids[:, :-1]))  # noqa: B023
        if not error.startswith("ValueError: distgemm.nn.SharedColwiseParallel") or message not in error:
            wrong.append(f"{dim}, {norm}: {error or 'no error'}")
    # A RowwiseParallel cannot know it from a DTensor that is sharded along its features.
    row = parallelize_module(nn.Linear(2 * ranks, 3), mesh, distgemm.nn.RowwiseParallel())
    for x in (torch.ones(2, ranks, 2), DTensor.from_local(torch.ones(2, ranks, 2), mesh, [Shard(2)])):
        error = error_of(lambda: row(x))  # noqa: B023
        if "RowwiseParallel: sequence_dim is None, and it must name" not in error:
            wrong.append(f"row: {error or 'no error'}")
    if row(torch.ones(2 * ranks, 2)).shape != (2, 3):  # two dimensions leave no choice
        wrong.append("two dimensions")
    return wrong


# --- torch.compile of each block --------------------------------------------------------------------------


def compiled_blocks(sharded: bool) -> list[str]:
    """Gradients of a model whose blocks are compiled, with FSDP2 or without it."""
    wrong = []
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    plain = llama.Llama(llama.Config(VOCABULARY, hidden=16, intermediate=31, heads=4, kv_heads=2)).double()
    loss_of(plain, ids_of(0)).backward()
    of_torch = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))

    def compiled(plan: dict[str, Any]) -> nn.Module:
        model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
        model.zero_grad()
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="aot_eager", fullgraph=True)
            if sharded:
                fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"]) if sharded else model

    model = compiled(llama.tensor_parallel_plan())
    with loss_parallel():
        loss = loss_of(model, ids_of(0))
        loss.backward()
    wrong += [
        f"gradient of {name}"
        for name, x in model.named_parameters()
        if differs(whole(x.grad), plain.get_parameter(name).grad)
    ]
    model = compiled({**llama.tensor_parallel_plan(), "embedding": of_torch})
    error = error_of(lambda: loss_of(model, ids_of(0)))
    if "is a collective that has not finished" not in error or "distgemm.nn.RowwiseParallel" not in error:
        wrong.append(error or "no error")
    if sharded:
        return wrong
    # Layers, and a collective within a DTensor.
    block = Block(mesh["tp"])
    column = parallelize_module(nn.Linear(HIDDEN, 4).double(), mesh["tp"], distgemm.nn.ColwiseParallel(sequence_dim=0))
    embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
    for module, is_local in ((block, True), (column, False)):
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=is_local)
        x = parallelize_module(copy.deepcopy(embedding), mesh["tp"], style)(ids_of(0)[:-1])
        error = error_of(lambda: torch.compile(module, backend="aot_eager")(x))  # noqa: B023
        if "is a collective that has not finished" not in error:
            wrong.append(f"{type(module).__name__}: {error or 'no error'}")
        if is_local:
            torch.compile(module, backend="aot_eager")(x.clone())
    return wrong


def embeddings() -> list[str]:
    """An embedding with its vocabulary split, also with tokens that ranks do not divide; and its options."""
    ranks, wrong = dist.get_world_size(), []
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    for dim, shape in ((0, (3 * ranks, 2)), (1, (2, 3 * ranks)), (0, (3 * ranks - 1, 2)), (None, (2 * ranks,))):
        torch.manual_seed(4)
        plain = nn.Embedding(VOCABULARY, 5, padding_idx=3, dtype=torch.float64)
        ids = torch.randint(VOCABULARY, shape)
        made = parallelize_module(copy.deepcopy(plain), mesh, distgemm.nn.RowwiseParallel(sequence_dim=dim))
        wanted = plain(ids)
        weights = torch.randn_like(wanted)
        (wanted * weights).sum().backward()
        part, own = (x.chunk(ranks, dim or 0)[mesh.get_local_rank()] for x in (wanted, weights))
        found = made(ids)
        if type(found) is not Tensor or differs(found, part):
            wrong.append(f"{dim}, {shape}: {type(found).__name__}")
        (found * own).sum().backward()
        if differs(whole(made.weight.grad), plain.weight.grad):
            wrong.append(f"{dim}, {shape}: gradient")
    for style, message in (
        (distgemm.nn.RowwiseParallel(schedule="unfused"), "takes no schedule, chunks or recipe"),
        (distgemm.nn.ColwiseParallel(), "is for nn.Linear, got Embedding"),
    ):
        error = error_of(lambda: parallelize_module(nn.Embedding(4, 4), mesh, style))  # noqa: B023
        if not error.startswith("ValueError: ") or message not in error:
            wrong.append(error or message)
    return wrong
