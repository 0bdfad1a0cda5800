"""The ranks of the tests of the layers."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import distgemm
from tests.multiprocess.ops_torch_worker import BETWEEN, BOUND, split

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama

Tensor = torch.Tensor
TOKENS = {1: (5,), 2: (0, 5), 3: (4, 0, 3), 4: (1, 0, 5, 2), 8: (1, 0, 5, 2, 0, 3, 1, 4)}


def differs(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is not y
    return x.shape != y.shape or bool(x.numel() and not float((x - y).detach().abs().max()) < BOUND)


def layers(mesh: DeviceMesh | None = None) -> list[str]:
    """A column-parallel layer, then a row-parallel one, against both Linears on one rank."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD if mesh is None else mesh
    wrong = []
    for tokens, bias, hidden, keep, dim in product(
        (None, TOKENS[ranks]), (False, True), (2 * ranks, 3 * ranks - 1), (False, True), (0, 1)
    ):
        torch.manual_seed(3)
        sizes = tokens or (2,) * ranks
        up = nn.Linear(5, hidden, bias=bias, dtype=torch.float64)
        down = nn.Linear(hidden, 3, bias=bias, dtype=torch.float64)
        x = torch.randn(sum(sizes), BETWEEN, 5, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(sum(sizes), BETWEEN, 3, dtype=torch.float64)
        y = down(torch.tanh(up(x)))
        (y * weights).sum().backward()
        mine = split(x.detach(), sizes, rank).clone().requires_grad_()
        first = distgemm.nn.ColumnParallelLinear.from_linear(up, group=group, keep_gathered=keep, sequence_dim=dim)
        second = distgemm.nn.RowParallelLinear.from_linear(down, group=group, sequence_dim=dim)
        given = mine.transpose(0, dim).contiguous()  # batch-first with dim 1
        z = second(torch.tanh(first(given, m_per_rank=tokens)), m_per_rank=tokens).transpose(0, dim)
        (z * split(weights, sizes, rank)).sum().backward()
        found = {"y": (z, split(y, sizes, rank)), "x": (mine.grad, split(x.grad, sizes, rank))}  # type: ignore[arg-type]
        for layer, linear in ((first, up), (second, down)):
            for name, parameter in linear.named_parameters():
                found[f"{type(layer).__name__}.{name}"] = whole(getattr(layer, name).grad), parameter.grad
        wrong += [
            f"{name}, tokens {tokens}, hidden {hidden}, dim {dim}, rank {rank}"
            for name, xy in found.items()
            if differs(*xy)
        ]
    return wrong


def initial() -> list[str]:
    """Ranks with the same seed draw different parts of one weight, within the bounds of the whole weight."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    wrong = []
    for kind in (distgemm.nn.ColumnParallelLinear, distgemm.nn.RowParallelLinear):
        torch.manual_seed(11)
        one, other = kind(120, 60, group=group), kind(120, 60, group=group)
        following = float(torch.rand(()))
        torch.manual_seed(11)
        again = kind(120, 60, group=group, device="meta"), kind(120, 60, group=group)
        name = kind.__name__
        if not torch.equal(whole(other.weight), whole(again[1].weight)) or float(torch.rand(())) != following:
            wrong.append(f"{name}: another draw with the same seed")
        if torch.equal(whole(one.weight), whole(other.weight)):
            wrong.append(f"{name}: two layers are the same")
        parts = whole(one.weight).detach().chunk(ranks, one.split["weight"])
        if any(bool(torch.isin(parts[rank], parts[0]).float().mean() > 0.1) for rank in range(1, ranks)):
            wrong.append(f"{name}: ranks have the same part")
        drawn, bound = torch.cat([part.flatten() for part in parts]), 120**-0.5
        if not 0.99 * bound < float(drawn.abs().max()) <= bound or abs(float(drawn.mean())) > 0.05 * bound:
            wrong.append(f"{name}: not uniform within {bound}")
        if abs(float(drawn.std()) - bound / 3**0.5) > 0.02 * bound:
            wrong.append(f"{name}: standard deviation {float(drawn.std())}")
        bias = whole(one.bias)
        if ("bias" in one.split) != bool(bias.any()) or float(bias.detach().abs().max()) > 120**-0.5:
            wrong.append(f"{name}: bias {bias}")
    return wrong


def states() -> list[str]:
    """Whole state dicts and those of this rank are saved and loaded."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(5, 3 * ranks - 1), nn.Tanh(), nn.Linear(3 * ranks - 1, 3))

    def parallel() -> nn.Sequential:
        return nn.Sequential(
            distgemm.nn.ColumnParallelLinear(5, 3 * ranks - 1, group=group),
            nn.Tanh(),
            distgemm.nn.RowParallelLinear(3 * ranks - 1, 3, group=group),
        )

    one, two = parallel(), parallel()
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    one.load_state_dict(plain.state_dict())
    two.load_state_dict(one.state_dict())
    wrong = []
    for model in (one, two):
        state = distgemm.nn.full_state_dict(model)
        wrong += [key for key, value in plain.state_dict().items() if not torch.equal(state[key], value)]
        wrong += [f"{key} is another" for key in state.keys() ^ before.keys()]
    with torch.no_grad():
        one[0].weight.add_(1)
        one[0].bias.add_(1)
    wrong += [f"{key} changed" for key, value in plain.state_dict().items() if not torch.equal(before[key], value)]
    mesh = one[0].mesh
    for placement in (Replicate(), Shard(0), Shard(1)):  # assign keeps the tensors, and not the placements
        given = {
            key: distribute_tensor(x, mesh, [Shard(0) if x.dim() == 1 else placement]) for key, x in before.items()
        }
        three = parallel()
        placements = {name: parameter.placements for name, parameter in three.named_parameters()}  # type: ignore[attr-defined]
        three.load_state_dict(given, assign=True)
        state = distgemm.nn.full_state_dict(three)
        wrong += [f"{key} from {placement}" for key, x in before.items() if not torch.equal(state[key], x)]
        for name, parameter in three.named_parameters():
            if parameter.placements != placements[name] or not parameter.requires_grad:  # type: ignore[attr-defined]
                wrong.append(f"{name} from {placement}: {parameter}")
    if ranks > 1:
        try:
            one.load_state_dict({**before, "0.weight": torch.zeros(3 * ranks, 5)})
            wrong.append("a weight of another size is loaded")
        except RuntimeError as error:
            wrong += [] if "size mismatch for 0.weight" in str(error) else [str(error)]
    return wrong


# --- Llama ------------------------------------------------------------------------------------------


def config(ranks: int) -> llama.Config:
    """A model whose vocabulary and intermediate size several ranks do not divide."""
    heads = {1: 4, 2: 4, 3: 6, 4: 8}[ranks]
    return llama.Config(
        vocabulary=12 * ranks + 1,
        hidden=4 * heads,
        intermediate=9 * ranks - 1,
        heads=heads,
        kv_heads=max(ranks, heads // 2),
    )


def models(mesh: DeviceMesh) -> tuple[llama.Llama, nn.Module, Tensor]:
    ranks = mesh.size()
    torch.manual_seed(5)
    sizes = config(ranks)
    plain = llama.Llama(sizes).double()
    parallel = parallelize_module(copy.deepcopy(plain), mesh, llama.tensor_parallel_plan())
    return plain, parallel, torch.randint(sizes.vocabulary, (3 * ranks + 1, 4))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:].flatten())


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def training(mesh: DeviceMesh | None = None) -> list[str]:
    """Losses and gradients of a few steps, on a mesh of one dimension, or of hosts."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _training(mesh, None)


def replicated_training() -> list[str]:
    """The same with two replicas, and half of the batch on each."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return _training(mesh["tp"], mesh["dp"])


