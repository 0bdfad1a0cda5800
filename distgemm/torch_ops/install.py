"""torch's fused ops of tensor parallelism, computed by distgemm.

Inductor's pass ``_micro_pipeline_tp``, vLLM's AsyncTP pass and torchtitan's ``dist_gemm`` call ops by name:
``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, and for fp8
``fused_all_gather_scaled_matmul`` and ``fused_scaled_matmul_reduce_scatter``. :func:`install` registers other kernels
for them. Their shapes for tracing stay torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
from torch._inductor import config  # noqa: PLC2701  (as above)

from distgemm.arguments import boolean
from distgemm.fp8.quantize import FP8_DTYPES, Quantized
from distgemm.plan.scaling import OperandScaling, ScalingScope
from distgemm.runtime.checks import process_group
from distgemm.torch_ops import library, quantized
from distgemm.torch_ops.dispatch import CALLS, noting, with_rows
from distgemm.torch_ops.functional import check_schedule
from distgemm.torch_ops.graphs import FusionPass
from distgemm.torch_ops.report import REPORT, CallSite, NotFusedError

__all__ = ["Installation", "install", "uninstall"]

Tensor = torch.Tensor
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
KEYS = ("CPU", "CUDA")
TORCH: Any = symmetric_memory
"""The module with torch's own implementations, which have no public names."""


