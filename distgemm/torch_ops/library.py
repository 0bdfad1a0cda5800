"""The ops registered with torch: their implementations, their shapes for tracing, and their gradients.

They take matrices and the name of a group. Users call the functions of :mod:`distgemm.torch_ops.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from distgemm.fp8.quantize import FP8_DTYPES
from distgemm.plan.problem import OUT_DTYPES, GemmProblem
from distgemm.plan.scaling import OperandScaling, Scaling
from distgemm.runtime.checks import TORCH_DTYPES, process_group
from distgemm.schedulers import Pattern
from distgemm.torch_ops.dispatch import Function, PreparedCall, prepare, with_rows_or_columns
from distgemm.torch_ops.eager import EagerOp

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "check_blocks",
    "check_operands",
    "largest",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "prepare_gather",
    "scaled_matmul",
    "scaling_name",
    "split_extent",
    "without_gradient",
]

Tensor = torch.Tensor
Sizes = Sequence[int] | None
Purpose = Literal["forward", "gradient", "gather"]

NAMES = {of_torch: name for name, of_torch in TORCH_DTYPES.items() if name != "tfloat32"}
"""The names of types. Float32 tensors are multiplied in IEEE float32."""
DTYPE_NAMES = {TORCH_DTYPES[name]: name for name in OUT_DTYPES if name != "tfloat32"}
"""The types of operands without scales."""

GATHER_ROWS = 8
"""Rows of the b with which A alone is gathered: so many that results of 16 bits end at multiples of 16 bytes. Other
results would need kernels of their own."""


# --- sizes ----------------------------------------------------------------------------------------------


def split_extent(extent: int, ranks: int) -> list[int]:
    """The shares of an extent, as torch.chunk splits it; 0 for ranks without a share."""
    length = -(-extent // ranks)
    return [max(0, min(length, extent - rank * length)) for rank in range(ranks)]


def _whole(function: Function, name: str, mine: int, whole: int | None, group: str) -> int:
    """An extent over all ranks, from this rank's share, or from ``whole`` if the shares differ."""
    size, rank = size_and_rank(group)
    if whole is None:
        return mine * size
    shares = split_extent(whole, size)
    if shares[rank] != mine:
        raise ValueError(
            f"{function}: {name}={whole} is split as {shares} over {size} ranks, so b has {shares[rank]} on rank "
            f"{rank}, got {mine}"
        )
    return whole


def _gathered_rows(function: Function, mine: int, rows: Sizes, group: str) -> list[int]:
    size, rank = size_and_rank(group)
    if rows is None:
        return [mine] * size
    if len(rows) != size or rows[rank] != mine:
        raise ValueError(
            f"{function}: m_per_rank has an integer for each of {size} ranks, its rows, and {mine} for rank {rank}, "
            f"got {list(rows)}"
        )
    return list(rows)


def _scattered_rows(function: Function, whole: int, rows: Sizes, group: str) -> list[int]:
    size, _ = size_and_rank(group)
    if rows is None:
        if whole % size:
            raise ValueError(
                f"{function}: {whole} rows are not the same number for each of {size} ranks; "
                f"m_per_rank={tuple(split_extent(whole, size))} would do"
            )
        return [whole // size] * size
    if len(rows) != size or sum(rows) != whole:
        raise ValueError(
            f"{function}: m_per_rank has {size} integers, one for each rank, with the sum {whole}, got {list(rows)}"
        )
    return list(rows)


def size_and_rank(group: str) -> tuple[int, int]:
    """The number of ranks of a group, and this rank in it."""
    found = process_group(group)
    return found.size(), dist.get_rank(found)


def check_operands(function: Function, tensors: dict[str, Tensor | None], k: int | None = None) -> None:
    """Check that all tensors have the dtype and device of a, and that all matrices share K.

    Args:
        function: the function that was called.
        tensors: a, and each b and bias, by name.
        k: columns of a on all ranks, where each b has as many; None: each b has as many as a.
    """
    a = tensors["a"]
    assert a is not None
    if a.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{function}: a is one of {', '.join(DTYPE_NAMES.values())}, got {a.dtype}; a.to(...) converts it"
        )
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype != a.dtype:
            raise ValueError(f"{function}: a has {a.dtype}, {name} has {x.dtype}; {name}.to({a.dtype}) would do")
        if x.device != a.device:
            raise ValueError(
                f"{function}: a is on {a.device}, {name} on {x.device}; {name}.to({str(a.device)!r}) would do"
            )
    for name, x in tensors.items():
        if x is None:
            continue
        if name.startswith("bias"):
            n = tensors[name.replace("bias", "b")]
            if n is not None and tuple(x.shape) != (n.shape[0],):
                raise ValueError(f"{function}: {name} is ({n.shape[0]},) as b's rows, got {tuple(x.shape)}")
        elif k is not None and x is not a:
            if x.dim() != 2 or x.shape[1] != k:
                raise ValueError(
                    f"{function}: a has {a.shape[1]} columns on this rank and {k} on all ranks, so {name} is "
                    f"(out_features, {k}), as a Linear's weight; got {tuple(x.shape)}. If ranks have different numbers "
                    "of columns, k_per_rank says them"
                )
        elif x.dim() != 2 or (k is None and x.shape[1] != a.shape[1]):
            raise ValueError(
                f"{function}: a is (tokens, in_features) and {name} (out_features, in_features), as a Linear's weight; "
                f"got {tuple(a.shape)} and {tuple(x.shape)}" + ("; b.t() would do" if _turned(a, x) else "")
            )


