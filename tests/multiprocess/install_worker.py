"""The ranks of the tests of ``distgemm.install``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # noqa: PLC2701  (torch has no public name)
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701
from torch import nn
from torch._inductor import config  # noqa: PLC2701
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import distgemm
from distgemm.torch_ops.report import NotFusedError

Tensor = torch.Tensor
BOUND = 1e-12
MIDDLE = 3
OPS = torch.ops.symm_mem


def group_of_all() -> str:
    """The name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def device() -> torch.device:
    """Where the tensors of this rank are: on its GPU with NCCL, otherwise on the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def draw(seed: int, *shape: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device())


def near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < BOUND * wanted.abs().max())


def same_strides(found: Any, wanted: Any) -> bool:
    """Whether strides are those that torch traces with."""
    return [x.stride() for x in found] == [x.stride() for x in wanted]


def gathers() -> list[str]:
    """fused_all_gather_matmul along each dimension, for one and several B, against the whole product."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for dims, count, returned in product((2, 3), (1, 3), (False, True)):
        for dim, outermost in product(range(dims), (False, True)):
            if dim == dims - 1 and device().type == "cuda":
                continue  # torch's own implementation, which wants a GPU for each rank
            shape = [4 * ranks, MIDDLE * ranks, 5 * ranks][-dims:]
            whole = draw(1, *shape)
            bs = [draw(2 + index, shape[-1], 2 + index) for index in range(count)]
            a = whole.chunk(ranks, dim)[rank]
            a = a.movedim(dim, 0).contiguous().movedim(0, dim) if outermost else a.contiguous()
            case = f"{dims} dimensions, {dim}, {count} B, return_A={returned}"
            with distgemm.install():
                gathered, results = OPS.fused_all_gather_matmul(a, bs, dim, group_of_all(), return_A=returned)
                fake, shapes = OPS.fused_all_gather_matmul(
                    torch.empty_like(a, device="meta"), [b.to("meta") for b in bs], dim, group_of_all()
                )
            if not all(near(x, whole @ b) for x, b in zip(results, bs, strict=True)):
                wrong.append(case)
            if (gathered is not None) != returned or (returned and not near(gathered, whole)):
                wrong.append(f"{case}: A")
            if dim < dims - 1 and not same_strides([*results, *[gathered] * returned], [*shapes, *[fake] * returned]):
                wrong.append(f"{case}: strides {[x.stride() for x in results]} and {[x.stride() for x in shapes]}")
            found = distgemm.report()
            (served,) = (found.served if dim < dims - 1 else found.not_served).values()
            text = str(found)
            wanted = "along its last dimension" if dim == dims - 1 else "all_gather_1d_tiling_cd_rotating_a"
            copied = 0 < dim < dims - 1 and not outermost
            if served != 1 or wanted not in text or ("A is copied" in text) != copied:
                wrong.append(f"{case}: {text}")
            if dim < dims - 1 and ("A is copied" in str(distgemm.last_call())) != copied:
                wrong.append(f"{case}: {distgemm.last_call()}")
    return wrong


def scatters() -> list[str]:
    """fused_matmul_reduce_scatter along each dimension, against the whole product."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for dims, reduce_op in product((2, 3), ("sum", "avg")):
        for dim in range(dims):
            shape = [4 * ranks, MIDDLE * ranks, 5 * ranks][-dims:]
            a, b = draw(1, *shape), draw(2, shape[-1], 2 * ranks)
            mine = a.chunk(ranks, -1)[rank].contiguous(), b.chunk(ranks)[rank].contiguous()
            with distgemm.install():
                found = OPS.fused_matmul_reduce_scatter(*mine, reduce_op, dim, group_of_all())
                fake = OPS.fused_matmul_reduce_scatter(*(x.to("meta") for x in mine), reduce_op, dim, group_of_all())
            wanted = (a @ b / (ranks if reduce_op == "avg" else 1)).chunk(ranks, dim)[rank]
            if not near(found, wanted) or not same_strides([found], [fake]):
                wrong.append(f"{dims} dimensions, {dim}, {reduce_op}: {found.stride()} and {fake.stride()}")
            if sum(distgemm.report().served.values()) != 1:
                wrong.append(str(distgemm.report()))
    return wrong


def in_fp8(x: Tensor, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Codes, and the scales that torch's ops take: one, or one for each row."""
    amax = x.abs().amax(-1, keepdim=True) if rowwise else x.abs().max().view(1)
    scale = (amax / 448).float()
    return (x / scale).to(torch.float8_e4m3fn), scale


