"""The ranks of the tests of matmul_all_to_all and all_to_all_matmul. Every rank computes the whole product, too."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config  # noqa: PLC2701  (torch has no public name)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import distgemm
from distgemm.torch_ops import library
from tests.multiprocess.ops_torch_worker import BETWEEN, BOUND, K, Shard, Whole, errors_of, messages, split

EXAMPLES = Path(__file__).parents[2] / "examples"
Tensor = torch.Tensor
HEAD = 2
"""Columns of a head."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: ``function`` is "scatter", to columns of all tokens, or "gather", to tokens of all columns.

    Attributes:
        function: which of the two.
        heads: for each weight the heads of each rank; None: one on each. Copies have equal numbers.
        rows: tokens of each rank; None: as many on each.
        copies: of each weight.
        bias: whether the first two weights have a bias.
        schedule: as in the call.
        chunks: as in the call.
        frozen: "a", "b" or "bias" if that has no gradient.
    """

    function: str
    heads: tuple[tuple[int, ...] | None, ...] = (None,)
    rows: tuple[int, ...] | None = None
    copies: tuple[int, ...] = (1,)
    bias: bool = False
    schedule: str = "auto"
    chunks: int | None = None
    frozen: str = ""


def cases(ranks: int) -> list[Case]:
    unequal = tuple((0, 3, 1, 4, 2, 0, 1, 5)[:ranks]) if ranks > 1 else (5,)
    heads = tuple((2, 1, 0, 3, 1, 1, 0, 2)[:ranks])
    found = [
        Case(function, (each,), rows, bias=bias)
        for function, each, rows, bias in product(("scatter", "gather"), (None, heads), (None, unequal), (False, True))
    ]
    for copies in (each for each in range(2, ranks + 1) if ranks % each == 0):
        few = tuple(1 + rank // copies for rank in range(ranks))
        found += [Case("scatter", (None, None, None), rows, (1, copies, copies), bias=True) for rows in (None, unequal)]
        found += [Case("scatter", (heads, few, few), unequal, (1, copies, copies), bias=True)]
        found += [Case("scatter", (few,), None, (copies,), bias=True, frozen=frozen) for frozen in ("a", "b", "bias")]
    for function in ("scatter", "gather"):
        found += [Case(function, (heads,), unequal, bias=True, frozen=frozen) for frozen in ("a", "b", "bias")]
        mode = "n" if function == "scatter" else "k"
        for chunks, by in product((2, 3), ("m", mode)):
            name = "gemm+a2a" if function == "scatter" else "a2a+gemm"
            found.append(
                Case(function, (heads,), unequal, bias=True, schedule=f"{name} chunk_mode={by}", chunks=chunks)
            )
        if ranks & (ranks - 1) == 0:
            last = "d" if function == "scatter" else "a"
            name = f"all_to_all_1d_pairwise_xor_{last}"
            found.append(Case(function, (None,), unequal, bias=True, schedule=name))
            if ranks > 2:
                both = f"across={name} inside=all_to_all_1d_rotating_{last}"
                name = f"tensor_parallel_2d_nested mesh=2x{ranks // 2} {both}"
                found.append(Case(function, (heads,), unequal, bias=True, schedule=name))
    return found


def run_case(case: Case, seed: int, group: Any = None) -> str | None:
    """The first difference of a case from the whole product, or None."""
    group = dist.group.WORLD if group is None else group
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(seed)
    tokens = case.rows or (3,) * ranks
    widths = [tuple(HEAD * each for each in heads or (1,) * ranks) for heads in case.heads]
    wholes = [sum(width) // copies for width, copies in zip(widths, case.copies, strict=True)]
    scatters = case.function == "scatter"

    def draw(*shape: int, name: str) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=case.frozen != name)

    a = draw(sum(tokens), BETWEEN, K if scatters else wholes[0], name="a")
    bs = [draw(n, K, name="b") if scatters else draw(5, n, name="b") for n in wholes]
    biases = [draw(b.shape[0], name="bias") if case.bias and at < 2 else None for at, b in enumerate(bs)]
    ys = [torch.nn.functional.linear(a, b, bias) for b, bias in zip(bs, biases, strict=True)]

    def columns_of(x: Tensor, at: int) -> Tensor:
        shards = widths[at][:: case.copies[at]]
        return split(x, shards, rank // case.copies[at], x.dim() - 1)

    def rows_of(x: Tensor) -> Tensor:
        return split(x, tokens, rank)

    # Copies of columns are used by several ranks. Each uses them in its own way, and the gradients add up.
    weights = [[torch.randn_like(y) for _ in range(copies)] for y, copies in zip(ys, case.copies, strict=True)]
    sum((y * sum(w)).sum() for y, w in zip(ys, weights, strict=True)).backward()  # type: ignore[union-attr,arg-type]

    def leaf(x: Tensor | None) -> Any:
        return None if x is None else x.detach().clone().requires_grad_(x.requires_grad)

    mine = leaf(rows_of(a) if scatters else columns_of(a, 0)), [leaf(b) for b in bs], [leaf(each) for each in biases]
    options: dict[str, Any] = {"group": group, "schedule": case.schedule, "chunks": case.chunks}
    options["m_per_rank"] = case.rows
    if scatters:
        given = [None if heads is None else width for heads, width in zip(case.heads, widths, strict=True)]
        if len(bs) > 1:
            options |= {"n_per_rank": given, "copies": case.copies, "bias": mine[2] if case.bias else None}
            got = distgemm.matmul_all_to_all(mine[0], mine[1], **options)
        else:
            options |= {"n_per_rank": given[0], "copies": case.copies[0], "bias": mine[2][0]}
            got = [distgemm.matmul_all_to_all(mine[0], mine[1][0], **options)]
        wanted_ys = [columns_of(y, at) for at, y in enumerate(ys)]
        used = [
            columns_of(w[rank % copies], at) for at, (w, copies) in enumerate(zip(weights, case.copies, strict=True))
        ]
    else:
        options |= {"k_per_rank": None if case.heads[0] is None else widths[0], "bias": mine[2][0]}
        got = [distgemm.all_to_all_matmul(mine[0], mine[1][0], **options)]
        wanted_ys, used = [rows_of(ys[0])], [rows_of(weights[0][0])]
    sum((y * w).sum() for y, w in zip(got, used, strict=True)).backward()  # type: ignore[union-attr]
    wanted = {f"y[{at}]": (y, true) for at, (y, true) in enumerate(zip(got, wanted_ys, strict=True))}
    if a.grad is not None or mine[0].grad is not None:
        assert a.grad is not None
        wanted["a.grad"] = mine[0].grad, rows_of(a.grad) if scatters else columns_of(a.grad, 0)
    for name, leaves, wholes_of in (("b", mine[1], bs), ("bias", mine[2], biases)):
        for at, (x, true) in enumerate(zip(leaves, wholes_of, strict=True)):
            if true is None or true.grad is None:
                if x is not None and x.grad is not None:
                    return f"{name}[{at}] of {case} has a gradient"
                continue
            dist.all_reduce(x.grad)  # each rank has the gradient of its tokens
            wanted[f"{name}[{at}].grad"] = x.grad, true.grad
    for name, (found, true) in wanted.items():
        if found.shape != true.shape:
            return f"{name} of {case}: shape {tuple(found.shape)} instead of {tuple(true.shape)}"
        if found.numel() and not float((found - true).detach().abs().max()) < BOUND:
            return f"{name} of {case} on rank {rank}: {found} instead of {true}"
    return None


def equal_to_the_whole(todo: Sequence[Case]) -> list[str]:
    return [found for seed, case in enumerate(todo) if (found := run_case(case, seed)) is not None]


def what_ran() -> dict[str, Any]:
    """For each function, forward and backward: its calls, the bytes sent, and the bytes of the plans' links."""
    ranks, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    found: dict[str, Any] = {}
    a, b = torch.randn(4, K, requires_grad=True), torch.randn(2 * ranks, K, requires_grad=True)
    columns, c = torch.randn(4 * ranks, 2, requires_grad=True), torch.randn(5, 2 * ranks, requires_grad=True)
    todo: dict[str, Callable[[], Tensor]] = {
        "scatter": lambda: distgemm.matmul_all_to_all(a, b, group=world),
        "scatter, b frozen": lambda: distgemm.matmul_all_to_all(a, b.detach(), group=world),
        "scatter, a frozen": lambda: distgemm.matmul_all_to_all(a.detach(), b, group=world),
        "gather": lambda: distgemm.all_to_all_matmul(columns, c, group=world),
        "gather, b frozen": lambda: distgemm.all_to_all_matmul(columns, c.detach(), group=world),
    }
    for name, run in todo.items():
        run().sum().backward()  # makes the executables, with collectives
        with messages() as sent, distgemm.record_calls() as ran:
            y = run()
            last = str(distgemm.last_call())
            y.sum().backward()
        links: Counter[tuple[int, int]] = Counter()
        for call in ran:
            links.update({link: size for link, size in call.plan.link_bytes().items() if link[0] == rank})
        found[name] = [(call.function, call.plan.schedule) for call in ran], dict(sent), dict(links), last
    return found


