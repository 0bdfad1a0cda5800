"""The ranks of the tests of the unfused program and of schedule="auto", over gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701  (has no public name)
from torch.utils._pytree import tree_leaves  # noqa: PLC2701  (has no public name)

import distgemm
from distgemm import GemmProblem, PlanError, tune
from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm import select as gemm_select
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import CompileError, KernelSource
from distgemm.gemm.tensors import spec_of
from distgemm.measure.operation import Method, Operation
from distgemm.measure.timing import Sample
from distgemm.runtime import unfused
from distgemm.runtime.checks import TORCH_DTYPES
from distgemm.runtime.collective.executable import CollectiveExecutable
from distgemm.runtime.executable import ExecutionConfig
from distgemm.runtime.groups import ranks_per_host
from distgemm.runtime.unfused import UnfusedExecutable
from distgemm.schedulers import PATTERNS, Pattern
from distgemm.torch_ops import dispatch
from distgemm.tune import UNFUSED, TunedConfig, config_of, search
from distgemm.tune import gemm as gemm_tuning
from distgemm.tune.cache import bucketed
from distgemm.tune.search import MIN_SPEEDUP

CPU = torch.device("cpu")
GPU = "none"
"""The name of the CPU in the cache's files."""
FILE = "plans_none.json"
GATHER = "all_gather_1d_tiling_cd_rotating_a"
ROWS = {1: (10,), 2: (3, 7), 3: (3, 0, 7), 4: (3, 0, 5, 2)}


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else CPU


