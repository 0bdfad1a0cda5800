"""Provider cublas without a GPU: the GEMMs that it supports, and torch's functions, run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmSpec, GemmTensors, MatrixSpec
from distgemm.gemm.cublas import CublasLaunch, CublasProvider, torch_function
from distgemm.gemm.tensors import spec_of

PROVIDER = CublasProvider()
M, N, K = 24, 32, 16
D = MatrixSpec("bfloat16", M, N)
PRODUCT = GemmSpec(MatrixSpec("bfloat16", M, K), MatrixSpec("bfloat16", N, K), D)


def of(dtype: str, **changes: Any) -> GemmSpec:
    a, b = replace(PRODUCT.a, dtype=dtype), replace(PRODUCT.b, dtype=dtype)
    result = {"tfloat32": "float32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)
    return replace(GemmSpec(a, b, replace(D, dtype=result)), **changes)


def batches(spec: GemmSpec) -> GemmSpec:
    a, b, d = (replace(x, batches=2, batch_stride=-1) for x in (spec.a, spec.b, spec.d))
    return replace(spec, a=a, b=b, d=d)


FP8 = of("float8_e4m3fn", scale_a="tensor", scale_b="tensor")
E5M2 = of("float8_e5m2", d=D, scale_a="tensor", scale_b="tensor")


@pytest.mark.parametrize(
    "spec",
    [
        *(of(dtype) for dtype in ("bfloat16", "float16", "float32", "tfloat32", "float64")),
        *(replace(E5M2, **{name: getattr(FP8, name)}) for name in "ab"),
        replace(PRODUCT, c=D),
        replace(PRODUCT, partial=D),
        replace(PRODUCT, bias="bfloat16"),
        of("tfloat32", c=replace(D, dtype="float32")),
        replace(PRODUCT, a=replace(PRODUCT.a, row_major=False, stride=25)),
        batches(PRODUCT),
        FP8,
        replace(FP8, scale_a="row", scale_b="row"),
        replace(FP8, bias="bfloat16"),
    ],
)
def test_supported_gemms(spec: GemmSpec) -> None:
    assert PROVIDER.supports(spec).reason == ""
    assert PROVIDER.compile(spec).name == "cublas"
    assert PROVIDER.configs(spec) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(PRODUCT, partial=D, c=D), "torch adds one matrix to a product, not both C and a partial sum"),
        (replace(PRODUCT, bias="bfloat16", c=D), "torch adds either a bias or a matrix to a product, not both"),
        (replace(PRODUCT, bias="bfloat16", partial=D), "torch adds either a bias or a matrix to a product, not both"),
        (replace(PRODUCT, scale_a="tensor"), "torch scales fp8 operands only"),
        (replace(PRODUCT, scale_b="row"), "torch scales fp8 operands only"),
        (of("bfloat16", d=replace(D, dtype="float32")), "torch multiplies bfloat16 into bfloat16; D is of float32"),
        (of("tfloat32", d=D), "torch multiplies tfloat32 into float32; D is of bfloat16"),
        (replace(PRODUCT, c=replace(D, dtype="float32")), "torch multiplies bfloat16 into bfloat16; C is of float32"),
        (
            replace(PRODUCT, partial=replace(D, dtype="float32")),
            "torch multiplies bfloat16 into bfloat16; the partial sum is of float32",
        ),
        (replace(PRODUCT, bias="float32"), "torch multiplies bfloat16 into bfloat16; bias is of float32"),
        (replace(FP8, c=D), "torch adds no matrix to a product of fp8 operands"),
        (replace(FP8, partial=D), "torch adds no matrix to a product of fp8 operands"),
        (batches(FP8), "torch multiplies single matrices of fp8, both with contiguous rows"),
        (
            replace(FP8, a=replace(FP8.a, row_major=False, stride=32)),
            "torch multiplies single matrices of fp8, both with contiguous rows",
        ),
        (of("float8_e4m3fn"), "torch wants both scales per tensor or both per row, got none, none"),
        (replace(FP8, scale_b="row"), "torch wants both scales per tensor or both per row, got tensor, row"),
        (
            of("float8_e4m3fn", b=replace(FP8.b, rows=24), d=replace(D, columns=24), scale_a="row", scale_b="row"),
            "torch wants k and n in multiples of 16 in fp8, got 16 and 24",
        ),
        (
            replace(FP8, scale_a="1x128", scale_b="128x128"),
            "torch wants both scales per tensor or both per row, got 1x128, 128x128",
        ),
        (E5M2, "torch does not multiply float8_e5m2 by float8_e5m2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gemms_that_torch_does_not_compute(spec: GemmSpec, reason: str) -> None:
    assert PROVIDER.supports(spec).reason == reason
    with pytest.raises(ValueError, match=f"provider cublas: {reason}"):
        PROVIDER.compile(spec)


def test_configurations_are_refused() -> None:
    config = GemmConfig.parse("128x256x64_1x2_cooperative")
    reason = f"cuBLAS chooses its own kernels, configuration {config} cannot be asked for"
    assert PROVIDER.supports(PRODUCT, config).reason == reason


# --- the functions --------------------------------------------------------------------------------------


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("dims", ["matrices", "batches", "a batch of one", "one of the three"])
@pytest.mark.parametrize("terms", ["none", "alpha", "c", "c is not read", "in place", "partial", "bias"])
def test_torch_functions(dims: str, terms: str) -> None:
    lead = {"batches": (3,), "a batch of one": (1,)}.get(dims, ())
    a, b, d = drawn(*lead, M, K), drawn(*lead, N, K), drawn(*lead, M, N)
    if dims == "one of the three":
        a = a[None]
    alpha, beta, added = 1.0, 0.0, torch.zeros(())
    tensors = GemmTensors(a, b, d)
    if terms != "none":
        alpha = 2.0
    if terms in ("c", "in place", "c is not read"):
        c = d if terms == "in place" else drawn(*lead, M, N)
        beta = 0.0 if terms == "c is not read" else -0.5
        tensors, added = replace(tensors, c=c, beta=beta), beta * c
    elif terms == "partial":
        tensors = replace(tensors, partial=drawn(*lead, M, N), beta=beta)
        added = tensors.partial
    elif terms == "bias":
        tensors = replace(tensors, bias=drawn(N))
        added = tensors.bias
    assert added is not None
    if terms != "in place":
        d.fill_(float("nan"))
        tensors = replace(tensors, d=d)
    wanted = alpha * (a.double() @ b.double().mT) + added.double()
    tensors = replace(tensors, alpha=alpha)
    torch_function(tensors, spec_of(tensors))()
    assert tensors.d.shape == (*lead, M, N)
    assert torch.equal(d.double(), wanted.reshape(d.shape))


def test_fp8_has_no_alpha() -> None:
    one = torch.ones(1)
    a, b = (torch.zeros(x, K).to(torch.float8_e4m3fn) for x in (M, N))
    tensors = GemmTensors(a, b, torch.zeros(M, N).bfloat16(), scale_a=one, scale_b=one, alpha=2.0)
    with pytest.raises(ValueError, match=r"scales products of fp8 by tensors only, not by alpha = 2\.0"):
        torch_function(tensors, spec_of(tensors))


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize(("dtype", "used"), [(None, "ieee"), ("tfloat32", "tf32")])
def test_the_precision_of_float32_is_restored(
    monkeypatch: pytest.MonkeyPatch, before: str, dtype: str | None, used: str
) -> None:
    class Setting:
        fp32_precision = before

    monkeypatch.setattr(torch.backends.cuda, "matmul", Setting)
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: torch.no_grad())
    seen = []

    def fail() -> None:
        seen.append(Setting.fp32_precision)
        raise KeyError

    launch = CublasLaunch(GemmTensors(drawn(M, K), drawn(N, K), drawn(M, N), dtype=dtype), fail)
    with pytest.raises(KeyError):
        launch()
    assert (seen, Setting.fp32_precision) == ([used], before)
