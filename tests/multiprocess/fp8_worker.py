"""The ranks of the tests of fp8: functions, layers and models, against fp8 on one rank."""

from __future__ import annotations

import copy
import gc
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import distgemm
from distgemm import fp8
from distgemm.fp8.layer import SPLITS, Split
from distgemm.fp8.quantize import dequantize
from distgemm.plan.scaling import OperandScaling
from tests.multiprocess.ops_torch_worker import messages

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama

Tensor = torch.Tensor
TOKENS, FEATURES, OUT, BLOCK = 96, 96, 192, 4
ROUNDING = 2.0**-24 * 4 * FEATURES
"""How much sums of float32 in another order may differ, relative to their largest result."""


def split(x: Tensor, dim: int | None, sizes: tuple[int, ...] | None = None) -> Tensor:
    """This rank's part, as a leaf."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if dim is not None:
        x = x.split(sizes, dim)[rank] if sizes else x.chunk(ranks, dim)[rank]
    return x.detach().clone().requires_grad_(x.requires_grad)


def far(found: Tensor | None, wanted: Tensor | None, bound: float = ROUNDING) -> str:
    """How two tensors differ, in words; "" if by rounding only."""
    if found is None or wanted is None:
        return f"{found} instead of {wanted}"
    found, wanted = found.detach(), wanted.detach()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{tuple(found.shape)} of {found.dtype} instead of {tuple(wanted.shape)} of {wanted.dtype}"
    if not found.numel():
        return ""
    error = float((found.double() - wanted.double()).abs().max())
    return "" if error <= bound * float(wanted.abs().max()) else f"differs by {error}"


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(TOKENS, FEATURES) * torch.randn(TOKENS, 1).exp()
    w, bias = torch.randn(OUT, FEATURES) / 8, torch.randn(OUT)
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), torch.randn(TOKENS, OUT) * 1e-3


def functions() -> list[str]:
    """Each function with each recipe and scope: result and gradients are those of one rank, also in a second step."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    wrong = []
    for name in fp8.RECIPES:
        for scope in ("global", "shard"):
            if scope == "shard" and ("_delayed" in name or "_static" in name or name == "blockwise"):
                continue
            recipe = fp8.recipe(name, scope=scope, block=BLOCK)  # type: ignore[arg-type]
            for function in (distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce):
                if function is distgemm.matmul_all_reduce and scope == "shard":
                    continue  # gradients have no shards there, so no emulation on one rank has its scales
                parallel: Any = "column" if function is distgemm.all_gather_matmul else "row"
                dims = Split(1, 1, None) if function is distgemm.matmul_all_reduce else SPLITS[parallel]
                one, several = fp8.LayerState(recipe), fp8.LayerState(recipe)
                if recipe.amax == "static":
                    for each in (one, several):
                        each.set(x=30.0, w=1.0, dy=0.01)
                for step in range(2 if recipe.amax == "delayed" else 1):
                    x, w, bias, dy = data()
                    y = fp8.linear(x, w, bias, recipe=one, parallel=parallel, ranks=ranks)
                    y.backward(dy)
                    mine = split(x, dims.x), split(w, dims.w), split(bias, 0 if parallel == "column" else None)
                    got: Any = function(mine[0], mine[1], group=group, bias=mine[2], recipe=several)
                    got.backward(split(dy, dims.y))
                    pairs = [(got, split(y.detach(), dims.y))]
                    for part, whole, dim in zip(mine, (x, w, bias), (dims.x, dims.w, 0), strict=True):
                        assert whole.grad is not None
                        shared = part is mine[2] and parallel == "row"
                        pairs.append((part.grad, whole.grad if shared else split(whole.grad, dim)))
                    for what, pair in zip(("y", "x.grad", "w.grad", "bias.grad"), pairs, strict=True):
                        if reason := far(*pair):
                            wrong.append(f"{what} of {function.__name__}, {name}, {scope}, step {step}: {reason}")
    return wrong


