"""What the ranks of the fp8 tests on GPUs do: functions and gradients, against one rank in float32 on the CPU."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import distgemm
from distgemm import fp8
from distgemm.fp8.layer import SPLITS, Split
from distgemm.gemm import GemmSpec, MatrixSpec, cutlass
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import KernelSource, build
from distgemm.gemm.tiles import Tile
from distgemm.plan.scaling import OperandScaling, Scaling
from tests.unit.reference_data import Scales

Tensor = torch.Tensor
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
OUT = 1024
TYPES = (("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"))
ONE_TILE = patch.object(cutlass, "FP8_TILES", (Tile("cooperative", (128, 128), ((2, 1),), rate=1.0),))
"""All kernels have this tile, so that few are compiled. Those of other tiles are in test_gemm.py."""


def kernels() -> list[KernelSource]:
    """The kernels for fp8 that the checks need on Hopper."""
    found = {}
    with ONE_TILE:
        provider = CutlassProvider("90a")
        for (a, b), scales, out, adds in product(
            TYPES, ("tensor", "1x128", "128x128"), ("bfloat16", "float32"), (False, True)
        ):
            d = MatrixSpec(out, 256, 256)
            spec: Any = GemmSpec(MatrixSpec(a, 256, 256), MatrixSpec(b, 256, 256), d, partial=d if adds else None)
            spec = dataclasses.replace(spec, scale_a=scales, scale_b=scales)
            if out == "float32" or a == b or scales == "tensor":  # layers have scales of blocks for e4m3 only
                found[kernel_source(spec, provider.configs(spec)[0], "90a")] = None
    return list(found)


def compile_kernels() -> None:
    """Compile the kernels in parallel. A plan compiles its own one after the other."""
    if torch.cuda.get_device_capability() == (9, 0):
        build(kernels())


def split(x: Tensor, dim: int | None, sizes: list[int] | None = None) -> Tensor:
    """This rank's part on its GPU, as a leaf. Sizes are those of the parts; None: equal ones."""
    part = x if dim is None else x.split(sizes or x.shape[dim] // dist.get_world_size(), dim)[dist.get_rank()]
    return part.detach().to("cuda").contiguous().requires_grad_(x.requires_grad)


def data(seed: int, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x, whose rows differ in size, w and the gradient of the result, in bf16. Each rank has a block of 128 of them."""
    generator = torch.Generator().manual_seed(seed)
    features = max(512, 128 * dist.get_world_size())
    tokens = tokens or features

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, w, dy = draw(tokens, features) * draw(tokens, 1).exp(), draw(OUT, features) / 8, draw(tokens, OUT) * 1e-3
    return x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(), dy.bfloat16()


def differences(found: list[Tensor], wanted: list[Tensor], where: str) -> list[str]:
    """Which of the result and the gradients differ by more than rounding.

    Codes are the same on both sides, so what differs is how sums are rounded: to bf16 once for each rank that adds its
    part (2**-9 of the largest result each), and in the accumulators of the tensor cores, which have 14 bits.
    """
    wrong, bound = [], (dist.get_world_size() + 2) * 2.0**-8
    for what, one, other in zip(("y", "x.grad", "w.grad"), found, wanted, strict=True):
        error = float((one.double() - other.double()).abs().max()) / float(other.abs().max())
        if not error <= bound:
            wrong.append(f"{what} of {where}: differs by {error:.4f} of its largest element")
    return wrong


def functions() -> list[str]:
    """The failures of each function with each recipe: result, gradients, and the same bits in a second call."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    wrong = []
    cases = product(RECIPES, (distgemm.all_gather_matmul, distgemm.matmul_reduce_scatter, distgemm.matmul_all_reduce))
    for seed, (name, function) in enumerate(cases):
        parallel: Any = "column" if function is distgemm.all_gather_matmul else "row"
        dims = Split(1, 1, None) if function is distgemm.matmul_all_reduce else SPLITS[parallel]
        x, w, dy = data(seed)
        y = fp8.linear(x, w, recipe=name, parallel=parallel, ranks=ranks)
        y.backward(dy)
        before: list[Tensor] = []
        for call in range(3):  # the third one replays a recorded graph
            mine = split(x, dims.x), split(w, dims.w)
            got: Any = function(*mine, group=group, recipe=name)
            got.backward(split(dy, dims.y))
            found = [got.detach(), *(part.grad for part in mine if part.grad is not None)]
            wanted = [
                split(each.detach(), dim).detach() for each, dim in ((y, dims.y), (x.grad, dims.x), (w.grad, dims.w))
            ]
            where = f"{function.__name__}, {name}, call {call}"
            wrong += differences(found, wanted, where)
            if before and not all(map(torch.equal, found, before)):
                wrong.append(f"{where}: other bits than in the call before")
            before = found
    return wrong


class Unequal(torch.nn.Module):
    """A gather of unequal numbers of tokens, and a reduce-scatter to them."""

    def __init__(self, recipe: str, tokens: list[int]) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"group": dist.group.WORLD, "recipe": recipe, "m_per_rank": tokens}

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return (
            distgemm.all_gather_matmul(a, b, **self.options),
            distgemm.matmul_reduce_scatter(c, d, **self.options),
        )


def unequal() -> list[str]:
    """The failures with unequal numbers of tokens: not aligned, or whole blocks on all ranks except the last."""
    ranks, wrong = dist.get_world_size(), []
    for seed, name in enumerate(("tensorwise", "rowwise", "blockwise")):
        tokens = [128 * (1 + rank % 2) if name == "blockwise" else 37 + 64 * (rank % 2) for rank in range(ranks - 1)]
        tokens.append(80)
        x, w, dy = data(seed, sum(tokens))
        y = fp8.linear(x, w, recipe=name)
        y.backward(dy)
        a, b, c, d = split(x, 0, tokens), split(w, 0), split(x, 1), split(w, 1)
        model = Unequal(name, tokens)
        distgemm.warmup(model, a, b, c, d)
        for call in range(2):
            for part in (a, b, c, d):
                part.grad = None
            gathered, scattered = model(a, b, c, d)
            torch.autograd.backward((gathered, scattered), (split(dy, 1), split(dy, 0, tokens)))
            where = f"{name}, {tokens} tokens, call {call}"
            for how, found, dims, sizes in (
                ("gather", (gathered.detach(), a.grad, b.grad), (1, 0, 0), (None, tokens, None)),
                ("reduce-scatter", (scattered.detach(), c.grad, d.grad), (0, 1, 1), (tokens, None, None)),
            ):
                wholes = (y.detach(), x.grad, w.grad)
                wanted = [split(*each).detach() for each in zip(wholes, dims, sizes, strict=True)]
                wrong += differences(list(found), wanted, f"{how}, {where}")
    return wrong


PART, SQUARE = OperandScaling(1, 128), OperandScaling(128, 128)
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("all_gather_1d_ring_a", {}),
    ("all_gather_1d_tiling_cd_rotating_a", {"mechanism": "pull", "chunks": 2}),
    ("all_gather_1d_tiling_cd_rotating_b", {}),
    ("all_gather_1d_tiling_k_rotating_a", {"workspace": "bounded", "sync": "credit"}),
    ("reduce_scatter_1d_tiling_a_rotating_c", {}),
    ("reduce_scatter_1d_pairwise_a", {"mechanism": "store"}),
    ("all_reduce_1d_tiling_a_rotating_c", {}),
]
SCALINGS = ("tensorwise-shard", "rowwise", "blockwise", Scaling(PART, PART), Scaling(SQUARE, PART))


