"""What ``schedule="auto"`` takes on GPUs: the fastest of a few schedules and the unfused program, measured once.

Choices are kept in ``plans_<GPU>.json`` in the cache folder, over the file of that name that ships with the package.
``docs/tuning.md`` says what they depend on, and what happens where there is none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from distgemm.choices import Choices, file_name, own_file, read_choices, record_choices
from distgemm.derive import make_plan
from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec, list_providers
from distgemm.gemm.gated import PRODUCTS, SENDS, storing_first, together
from distgemm.gemm.spec import Status
from distgemm.machine import Machine
from distgemm.ops import Gemm, Reduce, View, box_extents
from distgemm.plan import Plan, PlanError
from distgemm.problem import GemmProblem
from distgemm.runtime.arguments import COPIES, TORCH_DTYPES, WAITS, resolve_group
from distgemm.runtime.unfused import COLLECTIVES, UnfusedExecutable, collective_status, unfused_status
from distgemm.simulate import predict_unfused, simulate

if TYPE_CHECKING:
    from distgemm.bench import Operation
    from distgemm.runtime.cuda import CudaExecutable

__all__ = [
    "UNFUSED",
    "Choice",
    "Tuned",
    "candidates",
    "choices_file",
    "choose",
    "executable",
    "key_of",
    "look_up",
    "make",
    "predicted",
    "record",
    "tune",
]

T = TypeVar("T")

SHIPPED = Path(__file__).parent / "tuned"
COMMAND = "distgemm tune"
MACHINE = "h200"
"""The machine on which candidates are predicted, whatever the GPU: it only says which are worth measuring."""

CLEARLY = 0.02
"""Share of the unfused program's time by which a plan has to be faster: what two runs of one thing differ by."""
WITHIN = {"kernels": 1.25, "one kernel": 1.4, "alone": 1.4}
"""Plans predicted to take longer than the best one of their kind by more than this factor are not measured: with a
kernel for each GEMM, with one beside copy engines, with one that does all. Of what chunks cost where GEMMs are one
kernel the model knows too little."""

WORD = 2.0
"""us until what a kernel has stored at a peer is there."""

FINALISTS = 4
FINALS = {"rounds": 9, "burst_ms": 4.0, "rest": 1.0}
"""So many of the fastest are measured again, so often, with pauses as between a model's products: products in a row
throttle a GPU, and then the one that takes the least power wins."""
WITHIN_KERNELS, KERNELS = 1.25, 6
"""Of plans whose GEMMs are one kernel, the best of each way to move things is measured with so many configurations,
where it takes at most this factor longer than the fastest."""
WITHIN_WAY = 1.05
"""The second of a way, too, with half as many, where it takes at most this factor longer than the first: with tiles
chosen by shape the best of all may be behind."""

LEAST_BUCKET = 64
"""Below so many rows all take one choice."""