def unequal() -> list[str]:
    """Unequal tokens, also none; several weights; more dimensions; the gathered codes kept."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    wrong = []
    x, w, _, dy = data()
    tokens = (40, 0, 56) if ranks == 3 else (*[8] * (ranks - 1), TOKENS - 8 * (ranks - 1))
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        for v in (x, w):
            v.grad = None
        y = fp8.linear(x, w, recipe=name)
        y.backward(dy)
        a, b = split(x, 0, tokens), split(w, 0)
        got = distgemm.all_gather_matmul(a.unsqueeze(1), b, group=group, recipe=name, m_per_rank=tokens)
        got.backward(split(dy, 1).unsqueeze(1))
        c, d = split(x, 1), split(w, 1)
        other = distgemm.matmul_reduce_scatter(c, d, group=group, recipe=name, m_per_rank=tokens)
        other.backward(split(dy, 0, tokens))
        assert x.grad is not None and w.grad is not None
        for what, found, wanted in (
            ("y", got.squeeze(1), split(y.detach(), 1)),
            ("a.grad", a.grad, split(x.grad, 0, tokens)),
            ("b.grad", b.grad, split(w.grad, 0)),
            ("scattered y", other, split(y.detach(), 0, tokens)),
            ("c.grad", c.grad, split(x.grad, 1)),
            ("d.grad", d.grad, split(w.grad, 1)),
        ):
            if reason := far(found, wanted):
                wrong.append(f"{what} of {name} with {tokens} tokens: {reason}")
    # Several weights have the scales of one stacked weight.
    widths = [ranks * 16, ranks * 32]
    ws = [v.detach().clone().requires_grad_() for v in w[: sum(widths)].split(widths)]
    whole = torch.cat([v.detach() for v in ws]).requires_grad_()
    x.grad = None
    y = fp8.linear(x, whole, recipe="tensorwise")
    gradients = torch.randn_like(y).split(widths, 1)
    y.backward(torch.cat(gradients, 1))
    a, bs = split(x, 0), [split(v, 0) for v in ws]
    for keep in (False, True):
        a.grad = None
        ys = distgemm.all_gather_matmul(a, bs, group=group, recipe="tensorwise", keep_gathered=keep)
        with distgemm.record_calls() as calls:
            torch.autograd.backward(ys, [split(each, 1) for each in gradients])
        if keep == any(call.function == "gather" for call in calls):
            wrong.append(f"keep_gathered={keep}: {[call.function for call in calls]}")
    assert x.grad is not None and whole.grad is not None
    for found, wanted in zip(ys, y.detach().split(widths, 1), strict=True):
        wrong.append(far(found, split(wanted, 1)))
    wrong.append(far(a.grad, split(x.grad, 0)))
    for b, wanted in zip(bs, whole.grad.split(widths), strict=True):
        wrong.append(far(b.grad, 2 * split(wanted, 0)))  # of two backward passes
    return [f"rank {rank}: {each}" for each in wrong if each]


def without_tokens() -> list[str]:
    """Functions of no tokens with each recipe, and with operands in fp8: as a linear of no tokens."""
    group, ranks, wrong = dist.group.WORLD, dist.get_world_size(), []
    assert group is not None
    ag, rs, ar = distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce
    none = {"m_per_rank": (0,) * ranks}
    calls: tuple[tuple[str, Any, Any], ...] = (("ag", ag, {}), ("ag unequal", ag, none), ("rs", rs, {}), ("ar", ar, {}))
    calls = (*calls, ("rs unequal", rs, none), ("ag kept", ag, {"keep_gathered": True}))
    for (name, function, options), recipe, shape in product(calls, fp8.RECIPES, ((0, 8), (0, 3, 8))):
        if options.get("keep_gathered") and recipe != "tensorwise":
            continue
        made = fp8.recipe(recipe, block=BLOCK)  # type: ignore[arg-type]
        state = fp8.LayerState(made)
        if made.amax == "static":
            state.set(x=30.0, w=1.0, dy=0.01)
        x, w = torch.zeros(shape, requires_grad=True), torch.ones(16, 8, requires_grad=True)
        bias = torch.ones(16, requires_grad=True)
        y = function(x, w, bias=bias, group=group, recipe=state, **options)
        y.sum().backward()
        if y.shape != (*shape[:-1], 16) or y.dtype != x.dtype:
            wrong.append(f"{name} {recipe}: {tuple(y.shape)} of {y.dtype}")
        for each in (x, w, bias):
            if each.grad is None or each.grad.shape != each.shape or each.grad.count_nonzero():
                wrong.append(f"{name} {recipe} of {shape}: {each.grad}")
    for (name, function, options), rows in product(calls, (1, None)):
        if options.get("keep_gathered"):
            continue
        scaling = OperandScaling(rows, None)
        a, b = fp8.quantize(torch.zeros(0, 8), scaling), fp8.quantize(torch.ones(16, 8), scaling)
        d = function(a, b, bias=torch.ones(16), group=group, out_dtype=torch.float32, **options)
        if d.shape != (0, 16) or d.dtype != torch.float32:
            wrong.append(f"{name} of codes: {tuple(d.shape)} of {d.dtype}")
    a, b = (
        fp8.quantize(torch.zeros(0, 8), OperandScaling(1, None)),
        fp8.quantize(torch.ones(4, 8), OperandScaling(1, None)),
    )
    ds, whole = ag(a, [b, b], group=group, return_gathered=True)
    if [d.shape for d in ds] != [(0, 4)] * 2 or whole.codes.shape != (0, 8) or whole.codes.dtype != a.codes.dtype:
        wrong.append(f"several: {[d.shape for d in ds]}, {whole.codes.shape}")
    dist.barrier(group)
    return wrong


def tensors_in_fp8() -> list[str]:
    """Functions of tensors that are in fp8 already: e4m3 with e5m2, results of several types, gathered codes."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    wrong = []
    x, w, bias, _ = (each.detach() for each in data())
    for scaling in (OperandScaling(None, None, "shard"), OperandScaling(1, None, "shard"), OperandScaling(1, BLOCK)):
        for dtype in (torch.float32, torch.bfloat16):
            # Partial sums in bf16 are rounded, and may be larger than the result.
            bias_now, bound = bias.to(dtype), ROUNDING if dtype == torch.float32 else 2.0**-7
            a, b = (
                fp8.quantize(split(each, 0), scaling, t)
                for each, t in ((x, torch.float8_e5m2), (w, torch.float8_e4m3fn))
            )
            y, whole = distgemm.all_gather_matmul(
                a, b, group=group, bias=split(bias_now, 0), out_dtype=dtype, return_gathered=True
            )
            parts = [fp8.quantize(each, scaling, torch.float8_e5m2) for each in x.chunk(ranks)]
            full = torch.cat([dequantize(each) for each in parts])
            wrong.append(far(y, (full @ dequantize(b).t() + split(bias, 0)).to(dtype), bound))
            wrong.append(far(dequantize(whole), full, 0.0))
            several = distgemm.all_gather_matmul(a, [b, b], group=group, out_dtype=dtype)
            wrong += [far(each, (full @ dequantize(b).t()).to(dtype), bound) for each in several]
            a, b = (fp8.quantize(split(each, 1), scaling, torch.float8_e4m3fn) for each in (x, w))
            wanted = dequantize(a) @ dequantize(b).t()
            dist.all_reduce(wanted)
            wanted = (wanted + bias).to(dtype)
            d = distgemm.matmul_reduce_scatter(a, b, group=group, bias=bias_now, out_dtype=dtype)
            wrong.append(far(d, split(wanted, 0), bound))
            wrong.append(
                far(distgemm.matmul_all_reduce(a, b, group=group, bias=bias_now, out_dtype=dtype), wanted, bound)
            )
    return [each for each in wrong if each]


