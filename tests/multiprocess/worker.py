"""What each rank of the tests of the collective runtime does: cases against numpy, and checks that need real ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import distgemm
from distgemm.layouts import Axis, Modulo, Offset, TVLayout
from distgemm.plan.ops import Barrier, Copy, Op, Signal, Wait
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.collective import CollectiveExecutable, run_collective, steps
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import WHOLE, Partition

SHAPES = ((10, 7, 9), (8, 12, 16), (1, 9, 6), (5, 1, 7), (13, 6, 1), (1, 1, 1))
ROWS = {1: (10,), 2: (3, 7), 3: (3, 0, 7), 4: (3, 0, 5, 2), 6: (0, 4, 1, 3, 0, 2)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan, and the arguments of its calls."""

    schedule: str
    mesh: tuple[int, ...]
    shape: tuple[int, int, int]
    l: int = 1  # noqa: E741
    dtype: str = "float64"
    out_dtype: str | None = None
    partial_dtype: str | None = None
    rows: bool = False
    chunks: int = 1
    workspace: str = "full"
    sync: str = "credit"
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    late: int | None = None
    calls: int = 2

    def plan(self) -> Plan:
        m, n, k = self.shape
        ranks = int(np.prod(self.mesh))
        sizes = ROWS[ranks] if self.rows else None
        problem = distgemm.GemmProblem(
            m=m, n=n, k=k, l=self.l, dtype=self.dtype, out_dtype=self.out_dtype, partial_dtype=self.partial_dtype,
            m_per_rank=sizes,
        )  # fmt: skip
        options = {} if self.chunks == 1 else {"chunks": self.chunks}
        return distgemm.make_plan(
            problem, self.schedule, mesh=self.mesh, workspace=self.workspace, sync=self.sync, **options
        )


def meshes(name: str, ranks: int) -> list[tuple[int, ...]]:
    """The meshes on which a schedule can be made for this many ranks."""
    if "2d" in name:
        candidates: Iterable[tuple[int, ...]] = itertools.product(range(1, ranks + 1), repeat=2)
    elif "3d" in name:
        candidates = itertools.product(range(1, ranks + 1), repeat=3)
    else:
        candidates = [(ranks,)]
    found = []
    for mesh in candidates:
        if int(np.prod(mesh)) != ranks or (ranks & (ranks - 1) and "xor" in name):
            continue
        found.append(mesh)
    return found


def cases(ranks: int, number: int, part: slice = slice(None)) -> list[Case]:
    """For every schedule ``number`` combinations in which every value of every argument occurs, or a part of them."""
    found = []
    for name in distgemm.list_schedules():
        on = meshes(name, ranks)
        if not on:
            continue
        rng = random.Random(f"{name}/{ranks}")
        axes: dict[str, list[Any]] = {
            "mesh": list(on),
            "shape": list(SHAPES),
            "chunks": [1, 2, 3],
            "workspace": ["full", "bounded"],
            "sync": ["credit", "barrier"],
            "dtype": ["float64", "float32", "bfloat16"],
            "beta": [0.0, 3.0],
            "alpha": [1.0, 2.0],
            "bias": [True, False],
            "l": [1, 2],
            "rows": [False, True],
            "late": [None, *range(ranks)],
        }
        columns = {key: (values * number)[:number] for key, values in axes.items()}
        for column in columns.values():
            rng.shuffle(column)
        for row in range(number)[part]:
            values = {key: column[row] for key, column in columns.items()}
            case = Case(schedule=name, **values)
            found.append(_possible(case))
    return found


def _possible(case: Case) -> Case:
    """Without the options that the schedule does not have for its ranks."""
    if case.rows:
        case = dataclasses.replace(case, shape=(10, *case.shape[1:]))
    for changes in ({}, {"rows": False}, {"chunks": 1}, {"rows": False, "chunks": 1}):
        try:
            changed = dataclasses.replace(case, **changes)
            changed.plan()
        except ValueError:
            continue
        return changed
    raise AssertionError(f"{case}: no plan")


def to_torch(array: np.ndarray[Any, Any], dtype: str, device: str) -> torch.Tensor:
    return torch.tensor(array, dtype=TORCH_DTYPES[dtype]).to(device)


def device_of_rank() -> str:
    return f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"


