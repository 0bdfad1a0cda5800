"""From the metadata of a call to its executable, and the record of what ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from distgemm.arguments import instance, member
from distgemm.plan.ops import Gemm
from distgemm.plan.patterns import does_pattern, schedule_does_pattern
from distgemm.plan.plan import Plan, once_for_structure
from distgemm.plan.problem import QUANTIZED_DTYPES, GemmProblem
from distgemm.runtime.checks import compare, problem_fields, process_group
from distgemm.runtime.collective.executable import CollectiveExecutable
from distgemm.runtime.executable import EXECUTION_FIELDS, PER_TILE, Executable, ExecutionConfig
from distgemm.runtime.gathering import GatheredChunk
from distgemm.runtime.groups import GroupRef, PerGroup, raise_if_failed, ranks_per_host
from distgemm.schedulers import PATTERNS, Pattern, list_schedules
from distgemm.simulator import arrivals
from distgemm.torch_ops.needs import Need, note_need, recording

if TYPE_CHECKING:
    from distgemm.tune import TunedConfig

__all__ = [
    "CHAIN_TOKENS",
    "KEPT_BYTES",
    "ONE_SHOT_TOKENS",
    "PREPARED",
    "CallRecord",
    "Function",
    "KeptCalls",
    "PreparedCall",
    "is_tuned",
    "last_call",
    "named_config",
    "noting",
    "prepare",
    "record_calls",
    "select_schedule",
    "size_of",
]

Tensor = torch.Tensor
Function = Literal[
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "all_to_all_matmul",
    "gather",
]

CALLER = "the caller"
"""Who computes the GEMMs of a :func:`distgemm.gather`."""
GATHERS = ExecutionConfig(provider="cublas", gemm_streams=1)
"""How GPUs execute a plan whose chunks the caller multiplies: on its stream, without kernels to compile."""
KEPT_BYTES = 512 << 20
"""The most memory of the executables that are kept for each group, in bytes of host memory as :func:`size_of` estimates
it. Those that were used least recently are dropped first. Their workspaces do not count: executables share one."""

EXECUTABLE_BYTES = 16 << 10
"""Estimated host memory of an executable besides its ops, in bytes."""

OP_BYTES = 1 << 10
"""Estimated host memory of an op of an executable, with its views, tensors and nodes of graphs, in bytes."""


# --- the rule of "auto" on CPUs -----------------------------------------------------------------------------

CHAIN_TOKENS = 6144
"""From this number of tokens on, a chain is faster than pairwise sums, as docs/which_schedule.md predicts for Llama
70B."""
ONE_SHOT_TOKENS = 256
"""Up to this number of tokens, one hop of an all-reduce is faster than two on CPUs (docs/measurements_parts.md)."""

RULES: dict[Pattern, tuple[tuple[int, str, int], ...]] = {
    "ag+gemm": ((0, "all_gather_1d_tiling_cd_rotating_a", 1),),
    "gemm+rs": (
        (CHAIN_TOKENS, "reduce_scatter_1d_tiling_a_rotating_c", 2),
        (0, "reduce_scatter_1d_pairwise_a", 1),
    ),
    "gemm+ar": (
        (CHAIN_TOKENS, "all_reduce_1d_tiling_a_rotating_c", 2),
        (ONE_SHOT_TOKENS + 1, "all_reduce_1d_pairwise_a", 1),
        (0, "all_reduce_1d_one_shot_a", 1),
    ),
    "gemm+a2a": ((0, "all_to_all_1d_rotating_d", 1),),
    "a2a+gemm": ((0, "all_to_all_1d_rotating_a", 1),),
}
"""Rows (fewest tokens, schedule, chunks) of each pattern. The first row that has enough tokens is taken."""


NESTED = "tensor_parallel_2d_nested"
"""The schedule of two others, one across hosts and one inside each."""


def select_schedule(
    pattern: Pattern, problem: GemmProblem, ranks_per_host: int | None = None
) -> tuple[str, dict[str, Any]]:
    """The schedule and its options that "auto" takes for CPU tensors, and for CUDA tensors with a number of chunks.

    For an all-to-all with unequal heads or copies, "auto" takes them for all tensors.

    An all-gather and an all-to-all take each shard directly from its owner. Sums travel around the ring in two chunks
    if there are many tokens, and otherwise go directly to their owner. An all-reduce takes the schedule of its
    reduce-scatter, and for few tokens the one-shot schedule: every rank gets all parts and adds them itself.

    On several hosts, "auto" nests this schedule in itself, across hosts and inside each host, unless there are copies.

    Args:
        pattern: what the ranks do: "ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a" or "a2a+gemm".
        problem: the GEMM over all ranks.
        ranks_per_host: number of ranks that share memory; None: all.
    """
    member("pattern", pattern, RULES)
    instance("problem", problem, GemmProblem, "a distgemm.GemmProblem")
    schedule, chunks = next((name, chunks) for tokens, name, chunks in RULES[pattern] if problem.m >= tokens)
    if ranks_per_host is None or problem.copies > 1:
        return schedule, {"chunks": chunks}
    return NESTED, {"across": schedule, "inside": schedule, "chunks": chunks}


# --- what ran -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallRecord:
    """A call that ran on this rank.

    Attributes:
        function: the function that was called: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
            "matmul_all_to_all" or "all_to_all_matmul". "gather" is a transfer for the gradient of a weight, such as the
            second gather of all_gather_matmul's input, or a :func:`distgemm.gather`.
        plan: the plan that was executed. ``plan.schedule`` is its schedule, ``plan.link_bytes()`` what it moved. For
            the unfused program, the plan only says which shards went in and out.
        options: options of the schedule, as (name, value) pairs.
        transfers: who moved data between ranks.
        provider: who computed the GEMMs; "the caller": the block of a :func:`distgemm.gather`.
        tuned: the configuration that "auto" selected on a GPU, or the unfused program of the caller; otherwise None.
            ``schedule=tuned.text`` pins it.
        note: what the caller did besides, such as a copy; "": nothing.
        kernels: on a GPU, where the kernels of the executable come from, the pack or the compiler, and whether faster
            ones could be compiled.
    """

    function: Function
    plan: Plan
    options: tuple[tuple[str, Any], ...]
    transfers: str
    provider: str
    tuned: TunedConfig | None = None
    note: str = ""
    kernels: str = ""

    @property
    def unfused(self) -> bool:
        """Whether the unfused program ran: a collective and one GEMM, and no plan."""
        return self.tuned is not None and self.tuned.method == "unfused"

    @property
    def not_overlapped(self) -> str | None:
        """Why no transfer overlaps with a GEMM; None if transfers do."""
        if self.plan.world_size == 1:
            return "one rank: nothing moves"
        if self.unfused:
            return "unfused: a collective and one GEMM"
        if self.transfers == PER_TILE:
            return None
        if self.function == "gather":
            return None if self.provider == CALLER else "a gather alone: there is no GEMM"
        if max(size.gemms for size in self.plan.sizes) == 1:
            return "one GEMM on each rank: transfers come before or after it"
        if _in_lockstep(self.plan):
            return "a chain with one chunk: each GEMM waits for the sum of the GEMM before it"
        return None

    @property
    def what_ran(self) -> str:
        """The schedule and its options, who moved and multiplied, and whether transfers overlap."""
        return f"{self._selected}; {self._details}"

    def __str__(self) -> str:
        p = self.plan.problem
        sizes = f"on {self.plan.world_size} ranks, m {p.m} x n {p.n} x k {p.k}, {p.dtype}"
        return f"{self.function}: {self._selected} {sizes}; {self._details}"

    @property
    def _selected(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options)
        return f"{'unfused' if self.unfused else self.plan.schedule}{options}"

    @property
    def _details(self) -> str:
        runtime = f"{self.transfers}, GEMMs by {self.provider}"
        if self.tuned is not None:
            if not self.unfused and self.transfers != PER_TILE:
                streams = self.tuned.execution.gemm_streams
                runtime += f" on {streams} stream{'s' * (streams > 1)}"
            runtime += f", {self.tuned.source} configuration"
        overlap = f"not overlapped, because {self.not_overlapped}" if self.not_overlapped else "overlapped"
        return "; ".join(filter(None, [runtime, overlap, self.note, self.kernels]))


@once_for_structure
def _in_lockstep(plan: Plan) -> bool:
    """Whether each GEMM of a rank, except the first, adds a sum that another rank made one iteration before."""
    every = {(op.rank, op.id): op for op in chain.from_iterable(plan.rank_ops)}
    waiting = 0
    for made, user in arrivals(plan):
        makers = [made] if isinstance(made, Gemm) else [every[made.rank, dep] for dep in made.deps]
        gemms = [op for op in makers if isinstance(op, Gemm)]
        if isinstance(user, Gemm) and gemms:
            if any(op.iteration != user.iteration - 1 for op in gemms):
                return False
            waiting += 1
    return waiting > 0 and waiting == sum(size.gemms - 1 for size in plan.sizes if size.gemms)


@dataclass
class CallLog:
    """The calls of this process: the last one, and the lists of :func:`record_calls`."""

    last: CallRecord | None = None
    lists: dict[int, list[CallRecord]] = field(default_factory=dict)

    def add(self, call: CallRecord) -> None:
        """Note a call that ran."""
        self.last = call
        if self.lists:
            for calls in list(self.lists.values()):
                calls.append(call)


CALLS = CallLog()
NOTE: ContextVar[str] = ContextVar("NOTE", default="")


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to the records of the calls inside the ``with`` block."""
    token = NOTE.set(note)
    try:
        yield
    finally:
        NOTE.reset(token)


