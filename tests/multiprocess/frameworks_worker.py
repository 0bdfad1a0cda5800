"""The ranks of the tests with frameworks: each check runs a framework's own code, on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch import nn
from torch._inductor import config  # noqa: PLC2701  (torch has no public name)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import distgemm
from tests.multiprocess.install_worker import MIDDLE, device, draw, group_of_all, near, raised

Tensor = torch.Tensor
STEPS, SEQUENCE, BATCH, LAYERS = 20, 64, 2, 2
"""Of the training of torchtitan's Llama."""


def torchtitan_linears() -> list[str]:
    """torchtitan's linears with fused collectives, forward and backward, against the unsharded ones."""
    from torchtitan.distributed.linear import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    group, mm = dist.group.WORLD, torch.mm
    x, gate, up, first = draw(1, 4 * ranks, 6 * ranks), *(draw(seed, 8 * ranks, 6 * ranks) for seed in (2, 3, 4))
    down, bias = draw(5, 6 * ranks, 8 * ranks), draw(6, 8 * ranks)
    splits = {"x": (x, 0), "gate": (gate, 0), "up": (up, 0), "down": (down, 1), "first": (first, 0), "bias": (bias, 0)}
    whole = {name: value.clone().requires_grad_() for name, (value, _) in splits.items()}
    mine = {name: value.chunk(ranks, dim)[rank].clone().requires_grad_() for name, (value, dim) in splits.items()}
    y = torch.nn.functional.linear(whole["x"], whole["first"], whole["bias"])
    z = (torch.nn.functional.silu(whole["x"] @ whole["gate"].T) * (whole["x"] @ whole["up"].T)) @ whole["down"].T
    (y.square().sum() + z.square().sum()).backward()

    def in_float64(*given: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return mm(*given, **options)  # torchtitan adds up in float32

    with distgemm.install(strict=True), mock.patch.object(torch, "mm", in_float64):
        y_shard = AllGatherLinear.apply(mine["x"], mine["first"], mine["bias"], group, group_of_all())
        a, b = AllGatherLinearMulti.apply(mine["x"], mine["gate"], mine["up"], group, group_of_all())
        h = torch.nn.functional.silu(a) * b
        z_shard = LinearReduceScatter.apply(h, mine["down"], None, group, group_of_all())
        (y_shard.square().sum() + z_shard.square().sum()).backward()
    report = distgemm.report()
    if sum(report.served.values()) != 8 or report.not_served:
        wrong.append(str(report))
    if not near(y_shard, y.chunk(ranks, 1)[rank]) or not near(z_shard, z.chunk(ranks)[rank]):
        wrong.append("forward")
    for name, (_, dim) in splits.items():
        found, wanted = mine[name].grad, whole[name].grad
        assert found is not None and wanted is not None
        if not float((found - wanted.chunk(ranks, dim)[rank]).abs().max()) < 1e-9 * float(wanted.abs().max()):
            wrong.append(f"gradient of {name}")
    return wrong


@contextlib.contextmanager
def torchtitan_on(kind: str) -> Iterator[None]:
    """torchtitan's type of device, and a product that it calls and CPUs do not have."""
    product = torch.library.Library("aten", "IMPL")
    if kind == "cpu":
        product.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    try:
        with mock.patch.object(torch._utils, "_get_available_device_type", return_value=kind):
            yield
    finally:
        product._destroy()


def torchtitan_llama(tp: int) -> list[str]:
    """torchtitan's own Llama, with its model, sharding, FSDP2, loss, optimizer and clipping: losses of 20 steps.

    Both runs are torchtitan's: one with its default linears, one with ``tp_gemm_backend="dist_gemm"`` on distgemm. The
    ranks that are not in a group of ``tp`` are FSDP2's.
    """
    with torchtitan_on(device().type):
        from torchtitan.config import ParallelismConfig
        from torchtitan.distributed import ParallelDims

        settings = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend="spmd_types")
        dims = ParallelDims.from_config(settings, dist.get_world_size())
        dims.build_mesh()
        wanted = _train_llama("default", settings, dims)
        with distgemm.install(strict=True):
            found = _train_llama("dist_gemm", settings, dims)
    report, wrong = distgemm.report(), []
    calls = sum(report.served.values())
    if calls != STEPS * LAYERS * 10 or report.not_served or f"{tp} ranks" not in str(report):
        wrong.append(f"{calls} calls: {report}")
    if not all(abs(x - y) < 1e-5 * wanted[0] for x, y in zip(found, wanted, strict=True)):
        wrong.append(f"losses {found}, not {wanted}")
    if not wanted[-1] < wanted[0] / 8:
        wrong.append(f"it does not learn: {wanted}")
    return wrong


