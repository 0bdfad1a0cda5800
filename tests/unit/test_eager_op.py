"""Eager calls of an op, against the same op through torch's dispatcher."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701  (torch has no public name)

from distgemm.torch_ops.eager import EagerOp

Tensor = torch.Tensor
NUMBER = itertools.count()


class Facts:
    """What is prepared: how often, and whether it still holds."""

    def __init__(self, key: Any) -> None:
        self.key, self.current = key, True

    def is_current(self) -> bool:
        return self.current


MADE: list[Facts] = []


class Call(NamedTuple):
    """A call of the op of these tests."""

    a: Tensor
    bs: list[Tensor]
    biases: list[Tensor]
    scale: int
    rows: list[int] | None

    def prepare(self) -> Facts:
        MADE.append(Facts((self.a.shape, len(self.bs), len(self.biases), self.scale)))
        return MADE[-1]

    def run(self, prepared: Facts) -> list[Tensor]:
        assert prepared.key == (self.a.shape, len(self.bs), len(self.biases), self.scale)
        return compute(*self)

    def fake(self) -> list[Tensor]:
        return [*(self.a.new_empty(self.a.shape[0], b.shape[0]) for b in self.bs), torch.empty_like(self.a)]


def compute(a: Tensor, bs: list[Tensor], biases: list[Tensor], scale: int, rows: list[int] | None) -> list[Tensor]:
    """scale * a @ b.t() for each b, plus the bias of the first ones, then 2 * a."""
    results = [scale * a @ b.t() for b in bs]
    for index, bias in enumerate(biases):
        results[index] = results[index] + bias
    return [*results, 2 * a]


def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, bs, ctx.biases, ctx.scale, ctx.rows = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, *bs)


def backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    a, *bs = ctx.saved_tensors
    wants_a, wants_bs, wants_biases = ctx.needs_input_grad[:3]
    assert ctx.rows == [1, 2] and len(wants_bs) == len(bs) and len(wants_biases) == len(ctx.biases)
    da = torch.zeros_like(a) if wants_a else None
    if da is not None and grads[-1] is not None:
        da = da + 2 * grads[-1]
    dbs: list[Tensor | None] = [None] * len(bs)
    for index, (b, grad) in enumerate(zip(bs, grads, strict=False)):
        if grad is not None:
            da = None if da is None else da + ctx.scale * grad @ b
            dbs[index] = ctx.scale * grad.t() @ a if wants_bs[index] else None
    dbiases = [
        grad.sum(0) if wants and grad is not None else None for wants, grad in zip(wants_biases, grads, strict=False)
    ]
    return da, dbs, dbiases, None, None


@pytest.fixture
def op() -> EagerOp:
    schema = "(Tensor a, Tensor[] bs, Tensor[] biases, int scale, SymInt[]? rows) -> Tensor[]"
    return EagerOp(f"distgemm_test::toy{next(NUMBER)}", schema, Call, setup, backward)


def tensors(wanted: tuple[bool, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5, 4), (6, 4), (5,)]
    a, b, c, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=wants)
        for shape, wants in zip(shapes, wanted, strict=True)
    )
    return a, [b, c], [bias]


@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=4)])
def test_results_and_gradients_are_those_of_the_op(op: EagerOp, wanted: tuple[bool, ...]) -> None:
    """Also where a result is not used, and where a list is empty."""
    for call, biased, used in itertools.product((op, op.op), (True, False), ([0, 2], [0, 1, 2])):
        a, bs, biases = tensors(wanted)
        given = biases if biased else []
        found = call(a, bs, given, 3, [1, 2])
        expected = compute(a, bs, given, 3, None)
        leaves = [x for x in (a, *bs, *given) if x.requires_grad]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert [x.requires_grad for x in found] == [bool(leaves)] * 3
        sums = [sum((results[i].square().sum() for i in used), torch.zeros(())) for results in (expected, found)]
        if sums[0].requires_grad:
            for want, get in zip(*(torch.autograd.grad(x, leaves, allow_unused=True) for x in sums), strict=True):
                assert (want is None or not want.any()) if get is None else torch.allclose(want, get)


def test_what_depends_on_metadata_is_prepared_once(op: EagerOp) -> None:
    """And again for other shapes, types and arguments, once it does not hold any more, and once it is gone."""
    MADE.clear()
    a, bs, biases = tensors((False, False, True, True))
    for _ in range(3):
        op(a, bs, biases, 3, [1, 2])
    op.op(a.clone(), bs, biases, 3, [1, 2])
    assert len(MADE) == 1
    op(a[1:], bs, biases, 3, [1, 2])
    op(a, bs, biases, 4, [1, 2])
    op(a, bs, biases, 3, [2, 1])
    op(a, bs, [], 3, [1, 2])
    op(a.float(), [b.float() for b in bs], [], 3, [1, 2])
    assert len(MADE) == 6
    MADE[0].current = False
    op(a, bs, biases, 3, [1, 2])
    assert len(MADE) == 7
    op(a, bs, biases, 3, [1, 2])
    assert len(MADE) == 7
    del MADE[6]
    gc.collect()
    op(a, bs, biases, 3, [1, 2])
    assert len(MADE) == 7


def test_where_a_list_ends_is_metadata(op: EagerOp) -> None:
    MADE.clear()
    a, b, c = torch.randn(3, 4), torch.randn(1, 4), torch.randn(1, 4)
    found = op(a, [b, c], [], 3, [1, 2]), op(a, [b], [c], 3, [1, 2])
    assert [len(results) for results in found] == [3, 2] and len(MADE) == 2


def test_a_call_without_gradients_makes_no_node(op: EagerOp) -> None:
    a, bs, biases = tensors((True,) * 4)
    with torch.no_grad():
        assert not any(x.requires_grad for x in op(a, bs, biases, 3, [1, 2]))


class Subclass(torch.Tensor):
    """Sees which ops are called with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Log(TorchDispatchMode):
    """Notes which ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_whoever_looks_at_ops_sees_it(op: EagerOp, grad: bool) -> None:
    a, bs, biases = tensors((grad,) * 4)
    name = op.op._qualname.split("::")[1]
    with Log() as log:
        op(a, bs, biases, 3, [1, 2])
    assert any(name in seen for seen in log.seen)
    Subclass.seen.clear()
    op(a.detach().as_subclass(Subclass), bs, biases, 3, [1, 2])
    assert any(name in seen for seen in Subclass.seen)
    with torch.profiler.profile() as profile:
        op(a, bs, biases, 3, [1, 2])
    assert any(name in event.name for event in profile.events())
    with nullcontext() if grad else torch.no_grad():
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        for x, y in zip(compiled(a, bs, biases, 3, [1, 2]), compute(a, bs, biases, 3, None), strict=True):
            assert torch.equal(x, y)


def test_gradients_of_gradients(op: EagerOp) -> None:
    a, bs, biases = tensors((True,) * 4)

    def products(a: Tensor, b: Tensor) -> list[Tensor]:
        return op(a, [b, bs[1]], biases, 3, [1, 2])

    assert torch.autograd.gradcheck(products, (a, bs[0]))
    assert torch.autograd.gradgradcheck(products, (a, bs[0]))
