"""From metadata to executables, and the record of what ran."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Gemm
from distgemm.plan.patterns import does_pattern, schedule_does_pattern
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import process_group
from distgemm.runtime.collective.executable import CollectiveExecutable
from distgemm.runtime.executable import ExecutionConfig
from distgemm.schedulers import Pattern, list_schedules
from distgemm.simulator import arrivals
from distgemm.torch_ops.auto import measured_executable, select_schedule

if TYPE_CHECKING:
    from distgemm.tune.config import TunedConfig

__all__ = ["CACHED", "CallRecord", "Product", "executable", "last_call", "product", "record_calls", "resolve"]

Tensor = torch.Tensor

CACHED = 64
"""Executables that are kept for each group. The least recently used one goes first."""


@dataclass(frozen=True)
class CallRecord:
    """A product that ran on this rank.

    op:      who asked for it: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or "gather", which
             brings the input of all_gather_matmul a second time, for the gradient of its weights
    plan:    what was executed; ``plan.schedule`` and ``plan.link_bytes()`` say how, and how much moved
    options: of the schedule
    runtime: that executed it
    provider: of its GEMMs
    config:  what "auto" chose on a GPU, or the caller's unfused program, of which ``plan`` only says which shards it
             took; else None. ``config.text`` pins it: it may be given as the schedule
    """

    op: str
    plan: Plan
    options: tuple[tuple[str, Any], ...]
    runtime: str
    provider: str
    config: TunedConfig | None = None

    @property
    def unfused(self) -> bool:
        """Whether a collective and one product ran, and no plan."""
        return self.config is not None and self.config.method == "unfused"

    @property
    def not_overlapped(self) -> str | None:
        """Why nothing travels while something else is multiplied; None where it does."""
        if self.plan.world_size == 1:
            return "one rank: nothing moves"
        if self.unfused:
            return "unfused: a collective, and one product"
        if self.op == "gather":
            return "a gather alone: nothing is multiplied meanwhile"
        if _in_lockstep(self.plan):
            return "a chain with one chunk: each GEMM waits for the sum that has just been sent"
        return None

    def __str__(self) -> str:
        p = self.plan.problem
        ran = "unfused" if self.unfused else self.plan.schedule
        options = "".join(f", {name}={value}" for name, value in self.options)
        runtime = f"{self.runtime}, GEMMs by {self.provider}"
        if self.config is not None:
            gemm_streams = (
                ""
                if self.unfused
                else f" on {self.config.execution.gemm_streams} stream{'s' * (self.config.execution.gemm_streams > 1)}"
            )
            runtime += f"{gemm_streams}, {self.config.source} config"
        overlap = f"not overlapped, because {self.not_overlapped}" if self.not_overlapped else "overlapped"
        return (
            f"{self.op}: {ran}{options} on {self.plan.world_size} ranks, "
            f"m {p.m} x n {p.n} x k {p.k}, {p.dtype}; {runtime}; {overlap}"
        )


def _in_lockstep(plan: Plan) -> bool:
    """Whether each GEMM of a rank but the first one adds a sum that another rank has made in the iteration before."""
    every = {(op.rank, op.id): op for op in chain.from_iterable(plan.rank_ops)}
    waiting = 0
    for made, user in arrivals(plan):
        makers = [made] if isinstance(made, Gemm) else [every[made.rank, dep] for dep in made.deps]
        gemms = [op for op in makers if isinstance(op, Gemm)]
        if isinstance(user, Gemm) and gemms:
            if any(op.iteration != user.iteration - 1 for op in gemms):
                return False
            waiting += 1
    multiplied = [sum(isinstance(op, Gemm) for op in ops) for ops in plan.rank_ops]
    return waiting > 0 and waiting == sum(count - 1 for count in multiplied if count)


class _Last:
    """What ran, for whoever asks."""

    call: CallRecord | None = None
    recorders: dict[int, list[CallRecord]] = {}  # noqa: RUF012


def last_call() -> CallRecord:
    """What the last product of this process ran as: ``print(distgemm.last_call())``.

    A backward pass makes calls too: :func:`record_calls` has all of them. Raises ValueError before the first one.
    """
    if _Last.call is None:
        raise ValueError("nothing has run yet: call all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce")
    return _Last.call


@contextlib.contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """The list of calls that are made inside, forward and backward, of all threads of this process."""
    calls: list[CallRecord] = []
    _Last.recorders[id(calls)] = calls
    try:
        yield calls
    finally:
        del _Last.recorders[id(calls)]


def executable(
    plan: Plan, group: dist.ProcessGroup, device: torch.device, how: ExecutionConfig | None = None
) -> tuple[Any, str, str]:
    """A plan made ready for tensors on a device, the runtime's name and that of its GEMMs' provider.

    A collective call. What comes back is called as ``exe(a, b, c=None, alpha=, beta=, out=, gathered=)``. Raises
    ValueError where it is said how GPUs execute the plan, and the device is none.
    """
    if device.type == "cuda":
        from distgemm.runtime.cuda import compile_plan

        made = compile_plan(plan, how, group=group, device=device)
        return made, "CUDA runtime", made.provider
    if how is not None and how != ExecutionConfig():
        raise ValueError(
            f"provider, config, gemm_streams, waits, merge and copies are for GPUs, got {how} for {device}"
        )
    return CollectiveExecutable(plan, group, device), f"collective runtime over {dist.get_backend(group)}", "torch"


@dataclass(frozen=True)
class Product:
    """An executable and what it is called."""

    plan: Plan
    rank: int
    run: Any
    runtime: str
    provider: str
    options: tuple[tuple[str, Any], ...]
    config: TunedConfig | None = None

    def __call__(
        self, op: str, a: Tensor, b: Tensor, bias: Tensor | None = None, gathered: Tensor | None = None
    ) -> Tensor:
        """This rank's shard of A @ B.T + bias; all of A goes into ``gathered``."""
        more: dict[str, Any] = {} if gathered is None else {"gathered": gathered}
        if bias is not None and a.is_cuda:
            more["bias"] = bias
        elif bias is not None:
            # Added before the result is rounded, once: by the op that completes a tile.
            more |= {"c_shard": bias.expand(self.plan.shard_shape("D", self.rank)), "beta": 1.0}
        d: Tensor = self.run(_rows(a), _rows_or_columns(b), **more)
        call = CallRecord(op, self.plan, self.options, self.runtime, self.provider, self.config)
        _Last.call = call
        for calls in list(_Last.recorders.values()):
            calls.append(call)
        return d