def gradients() -> list[str]:
    """torch's gradcheck of functions of whole tensors. All ranks perturb the same element at the same time."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(1)

    def there_and_back(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        heads = distgemm.matmul_all_to_all(Shard.apply(a, 0), Everywhere.apply(b), group=world)
        y = distgemm.all_to_all_matmul(heads.square(), Everywhere.apply(c), group=world, bias=Everywhere.apply(bias))
        return Whole.apply(y, 0)  # type: ignore[no-any-return]

    shapes = (ranks, 2), (ranks, 2), (2, ranks), (2,)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return [] if torch.autograd.gradcheck(there_and_back, inputs, raise_exception=False) else ["there and back"]


class Everywhere(torch.autograd.Function):
    """A tensor that all ranks have. The gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def twice() -> list[str]:
    """A second derivative that needs no gathered input, and one that needs it, which raises."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    a = torch.linspace(-1, 1, 2 * ranks * 3, dtype=torch.float64).view(2 * ranks, 3).requires_grad_()
    b = torch.linspace(1, 2, 6 * ranks, dtype=torch.float64).view(2 * ranks, 3).requires_grad_()
    mine = a.detach().chunk(ranks)[rank].clone().requires_grad_()
    y = distgemm.matmul_all_to_all(mine, b.detach(), group=group)
    (first,) = torch.autograd.grad(y.pow(3).sum(), mine, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), mine)
    plain = torch.nn.functional.linear(a, b.detach())
    (first,) = torch.autograd.grad(plain.pow(3).sum(), a, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), a)
    same = torch.allclose(second, wanted.chunk(ranks)[rank], atol=BOUND)
    found = [] if same else [f"{second} instead of {wanted}"]
    y = distgemm.matmul_all_to_all(mine, b, group=group)
    (first,) = torch.autograd.grad(y.pow(3).sum(), b, create_graph=True)
    try:
        first.sum().backward()
        found.append("nothing was raised")
    except RuntimeError as error:
        if "no gradient goes through the gathered input of all_to_all_matmul" not in str(error):
            found.append(str(error))
    return found


def compiled() -> list[str]:
    """torch.compile without a graph break, forward and backward, with dynamic tokens, sizes and several weights."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    b, keys, bias, c = draw(HEAD * ranks, K), draw(HEAD, K), draw(HEAD * ranks), draw(4, HEAD * ranks)
    unequal = tuple(2 * (other == 0) + HEAD * (ranks - 1) * (other == ranks - 1) for other in range(ranks))

    def layer(a: Tensor) -> Tensor:
        given: dict[str, Any] = {"bias": [bias, None], "copies": [1, ranks]}
        y, z = distgemm.matmul_all_to_all(a, [b, keys], group=group, **given)
        return distgemm.all_to_all_matmul(torch.relu(y) * z, c, group=group, bias=c[:, 0])

    def with_sizes(a: Tensor) -> Tensor:
        sizes: dict[str, Any] = {"m_per_rank": (2,) * ranks, "chunks": 2}
        y = distgemm.matmul_all_to_all(a, b, group=group, n_per_rank=unequal, **sizes)
        return distgemm.all_to_all_matmul(torch.relu(y), c, group=group, k_per_rank=unequal, **sizes)

    wrong = []
    for function, dynamic in ((layer, False), (layer, True), (with_sizes, False)):
        torch._dynamo.reset()
        fast = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in (2, 4, 6) if dynamic else (2,):
            results = []
            for run in (function, fast):
                a = torch.linspace(-1, 1, tokens * K, dtype=torch.float64).view(tokens, K).requires_grad_()
                y = run(a)
                leaves = [a, b, c] if function is with_sizes else [a, b, keys, bias, c]
                results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
            wrong += [
                f"{function.__name__}, dynamic={dynamic}, {tokens} tokens: {x} instead of {true}"
                for x, true in zip(results[1], results[0], strict=True)
                if not torch.equal(x, true)
            ]
    return wrong


