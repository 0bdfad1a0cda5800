"""The ranks of the tests of the torch functions on GPUs. Every rank computes the whole product, too, in float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional

import distgemm
from distgemm.gemm import GemmTensors, get_provider, nvcc
from distgemm.gemm.nvcc import build
from distgemm.gemm.per_tile.select import traits_of
from distgemm.gemm.spec import GemmConfig
from distgemm.gemm.tensors import spec_of
from distgemm.runtime import cuda
from distgemm.runtime.cuda.watchdog import watchdog
from distgemm.runtime.executable import PER_TILE, ExecutionConfig
from distgemm.schedulers import Pattern
from distgemm.torch_ops import dispatch, library
from distgemm.tune import TunedConfig
from distgemm.tune import ranks as tune_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
Tensor = torch.Tensor
CONFIG = "128x128x64_2x1_pingpong"
GATHER, RING = "all_gather_1d_tiling_cd_rotating_a", "all_gather_1d_ring_a"
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
ALL_REDUCE, ALL_REDUCE_PAIRWISE = "all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"
NAMED: dict[Pattern, tuple[str, int | None]] = {
    "ag+gemm": (GATHER, 1),
    "gemm+rs": (CHAIN, 2),
    "gemm+ar": (ALL_REDUCE, 2),
    "gemm+a2a": ("all_to_all_1d_rotating_d", 2),
    "a2a+gemm": ("all_to_all_1d_rotating_a", 2),
}
PER_TILE_SCHEDULES: dict[Pattern, str] = {
    "ag+gemm": GATHER,
    "gemm+rs": PAIRWISE,
    "gemm+ar": ALL_REDUCE_PAIRWISE,
}
EPS = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
TIMEOUT_S = 60.0
"""Timeout of a replay. The timeout of a check is longer: a rank that raises leaves the others waiting."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# --- one launch for many checks ----------------------------------------------------------------------------


def run_all(checks: Sequence[tuple[Callable[..., list[str]], tuple[Any, ...]]]) -> dict[str, list[str]]:
    """The failures of each check by its name, with tracebacks. After a check that raises, the others still run."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # the bounds are of float32 sums
    compile_ahead()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("torch_worker", dist.distributed_c10d._get_default_store())
    found: dict[str, list[str]] = {}
    for number, (check, arguments) in enumerate(checks):
        start = time.monotonic()
        try:
            found[check.__name__] = check(*arguments)
            torch.cuda.synchronize()
        except Exception:
            found[check.__name__] = [f"rank {rank}:\n{traceback.format_exc()}"]
        for failure in found[check.__name__]:
            print(f"rank {rank}, {check.__name__}: {failure}", flush=True)
        store.set(f"{number}/{rank}", "")
        try:
            store.wait([f"{number}/{other}" for other in range(ranks)], timedelta(seconds=3 * TIMEOUT_S))
        except Exception as error:
            raise RuntimeError(
                f"{check.__name__} has not ended on all ranks; on rank {rank}: {found[check.__name__]}"
            ) from error
        if rank == 0:
            print(f"{check.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    return found


# --- few kernels, and schedules by name -------------------------------------------------------------------


def _aligned(problem: distgemm.GemmProblem, ranks: int) -> bool:
    """Whether TMA can read all shards, and B transposed."""
    return problem.dtype == "bfloat16" and not problem.n % (8 * ranks) and not problem.k % (8 * ranks)


def quick(named: bool = True) -> AbstractContextManager[None]:
    """Compiles few kernels: GEMMs by one tile configuration of CUTLASS if all is aligned, otherwise by cuBLAS.

    Args:
        named: whether "auto", which all backward passes use, becomes a schedule of NAMED.
    """

    def gemms(plan: distgemm.Plan) -> dict[str, Any]:
        aligned = _aligned(plan.problem, plan.world_size)
        return {"provider": "cutlass", "config": CONFIG} if aligned else {"provider": "cublas"}

    return compiled_with(gemms, (lambda pattern, problem, group, chunks: NAMED[pattern]) if named else None)


@contextlib.contextmanager
def compiled_with(
    gemms: Callable[[distgemm.Plan], dict[str, Any]],
    auto: Callable[[Pattern, Any, str, int | None], tuple[str, int | None]] | None,
) -> Iterator[None]:
    """Plans are compiled with other providers and configurations, and a timeout for tests.

    Args:
        gemms: the fields of ExecutionConfig for a plan, beside no configuration.
        auto: a schedule and chunks in the place of "auto", for a pattern, problem, group and chunks; None: it stays.
    """
    make, prepare = cuda.compile_plan, library.prepare

    def compile_quickly(plan: distgemm.Plan, execution: ExecutionConfig | None = None, **options: Any) -> Any:
        execution = dataclasses.replace(execution or ExecutionConfig(), **({"config": None} | gemms(plan)))
        return make(plan, execution, **(options | {"timeout": TIMEOUT_S}))

    def by_name(
        pattern: Pattern, problem: Any, group: str, at: Any, schedule: str, chunks: int | None, *rest: Any, **more: Any
    ) -> Any:
        if schedule == "auto":
            schedule, chunks = auto(pattern, problem, group, chunks)
        return prepare(pattern, problem, group, at, schedule, chunks, *rest, **more)

    with contextlib.ExitStack() as stack:
        for module in (cuda, tune_ranks):
            stack.enter_context(mock.patch.object(module, "compile_plan", compile_quickly))
        if auto is not None:
            stack.enter_context(mock.patch.object(library, "prepare", by_name))
        yield


def compile_ahead(jobs: int | None = 2) -> None:
    """Compile the kernels of quick() together. Each rank begins with another one, and runs so many compilers."""
    a = torch.empty(256, 256, dtype=torch.bfloat16, device=device())
    d, row = torch.empty_like(a), a[0]
    specs = [
        spec_of(GemmTensors(a, b, d, partial=partial, bias=bias))
        for b in (a, a.t())
        for partial in (None, a)
        for bias in (None, row)
    ]
    sources = get_provider("cutlass").sources(specs, GemmConfig.parse(CONFIG), 2)
    first = dist.get_rank() * len(sources) // dist.get_world_size()
    build(sources[first:] + sources[:first], jobs=jobs, progress=dist.get_rank() == 0)
    dist.barrier(device_ids=[device().index])


# --- functions against the whole product --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a function, and of its gradients.

    Attributes:
        function: "gather", "scatter" or "reduce".
        ns: out_features of each b over all ranks.
        k: in_features over all ranks.
        rows: tokens of each rank; None: 96 on each.
        between: size of a dimension between tokens and features; None: no such dimension.
        bias: whether there is a bias for each b.
        keep: value of ``keep_gathered``.
        returned: value of ``return_gathered``.
        schedule, chunks: as in the functions.
        expanded: whether the gradient of the output is one row for all tokens.
    """

    function: str
    ns: tuple[int, ...]
    k: int
    rows: tuple[int, ...] | None = None
    between: int | None = None
    bias: bool = False
    keep: bool = False
    returned: bool = False
    schedule: str = "auto"
    chunks: int | None = None
    expanded: bool = False


