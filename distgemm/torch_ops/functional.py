"""The functions that users call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias, overload

import torch

from distgemm.arguments import MAX_EXTENT, boolean, integer, integers, string, wrong
from distgemm.fp8 import LayerState, Quantized, Recipe
from distgemm.fp8.layer import SPLITS, Split
from distgemm.fp8.quantize import transposed
from distgemm.fp8.recipe import read_recipe
from distgemm.plan.derive import make_plan
from distgemm.plan.patterns import schedule_does_pattern
from distgemm.runtime.checks import Group, process_group
from distgemm.runtime.gathering import GatheredChunk
from distgemm.runtime.torch_arguments import PLAIN, is_plain, read_tensor
from distgemm.schedulers import PATTERNS, Pattern, list_schedules
from distgemm.schedulers.registry import MAX_CHUNKS, check_options
from distgemm.torch_ops import library, quantized
from distgemm.torch_ops.dispatch import Function

__all__ = [
    "Group",
    "all_gather_matmul",
    "all_to_all_matmul",
    "autocast",
    "autocast_dtype",
    "check_schedule",
    "gather",
    "group_name",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]

Tensor = torch.Tensor
# Found at import, because torch.compile of torch 2.11 cannot trace is_autocast_available.
_AUTOCAST_DEVICES = frozenset(name for name in ("cpu", "cuda") if torch.amp.is_autocast_available(name))


RecipeLike: TypeAlias = Recipe | LayerState | str | None
"""A recipe of :mod:`distgemm.fp8`, its name, or the state of a layer with a recipe; None: no fp8."""

SCHEDULE = "'auto', the name of a schedule, or a configuration such as 'gemm+rs chunks=2'"


def group_name(group: Group) -> str:
    """The name of a group, which the registered ops take.

    Raises:
        ValueError: if there is no such group, or if it does not contain this rank.
    """
    if isinstance(group, str) and torch.compiler.is_compiling():
        return group  # the op checks it
    return process_group(group).group_name


def _matrix(name: str, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        raise ValueError(
            f"{name} is (tokens, ..., in_features), got shape {tuple(x.shape)}; x.unsqueeze(0) is one token"
        )
    if 0 in x.shape[1:-1]:
        raise ValueError(f"{name} may have no tokens, but dimensions between are at least 1, got {tuple(x.shape)}")
    return x.flatten(0, -2)


def _check(
    function: Function,
    tensors: dict[str, Any],
    schedule: str,
    chunks: int | None,
    m_per_rank: Sequence[int] | None = None,
    features: int | None = None,
    **switches: bool,
) -> None:
    """Check the types of a call's arguments. Sizes are checked where they are used.

    torch.compile does not trace these checks: the registered ops check what they get.
    """
    if torch.compiler.is_compiling():
        return
    needs_grad = False
    for name, x in tensors.items():
        if x is None and name.startswith("bias"):
            continue
        if not is_plain(x):
            read_tensor(f"{function}: {name}", x)
        needs_grad = needs_grad or x.requires_grad
    if type(schedule) is not str:
        string(f"{function}: schedule", schedule, SCHEDULE)
    if chunks is not None:
        _check_chunks(f"{function}: chunks", chunks)
    if m_per_rank is not None:
        integers(f"{function}: m_per_rank", m_per_rank, 0, MAX_EXTENT)
    if features is not None:
        name = "out_features" if function == "all_gather_matmul" else "in_features"
        integer(f"{function}: {name}", features, 1, MAX_EXTENT)
    for name, value in switches.items():
        if type(value) is not bool:
            boolean(f"{function}: {name}", value)
    if needs_grad and torch.is_grad_enabled():
        for name, x in tensors.items():
            if (
                x is not None and x.is_inference()
            ):  # otherwise torch refuses to save it once the ranks have computed the result
                raise ValueError(
                    f"{function}: {name} is kept for gradients, got an inference tensor; {name}.clone() outside of "
                    "torch.inference_mode() makes another"
                )


def check_schedule(schedule: str, chunks: int | None, users: Mapping[Pattern, str]) -> None:
    """Check the arguments of layers when they are made.

    Only a call can tell what a schedule computes on a mesh of several axes, or if it has no plan for two ranks.

    Args:
        schedule: as in :func:`all_gather_matmul`.
        chunks: as in :func:`all_gather_matmul`.
        users: the patterns that the layers compute, and for each the layer that the error names.

    Raises:
        ValueError: if ``schedule`` is neither "auto" nor a known schedule or configuration, if it does not compute one
            of the patterns, or if ``chunks`` is neither None nor an integer >= 1.
    """
    if string("schedule", schedule, SCHEDULE) != "auto":
        from distgemm.tune import TunedConfig  # imported here so that layers can be made without the GPU code

        config = TunedConfig.parse(schedule)
        if config.method == "plan":
            of_plans = inspect.signature(make_plan).parameters
            check_options(config.schedule, {key: value for key, value in config.options if key not in of_plans})
        for pattern, user in users.items():
            fits = (
                pattern in PATTERNS if config.method == "unfused" else schedule_does_pattern(config.schedule, pattern)
            )
            if fits is False:
                raise ValueError(
                    f"schedule={schedule!r} does not compute {pattern}, as {user} does: take {_schedules_for(users)}"
                )
    _check_chunks("chunks", chunks)


def _schedules_for(patterns: Collection[Pattern]) -> str:
    """What to take for layers of these patterns, as an error says it."""
    names = [name for name in list_schedules() if all(schedule_does_pattern(name, pattern) for pattern in patterns)]
    unfused = " or 'unfused'" if all(pattern in PATTERNS for pattern in patterns) else ""
    return f"'auto'{unfused}" + (f", or one of {', '.join(names)}" if names else "")


def _check_chunks(name: str, chunks: int | None) -> None:
    if chunks is not None:
        integer(name, chunks, 1, MAX_CHUNKS)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch.autocast on a type of device; None if it is not enabled."""
    if device_type not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(x: Tensor) -> Tensor:
    """A tensor cast as torch.autocast casts the arguments of F.linear, which keeps float64."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return x  # the name of the device takes longer to find
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)


def _extents(name: str, value: int | Sequence[int] | None, count: int, several: bool) -> Sequence[int] | None:
    """An extent for each of so many tensors."""
    if value is None:
        return None
    if torch.compiler.is_compiling():
        return [value] if isinstance(value, int) else value
    return integers(name, value, 1, MAX_EXTENT, count) if several else [integer(name, value, 1, MAX_EXTENT)]


def _rows(m_per_rank: Sequence[int] | None, between: Sequence[int]) -> list[int] | None:
    """Rows of the flattened matrix on each rank, from the tokens of each rank."""
    return None if m_per_rank is None else [tokens * prod(between) for tokens in m_per_rank]


def _unflattened(x: Tensor, between: Sequence[int]) -> Tensor:
    return x.reshape(x.shape[0] // prod(between), *between, x.shape[1]) if between else x


# --- fp8 ------------------------------------------------------------------------------------------------


class _InFp8(NamedTuple):
    """The operands of a call, in fp8.

    Attributes:
        operands: a, and all b.
        between: the dimensions of a between the first and the last one.
        out_dtype: type of the result.
    """

    operands: list[Quantized]
    between: Sequence[int]
    out_dtype: torch.dtype

    def product(self, pattern: Pattern, bias: Tensor | None, group: str, **options: Any) -> Tensor:
        """The product with one b."""
        a, b = self.operands
        (found,) = quantized.product_of(pattern, a, b, bias, group, self.out_dtype, **options)
        return _unflattened(found, self.between)


def _in_fp8(
    function: Function, named: dict[str, Any], recipe: RecipeLike, out_dtype: torch.dtype | None
) -> _InFp8 | None:
    """The operands of a call if they are in fp8, which are taken out of ``named``; None: they are not.

    Raises:
        ValueError: if some are and others are not, for a recipe beside them, and for an ``out_dtype`` without them.
    """
    if out_dtype is None and type(next(iter(named.values()))) in PLAIN:
        return None  # soon, as each eager call comes here
    given = {name: x for name, x in named.items() if not name.startswith("bias")}
    found = {name: quantized.as_quantized(x) for name, x in given.items()}
    if not any(found.values()):
        if out_dtype is not None:
            raise ValueError(
                f"{function}: out_dtype is for operands in fp8, got {out_dtype}; others have results of their type"
            )
        return None
    operands = [each for each in found.values() if each is not None]
    if len(operands) < len(found):
        lacking = ", ".join(name for name, each in found.items() if each is None)
        raise ValueError(
            f"{function}: all operands are in fp8, or none; {lacking} is not. distgemm.fp8.quantize makes one"
        )
    if recipe is not None:
        raise ValueError(f"{function}: the operands are in fp8 already, so there is no recipe, got {recipe}")
    for name in given:
        del named[name]
    first = next(iter(given.values()))
    if isinstance(first, Quantized):
        return _InFp8(operands, (), torch.bfloat16 if out_dtype is None else out_dtype)
    return _InFp8(operands, first.shape[1:-1], first.dtype if out_dtype is None else out_dtype)


def _linear(
    function: Function,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    recipe: RecipeLike,
    split: Split,
    group: str,
    options: dict[str, Any],
) -> Tensor:
    """A layer with a recipe, which torch.autocast casts as others."""
    x, w, bias = autocast(_matrix("a", x)), autocast(w), None if bias is None else autocast(bias)
    library.check_operands(function, {"a": x, "b": w, "bias": bias})
    return quantized.rank_linear(x, w, bias, recipe, split, group, **options)


def _stacked_linear(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: RecipeLike,
    group: str,
    ns: Sequence[int] | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """Layers with a recipe that share their input: one layer, whose weight is stacked from theirs."""
    if len(ws) == 1:
        options["features"] = None if ns is None else ns[0]
        return [_linear("all_gather_matmul", x, ws[0], biases[0], recipe, SPLITS["column"], group, options)]
    size = quantized.ranks_of(group)
    if ns is not None and any(n % size for n in ns):
        raise ValueError(
            f"all_gather_matmul: with a recipe, several b are stacked, so ranks have equal shares of each, got "
            f"out_features={list(ns)} over {size} ranks; call it once for each b"
        )
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(ws, biases, strict=True)])
    options = options | {"features": None}
    y = _linear("all_gather_matmul", x, torch.cat(list(ws)), bias, recipe, SPLITS["column"], group, options)
    return list(torch.split(y, [w.shape[0] for w in ws], 1))


def _keeps_codes(recipe: RecipeLike, keep_gathered: bool) -> bool:
    """Whether the gathered codes of the forward pass are kept.

    Raises:
        ValueError: if the gradient of the weight cannot use them.
    """
    if not keep_gathered:
        return False
    found = recipe.recipe if isinstance(recipe, LayerState) else read_recipe("recipe", recipe)
    if found.grad_weight is None or found.grad_weight[1] != transposed(found.forward[0]):
        raise ValueError(
            "all_gather_matmul: keep_gathered is for recipes whose gradient of the weight takes the codes of the "
            "forward pass, such as 'tensorwise'; with this recipe, a is gathered once more, in other codes"
        )
    return torch.is_grad_enabled()


# --- the functions --------------------------------------------------------------------------------------


@overload
def all_gather_matmul(
    a_shard: Tensor | Quantized,
    b: Tensor | Quantized,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | None = None,
    keep_gathered: bool = False,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def all_gather_matmul(
    a_shard: Tensor | Quantized,
    b: Sequence[Tensor] | Sequence[Quantized],
    *,
    group: Group,
    bias: Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: Sequence[int] | None = None,
    keep_gathered: bool = False,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor | Quantized,
    b: Tensor | Quantized,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | None = None,
    keep_gathered: bool = False,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool,
) -> tuple[Tensor, Any]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor | Quantized,
    b: Sequence[Tensor] | Sequence[Quantized],
    *,
    group: Group,
    bias: Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: Sequence[int] | None = None,
    keep_gathered: bool = False,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool,
) -> tuple[list[Tensor], Any]: ...


def all_gather_matmul(
    a_shard: Tensor | Quantized,
    b: Tensor | Quantized | Sequence[Tensor] | Sequence[Quantized],
    *,
    group: Group,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    out_features: int | Sequence[int] | None = None,
    keep_gathered: bool = False,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
) -> Any:
    """The tokens of all ranks times this rank's part of a weight.

    The unfused program is ::

        a = torch.cat(all_gather(a_shard, group))  # along the first dimension
        return torch.nn.functional.linear(a, b, bias)  # for each b; and a, with return_gathered

    All ranks of the group make the same call. The gradient of ``a_shard`` is a :func:`matmul_reduce_scatter`. Under
    torch.autocast, tensors are cast as for F.linear. The first call for each set of sizes makes a plan and compares the
    arguments of all ranks. Later calls compare on CPUs only.

    Args:
        a_shard: (tokens of this rank, ..., in_features). In fp8: a matrix as :class:`distgemm.fp8.Quantized`, which
            needs a b in fp8 and has no gradient, or a Float8TrainingTensor of torchao.
        b: (out_features of this rank, in_features), as the weight of an nn.Linear. A sequence of several weights, such
            as those of q, k and v, shares one gather: the GEMM of the largest overlaps with it, the others follow.
        group: the ranks that take part.
        bias: (out_features of this rank,). For several b a sequence, with None for a b without bias.
        schedule: name of a schedule, see :func:`distgemm.list_schedules`; a name with options, as in
            "gemm+rs chunks=2 provider=cublas", see :meth:`distgemm.tune.TunedConfig.parse`; or "auto". On CUDA tensors
            without ``chunks``, "auto" takes the fastest measured configuration (docs/tuning.md). Otherwise it takes the
            rule of :func:`distgemm.torch_ops.select_schedule`.
        chunks: number of chunks of the schedule; None: the number that "auto" takes, or the schedule's default.
        m_per_rank: tokens of each rank, zeros allowed; None: as many on each.
        out_features: out_features of b over all ranks, if ranks have different shares: rank r has part r of
            ``torch.chunk``. A sequence for several b. None: as many on each rank.
        keep_gathered: keep the gathered a for the gradient of b. It is an ordinary tensor with the tokens of all
            ranks, which lives until the backward pass. Otherwise a_shard is kept and gathered a second time.
        recipe: compute in fp8, forward and backward: a recipe of :mod:`distgemm.fp8`, its name, or the
            :class:`distgemm.fp8.LayerState` of the layer. a is quantised before it is gathered, so that one byte of
            each element travels. Several b have the scales of one stacked weight. The result has the type of a.
        out_dtype: type of the result for operands in fp8; None: torch.bfloat16.
        return_gathered: also return the gathered a. It has no gradient.

    Returns:
        (tokens of all ranks, ..., out_features of this rank). For several b a list. With ``return_gathered`` a pair:
        that, and the gathered a.

    Raises:
        ValueError: if tensors do not fit each other, the group or the schedule.
        RuntimeError: for a first call with some sizes while a CUDA graph is captured.
    """
    several = isinstance(b, (list, tuple))
    bs: list[Any] = list(b) if isinstance(b, (list, tuple)) else [b]
    if not bs:
        raise wrong("all_gather_matmul: b", "a tensor, or a sequence of at least one", b)
    biases: list[Any] = list(bias) if isinstance(bias, (list, tuple)) else [bias]
    if several and bias is None:
        biases = [None] * len(bs)
    named = {"a_shard": a_shard}
    for name, each in (("b", bs), ("bias", biases)):
        for index, x in enumerate(each):
            named[f"{name}[{index}]" if several else name] = x
    switches = {"keep_gathered": keep_gathered, "return_gathered": return_gathered}
    in_fp8 = _in_fp8("all_gather_matmul", named, recipe, out_dtype)
    _check("all_gather_matmul", named, schedule, chunks, m_per_rank, **switches)
    if len(biases) != len(bs) or (several and isinstance(bias, Tensor)):
        wanted = f"a sequence of {len(bs)}, as there are {len(bs)} b, with None for one without a bias"
        raise wrong("all_gather_matmul: bias", wanted, bias)
    ns = _extents("all_gather_matmul: out_features", out_features, len(bs), several)
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}
    if in_fp8 is not None:
        a, *rest = in_fp8.operands
        between = in_fp8.between
        rows = _rows(m_per_rank, between)
        made, whole = quantized.gather_products(
            a, rest[: len(bs)], biases, group_name(group), in_fp8.out_dtype, rows, ns, return_gathered, **options
        )
        results = [_unflattened(each, between) for each in made]
        result = results if several else results[0]
        return (result, whole) if return_gathered else result
    assert isinstance(a_shard, Tensor)
    between = a_shard.shape[1:-1]
    if recipe is not None:
        if return_gathered:
            raise ValueError(
                "all_gather_matmul: return_gathered has no recipe: the gathered a is in fp8, or not at all"
            )
        options |= {"keeps_gathered": _keeps_codes(recipe, keep_gathered), "rows": _rows(m_per_rank, between)}
        results = _stacked_linear(_matrix("a_shard", a_shard), bs, biases, recipe, group_name(group), ns, options)
        results = [_unflattened(each, between) for each in results]
        return results if several else results[0]
    # Only the gradients of b need the gathered a.
    keeps = keep_gathered and torch.is_grad_enabled() and any(each.requires_grad for each in bs)
    found = library.all_gather_matmul(
        autocast(_matrix("a_shard", a_shard)),
        [autocast(each) for each in bs],
        [autocast(each) for each in biases if each is not None],
        [each is not None for each in biases],
        group_name(group),
        schedule,
        chunks,
        _rows(m_per_rank, between),
        ns,
        keeps or return_gathered,
        "forward",
    )
    results = [_unflattened(each, between) for each in found[: len(bs)]]
    result = results if several else results[0]
    return (result, _unflattened(found[-1].detach(), between)) if return_gathered else result


def matmul_reduce_scatter(
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    in_features: int | None = None,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's tokens of a product that is summed over the ranks.

    The unfused program is ::

        d = torch.nn.functional.linear(a, b)  # this rank's partial sum of all tokens
        return reduce_scatter(d, group) + bias  # along the first dimension

    All ranks of the group make the same call. The gradient of ``a`` is an :func:`all_gather_matmul`; the gradients of
    ``b`` and ``bias`` use the same gathered gradient. Under torch.autocast, tensors are cast as for F.linear.

    Args:
        a: (tokens of all ranks, ..., in_features of this rank).
        b: (out_features, in_features of this rank), as the weight of an nn.Linear.
        group: the ranks that take part.
        bias: (out_features,), the same on all ranks, added once. Its gradient is the sum over all tokens, on all ranks.
        schedule: as in :func:`all_gather_matmul`.
        chunks: as in :func:`all_gather_matmul`.
        m_per_rank: tokens that each rank keeps, zeros allowed; None: as many on each.
        in_features: in_features over all ranks, if ranks have different shares: rank r has part r of ``torch.chunk``.
            None: as many on each rank.
        recipe: as in :func:`all_gather_matmul`. Partial sums travel in the type that the recipe says.
        out_dtype: as in :func:`all_gather_matmul`, where a and b may be in fp8, too.

    Returns:
        (tokens of this rank, ..., out_features).

    Raises:
        ValueError: if tensors do not fit each other, the group or the schedule.
        RuntimeError: for a first call with some sizes while a CUDA graph is captured.
    """
    named: dict[str, Any] = {"a": a, "b": b, "bias": bias}
    in_fp8 = _in_fp8("matmul_reduce_scatter", named, recipe, out_dtype)
    _check("matmul_reduce_scatter", named, schedule, chunks, m_per_rank, in_features)
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}
    if in_fp8 is not None:
        options |= {"rows": _rows(m_per_rank, in_fp8.between), "whole": in_features}
        return in_fp8.product("gemm+rs", bias, group_name(group), **options)
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    between = a.shape[1:-1]
    rows = _rows(m_per_rank, between)
    if recipe is not None:
        options |= {"rows": rows, "features": in_features}
        y = _linear("matmul_reduce_scatter", a, b, bias, recipe, SPLITS["row"], group_name(group), options)
        return _unflattened(y, between)
    flat, b, bias = autocast(_matrix("a", a)), autocast(b), None if bias is None else autocast(bias)
    found = library.matmul_reduce_scatter(flat, b, bias, group_name(group), schedule, chunks, rows, in_features)
    return _unflattened(found, between)