def _training(tp: DeviceMesh, dp: DeviceMesh | None) -> list[str]:
    plain, parallel, ids = models(tp)

    def mean_of_replicas() -> None:
        for parameter in parallel.parameters():
            gradient = parameter.grad.to_local()  # type: ignore[union-attr]
            dist.all_reduce(gradient, group=dp.get_group())  # type: ignore[union-attr]
            gradient.div_(2)

    wrong, losses = follow(plain, parallel, ids, dp, 4, mean_of_replicas if dp is not None else lambda: None)
    if not losses[-1] < 0.9 * losses[0]:
        wrong.append(f"nothing is learned: {losses[0]} to {losses[-1]}")
    state = distgemm.nn.full_state_dict(parallel)
    wrong += [name for name, value in plain.state_dict().items() if differs(state[name], value)]
    return wrong


def follow(
    plain: nn.Module,
    parallel: nn.Module,
    ids: Tensor,
    dp: DeviceMesh | None,
    steps: int,
    after_backward: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[float]]:
    """Train both models, replicas on their parts of the batch. Returns the differences and the losses."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, parallel)]
    mine = ids if dp is None else ids.chunk(dp.size(), 1)[dp.get_local_rank()]
    wrong, losses = [], []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(plain, ids)
        loss.backward()
        with loss_parallel():
            part = loss_of(parallel, mine)
            part.backward()
        after_backward()
        found = whole(part).detach().clone()
        if dp is not None:
            dist.all_reduce(found, group=dp.get_group())
            found.div_(dp.size())
        if differs(found, loss.detach()):
            wrong.append(f"step {step}: loss {found} instead of {loss}")
        for (name, x), y in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            if differs(whole(x.grad), y.grad):
                wrong.append(f"step {step}: gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return wrong, losses


def long_training(steps: int = 200) -> float:
    """The largest relative difference of a loss from that of the model on one rank; -1 if nothing is learned."""
    plain, parallel, _ = models(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    text = torch.arange(4000) ** 2 % 23 % config(dist.get_world_size()).vocabulary  # something to learn
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, parallel)]
    losses: list[tuple[float, float]] = []
    for step in range(steps):
        ids = text[19 * step : 19 * step + 4 * (4 * dist.get_world_size() + 1)].view(4, -1).t()
        found = []
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            with loss_parallel():
                loss = loss_of(model, ids)
                loss.backward()
            optimizer.step()
            found.append(whole(loss).item())
        losses.append((found[0], found[1]))
    if not losses[-1][0] < 0.3 * losses[0][0]:
        return -1.0
    return max(abs(x - y) / x for x, y in losses)


def shared_gathers() -> list[Any]:
    """The calls of a forward pass. A deep copy has its own parameters, and loads a whole state dict."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain, parallel, ids = models(mesh)
    ids = ids[:-1]
    other = copy.deepcopy(parallel)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    distgemm.nn.load_full_state_dict(other, plain.state_dict())
    with torch.no_grad(), distgemm.record_calls() as calls:
        again = whole(other(ids))
    wanted = plain(ids)
    return [
        not differs(again, wanted),
        differs(whole(parallel(ids)), wanted),
        dict(Counter(call.function for call in calls)),
        error_of(lambda: distgemm.nn.load_full_state_dict(other, {**plain.state_dict(), "head.weight": torch.ones(1)})),
    ]


