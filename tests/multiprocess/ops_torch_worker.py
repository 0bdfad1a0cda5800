"""The ranks of the tests of the torch functions. Every rank computes the whole product, too, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

import distgemm
from distgemm.nn.replicated import linear_of_replicated
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.torch_ops import dispatch, group_name, library

Tensor = torch.Tensor
BOUND = 1e-10
K = 6
BETWEEN = 2
"""Size of the dimension between tokens and features."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: ``function`` is "gather", "scatter" or "reduce"; ``ns`` and ``k`` are features over all ranks."""

    function: str
    rows: tuple[int, ...] | None = None
    ns: tuple[int, ...] = ()
    even: bool = True
    k: int = 0
    bias: bool = False
    keep: bool = False
    schedule: str = "auto"
    chunks: int | None = None
    frozen: str = ""


def cases(ranks: int) -> list[Case]:
    unequal = {1: (5,), 2: (0, 5), 3: (4, 0, 3), 4: (1, 0, 5, 2), 8: (1, 0, 5, 2, 0, 3, 1, 4)}[ranks]
    found = []
    for rows, bias, keep in product((None, unequal), (False, True), (False, True)):
        found += [
            Case("gather", rows, (2 * ranks,), bias=bias, keep=keep),
            Case("gather", rows, (3 * ranks, ranks, 2 * ranks), bias=bias, keep=keep),
            # Rank 3 of 4 has one row less.
            Case("gather", rows, (3 * ranks - 1,), even=False, bias=bias, keep=keep),
            Case("gather", rows, (ranks, 3 * ranks - 1, 2 * ranks - 1), even=False, bias=bias, keep=keep),
        ]
    for rows, bias in product((None, unequal), (False, True)):
        found += [
            Case("scatter", rows, (5,), k=2 * ranks, bias=bias),
            Case("scatter", rows, (4,), even=False, k=3 * ranks - 1, bias=bias),
            Case("scatter", rows, (4,), k=ranks, bias=bias, schedule="gemm+rs", chunks=2),
            Case("reduce", None, (5,), k=2 * ranks, bias=bias),
            Case("reduce", None, (4,), even=False, k=3 * ranks - 1, bias=bias, schedule="gemm+ar", chunks=2),
            Case("reduce", None, (4,), even=False, k=3 * ranks - 1, bias=bias, schedule="all_reduce_1d_one_shot_a"),
        ]
    found += [Case("gather", None, (2 * ranks, ranks), bias=True, frozen=each) for each in ("a", "b", "bias")]
    found += [
        Case(function, None, (4,), k=2 * ranks, bias=True, frozen=frozen)
        for function in ("scatter", "reduce")
        for frozen in "ab"
    ]
    found.append(Case("gather", unequal, (2 * ranks,), schedule="all_gather_1d_ring_a", chunks=2))
    summed = "reduce_scatter_1d_pairwise_a chunks=2 final_add=epilogue send_slots=4"
    found += [Case("scatter", rows, (4,), k=ranks, bias=True, schedule=schedule) for rows in (None, unequal)
              for schedule in (summed, "unfused")]  # fmt: skip
    found += [
        Case("gather", unequal, (2 * ranks, ranks), bias=True, schedule="unfused"),
        Case("reduce", None, (4,), k=ranks, bias=True, schedule="unfused"),
    ]
    if ranks == 4:  # 5 is split as 2, 2, 1, 0: the last rank has no GEMM
        found += [Case("gather", rows, (5,), even=False, bias=True) for rows in (None, unequal)]
        found += [Case("scatter", rows, (4,), even=False, k=5) for rows in (None, unequal)]
        found.append(Case("reduce", None, (4,), even=False, k=5))
    return found


def split(x: Tensor, sizes: Sequence[int], rank: int, dim: int = 0) -> Tensor:
    stops = list(accumulate(sizes))
    return x.narrow(dim, stops[rank] - sizes[rank], sizes[rank])