def bytes_of_gathers() -> dict[str, Any]:
    """What a forward pass in bf16, and with recipes, sends: as its plan's links say."""
    group = dist.group.WORLD
    assert group is not None
    x, w, *_ = data()
    a, b = split(x, 0).bfloat16(), split(w, 0).bfloat16()
    found: dict[str, Any] = {}
    for name in (None, "tensorwise", "rowwise", "blockwise"):
        recipe = None if name is None else fp8.recipe(name, block=BLOCK)
        with torch.no_grad(), distgemm.record_calls() as calls:
            distgemm.all_gather_matmul(a, b, group=group, recipe=recipe)  # makes the executable
        links = sum(calls[0].plan.link_bytes().values())
        if name in (None, "rowwise", "blockwise"):  # a tensorwise recipe also all-reduces amax
            with torch.no_grad(), messages() as sent:
                distgemm.all_gather_matmul(a, b, group=group, recipe=recipe)
            mine = {link: size for link, size in calls[0].plan.link_bytes().items() if link[0] == dist.get_rank()}
            assert dict(sent) == mine, (name, sent, mine)
        found[str(name)] = links
    return found


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misuse() -> dict[str, str]:
    """Calls that are refused, on all ranks."""
    group: Any = dist.group.WORLD
    x, w, bias, _ = data()
    a, b = split(x, 0), split(w, 0)
    qa, qb = (fp8.quantize(each.detach(), OperandScaling(1, None)) for each in (a, b))
    gather, scatter = distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter
    static = fp8.LayerState("tensorwise_static")
    static.set(x=1.0 + dist.get_rank(), w=0.5)
    calls = {
        "states": lambda: gather(a.detach(), b.detach(), group=group, recipe=static),
        "recipe": lambda: gather(a, b, group=group, recipe="fp8"),
        "recipes": lambda: gather(a, b, group=group, recipe=fp8.recipe("rowwise", power_of_two=dist.get_rank() == 0)),
        "no recipe": lambda: gather(a, b, group=group, recipe="tensorwise" if dist.get_rank() else None),
        "mixed": lambda: gather(qa, b, group=group),
        "mixed b": lambda: gather(a, qb, group=group),
        "twice": lambda: gather(qa, qb, group=group, recipe="rowwise"),
        "out": lambda: gather(a, b, group=group, out_dtype=torch.float32),
        "out of fp8": lambda: gather(qa, qb, group=group, out_dtype=torch.int32),
        "bias": lambda: gather(qa, qb, group=group, bias=split(bias, 0).double()),
        "keep": lambda: gather(a, b, group=group, recipe="rowwise", keep_gathered=True),
        "return": lambda: gather(a, b, group=group, recipe="rowwise", return_gathered=True),
        "delayed": lambda: gather(a, b, group=group, recipe="tensorwise_delayed"),
        "blocks": lambda: gather(a, b, group=group, recipe=fp8.recipe("blockwise", block=64)).sum().backward(),
        "several": lambda: gather(a, [b, b], group=group, recipe="rowwise", out_features=[OUT, OUT - 1]),
        "k": lambda: scatter(qa, fp8.quantize(w.detach()[:, 1:], OperandScaling(1, None)), group=group),
        "dtypes": lambda: gather(a, b.double(), group=group, recipe="rowwise"),
        "scatter dtypes": lambda: scatter(split(x, 1), split(w, 1).double(), group=group, recipe="rowwise"),
        "reduce dtypes": lambda: distgemm.matmul_all_reduce(a, b.double(), group=group, recipe="rowwise"),
        "embedding": lambda: parallelize_module(
            nn.Sequential(nn.Embedding(8, 8)),
            init_device_mesh("cpu", (dist.get_world_size(),)),
            {"0": distgemm.nn.RowwiseParallel(sequence_dim=0, recipe="rowwise")},
        ),
        "style": lambda: distgemm.nn.ColwiseParallel(recipe=8),  # type: ignore[arg-type]
        "layer": lambda: distgemm.nn.ColumnParallelLinear(8, 8, group=group, recipe="e4m3"),
        "no gradient": lambda: torch.ops.distgemm.scaled_matmul(
            qa.codes, qb.codes, qa.scales.requires_grad_(), qb.scales, None, "ag+gemm", "1,0,global;1,0,global",
            group.group_name, "auto", None, None, None, torch.float32, None, False,
        )[0].sum().backward(),
    }  # fmt: skip
    return {name: error_of(call) for name, call in calls.items()}