class Data:
    """Global matrices of small integers, whose products and sums every type holds exactly."""

    def __init__(self, plan: Plan, seed: int, most: int = 2) -> None:
        rng = np.random.default_rng(seed)
        p = plan.problem
        batch = (p.l,) if p.l > 1 else ()
        self.plan = plan
        self.a, self.b, self.c = (
            rng.integers(-most, most + 1, (*batch, *shape)).astype(np.float64)
            for shape in ((p.m, p.k), (p.n, p.k), (p.m, p.n))
        )
        self.bias = rng.integers(-most, most + 1, (p.n,)).astype(np.float64)

    def shards(self, device: str, rank: int | None = None) -> list[torch.Tensor]:
        r = dist.get_rank() if rank is None else rank
        p = self.plan.problem
        named = (("A", self.a, p.dtype), ("B", self.b, p.dtype), ("C", self.c, p.out_dtype))
        return [to_torch(array[self.plan.shard(name, r)], str(dtype), device) for name, array, dtype in named]

    def bias_shard(self, device: str) -> torch.Tensor:
        """The bias for this rank's columns."""
        columns = self.plan.shard("D", dist.get_rank())[-1]
        return to_torch(self.bias[columns], str(self.plan.problem.out_dtype), device)

    def expected(self, alpha: float, beta: float, rank: int | None = None, bias: bool = False) -> np.ndarray[Any, Any]:
        r = dist.get_rank() if rank is None else rank
        d = alpha * np.matmul(self.a, np.swapaxes(self.b, -1, -2)) + beta * self.c + bias * self.bias
        found: np.ndarray[Any, Any] = d[self.plan.shard("D", r)]
        return found


def run_case(case: Case, seed: int) -> str | None:
    """What is wrong with a case; None: nothing."""
    device, rank = device_of_rank(), dist.get_rank()
    plan = case.plan()
    executable = CollectiveExecutable(plan)
    rng = random.Random(seed)
    if rank == case.late:
        steps = [_slowed(step, rng) for step in executable.program.steps]
        executable.program = dataclasses.replace(executable.program, steps=steps)
    for call in range(case.calls):
        data = Data(plan, seed * 10 + call)
        a, b, c = data.shards(device)
        # Where beta is 0, C is not read.
        given = c if case.beta else torch.full_like(c, float("nan"))
        bias = data.bias_shard(device) if case.bias else None
        result = executable(a, b, given, alpha=case.alpha, beta=case.beta, bias=bias)
        if not np.array_equal(result.double().cpu().numpy(), data.expected(case.alpha, case.beta, bias=case.bias)):
            return f"call {call} of {case}: rank {rank} got {result}"
    return None


def _slowed(step: Callable[[Any], None], rng: random.Random) -> Callable[[Any], None]:
    def slow(call: Any) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.01)
        step(call)

    return slow


def run_cases(todo: list[Case]) -> list[str]:
    """The failures of this rank."""
    return [found for seed, case in enumerate(todo) if (found := run_case(case, seed)) is not None]


# --- checks that need real ranks ----------------------------------------------------------------------


