"""Specs of tensors, and the checks that need tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.spec import SCALE_BLOCK, TMA_ALIGNMENT, GemmSpec, MatrixSpec, ScaleMode, common_power_of_two
from distgemm.plan.problem import DTYPES

__all__ = ["check_device", "matrix_spec", "spec_of"]

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES if name != "tfloat32"}


def matrix_spec(name: str, tensor: torch.Tensor, dtype: str | None = None) -> MatrixSpec:
    """The spec of a matrix (rows, columns), or of batches of matrices (l, rows, columns).

    Args:
        name: the tensor's name in messages.
        tensor: the tensor.
        dtype: the element type of the spec; None: the tensor's.

    Raises:
        ValueError: for another number of dimensions, an unknown type, or if neither rows nor columns are contiguous.
    """
    if tensor.dim() not in (2, 3):
        raise ValueError(f"{name} has 2 or 3 dimensions, got shape {tuple(tensor.shape)}")
    known = _known(name, tensor)
    batches = tensor.shape[0] if tensor.dim() == 3 else 1
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    batch_stride = tensor.stride(0) if batches > 1 else 0
    # The stride of a mode of extent 1 is not used, and may be anything.
    if (column_stride == 1 or columns == 1) and (row_stride >= columns or rows == 1):
        row_major, stride, used = True, row_stride, rows > 1
    elif (row_stride == 1 or rows == 1) and (column_stride >= rows or columns == 1):
        row_major, stride, used = False, column_stride, columns > 1
    else:
        raise ValueError(
            f"rows or columns of {name} are contiguous and do not overlap, got shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}"
        )
    if not used:
        size = tensor.element_size()
        stride = -(-(columns if row_major else rows) * size // TMA_ALIGNMENT) * TMA_ALIGNMENT // size
    return MatrixSpec(
        dtype=dtype or known,
        rows=rows,
        columns=columns,
        batches=batches,
        row_major=row_major,
        stride=stride,
        batch_stride=batch_stride,
        alignment=common_power_of_two(tensor.data_ptr()),
    )


def spec_of(tensors: GemmTensors) -> GemmSpec:
    """The spec of these tensors.

    Raises:
        ValueError: if they do not fit together.
    """
    a, b, d = tensors.a, tensors.b, tensors.d
    present = {
        "A": a,
        "B": b,
        "D": d,
        "C": tensors.c,
        "the partial sum": tensors.partial,
        "bias": tensors.bias,
        "scale_a": tensors.scale_a,
        "scale_b": tensors.scale_b,
    }
    for name, tensor in present.items():
        if tensor is not None and tensor.device != d.device:
            raise ValueError(f"all tensors are on one device: D is on {d.device}, {name} on {tensor.device}")
    if tensors.dtype not in (None, DTYPE_NAMES.get(a.dtype)) and (tensors.dtype, a.dtype) != (
        "tfloat32",
        torch.float32,
    ):
        raise ValueError(
            f"dtype is {DTYPE_NAMES.get(a.dtype)!r} as A, or 'tfloat32' for float32, got {tensors.dtype!r}"
        )
    if tensors.block_rows is not None and not set(tensors.block_rows) <= {1, SCALE_BLOCK}:
        raise ValueError(f"block_rows are 1 or {SCALE_BLOCK}, for A and for B, got {tensors.block_rows}")
    if tensors.beta and tensors.c is None:
        raise ValueError(f"beta is {tensors.beta}, but there is no C")
    if not _disjoint(d):
        raise ValueError(f"elements of D overlap, got shape {tuple(d.shape)} and strides {d.stride()}")
    multiplied = tensors.dtype if tensors.dtype == "tfloat32" else None
    results = {name: _result(name, x) for name in ("D", "C", "the partial sum") if (x := present[name]) is not None}
    spec = GemmSpec(
        a=matrix_spec("A", a, multiplied),
        b=matrix_spec("B", b, multiplied),
        d=replace(results["D"], padded=tensors.padded),
        c=results.get("C") if tensors.beta else None,
        partial=results.get("the partial sum"),
        bias=None if tensors.bias is None else _known("bias", tensors.bias),
        scale_a=_scale("scale_a", tensors.scale_a, a, tensors.block_rows and tensors.block_rows[0]),
        scale_b=_scale("scale_b", tensors.scale_b, b, tensors.block_rows and tensors.block_rows[1]),
    )
    if tensors.bias is not None and (tensors.bias.shape != (spec.n,) or tensors.bias.stride() != (1,)):
        raise ValueError(
            f"bias is a dense vector of n = {spec.n}, got shape {tuple(tensors.bias.shape)} "
            f"and strides {tensors.bias.stride()}"
        )
    return spec


def check_device(tensors: GemmTensors) -> None:
    """Raise ValueError if the tensors are not on a CUDA device."""
    if tensors.d.device.type != "cuda":
        raise ValueError(f"kernels run on CUDA devices, the tensors are on {tensors.d.device}")


def _known(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} is of {tensor.dtype}; known are {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[tensor.dtype]


def _result(name: str, tensor: torch.Tensor) -> MatrixSpec:
    spec = matrix_spec(name, tensor)
    if not spec.row_major:
        raise ValueError(f"rows of {name} are contiguous, got strides {tensor.stride()}")
    return spec


def _disjoint(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, and each mode's stride exceeds the extent of the modes within."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return False
            reach += stride * (extent - 1)
    return True


def _scale(name: str, scale: torch.Tensor | None, operand: torch.Tensor, block_rows: int | None) -> ScaleMode:
    rows, columns = operand.shape[-2:]
    if block_rows is not None:
        return _block_scale(name, scale, (-(-rows // block_rows), -(-columns // SCALE_BLOCK)), block_rows)
    if scale is None:
        return "none"
    if scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(f"{name} is dense and of float32, got {scale.dtype}")
    if scale.numel() == 1:
        return "tensor"
    if scale.numel() == rows:
        return "row"
    raise ValueError(f"{name} has 1 element or one for each of {rows} rows, got shape {tuple(scale.shape)}")


def _block_scale(name: str, scale: torch.Tensor | None, shape: tuple[int, int], block_rows: int) -> ScaleMode:
    if scale is None or scale.dtype != torch.float32 or scale.shape != shape:
        got = None if scale is None else f"{scale.dtype} of shape {tuple(scale.shape)}"
        raise ValueError(f"{name} is of float32 and has a number for each block, shape {shape}, got {got}")
    return "1x128" if block_rows == 1 else "128x128"