def columns_in_fp8(x: Tensor, rowwise: bool) -> tuple[Tensor, Tensor]:
    codes, scale = in_fp8(x.t().contiguous(), rowwise)
    return codes.t(), scale.t() if rowwise else scale


def near_in_bf16(found: Tensor, wanted: Tensor) -> bool:
    """Equal except for the rounding of partial sums and results, which may be smaller than the partial sums."""
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < 2.0**-7 * wanted.abs().max())


def scaled_gathers() -> list[str]:
    """fused_all_gather_scaled_matmul: tensorwise, rowwise, scales of all rows; for one and several B, with a bias."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    modes = ("tensorwise", "sharded", "replicated")
    for dims, mode, count, biased in product((2, 3), modes, (1, 2), (False, True)):
        for dim in range(dims - 1):
            whole = draw(1, *[16 * ranks, MIDDLE * ranks, 32][-dims if dims == 3 else 0 :: 1 if dims == 3 else 2])
            codes, scale = in_fp8(whole, mode != "tensorwise")
            bs = [columns_in_fp8(draw(2 + index, 32, 16), mode != "tensorwise") for index in range(count)]
            biases = [draw(9, 16).bfloat16() if biased else None for _ in bs]
            a = codes.chunk(ranks, dim)[rank].contiguous()
            scale_a = scale.chunk(ranks, dim)[rank].contiguous() if mode == "sharded" else scale
            terms: Any = (dim, group_of_all(), biases, [None] * count, [torch.bfloat16] * count, [False] * count)
            with distgemm.install(strict=True):
                gathered, results = OPS.fused_all_gather_scaled_matmul(
                    a, [b for b, _ in bs], scale_a, [s for _, s in bs], *terms
                )
            case = f"{dims} dimensions, {dim}, {mode}, {count} B, bias {biased}"
            true = codes.double() * scale
            for (b, s), bias, found in zip(bs, biases, results, strict=True):
                wanted = true @ (b.double() * s) + (0 if bias is None else bias)
                if found.dtype != torch.bfloat16 or not near_in_bf16(found, wanted):
                    wrong.append(case)
            if not torch.equal(gathered.float(), codes.float()) or sum(distgemm.report().served.values()) != 1:
                wrong.append(f"{case}: A, or {distgemm.report()}")
    return wrong


def scaled_scatters() -> list[str]:
    """fused_scaled_matmul_reduce_scatter: each rank has scales of its own; also of a tensor that was reshaped."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for rowwise, reduce_op, shape in product(
        (False, True), ("sum", "avg"), ((16 * ranks,), (4 * ranks, MIDDLE * ranks))
    ):
        for dim in range(len(shape)):
            whole, weight = draw(1, *shape, 16 * ranks), draw(2, 16 * ranks, 16)
            a, scale_a = in_fp8(whole.chunk(ranks, -1)[rank].flatten(0, -2), rowwise)
            b, scale_b = columns_in_fp8(weight.chunk(ranks)[rank], rowwise)
            with distgemm.install(strict=True):
                found = OPS.fused_scaled_matmul_reduce_scatter(
                    a, b, scale_a, scale_b, reduce_op, dim, 0, group_of_all(), [*shape, 16], out_dtype=torch.bfloat16
                )
            wanted = (a.double() * scale_a) @ (b.double() * scale_b)
            dist.all_reduce(wanted)
            wanted = wanted.view(*shape, 16).chunk(ranks, dim)[rank] / (ranks if reduce_op == "avg" else 1)
            if not near_in_bf16(found, wanted) or not found.is_contiguous():
                wrong.append(f"rowwise {rowwise}, {reduce_op}, dimension {dim} of {shape}: {found.shape}")
            if sum(distgemm.report().served.values()) != 1:
                wrong.append(str(distgemm.report()))
    return wrong


