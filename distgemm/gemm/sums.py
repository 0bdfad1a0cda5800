"""Sums of matrices by a kernel. It completes a tile whose partial sums have all arrived."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from distgemm.gemm.cubins import Cubin, open_cubin
from distgemm.gemm.cutlass import ELEMENTS, RESULTS, CutlassProvider, as_matrix, sm_count
from distgemm.gemm.launches import KernelLaunch, address_cells
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.parameters import Matrix
from distgemm.gemm.spec import MatrixSpec
from distgemm.gemm.tensors import matrix_spec
from distgemm.plan.problem import DTYPE_BYTES

__all__ = ["SumLaunch", "bind_sum", "sum_source", "sum_source_of"]

SOURCES = 64
"""Matrices that one launch adds, at most."""
SUMMED = ("float64", *RESULTS)
"""Types of the matrices."""
BLOCKS_PER_SM = 8
"""Thread blocks of a launch on each streaming multiprocessor, at most."""


class _Arguments(ctypes.Structure):
    """struct Arguments of sum.cu."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("m", "n", "l", "count")),
        ("sources", Matrix * SOURCES),
        ("c", Matrix),
        ("d", Matrix),
        ("bias", ctypes.c_void_p),
        ("beta", ctypes.c_double),
    )


def sum_source(source: str, result: str, vector: int, arch: str) -> KernelSource:
    """The source of the kernel.

    Args:
        source: element type of what is added.
        result: element type of the sum.
        vector: elements that a thread loads at once.
        arch: the architecture, as nvcc names it.
    """
    elements = ELEMENTS | {"float64": "double"}
    added = "double" if "float64" in (source, result) else "float"
    values = {"SOURCE": elements[source], "D": elements[result], "SUM": added, "VECTOR": str(vector)}
    macros = tuple((f"DG_{name}", value) for name, value in values.items())
    return KernelSource(f"sum ({source} -> {result}, {vector} at once)", macros, arch, "sum.cu", ("facts.cuh",))


def sum_source_of(matrices: Sequence[MatrixSpec], d: MatrixSpec) -> KernelSource:
    """The source of the kernel that adds these matrices, with loads as wide as all of them allow (16 bytes at most).

    Args:
        matrices: the sources, then C if there is one.
        d: the sum.

    Raises:
        ValueError: for a type that is not added.
    """
    specs = [*matrices, d]
    for spec in specs:
        if spec.dtype not in SUMMED:
            raise ValueError(f"sums are of {', '.join(SUMMED)}, not {spec.dtype}")
    return sum_source(matrices[0].dtype, d.dtype, _vector(specs), CutlassProvider().arch)


def _vector(specs: Sequence[MatrixSpec]) -> int:
    """Elements that a thread loads at once, from all matrices."""
    return min(16 // max(DTYPE_BYTES[spec.dtype] for spec in specs), *(spec.vector for spec in specs))


class SumLaunch(KernelLaunch):
    """A sum with its arguments; implements :class:`distgemm.gemm.Launch`."""

    def __init__(self, cubin: Cubin, arguments: _Arguments, vector: int, device: int, tensors: object) -> None:
        self._arguments, self._device = arguments, device
        self._tensors: object = tensors  # kept alive
        vectors = arguments.n // vector * arguments.m * arguments.l
        blocks = min(-(-vectors // cubin.threads), sm_count(device) * BLOCKS_PER_SM)
        self._launch = cubin.launcher(device, (blocks, 1, 1), ctypes.addressof(arguments)) if vectors else None

    def __call__(self, stream: int | None = None) -> None:
        if self._launch is None:
            return
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        self._launch(stream)

    def cells(self) -> list[ctypes.c_uint64]:
        return [] if self._launch is None else address_cells(self._arguments)

    @property
    def parameter(self) -> int:
        return ctypes.addressof(self._arguments)

    def forget(self) -> None:
        self._tensors = None


def bind_sum(
    sources: Sequence[torch.Tensor],
    d: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
) -> SumLaunch:
    """``d = sources[0] + sources[1] + ... + beta * c + bias``

    The kernel adds in this order, in float64 where one of the types is float64 and else in float32, and rounds once.

    Args:
        sources: (m, n) or (l, m, n), of one type, rows contiguous; at most 64. Each may be the same memory as ``d``.
        d: as the sources, of any type.
        c: as ``d``; it may be the same memory.
        beta: factor of ``c``; with 0, ``c`` is not read.
        bias: (n,), of ``d``'s type.

    Raises:
        ValueError: if these do not fit together.
    """
    if not 1 <= len(sources) <= SOURCES:
        raise ValueError(f"a sum has 1 to {SOURCES} sources, got {len(sources)}")
    if not beta:
        c = None
    specs = [matrix_spec("a source", source) for source in sources]
    d_spec = matrix_spec("D", d)
    c_spec = None if c is None else matrix_spec("C", c)
    matrices = [*specs, d_spec, *([c_spec] if c_spec else [])]
    if len({(spec.rows, spec.columns, spec.batches) for spec in matrices}) > 1:
        raise ValueError(f"all matrices of a sum have the same shape, got {[(x.rows, x.columns) for x in matrices]}")
    if len({spec.dtype for spec in specs}) > 1 or (c_spec and c_spec.dtype != d_spec.dtype):
        raise ValueError(f"sources are of one type, and so are C and D, got {[spec.dtype for spec in matrices]}")
    if not all(spec.row_major for spec in matrices):
        raise ValueError("rows of all matrices of a sum are contiguous")
    if bias is not None and (bias.dtype != d.dtype or bias.shape != (d_spec.columns,) or bias.stride() != (1,)):
        raise ValueError(f"bias is a dense vector of {d_spec.columns} elements of {d.dtype}")
    device = d.device.index
    cubin = open_cubin(sum_source_of(matrices, d_spec), _Arguments)
    cubin.load_on(device)
    arguments = _Arguments(d_spec.rows, d_spec.columns, d_spec.batches, len(sources))
    for number, (source, spec) in enumerate(zip(sources, specs, strict=True)):
        arguments.sources[number] = as_matrix(source, spec)
    arguments.c, arguments.d = as_matrix(c, c_spec), as_matrix(d, d_spec)
    arguments.bias = None if bias is None else bias.data_ptr()
    arguments.beta = beta
    return SumLaunch(cubin, arguments, _vector(matrices), device, (tuple(sources), d, c, bias))