def compiled() -> list[str]:
    """Layers and the whole Llama, without a graph break."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(6)
    wrong = []
    model = nn.Sequential(
        distgemm.nn.ColumnParallelLinear(5, 4 * ranks - 1, group=group, dtype=torch.float64),
        nn.Tanh(),
        distgemm.nn.RowParallelLinear(4 * ranks - 1, 3, group=group, dtype=torch.float64),
    )
    x = torch.randn(4, 5, dtype=torch.float64)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(whole(parameter.grad).clone() for parameter in model.parameters())])
    wrong += [f"layers: {a} instead of {b}" for a, b in zip(*results, strict=True) if not torch.equal(a, b)]
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    _, parallel, ids = models(mesh)
    ids = ids[:-1]
    fast = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    if not torch.equal(whole(fast(ids)), whole(parallel(ids))):
        wrong.append("Llama")
    return wrong


def placements() -> list[str]:
    """DTensors as inputs of the styles: with the right sharding results are those of one rank, others raise."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    plain = nn.ModuleDict({"q": nn.Linear(4 * ranks, 2 * ranks), "o": nn.Linear(4 * ranks, 3)}).double()
    x = torch.randn(ranks, 2 * ranks, 4 * ranks, dtype=torch.float64)
    styles: dict[str, Any] = {
        "Colwise": {"q": distgemm.nn.ColwiseParallel(sequence_dim=0)},
        "SharedColwise": distgemm.nn.SharedColwiseParallel("q", sequence_dim=0),
        "Rowwise": {"o": distgemm.nn.RowwiseParallel(sequence_dim=0)},
    }
    wrong = []
    for style, plan in styles.items():
        name, dim = ("o", 2) if style == "Rowwise" else ("q", 0)
        module = parallelize_module(copy.deepcopy(plain), mesh, plan)
        # Each rank has a part of the result, along this dimension.
        wanted = plain[name](x).chunk(ranks, 0 if name == "o" else 2)[rank]
        sharded = distribute_tensor(x, mesh, [Shard(dim)])
        fast = torch.compile(module[name], fullgraph=True, backend="aot_eager")
        for run, given in ((module[name], x.chunk(ranks, dim)[rank]), (module[name], sharded), (fast, sharded)):
            if differs(run(given), wanted):
                wrong.append(f"{style} of {type(given).__name__}")
        others: list[tuple[DeviceMesh, list[Placement]]] = [
            (mesh, [Replicate()]),
            (mesh, [Shard(1)]),
            (mesh, [Shard(2 - dim)]),
            (square, [Replicate(), Shard(dim)]),
            (init_device_mesh("cpu", (ranks,), mesh_dim_names=("other",)), [Replicate()]),
        ]
        for on, each in others:
            error = error_of(lambda: module[name](distribute_tensor(x, on, each)))  # noqa: B023
            named = f"[Shard({dim})]", ", ".join(map(str, each)), f"distgemm.nn.{style}Parallel takes"
            if not error.startswith("ValueError: ") or not all(part in error for part in named):
                wrong.append(f"{style} of {each}: {error or 'no error'}")
    return wrong