# --- models -----------------------------------------------------------------------------------------------

CONFIG = llama.Config(vocabulary=32, hidden=64, intermediate=128)
ONE_GATHER_EACH: dict[str, Any] = {
    f"blocks.*.{name}": None for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
}


def models() -> list[str]:
    """A Llama in fp8 on all ranks follows the one on one rank, through optimizer steps; the head stays as it is.

    A sum in another order may change a code. Layers behind it amplify the difference, so that after the first step
    gradients may differ by the rounding of fp8. Float64 beside fp8 makes this rare.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    wrong = []
    for name in ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise"):
        recipe = fp8.recipe(name, block=BLOCK)
        torch.manual_seed(5)
        plain: Any = llama.Llama(CONFIG).double()
        model: Any = copy.deepcopy(plain)
        # Each Linear with scales of its own, as on one rank.
        plan = llama.tensor_parallel_plan()
        for shared in ("blocks.*.attention", "blocks.*.mlp"):
            del plan[shared]
        plan |= {key: distgemm.nn.ColwiseParallel(sequence_dim=0) for key in ONE_GATHER_EACH}
        parallelize_module(model, mesh, plan)
        only = distgemm.nn.all_but("head")
        names = [distgemm.nn.use_recipe(each, recipe, only) for each in (plain, model)]
        if names[0] != names[1] or any("head" in each for each in names[0]):
            wrong.append(f"{names}")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
        for step in range(3):
            ids = torch.randint(32, (17, 2 * ranks), generator=torch.Generator().manual_seed(step))[: 16 + 1]
            losses = []
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                logits = each(ids[:-1])
                if isinstance(logits, DTensor):
                    logits = logits.redistribute(placements=[Replicate()]).to_local()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:].flatten())
                loss.backward()
                losses.append(loss.item())
            if abs(losses[0] - losses[1]) > (1e-3 if step else 1e-5) * losses[0]:
                wrong.append(f"{name}, step {step}: {losses}")
            for (key, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
                error = float((two.grad.full_tensor() - one.grad).norm() / one.grad.norm())
                if not step and error > 1e-2:
                    wrong.append(f"{name}, gradient of {key} differs by {error}")
            for optimizer in optimizers:
                optimizer.step()
        found, wanted = distgemm.nn.full_state_dict(model), plain.state_dict()
        if found.keys() != wanted.keys():
            wrong.append(f"{name}: {found.keys() ^ wanted.keys()}")
    return wrong


def layers() -> list[str]:
    """Layers, and the styles of the example's plan, with a recipe; replicated inputs and outputs; a deep copy."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    recipe = fp8.recipe("tensorwise")
    up, down = nn.Linear(FEATURES, OUT), nn.Linear(OUT, FEATURES)
    x, dy = torch.randn(TOKENS, FEATURES), torch.randn(TOKENS, FEATURES)
    wanted_x = x.clone().requires_grad_()
    hidden = torch.relu(fp8.linear(wanted_x, up.weight, up.bias, recipe=recipe))
    wanted = fp8.linear(hidden, down.weight, down.bias, recipe=recipe)
    wanted.backward(dy)
    assert wanted_x.grad is not None
    wrong = []

    def compare(what: str, module: nn.Module, whole: bool) -> None:
        given = (x.clone() if whole else split(x, 0)).requires_grad_()
        y = module(given)
        y.backward(dy if whole else split(dy, 0))
        found = {"y": y, "x": given.grad}
        expected = {"y": wanted.detach(), "x": wanted_x.grad}
        for key in found:
            part = expected[key] if whole else split(expected[key], 0)  # type: ignore[arg-type]
            if reason := far(found[key], part, 2.0**-12):
                wrong.append(f"{what}, {key} on rank {rank}: {reason}")
        grads = [each.grad for each in module.parameters()]
        for grad, parameter in zip(grads, (*up.parameters(), *down.parameters()), strict=True):
            assert isinstance(grad, DTensor)
            if reason := far(grad.full_tensor(), parameter.grad, 2.0**-10):
                wrong.append(f"{what}, gradient of shape {tuple(parameter.shape)}: {reason}")

    column = distgemm.nn.ColumnParallelLinear.from_linear(up, group=mesh, recipe=recipe)
    row = distgemm.nn.RowParallelLinear.from_linear(down, group=mesh, recipe=recipe)
    compare("layers", nn.Sequential(column, nn.ReLU(), row), whole=False)
    base = nn.Sequential(up, nn.ReLU(), down)
    for whole in (False, True):
        options: dict[str, Any] = {"input_layouts": Replicate()} if whole else {"sequence_dim": 0}
        plan = {"0": distgemm.nn.ColwiseParallel(recipe=recipe, **options)}
        options = {"output_layouts": Replicate()} if whole else {"sequence_dim": 0}
        plan["2"] = distgemm.nn.RowwiseParallel(recipe=recipe, **options)  # type: ignore[assignment]
        module = parallelize_module(copy.deepcopy(base), mesh, plan)
        compare(f"styles, whole {whole}", copy.deepcopy(module), whole)
    torch.manual_seed(0)
    model: Any = llama.Llama(CONFIG)
    parallelize_module(model, mesh, llama.tensor_parallel_plan())
    everything = set(distgemm.nn.use_recipe(model, "rowwise", distgemm.nn.all_but("head")))
    states = {name for name, each in model.named_modules() if isinstance(each, fp8.LayerState)}
    shared = {f"blocks.{block}.{name}.fp8" for block in range(2) for name in ("attention.wq", "mlp.gate")}
    if not shared < states or len(states) != 8 or len(everything) != 14:
        wrong.append(f"states of {sorted(states)}, layers {sorted(everything)}")
    message = error_of(lambda: distgemm.nn.use_recipe(model, "rowwise", distgemm.nn.all_but("*.wk")))
    if "`only` leaves out blocks.0.attention.wk" not in message:
        wrong.append(message)
    return wrong