def compiled_by_inductor() -> list[str]:
    """Gradients of independent products, of unequal tokens and heads, in a graph that inductor may reorder."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    tokens, widths = [32 + 8 * other for other in range(ranks)], [64 * (1 + (other == 0)) for other in range(ranks)]
    n = sum(widths)
    torch.manual_seed(2)
    a, *weights = (
        torch.randn(s, dtype=torch.bfloat16) / 4 for s in ((sum(tokens), 2, 256), (n, 256), (64, 256), (256, n))
    )
    biases = [torch.randn(each, dtype=torch.bfloat16) for each in (n, 256)]
    leaves = [each.requires_grad_() for each in (split(a, tokens, rank).clone(), *weights, *biases)]

    def layer(x: Tensor, q: Tensor, k: Tensor, out: Tensor, bias: Tensor, out_bias: Tensor) -> Tensor:
        given: dict[str, Any] = {"group": group, "m_per_rank": tokens}
        y, z = distgemm.matmul_all_to_all(
            x, [q, k], bias=[bias, None], n_per_rank=[widths, None], copies=[1, ranks], **given
        )
        h = nn.functional.silu(y) * z.mean(-1, keepdim=True)
        return distgemm.all_to_all_matmul(h, out, bias=out_bias, k_per_rank=widths, **given)

    results = []
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        for run in (layer, torch.compile(layer, fullgraph=True, backend="inductor")):
            y = run(*leaves)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    wrong = []
    for name, x, true in zip(("y", "x", "q", "k", "out", "bias", "out_bias"), results[1], results[0], strict=True):
        error = float((x.double() - true.double()).abs().max() / true.double().abs().max())
        wrong += [f"{name} on rank {rank}: {error}"] * (not error < 2.0**-6)
    return wrong


def checked_by_torch() -> None:
    """torch's opcheck: schema, fake kernels, registration of autograd, tracing with dynamic sizes."""
    group = dist.group.WORLD
    assert group is not None
    name, ranks, rank = group.group_name, dist.get_world_size(), dist.get_rank()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    a, b, bias, c = draw(2, 3), draw(2 * ranks, 3), draw(2 * ranks), draw(5, 2 * ranks)
    rows, columns = [2 + (other == 0) for other in range(ranks)], [1, *[0] * (ranks - 2), 2 * ranks - 1]
    for registered, args in (
        (library.matmul_all_to_all, (a, b, bias, name, "auto", None, None, None, 1)),
        (library.matmul_all_to_all, (a, b, bias, name, "auto", None, None, None, ranks)),
        (library.matmul_all_to_all, (draw(rows[rank], 3), b, None, name, "gemm+a2a", 2, rows, columns, 1)),
        (library.all_to_all_matmul, (draw(2 * ranks, 2), c, None, name, "auto", None, None, None, False, "forward")),
        # opcheck wants the gradient of all results, and the gathered rows have none.
        (
            library.all_to_all_matmul,
            (torch.randn(sum(rows), columns[rank]), c.detach(), torch.randn(5), name, "a2a+gemm", 2, rows, columns,
             True, "forward"),
        ),
    ):  # fmt: skip
        torch.library.opcheck(registered.op, args)