class Installation:
    """What :func:`install` returns: a context manager that uninstalls at its end.

    Args:
        gather: as in :func:`install`.
        scatter: as in :func:`install`.
        fuse: as in :func:`install`.
        strict: as in :func:`install`.
    """

    def __init__(self, gather: str, scatter: str, fuse: bool, strict: bool) -> None:
        self.gather, self.scatter, self.strict = gather, scatter, strict
        self._library: Any = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
            self._register()
        self._pass = FusionPass(config.post_grad_custom_post_pass, fuse, strict)
        config.post_grad_custom_post_pass = self._pass

    def _register(self) -> None:
        for key in KEYS:
            self._library.impl(GATHER, self._all_gather_matmul, key, allow_override=True)
            self._library.impl(SCATTER, self._matmul_reduce_scatter, key, allow_override=True)
            self._library.impl(SCALED_GATHER, self._all_gather_scaled_matmul, key, allow_override=True)
            self._library.impl(SCALED_SCATTER, self._scaled_matmul_reduce_scatter, key, allow_override=True)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        if [self] == _INSTALLED:
            uninstall()

    def remove(self) -> None:
        """Give the ops their kernels back."""
        self._library._destroy()
        if config.post_grad_custom_post_pass is self._pass:  # otherwise the user has set another one since
            config.post_grad_custom_post_pass = self._pass.before

    def _all_gather_matmul(
        self,
        a: Tensor,
        bs: Sequence[Tensor],
        gather_dim: int,
        group: str,
        *,
        return_A: bool = True,  # noqa: N803  (torch's name)
    ) -> tuple[Tensor | None, list[Tensor]]:
        _check(GATHER, a, bs, gather_dim, process_group(group).size())
        site = _site(GATHER, [a, *bs], (f"dimension {gather_dim}",), group)
        reason = _why_not([a, *bs]) or _why_not_gathered(a, bs, gather_dim)
        if reason is not None:
            self._refused(site, reason, a)
            given = (a, list(bs), gather_dim, group)
            if a.is_cuda:
                found: tuple[Tensor | None, list[Tensor]] = TORCH._fused_all_gather_matmul(*given, return_A=return_A)
                return found
            return _unfused_gather(*given, return_A)
        rows, between, copied = _rows_along(a, gather_dim)
        options: tuple[Any, ...] = (group, self.gather, None, None, None, return_A, "forward")

        def run() -> Any:
            weights = [b.t() for b in bs]
            return library.all_gather_matmul(rows, weights, [], [False] * len(bs), *options)

        flat = self._served(site, copied, run)
        whole = [x.view(x.shape[0] // prod(between), *between, x.shape[1]).movedim(0, gather_dim) for x in flat]
        return (whole[-1] if return_A else None), whole[: len(bs)]

    def _matmul_reduce_scatter(self, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group: str) -> Tensor:
        _check(SCATTER, a, [b], scatter_dim)
        site = _site(SCATTER, [a, b], (f"dimension {scatter_dim}", reduce_op), group)
        if reduce_op not in ("sum", "avg"):
            raise ValueError(f"{SCATTER}: reduce_op is 'sum' or 'avg', got {reduce_op!r}")
        _check_divides(SCATTER, (*a.shape[:-1], b.shape[1]), scatter_dim, site.ranks)
        reason = _why_not([a, b])
        if reason is not None:
            self._refused(site, reason, a)
            given = (a, b, reduce_op, scatter_dim, group)
            if a.is_cuda:
                found: Tensor = TORCH._fused_matmul_reduce_scatter(*given)
                return found
            return _unfused_scatter(*given)
        last = scatter_dim == a.dim() - 1
        if last:  # the columns of D are the rows of its transpose, which is b.t() @ a.t()
            rows, weight, between = with_rows(b.t()), a.flatten(0, -2), [*a.shape[:-1]]
            what = "D is" if rows.data_ptr() == b.data_ptr() else "B and D are"
            copied = f"{what} copied, because the last dimension is scattered"
        else:
            weight = b.t()
            rows, between, copied = _rows_along(a, scatter_dim)
            copied = "; ".join([copied] * bool(copied) + ["D is copied"] * bool(scatter_dim))
        d: Tensor = self._served(
            site,
            copied,
            lambda: library.matmul_reduce_scatter(rows, weight, None, group, self.scatter, None, None, None),
        )
        if reduce_op == "avg":
            d = d.div_(site.ranks)
        if last:
            return d.t().contiguous().view(*between, d.shape[0])
        d = d.view(d.shape[0] // prod(between), *between, d.shape[1])
        return d.movedim(0, scatter_dim).contiguous()

    def _all_gather_scaled_matmul(
        self,
        a: Tensor,
        bs: Sequence[Tensor],
        a_scale: Tensor,
        b_scales: Sequence[Tensor],
        gather_dim: int,
        group: str,
        biases: Sequence[Tensor | None],
        result_scales: Sequence[Tensor | None],
        out_dtypes: Sequence[torch.dtype | None],
        use_fast_accum: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor]]:
        size, rank = library.size_and_rank(group)
        _check(SCALED_GATHER, a, bs, gather_dim, size)
        site = _site(SCALED_GATHER, [a, *bs], (f"dimension {gather_dim}",), group)
        out_dtypes = TORCH._maybe_convert_scalar_types_to_dtypes(out_dtypes)
        reason = _why_not_in_fp8([a, *bs], [*result_scales], out_dtypes) or _why_not_gathered(a, bs, gather_dim)
        if reason is not None:
            self._refused(site, reason, a)
            run: Any = TORCH._fused_all_gather_scaled_matmul
            run = run if a.is_cuda else _unfused_scaled_gather
            terms = (biases, result_scales, out_dtypes, use_fast_accum)
            refused: tuple[Tensor, list[Tensor]] = run(a, bs, a_scale, b_scales, gather_dim, group, *terms)
            return refused
        mode = TORCH._check_and_verify_fp8_all_gather_scale_mode(a, a_scale, gather_dim, size)
        if mode.value == "row-wise-replicated":
            a_scale = a_scale.chunk(size, gather_dim)[rank]
        rows, between, copied = _rows_along(a, gather_dim)
        if a_scale.numel() > 1:
            a_scale = a_scale.movedim(gather_dim, 0).flatten(0, -2)
        scope: ScalingScope = "global" if mode.value == "tensor-wise" else "shard"
        qa = _in_fp8(rows, a_scale, scope)
        qbs = [
            _in_fp8(b.t(), scale.t() if scale.numel() > 1 else scale, "shard")
            for b, scale in zip(bs, b_scales, strict=True)
        ]
        out_dtype = out_dtypes[0]
        assert out_dtype is not None
        added = [None if bias is None else bias.to(out_dtype) for bias in biases]
        results, whole = self._served(
            site,
            copied,
            lambda: quantized.gather_products(qa, qbs, added, group, out_dtype, None, None, True, schedule=self.gather),
        )
        flat = [whole.codes, *results]
        gathered, *found = (
            x.view(x.shape[0] // prod(between), *between, x.shape[1]).movedim(0, gather_dim) for x in flat
        )
        return gathered, found

    def _scaled_matmul_reduce_scatter(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        reduce_op: str,
        scatter_dim: int,
        scatter_dim_of_a: int,
        group: str,
        output_shape: Sequence[int] | None = None,
        bias: Tensor | None = None,
        result_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        shape = [*a.shape[:-1], b.shape[1]] if output_shape is None else list(output_shape)
        _check(SCALED_SCATTER, a, [b], scatter_dim_of_a)
        site = _site(SCALED_SCATTER, [a, b], (f"dimension {scatter_dim} of {shape}", reduce_op), group)
        if reduce_op not in ("sum", "avg"):
            raise ValueError(f"{SCALED_SCATTER}: reduce_op is 'sum' or 'avg', got {reduce_op!r}")
        _check_divides(SCALED_SCATTER, shape, scatter_dim, site.ranks)
        reason = _why_not_in_fp8([a, b], [result_scale], [out_dtype])
        if bias is not None:
            reason = "a bias is added to the product of each rank, and so once for each rank to their sum"
        elif scatter_dim == len(shape) - 1:
            reason = "the last dimension is scattered"
        if reason is not None:
            self._refused(site, reason, a)
            run: Any = TORCH._fused_scaled_matmul_reduce_scatter
            run = run if a.is_cuda else TORCH._fused_scaled_matmul_reduce_scatter_fallback
            terms = (
                reduce_op,
                scatter_dim,
                scatter_dim_of_a,
                group,
                shape,
                bias,
                result_scale,
                out_dtype,
                use_fast_accum,
            )
            refused: Tensor = run(a, b, a_scale, b_scale, *terms)
            return refused

        def rows(x: Tensor) -> Tensor:
            """Rows in the order in which they are scattered."""
            return x.reshape(*shape[:-1], x.shape[-1]).movedim(scatter_dim, 0).flatten(0, -2)

        qa = _in_fp8(rows(a), rows(a_scale) if a_scale.numel() > 1 else a_scale, "shard")
        qb = _in_fp8(b.t(), b_scale.t() if b_scale.numel() > 1 else b_scale, "shard")
        copied = (
            "A is copied, because the dimension that is scattered is not the first; D is copied" if scatter_dim else ""
        )
        assert out_dtype is not None
        (d,) = self._served(
            site, copied, lambda: quantized.product_of("gemm+rs", qa, qb, None, group, out_dtype, schedule=self.scatter)
        )
        if reduce_op == "avg":
            d = d.div_(site.ranks)
        between = [*shape[:scatter_dim], *shape[scatter_dim + 1 : -1]]
        d = d.view(d.shape[0] // prod(between), *between, d.shape[1])
        found: Tensor = d.movedim(0, scatter_dim).contiguous()
        return found

    def _served(self, site: CallSite, copied: str, run: Callable[[], Any]) -> Any:
        with torch.no_grad(), noting(copied):
            found = run()
        assert CALLS.last is not None
        REPORT.add_served(site, CALLS.last)
        return found

    def _refused(self, site: CallSite, reason: str, a: Tensor) -> None:
        runs = "torch's own implementation ran" if a.is_cuda else "a collective and GEMMs ran, one after the other"
        if self.strict:
            raise NotFusedError(f"{site}: distgemm does not compute it, because {reason}")
        REPORT.not_served[site, f"{runs}, because {reason}"] += 1


_INSTALLED: list[Installation] = []


def install(*, gather: str = "auto", scatter: str = "auto", fuse: bool = True, strict: bool = False) -> Installation:
    """Let distgemm compute torch's fused ops of tensor parallelism, in this process.

    These are ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, and with scales of fp8
    ``fused_all_gather_scaled_matmul`` and ``fused_scaled_matmul_reduce_scatter``, on CUDA and CPU tensors. All ranks
    install. A gather along the last dimension of A, dtypes that :func:`distgemm.all_gather_matmul` does not take,
    results in fp8, and a bias of ``fused_scaled_matmul_reduce_scatter`` go to torch's own implementation; on CPU
    tensors, where torch has none, to a collective and GEMMs. :func:`distgemm.report` says what ran.

    In graphs that inductor compiles from then on, its pass ``micro_pipeline_tp`` replaces a gather before a GEMM, and a
    scatter behind one, by these ops.

    Args:
        gather: the schedule of gathers, as in :func:`distgemm.all_gather_matmul`.
        scatter: the schedule of scatters, as in :func:`distgemm.matmul_reduce_scatter`.
        fuse: run inductor's pass on all graphs; False: only where ``torch._inductor.config._micro_pipeline_tp`` is set,
            on groups with torch's symmetric memory.
        strict: raise NotFusedError where distgemm does not compute a call, and where inductor compiles a graph with a
            collective beside a GEMM that it has not fused.

    Returns:
        A context manager that uninstalls at its end; without ``with``, call :func:`uninstall`.

    Raises:
        RuntimeError: if it is installed already.
        ValueError: if there is no such schedule, or if it computes something else.
    """
    check_schedule(gather, None, {"ag+gemm": GATHER})
    check_schedule(scatter, None, {"gemm+rs": SCATTER})
    boolean("install: fuse", fuse)
    boolean("install: strict", strict)
    if _INSTALLED:
        raise RuntimeError("distgemm.install() was called before: distgemm.uninstall() comes first")
    REPORT.clear()
    _INSTALLED.append(Installation(gather, scatter, fuse, strict))
    return _INSTALLED[0]


def uninstall() -> None:
    """Give torch's fused ops their own implementation back. The report stays.

    Raises:
        RuntimeError: if nothing is installed.
    """
    if not _INSTALLED:
        raise RuntimeError("distgemm.install() was not called, or its context has ended")
    _INSTALLED.pop().remove()


def _check(op: str, a: Tensor, bs: Sequence[Tensor], dim: int, gathers: int = 1) -> None:
    """Check shapes, as torch's own implementation does; ``gathers``: ranks, if A is gathered along ``dim``."""
    given = ", ".join(str(tuple(x.shape)) for x in (a, *bs))
    if a.dim() < 2 or any(b.dim() != 2 for b in bs):
        raise ValueError(f"{op}: A is (..., k) with at least two dimensions, B is (k, n), got {given}")
    if not 0 <= dim < a.dim():
        raise ValueError(f"{op}: the dimension is 0 to {a.dim() - 1}, got {dim}")
    k = a.shape[-1] * (gathers if dim == a.dim() - 1 else 1)
    if any(b.shape[0] != k for b in bs):
        raise ValueError(f"{op}: B is (k, n) with k = {k}, got {given}")


def _site(op: str, operands: Sequence[Tensor], details: tuple[str | int, ...], group: str) -> CallSite:
    shapes = tuple(tuple(x.shape) for x in operands)
    return CallSite(op, shapes, operands[0].dtype, details, process_group(group).size())


def _rows_along(a: Tensor, dim: int) -> tuple[Tensor, list[int], str]:
    """A as a matrix with contiguous rows, those of one index of ``dim`` one after the other.

    Also the extents of the other dimensions but the last, and "", or that the matrix is a copy.
    """
    moved = a.movedim(dim, 0)
    rows = with_rows(moved.flatten(0, -2))
    copied = f"A is copied, because in memory dimension {dim} is not the outermost one, or the last is not contiguous"
    return rows, [*moved.shape[1:-1]], "" if rows.data_ptr() == a.data_ptr() else copied


def _check_divides(op: str, shape: Sequence[int], dim: int, ranks: int) -> None:
    if shape[dim] % ranks:
        raise ValueError(f"{op}: {ranks} ranks divide the dimension that is scattered, got {dim} of {tuple(shape)}")


def _why_not(operands: Sequence[Tensor]) -> str | None:
    """Why distgemm does not multiply these; None: it does."""
    if TORCH._is_test_mode:
        return "torch's ops are in their test mode"
    a = operands[0]
    if a.dtype not in library.DTYPE_NAMES:
        return f"distgemm's functions do not take {a.dtype}"
    if any(x.dtype != a.dtype for x in operands):
        return "the operands have several dtypes"
    if any(not x.numel() for x in operands):
        return "an operand is empty"
    return None


def _why_not_in_fp8(
    operands: Sequence[Tensor], result_scales: Sequence[Tensor | None], out_dtypes: Sequence[torch.dtype | None]
) -> str | None:
    """Why distgemm does not multiply these with scales; None: it does."""
    if TORCH._is_test_mode:
        return "torch's ops are in their test mode"
    if other := [x.dtype for x in operands if x.dtype not in FP8_DTYPES]:
        return f"distgemm does not multiply {other[0]} with scales"
    if any(not x.numel() for x in operands):
        return "an operand is empty"
    if any(scale is not None for scale in result_scales):
        return "the result has a scale"
    if len(set(out_dtypes)) > 1:
        return "the results have several dtypes"
    if out_dtypes[0] not in library.DTYPE_NAMES:
        return f"distgemm has no results of {operands[0].dtype if out_dtypes[0] is None else out_dtypes[0]}"
    return None


def _in_fp8(codes: Tensor, scale: Tensor, scope: ScalingScope) -> Quantized:
    """A matrix with the scales that torch's ops take: one, or one for each row."""
    scaling = OperandScaling(None if scale.numel() == 1 else 1, None, scope)
    return Quantized(codes, scale.reshape(-1, 1), scaling)


def _why_not_gathered(a: Tensor, bs: Sequence[Tensor], gather_dim: int) -> str | None:
    if not bs:
        return "there is no B"
    if gather_dim == a.dim() - 1:
        return "A is gathered along its last dimension, over which the GEMM sums"
    return None


# --- the unfused programs, on CPU tensors ---------------------------------------------------------------


def _unfused_gather(
    a: Tensor, bs: Sequence[Tensor], gather_dim: int, group: str, return_gathered: bool
) -> tuple[Tensor | None, list[Tensor]]:
    size, _ = library.size_and_rank(group)
    op = torch.ops._c10d_functional
    parts = op.wait_tensor(op.all_gather_into_tensor(a.contiguous(), size, group)).chunk(size)
    whole = torch.cat(parts, gather_dim)
    return (whole if return_gathered else None), [whole @ b for b in bs]


def _unfused_scaled_gather(
    a: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    gather_dim: int,
    group: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    # gloo knows no fp8, and sends codes as bytes.
    gathered, _ = _unfused_gather(a.view(torch.uint8), [], gather_dim, group, True)
    assert gathered is not None
    whole = gathered.view(a.dtype)
    size, _ = library.size_and_rank(group)
    if TORCH._check_and_verify_fp8_all_gather_scale_mode(a, a_scale, gather_dim, size).value == "row-wise-sharded":
        scales, _ = _unfused_gather(a_scale, [], gather_dim, group, True)
        assert scales is not None
        a_scale = scales
    if a_scale.numel() > 1:
        a_scale = a_scale.flatten(0, -2)
    found = []
    for b, scale, *terms, out_dtype, fast in zip(
        bs, b_scales, biases, result_scales, out_dtypes, use_fast_accum, strict=True
    ):
        options = {"out_dtype": out_dtype, "use_fast_accum": fast}
        d = torch._scaled_mm(whole.flatten(0, -2), b, a_scale, scale, *terms, **options)
        found.append(d.view(*whole.shape[:-1], d.shape[1]))
    return whole, found


def _unfused_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group: str) -> Tensor:
    size, _ = library.size_and_rank(group)
    op = torch.ops._c10d_functional
    d = torch.cat((a @ b).chunk(size, scatter_dim))
    found: Tensor = op.wait_tensor(op.reduce_scatter_tensor(d, reduce_op, size, group))
    return found