def last_call() -> CallRecord:
    """The last call that ran in this process: ``print(distgemm.last_call())``.

    A backward pass makes calls, too: :func:`record_calls` lists all calls.

    Raises:
        ValueError: before the first call.
    """
    if CALLS.last is None:
        raise ValueError("nothing has run yet: call a function of distgemm, such as all_gather_matmul")
    return CALLS.last


@contextlib.contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """A list of the calls inside the ``with`` block, forward and backward, in all threads of this process."""
    calls: list[CallRecord] = []
    CALLS.lists[id(calls)] = calls
    try:
        yield calls
    finally:
        del CALLS.lists[id(calls)]


# --- executables --------------------------------------------------------------------------------------------


USES = count()


@dataclass(eq=False)
class PreparedCall:
    """An executable, ready for tensors of its problem, and what to record of its calls.

    Attributes:
        executable: computes this rank's shard.
        options: as in :class:`CallRecord`.
        group: the ranks that take part.
        tuned: as in :class:`CallRecord`.
        compared: whether the calls that all ranks have compared had a bias.
        used: grows with each call, to find the least recently used.
        dropped: whether it is in no cache any more. All ranks drop it in the same call.
    """

    executable: Executable
    options: tuple[tuple[str, Any], ...]
    group: GroupRef
    tuned: TunedConfig | None = None
    compared: set[bool] = field(default_factory=set)
    used: int = field(default_factory=USES.__next__)
    dropped: bool = False
    _records: dict[tuple[Function, str], CallRecord] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Whether :func:`prepare` would return it."""
        return not self.dropped and self.group.takes_calls()

    def __call__(
        self,
        function: Function,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        gathered: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of A @ B.T + bias; writes all of A to ``gathered`` if that is given."""
        if bias is not None and bias.is_neg():
            bias = bias.resolve_neg()
        a, b = with_rows(a), with_rows_or_columns(b)
        d = self.executable(a, b, bias=bias, gathered=gathered, scale_a=scale_a, scale_b=scale_b)
        self._record(function)
        return d

    def gather(self, a: Tensor) -> Iterator[GatheredChunk]:
        """The chunks of the gathered A, for the caller to multiply.

        Raises:
            ValueError: for the unfused program.
        """
        gather = getattr(self.executable, "gather", None)
        if gather is None:
            raise ValueError("gather: the unfused program has no chunks; schedule='auto', or the name of a schedule")
        yield from gather(with_rows(a))
        self._record("gather", CALLER)

    def _record(self, function: Function, provider: str | None = None) -> None:
        self.used = next(USES)  # not for a call that fails: it may fail on this rank alone
        note = NOTE.get()
        record = self._records.get((function, note))
        if record is None:
            plan, transfers = self.executable.plan, self.executable.transfers
            provider = provider or self.executable.provider
            kernels = getattr(self.executable, "kernels", "")  # only GPUs have them
            record = CallRecord(function, plan, self.options, transfers, provider, self.tuned, note, kernels)
            self._records[function, note] = record
        CALLS.add(record)