GATHER = "all_gather_1d_tiling_cd_rotating_a"
SUMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pairwise_a", {"chunks": 1}),
    ("pairwise_a", {"chunks": 1, "mechanism": "store"}),
    ("pairwise_a", {"chunks": 2}),
    ("tiling_a_rotating_c", {"chunks": 2}),
    ("tiling_a_rotating_c", {"chunks": 2, "mechanism": "store"}),
    ("tiling_a_rotating_c", {"chunks": 4}),
)
SCHEDULES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "ag+gemm": tuple((GATHER, {"chunks": chunks}) for chunks in (1, 2, 4)),
    "gemm+rs": tuple((f"reduce_scatter_1d_{name}", options) for name, options in SUMS),
    "gemm+ar": tuple((f"all_reduce_1d_{name}", options) for name, options in SUMS),
}
"""For each op, the schedules that are tried, with their options."""
STORED = (
    {"chunks": 2},
    {"chunks": 4},
    {"chunks": 4, "lag": 2},
    {"chunks": 8, "lag": 2},
    {"chunks": 8, "lag": 4},
    {"chunks": 16, "lag": 2},
)
"""Chains by one kernel that stores its sums."""
DELIVERED = ({"chunks": 2}, {"chunks": 4}, {"chunks": 8, "lag": 2}, {"chunks": 16, "lag": 2})
"""The same, where it delivers what is finished, too: a chunk leaves once it is complete."""
SUMMED: tuple[dict[str, Any], ...] = (
    {"chunks": 1, "last": "gemm"},
    {"chunks": 2, "last": "gemm"},
    {"chunks": 4, "last": "gemm"},
    {"chunks": 4, "last": "gemm", "lag": 1},
    {"chunks": 8, "last": "gemm", "lag": 2},
    {"chunks": 16, "last": "gemm", "lag": 2},
    {"chunks": 4, "last": "gemm", "lag": 2, "along": "n"},
)
"""Pairwise sums by one kernel that stores all parts where they are added: no sum takes several hops, as in a chain of
more than two ranks. Chunks of columns read B once, however few rows there are."""
FINISHED: tuple[dict[str, Any], ...] = (
    {"chunks": 8, "last": "gemm", "lag": 2},
    *({"chunks": chunks, "last": "gemm", "lag": lag, "along": "n"} for chunks, lag in ((4, 2), (8, 1), (8, 2))),
)
"""The same, where it delivers what is finished, too."""
CHAIN, ALL_REDUCE = "reduce_scatter_1d_tiling_a_rotating_c", "all_reduce_1d_tiling_a_rotating_c"
PAIRWISE = {"gemm+rs": "reduce_scatter_1d_pairwise_a", "gemm+ar": "all_reduce_1d_pairwise_a"}
BY_ONE_KERNEL: dict[str, tuple[tuple[str, dict[str, Any], str], ...]] = {
    "ag+gemm": (
        *((GATHER, {"chunks": chunks}, "engine") for chunks in (1, 2, 4)),
        *((GATHER, {"chunks": chunks}, copies) for copies in ("slices", "gemm", "both") for chunks in (1, 2)),
    ),
    "gemm+rs": (
        (CHAIN, {"chunks": 2, "results": 2}, "engine"),
        (CHAIN, {"chunks": 4, "results": 4}, "engine"),
        *((CHAIN, {"mechanism": "store", **how}, "engine") for how in STORED),
        *((PAIRWISE["gemm+rs"], {"mechanism": "store", **how}, "engine") for how in SUMMED),
    ),
    "gemm+ar": (
        *((ALL_REDUCE, {"mechanism": "store", **how}, "engine") for how in STORED),
        *((ALL_REDUCE, {"mechanism": "store", **how}, "gemm") for how in DELIVERED),
        (PAIRWISE["gemm+ar"], {"mechanism": "store", **SUMMED[1]}, "engine"),
        *((PAIRWISE["gemm+ar"], {"mechanism": "store", **how}, "gemm") for how in FINISHED),
    ),
}
"""The same for plans whose GEMMs are one kernel that waits by itself, with who copies."""

logger = logging.getLogger("distgemm")


@dataclass(frozen=True)
class Choice:
    """How a product is done. All but ``how`` is what :meth:`arguments` hands to :func:`distgemm.compile`.

    method:   "plan", or "unfused": a collective and one product
    schedule, options: of the plan, options as (name, value) pairs, by name
    provider, branches, config, waits, merge, copies: as :func:`distgemm.compile` takes them; config None: by shape,
              for each GEMM
    collective: of the unfused program, as :class:`distgemm.runtime.unfused.UnfusedExecutable` takes it
    how:      it came about: "measured" just now, "recorded" earlier, "predicted" by the cost model, "" unknown. No
              part of what is compared
    """

    method: str = "plan"
    schedule: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    provider: str = "cutlass"
    branches: int = 2
    config: str | None = None
    waits: str = "memory"
    merge: bool = False
    copies: str = "engine"
    collective: str = "nccl"
    how: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        if self.method not in ("plan", "unfused") or (self.method == "plan") != bool(self.schedule):
            raise ValueError(
                f"method is 'plan', with a schedule, or 'unfused', without; got {self.method!r} and {self.schedule!r}"
            )
        if self.provider not in list_providers() or self.branches not in (1, 2):
            raise ValueError(
                f"provider is one of {', '.join(list_providers())} and branches 1 or 2, got {self.provider!r} and "
                f"{self.branches!r}"
            )
        if self.waits not in WAITS:
            raise ValueError(f"waits is one of {', '.join(WAITS)}, got {self.waits!r}")
        if not isinstance(self.merge, bool):
            raise ValueError(f"merge is True or False, got {self.merge!r}")
        if self.copies not in COPIES:
            raise ValueError(f"copies is one of {', '.join(COPIES)}, got {self.copies!r}")
        if self.collective not in (COLLECTIVES if self.method == "unfused" else ("nccl",)):
            raise ValueError(f"collective is one of {', '.join(COLLECTIVES)}, of no plan, got {self.collective!r}")
        if self.config is not None:
            GemmConfig.parse(self.config)

    def __str__(self) -> str:
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused, {self.collective}"
        name = " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options)])
        config = "" if self.config is None else f" {self.config}"
        waits = "" if self.waits == "memory" else f", waits by {self.waits}"
        merged = ", chunks merged" if self.merge else ""
        branches = f"{self.branches} branch{'es' * (self.branches > 1)}"
        copies = "" if self.copies == "engine" else f", copies by {self.copies}"
        return f"{name}{merged}, GEMMs by {self.provider}{config}, {branches}{waits}{copies}"

    def arguments(self) -> dict[str, Any]:
        """What :func:`distgemm.compile` takes, beside the problem, to make the same again. Raises ValueError for the
        unfused program, which is :class:`distgemm.runtime.unfused.UnfusedExecutable`."""
        if self.method == "unfused":
            raise ValueError("the unfused program is no plan: distgemm.runtime.unfused.UnfusedExecutable makes it")
        return {
            "schedule": self.schedule,
            "provider": self.provider,
            "branches": self.branches,
            "config": self.config,
            "waits": self.waits,
            "merge": self.merge,
            "copies": self.copies,
            **dict(self.options),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        if self.method == "unfused":
            return {"method": "unfused", "collective": self.collective}
        return {
            "method": "plan",
            "schedule": self.schedule,
            "options": dict(self.options),
            "provider": self.provider,
            "branches": self.branches,
            "config": self.config,
            "waits": self.waits,
            "merge": self.merge,
            "copies": self.copies,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], how: str = "") -> Choice:
        """What :meth:`to_dict` wrote; further fields are passed over. Raises ValueError, KeyError or TypeError."""
        if fields["method"] == "unfused":
            return replace(UNFUSED, collective=fields.get("collective", "nccl"), how=how)
        options = fields["options"]
        if not isinstance(options, dict) or not all(isinstance(value, (int, str)) for value in options.values()):
            raise ValueError(f"options are numbers and texts by name, got {options!r}")
        config = fields["config"]
        if not isinstance(fields["schedule"], str) or not isinstance(config, (str, type(None))):
            raise ValueError(f"schedule and config are texts, got {fields['schedule']!r} and {config!r}")
        pairs = tuple(options.items())
        later = {name: fields[name] for name in ("waits", "merge", "copies") if name in fields}
        return cls(
            *(fields["method"], fields["schedule"], pairs, fields["provider"], fields["branches"], config),
            **later,
            how=how,
        )


