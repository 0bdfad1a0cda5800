"""The parameters of kernels are, byte for byte, what CUTLASS's host code makes of the same arguments."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmTensors, cutlass, parameters
from distgemm.gemm.cubins import Fact, read_facts
from distgemm.gemm.cutlass import CutlassProvider, arguments_of, kernel_source
from distgemm.gemm.nvcc import KernelSource, command, find_nvcc
from distgemm.gemm.parameters import (
    Arguments,
    DescriptorError,
    Matrix,
    Parameter,
    ParameterLayout,
    gemm_parameter,
    order_of_tiles,
)
from distgemm.gemm.tensors import spec_of

REFERENCE = Path(__file__).parent / "data" / "reference.cu"
PROVIDER = CutlassProvider("90a")


class Recorded(ctypes.Structure):
    """struct Recorded of reference.cu: what the driver is asked to encode."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("extents", ctypes.c_uint64 * 3),
        ("strides", ctypes.c_uint64 * 2),
        ("type", ctypes.c_uint32),
        ("modes", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 3),
        ("steps", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("interleave", "swizzle", "promotion", "fill")),
    )


class RecordingDriver:
    """A driver that writes what it is asked to encode. It refuses strides that TMA has not."""

    def cuTensorMapEncodeTiled(self, at: int, kind: int, modes: int, address: int | None, *given: Any) -> int:  # noqa: N802
        extents, strides, box, steps, *choices = given
        if max(strides) >= 1 << 40:
            return 1
        Recorded.from_address(at).__init__(address or 0, extents, strides, kind, modes, box, steps, *choices)  # type: ignore[misc]
        return 0

    def cuTensorMapReplaceAddress(self, at: int, address: int | None) -> int:  # noqa: N802
        Recorded.from_address(at).address = address or 0
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are made from tensors on the CPU, as on a GPU of 132 SMs, and descriptors are recorded."""
    monkeypatch.setattr(parameters, "libcuda", RecordingDriver)
    monkeypatch.setattr(cutlass, "check_device", lambda tensors: None)
    monkeypatch.setattr(cutlass, "sm_count", lambda device: 132)


# --- without a compiler ---------------------------------------------------------------------------------


def test_a_division_is_exact() -> None:
    """As CUTLASS's FastDivmodU64 divides: the high half of a product, shifted."""
    drawn = random.Random(0)
    for divisor in [*range(1, 200), *(drawn.randrange(1, 1 << 40) for _ in range(200))]:
        found = parameters._division("d", divisor)
        multiplier, shift = found["d.multiplier"], found["d.shift_right"]
        for x in [*range(0, 300, 7), divisor - 1, divisor, divisor + 1, *(drawn.randrange(1 << 60) for _ in range(20))]:
            high = ((x + found["d.round_up"]) * multiplier) >> 64 if multiplier else x
            assert high >> shift == x // divisor, (x, divisor)