def scaled_refusals() -> list[str]:
    """What torch's own programs compute, and why."""
    ranks, wrong = dist.get_world_size(), []
    a, scale = in_fp8(draw(1, 16 * ranks, 32), False)
    b, scale_b = columns_in_fp8(draw(2, 32, 16), False)
    group, bias, bf16 = group_of_all(), draw(3, 16).bfloat16(), torch.bfloat16
    scatter, gather = OPS.fused_scaled_matmul_reduce_scatter, OPS.fused_all_gather_scaled_matmul
    terms: Any = 0, group, [None] * 2, [None] * 2, [bf16, torch.float32], [False] * 2
    shape = [16 * ranks, 16]
    for reason, run in (
        ("once for each rank", lambda: scatter(a, b, scale, scale_b, "sum", 0, 0, group, shape, bias, None, bf16)),
        ("several dtypes", lambda: gather(a, [b, b], scale, [scale_b] * 2, *terms)),
    ):
        with distgemm.install():
            run()
        if reason not in str(distgemm.report()) or sum(distgemm.report().not_served.values()) != 1:
            wrong.append(f"{reason}: {distgemm.report()}")
        with distgemm.install(strict=True):
            if reason not in (message := raised(NotFusedError, run)):
                wrong.append(f"{reason}: {message}")
    return wrong