def matmul_all_reduce(
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    in_features: int | None = None,
    recipe: RecipeLike = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """All tokens of a product that is summed over the ranks, on every rank.

    The unfused program is ::

        d = torch.nn.functional.linear(a, b)  # this rank's partial sum
        return all_reduce(d, group) + bias

    All ranks of the group make the same call. Gradients need no communication: every rank has the whole result, and is
    expected to do the same with it. Under torch.autocast, tensors are cast as for F.linear.

    Args:
        a: (tokens, ..., in_features of this rank).
        b: (out_features, in_features of this rank), as the weight of an nn.Linear.
        group: the ranks that take part.
        bias: (out_features,), the same on all ranks, added once.
        schedule: as in :func:`all_gather_matmul`.
        chunks: as in :func:`all_gather_matmul`.
        in_features: in_features over all ranks, if ranks have different shares: rank r has part r of ``torch.chunk``.
            None: as many on each rank.
        recipe: as in :func:`all_gather_matmul`. Partial sums travel in the type that the recipe says.
        out_dtype: as in :func:`all_gather_matmul`, where a and b may be in fp8, too.

    Returns:
        (tokens, ..., out_features), the same on all ranks.

    Raises:
        ValueError: if tensors do not fit each other, the group or the schedule.
        RuntimeError: for a first call with some sizes while a CUDA graph is captured.
    """
    named: dict[str, Any] = {"a": a, "b": b, "bias": bias}
    in_fp8 = _in_fp8("matmul_all_reduce", named, recipe, out_dtype)
    _check("matmul_all_reduce", named, schedule, chunks, features=in_features)
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks}
    if in_fp8 is not None:
        return in_fp8.product("gemm+ar", bias, group_name(group), whole=in_features, **options)
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    if recipe is not None:
        options |= {"rows": None, "features": in_features}
        y = _linear("matmul_all_reduce", a, b, bias, recipe, Split(1, 1, None), group_name(group), options)
        return _unflattened(y, a.shape[1:-1])
    flat, b, bias = autocast(_matrix("a", a)), autocast(b), None if bias is None else autocast(bias)
    found = library.matmul_all_reduce(flat, b, bias, group_name(group), schedule, chunks, in_features)
    return _unflattened(found, a.shape[1:-1])