def with_rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are contiguous and do not overlap: copies between ranks move rows."""
    if matrix.is_neg():
        matrix = matrix.resolve_neg()
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    return matrix if _has_rows(rows, columns, row_stride, column_stride) else matrix.contiguous()


def with_rows_or_columns(matrix: Tensor) -> Tensor:
    """A matrix whose rows or columns are contiguous and do not overlap, as GEMMs take it."""
    if matrix.is_neg():
        matrix = matrix.resolve_neg()
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    fits = _has_rows(rows, columns, row_stride, column_stride) or _has_rows(columns, rows, column_stride, row_stride)
    return matrix if fits else matrix.contiguous()


def _has_rows(rows: int, columns: int, row_stride: int, column_stride: int) -> bool:
    """Whether rows are contiguous and do not overlap; the rows of an expanded gradient overlap."""
    return (column_stride == 1 or columns <= 1) and (row_stride >= columns or rows <= 1)


def size_of(plan: Plan) -> int:
    """Bytes of host memory that one rank's executable of a plan takes, estimated and the same on all ranks."""
    return EXECUTABLE_BYTES + OP_BYTES * max(size.ops for size in plan.sizes)


class KeptCalls(dict[Any, PreparedCall]):
    """The prepared calls of a group, by keys that all ranks of the group have in common.

    Attributes:
        size: bytes of host memory that they take, as :func:`size_of` estimates it.
        empty: keys of calls without tokens that all ranks have compared.
    """

    size = 0

    def __init__(self) -> None:
        super().__init__()
        self.empty: set[Any] = set()

    def add(self, key: Any, call: PreparedCall) -> None:
        """Keep a call, and drop those that were used least recently while all take more than KEPT_BYTES.

        The newest one stays in any case. All ranks drop the same calls, because sizes and the order of use are equal.
        """
        self[key] = call
        self.size += size_of(call.executable.plan)
        while self.size > KEPT_BYTES and len(self) > 1:
            oldest = self.pop(min(self, key=lambda each: self[each].used))
            oldest.dropped = True
            self.size -= size_of(oldest.executable.plan)

    def clear(self) -> None:
        """Drop all calls."""
        for call in self.values():
            call.dropped = True
        super().clear()
        self.size = 0


