"""The ranks of the tests with frameworks: each check runs a framework's own code, on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch._utils
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import distgemm
from tests.multiprocess.install_worker import MIDDLE, device, draw, group_of_all, near, raised

Tensor = torch.Tensor


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


STEPS, SEQUENCE, BATCH, LAYERS = 20, 64, 2, 2


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
        megatron.remove(model)
        if {"forward", "_forward_impl"} & (set(up.__dict__) | set(down.__dict__)):
            wrong.append(f"{case}: remove")
    if "no ColumnParallelLinear" not in raised(ValueError, lambda: megatron.apply(nn.Linear(2, 2))):
        wrong.append("a model without such layers")
    return wrong


def transformers_linears() -> list[str]:
    """A small Llama of transformers with its own tp_plan: logits and gradients against one rank."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from distgemm.integrations import transformers

    ranks, wrong = dist.get_world_size(), []
    sizes = {"hidden_size": 32, "intermediate_size": 24 * ranks, "num_hidden_layers": 2, "vocab_size": 16 * ranks}
    settings = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attention_bias=True)
    torch.manual_seed(7)
    model = LlamaForCausalLM(settings).double().to(device())
    whole = copy.deepcopy(model)
    ids = torch.randint(0, settings.vocab_size, (2, 6), generator=torch.Generator().manual_seed(1)).to(device())
    wanted = whole(input_ids=ids, labels=ids)
    wanted.loss.backward()
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
    if forward != 4 or functions != {"matmul_all_reduce"} or len(calls) != 2 * 4 + 2 * 5:
        wrong.append(f"{forward} calls forward, {len(calls)} in all, {functions}")
    if not near(found.logits, wanted.logits) or not near(generated, wanted.logits):
        wrong.append("logits")
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if not float((gradient - expected).abs().max()) < 1e-12:
            wrong.append(f"gradient of {name}")
    if "uninstall() comes first" not in again or "was not called" not in raised(RuntimeError, transformers.uninstall):
        wrong.append(again)
    return wrong