class TwoOfOne(nn.Module):
    """Two Linears of one input, and an action between their calls."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 2 * dist.get_world_size()), nn.Linear(3, 2 * dist.get_world_size())
        self.between = between

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x)
        self.between(self, x)
        return q, self.k(input=x)  # as nn.Linear takes it


def shared_changes() -> list[str]:
    """A shared output is used only if a separate call would compute the same, and no output is kept."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def change_input(module: Any, x: Tensor) -> None:
        x.data.mul_(1)  # not seen, and autograd does not see it either
        with torch.no_grad():
            x.copy_(2 * x + 1)

    def change_weight(module: Any, x: Tensor) -> None:
        with torch.no_grad():
            module.k.weight.mul_(3)

    def change_local_bias(module: Any, x: Tensor) -> None:
        with torch.no_grad():
            (module.k.bias.to_local() if isinstance(module.k.bias, DTensor) else module.k.bias).add_(1)

    def replace_weight(module: Any, x: Tensor) -> None:
        module.k.weight = nn.Parameter(module.k.weight.detach() * 2)

    def freeze(module: Any, x: Tensor) -> None:
        module.k.requires_grad_(not module.k.weight.requires_grad)

    def nothing(module: Any, x: Tensor) -> None:
        pass

    def fail(module: Any, x: Tensor) -> None:
        raise ArithmeticError("between")

    wrong = []
    for between, gathers in (
        (nothing, 1),
        (change_input, 2),
        (change_weight, 2),
        (change_local_bias, 2),
        (replace_weight, 2),
        (freeze, 2),
    ):
        torch.manual_seed(8)
        plain = TwoOfOne(between).double()
        parallel = parallelize_module(copy.deepcopy(plain), mesh, distgemm.nn.SharedColwiseParallel("q", "k"))
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            if mode is torch.inference_mode and gathers > 1:
                continue  # changes cannot be seen there
            with mode():
                x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
                every = whole_tokens(x)
                wanted = [y.chunk(mesh.size(), -1)[mesh.get_local_rank()] for y in plain(every)]
                with distgemm.record_calls() as calls:
                    found = parallel(x)
            what = f"{between.__name__}, {mode.__name__}"
            if any(differs(a, b) or a.requires_grad < b.requires_grad for a, b in zip(found, wanted, strict=True)):
                wrong.append(what)
            if len(calls) != gathers:
                wrong.append(f"{what}: {len(calls)} gathers")
    # First without gradients, then with them.
    parallel = parallelize_module(TwoOfOne(nothing), mesh, distgemm.nn.SharedColwiseParallel("q", "k"))
    x = torch.ones(2, 3)
    with torch.no_grad():
        parallel.q(x)
    if not parallel.k(x).requires_grad:
        wrong.append("the gradient is lost")
    # Nothing is kept after an error of the module.
    parallel = parallelize_module(TwoOfOne(fail), mesh, distgemm.nn.SharedColwiseParallel("q", "k"))
    error = error_of(lambda: parallel(x))
    shared = parallel.q.forward.func.__self__
    if error != "ArithmeticError: between" or shared.outputs or shared.made_of:
        wrong.append(f"kept: {error}, {shared.outputs}, {shared.made_of}")
    # Nothing is kept after an error of the function.
    parallel.q(x)
    error = error_of(lambda: parallel.k(x.double()))
    if not error.startswith("ValueError: ") or shared.outputs or shared.made_of:
        wrong.append(f"kept after an error: {error}, {shared.outputs}")
    return wrong