PREPARED: PerGroup[KeptCalls] = PerGroup(KeptCalls)
"""The prepared calls of each group."""


def prepare(
    pattern: Pattern,
    problem: GemmProblem | None,
    group_name: str,
    device: torch.device,
    schedule: str,
    chunks: int | None,
    biased: bool,
    turned_b: bool = False,
    caller_multiplies: bool = False,
) -> PreparedCall | None:
    """The prepared call for a problem, from the cache or new; None: there is nothing to run.

    Each group has its own cache, with keys that all ranks of the group have in common. So all ranks make and drop an
    executable in the same call. The first call of each kind is collective: the ranks compare their arguments, and make
    an executable if there is none. On CPUs each call without tokens is collective, as calls of executables are.

    Args:
        pattern: what the ranks do.
        problem: the GEMM over all ranks; None: they have no tokens, as far as this rank knows.
        group_name: name of the process group.
        device: device of the tensors.
        schedule: as in :func:`distgemm.all_gather_matmul`.
        chunks: as in :func:`distgemm.all_gather_matmul`.
        biased: whether the call has a bias.
        turned_b: whether columns of b are contiguous. It says which kernels are compiled ahead.
        caller_multiplies: whether the call is a :func:`distgemm.gather`.

    Raises:
        RuntimeError: for the first call of its kind while the current stream is captured, and where a rank is gone.
        ValueError: if the schedule does not fit. On all ranks if their arguments differ.
    """
    group = process_group(group_name)
    if recording():
        if caller_multiplies:
            raise RuntimeError("a model that calls distgemm.gather cannot be recorded: there are no chunks to hand out")
        if problem is not None:
            terms = (schedule, chunks, turned_b)
            note_need(
                Need(pattern, problem, group.size(), *terms, device.type, dist.get_rank(group), ranks_per_host(group))
            )
        return None
    raise_if_failed(group)
    calls = PREPARED.of(group)
    key = (pattern, problem, schedule, chunks, device, caller_multiplies, ranks_per_host(group))
    found = calls.get(key)
    if found is not None and biased in found.compared:
        return found
    if key in calls.empty and device.type == "cuda":
        return None
    called = "gather" if caller_multiplies else pattern
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        p = problem
        sizes = "without tokens" if p is None else f"for m {p.m}, n {p.n}, k {p.k}, {p.dtype}"
        raise RuntimeError(
            f"the stream is being captured, and {called} was not called yet {sizes}, schedule {schedule!r}"
            f"{', with a bias' * biased}: the first call waits for the other ranks. Run the same forward and backward "
            "pass once before torch.cuda.graph"
        )
    fields = {
        "call": f"the first call of {called}",
        "schedule": schedule,
        "chunks": chunks,
        "number of ranks": group.size(),
        "ranks per host": ranks_per_host(group) or group.size(),
        **({"m": 0} if problem is None else problem_fields(problem)),
        "device": device.type,
        "bias": "given" if biased else "none",
    }
    compare(fields, group, device)
    if problem is None:
        calls.empty.add(key)
        return None
    if found is None:
        found = make(pattern, problem, group, device, schedule, chunks, turned_b, caller_multiplies)
        calls.add(key, found)
    found.compared.add(biased)
    return found