def autocast() -> list[str]:
    """Under torch.autocast: the dtypes of F.linear."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    a, b, c = torch.randn(3, 4), torch.randn(2 * ranks, 4), torch.randn(5, 2 * ranks)
    with torch.autocast("cpu", torch.bfloat16):
        y = distgemm.matmul_all_to_all(a, b, group=world, bias=b[:, 0])
        z = distgemm.all_to_all_matmul(y, c, group=world, bias=c[:, 0])
        kept = distgemm.matmul_all_to_all(a.double(), b.double(), group=world)
    found = [x.dtype for x in (y, z, kept)]
    return [] if found == [torch.bfloat16, torch.bfloat16, torch.float64] else [str(found)]


def misuse() -> dict[str, str]:
    """The messages of wrong calls. All ranks make the same mistake, unless the test says otherwise."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    to, back = distgemm.matmul_all_to_all, distgemm.all_to_all_matmul
    a, b, c = torch.randn(2, 3), torch.randn(2 * ranks, 3), torch.randn(5, 2 * ranks)
    heads = torch.randn(2 * ranks, 2)
    todo: dict[str, Callable[[], Any]] = {
        "features": lambda: to(a, torch.randn(4, 5), group=world),
        "dtype": lambda: to(a, b.double(), group=world),
        "odd columns": lambda: to(a, torch.randn(2 * ranks + 1, 3), group=world),
        "odd copies": lambda: to(a, b, group=world, copies=ranks + 1),
        "no copies": lambda: to(a, b, group=world, copies=0),
        "columns of copies": lambda: to(a, b, group=world, copies=ranks, n_per_rank=(1, *(3,) * (ranks - 1))),
        "unequal copies": lambda: to(a, b[:2], group=world, copies=ranks, n_per_rank=(1, 3, *(2,) * (ranks - 2))),
        "sum of columns": lambda: to(a, b, group=world, n_per_rank=(1,) * ranks),
        "number of columns": lambda: to(a, b, group=world, n_per_rank=(2 * ranks,)),
        "negative columns": lambda: to(a, b, group=world, n_per_rank=(-1,) * ranks),
        "bias": lambda: to(a, b, group=world, bias=torch.randn(2)),
        "one bias for several": lambda: to(a, [b, b], group=world, bias=torch.randn(2)),  # type: ignore[call-overload]
        "columns for several": lambda: to(a, [b, b], group=world, n_per_rank=(2,) * (ranks + 1)),  # type: ignore[call-overload]
        "copies for several": lambda: to(a, [b, b], group=world, copies=[1]),
        "none": lambda: to(a, [], group=world),
        "rows of this rank": lambda: to(a, b, group=world, m_per_rank=[1] * ranks),
        "no schedule for it": lambda: to(a, b, group=world, schedule="ag+gemm"),
        "unfused": lambda: to(a, b, group=world, schedule="unfused"),
        "copies of xor": lambda: to(a, b, group=world, schedule="all_to_all_1d_pairwise_xor_d", copies=2),
        "shares": lambda: back(heads, torch.randn(5, 2 * ranks + 1), group=world),
        "columns of this rank": lambda: back(heads, c, group=world, k_per_rank=(2 * ranks, *(0,) * (ranks - 1))),
        "odd rows": lambda: back(torch.randn(2 * ranks + 1, 2), c, group=world),
        "sum of rows": lambda: back(heads, c, group=world, m_per_rank=[1] * ranks),
        "list": lambda: back(heads.tolist(), c, group=world),  # type: ignore[arg-type]
    }
    found = errors_of(todo)
    # No wrong call has sent anything, so calls still work.
    found["after"] = str(back(to(a, b, group=world), c, group=world).shape[0])
    return found