def plan_of(
    schedule: str, options: dict[str, Any], scaling: str | Scaling, types: tuple[str, str], ranks: int
) -> distgemm.Plan:
    """A plan whose last blocks are narrower, on each rank."""
    problem = distgemm.GemmProblem(
        *(400 * ranks, 200 * ranks, 400 * ranks),
        dtype=types[0],
        b_dtype=types[1],
        out_dtype="float32",
        scaling=scaling,
    )
    return distgemm.make_plan(problem, schedule, ranks, **options)


def plans() -> list[str]:
    """Plans whose results are not exact. Scales are powers of two, elements -1, 0 and 1; both change with each call.

    Scales move with their tiles in gathers. The first call is eager, the second one is recorded, others replay it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for number, ((schedule, options), scaling) in enumerate(product(PLANS, SCALINGS)):
        if ranks == 8 and number % 2:
            continue  # the half of them: 8 ranks that share a GPU are slow
        plan = plan_of(schedule, options, scaling, TYPES[number % len(TYPES)], ranks)
        exe = distgemm.compile(plan)
        shards: dict[str, Tensor] = {}
        for call in range(4):
            drawn = Scales.draw(plan, 10 * number + call)
            generator = torch.Generator().manual_seed(10 * number + call)
            whole = {}
            for name, dtype in zip("AB", TYPES[number % len(TYPES)], strict=True):
                rows = plan.problem.m if name == "A" else plan.problem.n
                integers = torch.randint(-1, 2, (rows, plan.problem.k), generator=generator)
                scales = torch.from_numpy(drawn.of_elements[name][0])
                whole[name] = integers.double() * scales
                parts = {name: integers[plan.shard(name, rank)].to(getattr(torch, dtype))}
                parts[f"SF{name}"] = torch.from_numpy(drawn.shards[f"SF{name}"][rank]).float()
                for key, part in parts.items():
                    shards.setdefault(key, part.cuda()).copy_(part)
            wanted = (whole["A"] @ whole["B"].mT)[plan.shard("D", rank)]
            found = exe(shards["A"], shards["B"], scale_a=shards["SFA"], scale_b=shards["SFB"])
            if not torch.equal(found.cpu().double(), wanted):
                count = int((found.cpu().double() != wanted).sum())
                wrong.append(
                    f"{count} of {wanted.numel()} elements of call {call}: {plan.schedule}, {options}, {scaling}"
                )
                break
    return wrong


def refused() -> list[str]:
    """The message for scales that no kernel has: of blocks of 64."""
    x, w, _ = data(1)
    recipe = fp8.recipe("blockwise", block=64)
    try:
        distgemm.all_gather_matmul(split(x, 0), split(w, 0), group=dist.group.WORLD, recipe=recipe)
    except ValueError as error:
        return [] if "scales of 1x128 and 128x128 blocks" in str(error) else [str(error)]
    return ["scales of blocks of 64 were multiplied"]


def run_all(checks: list[str]) -> dict[str, list[str]]:
    """Each check's failures on this rank."""
    with ONE_TILE:
        return {name: globals()[name]() for name in checks}