def make(
    pattern: Pattern,
    problem: GemmProblem,
    group: dist.ProcessGroup,
    device: torch.device,
    schedule: str,
    chunks: int | None,
    turned_b: bool = False,
    caller_multiplies: bool = False,
) -> PreparedCall:
    """:func:`prepare` without the cache."""
    from distgemm import tune  # imported here so that layers can be made without the GPU code

    of_group = GroupRef(group)
    measures = not caller_multiplies and problem.dtype not in QUANTIZED_DTYPES  # the search multiplies without scales
    if is_tuned(problem, schedule, chunks) and device.type == "cuda" and measures:
        measured = tune.executable(problem, pattern, group, device=device, turned_b=turned_b)
        selected = tune.config_of(measured)
        assert selected is not None
        return PreparedCall(measured, selected.options, of_group, selected)
    hosts = ranks_per_host(group)
    config = named_config(pattern, problem, schedule, chunks, hosts)
    if config.method == "unfused":
        return PreparedCall(tune.make(problem, pattern, config, group, device), (), of_group, config)
    # The collective runtime receives a message only when it waits for it, so a replay cannot overwrite the one before.
    plan = config.plan(problem, group.size(), hosts, "barrier" if device.type == "cuda" else "credit")
    if not does_pattern(plan, pattern, problem.copies):
        fitting = [name for name in list_schedules() if schedule_does_pattern(name, pattern)]
        raise ValueError(
            f"{plan.schedule} is no schedule for {pattern}; schedule='auto', or one of {', '.join(fitting)}"
        )
    execution = config.execution
    if caller_multiplies and device.type == "cuda":
        if execution != ExecutionConfig():
            raise ValueError(f"gather: {', '.join(EXECUTION_FIELDS)} are options of GEMMs, got {execution}")
        execution = GATHERS
    executable = executable_of(plan, group, device, execution, turned_b)
    return PreparedCall(executable, config.options, of_group)


def is_tuned(problem: GemmProblem, schedule: str, chunks: int | None) -> bool:
    """Whether a call takes a measured configuration on GPUs. All-to-alls with unequal heads or copies have none."""
    equal = problem.n_per_rank is None and problem.k_per_rank is None
    return schedule == "auto" and chunks is None and equal


def named_config(
    pattern: Pattern, problem: GemmProblem, schedule: str, chunks: int | None, ranks_per_host: int | None = None
) -> TunedConfig:
    """The configuration that a call names by its schedule and number of chunks; "auto" is the rule of CPUs.

    Raises:
        ValueError: for an unknown schedule, for the unfused program of an all-to-all, and where both say how many
            chunks there are.
    """
    from distgemm import tune  # as in make
    from distgemm.tune.config import options_for

    if schedule == "auto":
        name, rule = select_schedule(pattern, problem, ranks_per_host)
        config = tune.TunedConfig("plan", name, tuple(rule.items()))
    else:
        config = tune.TunedConfig.parse(schedule)
    if config.method == "unfused" and pattern not in PATTERNS:
        raise ValueError(f"{pattern} has no unfused program; schedule='auto', or the name of a schedule")
    config = replace(config, options=options_for(problem, config.options))
    if chunks is None:
        return config
    if config.method == "unfused":
        raise ValueError(f"the unfused program has no chunks, got {chunks}")
    if schedule not in ("auto", config.schedule) and "chunks" in dict(config.options):
        raise ValueError(f"schedule={schedule!r} and chunks={chunks} both set the number of chunks: give one of them")
    return replace(config, options=tuple((dict(config.options) | {"chunks": int(chunks)}).items()))


def executable_of(
    plan: Plan,
    group: dist.ProcessGroup,
    device: torch.device,
    execution: ExecutionConfig,
    turned_b: bool = False,
) -> Executable:
    """This rank's executable of a plan for tensors on a device. A collective call.

    Raises:
        ValueError: for an ``execution`` that is not the default, on a device that is no GPU.
    """
    if device.type == "cuda":
        from distgemm.runtime.cuda import compile_plan  # needs the GPU code, as in make

        return compile_plan(plan, execution, group=group, device=device, turned_b=turned_b)
    if execution != ExecutionConfig():
        raise ValueError(f"{', '.join(EXECUTION_FIELDS)} are options for GPUs, got {execution} for tensors on {device}")
    return CollectiveExecutable(plan, group, device)