def applied() -> list[str]:
    """Recipes of Linears that layers and styles are made of; projections to heads; the dtype of torch's default."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    wrong = []
    base = nn.Sequential(nn.Linear(FEATURES, OUT))
    distgemm.nn.use_recipe(base, "tensorwise_delayed")
    styled = parallelize_module(copy.deepcopy(base), mesh, {"0": distgemm.nn.ColwiseParallel()})
    made = distgemm.nn.ColumnParallelLinear.from_linear(base[0], group=mesh, device="meta")  # type: ignore[arg-type]
    for each in (styled[0], made):  # type: ignore[index]
        if not isinstance(each.fp8, fp8.LayerState) or each.fp8.history.device != each.weight.device:
            wrong.append(f"{type(each).__name__}: {each.fp8}")
    heads: Any = nn.ModuleDict(
        {
            "style": nn.Linear(16 * ranks, 16 * ranks),
            "layer": distgemm.nn.TokensToHeadsLinear(16 * ranks, 16 * ranks, head_dim=16, group=mesh),
            "linear": nn.Linear(16, 16),
        }
    )
    parallelize_module(heads, mesh, {"style": distgemm.nn.TokensToHeads(head_dim=16)})
    x = torch.randn(4, 16 * ranks)
    wanted = heads["style"](x), heads["layer"](x)
    if (names := distgemm.nn.use_recipe(heads, "rowwise")) != ["linear"]:
        wrong.append(f"fp8 in {names}")
    wrong += [far(heads[name](x), y, 0.0) for name, y in zip(("style", "layer"), wanted, strict=True)]
    x, w, *_ = (each.detach() for each in data())
    y = split(fp8.linear(x, w, recipe="tensorwise"), 1)
    tokens = [TOKENS, *[0] * (ranks - 1)]  # ranks without tokens take part in the all-reduce of amax
    torch.set_default_dtype(torch.bfloat16)
    try:
        mine = x.split(tokens)[rank], split(w, 0)
        got = distgemm.all_gather_matmul(*mine, group=mesh, recipe="tensorwise", m_per_rank=tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    return [each for each in (*wrong, far(got, y)) if each]


def freed() -> list[str]:
    """Gathered codes are saved tensors: they do not outlive the backward pass, and hooks of checkpoints see them."""
    group: Any = dist.group.WORLD
    x, w, *_ = data()
    a, b, c, d = split(x, 0), split(w, 0), split(x, 1), split(w, 1)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        one = distgemm.all_gather_matmul(a, b, group=group, recipe="tensorwise", keep_gathered=True)
    two = distgemm.matmul_reduce_scatter(c, d, group=group, recipe="tensorwise")
    (one.sum() + two.sum()).backward()
    whole = {(torch.float8_e4m3fn, x.shape), (torch.float8_e5m2, (TOKENS, OUT))}
    alive = {(t.dtype, t.shape) for t in gc.get_objects() if type(t) is Tensor} & whole
    return [f"{each} lives" for each in alive] + ([] if x.shape in saved else [f"saved {saved}"])


def warmed() -> list[str]:
    """Warmup lists the products of a layer with a recipe, and leaves nothing in its state."""
    group: Any = dist.group.WORLD
    wrong = []
    for name in ("tensorwise_delayed", "rowwise", "blockwise"):
        layer = distgemm.nn.ColumnParallelLinear(64, 192, group=group, recipe=fp8.recipe(name, block=BLOCK), bias=False)
        x = torch.randn(32, 64, requires_grad=True)
        needs = distgemm.warmup(layer, x)
        with distgemm.record_calls() as calls:
            layer(x).sum().backward()
        ran = [call.plan.problem for call in calls]
        if {need.problem for need in needs} != set(ran):
            wrong.append(f"{name}: {needs} instead of {ran}")
    return wrong


def compiled() -> list[str]:
    """torch.compile without a graph break computes the same; with one, weights that are quantised once a step."""
    group: Any = dist.group.WORLD
    wrong = []
    layer = distgemm.nn.RowParallelLinear(FEATURES, OUT, group=group, recipe="tensorwise")
    compiled, grads = torch.compile(layer, backend="aot_eager"), []
    with fp8.fixed_weights():
        for each in (layer, compiled, compiled):
            layer.weight.grad = None
            each(split(data()[0], 1)).sum().backward()
            grads.append(layer.weight.grad.to_local())  # type: ignore[attr-defined]
    wrong += [far(grad, grads[0]) for grad in grads]
    gather, scatter = distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter
    for (function, along, out), name in product(((scatter, 1, 0), (gather, 0, 1)), ("tensorwise", "rowwise")):
        x, w, _, dy = data()

        def run(a: Tensor, b: Tensor, function: Any = function, name: str = name) -> Any:
            return function(a, b, group=group.group_name, recipe=name) * 2

        found = []
        for each in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            a, b = split(x, along), split(w, along)
            y = each(a, b)
            y.backward(split(dy, out))
            found.append((y, a.grad, b.grad))
        where = f"{function.__name__}, {name}"
        wrong += [f"{where}: {reason}" for one, two in zip(*found, strict=True) if (reason := far(one, two))]
    return [each for each in wrong if each]