def _train_llama(backend: Any, settings: Any, dims: Any) -> list[float]:
    """The losses of this rank."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context, set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's trainer does
    set_spmd_backend("spmd_types")
    spec = model_registry("debugmodel", tp_gemm_backend=backend)
    model_config: Any = spec.model
    model_config.layers = model_config.layers[:LAYERS]
    for layer in model_config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention trains on GPUs only
        layer.attention.rope.max_seq_len = SEQUENCE
    set_llama3_sharding_config(model_config, enable_sp=True)
    with torch.device("meta"):
        model: Any = model_config.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=settings,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    torch.manual_seed(5)
    model.to_empty(device=device().type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=model_config.vocab_size).build(compile_config=CompileConfig())
    optimizer = default_adamw(lr=8e-4).build(model_parts=[model])
    context = get_spmd_context(parallel_dims=dims)
    mine = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    tokens = torch.randint(
        0, model_config.vocab_size, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(mine)
    ).to(device())
    positions = torch.arange(SEQUENCE, device=device()).expand(BATCH, SEQUENCE).contiguous()
    count = torch.tensor(BATCH * SEQUENCE * dims.dp_shard, device=device())
    inputs, labels, extra = annotate_input_spmd_types(
        dims, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), {"positions": positions}
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with context():
            loss, _ = loss_of(model(inputs, **extra), labels, count)
            loss.backward()
        losses.append(loss.item())
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
    return losses


def megatron_linears() -> list[str]:
    """Megatron's linears, forward and backward, with gradients in grad or main_grad, against whole ones."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from distgemm.integrations import megatron

    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    group = dist.group.WORLD
    for sequence_parallel, fusion, skip in product((True, False), (False, True), (False, True)):
        case = f"sequence_parallel={sequence_parallel}, main_grad={fusion}, skip_bias_add={skip}"
        settings: Any = ModelParallelConfig(
            tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
        )
        options = {"config": settings, "init_method": nn.init.normal_, "skip_bias_add": skip, "tp_group": group}
        up = ColumnParallelLinear(6, 8 * ranks, **options)
        down = RowParallelLinear(8 * ranks, 6, bias=True, input_is_parallel=True, **options)
        model = nn.ModuleDict({"up": up, "down": down}).to(device())
        values = (
            draw(1, 4 * ranks, MIDDLE, 6),
            draw(2, 8 * ranks, 6),
            draw(3, 8 * ranks),
            draw(4, 6, 8 * ranks),
            draw(5, 6),
        )
        x, w1, b1, w2, b2 = (value.clone().requires_grad_() for value in values)
        y = torch.nn.functional.linear(torch.nn.functional.linear(x, w1, b1).relu(), w2, b2)
        y.square().sum().backward()
        parts = {up.weight: (w1, 0), up.bias: (b1, 0), down.weight: (w2, 1), down.bias: (b2, None)}
        for parameter, (whole, dim) in parts.items():
            parameter.data.copy_(whole.data if dim is None else whole.data.chunk(ranks, dim)[rank])
        if fusion:
            for layer in (up, down) if sequence_parallel else (down,):  # Megatron's own needs a CUDA extension
                layer.gradient_accumulation_fusion = True
                layer.weight.main_grad = torch.ones_like(layer.weight)
        done = megatron.apply(model)
        if done.layers != (("up", "down") if sequence_parallel else ("down",)) or len(done.left) != 2 - len(
            done.layers
        ):
            wrong.append(f"{case}: {done}")
        given = (x.data.chunk(ranks)[rank] if sequence_parallel else x.data).clone().requires_grad_()
        with distgemm.record_calls() as calls:
            first, bias = up(given)
            second, last = down((first if bias is None else first + bias).relu())
            found = second if last is None else second + last
            found.square().sum().backward()
        if (bias is None) == skip or (last is None) == skip or len(calls) < (5 if sequence_parallel else 1):
            wrong.append(f"{case}: {[call.function for call in calls]}")
        if not near(found, y.chunk(ranks)[rank] if sequence_parallel else y):
            wrong.append(f"{case}: forward")
        for parameter, (whole, dim) in parts.items():
            gradient, wanted = parameter.grad, whole.grad
            assert wanted is not None
            if hasattr(parameter, "main_grad"):
                gradient = parameter.main_grad - 1 if gradient is None else None
            if dim is None and sequence_parallel and gradient is not None:
                dist.all_reduce(gradient)  # as Megatron does for parameters of sequence parallelism
            if gradient is None or not near(gradient, wanted if dim is None else wanted.chunk(ranks, dim)[rank]):
                wrong.append(f"{case}: gradient {tuple(parameter.shape)}")
        assert given.grad is not None and x.grad is not None
        if sequence_parallel and not near(given.grad, x.grad.chunk(ranks)[rank]):
            wrong.append(f"{case}: gradient of x")
        for layer in (up, down):  # as in GPTModel.forward and set_model_to_sequence_parallel
            layer.sequence_parallel = False
        with torch.no_grad():
            (first, bias), whole_up = up(x), torch.nn.functional.linear(x, w1, None if skip else b1)
            second, last = down((first if bias is None else first + bias).relu())
        if not near(first, whole_up.chunk(ranks, -1)[rank]) or not near(second if last is None else second + last, y):
            wrong.append(f"{case}: sequence parallelism turned off")
        megatron.remove(model)
        if {"forward", "_forward_impl"} & (set(up.__dict__) | set(down.__dict__)):
            wrong.append(f"{case}: remove")
    if "no ColumnParallelLinear" not in raised(ValueError, lambda: megatron.apply(nn.Linear(2, 2))):
        wrong.append("a model without such layers")
    return wrong