def _turned(a: Tensor, b: Tensor) -> bool:
    return b.dim() == 2 and b.shape[0] == a.shape[1]


def _is_turned(b: Tensor) -> bool:
    """Whether columns of b are contiguous, and not its rows, as executables see it."""
    return with_rows_or_columns(b).stride(1) != 1


def _problem(
    function: Function, a: Tensor, m: int, n: int, k: int, rows: Sequence[int] | None, ranks: int, **options: Any
) -> GemmProblem | None:
    """The GEMM over all ranks; None: they have no tokens."""
    if not n or not k:
        raise ValueError(f"{function}: n and k over all ranks are at least 1, got m {m}, n {n}, k {k}")
    if not m:
        return None
    unequal = rows is not None and list(rows) != split_extent(m, ranks)
    m_per_rank = tuple(rows) if unequal and rows else None
    return GemmProblem(m, n, k, dtype=NAMES[a.dtype], m_per_rank=m_per_rank, **options)


# --- all-gather, then matmul ----------------------------------------------------------------------------


def _by_index(biases: Sequence[Tensor], biased: Sequence[bool]) -> dict[int, Tensor]:
    """Biases by the index of their b."""
    return dict(zip([index for index, has in enumerate(biased) if has], biases, strict=True))


def _named(bs: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool]) -> dict[str, Tensor | None]:
    if len(bs) == 1:
        return {"b": bs[0], "bias": biases[0] if biases else None}
    found: dict[str, Tensor | None] = {f"b[{index}]": b for index, b in enumerate(bs)}
    found |= {f"bias[{index}]": bias for index, bias in _by_index(biases, biased).items()}
    return found


def largest(ns: Sequence[int], size: int) -> int:
    """The index of the b whose GEMM overlaps with the gather: the largest one that has rows on every rank."""
    # A rank without rows of b has no GEMM, so the plan sends it nothing.
    return max(range(len(ns)), key=lambda index: (all(split_extent(ns[index], size)), ns[index]))


class _GatherCall(NamedTuple):
    """The gathered A @ b.T + bias for each b, then, with ``gathered``, the gathered A.

    The GEMM of the largest b overlaps with the gather. The others follow, with the gathered A.

    Attributes:
        a: (rows of this rank, K).
        bs: each (N of this rank, K).
        biases: (N of this rank,), of those b that have one.
        biased: for each b whether it has a bias.
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        rows: rows of A on each rank; None: as many on each.
        ns: N of each b over all ranks; None: as many on each rank.
        gathered: whether the gathered A is returned, too.
        purpose: "forward"; "gradient" if only ranks with rows of b need the gathered A; or "gather".
    """

    a: Tensor
    bs: Sequence[Tensor]
    biases: Sequence[Tensor]
    biased: Sequence[bool]
    group: str
    schedule: str
    chunks: int | None
    rows: Sizes
    ns: Sizes
    gathered: bool
    purpose: Purpose

    def _sizes(self) -> tuple[list[int], list[int]]:
        """The rows of each rank, and the out_features of each b over all ranks."""
        function: Function = "all_gather_matmul"
        check_operands(function, {"a": self.a, **_named(self.bs, self.biases, self.biased)})
        ns = self.ns
        if ns is not None and len(ns) != len(self.bs):
            raise ValueError(f"{function}: out_features has a number for each of {len(self.bs)} b, got {list(ns)}")
        wholes = [
            _whole(function, "out_features", b.shape[0], None if ns is None else ns[index], self.group)
            for index, b in enumerate(self.bs)
        ]
        return _gathered_rows(function, self.a.shape[0], self.rows, self.group), wholes

    def prepare(self) -> PreparedCall | None:
        rows, ns = self._sizes()
        size, _ = size_and_rank(self.group)
        first = largest(ns, size)
        shares = split_extent(ns[first], size)
        if (len(ns) > 1 or self.gathered) and not all(shares) and self.purpose == "forward":
            idle = shares.index(0)
            raise ValueError(
                f"all_gather_matmul: out_features={ns[first]} over {size} ranks leaves rank {idle} without a row of b, "
                "so a is not gathered there; call it once for each b, without return_gathered and keep_gathered"
            )
        problem = _problem("all_gather_matmul", self.a, sum(rows), ns[first], self.a.shape[1], rows, size)
        return prepare(
            "ag+gemm",
            problem,
            self.group,
            self.a.device,
            self.schedule,
            self.chunks,
            self.biased[first],
            _is_turned(self.bs[first]),
        )

    def run(self, call: PreparedCall) -> list[Tensor]:
        a, bs, biases, biased, group, _, _, rows, ns, gathered, purpose = self
        if len(bs) == 1 and not gathered:
            return [call("all_gather_matmul", a, bs[0], biases[0] if biases else None)]
        size, _ = size_and_rank(group)
        first = largest([b.shape[0] * size for b in bs] if ns is None else ns, size)
        bias_of = _by_index(biases, biased)
        whole = a.new_empty(a.shape[0] * size if rows is None else sum(rows), a.shape[1])
        function: Function = "gather" if purpose == "gather" else "all_gather_matmul"
        found = {first: call(function, a, bs[first], bias_of.get(first), whole)}
        for index, b in enumerate(bs):
            if index != first:
                found[index] = torch.nn.functional.linear(whole, b, bias_of.get(index))
        results = [found[index] for index in range(len(bs))]
        return [*results, whole] if gathered else results

    def fake(self) -> list[Tensor]:
        rows, _ = self._sizes()
        a, m = self.a, sum(rows)
        results = [a.new_empty(m, b.shape[0]) for b in self.bs]
        return [*results, a.new_empty(m, a.shape[1])] if self.gathered else results