def cases(ranks: int) -> list[Case]:
    unequal = (200, 0, 33, 64)[:ranks]
    n, k = 128 * ranks, 256
    return [
        Case("gather", (n,), k),
        Case("gather", (n,), k, bias=True, keep=True),
        Case("gather", (n,), k, schedule=RING, chunks=2, returned=True),
        Case("gather", (2 * n, n, n), k, bias=True),
        Case("gather", (n, 2 * n), k, keep=True, between=2),
        Case("gather", (n, n), k, rows=unequal, bias=True, returned=True),
        Case("gather", (n,), k, rows=unequal, between=2),
        Case("gather", (8 * ranks - 3,), k, bias=True),  # a vocabulary of 29 over 4 ranks
        Case("gather", (8 * ranks - 3, 16 * ranks - 1), k, rows=unequal),
        Case("gather", (n,), k, expanded=True),
        Case("scatter", (k,), n, schedule=CHAIN, chunks=2),
        Case("scatter", (k,), n, schedule=CHAIN, chunks=2, bias=True),
        Case("scatter", (k,), n, schedule=PAIRWISE, bias=True, between=2),
        Case("scatter", (k,), n, rows=unequal, schedule=CHAIN, chunks=1, bias=True),
        Case("scatter", (k,), n, rows=unequal, schedule=PAIRWISE),
        Case("scatter", (k,), 8 * ranks - 3, schedule=PAIRWISE),
        Case("scatter", (k,), n, schedule=PAIRWISE, expanded=True),
        Case("reduce", (k,), n, schedule=ALL_REDUCE, chunks=2, bias=True),
        Case("reduce", (k,), n, schedule=ALL_REDUCE_PAIRWISE, bias=True),
        Case("reduce", (k,), n, rows=(1,), schedule=ALL_REDUCE_PAIRWISE),  # one token, on some rank
        Case("reduce", (k,), n, rows=(50,), schedule=ALL_REDUCE, chunks=2),
    ]


def part(x: Tensor, sizes: Sequence[int], rank: int, dim: int) -> Tensor:
    stops = list(accumulate(sizes))
    return x.narrow(dim, stops[rank] - sizes[rank], sizes[rank])


@dataclasses.dataclass
class Drawn:
    """The inputs of a case, the same on all ranks, and the expected results in float64.

    Attributes:
        inputs: the tensors that have gradients, by name.
        grads: the gradient of each output.
        results: outputs and gradients, by name.
        magnitudes: the same, computed from absolute values.
        partial: name of the result that is summed over ranks, and the sum of the ranks' contributions without signs.
    """

    inputs: dict[str, Tensor]
    grads: list[Tensor]
    results: dict[str, Tensor]
    magnitudes: dict[str, Tensor]
    partial: tuple[str, Tensor]


