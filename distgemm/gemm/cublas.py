"""Provider "cublas": cuBLAS through torch. cuBLAS selects its kernels, so there are no configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.spec import FP8, GemmConfig, GemmSpec, Status
from distgemm.gemm.streams import stream_of
from distgemm.gemm.tensors import check_device, spec_of

__all__ = ["CublasKernel", "CublasProvider"]

DTYPES = ("bfloat16", "float16", "float32", "tfloat32", "float64", *FP8)


class CublasProvider:
    """torch.mm, addmm, baddbmm and _scaled_mm, writing into D."""

    name = "cublas"

    def configs(self, spec: GemmSpec, streams: int = 1) -> list[GemmConfig]:
        """Empty: cuBLAS selects its own kernels."""
        return []

    def supports(self, spec: GemmSpec, config: GemmConfig | None = None) -> Status:
        """Whether ``compile`` would return a kernel; if not, falsy with the reason."""
        added = spec.partial or spec.c
        if config is not None:
            return Status(f"cuBLAS chooses its own kernels, configuration {config} cannot be asked for")
        if spec.a.dtype not in DTYPES:
            return Status(f"A and B are of {', '.join(DTYPES)}, not {spec.a.dtype}")
        if spec.partial is not None and spec.c is not None:
            return Status("torch adds one matrix to a product, not both C and a partial sum")
        if spec.bias is not None and added is not None:
            return Status("torch adds either a bias or a matrix to a product, not both")
        if spec.a.dtype in FP8:
            return self._scaled(spec)
        if spec.scale_a != "none" or spec.scale_b != "none":
            return Status("torch scales fp8 operands only")
        result = "float32" if spec.a.dtype == "tfloat32" else spec.a.dtype
        other = "C" if spec.partial is None else "the partial sum"
        for name, dtype in (("D", spec.d.dtype), (other, added and added.dtype), ("bias", spec.bias)):
            if dtype not in (None, result):
                return Status(f"torch multiplies {spec.a.dtype} into {result}; {name} is of {dtype}")
        return Status()

    def _scaled(self, spec: GemmSpec) -> Status:
        if spec.partial is not None or spec.c is not None:
            return Status("torch adds no matrix to a product of fp8 operands")
        if spec.l > 1 or not (spec.a.row_major and spec.b.row_major):
            return Status("torch multiplies single matrices of fp8, both with contiguous rows")
        if spec.a.dtype == spec.b.dtype == "float8_e5m2":
            return Status("torch does not multiply float8_e5m2 by float8_e5m2")
        if {spec.scale_a, spec.scale_b} not in ({"tensor"}, {"row"}):
            return Status(f"torch wants both scales per tensor or both per row, got {spec.scale_a}, {spec.scale_b}")
        if spec.k % 16 or spec.n % 16:
            return Status(f"torch wants k and n in multiples of 16 in fp8, got {spec.k} and {spec.n}")
        return Status()

    def sources(
        self, specs: Sequence[GemmSpec], config: GemmConfig | None = None, streams: int = 1
    ) -> list[KernelSource]:
        """Empty: cuBLAS is already compiled."""
        return []

    def compile(self, spec: GemmSpec, config: GemmConfig | None = None, streams: int = 1) -> CublasKernel:
        """The kernel.

        Raises:
            ValueError: if it is not supported.
        """
        status = self.supports(spec, config)
        if not status:
            raise ValueError(f"provider cublas: {status.reason}")
        return CublasKernel()


class CublasKernel:
    """torch's function for a GEMM; implements :class:`distgemm.gemm.Kernel`."""

    name = "cublas"

    def bind(self, tensors: GemmTensors, begins_early: bool = True) -> CublasLaunch:
        """A launch with these tensors. cuBLAS decides when it begins.

        Raises:
            ValueError: if torch cannot compute it.
        """
        spec = spec_of(tensors)
        check_device(tensors)
        status = CublasProvider().supports(spec)
        if not status:
            raise ValueError(f"provider cublas: {status.reason}")
        return CublasLaunch(tensors, torch_function(tensors, spec))


def torch_function(t: GemmTensors, spec: GemmSpec) -> Callable[[], object]:
    """A call of torch's function that computes this GEMM.

    Raises:
        ValueError: for fp8 with ``alpha``, which torch does not scale by.
    """

    def batches(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0] if tensor.dim() == 3 and spec.l == 1 else tensor

    a, b, d = batches(t.a), batches(t.b).mT, batches(t.d)
    if spec.a.dtype in FP8:
        if t.alpha != 1.0:
            raise ValueError(f"provider cublas: torch scales products of fp8 by tensors only, not by alpha = {t.alpha}")
        scale_a, scale_b = t.scale_a, t.scale_b
        assert scale_a is not None and scale_b is not None
        if spec.scale_a == "row":
            scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(1, -1)
        return lambda: torch._scaled_mm(a, b, scale_a, scale_b, bias=t.bias, out_dtype=d.dtype, out=d)
    factor = 1.0
    if t.partial is not None:
        added = batches(t.partial)
    elif t.c is not None and t.beta:
        added, factor = batches(t.c), t.beta
    elif t.bias is not None:
        added = t.bias
    elif t.alpha == 1.0:
        return lambda: torch.matmul(a, b, out=d)
    else:
        added, factor = d, 0.0
    add = torch.addmm if spec.l == 1 else torch.baddbmm
    return lambda: add(added, a, b, beta=factor, alpha=t.alpha, out=d)


class CublasLaunch:
    """torch's function with its tensors; implements :class:`distgemm.gemm.Launch`."""

    def __init__(self, tensors: GemmTensors, function: Callable[[], object]) -> None:
        self._tensors, self._function = tensors, function
        self._precision = "tf32" if tensors.dtype == "tfloat32" else "ieee"

    @torch.no_grad()
    def __call__(self, stream: int | None = None) -> None:
        device = self._tensors.d.device
        on = torch.cuda.current_stream(device) if stream is None else stream_of(stream, device)
        setting: Any = torch.backends.cuda.matmul
        before = setting.fp32_precision
        setting.fp32_precision = self._precision
        try:
            with torch.cuda.stream(on):
                self._function()
        finally:
            setting.fp32_precision = before