def run_case(case: Case, seed: int, group: Any = None) -> str | None:
    """The first difference of a case from the whole product, or None."""
    group = dist.group.WORLD if group is None else group
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if isinstance(group, dist.ProcessGroup):
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed)
    tokens = case.rows or (3,) * ranks
    m = sum(tokens)
    gathers = case.function == "gather"
    k = K if gathers else case.k
    a = torch.randn(m, BETWEEN, k, dtype=torch.float64, requires_grad=case.frozen != "a")
    bs = [torch.randn(n, k, dtype=torch.float64, requires_grad=case.frozen != "b") for n in case.ns]
    biases = [torch.randn(n, dtype=torch.float64, requires_grad=case.frozen != "bias") for n in case.ns]
    ys = [torch.nn.functional.linear(a, b, bias if case.bias else None) for b, bias in zip(bs, biases, strict=True)]
    weights = [torch.randn_like(y) for y in ys]
    sum((y * w).sum() for y, w in zip(ys, weights, strict=True)).backward()  # type: ignore[union-attr]

    def rows_of(x: Tensor) -> Tensor:
        return split(x, tokens, rank)

    def part(x: Tensor, dim: int) -> Tensor:
        return split(x, library.split_extent(x.shape[dim], ranks), rank, dim)

    take_a = rows_of if gathers else lambda x: part(x, 2)
    take_b: Callable[[Tensor], Tensor] = (lambda x: part(x, 0)) if gathers else lambda x: part(x, 1)
    take_bias: Callable[[Tensor], Tensor] = (lambda x: part(x, 0)) if gathers else lambda x: x
    take_y: Callable[[Tensor], Tensor] = (lambda x: part(x, 2)) if gathers else rows_of
    if case.function == "reduce":
        take_y = lambda x: x  # noqa: E731

    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad)

    mine = leaf(take_a(a)), [leaf(take_b(b)) for b in bs], [leaf(take_bias(bias)) for bias in biases]
    options: dict[str, Any] = {"group": group, "schedule": case.schedule, "chunks": case.chunks}
    if case.function != "reduce":
        options["m_per_rank"] = case.rows
    bias: Any = mine[2] if case.bias else None
    if gathers:
        several = len(bs) > 1
        if not case.even:
            options["out_features"] = list(case.ns) if several else case.ns[0]
        bias = bias if several or bias is None else bias[0]
        got: Any = distgemm.all_gather_matmul(
            mine[0], mine[1] if several else mine[1][0], bias=bias, keep_gathered=case.keep, **options
        )
        got = got if several else [got]
    else:
        if not case.even:
            options["in_features"] = case.k
        function = distgemm.matmul_reduce_scatter if case.function == "scatter" else distgemm.matmul_all_reduce
        got = [function(mine[0], mine[1][0], bias=bias[0] if case.bias else None, **options)]
    sum((y * take_y(w)).sum() for y, w in zip(got, weights, strict=True)).backward()

    def expected(x: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if x.grad is None else take(x.grad)

    wanted = {"a.grad": (mine[0].grad, expected(a, take_a))}
    wanted |= {f"y[{i}]": (y, take_y(w)) for i, (y, w) in enumerate(zip(got, ys, strict=True))}
    for name, leaves, wholes, take in (("b", mine[1], bs, take_b), ("bias", mine[2], biases, take_bias)):
        for i, (x, w) in enumerate(zip(leaves, wholes, strict=True)):
            wanted[f"{name}[{i}].grad"] = x.grad, expected(w, take)
    for name, (found, true) in wanted.items():
        if (found is None) != (true is None):
            return f"{name} of {case}: {found} instead of {true}"
        if found is not None and true is not None:
            if found.shape != true.shape:
                return f"{name} of {case}: shape {tuple(found.shape)} instead of {tuple(true.shape)}"
            if found.numel() and not float((found - true).detach().abs().max()) < BOUND:
                return f"{name} of {case} on rank {rank}: {found} instead of {true}"
    return None


def equal_to_the_whole(todo: Sequence[Case]) -> list[str]:
    return [found for seed, case in enumerate(todo) if (found := run_case(case, seed)) is not None]


def gathered() -> list[str]:
    """return_gathered: A of all ranks, and no gradient through it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = (2, 0, 3, 1)[:ranks]
    torch.manual_seed(0)
    a = torch.randn(sum(tokens), K, dtype=torch.float64)
    b = torch.randn(4, K, dtype=torch.float64)
    y, whole = distgemm.all_gather_matmul(
        split(a, tokens, rank), b.requires_grad_(), group=dist.group.WORLD, m_per_rank=tokens, return_gathered=True
    )
    wrong = [] if torch.equal(whole, a) else [f"{whole} instead of {a}"]
    if whole.requires_grad or not torch.allclose(y, a @ b.t(), atol=BOUND):
        wrong.append("gradient")
    return wrong


# --- what ran -----------------------------------------------------------------------------------------


COMPARED_BYTES = 33
"""What a rank sends before each call, to compare it: a digest, and whether there was an error."""


@contextlib.contextmanager
def messages() -> Iterator[Counter[tuple[int, int]]]:
    """Bytes that this rank sends to each peer; any collective raises, except the comparison of calls."""
    sent: Counter[tuple[int, int]] = Counter()
    post, compare = dist.batch_isend_irecv, dist.all_gather
    me = dist.get_rank()

    def recorded(todo: list[dist.P2POp]) -> Any:
        for each in todo:
            if each.op is dist.isend:
                sent[me, each.group_peer] += each.tensor.numel() * each.tensor.element_size()
        return post(todo)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a collective of torch.distributed")

    def compared(every: list[Tensor], mine: Tensor, group: Any) -> None:
        assert mine.dtype == torch.uint8 and mine.numel() == COMPARED_BYTES
        compare(every, mine, group)

    names = (
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "barrier",
        "all_to_all_single",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", recorded))
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, forbidden))
        stack.enter_context(mock.patch.object(dist, "all_gather", compared))
        yield sent


def what_ran() -> dict[str, Any]:
    """For each function, forward and backward: its calls, the bytes sent, and the bytes of the plans' links."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {}
    a = torch.randn(4, K, requires_grad=True)
    b = torch.randn(5, K, requires_grad=True)
    whole = torch.randn(4 * ranks, K, requires_grad=True)
    world = dist.group.WORLD
    todo: dict[str, Callable[[], Tensor]] = {
        "gather": lambda: distgemm.all_gather_matmul(a, b, group=world),
        "gather, kept": lambda: distgemm.all_gather_matmul(a, b, group=world, keep_gathered=True),
        "gather, b frozen": lambda: distgemm.all_gather_matmul(a, b.detach(), group=world),
        "scatter": lambda: distgemm.matmul_reduce_scatter(whole, b, group=world),
        "reduce": lambda: distgemm.matmul_all_reduce(whole, b, group=world),
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


def executables() -> dict[str, Any]:
    """The numbers of executables that are made and kept. Other tensors of the same sizes make none."""
    world = dist.group.WORLD
    assert world is not None
    made: list[Any] = []
    make = dispatch.executable_of

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    def run(tokens: int) -> None:
        distgemm.all_gather_matmul(torch.randn(tokens, 3), torch.randn(2, 3), group=world)

    found: dict[str, Any] = {}
    dispatch.PREPARED.of(world).clear()
    plan = distgemm.make_plan(distgemm.GemmProblem(m=6, n=6, k=3, dtype="float32"), "ag+gemm", world.size())
    two = 2 * dispatch.size_of(plan)
    with mock.patch.object(dispatch, "executable_of", counted), mock.patch.object(dispatch, "KEPT_BYTES", two):
        for tokens in (1, 1, 2, 1, 3, 1, 2):  # 2 was used before 1, so it is dropped first
            run(tokens)
            found.setdefault("made", []).append(len(made))
        found["kept"] = len(dispatch.PREPARED.of(world))
        distgemm.all_gather_matmul(torch.randn(2, 3), torch.randn(2, 3), group=dist.new_group())
        found["another group"] = len(made)
    return found


# --- autograd and compilation ------------------------------------------------------------------------


class Shard(torch.autograd.Function):
    """A rank's part of a tensor that all ranks have. The gradient is that of the whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return whole(grad, ctx.dim), None


class Whole(torch.autograd.Function):
    """The parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return whole(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


def whole(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def gradients() -> list[str]:
    """torch's gradcheck of functions of whole tensors. All ranks perturb the same element at the same time."""
    ranks = dist.get_world_size()
    world = dist.group.WORLD

    def gather(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        bs = [Shard.apply(b, 0), Shard.apply(c, 0)]
        y, z = distgemm.all_gather_matmul(Shard.apply(a, 0), bs, group=world, bias=[Shard.apply(bias, 0), None])
        return torch.cat([Whole.apply(y, 1), Whole.apply(z, 1)], 1)

    def scatter(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        y = distgemm.matmul_reduce_scatter(Shard.apply(a, 1), Shard.apply(b, 1), group=world, bias=bias)
        return Whole.apply(y, 0)  # type: ignore[no-any-return]

    def reduce(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return distgemm.matmul_all_reduce(Shard.apply(a, 1), Shard.apply(b, 1), group=world, bias=bias)

    torch.manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    checks = {
        "gather": (gather, (draw(ranks, 2), draw(2 * ranks, 2), draw(ranks, 2), draw(2 * ranks))),
        "scatter": (scatter, (draw(ranks, ranks), draw(2, ranks), draw(2))),
        "reduce": (reduce, (draw(3, ranks), draw(2, ranks), draw(2))),
    }
    wrong = []
    for name, (function, inputs) in checks.items():
        if not torch.autograd.gradcheck(function, inputs, raise_exception=False):
            wrong.append(name)
    return wrong


def twice() -> list[str]:
    """Second derivatives are right if they need no gathered input, and raise otherwise."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    a = torch.linspace(-1, 1, 2 * ranks * 3, dtype=torch.float64).view(2 * ranks, 3).requires_grad_()
    b = torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    y = distgemm.matmul_reduce_scatter(a, b.detach(), group=group)
    (first,) = torch.autograd.grad(y.pow(3).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    plain = torch.nn.functional.linear(a, b.detach())
    (first,) = torch.autograd.grad(plain.pow(3).sum(), a, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), a)
    found = [] if torch.allclose(second, wanted, atol=BOUND) else [f"{second} instead of {wanted}"]
    y = distgemm.matmul_reduce_scatter(a, b, group=group)
    (first,) = torch.autograd.grad(y.pow(3).sum(), b, create_graph=True)
    try:
        first.sum().backward()
        found.append("nothing was raised")
    except RuntimeError as error:
        if "no gradient goes through the gathered input" not in str(error):
            found.append(str(error))
    return found


def twice_behind_all_reduces() -> list[str]:
    """Second derivatives that need a sum over ranks, which nothing makes, raise; the others are right."""
    group, (size, rank) = dist.group.WORLD, (dist.get_world_size(), dist.get_rank())
    x = torch.linspace(-1, 1, 3 * 2 * size, dtype=torch.float64).view(3, 2 * size).requires_grad_()
    w = torch.linspace(1, 2, 4 * size * 2 * size, dtype=torch.float64).view(4 * size, 2 * size).requires_grad_()
    columns = slice(2 * rank, 2 * rank + 2)
    a, b = (each.detach()[:, columns].requires_grad_() for each in (x, w))
    mine = w.detach().chunk(size)[rank].requires_grad_()

    def first(y: Tensor, of: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(y.pow(3).sum(), of, create_graph=True)
        return found

    found = []
    for name, run, of in (
        ("reduce, a", lambda: distgemm.matmul_all_reduce(a, b, group=group), a),
        ("reduce, b", lambda: distgemm.matmul_all_reduce(a, b, group=group), b),
        ("replicated, weight", lambda: linear_of_replicated(x, mine, None, group_name(group), None), mine),
    ):
        try:
            first(run(), of).pow(2).sum().backward()
            found.append(f"{name}: nothing was raised")
        except RuntimeError as error:
            if "no second derivative goes through a gradient of matmul_all_reduce" not in str(error):
                found.append(f"{name}: {error}")
    x.grad = None
    first(linear_of_replicated(x, mine, None, group_name(group), None), x).pow(2).sum().backward()
    plain = x.detach().clone().requires_grad_()
    first(torch.nn.functional.linear(plain, w), plain).pow(2).sum().backward()
    assert x.grad is not None and plain.grad is not None
    assert mine.grad is not None and w.grad is not None
    for name, grad, wanted in (("x", x.grad, plain.grad), ("weight", mine.grad, w.grad.chunk(size)[rank])):
        if not torch.allclose(grad, wanted, rtol=1e-9):
            found.append(f"replicated: {name}")
    return found


def forward_mode() -> dict[str, str]:
    """The messages of calls with tangents; the group takes further calls."""
    group, a, tangent = dist.group.WORLD, torch.ones(2, 3), torch.ones(2, 3)
    executable = UnfusedExecutable(distgemm.GemmProblem(m=2, n=2, k=6, dtype="float32"), "gemm+ar", group)

    def reduce(x: Tensor) -> Tensor:
        return distgemm.matmul_all_reduce(x, a, group=group)

    todo: dict[str, Callable[[], Any]] = {
        "jvp": lambda: torch.func.jvp(reduce, (a,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(torch.func.jacrev(reduce))(a),
    }
    found = errors_of(todo)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        found |= errors_of({"dual": lambda: reduce(dual), "unfused": lambda: executable(dual, a)})
        found["without a tangent"] = str(float(reduce(a).sum()))
    return found


def batched_and_traced() -> list[str]:
    """A backward pass of several gradients at once, and torch.jit.trace."""
    group, ranks, wrong = dist.group.WORLD, dist.get_world_size(), []
    a, b = (torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_() for _ in range(2))
    y = distgemm.all_gather_matmul(a, b, group=group)
    grads = torch.linspace(-1, 1, 3 * y.numel(), dtype=torch.float64).view(3, *y.shape)
    (found,) = torch.autograd.grad(y, a, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, a, grad, retain_graph=True)[0] for grad in grads]
    if not torch.allclose(found, torch.stack(each), atol=BOUND):
        wrong.append("batched gradients")
    weight = b.detach()
    traced = torch.jit.trace(lambda x: distgemm.matmul_all_reduce(x, weight, group=group), (torch.ones_like(weight),))
    if not torch.allclose(traced(weight), ranks * weight @ weight.t(), atol=BOUND):
        wrong.append("trace")
    return wrong


def numbers_of_numpy() -> list[tuple[int, ...]]:
    """The shapes of results where rank 1 has its sizes as arrays and numbers of numpy."""
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes: Any = np.array([1, 3]) if rank else [1, 3]
    two: Any = np.int64(2) if rank else 2
    found = [
        distgemm.all_gather_matmul(torch.ones((1, 3)[rank], 3), torch.ones(2, 3), group=group, m_per_rank=sizes),
        distgemm.matmul_all_to_all(torch.ones(2, 3), torch.ones(4, 3), group=group, n_per_rank=sizes),
        distgemm.matmul_all_to_all(torch.ones(2, 3), torch.ones(4, 3), group=group, copies=two),
        distgemm.all_to_all_matmul(torch.ones(4, (1, 3)[rank]), torch.ones(5, 4), group=group, k_per_rank=sizes),
        distgemm.matmul_all_reduce(torch.ones(2, 3), torch.ones(2, 3), group=group, chunks=two),
    ]
    return [tuple(each.shape) for each in found]


def after_inference() -> list[str]:
    """A first call in inference mode, then one with gradients: both use the same buffers."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    wrong = []
    calls: dict[str, tuple[Callable[..., Tensor], tuple[int, int], tuple[int, int]]] = {
        "gather": (distgemm.all_gather_matmul, (5, 7), (6, 7)),
        "scatter": (distgemm.matmul_reduce_scatter, (5 * ranks, 7), (6, 7)),
        "reduce": (distgemm.matmul_all_reduce, (5, 7), (6, 7)),
    }
    for name, (function, a_shape, b_shape) in calls.items():
        torch.manual_seed(17 + dist.get_rank())
        # Every second column, so that rows are copied before they are sent.
        a, b = (torch.randn(rows, 2 * columns, dtype=torch.float64)[:, ::2] for rows, columns in (a_shape, b_shape))
        with torch.inference_mode():
            wanted = function(a, b, group=group)
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        y = function(*leaves, group=group)
        torch.autograd.grad(y.sum(), leaves)
        if not torch.equal(y, wanted):
            wrong.append(f"{name}: differs from the result in inference mode")
    return wrong


def compiled() -> list[str]:
    """torch.compile without a graph break, forward and backward, also with a dynamic number of tokens."""
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    torch.manual_seed(2)
    b = torch.randn(3, K, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, K, dtype=torch.float64, requires_grad=True)
    d = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def layer(a: Tensor) -> Tensor:
        y, z = distgemm.all_gather_matmul(a, [b, c], group=group, keep_gathered=True)
        h = distgemm.matmul_reduce_scatter(torch.relu(y) + z.sum(-1, keepdim=True), d, group=group)
        return distgemm.matmul_all_reduce(h, b[:2, :4], group=group)

    wrong = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in (2, 4, 6) if dynamic else (2,):
            results = []
            for run in (layer, fast):
                a = torch.linspace(-1, 1, tokens * K, dtype=torch.float64).view(tokens, K).requires_grad_()
                y = run(a)
                results.append([y, *torch.autograd.grad(y.square().sum(), [a, b, c, d])])
            wrong += [
                f"dynamic={dynamic}, {tokens} tokens of {ranks} ranks: {x} instead of {y}"
                for x, y in zip(results[1], results[0], strict=True)
                if not torch.equal(x, y)
            ]
    return wrong + _compiled_with_sizes()


def _compiled_with_sizes() -> list[str]:
    """The same with all arguments for unequal sizes, and those that keep or return the gathered input."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    tokens = tuple(2 + (other == 0) for other in range(ranks))
    shares = library.split_extent(3 * ranks - 1, ranks)
    torch.manual_seed(2)
    b = torch.randn(shares[rank], K, dtype=torch.float64, requires_grad=True)
    c, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, K), (2,)))
    d = torch.randn(4, shares[rank], dtype=torch.float64, requires_grad=True)

    def layer(a: Tensor) -> tuple[Tensor, Tensor]:
        sizes: dict[str, Any] = {"out_features": [3 * ranks - 1, 2 * ranks], "m_per_rank": tokens}
        (y, z), whole = distgemm.all_gather_matmul(
            a, [b, c], group=group, bias=[None, bias], chunks=2, return_gathered=True, **sizes
        )
        y = torch.relu(y) + z.sum(-1, keepdim=True) + whole.sum(-1, keepdim=True)
        sizes = {"in_features": 3 * ranks - 1, "schedule": "gemm+rs chunks=2"}
        h = distgemm.matmul_reduce_scatter(y, d, group=group, m_per_rank=tokens, **sizes)
        return h, distgemm.matmul_all_reduce(y, d, group=group, in_features=3 * ranks - 1)

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        a = torch.linspace(-1, 1, tokens[rank] * K, dtype=torch.float64).view(-1, K).requires_grad_()
        h, r = run(a)
        results.append([h, r, *torch.autograd.grad(h.square().sum() + r.square().sum(), [a, b, c, bias, d])])
    return [f"sizes: {x} instead of {y}" for x, y in zip(*results, strict=True) if not torch.equal(x, y)]


def checked_by_torch() -> None:
    """torch's opcheck: schema, fake kernels, registration of autograd, tracing with dynamic sizes."""
    group = dist.group.WORLD
    assert group is not None
    name, ranks = group.group_name, dist.get_world_size()
    a, b, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2 * ranks, 3), (2, 3), (2,)))
    # Rank 0 has a row, and a column, more.
    rows, uneven = [2 * ranks + (other == 0) for other in range(ranks)], 3 * ranks - 1
    more = torch.randn(rows[dist.get_rank()], 3, requires_grad=True)
    share = library.split_extent(uneven, ranks)[dist.get_rank()]
    columns, wide, narrow = (
        torch.randn(*shape, requires_grad=True) for shape in ((share, 3), (sum(rows), share), (2, share))
    )
    for registered, args in (
        (
            library.all_gather_matmul,
            (a, [b, b], [bias], [False, True], name, "auto", None, None, None, False, "forward"),
        ),
        # opcheck wants the gradient of all results, and the gathered a has none.
        (
            library.all_gather_matmul,
            (a.detach(), [b.detach()], [], [False], name, "ag+gemm", 2, None, None, True, "forward"),
        ),
        (
            library.all_gather_matmul,
            (more, [columns, b], [bias], [False, True], name, "auto", 2, rows, [uneven, 2 * ranks], False, "forward"),
        ),
        (library.matmul_reduce_scatter, (a, b, bias, name, "auto", None, None, None)),
        (library.matmul_reduce_scatter, (wide, narrow, bias, name, "gemm+rs", 2, rows, uneven)),
        (library.matmul_all_reduce, (a, b, bias, name, "auto", None, None)),
        (library.matmul_all_reduce, (wide, narrow, None, name, "auto", 2, uneven)),
    ):
        torch.library.opcheck(registered.op, args)


def autocast() -> list[str]:
    """Under torch.autocast: the dtypes of F.linear, and the bits of calls with arguments that are cast before."""
    world = dist.group.WORLD
    ranks = dist.get_world_size()
    torch.manual_seed(9)
    rows, columns = torch.randn(3, 4), torch.randn(2, 4)
    whole, bias = torch.randn(3 * ranks, 4), torch.randn(2)

    def gather(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        y, z = distgemm.all_gather_matmul(a, [b, b], group=world, bias=[bias, None])
        return y + z

    def scatter(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return distgemm.matmul_reduce_scatter(a, b, group=world, bias=bias)

    def reduce(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return distgemm.matmul_all_reduce(a, b, group=world, bias=bias)

    wrong = []
    for function, a in ((gather, rows), (scatter, whole), (reduce, whole)):
        results = []
        for cast in (False, True):
            leaves = [x.clone().requires_grad_() for x in (a, columns, bias)]
            # The output of a Linear under autocast is bfloat16 already.
            given = [leaves[0].bfloat16(), *leaves[1:]] if cast else [x.bfloat16() for x in leaves]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                y = function(*given)
                compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*given) if cast else y
            y.float().square().sum().backward()
            results.append([y, compiled, *(x.grad for x in leaves)])
        for cast_before, cast_inside in zip(*results, strict=True):
            if not torch.equal(cast_before, cast_inside) or cast_before.dtype != cast_inside.dtype:
                wrong.append(f"{function.__name__}: {cast_inside} instead of {cast_before}")
        with torch.autocast("cpu", torch.bfloat16):
            if function(a.double(), columns.double(), bias.double()).dtype != torch.float64:
                wrong.append(f"{function.__name__} of float64")
    return wrong


def kept_for_gradients() -> list[str]:
    """A call keeps its input and its weight until the backward pass where a linear does: not for a frozen weight."""
    ranks, group, wrong = dist.get_world_size(), dist.group.WORLD, []
    ag, rs, ar = distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce
    calls: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "all-gather": lambda x, w: ag(x, w, group=group),
        "gathered": lambda x, w: ag(x, w, group=group, return_gathered=True)[0],
        "kept": lambda x, w: ag(x, w, group=group, keep_gathered=True),
        "reduce-scatter": lambda x, w: rs(x, w, group=group),
        "all-reduce": lambda x, w: ar(x, w, group=group),
        "to heads": lambda x, w: distgemm.matmul_all_to_all(x, w, group=group),
        "to tokens": lambda x, w: distgemm.all_to_all_matmul(x, w, group=group),
    }
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        calls[f"all-gather {recipe}"] = lambda x, w, r=recipe: ag(x, w, group=group, recipe=r)
        calls[f"reduce-scatter {recipe}"] = lambda x, w, r=recipe: rs(x, w, group=group, recipe=r)
    for (name, call), wants in product(calls.items(), ((True, False), (False, True), (True, True))):
        width = 5 * ranks if name == "to tokens" else 5
        x, w, whole = torch.ones(4 * ranks, 5), torch.ones(6 * ranks, width), torch.ones(4 * ranks, width)
        for each, wanted in ((x, wants[0]), (w, wants[1]), (whole, wants[0])):
            each.requires_grad_(wanted)
        _, linear = _kept(torch.nn.functional.linear, whole, w)
        given = x * 1, w * 1
        y, here = _kept(call, *given)
        if any(kept and not by_linear for kept, by_linear in zip(here, linear, strict=True)):
            wrong.append(f"{name} with gradients {wants} keeps {here}, a linear {linear}")
        with torch.no_grad():
            for each, kept in zip(given, linear, strict=True):
                if not kept:
                    each.zero_()
        y.sum().backward()
    return wrong


def _kept(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> tuple[Tensor, list[bool]]:
    """The result of a call, and for x and w whether it keeps a tensor of as many elements for the backward pass."""
    kept: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = call(x, w)
    return y, [each.numel() in kept for each in (x, w)]


def no_gradients() -> dict[str, str]:
    """The messages of executables for tensors that require grad. Without grad mode they take them."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    problem = distgemm.GemmProblem(m=2 * ranks, n=2 * ranks, k=3, dtype="float64")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    a, b = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for name, run in (
        ("collective", distgemm.CollectiveExecutable(distgemm.make_plan(problem, "ag+gemm", ranks), mesh["tp"])),
        ("unfused", UnfusedExecutable(problem, "ag+gemm", world)),
    ):
        try:
            run(a, b)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
        with torch.no_grad():
            found[f"{name}, no_grad"] = str(float(run(a, b).sum()))
        found[f"{name}, detached"] = str(float(run(a, b.detach()).sum()))
    return found


# --- misuse -------------------------------------------------------------------------------------------


def errors_of(todo: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What each call raises, by its name; "" where it raises nothing."""
    found = {}
    for name, run in todo.items():
        try:
            run()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def misuse() -> dict[str, str]:
    """The messages of wrong calls. All ranks make the same mistake, unless the test says otherwise."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    world: Any = dist.group.WORLD
    ag, rs, ar = distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce
    a, b, bias = torch.randn(2 * ranks, 3), torch.randn(4, 3), torch.randn(4)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    outside, destroyed = dist.new_group([0]), dist.new_group()
    dist.destroy_process_group(destroyed)
    plan = distgemm.make_plan(distgemm.GemmProblem(4, 4, 4), "ag+gemm", ranks)
    todo: dict[str, Callable[[], Any]] = {
        "dtype": lambda: ag(a, b.double(), group=world),
        "dtype of several": lambda: ag(a, [b, b.double()], group=world),
        "no such dtype": lambda: rs(a.int(), b.int(), group=world),
        "device": lambda: rs(a, b.to("meta"), group=world),
        "features": lambda: ag(a, torch.randn(4, 5), group=world),
        "turned": lambda: rs(a, b.t(), group=world),
        "bias": lambda: ar(a, b, group=world, bias=bias[1:]),
        "number of biases": lambda: ag(a, [b, b], group=world, bias=[bias]),
        "one bias for several": lambda: ag(a, [b, b], group=world, bias=bias),
        "vector": lambda: ag(a[0], b, group=world),
        "none": lambda: ag(a, [], group=world),
        "uneven rows": lambda: rs(a[1:], b, group=world),
        "rows": lambda: rs(a, b, group=world, m_per_rank=[1] * ranks),
        "rows of this rank": lambda: ag(a, b, group=world, m_per_rank=[1] * ranks),
        "number of rows": lambda: ag(a, b, group=world, m_per_rank=[2 * ranks]),
        "out_features": lambda: ag(a, b, group=world, out_features=100),
        "in_features": lambda: rs(a, b, group=world, in_features=100),
        "schedule": lambda: ag(a, b, group=world, schedule="gemm+rs"),
        "chunks twice": lambda: ag(a, b, group=world, schedule="ag+gemm chunks=2", chunks=2),
        "of GPUs": lambda: ag(a, b, group=world, schedule="ag+gemm provider=cublas"),
        "chunks of nothing": lambda: ag(a, b, group=world, schedule="unfused", chunks=2),
        "options of nothing": lambda: ag(a, b, group=world, schedule="unfused final_add=kernel"),
        "no name": lambda: ag(a, b, group=world, schedule="chunks=2"),
        "no option": lambda: ag(a, b, group=world, schedule="ag+gemm chunk=2"),
        "no schedule": lambda: ag(a, b, group=world, schedule="al_gather_1d_ring_a"),
        "mesh": lambda: ag(a, b, group=mesh),
        "group": lambda: ag(a, b, group=None),  # type: ignore[call-overload]
        "destroyed group": lambda: ag(a, b, group=destroyed),
        "group's name": lambda: ag(a, b, group="tp"),
        "list": lambda: ag(a.tolist(), b, group=world),
        "array": lambda: rs(a, b.numpy(), group=world),
        "array in a list": lambda: ag(a, [b, b.numpy()], group=world),
        "bias as a list": lambda: ar(a, b, group=world, bias=bias.tolist()),
        "chunks": lambda: ag(a, b, group=world, chunks=2.0),  # type: ignore[call-overload]
        "no chunks": lambda: ar(a, b, group=world, chunks=0),
        "executable": lambda: distgemm.CollectiveExecutable(plan, mesh),
        "executable's group": lambda: distgemm.CollectiveExecutable(plan, 3),  # type: ignore[arg-type]
        "no batch": lambda: ag(a.new_empty(4, 0, a.shape[1]), b, group=world),
        "no columns": lambda: ag(a[:, :0], b[:, :0], group=world),
        "empty rank": lambda: ag(a, b[: 1 - rank], group=world, out_features=1, return_gathered=True),
        "empty rank's bias": lambda: rs(a[:, : 1 - rank], b[:, : 1 - rank], group=world, in_features=1, bias=bias),
        "outside": lambda: ag(a, b, group=outside) if rank else "",
    }
    found = errors_of(todo)
    # No wrong call has sent anything, so calls still work.
    found["after"] = str(distgemm.all_gather_matmul(a, b, group=mesh["tp"]).shape[0])
    return found


def replicas() -> list[str]:
    """A mesh of data parallelism and tensor parallelism: both tensor-parallel groups run at the same time."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    row = mesh.get_local_rank("dp")
    tokens = ((3, 0), (1, 4))[row]
    todo = (
        Case("gather", tokens, (4, 2), bias=True),
        Case("scatter", tokens, (3,), k=4, bias=True),
        Case("reduce", None, (3,), k=4),
    )
    return [str(found) for case in todo if (found := run_case(case, row, mesh["tp"].get_group())) is not None]


def run_all(checks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    """The results of checks, by name, for one launch."""
    return {check.__name__: check(*args) for check, args in checks}