def _save(ctx: Any, a: Tensor, bs: Sequence[Tensor], kept: Tensor) -> None:
    """Keep what the backward pass needs, as a linear does: ``kept`` stands for a, and a frozen weight needs neither."""
    needs_kept = any(b.requires_grad for b in bs)
    ctx.save_for_backward(kept if needs_kept else None, *[b if a.requires_grad else None for b in bs])


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = _GatherCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.kept = given.gathered
    _save(ctx, given.a, given.bs, output[-1] if given.gathered else given.a)
    ctx.biased, ctx.group, ctx.ns = list(given.biased), given.group, given.ns
    ctx.rows, ctx.mine = given.rows, given.a.shape[0]


def _gather_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    a, *bs = ctx.saved_tensors
    if ctx.kept and grads[-1] is not None:
        raise RuntimeError("no gradient goes through the gathered input of all_gather_matmul")
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    given = [(index, grad) for index, grad in enumerate(grads[: len(bs)]) if grad is not None]
    da = None
    if wants_a and given:
        da = _input_gradient(ctx, bs, given)
    dbs: list[Tensor | None] = [None] * len(bs)
    if any(wants_b[index] for index, _ in given):
        whole = a if ctx.kept else gather(a, ctx.group, ctx.rows)
        for index, grad in given:
            if wants_b[index]:
                dbs[index] = grad.t() @ whole
    by_index = dict(given)
    dbiases = [
        by_index[index].sum(0) if wants and index in by_index else None
        for index, wants in zip([index for index, has in enumerate(ctx.biased) if has], wants_bias, strict=True)
    ]
    return (da, dbs, dbiases, *[None] * 8)