def run_all(checks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    return {check.__name__: check(*args) for check, args in checks}


# --- the unfused program --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and the arguments of a call."""

    pattern: Pattern
    shape: tuple[int, int, int] = (8, 12, 16)
    l: int = 1  # noqa: E741
    dtypes: tuple[str, str | None, str | None] = ("float64", None, None)
    rows: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    gathered: bool = False
    strided: bool = False
    out: bool = False

    def problem(self, ranks: int) -> GemmProblem:
        m, n, k = self.shape
        rows = ROWS[ranks] if self.rows else None
        dtype, out, partial = self.dtypes
        return GemmProblem(sum(rows) if rows else m, n, k, self.l, dtype, out, partial, rows)


def unfused_cases() -> list[Case]:
    """For each pattern 16 combinations, in which every value of every argument occurs."""
    axes: dict[str, list[Any]] = {
        "shape": [(8, 12, 16), (10, 7, 9), (1, 9, 6), (5, 1, 7), (13, 6, 1)],
        "l": [1, 1, 3],
        "dtypes": [
            ("float64", None, None),
            ("float32", None, None),
            ("bfloat16", None, None),
            ("float16", None, None),
            ("bfloat16", "float32", None),
            ("bfloat16", "bfloat16", "float32"),
        ],
        "rows": [False, False, True],
        "alpha": [1.0, 2.0],
        "beta": [0.0, 3.0],
        "bias": [False, True],
        "gathered": [False, True],
        "strided": [False, True],
        "out": [False, True],
    }
    found = []
    for pattern in PATTERNS:
        rng = random.Random(pattern)
        columns = {key: (values * 16)[:16] for key, values in axes.items()}
        for column in columns.values():
            rng.shuffle(column)
        for number in range(16):
            values = {key: column[number] for key, column in columns.items()}
            case = Case(pattern, **values | {"rows": values["rows"] and pattern != "gemm+ar"})
            ok = unfused.unfused_status(case.problem(1), pattern)
            case = case if ok else dataclasses.replace(case, dtypes=("bfloat16", None, None))
            found.append(dataclasses.replace(case, gathered=case.gathered and pattern == "ag+gemm"))
    return found


def equal_to_numpy(collective: str = "nccl") -> list[str]:
    """Two calls on integers, with poisoned buffers before each, compute exactly what numpy computes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    failures, tried = [], 0
    for case in unfused_cases():
        problem = case.problem(ranks)
        if not unfused.collective_status(problem, case.pattern, collective, ranks):
            continue
        tried += 1
        exe = UnfusedExecutable(problem, case.pattern, collective=collective)
        for seed in (0, 1):
            a, b, c, bias = drawn(problem, seed)
            product = a @ b.swapaxes(-1, -2)
            wanted = case.alpha * product + case.beta * c + (bias if case.bias else 0)
            plan = exe.plan
            wholes = {"A": a, "B": b, "C": c}
            shards = {name: tensor(x[plan.shard(name, rank)], name, problem) for name, x in wholes.items()}
            more: dict[str, Any] = {}
            if case.bias:
                more["bias"] = tensor(bias[plan.shard("D", rank)[-1]], "D", problem)
            if case.strided:
                shards = {name: widened(x) for name, x in shards.items()}
            if case.out:
                shape = plan.shard_shape("D", rank)
                more["out"] = nans((1 + math.prod(shape),), "D", problem)[1:].view(shape)  # aligned to one element only
                if case.strided:
                    more["out"] = widened(more["out"])
            if case.gathered:
                more["gathered"] = nans(a.shape, "A", problem)
            for scratch in (*unfused._scratch.of(exe.group).values(), *unfused._symmetric.of(exe.group).values()):
                scratch.fill_(0xFF)
            if collective != "nccl":  # a peer reads the buffer that this rank poisons
                torch.cuda.synchronize()
                dist.barrier()
            found = exe(
                shards["A"], shards["B"], shards["C"] if case.beta else None, alpha=case.alpha, beta=case.beta, **more
            )
            if case.out and found is not more["out"]:
                failures.append(f"{case}: not out")
            if not np.array_equal(found.double().cpu().numpy(), wanted[plan.shard("D", rank)]):
                failures.append(f"{case} seed {seed} rank {rank}: D")
            if case.gathered and not np.array_equal(more["gathered"].double().cpu().numpy(), a):
                failures.append(f"{case} seed {seed} rank {rank}: gathered")
    return failures if tried > 2 else [f"{tried} cases"]


def drawn(problem: GemmProblem, seed: int) -> list[np.ndarray[Any, Any]]:
    """A, B, C and a bias, the same on all ranks: integers whose sums fit in 8 bits of mantissa."""
    rng = np.random.default_rng(seed)
    l, m, n, k = problem.l, problem.m, problem.n, problem.k  # noqa: E741
    shapes = [(l, m, k), (l, n, k), (l, m, n), (n,)]
    found = [rng.integers(-2, 3, shape).astype(np.float64) for shape in shapes]
    return found if l > 1 else [x[0] if x.ndim == 3 else x for x in found]


def dtype_of(name: str, problem: GemmProblem) -> torch.dtype:
    return TORCH_DTYPES[str(problem.dtype if name in "AB" else problem.out_dtype)]


def tensor(x: np.ndarray[Any, Any], name: str, problem: GemmProblem) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(device(), dtype_of(name, problem))


def nans(shape: tuple[int, ...], name: str, problem: GemmProblem) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype_of(name, problem), device=device())


def widened(x: torch.Tensor) -> torch.Tensor:
    """A copy with gaps between the rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


def no_allocation() -> list[str]:
    """A second call on equal shards, without C, allocates nothing, and executables share their buffers."""
    rank, failures = dist.get_rank(), []
    scratch = unfused._scratch.of(dist.group.WORLD)
    scratch.clear()
    for pattern in PATTERNS:
        problem = GemmProblem(64, 64, 64, dtype="float32")
        with torch.inference_mode():  # as in serving; the call below is outside of it
            exe = UnfusedExecutable(problem, pattern)
        before = dict(scratch)
        other = UnfusedExecutable(GemmProblem(32, 64, 64, dtype="float32"), pattern)
        if scratch != before or other.workspace_bytes > exe.workspace_bytes:
            failures.append(f"{pattern}: buffers are not shared")
        a, b, d = (torch.ones(exe.plan.shard_shape(name, rank)) for name in "ABD")
        exe(a, b, out=d)
        known = {x.untyped_storage().data_ptr() for x in (a, b, d, *scratch.values())}
        with NewTensors(known) as mode:
            exe(a, b, out=d)
        if mode.new or "mm" not in mode.seen:
            failures.append(f"{pattern}: {mode.new}, {mode.seen}")
    return failures


class NewTensors(TorchDispatchMode):
    """Notes the torch ops that return tensors in memory that is not known."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.new, self.seen = known, [], set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        self.seen.add(func.__name__.split(".")[0])
        for x in tree_leaves(found):
            # gloo splits a tensor in memory of its own; bytes are what the ranks compare.
            if func is torch.ops.aten.split.Tensor or (isinstance(x, torch.Tensor) and x.dtype == torch.uint8):
                continue
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.new.append(func.__name__)
        return found


def no_memory() -> list[str]:
    """What ranks raise if rank 1 has no memory; and that they go on then."""
    found = []
    memory = UnfusedExecutable._memory
    for pattern in PATTERNS:
        unfused._scratch.of(dist.group.WORLD).clear()
        failing = mock.patch.object(UnfusedExecutable, "_memory", side_effect=MemoryError("no memory"))
        with failing if dist.get_rank() == 1 else contextlib.nullcontext():
            found.append(message(lambda pattern=pattern: UnfusedExecutable(GemmProblem(8, 8, 8), pattern)))
        assert UnfusedExecutable._memory is memory and UnfusedExecutable(GemmProblem(8, 8, 8), pattern)
    return found


def misuse() -> list[str]:
    """The messages of wrong calls."""
    exe, reduce = (UnfusedExecutable(GemmProblem(8, 8, 8), pattern) for pattern in ("ag+gemm", "gemm+rs"))
    a, b = (torch.zeros(exe.plan.shard_shape(name, exe.rank), dtype=torch.bfloat16) for name in "AB")
    half = torch.zeros(8, 4, dtype=torch.bfloat16)
    wrong: list[Callable[[], Any]] = [
        lambda: exe(a, b, scale_a=torch.ones(1)),
        lambda: exe(a, b, bias=torch.ones(3)),
        lambda: exe(a, b, beta=1.0),
        lambda: exe(a, b, gathered=torch.ones(2, 2)),
        lambda: reduce(half, half, gathered=torch.ones(8, 8)),
        lambda: exe.capture(a, b),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8, dtype="float8_e4m3fn"), "ag+gemm"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8, dtype="tfloat32"), "gemm+rs"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8, out_dtype="float16"), "gemm+rs"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8), "ag"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8), "gemm+ar", collective="ring"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8), "gemm+rs", collective="two-shot"),
        lambda: UnfusedExecutable(GemmProblem(8, 8, 8), "gemm+ar", collective="one-shot"),
    ]
    return [message(call) for call in wrong]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- schedule="auto" ------------------------------------------------------------------------------------

PROBLEM = GemmProblem(256, 128, 64)
PLAN = TunedConfig("plan", "reduce_scatter_1d_pairwise_a", (("chunks", 2),), ExecutionConfig("cublas", gemm_streams=1))
OTHER = dataclasses.replace(PLAN, execution=ExecutionConfig("cublas"))
LARGE = GemmProblem(1024, 1024, 1024)
TILES = GemmConfig.parse("64x128x64_1x1_pingpong")
OTHER_TILES = GemmConfig.parse("128x64x64_2x1_pingpong")


def own_cache(folder: str, name: str) -> Path:
    """A cache folder for this rank alone."""
    path = Path(folder) / name / str(dist.get_rank())
    path.mkdir(parents=True, exist_ok=True)
    os.environ["DISTGEMM_CACHE_DIR"] = str(path)
    os.environ.pop("DISTGEMM_TUNE", None)
    return path


def record(config: TunedConfig, problem: GemmProblem = PROBLEM, pattern: Pattern = "gemm+rs") -> None:
    """Write a configuration to this rank's cache folder."""
    tune.CACHE.record(GPU, {tune.key_of(problem, pattern, dist.get_world_size()): config.to_dict()})


def agreement(folder: str) -> dict[str, Any]:
    """The selection if the files of the ranks differ."""
    rank, found = dist.get_rank(), {}
    own_cache(folder, "different")
    record(PLAN if rank == 0 else OTHER)
    found["different"] = tune.select(PROBLEM, "gemm+rs", device=CPU)
    own_cache(folder, "on rank 1")
    if rank == 1:
        record(OTHER)
    found["on rank 1"] = tune.select(PROBLEM, "gemm+rs", device=CPU, tune=False)
    path = own_cache(folder, "broken on rank 0")
    if rank == 0:
        (path / FILE).write_text("{")
    else:
        record(OTHER)
    found["broken on rank 0"] = message(lambda: tune.select(PROBLEM, "gemm+rs", device=CPU))
    path = own_cache(folder, "broken on rank 1")
    if rank == 0:
        record(PLAN)
    else:
        (path / FILE).write_text("{")
    found["broken on rank 1"] = tune.select(PROBLEM, "gemm+rs", device=CPU)
    return found


class FakeExecutable:
    """Stands for the executable of a plan: takes its shards and returns zeros."""

    def __init__(self, problem: GemmProblem, config: TunedConfig, kept: list[Any]) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.plan = dist.get_rank(), config.plan(problem, group.size(), ranks_per_host(group))
        self._kept = kept
        kept.append(self)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert tuple(a.shape) == self.plan.shard_shape("A", self.rank)
        assert tuple(b.shape) == self.plan.shard_shape("B", self.rank)
        return out.zero_()

    def release(self) -> None:
        self._kept.remove(self)


class Bench:
    """Fakes of the executables and of the timing loop. Times depend on a configuration's text."""

    def __init__(
        self,
        time: Callable[[str], float],
        refused: str = "?",
        fails: str = "?",
        wrong: bool = False,
        errors: tuple[type[Exception], ...] = (ValueError,),
    ) -> None:
        self.time, self.refused, self.fails, self.wrong, self.errors = time, refused, fails, wrong, errors
        self.measured: list[tuple[GemmProblem, tuple[str, ...]]] = []
        self.finals: list[tuple[str, ...]] = []
        """The names of each second measurement."""
        self.kept: list[Any] = []
        self.real = tune.ranks.make

    def make(self, problem: Any, pattern: Pattern, config: TunedConfig, group: Any, device: Any, **options: Any) -> Any:
        if self.refused in str(config):
            rank = dist.get_rank()
            raise self.errors[rank % len(self.errors)](f"no kernel on rank {rank}")
        if config.method == "unfused":
            return self.real(problem, pattern, config, group, device)
        return FakeExecutable(problem, config, self.kept)

    def sample(self, operation: Operation, methods: list[Method], **settings: float) -> dict[str, Sample]:
        for method in methods:
            found = method.run()
            assert found is not None
        names = tuple(method.name for method in methods)
        if settings:
            self.finals.append(names)
        else:
            self.measured.append((operation.problem, names))
        return {method.name: self.sampled(method.name) for method in methods}

    def sampled(self, name: str) -> Sample:
        if self.fails in name:
            return Sample(error="no memory", wrong=self.wrong)
        return Sample((self.time(name),))

    def __enter__(self) -> Bench:
        self.patches = [
            mock.patch.object(tune.ranks, "make", self.make),
            mock.patch("distgemm.tune.search.sample", self.sample),
            mock.patch("distgemm.tune.search.check_gpu"),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self.patches:
            patch.stop()


def by_name(fast: str, ms: float = 1.0, others: float = 2.0) -> Callable[[str], float]:
    return lambda name: ms if fast in name else others


@contextlib.contextmanager
def only_cutlass() -> Iterator[None]:
    """CUTLASS for Hopper is the only provider."""
    with contextlib.ExitStack() as stack:
        for module in ("candidates", "kernels"):
            providers = {"cutlass": CutlassProvider("90a")}
            stack.enter_context(mock.patch(f"distgemm.tune.{module}.providers", return_value=providers))
        yield


def all_to_alls(folder: str) -> dict[str, Any]:
    """Tuning of all-to-alls with fakes, and the expected results of all patterns."""
    group, found = dist.group.WORLD, dict[str, Any]()
    assert group is not None
    own_cache(folder, "all-to-alls")
    for pattern in ("gemm+a2a", "a2a+gemm"):
        with Bench(by_name("per-tile kernel 128x128x64")) as fakes:
            tuned = tune.tune(LARGE, pattern, group, device=CPU)
            again = tune.select(LARGE, pattern, group, device=CPU)
            found[pattern] = tuned, again, len(fakes.measured)
    for pattern in get_args(Pattern):
        problem = GemmProblem(64, 48, 32, dtype="float32")
        operation = Operation(problem, pattern, group, CPU)
        exe = CollectiveExecutable(distgemm.make_plan(problem, pattern, 2, sync="credit"), group, CPU)
        operation.check(pattern, exe(operation.a, operation.b))
    return found


def measuring(folder: str) -> dict[str, Any]:
    """Tuning with fakes."""
    rank, found = dist.get_rank(), {}
    group = dist.group.WORLD

    path = own_cache(folder, "fastest")
    steps: list[str] = []
    with Bench(by_name("pairwise_a chunks=1, GEMMs by cutlass, 1")) as fakes:
        found["fastest"] = tune.tune(PROBLEM, "gemm+rs", group, device=CPU, progress=steps.append)
        found["kept"], found["steps"] = len(fakes.kept), steps
        found["files"] = sorted(each.name for each in path.iterdir())
        found["written"] = list(json.loads((path / FILE).read_text())["configs"].values()) if rank == 0 else []
        again = tune.select(PROBLEM, "gemm+rs", group, device=CPU)
        found["again"] = again, again.source, len(fakes.measured)
        found["finals"] = fakes.finals

    own_cache(folder, "per tile")
    with only_cutlass(), Bench(by_name("per-tile kernel")):
        found["per tile"] = tune.tune(LARGE, "gemm+rs", group, device=CPU)
        for m in (1024, 1023, 1020):
            config = tune.select(dataclasses.replace(LARGE, m=m), "gemm+rs", group, device=CPU)
            found.setdefault("of m", []).append((config.source, config.execution.execution, str(config)))
        found["fallback"] = str(found["per tile"].config.fallback)

    own_cache(folder, "tie")
    with Bench(lambda name: 1.0):
        found["tie"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU).config
    own_cache(folder, "slower")
    with Bench(by_name("unfused", others=1.0001)):
        found["slower"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU).config

    own_cache(folder, "hardly faster")
    with Bench(by_name("unfused", ms=1.0, others=0.99)):
        found["hardly faster"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU).config
    with Bench(by_name("unfused", ms=1.0, others=0.97)):
        found["clearly faster"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU).config
    with Bench(by_name("cutlass"), refused="cublas", errors=(PlanError, OSError)):
        found["refused by one rank"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU, write=False).config

    own_cache(folder, "refused")
    with Bench(by_name("cublas"), refused="cublas") as fakes:
        found["refused"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU, write=False)
        found["not written"] = tune.look_up(PROBLEM, "ag+gemm", dist.get_world_size(), GPU)
    with Bench(by_name("-"), refused=""):
        found["nothing"] = message(lambda: tune.tune(PROBLEM, "ag+gemm", group, device=CPU))

    own_cache(folder, "no memory")
    with Bench(by_name("cublas")) as fakes:
        failing = mock.patch.object(search, "executable_method", side_effect=MemoryError("no memory"))
        with failing if dist.get_rank() == 1 else contextlib.nullcontext():
            found["no memory"] = message(lambda: tune.tune(PROBLEM, "ag+gemm", group, device=CPU))
        assert not fakes.kept

    own_cache(folder, "fails")
    with Bench(by_name("cublas"), fails="cublas"):
        found["fails"] = tune.tune(PROBLEM, "ag+gemm", group, device=CPU)
    with Bench(by_name("cublas"), fails=""):
        found["all fail"] = message(lambda: tune.tune(PROBLEM, "ag+gemm", group, device=CPU))
    with Bench(by_name("cublas"), fails="1 GEMM stream", wrong=True):
        found["wrong"] = message(lambda: tune.tune(PROBLEM, "ag+gemm", group, device=CPU))

    own_cache(folder, "ranks disagree")
    with Bench(by_name("cutlass" if rank == 0 else "unfused")):
        found["ranks disagree"] = str(tune.tune(PROBLEM, "ag+gemm", group, device=CPU).config)

    own_cache(folder, "buckets")
    with Bench(by_name("chunks=2")) as fakes:
        for m in (100, 65, 128, 127, 129, 1, 2, 64, 1000):
            problem = dataclasses.replace(PROBLEM, m=m)
            config = tune.select(problem, "gemm+rs", group, device=CPU)
            found.setdefault("buckets", []).append((m, config.source, [each[0].m for each in fakes.measured]))
        uneven = dataclasses.replace(PROBLEM, m=99, m_per_rank=(99, *[0] * (dist.get_world_size() - 1)))
        found["uneven"] = tune.select(uneven, "gemm+rs", group, device=CPU).source
        odd = GemmProblem(101, 127, 63)
        tune.tune(odd, "gemm+rs", group, device=CPU)
        found["rounded up"] = fakes.measured[-1][0]
        found["odd"] = tune.look_up(odd, "gemm+rs", dist.get_world_size(), GPU) is not None if rank == 0 else True

    own_cache(folder, "off")
    with Bench(by_name("chunks=2")) as fakes:
        found["off"] = [tune.select(PROBLEM, "gemm+rs", group, device=CPU, tune=False)]
        if rank == 0:
            os.environ["DISTGEMM_TUNE"] = "false"
        found["off"].append(tune.select(PROBLEM, "gemm+rs", group, device=CPU))
        if rank == 0:
            os.environ["DISTGEMM_TUNE"] = "never"
        found["neither"] = message(lambda: tune.select(PROBLEM, "gemm+rs", group, device=CPU))
        os.environ.pop("DISTGEMM_TUNE", None)
        batches = dataclasses.replace(PROBLEM, l=2)
        found["off"].append(tune.select(batches, "gemm+rs", group, device=CPU))
        found["off measured"] = len(fakes.measured)
        found["batches"] = message(lambda: tune.tune(batches, "gemm+rs", group, device=CPU))

    read_only = own_cache(folder, "unwritable")
    (read_only / FILE).with_suffix(".lock").mkdir()
    with Bench(by_name("chunks=2")) as fakes:
        found["unwritable"] = message(lambda: tune.tune(PROBLEM, "gemm+rs", group, device=CPU))
        found["unwritable measured"] = len(fakes.measured)
        found["unwritable auto"] = tune.select(PROBLEM, "gemm+rs", group, device=CPU)
    return found


def kernels(folder: str) -> dict[str, Any]:
    """Tuning that measures tiles of GEMMs first, with fakes."""
    rank, found = dist.get_rank(), {}
    gather = TunedConfig("plan", GATHER, (("chunks", 2),), ExecutionConfig("cutlass"))
    fewer = dataclasses.replace(gather, options=(("chunks", 4),), execution=ExecutionConfig("cutlass", gemm_streams=1))
    tried = [
        *(gather, fewer, dataclasses.replace(gather, options=(("chunks", 1),))),
        *(dataclasses.replace(gather, execution=ExecutionConfig("cublas")), UNFUSED),
    ]
    keys: list[str] = []
    built: list[Any] = []
    failing: list[int] = []

    def measured(tensors: GemmTensors, streams: int, write: bool) -> Any:
        keys.append(gemm_select.key_of(spec_of(tensors), streams))
        if rank in failing:
            raise ValueError("no memory")
        return SimpleNamespace(config=TILES, ms=0.123456 + rank)

    patches = (
        mock.patch.object(CutlassProvider, "arch", "90a"),
        mock.patch("distgemm.tune.search.shortlist", return_value=tried),
        only_cutlass(),
        mock.patch.object(gemm_tuning, "candidates", return_value=[TILES, OTHER_TILES]),
        mock.patch.object(gemm_tuning, "tune", measured),
        mock.patch("distgemm.tune.search.build_together", lambda *arguments, background: built.append(arguments)),
        Bench(lambda name: 1.0),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        own_cache(folder, "kernels")
        for name in ("fails", "measures", "again"):
            failing[:] = [1] if name == "fails" else []
            keys.clear()
            built.clear()
            text = message(lambda: tune.tune(LARGE, "ag+gemm", device=CPU, write=False, kernels=True))
            counts = [(len(set(sources)), len(sources), *ranks) for sources, *ranks in built]
            found[name] = text, list(keys), counts, gemm_select.CACHE.read(GPU)
    return found


def overlapping(folder: str) -> dict[str, Any]:
    """Kernels that rank 1 lacks are compiled while both ranks measure what is there."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    own_cache(folder, "overlapping")
    measured, compiled, order = threading.Event(), threading.Event(), []
    lacked = "pairwise_a chunks=1, GEMMs by cutlass"

    def sources(problem: Any, pattern: Any, world_size: int, configs: Any, **terms: Any) -> list[KernelSource]:
        assert (problem.m, world_size) == (PROBLEM.m, size)
        assert terms == {"rank": dist.get_rank(), "ranks_per_host": None}
        (config,) = configs
        if "chunks=2" in str(config):
            raise ValueError("this plan has no such kernel")
        return [KernelSource(f"kernel of {config}", (), "90a"), KernelSource("flags", (), "90a")]

    def build(wanted: list[KernelSource], *ranks: int, background: bool) -> None:
        assert background and ranks == (rank, size)
        order.append([source.name for source in wanted])
        assert measured.wait(60), "nothing was measured meanwhile"
        compiled.set()
        raise CompileError("whoever needs it says so")

    def is_there(source: KernelSource) -> bool:
        return rank == 0 or compiled.is_set() or lacked not in source.name

    bench = Bench(by_name(f"{lacked}, 1"))
    sample = bench.sample

    def sampled(operation: Operation, methods: list[Method], **settings: float) -> Any:
        late = any(lacked in method.name for method in methods)
        order.append((late, compiled.is_set(), sorted(method.name for method in methods)))
        measured.set()
        return sample(operation, methods, **settings)

    bench.sample = sampled
    with (
        mock.patch.object(search, "sources_of", sources),
        mock.patch.object(search, "is_there", is_there),
        mock.patch.object(search, "build_together", build),
        mock.patch.object(search, "has_kernels", return_value=True),
        bench,
    ):
        result = tune.tune(PROBLEM, "gemm+rs", dist.group.WORLD, device=CPU)
    found["config"], found["order"], found["times"] = str(result.config), order, result.times
    return found


def compiled(folder: str) -> dict[str, Any]:
    """distgemm.compile with "auto", and the torch functions. The recorded configuration is the unfused program."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    own_cache(folder, "compiled")
    problem = GemmProblem(8 * size, 4 * size, 16, dtype="float64")
    record(UNFUSED, bucketed(problem), "ag+gemm")
    exe = tune.executable(problem, "ag+gemm", device=CPU)
    a, b, _, bias = drawn(problem, 0)
    shards = [torch.from_numpy(x[exe.plan.shard(name, rank)]) for name, x in (("A", a), ("B", b))]
    wanted = (a @ b.T)[exe.plan.shard("D", rank)]
    found["equal"] = np.array_equal(exe(*shards).numpy(), wanted)
    config = config_of(exe)
    found["config"] = config, config and config.source, type(exe).__name__
    record(PLAN, problem)
    found["a plan on CPUs"] = message(lambda: tune.executable(problem, "gemm+rs", device=CPU))
    # compile looks up nothing for CPUs.
    on_cpu = distgemm.compile(problem, "auto", pattern="gemm+rs", device="cpu")
    found["on CPUs"] = str(config_of(on_cpu)), type(on_cpu).__name__
    found["tuned on CPUs"] = message(
        lambda: distgemm.compile(problem, "auto", pattern="gemm+rs", device="cpu", tune=True)
    )
    found["no GPU"] = message(lambda: distgemm.compile(problem, "gemm+rs"))
    grouped = dataclasses.replace(problem, groups=2)
    found["groups"] = message(lambda: tune.select(grouped, "ag+gemm", device=CPU))
    # As on a GPU, with tensors on the CPU.
    real = tune.executable
    with mock.patch.object(tune, "executable", lambda *args, **options: real(*args, **options | {"device": CPU})):
        prepared = dispatch.make("ag+gemm", problem, dist.group.WORLD, torch.device("cuda", 0), "auto", None)
    row = torch.from_numpy(bias)[exe.plan.shard("D", rank)[-1]]
    whole = torch.empty(problem.m, problem.k, dtype=torch.float64)
    d = prepared("all_gather_matmul", *shards, row, whole)
    found["function"] = np.array_equal(d.numpy(), wanted + row.numpy()) and np.array_equal(whole.numpy(), a)
    found["last"] = str(distgemm.last_call()), distgemm.last_call().tuned
    wrong: list[Callable[[], Any]] = [
        lambda: distgemm.compile(problem, "auto"),
        lambda: distgemm.compile(problem, "ag+gemm", pattern="ag+gemm"),
        lambda: distgemm.compile(exe.plan, "auto", pattern="ag+gemm"),
        lambda: distgemm.compile(problem, "auto", pattern="ag+gemm", chunks=2),
        lambda: distgemm.compile(problem, "auto", pattern="ag+gemm", gemm_streams=1),
        lambda: distgemm.compile(problem, "auto", pattern="ag"),
    ]
    found["wrong"] = [message(call) for call in wrong]
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        gpu = torch.device("cuda", 0)
        found["capturing"] = message(lambda: distgemm.compile(problem, "auto", pattern="ag+gemm", device=gpu))
    return found


# --- on GPUs --------------------------------------------------------------------------------------------


def measured(folder: str, patterns: Sequence[Pattern] = PATTERNS) -> list[str]:
    """Tuning, looking up, pinning and capturing on GPUs."""
    os.environ["DISTGEMM_CACHE_DIR"] = os.environ.get("DISTGEMM_CACHE_DIR") or folder
    rank, size, failures = dist.get_rank(), dist.get_world_size(), []
    for pattern in patterns:
        has_unfused = pattern in PATTERNS
        problem = GemmProblem(1000, 512 * size, 512 * size)  # its bucket is 1024
        executables = [distgemm.compile(problem, "auto", pattern=pattern) for _ in range(2)]
        first, second = (config_of(exe) for exe in executables)
        assert first is not None and second is not None
        if first != second or (first.source, second.source) != ("measured", "recorded"):
            failures.append(f"{pattern}: {first} {first.source}, then {second} {second.source}")
        tuned = tune.tune(dataclasses.replace(problem, m=1024), pattern, write=False)
        # An unfused program is taken unless a plan is clearly faster.
        margin = MIN_SPEEDUP if tuned.config.method == "unfused" else 0.0
        slow = tuned.ms * (1 - margin) > min(tuned.times.values())
        if tuned.refused or slow or (tuned.unfused_ms is not None) != has_unfused:
            failures.append(f"{pattern}: {tuned}")
        print(rank, pattern, tuned.config, tuned.times, flush=True)
        again = executables[1]
        a, b = (torch.randn(again.plan.shard_shape(name, rank), device=device()).bfloat16() for name in "AB")
        d = again(a, b)
        if second.method == "plan":
            pinned = distgemm.compile(problem, **second.arguments())
            if not torch.equal(pinned(a, b), d):
                failures.append(f"{pattern}: {second} by name gives other bits")
        plain = (
            UnfusedExecutable(problem, pattern)
            if has_unfused
            else distgemm.compile(problem, pattern, provider="cublas")
        )
        wanted = plain(a, b)
        error = float((d.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < 1e-2:
            failures.append(f"{pattern}: {second} differs from {plain.plan.schedule} by {error}")
        replay = plain.capture(a, b)
        replay.out.fill_(torch.nan)
        if not torch.equal(replay(), wanted):
            failures.append(f"{pattern}: the graph of {plain}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = again(a, b)
            small = GemmProblem(64, 512 * size, 512 * size)
            text = message(lambda small=small, pattern=pattern: distgemm.compile(small, "auto", pattern=pattern))
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(captured, d) or "once before capturing" not in text:
            failures.append(f"{pattern}: captured, {text}")
    return failures