def whole_tokens(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def misuse() -> dict[str, str]:
    """The messages for wrong modules."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    block = nn.ModuleDict({"q": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "doubled": Doubled(4, 4)})
    given = nn.Linear(4, 4)
    given.forward = lambda input: 2 * input  # type: ignore[method-assign]
    pruned = prune.identity(nn.Linear(4, 4), "weight")

    def apply(plan: Any) -> str:
        return error_of(lambda: parallelize_module(block, mesh, plan))

    return {
        "norm": apply({"norm": distgemm.nn.ColwiseParallel()}),
        "rowwise norm": apply({"norm": distgemm.nn.RowwiseParallel()}),
        "no such name": apply(distgemm.nn.SharedColwiseParallel("q", "k")),
        "shared norm": apply(distgemm.nn.SharedColwiseParallel("q", "norm")),
        "own forward": apply({"doubled": distgemm.nn.ColwiseParallel()}),
        "own forward of a layer": error_of(
            lambda: distgemm.nn.RowParallelLinear.from_linear(Doubled(4, 4), group=mesh)
        ),
        "given forward": error_of(lambda: parallelize_module(given, mesh, distgemm.nn.RowwiseParallel())),
        "weight_norm": error_of(
            lambda: parallelize_module(
                weight_norm(nn.Linear(4, 4, bias=False)), mesh, distgemm.nn.ColwiseParallel(sequence_dim=0)
            )
        ),
        "weight_norm of a layer": error_of(
            lambda: distgemm.nn.ColumnParallelLinear.from_linear(weight_norm(nn.Linear(4, 4)), group=mesh)
        ),
        "pruned": error_of(lambda: parallelize_module(pruned, mesh, distgemm.nn.RowwiseParallel())),
        "no names": error_of(distgemm.nn.SharedColwiseParallel),
        "extent": error_of(lambda: distgemm.nn.ColumnParallelLinear(16, -4, group=mesh)),
        "no integer": error_of(lambda: distgemm.nn.RowParallelLinear(16.0, 4, group=mesh)),  # type: ignore[arg-type]
        "schedule": error_of(lambda: distgemm.nn.ColumnParallelLinear(16, 4, group=mesh, schedule="ag+gem")),
        "pattern": error_of(lambda: distgemm.nn.ColumnParallelLinear(16, 4, group=mesh, schedule="gemm+rs")),
        "pattern of rows": error_of(lambda: distgemm.nn.RowParallelLinear(16, 4, group=mesh, schedule="gemm+ar")),
        "pattern to heads": error_of(
            lambda: distgemm.nn.TokensToHeadsLinear(16, 16, group=mesh, head_dim=4, schedule="unfused")
        ),
        "pattern to tokens": error_of(
            lambda: distgemm.nn.HeadsToTokensLinear(16, 16, group=mesh, head_dim=4, schedule="gemm+a2a")
        ),
        "schedule of a style": error_of(lambda: distgemm.nn.RowwiseParallel(schedule="gem+rs")),
        "chunks of a style": error_of(lambda: distgemm.nn.SharedColwiseParallel("q", chunks=0)),
    }


def replicated() -> list[str]:
    """Styles whose tokens every rank has: no gather before columns, and an all-reduce behind rows."""
    ranks, wrong = dist.get_world_size(), []
    mesh = init_device_mesh("cpu", (ranks,))
    for hidden, compiled, as_dtensor in product((4 * ranks, 3 * ranks - 1), (False, True), (False, True)):
        case = f"hidden {hidden}, compiled={compiled}, DTensor={as_dtensor}"
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 5)).double()
        whole, x = copy.deepcopy(model), torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(2, 7, 5, dtype=torch.float64)
        y = whole(x)
        (y * weights).sum().backward()
        styles = {
            "0": distgemm.nn.ColwiseParallel(input_layouts=Replicate(), use_local_output=not as_dtensor),
            "2": distgemm.nn.RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, styles)  # type: ignore[arg-type]
        mine = x.detach().clone().requires_grad_()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with distgemm.record_calls() as calls:
            z = run(DTensor.from_local(mine, mesh, [Replicate()], run_check=False) if as_dtensor else mine)
            (z * weights).sum().backward()
        if [call.function for call in calls] != ["matmul_all_reduce"] * 2:
            wrong.append(f"{case}: {[str(call) for call in calls]}")
        found = {"y": (z, y), "x": (mine.grad, x.grad)}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor(), whole.get_parameter(name).grad
        wrong += [f"{case}: {name}" for name, (a, b) in found.items() if differs(a, b)]
        if not as_dtensor and differs(model[2](input=model[1](model[0](input=mine))), y):  # as nn.Linear takes it
            wrong.append(f"{case}: by keyword")
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(6)
        linear, given = nn.Linear(6, 4 * ranks).to(dtype), torch.randn(3, 6, dtype=dtype)
        plain = copy.deepcopy(linear)
        parallelize_module(linear, mesh, distgemm.nn.ColwiseParallel(input_layouts=Replicate()))
        mine, x = given.clone().requires_grad_(), given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found_y, wanted_y = linear(mine), plain(x)
        found_y.sum().backward()
        wanted_y.sum().backward()
        part = wanted_y.chunk(ranks, -1)[dist.get_rank()]
        if found_y.dtype != wanted_y.dtype or not torch.equal(found_y, part):
            wrong.append(f"autocast of {dtype}: {found_y.dtype}")
        assert mine.grad is not None and x.grad is not None
        if mine.grad.dtype != dtype or not torch.allclose(
            mine.grad, x.grad, atol=0.05 if dtype == torch.float32 else 1e-12
        ):
            wrong.append(f"autocast of {dtype}: gradient")
    sharded = distgemm.nn.ColwiseParallel(input_layouts=Shard(1)), distgemm.nn.RowwiseParallel(output_layouts=Shard(1))
    if [each.sequence_dim for each in sharded] != [1, 1]:
        wrong.append("Shard(1) is sequence_dim=1")
    column, row = distgemm.nn.ColwiseParallel, distgemm.nn.RowwiseParallel
    layer = parallelize_module(nn.Linear(6, 4 * ranks).double(), mesh, column(input_layouts=Replicate()))
    for shape in ((0, 6), (2, 0, 6), (6,)):
        few = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        layer(few).sum().backward()
        ones = few.detach().clone().requires_grad_()
        (ones @ layer.weight.detach().full_tensor().t()).sum().backward()
        if differs(few.grad, ones.grad):
            wrong.append(f"input {shape}")
    parts = DTensor.from_local(torch.zeros(2, 6, dtype=torch.float64), mesh, [Shard(0)])
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("both say where the tokens are", lambda: column(input_layouts=Shard(0), sequence_dim=0)),
        ("output_layouts is Replicate", lambda: row(output_layouts="replicated")),  # type: ignore[arg-type]
        ("nothing is gathered", lambda: column(input_layouts=Replicate(), keep_gathered=True)),
        ("with the placements [Replicate()]", lambda: layer(parts)),
        (
            "the output of an nn.Embedding is sharded",
            lambda: parallelize_module(nn.Embedding(8, 4), mesh, row(output_layouts=Replicate())),
        ),
    ]
    for message, attempt in attempts:
        try:
            attempt()
            wrong.append(f"no error: {message}")
        except ValueError as error:
            if message not in str(error):
                wrong.append(f"{message!r} is not in {error}")
    return wrong
