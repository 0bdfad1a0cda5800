"""The unfused program as an executable: a collective and one GEMM. It is what a plan has to beat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)

from distgemm.arguments import instance
from distgemm.gemm.spec import Status
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import box_extents, box_size
from distgemm.plan.patterns import COLLECTIVES, Collective
from distgemm.plan.problem import QUANTIZED_DTYPES, GemmProblem
from distgemm.runtime.checks import (
    TORCH_DTYPES,
    Fields,
    backends,
    check_bias,
    check_gathered,
    check_gradients,
    check_scales,
    check_shards,
    compare,
    differences,
    problem_fields,
    raise_failures,
    refuse_groups,
    resolve_group,
    shard_dtype,
)
from distgemm.runtime.executable import Executable, untraced
from distgemm.runtime.groups import GroupRef, PerGroup, failing, raise_if_failed
from distgemm.runtime.torch_arguments import read_device
from distgemm.schedulers import PATTERNS, Pattern, check_pattern

__all__ = ["COLLECTIVES", "Collective", "UnfusedExecutable", "UnfusedReplay", "collective_status", "unfused_status"]

Tensor = torch.Tensor

SYMMETRIC_WORLD_SIZES = (2, 4, 8)
"""Numbers of ranks that torch has all-reduce kernels of symmetric memory for."""
SYMMETRIC_ALIGNMENT = 16
"""Bytes that these kernels write at once."""
BUFFER_ALIGNMENT = 256
DTYPES_16_BITS = ("bfloat16", "float16")

# Newer versions of torch have other names for these two, and warn of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def unfused_status(problem: GemmProblem, pattern: Pattern) -> Status:
    """Whether the unfused program computes the problem; falsy with the reason where it does not."""
    dtype, product = problem.dtype, _product_dtype(problem, pattern)
    if dtype == "float4_e2m1fn_x2" or dtype == "tfloat32" or (dtype in QUANTIZED_DTYPES and problem.scaling is None):
        without = " without scaling" if dtype in QUANTIZED_DTYPES else ""
        return Status(f"the unfused program has no products of {dtype}{without}")
    if problem.scaling is not None:
        return Status()  # products are in float32, which rounds to any type
    if product != dtype and not (dtype in DTYPES_16_BITS and product == "float32"):
        return Status(f"the unfused program multiplies {dtype} into {dtype} or, from 16 bits, float32, not {product}")
    return Status()


def collective_status(problem: GemmProblem, pattern: Pattern, collective: Collective, world_size: int) -> Status:
    """Whether a collective adds the unfused program's products on GPUs; falsy with the reason where it does not."""
    if collective == "nccl":
        return Status()
    if pattern != "gemm+ar":
        return Status(f"symmetric memory's {collective} collective is an all-reduce, and this is {pattern}")
    if world_size not in SYMMETRIC_WORLD_SIZES:
        return Status(
            f"symmetric memory's {collective} all-reduce is of {SYMMETRIC_WORLD_SIZES} ranks, here are {world_size}"
        )
    dtype = _product_dtype(problem, pattern)
    size = problem.l * problem.m * problem.n * TORCH_DTYPES[dtype].itemsize
    if dtype not in ("bfloat16", "float32") or size % SYMMETRIC_ALIGNMENT:
        return Status(
            f"symmetric memory's {collective} all-reduce adds multiples of {SYMMETRIC_ALIGNMENT} bytes of bfloat16 or "
            f"float32, here are {size} of {dtype}"
        )
    return Status()


def _product_dtype(problem: GemmProblem, pattern: Pattern) -> str:
    return str(problem.out_dtype if pattern == "ag+gemm" else problem.partial_dtype)


_scratch: PerGroup[dict[torch.device, Tensor]] = PerGroup(dict)

_symmetric: PerGroup[dict[torch.device, Tensor]] = PerGroup(dict)
"""Like ``_scratch``, in symmetric memory."""