def groups() -> list[str]:
    """Groups that are not the world: each half of the ranks."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    halves = [dist.new_group(list(range(start, start + ranks // 2))) for start in (0, ranks // 2)]
    number = rank // (ranks // 2)
    whole, b = draw(number, 8, 6), draw(7, 6, 4)
    with distgemm.install():
        a = whole.chunk(ranks // 2)[rank % (ranks // 2)]
        _, (found,) = OPS.fused_all_gather_matmul(a, [b], 0, halves[number].group_name)
    if not near(found, whole @ b) or f"{ranks // 2} ranks" not in str(distgemm.report()):
        wrong.append(str(distgemm.report()))
    return wrong


def copies() -> list[str]:
    """The report says what is copied, and no more."""
    group, size, wrong = group_of_all(), dist.get_world_size(), []
    wide, b, columns = draw(1, size, 2, 2 * size), draw(2, size, size), draw(3, size, size).t()
    with distgemm.install():
        for what, run in (
            ("", lambda: OPS.fused_all_gather_matmul(wide[..., :size], [b], 0, group)),
            ("A is copied", lambda: OPS.fused_all_gather_matmul(wide.movedim(0, -1), [b], 0, group)),
            (
                "A is copied",
                lambda: OPS.fused_matmul_reduce_scatter(draw(4, 2, size, size), columns, "sum", 1, group),
            ),
            ("D is copied", lambda: OPS.fused_matmul_reduce_scatter(wide[..., :size], columns, "sum", 2, group)),
            ("B and D are copied", lambda: OPS.fused_matmul_reduce_scatter(wide[..., :size], b, "sum", 2, group)),
        ):
            run()
            note = distgemm.last_call().note
            if not note.startswith(what) or bool(what) != bool(note):
                wrong.append(f"{what!r} is not {note!r}")
    return wrong


def raised(error: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except error as found:
        return str(found)
    return "no error"


def refusals() -> list[str]:
    """What is not computed by distgemm is said, or an error with ``strict``; what cannot be is an error."""
    a, b, group, wrong = draw(1, 4, 6), draw(2, 6, 4), group_of_all(), []
    ranks = dist.get_world_size()
    with distgemm.install() as made:
        OPS.fused_all_gather_matmul(a.long(), [b.long()], 0, group)
        scattered = OPS.fused_matmul_reduce_scatter(a.long(), b.long(), "sum", 1, group)
        wanted = (a.long() @ b.long()).chunk(ranks, 1)[dist.get_rank()] * ranks
        long = torch.ones(4, 3 * ranks // 2, 6, dtype=torch.int64)
        OPS.fused_all_gather_matmul(a, [], 0, group)
        messages = {
            "distgemm.uninstall() comes first": raised(RuntimeError, distgemm.install),
            "reduce_op is 'sum' or 'avg', got 'max'": raised(
                ValueError, lambda: OPS.fused_matmul_reduce_scatter(a, b, "max", 0, group)
            ),
            "the dimension is 0 to 1, got 2": raised(
                ValueError, lambda: OPS.fused_matmul_reduce_scatter(a, b, "sum", 2, group)
            ),
            "B is (k, n) with k = 6, got (4, 6), (4, 6)": raised(
                ValueError, lambda: OPS.fused_all_gather_matmul(a, [b.t()], 0, group)
            ),
            f"{ranks} ranks divide the dimension that is scattered, got 0 of ({ranks + 1}, 2, 4)": raised(
                ValueError, lambda: OPS.fused_matmul_reduce_scatter(draw(1, ranks + 1, 2, 6), b, "sum", 0, group)
            ),
            f"{ranks} ranks divide the dimension that is scattered, got 1 of (4, {3 * ranks // 2}, 4)": raised(
                # Chunks of two for each rank but the last ones: torch.cat takes them.
                ValueError,
                lambda: OPS.fused_matmul_reduce_scatter(long, b.long(), "sum", 1, group),
            ),
            "there is no B": str(distgemm.report()),
            "do not take torch.int64": str(distgemm.report()),
            "one after the other, because": str(distgemm.report()),
        }
        assert made is not None
    if not torch.equal(scattered, wanted):
        wrong.append("an unfused scatter")
    with distgemm.install(strict=True):
        messages["distgemm does not compute it, because A is gathered along its last"] = raised(
            NotFusedError, lambda: OPS.fused_all_gather_matmul(a, [draw(2, 6 * ranks, 4)], 1, group)
        )
    messages["distgemm.install() was not called"] = raised(RuntimeError, distgemm.uninstall)
    messages["Could not run"] = raised(NotImplementedError, lambda: OPS.fused_all_gather_matmul(a, [b], 0, group))
    messages["schedule"] = raised(ValueError, lambda: distgemm.install(scatter="no such schedule"))
    distgemm.install(gather="all_gather_1d_ring_a")
    OPS.fused_all_gather_matmul(a, [b], 0, group)
    distgemm.uninstall()
    messages["all_gather_1d_ring_a"] = str(distgemm.report())
    return wrong + [f"{part!r} is not in {text!r}" for part, text in messages.items() if part not in text]


@contextmanager
def inductor_settings(fuses: bool) -> Iterator[None]:
    """The user's own settings of inductor's pass, on CPUs, where it does nothing by itself."""
    with (
        config.patch(_micro_pipeline_tp=fuses),
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(symmetric_memory, "is_symm_mem_enabled_for_group", return_value=True),
    ):
        yield


@contextmanager
def compiled_anew() -> Iterator[None]:
    """No graph from a cache: the pass sees each graph."""
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        yield


def compiled_by_inductor() -> list[str]:
    """A graph with a gather before a GEMM and a scatter behind one: fused by inductor's pass, or reported."""
    ranks, rank, group, wrong = dist.get_world_size(), dist.get_rank(), group_of_all(), []
    x, up, down = draw(1, 4 * ranks, 6), draw(2, 6, 8 * ranks), draw(3, 8 * ranks, 6)

    def block(shard: Tensor, first: Tensor, second: Tensor) -> Tensor:
        whole = collectives.all_gather_tensor(shard, 0, group)
        return collectives.reduce_scatter_tensor((whole @ first).relu() @ second, "sum", 0, group)

    given = x.chunk(ranks)[rank], up.chunk(ranks, 1)[rank].contiguous(), down.chunk(ranks)[rank].contiguous()
    wanted = ((x @ up).relu() @ down).chunk(ranks)[rank]
    seen: list[Any] = []  # by a pass of the user
    off = "torch._inductor.config._micro_pipeline_tp is off"
    for fuse, settings, counted, reason in [
        (True, nullcontext(), [2, 0, 0], ""),
        (False, inductor_settings(True), [2, 0, 0], ""),
        (False, inductor_settings(False), [0, 0, 2], off),
    ]:
        with (
            config.patch(post_grad_custom_post_pass=seen.append),
            distgemm.install(fuse=fuse),
            settings,
            compiled_anew(),
            torch.no_grad(),
        ):
            if not near(torch.compile(block)(*given), wanted):
                wrong.append(f"fuse={fuse}, {counted}: wrong numbers")
        report = distgemm.report()
        counts = [sum(rows.values()) for rows in (report.served, report.not_served, report.not_fused)]
        if counts != counted or reason not in str(report):
            wrong.append(f"fuse={fuse}, {counted}: {report}")
    with distgemm.install(fuse=False, strict=True), inductor_settings(False), compiled_anew(), torch.no_grad():
        message = raised(Exception, lambda: torch.compile(block)(*given))
    if f"not fused, because {off}" not in message:
        wrong.append(f"strict: {message}")
    if config.post_grad_custom_post_pass is not None or len(seen) != 3:
        wrong.append("inductor's passes")
    return wrong