@overload
def matmul_all_to_all(
    a_shard: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    n_per_rank: Sequence[int] | None = None,
    copies: int = 1,
) -> Tensor: ...


@overload
def matmul_all_to_all(
    a_shard: Tensor,
    b: Sequence[Tensor],
    *,
    group: Group,
    bias: Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    n_per_rank: Sequence[Sequence[int] | None] | None = None,
    copies: Sequence[int] | None = None,
) -> list[Tensor]: ...


def matmul_all_to_all(
    a_shard: Tensor,
    b: Tensor | Sequence[Tensor],
    *,
    group: Group,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    n_per_rank: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    copies: int | Sequence[int] | None = 1,
) -> Any:
    """This rank's columns of all tokens, from this rank's tokens: before attention in DeepSpeed Ulysses.

    The unfused program is ::

        y = torch.nn.functional.linear(a_shard, b, bias)  # this rank's tokens, all columns
        return torch.cat(all_to_all(y.split(n_per_rank, -1), group))  # all tokens, this rank's columns

    All ranks of the group make the same call, with the same b. The gradient of ``a_shard`` is an
    :func:`all_to_all_matmul`. The gradients of ``b`` and ``bias`` are those of this rank's tokens: sum them over the
    ranks, as FSDP and DDP do, or as ``distgemm.nn`` does. Under torch.autocast, tensors are cast as for F.linear.

    Args:
        a_shard: (tokens of this rank, ..., in_features).
        b: (out_features, in_features), as the weight of an nn.Linear, whole on each rank. A sequence of several
            weights, such as those of q, k and v, makes a product and an all-to-all for each, one after the other.
        group: the ranks that take part.
        bias: (out_features,), whole on each rank. For several b a sequence, with None for a b without bias.
        schedule: as in :func:`all_gather_matmul`. There is no unfused program. Where ranks have unequal columns or
            copies, "auto" is the rule of :func:`distgemm.torch_ops.select_schedule`, also on GPUs.
        chunks: as in :func:`all_gather_matmul`.
        m_per_rank: tokens of each rank, zeros allowed; None: as many on each.
        n_per_rank: columns of the result on each rank, such as head_dim times the rank's number of heads; zeros
            allowed. None: as many on each. For several b a sequence, with None for a b with equal columns.
        copies: number of consecutive ranks that get the same columns, a divisor of the number of ranks, for fewer heads
            of keys and values than ranks (grouped-query attention). Their gradients add up. ``n_per_rank`` has an entry
            for each rank, equal for copies. For several b a sequence; None: one each.

    Returns:
        (tokens of all ranks, ..., columns of this rank). For several b a list.

    Raises:
        ValueError: if tensors do not fit each other, the group or the schedule, and if ranks do not divide the columns
            and ``n_per_rank`` is None.
        RuntimeError: for a first call with some sizes while a CUDA graph is captured.
    """
    function: Function = "matmul_all_to_all"
    several = isinstance(b, (list, tuple))
    bs: list[Any] = list(b) if isinstance(b, (list, tuple)) else [b]
    if not bs:
        raise wrong("matmul_all_to_all: b", "a tensor, or a sequence of at least one", b)
    if several:
        biases = _for_each(function, "bias", bias, len(bs), None, "tensors")
        columns = _for_each(function, "n_per_rank", n_per_rank, len(bs), None, "sequences of integers")
        counts = _for_each(function, "copies", copies, len(bs), 1, "integers")
    else:
        biases, columns, counts = [bias], [n_per_rank], [copies]
    named = {"a_shard": a_shard}
    for name, each in (("b", bs), ("bias", biases)):
        for index, x in enumerate(each):
            named[f"{name}[{index}]" if several else name] = x
    _check(function, named, schedule, chunks, m_per_rank)
    if not torch.compiler.is_compiling():
        for index, (widths, count) in enumerate(zip(columns, counts, strict=True)):
            at = f"[{index}]" if several else ""
            if widths is not None:
                columns[index] = integers(f"{function}: n_per_rank{at}", widths, 0, MAX_EXTENT)
            counts[index] = integer(f"{function}: copies{at}", count, 1, MAX_EXTENT)
    between = a_shard.shape[1:-1]
    a, rows, name = autocast(_matrix("a_shard", a_shard)), _rows(m_per_rank, between), group_name(group)
    results = []
    for each, its_bias, widths, count in zip(bs, biases, columns, counts, strict=True):
        its_bias = None if its_bias is None else autocast(its_bias)
        y = library.matmul_all_to_all(a, autocast(each), its_bias, name, schedule, chunks, rows, widths, count)
        results.append(_unflattened(y, between))
    return results if several else results[0]