def _rows(matrix: Tensor) -> Tensor:
    """A matrix with contiguous rows that lie apart: copies between ranks move rows."""
    return matrix if _lie_apart(*matrix.shape, *matrix.stride()) else matrix.contiguous()


def _rows_or_columns(matrix: Tensor) -> Tensor:
    """A matrix whose rows or columns are contiguous and lie apart, as GEMMs take it."""
    turned = matrix.t()
    fits = _lie_apart(*matrix.shape, *matrix.stride()) or _lie_apart(*turned.shape, *turned.stride())
    return matrix if fits else matrix.contiguous()


def _lie_apart(rows: int, columns: int, down: int, along: int) -> bool:
    """Whether rows are contiguous and do not overlap; gradients that are expanded do."""
    return (along == 1 or columns <= 1) and (down >= columns or rows <= 1)


def resolve(group_name: str) -> dist.ProcessGroup:
    """The group of this name: ops take names, which graphs can hold."""
    return process_group(group_name)


_products: dict[str, tuple[dist.ProcessGroup, OrderedDict[Any, Product]]] = {}


def product(
    pattern: Pattern, problem: GemmProblem, group_name: str, device: torch.device, schedule: str, chunks: int | None
) -> Product:
    """The executable for a product of a pattern: "ag+gemm", "gemm+rs" or "gemm+ar".

    Kept by what all ranks of the group have in common, in a list of its own for each group: so all ranks make, and
    drop, an executable in the same call. Making one is a collective call, and raises RuntimeError while the current
    stream is captured.
    """
    group = resolve(group_name)
    kept_for, products = _products.get(group_name, (None, OrderedDict()))
    if kept_for is not group:  # another group took the name of one that is gone
        _products[group_name] = (group, products := OrderedDict())
    key = (pattern, problem, schedule, chunks, device)
    found = products.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the stream is being captured, and {pattern} has no executable yet for m {problem.m}, n {problem.n}, "
                f"k {problem.k}, {problem.dtype}, schedule {schedule!r}: making one waits for the other ranks. Run the "
                "same forward and backward pass once before torch.cuda.graph"
            )
        found = products[key] = _make(pattern, problem, group, device, schedule, chunks)
        while len(products) > CACHED:
            products.popitem(last=False)
    products.move_to_end(key)
    return found


def _make(
    pattern: Pattern,
    problem: GemmProblem,
    group: dist.ProcessGroup,
    device: torch.device,
    schedule: str,
    chunks: int | None,
) -> Product:
    from distgemm.tune import TunedConfig, config_of

    size, rank = group.size(), dist.get_rank(group)
    if schedule == "auto" and chunks is None and device.type == "cuda":
        made = measured_executable(pattern, problem, group, device)
        selected = config_of(made)
        assert selected is not None
        runtime = _collective(selected, group) if selected.method == "unfused" else "CUDA runtime"
        return Product(made.plan, rank, made, runtime, made.provider, selected.options, selected)
    if schedule == "auto":
        schedule, options = select_schedule(pattern, problem, size)
        config = TunedConfig("plan", schedule, tuple(options.items()))
    else:
        config = TunedConfig.parse(schedule)
    if config.method == "unfused":
        return _unfused(pattern, problem, group, device, config, chunks)
    options = dict(config.options)
    if chunks is not None:
        if schedule != config.schedule and "chunks" in options:
            raise ValueError(f"schedule={schedule!r} says how many chunks there are, and chunks={chunks} does")
        options["chunks"] = chunks
    # Messages arrive where they are awaited: between replays of the collective runtime nothing can be overwritten.
    sync = "barrier" if device.type == "cuda" else "credit"
    plan = make_plan(problem, config.schedule, size, **({"sync": sync} | options))
    if not does_pattern(plan, pattern):
        fitting = [name for name in list_schedules() if schedule_does_pattern(name, pattern)]
        raise ValueError(
            f"{plan.schedule} is no schedule for {pattern}; schedule='auto', or one of {', '.join(fitting)}"
        )
    run, runtime, provider = executable(plan, group, device, config.execution)
    shown = tuple(sorted(options.items()))
    return Product(plan, rank, run, runtime, provider, shown)


def _unfused(
    pattern: Pattern,
    problem: GemmProblem,
    group: dist.ProcessGroup,
    device: torch.device,
    config: TunedConfig,
    chunks: int | None,
) -> Product:
    """The unfused program, for who asks for it."""
    from distgemm.runtime.unfused import UnfusedExecutable

    if chunks is not None:
        raise ValueError(f"the unfused program has no chunks, got {chunks}")
    made = UnfusedExecutable(problem, pattern, group, device, config.collective)
    return Product(made.plan, made.rank, made, _collective(config, group), made.provider, (), config)


def _collective(config: TunedConfig, group: dist.ProcessGroup) -> str:
    """By what the unfused program moves data."""
    if config.collective != "nccl":
        return f"symmetric memory, {config.collective}"
    backend = str(dist.get_backend(group))
    return "NCCL" if backend == "nccl" else backend