def caught(function: Callable[[], Any]) -> str:
    """The error that a function raises, as text; "" for none."""
    try:
        function()
    except (ValueError, distgemm.PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _problem(**changes: Any) -> distgemm.GemmProblem:
    return distgemm.GemmProblem(**{"m": 12, "n": 12, "k": 12, "dtype": "float32", **changes})


def different_plans(odd: int) -> list[str]:
    """Rank ``odd`` comes with other plans than the rest: another schedule, another world size, an op less."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    usual = distgemm.make_plan(_problem(), "ag+gemm", ranks)
    others = (
        distgemm.make_plan(_problem(), "all_gather_1d_ring_a", ranks),
        distgemm.make_plan(_problem(), "ag+gemm", ranks + 1),
        usual.replace_ops(odd, usual.ops(odd)[:-1]),
    )
    found = []
    for other in others:
        plan = other if rank == odd else usual
        found.append(caught(lambda plan=plan: CollectiveExecutable(plan)))  # type: ignore[misc]
    return found


def equal_plans(odd: int) -> list[bool]:
    """Rank ``odd`` comes with a plan from a file, which has another fingerprint; the others leave out empty tiles.

    Whether the fingerprints differ, and whether two calls are right.
    """
    made = distgemm.make_plan(_problem(m=2), "ag+gemm", dist.get_world_size(), chunks=4)
    read = distgemm.Plan.from_json(made.to_json())
    executable = CollectiveExecutable(read if dist.get_rank() == odd else made)
    found = [made == read and made.fingerprint != read.fingerprint]
    for seed in range(2):
        data = Data(made, seed)
        a, b, _ = data.shards(device_of_rank())
        found.append(np.array_equal(executable(a, b).double().cpu().numpy(), data.expected(1, 0)))
    return found


def unexecutable_on_one() -> str:
    """A plan that all ranks share, in which nobody writes one tile of the last rank's D."""
    ranks = dist.get_world_size()
    plan = distgemm.make_plan(_problem(), "ag+gemm", ranks)
    last = plan.ops(ranks - 1)
    gemm = min(op.id for op in last if op.kind == "Gemm")  # multiplies its own tiles: no flag depends on it
    return caught(lambda: CollectiveExecutable(plan.replace_ops(ranks - 1, [op for op in last if op.id != gemm])))


def wrong_arguments() -> dict[str, str]:
    """The errors for tensors and groups that do not fit."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = distgemm.make_plan(_problem(out_dtype="bfloat16"), "ag+gemm", ranks)
    executable = CollectiveExecutable(plan)
    a, b, c = Data(plan, 0).shards(device_of_rank())
    flat = torch.zeros(a.numel() + c.numel(), dtype=torch.float32)
    same = distgemm.make_plan(_problem(), "ag+gemm", ranks)
    found = {
        "a shape": caught(lambda: executable(a[:-1], b)),
        "b shape": caught(lambda: executable(a, b.unsqueeze(0))),
        "c shape": caught(lambda: executable(a, b, c[:, :-1], beta=1.0)),
        "a dtype": caught(lambda: executable(a.double(), b)),
        "c dtype": caught(lambda: executable(a, b, c.float(), beta=1.0)),
        "out dtype": caught(lambda: executable(a, b, out=c.float())),
        "device": caught(lambda: executable(a.to("meta"), b)),
        "type": caught(lambda: executable(a.numpy(), b)),
        "bias shape": caught(lambda: executable(a, b, bias=c)),
        "bias dtype": caught(lambda: executable(a, b, bias=c[0].float())),
        "scale": caught(lambda: executable(a, b, scale_a=torch.ones(1))),
        "no c": caught(lambda: executable(a, b, beta=1.0)),
        "size": caught(lambda: CollectiveExecutable(distgemm.make_plan(_problem(), "ag+gemm", ranks + 1))),
        "cuda": caught(lambda: CollectiveExecutable(plan, device="cuda:0")),
        "plan": caught(lambda: CollectiveExecutable("ag+gemm")),  # type: ignore[arg-type]
    }
    x = CollectiveExecutable(same)
    overlapping = flat[: a.numel()].view(a.shape), flat[1 : 1 + c.numel()].view(c.shape)
    found["overlap"] = caught(lambda: x(overlapping[0], b, out=overlapping[1]))
    group = dist.new_group([0])
    alone = distgemm.make_plan(_problem(), "ag+gemm", 1)
    outside = caught(lambda: CollectiveExecutable(alone, group))
    found["outside"] = outside if rank else "ValueError: rank 0 is in the group"
    # None of this has sent a message: the executable still works.
    found["after"] = "" if torch.equal(executable(a, b).double(), _double(Data(plan, 0).expected(1, 0))) else "wrong"
    return found


def _double(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float64)


def variants() -> list[str]:
    """Other ways to call: run_collective, out, shards that are not contiguous, a subgroup in another order."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), device_of_rank()
    wrong = []
    for name in ("ag+gemm", "all_gather_1d_tiling_k_rotating_a", "gemm+rs"):
        plan = distgemm.make_plan(_problem(l=2), name, ranks, chunks=2)
        data = Data(plan, 5)
        a, b, c = data.shards(device)
        wanted = _double(data.expected(2.0, 3.0))
        executable = CollectiveExecutable(plan)
        strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (a, b, c)]
        room = torch.full((*plan.shard_shape("D", rank)[:-1], 2 * plan.shard_shape("D", rank)[-1]), 7.0, device=device)
        out = room[..., ::2]
        results = {
            "contiguous": executable(a, b, c, alpha=2.0, beta=3.0),
            "strided": executable(*strided, alpha=2.0, beta=3.0),
            "contiguous again": executable(a, b, c, alpha=2.0, beta=3.0),
            "once": run_collective(plan, a, b, c, alpha=2.0, beta=3.0),
            "out": executable(a, b, c, alpha=2.0, beta=3.0, out=out),
        }
        with torch.no_grad():
            results["no_grad"] = executable(a.requires_grad_(), b, c, alpha=2.0, beta=3.0)
        wrong += [f"{name} {what}" for what, d in results.items() if not torch.equal(d.double().cpu(), wanted)]
        if results["out"] is not out or not bool((room[..., 1::2] == 7).all()):
            wrong.append(f"{name}: D is not where out is")
    group = dist.new_group(list(range(1, ranks)))
    if rank and ranks > 1:
        plan = distgemm.make_plan(_problem(), "gemm+rs", ranks - 1)
        data = Data(plan, 6)
        a, b, _ = data.shards(device, rank - 1)
        d = CollectiveExecutable(plan, group)(a, b)
        if not torch.equal(d.double().cpu(), _double(data.expected(1, 0, rank - 1))):
            wrong.append("subgroup")
    return wrong