# --- layers and styles --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention, (tokens, batch, features) or batch first. It takes numbers of heads from its projections."""

    def __init__(self, heads: int, kv_heads: int, first: int) -> None:
        super().__init__()
        self.first = first
        self.wq, self.wo = nn.Linear(K, HEAD * heads), nn.Linear(HEAD * heads, K)
        self.wk, self.wv = nn.Linear(K, HEAD * kv_heads), nn.Linear(K, HEAD * kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).movedim(self.first, 0).unflatten(-1, (-1, HEAD)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.permute(2, 0, 1, 3).flatten(-2).movedim(0, self.first))  # type: ignore[no-any-return]


SIZES: dict[int, list[tuple[int, int]]] = {
    2: [(4, 2), (4, 1), (3, 3)],
    3: [(6, 1), (5, 5), (10, 5)],
    4: [(4, 4), (6, 2), (5, 1)],
}
"""Heads of queries and of keys, by the number of ranks."""


def in_attention() -> list[str]:
    """Attention by styles, by styles that sum no gradients, by layers and in torch.compile, against the whole one."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",))
    found = []
    for seed, ((heads, kv_heads), first, how) in enumerate(
        product(SIZES[ranks], (0, 1), ("styles", "not summed", "layers", "compiled"))
    ):
        if how == "compiled" and (heads, first) != (SIZES[ranks][1][0], 1):
            continue
        torch.manual_seed(seed)
        model = Attention(heads, kv_heads, first).double()
        tokens = tuple(3 + other for other in range(ranks)) if first else (2,) * ranks
        x = torch.randn(sum(tokens), BETWEEN, K, dtype=torch.float64).movedim(0, first).requires_grad_()
        mine = split(x.detach(), tokens, rank, first).clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        terms: dict[str, Any] = {"head_dim": HEAD, "kv_heads": kv_heads, "sequence_dim": first, "m_per_rank": tokens}
        parallel = copy.deepcopy(model)
        parallel.zero_grad()
        if how == "layers":
            for name in ("wq", "wk", "wv", "wo"):
                kind = distgemm.nn.HeadsToTokensLinear if name == "wo" else distgemm.nn.TokensToHeadsLinear
                setattr(parallel, name, kind.from_linear(getattr(parallel, name), group=mesh, **terms))
        else:
            terms["sum_gradients"] = how != "not summed"
            to, back = distgemm.nn.TokensToHeads(**terms), distgemm.nn.HeadsToTokens(**terms)
            parallelize_module(parallel, mesh, {"wq": to, "wk": to, "wv": to, "wo": back})
        run: Any = parallel
        if how == "compiled":
            torch._dynamo.reset()
            run = torch.compile(parallel, fullgraph=True, backend="aot_eager")
        got = run(mine)
        got.square().sum().backward()
        assert x.grad is not None and mine.grad is not None
        wanted = {
            "y": (got, split(y, tokens, rank, first)),
            "x.grad": (mine.grad, split(x.grad, tokens, rank, first)),
        }
        for name, true in model.named_parameters():
            grad: Any = parallel.get_parameter(name).grad
            if how == "not summed":
                dist.all_reduce(grad)
            elif not isinstance(grad, DTensor) or not grad.placements[0].is_replicate():
                return [f"{name}.grad is no replicated DTensor"]
            wanted[f"{name}.grad"] = grad.to_local() if isinstance(grad, DTensor) else grad, true.grad
        found += [
            f"{name}, {heads} heads, {kv_heads} of keys, {how}, rank {rank}: {one} instead of {true}"
            for name, (one, true) in wanted.items()
            if one.shape != true.shape or not torch.allclose(one, true, atol=BOUND)
        ]
    return found


def in_a_model(replicas: int = 0) -> list[str]:
    """The Llama of the examples with a style on each module that has parameters, as the page of the docs says.

    Args:
        replicas: not 0: FSDP2 has the parameters, and sums over the ranks and so many replicas, which have a part of
            the batch each. Blocks recompute their activations.
    """
    shape = max(1, replicas), dist.get_world_size() // max(1, replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
    dp, rank, ranks = mesh.get_local_rank("dp"), mesh.get_local_rank("sp"), mesh["sp"].size()
    sys.path.insert(0, str(EXAMPLES))
    llama: Any = importlib.import_module("llama")
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(layers=2)).double()
    parallel = copy.deepcopy(model)
    ids = torch.randint(256, (8 * ranks, 2))
    split: dict[str, Any] = {"head_dim": 8, "kv_heads": 4, "sequence_dim": 0, "sum_gradients": not replicas}
    plan: dict[str, Any] = {"blocks.*.attention.wo": distgemm.nn.HeadsToTokens(**split)}
    plan |= {f"blocks.*.attention.{name}": distgemm.nn.TokensToHeads(**split) for name in ("wq", "wk", "wv")}
    others = ("embedding", "norm", "head", "blocks.*.attention_norm", "blocks.*.mlp_norm")
    for name in () if replicas else (*others, "blocks.*.mlp.gate", "blocks.*.mlp.up", "blocks.*.mlp.down"):
        plan[name] = distgemm.nn.SequenceParallel(sequence_dim=0)

    def part(x: Tensor) -> Tensor:
        return x.chunk(max(1, replicas), 1)[dp].chunk(ranks)[rank]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning of a gradient that is not summed
        parallelize_module(parallel, mesh["sp"], plan)
        for block in parallel.blocks if replicas else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        for module in (*parallel.blocks, parallel) if replicas else ():
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
        y = parallel(part(ids))
        y.square().sum().backward()
    wanted = model(ids)
    wanted.square().sum().backward()
    found = [] if torch.allclose(y, part(wanted), atol=BOUND) else ["logits"]
    pairs = zip(parallel.named_parameters(), model.parameters(), strict=True)
    return found + [
        name for (name, x), true in pairs if not torch.allclose(x.grad.full_tensor(), true.grad, atol=BOUND)
    ]


def new_layers() -> list[str]:
    """A layer's weight is drawn alike on all ranks, with the bounds of a Linear."""
    torch.manual_seed(3)
    layer = distgemm.nn.TokensToHeadsLinear(8, 8 * dist.get_world_size(), head_dim=8, group=dist.group.WORLD)
    weight = layer.weight.to_local()  # type: ignore[operator]
    bounds = weight.amin(), weight.amax()
    first = weight.clone()
    dist.broadcast(first, 0)
    fine = torch.equal(first, weight) and -(8**-0.5) <= bounds[0] < -0.2 and 0.2 < bounds[1] <= 8**-0.5
    return [] if fine else [f"{weight}"]