class Doubled(torch.nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def transformers_linears() -> list[str]:
    """A small Llama of transformers with its own tp_plan: logits and gradients against one rank."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from distgemm.integrations import transformers

    ranks, wrong = dist.get_world_size(), []
    sizes = {"hidden_size": 32, "intermediate_size": 24 * ranks, "num_hidden_layers": 2, "vocab_size": 16 * ranks}
    settings = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attention_bias=True)
    # On GPUs, partial sums have at most 32 bits.
    dtype, within = (torch.float64, 1e-12) if device().type == "cpu" else (torch.float32, 1e-4)
    torch.manual_seed(7)
    model = LlamaForCausalLM(settings).to(device(), dtype)
    model.model.layers[0].mlp.up_proj.__class__ = Doubled  # it stays that of transformers
    whole = copy.deepcopy(model)
    ids = torch.randint(0, settings.vocab_size, (2, 6), generator=torch.Generator().manual_seed(1)).to(device())
    wanted = whole(input_ids=ids, labels=ids)
    wanted.loss.backward()
    other = raised(ValueError, lambda: transformers.install("ag+gemm"))
    transformers.install()
    again = raised(RuntimeError, transformers.install)
    apply_tensor_parallelism(model, init_device_mesh(device().type, (ranks,)))
    transformers.uninstall()
    with distgemm.record_calls() as calls:
        found = model(input_ids=ids, labels=ids)
        forward = len(calls)
        found.loss.backward()
        with torch.no_grad():
            generated = model(input_ids=ids).logits
    functions = {call.function for call in calls}
    if forward != 4 or functions != {"matmul_all_reduce"} or len(calls) != 2 * 4 + 2 * 5 - 1:
        wrong.append(f"{forward} calls forward, {len(calls)} in all, {functions}")
    for logits in (found.logits, generated):
        if not float((logits - wanted.logits).abs().max()) < within:
            wrong.append("logits")
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if not float((gradient - expected).abs().max()) < within:
            wrong.append(f"gradient of {name}")
    if "uninstall() comes first" not in again or "was not called" not in raised(RuntimeError, transformers.uninstall):
        wrong.append(again)
    if "'ag+gemm' does not compute gemm+ar" not in other:
        wrong.append(other)
    return wrong


def torchao_linears() -> list[str]:
    """Models of convert_to_float8_training follow torchao's own, on one rank; its tensors are taken as they are."""
    import torchao.float8
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    mesh, group = init_device_mesh("cpu", (ranks,)), group_of_all()
    tokens, features, hidden = 8 * ranks, 32, 16 * ranks

    def compare(what: str, found: Any, wanted: Tensor, bound: float = 1e-5) -> None:
        found = found.full_tensor() if isinstance(found, DTensor) else found
        error = float((found - wanted).detach().norm() / wanted.detach().norm())
        if found.shape != wanted.shape or found.dtype != wanted.dtype or not error < bound:
            wrong.append(f"{what}: {tuple(found.shape)} of {found.dtype}, error {error}")

    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = torchao.float8.Float8LinearConfig.from_recipe_name(name)
        config = dataclasses.replace(config, emulate=True)  # torchao's way to run without a GPU
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))
        own = torchao.float8.convert_to_float8_training(plain, config=config)
        styles: Any = {"0": distgemm.nn.ColwiseParallel(), "2": distgemm.nn.RowwiseParallel()}
        styled = parallelize_module(copy.deepcopy(own), mesh, styles)
        first, _, second = copy.deepcopy(own)
        layers = nn.Sequential(
            distgemm.nn.ColumnParallelLinear.from_linear(first, group=mesh),
            nn.ReLU(),
            distgemm.nn.RowParallelLinear.from_linear(second, group=mesh),
        )
        x, dy = torch.randn(tokens, features), torch.randn(tokens, features)
        y = own(x)
        y.backward(dy)
        for what, model in (("styles", styled), ("layers", layers)):
            found = model(x.chunk(ranks)[rank])
            found.backward(dy.chunk(ranks)[rank])
            compare(f"{name}, {what}", found, y.chunk(ranks)[rank])
            for key, (one, two) in enumerate(zip(model.parameters(), own.parameters(), strict=True)):
                # A sum in another order may change a code of the second layer.
                compare(f"{name}, {what}, parameter {key}", one.grad, two.grad, 1e-2)
    granularity = torchao.float8.config.ScalingGranularity
    for scaling, dim in ((granularity.TENSORWISE, None), (granularity.AXISWISE, -1)):
        a, b = torch.randn(tokens, features), torch.randn(hidden, features)
        quantised = [
            hp_tensor_to_float8_dynamic(
                each, torch.float8_e4m3fn, torchao.float8.float8_training_tensor.LinearMMConfig(),
                scaling_granularity=scaling, axiswise_dim=dim,
            )
            for each in (a.chunk(ranks)[rank], b.chunk(ranks)[rank])
        ]  # fmt: skip
        parts = [torch.empty(tokens // ranks, features) for _ in range(ranks)]
        dist.all_gather(parts, quantised[0].to_original_precision())
        found = distgemm.all_gather_matmul(quantised[0], quantised[1], group=group)
        compare(f"{scaling}", found, torch.cat(parts) @ quantised[1].to_original_precision().t())
    return wrong


def megatron_main_grad() -> list[str]:
    """bfloat16 weights with a float32 main_grad: their gradients are those of float64, rounded to float32 only.

    Two microbatches are added. Megatron's own fused kernel needs CUDA, so the reference is the product in float64.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from distgemm.integrations import megatron

    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    tokens, width, outer = 4 * ranks, 16 * ranks, 24
    for column, sequence_parallel in ((True, True), (False, True), (False, False)):
        settings: Any = ModelParallelConfig(
            tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
        )
        options: dict[str, Any] = {"config": settings, "init_method": nn.init.normal_, "bias": False}
        options |= {"skip_bias_add": False, "tp_group": dist.group.WORLD}
        layer: Any = (
            ColumnParallelLinear(outer, width, **options)
            if column
            else RowParallelLinear(width, outer, input_is_parallel=True, **options)
        )
        layer.to(device())
        layer.gradient_accumulation_fusion = True
        layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
        layer.weight.grad_added_to_main_grad = False
        megatron.apply(layer)
        wanted = torch.ones_like(layer.weight.main_grad, dtype=torch.float64)
        for seed in (1, 2):
            x = draw(seed, tokens, MIDDLE, outer if column else width).bfloat16()
            dy = draw(seed + 2, tokens, MIDDLE, width if column else outer).bfloat16()
            mine = [part.chunk(ranks, -1)[rank] for part in (x, dy)]  # where the features are split
            given = x.chunk(ranks)[rank] if column else mine[0].contiguous()
            out = dy.chunk(ranks)[rank] if sequence_parallel and not column else mine[1] if column else dy
            y, _ = layer(given.clone().requires_grad_())
            y.backward(out.contiguous())
            whole = (
                (mine[1] if column else dy).flatten(0, 1).double(),
                (x if column else mine[0]).flatten(0, 1).double(),
            )
            wanted += whole[0].t() @ whole[1]
        error = float((layer.weight.main_grad - wanted).abs().max() / wanted.abs().max())
        noted = layer.weight.grad_added_to_main_grad and layer.weight.grad.dtype == torch.bfloat16
        if not error < 1e-5 or not noted:  # a rounded product would be wrong by about 1e-3
            wrong.append(f"column={column}, sequence_parallel={sequence_parallel}: error {error}, noted: {noted}")
        # A named schedule computes one pattern.
        named = "all_gather_1d_ring_a" if column else "gemm+rs" if sequence_parallel else "gemm+ar chunks=1"
        megatron.apply(layer, named)
        layer(given)
        megatron.remove(layer)
        both = nn.ModuleDict(
            {"layer": layer, "other": RowParallelLinear(width, outer, input_is_parallel=True, **options)}
        )
        for model, schedule in ((layer, "ag+gemm" if not column else "gemm+rs"), (both, "all_gather_1d_ring_a")):
            text = raised(ValueError, lambda: megatron.apply(model, schedule))  # noqa: B023
            if f"schedule={schedule!r} does not compute" not in text or "'auto' or 'unfused'" not in text:
                wrong.append(f"{schedule} of {type(model).__name__}: {text}")
            if {"forward", "_forward_impl"} & set(layer.__dict__):
                wrong.append(f"{schedule} of {type(model).__name__}: a layer was replaced before the error")
        megatron.apply(both, "unfused")
    return wrong


# --- vLLM and SGLang -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def groups_of_vllm() -> Iterator[Any]:
    """vLLM's settings, with its groups of all ranks."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    settings = VllmConfig(device_config=DeviceConfig(device=device().type))
    backend = dist.get_backend()
    with set_current_vllm_config(settings):
        parallel_state.init_distributed_environment(
            dist.get_world_size(), dist.get_rank(), backend=backend, local_rank=device().index or 0
        )
        parallel_state.initialize_model_parallel(dist.get_world_size(), backend=backend)
        yield settings


def vllm_async_tp() -> list[str]:
    """vLLM's AsyncTPPass behind inductor: it fuses both collectives, and distgemm computes them."""
    from vllm.compilation.passes.fusion.collective_fusion import AsyncTPPass
    from vllm.distributed import get_tp_group

    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, up, down = (draw(seed, *shape).float() for seed, shape in enumerate([(4 * ranks, 8), (8, 6), (6 * ranks, 8)]))

    with groups_of_vllm() as settings:
        name = get_tp_group().unique_name
        settings.model_config = mock.Mock(dtype=torch.float32)  # a model's settings need its files
        fusion = AsyncTPPass(settings)

        def block(shard: Tensor, first: Tensor, second: Tensor) -> Tensor:
            whole = torch.ops.vllm.all_gather(shard, 0, ranks, name)
            return torch.ops.vllm.reduce_scatter(torch.relu(whole @ first) @ second, 0, ranks, name)

        given = x.chunk(ranks)[rank], up, down.chunk(ranks)[rank].contiguous()
        behind = config.patch(post_grad_custom_post_pass=fusion, fx_graph_cache=False)
        with behind, distgemm.install(strict=True), torch.no_grad():
            found = torch.compile(block)(*given)
    wanted = (torch.relu(x @ up) @ torch.stack(down.chunk(ranks)).sum(0)).chunk(ranks)[rank]
    report = distgemm.report()
    counts = fusion.matched_count, sum(report.served.values()), len(report.not_served)
    wrong = [f"matches, served, not served: {counts}: {report}"] * (counts != (2, 2, 0))
    if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
        wrong.append("numbers")
    return wrong


def serves_rows(plug_in: Any, make: Any, quantised: Any) -> list[str]:
    """A framework's row-parallel linears: its own forward, that of distgemm, and its own again."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    x, w, b = draw(1, 5, MIDDLE, 8 * ranks), draw(2, 6, 8 * ranks), draw(3, 6)
    mine = x.chunk(ranks, -1)[rank].contiguous()
    for bias, skip in product((False, True), (False, True)):
        case = f"bias={bias}, skip_bias_add={skip}"
        model = nn.ModuleDict({"row": make(bias=bias, skip_bias_add=skip), "other": make(bias=False)}).to(device())
        row: Any = model["row"]
        model["other"].quant_method = quantised()
        row.weight.data.copy_(w.chunk(ranks, 1)[rank])
        if bias:
            row.bias.data.copy_(b)
        with torch.inference_mode():
            own = row(mine)
            done = plug_in.apply(model)
            with distgemm.record_calls() as calls:
                found = row(mine)
            plug_in.remove(model)
            again = row(mine)
        if done.layers != ("row",) or "quantised" not in done.left["other"]:
            wrong.append(f"{case}: {done}")
        if [call.function for call in calls] != ["matmul_all_reduce"] or not torch.equal(again[0], own[0]):
            wrong.append(f"{case}: {[str(call) for call in calls]}")
        y = x @ w.t() + (b if bias and not skip else 0)
        if not near(found[0], y) or not near(own[0], y) or (found[1] is None) != (own[1] is None):
            wrong.append(f"{case}: numbers")
    refused = raised(ValueError, lambda: plug_in.apply(model, "gemm+rs"))
    if "'gemm+rs' does not compute gemm+ar" not in refused or "forward" in row.__dict__:
        wrong.append(f"a schedule of another pattern: {refused}")
    if "model has no RowParallelLinear" not in raised(ValueError, lambda: plug_in.apply(nn.Linear(2, 2))):
        wrong.append("a model without such layers")
    return wrong


def vllm_rows() -> list[str]:
    """vLLM's RowParallelLinear."""
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    from distgemm.integrations import vllm

    size = 8 * dist.get_world_size()
    with groups_of_vllm():
        wrong = serves_rows(
            vllm, lambda **options: RowParallelLinear(size, 6, params_dtype=torch.float64, **options), mock.Mock
        )
        bare = RowParallelLinear(size, 6, bias=False, params_dtype=torch.float64, return_bias=False).to(device())
        assert isinstance(bare.quant_method, UnquantizedLinearMethod)
        vllm.apply(bare)
        with torch.inference_mode():
            found = bare(draw(1, 4, 8))
    return wrong + ["return_bias=False"] * (not isinstance(found, torch.Tensor))


def sglang_rows() -> list[str]:
    """SGLang's RowParallelLinear, and where its own forward runs."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.layernorm_sp import set_sp_num_tokens
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.runtime_context import get_forward, get_parallel

    from distgemm.integrations import sglang

    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = {"tp_size": ranks, "attn_tp_size": ranks, "attn_tp_rank": rank}
    backend, index = dist.get_backend(), device().index or 0
    parallel_state.init_distributed_environment(ranks, rank, backend=backend, local_rank=index)
    group = parallel_state.init_model_parallel_group(
        [list(range(ranks))], index, backend, use_pynccl=False, use_custom_allreduce=False, group_name="tp"
    )
    ones = dict.fromkeys(("attn_dp_size", "attn_cp_size"), 1)
    get_parallel().override_permanently(**sizes, **ones, tp_rank=rank, tp_group=group, attn_tp_group=group)

    def make(**options: Any) -> Any:
        return RowParallelLinear(8 * ranks, 6, params_dtype=torch.float64, **options)

    wrong = serves_rows(sglang, make, mock.Mock)
    row: Any = make(bias=False).to(device())
    row.weight.data.copy_(draw(2, 6, 8 * ranks).chunk(ranks, 1)[rank])
    x = draw(1, 4 * ranks, 8 * ranks)
    mine = x.chunk(ranks, 1)[rank].contiguous()
    sglang.apply(row)
    with torch.inference_mode(), distgemm.record_calls() as calls, get_forward().scoped(mlp_reduce_scatter=True):
        if calls or not near(row(mine)[0], mine @ row.weight.t()):
            wrong.append("mlp_reduce_scatter")
    # With --enable-layernorm-sp, SGLang's linears call torch's fused ops.
    up = ColumnParallelLinear(6, 4 * ranks, bias=False, params_dtype=torch.bfloat16).to(device())
    down = RowParallelLinear(8 * ranks, 6, bias=False, params_dtype=torch.bfloat16).to(device())
    up.weight.data.copy_(draw(5, 4, 6))
    down.weight.data.copy_(row.weight)
    set_sp_num_tokens(4 * ranks)
    with torch.inference_mode(), get_forward().scoped(sp_active=True), distgemm.install(strict=True):
        shard, _ = down(mine.bfloat16())
        whole, _ = up(shard)
    product = x @ draw(2, 6, 8 * ranks).t()
    for found, wanted in ((shard, product.chunk(ranks)[rank]), (whole, product @ draw(5, 4, 6).t())):
        if found.shape != wanted.shape or not float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max()):
            wrong.append("layernorm_sp")
    if sum(distgemm.report().served.values()) != 2:
        wrong.append(str(distgemm.report()))
    return wrong