def draw(case: Case, tokens: Sequence[int], ranks: int, seed: int) -> Drawn:
    generator = torch.Generator(device()).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device()).bfloat16()

    m = sum(tokens) * (case.between or 1)
    inputs = {"a": randn(m, case.k)} | {f"b{i}": randn(n, case.k) for i, n in enumerate(case.ns)}
    if case.bias:
        inputs |= {f"bias{i}": 8 * randn(n) for i, n in enumerate(case.ns)}
    grads = [randn(1, n).expand(m, n) if case.expanded else randn(m, n) for n in case.ns]

    def whole(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = {name: change(x.double()).requires_grad_() for name, x in inputs.items()}
        ys = [functional.linear(leaves["a"], leaves[f"b{i}"], leaves.get(f"bias{i}")) for i in range(len(case.ns))]
        found = torch.autograd.grad(ys, list(leaves.values()), [change(grad.double()) for grad in grads])
        names = [f"gradient of {name}" for name in leaves]
        return {f"y{i}": y.detach() for i, y in enumerate(ys)} | dict(zip(names, found, strict=True))

    if case.function == "gather":
        shares = [library.split_extent(n, ranks) for n in case.ns]
        contributions = [
            sum(
                part(grad, share, rank, 1).double() @ part(inputs[f"b{i}"], share, rank, 0).double()
                for i, (grad, share) in enumerate(zip(grads, shares, strict=True))
            )
            for rank in range(ranks)
        ]
        summed = "gradient of a"
    else:
        share = library.split_extent(case.k, ranks)
        contributions = [
            part(inputs["a"], share, rank, 1).double() @ part(inputs["b0"], share, rank, 1).double().t()
            for rank in range(ranks)
        ]
        summed = "y0"
    partial = torch.stack([torch.as_tensor(each).abs() for each in contributions]).sum(0)
    return Drawn(inputs, grads, whole(lambda x: x.detach()), whole(lambda x: x.detach().abs()), (summed, partial))


def run_case(case: Case, seed: int, group: Any = None) -> list[str]:
    """The differences of a case from the whole product."""
    group = dist.group.WORLD if group is None else group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = case.rows or (96,) * ranks
    drawn = draw(case, tokens, ranks, seed)
    rows = [each * (case.between or 1) for each in tokens]
    gathers, uneven = (
        case.function == "gather",
        any(n % ranks for n in (case.ns if case.function == "gather" else (case.k,))),
    )

    def mine(name: str, x: Tensor) -> Tensor:
        """This rank's part of an input, of its gradient, or of a result."""
        if case.function == "gather":
            return (
                part(x, rows, rank, 0)
                if name == "a"
                else part(
                    x,
                    library.split_extent(x.shape[-1 if name[0] == "y" else 0], ranks),
                    rank,
                    -1 if name[0] == "y" else 0,
                )
            )
        if name.startswith("y"):
            return x if case.function == "reduce" else part(x, rows, rank, 0)
        return x if name.startswith("bias") else part(x, library.split_extent(case.k, ranks), rank, 1)

    leaves = {name: mine(name, x).clone().requires_grad_() for name, x in drawn.inputs.items()}
    bs = [leaves[f"b{i}"] for i in range(len(case.ns))]
    biases = [leaves.get(f"bias{i}") for i in range(len(case.ns))]
    a = leaves["a"] if case.between is None else leaves["a"].unflatten(0, (-1, case.between))
    options: dict[str, Any] = {"group": group, "schedule": case.schedule, "chunks": case.chunks}
    if case.function != "reduce":
        options["m_per_rank"] = case.rows
    whole = None
    if gathers:
        several = len(bs) > 1
        options |= {"keep_gathered": case.keep, "return_gathered": case.returned}
        if uneven:
            options["out_features"] = list(case.ns) if several else case.ns[0]
        found: Any = distgemm.all_gather_matmul(
            a, bs if several else bs[0], bias=biases if several else biases[0], **options
        )
        found, whole = found if case.returned else (found, None)
        ys = list(found) if several else [found]
    else:
        function = distgemm.matmul_reduce_scatter if case.function == "scatter" else distgemm.matmul_all_reduce
        if uneven:
            options["in_features"] = case.k
        ys = [function(a, bs[0], bias=biases[0], **options)]
    ys = [y if case.between is None else y.flatten(0, 1) for y in ys]
    incoming = [mine(f"y{i}", grad) for i, grad in enumerate(drawn.grads)]
    got = dict(
        zip(
            [f"gradient of {name}" for name in leaves],
            torch.autograd.grad(ys, list(leaves.values()), incoming),
            strict=True,
        )
    ) | {f"y{i}": y.detach() for i, y in enumerate(ys)}
    wrong = []
    if whole is not None and not torch.equal(whole.reshape(-1, case.k), drawn.inputs["a"]):
        wrong.append(f"rank {rank}: the gathered input of {case}")
    terms = max(sum(case.ns), case.k, sum(rows))
    for name, wanted in drawn.results.items():
        allowed = EPS * wanted.abs() + terms * 2.0**-23 * drawn.magnitudes[name]
        if name == drawn.partial[0]:
            allowed += ranks * EPS * drawn.partial[1]  # contributions are rounded before they are added
        key = name.removeprefix("gradient of ")
        actual, expected, bound = got[name], mine(key, wanted), mine(key, allowed)
        if actual.shape != expected.shape:
            wrong.append(f"rank {rank}: {name} of {case} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
        elif actual.numel():
            excess = float(((actual.double() - expected).abs() / (bound + 1e-30)).max())
            if not excess <= 1:
                wrong.append(f"rank {rank}: the error of {name} of {case} is {excess:.2f} times the bound")
    return wrong


def equal_to_the_whole() -> list[str]:
    with quick():
        return [wrong for seed, case in enumerate(cases(dist.get_world_size())) for wrong in run_case(case, seed)]


def automatic() -> list[str]:
    """schedule="auto", forward and backward, without measuring."""
    n = 128 * dist.get_world_size()
    todo = [Case("gather", (n,), 256), Case("scatter", (256,), n), Case("reduce", (256,), n)]
    with quick(named=False), mock.patch.dict(os.environ, {"DISTGEMM_TUNE": "0"}):
        return [wrong for seed, case in enumerate(todo) for wrong in run_case(case, 500 + seed)]


class ToHeadsAndBack:
    """The projections of attention by all-to-alls: unequal tokens and heads, and one head of keys for all ranks.

    Attributes:
        equal: whether tokens and heads are equal instead, and there are as many of keys.
        tokens: tokens of each rank.
        inputs: tokens of all ranks, and the weights and biases.
    """

    def __init__(self, equal: bool = False) -> None:
        self.ranks, self.rank, self.equal = dist.get_world_size(), dist.get_rank(), equal
        self.tokens = [32 + 8 * rank * (not equal) for rank in range(self.ranks)]
        self.widths = [64 * (1 + (rank == 0 and not equal)) for rank in range(self.ranks)]
        n, generator = sum(self.widths), torch.Generator(device()).manual_seed(29)
        shapes = (sum(self.tokens), 2, 256), (n, 256), (n if equal else 64, 256), (n,), (256, n), (256,)
        self.inputs = [torch.randn(s, generator=generator, device=device()).bfloat16() / 4 for s in shapes]

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens."""
        return part(x, self.tokens, self.rank, 0)

    def leaves(self) -> list[Tensor]:
        """This rank's tokens, and the parameters."""
        x, *parameters = self.inputs
        return [each.clone().requires_grad_() for each in (self.mine(x), *parameters)]

    def __call__(self, x: Tensor, q: Tensor, k: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
        """The result for this rank's tokens."""
        given: dict[str, Any] = {"group": dist.group.WORLD, "m_per_rank": self.tokens}
        y, z = distgemm.matmul_all_to_all(
            x,
            [q, k],
            bias=[bias, None],
            n_per_rank=[self.widths, None],
            copies=[1, 1 if self.equal else self.ranks],
            **given,
        )
        h = functional.silu(y) * self.factors(z)
        return distgemm.all_to_all_matmul(h, out, bias=out_bias, k_per_rank=self.widths, **given)

    def factors(self, z: Tensor) -> Tensor:
        """What the queries are multiplied with: keys, or the mean of the one head."""
        return z if self.equal else z.mean(-1, keepdim=True)

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """The relative errors of a result and the gradients of its squares, against the whole product in float64."""
        leaves = [each.double().requires_grad_() for each in self.inputs]
        x, q, k, bias, out, out_bias = leaves
        h = functional.silu(functional.linear(x, q, bias)) * self.factors(functional.linear(x, k))
        y = functional.linear(h, out, out_bias)
        true = torch.autograd.grad(y.square().sum(), leaves)
        got = [each.detach().float() for each in results]
        for each in got[2:]:
            dist.all_reduce(each)  # each rank has the gradients of its tokens
        wanted = [self.mine(y), self.mine(true[0]), *true[1:]]
        return [relative(one, other) for one, other in zip(got, wanted, strict=True)]


def all_to_all() -> list[str]:
    """matmul_all_to_all and all_to_all_matmul, forward and backward, also in torch.compile."""
    layer, wrong, results = ToHeadsAndBack(), [], []
    with quick():
        for run in (layer, torch.compile(layer.__call__, fullgraph=True, backend=compiler())):
            leaves = layer.leaves()
            y = run(*leaves)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for name, found in zip(("eager", "compiled"), results, strict=True):
        errors = layer.errors(found)
        wrong += [f"{name} on rank {layer.rank}: relative errors {errors}"] * (not max(errors) < 3e-2)
    return wrong


def per_tile_all_to_all() -> list[str]:
    """The same with equal shards, all calls by per-tile kernels, also in graphs. Some hand out their rows of A."""
    schedules: dict[Pattern, str] = {"gemm+a2a": "all_to_all_1d_rotating_d", "a2a+gemm": "all_to_all_1d_rotating_a"}
    layouts = itertools.product(schedules, (False, True))
    build([traits_of(CONFIG, pattern, turned_b=turned_b).source() for pattern, turned_b in layouts])
    named = {pattern: (f"{name} execution=per_tile", None) for pattern, name in schedules.items()}
    layer = ToHeadsAndBack(equal=True)
    with mock.patch.dict(NAMED, named), distgemm.record_calls() as calls:
        with quick():
            leaves = layer.leaves()
            y = layer(*leaves)
            errors = layer.errors([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
        wrong = captured_all_to_all(layer)
    wrong += [f"on rank {layer.rank}: relative errors {errors}"] * (not max(errors) < 3e-2)
    return wrong + [f"rank {layer.rank}: {call}" for call in calls if call.transfers != PER_TILE]


def captured_all_to_all(layer: ToHeadsAndBack | None = None) -> list[str]:
    """A graph of forward and backward has the bits of eager calls, with changing inputs."""
    layer, wrong = layer or ToHeadsAndBack(), []
    leaves = layer.leaves()

    def step() -> list[Tensor]:
        y = layer(*leaves)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    with quick():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # graphs of earlier checks that are collected meanwhile would spoil the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = step()
        for number in range(3):
            with torch.no_grad():
                leaves[0].mul_(1 + number / 4)
            graph.replay()
            kept = [each.clone() for each in recorded]
            same = [torch.equal(one, other) for one, other in zip(kept, step(), strict=True)]
            if not all(same):
                wrong.append(f"rank {layer.rank}, replay {number}: {same}")
    return wrong


def recorded_per_tile(problem: distgemm.GemmProblem, pattern: Pattern, *_: Any) -> TunedConfig:
    """A look-up that finds a per-tile kernel, and the same schedule by cuBLAS for what it does not execute."""
    execution = ExecutionConfig(config=CONFIG, gemm_streams=1, execution="per_tile")
    fallback = TunedConfig("plan", PER_TILE_SCHEDULES[pattern], (), ExecutionConfig("cublas", gemm_streams=1))
    return dataclasses.replace(fallback, execution=execution, source="recorded", fallback=fallback)


def per_tile() -> list[str]:
    """schedule="auto" where per-tile kernels are recorded: forward and backward, captured, and with copies for TMA.

    Unequal shards, which per-tile kernels do not execute, take the fallback.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    n, k, unequal = 128 * ranks, 256, (200, 0, 33, 64)[:ranks]
    layouts = itertools.product(PER_TILE_SCHEDULES, (False, True))
    build([traits_of(CONFIG, pattern, turned_b=turned_b).source() for pattern, turned_b in layouts])
    gather = ["all_gather_matmul", "matmul_reduce_scatter"]
    # The calls of each case that a per-tile kernel executes.
    todo = [
        (Case("gather", (n,), k), [*gather, "gather"]),
        (Case("gather", (n,), k, bias=True, between=2), [*gather, "gather"]),
        (Case("gather", (n,), k, keep=True), gather),
        (Case("gather", (n,), k, returned=True), gather),
        (Case("gather", (2 * n, n), k, bias=True), [*gather, "gather"]),
        (Case("scatter", (k,), n, bias=True), gather[::-1]),
        (Case("reduce", (k,), n, bias=True), ["matmul_all_reduce"]),
    ]
    if ranks <= len(unequal):
        todo += [(Case("gather", (n,), k, rows=unequal), []), (Case("scatter", (k,), n, rows=unequal), [])]
    wrong = []
    group = dist.new_group()  # of its own, since the calls of other checks have made executables of the same shapes
    with (
        mock.patch.object(importlib.import_module("distgemm.tune.select"), "look_up", recorded_per_tile),
        mock.patch.dict(os.environ, {"DISTGEMM_TUNE": "0"}),
    ):
        for seed, (case, wanted) in enumerate(todo):
            with distgemm.record_calls() as calls:
                wrong += run_case(case, 700 + seed, group)
            ran = [call.function for call in calls if call.transfers == PER_TILE]
            wrong += [f"rank {rank}: {ran} of {case} ran per tile, and not {wanted}"] * (ran != wanted)
            others = [call for call in calls if call.transfers != PER_TILE]
            wrong += [f"rank {rank}: {call}" for call in others if call.provider != "cublas"]
        wrong += captured_per_tile(distgemm.matmul_all_reduce, (96 * ranks, 128), (k, 128), group)
        wrong += captured_per_tile(distgemm.all_gather_matmul, (96, k), (128, k), group)
    return wrong


def captured_per_tile(
    function: Callable[..., Tensor], shape: tuple[int, int], b_shape: tuple[int, int], group: Any
) -> list[str]:
    """Graphs replay a call with other inputs, also one whose A is copied because its rows are not where TMA reads."""
    whole = torch.randn(shape[0], shape[1] + 4, device=device()).bfloat16()
    b = torch.randn(b_shape, device=device()).bfloat16()
    cut, dense = whole[:, : shape[1]], whole[:, : shape[1]].contiguous()
    graphs = []
    for a in (cut, dense):
        function(a, b, group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, function(a, b, group=group)))
    wrong = []
    for number in range(3):
        whole.normal_()
        dense.copy_(cut)
        wanted = function(dense, b, group=group)
        for name, (graph, found) in zip(("copied", "dense"), graphs, strict=True):
            found.fill_(float("nan"))
            graph.replay()
            if not torch.equal(found, wanted):
                wrong.append(f"rank {dist.get_rank()}: replay {number} of {function.__name__} with A {name}")
        if distgemm.last_call().transfers != PER_TILE:
            wrong.append(str(distgemm.last_call()))
    return wrong


def float64() -> list[str]:
    """Reductions of float64 tensors by named schedules, also with a bias, which a sum adds where cuBLAS cannot."""
    ranks, rank, group, wrong = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, []
    generator = torch.Generator(device()).manual_seed(13)
    for schedule, chunks in (
        (CHAIN, 2),
        (PAIRWISE, 1),
        (ALL_REDUCE, 2),
        (ALL_REDUCE_PAIRWISE, 1),
        ("all_reduce_1d_one_shot_a", 1),
    ):
        shapes = (24 * ranks, 32 * ranks), (40, 32 * ranks), (40,)
        a, b, bias = (torch.randn(s, generator=generator, device=device(), dtype=torch.float64) for s in shapes)
        scatters = schedule.startswith("reduce_scatter")
        function: Any = distgemm.matmul_reduce_scatter if scatters else distgemm.matmul_all_reduce
        y = function(
            a.chunk(ranks, 1)[rank], b.chunk(ranks, 1)[rank], bias=bias, group=group, schedule=schedule, chunks=chunks
        )
        wanted = functional.linear(a, b, bias)
        error = relative(y, wanted.chunk(ranks)[rank] if scatters else wanted)
        wrong += [f"rank {rank}, {schedule}: {error:.1e}"] * (not error < 1e-14 * ranks)
    return wrong


def subgroups() -> list[str]:
    """A mesh of data parallelism and tensor parallelism: both tensor-parallel groups run at the same time."""
    ranks = dist.get_world_size() // 2
    mesh = init_device_mesh("cuda", (2, ranks), mesh_dim_names=("dp", "tp"))
    row = mesh.get_local_rank("dp")
    todo = (
        Case("gather", (128 * ranks,), 256, bias=True, rows=((64, 9), (8, 120))[row]),
        Case("scatter", (256,), 128 * ranks, bias=True, schedule=CHAIN, chunks=2),
        Case("reduce", (256,), 128 * ranks, schedule=ALL_REDUCE_PAIRWISE),
    )
    with quick():
        return [wrong for case in todo for wrong in run_case(case, 100 + row, mesh["tp"].get_group())]


def compiler() -> str:
    """The backend for torch.compile: Inductor, if triton, Python's headers and a C compiler are installed."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    installed = importlib.util.find_spec("triton") and headers and (shutil.which("gcc") or shutil.which("cc"))
    return "inductor" if installed else "aot_eager"


def compiled() -> list[str]:
    """torch.compile without a graph break: forward and backward of all functions, against eager calls."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator(device()).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device()).bfloat16().requires_grad_()

    a, b, c, d, e = randn(64, 256), randn(128, 256), randn(64, 256), randn(256, 128), randn(64, 256)

    def layer(a: Tensor) -> Tensor:
        y, z = distgemm.all_gather_matmul(a, [b, c], group=group, keep_gathered=True)
        h = functional.silu(y) + z.sum(-1, keepdim=True)
        h = distgemm.matmul_reduce_scatter(h, d, group=group)
        return distgemm.matmul_all_reduce(h, e, group=group)

    backend = compiler()
    if backend == "inductor":
        importlib.import_module("torch._inductor.config").compile_threads = 1  # no pool of compilers on each rank
    if dist.get_rank() == 0:
        print(f"compiled by {backend}", flush=True)
    with quick():
        results = []
        for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            y = run(a)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [a, b, c, d, e])])
    errors = [relative(x, y) for x, y in zip(*results, strict=True)]
    return [f"{backend} on {ranks} ranks: relative errors {errors}"] * (not max(errors) < 2e-2)


# --- modules --------------------------------------------------------------------------------------------------


def relative(x: Tensor, y: Tensor) -> float:
    """The relative distance of x from y."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / (y.norm() + 1e-30))


def modules() -> list[str]:
    """Two layers in float32 against both Linears on one GPU, also with hidden features that ranks do not divide."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    wrong = []
    for tokens, hidden in ((None, 64 * ranks), ((40, 0, 7, 16)[:ranks], 24 * ranks - 3)):
        torch.manual_seed(3)
        sizes = tokens or (16,) * ranks
        up, down = (nn.Linear(*shape, device=device()) for shape in ((48, hidden), (hidden, 40)))
        x = torch.randn(sum(sizes), 2, 48, device=device(), requires_grad=True)
        y = down(torch.tanh(up(x)))
        weights = torch.randn_like(y)
        y.backward(weights)
        own = part(x.detach(), sizes, rank, 0).clone().requires_grad_()
        first = distgemm.nn.ColumnParallelLinear.from_linear(up, group=group, sequence_dim=0)
        second = distgemm.nn.RowParallelLinear.from_linear(down, group=group, sequence_dim=0)
        with quick():
            z = second(torch.tanh(first(own, m_per_rank=tokens)), m_per_rank=tokens)
            z.backward(part(weights, sizes, rank, 0))
        assert x.grad is not None
        found = {"y": (z, part(y, sizes, rank, 0)), "x": (own.grad, part(x.grad, sizes, rank, 0))}
        for layer, linear in ((first, up), (second, down)):
            for name, parameter in linear.named_parameters():
                found[f"{type(layer).__name__}.{name}"] = getattr(layer, name).grad.full_tensor(), parameter.grad
        for name, (actual, expected) in found.items():
            if actual.shape != expected.shape or not relative(actual, expected) < 1e-5:
                wrong.append(f"rank {rank}: {name}, tokens {tokens}: {relative(actual, expected):.1e}")
    return wrong


def styles() -> list[str]:
    """The Llama of the examples with parallelize_module has the loss and the gradients of the model on one GPU."""
    sys.path.insert(0, str(EXAMPLES))
    import llama

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(5)
    # The ranks do not divide the vocabulary and the intermediate size.
    config = llama.Config(vocabulary=12 * ranks + 1, hidden=64, intermediate=40 * ranks - 1, heads=8, kv_heads=4)
    ids = torch.randint(config.vocabulary, (8 * ranks + 1, 4), device=device())
    plain = llama.Llama(config).to(device())
    parallel = parallelize_module(copy.deepcopy(plain), mesh, llama.tensor_parallel_plan())

    def loss_of(model: nn.Module) -> Any:
        loss = functional.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten())
        loss.backward()
        return loss.detach()

    wanted = loss_of(plain)
    with quick(), loss_parallel():
        found = loss_of(parallel)
    found = found.full_tensor() if isinstance(found, DTensor) else found
    wrong = [f"loss {found} instead of {wanted}"] * (not relative(found, wanted) < 1e-5)
    for (name, x), y in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        grad: Any = x.grad
        error = relative(grad.full_tensor() if isinstance(grad, DTensor) else grad, y.grad)  # type: ignore[arg-type]
        if not error < 1e-4:
            wrong.append(f"gradient of {name}: {error:.1e}")
    return wrong


def warmed_up() -> list[str]:
    """After warmup, the first step of a Llama finds all of its kernels: it runs without a compiler.

    The kernel cache is a new folder. The trace of both passes has the calls of the step, takes no memory of the GPU,
    and leaves gradients and the generator as they are.
    """
    sys.path.insert(0, str(EXAMPLES))
    import llama

    ranks = dist.get_world_size()
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=device())
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(5)
    config = llama.Config(vocabulary=4096, hidden=1024, intermediate=1408 * ranks, layers=1, heads=16, kv_heads=8)
    ids = torch.randint(config.vocabulary, (2049, 1), device=device())
    model = parallelize_module(llama.Llama(config).bfloat16().to(device()), mesh, llama.tensor_parallel_plan())
    wrong = []
    with mock.patch.dict(os.environ, {"DISTGEMM_CACHE_DIR": folder[0], "DISTGEMM_TUNE": "0"}):
        memory, drawn = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
        start = time.monotonic()
        needs = distgemm.warmup(model, ids[:-1])
        seconds = time.monotonic() - start
        if torch.cuda.memory_allocated() > memory or not torch.equal(torch.cuda.get_rng_state(), drawn):
            wrong.append("warmup takes memory or random numbers of the GPU")
        wrong += [f"warmup sets a gradient of {name}" for name, x in model.named_parameters() if x.grad is not None]
        kept = len(list(nvcc.cached()))
        print(f"rank {dist.get_rank()}: {len(needs)} calls, {kept} kernels in the cache, {seconds:.1f} s", flush=True)
        dist.barrier(device_ids=[device().index])
        # A kernel that is missing now is an error.
        with mock.patch.object(nvcc, "find_nvcc", return_value=None), distgemm.record_calls() as calls:
            with loss_parallel():
                functional.cross_entropy(model(ids[:-1]).flatten(0, 1).float(), ids[1:].flatten()).backward()
            torch.cuda.synchronize()
        if len(list(nvcc.cached())) != kept:
            wrong.append(f"the step adds kernels to the cache, which had {kept}")
    traced, made = {need.problem for need in needs}, {call.plan.problem for call in calls}
    if traced != made:
        wrong.append(f"traced alone: {traced - made}; run alone: {made - traced}")
    if {need.device for need in needs} != {"cuda"} or {need.turned_b for need in needs} != {False, True}:
        wrong.append(f"these are not the calls of both passes on GPUs: {needs}")
    if not any(call.kernels for call in calls):
        wrong.append("no call has a kernel, so this test shows nothing")
    grads: list[Any] = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    wrong += [f"no finite gradient of {n}" for n, x in grads if x is None or not x.to_local().isfinite().all()]
    dist.barrier(device_ids=[device().index])
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return [f"rank {dist.get_rank()}: {each}" for each in wrong]


def after_inference() -> list[str]:
    """Runs first: a workspace that is made in inference mode serves gradients and the watchdog."""
    case = Case("gather", (128 * dist.get_world_size(),), 256, schedule=GATHER)
    a, b = (torch.randn(128, 256, device=device()).bfloat16() for _ in range(2))
    with quick():
        with torch.inference_mode():
            distgemm.all_gather_matmul(a, b, group=dist.group.WORLD, schedule=GATHER)
        wrong = run_case(case, 900)
    time.sleep(1.0)  # time for the watchdog to read its flags
    return wrong + ["the watchdog has failed"] * any(watched.failed for watched in watchdog().watched.values())


# --- graphs ---------------------------------------------------------------------------------------------------


def mlp(depth: int, width: int = 256) -> nn.Sequential:
    """Blocks of two layers in bfloat16 with named schedules. Each rank draws its own part."""
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    options: dict[str, Any] = {"group": dist.group.WORLD, "device": device(), "dtype": torch.bfloat16}
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [
            distgemm.nn.ColumnParallelLinear(width, 128 * ranks, schedule=GATHER, **options),
            nn.SiLU(),
            distgemm.nn.RowParallelLinear(128 * ranks, width, schedule=CHAIN, chunks=2, **options),
        ]
    return nn.Sequential(*layers)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def recorded_steps() -> list[str]:
    """A graph of forward, backward and optimizer, with changing inputs: each replay has the bits of an eager step."""
    models = [mlp(depth=2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True) for model in models]
    x = torch.randn(64, 256, device=device()).bfloat16()
    wrong = []
    with quick():
        before = copy.deepcopy(models[1].state_dict())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                training_step(models[1], optimizers[1], x)
        torch.cuda.current_stream().wait_stream(side)
        models[1].load_state_dict(before)
        for state in optimizers[1].state.values():
            for value in state.values():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = training_step(models[1], optimizers[1], x)
        losses = set()
        for step in range(7):
            batch = torch.randn(64, 256, device=device()).bfloat16()
            x.copy_(batch)
            x_before = x.clone()
            recorded.fill_(float("nan"))
            if dist.get_rank() == step % dist.get_world_size():
                torch.cuda._sleep(3_000_000)  # one rank is late
            graph.replay()
            loss = training_step(models[0], optimizers[0], batch)
            losses.add(float(loss))
            if not torch.equal(loss, recorded) or not torch.equal(x, x_before):
                wrong.append(f"rank {dist.get_rank()}, step {step}: loss {recorded} instead of {loss}")
            pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
            wrong += [
                f"step {step}: {name}" for (name, one), two in pairs if not torch.equal(one.to_local(), two.to_local())
            ]
            if wrong:
                break
    return wrong + [f"losses {losses}"] * (not wrong and len(losses) != 7)


def graphed_callables() -> list[str]:
    """torch.cuda.make_graphed_callables: results and gradients have the bits of the module's."""
    plain = mlp(depth=1)
    other = copy.deepcopy(plain)
    x = torch.randn(64, 256, device=device()).bfloat16().requires_grad_()
    wrong = []
    with quick():
        graphed: Any = torch.cuda.make_graphed_callables(other, (x.detach().clone().requires_grad_(),))
        for number in range(3):
            results = []
            incoming = torch.randn(64, 256, device=device()).bfloat16()
            x = torch.randn(64, 256, device=device()).bfloat16().requires_grad_()
            for model in (plain, graphed):
                leaves = [x, *model.parameters()]
                y = model(x)
                results.append([y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y, leaves, incoming))])
            if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
                wrong.append(f"call {number}: {[torch.equal(*pair) for pair in zip(*results, strict=True)]}")
    return wrong


def refused_captures() -> list[str]:
    """A capture that would have to make an executable raises before it begins. What the error says then works."""
    group, rank = dist.group.WORLD, dist.get_rank()
    a = torch.randn(40, 256, device=device()).bfloat16()
    b = torch.randn(128, 256, device=device()).bfloat16().requires_grad_()
    remedy = "Run the same forward and backward pass once before torch.cuda.graph"
    wrong = []

    def capture(run: Callable[[], Tensor], what: str) -> None:
        gc.collect()  # graphs of earlier checks that are collected meanwhile would spoil the capture
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
            wrong.append(f"{what}: nothing was raised")
        except RuntimeError as error:
            if remedy not in str(error):
                wrong.append(f"rank {rank}, {what}: {error}")
        torch.cuda.synchronize()

    def forward() -> Tensor:
        return distgemm.all_gather_matmul(a, b, group=group, schedule=GATHER)

    def backward() -> Tensor:
        (found,) = torch.autograd.grad(forward().float().sum(), b)
        return found

    with quick():
        capture(forward, "forward")
        wanted = forward().detach()
        capture(backward, "backward")
        gradient = backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, found = forward(), backward()
        graph.replay()
        if not torch.equal(y, wanted) or not torch.equal(found, gradient):
            wrong.append(f"rank {rank}: the captured results differ")
    return wrong


# --- chunks for the caller's own GEMM -------------------------------------------------------------------------


def gather_chunks() -> list[str]:
    """distgemm.gather against float64: eager and captured, with inputs that change, beside calls, and with errors."""
    ranks, rank, group, wrong = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, []
    generator = torch.Generator(device()).manual_seed(11)  # the same inputs on all ranks
    b = torch.randn(40, 256, generator=generator, device=device()).bfloat16()
    beside = torch.randn(128, 256, device=device()).bfloat16()

    def multiply(a: Tensor, d: Tensor, **options: Any) -> Tensor:
        rows_seen = 0
        with distgemm.gather(a, group=group, **options) as chunks:
            for rows, chunk in chunks:
                torch.matmul(chunk, b.t(), out=d[rows])
                rows_seen += len(chunk)
        if rows_seen != len(d):
            wrong.append(f"rank {rank}, {options}: {rows_seen} of {len(d)} rows")
        return d

    def check(what: str, whole: Tensor, d: Tensor) -> None:
        wanted, allowed = whole.double() @ b.double().t(), whole.double().abs() @ b.double().abs().t()
        excess = ((d.double() - wanted).abs() / (EPS * wanted.abs() + 256 * 2.0**-23 * allowed + 1e-30)).max()
        if not float(excess) <= 1:
            wrong.append(f"rank {rank}, {what}: the error is {float(excess):.2f} times the bound")

    for schedule, chunks, unequal in ((GATHER, 2, False), (RING, 1, False), ("auto", None, True)):
        sizes = (200, 0, 33, 64)[:ranks] if unequal else (96,) * ranks
        options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "m_per_rank": sizes}
        whole = torch.empty(sum(sizes), 256, device=device(), dtype=torch.bfloat16)
        mine, d = part(whole, sizes, rank, 0).clone(), b.new_empty(sum(sizes), 40)

        def change(whole: Tensor = whole, mine: Tensor = mine, d: Tensor = d, sizes: Any = sizes) -> None:
            whole.copy_(torch.randn(whole.shape, generator=generator, device=device()))
            mine.copy_(part(whole, sizes, rank, 0))
            d.fill_(float("nan"))

        with quick(named=False):
            graph = torch.cuda.CUDAGraph()
            for call in range(4):
                change()
                if rank == call % ranks:
                    torch.cuda._sleep(3_000_000)  # one rank is late
                multiply(mine, d, **options)
                distgemm.all_gather_matmul(mine, beside, group=group, schedule=GATHER, m_per_rank=sizes)
                multiply(mine, d, **options)  # the host runs ahead of the GPU
                check(f"call {call} of {options}", whole, d)
            with torch.cuda.graph(graph):
                multiply(mine, d, **options)
                multiply(mine, d, **options)
            for replay in range(5):
                change()
                if rank == replay % ranks:
                    torch.cuda._sleep(3_000_000)
                graph.replay()
                check(f"replay {replay} of {options}", whole, d)
                if replay % 2:
                    multiply(mine, d, **options)
                    check(f"the call behind replay {replay} of {options}", whole, d)
            for after in range(3):  # a rank's block fails, and the others go on
                change()
                try:
                    with distgemm.gather(mine, group=group, **options) as arriving:
                        for number, (rows, chunk) in enumerate(arriving):
                            if rank == after % ranks and number == after // ranks:
                                raise ArithmeticError("of the caller")
                            torch.matmul(chunk, b.t(), out=d[rows])
                    check(f"beside an error, {options}", whole, d)
                except ArithmeticError:
                    pass
                try:
                    with distgemm.gather(mine, group=group, **options):
                        distgemm.all_gather_matmul(mine, beside, group=group, schedule=GATHER, m_per_rank=sizes)
                    wrong.append(f"rank {rank}: a call inside the block was not refused")
                except RuntimeError as error:
                    if "has not ended: make this call behind its with block" not in str(error):
                        wrong.append(f"rank {rank}: {error}")
                multiply(mine, d, **options)
                check(f"after an error, {options}", whole, d)
            side = torch.cuda.Stream()
            change()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                multiply(mine, d, **options)
            torch.cuda.current_stream().wait_stream(side)
            check(f"on another stream, {options}", whole, d)
        graph.reset()
    said = str(distgemm.last_call())
    return wrong + [f"rank {rank}: {said}"] * ("GEMMs by the caller; overlapped" not in said)


# --- memory ---------------------------------------------------------------------------------------------------


def made() -> list[Any]:
    """The executables that are kept for the group of all ranks."""
    world = dist.group.WORLD
    assert world is not None
    return [call.executable for call in dispatch.PREPARED.of(world).values()]


def workspaces() -> dict[int, int]:
    """The bytes of each workspace of those executables."""
    return {id(exe.workspace): exe.workspace.memory.nbytes for exe in made()}


def many_shapes() -> list[str]:
    """Few executables are kept, the graph of a dropped one still runs, and no shape makes a new workspace."""
    group, ranks, wrong = dist.group.WORLD, dist.get_world_size(), []
    b = torch.randn(128, 256, device=device()).bfloat16()

    def run(a: Tensor) -> Tensor:
        return distgemm.all_gather_matmul(a, b, group=group, schedule=GATHER)

    def correct(a: Tensor, y: Tensor) -> bool:
        whole = a.new_empty(ranks * a.shape[0], a.shape[1])
        dist.all_gather_into_tensor(whole, a)
        return relative(y, whole.double() @ b.double().t()) < EPS

    plan = distgemm.make_plan(distgemm.GemmProblem(96 * ranks, 128 * ranks, 256), GATHER, ranks)
    three = 3 * dispatch.size_of(plan)
    with quick(), mock.patch.object(dispatch, "KEPT_BYTES", three):
        first = torch.randn(96, 256, device=device()).bfloat16()
        run(first)
        before = workspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run(first)
        for tokens in (80, 72, 64, 80, 48, 40, 32, 80):
            a = torch.randn(tokens, 256, device=device()).bfloat16()
            wrong += [f"{tokens} tokens"] * (not correct(a, run(a)))
            graph.replay()
        if len(made()) != 3:
            wrong.append(f"{len(made())} executables are kept")
        if not set(workspaces()) <= set(before):
            wrong.append(f"workspaces {workspaces()} after {before}")
        first.copy_(torch.randn(96, 256, device=device()).bfloat16())
        graph.replay()
        wrong += ["the graph of a dropped executable"] * (not correct(first, recorded))
    return wrong


def depth() -> list[str]:
    """A deep model needs no more executables and no more workspace than a shallow one."""
    found = []
    for layers in (1, 6):
        model = mlp(depth=layers)
        x = torch.randn(104, 256, device=device()).bfloat16().requires_grad_()
        with quick():
            model(x).float().sum().backward()
        found.append((len(made()), workspaces()))
    return [f"1 and 6 blocks: {found}"] * (found[0] != found[1])


CAPTURED = [8 * size for size in range(32, 0, -1)]
"""Tokens of each rank in the graphs of a server, the largest number first."""
GRAPH_BYTES = 2 << 20
"""The most memory of a GPU that a captured call of one rank may take, besides its result."""


def many_graphs() -> list[str]:
    """Graphs for 32 numbers of tokens share all but the graph, and have the right results in any order."""
    group, ranks, wrong = dist.group.WORLD, dist.get_world_size(), []
    sharing = -(-ranks // torch.cuda.device_count())  # ranks on this GPU
    a = torch.randn(CAPTURED[0], 256, device=device()).bfloat16()
    b = torch.randn(128, 256, device=device()).bfloat16()

    def gather(x: Tensor) -> Tensor:
        return distgemm.all_gather_matmul(x, b, group=group)

    def reduce(x: Tensor) -> Tensor:
        return distgemm.matmul_all_reduce(x, b, group=group)

    def expected(name: str, x: Tensor) -> Tensor:
        if name == "gather":
            whole = x.new_empty(ranks * x.shape[0], x.shape[1])
            dist.all_gather_into_tensor(whole, x)
            return whole.double() @ b.double().t()
        total = x.double() @ b.double().t()
        dist.all_reduce(total)
        return total

    def free() -> int:
        torch.cuda.synchronize()
        dist.barrier()
        return torch.cuda.mem_get_info()[0]

    with quick():
        functions = {"gather": gather, "reduce": reduce}
        for tokens in CAPTURED:
            for function in functions.values():
                function(a[:tokens])
        if len(workspaces()) != 1:
            wrong.append(f"{len(workspaces())} workspaces for {len(made())} executables")
        before, kept = free(), torch.cuda.memory_allocated()
        pool = torch.cuda.graph_pool_handle()
        graphs: list[tuple[str, int, torch.cuda.CUDAGraph, Tensor]] = []
        for tokens in CAPTURED:
            for name, function in functions.items():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    y = function(a[:tokens])
                graphs.append((name, tokens, graph, y))
        for _, _, graph, _ in graphs:
            graph.replay()
        taken = (before - free()) / len(graphs)
        results = sum(-(-y.nbytes // 512) * 512 for *_, y in graphs)
        more = torch.cuda.memory_allocated() - kept - results
        if dist.get_rank() == 0:
            print(f"{len(graphs)} graphs: {taken / 1024:.0f} KiB of {sharing} ranks each, {more} bytes of tensors more")
        if taken > sharing * GRAPH_BYTES:
            wrong.append(f"each graph takes {taken / sharing:.0f} bytes of the GPU")
        if more > 0:
            wrong.append(f"capturing has allocated {more} bytes besides {results} bytes of results")
        for turn in range(3):
            a.copy_(torch.randn(a.shape, device=device()).bfloat16())
            for name, tokens, graph, y in graphs[turn::3]:
                graph.replay()
                error = relative(y, expected(name, a[:tokens]))
                wrong += [f"{name} of {tokens} tokens: error {error}"] * (not error < 2 * ranks * EPS)
    return wrong


def many_layers() -> list[str]:
    """One executable serves 126 layers by two graphs, with results that stay alive, and inputs that change."""
    a, b = (torch.empty(shape, device=device(), dtype=torch.bfloat16) for shape in ((64, 256), (128, 256)))
    size, wrong = dist.get_world_size(), []
    with quick():
        problem = distgemm.GemmProblem(64 * size, 128 * size, 256)
        exe: Any = cuda.compile_plan(distgemm.make_plan(problem, NAMED["ag+gemm"][0], size, sync="barrier"))
    weights = [torch.randint(-1, 2, b.shape, device=device()).to(b) for _ in range(126)]
    for step in range(4):
        kept = []
        for layer, weight in enumerate(weights):
            x = torch.randint(-1, 2, a.shape, device=device()).to(a)
            kept.append((layer, x, exe(x, weight)))
        torch.cuda.synchronize()
        for layer, x, y in kept:
            whole = torch.empty(64 * size, 256, device=device(), dtype=a.dtype)
            dist.all_gather_into_tensor(whole, x)
            if not torch.equal(y, whole @ weights[layer].T):
                wrong.append(f"rank {dist.get_rank()}, step {step}, layer {layer}")
        del kept
    return wrong + [f"{exe.graphs} graphs"] * (exe.graphs != 2)


# --- training -------------------------------------------------------------------------------------------------


def training(folder: str, steps: int = 200) -> list[str]:
    """examples/train_llama.py: eager steps, graphs and a resumed run have the same losses, close to one GPU's."""
    sys.path.insert(0, str(EXAMPLES))
    import llama
    import train_llama

    ranks, rank = dist.get_world_size(), dist.get_rank()
    common: dict[str, Any] = {"backend": "nccl", "dp": 1, "tp": ranks, "steps": steps, "save_every": steps // 2}
    losses: dict[str, list[float]] = {}
    with quick():
        for name, graph in (("eager", False), ("graph", True)):
            losses[name] = train_llama.train(train_llama.Options(folder=f"{folder}/{name}", graph=graph, **common))
        again = Path(folder, "again")
        if rank == 0:
            half = f"step-{steps // 2}"
            shutil.copytree(Path(folder, "graph", half), again / half)
            (again / "losses.json").write_text(json.dumps(losses["graph"][: steps // 2]))
        dist.barrier(device_ids=[device().index])
        losses["again"] = train_llama.train(train_llama.Options(folder=str(again), graph=True, resume=True, **common))
    torch.manual_seed(train_llama.SEED)
    options = train_llama.Options(**common)
    plain = llama.Llama(llama.Config(vocabulary=len(train_llama.LETTERS))).to(device())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=options.rate, capturable=True)
    losses["plain"] = []
    for step in range(steps):
        ids = train_llama.batch_of(step, options).to(device())
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(ids[:-1]).flatten(0, 1), ids[1:].flatten())
        loss.backward()
        optimizer.step()
        losses["plain"].append(loss.item())
    wrong = [f"{name} differs from eager" for name in ("graph", "again") if losses[name] != losses["eager"]]
    errors = [abs(x - y) / y for x, y in zip(losses["eager"], losses["plain"], strict=True)]
    if rank == 0:
        print(
            f"loss {losses['plain'][0]:.3f} to {losses['plain'][-1]:.3f}; largest error {max(errors):.1e}", flush=True
        )
    # Rounding errors grow: on CPUs they are 1e-6 after half of the steps, and 3e-3 at the end.
    if not max(errors[: steps // 2]) < 1e-3 or not max(errors) < 5e-2:
        wrong.append(f"the losses do not follow one GPU: {max(errors[: steps // 2]):.1e}, {max(errors):.1e}")
    if not losses["plain"][-1] < 0.2 * losses["plain"][0]:
        wrong.append(f"nothing is learned: {losses['plain'][-1]}")
    return wrong
