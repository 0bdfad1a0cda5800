"""Each kind of kernel compiles for Hopper, without a GPU, and has the instructions it should have."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm.cutlass import (
    Arguments,
    Descriptor,
    DescriptorError,
    KernelKind,
    Matrix,
    kernel_source,
    raise_failed,
)
from distgemm.gemm.fused.arguments import FusedArguments
from distgemm.gemm.nvcc import SERIALISED, command, find_nvcc

MATRIX = MatrixSpec("bfloat16", 256, 256)
PRODUCT = GemmSpec(MATRIX, MATRIX, MATRIX)
WITH_PARTIAL = GemmSpec(MATRIX, MATRIX, MATRIX, partial=MATRIX)
LAYOUT = Path(__file__).parent / "data" / "epilogue_layout.cu"
KERNELS: dict[str, tuple[GemmSpec, KernelKind]] = {
    "128x256x64_1x2_cooperative": (PRODUCT, "gather"),
    "128x128x64_2x1_pingpong": (WITH_PARTIAL, "reduce"),
    "128x128x64_1x2_pingpong": (WITH_PARTIAL, "reduce_send"),
    "128x128x32_1x1_plain": (PRODUCT, "one_gemm"),
}


INSTRUCTIONS = {
    "128x256x64_1x2_cooperative": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "128x128x64_2x1_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "128x128x64_1x2_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "128x128x32_1x1_plain": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}
"""The instruction that multiplies in each kernel."""

KIND_INSTRUCTIONS: dict[str, tuple[KernelKind, ...]] = {
    "ld.acquire.sys.global.u32": ("gather", "reduce", "reduce_send"),
    "fence.acq_rel.sys": ("gather", "reduce", "reduce_send"),
    "st.relaxed.sys.global.u32": ("gather", "reduce", "reduce_send"),
    "st.async.shared::cluster": ("reduce", "reduce_send"),
    "cp.async.bulk.global.shared::cta.bulk_group": ("gather", "reduce_send"),
}
"""Instructions for flags of this GPU and of others, for tickets from block to block of a cluster, and for copies that
are no tensors; and the kinds of kernels that have them."""


@pytest.mark.sample(0)  # a kernel compiles for a minute
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_instructions_of_its_kind(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    spec, kind = KERNELS[name]
    source = kernel_source(spec, GemmConfig.parse(name), "90a", kind)
    keeping = ["--keep", "--keep-dir", str(tmp_path)]
    *words, path = command(source, nvcc, tmp_path / "kernel.so")
    words += ["-Xptxas", "-v", f"-I{Path(path).parent}", str(LAYOUT)]
    done = subprocess.run([*words, *keeping], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / LAYOUT.with_suffix(".ptx").name).read_text()
    output = done.stdout + done.stderr
    assert SERIALISED not in output
    assert "0 bytes spill stores, 0 bytes spill loads" in output
    assert not [line for line in output.splitlines() if re.search(r"distgemm/gemm/kernels/.*warning", line)]
    assert INSTRUCTIONS[name] in ptx
    with_tma = "plain" not in name
    assert ("wgmma" in ptx) is with_tma
    # TMA loads A and B, and stores D.
    assert ("cp.async.bulk.tensor.3d.shared::cluster.global" in ptx) is with_tma
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in ptx) is with_tma
    for instruction, kinds in KIND_INSTRUCTIONS.items():
        assert (instruction in ptx) is (kind in kinds), instruction
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    # The epilogue takes and puts each value where CUTLASS's own layouts of accumulators and shared memory have it.
    assert library.distgemm_misplaced() == (0 if with_tma else -1)
    check_descriptors(library, kind, with_tma)


def check_descriptors(functions: ctypes.CDLL, kind: KernelKind, with_tma: bool) -> None:
    """A descriptor that cannot be encoded is an error: on no machine does TMA take rows of 2**40 bytes."""
    near, far = Matrix(1 << 20, 256, 0), Matrix(1 << 21, 1 << 39, 0)
    base = Arguments(256, 256, 256, 1, near, far, near, near, near)
    given = base if kind == "one_gemm" else FusedArguments(base, near, near, 0, 1, 1, 1, 1, 1, 1, 256)
    assert functions.distgemm_arguments_size() == ctypes.sizeof(given)
    alignment = functions.distgemm_params_alignment()
    out = ctypes.create_string_buffer(functions.distgemm_params_size() + alignment)
    address = -(-ctypes.addressof(out) // alignment) * alignment
    failed = Descriptor()
    error = functions.distgemm_encode(ctypes.byref(given), ctypes.c_void_p(address), ctypes.byref(failed))
    assert (error != 0) is with_tma and failed.error == error
    if with_tma and failed.address == far.data:  # without a driver, nothing is encoded, and A fails before B
        assert (failed.modes, [*failed.extents[:3]], failed.strides[0]) == (3, [256, 256, 1], 1 << 40)
    if with_tma:
        with pytest.raises(DescriptorError, match=f"TMA cannot describe .*{failed.address:#x}"):
            raise_failed("a kernel", given, failed)


def test_a_failed_descriptor_is_named() -> None:
    given = Arguments(128, 256, 512, 1, *(Matrix(number << 20, 512, 0) for number in (1, 2, 3, 4, 3)))
    failed = Descriptor(2 << 20, (512, 256, 1), (1 << 40, 0), 3, 9, 1)
    with pytest.raises(DescriptorError) as raised:
        raise_failed("a kernel", given, failed)
    assert str(raised.value) == (
        "kernel a kernel: TMA cannot describe B: extents (512, 256, 1), the contiguous one first, strides "
        "(1099511627776, 0) bytes, bfloat16 at 0x200000 (CUDA_ERROR_INVALID_VALUE). Extents are 1 to 2**32, strides "
        "multiples of 16 and below 2**40 bytes"
    )
    failed.address = 3 << 20
    with pytest.raises(DescriptorError, match=r"describe C or the partial sum and D: extents"):
        raise_failed("a kernel", given, failed)
    fused = FusedArguments(given, Matrix(5 << 20), Matrix(6 << 20))
    for address, name in ((1, "A"), (5, "the operand that arrives"), (6, "D of another rank"), (7, "a matrix")):
        failed.address = address << 20
        with pytest.raises(DescriptorError, match=f"describe {name}: extents"):
            raise_failed("a kernel", fused, failed)


def test_lambdas_capture_no_structured_bindings() -> None:
    """That is C++20, and kernels are compiled as C++17: some host compilers refuse it, nvcc only warns."""
    folder = Path(__file__).parents[2] / "distgemm" / "gemm" / "kernels"
    for path in folder.iterdir():
        text = path.read_text()
        for binding in re.finditer(r"auto\s*(?:const\s*)?&?\s*\[", text):
            depth = 0
            for end in range(binding.end(), len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth < 0:
                    break
            scope = text[binding.end() : end]
            assert not re.search(r"\[[&=]", scope), f"{path.name}: {binding.group()}{scope[:60]}"