def bias_before_heads() -> list[str]:
    """A gathered GEMM with a bias, whose result is seen as heads: the bias is as long as all heads together."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), group_of_all()
    x, weight, bias = draw(1, 4 * ranks, 6), draw(2, 8, 6), draw(3, 8)

    def project(shard: Tensor) -> Tensor:
        return nn.functional.linear(collectives.all_gather_tensor(shard, 0, group), weight, bias).view(-1, 2, 4).sin()

    with distgemm.install(), compiled_anew(), torch.no_grad():
        found = torch.compile(project)(x.chunk(ranks)[rank])
    wrong = [] if near(found, (x @ weight.t() + bias).view(-1, 2, 4).sin()) else ["wrong numbers"]
    return wrong + [str(distgemm.report())] * (sum(distgemm.report().served.values()) != 1)


def styles_of_torch() -> list[str]:
    """A model with torch's own styles, compiled: its four collectives are fused, and all is right."""
    return compiled_styles(0, False)


def styles_along_dimension_1() -> list[str]:
    """The same with tokens along dimension 1."""
    return compiled_styles(1, False)


def extents_that_vary() -> list[str]:
    """What is not fused is reported once torch compiles for any number of tokens, too."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8 * ranks), nn.GELU(), nn.Linear(8 * ranks, 6)).to(device(), torch.float64)
    whole = copy.deepcopy(model)
    styles: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, init_device_mesh(device().type, (ranks,)), styles)
    with distgemm.install(), compiled_anew(), torch.no_grad():
        compiled = torch.compile(model)
        for tokens in (4, 6, 8):
            x = draw(1, tokens * ranks, 6)
            if not near(compiled(x.chunk(ranks)[rank]), whole(x).chunk(ranks)[rank]):
                wrong.append(f"{tokens} tokens")
    shapes = {site.shapes for site, _ in distgemm.report().not_fused}
    named = [shape for (shape,) in shapes if isinstance(shape[0], str)]
    return wrong + [str(distgemm.report())] * (len(named) != 1 or len(shapes) != 2)


def styles_with_a_bias() -> list[str]:
    """The same with a bias behind the scatter, which is a sum of its own and is reported."""
    return compiled_styles(0, True)


def compiled_styles(dim: int, bias: bool) -> list[str]:
    """What is wrong with a compiled model, whose second layer may have a bias."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8 * ranks), nn.GELU(), nn.Linear(8 * ranks, 6, bias=bias))
    model = model.to(device(), torch.float64)
    x = draw(1, 4 * ranks, 6) if dim == 0 else draw(1, 3, 4 * ranks, 6)
    whole, wanted = copy.deepcopy(model), x.clone().requires_grad_()
    y = whole(wanted)
    y.square().sum().backward()
    styles: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(input_layouts=Shard(dim)),
        "2": RowwiseParallel(output_layouts=Shard(dim)),
    }
    parallelize_module(model, init_device_mesh(device().type, (ranks,)), styles)
    given = x.chunk(ranks, dim)[rank].clone().requires_grad_()
    with distgemm.install(), compiled_anew():
        found = torch.compile(model)(given)
        found.square().sum().backward()
    report = distgemm.report()
    counts = tuple(sum(rows.values()) for rows in (report.served, report.not_served, report.not_fused))
    if counts != (4 - bias, 0, bias) or ("a bias is added to the partial sums" in str(report)) != bias:
        wrong.append(str(report))
    if not near(found, y.chunk(ranks, dim)[rank]):
        wrong.append("forward")
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) and grads[name] is not None
        if not near(parameter.grad.full_tensor(), grads[name]):
            wrong.append(f"gradient of {name}")
    assert given.grad is not None and wanted.grad is not None
    return wrong + ["gradient of x"] * (not near(given.grad, wanted.grad.chunk(ranks, dim)[rank]))