UNFUSED = Choice("unfused", provider="cublas", branches=1)


# --- candidates -----------------------------------------------------------------------------------------


def candidates(problem: GemmProblem, op: str, world_size: int) -> list[Choice]:
    """What is worth measuring: plans by their predicted time, then the unfused program where it computes this.

    op: "ag+gemm", "gemm+rs" or "gemm+ar"

    Plans that are predicted to take more than ``WITHIN`` times as long as the best one of their kind are left out; so
    are those with GEMMs that their provider does not compute. Raises ValueError for another op.
    """
    times = _predictions(problem, _op(op), world_size)
    plans = sorted((choice for choice in times if choice.method == "plan"), key=lambda choice: times[choice])
    best: dict[str, float] = {}
    for choice in plans:
        best.setdefault(_kind(choice), times[choice])
    kept = [choice for choice in plans if times[choice] <= WITHIN[_kind(choice)] * best[_kind(choice)]]
    return kept + [choice for choice in times if choice.method == "unfused"]


def _kind(choice: Choice) -> str:
    """Of WITHIN's."""
    if choice.waits != "gemm":
        return "kernels"
    stored = dict(choice.options).get("mechanism") == "store" and choice.schedule.startswith("reduce_scatter")
    return "alone" if stored or choice.copies == "gemm" else "one kernel"


def predicted(problem: GemmProblem, op: str, world_size: int) -> Choice:
    """The candidate that the cost model takes for the fastest, of those that wait outside of GEMMs: which are that fast
    with any tensors. Of a plan and the unfused program that are as fast, the unfused one, of providers the first that
    computes it. Raises ValueError where there is no candidate."""
    every = _predictions(problem, _op(op), world_size)
    times = {choice: time for choice, time in every.items() if choice.waits != "gemm"}
    if not times:
        raise ValueError(f"nothing multiplies {problem} for {op} on {world_size} ranks")
    best = min(times, key=lambda choice: (times[choice], choice.method != "unfused"))
    return replace(best, how="predicted")