def _input_gradient(ctx: Any, bs: Sequence[Tensor], given: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The sum over ranks, and over all b, of dY @ b: one GEMM, whose K is the out_features of all b."""
    size, _ = size_and_rank(ctx.group)
    rows = [ctx.mine] * size if ctx.rows is None else ctx.rows
    (index, grad), *others = given
    if not others:
        return _scatter(grad, bs[index].t(), ctx.group, rows, None if ctx.ns is None else ctx.ns[index])
    grads, weights = [grad for _, grad in given], [bs[index] for index, _ in given]
    widths = [bs[index].shape[0] for index, _ in given]
    if ctx.ns is not None:
        # Shares of several b do not add up to a share of their sum. Padding with zeros makes the ranks equal.
        missing = sum(split_extent(ctx.ns[index], size)[0] for index, _ in given) - sum(widths)
        grads.append(grad.new_zeros(grad.shape[0], missing))
        weights.append(bs[0].new_zeros(missing, bs[0].shape[1]))
    return _scatter(torch.cat(grads, 1), torch.cat(weights).t(), ctx.group, rows, None)


def _scatter(a: Tensor, b: Tensor, group: str, rows: Sizes, k: int | None) -> Tensor:
    found: Tensor = matmul_reduce_scatter(a, b, None, group, "auto", None, rows, k)
    return found


def gather(a: Tensor, group: str, rows: Sizes) -> Tensor:
    """All of A. Plans gather only for a GEMM; here b is a few rows of zeros on each rank."""
    _, whole = all_gather_matmul(
        a, [a.new_zeros(GATHER_ROWS, a.shape[1])], [], [False], group, "auto", None, rows, None, True, "gather"
    )
    found: Tensor = whole
    return found


def prepare_gather(a: Tensor, group: str, schedule: str, chunks: int | None, rows: Sizes) -> PreparedCall | None:
    """The prepared call of :func:`distgemm.gather`: a plan with one row of b on each rank, which is not multiplied.

    None: all ranks together have no tokens.
    """
    check_operands("gather", {"a": a})
    size, _ = size_and_rank(group)
    rows = _gathered_rows("gather", a.shape[0], rows, group)
    problem = _problem("gather", a, sum(rows), size, a.shape[1], rows, size)
    return prepare("ag+gemm", problem, group, a.device, schedule, chunks, False, caller_multiplies=True)


all_gather_matmul = EagerOp(
    "distgemm::all_gather_matmul",
    "(Tensor a, Tensor[] bs, Tensor[] biases, bool[] biased, str group, str schedule, int? chunks, "
    "SymInt[]? rows, SymInt[]? ns, bool gathered, str purpose) -> Tensor[]",
    _GatherCall,
    _gather_setup,
    _gather_backward,
)


# --- matmul, then reduce-scatter ------------------------------------------------------------------------


def _prepare_one(
    pattern: Pattern,
    problem: GemmProblem | None,
    call: _ScatterCall | _ReduceCall | _MatmulAllToAllCall | _AllToAllMatmulCall,
) -> PreparedCall | None:
    """The prepared call of a function with one b."""
    terms = call.bias is not None, _is_turned(call.b)
    return prepare(pattern, problem, call.group, call.a.device, call.schedule, call.chunks, *terms)


class _ScatterCall(NamedTuple):
    """This rank's rows of the sum over ranks of A @ b.T, plus bias.

    Attributes:
        a: (rows of all ranks, K of this rank).
        b: (N, K of this rank).
        bias: (N,).
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        rows: rows of D on each rank; None: as many on each.
        k: K over all ranks; None: as much on each rank.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    group: str
    schedule: str
    chunks: int | None
    rows: Sizes
    k: int | None

    def _sizes(self) -> tuple[list[int], int]:
        """The rows of each rank, and K over all ranks."""
        function: Function = "matmul_reduce_scatter"
        check_operands(function, {"a": self.a, "b": self.b, "bias": self.bias})
        k = _whole(function, "in_features", self.a.shape[1], self.k, self.group)
        size, _ = size_and_rank(self.group)
        if self.bias is not None and not all(split_extent(k, size)):
            raise ValueError(
                f"{function}: in_features={k} leaves some of {size} ranks without a column, and so their bias without "
                "a gradient; add the bias to the result instead"
            )
        return _scattered_rows(function, self.a.shape[0], self.rows, self.group), k

    def prepare(self) -> PreparedCall | None:
        (rows, k), a = self._sizes(), self.a
        problem = _problem("matmul_reduce_scatter", a, a.shape[0], self.b.shape[0], k, rows, len(rows))
        return _prepare_one("gemm+rs", problem, self)

    def run(self, call: PreparedCall) -> Tensor:
        return call("matmul_reduce_scatter", self.a, self.b, self.bias)

    def fake(self) -> Tensor:
        rows, _ = self._sizes()
        _, rank = size_and_rank(self.group)
        return self.a.new_empty(rows[rank], self.b.shape[0])


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = _ScatterCall(*inputs)
    _save(ctx, given.a, [given.b], given.a)
    ctx.group, ctx.rows, ctx.k, ctx.biased = given.group, given.rows, given.k, given.bias is not None


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of a, b and bias, from one gather of dY."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    da: Tensor | None = None
    db: Tensor | None = None
    whole: Tensor | None = None
    if wants_a:
        # A rank without columns of b receives nothing, and needs nothing.
        wants_whole = bool(wants_b or (ctx.biased and wants_bias)) and bool(b.shape[1])
        ns = None if ctx.k is None else [ctx.k]
        da, *gathered = all_gather_matmul(
            grad, [b.t()], [], [False], ctx.group, "auto", None, ctx.rows, ns, wants_whole, "gradient"
        )
        whole = gathered[0] if gathered else None
    else:
        whole = gather(grad, ctx.group, ctx.rows)
    if wants_b:
        db = whole.t() @ a if whole is not None else torch.zeros_like(b)
    dbias = whole.sum(0) if whole is not None and ctx.biased and wants_bias else None
    return (da, db, dbias, *[None] * 5)


matmul_reduce_scatter = EagerOp(
    "distgemm::matmul_reduce_scatter",
    "(Tensor a, Tensor b, Tensor? bias, str group, str schedule, int? chunks, SymInt[]? rows, SymInt? k) -> Tensor",
    _ScatterCall,
    _scatter_setup,
    _scatter_backward,
)


# --- matmul, then all-reduce ----------------------------------------------------------------------------


class _ReduceCall(NamedTuple):
    """The sum over ranks of A @ b.T, plus bias, on every rank.

    Attributes:
        a: (rows, K of this rank).
        b: (N, K of this rank).
        bias: (N,).
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        k: K over all ranks; None: as much on each rank.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    group: str
    schedule: str
    chunks: int | None
    k: int | None

    def _whole_k(self) -> int:
        check_operands("matmul_all_reduce", {"a": self.a, "b": self.b, "bias": self.bias})
        return _whole("matmul_all_reduce", "in_features", self.a.shape[1], self.k, self.group)

    def prepare(self) -> PreparedCall | None:
        k, a = self._whole_k(), self.a
        size, _ = size_and_rank(self.group)
        problem = _problem("matmul_all_reduce", a, a.shape[0], self.b.shape[0], k, None, size)
        return _prepare_one("gemm+ar", problem, self)

    def run(self, call: PreparedCall) -> Tensor:
        return call("matmul_all_reduce", self.a, self.b, self.bias)

    def fake(self) -> Tensor:
        self._whole_k()
        return self.a.new_empty(self.a.shape[0], self.b.shape[0])


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, *_ = inputs
    _save(ctx, a, [b], a)


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of a, b and bias. Every rank has all of dY, so nothing moves."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    dbias = grad.sum(0) if wants_bias else None
    grad = without_gradient(grad)
    da = grad @ b if wants_a else None
    return (da, grad.t() @ a if wants_b else None, dbias, *[None] * 4)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "no second derivative goes through a gradient of matmul_all_reduce, or of a Linear whose input all ranks "
            "have: each rank has a part of it, and nothing sums the parts"
        )


def without_gradient(x: Tensor) -> Tensor:
    """A tensor that all ranks have, in a backward pass. Further derivatives raise: each rank would compute a part."""
    found: Any = _WithoutGradient.apply(x) if torch.is_grad_enabled() else x  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


matmul_all_reduce = EagerOp(
    "distgemm::matmul_all_reduce",
    "(Tensor a, Tensor b, Tensor? bias, str group, str schedule, int? chunks, SymInt? k) -> Tensor",
    _ReduceCall,
    _reduce_setup,
    _reduce_backward,
)


# --- matmul, then all-to-all ----------------------------------------------------------------------------


def _split_columns(
    function: Function, name: str, whole: int, columns: Sizes, copies: int, group: str, mine: int | None = None
) -> list[int]:
    """The columns of each rank.

    Args:
        function: the function that was called.
        name: the argument that says them.
        whole: the columns of all ranks, each counted once.
        columns: what the caller said; None: as many on each rank.
        copies: number of consecutive ranks that hold the same columns.
        group: name of the group.
        mine: the columns that this rank has; None: it has none yet.
    """
    size, rank = size_and_rank(group)
    if copies < 1 or size % copies:
        raise ValueError(f"{function}: copies is a divisor of the number of ranks, {size}, got {copies}")
    shards = size // copies
    if columns is None:
        if whole % shards:
            equal = f"{shards} shards for {size} ranks" if copies > 1 else f"{size} ranks"
            raise ValueError(
                f"{function}: {whole} columns are not the same number for each of {equal}; {name} says how many "
                "columns each rank has, such as those of whole heads"
            )
        columns = [whole // shards] * size
    if len(columns) != size or sum(columns) != whole * copies or min(columns) < 0:
        alike = f", {copies} ranks with the same columns," if copies > 1 else ""
        raise ValueError(
            f"{function}: {name} has {size} integers, one for each rank{alike} with the sum {whole * copies}, got "
            f"{list(columns)}"
        )
    if any(each != columns[index - index % copies] for index, each in enumerate(columns)):
        raise ValueError(
            f"{function}: with copies={copies}, each {copies} consecutive ranks have the same columns, got "
            f"{name}={list(columns)}"
        )
    if mine is not None and columns[rank] != mine:
        raise ValueError(
            f"{function}: {name} says {columns[rank]} columns for rank {rank}, whose a has {mine}, got {list(columns)}"
        )
    return list(columns)


def _shares(name: str, whole: int, columns: Sequence[int], copies: int = 1) -> dict[str, Any]:
    """Columns of each rank as an argument of a problem, which has None for those of torch.chunk."""
    equal = copies == 1 and list(columns) == split_extent(whole, len(columns))
    return {name: None if equal else tuple(columns)}


class _MatmulAllToAllCall(NamedTuple):
    """This rank's columns of A @ B.T + bias, for the rows of all ranks.

    Attributes:
        a: (rows of this rank, K).
        b: (N, K).
        bias: (N,).
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        rows: rows of A on each rank; None: as many on each.
        columns: columns of D on each rank; None: as many on each.
        copies: number of consecutive ranks that hold the same columns of D.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    group: str
    schedule: str
    chunks: int | None
    rows: Sizes
    columns: Sizes
    copies: int

    def _sizes(self) -> tuple[list[int], list[int]]:
        """The rows and the columns of each rank."""
        function: Function = "matmul_all_to_all"
        check_operands(function, {"a": self.a, "b": self.b, "bias": self.bias})
        columns = _split_columns(function, "n_per_rank", self.b.shape[0], self.columns, self.copies, self.group)
        return _gathered_rows(function, self.a.shape[0], self.rows, self.group), columns

    def prepare(self) -> PreparedCall | None:
        (rows, columns), a, n = self._sizes(), self.a, self.b.shape[0]
        shares = _shares("n_per_rank", n, columns, self.copies)
        problem = _problem("matmul_all_to_all", a, sum(rows), n, a.shape[1], rows, len(rows), **shares)
        return _prepare_one("gemm+a2a", problem, self)

    def run(self, call: PreparedCall) -> Tensor:
        bias = self.bias
        if bias is not None:
            _, columns = call.executable.plan.shard("D", size_and_rank(self.group)[1])
            bias = bias[columns]
        return call("matmul_all_to_all", self.a, self.b, bias)

    def fake(self) -> Tensor:
        rows, columns = self._sizes()
        _, rank = size_and_rank(self.group)
        return self.a.new_empty(sum(rows), columns[rank])


def _matmul_all_to_all_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = _MatmulAllToAllCall(*inputs)
    _save(ctx, given.a, [given.b], given.a)
    ctx.group, ctx.rows, ctx.columns, ctx.copies = given.group, given.rows, given.columns, given.copies
    ctx.biased = given.bias is not None


def _matmul_all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of a, and of this rank's rows those of b and bias, from one all-to-all of dY."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    copies, columns = ctx.copies, ctx.columns
    if copies > 1 and columns is None:
        columns = [grad.shape[1]] * size_and_rank(ctx.group)[0]
    wants_own = bool(wants_b or (ctx.biased and wants_bias))
    da: Tensor | None = None
    own: Tensor | None = None
    if wants_a:
        # The gradients of copies add up, because each rank with a copy brings its own.
        repeated = b
        if copies > 1:
            repeated = torch.cat([part for part in torch.split(b, columns[::copies]) for _ in range(copies)])
        terms = ctx.group, "auto", None, ctx.rows, columns, wants_own, "gradient"
        da, *gathered = all_to_all_matmul(grad, repeated.t(), None, *terms)
        own = gathered[0] if gathered else None
    elif wants_own:
        own = own_rows(grad, ctx.group, ctx.rows, columns)
    if own is not None and copies > 1:
        parts = torch.split(own, columns, 1)
        own = torch.cat([torch.stack(parts[at : at + copies]).sum(0) for at in range(0, len(parts), copies)], 1)
    db = own.t() @ a if own is not None and wants_b else None
    dbias = own.sum(0) if own is not None and ctx.biased and wants_bias else None
    return (da, db, dbias, *[None] * 6)


matmul_all_to_all = EagerOp(
    "distgemm::matmul_all_to_all",
    "(Tensor a, Tensor b, Tensor? bias, str group, str schedule, int? chunks, SymInt[]? rows, SymInt[]? columns, "
    "int copies) -> Tensor",
    _MatmulAllToAllCall,
    _matmul_all_to_all_setup,
    _matmul_all_to_all_backward,
)


# --- all-to-all, then matmul ----------------------------------------------------------------------------


class _AllToAllMatmulCall(NamedTuple):
    """This rank's rows of A @ B.T + bias, of which each rank has columns of A; with ``gathered``, its rows of A, too.

    Attributes:
        a: (rows of all ranks, K of this rank).
        b: (N, K of all ranks).
        bias: (N,).
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        rows: rows of D on each rank; None: as many on each.
        columns: columns of A on each rank; None: as many on each.
        gathered: whether this rank's rows of A are returned, too.
        purpose: "forward", "gradient", or "gather" if nobody asked for the product.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    group: str
    schedule: str
    chunks: int | None
    rows: Sizes
    columns: Sizes
    gathered: bool
    purpose: Purpose

    def _sizes(self) -> tuple[list[int], list[int]]:
        """The rows and the columns of each rank."""
        function: Function = "all_to_all_matmul"
        size, _ = size_and_rank(self.group)
        mine = self.a.shape[-1]
        k = mine * size if self.columns is None else sum(self.columns)
        check_operands(function, {"a": self.a, "b": self.b, "bias": self.bias}, k)
        columns = _split_columns(function, "k_per_rank", k, self.columns, 1, self.group, mine)
        return _scattered_rows(function, self.a.shape[0], self.rows, self.group), columns

    def prepare(self) -> PreparedCall | None:
        (rows, columns), a, k = self._sizes(), self.a, self.b.shape[1]
        shares = _shares("k_per_rank", k, columns)
        problem = _problem("all_to_all_matmul", a, a.shape[0], self.b.shape[0], k, rows, len(rows), **shares)
        return _prepare_one("a2a+gemm", problem, self)

    def run(self, call: PreparedCall) -> list[Tensor]:
        function: Function = "gather" if self.purpose == "gather" else "all_to_all_matmul"
        if not self.gathered:
            return [call(function, self.a, self.b, self.bias)]
        rows, _ = call.executable.plan.shard_shape("D", size_and_rank(self.group)[1])
        own = self.a.new_empty(rows, self.b.shape[1])
        return [call(function, self.a, self.b, self.bias, own), own]

    def fake(self) -> list[Tensor]:
        rows, _ = self._sizes()
        a, (_, rank) = self.a, size_and_rank(self.group)
        d = a.new_empty(rows[rank], self.b.shape[0])
        return [d, a.new_empty(rows[rank], self.b.shape[1])] if self.gathered else [d]


def _all_to_all_matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = _AllToAllMatmulCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.kept = given.gathered
    _save(ctx, given.a, [given.b], output[-1] if given.gathered else given.a)
    ctx.group, ctx.rows, ctx.columns, ctx.biased = given.group, given.rows, given.columns, given.bias is not None


def _all_to_all_matmul_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of a, and of this rank's rows those of b and bias."""
    a, b = ctx.saved_tensors
    grad, *others = grads
    if others and others[0] is not None:
        raise RuntimeError("no gradient goes through the gathered input of all_to_all_matmul")
    if grad is None:
        return (None,) * 10
    wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
    da = db = None
    if wants_a:
        da = matmul_all_to_all(grad, b.t(), None, ctx.group, "auto", None, ctx.rows, ctx.columns, 1)
    if wants_b:
        db = grad.t() @ (a if ctx.kept else own_rows(a, ctx.group, ctx.rows, ctx.columns))
    return (da, db, grad.sum(0) if ctx.biased and wants_bias else None, *[None] * 7)


def own_rows(a: Tensor, group: str, rows: Sizes, columns: Sizes) -> Tensor:
    """This rank's rows of A, of which each rank has columns. As :func:`gather`, with a product of a few zeros."""
    size, _ = size_and_rank(group)
    b = a.new_zeros(GATHER_ROWS, a.shape[1] * size if columns is None else sum(columns))
    _, own = all_to_all_matmul(a, b, None, group, "auto", None, rows, columns, True, "gather")
    found: Tensor = own
    return found


all_to_all_matmul = EagerOp(
    "distgemm::all_to_all_matmul",
    "(Tensor a, Tensor b, Tensor? bias, str group, str schedule, int? chunks, SymInt[]? rows, SymInt[]? columns, "
    "bool gathered, str purpose) -> Tensor[]",
    _AllToAllMatmulCall,
    _all_to_all_matmul_setup,
    _all_to_all_matmul_backward,
)


# --- fp8 ------------------------------------------------------------------------------------------------


FUNCTIONS: dict[str, Function] = {
    "ag+gemm": "all_gather_matmul",
    "gemm+rs": "matmul_reduce_scatter",
    "gemm+ar": "matmul_all_reduce",
}


def scaling_name(scaling: Scaling) -> str:
    """A scaling as an argument of :data:`scaled_matmul`, whose schema has no other types."""
    return ";".join(f"{each.rows or 0},{each.columns or 0},{each.scope}" for each in (scaling.a, scaling.b))


def _scaling(name: str) -> Scaling:
    operands = []
    for each in name.split(";"):
        rows, columns, scope = each.split(",")
        operands.append(
            OperandScaling(int(rows) or None, int(columns) or None, "shard" if scope == "shard" else "global")
        )
    return Scaling(*operands)


def check_blocks(function: str, what: str, shares: Sequence[int], block: int) -> None:
    """Raises ValueError if a rank's share begins in the middle of a block that shares a scale."""
    starts = accumulate(shares[:-1])
    if any(start % block for start in starts if start < sum(shares)):  # behind the last share, there are empty ones
        raise ValueError(
            f"{function}: blocks of {block} share a scale, so each rank except the last has a multiple of {block} "
            f"{what}, got {list(shares)}"
        )


class _ScaledCall(NamedTuple):
    """A product of a pattern whose operands are in fp8.

    Attributes:
        a: codes of this rank's shard of A.
        b: codes of this rank's shard of B.
        scale_a: scales of a; None, as of ``scale_b``, if the operands have no scales.
        scale_b: scales of b.
        bias: (N of this rank,).
        pattern: "ag+gemm", "gemm+rs" or "gemm+ar".
        scaling: from :func:`scaling_name`; "" without scales.
        group: name of the group.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        rows: rows of A ("ag+gemm") or of D ("gemm+rs") on each rank; None: as many on each.
        whole: N ("ag+gemm") or K over all ranks; None: as much on each rank.
        out_dtype: type of the result.
        partial_dtype: type of the partial sums that travel; None: that of the result.
        gathered: whether the codes of all of A are returned, too.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    bias: Tensor | None
    pattern: Pattern
    scaling: str
    group: str
    schedule: str
    chunks: int | None
    rows: Sizes
    whole: int | None
    out_dtype: torch.dtype
    partial_dtype: torch.dtype | None
    gathered: bool

    def _sizes(self) -> tuple[int, int, int, Sizes]:
        """M, N and K over all ranks, and the rows of each rank where they are split."""
        function, a, b = FUNCTIONS[self.pattern], self.a, self.b
        for name, x in (("a", a), ("b", b)):
            if x.dtype not in FP8_DTYPES:
                raise ValueError(f"{function}: {name} is in fp8, {' or '.join(map(str, FP8_DTYPES))}, got {x.dtype}")
            if x.device != a.device:
                raise ValueError(f"{function}: a is on {a.device}, {name} on {x.device}; they are on one device")
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
            raise ValueError(
                f"{function}: a is (tokens, in_features) and b (out_features, in_features), as a Linear's weight; got "
                f"{tuple(a.shape)} and {tuple(b.shape)}"
            )
        if self.out_dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{function}: out_dtype is one of {', '.join(map(str, DTYPE_NAMES))}, got {self.out_dtype}"
            )
        if self.bias is not None and (tuple(self.bias.shape) != (b.shape[0],) or self.bias.dtype != self.out_dtype):
            raise ValueError(
                f"{function}: bias is ({b.shape[0]},) of {self.out_dtype}, as the result, got "
                f"{tuple(self.bias.shape)} of {self.bias.dtype}"
            )
        size, _ = size_and_rank(self.group)
        m, n, k = a.shape[0], b.shape[0], a.shape[1]
        scaling = _scaling(self.scaling) if self.scaling else None
        rows: Sizes = None
        if self.pattern == "ag+gemm":
            rows = _gathered_rows(function, m, self.rows, self.group)
            m, n = sum(rows), _whole(function, "out_features", n, self.whole, self.group)
            if scaling is not None:
                check_blocks(function, "tokens", rows, scaling.a.unit[0])
                check_blocks(function, "out_features", split_extent(n, size), scaling.b.unit[0])
        else:
            k = _whole(function, "in_features", k, self.whole, self.group)
            if scaling is not None:
                check_blocks(function, "in_features", split_extent(k, size), scaling.a.unit[1])
                check_blocks(function, "in_features", split_extent(k, size), scaling.b.unit[1])
            if self.pattern == "gemm+rs":
                rows = _scattered_rows(function, m, self.rows, self.group)
        return m, n, k, rows

    def prepare(self) -> PreparedCall | None:
        (m, n, k, rows), (size, _) = self._sizes(), size_and_rank(self.group)
        options: dict[str, Any] = {
            "out_dtype": NAMES[self.out_dtype],
            "b_dtype": NAMES[self.b.dtype],
            "scaling": _scaling(self.scaling) if self.scaling else None,
        }
        if self.partial_dtype is not None and self.pattern != "ag+gemm":
            options["partial_dtype"] = NAMES[self.partial_dtype]
        problem = _problem(FUNCTIONS[self.pattern], self.a, m, n, k, rows, size, **options)
        terms = self.bias is not None, not self.b.is_cuda and _is_turned(self.b)
        return prepare(self.pattern, problem, self.group, self.a.device, self.schedule, self.chunks, *terms)

    def run(self, call: PreparedCall) -> list[Tensor]:
        scale_a, scale_b = (None if each is None else each.contiguous() for each in (self.scale_a, self.scale_b))
        whole = self.a.new_empty(call.executable.plan.problem.m, self.a.shape[1]) if self.gathered else None
        # Nobody asked for the product of a gather without scales.
        function: Function = FUNCTIONS[self.pattern] if self.scaling else "gather"
        b = self.b.contiguous() if self.b.is_cuda else self.b  # kernels for fp8 read rows
        d = call(function, self.a, b, self.bias, whole, scale_a, scale_b)
        return [d] if whole is None else [d, whole]

    def fake(self) -> list[Tensor]:
        (m, _, _, rows), (_, rank) = self._sizes(), size_and_rank(self.group)
        mine = rows[rank] if rows is not None and self.pattern == "gemm+rs" else m
        found = [self.a.new_empty(mine, self.b.shape[0], dtype=self.out_dtype)]
        return [*found, self.a.new_empty(m, self.a.shape[1])] if self.gathered else found


def _scaled_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)


def _scaled_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    raise RuntimeError(
        "products of fp8 tensors have no gradient: pass tensors in bf16 and a recipe, which has gradients"
    )


scaled_matmul = EagerOp(
    "distgemm::scaled_matmul",
    "(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, str pattern, str scaling, str group, "
    "str schedule, int? chunks, SymInt[]? rows, SymInt? whole, ScalarType out_dtype, ScalarType? partial_dtype, "
    "bool gathered) -> Tensor[]",
    _ScaledCall,
    _scaled_setup,
    _scaled_backward,
)


# --- FLOPs ----------------------------------------------------------------------------------------------


def _flops(a: Sequence[int], b: Any, *arguments: Any, out_shape: Any, **_: Any) -> int:
    """Of this rank's product. Shapes stand for tensors.

    An op that brings rows of a from peers returns a list, and its product has the rows of the result. Other products
    have those of a. :data:`scaled_matmul` always returns a list, and its arguments name the pattern.
    """
    weights = b if isinstance(b, list) else [b]
    reduces = "gemm+rs" in arguments or "gemm+ar" in arguments
    rows = out_shape[0][0] if isinstance(out_shape, list) and not reduces else a[0]
    return sum(2 * rows * columns * k for columns, k in weights)


for _op in (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    matmul_all_to_all,
    all_to_all_matmul,
    scaled_matmul,
):
    _op.count_flops(_flops)