def _for_each(function: Function, name: str, value: Any, count: int, default: Any, what: str) -> list[Any]:
    """An argument for each of several b: what the caller gave, or as often the default."""
    if value is None or (default is not None and value == default):
        return [default] * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise wrong(f"{function}: {name}", f"a sequence of {count} {what}, as there are {count} b", value)
    return [default if each is None else each for each in value]


def all_to_all_matmul(
    a: Tensor,
    b: Tensor,
    *,
    group: Group,
    bias: Tensor | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
    k_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """This rank's tokens of a product, from some columns of all tokens: behind attention in DeepSpeed Ulysses.

    The unfused program is ::

        rows = torch.cat(all_to_all(a.split(m_per_rank), group), -1)  # this rank's tokens, all columns
        return torch.nn.functional.linear(rows, b, bias)

    All ranks of the group make the same call, with the same b. The gradient of ``a`` is a :func:`matmul_all_to_all`.
    The gradients of ``b`` and ``bias`` are those of this rank's tokens, as in :func:`matmul_all_to_all`. If b has a
    gradient, ``rows`` are kept for it instead of ``a``. Under torch.autocast, tensors are cast as for F.linear.

    Args:
        a: (tokens of all ranks, ..., in_features of this rank).
        b: (out_features, in_features), as the weight of an nn.Linear, whole on each rank.
        group: the ranks that take part.
        bias: (out_features,), whole on each rank.
        schedule: as in :func:`matmul_all_to_all`.
        chunks: as in :func:`all_gather_matmul`.
        m_per_rank: tokens that each rank keeps, zeros allowed; None: as many on each.
        k_per_rank: columns of a on each rank, such as head_dim times the rank's number of heads; zeros allowed. None:
            as many on each.

    Returns:
        (tokens of this rank, ..., out_features).

    Raises:
        ValueError: if tensors do not fit each other, the group or the schedule.
        RuntimeError: for a first call with some sizes while a CUDA graph is captured.
    """
    function: Function = "all_to_all_matmul"
    _check(function, {"a": a, "b": b, "bias": bias}, schedule, chunks, m_per_rank)
    if k_per_rank is not None and not torch.compiler.is_compiling():
        k_per_rank = integers(f"{function}: k_per_rank", k_per_rank, 0, MAX_EXTENT)
    between = a.shape[1:-1]
    keeps = torch.is_grad_enabled() and b.requires_grad
    flat, b, bias = autocast(_matrix("a", a)), autocast(b), None if bias is None else autocast(bias)
    terms = schedule, chunks, _rows(m_per_rank, between), k_per_rank, keeps, "forward"
    return _unflattened(library.all_to_all_matmul(flat, b, bias, group_name(group), *terms)[0], between)


@contextlib.contextmanager
def gather(
    a_shard: Tensor,
    *,
    group: Group,
    schedule: str = "auto",
    chunks: int | None = None,
    m_per_rank: Sequence[int] | None = None,
) -> Iterator[Iterator[GatheredChunk]]:
    """The tokens of all ranks in chunks, for a GEMM or kernel of your own on each chunk while the rest is on its way.

    The unfused program is ::

        a = torch.cat(all_gather(a_shard, group))  # along the first dimension
        yield [GatheredChunk(rows, a[rows]) for rows in ...]

    All ranks of the group make the same call ::

        with distgemm.gather(a_shard, group=group) as chunks:
            for rows, a in chunks:
                d[rows] = a @ b.T

    - **Order.** This rank's rows come first, then the other chunks in the order in which the plan multiplies them. It
      is the same in each call. A chunk comes when it has arrived. The chunks that follow travel meanwhile.
    - **Rows.** ``rows`` are consecutive rows of the gathered tensor. Each row is in one chunk. Ranks without tokens
      bring no chunk: where no rank has tokens, there are none.
    - **Lifetime.** A chunk stays as it is until the end of the block, also after the next chunk has come; ``.clone()``
      keeps it longer. It is ``a_shard`` itself or memory of the group: do not write chunks or ``a_shard`` in the block.
    - **Other calls.** Inside the block there is no other call on the group, or on its GPU: it raises RuntimeError.
    - **End.** The end of the block receives the chunks that nobody asked for, also after an exception inside it. So no
      rank waits for another one for ever, and the next call may follow.
    - **GPUs.** The host waits for nothing: the current stream waits for each chunk before the block gets it. Ask for
      all chunks on one stream, and let it wait for other streams that read chunks before the block ends. In
      torch.cuda.graph, the gather and what the block does become part of the graph. A block that takes longer than the
      group's timeout counts as stuck.

    Args:
        a_shard: (tokens of this rank, in_features).
        group: the ranks that take part.
        schedule: as in :func:`all_gather_matmul`. It needs chunks of whole rows.
        chunks: as in :func:`all_gather_matmul`: the number of chunks of each rank's rows.
        m_per_rank: tokens of each rank, zeros allowed; None: as many on each.

    Yields:
        An iterator over the chunks, which are pairs: the rows as a slice, and the tensor (rows, in_features).

    Raises:
        ValueError: if the tensor does not fit the group or the schedule, or requires grad outside of torch.no_grad().
        RuntimeError: in torch.compile; where a rank is gone, or does not come within the group's timeout; for a first
            call with some sizes while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("gather hands chunks to eager code: call it outside of torch.compile")
    _check("gather", {"a_shard": a_shard}, schedule, chunks, m_per_rank)
    if a_shard.dim() != 2:
        raise ValueError(
            f"gather: a_shard is (tokens, in_features), got shape {tuple(a_shard.shape)}; a_shard.flatten(0, -2) is one"
        )
    if torch.is_grad_enabled() and a_shard.requires_grad:
        raise ValueError(
            "gather: a_shard requires grad, and no gradient goes through chunks; all_gather_matmul has gradients, or "
            "call it under torch.no_grad()"
        )
    prepared = library.prepare_gather(a_shard, group_name(group), schedule, chunks, m_per_rank)
    arriving = iter(()) if prepared is None else prepared.gather(a_shard)
    first = next(arriving, None)  # the ranks compare their calls before the block begins
    ended = False

    def every() -> Iterator[GatheredChunk]:
        for chunk in chain([] if first is None else [first], arriving):
            if ended:
                break
            yield chunk
        if ended:
            raise RuntimeError("gather: the with block of these chunks has ended; ask for all of them inside of it")

    try:
        yield every()
    finally:
        ended = True
        for _ in arriving:
            pass