@lru_cache(maxsize=256)
def _predictions(problem: GemmProblem, op: str, world_size: int) -> dict[Choice, float]:
    """us of everything that could be tried."""
    from distgemm.runtime.cuda.lowering import lower, on_one_stream

    machine = Machine.load(MACHINE)
    inside = _inside(machine)
    times: dict[Choice, float] = {}
    for schedule, options in SCHEDULES[op]:
        plan = make_plan(problem, schedule, world_size, sync="barrier", **options)
        providers = [name for name in ("cutlass", "cublas") if _computes(name, plan)]
        most = max(sum(isinstance(each, Gemm) for each in plan.ops(rank)) for rank in range(world_size))
        for branches in (1, 2) if most > 1 and providers else (1,):
            time = simulate(plan, machine, branches=branches).time
            actions = lower(plan, 0, branches)
            ways = ("memory", "kernel") if world_size > 1 and on_one_stream(actions) else ("memory",)
            merges = (False, True) if len(lower(plan, 0, branches, merge=True)) < len(actions) else (False,)
            for provider, waits, merge in product(providers, ways, merges):
                pairs = tuple(options.items())
                times[Choice("plan", schedule, pairs, provider, branches, waits=waits, merge=merge)] = time
    for schedule, options, by in BY_ONE_KERNEL[op] if world_size > 1 else ():
        if world_size == 2 and schedule in PAIRWISE.values() and "along" not in options:
            continue  # the same as a chain
        plan = make_plan(problem, schedule, world_size, sync="barrier", **options)
        if not (_computes("cutlass", plan) and by_one_kernel(plan, by)):
            continue
        if by == "both" and not any(action.opens for action in lower(plan, 0, 1, gated=True, copies=by)):
            continue  # nothing is left for engines: the same as by the kernel alone
        merges = (False,)
        if by == "engine" and len(lower(plan, 0, 1, True, gated=True)) < len(lower(plan, 0, 1, gated=True)):
            merges = (False, True)
        for merge in merges:
            pairs = tuple(options.items())
            choice = Choice("plan", schedule, pairs, "cutlass", 1, waits="gemm", merge=merge, copies=by)
            # Tiles of the next product fill the SMs that one leaves idle, as on two branches.
            times[choice] = simulate(plan, inside if _kind(choice) == "alone" else machine, branches=2).time
    if unfused_status(problem, op):
        time = predict_unfused(problem, machine, op, world_size)
        for collective in COLLECTIVES:  # NCCL first: it is taken where nothing is measured
            if collective_status(problem, op, collective, world_size):
                times[replace(UNFUSED, collective=collective)] = time
    return times


def _inside(machine: Machine) -> Machine:
    """Where one kernel does all: nothing is launched, and words that it waits for are seen at once."""
    link = machine.nvlink._replace(gap=0.0, latency=WORD)
    return replace(machine, gemm_launch=0.0, wait=0.0, copy_launch=0.0, signal_gap=0.0, nvlink=link)


def by_one_kernel(plan: Plan, copies: str = "engine") -> Status:
    """Whether each rank's GEMMs can be one kernel that waits by itself, with copies as ``distgemm.compile`` takes it;
    falsy with the reason."""
    from distgemm.runtime.cuda.lowering import lower

    try:
        kernels = [
            action
            for rank in range(plan.world_size)
            for action in lower(plan, rank, 1, gated=True, copies=copies)
            if action.gates
        ]
    except PlanError as error:
        return Status(str(error))
    if any(len(action.ops) > PRODUCTS or len(action.sends) > SENDS for action in kernels):
        return Status(f"one kernel computes {PRODUCTS} products and sends {SENDS} chunks, at most")
    gemms = _specs(plan)
    if plan.problem.l > 1 or plan.problem.dtype == "float32":
        return Status("single products are multiplied by kernels that wait, and not of IEEE float32")
    if any(spec.partial for spec in gemms) and len({spec.d.dtype for spec in gemms}) > 1:
        return Status("sums that are passed on are of D's type")
    if not all(spec.operands_aligned and (spec.results_aligned or spec.partial is None) for spec in gemms):
        return Status("TMA wants addresses and strides in multiples of 16 bytes")
    return Status()


def _computes(provider: str, plan: Plan) -> bool:
    """Whether a provider multiplies what a plan has."""
    found = _providers().get(provider)
    sums_in_float64 = "float64" in (plan.problem.out_dtype, plan.problem.partial_dtype)
    # Sums behind a GEMM add C and a bias, too, where the GEMM has added a partial sum and its provider adds no more.
    if sums_in_float64 and any(isinstance(op, (Gemm, Reduce)) and op.sources for ops in plan.rank_ops for op in ops):
        return False
    return found is not None and all(found.supports(spec) for spec in _specs(plan))


@lru_cache(maxsize=1)
def _providers() -> dict[str, Any]:
    """Without a GPU, those for Hopper."""
    from distgemm.gemm.cublas import CublasProvider
    from distgemm.gemm.cutlass import CutlassProvider

    return {
        "cutlass": CutlassProvider() if torch.cuda.is_available() else CutlassProvider("90a"),
        "cublas": CublasProvider(),
    }