def own_batches(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
    """Rank r multiplies batch r. It holds batch r + 1 of A."""
    (size,) = mesh
    own, next_one = (Axis(size, rank=1),), (Axis(size, rank=1, maps=(Offset(1), Modulo(size))),)
    held = TVLayout(mesh, (1,), (WHOLE, WHOLE, own))
    partition = Partition(a=TVLayout(mesh, (1,), (WHOLE, WHOLE, next_one)), b=held, d=held)
    work = TVLayout(mesh, (1,), (WHOLE, WHOLE, WHOLE, own))
    return distgemm.DistributedTileScheduler("own_batches", partition, work)


def own_columns(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
    """Rank r multiplies columns r of D for all rows, and owns rows r of D."""
    (size,) = mesh
    own, every = (Axis(size, rank=1),), (Axis(size, value=1),)
    partition = Partition(
        a=TVLayout(mesh, (size,), (every, WHOLE, WHOLE)),
        b=TVLayout(mesh, (1,), (own, WHOLE, WHOLE)),
        d=TVLayout(mesh, (size,), (own, every, WHOLE)),
    )
    work = TVLayout(mesh, (size,), (every, own, WHOLE, WHOLE))
    return distgemm.DistributedTileScheduler("own_columns", partition, work)


def gathered() -> list[str]:
    """A rank keeps batches of A that are not the first ones, and rows of its D where it multiplies others, too."""
    ranks, device = dist.get_world_size(), device_of_rank()
    wrong = []
    for problem, schedule in (
        (_problem(l=ranks), own_batches((ranks,))),
        (_problem(m=12 * ranks), own_columns((ranks,))),
    ):
        plan = distgemm.make_plan(problem, schedule)
        data = Data(plan, 8)
        a, b, _ = data.shards(device)
        wanted = _double(data.a[plan.shard("D", dist.get_rank())[:-1]])
        found = torch.full(wanted.shape, torch.nan, dtype=a.dtype, device=device)
        d = CollectiveExecutable(plan)(a, b, gathered=found)
        if not torch.equal(d.double().cpu(), _double(data.expected(1, 0))):
            wrong.append(f"{plan.schedule}: D")
        if not torch.equal(found.double().cpu(), wanted):
            wrong.append(f"{plan.schedule}: gathered")
    return wrong


def traced() -> list[str]:
    """Executables in code that torch.compile traces: the graph breaks at the call."""
    problem, device = _problem(), device_of_rank()
    plan = distgemm.make_plan(problem, "ag+gemm", dist.get_world_size())
    a, b, _ = Data(plan, 7).shards(device)
    wrong = []
    for executable in (CollectiveExecutable(plan), UnfusedExecutable(problem, "ag+gemm", device=device)):

        def model(x: torch.Tensor, executable: Callable[..., torch.Tensor] = executable) -> torch.Tensor:
            return executable(2 * x, b, alpha=2.0) - 1

        wanted = model(a)
        compiled = torch.compile(model, backend="eager")
        for call in range(3):
            if not torch.equal(compiled(a), wanted):
                wrong.append(f"{type(executable).__name__}: call {call}")
        if not torch.equal(model(a), wanted):
            wrong.append(f"{type(executable).__name__}: not compiled, after")
    return wrong


def subgroups(dp: int) -> list[str]:
    """A data-parallel x tensor-parallel mesh: all groups multiply unequal tokens of their own at the same time."""
    device = device_of_rank()
    tp = dist.get_world_size() // dp
    row, rank = divmod(dist.get_rank(), tp)
    # All ranks make all groups, as torch asks for.
    group = [dist.new_group(list(range(first * tp, (first + 1) * tp))) for first in range(dp)][row]
    tokens = [[5, 0, 2, 7], [1, 3, 0, 4]][row][:tp]
    wrong = []
    for name in ("ag+gemm", "gemm+rs"):
        problem = distgemm.GemmProblem(m=sum(tokens), n=7, k=10, dtype="float32", m_per_rank=tuple(tokens))
        plan = distgemm.make_plan(problem, name, tp)
        data = Data(plan, 10 + row)
        executable = CollectiveExecutable(plan, group)
        for _ in range(3):
            a, b, _ = data.shards(device, rank)
            if not torch.equal(executable(a, b).double().cpu(), _double(data.expected(1, 0, rank))):
                wrong.append(f"{name}: group {row}, rank {rank}")
    return wrong


def numerics() -> list[str]:
    """Dtypes: sums are rounded once, fp8 works, and the caller's float32 settings neither matter nor change."""
    ranks, device = dist.get_world_size(), device_of_rank()
    wrong = []
    schedules = ("gemm+rs", "reduce_scatter_1d_pairwise_a", "all_gather_1d_tiling_k_rotating_a", "ag+gemm")
    for name, dtype in itertools.product(schedules, ("bfloat16", "float16", "float8_e4m3fn")):
        for partial in ("float32", None):
            problem = _problem(k=96, dtype=dtype, partial_dtype=partial)
            plan = distgemm.make_plan(problem, name, ranks)
            data = Data(plan, 7, most=12 if dtype == "bfloat16" else 8)
            a, b, c = data.shards(device)
            d = CollectiveExecutable(plan)(a, b, c, beta=3.0, bias=data.bias_shard(device))
            exact = _double(data.expected(1.0, 3.0, bias=True))
            rounded = exact.to(d.dtype).double()
            d = d.double().cpu()
            # Sums of these integers are exact in float32: the only rounding is the last one.
            if partial == "float32" and not torch.equal(d, rounded):
                wrong.append(f"{name} {dtype}: rounded more than once")
            elif not torch.allclose(d, exact, rtol=2.0**-7 * ranks, atol=8.0 * ranks):
                wrong.append(f"{name} {dtype}: wrong")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for dtype, bound in (("float32", 2e-6), ("tfloat32", 2e-3)):
            plan = distgemm.make_plan(_problem(k=64, dtype=dtype), "gemm+rs", ranks)
            data = Data(plan, 8)
            rng = np.random.default_rng(1)
            data.a, data.b = rng.random(data.a.shape), rng.random(data.b.shape)
            a, b, _ = data.shards(device)
            seen: list[str] = []
            with _watched_products(seen):
                d = CollectiveExecutable(plan)(a, b).double().cpu()
            if set(seen) != {"tf32" if dtype == "tfloat32" and device != "cpu" else "ieee"}:
                wrong.append(f"{dtype} is multiplied under the setting {seen}")
            if not torch.allclose(d, _double(data.expected(1, 0)), rtol=bound, atol=0):
                wrong.append(f"{dtype} is less precise than it is")
        if torch.get_float32_matmul_precision() != "medium":
            wrong.append("the setting of float32 has changed")
    finally:
        torch.set_float32_matmul_precision(before)
    return wrong


def one_shot_bits() -> list[str]:
    """Where every owner adds all parts, results are bitwise equal on all ranks and in a second call.

    The numbers are no integers, so another order of additions, or a part that is not rounded, gives other bits.
    """
    ranks, device = dist.get_world_size(), device_of_rank()
    wrong = []
    for number, (dtype, partial, k) in enumerate(
        itertools.product(("float32", "bfloat16", "float16"), (None, "float32"), (37 * ranks, ranks - 1))
    ):
        mode, chunks, m = ("m", "n")[number % 2], 1 + number % 3, (1, 5, 16)[number // 2 % 3]
        problem = _problem(m=m, n=40, k=max(k, 1), dtype=dtype, partial_dtype=partial)
        options: dict[str, Any] = {"workspace": ("full", "bounded")[number // 4 % 2], "chunks": chunks}
        plan = distgemm.make_plan(problem, "all_reduce_1d_one_shot_a", ranks, chunk_mode=mode, **options)
        data = Data(plan, number)
        rng = np.random.default_rng(number)
        data.a, data.b, data.c = (rng.standard_normal(each.shape) for each in (data.a, data.b, data.c))
        data.bias = rng.standard_normal(data.bias.shape)
        a, b, c = data.shards(device)
        executable = CollectiveExecutable(plan)
        d, again = (executable(a, b, c, alpha=0.7, beta=0.3, bias=data.bias_shard(device)).clone() for _ in range(2))
        others = [torch.empty_like(d) for _ in range(ranks)]
        dist.all_gather(others, d)
        if not all(torch.equal(d, other) for other in others):
            wrong.append(f"{plan.problem}, {options}: the bits of the ranks differ")
        if not torch.equal(d, again):
            wrong.append(f"{plan.problem}, {options}: the bits of two calls differ")
        exact = _double(data.expected(0.7, 0.3, bias=True))
        bound = {"float32": 2.0**-20, "float16": 2.0**-8, "bfloat16": 2.0**-5}[dtype]
        if not torch.allclose(d.double().cpu(), exact, rtol=bound, atol=8 * bound):
            wrong.append(f"{plan.problem}, {options}: wrong")
    return wrong


@contextlib.contextmanager
def _watched_products(seen: list[str]) -> Iterator[None]:
    """Note the setting of float32 under which every product is computed."""
    original = steps.matmul

    def watched(a: torch.Tensor, *others: Any) -> None:
        backends: Any = torch.backends.cuda if a.is_cuda else torch.backends.mkldnn
        seen.append(backends.matmul.fp32_precision)
        original(a, *others)

    steps.matmul = watched
    try:
        yield
    finally:
        steps.matmul = original


def without_copy(plan: Plan, copy: Copy, thorough: bool) -> Plan:
    """The plan without one Copy; ``thorough``: also without its Signal and Wait, and without deps on them."""
    if not thorough:
        return plan.replace_ops(copy.rank, [op for op in plan.ops(copy.rank) if op.id != copy.id])
    signals = [op for op in plan.ops(copy.rank) if isinstance(op, Signal) and copy.id in op.deps and not op.flag.credit]
    flags = {op.flag[:2] for op in signals}
    for rank in range(plan.world_size):
        ops: list[Op] = []
        gone = {
            op.id
            for op in plan.ops(rank)
            if (isinstance(op, Signal | Wait) and op.flag[:2] in flags) or (rank == copy.rank and op.id == copy.id)
        }
        for op in plan.ops(rank):
            if op.id not in gone:
                ops.append(dataclasses.replace(op, deps=tuple(dep for dep in op.deps if dep not in gone)))
        plan = plan.replace_ops(rank, ops)
    return plan


def deleted_copies() -> list[tuple[str, bool]]:
    """For every Copy of some plans: whether this rank's result is still right without it.

    Where nothing else ever arrives in the Copy's slot, the result must be NaN.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = []
    names = ("ag+gemm", "all_gather_1d_ring_a", "all_gather_1d_bidirectional_split_a", "gemm+rs")
    for name, workspace in itertools.product((*names, "reduce_scatter_1d_pairwise_a"), ("full", "bounded")):
        plan = distgemm.make_plan(_problem(), name, ranks, workspace=workspace)
        copies = [op for r in range(ranks) for op in plan.ops(r) if isinstance(op, Copy)]
        for copy, thorough in itertools.product(copies, (False, True)):
            changed = without_copy(plan, copy, thorough)
            right = True
            try:
                executable = CollectiveExecutable(changed)
            except distgemm.PlanError:
                right = False
            else:
                # The copy of an earlier executable must not stand in for the one that is missing.
                executable.memory.shared.reserve("workspace", 0).fill_(0xFF)
                for call in range(2):
                    data = Data(plan, call)
                    a, b, _ = data.shards(device_of_rank())
                    d = executable(a, b).double().cpu().numpy()
                    right = right and np.array_equal(d, data.expected(1, 0))
                    if workspace == "full" and copy.operand != "D" and rank == copy.dst.rank:
                        right = right or not np.isnan(d).any()
            found.append((f"{copy.describe()} of {name}, {workspace}, rank {rank}, thorough={thorough}", right))
    return found


def told_by_a_credit() -> Plan:
    """A gather of two ranks in which rank 1 learns only by a credit that its tile has arrived.

    Rank 0 copies the tile, then sets the credit. Rank 1 waits for the credit, copies its own tile to rank 0, and then
    multiplies what has arrived. So the credit and that Copy order the GEMM after the arrival. Rows of 13 elements are
    padded in the slot, so that a message that is not joined leaves NaN there.
    """
    plan = distgemm.make_plan(_problem(k=13), "all_gather_1d_ring_a", 2, sync="barrier")
    ops = [list(plan.ops(rank)) for rank in range(2)]
    (wait,) = [op for op in ops[1] if isinstance(op, Wait)]
    (copy,) = [op for op in ops[1] if isinstance(op, Copy)]
    flag = wait.flag._replace(credit=True)
    ops[0] = [dataclasses.replace(op, flag=flag) if isinstance(op, Signal) else op for op in ops[0]]
    rest = [op for op in ops[1] if op is not wait and not isinstance(op, Barrier)]
    deps = [tuple(copy.id if dep == wait.id else dep for dep in op.deps) for op in rest]
    later = [dataclasses.replace(op, round=max(op.round, 1), deps=each) for op, each in zip(rest, deps, strict=True)]
    later = [dataclasses.replace(op, deps=(*op.deps, wait.id)) if op.id == copy.id else op for op in later]
    barrier = [op for op in ops[1] if isinstance(op, Barrier)]
    ops[1] = [*barrier, dataclasses.replace(wait, flag=flag, round=1), *later]
    return plan.replace_ops(0, ops[0]).replace_ops(1, ops[1])


def told_by_a_barrier() -> Plan:
    """A gather of two ranks in which a second Barrier stands for the flags that say that tiles have arrived."""
    plan = distgemm.make_plan(_problem(k=13), "all_gather_1d_ring_a", 2, sync="barrier")
    for rank in range(2):
        ops = plan.ops(rank)
        (copy,) = [op for op in ops if isinstance(op, Copy)]
        (wait,) = [op for op in ops if isinstance(op, Wait)]
        barrier = Barrier(99, rank, wait.round, 0, "D", (), -1, (copy.id,))
        rest = [barrier if op is wait else op for op in ops if not isinstance(op, Signal)]
        deps = [tuple(99 if dep == wait.id else dep for dep in op.deps) for op in rest]
        plan = plan.replace_ops(rank, [dataclasses.replace(op, deps=each) for op, each in zip(rest, deps, strict=True)])
    return plan


def arrivals_without_a_flag() -> list[str]:
    """Plans that the proof accepts, and in which no Wait names the arrival: what is wrong with their results."""
    rank, found = dist.get_rank(), []
    for plan in (told_by_a_credit(), told_by_a_barrier()):
        plan.verify()
        executable = CollectiveExecutable(plan)
        for call in range(3):
            data = Data(plan, call)
            a, b, _ = data.shards(device_of_rank())
            if rank == call % 2:
                time.sleep(0.05)
            d = executable(a, b).double().cpu().numpy()
            if not np.array_equal(d, data.expected(1, 0)):
                found.append(f"call {call} on rank {rank}: {np.isnan(d).sum()} of {d.size} elements are NaN")
    return found


def run_all(todo: list[Case], checks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    """All results of one launch: the failures of the cases, and what each check found."""
    found: dict[str, Any] = {"cases": run_cases(todo)}
    for check, args in checks:
        found[check.__name__] = check(*args)
    return found