_kept: dict[object, torch.UntypedStorage] = {}
"""Buffers that graphs of callers use: until the executable whose calls they have is released."""


class UnfusedExecutable:
    """The unfused program over torch.distributed (NCCL, or gloo on CPUs) and torch's products (cuBLAS).

    It satisfies :class:`distgemm.runtime.executable.Executable`. Making one is a collective call: all ranks of the
    group make it, and they compare their arguments.

    Buffers are allocated when it is made, and shared with the unfused executables of the same group. On GPUs each call
    waits for the last one on the device, as those of plans do, also in graphs and on other streams.

    Where a rank does not come, NCCL's watchdog ends a call of NCCL. Kernels of symmetric memory wait until the process
    ends.

    Args:
        problem: the problem.
        pattern: what it computes.
        group: the ranks; None: all.
        device: where shards lie; None: the current CUDA device if the group has NCCL, else the CPU.
        collective: what adds over ranks.

    Attributes:
        plan: a plan of the pattern's default schedule. It says which shards go in and come out, and is not executed.
        rank: this rank in the group.
        workspace_bytes: size of the buffers.

    Raises:
        ValueError: for what :func:`unfused_status` or :func:`collective_status` says cannot be computed. Also on all
            ranks where their arguments differ.
        RuntimeError: on all ranks where one has no memory; that one raises what torch raises.
    """

    def __init__(
        self,
        problem: GemmProblem,
        pattern: Pattern,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        collective: Collective = "nccl",
    ) -> None:
        instance("problem", problem, GemmProblem, "a distgemm.GemmProblem")
        check_pattern(pattern, PATTERNS)
        refuse_groups(problem)
        if not (status := unfused_status(problem, pattern)):
            raise ValueError(status.reason)
        self._group = GroupRef(resolve_group(group))
        raise_if_failed(self.group)
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if device is None:
            device = "cuda" if backends(self.group).get("cuda") == "nccl" else "cpu"
        device = read_device("device", device, ("cpu", "cuda"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if collective not in COLLECTIVES:
            raise ValueError(f"collective is one of {', '.join(COLLECTIVES)}, got {collective!r}")
        if not (status := collective_status(problem, pattern, collective, self.world_size)):
            raise ValueError(status.reason)
        if problem.scaling is not None and device.type != "cpu":
            raise ValueError(
                f"the unfused program multiplies scaled operands on CPUs, in float32; that says nothing about fp8 on a "
                f"{device.type} device"
            )
        if collective != "nccl" and device.type != "cuda":
            raise ValueError(f"symmetric memory's {collective} all-reduce is of GPUs, this is a {device.type}")
        self.pattern, self.device, self.collective = pattern, device, collective
        self.plan = make_plan(problem, pattern, self.world_size)
        self.provider = "cublas" if self.device.type == "cuda" else "torch"
        moved = "A" if pattern == "ag+gemm" else "D"
        boxes = [self.plan.box(moved, rank)[1] for rank in range(self.world_size)]
        # The rows of each rank in a gather or a scatter, and the most of them: collectives take equal blocks.
        self._rows = [slice(start, stop) for start, stop in boxes]
        self._most = max(stop - start for start, stop in boxes)
        equal = all(stop - start == self._most for start, stop in boxes)
        self._ieee = self.device.type == "cuda" and problem.dtype == "float32"
        self._blocked = pattern != "gemm+ar" and (problem.l > 1 or not equal)
        self._at = ""
        self._fields = {
            "call": f"a call of unfused {pattern}",
            "schedule": "unfused",
            "number of ranks": self.world_size,
            **problem_fields(problem),
            "collective": collective,
        }
        first = {"call": f"the first call of unfused {pattern}"}
        self._keeper = object()
        self._order: CallOrder | None = None
        if device.type == "cuda":
            from distgemm.runtime.cuda.order import call_order

            self._order = call_order(device)
        self._allocate(self._fields | first)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks. The executable does not keep the group alive.

        Raises:
            ValueError: once the group is destroyed.
        """
        return self._group()

    @property
    def transfers(self) -> str:
        """Who moves data between ranks."""
        if self.collective != "nccl":
            return f"symmetric memory, {self.collective}"
        backend = backends(self.group)[self.device.type]
        return "NCCL" if backend == "nccl" else backend

    def release(self) -> None:
        """Let buffers go that are kept for the caller's graphs with this executable: these are gone."""
        _kept.pop(self._keeper, None)

    @torch.inference_mode(False)  # buffers outlive the mode that is on now
    def _allocate(self, fields: Fields) -> None:
        """Take the buffers, and compare these fields of all ranks. A collective call.

        The unfused executables of a group share memory; they run one after the other. Where a new one needs more bytes,
        it gets new memory, and earlier ones keep theirs. Where a rank has no memory, all ranks raise.
        """
        p, size = self.plan.problem, self.world_size
        moved = (
            shard_dtype(self.plan, "A") if self.pattern == "ag+gemm" else TORCH_DTYPES[_product_dtype(p, self.pattern)]
        )
        columns = p.k if self.pattern == "ag+gemm" else p.n
        block = (p.l, self._most, columns)
        # "whole" is all of A, or this rank's partial sum of all of D. "block" is what one rank sends or gets; "blocks"
        # are those of all ranks.
        shapes: dict[str, tuple[int, ...]] = {"whole": (p.l, p.m, columns)}
        if self.pattern != "gemm+ar":
            shapes["block"] = block
        if self._blocked:
            shapes["blocks"] = (size, *block)
        sizes = {
            name: -(-prod(shape) * moved.itemsize // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
            for name, shape in shapes.items()
        }
        self.workspace_bytes = sum(sizes.values())
        of_group = (_scratch if self.collective == "nccl" else _symmetric).of(self.group)
        scratch, problem = of_group.get(self.device), None
        grows = scratch is None or scratch.numel() < self.workspace_bytes
        if grows:
            try:
                scratch = self._memory(self.workspace_bytes)
            except Exception as error:  # raised below, once all ranks know of it
                problem = error
        reports = compare(fields, self.group, self.device, problem)
        failure = f"have no memory for the {self.workspace_bytes} bytes of the unfused program"
        raise_failures(reports, problem, RuntimeError, failure)
        assert scratch is not None
        if grows:
            if self.collective != "nccl":
                symmetric_memory.rendezvous(scratch, self.group)
            of_group[self.device] = scratch
        self._buffers: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            used = scratch[at : at + prod(shape) * moved.itemsize]
            self._buffers[name] = used.view(moved).view(shape)
            at += sizes[name]

    def _memory(self, size: int) -> Tensor:
        if self.collective == "nccl":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        return symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)

    @contextlib.contextmanager
    def _in_order(self, captured: bool) -> Iterator[None]:
        """Behind the last call on this GPU, which may use the same buffers on another stream."""
        if self._order is None:
            yield
            return
        used, order = self._buffers["whole"], self._order
        stream = torch.cuda.current_stream(self.device)
        with order.issuing():
            if captured:
                _kept[self._keeper] = used.untyped_storage()  # the caller's graph may outlive this executable
                order.begin_captured(stream.cuda_stream)
            else:
                if self.collective == "nccl":
                    used.record_stream(stream)
                order.begin(stream.cuda_stream)
            yield
            (order.end_captured if captured else order.end)(stream.cuda_stream)

    def __call__(
        self,
        a_shard: Tensor,
        b_shard: Tensor,
        c_shard: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        out: Tensor | None = None,
        gathered: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of D = alpha * A @ B.T + beta * C + bias; all ranks of the group call it in one order.

        For "ag+gemm" ::

            dist.all_gather_into_tensor(a, a_shard, group)
            d = alpha * a @ b_shard.T + beta * c_shard + bias

        for "gemm+rs" and "gemm+ar" ::

            partial = alpha * a_shard @ b_shard.T
            dist.reduce_scatter_tensor(d, partial, group=group)  # or dist.all_reduce(partial, group=group)
            d += beta * c_shard + bias

        where ``torch.ops.symm_mem`` has the all-reduces other than NCCL's.

        The collective sums in an order of its own, and rounds to ``problem.partial_dtype`` as it does so. C and the
        bias are rounded to ``problem.out_dtype`` one after the other.

        Args:
            a_shard: as :class:`distgemm.CudaExecutable` takes it, like all that follow.
            b_shard: this rank's shard of B.
            c_shard: this rank's shard of C; read only where ``beta`` is not 0.
            alpha: factor of A @ B.T.
            beta: factor of C.
            bias: one row of D's shard.
            scale_a: with ``problem.scaling``, the scales of this rank's shard of A; it gathers them with A.
            scale_b: with ``problem.scaling``, the scales of this rank's shard of B.
            out: where D goes, instead of a new tensor.
            gathered: where all of A goes, with "ag+gemm".

        Raises:
            ValueError: for tensors of another shape, dtype or device. A rank that raises has sent
                nothing and may call again; the others wait for it. On CPUs also on all ranks where they call different
                executables, or with another ``alpha``, ``beta`` or bias.
            RuntimeError: where a rank is gone, or does not come within the group's timeout. The error names rank and
                collective. ``out`` and ``gathered`` are NaN then, and the group takes no further calls.
        """
        if torch.compiler.is_dynamo_compiling():
            terms: dict[str, Any] = {"alpha": alpha, "beta": beta, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
            return untraced(self, a_shard, b_shard, c_shard, **terms, out=out, gathered=gathered)
        group = self.group
        raise_if_failed(group)
        check_gradients(self.rank, a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered)
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        self._check(given, bias, gathered)
        scales = check_scales(self.plan, self.rank, self.device, scale_a, scale_b)
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        d = given["D"]
        a, b, whole_d = (x if x.dim() == 3 else x.unsqueeze(0) for x in (a_shard, b_shard, d))
        c = None if not beta or c_shard is None else c_shard if c_shard.dim() == 3 else c_shard.unsqueeze(0)
        odd = ""
        where = f"unfused {self.pattern} failed on rank {self.rank} at"
        # A capture sends nothing, so a failed one leaves the ranks as they were.
        failures = (
            contextlib.nullcontext() if captured else failing(group, lambda: f"{where} {self._at}", (d, gathered))
        )
        with self._in_order(captured), failures:
            self._at = f"the comparison of calls before the {self._collective_name}"
            if self.device.type == "cpu":
                terms = {"alpha": float(alpha), "beta": float(beta), "bias": "none" if bias is None else "given"}
                odd = differences(self._fields | terms, group, self.device).difference
            if not odd:
                self._at = f"the {self._collective_name}"
                with torch.no_grad(), _ieee() if self._ieee else contextlib.nullcontext():
                    if self.pattern == "ag+gemm":
                        whole = self._gather(a, gathered)
                        if scales:
                            whole, b = self._scaled_whole(whole, scales["SFA"]), self._scaled("B", b, scales["SFB"])
                        _multiply(whole, b, whole_d, alpha, c, beta, bias)
                    else:
                        if scales:
                            a, b = self._scaled("A", a, scales["SFA"]), self._scaled("B", b, scales["SFB"])
                        self._reduce(a, b, whole_d, alpha)
                        _add(whole_d, c, beta, bias)
        if odd:
            raise ValueError(odd)
        return d

    @property
    def _collective_name(self) -> str:
        """The collective and its tile, for messages."""
        p = self.plan.problem
        if self.pattern == "ag+gemm":
            return f"all-gather of A[0:{p.l}, 0:{p.m}, 0:{p.k}]"
        name = "all-reduce" if self.pattern == "gemm+ar" else "reduce-scatter"
        return f"{name} of D[0:{p.l}, 0:{p.m}, 0:{p.n}]"

    def _check(self, given: dict[str, Tensor], bias: Tensor | None, gathered: Tensor | None) -> None:
        d = given["D"]
        check_bias(self.rank, bias, d)
        if gathered is None:
            return
        if self.pattern != "ag+gemm":
            raise ValueError(f"{self.pattern} does not bring all of A to rank {self.rank}: there is no gathered")
        check_gathered(self.plan, self.rank, gathered, given)

    def _gather(self, a: Tensor, gathered: Tensor | None) -> Tensor:
        """All of A, (l, m, k), in ``gathered`` if there is one."""
        whole = self._buffers["whole"]
        if gathered is not None:
            whole = gathered if gathered.dim() == 3 else gathered.unsqueeze(0)
        if not self._blocked:
            target = whole if whole.is_contiguous() else self._buffers["whole"]
            _all_gather(_bytes(target[0]), _bytes(self._dense(a)[0]), group=self.group)
            if target is not whole:
                whole.copy_(target)
            return whole
        block, blocks = self._buffers["block"], self._buffers["blocks"]
        block[:, : a.shape[1]] = a
        _all_gather(_bytes(blocks.flatten(0, 1)), _bytes(block), group=self.group)
        for rows, found in zip(self._rows, blocks, strict=True):
            whole[:, rows] = found[:, : rows.stop - rows.start]
        return whole

    def _scaled_whole(self, whole: Tensor, scales: Tensor) -> Tensor:
        """All of A times its scales, which it gathers, in float32."""
        boxes = [self.plan.box("SFA", rank) for rank in range(self.world_size)]
        if all(box == boxes[0] for box in boxes):  # every rank has them
            parts = [scales] * self.world_size
        else:
            mine = scales.contiguous().view(-1).view(torch.uint8)
            sent = mine.new_zeros(max(map(box_size, boxes)) * scales.element_size())
            sent[: mine.numel()] = mine
            found = [torch.empty_like(sent) for _ in boxes]
            dist.all_gather(found, sent, group=self.group)
            parts = [
                each.view(scales.dtype)[: box_size(box)].view(box_extents(box))
                for each, box in zip(found, boxes, strict=True)
            ]
        scaled = [self._scaled("A", whole[:, rows], part) for rows, part in zip(self._rows, parts, strict=True)]
        return torch.cat(scaled, dim=1)

    def _scaled(self, operand: str, x: Tensor, scales: Tensor) -> Tensor:
        """The elements of an operand times their scales, in float32."""
        scaling = self.plan.problem.scaling
        assert scaling is not None
        factors = scales if scales.dim() == 3 else scales.unsqueeze(0)
        scaled: Tensor = x.float() * scaling[operand].expand(factors.float(), *x.shape[1:])
        return scaled

    def _dense(self, a: Tensor) -> Tensor:
        """A shard in contiguous memory, as collectives send it."""
        if a.is_contiguous():
            return a
        return self._buffers["block"][:, : a.shape[1]].copy_(a)

    def _reduce(self, a: Tensor, b: Tensor, d: Tensor, alpha: float) -> None:
        """Put the sum of the products over ranks, or this rank's rows of it, in D."""
        partial = self._buffers["whole"]
        direct = d.is_contiguous() and d.dtype == partial.dtype
        if self.collective != "nccl":
            _multiply(a, b, partial, alpha)
            if self.collective == "two-shot":  # in place all ranks meet twice, three times with another tensor
                summed = torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", self.group.group_name)
            else:
                # This kernel checks the address of a tensor and its offset in its storage.
                starts = (d.data_ptr(), d.storage_offset() * d.element_size())
                aligned = not any(start % SYMMETRIC_ALIGNMENT for start in starts)
                summed = d if direct and aligned else torch.empty_like(partial)
                torch.ops.symm_mem.one_shot_all_reduce_out(partial, "sum", self.group.group_name, summed)
        elif self.pattern == "gemm+ar":
            summed = d if direct else partial
            _multiply(a, b, summed, alpha)
            dist.all_reduce(summed, group=self.group)
        elif not self._blocked:
            _multiply(a, b, partial, alpha)
            summed = d if direct else self._buffers["block"]
            _reduce_scatter(summed[0], partial[0], group=self.group)
        else:
            _multiply(a, b, partial, alpha)
            block, blocks = self._buffers["block"], self._buffers["blocks"]
            for rows, sent in zip(self._rows, blocks, strict=True):
                sent[:, : rows.stop - rows.start] = partial[:, rows]
            _reduce_scatter(block, blocks.flatten(0, 1), group=self.group)
            summed = block[:, : d.shape[1]]
        if summed is not d:
            d.copy_(summed)

    def capture(self, a_shard: Tensor, b_shard: Tensor, c_shard: Tensor | None = None, **options: Any) -> UnfusedReplay:
        """A CUDA graph of one call on these tensors, to be replayed any number of times. It makes one call first.

        Args:
            a_shard: as a call takes it.
            b_shard: as a call takes it.
            c_shard: as a call takes it.
            **options: the keyword arguments of a call. Where ``out`` is None, D is a new tensor: ``replay.out``.

        Raises:
            ValueError: on CPUs.
        """
        if self.device.type != "cuda":
            raise ValueError(f"graphs are of GPUs, this executable is on {self.device}")
        out = self(a_shard, b_shard, c_shard, **options)
        options = options | {"out": out}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            self(a_shard, b_shard, c_shard, **options)
        return UnfusedReplay(graph, out, (self, a_shard, b_shard, c_shard, options))


class UnfusedReplay:
    """A recorded call. Calling it replays it on the current stream.

    Attributes:
        graph: the graph.
        out: the tensor that it writes.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, out: Tensor, kept: tuple[Any, ...]) -> None:
        self.graph, self.out = graph, out
        self._kept = kept

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.out


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """Multiply float32 in full precision on GPUs, whatever torch's setting, as the GEMMs of plans do."""
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    alpha: float,
    c: Tensor | None = None,
    beta: float = 0.0,
    bias: Tensor | None = None,
) -> None:
    """out = alpha * a @ b.mT + beta * c + bias, all (l, rows, columns)."""
    single = a.shape[0] == 1
    x, y, d = (a[0], b[0].mT, out[0]) if single else (a, b.mT, out)
    if out.dtype != a.dtype:
        if a.dtype == torch.float32:  # scaled operands
            torch.mul(a @ b.mT, alpha, out=out)
            _add(out, c, beta, bias)
            return
        if a.is_cuda:
            (torch.mm if single else torch.bmm)(x, y, out.dtype, out=d)
        else:  # torch has no such product on CPUs
            torch.matmul(x.to(out.dtype), y.to(out.dtype), out=d)
        if alpha != 1.0:
            out.mul_(alpha)
        _add(out, c, beta, bias)
        return
    if c is not None:
        added, factor = (c[0] if single else c), beta
    elif bias is not None:
        added, factor = bias, 1.0
    else:
        added, factor = d, 0.0
    if factor == 0.0 and alpha == 1.0:
        torch.matmul(x, y, out=d)
        return
    (torch.addmm if single else torch.baddbmm)(added, x, y, beta=factor, alpha=alpha, out=d)
    if c is not None:
        _add(out, None, 0.0, bias)


def _bytes(x: Tensor) -> Tensor:
    """A tensor as collectives take it: they gather bytes of types of 8 bits."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _add(out: Tensor, c: Tensor | None, beta: float, bias: Tensor | None) -> None:
    if c is not None:
        out.add_(c, alpha=beta)
    if bias is not None:
        out.add_(bias)


if TYPE_CHECKING:
    from distgemm.runtime.cuda.order import CallOrder

    _satisfies_protocol: type[Executable] = UnfusedExecutable