def _specs(plan: Plan) -> list[GemmSpec]:
    """The GEMMs of all ranks with dense shards, each once, without C and bias."""
    p = plan.problem

    def matrix(view: View) -> MatrixSpec:
        batches, rows, columns = box_extents(view.box)
        _, frame_rows, _ = box_extents(view.frame)
        between = frame_rows * view.pitch if batches > 1 else 0
        return MatrixSpec(plan.dtype(view), rows, columns, batches, stride=view.pitch, batch_stride=between,
                          padded=view.buffer == "slot")  # fmt: skip

    found: dict[GemmSpec, None] = {}
    for op in (op for ops in plan.rank_ops for op in ops if isinstance(op, Gemm)):
        d = matrix(op.out)
        a, b = (replace(matrix(view), dtype=p.dtype) for view in (op.a, op.b))
        partial = matrix(op.sources[0]) if op.sources else None
        found[GemmSpec(a, b, d, partial=partial)] = None
    return list(found)


def _op(op: str) -> str:
    if op not in SCHEDULES:
        raise ValueError(f"op is one of {', '.join(SCHEDULES)}, got {op!r}")
    return op


# --- keys and files -------------------------------------------------------------------------------------


def bucket(m: int) -> int:
    """The rows at which a choice for m rows is measured: the next power of two, ``LEAST_BUCKET`` at least."""
    return max(LEAST_BUCKET, 1 << (m - 1).bit_length())


def key_of(problem: GemmProblem, op: str, world_size: int) -> str:
    """What a choice depends on, as text. Rows of each rank, C and bias do not matter."""
    p = problem
    return f"{_op(op)} {p.m}x{p.n}x{p.k}x{p.l} {p.dtype} {p.out_dtype} {p.partial_dtype} tp:{world_size}"


def _bucketed(problem: GemmProblem) -> GemmProblem:
    return replace(problem, m=bucket(problem.m), m_per_rank=None)


def choices_file(device: str) -> Path:
    """Where the user's own choices for this GPU are."""
    return own_file("plans", device)


def look_up(problem: GemmProblem, op: str, world_size: int, device: str) -> Choice | None:
    """The recorded choice for these extents, or that for the :func:`bucket` of m; None where there is neither.

    device: the GPU's name. Raises ValueError where a file is broken.
    """
    known = read_choices(SHIPPED / file_name("plans", device), choices_file(device), Choice.from_dict, COMMAND)
    for each in (problem, _bucketed(problem)):
        found = known.get(key_of(each, op, world_size))
        if found is not None:
            return Choice.from_dict(found, "recorded")
    return None


def record(device: str, choices: Choices) -> Path:
    """Adds choices to the user's file, beside what other processes add. Returns its path.

    Raises ValueError where the file is broken, which stays as it is.
    """
    return record_choices(choices_file(device), device, choices, Choice.from_dict, COMMAND)


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"


# --- one choice for all ranks ---------------------------------------------------------------------------


def choose(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
) -> Choice:
    """The choice for a product, the same on all ranks: rank 0 looks it up in its files. A collective call.

    tune: where nothing is recorded: True: measure now, at the :func:`bucket` of m, and record it; False: what the cost
          model predicts; None: True, unless DISTGEMM_TUNE is 0 in the environment of rank 0

    Products that are not :func:`measurable` (batches, fp8) are predicted.

    Raises RuntimeError while the current stream is captured; on all ranks, ValueError where rank 0's file is broken.
    """
    whole, at = resolve_group(group), _device(device)
    size = whole.size()
    _refuse_capture(problem, op, size, at)

    def decide() -> Choice | None:
        found = look_up(problem, op, size, _gpu(at))
        wanted = os.environ.get("DISTGEMM_TUNE") != "0" if tune is None else tune
        return found or (None if wanted and measurable(problem) else predicted(problem, op, size))

    found = _from_first(whole, at, decide)
    if found is None:
        found = _tune(_bucketed(problem), op, whole, at).choice
    return fitting(found, problem, op, size)


def fitting(choice: Choice, problem: GemmProblem, op: str, world_size: int) -> Choice:
    """A choice for other rows than it was measured at: waiting within GEMMs takes chunks of equal size, and where these
    rows are in none, waits are on memory; NCCL adds what no other collective does."""
    if choice.method == "unfused":
        status = collective_status(problem, op, choice.collective, world_size)
        return choice if status else replace(UNFUSED, how=choice.how)
    if choice.waits != "gemm":
        return choice
    plan = make_plan(problem, choice.schedule, world_size, sync="barrier", **dict(choice.options))
    if by_one_kernel(plan, choice.copies):
        return choice
    return replace(choice, waits="memory", merge=False, copies="engine", config=None)


def _device(device: torch.device | str | int | None) -> torch.device:
    """None: the current GPU; the CPU where there is none, for what needs no GPU."""
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    at = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if at.type == "cuda" and at.index is None else at