def wrong_layers() -> dict[str, str]:
    """The messages of styles and layers with wrong numbers."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (ranks,))
    to, back = distgemm.nn.TokensToHeads, distgemm.nn.HeadsToTokens
    todo: dict[str, Callable[[], Any]] = {
        "part of a head": lambda: parallelize_module(nn.Linear(4, 9), mesh, to(head_dim=4)),
        "no divisor": lambda: parallelize_module(nn.Linear(4, 16), mesh, to(head_dim=2, kv_heads=3)),
        "few heads": lambda: parallelize_module(nn.Linear(4, 4), mesh, back(head_dim=4)),
        "few queries": lambda: parallelize_module(nn.Linear(4, 8), mesh, to(head_dim=4, kv_heads=1)),
        "a norm": lambda: parallelize_module(nn.LayerNorm(4), mesh, to(head_dim=4)),
        "head_dim": lambda: to(head_dim=0),
        "sum_gradients": lambda: to(head_dim=1, sum_gradients=1),  # type: ignore[arg-type]
        "recipe": lambda: distgemm.nn.TokensToHeadsLinear(4, 12, head_dim=4, group=world, recipe="rowwise"),
        "dimension": lambda: parallelize_module(nn.Linear(4, 12), mesh, to(head_dim=4))(torch.ones(2, 2, 4)),
    }
    return errors_of(todo)