@pytest.mark.parametrize("cluster", ["1x1", "2x1", "1x2", "2x2", "1x4", "4x2"])
@pytest.mark.parametrize("max_clusters", [0, 1, 15, 16, 32, 66, 132])
def test_the_grid_holds_whole_clusters(cluster: str, max_clusters: int) -> None:
    for raster in range(3):
        for m, n, batches, swizzle in ((100, 5000, 1, 1), (4096, 4096, 3, 8), (64, 64, 1, 2)):
            config = GemmConfig.parse(f"128x128x64_{cluster}_pingpong")
            given = Arguments(m, n, 64, batches, sm_count=132, raster=raster, swizzle=swizzle)
            order = order_of_tiles(config, given)
            x, y, z = order.grid(batches, 132, max_clusters)
            size = config.cluster[0] * config.cluster[1]
            assert x % config.cluster[0] == y % config.cluster[1] == 0 and z == 1
            assert 0 < x * y <= min(132, order.blocks * batches)
            if size > 1 and 0 < max_clusters * size <= 132:
                assert x * y == min(max_clusters * size, order.blocks * batches)
            assert order.blocks % (config.cluster[0] * config.cluster[1]) == 0
            assert order.blocks >= -(-m // 128) * -(-n // 128)


def test_a_kernel_with_another_struct_is_refused() -> None:
    facts = {"size": Fact(0, 0, 64), "alignment": Fact(0, 0, 8), "d": Fact(8, 32, 0), "count": Fact(40, 4, 7)}
    made = Parameter(ParameterLayout("a kernel", facts))
    assert made.address % 8 == 0 and ctypes.string_at(made.address + 40, 4) == b"\7\0\0\0"
    with pytest.raises(RuntimeError, match="a kernel has 32 bytes for d, and this version of distgemm passes 24"):
        made.copy("d", Matrix())
    with pytest.raises(RuntimeError, match="a kernel has 32 bytes for d, and this version of distgemm passes 128"):
        made.describe("d", "d", "D", Matrix(), (1, 1, 1))


def test_what_is_no_cubin_is_refused() -> None:
    for image in (b"", b"\x7fELF" + bytes(100), bytes(64)):
        with pytest.raises(ValueError, match="no cubin with facts about its kernel"):
            read_facts(image)


@pytest.mark.usefixtures("driver")
def test_a_descriptor_that_cannot_be_encoded_is_named() -> None:
    box = {"type": 9, "swizzle": 3, "element_bytes": 2, "box_0": 64, "box_1": 64, "box_2": 1}
    facts = {f"d.{name}": Fact(0, 0, value) for name, value in box.items()}
    facts |= {"size": Fact(0, 0, 128), "alignment": Fact(0, 0, 64), "at": Fact(0, 128, 0)}
    made = Parameter(ParameterLayout("a kernel", facts))
    with pytest.raises(DescriptorError) as raised:
        made.describe("at", "d", "D of another rank", Matrix(2 << 20, 1 << 39, 0), (256, 512, 1))
    assert str(raised.value) == (
        "kernel a kernel: TMA cannot describe D of another rank: extents (512, 256, 1), the contiguous one first, "
        "strides (1099511627776, 0) bytes, bfloat16 at 0x200000 (CUDA_ERROR_INVALID_VALUE). Extents are 1 to 2**32, "
        "strides multiples of 16 and below 2**40 bytes"
    )
    matrix = Matrix(2 << 20, 512, 0)
    made.describe("at", "d", "D", matrix, (256, 512, 1), row_major=False)
    matrix.data = 3 << 20
    made.update()
    found = Recorded.from_address(made.address)
    assert (found.address, [*found.extents], [*found.strides]) == (3 << 20, [256, 512, 1], [1024, 0])


# --- beside CUTLASS's host code -------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A kernel, and CUTLASS's host code for it."""

    layout: ParameterLayout
    functions: ctypes.CDLL


def compile_both(source: KernelSource, folder: Path) -> Compiled:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    cubin, library = folder / "kernel.cubin", folder / "reference.so"
    words = command(source, nvcc, cubin)
    # nvcc looks for its runtime in lib64; the PyPI packages have it in lib.
    host = [*(word for word in words[:-3] if word != "-cubin"), f"-L{nvcc.parent.parent / 'lib'}"]
    host += ["-shared", "-Xcompiler", "-fPIC", f"-I{source.path.parent}", "-o", str(library), str(REFERENCE)]
    for each in (words, host):
        done = subprocess.run(each, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    facts, functions = read_facts(cubin.read_bytes()), ctypes.CDLL(str(library))
    assert functions.distgemm_parameter_size() == facts["size"].value
    # The epilogue takes and puts each value where CUTLASS's own layouts of accumulators and shared memory have it.
    assert functions.distgemm_misplaced() == (0 if "has_source" in facts else -1)
    assert facts["begins_early"].value == (dict(source.macros)["DG_MMA_K"] != "32")
    return Compiled(ParameterLayout(source.name, facts), functions)


def compare(
    compiled: Compiled, given: ctypes.Structure, made: tuple[Parameter, tuple[int, int, int]], max_clusters: int
) -> None:
    """The parameter and the grid are CUTLASS's, also after all addresses have changed."""
    layout, (parameter, grid) = compiled.layout, made
    buffer = ctypes.create_string_buffer(layout.size + layout.alignment)
    address = -(-ctypes.addressof(buffer) // layout.alignment) * layout.alignment
    for _ in range(2):
        wanted, wanted_grid = [], (ctypes.c_uint32 * 3)()
        for padding in (0, 255):
            compiled.functions.distgemm_parameter(
                ctypes.byref(given), ctypes.c_void_p(address), wanted_grid, padding, max_clusters
            )
            wanted.append(ctypes.string_at(address, layout.size))
            assert grid == tuple(wanted_grid)
        found = ctypes.string_at(parameter.address, layout.size)
        is_set = [one == other for one, other in zip(*wanted, strict=True)]
        differ = [at for at in range(layout.size) if is_set[at] and found[at] != wanted[0][at]]
        assert not differ, f"bytes {differ} of {layout.kernel}: {[(found[at], wanted[0][at]) for at in differ]}"
        assert sum(is_set) > layout.size / 2
        for cell in cutlass.address_cells(given):
            cell.value += 4096 if cell.value else 0
        parameter.update()


def one_gemms(
    dtype: torch.dtype,
    d_dtype: torch.dtype,
    majors: str,
    config: GemmConfig,
    block_rows: tuple[int, int] | None,
) -> Iterator[GemmTensors]:
    """GEMMs of several shapes, strides, batches and terms; A or B is row-major ("r") or column-major ("c")."""
    rng = random.Random(str(config))
    for number in range(24):
        m, n, k = (rng.randrange(1, most) * 16 for most in (160, 160, 40))
        batches = rng.choice([(), (), (3,)]) if block_rows is None else ()

        def matrix(rows: int, columns: int, kind: torch.dtype, major: str = "r") -> torch.Tensor:
            rows, columns = (rows, columns) if major == "r" else (columns, rows)
            made = torch.empty(*batches, rows, columns + rng.choice([0, 16]), dtype=kind)[..., :columns]  # noqa: B023
            return made if major == "r" else made.mT

        a, b = matrix(m, k, dtype, majors[0]), matrix(n, k, dtype, majors[1])
        terms: dict[str, Any] = {}
        if number % 2:
            terms |= {"bias": torch.zeros(n, dtype=d_dtype), "alpha": rng.random()}
        if block_rows is not None:
            shapes = [(-(-rows // block), -(-k // 128)) for rows, block in zip((m, n), block_rows, strict=True)]
            scales = [torch.ones(shape) if number % 2 else torch.ones(shape[::-1]).mT for shape in shapes]
            terms |= {"scale_a": scales[0], "scale_b": scales[1], "block_rows": block_rows}
        elif number % 3:
            terms |= {"scale_a": torch.ones(1), "scale_b": torch.ones(1 if batches else n)}
        yield GemmTensors(a, b, matrix(m, n, d_dtype), padded=True, **terms)


ONE_GEMM: list[tuple[Any, ...]] = [
    ("128x128x64_1x1_pingpong", "bfloat16", "bfloat16", "rr", False),
    ("64x192x64_1x2_pingpong_raster_m_swizzle_4", "float16", "float32", "rc", False),
    ("128x256x64_2x1_cooperative_swizzle_8", "bfloat16", "bfloat16", "cr", False),
    ("256x128x64_2x2_cooperative_raster_n", "bfloat16", "float16", "cc", False),
    ("128x64x64_1x4_cooperative", "bfloat16", "float32", "rr", True),
    ("128x80x64_4x2_pingpong", "bfloat16", "bfloat16", "rr", False),
    ("128x128x128_2x1_cooperative_share_2", "float8_e4m3fn", "bfloat16", "rr", True),
    ("128x96x32_1x2_pingpong", "tfloat32", "float32", "cr", False),
    ("128x80x64_2x1_pingpong_direct", "bfloat16", "bfloat16", "rr", False),
    ("128x192x128_2x1_cooperative", "float8_e4m3fn", "bfloat16", "rr", False, (1, 128)),
    ("64x128x128_1x2_pingpong_direct", "float8_e5m2", "float32", "rr", True, (128, 1)),
]
"""Configuration, types of A and D, majors of A and B, whether C is added, rows of blocks of A and of B."""


@pytest.mark.sample(0)  # a kernel compiles for 10 s, and CUTLASS's host code for 30 s
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("case", ONE_GEMM, ids=lambda case: "-".join(map(str, case[:5])))
def test_the_parameter_of_one_gemm_is_cutlass_s(case: tuple[Any, ...], tmp_path: Path) -> None:
    text, dtype, d_dtype, majors, has_c, *blocks = case
    config, compiled, drawn = GemmConfig.parse(text), None, random.Random(text)
    element = torch.float32 if dtype == "tfloat32" else getattr(torch, dtype)
    for tensors in one_gemms(element, getattr(torch, d_dtype), majors, config, *(blocks or [None])):
        changed: dict[str, Any] = {"dtype": "tfloat32"} if dtype == "tfloat32" else {}
        if has_c:
            changed |= {"c": torch.empty_like(tensors.d), "beta": drawn.random()}
        tensors = GemmTensors(**{**vars(tensors), **changed})
        spec = spec_of(tensors)
        source = kernel_source(spec, config, "90a")
        compiled = compiled or compile_both(source, tmp_path)
        given = arguments_of(tensors, spec, source, config, PROVIDER)
        at_most = 132 // (config.cluster[0] * config.cluster[1])
        (max_clusters,) = drawn.sample([0, at_most, drawn.randrange(1, 132)], 1)
        compare(compiled, given, gemm_parameter(compiled.layout, config, given, max_clusters), max_clusters)


@pytest.mark.usefixtures("driver")
def test_the_parameter_of_a_plain_kernel_is_what_was_given(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    config = GemmConfig.parse("128x128x32_1x1_plain")
    a, b, d, c = (torch.zeros(3, *shape, dtype=torch.bfloat16) for shape in ((300, 8), (6, 40), (300, 40), (300, 40)))
    tensors = GemmTensors(a[:, :, :6], b.mT, d, c=c, alpha=0.25, beta=2.0)
    spec = spec_of(tensors)
    source = kernel_source(spec, config, "90a")
    cubin = tmp_path / "kernel.cubin"
    subprocess.run(command(source, nvcc, cubin), check=True)
    layout = ParameterLayout(source.name, read_facts(cubin.read_bytes()))
    given = arguments_of(tensors, spec, source, config, PROVIDER)
    made, grid = gemm_parameter(layout, config, given)
    assert grid == (3, 1, 3)
    for name in ("m", "n", "k"):
        assert ctypes.c_int32.from_address(made.address + layout.field(name)[0]).value == getattr(given, name)
    for cell in cutlass.address_cells(given):
        cell.value += 4096 if cell.value else 0
    made.update()
    for name, tensor, stride in (("a", a, 8), ("b", b, 40), ("source", c, 40), ("d", d, 40)):
        found = Matrix.from_address(made.address + layout.field(name, ctypes.sizeof(Matrix))[0])
        assert (found.data, found.stride) == (tensor.data_ptr() + 4096, stride)
        assert found.batch_stride == tensor[0].numel()
    terms = parameters.Terms.from_address(made.address + layout.field("terms", ctypes.sizeof(parameters.Terms))[0])
    assert (terms.alpha, terms.source_scale) == (0.25, 2.0)


@pytest.mark.usefixtures("driver")
def test_scales_of_blocks_keep_their_strides() -> None:
    """Row-major and column-major ones: the kernel reads both where they are."""
    a, b = (torch.zeros(rows, 400).to(torch.float8_e4m3fn) for rows in (130, 300))
    scale_a, scale_b = torch.ones(4, 130).mT, torch.ones(3, 10)[:, 1:5]
    tensors = GemmTensors(
        *(a, b, torch.zeros(130, 300, dtype=torch.bfloat16)), scale_a=scale_a, scale_b=scale_b, block_rows=(1, 128)
    )
    spec, config = spec_of(tensors), GemmConfig.parse("128x128x128_2x1_cooperative_direct")
    given = arguments_of(tensors, spec, kernel_source(spec, config, "90a"), config, PROVIDER)
    for scales, tensor, wanted in (
        (given.scales_a, scale_a, (1, 130, 130, 1)),
        (given.scales_b, scale_b, (10, 1, 300, 128)),
    ):
        assert scales.data == tensor.data_ptr()
        assert (scales.stride, scales.step, scales.rows, scales.block_rows) == wanted
    assert (given.terms.scale_a, given.terms.scale_b, given.terms.scale_a_step) == (None, None, 0)