def _refuse_capture(problem: GemmProblem, op: str, size: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"schedule='auto' has no executable for {key_of(problem, op, size)} yet, and none can be made while a "
            f"graph is captured: make this call once before capturing; distgemm.tune.tune(problem, {op!r}, group) "
            "before that measures ahead"
        )


def _from_first(group: dist.ProcessGroup, device: torch.device, make: Callable[[], T]) -> T:
    """What the group's rank 0 makes, on all ranks; so is the error that it raises."""
    found: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            found[0] = make()
        except Exception as error:  # raised below, on all ranks
            found[1] = error
    at = device if dist.get_backend(group) == "nccl" else None
    dist.broadcast_object_list(found, group=group, group_src=0, device=at)
    if found[1] is not None:
        raise found[1]
    made: T = found[0]
    return made


def executable(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    tune: bool | None = None,
    **more: Any,
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable of what :func:`choose` chooses; ``.choice`` says what that is. A collective call.

    more: ``timeout`` and ``on_timeout`` of :func:`distgemm.compile`, where a plan is chosen
    """
    whole, at = resolve_group(group), _device(device)
    return make(problem, op, choose(problem, op, whole, device=at, tune=tune), whole, at, **more)


def make(
    problem: GemmProblem, op: str, choice: Choice, group: dist.ProcessGroup, device: torch.device, **more: Any
) -> CudaExecutable | UnfusedExecutable:
    """This rank's executable of a choice. A collective call."""
    if choice.method == "unfused":
        unfused = UnfusedExecutable(problem, op, group, device, choice.collective)
        unfused.choice = choice
        return unfused
    from distgemm.runtime.cuda import CudaExecutable
    from distgemm.runtime.cuda import compile as compile_plan

    made = compile_plan(problem, group=group, device=device, **choice.arguments(), **more)
    assert isinstance(made, CudaExecutable)
    made.choice = choice
    return made


# --- measuring ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What a measurement found.

    choice:  the fastest
    times:   ms of all that were measured, by their text; of the slowest rank
    refused: candidates that could not be compiled or measured, with the reason
    path:    the file that the choice was written to; None: to none
    """

    choice: Choice
    times: dict[str, float]
    refused: dict[str, str]
    path: Path | None

    @property
    def ms(self) -> float:
        """Of the choice."""
        return self.times[str(self.choice)]

    @property
    def unfused_ms(self) -> float | None:
        """Of the unfused program; None where it was not measured."""
        return self.times.get(str(UNFUSED))


def measurable(problem: GemmProblem) -> Status:
    """Whether :func:`tune` can measure such products; falsy with the reason where it cannot."""
    if problem.l > 1:
        return Status(f"single products are measured, not l = {problem.l} of them")
    if problem.dtype == "float8_e4m3fn":
        return Status("products of fp8 are not measured: they have no unfused program to be checked against")
    return Status()


def tune(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Tuned:
    """Measures the :func:`candidates` against each other, in graphs, and takes the fastest. A collective call.

    write:    whether rank 0 records the choice
    kernels:  whether configurations of the plans' GEMMs that have no measured one are measured before
              (:func:`distgemm.gemm.tune.tune`), spread over the ranks, and recorded; compiles several kernels for each
              kind of GEMM
    progress: is told, on every rank, what is being done

    Extents are measured as they are, rounded up to multiples of the number of ranks; all operands are drawn anew.
    Raises ValueError for products that :func:`measurable` says cannot be measured; RuntimeError where no candidate is
    left, or where one computes something wrong (:class:`distgemm.bench.WrongResultError`).
    """
    whole, at = resolve_group(group), _device(device)
    _refuse_capture(problem, op, whole.size(), at)
    return _tune(problem, op, whole, at, write, kernels, progress)


def _tune(
    problem: GemmProblem,
    op: str,
    group: dist.ProcessGroup,
    device: torch.device,
    write: bool = True,
    kernels: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Tuned:
    from distgemm import bench

    if not (status := measurable(problem)):
        raise ValueError(status.reason)
    say = progress or (lambda text: None)
    size = group.size()
    trial = _divisible(problem, size)
    tried = _from_first(group, device, lambda: candidates(trial, op, size))
    if kernels:
        _tune_gemms(trial, tried, group, device, say)
    operation, failed = bench.attempt(group, device, lambda: bench.Operation(trial, op, group, device))
    if operation is None:
        raise RuntimeError(f"{key_of(problem, op, size)} cannot be measured: {failed.error}")
    refused: dict[str, str] = {}
    times: dict[str, float] = {}

    def measure(wanted: list[Choice], **how: Any) -> list[Choice]:
        """Those that ran, the fastest first."""
        made, failures = _executables(operation, wanted, group, device, say)
        refused.update(failures)
        if not made:
            raise RuntimeError(f"no candidate for {key_of(problem, op, size)} can be compiled: {refused}")
        say(f"measuring {len(made)} candidates")
        methods = [bench.executable_method(operation, str(choice), exe) for choice, exe in made.items()]
        try:
            samples = bench.sample(operation, methods, **how)
        finally:
            for method in methods:
                method.release()
        for name, one in samples.items():
            if one.wrong:
                raise bench.WrongResultError(f"{name}: {one.error}")
            if one.error:
                refused[name] = one.error
                logger.warning("not measured: %s: %s", name, one.error)
            else:
                times[name] = one.ms
        ran = [choice for choice in made if str(choice) in samples and not samples[str(choice)].error]
        if not ran:
            raise RuntimeError(f"no candidate for {key_of(problem, op, size)} can be measured: {refused}")
        return sorted(ran, key=lambda choice: times[str(choice)])

    ran = measure(tried)
    finalists = _from_first(group, device, lambda: _finalists(trial, ran, times, group))
    if len(finalists) > 1:
        # What differs by less than clocks do in the first run is told apart by one more.
        ran = measure(finalists, **FINALS)
    fastest = ran[0]
    if UNFUSED in ran and times[str(fastest)] > (1 - CLEARLY) * times[str(UNFUSED)]:
        fastest = UNFUSED

    def settle() -> tuple[Choice, dict[str, float], Path | None]:
        if not write:
            return fastest, times, None
        entry = fastest.to_dict() | {"ms": round(times[str(fastest)], 5)}
        if str(UNFUSED) in times:
            entry["unfused_ms"] = round(times[str(UNFUSED)], 5)
        return fastest, times, record(_gpu(device), {key_of(problem, op, size): entry})

    choice, times, path = _from_first(group, device, settle)
    logger.info("%s: %s, %.4f ms; tried %s", key_of(problem, op, size), choice, times[str(choice)], times)
    return Tuned(replace(choice, how="measured"), times, refused, path)


def _finalists(
    problem: GemmProblem, ran: Sequence[Choice], times: Mapping[str, float], group: dist.ProcessGroup
) -> list[Choice]:
    """The fastest, the unfused program, and the fastest plans by one kernel with other configurations of it, where that
    may become the fastest of all. No other measurement tells which of them is best at waiting, or at sending."""
    found = [*ran[:FINALISTS], *(choice for choice in ran if choice == UNFUSED)]
    by_way: dict[tuple[Any, ...], list[Choice]] = {}
    for choice in ran:
        if choice.waits == "gemm" and times[str(choice)] <= WITHIN_KERNELS * times[str(ran[0])]:
            way = choice.schedule, choice.copies, dict(choice.options).get("mechanism")
            by_way.setdefault(way, []).append(choice)
    for best, *others in by_way.values():
        second = [one for one in others[:1] if times[str(one)] <= WITHIN_WAY * times[str(best)]]
        for one, most in zip([best, *second], (KERNELS, KERNELS // 2), strict=False):
            found += [one, *_in_other_tiles(_plan(problem, one, group), one)[:most]]
    return list(dict.fromkeys(found))


def _in_other_tiles(plan: Plan, choice: Choice) -> list[Choice]:
    """One with each configuration of its kernel, by what multiplies everything fastest, and what multiplies a chunk
    fastest: the rest once the last one has come."""
    from distgemm.gemm.choose import order

    chunk = _chunk(plan)
    configs = _providers()["cutlass"].configs(chunk)
    best = [order(chunk, configs, count=number) for number in (_count(plan), 1)]
    found = [config for config in chain.from_iterable(zip(*best, strict=True)) if config.schedule != "plain"]
    if dict(choice.options).get("mechanism") == "store":
        found = storing_first(found)
    if _delivers(choice):
        found = [config for config in found if config.schedule == "pingpong"]
    return [replace(choice, config=str(config)) for config in dict.fromkeys(found)]


def _delivers(choice: Choice) -> bool:
    """Whether a kernel copies results. Beside its buffers the largest tiles (128x256, 256x128, 256x192) are left two
    stages, with which 128x256 took 1.5 times as long as with copies by engines; 128x192, with three, was slower than
    pingpong tiles, too."""
    return choice.schedule.startswith("all_reduce") and choice.copies == "gemm"


def _whole(plan: Plan) -> GemmSpec:
    """A product as large as all of rank 0's, as if they differed in A."""
    return together(_chunk(plan), _count(plan), "a")


def _count(plan: Plan) -> int:
    """How many products rank 0 computes."""
    return sum(isinstance(op, Gemm) for op in plan.ops(0))


def _chunk(plan: Plan) -> GemmSpec:
    """One of the products, with a partial sum if there are any."""
    return max(_specs(plan), key=lambda spec: spec.partial is not None)


def _divisible(problem: GemmProblem, size: int) -> GemmProblem:
    m, n, k = (-(-extent // size) * size for extent in (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, m_per_rank=None)


def _executables(
    operation: Operation,
    tried: list[Choice],
    group: dist.ProcessGroup,
    device: torch.device,
    say: Callable[[str], object],
) -> tuple[dict[Choice, Any], dict[str, str]]:
    """Executables of the candidates, and why some have none: the same on all ranks."""
    made: dict[Choice, Any] = {}
    refused: dict[str, str] = {}
    # The largest workspace first: all the others fit in.
    for choice in sorted(tried, key=lambda choice: _workspace_bytes(operation.problem, choice, group), reverse=True):
        say(f"compiling {choice}")
        try:
            made[choice] = make(operation.problem, operation.op, choice, group, device)
        except Exception as error:  # of whatever kind: the other ranks were told that this one cannot
            refused[str(choice)] = str(error)
            logger.warning("not measured: %s: %s", choice, error)
    return made, refused


def _plan(problem: GemmProblem, choice: Choice, group: dist.ProcessGroup) -> Plan:
    return make_plan(problem, choice.schedule, group.size(), sync="barrier", **dict(choice.options))


def _workspace_bytes(problem: GemmProblem, choice: Choice, group: dist.ProcessGroup) -> int:
    if choice.method == "unfused":
        return 0
    plan = _plan(problem, choice, group)
    return max(map(plan.workspace_bytes, range(group.size())))


def _tune_gemms(
    problem: GemmProblem,
    tried: list[Choice],
    group: dist.ProcessGroup,
    device: torch.device,
    say: Callable[[str], object],
) -> None:
    """Measures configurations for the CUTLASS GEMMs of these plans that have none, each on one rank, and records them
    where every rank finds them."""
    from distgemm import gemm
    from distgemm.gemm import choose as gemm_choices
    from distgemm.gemm.compiler import build_together
    from distgemm.gemm.cutlass import CutlassProvider, kernel_source
    from distgemm.gemm.tune import candidates as configurations
    from distgemm.gemm.tune import tune as tune_gemm

    rank, size = dist.get_rank(group), group.size()
    known = _from_first(group, device, lambda: set(gemm_choices.measured(_gpu(device))))
    wanted: dict[str, tuple[GemmSpec, int]] = {}
    for choice in tried:
        if choice.method == "plan" and choice.provider == "cutlass":
            plan = _plan(problem, choice, group)
            for spec in [_whole(plan)] if choice.waits == "gemm" else _specs(plan):
                key = gemm_choices.key_of(spec, choice.branches)
                if key not in known:
                    wanted.setdefault(key, (spec, choice.branches))

    def measured() -> Choices:
        say(f"compiling kernels for {len(wanted)} kinds of GEMMs")
        provider = CutlassProvider()
        every = [
            (spec, config) for spec, streams in wanted.values() for config in configurations(provider, spec, streams)
        ]
        sources = list(dict.fromkeys(kernel_source(spec, config, provider.arch) for spec, config in every))
        build_together(sources, rank, size)
        found: Choices = {}
        for key, (spec, streams) in list(wanted.items())[rank::size]:
            say(f"measuring GEMMs {key}")
            best = tune_gemm(_tensors(spec, device), streams=streams, write=False)
            found[key] = {"config": str(best.config), "ms": round(best.ms, 5)}
        return found

    if not wanted:
        return
    found = _from_all(group, measured)
    gemm_choices.record(_gpu(device), {key: choice for each in found for key, choice in each.items()})
    gemm._kernel.cache_clear()  # so that this process takes the choices too


def _from_all(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """What each rank makes, on all ranks; the error of any rank on all of them."""
    mine: tuple[T | None, str | None]
    try:
        mine = make(), None
    except Exception as error:  # told to all, which would wait for this rank
        mine = None, f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            raise RuntimeError(f"rank {rank} cannot measure GEMMs: {failed}")
    return [found for found, _ in every]


def _tensors(spec: GemmSpec, device: torch.device) -> Any:
    """Random ones of a GEMM without batches."""
    from distgemm.gemm import GemmTensors

    def drawn(matrix: MatrixSpec) -> torch.Tensor:
        whole = torch.randn(matrix.rows, matrix.stride, device=device).to(TORCH_DTYPES[matrix.dtype])
        return whole[:, : matrix.columns]

    partial = None if spec.partial is None else drawn(spec.partial)
    dtype = "tfloat32" if spec.a.dtype == "tfloat32" else None
    a, b, d = map(drawn, (spec.a, spec.b, spec.d))
    return GemmTensors(a, b, d, partial=partial, dtype=dtype, padded=spec.d.padded)
